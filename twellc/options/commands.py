"""The options of each command, with their defaults and meaning."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from twellc.base.caches import FP8_CACHE, INPUT_IDS
from twellc.base.errors import UserError
from twellc.export.shapes import Shape, ShapeRange, parse_profile, parse_sizes
from twellc.export.triton import PLAN_NAME, VERSION, model_folder
from twellc.options.decisions import DecisionOptions
from twellc.options.option import COUNT, OUTPUT, SHARE, SIZE, option
from twellc.options.source import CacheOptions, SampleOptions, SourceOptions, TracingOptions
from twellc.options.weights import WeightOptions, WeightTypeOptions, refuse_samples
from twellc.passes.report import Earlier
from twellc.plugins.library import GPUS

ATTENTIONS = ("auto", "tensorrt", "cudnn")
CACHE_DTYPES = ("auto", FP8_CACHE)
BACKENDS = ("auto", "tensorrt", "tensorrt-rtx", "none")
DEFAULT_DENSITY = 0.005
DEFAULT_TOKENS = 2048
DEFAULT_GPU = "H100"
# TensorRT tunes a plan for the most sequences of a profile; calls of this many are 3 % faster with their own profile.
_FEW_SEQUENCES = 8
LEAST_LENGTH = 2  # of a key-value cache: torch.export takes a single place for a constant


@dataclass(frozen=True)
class CompileOptions(TracingOptions, DecisionOptions, WeightOptions):
    """The options of `twellc compile`.

    Attributes:
        output: The plan to write; its manifest is written beside it.
        onnx: Also keep the rewritten graph as ONNX.
        backend: auto: TensorRT where it is installed beside a GPU, else TensorRT-RTX, which needs none. none stops at
            ONNX.
        optimization_profiles: Shapes of an input, such as input_ids:1x1:1x128:8x2048. Inputs that share a dimension
            follow. Given again for the same input, it starts the next optimization profile.
        strict: Fail when nothing matches, or a block that looks like one is refused.
        dump_graphs: Folder for the graph as traced and after each pass.
        manifest: Write the decisions and results as JSON.
        html: Write them as a page to look at, as twellc report makes it.
        overwrite: Replace existing output files.
        triton: Write the plan into a Triton model repository, with its config.pbtxt, instead of to --output.
        attention: Attention backend: tensorrt, or cudnn by a plugin, which takes causal and unmasked attention and
            leaves other to TensorRT. auto: cudnn where it is at hand and was measured faster, which is TensorRT on
            Hopper.
        kv_cache: For a causal Hugging Face model: give it a key-value cache of this many tokens a sequence, so that it
            can generate text. This changes its inputs, outputs and profiles.
        max_batch_size: With --kv-cache: the most sequences of a call.
        prefill_chunk: With --kv-cache: the most tokens of a sequence in a call; longer prompts are fed in several.
            Default: 2048, or all that fit.
        kv_cache_dtype: With --kv-cache: the type of the cache. auto: that of the model. fp8: E4M3, with a scale for the
            keys and one for the values of each layer: those of the checkpoint, else measured on --text, else 1.
        tensor_parallel: Share the model among N GPUs of one machine: a plan for each, with a share of the heads of
            attention and of the neurons, FILE.rank0 and so on; FILE is a link to the first. With --firing-profile all
            get equally active neurons.
        embed_plugins: Put the plugin library into the plan.
        plugin_libraries: A library of other people's TensorRT plugins, for a graph with their nodes; several may be
            given. Its code runs here.
        arrays: With --fp8-error: measure on these arrays, named as the model's inputs.
        text: With --fp8-error, or --kv-cache-dtype fp8: measure on this text, in UTF-8, through the tokenizer in the
            model's directory.
        earlier: The decisions of an earlier compilation, to repeat them.
    """

    output: Path | None = option(None, "FILE", OUTPUT, names=("-o", "--output"))
    _: KW_ONLY
    onnx: Path | None = option(None, "FILE", OUTPUT)
    backend: str = option("auto", kind=BACKENDS)
    optimization_profiles: tuple[tuple[str, ShapeRange], ...] = option(
        (), "NAME:MIN:OPT:MAX", parse_profile, names=("--optimization-profile",)
    )
    strict: bool = option(False)
    dump_graphs: Path | None = option(None, "DIR", Path)
    manifest: Path | None = option(None, "FILE.json", OUTPUT)
    html: Path | None = option(None, "FILE.html", OUTPUT)
    overwrite: bool = option(False)
    triton: Path | None = option(None, "DIR", Path)
    attention: str = option("auto", kind=ATTENTIONS)
    kv_cache: int | None = option(None, "LENGTH", COUNT)
    max_batch_size: int = option(1, "N", COUNT)
    prefill_chunk: int | None = option(None, "N", COUNT)
    kv_cache_dtype: str = option("auto", kind=CACHE_DTYPES)
    tensor_parallel: int = option(1, "N", COUNT)
    embed_plugins: bool = option(False)
    plugin_libraries: tuple[Path, ...] = option((), "FILE", Path, names=("--plugin-library",))
    arrays: Path | None = option(None, "FILE.npz", Path)
    text: Path | None = option(None, "FILE", Path)
    earlier: Earlier = Earlier()  # noqa: RUF009

    @property
    def cache(self) -> CacheOptions | None:
        """The sizes of the cache; None without one."""
        return None if self.kv_cache is None else CacheOptions(self.kv_cache, self.max_batch_size, self.prefill_chunk)

    @property
    def needed_attention(self) -> str:
        """What is to compute attention: caches in FP8 are read by cuDNN's plugin alone."""
        return "cudnn" if self.kv_cache_dtype == FP8_CACHE else self.attention

    @property
    def requested_profiles(self) -> list[tuple[str, ShapeRange]]:
        """The shape ranges of inputs.

        A model with a cache has one for prompts, and up to three for a token of each sequence: for any number of
        sequences, for few and for one, each faster than the one before it.
        """
        cache = self.cache
        if cache is None:
            return list(self.optimization_profiles)
        prefill = ShapeRange((1, 1), (1, cache.chunk), (cache.batch, cache.chunk))
        batches = dict.fromkeys((cache.batch, min(cache.batch, _FEW_SEQUENCES), 1))
        decode = [ShapeRange((1, 1), (batch, 1), (batch, 1)) for batch in batches]
        return [(INPUT_IDS, each) for each in (prefill, *decode)]

    @property
    def plans(self) -> list[Path]:
        """The paths of the plans: `output`, or one for each rank; then `output` is a link to the first."""
        if self.output is None or self.tensor_parallel == 1:
            return [] if self.output is None else [self.output]
        return [plan_of_rank(self.output, rank) for rank in range(self.tensor_parallel)]

    def graphs(self, onnx: Path) -> list[Path]:
        """Return the paths of the graphs: `onnx`, or one for each rank beside it."""
        if self.tensor_parallel == 1:
            return [onnx]
        return [onnx.with_name(f"{onnx.stem}.rank{rank}{onnx.suffix}") for rank in range(self.tensor_parallel)]


