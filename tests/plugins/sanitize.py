"""Run the small kernel cases under each tool of compute-sanitizer.

    python -m tests.plugins.sanitize [memcheck racecheck initcheck synccheck]

Needs a GPU and compute-sanitizer on the PATH. Exit status 0: all tools are clean; 1: one has found something.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def run(tool: str) -> bool:
    """Run one tool; say whether it found nothing."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "10"]
    if tool == "memcheck":
        # Without the caching allocator a tensor is an allocation of its own, so a step outside it shows.
        command += ["--padding", "64"]
    if tool != "initcheck":  # which has to see the writes of all kernels
        command += ["--kernel-name", "kns=twell"]
    names = ("kernels", "gate_kernels", "guard", "direct", "chunks", "hot", "split", "gradients_gpu")
    tests = [f"{Path(__file__).with_name(f'test_{name}.py')}::test_sanitize" for name in names]
    command += [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TWELLC_REQUIRE_GPU": "1"}
    result = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    clean = result.returncode == 0
    lines = (result.stdout + result.stderr).splitlines()
    for line in lines[-6:] if clean else lines[-80:]:
        sys.stdout.write(f"  {line}\n")
    sys.stdout.write(f"{tool}: {'clean' if clean else 'FAILED'}\n")
    return clean


@click.command()
@click.argument("tools", nargs=-1, type=click.Choice(TOOLS))
def main(tools: tuple[str, ...]) -> None:
    """Run the small kernel cases under these tools, or all of them."""
    results = [run(tool) for tool in tools or TOOLS]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
