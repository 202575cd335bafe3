"""Experts in vLLM, computed by the op `twell::experts`.

vLLM keeps the routed experts of a layer in one module. A method computes them: `apply` gets tokens and the router's
choices. Ours replaces vLLM's before weights are loaded, and reads them where vLLM puts them:

    w13_weight [experts, d_ff, d_model]     up
    w2_weight  [experts, d_model, d_ff]     down, stored neuron by neuron once it is loaded, in the same memory

Router, latent projections, shared experts and the sum over ranks stay vLLM's. Each rank has a share of all experts'
neurons, or a share of the experts; then `expert_map` gives the number of an expert on this rank, or -1.

NOTE: our own module in place of vLLM's would run on CPUs, too, where vLLM makes no experts without a gate. It would
have to repeat vLLM's router, loader and groups of ranks, release after release.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8MoEMethod

from twellc.plugins.experts_op import EXPERTS, exceeded_limit

# Activations by vLLM's names. For activations of the op with a gate, vLLM has none.
_ACTIVATIONS = {"relu2_no_mul": "relu2"}
# The kernels load 16 bytes of a row at a time.
_VECTOR = 16


class TwellExpertsMethod(FusedMoEMethodBase):
    """Computes routed experts by the op.

    Args:
        own: vLLM's method, which has created the weights.
    """

    supports_pre_processed_weights = True  # those of another process, from vLLM's cache of weights
    # `apply` calls shared experts. vLLM would run them at the same time, on another stream, which is slower: with 16
    # tokens of Nemotron 3 Nano a step by 16 %, on an H200.
    mk_can_overlap_shared_experts = True

    def __init__(self, own: FusedMoEMethodBase) -> None:
        super().__init__(own.moe)

    def create_weights(self, *_: Any, **__: Any) -> None:
        """Do nothing, as vLLM's own method has created them."""

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Return None, as no kernel of vLLM is called."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Store the weights of down projections neuron by neuron; leave all others."""
        if layer.w2_weight.is_contiguous():
            layer.w2_weight.data = _by_neuron(layer.w2_weight.data)

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """Return the sum over each token's experts on this rank, [tokens, d_model]; run shared experts behind them."""
        ids = topk_ids if layer.expert_map is None else layer.expert_map[topk_ids]
        neurons = layer.moe_config.intermediate_size_per_partition_unpadded
        up, down = layer.w13_weight[:, :neurons], layer.w2_weight.mT[:, :neurons]
        activation = _ACTIVATIONS[layer.activation.value]
        y: Tensor = EXPERTS(x, up, None, down, ids, topk_weights.float(), activation, **self._scales(layer))
        if shared_experts is not None:
            shared_experts(shared_experts_input, SharedExpertsOrder.MK_INTERNAL_OVERLAPPED)
        return y

    def _scales(self, layer: Any) -> dict[str, Tensor]:
        return {}


class TwellModelOptExpertsMethod(TwellExpertsMethod):
    """The same for ModelOpt's E4M3, with a scale for each expert; vLLM loads these by the name of this class."""

    def _scales(self, layer: Any) -> dict[str, Tensor]:
        up, down = layer.w13_weight_scale, layer.w2_weight_scale
        return {"up_scale": up.view(-1, 1, 1), "down_scale": down.view(-1, 1, 1)}


_METHODS: dict[type, type[TwellExpertsMethod]] = {
    UnquantizedFusedMoEMethod: TwellExpertsMethod,
    ModelOptFp8MoEMethod: TwellModelOptExpertsMethod,
}


def _by_neuron(weight: Tensor) -> Tensor:
    """Store [experts, d_out, d_ff] so that its transpose is contiguous, in the same memory."""
    experts, d_out, d_ff = weight.shape
    stored = weight.view(experts, d_ff, d_out)
    for matrix, place in zip(weight, stored, strict=True):
        place.copy_(matrix.t().contiguous())
    return stored.mT


def find_experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield path and module of the routed experts of each layer."""
    for path, module in model.named_modules():
        if isinstance(module, RoutedExperts):
            yield path, module


def put_experts(experts: Any) -> None:
    """Let the op compute routed experts."""
    own = experts.quant_method
    del experts.quant_method  # for weights of 16 bits it is a submodule, and ours is not
    experts.quant_method = _METHODS[type(own)](own)


def refusal_of_experts(experts: Any) -> str:
    """Return why the op cannot compute routed experts; an empty text where it can."""
    config, own = experts.moe_config, experts.quant_method
    parallel, activation = config.moe_parallel_config, experts.activation.value
    if activation not in _ACTIVATIONS:
        return f"their activation is {activation}; experts need relu2 without a gate"
    if type(own) not in _METHODS:
        return f"{type(own).__name__} keeps their weights; they need 16 bits, or ModelOpt's E4M3"
    if config.has_bias:
        return "experts with biases"
    if experts.apply_router_weight_on_input:
        return "the router's weights are multiplied with the input"
    if parallel.enable_eplb:
        return "load balancing across experts is switched on"
    if parallel.dp_size > 1:
        return "data parallel ranks exchange tokens by vLLM's own kernels"
    if config.in_dtype not in (torch.bfloat16, torch.float16):
        return f"they compute in {str(config.in_dtype).removeprefix('torch.')}; the kernels take bfloat16 and float16"
    d_model, d_ff = config.hidden_dim, config.intermediate_size_per_partition_unpadded
    multiple = _VECTOR // experts.w13_weight.element_size()
    return exceeded_limit(experts.local_num_experts, d_ff, (d_model, d_ff), top=experts.top_k, multiple=multiple)
