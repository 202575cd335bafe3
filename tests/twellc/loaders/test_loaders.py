"""Which loader takes which file, what is said of files that none takes, and pickled modules with declared inputs."""

import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.models import canonicalize
from twellc.base.errors import UserError
from twellc.base.torch_private import pytree
from twellc.loaders.loaded import fingerprint
from twellc.loaders.model import load_model
from twellc.loaders.tracing import paths_of
from twellc.options.declared_inputs import InputDeclaration, parse_input
from twellc.options.source import TracingOptions
from twellc.passes.graph.execution import Runner
from twellc.passes.match.find_ffn import find_ffn_blocks


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


class Marker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.write_text, (self.path, "ran")


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    module = nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 24))
    torch.save(module, tmp_path / "module.pt")
    return tmp_path / "module.pt"


def test_traced_with_dynamic_dimensions(pickled: Path) -> None:
    model = load_model(
        TracingOptions(pickled, trust_model=True, input_specs=(parse_input("input:float32[batch,n,16]"),))
    )
    assert sorted(model.dimension_names.values()) == ["batch", "n"]
    (block,) = find_ffn_blocks(canonicalize(model.program))
    assert (block.variant, block.d_model, block.d_ff, block.d_out) == ("plain", 16, 40, 24)
    x = torch.randn(1, 9, 16)
    expected = torch.load(pickled, weights_only=False)(x)
    torch.testing.assert_close(Runner(model.program)({"input": x})[0], expected)


@pytest.mark.parametrize("legacy", [False, True])
def test_nothing_runs_without_trust(tmp_path: Path, legacy: bool) -> None:
    path, marker = tmp_path / "model.pt", tmp_path / "marker"
    torch.save(Marker(marker), path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(UserError, match="loading a pickle executes code"):
        load_model(TracingOptions(path, input_specs=(parse_input("x:float32[2]"),)))
    assert not marker.exists()
    with pytest.raises(UserError, match="holds no module"):
        load_model(TracingOptions(path, trust_model=True, input_specs=(parse_input("x:float32[2]"),)))
    assert marker.read_text() == "ran", "the payload must work, or the test above shows nothing"


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((), "needs each of its inputs declared once; got none; expected parameters of its forward: input"),
        (("y:float32[2,16]",), "got y"),
        (("input:float32[2,17]",), "cannot trace the model"),
    ],
)
def test_wrong_inputs(pickled: Path, inputs: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_model(TracingOptions(pickled, trust_model=True, input_specs=tuple(map(parse_input, inputs))))


def test_damaged_pickle(pickled: Path) -> None:
    pickled.write_bytes(b"\x80\x02garbage")
    with pytest.raises(UserError, match=r"cannot be unpickled .* must be importable here: name .* in PYTHONPATH"):
        load_model(TracingOptions(pickled, trust_model=True, input_specs=(parse_input("input:float32[2,16]"),)))


STATE = nn.Linear(4, 4).state_dict()
NO_MODULES: dict[str, tuple[object, str]] = {
    "weights": (STATE, "holds no module; got weights by their names; expected"),
    "a checkpoint of training": ({"step": 3, "model": STATE}, "holds no module; got a dict of step, model; expected"),
    "a tensor": (torch.zeros(3), "holds no module; got Tensor; expected"),
    "a program": (
        torch.export.export(nn.Linear(4, 4), (torch.ones(2, 4),)),
        r"holds a program of torch\.export that torch\.save wrote\. Write it with torch\.export\.save",
    ),
}


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("kind", NO_MODULES)
def test_what_is_no_module(kind: str, trusted: bool, tmp_path: Path) -> None:
    """It is said at once, without the user's trust."""
    content, message = NO_MODULES[kind]
    torch.save(content, tmp_path / "weights.pt")
    inputs = (parse_input("x:float32[2,4]"),) if trusted else ()
    with pytest.raises(UserError, match=message):
        load_model(TracingOptions(tmp_path / "weights.pt", trust_model=trusted, input_specs=inputs))


def in_parts(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(wrap(nn.Linear(16, 40)), nn.ReLU(), nn.Sequential(wrap(nn.Linear(40, 24))))


WRAPPED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "compiled": (torch.compile, "torch.compile"),
    "parallel": (nn.DataParallel, "DataParallel"),
    "both": (lambda module: torch.compile(nn.DataParallel(module)), "DataParallel and torch.compile"),
}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("kind", WRAPPED)
def test_wrapped_modules(kind: str, whole: bool, tmp_path: Path) -> None:
    """What is around a module or its parts is taken away."""
    wrap, wrappers = WRAPPED[kind]
    bare = in_parts(lambda module: module)
    module = wrap(in_parts(lambda module: module)) if whole else in_parts(wrap)
    for given, own in zip(module.parameters(), bare.parameters(), strict=True):
        given.data.copy_(own.data)
    torch.save(module, tmp_path / "module.pt")
    model = load_model(
        TracingOptions(tmp_path / "module.pt", trust_model=True, input_specs=(parse_input("input:float32[n,16]"),))
    )
    assert model.notes == [f"the module is taken without {wrappers}"]
    assert [str(block.module) for block in find_ffn_blocks(canonicalize(model.program))] == ["2.0"]
    x = torch.randn(9, 16)
    torch.testing.assert_close(Runner(model.program)({"input": x})[0], bare(x))


def test_inputs_of_another_kind_of_model(llama: Path) -> None:
    with pytest.raises(UserError, match="only a pickled module needs its inputs declared"):
        load_model(TracingOptions(llama, trust_model=True, input_specs=(parse_input("x:float32[2,4]"),)))


def test_parse_input() -> None:
    assert parse_input("x:float32[batch, 3]") == InputDeclaration("x", "float32", ("batch", 3))
    assert parse_input("n:int64[]") == InputDeclaration("n", "int64", ())
    assert parse_input("x:bool[2147483647]") == InputDeclaration("x", "bool", (2**31 - 1,))


@pytest.mark.parametrize(
    "text",
    [
        "x", "x:float32", "x:f32[2]", "x:float32[0]", "x:float32[a b]", ":float32[2]", "x:float32[2]y",
        "x:float32[b,,16]", "x:float32[b,]", "x:float32[²,16]", "x:float32[2147483648]",
        pytest.param(f"x:float32[{'9' * 5000}]", id="5000 digits"),
    ],
)  # fmt: skip
def test_parse_input_refuses(text: str) -> None:
    with pytest.raises(UserError, match="--input-spec: not"):
        parse_input(text)


def test_input_that_no_memory_holds(pickled: Path) -> None:
    with pytest.raises(
        UserError, match=r"--input-spec: input is too large to trace the model with; got 2147483647x2147"
    ):
        load_model(
            TracingOptions(
                pickled, trust_model=True, input_specs=(parse_input("input:float32[2147483647,2147483647,16]"),)
            )
        )


def test_names_of_outputs_whose_class_tells_torch_no_keys() -> None:
    """As outputs of older releases of transformers."""

    class Output(OrderedDict[str, Any]):
        pass

    pytree.register_pytree_node(
        Output,
        lambda output: (list(output.values()), list(output)),
        lambda values, keys: Output(zip(keys or (), values, strict=True)),
    )
    spec = pytree.tree_structure(Output(text=Output(hidden=(1, 2)), logits=3))
    assert paths_of(spec) == [("text", "hidden", 0), ("text", "hidden", 1), ("logits",)]
