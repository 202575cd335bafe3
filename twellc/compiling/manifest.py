"""The manifest: a JSON file beside each plan that says what is in it and what was done."""

from __future__ import annotations

import errno
import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from twellc.base.dtypes import DTYPES
from twellc.base.errors import UserError
from twellc.base.files import digest
from twellc.base.records import OPTIONAL, Record, of_json
from twellc.base.version import __version__
from twellc.compiling.summary import TranslationSummary
from twellc.export.plan import Plan
from twellc.export.shapes import ShapeProfile, ShapeRange
from twellc.export.tensorrt_host import python_module
from twellc.options.commands import LOGITS, PADDINGS, CompileOptions
from twellc.passes.report import Attention, Layer
from twellc.plugins.library import (
    ATTENTION_FORMS,
    ATTENTION_NAME,
    COMPRESSIONS,
    PLUGIN_NAMES,
    PLUGIN_NAMESPACE,
    PLUGIN_VERSION,
)
from twellc.plugins.registration import how_to_register

_Record = TypeVar("_Record", bound=Record)

SCHEMA = 3

_SHAPES = {"min": [int], "opt": [int], "max": [int]}
_TENSOR = {"name": str, "dtype": str, "shape": [int]}
# What the manifest holds of a block of which something was expected.
_EXPECTATION = {
    "gpu": str, "assumed": bool, "density": (float, int), "gain": (float, int), "pays_below": (float, int),
    "times": [{"tokens": int, "dense_us": (float, int), "twell_us": (float, int)}],
}  # fmt: skip
# Where a plan needs some.
_LIBRARIES = [{"names": [str], "file": str, "sha256": str}]
_NEURONS = {
    "kept": int, "unable": int, "dead": int, "never?": int, "tokens?": int, "rate_bound?": (float, int),
    "density?": (float, int), "lost?": (float, int), "lost_of?": int, "reason": str,
}  # fmt: skip
# What the manifest of a plan holds: a type or one of several; a list of one form; a dictionary with these
# keys, which a question mark makes optional, or with any (`str`).
_FORM: dict[str, Any] = {
    "twellc": str,
    "model": {"name": str, "kind": str, "sha256": str},
    "settings": {
        "dtype": str, "layers": str, "compression": int, "attention_forms": [str], "calibration?": str,
        "prune_dead?": bool, "decided?": {str: {"decision": str, "facts": str, "hot": int, "compression": int}},
    },
    "layers": [
        {
            "module": str, "variant": str, "activation": str, "d_model": int, "d_ff": int, "d_out": int,
            "matched": bool, "decision": str, "reason": str, "residual": bool, "hot": int, "neurons?": _NEURONS,
            "compression?": int, "expectation?": _EXPECTATION,
        }
    ],
    "attention": [
        {"module": str, "heads": int, "kv_heads": int, "width": int, "mask": str, "form": str, "reason": str}
    ],
    "notes": [str],
    "warnings": [str],
    "plugins": {"namespace": str, "version": str, "names": [str], "embedded": bool},
    "onnx": {"file": (str, type(None)), "sha256": str},
    "profiles": [{str: _SHAPES}],
    "backend": {"name": str, "version": str},
    "plan": {
        "file": str, "bytes": int, "sha256": str, "inputs": [_TENSOR], "outputs": [_TENSOR], "plugin_layers": [str],
    },
}  # fmt: skip


@dataclass(frozen=True)
class ModelFile(Record):
    """The model: name of its file or folder, kind, and SHA-256 of its files."""

    name: str
    kind: str
    sha256: str


@dataclass(frozen=True)
class Settings(Record):
    """The settings that decide what the graph is: see `CompileOptions`. Only some models leave the optional ones.

    `calibration` is the SHA-256 of the profile, `decided` what was decided by it.
    """

    dtype: str
    layers: str
    compression: int
    attention_forms: list[str]
    padding: str | None = field(default=None, metadata=OPTIONAL)
    logits: str | None = field(default=None, metadata=OPTIONAL)
    calibration: str | None = field(default=None, metadata=OPTIONAL)
    prune_dead: bool | None = field(default=None, metadata=OPTIONAL)
    decided: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True)
class PluginLibrary(Record):
    """A plugin library of other people: the plugins that it brings, and name and SHA-256 of its file."""

    names: list[str]
    file: str
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
class Backend(Record):
    """The TensorRT that built a plan."""

    name: str
    version: str


@dataclass(frozen=True)
class PlanTensor(Record):
    """An input or output of a plan; -1 stands for a dynamic dimension."""

    name: str
    dtype: str
    shape: list[int]


