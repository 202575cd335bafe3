"""A plugin of pytest for racecheck: the products of torch on a GPU are computed on the CPU.

compute-sanitizer 2025.3.1 fails with an internal error in cuBLAS under racecheck, also without a kernel of twellc.
"""

from typing import Any

import torch
from torch import Tensor


def _mm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    product = (a.cpu().float() @ b.cpu().float()).to(a)
    return product if out is None else out.copy_(product)


def _addmm(added: Tensor, a: Tensor, b: Tensor, out: Tensor | None = None, **_: Any) -> Tensor:
    total = (added.cpu().float() + a.cpu().float() @ b.cpu().float()).to(a)
    return total if out is None else out.copy_(total)


def _add_to(added: Tensor, a: Tensor, b: Tensor, **_: Any) -> Tensor:
    return _addmm(added, a, b, added)


_LIBRARY = torch.library.Library("aten", "IMPL")
for _name, _run in (("mm", _mm), ("mm.out", _mm), ("addmm", _addmm), ("addmm.out", _addmm), ("addmm_", _add_to)):
    _LIBRARY.impl(_name, _run, "CUDA")
