"""`twellc profile`: run a model on the user's data and count which neurons fire."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from twellc.base.devices import choose_device
from twellc.base.dtypes import torch_dtype
from twellc.base.errors import UserError, first_few, first_line
from twellc.base.files import OutputFiles, read_file, refuse_replacing
from twellc.base.modules import import_modules
from twellc.base.version import __version__
from twellc.firing.measure import ProgramObserver
from twellc.firing.modules import ModuleObserver, counted_blocks
from twellc.firing.profile import DataSource, FiringProfile, ProfiledModel
from twellc.loaders.autoencoder_files import is_autoencoder
from twellc.loaders.loaded import LoadedModel, fingerprint
from twellc.loaders.model import load_model
from twellc.loaders.modules import empty_with_experts, opened
from twellc.loaders.onnx_format import looks_like_onnx
from twellc.loaders.precision import choose_dtype
from twellc.options.commands import ProfileOptions
from twellc.options.declared_inputs import refuse_inputs
from twellc.passes.pipeline import PassOptions, Stage, run_until
from twellc.passes.sizes.inputs import ModelInputs, program_inputs
from twellc.samples.batches import DEFAULT_SEQUENCE, Arrays, Batch, Intake, read_batches
from twellc.samples.documents import IDS, kind_of, notes_on
from twellc.samples.samples import Limits
from twellc.samples.tokenizer import Tokenizer, load_tokenizer

# Receives how much of the data has been read, and how much there is, in bytes.
Advance = Callable[[int, int], None]


def profile_model(
    options: ProfileOptions, data: Sequence[Path | Arrays], progress: Callable[[str], None], advance: Advance
) -> FiringProfile:
    """Run a model on data, count which neurons fire, and write the profile if there is an `output`.

    Args:
        options: See `ProfileOptions`.
        data: Files, or inputs by name; all data is read once, in order.
        progress: Receives the name of each step.
        advance: Receives how many bytes of the data were read, of how many.

    Raises:
        UserError: The model or the data cannot be read or do not fit each other, activations are NaN, or the output
            cannot be written; nothing was written.
    """
    import_modules(options.import_modules)
    if not data:
        raise UserError("--data", "there is no data to run the model on", expected="one file at least")
    paths = [each for each in data if isinstance(each, Path)]
    for path in paths:
        kind_of(path)
    device = choose_device(options.device)
    with OutputFiles(options.overwrite) as outputs:
        if options.output is not None:
            outputs.check("--output", options.output)
            refuse_replacing("--output", options.output, paths)
            _refuse_model_files(options.output, options.model)
        profile = _profile(options, data, device, progress, advance)
        if options.output is not None:
            outputs.write(options.output, profile.content())
        outputs.commit()
    return profile


def _refuse_model_files(output: Path, model: Path) -> None:
    """Fail where the output would replace a file of the model, or change its fingerprint."""
    same = os.path.realpath(output) == os.path.realpath(model)
    inside = model.is_dir() and os.path.realpath(output.parent) == os.path.realpath(model)
    if same or (inside and (output.exists() or output.suffix in (".json", ".safetensors", ".npz"))):
        what = "belongs to the model, or stands among its files"
        raise UserError(f"--output {output}", what, fix="Write to another place, or to a name that ends in .profile.")


def _profile(
    options: ProfileOptions,
    data: Sequence[Path | Arrays],
    device: torch.device,
    progress: Callable[[str], None],
    advance: Advance,
) -> FiringProfile:
    if looks_like_onnx(options.model):
        raise UserError(
            str(options.model), "an ONNX file cannot be profiled", expected="the model that it was exported from"
        )
    paths = [each for each in data if isinstance(each, Path)]
    progress("taking the model's fingerprint")
    sha256 = fingerprint(options.model)
    with _prepared(options, paths, device, progress) as ready:
        notes = [*ready.notes, *notes_on(paths)]
        intake = _intake(options, ready, notes)
        progress("running the model")
        sources = _run(ready.observer, read_batches(data, intake), data, options.tokens, device, advance)
        blocks = {block.module: block for block in ready.observer.profiles()}
        if isinstance(ready.observer, ProgramObserver) and ready.observer.unplaced:
            unplaced = first_few(sorted(ready.observer.unplaced))
            notes.append(f"padding counts as tokens in {unplaced}: it is not known where it is")
    return FiringProfile(
        ProfiledModel(options.model.name, options.in_memory or ready.kind, sha256, ready.dtype),
        sources,
        datetime.now(UTC).isoformat(timespec="seconds"),
        __version__,
        notes,
        blocks,
    )


@dataclass(frozen=True)
class _Ready:
    """A model that is ready to run, and how it takes data."""

    observer: ProgramObserver | ModuleObserver
    kind: str
    dtype: str
    notes: list[str]
    inputs: ModelInputs
    vocabulary: int | None
    pads_right: bool


@contextmanager
def _prepared(
    options: ProfileOptions, paths: Sequence[Path], device: torch.device, progress: Callable[[str], None]
) -> Iterator[_Ready]:
    """Load a model: one with experts to run its modules, any other as a traced program."""
    empty = None
    if options.model.is_dir() and not is_autoencoder(options.model):
        empty = empty_with_experts(options.model)
    if empty is None:
        yield _traced(options, paths, device, progress)
        return
    progress("looking for feed-forward blocks")
    blocks, reasons = counted_blocks(empty)
    if not blocks:
        raise _nothing_to_count(options, reasons)
    progress("loading the model")
    refuse_inputs(options.input_specs, f"{options.model}, another kind of model")
    with opened(options.model, empty, options.padding, options.dtype, device) as model:
        notes = [*model.notes, *([f"not counted: {first_few(reasons, '; ')}"] if reasons else [])]
        with _memory_of(device, "Use --device cpu, or a GPU with more memory."):
            observer = ModuleObserver(model.model, blocks, device)
        yield _Ready(
            observer,
            "Hugging Face directory",
            model.dtype,
            notes,
            model.inputs,
            model.vocabulary,
            model.padding == "none",
        )


def _traced(
    options: ProfileOptions, paths: Sequence[Path], device: torch.device, progress: Callable[[str], None]
) -> _Ready:
    progress("loading and tracing the model")
    model = _load(options, paths)
    chosen, notes = choose_dtype(model, options.dtype)
    progress("looking for feed-forward blocks")
    found = run_until(model.program, PassOptions(torch_dtype(chosen), layers="all"), Stage.DECIDE)
    experts = [block for block in found.blocks if block.pre is not None]
    blocks = [block for block, _ in found.chosen if block.pre is None] + experts
    if not blocks:
        raise _nothing_to_count(options, [f"{layer.module}: {layer.reason}" for layer in found.layers])
    notes = [*model.notes, *notes]
    if experts:
        note = (
            f"a token counts once for each expert of {first_few([block.module for block in experts])} that it is sent"
            " to, padding too, and the neurons at one place in all experts as one"
        )
        if model.kind != "Hugging Face directory":
            note += "; profile the model's Hugging Face directory to count each expert by itself, without padding"
        notes.append(note)
    with _memory_of(device, "Use --device cpu, or a GPU with more memory."):
        observer = ProgramObserver(found.program, blocks, device)
    pads_right = model.settings.get("padding") == "none"
    inputs = program_inputs(model.program)
    return _Ready(observer, model.kind, chosen, notes, inputs, model.vocabulary, pads_right)


def _nothing_to_count(options: ProfileOptions, reasons: Sequence[str]) -> UserError:
    what = "has no feed-forward block that twellc can rewrite"
    return UserError(str(options.model), what, got=first_few(reasons, "; "))


def _load(options: ProfileOptions, paths: Sequence[Path]) -> LoadedModel:
    """Load a model; one that does not take every length of a sequence for one to which all are padded."""
    try:
        return load_model(options)
    except UserError:
        if not options.model.is_dir() or any(kind_of(path) == "arrays" for path in paths) or not paths:
            raise
        sequence = options.sequence or DEFAULT_SEQUENCE
        return load_model(options, ((IDS, (0, sequence)),))


@contextmanager
def _memory_of(device: torch.device, fix: str) -> Iterator[None]:
    """Turn a lack of memory into a message."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(f"--device {device}", "its memory ran out", fix=fix) from error


