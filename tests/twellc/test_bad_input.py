"""What goes wrong around twellc: signals, full and read-only disks, damaged libraries, plans of other versions."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.conftest import Cli
from tests.onnx_graphs import gated
from tests.processes import PACKAGE_FOLDER, TWELLC, captured, environment
from tests.twellc.test_cli import failed, files_in, group_lives, twellc
from twellc import __version__
from twellc.base.errors import UserError
from twellc.checks.checking import check
from twellc.compiling.manifest import Manifest, manifest_path, read_manifest, refuse_other_plugins
from twellc.options.commands import CheckOptions
from twellc.plugins.elf import expected_size
from twellc.plugins.library import library_path

STAGES = {
    "loading and tracing the model": signal.SIGTERM,
    "rewriting feed-forward blocks": signal.SIGINT,
    "exporting to ONNX": signal.SIGHUP,
    "writing the ONNX graph": signal.SIGINT,
    "building the plan": signal.SIGINT,
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stage", STAGES)
def test_signal_in_any_stage(archive: Path, tmp_path: Path, stage: str) -> None:
    """An interrupt goes to the whole group, as from a terminal; what kill sends, to twellc alone."""
    number = STAGES[stage]
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored here, as under nohup, and twellc keeps to that")
    (tmp_path / "m.plan").write_text("old")
    process = twellc("compile", archive, "-o", tmp_path / "m.plan", "--onnx", tmp_path / "m.onnx", "--overwrite")
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    assert any(line.startswith(stage) for line in lines)
    assert any(path.name.startswith(".twellc-") for path in tmp_path.iterdir()), "nothing to clean up yet"
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert errors.splitlines()[-1] == f"Ended by {number.name}. Nothing was left half-written."
    assert "Traceback" not in errors and "Error" not in errors
    assert files_in(tmp_path) == {"m.plan": b"old"}
    assert len(list(tmp_path.iterdir())) == 1
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and group_lives(process.pid):
        time.sleep(0.1)
    assert not group_lives(process.pid), "a child goes on"


def test_interrupt_while_modules_are_imported(tmp_path: Path) -> None:
    """Nothing has begun yet: it ends as a program without a handler does, by the signal itself and without a word."""
    (tmp_path / "click.py").write_text("import signal; signal.raise_signal(signal.SIGINT)")
    process = twellc("--help", PYTHONPATH=f"{tmp_path}{os.pathsep}{PACKAGE_FOLDER}")
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == -signal.SIGINT


@pytest.mark.parametrize("command", ["inspect", "check"])
def test_interrupt_while_torch_is_imported(tmp_path: Path, command: str) -> None:
    """Native modules do not survive it in the middle, so it waits."""
    (tmp_path / "torch.py").write_text("import signal; signal.raise_signal(signal.SIGINT); print('imported')")
    (tmp_path / "m").write_text("no plan, which needs no torch")
    files = [tmp_path / "m"] if command == "inspect" else ["m", "n"]
    process = twellc(command, *files, PYTHONPATH=f"{tmp_path}{os.pathsep}{PACKAGE_FOLDER}")
    output, errors = process.communicate(timeout=60)
    assert (output, process.returncode) == ("imported\n", 130)
    assert errors == "Ended by SIGINT. Nothing was left half-written.\n"


def test_signal_while_a_check_tidies_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_graph(_: object, folder: Path, __: object) -> None:
        (folder / "m.onnx").touch()

    def remove(*arguments: Any, **options: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        rmtree(*arguments, **options)

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    rmtree = shutil.rmtree
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("twellc.checks.checking._check", make_graph)
    monkeypatch.setattr(shutil, "rmtree", remove)
    signal.signal(signal.SIGTERM, end)
    with pytest.raises(KeyboardInterrupt):
        check(CheckOptions(tmp_path, tmp_path), print)
    assert list(tmp_path.iterdir()) == []


def in_namespace(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a shell script that may mount; skip the test where the machine does not let it."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("this machine makes no user namespaces, so nothing can be mounted")
    return captured(["unshare", "-rm", "sh", "-c", script, "sh", *arguments])


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is read without tracing it, for what happens to any."""
    path = tmp_path_factory.mktemp("graph") / "gated.onnx"
    onnx.save(gated(), path)
    return path


