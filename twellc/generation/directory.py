"""A Hugging Face directory in torch, its feed-forward blocks by the `twell` ops."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor

from twellc.base.devices import choose_device
from twellc.base.dtypes import dtype_name
from twellc.base.errors import UserError, first_few
from twellc.base.torch_private import dynamo
from twellc.base.transformers_private import nothing_fetched
from twellc.eager.optimization import dequantize_others, optimize, optimized_blocks, refuse_other_weights
from twellc.generation.backend import places_for
from twellc.generation.rows import RowCache
from twellc.loaders.attention import NextCall, row_attention
from twellc.loaders.cache_trial import CacheTrial, MadeUpKeys
from twellc.loaders.huggingface import cache_argument, cached_length, open_directory
from twellc.loaders.huggingface_inputs import longest_text
from twellc.options.weights import KEEP, refuse_samples, refuse_weights_of_linear
from twellc.passes.graph.program import quiet_torch
from twellc.passes.report import reads_fp8
from twellc.passes.sizes.conditions import SizeRanges
from twellc.passes.sizes.inputs import InputSpec, ModelInputs
from twellc.plugins.cache_op import attends_by_cudnn
from twellc.samples.samples import Limits, read_text

# Numbers of rows, and sizes of prompts and caches, that a model is compiled for; torch would go on without compiling
# after the eighth, and say little.
_MOST_SIZES = 256
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class TorchBackend:
    """A model of transformers as a `Backend`.

    Attributes:
        model: The module.
        notes: What the user should know.
        by_lengths: Whether attention to older keys goes by lengths, see `RowCache`.
    """

    def __init__(
        self, model: Any, name: str, length: int | None = None, compiled: bool = False, compiled_fill: str = ""
    ) -> None:
        """Take a model.

        Args:
            model: The module, where it is to run.
            name: What computes, for people.
            length: How many places the cache of a row has; None makes them as they are needed.
            compiled: Whether torch.compile compiles decoding, for each number of rows anew.
            compiled_fill: Whether it compiles the first tokens of rows, too: `dynamic` for any number of them at once,
                `static` for each size anew; empty: not.

        Raises:
            UserError: It is not a causal language model of attention layers, or has fewer positions.
        """
        self._cache_argument = cache_argument(model, type(model).__name__)
        if getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None:
            model.set_attn_implementation("eager")  # older releases take another, which leaves the cap out
        self.model, self.name, self.notes = model, name, list[str]()
        self.device = model.device
        self.vocabulary = model.config.get_text_config(decoder=True).vocab_size
        limit = cached_length(model)
        refuse_other_length(length, limit)
        self.longest = length or limit
        self.largest_batch: int | None = None
        self.chooses = False
        self.chunk, self.scores_prompts = 1 << 20, True
        self._fixed = length is not None
        self._taken = inspect.signature(model.forward).parameters
        self._decode = compiled_call(self._logits, dynamic=False) if compiled else self._logits
        self._fill = compiled_call(self._logits, dynamic=compiled_fill == "dynamic") if compiled_fill else self._logits
        self._call = NextCall(torch.zeros(1, dtype=torch.int64, device=self.device), True, False)
        self._attention = row_attention(model, self._call)
        self.by_lengths = self._attention.dispatches and self.device.type == "cuda" and attends_by_cudnn()
        self._cache: RowCache | None = None
        self._ones = torch.empty(0)

    def begin(self, batch: int, places: int) -> bool:
        """Make room; see `Backend`."""
        cache = self._cache
        if cache is not None and len(self._call.index) == batch and cache.length >= places:
            cache.reset()  # a NaN at a place that no query sees would reach its result
            return False
        length = self.longest if self._fixed else places_for(places, self.longest)
        config = self.model.config.get_text_config(decoder=True)
        self._cache = None  # and its memory, before there is another
        self._at(torch.zeros(batch, dtype=torch.int64, device=self.device), True)
        self._ones = torch.ones(batch, length, dtype=torch.int64, device=self.device)
        self._cache = RowCache(config.num_hidden_layers, length, self._call)
        try:  # the first tokens make the tensors of the cache
            with self._attention:
                self._logits(self._ones[:, :1], self._ones[:, :1] - 1)
        except BaseException:
            self._cache = None
            raise
        return True

    def _at(self, index: Tensor, is_prefill: bool = False) -> None:
        """Say where the next call writes."""
        self._call.index, self._call.is_prefill, self._call.by_lengths = index, is_prefill, self.by_lengths

    def fill(self, input_ids: Tensor, start: int, every: bool = False) -> Tensor:
        """Compute the first tokens of rows; see `Backend`."""
        self._at(torch.full_like(self._call.index, start), start == 0)
        places = torch.arange(start, start + input_ids.shape[1], device=self.device).expand(len(input_ids), -1)
        with self._attention:
            return self._every_logits(input_ids, places) if every else self._fill(input_ids, places)

    def decode(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Compute a token of each row; see `Backend`."""
        self._at(places)
        with self._attention:
            return self._decode(tokens[:, None], places[:, None])

    @torch.no_grad()
    def refuse_other_logits(self, where: str) -> None:
        """Fail if the model computes something else over the cache than without one; `where` names it in the message.

        Raises:
            UserError: It does, or it cannot be run.
        """
        trial = CacheTrial(where, self.model, self.longest, self._cache_argument)
        try:
            trial.refuse_others(self._by_token, self._at_places)
        finally:
            self._cache = None

    def _by_token(self, ids: Tensor) -> Tensor:
        """Return the logits behind texts [rows, tokens], of which each call takes one token."""
        self.begin(*ids.shape)
        with self._attention:
            for place in range(ids.shape[1]):
                self._at(torch.full_like(self._call.index, place), place == 0)
                found = self._logits(ids[:, place : place + 1], self._call.index[:, None])
        return found

    def _at_places(self, ids: Tensor, places: Tensor, made_up: MadeUpKeys) -> Tensor:
        """Return the logits behind a token of each row, over keys and values that are made up; see `CacheTrial`."""
        layers = self.model.config.get_text_config(decoder=True).num_hidden_layers
        self._cache = RowCache(layers, made_up.length, self._call, made_up)
        self._at(places)
        self._ones = torch.ones(len(ids), made_up.length, dtype=torch.int64, device=self.device)
        with self._attention:
            return self._logits(ids, places[:, None])

    def _logits(self, input_ids: Tensor, places: Tensor) -> Tensor:
        """Return the logits behind the last token of each row, [batch, vocabulary]."""
        return self._every_logits(input_ids, places, 1)[:, -1]

    def _every_logits(self, input_ids: Tensor, places: Tensor, kept: int = 0) -> Tensor:
        """Return logits, [batch, tokens, vocabulary]: of the last `kept` tokens of each row at least, 0 for all."""
        assert self._cache is not None
        optional = {"use_cache": True, "logits_to_keep": kept, "return_dict": True}
        given: dict[str, Any] = {name: value for name, value in optional.items() if name in self._taken}
        given[self._cache_argument] = self._cache
        if "attention_mask" in self._taken:
            # Some models look at a mask themselves: every key that there is may be seen.
            keys, _ = self._cache.get_mask_sizes(input_ids.shape[1], 0)
            given["attention_mask"] = self._ones[:, :keys]
        logits: Tensor = self.model(input_ids=input_ids, position_ids=places, **given).logits
        return logits


