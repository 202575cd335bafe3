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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import session
import torch
from block import refuse_error, relative_error, time_rotated
from torch import Tensor
from torch.nn import functional

from twellc.benchmarking.forms import compile_rival, fp8_product
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
    y = by_scaled_mm(Fp8.round_rows(x.float()), operands) if narrow else functional.linear(x, operands.weight)
    return y if operands.residual is None else operands.residual + y


def by_scaled_mm(x: Fp8, operands: LinearOperands[Tensor]) -> Tensor:
    """Multiply rows in FP8 by FP8 weights."""
    assert operands.weight_scale is not None
    return fp8_product(x, Fp8(operands.weight, operands.weight_scale), operands.x.dtype)


def make(tokens: int, inner: int, out: int, norm: str) -> list[LinearOperands[Tensor]]:
    """Draw a layer's input, and as many weights as are rotated."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=session.DEVICE).bfloat16()

    x, rest = draw(tokens, inner), {"norm_weight": draw(inner)} if norm != "none" else {"residual": draw(tokens, out)}
    count = 2 + int(ROTATED_BYTES / (2 * inner * out)) if not session.is_smoke() else 2
    return [LinearOperands(x=x, weight=draw(out, inner) * inner**-0.5, **rest) for _ in range(count)]


def in_fp8(operands: LinearOperands[Tensor]) -> LinearOperands[Tensor]:
    """Return a layer with its weight in FP8, a scale for each output."""
    weight, scale = Fp8.quantize(operands.weight, "row")
    return LinearOperands(**{**operands.named(), "weight": weight, "weight_scale": scale})


def measure(tokens: int, inner: int, out: int, norm: str, repeats: int) -> dict[str, Any]:
    """Check and time one size."""
    layers, options = make(tokens, inner, out, norm), LinearOptions(norm=norm, eps=EPS)
    narrow = [in_fp8(each) for each in layers]
    for name, operands in ((TWELL, layers[0]), (TWELL_FP8, narrow[0])):
        wide = operands.map(Tensor.double).named()
        if operands.weight_scale is not None:
            wide["weight"] *= wide.pop("weight_scale")
        exact = dense(LinearOperands(**wide), norm)
        base = relative_error(dense(operands, norm), exact)
        error = relative_error(run_linear(operands, options)[0], exact)
        refuse_error(f"{name}, {tokens} tokens of {inner} -> {out}", error, base)
    torch._dynamo.reset()
    compiled = compile_rival(dense)
    x8 = Fp8.round_rows(layers[0].x.float())
    contestants: dict[str, Sequence[Callable[[], object]]] = {
        TWELL: [functools.partial(run_linear, each, options) for each in layers],
        TWELL_FP8: [functools.partial(run_linear, each, options) for each in narrow],
        COMPILED: [functools.partial(compiled, each, norm) for each in layers],
        COMPILED_FP8: [functools.partial(compiled, each, norm) for each in narrow],
        PRODUCT: [functools.partial(functional.linear, each.x, each.weight) for each in layers],
        PRODUCT_FP8: [functools.partial(by_scaled_mm, x8, each) for each in narrow],
    }
    size = {"tokens": tokens, "in": inner, "out": out, "norm": norm}
    return {**size, "times": time_rotated(contestants, repeats)}


HEADER = "| layer | tokens | twell | GB/s | twell FP8 | GB/s | compiled | compiled FP8 | F.linear | scaled_mm |\n"
HEADER += "|" + " ---: |" * 10


def table_row(found: dict[str, Any]) -> str:
    """One line of the Markdown table; GB/s are of the weights alone."""
    median = {name: value["median_us"] for name, value in found["times"].items()}
    elements = found["in"] * found["out"]
    cells = [
        f"{found['in']} -> {found['out']}, {found['norm']}",
        f"{found['tokens']}",
        *(f"{median[TWELL]:.1f}", f"{2 * elements / median[TWELL] / 1e3:.0f}"),
        *(f"{median[TWELL_FP8]:.1f}", f"{elements / median[TWELL_FP8] / 1e3:.0f}"),
        *(f"{median[name]:.1f}" for name in (COMPILED, COMPILED_FP8, PRODUCT, PRODUCT_FP8)),
    ]
    return "| " + " | ".join(cells) + " |"


@click.command()
@click.option("--layers", default="2048:6144:rms,2048:2048:none,4096:6144:rms", show_default=True)
@click.option("--tokens", default="1,4,8,16,17,32,512,2048,8192", show_default=True, help="Row counts.")
@click.option("--repeats", default=20, show_default=True)
@session.json_option
@session.smoke_option(layers="128:384:layer,128:128:none", tokens="1,20", repeats=2)
def main(layers: str, tokens: str, repeats: int, json_path: Path | None) -> None:
    """Print a Markdown table of times in microseconds."""
    session.refuse_without_gpu()
    report = session.new_report()
    click.echo(str(report["machine"]) + "\n\n" + HEADER)
    for layer in layers.split(","):
        inner, out, norm = layer.split(":")
        for count in tokens.split(","):
            found = measure(int(count), int(inner), int(out), norm, repeats)
            click.echo(table_row(found))
            report["results"].append(found)
            session.write_results(json_path, report)


if __name__ == "__main__":
    main()
