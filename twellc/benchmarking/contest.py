"""Contestants that compute the same: each is recorded and compared with float64 before it is timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from twellc.base.errors import first_line
from twellc.benchmarking.timing import Call, CallTime, record, time_calls
from twellc.checks.accuracy import measure

_Name = TypeVar("_Name")


def time_rotated(contestants: Mapping[_Name, Sequence[Call]], repeats: int) -> dict[_Name, CallTime]:
    """Time one call of each contestant, which has one for each of several sets of weights."""
    (count,) = {len(calls) for calls in contestants.values()}
    times = time_calls([record(calls) for calls in contestants.values()], repeats, count)
    return dict(zip(contestants, times, strict=True))


class Contest:
    """Contestants by name: each is kept, or left out with its fault.

    Attributes:
        errors: Relative error of each contestant's result.
        failed: Why contestants were left out.
    """

    def __init__(self, truth: Tensor | None, drawn: Callable[[Any], Tensor], language_model: bool) -> None:
        """Start without contestants.

        Args:
            truth: The right result in float64, [rows, width]; None where it is not known: then nothing is compared.
            drawn: Returns the rows of a contestant's result to compare, [rows, width].
            language_model: Whether the results are logits over a vocabulary.
        """
        self.errors: dict[str, float] = {}
        self.failed: dict[str, str] = {}
        self._truth, self._drawn, self._language_model = truth, drawn, language_model
        self._yardstick: Tensor | None = None
        self._replays: dict[str, Call] = {}
        self._kept: list[Any] = []  # read and written by the recordings

    def __contains__(self, label: str) -> bool:
        """Whether a contestant is kept."""
        return label in self._replays

    def add(self, label: str, call: Callable[[], Any], *kept: Any, lossy: bool = False) -> None:
        """Record a call; compare the recording's result.

        The first contestant is the yardstick: others may have twice its error.

        Args:
            label: The contestant's name.
            call: Returns a result.
            kept: Objects that must live as long as the recording does, besides the call and its result.
            lossy: Whether its error has no limit.
        """
        results: list[Any] = []

        def keep_result() -> None:
            results[:] = [call()]

        try:
            replay = record([keep_result])
            replay()
            wrong = "" if self._truth is None else self._compare(label, self._drawn(results[0]), lossy)
        except Exception as error:  # whatever it is, the others go on
            wrong = f"{type(error).__name__}: {first_line(error)}"
        if wrong:
            self.failed[label] = wrong
            return
        self._replays[label] = replay
        self._kept += [call, results, *kept]

    def _compare(self, label: str, result: Tensor, lossy: bool) -> str:
        """Note the error of a result, and return its fault; an empty text where it is within tolerance."""
        assert self._truth is not None
        if self._yardstick is None:
            if self.failed:
                return "there is nothing to measure it by: the first contestant failed"
            self._yardstick = result
        accuracy = measure(label, result, self._yardstick, self._truth, self._language_model)
        self.errors[label] = accuracy.candidate.relative
        if accuracy.stray:
            counted = f"{accuracy.stray} of {accuracy.elements} elements"
            return f"its result is NaN or infinite in {counted} that it must not be, or the other way round"
        if not accuracy.comparable:
            return "its result cannot be compared: no element is finite in float64 and in the range of its dtype"
        if accuracy.within or lossy:
            return ""
        return f"its result is off: {accuracy.candidate}, where the model in torch has {accuracy.plain}"

    def replay(self, label: str) -> Call:
        """Return a call that runs a contestant once."""
        return self._replays[label]

    def time(self, repeats: int) -> dict[str, CallTime]:
        """Time all contestants that were kept, in turns."""
        times = time_calls(list(self._replays.values()), repeats)
        return dict(zip(self._replays, times, strict=True))
