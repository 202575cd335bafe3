"""Change the floating-point precision of a whole program.

`lower` turns a program into a strongly typed bfloat16 or float16 one, by the policy of torch's autocast: products run
in the low precision, reductions and transcendental functions in float32, everything else in the widest dtype of its
operands. Parameters are stored in the low precision, buffers (rotary frequencies, masks) stay as they are, except for
those that hold weights, and the inputs and outputs of the program keep their dtypes. Thresholds, constants that
something is only compared with, and comparisons with them stay in float32: rounding would turn neurons on and off.
So does what experts, as the op that computes them, read in float32.
Values computed from buffers and integers alone are not data of the model: their products stay as they are, too, such as
rotary angles, which would be wrong by whole turns.

    x: f32 ─ linear(W: f32) ─ layer_norm ─ y: f32
    x: f32 ─ cast bf16 ─ linear(W: bf16) ─ cast f32 ─ layer_norm(f32) ─ y: f32

`widen` turns every float of a program, inputs and outputs included, into float64: the reference of `twellc check`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate, map_arg

from twellc.base.errors import UserError, first_line
from twellc.base.torch_private import FakeTensor, OpOverload, pytree, schema_of
from twellc.base.transformers_private import grouped_product_op
from twellc.passes.fold_weights import is_view, sources_of
from twellc.passes.graph.constants import fixed_nodes
from twellc.passes.graph.program import (
    add_call,
    call_key,
    constants_of,
    editable,
    finish,
    has_inner_graphs,
    infer,
    quiet_torch,
    replace_node,
    stored_tensors,
    tensor_of,
    user_inputs,
)
from twellc.passes.match.activations import arguments, compared_in, constant_number, is_squared_relu, packet
from twellc.passes.match.linear import PRODUCTS, LinearReader, is_grouped, same_sizes
from twellc.passes.match.norm import write_eps
from twellc.plugins.experts_op import EXPERTS, FLOAT32
from twellc.plugins.fp8 import E4M3

aten = torch.ops.aten

_LOW_PRECISION_OPS = PRODUCTS | frozenset(
    (
        aten.addbmm, aten.mv, aten.conv_transpose1d, aten.conv_transpose2d, aten.conv_transpose3d, aten.lstm, aten.gru,
        aten.rnn_tanh, aten.rnn_relu, aten.scaled_dot_product_attention,
    )
)  # fmt: skip
_FLOAT32_OPS = frozenset(
    (
        aten.pow, aten.rsqrt, aten.sqrt, aten.exp, aten.log, aten.mean, aten.sum, aten.var, aten.std, aten.cumsum,
        aten.softmax, aten._softmax, aten.log_softmax, aten._log_softmax, aten.logsumexp, aten.norm,
        aten.linalg_vector_norm, aten.layer_norm, aten.native_layer_norm, aten.group_norm, aten.batch_norm,
        aten._native_batch_norm_legit_no_training, aten.instance_norm, aten.rms_norm, aten.sin, aten.cos,
        aten.reciprocal, aten.view_as_complex, aten.complex, aten.polar,  # complex numbers have no bfloat16
    )
)  # fmt: skip
# Operators that bring operands of several dtypes to the widest by themselves: these and the elementwise ones, but two.
_PROMOTING_OPS = frozenset((aten.cat, aten.stack, aten.where, aten.masked_fill))
_NOT_PROMOTING_OPS = frozenset((aten.lerp, aten.heaviside))
_COMPARISONS = frozenset((aten.gt, aten.ge, aten.lt, aten.le))
# Their numbers become elements of the result, so these must fit: masks are filled with the least float32, for example.
_FILLING_OPS = frozenset((aten.masked_fill, aten.where, aten.clamp, aten.clamp_min, aten.clamp_max, aten.full_like))
# They take the shape of their operand, not its values.
_SHAPED_LIKE = frozenset(
    (aten.zeros_like, aten.ones_like, aten.full_like, aten.new_zeros, aten.new_ones, aten.new_full)
)  # fmt: skip


def parameter_dtypes(program: ExportedProgram) -> set[torch.dtype]:
    """Return the floating-point dtypes of the parameters that the graph reads; if there are none, of other weights.

    Thresholds are not looked at.
    """
    kept = {*_thresholds(program).values(), *_kept_by_experts(program)}
    parameters = set(program.graph_signature.parameters) - kept
    dtypes = {tensor_of(program, name).dtype for name in constants_of(program).values() if name in parameters}
    if not any(dtype.is_floating_point for dtype in dtypes):
        data = _data(program)
        operands = {operand for node in data if packet(node) in PRODUCTS for operand in node.all_input_nodes} - data
        dtypes = {_viewed(operand).meta["val"].dtype for operand in operands if _has_floats(operand)}
    return {dtype for dtype in dtypes if dtype.is_floating_point}


def in_precision(program: ExportedProgram, dtype: torch.dtype) -> ExportedProgram:
    """Return the program lowered to `dtype`; itself where its parameters are in that already. See `lower`."""
    return lower(program, dtype) if parameter_dtypes(program) - {dtype} else program


@quiet_torch()
def lower(program: ExportedProgram, dtype: torch.dtype) -> ExportedProgram:
    """Return the program with its parameters and products in `dtype`, bfloat16 or float16.

    Raises:
        UserError: A parameter does not fit into `dtype`, or an operation has no form in it.
    """
    program = editable(program)
    explicit = {torch.float64: torch.float32, torch.bfloat16: dtype, torch.float16: dtype}
    outputs = [node.meta["val"].dtype for node in _output_tensors(program)]
    data = _data(program)
    thresholds, wide = _thresholds(program), _wide_comparisons(program, dtype)
    lowered = set(program.graph_signature.parameters).difference(thresholds.values()) | _weights(program, data)
    _convert_stored(program, lowered - _kept_by_experts(program), dtype)
    _round_thresholds(program, thresholds)
    caster, known = _Caster(program.graph), dict[str, Any]()
    for node in list(program.graph.nodes):
        if node.op != "call_function":
            continue
        _name_grouped(node)
        op = packet(node)
        if node.target is EXPERTS:
            _cast_for_experts(node, dtype, caster)
            _infer_again(node, known)
            continue
        wanted = torch.float32 if op in _FLOAT32_OPS else None if _promotes(node) else _widest(node)
        if (op in _LOW_PRECISION_OPS or is_grouped(node)) and node in data:
            wanted = dtype
        if node in wide:
            wanted = torch.float32
            _write_bound(node)
        if op is aten.pow and is_squared_relu(node):
            wanted = None  # squared and rounded once, like `square` and like the op that may replace it
        if wanted is not None:
            caster.cast_operands(node, wanted)
        _replace_explicit_dtypes(node, explicit)
        _infer_again(node, known)
        if op in _FILLING_OPS:
            _fit_numbers(node)
    output = program.graph.output_node()
    for source, original in zip(_output_tensors(program), outputs, strict=True):
        if source.meta["val"].dtype != original:
            cast = caster.cast(source, original, before=output)
            output.replace_input_with(source, cast)
            for spec in program.graph_signature.output_specs:
                if spec.arg.name == source.name:
                    spec.arg.name = cast.name
    return finish(program)


@quiet_torch()
def round_numbers(program: ExportedProgram) -> ExportedProgram:
    """Return a lowered program with the numbers that it computes with, also where it is widened.

    Kernels of low precision read the numbers among their arguments, such as a norm's eps, in float32, and those that a
    tensor is compared with in its dtype. So do the nodes that stand for blocks. Thresholds in float64 become float32.
    """
    program = editable(program)
    _round_thresholds(program, _thresholds(program))
    data = _data(program)
    for node in list(program.graph.nodes):
        if packet(node) in _COMPARISONS:
            _round_bounds(node)
        elif node.op == "call_function" and node in data:
            node.args, node.kwargs = map_aggregate((node.args, node.kwargs), _in_float32)
    return finish(program)


def _in_float32(argument: Any) -> Any:
    """Return a number as float32 has it, if it has it."""
    if not isinstance(argument, float):
        return argument
    rounded = torch.tensor(argument, dtype=torch.float64).float().item()
    return rounded if math.isfinite(rounded) else argument


def _round_bounds(node: Node) -> None:
    """Round the number that a tensor is compared with, which may fill another tensor."""
    operands = arguments(node)
    for index, (bound, x) in enumerate((operands, operands[::-1])):
        number = constant_number(bound)
        if number is None or not isinstance(x, Node) or not _has_floats(x):
            continue
        rounded = _in_float32(torch.tensor(number, dtype=torch.float64).to(compared_in(x, bound)).item())
        if isinstance(bound, Node):
            if not same_sizes(node.meta["val"].shape, x.meta["val"].shape):
                continue
            with node.graph.inserting_before(node):
                rounded = add_call(node.graph, aten.full_like.default, x, rounded, like=x)
        node.update_arg(index, rounded)


@quiet_torch()
def widen(program: ExportedProgram) -> ExportedProgram:
    """Return the program in float64 throughout, inputs and outputs included."""
    program = editable(program)
    for node in program.graph.nodes:
        write_eps(node)
    explicit = dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float64)
    explicit[torch.complex64] = torch.complex128
    _convert_stored(program, set(stored_tensors(program).values()) - _kept_by_experts(program), torch.float64)
    for node in user_inputs(program):
        if node.meta["val"].dtype.is_floating_point:
            node.meta["val"] = node.meta["val"].to(torch.float64)
    caster, known = _Caster(program.graph), dict[str, Any]()
    for node in list(program.graph.nodes):
        if node.op == "call_function":
            _name_grouped(node)
            if node.target is EXPERTS:
                _cast_for_experts(node, torch.float64, caster)
            _replace_explicit_dtypes(node, explicit)
            _infer_again(node, known)
            if getattr(node.meta.get("val"), "dtype", None) == torch.float32:
                _widen_result(program, node, caster, known)
    return finish(program)


def _widen_result(program: ExportedProgram, node: Node, caster: _Caster, known: dict[str, Any]) -> None:
    """Make a result float64 whose dtype is not that of an operand: it is made of nothing, or of integers."""
    operator = node.target
    if isinstance(operator, OpOverload) and any(a.name == "dtype" for a in schema_of(operator).arguments):
        node.kwargs = {**node.kwargs, "dtype": torch.float64}
        _infer_again(node, known)
    else:
        cast = caster.cast(node, torch.float64, before=node)
        replace_node(program, node, cast, where=lambda user: user is not cast)


class _Caster:
    """Inserts casts, one for each pair of source and dtype."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._casts: dict[tuple[Node, torch.dtype], Node] = {}

    def cast(self, source: Node, dtype: torch.dtype, before: Node) -> Node:
        """Return `source` cast to `dtype`, right behind `source` so that later users can share it."""
        key = (source, dtype)
        if key not in self._casts:
            anchor = source if source.op != "placeholder" else list(self._graph.find_nodes(op="placeholder"))[-1]
            with self._graph.inserting_after(anchor):
                cast = add_call(self._graph, aten._to_copy.default, source, dtype=dtype, like=source)
            cast.meta = {**before.meta, "val": cast.meta["val"]}
            self._casts[key] = cast
        return self._casts[key]

    def cast_operands(self, node: Node, dtype: torch.dtype) -> None:
        """Cast every floating-point tensor operand of `node` to `dtype`."""

        def convert(operand: Node) -> Node:
            value = operand.meta.get("val")
            if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype == dtype:
                return operand
            return self.cast(operand, dtype, before=node)

        node.args, node.kwargs = map_arg((node.args, node.kwargs), convert)


