"""Find attention, and write it in a form that TensorRT fuses.

Found are torch's scaled_dot_product_attention, and attention that is spelt out:

    q [batch, heads, queries, width] ─ matmul ─ scale ─ + mask ─ softmax ─ matmul ─ y [batch, heads, queries, width]
    kᵀ, k [batch, kv_heads, keys, width] ─┘        v [batch, kv_heads, keys, width] ─┘

Keys and values of a group that are repeated for each of its queries' heads are read as they were before. A mask that
depends on positions alone and keeps all keys, or those up to the query's own place, is dropped
(`causal_mask.py`). So is the mask of a key-value cache, twell.cache_mask, where a form needs only its lengths. Each
block then takes the first of the forms that were asked for and that can express it:

    cudnn      twell.attention(q, k, v, None, scale, causal) over [batch, tokens, heads, width], a plugin over cuDNN, or
               twell.cached_attention(q, k, v, queries, keys, scale) over caches [batch, kv_heads, length, width]
    operator   scaled_dot_product_attention, which becomes ONNX's Attention
    matmul     matmul ─ + mask ─ softmax ─ matmul, which TensorRT 10 fuses: with k transposed once, the queries of a
               group as rows of one product, and no guard for rows that are masked whole: their scores are low, not -inf

Queries are scaled before the product, in float32 with one rounding: a scale in bfloat16 would be off by up to 0.25 %.
Masks and other things that blocks share are made once, and the mask of a cache is written as comparisons of positions.

Left as it is, with a reason: attention with more between its products than a scale and a mask, or other shapes.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from twellc.base.dtypes import kernel_dtypes
from twellc.passes.graph.program import add_call, editable, finish, replace_node
from twellc.passes.match.activations import arguments, packet
from twellc.passes.match.causal_mask import positions_kept
from twellc.passes.match.linear import CASTS, same_sizes
from twellc.passes.report import Attention
from twellc.plugins.attention_op import ATTENTION
from twellc.plugins.cache_op import CACHE_MASK, CACHED_ATTENTION
from twellc.plugins.library import ATTENTION_FORMS, LARGEST_HEAD

aten = torch.ops.aten

CUDNN, OPERATOR, MATMUL = ATTENTION_FORMS
AS_WRITTEN = "as written"

_LOW_PRECISION = kernel_dtypes()
_COPIES = (aten.clone, aten.contiguous, aten.view, aten.reshape)
_SOFTMAX = frozenset((aten.softmax, aten._softmax))
# What may stand between the two products of something that is reported as attention.
_BETWEEN = frozenset(
    (aten.mul, aten.div, aten.add, aten.sub, aten.where, aten.masked_fill, aten.max, aten.tanh, aten.clamp, aten.cat,
     aten.slice, aten.view, aten.reshape, aten._unsafe_view, aten.clone, aten.expand, aten.dropout, *CASTS)
)  # fmt: skip


@dataclass(frozen=True)
class _Block:
    """Attention in the graph: `node` is its result; k and v have the heads that the model gives them, in any dtype.

    Where the mask is that of a key-value cache, `cached` says so: k and v are the caches.
    """

    node: Node
    q: Node
    k: Node
    v: Node
    mask: Node | None
    causal: bool
    scale: float

    @property
    def cached(self) -> bool:
        return self.mask is not None and self.mask.target is CACHE_MASK


@dataclass(frozen=True)
class FoundAttention:
    """Attention in the graph: its module, and what it is; or the reason why it cannot be read."""

    module: str
    block: _Block | None
    reason: str = ""


class _UnknownError(Exception):
    """The reason why something that computes attention stays as it is."""


def find_attention(graph: Graph) -> list[FoundAttention]:
    """Return the attention in a graph, in its order."""
    return [found for found in map(_find, graph.nodes) if found is not None]


def _find(node: Node) -> FoundAttention | None:
    try:
        block = _read(node)
    except _UnknownError as reason:
        return FoundAttention(_module(node), None, str(reason))
    return None if block is None else FoundAttention(_module(node), block)


def rewrite_attention(program: ExportedProgram, forms: tuple[str, ...]) -> tuple[ExportedProgram, list[Attention]]:
    """Return the program with its attention rewritten, and what became of each block, in graph order.

    Args:
        program: A program in its target precision.
        forms: The forms to use, the best first; the last is `operator` or `matmul`, which is taken where none can be.
    """
    program = editable(program)
    writer = _Writer(program.graph)
    found = []
    for node in list(program.graph.nodes):
        writer.see(node)
        each = _find(node)
        if each is None:
            continue
        block = each.block
        if block is None:
            found.append(Attention(each.module, 0, 0, 0, "tensor", AS_WRITTEN, each.reason))
            if node.target is aten.scaled_dot_product_attention.default:
                # A scale that depends on a size stays the operator's.
                with suppress(_UnknownError), program.graph.inserting_before(node):
                    writer.scale_queries(node)
            continue
        refusals = [_refuse(block, form) for form in forms]
        form = next((form for form, refusal in zip(forms, refusals, strict=True) if not refusal), MATMUL)
        with program.graph.inserting_before(node):
            result = writer.write(block, form)
        replace_node(program, node, result)
        program.graph.erase_node(node)  # torch takes attention for random, and would keep it
        if form == CUDNN:
            _undo_transpositions(program, result)
        mask = "causal" if block.causal or block.cached else "none" if block.mask is None else "tensor"
        _, heads, _, width = block.q.meta["val"].shape
        kv_heads, reason = int(block.k.meta["val"].shape[1]), "; ".join(filter(None, refusals))
        found.append(Attention(each.module, int(heads), kv_heads, int(width), mask, form, reason))
    if any(block.form != AS_WRITTEN for block in found):
        # Views copy tensors of other layouts: they were traced with the layouts of torch's own attention.
        for node in program.graph.nodes:
            if node.target in (aten.view.default, aten._unsafe_view.default):
                node.target = aten.reshape.default
    for node in program.graph.find_nodes(op="call_function", target=CACHE_MASK):
        if node.users:
            with program.graph.inserting_before(node):
                replace_node(program, node, _Writer(program.graph).cache_mask(node))
    return finish(program), found


# ---- reading ----


def _read(node: Node) -> _Block | None:
    """Read a node as the result of attention.

    Raises:
        _UnknownError: It is one of another form.
    """
    if node.target is aten.scaled_dot_product_attention.default:
        return _checked(_read_operator(node))
    if packet(node) not in (aten.matmul, aten.bmm, aten.einsum):
        return None
    first = arguments(node)[1][0] if packet(node) is aten.einsum else arguments(node)[0]
    weights = _as_node(first)
    while packet(weights) in (aten.dropout, *CASTS, aten.expand, *_COPIES):
        weights = _as_node(arguments(weights)[0])
    if packet(weights) not in _SOFTMAX:
        return None
    block = _read_products(node, weights)
    return None if block is None else _checked(block)


def _read_operator(node: Node) -> _Block:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, arguments(node), strict=False)), **node.kwargs}
    if given.get("dropout_p"):
        raise _UnknownError("it has dropout")
    q, scale = given["query"], _scale(node)
    return _Block(node, q, given["key"], given["value"], given.get("attn_mask"), bool(given.get("is_causal")), scale)


def _scale(node: Node) -> float:
    """Return the scale of the operator."""
    scale = node.kwargs.get("scale")
    if scale is None:
        scale = _as_node(node.args[0]).meta["val"].shape[-1] ** -0.5
    if not isinstance(scale, int | float):
        raise _UnknownError("its scale depends on a size")
    return float(scale)


def _undo_transpositions(program: ExportedProgram, result: Node) -> None:
    """Let what transposes the result back read it as the plugin writes it; `result` is its transposition."""
    pending = [result]
    for node in pending:
        for user in list(node.users):
            if _exchanges_heads_and_tokens(user):
                replace_node(program, user, _as_node(result.args[0]))
            elif packet(user) in _COPIES and _same_shape(node, user):
                pending.append(user)


def _exchanges_heads_and_tokens(node: Node) -> bool:
    return packet(node) is aten.transpose and {axis % 4 for axis in arguments(node)[1:]} == {1, 2}


def _read_products(node: Node, weights: Node) -> _Block | None:
    """Read the two products around a softmax, `weights`; None if there is no first one."""
    scores, dim = arguments(weights)[:2]
    if not _is_between(scores):
        return None
    if packet(node) is aten.einsum:
        raise _UnknownError("its products are written as einsum")
    rank = min(each.meta["val"].dim() for each in (weights, arguments(node)[0]))
    if rank != 4 or dim not in (-1, 3) or packet(node) is not aten.matmul:
        raise _UnknownError(f"its scores have {rank} dimensions, not [batch, heads, queries, keys]")
    if len(weights.users) > 1:
        raise _UnknownError("its softmax has another reader")
    if not _same_shape(weights, _as_node(arguments(node)[0])):
        raise _UnknownError("its softmax is reshaped before the second product")
    scale, mask = 1.0, None
    place = _behind(scores, *CASTS)
    while packet(place) is not aten.matmul:
        operands = arguments(place)
        if packet(place) is aten.add and mask is None and scale == 1.0 and not place.kwargs:
            product = next((operand for operand in operands if _is_between(operand)), None)
            if product is None:
                raise _UnknownError("more than a scale and a mask stands between its products")
            (mask,) = (operand for operand in operands if operand is not product)
        elif packet(place) in (aten.mul, aten.div) and isinstance(operands[1], int | float) and scale == 1.0:
            product = operands[0]
            scale = float(operands[1] if packet(place) is aten.mul else 1 / operands[1])
        else:
            raise _UnknownError(f"{packet(place)} stands between its products")
        if not isinstance(product, Node):
            raise _UnknownError("more than a scale and a mask stands between its products")
        place = _behind(product, *CASTS)
    q, transposed = arguments(place)
    k = _untransposed(transposed)
    if k is None:
        raise _UnknownError("its keys are not transposed right before the product")
    if mask is not None and (not isinstance(mask, Node) or not mask.meta["val"].is_floating_point()):
        raise _UnknownError("what is added to its scores is not a mask")
    return _Block(node, q, k, arguments(node)[1], mask, False, scale)


def _checked(block: _Block) -> _Block:
    """Return a block with keys and values before they are repeated, and without a mask that positions alone make."""
    mask, causal = block.mask, block.causal
    dtypes = {each.meta["val"].dtype for each in (block.q, block.k, block.v, block.node)}
    if len(dtypes) > 1:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise _UnknownError(f"its tensors have several dtypes ({names})")
    k, v = _ungrouped(block.k), _ungrouped(block.v)
    values = [each.meta["val"] for each in (block.q, k, v)]
    if any(value.dim() != 4 for value in values):
        raise _UnknownError(f"its queries have {values[0].dim()} dimensions, not [batch, heads, queries, width]")
    heads = [value.shape[1] for value in values]
    if not all(isinstance(size, int) for size in (*heads, *(value.shape[3] for value in values))):
        raise _UnknownError("its heads or their width vary")
    if heads[1] != heads[2] or heads[0] % heads[1]:
        raise _UnknownError(f"it has {heads[0]} heads of queries, {heads[1]} of keys and {heads[2]} of values")
    if mask is not None:
        if causal:
            raise _UnknownError("it has a mask besides being causal")
        if mask.meta["val"].dim() not in (2, 3, 4):
            raise _UnknownError(f"its mask has {mask.meta['val'].dim()} dimensions")
        kept = positions_kept(mask)
        causal = kept == "causal"
        mask = None if kept else mask
    return replace(block, k=k, v=v, mask=mask, causal=causal)


def _behind(node: Any, *operators: object) -> Node:
    """Return the first node behind operators that keep a tensor's size."""
    while packet(node) in operators and _same_shape(arguments(node)[0], node):
        node = arguments(node)[0]
    assert isinstance(node, Node)
    return node


