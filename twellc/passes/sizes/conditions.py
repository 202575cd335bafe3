"""The conditions on the sizes of its inputs under which a traced program is right, and the sizes that fulfil them.

Where a model compares sizes, torch.export follows the branch that the example sizes take. It writes the outcome down as
an assertion in the graph, `_assert_scalar`, or as a guard, a text that the program's module checks first.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import sympy
import torch
from numpy.typing import NDArray
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from twellc.base.errors import UserError
from twellc.base.torch_private import (
    FloorDiv,
    Mod,
    PowByNatural,
    PythonMod,
    PythonReferenceAnalysis,
    ValueRanges,
    bound_sympy,
    guards_of,
    int_oo,
    pytree,
    sympy_interp,
)
from twellc.passes.graph.program import largest_size, user_inputs

ASSERTION = torch.ops.aten._assert_scalar.default
_OF_TENSORS = (torch.ops.aten._assert_async.default, torch.ops.aten._assert_async.msg)
# Least and largest size by symbol; None where there is no bound.
SizeRanges = Mapping[str, tuple[int, int | None]]
Held = NDArray[np.bool_]
# The most combinations of sizes that are all tried, how many of more are, and up to which size without a bound.
_MOST_TRIED, _MOST_SAMPLED, _LARGEST_SAMPLED = 1 << 22, 1 << 16, 1 << 20


class Verdict(IntEnum):
    """Whether a condition holds for sizes."""

    HOLDS = 0
    UNKNOWN = 1
    FAILS = 2


# ---- the assertions of a program ----


def size_assertions(program: ExportedProgram) -> list[sympy.Basic]:
    """Return the conditions on sizes of inputs under which a program is right, but that none of them is 1."""
    sizes = _size_symbols(program)
    nodes = program.graph.find_nodes(op="call_function", target=ASSERTION)
    conditions = dict.fromkeys([*map(condition_of, nodes), *_guards(program)])
    not_one = {sympy.Ne(symbol, 1) for condition in conditions for symbol in condition.free_symbols}
    return [each for each in conditions if each not in not_one and {str(s) for s in each.free_symbols} <= sizes]


def equalities_joined(conditions: list[sympy.Basic]) -> list[sympy.Basic]:
    """Return conditions with `a <= b` and `b <= a`, as broadcasts leave them, as one, solved for a size if possible."""
    differences = {}
    for condition in conditions:
        if isinstance(condition, sympy.Le | sympy.Ge):
            low, high = (condition.lhs, condition.rhs) if isinstance(condition, sympy.Le) else condition.args[::-1]
            differences[condition] = sympy.expand(low - high)
    found: dict[sympy.Basic, None] = {}
    for condition in conditions:
        difference = differences.get(condition)
        if difference is None or -difference not in differences.values():
            found[condition] = None
            continue
        terms = difference.as_coefficients_dict()
        for sign in (-1, 1):
            alone = [term for term, factor in terms.items() if factor == sign]
            if len(alone) == 1 and alone[0].is_Symbol:
                found[sympy.Eq(alone[0], sympy.expand(alone[0] - sign * difference))] = None
                break
        else:
            found[condition] = None
    return list(found)


def value_assertions(program: ExportedProgram) -> list[Node]:
    """Return the assertions on values that a model reads, such as torch._assert_async, and torch._check of an item().

    What torch asserts of sizes that depend on values, such as how many elements are not zero, is always true.
    """
    nodes = program.graph.nodes
    return [node for node in nodes if node.target in _OF_TENSORS or (node.target is ASSERTION and _reads_an_item(node))]


def value_warnings(program: ExportedProgram) -> list[str]:
    """Point out that a model checks values as it runs."""
    checks = value_assertions(program)
    return ["the model checks values as it runs; the plan does not, and computes with any"] if checks else []


def condition_of(assertion: Node) -> sympy.Basic:
    """Return what an assertion in the graph asserts."""
    value: Any = assertion.args[0].meta["val"] if isinstance(assertion.args[0], Node) else assertion.args[0]
    return value.node.expr if isinstance(value, torch.SymBool) else sympy.sympify(bool(value))


def size_ranges(program: ExportedProgram) -> SizeRanges:
    """Return the sizes that a program was exported for."""
    found, symbols = {}, _size_symbols(program)
    for symbol, sizes in program.range_constraints.items():
        if str(symbol) in symbols:
            found[str(symbol)] = (max(1, int(sizes.lower)), largest_size(sizes.upper))
    return found


def _size_symbols(program: ExportedProgram) -> set[str]:
    dims = [dim for node in user_inputs(program) for dim in node.meta["val"].shape if isinstance(dim, torch.SymInt)]
    return {str(symbol) for dim in dims for symbol in dim.node.expr.free_symbols}


def _reads_an_item(assertion: Node) -> bool:
    pending = list(assertion.all_input_nodes)
    while pending:
        node = pending.pop()
        if node.target in (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default):
            return True
        pending += [each for each in node.all_input_nodes if not isinstance(each.meta.get("val"), torch.Tensor)]
    return False


def _guards(program: ExportedProgram) -> list[sympy.Basic]:
    """Return the guards of a program, which are texts such as `L['x'].size()[1] + L['y'].size()[1] > 20`.

    Raises:
        UserError: One cannot be read.
    """
    found, inputs = [], guarded_inputs(program) if guards_of(program) else {}
    names = {f"input_{node.name}": node.meta["val"] for node in inputs.values()}
    functions = {
        "math": math,
        "torch": torch,
        "Min": torch.sym_min,
        "Max": torch.sym_max,
        "min": torch.sym_min,
        "max": torch.sym_max,
    }
    for text in guards_of(program):
        for path, node in inputs.items():
            text = text.replace(path, f"input_{node.name}")
        # NOTE: code, but as torch itself runs it; an archive's was compared with a grammar before it was loaded.
        try:
            tree = ast.fix_missing_locations(_Symbolic().visit(ast.parse(text.strip(), mode="eval")))
            value = eval(compile(tree, "<guard>", "eval"), {**functions, **names})
        except Exception as error:  # as where it names an input that the program does not have
            what = f"what it asserts of sizes cannot be read ({text.strip()})"
            raise UserError("the model's graph", what, fix="Export the model again.") from error
        found.append(value.node.expr if isinstance(value, torch.SymBool) else sympy.sympify(bool(value)))
    return found


class _Symbolic(ast.NodeTransformer):
    """Writes `and`, `or` and `not` as functions: Python's own would decide by the sizes of the example."""

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        operation = ast.BitAnd() if isinstance(node.op, ast.And) else ast.BitOr()
        first, *others = node.values
        for other in others:
            first = ast.BinOp(first, operation, other)
        return first

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Not):
            return node
        return ast.Call(ast.Attribute(ast.Name("torch", ast.Load()), "sym_not", ast.Load()), [node.operand], [])


