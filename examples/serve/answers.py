"""Answers in the forms of OpenAI's chat completions and completions."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from asked import Asked

from twellc.generation.sampling import Logprob, Logprobs, RequestOutput

# What stands for a probability of 0, which JSON cannot write the logarithm of.
_LEAST = -9999.0


@dataclass
class _Choice:
    """An answer so far.

    Attributes:
        text: Its text, the prompt included where it is echoed.
        reason: Why it ended; empty before.
        logprobs: Lists by name, as its form has them.
        offset: How many letters the texts of its tokens have.
        begun: Whether a piece of it was there.
    """

    text: str = ""
    reason: str = ""
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    offset: int = 0
    begun: bool = False


class Answer:
    """What was answered to a request so far."""

    def __init__(self, asked: Asked, count: int, texts: list[str], name: Callable[[int], str]) -> None:
        """Begin.

        Args:
            asked: The request.
            count: How many prompts it has.
            texts: These, where they are echoed.
            name: Returns the text of a token.
        """
        self._asked, self._texts, self._name = asked, texts, name
        self._each = len(asked.params)
        self._choices = [_Choice() for _ in range(count * self._each)]
        self._prompts, self._tokens = [0] * count, 0
        self._kind = "text_completion" if asked.messages is None else "chat.completion"
        prefix = "cmpl" if asked.messages is None else "chatcmpl"
        self._id, self._created = f"{prefix}-{uuid.uuid4().hex}", int(time.time())

    def take(self, number: int, piece: RequestOutput) -> dict[str, Any]:
        """Take a piece of an answer, and return it as a chunk of a stream."""
        choice, prompt, (output,) = self._choices[number], number // self._each, piece.outputs
        begins, choice.begun = not choice.begun, True
        self._prompts[prompt] = len(piece.prompt_token_ids)
        text, reason, found = (
            output.text,
            output.finish_reason,
            list(zip(output.token_ids, output.logprobs or (), strict=False)),
        )
        if not self._asked.answers:
            text, reason, found = "", "length", []
        else:
            self._tokens += len(output.token_ids)
        of_prompt = list(zip(piece.prompt_token_ids, piece.prompt_logprobs or (), strict=False))
        if begins and self._asked.echo:
            text = self._texts[prompt] + text
        lists = None
        if self._asked.params[0].logprobs is not None:
            lists = self._lists(choice, [*of_prompt, *found])
            for name, values in lists.items():
                choice.logprobs.setdefault(name, []).extend(values)
        choice.text, choice.reason = choice.text + text, reason or ""
        return self._chunk(number, {"content": text}, text, reason, lists)

    def opening(self) -> list[dict[str, Any]]:
        """Return the chunks that a stream begins with: whose answers these are."""
        if self._asked.messages is None:
            return []
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(number, delta, "", None, None) for number in range(len(self._choices))]

    def closing(self) -> list[dict[str, Any]]:
        """Return the chunks that a stream ends with: the numbers of tokens, for who wants them."""
        return [{**self._head(True), "choices": [], "usage": self._usage()}] if self._asked.wants_usage else []

    def whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        choices = []
        for number, choice in enumerate(self._choices):
            found: dict[str, Any] = {"index": number, "finish_reason": choice.reason}
            if self._asked.messages is None:
                found["text"] = choice.text
            else:
                found["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
            choices.append(found | {"logprobs": choice.logprobs or None})
        return {**self._head(False), "choices": choices, "usage": self._usage()}

    def _head(self, is_chunk: bool) -> dict[str, Any]:
        """Return what is the same in all answers to a request."""
        kind = f"{self._kind}.chunk" if is_chunk and self._asked.messages is not None else self._kind
        return {"id": self._id, "object": kind, "created": self._created, "model": self._asked.model}

    def _usage(self) -> dict[str, int]:
        """Return the numbers of tokens; a prompt counts once."""
        prompts = sum(self._prompts)
        return {"prompt_tokens": prompts, "completion_tokens": self._tokens, "total_tokens": prompts + self._tokens}

    def _chunk(
        self, number: int, delta: dict[str, str], text: str, reason: str | None, logprobs: dict[str, list[Any]] | None
    ) -> dict[str, Any]:
        """Return a chunk of a stream."""
        content: dict[str, Any] = {"text": text} if self._asked.messages is None else {"delta": delta}
        choice = {"index": number, **content, "finish_reason": reason, "logprobs": logprobs}
        return {**self._head(True), "choices": [choice], **({"usage": None} if self._asked.wants_usage else {})}

    def _lists(self, choice: _Choice, found: list[tuple[int, Logprobs | None]]) -> dict[str, list[Any]]:
        """Return log probabilities of tokens in the form of the request."""
        if self._asked.messages is not None:
            most = self._asked.params[0].logprobs or 0
            return {"content": [_of_chat(token, each or {}, most) for token, each in found]}
        lists: dict[str, list[Any]] = {name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
        for token, each in found:
            text = self._name(token) if each is None else _text(token, each[token])
            lists["tokens"].append(text)
            lists["text_offset"].append(choice.offset)
            lists["token_logprobs"].append(None if each is None else _number(each[token].logprob))
            top: dict[str, float | None] = {}
            for other, logprob in sorted((each or {}).items(), key=lambda item: item[1].rank or 0):
                top.setdefault(_text(other, logprob), _number(logprob.logprob))
            lists["top_logprobs"].append(None if each is None else top)
            choice.offset += len(text)
        return lists


def _of_chat(token: int, found: Logprobs, most: int) -> dict[str, Any]:
    def entry(token: int) -> dict[str, Any]:
        text = _text(token, found[token])
        letters = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
        return {"token": text, "logprob": _number(found[token].logprob), "bytes": letters}

    likeliest = sorted(found, key=lambda other: found[other].rank or 0)[:most]
    return {**entry(token), "top_logprobs": [entry(other) for other in likeliest]}


def _text(token: int, found: Logprob) -> str:
    return f"token_id:{token}" if found.decoded_token is None else found.decoded_token


def _number(value: float) -> float | None:
    """Return a log probability as JSON has it."""
    return None if math.isnan(value) else max(value, _LEAST)
