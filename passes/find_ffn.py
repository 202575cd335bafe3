"""Find feed-forward blocks that TwELL can run, anchored at their down projection.

    gated    x ─┬─ linear(Wg, bg) ─ act ─┬─ mul ─ linear(Wd, bd) ─ y        x [..., d_model], y [..., d_out]
                └─ linear(Wu, bu) ───────┘                                 hidden [..., d_ff]
    plain    x ─── linear(Wu, bu) ─ act ───────── linear(Wd, bd) ─ y

`linear` stands for aten.linear, or for mm, matmul and addmm with a constant weight; a bias may be a separate add. The
order of mul's operands is free. Between the nodes there may be operations that change no value and keep rows apart:
clone, contiguous, alias, dropout in eval, views of the leading dimensions.

A block is *refused*, with a reason, when it has this shape but cannot be rewritten exactly: its activation is not of
the ReLU family, its hidden tensor has another reader, gate and up read different tensors, the up projection's weight is
not a constant, a projection is broadcast, or the hidden tensor is cast on its way. What does not have this shape is no
block at all and is not reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from twellc.passes.activations import Activation, arguments, packet, parse_activation
from twellc.passes.program import constants_of

aten = torch.ops.aten

_VALUE_PRESERVING = frozenset(
    (aten.clone, aten.contiguous, aten.alias, aten.detach, aten.lift_fresh_copy, aten.view, aten.reshape,
     aten._unsafe_view, aten.flatten, aten.unflatten, aten.squeeze, aten.unsqueeze)
)  # fmt: skip
_CASTS = frozenset((aten._to_copy, aten.to))


@dataclass(frozen=True)
class Weight:
    """A constant that the graph reads: its placeholder, its name, and whether it is stored [in, out]."""

    node: Node
    name: str
    in_out: bool = False


@dataclass(frozen=True)
class Linear:
    """x W^T + b, and the nodes that compute it."""

    node: Node
    x: Node
    weight: Weight
    bias: Weight | None
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class FfnBlock:
    """A feed-forward block in the graph.

    Attributes:
        module: Path of the module that holds its weights, made unique within the program.
        variant: `gated` or `plain`.
        activation: relu, relu2, fatrelu or drelu; of a refused block also any other activation's name.
        threshold: The threshold of fatrelu, else 0.
        d_model, d_ff, d_out: Widths of x, of the hidden tensor and of y.
        dtype: Element type of the down projection's input.
        refusal: Why it cannot be rewritten; empty when it can.
        gate, up, down: Its projections; a plain block has no gate, and a refused one may lack up.
        x: The node to read x from, with the same leading dimensions as y.
    """

    module: str
    variant: str
    activation: str
    threshold: float
    d_model: int
    d_ff: int
    d_out: int
    dtype: torch.dtype
    refusal: str
    gate: Linear | None
    up: Linear | None
    down: Linear
    x: Node


class _RefusedError(Exception):
    """The reason why a block that has the shape of one cannot be rewritten."""


def find_ffn_blocks(program: ExportedProgram) -> list[FfnBlock]:
    """Return the feed-forward blocks of a canonical program in graph order, refused ones included."""
    finder = _Finder(constants_of(program))
    blocks: list[FfnBlock] = []
    seen: dict[str, int] = {}
    taken: dict[Node, str] = {}
    for node in program.graph.nodes:
        block = finder.match(node)
        if block is None:
            continue
        count = seen[block.module] = seen.get(block.module, 0) + 1
        if count > 1:
            block = replace(block, module=f"{block.module}#{count}")
        if not block.refusal:
            # In a stack of linears and ReLUs every inner projection is the down of one block and the up of the next.
            owner = next((taken[part.node] for part in (block.gate, block.up) if part and part.node in taken), None)
            if owner is None:
                taken[block.down.node] = block.module
            else:
                block = replace(block, refusal=f"it shares a projection with the block {owner}")
        blocks.append(block)
    return blocks


class _Finder:
    def __init__(self, constants: dict[Node, str]) -> None:
        self._constants = constants

    def match(self, node: Node) -> FfnBlock | None:
        """Read `node` as the down projection of a block."""
        down = self._linear(node)
        if down is None or _is_part_of_larger_linear(node, self):
            return None
        hidden = _strip(down.x)
        was_cast = packet(hidden) in _CASTS
        while packet(hidden) in _CASTS:
            hidden = _strip(_operand(hidden))
        parts = self._gated(hidden) or self._plain(hidden)
        if parts is None:
            return None
        activation, gate, up, others = parts
        refusal = ""
        x = up.x if up is not None else gate.x
        try:
            if not activation.sparse and activation.name != "drelu":
                kind = "gate activation" if gate is not None and gate is not up else "activation"
                raise _RefusedError(f"{kind} is {activation.name}; TwELL needs a ReLU family")
            if up is None:
                raise _RefusedError("the other factor of the gate is not a linear projection with constant weights")
            if was_cast:
                raise _RefusedError("the hidden tensor is cast before the down projection")
            self._check_types(gate, up, down)
            self._check_widths(gate, up, down)
            inside = {*activation.nodes, *others, *up.nodes, *(gate.nodes if gate is not up else ()), *down.nodes}
            x = self._common_input(gate, up, down)
            _check_readers(inside, down, x)
        except _RefusedError as reason:
            refusal = str(reason)
        plain = gate is up
        some = gate if up is None else up
        return FfnBlock(
            module=self._module(node, [part for part in (gate, up, down) if part is not None]),
            variant="plain" if plain else "gated",
            activation=activation.name,
            threshold=activation.threshold,
            d_model=_width(some.x),
            d_ff=_width(down.x),
            d_out=_width(down.node),
            dtype=down.x.meta["val"].dtype,
            refusal=refusal,
            gate=None if plain else gate,
            up=up,
            down=down,
            x=x,
        )

    def _plain(self, hidden: Node) -> tuple[Activation, Linear, Linear | None, tuple[Node, ...]] | None:
        activation = parse_activation(hidden, _strip)
        if activation is None or activation.name == "sigmoid":
            return None
        up = self._linear(_strip(activation.pre))
        return None if up is None else (activation, up, up, ())

    def _gated(self, hidden: Node) -> tuple[Activation, Linear, Linear | None, tuple[Node, ...]] | None:
        if packet(hidden) is not aten.mul or not all(isinstance(arg, Node) for arg in arguments(hidden)):
            return None
        left, right = (_strip(_operand(hidden, i)) for i in (0, 1))
        if left is right:
            return None
        for gate_side, up_side in ((left, right), (right, left)):
            activation = parse_activation(gate_side, _strip)
            gate = None if activation is None else self._linear(_strip(activation.pre))
            if activation is None or gate is None:
                continue
            other = parse_activation(up_side, _strip)
            if other is None:
                up = self._linear(up_side)
                return (activation, gate, up, (hidden,)) if up is not None or activation.sparse else None
            up = self._linear(_strip(other.pre))
            if activation.name == other.name == "relu":
                both = Activation("drelu", 0.0, activation.pre, activation.nodes + other.nodes)
                return both, gate, up, (hidden,)
            if up is not None:
                name = f"{activation.name} times {other.name}"
                return Activation(name, 0.0, activation.pre, activation.nodes), gate, up, (hidden,)
        return None

    def _linear(self, node: Node) -> Linear | None:
        """Read `node` as a product with a constant weight, with or without a bias."""
        op = packet(node)
        if op is aten.linear:
            weight = self._weight(arguments(node)[1])
            bias = (
                self._vector(arguments(node)[2])
                if len(arguments(node)) > 2 and arguments(node)[2] is not None
                else None
            )
            if weight is None or (bias is None and len(arguments(node)) > 2 and arguments(node)[2] is not None):
                return None
            return Linear(node, _operand(node), weight, bias, (node,))
        if op in (aten.mm, aten.matmul):
            weight = self._weight(arguments(node)[1])
            if weight is None:
                return None
            return Linear(node, _operand(node), _flip(weight), None, (node,))
        if op is aten.addmm and not node.kwargs:
            bias, weight = self._vector(arguments(node)[0]), self._weight(arguments(node)[2])
            if bias is None or weight is None:
                return None
            return Linear(node, _operand(node, 1), _flip(weight), bias, (node,))
        if op is aten.add and len(arguments(node)) == 2 and not node.kwargs:
            return self._linear_plus_bias(node)
        return None

    def _linear_plus_bias(self, node: Node) -> Linear | None:
        for product, constant in (arguments(node), reversed(arguments(node))):
            bias = self._vector(constant)
            if bias is None or not isinstance(product, Node):
                continue
            inner_node = _strip(product)
            inner = None if packet(inner_node) is aten.add else self._linear(inner_node)
            if inner is not None and inner.bias is None and _width(inner.node) == bias.node.meta["val"].shape[0]:
                return Linear(node, inner.x, inner.weight, bias, (node, *inner.nodes))
        return None

    def _weight(self, argument: object) -> Weight | None:
        """Resolve a two-dimensional constant, through a transposition; `in_out` tells how it is stored."""
        if not isinstance(argument, Node):
            return None
        node, transposed = _strip(argument), False
        while (packet(node) in (aten.t, aten.numpy_T)) or _swaps_two_dims(node):
            node, transposed = _strip(_operand(node)), not transposed
        if node not in self._constants or node.meta["val"].dim() != 2:
            return None
        return Weight(node, self._constants[node], in_out=transposed)

    def _vector(self, argument: object) -> Weight | None:
        if not isinstance(argument, Node):
            return None
        node = _strip(argument)
        if node not in self._constants or node.meta["val"].dim() != 1:
            return None
        return Weight(node, self._constants[node])

    def _check_types(self, *parts: Linear) -> None:
        dtypes = {
            tensor.meta["val"].dtype
            for part in parts
            for tensor in (part.x, part.weight.node, *([part.bias.node] if part.bias else ()))
        }
        if len(dtypes) > 1:
            names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            raise _RefusedError(f"its tensors have several dtypes ({names})")

    def _check_widths(self, gate: Linear, up: Linear, down: Linear) -> None:
        """Refuse where broadcasting stretches a projection or a bias, such as one gate value for all neurons."""
        widths = {_width(gate.node), _width(up.node), _width(down.x)}
        if len(widths) > 1:
            raise _RefusedError(f"its hidden tensors have several widths ({', '.join(map(str, sorted(widths)))})")
        for part in (gate, up, down):
            if part.bias is not None and _width(part.bias.node) != _width(part.node):
                raise _RefusedError(f"the bias {part.bias.name} is broadcast")

    def _common_input(self, gate: Linear, up: Linear, down: Linear) -> Node:
        """Return the node to read x from: the same values for gate and up, and the leading dimensions of y."""
        if _root(gate.x) is not _root(up.x):
            raise _RefusedError("gate and up projections read different tensors")
        leading = tuple(down.node.meta["val"].shape[:-1])
        node = up.x
        while True:
            if tuple(node.meta["val"].shape[:-1]) == leading:
                return node
            source = _step(node)
            if source is None:
                raise _RefusedError("the output has other leading dimensions than the input")
            node = source

    def _module(self, node: Node, parts: list[Linear]) -> str:
        paths = [part.weight.name.split(".")[:-1] for part in parts]
        common: list[str] = []
        for names in zip(*paths, strict=False):
            if len(set(names)) > 1:
                break
            common.append(names[0])
        return ".".join(common or paths[-1]) or node.name


def _operand(node: Node, index: int = 0) -> Node:
    operand = arguments(node)[index]
    assert isinstance(operand, Node)
    return operand


def _step(node: Node) -> Node | None:
    """Return the node that `node` takes its values from unchanged, row by row; None if it computes something."""
    op = packet(node)
    if op is aten.dropout and (arguments(node)[1] == 0 or arguments(node)[2] is False):
        return _operand(node)
    if op not in _VALUE_PRESERVING and op not in _CASTS:
        return None
    source = _operand(node)
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor) or before.dtype != after.dtype:
        return None
    if not before.shape or not after.shape:
        return None
    return source if before.shape[-1] == after.shape[-1] else None


def _strip(node: Node) -> Node:
    """Look through value-preserving operations, as far as a constant or a computation."""
    while (source := _step(node)) is not None:
        node = source
    return node


_root = _strip


def _swaps_two_dims(node: Node) -> bool:
    if packet(node) is aten.permute:
        return [dim % 2 for dim in arguments(node)[1]] == [1, 0] and len(arguments(node)[1]) == 2
    if packet(node) is aten.transpose:
        return node.meta["val"].dim() == 2 and sorted(dim % 2 for dim in arguments(node)[1:3]) == [0, 1]
    return False


def _flip(weight: Weight) -> Weight:
    """Mm reads its weight as [in, out], linear as [out, in]."""
    return Weight(weight.node, weight.name, not weight.in_out)


def _width(node: Node) -> int:
    return int(node.meta["val"].shape[-1])


def _is_part_of_larger_linear(node: Node, finder: _Finder) -> bool:
    """Whether the only reader of this product adds a bias to it, so that the add is the anchor."""
    readers = list(node.users)
    while len(readers) == 1 and _step(readers[0]) is not None:
        readers = list(readers[0].users)
    if len(readers) != 1 or packet(readers[0]) is not aten.add:
        return False
    larger = finder._linear(readers[0])
    return larger is not None and node in larger.nodes


def _interior(inside: set[Node], down: Linear, x: Node) -> Iterator[Node]:
    """Yield the nodes of a block between x and y, the value-preserving ones included; not y itself."""
    pending, visited = [down.node], set()
    roots = {x, _root(x)}
    while pending:
        node = pending.pop()
        if node in visited or node.op == "placeholder" or node in roots:
            continue
        if node not in inside and _step(node) is None:
            continue
        visited.add(node)
        if node is not down.node:
            yield node
        pending.extend(node.all_input_nodes)


def _check_readers(inside: set[Node], down: Linear, x: Node) -> None:
    """Refuse when something outside of the block reads one of its intermediate tensors."""
    interior = set(_interior(inside, down, x))
    root = _root(x)
    for node in interior:
        if _root(node) is root:
            continue
        for user in node.users:
            if user not in interior and user is not down.node:
                raise _RefusedError(f"its intermediate tensor {node.name} is also read by {user.name}")
