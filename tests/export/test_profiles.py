"""Optimization profiles: parsing, and completing what the user leaves open."""

from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from tests.models import canonical
from twellc.base.errors import UserError
from twellc.export.profiles import resolve_profiles
from twellc.export.shapes import ShapeRange, parse_profile
from twellc.passes.sizes.inputs import input_specs, program_inputs

Range = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("x:1x1:1x128:8x2048", "x", ((1, 1), (1, 128), (8, 2048))),
        ("x:4:4:4", "x", ((4,), (4,), (4,))),
        ("a:b:1:2:3", "a:b", ((1,), (2,), (3,))),
    ],
)
def test_parse(text: str, name: str, expected: Range) -> None:
    assert parse_profile(text) == (name, ShapeRange(*expected))


OTHER_TEXTS = ["", "x", "x:1:2", ":1:2:3", "x:1:2:b", "x:1x:2x:3x", "x:1,2:1,2:1,2", "x:-1:1:1", "x: 1:2:3", "x:²:²:²"]
UNORDERED = ["x:2:1:3", "x:1:3:2", "x:0:1:1", "x:1x1:1:1x1", "x:1x5:2x4:3x6"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "not a profile; got .*; expected NAME:MIN:OPT:MAX") for text in OTHER_TEXTS),
        *((text, "the shapes are not a range; .*; expected 1 <= MIN <= OPT <= MAX") for text in UNORDERED),
    ],
)
def test_parse_refuses(text: str, message: str) -> None:
    with pytest.raises(UserError, match=f"--optimization-profile: {message}"):
        parse_profile(text)


def test_parse_takes_sizes_as_tensorrt_does() -> None:
    assert parse_profile("x:1:2:2147483647")[1].max == (2**31 - 1,)
    for size in ("2147483648", "9" * 5000):
        with pytest.raises(UserError, match=r"the shapes are not a range; .* <= MAX <= 2147483647"):
            parse_profile(f"x:1x16:2x16:{size}x16")


class Masked(nn.Module):
    """Two inputs that share two dimensions, and one with another."""

    def forward(self, ids: Tensor, mask: Tensor, other: Tensor) -> Tensor:
        return (ids * mask).sum(1) + other.sum()


@pytest.fixture(scope="module")
def masked() -> ExportedProgram:
    batch, sequence = Dim("batch", min=1, max=64), Dim("sequence", min=2, max=512)
    shared = {0: batch, 1: sequence}
    inputs = torch.randn(3, 7), torch.randn(3, 7), torch.randn(5, 4)
    return canonical(Masked(), *inputs, dynamic=(shared, shared, {0: Dim("rows")}))


def resolve(program: ExportedProgram, *texts: str, **defaults: Any) -> tuple[list[dict[str, Range]], list[str]]:
    profiles, notes = resolve_profiles(program_inputs(program), list(map(parse_profile, texts)), defaults)
    return [{name: (r.min, r.opt, r.max) for name, r in profile.items()} for profile in profiles], notes


def test_input_specs(masked: ExportedProgram) -> None:
    ids, mask, other = input_specs(masked)
    assert [spec.name for spec in (ids, mask, other)] == ["ids", "mask", "other"]
    assert ids.shape == mask.shape
    assert other.shape[1] == 4
    assert isinstance(other.shape[0], sympy.Symbol)
    assert ids.dtype == torch.float32


def test_defaults_from_the_bounds_of_the_export(masked: ExportedProgram) -> None:
    ((profile,), notes) = resolve(masked)
    assert profile["ids"] == profile["mask"] == ((1, 2), (3, 7), (64, 512))
    assert profile["other"] == ((1, 4), (5, 4), (2048, 4))
    assert notes == [
        "a dimension of other has no upper bound; the plan takes 1 to 2048 (--optimization-profile changes it)"
    ]


def test_given_defaults_come_first(masked: ExportedProgram) -> None:
    symbol = str(input_specs(masked)[0].shape[0])
    ((profile,), _) = resolve(masked, **{symbol: (2, 4, 8)})
    assert profile["ids"] == ((2, 2), (4, 7), (8, 512))


