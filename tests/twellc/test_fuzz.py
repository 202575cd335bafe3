"""Random command lines and damaged files: each run works, or ends with one message and exit status 2.

By default a few of each. `TWELLC_FUZZ_EXAMPLES=1000 pytest -m "" tests/twellc/test_fuzz.py` runs longer, and with other
examples each time.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests import models, onnx_graphs
from tests.drawn import examples
from tests.fork_server import ForkServer, Run
from tests.mutations import damaged_json, damaged_lines, damaged_onnx, damaged_safetensors, damaged_zip
from tests.processes import environment
from tests.twellc.reporting.pages import write_log


@pytest.fixture(scope="module")
def samples(archive: Path, talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    shutil.copy(archive, folder / "model.pt2")
    models.save(models.llama(num_hidden_layers=1), folder / "llama")
    shutil.copytree(talker, folder / "talker")
    module = nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 24))
    torch.save(module, folder / "module.pt")
    onnx.save(onnx_graphs.gated(biases=True), folder / "plain.onnx")
    (folder / "text.txt").write_text("hello")
    (folder / "prompts.jsonl").write_text('{"prompt": "a b"}\n{"messages": [{"role": "user", "content": "c"}]}\n')
    (folder / "data.jsonl").write_text('{"text": "hello"}\n{"text": "world, again"}\n{"input_ids": [1, 2, 3]}\n')
    np.savez(folder / "x.npz", x=np.ones((2, models.SEQUENCE, models.D_MODEL), np.float32))
    write_log(folder / "training.jsonl", ["model.layers.0.mlp"], [64])
    (folder / "empty").touch()
    return folder


@pytest.fixture(scope="module")
def server(samples: Path) -> Iterator[ForkServer]:
    warm = samples.parent / "warm.onnx"
    warm_up = [
        ["inspect", str(samples / "plain.onnx")],
        ["compile", str(samples / "model.pt2"), "--backend", "none", "--onnx", str(warm)],
    ]
    with ForkServer(environment(), warm_up) as running:
        prepare(running, samples, "compile", "model.pt2", "-o", "m.plan", "--onnx", "rewritten.onnx")
        yield running


def prepare(server: ForkServer, folder: Path, *arguments: str) -> None:
    made = server.run(*arguments, folder=folder)
    assert made.status == 0, made.stderr


# What makes a file for those tests that damage it.
PREPARED = {
    "cached.onnx": "compile talker -o cached.plan --onnx cached.onnx --kv-cache 16 --max-batch-size 2",
    "talker.profile": "profile talker data.jsonl -o talker.profile",
}


def judge(run: Run, before: set[Path], folder: Path, *, may_differ: bool) -> None:
    """Demand success without debris, or one message and nothing written."""
    said = f"status {run.status}\n{run.stderr[-3000:]}"
    assert not run.late, f"no end\n{said}"
    assert run.status in ((0, 1, 2) if may_differ else (0, 2)), said
    assert "Traceback" not in run.stderr, said
    if run.status == 2:
        assert [line.startswith("Error: ") for line in run.stderr.splitlines()].count(True) == 1, said
    left = set(folder.rglob("*")) - before
    hidden = [path for path in left if path.name.startswith(".")]
    # Graphs are dumped so that a failure can be looked at.
    left = {path for path in left if not {"dump", "new"} & set(path.relative_to(folder).parts)}
    assert not hidden and (run.status == 0 or not left), f"{left} were left\n{said}"


NUMBERS = st.sampled_from(("", "0", "1", "-1", "8", "1e9", "nan", "0.5", "9" * 30, "0x10", "\u0661", " 1", "1_0"))
_NAMES = (
    "model.pt2", "llama", "module.pt", "plain.onnx", "rewritten.onnx", "m.plan", "m.plan.json", "text.txt", "empty",
    "none", "none/x", "text.txt/x", "", ".", "a" * 300, "é", "[/]", "-", "llama/config.json", "\udcff", "new",
    "new.plan", "new.onnx", "x.npz", "%s", "~", "new/a/b",
)  # fmt: skip
PATHS = st.sampled_from((*_NAMES, "..", "/", "/dev/null", "/proc/self/mem", "/proc/self/fd"))
# Nothing outside of the folder: a test that fails must not write there.
OUTPUTS = st.sampled_from((*_NAMES, "/proc/x"))
TEXTS = st.one_of(NUMBERS, PATHS, st.sampled_from(("(", "[/]", ".*", "auto", "(a+)+$", "ffn", "\n", "--", "none")))
PROFILES = st.one_of(
    TEXTS,
    st.builds(
        lambda name, *shapes: ":".join((name, *shapes)),
        st.sampled_from(("x", "input_ids", "y", "")),
        *[st.sampled_from(("1x3x16", "64x3x16", "65x3x16", "0", "1", "-1x1", "1x1x1x1", "9" * 25, "x", ""))] * 3,
    ),
)
INPUTS = st.one_of(
    TEXTS,
    st.sampled_from(("input:float32[b,16]", "input:float64[1]", "x:int64[]", f"input:bool[{'9' * 20},16]", "x:y[z")),
)
OPTIONS: dict[str, dict[str, Any]] = {
    "compile": {
        "-o": OUTPUTS, "--output": OUTPUTS, "--onnx": OUTPUTS, "--manifest": OUTPUTS, "--triton": OUTPUTS,
        "--optimization-profile": PROFILES,
        "--dtype": st.sampled_from(("bf16", "fp16", "fp32", "")), "--layers": TEXTS, "--input-spec": INPUTS,
        "--backend": st.sampled_from(("none", "none", "none", "auto", "tensorrt", "tensorrt-rtx", "x")),
        "--compression": NUMBERS, "--dump-graphs": st.sampled_from(("dump", "text.txt", "llama", "/proc/x", "")),
        "--strict": None, "--overwrite": None, "--trust-model": None, "--embed-plugins": None, "--help": None,
    },
    "inspect": {
        "--json": None, "--dtype": st.sampled_from(("bf16", "fp16", "x")), "--density": NUMBERS, "--tokens": NUMBERS,
        "--trust-model": None, "--input-spec": INPUTS,
    },
    "check": {
        "--seed": NUMBERS, "--arrays": PATHS, "--text": PATHS, "--json": None, "--trust-model": None,
        "--input-spec": INPUTS,
    },
    "plugins": {"--json": None, "--x": None},
}  # fmt: skip
ARGUMENTS = {"compile": 1, "inspect": 1, "check": 2, "plugins": 0}


@st.composite
def command_lines(draw: Callable[..., Any]) -> list[str]:
    """Draw a command with about as many arguments as it takes, and options in any number and order."""
    command = draw(st.sampled_from(("compile", "compile", "compile", "inspect", "check", "plugins")))
    parts = [
        [draw(PATHS)] for _ in range(max(0, ARGUMENTS[command] + draw(st.sampled_from((0, 0, 0, 0, 0, 0, 1, -1)))))
    ]
    if command == "compile" and draw(st.booleans()):
        parts.append(["-o", draw(st.sampled_from(("new.plan", "m.plan")))])
    for name in draw(st.lists(st.sampled_from(list(OPTIONS[command])), max_size=4)):
        values = OPTIONS[command][name]
        parts.append([name] if values is None else [name, draw(values)])
    return [command, *(word for part in draw(st.permutations(parts)) for word in part)]


@pytest.mark.parametrize("count", [5, pytest.param(150, marks=pytest.mark.slow)])
def test_command_lines(server: ForkServer, samples: Path, count: int) -> None:
    @examples(count)
    @given(arguments=command_lines())
    def run_them(arguments: list[str]) -> None:
        run_damaged(server, samples, {}, arguments, may_differ=True)

    run_them()


def run_damaged(
    server: ForkServer, samples: Path, damaged: dict[str, bytes], arguments: Sequence[str], *, may_differ: bool
) -> None:
    """Run a command in a copy of the folder with damaged files, and judge what it did."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        shutil.copytree(samples, folder)
        for victim, content in damaged.items():
            (folder / victim).write_bytes(content)
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        everything = set(folder.rglob("*"))
        run = server.run(*arguments, folder=folder)
        judge(run, everything, folder, may_differ=may_differ)
        assert list(Path(name).iterdir()) == [folder]
        if run.status:
            assert {path: path.read_bytes() for path in before} == before, "a file was changed"


