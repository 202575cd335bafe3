"""The figures of a report, by matplotlib: SVG whose colours and fonts the page's style gives.

A figure is as wide as a phone; pages put several side by side. Every function returns one `<svg>` element.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import StringIO
from typing import TYPE_CHECKING, Any

import numpy as np

from twellc.base.threads import PROCESS_WIDE
from twellc.passes.block_profile import BlockProfile
from twellc.plugins.library import COMPRESSIONS, TILE
from twellc.reporting.words import clean, percent, short_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from twellc.benchmarking.result import Standings
    from twellc.training.log import LoggedStep

# What matplotlib writes as colours, and what the page calls them. Lines of blocks run from a first to a last colour.
_INK, _MUTED, _GRID, _HOT, _WARM, _NEVER = (f"#00000{digit}" for digit in range(1, 7))
_VARIABLES = {_INK: "ink", _MUTED: "muted", _GRID: "grid", _HOT: "hot", _WARM: "warm", _NEVER: "never"}
_RAMP = "#0001"
_STEPS = 255
# In units of an SVG's view box; a figure that is a phone's screen wide has pixels of that size.
_WIDTH, _NARROW, _UNIT = 360, 270, 72
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.labelsize": 11,
    "axes.titlesize": 11,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 10,
    "text.color": _INK,
    "axes.labelcolor": _MUTED,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "axes.edgecolor": _GRID,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
}
# Rates that a firing curve is drawn through.
_POINTS = 160
# With this many blocks or more, rows are narrow.
_MANY = 25


def density(names: Sequence[str], blocks: Sequence[BlockProfile], limits: Sequence[float | None]) -> str:
    """Draw the density of each block, and below which one TwELL pays where that is known."""
    densities = [100 * block.density for block in blocks]
    shown = [100 * limit if limit is not None and 0 < limit < 1 else np.nan for limit in limits]
    with _figure("density", _height(names)) as (axes, svg):
        places = _rows(axes, names)
        axes.barh(places, densities, height=0.55, color=_WARM)
        # A limit far to the right would leave no room for the bars.
        right = 1.25 * max([1e-9, *densities, *(each for each in shown if each < 4 * max(densities))])
        shown = [each if each <= right else np.nan for each in shown]
        axes.scatter(shown, places, marker="|", s=120, linewidths=2, color=_HOT, zorder=3)
        for place, value in zip(places, densities, strict=True):
            axes.annotate(
                percent(value / 100),
                (value, place),
                (6, 0),
                textcoords="offset points",
                va="center",
                fontsize=_text_size(names),
            )
        axes.set(xlim=(0, right), xlabel="activations that are not zero, %")
        axes.grid(axis="x")
    return svg[0]


def nonzeros(names: Sequence[str], blocks: Sequence[BlockProfile]) -> str:
    """Draw how many neurons fire for a token, for each block: percentiles on a logarithmic axis."""
    with _figure("nonzeros", _height(names)) as (axes, svg):
        for place, block in zip(_rows(axes, names), blocks, strict=True):
            low, median, high, most = (block.percentile(share) for share in (0.1, 0.5, 0.9, 0.99))
            axes.plot([high, most], [place, place], color=_WARM, linewidth=1.2, solid_capstyle="butt")
            axes.plot([low, high], [place, place], color=_WARM, linewidth=7, alpha=0.45, solid_capstyle="butt")
            axes.plot(median, place, marker="o", markersize=5.5, color=_INK)
            axes.plot(most, place, marker="|", markersize=9, markeredgewidth=1.6, color=_WARM)
            axes.plot(
                block.largest, place, marker="o", markersize=5, markerfacecolor="none", markeredgewidth=1.3, color=_HOT
            )
        axes.set_xscale("symlog", linthresh=1, linscale=0.3)
        largest = max(block.largest for block in blocks)
        ticks = [0, *(10**power for power in range(6) if 10**power <= max(2 * largest, 1))]
        axes.set_xticks(ticks, [short_count(each) for each in ticks])
        axes.set_xlim(-0.15, 1.5 * largest + 1)
        axes.set_xlabel("neurons that fire for a token")
        axes.grid(axis="x")
    return svg[0]


def positions(blocks: Sequence[BlockProfile]) -> str:
    """Draw the density of each block by position in the sequence."""
    found = [block.density_by_position() for block in blocks]
    starts = sorted({first for each in found for first, _, _ in each})
    with _figure("positions", 230) as (axes, svg):
        for index, each in enumerate(found):
            points = [(starts.index(first), 100 * share) for first, _, share in each]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3.5, color=_ramp(index, len(found)))
        axes.set_xticks(range(len(starts)), [short_count(first) for first in starts])
        axes.set(xlabel="position in the sequence, from", ylabel="not zero, %")
        axes.set_ylim(bottom=0)
        axes.grid(axis="y")
    return svg[0]


def tiles(blocks: Sequence[BlockProfile], compressions: Sequence[int]) -> str:
    """Draw the share of tiles in which more than some number of neurons fire, and how many slots tiles can have.

    Args:
        blocks: The blocks.
        compressions: The compression factors that were chosen.
    """
    # Slots, one less than a power of two, are equally far from each other.
    x = np.log2(np.arange(TILE + 1) + 1)
    least = 100.0
    with _figure("tiles", 230) as (axes, svg):
        for index, block in enumerate(blocks):
            over = 100 * (1 - np.cumsum(block.tiles) / block.tiles.sum())
            seen = int(np.flatnonzero(block.tiles)[-1])
            least = min(least, 100 / block.tiles.sum())
            axes.step(x[:seen], over[:seen], where="post", color=_ramp(index, len(blocks)))
        for factor in COMPRESSIONS:
            place, chosen = np.log2(TILE // factor), factor in compressions
            color = _HOT if chosen else _MUTED
            axes.axvline(
                place, color=color, linewidth=1.6 if chosen else 0.8, zorder=1, linestyle="-" if chosen else (0, (3, 3))
            )
            axes.annotate(
                f"{factor}",
                (place, 1),
                (0, 3),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                ha="center",
                color=color,
            )
        axes.set_yscale("log")
        ticks = [TILE // 2**power - 1 for power in range(8, -1, -1)]
        axes.set_xticks([np.log2(each + 1) for each in ticks], [str(each) for each in ticks])
        axes.set(xlim=(0, 8.1), ylim=(max(least, 1e-4), 100))
        axes.set(xlabel="neurons that fire in a tile of 256", ylabel="tiles with more")
        _percent_axis(axes)
        axes.grid(axis="y")
        axes.set_title("compression", loc="left", fontsize=10, color=_MUTED, pad=5)
    return svg[0]


def firing(name: str, block: BlockProfile, hot: int, least: float) -> str:
    """Draw how often each neuron fires, hottest first, with the hot ones and those that never fired marked.

    Args:
        name: What to call the block.
        block: The block.
        hot: How many neurons are hot.
        least: The smallest rate that the axis shows.
    """
    rates = 100 * block.rates[block.order]
    alive = int((rates > 0).sum())
    with _figure(f"firing {name}", 150, _NARROW) as (axes, svg):
        axes.axvspan(0, hot, color=_HOT, alpha=0.16, linewidth=0)
        axes.axvspan(alive, block.d_ff, color=_NEVER, alpha=0.22, linewidth=0)
        if alive:
            even, first = np.linspace(0, alive - 1, _POINTS), np.geomspace(1, alive, _POINTS // 2) - 1
            kept = np.unique(np.concatenate([even, first]).astype(int))
            for part, color in ((kept[kept < hot], _HOT), (kept[kept >= hot], _WARM)):
                axes.plot(part + 0.5, rates[part], color=color, linewidth=2)
        axes.set_yscale("log")
        axes.set(xlim=(0, block.d_ff), ylim=(100 * least, 130))
        axes.set_xticks(_ticks(block.d_ff), [short_count(each) for each in _ticks(block.d_ff)])
        _percent_axis(axes)
        axes.grid(axis="y")
    return svg[0]


def experts(name: str, tokens: Sequence[int], densities: Sequence[float | None]) -> str:
    """Draw how many tokens were sent to each expert of a layer, the busiest first, and its density below.

    Args:
        name: What to call the layer.
        tokens: Tokens that each expert got.
        densities: The share of its activations that are not zero; None of an expert that got no token.
    """
    order = np.argsort(-np.array(tokens), kind="stable")
    even = np.array(tokens) / np.mean(tokens)
    shown = np.array([np.nan if share is None else 100 * share for share in densities])
    with _panels(f"experts {name}", 200, _NARROW, 2) as ((sent, active), svg):
        for axes, title, values in ((sent, "tokens, times an even share", even), (active, "not zero, %", shown)):
            axes.stairs(values[order], fill=True, color=_WARM)
            axes.axvspan(int(np.count_nonzero(tokens)), len(tokens), color=_NEVER, alpha=0.22, linewidth=0)
            axes.set(xlim=(0, len(tokens)), xticks=_ticks(len(tokens)))
            axes.set_ylim(bottom=0)
            axes.locator_params(axis="y", nbins=3)
            axes.grid(axis="y")
            axes.set_title(title, loc="left", fontsize=10, color=_MUTED, pad=4)
        sent.axhline(1, color=_INK, linewidth=1)
        active.set_xlabel("experts, the busiest first")
    return svg[0]


def gains(title: str, tokens: Sequence[int], standings: Sequence[Standings], expected: Mapping[int, float]) -> str:
    """Draw how many times as fast as the fastest dense contestant others are, by the number of tokens in a call.

    Args:
        title: What was measured.
        tokens: Tokens in a call.
        standings: What was measured with each number of tokens.
        expected: What was expected of TwELL, by tokens.
    """
    from matplotlib.ticker import FuncFormatter, NullLocator

    from twellc.benchmarking.result import SHOWN, gains_of

    colors = (_WARM, _HOT, _MUTED, _INK, _MUTED)
    with _figure(f"gains {title}", 240) as (axes, svg):
        axes.axhline(1, color=_MUTED, linewidth=1)
        for (name, labels), color, marker in zip(SHOWN.items(), colors, "osx^v", strict=True):
            points = gains_of(labels, tokens, standings)
            if points:
                axes.plot(*zip(*points, strict=True), marker=marker, markersize=5, color=color, label=name)
        if expected:
            axes.scatter(
                list(expected),
                list(expected.values()),
                marker="D",
                s=34,
                facecolor="none",
                linewidths=1.4,
                edgecolor=_WARM,
                label="twell, expected",
                zorder=3,
            )
        axes.set(xscale="log", xlabel="tokens a call", ylabel="times as fast")
        axes.set_xticks(sorted(set(tokens)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_count(round(value))))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_ylim(bottom=0)
        axes.grid(axis="y")
        axes.legend(loc="best")
    return svg[0]


def training_loss(steps: Sequence[LoggedStep]) -> str:
    """Draw the loss over the steps of a training run, and that on held-out data where it was measured."""
    with _figure("training loss", 230) as (axes, svg):
        axes.plot([each.step for each in steps], [each.loss for each in steps], color=_WARM, marker=_points(steps))
        held_out = [(each.step, each.eval_loss) for each in steps if each.eval_loss is not None]
        if held_out:
            axes.plot(*zip(*held_out, strict=True), marker="o", markersize=4.5, linestyle="none", color=_HOT)
        axes.set(xlabel="steps", ylabel="loss")
        axes.grid(axis="y")
    return svg[0]


def training_density(steps: Sequence[int], blocks: Sequence[Sequence[float]]) -> str:
    """Draw the density of each block over the steps of a training run, on a logarithmic axis."""
    with _figure("training density", 230) as (axes, svg):
        _over_steps(axes, steps, blocks)
        least = min((100 * share for shares in blocks for share in shares if share > 0), default=1.0)
        axes.set_yscale("log")
        axes.set(ylim=(10 ** np.floor(np.log10(least)), 130), ylabel="not zero")
        _percent_axis(axes)
    return svg[0]


def training_dead(steps: Sequence[int], blocks: Sequence[Sequence[float]]) -> str:
    """Draw the share of each block's neurons that did not fire, over the steps of a training run."""
    with _figure("training dead", 230) as (axes, svg):
        _over_steps(axes, steps, blocks)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("never fired, %")
    return svg[0]


