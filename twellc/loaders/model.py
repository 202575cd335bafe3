"""Which loader takes which file."""

from __future__ import annotations

import zipfile
from pathlib import Path

from twellc.base.errors import UserError
from twellc.base.files import open_file
from twellc.export.shapes import FixedSizes
from twellc.loaders.archive import load_archive
from twellc.loaders.autoencoder_files import (
    EXPECTED,
    is_autoencoder,
    refuse_other_libraries,
    trace_autoencoder,
)
from twellc.loaders.huggingface import load_directory
from twellc.loaders.loaded import LoadedModel
from twellc.loaders.pickled import load_pickle
from twellc.options.declared_inputs import refuse_inputs
from twellc.options.source import ALL_LOGITS, TracingOptions, refuse_choices, refuse_missing


def load_model(source: TracingOptions, sizes: FixedSizes = (), cached: bool = False) -> LoadedModel:
    """Load and trace a model of any supported kind; files are told apart by their content, not by their names.

    Args:
        source: Where the model is, and how it is traced.
        sizes: The only sizes that are asked for, for Hugging Face models that do not take every size.
        cached: See `load_directory`.

    Raises:
        UserError: There is no such model, it cannot be loaded, or it leaves no choice of `padding` or `logits`.
    """
    path, inputs = source.model, source.input_specs
    refuse_missing(path, _EXPECTED)
    if is_autoencoder(path):
        refuse_inputs(inputs, f"{path}, another kind of model")
        refuse_choices(source.padding, source.logits, f"{path}, another kind of model")
        return trace_autoencoder(path)
    refuse_other_libraries(path)
    kind = "directory" if path.is_dir() else _sniff(path)
    if kind == "directory":
        refuse_inputs(inputs, f"{path}, another kind of model")
        return load_directory(path, source.padding, source.logits or ALL_LOGITS, sizes, cached)
    refuse_choices(source.padding, source.logits, f"{path}, another kind of model")
    if kind == "pickle":
        return load_pickle(path, source.trust_model, inputs)
    refuse_inputs(inputs, f"{path}, another kind of model")
    if kind == "archive":
        return load_archive(path, source.trust_model)
    raise UserError(str(path), f"not a model that twellc reads ({kind})", expected=_EXPECTED)


_EXPECTED = (
    "a torch.export archive (torch.export.save), a Hugging Face directory (config.json and safetensors), "
    f"an ONNX file, a pickled module or {EXPECTED}"
)


def _sniff(path: Path) -> str:
    """Return `archive` or `pickle`, or say what the file is instead."""
    if not path.is_file():
        return "it is a device or a pipe"
    if path.stat().st_size == 0:
        return "the file is empty"
    with open_file(path) as stream:
        head = stream.read(2)
    try:
        if not zipfile.is_zipfile(path):
            if head.startswith(b"\x80"):
                return "pickle"
            zip_file = head == b"PK"
            return "a truncated or damaged zip archive" if zip_file else "neither an archive nor a directory"
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
