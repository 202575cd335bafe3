"""Load a causal language model of Hugging Face with a key-value cache, and trace it.

    input_ids [batch, tokens], write_index, token_count [batch], caches [batch, kv_heads, length, head_dim]
        -> logits, the caches with the new tokens in them

`twellc.base.caches` says what they mean. Every family goes one way: models of transformers take a `Cache`, whose
`update` gets the new keys and values of a layer and returns those to attend to. Ours appends by `twell.append_caches`
and returns the whole caches; masks and attention over them are in `attention.py`. Positions are made of write_index.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from twellc.base.caches import ASKED, INPUT_IDS, LOGIT_PLACES, TOKEN_COUNT, WRITE_INDEX, CachePair, KeyValueCache
from twellc.base.dtypes import DTYPES, dtype_name, option_of, torch_dtype
from twellc.base.errors import UserError, first_line
from twellc.base.torch_private import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from twellc.base.transformers_private import cache_over, grouped_products_as_ops, nothing_fetched
from twellc.loaders.attention import CacheStep, cached_attention
from twellc.loaders.cache_trial import CacheTrial, MadeUpKeys, other_state
from twellc.loaders.checkpoint import end_tokens
from twellc.loaders.huggingface import (
    cache_argument,
    cached_length,
    open_directory,
    other_ways,
)
from twellc.loaders.huggingface_inputs import text_config
from twellc.loaders.loaded import LoadedModel
from twellc.loaders.tracing import trace
from twellc.options.source import ALL_LOGITS, GREEDY_LOGITS, CacheOptions, refuse_missing
from twellc.passes.graph.program import user_inputs
from twellc.plugins.cache_op import APPEND

_TRACED_BATCH, _TRACED_TOKENS, _TRACED_ASKED, _TRACED_LENGTH, LARGEST_BATCH = 2, 3, 4, 5, 65536


# What layers cache of a token, by number: [heads, width] of keys, and of values. Layers without a state are not there.
_Sizes = dict[int, tuple[tuple[int, int], tuple[int, int]]]
# A precision by its name or as torch has it; or what returns one, given that of the model.
_Precision = torch.dtype | str | Callable[[torch.dtype], torch.dtype] | None


def load_with_cache(path: Path, options: CacheOptions, logits: str, dtype: _Precision) -> LoadedModel:
    """Load a causal language model with a key-value cache, and trace it in the precision that it is to have.

    Args:
        path: A Hugging Face directory.
        options: The sizes of the cache.
        logits: `last` computes the logits behind the last real token of each sequence only, `all` those of each token,
            `greedy` the token with the largest of the last ones, `asked` those that `logit_places` says. With `asked`
            caches may have fewer places in a call than `options` say, and these may be more than the model has
            positions: it is these then.
        dtype: `bf16` or `fp16`; None takes the model's own, or bf16 where that is neither. A dtype of torch for tests.

    Raises:
        UserError: It is another kind of model, or one that cannot be traced or takes no cache of that length.
    """
    refuse_missing(path, _EXPECTED)
    if not path.is_dir():
        raise no_directory(path)
    if options.batch > LARGEST_BATCH:
        raise UserError("--max-batch-size", "is too large", got=str(options.batch), expected=f"{LARGEST_BATCH} at most")
    growing = logits == ASKED
    with nothing_fetched(), grouped_products_as_ops():
        messages: list[str] = []
        model, config, notes = open_directory(path, partial(_in_dtype, dtype, messages))
        notes = notes + messages
        where = str(path) if growing else f"--kv-cache: {path}"
        taken = cache_argument(model, f"{where}, a {type(model).__name__}")
        if getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None:
            model.set_attn_implementation("eager")  # older releases take another, which leaves the cap out
        limit = cached_length(model)
        if growing:
            options = replace(options, length=limit if options.length == NO_LIMIT else options.length)
            if not 1 <= options.length <= limit:
                what, expected = "is out of range for this model's cache", f"1 to {limit}, the positions of the model"
                raise UserError("max_model_len", what, got=str(options.length), expected=expected)
        limit = limit if limit < NO_LIMIT else 0
        _refuse_length(path, options, limit)
        _refuse_infinite_weights(model)
        trial = CacheTrial(where, model, options.length, taken)
        sizes = _probe(where, model, taken)
        precision: torch.dtype = model.dtype
        _take_caches(model, taken, list(sizes), logits, options.length)
        _refuse_other_logits(model, sizes, trial)
        traced = _trace(path, model, sizes, options, precision, growing)
    pairs = [
        CachePair(f"past_key_values.{layer}.{part}", f"present.{layer}.{part}", [-1, heads, options.length, width])
        for layer, of_layer in sizes.items()
        for part, (heads, width) in zip(("key", "value"), of_layer, strict=True)
    ]
    inputs = [
        INPUT_IDS,
        WRITE_INDEX,
        TOKEN_COUNT,
        *(pair.input for pair in pairs),
        *([LOGIT_PLACES] if growing else []),
    ]
    placeholders = list(user_inputs(traced))
    batch, tokens = (str(size) for size in placeholders[0].meta["val"].shape)
    cache = KeyValueCache(
        length=options.length,
        batch=options.batch,
        prefill_chunk=options.chunk,
        logits=logits,
        pairs=pairs,
        layers=len(sizes),
        kv_heads=pairs[0].shape[1],
        head_dim=pairs[0].shape[3],
        dtype=option_of(dtype_name(precision)),
        vocabulary=trial.logits.shape[-1],
        end_tokens=end_tokens(path, model.config),
        position_limit=limit or None,
    )
    return LoadedModel(
        path=path,
        kind="Hugging Face directory",
        program=traced,
        input_names={node.name: name for node, name in zip(placeholders, inputs, strict=True)},
        output_names=[cache.output, *(pair.output for pair in pairs)],
        dimension_names={batch: "batch", tokens: "tokens"},
        vocabulary=getattr(text_config(model), "vocab_size", None),
        declared_activation=str(config.get("hidden_act") or config.get("activation_function") or ""),
        language_model=logits != GREEDY_LOGITS,
        notes=notes,
        settings={"logits": logits},
        cache=cache,
    )


NO_LIMIT = 1 << 20  # see longest_text
_EXPECTED = "the Hugging Face directory of a causal language model, with config.json and safetensors"


def no_directory(path: Path) -> UserError:
    """Return what to say of another kind of model."""
    what = "only a Hugging Face directory can be compiled with a cache"
    return UserError("--kv-cache", what, got=str(path), expected=_EXPECTED, fix="Leave it out.")


def _refuse_length(path: Path, options: CacheOptions, limit: int) -> None:
    if limit and options.length > limit:
        what = "is longer than what the model was made for"
        expected = f"at most {limit}, its number of positions"
        raise UserError(f"--kv-cache {options.length}", what, got=str(path), expected=expected)


def _in_dtype(asked: _Precision, messages: list[str], own: torch.dtype) -> torch.dtype:
    """Return the dtype to compile a model in whose own is given; add what to tell the user about the choice."""
    if isinstance(asked, torch.dtype):
        return asked
    if callable(asked):
        return asked(own)
    if asked is None and own in map(torch_dtype, DTYPES):
        return own
    wanted = torch_dtype(asked or "bf16")
    if wanted != own:
        changes = "as asked" if asked else "(--dtype changes it)"
        messages.append(f"the model is in {dtype_name(own)}; compiled in {dtype_name(wanted)} {changes}")
    return wanted


def _refuse_infinite_weights(model: Any) -> None:
    for name, parameter in model.named_parameters() if model.dtype == torch.float16 else ():
        if parameter.dtype == model.dtype and bool(parameter.isinf().any()):
            what = "a weight of the model does not fit into float16"
            raise UserError("--dtype", what, got=name, fix="Compile it with --dtype bf16.")


# ---- tracing ----


def _take_caches(model: Any, cache_name: str, layers: list[int], logits: str, longest: int) -> None:
    """Let the model's forward take caches of `layers`, of at most `longest` places, and return them.

    It is replaced rather than wrapped: modules keep their paths, which profiles and reports name.
    """
    forward, taken = model.forward, inspect.signature(model.forward).parameters
    asked: list[Tensor] = []  # the places of tokens of each row behind which logits are wanted, in a call
    head = model.get_output_embeddings()
    if logits != ALL_LOGITS and head is not None:
        # No argument of transformers' models says so, row by row.
        head.register_forward_pre_hook(lambda module, given: _row_by_row(given[0], asked[0]))

    def step(
        input_ids: Tensor,
        write_index: Tensor,
        token_count: Tensor,
        past_key_values: list[Tensor],
        logit_places: Tensor | None = None,
        made_up: MadeUpKeys | None = None,
        chooses: bool = logits == GREEDY_LOGITS,
    ) -> list[Tensor]:
        starts, counts = write_index.to(torch.int32), token_count.to(torch.int32)
        last = token_count.clamp(min=1)[:, None] - 1
        asked[:] = [last if logit_places is None else logit_places]
        # Padding has the position of the last token: a table of positions holds that.
        places = torch.minimum(torch.arange(input_ids.shape[1], device=input_ids.device), last)
        positions = write_index[:, None] + places
        length = past_key_values[0].shape[2]
        # Said of all caches before the first layer: else torch learns of each layer's sizes when it comes to that, and
        # computes all shapes behind it anew.
        assert all(each.shape[0] == input_ids.shape[0] and each.shape[2] == length for each in past_key_values)
        pairs = zip(past_key_values[::2], past_key_values[1::2], strict=True)
        states = {layer: _Appending(*pair, starts, counts, made_up) for layer, pair in zip(layers, pairs, strict=True)}
        optional: dict[str, Any] = {"use_cache": True, "return_dict": True}
        if logits == ASKED:  # ALiBi is computed of a mask: every key that there is may be seen
            optional["attention_mask"] = input_ids.new_ones(input_ids.shape[0], length)
        given = {name: value for name, value in optional.items() if name in taken}
        given |= {"input_ids": input_ids, "position_ids": positions, cache_name: cache_over(states)}
        with cached_attention(model, CacheStep(starts, counts, positions, length, longest)):
            found = forward(**given).logits
        if logits != ALL_LOGITS and head is None:
            found = _row_by_row(found, asked[0])
        asked.clear()
        found = found.argmax(-1) if chooses else found
        kept = found if logits in (ALL_LOGITS, ASKED) else found[:, 0]
        return [kept, *(tensor for state in states.values() for tensor in (state.keys, state.values))]

    model.forward = step


def _refuse_other_logits(model: Any, sizes: _Sizes, trial: CacheTrial) -> None:
    """Fail if the model, which takes caches by now, computes other logits than it did before."""

    def whole(ids: Tensor) -> Tensor:
        rows, tokens = ids.shape
        caches = _empty_caches(sizes, rows, min(trial.longest, 2 * tokens), model.dtype)
        for start, end in itertools.pairwise(sorted({0, tokens - 1, tokens})):
            logits, *caches = call(ids[:, start:end], torch.full((rows,), start), caches)
        return logits

    def at_places(ids: Tensor, places: Tensor, made_up: MadeUpKeys) -> Tensor:
        shapes = _empty_caches(sizes, 1, 1, model.dtype)
        caches = [made_up.of(number % 2, new).expand(len(ids), -1, -1, -1) for number, new in enumerate(shapes)]
        return call(ids, places, caches, made_up)[0]

    def call(ids: Tensor, starts: Tensor, caches: list[Tensor], made_up: MadeUpKeys | None = None) -> list[Tensor]:
        counts = torch.full_like(starts, ids.shape[1])
        logits, *after = model.forward(ids, starts, counts, caches, made_up=made_up, chooses=False)
        return [logits if logits.dim() == 2 else logits[:, -1], *after]

    trial.refuse_others(whole, at_places)


def _empty_caches(sizes: _Sizes, batch: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    of_all = itertools.chain.from_iterable(sizes.values())
    return [torch.zeros(batch, heads, length, width, dtype=dtype) for heads, width in of_all]


def _row_by_row(hidden: Tensor, places: Tensor) -> Tensor:
    """Return [batch, asked, width]: of each row of [batch, tokens, width] those at its places [batch, asked]."""
    return hidden.gather(1, places[:, :, None].expand(-1, -1, hidden.shape[-1]))


@dataclass
class _Appending:
    """The caches of a layer, and where its new tokens go: a `LayerState`."""

    keys: Tensor
    values: Tensor
    starts: Tensor
    counts: Tensor
    made_up: MadeUpKeys | None  # in place of the caches; they do not keep what is new

    @property
    def reported(self) -> int:
        # Without made up keys none: each row has its own length, and models are given positions.
        return 0 if self.made_up is None else self.made_up.reported

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        new = (keys.transpose(1, 2), values.transpose(1, 2))
        held: tuple[Tensor, Tensor] = APPEND(self.keys, self.values, *new, self.starts, self.counts)
        if self.made_up is None:
            self.keys, self.values = held
        return held

    def length(self, tokens: Any) -> int:
        return self.keys.shape[2]


class _Recording:
    """Notes the sizes of what a layer wants to cache, and caches nothing: a `LayerState`."""

    reported = 0
    sizes: tuple[tuple[int, int], tuple[int, int]] | None = None

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.sizes = ((keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3]))
        return keys, values

    def length(self, tokens: Any) -> Any:
        return tokens


def _probe(where: str, model: Any, cache_name: str) -> _Sizes:
    """Return what the layers that cache keys and values cache of a token, by a run on shapes alone.

    A layer that caches nothing has no state: `_refuse_other_logits` finds out where that is not so.

    Raises:
        UserError: It keeps another state than keys and values, or cannot be run.
    """
    layers: list[_Recording] = []

    def recording() -> _Recording:
        layers.append(_Recording())
        return layers[-1]

    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            ids = torch.ones((1, 2), dtype=torch.int64)
            positions = torch.arange(2)[None]
            given = {"input_ids": ids, "position_ids": positions, "use_cache": True, cache_name: cache_over(recording)}
            # Buffers that a model replaces as it runs, such as CTRL's table of positions, would be fake from now on.
            torch.func.functional_call(model, dict(model.named_buffers()), (), given)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        what = f"torch.export cannot trace the model, where values decide what is computed ({first_line(error)})"
        raise UserError(where, what, got=type(model).__name__, fix=other_ways(model, compiles=False)) from error
    except Exception as error:  # transformers raises what it likes for a cache that does not fit
        raise other_state(where, model, first_line(error)) from error
    sizes = {number: layer.sizes for number, layer in enumerate(layers) if layer.sizes is not None}
    if not sizes:
        raise other_state(where, model, "it caches no keys and values")
    return sizes


def _trace(
    path: Path, model: Any, sizes: _Sizes, options: CacheOptions, dtype: torch.dtype, growing: bool
) -> ExportedProgram:
    batch = torch.export.Dim("batch", min=1, max=LARGEST_BATCH)
    most = max(options.length, _TRACED_LENGTH) if growing else options.length
    tokens, length = (torch.export.Dim(name, min=1, max=most) for name in ("tokens", "length"))
    example = min(_TRACED_TOKENS, most)
    caches = _empty_caches(sizes, _TRACED_BATCH, _TRACED_LENGTH if growing else options.length, dtype)
    counts = torch.ones(_TRACED_BATCH, dtype=torch.int64)
    kwargs = {
        INPUT_IDS: torch.ones(_TRACED_BATCH, example, dtype=torch.int64),
        WRITE_INDEX: torch.zeros_like(counts),
        TOKEN_COUNT: counts,
        "past_key_values": caches,
    }
    shapes = {
        INPUT_IDS: {0: batch, 1: tokens},
        WRITE_INDEX: {0: batch},
        TOKEN_COUNT: {0: batch},
        "past_key_values": [{0: batch, **({2: length} if growing else {})} for _ in caches],
    }
    if growing:
        kwargs[LOGIT_PLACES] = torch.zeros(_TRACED_BATCH, _TRACED_ASKED, dtype=torch.int64)
        shapes[LOGIT_PLACES] = {0: batch, 1: torch.export.Dim("asked", min=1, max=most)}
    fix = other_ways(model, compiles=False) if growing else "Compile it without a cache."
    return trace(str(path), model, (), kwargs, shapes, fix, fix)
