"""The settings of a compilation, as its graph and its manifest note them. Importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from twellc.base.dtypes import DTYPES, UNCHANGED
from twellc.base.records import OPTIONAL, OneOf, Record, Share, Size
from twellc.options.source import LOGITS, PADDINGS
from twellc.options.weights import WEIGHTS
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
