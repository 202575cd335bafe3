"""The settings of a compilation, as its graph and its manifest note them. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from twellc.base.dtypes import DTYPES, UNCHANGED
from twellc.base.records import OPTIONAL, OneOf, Record, Share, Size
from twellc.options.commands import CompileOptions
from twellc.options.source import LOGITS, PADDINGS
from twellc.options.weights import KEEP, WEIGHTS
from twellc.passes.report import Compression, Earlier
from twellc.plugins.block import compression_of
from twellc.plugins.library import ATTENTION_FORMS


@dataclass(frozen=True)
class CacheSettings(Record):
    """The sizes of a key-value cache: see `CacheOptions`."""

    length: Size
    batch: Size
    prefill_chunk: Size


@dataclass(frozen=True, kw_only=True)
class Settings(Earlier):
    """The settings that decide what the graph is: see `CompileOptions`. Only some models leave the optional ones.

    `sizes` are those that the model was traced for where it does not take every size, such as `input_ids:1x128`;
    `tensor_parallel` is the number of ranks.
    """

    dtype: Annotated[str, OneOf((*DTYPES, UNCHANGED))]
    layers: str
    compression: Compression
    attention_forms: list[Annotated[str, OneOf(ATTENTION_FORMS)]] = field()  # which every graph has
    padding: Annotated[str, OneOf(PADDINGS)] | None = field(default=None, metadata=OPTIONAL)
    logits: Annotated[str, OneOf(LOGITS)] | None = field(default=None, metadata=OPTIONAL)
    sizes: str | None = field(default=None, metadata=OPTIONAL)
    cache: CacheSettings | None = field(default=None, metadata=OPTIONAL)
    prune_dead: bool | None = field(default=None, metadata=OPTIONAL)
    tensor_parallel: Size | None = field(default=None, metadata=OPTIONAL)
    weights: Annotated[str, OneOf(WEIGHTS)] | None = field(default=None, metadata=OPTIONAL)
    fp8_error: Share | None = field(default=None, metadata=OPTIONAL)


# Of a graph that notes none.
UNKNOWN = Settings(dtype=UNCHANGED, layers="auto", compression=compression_of(None), attention_forms=[])


def settings_of(
    options: CompileOptions, dtype: str, earlier: Earlier, tracing: Mapping[str, Any] | None = None
) -> Settings:
    """Return the settings of a compilation.

    Args:
        options: Its options.
        dtype: `bf16`, `fp16` or `float32`: what the graph is in.
        earlier: What was decided in it.
        tracing: How the model was traced: padding, logits and sizes, see `LoadedModel`.
    """
    cache = options.cache
    return Settings(
        **vars(earlier),
        **(tracing or {}),
        dtype=dtype,
        layers=options.layers,
        compression=compression_of(options.compression),
        cache=None if cache is None else CacheSettings(cache.length, cache.batch, cache.chunk),
        prune_dead=options.prune_dead or None,
        tensor_parallel=options.tensor_parallel if options.tensor_parallel > 1 else None,
        weights=options.weights if options.weights != KEEP else None,
        fp8_error=options.fp8_error,
    )
