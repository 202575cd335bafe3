"""Find feed-forward blocks that TwELL can run, anchored at their down projection.

    gated    x ─┬─ linear(Wg, bg) ─ act ─┬─ mul ─ linear(Wd, bd) ─ y        x [..., d_model], y [..., d_out]
                └─ linear(Wu, bu) ───────┘                                 hidden [..., d_ff]
    plain    x ─── linear(Wu, bu) ─ act ───────── linear(Wd, bd) ─ y

`linear` is any product with a constant weight (see `linear.py`), packed gate and up weights included. The order
of mul's operands is free. Between the nodes there may be operations that change no value and keep rows apart:
clone, contiguous, alias, dropout in eval, views of the leading dimensions.
`residual.py` finds what the result is added to, `norm.py` what x comes from.

A block is *refused*, with a reason, when it has this shape but cannot be rewritten exactly: its activation is not of
the ReLU family, its hidden tensor has another reader, gate and up read different tensors, the up projection's weight is
not a constant, a projection is broadcast, the hidden tensor is cast, scaled or normalised on its way, a projection
is cast, scaled or added to before a ReLU, or its thresholds, one for each neuron, are computed or below 0. So is what
seems to be a block of another shape (see `unread_ffn.py`). All else is not a block and is not reported.

The experts of a layer are one block with a `routing`, whose projections have a matrix for each: see `experts.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from twellc.passes.graph.program import constants_of, tensor_of
from twellc.passes.match.activations import EACH_NEURON, Activation, arguments, packet, parse_activation
from twellc.passes.match.experts import ExpertsReader, Routing
from twellc.passes.match.find_linear import is_read_by
from twellc.passes.match.linear import (
    CASTS,
    Linear,
    LinearReader,
    Weight,
    call_name,
    is_grouped,
    operand,
    source_with_sizes,
    step,
    strip,
    width,
)
from twellc.passes.match.norm import Norm, read_norm
from twellc.passes.match.residual import Residual, find_residual
from twellc.passes.match.unread_ffn import UnreadForm, UnreadForms
from twellc.passes.report import Weights

aten = torch.ops.aten

# What a normalisation of the hidden tensor is made of: at least one of these, and arithmetic, which alone may scale it.
_STATISTICS = frozenset((aten.mean, aten.rsqrt, aten.sqrt, aten.rms_norm, aten.layer_norm, aten.native_layer_norm))
_NORMALISATION = _STATISTICS | {aten.mul, aten.div, aten.add, aten.sub, aten.pow, aten.square, *CASTS}
# What may stand between a projection and a ReLU, so that the block is one to report, though refused.
_ADJUSTMENT = frozenset((aten.mul, aten.div, aten.add, aten.sub)) | CASTS


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
        pre: Of experts: what their ReLU is applied to, [rows, d_ff], with a row for each token and expert that it is
            sent to; None of other blocks.
        x: The node to read x from, with the same leading dimensions as `y`; of experts as it is before a cast.
        routing: Of experts that are read, how tokens reach them; None of other blocks.
        residual: What its result is added to, if the sum belongs to the block; a refused block has none.
        weights: In how many bits its weights are to be read, see `fp8.py`; None in those of its dtype.
        thresholds: Of fatrelu, a threshold for each neuron in the place of the one.
        rectifies: Whether thresholds below 0 mean the same as 0; else none is below 0.
        norm: The norm that makes x, if the block is to compute it: see `with_norm`.
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
    pre: Node | None = None
    routing: Routing | None = None
    residual: Residual | None = None
    weights: Weights | None = None
    thresholds: Weight | None = None
    rectifies: bool = False
    norm: Norm | None = None

    @property
    def y(self) -> Node:
        """The node whose value the block computes: its down projection, or the sum with a residual or over experts."""
        if self.routing is not None:
            return self.routing.y
        return self.down.node if self.residual is None else self.residual.sum


class _RefusedError(Exception):
    """The reason why a block that has the shape of one cannot be rewritten."""


def find_ffn_blocks(program: ExportedProgram) -> list[FfnBlock]:
    """Return the feed-forward blocks of a canonical program in graph order, refused ones included."""
    return find_blocks(program.graph, constants_of(program), lambda weight: tensor_of(program, weight.name))


def find_blocks(graph: Graph, constants: dict[Node, str], values: Callable[[Weight], Tensor]) -> list[FfnBlock]:
    """Return the blocks of a graph whose nodes have their values in `meta`.

    Args:
        graph: The graph.
        constants: The names of its constant tensors.
        values: Returns the value of one.
    """
    finder, experts = _Finder(LinearReader(constants)), _ExpertsFinder(ExpertsReader(constants))
    forms = UnreadForms(graph, constants)
    both = ((node, finder.match(node) or experts.match(node)) for node in graph.nodes)
    matched = {node: block for node, block in both if block is not None}
    reported = {node for block in matched.values() for part in (block.gate, block.up) if part for node in part.nodes}
    blocks: list[FfnBlock] = []
    names = _Names()
    sums: set[Node] = set()  # of two blocks that are added one gets the sum
    for node in graph.nodes:
        block, form = matched.get(node), None
        if block is None:
            form = forms.ending_at(node)
        if form is not None and form.up.node not in reported:
            reported.add(form.up.node)
            block = _refused(form)
        if block is None:
            continue
        if block.thresholds is not None and not block.refusal:
            block = replace(block, refusal=_fault_of(values(block.thresholds), block.rectifies))
        residual = None if block.refusal or block.routing else find_residual(block.x, block.down, constants)
        if residual is not None and residual.sum not in sums:
            sums.add(residual.sum)
            block = replace(block, x=residual.x, residual=residual)
        blocks.append(replace(block, module=names.unique(block)))
    return blocks


def with_norm(block: FfnBlock, fixed: Collection[Node]) -> FfnBlock:
    """Return a block with the norm before it, if nothing else reads what that gives.

    `fixed` are the nodes that are computed from constants alone.
    """
    norm = None if block.refusal or block.routing else read_norm(block.x, fixed)
    if norm is None or norm.x.meta["val"].dtype != block.dtype:
        return block
    own = {node for part in (block.gate, block.up) if part is not None for node in part.nodes}
    return replace(block, norm=norm) if is_read_by(norm.node, own) else block


def _fault_of(thresholds: Tensor, rectifies: bool) -> str:
    """Say why thresholds do not mean the same to the ops; empty where they do."""
    if thresholds.is_meta:
        return ""  # only the layers' names are asked for
    if thresholds.isnan().any():
        return "a threshold of its FATReLU is NaN"
    return "" if rectifies or bool((thresholds >= 0).all()) else "a threshold of its FATReLU is below 0"


class _Names:
    """Makes the names of blocks unique."""

    def __init__(self) -> None:
        self._weights: dict[str, tuple[Weight, Weight]] = {}  # first and last of the first block of each name
        self._calls: Counter[str] = Counter()

    def unique(self, block: FfnBlock) -> str:
        """Return the module of a block; of a second pair of layers in it the first layer, of a second call `mlp#2`."""
        first = block.gate or block.up or block.down
        name, weights = block.module, (first.weight, block.down.weight)
        if self._weights.setdefault(name, weights) != weights:
            name = ".".join(_path(first))
        return call_name(name, self._calls)


def _refused(form: UnreadForm) -> FfnBlock:
    activation, up, refusal = form.activation, form.up, f"no form that twellc rewrites: {', '.join(form.operations)}"
    block = _block(activation, up, None if form.gated else up, form.down, up.x, refusal, form.widths)
    return replace(block, pre=activation.pre if is_grouped(up.node) and activation.sparse else None)


# Activation, gate (of a plain block: up), up if it is a projection, and the other nodes in between.
_Parts = tuple[Activation, Linear, Linear | None, tuple[Node, ...]]


def _check_activation(activation: Activation, kind: str) -> None:
    if not activation.sparse and activation.name != "drelu":
        needed = "x > a stored vector is needed" if activation.name == EACH_NEURON else "TwELL needs a ReLU family"
        raise _RefusedError(f"{kind} is {activation.name}; {needed}")


class _Finder:
    def __init__(self, reader: LinearReader) -> None:
        self._reader = reader

    def match(self, node: Node) -> FfnBlock | None:
        """Read `node` as the down projection of a block."""
        down = self._reader.linear(node)
        if down is None or down.weight.rows is not None or self._reader.larger(node) is not None:
            return None  # of a sliced down projection the whole is the anchor
        was_cast = packet(strip(down.x)) in CASTS
        hidden = _behind_casts(down.x)
        # First plain: x * relu(x) has the shape of a gated block, too, whose gate and up are one projection.
        parts = self._plain(hidden) or self._gated(hidden)
        computed_on = ""
        if parts is None:
            parts, computed_on = self._behind_arithmetic(hidden)
        if parts is None:
            parts, computed_on = self._adjusted(hidden)
        if parts is None:
            return None
        activation, gate, up, others = parts
        refusal, thresholds = "", None
        if activation.bound is not None:
            thresholds = self._reader.vector(activation.bound)
            if thresholds is not None:
                activation = replace(activation, name="fatrelu")
        x = up.x if up is not None else gate.x
        try:
            _check_activation(activation, "gate activation" if gate is not up else "activation")
            if computed_on:
                raise _RefusedError(computed_on)
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
        block = _block(activation, gate, up, down, x, refusal, _widths_of(up or gate, down))
        return replace(block, thresholds=thresholds)

    def _plain(self, hidden: Node, adjusted: bool = False) -> _Parts | None:
        look, read = self._reading(adjusted)
        activation = parse_activation(hidden, look)
        if activation is None or activation.name == "sigmoid":
            return None
        up = read(look(activation.pre))
        return None if up is None else (activation, up, up, ())

    def _gated(self, hidden: Node, adjusted: bool = False) -> _Parts | None:
        if packet(hidden) is not aten.mul or not all(isinstance(arg, Node) for arg in arguments(hidden)):
            return None
        look, read = self._reading(adjusted)
        left, right = (look(operand(hidden, i)) for i in (0, 1))
        if left is right:
            return None
        for gate_side, up_side in ((left, right), (right, left)):
            activation = parse_activation(gate_side, look)
            gate = None if activation is None else read(look(activation.pre))
            if activation is None or gate is None:
                continue
            other = parse_activation(up_side, look)
            if other is None:
                up = read(up_side)
                return (activation, gate, up, (hidden,)) if up is not None or activation.sparse else None
            up = read(look(other.pre))
            if activation.name == other.name == "relu":
                both = Activation("drelu", 0.0, activation.pre, activation.nodes + other.nodes)
                return both, gate, up, (hidden,)
            if up is not None:
                name = f"{activation.name} times {other.name}"
                return Activation(name, 0.0, activation.pre, activation.nodes), gate, up, (hidden,)
        return None

    def _reading(self, adjusted: bool) -> tuple[Callable[[Node], Node], Callable[[Node], Linear | None]]:
        """Return what to look through, and how to read a projection; `adjusted` ones only to refuse them."""
        return (_behind_casts, self._adjusted_linear) if adjusted else (strip, self._reader.linear)

    def _adjusted(self, hidden: Node) -> tuple[_Parts | None, str]:
        """Look for a ReLU block with a projection that something is computed on before the activation."""
        parts = self._gated(hidden, adjusted=True) or self._plain(hidden, adjusted=True)
        if parts is not None and not parts[0].sparse and parts[0].name != "drelu":
            parts = None
        return parts, "a projection is cast, scaled or added to (as by an unmerged LoRA) before the activation"

    def _adjusted_linear(self, node: Node) -> Linear | None:
        """Read what arithmetic makes of nothing but projections and constants as the widest of these projections."""
        found: list[Linear] = []
        nodes = [node]
        for node in nodes:
            linear = self._reader.linear(node)
            if linear is not None:
                found.append(linear)
            elif packet(node) in _ADJUSTMENT and len(nodes) < 16:
                nodes.extend(source for source in map(strip, node.all_input_nodes) if source not in nodes)
            elif node not in self._reader.constants:
                return None
        return max(found, key=lambda linear: width(linear.x), default=None)

    def _behind_arithmetic(self, node: Node) -> tuple[_Parts | None, str]:
        """Look for a block whose hidden tensor is scaled, or normalised as in BitNet; and say which of the two."""
        pending: list[Node] = [node]
        visited: set[Node] = set()
        found: _Parts | None = None
        while pending and len(visited) < 16:
            node = pending.pop(0)
            if node in visited or packet(node) not in _NORMALISATION:
                continue
            visited.add(node)
            # Only what would match without the arithmetic: behind it there may stand anything.
            parts = self._gated(node) if packet(node) is aten.mul else None
            if parts is not None and (parts[0].sparse or parts[0].name == "drelu"):
                found = found or parts
            else:
                pending.extend(map(strip, node.all_input_nodes))
        if any(packet(node) in _STATISTICS for node in visited):
            return found, "a normalisation stands between the hidden tensor and the down projection"
        return found, "the hidden tensor is scaled, or otherwise computed on, before the down projection"

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
        widths = {width(gate.node), width(up.node), width(down.x)}
        if len(widths) > 1:
            raise _RefusedError(f"its hidden tensors have several widths ({', '.join(map(str, sorted(widths)))})")
        for part in (gate, up, down):
            whole = part.bias is not None and part.bias.rows is None
            if part.bias is not None and whole and width(part.bias.node) != width(part.node):
                raise _RefusedError(f"the bias {part.bias.name} is broadcast")

    def _common_input(self, gate: Linear, up: Linear, down: Linear) -> Node:
        """Return the node to read x from: the same values for gate and up, and the leading dimensions of y."""
        if strip(gate.x) is not strip(up.x) or width(gate.x) != width(up.x):
            raise _RefusedError("gate and up projections read different tensors")
        wanted = (*down.node.meta["val"].shape[:-1], width(up.x))
        node = source_with_sizes(up.x, wanted)
        if node is None:
            raise _RefusedError("the output has other leading dimensions than the input")
        return node


class _ExpertsFinder(_Finder):
    """Finds the experts of a layer."""

    def __init__(self, reader: ExpertsReader) -> None:
        super().__init__(reader)
        self._experts = reader

    def match(self, node: Node) -> FfnBlock | None:
        """Read `node` as the sum over each token's experts."""
        found = self._experts.experts(node)
        if found is None:
            return None
        down, routing = found
        hidden = strip(down.x)
        parts = self._plain(hidden) or self._gated(hidden)
        if parts is None:
            return None
        activation, gate, up, others = parts
        if up is None:
            return None
        sources = {self._experts.tokens(part, down, routing) for part in (gate, up)}
        x = sources.pop()
        if x is None or sources:
            return None
        refusal = ""
        try:
            _check_activation(activation, "gate activation" if gate is not up else "activation")
            if activation.bound is not None:
                raise _RefusedError("a threshold for each neuron")
            if hidden.meta["val"].dtype != down.node.meta["val"].dtype:
                raise _RefusedError("the hidden tensor is cast before the down projection")
            self._check_widths(gate, up, down)
            inside = {*activation.nodes, *others, *up.nodes, *gate.nodes, *down.nodes}
            _check_readers(inside, down, up.x)
        except _RefusedError as reason:
            refusal = str(reason)
        block = _block(activation, gate, up, down, x, refusal, _widths_of(up, down))
        return replace(block, pre=activation.pre if activation.sparse else None, routing=routing)


