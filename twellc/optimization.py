"""`twellc.optimize`: run the feed-forward blocks of an eager module by the `twell` ops, for inference or in training.

A submodule that is exactly one feed-forward block gets another class, derived from its own, whose forward calls the op.
So everything else stays what it is: the object, its parameters and their names, its place in the model, its hooks.

The op reads w_down [d_ff, d_out] neuron by neuron, while `torch.nn.Linear` has weight [d_out, d_ff]. Such a weight is
stored anew with other strides, so that its transpose is contiguous: its shape and values stay, and there is no second
copy. A copy of the parameter, and what `.to()` or `copy.deepcopy` make of it, keep these strides; a parameter that
loses them, as by `load_state_dict(assign=True)`, is transposed in each call. For training the strides stay: optimizers,
FSDP and `save_pretrained` want contiguous parameters.
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
from torch.nn.modules.dropout import _DropoutNd
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
from twellc.plugins.gradients.transforms import is_forward_mode, is_transformed
from twellc.plugins.library import COMPRESSIONS
from twellc.plugins.ops import run_block
from twellc.sharded import is_sharded, local_of, local_twin, sum_over_ranks
from twellc.training_block import BlockInTraining, as_relu, blended_of

_LOG = logging.getLogger("twellc")
_PARAMETRIZED = (
    "its weight is computed in each call, by a parametrization or a norm; remove that first, with "
    "torch.nn.utils.parametrize.remove_parametrizations, remove_weight_norm or remove_spectral_norm"
)
_Module = TypeVar("_Module", bound=nn.Module)
# What wrappers put into the paths of modules: DDP, FSDP, torch.compile, activation checkpointing.
_WRAPPERS = ("module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")
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


@dataclass(frozen=True)
class TrainedBlock:
    """A block that `optimize` has taken for training.

    Attributes:
        layer: Its row in a report.
        module: The submodule.
        training: What it counts and notes.
        gate: How its gate weight, of a plain block its up weight, is read: that decides which neurons fire.
    """

    layer: Layer
    module: nn.Module
    training: BlockInTraining
    gate: Operand

    def gate_parameter(self) -> nn.Parameter:
        """Return the parameter that holds the gate weight, as the module has it now: a DTensor where FSDP shards it."""
        parameter = self.gate.parameter(self.module)
        if parameter is None:
            raise UserError(
                f"layer {self.layer.module}", "its gate projection was replaced after twellc.optimize",
                fix="Call twellc.optimize(model, training=True) once the model is what it shall be.",
            )  # fmt: skip
        return parameter


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
        training: What it does in training; None where it is optimized for inference.
    """

    layer: Layer
    weights: WeightOperands[Operand]
    options: BlockOptions
    argument: str
    ranks: tuple[int, ...]
    kinds: tuple[type[nn.Module], ...]
    training: BlockInTraining | None = None


class _Optimized(nn.Module):
    """Mixed into the class of a submodule: its forward calls the op where that computes the same."""

    _twellc: _Block

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Compute y [..., d_out] of x [..., d_model], the one argument."""
        block: _Block | None = vars(self).get("_twellc")
        if block is None:  # `restore` was called, and another class is derived from this one, as FSDP does
            return super().forward(*arguments, **named)
        x = named.get(block.argument) if not arguments and len(named) == 1 else None
        if len(arguments) == 1 and not named:
            x = arguments[0]
        y = self._compute(x if isinstance(x, Tensor) else None)
        return super().forward(*arguments, **named) if y is None else y

    def _compute(self, x: Tensor | None) -> Tensor | None:
        """Return y, or None where the original forward must run: for other arguments than one tensor, for one."""
        block = self._twellc
        weights = None if x is None else self._weights(x)
        if x is None or weights is None:
            return None
        down = block.weights.w_down.parameter(self)
        assert down is not None
        if not is_sharded(down):
            return run_block(weights.of(x), block.options)
        y = sum_over_ranks(run_block(replace(weights, b_down=None).of(x), block.options), down)
        return y if weights.b_down is None else y + weights.b_down

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
            tensors[name] = operand.view(local_of(parameter))
        return WeightOperands(**tensors)

    def __reduce_ex__(self, protocol: Any) -> Any:
        original = _original(self)
        if original is None:
            return super().__reduce_ex__(protocol)
        return _remake, (original, type(self).__bases__[0]), vars(self).copy()


class _InTraining(_Optimized):
    """Mixed in for training. What happens there is on the host: `torch.compile` leaves all of it as it is."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Compute y [..., d_out] of x [..., d_model], the one argument; note and count."""
        return super().forward(*arguments, **named)

    def _compute(self, x: Tensor | None) -> Tensor | None:
        training = self._twellc.training
        if not self.training or training is None or torch.is_inference_mode_enabled():
            return None
        weights = {} if x is None else self._trained(x)
        if x is None or not weights:
            training.missed()
            return None
        return training.run(WeightOperands(**weights).of(x), blended_of(self))

    def _trained(self, x: Tensor) -> dict[str, Tensor]:
        """Return what a step reads besides x by name; nothing where this is not what was found, or x does not fit."""
        block, inner = self._twellc, list(self.modules())[1:]
        if x.dim() not in block.ranks or x.shape[-1] != block.layer.d_model or is_transformed():
            return {}
        if tuple(map(type, inner)) != block.kinds or any(_is_intercepted(each) or _drops(each) for each in inner):
            return {}
        tensors: dict[str, Tensor] = {}
        for name, operand in block.weights.named().items():
            parameter = operand.tensor(self)
            if parameter is None or parameter.device != x.device:
                return {}
            tensors[name] = operand.view(parameter)
        return tensors


