"""`twellc check` of candidates with a key-value cache: prompts, then greedy steps."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto

from tests import models
from tests.conftest import Cli
from tests.twellc.checks.runs import changed, run_check, set_tensor, translate
from tests.twellc.generation.test_fp8_cache import with_scales
from twellc.base.errors import UserError
from twellc.checks.generation import Call, Generated, Steps, graph_steps, prompt_lengths
from twellc.commands.check import print_accuracy
from twellc.compiling.settings import CacheSettings

SIZES = {"kv_cache": 40, "max_batch_size": 3, "prefill_chunk": 8}
translate = partial(translate, attention="cudnn", layers="all")


@pytest.fixture(scope="module")
def graph(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graphs") / "cached.onnx"
    translate(llama, path, **SIZES)
    return path


def test_right_graph(llama: Path, graph: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_check(llama, graph)
    assert result.within
    assert result.inputs == "prompts of 20, 10, 1 tokens at random, seed 0, and greedy steps"
    (output,) = result.outputs
    assert output.name == "logits"
    generation = result.generation
    assert generation is not None
    assert generation.prompts == [20, 10, 1]
    assert len(result.to_json()["generation"]["steps"]) == len(generation.steps) == 21
    assert output.elements == 21 * 3 * 96
    assert all(0 < step.error < 0.05 for step in generation.steps)
    assert [block.module for block in result.blocks] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    (separation,) = [each.separation for each in result.outputs]
    assert separation is not None
    assert separation.rewrite.relative < 1e-12
    print_accuracy(result)
    printed = capsys.readouterr().out
    assert "greedy steps, of which 0 is the prompts'" in printed
    assert "another token than float64's is chosen" in printed


def test_ops_over_caches_rotate(tmp_path: Path) -> None:
    """From heads of 16 on: those of other tests are narrower."""
    model = models.save(models.llama(head_dim=16, num_hidden_layers=1), tmp_path / "model")
    translate(model, tmp_path / "m.onnx", linear="twell", **SIZES)
    nodes = onnx.load(tmp_path / "m.onnx", load_external_data=False).graph.node
    rotated = [attribute.i for node in nodes for attribute in node.attribute if attribute.name == "rotated"]
    assert rotated == [1, 1]
    assert "Neg" not in {node.op_type for node in nodes}
    assert run_check(model, tmp_path / "m.onnx").within


def set_value_scale(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "TwellCachedAttention" and attribute.name == "value_scale":
                attribute.f *= 1.2


def test_caches_in_fp8(tmp_path: Path) -> None:
    """The model rounds its keys and values, too, so that scales that differ between two nodes show."""
    model = with_scales(models.save(models.llama(), tmp_path / "model", torch.bfloat16))
    translate(model, tmp_path / "m.onnx", kv_cache_dtype="fp8", **SIZES)
    result = run_check(model, tmp_path / "m.onnx")
    assert result.within
    assert any(note.startswith("keys and values are rounded to FP8 in the model, too") for note in result.notes)
    assert all(0 < step.error < 0.05 for step in result.generation.steps)  # type: ignore[union-attr]
    assert not run_check(model, changed(tmp_path / "m.onnx", tmp_path / "other.onnx", set_value_scale)).within
    deeper = models.save(models.llama(num_hidden_layers=3), tmp_path / "deeper", torch.bfloat16)
    with pytest.raises(UserError, match="does not tell which keys and values a cache in FP8 would keep"):
        run_check(deeper, tmp_path / "m.onnx")


@pytest.mark.slow
def test_all_logits_and_32_steps(llama: Path, tmp_path: Path) -> None:
    translate(llama, tmp_path / "m.onnx", logits="all", kv_cache=64)
    result = run_check(llama, tmp_path / "m.onnx")
    assert result.within
    assert result.generation is not None
    assert (result.generation.prompts, len(result.generation.steps)) == ([32], 33)


@pytest.mark.slow
def test_frequencies_that_change_with_the_length(tmp_path: Path) -> None:
    """Those of a cache stay as they are; without one torch.export cannot trace that. And prompts of a text."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    llama = models.llama(rope_parameters=rope, vocab_size=256, num_hidden_layers=1)
    model = models.save(llama, tmp_path / "model")
    translate(model, tmp_path / "m.onnx", **{**SIZES, "max_batch_size": 2})
    (tmp_path / "t.txt").write_text("Call me Ishmael. Some years ago, never mind how long precisely")
    result = run_check(model, tmp_path / "m.onnx", text=tmp_path / "t.txt")
    assert result.within
    assert result.inputs == "prompts of 20, 10 tokens from the start of t.txt, and greedy steps"


