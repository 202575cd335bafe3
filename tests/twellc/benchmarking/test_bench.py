"""`twellc bench`: its contests on a CPU, where nothing is timed, and what it refuses."""

import importlib
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import twellc
from tests import onnx_graphs
from tests.conftest import Cli
from tests.models import Gated, Plain, Residual, export
from tests.twellc.test_cli import failed
from twellc.benchmarking import blocks
from twellc.benchmarking.forms import FP8

CONTESTANTS = ["dense eager", "twell eager", "dense compiled", "twell compiled", "dense packed", "dense FP8"]
BLOCKS = ["dense eager", "dense compiled", "dense packed", "dense FP8", "twell"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_says_what_it_would_do(cli: Cli, llama: Path, tmp_path: Path) -> None:
    result = cli("bench", llama, "--shapes", "1x1,2x8", "--plot", tmp_path / "a.svg")
    failed(result, "torch sees none here", f"With a GPU it would time {llama} at 1x1, 2x8", "FP8 and INT4")
    assert not list(tmp_path.iterdir())
    with pytest.raises(twellc.UserError, match="it would time"):
        twellc.bench(llama, compiled=False)


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (("missing",), ("missing: there is no such file",)),
        (("bytelm", "--shapes", "1xa"), ("--shapes: not the sizes of dimensions", "'1xa'", "such as 1x512")),
        (("bytelm", "--shapes", "0"), ("--shapes: not the sizes",)),
        (("bytelm", "--plot", "a.txt"), ("no such format", ".svg")),
        (("bytelm", "--plot", "missing/a.svg"), ("the output folder does not exist",)),
    ],
)
def test_refuses_before_it_loads(cli: Cli, bytelm: Path, arguments: tuple[str, ...], texts: tuple[str, ...]) -> None:
    failed(cli("bench", *(bytelm if each == "bytelm" else each for each in arguments)), *texts)


def test_an_onnx_file(cli: Cli, tmp_path: Path) -> None:
    onnx.save(onnx_graphs.gated(), tmp_path / "m.onnx")
    failed(cli("bench", tmp_path / "m.onnx"), "is an ONNX file, which torch does not run")


@pytest.mark.slow
@pytest.mark.usefixtures("no_gpu_needed")
def test_language_model_on_a_text(cli: Cli, bytelm: Path, tmp_path: Path) -> None:
    text, plot = tmp_path / "text.py", tmp_path / "picture.svg"
    text.write_text("def f(x):\n    return [y for y in x if y is not None]\n" * 4)
    arguments = ("bench", bytelm, "--text", text, "--shapes", "1x1,2x40", "--plot", plot, "--repeats", 3)
    found = cli(*arguments, "--json")
    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout)
    assert list(report) == ["schema", "machine", "model", "dtype", "inputs", "notes", "layers", "results"]
    assert (report["schema"], report["model"], report["dtype"]) == (1, "bytelm", "bf16")
    assert "text.py: " in report["inputs"]
    assert any("energy was not measured" in note for note in report["notes"])
    assert [(each["shape"], each["tokens"]) for each in report["results"]] == [("1x1", 1), ("2x40", 80)]
    for each in report["results"]:
        assert len(each["densities"]) == 4 and all(0 < density < 0.2 for density in each["densities"])
        for part, names in (("model", CONTESTANTS), ("blocks", BLOCKS)):
            standings = each[part]
            assert list(standings["times"]) == names == list(standings["errors"]), standings["failed"]
            assert standings["failed"] == {} and standings["joules_per_token"] == {}
            assert standings["baseline"] == "dense packed"  # the last of the three, and so the fastest here
            base, eager = (standings["times"][name]["median_us"] for name in ("dense packed", "dense eager"))
            assert standings["speed_ups"]["dense eager"] == base / eager
            errors = standings["errors"]
            assert all(errors[name] <= 2 * errors["dense eager"] + 0.001 for name in names if name != FP8)
            assert 2 * errors["dense eager"] < errors[FP8] < 0.3
        # The dense forms but FP8, and twell, take turns: three, and the fourth.
        assert each["by_block"] == [
            {"module": layer["module"], "dense": "dense packed", "dense_us": 998.0, "twell_us": 997.0}
            for layer in report["layers"]
        ]
    ElementTree.fromstring(plot.read_text())
    for words in ("whole model", "rewritten feed-forward blocks alone", "twell", "dense FP8"):
        assert f"<!-- {words} -->" in plot.read_text()
    failed(cli(*arguments), "--plot", "the file exists already")


