"""`twellc.optimize`: run the feed-forward blocks of an eager module by the `twell` ops, for inference or in training.

A submodule that is exactly one feed-forward block gets a class derived from its own, whose forward calls the op (see
`mixed.py`). Everything else stays: the object, its parameters and their names, its place in the model, its hooks.
Where a plain block is written out in a larger module, as in OPT, that module gets such a class, and so do the block's
two linear layers: while the module's forward runs, the first one defers the hidden tensor (see `hidden.py`), and the
second one calls the op.

The op reads w_down [d_ff, d_out] neuron by neuron, while `torch.nn.Linear` has weight [d_out, d_ff]. So such a weight
gets other strides, with a contiguous transpose; shape and values stay, without a second copy. Copies of the
parameter, also those of `.to()` or `copy.deepcopy`, keep these strides; a parameter that loses them, as by
`load_state_dict(assign=True)`, is transposed in each call. For training the strides do not change, as optimizers, FSDP
and `save_pretrained` want contiguous parameters.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from twellc.base.errors import UserError, first_few, first_line
from twellc.eager.changes import compress, put_in_fp8, store_as_usual, take, take_off, taken_in
from twellc.eager.experts import FoundExperts, find_experts, take_experts, take_experts_off, taken_experts
from twellc.eager.fp8 import judge, quantised, refuse_other_samples
from twellc.eager.fp8_linear import Fp8Linear
from twellc.eager.mixed import BlockModule, ContainerModule, TrainedModule, class_with, taken_by
from twellc.eager.module_blocks import FoundBlock, Operand, drops, find_blocks, operands_of, refusal_of
from twellc.eager.tracing import LOG
from twellc.eager.training_block import BlockInTraining
from twellc.eager.trials import own_gradient, passes_hidden
from twellc.options.option import taken
from twellc.options.weights import FP8_BLOCKS, KEEP, WeightOptions, refuse_weights, refuse_weights_of_linear
from twellc.passes.decide import decide, options_of
from twellc.passes.fp8 import KEPT
from twellc.passes.report import Layer, reads_fp8
from twellc.plugins.fp8 import Fp8
from twellc.plugins.library import COMPRESSIONS

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
# Parts of module paths that wrappers add: FSDP, torch.compile, activation checkpointing; DDP and the like.
_WRAPPED = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")
_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


# ---- for users ----


def optimize(
    module: _Module,
    *,
    layers: str = "auto",
    compression: int | None = None,
    training: bool = False,
    weights: str = KEEP,
    fp8_error: float | None = None,
    samples: Iterable[Any] | None = None,
) -> _Module:
    """Run the feed-forward blocks of a module by the `twell` ops, in place.

    A submodule is taken if torch.export can trace it alone, with one tensor [..., d_model], and its trace is exactly
    one block that `twellc compile` would rewrite; submodules with hooks are left as they are. The largest such
    submodules are taken. Blocks without a gate, with ReLU or its square, are taken, too, where they are written out in
    a larger module, as in OPT: there x has two or three dimensions, both projections are `torch.nn.Linear`, and the
    module itself may have hooks. Parameters, `state_dict()` and tied weights stay as they are, and `.to()`,
    `copy.deepcopy`, pickle, `torch.compile` and CUDA graphs work as before. Optimize a model in its final form. If
    transformers has sharded it (`tp_plan="auto"`), each rank runs its own neurons, and the results of all ranks are
    added, as before.

    The original forward runs where the op cannot: in training mode, where autograd records, under autocast, for
    other dtypes than bfloat16 and float16 on a GPU, on other devices than CPU and CUDA, and where a child of the
    submodule was replaced or has a new hook. On a CPU the op computes the same by dense products.

    Weights [d_out, d_ff] of down projections keep their shape, but not their strides: their transpose is contiguous.
    Libraries that save only contiguous tensors need `restore`, or contiguous copies.

    Mixtures of experts of transformers are taken, too, a layer at a time by `twell::experts`, for inference on a GPU;
    where the op cannot run, transformers computes them as before. Their weights keep their bits.

    With `training` it is the other way round: forward and backward run by the ops in training mode, under autocast,
    activation checkpointing, DDP and FSDP, too, and strides stay as they are. Each block counts which neurons fire.
    Blocks with active dropout inside are not taken; where dropout becomes active later, and in eval mode, the original
    forward runs. On a GPU, calls that the kernels do not take, such as those in float32 without autocast, are computed
    densely, and counted, too. docs/training.md shows how `twellc.training` uses this. Optimize before DDP or FSDP wraps
    the model.

    With `weights="fp8:blocks"` the blocks are quantised to E4M3, with a scale for each neuron, as docs/weights.md says:
    their `torch.nn.Linear` become layers in FP8, whose `weight` and `scale` are in `state_dict()`, and which `.half()`
    and the like do not convert. Blocks with weights that are tied, spread over ranks or not those of a linear layer
    keep their bits. The 16 bits are gone then: `restore` leaves layers in FP8. Blocks that have such layers already,
    as from a checkpoint, always keep them.

    A second call takes the blocks in `layers` that are not taken yet, and gives the others in `layers` the
    `compression`, if one is given.

    After an interrupt or an error, also one that the module itself raises on a sample, the module is as before. So the
    16 bits of quantised blocks are kept until all FP8 weights are made.

    Args:
        module: Any module.
        layers: Which of the blocks: `auto`, `all`, `none` or a regular expression over module paths.
        compression: The TwELL compression factor: 1, 2, 4 or 8; None is 8. It changes speed and memory, never results.
        training: Whether for training. Blocks optimized for the other purpose are restored first.
        weights: `keep`: as the module has them; `fp8:blocks`: blocks in FP8. `fp8`, which means linear layers
            outside of them, too, is refused.
        fp8_error: Leave a block as it is where, on the samples, FP8 changes its output by more than this: the
            norm of the difference over the norm of the output.
        samples: With `fp8_error`: arguments for calls of the module, each a tensor, a tuple or a dict.

    Returns:
        The same module. `optimized_blocks` lists the blocks that run by the ops; the logger `twellc` names refusals.

    Raises:
        UserError: `layers` is not a regular expression, or matches no block; `compression` or `weights` has another
            value; FP8 weights are to be trained, are not finite, or are those of blocks that run already; `fp8_error`
            has no samples, or `samples` is of another kind.

    Warns:
        UserWarning: No block can be optimized; or no block reads some layers in E4M3, which are slower than 16 bits.
    """
    refuse_other_than_modules("twellc.optimize", module)
    _refuse_other_choices(layers, compression)
    refuse_other_weights(weights, fp8_error)
    refuse_weights_of_linear("weights", "twellc.optimize computes no linear layers outside of blocks", weights)
    if weights != KEEP and training:
        what = "FP8 weights are not trained"
        fix = f"Train in 16 bits, and optimize the trained model with weights={weights!r}."
        raise UserError("twellc.optimize", what, got=f"training=True and weights={weights!r}", fix=fix)
    refuse_other_samples(samples, fp8_error)
    with ExitStack() as undo:
        is_other = any((block.training is not None) != training for _, _, block in taken_in(module))
        other = take_off(module, undo) if is_other else []
        running = {block.path(path): (submodule, block) for path, submodule, block in taken_in(module)}
        experts = [] if training else [path for path, _, _ in taken_experts(module)]
        planned, others = _plan(module, layers, training, [*running, *experts])
        named = {path: each for path, each in running.items() if _names(layers, path)}
        if weights != KEEP:
            _refuse_running([path for path, (_, block) in named.items() if not block.weights.scales()])
            _plan_fp8(module, planned, fp8_error, samples)
        # All that may be refused is known: from here on the model changes.
        store_as_usual(other, undo)
        if training:
            take_experts_off(module, undo)
        if compression is not None:
            for submodule, block in named.values():
                compress(submodule, block, compression, undo)
        for each in planned:
            _take(each, compression, training, undo)
        _report(module, planned, layers, others)
        undo.pop_all()
    return module


def _refuse_other_choices(layers: object, compression: object) -> None:
    if not isinstance(layers, str):
        raise UserError(
            "layers", "must be a string", got=repr(layers), expected="auto, all, none or a regular expression"
        )
    if compression is not None and (type(compression) is not int or compression not in COMPRESSIONS):
        expected = ", ".join(map(str, COMPRESSIONS))
        raise UserError("twellc.optimize", "no such compression", got=repr(compression), expected=expected)


def restore(module: _Module) -> _Module:
    """Undo `optimize`, in place: every submodule has its own class again, and weights their usual strides.

    After an error, such as one of memory, the module is as before.

    Returns:
        The same module.
    """
    refuse_other_than_modules("twellc.restore", module)
    with ExitStack() as undo:
        store_as_usual(take_off(module, undo), undo)
        take_experts_off(module, undo)
        undo.pop_all()
    return module


def optimized_blocks(module: nn.Module) -> list[Layer]:
    """Return the blocks that `optimize` has taken, as rows of a report, in the order of `named_modules`."""
    refuse_other_than_modules("twellc.optimized_blocks", module)
    rows = [(path, replace(block.layer, module=block.path(path))) for path, _, block in taken_in(module)]
    rows += [(path, replace(taken.layer, module=path)) for path, _, taken in taken_experts(module)]
    order = {path: place for place, (path, _) in enumerate(module.named_modules())}
    return [layer for _, layer in sorted(rows, key=lambda row: order[row[0]])]


def _others_in_fp8(module: nn.Module) -> dict[str, Fp8Linear]:
    """Return the layers in FP8 that no block by the op reads, by path."""
    read = {
        id(operand.parameter(submodule))
        for _, submodule, block in taken_in(module)
        for operand in block.weights.named().values()
    }
    return {
        path: layer
        for path, layer in module.named_modules()
        if isinstance(layer, Fp8Linear) and id(layer.weight) not in read
    }


def refuse_other_weights(weights: object, fp8_error: object) -> WeightOptions:
    """Return `weights` and `fp8_error` as options; raise a UserError for other values."""
    given = {"weights": weights, "fp8_error": fp8_error}
    options = WeightOptions(**{name: taken(WeightOptions, name, value) for name, value in given.items()})
    refuse_weights(options)
    return options


def refuse_other_than_modules(where: str, module: object) -> None:
    """Raise a UserError if `module` is not one; `where` names the function that it was given to."""
    if not isinstance(module, nn.Module):
        raise UserError(where, "takes a torch.nn.Module", got=repr(module), fix="Load the model first.")


# ---- for twellc.training ----


@dataclass(frozen=True)
class TrainedBlock:
    """A block in training, at its place in a model.

    Attributes:
        layer: The row in a report.
        module: The submodule.
        training: The counts and notes of the block.
        gate: The gate weight, in a plain block the up weight, which decides which neurons fire.
    """

    layer: Layer
    module: nn.Module
    training: BlockInTraining
    gate: Operand

    @property
    def device(self) -> torch.device:
        """The device of the block."""
        counted = self.training.counted
        return self.gate_parameter().device if counted is None else counted.counts.device

    @property
    def is_current(self) -> bool:
        """Whether the model still computes the block as `optimize` has set it up."""
        return any(block.training is self.training for block in taken_by(self.module))

    def gate_parameter(self) -> nn.Parameter:
        """Return the parameter that holds the gate weight, as the module has it now: a DTensor where FSDP2 shards it.

        Raises:
            UserError: The parameter is missing, or is a flat shard, as FSDP's first version makes.
        """
        parameter = self.gate.parameter(self.module)
        if parameter is None or parameter.dim() != 2:
            raise UserError(
                f"layer {self.layer.module}",
                "its gate weight is not where it was in twellc.optimize",
                fix="Call twellc.optimize(model, training=True) on the model in its final form, and shard it by "
                "FSDP2 (torch.distributed.fsdp.fully_shard), not by FullyShardedDataParallel.",
            )
        return parameter


def blocks_in_training(module: nn.Module) -> dict[str, TrainedBlock]:
    """Return the blocks of a module that `optimize` has taken for training, by path, in the order of `named_modules`.

    Paths are those of the model, also where DDP, FSDP, torch.compile or a checkpointing wrapper wraps a part.
    """
    found = {}
    for path, submodule, block in taken_in(module):
        if block.training is not None:
            plain = block.path(_without_wrappers(module, path))
            gate, _ = block.weights.first
            found[plain] = TrainedBlock(replace(block.layer, module=plain), submodule, block.training, gate)
    return found


def blocks_for_training(module: nn.Module) -> list[Layer]:
    """Return the blocks of a module that `optimize` would find for training, refused ones too."""
    return _decide(list(_find(module, training=True)), "all")


def _without_wrappers(module: nn.Module, path: str) -> str:
    """Return a path within a module without the parts that wrappers have added."""
    parts: list[str] = []
    for part in filter(None, path.split(".")):
        if part not in _WRAPPED and not (part == "module" and isinstance(module, _WRAPPERS)):
            parts.append(part)
        module = module.get_submodule(part)
    return ".".join(parts)


# ---- finding blocks ----


def _find(module: nn.Module, training: bool) -> Iterator[FoundBlock]:
    """Yield the blocks of a module, with a reason for each that the ops cannot run."""
    projections: dict[nn.Module, set[str]] = {}
    tried: dict[tuple[object, ...], str] = {}
    for each in find_blocks(module, training=training):
        reason = refusal_of(each)
        if reason and drops(each.block):
            reason = _DROPS  # a plainer name
        reason = reason or _no_class_of(each, training)
        if each.weights is None or reason:
            yield each.refused(reason)
            continue
        if each.is_written_out:
            names = {operand.path[0] for operand in each.weights.named().values()}
            used = projections.setdefault(each.module, set())
            # Layers of a class have one forward: a trial of one of them is enough.
            kind = type(each.module), each.block.activation, *sorted(names)
            if names & used:
                reason = "one of its projections is that of another block, too"
            elif kind in tried:
                reason = tried[kind]
            else:
                passes = passes_hidden(each, training=training)
                reason = tried[kind] = (_of_own_gradient(each) if training else "") if passes else _TENSORS_ONLY
            if not reason:
                used |= names
        elif training:
            reason = _of_own_gradient(each)
        yield each.refused(reason)


def _of_own_gradient(found: FoundBlock) -> str:
    function = own_gradient(found)
    return f"it calls {function}, a torch.autograd.Function with a gradient that may be another" if function else ""


def _no_class_of(found: FoundBlock, training: bool) -> str:
    """Return why no class can be derived from that of a module; an empty text where one can."""
    mixed_in = ContainerModule if found.is_written_out else TrainedModule if training else BlockModule
    try:
        class_with(mixed_in, type(found.module))  # type: ignore[arg-type]
    except Exception as error:  # from its __init_subclass__ or its metaclass
        return f"no class can be derived from {type(found.module).__name__} ({first_line(error)})"
    return ""


def _decide(found: list[FoundBlock], layers: str, decided: Sequence[str] = ()) -> list[Layer]:
    # The dtype is checked in each call.
    bits = [KEPT if each.weights is not None and each.weights.scales() else None for each in found]
    blocks = [replace(each.block, dtype=torch.bfloat16, weights=own) for each, own in zip(found, bits, strict=True)]
    return decide(blocks, layers, decided=decided)


def _names(layers: str, path: str) -> bool:
    """Whether `layers`, a checked value, names a block."""
    return layers in ("auto", "all") or (layers != "none" and bool(re.search(layers, path)))


def _computes_weights(module: nn.Module) -> bool:
    """Whether a module computes its weight anew in each call, as weight and spectral norms do."""
    hooks = (WeightNorm, SpectralNorm)
    return is_parametrized(module) or any(isinstance(hook, hooks) for hook in module._forward_pre_hooks.values())


# ---- taking blocks ----


@dataclass
class _Planned:
    """A found block, the decision for it, and weights and scales in FP8 for its layers, by path."""

    found: FoundBlock | FoundExperts
    layer: Layer
    made: Mapping[str, Fp8] = field(default_factory=dict)

    @property
    def is_taken(self) -> bool:
        """Whether the op is to run it."""
        runs = isinstance(self.found, FoundExperts) or self.found.weights is not None
        return self.layer.decision == "twell" and runs


def _plan(module: nn.Module, layers: str, training: bool, running: Sequence[str]) -> tuple[list[_Planned], list[str]]:
    """Find the blocks and experts of a module besides those that run already, and decide for each.

    Returns:
        The plans, and the reasons for experts that are no blocks.
    """
    found = list(_find(module, training))
    experts, others = find_experts(module, training=training)
    paths = [*running, *(each.block.module for each in experts)]
    planned = [_Planned(*each) for each in zip(found, _decide(found, layers, paths), strict=True)]
    paths += [each.block.module for each in found]
    # One by one: experts of several layers share a trace.
    planned += [_Planned(each, decide([each.block], layers, decided=paths)[0]) for each in experts]
    return planned, others


def _plan_fp8(module: nn.Module, planned: list[_Planned], most: float | None, samples: Iterable[Any] | None) -> None:
    """Decide the type of the weights of each block for the op, and quantise them."""
    chosen = [
        (each, each.found)
        for each in planned
        if each.layer.decision == "twell" and each.layer.weights is None and isinstance(each.found, FoundBlock)
    ]
    for (each, found), weights in zip(chosen, judge(module, [one for _, one in chosen], most, samples), strict=True):
        LOG.info("%s: %s", each.layer.module or "the model itself", weights)
        each.layer = replace(each.layer, weights=weights, reason=f"{each.layer.reason}; {weights}")
        if reads_fp8(weights):
            each.made = quantised(found)


def _take(planned: _Planned, compression: int | None, training: bool, undo: ExitStack) -> None:
    """Carry out the plan for a block."""
    found, layer = planned.found, planned.layer
    if not planned.is_taken:
        LOG.info("%s stays dense: %s", layer.module or "the model itself", layer.reason)
        return
    if isinstance(found, FoundExperts):
        take_experts(found, layer, undo)
        return
    if planned.made:
        put_in_fp8(found, planned.made, undo)
        found = replace(found, weights=operands_of(found.module, found.block))
    take(found, layer, options_of(found.block, layer, compression), training, undo)


def _refuse_running(paths: Sequence[str]) -> None:
    """Fail if blocks that run already are to be quantised, as their weights would change under them."""
    if paths:
        what = f"weights={FP8_BLOCKS!r} is for blocks that are not optimized yet"
        raise UserError("twellc.optimize", what, got=first_few(paths), fix="Call twellc.restore(module) first.")


def _report(module: nn.Module, planned: Sequence[_Planned], layers: str, others_left: Sequence[str]) -> None:
    """Report the parts of a module that are slower than they might be.

    Warns:
        UserWarning: No block runs by the op, though `layers` asks for one; or no block reads some layers in E4M3.
    """
    parametrized = [path for path, submodule in module.named_modules() if _computes_weights(submodule)]
    for path in parametrized:
        LOG.info("%s: %s", path, _PARAMETRIZED)
    for reason in others_left:
        LOG.info("%s", reason)
    others = _others_in_fp8(module)
    if others:
        what = "layers in E4M3 that no block by the op reads compute in 16 bits, dequantised in each call"
        warnings.warn(f"twellc.optimize: {len(others)} {what}: {first_few(list(others))}", stacklevel=3)
    if not optimized_blocks(module) and layers != "none":
        left = [each.layer for each in planned if each.layer.decision != "twell"]
        reasons = [f"{layer.module or 'the model itself'}: {layer.reason}" for layer in left]
        reasons += others_left
        reasons += [f"{path}: {_PARAMETRIZED}" for path in parametrized]
        warnings.warn(
            "twellc.optimize: no submodule is a feed-forward block that the twell ops compute"
            + (f" ({first_few(reasons, '; ')})" if reasons else ""),
            stacklevel=3,
        )
