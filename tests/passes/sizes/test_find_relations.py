"""Models that compare sizes: no size runs for which a model computes something else, and every other is taken."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import twellc
from tests import models
from tests.conftest import Cli
from tests.models import Plain
from tests.twellc.test_cli import failed
from twellc.base.errors import UserError
from twellc.base.records import of_json
from twellc.compiling.result import Translation
from twellc.compiling.translate import translate_any
from twellc.export.shapes import parse_profile
from twellc.loaders import in_memory
from twellc.options.commands import compile_options
from twellc.passes.graph.execution import Runner
from twellc.passes.sizes.inputs import program_inputs
from twellc.passes.sizes.relations import SizeRelation, refuse_unrelated
from twellc.samples.samples import Limits, draw_samples


def padded(hidden: Tensor, x: Tensor) -> Tensor:
    groups = nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 8)).view(x.shape[0], -1, 8, x.shape[2])
    return hidden + groups.sum((1, 2))[:, None]


def grouped(hidden: Tensor, x: Tensor) -> Tensor:
    batch, n, width = x.shape
    return hidden + x.view(batch, n // 8, 8, width).sum((1, 2))[:, None]


def below_50(hidden: Tensor, x: Tensor) -> Tensor:
    torch._check(x.max().item() < 50)
    return hidden


# What is true of the lengths n and m of x and y if a block's result is to be returned, else its negative.
CONDITIONS: dict[str, Callable[[int, int, int], bool]] = {
    "sum": lambda batch, n, m: n + m > 20,
    "product": lambda batch, n, m: batch * n <= 100,
    "smallest": lambda batch, n, m: min(n, m) >= 9,
    "equal": lambda batch, n, m: n != m,
    "multiple": lambda batch, n, m: n % 8 == 0,
    "rest": lambda batch, n, m: n % 3 == 1,
    "another": lambda batch, n, m: n != 7,
    "always": lambda batch, n, m: n + m > 1,
}
# What is done with it otherwise.
CHANGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "groups": grouped, "padded": padded, "slice": lambda hidden, x: hidden[:, :9], "value": below_50,
}  # fmt: skip


class Compares(nn.Module):
    """A block over x and y, one behind the other, by what is true of their lengths."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.ffn = Plain(d_ff=64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.ffn(torch.cat([x, y], 1))
        if self.kind in CHANGES:
            return CHANGES[self.kind](hidden, x)
        return hidden if CONDITIONS[self.kind](x.shape[0], x.shape[1], y.shape[1]) else -hidden


SUM = "dimension 1 of x + dimension 1 of y must be more than 20"
# What sizes must be, and lengths of x and y that are taken, and others.
OF_SEVERAL: dict[str, tuple[str, tuple[int, int], tuple[int, int]]] = {
    "sum": (SUM, (12, 9), (12, 8)),
    "product": ("dimension 0 of x*dimension 1 of x must be at most 100", (50, 9), (51, 9)),
    "smallest": ("Min(dimension 1 of x, dimension 1 of y) must be at least 9", (9, 9), (16, 8)),
    "equal": ("dimension 1 of x must not be dimension 1 of y", (9, 8), (9, 9)),
}
# Of one size torch.export itself takes only what is true of its whole range, unless it is to write assertions.
DEMANDS = OF_SEVERAL | {
    "multiple": ("dimension 1 of x must be a multiple of 8", (24, 9), (12, 9)),
    "rest": ("dimension 1 of x must be 4, 7, 10, …", (16, 9), (15, 9)),
    "another": ("dimension 1 of x must not be 7", (8, 9), (7, 9)),
    "groups": ("dimension 1 of x must be a multiple of 8", (24, 9), (12, 9)),
}
TAKES_EVERY_SIZE = ["always", "padded", "slice"]


def shapes() -> Any:
    batch, n, m = Dim("batch", max=8), Dim("n", max=512), Dim("m", max=512)
    return ({0: batch, 1: n}, {0: batch, 1: m})


def inputs(n: int = 16, m: int = 9) -> tuple[Tensor, Tensor]:
    return torch.randn(2, n, 16), torch.randn(2, m, 16)


def archive(kind: str, folder: Path, deferred: bool = False, dynamic: Any = None) -> Path:
    path = folder / "m.pt2"
    torch.export.save(models.export(Compares(kind), *inputs(), dynamic=dynamic or shapes(), deferred=deferred), path)
    return path


def traced(kind: str, folder: Path) -> Path:
    return in_memory.save(Compares(kind).eval(), _Example(inputs(), None, shapes()), folder)


class _Example:
    def __init__(self, args: tuple[Any, ...], kwargs: Any, dynamic_shapes: Any) -> None:
        self.args, self.kwargs, self.dynamic_shapes = args, kwargs, dynamic_shapes


