"""`twellc.optimize`: run the feed-forward blocks of an eager module by the `twell` ops, for inference or in training.

A submodule that is exactly one feed-forward block gets another class, derived from its own, whose forward calls the op.
So everything else stays what it is: the object, its parameters and their names, its place in the model, its hooks.
Where a plain block is written out in a larger module, as in OPT, that module gets such a class, and so do the block's
two linear layers: while the module's forward runs, the first one puts the hidden tensor off (see `hidden.py`), and the
second one calls the op.

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
import re
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from twellc.base.errors import UserError, first_few, first_line
from twellc.eager.hidden import Blended, Hidden, holds_hidden, real
from twellc.eager.module_blocks import (
    Operand,
    Taken,
    drops,
    find_modules,
    find_written_out,
    functions_of,
    hands_on,
    has_global_hooks,
    has_hooks,
    operands_of,
    own_gradient,
    refusal_of,
)
from twellc.eager.sharded import is_sharded, local_of, sum_over_ranks
from twellc.eager.training_block import BlockInTraining, blended_of
from twellc.passes.decide import KERNEL_DTYPES, decide, options_of
from twellc.passes.match.find_ffn import FfnBlock
from twellc.passes.report import Layer
from twellc.plugins.block import BlockOptions, Operands, WeightOperands
from twellc.plugins.gradients.transforms import is_forward_mode, is_transformed
from twellc.plugins.library import COMPRESSIONS
from twellc.plugins.ops import run_block

_LOG = logging.getLogger("twellc")
_PARAMETRIZED = (
    "its weight is computed in each call, by a parametrization or a norm; remove that first, with "
    "torch.nn.utils.parametrize.remove_parametrizations, remove_weight_norm or remove_spectral_norm"
)
_DROPS = "dropout inside of it is switched on; its probability must be 0"
_TENSORS_ONLY = (
    "it is written out in a larger module, with something between its projections that takes only a tensor, such as a "
    "function of torch.jit.script"
)
_Module = TypeVar("_Module", bound=nn.Module)
# What wrappers put into the paths of modules: FSDP, torch.compile, activation checkpointing; DDP and its kind.
_WRAPPED = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")
_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


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

    @property
    def device(self) -> torch.device:
        """Where it is."""
        counted = self.training.counted
        return self.gate_parameter().device if counted is None else counted.counts.device

    @property
    def is_current(self) -> bool:
        """Whether the model computes it still as `optimize` has left it."""
        return any(block.training is self.training for block in vars(self.module).get("_twellc", ()))

    def gate_parameter(self) -> nn.Parameter:
        """Return the parameter that holds the gate weight, as the module has it now: a DTensor where FSDP2 shards it.

        Raises:
            UserError: It is not there, or is a part without a form, as FSDP's first version makes of it.
        """
        parameter = self.gate.parameter(self.module)
        if parameter is None or parameter.dim() != 2:
            raise UserError(
                f"layer {self.layer.module}", "its gate weight is not where it was in twellc.optimize",
                fix="Call twellc.optimize(model, training=True) once the model is what it shall be, and shard it by "
                "FSDP2 (torch.distributed.fsdp.fully_shard), not by FullyShardedDataParallel.",
            )  # fmt: skip
        return parameter


# Of a submodule: its class, without what is mixed in here, and whether it has a forward that is not its class's.
_Form = tuple[type[nn.Module], bool]


@dataclass(frozen=True)
class _Block:
    """A block that a submodule is, or that is written out in it.

    Attributes:
        layer: Its row in a report.
        weights: Its weights and biases.
        options: How it is computed.
        argument: Name of the parameter of its forward that x is; empty where it cannot be named.
        ranks: Numbers of dimensions of x for which the op runs: those for which the forward was seen to be this block.
        forms: What its inner modules were.
        training: What it does in training; None where it is optimized for inference.
        parts: Of a block that is written out the children that its inner modules are: the two projections, and what
            has no parameters, such as the activation.
        inner: Its path in the submodule, where that has several.
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
        """Return its path, given that of its submodule."""
        return ".".join(filter(None, (module, self.inner)))

    def inner_modules(self, module: nn.Module) -> list[nn.Module]:
        """Return the modules that it is made of."""
        return _inner_modules(module, self.parts)


