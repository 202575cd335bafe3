"""`twellc check`: what passes, what must not, and what belongs to something else."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from onnx import TensorProto, helper
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import twellc
from tests import models
from tests.conftest import Cli
from tests.models import Gated, Plain, Residual, Written, export
from tests.onnx_graphs import GraphMaker
from tests.twellc.checks.runs import changed, graph_of, run_check, set_tensor, translate, twell_nodes
from twellc.base.arrays import to_torch
from twellc.base.errors import UserError
from twellc.checks import evaluator
from twellc.checks.accuracy import Share
from twellc.checks.checking import _without_padding
from twellc.checks.reference import integer_ranges
from twellc.commands.check import print_accuracy
from twellc.compiling.manifest import read_manifest
from twellc.export.shapes import ShapeProfile, ShapeRange
from twellc.loaders.loaded import LoadedModel
from twellc.loaders.model import load_model
from twellc.options.source import TracingOptions
from twellc.passes.feature_last import feature_last
from twellc.passes.fold_weights import fold_weights
from twellc.passes.pipeline import STEPS, Stage, step
from twellc.passes.sizes.inputs import program_inputs
from twellc.samples.samples import Limits, Sample, draw_samples, places_of_tokens

# Inputs of a twell node after x: weights of a gated block with all biases, and without any; of a plain one with all.
WITH_BIASES = ("w_gate", "b_gate", "w_up", "b_up", "w_down", "b_down")
WITHOUT = ("w_gate", "w_up", "w_down")
PLAIN = ("w_up", "b_up", "w_down", "b_down")


def samples_of(model: LoadedModel, profile: ShapeProfile | None = None) -> list[Sample]:
    limits = Limits(program_inputs(model.program), profile, model.vocabulary)
    return draw_samples(limits, integer_ranges(model), seed=0)


def saved(path: Path, module: nn.Module, x: Tensor, **shapes: Any) -> Path:
    """Save a module as an archive, in the dtype of x; `shapes` are its dynamic dimensions, see `export`."""
    torch.export.save(export(module.to(x.dtype), x, **shapes), path)
    return path


@pytest.fixture(scope="module")
def archive_graph(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return graph_of(archive, tmp_path_factory.mktemp("graphs") / "gated.onnx")


@pytest.fixture(scope="module")
def made_plan(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of `archive`, with its graph beside it."""
    plan = tmp_path_factory.mktemp("plans") / "m.plan"
    with pytest.MonkeyPatch.context() as patch:
        here = "twellc.compiling.compiler.run_isolated"
        patch.setattr(here, lambda function, *arguments, progress: function(*arguments, progress))
        twellc.compile(archive, plan, onnx=plan.with_suffix(".onnx"))
    return plan


@pytest.fixture
def plan(made_plan: Path, tmp_path: Path) -> Path:
    """A copy of it, with its manifest and its graph, to be changed."""
    shutil.copytree(made_plan.parent, tmp_path, dirs_exist_ok=True)
    return tmp_path / made_plan.name


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twellc.checks.candidate.why_not_here", lambda backend: "there is no GPU on this machine")


def damage(
    graph: Path, to: Path, names: tuple[str, ...], weight: str, change: Callable[[Tensor], Any], block: int = 0
) -> Path:
    """Write a copy of a graph in which one weight of one block is changed."""

    def spoil(model: onnx.ModelProto) -> None:
        set_tensor(model, twell_nodes(model)[block].input[1 + names.index(weight)], change)

    return changed(graph, to, spoil)


def test_right_graph(archive: Path, archive_graph: Path) -> None:
    result = run_check(archive, archive_graph)
    assert result.within
    assert (result.executed, result.note) == ("the ONNX graph, in onnx's reference evaluator", "")
    (output,) = result.outputs
    assert (output.name, output.top1, output.kl) == ("output", None, None)
    assert 0 < output.candidate.relative <= output.relative_tolerance < 0.02
    assert output.candidate.cosine > 0.9999
    again, other = (run_check(archive, archive_graph, seed=seed) for seed in (0, 1))
    assert result == again, "the seed decides the inputs"
    assert output.candidate != other.outputs[0].candidate


@pytest.mark.usefixtures("no_gpu")
def test_plan_without_a_gpu(cli: Cli, archive: Path, plan: Path) -> None:
    """The graph stands in for the plan, and the result says so; kept with --onnx, or made again."""
    graph = plan.with_suffix(".onnx")
    kept = cli("check", archive, plan)
    assert kept.exit_code == 0, kept.output
    assert "the plan itself was NOT run: there is no GPU on this machine" in kept.stdout
    assert "Executed: m.onnx, the ONNX graph that it was built from, in onnx's reference evaluator" in kept.stdout
    assert "within tolerance" in kept.stdout
    graph.unlink()
    again = cli("check", archive, plan)
    assert again.exit_code == 0, again.output
    assert "Executed: the ONNX graph that it was built from, made again" in again.stdout
    graph.write_bytes(b"something else of the same name")
    assert "made again" in cli("check", archive, plan).stdout
    # What a candidate is, its content says.
    for suffix in ("", ".json"):
        plan.with_name(f"m.plan{suffix}").rename(plan.with_name(f"other.onnx{suffix}"))
    assert "NOT run" in run_check(archive, plan.with_name("other.onnx")).note


