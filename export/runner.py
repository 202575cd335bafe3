"""Run a TensorRT plan on this machine's GPU."""

from __future__ import annotations

from pathlib import Path

import torch

from twellc.errors import UserError
from twellc.export.plan import reasons
from twellc.export.tensorrt_host import Host, make_logger
from twellc.plugins.registration import register

_TORCH_DTYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT8": torch.int8,
    "UINT8": torch.uint8,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "BOOL": torch.bool,
}


def run_plan(host: Host, path: Path, built_with: str, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Run a plan on this machine's GPU.

    Args:
        host: The TensorRT to run it with.
        path: The plan.
        built_with: The version of this TensorRT that built it, for the message where it does not open.
        inputs: CPU tensors by name.

    Returns:
        The outputs as CPU tensors, in the engine's order.

    Raises:
        UserError: TensorRT refuses the plan or the shapes, or torch sees no GPU.
    """
    trt = host.module
    register(host.module)
    messages: list[str] = []
    runtime = trt.Runtime(make_logger(host, messages))
    engine = runtime.deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        raise UserError(
            str(path), f"the plan cannot be opened ({reasons(messages)})", got=f"{host.name} {host.version}",
            expected=f"{host.name} {built_with}, which built it, on a GPU that it was built for",
            fix="Compile the model again with this TensorRT, or install the other. If a plugin is missing, `twellc "
            "plugins --check` says whether this TensorRT takes the plugins.",
        )  # fmt: skip
    if not torch.cuda.is_available():
        raise UserError(str(path), "this torch was built without CUDA", fix="Install a CUDA build of torch.")
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
