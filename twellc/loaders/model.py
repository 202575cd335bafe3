"""A loaded model, and which loader takes which file."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.export import ExportedProgram

from twellc.errors import UserError
from twellc.inputs import InputDeclaration, refuse_inputs

DimensionRange = tuple[int, int, int]


@dataclass
class LoadedModel:
    """A model as a traced program, with what a compiler needs to know besides.

    Attributes:
        path: The file or folder that it came from.
        kind: `torch.export archive`, `Hugging Face directory` or `pickled module`.
        program: The traced program, in the precision of its source.
        output_names: Names of its outputs, in order.
        dimension_names: Names of its symbolic dimensions, by symbol.
        dimension_ranges: (min, opt, max) of the default optimization profile, by symbol.
        vocabulary: Number of token ids, for making inputs; None where no input holds token ids.
        language_model: Whether its first output holds logits over the vocabulary.
        declared_activation: The activation that a config.json names; empty without one.
        notes: What the user should hear about how it was loaded.
        settings: The choices that it was traced by, of `padding` and `logits` of `CompileOptions`; empty for a model
            that leaves none.
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


def load_model(
    path: Path,
    trust_model: bool,
    inputs: tuple[InputDeclaration, ...] = (),
    padding: str | None = None,
    logits: str = "all",
) -> LoadedModel:
    """Load a model of any supported kind; files are told apart by their content, not by their names.

    Args:
        path: A torch.export archive, a Hugging Face directory or a pickled module.
        trust_model: Load a pickle, or an archive that could execute code, too.
        inputs: The inputs of a pickled module.
        padding: Whether a causal Hugging Face model takes an `attention_mask`; see `CompileOptions`.
        logits: The places whose logits a causal Hugging Face model computes; see `CompileOptions`.

    Raises:
        UserError: There is no such model, it cannot be loaded, or it leaves no choice of `padding` or `logits`.
    """
    from twellc.loaders.archive import load_archive
    from twellc.loaders.huggingface import load_directory
    from twellc.loaders.pickled import load_pickle

    if not path.exists():
        raise UserError(str(path), "there is no such file or folder", expected=_EXPECTED)
    kind = "directory" if path.is_dir() else _sniff(path)
    if kind == "directory":
        refuse_inputs(inputs, f"{path}, another kind of model")
        return load_directory(path, padding, logits)
    refuse_choices(padding, logits, f"{path}, another kind of model")
    if kind == "pickle":
        return load_pickle(path, trust_model, inputs)
    refuse_inputs(inputs, f"{path}, another kind of model")
    if kind == "archive":
        return load_archive(path, trust_model)
    raise UserError(str(path), f"not a model that twellc reads ({kind})", expected=_EXPECTED)


class NoChoiceError(UserError):
    """A choice of `padding` or `logits` was made, and the model leaves none."""


def refuse_choices(padding: str | None, logits: str, target: str) -> None:
    """Fail if a choice is made that only causal Hugging Face models leave.

    Raises:
        NoChoiceError: It is.
    """
    chosen = [f"--padding {padding}"] if padding is not None else []
    chosen += [f"--logits {logits}"] if logits != "all" else []
    if chosen:
        raise NoChoiceError(
            chosen[0], "only a causal Hugging Face model leaves the choice", got=target, fix="Leave it out."
        )


_EXPECTED = (
    "a torch.export archive (torch.export.save), a Hugging Face directory (config.json and safetensors), "
    "an ONNX file or a pickled module"
)


def _sniff(path: Path) -> str:
    """Return `archive` or `pickle`, or say what the file is instead."""
    if not path.is_file():
        return "it is a device or a pipe"
    if path.stat().st_size == 0:
        return "the file is empty"
    if not zipfile.is_zipfile(path):
        with path.open("rb") as stream:
            head = stream.read(2)
        if head.startswith(b"\x80"):
            return "pickle"
        if head.startswith(b"PK"):
            return "a truncated or damaged zip archive"
        return "neither an archive nor a directory"
    try:
        with zipfile.ZipFile(path) as archive:
            names = {name.partition("/")[2] for name in archive.namelist()}
    except Exception as error:  # zipfile raises what it likes where the directory of the archive is damaged
        return f"a damaged zip archive: {error}"
    if {"archive_format", "archive_version"} <= names:
        return "archive"
    if "constants.pkl" in names:
        return "a TorchScript archive; export the module with torch.export instead"
    if "data.pkl" in names:
        return "pickle"
    return "a zip archive without a torch.export program"


def fingerprint(path: Path) -> str:
    """Return the SHA-256 of a model: of the file, or of the names and contents of a directory's model files."""
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted([*path.glob("*.json"), *path.glob("*.safetensors")]):
        digest.update(file.name.encode() if path.is_dir() else b"")
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def dtype_name(dtype: torch.dtype) -> str:
    """Return `bfloat16` for torch.bfloat16, and so on."""
    return str(dtype).removeprefix("torch.")