def _same_shape(left: Node, right: Node) -> bool:
    return same_sizes(left.meta["val"].shape, right.meta["val"].shape)


def _is_between(node: object) -> bool:
    """Whether a product of two activations comes behind operators that attention may have between its products."""
    pending = [node]
    for place in pending:
        if not isinstance(place, Node) or len(pending) > 32:
            continue
        if packet(place) in (aten.matmul, aten.bmm, aten.baddbmm, aten.einsum):
            return True
        if packet(place) in _BETWEEN:
            pending.extend(source for source in place.all_input_nodes if source not in pending)
    return False


def _untransposed(node: Node) -> Node | None:
    """Return k of what the product reads as kᵀ."""
    node = _behind(node, aten.clone, *CASTS)
    operands = arguments(node)
    last = node.meta["val"].dim() - 1
    if packet(node) is aten.transpose and {axis % (last + 1) for axis in operands[1:]} == {last - 1, last}:
        return _as_node(operands[0])
    return None


def _as_node(argument: Any) -> Node:
    assert isinstance(argument, Node)
    return argument


def _ungrouped(node: Node) -> Node:
    """Return keys or values before they are repeated for the heads of each group.

    [batch, kv_heads, keys, width] ─ unsqueeze(2) ─ expand ─ view [batch, kv_heads · group, keys, width]
    """
    merged = _behind(node, aten.clone, aten.contiguous, *CASTS)
    if packet(merged) not in (aten.view, aten.reshape, aten._unsafe_view) or merged.meta["val"].dim() != 4:
        return node
    wide = arguments(merged)[0]
    while packet(wide) in (aten.clone, aten.contiguous):
        wide = arguments(wide)[0]
    if packet(wide) is not aten.expand or wide.meta["val"].dim() != 5:
        return node
    single = arguments(wide)[0]
    if packet(single) is not aten.unsqueeze or arguments(single)[1] not in (2, -3):
        return node
    source = _as_node(arguments(single)[0])
    batch, heads, group, keys, width = wide.meta["val"].shape
    repeated = same_sizes(merged.meta["val"].shape, (batch, heads * group, keys, width))
    return source if repeated and same_sizes(source.meta["val"].shape, (batch, heads, keys, width)) else node