def guarded_inputs(program: ExportedProgram) -> dict[str, Node]:
    """Return the inputs of a program by what guards call them, such as `L['x']` and `L['x']['y'][0]`."""
    call = program.module_call_graph[0].signature
    assert call is not None
    specs = [spec for spec in program.graph_signature.input_specs if spec.kind == InputKind.USER_INPUT]
    placeholders = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    structure = pytree.tree_unflatten(range(call.in_spec.num_leaves), call.in_spec)
    found: dict[str, Node] = {}
    paths: list[Any] = [path for path, _ in pytree.tree_flatten_with_path(structure)[0]]
    for number, (path, spec) in enumerate(zip(paths, specs, strict=True)):
        if spec.arg.name not in placeholders:
            continue
        node, (kind, first, *rest) = placeholders[spec.arg.name], path
        within = pytree.keystr(tuple(rest))
        positional = [*(call.forward_arg_names or ()), *[node.name] * len(paths)]
        name = positional[first.idx] if kind.idx == 0 else first.key  # of args, or of kwargs
        several = re.fullmatch(r"(.+)_(\d+)", name)  # of *inputs
        if several:
            found[f"L['{several[1]}'][{several[2]}]{within}"] = node
        found |= {f"L['{name}']{within}": node, f"L['flat_args'][{number}]": node}
    return found


# ---- for which sizes they hold ----


def failing_assertions(program: ExportedProgram) -> list[sympy.Basic]:
    """Return the conditions that are not true of all sizes that a program was exported for."""
    ranges = size_ranges(program)
    return [each for each in size_assertions(program) if verdict(each, ranges) == Verdict.FAILS]


def verdict(condition: sympy.Basic, ranges: SizeRanges) -> Verdict:
    """Return whether a condition holds for all sizes within ranges, independent of one another.

    torch takes for granted that a size that varies is not 1, and asserts that nowhere: 1 is left out here, too.
    """
    symbols = sorted(condition.free_symbols, key=str)
    if not symbols:
        return Verdict.HOLDS if condition == sympy.true else Verdict.FAILS
    box = [varying(*ranges.get(str(symbol), (1, None))) for symbol in symbols]
    if _holds_by_bounds(condition, dict(zip(symbols, box, strict=True))):
        return Verdict.HOLDS
    every = [range(low, high + 1) for low, high in box if high is not None]
    whole = len(every) == len(box) and math.prod(map(len, every)) <= _MOST_TRIED
    some = int(_MOST_SAMPLED ** (1 / len(box)))
    held = holds_at(condition, symbols, every if whole else [_sampled(low, high, some) for low, high in box])
    if held is None:
        return Verdict.UNKNOWN
    if not held.all():
        return Verdict.FAILS
    return Verdict.HOLDS if whole else Verdict.UNKNOWN