SHORT = ("--max-tokens", "3")
ANSWER = ("generate", "talker", "--prompt", "hello", *SHORT)
PAGE = ("-o", "new.html")
DAMAGE: dict[str, tuple[str, Callable[[bytes], Any], tuple[str, ...]]] = {
    "archive": ("model.pt2", damaged_zip, ("inspect", "model.pt2")),
    "trusted archive": ("model.pt2", damaged_zip, ("inspect", "model.pt2", "--trust-model")),
    "compiled archive": ("model.pt2", damaged_zip, ("compile", "model.pt2", "--backend", "none", "--onnx", "new.onnx")),
    "configuration": ("llama/config.json", damaged_json, ("inspect", "llama")),
    "weights": ("llama/model.safetensors", damaged_safetensors, ("inspect", "llama")),
    "pickle": (
        "module.pt",
        damaged_zip,
        ("inspect", "module.pt", "--input-spec", "input:float32[b,16]", "--trust-model"),
    ),
    "untrusted pickle": ("module.pt", damaged_zip, ("inspect", "module.pt", "--input-spec", "input:float32[b,16]")),
    "ONNX": ("plain.onnx", damaged_onnx, ("inspect", "plain.onnx")),
    "plan of an ONNX file": ("plain.onnx", damaged_onnx, ("compile", "plain.onnx", "-o", "new.plan")),
    "rewritten ONNX": ("rewritten.onnx", damaged_onnx, ("inspect", "rewritten.onnx")),
    "checked ONNX": ("rewritten.onnx", damaged_onnx, ("check", "model.pt2", "rewritten.onnx")),
    "manifest": ("m.plan.json", damaged_json, ("inspect", "m.plan")),
    "checked manifest": ("m.plan.json", damaged_json, ("check", "model.pt2", "m.plan")),
    "checked arrays": ("x.npz", damaged_zip, ("check", "model.pt2", "rewritten.onnx", "--arrays", "x.npz")),
    "checked ONNX with a cache": ("cached.onnx", damaged_onnx, ("check", "talker", "cached.onnx")),
    "checked manifest with a cache": ("cached.plan.json", damaged_json, ("check", "talker", "cached.plan")),
    "answering configuration": ("talker/config.json", damaged_json, ANSWER),
    "answering weights": ("talker/model.safetensors", damaged_safetensors, ANSWER),
    "tokenizer": ("talker/tokenizer.json", damaged_json, ANSWER),
    "settings of a tokenizer": ("talker/tokenizer_config.json", damaged_json, ANSWER),
    "prompts": ("prompts.jsonl", damaged_lines, ("generate", "talker", "--prompts-file", "prompts.jsonl", *SHORT)),
    "texts": ("data.jsonl", damaged_lines, ("profile", "talker", "data.jsonl", "-o", "new.profile")),
    "profile": ("talker.profile", damaged_safetensors, ("inspect", "talker", "--firing-profile", "talker.profile")),
    "reported profile": ("talker.profile", damaged_safetensors, ("report", "talker.profile", "-o", "new.html")),
    "reported training": ("training.jsonl", damaged_lines, ("report", "--training", "training.jsonl", *PAGE)),
    "reported manifest": ("m.plan.json", damaged_json, ("report", "--decisions", "m.plan", *PAGE)),
}


# What is damaged in another kind, too, for another way through the same file.
AGAIN = {
    "trusted archive", "compiled archive", "untrusted pickle", "plan of an ONNX file", "rewritten ONNX", "weights",
    "checked ONNX with a cache", "checked manifest", "checked manifest with a cache", "settings of a tokenizer",
    "answering configuration", "reported profile", "reported manifest",
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "count"),
    [(kind, 1) for kind in DAMAGE if kind not in AGAIN]
    + [pytest.param(kind, 8, marks=pytest.mark.slow) for kind in DAMAGE],
)
def test_damaged_files(server: ForkServer, samples: Path, kind: str, count: int) -> None:
    victim, damage, arguments = DAMAGE[kind]
    for made, command in PREPARED.items():
        if made.partition(".")[0] == victim.partition(".")[0] and not (samples / made).exists():
            prepare(server, samples, *command.split())

    @examples(count)
    @given(content=damage((samples / victim).read_bytes()))
    def run_them(content: bytes) -> None:
        run_damaged(server, samples, {victim: content}, arguments, may_differ=arguments[0] == "check")

    run_them()
