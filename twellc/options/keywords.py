"""Options as keywords of the functions in `twellc.api`: paths and texts may stand for what the options classes hold.

They mean what the fields of the same name mean in `CompileOptions` and the other classes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from twellc.export.shapes import Shape, ShapeRange
from twellc.options.declared_inputs import InputDeclaration

AnyPath = str | os.PathLike[str]


class ExampleKeywords(TypedDict, total=False):
    """Example inputs of a module, as `torch.export.export` takes them: by position, by name, and what is dynamic."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] | None
    dynamic_shapes: Any


class RunKeywords(ExampleKeywords, total=False):
    """Example inputs, and what receives the name of each step."""

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
    linear: str
    target_gpu: str | None
    firing_profile: AnyPath | None
    prune_dead: bool
    prune_check: AnyPath | None


class WeightTypeKeywords(TypedDict, total=False):
    """See `WeightTypeOptions`."""

    weights: str


class WeightKeywords(WeightTypeKeywords, total=False):
    """See `WeightOptions`."""

    fp8_error: float | None


class SampleKeywords(TypedDict, total=False):
    """See `SampleOptions`."""

    seed: int | None
    arrays: AnyPath | None
    text: AnyPath | None


class CompileKeywords(TracingKeywords, DecisionKeywords, WeightKeywords, RunKeywords, total=False):
    """See `CompileOptions`; a profile may be a text such as `x:1x64:16x64:512x64`."""

    onnx: AnyPath | None
    backend: str
    optimization_profiles: Sequence[str | tuple[str, ShapeRange]]
    strict: bool
    dump_graphs: AnyPath | None
    manifest: AnyPath | None
    html: AnyPath | None
    overwrite: bool
    triton: AnyPath | None
    embed_plugins: bool
    attention: str
    kv_cache: int | None
    max_batch_size: int
    prefill_chunk: int | None
    tensor_parallel: int
    plugin_libraries: Sequence[AnyPath]
    arrays: AnyPath | None
    text: AnyPath | None


class InspectKeywords(TracingKeywords, DecisionKeywords, WeightTypeKeywords, RunKeywords, total=False):
    """See `InspectOptions`."""

    density: float
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
    """See `BenchOptions`; a shape may be a text such as `1x512`."""

    shapes: Sequence[str | Shape]
    repeats: int
    compiled: bool
    max_autotune: bool
    tensorrt: bool
    plot: AnyPath | None
    overwrite: bool


class RewriteKeywords(TracingKeywords, ExampleKeywords, total=False):
    """See `TracingOptions`."""
