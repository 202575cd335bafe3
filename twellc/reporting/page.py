"""The page of a report: what is said in it. How it looks is in page.html and page.css."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2
import numpy as np
from markupsafe import Markup

from twellc.base.files import OutputFiles
from twellc.base.version import __version__
from twellc.benchmarking.plot import require_matplotlib
from twellc.firing.profile import PERCENTILES, SEQUENCES, SLOTS, FiringProfile
from twellc.passes.block_profile import BlockProfile, rate_bound
from twellc.passes.report import Attention, Layer, Linear
from twellc.plugins.library import BLOCK_NAMES, COMPRESSIONS, LINEAR_NAME, TILE
from twellc.reporting import figures
from twellc.reporting.sources import Sources
from twellc.reporting.words import clean, count, percent, short_names, times

if TYPE_CHECKING:
    from twellc.benchmarking.result import BenchResult, Standings
    from twellc.training.log import TrainingLog

# What the template reads of a row, a figure or a step.
Fields = dict[str, Any]
# The number of blocks that are shown at once, others on demand: rows, firing curves, and stages of the graph.
_SHOWN = 8
# The number of warnings, and of notes.
_SHOWN_SAYINGS = 4
# The number of stretches of blocks that are named in a row which stands for them.
_NAMED_STRETCHES = 6
# Where no hot neurons were decided on, the fewest that have this share of the non-zeros are marked.
_HALF = 0.5
# Contestants of the whole model.
TWELL_MODELS = ("twell eager", "twell compiled")
_PLUGINS = dict(zip(("gated", "plain"), BLOCK_NAMES, strict=True))
_FORMS = {
    "cudnn": "plugin TwellAttention, by cuDNN",
    "operator": "ONNX's Attention",
    "matmul": "products that TensorRT fuses",
    "as written": "as the model has it",
}


class Stat(NamedTuple):
    """A number of the page's head, and what it is."""

    value: str
    label: str


@dataclass(frozen=True)
class _Member:
    """A block.

    Attributes:
        module: Path of its module.
        place: Its place in the order of the model.
        layer: What became of it; None where nothing says it.
        block: Which of its neurons fire; None where no profile says it.
        gains: How many times as fast as dense it was measured to be by itself, at each shape.
    """

    module: str
    place: int
    layer: Layer | None
    block: BlockProfile | None
    gains: list[float]

    @property
    def kind(self) -> tuple[object, ...]:
        """What blocks of one row have in common."""
        form = self.layer or self.block
        assert form is not None
        sizes = (self.layer.d_model, self.layer.d_out, self.layer.decision) if self.layer else ()
        refusal = self.layer.reason if self.layer and not self.layer.matched else ""
        return form.variant, form.activation, form.d_ff, self.experts, *sizes, refusal

    @property
    def experts(self) -> int:
        """How many experts it is; 0 of a block that all tokens go through."""
        if self.layer is not None and self.layer.experts:
            return self.layer.experts
        return 0 if self.block is None or self.block.experts is None else len(self.block.experts)


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
        if sources.profile is not None or sources.bench is not None or sources.training is not None:
            require_matplotlib("report")
        page = _render(sources)
        if output is not None:
            outputs.write(output, page)
            outputs.commit()
    return page


