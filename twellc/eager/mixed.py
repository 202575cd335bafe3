"""Classes whose forward replaces that of a module whose blocks, or parts of one, the `twell` ops run."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from twellc.base.casts import moves_only
from twellc.base.errors import UserError
from twellc.base.torch_private import DropoutNd, is_traceable_wrapper_subclass, top_saved_tensors_default_hooks
from twellc.eager.hidden import Blended, Deferred, Hidden, holds_hidden, real
from twellc.eager.module_blocks import Operand, Optimized, has_global_hooks, has_hooks
from twellc.eager.sharded import is_sharded, local_of, sum_over_ranks
from twellc.eager.training_block import BlockInTraining, blended_of
from twellc.passes.decide import KERNEL_DTYPES
from twellc.passes.report import Layer
from twellc.plugins.block import SCALES, THRESHOLDS, BlockOptions, Operands, WeightOperands
from twellc.plugins.fp8 import E4M3
from twellc.plugins.gradients_modes import is_forward_mode, is_transformed
from twellc.plugins.ops import run_block

# Operands of blocks in FP8 with another dtype than x.
_DTYPES_OF_FP8 = dict.fromkeys(SCALES, torch.float32)
_DTYPES_OF_FP8 |= {name.removesuffix("_scale"): E4M3 for name in SCALES}
# The form of a submodule: its class without the classes mixed in here, and whether it has a forward other than its
# class's.
_Form = tuple[type[nn.Module], bool]


@dataclass(frozen=True)
class TakenBlock:
    """A block that the ops compute, as kept by the module that the block is or is written out in.

    Attributes:
        layer: The row in a report.
        weights: The weights and biases.
        options: The options of the op.
        argument: The name of x among the parameters of the forward; empty where it cannot be passed by name.
        ranks: Numbers of dimensions of x for which the op runs: those for which the trace was exactly this block.
        forms: The forms of the inner modules when the op took over.
        training: The state in training; None where the block is optimized for inference.
        parts: For a block that is written out, the names of the children in it: the two projections, and those without
            parameters, such as the activation.
        inner: The block's path in the submodule, where that has several blocks.
    """

    layer: Layer
    weights: WeightOperands[Operand]
    options: BlockOptions
    argument: str
    ranks: tuple[int, ...]
    forms: tuple[_Form, ...]
    training: BlockInTraining | None = None
    parts: tuple[str, ...] = ()
    inner: str = ""

    def path(self, module: str) -> str:
        """Return the block's path, given that of its submodule."""
        return ".".join(filter(None, (module, self.inner)))


def taken_by(module: nn.Module) -> tuple[TakenBlock, ...]:
    """Return the blocks that a submodule computes by the ops."""
    found: tuple[TakenBlock, ...] = vars(module).get("_twellc", ())
    return found


def inner_modules(module: nn.Module, parts: tuple[str, ...] = ()) -> list[nn.Module]:
    """Return the modules of a block: the children `parts`, or all inner modules without any."""
    if parts:
        held = [module._modules.get(part) for part in parts]
        return [each for each in held if each is not None]
    found = []  # as of module.modules(), which takes longer than all else before a call
    for child in module._modules.values():
        if child is not None:
            found += [child, *inner_modules(child)]
    return found


def forms_of(inner: list[nn.Module]) -> tuple[_Form, ...]:
    """Return the forms of modules, to see later whether one has changed."""
    return tuple([(original_class(each) or type(each), "forward" in vars(each)) for each in inner])


def are_changed(inner: list[nn.Module], forms: tuple[_Form, ...]) -> bool:
    """Whether modules are other ones than when their forms were noted, or have hooks."""
    return forms_of(inner) != forms or any(map(has_hooks, inner)) or has_global_hooks()


# ---- classes ----


