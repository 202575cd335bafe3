"""Options of a compilation and of a check, the one home of their names, defaults and meaning."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from twellc.export.shapes import ShapeRange
from twellc.inputs import InputDeclaration

# Names of the options and of torch's dtypes.
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
ATTENTIONS = ("auto", "tensorrt", "cudnn")
BACKENDS = ("auto", "tensorrt", "tensorrt-rtx", "none")
PADDINGS = ("none", "mask")
LOGITS = ("all", "last")
DEFAULT_COMPRESSION = 8


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
        compression: The TwELL compression factor.
        strict: Fail when nothing matches or a block that looks like one is refused.
        dump_graphs: A folder for the graph after each pass.
        report: Where to write the report as JSON.
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
    """

    model: Path
    output: Path | None = None
    onnx: Path | None = None
    backend: str = "auto"
    dtype: str | None = None
    profiles: tuple[tuple[str, ShapeRange], ...] = ()
    layers: str = "auto"
    compression: int = DEFAULT_COMPRESSION
    strict: bool = False
    dump_graphs: Path | None = None
    report: Path | None = None
    overwrite: bool = False
    trust_model: bool = False
    inputs: tuple[InputDeclaration, ...] = ()
    triton: Path | None = None
    embed_plugins: bool = False
    attention: str = "auto"
    attention_forms: tuple[str, ...] = ()
    padding: str | None = None
    logits: str = "all"


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
    """

    model: Path
    candidate: Path
    seed: int | None = None
    arrays: Path | None = None
    text: Path | None = None
    trust_model: bool = False
    inputs: tuple[InputDeclaration, ...] = ()
