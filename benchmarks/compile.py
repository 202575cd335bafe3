"""Measure `twellc compile` on a model of full size: time and peak memory of all its processes.

python benchmarks/make_llama.py --size 1.5b build/llama-1.5b
python benchmarks/compile.py build/llama-1.5b --json build/compile.json
python benchmarks/compile.py --smoke
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import harness
import psutil
from harness import table
from make_llama import write_llama


def measure(command: list[str]) -> dict[str, Any]:
    """Run a command and sample the memory of it and its children.

    Returns the exit status, the wall time in seconds, and the peaks in GB of `resident` memory, pages of mapped files
    included, and of `private` memory, without them.
    """
    start = time.monotonic()
    process = psutil.Popen(command, stdout=subprocess.DEVNULL)
    peak = {"resident": 0, "private": 0}
    while process.poll() is None:
        resident = private = 0
        for member in [process, *_children(process)]:
            try:
                memory = member.memory_info()
            except psutil.Error:
                continue
            resident += memory.rss
            private += memory.rss - memory.shared
        peak["resident"] = max(peak["resident"], resident)
        peak["private"] = max(peak["private"], private)
        time.sleep(0.05)
    seconds = time.monotonic() - start
    return {"status": process.returncode, "seconds": seconds, **{name: size / 1e9 for name, size in peak.items()}}


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        children: list[psutil.Process] = process.children(recursive=True)
    except psutil.Error:
        return []
    return children


def _smallest_model() -> str:
    folder = Path(harness.scratch_folder()) / "llama-smoke"
    write_llama("smoke", folder)
    return str(folder)


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@harness.json_option
@harness.smoke_option(model=_smallest_model)
def main(model: Path, json_path: Path | None) -> None:
    """Compile MODEL with TensorRT-RTX and print a row of figures."""
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors")) / 1e9
    with tempfile.TemporaryDirectory(dir=model.parent) as folder:
        plan = Path(folder) / "model.plan"
        # -P keeps the working directory, where twellc's sources may lie unbuilt, off the module path.
        figures = measure([sys.executable, "-P", "-m", "twellc", "compile", str(model), "-o", str(plan)])
        if figures.pop("status") != 0:
            raise click.ClickException(f"twellc compile {model} failed, so there are no figures; see its message above")
        figures["plan"] = plan.stat().st_size / 1e9
    report = harness.new_report()
    report["machine"] |= {
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "processor": platform.machine(),
        "load": os.getloadavg()[1],
    }
    report["results"].append({"model": model.name, "weights": weights, **figures})
    cells = [f"{value:.2f}" for value in (weights, figures["seconds"], figures["resident"], figures["private"])]
    header = ["model", "weights GB", "seconds", "resident GB", "private GB", "private / weights"]
    click.echo(table(header, [[model.name, *cells, f"{figures['private'] / weights:.2f}"]]))
    harness.write_results(json_path, report)


if __name__ == "__main__":
    main()
