"""The manifest: a JSON file beside each plan that says what is in it and what was done."""

from __future__ import annotations

import errno
import itertools
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from twellc.base.caches import KeyValueCache
from twellc.base.errors import UserError
from twellc.base.files import digest, read_file
from twellc.base.records import OPTIONAL, Count, Record, of_json, parse_json
from twellc.base.version import __version__
from twellc.compiling.settings import Settings
from twellc.compiling.summary import TranslationSummary
from twellc.export.plan import Backend, Plan, PlanTensor
from twellc.export.shapes import ShapeProfile
from twellc.export.tensorrt_host import python_module
from twellc.options.commands import CompileOptions
from twellc.passes.report import Attention, Layer, Linear
from twellc.passes.sizes.relations import SizeRelation
from twellc.plugins.library import PLUGIN_NAMESPACE, PLUGIN_VERSION
from twellc.plugins.other_libraries import PluginLibrary
from twellc.plugins.registration import how_to_register

SCHEMA = 3


@dataclass(frozen=True)
class ModelFile(Record):
    """The model: name of its file or folder, kind, and SHA-256 of its files."""

    name: str
    kind: str
    sha256: str


@dataclass(frozen=True)
class Plugins(Record):
    """The plugins that a plan needs, whether it carries them, how to register them, and other people's libraries."""

    namespace: str
    version: str
    names: list[str]
    embedded: bool
    register: dict[str, str] | None = field(default=None, metadata=OPTIONAL)
    libraries: list[PluginLibrary] | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True)
class OnnxFile(Record):
    """The rewritten graph: the name of its file, None where it was not kept, and its SHA-256."""

    file: str | None
    sha256: str


@dataclass(frozen=True)
class PlanFile(Record):
    """A plan: name, size and SHA-256 of its file, its tensors, and the names of its plugin layers."""

    file: str
    bytes: Count
    sha256: str
    inputs: list[PlanTensor]
    outputs: list[PlanTensor]
    plugin_layers: list[str]


@dataclass(frozen=True)
class RankFiles(Record):
    """What was made for one of several ranks: its plan, None where none was built, and its graph."""

    plan: PlanFile | None
    onnx: OnnxFile


@dataclass(frozen=True)
class Manifest(Record):
    """What was done, and what is in a plan.

    Attributes:
        schema: The version of this form.
        twellc: The version of twellc.
        model: What was compiled.
        settings: The settings that decide what the graph is.
        layers: What became of each feed-forward block.
        attention: What became of each attention block.
        notes: What the user should know.
        warnings: What the user should worry about.
        plugins: The plugins that the plan needs.
        onnx: The rewritten graph; that of the first of several ranks.
        profiles: The optimization profiles: ranges of shapes by input.
        backend: The TensorRT; None where no plan was built.
        plan: The plan, None likewise; that of the first rank, to which its file is a link.
        ranks: What was made for each of several ranks; None where the model is not shared.
        cache: The key-value cache; None of a model without one.
        linear: What became of linear layers outside of the blocks; None of a model without any.
        relations: What sizes of inputs must keep in each call; None where those of the profiles go together in any way.
    """

    schema: int
    twellc: str
    model: ModelFile
    settings: Settings
    layers: list[Layer]
    attention: list[Attention]
    notes: list[str]
    warnings: list[str]
    plugins: Plugins
    onnx: OnnxFile
    profiles: list[ShapeProfile]
    backend: Backend | None
    plan: PlanFile | None
    ranks: list[RankFiles] | None = field(default=None, metadata=OPTIONAL)
    cache: KeyValueCache | None = field(default=None, metadata=OPTIONAL)
    relations: list[SizeRelation] | None = field(default=None, metadata=OPTIONAL)
    linear: list[Linear] | None = field(default=None, metadata=OPTIONAL)


# File name of the graph that a plan is built from where it is not kept.
UNKEPT_GRAPH = "model.onnx"


def manifest_path(plan: Path) -> Path:
    """Return where the manifest of a plan stands: `model.plan` has `model.plan.json`."""
    return plan.with_name(plan.name + ".json")


def has_manifest(file: Path) -> bool:
    """Say whether a manifest stands beside a file. Names end at 255 bytes, and none can be longer."""
    try:
        return manifest_path(file).is_file()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise


def is_plan(file: Path) -> bool:
    """Say whether this is a file that has a manifest, or starts as the plans of TensorRT and TensorRT-RTX do."""
    if not file.is_file():
        return False
    if has_manifest(file):
        return True
    with file.open("rb") as stream:
        return stream.read(4) in (b"ftrt", b"vtrt")


def text_folder(options: CompileOptions) -> str | None:
    """Return the name of the folder with a tokenizer beside a plan that generates text; None of any other."""
    return None if options.cache is None or options.output is None else f"{options.output.name}.text"


def by_cudnn(attention: list[Attention]) -> bool:
    """Whether a plan needs the attention plugin, and so cuDNN where it runs."""
    return any(block.form == "cudnn" for block in attention)


