"""Attention and masks of transformers' models in the form that compiles well, while they are traced.

transformers dispatches both by name: functions of ours have names of ours, which one model asks for in its
configurations while it is called or traced. All other models have transformers' own as ever. What these are registered
for, `sdpa` and `eager`, is right for every use, with caches and packed sequences, and costs much in a graph: masks by
gathers over tokens x tokens, keys and values of a group copied.

    mask is causal only     none; scaled_dot_product_attention(..., is_causal=True)
    mask of padding         attention_mask[:, None, None, :], bool [batch, 1, 1, keys]
    both                    (keys <= queries) & attention_mask[:, None, None, :], bool [batch, 1, queries, keys]
    windows, chunks         the mask's own comparisons of indices, in place of keys <= queries
    all else                as transformers has it

Keys and values of a group stay [batch, groups, keys, width].

With a key-value cache (`cached.py`), whose keys stand at their positions, queries have those that the step says:

    mask is causal only     twell.cache_mask(starts, counts, tokens, length), bool [batch, 1, tokens, length]
    windows, chunks         the mask's own comparisons of positions
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from twellc.plugins.cache_op import CACHE_MASK

# What makes a boolean mask, True where a query sees a key, of whether it may be left out where it would be causal and
# of what transformers passes to `sdpa_mask`.
Masks = Callable[[bool, dict[str, Any]], Any]
# Names in transformers' registers.
_TRACED, _ADDED = "twellc", "twellc_added"
# Where a configuration holds the `Masks` of its model.
_MASKS = "twellc_masks"
# Modules with attention of their own that look at the name themselves, such as those of Falcon.
_ASKS_FOR_SDPA = re.compile(r"""_attn_implementation\s*(==|!=|in|not in)\s.*["']sdpa["']""")


@dataclass
class CacheStep:
    """A call of a model with a cache, as its masks see it. It changes from one call to the next, not the mask's code.

    Attributes:
        starts: How many keys of each sequence were there before, int32 [batch].
        counts: How many of the new tokens are real, likewise.
        positions: The position of each new token, int64 [batch, tokens].
        length: How many keys a cache holds.
    """

    starts: Tensor
    counts: Tensor
    positions: Tensor
    length: int


class OwnAttention:
    """Lets one model compute attention and masks by functions of ours, as a context around its calls.

    Configurations of the model name the functions meanwhile. Where layers compute attention themselves, or look at the
    name, they keep their configuration, and only the models that make masks for them get a copy that names ours.

    Attributes:
        dispatches: Whether attention is ours, too, and not the masks alone.
    """

    def __init__(self, model: torch.nn.Module, masks: Masks, name: str = _TRACED, attention: Any = None) -> None:
        """Find out what to change.

        Args:
            model: A model of transformers.
            masks: Makes its masks.
            name: The name of the attention function.
            attention: That function; None is the one of traced models.
        """
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

        AttentionInterface.register(name, attention or _attention)
        AttentionMaskInterface.register(name, _mask)
        AttentionMaskInterface.register(_ADDED, _additive_mask)
        users: dict[int, list[Any]] = {}
        for module in model.modules():
            config: Any = vars(module).get("config")
            if getattr(config, "_attn_implementation", None) in ("sdpa", "eager"):
                users.setdefault(id(config), []).append(module)
        self.dispatches = True
        self._changes: list[tuple[Any, str, Any, Any]] = []  # of what, its attribute, before and after
        for modules in users.values():
            config = modules[0].config
            sdpa = config._attn_implementation == "sdpa"
            code = {kind.__module__ for module in modules for kind in type(module).__mro__}
            if sdpa and not any(map(_asks_for_sdpa, code)):
                self._changes.append((config, "_attn_implementation_internal", "sdpa", name))
                self._changes.append((config, _MASKS, None, masks))
            else:
                self.dispatches = False
                copied = copy.copy(config)
                copied._attn_implementation_internal = name if sdpa else _ADDED
                setattr(copied, _MASKS, masks)
                models = (module for module in modules if isinstance(module, PreTrainedModel))
                self._changes += ((module, "config", config, copied) for module in models)

    def __enter__(self) -> None:
        """Change it."""
        for owner, attribute, _, ours in self._changes:
            setattr(owner, attribute, ours)

    def __exit__(self, *_: object) -> None:
        """Change it back."""
        for owner, attribute, before, _ in self._changes:
            if before is None:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, before)


@functools.cache
def _asks_for_sdpa(module: str) -> bool:
    """Whether the code of a Python module compares the name of the attention with that of transformers' own."""
    try:
        return bool(_ASKS_FOR_SDPA.search(inspect.getsource(sys.modules[module])))
    except (OSError, TypeError):  # there is no file of it
        return False


def traced_attention(model: torch.nn.Module, padded: bool, longest: int) -> OwnAttention:
    """Let a model compute attention and masks in the form that compiles well, in this context.

    Args:
        model: A model of transformers.
        padded: Whether rows may be padded; else the attention mask that a model is given says nothing.
        longest: The longest sequence; windows that hold it are none.
    """
    return OwnAttention(model, partial(_comparisons, padded, longest))


