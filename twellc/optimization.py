"""`twellc.optimize`: run the feed-forward blocks of an eager module by the `twell` ops.

A submodule that is exactly one feed-forward block gets another class, derived from its own, whose forward calls the op.
So everything else stays what it is: the object, its parameters and their names, its place in the model, its hooks.

The op reads w_down [d_ff, d_out] neuron by neuron, while `torch.nn.Linear` has weight [d_out, d_ff]. Such a weight is
stored anew with other strides, so that its transpose is contiguous: its shape and values stay, and there is no second
copy. A copy of the parameter, and what `.to()` or `copy.deepcopy` make of it, keep these strides; a parameter that
loses them, as by `load_state_dict(assign=True)`, is transposed in each call.
"""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.export import Dim, ShapesCollection
from torch.fx import Node
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from twellc.base.errors import UserError, first_few, first_line
from twellc.passes.decide import KERNEL_DTYPES, decide, options_of
from twellc.passes.graph.program import quiet_torch, user_inputs, written_tensors
from twellc.passes.match.find_ffn import FfnBlock
from twellc.passes.match.linear import Weight, strip
from twellc.passes.pipeline import Passed, PassOptions, Stage, run_until
from twellc.passes.report import Layer
from twellc.passes.rewrite_ffn import weights_of
from twellc.plugins.block import DEFAULT_COMPRESSION, BlockOptions, TensorField, WeightOperands
from twellc.plugins.library import COMPRESSIONS
from twellc.plugins.ops import run_block

_LOG = logging.getLogger("twellc")
_PARAMETRIZED = (
    "its weight is computed in each call, by a parametrization or a norm; remove that first, with "
    "torch.nn.utils.parametrize.remove_parametrizations, remove_weight_norm or remove_spectral_norm"
)
_Module = TypeVar("_Module", bound=nn.Module)
# Leading dimensions to trace with: sizes that differ, and from which torch.export keeps a dimension dynamic.
_LEADING = (2, 3)


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

    def view(self, parameter: Tensor) -> Tensor:
        """Return the matrix that the op reads: [d_ff, d_model], or w_down [d_ff, d_out]; of a bias the vector."""
        matrix = parameter.t() if self.transposed else parameter
        return matrix if self.rows is None else matrix[slice(*self.rows)]


@dataclass(frozen=True)
class _Block:
    """What the forward of a submodule is replaced by.

    Attributes:
        layer: Its row in a report.
        weights: Its weights and biases.
        options: How it is computed.
        argument: Name of the parameter of its forward that x is; empty where it cannot be named.
        ranks: Numbers of dimensions of x for which the forward was seen to be this block.
        kinds: The classes of its submodules, in the order of `modules()`.
    """

    layer: Layer
    weights: WeightOperands[Operand]
    options: BlockOptions
    argument: str
    ranks: tuple[int, ...]
    kinds: tuple[type[nn.Module], ...]


class _Optimized(nn.Module):
    """Mixed into the class of a submodule: its forward calls the op where that computes the same."""

    _twellc: _Block

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Compute y [..., d_out] of x [..., d_model], the one argument."""
        block = self._twellc
        x = named.get(block.argument) if not arguments and len(named) == 1 else None
        if len(arguments) == 1 and not named:
            x = arguments[0]
        weights = self._weights(x) if isinstance(x, Tensor) else None
        if x is None or weights is None:
            return super().forward(*arguments, **named)
        return run_block(weights.of(x), block.options)

    def _weights(self, x: Tensor) -> WeightOperands[Tensor] | None:
        """Return what the op reads besides x, or None where the original forward must run."""
        block = self._twellc
        if self.training or not _is_as_found(self, block.kinds) or not _is_taken(x, block):
            return None
        records = torch.is_grad_enabled()
        if records and x.requires_grad:
            return None
        tensors: dict[str, Tensor] = {}
        for name, operand in block.weights.named().items():
            parameter = operand.parameter(self)
            if parameter is None or parameter.dtype != x.dtype or parameter.device != x.device:
                return None
            if records and parameter.requires_grad:
                return None
            tensors[name] = operand.view(parameter)
        return WeightOperands(**tensors)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _remake, (type(self).__mro__[2],), vars(self).copy()


def _is_as_found(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Whether nothing was put in place of a submodule, and none has a hook, or dropout that is switched on."""
    inner = list(module.modules())[1:]
    return len(inner) == len(kinds) and all(
        type(each) is kind and not each.training and not each._forward_hooks and not each._forward_pre_hooks
        for each, kind in zip(inner, kinds, strict=True)
    )