class Mixed(Optimized):
    """Base of the classes that are mixed in; copy and pickle can make the mixed classes again."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        original = original_class(self)
        if original is None:
            return super().__reduce_ex__(protocol)
        return _remake, (original, type(self).__bases__[0]), self.__getstate__()  # type: ignore[no-untyped-call]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Mixed:
        """Let `.to()` and the like move thresholds of blocks, but never convert them, as z is compared in float32."""
        operands = [block.weights.thresholds for block in taken_by(self)]
        thresholds = [None if each is None else each.parameter(self) for each in operands]
        super()._apply(moves_only(fn, thresholds), recurse)  # type: ignore[no-untyped-call]
        return self


@functools.cache
def class_with(mixed_in: type[Mixed], original: type[nn.Module]) -> type[nn.Module]:
    """Return the class to give a module of class `original`."""

    # torch.export and transformers' Trainer look at the parameters of forward: they see those of the original.
    @functools.wraps(original.forward, updated=())
    def forward(self: Any, *arguments: Any, **named: Any) -> Any:
        return mixed_in.forward(self, *arguments, **named)

    # Layers keep the name of their class, as FSDP finds them by it.
    name = original.__name__ if mixed_in is ContainerModule else f"Twell{original.__name__}"
    return type(name, (mixed_in, original), {"__module__": original.__module__, "forward": forward})


def original_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the class that a module had; None where another class is derived from the mixed one."""
    bases = type(module).__bases__
    return bases[1] if bases[0] in (BlockModule, TrainedModule, ContainerModule, Projection) else None


def _remake(original: type[nn.Module], mixed_in: type[Mixed]) -> nn.Module:
    """Make an empty object, which copy and pickle fill with the state."""
    made: type[nn.Module] = class_with(mixed_in, original)  # type: ignore[arg-type]
    return made.__new__(made)


class BlockModule(Mixed):
    """Mixed into the class of a submodule that is a block: forward calls the op where that computes the same."""

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Compute y [..., d_out] of x [..., d_model], the one argument."""
        if not taken_by(self):  # `restore` was called, and another class is derived from this, as FSDP does
            return super().forward(*arguments, **named)
        (block,) = taken_by(self)
        x = named.get(block.argument) if not arguments and len(named) == 1 else None
        if len(arguments) == 1 and not named:
            x = arguments[0]
        if isinstance(x, Tensor):
            weights = _weights(self, block, x)
            if weights is not None:
                blended = None if block.training is None else blended_of(self.modules())
                return _compute(self, block, x, weights, blended)
        _miss(self, block)
        return super().forward(*arguments, **named)


# torch.compile and torch.export call this as they trace; the replacement of torch 2.11 itself is true under both.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_exporting() -> bool:
    return torch.compiler.is_exporting()


class TrainedModule(BlockModule):
    """Mixed in for training. That code runs on the host: `torch.compile` leaves all of it as it is."""

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Compute y [..., d_out] of x [..., d_model], the one argument; note and count. Programs get the original."""
        if _is_exporting():
            return super(BlockModule, self).forward(*arguments, **named)
        return self._trained(*arguments, **named)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _trained(self, *arguments: Any, **named: Any) -> Any:
        return super().forward(*arguments, **named)


# The module whose forward runs in this thread, if it has blocks written out; and the state of autograd at its start.
_RUNNING = threading.local()


def _running() -> tuple[ContainerModule | None, object]:
    running: tuple[ContainerModule | None, object] = getattr(_RUNNING, "container", (None, None))
    return running


def _saving() -> object:
    """Return how autograd saves tensors now, which differs inside of a checkpointed part of a forward."""
    if torch.compiler.is_compiling():
        return None
    return torch.is_grad_enabled(), top_saved_tensors_default_hooks(False)


class ContainerModule(Mixed):
    """Mixed into the class of a module in which blocks are written out."""

    @property
    def activation_relu_or_gelu(self) -> int:
        """Keep torch's encoder layers from running as one fused kernel."""
        return 0

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Compute the module's result, with the op for its blocks where that computes the same."""
        before = _running()
        _RUNNING.container = (self if taken_by(self) else None), _saving()
        try:
            result = super().forward(*arguments, **named)
        finally:
            _RUNNING.container = before
        return real(result) if holds_hidden(result) else result