@pytest.mark.slow
def test_full_disk(archive: Path, tmp_path: Path) -> None:
    """The graph fits on the disk, the plan does not."""
    script = (
        'mount -t tmpfs -o size=200k none "$1" && cd "$1" && echo old > m.plan && shift && "$@"; s=$?; find; exit $s'
    )
    done = in_namespace(script, tmp_path, *TWELLC, "compile", archive, "-o", tmp_path / "m.plan", "--overwrite")
    assert done.returncode == 2
    assert f"Error: {tmp_path / 'm.plan'}: cannot be written: No space left on device. Make room" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(done.stdout.split()) == [".", "./m.plan"]


def test_read_only_folder(archive: Path, tmp_path: Path) -> None:
    script = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"'
    done = in_namespace(script, tmp_path, *TWELLC, "compile", archive, "-o", tmp_path / "m.plan")
    assert done.returncode == 2
    assert f"Error: --output {tmp_path / 'm.plan'}: the output folder is not writable" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_folder_that_takes_no_files(cli: Cli, archive: Path) -> None:
    """Root passes every check of permissions, and /proc takes a file from nobody."""
    failed(cli("compile", archive, "-o", "/proc/m.plan"), "/proc/m.", "cannot be written: No such file or directory")


@pytest.mark.parametrize("kilobytes", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_file_that_cannot_grow(archive: Path, tmp_path: Path, kilobytes: int) -> None:
    """A limit of file size stands for a disk that fills up at another step: the calls fail with another number.

    The smaller one stops at the graph, which nobody asked for: the message names the plan all the same.
    """
    done = in_shell(f'ulimit -f {kilobytes}; exec "$@"', "compile", archive, "-o", "m.plan", folder=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "Error: m.plan: cannot be written: File too large. Make room" in done.stderr.replace(f"{tmp_path}/", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "script",
    [
        '"$@" --help > /dev/full',
        '"$@" plugins > /dev/full',
        '"$@" inspect nothing 2> /dev/full',
        pytest.param('"$@" inspect m.pt2 2> /dev/full', marks=pytest.mark.slow),
    ],
)
def test_full_streams(archive: Path, tmp_path: Path, script: str) -> None:
    """Status 1, Python's own, would say that a check failed; 70, that twellc has a fault."""
    (tmp_path / "m.pt2").write_bytes(archive.read_bytes())
    done = in_shell(script, folder=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert ("No space left on device" in done.stderr) == ("2>" not in script)
    assert ("the output cannot be printed: No space left on device" in done.stderr) == ("--help" in script)


def in_shell(script: str, *arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a bash script on twellc's command line with arguments."""
    return captured(["bash", "-c", script, "bash", *TWELLC, *arguments], cwd=folder)


@pytest.mark.parametrize(
    "arguments",
    [["plugins"], *(pytest.param(each, marks=pytest.mark.slow) for each in (["inspect", "m.pt2"], ["--help"]))],
)
def test_pipe_that_nobody_reads(archive: Path, tmp_path: Path, arguments: list[str]) -> None:
    """Status 1 would say that a check failed."""
    (tmp_path / "m.pt2").write_bytes(archive.read_bytes())
    done = in_shell('"$@" | true; exit ${PIPESTATUS[0]}', *arguments, folder=tmp_path)
    assert done.returncode == 128 + signal.SIGPIPE
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "script", ['"$@" > /dev/full', '"$@" | true; exit ${PIPESTATUS[0]}', '"$@" >&-', '"$@" >&- 2>&-']
)
def test_summary_that_cannot_be_printed(graph: Path, tmp_path: Path, script: str) -> None:
    """The outputs are there by then, so the command did what it was to do."""
    done = in_shell(script, "compile", graph, "-o", "m.plan", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
    assert sorted(files_in(tmp_path)) == ["m.plan", "m.plan.json"]
    manifest = json.loads((tmp_path / "m.plan.json").read_text())
    assert manifest["plan"]["bytes"] == (tmp_path / "m.plan").stat().st_size


@pytest.mark.sampled(1)
@pytest.mark.parametrize("script", ['"$@" >&-', '"$@" 2>&-', '"$@" <&- >&- 2>&-'])
def test_closed_streams(graph: Path, tmp_path: Path, script: str) -> None:
    done = in_shell(script, "inspect", graph, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert ("1 of 1 feed-forward blocks rewritten" in done.stdout) == (">&-" not in script.replace("2>&-", ""))


def test_device_is_not_replaced(cli: Cli, archive: Path, tmp_path: Path) -> None:
    """Root could rename a file to /dev/null; a pipe of our own stands for it."""
    pipe = tmp_path / "m.plan"
    os.mkfifo(pipe)
    failed(cli("compile", archive, "-o", pipe, "--overwrite"), "is a device or a pipe; expected a file")
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_names_are_printed_as_they_are(cli: Cli, archive: Path, tmp_path: Path) -> None:
    """Rich takes [/] for the end of a style, and :smile: for a symbol."""
    pattern = r"(?i)[/]|^:smile:|ffn"
    result = cli("compile", archive, "--backend", "none", "--onnx", tmp_path / "[b]m:smile:.onnx", "--layers", pattern)
    assert result.exit_code == 0, result.output
    assert "[b]m:smile:.onnx" in result.stdout
    failed(cli("compile", archive, "-o", tmp_path / "m.plan", "--layers", "[/]"), "[/]")


def test_terminal_does_not_obey_names(cli: Cli, archive: Path, tmp_path: Path) -> None:
    """Names in a model or its path may hold what clears a screen, or what looks like a line of ours."""
    evil, shown = "m\x1b[2J\x9b1m\r\nNote: x\x07ö", r"m\x1b[2J\x9b1m\r\nNote: x\x07ö"
    graph = tmp_path / "m.onnx"
    assert cli("compile", archive, "--backend", "none", "--onnx", graph).exit_code == 0
    model = onnx.load(graph)
    for node in model.graph.node:
        node.name = evil
    del model.metadata_props[:]
    onnx.save(model, tmp_path / evil)
    result = cli("inspect", tmp_path / evil)
    assert result.exit_code == 0
    refusal = cli("compile", tmp_path / evil, "-o", tmp_path / "m.plan")
    failed(refusal, f"{tmp_path / shown}: is rewritten already")
    assert f"│ {shown} │" in result.stdout and f"{shown}: TwellGatedMlp" in result.stdout
    for text in (result.output, refusal.output):
        assert not set(text) & {*map(chr, range(10)), *map(chr, range(11, 32)), *map(chr, range(127, 160))}


def test_name_that_is_no_text(tmp_path: Path) -> None:
    process = twellc("inspect", os.fsdecode(b"/tmp/\xff.pt2"))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "is not UTF-8" in errors


@pytest.mark.slow
def test_text_in_any_locale(tmp_path: Path) -> None:
    """Python without UTF-8, as in an old locale: files are in UTF-8 all the same."""
    model = gated()
    model.graph.name = "größe"
    onnx.save(model, tmp_path / "m.onnx")
    (tmp_path / "config.json").write_text('{"name": "größe"}', encoding="utf-8")
    settings = environment(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")

    def run(*command: str) -> str:
        done = captured(command, env=settings, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(*TWELLC, "compile", "m.onnx", "--backend", "none", "--onnx", "n.onnx", "--dump-graphs", "graphs")
    assert "größe" in (tmp_path / "graphs" / "00-source.txt").read_text(encoding="utf-8")
    read = "import pathlib, twellc.loaders.checkpoint as loader; print(ascii(loader.read_config(pathlib.Path())))"
    assert run(sys.executable, "-P", "-c", read) == r"{'name': 'gr\xf6\xdfe'}" + "\n"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.2, 0.7, 0.999])
def test_library_that_is_cut_off(tmp_path: Path, share: float) -> None:
    """Opening such a file ends the process with SIGBUS."""
    content = library_path().read_bytes()
    broken = tmp_path / "libtwell_plugins.so"
    broken.write_bytes(content[: int(len(content) * share)])
    done = run_plugins(broken)
    assert done.returncode == 2, done.stderr
    assert f"Error: {broken}: the plugin library is damaged (named by $TWELLC_LIBRARY); got " in done.stderr
    assert "Install twellc with pip again" in done.stderr


def test_whole_library_has_its_size() -> None:
    expected = expected_size(library_path())
    assert expected is not None
    assert 0 <= library_path().stat().st_size - expected < 4096


def test_library_of_another_version(tmp_path: Path) -> None:
    source, older = tmp_path / "older.c", tmp_path / "libtwell_plugins.so"
    source.write_text('char const* twell_version(void) { return "0.0.1"; }\n')
    subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", source, "-o", older], check=True)
    done = run_plugins(older)
    assert done.returncode == 2
    assert "the plugin library is of another version; got 0.0.1; expected " + __version__ in done.stderr


def compile_with(library: Path, *options: str) -> str:
    """Compile what is no model, so that only what is looked at before the model can be the error; return it."""
    model = library.parent / "no_model.pt2"
    model.write_bytes(b"no model")
    command = [*TWELLC, "compile", str(model), "-o", str(library.parent / "m.plan"), "--backend", "tensorrt-rtx"]
    settings = environment(TWELLC_LIBRARY=str(library))
    done = captured([*command, *options], env=settings)
    assert done.returncode == 2, done.stderr
    return done.stderr


def test_compile_looks_at_the_library_before_the_model(tmp_path: Path) -> None:
    library = tmp_path / "libtwell_plugins.so"
    assert "the plugin library is missing (named by $TWELLC_LIBRARY)" in compile_with(library)


@pytest.mark.slow
def test_compile_looks_at_the_libraries_before_the_model(tmp_path: Path) -> None:
    library = tmp_path / "libtwell_plugins.so"
    library.write_bytes(library_path().read_bytes()[:5000])
    assert "the plugin library is damaged (named by $TWELLC_LIBRARY)" in compile_with(library)
    for name in ("libtwell_plugins.so", "libtensorrt_rtx.so"):
        shutil.copy(library_path().with_name(name), tmp_path)
    assert "no_model.pt2" in compile_with(library)
    assert "--attention cudnn: libtwell_attention.so is not there" in compile_with(library, "--attention", "cudnn")


def run_plugins(library: Path) -> subprocess.CompletedProcess[str]:
    settings = environment(TWELLC_LIBRARY=str(library))
    return captured([*TWELLC, "plugins"], env=settings)


# What the tests write as the plan.
NOTHING = hashlib.sha256(b"").hexdigest()
LAYER = {"module": "m", "variant": "gated", "activation": "relu", "matched": True, "decision": "twell", "reason": ""}
LAYER |= {"d_model": 16, "d_ff": 40, "d_out": 16, "residual": False, "hot": 0, "norm": "none", "experts": 0, "top": 0}
NEURONS = {"kept": 8, "unable": 0, "dead": 0, "rate_bound": 0.1, "density": 0.1, "reason": ""}
SETTINGS = {"dtype": "bf16", "layers": "auto", "compression": 8, "attention_forms": ["matmul"]}


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    tensor = {"name": "x", "dtype": "bf16", "shape": [-1, 16]}
    return {
        "schema": 3,
        "twellc": "9.0.0",
        "model": {"name": "m", "kind": "k", "sha256": ""},
        "settings": SETTINGS,
        "layers": [LAYER],
        "attention": [],
        "notes": [],
        "warnings": [],
        "plugins": {"namespace": "twell", "version": "twellc-4", "names": ["TwellGatedMlp"], "embedded": False},
        "onnx": {"file": None, "sha256": ""},
        "profiles": [{"x": {"min": [1, 16], "opt": [2, 16], "max": [4, 16]}}],
        "backend": {"name": "tensorrt-rtx", "version": "1.7.1.116"},
        "plan": {"file": "m.plan", "bytes": 0, "sha256": NOTHING, "inputs": [tensor], "outputs": [tensor]}
        | {"plugin_layers": ["m"]},
    }


def test_plan_for_newer_plugins(manifest: dict[str, Any], tmp_path: Path) -> None:
    """A check says so before it opens the plan on a GPU."""
    read = read_json(manifest, tmp_path)
    with pytest.raises(
        UserError, match=r"got plugin version twellc-3; expected plugin version twellc-4, of twellc 9\.0\.0\. Install"
    ):
        refuse_other_plugins(tmp_path / "m.plan", read)
    changes: tuple[dict[str, Any], ...] = ({"version": "twellc-3"}, {"names": []})
    for change in changes:
        changed = replace(read, plugins=replace(read.plugins, **change))
        refuse_other_plugins(tmp_path / "m.plan", changed)


def read_json(content: dict[str, Any], folder: Path) -> Manifest:
    plan = folder / "m.plan"
    plan.touch()
    manifest_path(plan).write_text(json.dumps(content))
    return read_manifest(plan)


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no schema": ({"schema": None}, "it names no schema"),
    "newer": ({"schema": 4}, "of another version; got 4; expected 3"),
    "older": ({"schema": 2}, "of another version; got 2; expected 3"),
    "neurons": ({"layers": [{**LAYER, "neurons": {**NEURONS, "kept": "x"}}]}, r"damaged: layers\[0\]\.neurons\.kept"),
    "settings": (
        {"settings": SETTINGS | {"dtype": "int3"}},
        r"damaged: settings\.dtype is not bf16 or fp16 or float32: 'int3'",
    ),
    "form of attention": (
        {"settings": SETTINGS | {"attention_forms": ["no form"]}},
        r"damaged: settings\.attention_forms\[0\] is not",
    ),
    "padding": ({"settings": SETTINGS | {"padding": "left"}}, r"damaged: settings\.padding is not none or mask"),
    "attention": ({"attention": [{"module": "m"}]}, r"damaged: attention\[0\] has no heads"),
    "no profile": ({"profiles": []}, "damaged: profiles is empty"),
    "profile of another input": ({"profiles": [{}]}, r"damaged: profiles\[0\] lacks the input 'x'"),
    "profile of another rank": ({"profiles": [{"x": {"min": [1], "opt": [1], "max": [1]}}]}, "has impossible shapes"),
    "profile upside down": (
        {"profiles": [{"x": {"min": [1, 16], "opt": [2, 16], "max": [1, 16]}}]},
        "has impossible shapes",
    ),
    "graph elsewhere": ({"onnx": {"file": "../m.onnx", "sha256": ""}}, "not the name of a file beside the plan"),
    "another plan": (
        {"plan": {"file": "", "bytes": 0, "sha256": "", "inputs": [], "outputs": [], "plugin_layers": []}},
        "another plan, or",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_damaged_manifest(manifest: dict[str, Any], tmp_path: Path, case: str) -> None:
    plan = tmp_path / "m.plan"
    plan.touch()
    manifest_path(plan).write_text(json.dumps(manifest))
    assert read_manifest(plan).to_json() == manifest
    changes, message = BROKEN[case]
    manifest_path(plan).write_text(json.dumps(manifest | changes))
    with pytest.raises(UserError, match=message):
        read_manifest(plan)