def _render(sources: Sources) -> str:
    """Return a page of HTML without scripts that loads nothing."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: clean(value) if type(value) is str else value,
    )
    templates.filters |= {"percent": percent, "count": count, "times": times}
    return templates.get_template("page.html").render(_content(sources))


def _content(sources: Sources) -> dict[str, Any]:
    profile, decisions, bench = sources.profile, sources.decisions, sources.bench
    blocks = [] if profile is None else list(profile.blocks.values())
    experts = _experts(profile) if profile else []
    layers = {layer.module: layer for layer in sources.layers}
    modules = list(layers) or [block.module for block in blocks]
    members = [
        _Member(each, place, layers.get(each), profile.blocks.get(each) if profile else None, _gains_of(each, bench))
        for place, each in enumerate(modules)
    ]
    names = short_names(modules)
    settings = decisions.settings if decisions else None
    training = sources.training
    named = [
        profile and profile.model.name,
        decisions and decisions.model and decisions.model.name,
        bench and bench.model,
        training and training.model,
    ]
    dtypes = [settings and settings.dtype, profile and profile.model.dtype, bench and bench.dtype]
    sayings = [each for each in (profile, decisions, bench) if each is not None]
    expected = [layer.expectation for layer in layers.values() if layer.expectation is not None]
    compressions = _compressions(list(layers.values()), settings.compression if settings else None)
    return {
        "version": __version__,
        "model": next(filter(None, named), "a model"),
        "dtype": next(filter(None, dtypes), ""),
        "profile": profile,
        "decisions": decisions,
        "bench": bench,
        "training": training,
        "training_figures": _training_figures(training) if training else {},
        "notes": list(dict.fromkeys(note for each in sayings for note in each.notes or ())),
        "warnings": list(dict.fromkeys(text for each in (profile, decisions) if each for text in each.warnings or ())),
        "answers": _answers(sources, blocks, experts, names.short),
        "rows": [_row([each], names.short) for each in members],
        "groups": _groups(members, names.short) if len(members) > _SHOWN else [],
        "all_names": names,
        "by_block": any(result.by_block for result in bench.results) if bench else False,
        "shape_sums": _shape_sums(bench, dict(zip(modules, names.short, strict=True))) if bench else [],
        "decided": bool(layers),
        "expected": expected[0] if expected else None,
        "names": short_names([block.module for block in blocks]),
        "percentiles": PERCENTILES,
        "slots": {slots: TILE // (slots + 1) if TILE // (slots + 1) in COMPRESSIONS else None for slots in SLOTS},
        "compressions": compressions,
        "bound": rate_bound(profile.tokens) if profile else 1.0,
        "shown": _SHOWN,
        "shown_sayings": _SHOWN_SAYINGS,
        "stages": _stages(
            list(layers.values()),
            (decisions and decisions.attention) or [],
            (decisions and decisions.linear) or [],
        ),
        "measured": _measured(sources),
        "figures": _drawn(blocks, layers, compressions),
        "curves": _curves(_without_experts(blocks), layers),
        "experts": experts,
        "sequences": SEQUENCES,
    }


def _without_experts(blocks: Sequence[BlockProfile]) -> list[BlockProfile]:
    """Return the blocks that all tokens go through."""
    return [block for block in blocks if block.experts is None]


def _answers(
    sources: Sources, blocks: Sequence[BlockProfile], experts: Sequence[Fields], short: Sequence[str]
) -> list[Fields]:
    """Say in a few numbers whether the model is sparse, what was done, and what is gained."""
    trained, done, gained = [], [], []
    if sources.training is not None:
        first, last = sources.training.steps[0], sources.training.steps[-1]
        trained.append(
            Stat(f"{last.loss:.3g}", f"loss at step {count(last.step)}, {first.loss:.3g} at {count(first.step)}")
        )
        before, after = (percent(_mean(step.density)) for step in (first, last))
        trained.append(Stat(after, f"of the activations are not zero, {before} at step {count(first.step)}"))
        trained.append(Stat(percent(_mean(last.dead)), "of the neurons did not fire in the last steps"))
    if sources.layers:
        chosen = [layer for layer in sources.layers if layer.decision == "twell"]
        done.append(Stat(f"{len(chosen)} of {len(sources.layers)}", "feed-forward blocks run by TwELL"))
        dense = [place for place, layer in enumerate(sources.layers) if layer.decision != "twell"]
        if chosen and dense:
            done.append(Stat(str(len(dense)), f"left dense: {_stretches(dense, short)}"))
        hot = sum(layer.hot > 0 for layer in chosen)
        if hot:
            done.append(Stat(str(hot), "with their hot neurons as a dense product"))
        removed = sum(layer.neurons.dead for layer in chosen if layer.neurons is not None)
        if removed:
            done.append(Stat(count(removed), "neurons removed that never fired"))
    if sources.bench is not None:
        from twellc.benchmarking.result import gains_of

        results = sources.bench.results
        tokens = [result.tokens for result in results]
        contests = (
            ("of the fastest dense blocks", [each.blocks for each in results], ("twell",)),
            ("of the fastest dense model", [each.model for each in results], TWELL_MODELS),
        )
        for what, standings, labels in contests:
            measured = gains_of(labels, tokens, standings)
            if measured:
                gained.append(_span(dict(measured), f"the speed {what}, measured"))
    expected = _expected(sources.layers)
    if expected:
        gained.append(_span(expected, "the speed of dense blocks, expected"))
    if experts:
        gains = [gain for each in experts for gain in each["gain_by_bytes"].values()]
        what = f"fewer bytes of the experts to read in a step of {SEQUENCES[0]} to {SEQUENCES[-1]} sequences"
        gained.append(Stat(_range(gains), f"{what}, by these counts; no time was measured"))
    asked = (
        ("How did it train?", trained),
        ("Is it sparse?", _sparse(blocks, experts)),
        ("What was done?", done),
        ("What is gained?", gained),
    )
    return [{"question": question, "stats": stats} for question, stats in asked if stats]


def _sparse(blocks: Sequence[BlockProfile], experts: Sequence[Fields]) -> list[Stat]:
    """Say in a few numbers how sparse blocks are."""
    found = []
    if blocks:
        cells = sum(block.tokens * block.d_ff for block in blocks)
        density = sum(block.nonzeros for block in blocks) / cells
        each = f", {_range([block.density for block in blocks], percent)} by block" if len(blocks) > 1 else ""
        found.append(Stat(percent(density), f"of the activations are not zero{each}"))
    ordinary = _without_experts(blocks)
    if ordinary:
        never, neurons = sum(int(block.never.sum()) for block in ordinary), sum(block.d_ff for block in ordinary)
        found.append(Stat(percent(never / neurons), f"of the neurons never fired: {count(never)} of {count(neurons)}"))
    if experts:
        idle, total = sum(each["idle"] for each in experts), sum(len(each["tokens"]) for each in experts)
        found.append(Stat(f"{count(idle)} of {count(total)}", "experts got no token"))
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _span(gains: dict[int, float], what: str) -> Stat:
    """Return the range of some gains, by tokens a call."""
    fewest, most = min(gains), max(gains)
    label = f"{what} at {count(fewest)}{f' to {count(most)}' if most > fewest else ''} tokens a call"
    return Stat(_range(gains.values()), label)


def _range(values: Collection[float], write: Callable[[float], str] = times) -> str:
    """Write the range of some values: a unit stands behind the second alone."""
    low, high = write(min(values)), write(max(values))
    if low == high:
        return high
    number, space, unit = low.rpartition("\N{NARROW NO-BREAK SPACE}" if write is times else " ")
    return f"{number if space and high.endswith(unit) else low} to {high}"


def _gains_of(module: str, bench: BenchResult | None) -> list[float]:
    """Return how many times as fast a block was by itself, at each shape."""
    results = bench.results if bench is not None else []
    return [each.gain for result in results for each in result.by_block if each.module == module]


# ---- rows of blocks ----


def _groups(members: Sequence[_Member], short: Sequence[str]) -> list[Fields]:
    """Return a row for all blocks that are alike, in the order of the first of each."""
    groups: dict[tuple[object, ...], list[_Member]] = {}
    for member in members:
        groups.setdefault(member.kind, []).append(member)
    return [_row(group, short) for group in groups.values()]


def _row(members: Sequence[_Member], short: Sequence[str]) -> Fields:
    """Return the row of one block, or of several of one kind, in words; what is not known is empty.

    Args:
        members: The blocks.
        short: Names of all blocks.
    """
    first, layer, form = members[0], members[0].layer, members[0].layer or members[0].block
    assert form is not None
    blocks = [member.block for member in members if member.block is not None]
    expected = [each.layer.expectation for each in members if each.layer is not None and each.layer.expectation]
    gains = [gain for member in members for gain in member.gains]
    alone = len(members) == 1
    runs = [each.layer.short_run for each in members if each.layer is not None and each.layer.short_run]
    basis = f"density of {runs[0].inputs}" if runs else "density assumed"
    assumed = f" ({basis})" if any(each.assumed for each in expected) else ""
    ordinary = _without_experts(blocks)
    never = _range([each.never.mean() for each in ordinary], percent) if ordinary else ""
    if alone and ordinary:
        never = f"{count(int(ordinary[0].never.sum()))} of {count(form.d_ff)}"
    return {
        "module": first.module if alone else f"{len(members)} blocks",
        "names": "" if alone else _stretches([member.place for member in members], short),
        "twell": layer is not None and layer.decision == "twell",
        "density": _range([each.density for each in blocks or runs], percent) if blocks or runs else "",
        "never": never,
        "expected": f"{_range([each.gain for each in expected])}{assumed}" if expected else "",
        "pays_below": _range([each.pays_below for each in expected], _limit) if expected else "",
        "measured": _range(gains) if gains else "",
        "form": f"{form.variant}, {form.activation}{f', {first.experts} experts' if first.experts else ''}",
        "sizes": f"{layer.d_model} → {layer.d_ff}" if layer else "",
        "why": _why(members, short),
    }


def _why(members: Sequence[_Member], short: Sequence[str]) -> str:
    """Say why blocks are what they became; where their reasons differ, which of the blocks stand out."""
    reasons = {member.layer.reason for member in members if member.layer is not None}
    if len(reasons) < 2:
        return next(iter(reasons), "")

    def named(member: _Member, value: str) -> str:
        return f"{short[member.place]} ({value})"

    parts = []
    if members[0].layer is not None and members[0].layer.decision != "twell":
        chosen = max(members, key=_density)
        assert chosen.layer is not None
        return f"such as {short[chosen.place]}: {chosen.layer.reason}"
    gain = {member.module: _gain(member) for member in members}
    known = [member for member in members if gain[member.module]]
    if known:
        least, most = (pick(known, key=lambda member: gain[member.module]) for pick in (min, max))
        parts.append(
            f"gains least: {named(least, times(gain[least.module]))}, most: {named(most, times(gain[most.module]))}"
        )
    seen = [member for member in members if member.block is not None]
    if seen:
        densest = max(seen, key=_density)
        parts.append(f"densest: {named(densest, percent(_density(densest)))}")
    return "; ".join(parts)


def _gain(member: _Member) -> float:
    """Return what a block gains at least, as measured or else as expected; 0 where nothing says it."""
    expectation = member.layer.expectation if member.layer is not None else None
    return min(member.gains, default=expectation.gain if expectation is not None else 0.0)


def _density(member: _Member) -> float:
    return 0.0 if member.block is None else member.block.density


def _limit(density: float) -> str:
    return "any" if density == 1 else "none" if density == 0 else percent(density)


def _stretches(places: Sequence[int], short: Sequence[str]) -> str:
    """Name blocks at some places in the order of the model, by the first and the last of each stretch."""
    found: list[list[int]] = []
    for place in places:
        if found and place == found[-1][-1] + 1:
            found[-1].append(place)
        else:
            found.append([place])
    words = [short[each[0]] if len(each) == 1 else f"{short[each[0]]} to {short[each[-1]]}" for each in found]
    others = sum(map(len, found[_NAMED_STRETCHES:]))
    return ", ".join(words[:_NAMED_STRETCHES]) + (f" and {others} others" if others else "")


def _shape_sums(bench: BenchResult, short: dict[str, str]) -> list[Fields]:
    """Sum up what blocks took by themselves, at each shape where they were timed."""
    found = []
    for result in bench.results:
        own = result.by_block
        if own:
            least, most = (
                f"{short.get(each.module, each.module)} ({times(each.gain)})"
                for each in (pick(own, key=lambda block: block.gain) for pick in (min, max))
            )
            dense_us, twell_us = sum(each.dense_us for each in own), sum(each.twell_us for each in own)
            sums = {"dense_us": dense_us, "twell_us": twell_us}
            found.append({"result": result, "least": least, "most": most, **sums})
    return found


# ---- figures, and the graph ----


def _expected(layers: Sequence[Layer]) -> dict[int, float]:
    """Return how many times as fast all blocks of TwELL together are expected to be, by tokens, as far as all say it.

    What rests on a short run or on what was assumed, for want of a profile, is left out.
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
    ordinary = _without_experts(blocks)
    drawn = {
        "density": figures.density(names, blocks, limits),
        "nonzeros": figures.nonzeros(names, blocks),
        "positions": figures.positions(blocks) if any(block.positions.any() for block in blocks) else "",
        "tiles": figures.tiles(ordinary, compressions) if ordinary else "",
    }
    return {name: Markup(svg) for name, svg in drawn.items()}


