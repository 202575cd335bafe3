"""Find the feed-forward blocks of an eager module, by tracing parts of it alone.

A block is a submodule of its own, which computes nothing else, or it is *written out* in a larger one: a module that
holds the linear layers of a plain block as its children, and calls them in its forward besides attention and norms, as
in OPT and BART.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.fx import Node
from torch.nn.modules.module import _has_any_global_hook

from twellc.base.errors import first_line
from twellc.eager.hidden import STEPS, Hidden, holds_hidden, real
from twellc.eager.sharded import local_twin
from twellc.eager.training_block import BlendedActivation, as_relu
from twellc.passes.graph.program import quiet_torch, user_inputs, written_tensors
from twellc.passes.match.activations import packet
from twellc.passes.match.find_ffn import FfnBlock
from twellc.passes.match.linear import Weight, strip
from twellc.passes.pipeline import Passed, PassOptions, Stage, run_until
from twellc.passes.rewrite_ffn import weights_of
from twellc.plugins.block import TensorField, WeightOperands

_LOG = logging.getLogger("twellc")
# Leading dimensions to trace with: sizes that differ, and from which torch.export keeps a dimension dynamic.
_LEADING = (2, 3)

aten = torch.ops.aten


@dataclass(frozen=True)
class Operand:
    """A weight or bias: the path of its parameter, and which view of it the op reads."""

    path: tuple[str, ...]
    transposed: bool = False
    rows: tuple[int, int, int] | None = None

    def parameter(self, module: nn.Module) -> nn.Parameter | None:
        """Return the parameter if `module` holds it itself, not through what was put in a submodule's place."""
        for name in self.path[:-1]:
            inner = module._modules.get(name)
            if inner is None:
                return None
            module = inner
        return module._parameters.get(self.path[-1])

    def tensor(self, module: nn.Module) -> Tensor | None:
        """Return the parameter, or the plain tensor that FSDP puts in its place for a forward; None for other kinds."""
        for name in self.path[:-1]:
            module = module.get_submodule(name)
        held = getattr(module, self.path[-1], None)
        return held if type(held) in (Tensor, nn.Parameter) else None

    def view(self, parameter: Tensor) -> Tensor:
        """Return the matrix that the op reads: [d_ff, d_model], or w_down [d_ff, d_out]; of a bias the vector."""
        matrix = parameter.t() if self.transposed else parameter
        return matrix if self.rows is None else matrix[slice(*self.rows)]


class Taken(nn.Module):
    """Mixed into the classes of modules that `twellc.optimize` has taken."""


@dataclass(frozen=True)
class WrittenOut:
    """A block that a module computes besides other things.

    Attributes:
        path: Of the module.
        module: The module.
        block: What the matcher found; its `module` is the path, of a module's second block that of its first layer.
        weights: Where its weights are in the module: in linear layers that are its children; None where it is refused.
        inputs: What its module was traced with: x, and other arguments by name.
    """

    path: str
    module: nn.Module
    block: FfnBlock
    weights: WeightOperands[Operand] | None
    inputs: tuple[Tensor, dict[str, Any]]


def find_modules(
    module: nn.Module, ranks: tuple[int, ...] = (3, 2), *, training: bool = False
) -> Iterator[tuple[str, nn.Module, FfnBlock, tuple[int, ...]]]:
    """Yield the largest submodules that are one block, refused ones too: their paths, and which `ranks` x may have.

    Args:
        module: Where to look.
        ranks: Numbers of dimensions of x to try.
        training: Whether in training mode.
    """
    taken: list[str] = []
    for path, submodule in module.named_modules():
        if any(outer == "" or path.startswith(f"{outer}.") for outer in taken):
            continue
        if isinstance(submodule, Taken):
            taken.append(path)
            continue
        own = submodule if training else local_twin(submodule) or submodule
        if not _may_be_block(own):
            continue
        found = {rank: block for rank in ranks if (block := _block_of(path, own, rank, training)) is not None}
        if found:
            taken.append(path)
            first = next(iter(found.values()))
            same = [rank for rank, block in found.items() if _meaning(block) == _meaning(first)]
            yield path, submodule, first, tuple(same)


def find_written_out(module: nn.Module, without: Collection[str], *, training: bool = False) -> Iterator[WrittenOut]:
    """Yield the blocks that modules compute besides other things, refused ones too.

    Args:
        module: Where to look.
        without: Paths of submodules not to look into.
        training: Whether in training mode.
    """
    outside = [*without]
    for path, submodule in module.named_modules():
        if any(outer in ("", path) or path.startswith(f"{outer}.") for outer in outside):
            continue
        if isinstance(submodule, Taken):
            outside.append(path)
            continue
        yield from _written_out_in(path, submodule, training=training)


