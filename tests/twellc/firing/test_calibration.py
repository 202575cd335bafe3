"""`--firing-profile` of compile, inspect and check: what is written, what is said, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import twellc
from tests.conftest import Cli
from tests.models import Gated, Residual, export
from tests.onnx_graphs import gated
from tests.twellc.decisions.test_advise import gpu_times
from tests.twellc.test_cli import failed, files_in
from twellc.compiling.manifest import read_manifest
from twellc.decisions.advise import Advisor
from twellc.firing.calibration import LoadedCalibration
from twellc.passes.block_profile import Calibration, hot_first
from twellc.passes.match.find_ffn import FfnBlock
from twellc.passes.neurons import Staying
from twellc.passes.report import Choice, Repeated

TEXT = "".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(200))
PRUNED = "model.layers.2.mlp"


def profiled(bytelm: Path, folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    twellc.profile(bytelm, folder / name, folder / "p")
    return folder / "p"


@pytest.fixture(scope="module")
def profile(bytelm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return profiled(bytelm, tmp_path_factory.mktemp("profile"), "a.py", TEXT)


@pytest.fixture(scope="module")
def other_text(bytelm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = "The quick brown fox jumps over the lazy dog. " * 40
    return profiled(bytelm, tmp_path_factory.mktemp("other"), "b.txt", text)


def first_weight(path: Path, module: str) -> np.ndarray[Any, Any]:
    model = onnx.load(path)
    node = next(node for node in model.graph.node if node.domain == "twell" and module in node.name)
    return np.asarray(onnx.numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == node.input[1])))


def splitting(advisor: Advisor, block: FfnBlock, neurons: Staying) -> Choice:
    """Advise hot neurons for one block, and none for the others."""
    choice = Choice("twell", "matches", 128 if block.module == PRUNED else 0, 8, None)
    advisor.decided[block.module] = Repeated("twell", "matches", choice.hot, 8)
    return choice


@pytest.mark.slow
def test_split_graph_and_its_check(
    cli: Cli, bytelm: Path, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hottest neurons of the block that is split stand first; of the others none is moved."""
    monkeypatch.setattr(Advisor, "__call__", splitting)
    for name, options in {"plain": [], "split": ["--firing-profile", profile]}.items():
        assert cli("compile", bytelm, "--backend", "none", "--onnx", tmp_path / f"{name}.onnx", *options).exit_code == 0
    for module, block in twellc.FiringProfile.read(profile).blocks.items():
        plain, arranged = (first_weight(tmp_path / f"{name}.onnx", module) for name in ("plain", "split"))
        order = hot_first(block.firing, 128 if module == PRUNED else 0)
        assert np.array_equal(arranged, plain[order])
        assert np.array_equal(arranged, plain) == (module != PRUNED)
    result = twellc.check(bytelm, tmp_path / "split.onnx")
    assert result.within and len(result.blocks) == 4
    assert all(block.accuracy.separation.rewrite.relative < 1e-10 for block in result.blocks)  # type: ignore[union-attr]
    shown = twellc.inspect(tmp_path / "split.onnx").layers
    assert [layer.hot for layer in shown] == [128 if layer.module == PRUNED else 0 for layer in shown]
    assert all(layer.neurons is not None and layer.neurons.kept == 1024 for layer in shown)


def test_pruned_graph_report_and_check(cli: Cli, bytelm: Path, profile: Path, other_text: Path, tmp_path: Path) -> None:
    """Its report says how many neurons, how sure that is, and what the second profile loses; its check measures it."""
    options = ["--firing-profile", profile, "--prune-dead", "--prune-check", other_text]
    outputs = ["--backend", "none", "--onnx", tmp_path / "m.onnx", "--manifest", tmp_path / "r.json"]
    result = cli("compile", bytelm, *outputs, *options)
    assert result.exit_code == 0
    said = " ".join(result.stderr.split())
    assert "approximate, as --prune-dead asks for" in said and "95 % confidence" in said and "--prune-check" in said
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["settings"]["prune_dead"] is True and len(report["settings"]["calibration"]) == 64
    block = twellc.FiringProfile.read(profile).blocks[PRUNED]
    neurons = next(layer["neurons"] for layer in report["layers"] if layer["module"] == PRUNED)
    assert neurons["never"] == block.never.sum() and neurons["tokens"] == block.tokens
    assert neurons["kept"] == 1024 - neurons["dead"] == len(first_weight(tmp_path / "m.onnx", PRUNED))
    never = np.flatnonzero(block.never)
    gone = never[len(never) - neurons["dead"] :]
    second = twellc.FiringProfile.read(other_text).blocks[PRUNED]
    assert neurons["lost"] == pytest.approx(second.firing[gone].sum() / second.nonzeros) and neurons["lost"] > 0
    (tmp_path / "b.txt").write_text("The quick brown fox jumps over the lazy dog. " * 4)
    checked = twellc.check(bytelm, tmp_path / "m.onnx", text=tmp_path / "b.txt")
    by_module = {each.module: each for each in checked.blocks}
    separation = by_module[PRUNED].accuracy.separation
    assert separation is not None and separation.rewrite.relative > 1e-10
    assert any("removed by --prune-dead" in note for note in checked.notes)


