"""The torch op that adds the results of the ranks of a tensor-parallel program.

    torch.ops.twell.all_reduce   y = the sum of the x of all ranks

`ranks` is their number. Each is a process of torch.distributed's default group, which must be of that size: gloo on a
CPU, NCCL on GPUs. Sums are those of that library, in the element type of x. In ONNX the op is the node DistCollective,
see `twellc.export.onnx_export`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist

from twellc.base.torch_private import OpOverload, collectives, get_default_group
from twellc.plugins.torch_library import define


def _reduce(x: Tensor, ranks: int) -> Tensor:
    """Add over the default process group."""
    found = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0
    if found != ranks:
        got = f"a process group of {found}" if found else "no process group"
        raise RuntimeError(
            f"twell: the program of one of {ranks} ranks needs {ranks} processes in torch.distributed's default group, "
            f"got {got}; start it with torchrun, and call torch.distributed.init_process_group"
        )
    group = get_default_group()
    y: Tensor = collectives.wait_tensor(collectives.all_reduce(x, "sum", group))
    return y


def _infer(x: Tensor, ranks: int) -> Tensor:
    """Give the shape and dtype of the result, for tracing."""
    return torch.empty_like(x)


ALL_REDUCE: OpOverload = define("all_reduce(Tensor x, int ranks) -> Tensor", _reduce, _reduce, _infer)
