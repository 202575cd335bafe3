"""Optimize an ONNX graph for TensorRT without changing a number in it.

torch's exporter runs onnxscript's optimizer, whose rules find constants up to a tolerance of 1e-8 absolute and 1e-5
relative: x + 1e-8 loses its addition, and x * 1.000001 its product. Here run its other rules, and those that drop
x + 0, x - 0, x * 1 and x / 1 with no tolerance. Left out is what computes new weights (of batch norms).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import onnx_ir
import onnx_ir.passes.common as passes
from onnxscript import optimizer
from onnxscript.rewriter import RewritePass, RewriteRule
from onnxscript.rewriter.pattern import Constant
from onnxscript.rewriter.rules import common as rules

from twellc.export.rotary_halves import RotaryHalves
from twellc.passes.graph.program import quiet_torch

_ROUNDS = 2  # as many as onnxscript's own optimizer takes


@quiet_torch()
def optimize_exactly(model: onnx_ir.Model) -> None:
    """Fold constants, drop what does nothing or is there twice, and make weights initializers, in place.

    Rotary positions are written as `rotary_halves` says.
    """
    result = onnx_ir.passes.Sequential(
        passes.InlinePass(),
        onnx_ir.passes.PassManager(
            [_FoldConstants(), RewritePass(_RULES), passes.RemoveUnusedNodesPass(), passes.RemoveUnusedOpsetsPass()],
            steps=_ROUNDS,
        ),
        RotaryHalves(),
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.LiftSubgraphInitializersToMainGraphPass(),
        passes.DeduplicateInitializersPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.OutputFixPass(),
        passes.NameFixPass(),
    )(model)
    assert result.model is model


class _FoldConstants(onnx_ir.passes.InPlacePass):
    def call(self, model: onnx_ir.Model) -> onnx_ir.passes.PassResult:
        found: onnx_ir.passes.PassResult = optimizer.fold_constants_ir(model, onnx_shape_inference=True)
        return found


def _dropping(operation: Callable[[Any, Any], Any], number: int) -> RewriteRule:
    """Return the rule that an operation with exactly this number as its second operand does nothing."""

    def pattern(_: Any, x: Any) -> Any:
        return operation(x, Constant(number, rel_tol=0, abs_tol=0))

    return RewriteRule(pattern, lambda op, x: op.Identity(x))


class _AtSlices:
    """A rule that is tried at slices alone: one of two outputs is compared with every pair of nodes elsewhere."""

    def __init__(self, rule: RewriteRule) -> None:
        self._rule = rule

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def try_rewrite(self, model: Any, graph: Any, node: onnx_ir.Node, **options: Any) -> Any:
        return self._rule.try_rewrite(model, graph, node, **options) if node.op_type == "Slice" else None


_RULES: list[Any] = [
    *_dropping(operator.mul, 1).commute(),
    *_dropping(operator.add, 0).commute(),
    _dropping(operator.sub, 0),
    _dropping(operator.truediv, 1),
    rules.dropout_inference_rule,
    rules.two_reshapes_matmul_reshape_rule,  # before its part below
    rules.one_reshape_matmul_reshape_rule,
    rules.cast_constant_of_shape_rule,
    rules.cast_constant_of_shape_without_value_rule,
    rules.collapse_slice_rule,
    rules.collapse_slice2_rule,
    rules.materialize_reshape_shape_rule,
    rules.min_min_rule,
    rules.max_max_rule,
    rules.min_max_rule,
    rules.max_min_rule,
    rules.successive_clip_relu_rule,
    rules.successive_relu_clip_rule,
    rules.successive_relu_rule,
    rules.successive_clip_rule,
    rules.cast_cast_rule,
    rules.no_op_cast_rule,
    rules.no_op_expand_rule,
    rules.flatten_to_reshape_rule,  # before the next
    rules.reshape_reshape_rule,
    _AtSlices(rules.slice_split_rule),
    rules.no_op_transpose_rule,
    rules.transpose_transpose_rule,
    rules.unsqueeze_unsqueeze_rule,
    rules.squeeze_reshape_1d_rule,
    rules.no_op_dynamic_scatter_nd_rule,
    rules.no_op_static_scatter_nd_rule,
    rules.remove_optional_bias_from_conv_rule,
    rules.remove_optional_bias_from_conv_transpose_rule,
    rules.remove_optional_bias_from_gemm_rule,
]