def refuse_other_length(length: int | None, limit: int) -> None:
    """Raise a UserError if a cache cannot have as many places as are asked for."""
    if length is not None and not 1 <= length <= limit:
        what, expected = "is out of range for this model's cache", f"1 to {limit}, the positions of the model"
        raise UserError("max_model_len", what, got=str(length), expected=expected)


def compiled_call(function: Callable[..., Tensor], dynamic: bool) -> Callable[..., Tensor]:
    """Return a function as torch.compile compiles it, for many sizes."""
    compiled = torch.compile(function, dynamic=dynamic)

    def call(*tensors: Tensor) -> Tensor:
        with dynamo.config.patch(recompile_limit=_MOST_SIZES):  # of this thread
            return compiled(*tensors)

    return call


def load_directory(
    path: Path,
    device: str | torch.device | None = "auto",
    dtype: str | None = None,
    length: int | None = None,
    compiled: bool = False,
    layers: str = "auto",
    weights: str = KEEP,
    fp8_error: float | None = None,
    text: Path | None = None,
) -> TorchBackend:
    """Load a Hugging Face directory, its feed-forward blocks by the `twell` ops.

    Args:
        path: The directory.
        device: `auto`, `cpu`, `cuda` or `cuda:N`; `auto` and None are the GPU where torch sees one.
        dtype: `bf16`, `fp16` or `fp32`; None is that of the weights, on a GPU bf16 for float32.
        length: See `TorchBackend`.
        compiled: Whether torch.compile compiles prompts and decoding.
        layers: Which blocks the `twell` ops compute, see `twellc.optimize`.
        weights: In how many bits, likewise.
        fp8_error: The largest relative error of a block in FP8, likewise.
        text: What that is measured on.

    Raises:
        UserError: There is no causal language model, no such device, or see `TorchBackend`.
    """
    refuse_samples(refuse_other_weights(weights, fp8_error), {"--text": text})
    refuse_weights_of_linear("weights", "linear layers are torch's own without linear='twell'", weights)
    chosen = choose_device("auto" if device is None else device)
    in_dtype, dtype_notes = precision_for(dtype, chosen)
    with nothing_fetched():
        model, _, notes = open_directory(path, in_dtype)
    cache_argument(model, f"{path}, a {type(model).__name__}")
    notes += dtype_notes
    if weights == KEEP or fp8_error is not None:
        model.to(chosen)
    samples = None if text is None else _samples_of(text, path, model)
    with quiet_torch():
        optimize(model, layers=layers, weights=weights, fp8_error=fp8_error, samples=samples)
    others = dequantize_others(model, model.dtype)
    model.to(chosen)  # of blocks that are quantised, and not measured before, only FP8
    if others:
        what = (
            f"{len(others)} layers in E4M3 that no block by the op reads are dequantised to {dtype_name(model.dtype)}"
        )
        notes.append(f"{what}: {first_few(others)}")
    taken = optimized_blocks(model)
    blocks, fp8 = len(taken), sum(reads_fp8(each.weights) for each in taken)
    wide = [f"{each.module}, {each.weights}" for each in taken if each.weights and not reads_fp8(each.weights)]
    if wide:
        notes.append(f"{len(wide)} feed-forward blocks are not read in FP8: {first_few(wide, '; ')}")
    if not blocks and layers != "none":
        notes.append("no feed-forward block is one that twellc.optimize takes: the dense model runs")
    by_ops = f"{blocks} feed-forward blocks by the twell ops{f', {fp8} in FP8' if fp8 else ''}"
    name = f"torch on {device_name(chosen)}, {by_ops}{', compiled' * compiled}"
    backend = TorchBackend(model, name, length, compiled, "dynamic" if compiled else "")
    backend.refuse_other_logits(str(path))
    backend.notes = notes
    return backend