def _is_taken(x: Tensor, block: _Block) -> bool:
    """Whether the op takes x as it is."""
    kind = x.device.type
    return (
        x.dim() in block.ranks
        and x.shape[-1] == block.layer.d_model
        and (kind == "cpu" or (kind == "cuda" and x.dtype in KERNEL_DTYPES))
        and not torch.is_autocast_enabled(kind)
    )


@functools.cache
def _optimized(original: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a submodule of class `original` gets."""
    return type(f"Twell{original.__name__}", (_Optimized, original), {"__module__": original.__module__})


def _remake(original: type[nn.Module]) -> nn.Module:
    """Make an empty object for copy and pickle, which fill it with the state."""
    made: type[nn.Module] = _optimized(original)  # type: ignore[arg-type]
    return made.__new__(made)


def optimize(module: _Module, *, layers: str = "auto", compression: int = DEFAULT_COMPRESSION) -> _Module:
    """Run the feed-forward blocks of a module by the `twell` ops, in place.

    A submodule is taken if torch.export can trace it alone, with one tensor [..., d_model], and what it computes is
    exactly one block that `twellc compile` would rewrite. Blocks that are written out in a larger module, as in OPT,
    are not seen; submodules with hooks are left as they are. The largest such submodules are taken. Parameters,
    `state_dict()` and tied weights stay as they are, and `.to()`, `copy.deepcopy`, pickle, `torch.compile` and CUDA
    graphs work as before. Optimize once the model is what it shall be.

    The original forward runs where the op cannot: in training mode, where autograd records, under autocast, for
    other dtypes than bfloat16 and float16 on a GPU, on other devices than CPU and CUDA, and where a child of the
    submodule was replaced or has got a hook. On a CPU the op computes the same by dense products.

    Weights [d_out, d_ff] of down projections keep their shape, but not their strides: their transpose is contiguous.
    Libraries that save only contiguous tensors need `restore`, or contiguous copies.

    Args:
        module: Any module.
        layers: Which of the blocks: `auto`, `all`, `none` or a regular expression over module paths.
        compression: The TwELL compression factor: 1, 2, 4 or 8. It changes speed and memory, never results.

    Returns:
        The same module. `optimized_blocks` says what was done; refusals are logged by the logger `twellc`.

    Raises:
        UserError: `layers` is no regular expression, or matches none of the blocks; or there is no such `compression`.

    Warns:
        UserWarning: There is no block to optimize.
    """
    if compression not in COMPRESSIONS:
        expected = ", ".join(map(str, COMPRESSIONS))
        raise UserError("twellc.optimize", "no such compression", got=repr(compression), expected=expected)
    parametrized = [path for path, submodule in module.named_modules() if _computes_weights(submodule)]
    for path in parametrized:
        _LOG.info("%s: %s", path, _PARAMETRIZED)
    found = list(find_modules(module))
    # Which dtype it is in is asked in each call.
    blocks = [replace(block, module=path, dtype=torch.bfloat16) for path, _, block, _ in found]
    decisions = decide(blocks, layers)
    for (_, submodule, block, ranks), layer in zip(found, decisions, strict=True):
        weights = operands_of(submodule, block)
        if layer.decision == "twell" and weights is not None:
            _replace(submodule, layer, weights, options_of(block, layer, compression), ranks)
        else:
            _LOG.info("%s stays dense: %s", layer.module, layer.reason)
    if not optimized_blocks(module) and layers != "none":
        reasons = [f"{layer.module}: {layer.reason}" for layer in decisions if layer.decision != "twell"]
        reasons += [f"{path}: {_PARAMETRIZED}" for path in parametrized]
        warnings.warn(
            "twellc.optimize: no submodule is a feed-forward block that the twell ops compute"
            + (f" ({first_few(reasons, '; ')})" if reasons else ""),
            stacklevel=2,
        )
    return module


def _computes_weights(module: nn.Module) -> bool:
    """Whether a module computes its weight anew in each call, as weight and spectral norms do."""
    hooks = (WeightNorm, SpectralNorm)
    return is_parametrized(module) or any(isinstance(hook, hooks) for hook in module._forward_pre_hooks.values())


def restore(module: _Module) -> _Module:
    """Undo `optimize`, in place: every submodule has its own class again, and weights their usual strides.

    Returns:
        The same module.
    """
    for submodule in list(module.modules()):
        if isinstance(submodule, _Optimized):
            for operand in submodule._twellc.weights.named().values():
                parameter = operand.parameter(submodule)
                if operand.transposed and parameter is not None:
                    parameter.data = parameter.data.contiguous()
            del submodule._twellc
            submodule.__class__ = type(submodule).__mro__[2]
    return module


def optimized_blocks(module: nn.Module) -> list[Layer]:
    """Return the blocks of a module that `optimize` has taken, as rows of a report, in the order of `named_modules`."""
    return [
        replace(submodule._twellc.layer, module=path)
        for path, submodule in module.named_modules()
        if isinstance(submodule, _Optimized)
    ]


def _replace(
    submodule: nn.Module, layer: Layer, weights: WeightOperands[Operand], options: BlockOptions, ranks: tuple[int, ...]
) -> None:
    for operand in weights.named().values():
        parameter = operand.parameter(submodule)
        if operand.transposed and parameter is not None and not parameter.t().is_contiguous():
            parameter.data = parameter.data.t().contiguous().t()
    argument = next(iter(inspect.signature(submodule.forward).parameters.values()))
    name = argument.name if argument.kind is argument.POSITIONAL_OR_KEYWORD else ""
    kinds = tuple(type(each) for each in submodule.modules())[1:]
    taken = _Block(layer, weights, options, name, ranks, kinds)
    submodule.__class__ = _optimized(type(submodule))  # type: ignore[arg-type]
    submodule._twellc = taken  # type: ignore[assignment]


def find_modules(
    module: nn.Module, ranks: tuple[int, ...] = (3, 2)
) -> Iterator[tuple[str, nn.Module, FfnBlock, tuple[int, ...]]]:
    """Yield the largest submodules that are one block, refused ones too: their paths, and which `ranks` x may have."""
    taken: list[str] = []
    for path, submodule in module.named_modules():
        if any(outer == "" or path.startswith(f"{outer}.") for outer in taken):
            continue
        if isinstance(submodule, _Optimized):
            taken.append(path)
            continue
        if not _may_be_block(submodule):
            continue
        found = {rank: block for rank in ranks if (block := _block_of(path, submodule, rank)) is not None}
        if found:
            taken.append(path)
            first = next(iter(found.values()))
            same = [rank for rank, block in found.items() if _meaning(block) == _meaning(first)]
            yield path, submodule, first, tuple(same)


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
        and type(module).__reduce_ex__ is object.__reduce_ex__
        and type(module).__reduce__ is object.__reduce__
        and not any(each._forward_hooks or each._forward_pre_hooks for each in module.modules())
    )


def _block_of(path: str, module: nn.Module, rank: int) -> FfnBlock | None:
    """Return the block that a module is, with x of `rank` dimensions."""
    for found in trace_alone(path, module, rank):
        program, blocks = found.program, found.blocks
        outputs = program.graph.output_node().args[0]
        inputs = list(user_inputs(program))
        if len(inputs) == len(outputs) == len(blocks) == 1 and not written_tensors(program):
            return blocks[0] if _is_all(blocks[0], inputs[0], outputs[0]) else None
    return None


def trace_alone(path: str, module: nn.Module, rank: int) -> Iterator[Passed]:
    """Trace a module alone, with x of each of the widths of its weights; yield what it computes, with its blocks."""
    parameters = list(module.parameters())
    # The widths of Linear's inputs first.
    widths = [p.shape[-1] for p in parameters if p.dim() == 2] + [p.shape[0] for p in parameters if p.dim() == 2]
    for width in dict.fromkeys(widths):
        x = torch.zeros(*_LEADING[: rank - 1], width, dtype=parameters[0].dtype, device=parameters[0].device)
        shapes: Any = ShapesCollection()  # type: ignore[no-untyped-call]
        shapes[x] = dict.fromkeys(range(rank - 1), Dim.DYNAMIC)
        try:
            with quiet_torch(), torch.no_grad(), _in_eval_mode(module):
                traced = torch.export.export(module, (x,), dynamic_shapes=shapes, strict=False)
                found = run_until(traced, PassOptions(), Stage.FIND)
        except Exception as error:  # torch.export raises what the module's code raises
            _LOG.debug("%s is not traced with x of width %d: %s", path, width, first_line(error))
        else:
            yield found


def _is_all(block: FfnBlock, x: Node, y: object) -> bool:
    """Whether a block reads the program's one input and gives its one output, both of the same leading dimensions."""
    if not isinstance(y, Node) or strip(y) is not block.down.node or strip(block.x) is not x:
        return False
    shapes = (x.meta["val"].shape, y.meta["val"].shape)
    return len(shapes[0]) == len(shapes[1]) and all(
        str(a) == str(b) for a, b in zip(shapes[0][:-1], shapes[1][:-1], strict=True)
    )


@contextmanager
def _in_eval_mode(module: nn.Module) -> Iterator[None]:
    modes = [(each, each.training) for each in module.modules()]
    try:
        module.eval()
        yield
    finally:
        for each, training in modes:
            each.training = training


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
