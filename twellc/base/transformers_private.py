"""All uses of names of transformers that are private there, or change from release to release.

Tried with transformers 5.3 to 5.24. `tests/twellc/base/test_private.py` names the entries of `NEEDED` that a release
lacks, and refuses such uses in all other files. Nothing of transformers is imported before a function is called.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from twellc.base.changes import Change, Changed
from twellc.base.threads import PROCESS_WIDE
from twellc.base.torch_private import OpOverload

# Names that must exist, with the features that need them.
NEEDED: dict[str, str] = {
    "transformers.activations:ACT2FN": "twellc.training.relufy: the configuration names ReLU",
    "transformers.masking_utils:bidirectional_mask_function": "masks of encoders are recognised",
    "transformers.masking_utils:causal_mask_function": "causal masks are recognised",
    "transformers.masking_utils:sdpa_mask": "masks of another form than comparisons of positions",
    "transformers.integrations.sdpa_attention:sdpa_attention_forward": "attention with position biases",
    "transformers.integrations.hub_kernels:is_kernels_available": "no native code is fetched",
    "huggingface_hub.constants:HF_HUB_OFFLINE": "no file is fetched",
    "transformers.models.auto.modeling_auto:MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "which classes generate text",
    "transformers.models.auto.modeling_auto:MODEL_FOR_MASKED_LM_MAPPING_NAMES": "which decoders may be encoders",
    "transformers.models.auto.modeling_auto:MODEL_MAPPING_NAMES": "which decoders may be encoders",
    "transformers.integrations.moe:ALL_EXPERTS_FUNCTIONS": "a function of twellc computes experts, and counts",
    "transformers.integrations.moe:_grouped_mm": "grouped products of experts are computed as transformers does",
    "transformers.models.nllb_moe.modeling_nllb_moe:NllbMoeSparseMLP": "it is refused with the reason",
    "transformers.models.switch_transformers.modeling_switch_transformers:SwitchTransformersSparseMLP": "it compiles",
    "transformers:AttentionInterface.register": "attention is computed by a function of twellc",
    "transformers:AttentionMaskInterface.register": "masks are made by a function of twellc",
    "transformers:PreTrainedConfig._attn_implementation": "which attention a model has",
    "transformers:PreTrainedModel._supports_attention_backend": "attention over a cache goes by lengths",
    "transformers:Cache.update": "a cache of twellc takes the place of transformers' own",
    "transformers.cache_utils:CacheLayerMixin": "a layer of such a cache",
    "transformers:CacheLayerMixin.get_mask_sizes": "how many keys a mask has",
    "transformers:CacheLayerMixin.get_seq_length": "how many tokens a cache says that it has",
    "transformers:StaticLayer.lazy_initialization": "keys and values of rows",
    "transformers:GenerationMixin._get_logits_processor": "processors are made of the arguments of generate",
}

# ---- kinds of models ----


def causal_lm_classes() -> dict[str, str]:
    """Return the names of the classes that generate text, by model type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def is_causal(model: Any) -> bool:
    """Whether the registers of transformers list a model as a decoder alone, so that no token sees a later one."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

    config, kind = model.config, model.config.model_type
    if kind not in causal_lm_classes() or config.is_encoder_decoder:
        return False
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        return False
    base = str(MODEL_MAPPING_NAMES.get(kind))
    may_be_an_encoder = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES or base.endswith("Encoder")
    return bool(getattr(config, "is_decoder", False)) or not may_be_an_encoder


def activation_classes() -> Any:
    """Return the mapping from names of activations in configurations to modules."""
    from transformers.activations import ACT2FN

    return ACT2FN


def keep_rotary_frequencies(model: Any) -> int | None:
    """Keep a model from asking how long a text is; return the largest length for which that is right, None for any.

    Rotary frequencies of longrope change with the length of a text, and so do all keys.
    """
    longest: list[int] = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if kinds is None:
            continue
        several = isinstance(kinds, dict)  # one for each type of layers
        for name, kind in kinds.items() if several else [("", kinds)]:
            parameters = module.config.rope_parameters[name] if several else module.config.rope_parameters
            if kind == "longrope":
                longest.append(parameters["original_max_position_embeddings"])
        module.rope_type = dict.fromkeys(kinds, "default") if several else "default"
    return min(longest, default=None)


# ---- nothing is fetched ----


@contextmanager
def nothing_fetched() -> Iterator[None]:
    """Import and use transformers in this context only, one thread at a time.

    Where the package `kernels` is installed, transformers loads compiled kernels from a hub: if a config.json asks for
    it, and for some model types in any case. No file of a model may do that. Where transformers is first imported
    here, it takes `kernels` for missing until the process ends.
    """
    with PROCESS_WIDE:
        yield from _kept_from_fetching()


def _kept_from_fetching() -> Iterator[None]:
    hidden = "kernels" not in sys.modules
    if hidden:
        sys.modules["kernels"] = None  # type: ignore[assignment]  # Python then raises ImportError for it
    try:
        from huggingface_hub import constants
        from transformers.integrations import hub_kernels

        without_kernels = (hub_kernels, "is_kernels_available", lambda *_, **__: False)
        with Changed((constants, "HF_HUB_OFFLINE", True), without_kernels):
            yield
    finally:
        if hidden:
            del sys.modules["kernels"]


# ---- attention ----

# Makes a mask from two arguments: whether a causal mask may be left out, and the arguments of `sdpa_mask`.
Masks = Callable[[bool, dict[str, Any]], Any]
# Names in transformers' registers: how those of attention begin, and of masks that are added to the logits.
_OURS, _ADDED = "twellc", "twellc_added"
_COUNTING = "twellc_counting"
# The attribute of a configuration that holds the `Masks` of a model.
_MASKS = "twellc_masks"
# Modules with their own attention that look at the name themselves, such as those of Falcon.
_ASKS_FOR_SDPA = re.compile(r"""_attn_implementation\s*(==|!=|in|not in)\s.*["']sdpa["']""")


def own_attention(model: torch.nn.Module, attention: Callable[..., Any], masks: Masks) -> Changed:
    """Let one model of transformers compute attention and masks by functions of twellc within this context.

    transformers dispatches both by a name in the configuration, which is changed for that time; all other models have
    transformers' own. Where layers compute attention themselves, or look at the name, they keep their configuration,
    and only the models that make masks for them get a copy that names ours.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

    ours = f"{_OURS}_{attention.__module__.replace('.', '_')}"  # models of several functions answer in turns
    AttentionInterface.register(ours, attention)
    AttentionMaskInterface.register(ours, _mask)
    AttentionMaskInterface.register(_ADDED, _additive_mask)
    users: dict[int, list[Any]] = {}
    for module in model.modules():
        config: Any = vars(module).get("config")
        if getattr(config, "_attn_implementation", None) in ("sdpa", "eager"):
            users.setdefault(id(config), []).append(module)
    changes: list[Change] = []
    for modules in users.values():
        config = modules[0].config
        sdpa = config._attn_implementation == "sdpa"
        code = {kind.__module__ for module in modules for kind in type(module).__mro__}
        if sdpa and not any(map(_asks_for_sdpa, code)):
            changes += [(config, "_attn_implementation_internal", ours), (config, _MASKS, masks)]
        else:
            copied = copy.copy(config)
            copied._attn_implementation_internal = ours if sdpa else _ADDED
            setattr(copied, _MASKS, masks)
            changes += ((module, "config", copied) for module in modules if isinstance(module, PreTrainedModel))
    return Changed(*changes)


@functools.cache
def _asks_for_sdpa(module: str) -> bool:
    """Whether the code of a Python module compares the name of the attention with that of transformers' own."""
    try:
        return bool(_ASKS_FOR_SDPA.search(inspect.getsource(sys.modules[module])))
    except (OSError, TypeError):  # it has no file
        return False


def _mask(**request: Any) -> Any:
    return getattr(request["config"], _MASKS)(request.get("allow_is_causal_skip", True), request)


def _additive_mask(**request: Any) -> Tensor | None:
    """Make a mask that is added to the logits: 0 or the lowest finite value. See `eager_mask` of transformers."""
    mask = getattr(request["config"], _MASKS)(False, request)
    if mask is None:
        return None
    dtype = request["dtype"]
    added = torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), torch.finfo(dtype).min)
    # Models with their own attention may check the whole shape.
    return added.expand(request["batch_size"], 1, query_count(request), mask.shape[-1])