@dataclass(frozen=True)
class PlanFile(Record):
    """A plan: name, size and SHA-256 of its file, its tensors, and the names of its plugin layers."""

    file: str
    bytes: int
    sha256: str
    inputs: list[PlanTensor]
    outputs: list[PlanTensor]
    plugin_layers: list[str]


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
        onnx: The rewritten graph.
        profiles: The optimization profiles: ranges of shapes by input.
        backend: The TensorRT; None where no plan was built.
        plan: The plan; None likewise.
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


def by_cudnn(attention: list[Attention]) -> bool:
    """Whether a plan needs the attention plugin, and so cuDNN where it runs."""
    return any(block.form == "cudnn" for block in attention)


def needs_plugins(layers: list[Layer], attention: list[Attention]) -> bool:
    """Whether a plan needs plugins of twellc."""
    return by_cudnn(attention) or any(layer.decision == "twell" for layer in layers)


def make_manifest(
    options: CompileOptions,
    translation: TranslationSummary,
    plan: Plan | None,
    plan_file: Path | None,
) -> Manifest:
    """Return the manifest of a plan, or the report of a run that stopped before one."""
    rewritten = {layer.variant for layer in translation.layers if layer.decision == "twell"}
    used = [name for name, variant in zip(PLUGIN_NAMES, ("gated", "plain"), strict=True) if variant in rewritten]
    used += [ATTENTION_NAME] if by_cudnn(translation.attention) else []
    backend = plan_record = register = libraries = None
    if plan is not None and plan_file is not None:
        backend = Backend(**plan.backend)
        libraries = [PluginLibrary(each.names, each.file, each.sha256) for each in plan.libraries] or None
        if used or libraries:
            module = python_module(backend.name)
            assert module is not None  # it built the plan
            others = [each.file for each in libraries or ()]
            register = how_to_register(plan_file.name, module, used, others)
        inputs, outputs = (
            [PlanTensor(tensor.name, tensor.dtype, list(tensor.shape)) for tensor in tensors]
            for tensors in (plan.inputs, plan.outputs)
        )
        size, sha256 = plan_file.stat().st_size, digest(plan_file)
        plan_record = PlanFile(plan_file.name, size, sha256, inputs, outputs, plan.plugin_layers)
    embedded = options.embed_plugins and register is not None
    return Manifest(
        schema=SCHEMA,
        twellc=__version__,
        model=ModelFile(**translation.model),
        settings=Settings(**translation.settings),
        layers=translation.layers,
        attention=translation.attention,
        notes=list(translation.notes),
        warnings=list(translation.warnings),
        plugins=Plugins(PLUGIN_NAMESPACE, PLUGIN_VERSION, used, embedded, register, libraries),
        onnx=OnnxFile(options.onnx.name if options.onnx else None, translation.digest),
        profiles=translation.profiles,
        backend=backend,
        plan=plan_record,
    )


def read_manifest(plan: Path) -> Manifest:
    """Read the manifest of a plan.

    Raises:
        UserError: There is none, it is damaged, of another schema, or belongs to another plan.
    """
    path = manifest_path(plan)
    if not has_manifest(plan):
        raise UserError(
            str(plan), "has no manifest beside it, as a plan must", expected=path.name,
            fix="Keep both files of `twellc compile` together.",
        )  # fmt: skip
    try:
        manifest = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(
            str(path), f"is no manifest of twellc: it cannot be read as JSON ({error})", fix=_FIX
        ) from error
    schema = manifest.get("schema") if isinstance(manifest, dict) else None
    if type(schema) is not int:
        raise UserError(str(path), "is no manifest of twellc: it names no schema", fix=_FIX)
    if schema != SCHEMA:
        raise UserError(
            str(path), "the manifest is of another version", got=str(schema), expected=str(SCHEMA),
            fix="Use the twellc that made the plan, or compile the model again.",
        )  # fmt: skip
    misfit = _misfit(manifest, _FORM) or _unusable(manifest)
    if misfit:
        raise UserError(str(path), f"the manifest is damaged: {misfit}", fix=_FIX)
    if manifest["plan"]["sha256"] != digest(plan):
        raise UserError(str(path), "the manifest belongs to another plan, or the plan is damaged", fix=_FIX)
    return _of_json(manifest)