def translated(model: Path, *profiles: str, **options: Any) -> Translation:
    given = [parse_profile(profile) for profile in profiles]
    wanted = compile_options(
        model, None, onnx=model.parent / "m.onnx", backend="none", optimization_profiles=given, **options
    )
    return translate_any(wanted, lambda step: None)


def profile(n: str, m: str) -> list[str]:
    """Return profiles of x and y with lengths such as `12:16:64`."""
    return [f"{name}:{':'.join(f'2x{size}x16' for size in sizes.split(':'))}" for name, sizes in (("x", n), ("y", m))]


# ---- what a caller must keep ----


def check_relation(found: Translation, kind: str) -> None:
    """Check the relation of a translation, as a manifest has it."""
    (relation,) = (of_json(SizeRelation, each.to_json()) for each in found.relations)
    text, *lengths = DEMANDS[kind]
    assert relation.text == text and any(text in note for note in found.notes)
    taken, others = ({"x": (2, n, 16), "y": (2, m, 16)} for n, m in lengths)
    refuse_unrelated("m.plan", [relation], taken)
    with pytest.raises(UserError, match=re.escape(f"m.plan: the model does not take these sizes together: {text}")):
        refuse_unrelated("m.plan", [relation], others)
    program = models.export(Compares(kind), *inputs(), dynamic=shapes(), deferred=True)
    kept = draw_samples(Limits(program_inputs(program), None, None), {}, seed=0)
    for sample in kept:
        refuse_unrelated("samples", [relation], {name: tuple(value.shape) for name, value in sample.items()})


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", DEMANDS)
def test_traced(kind: str, tmp_path: Path) -> None:
    check_relation(translated(traced(kind, tmp_path)), kind)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", OF_SEVERAL)
@pytest.mark.parametrize("deferred", [False, True])
def test_archives(kind: str, deferred: bool, tmp_path: Path) -> None:
    """torch writes what it found out as guards or, as it was asked, as assertions in the graph."""
    check_relation(translated(archive(kind, tmp_path, deferred)), kind)


