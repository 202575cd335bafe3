"""Build a TensorRT plan from an ONNX file with `twell` nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from twellc.errors import UserError
from twellc.export.profiles import Profile
from twellc.export.tensorrt_host import Host, create_network, make_logger, register_plugins

_TORCH_DTYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Tensor:
    """An input or output of a plan; -1 stands for a dynamic dimension."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """A built plan.

    Attributes:
        data: The serialized engine, a TensorRT host memory object that gives a buffer.
        inputs, outputs: Its tensors.
        plugin_layers: Names of its plugin layers.
    """

    data: Any
    inputs: list[Tensor]
    outputs: list[Tensor]
    plugin_layers: list[str]


def build_plan(host: Host, onnx_path: Path, profiles: list[Profile], progress: Callable[[str], None]) -> Plan:
    """Build a plan.

    Args:
        host: The TensorRT to build with.
        onnx_path: An ONNX file; external data is read from its folder.
        profiles: Optimization profiles; only dynamic inputs need ranges.
        progress: Receives the name of each phase of the build.

    Raises:
        UserError: TensorRT refuses the graph, the shapes or a plugin.
    """
    trt = host.module
    register_plugins(host)
    messages: list[str] = []
    logger = make_logger(host, messages)
    builder = trt.Builder(logger)
    network = create_network(host, builder)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(onnx_path)):
        errors = [parser.get_error(i).desc() for i in range(parser.num_errors)]
        raise UserError(
            f"{host.name} {host.version}", f"the ONNX parser refuses the model ({_reasons(messages + errors)})",
            fix="Keep the graph with --onnx to look at it.",
        )  # fmt: skip
    config = builder.create_builder_config()
    config.progress_monitor = _monitor(host, progress)
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    for ranges in profiles:
        if not any(-1 in tensor.shape for tensor in inputs):
            break
        profile = builder.create_optimization_profile()
        for tensor in inputs:
            shapes = ranges[tensor.name]
            profile.set_shape(tensor.name, shapes.min, shapes.opt, shapes.max)
        config.add_optimization_profile(profile)
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    plugins = [layer.name for layer in layers if layer.type == trt.LayerType.PLUGIN_V3]
    data = builder.build_serialized_network(network, config)
    if data is None:
        raise UserError(
            f"{host.name} {host.version}", f"the builder refuses the network ({_reasons(messages)})",
            fix="If a shape is to blame, change --profile.",
        )  # fmt: skip
    outputs = [network.get_output(i) for i in range(network.num_outputs)]
    return Plan(data, [_describe(t) for t in inputs], [_describe(t) for t in outputs], plugins)


def run_plan(host: Host, path: Path, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Run a plan on this machine's GPU.

    Args:
        host: The TensorRT that it was built with.
        path: The plan.
        inputs: CPU tensors by name.

    Returns:
        The outputs as CPU tensors, in the engine's order.

    Raises:
        UserError: torch sees no GPU, or TensorRT refuses the plan or the shapes.
    """
    if not torch.cuda.is_available():
        raise UserError(str(path), "this torch was built without CUDA", fix="Install a CUDA build of torch.")
    trt = host.module
    register_plugins(host)
    messages: list[str] = []
    runtime = trt.Runtime(make_logger(host, messages))
    engine = runtime.deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        raise UserError(str(path), f"{host.name} {host.version} cannot open the plan ({_reasons(messages)})")
    context = engine.create_execution_context()
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    tensors: dict[str, torch.Tensor] = {}
    for name in (name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT):
        tensors[name] = inputs[name].cuda().contiguous()
        if not context.set_input_shape(name, tuple(tensors[name].shape)):
            raise UserError(str(path), f"refuses the shape of {name} ({_reasons(messages)})")
    outputs = [name for name in names if name not in tensors]
    for name in outputs:
        dtype = _TORCH_DTYPES[engine.get_tensor_dtype(name).name]
        tensors[name] = torch.empty(tuple(context.get_tensor_shape(name)), dtype=dtype, device="cuda")
    for name, tensor in tensors.items():
        context.set_tensor_address(name, tensor.data_ptr())
    stream = torch.cuda.current_stream()
    if not context.execute_async_v3(stream.cuda_stream):
        raise UserError(str(path), f"the plan fails ({_reasons(messages)})")
    stream.synchronize()
    return [tensors[name].cpu() for name in outputs]


def _describe(tensor: Any) -> Tensor:
    return Tensor(tensor.name, tensor.dtype.name.lower(), tuple(tensor.shape))


def _reasons(messages: list[str]) -> str:
    lines = [line.strip() for message in messages for line in message.strip().splitlines() if line.strip()]
    return "; ".join(dict.fromkeys(lines[:3])) or "it gives no reason"


def _monitor(host: Host, progress: Callable[[str], None]) -> Any:
    class Monitor(host.module.IProgressMonitor):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            progress(phase_name)

        def phase_finish(self, phase_name: str) -> None:
            pass

        def step_complete(self, phase_name: str, step: int) -> bool:
            return True

    return Monitor()
