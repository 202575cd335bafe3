"""Run a model once, on few tokens, and count how many neurons of its blocks are active.

Nobody has asked for this run, so it is bounded: by sizes, before anything is computed, and by the clock between two
nodes of the graph. Sizes alone say of each node how many products it takes and how many bytes it holds; fewer tokens
take less. A node that takes too much even of the fewest tokens ends the run, and so does one that sizes say nothing of.
The model's example inputs are not looked at.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from twellc.base.caches import TOKEN_COUNT, WRITE_INDEX
from twellc.base.errors import UserError, first_line
from twellc.firing.costs import Cost, cost_of
from twellc.firing.measure import ProgramObserver, last_uses
from twellc.loaders.loaded import LoadedModel
from twellc.passes.graph.program import stored_tensors, tensor_of, user_inputs
from twellc.passes.match.activations import packet
from twellc.passes.match.linear import CASTS, VIEWS
from twellc.passes.pipeline import Rewritten
from twellc.passes.report import ShortRun
from twellc.passes.sizes.conditions import fitting_sizes
from twellc.passes.sizes.inputs import InputSpec, program_inputs, size_of
from twellc.samples.samples import Limits, Sample
from twellc.samples.tokenizer import load_tokenizer

# Sequences of token ids are this long: the longest that keeps to the limits.
_TOKENS = (128, 32, 8)
# A node starts only so many seconds after the run has started, ...
_SECONDS = 15.0
# ... and computes no more products than the slowest processor that transformers run on computes in five.
_PRODUCTS = 5_000_000_000
_ALL_PRODUCTS = 100_000_000_000
# What nodes may hold at a time: as many bytes as the model's weights, of which compile makes copies, between these.
_LEAST_BYTES, _MOST_BYTES = 32 << 20, 256 << 20

_TEXT = """\
The harbour lies on the north side of the bay, where the river has brought sand for as long as anyone remembers. Every \
spring the council sends a boat to measure the channel, and every autumn the fishermen say that it was measured in the \
wrong place. In 1987 a storm moved the bank by 40 metres within one night; the old lighthouse keeper wrote it down, \
with the hour and the wind, in the same book in which his father had written about the ice of 1929.

def depth(sounding, tide):
    \"\"\"Return the depth below chart datum, in metres.\"\"\"
    return round(sounding - tide, 1)

What does the chart say today? It says 3.5 m at low water, which is enough for most boats, but not for the ferry.
"""


def run_shortly(model: LoadedModel, passed: Rewritten) -> tuple[dict[str, ShortRun], str]:
    """Return how many neurons were active, by module, and why that is not known of other blocks; empty if it is of all.

    Args:
        model: The model.
        passed: Its program, in which blocks are found.
    """
    started = time.monotonic()
    blocks = [block for block in passed.blocks if not block.refusal]
    if not blocks:
        return {}, ""
    program = passed.program
    observer = ProgramObserver(program, blocks, torch.device("cpu"))
    allowed = min(max(_size_of_weights(program), _LEAST_BYTES), _MOST_BYTES)
    inputs = _Inputs(model, program)
    for sizes in inputs.candidates():
        end, why = _end(observer.nodes, sizes, allowed)
        if end is None:
            break

    def before(node: Node) -> None:
        if end is not None and node.name == end.name:
            raise _EndedError(why)
        if time.monotonic() - started > _SECONDS:
            raise _EndedError("it takes too long")

    why_not = ""
    try:
        sample, named = inputs.sample(sizes)
        observer.run(sample, {}, "a short run", before)
    except _EndedError as ended:
        why_not = ended.why
    except UserError as error:
        return {}, first_line(error)
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as error:  # torch's own
        return {}, f"the model fails on {named} ({first_line(error)})"
    runs = {}
    for counter in observer.counters.values():
        tokens = int(counter.tokens)
        if tokens and not counter.nan:
            found = counter.profile()
            runs[found.module] = ShortRun(round(found.density, 7), tokens, named)
    return runs, why_not


class _EndedError(Exception):
    """The run has ended, and why: torch.fx adds to the text of an error that passes through it."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


# ---- bounds ----


def _end(nodes: list[Node], sizes: Mapping[str, int], allowed: int) -> tuple[Node | None, str]:
    """Return the first node that cannot be run within bounds, and why; None where all can."""
    memory = _Memory(nodes)
    products = 0
    for node in nodes:
        cost = cost_of(node, sizes)
        if cost is None:
            return node, f"how much {node.target} computes is not known beforehand"
        products += cost.products
        if cost.products > _PRODUCTS or products > _ALL_PRODUCTS:
            return node, "it takes too long"
        if memory.taken_by(node, cost) > allowed:
            return node, "it takes too much memory"
    return None, ""


