"""Which loader takes which file, and what is said of files that none takes."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.models import Gated
from twellc.errors import UserError
from twellc.inputs import InputDeclaration, parse_input
from twellc.loaders.model import fingerprint, load_model

X = InputDeclaration("x", "float32", ("batch", 16))


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


FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "the file is empty"),
    "one byte": (lambda: b"P", "neither an archive nor a directory"),
    "text": (lambda: b"import torch\n" * 10, "neither an archive nor a directory"),
    "truncated zip": (lambda: any_zip()[:40], "a truncated or damaged zip archive"),
    "truncated archive": (lambda: saved({})[:200], "a truncated or damaged zip archive"),
    "zip": (any_zip, "a zip archive without a torch.export program"),
    "TorchScript": (torchscript, "a TorchScript archive; export the module with torch.export instead"),
    "pickle": (lambda: pickle.dumps({"a": 1}), "is a pickle, and loading a pickle executes code"),
    "state dict": (lambda: saved(nn.Linear(4, 4).state_dict()), "is a pickle, and loading a pickle executes code"),
    "module": (lambda: saved(nn.Linear(4, 4)), "is a pickle, and loading a pickle executes code"),
}


@pytest.mark.parametrize("kind", FILES)
def test_what_is_no_model(kind: str, tmp_path: Path) -> None:
    content, reason = FILES[kind]
    path = tmp_path / "model.pt2"
    path.write_bytes(content())
    with pytest.raises(UserError) as refusal:
        load_model(path, trust_model=False)
    assert str(refusal.value).startswith(str(path))
    assert reason in str(refusal.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such file or folder"):
        load_model(tmp_path / "nothing", trust_model=False)


def test_safetensors_alone_are_no_model(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="neither an archive nor a directory"):
        load_model(tmp_path / "model.safetensors", trust_model=False)


def test_inputs_belong_to_pickles_only(archive: Path) -> None:
    with pytest.raises(UserError, match="only a pickled module needs its inputs declared"):
        load_model(archive, trust_model=False, inputs=(X,))


# ---- pickled modules ----


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ffn = Gated(activation=torch.relu)
        self.table = nn.Embedding(2, 16)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.ffn(x) + self.table(ids)


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt"
    module = nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 16)).requires_grad_(False)
    torch.save(module, path)
    return path


def declared(*texts: str) -> tuple[InputDeclaration, ...]:
    return tuple(map(parse_input, texts))


def test_pickle_is_not_loaded_without_trust(tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    class Payload:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            import os

            return os.mkdir, (str(marker),)

    for name, content in (("zip.pt", saved(Payload())), ("bare.pt", pickle.dumps(Payload()))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match="add --trust-model"):
            load_model(tmp_path / name, trust_model=False, inputs=(X,))
        assert not marker.exists()
    with pytest.raises(UserError, match="holds no module"):
        load_model(tmp_path / "zip.pt", trust_model=True, inputs=(X,))
    assert marker.is_dir(), "the payload is no payload: this test shows nothing"


def test_pickled_module(pickled: Path) -> None:
    model = load_model(pickled, trust_model=True, inputs=declared("input:float32[batch,3,16]"))
    assert model.kind == "pickled module"
    assert list(model.dimension_names.values()) == ["batch"]
    assert model.output_names == ["output"]
    module, x = torch.load(pickled, weights_only=False), torch.randn(7, 3, 16)
    assert torch.equal(model.program.module()(input=x), module(x))


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ((), "needs each of its inputs declared once; got none; expected parameters of its forward: input"),
        (("y:float32[16]",), "got y; expected parameters of its forward: input"),
        (("input:float32[16]", "input:float32[16]"), "declared once; got input, input"),
        (("input:float32[batch,17]",), "cannot trace the model"),
    ],
)
def test_pickled_module_with_other_inputs(pickled: Path, inputs: tuple[str, ...], reason: str) -> None:
    with pytest.raises(UserError) as refusal:
        load_model(pickled, trust_model=True, inputs=declared(*inputs))
    assert reason in str(refusal.value)


def test_pickled_weights_are_no_module(tmp_path: Path) -> None:
    torch.save(nn.Linear(4, 4).state_dict(), tmp_path / "model.pt")
    with pytest.raises(UserError, match=r"holds no module; got OrderedDict; expected a pickled torch\.nn\.Module"):
        load_model(tmp_path / "model.pt", trust_model=True, inputs=(X,))


def test_damaged_pickle(pickled: Path) -> None:
    pickled.write_bytes(b"\x80\x02garbage")
    with pytest.raises(UserError, match="cannot be unpickled"):
        load_model(pickled, trust_model=True, inputs=(X,))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x:float32[batch,sequence,512]", InputDeclaration("x", "float32", ("batch", "sequence", 512))),
        ("input_ids:int64[ b , 16 ]", InputDeclaration("input_ids", "int64", ("b", 16))),
        ("flag:bool[]", InputDeclaration("flag", "bool", ())),
    ],
)
def test_parse_input(text: str, expected: InputDeclaration) -> None:
    assert parse_input(text) == expected


BAD_INPUTS = ["", "x", "x:float32", "x[3]", "x:float31[3]", "x:float32[0]", "x:float32[-1]", "1x:float32[3]"]
BAD_INPUTS += ["x:float32[3", "x:float32[3x]", "x:float32[a.b]"]


@pytest.mark.parametrize("text", BAD_INPUTS)
def test_parse_input_refuses(text: str) -> None:
    with pytest.raises(UserError, match="--input"):
        parse_input(text)


# ---- fingerprints ----


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