def _training_figures(log: TrainingLog) -> dict[str, Markup]:
    """Return the figures of a training run."""
    steps = [each.step for each in log.steps]
    density = list(zip(*(each.density for each in log.steps), strict=True))
    dead = list(zip(*(each.dead for each in log.steps), strict=True))
    drawn = {
        "loss": figures.training_loss(log.steps),
        "density": figures.training_density(steps, density),
        "dead": figures.training_dead(steps, dead),
    }
    return {name: Markup(svg) for name, svg in drawn.items()}


def _curves(blocks: Sequence[BlockProfile], layers: dict[str, Layer]) -> list[Fields]:
    """Return the firing curves of blocks, with axes that begin alike."""
    return [_curve(block, layers.get(block.module), 0.5 / max(each.tokens for each in blocks)) for block in blocks]


def _curve(block: BlockProfile, layer: Layer | None, least: float) -> Fields:
    """Return the firing curve of a block: the figure, and what its parts are."""
    decided = layer is not None and layer.hot > 0
    hot = layer.hot if layer is not None and decided else _carrying(block, _HALF)
    svg = Markup(figures.firing(block.module, block, hot, least))
    return {
        "module": block.module,
        "svg": svg,
        "hot": hot,
        "hot_decided": decided,
        "hot_share": block.carried_by(hot),
        "never": int(block.never.sum()),
        "d_ff": block.d_ff,
    }


