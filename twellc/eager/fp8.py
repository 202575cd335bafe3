"""Quantise the weights of blocks in an eager module, where that is possible and changes the outputs little."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from twellc.base.errors import UserError
from twellc.eager.module_blocks import FoundBlock, Operand, called_otherwise, matrices_of
from twellc.eager.sharded import is_sharded
from twellc.eager.tracing import in_mode
from twellc.passes.fp8 import Change, by_error
from twellc.passes.report import Weights
from twellc.plugins.block import BlockOptions, WeightOperands
from twellc.plugins.fp8 import Fp8, finite
from twellc.plugins.meaning import hidden_of, output_of

_NO_SAMPLES = "there is nothing to measure it on"
_FIX = "Give twellc.optimize samples: arguments for calls of the module, each a tensor, a tuple or a dict."


def refuse_other_samples(samples: object, most: float | None) -> None:
    """Raise a UserError for samples of another kind, and for a largest error without samples."""
    if samples is None and most is not None:
        raise UserError("fp8_error", _NO_SAMPLES, fix=_FIX)
    if samples is None:
        return
    is_one = isinstance(samples, str | bytes | Mapping) or (isinstance(samples, Tensor) and samples.dim() == 0)
    if is_one or not isinstance(samples, Iterable):
        expected = "several samples, as in a list"
        raise UserError(
            "samples", "are not what a module is called with", got=type(samples).__name__, expected=expected
        )


def judge(
    module: nn.Module, blocks: Sequence[FoundBlock], most: float | None, samples: Iterable[Any] | None
) -> list[Weights]:
    """Return the type in which to read the weights of each block.

    Args:
        module: The module with the blocks.
        blocks: Blocks for the op, of which some may have FP8 weights already.
        most: The largest relative error of a block's output on the samples; None for any.
        samples: Arguments for calls of the module, see `twellc.optimize`.

    Raises:
        UserError: There is a largest error without a sample, or a weight is not finite, or has no values.
    """
    owners = Counter(
        id(parameter) for each in module.modules() for parameter in each._parameters.values() if parameter is not None
    )
    faults = [_fault(each, owners) for each in blocks]
    for each, fault in zip(blocks, faults, strict=True):
        if not fault:  # checked before the measurement
            for where, _, parameter in _matrices(each):
                if parameter.is_meta:
                    what = "cannot be quantised: it is on the meta device, without values"
                    raise UserError(where, what, fix="Load the weights first.")
                finite(parameter, where)
    if most is None:
        return [Weights(16, fault) if fault else by_error(None, None) for fault in faults]
    tried = [each for each, fault in zip(blocks, faults, strict=True) if not fault]
    errors = iter(_errors(module, tried, samples))
    return [Weights(16, fault) if fault else _reached(next(errors), most) for fault in faults]


def _fault(found: FoundBlock, owners: Counter[int]) -> str:
    """Return why the weights of a block cannot be quantised in place; an empty text where they can."""
    fault = called_otherwise(found)
    if fault:
        return fault
    for _, operand, parameter in _matrices(found):
        if is_sharded(parameter):
            return f"{operand.layer} is spread over ranks"
        if owners[id(parameter)] > 1:
            return f"the weight of {operand.layer} is another layer's, too"
    return ""


def _reached(error: float | None, most: float) -> Weights:
    return Weights(16, "the samples do not reach it") if error is None else by_error(error, most)


def quantised(found: FoundBlock) -> dict[str, Fp8]:
    """Return the weights [out, in] of the layers of a block in FP8, a scale for each neuron, by path."""
    made = {}
    for where, operand, parameter in _matrices(found):
        if operand.layer not in made:
            made[operand.layer] = Fp8.quantize(parameter, "column" if operand.transposed else "row", where)
    return made


def _matrices(found: FoundBlock) -> Iterator[tuple[str, Operand, nn.Parameter]]:
    """Yield the matrices of a block, each with its name for messages, the view that the op reads, and its parameter."""
    assert found.weights is not None
    for name, operand in matrices_of(found.weights).items():
        parameter = operand.parameter(found.module)
        assert parameter is not None
        yield f"layer {found.block.module or 'the model itself'}: {name}", operand, parameter


# ---- the error of FP8 ----


def _errors(module: nn.Module, blocks: Sequence[FoundBlock], samples: Iterable[Any] | None) -> list[float | None]:
    """Return the relative error of each block's output by FP8: the norm of the difference over that of the output."""
    watches = [_Watch(each) for each in blocks]
    calls = 0
    with ExitStack() as stack, torch.no_grad(), in_mode(module, False, runs=True):
        for each in watches:
            stack.enter_context(each.layer.register_forward_pre_hook(each, with_kwargs=True))
        for sample in () if samples is None else samples:
            _call(module, sample)
            calls += 1
    if not calls:
        raise UserError("fp8_error", _NO_SAMPLES, fix=_FIX)
    return [None if each.change is None else each.change.error for each in watches]


def _call(module: Callable[..., Any], sample: Any) -> None:
    if isinstance(sample, dict):
        module(**sample)
    else:
        module(*(sample if isinstance(sample, tuple | list) else (sample,)))


class _Watch:
    """Computes a block with and without FP8 at each call of its first projection."""

    def __init__(self, found: FoundBlock) -> None:
        assert found.weights is not None
        self._options = BlockOptions(activation=found.block.activation, threshold=found.block.threshold)
        self.layer = found.module.get_submodule(found.weights.first[0].layer)
        self._found = found
        self.change: Change | None = None  # None before the first call

    def __call__(self, _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        (x,) = (*arguments, *named.values())
        given, weights = self._found.weights, {}
        assert given is not None
        for name, operand in given.named().items():
            parameter = operand.parameter(self._found.module)
            assert parameter is not None
            weights[name] = operand.view(parameter.detach()).float()
        y = self._output(weights, x)
        made = quantised(self._found)  # made anew in each call: those of all blocks would take half the model's memory
        for name, operand in matrices_of(given).items():
            weights[name] = operand.view(made[operand.layer].dequantize(torch.float32))
        self.change = self.change or Change()
        self.change.add(self._output(weights, x), y)

    def _output(self, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        operands = WeightOperands(**weights).of(x.float())
        return output_of(hidden_of(operands, self._options)[-1], operands)