def test_inspect_shows_what_becomes_of_neurons(cli: Cli, bytelm: Path, profile: Path) -> None:
    result = cli("inspect", bytelm, "--firing-profile", profile, "--prune-dead")
    assert result.exit_code == 0 and "of 1024" in result.stdout and "calibrated by p: " in result.stderr
    assert "at the densities that were measured" in result.stdout
    found, blocks = twellc.inspect(bytelm, firing_profile=profile), twellc.FiringProfile.read(profile).blocks
    assert {row.module: row.density for row in found.cost.layers} == {
        module: pytest.approx(block.density) for module, block in blocks.items()
    }
    layers = found.layers
    assert all(layer.neurons is not None and layer.neurons.kept == 1024 for layer in layers)


def test_nothing_is_called_approximate_where_no_neuron_was_removed(bytelm: Path, profile: Path) -> None:
    everything = twellc.FiringProfile.read(profile)
    loaded = LoadedCalibration(profile, everything, Calibration(everything.blocks, prune_dead=True), "0" * 64)
    assert loaded.notes([], everything.model.dtype)[1:] == ["--prune-dead removed no neuron"]


def test_a_profile_in_another_precision(cli: Cli, archive: Path, tmp_path: Path) -> None:
    twellc.profile(archive, {"x": np.ones((1, 3, 16))}, tmp_path / "p", dtype="fp16")
    outputs = ["--backend", "none", "--onnx", tmp_path / "m.onnx", "--overwrite"]
    said = "Note: the profile is of the model in fp16, compiled in bf16: other neurons may fire there."
    for command in (["compile", archive, *outputs], ["inspect", archive]):
        assert said in cli(*command, "--firing-profile", tmp_path / "p").stderr
        assert said not in cli(*command, "--firing-profile", tmp_path / "p", "--dtype", "fp16").stderr


def test_a_profile_of_other_blocks(cli: Cli, archive: Path, tmp_path: Path) -> None:
    """The model is the same, but its block has another name: the page of --html could not be made."""
    profile = twellc.profile(archive, {"x": np.ones((1, 3, 16))})
    (block,) = profile.blocks.values()
    replace(profile, blocks={"other": replace(block, module="other")}).write(tmp_path / "p")
    outputs = ["--backend", "none", "--onnx", tmp_path / "m.onnx", "--html", tmp_path / "m.html"]
    for command in (["compile", archive, *outputs], ["inspect", archive]):
        result = cli(*command, "--firing-profile", tmp_path / "p")
        failed(result, f"--firing-profile {tmp_path / 'p'}: counts the neurons of a block", "got other with d_ff 320")
        assert "exporting" not in result.stderr


def test_a_plan_says_what_was_done(cli: Cli, bytelm: Path, profile: Path, tmp_path: Path) -> None:
    """Its graph was not kept: to make it again, check needs the profile."""
    plan = tmp_path / "m.plan"
    assert cli("compile", bytelm, "-o", plan, "--firing-profile", profile, "--prune-dead").exit_code == 0
    manifest = read_manifest(plan)
    neurons = {layer.module: layer.neurons for layer in manifest.layers}[PRUNED]
    assert neurons is not None and neurons.dead > 0 and manifest.settings.prune_dead is True
    assert any("approximate" in note for note in manifest.notes)
    assert twellc.inspect(plan).layers == manifest.layers
    (tmp_path / "seen.py").write_text(TEXT[:100])
    arguments = ["check", bytelm, plan, "--text", tmp_path / "seen.py"]
    failed(cli(*arguments), "was compiled with a profile", "Give it with --firing-profile PROFILE")
    (tmp_path / "another").write_bytes(b"x")
    failed(cli(*arguments, "--firing-profile", tmp_path / "another"), "is another profile")
    assert cli(*arguments, "--firing-profile", profile).exit_code == 0


