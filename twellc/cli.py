"""The `twellc` command line."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

import twellc
from twellc.base.dtypes import DTYPES
from twellc.base.errors import first_few
from twellc.base.files import ENDING_SIGNALS
from twellc.base.version import __version__
from twellc.bench_command import bench
from twellc.config import (
    ATTENTIONS,
    BACKENDS,
    DEFAULT_DENSITY,
    DEFAULT_TOKENS,
    LOGITS,
    PADDINGS,
    triton_plan,
)
from twellc.cost import CostTable, LayerCosts
from twellc.export.shapes import LARGEST_SIZE
from twellc.passes.report import Attention, Layer
from twellc.plugins.block import DEFAULT_COMPRESSION
from twellc.plugins.library import COMPRESSIONS, GPUS
from twellc.profile_command import profile
from twellc.report_command import report
from twellc.terminal import (
    Command,
    FilePath,
    InterruptedBySignal,
    Share,
    calibration_option,
    discard_output,
    inputs_option,
    never_failing,
    open_console,
    plain,
    prune_check_option,
    prune_dead_option,
    say,
    show_progress,
    target_gpu_option,
    trust_model_option,
)

if TYPE_CHECKING:
    from twellc.checks.checking import BlockAccuracy, CheckResult
    from twellc.inspection.kernels import KernelTable
    from twellc.manifest import Manifest

_FAULT = 70  # EX_SOFTWARE of sysexits.h


def _interrupt(number: int, _: FrameType | None) -> None:
    raise InterruptedBySignal(number)


def _open_closed_streams() -> None:
    """Open the null device as a standard stream that is closed, as by `>&-`, for this process and its children."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w"))


@contextmanager
def _ended_by_broken_pipe() -> Iterator[None]:
    """End with the status of SIGPIPE, which Python ignores, where nobody reads on. click would end with 1."""
    try:
        yield
    except BrokenPipeError as error:
        discard_output()
        raise SystemExit(128 + signal.SIGPIPE) from error


class _Group(click.Group):
    """The commands. A fault of twellc itself is a traceback and an exit status of its own."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        _open_closed_streams()
        try:
            return super().main(*args, **kwargs)
        except Exception as error:
            status = _FAULT
            with never_failing():
                if isinstance(error, OSError) and error.errno is not None:
                    # It came up while something was printed: the commands look after all else.
                    status = 2
                    click.echo(f"Error: the output cannot be printed: {error.strerror}.", err=True)
                else:
                    traceback.print_exc()
                    click.echo("This is a fault of twellc. Please report it, with the lines above.", err=True)
            sys.exit(status)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _ended_by_broken_pipe():
            return super().make_context(*args, **kwargs)

    def invoke(self, context: click.Context) -> Any:
        with _ended_by_broken_pipe():
            return super().invoke(context)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Compile transformers with sparse feed-forward layers into TensorRT engines.

    Exit status: 0 done; 1 a check failed; 2 bad input, with one message; 70 a fault of twellc, with a traceback;
    128 + N ended by signal N. Unless it is 0, compile wrote no output.
    """
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    # What is printed may quote names in any script.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    for number in ENDING_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _interrupt)


main.add_command(profile)
main.add_command(bench)
main.add_command(report)


