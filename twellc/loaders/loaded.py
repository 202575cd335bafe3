"""A loaded model, and what every loader says of one."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from torch.export import ExportedProgram

from twellc.base.caches import KeyValueCache
from twellc.base.files import open_file

DimensionRange = tuple[int, int, int]


@dataclass
class LoadedModel:
    """A model as a traced program, with what a compiler needs to know besides.

    Attributes:
        path: The file or folder that it came from.
        kind: `torch.export archive`, `Hugging Face directory`, `pickled module` or `sparse autoencoder`.
        program: The traced program, in the precision of its source.
        output_names: Names of its outputs, in order.
        dimension_names: Names of its symbolic dimensions, by symbol.
        dimension_ranges: (min, opt, max) of the default optimization profile, by symbol.
        vocabulary: Number of token ids, for making inputs; None where no input holds token ids.
        language_model: Whether its first output holds logits over the vocabulary.
        declared_activation: The activation that a config.json names; empty without one.
        notes: What the user should hear about how it was loaded.
        settings: The choices that it was traced by, of `padding` and `logits` of `TracingOptions`; empty for a model
            that leaves none.
        input_names: Names of inputs that differ from those of their placeholders, by these.
        cache: Its key-value cache; None of a model without one.
    """

    path: Path
    kind: str
    program: ExportedProgram
    output_names: list[str]
    dimension_names: dict[str, str] = field(default_factory=dict)
    dimension_ranges: dict[str, DimensionRange] = field(default_factory=dict)
    vocabulary: int | None = None
    language_model: bool = False
    declared_activation: str = ""
    notes: list[str] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    input_names: dict[str, str] = field(default_factory=dict)
    cache: KeyValueCache | None = None


def fingerprint(path: Path) -> str:
    """Return the SHA-256 of a model: of the file, or of the names and contents of a directory's model files."""
    digest = hashlib.sha256()
    within = sorted(
        file for file in [*path.glob("*.json"), *path.glob("*.safetensors"), *path.glob("*.npz")] if file.is_file()
    )
    for file in within if path.is_dir() else [path]:
        digest.update(file.name.encode() if path.is_dir() else b"")
        with open_file(file) as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()
