"""Find the feed-forward blocks of an eager module, by tracing its parts alone.

A block is a whole submodule, or it is *written out* in a larger one: a module that holds the linear layers of a plain
block as its children, and calls them in its forward besides attention and norms, as in OPT and BART.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Node

from twellc.base.torch_private import has_any_global_hook
from twellc.eager.fp8_linear import Fp8Linear, traceable_twin
from twellc.eager.hidden import STEPS
from twellc.eager.sharded import local_twin
from twellc.eager.tracing import trace_alone
from twellc.eager.training_block import BlendedActivation
from twellc.passes.graph.program import user_inputs, written_tensors
from twellc.passes.match.activations import packet
from twellc.passes.match.find_ffn import FfnBlock
from twellc.passes.match.linear import Weight, strip
from twellc.passes.rewrite_ffn import weights_of
from twellc.plugins.block import SCALES, TensorField, WeightOperands
from twellc.plugins.fp8 import BLOCK, rows_of_blocks

aten = torch.ops.aten
T = TypeVar("T")
_MIXED = "some of its weights are in FP8, and others not"
_TRAINED = "its weights are in FP8, which are not trained"


@dataclass(frozen=True)
class Operand:
    """A weight, bias or scale: the path of its parameter, and the view that the op reads."""

    path: tuple[str, ...]
    transposed: bool = False
    rows: tuple[int, int, int] | None = None

    def parameter(self, module: nn.Module) -> nn.Parameter | None:
        """Return the parameter if `module` holds it itself, not through a replaced submodule."""
        for name in self.path[:-1]:
            inner = module._modules.get(name)
            if inner is None:
                return None
            module = inner
        return module._parameters.get(self.path[-1])

    def tensor(self, module: nn.Module) -> Tensor | None:
        """Return the parameter, or the plain tensor that FSDP puts in its place for a forward; None for other kinds."""
        held = getattr(module.get_submodule(self.layer), self.path[-1], None)
        return held if type(held) in (Tensor, nn.Parameter) else None

    def view(self, parameter: Tensor) -> Tensor:
        """Return the matrix that the op reads: [d_ff, d_model], or w_down [d_ff, d_out]; for a bias the vector."""
        matrix = parameter.t() if self.transposed else parameter
        return matrix if self.rows is None else matrix[slice(*self.rows)]

    @property
    def layer(self) -> str:
        """The path of the layer that holds the parameter."""
        return ".".join(self.path[:-1])


class Optimized(nn.Module):
    """Mixed into the classes of modules that `twellc.optimize` has changed."""


@dataclass(frozen=True)
class FoundBlock:
    """A block of a module, as it was found.

    Attributes:
        path: The path of the submodule that the block is, or is written out in.
        module: This submodule.
        block: The match. Its `module` is the block's path: that of the submodule, or that of the first layer for a
            second block in one submodule.
        weights: The places of the weights in the submodule, for a block that is written out in linear layers among its
            children; None where the block is refused, or computes its weights.
        ranks: Numbers of dimensions of x for which the trace of the submodule was this block.
        inputs: The inputs of the trace: x, and other arguments by name.
        is_written_out: Whether the submodule computes other things, too.
    """

    path: str
    module: nn.Module
    block: FfnBlock
    weights: WeightOperands[Operand] | None
    ranks: tuple[int, ...]
    inputs: tuple[Tensor, dict[str, Any]]
    is_written_out: bool

    def refused(self, reason: str) -> FoundBlock:
        """Return the same block with the reason why it stays as it is; an empty reason lets the op run it."""
        return replace(self, block=replace(self.block, refusal=reason))


def find_blocks(module: nn.Module, ranks: tuple[int, ...] = (3, 2), *, training: bool = False) -> Iterator[FoundBlock]:
    """Yield the blocks of a module, refused ones too: the largest submodules that are a block, then those written out.

    Args:
        module: The module to search.
        ranks: Numbers of dimensions of x to try for whole submodules.
        training: Whether to trace in training mode.
    """
    known: list[str] = []
    for path, submodule in module.named_modules():
        if _is_inside(path, known):
            continue
        if isinstance(submodule, Optimized):
            known.append(path)
            continue
        own = traceable_twin(submodule if training else local_twin(submodule) or submodule)
        found = _whole(path, own, ranks, training)
        if found is not None:
            known.append(path)
            weights = operands_of(submodule, found.block)
            whole = replace(found, module=submodule, weights=weights, block=replace(found.block, module=path))
            yield whole.refused(whole.block.refusal or _of_float32(whole, training))
    for path, submodule in module.named_modules():
        if not _is_inside(path, known):
            for each in _written_out_in(path, submodule, training):
                yield each.refused(each.block.refusal or _of_float32(each, training))


def blocks_at(path: str, module: nn.Module) -> list[FfnBlock]:
    """Return the blocks of a module that the ops compute, in eval mode: itself as one, or those written out in it."""
    whole = _whole(path, module, (3, 2), training=False)
    if whole is not None and operands_of(module, whole.block) is not None:
        return [whole.block]
    found = _written_out_in(path, module, training=False)
    return [each.block for each in found if not refusal_of(each) and each.weights is not None]


def _of_float32(found: FoundBlock, training: bool) -> str:
    """Return why the ops do not take a block's scales or thresholds; an empty text where they do, and without any."""
    if found.block.thresholds is not None and training:
        return "a threshold for each neuron has no gradients"
    if found.block.thresholds is not None and not found.block.rectifies:
        return "a threshold may come to be below 0: write relu(x) * (x > threshold)"
    scales = {} if found.weights is None else found.weights.scales()
    if found.weights is None or not scales:
        return ""
    if len(scales) < len(matrices_of(found.weights)):
        return _MIXED
    forms = {}
    for name, operand in scales.items():
        layer: Any = found.module.get_submodule(operand.layer)
        forms[name] = layer.matrix.form
        if name != "w_down_scale" and forms[name] == "column":
            return f"{operand.layer} has a scale for each input"
        weight = found.weights.named()[name.removesuffix("_scale")]
        if forms[name] == "block" and weight.rows is not None and operand.rows is None:
            return f"a part of {operand.layer} does not begin with a block of {BLOCK} that has a scale"
    if {"row", "block"} <= {form for name, form in forms.items() if name != "w_down_scale"}:
        return "gate and up have scales of different forms"
    return _TRAINED if training else ""