def test_shared_dimensions_follow(masked: ExportedProgram) -> None:
    ((profile,), notes) = resolve(masked, "ids:1x2:4x16:8x32", "other:1x4:1x4:9x4")
    assert profile["mask"] == profile["ids"] == ((1, 2), (4, 16), (8, 32))
    assert profile["other"] == ((1, 4), (1, 4), (9, 4))
    assert notes == []


def test_several_profiles(masked: ExportedProgram) -> None:
    """Given again for the same input, a range starts the next profile."""
    profiles, _ = resolve(masked, "ids:1x2:1x2:1x2", "ids:2x8:2x8:2x8", "other:1x4:1x4:1x4")
    assert [profile["ids"][2] for profile in profiles] == [(1, 2), (2, 8)]
    assert [profile["mask"] for profile in profiles] == [profile["ids"] for profile in profiles]
    assert [profile["other"][2] for profile in profiles] == [(1, 4), (2048, 4)]


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "unknown input": (("idz:1x2:1x2:1x2",), "the model has no such input; got idz; expected ids or mask or other"),
    "rank": (("ids:2:2:2",), "ids has 2 dimensions; got 1 in the profile"),
    "fixed dimension": (
        ("other:1x5:1x5:1x5",),
        "dimension 1 of other is fixed in the model; got (5, 5, 5); expected 4",
    ),
    "below the export's range": (("ids:1x1:1x2:1x4",), "dimension 1 of ids leaves the range of the exported model"),
    "above the export's range": (("ids:1x2:1x2:65x4",), "got 1 to 65; expected 1 to 64"),
    "conflict": (("ids:1x2:1x2:4x4", "mask:1x2:1x2:5x4"), "dimension 0 of mask is shared with another input"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, masked: ExportedProgram) -> None:
    texts, reason = REFUSED[case]
    with pytest.raises(UserError) as refusal:
        resolve(masked, *texts)
    assert str(refusal.value).startswith("--optimization-profile: ")
    assert reason in str(refusal.value)


def test_static_model() -> None:
    program = canonical(nn.Linear(16, 16), torch.randn(5, 16))
    assert resolve(program) == ([{"input": ((5, 16),) * 3}], [])
    assert resolve(program, "input:5x16:5x16:5x16")[0] == [{"input": ((5, 16),) * 3}]
    with pytest.raises(UserError, match="dimension 0 of input is fixed in the model"):
        resolve(program, "input:1x16:5x16:5x16")


class Scaled(nn.Module):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return x * lengths.max().item()


def test_numbers_without_bounds() -> None:
    """XLM takes the largest of its lengths out of a tensor."""
    inputs = torch.randn(3, 4), torch.tensor([1, 2])
    program = canonical(Scaled(), *inputs, dynamic=({0: Dim("rows", min=2, max=9)}, None))
    assert resolve(program)[0] == [{"x": ((2, 4), (3, 4), (9, 4)), "lengths": ((2,), (2,), (2,))}]


class Paired(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0] // 2, 2, -1).sum(1)


def test_multiple_of_a_dimension() -> None:
    program = canonical(Paired(), torch.randn(6, 16), dynamic=({0: 2 * Dim("half", min=1, max=32)},))
    assert resolve(program)[0] == [{"x": ((4, 16), (6, 16), (64, 16))}], (
        "torch.export takes no dynamic size below 2 here"
    )
    assert resolve(program, "x:4x16:8x16:10x16")[0] == [{"x": ((4, 16), (8, 16), (10, 16))}]
    with pytest.raises(UserError, match=r"dimension 0 of x has impossible sizes; got \(3, 8, 10\); expected 2\*n"):
        resolve(program, "x:3x16:8x16:10x16")
    with pytest.raises(UserError, match=r"leaves the range .*; got 4 to 66; expected 4 to 64"):
        resolve(program, "x:4x16:8x16:66x16")
    unbounded = canonical(Paired(), torch.randn(6, 16), dynamic=({0: 2 * Dim("half", min=3)},))
    with pytest.raises(UserError, match=r"leaves the range .*; got 4 to 8; expected 6 at least"):
        resolve(unbounded, "x:4x16:8x16:8x16")
