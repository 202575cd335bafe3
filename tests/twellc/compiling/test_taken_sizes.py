"""Models that compare sizes: a plan takes no size for which its model computes something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
from twellc.compiling.result import Translation
from twellc.compiling.translate_torch import translate
from twellc.export.shapes import parse_profile
from twellc.loaders import in_memory
from twellc.options.commands import compile_options
from twellc.passes.graph.execution import Runner


class Compares(nn.Module):
    """A block over x and y, one behind the other, by what is true of their lengths."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.ffn = Plain(d_ff=64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        (batch, n, width), m = x.shape, y.shape[1]
        hidden = self.ffn(torch.cat([x, y], 1))
        match self.kind:
            case "sum":
                return hidden if n + m > 20 else -hidden
            case "product":
                return hidden if batch * n <= 100 else -hidden
            case "smallest":
                return hidden if min(n, m) >= 9 else -hidden
            case "equal":
                return -hidden if n == m else hidden
            case "multiple":
                return hidden if n % 8 == 0 else -hidden
            case "rest":
                return hidden if n % 3 == 1 else -hidden
            case "another":
                return -hidden if n == 7 else hidden
            case "groups":
                return hidden + x.view(batch, n // 8, 8, width).sum((1, 2))[:, None]
            case "always":
                return hidden if n + m > 1 else -hidden
            case "padded":
                padded = nn.functional.pad(x, (0, 0, 0, -n % 8))
                return hidden + padded.view(batch, -1, 8, width).sum((1, 2))[:, None]
            case "slice":
                return hidden[:, :9]
            case "value":
                torch._check(x.max().item() < 50)
                return hidden
        raise AssertionError(self.kind)


SUM = "dimension 1 of x + dimension 1 of y must be more than 20"
DEMANDS = {
    "sum": SUM,
    "product": "dimension 0 of x*dimension 1 of x must be at most 100",
    "smallest": "Min(dimension 1 of x, dimension 1 of y) must be at least 9",
    "equal": "dimension 1 of x must not be dimension 1 of y",
}
# Of one size torch.export itself takes only what is true of its whole range, unless it is to write assertions.
DEMANDS_OF_ONE = {
    "multiple": "dimension 1 of x must be a multiple of 8",
    "rest": "dimension 1 of x must be 4, 7, 10, …",
    "another": "dimension 1 of x must not be 7",
    "groups": "dimension 1 of x must be a multiple of 8",
}
TAKES_EVERY_SIZE = ["always", "padded", "slice"]


def shapes() -> Any:
    batch, n, m = Dim("batch", max=8), Dim("n", max=512), Dim("m", max=512)
    return ({0: batch, 1: n}, {0: batch, 1: m})


def inputs(n: int = 16, m: int = 9) -> tuple[Tensor, Tensor]:
    return torch.randn(2, n, 16), torch.randn(2, m, 16)


def archive(kind: str, folder: Path) -> Path:
    path = folder / f"{kind}.pt2"
    torch.export.save(models.export(Compares(kind), *inputs(), dynamic=shapes()), path)
    return path


def traced(kind: str, folder: Path) -> Path:
    return in_memory.save(Compares(kind).eval(), _Example(inputs(), None, shapes()), folder)


class _Example:
    def __init__(self, args: tuple[Any, ...], kwargs: Any, dynamic_shapes: Any) -> None:
        self.args, self.kwargs, self.dynamic_shapes = args, kwargs, dynamic_shapes


def translated(model: Path, *profiles: str, **options: Any) -> Translation:
    given = [parse_profile(profile) for profile in profiles]
    wanted = compile_options(model, None, onnx=model.parent / "m.onnx", backend="none", profiles=given, **options)
    return translate(wanted, lambda step: None)


def profile(n: str, m: str) -> list[str]:
    """Return profiles of x and y with lengths such as `12:16:64`."""
    return [f"{name}:{':'.join(f'2x{size}x16' for size in sizes.split(':'))}" for name, sizes in (("x", n), ("y", m))]


# ---- what is refused ----


@pytest.mark.parametrize("kind", DEMANDS | DEMANDS_OF_ONE)
def test_traced(kind: str, tmp_path: Path) -> None:
    demand = (DEMANDS | DEMANDS_OF_ONE)[kind]
    with pytest.raises(UserError) as refusal:
        translated(traced(kind, tmp_path))
    assert f"the model does not take every size: {demand}. Compile it for such sizes by --profile." in str(
        refusal.value
    )


@pytest.mark.parametrize("kind", DEMANDS)
@pytest.mark.parametrize("deferred", [False, True])
def test_archives(kind: str, deferred: bool, tmp_path: Path) -> None:
    """torch writes what it found out as guards or, as it was asked, as assertions in the graph."""
    program = models.export(Compares(kind), *inputs(), dynamic=shapes(), deferred=deferred)
    torch.export.save(program, tmp_path / "m.pt2")
    with pytest.raises(UserError) as refusal:
        translated(tmp_path / "m.pt2")
    assert f"the model does not take every size: {DEMANDS[kind]}. Compile it" in str(refusal.value)


def test_inputs_within_others(tmp_path: Path) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ffn = Plain(d_ff=64)

        def forward(self, several: list[Tensor], *more: Tensor, named: dict[str, Tensor]) -> Tensor:
            hidden = self.ffn(torch.cat([*several, *more, *named.values()], 1))
            return hidden if several[1].shape[1] + more[0].shape[1] > named["z"].shape[1] else -hidden

    x = [torch.randn(2, size, 16) for size in (3, 5, 7, 11)]
    dims = {1: Dim.DYNAMIC}
    program = torch.export.export(
        Nested().eval(), ([x[0], x[1]], x[2]), {"named": {"z": x[3]}},
        dynamic_shapes={"several": [dims, dims], "more": (dims,), "named": {"z": dims}},
    )  # fmt: skip
    torch.export.save(program, tmp_path / "m.pt2")
    # What is in memory is written down with plain dictionaries of its inputs.
    for model in (tmp_path / "m.pt2", in_memory.save(program, _Example((), None, None), tmp_path)):
        with pytest.raises(UserError, match=r"dimension 1 of several_1.* must be .*dimension 1 of named_z"):
            translated(model)


def test_the_command(cli: Cli, tmp_path: Path) -> None:
    model, graph = archive("sum", tmp_path), tmp_path / "m.onnx"
    failed(cli("compile", model, "--backend", "none", "--onnx", graph), SUM, "--profile")
    assert not graph.exists()
    fitting = [part for each in profile("12:16:64", "9:9:32") for part in ("--profile", each)]
    result = cli("compile", model, "--backend", "none", "--onnx", graph, *fitting)
    assert result.exit_code == 0, result.stderr
    result = cli("check", model, graph)
    assert result.exit_code == 0 and "within tolerance" in result.stdout


def test_every_profile_counts(tmp_path: Path) -> None:
    model = archive("sum", tmp_path)
    assert translated(model, *profile("12:12:12", "9:9:9")).layers[0].decision
    with pytest.raises(UserError, match="must be more than 20"):
        translated(model, *profile("12:12:12", "8:8:8"))
    with pytest.raises(UserError, match="dimension 1 of x must be 12 at least"):
        translated(model, *profile("12:12:12", "9:9:9"), *profile("2:12:12", "9:9:9"))


def test_a_size_that_is_an_expression(tmp_path: Path) -> None:
    half = Dim("half", max=256)
    dims = ({0: Dim("batch", max=8), 1: 2 * half}, {0: Dim("batch", max=8), 1: Dim("m", max=512)})
    program = models.export(Compares("multiple"), *inputs(), dynamic=dims, deferred=True)
    torch.export.save(program, tmp_path / "m.pt2")
    with pytest.raises(UserError, match="dimension 1 of x must be a multiple of 8"):
        translated(tmp_path / "m.pt2")
    assert translated(tmp_path / "m.pt2", *profile("8:8:8", "9:9:9")).layers


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


def test_t5_takes_every_size(t5: Path, tmp_path: Path) -> None:
    """It has an encoder and a decoder of different lengths."""
    found = translate(compile_options(t5, None, onnx=tmp_path / "m.onnx", backend="none"), lambda step: None)
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
