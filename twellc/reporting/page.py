"""The page of a report: what is said in it. How it looks is in page.html and page.css."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
from markupsafe import Markup

from twellc.base.files import OutputFiles
from twellc.base.version import __version__
from twellc.benchmarking.plot import require_matplotlib
from twellc.firing.profile import PERCENTILES, SLOTS
from twellc.passes.block_profile import BlockProfile, rate_bound
from twellc.passes.report import Attention, Layer
from twellc.plugins.library import COMPRESSIONS, PLUGIN_NAMES, TILE
from twellc.reporting import figures
from twellc.reporting.sources import Sources
from twellc.reporting.words import clean, count, percent, short_names, times

if TYPE_CHECKING:
    from twellc.benchmarking.result import BenchResult, Standings

# Firing curves of so many blocks are shown at once, those of others on demand.
_SHOWN_CURVES = 8
# Where no hot neurons were decided on, the fewest that have this share of the non-zeros are marked.
_HALF = 0.5
_PLUGINS = dict(zip(("gated", "plain"), PLUGIN_NAMES, strict=True))
_FORMS = {
    "cudnn": "plugin TwellAttention, by cuDNN",
    "operator": "ONNX's Attention",
    "matmul": "products that TensorRT fuses",
    "as written": "as the model has it",
}


@dataclass(frozen=True)
class Stat:
    """A number of the page's head, and what it is."""

    value: str
    label: str


@dataclass(frozen=True)
class Curve:
    """The firing curve of a block: the figure, and what its parts are."""

    module: str
    svg: Markup
    hot: int
    hot_decided: bool
    hot_share: float
    never: int
    d_ff: int


@dataclass(frozen=True)
class Row:
    """A block in the table of decisions.

    Attributes:
        module: Path of its module.
        layer: What became of it; None where nothing says it.
        block: Which of its neurons fire; None where no profile says it.
        measured: How many times as fast as dense it was measured to be by itself; empty where it was not.
    """

    module: str
    layer: Layer | None
    block: BlockProfile | None
    measured: str


@dataclass(frozen=True)
class Step:
    """A block in the drawing of the graph."""

    kind: str
    before: str
    after: str
    plugin: bool
    why: str


@dataclass(frozen=True)
class Stage:
    """Steps of the drawing: those of a parent module, and of those after it that are alike."""

    modules: list[str]
    steps: list[Step]


@dataclass(frozen=True)
class Measured:
    """A contest of `twellc bench`: what it is about, and its figure."""

    title: str
    svg: Markup


def make_page(sources: Sources, output: Path | None, *, overwrite: bool = False) -> str:
    """Return the page of a report, and write it to a file.

    Args:
        sources: What it is made of.
        output: The file; None writes none.
        overwrite: Whether it may replace an existing file.

    Raises:
        UserError: The file cannot be written, or exists; or matplotlib is missing, for a profile or measurements.
    """
    with OutputFiles(overwrite) as outputs:
        if output is not None:
            outputs.check("--output", output)
        if sources.profile is not None or sources.bench is not None:
            require_matplotlib("report")
        page = _render(sources)
        if output is not None:
            outputs.write(output, page)
            outputs.commit()
    return page


