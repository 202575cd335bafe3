"""What needs no large model of benchmarks/compile.py: that a run that failed gives no figures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT
from tests.processes import environment


def test_failed_run_gives_no_figures(tmp_path: Path) -> None:
    model, results = tmp_path / "model", tmp_path / "results.json"
    model.mkdir()
    (model / "config.json").write_text("no JSON")
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "compile.py", model, "--json", results],
        capture_output=True, text=True, check=False, env=environment(), timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert "config.json" in done.stderr and "failed, so there are no figures" in done.stderr
    assert done.stdout == "" and not results.exists()
