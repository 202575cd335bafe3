"""Find the blocks of a Hugging Face model, and replace them by layers of vLLM that call the `twell` ops.

A block's projections become parallel linear layers of vLLM, which load, keep and shard the weights as always. Only
their results change:

    x ─ up ─ x ─ nothing ─ x ─ down ─ y          up and gate return x; down calls the op, with the weights of all three

Where vLLM has layers in E4M3, they load bytes and scales as these are in the checkpoint, and the op reads them so,
without the changes of vLLM's own methods after loading. Layers of 16 bits may be quantised once they are loaded.

So vLLM still adds the bias of `down` on one rank, and sums over the ranks behind it. A module that is one block calls
`down` alone. In a plain block that is written out in a larger module, as in OPT, the activation's module does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    RowParallelLinear,
    UnquantizedLinearMethod,
)

from twellc.eager.module_blocks import FoundBlock, Operand, between, find_blocks, functions_of, matrices_of
from twellc.passes.match.linear import step, strip
from twellc.plugins.block import BlockOptions, WeightOperands
from twellc.plugins.fp8 import E4M3, Fp8
from twellc.plugins.ops import run_block

_SCALE = "weight_scale"


def find(model: nn.Module) -> Iterator[FoundBlock]:
    """Yield the blocks of a model with torch's own linear layers, with a reason for each that stays as it is."""
    for each in find_blocks(model, ranks=(3,)):
        reason = ""
        if each.block.thresholds is not None:
            reason = "its threshold for each neuron is in none of vLLM's layers"
        elif each.is_written_out and not activation_of(each):
            reason = "it is written out in a larger module, without a module for its activation"
        elif not each.is_written_out:
            reason = _foreign(each) if each.weights else "it computes its weights"
        yield each.refused(each.block.refusal or reason)


def _foreign(found: FoundBlock) -> str:
    """Return which projection is not a `torch.nn.Linear`; an empty text where all are."""
    for operand in found.weights.named().values() if found.weights else ():
        linear = found.module.get_submodule(operand.layer)
        if type(linear) is not nn.Linear:
            return f"{operand.layer} is a {type(linear).__name__}, not a torch.nn.Linear"
    return ""


def activation_of(found: FoundBlock) -> str:
    """Return the child that computes all between the projections of a block that is written out; or an empty text."""
    block, up = found.block, found.block.up
    if not found.is_written_out or found.weights is None or block.gate is not None or up is None:
        return ""
    result = strip(block.down.x)
    child = _child_of(result)
    if child not in functions_of(found.module) or any(len(part.weight.node.users) > 1 for part in (up, block.down)):
        return ""
    if any(_child_of(node) != child and step(node) is None for node in between(block)):
        return ""  # other code runs there, such as a change of x in place
    nodes = [node for node in result.graph.nodes if _child_of(node) == child]
    outer = {strip(each) for node in nodes for each in node.all_input_nodes if _child_of(each) != child}
    return child if outer == {strip(up.node)} and _readers(up.node) == {child} else ""


def _readers(node: Node) -> set[str]:
    """Return the children of the traced module that read a value, or a view of it."""
    readers: set[str] = set()
    for user in node.users:
        readers |= _readers(user) if strip(user) is strip(node) else {_child_of(user)}
    return readers


def _child_of(node: Node) -> str:
    """Return the submodule of the traced module that a node belongs to; empty for the module's own code."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return str(stack[1][0]).partition(".")[0] if len(stack) > 1 else ""


class _OfBlock(UnquantizedLinearMethod):
    """The method of a projection in a block that the op computes.

    Args:
        quantised: Whether to quantise the weight once it is loaded.
    """

    def __init__(self, quantised: bool) -> None:
        super().__init__()
        self._quantised = quantised
        self.supports_pre_processed_weights = not quantised  # those of another process, from vLLM's cache of weights


class _PassInput(_OfBlock):
    """The method of a projection whose weight the op reads: it returns x."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Leave the weight [d_ff, d_model] where it is; on a CPU vLLM would pack it and drop it."""
        if self._quantised:
            _quantize(layer, "row")

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x [..., d_model]."""
        return x


class CallsOp(_OfBlock):
    """The method of a down projection: it computes the block.

    Args:
        weights: The layer of each weight, bias and scale, and the view of it that the op reads.
        options: The options of the op.
        quantised: See `_OfBlock`.
    """

    def __init__(self, weights: WeightOperands[tuple[Any, Operand]], options: BlockOptions, quantised: bool) -> None:
        super().__init__(quantised)
        self._weights, self._options = weights, options

    def process_weights_after_loading(self, layer: Any) -> None:
        """Give the weight [d_out, d_ff] other strides: its transpose, which the op reads, becomes contiguous."""
        if self._quantised:
            _quantize(layer, "column")
        if not layer.weight.t().is_contiguous():
            layer.weight.data = layer.weight.data.t().contiguous().t()

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return y [..., d_out] of the block for x [..., d_model]; vLLM says in `bias` whether this rank adds that."""
        read = self._weights.map(lambda each: _read(*each))
        return run_block(replace(read, b_down=bias).of(x), self._options)


