"""Plans of real TensorRT that are opened in other processes, without twellc, damaged, or not at all."""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import captured
from tests.tensorrt.plans import MODULE_PATH, compiled, run, same_bits, twellc
from twellc.compiling.manifest import manifest_path
from twellc.export.runner import open_plan
from twellc.export.tensorrt_host import Host

pytestmark = [pytest.mark.tensorrt, pytest.mark.xdist_group("plans")]

# ---- a plan in a process without twellc ----


@pytest.fixture(scope="module")
def plan_of(tensorrt: Host, archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that compiles the archive of one block once for each set of options."""
    made: dict[tuple[str, ...], Path] = {}

    def make(*options: str) -> Path:
        if options not in made:
            made[options] = compiled(archive, tmp_path_factory.mktemp("plan") / "gated.plan", *options)
        return made[options]

    return make


def open_without_twellc(plan: Path, x: torch.Tensor, folder: Path, host_code: str) -> tuple[dict[str, Any], Path]:
    """Return what `plan_child.py` says, and where it writes the plan's output."""
    torch.save(x, folder / "x.pt")
    command = [sys.executable, "-P", str(Path(__file__).with_name("plan_child.py")), str(plan)]
    command += [str(folder / "x.pt"), str(folder / "y.pt"), host_code]
    folders = [folder for folder in MODULE_PATH if not (Path(folder) / "twellc").is_dir()]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    done = captured(command, env=variables, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1]), folder / "y.pt"


def example(plan: Path) -> torch.Tensor:
    shape = json.loads(manifest_path(plan).read_text())["profiles"][0]
    ((_, shapes),) = shape.items()
    return torch.randn(shapes["opt"]).bfloat16()


@pytest.mark.parametrize("host_code", ["allow", "refuse"])
def test_embedded_plugins_run_without_twellc(
    plan_of: Callable[..., Path], tensorrt: Host, tmp_path: Path, host_code: str
) -> None:
    """TensorRT 10.6 asks for no leave: engine_host_code_allowed is for version-compatible plans there."""
    plan = plan_of("--embed-plugins")
    x = example(plan)
    answer, y = open_without_twellc(plan, x, tmp_path, host_code)
    assert answer["opened"], answer
    ordinary = open_plan(tensorrt, plan_of(), tensorrt.version)
    (expected,) = run(ordinary, {ordinary.names("INPUT")[0]: x})
    assert same_bits(torch.load(y), expected)
    assert expected.isfinite().all() and expected.abs().max() > 0


def test_missing_plugins_are_named(plan_of: Callable[..., Path], tmp_path: Path) -> None:
    """TensorRT says which plugin it misses, and in that stands whose it is."""
    plan = plan_of()
    answer, _ = open_without_twellc(plan, example(plan), tmp_path, "allow")
    assert not answer["opened"]
    assert "twellc" in " ".join(answer["said"]), answer["said"]


# ---- plans that cannot be opened ----


def _with(data: bytes, start: int, piece: bytes) -> bytes:
    return data[:start] + piece + data[start + len(piece) :]


# A plan says twice which TensorRT built it: in bytes 24 to 27, where trtexec --getPlanVersionOnly reads it, and from
# byte 104 on, where TensorRT 10.6 itself does. Byte 8 is the version of the format.
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "another version": lambda data: _with(data, 104, b"\x09"),
    "another format": lambda data: _with(data, 8, b"\xff\xff\xff\xff"),
    "no plan": lambda data: _with(data, 0, b"none"),
    "cut off": lambda data: data[: len(data) // 2],
    "header alone": lambda data: data[:32],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_plan_that_cannot_be_opened(
    plan_of: Callable[..., Path], archive: Path, tensorrt: Host, tmp_path: Path, damage: str
) -> None:
    """The manifest is made to fit, so that it is TensorRT that refuses the plan: one message, and no crash."""
    sound, plan = plan_of(), tmp_path / "bad.plan"
    plan.write_bytes(DAMAGES[damage](sound.read_bytes()))
    manifest = json.loads(manifest_path(sound).read_text())
    manifest["plan"]["sha256"] = hashlib.sha256(plan.read_bytes()).hexdigest()
    manifest_path(plan).write_text(json.dumps(manifest))
    done = twellc("check", archive, plan)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    said = " ".join(done.stderr.split())
    assert f"{plan}: the plan cannot be opened (" in said
    assert f"got tensorrt {tensorrt.version}; expected tensorrt {tensorrt.version}, which built it" in said
    assert "it gives no reason" not in said