def make_manifest(
    options: CompileOptions,
    translation: TranslationSummary,
    plans: list[tuple[Plan, Path]],
) -> Manifest:
    """Return the manifest of a plan, or the report of a run that stopped before one.

    Args:
        options: See `CompileOptions`.
        translation: What was translated.
        plans: The plan and its file, or one for each rank; none where none was built.
    """
    used = translation.plugins
    backend = register = libraries = None
    plan_records = [_plan_file(plan, file) for plan, file in plans]
    if plans and options.output is not None:
        plan = plans[0][0]
        backend, libraries = plan.backend, plan.libraries or None
        if used or libraries:
            module = python_module(backend.name)
            assert module is not None  # it built the plan
            others = [each.file for each in libraries or ()]
            register = how_to_register(options.output.name, module, used, others)
    onnx = [OnnxFile(graph.files[0] if options.onnx else None, graph.digest) for graph in translation.graphs]
    ranks, plan_record = None, plan_records[0] if plan_records else None
    if options.tensor_parallel > 1:
        ranks = [RankFiles(plan, graph) for plan, graph in itertools.zip_longest(plan_records, onnx)]
        if plan_record is not None and options.output is not None:
            plan_record = replace(plan_record, file=options.output.name)
    embedded = options.embed_plugins and register is not None
    return Manifest(
        schema=SCHEMA,
        twellc=__version__,
        model=ModelFile(**translation.model),
        settings=translation.settings,
        layers=translation.layers,
        attention=translation.attention,
        notes=list(translation.notes),
        warnings=list(translation.warnings),
        plugins=Plugins(PLUGIN_NAMESPACE, PLUGIN_VERSION, used, embedded, register, libraries),
        onnx=onnx[0],
        profiles=translation.profiles,
        backend=backend,
        plan=plan_record,
        ranks=ranks,
        cache=translation.cache and replace(translation.cache, text=text_folder(options)),
        relations=translation.relations or None,
        linear=translation.linear or None,
    )


def _plan_file(plan: Plan, file: Path) -> PlanFile:
    return PlanFile(file.name, file.stat().st_size, digest(file), plan.inputs, plan.outputs, plan.plugin_layers)


def read_manifest(plan: Path) -> Manifest:
    """Read the manifest of a plan.

    Raises:
        UserError: There is none, it is damaged, of another schema, or belongs to another plan.
    """
    path = manifest_path(plan)
    if not has_manifest(plan):
        whole = plan.with_name(re.sub(r"\.rank\d+$", "", plan.name))
        if whole != plan and has_manifest(whole):
            what = "is the plan of one of several ranks, whose manifest is for all of them"
            raise UserError(str(plan), what, got=manifest_path(whole).name, fix=f"Give {whole}.")
        fix = "Keep both files of `twellc compile` together."
        raise UserError(str(plan), "has no manifest beside it, as a plan must", expected=path.name, fix=fix)
    try:
        content = parse_json(read_file(path))
    except ValueError as error:
        what = f"is not a manifest of twellc: it cannot be read as JSON ({error})"
        raise UserError(str(path), what, fix=_FIX) from error
    schema = content.get("schema") if isinstance(content, dict) else None
    if type(schema) is not int:
        raise UserError(str(path), "is not a manifest of twellc: it names no schema", fix=_FIX)
    if schema != SCHEMA:
        fix = "Use the twellc that made the plan, or compile the model again."
        raise UserError(str(path), "the manifest is of another version", got=str(schema), expected=str(SCHEMA), fix=fix)
    try:
        manifest = of_json(Manifest, content)
        _refuse_contradictions(manifest)
    except ValueError as error:
        raise UserError(str(path), f"the manifest is damaged: {error}", fix=_FIX) from error
    assert manifest.plan is not None
    if manifest.plan.sha256 != digest(plan):
        raise UserError(str(path), "the manifest belongs to another plan, or the plan is damaged", fix=_FIX)
    return manifest


def _refuse_contradictions(manifest: Manifest) -> None:
    """Fail if the manifest of a plan contradicts itself.

    Raises:
        ValueError: It does; the message names the place.
    """
    if manifest.plan is None or manifest.backend is None:
        raise ValueError("it names no plan" if manifest.plan is None else "it names no backend")
    if manifest.onnx.file not in (None, Path(manifest.onnx.file or "").name):
        raise ValueError("onnx.file is not the name of a file beside the plan")
    if not manifest.profiles:
        raise ValueError("profiles is empty")
    for index, profile in enumerate(manifest.profiles):
        for tensor in manifest.plan.inputs:
            shapes = profile.get(tensor.name)
            if shapes is None:
                raise ValueError(f"profiles[{index}] lacks the input {tensor.name!r}")
            ranks = {len(shapes.min), len(shapes.opt), len(shapes.max), len(tensor.shape)}
            sizes = zip(shapes.min, shapes.opt, shapes.max, strict=False)
            if len(ranks) > 1 or any(not low <= opt <= high for low, opt, high in sizes):
                raise ValueError(f"profiles[{index}].{tensor.name} has impossible shapes")


def refuse_other_plugins(plan: Path, manifest: Manifest) -> None:
    """Fail if a plan needs plugins of another version than this package's.

    Raises:
        UserError: It does.
    """
    plugins = manifest.plugins
    if plugins.names and plugins.version != PLUGIN_VERSION:
        raise UserError(
            str(plan),
            f"the plan needs other plugins than those of twellc {__version__}",
            got=f"plugin version {PLUGIN_VERSION}",
            expected=f"plugin version {plugins.version}, of twellc {manifest.twellc}",
            fix="Install that twellc, or compile the model again with this one.",
        )


_FIX = "Compile the model again."