def _written_out_in(path: str, module: nn.Module, *, training: bool) -> list[WrittenOut]:
    """Return the blocks that a module computes besides other things, by linear layers that are its children."""
    if isinstance(module, torch.jit.ScriptModule) or "forward" in vars(module) or _has_own_copy(module):
        return []
    linears: dict[str, Any] = {name: child for name, child in module.named_children() if _is_linear(child)}
    if not _may_hold_block(module, linears.values()):
        return []
    traced = next(trace_alone(path, module, 3, training=training, alone=False), None)
    found: list[WrittenOut] = []
    if traced:
        (x,), others = traced.program.example_inputs
    for block in traced.blocks if traced else ():
        weights = operands_of(module, block)
        read = [".".join(each.path) for each in weights.named().values()] if weights else [block.down.weight.name]
        is_second_call = weights is not None and any(weights == each.weights for each in found)
        if {name.rpartition(".")[0] for name in read} <= linears.keys() and not is_second_call:
            name = f"{path}.{_first_layer(block)}".lstrip(".") if found else path
            block = replace(block, module=name)
            found.append(WrittenOut(path, module, block, weights, (x, others)))
    return found


def refusal_of(block: FfnBlock) -> str:
    """Say why the op cannot run a block that is written out in a larger module; empty where it can."""
    if block.refusal or block.up is None:
        return block.refusal
    if block.gate is not None:
        return "it is written out in a larger module, with a gate"
    # Dropout in eval mode is a clone.
    names = tuple(str(packet(node)).rpartition(".")[2] for node in between(block) if packet(node) is not aten.clone)
    if names == STEPS.get(block.activation):
        return ""
    found = ", ".join(names) or "nothing"
    return f"it is written out in a larger module, with {found} between its projections, not relu or its square alone"


def hands_on(written: WrittenOut, *, training: bool) -> bool:
    """Whether what stands for the hidden tensor reaches the down projection: not all functions take what is no tensor.

    Args:
        written: A block that is not refused.
        training: Whether in training mode.
    """
    assert written.weights is not None
    module = written.module
    up, down = (module._modules[each.path[0]] for each in (written.weights.w_up, written.weights.w_down))
    assert isinstance(up, nn.Linear) and isinstance(down, nn.Linear)
    received: list[Hidden] = []

    def put_off(x: Tensor) -> Hidden:
        return Hidden(lambda: nn.Linear.forward(up, x), lambda _: None, down, written.block.activation, False)

    def receive(hidden: Any) -> Tensor:
        if isinstance(hidden, Hidden) and hidden.is_whole(down):
            received.append(hidden)
        return nn.Linear.forward(down, real(hidden))

    own = module.forward

    @functools.wraps(own)
    def forward(*arguments: Any, **named: Any) -> Any:
        return real(own(*arguments, **named))

    module.forward, up.forward, down.forward = forward, put_off, receive  # type: ignore[method-assign, assignment]
    try:
        with quiet_torch(), torch.no_grad(), _scripts_refuse_hidden():
            _traced(module, *written.inputs, training)
    except Exception as error:  # of the module's code
        _LOG.debug("%s takes only a tensor between its projections: %s", written.path, first_line(error))
        return False
    finally:
        del module.forward, up.forward, down.forward
    return bool(received)


def own_gradient(module: nn.Module, x: Tensor, others: dict[str, Any], projections: tuple[str, ...] = ()) -> str:
    """Return the name of a torch.autograd.Function that a module calls; empty where there is none.

    A trace has its forward alone: the ops would compute another gradient. Those of torch, as of checkpoints, are known.

    Args:
        module: The module, in training.
        x: What it is called with.
        others: Other arguments, by name.
        projections: Names of two layers of it between which to look; without them in all of it.
    """
    seen: set[Any] = set()
    waiting: list[Any] = []
    hooks = []
    if projections:
        up, down = map(module.get_submodule, projections)
        hooks += [up.register_forward_hook(lambda _, __, result: seen.add(result.grad_fn))]
        hooks += [down.register_forward_pre_hook(lambda _, given: waiting.append(given[0].grad_fn))]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.enable_grad(), _in_mode(module, True):
            named = {name: each if each is None else fake.from_tensor(each) for name, each in others.items()}
            result = module(fake.from_tensor(x), **named)
            waiting += [] if projections else [result.grad_fn]
    except Exception as error:  # of the module's code
        _LOG.debug("what has a gradient that is not torch's is not known: %s", first_line(error))
    finally:
        for hook in hooks:
            hook.remove()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        function = getattr(node, "_forward_cls", None)
        if function is not None and not function.__module__.startswith("torch."):
            return str(function.__qualname__)
    return ""


