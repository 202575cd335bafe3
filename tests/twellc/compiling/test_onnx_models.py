"""ONNX files from the command line: compile, inspect and check, with TensorRT-RTX building the plans."""

import io
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner, Result
from onnx import TensorProto, helper

from tests import models
from tests.models import without_expectation
from tests.onnx_graphs import D_FF, D_MODEL, GraphMaker, gated, save_external
from twellc.base.errors import UserError
from twellc.cli import main
from twellc.export.profiles import resolve_profiles
from twellc.export.shapes import ShapeRange, parse_profile
from twellc.loaders.onnx_models import model_inputs

pytestmark = pytest.mark.usefixtures("compiles_here")


def fail(*arguments: object) -> str:
    return run(2, *arguments).output


def succeed(*arguments: object) -> Result:
    return run(0, *arguments)


def run(status: int, *arguments: object) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
    return result


def export(module: Any, inputs: tuple[torch.Tensor, ...], path: Path, **options: Any) -> Path:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if options.get("dynamo", True):
            torch.onnx.export(module.eval(), inputs, path, verbose=False, external_data=False, **options)
        else:
            buffer = io.BytesIO()
            torch.onnx.export(module.eval(), inputs, buffer, **options)
            path.write_bytes(buffer.getvalue())
    return path


