"""What all commands share: options of other tools, more or less said, and progress."""

import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import twellc
from tests.conftest import Cli
from twellc.cli import main
from twellc.commands import terminal
from twellc.commands.foreign import FOREIGN
from twellc.commands.terminal import show_progress


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--onnx=m.onnx", "--saveEngine=m.plan"], "trtexec's --saveEngine is -o/--output here: twellc compile MODEL"),
        (["m.onnx", "--fp16"], "trtexec's --fp16 is --dtype fp16 here."),
        (["m.onnx", "--bf16"], "trtexec's --bf16 is --dtype bf16 here."),
        (["m.onnx", "--optShapes=x:1x2"], "trtexec's --optShapes is part of --profile NAME:MIN:OPT:MAX here"),
        (["m.onnx", "--trt-min-shapes", "x:[1,2]"], "polygraphy's --trt-min-shapes is part of --profile"),
        (["m.onnx", "--workspace=4096"], "trtexec's --workspace is not needed here"),
        (["m.onnx", "--plugins=a.so"], "trtexec's --plugins is --plugin-library FILE here"),
        (["--model", "m", "out/"], "optimum-cli's --model is the argument MODEL here."),
        (["--onnx=m.onnx"], "MODEL is missing. trtexec's --onnx=FILE is the argument MODEL here"),
        (["m.onnx", "--unheard-of"], "--unheard-of"),
    ],
)
def test_options_of_other_tools(arguments: list[str], message: str) -> None:
    result = run("compile", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr and result.stderr.count("Error: ") == 1


def test_what_is_answered_is_no_option_of_compile() -> None:
    own = {name for parameter in main.commands["compile"].params for name in parameter.opts}
    assert not own & FOREIGN.keys()


def test_names_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fix = "Only local folders are read; fetch one by `hf download org/name --local-dir name`."
    for arguments in (["compile", "org/name", "-o", "m.plan"], ["inspect", "org/name"], ["bench", "org/name"]):
        result = run(*arguments)
        assert result.exit_code == 2 and fix in result.stderr, result.output
    (tmp_path / "org").mkdir()
    assert fix not in run("inspect", "org/name").stderr


def test_version() -> None:
    assert run("-V").stdout == run("--version").stdout
    assert twellc.__version__ in run("-V").stdout


@pytest.mark.parametrize("before", [True, False])
def test_quiet(before: bool, cli: Cli, archive: Path) -> None:
    loud = cli("inspect", archive)
    quiet = cli("-q", "inspect", archive) if before else cli("inspect", archive, "--quiet")
    assert "loading and tracing the model …" in loud.stderr and "Note: " in loud.stderr
    assert quiet.stderr == "" and quiet.stdout == loud.stdout
    failed = cli("inspect", archive.with_name("nothing"), "-q")
    assert failed.exit_code == 2 and failed.stderr.startswith("Error: ")


def test_verbose(cli: Cli, archive: Path, tmp_path: Path) -> None:
    assert "Traceback" not in cli("inspect", tmp_path / "nothing").stderr
    failed = cli("inspect", tmp_path / "nothing", "-v")
    assert failed.exit_code == 2
    assert "Traceback" in failed.stderr and failed.stderr.count("Error: ") >= 1
    assert "loading and tracing the model: " in cli("inspect", archive, "--verbose").stderr


def test_a_long_step_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where there is no terminal: again while it takes long, with what it is at."""
    monkeypatch.setattr(terminal, "_LONG", 1)
    with show_progress() as progress:
        progress("building the plan: tactics")
        time.sleep(2.5)
        progress("building the plan: writing")
        progress("done")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "building the plan …" and lines[-1] == "done …"
    assert any(line.startswith("building the plan: tactics … ") and line.endswith(" s") for line in lines[1:-1])
