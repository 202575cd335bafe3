"""The commands as functions: the command line is a thin layer over these. Importing this imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from twellc.base.errors import UserError
from twellc.base.files import output_path, refuse_replacing, temporary_folder, uninterrupted
from twellc.options.commands import (
    BenchOptions,
    CheckOptions,
    CompileOptions,
    InspectOptions,
    ProfileOptions,
    compile_options,
)
from twellc.options.option import given_path, taken
from twellc.options.renamed import by_new_names
from twellc.options.source import RunOptions, TracingOptions

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

    from twellc.base.arrays import Array
    from twellc.benchmarking.result import BenchResult
    from twellc.checks.checking import CheckResult
    from twellc.compiling.manifest import Manifest
    from twellc.firing.profile import FiringProfile
    from twellc.inspection.description import Inspection
    from twellc.options.keywords import (
        BenchKeywords,
        CheckKeywords,
        CompileKeywords,
        InspectKeywords,
        ProfileKeywords,
        RewriteKeywords,
    )
    from twellc.passes.pipeline import Rewritten
    from twellc.training.log import TrainingLog

    Model = str | os.PathLike[str] | ExportedProgram | torch.nn.Module
    Data = str | os.PathLike[str] | Mapping[str, torch.Tensor | Array]

Progress = Callable[[str], None]


def rewrite(
    model: Model,
    *,
    layers: str = "auto",
    compression: int | None = None,
    linear: str = "auto",
    tensor_parallel: int = 1,
    rank: int = 0,
    **options: Unpack[RewriteKeywords],
) -> Rewritten:
    """Rewrite the feed-forward blocks of a model into `twell` ops, and run nothing else of the compiler.

    Args:
        model: An ExportedProgram, which is left as it is; a module in eval mode with example inputs; or the path of
            a torch.export archive, a Hugging Face directory, a pickled module or a sparse autoencoder.
        layers: Which matches to rewrite: `auto`, `all`, `none` or a regular expression over module paths.
        compression: The TwELL compression factor; None takes the default.
        linear: Which linear layers outside of the blocks to rewrite, too: `twell` takes all that can be rewritten.
        tensor_parallel: How many ranks share the model. Their programs run in as many processes of torch.distributed's
            default group, and reduce their results.
        rank: The rank whose program to make.
        options: The fields of `twellc.options.source.TracingOptions`, and `ExampleKeywords`; as texts, too.

    Returns:
        The program before and after, with the decision for each block and for linear layers outside of blocks.
        `result.program.module()` runs it.

    Raises:
        UserError: The model cannot be read or traced, or an option does not fit it.
    """
    from twellc.base.modules import import_modules
    from twellc.loaders.in_memory import load_for_rewriting, loaded, rewrite_model
    from twellc.passes.match.shared_axis import Part

    taken(CompileOptions, "compression", compression)
    taken(CompileOptions, "linear", linear)
    taken(CompileOptions, "tensor_parallel", tensor_parallel)
    if type(rank) is not int or not 0 <= rank < tensor_parallel:
        raise UserError("rank", "there is no such rank", got=repr(rank), expected=f"0 to {tensor_parallel - 1}")
    part = Part(rank, tensor_parallel)
    example, given = _parsed(TracingOptions, options)
    import_modules(given.get("import_modules", ()))
    if isinstance(model, str | os.PathLike):
        source = TracingOptions(Path(model), **given)
        return rewrite_model(source, load_for_rewriting(source), layers, compression, linear, part)
    source = TracingOptions(Path(type(model).__name__), **given)
    in_memory = loaded(model, example)
    return rewrite_model(source, in_memory, layers, compression, linear, part)


def compile(model: Model, output: str | os.PathLike[str] | None = None, **options: Unpack[CompileKeywords]) -> Manifest:
    """Compile a model into a TensorRT plan, as `twellc compile` does.

    Args:
        model: A path, as `twellc compile` takes it; an ExportedProgram; or a module in eval mode with example inputs.
        output: Where the plan goes; its manifest is written beside it.
        options: The other fields of `twellc.CompileOptions`, and `RunKeywords`; as texts, too.

    Returns:
        The manifest, as it is written beside the plan.

    Raises:
        UserError: An argument or an option does not work; nothing was written.
    """
    from twellc.compiling.compiler import compile_model

    with _given(CompileOptions, model, options) as (path, progress, given):
        made = compile_options(path, _output(output), **given)
        if made.html is not None and made.firing_profile is not None:
            from twellc.benchmarking.plot import require_matplotlib

            require_matplotlib(f"--html {made.html}")
        # It is a profile of this model, or compiling fails.
        return compile_model(made, progress, lambda manifest: report(profile=made.firing_profile, decisions=manifest))


def inspect(model: Model, **options: Unpack[InspectKeywords]) -> Inspection:
    """Show the feed-forward blocks of a model or a plan, with the decision for each, as `twellc inspect` does.

    Args:
        model: As in `compile`, or a plan with its manifest, or a rewritten ONNX file.
        options: The other fields of `twellc.InspectOptions`, and `RunKeywords`; as texts, too.

    Raises:
        UserError: It is neither a model nor a plan, or an option does not fit it.
    """
    from twellc.inspection.inspection import inspect_model

    with _given(InspectOptions, model, options) as (path, progress, given):
        return inspect_model(InspectOptions(path, **given), progress)


def check(model: Model, candidate: str | os.PathLike[str], **options: Unpack[CheckKeywords]) -> CheckResult:
    """Compare a plan or a rewritten ONNX file with the model that it was made from, as `twellc check` does.

    Args:
        model: As in `compile`.
        candidate: A rewritten ONNX file, or a plan with its manifest.
        options: The other fields of `twellc.CheckOptions`, and `RunKeywords`; as texts, too.

    Raises:
        UserError: Something cannot be read, or model, candidate and inputs do not belong together.
    """
    with uninterrupted():  # native modules do not survive an interrupt while they are imported
        from twellc.checks.checking import check

    with _given(CheckOptions, model, options) as (path, progress, given):
        return check(CheckOptions(path, Path(given_path("candidate", candidate)), **given), progress)


def profile(
    model: Model,
    data: Data | Sequence[Data],
    output: str | os.PathLike[str] | None = None,
    *,
    advance: Callable[[int, int], None] = lambda read, total: None,
    **options: Unpack[ProfileKeywords],
) -> FiringProfile:
    """Count which neurons of a model fire for the user's data, as `twellc profile` does.

    Args:
        model: As in `compile`.
        data: A file, as `twellc profile --data` takes it, or tensors or arrays by the names of the model's inputs;
            or several of these.
        output: Where the profile goes; None keeps it in memory.
        advance: Receives how many bytes of the files were read, of how many.
        options: The other fields of `twellc.ProfileOptions`, and `RunKeywords`; as texts, too.

    Raises:
        UserError: The model or the data cannot be read or do not fit each other, or activations are NaN; nothing was
            written.
    """
    with uninterrupted():  # native modules do not survive an interrupt while they are imported
        from twellc.firing.run import profile_model

    kinds = (str, os.PathLike, Mapping)
    several = list(data) if isinstance(data, Iterable) and not isinstance(data, kinds) else [data]
    for each in several:
        if not isinstance(each, kinds):
            expected = "a path, tensors or arrays by the names of inputs, or several of these"
            raise UserError("data", "is not data to run a model on", got=type(each).__name__, expected=expected)
    sources = [each if isinstance(each, Mapping) else Path(each) for each in several]
    with _given(ProfileOptions, model, options) as (path, progress, given):
        made = ProfileOptions(path, _output(output), **given)
        return profile_model(made, sources, progress, advance)


def merge_profiles(
    profiles: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str], *, overwrite: bool = False
) -> FiringProfile:
    """Make one profile of several of the same model, as `twellc profile --merge` does.

    Args:
        profiles: Their files.
        output: Where the profile over all their data goes.
        overwrite: Whether it may replace an existing file.

    Raises:
        UserError: One cannot be read, or they are of different models; nothing was written.
    """
    from twellc.firing.profile import FiringProfile

    paths = list(map(Path, profiles))
    if not paths:
        raise UserError("--merge", "there is not a profile to merge", expected="one file at least")
    merged = FiringProfile.read(paths[0])
    for path in paths[1:]:
        merged = merged.merged(FiringProfile.read(path), str(path))
    merged.write(output, overwrite=overwrite)
    return merged


def bench(
    model: Model,
    *,
    done: Callable[[BenchResult], None] = lambda found: None,
    **options: Unpack[BenchKeywords],
) -> BenchResult:
    """Measure a model on the GPU at hand, as it is and rewritten, as `twellc bench` does.

    Args:
        model: As in `compile`, but no ONNX file.
        done: Receives the results so far after each shape.
        options: The other fields of `twellc.BenchOptions`, and `RunKeywords`; as texts, too.

    Raises:
        UserError: No GPU is found, the model or the inputs cannot be read, or no block is rewritten.
    """
    with uninterrupted():  # native modules do not survive an interrupt while they are imported
        from twellc.benchmarking.bench import bench_model

    with _given(BenchOptions, model, options) as (path, progress, given):
        return bench_model(BenchOptions(path, **given), progress, done)


def report(
    output: str | os.PathLike[str] | None = None,
    *,
    profile: FiringProfile | str | os.PathLike[str] | None = None,
    decisions: Manifest | Inspection | str | os.PathLike[str] | None = None,
    bench: BenchResult | str | os.PathLike[str] | None = None,
    training: TrainingLog | str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> str:
    """Make a page of HTML about a model's sparsity and the decisions for its blocks, as `twellc report` does.

    Args:
        output: Where the page goes; None only returns it.
        profile: A firing profile, or its file.
        decisions: The decisions for the blocks: a result of `compile` or `inspect`, or a file as for `--decisions`.
        bench: The measurements: a result of `bench`, or the file with its JSON.
        training: The log of the training, as `twellc.training.SparsityCallback` writes it, or its file.
        overwrite: Whether the page may replace an existing file.

    Returns:
        The page.

    Raises:
        UserError: None of the four was given, they are of different models, one cannot be read, or matplotlib is
            missing; nothing was written.
    """
    from twellc.firing.profile import FiringProfile
    from twellc.reporting.page import make_page
    from twellc.reporting.sources import decisions_of, gather, read_bench, read_decisions, read_training

    page = _output(output)
    if page is not None:
        given = [Path(each) for each in (profile, decisions, bench, training) if isinstance(each, str | os.PathLike)]
        refuse_replacing("--output", page, given)
    if isinstance(profile, str | os.PathLike):
        profile = FiringProfile.read(Path(profile))
    decided = None
    if isinstance(decisions, str | os.PathLike):
        decided = read_decisions(Path(decisions))
    elif decisions is not None:
        decided = decisions_of(decisions.to_json(), "decisions")
    if isinstance(bench, str | os.PathLike):
        bench = read_bench(Path(bench))
    if isinstance(training, str | os.PathLike):
        training = read_training(Path(training))
    return make_page(gather(profile, decided, bench, training), page, overwrite=overwrite)


def _parsed(kind: type[Any], options: Mapping[str, Any]) -> tuple[RunOptions, dict[str, Any]]:
    """Split keywords into the options of the run and those of the options class `kind`, as that class holds them."""
    options = by_new_names(options, [field.name for field in fields(kind)])
    of_run = {field.name for field in fields(RunOptions)} & options.keys()
    run = RunOptions(**{name: options[name] for name in of_run})
    return run, {name: taken(kind, name, value) for name, value in options.items() if name not in of_run}


def _output(value: object) -> Path | None:
    return None if value is None else output_path("--output", given_path("output", value))


@contextmanager
def _given(
    kind: type[Any], model: Model, options: Mapping[str, Any]
) -> Iterator[tuple[Path, Progress, dict[str, Any]]]:
    """Yield the path of a model, of a temporary archive if the model is in memory; and the options, see `_parsed`."""
    run, given = _parsed(kind, options)
    if isinstance(model, str | os.PathLike):
        if (run.args, run.kwargs, run.dynamic_shapes) != ((), None, None):
            raise UserError("args, kwargs, dynamic_shapes", "only a module needs example inputs", got=str(model))
        yield Path(model), run.progress, given
        return
    from twellc.loaders.in_memory import IN_MEMORY, save

    with temporary_folder() as folder:
        path = save(model, run, folder)
        try:
            yield path, run.progress, {**given, "trust_model": True, "in_memory": IN_MEMORY}
        except UserError as error:
            raise error.renamed(str(path), path.stem) from error.__cause__