@main.command(cls=Command)
@click.argument("model", type=FilePath())
@click.option(
    "-o", "--output", type=FilePath(), metavar="FILE", help="The plan to write; its manifest stands beside it."
)
@click.option("--onnx", type=FilePath(), metavar="FILE", help="Also keep the rewritten graph as ONNX.")
@click.option(
    "--backend", type=click.Choice(BACKENDS), default="auto", show_default=True,
    help="auto: TensorRT where it is installed beside a GPU, else TensorRT-RTX, which needs none. none stops at ONNX.",
)  # fmt: skip
@click.option("--dtype", type=click.Choice(tuple(DTYPES)), help="Precision; default: the model's own, else bf16.")
@click.option(
    "--profile", "profiles", multiple=True, metavar="NAME:MIN:OPT:MAX",
    help="Shapes of an input, such as input_ids:1x1:1x128:8x2048. Inputs that share a dimension follow. Given again "
    "for the same input, it starts the next optimization profile.",
)  # fmt: skip
@click.option(
    "--padding", type=click.Choice(PADDINGS),
    help="Of a causal Hugging Face model. none, the default: its only input is input_ids. It is causal by structure, "
    "so prompts may be padded on the right, and what it gives for padding has no meaning. mask: attention_mask is an "
    "input, too, for padding on the left.",
)  # fmt: skip
@click.option(
    "--logits", type=click.Choice(LOGITS), default="all", show_default=True,
    help="Of a causal Hugging Face model. last: compute the logits of the last place of the sequence axis only, "
    "[batch, 1, vocabulary]; a prompt padded on the right has padding there.",
)  # fmt: skip
@click.option(
    "--layers", default="auto", show_default=True, metavar="auto|all|none|REGEX",
    help="Which matching blocks to rewrite; REGEX is searched in their module paths.",
)  # fmt: skip
@click.option(
    "--compression", type=click.Choice(tuple(map(str, COMPRESSIONS))),
    help="TwELL compression factor: a tile of 256 neurons keeps 256/N - 1 activations of a token; more of them are "
    "kept apart. It changes speed and memory, never results. Default: "
    f"{DEFAULT_COMPRESSION}, or with --calibration the largest with which few tiles have more.",
)  # fmt: skip
@calibration_option
@prune_dead_option
@prune_check_option
@click.option("--strict", is_flag=True, help="Fail when nothing matches, or a block that looks like one is refused.")
@click.option(
    "--dump-graphs", type=FilePath(), metavar="DIR", help="Folder for the graph as traced and after each pass."
)
@click.option("--report", type=FilePath(), metavar="FILE.json", help="Write what was done as JSON.")
@click.option(
    "--html", type=FilePath(), metavar="FILE.html", help="Write it as a page to look at, as twellc report makes it."
)
@click.option("--overwrite", is_flag=True, help="Replace existing output files.")
@trust_model_option
@inputs_option
@click.option(
    "--triton", type=FilePath(), metavar="DIR",
    help="Write the plan into a Triton model repository, with its config.pbtxt, instead of to --output.",
)  # fmt: skip
@click.option(
    "--attention", type=click.Choice(ATTENTIONS), default="auto", show_default=True,
    help="Who computes attention: tensorrt, or cudnn by a plugin, which takes causal and unmasked attention and leaves "
    "other to TensorRT. auto: cudnn where it is at hand and was measured faster, which is TensorRT on Hopper.",
)  # fmt: skip
@target_gpu_option
@click.option("--embed-plugins", is_flag=True, help="Put the plugin library into the plan.")
@click.option(
    "--plugin-library", "plugin_libraries", multiple=True, type=FilePath(), metavar="FILE",
    help="A library of other people's TensorRT plugins, for a graph with nodes of theirs; several may be given. Its "
    "code runs here.",
)  # fmt: skip
def compile(profiles: tuple[str, ...], inputs: tuple[str, ...], compression: str | None, **options: Any) -> None:
    """Compile MODEL into a TensorRT plan.

    MODEL is a torch.export archive, a Hugging Face directory, an ONNX file of plain operators or a pickled module.

    Every feed-forward block with a ReLU is rewritten into a TwELL plugin; all else stays as it is. Ends with a table of
    the blocks and what became of them. Exit status 2: the input is bad, and nothing was written.
    """
    with show_progress() as progress:
        manifest = twellc.compile(
            profiles=profiles, compression=None if compression is None else int(compression), inputs=inputs,
            progress=progress, **options,
        )  # fmt: skip
    written = options["output"] or options["onnx"] or triton_plan(options["triton"], options["model"])
    with never_failing():
        _print_manifest(manifest, written)


