"""Keywords of the functions in `twellc.api`, from the options classes: `python -m tests.generated_docs`."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from twellc.export.shapes import Shape, ShapeRange
from twellc.options.declared_inputs import InputDeclaration

AnyPath = str | os.PathLike[str]

class ExampleKeywords(TypedDict, total=False):
    """See `Example`."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] | None
    dynamic_shapes: Any

class RunKeywords(ExampleKeywords, total=False):
    """See `RunOptions`."""

    progress: Callable[[str], None]

class SourceKeywords(TypedDict, total=False):
    """See `SourceOptions`."""

    trust_model: bool
    import_modules: Sequence[str]
    input_specs: Sequence[str | InputDeclaration]

class TracingKeywords(SourceKeywords, total=False):
    """See `TracingOptions`."""

    dtype: str | None
    padding: str | None
    logits: str | None

class DecisionKeywords(TypedDict, total=False):
    """See `DecisionOptions`."""

    layers: str
    compression: int | None
    firing_profile: AnyPath | None
    prune_dead: bool
    prune_check: AnyPath | None
    linear: str
    target_gpu: str | None

class WeightTypeKeywords(TypedDict, total=False):
    """See `WeightTypeOptions`."""

    weights: str

class WeightKeywords(WeightTypeKeywords, total=False):
    """See `WeightOptions`."""

    fp8_error: float | None

class SampleKeywords(TypedDict, total=False):
    """See `SampleOptions`."""

    arrays: AnyPath | None
    text: AnyPath | None
    seed: int | None

class CompileKeywords(TracingKeywords, DecisionKeywords, WeightKeywords, RunKeywords, total=False):
    """See `CompileOptions`."""

    onnx: AnyPath | None
    backend: str
    optimization_profiles: Sequence[str | tuple[str, ShapeRange]]
    strict: bool
    dump_graphs: AnyPath | None
    manifest: AnyPath | None
    html: AnyPath | None
    overwrite: bool
    triton: AnyPath | None
    attention: str
    kv_cache: int | None
    max_batch_size: int
    prefill_chunk: int | None
    kv_cache_dtype: str
    tensor_parallel: int
    embed_plugins: bool
    plugin_libraries: Sequence[AnyPath]
    arrays: AnyPath | None
    text: AnyPath | None

class InspectKeywords(TracingKeywords, DecisionKeywords, WeightTypeKeywords, RunKeywords, total=False):
    """See `InspectOptions`."""

    density: float | None
    tokens: int
    gpu: str | None

class CheckKeywords(SourceKeywords, SampleKeywords, RunKeywords, total=False):
    """See `CheckOptions`."""

    firing_profile: AnyPath | None

class ProfileKeywords(TracingKeywords, RunKeywords, total=False):
    """See `ProfileOptions`."""

    device: str
    batch: int
    sequence: int | None
    tokens: int | None
    field: str
    overwrite: bool

class BenchKeywords(TracingKeywords, DecisionKeywords, WeightKeywords, SampleKeywords, RunKeywords, total=False):
    """See `BenchOptions`."""

    shapes: Sequence[str | Shape]
    repeats: int
    compiled: bool
    max_autotune: bool
    tensorrt: bool
    plot: AnyPath | None
    overwrite: bool

class RewriteKeywords(TracingKeywords, ExampleKeywords, total=False):
    """See `rewrite`."""
