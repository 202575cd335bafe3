"""Options are declared once, as fields, which commands agree with; what all commands share."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import twellc
from tests.conftest import Cli
from tests.generated_docs import options_of
from twellc.cli import main
from twellc.commands import terminal
from twellc.commands.foreign import FOREIGN
from twellc.commands.terminal import show_progress
from twellc.options import commands
from twellc.options.option import LARGEST_SEED, declared, descriptions
from twellc.options.renamed import RENAMED

CLASSES: dict[str, type[Any]] = {
    "compile": commands.CompileOptions,
    "inspect": commands.InspectOptions,
    "check": commands.CheckOptions,
    "profile": commands.ProfileOptions,
    "bench": commands.BenchOptions,
}


@pytest.mark.parametrize("command", CLASSES)
def test_a_command_gives_what_its_function_takes_by_default(command: str) -> None:
    """Called without options, a function does as the command."""
    options = CLASSES[command]
    defaults = {field.name: field.default for field in declared(options)}
    given = main.commands[command].make_context(command, [], resilient_parsing=True).params
    assert {name: given[name] or value for name, value in defaults.items()} == defaults


def test_generate_has_what_llm_has() -> None:
    """By the same names, and with the same defaults."""
    arguments = {name: each.default for name, each in signature(twellc.LLM.__init__).parameters.items()}
    for name in (
        "self",
        "model",
        "others",
        "skip_tokenizer_init",
        "logprobs_mode",
    ):  # prompts are texts, and so answers
        del arguments[name]
    assert {field.name: field.default for field in declared(commands.LLMOptions)} == arguments
    assert {f"--{name.replace('_', '-')}" for name in arguments} <= options_of("generate").keys()


@pytest.mark.parametrize("command", CLASSES)
def test_every_field_is_described(command: str) -> None:
    options = CLASSES[command]
    assert descriptions(options).keys() == {field.name for field in fields(options)}


def test_old_names_answer_with_a_sentence(
    cli: Cli, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shapes, graph, report = "x:1x3x16:1x3x16:2x3x16", tmp_path / "m.onnx", tmp_path / "m.json"
    given = ("--backend", "none", "--onnx", graph, "--report", report, f"--profile={shapes}")
    result = cli("compile", archive, *given, "--dump-graphs", "--inputs")
    assert result.exit_code == 0 and report.is_file() and (tmp_path / "--inputs").is_dir(), result.output
    notes = [f"Note: {old} is called {new} now; the next version does not know the old name." for old, new in (
        ("--report", "--manifest"), ("--profile", "--optimization-profile"),
    )]  # fmt: skip
    assert all(note in result.stderr for note in notes) and "--inputs is" not in result.stderr
    with pytest.warns(FutureWarning, match="profiles is called optimization_profiles now"):
        made = twellc.compile(archive, backend="none", onnx=graph, profiles=[shapes], overwrite=True)  # type: ignore[call-arg]
    assert made.to_json()["profiles"] == json.loads(report.read_text())["profiles"]
    with pytest.raises(twellc.UserError, match="input_specs: is given twice"):
        twellc.inspect(archive, input_specs=[], inputs=[])  # type: ignore[call-arg]


def test_a_command_has_one_meaning_for_a_name() -> None:
    """No option is known by what is an old name elsewhere, but for `profile --batch`, and the changes have a table."""
    table = (Path(__file__).parents[3] / "CHANGELOG.md").read_text()
    for old, new in RENAMED.items():
        assert all(f"`{old}` | `{each}`" in table for each in new)
    own = {(name, each) for name in main.commands for each in options_of(name)}
    assert {each for each in own if each[1] in RENAMED} == {("profile", "--batch")}


@pytest.mark.parametrize("seed", [-1, LARGEST_SEED + 1, 1.5, True])
def test_a_seed_out_of_range_is_refused(seed: Any, archive: Path, tmp_path: Path) -> None:
    with pytest.raises(
        twellc.UserError, match=r"--seed: is (out of its range|not an integer); got .*; expected an integer from 0 to"
    ):
        twellc.check(archive, tmp_path / "m.onnx", seed=seed)


@pytest.mark.parametrize(("batch", "sequences"), [(1, [1]), (3, [3, 1]), (8, [8, 1]), (32, [32, 8, 1])])
def test_profiles_of_a_cache(batch: int, sequences: list[int]) -> None:
    options = commands.CompileOptions(Path("m"), kv_cache=64, max_batch_size=batch, prefill_chunk=16)
    (_, prompts), *steps = options.requested_profiles
    assert (prompts.min, prompts.opt, prompts.max) == ((1, 1), (1, 16), (batch, 16))
    assert [(each.min, each.opt, each.max) for _, each in steps] == [((1, 1), (n, 1), (n, 1)) for n in sequences]


@pytest.mark.usefixtures("cli")
def test_of_what_is_compiled_nothing_is_decided(archive: Path, tmp_path: Path) -> None:
    graph = tmp_path / "m.onnx"
    twellc.compile(archive, backend="none", onnx=graph)
    inspect: Callable[..., Any] = twellc.inspect
    cases: tuple[tuple[str, Any, str], ...] = (
        ("layers", "none", "--layers what becomes of the blocks is decided already"),
        ("compression", 4, "--compression what becomes of the blocks is decided already"),
        ("padding", "mask", "--padding mask only a causal Hugging Face model leaves the choice"),
    )
    for option, value, message in cases:
        with pytest.raises(twellc.UserError) as caught:
            inspect(os.fspath(graph), **{option: value})
        assert message in str(caught.value).replace(":", "")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--onnx=m.onnx", "--saveEngine=m.plan"], "trtexec's --saveEngine is -o/--output here: twellc compile MODEL"),
        (["m.onnx", "--fp16"], "trtexec's --fp16 is --dtype fp16 here."),
        (["m.onnx", "--bf16"], "trtexec's --bf16 is --dtype bf16 here."),
        (
            ["m.onnx", "--optShapes=x:1x2"],
            "trtexec's --optShapes is part of --optimization-profile NAME:MIN:OPT:MAX here",
        ),
        (["m.onnx", "--trt-min-shapes", "x:[1,2]"], "polygraphy's --trt-min-shapes is part of --optimization-profile"),
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


def test_version_and_help() -> None:
    assert run("-V").stdout == run("--version").stdout
    assert twellc.__version__ in run("-V").stdout
    assert "Compile transformers" in run("--help").stdout


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
