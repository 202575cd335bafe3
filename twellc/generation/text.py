"""From texts to tokens and back, piece by piece."""

from __future__ import annotations

import codecs
import functools
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from twellc.base.errors import UserError, first_line
from twellc.generation.sampling import PromptError, SamplingParams
from twellc.loaders.checkpoint import read_config
from twellc.samples.tokenizer import BYTES, has_tokenizer, pretrained_tokenizer, token_ids

Messages = Sequence[Mapping[str, Any]]
# What transformers takes beside a template for the template itself; and what it takes for rendering and does not name.
_OF_TEMPLATES = {"tools", "documents", "add_generation_prompt", "continue_final_message"}
_OF_RENDERING = {"conversations", "messages", "return_assistant_tokens_mask"}
# What tokenizers that fall back to bytes call these.
_BYTE = re.compile("<0x[0-9A-F]{2}>")


class TextStream(Protocol):
    """Text from tokens as they come."""

    def put(self, token: int) -> str:
        """Take a token; return the text that is certain by now and was not returned before."""

    def end(self) -> str:
        """Return what is left, where tokens end in the middle of a letter."""


class Codec(Protocol):
    """The tokenizer of a model.

    Attributes:
        tokenizer: transformers' tokenizer; None where text is bytes.
        has_template: Whether it knows how to write a conversation.
        note: What the user should know.
    """

    tokenizer: Any
    has_template: bool
    note: str

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the tokens of a text, `special` ones included."""

    def conversation(self, messages: Messages, template: str | None, options: Mapping[str, Any]) -> list[int]:
        """Return the tokens of a conversation, up to where the answer begins."""

    def stream(self, prompt: Sequence[int], skip_special_tokens: bool) -> TextStream:
        """Return a stream for an answer to a prompt."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""

    def name(self, token: int) -> str | None:
        """Return the text of a token by itself; None without a tokenizer."""

    def refuse_without_texts(self) -> None:
        """Raise a UserError where there is no tokenizer."""


def load_codec(path: Path, vocabulary: int, skipped: bool = False) -> Codec:
    """Load the tokenizer of a Hugging Face directory.

    A model of 256 token ids and without a tokenizer reads and writes bytes; another one token ids, and so does any
    whose tokenizer is `skipped`.

    Raises:
        UserError: It is damaged.
    """
    if has_tokenizer(path) and not skipped:
        return _Pretrained(path)
    if vocabulary == BYTES and not skipped:
        return _Bytes(path)
    return _NoTexts(path)


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise PromptError("a prompt", f"is not a text in UTF-8 ({error.reason} at {error.start})") from error