@pytest.mark.usefixtures("no_gpu_needed")
def test_tables(cli: Cli, bytelm: Path) -> None:
    found = cli("bench", bytelm, "--shapes", "1x8", "--no-compiled", "--weights", "fp8")
    assert found.exit_code == 0, found.output
    text = found.stdout
    assert "model.layers.0.mlp: weights in 8 bits, quantised" in found.stderr
    for words in ("1x8: 8 tokens; ", " of gate activations are not zero", "whole model", "blocks alone"):
        assert words in text
    (row,) = (line for line in text.splitlines() if "twell eager" in line)
    assert "0.999 ±10% (1.00)" in row
    assert "each block by itself: microseconds" in text
    (row,) = (line for line in text.splitlines() if "model.layers.3.mlp" in line)
    assert "999.0, 998.0 (1.00)" in row
    assert "dense compiled" not in text and "random, seed 0" in text and "plans" not in found.stderr


@pytest.mark.usefixtures("no_gpu_needed")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("variant", ["gated", "plain"])
def test_any_program(variant: str, tmp_path: Path) -> None:
    """A block with biases and a residual, inputs that are no tokens, and a dynamic dimension of another name."""
    block = Gated(biases="gud", d_ff=320) if variant == "gated" else Plain(biases="ud", d_ff=320)
    model = torch.nn.Sequential(Residual(block), Residual(Gated(d_ff=64))).bfloat16()
    program = export(model, torch.randn(4, 16).bfloat16(), dynamic=({0: torch.export.Dim("rows", min=1, max=100)},))
    found = twellc.bench(program)
    assert [each.shape for each in found.results] == ["1", "32"]  # 512 are too many for it
    for each in found.results:
        assert len(each.densities) == 2
        assert list(each.model.times) == CONTESTANTS and list(each.blocks.times) == BLOCKS, each
    with pytest.raises(twellc.UserError, match="does not take these sizes; got 101; expected 1 to 100"):
        twellc.bench(program, shapes=["101"])
    with pytest.raises(twellc.UserError, match="does not take these sizes; got 1x1"):
        twellc.bench(program, shapes=["1x1"])
    arrays = tmp_path / "x.npz"
    np.savez(arrays, **{"input": np.zeros((3, 16), np.float32)})
    assert [each.shape for each in twellc.bench(program, arrays=arrays).results] == ["3x16"]
    for wrong in ({"arrays": arrays, "seed": 1}, {"arrays": arrays, "shapes": ["4"]}):
        with pytest.raises(twellc.UserError, match=r"--arrays, too|given twice"):
            twellc.bench(program, **wrong)


@pytest.mark.usefixtures("no_gpu_needed")
def test_nothing_to_compare(cli: Cli, bytelm: Path) -> None:
    failed(cli("bench", bytelm, "--layers", "none"), "no feed-forward block is rewritten", "twellc inspect")


@pytest.mark.usefixtures("no_gpu_needed")
def test_a_wrong_contestant_is_left_out(monkeypatch: pytest.MonkeyPatch, cli: Cli, bytelm: Path) -> None:
    original = blocks.Seen.run
    monkeypatch.setattr(blocks.Seen, "run", lambda self: original(self) * 1.1)
    found = cli("bench", bytelm, "--shapes", "1x8", "--no-compiled")
    assert found.exit_code == 0
    assert "Left out: 1x8, blocks alone, twell: its result is off" in found.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("no_gpu_needed")
