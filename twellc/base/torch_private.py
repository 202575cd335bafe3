"""Names of torch that twellc uses and torch does not promise to keep, each with its place in torch.

They were tried with torch 2.11 to 2.13. A name is looked up when it is imported from here, `from
twellc.base.torch_private import FakeTensor`, so that importing this module imports nothing of torch. Where torch lacks
a name, the error says which; `tests/twellc/base/test_private.py` looks up all of them.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import TYPE_CHECKING, Any

from twellc.base.changes import Changed

if TYPE_CHECKING:
    from torch.export import ExportedProgram

TRIED = "2.11 to 2.13"
# Where torch has each name.
NAMES = {
    # graphs and their values
    "DataDependentOutputException": "torch._subclasses.fake_tensor.DataDependentOutputException",
    "DynamicOutputShapeException": "torch._subclasses.fake_tensor.DynamicOutputShapeException",
    "FakeTensor": "torch._subclasses.fake_tensor.FakeTensor",
    "FakeTensorMode": "torch._subclasses.fake_tensor.FakeTensorMode",
    "LazyGraphModule": "torch.fx._lazy_graph_module._LazyGraphModule",
    "HigherOrderOperator": "torch._ops.HigherOrderOperator",
    "OpOverload": "torch._ops.OpOverload",
    "enable_python_dispatcher": "torch._dispatch.python.enable_python_dispatcher",
    "pytree": "torch.utils._pytree",
    # sizes as expressions
    "FloorDiv": "torch.utils._sympy.functions.FloorDiv",
    "Mod": "torch.utils._sympy.functions.Mod",
    "PowByNatural": "torch.utils._sympy.functions.PowByNatural",
    "PythonMod": "torch.utils._sympy.functions.PythonMod",
    "PythonPrinter": "torch.utils._sympy.printers.PythonPrinter",
    "PythonReferenceAnalysis": "torch.utils._sympy.reference.PythonReferenceAnalysis",
    "ValueRanges": "torch.utils._sympy.value_ranges.ValueRanges",
    "bound_sympy": "torch.utils._sympy.value_ranges.bound_sympy",
    "int_oo": "torch.utils._sympy.numbers.int_oo",
    "sympy_interp": "torch.utils._sympy.interp.sympy_interp",
    # tracing, decomposing and exporting
    "TorchUserError": "torch._dynamo.exc.UserError",
    "graph_config": "torch.fx.config",
    "proxy_tensor": "torch.fx.experimental.proxy_tensor",
    "exported_program": "torch.export.exported_program",
    "fx_config": "torch.fx.experimental._config",
    "is_composite": "torch._export.utils._is_cia_op",
    "is_preserved": "torch._export.utils._is_preservable_cia_op",
    "type_promotion": "torch.onnx._internal.fx.passes.type_promotion",
    # archives
    "PyTorchFileReader": "torch._C.PyTorchFileReader",
    "pt2_package": "torch.export.pt2_archive._package",
    "serialize": "torch._export.serde.serialize",
    # modules and torch.compile
    "DropoutNd": "torch.nn.modules.dropout._DropoutNd",
    "OptimizedModule": "torch._dynamo.eval_frame.OptimizedModule",
    "dynamo": "torch._dynamo",
    "has_any_global_hook": "torch.nn.modules.module._has_any_global_hook",
    "is_traceable_wrapper_subclass": "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
    "scaled_mm": "torch._scaled_mm",
    # GPUs
    "current_raw_stream": "torch._C._cuda_getCurrentRawStream",
    # autograd
    "AutoDispatchBelowAutograd": "torch._C._AutoDispatchBelowAutograd",
    "DispatchKey": "torch._C.DispatchKey",
    "DispatchKeySet": "torch._C.DispatchKeySet",
    "ExcludeDispatchKeyGuard": "torch._C._ExcludeDispatchKeyGuard",
    "are_functorch_transforms_active": "torch._C._are_functorch_transforms_active",
    "current_graph_task_id": "torch._C._current_graph_task_id",
    "top_saved_tensors_default_hooks": "torch._C._autograd._top_saved_tensors_default_hooks",
    # several processes
    "collectives": "torch.distributed._functional_collectives",
    "get_default_group": "torch.distributed.distributed_c10d._get_default_group",
}


def __getattr__(name: str) -> Any:
    """Look up a name of `NAMES`; Python calls this for names that the module lacks.

    Raises:
        ImportError: torch does not have it.
    """
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found: Any = pkgutil.resolve_name(NAMES[name])
    except (ImportError, AttributeError) as error:
        version = importlib.import_module("torch").__version__
        raise ImportError(f"torch {version} has no {NAMES[name]}; twellc was tried with torch {TRIED}") from error
    globals()[name] = found
    return found


def schema_of(op: Any) -> Any:
    """Return the schema of an operator of torch: its name, its arguments, and whether it writes to one of them."""
    return op._schema


def guards_of(program: ExportedProgram) -> list[str]:
    """Return the checks that a program makes on inputs before it runs, as texts."""
    return program._guards_code


def set_guards(program: ExportedProgram, guards: list[str]) -> None:
    """Replace the texts that `guards_of` returns for a program."""
    program._guards_code = guards


def forward_mode_level() -> int:
    """Return how deep this thread is in forward mode, from 0 on; -1 outside of it."""
    level: int = sys.modules["torch.autograd.forward_ad"]._current_level  # importing torch imports it
    return level


def without_notes() -> Changed:
    """Let torch.export note neither a stack trace nor `tensor_meta` for each node, which takes a fifth of its time.

    Nothing shows the one, and `val` says all of the other. For all threads: enter it under `PROCESS_WIDE`. Releases of
    torch without the first choice note stack traces.
    """
    from twellc.base import torch_private

    no_stack_traces = (torch_private.graph_config, "do_not_emit_stack_traces", True)
    return Changed(no_stack_traces, (torch_private.proxy_tensor, "_extract_tensor_metadata", lambda value: None))


def compiled_when_run() -> Changed:
    """Let programs that are made meanwhile compile their graphs when these are run, as few are before the next pass.

    For all threads: enter it under `PROCESS_WIDE`. Programs of other threads do so, too, and compute the same.
    """
    from twellc.base import torch_private

    return Changed((torch_private.exported_program, "_create_graph_module_for_export", torch_private.LazyGraphModule))


def promoting_by_known_values() -> Changed:
    """Let torch.onnx.export take the values of nodes from their `meta` where it makes casts explicit.

    Else it runs every operator on shapes for that, which takes seconds in a deep model. Operators with operands that it
    casts are still run.

    It replaces a class of torch for all threads: enter it under `PROCESS_WIDE`, as `quiet_torch` holds it.
    """
    from twellc.base import torch_private

    promotion = torch_private.type_promotion

    class Interpreter(promotion._TypePromotionInterpreter):  # type: ignore[misc, name-defined]
        def run_node(self, n: Any) -> Any:
            if n.op != "call_function" or "val" not in n.meta:
                return super().run_node(n)
            with self._set_current_node(n):
                rule = promotion.get_type_promotion_rule(n, self.type_promotion_table)
                if rule:
                    self._maybe_promote_node(n, rule)
            return n.meta["val"]

    return Changed((promotion, "_TypePromotionInterpreter", Interpreter))
