"""The tokenizer of a Hugging Face directory."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twellc.base.errors import UserError, first_line
from twellc.base.files import temporary_folder
from twellc.base.transformers_private import nothing_fetched
from twellc.loaders.checkpoint import read_config

# Text is bytes to a model with this many token ids and without a tokenizer.
BYTES = 256
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
FIX = "Turn the text into token ids yourself, and give these in an .npz file."


@dataclass(frozen=True)
class Tokenizer:
    """Turns a text into token ids.

    Attributes:
        encode: Returns the ids of a text, without special tokens.
        before, after: The special tokens before and behind a text.
        notes: Notes for the user.
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
    if not has_tokenizer(model):
        if vocabulary != BYTES:
            raise UserError(
                str(model),
                "has no tokenizer",
                expected=_FILES[0],
                fix="Put the files of the model's tokenizer beside its config.json, or turn the text into token ids "
                "yourself, and give these in an .npz file.",
            )
        first = read_config(model).get("bos_token_id")
        before = [first] if isinstance(first, int) else []
        note = "the model has 256 token ids and no tokenizer: the text is read as bytes"
        note += f", behind the token {first}" if before else ""
        return Tokenizer(lambda text: list(text.encode()), before, notes=[note])

    encode = functools.partial(token_ids, model, pretrained_tokenizer(model))
    plain, special = encode("a"), encode("a", special=True)
    start = next((i for i in range(len(special)) if special[i : i + len(plain)] == plain), None) if plain else None
    if start is None:
        return Tokenizer(encode)
    return Tokenizer(encode, special[:start], special[start + len(plain) :])


def has_tokenizer(model: Path) -> bool:
    """Whether a directory holds a tokenizer."""
    return any((model / name).is_file() for name in _FILES)


def pretrained_tokenizer(model: Path) -> Any:
    """Load a tokenizer of transformers. Nothing is downloaded, and no code of the directory is run.

    It is loaded from links to the plain files of the folder, as transformers would wait for a pipe among other files.

    Raises:
        UserError: It is damaged.
    """
    config = read_config(model) if (model / "config.json").is_file() else None
    with nothing_fetched(), temporary_folder() as folder:
        from transformers import AutoTokenizer

        for file in model.iterdir():
            if file.is_file() and file.suffix not in _WEIGHTS:
                (folder / file.name).symlink_to(file.resolve())
        if config is not None:
            (folder / "config.json").unlink()
            (folder / "config.json").write_text(json.dumps(config))
        try:
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers may raise anything for a damaged folder
            raise _broken(model, error).renamed(str(folder), str(model)) from error


def token_ids(model: Path, tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    """Return the token ids of a text by the tokenizer of transformers of a model.

    Args:
        model: The model's directory, for messages.
        tokenizer: The tokenizer.
        text: The text.
        special: Whether special tokens are added.

    Raises:
        UserError: The tokenizer is damaged; some damage shows only here.
    """
    try:
        return [int(token) for token in tokenizer(text, add_special_tokens=special)["input_ids"]]
    except Exception as error:  # transformers may raise anything
        raise _broken(model, error) from error


def _broken(model: Path, error: Exception) -> UserError:
    return UserError(
        str(model),
        f"transformers cannot load the tokenizer ({first_line(error)})",
        fix="Mend its files, or turn the text into token ids yourself: an .npz file holds them, and LLM takes lists.",
    )