def _render(sources: Sources) -> str:
    """Return a page of HTML without scripts that loads nothing."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, finalize=lambda value: clean(value) if type(value) is str else value,
    )  # fmt: skip
    templates.filters |= {"percent": percent, "count": count, "times": times}
    return templates.get_template("page.html").render(_content(sources))


def _content(sources: Sources) -> dict[str, Any]:
    profile, decisions, bench = sources.profile, sources.decisions, sources.bench
    blocks = [] if profile is None else list(profile.blocks.values())
    layers = {layer.module: layer for layer in sources.layers}
    modules = list(layers) or [block.module for block in blocks]
    settings = decisions.settings if decisions else None
    named = [profile and profile.model.name, decisions and decisions.model and decisions.model.name]
    dtypes = [settings and settings.dtype, profile and profile.model.dtype, bench and bench.dtype]
    sayings = [each for each in (profile, decisions, bench) if each is not None]
    expected = [layer.expectation for layer in layers.values() if layer.expectation is not None]
    compressions = _compressions(list(layers.values()), settings.compression if settings else None)
    return {
        "version": __version__,
        "model": next(filter(None, [*named, bench and bench.model]), "a model"),
        "dtype": next(filter(None, dtypes), ""),
        "profile": profile,
        "decisions": decisions,
        "bench": bench,
        "notes": list(dict.fromkeys(note for each in sayings for note in each.notes or ())),
        "warnings": list(dict.fromkeys(text for each in (profile, decisions) if each for text in each.warnings or ())),
        "stats": _stats(sources, blocks),
        "rows": [
            Row(each, layers.get(each), profile.blocks.get(each) if profile else None, _measured_of(each, bench))
            for each in modules
        ],
        "by_block": any(result.by_block for result in bench.results) if bench else False,
        "decided": bool(layers),
        "expected": expected[0] if expected else None,
        "names": short_names([block.module for block in blocks]),
        "percentiles": PERCENTILES,
        "slots": {slots: TILE // (slots + 1) if TILE // (slots + 1) in COMPRESSIONS else None for slots in SLOTS},
        "compressions": compressions,
        "bound": rate_bound(profile.tokens) if profile else 1.0,
        "shown_curves": _SHOWN_CURVES,
        "stages": _stages(list(layers.values()), (decisions and decisions.attention) or []),
        "measured": _measured(sources),
        "figures": _drawn(blocks, layers, compressions),
        "curves": [_curve(block, layers.get(block.module), 0.5 / max(b.tokens for b in blocks)) for block in blocks],
    }


def _stats(sources: Sources, blocks: Sequence[BlockProfile]) -> list[Stat]:
    stats = []
    if blocks:
        cells = sum(block.tokens * block.d_ff for block in blocks)
        stats.append(Stat(percent(sum(block.nonzeros for block in blocks) / cells), "of the activations are not zero"))
        never, neurons = sum(int(block.never.sum()) for block in blocks), sum(block.d_ff for block in blocks)
        stats.append(Stat(percent(never / neurons), f"of the neurons never fired: {count(never)} of {count(neurons)}"))
    if sources.layers:
        chosen = sum(layer.decision == "twell" for layer in sources.layers)
        stats.append(Stat(f"{chosen} of {len(sources.layers)}", "feed-forward blocks run by TwELL"))
    expected = _expected(sources.layers)
    if expected:
        stats.append(_span(expected, "the speed of dense blocks, expected"))
    if sources.bench is not None:
        measured = {
            result.tokens: result.blocks.speed_ups["twell"]
            for result in sources.bench.results if "twell" in result.blocks.speed_ups
        }  # fmt: skip
        if measured:
            stats.append(_span(measured, "the speed of the fastest dense blocks, measured"))
    return stats


def _span(gains: dict[int, float], what: str) -> Stat:
    """Return the range of some gains, by tokens a call."""
    fewest, most = min(gains), max(gains)
    label = f"{what} at {count(fewest)}{f' to {count(most)}' if most > fewest else ''} tokens a call"
    return Stat(_range(gains.values()), label)


def _range(gains: Collection[float]) -> str:
    low, high = min(gains), max(gains)
    return times(high) if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {times(high)}"


def _measured_of(module: str, bench: BenchResult | None) -> str:
    """Say how many times as fast a block was by itself, over all shapes."""
    results = bench.results if bench is not None else []
    gains = [each.gain for result in results for each in result.by_block if each.module == module]
    return _range(gains) if gains else ""


def _expected(layers: Sequence[Layer]) -> dict[int, float]:
    """Return how many times as fast all blocks of TwELL together are expected to be, by tokens, as far as all say it.

    What was assumed, for want of a profile, is left out.
    """
    chosen = [layer.expectation for layer in layers if layer.decision == "twell"]
    known = [each for each in chosen if each is not None and not each.assumed]
    if not known or len(known) < len(chosen):
        return {}
    found = [{time.tokens: time for time in each.times} for each in known]
    return {
        tokens: sum(each[tokens].dense_us for each in found) / sum(each[tokens].twell_us for each in found)
        for tokens in sorted(set.intersection(*map(set, found)))
    }


def _compressions(layers: Sequence[Layer], given: int | None) -> list[int]:
    """Return the compression factors of the blocks that TwELL runs: their own, or else the one that was given."""
    own = {layer.compression or given for layer in layers if layer.decision == "twell"}
    return sorted((factor for factor in own if factor is not None), reverse=True)


def _drawn(blocks: Sequence[BlockProfile], layers: dict[str, Layer], compressions: Sequence[int]) -> dict[str, Markup]:
    """Return the figures of a profile."""
    if not blocks:
        return {}
    names = short_names([block.module for block in blocks]).short
    expectations = [layers[block.module].expectation if block.module in layers else None for block in blocks]
    limits = [None if each is None else each.pays_below for each in expectations]
    drawn = {
        "density": figures.density(names, blocks, limits),
        "nonzeros": figures.nonzeros(names, blocks),
        "positions": figures.positions(blocks) if any(block.positions.any() for block in blocks) else "",
        "tiles": figures.tiles(blocks, compressions),
    }
    return {name: Markup(svg) for name, svg in drawn.items()}


def _curve(block: BlockProfile, layer: Layer | None, least: float) -> Curve:
    decided = layer is not None and layer.hot > 0
    hot = layer.hot if layer is not None and decided else _carrying(block, _HALF)
    svg = Markup(figures.firing(block.module, block, hot, least))
    return Curve(block.module, svg, hot, decided, block.carried_by(hot), int(block.never.sum()), block.d_ff)


def _carrying(block: BlockProfile, share: float) -> int:
    """Return how few neurons have a share of the non-zeros."""
    carried = np.cumsum(block.firing[block.order])
    return int(np.searchsorted(carried, share * carried[-1])) + 1 if block.nonzeros else 0


def _measured(sources: Sources) -> list[Measured]:
    if sources.bench is None:
        return []
    results = sources.bench.results
    tokens = [each.tokens for each in results]
    expected = {count: gain for count, gain in _expected(sources.layers).items() if min(tokens) <= count <= max(tokens)}
    contests: tuple[tuple[str, list[Standings], dict[int, float]], ...] = (
        ("the rewritten feed-forward blocks alone", [each.blocks for each in results], expected),
        ("the whole model", [each.model for each in results], {}),
    )
    return [Measured(title, Markup(figures.gains(title, tokens, own, hoped))) for title, own, hoped in contests]


def _stages(layers: Sequence[Layer], attention: Sequence[Attention]) -> list[Stage]:
    """Return the drawing of the graph: blocks by their parent module, in the order of the model."""
    parents: dict[str, list[Step]] = {layer.module.rpartition(".")[0]: [] for layer in layers}
    for block in attention:
        step = Step("attention", "", _FORMS.get(block.form, block.form), block.form == "cudnn", block.reason)
        parents.setdefault(_owner(block.module, parents), []).append(step)
    for layer in layers:
        parents[layer.module.rpartition(".")[0]].append(_step(layer))
    stages = []
    for steps, alike in groupby(parents.items(), key=lambda item: item[1]):
        stages.append(Stage([parent for parent, _ in alike], steps))
    return stages


def _owner(module: str, parents: dict[str, list[Step]]) -> str:
    """Return the parent module of a feed-forward block that an attention block is beside, or its own parent."""
    path = module
    while path:
        path = path.rpartition(".")[0]
        if path in parents:
            return path
    return module.rpartition(".")[0]


def _step(layer: Layer) -> Step:
    gate = f"gate → {layer.activation} ⊙ up" if layer.variant == "gated" else f"up → {layer.activation}"
    residual = " + residual" if layer.residual else ""
    before = f"{gate} → down{residual}, {layer.d_model} → {layer.d_ff} → {layer.d_out}"
    if layer.decision != "twell":
        return Step("feed-forward", before, "dense, as the model has it", False, layer.reason)
    hot = f", {layer.hot} hot neurons dense" if layer.hot else ""
    kept = layer.d_ff if layer.neurons is None else layer.neurons.kept
    left = f", {kept} of {layer.d_ff} neurons left" if kept < layer.d_ff else ""
    return Step("feed-forward", before, f"plugin {_PLUGINS.get(layer.variant, layer.variant)}{hot}{left}", True, "")
