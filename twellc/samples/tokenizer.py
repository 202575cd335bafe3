"""The tokenizer of a Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from twellc.base.errors import UserError, first_line

# Text is bytes to a model with this many token ids and without a tokenizer.
_BYTES = 256
_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip
FIX = "Turn the text into token ids yourself and give the arrays with --inputs FILE.npz."


@dataclass(frozen=True)
class Tokenizer:
    """Turns a text into token ids.

    Attributes:
        encode: Returns the ids of a text, without special tokens.
        before, after: The special tokens that stand before and behind a text.
        notes: What the user should know.
    """

    encode: Callable[[str], list[int]]
    before: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __call__(self, text: str) -> list[int]:
        """Return the ids of a whole text, special tokens included."""
        return self.before + self.encode(text) + self.after


def load_tokenizer(model: Path, vocabulary: int) -> Tokenizer:
    """Load the tokenizer of a model. Nothing is downloaded, and no code of the directory is run.

    A model of 256 token ids and without a tokenizer gets the bytes of the text, behind the token that its config.json
    names as `bos_token_id`.

    Args:
        model: A Hugging Face directory.
        vocabulary: Number of token ids.

    Raises:
        UserError: There is none, or it is damaged.
    """
    if not any((model / name).is_file() for name in _FILES):
        if vocabulary != _BYTES:
            raise UserError(
                str(model), "has no tokenizer", expected=_FILES[0],
                fix="Put the files of the model's tokenizer beside its config.json, or turn the text into token ids "
                "yourself and give the arrays with --inputs FILE.npz.",
            )  # fmt: skip
        first = json.loads((model / "config.json").read_bytes()).get("bos_token_id")
        before = [first] if isinstance(first, int) else []
        note = "the model has 256 token ids and no tokenizer: the text is read as bytes"
        note += f", behind the token {first}" if before else ""
        return Tokenizer(lambda text: list(text.encode()), before, notes=[note])
    import transformers

    def encode(text: str, special: bool = False) -> list[int]:
        try:
            return [int(token) for token in tokenizer(text, add_special_tokens=special)["input_ids"]]
        except Exception as error:
            raise _broken(model, error) from error

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises what it likes for a damaged folder
        raise _broken(model, error) from error
    plain, special = encode("a"), encode("a", special=True)
    start = next((i for i in range(len(special)) if special[i : i + len(plain)] == plain), None) if plain else None
    if start is None:
        return Tokenizer(encode)
    return Tokenizer(encode, special[:start], special[start + len(plain) :])


def _broken(model: Path, error: Exception) -> UserError:
    return UserError(str(model), f"transformers cannot load the tokenizer ({first_line(error)})", fix=FIX)