class Projection(Mixed):
    """Mixed into the class of the projections of such blocks; outside of the module's forward they do not change."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Compute x W^T + b; the up projection defers that, and the down projection computes the block."""
        container, saving = _running()
        if container is not None:
            given = arguments[0] if len(arguments) == 1 and not named else None
            if isinstance(given, Hidden):
                y = given.result(self)
                if y is not None:
                    return y
            for block in taken_by(container):
                up, down = (container._modules.get(part) for part in block.parts[:2])
                if up is self and down is not None and isinstance(given, Tensor):
                    # In training a checkpointed part is computed again outside of the module's forward.
                    whole = block.training is None or saving == _saving()
                    weights = _weights(container, block, given) if whole else None
                    if weights is not None:
                        read = _UpProjection(container, block, self, given, weights)
                        activation, blends = block.options.activation, block.training is not None
                        return Hidden(Deferred(read.dense, read.compute, down, activation, blends))
                elif down is self:
                    _miss(container, block)
        return super().forward(*arguments, **named)


class _UpProjection:
    """A deferred up projection: its input, and the state of autograd and autocast."""

    def __init__(
        self,
        container: ContainerModule,
        block: TakenBlock,
        up: Projection,
        x: Tensor,
        weights: WeightOperands[Tensor],
    ) -> None:
        self._container, self._block, self._up, self._x, self._weights = container, block, up, x, weights
        self._is_eager = not torch.compiler.is_compiling()
        if self._is_eager:
            self._version = None if x.is_inference() else x._version
            self._autocast, self._saving = self._autocast_now(), _saving()

    def dense(self) -> Tensor:
        """Return the result of the up projection, computed now.

        Raises:
            UserError: That cannot be computed any more.
        """
        then: AbstractContextManager[Any] = nullcontext()
        if self._is_eager:
            self._refuse_another_x()
            enabled, dtype = self._autocast
            then = torch.autocast(self._x.device.type, dtype, enabled)
        with then:
            dense: Tensor = super(Projection, self._up).forward(self._x)
            return dense

    def compute(self, blended: Blended | None) -> Tensor | None:
        """Return the result of the block; None where the projections would now compute something else.

        Raises:
            UserError: That cannot be computed any more.
        """
        if self._is_eager:
            if self._block.training is not None and self._saving != _saving():
                what = "its down projection runs in a checkpoint, and its up projection outside of it"
                raise UserError(self._where, what, fix="Checkpoint activations of whole layers, or of whole blocks.")
            self._refuse_another_x()
            if self._autocast != self._autocast_now():
                return None
        return _compute(self._container, self._block, self._x, self._weights, blended)

    @property
    def _where(self) -> str:
        return f"layer {self._block.layer.module or type(self._container).__name__}"

    def _autocast_now(self) -> tuple[bool, torch.dtype]:
        kind = self._x.device.type
        return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def _refuse_another_x(self) -> None:
        if self._version is not None and self._version != self._x._version:
            where, what = self._where, "what its up projection reads was changed in place before its down projection"
            raise UserError(where, what, fix="Run it without twellc.optimize, or leave this layer out by layers=REGEX.")


# ---- the computation of a block ----


def _compute(
    module: nn.Module, block: TakenBlock, x: Tensor, weights: WeightOperands[Tensor], blended: Blended | None
) -> Tensor:
    """Compute y [..., d_out]; in training perhaps with an activation on its way to ReLU."""
    if block.training is not None:
        trained: Tensor = _train(block.training, weights.of(x), blended)
        return trained
    down = block.weights.w_down.parameter(module)
    assert down is not None
    if not is_sharded(down):
        return run_block(weights.of(x), block.options)
    y = sum_over_ranks(run_block(replace(weights, b_down=None).of(x), block.options), down)
    return y if weights.b_down is None else y + weights.b_down


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _train(training: BlockInTraining, operands: Operands[Tensor], blended: Blended | None) -> Tensor:
    return training.run(operands, blended)