def _experts(profile: FiringProfile) -> list[Fields]:
    """Return the experts of each layer: the figure, and the numbers that the profile's JSON has."""
    statistics: Any = profile.to_json()["blocks"]
    found = []
    for block in statistics:
        if "experts" in block:
            module, own = block["module"], block["experts"]
            fields = {
                "module": module,
                "density": block["density"],
                "tokens": own["tokens"],
                "each": own["density"],
                "range": _range([share for share in own["density"] if share is not None], percent),
                "idle": own["tokens"].count(0),
                "busiest": max(own["tokens"]) * len(own["tokens"]) / sum(own["tokens"]),
                "gain_by_bytes": own["gain_by_bytes"],
                "svg": Markup(figures.experts(module, own["tokens"], own["density"])),
            }
            found.append(fields)
    return found


def _carrying(block: BlockProfile, share: float) -> int:
    """Return how few neurons have a share of the non-zeros."""
    carried = np.cumsum(block.firing[block.order])
    return int(np.searchsorted(carried, share * carried[-1])) + 1 if block.nonzeros else 0


def _measured(sources: Sources) -> list[Fields]:
    if sources.bench is None:
        return []
    results = sources.bench.results
    tokens = [each.tokens for each in results]
    expected = {count: gain for count, gain in _expected(sources.layers).items() if min(tokens) <= count <= max(tokens)}
    contests: tuple[tuple[str, list[Standings], dict[int, float]], ...] = (
        ("the rewritten feed-forward blocks alone", [each.blocks for each in results], expected),
        ("the whole model", [each.model for each in results], {}),
    )
    return [{"title": title, "svg": Markup(figures.gains(title, tokens, own, hoped))} for title, own, hoped in contests]


