"""`--linear`: what is written and said of linear layers outside of the blocks, and what is refused."""

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import twellc
from tests.conftest import Cli
from twellc.base.errors import UserError
from twellc.checks import reference
from twellc.checks.accuracy import OutputAccuracy
from twellc.checks.evaluator import OnnxEvaluator
from twellc.compiling.compiler import compile_model
from twellc.loaders.model import load_model
from twellc.options.commands import CompileOptions
from twellc.options.source import TracingOptions
from twellc.passes.pipeline import Rewritten
from twellc.passes.report import Earlier
from twellc.plugins.library import LINEAR_NAME


def nodes_in(graph: Path) -> list[onnx.NodeProto]:
    return [node for node in onnx.load(graph).graph.node if node.op_type == LINEAR_NAME]


def test_compile_and_inspect(cli: Cli, llama: Path, tmp_path: Path) -> None:
    graph = tmp_path / "m.onnx"
    manifest = twellc.compile(llama, backend="none", onnx=graph, linear="twell")
    assert manifest.linear is not None and {row.decision for row in manifest.linear} == {"twell"}
    assert [len(node.output) for node in nodes_in(graph)] == [len(row.widths) for row in manifest.linear]
    assert LINEAR_NAME in manifest.plugins.names
    taken = manifest.settings.linear_taken
    assert taken == [*(row.modules[0] for row in manifest.linear), *(layer.module for layer in manifest.layers)]
    assert {layer.norm for layer in manifest.layers} == {"rms"}
    again = CompileOptions(llama, onnx=tmp_path / "taken.onnx", backend="none", earlier=Earlier(linear_taken=taken))
    assert compile_model(again, lambda step: None).onnx.sha256 == manifest.onnx.sha256, "check makes it again so"
    found = twellc.inspect(llama, linear="twell")
    assert found.description.linear == manifest.linear
    assert {layer.norm for layer in found.description.layers} == {"rms"}
    shown = cli("inspect", llama, "--linear", "twell").output
    assert "9 of 9 linear layers outside of blocks rewritten as 5: 3 with an RMSNorm, 2 with residual" in shown
    assert "rewritten + RMSNorm + residual" in " ".join(shown.replace("│", " ").split())
    with pytest.raises(UserError, match="--linear: what becomes of the blocks is decided already"):
        twellc.inspect(graph, linear="twell")
    with pytest.raises(UserError, match="--linear twell: linear layers outside of blocks stay as they are in an ONNX"):
        twellc.compile(graph, backend="none", onnx=tmp_path / "again.onnx", linear="twell")


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.f(x), self.f(x[:, -1:])


