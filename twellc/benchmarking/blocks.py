"""The feed-forward blocks of a rewritten program: their inputs, and other forms in their place."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.export import ExportedProgram

from twellc.base.torch_private import schema_of
from twellc.benchmarking.forms import COMPILED, FP8, INT4, PACKED, Block, dense_forms
from twellc.benchmarking.timing import sets_in_rotation
from twellc.passes.decide import options_of
from twellc.passes.match.find_ffn import find_ffn_blocks
from twellc.passes.pipeline import Rewritten
from twellc.passes.rewrite_ffn import rewrite_ffn
from twellc.plugins.block import BlockOptions, Operands, call_of
from twellc.plugins.meaning import without_norm
from twellc.plugins.ops import VARIANT_OF, run_block

Form = Callable[[Tensor], Tensor]

TWELL = "twell"


@dataclasses.dataclass(frozen=True)
class Seen:
    """A call of a `twell` op while a program ran, without its residual.

    Attributes:
        operands: Its tensors. Of a block with a norm, x is the result of the norm, and the norm is left out.
        options: Its options.
        block: The same block for torch.
    """

    operands: Operands[Tensor]
    options: BlockOptions
    block: Block

    @property
    def x(self) -> Tensor:
        """The input of the block, [..., d_model]."""
        return self.operands.x

    def run(self) -> Tensor:
        """Compute y [..., d_out] again, by the op."""
        return run_block(self.operands, self.options)

    def copy(self) -> Seen:
        """Return the call with copies of the weights; `block` keeps its own."""
        copied = dataclasses.replace(self.operands.map(Tensor.clone), x=self.x)
        return dataclasses.replace(self, operands=copied)


def with_all_neurons(rewritten: Rewritten, compression: int | None) -> ExportedProgram:
    """Return a program whose rewritten blocks have all neurons in the order of the model, for dense forms of them."""
    blocks = [block for block in find_ffn_blocks(rewritten.dense) if block.routing is None]
    rewrites = [
        (block, options_of(block, dataclasses.replace(layer, hot=0, compression=None), compression))
        for block, layer in zip(blocks, rewritten.layers, strict=True)
        if layer.decision == "twell"
    ]
    return rewrite_ffn(rewritten.dense, rewrites)


def see_blocks(program: ExportedProgram, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Seen]:
    """Run a rewritten program; return the calls of its `twell` ops, in the order of the graph."""
    taps = [_Tap(node.target) for node in _nodes(program)]
    substitute(program, taps)(*args, **kwargs)
    calls = [without_norm(*call_of(VARIANT_OF[tap.op], (), {**tap.seen, "residual": None})) for tap in taps]
    return [Seen(operands, options, _block(operands, options)) for operands, options in calls]


def dense_models(program: ExportedProgram, forms: list[dict[str, Form]]) -> dict[str, nn.Module]:
    """Return a rewritten program as modules that compute its blocks packed, in FP8 and in INT4, by these names.

    Args:
        program: The program.
        forms: The forms of each block by name; forms that some block lacks are left out.
    """
    chosen = [name for name in (PACKED, FP8, INT4) if all(name in own for own in forms)]
    return {name: with_forms(program, [own[name] for own in forms]) for name in chosen}


def block_calls(ours: list[Seen], forms: list[dict[str, Form]]) -> dict[str, Callable[[], list[Tensor]]]:
    """Return calls that compute all blocks, one after the other, on their recorded inputs, by their forms and by twell.

    Args:
        ours: The blocks as twell computes them.
        forms: The forms of each block by name; forms that some block lacks are left out.
    """

    def run(name: str) -> list[Tensor]:
        return [own[name](each.x) for each, own in zip(ours, forms, strict=True)]

    names = [name for name in forms[0] if all(name in own for own in forms)]
    calls: dict[str, Callable[[], list[Tensor]]] = {name: functools.partial(run, name) for name in names}
    return {**calls, TWELL: lambda: [each.run() for each in ours]}


def rotated_calls(whole: Seen, own: Seen, names: list[str]) -> dict[str, list[Callable[[], Tensor]]]:
    """Return calls that compute one block on its recorded input, for several copies of the weights.

    Args:
        whole: The block with all neurons.
        own: The block as twell computes it.
        names: The dense forms to compute it by, besides twell; none of `LOSSY`.
    """
    weights = [each for each in vars(whole.block).values() if isinstance(each, Tensor)]
    more = sets_in_rotation(sum(each.numel() * each.element_size() for each in weights)) - 1
    blocks = [whole.block, *(whole.block.copy() for _ in range(more))]
    forms = [dense_forms(block, own.x, COMPILED in names, with_lossy=False) for block in blocks]
    calls: dict[str, list[Callable[[], Tensor]]] = {
        name: [functools.partial(form[name], own.x) for form in forms] for name in names
    }
    return {**calls, TWELL: [own.run, *(own.copy().run for _ in range(more))]}


def with_forms(program: ExportedProgram, forms: list[Form]) -> nn.Module:
    """Return a rewritten program as a module that computes its blocks by dense forms."""
    names = [_names(node.target) for node in _nodes(program)]
    return substitute(program, [_InPlace(form, own) for form, own in zip(forms, names, strict=True)])


def substitute(program: ExportedProgram, modules: list[Any]) -> nn.Module:
    """Return a program as a module that calls other modules, with the same arguments, in place of the `twell` ops."""
    module: Any = program.module(check_guards=False)
    nodes = [node for node in module.graph.nodes if node.target in VARIANT_OF]
    for index, (node, own) in enumerate(zip(nodes, modules, strict=True)):
        name = f"substitute_{index}"
        module.add_submodule(name, own)
        with module.graph.inserting_before(node):
            call = module.graph.call_module(name, node.args, node.kwargs)
        node.replace_all_uses_with(call)
        module.graph.erase_node(node)
    module.recompile()
    result: nn.Module = module
    return result


def _nodes(program: ExportedProgram) -> list[Any]:
    return [node for node in program.graph.nodes if node.target in VARIANT_OF]


def _names(op: Any) -> list[str]:
    return [argument.name for argument in schema_of(op).arguments]


class _Tap(nn.Module):
    """Calls an op and keeps its arguments."""

    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op, self.seen = op, dict[str, Any]()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.seen = dict(zip(_names(self.op), args, strict=False)) | kwargs
        y: Tensor = self.op(*args, **kwargs)
        return y


class _InPlace(nn.Module):
    """Calls a dense form, which holds the weights, with the arguments of an op."""

    def __init__(self, form: Form, names: list[str]) -> None:
        super().__init__()
        self._form, self._residual = form, names.index("residual")

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        y, residual = self._form(args[0]), args[self._residual]
        return y if residual is None else residual + y


def _block(operands: Operands[Tensor], options: BlockOptions) -> Block:
    (gate, gate_bias), gated = operands.first, operands.w_gate is not None
    return Block(
        gate=gate,
        up=operands.w_up if gated else None,
        down=operands.w_down.t().contiguous(),
        gate_bias=gate_bias,
        up_bias=operands.b_up if gated else None,
        down_bias=operands.b_down,
        activation=options.activation,
        threshold=options.threshold if operands.thresholds is None else operands.thresholds,
    )