def test_check_takes_only_the_profile_of_its_candidate(cli: Cli, archive: Path, tmp_path: Path) -> None:
    """Also where it has no need of one, as of an ONNX file."""
    for name in ("p", "other"):
        twellc.profile(archive, {"x": np.random.default_rng(len(name)).normal(size=(1, 3, 16))}, tmp_path / name)
    (tmp_path / "empty").touch()
    for name, options in {"plain": [], "calibrated": ["--firing-profile", tmp_path / "p"]}.items():
        outputs = ["--backend", "none", "--onnx", tmp_path / f"{name}.onnx"]
        assert cli("compile", archive, *outputs, *options).exit_code == 0

    def check(name: str, profile: str) -> Any:
        return cli("check", archive, tmp_path / f"{name}.onnx", "--firing-profile", tmp_path / profile)

    assert check("calibrated", "p").exit_code == 0
    for profile in ("other", "empty"):
        failed(check("calibrated", profile), f"{profile}: is another profile", "Give that one, or none")
    failed(check("calibrated", "none"), "there is no such file; expected the profile that")
    failed(check("plain", "p"), "plain.onnx was compiled without a profile", "Leave it out")


def test_what_is_refused(cli: Cli, bytelm: Path, llama: Path, profile: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("no profile")
    onnx.save(gated(), tmp_path / "m.onnx")
    before = files_in(tmp_path)
    output = ["--backend", "none", "--onnx", tmp_path / "out.onnx"]
    for command in (["compile", *output], ["inspect"]):
        name, *rest = command

        def refused(model: Path, *options: object, name: object = name, rest: list[Any] = rest) -> Any:
            return cli(name, model, *rest, *options)

        failed(refused(llama, "--firing-profile", profile), "is a profile of another model", "got bytelm")
        failed(refused(bytelm, "--firing-profile", tmp_path / "empty"), "the file is empty")
        failed(refused(bytelm, "--firing-profile", tmp_path / "text"), "is not a profile of twellc")
        failed(refused(bytelm, "--firing-profile", tmp_path / "none"), "there is no such file")
        failed(refused(bytelm, "--firing-profile", tmp_path), "is a folder; expected a profile")
        failed(refused(bytelm, "--prune-dead"), "--prune-dead: needs a profile", "Add --firing-profile PROFILE")
        failed(refused(bytelm, "--firing-profile", profile, "--prune-check", profile), "nothing to check without")
        failed(refused(tmp_path / "m.onnx", "--firing-profile", profile), "only a model that twellc traces")
    onto_itself = ["--firing-profile", profile, "--manifest", profile, "--overwrite"]
    failed(cli("compile", bytelm, *output, *onto_itself), f"--manifest {profile}: is a file that is read")
    assert files_in(tmp_path) == before


def test_few_tokens_are_warned_of(cli: Cli, bytelm: Path, tmp_path: Path) -> None:
    twellc.profile(bytelm, {"input_ids": np.array([[65, 66, 67]])}, tmp_path / "p")
    result = cli(
        "compile", bytelm, "--backend", "none", "--onnx", tmp_path / "m.onnx", "--firing-profile", tmp_path / "p"
    )
    assert result.exit_code == 0 and "Warning: 3 tokens are few" in " ".join(result.stderr.split())


def test_decisions_by_a_profile(cli: Cli, bytelm: Path, tmp_path: Path) -> None:
    """On a GPU where TwELL pays for some of the layers only, the others are left dense."""
    (tmp_path / "a.py").write_text("".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(200)))
    profile = twellc.profile(bytelm, tmp_path / "a.py", tmp_path / "p")
    densities = sorted(block.density for block in profile.blocks.values())
    limit = 0.5 * (densities[1] * densities[2]) ** 0.5  # of equal neurons; these differ
    layer = twellc.inspect(bytelm).layers[0]
    densities = [limit * factor for factor in (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)]
    shape = (layer.variant, layer.d_model, layer.d_ff)
    measured = gpu_times(*shape, lambda density: 10.0 * (density / limit) ** 0.5, densities)
    times = tmp_path / "gpu.json"
    times.write_text(measured.to_text())

    graph, report = tmp_path / "m.onnx", tmp_path / "r.json"
    options = [
        "--firing-profile",
        tmp_path / "p",
        "--target-gpu",
        times,
        "--optimization-profile",
        "input_ids:1x1:4x512:4x1024",
    ]
    result = cli("compile", bytelm, "--backend", "none", "--onnx", graph, "--manifest", report, *options)
    assert result.exit_code == 0, result.output
    layers = json.loads(report.read_text())["layers"]
    for row in layers:
        assert row["decision"] == ("twell" if row["expectation"]["gain"] >= 1.03 else "dense")
        assert row["expectation"]["density"] == pytest.approx(profile.blocks[row["module"]].density, rel=1e-3)
        assert row["expectation"]["gpu"] == "NVIDIA Test" and not row["expectation"]["assumed"]
        if row["decision"] == "dense":
            assert row["matched"] and row["reason"].startswith("left dense: ")
            assert row["reason"].endswith(" at 2048 tokens") and " active, pays below " in row["reason"]
        else:
            assert " times as fast at 2048 tokens" in row["reason"]
            assert row["compression"] in (1, 2, 4, 8)
    assert {row["decision"] for row in layers} == {"twell", "dense"}

    fields = {node.name: node.fields for node in twellc.inspect(graph).description.nodes or ()}
    taken = [row for row in layers if row["decision"] == "twell"]
    assert [each["compression"] for each in fields.values()] == [row["compression"] for row in taken]
    assert [each["hot"] for each in fields.values()] == [row["hot"] for row in taken]

    shown = twellc.inspect(bytelm, firing_profile=tmp_path / "p", target_gpu=str(times), tokens=2048).layers
    assert [row.decision for row in shown] == [row["decision"] for row in layers]
    checked = twellc.check(bytelm, graph)
    assert checked.within
    assert [block.module for block in checked.blocks] == [row["module"] for row in taken]