def _is_inside(path: str, outer: list[str]) -> bool:
    return any(each in ("", path) or path.startswith(f"{each}.") for each in outer)


# ---- blocks that are submodules ----


def _whole(path: str, module: nn.Module, ranks: tuple[int, ...], training: bool) -> FoundBlock | None:
    """Return the block that a module is, without the weights; None where the module is not a block."""
    if not _may_be_block(module):
        return None
    tried = {rank: _block_of(path, module, rank, training) for rank in ranks}
    found = {rank: each for rank, each in tried.items() if each is not None}
    if not found:
        return None
    first = next(iter(found.values()))
    same = tuple(rank for rank, each in found.items() if _meaning(each.block) == _meaning(first.block))
    return replace(first, ranks=same)


def _block_of(path: str, module: nn.Module, rank: int, training: bool) -> FoundBlock | None:
    """Return the block that a module is, with x of `rank` dimensions."""
    for found in trace_alone(path, module, rank, training=training):
        program, blocks = found.program, found.blocks
        outputs = program.graph.output_node().args[0]
        inputs = list(user_inputs(program))
        if len(inputs) == len(outputs) == len(blocks) == 1 and not written_tensors(program):
            if not _is_all(blocks[0], inputs[0], outputs[0]):
                return None
            (x,), others = program.example_inputs
            return FoundBlock(path, module, blocks[0], None, (rank,), (x, others), is_written_out=False)
    return None


def _is_all(block: FfnBlock, x: Node, y: object) -> bool:
    """Whether a block reads the program's one input and gives its one output, both of the same leading dimensions."""
    if not isinstance(y, Node) or strip(y) is not block.down.node or strip(block.x) is not x:
        return False
    shapes = [list(map(str, node.meta["val"].shape[:-1])) for node in (x, y)]
    return shapes[0] == shapes[1]