@pytest.fixture(scope="module")
def llama_onnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
    model = models.llama(num_hidden_layers=1).half()
    model.config.use_cache = False
    return export(
        models.Written(lambda self, ids: self.llama(input_ids=ids, use_cache=False).logits, llama=model),
        (torch.randint(0, 96, (2, 5)),),
        tmp_path_factory.mktemp("models") / "llama.onnx",
        dynamic_shapes=((dims,),),
        input_names=["input_ids"],
        output_names=["logits"],
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_compile_inspect_and_check(tmp_path: Path, dtype: str) -> None:
    model, plan, graph = tmp_path / "model.bin", tmp_path / "model.plan", tmp_path / "graph.onnx"
    onnx.save(gated(dtype, biases=True), model)
    result = succeed("compile", model, "-o", plan, "--onnx", graph, "--optimization-profile", "x:1x1x16:1x8x16:4x32x16")
    assert "1 of 1 feed-forward blocks rewritten" in result.output
    assert ("the graph is in float32" in result.output) == (dtype == "fp32")
    manifest = json.loads(plan.with_name("model.plan.json").read_text())
    assert manifest["model"]["kind"] == "ONNX file"
    assert manifest["settings"]["dtype"] == {"fp32": "bf16"}.get(dtype, dtype)
    assert len(manifest["plan"]["plugin_layers"]) == 1
    assert manifest["plan"]["inputs"][0]["shape"] == [-1, -1, 16]
    assert manifest["plan"]["inputs"][0]["dtype"] == {"fp32": "float", "fp16": "half", "bf16": "bf16"}[dtype]
    for candidate in (graph, plan):
        checked = json.loads(succeed("check", model, candidate, "--json").stdout)
        assert checked["within"] and checked["outputs"][0]["plain"]["max"] > 0
    shown = json.loads(succeed("inspect", graph, "--json").stdout)
    assert without_expectation(shown["layers"]) == without_expectation(manifest["layers"])
    (node,) = shown["nodes"]
    assert (node["type"], node["fields"]["activation"]) == ("TwellGatedMlp", "relu")
    assert "TwellGatedMlp" in succeed("inspect", graph).stdout
    assert "activation=relu" in succeed("inspect", graph).stdout


def test_language_model(llama_onnx: Path, tmp_path: Path) -> None:
    plan = tmp_path / "llama.plan"
    succeed("compile", llama_onnx, "-o", plan, "--optimization-profile", "input_ids:1x1:1x8:2x16", "--strict")
    manifest = json.loads(plan.with_name("llama.plan.json").read_text())
    found = [(layer["module"], layer["variant"], layer["decision"]) for layer in manifest["layers"]]
    assert found == [("llama.model.layers.0.mlp", "gated", "twell")]
    checked = json.loads(succeed("check", llama_onnx, plan, "--json").stdout)
    assert checked["within"] and checked["outputs"][0]["top1"] > 0.5


def test_float32_block_without_a_gate_from_the_older_exporter(tmp_path: Path) -> None:
    names = {"input_names": ["x"], "output_names": ["y"], "dynamic_axes": {"x": {0: "rows"}}}
    module, x = models.Residual(models.Plain(biases="ud")), torch.randn(4, 16)
    path = export(module, (x,), tmp_path / "old.onnx", dynamo=False, opset_version=17, **names)
    succeed("compile", path, "-o", tmp_path / "old.plan", "--dtype", "fp16", "--strict")
    assert json.loads(succeed("check", path, tmp_path / "old.plan", "--json").stdout)["within"]


def test_weights_beside_the_file(tmp_path: Path) -> None:
    model = save_external(gated("bf16"), tmp_path / "model.onnx")
    options = ["compile", model, "--backend", "none", "--onnx", tmp_path / "o.onnx", "--manifest", tmp_path / "r.json"]
    succeed(*options)
    first = json.loads((tmp_path / "r.json").read_text())["model"]["sha256"]
    data = bytearray((tmp_path / "weights.bin").read_bytes())
    data[-2] ^= 1
    (tmp_path / "weights.bin").write_bytes(data)
    succeed(*options, "--overwrite")
    assert json.loads((tmp_path / "r.json").read_text())["model"]["sha256"] != first


def test_profiles_of_shared_and_unnamed_dimensions(tmp_path: Path) -> None:
    make = GraphMaker("bf16", x_shape=("batch", None, D_MODEL))
    hidden = make.node("Relu", make.linear("x", "fc1", D_MODEL, D_FF))
    model = make.model(make.node("Add", make.linear(hidden, "fc2", D_FF, D_MODEL), "bias"))
    model.graph.input.append(onnx.helper.make_tensor_value_info("bias", make.onnx_dtype, ["batch", 1, D_MODEL]))
    inputs = model_inputs(tmp_path, model)

    def resolve(*texts: str) -> dict[str, ShapeRange]:
        return resolve_profiles(inputs, [parse_profile(text) for text in texts], {})[0][0]

    profile = resolve("bias:2x1x16:3x1x16:5x1x16")
    assert profile["x"] == ShapeRange((2, 1, 16), (3, 128, 16), (5, 2048, 16))
    assert profile["bias"].max == (5, 1, 16)
    for texts, message in (
        (["y:1:1:1"], "the model has no such input"),
        (["x:1x1x1:1x1x1:1x1x1"], "is fixed in the model"),
        (["x:1x1x16:1x1x16:2x1x16", "bias:1x1x16:1x1x16:3x1x16"], "shared with another input"),
    ):
        with pytest.raises(UserError, match=message):
            resolve(*texts)


def test_what_cannot_be_done(tmp_path: Path) -> None:
    path, graph = tmp_path / "model.onnx", tmp_path / "graph.onnx"
    onnx.save(gated("fp16"), path)
    assert "keeps the precision" in fail("inspect", path, "--dtype", "bf16")
    assert "only a pickled module" in fail("inspect", path, "--input-spec", "x:float32[2]")
    succeed("compile", path, "--backend", "none", "--onnx", graph)
    assert "is rewritten already" in fail("compile", graph, "-o", tmp_path / "again.plan")
    assert "is rewritten already" in fail("check", graph, graph)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    assert "truncated or damaged ONNX" in fail("compile", path, "-o", tmp_path / "x.plan")
    assert "truncated or damaged ONNX" in fail("inspect", path)
    assert not (tmp_path / "x.plan").exists()


def test_nothing_to_rewrite(tmp_path: Path) -> None:
    make = GraphMaker("fp32")
    path = tmp_path / "model.onnx"
    onnx.save(make.model(make.node("Softmax", make.linear("x", "fc", D_MODEL, D_FF))), path)
    result = succeed("compile", path, "-o", tmp_path / "model.plan")
    assert "no feed-forward block can be rewritten" in result.output
    assert "no feed-forward block can be rewritten" in fail("compile", path, "-o", tmp_path / "b.plan", "--strict")
    assert not (tmp_path / "b.plan").exists()
    assert json.loads(succeed("check", path, tmp_path / "model.plan", "--json").stdout)["within"]


def test_graphs_are_dumped(tmp_path: Path) -> None:
    onnx.save(gated("bf16"), tmp_path / "model.onnx")
    options = ("--backend", "none", "--onnx", tmp_path / "o.onnx", "--dump-graphs", tmp_path / "graphs")
    succeed("compile", tmp_path / "model.onnx", *options)
    texts = {path.name: path.read_text() for path in (tmp_path / "graphs").iterdir()}
    assert "Relu" in texts["00-source.txt"]
    assert "TwellGatedMlp" in texts["01-rewrite_onnx.txt"] and "Relu(" not in texts["01-rewrite_onnx.txt"]


def with_past(mask: str, tokens: int | str) -> onnx.ModelProto:
    """A block behind a decoder's attention over past keys, with the names that optimum gives dimensions."""
    make = GraphMaker("fp16", opset=18)
    x = make.node("Gather", make.weight("embedding", 50, D_MODEL), "input_ids")
    new = make.node("Unsqueeze", x, make.integers(1))
    keys = make.node("Concat", "past_key_values.0.key", new, axis=2)
    scores = make.node("MatMul", new, make.node("Transpose", keys, perm=[0, 1, 3, 2]))
    added = make.node("Unsqueeze", make.node("Cast", "attention_mask", to=TensorProto.FLOAT16), make.integers(1, 2))
    shares = make.node("Softmax", make.node("Add", scores, added), axis=-1)
    hidden = make.node("Squeeze", make.node("MatMul", shares, keys), make.integers(1))
    y = make.linear(make.node("Relu", make.linear(hidden, "up", D_MODEL, D_FF)), "down", D_FF, D_MODEL)
    model = make.model(y, keys)
    del model.graph.input[:]
    past = ["batch_size", 1, "past_sequence_length", D_MODEL]
    four = helper.make_tensor_type_proto(TensorProto.FLOAT16, [None] * 4)
    model.graph.output[1].type.CopyFrom(four)
    for name, kind, shape in (
        ("input_ids", TensorProto.INT64, ["batch_size", tokens]),
        ("attention_mask", TensorProto.INT64, ["batch_size", mask]),
        ("past_key_values.0.key", TensorProto.FLOAT16, past),
    ):
        model.graph.input.append(helper.make_tensor_value_info(name, kind, shape))
    return model


PAST = "dimension 2 of past_key_values.0.key"


@pytest.mark.parametrize(
    ("mask", "tokens", "expression", "text"),
    [
        ("past_sequence_length + 1", 1, "d0 == (1 + d1)", f"{PAST} + 1"),
        ("total_sequence_length", "sequence_length", "d0 == (d1 + d2)", f"dimension 1 of input_ids + {PAST}"),
    ],
)
def test_past_keys_and_values(tmp_path: Path, mask: str, tokens: int | str, expression: str, text: str) -> None:
    onnx.save(with_past(mask, tokens), tmp_path / "m.onnx")
    made = succeed("compile", tmp_path / "m.onnx", "--backend", "none", "--onnx", tmp_path / "out.onnx", "--json")
    (relation,) = json.loads(made.stdout)["relations"]
    assert relation["expression"] == expression
    assert relation["text"] == f"dimension 1 of attention_mask must be {text}"
    succeed("check", tmp_path / "m.onnx", tmp_path / "out.onnx")
    arrays = {"input_ids": np.ones((1, 1), int), "attention_mask": np.ones((1, 9), int)}
    arrays["past_key_values.0.key"] = np.zeros((1, 1, 7, D_MODEL), np.float16)
    np.savez(tmp_path / "given.npz", **arrays)
    message = fail("check", tmp_path / "m.onnx", tmp_path / "out.onnx", "--arrays", tmp_path / "given.npz")
    assert "attention_mask" in message and "8" in message
