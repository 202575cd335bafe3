"""Build TensorRT plans from ONNX files with `twell` nodes, and run them."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from twellc.errors import UserError
from twellc.export.build_worker import reasons
from twellc.export.profiles import Profile
from twellc.export.tensorrt_host import Host, make_logger, register_plugins

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
        inputs: Its input tensors.
        outputs: Its output tensors.
        plugin_layers: Names of its plugin layers.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]
    plugin_layers: list[str]


def build_plan(
    host: Host, onnx_path: Path, plan_path: Path, profiles: list[Profile], progress: Callable[[str], None]
) -> Plan:
    """Build a plan and write it to `plan_path`, in a process of its own.

    Args:
        host: The TensorRT to build with.
        onnx_path: An ONNX file; external data is read from its folder.
        plan_path: Where to write the plan.
        profiles: Optimization profiles.
        progress: Receives the name of each phase of the build.

    Raises:
        UserError: TensorRT refuses the graph, the shapes or a plugin, or ends without an answer.
    """
    request = {
        "backend": host.name,
        "onnx": str(onnx_path),
        "plan": str(plan_path),
        "profiles": [{name: asdict(shapes) for name, shapes in profile.items()} for profile in profiles],
    }
    command = [sys.executable, "-m", "twellc.export.build_worker"]
    answer: dict[str, Any] = {}
    with tempfile.TemporaryFile("w+") as errors:
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert worker.stdin is not None and worker.stdout is not None
        try:
            worker.stdin.write(json.dumps(request))
            worker.stdin.close()
            for line in worker.stdout:
                answer = json.loads(line)
                if "phase" in answer:
                    progress(answer["phase"])
            worker.wait()
        finally:
            worker.kill()
            worker.wait()
        errors.seek(0)
        said = errors.read().strip()
    if "error" in answer:
        raise UserError.from_message(answer["error"])
    if "plan" not in answer:
        end = f"signal {-worker.returncode}" if worker.returncode < 0 else f"status {worker.returncode}"
        raise UserError(
            f"{host.name} {host.version}", f"the builder ended with {end} ({said[-400:] or 'it said nothing'})",
            fix="Too little memory ends it with signal 9. Keep the graph with --onnx to look at it.",
        )  # fmt: skip
    plan = answer["plan"]
    inputs, outputs = (
        [Tensor(t["name"], t["dtype"], tuple(t["shape"])) for t in plan[k]] for k in ("inputs", "outputs")
    )
    return Plan(inputs, outputs, plan["plugin_layers"])


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
        raise UserError(str(path), f"{host.name} {host.version} cannot open the plan ({reasons(messages)})")
    context = engine.create_execution_context()
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    tensors: dict[str, torch.Tensor] = {}
    for name in (name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT):
        tensors[name] = inputs[name].cuda().contiguous()
        if not context.set_input_shape(name, tuple(tensors[name].shape)):
            raise UserError(str(path), f"refuses the shape of {name} ({reasons(messages)})")
    outputs = [name for name in names if name not in tensors]
    for name in outputs:
        dtype = _TORCH_DTYPES[engine.get_tensor_dtype(name).name]
        tensors[name] = torch.empty(tuple(context.get_tensor_shape(name)), dtype=dtype, device="cuda")
    for name, tensor in tensors.items():
        context.set_tensor_address(name, tensor.data_ptr())
    stream = torch.cuda.current_stream()
    if not context.execute_async_v3(stream.cuda_stream):
        raise UserError(str(path), f"the plan fails ({reasons(messages)})")
    stream.synchronize()
    return [tensors[name].cpu() for name in outputs]
