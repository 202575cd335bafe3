"""What each command was asked to do: its options, with their defaults and meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from twellc.base.caches import INPUT_IDS
from twellc.base.dtypes import DTYPES
from twellc.base.errors import UserError
from twellc.export.shapes import Shape, ShapeRange
from twellc.export.triton import PLAN_NAME, VERSION, model_folder
from twellc.options.decisions import DecisionOptions
from twellc.options.samples import LARGEST_SEED, SampleOptions
from twellc.options.source import LOGITS, PADDINGS, CacheOptions, SourceOptions, TracingOptions
from twellc.plugins.library import COMPRESSIONS, GPUS

ATTENTIONS = ("auto", "tensorrt", "cudnn")
BACKENDS = ("auto", "tensorrt", "tensorrt-rtx", "none")
DEFAULT_DENSITY = 0.005
DEFAULT_TOKENS = 2048
DEFAULT_GPU = "H100"
DEFAULT_BATCH = 8
DEFAULT_REPEATS = 20
# TensorRT tunes a plan for the largest number of sequences of a profile, and this many are 3 % faster when tuned for.
_FEW_SEQUENCES = 8
LEAST_LENGTH = 2  # of a key-value cache: torch.export takes a single place for a constant


@dataclass(frozen=True)
class CompileOptions(TracingOptions, DecisionOptions):
    """What `twellc compile` was asked to do.

    Attributes:
        output: Where the plan goes; None with the backend `none`.
        onnx: Where to keep the rewritten graph.
        backend: `auto`, `tensorrt`, `tensorrt-rtx` or `none`.
        profiles: Shape ranges of inputs, in the order in which they were given.
        strict: Fail when nothing matches or a block that looks like one is refused.
        dump_graphs: A folder for the graph as traced and after each pass.
        report: Where to write the report as JSON.
        html: Where to write it as a page to look at.
        overwrite: Whether outputs may replace existing files.
        triton: The folder of the model in a Triton model repository; `output` lies in it.
        embed_plugins: Whether the plan carries the plugin library.
        attention: `auto`, `tensorrt` or `cudnn`: who computes attention.
        attention_forms: The forms that this comes to on the TensorRT at hand, see `passes/attention.py`; empty until
            it has been asked.
        plugin_libraries: TensorRT plugin libraries of other people, for graphs that hold nodes of theirs.
        tensor_parallel: How many GPUs share the model: each gets a plan of its own.
        decided: What an earlier compilation decided for blocks, by module, to do it again.
        kv_cache: How many tokens of a sequence the key-value cache of a causal Hugging Face model holds; None gives it
            no cache.
        batch: The most sequences of a call of a model with a cache.
        prefill_chunk: The most tokens of a sequence in such a call; None takes 2048, or all that fit.
    """

    output: Path | None = None
    _: KW_ONLY
    onnx: Path | None = None
    backend: str = "auto"
    profiles: tuple[tuple[str, ShapeRange], ...] = ()
    strict: bool = False
    dump_graphs: Path | None = None
    report: Path | None = None
    html: Path | None = None
    overwrite: bool = False
    triton: Path | None = None
    embed_plugins: bool = False
    attention: str = "auto"
    attention_forms: tuple[str, ...] = ()
    plugin_libraries: tuple[Path, ...] = ()
    tensor_parallel: int = 1
    decided: Mapping[str, Mapping[str, Any]] | None = None
    kv_cache: int | None = None
    batch: int = 1
    prefill_chunk: int | None = None

    @property
    def cache(self) -> CacheOptions | None:
        """The sizes of the cache; None without one."""
        return None if self.kv_cache is None else CacheOptions(self.kv_cache, self.batch, self.prefill_chunk)

    @property
    def requested_profiles(self) -> list[tuple[str, ShapeRange]]:
        """The shape ranges of inputs.

        Of a model with a cache: one for prompts, and those for a token of each sequence: of any number of sequences, of
        few and of one, each faster than the one before it.
        """
        cache = self.cache
        if cache is None:
            return list(self.profiles)
        prefill = ShapeRange((1, 1), (1, cache.chunk), (cache.batch, cache.chunk))
        batches = dict.fromkeys((cache.batch, min(cache.batch, _FEW_SEQUENCES), 1))
        decode = [ShapeRange((1, 1), (batch, 1), (batch, 1)) for batch in batches]
        return [(INPUT_IDS, each) for each in (prefill, *decode)]

    @property
    def plans(self) -> list[Path]:
        """Where the plans go: one, or one for each rank, as Triton names them; `output` is a link to the first then."""
        if self.output is None or self.tensor_parallel == 1:
            return [] if self.output is None else [self.output]
        return [plan_of_rank(self.output, rank) for rank in range(self.tensor_parallel)]

    def graphs(self, onnx: Path) -> list[Path]:
        """Return where the graphs go: to `onnx`, or beside it, one for each rank."""
        if self.tensor_parallel == 1:
            return [onnx]
        return [onnx.with_name(f"{onnx.stem}.rank{rank}{onnx.suffix}") for rank in range(self.tensor_parallel)]


@dataclass(frozen=True, kw_only=True)
class InspectOptions(TracingOptions, DecisionOptions):
    """What `twellc inspect` was asked to do; `model` may also be a plan or a rewritten ONNX file.

    Of what is compiled, `target_gpu` None takes the GPU that it was compiled for.

    Attributes:
        density: Assumed share of gate activations that are not zero, to count operations and bytes and expect times at,
            of blocks that no profile knows.
        tokens: Tokens in a call to count operations and bytes of, and to name the kernels of.
        gpu: The GPU whose kernels to name, of `twellc.plugins.library.GPUS`; None takes that of `target_gpu`.
    """

    density: float = DEFAULT_DENSITY
    tokens: int = DEFAULT_TOKENS
    gpu: str | None = None


@dataclass(frozen=True, kw_only=True)
class BenchOptions(TracingOptions, DecisionOptions, SampleOptions):
    """What `twellc bench` was asked to do; `model` may be no ONNX file.

    Attributes:
        shapes: Sizes of the model's dynamic dimensions, in order, to measure at; none takes usual ones.
        repeats: How often each contestant is timed.
        compiled: Whether to measure what torch.compile makes of the models, too.
        tensorrt: Whether to build and measure plans where full TensorRT is installed.
        plot: Where to write a picture of the speed-ups.
        overwrite: Whether the picture may replace an existing file.
    """

    shapes: tuple[Shape, ...] = ()
    repeats: int = DEFAULT_REPEATS
    compiled: bool = True
    tensorrt: bool = True
    plot: Path | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class CheckOptions(SourceOptions, SampleOptions):
    """What `twellc check` was asked to do; the candidate says how its model was traced.

    Attributes:
        candidate: A rewritten ONNX file, or a plan with its manifest.
        calibration: The profile that the candidate was compiled with, for a plan whose graph has to be made again;
            another one is refused.
    """

    candidate: Path
    _: KW_ONLY
    calibration: Path | None = None


@dataclass(frozen=True)
class ProfileOptions(TracingOptions):
    """What `twellc profile` was asked to do; `model` may be no ONNX file.

    Attributes:
        output: Where the profile goes; None keeps it in memory.
        device: `auto`, `cpu`, `cuda` or `cuda:N`; `auto` takes the GPU where torch sees one.
        batch: Sequences in a run of the model.
        sequence: Tokens in a sequence at most, for data without a shape of its own; None takes 1024, or what the model
            takes at most.
        tokens: How many tokens to stop after; None takes all data.
        field: The field of a line of JSON that holds the text.
        overwrite: Whether the output may replace an existing file.
    """

    output: Path | None = None
    _: KW_ONLY
    device: str = "auto"
    batch: int = DEFAULT_BATCH
    sequence: int | None = None
    tokens: int | None = None
    field: str = "text"
    overwrite: bool = False


_CHOICES: dict[str, tuple[object, ...]] = {
    "backend": BACKENDS,
    "dtype": (None, *DTYPES),
    "padding": (None, *PADDINGS),
    "logits": (None, *LOGITS),
    "attention": ATTENTIONS,
    "compression": (None, *COMPRESSIONS),
    "gpu": (None, *GPUS),
}


# Options that count something, and whether None stands for a default.
_COUNTS = {
    "batch": False, "sequence": True, "tokens": True, "repeats": False, "tensor_parallel": False, "kv_cache": True,
    "prefill_chunk": True,
}  # fmt: skip


def refuse_choice(option: str, value: object) -> None:
    """Fail if an option has a value that there is not.

    Raises:
        UserError: It has.
    """
    if option in _COUNTS and not (type(value) is int and value >= 1) and not (value is None and _COUNTS[option]):
        name = f"--{option.replace('_', '-')}"
        raise UserError(name, "is not a count", got=repr(value), expected="an integer from 1 on")
    if option == "seed" and value is not None and not (type(value) is int and 0 <= value <= LARGEST_SEED):
        raise UserError("--seed", "is not a seed", got=repr(value), expected=f"an integer from 0 to {LARGEST_SEED}")
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
            raise UserError(
                "--backend none", "stops at ONNX, and no ONNX file is named", got="" if output is None else str(output),
                fix="Add --onnx FILE." if output is None else "Call it FILE.onnx, or build a plan.",
            )  # fmt: skip
        if output is not None:
            raise UserError("--output", "no plan is built", got="--backend none", fix="Leave one out.")
    elif output is None:
        raise UserError("--output", "no plan to write", fix="Add -o FILE, or stop at --backend none --onnx FILE.")
    elif output.suffix == ".onnx":
        raise UserError(
            f"--output {output}", "a plan is not an ONNX file", fix="Add --backend none for one, or call it otherwise."
        )
    if onnx is not None and onnx.suffix in (".plan", ".engine"):
        raise UserError(f"--onnx {onnx}", "an ONNX file is not a plan", fix="Call it otherwise.")
    chosen = CompileOptions(model, output, onnx=onnx, triton=triton, **options)
    _refuse_cache(chosen)
    return chosen


def _refuse_cache(options: CompileOptions) -> None:
    """Fail if options of a key-value cache contradict others, or each other.

    Raises:
        UserError: They do.
    """
    cache = options.cache
    if cache is None:
        for option, given in (("--batch", options.batch != 1), ("--prefill-chunk", options.prefill_chunk is not None)):
            if given:
                raise UserError(option, "only a model with a key-value cache has one", fix="Add --kv-cache LENGTH.")
        return
    if cache.length < LEAST_LENGTH:
        raise UserError("--kv-cache", "is too short", got=str(cache.length), expected=f"{LEAST_LENGTH} at least")
    if cache.chunk > cache.length:
        raise UserError(
            f"--prefill-chunk {cache.chunk}", "is longer than the cache", expected=f"at most --kv-cache {cache.length}"
        )
    why: dict[str, tuple[object, str]] = {
        "--profile": (options.profiles, "a model with a cache has its profiles of --batch and --prefill-chunk"),
        "--tensor-parallel": (options.tensor_parallel > 1, "a model with a cache is not shared among GPUs yet"),
        "--padding": (options.padding, "a model with a cache is told by token_count what is padding"),
        "--input": (options.inputs, "a model with a cache has inputs of its own"),
        "--triton": (options.triton, "Triton would copy the caches in every call, see docs/kv-cache.md"),
    }
    for option, (other, reason) in why.items():
        if other:
            raise UserError(option, reason, got=f"--kv-cache {cache.length}", fix="Leave one out.")


def plan_of_rank(output: Path, rank: int) -> Path:
    """Return where the plan of a rank stands, beside the link to the first one."""
    return output.with_name(f"{output.name}.rank{rank}")


def triton_plan(repository: Path, model: Path) -> Path:
    """Return where the plan of a model stands in a Triton model repository."""
    return model_folder(repository, model) / VERSION / PLAN_NAME