def test_plan_that_runs(archive: Path, plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and shares come from the graph beside the plan.

    No TensorRT can run a plan here, so a stand-in runs the graph: this tests what check does with a plan's results, and
    not the plan.
    """
    graph, opened = plan.with_suffix(".onnx"), list[Path]()
    stand_in = evaluator.OnnxEvaluator(graph)
    for name, function in {
        "why_not_here": lambda backend: "",
        "load_host": lambda backend: None,
        "open_plan": lambda host, path, *_: opened.append(path),
        "PlanRunner": lambda plan: lambda sample: [y * 1.5 for y in stand_in.run(sample)],
    }.items():
        monkeypatch.setattr(f"twellc.checks.candidate.{name}", function)
    result = run_check(archive, plan)
    assert (result.executed, result.note) == ("the plan", "")
    assert opened == [plan], "once for all samples"
    assert [block.diverges for block in result.blocks] == [False]
    assert (result.within, result.causes) == (False, ["rest"])
    graph.unlink()
    result = run_check(archive, plan)
    assert (result.blocks, result.outputs[0].separation, result.causes) == ([], None, [])
    assert "the graph that the plan was built from is not beside it; keep it with --onnx" in result.notes[0]


def test_samples_of_a_plan_keep_to_its_profile(cli: Cli, archive: Path, tmp_path: Path) -> None:
    plan, graph = tmp_path / "m.plan", tmp_path / "m.onnx"
    shapes = "x:5x3x16:5x3x16:5x3x16"
    assert cli("compile", archive, "-o", plan, "--onnx", graph, "--optimization-profile", shapes).exit_code == 0
    samples = samples_of(load_model(TracingOptions(archive)), read_manifest(plan).profiles[0])
    assert [tuple(sample["x"].shape) for sample in samples] == [(5, 3, 16)]
    assert cli("check", archive, plan).exit_code == 0


DAMAGES: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "a tile of 256 neurons is lost": ("w_gate", lambda w: w[:256].zero_()),
    "the last, partial tile is lost": ("w_gate", lambda w: w[256:].zero_()),
    "up is zero": ("w_up", lambda w: w.zero_()),
    "down is zero": ("w_down", lambda w: w.zero_()),
    "down is scaled": ("w_down", lambda w: w.mul_(1.1)),
    "one output is scaled": ("w_down", lambda w: w[:, 7].mul_(1.5)),
    "one output is lost": ("w_down", lambda w: w[:, 7].zero_()),
    "two neurons' down rows are swapped": ("w_down", lambda w: w.copy_(w.roll(1, 0))),
    "gate and up are swapped in part": ("w_up", lambda w: w.copy_(w.roll(1, 0))),
    "the bias of the gate is lost": ("b_gate", lambda b: b.zero_()),
    "the bias of down is lost": ("b_down", lambda b: b.zero_()),
    "a weight is NaN": ("w_down", lambda w: w[3, 3].fill_(torch.nan)),
    "a weight is infinite": ("w_up", lambda w: w[3, 3].fill_(torch.inf)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_weight(case: str, archive: Path, archive_graph: Path, tmp_path: Path) -> None:
    weight, change = DAMAGES[case]
    assert not run_check(archive, damage(archive_graph, tmp_path / "m.onnx", WITH_BIASES, weight, change)).within


def test_residual_is_part_of_the_block(archive: Path, archive_graph: Path, tmp_path: Path) -> None:
    """The block's result is the sum; a candidate whose node takes in another tensor, or none, is found out."""
    result = run_check(archive, archive_graph)
    assert [block.module for block in result.blocks] == ["ffn"]

    def take(model: onnx.ModelProto, residual: bool) -> None:
        (node,) = twell_nodes(model)
        (field,) = (each for each in node.attribute if each.name == "residual")
        assert field.i == 1
        field.i = int(residual)
        if residual:
            node.input[-1] = node.input[0]
        else:
            node.input.pop()

    other = run_check(archive, changed(archive_graph, tmp_path / "other.onnx", lambda model: take(model, True)))
    assert not other.within
    assert other.first_divergence is None, "the block by itself is right: it is given the right residual"
    without = run_check(archive, changed(archive_graph, tmp_path / "none.onnx", lambda model: take(model, False)))
    assert not without.within
    assert "with and without a residual" in "".join(without.notes)


def test_a_block_that_reads_an_input_with_the_name_of_a_function(tmp_path: Path) -> None:
    """As what nn.Sequential is given: `input`."""
    model = saved(tmp_path / "m.pt2", nn.Sequential(Plain()), torch.randn(4, 16).bfloat16())
    result = run_check(model, graph_of(model, tmp_path / "m.onnx"))
    assert result.within and [block.module for block in result.blocks] == ["0"]
    assert result.blocks[0].accuracy.compared == result.blocks[0].accuracy.elements > 0


def test_last_dimension_varies(tmp_path: Path) -> None:
    """A block over channels, as convolutions: errors are taken element by element, so rows of any length are joined."""
    x, shapes = torch.randn(2, 16, 9).bfloat16(), ({2: Dim("time", max=64)},)
    channels = nn.Sequential(nn.Conv1d(16, 40, 1), nn.ReLU(), nn.Conv1d(40, 16, 1))
    model = saved(tmp_path / "m.pt2", channels, x, dynamic=shapes)
    result = run_check(model, graph_of(model, tmp_path / "m.onnx"))
    sizes = [tuple(sample["input"].shape) for sample in samples_of(load_model(TracingOptions(model)))]
    assert sizes == [(2, 16, 1), (2, 16, 9), (2, 16, 27)]
    (output,) = result.outputs
    assert result.within and 0 < output.plain.relative < 0.01
    assert output.separation is not None and output.separation.rewrite.relative < 1e-13

    def scale(model: onnx.ModelProto) -> None:
        model.graph.output[0].name = "scaled"
        model.graph.initializer.append(helper.make_tensor("scale", TensorProto.BFLOAT16, [], [1.1]))
        model.graph.node.append(helper.make_node("Mul", ["output", "scale"], ["scaled"]))

    result = run_check(model, changed(tmp_path / "m.onnx", tmp_path / "d.onnx", scale))
    assert (result.within, result.causes) == (False, ["rest"])


def test_outputs_of_integers_and_booleans(cli: Cli, tmp_path: Path) -> None:
    """A classifier of tokens that returns labels, and which of its scores are positive."""

    def classify(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = module.head(module.block(x))
        return scores.argmax(-1), scores > 0

    x, shapes = torch.randn(2, 100, 16).bfloat16(), (({0: Dim("batch", min=1, max=8)},),)
    classifier = Written(classify, block=Residual(Gated()), head=nn.Linear(16, 24))
    model = saved(tmp_path / "m.pt2", classifier, x, dynamic=shapes)
    graph = graph_of(model, tmp_path / "m.onnx")
    found = json.loads(cli("check", model, graph, "--json").stdout)
    labels, positive = found["outputs"]
    assert (labels["name"], labels["elements"], positive["elements"]) == ("output_0", 900, 900 * 24)
    assert labels["tolerance"] == 2 * labels["plain_differing"] + 60
    assert 0 < positive["plain_differing"] < 0.02 * positive["elements"]
    assert positive["differing"] <= 2 * positive["plain_differing"]
    assert [block["module"] for block in found["blocks"]] == ["block.ffn"]
    shown = cli("check", model, graph)
    assert shown.exit_code == 0, shown.output
    line = f"output output_1: {positive['differing']} of 21600 elements differ from float64 (plain "
    assert line in shown.stdout

    def spoil_head(model: onnx.ModelProto) -> None:
        (head,) = (tensor.name for tensor in model.graph.initializer if sorted(tensor.dims) == [16, 24])
        set_tensor(model, head, lambda w: w.copy_(w.flip(0)))

    wrong = cli("check", model, changed(graph, tmp_path / "wrong.onnx", spoil_head))
    assert wrong.exit_code == 1
    assert "OUTSIDE TOLERANCE; every rewritten block is within tolerance by itself" in wrong.stdout


def test_a_model_that_low_precision_spoils(cli: Cli, tmp_path: Path) -> None:
    """Two results, in one of which bfloat16 loses nearly all of the input."""

    def compute(module: Any, x: Tensor) -> dict[str, Tensor]:
        coarse = module.block(x + 400 - 400)
        return {"good": module.block(x), "bad": coarse, "signs": coarse > 0}

    model = saved(tmp_path / "m.pt2", Written(compute, block=Gated()), torch.randn(40, 16).bfloat16())
    graph = graph_of(model, tmp_path / "m.onnx")
    result = run_check(model, graph)
    assert result.within, "no fault of the candidate"
    assert [output.coarse for output in result.outputs] == [False, True, True]
    assert result.outputs[0].plain.relative < 0.02 < 0.1 < result.outputs[1].plain.relative
    note = "within tolerance says little: low precision alone is more than 10% off in bad, signs"
    assert result.notes == [note]
    shown = cli("check", model, graph)
    assert (shown.exit_code, shown.stdout.count(f"Note: {note}\n")) == (0, 1)


def test_scores_over_the_text_are_no_language_model(tmp_path: Path) -> None:
    """An output called logits with one score for each token of the input: there is no vocabulary to compare over."""
    make = GraphMaker("bf16")
    hidden = make.node("Relu", make.linear("x", "block.fc1", 16, 40))
    score = make.linear(make.linear(hidden, "block.fc2", 40, 16), "score", 16, 1)
    make.nodes.append(helper.make_node("Squeeze", [score, make.integers(-1)], ["logits"]))
    onnx.save(make.model("logits", rank=2), tmp_path / "m.onnx")
    (output,) = run_check(tmp_path / "m.onnx", graph_of(tmp_path / "m.onnx", tmp_path / "g.onnx")).outputs
    assert output.within
    assert (output.name, output.top1, output.kl) == ("logits", None, None)


@pytest.fixture(scope="module")
def llama_graph(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return graph_of(llama, tmp_path_factory.mktemp("graphs") / "llama.onnx")


MODULES = [f"model.layers.{index}.mlp" for index in range(4)]


def test_shares_add_up(llama: Path, llama_graph: Path) -> None:
    result = run_check(llama, llama_graph)
    assert (result.within, result.first_divergence, result.causes, result.notes) == (True, None, [], [])
    (logits,) = result.outputs
    separation = logits.separation
    assert separation is not None
    assert separation.low_precision.relative == logits.plain.relative
    assert separation.rewrite.relative < 1e-13
    parts = (separation.low_precision, separation.rewrite, separation.kernels, separation.rest)
    assert sum(part.relative for part in parts) == pytest.approx(logits.candidate.relative, rel=1e-9)
    assert sum(part.max for part in parts) == pytest.approx(logits.candidate.max, rel=1e-9)
    # Neither share is an invention: the plugin nodes round in another way, and so does the evaluator.
    assert separation.kernels.relative != 0 != separation.rest.relative
    assert [block.module for block in result.blocks] == MODULES[:2]
    for block in result.blocks:
        assert block.accuracy.separation is not None
        assert block.accuracy.separation.rewrite.relative < 1e-13
        assert block.accuracy.separation.rest.relative == 0
        assert 0 < block.accuracy.candidate.relative < block.accuracy.plain.relative, "one rounding, not three"


def test_a_weight_off_by_its_last_bit_is_noticed(llama: Path, llama_graph: Path, tmp_path: Path) -> None:
    """Far too little to see in low precision, but in float64 the rewritten model is another one."""

    def change(weight: Tensor) -> None:
        weight[3, 3] *= 1 + torch.finfo(torch.bfloat16).eps

    result = run_check(llama, damage(llama_graph, tmp_path / "m.onnx", WITHOUT, "w_down", change, 1))
    assert all(output.within for output in result.outputs)
    assert not result.within
    assert (result.first_divergence, result.causes) == (MODULES[1], ["rewrite"])


def test_fault_of_a_kernel(llama: Path, llama_graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel here is wrong, so one is made wrong: the first block loses a tenth of its output in low precision."""
    original = evaluator._run_block

    def faulty(operands: Any, options: Any) -> Tensor:
        y = original(operands, options)
        return y * 0.9 if torch.equal(operands.w_gate, wrong) and y.dtype == torch.bfloat16 else y

    graph = onnx.load(llama_graph)
    name = twell_nodes(graph)[0].input[1]
    (tensor,) = (tensor for tensor in graph.graph.initializer if tensor.name == name)
    wrong = to_torch(onnx.numpy_helper.to_array(tensor))
    monkeypatch.setattr("twellc.checks.evaluator._run_block", faulty)
    result = run_check(llama, llama_graph)
    assert (result.first_divergence, result.causes) == (MODULES[0], ["kernels"])
    assert [block.diverges for block in result.blocks] == [True, False]
    separation = result.outputs[0].separation
    assert separation is not None
    assert separation.rewrite_within
    assert separation.kernels.relative > 3 * separation.low_precision.relative > abs(separation.rest.relative)


def test_fault_outside_of_the_blocks(cli: Cli, llama: Path, llama_graph: Path, tmp_path: Path) -> None:
    def scale_values(model: onnx.ModelProto) -> None:
        *_, name = (
            each.name for each in model.graph.initializer if tuple(each.dims) == (32, 16)
        )  # v of the last layer
        set_tensor(model, name, lambda v: v.mul_(1.5))

    result = cli("check", llama, changed(llama_graph, tmp_path / "m.onnx", scale_values))
    assert result.exit_code == 1
    message = "OUTSIDE TOLERANCE; every rewritten block is within tolerance by itself; cause: export and runtime"
    assert message in result.stdout


@pytest.mark.parametrize("layer", [0, 1])
def test_the_damaged_block_is_named(cli: Cli, llama: Path, llama_graph: Path, tmp_path: Path, layer: int) -> None:
    candidate = damage(llama_graph, tmp_path / "m.onnx", WITHOUT, "w_gate", lambda w: w.neg_(), layer)
    shown = cli("check", llama, candidate)
    assert shown.exit_code == 1
    assert f"OUTSIDE TOLERANCE; first block that diverges: {MODULES[layer]}; cause: rewriting" in shown.stdout
    rows = [line for line in shown.stdout.splitlines() if "model.layers." in line and "│" in line]
    assert [("diverges" in row, "within" in row) for row in rows] == [(at == layer, at != layer) for at in range(2)]
    found = json.loads(cli("check", llama, candidate, "--json").stdout)
    assert (found["within"], found["first_divergence"], found["causes"]) == (False, MODULES[layer], ["rewrite"])
    assert [(block["module"], block["diverges"]) for block in found["blocks"]] == [
        (module, module == MODULES[layer]) for module in MODULES[:2]
    ]
    (output,) = found["outputs"]
    assert output["separation"]["rewrite"]["relative"] > 0.1
    assert output["candidate"]["relative"] > output["relative_tolerance"]


def test_json_has_no_nan(cli: Cli, llama: Path, llama_graph: Path, tmp_path: Path) -> None:
    candidate = damage(llama_graph, tmp_path / "m.onnx", WITHOUT, "w_down", lambda w: w[3, 3].fill_(torch.nan), 1)
    result = cli("check", llama, candidate, "--json")
    assert result.exit_code == 1

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    found = json.loads(result.stdout, parse_constant=refuse)
    assert found["outputs"][0]["kl"] is None
    assert found["first_divergence"] == MODULES[1]
    assert found["blocks"][1]["accuracy"]["stray"] > 0


def test_only_the_worst_blocks_are_shown(capsys: pytest.CaptureFixture[str], llama: Path, llama_graph: Path) -> None:
    result = run_check(llama, llama_graph)
    many = [replace(result.blocks[0], module=f"block{index}") for index in range(20)]
    worst = replace(result.blocks[1].accuracy, relative_tolerance=1e-9, max_tolerance=1e-9)
    many[13] = replace(many[13], accuracy=worst)
    print_accuracy(replace(result, blocks=many))
    shown = capsys.readouterr().out
    assert "the worst of 20" in shown
    assert "first block that diverges: block13" in shown
    assert sum(f"block{index} " in shown for index in range(20)) == 5
    assert "block13 " in shown


def test_blocks_of_a_float32_model(opt: Path, tmp_path: Path) -> None:
    """Rounding the weights is low precision's error, and not the rewriting's.

    The yardstick is the model in the precision that the candidate says it was compiled in.
    """
    graph = graph_of(opt, tmp_path / "m.onnx", dtype="fp16")
    result = run_check(opt, graph)
    (logits,) = result.outputs
    assert logits.within
    assert logits.plain.relative < 1e-3, "bfloat16 would be coarser"
    separation = logits.separation
    assert separation is not None
    assert separation.rewrite.relative < 1e-13
    parts = (separation.low_precision, separation.rewrite, separation.kernels, separation.rest)
    assert sum(part.relative for part in parts) == pytest.approx(logits.candidate.relative, rel=1e-9)
    assert [block.module for block in result.blocks] == ["model.decoder.layers.0", "model.decoder.layers.1"]
    damaged = damage(graph, tmp_path / "d.onnx", PLAIN, "b_down", lambda b: b.zero_(), 1)
    assert run_check(opt, damaged).first_divergence == "model.decoder.layers.1"


def test_density(archive: Path, archive_graph: Path, tmp_path: Path) -> None:
    """Against the activations of the module itself, for inputs of every density."""
    program = load_model(TracingOptions(archive)).program
    weight, bias = (program.state_dict[f"ffn.gate.{name}"].float() for name in ("weight", "bias"))
    for shift in (-8.0, 0.0, 2.0):
        x = (torch.randn(4, 3, 16) + shift).bfloat16()
        np.savez(tmp_path / "x.npz", x=x.float().numpy())
        active = ((x + 1).float() @ weight.t() + bias).bfloat16() > 0
        (block,) = run_check(archive, archive_graph, arrays=tmp_path / "x.npz").blocks
        assert block.density == float(active.double().mean())


def test_blocks_that_do_not_correspond(cli: Cli, tmp_path: Path) -> None:
    """A graph that does not say which blocks it rewrote, and has fewer of them: nothing is made up."""
    module = nn.Sequential(Residual(Gated()), Residual(Gated())).bfloat16()
    model = saved(tmp_path / "m.pt2", module, torch.randn(4, 16).bfloat16())
    graph = graph_of(model, tmp_path / "one.onnx", layers="1")
    assert [block.module for block in run_check(model, graph).blocks] == ["1.ffn"]
    changed(graph, graph, lambda model: model.ClearField("metadata_props"))
    found = json.loads(cli("check", model, graph, "--json").stdout)
    (note,) = found["notes"]
    assert "the candidate has 1 plugin nodes, and the model not 2 such blocks" in note
    assert "blocks are not compared, and the error is not separated" in note
    assert (found["within"], found["blocks"], found["outputs"][0]["separation"]) == (True, [], None)


def test_a_graph_without_plugin_nodes_has_no_kernels(llama: Path, tmp_path: Path) -> None:
    result = run_check(llama, graph_of(llama, tmp_path / "dense.onnx", layers="none"))
    separation = result.outputs[0].separation
    assert (result.within, result.blocks) == (True, [])
    assert separation is not None
    assert (separation.rewrite, separation.kernels) == (Share(0.0, 0.0), Share(0.0, 0.0))
    assert separation.rest.relative != 0


def test_a_fault_of_a_pass_before_the_rewriting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model that the candidate is measured by takes no part in the passes: a wrong one cannot agree with itself."""

    def compute(module: Any, x: Tensor) -> Tensor:
        gate = nn.functional.linear(x, module.block.gate.weight * module.scale[:, None])
        return module.block.down(torch.relu(gate) * module.block.up(x))

    x, shapes = torch.randn(4, 16).bfloat16(), (({0: Dim("rows", min=1, max=64)},),)
    computed = Written(compute, block=Gated(d_ff=64), scale=torch.linspace(0.5, 2, 64))
    model = saved(tmp_path / "m.pt2", computed, x, dynamic=shapes)
    good = run_check(model, graph_of(model, tmp_path / "good.onnx"))
    (output,) = good.outputs
    assert good.within and output.separation is not None
    # Folding rounds the product of the two, as the plain model does.
    assert 1e-6 < output.separation.rewrite.relative < output.separation.low_precision.relative
    assert output.separation.rewrite_within
    assert [block.module for block in good.blocks] == ["block"]

    def faulty(program: ExportedProgram) -> ExportedProgram:
        folded = fold_weights(program)
        (name,) = folded.state_dict.keys() - program.state_dict.keys()
        with torch.no_grad():
            folded.state_dict[name][5] *= 3
        return folded

    monkeypatch.setitem(STEPS, Stage.ARRANGING, (step(faulty), step(feature_last)))
    bad = run_check(model, graph_of(model, tmp_path / "bad.onnx"))
    assert (bad.within, bad.causes, bad.first_divergence) == (False, ["rewrite"], None)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block", [Gated, Plain])
def test_threshold(dtype: torch.dtype, block: type[nn.Module], tmp_path: Path) -> None:
    """Torch compares a bfloat16 with 0.1 rounded to bfloat16; so do the rewritten block and the float64 model."""
    module = Residual(block(lambda z: torch.where(z > 0.1, z, 0.0), d_ff=600)).to(dtype)
    x, shapes = torch.randn(40, 16).to(dtype), ({0: Dim("rows", min=1, max=4096)},)
    model = saved(tmp_path / "m.pt2", module, x, dynamic=shapes)
    result = run_check(model, graph_of(model, tmp_path / "m.onnx"))
    assert result.within
    (found,) = result.blocks
    assert found.accuracy.separation is not None
    assert found.accuracy.separation.rewrite.relative < 1e-14


class Scaled(nn.RMSNorm):
    """With Gemma's weight, 1 + w in float32."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.float()
        rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-5)
        return (rows * (1 + self.weight.float())).to(x.dtype)


@pytest.mark.parametrize("norm", [nn.LayerNorm(16), pytest.param(nn.RMSNorm(16), marks=pytest.mark.slow), Scaled(16)])
def test_a_norm_of_small_rows(norm: nn.Module, tmp_path: Path) -> None:
    """A node has eps in float32, and the norm's weight rounded; another eps is noticed."""
    torch.nn.init.normal_(norm.weight)
    module = Written(lambda m, x: x + m.ffn(m.norm(x * 2**-9)), norm=norm, ffn=Plain()).bfloat16()
    x, rows = torch.randn(40, 16).bfloat16(), {0: Dim("rows", min=1, max=4096)}
    model = saved(tmp_path / "m.pt2", module, x, dynamic=((rows,),))
    graph = graph_of(model, tmp_path / "m.onnx", linear="twell")

    def plant(model: onnx.ModelProto) -> None:
        (node,) = twell_nodes(model)
        (eps,) = (each for each in node.attribute if each.name == "eps")
        assert eps.f > 0
        eps.f /= 10

    result = run_check(model, graph)
    assert result.within, result.causes
    (block,) = result.blocks
    assert block.accuracy.separation is not None
    assert block.accuracy.separation.rewrite.relative < 1e-14
    planted = run_check(model, changed(graph, tmp_path / "planted.onnx", plant))
    assert not planted.within
    assert "rewrite" in planted.causes


def test_a_block_that_is_the_whole_model(tmp_path: Path) -> None:
    """It reads the program's input and gives its output."""
    x, shapes = torch.randn(4, 16).half(), ({0: Dim("rows", min=1, max=64)},)
    model = saved(tmp_path / "m.pt2", Plain(biases="ud"), x, dynamic=shapes)
    result = run_check(model, graph_of(model, tmp_path / "m.onnx"))
    assert result.within and len(result.blocks) == 1
    damaged = damage(tmp_path / "m.onnx", tmp_path / "d.onnx", PLAIN, "w_up", lambda w: w[3].zero_())
    assert run_check(model, damaged).causes == ["rewrite"]


@pytest.fixture(scope="module", params=["bf16", "fp16", "fp32"])
def onnx_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An ONNX file with a gated block, a layer normalisation and a plain block, and its rewritten graph."""
    make = GraphMaker(request.param)
    gate = make.node("Relu", make.linear("x", "first.gate", 16, 40, bias=True))
    hidden = make.node("Mul", gate, make.linear("x", "first.up", 16, 40))
    middle = make.linear(hidden, "first.down", 40, 16, bias=True)
    middle = make.node("LayerNormalization", middle, make.constant(np.ones(16)), make.constant(np.zeros(16)))
    hidden = make.node("Relu", make.linear(middle, "second.fc1", 16, 72, bias=True))
    model = make.model(make.node("Add", middle, make.linear(hidden, "second.fc2", 72, 16)))
    folder = tmp_path_factory.mktemp("models")
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx", graph_of(folder / "model.onnx", folder / "graph.onnx")


def test_blocks_of_an_onnx_model(onnx_model: tuple[Path, Path]) -> None:
    result = run_check(*onnx_model)
    assert (result.within, result.notes) == (True, [])
    assert [block.module for block in result.blocks] == ["first", "second"]
    for each in (*result.outputs, *(block.accuracy for block in result.blocks)):
        assert each.separation is not None
        assert each.separation.rewrite.relative < 1e-14
        assert each.separation.rest.relative == 0, "all other operators are the model's own"
        parts = (each.separation.low_precision, each.separation.rewrite, each.separation.kernels)
        assert sum(part.relative for part in parts) == pytest.approx(each.candidate.relative, rel=1e-9)
    assert all(0.2 < block.density < 0.8 for block in result.blocks)


def negate_a_neuron(model: onnx.ModelProto, block: int) -> None:
    set_tensor(model, twell_nodes(model)[block].input[1], lambda w: w[11].neg_())


def use_another_activation(model: onnx.ModelProto) -> None:
    (activation,) = (each for each in twell_nodes(model)[1].attribute if each.name == "activation")
    activation.s = b"relu2"


@pytest.mark.parametrize(
    ("change", "module"),
    [
        (lambda model: negate_a_neuron(model, 0), "first"),
        (lambda model: negate_a_neuron(model, 1), "second"),
        (use_another_activation, "second"),
    ],
)
def test_the_damaged_block_of_an_onnx_model(
    onnx_model: tuple[Path, Path], tmp_path: Path, change: Callable[[onnx.ModelProto], None], module: str
) -> None:
    model, graph = onnx_model
    result = run_check(model, changed(graph, tmp_path / "m.onnx", change))
    assert [block.module for block in result.blocks if block.diverges] == [module]
    assert (result.first_divergence, result.causes[0]) == (module, "rewrite")


@pytest.mark.parametrize(
    ("x", "operator", "outputs", "options", "message"),
    [
        ("z", "Identity", ["y"], {}, "does not belong to the model: their inputs differ; got z; expected x"),
        ("x", "Transpose", ["y"], {"perm": [0, 2, 1]}, "output output has another shape than the model's"),
        ("x", "MatMul", ["y"], {}, r"m\.onnx"),
        ("x", "Split", ["y", "z"], {"num_outputs": 2}, "their outputs differ; got 2; expected output"),
    ],
)
def test_foreign_graph(
    archive: Path, tmp_path: Path, x: str, operator: str, outputs: list[str], options: dict[str, Any], message: str
) -> None:
    node = helper.make_node(operator, [x, "w"] if operator == "MatMul" else [x], outputs, **options)
    given = [helper.make_tensor_value_info(x, TensorProto.BFLOAT16, ["n", 3, 16])]
    made = [helper.make_tensor_value_info(name, TensorProto.BFLOAT16, ["n", "a", "b"]) for name in outputs]
    constant = helper.make_tensor("w", TensorProto.BFLOAT16, [5, 5], [0.0] * 25)
    graph = helper.make_graph([node], "g", given, made, [constant])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), tmp_path / "m.onnx")
    with pytest.raises(UserError, match=message):
        run_check(archive, tmp_path / "m.onnx")


@pytest.mark.usefixtures("no_gpu")
def test_other_model_of_the_same_shape(archive_graph: Path, plan: Path, tmp_path: Path) -> None:
    """Only the numbers tell graphs apart, so they are outside tolerance; a plan says what it was built from."""
    torch.manual_seed(7)
    module, x = Residual(Gated(biases="gud", d_ff=320)), torch.randn(2, 3, 16).bfloat16()
    other = saved(tmp_path / "other.pt2", module, x, dynamic=({0: Dim("batch", min=1, max=64)},))
    assert not run_check(other, archive_graph).within
    plan.with_suffix(".onnx").unlink()
    with pytest.raises(UserError, match="was not built from"):
        run_check(other, plan)


def test_damaged_plans(cli: Cli, archive: Path, plan: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "m.plan.json"
    content = manifest.read_text()

    def refused(text: str) -> None:
        for command in (("check", archive, plan), ("inspect", plan)):
            result = cli(*command)
            assert result.exit_code == 2
            assert text in result.stderr

    plan.write_bytes(plan.read_bytes() + b"x")
    refused("the manifest belongs to another plan")
    for text in ("{", "{}"):
        manifest.write_text(text)
        refused("is not a manifest of twellc")
    manifest.write_text(json.dumps(json.loads(content) | {"schema": 99}))
    refused("the manifest is of another version; got 99; expected 3")
    manifest.unlink()
    refused(f"{plan}: has no manifest beside it, as a plan must; expected m.plan.json")


def test_garbage(cli: Cli, archive: Path, tmp_path: Path) -> None:
    for content in (b"garbage", b""):
        (tmp_path / "m.onnx").write_bytes(content)
        result = cli("check", archive, tmp_path / "m.onnx")
        assert result.exit_code == 2
        assert "m.onnx: is neither an ONNX file nor a plan with its manifest beside it" in result.stderr
    (tmp_path / "m.plan").write_bytes(b"garbage")
    for model, name in ((archive, "m.plan"), (archive, "no"), (tmp_path / "m.plan", "m.onnx"), (tmp_path, "m.onnx")):
        assert cli("check", model, tmp_path / name).exit_code == 2


@pytest.mark.parametrize(("padding", "logits"), [("mask", "all"), pytest.param("none", "last", marks=pytest.mark.slow)])
def test_the_model_is_traced_as_it_was_compiled(padding: str, logits: str, tmp_path: Path) -> None:
    """Its inputs and outputs are the candidate's, by the settings in the graph; one place predicts no text."""
    model = models.save(models.llama(vocab_size=256, num_hidden_layers=1), tmp_path / "model")
    summary = translate(model, tmp_path / "m.onnx", padding=padding, logits=logits)
    assert (summary.settings.padding, summary.settings.logits) == (padding, logits)
    (tmp_path / "t").write_bytes(b"one text" * 20)
    result = run_check(model, tmp_path / "m.onnx", text=tmp_path / "t")
    assert result.within
    assert (result.text is None) == (logits == "last")
    assert any("--logits last computes one place" in note for note in result.notes) == (logits == "last")
    if padding == "mask":  # a place left of a row sees no token: no two forms of attention agree on what it gets
        mask = np.ones((2, 9), np.int64)
        mask[1, :5] = 0
        np.savez(tmp_path / "x.npz", input_ids=np.arange(18).reshape(2, 9), attention_mask=mask)
        result = run_check(model, tmp_path / "m.onnx", arrays=tmp_path / "x.npz")
        assert result.within, result
        assert result.notes == ["places of padding are not compared: what a model gives for them has no meaning"]


def test_only_places_of_padding_are_left_out() -> None:
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    tokens = places_of_tokens({"input_ids": mask, "attention_mask": mask})
    assert tokens is not None and tokens.tolist() == mask.bool().tolist()
    output = torch.arange(12).reshape(2, 3, 2)
    assert _without_padding(output, tokens).tolist() == output.reshape(6, 2)[1:].tolist()
    for other in (output[:, :1], output[..., 0], output.reshape(3, 2, 2)):
        assert _without_padding(other, tokens) is other
    ones, zeros = torch.ones(2, 3), torch.zeros(2, 3)
    for sample in ({"attention_mask": ones}, {"attention_mask": zeros}):
        assert places_of_tokens(sample) is None
    assert places_of_tokens({"attention_mask": mask, "decoder_input_ids": mask}) is None
    assert places_of_tokens({"attention_mask": ones, "decoder_attention_mask": mask}) is not None


def test_the_candidate_of_a_causal_model_and_an_encoder(llama: Path, tmp_path: Path) -> None:
    candidate = graph_of(llama, tmp_path / "m.onnx")
    config = transformers.BertConfig(**{**models.SMALL, "num_hidden_layers": 1}, intermediate_size=64)
    encoder = models.save(transformers.BertForMaskedLM(config), tmp_path / "bert")
    message = r"does not belong to the model: it is of a causal Hugging Face model; got .*bert"
    with pytest.raises(UserError, match=message):
        run_check(encoder, candidate)


def test_samples(llama: Path) -> None:
    model = load_model(TracingOptions(llama, padding="mask"))
    samples = samples_of(model)
    assert [tuple(sample["input_ids"].shape) for sample in samples] == [(1, 1), (2, 16), (6, 48)]
    for sample in samples:
        assert set(sample) == {"input_ids", "attention_mask"}
        assert sample["input_ids"].dtype == torch.int64
        assert sample["attention_mask"].shape == sample["input_ids"].shape
        assert (sample["attention_mask"] == 1).all()
    largest = samples[-1]["input_ids"]
    assert (largest >= 0).all() and (largest < 96).all()
    assert len(largest.unique()) > 50


def test_samples_of_a_multiple(tmp_path: Path) -> None:
    """A dimension that is twice a symbol."""
    x, shapes = torch.randn(6, 16).bfloat16(), (({0: 2 * Dim("half", min=2, max=32)},),)
    path = saved(tmp_path / "m.pt2", Written(lambda _, x: x.view(x.shape[0] // 2, 2, -1).sum(1)), x, dynamic=shapes)
    assert run_check(path, graph_of(path, tmp_path / "m.onnx")).within
    model, profile = load_model(TracingOptions(path)), {"inputs_0": ShapeRange((8, 16), (8, 16), (12, 16))}
    for given, sizes in ((None, [4, 6, 18]), (profile, [8, 12])):
        assert [sample["inputs_0"].shape[0] for sample in samples_of(model, given)] == sizes


def test_config_that_names_another_activation(cli: Cli, llama: Path, tmp_path: Path) -> None:
    """The graph is what counts; a config that says silu may belong to a model of ReLUs, or the other way round."""
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    config = json.loads((folder / "config.json").read_text()) | {"hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps(config))
    found = json.loads(cli("inspect", folder, "--json").stdout)
    assert {layer["activation"] for layer in found["layers"]} == {"silu"}
    assert not any("config.json says" in note for note in found["notes"])
