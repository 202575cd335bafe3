"""Open a plan, and run it, in a process without twellc.

    python plan_child.py PLAN INPUT.pt OUTPUT.pt allow|refuse

The last argument says whether a plan may bring native code. Prints as JSON whether the plan opened and what TensorRT
logged of errors.
"""

import json
import sys
from pathlib import Path

import tensorrt as trt
import torch


class Logger(trt.ILogger):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def log(self, severity: trt.ILogger.Severity, message: str) -> None:
        if severity <= trt.ILogger.Severity.ERROR:
            self.said.append(message)


def main(plan: str, source: str, target: str, host_code: str) -> None:
    logger = Logger()
    runtime = trt.Runtime(logger)
    runtime.engine_host_code_allowed = host_code == "allow"
    engine = runtime.deserialize_cuda_engine(Path(plan).read_bytes())
    if engine is not None:
        context = engine.create_execution_context()
        x = torch.load(source).cuda()
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        context.set_input_shape(names[0], tuple(x.shape))
        y = torch.empty(tuple(context.get_tensor_shape(names[1])), dtype=x.dtype, device="cuda")
        for name, tensor in zip(names, (x, y), strict=True):
            context.set_tensor_address(name, tensor.data_ptr())
        assert context.execute_async_v3(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        torch.save(y.cpu(), target)
    assert "twellc" not in sys.modules
    sys.stdout.write(json.dumps({"opened": engine is not None, "said": logger.said}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