@main.command(cls=Command)
@click.option("--check", is_flag=True, help="Register the plugins in every TensorRT that is installed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.pass_context
def plugins(context: click.Context, check: bool, as_json: bool) -> None:
    """Show the plugin libraries: where they are, their version and their plugins.

    TwellAttention is in a library of its own, which is there where cuDNN's headers were found when twellc was built.

    With --check, register them in every TensorRT of this machine, each in a process of its own: in its Python modules,
    and in the libraries that the dynamic linker finds. Exit status 1 if one of them does not take them.
    """
    from twellc.plugins import library
    from twellc.plugins.registration import check_installed

    version = library.load().twell_version().decode()
    attention = library.attention_library_path()
    library.load_attention()  # says so if it is the library of another version
    names = [*library.PLUGIN_NAMES, *([library.ATTENTION_NAME] if attention is not None else [])]
    checks = check_installed() if check else []
    if as_json:
        found: dict[str, Any] = {
            "library": str(library.library_path()),
            "version": version,
            "namespace": library.PLUGIN_NAMESPACE,
            "attention_library": None if attention is None else str(attention),
            "plugins": [{"name": name, "version": library.PLUGIN_VERSION} for name in names],
        }
        if check:
            found["checks"] = [dataclasses.asdict(each) for each in checks]
        click.echo(json.dumps(found, indent=2))
    else:
        click.echo(f"library    {library.library_path()}")
        if attention is not None:
            click.echo(f"attention  {attention}")
        click.echo(f"version    {version}")
        click.echo(f"namespace  {library.PLUGIN_NAMESPACE}")
        for name in names:
            click.echo(f"plugin     {name}, version {library.PLUGIN_VERSION}")
        for each in checks:
            click.echo(f"{'ok     ' if each.good else 'FAILED '}    {each.host} {each.version}: {each.state}")
        if check and not checks:
            click.echo("no TensorRT is installed")
    context.exit(0 if all(each.good for each in checks) else 1)


@main.command(cls=Command)
@click.argument("target", type=FilePath())
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--dtype", type=click.Choice(tuple(DTYPES)), help="Precision to judge a model in; default as in compile.")
@click.option(
    "--density", type=Share(), default=DEFAULT_DENSITY, show_default=True, metavar="SHARE",
    help="Share of gate activations that are not zero, from 0 to 1, to count operations and bytes and expect times at; "
    "it is assumed, of blocks that no profile knows.",
)  # fmt: skip
@click.option(
    "--tokens", type=click.IntRange(1, LARGEST_SIZE), default=DEFAULT_TOKENS, show_default=True, metavar="N",
    help="Tokens in a call to count operations and bytes of, and to name the kernels of.",
)  # fmt: skip
@click.option(
    "--gpu", type=click.Choice(tuple(GPUS)),
    help="The GPU whose kernels to name; none has to be there. Default: the one that speed is expected for.",
)  # fmt: skip
@target_gpu_option
@calibration_option
@prune_dead_option
@prune_check_option
@trust_model_option
@inputs_option
def inspect(target: Path, as_json: bool, **options: Any) -> None:
    """Show the feed-forward blocks of TARGET, a model or a plan, and what becomes of each.

    A plan is read through its manifest, so no GPU is needed. A rewritten ONNX file shows its plugin nodes, too.

    How much faster than a dense block each is expected to be follows from times measured on the target GPU, at the
    density of the profile, or one that is assumed; a plan says what was expected when it was compiled. A second table
    counts the FLOPs and bytes of each block in one call, with dense products and where only active neurons are
    computed: counts, no prediction of time.

    Then come the kernels that compute each rewritten block in such a call: which route they are, and what is launched,
    with its configuration. They are those of the target GPU, of a plan those of the GPU that it was compiled for,
    unless --target-gpu or --gpu names another one.
    """
    with show_progress() as progress:
        found = twellc.inspect(target, progress=progress, **options)
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2))
        return
    description = found.description
    for note in description.notes:
        say("Note:", f"{note}.")
    _print_layers(description.layers)
    _print_attention(description.attention or [])
    if description.manifest is not None:
        _print_libraries(description.manifest)
    if description.layers:
        _print_cost(found.cost)
    _print_kernels(found.kernels)
    for node in description.nodes or ():
        weights = ", ".join(f"{name} {shape}" for name, shape in node.weights.items())
        click.echo(plain(f"{node.name}: {node.type}, {node.dtype}, {weights}"))
        click.echo(plain("    " + ", ".join(f"{name}={value}" for name, value in node.fields.items())))


