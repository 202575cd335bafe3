"""Run all benchmarks that need a GPU, one after the other.

python benchmarks/gpu.py --out benchmarks/results

Writes a Markdown table and a JSON file for each of them, named after the GPU and the day. Stops at the first one that
fails, whose JSON file then holds what it has measured so far.
"""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path

import click
import torch

# Name of the results, script, its arguments.
_BENCHMARKS = (("suite", "block.py", ("--suite",)), ("layers", "layers.py", ()), ("model", "model.py", ()))


def run(script: str, arguments: tuple[str, ...], table: Path) -> None:
    """Run a script beside this one; what it prints is shown and, if it succeeds, written to `table`.

    Raises:
        click.ClickException: It failed.
    """
    command = [sys.executable, "-u", str(Path(__file__).with_name(script)), *arguments]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            click.echo(line, nl=False)
            lines.append(line)
    if process.returncode != 0:
        raise click.ClickException(f"{script} failed with exit status {process.returncode}")
    table.write_text("".join(lines))


@click.command(help=__doc__)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Write results here.")
@click.option("--repeats", default=10, show_default=True, help="Of each measurement.")
def main(out: Path, repeats: int) -> None:
    """Run all of them."""
    if not torch.cuda.is_available():
        raise click.ClickException("there is no CUDA device")
    out.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.get_device_name().lower().removeprefix("nvidia ").replace(" ", "-")
    today = datetime.datetime.now(datetime.UTC).date()
    for name, script, arguments in _BENCHMARKS:
        results = out / f"{name}-{gpu}-{today}.json"
        run(script, (*arguments, "--repeats", str(repeats), "--json", str(results)), results.with_suffix(".md"))


if __name__ == "__main__":
    main()