def query_count(request: dict[str, Any]) -> Any:
    """Return the number of queries of a requested mask."""
    return _count(request["q_length"] if "q_length" in request else request["cache_position"])


def _count(queries: Any) -> Any:
    """Return how many queries there are. Older releases give their positions."""
    return queries.shape[0] if isinstance(queries, Tensor) else queries


class PlainMasks(NamedTuple):
    """Functions of transformers that say by positions which keys a query sees, and its function that makes masks."""

    causal: Any
    full: Any
    make: Callable[..., Any]


def plain_masks() -> PlainMasks:
    """Return the functions of the masks that need no tensor, and `sdpa_mask`, which makes any."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

    return PlainMasks(causal_mask_function, bidirectional_mask_function, sdpa_mask)


def plain_attention() -> Callable[..., Any]:
    """Return the function that transformers registers for `sdpa`."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward


def attention_of_others(module: torch.nn.Module) -> list[Change]:
    """Return the changes that let torch compute the attention of a module with another implementation."""
    config: Any = vars(module).get("config")
    kind = getattr(config, "_attn_implementation", None)
    if kind in (None, "eager", "sdpa") or getattr(config, "sub_configs", None):
        return []
    return [(config, "_attn_implementation", "sdpa")]


# ---- experts ----

# Computes experts from their module, x [tokens, d_model], and the experts of each token with their factors [tokens, k].
Experts = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