@main.command(cls=Command)
@click.argument("model", type=FilePath())
@click.argument("candidate", type=FilePath())
@click.option(
    "--seed", type=click.IntRange(-(2**63), 2**64 - 1), metavar="N", help="Seed of random inputs; default: 0.",
)  # fmt: skip
@click.option(
    "--inputs", "arrays", type=FilePath(), metavar="FILE.npz",
    help="Run on these arrays, named as the model's inputs, instead of random inputs.",
)  # fmt: skip
@click.option(
    "--text", type=FilePath(), metavar="FILE",
    help="Run a language model on this text, in UTF-8, through the tokenizer in its Hugging Face directory, and "
    "measure how well it is predicted.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option(
    "--calibration", type=FilePath(), metavar="PROFILE",
    help="The profile that CANDIDATE was compiled with; another one is refused. Only a plan needs it that no GPU can "
    "run, if its graph was not kept.",
)  # fmt: skip
@trust_model_option
@inputs_option
@click.pass_context
def check(context: click.Context, /, model: Path, candidate: Path, as_json: bool, **options: Any) -> None:
    """Compare CANDIDATE, a rewritten ONNX file or a plan, with the MODEL that it was made from.

    Both run on random inputs of several shapes, or on what --inputs or --text gives, beside the model in float64 (the
    truth) and the plain low-precision model (the yardstick): the candidate may be twice as far from the truth as that.
    A plan runs where a GPU allows; elsewhere the ONNX graph that it was built from runs in its place, and the result
    says so.

    The error of each output is separated into that of low precision, of the rewriting, of the kernels and the rest.
    Each rewritten block is compared on its own, too; the first one that diverges is named, and the worst are shown
    with the share of their gate activations that are not zero (all of them with --json).

    Exit status: 0 within tolerance, 1 outside, 2 for bad input.
    """
    with show_progress() as progress:
        result = twellc.check(model, candidate, progress=progress, **options)
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2))
    else:
        _print_accuracy(result)
    context.exit(0 if result.within else 1)


def _print_manifest(manifest: Manifest, written: Path) -> None:
    for warning in manifest.warnings:
        say("Warning:", f"{warning}.", "bold yellow")
    for note in manifest.notes:
        say("Note:", f"{note}.")
    _print_layers(manifest.layers)
    _print_attention(manifest.attention)
    dtype = manifest.settings.dtype
    if manifest.plan is not None and manifest.backend is not None:
        size, backend = manifest.plan.bytes / 1e6, manifest.backend
        result = f"{size:.1f} MB, {backend.name} {backend.version}, {dtype}"
        result += f", {len(manifest.plan.plugin_layers)} plugin layers"
    else:
        result = f"ONNX, {dtype}; no plan was built"
    open_console().print(f"{written}: {result}", soft_wrap=True)


def _print_layers(layers: list[Layer]) -> None:
    console = open_console()
    if not layers:
        console.print("no feed-forward blocks with an activation that twellc knows")
        return
    shown = any(layer.expectation is not None for layer in layers)
    table = Table(
        "block", "variant", "activation", "d_model", "d_ff", "result", *(["expected"] if shown else []), "why"
    )
    for layer in layers:
        rewritten = layer.decision == "twell"
        gain = "" if layer.expectation is None else f"{layer.expectation.gain:.2f} x"
        table.add_row(
            layer.module, layer.variant, layer.activation, str(layer.d_model), _neurons(layer),
            Text(_rewritten(layer), "green") if rewritten else "dense",
            *([gain] if shown else []), layer.reason,
        )  # fmt: skip
    console.print(table)
    count = sum(layer.decision == "twell" for layer in layers)
    console.print(f"{count} of {len(layers)} feed-forward blocks rewritten")