def _inner_modules(module: nn.Module, parts: tuple[str, ...]) -> list[nn.Module]:
    if not parts:
        return list(module.modules())[1:]
    held = [module._modules.get(part) for part in parts]
    return [each for each in held if each is not None]


def _forms(inner: list[nn.Module]) -> tuple[_Form, ...]:
    return tuple((_original(each) or type(each), "forward" in vars(each)) for each in inner)


# ---- what a forward is replaced by ----


class _Mixed(Taken):
    """Mixed into a class; copy and pickle know how to make it."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        original = _original(self)
        if original is None:
            return super().__reduce_ex__(protocol)
        return _remake, (original, type(self).__bases__[0]), self.__getstate__()  # type: ignore[no-untyped-call]


class _Optimized(_Mixed):
    """Mixed into the class of a submodule that is a block: its forward calls the op where that computes the same."""

    _twellc: tuple[_Block]

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Compute y [..., d_out] of x [..., d_model], the one argument."""
        if "_twellc" not in vars(self):  # `restore` was called, and another class is derived from this, as FSDP does
            return super().forward(*arguments, **named)
        (block,) = self._twellc
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


# torch.compile and torch.export call it as they trace: what torch 2.11 itself puts in its place is true under both.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_exporting() -> bool:
    return torch.compiler.is_exporting()


class _InTraining(_Optimized):
    """Mixed in for training. What happens there is on the host: `torch.compile` leaves all of it as it is."""

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Compute y [..., d_out] of x [..., d_model], the one argument; note and count. Programs get the original."""
        if _is_exporting():
            return super(_Optimized, self).forward(*arguments, **named)
        return self._trained(*arguments, **named)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _trained(self, *arguments: Any, **named: Any) -> Any:
        return super().forward(*arguments, **named)


# The module whose forward runs in this thread, if blocks are written out in it, and how tensors were saved as it began.
_RUNNING = threading.local()


def _running() -> tuple[_Holder | None, object]:
    running: tuple[_Holder | None, object] = getattr(_RUNNING, "holder", (None, None))
    return running


def _saving() -> object:
    """Return how autograd saves tensors now: what checkpoints a part of a forward changes it."""
    if torch.compiler.is_compiling():
        return None
    return torch.is_grad_enabled(), torch._C._autograd._top_saved_tensors_default_hooks(False)


class _Holder(_Mixed):
    """Mixed into the class of a module in which blocks are written out."""

    _twellc: tuple[_Block, ...]

    @property
    def activation_relu_or_gelu(self) -> int:
        """Let torch's encoder layers compute themselves part by part, and not by one kernel of their own."""
        return 0

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Compute what the module computes, its blocks by the op where that computes the same."""
        before = _running()
        _RUNNING.holder = (self if "_twellc" in vars(self) else None), _saving()
        try:
            result = super().forward(*arguments, **named)
        finally:
            _RUNNING.holder = before
        return real(result) if holds_hidden(result) else result


class _Projection(_Mixed):
    """Mixed into the class of the projections of such blocks: outside of the module's forward it is what it was."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Compute x W^T + b; as up projection put that off, and as down projection compute the block."""
        holder, saving = _running()
        if holder is not None:
            given = arguments[0] if len(arguments) == 1 and not named else None
            if isinstance(given, Hidden):
                y = given.result(self)
                if y is not None:
                    return y
            for block in holder._twellc:
                up, down = (holder._modules.get(part) for part in block.parts[:2])
                if up is self and down is not None and isinstance(given, Tensor):
                    # In training a part that is checkpointed is computed again outside of the module's forward.
                    whole = block.training is None or saving == _saving()
                    weights = _weights(holder, block, given) if whole else None
                    if weights is not None:
                        return self._put_off(holder, block, given, weights, down)
                elif down is self:
                    _miss(holder, block)
        return super().forward(*arguments, **named)

    def _put_off(
        self, holder: _Holder, block: _Block, x: Tensor, weights: WeightOperands[Tensor], down: nn.Module
    ) -> Hidden:
        put_off = _PutOff(holder, block, x)

        def dense() -> Tensor:
            with put_off.as_it_was():
                return functional.linear(x, self.weight, self.bias)

        def compute(blended: Blended | None) -> Tensor | None:
            return _compute(holder, block, x, weights, blended) if put_off.is_as_it_was() else None

        return Hidden(dense, compute, down, block.options.activation, block.training is not None)