@pytest.mark.parametrize("source", ["archive", "ONNX"])
def test_blocks_left_dense_without_a_profile(source: str, cli: Cli, tmp_path: Path) -> None:
    """TwELL pays at no density for the first block; widths like the second were not measured. Check follows."""
    module = torch.nn.Sequential(Residual(Gated(d_ff=320)), Residual(Gated(d_ff=40))).bfloat16()
    dynamic = ({0: torch.export.Dim("batch", min=1, max=64)},)
    torch.export.save(export(module, torch.randn(4, 3, 16).bfloat16(), dynamic=dynamic), tmp_path / "m.pt2")
    model = tmp_path / "m.pt2"
    if source == "ONNX":
        model = tmp_path / "plain.onnx"
        written = cli("compile", tmp_path / "m.pt2", "--layers", "none", "--backend", "none", "--onnx", model)
        assert written.exit_code == 0
    times, report = tmp_path / "gpu.json", tmp_path / "r.json"
    times.write_text(gpu_times("gated", 16, 320).to_text())

    arguments = ("--backend", "none", "--onnx", tmp_path / "m.onnx", "--manifest", report)
    result = cli("compile", model, *arguments, "--target-gpu", times)
    assert result.exit_code == 0, result.output
    content = json.loads(report.read_text())
    first, second = content["layers"]
    assert (first["decision"], second["decision"], second["reason"]) == ("dense", "twell", "matches")
    assert first["reason"].startswith("left dense: TwELL pays at no density at ")
    assert any("so no speed is expected of them" in note for note in content["notes"])
    shown = twellc.inspect(model, target_gpu=str(times)).layers
    assert [row.decision for row in shown] == ["dense", "twell"]
    checked = twellc.check(model, tmp_path / "m.onnx")
    assert checked.within and [block.module for block in checked.blocks] == [second["module"]]
    result = cli("compile", model, *arguments, "--target-gpu", times, "--layers", "all", "--overwrite")
    assert [row["decision"] for row in json.loads(report.read_text())["layers"]] == ["twell", "twell"]