def _is_as_found(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Whether nothing was put in place of a submodule, and none has a hook, or dropout that is switched on."""
    inner = list(module.modules())[1:]
    return len(inner) == len(kinds) and all(
        type(each) is kind and not each.training and not _is_intercepted(each)
        for each, kind in zip(inner, kinds, strict=True)
    )


def _is_intercepted(module: nn.Module) -> bool:
    """Whether something looks into its forward or backward, or stands in place of its forward."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module)


def _drops(module: nn.Module) -> bool:
    """Whether it is dropout that is switched on."""
    return isinstance(module, _DropoutNd) and module.training and module.p > 0


def _is_taken(x: Tensor, block: _Block) -> bool:
    """Whether the op takes x as it is."""
    kind = x.device.type
    return (
        x.dim() in block.ranks
        and x.shape[-1] == block.layer.d_model
        and (kind == "cpu" or (kind == "cuda" and x.dtype in KERNEL_DTYPES))
        and not torch.is_autocast_enabled(kind)
        and not is_forward_mode()
    )


@functools.cache
def _optimized(mixed_in: type[_Optimized], original: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a submodule of class `original` gets."""
    return type(f"Twell{original.__name__}", (mixed_in, original), {"__module__": original.__module__})


def _original(module: nn.Module) -> type[nn.Module] | None:
    """Return the class that an optimized submodule had; None where its class is derived from the one that it got."""
    bases = type(module).__bases__
    return bases[1] if bases[0] in (_Optimized, _InTraining) else None


def _remake(original: type[nn.Module], mixed_in: type[_Optimized] = _Optimized) -> nn.Module:
    """Make an empty object for copy and pickle, which fill it with the state."""
    made: type[nn.Module] = _optimized(mixed_in, original)  # type: ignore[arg-type]
    return made.__new__(made)


def optimize(
    module: _Module, *, layers: str = "auto", compression: int = DEFAULT_COMPRESSION, training: bool = False
) -> _Module:
    """Run the feed-forward blocks of a module by the `twell` ops, in place.

    A submodule is taken if torch.export can trace it alone, with one tensor [..., d_model], and what it computes is
    exactly one block that `twellc compile` would rewrite. Blocks that are written out in a larger module, as in OPT,
    are not seen; submodules with hooks are left as they are. The largest such submodules are taken. Parameters,
    `state_dict()` and tied weights stay as they are, and `.to()`, `copy.deepcopy`, pickle, `torch.compile` and CUDA
    graphs work as before. Optimize once the model is what it shall be. Of a model that transformers has sharded
    (`tp_plan="auto"`) each rank runs the neurons that it has, and adds up what all of them give, as before.

    The original forward runs where the op cannot: in training mode, where autograd records, under autocast, for
    other dtypes than bfloat16 and float16 on a GPU, on other devices than CPU and CUDA, and where a child of the
    submodule was replaced or has got a hook. On a CPU the op computes the same by dense products.

    Weights [d_out, d_ff] of down projections keep their shape, but not their strides: their transpose is contiguous.
    Libraries that save only contiguous tensors need `restore`, or contiguous copies.

    With `training` it is the other way round: forward and backward run by the ops in training mode, under autocast,
    activation checkpointing, DDP and FSDP, too, and strides stay as they are. Each block counts which neurons fire.
    The original forward runs in eval mode, and where dropout inside of the block is switched on. On a GPU, what the
    kernels do not take, such as float32 without autocast, is computed densely, and counted, too. docs/training.md
    says what `twellc.training` does with it. Optimize before DDP or FSDP wraps the model.

    Args:
        module: Any module.
        layers: Which of the blocks: `auto`, `all`, `none` or a regular expression over module paths.
        compression: The TwELL compression factor: 1, 2, 4 or 8. It changes speed and memory, never results.
        training: Whether for training. What is optimized for the other purpose is restored first.

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
    if any((block.training is not None) != training for _, _, block in _optimized_modules(module)):
        restore(module)
    parametrized = [path for path, submodule in module.named_modules() if _computes_weights(submodule)]
    for path in parametrized:
        _LOG.info("%s: %s", path, _PARAMETRIZED)
    found = list(find_modules(module, training=training))
    # Which dtype it is in is asked in each call.
    blocks = [replace(block, module=path, dtype=torch.bfloat16) for path, _, block, _ in found]
    decisions = decide(blocks, layers)
    for (_, submodule, block, ranks), layer in zip(found, decisions, strict=True):
        weights = operands_of(submodule, block)
        if layer.decision == "twell" and weights is not None:
            options = options_of(block, layer, compression)
            running = BlockInTraining(options, layer.d_ff) if training else None
            _replace(submodule, layer, weights, options, ranks, running)
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
    for _, submodule, block in _optimized_modules(module):
        for operand in block.weights.named().values():
            parameter = operand.parameter(submodule)
            if operand.transposed and parameter is not None and block.training is None:
                local_of(parameter).data = local_of(parameter).data.contiguous()
        del submodule._twellc
        submodule.__class__ = _original(submodule) or type(submodule)  # type: ignore[assignment]
    return module


def optimized_blocks(module: nn.Module) -> list[Layer]:
    """Return the blocks of a module that `optimize` has taken, as rows of a report, in the order of `named_modules`."""
    return [replace(block.layer, module=path) for path, _, block in _optimized_modules(module)]


def blocks_in_training(module: nn.Module) -> dict[str, TrainedBlock]:
    """Return the blocks of a module that `optimize` has taken for training, by path, in the order of `named_modules`.

    Paths are those of the model, also where DDP, FSDP, torch.compile or a checkpointing wrapper is around a part of it.
    """
    found = {}
    for path, submodule, block in _optimized_modules(module):
        if block.training is not None:
            plain = ".".join(part for part in path.split(".") if part not in _WRAPPERS)
            gate, _ = block.weights.first
            found[plain] = TrainedBlock(replace(block.layer, module=plain), submodule, block.training, gate)
    return found


def _optimized_modules(module: nn.Module) -> list[tuple[str, _Optimized, _Block]]:
    return [
        (path, submodule, vars(submodule)["_twellc"])
        for path, submodule in module.named_modules()
        if isinstance(submodule, _Optimized) and "_twellc" in vars(submodule)
    ]


def _replace(
    submodule: nn.Module,
    layer: Layer,
    weights: WeightOperands[Operand],
    options: BlockOptions,
    ranks: tuple[int, ...],
    training: BlockInTraining | None,
) -> None:
    for operand in weights.named().values():
        parameter = operand.parameter(submodule)
        if training is not None or not operand.transposed or parameter is None:
            continue
        if not local_of(parameter).t().is_contiguous():
            local_of(parameter).data = local_of(parameter).data.t().contiguous().t()
    argument = next(iter(inspect.signature(submodule.forward).parameters.values()))
    name = argument.name if argument.kind is argument.POSITIONAL_OR_KEYWORD else ""
    kinds = tuple(type(each) for each in submodule.modules())[1:]
    taken = _Block(layer, weights, options, name, ranks, kinds, training)
    mixed_in = _Optimized if training is None else _InTraining
    submodule.__class__ = _optimized(mixed_in, type(submodule))  # type: ignore[arg-type]
    submodule._twellc = taken  # type: ignore[assignment]


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
        if isinstance(submodule, _Optimized):
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


def is_block(path: str, module: nn.Module) -> bool:
    """Whether a module is one block, in eval mode, that the ops compute."""
    if not _may_be_block(module):
        return False
    found = (_block_of(path, module, rank, training=False) for rank in (3, 2))
    return any(block is not None and operands_of(module, block) is not None for block in found)


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
        and type(module).__reduce_ex__ is object.__reduce_ex__
        and type(module).__reduce__ is object.__reduce__
        and not any(_is_intercepted(each) for each in module.modules())
    )


def _block_of(path: str, module: nn.Module, rank: int, training: bool) -> FfnBlock | None:
    """Return the block that a module is, with x of `rank` dimensions."""
    for found in trace_alone(path, module, rank, training=training):
        program, blocks = found.program, found.blocks
        outputs = program.graph.output_node().args[0]
        inputs = list(user_inputs(program))
        if len(inputs) == len(outputs) == len(blocks) == 1 and not written_tensors(program):
            return blocks[0] if _is_all(blocks[0], inputs[0], outputs[0]) else None
    return None


def trace_alone(path: str, module: nn.Module, rank: int, *, training: bool = False) -> Iterator[Passed]:
    """Trace a module alone, with x of each of the widths of its weights; yield what it computes, with its blocks."""
    parameters = list(module.parameters())
    # The widths of Linear's inputs first.
    widths = [p.shape[-1] for p in parameters if p.dim() == 2] + [p.shape[0] for p in parameters if p.dim() == 2]
    for width in dict.fromkeys(widths):
        x = torch.zeros(*_LEADING[: rank - 1], width, dtype=parameters[0].dtype, device=parameters[0].device)
        shapes: Any = ShapesCollection()  # type: ignore[no-untyped-call]
        shapes[x] = dict.fromkeys(range(rank - 1), Dim.DYNAMIC)
        try:
            with quiet_torch(), torch.no_grad(), _in_mode(module, training):
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