def _cast_for_experts(node: Node, dtype: torch.dtype, caster: _Caster) -> None:
    """Cast what experts read to `dtype`, or to float32 where their op takes that alone; FP8 stays."""
    for name, operand in _tensors_of_experts(node).items():
        given: torch.dtype = operand.meta["val"].dtype
        wanted = torch.float32 if name in FLOAT32 else dtype
        if given.is_floating_point and given not in (E4M3, wanted):
            node.replace_input_with(operand, caster.cast(operand, wanted, before=node))


def _kept_by_experts(program: ExportedProgram) -> set[str]:
    """Return the names of the constants that experts read in FP8, or in float32 whatever type x has.

    Nodes computed from them alone, such as views, may read them.
    """
    names, calls = constants_of(program), program.graph.find_nodes(op="call_function", target=EXPERTS)
    fixed = fixed_nodes(program.graph, names)
    tensors = [pair for node in calls for pair in _tensors_of_experts(node).items()]
    kept = [operand for name, operand in tensors if name in FLOAT32 or operand.meta["val"].dtype == E4M3]
    return {names[source] for each in kept if each in fixed for source in sources_of(each) if source in names}


def _tensors_of_experts(node: Node) -> dict[str, Node]:
    """Return the tensors that a call of the op is given, by name."""
    names = [each.name for each in schema_of(EXPERTS).arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return {name: value for name, value in given.items() if isinstance(value, Node)}


def _data(program: ExportedProgram) -> set[Node]:
    """Return the nodes whose floats derive from parameters, floating-point inputs or embeddings."""
    parameters = set(program.graph_signature.parameters)
    found = {node for node, name in constants_of(program).items() if name in parameters} | set(user_inputs(program))
    found = {node for node in found if _has_floats(node)}
    for node in program.graph.nodes:
        derives = packet(node) is aten.embedding or not found.isdisjoint(node.all_input_nodes)
        if derives and packet(node) not in _SHAPED_LIKE and _has_floats(node):
            found.add(node)
    return found


def _weights(program: ExportedProgram, data: set[Node]) -> set[str]:
    """Return the names of the constants that only products with data read, or that are added to one as its bias."""
    constants = constants_of(program)
    reader = LinearReader(constants)

    def only_weighs(node: Node, constant: Node) -> bool:
        return all(
            only_weighs(user, constant) if is_view(user) else user in data and is_weight_of(node, user, constant)
            for user in node.users
        )

    def is_weight_of(node: Node, user: Node, constant: Node) -> bool:
        linear = reader.linear(user)
        if linear is not None and linear.bias is not None and linear.bias.node is constant:
            return True
        # What these add to a product may be a mask.
        adds = packet(user) in (aten.addmm, aten.baddbmm) and arguments(user)[0] is node
        return packet(user) in PRODUCTS and not adds

    return {name for node, name in constants.items() if only_weighs(node, node)}


def _thresholds(program: ExportedProgram) -> dict[Node, str]:
    """Return the constants that are only compared with, also through nodes computed from them alone."""
    constants = constants_of(program)
    fixed = fixed_nodes(program.graph, constants)

    def only_compares(node: Node) -> bool:
        return bool(node.users) and all(
            only_compares(user) if user in fixed else packet(user) in _COMPARISONS for user in node.users
        )

    return {node: name for node, name in constants.items() if _has_floats(node) and only_compares(node)}


def _round_thresholds(program: ExportedProgram, thresholds: dict[Node, str]) -> None:
    """Store those in float64 as float32."""
    stored = {name for name in thresholds.values() if tensor_of(program, name).dtype == torch.float64}
    _convert_stored(program, stored, torch.float32)


def _wide_comparisons(program: ExportedProgram, dtype: torch.dtype) -> set[Node]:
    """Return the comparisons in more than 16 bits with constants, or with numbers that `dtype` rounds."""
    fixed = fixed_nodes(program.graph, constants_of(program))

    def is_rounded(bound: object) -> bool:
        number = constant_number(bound)
        if number is None:
            return isinstance(bound, Node) and bound in fixed
        return float(torch.tensor(number, dtype=torch.float64).to(dtype)) != number

    return {
        node
        for node in program.graph.nodes
        if packet(node) in _COMPARISONS
        and _widest(node) in (torch.float32, torch.float64)
        and any(map(is_rounded, arguments(node)))
    }


def _write_bound(node: Node) -> None:
    """Write a number that fills what a tensor is compared with as the number, which the tensor's dtype would round."""
    x, bound = arguments(node)
    number = constant_number(bound)
    if isinstance(bound, Node) and number is not None and same_sizes(x.meta["val"].shape, node.meta["val"].shape):
        node.target, node.args = packet(node).Scalar, (x, number)


def _viewed(node: Node) -> Node:
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def _has_floats(node: Node) -> bool:
    results = pytree.tree_leaves(node.meta.get("val"))
    return any(isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()) for leaf in results)