@pytest.mark.usefixtures("compiles_here")
@pytest.mark.parametrize(("profiles", "taken"), [([512], ["f#2"]), ([1, 512], ["f", "f#2"])])
def test_a_layer_that_is_called_twice(
    profiles: list[int], taken: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call has its own number of rows: one may be taken, which is the one that `check` takes."""
    archive, graph = tmp_path / "m.pt2", tmp_path / "m.onnx"
    x, dims = torch.randn(2, 24, 16).bfloat16(), {0: Dim("batch", max=64), 1: Dim("n", max=512)}
    program = torch.export.export(CalledTwice().bfloat16().eval(), (x,), dynamic_shapes=(dims,))
    torch.export.save(program, archive)
    given = [f"x:1x{n}x16:1x{n}x16:1x{n}x16" for n in profiles]
    manifest = twellc.compile(archive, backend="none", onnx=graph, optimization_profiles=given)
    assert manifest.settings.linear_taken == taken and len(nodes_in(graph)) == len(taken)
    checked: list[Rewritten] = []
    monkeypatch.setattr(reference, "fp8_layers", lambda found: checked.__iadd__([found])[:0])
    reference.TorchReference(load_model(TracingOptions(archive)), manifest.settings)
    assert manifest.linear is not None and checked[0].taken == taken
    assert [row.decision for row in checked[0].linear] == [row.decision for row in manifest.linear]
    earlier = Earlier(linear_taken=taken)
    again = CompileOptions(archive, onnx=tmp_path / "again.onnx", backend="none", earlier=earlier)
    assert compile_model(again, lambda step: None).onnx.sha256 == manifest.onnx.sha256


def test_auto_leaves_them(cli: Cli, llama: Path, tmp_path: Path) -> None:
    shown = cli("compile", llama, "--backend", "none", "--onnx", tmp_path / "m.onnx").output
    assert "feed-forward blocks rewritten" in shown and "linear layers" not in shown
    assert {layer.norm for layer in twellc.inspect(llama).description.layers} == {"none"}
    assert not nodes_in(tmp_path / "m.onnx")
    assert "0 of 9 linear layers outside of blocks rewritten" in cli("inspect", llama).output


@pytest.mark.slow
def test_with_a_cache(cli: Cli, opt: Path, tmp_path: Path) -> None:
    """The last norm stands before the logits of the last token alone."""
    graph = tmp_path / "m.onnx"
    sizes = {"kv_cache": 24, "max_batch_size": 2, "prefill_chunk": 8}
    manifest = twellc.compile(opt, backend="none", onnx=graph, linear="twell", **sizes)
    assert [row.norm for row in manifest.linear or ()] == ["layer", "none", "layer", "none", "layer"]
    done = cli("check", opt, graph)
    assert done.exit_code == 0 and "within tolerance" in done.output, done.output
    model = onnx.load(graph)
    (weight,) = [each for each in model.graph.initializer if each.name.endswith("layers.1.self_attn.out_proj.weight")]
    values = onnx.numpy_helper.to_array(weight).copy()
    values[7] *= 4
    weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
    onnx.save(model, graph)
    assert not twellc.check(opt, graph).within


@pytest.mark.slow
@pytest.mark.parametrize("linear", ["twell", "tensorrt"])
def test_the_next_token(linear: str, llama: Path, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"kv_cache": 24, "max_batch_size": 2, "prefill_chunk": 8}
    results = []
    for logits in ("last", "greedy"):
        graph = tmp_path / f"{logits}.onnx"
        manifest = twellc.compile(llama, backend="none", onnx=graph, linear=linear, logits=logits, **sizes)
        evaluator = OnnxEvaluator(graph)
        given = {"input_ids": torch.arange(3, 9).view(2, 3), "write_index": torch.zeros(2, dtype=torch.int64)}
        given["token_count"] = torch.tensor([3, 2])
        shapes = dict.fromkeys(evaluator.inputs[3:], (2, 2, 24, 8))
        results.append(evaluator.run(given | {name: torch.zeros(shape).bfloat16() for name, shape in shapes.items()}))
    assert evaluator.outputs[0] == "next_tokens"
    assert torch.equal(results[1][0], results[0][0].argmax(-1))
    chosen = [each.name for node in nodes_in(graph) for each in node.attribute if each.name == "choose" and each.i]
    assert len(chosen) == (linear == "twell")
    assert [row.choose for row in manifest.linear or ()][-1] == (linear == "twell")
    with pytest.raises(UserError, match="gives tokens, and check compares logits; got --logits greedy"):
        twellc.check(llama, graph)
    with pytest.raises(UserError, match="--logits greedy: only a model with a key-value cache computes tokens"):
        twellc.inspect(llama, logits="greedy")


@pytest.mark.parametrize(("weights", "layers", "count"), [("fp8", "none", 4), ("fp8:blocks", "all", 0)])
def test_fp8(weights: str, layers: str, count: int, cli: Cli, opt: Path, tmp_path: Path) -> None:
    """The logits' weight is the embedding's, which stays in 16 bits. The yardstick is dense FP8."""
    graph = tmp_path / "m.onnx"
    manifest = twellc.compile(opt, backend="none", onnx=graph, layers=layers, linear="twell", weights=weights)
    assert {layer.weights and layer.weights.bits for layer in manifest.layers} == {None if layers == "none" else 8}
    narrow = [row for row in manifest.linear or () if row.weights is not None and row.weights.bits == 8]
    assert len(narrow) == count and not any("lm_head" in row.modules for row in narrow)
    report = twellc.check(opt, graph)
    (logits,) = report.outputs
    assert report.within and isinstance(logits, OutputAccuracy)
    assert logits.plain.relative > 2 * logits.candidate.relative
    shown = cli("inspect", opt, "--linear", "twell", "--weights", weights).output
    assert ("4 with weights in 8 bits" in shown) == (count > 0)
    assert ("another layer reads one of them, too: lm_head" in shown) == (count > 0)
