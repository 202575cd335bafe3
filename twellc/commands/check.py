"""`twellc check`: run a candidate beside its model and the truth in float64, and print how far each output is off.

Importing this imports nothing large.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from twellc import api
from twellc.commands.options import FilePath, json_option, options_of
from twellc.commands.terminal import Command, open_console, show_progress
from twellc.options.commands import CheckOptions

if TYPE_CHECKING:
    from twellc.checks.accuracy import DiscreteAccuracy, OutputAccuracy
    from twellc.checks.checking import BlockAccuracy, CheckResult
    from twellc.checks.generation import GenerationAccuracy


@click.command(cls=Command)
@click.argument("model", type=FilePath())
@click.argument("candidate", type=FilePath())
@json_option
@options_of(CheckOptions)
@click.pass_context
def check(context: click.Context, /, model: Path, candidate: Path, as_json: bool, **options: Any) -> None:
    """Compare CANDIDATE, a rewritten ONNX file or a plan, with the MODEL that it was made from.

    Both run on random inputs of several shapes, or on the inputs of --arrays or --text, beside the model in float64
    (the truth) and the plain low-precision model (the yardstick): the candidate may be twice as far from the truth as
    that. A plan runs where a GPU allows; elsewhere the ONNX graph that it was built from runs in its place, and the
    result says so.

    The error of each output is split into those of low precision, of the rewriting, of the kernels and the rest.
    A candidate with a key-value cache reads prompts and goes on greedily for 32 tokens; each step is measured.

    Each rewritten block is compared on its own, too; the first one that diverges is named, and the worst are shown
    with the share of their gate activations that are not zero (all of them with --json).

    Exit status: 0 within tolerance, 1 outside, 2 for bad input.
    """
    with show_progress() as progress:
        result = api.check(model, candidate, progress=progress, **options)
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2))
    else:
        print_accuracy(result)
    context.exit(0 if result.within else 1)


def print_accuracy(result: CheckResult) -> None:
    """Print the results and the verdict."""
    from twellc.checks.accuracy import perplexity

    console = open_console()
    for note in filter(None, (result.note, *result.notes)):
        console.print(Text("Note:", "bold yellow"), note, soft_wrap=True)
    console.print(f"Executed: {result.executed}", soft_wrap=True)
    console.print(f"Inputs: {result.inputs}", soft_wrap=True)
    for output in result.outputs:
        _print_output(console, output)
    if result.generation is not None:
        _print_generation(console, result.generation)
    if result.text is not None:
        text = result.text
        perplexities = map(perplexity, (text.candidate_bits, text.plain_bits, text.truth_bits))
        console.print(
            f"{text.tokens} tokens of text predicted: {text.candidate_bits:.4f} bits a token (plain "
            f"{text.plain_bits:.4f}, float64 {text.truth_bits:.4f}); perplexity {{:.4f}} (plain {{:.4f}}, "
            "float64 {:.4f})".format(*perplexities)
        )
    if result.blocks:
        _print_blocks(console, result.blocks)
    if result.within:
        console.print("within tolerance", style="green")
        return
    where = f"; first block that diverges: {result.first_divergence}" if result.first_divergence else ""
    if not where and result.blocks:
        where = "; every rewritten block is within tolerance by itself"
    causes = "; cause: " + " and ".join(_CAUSES[cause] for cause in result.causes) if result.causes else ""
    console.print(Text("OUTSIDE TOLERANCE", "bold red"), f"{where}{causes}", sep="", soft_wrap=True)


def _print_output(console: Console, output: OutputAccuracy | DiscreteAccuracy) -> None:
    """Show the errors of an output of the model."""
    from twellc.checks.accuracy import DiscreteAccuracy

    if isinstance(output, DiscreteAccuracy):
        console.print(
            f"output {output.name}: {output.differing} of {output.elements} elements differ from float64 (plain "
            f"{output.plain_differing}, tolerance {output.tolerance})"
        )
        return
    table = Table(
        "against",
        "max error",
        "mean error",
        "relative error",
        "cosine",
        "NaN or inf",
        title=f"output {output.name}",
    )
    rows = (
        ("candidate - float64", output.candidate, f"{output.stray} of {output.elements}"),
        ("plain low precision - float64", output.plain, f"{output.plain_stray} of {output.elements}"),
        ("candidate - plain low precision", output.difference, ""),
    )
    for name, error, stray in rows:
        errors = (_figure(each) for each in (error.max, error.mean, error.relative))
        table.add_row(name, *errors, _figure(error.cosine, ".6f"), stray)
    table.add_row("tolerance", _figure(output.max_tolerance), "", _figure(output.relative_tolerance), "", "0")
    console.print(table)
    if output.separation is not None:
        separation = output.separation
        table = Table("error of the candidate", "max error", "relative error")
        for cause, label in _CAUSES.items():
            share = getattr(separation, cause)
            form = "+.3e" if cause in ("kernels", "rest") else ".3e"
            table.add_row(label, _figure(share.max, form), _figure(share.relative, form))
        console.print(table)
    if output.top1 is not None and output.plain_top1 is not None:
        console.print(
            f"top-1 agreement with float64: {output.top1:.2%} (plain {output.plain_top1:.2%}); "
            f"KL divergence: {output.kl:.3e} nats (plain {output.plain_kl:.3e})"
        )


def _print_generation(console: Console, generation: GenerationAccuracy) -> None:
    """Show the first, the worst and the last step, and the first tokens that differ from those of float64."""
    steps = generation.steps
    worst = max(range(len(steps)), key=lambda index: steps[index].error)
    table = Table("step", "relative error", "plain", "top-1", "plain", title="greedy steps, of which 0 is the prompts'")
    for index in sorted({0, worst, len(steps) - 1}):
        step = steps[index]
        shares = (f"{each:.0%}" for each in (step.agreement, step.plain_agreement))
        table.add_row(str(index), _figure(step.error), _figure(step.plain_error), *shares)
    console.print(table)

    def first_step(first: int | None) -> str:
        return "in no step" if first is None else f"first in step {first}"

    console.print(
        f"another token than float64's is chosen {first_step(generation.first_difference)} (plain low precision "
        f"{first_step(generation.plain_first_difference)})"
    )


def _figure(value: float, form: str = ".3e") -> str:
    """Return a number as text; a dash where there was nothing to compute it from."""
    return "-" if math.isnan(value) else format(value, form)


_CAUSES = {
    "low_precision": "low precision",
    "rewrite": "rewriting (in float64)",
    "kernels": "kernels",
    "rest": "export and runtime",
}
_SHOWN_BLOCKS = 5


def _verdict(block: BlockAccuracy) -> Text:
    if not block.diverges:
        return Text("within", "green")
    accuracy = block.accuracy
    if accuracy.stray:
        return Text(f"NaN or infinite in {accuracy.stray} of {accuracy.elements}", "bold red")
    return Text("diverges" if accuracy.compared else "not compared: its input is not finite", "bold red")


def _print_blocks(console: Console, blocks: list[BlockAccuracy]) -> None:
    """Show the blocks with the largest error for their tolerance, and the first that diverges, in order."""

    def badness(block: BlockAccuracy) -> tuple[bool, float]:
        accuracy = block.accuracy
        error = accuracy.candidate.relative / (accuracy.relative_tolerance or 1)
        return block.diverges, 0.0 if math.isnan(error) else error

    worst = sorted(blocks, key=badness, reverse=True)[:_SHOWN_BLOCKS]
    first = next((block for block in blocks if block.diverges), None)
    title = "blocks by themselves" + (f": the worst of {len(blocks)}" if len(worst) < len(blocks) else "")
    shares = [label for cause, label in _CAUSES.items() if cause != "rest"]  # a block by itself has no rest
    changed = ["quantisation"] if any(block.quantisation is not None for block in blocks) else []
    table = Table("block", "density", "relative error", "tolerance", *shares, *changed, "result", title=title)
    for block in blocks:
        if block not in worst and block is not first:
            continue
        separation = block.accuracy.separation
        assert separation is not None
        table.add_row(
            block.module,
            f"{block.density:.2%}",
            _figure(block.accuracy.candidate.relative),
            _figure(block.accuracy.relative_tolerance),
            _figure(separation.low_precision.relative),
            _figure(separation.rewrite.relative),
            _figure(separation.kernels.relative, "+.3e"),
            *([_figure(math.nan if block.quantisation is None else block.quantisation)] if changed else []),
            _verdict(block),
        )
    console.print(table)
    densities = [block.density for block in blocks]
    console.print(
        f"gate density on these inputs: {sum(densities) / len(densities):.2%} on average over blocks, "
        f"{min(densities):.2%} to {max(densities):.2%}"
    )