@contextmanager
def _scripts_refuse_hidden() -> Iterator[None]:
    """Let functions of torch.jit.script refuse what is no tensor also in a trace, where they run as Python."""
    kind: Any = torch.jit.ScriptFunction
    call = kind.__call__

    def refusing(function: Any, *arguments: Any, **named: Any) -> Any:
        if holds_hidden([*arguments, *named.values()]):
            raise TypeError(f"{function.name} is a function of torch.jit.script")
        return call(function, *arguments, **named)

    kind.__call__ = refusing
    try:
        yield
    finally:
        kind.__call__ = call


def between(block: FfnBlock) -> list[Node]:
    """Return what is computed between the first and the down projection of a block: its activation, or other things."""
    first = block.gate or block.up
    assert first is not None
    nodes = list(block.down.node.graph.nodes)
    return nodes[nodes.index(first.node) + 1 : nodes.index(block.down.node)]


def drops(block: FfnBlock) -> bool:
    """Whether dropout that is switched on stands inside of a block."""
    has_first = block.gate is not None or block.up is not None
    return has_first and any(packet(node) is aten.native_dropout for node in between(block))


def functions_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the children of a module that have no parameters, such as activations and dropout, by name."""
    children = module.named_children()
    return {
        name: child
        for name, child in children
        if isinstance(child, BlendedActivation) or not [*child.parameters(), *child.children()]
    }


def _is_linear(module: nn.Module) -> bool:
    """Whether it is torch's own linear layer, whose weight and forward are not what something else has put there."""
    return (
        type(module) is nn.Linear
        and all(type(each) is nn.Parameter and each.is_floating_point() for each in module.parameters())
        and "weight" in module._parameters
        and "forward" not in vars(module)
    )


def _may_hold_block(module: nn.Module, linears: Collection[nn.Linear]) -> bool:
    """Whether two linear layers may follow each other, perhaps with an activation between them, and none has a hook."""
    functions = functions_of(module).values()
    wide = any(up.out_features == down.in_features > up.in_features for up in linears for down in linears)
    return len(linears) > 1 and (wide or bool(functions)) and not any(map(has_hooks, (*linears, *functions)))


