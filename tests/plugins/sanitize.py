"""Run the small kernel cases under each tool of compute-sanitizer.

    python -m tests.plugins.sanitize [memcheck racecheck initcheck synccheck] [--only gradients_gpu]

Needs a GPU and compute-sanitizer on the PATH. Exit status 0: all tools are clean; 1: one has found something.
"""

import os
import subprocess
import sys
from pathlib import Path

import click

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Of test files.
NAMES = (
    "kernels",
    "gate_kernels",
    "guard",
    "direct",
    "chunks",
    "split",
    "gradients_gpu",
    "fp8_blocks",
    "linear",
    "norm",
    "cache_op",
    "autoencoders",
    "experts",
)


def run(tool: str, names: tuple[str, ...]) -> bool:
    """Run one tool over the cases of some test files; say whether it found nothing."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "10"]
    if tool == "memcheck":
        # Without the caching allocator each tensor is a separate allocation, so a step outside it shows.
        command += ["--padding", "64"]
    if tool != "initcheck":  # which has to see the writes of all kernels
        command += ["--kernel-name", "kns=twell"]
    tests = [str(Path(__file__).with_name(f"test_{name}.py")) for name in names]
    plugins = ["no:cacheprovider", *(["tests.plugins.products_on_cpu"] if tool == "racecheck" else [])]
    command += [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-k",
        "test_sanitize",
        *(f"-p{each}" for each in plugins),
        *tests,
    ]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TWELLC_REQUIRE_GPU": "1"}
    clean = subprocess.run(command, check=False, env=environment).returncode == 0
    sys.stdout.write(f"{tool}: {'clean' if clean else 'FAILED'}\n")
    sys.stdout.flush()
    return clean


@click.command()
@click.argument("tools", nargs=-1, type=click.Choice(TOOLS))
@click.option("--only", "names", type=click.Choice(NAMES), multiple=True, default=NAMES, help="These test files alone.")
def main(tools: tuple[str, ...], names: tuple[str, ...]) -> None:
    """Run the small kernel cases under these tools, or all of them."""
    results = [run(tool, names) for tool in tools or TOOLS]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
