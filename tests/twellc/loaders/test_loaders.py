"""Which loader takes which file, and what is said of files that none takes."""

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from twellc.base.errors import UserError
from twellc.loaders.loaded import fingerprint
from twellc.loaders.model import load_model
from twellc.options.source import TracingOptions


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def torchscript() -> bytes:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.trace(nn.Linear(4, 4), torch.randn(1, 4)), buffer)
    return buffer.getvalue()


def any_zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("folder/notes.txt", "hello")
    return buffer.getvalue()


def zip_of_several_disks() -> bytes:
    """What Python's own `is_zipfile` raises at."""
    end = any_zip()[-22:]
    locator = b"PK\x06\x07" + struct.pack("<LQL", 1, 0, 2)
    return any_zip()[:-22] + locator + end


FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "the file is empty"),
    "one byte": (lambda: b"P", "neither an archive nor a directory"),
    "text": (lambda: b"import torch\n" * 10, "neither an archive nor a directory"),
    "truncated zip": (lambda: any_zip()[:40], "a truncated or damaged zip archive"),
    "truncated archive": (lambda: saved({})[:200], "a truncated or damaged zip archive"),
    "zip of several disks": (zip_of_several_disks, "a damaged zip archive: zipfiles that span multiple disks"),
    "zip": (any_zip, "a zip archive without a torch.export program"),
    "TorchScript": (torchscript, "a TorchScript archive; export the module with torch.export instead"),
    "pickle": (lambda: pickle.dumps({"a": 1}), "is a pickle, and loading a pickle executes code"),
    "state dict": (lambda: saved(nn.Linear(4, 4).state_dict()), "holds no module; got weights by their names"),
    "module": (lambda: saved(nn.Linear(4, 4)), "is a pickle, and loading a pickle executes code"),
}


@pytest.mark.parametrize("kind", FILES)
def test_what_is_no_model(kind: str, tmp_path: Path) -> None:
    content, reason = FILES[kind]
    path = tmp_path / "model.pt2"
    path.write_bytes(content())
    with pytest.raises(UserError) as refusal:
        load_model(TracingOptions(path))
    assert str(refusal.value).startswith(str(path))
    assert reason in str(refusal.value)


def test_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.pt2")
    with pytest.raises(UserError, match="it is a device or a pipe"):
        load_model(TracingOptions(tmp_path / "model.pt2"))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such file or folder"):
        load_model(TracingOptions(tmp_path / "nothing"))


def test_safetensors_alone_are_no_model(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="neither an archive nor a directory"):
        load_model(TracingOptions(tmp_path / "model.safetensors"))


def test_fingerprint_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(b"abc")
    first = fingerprint(path)
    path.write_bytes(b"abd")
    assert fingerprint(path) != first


def test_fingerprint_of_a_directory(tmp_path: Path) -> None:
    def make(**files: str) -> str:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        for name, content in files.items():
            (folder / name.replace("_", ".")).write_text(content)
        return fingerprint(folder)

    base = make(config_json="a", model_safetensors="b")
    assert make(config_json="a", model_safetensors="b") == base
    assert make(config_json="a", model_safetensors="c") != base
    assert make(config_json="c", model_safetensors="b") != base
    assert make(other_json="a", model_safetensors="b") != base
    assert make(config_json="a", model_safetensors="b", notes_txt="c") == base
