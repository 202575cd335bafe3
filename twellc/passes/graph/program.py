"""Editing an ExportedProgram: a private copy to work on, its constants, and the checks that hold after every pass."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any, TextIO

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from twellc.base.threads import PROCESS_WIDE
from twellc.base.torch_private import (
    FakeTensor,
    compiled_when_run,
    enable_python_dispatcher,
    guards_of,
    pytree,
    set_guards,
)

_LOGGERS = ("torch", "onnx_ir", "onnxscript")
_CONSTANT_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def editable(program: ExportedProgram, functional: bool = False) -> ExportedProgram:
    """Return a copy whose graph, signature and dictionaries can be changed; the tensors themselves are shared.

    Args:
        program: The program.
        functional: Whether the copy is to be verified as a program whose operations write to no tensor.
    """
    graph = copy.deepcopy(program.graph)
    for original, copied in zip(program.graph.nodes, graph.nodes, strict=True):
        # Copying renames what shadows a builtin, such as an argument called `input`; the signature has the old names.
        copied.name = original.name
    with PROCESS_WIDE, compiled_when_run():
        edited = ExportedProgram(
            root=program.graph_module,
            graph=graph,
            graph_signature=copy.deepcopy(program.graph_signature),
            state_dict=dict(program.state_dict),
            range_constraints=dict(program.range_constraints),
            module_call_graph=program.module_call_graph,
            example_inputs=program.example_inputs,
            constants=dict(program.constants),
            verifiers=None if functional else program.verifiers,
        )
    set_guards(edited, list(guards_of(program)))
    return edited


def largest_size(bound: object) -> int | None:
    """Return the largest size that an upper bound of torch allows, such as one of `range_constraints`; None for any."""
    return int(str(bound)) if str(bound).isdigit() else None


def has_inner_graphs(node: Node) -> bool:
    """Whether an operation runs inner graphs, as torch.cond and while_loop do; tensors are placeholders here."""
    return any(operand.op == "get_attr" for operand in node.all_input_nodes)


def stored_tensors(program: ExportedProgram) -> dict[Node, str]:
    """Return the name of the tensor behind each placeholder that holds a parameter, buffer or constant."""
    placeholders = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    return {
        placeholders[spec.arg.name]: str(spec.target)
        for spec in program.graph_signature.input_specs
        if spec.kind in _CONSTANT_KINDS and isinstance(spec.arg, TensorArgument)
    }


def written_tensors(program: ExportedProgram) -> set[str]:
    """Return the names of the parameters and buffers that the program writes to."""
    signature = program.graph_signature
    return {*signature.buffers_to_mutate.values(), *signature.parameters_to_mutate.values()}


def constants_of(program: ExportedProgram) -> dict[Node, str]:
    """Return the stored tensors that the program does not write to."""
    written = written_tensors(program)
    return {node: name for node, name in stored_tensors(program).items() if name not in written}


def tensor_of(program: ExportedProgram, name: str) -> torch.Tensor:
    """Return the parameter, buffer or constant called `name`."""
    tensor = program.state_dict[name] if name in program.state_dict else program.constants[name]
    assert isinstance(tensor, torch.Tensor)
    return tensor


def free_name(name: str, taken: Container[str], mark: str = "_") -> str:
    """Return `name`; if it is taken, with a mark and the least free number from 2 on behind it."""
    numbered = itertools.chain([name], (f"{name}{mark}{number}" for number in itertools.count(2)))
    return next(each for each in numbered if each not in taken)


def add_parameter(
    program: ExportedProgram, name: str, tensor: torch.Tensor, like: Node, kind: InputKind = InputKind.PARAMETER
) -> Node:
    """Add a parameter, or a buffer, called `name` (made unique) that holds `tensor`, right before `like`.

    Args:
        program: The program to change.
        name: The name of the tensor.
        tensor: Its values, which may be on another device: see `PassOptions.device`.
        like: The placeholder of another constant.
        kind: `PARAMETER` or `BUFFER`.
    """
    unique = free_name(name, {*program.state_dict, *program.constants})
    graph = program.graph
    with graph.inserting_before(like):
        node: Node = graph.placeholder("p_" + unique.replace(".", "_"))
    value = like.meta["val"]
    with value.fake_mode:
        node.meta["val"] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=value.device)
    is_buffer = kind == InputKind.BUFFER
    program.state_dict[unique] = tensor if is_buffer else torch.nn.Parameter(tensor, requires_grad=False)
    specs = program.graph_signature.input_specs
    position = next(i for i, spec in enumerate(specs) if spec.arg.name == like.name)
    specs.insert(position, InputSpec(kind, TensorArgument(node.name), unique, is_buffer or None))
    return node


def add_call(graph: Graph, op: Any, *args: Any, like: Node, **kwargs: Any) -> Node:
    """Add an operation, named after itself, at the insertion point of a graph; its metadata is that of `like`."""
    node: Node = graph.create_node("call_function", op, args, kwargs, op.__name__.partition(".")[0])
    node.meta = dict(like.meta)
    infer(node, like.meta["val"])
    return node


def infer(node: Node, *others: Any) -> None:
    """Give a node the value that it has with its operands as they are now.

    Args:
        node: The node.
        others: Values of the same graph; one is needed if the node has no tensor among its operands.
    """
    args, kwargs = map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
    leaves = pytree.tree_leaves((args, kwargs, others))
    modes: list[Any] = [leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor)]
    assert callable(node.target)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if modes:  # the graph of an ONNX file has other tensors
            stack.enter_context(modes[0])
            stack.enter_context(enable_python_dispatcher())
            if modes[0].shape_env is not None:  # torch waits for what names sizes anew that values decide
                stack.enter_context(modes[0].shape_env.ignore_fresh_unbacked_symbols())
        node.meta["val"] = node.target(*args, **kwargs)


def call_key(node: Node) -> str:
    """Return what an operation that looks at no number may know: its target, arguments, and what its operands are like.

    Of two operations with one key, both give the same kind of value.
    """
    operands = node.all_input_nodes
    known: Any = map_arg((node.args, node.kwargs), lambda each: f"{operands.index(each)}: {_kind(each.meta['val'])}")
    return f"{node.target} {known}"


def _kind(value: Any) -> object:
    if isinstance(value, tuple | list):
        return [_kind(each) for each in value]
    if not isinstance(value, torch.Tensor):
        return value
    return value.dtype, value.device, value.layout, value.shape, value.stride(), value.storage_offset()


def replace_node(
    program: ExportedProgram, node: Node, new: Node, where: Callable[[Node], bool] = lambda user: True
) -> None:
    """Let the users of `node` for which `where` holds, the program's outputs among them, read `new`."""
    output = program.graph.output_node()
    if output in node.users and where(output):
        for spec in program.graph_signature.output_specs:
            if spec.arg.name == node.name:
                spec.arg.name = new.name
    node.replace_all_uses_with(new, delete_user_cb=where)