def _of_json(content: dict[str, Any]) -> Manifest:
    """Return the manifest of JSON that has the form of one; what the form does not name is left out."""

    def pick(record: type[_Record], values: dict[str, Any]) -> _Record:
        return record(**{each.name: values[each.name] for each in fields(record) if each.name in values})  # type: ignore[arg-type]

    plan = content["plan"]
    tensors = {key: [pick(PlanTensor, tensor) for tensor in plan[key]] for key in ("inputs", "outputs")}
    profiles = [
        {name: ShapeRange(*(tuple(shapes[which]) for which in _SHAPES)) for name, shapes in profile.items()}
        for profile in content["profiles"]
    ]
    given = content["plugins"].get("libraries")
    libraries = None if given is None else [pick(PluginLibrary, library) for library in given]
    records = {
        "model": pick(ModelFile, content["model"]),
        "settings": pick(Settings, content["settings"]),
        "layers": [of_json(Layer, layer) for layer in content["layers"]],
        "attention": [pick(Attention, block) for block in content["attention"]],
        "plugins": pick(Plugins, {**content["plugins"], "libraries": libraries}),
        "onnx": pick(OnnxFile, content["onnx"]),
        "profiles": profiles,
        "backend": pick(Backend, content["backend"]),
        "plan": pick(PlanFile, {**plan, **tensors}),
    }
    return pick(Manifest, {**content, **records})


def refuse_other_plugins(plan: Path, manifest: Manifest) -> None:
    """Fail if a plan needs plugins of another version than this package's.

    Raises:
        UserError: It does.
    """
    plugins = manifest.plugins
    if plugins.names and plugins.version != PLUGIN_VERSION:
        raise UserError(
            str(plan), f"the plan needs other plugins than those of twellc {__version__}",
            got=f"plugin version {PLUGIN_VERSION}",
            expected=f"plugin version {plugins.version}, of twellc {manifest.twellc}",
            fix="Install that twellc, or compile the model again with this one.",
        )  # fmt: skip


_FIX = "Compile the model again."


def _misfit(value: Any, form: Any, place: str = "") -> str:
    """Say where a JSON value does not have a form; see `_FORM`. Keys that the form does not name are allowed."""
    if isinstance(form, tuple):
        return "" if type(value) in form else f"{place} is no {_KINDS[form[0]]}"
    if isinstance(form, type):
        return _misfit(value, (form,), place)
    if not isinstance(value, type(form)):
        return f"{place} is no {_KINDS[type(form)]}"
    if isinstance(form, list):
        items = [(f"{place}[{index}]", item, form[0]) for index, item in enumerate(value)]
    elif str in form:
        items = [(f"{place}.{key}", item, form[str]) for key, item in value.items()]
    else:
        missing = [key for key in form if key not in value and not key.endswith("?")]
        if missing:
            return f"{place} has no {missing[0]}".strip()
        wanted = {key.removesuffix("?"): inner for key, inner in form.items()}
        items = [(f"{place}.{key}".strip("."), value[key], inner) for key, inner in wanted.items() if key in value]
    return next(filter(None, (_misfit(item, wanted, where) for where, item, wanted in items)), "")


_KINDS = {str: "string", int: "integer", float: "number", bool: "boolean", list: "list", dict: "object"}


def _unusable(manifest: dict[str, Any]) -> str:
    """Say what contradicts itself in a manifest that has the right form."""
    settings = manifest["settings"]
    allowed = {"dtype": DTYPES, "compression": COMPRESSIONS, "padding": PADDINGS, "logits": LOGITS}
    known = all(settings[name] in values for name, values in allowed.items() if name in settings)
    if not known or not set(settings["attention_forms"]) <= set(ATTENTION_FORMS):
        return "settings has values that twellc compile does not take"
    libraries = _misfit(manifest["plugins"].get("libraries", []), _LIBRARIES, "plugins.libraries")
    if libraries:
        return libraries
    inputs = {tensor["name"]: tensor["shape"] for tensor in manifest["plan"]["inputs"]}
    if manifest["onnx"]["file"] not in (None, Path(manifest["onnx"]["file"] or "").name):
        return "onnx.file is no name of a file beside the plan"
    if not manifest["profiles"]:
        return "profiles is empty"
    for index, profile in enumerate(manifest["profiles"]):
        for name, shape in inputs.items():
            if name not in profile:
                return f"profiles[{index}] lacks the input {name!r}"
            shapes = profile[name]
            ranks = {len(shapes[which]) for which in _SHAPES} | {len(shape)}
            sizes = zip(*(shapes[which] for which in _SHAPES), strict=False)
            if len(ranks) > 1 or any(not 1 <= low <= opt <= high for low, opt, high in sizes):
                return f"profiles[{index}].{name} has impossible shapes"
    return ""
