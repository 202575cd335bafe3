"""A picture of speed-ups by the number of tokens."""

from __future__ import annotations

from pathlib import Path

from twellc.base.errors import UserError
from twellc.base.files import writing
from twellc.benchmarking.result import SHOWN, BenchResult, Standings, gains_of

_FORMATS = ("svg", "png", "pdf")


def require_matplotlib(where: str) -> None:
    """Fail now rather than after the work is done if no figure can be drawn.

    Raises:
        UserError: matplotlib is missing.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UserError(where, "needs matplotlib", fix="pip install 'twellc[plot]'") from error


def refuse_plot(path: Path) -> None:
    """Fail now rather than after the work is done if no picture can be drawn.

    Raises:
        UserError: matplotlib is missing, or does not write files of this format.
    """
    if path.suffix[1:].lower() not in _FORMATS:
        raise UserError(f"--plot {path}", "no such format", expected=" or ".join(f".{each}" for each in _FORMATS))
    require_matplotlib(f"--plot {path}")


def write_plot(result: BenchResult, path: Path) -> None:
    """Draw how many times as fast as the fastest dense torch contestants are, the model beside its blocks alone."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    tokens = [each.tokens for each in result.results]
    standings: dict[str, list[Standings]] = {
        "whole model": [each.model for each in result.results],
        "rewritten feed-forward blocks alone": [each.blocks for each in result.results],
    }
    for axes, (title, own) in zip(panels, standings.items(), strict=True):
        axes.axhline(1, color="gray", linewidth=1)
        for name, labels in SHOWN.items():
            points = gains_of(labels, tokens, own)
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=name)
        axes.set(title=title, xscale="log", xlabel="tokens a call", xticks=sorted(set(tokens)))
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_locator(axes.xaxis.get_minor_locator().__class__(base=10, subs=[]))
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    panels[0].set_ylabel("times as fast as the fastest dense torch")
    figure.suptitle(f"{result.model}, {result.dtype}, {result.machine.gpu}")
    with writing(path):
        figure.savefig(path, format=path.suffix[1:].lower(), dpi=150)