@dataclass(frozen=True, kw_only=True)
class InspectOptions(TracingOptions, DecisionOptions, WeightTypeOptions):
    """The options of `twellc inspect`; `model` may also be a plan or a rewritten ONNX file.

    For a plan or a rewritten file, `target_gpu` None takes the GPU that it was compiled for.

    Attributes:
        density: Share of gate activations that are not zero, from 0 to 1, to assume of blocks that no profile knows.
            Default: that of a short run of the model; operations and bytes of other blocks are counted at 0.005.
        tokens: Tokens in a call, for the counts of operations and bytes and the names of kernels.
        gpu: The GPU whose kernels to name; none has to be there. Default: the one that speed is expected for.
    """

    density: float | None = option(None, "SHARE", SHARE)
    tokens: int = option(DEFAULT_TOKENS, "N", SIZE)
    gpu: str | None = option(None, kind=tuple(GPUS))


@dataclass(frozen=True, kw_only=True)
class BenchOptions(TracingOptions, DecisionOptions, WeightOptions, SampleOptions):
    """The options of `twellc bench`; `model` cannot be an ONNX file.

    Attributes:
        shapes: Sizes of the model's dynamic dimensions, in their order; for a language model sequences and their
            tokens, such as 1x1,1x512,4x2048. Default: one token, and some prompts.
        repeats: How often each contestant is timed; they take turns.
        compiled: Measure the models under torch.compile, too, which may take minutes a shape.
        max_autotune: Measure FP8 through torch.compile with max-autotune, too, which takes minutes more.
        tensorrt: Build and measure plans, too, which takes minutes more; needs full TensorRT.
        plot: Draw the speed-ups, as .svg, .png or .pdf; needs matplotlib.
        overwrite: Replace an existing picture or data file.
    """

    shapes: tuple[Shape, ...] = option((), "SIZES,...", parse_sizes, separator=",")
    repeats: int = option(20, "N", COUNT)
    compiled: bool = option(True)
    max_autotune: bool = option(False)
    tensorrt: bool = option(False, names=("--tensorrt/--no-tensorrt",))
    plot: Path | None = option(None, "FILE", OUTPUT)
    overwrite: bool = option(False)