def drop_unused_constants(program: ExportedProgram) -> None:
    """Remove parameters, buffers and constants that no node reads, with their tensors."""
    signature = program.graph_signature
    unused = {node.name: node for node in constants_of(program) if not node.users}
    dropped = {spec.target for spec in signature.input_specs if spec.arg.name in unused}
    signature.input_specs[:] = [spec for spec in signature.input_specs if spec.arg.name not in unused]
    for node in unused.values():
        program.graph.erase_node(node)
    for name in dropped - {spec.target for spec in signature.input_specs}:
        program.state_dict.pop(str(name), None)
        program.constants.pop(str(name), None)


def finish(program: ExportedProgram) -> ExportedProgram:
    """Clean up after a pass and check what must hold: the one exit of every rewriting pass."""
    program.graph.eliminate_dead_code()
    drop_unused_constants(program)
    program.graph_module.recompile()
    verify(program)
    return program


def verify(program: ExportedProgram) -> None:
    """Check the invariants of a program.

    Raises:
        AssertionError, SpecViolationError: A pass has broken the program.
    """
    program.graph.lint()
    program.validate()
    for node, name in constants_of(program).items():
        tensor, fake = tensor_of(program, name), node.meta["val"]
        assert tensor.shape == fake.shape and tensor.dtype == fake.dtype, f"{name}: {tensor.shape} is not {fake.shape}"


def user_inputs(program: ExportedProgram) -> Iterator[Node]:
    """Yield the placeholders of the tensors that a caller passes, in order."""
    names = {
        spec.arg.name
        for spec in program.graph_signature.input_specs
        if spec.kind == InputKind.USER_INPUT and isinstance(spec.arg, TensorArgument)
    }
    yield from (node for node in program.graph.find_nodes(op="placeholder") if node.name in names)


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Keep from the user what torch and its ONNX tools warn of, log and print of a graph: a failure raises, too.

    One thread at a time. Warnings and logs of other threads are lost meanwhile, too, but not what they print.
    """
    with PROCESS_WIDE, contextlib.ExitStack() as restored:
        for log in map(logging.getLogger, _LOGGERS):
            restored.callback(log.setLevel, log.level)
            log.setLevel(logging.CRITICAL)
        restored.enter_context(warnings.catch_warnings())
        restored.enter_context(redirect_stderr(_OtherThreads(sys.stderr)))
        warnings.simplefilter("ignore")
        yield


class _OtherThreads(io.TextIOBase):
    """Writes what other threads than this one print."""

    def __init__(self, stream: TextIO) -> None:
        self._thread, self._stream = threading.get_ident(), stream

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def flush(self) -> None:
        if threading.get_ident() != self._thread:
            self._stream.flush()
