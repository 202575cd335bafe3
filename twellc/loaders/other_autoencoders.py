"""Sparse autoencoders in files of libraries that are not read: recognised, so that a refusal can name them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import torch

from twellc.base.errors import UserError
from twellc.loaders.checkpoint import read_json

_FOLDERS = ("", "checkpoints")  # the latter is Llama Scope's
SAE_LENS = "sae-lens"
_SUFFIXES = (".pt", ".pth", ".safetensors")
# Weights that a library's autoencoders have, those of several last.
_LIBRARIES: tuple[tuple[str, frozenset[str]], ...] = (
    ("OpenAI's sparse_autoencoder", frozenset(("latent_bias", "pre_bias"))),
    ("Goodfire", frozenset(("encoder_linear.weight", "decoder_linear.weight"))),
    ("sparsify", frozenset(("encoder.weight", "W_dec"))),
    ("dictionary_learning", frozenset(("encoder.weight", "decoder.weight", "b_dec"))),
    ("dictionary_learning", frozenset(("encoder.weight", "decoder.weight", "bias"))),
    ("dictionary_learning", frozenset(("encoder.weight", "decoder.weight", "gate_bias"))),
    ("another library", frozenset(("encoder.weight", "decoder.weight"))),  # Llama Scope, or what torch users write
    (SAE_LENS, frozenset(("W_enc", "W_dec"))),
    ("another library", frozenset(("W_E", "W_D"))),
)


def library_of(path: Path) -> tuple[Path, str] | None:
    """Return the file with the weights of a sparse autoencoder at a path, and which library wrote it.

    None stands for all else, such as a folder whose config.json is of transformers. Nothing is executed, and no
    weights are read but their names.
    """
    for file in _files(path):
        names = _names(file)
        for library, needed in _LIBRARIES:
            if needed <= names:
                return file, library
        if path.is_dir() and file.name == "ae.pt":
            return file, "dictionary_learning"
    return None


def _files(path: Path) -> Iterable[Path]:
    if not path.is_dir():
        return [path] if path.is_file() else []
    with contextlib.suppress(UserError):
        config = read_json(path / "config.json") if (path / "config.json").is_file() else {}
        if not {"architectures", "model_type"} & config.keys():
            found = (each for folder in _FOLDERS for each in sorted((path / folder).glob("*")))
            return (each for each in found if each.suffix in _SUFFIXES and each.is_file())
    return []


def _names(file: Path) -> set[str]:
    """Return the names of the tensors of a file; nothing for one that cannot be read."""
    from safetensors import safe_open

    # torch and safetensors raise what they like for other files and damaged ones.
    with contextlib.suppress(Exception):
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as stored:
                return set(stored.keys())
        content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        inner = [each for each in content.values() if isinstance(each, dict)]
        return {str(name) for each in (content, *inner) for name in each}
    return set()