@dataclass(frozen=True)
class CheckOptions(SourceOptions, SampleOptions):
    """The options of `twellc check`; the candidate says how its model was traced.

    Attributes:
        candidate: A rewritten ONNX file, or a plan with its manifest.
        firing_profile: The profile that CANDIDATE was compiled with; another one is refused. Only a plan that no GPU
            can run needs it, if its graph was not kept.
    """

    candidate: Path
    _: KW_ONLY
    firing_profile: Path | None = option(None, "PROFILE", Path)


@dataclass(frozen=True)
class ProfileOptions(TracingOptions):
    """The options of `twellc profile`; `model` cannot be an ONNX file.

    Attributes:
        output: The profile to write; None keeps it in memory.
        device: Where to run the model. auto: on the GPU, where torch sees one.
        batch: Sequences in a run of the model.
        sequence: Tokens in a sequence at most: longer texts are cut. Default: 1024, or the most that the model takes.
        tokens: Stop after this many tokens. Default: all data.
        field: The field of a JSON object, or the column of a table, that holds the text.
        overwrite: Replace an existing output file.
    """

    output: Path | None = None
    _: KW_ONLY
    device: str = option("auto", "auto|cpu|cuda[:N]")
    batch: int = option(8, "N", SIZE)
    sequence: int | None = option(None, "N", SIZE)
    tokens: int | None = option(None, "N", COUNT)
    field: str = option("text", "NAME")
    overwrite: bool = option(False)


@dataclass(frozen=True, kw_only=True)
class LLMOptions(WeightOptions):
    """The options of loading a model that answers, as `twellc.LLM` takes them.

    Attributes:
        tokenizer: A folder with the model's tokenizer; default: the model's own.
        device: Where the model runs, a plan on a GPU. auto: on the GPU, where torch sees one.
        dtype: Precision of a directory, or a name of vLLM for it. Default: that of the weights, on a GPU bf16 for fp32.
        max_model_len: Tokens of a prompt and its answer together, without the answer's last. Default: as many as are
            needed, or the cache of a plan.
        compiled: Let torch.compile compile a directory: it takes minutes, then it is faster.
        layers: Which matching blocks of a directory to rewrite; REGEX is searched in their module paths.
        kv_cache_dtype: The type of the cache of keys and values. auto: that of the model, or of a plan. fp8: E4M3, of a
            directory in 16 bits, with a scale for the keys and one for the values of each layer: those of the
            checkpoint, else measured on --text, else 1.
        text: With --fp8-error, or --kv-cache-dtype fp8: measure on this text, in UTF-8, through the tokenizer in the
            model's directory.
        max_num_batched_tokens: Compute prompts in chunks of this many tokens, all prompts together, to save memory.
            Default: at once, or in the chunks of a plan.
    """

    tokenizer: Path | None = option(None, "DIR", Path)
    device: str = option("auto", "auto|cpu|cuda[:N]")
    dtype: str | None = option(None, "bf16|fp16|fp32")
    max_model_len: int | None = option(None, "N", COUNT)
    compiled: bool = option(False)
    layers: str = option("auto", "auto|all|none|REGEX")
    kv_cache_dtype: str = option("auto", kind=CACHE_DTYPES)
    text: Path | None = option(None, "FILE", Path)
    max_num_batched_tokens: int | None = option(None, "N", COUNT)


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(LLMOptions):
    """The options of `twellc generate`, besides those of `SamplingParams`.

    Attributes:
        prompt: A prompt to answer. Without any, each line of standard input is one.
        prompts_file: Prompts to answer at once: a line each; of FILE.jsonl a JSON object each, with the text as prompt
            or the conversation as messages.
        stream: Print each piece of an answer as it comes; answers to lines always come so.
        as_json: Print JSON; with --stream an object a line.
        stats: Print more about the time on standard error.
    """

    prompt: str | None = option(None, "TEXT")
    prompts_file: Path | None = option(None, "FILE", Path)
    stream: bool = option(False)
    as_json: bool = option(False, names=("--json",))
    stats: bool = option(False)


