"""What turns text into tokens and back: files of a model that are kept beside the plan of one that generates text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from twellc.options.commands import CompileOptions

_FOLDER = ".text"
# What transformers reads a tokenizer, its chat templates and the defaults of generation from. config.json may be all
# that names a tokenizer's class.
_FILES = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*",
    "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json", "chat_template.*",
    "additional_chat_templates/*",
)  # fmt: skip


def text_folder(options: CompileOptions) -> str | None:
    """Return the name of the folder beside the plan; None of a model without a cache, or where no plan is written."""
    if options.cache is None or options.output is None:
        return None
    return options.output.name + _FOLDER


def text_files(options: CompileOptions) -> list[tuple[Path, Path]]:
    """Return each file that is kept, and where."""
    name = text_folder(options)
    if name is None or options.output is None:
        return []
    folder = options.output.with_name(name)
    return [(file, folder / file.relative_to(options.model)) for file in _found(options.model)]


def _found(model: Path) -> Iterator[Path]:
    for pattern in _FILES:
        yield from sorted(file for file in model.glob(pattern) if file.is_file())
