"""Options of the commands, the one home of their names, defaults and meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from twellc.base.dtypes import DTYPES
from twellc.base.errors import UserError
from twellc.export.shapes import Shape, ShapeRange
from twellc.export.triton import PLAN_NAME, VERSION, model_folder
from twellc.options.declared_inputs import InputDeclaration
from twellc.plugins.library import COMPRESSIONS, GPUS

ATTENTIONS = ("auto", "tensorrt", "cudnn")
BACKENDS = ("auto", "tensorrt", "tensorrt-rtx", "none")
PADDINGS = ("none", "mask")
LOGITS = ("all", "last")
DEFAULT_COMPRESSION = 8
DEFAULT_DENSITY = 0.005
DEFAULT_TOKENS = 2048
DEFAULT_GPU = "H200"
DEFAULT_BATCH = 8
DEFAULT_REPEATS = 20


@dataclass(frozen=True)
class CompileOptions:
    """What `twellc compile` was asked to do.

    Attributes:
        model: A torch.export archive, a Hugging Face directory, an ONNX file or a pickled module.
        output: Where the plan goes; None with the backend `none`.
        onnx: Where to keep the rewritten graph.
        backend: `auto`, `tensorrt`, `tensorrt-rtx` or `none`.
        dtype: `bf16` or `fp16`; None takes the model's own, or bf16 where that is neither.
        profiles: Shape ranges of inputs, in the order in which they were given.
        layers: Which matches to rewrite: `auto`, `all`, `none` or a regular expression over module paths.
        compression: The TwELL compression factor; None takes the default, or with a profile what suits each block.
        strict: Fail when nothing matches or a block that looks like one is refused.
        dump_graphs: A folder for the graph as traced and after each pass.
        report: Where to write the report as JSON.
        html: Where to write it as a page to look at.
        overwrite: Whether outputs may replace existing files.
        trust_model: Whether to load a pickle, or an archive that could execute code.
        inputs: The inputs of a pickled module.
        triton: The folder of the model in a Triton model repository; `output` lies in it.
        embed_plugins: Whether the plan carries the plugin library.
        attention: `auto`, `tensorrt` or `cudnn`: who computes attention.
        attention_forms: The forms that this comes to on the TensorRT at hand, see `passes/attention.py`; empty until
            it has been asked.
        padding: Whether a causal Hugging Face model takes no `attention_mask` (`none`) or one (`mask`); None takes the
            default of the model, `none` where it is causal.
        logits: The places whose logits a causal Hugging Face model computes: `all` or the `last` one.
        target_gpu: The GPU to decide for: a name that twellc knows, or a data file of measured times; None takes the
            GPU at hand where its times are known, else an H100.
        plugin_libraries: TensorRT plugin libraries of other people, for graphs that hold nodes of theirs.
        calibration: A profile of the model, see `twellc profile`.
        prune_dead: Whether neurons that never fired in the profile are removed, which is approximate.
        prune_check: A second profile, to count what that loses.
        decided: What an earlier compilation with a profile decided for blocks, by module, to do it again.
        in_memory: What to call a model that is in memory, and in `model` only for the command; empty for a file.
    """

    model: Path
    output: Path | None = None
    onnx: Path | None = None
    backend: str = "auto"
    dtype: str | None = None
    profiles: tuple[tuple[str, ShapeRange], ...] = ()
    layers: str = "auto"
    compression: int | None = None
    strict: bool = False
    dump_graphs: Path | None = None
    report: Path | None = None
    html: Path | None = None
    overwrite: bool = False
    trust_model: bool = False
    inputs: tuple[InputDeclaration, ...] = ()
    triton: Path | None = None
    embed_plugins: bool = False
    attention: str = "auto"
    attention_forms: tuple[str, ...] = ()
    padding: str | None = None
    logits: str = "all"
    target_gpu: str | None = None
    plugin_libraries: tuple[Path, ...] = ()
    calibration: Path | None = None
    prune_dead: bool = False
    prune_check: Path | None = None
    decided: Mapping[str, Mapping[str, Any]] | None = None
    in_memory: str = ""


@dataclass(frozen=True)
class InspectOptions:
    """What `twellc inspect` was asked to do.

    Attributes:
        target: A model, a plan or a rewritten ONNX file.
        dtype: Precision to judge a model in; None takes the one that `twellc compile` would.
        density: Assumed share of gate activations that are not zero, to count operations and bytes and expect times at,
            of blocks that no profile knows.
        tokens: Tokens in a call to count operations and bytes of, and to name the kernels of.
        gpu: The GPU whose kernels to name, of `twellc.plugins.library.GPUS`; None takes that of `target_gpu`.
        target_gpu: See `CompileOptions`; of what is compiled None takes the GPU that it was compiled for.
        trust_model: Load a pickle, or an archive that could execute code.
        inputs: The inputs of a pickled module.
        calibration: See `CompileOptions`.
        prune_dead: See `CompileOptions`.
        prune_check: See `CompileOptions`.
        in_memory: See `CompileOptions`.
    """

    target: Path
    dtype: str | None = None
    density: float = DEFAULT_DENSITY
    tokens: int = DEFAULT_TOKENS
    gpu: str | None = None
    target_gpu: str | None = None
    trust_model: bool = False
    inputs: tuple[InputDeclaration, ...] = ()
    calibration: Path | None = None
    prune_dead: bool = False
    prune_check: Path | None = None
    in_memory: str = ""


@dataclass(frozen=True)
class BenchOptions:
    """What `twellc bench` was asked to do.

    Attributes:
        model: The model, as `twellc compile` takes it, but no ONNX file.
        shapes: Sizes of the model's dynamic dimensions, in order, to measure at; none takes usual ones.
        dtype: Precision; None takes the one that `twellc compile` would.
        layers: Which matches to rewrite, as in `CompileOptions`.
        compression: See `CompileOptions`.
        target_gpu: See `CompileOptions`.
        calibration: See `CompileOptions`.
        prune_dead: See `CompileOptions`.
        prune_check: See `CompileOptions`.
        seed: Seed of random inputs; None takes 0.
        arrays: An `.npz` file with the inputs, instead of random ones.
        text: A text to make the inputs from, instead of random ones.
        repeats: How often each contestant is timed.
        compiled: Whether to measure what torch.compile makes of the models, too.
        tensorrt: Whether to build and measure plans where full TensorRT is installed.
        plot: Where to write a picture of the speed-ups.
        overwrite: Whether the picture may replace an existing file.
        trust_model: Load a pickle, or an archive that could execute code.
        inputs: The inputs of a pickled module.
        in_memory: See `CompileOptions`.
    """

    model: Path
    shapes: tuple[Shape, ...] = ()
    dtype: str | None = None
    layers: str = "auto"
    compression: int | None = None
    target_gpu: str | None = None
    calibration: Path | None = None
    prune_dead: bool = False
    prune_check: Path | None = None
    seed: int | None = None
    arrays: Path | None = None
    text: Path | None = None
    repeats: int = DEFAULT_REPEATS
    compiled: bool = True
    tensorrt: bool = True
    plot: Path | None = None
    overwrite: bool = False
    trust_model: bool = False
    inputs: tuple[InputDeclaration, ...] = ()
    in_memory: str = ""


@dataclass(frozen=True)
class CheckOptions:
    """What `twellc check` was asked to do.

    Attributes:
        model: The model, as `twellc compile` takes it.
        candidate: A rewritten ONNX file, or a plan with its manifest.
        seed: Seed of random inputs; None takes 0.
        arrays: An `.npz` file with the inputs, instead of random ones.
        text: A text to make the inputs from, instead of random ones.
        trust_model: Load a pickle, or an archive that could execute code.
        inputs: The inputs of a pickled module.
        calibration: The profile that the candidate was compiled with, for a plan whose graph has to be made again;
            another one is refused.
    """

    model: Path
    candidate: Path
    seed: int | None = None
    arrays: Path | None = None
    text: Path | None = None
    trust_model: bool = False
    inputs: tuple[InputDeclaration, ...] = ()
    calibration: Path | None = None


@dataclass(frozen=True)
class ProfileOptions:
    """What `twellc profile` was asked to do.

    Attributes:
        model: The model, as `twellc compile` takes it.
        output: Where the profile goes; None keeps it in memory.
        device: `auto`, `cpu`, `cuda` or `cuda:N`; `auto` takes the GPU where torch sees one.
        batch: Sequences in a run of the model.
        sequence: Tokens in a sequence at most, for data without a shape of its own; None takes 1024, or what the model
            takes at most.
        tokens: How many tokens to stop after; None takes all data.
        field: The field of a line of JSON that holds the text.
        dtype: Precision to run the model in; None takes the one that `twellc compile` would.
        padding: See `CompileOptions`.
        overwrite: Whether the output may replace an existing file.
        trust_model: Load a pickle, or an archive that could execute code.
        inputs: The inputs of a pickled module.
        in_memory: See `CompileOptions`.
    """

    model: Path
    output: Path | None = None
    device: str = "auto"
    batch: int = DEFAULT_BATCH
    sequence: int | None = None
    tokens: int | None = None
    field: str = "text"
    dtype: str | None = None
    padding: str | None = None
    overwrite: bool = False
    trust_model: bool = False
    inputs: tuple[InputDeclaration, ...] = ()
    in_memory: str = ""


def refuse_dtype(requested: str | None, target: str) -> None:
    """Fail if a dtype is asked for of something that is compiled already.

    Raises:
        UserError: It is.
    """
    if requested is not None:
        raise UserError(
            f"--dtype {requested}", "what is compiled keeps its precision", got=target, expected="a model",
            fix="Leave it out.",
        )  # fmt: skip


class CalibrationOptions(Protocol):
    """Options that name profiles; see `CompileOptions`."""

    @property
    def calibration(self) -> Path | None:
        """The profile to calibrate by."""

    @property
    def prune_dead(self) -> bool:
        """Whether neurons that never fired are removed."""

    @property
    def prune_check(self) -> Path | None:
        """A second profile."""


def refuse_pruning(options: CalibrationOptions) -> None:
    """Fail if pruning is asked for without a profile.

    Raises:
        UserError: It is.
    """
    for option, given in (("--prune-dead", options.prune_dead), ("--prune-check", options.prune_check)):
        if given:
            raise UserError(option, "needs a profile of the model", fix="Add --calibration PROFILE.")


def refuse_calibration(options: CalibrationOptions, target: str) -> None:
    """Fail if a calibration is given for something that has no use for one.

    Raises:
        UserError: It is.
    """
    refuse_pruning(options)
    if options.calibration is not None:
        raise UserError(
            f"--calibration {options.calibration}", "only a model that twellc traces can be calibrated", got=target,
            expected="a torch.export archive, a Hugging Face directory or a pickled module", fix="Leave it out.",
        )  # fmt: skip


_CHOICES: dict[str, tuple[object, ...]] = {
    "backend": BACKENDS,
    "dtype": (None, *DTYPES),
    "padding": (None, *PADDINGS),
    "logits": LOGITS,
    "attention": ATTENTIONS,
    "compression": (None, *COMPRESSIONS),
    "gpu": (None, *GPUS),
}


# Options that count something, and whether None stands for a default.
_COUNTS = {"batch": False, "sequence": True, "tokens": True, "repeats": False}


def refuse_choice(option: str, value: object) -> None:
    """Fail if an option has a value that there is not.

    Raises:
        UserError: It has.
    """
    if option in _COUNTS and not (type(value) is int and value >= 1) and not (value is None and _COUNTS[option]):
        raise UserError(f"--{option}", "is no count", got=repr(value), expected="an integer from 1 on")
    choices = _CHOICES.get(option)
    if choices is not None and value not in choices:
        raise UserError(f"--{option}", "no such choice", got=repr(value), expected=" or ".join(map(str, choices)))


def compile_options(
    model: Path, output: Path | None, *, onnx: Path | None = None, triton: Path | None = None, **options: Any
) -> CompileOptions:
    """Return the options of a compilation: where its outputs go is worked out here.

    Args:
        model: The model.
        output: The plan; with the backend `none` it may name the ONNX file.
        onnx: The rewritten graph.
        triton: A Triton model repository, for which there is no `output`.
        options: See `CompileOptions`.

    Raises:
        UserError: They contradict each other, or nothing would be written.
    """
    if triton is not None:
        if output is not None:
            raise UserError("--triton", "the plan goes into the repository", got="--output, too", fix="Leave one out.")
        output = triton_plan(triton, model)
        triton = model_folder(triton, model)
    if options.get("backend") == "none":
        given_options = {
            "triton": triton, "embed-plugins": options.get("embed_plugins"),
            "plugin-library": options.get("plugin_libraries"),
        }  # fmt: skip
        for option, given in given_options.items():
            if given:
                raise UserError(f"--{option}", "no plan is built", got="--backend none")
        if onnx is None and output is not None and output.suffix == ".onnx":
            onnx, output = output, None
        if onnx is None:
            raise UserError("--backend none", "stops at ONNX, and no ONNX file is named", fix="Add --onnx FILE.")
        if output is not None:
            raise UserError("--output", "no plan is built", got="--backend none", fix="Leave one out.")
    elif output is None:
        raise UserError("--output", "no plan to write", fix="Add -o FILE, or stop at --backend none --onnx FILE.")
    return CompileOptions(model, output, onnx, triton=triton, **options)


def triton_plan(repository: Path, model: Path) -> Path:
    """Return where the plan of a model stands in a Triton model repository."""
    return model_folder(repository, model) / VERSION / PLAN_NAME