def _convert_stored(program: ExportedProgram, names: set[str], dtype: torch.dtype) -> None:
    for node, name in stored_tensors(program).items():
        tensor = tensor_of(program, name)
        if name not in names or not tensor.is_floating_point() or tensor.dtype == dtype:
            continue
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        where = f"{'parameter' if is_parameter else 'buffer'} {name.removesuffix('_folded')}"
        converted = convert(tensor.detach(), dtype, where)
        if is_parameter:
            converted = torch.nn.Parameter(converted, requires_grad=False)
        (program.state_dict if name in program.state_dict else program.constants)[name] = converted
        node.meta["val"] = node.meta["val"].to(dtype)


def convert(tensor: torch.Tensor, dtype: torch.dtype, where: str) -> torch.Tensor:
    """Return a constant in another dtype.

    Raises:
        UserError: Its values do not fit into float16; the message says `where` they stand.
    """
    converted = tensor.to(dtype)
    if dtype == torch.float16 and not torch.equal(converted.isfinite(), tensor.isfinite()):
        raise UserError(where, "its values overflow float16", expected="at most 65504", fix="Use --dtype bf16.")
    return converted


def _promotes(node: Node) -> bool:
    op = packet(node)
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return op in _PROMOTING_OPS or (pointwise and op not in _NOT_PROMOTING_OPS)