def holds_at(condition: sympy.Basic, symbols: Sequence[Any], axes: Sequence[Sequence[int]]) -> Held | None:
    """Return for which sizes of symbols a condition holds, an axis for each symbol; None if that is unknown."""
    largest = {symbol: max(axis) for symbol, axis in zip(symbols, axes, strict=True)}
    dtype = np.int64 if _fits(condition, largest) else object
    grid = np.meshgrid(*(np.array(axis, dtype=dtype) for axis in axes), indexing="ij", sparse=True)
    divisions = (part for part in sympy.preorder_traversal(condition) if isinstance(part, FloorDiv | Mod | PythonMod))
    parts = [condition, *(sympy.Ne(division.args[1], 0) for division in divisions)]
    held = np.ones(tuple(map(len, axes)), dtype=bool)
    try:
        for part in parts:
            held &= np.asarray(sympy_interp(_OnArrays, dict(zip(symbols, grid, strict=True)), part), dtype=bool)
        return held
    except Exception:  # an operation that arrays do not have
        return None


_MOST_STEPS, _CHOICES = 2000, 16


def fitting_sizes(
    conditions: Sequence[sympy.Basic], ranges: SizeRanges, wanted: Mapping[str, int]
) -> dict[str, int] | None:
    """Return sizes within ranges for which all conditions hold, near those that are wanted; None where none was found.

    Args:
        conditions: The conditions.
        ranges: The least and the largest size by symbol.
        wanted: A size for each symbol; all that no condition is about stay.
    """
    solved = {str(each.lhs) for each in conditions if isinstance(each, sympy.Eq) and each.lhs.is_Symbol}
    symbols = {str(symbol): symbol for each in conditions for symbol in each.free_symbols}
    order = sorted((name for name in wanted if name in symbols), key=lambda name: name in solved)
    steps = 0

    def search(chosen: dict[Any, int], left: list[str]) -> dict[Any, int] | None:
        nonlocal steps
        steps += 1
        if not left or steps > _MOST_STEPS:
            return None if left else chosen
        name, symbol = left[0], symbols[left[0]]
        low, high = ranges.get(name, (1, None))
        sizes = np.array(_sampled(low, high, _MOST_SAMPLED))
        for condition in conditions:
            others = condition.free_symbols - {symbol}
            if symbol in condition.free_symbols and others <= chosen.keys():
                held = holds_at(condition.xreplace({each: chosen[each] for each in others}), [symbol], [sizes.tolist()])
                sizes = sizes if held is None else sizes[np.broadcast_to(held, sizes.shape)]
                if not len(sizes):
                    return None
        nearest = sizes[np.argsort(np.abs(sizes - wanted[name]), kind="stable")]
        spread = nearest[np.unique(np.linspace(0, len(nearest) - 1, _CHOICES).astype(int))]
        for size in dict.fromkeys([*nearest[:_CHOICES].tolist(), *spread.tolist()]):
            found = search({**chosen, symbol: size}, left[1:])
            if found is not None or steps > _MOST_STEPS:
                return found
        return None

    if any(condition == sympy.false for condition in conditions):
        return None
    found = search({}, order)
    return None if found is None else {**wanted, **{str(symbol): size for symbol, size in found.items()}}


def _fits(condition: sympy.Basic, largest: Mapping[Any, int]) -> bool:
    """Whether all numbers in a condition fit into 64 bits, since the product of its terms does; False for powers."""
    product = 1
    for part in sympy.preorder_traversal(condition):
        if part.is_Pow or isinstance(part, PowByNatural):
            return False
        if not part.args:
            product *= largest.get(part, 1) + 1 if part.is_Symbol else int(abs(part)) + 1 if part.is_Number else 1
    return product < 2**62


class _OnArrays(PythonReferenceAnalysis):  # type: ignore[misc]
    """Computes a condition on arrays of sizes; quotients by 0 are some number."""

    not_, minimum, maximum = map(staticmethod, (np.logical_not, np.minimum, np.maximum))

    @staticmethod
    def floordiv(a: Any, b: Any) -> Any:
        return a // np.where(b == 0, 1, b)

    @staticmethod
    def mod(x: Any, y: Any) -> Any:
        return x % np.where(y == 0, 1, y)

    python_mod = mod


def _holds_by_bounds(condition: sympy.Basic, box: dict[Any, tuple[int, int | None]]) -> bool:
    ranges = {symbol: ValueRanges(low, int_oo if high is None else high) for symbol, (low, high) in box.items()}
    forms = [condition]
    if isinstance(condition, sympy.core.relational.Relational):
        # Factors and terms that both sides have make bounds of each side alone too wide.
        forms.append(condition.func(sympy.factor(condition.lhs - condition.rhs), 0))
    for form in forms:
        try:
            bounds = bound_sympy(form, ranges)
        except Exception:  # torch has no bounds for every operation
            continue
        if bounds.is_singleton() and bounds.lower == sympy.true:
            return True
    return False


def varying(low: int, high: int | None) -> tuple[int, int | None]:
    """Return the range of a size without 1 where it varies."""
    return (max(low, 2) if high is None or high > 1 else low), high


def _sampled(low: int, high: int | None, count: int) -> list[int]:
    """Return about `count` sizes: the least, the largest, and some between."""
    last = max(_LARGEST_SAMPLED, low) if high is None else high
    third = count // 3
    between = np.unique(np.geomspace(low, last, third).astype(np.int64)).tolist()
    return sorted({*range(low, min(low + third, last + 1)), *between, *range(max(low, last - third), last + 1)})
