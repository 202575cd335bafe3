"""The command line: what compile writes, and what it leaves where it fails."""

import functools
import hashlib
import json
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from click.testing import Result
from torch import nn

from tests.conftest import Cli
from tests.models import Gated, Residual, export
from tests.onnx_graphs import gated, save_external
from tests.processes import TWELLC, environment
from twellc.base.errors import UserError
from twellc.base.files import ENDING_SIGNALS, OutputFiles
from twellc.loaders.onnx_file import external_files
from twellc.plugins.elf import machine_code
from twellc.plugins.library import library_path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def files_in(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder, hidden ones included, with its content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def failed(result: Result, *texts: str) -> None:
    """Demand a user error: exit status 2, one message, no traceback."""
    assert result.exit_code == 2, result.output
    assert result.stderr.count("Error: ") == 1
    assert "Traceback" not in result.output
    for text in texts:
        assert text in result.stderr


@pytest.fixture(scope="module")
def silu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive with a gated block that cannot be rewritten, and one that can."""
    path = tmp_path_factory.mktemp("models") / "silu.pt2"
    module = nn.Sequential(Residual(Gated(nn.functional.silu)), Residual(Gated())).bfloat16()
    torch.export.save(export(module, torch.randn(4, 16).bfloat16()), path)
    return path


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "linear.pt2"
    torch.export.save(export(nn.Linear(16, 16), torch.randn(4, 16)), path)
    return path


def test_compile_to_a_plan(cli: Cli, archive: Path, tmp_path: Path) -> None:
    plan, graph, report = (tmp_path / name for name in ("m.plan", "m.onnx", "report.json"))
    result = cli("compile", archive, "-o", plan, "--onnx", graph, "--manifest", report, "--compression", 4)
    assert result.exit_code == 0, result.output
    assert sorted(files_in(tmp_path)) == ["m.onnx", "m.plan", "m.plan.json", "report.json"]
    manifest = json.loads((tmp_path / "m.plan.json").read_text())
    assert report.read_text() == (tmp_path / "m.plan.json").read_text()
    assert manifest["schema"] == 3
    assert manifest["model"] == {
        "name": "gated.pt2",
        "kind": "torch.export archive",
        "sha256": manifest["model"]["sha256"],
    }
    assert manifest["settings"] == {"dtype": "bf16", "layers": "auto", "compression": 4, "attention_forms": []}
    run = manifest["layers"][0]["short_run"]
    assert run["tokens"] == 6 and 0.3 < run["density"] < 0.7 and run["inputs"] == "random numbers"
    facts = {"variant": "gated", "activation": "relu", "d_model": 16, "d_ff": 320, "d_out": 16, "matched": True}
    facts |= {"decision": "twell", "reason": "matches", "residual": True, "hot": 0, "short_run": run}
    facts |= {"norm": "none", "experts": 0, "top": 0}
    assert manifest["layers"] == [{"module": "ffn", **facts}]
    assert manifest["plugins"]["names"] == ["TwellGatedMlp"]
    assert manifest["onnx"] == {"file": "m.onnx", "sha256": sha256(graph)}
    assert manifest["plan"]["file"] == "m.plan"
    assert manifest["plan"]["bytes"] == plan.stat().st_size
    assert manifest["plan"]["sha256"] == sha256(plan)
    assert manifest["plan"]["inputs"] == [{"name": "x", "dtype": "bf16", "shape": [-1, 3, 16]}]
    assert manifest["plan"]["outputs"] == [{"name": "output", "dtype": "bf16", "shape": [-1, 3, 16]}]
    assert len(manifest["plan"]["plugin_layers"]) == 1
    assert manifest["backend"]["name"] == "tensorrt-rtx"
    assert manifest["profiles"] == [{"x": {"min": [1, 3, 16], "opt": [2, 3, 16], "max": [64, 3, 16]}}]
    assert manifest["warnings"] == []
    assert "no blocks of d_model / d_ff like 16 / 320 were measured" in " ".join(manifest["notes"])
    compiles = not {8, 12} <= {major for major, _ in machine_code(library_path())}
    assert ("no machine code for these" in " ".join(manifest["notes"])) == compiles
    assert "1 of 1 feed-forward blocks rewritten" in result.stdout
    assert "1 plugin layers" in result.stdout
    (node,) = (node for node in onnx.load(graph).graph.node if node.domain == "twell")
    assert node.op_type == "TwellGatedMlp"


def test_no_backend(cli: Cli, archive: Path, tmp_path: Path) -> None:
    result = cli(
        "compile", archive, "--backend", "none", "--onnx", tmp_path / "m.onnx", "--manifest", tmp_path / "r.json"
    )
    assert result.exit_code == 0, result.output
    assert sorted(files_in(tmp_path)) == ["m.onnx", "r.json"]
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["plan"], report["backend"]) == (None, None)
    assert "no plan was built" in result.stdout
    assert cli("compile", archive, "--backend", "none", "-o", tmp_path / "n.onnx").exit_code == 0
    assert (tmp_path / "n.onnx").read_bytes() == (tmp_path / "m.onnx").read_bytes()


def test_dtype(cli: Cli, linear: Path, archive: Path, tmp_path: Path) -> None:
    """The model's own where the kernels take it; else bfloat16, said aloud; else what was asked for."""
    report = tmp_path / "r.json"

    def settings(model: Path, *options: str) -> tuple[str, str]:
        arguments = ["--backend", "none", "--onnx", tmp_path / "m.onnx", "--manifest", report, "--overwrite"]
        assert cli("compile", model, *arguments, *options).exit_code == 0
        content = json.loads(report.read_text())
        return content["settings"]["dtype"], " ".join(content["notes"])

    dtype, notes = settings(archive)
    assert dtype == "bf16"
    assert "compiled in" not in notes
    dtype, notes = settings(archive, "--dtype", "fp16")
    assert dtype == "fp16"
    assert "the model is in bfloat16; compiled in float16 as asked" in notes
    dtype, notes = settings(linear)
    assert dtype == "bf16"
    assert "the model is in float32; compiled in bfloat16" in notes


def test_profiles_reach_the_plan(cli: Cli, archive: Path, tmp_path: Path) -> None:
    options = ["--optimization-profile", "x:1x3x16:1x3x16:2x3x16", "--optimization-profile", "x:2x3x16:8x3x16:64x3x16"]
    assert cli("compile", archive, "-o", tmp_path / "m.plan", *options).exit_code == 0
    profiles = json.loads((tmp_path / "m.plan.json").read_text())["profiles"]
    assert [profile["x"]["max"] for profile in profiles] == [[2, 3, 16], [64, 3, 16]]


def test_dump_graphs(cli: Cli, archive: Path, linear: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "graphs"
    arguments = ["--backend", "none", "--onnx", tmp_path / "m.onnx", "--overwrite", "--dump-graphs", folder]
    assert cli("compile", archive, *arguments).exit_code == 0
    names = sorted(files_in(folder))
    assert [name.partition("-")[0] for name in names] == [f"{number:02}" for number in range(19)]
    assert [name[3:] for name in (names[0], *names[-2:])] == ["traced.txt", "onnx.txt", "optimize_exactly.txt"]
    assert "torch.ops.aten.relu" in (folder / "10-in_precision.txt").read_text()
    assert "torch.ops.twell.gated_mlp" in (folder / "11-rewrite_ffn.txt").read_text()
    assert "twell::TwellGatedMlp" in (folder / "18-optimize_exactly.txt").read_text()
    assert cli("compile", linear, *arguments).exit_code == 0
    assert "bfloat16" not in (folder / "09-feature_last.txt").read_text()
    assert "bfloat16" in (folder / "10-in_precision.txt").read_text()


def test_what_stays_dense_is_a_loud_warning(cli: Cli, silu: Path, linear: Path, tmp_path: Path) -> None:
    options = ["--backend", "none", "--onnx", tmp_path / "m.onnx", "--manifest", tmp_path / "r.json", "--overwrite"]
    for model, warning in (
        (silu, "layer 0.ffn: gate activation is silu; TwELL needs a ReLU family. Left dense"),
        (linear, "no feed-forward block can be rewritten: the plan is dense throughout"),
    ):
        result = cli("compile", model, *options)
        assert result.exit_code == 0
        assert f"Warning: {warning}" in result.stderr
        (warned,) = json.loads((tmp_path / "r.json").read_text())["warnings"]
        assert warned.startswith(warning) and (model == linear or warned == warning)
    assert "no feed-forward blocks" in result.stdout


def test_strict(cli: Cli, silu: Path, linear: Path, archive: Path, tmp_path: Path) -> None:
    arguments = ["--backend", "none", "--onnx", tmp_path / "m.onnx", "--strict"]
    failed(cli("compile", silu, *arguments), "layer 0.ffn: gate activation is silu", "--strict was given")
    failed(cli("compile", linear, *arguments), "no feed-forward block can be rewritten", "--strict was given")
    assert files_in(tmp_path) == {}
    assert cli("compile", archive, *arguments).exit_code == 0
    assert "m.onnx" in files_in(tmp_path)


def options_that_fail(folder: Path, model: Path) -> dict[str, tuple[list[object], str]]:
    plan, graph = folder / "m.plan", folder / "m.onnx"
    return {
        "no output": ([], "--output: no plan to write"),
        "no ONNX file": (["--backend", "none"], "stops at ONNX, and no ONNX file is named"),
        "plan without a backend": (
            ["--backend", "none", "-o", plan, "--onnx", graph], "--output: no plan is built; got --backend none"
        ),
        "missing folder": (["-o", folder / "no" / "m.plan"], "the output folder does not exist"),
        "output is a folder": (["-o", folder], "is a folder"),
        "output would be a folder": (["-o", f"{folder}/a/"], "a/: is a folder; expected a file"),
        "same file twice": (["-o", folder / "m.out", "--onnx", folder / "m.out"], "is the same file as --output"),
        "report is the manifest": (["-o", plan, "--manifest", folder / "m.plan.json"], "is the same file as"),
        "output is the model": (["-o", model, "--overwrite"], "belongs to the model"),
        "report is the weights": (
            ["-o", plan, "--onnx", graph, "--manifest", folder / "m.onnx.data"], "is the same file as weights of --onnx"
        ),
        "graphs are the plan": (["-o", plan, "--dump-graphs", plan], "is the same file as --output"),
        "bad profile": (["-o", plan, "--optimization-profile", "x"], "--optimization-profile: not a profile"),
        "profile of another input": (["-o", plan, "--optimization-profile", "y:1:1:1"], "the model has no such input"),
        "profile out of range": (["-o", plan, "--optimization-profile", "x:1x3x16:1x3x16:65x3x16"], "leaves the range"),
        "bad regex": (["-o", plan, "--layers", "("], "--layers: not a regular expression"),
        "regex without a match": (["-o", plan, "--onnx", graph, "--layers", "mlp"], "matches no feed-forward block"),
        "inputs of an archive": (["-o", plan, "--input-spec", "x:float32[3]"], "only a pickled module needs"),
        "bad choice": (["-o", plan, "--dtype", "fp32"], "--dtype"),
        "bad compression": (["-o", plan, "--compression", "3"], "--compression"),
    }  # fmt: skip


@pytest.mark.parametrize("case", options_that_fail(Path(), Path()))
def test_bad_options(cli: Cli, archive: Path, tmp_path: Path, case: str) -> None:
    model = tmp_path / "model.pt2"
    shutil.copy2(archive, model)
    before = files_in(tmp_path)
    options, message = options_that_fail(tmp_path, model)[case]
    failed(cli("compile", model, *options), message)
    assert files_in(tmp_path) == before
    assert [path for path in tmp_path.rglob("*") if path.is_dir()] == []


@pytest.mark.parametrize("name", ["m.plan", "m.plan.json", "m.onnx", "r.json"])
def test_existing_outputs_need_a_word(cli: Cli, archive: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("precious")
    arguments = ["-o", tmp_path / "m.plan", "--onnx", tmp_path / "m.onnx", "--manifest", tmp_path / "r.json"]
    failed(cli("compile", archive, *arguments), f"{name}: the file exists already", "Add --overwrite")
    assert files_in(tmp_path) == {name: b"precious"}


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "config.json", "README.md", "link/model.safetensors", "folder/params.json", "folder/link"],
)
def test_files_of_a_folder_are_not_overwritten(cli: Cli, bytelm: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(bytelm, tmp_path / "model")
    (tmp_path / "model" / "link").symlink_to(".")
    (tmp_path / "model" / "folder").mkdir()
    (tmp_path / "model" / "folder" / "params.json").write_text("{}")
    (tmp_path / "elsewhere").write_text("{}")
    (tmp_path / "model" / "folder" / "link").symlink_to(tmp_path / "elsewhere")
    output = tmp_path / "model" / name
    before = files_in(tmp_path)
    arguments = ["--backend", "none", "--onnx", output, "--overwrite"]
    failed(cli("compile", tmp_path / "model", *arguments), f"--onnx {output}: belongs to the model")
    assert files_in(tmp_path) == before


@pytest.mark.parametrize("plan", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_outputs_in_the_folder_of_their_model_are_made_again(cli: Cli, llama: Path, tmp_path: Path, plan: bool) -> None:
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    outputs = ["-o", folder / "m.plan"] if plan else ["--backend", "none"]
    for _ in range(2):
        assert cli("compile", folder, *outputs, "--onnx", folder / "m.onnx", "--overwrite").exit_code == 0


def test_blobs_behind_links_are_not_overwritten(cli: Cli, bytelm: Path, tmp_path: Path) -> None:
    """The cache of Hugging Face keeps a model's files elsewhere, and links in its folder."""
    shutil.copytree(bytelm, tmp_path / "blobs")
    (tmp_path / "model").mkdir()
    for blob in (tmp_path / "blobs").iterdir():
        (tmp_path / "model" / blob.name).symlink_to(blob)
    for folder in ("blobs", "model"):
        output = tmp_path / folder / "model.safetensors"
        arguments = ["--backend", "none", "--onnx", output, "--overwrite"]
        failed(cli("compile", tmp_path / "model", *arguments), f"--onnx {output}: belongs to the model")
    assert (tmp_path / "model" / "model.safetensors").is_symlink()


@pytest.mark.parametrize("option", ["--onnx", "--manifest"])
def test_external_data_is_not_overwritten(cli: Cli, tmp_path: Path, option: str) -> None:
    model = save_external(gated(), tmp_path / "m.onnx")
    (data,) = external_files(model)
    before = files_in(tmp_path)
    arguments = ["-o", tmp_path / "m.plan", option, data, "--overwrite"]
    failed(cli("compile", model, *arguments), f"{option} {data}: belongs to the model")
    assert files_in(tmp_path) == before


def test_longest_name(cli: Cli, archive: Path, tmp_path: Path) -> None:
    """A manifest beside the model would have a name that is too long."""
    model = tmp_path / ("m" * 251 + ".pt2")
    model.write_bytes(archive.read_bytes())
    result = cli("inspect", model)
    assert result.exit_code == 0, result.output
    assert "1 of 1 feed-forward blocks rewritten" in result.stdout
    failed(cli("compile", model, "-o", tmp_path / ("m" * 255)), "File name too long")
    assert list(tmp_path.iterdir()) == [model]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["scratch", "staged", "m.data"])
def test_any_name_of_an_output(cli: Cli, archive: Path, tmp_path: Path, name: str) -> None:
    """Files that are only needed for a while stand apart from those that are kept, whatever these are called."""
    result = cli("compile", archive, "-o", tmp_path / name)
    assert result.exit_code == 0, result.output
    assert sorted(files_in(tmp_path)) == [name, f"{name}.json"]
    assert sha256(tmp_path / name) == json.loads((tmp_path / f"{name}.json").read_text())["plan"]["sha256"]


def test_failed_build_keeps_old_outputs(
    cli: Cli, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build fails after the graph and a part of the plan were written."""

    def break_down(backend: str, onnx_path: Path, plan_path: Path, *rest: Any) -> None:
        assert onnx_path.is_file()
        plan_path.write_bytes(b"half a plan")
        raise UserError("tensorrt-rtx", "the builder refuses the network")

    monkeypatch.setattr("twellc.compiling.compiler.build_plan", break_down)
    for name in ("m.plan", "m.plan.json", "m.onnx"):
        (tmp_path / name).write_text("old")
    before = files_in(tmp_path)
    arguments = ["-o", tmp_path / "m.plan", "--onnx", tmp_path / "m.onnx", "--overwrite"]
    failed(cli("compile", archive, *arguments), "the builder refuses the network")
    assert files_in(tmp_path) == before
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_two_runs_do_not_mix_their_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second may overwrite what the first writes, and comes when that has moved one file of two."""
    replace, one_moved, all_moved = Path.replace, threading.Event(), threading.Event()

    def write(text: str) -> None:
        with OutputFiles(overwrite=True) as outputs:
            for name in ("m.plan", "link/m.plan.json"):
                outputs.write(tmp_path / name, text)
            outputs.commit()

    def write_second() -> None:
        one_moved.wait()
        write("second")
        all_moved.set()

    def slow(source: Path, destination: Path) -> Path:
        moved = replace(source, destination)
        if not one_moved.is_set():
            one_moved.set()
            assert not all_moved.wait(0.5)
        return moved

    (tmp_path / "link").symlink_to(".")
    monkeypatch.setattr(Path, "replace", slow)
    second = threading.Thread(target=write_second)
    second.start()
    write("first")
    second.join()
    assert {file.read_text() for file in tmp_path.glob("m.*")} == {"second"}


def test_link_to_an_open_file_is_not_replaced(cli: Cli, archive: Path, tmp_path: Path) -> None:
    """As /dev/stdout while that goes to a file: root could rename a file over the link."""
    with (tmp_path / "log").open("w") as log:
        link = tmp_path / "stdout"
        link.symlink_to(f"/proc/self/fd/{log.fileno()}")
        assert link.is_file()
        arguments = ["--backend", "none", "--onnx", link, "--overwrite"]
        failed(cli("compile", archive, *arguments), "is a device or a pipe; expected a file")
    assert link.is_symlink()


def test_fault_of_ours_is_a_traceback(cli: Cli, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(*arguments: Any) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr("twellc.compiling.compiler.build_plan", break_down)
    result = cli("compile", archive, "-o", tmp_path / "m.plan")
    assert result.exit_code == 70
    assert "Traceback" in result.stderr and "AssertionError: a bug" in result.stderr
    assert "Please report it" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_weights_of_a_large_model(cli: Cli, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above 1 GiB they stand in a file of their own, which --onnx keeps and a plan needs only while it is built."""
    monkeypatch.setattr("twellc.export.onnx_export._LARGEST_SINGLE_FILE", 0)
    assert cli("compile", archive, "-o", tmp_path / "m.plan", "--onnx", tmp_path / "m.onnx").exit_code == 0
    assert sorted(files_in(tmp_path)) == ["m.onnx", "m.onnx.data", "m.plan", "m.plan.json"]
    result = cli("check", archive, tmp_path / "m.plan", "--json")
    assert json.loads(result.stdout)["executed"].startswith("m.onnx, the ONNX graph that it was built from")
    for name in ("m.onnx", "m.onnx.data"):
        (tmp_path / name).unlink()
    assert cli("compile", archive, "-o", tmp_path / "other.plan").exit_code == 0
    for plan in ("m.plan", "other.plan"):
        result = cli("check", archive, tmp_path / plan, "--json")
        assert "the ONNX graph that it was built from, made again" in json.loads(result.stdout)["executed"]
    for path in tmp_path.iterdir():
        path.unlink()
    (tmp_path / "m.onnx.data").write_text("precious")
    failed(cli("compile", archive, "-o", tmp_path / "m.plan", "--onnx", tmp_path / "m.onnx"), "m.onnx.data")
    assert files_in(tmp_path) == {"m.onnx.data": b"precious"}


@pytest.mark.parametrize(
    ("command", "options"),
    [
        *(("inspect", ["--density", density]) for density in ("nan", "1.1", "-0.1", "x")),
        *(("inspect", ["--tokens", tokens]) for tokens in ("1" + "0" * 400, "0", "1.5")),
        ("check", ["--seed", 2**64]),
        ("check", ["--seed", -(2**63) - 1]),
    ],
)
def test_numbers_out_of_range(cli: Cli, archive: Path, command: str, options: list[object]) -> None:
    operands = [archive] if command == "inspect" else [archive, archive]
    failed(cli(command, *operands, *options), f"Invalid value for '{options[0]}'", "; expected a")


def twellc(*arguments: object, **settings: str) -> subprocess.Popen[str]:
    options: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    # What runs in the background of a shell ignores interrupts, and would hand that down.
    listen = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    command = [*TWELLC, *map(str, arguments)]
    return subprocess.Popen(command, env=environment(**settings), preexec_fn=listen, **options)


@pytest.mark.slow
def test_another_process_makes_the_same_graph(cli: Cli, archive: Path, tmp_path: Path) -> None:
    """A check makes a plan's graph again and compares digests, so nothing of a process may be in it."""
    process = twellc("compile", archive, "-o", tmp_path / "m.plan")
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert "1 of 1 feed-forward blocks rewritten" in output
    for step in ("loading and tracing the model", "rewriting", "exporting to ONNX", "building the plan"):
        assert step in errors
    assert sorted(files_in(tmp_path)) == ["m.plan", "m.plan.json"]
    graph = tmp_path / "again.onnx"
    assert cli("compile", archive, "--backend", "none", "--onnx", graph).exit_code == 0
    assert sha256(graph) == json.loads((tmp_path / "m.plan.json").read_text())["onnx"]["sha256"]


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_user_error_of_a_child_process(tmp_path: Path) -> None:
    (tmp_path / "m.pt2").write_text("hello")
    process = twellc("compile", tmp_path / "m.pt2", "-o", tmp_path / "m.plan")
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 2
    assert "Error: " in errors and "not a model that twellc reads" in errors
    assert "Traceback" not in errors
    assert sorted(files_in(tmp_path)) == ["m.pt2"]


@pytest.mark.slow
def test_signal_behind_the_last_step(archive: Path, tmp_path: Path) -> None:
    """Once an output is there the command ends with 0, whatever signal comes then, until the process is gone."""
    process = twellc("compile", archive, "--backend", "none", "--onnx", tmp_path / "m.onnx")
    while not (tmp_path / "m.onnx").exists():
        assert process.poll() is None, process.communicate()
    while process.poll() is None:
        for number in ENDING_SIGNALS:
            process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Ended by" not in errors
    assert sorted(files_in(tmp_path)) == ["m.onnx"]
    assert len(list(tmp_path.iterdir())) == 1