class _PutOff:
    """What an up projection that was put off would have read, and how."""

    def __init__(self, holder: _Holder, block: _Block, x: Tensor) -> None:
        self._x, self._block, self._layer = x, block, block.layer.module or type(holder).__name__
        self._is_eager = not torch.compiler.is_compiling()
        if self._is_eager:
            self._version = None if x.is_inference() else x._version
            self._autocast, self._saving = self._autocast_now(), _saving()

    def _autocast_now(self) -> tuple[bool, torch.dtype]:
        kind = self._x.device.type
        return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def is_as_it_was(self) -> bool:
        """Whether the block computes now what the projections one after the other would have computed.

        Raises:
            UserError: That cannot be computed any more.
        """
        if not self._is_eager:
            return True
        if self._block.training is not None and self._saving != _saving():
            raise UserError(
                f"layer {self._layer}", "its down projection runs in a checkpoint, and its up projection outside of it",
                fix="Checkpoint activations of whole layers, or of whole blocks.",
            )  # fmt: skip
        self._refuse_another_x()
        return self._autocast == self._autocast_now()

    def as_it_was(self) -> AbstractContextManager[Any]:
        """Return a context in which the up projection computes what it would have computed.

        Raises:
            UserError: That cannot be computed any more.
        """
        if not self._is_eager:
            return nullcontext()
        self._refuse_another_x()
        enabled, dtype = self._autocast
        return torch.autocast(self._x.device.type, dtype, enabled)

    def _refuse_another_x(self) -> None:
        if self._version is not None and self._version != self._x._version:
            raise UserError(
                f"layer {self._layer}", "what its up projection reads was changed in place before its down projection",
                fix="Run it without twellc.optimize, or leave this layer out by layers=REGEX.",
            )  # fmt: skip


_MIXED = (_Optimized, _InTraining, _Holder, _Projection)


def _compute(
    module: nn.Module, block: _Block, x: Tensor, weights: WeightOperands[Tensor], blended: Blended | None
) -> Tensor:
    """Compute y [..., d_out]; in training perhaps with an activation that is on its way to ReLU."""
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


def _miss(module: nn.Module, block: _Block) -> None:
    """Note that the original forward runs."""
    if block.training is None or _is_exporting():
        return
    if module.training and not torch.is_inference_mode_enabled():
        _note_miss(block.training)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _note_miss(training: BlockInTraining) -> None:
    training.missed()


def _weights(module: nn.Module, block: _Block, x: Tensor) -> WeightOperands[Tensor] | None:
    """Return what the op reads besides x, or None where the original forward must run."""
    if block.training is not None and _is_exporting():
        return None
    if not _is_plain(x) or x.dim() not in block.ranks or x.shape[-1] != block.layer.d_model:
        return None
    inner = block.inner_modules(module)
    if _forms(inner) != block.forms or any(map(has_hooks, inner)) or has_global_hooks():
        return None
    read = _of_inference if block.training is None else _of_training
    return read(module, block, x, inner)


def _of_inference(module: nn.Module, block: _Block, x: Tensor, inner: list[nn.Module]) -> WeightOperands[Tensor] | None:
    if module.training or any(each.training for each in inner) or not _is_taken(x) or blended_of(inner) is not None:
        return None
    records = torch.is_grad_enabled()
    if records and x.requires_grad:
        return None
    tensors: dict[str, Tensor] = {}
    for name, operand in block.weights.named().items():
        parameter = operand.parameter(module)
        if parameter is None or parameter.dtype != x.dtype or parameter.device != x.device:
            return None
        if (records and parameter.requires_grad) or (block.parts and is_sharded(parameter)):
            return None
        held = local_of(parameter)
        if is_traceable_wrapper_subclass(held):  # such as one that was quantized
            return None
        tensors[name] = operand.view(held)
    return WeightOperands(**tensors)