def _widths_of(up: Linear, down: Linear) -> tuple[int, int, int]:
    return width(up.x), width(down.x), width(down.node)


def _block(
    activation: Activation,
    gate: Linear,
    up: Linear | None,
    down: Linear,
    x: Node,
    refusal: str,
    widths: tuple[int, int, int],
) -> FfnBlock:
    """Return a block of these parts; of a plain one the gate is the up projection."""
    return FfnBlock(
        _module([part for part in (gate, up, down) if part is not None]),
        "plain" if gate is up else "gated",
        activation.name,
        activation.threshold,
        *widths,
        dtype=down.x.meta["val"].dtype,
        refusal=refusal,
        gate=None if gate is up else gate,
        up=up,
        down=down,
        x=x,
        rectifies=activation.rectifies,
    )


def _module(parts: list[Linear]) -> str:
    """Return the module that holds all parts, else the last part."""
    paths = [part.weight.name.split(".")[:-1] for part in parts]
    common: list[str] = []
    for names in zip(*paths, strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return ".".join(common or _path(parts[-1]))


def _path(part: Linear) -> list[str]:
    """Return the module of a projection; its weight if that is at the root of the model."""
    *path, name = part.weight.name.split(".")
    return path or [name.partition("_folded")[0]]


def _behind_casts(node: Node) -> Node:
    node = strip(node)
    while packet(node) in CASTS:
        node = strip(operand(node))
    return node


def _interior(inside: set[Node], down: Linear, x: Node) -> Iterator[Node]:
    """Yield the nodes of a block between x and y, the value-preserving ones included; not y itself."""
    pending, visited = [down.node], set()
    roots = {x, strip(x)}
    while pending:
        node = pending.pop()
        if node in visited or node.op == "placeholder" or node in roots:
            continue
        if node not in inside and step(node) is None:
            continue
        visited.add(node)
        if node is not down.node:
            yield node
        pending.extend(node.all_input_nodes)


def _check_readers(inside: set[Node], down: Linear, x: Node) -> None:
    """Refuse when something outside of the block reads one of its intermediate tensors."""
    interior = set(_interior(inside, down, x))
    root, ends = strip(x), dict[Node, Node]()
    for node in interior:
        # As `strip`, but each step of a long chain once.
        end, chain = node, []
        while end not in ends and (source := step(end)) is not None:
            chain.append(end)
            end = source
        end = ends.get(end, end)
        ends |= dict.fromkeys(chain, end)
        if end is root:
            continue
        for user in node.users:
            if user not in interior and user is not down.node:
                raise _RefusedError(f"its intermediate tensor {node.name} is also read by {user.name}")
