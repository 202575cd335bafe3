"""What programs assert of sizes, and whether it holds: each verdict against every size of a small range."""

import itertools

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, PythonMod

from tests.models import export, functionalize
from twellc.passes.graph.program import editable
from twellc.passes.sizes.conditions import (
    ASSERTION,
    SizeRanges,
    Verdict,
    failing_assertions,
    holds_at,
    size_assertions,
    value_assertions,
    verdict,
)

b, n, m = sympy.symbols("b n m", integer=True, positive=True)
FRAMES = FloorDiv(n, 10) - 1
CONDITIONS = [
    n + m > 20, n + m < 3000, n * b <= 100, sympy.Ne(n, 7), sympy.Ne(n, m), sympy.Eq(n, m), m <= n,
    sympy.Eq(Mod(n, 8), 0), sympy.Eq(PythonMod(-n, 8), 0), sympy.Eq(b * n, 8 * b * FloorDiv(n, 8)),
    sympy.Ne(b * FRAMES, b), sympy.Ne(Mod(b, b * FRAMES), 0), sympy.Eq(Mod(n, FloorDiv(n, 4)), 0), b * FRAMES >= 2,
    Min(n, m) >= 9, Max(n, m) <= 40, sympy.And(n > 3, m > 3), sympy.Or(n > 30, m > 2), n**3 < 200_000,
    sympy.Eq(Mod(n + PythonMod(-n, 8), 8), 0),
]  # fmt: skip
RANGES: list[SizeRanges] = [
    {"b": (1, 3), "n": (1, 60), "m": (1, 25)},
    {"b": (2, 2), "n": (30, 58), "m": (9, 29)},
    {"b": (1, 1), "n": (8, 8), "m": (1, 1)},
    {"b": (3, 4), "n": (12, 40), "m": (12, 40)},
]


def by_trying(condition: sympy.Basic, ranges: SizeRanges) -> Verdict:
    """Substitute every size; a division by 0 raises in a program."""
    symbols = sorted(condition.free_symbols, key=str)
    axes = []
    for symbol in symbols:
        low, high = ranges[str(symbol)]
        assert high is not None
        axes.append(range(max(low, 2) if high > 1 else low, high + 1))
    for sizes in itertools.product(*axes):
        try:
            value = condition.xreplace(dict(zip(symbols, map(sympy.Integer, sizes), strict=True)))
        except ZeroDivisionError:
            value = sympy.false
        if value != sympy.true:
            return Verdict.FAILS
    return Verdict.HOLDS


@pytest.mark.parametrize("condition", CONDITIONS, ids=str)
def test_verdicts(condition: sympy.Basic) -> None:
    for ranges in RANGES:
        assert verdict(condition, ranges) == by_trying(condition, ranges), ranges


LARGE: SizeRanges = {"b": (1, 65536), "n": (30, 1 << 24), "m": (1, None)}


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (b * FRAMES >= 2, Verdict.HOLDS),
        (sympy.Ne(b * FRAMES, b), Verdict.HOLDS),
        (n + m >= 32, Verdict.HOLDS),
        (n + m > 32, Verdict.FAILS),
        (n * m * b < 2**90, Verdict.UNKNOWN),
        (n * m * b < 2**60, Verdict.FAILS),
        (sympy.Ne(n, 1 << 24), Verdict.FAILS),
        (sympy.Eq(Mod(b * n, b), 0), Verdict.HOLDS),
        (sympy.Ne(Mod(b, b * FRAMES), 0), Verdict.UNKNOWN),
        (sympy.true, Verdict.HOLDS),
        (sympy.false, Verdict.FAILS),
    ],
    ids=str,
)
def test_verdicts_of_sizes_that_cannot_all_be_tried(condition: sympy.Basic, expected: Verdict) -> None:
    assert verdict(condition, LARGE) == expected


def test_numbers_beyond_64_bits_are_exact() -> None:
    held = holds_at(sympy.Eq(Mod(n * m * b, 2), 1), [b, m, n], [[2**31 - 1], [2**31 - 1], [2**31 - 1, 2**31 - 2]])
    assert held is not None and held.tolist() == [[[True, False]]]


class Compares(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        torch._check(x.max().item() < 50)
        hidden = torch.cat([x, y]).relu()
        return hidden if x.shape[0] + y.shape[0] > 20 and x.shape[0] + y.shape[0] > 2 else -hidden


@pytest.mark.parametrize("deferred", [False, True])
def test_what_stays_of_a_program(deferred: bool) -> None:
    dims = ({0: Dim("n", max=64)}, {0: Dim("m", max=64)})
    program = export(Compares(), torch.randn(16), torch.randn(9), dynamic=dims, deferred=deferred)
    assert len(value_assertions(program)) == 1
    assert [str(each) for each in failing_assertions(program)] == [str(each) for each in size_assertions(program)]
    stays = functionalize(program)
    assert value_assertions(stays) == [] and size_assertions(stays) == failing_assertions(program)
    assert len(stays.graph.find_nodes(op="call_function", target=ASSERTION)) == deferred
    assert editable(stays)._guards_code == program._guards_code


def test_nothing_stays_that_holds() -> None:
    dims = ({0: Dim("n", min=12, max=64)}, {0: Dim("m", min=9, max=64)})
    program = export(Compares(), torch.randn(16), torch.randn(9), dynamic=dims, deferred=True)
    assert failing_assertions(program) == []
    assert not functionalize(program).graph.find_nodes(op="call_function", target=ASSERTION)