def _over_steps(axes: Axes, steps: Sequence[int], blocks: Sequence[Sequence[float]]) -> None:
    for index, shares in enumerate(blocks):
        values = [100 * share for share in shares]
        axes.plot(steps, values, color=_ramp(index, len(blocks)), marker=_points(steps), markersize=3)
    axes.set_xlabel("steps")
    axes.grid(axis="y")


def _points(steps: Sequence[object]) -> str:
    """Return the marker of a line: one of a single point would not be seen."""
    return "o" if len(steps) == 1 else ""


@contextmanager
def _figure(name: str, height: float, width: float = _WIDTH) -> Iterator[tuple[Axes, list[str]]]:
    """Yield axes to draw on, and a list that holds the SVG afterwards."""
    with _panels(name, height, width, 1) as ((axes,), svg):
        yield axes, svg


@contextmanager
def _panels(name: str, height: float, width: float, count: int) -> Iterator[tuple[list[Axes], list[str]]]:
    """Yield as many axes, one below the other, and a list that holds the SVG afterwards."""
    import matplotlib
    from matplotlib.figure import Figure

    svg: list[str] = []
    # The salt keeps names of clipping paths apart: those of all figures live in one page.
    style = {**_STYLE, "svg.hashsalt": clean(name)}
    with PROCESS_WIDE, matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that the font, which the page replaces, lacks
        figure = Figure(figsize=(width / _UNIT, height / _UNIT), layout="constrained")
        panels = list(figure.subplots(count, squeeze=False)[:, 0])
        for axes in panels:
            axes.set_axisbelow(True)
        yield panels, svg
        text = StringIO()
        unsaid = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=unsaid)
    svg.append(_for_page(text.getvalue()))


