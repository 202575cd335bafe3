"""Run all benchmarks that need a GPU, one after the other.

python benchmarks/gpu.py --out build/results
python benchmarks/gpu.py --smoke

Writes a Markdown table and a JSON file for each of them, named after the GPU and the day. Stops at the first one that
fails, whose files then hold what it has measured so far.
"""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path

import click
import harness
import torch

# Name of the results, script, its arguments.
_BENCHMARKS = (("suite", "block.py", ("--suite",)), ("layers", "layers.py", ()), ("model", "model.py", ()))


def run(script: str, arguments: tuple[str, ...], table: Path) -> None:
    """Run a script beside this one; what it prints is shown and written to `table`, line by line.

    Raises:
        click.ClickException: It failed.
    """
    command = [sys.executable, "-u", str(Path(__file__).with_name(script)), *arguments]
    with (
        table.open("w", encoding="utf-8", buffering=1) as written,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            click.echo(line, nl=False)
            written.write(line)
    if process.returncode != 0:
        raise click.ClickException(f"{script} failed with exit status {process.returncode}")


@click.command(help=__doc__)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Write results here.")
@click.option("--repeats", default=10, show_default=True, help="Of each measurement.")
@harness.smoke_option(out=harness.scratch_folder, repeats=2)
def main(out: Path, repeats: int) -> None:
    """Run all of them."""
    harness.refuse_without_gpu()
    out.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.get_device_name().lower().removeprefix("nvidia ").replace(" ", "-")
    today = datetime.datetime.now(datetime.UTC).date()
    for name, script, arguments in _BENCHMARKS:
        results = out / f"{name}-{gpu}-{today}.json"
        smoke = ("--smoke",) if harness.is_smoke() else ()
        given = (*arguments, *smoke, "--repeats", str(repeats), "--json", str(results))
        run(script, given, results.with_suffix(".md"))


if __name__ == "__main__":
    main()
