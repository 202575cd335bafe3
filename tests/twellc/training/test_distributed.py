"""Two processes over gloo compute what one does: DDP and FSDP2, with counts, dead neurons and a profile."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.processes import environment


def together(name: str, how: str, ranks: int, folder: Path) -> list[dict[str, Any]]:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    child = "tests.twellc.training.distributed_child"
    running = [
        subprocess.Popen(
            [sys.executable, "-m", child, name, how, str(rank), str(ranks), str(folder / f"{how}.store"), str(model)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment(ROOT),
        )
        for rank in range(ranks)
    ]
    found = []
    for process in running:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err[-3000:]
        found.append(json.loads(out.splitlines()[-1]))
    return found


@pytest.fixture(scope="module", params=["llama", "opt"])
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    (found,) = together(request.param, "alone", 1, tmp_path_factory.mktemp("alone"))
    return request.param, found


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_two_processes(how: str, alone: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    name, whole = alone
    dead, *blocks = whole["steps"][0]
    assert dead >= 7 and [tokens for tokens, _ in blocks] == [24, 24]
    one, other = together(name, how, 2, tmp_path)
    assert one == other  # weights are equal bit by bit
    # The mean of the means of both halves is the mean of the whole: sequences are equally long.
    assert one["steps"] == whole["steps"] and one["profile"] == whole["profile"]
    assert one["sequences"] == whole["sequences"] == (12 if name == "llama" else 0)  # blocks of OPT read rows
    for what in ("sums", "squares"):
        assert one[what] == {path: pytest.approx(value, rel=1e-4, abs=1e-4) for path, value in whole[what].items()}


@pytest.mark.slow
def test_processes_that_reach_other_experts(tmp_path: Path) -> None:
    one, other = together("experts", "each", 2, tmp_path)
    assert one == other and one["tokens"] == [10, 3, 3, 0]
    assert one["profile"] == {"0": 10, "1": 3, "2": 3} and all(one["firing"].values())