def _miss(module: nn.Module, block: TakenBlock) -> None:
    """Note that the original forward runs."""
    if block.training is None or _is_exporting():
        return
    if module.training and not torch.is_inference_mode_enabled():
        _note_miss(block.training)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _note_miss(training: BlockInTraining) -> None:
    training.missed()


def _weights(module: nn.Module, block: TakenBlock, x: Tensor) -> WeightOperands[Tensor] | None:
    """Return the operands of the op besides x; None where the original forward must run."""
    if block.training is not None and _is_exporting():
        return None
    if not is_plain(x) or x.dim() not in block.ranks or x.shape[-1] != block.layer.d_model:
        return None
    inner = inner_modules(module, block.parts)
    if are_changed(inner, block.forms):
        return None
    read = _of_inference if block.training is None else _of_training
    return read(module, block, x, inner)


def _of_inference(
    module: nn.Module, block: TakenBlock, x: Tensor, inner: list[nn.Module]
) -> WeightOperands[Tensor] | None:
    if module.training or any(each.training for each in inner) or not is_taken(x) or blended_of(inner) is not None:
        return None
    records = torch.is_grad_enabled()
    if records and x.requires_grad:
        return None
    tensors: dict[str, Tensor] = {}
    fp8 = block.weights.w_down_scale is not None
    for name, operand in block.weights.named().items():
        parameter = operand.parameter(module)
        dtype = _DTYPES_OF_FP8.get(name, x.dtype) if fp8 else x.dtype
        if parameter is None or parameter.device != x.device:
            return None
        if parameter.dtype != dtype and name != THRESHOLDS.name:
            return None
        if records and parameter.requires_grad:
            return None
        held: Tensor = parameter
        if type(parameter) is not nn.Parameter:
            held = local_of(parameter)
            is_part = held is not parameter
            if (block.parts and is_part) or is_traceable_wrapper_subclass(held):  # such as a quantized parameter
                return None
        tensors[name] = operand.view(held)
    if THRESHOLDS.name in tensors:
        tensors[THRESHOLDS.name] = tensors[THRESHOLDS.name].float()
    return WeightOperands(**tensors)


def _of_training(
    module: nn.Module, block: TakenBlock, x: Tensor, inner: list[nn.Module]
) -> WeightOperands[Tensor] | None:
    # Dropout may follow a block that is written out; inside of the block `Hidden` sees it.
    if not module.training or (not block.parts and any(map(_drops, inner))):
        return None
    if torch.is_inference_mode_enabled() or (not torch.compiler.is_compiling() and is_transformed()):
        return None
    tensors: dict[str, Tensor] = {}
    for name, operand in block.weights.named().items():
        parameter = operand.tensor(module)
        if parameter is None or parameter.device != x.device:
            return None
        tensors[name] = operand.view(parameter)
    return WeightOperands(**tensors)


def _drops(module: nn.Module) -> bool:
    """Whether a module is active dropout."""
    return isinstance(module, DropoutNd) and module.training and module.p > 0


def is_plain(x: Tensor) -> bool:
    """Whether x is one array on a device of the ops: not nested, sparse or spread over ranks."""
    is_array = not x.is_nested and x.layout == torch.strided and not is_traceable_wrapper_subclass(x)
    return is_array and x.device.type in ("cpu", "cuda")


def is_taken(x: Tensor) -> bool:
    """Whether the op takes x as it is."""
    kind = x.device.type
    known = kind == "cpu" or x.dtype in KERNEL_DTYPES
    return known and not torch.is_autocast_enabled(kind) and not is_forward_mode()
