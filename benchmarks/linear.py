"""Time a linear layer with its norm and its residual, in bf16 and in FP8, against what torch makes of it.

python benchmarks/linear.py --json results.json
python benchmarks/linear.py --layers 4096:4096:none --tokens 1,16
python benchmarks/linear.py --smoke

A layer is inputs:outputs:norm; without a norm it has a residual. Dense torch stands there as compiled, with norm and
residual, in FP8 with rows that are rounded behind the norm, too, and as its product alone, which for FP8
reads rows that were rounded beforehand. Times are of one call
within a CUDA graph over more weights than a cache holds, in turns (see block.py). Every size is checked
against float64 before it is timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import harness
import torch
from harness import NUMBERS, Calls, Columns, Listed, Result, Run, check, field, median, times_of
from torch import Tensor
from torch.nn import functional

from twellc.benchmarking.forms import EAGER, compile_rival, fp8_product, rounded_rows
from twellc.options.option import option
from twellc.plugins.fp8 import Fp8
from twellc.plugins.linear import LinearOperands, LinearOptions
from twellc.plugins.linear_op import run_linear

EPS = 1e-5
ROTATED_BYTES = 200e6  # of weights, several times the largest L2 cache
TWELL, TWELL_FP8, COMPILED, COMPILED_FP8 = "twell", "twell FP8", "compiled", "compiled FP8"
PRODUCT, PRODUCT_FP8 = "F.linear", "scaled_mm"


def dense(operands: LinearOperands[Tensor], norm: str) -> Tensor:
    """Compute a layer with torch's own functions, in FP8 if its weight is."""
    x = operands.x
    if norm == "rms":
        x = functional.rms_norm(x, x.shape[-1:], operands.norm_weight, EPS)
    elif norm == "layer":
        x = functional.layer_norm(x, x.shape[-1:], operands.norm_weight, None, EPS)
    narrow = operands.weight_scale is not None
    y = by_scaled_mm(rounded_rows(x), operands) if narrow else functional.linear(x, operands.weight)
    return y if operands.residual is None else operands.residual + y


def by_scaled_mm(x: Fp8, operands: LinearOperands[Tensor]) -> Tensor:
    """Multiply rows in FP8 by FP8 weights."""
    assert operands.weight_scale is not None
    return fp8_product(x, Fp8(operands.weight, operands.weight_scale), operands.x.dtype)


def by_twell(operands: LinearOperands[Tensor], options: LinearOptions) -> Tensor:
    """Compute a layer by the op."""
    return run_linear(operands, options)[0]


def make(tokens: int, inner: int, out: int, norm: str) -> list[LinearOperands[Tensor]]:
    """Draw a layer's input, and as many weights as are rotated."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=harness.DEVICE).bfloat16()

    x, rest = draw(tokens, inner), {"norm_weight": draw(inner)} if norm != "none" else {"residual": draw(tokens, out)}
    count = 2 + int(ROTATED_BYTES / (2 * inner * out)) if not harness.is_smoke() else 2
    return [LinearOperands(x=x, weight=draw(out, inner) * inner**-0.5, **rest) for _ in range(count)]


def in_fp8(operands: LinearOperands[Tensor]) -> LinearOperands[Tensor]:
    """Return a layer with its weight in FP8, a scale for each output."""
    weight, scale = Fp8.quantize(operands.weight, "row")
    return LinearOperands(**{**operands.named(), "weight": weight, "weight_scale": scale})


def exact_of(operands: LinearOperands[Tensor], norm: str) -> Tensor:
    """Compute a layer in float64 of its dequantized weight."""
    wide = operands.map(Tensor.double).named()
    if operands.weight_scale is not None:
        wide["weight"] *= wide.pop("weight_scale")
    return dense(LinearOperands(**wide), norm)


def measure(run: Run, tokens: int, inner: int, out: int, norm: str) -> Result:
    """Check and time one size."""
    layers, options = make(tokens, inner, out, norm), LinearOptions(norm=norm, eps=EPS)
    narrow = [in_fp8(each) for each in layers]
    for name, operands in ((TWELL, layers[0]), (TWELL_FP8, narrow[0])):
        calls = {EAGER: [functools.partial(dense, operands, norm)]}
        calls[name] = [functools.partial(by_twell, operands, options)]
        check(f"{tokens} tokens of {inner} -> {out}", calls, exact_of(operands, norm))
    torch._dynamo.reset()
    compiled = compile_rival(dense)
    x8 = rounded_rows(layers[0].x)
    contestants: dict[str, Calls] = {
        TWELL: [functools.partial(by_twell, each, options) for each in layers],
        TWELL_FP8: [functools.partial(by_twell, each, options) for each in narrow],
        COMPILED: [functools.partial(compiled, each, norm) for each in layers],
        COMPILED_FP8: [functools.partial(compiled, each, norm) for each in narrow],
        PRODUCT: [functools.partial(functional.linear, each.x, each.weight) for each in layers],
        PRODUCT_FP8: [functools.partial(by_scaled_mm, x8, each) for each in narrow],
    }
    size = {"tokens": tokens, "in": inner, "out": out, "norm": norm}
    return {**size, "times": run.time(run.chosen(contestants))}


def _bandwidth(name: str, element_bytes: int) -> Callable[[Result], str]:
    """Return a column of GB/s, of the weights alone."""

    def cell(result: Result) -> str:
        time = median(result, [name])
        return f"{element_bytes * result['in'] * result['out'] / time / 1e3:.0f}" if time else "-"

    return cell


COLUMNS: Columns = {
    "layer": lambda result: f"{result['in']} -> {result['out']}, {result['norm']}",
    "tokens": field("tokens"),
    **times_of(TWELL),
    "GB/s": _bandwidth(TWELL, 2),
    **times_of(TWELL_FP8),
    "FP8 GB/s": _bandwidth(TWELL_FP8, 1),
    **times_of(COMPILED, COMPILED_FP8, PRODUCT, PRODUCT_FP8),
}


def layer(text: str) -> tuple[int, int, str]:
    """Read a layer, `inputs:outputs:norm`."""
    inner, out, norm = text.split(":")
    return int(inner), int(out), norm


@dataclass(frozen=True, kw_only=True)
class Options(harness.Options):
    """The options of this benchmark.

    Attributes:
        layers: Inputs, outputs and norm of each layer; a norm is rms, layer or none.
    """

    layers: tuple[tuple[int, int, str], ...] = option(
        "2048:6144:rms,2048:2048:none,4096:6144:rms", "IN:OUT:NORM,…", Listed(layer, "2048:6144:rms")
    )
    tokens: tuple[int, ...] = option("1,4,8,16,17,32,512,2048,8192", "N,…", NUMBERS)


@harness.benchmark(Options, layers="128:384:layer,128:128:none", tokens="1,20", repeats=2)
def main(run: Run, options: Options) -> None:
    """Print a Markdown table of times in microseconds."""
    run.begin(COLUMNS)
    for inner, out, norm in options.layers:
        for tokens in options.tokens:
            run.add(measure(run, tokens, inner, out, norm))


if __name__ == "__main__":
    main()