class _Memory:
    """What results take while they are needed: a view keeps what it is a view of."""

    def __init__(self, nodes: list[Node]) -> None:
        self._going: dict[Node, list[Node]] = {}
        for value, user in last_uses(nodes).items():
            self._going.setdefault(user, []).append(value)
        self._holds: dict[Node, set[Node]] = {}  # by node that is needed yet: results that it is, or is a view of
        self._bytes: dict[Node, int] = {}

    def taken_by(self, node: Node, cost: Cost) -> int:
        """Return how many bytes are taken while a node runs, the next one; then let go of what is not needed."""
        views = (self._holds.get(each, set()) for each in node.all_input_nodes) if cost.is_view else ()
        self._holds[node] = {node}.union(*views)
        self._bytes[node] = cost.bytes
        held = set[Node]().union(*self._holds.values())
        for value in self._going.get(node, ()):
            self._holds.pop(value, None)
        return sum(self._bytes[each] for each in held) + cost.within


def _size_of_weights(program: ExportedProgram) -> int:
    return sum(tensor_of(program, name).nbytes for name in stored_tensors(program).values())


# ---- inputs ----


class _Inputs:
    """What a model is run on."""

    def __init__(self, model: LoadedModel, program: ExportedProgram) -> None:
        self._model = model
        self._inputs = program_inputs(program)
        self._names = {spec.name: model.input_names.get(spec.name, spec.name) for spec in self._inputs.specs}
        self._tables = {node.name: rows for node in user_inputs(program) if (rows := _rows_of_table(program, node))}

    def candidates(self) -> Iterator[dict[str, int]]:
        """Yield values of the symbols in shapes, from the longest sequences to the shortest."""
        ranges = Limits(self._inputs, None, self._model.vocabulary).ranges
        seen = []
        for tokens in _TOKENS:
            wanted = {symbol: min(self._inputs.hints[symbol], tokens) for symbol in ranges}
            for spec in filter(self._holds_ids, self._inputs.specs):
                for dim, size in zip(spec.shape, (1, tokens), strict=True):
                    wanted |= dict.fromkeys(map(str, getattr(dim, "free_symbols", ())), size)
            wanted = {symbol: min(max(wanted[symbol], low), high) for symbol, (low, high) in ranges.items()}
            sizes = fitting_sizes(self._inputs.conditions, ranges, wanted) or wanted
            if sizes not in seen:
                seen.append(sizes)
                yield sizes

    def sample(self, sizes: Mapping[str, int]) -> tuple[Sample, str]:
        """Return the inputs at sizes of symbols, and what they are."""
        generator = torch.Generator().manual_seed(0)
        named = "random numbers"
        sample = {}
        shapes = {spec.name: tuple(size_of(dim, sizes) for dim in spec.shape) for spec in self._inputs.specs}
        tokens = next((shapes[spec.name][1] for spec in self._inputs.specs if self._holds_ids(spec)), 0)
        text = self._text(tokens)
        for spec in self._inputs.specs:
            name, shape = self._names[spec.name], shapes[spec.name]
            rows = self._model.vocabulary if self._holds_ids(spec) else None
            rows = rows or self._tables.get(spec.name)
            if spec.dtype.is_floating_point:
                empty = self._model.cache is not None
                value = torch.zeros(1).expand(shape) if empty else torch.randn(shape, generator=generator)
            elif name in (WRITE_INDEX, TOKEN_COUNT) and self._model.cache is not None:
                value = torch.full(shape, tokens if name == TOKEN_COUNT else 0)
            elif self._holds_ids(spec) and len(text) >= shape[1]:
                value, named = torch.tensor(text[: shape[1]]).expand(shape), "a sample text"
            elif rows:
                value, named = torch.randint(rows, shape, generator=generator), "random tokens"
            else:
                value = torch.ones(1).expand(shape)  # a mask
            sample[spec.name] = value.to(spec.dtype)
        return sample, named

    def _holds_ids(self, spec: InputSpec) -> bool:
        return self._names[spec.name].endswith("input_ids") and len(spec.shape) == 2

    def _text(self, tokens: int) -> list[int]:
        """Return the first token ids of the sample text; none where the model has no tokenizer that knows it."""
        vocabulary = self._model.vocabulary
        if vocabulary is None or not tokens or not self._model.path.is_dir():
            return []
        try:
            ids = load_tokenizer(self._model.path, vocabulary)(_TEXT)[:tokens]
        except UserError:
            return []
        return ids if ids and max(ids) < vocabulary else []


def _rows_of_table(program: ExportedProgram, node: Node) -> int:
    """Return how many rows the table has that an input is an index into; 0 where it is none."""
    for user in node.users:
        if packet(user) is torch.ops.aten.embedding and user.args[1] is node:
            return int(user.all_input_nodes[0].meta["val"].shape[0])
        rows = _rows_of_table(program, user) if packet(user) in CASTS | VIEWS else 0
        if rows:
            return rows
    return 0
