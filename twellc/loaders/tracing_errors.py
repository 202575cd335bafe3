"""What torch.export says of a model that it cannot trace, in words about the model's inputs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from twellc.base.errors import UserError, first_line
from twellc.base.torch_private import TorchUserError

_SIZE = r"L\['(\w+)'\]\.size\(\)\[(\d+)\]"
_EQUAL = re.compile(rf"The values of \w+ = {_SIZE} and \w+ = {_SIZE} must always be equal")
_GUARD = re.compile(rf"Not all values of \w+ = {_SIZE} in the specified range .*? satisfy the generated guard (.*)")
_SPECIALISED = re.compile(rf"for \w+ = {_SIZE} resulted in a specialized value of (\d+)")
_LOWER, _UPPER = re.compile(rf"(\d+) <= {_SIZE}"), re.compile(rf"{_SIZE} <= (\d+)")
_MULTIPLE = re.compile(r"(?:Eq\(Mod\([^,]+, (\d+)\), 0\)|% (\d+)\)? == 0)")
# What torch.export raises, words in it, and what to do then.
_ADVICE: tuple[tuple[type[Exception], re.Pattern[str], str], ...] = (
    (
        GuardOnDataDependentSymNode,
        re.compile(""),
        "Control flow that depends on values cannot be exported: replace it by torch.where or torch.cond.",
    ),
    (
        TorchUserError,
        re.compile("(?i)dynamic_shapes"),
        "dynamic_shapes has the form of the inputs: one entry for each of args and kwargs.",
    ),
    (
        Exception,
        re.compile(r"(?i)constraints violated|is not inferred|specialized|marked .* as dynamic"),
        "Where only a size must not vary, export the model at one size, and compile that archive.",
    ),
    (
        Exception,
        re.compile(r"expected scalar type|to have the same dtype|expected .* to have dtype"),
        "Its code mixes dtypes: save the model in float32, and compile with the --dtype that you want.",
    ),
)
# torch's own fault, on the way to say that a size is the only one.
_NO_RANGE = "Cannot create Dim with inconsistent"


def untraceable(name: str, error: Exception, inputs: Mapping[str, Any], fix: str, fix_sizes: str) -> UserError:
    """Return what to say of a model that torch.export cannot trace.

    Args:
        name: What to call it.
        error: What torch.export raised; anything that the model's own code raises, too.
        inputs: The example inputs that it was traced with, by parameter of `forward`.
        fix: Advice that fits whatever the cause is; empty where there is none.
        fix_sizes: What to do instead where sizes must not vary as they are to.
    """
    demands = _demands(str(error), inputs)
    if demands:
        return UserError(name, f"the model does not take every size: {'; '.join(demands)}", fix=fix_sizes)
    advice = [text for kind, words, text in _ADVICE if isinstance(error, kind) and words.search(str(error))][:1]
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip()]
    # The second line names the dimension, and why.
    reason = lines[1] if lines[1:] and lines[0].startswith("Constraints violated") else first_line(error)
    return UserError(
        name, f"torch.export cannot trace the model ({reason})", fix=" ".join(advice or filter(None, [fix]))
    )


def _demands(message: str, inputs: Mapping[str, Any]) -> list[str]:
    """Return what sizes of inputs must be, by a message of torch.export; empty if it is about something else."""
    found: dict[str, str] = {}
    for name, axis, other, other_axis in _EQUAL.findall(message):
        found[_dimension(name, axis)] = f"must be that of {_dimension(other, other_axis)}"
    for name, axis, guard in _GUARD.findall(message):
        found[_dimension(name, axis)] = _demand(guard, _traced(inputs, name, axis))
    for name, axis, size in _SPECIALISED.findall(message):
        found[_dimension(name, axis)] = _one_size(int(size), _traced(inputs, name, axis))
    if not found and _NO_RANGE in message:
        return ["one of the sizes cannot vary"]
    return [f"{dimension} {demand}" for dimension, demand in found.items()]


def _traced(inputs: Mapping[str, Any], name: str, axis: str) -> int | None:
    """Return the size that a dimension was traced with, if that is known."""
    given = inputs.get(name)
    return int(given.shape[int(axis)]) if isinstance(given, torch.Tensor) else None


def _dimension(name: str, axis: str) -> str:
    return f"dimension {axis} of {name}"


def _demand(guard: str, traced: int | None) -> str:
    lower, upper, multiple = _LOWER.search(guard), _UPPER.search(guard), _MULTIPLE.search(guard)
    if lower and upper and lower[1] == upper[3]:
        return _one_size(int(lower[1]), traced)
    if multiple:
        return f"must be a multiple of {multiple[1] or multiple[2]}"
    if upper:
        return f"must be {lower[1] if lower else 1} to {upper[3]}"
    return f"must be {lower[1]} at least" if lower else f"must fulfil {re.sub(_SIZE, 'size', guard).strip()}"


def _one_size(size: int, traced: int | None) -> str:
    """The size that a model was traced with was chosen for it, and says nothing of the model."""
    return "cannot vary" if size == traced else f"must be {size}"