def _rewritten(layer: Layer) -> str:
    """Say what a block became."""
    return f"rewritten{' + residual' if layer.residual else ''}{f', {layer.hot} hot' if layer.hot else ''}"


def _neurons(layer: Layer) -> str:
    """Return how many neurons a block has, and how many of the model's these are if it has lost some."""
    return str(layer.d_ff) if layer.kept == layer.d_ff else f"{layer.kept} of {layer.d_ff}"


def _print_attention(blocks: list[Attention]) -> None:
    """Say how many attention blocks have a form that TensorRT fuses or cuDNN computes, and why others have not."""
    if not blocks:
        return
    console = open_console()
    forms = Counter(block.form for block in blocks)
    written = forms.pop("as written", 0)
    counts = ", ".join(f"{count} {_FORMS[form]}" for form, count in forms.items())
    console.print(
        f"{len(blocks) - written} of {len(blocks)} attention blocks rewritten{': ' if counts else ''}{counts}"
    )
    for reason, modules in _by_reason(blocks).items():
        console.print(f"  {reason}: {first_few(modules)}", soft_wrap=True)


def _print_libraries(manifest: Manifest) -> None:
    """Name other people's plugin libraries that a plan needs."""
    for library in manifest.plugins.libraries or ():
        click.echo(plain(f"{library.file}: plugins {', '.join(library.names)}; sha256 {library.sha256}"))