def compile_options(
    model: Path, output: Path | None, *, onnx: Path | None = None, triton: Path | None = None, **options: Any
) -> CompileOptions:
    """Return the options of a compilation, with the paths of its outputs worked out.

    Args:
        model: The model.
        output: The plan; with the backend `none` it may name the ONNX file.
        onnx: The rewritten graph.
        triton: A Triton model repository, in place of `output`.
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
            "triton": triton,
            "embed-plugins": options.get("embed_plugins"),
            "plugin-library": options.get("plugin_libraries"),
        }
        for name, given in given_options.items():
            if given:
                raise UserError(f"--{name}", "no plan is built", got="--backend none")
        if onnx is None and output is not None and output.suffix == ".onnx":
            onnx, output = output, None
        if onnx is None:
            got = "" if output is None else str(output)
            fix = "Add --onnx FILE." if output is None else "Call it FILE.onnx, or build a plan."
            raise UserError("--backend none", "stops at ONNX, and no ONNX file is named", got=got, fix=fix)
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
    samples = {"--arrays": chosen.arrays, "--text": chosen.text}
    if chosen.kv_cache_dtype == FP8_CACHE and chosen.fp8_error is None:
        del samples["--text"]  # it has another use
    refuse_samples(chosen, samples)
    return chosen


def _refuse_cache(options: CompileOptions) -> None:
    """Raise `UserError` if options of a key-value cache contradict others, or each other."""
    cache = options.cache
    if cache is None:
        for name, given in (
            ("--max-batch-size", options.max_batch_size != 1),
            ("--prefill-chunk", options.prefill_chunk is not None),
            ("--kv-cache-dtype", options.kv_cache_dtype == FP8_CACHE),
        ):
            if given:
                raise UserError(name, "only a model with a key-value cache has one", fix="Add --kv-cache LENGTH.")
        return
    if cache.length < LEAST_LENGTH:
        raise UserError("--kv-cache", "is too short", got=str(cache.length), expected=f"{LEAST_LENGTH} at least")
    if cache.chunk > cache.length:
        raise UserError(
            f"--prefill-chunk {cache.chunk}", "is longer than the cache", expected=f"at most --kv-cache {cache.length}"
        )
    if options.kv_cache_dtype == FP8_CACHE and options.attention == "tensorrt":
        what, got = "TensorRT's own attention does not read such a cache", "--attention tensorrt"
        raise UserError(f"--kv-cache-dtype {FP8_CACHE}", what, got=got, fix="Leave one out.")
    why: dict[str, tuple[object, str]] = {
        "--optimization-profile": (
            options.optimization_profiles,
            "a model with a cache has its profiles of --max-batch-size and --prefill-chunk",
        ),
        "--tensor-parallel": (options.tensor_parallel > 1, "a model with a cache is not shared among GPUs yet"),
        "--padding": (options.padding, "a model with a cache is told by token_count what is padding"),
        "--input-spec": (options.input_specs, "a model with a cache has inputs of its own"),
        "--triton": (options.triton, "Triton would copy the caches in every call, see docs/kv-cache.md"),
    }
    for name, (other, reason) in why.items():
        if other:
            raise UserError(name, reason, got=f"--kv-cache {cache.length}", fix="Leave one out.")


def plan_of_rank(output: Path, rank: int) -> Path:
    """Return the path of a rank's plan, beside the link to the first one."""
    return output.with_name(f"{output.name}.rank{rank}")


def triton_plan(repository: Path, model: Path) -> Path:
    """Return the path of a model's plan in a Triton model repository."""
    return model_folder(repository, model) / VERSION / PLAN_NAME
