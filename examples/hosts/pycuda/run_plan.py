"""Run a plan with PyCUDA's memory: register the plugins, open the plan, run it on zeros.

    python run_plan.py bytelm.plan [--module tensorrt_rtx]

Needs the TensorRT that built the plan, twellc for the plugins, and PyCUDA: pip install "twellc[pycuda]".
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from pathlib import Path

import pycuda.autoprimaryctx  # noqa: F401  (makes a context: the one that TensorRT uses, too)
import pycuda.driver as cuda

from twellc.base.errors import UserError
from twellc.plugins import register

BYTES = {"FLOAT": 4, "INT32": 4, "HALF": 2, "BF16": 2, "INT64": 8, "BOOL": 1, "FP8": 1}


def main() -> None:
    """Run the plan named on the command line."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("plan", type=Path)
    arguments.add_argument("--module", default="tensorrt", help="tensorrt, tensorrt_rtx or tensorrt_rtx_bindings")
    options = arguments.parse_args()
    try:
        trt = importlib.import_module(options.module)
        for host in register(trt):
            print(f"TwELL plugins: {host.state} in {host.host} {host.version}")
        plan = options.plan.read_bytes()
    except (ImportError, OSError, UserError) as error:
        sys.exit(str(error))
    runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        sys.exit(f"{options.plan}: {trt.__name__} {trt.__version__} cannot open the plan")

    context = engine.create_execution_context()
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    inputs = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
    memory: dict[str, cuda.DeviceAllocation] = {}
    for name in inputs + [name for name in names if name not in inputs]:
        if name in inputs:
            # The shape that the first profile is tuned for.
            context.set_input_shape(name, engine.get_tensor_profile_shape(name, 0)[1])
        size = math.prod(context.get_tensor_shape(name)) * BYTES[engine.get_tensor_dtype(name).name]
        memory[name] = cuda.mem_alloc(size)
        cuda.memset_d8(memory[name], 0, size)
        context.set_tensor_address(name, int(memory[name]))
        print(f"{name}: {size} bytes")
    stream = cuda.Stream()
    if not context.execute_async_v3(stream.handle):
        sys.exit(f"{options.plan}: the plan fails")
    stream.synchronize()
    print("done")


if __name__ == "__main__":
    main()