def _of_training(module: nn.Module, block: _Block, x: Tensor, inner: list[nn.Module]) -> WeightOperands[Tensor] | None:
    # Where a block is written out, dropout may stand behind it; inside of it `Hidden` sees it.
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
    """Whether it is dropout that is switched on."""
    return isinstance(module, _DropoutNd) and module.training and module.p > 0


def _is_plain(x: Tensor) -> bool:
    """Whether x is one array on a device that the ops know: not nested, sparse or spread over ranks."""
    is_array = not x.is_nested and x.layout == torch.strided and not is_traceable_wrapper_subclass(x)
    return is_array and x.device.type in ("cpu", "cuda")


def _is_taken(x: Tensor) -> bool:
    """Whether the op takes x as it is."""
    kind = x.device.type
    known = kind == "cpu" or x.dtype in KERNEL_DTYPES
    return known and not torch.is_autocast_enabled(kind) and not is_forward_mode()


@functools.cache
def _optimized(mixed_in: type[_Mixed], original: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a submodule of class `original` gets."""

    # Whoever looks at its parameters, as torch.export and transformers' Trainer do, sees those that it had.
    @functools.wraps(original.forward, updated=())
    def forward(self: Any, *arguments: Any, **named: Any) -> Any:
        return mixed_in.forward(self, *arguments, **named)

    # Layers keep the name of their class, by which FSDP finds them.
    name = original.__name__ if mixed_in is _Holder else f"Twell{original.__name__}"
    return type(name, (mixed_in, original), {"__module__": original.__module__, "forward": forward})


def _original(module: nn.Module) -> type[nn.Module] | None:
    """Return the class that an optimized submodule had; None where its class is derived from the one that it got."""
    bases = type(module).__bases__
    return bases[1] if bases[0] in _MIXED else None


def _remake(original: type[nn.Module], mixed_in: type[_Mixed] = _Optimized) -> nn.Module:
    """Make an empty object for copy and pickle, which fill it with the state."""
    made: type[nn.Module] = _optimized(mixed_in, original)  # type: ignore[arg-type]
    return made.__new__(made)


# ---- for users ----


def optimize(
    module: _Module, *, layers: str = "auto", compression: int | None = None, training: bool = False
) -> _Module:
    """Run the feed-forward blocks of a module by the `twell` ops, in place.

    A submodule is taken if torch.export can trace it alone, with one tensor [..., d_model], and what it computes is
    exactly one block that `twellc compile` would rewrite; submodules with hooks are left as they are. The largest such
    submodules are taken. Blocks without a gate, with ReLU or its square, are taken, too, where they are written out in
    a larger module, as in OPT: there x has two or three dimensions, both projections are `torch.nn.Linear`, and the
    module itself may have hooks. Parameters, `state_dict()` and tied weights stay as they are, and `.to()`,
    `copy.deepcopy`, pickle, `torch.compile` and CUDA graphs work as before. Optimize once the model is what it shall
    be. Of a model that transformers has sharded (`tp_plan="auto"`) each rank runs the neurons that it has, and adds up
    what all of them give, as before.

    The original forward runs where the op cannot: in training mode, where autograd records, under autocast, for
    other dtypes than bfloat16 and float16 on a GPU, on other devices than CPU and CUDA, and where a child of the
    submodule was replaced or has got a hook. On a CPU the op computes the same by dense products.

    Weights [d_out, d_ff] of down projections keep their shape, but not their strides: their transpose is contiguous.
    Libraries that save only contiguous tensors need `restore`, or contiguous copies.

    With `training` it is the other way round: forward and backward run by the ops in training mode, under autocast,
    activation checkpointing, DDP and FSDP, too, and strides stay as they are. Each block counts which neurons fire.
    Blocks with dropout inside that is switched on are not taken; where it is switched on later, and in eval mode, the
    original forward runs. On a GPU, what the kernels do not take, such as float32 without autocast, is computed
    densely, and counted, too. docs/training.md says what `twellc.training` does with it. Optimize before DDP or FSDP
    wraps the model.

    A second call takes what `layers` names besides the blocks that are taken already, and gives those that it names
    the `compression`, if one is given.

    Args:
        module: Any module.
        layers: Which of the blocks: `auto`, `all`, `none` or a regular expression over module paths.
        compression: The TwELL compression factor: 1, 2, 4 or 8; None is 8. It changes speed and memory, never results.
        training: Whether for training. What is optimized for the other purpose is restored first.

    Returns:
        The same module. `optimized_blocks` says what was done; refusals are logged by the logger `twellc`.

    Raises:
        UserError: `layers` is no regular expression, or matches none of the blocks; or there is no such `compression`.

    Warns:
        UserWarning: There is no block to optimize.
    """
    refuse_other_than_modules("twellc.optimize", module)
    if not isinstance(layers, str):
        raise UserError("layers", "is no text", got=repr(layers), expected="auto, all, none or a regular expression")
    if compression is not None and (type(compression) is not int or compression not in COMPRESSIONS):
        expected = ", ".join(map(str, COMPRESSIONS))
        raise UserError("twellc.optimize", "no such compression", got=repr(compression), expected=expected)
    held = _optimized_modules(module)
    if any((block.training is not None) != training for _, _, block in held):
        # A mistake in `layers` is found before anything is changed.
        _decide(list(_find(module, training)), layers, [block.path(path) for path, _, block in held])
        restore(module)
    parametrized = [path for path, submodule in module.named_modules() if _computes_weights(submodule)]
    for path in parametrized:
        _LOG.info("%s: %s", path, _PARAMETRIZED)
    found = list(_find(module, training))
    taken = {block.path(path): (submodule, block) for path, submodule, block in _optimized_modules(module)}
    decisions = _decide(found, layers, list(taken))
    if compression is not None and layers != "none":
        for path, (submodule, block) in taken.items():
            if layers in ("auto", "all") or re.search(layers, path):
                _compress(submodule, block, compression)
    for each, layer in zip(found, decisions, strict=True):
        if layer.decision == "twell" and each.weights is not None:
            _replace(each, layer, options_of(each.block, layer, compression), training)
        else:
            _LOG.info("%s stays dense: %s", layer.module or "the model itself", layer.reason)
    if not optimized_blocks(module) and layers != "none":
        left = [layer for layer in decisions if layer.decision != "twell"]
        reasons = [f"{layer.module or 'the model itself'}: {layer.reason}" for layer in left]
        reasons += [f"{path}: {_PARAMETRIZED}" for path in parametrized]
        warnings.warn(
            "twellc.optimize: no submodule is a feed-forward block that the twell ops compute"
            + (f" ({first_few(reasons, '; ')})" if reasons else ""),
            stacklevel=2,
        )
    return module


def _decide(found: list[_Found], layers: str, decided: Sequence[str] = ()) -> list[Layer]:
    # Which dtype it is in is asked in each call.
    return decide([replace(each.block, dtype=torch.bfloat16) for each in found], layers, decided=decided)


def refuse_other_than_modules(where: str, module: object) -> None:
    """Fail for what is no module; `where` names what it was given to.

    Raises:
        UserError: It is none.
    """
    if not isinstance(module, nn.Module):
        raise UserError(where, "takes a torch.nn.Module", got=repr(module), fix="Load the model first.")


@dataclass(frozen=True)
class _Found:
    """A block of a module.

    Attributes:
        path: Of the submodule.
        module: The submodule.
        block: What the matcher found, with its path in the module.
        weights: Where its weights are in the submodule.
        ranks: See `_Block`; where it is written out, any that models have.
        is_written_out: Whether the submodule computes other things, too.
    """

    path: str
    module: nn.Module
    block: FfnBlock
    weights: WeightOperands[Operand] | None
    ranks: tuple[int, ...] = (2, 3)
    is_written_out: bool = True


def _find(module: nn.Module, training: bool) -> Iterator[_Found]:
    """Yield the blocks of a module; those that cannot be run say why."""
    whole = []
    for path, submodule, block, ranks in find_modules(module, training=training):
        whole.append(path)
        reason = _refusal(block, block.refusal) or _no_class_of(submodule, _InTraining if training else _Optimized)
        weights = operands_of(submodule, block)
        parameter = None if weights is None else weights.w_up.parameter(submodule)
        if training and not reason and parameter is not None:
            x = torch.zeros(*(2,) * (min(ranks) - 1), block.d_model, dtype=parameter.dtype, device=parameter.device)
            reason = _of_own_gradient(own_gradient(submodule, x, {}))
        block = replace(block, module=path, refusal=reason)
        yield _Found(path, submodule, block, weights, ranks, is_written_out=False)
    projections: dict[nn.Module, set[str]] = {}
    tried: dict[tuple[object, ...], str] = {}
    for each in find_written_out(module, whole, training=training):
        reason = _refusal(each.block, refusal_of(each.block)) or _no_class_of(each.module, _Holder)
        names = {operand.path[0] for operand in each.weights.named().values()} if each.weights else set()
        used = projections.setdefault(each.module, set())
        if not reason and names & used:
            reason = "one of its projections is that of another block, too"
        if not reason:
            # Layers of a class have one forward: to try one of them is enough.
            kind = type(each.module), each.block.activation, *sorted(names)
            if kind not in tried:
                tried[kind] = "" if hands_on(each, training=training) else _TENSORS_ONLY
                if training and not tried[kind] and each.weights is not None:
                    ends = each.weights.w_up.path[0], each.weights.w_down.path[0]
                    tried[kind] = _of_own_gradient(own_gradient(each.module, *each.inputs, ends))
            reason = tried[kind]
        if not reason:
            used |= names
        yield _Found(each.path, each.module, replace(each.block, refusal=reason), each.weights)


def _of_own_gradient(function: str) -> str:
    return f"it calls {function}, a torch.autograd.Function with a gradient that may be another" if function else ""


def _refusal(block: FfnBlock, reason: str) -> str:
    """Return why a block is refused, by a plainer name where dropout is why."""
    return _DROPS if reason and drops(block) else reason


def _no_class_of(module: nn.Module, mixed_in: type[_Mixed]) -> str:
    """Say why no class can be derived from that of a module; empty where one can."""
    try:
        _optimized(mixed_in, type(module))  # type: ignore[arg-type]
    except Exception as error:  # of its __init_subclass__ or its metaclass
        return f"no class can be derived from {type(module).__name__} ({first_line(error)})"
    return ""


def _computes_weights(module: nn.Module) -> bool:
    """Whether a module computes its weight anew in each call, as weight and spectral norms do."""
    hooks = (WeightNorm, SpectralNorm)
    return is_parametrized(module) or any(isinstance(hook, hooks) for hook in module._forward_pre_hooks.values())


def restore(module: _Module) -> _Module:
    """Undo `optimize`, in place: every submodule has its own class again, and weights their usual strides.

    Returns:
        The same module.
    """
    refuse_other_than_modules("twellc.restore", module)
    for _, submodule, block in _optimized_modules(module):
        for operand in block.weights.named().values():
            parameter = operand.parameter(submodule)
            if operand.transposed and parameter is not None and block.training is None:
                _store(local_of(parameter), local_of(parameter).data.contiguous())
    for submodule in module.modules():
        if isinstance(submodule, _Mixed):
            vars(submodule).pop("_twellc", None)
            submodule.__class__ = _original(submodule) or type(submodule)  # type: ignore[assignment]
    return module


def optimized_blocks(module: nn.Module) -> list[Layer]:
    """Return the blocks of a module that `optimize` has taken, as rows of a report, in the order of `named_modules`."""
    refuse_other_than_modules("twellc.optimized_blocks", module)
    return [replace(block.layer, module=block.path(path)) for path, _, block in _optimized_modules(module)]


def blocks_in_training(module: nn.Module) -> dict[str, TrainedBlock]:
    """Return the blocks of a module that `optimize` has taken for training, by path, in the order of `named_modules`.

    Paths are those of the model, also where DDP, FSDP, torch.compile or a checkpointing wrapper is around a part of it.
    """
    found = {}
    for path, submodule, block in _optimized_modules(module):
        if block.training is not None:
            plain = block.path(_without_wrappers(module, path))
            gate, _ = block.weights.first
            found[plain] = TrainedBlock(replace(block.layer, module=plain), submodule, block.training, gate)
    return found


def blocks_for_training(module: nn.Module) -> list[Layer]:
    """Return the blocks of a module that `optimize` would look at for training, refused ones too."""
    return _decide(list(_find(module, training=True)), "all")


def _without_wrappers(module: nn.Module, path: str) -> str:
    """Return the path that a submodule has in the model that is wrapped."""
    parts: list[str] = []
    for part in filter(None, path.split(".")):
        if part not in _WRAPPED and not (part == "module" and isinstance(module, _WRAPPERS)):
            parts.append(part)
        module = module.get_submodule(part)
    return ".".join(parts)


def _optimized_modules(module: nn.Module) -> list[tuple[str, nn.Module, _Block]]:
    return [
        (path, submodule, block)
        for path, submodule in module.named_modules()
        if isinstance(submodule, _Mixed)
        for block in vars(submodule).get("_twellc", ())
    ]


def _replace(found: _Found, layer: Layer, options: BlockOptions, training: bool) -> None:
    """Let a submodule compute a block by the op."""
    submodule, weights = found.module, found.weights
    assert weights is not None
    for operand in weights.named().values():
        parameter = operand.parameter(submodule)
        if training or not operand.transposed or parameter is None:
            continue
        if not local_of(parameter).t().is_contiguous():
            _store(local_of(parameter), local_of(parameter).data.t().contiguous().t())
    argument = next(iter(inspect.signature(submodule.forward).parameters.values()))
    name = argument.name if argument.kind is argument.POSITIONAL_OR_KEYWORD else ""
    parts: tuple[str, ...] = ()
    mixed_in: type[_Mixed] = _InTraining if training else _Optimized
    if found.is_written_out:
        parts, mixed_in = (weights.w_up.path[0], weights.w_down.path[0], *functions_of(submodule)), _Holder
        for part in parts[:2]:
            _mix(submodule._modules[part], _Projection)
    running = BlockInTraining(options, layer.d_ff) if training else None
    forms = _forms(_inner_modules(submodule, parts))
    inner = found.block.module.removeprefix(found.path).lstrip(".")
    block = _Block(layer, weights, options, name, found.ranks, forms, running, parts, inner)
    before = vars(submodule).get("_twellc", ())
    _mix(submodule, mixed_in)
    vars(submodule)["_twellc"] = (*before, block)


def _store(parameter: Tensor, data: Tensor) -> None:
    """Let a parameter have other data, in shared memory where its own was."""
    if type(data) is Tensor and data.device.type == "cpu" and parameter.data.is_shared():  # type: ignore[no-untyped-call]
        data.share_memory_()  # type: ignore[no-untyped-call]
    parameter.data = data


def _compress(submodule: nn.Module, block: _Block, compression: int) -> None:
    """Give a block that is taken another compression factor."""
    options = replace(block.options, compression=compression)
    if block.training is not None:
        block.training.options = options
    held = vars(submodule)["_twellc"]
    vars(submodule)["_twellc"] = tuple(replace(each, options=options) if each is block else each for each in held)


def _mix(module: Any, mixed_in: type[_Mixed]) -> None:
    """Mix a class into that of a module, unless that is done."""
    if not isinstance(module, mixed_in):
        module.__class__ = _optimized(mixed_in, type(module))  # type: ignore[arg-type]