def _by_reason(blocks: list[Attention]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for block in blocks:
        if block.reason:
            found.setdefault(f"{_FORMS[block.form]}, since {block.reason}", []).append(block.module)
    return found


_FORMS = {
    "cudnn": "by cuDNN's plugin",
    "operator": "as ONNX's Attention",
    "matmul": "as products that TensorRT fuses",
    "as written": "as the model has them",
}


def _print_cost(cost: CostTable) -> None:
    console = open_console()
    known = any(row.density is not None for row in cost.layers)
    where = ["at the densities of the profile"] if known else []
    if not known or any(row.density is None and row.sparse != row.dense for row in cost.layers):
        where.append(f"at an assumed density of {100 * cost.assumed_density:g} %")
    table = Table("block", title=f"{cost.tokens} tokens a call, {', else '.join(where)}")
    for column in (
        *(["density"] if known else []),
        "GFLOP dense",
        "sparse",
        "ratio",
        "MB dense",
        "sparse",
        "ratio",
        "MB gathered",
    ):
        table.add_column(column, justify="right")
    total = LayerCosts(cost.total.dense, cost.total.sparse, "all")
    for row in [*cost.layers, *([total] if len(cost.layers) > 1 else [])]:
        if row is total:
            table.add_section()
        cells = [row.module]
        if known:
            cells.append("-" if row.density is None else f"{row.density:.2%}")
        pairs = ((row.dense.flops, row.sparse.flops, 1e9), (row.dense.bytes, row.sparse.bytes, 1e6))
        for dense, sparse, unit in pairs:
            ratio = f"{dense / sparse:.2f}" if sparse else "-"  # a node of another origin may not say its widths
            cells += [f"{dense / unit:,.4g}", f"{sparse / unit:,.4g}", ratio]
        table.add_row(*cells, f"{row.sparse.gathered / 1e6:,.4g}")
    console.print(table)
    console.print(
        "counts, no prediction of time; gathered: rows of active neurons, read token by token, mostly from caches"
    )


def _print_kernels(kernels: KernelTable) -> None:
    """Show the launches of each block; blocks that have the same ones together."""
    console = open_console()
    modules: dict[tuple[str, ...], list[str]] = {}
    for block in kernels.blocks:
        modules.setdefault((block.route, *block.launches), []).append(block.module)
    for (route, *launches), names in modules.items():
        console.print(
            f"kernels on {kernels.gpu}, {kernels.tokens} tokens: {route}, for {first_few(names)}", soft_wrap=True
        )
        for launch in launches:
            console.print(f"  {launch}", soft_wrap=True)


def _print_accuracy(result: CheckResult) -> None:
    from twellc.checks.accuracy import DiscreteAccuracy, perplexity

    console = open_console()
    for note in filter(None, (result.note, *result.notes)):
        console.print(Text("Note:", "bold yellow"), note, soft_wrap=True)
    console.print(f"Executed: {result.executed}", soft_wrap=True)
    console.print(f"Inputs: {result.inputs}", soft_wrap=True)
    for output in result.outputs:
        if isinstance(output, DiscreteAccuracy):
            console.print(
                f"output {output.name}: {output.differing} of {output.elements} elements differ from float64 (plain "
                f"{output.plain_differing}, tolerance {output.tolerance})"
            )
            continue
        table = Table("against", "max error", "mean error", "relative error", "cosine", title=f"output {output.name}")
        rows = (
            ("candidate - float64", output.candidate),
            ("plain low precision - float64", output.plain),
            ("candidate - plain low precision", output.difference),
        )
        for name, error in rows:
            table.add_row(name, f"{error.max:.3e}", f"{error.mean:.3e}", f"{error.relative:.3e}", f"{error.cosine:.6f}")
        table.add_row("tolerance", f"{output.max_tolerance:.3e}", "", f"{output.relative_tolerance:.3e}", "")
        console.print(table)
        if output.separation is not None:
            separation = output.separation
            table = Table("error of the candidate", "max error", "relative error")
            for cause, label in _CAUSES.items():
                share = getattr(separation, cause)
                sign = "+" if cause in ("kernels", "rest") else ""
                table.add_row(label, f"{share.max:{sign}.3e}", f"{share.relative:{sign}.3e}")
            console.print(table)
        if output.top1 is not None and output.plain_top1 is not None:
            console.print(
                f"top-1 agreement with float64: {output.top1:.2%} (plain {output.plain_top1:.2%}); "
                f"KL divergence: {output.kl:.3e} nats (plain {output.plain_kl:.3e})"
            )
        if output.stray:
            console.print(f"{output.stray} elements are NaN or infinite where the plain model is finite, or vice versa")
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


_CAUSES = {
    "low_precision": "low precision",
    "rewrite": "rewriting (in float64)",
    "kernels": "kernels",
    "rest": "export and runtime",
}
_SHOWN_BLOCKS = 5


def _print_blocks(console: Console, blocks: list[BlockAccuracy]) -> None:
    """Show the blocks with the largest error for their tolerance, and the first that diverges, in order."""

    def badness(block: BlockAccuracy) -> tuple[bool, float]:
        accuracy = block.accuracy
        return block.diverges, accuracy.candidate.relative / (accuracy.relative_tolerance or 1)

    worst = sorted(blocks, key=badness, reverse=True)[:_SHOWN_BLOCKS]
    first = next((block for block in blocks if block.diverges), None)
    title = "blocks by themselves" + (f": the worst of {len(blocks)}" if len(worst) < len(blocks) else "")
    shares = [label for cause, label in _CAUSES.items() if cause != "rest"]  # which a block by itself has not
    table = Table("block", "density", "relative error", "tolerance", *shares, "result", title=title)
    for block in blocks:
        if block not in worst and block is not first:
            continue
        separation = block.accuracy.separation
        assert separation is not None
        table.add_row(
            block.module, f"{block.density:.2%}", f"{block.accuracy.candidate.relative:.3e}",
            f"{block.accuracy.relative_tolerance:.3e}", f"{separation.low_precision.relative:.3e}",
            f"{separation.rewrite.relative:.3e}", f"{separation.kernels.relative:+.3e}",
            Text("diverges", "bold red") if block.diverges else Text("within", "green"),
        )  # fmt: skip
    console.print(table)
    densities = [block.density for block in blocks]
    console.print(
        f"gate density on these inputs: {sum(densities) / len(densities):.2%} on average over blocks, "
        f"{min(densities):.2%} to {max(densities):.2%}"
    )