def has_hooks(module: nn.Module) -> bool:
    """Whether something looks into its forward or backward."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def has_global_hooks() -> bool:
    """Whether something looks into the forward or backward of all modules."""
    return bool(_has_any_global_hook())  # type: ignore[no-untyped-call]


def _first_layer(block: FfnBlock) -> str:
    first = block.gate or block.up or block.down
    return first.weight.name.rpartition(".")[0]


def blocks_at(path: str, module: nn.Module) -> list[FfnBlock]:
    """Return the blocks that the ops compute, in eval mode: the one that a module is, or those written out in it."""
    found = [_block_of(path, module, rank, training=False) for rank in (3, 2)] if _may_be_block(module) else []
    whole = [block for block in found if block is not None and operands_of(module, block) is not None]
    if whole:
        return whole[:1]
    return [
        each.block
        for each in _written_out_in(path, module, training=False)
        if not refusal_of(each.block) and each.weights is not None
    ]


def _meaning(block: FfnBlock) -> tuple[object, ...]:
    parts = [
        (weight.name, weight.in_out, weight.rows)
        for linear in (block.gate, block.up, block.down)
        if linear is not None
        for weight in (linear.weight, linear.bias)
        if weight is not None
    ]
    return block.variant, block.activation, block.threshold, block.refusal, *parts


def _may_be_block(module: nn.Module) -> bool:
    """Whether it has two or three matrices and otherwise only vectors, and nothing that looks into it."""
    parameters = list(module.parameters())
    matrices = [parameter for parameter in parameters if parameter.dim() == 2]
    return (
        len(matrices) in (2, 3)
        and len(parameters) <= 6
        and all(type(parameter) is nn.Parameter and parameter.dim() in (1, 2) for parameter in parameters)
        and all(parameter.is_floating_point() for parameter in parameters)
        and len({(parameter.dtype, parameter.device) for parameter in parameters}) == 1
        and not isinstance(module, torch.jit.ScriptModule)
        and "forward" not in vars(module)
        and not _has_own_copy(module)
        and not any(map(has_hooks, module.modules()))
    )


def _has_own_copy(module: nn.Module) -> bool:
    """Whether its class says itself how it is copied and pickled."""
    kind = type(module)
    return kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__


def _block_of(path: str, module: nn.Module, rank: int, training: bool) -> FfnBlock | None:
    """Return the block that a module is, with x of `rank` dimensions."""
    for found in trace_alone(path, module, rank, training=training):
        program, blocks = found.program, found.blocks
        outputs = program.graph.output_node().args[0]
        inputs = list(user_inputs(program))
        if len(inputs) == len(outputs) == len(blocks) == 1 and not written_tensors(program):
            return blocks[0] if _is_all(blocks[0], inputs[0], outputs[0]) else None
    return None


def trace_alone(
    path: str, module: nn.Module, rank: int, *, training: bool = False, alone: bool = True
) -> Iterator[Passed]:
    """Trace a module alone, with x of each of the widths of its weights; yield what it computes, with its blocks.

    Args:
        path: Its path, for the log.
        module: The module.
        rank: The number of dimensions of x.
        training: Whether in training mode.
        alone: Whether x is all that its forward takes. Else other arguments that it needs are None, or as x is.
    """
    parameters = list(module.parameters())
    # The widths of Linear's inputs first.
    widths = [p.shape[-1] for p in parameters if p.dim() == 2] + [p.shape[0] for p in parameters if p.dim() == 2]
    needed = [] if alone else _needed(module)
    for width in dict.fromkeys(widths):
        sizes = (*_LEADING[: rank - 1], width)
        x = torch.zeros(sizes, dtype=parameters[0].dtype, device=parameters[0].device)
        choices: list[dict[str, Any]] = [dict.fromkeys(needed)]
        choices += [{name: torch.zeros_like(x) for name in needed}] * bool(needed)
        for others in choices:
            try:
                with quiet_torch(), torch.no_grad():
                    found = run_until(_traced(module, x, others, training), PassOptions(), Stage.FIND)
            except Exception as error:  # torch.export raises what the module's code raises
                _LOG.debug("%s is not traced with x of width %d: %s", path, width, first_line(error))
            else:
                yield found


def _traced(module: nn.Module, x: Tensor, others: dict[str, Any], training: bool) -> ExportedProgram:
    """Trace a module; sizes but those of the last dimensions are dynamic."""
    shapes: Any = ShapesCollection()  # type: ignore[no-untyped-call]
    for each in (x, *others.values()):
        if each is not None:
            shapes[each] = dict.fromkeys(range(each.dim() - 1), Dim.DYNAMIC)
    with _in_mode(module, training), _traceable(module):
        return torch.export.export(module, (x,), others, dynamic_shapes=shapes, strict=False)


def _needed(module: nn.Module) -> list[str]:
    """Return which arguments besides the first a module's forward cannot do without."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    taken = list(inspect.signature(module.forward).parameters.values())[1:]
    return [each.name for each in taken if each.default is each.empty and each.kind in kinds]


@contextmanager
def _traceable(module: nn.Module) -> Iterator[None]:
    """Let no hook see what is computed to find blocks, and let torch itself compute the attention of transformers."""
    names = ("_forward_hooks", "_forward_pre_hooks")
    before: list[tuple[Any, str, Any]] = [
        (each, name, getattr(each, name)) for each in module.modules() for name in names
    ]
    after: list[Any] = [OrderedDict() for _ in before]
    for each in module.modules():
        config: Any = vars(each).get("config")
        kind = getattr(config, "_attn_implementation", None)
        if kind not in (None, "eager", "sdpa") and not getattr(config, "sub_configs", None):
            before.append((config, "_attn_implementation", kind))
            after.append("sdpa")
    try:
        for (owner, name, _), value in zip(before, after, strict=True):
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _is_all(block: FfnBlock, x: Node, y: object) -> bool:
    """Whether a block reads the program's one input and gives its one output, both of the same leading dimensions."""
    if not isinstance(y, Node) or strip(y) is not block.down.node or strip(block.x) is not x:
        return False
    shapes = (x.meta["val"].shape, y.meta["val"].shape)
    return len(shapes[0]) == len(shapes[1]) and all(
        str(a) == str(b) for a, b in zip(shapes[0][:-1], shapes[1][:-1], strict=True)
    )


@contextmanager
def _in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Put a module in training or eval mode; in training, a blended activation is what it becomes: a ReLU."""
    modes = [(each, each.training) for each in module.modules()]
    try:
        module.train(training)
        with as_relu(module):
            yield
    finally:
        for each, before in modes:
            each.training = before


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
    return weights