@pytest.mark.slow
def test_a_float32_model(opt: Path, tmp_path: Path) -> None:
    summary = translate(opt, tmp_path / "m.onnx", **SIZES)
    assert summary.cache is not None and summary.cache.dtype == "bf16"
    assert "the model is in float32; compiled in bfloat16 (--dtype changes it)" in summary.notes
    assert run_check(opt, tmp_path / "m.onnx").within


def set_scale(model: onnx.ModelProto, scale: float) -> None:
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "TwellCachedAttention" and attribute.name == "scale":
                attribute.f = scale


def exchange_caches(model: onnx.ModelProto) -> None:
    """Let a layer append its values where its keys belong: each step is wrong but one without a past."""
    node = next(each for each in model.graph.node if each.op_type == "TwellAppendCaches")
    node.output[0], node.output[1] = node.output[1], node.output[0]
    outputs = {each.name: index for index, each in enumerate(model.graph.output)}
    assert node.output[0] in outputs


def zero_a_gate(model: onnx.ModelProto) -> None:
    node = [each for each in model.graph.node if each.op_type == "TwellGatedMlp"][1]
    set_tensor(model, node.input[1], lambda w: w.zero_())


@pytest.mark.parametrize(
    ("change", "module"),
    [(lambda model: set_scale(model, 0.5), None), (exchange_caches, None), (zero_a_gate, "model.layers.1.mlp")],
)
def test_wrong_graph(
    llama: Path, graph: Path, tmp_path: Path, change: Callable[[onnx.ModelProto], None], module: str | None
) -> None:
    result = run_check(llama, changed(graph, tmp_path / "m.onnx", change))
    assert not result.within
    assert result.first_divergence == module
    assert module is not None or result.causes == ["rest"]


def logits_of(model: onnx.ModelProto) -> onnx.TensorShapeProto:
    return model.graph.output[0].type.tensor_type.shape