def experts_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return the modules of experts that a registered function may compute, by path.

    Each has `num_experts`, `has_gate`, `has_bias`, `is_transposed`, `is_concatenated`, the weights `gate_up_proj` or
    `up_proj` and `down_proj`, and `act_fn` or, with a gate, `_apply_gate`; of newer releases `has_post_expert_norm` and
    `_is_expert_parallel`, too. Where a release has none of this, no experts are found.
    """
    named = {path: module for path, module in model.named_modules() if hasattr(module, "is_concatenated")}
    return {path: module for path, module in named.items() if isinstance(getattr(module, "num_experts", None), int)}


def experts_computed_by(model: torch.nn.Module, experts: Experts) -> Changed:
    """Let a function compute the experts of a model of transformers within this context."""
    configs = {id(each.config): each.config for each in experts_of(model).values()}
    register_experts(_COUNTING, experts)
    return Changed(*((config, "_experts_implementation", _COUNTING) for config in configs.values()))


def register_experts(name: str, experts: Experts) -> None:
    """Let configurations name a function that computes experts."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(name, experts)


def config_with_experts(config: Any, name: str) -> Any:
    """Return a copy of a configuration, which holds no other one, with another function for experts."""
    own = copy.copy(config)
    own._experts_implementation = name
    return own


def is_forward_of_experts(experts: Any) -> bool:
    """Whether the forward of experts looks up a registered function."""
    return hasattr(type(experts).forward, "__wrapped__")