def test_blocks_are_timed_by_themselves(monkeypatch: pytest.MonkeyPatch, bytelm: Path) -> None:
    """Each over copies of its own weights, which compute the same; not by forms that were left out."""
    seen: list[list[torch.Tensor]] = []
    original = blocks.rotated_calls

    def watched(whole: blocks.Seen, own: blocks.Seen, names: list[str]) -> Any:
        calls = original(whole, own, names)
        seen.append([call() for each in calls.values() for call in each])
        assert list(calls) == ["dense eager", "dense packed", "twell"] and len(calls["twell"]) == 12
        pointers = {call.__self__.operands.w_gate.data_ptr() for call in calls["twell"]}  # type: ignore[attr-defined]
        assert len(pointers) == 12
        return calls

    monkeypatch.setattr(importlib.import_module("twellc.benchmarking.bench"), "rotated_calls", watched)
    (found,) = twellc.bench(bytelm, shapes=["1x8"], compiled=False).results
    assert len(found.by_block) == len(seen) == 4
    for results in seen:
        for y in results:
            torch.testing.assert_close(y, results[0], rtol=0.05, atol=0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("no_gpu_needed")
def test_a_profile(cli: Cli, bytelm: Path, tmp_path: Path) -> None:
    """What is measured is what compile makes: blocks that do not pay are dense, and dead neurons are gone."""
    (tmp_path / "a.py").write_text("".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(200)))
    twellc.profile(bytelm, tmp_path / "a.py", tmp_path / "p")
    shared = ("--firing-profile", tmp_path / "p", "--prune-dead", "--target-gpu", "h200")
    found = cli("bench", bytelm, "--shapes", "1x8,2x30", "--json", "--no-compiled", *shared)
    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout)
    compiled = ("--backend", "none", "--onnx", tmp_path / "m.onnx", "--manifest", tmp_path / "r.json")
    profiles = ("--optimization-profile", "input_ids:1x8:1x8:1x8", "--optimization-profile", "input_ids:2x30:2x30:2x30")
    assert cli("compile", bytelm, *compiled, *shared, *profiles).exit_code == 0
    assert report["layers"] == json.loads((tmp_path / "r.json").read_text())["layers"]
    assert any(layer["neurons"]["dead"] for layer in report["layers"])
    assert any("approximate, as --prune-dead asks for" in note for note in report["notes"])
    for each in report["results"]:
        for part, name in (("model", "twell eager"), ("blocks", "twell")):
            assert name in each[part]["times"], each[part]["failed"]
        assert len(each["by_block"]) == len(report["layers"])


def test_a_profile_is_refused(cli: Cli, bytelm: Path, tmp_path: Path) -> None:
    failed(cli("bench", bytelm, "--prune-dead"), "--prune-dead: needs a profile", "Add --firing-profile PROFILE")
    failed(cli("bench", bytelm, "--firing-profile", tmp_path / "none"), "there is no such file")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("weights", [(), ("--layers", "all", "--weights", "fp8", "--fp8-error", "0.5")])
def test_on_the_gpu(cli: Cli, bytelm: Path, tmp_path: Path, weights: tuple[str, ...]) -> None:
    if weights:
        (tmp_path / "text").write_bytes(bytes(range(32, 127)) * 4)
        weights = (*weights, "--text", str(tmp_path / "text"))
    shared = ("--shapes", "1x1,4x64", "--repeats", 3, "--json", "--plot", tmp_path / "a.png")
    found = cli("bench", bytelm, *shared, *weights)
    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout)
    assert all(0 < layer["weights"]["error"] < 0.1 for layer in report["layers"] if weights)
    for each in report["results"]:
        for part, names in (("model", CONTESTANTS), ("blocks", BLOCKS)):
            standings = each[part]
            missing = set(names) - set(standings["times"])
            assert not missing - ({FP8} if torch.cuda.get_device_capability() < (8, 9) else set()), standings["failed"]
            assert all(times["median_us"] > 0 for times in standings["times"].values())
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
