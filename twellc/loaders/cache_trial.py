"""Try a model over a cache of ours before it is used: it must compute what it computes by itself.

    from the start          two texts of three tokens, the last of which is a call of its own over the cache: a layer
                            that caches nothing must not need the tokens before it; without a cache the model sees the
                            whole text, once with the positions that a cache gives it, which change no bit of what it
                            computes
    at a place of a cache   a token behind keys and values that are made up; by itself, the model has a cache that holds
                            these, and knows its length

Places are behind the start, behind each number of the configuration at which a model might change what it does
(windows, chunks, lengths at which rotary frequencies or scales change), and the last one. Each costs a few tokens,
however far it is from the start. Rows of a call are at unequal places, as in use.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from twellc.base.dtypes import dtype_name
from twellc.base.errors import UserError, first_line
from twellc.base.transformers_private import cache_over
from twellc.loaders.huggingface import ATTENTION_MODELS, cannot_be_run, other_ways
from twellc.loaders.huggingface_inputs import text_config

# Numbers of a configuration that are not places: widths, counts and token ids.
_NO_PLACE = re.compile(
    r"(^|_)(vocab|hidden|intermediate|ffn|embd|embed|inner|heads?|layers?|rank|dim|experts?|ids?)(_|$)"
)
# The furthest place that is tried: keys and values of a row take memory.
_FURTHEST = 1 << 16
_TOKENS = 3


class MadeUpKeys:
    """Keys and values of a cache between two vectors, near the start and far from it, so that any range of them counts.

    Attributes:
        length: The length of the cache.
        reported: How many tokens the cache reports for all rows.
    """

    def __init__(self, length: int, reported: int = 0) -> None:
        """Take the attributes."""
        self.length, self.reported = length, reported
        self._known: dict[Any, Tensor] = {}

    def of(self, number: int, new: Tensor) -> Tensor:
        """Return all keys (0) or values (1), [1, heads, length, width], for a layer whose new ones are `new`."""
        heads, width = new.shape[1], new.shape[3]
        if (number, heads, width) not in self._known:
            generator = torch.Generator().manual_seed(number)
            first, last = torch.randn(2, 1, heads, 1, width, generator=generator).to(new)
            share = torch.arange(1, self.length + 1, device=new.device).log().sin().square()[:, None].to(new)
            self._known[number, heads, width] = first + (last - first) * share
        return self._known[number, heads, width]


# Returns the logits behind a token of each row, [rows, vocabulary], of token ids [rows, 1], places [rows] and what the
# cache holds.
Step = Callable[[Tensor, Tensor, MadeUpKeys], Tensor]


@dataclass
class CacheTrial:
    """What a model computes without a cache of ours.

    Attributes:
        where: What to name in messages.
        model: The model, as it was loaded.
        longest: The most tokens of a text.
        argument: What its forward calls a cache.
        ids: Two texts, [2, tokens].
        logits: Those behind them, [2, vocabulary].
        placed: Likewise, where the model is given positions from 0 on.
        at_places: The logits behind the last tokens of both at places of a cache.
    """

    where: str
    model: Any
    longest: int
    argument: str
    ids: Tensor = field(init=False)
    logits: Tensor = field(init=False)
    placed: Tensor = field(init=False)
    at_places: dict[int, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        """Run the model.

        Raises:
            UserError: It cannot be run, also over a cache, or its logits are NaN.
        """
        model = self.model
        tokens, vocabulary = min(_TOKENS, self.longest), text_config(model).vocab_size
        # Not the first ones, which are often special.
        self.ids = (vocabulary // 2 + torch.arange(2 * tokens, device=model.device).view(2, tokens)) % vocabulary
        try:
            with torch.no_grad():
                self.logits = model(input_ids=self.ids, use_cache=False).logits[:, -1]
                positions = torch.arange(tokens, device=model.device).expand(2, -1)
                self.placed = model(input_ids=self.ids, position_ids=positions, use_cache=False).logits[:, -1]
        except Exception as error:
            raise cannot_be_run(self.where, model, error) from error
        try:
            with torch.no_grad():
                self.at_places = {place: self._behind(place) for place in _places(model, self.longest)}
        except Exception as error:  # transformers raises what it likes for a cache that does not fit
            raise other_state(self.where, model, first_line(error)) from error
        if any(bool(logits.isnan().any()) for logits in (self.logits, *self.at_places.values())):
            raise UserError(
                self.where,
                "the model computes logits that are NaN",
                got=f"{type(model).__name__} in {dtype_name(model.dtype)}",
                fix="Check its weights. If these are right, numbers in between are too large for float16: take"
                " bfloat16.",
            )

    def _behind(self, place: int) -> Tensor:
        """Return the logits behind the last tokens, at a place behind keys and values that are made up."""
        layers = self.model.config.get_text_config(decoder=True).num_hidden_layers
        behind = _Behind(MadeUpKeys(place + 1), place)
        given: dict[str, Any] = {self.argument: cache_over(dict.fromkeys(range(layers), behind)), "use_cache": True}
        ids = self.ids[:, -1:]
        logits: Tensor = self.model(input_ids=ids, position_ids=torch.full_like(ids, place), **given).logits[:, -1]
        return logits

    def refuse_others(self, run: Callable[[Tensor], Tensor], step: Step) -> None:
        """Fail if the model computes something else over a cache, as it does with its own masks and positions.

        Args:
            run: Returns the logits behind texts, over the cache.
            step: Runs it at places.

        Raises:
            UserError: Both texts are off by more than rounding explains, or it cannot be run.
        """
        try:
            with torch.no_grad():
                self._refuse_others(run(self.ids), step)
        except UserError:
            raise
        except Exception as error:  # transformers raises what it likes for a cache that does not fit
            raise other_state(self.where, self.model, first_line(error)) from error

    def _refuse_others(self, logits: Tensor, step: Step) -> None:
        self._compare(self.logits, self.placed, " at positions from 0 on", rounding=1)
        self._compare(self.logits, logits, "")
        ids, first = self.ids[:, -1:].repeat(2, 1), min(self.at_places, default=0)
        for place, expected in self.at_places.items():
            places = torch.tensor([first, first, place, place], device=ids.device)
            # At the last place the cache reports no tokens once, and once as many as there are.
            reported = [0, 0, place] if place == max(self.at_places) else [0]
            found, *others = (step(ids, places, MadeUpKeys(place + 1, each)) for each in reported)
            self._compare(self.at_places[first], found[:2], f" at place {first} of {place + 1}")
            self._compare(expected, found[2:], f" at place {place}")
            if others and _error(found, others[1]) > 2 * _error(found, others[0]):
                raise self._refusal(f"{type(self.model).__name__}, which asks how long the rows of a cache are")

    def _compare(self, expected: Tensor, found: Tensor, at: str, rounding: int = 16) -> None:
        # One of two: rounding may change which experts a token is sent to.
        error = min(map(_error, expected, found))
        if not error <= max(1e-3, rounding * torch.finfo(self.model.dtype).eps):
            raise self._refusal(f"{type(self.model).__name__}, off by {error:.1%}{at}")

    def _refusal(self, got: str) -> UserError:
        what = "the model computes other logits over a cache than without one"
        expected = "masks and positions that transformers can be given for it"
        return UserError(self.where, what, got=got, expected=expected, fix=other_ways(self.model))


def other_state(where: str, model: Any, reason: str) -> UserError:
    """Return what to say of a model that cannot be run over a cache."""
    what = f"the model does not run over a cache of keys and values alone ({reason})"
    return UserError(where, what, got=type(model).__name__, expected=ATTENTION_MODELS, fix=other_ways(model))


def _error(expected: Tensor, found: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def _places(model: Any, longest: int) -> list[int]:
    """Return at which places of a cache to try a model, from 1 on, in order."""
    last = min(longest, _FURTHEST) - 1
    numbers = _numbers("", model.config.get_text_config(decoder=True).to_dict())
    return sorted(place for place in {1, last, *(number + 1 for number in numbers)} if 1 <= place <= last)


def _numbers(name: str, value: Any) -> set[int]:
    """Return the integers in a configuration that may be places."""
    if isinstance(value, dict):
        return {number for key, each in value.items() for number in _numbers(str(key), each)}
    if isinstance(value, list | tuple):
        return {number for each in value for number in _numbers(name, each)}
    return {value} if type(value) is int and value > 1 and not _NO_PLACE.search(name) else set()


@dataclass
class _Behind:
    """Keys and values that are made up, up to a place, the same in all rows: a `LayerState`."""

    made_up: MadeUpKeys
    reported: int

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values with the new ones behind them."""
        return self._with(0, keys), self._with(1, values)

    def _with(self, number: int, new: Tensor) -> Tensor:
        return torch.cat([self.made_up.of(number, new)[:, :, : self.reported].expand(len(new), -1, -1, -1), new], 2)

    def length(self, tokens: Any) -> Any:
        """Return how many keys there are then."""
        return self.reported + tokens