def _stages(layers: Sequence[Layer], attention: Sequence[Attention], linear: Sequence[Linear]) -> list[Fields]:
    """Return the drawing of the graph: blocks by their parent module, in the order of the model."""
    parents: dict[str, list[Fields]] = {layer.module.rpartition(".")[0]: [] for layer in layers}
    plugins = [each for each in linear if each.decision == "twell"]

    def draw_linear(residual: bool) -> None:
        for each in plugins:
            if each.residual == residual:
                parents.setdefault(_owner(each.modules[0], parents), []).append(_linear_step(each))

    draw_linear(residual=False)
    for block in attention:
        after, plugin = _FORMS.get(block.form, block.form), block.form == "cudnn"
        step = {"kind": "attention", "before": "", "after": after, "plugin": plugin, "why": block.reason}
        parents.setdefault(_owner(block.module, parents), []).append(step)
    draw_linear(residual=True)
    for layer in layers:
        parents[layer.module.rpartition(".")[0]].append(_step(layer))
    stages = []
    for steps, alike in groupby(parents.items(), key=lambda item: item[1]):
        stages.append({"modules": [parent for parent, _ in alike], "steps": steps})
    return stages


def _owner(module: str, parents: dict[str, list[Fields]]) -> str:
    """Return the parent module of a feed-forward block that an attention block is beside, or its own parent."""
    path = module
    while path:
        path = path.rpartition(".")[0]
        if path in parents:
            return path
    return module.rpartition(".")[0]


def _linear_step(layer: Linear) -> Fields:
    norm = "" if layer.norm == "none" else f"{layer.norm} norm → "
    names = " | ".join(module.rpartition(".")[2] for module in layer.modules)
    ends = " + residual" * layer.residual + " → argmax" * layer.choose
    before = f"{norm}{names}{ends}, {layer.d_in} → {' | '.join(map(str, layer.widths))}"
    return {"kind": "linear", "before": before, "after": f"plugin {LINEAR_NAME}", "plugin": True, "why": ""}


def _step(layer: Layer) -> Fields:
    gate = f"gate → {layer.activation} ⊙ up" if layer.variant == "gated" else f"up → {layer.activation}"
    norm = "" if layer.norm == "none" else f"{layer.norm} norm → "
    residual = " + residual" if layer.residual else ""
    before = f"{norm}{gate} → down{residual}, {layer.d_model} → {layer.d_ff} → {layer.d_out}"
    plugin = layer.decision == "twell"
    hot = f", {layer.hot} hot neurons dense" if layer.hot else ""
    kept = layer.d_ff if layer.neurons is None else layer.neurons.kept
    left = f", {kept} of {layer.d_ff} neurons left" if kept < layer.d_ff else ""
    after = f"plugin {_PLUGINS[layer.variant]}{hot}{left}" if plugin else "dense, as the model has it"
    return {
        "kind": "feed-forward",
        "before": before,
        "after": after,
        "plugin": plugin,
        "why": "" if plugin else layer.reason,
    }
