"""Run a plan from Python: register the plugins, open the plan, run it on zeros.

    python run_plan.py bytelm.plan [--module tensorrt_rtx]

Needs the TensorRT that built the plan, twellc for the plugins and torch for memory on the GPU.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import torch

from twellc.base.errors import UserError
from twellc.plugins import register


def open_plan(trt: Any, path: Path) -> Any:
    """Return the engine of a plan; end the program with TensorRT's own words where there is none."""
    for host in register(trt):
        print(f"TwELL plugins: {host.state} in {host.host} {host.version}")
    errors: list[str] = []

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.ERROR:
                errors.append(message)

    runtime = trt.Runtime(Logger())
    engine = runtime.deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        sys.exit(
            f"{path}: {trt.__name__} {trt.__version__} cannot open the plan: {errors[0] if errors else 'no reason'}"
        )
    return engine


def main() -> None:
    """Run the plan named on the command line."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("plan", type=Path)
    arguments.add_argument("--module", default="tensorrt", help="tensorrt, tensorrt_rtx or tensorrt_rtx_bindings")
    options = arguments.parse_args()
    try:
        trt = importlib.import_module(options.module)
        engine = open_plan(trt, options.plan)
    except (ImportError, OSError, UserError) as error:
        sys.exit(str(error))

    dtypes = {"FLOAT": torch.float32, "HALF": torch.float16, "BF16": torch.bfloat16}
    dtypes |= {"INT32": torch.int32, "INT64": torch.int64, "BOOL": torch.bool, "FP8": torch.float8_e4m3fn}
    context = engine.create_execution_context()
    tensors: dict[str, torch.Tensor] = {}
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    inputs = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
    for name in inputs + [name for name in names if name not in inputs]:
        if name in inputs:
            # The shape that the first profile is tuned for.
            context.set_input_shape(name, engine.get_tensor_profile_shape(name, 0)[1])
        shape, dtype = tuple(context.get_tensor_shape(name)), dtypes[engine.get_tensor_dtype(name).name]
        tensors[name] = torch.zeros(shape, dtype=dtype, device="cuda")
        context.set_tensor_address(name, tensors[name].data_ptr())
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        if not context.execute_async_v3(stream.cuda_stream):
            sys.exit(f"{options.plan}: the plan fails")
    stream.synchronize()
    for name in names:
        if name not in inputs:
            print(f"{name} {list(tensors[name].shape)}: mean {tensors[name].float().mean().item():.4g}")


if __name__ == "__main__":
    main()
