"""Loading ONNX files: they are known by their content, and nothing outside of their folder is ever read."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from tests.conftest import Cli
from tests.onnx_graphs import D_MODEL, gated, save_external
from twellc.base.errors import UserError
from twellc.checks.evaluator import OnnxEvaluator
from twellc.loaders.onnx_file import external_files, load_onnx
from twellc.loaders.onnx_format import looks_like_onnx

SECRET = b"\x40\x40" * 4096


@pytest.fixture
def external(tmp_path: Path) -> Path:
    """A model in a separate folder, with its weights in weights.bin beside it."""
    (tmp_path / "model").mkdir()
    return save_external(gated(), tmp_path / "model" / "model.onnx")


def change_location(path: Path, **fields: str | None) -> None:
    """Change the external data of the first tensor; None removes a field."""
    model = onnx.load(path, load_external_data=False)
    tensor = next(tensor for tensor in model.graph.initializer if tensor.external_data)
    entries = {entry.key: entry.value for entry in tensor.external_data} | fields
    del tensor.external_data[:]
    for key, value in entries.items():
        if value is not None:
            tensor.external_data.add(key=key, value=value)
    path.write_bytes(model.SerializeToString())


def run(model: onnx.ModelProto, path: Path) -> torch.Tensor:
    x = torch.linspace(-1, 1, 2 * D_MODEL).reshape(1, 2, D_MODEL).bfloat16()
    return OnnxEvaluator(path, model).run({"x": x})[0]


def test_external_data_is_loaded(external: Path) -> None:
    assert torch.equal(run(load_onnx(external), external), run(gated(), external))
    assert external_files(external) == [external.with_name("weights.bin")]


def test_external_data_in_a_subfolder(external: Path) -> None:
    (external.parent / "data").mkdir()
    external.with_name("weights.bin").rename(external.parent / "data" / "weights.bin")
    model = onnx.load(external, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = "data/weights.bin" if entry.key == "location" else entry.value
    external.write_bytes(model.SerializeToString())
    assert torch.equal(run(load_onnx(external), external), run(gated(), external))


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("../secret.bin", "does not have a plain relative location"),
        ("data/../../secret.bin", "does not have a plain relative location"),
        ("{outside}/secret.bin", "does not have a plain relative location"),
        ("..\\secret.bin", "does not have a plain relative location"),
        ("", "does not have a plain relative location"), (".", "does not have a plain relative location"),
        ("file:secret.bin", "does not have a plain relative location"), ("missing.bin", "cannot be found"),
        ("link.bin", "is a link"), ("folder/secret.bin", "'folder' is a link"), ("chain.bin", "is a link"),
        ("hard.bin", "is a file with several names"), ("pipe.bin", "is not a regular file"), ("data", "is a folder"),
    ],
)  # fmt: skip
def test_data_outside_of_the_folder_is_not_read(
    external: Path, location: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, outside = external.parent, external.parent.parent / "outside"
    outside.mkdir()
    for secret in (outside / "secret.bin", folder.parent / "secret.bin"):
        secret.write_bytes(SECRET)
    (folder / "data").mkdir()
    (folder / "link.bin").symlink_to(outside / "secret.bin")
    (folder / "chain.bin").symlink_to("link.bin")
    (folder / "folder").symlink_to(outside)
    (folder / "hard.bin").hardlink_to(outside / "secret.bin")
    os.mkfifo(folder / "pipe.bin")  # opening it would wait for ever
    change_location(external, location=location.format(outside=outside))
    opened: list[str] = []
    original = os.open

    def noted(path: Any, *rest: Any, **more: Any) -> int:
        opened.append(str(path))
        return original(path, *rest, **more)

    monkeypatch.setattr(os, "open", noted)
    with pytest.raises(UserError, match=message):
        load_onnx(external)
    assert opened == []  # of a model with one bad location, the good ones are not read either


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"offset": "999999999"}, "ends behind its file"),
        ({"length": "999999999"}, "ends behind its file"),
        ({"offset": "-1"}, "has an offset or length that is not a number"),
        ({"length": "0x10"}, "has an offset or length that is not a number"),
        ({"offset": "²"}, "has an offset or length that is not a number"),
        ({"length": "1"}, "is not a valid ONNX model"),
        ({"basepath": "/etc"}, "has unknown or repeated fields"),
    ],
)
def test_ranges_must_fit(external: Path, fields: dict[str, str], message: str) -> None:
    change_location(external, **fields)
    with pytest.raises(UserError, match=message):
        load_onnx(external)


def test_data_of_constants_in_subgraphs_is_checked_too(tmp_path: Path) -> None:
    model = gated()
    tensor = onnx.TensorProto(name="hidden", data_type=onnx.TensorProto.FLOAT, dims=[2])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../secret.bin")
    inner = onnx.helper.make_graph([onnx.helper.make_node("Constant", [], ["c"], value=tensor)], "inner", [], [])
    model.graph.node.append(onnx.helper.make_node("If", ["x"], ["unused"], then_branch=inner, else_branch=inner))
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(UserError, match="'hidden' does not have a plain relative location"):
        load_onnx(path)


@pytest.mark.parametrize("data_type", [999, 2**31 - 1])
def test_a_type_that_onnx_does_not_have(tmp_path: Path, data_type: int) -> None:
    model = gated()
    model.graph.initializer[0].data_type = data_type
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(UserError, match=rf"has elements of an unknown type\); got {data_type}"):
        load_onnx(path)


def test_known_by_content(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    onnx.save(gated(), path)
    assert looks_like_onnx(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert looks_like_onnx(path)  # so that the message is about ONNX
    with pytest.raises(UserError, match="is a truncated or damaged ONNX file"):
        load_onnx(path)


@pytest.mark.parametrize(
    "content", [b"", b"\x08", b"PK\x03\x04", b"\x80\x04\x95", b"{}", b"\x00" * 64, b"\xff" * 64, b"hello world"]
)
def test_other_files_are_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.onnx"
    path.write_bytes(content)
    assert not looks_like_onnx(path)
    assert not looks_like_onnx(tmp_path)


def test_a_graph_without_a_name(cli: Cli, tmp_path: Path) -> None:
    model = gated()
    model.graph.ClearField("name")
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    done = cli("compile", tmp_path / "model.onnx", "--backend", "none", "--onnx", tmp_path / "rewritten.onnx")
    assert done.exit_code == 0, done.output
    assert load_onnx(tmp_path / "rewritten.onnx").graph.name


@pytest.mark.parametrize("layers", ["all", "none"])
def test_weights_as_inputs(cli: Cli, tmp_path: Path, layers: str) -> None:
    """As in files from before 2019."""
    model = gated()
    model.ir_version = 3
    weights = model.graph.initializer
    model.graph.input.extend(onnx.helper.make_tensor_value_info(w.name, w.data_type, w.dims) for w in weights)
    onnx.checker.check_model(model)
    onnx.save(model, tmp_path / "model.onnx")
    options = ("--backend", "none", "--layers", layers, "--onnx", tmp_path / "rewritten.onnx")
    done = cli("compile", tmp_path / "model.onnx", *options)
    assert done.exit_code == 0, done.output
    assert [value.name for value in load_onnx(tmp_path / "rewritten.onnx").graph.input] == ["x"]


def test_invalid_graphs_are_refused(tmp_path: Path) -> None:
    path, unknown, short = tmp_path / "model.onnx", gated(), gated()
    unknown.graph.node[1].input[0] = "nowhere"
    short.graph.initializer[1].dims[0] = 2**40  # far more than its bytes
    for model, reason in (
        (unknown, ""),
        (short, ""),
        (onnx.ModelProto(ir_version=8, graph=onnx.GraphProto()), r" \(it has no outputs\)"),
    ):
        path.write_bytes(model.SerializeToString())
        with pytest.raises(UserError, match=f"not a valid ONNX model{reason}"):
            load_onnx(path)


def test_local_functions_become_plain_nodes(tmp_path: Path) -> None:
    function = onnx.helper.make_function(
        "local", "Act", ["z"], ["r"], [onnx.helper.make_node("Relu", ["z"], ["r"])], [onnx.helper.make_opsetid("", 20)]
    )
    model = gated()
    relu = next(node for node in model.graph.node if node.op_type == "Relu")
    relu.op_type, relu.domain = "Act", "local"
    model.functions.append(function)
    model.opset_import.append(onnx.helper.make_opsetid("local", 1))
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    assert "Relu" in [node.op_type for node in load_onnx(path).graph.node]


def sparse_of(tensor: onnx.TensorProto, by_row: bool) -> onnx.SparseTensorProto:
    """Return a tensor as a sparse one, with an index for each number or one for each dimension of it."""
    values = onnx.numpy_helper.to_array(tensor)
    found = np.argwhere(values != 0) if by_row else np.flatnonzero(values)
    stored = onnx.numpy_helper.from_array(values[values != 0], tensor.name)
    indices = onnx.numpy_helper.from_array(found.astype(np.int64), f"{tensor.name}_indices")
    return onnx.helper.make_sparse_tensor(stored, indices, list(tensor.dims))


def pruned() -> onnx.ModelProto:
    model = gated()
    for tensor in model.graph.initializer:
        values = np.array(onnx.numpy_helper.to_array(tensor))
        values[np.abs(values.astype(np.float32)) < 0.05] = 0
        tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    return model


@pytest.mark.parametrize("form", ["initializer", "by row", "Constant", "function"])
def test_sparse_weights_keep_their_values(tmp_path: Path, form: str) -> None:
    model, path = pruned(), tmp_path / "model.onnx"
    expected = run(model, path)
    weights = list(model.graph.initializer)
    del model.graph.initializer[:]
    if form in ("initializer", "by row"):
        model.graph.sparse_initializer.extend(sparse_of(each, form == "by row") for each in weights)
    nodes = [
        onnx.helper.make_node("Constant", [], [each.name], sparse_value=sparse_of(each, False)) for each in weights
    ]
    opsets = list(model.opset_import)
    if form == "function":
        names = [each.name for each in weights]
        function = onnx.helper.make_function("local", "Weights", [], names, nodes, opsets)
        model.functions.append(function)
        nodes = [onnx.helper.make_node("Weights", [], names, domain="local")]
        model.opset_import.append(onnx.helper.make_opsetid("local", 1))
    if form in ("Constant", "function"):
        nodes += model.graph.node
        del model.graph.node[:]
        model.graph.node.extend(nodes)
    path.write_bytes(model.SerializeToString())
    assert torch.equal(run(load_onnx(path), path), expected)


def test_damaged_sparse_weights_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    for index, message in ((0, "do not ascend"), (2**40, "do not fit"), (-1, "do not fit")):
        model = pruned()
        sparse = sparse_of(model.graph.initializer.pop(), False)
        indices = np.array(onnx.numpy_helper.to_array(sparse.indices))
        indices[0 if index < 0 else -1] = index
        sparse.indices.CopyFrom(onnx.numpy_helper.from_array(indices, "i"))
        model.graph.sparse_initializer.append(sparse)
        path.write_bytes(model.SerializeToString())
        with pytest.raises(UserError, match=message):
            load_onnx(path)


def unread() -> dict[str, onnx.ModelProto]:
    """Models with what a rewritten graph would not hold."""
    models = {name: gated() for name in (
        "training information", "quantisation annotation", "device configuration", "no tensor but of kind sequence",
        "no tensor but of kind optional", "SPARSE_TENSORS", "GRAPHS", "one name", "onnx .* does not know",
    )}  # fmt: skip
    models["training information"].training_info.add()
    models["quantisation annotation"].graph.quantization_annotation.add(tensor_name="w")
    models["device configuration"].graph.node[0].device_configurations.add(configuration_id="two")
    sequence = onnx.helper.make_tensor_sequence_value_info("s", onnx.TensorProto.FLOAT, None)
    models["no tensor but of kind sequence"].graph.input.append(sequence)
    optional = onnx.helper.make_value_info("o", onnx.helper.make_optional_type_proto(sequence.type))
    models["no tensor but of kind optional"].graph.output.append(optional)
    node = models["SPARSE_TENSORS"].graph.node[0]
    node.attribute.add(name="more", type=onnx.AttributeProto.SPARSE_TENSORS)
    models["GRAPHS"].graph.node[0].attribute.add(name="more", type=onnx.AttributeProto.GRAPHS)
    model = models["one name"]
    model.graph.initializer.append(model.graph.initializer[0])
    return models


@pytest.mark.parametrize("name", unread())
def test_what_is_not_carried_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path, content = tmp_path / "model.onnx", unread()[name].SerializeToString()
    # Field 900, a number.
    path.write_bytes(content + (bytes([0xA0, 0x38, 1]) if "know" in name else b""))
    with pytest.raises(
        UserError, match=name.replace("a sequence", "no tensor but of kind sequence").replace("an o", "an? o")
    ):
        load_onnx(path)


def test_metadata_and_texts_stay(cli: Cli, tmp_path: Path) -> None:
    model = gated()
    model.graph.node.append(onnx.helper.make_node("Mul", [model.graph.output[0].name, "c"], ["z"]))
    model.graph.initializer.append(onnx.helper.make_tensor("c", onnx.TensorProto.BFLOAT16, [1], [2.0]))
    model.graph.output[0].name = "z"
    kept = {"model": model, "graph": model.graph, "node": model.graph.node[-1], "weight": model.graph.initializer[-1],
            "input": model.graph.input[0], "output": model.graph.output[0]}  # fmt: skip
    for name, each in kept.items():
        each.metadata_props.add(key="mine", value=name)
        each.doc_string = f"of the {name}"
    onnx.save(model, tmp_path / "model.onnx")
    done = cli("compile", tmp_path / "model.onnx", "--backend", "none", "--onnx", tmp_path / "rewritten.onnx")
    assert done.exit_code == 0, done.output
    made = load_onnx(tmp_path / "rewritten.onnx")
    weight = next(each for each in made.graph.initializer if each.name == "c")
    found = (made, made.graph, made.graph.node[-1], weight, made.graph.input[0], made.graph.output[0])
    for name, has in zip(kept, found, strict=True):
        assert [each.value for each in has.metadata_props if each.key == "mine"] == [name]
        assert has.doc_string == f"of the {name}"
