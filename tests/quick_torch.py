"""Let torch.export do faster what it does again for each program: that was half of the time of tests that trace."""

from __future__ import annotations

import functools
import gc
from typing import Any

import torch
import torch._export.utils as export_utils
import torch._ops
from torch.onnx._internal.exporter import _registration


class _Callable(type):
    """Stands for `Callable` in annotations of functions that torch defines thousands of times for each program."""

    def __getitem__(cls, _: object) -> _Callable:
        return cls

    def __instancecheck__(cls, value: object) -> bool:
        return callable(value)


def make_quick() -> None:
    """Replace three things inside torch, where it has them, and collect garbage less often."""
    gc.set_threshold(20_000, 10, 10)  # graphs are many objects, and hardly any is garbage while it is traced
    ops: Any = torch._ops
    if hasattr(ops, "Callable"):
        ops.Callable = _Callable("Callable", (), {})
    collect = getattr(export_utils, "_materialize_cpp_cia_ops", None)
    if collect is not None:
        known = 0

        def collect_new() -> None:
            """Look each operator up as torch does, but only if there are others than at the last time."""
            nonlocal known
            count = len(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))
            if count != known:
                collect()
                known = count

        export_utils._materialize_cpp_cia_ops = collect_new
    # Each export to ONNX parses the source of all its 500 translations: half of its time.
    registry: Any = _registration.ONNXRegistry
    parsed = functools.cache(registry.from_torchlib)

    def copied(**options: Any) -> Any:
        known = parsed(**options)
        made = registry()
        vars(made).update(vars(known), functions={target: [*each] for target, each in known.functions.items()})
        return made

    registry.from_torchlib = staticmethod(copied)
