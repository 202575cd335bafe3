"""Fold what constants do to a feed-forward block into its weights, and let it compute in one precision.

    before   x ─ linear(W, b) ─ batch_norm ─ sub(c) ─ relu ─ mul(s) ─ linear(V, d) ─ y
    after    x ─ linear(W', b') ─ relu ─ linear(V', d) ─ y          W' [d_ff, d_model], b' [d_ff], V' [d_out, d_ff]

    before   linear ─ cast f32 ─ relu ─ mul(·, cast f32 ─ linear) ─ cast bf16 ─ linear
    after    linear ─ relu ─ mul(·, linear) ─ linear

Numbers, and constants with a number for each neuron, may scale and shift a projection before its activation, which goes
into that projection, and the hidden tensor, which goes into the down projection; so does what scales an activation
before the product with up. `linear` is any product that `linear.py` reads, or a convolution with a kernel of size 1.

Folded weights are computed in float64 from those that the model has, and rounded once to its precision. So they mean
what the model means in float64; what it rounds in between is not rounded any more, which `check` counts as rounding. A
weight that something else reads, too, stays as it is, beside the folded copy.

Refused, and left as it is:
- a shift between the gate's activation and the product with up: the gate has no zeros then;
- constants that differ from token to token, are not finite, or that the model computes from its input;
- folded weights that do not fit into their precision, or into float16 where the model is in float32;
- a tensor on the way that something else reads, too;
- a cast to a narrower precision on the way: it belongs to what the model computes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.node import map_arg

from twellc.passes.feature_last import read_convolution
from twellc.passes.graph.constants import Constants, ProgramConstants, is_pure
from twellc.passes.graph.program import editable, finish, infer
from twellc.passes.match.activations import Activation, arguments, packet, parse_activation, square_of
from twellc.passes.match.linear import (
    CASTS,
    PERMUTATIONS,
    WIDENING,
    LinearReader,
    Weight,
    operand,
    permutation,
    same_sizes,
    step,
)
from twellc.passes.rewrite_ffn import arranged_view

aten = torch.ops.aten

_BATCH_NORMS = (aten._native_batch_norm_legit_no_training, aten.batch_norm)
_AFFINE = frozenset((aten.neg, aten.add, aten.sub, aten.rsub, aten.mul, aten.div, *_BATCH_NORMS))
_MOST_STEPS = 16


def fold_constants(program: ExportedProgram) -> ExportedProgram:
    """Return the program with constants folded into the weights of its blocks; itself where it has none to fold."""
    if next(_Folder(ProgramConstants(program)).plans(), None) is None:
        return program
    program = editable(program)
    _Folder(ProgramConstants(program)).run()
    return finish(program)


def fold_constants_in(constants: Constants) -> None:
    """Fold constants in a graph whose nodes have their values in `meta`; see above."""
    _Folder(constants).run()


# ---- what the pass reads ----


@dataclass(frozen=True)
class _Product:
    """A product that keeps dimension `axis` of x as dimension `axis` of its result."""

    node: Node
    x: Node
    axis: int
    weight: Weight
    bias: Weight | None
    nodes: tuple[Node, ...]


@dataclass
class _Chain:
    """How a tensor is computed from `core`: core * scale + shift.

    Attributes:
        core: What it is computed from.
        axis: The dimension of the neurons in `core`.
        top: The tensor.
        scale, shift: float64, with one number, or one a neuron.
        nodes: All nodes from `top` to `core`, without that.
        folded: Those that scale or shift, or cast, each with its source.
        casts: The dtypes that are cast to.
        order: How the dimensions of `top` lie in `core`.
        product: The product that computes `core`; None where another operation does.
    """

    core: Node
    axis: int
    top: Node
    scale: Tensor = field(default_factory=lambda: torch.ones(1, dtype=torch.float64))
    shift: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))
    nodes: list[Node] = field(default_factory=list)
    folded: list[tuple[Node, Node]] = field(default_factory=list)
    casts: set[torch.dtype] = field(default_factory=set)
    order: list[int] = field(default_factory=list)
    product: _Product | None = None

    @property
    def shifts(self) -> bool:
        """Whether it adds anything."""
        return bool(self.shift.any())

    @property
    def moves(self) -> bool:
        """Whether dimensions are permuted on the way."""
        return any(packet(node) in PERMUTATIONS for node in self.nodes)

    @property
    def keeps_order(self) -> bool:
        """Whether dimensions lie as before; where they are moved and moved back, the tensor has the shape of `core`."""
        shapes = (node.meta["val"].shape for node in (self.top, self.core))
        return self.order == sorted(self.order) and (not self.moves or same_sizes(*shapes))


@dataclass(frozen=True)
class _Hidden:
    """A hidden tensor, or a factor of one.

    Attributes:
        activations: What computes its ReLUs.
        chains: All chains in it; those with a product are its projections.
        scale: What it is scaled with behind its ReLUs.
        nodes: Its other nodes.
        folded: What is to be done about it.
    """

    activations: tuple[Activation, ...]
    chains: tuple[_Chain, ...]
    scale: Tensor
    nodes: tuple[Node, ...]
    folded: tuple[_Folded, ...] = ()

    @property
    def projections(self) -> list[tuple[_Chain, _Product]]:
        """Its projections, and the nodes between them and their activations."""
        return [(chain, chain.product) for chain in self.chains if chain.product is not None]

    @property
    def inside(self) -> set[Node]:
        """All nodes between its projections and the down projection."""
        return {*self.nodes, *(node for chain in self.chains for node in chain.nodes)}

    @property
    def casts(self) -> set[torch.dtype]:
        """The dtypes that are cast to."""
        return set[torch.dtype]().union(*(chain.casts for chain in self.chains))


@dataclass(frozen=True)
class _Folded:
    """A product with its new weight [out, in] and bias [out], and the node whose value it has then."""

    product: _Product
    weight: Tensor
    bias: Tensor | None
    computes: Node


class _Folder:
    def __init__(self, constants: Constants) -> None:
        self._constants = constants
        self._reader = LinearReader(constants.names)
        self._made: dict[str, list[tuple[Tensor, Node]]] = {}  # by name: what a second call of a module reads again
        self._erased: set[Node] = set()
        self._fixed = set(constants.names)  # and nodes computed from constants alone
        for node in constants.graph.nodes:
            if is_pure(node) and self._fixed.issuperset(node.all_input_nodes):
                self._fixed.add(node)

    def run(self) -> None:
        for hidden in self.plans():
            self._apply(hidden)

    def plans(self) -> Iterator[_Hidden]:
        """Yield each fold, also while it is done."""
        for node in list(self._constants.graph.nodes):
            hidden = self._plan(node) if node.op == "call_function" and node.users else None
            if hidden is not None:
                yield hidden

    # ---- matching ----

    def _plan(self, node: Node) -> _Hidden | None:
        down = self._product(node)
        if down is None or down.weight.rows is not None or self._reader.larger(node) is not None:
            return None
        outer = self._chain(down.x, down.axis)
        hidden = self._plain(outer) or self._gated(outer)
        if hidden is None or not any(chain.folded for chain in hidden.chains):
            return None
        if not self._in_one_precision(hidden, down) or not self._is_private(hidden, down):
            return None
        try:
            folded = [
                self._fold_into(product, chain)
                for chain, product in hidden.projections
                if chain.shifts or not _is_one(chain.scale)
            ]
            if outer.shifts or not _is_one(hidden.scale):
                folded.append(self._fold_behind(down, hidden.scale, outer.shift))
        except _DoesNotFitError:
            return None
        return replace(hidden, folded=tuple(folded))

    def _product(self, node: Node) -> _Product | None:
        if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
            return None
        linear = self._reader.linear(node)
        if linear is not None:
            if not same_sizes(linear.x.meta["val"].shape[:-1], node.meta["val"].shape[:-1]):
                return None
            return _Product(node, linear.x, node.meta["val"].dim() - 1, linear.weight, linear.bias, linear.nodes)
        found = read_convolution(node, self._reader)
        if found is None or (found.bias is not None and found.bias not in self._constants.names):
            return None
        bias = None if found.bias is None else Weight(found.bias, self._constants.names[found.bias])
        return _Product(node, found.x, found.axis, found.weight, bias, (node,))

    def _plain(self, outer: _Chain) -> _Hidden | None:
        squared = square_of(outer.core)
        inner = None if squared is None else self._chain(squared, outer.axis)
        if inner is not None and squared is not None:
            activation = _relu(inner.core)
            if activation is not None and activation.name == "relu" and not inner.shifts:
                return self._activated(activation, (outer, inner), outer.scale * inner.scale**2, (outer.core,))
        activation = _relu(outer.core)
        return None if activation is None else self._activated(activation, (outer,), outer.scale, ())

    def _activated(
        self, activation: Activation, chains: tuple[_Chain, ...], scale: Tensor, nodes: tuple[Node, ...]
    ) -> _Hidden | None:
        projected = self._projected(activation.pre, chains[-1].axis)
        if projected is None or not all(chain.keeps_order for chain in chains):
            return None
        return _Hidden((activation,), (*chains, *projected.chains), scale, (*nodes, *activation.nodes))

    def _gated(self, outer: _Chain) -> _Hidden | None:
        core = outer.core
        if packet(core) is not aten.mul or not all(isinstance(arg, Node) for arg in arguments(core)):
            return None
        left, right = (self._chain(operand(core, index), outer.axis) for index in (0, 1))
        for gate_side, up_side in ((left, right), (right, left)):
            gate = None if gate_side.shifts else self._plain(gate_side)
            if gate is None or not outer.keeps_order:
                continue
            other = self._projected(up_side.top, outer.axis)
            if other is None:
                other = None if up_side.shifts else self._plain(up_side)
                if other is None or {each.name for each in (*gate.activations, *other.activations)} != {"relu"}:
                    continue
            return _Hidden(
                gate.activations + other.activations, (outer, *gate.chains, *other.chains),
                outer.scale * gate.scale * other.scale, (core, *gate.nodes, *other.nodes),
            )  # fmt: skip
        return None

    def _projected(self, node: Node, axis: int) -> _Hidden | None:
        """Read a tensor as a projection without an activation."""
        chain = self._chain(node, axis)
        if chain.product is None or chain.product.axis != chain.axis or not chain.keeps_order:
            return None
        return _Hidden((), (chain,), torch.ones(1, dtype=torch.float64), ())

    def _chain(self, node: Node, axis: int) -> _Chain:
        """Follow a tensor back as far as constants scale and shift it, or it is cast or moved."""
        chain = _Chain(node, axis, node, order=list(range(node.meta["val"].dim())))
        while True:
            chain.product = self._product(chain.core)
            if chain.product is not None or len(chain.nodes) >= _MOST_STEPS or not self._follow(chain):
                return chain

    def _follow(self, chain: _Chain) -> bool:
        node, op = chain.core, packet(chain.core)
        if op in PERMUTATIONS | CASTS and not _has_floats(operand(node)):
            return False
        if op in PERMUTATIONS:
            order = permutation(node)
            chain.axis, chain.order = order[chain.axis], [order[dim] for dim in chain.order]
            return _go(chain, operand(node))
        if op in CASTS:
            chain.casts.add(node.meta["val"].dtype)
            chain.folded.append((node, operand(node)))
            return _go(chain, operand(node))
        source = step(node)
        if source is not None:
            if same_sizes(source.meta["val"].shape, node.meta["val"].shape):
                return _go(chain, source)
            dims = node.meta["val"].dim()
            if chain.axis != dims - 1 or chain.order != list(range(len(chain.order))):
                return False
            chain.axis, chain.order = source.meta["val"].dim() - 1, list(range(source.meta["val"].dim()))
            return _go(chain, source)
        found = self._affine(node, chain.axis)
        if found is None:
            return False
        source, scale, shift, between = found
        chain.shift = chain.scale * shift + chain.shift
        chain.scale = chain.scale * scale
        chain.folded.append((node, source))
        chain.nodes += between
        return _go(chain, source)

    def _affine(self, node: Node, axis: int) -> tuple[Node, Tensor, Tensor, list[Node]] | None:
        """Read source * scale + shift: the source, scale and shift, and nodes in between."""
        is_first = node.target is operator.getitem and arguments(node)[1] == 0
        computes = operand(node) if is_first and packet(operand(node)) in _BATCH_NORMS else node
        op, given = packet(computes), arguments(computes)
        sources = [each for each in computes.all_input_nodes if each not in self._fixed]
        size = node.meta["val"].shape[axis] if op in _AFFINE and not computes.kwargs else None
        if not isinstance(size, int) or len(sources) != 1 or given.count(sources[0]) != 1:
            return None
        (source,) = sources
        constants = [each.meta["val"] for each in computes.all_input_nodes if each is not source]
        if (op is aten.div and given[0] is not source) or (op is aten.batch_norm and given[5]):  # in training
            return None
        if op in _BATCH_NORMS and axis != 1:
            return None
        if not all(isinstance(each, Tensor) and each.numel() <= size for each in constants):
            return None
        if any(each.dtype == torch.bool or each.is_complex() for each in constants):
            return None
        if not _has_floats(source) or not same_sizes(source.meta["val"].shape, node.meta["val"].shape):
            return None
        # The operation itself tells what it makes of zeros, and how that changes with them.
        sizes = [size if dim == axis else 1 for dim in range(node.meta["val"].dim())]
        assert callable(computes.target)
        with torch.inference_mode(False), torch.enable_grad():
            x = torch.zeros(sizes, dtype=torch.float64, requires_grad=True)
            result = computes.target(*map_arg(given, lambda each: x if each is source else self._value(each)))
            shift: Tensor = result[0] if isinstance(result, tuple) else result
            if shift.shape != x.shape:
                return None
            (scale,) = torch.autograd.grad(shift.sum(), x)
        found = source, scale.flatten(), shift.detach().flatten(), [computes] if computes is not node else []
        return found if bool(scale.isfinite().all() and shift.isfinite().all()) else None

    def _in_one_precision(self, hidden: _Hidden, down: _Product) -> bool:
        dtype = down.x.meta["val"].dtype
        products = [down, *(product for _, product in hidden.projections)]
        return all(
            tensor.meta["val"].dtype == dtype
            for product in products
            for tensor in (product.node, product.x, product.weight.node, *([product.bias.node] if product.bias else ()))
        ) and hidden.casts <= {dtype, *WIDENING.get(dtype, ())}

    def _is_private(self, hidden: _Hidden, down: _Product) -> bool:
        """Whether nothing but the block reads what would change, and within it only the chains that change it."""
        for chain in hidden.chains:
            on_the_way = {*chain.nodes, chain.core} - {chain.top}
            if not all(set(chain.nodes).issuperset(node.users) for node in on_the_way):
                return False
        readers = {*hidden.inside, *down.nodes}
        changed = {*hidden.inside, *(product.node for _, product in hidden.projections)}
        return all(user in readers for node in changed for user in node.users)

    # ---- folding ----

    def _value(self, node: Node) -> Tensor:
        """Return a constant as float64 on the CPU, wherever the model lies: all folding is done there."""
        return self._constants.value(node).double().cpu()

    def _matrix(self, product: _Product) -> Tensor:
        """Return the weight as float64 [out, in]."""
        return arranged_view(self._value(product.weight.node), product.weight, in_out=False)[1]

    def _vector(self, product: _Product) -> Tensor:
        """Return the bias as float64 [out], or [1] if there is none."""
        if product.bias is None:
            return torch.zeros(1, dtype=torch.float64)
        return arranged_view(self._value(product.bias.node), product.bias, in_out=False)[1]

    def _fold_into(self, product: _Product, chain: _Chain) -> _Folded:
        """Scale and shift the result of a product."""
        weight = self._matrix(product)
        bias = (self._vector(product) * chain.scale + chain.shift).expand(len(weight))
        return self._rounded(product, weight, weight * chain.scale[:, None], bias, chain.folded[0][0])

    def _fold_behind(self, product: _Product, scale: Tensor, shift: Tensor) -> _Folded:
        """Scale and shift what a product reads."""
        weight = self._matrix(product)
        bias = (self._vector(product) + weight @ shift.expand(weight.shape[1])).expand(len(weight))
        return self._rounded(product, weight, weight * scale, bias, product.node)

    def _rounded(self, product: _Product, before: Tensor, weight: Tensor, bias: Tensor, computes: Node) -> _Folded:
        dtype = product.weight.node.meta["val"].dtype
        _check_fits(before, weight, dtype)
        if not bool(bias.to(dtype).isfinite().all()):
            raise _DoesNotFitError
        has_bias = product.bias is not None or bool(bias.any())
        return _Folded(product, weight.to(dtype), bias.to(dtype) if has_bias else None, computes)

    # ---- rewriting ----

    def _apply(self, hidden: _Hidden) -> None:
        now: dict[Node, Node] = {}  # what nodes have become
        for chain in hidden.chains:
            for node, source in [(chain.top, chain.core)] if chain.moves and chain.folded else chain.folded:
                node.replace_all_uses_with(source)
                now[node] = source
        inside = hidden.inside
        if hidden.casts:
            for activation in hidden.activations:
                inside |= self._write_activation(activation, now)
            for node in self._constants.graph.nodes:
                if node in inside and node.users:
                    infer(node)
        for folded in hidden.folded:
            self._replace(folded, _followed(folded.product.x, now))
        for node in reversed(list(self._constants.graph.nodes)):
            if node in inside:
                self._erase(node)

    def _write_activation(self, activation: Activation, now: dict[Node, Node]) -> set[Node]:
        """Write an activation as operators that take any precision, and return these."""
        graph, node = self._constants.graph, activation.nodes[0]
        with graph.inserting_before(node):
            pre = _followed(activation.pre, now)
            if activation.name == "fatrelu":
                made = [graph.call_function(aten.threshold.default, (pre, activation.threshold, 0.0))]
            else:
                made = [graph.call_function(aten.relu.default, (pre,))]
            if activation.name == "relu2":
                made.append(graph.call_function(aten.square.default, (made[0],)))
        for new in made:
            new.meta = dict(node.meta)
        node.replace_all_uses_with(made[-1])
        now[node] = made[-1]
        return set(made)

    def _replace(self, folded: _Folded, x: Node) -> None:
        product, graph, like = folded.product, self._constants.graph, folded.product.weight.node
        convolution = read_convolution(product.node, self._reader)
        stored, name = folded.weight, product.weight.name
        if convolution is not None:
            stored = stored.reshape(operand(product.node, 1).meta["val"].shape)
        weight = self._add(f"{name}_folded", stored.contiguous(), like)
        operands = [x, weight]
        if folded.bias is not None:
            path = name.rpartition(".")[0]
            bias_name = product.bias.name if product.bias else f"{path}.bias" if path else "bias"
            operands.append(self._add(f"{bias_name}_folded", folded.bias.contiguous(), like))
        with graph.inserting_before(product.node):
            if convolution is None:
                new = graph.call_function(aten.linear.default, tuple(operands))
            else:
                given = (*operands, None)[:3] + arguments(product.node)[3:]
                assert callable(product.node.target)
                new = graph.call_function(product.node.target, given)
        new.meta = dict(product.node.meta)
        self._constants.replace(product.node, new, folded.computes)
        self._erase(product.node)

    def _erase(self, node: Node) -> None:
        """Remove what nothing reads any more, and what it alone has read."""
        if node.op == "call_function" and not node.users and node not in self._erased:
            sources = node.all_input_nodes
            self._erased.add(node)
            self._constants.graph.erase_node(node)
            for source in sources:
                self._erase(source)

    def _add(self, name: str, tensor: Tensor, like: Node) -> Node:
        for known, node in self._made.setdefault(name, []):
            if torch.equal(known, tensor):
                return node
        node = self._constants.add(name, tensor.to(self._constants.value(like).device), like=[like])
        self._reader.constants = self._constants.names
        self._fixed.add(node)
        self._made[name].append((tensor, node))
        return node


class _DoesNotFitError(Exception):
    """Folded weights would overflow their precision, or lose much of it."""


def _check_fits(before: Tensor, folded: Tensor, dtype: torch.dtype) -> None:
    """Fail if a weight, float64, would overflow or lose precision where the one that it is made of does not."""
    wide = dtype in (torch.float32, torch.float64)  # which may be lowered
    for kind in (dtype, torch.float16) if wide else (dtype,):
        if _error(folded, kind) > 2 * max(_error(before, kind), torch.finfo(kind).eps):
            raise _DoesNotFitError


def _error(weight: Tensor, dtype: torch.dtype) -> float:
    """Return the relative error of rounding to `dtype`; infinite where that overflows."""
    rounded = weight.to(dtype).double()
    if not bool(rounded.isfinite().all()):
        return torch.inf
    return float((rounded - weight).norm() / weight.norm().clamp(min=torch.finfo(torch.float64).tiny))


def _relu(node: Node) -> Activation | None:
    """Read a node as an activation of the ReLU family, with nothing between its parts."""
    activation = parse_activation(node, lambda source: source)
    return activation if activation is not None and activation.sparse else None


def _is_one(scale: Tensor) -> bool:
    return bool((scale == 1).all())


def _go(chain: _Chain, source: Node) -> bool:
    chain.nodes.append(chain.core)
    chain.core = source
    return True


def _has_floats(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()


def _followed(node: Node, now: dict[Node, Node]) -> Node:
    while node in now:
        node = now[node]
    return node
