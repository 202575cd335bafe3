import json
from pathlib import Path

import onnx
import pytest

from tests.conftest import Cli
from twellc.base.errors import UserError
from twellc.export import attention_forms
from twellc.export.attention_forms import choose_forms, takes_operator, why_no_cudnn
from twellc.passes.attention import CUDNN, MATMUL, OPERATOR
from twellc.plugins.library import attention_library_path

needs_library = pytest.mark.skipif(attention_library_path() is None, reason="built without cuDNN's headers")


def test_the_parser_is_asked() -> None:
    assert takes_operator("tensorrt-rtx")


def test_a_parser_that_knows_less_gets_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe is of a later opset than any parser knows: what an older one says of Attention."""
    model = attention_forms._attention_model()
    model.opset_import[0].version = 99
    for node in model.graph.node:
        node.op_type = "Attention99"
    monkeypatch.setattr(attention_forms, "_attention_model", lambda: model)
    assert choose_forms("tensorrt-rtx", "tensorrt") == (MATMUL,)


def test_forms_by_backend() -> None:
    assert choose_forms("tensorrt-rtx", "tensorrt") == (OPERATOR,)
    assert choose_forms("none", "tensorrt") == (MATMUL,)
    assert choose_forms("none", "cudnn") == (CUDNN, MATMUL)


def test_auto_takes_cudnn_only_where_it_was_measured_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_forms("none", "auto") == (MATMUL,)
    assert choose_forms("tensorrt-rtx", "auto") == (OPERATOR,)
    monkeypatch.setattr(attention_forms, "choose_host", lambda backend: backend)
    monkeypatch.setattr(attention_forms, "takes_operator", lambda host: False)
    monkeypatch.setattr(attention_forms, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(attention_forms, "why_no_cudnn", lambda cached: "")
    assert choose_forms("tensorrt", "auto") == (CUDNN, MATMUL)
    monkeypatch.setattr(attention_forms, "compute_capability", lambda: (8, 0))
    assert choose_forms("tensorrt", "auto") == (MATMUL,)
    assert choose_forms("tensorrt", "auto", cached=True) == (CUDNN, MATMUL)
    monkeypatch.setattr(attention_forms, "compute_capability", lambda: None)
    assert choose_forms("tensorrt", "auto", cached=True) == (MATMUL,)


def test_without_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_forms, "load_attention", lambda: None)
    assert "built without cuDNN's headers" in why_no_cudnn()
    with pytest.raises(UserError, match=r"--attention cudnn: libtwell_attention\.so is not there"):
        choose_forms("tensorrt-rtx", "cudnn")


@needs_library
def test_a_plan_with_the_plugin(cli: Cli, llama: Path, tmp_path: Path) -> None:
    plan = tmp_path / "m.plan"
    options = ("--backend", "tensorrt-rtx", "--attention", "cudnn", "--onnx", tmp_path / "m.onnx")
    done = cli("compile", llama, "-o", plan, *options)
    assert done.exit_code == 0, done.output
    assert "by cuDNN's plugin" in done.output and "needs libtwell_attention.so and cuDNN 9" in done.output
    manifest = json.loads(plan.with_name("m.plan.json").read_text())
    blocks = manifest["attention"]
    assert blocks and {(block["form"], block["mask"], block["reason"]) for block in blocks} == {("cudnn", "causal", "")}
    assert manifest["settings"]["attention_forms"] == [CUDNN, OPERATOR]
    assert manifest["plugins"]["names"] == ["TwellGatedMlp", "TwellAttention"]
    assert "libtwell_attention.so" in manifest["plugins"]["register"]["trtexec"]
    assert len(manifest["plan"]["plugin_layers"]) == len(blocks) + len(manifest["layers"])
    assert "by cuDNN's plugin" in cli("inspect", plan).output
    assert cli("check", llama, plan).exit_code == 0


def test_attention_of_a_plan_of_rtx(cli: Cli, llama: Path, tmp_path: Path) -> None:
    graph = tmp_path / "m.onnx"
    done = cli("compile", llama, "-o", tmp_path / "m.plan", "--backend", "tensorrt-rtx", "--onnx", graph)
    assert done.exit_code == 0, done.output
    assert "attention blocks rewritten" in done.output and "as ONNX's Attention" in done.output
    model = onnx.load(graph)
    nodes = [node for node in model.graph.node if node.op_type == "Attention"]
    assert nodes and all(len(node.input) == 3 and len(node.output) == 1 for node in nodes)
    values = [{each.name: onnx.helper.get_attribute_value(each) for each in node.attribute} for node in nodes]
    assert all(each["is_causal"] == 1 and each["scale"] == 1.0 for each in values)


def test_attention_in_an_onnx_file_cannot_be_chosen(cli: Cli, llama: Path, tmp_path: Path) -> None:
    graph = tmp_path / "m.onnx"
    assert cli("compile", llama, "--backend", "none", "--onnx", graph, "--layers", "none").exit_code == 0
    done = cli("compile", graph, "-o", tmp_path / "m.plan", "--attention", "tensorrt")
    assert done.exit_code == 2 and "attention in an ONNX file stays as it is" in done.output
