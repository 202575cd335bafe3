"""The process that builds a plan: `python -m twellc.export.build_worker`.

TensorRT ends the process on some faults, does not return for an interrupt, and holds several copies of the weights; in
a process of its own it takes nothing else down and leaves no memory behind. It reads one JSON request from standard
input and answers on standard output in JSON lines: `{"phase": …}` while it works, then `{"plan": …}` or `{"error": …}`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from twellc.errors import UserError
from twellc.export.tensorrt_host import Host, create_network, find_host, make_logger, register_plugins


def build(request: dict[str, Any], answer: TextIO) -> dict[str, Any]:
    """Build a plan and write it.

    Args:
        request: `backend`, `onnx` (path), `plan` (path) and `profiles`: for each profile the `min`, `opt` and `max`
            shapes by input name.
        answer: Receives the phases.

    Returns:
        The plan's `inputs`, `outputs` and `plugin_layers`.

    Raises:
        UserError: TensorRT refuses the graph, the shapes or a plugin.
    """
    host = find_host(request["backend"])
    trt = host.module
    register_plugins(host)
    messages: list[str] = []
    logger = make_logger(host, messages)
    builder = trt.Builder(logger)
    network = create_network(host, builder)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(request["onnx"]):
        errors = [parser.get_error(i).desc() for i in range(parser.num_errors)]
        raise UserError(
            f"{host.name} {host.version}", f"the ONNX parser refuses the model ({reasons(messages + errors)})",
            fix="Keep the graph with --onnx to look at it.",
        )  # fmt: skip
    config = builder.create_builder_config()
    config.progress_monitor = _monitor(host, answer)
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    if any(-1 in tensor.shape for tensor in inputs):
        for ranges in request["profiles"]:
            profile = builder.create_optimization_profile()
            for tensor in inputs:
                shapes = ranges[tensor.name]
                profile.set_shape(tensor.name, shapes["min"], shapes["opt"], shapes["max"])
            config.add_optimization_profile(profile)
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    data = builder.build_serialized_network(network, config)
    if data is None:
        raise UserError(
            f"{host.name} {host.version}", f"the builder refuses the network ({reasons(messages)})",
            fix="If a shape is to blame, change --profile.",
        )  # fmt: skip
    with Path(request["plan"]).open("wb") as stream:
        stream.write(data)
    return {
        "inputs": [_describe(tensor) for tensor in inputs],
        "outputs": [_describe(network.get_output(i)) for i in range(network.num_outputs)],
        "plugin_layers": [layer.name for layer in layers if layer.type == trt.LayerType.PLUGIN_V3],
    }


def reasons(messages: list[str]) -> str:
    """Join the first lines of TensorRT's error messages."""
    lines = [line.strip() for message in messages for line in message.strip().splitlines() if line.strip()]
    return "; ".join(dict.fromkeys(lines[:3])) or "it gives no reason"


def _describe(tensor: Any) -> dict[str, Any]:
    return {"name": tensor.name, "dtype": tensor.dtype.name.lower(), "shape": list(tensor.shape)}


def _say(answer: TextIO, **content: Any) -> None:
    answer.write(json.dumps(content) + "\n")
    answer.flush()


def _monitor(host: Host, answer: TextIO) -> Any:
    class Monitor(host.module.IProgressMonitor):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            _say(answer, phase=phase_name)

        def phase_finish(self, phase_name: str) -> None:
            pass

        def step_complete(self, phase_name: str, step: int) -> bool:
            return True

    return Monitor()


def main() -> None:
    """Answer one request."""
    # TensorRT writes to standard output, too: keep a private copy for the answers, and send the rest to standard error.
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        _say(answer, plan=build(json.load(sys.stdin), answer))
    except UserError as error:
        _say(answer, error=str(error))


if __name__ == "__main__":
    main()