def _for_page(text: str) -> str:
    """Return the `<svg>` element of a file, with the page's colours, and without names that others may have, too."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    size = re.search(r'viewBox="[^"]*"', text)
    assert size is not None
    opening = f'<svg class="plot" {size[0]} xmlns:xlink="http://www.w3.org/1999/xlink" aria-hidden="true">'
    text = opening + text[text.index(">") + 1 :]
    text = re.sub(r' d="[^"]*"', lambda found: re.sub(r"(\.\d)\d+", r"\1", found[0]), text)
    text = re.sub(_RAMP + "([0-9a-f]{2})", lambda found: _mixed(int(found[1], 16)), text)
    for color, variable in _VARIABLES.items():
        text = text.replace(color, f"var(--{variable})")
    return re.sub(r"\n\s*", " ", text).strip()


def _mixed(step: int) -> str:
    return f"color-mix(in oklab, var(--last) {100 * step / _STEPS:.0f}%, var(--first))"


def _ramp(index: int, count: int) -> str:
    """Return the colour of one of some blocks."""
    return f"{_RAMP}{round(_STEPS * index / max(count - 1, 1)):02x}"


def _height(names: Sequence[str]) -> float:
    return 52 + (24 if len(names) < _MANY else 15) * len(names)


def _text_size(names: Sequence[str]) -> float:
    return 10 if len(names) < _MANY else 9.5


def _rows(axes: Axes, names: Sequence[str]) -> Any:
    """Prepare a row for each block, from the top, and return their places."""
    places = np.arange(len(names))
    axes.set_yticks(places, list(names), fontsize=_text_size(names))
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.spines["left"].set_visible(False)
    return places


def _percent_axis(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.yaxis.set_major_locator(LogLocator(10, numticks=8))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))


def _ticks(d_ff: int) -> list[int]:
    """Return about five numbers of neurons to name on an axis, round ones and the last."""
    step = max(1, d_ff // 4)
    return [*range(0, d_ff - step // 2, step), d_ff]