def _meaning(block: FfnBlock) -> tuple[object, ...]:
    parts = [
        (weight.name, weight.in_out, weight.rows)
        for linear in (block.gate, block.up, block.down)
        if linear is not None
        for weight in (linear.weight, linear.bias)
        if weight is not None
    ]
    thresholds = None if block.thresholds is None else block.thresholds.name
    return block.variant, block.activation, block.threshold, thresholds, block.refusal, *parts


def _may_be_block(module: nn.Module) -> bool:
    """Whether a module has two or three matrices and otherwise only vectors, and no hooks."""
    parameters = list(module.parameters())
    matrices = [parameter for parameter in parameters if parameter.dim() == 2]
    return (
        len(matrices) in (2, 3)
        and len(parameters) <= 6
        and all(type(parameter) is nn.Parameter and parameter.dim() in (1, 2) for parameter in parameters)
        and all(parameter.is_floating_point() for parameter in parameters)
        and len({matrix.dtype for matrix in matrices}) == len({parameter.device for parameter in parameters}) == 1
        and _has_its_forward(module)
        and not any(map(has_hooks, module.modules()))
    )


# ---- blocks that are written out ----


def _written_out_in(path: str, module: nn.Module, training: bool) -> list[FoundBlock]:
    """Return the blocks that a module computes besides other things, by linear layers among its children."""
    linears: dict[str, Any] = {name: child for name, child in module.named_children() if _is_linear(child)}
    if not _has_its_forward(module) or not _may_hold_block(module, linears.values()):
        return []
    found: list[FoundBlock] = []
    twin = traceable_twin(module)
    traced = next(trace_alone(path, twin, 3, training=training, alone=False), None)
    for block in traced.blocks if traced else ():
        weights = operands_of(module, block)
        layers = {each.layer for each in weights.named().values()} if weights else {_layer_of(block.down.weight)}
        is_second_call = weights is not None and any(weights == each.weights for each in found)
        if traced and layers <= linears.keys() and not is_second_call:
            first = block.gate or block.up or block.down
            name = f"{path}.{_layer_of(first.weight)}".lstrip(".") if found else path
            (x,), others = traced.program.example_inputs
            block = replace(block, module=name)
            found.append(FoundBlock(path, module, block, weights, (2, 3), (x, others), is_written_out=True))
    return found


def _layer_of(weight: Weight) -> str:
    return weight.name.rpartition(".")[0]


def _is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer of torch, or ours, with its original weight and forward."""
    return (
        type(module) in (nn.Linear, Fp8Linear)
        and all(type(each) is nn.Parameter and each.is_floating_point() for each in module.parameters())
        and "weight" in module._parameters
        and "forward" not in vars(module)
    )


def _may_hold_block(module: nn.Module, linears: Collection[nn.Linear]) -> bool:
    """Whether two linear layers without hooks may follow each other, perhaps with an activation between them."""
    functions = functions_of(module).values()
    # With a gate the first layer may give both. Mamba's mixers, which take a minute to trace, have no such pair.
    pairs = [
        (up, down)
        for up in linears
        for down in linears
        if up.out_features in (down.in_features, 2 * down.in_features)
        and (down.in_features > up.in_features or down.out_features == up.in_features)
    ]
    wide = any(down.in_features > up.in_features for up, down in pairs)
    return bool(pairs) and (wide or bool(functions)) and not any(map(has_hooks, (*linears, *functions)))


def refusal_of(found: FoundBlock) -> str:
    """Return why the op cannot run a block; an empty text where it can."""
    block = found.block
    if not found.is_written_out or block.refusal or block.up is None:
        return block.refusal
    if block.gate is not None:
        return "it is written out in a larger module, with a gate"
    # Dropout in eval mode is a clone.
    names = tuple(str(packet(node)).rpartition(".")[2] for node in between(block) if packet(node) is not aten.clone)
    if names == STEPS.get(block.activation):
        return ""
    steps = ", ".join(names) or "nothing"
    return f"it is written out in a larger module, with {steps} between its projections, not relu or its square alone"


def between(block: FfnBlock) -> list[Node]:
    """Return the nodes between the first and the down projection of a block: its activation, or other things."""
    first = block.gate or block.up
    assert first is not None
    nodes = list(block.down.node.graph.nodes)
    return nodes[nodes.index(first.node) + 1 : nodes.index(block.down.node)]


def drops(block: FfnBlock) -> bool:
    """Whether a block has active dropout inside."""
    has_first = block.gate is not None or block.up is not None
    return has_first and any(packet(node) is aten.native_dropout for node in between(block))


# ---- properties of modules ----


def functions_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the children of a module that have no parameters, such as activations and dropout, by name."""
    return {
        name: child
        for name, child in module.named_children()
        if isinstance(child, BlendedActivation) or not [*child.parameters(), *child.children()]
    }


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks on its forward or backward."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def has_global_hooks() -> bool:
    """Whether there are hooks on the forward or backward of all modules."""
    return bool(has_any_global_hook())


