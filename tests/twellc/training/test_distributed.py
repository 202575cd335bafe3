"""Two processes over gloo compute what one does: DDP and FSDP2, with counts, dead neurons and a profile."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.processes import environment


def together(how: str, ranks: int, folder: Path) -> list[dict[str, Any]]:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    child = "tests.twellc.training.distributed_child"
    running = [
        subprocess.Popen(
            [sys.executable, "-m", child, how, str(rank), str(ranks), str(folder / f"{how}.store"), str(model)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment(ROOT),
        )
        for rank in range(ranks)
    ]  # fmt: skip
    found = []
    for process in running:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err[-3000:]
        found.append(json.loads(out.splitlines()[-1]))
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (found,) = together("alone", 1, tmp_path_factory.mktemp("alone"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_two_processes(how: str, alone: dict[str, Any], tmp_path: Path) -> None:
    dead, *blocks = alone["steps"][0]
    assert dead >= 7 and [tokens for tokens, _ in blocks] == [24, 24]
    one, other = together(how, 2, tmp_path)
    assert one == other  # weights are equal bit by bit
    # The mean of the means of both halves is the mean of the whole: sequences are equally long.
    assert one["steps"] == alone["steps"] and one["profile"] == alone["profile"]
    assert one["sequences"] == alone["sequences"] == 12
    for what in ("sums", "squares"):
        assert one[what] == {name: pytest.approx(value, rel=1e-4, abs=1e-4) for name, value in alone[what].items()}


@pytest.mark.slow
def test_processes_that_reach_other_experts(tmp_path: Path) -> None:
    one, other = together("experts", 2, tmp_path)
    assert one == other and one["tokens"] == [10, 3, 3, 0]
    assert one["profile"] == {"0": 10, "1": 3, "2": 3} and all(one["firing"].values())