def _widest(node: Node) -> torch.dtype | None:
    """Return the widest floating-point dtype of the operands; a tensor without dimensions widens none that has some."""
    values = [operand.meta.get("val") for operand in node.all_input_nodes]
    floats = [value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]
    dtypes = [value.dtype for value in floats if value.dim()] or [value.dtype for value in floats]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else None


def _output_tensors(program: ExportedProgram) -> list[Node]:
    names = [spec.arg.name for spec in program.graph_signature.output_specs]
    nodes = {node.name: node for node in program.graph.nodes}
    return [
        nodes[name]
        for name in dict.fromkeys(names)
        if name in nodes and isinstance(nodes[name].meta.get("val"), torch.Tensor)
    ]


def _replace_explicit_dtypes(node: Node, replacement: dict[torch.dtype, torch.dtype]) -> None:
    def replace(argument: Any) -> Any:
        return replacement.get(argument, argument) if isinstance(argument, torch.dtype) else argument

    node.args, node.kwargs = map_aggregate((node.args, node.kwargs), replace)


def _name_grouped(node: Node) -> None:
    """Write torch's grouped product, which shapes are known of in bfloat16 alone, as the op of transformers."""
    if packet(node) is aten._grouped_mm:
        given = (*arguments(node), *node.kwargs.values())
        if [each.meta["val"].dim() for each in given[:2]] == [2, 3] and not any(given[3:]):
            node.target, node.args, node.kwargs = grouped_product_op(), given[:3], {}