def precision_for(dtype: str | None, device: torch.device) -> tuple[Callable[[torch.dtype], torch.dtype], list[str]]:
    """Return what says in which precision a model runs, given its own, and notes on that, which are there then.

    Raises:
        UserError: There is no such `dtype`.
    """
    if dtype is not None and dtype not in tuple(_DTYPES):
        raise UserError("dtype", "no such choice", got=repr(dtype), expected=" or ".join(_DTYPES))
    notes = list[str]()

    def in_dtype(own: torch.dtype) -> torch.dtype:
        if dtype is not None:
            return _DTYPES[dtype]
        if device.type != "cuda" or own != torch.float32:
            return own
        notes.append("the model is in float32; on the GPU it runs in bfloat16")
        return torch.bfloat16

    return in_dtype, notes


def _samples_of(text: Path, path: Path, model: Any) -> list[dict[str, Any]]:
    """Return a text as arguments of a model, through the tokenizer in its directory."""
    longest: SizeRanges = {"tokens": (1, longest_text(model))}
    inputs = ModelInputs([InputSpec("input_ids", torch.int64, (1, sympy.Symbol("tokens")))], longest, {})
    found = read_text(text, path, True, Limits(inputs, None, model.config.get_text_config(decoder=True).vocab_size))
    return [{"input_ids": each["input_ids"].to(model.device), "use_cache": False} for each in found.samples]


def device_name(device: torch.device) -> str:
    """Return what people call a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