def _has_its_forward(module: nn.Module) -> bool:
    """Whether a module's forward, copy and pickle are those of a class of Python."""
    kind = type(module)
    copies = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
    return copies and not isinstance(module, torch.jit.ScriptModule) and "forward" not in vars(module)


def operands_of(module: nn.Module, block: FfnBlock) -> WeightOperands[Operand] | None:
    """Return how to read the op's weights from a module's parameters; None where the block computes them."""
    if block.refusal or block.up is None:
        return None

    def place(weight: Weight, role: TensorField) -> Operand:
        transposed = len(role.shape) == 2 and weight.in_out != role.in_out
        return Operand(tuple(weight.name.split(".")), transposed, weight.rows)

    weights = weights_of(block, place)
    if any(operand.parameter(module) is None for operand in weights.named().values()):
        return None
    return replace(weights, **_scales_of(module, weights.named()))


def matrices_of(weights: WeightOperands[T]) -> dict[str, T]:
    """Return the matrices among a block's weights, by name."""
    return {name: each for name, each in weights.named().items() if f"{name}_scale" in SCALES}


def called_otherwise(found: FoundBlock) -> str:
    """Return which matrix of a block does not belong to a called `torch.nn.Linear`; an empty text where all do."""
    block = found.block
    for part in (block.gate, block.up, block.down):
        path, _, last = ("" if part is None else part.weight.name).rpartition(".")
        if part is None:
            continue
        stack = list(part.nodes[-1].meta.get("nn_module_stack", {}).values())
        is_called = last == "weight" and bool(stack) and stack[-1][0] == path
        if not is_called or type(found.module.get_submodule(path)) is not nn.Linear:
            return f"{part.weight.name} is not the weight of a torch.nn.Linear that is called"
        if reads_weight(found.module, path):
            return f"its forward also looks at the weight of {path}"
    return ""


def reads_weight(module: nn.Module, path: str) -> bool:
    """Whether a forward looks at the weight of a layer itself, as T5's, which casts the layer's input to its type.

    Args:
        module: The module that holds the layer.
        path: The path of the layer in it.
    """
    owner, _, name = path.rpartition(".")
    try:
        source = inspect.getsource(type(module.get_submodule(owner)).forward)
    except (OSError, TypeError):  # the class has no file
        return False
    return f".{name}.weight" in source


def _scales_of(module: nn.Module, operands: dict[str, Operand]) -> dict[str, Operand]:
    """Return how to read the scales of FP8 weights, by name."""
    scales = {}
    for name in SCALES:
        weight = operands.get(name.removesuffix("_scale"))
        layer = None if weight is None else module.get_submodule(weight.layer)
        if weight is not None and isinstance(layer, Fp8Linear):
            form, rows = layer.matrix.form, weight.rows
            if rows is not None and form != "row":
                rows = rows_of_blocks(rows) if form == "block" else None
            scales[name] = Operand((*weight.path[:-1], "scale"), weight.transposed, rows)
    return scales