def cached_attention(model: torch.nn.Module, step: CacheStep) -> OwnAttention:
    """Let a model compute attention and masks over a key-value cache, in this context."""
    return OwnAttention(model, partial(_cached_comparisons, step))


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers' `sdpa` does.

    Args:
        module: The layer, whose `is_causal` counts where the argument is None.
        query: [batch, heads, queries, width].
        key: [batch, groups, keys, width].
        value: [batch, groups, keys, value width].
        attention_mask: Broadcastable to [batch, heads, queries, keys], bool or added to the logits.
        dropout: Without meaning: models are in eval mode.
        scaling: Scale of the logits.
        is_causal: Whether to mask later keys; a mask given besides holds that already.
        kwargs: What the layer passes to any implementation.

    Returns:
        [batch, queries, heads, value width], and no weights.
    """
    if kwargs.get("position_bias") is not None or kwargs.get("softcap") is not None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs)
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    result = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=is_causal and attention_mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return result.transpose(1, 2).contiguous(), None


def _mask(**request: Any) -> Any:
    """Make a mask for scaled_dot_product_attention; None where `is_causal` of the layer says all.

    `request` is what transformers passes to `sdpa_mask`, which documents it.
    """
    return getattr(request["config"], _MASKS)(request.get("allow_is_causal_skip", True), request)


def _additive_mask(**request: Any) -> Tensor | None:
    """Make a mask that is added to the logits: 0 or the lowest finite value. See `eager_mask` of transformers."""
    mask = getattr(request["config"], _MASKS)(False, request)
    if mask is None:
        return None
    dtype = request["dtype"]
    added = torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), torch.finfo(dtype).min)
    # Models with attention of their own may check the whole shape.
    return added.expand(request["batch_size"], 1, query_count(request), mask.shape[-1])


def query_count(request: dict[str, Any]) -> Any:
    """Return for how many queries a mask is asked. Older releases give their places."""
    return request["q_length"] if "q_length" in request else len(request["cache_position"])


def _comparisons(padded: bool, longest: int, causal_is_optional: bool, request: dict[str, Any]) -> Tensor | None:
    """Make a boolean mask, True where a query sees a key; None where it would be causal and is optional, or all True.

    Returns:
        The mask, broadcastable to [batch, 1, queries, keys].
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

    seen, device = request["mask_function"], request.get("device", "cpu")
    padding = request["attention_mask"] if padded else None
    window = request.get("local_size")
    # Both are False where anything was added to the usual function.
    usual_causal = request.get("allow_is_causal_skip", True)
    usual_full = request.get("allow_is_bidirectional_skip", False)
    if window is not None and longest <= window and (usual_causal or usual_full):
        seen = causal_mask_function if usual_causal else bidirectional_mask_function
    full = seen is bidirectional_mask_function
    offsets = (request.get("q_offset", 0), request.get("kv_offset", 0))
    if request.get("use_vmap") or any(not isinstance(offset, int) or offset for offset in offsets):
        request = {**request, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        made: Tensor | None = sdpa_mask(**request)
        return made
    if padding is None and ((causal_is_optional and seen is causal_mask_function) or (usual_full and full)):
        return None
    visible = None if padding is None else padding[:, None, None, :].to(torch.bool)
    if full and usual_full:
        return visible
    queries = torch.arange(request["q_length"], device=device)[None, None, :, None]
    keys = torch.arange(request["kv_length"], device=device)[None, None, None, :]
    batch = torch.arange(request["batch_size"], device=device)[:, None, None, None]
    mask: Tensor = seen(batch, torch.zeros_like(batch[:1]), queries, keys)
    mask = mask if visible is None else mask & visible
    # A model that insists on a mask may do more with it than attention does.
    insists = not usual_causal and not usual_full
    return mask.expand(request["batch_size"], -1, request["q_length"], request["kv_length"]) if insists else mask


def _cached_comparisons(step: CacheStep, causal_is_optional: bool, request: dict[str, Any]) -> Tensor:
    """Make a boolean mask, True where a query sees a key of a cache: [batch, 1, tokens, length]."""
    from transformers.masking_utils import causal_mask_function

    if request.get("use_vmap"):
        raise NotImplementedError("masks of a model's own are not known to be comparisons of positions")
    seen, window = request["mask_function"], request.get("local_size")
    if window is not None and step.length <= window and request.get("allow_is_causal_skip", True):
        seen = causal_mask_function
    if seen is causal_mask_function:
        causal: Tensor = CACHE_MASK(step.starts, step.counts, step.positions.shape[1], step.length)
        return causal
    batch = torch.arange(step.positions.shape[0], device=step.positions.device)[:, None, None, None]
    keys = torch.arange(step.length, device=step.positions.device)[None, None, None, :]
    mask: Tensor = seen(batch, torch.zeros_like(batch[:1]), step.positions[:, None, :, None], keys)
    return mask