def _quantize(layer: Any, form: str) -> None:
    """Quantise a layer's weight of 16 bits to FP8, also when it is loaded again; `form` says what a neuron is in it."""

    def quantized() -> Fp8:
        found = Fp8.quantize(wide.data, form, f"layer {layer.prefix}")
        wide.data = wide.data.new_empty(0)
        return found

    def load(parameter: nn.Parameter, *given: Any, **named: Any) -> None:
        """Load other weights of 16 bits, or a part, as trainers send them; the layer's own loader finds its share."""
        scale = getattr(layer, _SCALE)
        wide.data = Fp8(parameter.data, scale.data).dequantize(torch.float32)
        wide.weight_loader(wide, *given, **named)
        matrix = quantized()
        parameter.data.copy_(matrix.values)
        scale.data.copy_(matrix.scale)

    wide = layer.weight
    matrix = quantized()
    layer.weight = nn.Parameter(matrix.values, requires_grad=False)
    layer.weight.weight_loader = load
    layer.register_parameter(_SCALE, nn.Parameter(matrix.scale, requires_grad=False))


def _read(layer: Any, operand: Operand) -> Tensor:
    held: Tensor = getattr(layer, operand.path[-1])
    if operand.path[-1] == _SCALE and held.dim() == 1:
        # A vector holds one scale for the tensor, or with ModelOpt one for each output.
        return held.reshape(()) if len(held) == 1 else operand.view(held[:, None])
    return operand.view(held)


class TwellBlock(nn.Module):
    """Replaces a module that is one block, and keeps its submodules under their names."""

    down: Any

    def __init__(self, module: nn.Module, down: Any) -> None:
        super().__init__()
        self._modules.update(module._modules)
        vars(self)["down"] = down  # not as a submodule, which would give its parameters a second name

    def forward(self, x: Tensor) -> Tensor:
        """Compute y [..., d_out] of x [..., d_model]."""
        y: Tensor = self.down(x)
        return y


def parallel(found: FoundBlock, prefix: str, quant_config: Any) -> dict[str, LinearBase]:
    """Make the linear layers of vLLM for a block's projections, by their paths in the module.

    Args:
        found: The block.
        prefix: The path of the module in vLLM's model.
        quant_config: vLLM's configuration of quantisation, or None.
    """
    assert found.weights is not None
    down = found.weights.w_down.layer
    made: dict[str, LinearBase] = {}
    for path in dict.fromkeys(operand.layer for operand in found.weights.named().values()):
        linear: Any = found.module.get_submodule(path)
        kind = RowParallelLinear if path == down else ColumnParallelLinear
        options = {"bias": linear.bias is not None, "quant_config": quant_config, "prefix": f"{prefix}.{path}"}
        made[path] = kind(linear.in_features, linear.out_features, return_bias=False, **options)
    return made


def in_fp8(layer: Any) -> bool:
    """Whether a layer, before loading, is in E4M3 with a scale for the tensor, or for each output."""
    weight, scale = getattr(layer, "weight", None), getattr(layer, _SCALE, None)
    if weight is None or scale is None or (weight.dtype, scale.dtype) != (E4M3, torch.float32):
        return False
    return tuple(scale.shape) in ((1,), (len(weight),), (len(weight), 1))


def compute_by_op(found: FoundBlock, layers: dict[str, LinearBase], options: BlockOptions, quantised: bool) -> None:
    """Let the layers of a block's projections call the op.

    Args:
        found: The block.
        layers: The layers, by their paths.
        options: The options of the op.
        quantised: Whether to quantise the weights of 16 bits once they are loaded, with a scale for each neuron.
    """
    assert found.weights is not None
    for layer in layers.values():
        layer.quant_method = _PassInput(quantised)
    scales = {
        f"{name}_scale": replace(operand, path=(*operand.path[:-1], _SCALE))
        for name, operand in matrices_of(found.weights).items()
        if quantised or in_fp8(layers[operand.layer])
    }
    read = replace(found.weights, **scales).map(lambda each: (layers[each.layer], each))
    layers[found.weights.w_down.layer].quant_method = CallsOp(read, options, quantised)


def put(model: nn.Module, found: FoundBlock, layers: dict[str, LinearBase]) -> None:
    """Replace a block's projections by layers.

    Args:
        model: The model with the block.
        found: The block.
        layers: See `parallel`.
    """
    assert found.weights is not None
    module, activation = found.module, activation_of(found)
    for path, layer in layers.items():
        module.set_submodule(path, layer)
    if activation:
        module.set_submodule(activation, nn.Identity())
        return
    block = TwellBlock(module, layers[found.weights.w_down.layer])
    for parent in list(model.modules()):  # a module may be in several places
        for name, child in list(parent._modules.items()):
            if child is module:
                setattr(parent, name, block)