def _run(
    observer: ProgramObserver | ModuleObserver,
    batches: Iterable[Batch],
    data: Sequence[Path | Arrays],
    tokens: int | None,
    device: torch.device,
    advance: Advance,
) -> list[DataSource]:
    """Run batches until there are none, or the blocks have seen `tokens` tokens; return what was read of the data."""
    total = sum(each.stat().st_size for each in data if isinstance(each, Path))
    sources: dict[int, DataSource] = {}
    for batch in batches:
        source = data[batch.source]
        name, kind = (
            (source.name, kind_of(source)) if isinstance(source, Path) else (f"inputs[{batch.source}]", "arrays")
        )
        where = f"--data {source}" if isinstance(source, Path) else name
        try:
            with _memory_of(device, "Use a smaller --batch or --sequence."):
                observer.run(batch.inputs, batch.counted, where)
        except (IndexError, RuntimeError) as error:  # torch's own
            fix = "Check its values, such as indices into tables."
            raise UserError(where, f"the model fails on this data ({first_line(error)})", fix=fix) from error
        before = sources.get(batch.source, DataSource(name, kind, 0, 0))
        sources[batch.source] = replace(
            before, sequences=before.sequences + batch.sequences, tokens=before.tokens + batch.tokens
        )
        advance(batch.read, total)
        if tokens is not None and observer.tokens >= tokens:
            break
    return list(sources.values())


def _intake(options: ProfileOptions, model: _Ready, notes: list[str]) -> Intake:
    limits = Limits(model.inputs, None, model.vocabulary)
    directory = model.vocabulary is not None and options.model.is_dir()
    config = json.loads(read_file(options.model / "config.json")) if directory else {}
    pad = config.get("pad_token_id")

    @functools.cache
    def tokenizer() -> Tokenizer:
        assert model.vocabulary is not None
        loaded = load_tokenizer(options.model, model.vocabulary)
        notes.extend(loaded.notes)
        return loaded

    return Intake(
        limits=limits,
        batch=options.batch,
        sequence=options.sequence,
        pads_right=model.pads_right,
        pad=pad if isinstance(pad, int) else None,
        field=options.field,
        tokenizer=tokenizer if directory else None,
    )
