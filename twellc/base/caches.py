"""The key-value cache of a compiled language model, as the manifest describes it.

    input_ids    int64 [batch, tokens]      the next tokens of each sequence, padded on the right
    write_index  int64 [batch]              how many tokens of each sequence are in the caches already
    token_count  int64 [batch]              how many of `tokens` are real, 0 to `tokens`: the rest is padding
    past_key_values.N.key, .value           [batch, kv_heads, length, head_dim], of layer N of the model;
                                            layers without a state, as feed-forward blocks alone, have none
    logits       [batch, vocabulary]        behind the last real token of each sequence, or
                 [batch, tokens, vocabulary]    behind each token: the attribute `logits` says which
    next_tokens  int64 [batch]              or in their place the likeliest token behind each sequence
    logit_places int64 [batch, asked]       only in a program that torch runs, not in a plan: the new tokens behind
                                            which the logits are, [batch, asked, vocabulary]
    present.N.key, .value                   the caches with the new tokens in them, in the same memory

Token i of a row has the position write_index + i, and its key and value are there in the caches. A row without a real
token leaves its caches as they are. Its logits or next token have no meaning, nor have logits of padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from twellc.base.dtypes import DTYPES
from twellc.base.records import LARGEST, Count, OneOf, Range, Record, Size

INPUT_IDS, WRITE_INDEX, TOKEN_COUNT = "input_ids", "write_index", "token_count"
LOGIT_PLACES = "logit_places"
FP8_CACHE = "fp8"
# Types of caches: names here, and of torch.
CACHE_TYPES = {**DTYPES, FP8_CACHE: "float8_e4m3fn"}
LOGITS_OF = _, ALL, GREEDY = ("last", "all", "greedy")
ASKED = "asked"  # not in a plan


@dataclass(frozen=True)
class CachePair(Record):
    """A cache: the input and the output that are bound to one address, and its shape, -1 for the batch."""

    input: str
    output: str
    shape: list[Annotated[int, Range(-1, LARGEST)]]


@dataclass(frozen=True)
class KeyValueCache(Record):
    """The key-value cache of a language model, with all that a host needs to generate text.

    Attributes:
        length: The most tokens of a sequence.
        batch: The most sequences of a call.
        prefill_chunk: The most tokens of a sequence in a call: longer prompts are fed in several.
        logits: `last`: the output is the logits behind the last real token of each sequence. `greedy`: it is only the
            token with the largest of these. Else `all`.
        pairs: The caches: each is an input and an output.
        layers: How many layers have a cache of keys and one of values.
        kv_heads: The heads of keys and values, in the first layer.
        head_dim: The width of a head, in the first layer.
        dtype: The element type of the caches: `bf16`, `fp16`, or `fp8`, which is E4M3.
        vocabulary: How many tokens there are to choose from.
        end_tokens: The tokens that end a text.
        position_limit: How many positions the model was made for; None where it sets no limit.
        text: The folder beside the plan with the files for text: the model's config.json, tokenizer, chat template and
            generation_config.json, as far as it has them; None where no plan was written.
    """

    length: Size
    batch: Size
    prefill_chunk: Size
    logits: Annotated[str, OneOf(LOGITS_OF)]
    pairs: list[CachePair]
    layers: Size
    kv_heads: Size
    head_dim: Size
    dtype: Annotated[str, OneOf(tuple(CACHE_TYPES))]
    vocabulary: Size
    end_tokens: list[Count]
    position_limit: Size | None
    text: str | None = None

    @property
    def output(self) -> str:
        """The name of the first output."""
        return "next_tokens" if self.logits == GREEDY else "logits"