def test_inputs_within_others(tmp_path: Path) -> None:
    class Nested(Compares):
        def forward(self, several: list[Tensor], *more: Tensor, named: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
            hidden = self.ffn(torch.cat([*several, *more, *named.values()], 1))
            return hidden if several[1].shape[1] + more[0].shape[1] > named["z"].shape[1] else -hidden

    x = [torch.randn(2, size, 16) for size in (3, 5, 7, 11)]
    dims = {1: Dim.DYNAMIC}
    program = torch.export.export(
        Nested("").eval(), ([x[0], x[1]], x[2]), {"named": {"z": x[3]}},
        dynamic_shapes={"several": [dims, dims], "more": (dims,), "named": {"z": dims}},
    )  # fmt: skip
    torch.export.save(program, tmp_path / "m.pt2")
    # What is in memory is written down with plain dictionaries of its inputs.
    for model in (tmp_path / "m.pt2", in_memory.save(program, _Example((), None, None), tmp_path)):
        (relation,) = translated(model).relations
        assert re.search(r"dimension 1 of several_1.* must be .*dimension 1 of named_z", relation.text)


def test_the_command(cli: Cli, tmp_path: Path) -> None:
    model, graph = archive("sum", tmp_path), tmp_path / "m.onnx"
    result = cli("compile", model, "--backend", "none", "--onnx", graph, "--json")
    assert result.exit_code == 0 and SUM in result.stderr + result.stdout
    assert json.loads(result.stdout)["relations"] == [
        {"expression": "d0 + d1 > 20", "sizes": {"d0": "x[1]", "d1": "y[1]"}, "text": SUM}
    ]
    result = cli("check", model, graph)
    assert result.exit_code == 0 and "within tolerance" in result.stdout
    x, y = inputs(12, 8)
    np.savez(tmp_path / "given.npz", x=x.numpy(), y=y.numpy())
    failed(cli("check", model, graph, "--arrays", tmp_path / "given.npz"), SUM, "x[1] = 12, y[1] = 8", "x[1] = 13")


def test_no_size_of_a_profile(tmp_path: Path) -> None:
    model = archive("sum", tmp_path)
    assert translated(model, *profile("12:12:12", "9:9:9")).relations == []
    with pytest.raises(UserError, match=r"takes no size within the profile: .* must be more than 20"):
        translated(model, *profile("12:12:12", "9:9:9"), *profile("12:12:12", "8:8:8"))
    assert translated(model, *profile("12:12:12", "9:9:9"), *profile("2:12:12", "9:9:9")).relations


def test_a_size_that_is_an_expression(tmp_path: Path) -> None:
    half = Dim("half", max=256)
    dims = ({0: Dim("batch", max=8), 1: 2 * half}, {0: Dim("batch", max=8), 1: Dim("m", max=512)})
    model = archive("multiple", tmp_path, deferred=True, dynamic=dims)
    (relation,) = translated(model).relations
    assert relation.text == "dimension 1 of x must be a multiple of 8"
    assert [relation.holds({"d0": size}) for size in (8, 12, 16)] == [True, False, True]
    assert translated(model, *profile("8:8:8", "9:9:9")).relations == []


@pytest.mark.parametrize("text", ["__import__('os')", "d0.real", "d9 == 1", "d0 ** 2", "(", "[d0]", "min(d0, key=d0)"])
def test_what_is_not_a_relation(text: str) -> None:
    with pytest.raises(ValueError, match="not an expression over sizes"):
        SizeRelation(text, {"d0": "x[1]"}, "")


# ---- past keys and values ----


class WithPast(Compares):
    """A block behind attention over past keys and new ones, as a decoder with its cache as inputs."""

    def forward(self, x: Tensor, mask: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        keys = torch.cat([past, x], 1)
        scores = x @ keys.transpose(-1, -2) + mask[:, None]
        return self.ffn(scores.softmax(-1) @ keys), keys


def test_a_mask_as_long_as_past_and_tokens(cli: Cli, tmp_path: Path) -> None:
    batch, tokens, past = Dim("batch", max=8), Dim("tokens", max=64), Dim("past", max=64)
    given = torch.randn(2, 3, 16), torch.zeros(2, 8), torch.randn(2, 5, 16)
    dims = ({0: batch, 1: tokens}, {0: batch, 1: Dim.AUTO}, {0: batch, 1: past})
    torch.export.save(models.export(WithPast(""), *given, dynamic=dims), tmp_path / "m.pt2")
    (relation,) = translated(tmp_path / "m.pt2").relations
    assert relation.text == "dimension 1 of mask must be dimension 1 of past + dimension 1 of x"
    shapes = {"x": (2, 1, 16), "mask": (2, 9), "past": (2, 7, 16)}
    with pytest.raises(UserError, match=re.escape("expected mask[1] = 8")):
        refuse_unrelated("m.plan", [relation], shapes)
    result = cli("compile", tmp_path / "m.pt2", "--backend", "none", "--onnx", tmp_path / "m.onnx")
    assert result.exit_code == 0, result.stderr
    assert cli("check", tmp_path / "m.pt2", tmp_path / "m.onnx").exit_code == 0


# ---- what is not ----


@pytest.mark.parametrize("kind", TAKES_EVERY_SIZE)
def test_models_that_take_every_size(kind: str, tmp_path: Path) -> None:
    """A padded sequence that is one group, and a slice that is the whole: strides differ, which torch asserts."""
    module = Compares(kind).eval()
    program = in_memory.exported(module, _Example(inputs(), None, shapes()))
    torch.export.save(program, tmp_path / "m.pt2")
    assert translated(tmp_path / "m.pt2").warnings == []
    rewritten = twellc.rewrite(program, layers="none", dtype="bf16").dense
    for n, m in ((16, 9), (3, 6), (3, 2), (8, 1), (9, 30)):
        x, y = inputs(n, m)
        (got,) = Runner(rewritten)({"x": x, "y": y})
        torch.testing.assert_close(got, module(x, y), rtol=0.05, atol=0.2)


@pytest.mark.slow
def test_t5_takes_every_size(t5: Path, tmp_path: Path) -> None:
    """It has an encoder and a decoder of different lengths."""
    found = translate_any(compile_options(t5, None, onnx=tmp_path / "m.onnx", backend="none"), lambda step: None)
    assert found.warnings == [] and found.layers


def test_guards_that_name_no_input(tmp_path: Path) -> None:
    program = models.export(Compares("sum"), *inputs(), dynamic=shapes())
    program._guards_code = ["L['z'].size()[0] > 3"]
    with pytest.raises(UserError, match=r"what it asserts of sizes cannot be read \(L\['z'\]\.size\(\)\[0\] > 3\)"):
        twellc.rewrite(program)


def test_values(tmp_path: Path) -> None:
    warnings = translated(traced("value", tmp_path), trust_model=True).warnings
    assert warnings == ["the model checks values as it runs; the plan does not, and computes with any"]


# ---- programs of torch ----


@pytest.mark.parametrize("deferred", [False, True])
def test_a_rewritten_program_asserts_what_the_model_does(deferred: bool) -> None:
    module = Compares("sum").eval()
    program = models.export(module, *inputs(), dynamic=shapes(), deferred=deferred)
    rewritten = twellc.rewrite(program, layers="all", dtype="bf16").program
    assert "twell::" in str(rewritten.graph) or "twell." in str(rewritten.graph)
    x, y = inputs(12, 9)
    call = rewritten.module()
    torch.testing.assert_close(call(x, y), module(x, y), rtol=0.05, atol=0.2)
    with pytest.raises((RuntimeError, AssertionError), match="20"):
        call(x, y[:, :8])
