"""Find the blocks of a Hugging Face model, and put layers of vLLM in their place that call the `twell` ops.

A block's projections become parallel linear layers of vLLM, which load, keep and share out the weights as always. What
they compute changes:

    x ─ up ─ x ─ nothing ─ x ─ down ─ y          up and gate return x; down calls the op, with the weights of all three

So the bias of `down` on one rank, and the sum over ranks behind it, stay vLLM's own. A module that is one block calls
`down` alone. In a plain block that is written out in a larger module, as in OPT, the activation's module does nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.fx import Node
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    RowParallelLinear,
    UnquantizedLinearMethod,
)

from twellc.eager.module_blocks import Operand, between, find_modules, find_written_out, functions_of, operands_of
from twellc.passes.match.find_ffn import FfnBlock
from twellc.passes.match.linear import step, strip
from twellc.plugins.block import BlockOptions, WeightOperands
from twellc.plugins.ops import run_block


@dataclass(frozen=True)
class Found:
    """A block of a model.

    Attributes:
        module: Path of the module that is the block, or that it is written out in.
        block: What the matcher found.
        weights: Where its weights are in the module; None where it is refused.
        activation: Of a block that is written out, the child of the module that computes its activation.
        refusal: Why it stays as it is; empty where it need not.
    """

    module: str
    block: FfnBlock
    weights: WeightOperands[Operand] | None
    activation: str = ""
    refusal: str = ""


def find(model: nn.Module) -> Iterator[Found]:
    """Yield the blocks of a model whose linear layers are torch's own."""
    whole: list[str] = []
    for path, module, block, _ in find_modules(model, ranks=(3,)):
        whole.append(path)
        weights = operands_of(module, block)
        reason = block.refusal or ("" if weights else "it computes its weights")
        yield Found(path, block, weights, refusal=reason or _foreign(module, weights))
    for each in find_written_out(model, whole):
        activation = _activation_of(each.block, functions_of(each.module)) if each.weights else ""
        reason = "" if activation else "it is written out in a larger module, without a module for its activation"
        yield Found(each.path, each.block, each.weights, activation, each.block.refusal or reason)


def _foreign(module: nn.Module, weights: WeightOperands[Operand] | None) -> str:
    """Say which projection is no `torch.nn.Linear`; empty where all are."""
    for operand in weights.named().values() if weights else ():
        linear = module.get_submodule(".".join(operand.path[:-1]))
        if type(linear) is not nn.Linear:
            return f"{'.'.join(operand.path[:-1])} is a {type(linear).__name__}, not a torch.nn.Linear"
    return ""


def _activation_of(block: FfnBlock, functions: Collection[str]) -> str:
    """Return the one of `functions` that is all that stands between a plain block's projections; or an empty text."""
    if block.gate is not None:
        return ""
    up, result = block.up, strip(block.down.x)
    child = _child_of(result)
    if up is None or child not in functions or any(len(part.weight.node.users) > 1 for part in (up, block.down)):
        return ""
    if any(_child_of(node) != child and step(node) is None for node in between(block)):
        return ""  # what changes x in place, for example
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


class _Through(UnquantizedLinearMethod):
    """Of a projection whose weight the op reads: it returns x."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Leave the weight where it is; on a CPU vLLM would pack it and drop it."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x [..., d_model]."""
        return x


class _CallsOp(UnquantizedLinearMethod):
    """Of a down projection: it computes its block.

    Args:
        weights: The layer and the rows of each weight and bias but those of the down projection.
        options: How the block is computed.
    """

    def __init__(self, weights: dict[str, tuple[Any, Operand]], options: BlockOptions) -> None:
        super().__init__()
        self._weights, self._options = weights, options

    def process_weights_after_loading(self, layer: Any) -> None:
        """Store the weight [d_out, d_ff] with other strides: its transpose, which the op reads, is contiguous."""
        if not layer.weight.t().is_contiguous():
            layer.weight.data = layer.weight.data.t().contiguous().t()

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return y [..., d_out] of the block for x [..., d_model]."""
        read = {
            name: operand.view(getattr(owner, operand.path[-1])) for name, (owner, operand) in self._weights.items()
        }
        return run_block(WeightOperands(**read, w_down=layer.weight.t(), b_down=bias).of(x), self._options)


class TwellBlock(nn.Module):
    """Stands for a module that is one block, and keeps its submodules under their names."""

    down: Any

    def __init__(self, module: nn.Module, down: Any) -> None:
        super().__init__()
        self._modules.update(module._modules)
        vars(self)["down"] = down  # no second name of its parameters

    def forward(self, x: Tensor) -> Tensor:
        """Compute y [..., d_out] of x [..., d_model]."""
        y: Tensor = self.down(x)
        return y


def parallel(
    module: nn.Module, weights: WeightOperands[Operand], prefix: str, quant_config: Any
) -> dict[str, LinearBase]:
    """Make the linear layers of vLLM for a block's projections, by their paths in the module.

    Args:
        module: The module.
        weights: Where its weights are.
        prefix: The path of the module.
        quant_config: What vLLM quantises layers by, or None.
    """
    made: dict[str, LinearBase] = {}
    for name, operand in weights.named().items():
        path = ".".join(operand.path[:-1])
        if path not in made:
            linear: Any = module.get_submodule(path)
            kind = RowParallelLinear if name == "w_down" else ColumnParallelLinear
            made[path] = kind(
                linear.in_features, linear.out_features, bias=linear.bias is not None, quant_config=quant_config,
                prefix=f"{prefix}.{path}", return_bias=False,
            )  # fmt: skip
    return made


def put(model: nn.Module, found: Found, layers: dict[str, LinearBase], options: BlockOptions) -> None:
    """Put layers in the place of a block's projections, so that they call the op."""
    assert found.weights is not None
    module = model.get_submodule(found.module)
    owners = {name: (layers[".".join(each.path[:-1])], each) for name, each in found.weights.named().items()}
    down = owners.pop("w_down")[0]
    owners.pop("b_down", None)
    for layer in layers.values():
        layer.quant_method = _Through()
    down.quant_method = _CallsOp(owners, options)
    for path, layer in layers.items():
        module.set_submodule(path, layer)
    if found.activation:
        module.set_submodule(found.activation, nn.Identity())
        return
    block = TwellBlock(module, down)
    for parent in list(model.modules()):  # a module may be in several places
        for name, child in list(parent._modules.items()):
            if child is module:
                setattr(parent, name, block)