def _fit_numbers(node: Node) -> None:
    """Bring finite numbers among the arguments into the range of the result's dtype."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return  # where(condition) gives a list of indices
    largest = torch.finfo(value.dtype).max

    def fit(argument: Any) -> Any:
        is_finite = isinstance(argument, float) and math.isfinite(argument)
        return max(-largest, min(argument, largest)) if is_finite else argument

    node.args, node.kwargs = map_aggregate((node.args, node.kwargs), fit)


def _infer_again(node: Node, known: dict[str, Any]) -> None:
    """Recompute the dtype of the node's result from its operands; shapes cannot have changed.

    Args:
        node: The node.
        known: Results by `call_key`, which are added to: layers are alike, and running one on shapes takes long.
    """
    value = node.meta.get("val")
    results = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, FakeTensor)]
    if not any(result.is_floating_point() or result.is_complex() for result in results):
        return
    if node.target is aten.view.default:
        # Kernels of another precision may lay their results out differently (attention does): a view may need a copy.
        node.target = aten.reshape.default
    try:
        key = call_key(node)
        if key not in known:
            infer(node, value)
            known[key] = node.meta["val"]
    except (RuntimeError, TypeError, KeyError) as error:
        why = "it has inner graphs" if has_inner_graphs(node) else first_line(error)
        what = f"cannot change its precision ({why})"
        fix = "Export the model in bfloat16 or float16."
        raise UserError(f"operation {node.name} ({node.target})", what, fix=fix) from error
    node.meta["val"] = pytree.tree_map(_with_sizes_of, value, known[key])


def _with_sizes_of(before: Any, now: Any) -> Any:
    """Return what an operation gives now, in the sizes from before: those that values decide, it names anew."""
    same = not isinstance(before, torch.Tensor) or str(before.shape) == str(now.shape)
    return now if same else before.to(now.dtype)
