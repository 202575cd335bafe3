"""Measure `twellc compile` on a model of full size: time and peak memory of all its processes.

python benchmarks/make_llama.py --size 1.5b build/llama-1.5b
python benchmarks/compile.py build/llama-1.5b --results benchmarks/results
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import psutil


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
        return process.children(recursive=True)
    except psutil.Error:
        return []


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--results", type=click.Path(path_type=Path), help="Folder for a JSON file with the figures.")
def main(model: Path, results: Path | None) -> None:
    """Compile MODEL with TensorRT-RTX and print a row of figures."""
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors")) / 1e9
    with tempfile.TemporaryDirectory(dir=model.parent) as folder:
        plan = Path(folder) / "model.plan"
        # -P keeps the working directory, where twellc's sources may lie unbuilt, off the module path.
        figures = measure([sys.executable, "-P", "-m", "twellc", "compile", str(model), "-o", str(plan)])
        if figures.pop("status") != 0:
            sys.exit(f"twellc compile {model} failed, so there are no figures; see its message above")
        figures["plan"] = plan.stat().st_size / 1e9
    figures |= {
        "model": model.name,
        "weights": weights,
        "machine": f"{os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB, {platform.machine()}",
        "load": os.getloadavg()[1],
    }
    print("| model | weights GB | seconds | resident GB | private GB | private / weights |")
    print("| --- | --- | --- | --- | --- | --- |")
    row = (figures[name] for name in ("weights", "seconds", "resident", "private"))
    print(f"| {model.name} | {' | '.join(f'{value:.2f}' for value in row)} | {figures['private'] / weights:.2f} |")
    if results is not None:
        results.mkdir(parents=True, exist_ok=True)
        (results / f"compile-{model.name}.json").write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