def _refuse(block: _Block, form: str) -> str:
    """Say why a block cannot have a form, or return an empty string; all can have `matmul`."""
    q, k, v = (each.meta["val"] for each in (block.q, block.k, block.v))
    if form == OPERATOR and q.shape[3] != v.shape[3]:
        return f"TensorRT's Attention takes heads of one width, not keys of {q.shape[3]} and values of {v.shape[3]}"
    if form != CUDNN:
        return ""
    if block.mask is not None and not block.cached:
        return "cuDNN's form takes no mask that the model computes"
    if q.dtype not in _LOW_PRECISION:
        return f"cuDNN's form takes bfloat16 and float16, not {str(q.dtype).removeprefix('torch.')}"
    if q.shape[3] != v.shape[3] or q.shape[3] % 8 or q.shape[3] > LARGEST_HEAD:
        return f"cuDNN's form takes heads whose width is a multiple of 8 up to {LARGEST_HEAD}, not {q.shape[3]}"
    if block.causal and not statically_known_true(q.shape[2] == k.shape[2]):
        return "cuDNN's form is causal for as many keys as queries alone"
    return ""


def _module(node: Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return path or node.name


# ---- writing ----


class _Writer:
    """Writes blocks in other forms into a graph, at its insertion point."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._made: dict[str, Node] = {}  # by operation and operands
        self._sizes: dict[object, Node] = {}

    def write(self, block: _Block, form: str) -> Node:
        """Write a block and return its result."""
        self._like = block.node
        block = replace(block, k=self._cast(block.k, block), v=self._cast(block.v, block))
        if form == CUDNN:
            return self._cudnn(block)
        q = self._scaled(block.q, block.scale)
        return self._operator(block, q) if form == OPERATOR else self._matmul(block, q)

    def scale_queries(self, node: Node) -> None:
        """Scale the queries of an operator that stays as it is, as those of all others are."""
        self._like = node
        node.args = (self._scaled(_as_node(node.args[0]), _scale(node)), *node.args[1:])
        node.kwargs = {**node.kwargs, "scale": 1.0}

    def cache_mask(self, node: Node) -> Node:
        """Write a mask of a key-value cache as comparisons of positions."""
        self._like = node
        starts, counts, tokens, length = node.args
        device = node.meta["val"].device
        last = self._call(aten.sub.Tensor, self._at_least_one(_as_node(counts)), 1)
        step = self._call(aten.arange.default, tokens, dtype=torch.int32, device=device)
        step = self._call(aten.minimum.default, step, self._call(aten.unsqueeze.default, last, 1))
        places = self._call(aten.add.Tensor, self._call(aten.unsqueeze.default, starts, 1), step)
        places = self._call(aten.unsqueeze.default, self._call(aten.unsqueeze.default, places, 1), 3)
        keys = self._call(aten.arange.default, length, dtype=torch.int32, device=device)
        return self._call(aten.le.Tensor, keys, places)

    def _at_least_one(self, counts: Node) -> Node:
        one = self._call(aten.full.default, [], 1, dtype=torch.int32, device=counts.meta["val"].device)
        return self._call(aten.maximum.default, counts, one)

    def _counts(self, mask: Node) -> tuple[Node, Node]:
        """Return how many queries and keys each sequence has, for twell.cached_attention."""
        starts, counts, _, length = mask.args
        starts, counts = _as_node(starts), _as_node(counts)
        known = self._at_least_one(self._call(aten.add.Tensor, starts, counts))
        most = self._call(aten.full.default, [], length, dtype=torch.int32, device=starts.meta["val"].device)
        return self._at_least_one(counts), self._call(aten.minimum.default, known, most)

    def _call(self, op: Any, *args: Any, **kwargs: Any) -> Node:
        """Return an operation, which is written once: blocks share equal ones, such as masks."""
        key = f"{op} {args} {kwargs}"
        if key not in self._made:
            self._made[key] = add_call(self._graph, op, *args, like=self._like, **kwargs)
        return self._made[key]

    def _cast(self, node: Node, block: _Block) -> Node:
        dtype = block.q.meta["val"].dtype
        return node if node.meta["val"].dtype == dtype else self._call(aten._to_copy.default, node, dtype=dtype)

    def see(self, node: Node) -> None:
        """Take note of a node before the insertion point: one that computes a size is read for it from there on."""
        if isinstance(node.meta.get("val"), torch.SymInt):
            self._sizes.setdefault(node.meta["val"].node.expr, node)

    def _size(self, node: Node, axis: int) -> Any:
        size = node.meta["val"].shape[axis]
        if isinstance(size, int):
            return size
        if size.node.expr not in self._sizes:
            self._sizes[size.node.expr] = self._call(aten.sym_size.int, node, axis)
        return self._sizes[size.node.expr]

    def _scaled(self, q: Node, scale: float) -> Node:
        """Return the queries times the scale, which is rounded to float32 alone; a power of two needs no casts."""
        if scale == 1.0:
            return q
        dtype = q.meta["val"].dtype
        if math.frexp(scale)[0] == 0.5 or dtype not in _LOW_PRECISION:
            return self._call(aten.mul.Tensor, q, scale)
        wide = self._call(aten._to_copy.default, q, dtype=torch.float32)
        return self._call(aten._to_copy.default, self._call(aten.mul.Tensor, wide, scale), dtype=dtype)

    def _cudnn(self, block: _Block) -> Node:
        if block.mask is not None:
            counts = self._counts(block.mask)
            y = self._call(CACHED_ATTENTION, self._tokens_first(block.q), block.k, block.v, *counts, block.scale)
            return self._call(aten.transpose.int, y, 1, 2)
        q, k, v = (self._tokens_first(each) for each in (block.q, block.k, block.v))
        y = self._call(ATTENTION, q, k, v, None, block.scale, block.causal)
        return self._call(aten.transpose.int, y, 1, 2)

    def _tokens_first(self, node: Node) -> Node:
        """Return [batch, tokens, heads, width] of [batch, heads, tokens, width]."""
        source = _behind(node, *_COPIES)
        if _exchanges_heads_and_tokens(source):
            return _as_node(arguments(source)[0])
        return self._call(aten.transpose.int, node, 1, 2)

    def _operator(self, block: _Block, q: Node) -> Node:
        mask = None if block.mask is None else self._bias(block.mask, block.v.meta["val"].dtype)
        grouped = block.q.meta["val"].shape[1] != block.k.meta["val"].shape[1]
        return self._call(
            aten.scaled_dot_product_attention.default, q, block.k, block.v, mask, 0.0, block.causal,
            scale=1.0, enable_gqa=grouped,
        )  # fmt: skip

    def _matmul(self, block: _Block, q: Node) -> Node:
        batch, heads, queries, width = (self._size(q, axis) for axis in range(4))
        kv_heads = self._size(block.k, 1)
        group = heads // kv_heads
        if kv_heads == 1:  # TensorRT 10.6 fuses no product of one head
            block = replace(block, k=self._repeated(block.k, heads), v=self._repeated(block.v, heads))
            kv_heads, group = heads, 1
        if group > 1:  # the queries of a group are rows of one product
            q = self._call(aten.view.default, self._contiguous(q), [batch, kv_heads, -1, width])
        mask = block.mask if not block.causal else self._causal(q, block)
        scores = self._call(aten.matmul.default, q, self._call(aten.transpose.int, block.k, -1, -2))
        if mask is not None:
            bias = self._bias(mask, q.meta["val"].dtype)
            scores = self._call(aten.add.Tensor, scores, self._for_groups(bias, kv_heads, group, queries))
        weights = self._call(aten._softmax.default, scores, -1, False)
        y = self._call(aten.matmul.default, weights, block.v)
        if group > 1:
            y = self._call(aten.view.default, y, [batch, heads, queries, self._size(block.v, 3)])
        return y

    def _repeated(self, node: Node, heads: int) -> Node:
        """Return keys or values of one head, [batch, 1, keys, width], for all heads."""
        return self._call(aten.expand.default, node, [-1, heads, -1, -1])

    def _contiguous(self, node: Node) -> Node:
        return self._call(aten.clone.default, node, memory_format=torch.contiguous_format)

    def _causal(self, q: Node, block: _Block) -> Node:
        """Return [queries, keys], true where a key's place is not behind the query's."""
        device = block.q.meta["val"].device
        rows, columns = (self._call(aten.arange.default, self._size(each, 2), device=device)
                         for each in (block.q, block.k))  # fmt: skip
        return self._call(aten.le.Tensor, columns, self._call(aten.unsqueeze.default, rows, 1))

    def _bias(self, mask: Node, dtype: torch.dtype) -> Node:
        """Return what to add to the scores: 0, or so low that softmax gives 0 and a row of nothing else is finite."""
        low = torch.finfo(dtype).min / 2  # a score may be added
        value = mask.meta["val"]
        if value.dtype == torch.bool:
            zero, lowest = (self._call(aten.full.default, [], number, dtype=dtype, device=value.device)
                            for number in (0.0, low))  # fmt: skip
            bias = self._call(aten.where.self, mask, zero, lowest)
        else:
            bias = mask if value.dtype == dtype else self._call(aten._to_copy.default, mask, dtype=dtype)
            bias = self._call(aten.clamp.default, bias, low)
        while bias.meta["val"].dim() < 4:
            bias = self._call(aten.unsqueeze.default, bias, 0)
        return bias

    def _for_groups(self, bias: Node, kv_heads: int, group: int, rows: Any) -> Node:
        """Return a bias [batch, heads, queries, keys] for scores [batch, kv_heads, group · queries, keys]."""
        _, heads, queries, _ = bias.meta["val"].shape
        if group == 1 or (heads == 1 and statically_known_true(queries == 1)):
            return bias
        if statically_known_true(queries == 1):  # one row a head: as many as there are queries
            size = [self._size(bias, 0), heads, rows, self._size(bias, 3)]
            bias = self._call(aten.expand.default, bias, size)
        if heads == 1:
            return self._call(aten.repeat.default, bias, [1, 1, group, 1])
        shape = [self._size(bias, 0), kv_heads, -1, self._size(bias, 3)]
        return self._call(aten.view.default, self._contiguous(bias), shape)