def experts_computed_as(config: Any, experts: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Compute experts as a configuration asks; for None one after the other."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    name = "eager" if config is None else config._experts_implementation
    function = ALL_EXPERTS_FUNCTIONS.get_interface(name, type(experts).forward.__wrapped__)
    y: Tensor = function(experts, x, ids, weights)
    return y


def layers_with_loops(model: torch.nn.Module) -> tuple[list[Any], list[Any]]:
    """Return the modules that call experts in a loop: those of Switch, and those of NLLB-MoE.

    Each of Switch has a `router`, whose forward brings its `classifier` to `dtype`, and `experts`, a dictionary of
    modules with `wi`, `act` and `wo`.
    """
    names = ("SwitchTransformersSparseMLP", "NllbMoeSparseMLP")
    switch, nllb = ([each for each in model.modules() if type(each).__name__ == name] for name in names)
    return switch, nllb


GROUPED_PRODUCT = "transformers.grouped_mm_fallback.default"


def grouped_product_op() -> OpOverload:
    """Return that op: it multiplies rows of each expert, which follow each other, with its matrix [in, out]."""
    from transformers.integrations import moe  # noqa: F401  # registers it

    op: OpOverload = torch.ops.transformers.grouped_mm_fallback.default
    return op


def grouped_products_as_ops() -> Changed:
    """Let grouped products of experts be traced as one op of transformers in this context, one thread at a time.

    torch's own cannot be traced but in bfloat16.
    """
    from transformers.integrations import moe

    return Changed((moe, "_can_use_grouped_mm", lambda *_: False))


def grouped_product(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Compute that op as transformers does where nothing is traced: by torch's own product, if it can."""
    from transformers.integrations.moe import _grouped_mm

    y: Tensor = _grouped_mm(x, weight, offsets)
    return y


# ---- caches ----


class LayerState(Protocol):
    """The keys and values of a layer."""

    @property
    def reported(self) -> int:
        """How many tokens the cache reports for all rows: models use it for more than positions."""

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take new keys and values [batch, heads, tokens, width]; return those that queries attend to."""

    def length(self, tokens: Any) -> Any:
        """Return how many keys the queries of new tokens attend to."""


def cache_over(states: Mapping[int, LayerState] | Callable[[], LayerState]) -> Any:
    """Return a cache of transformers over the states of layers by number, or one that makes what a model asks for.

    Layers without a state, as those of feed-forward blocks alone, have numbers, too. They must cache nothing.
    """
    from transformers import Cache
    from transformers.cache_utils import CacheLayerMixin

    class Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
        is_sliding = False

        def __init__(self, state: LayerState) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.state = state
            self.is_initialized = True

        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            return self.state.update(key_states, value_states)

        def lazy_initialization(self, *_: Any, **__: Any) -> None:
            pass

        def get_mask_sizes(self, query_length: Any) -> tuple[Any, int]:
            return self.state.length(_count(query_length)), 0

        def get_seq_length(self) -> int:
            return self.state.reported

        def get_max_length(self) -> int:
            return -1

        get_max_cache_shape = get_max_length  # its older name

    if callable(states):
        make: Any = lambda: Layer(states())  # noqa: E731
        return Cache(layer_class_to_replicate=make)
    asked = next(iter(states.values()))  # models ask layer 0 how long the cache is, whatever it is
    return Cache(layers=[Layer(states.get(number, asked)) for number in range(max(states) + 1)])


# ---- generation ----

Model = TypeVar("Model", bound=type)


def without_state(model: Model) -> Model:
    """Say of a class of models that it has no state but its cache, as `generate` asks."""
    setattr(model, "_is_stateful", False)  # noqa: B010, mypy does not know it
    return model


def padding_token(generation_config: Any) -> int | None:
    """Return the token that `generate` pads answers with, of a configuration that it has prepared."""
    token = generation_config._pad_token_tensor
    return None if token is None else int(token)


def allowed_by_prefix(processor: Any) -> Callable[[int, Tensor], list[int]]:
    """Return the function of a `PrefixConstrainedLogitsProcessor`, of a prompt's number and its tokens so far."""
    return processor._prefix_allowed_tokens_fn  # type: ignore[no-any-return]