class _Pretrained:
    """A tokenizer of transformers."""

    note = ""

    def __init__(self, path: Path) -> None:
        self.tokenizer = pretrained_tokenizer(path)
        self._path = path
        self._names = functools.lru_cache(maxsize=1 << 16)(lambda token: self.decode([token]))
        self.has_template = bool(getattr(self.tokenizer, "chat_template", None))

    def encode(self, text: str, special: bool = True) -> list[int]:
        _utf8(text)
        return token_ids(self._path, self.tokenizer, text, special=special)

    def conversation(self, messages: Messages, template: str | None, options: Mapping[str, Any]) -> list[int]:
        if template is None and not self.has_template:
            expected = "chat_template.jinja, or chat_template in tokenizer_config.json"
            fix = "Add one, or give the prompt as it is: generate, or --no-chat-template."
            raise UserError(str(self._path), "its tokenizer has no chat template", expected=expected, fix=fix)
        steering = set(inspect.signature(self.tokenizer.apply_chat_template).parameters) | _OF_RENDERING
        if others := sorted(steering.difference(_OF_TEMPLATES).intersection(options)):
            what = "say how a conversation is rendered, and not what the template takes"
            raise UserError("chat_template_kwargs", what, got=others[0], fix="Leave it out.")
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), chat_template=template, tokenize=False, **{"add_generation_prompt": True, **options}
            )
        except Exception as error:  # a template raises what it likes
            raise PromptError("a conversation", f"the chat template cannot write it ({first_line(error)})") from error
        # The template has written the special tokens.
        return self.encode(text, special=False)

    def stream(self, prompt: Sequence[int], skip_special_tokens: bool) -> TextStream:
        return _PretrainedStream(self.tokenizer, prompt, skip_special_tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        stream = _PretrainedStream(self.tokenizer, [], False)
        return "".join([*map(stream.put, tokens), stream.end()])

    def name(self, token: int) -> str:
        return self._names(token)

    def refuse_without_texts(self) -> None:
        pass


class _PretrainedStream:
    """Text of a tokenizer of transformers, which may join a token with those before, also those of the prompt.

    A piece is what new tokens add to the text of those of the piece before. The stream of the library tokenizers does
    the same, but fails at bytes that are not a letter, where a tokenizer falls back to bytes. A token that only the
    model has gives no text.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], skip_special_tokens: bool) -> None:
        self._known: Callable[[int], bool]
        if tokenizer.is_fast:
            decode, self._known = tokenizer.backend_tokenizer.decode, lambda token: True
        else:  # in Python, which fails at what it does not know
            decode = functools.partial(tokenizer.decode, clean_up_tokenization_spaces=False)
            size, added = len(tokenizer), tokenizer.added_tokens_decoder
            self._known = lambda token: token < size or token in added
        self._decode: Callable[[list[int]], str] = functools.partial(decode, skip_special_tokens=skip_special_tokens)
        self._name: Callable[[int], object] = tokenizer.convert_ids_to_tokens
        self._given, self._new = list(filter(self._known, prompt)), list[int]()
        self._before: str = self._decode(self._given)
        self._whole: str = self._before

    def put(self, token: int) -> str:
        if not self._known(token):
            return ""
        self._new.append(token)
        before, self._whole = self._whole, self._decode(self._given + self._new)
        # A later byte may make a letter of bytes, or show that they are none: so it may behind a token without a text.
        is_byte = _BYTE.fullmatch(str(self._name(token)))
        if is_byte or self._whole == before or self._whole.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        return self.end()

    def end(self) -> str:
        """Return what new tokens add to the text, where the first ones may end a letter of the prompt."""
        shared = os.path.commonprefix([self._before, self._whole])  # noqa: RUF071, these are not paths
        piece = self._whole[len(shared) :]
        # Tokens without a text, such as special ones, would leave the next one without the space before it.
        if piece:
            self._given, self._new = self._new, []
            self._before = self._whole = self._decode(self._given)
        return piece


class _Bytes:
    """Text as bytes in UTF-8, behind the token that begins a text."""

    tokenizer = None
    has_template = False

    def __init__(self, path: Path) -> None:
        config = read_config(path)
        self._path = path
        self._first = [config["bos_token_id"]] if isinstance(config.get("bos_token_id"), int) else []
        ends = config.get("eos_token_id")
        self._special = {*self._first, *(ends if isinstance(ends, list) else [ends])}
        self.note = "the model has 256 token ids and no tokenizer: text is bytes"

    def encode(self, text: str, special: bool = True) -> list[int]:
        return [*(self._first if special else ()), *_utf8(text)]

    def conversation(self, messages: Messages, template: str | None, options: Mapping[str, Any]) -> list[int]:
        fix = "Give the prompt as it is: generate, or --no-chat-template."
        raise UserError(str(self._path), "has no tokenizer, and so no chat template", fix=fix)

    def stream(self, prompt: Sequence[int], skip_special_tokens: bool) -> TextStream:
        return _ByteStream(self._special if skip_special_tokens else set())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def name(self, token: int) -> str:
        return self.decode([token])

    def refuse_without_texts(self) -> None:
        pass


class _NoTexts:
    """No tokenizer: prompts and answers are token ids, and answers have no texts."""

    tokenizer = None
    has_template = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self.note = "there is no tokenizer: prompts and answers are token ids"

    def encode(self, text: str, special: bool = True) -> list[int]:
        raise self._error()

    def conversation(self, messages: Messages, template: str | None, options: Mapping[str, Any]) -> list[int]:
        raise self._error()

    def stream(self, prompt: Sequence[int], skip_special_tokens: bool) -> TextStream:
        return self

    def put(self, token: int) -> str:
        return ""

    def end(self) -> str:
        return ""

    def decode(self, tokens: Sequence[int]) -> str:
        return ""

    def name(self, token: int) -> None:
        return None

    def refuse_without_texts(self) -> None:
        raise self._error()

    def _error(self) -> UserError:
        fix = "Put the files of the model's tokenizer beside its config.json, or give token ids."
        return UserError(str(self._path), "has no tokenizer", expected="tokenizer.json", fix=fix)


class _ByteStream:
    def __init__(self, skipped: set[Any]) -> None:
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def put(self, token: int) -> str:
        return "" if token in self._skipped else self._decoder.decode(bytes([token]))

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


class Answer:
    """The text of an answer, which a stop text may end.

    Attributes:
        stopped: The stop text that ended it; empty before.
    """

    def __init__(self, stream: TextStream, params: SamplingParams) -> None:
        self.stopped = ""
        self._stream, self._params, self._tokens = stream, params, 0
        # What may be the beginning of a stop text.
        self._held = ""

    def put(self, token: int) -> str:
        """Take a token; return the text that is certain by now and was not returned before."""
        self._tokens += 1
        return self._cut(self._stream.put(token)) if self._params.detokenize else ""

    def end(self) -> str:
        """Return what is left behind the last token."""
        if self.stopped or not self._params.detokenize:
            return ""
        piece = self._cut(self._stream.end())
        rest, self._held = self._held, ""
        return piece + rest

    def _cut(self, piece: str) -> str:
        text, stops = self._held + piece, self._params.stops
        # A stop text counts where its end comes, also if it begins before `min_tokens`.
        places = [(text.find(stop, max(0, len(self._held) + 1 - len(stop))), stop) for stop in stops]
        found = [each for each in places if each[0] >= 0 and self._tokens > self._params.min_tokens]
        if found:
            place, self.stopped = min(found)
            self._held = ""
            return text[: place + (len(self.stopped) if self._params.include_stop_str_in_output else 0)]
        longest = max((_overlap(text, stop) for stop in stops), default=0)
        self._held = text[len(text) - longest :]
        return text[: len(text) - longest]


def _overlap(text: str, stop: str) -> int:
    """Return how many letters at the end of a text begin a stop text."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