def hidden_of(model: onnx.ModelProto) -> onnx.ValueInfoProto:
    """Return an output that says it is logits, and is a cache."""
    cache = model.graph.output[1].name
    return onnx.helper.make_tensor_value_info(cache, TensorProto.FLOAT, ["batch", 96])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: logits_of(model).ClearField("dim"), "has not its inputs and outputs"),
        (lambda model: model.graph.output.pop(), "has not its inputs and outputs"),
        (lambda model: setattr(logits_of(model).dim[-1], "dim_value", 95), "vocabularies differ; got 95; expected 96"),
        (lambda model: model.graph.output[0].CopyFrom(hidden_of(model)), "its logits are not of the shape"),
    ],
)
def test_damaged_graph(
    llama: Path, graph: Path, tmp_path: Path, change: Callable[[onnx.ModelProto], None], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run_check(llama, changed(graph, tmp_path / "m.onnx", change))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("wrong", [None, 1, 4])
def test_every_profile_of_a_plan_is_checked(
    llama: Path, graph: Path, monkeypatch: pytest.MonkeyPatch, wrong: int | None
) -> None:
    """The graph in the place of a plan, wrong only in calls of single tokens for that number of sequences."""

    def steps(*arguments: Any) -> Steps:
        right = graph_steps(*arguments)

        def start(rows: int) -> Call:
            call = right.start(rows)
            return lambda ids, *others: call(ids, *others).roll(int(rows == wrong and ids.shape[1] == 1), -1)

        return Steps(right.vocabulary, start, [1, 3, 8])

    monkeypatch.setattr("twellc.checks.candidate.graph_steps", steps)
    result = run_check(llama, graph)
    assert result.within == (wrong is None)
    assert result.generation is not None
    assert result.generation.prompts == [20, 10, 1, 20, 20]
    assert any("computed again with 1 and 4 at a time" in note for note in result.notes)


def test_numbers_of_rows_for_each_profile() -> None:
    def sizes(*largest: int, rows: int) -> list[int]:
        return Steps(1, lambda rows: pytest.fail("is not called"), largest).other_sizes(rows)

    assert sizes(rows=3) == []
    assert sizes(1, rows=1) == []
    assert sizes(1, 3, rows=3) == [1]
    assert sizes(1, 8, 32, rows=3) == [1, 9]
    assert sizes(1, 8, 32, rows=9) == [1, 2]


def test_where_a_candidate_goes_another_way() -> None:
    """Row 1 chooses another token in step 2; the plain model in step 1."""
    truth = torch.eye(8, dtype=torch.float64)[torch.tensor([[0, 1], [2, 3], [4, 5]])]
    ours, plain = truth.clone(), truth.clone()
    ours[2, 1] = ours[2, 1].roll(1)
    plain[1, 0] = plain[1, 0].roll(1)
    found = Generated(torch.zeros(2, 5, dtype=torch.int64), [3, 1], ours).accuracy(plain, truth)
    assert (found.first_difference, found.plain_first_difference) == (2, 1)
    assert [step.agreement for step in found.steps] == [1, 1, 0.5]
    assert [step.plain_agreement for step in found.steps] == [1, 0.5, 1]
    assert [step.error > 0 for step in found.steps] == [False, False, True]


def test_places_of_a_model_without_a_cache() -> None:
    logits = torch.arange(2 * 5).view(2, 5, 1)
    made = Generated(torch.zeros(2, 5, dtype=torch.int64), [3, 1], torch.zeros(3, 2, 1))
    assert made.of_model([logits]).squeeze(-1).tolist() == [[2, 5], [3, 6], [4, 7]]


def test_prompt_lengths() -> None:
    cases = (
        ((1024, 8, 2048), [96, 48, 1]),
        ((1024, 1, 2048), [96]),
        ((1024, 2, 8), [48, 24]),
        ((40, 3, 8), [20, 10, 1]),
        ((2, 1, 1), [1]),
    )
    for sizes, lengths in cases:
        assert prompt_lengths(CacheSettings(*sizes)) == lengths


def test_given_prompts(llama: Path, graph: Path, tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(2, 90, (2, 9))
    np.savez(tmp_path / "prompts.npz", input_ids=ids, token_count=np.array([9, 2]))
    result = run_check(llama, graph, arrays=tmp_path / "prompts.npz")
    assert result.within
    assert result.generation is not None
    assert result.generation.prompts == [9, 2]
    assert result.inputs == "2 prompts in prompts.npz"


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((1, 2), np.int64)}, "holds no input_ids"),
        ({"input_ids": np.zeros((1, 2))}, "holds no input_ids"),
        ({"input_ids": np.zeros((4, 2), np.int64)}, r"do not fit into the cache; got 4 of up to 2 tokens"),
        ({"input_ids": np.zeros((1, 40), np.int64)}, r"do not fit into the cache; got 1 of up to 40 tokens"),
        ({"input_ids": np.full((1, 2), 96)}, "ids that are not tokens; expected 0 to 95"),
        ({"input_ids": np.zeros((1, 2), np.int64), "token_count": np.array([3])}, "token_count does not fit"),
        (
            {"input_ids": np.zeros((1, 2), np.int64), "write_index": np.array([3])},
            "has an array write_index, which is not a part of prompts; got input_ids, write_index; expected input_ids,",
        ),
    ],
)
def test_bad_prompts(llama: Path, graph: Path, tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "prompts.npz", **arrays)
    with pytest.raises(UserError, match=message):
        run_check(llama, graph, arrays=tmp_path / "prompts.npz")


def test_another_model(graph: Path, archive: Path, tmp_path: Path) -> None:
    other = models.save(models.llama(vocab_size=256, num_hidden_layers=1), tmp_path / "other")
    message = "does not belong to the model: their vocabularies differ; got 96; expected 25"
    for model, match in ((other, message), (archive, "does not belong to the model: it has a cache")):
        with pytest.raises(UserError, match=match):
            run_check(model, graph)


@pytest.mark.slow
def test_command(cli: Cli, tmp_path: Path) -> None:
    model, plan = models.save(models.llama(num_hidden_layers=1), tmp_path / "llama"), tmp_path / "m.plan"
    made = cli("compile", model, "-o", plan, "--kv-cache", 24, "--max-batch-size", 2, "--layers", "all")
    assert made.exit_code == 0, made.output
    done = cli("check", model, plan)  # the graph is made again, since no GPU runs the plan
    assert done.exit_code == 0, done.output
    assert "greedy steps, of which 0 is the prompts'" in done.output
    assert "within tolerance" in done.output
