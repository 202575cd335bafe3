"""Tables of blocks, attention and linear layers with the decision for each, as `compile` and `inspect` print them."""

from __future__ import annotations

from collections import Counter

from rich.table import Table
from rich.text import Text

from twellc.base.errors import first_few
from twellc.commands.terminal import open_console
from twellc.passes.report import Attention, Layer, Linear, reads_fp8

_UNMEASURED = "not measured"


def print_layers(layers: list[Layer]) -> None:
    """Print a table of feed-forward blocks with the decision for each."""
    console = open_console()
    if not layers:
        console.print("no feed-forward blocks with an activation that twellc knows")
        return
    table = Table("block", "variant", "activation", "d_model", "d_ff", "result", "active", "expected", "why")
    for layer in layers:
        ends = [f" + {end}" for end in (_NORM_NAMES[layer.norm].partition(" ")[2], "residual" * layer.residual) if end]
        became = f"rewritten{''.join(ends)}{f', {layer.hot} hot' if layer.hot else ''}"
        neurons = str(layer.d_ff) if layer.kept == layer.d_ff else f"{layer.kept} of {layer.d_ff}"
        active = _UNMEASURED if layer.density is None else f"{100 * layer.density:.3g} %"
        gain = "-" if layer.expectation is None else f"{layer.expectation.gain:.2f} x"
        gain, active = (gain, active) if layer.matched else ("", "")
        result = Text(became, "green") if layer.decision == "twell" else "dense"
        mixture = f", {layer.top} of {layer.experts} experts" if layer.experts else ""
        cells = [layer.module, f"{layer.variant}{mixture}", layer.activation, str(layer.d_model), neurons, result]
        table.add_row(*cells, active, gain, layer.reason)
    console.print(table)
    count = sum(layer.decision == "twell" for layer in layers)
    console.print(f"{count} of {len(layers)} feed-forward blocks rewritten")


def print_attention(blocks: list[Attention]) -> None:
    """Print how many attention blocks have a form that TensorRT fuses or cuDNN computes, and why others do not."""
    if not blocks:
        return
    console = open_console()
    forms = Counter(block.form for block in blocks)
    written = forms.pop("as written", 0)
    counts = ", ".join(f"{count} {_FORMS[form]}" for form, count in forms.items())
    console.print(
        f"{len(blocks) - written} of {len(blocks)} attention blocks rewritten{': ' if counts else ''}{counts}"
    )
    reasons: dict[str, list[str]] = {}
    for block in blocks:
        if block.reason:
            reasons.setdefault(f"{_FORMS[block.form]}, since {block.reason}", []).append(block.module)
    for reason, modules in reasons.items():
        console.print(f"  {reason}: {first_few(modules)}", soft_wrap=True)


_FORMS = {
    "cudnn": "by cuDNN's plugin",
    "operator": "as ONNX's Attention",
    "matmul": "as products that TensorRT fuses",
    "as written": "as the model has them",
}


def print_linear(layers: list[Linear], asked: bool) -> None:
    """Print how many linear layers outside of blocks are rewritten, with their norms and sums, and why others are not.

    Print nothing where none is rewritten, unless the user has `asked` for it.
    """
    taken = [each for each in layers if each.decision == "twell"]
    if not layers or not (taken or asked):
        return
    console = open_console()
    ends = Counter(end for each in taken for end in _ends(each) if end)
    counts = [len([name for each in group for name in each.modules]) for group in (taken, layers)]
    joined = f" as {len(taken)}" if len(taken) < counts[0] else ""
    with_ends = ", ".join(f"{count} with {end}" for end, count in ends.items())
    console.print(
        f"{counts[0]} of {counts[1]} linear layers outside of blocks rewritten{joined}{': ' * bool(ends)}{with_ends}"
    )
    reasons: dict[str, list[str]] = {}
    for each in layers:
        if each.decision != "twell":
            reasons.setdefault(f"as the model has them, since {each.reason}", []).extend(each.modules)
        elif each.weights is not None and each.weights.bits > 8:
            reasons.setdefault(str(each.weights), []).extend(each.modules)
    for reason, modules in reasons.items():
        console.print(f"  {reason}: {first_few(modules)}", soft_wrap=True)


def _ends(layer: Linear) -> list[str]:
    """Return the names of the parts that are computed together with linear layers; empty ones for absent parts."""
    fp8 = reads_fp8(layer.weights)
    return [_NORM_NAMES[layer.norm], "residual" * layer.residual, "argmax" * layer.choose, "weights in 8 bits" * fp8]


_NORM_NAMES = {"none": "", "rms": "an RMSNorm", "layer": "a layer norm"}
