"""Run a program, and count which neurons of its feed-forward blocks fire."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.export.passes import move_to_device_pass
from torch.fx import Interpreter, Node

from twellc.firing.counter import FiringCounter, position_bins, refuse_nan
from twellc.passes.block_profile import BlockProfile
from twellc.passes.graph.program import editable, tensor_of, user_inputs
from twellc.passes.match.find_ffn import FfnBlock
from twellc.samples.samples import Sample


@dataclass(frozen=True)
class _Places:
    """Which rows of a block's tensors [rows, d_ff] are tokens, and where these stand; int64 [tokens] each.

    Attributes:
        rows: The rows; None for all.
        bins: The bin of each token's position; None where positions are not known.
    """

    rows: torch.Tensor | None
    bins: torch.Tensor | None


class ProgramObserver:
    """Runs a canonical program as far as its last block, and counts.

    Attributes:
        unplaced: Modules of blocks for which padding was counted, too, since it is not known where it stands in them.
    """

    def __init__(self, program: ExportedProgram, blocks: list[FfnBlock], device: torch.device) -> None:
        """Prepare to run.

        Args:
            program: A canonical program.
            blocks: Blocks found in it: those without a refusal, and experts.
            device: Where to run it.
        """
        gates = {_gate(block).name: block for block in blocks}
        inputs = {node.name: _sizes(node) for node in user_inputs(program) if _holds_ids(node)}
        self._rows = {name: _rows_of(_gate(block), inputs) for name, block in gates.items()}
        self._device = device
        self._program = move_to_device_pass(editable(program), device)
        self.counters = {name: _counter(program, block, device) for name, block in gates.items()}
        self.unplaced: set[str] = set()
        self._interpreter = _Interpreter(self._program, set(gates))

    @property
    def nodes(self) -> list[Node]:
        """The nodes that are run, in their order."""
        return self._interpreter.needed

    def run(
        self,
        inputs: Sample,
        counted: dict[str, torch.Tensor],
        where: str,
        before: Callable[[Node], None] = lambda node: None,
    ) -> None:
        """Run the program on a batch, and count.

        Args:
            inputs: The inputs, on the CPU.
            counted: See `Batch`.
            where: What to call the data in a message.
            before: Is called before each node; what it raises ends the run.

        Raises:
            UserError: An activation is NaN.
        """
        placed: dict[str, _Places] = {}

        def observe(name: str, z: torch.Tensor) -> None:
            reading = self._rows[name]
            if reading is None and any(not mask.all() for mask in counted.values()):
                self.unplaced.add(self.counters[name].module)
            key = str(reading or z.shape[:-1])
            if key not in placed:
                placed[key] = self._places(reading, z.shape, counted)
            places = placed[key]
            z = z.reshape(-1, z.shape[-1])
            self.counters[name].add(z if places.rows is None else z.index_select(0, places.rows), places.bins)

        with torch.no_grad():
            self._interpreter.run_observed(_arguments(self._program, inputs, self._device), observe, before)
        refuse_nan(self.counters.values(), where)

    @property
    def tokens(self) -> int:
        """How many tokens the block saw that saw fewest."""
        return int(torch.stack([counter.tokens for counter in self.counters.values()]).min())

    def profiles(self) -> list[BlockProfile]:
        """Return what was counted, by block."""
        return [counter.profile() for counter in self.counters.values()]

    def _places(self, reading: _Reading | None, shape: torch.Size, counted: dict[str, torch.Tensor]) -> _Places:
        if reading is None:
            # No tokens: of patches of images or frames of audio, say. The sequence is the last axis but the features'.
            if len(shape) < 3:
                return _Places(None, None)
            positions = torch.arange(shape[-2]).expand(shape[:-1]).flatten()
            return _Places(None, position_bins(positions).to(self._device))
        mask = counted.get(reading.input)
        if mask is None:
            return _Places(None, None)
        positions = mask.cumsum(1) - 1
        if reading.transposed:
            mask, positions = mask.t(), positions.t()
        rows = None if mask.all() else mask.flatten().nonzero()[:, 0]
        bins = position_bins(positions[mask])
        return _Places(None if rows is None else rows.to(self._device), bins.to(self._device))


def _counter(program: ExportedProgram, block: FfnBlock, device: torch.device) -> FiringCounter:
    threshold: float | torch.Tensor = block.threshold
    if block.thresholds is not None:
        threshold = tensor_of(program, block.thresholds.name).detach().to(device, torch.float32)
    return FiringCounter(block.module, block.variant, block.activation, threshold, block.d_ff, device)


def _gate(block: FfnBlock) -> Node:
    """Return the node whose values the activation decides by."""
    if block.pre is not None:
        return block.pre
    part = block.gate or block.up
    assert part is not None and not block.refusal
    return part.node


@dataclass(frozen=True)
class _Reading:
    """That the rows of a tensor are the places of an input [rows, places], or of its transpose."""

    input: str
    transposed: bool = False


def _holds_ids(node: Node) -> bool:
    value = node.meta["val"]
    return node.name.endswith("input_ids") and value.dim() == 2


def _sizes(node: Node) -> list[Any]:
    return [
        size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size) for size in node.meta["val"].shape
    ]


def _rows_of(node: Node, inputs: dict[str, list[Any]]) -> _Reading | None:
    """Say which input's places the rows of a tensor [..., d_ff] are; None where that is not known."""
    leading = _sizes(node)[:-1]
    for name, (rows, places) in inputs.items():
        if leading == [rows, places] or leading == [rows * places]:
            return _Reading(name)
        if leading == [places, rows]:
            return _Reading(name, transposed=True)
    return None


def _arguments(program: ExportedProgram, inputs: Sample, device: torch.device) -> list[Any]:
    values: list[Any] = []
    for spec in program.graph_signature.input_specs:
        if isinstance(spec.arg, ConstantArgument):
            values.append(spec.arg.value)
        elif spec.kind == InputKind.USER_INPUT:
            values.append(inputs[spec.arg.name].to(device))
        else:
            values.append(tensor_of(program, str(spec.target)))
    return values


class _Interpreter(Interpreter):
    """Runs the part of a graph that some nodes are computed from, and shows their values."""

    def __init__(self, program: ExportedProgram, names: set[str]) -> None:
        super().__init__(program.graph_module)
        self._names = names
        wanted: set[Node] = set()
        pending = [node for node in program.graph.nodes if node.name in names]
        while pending:
            node = pending.pop()
            if node not in wanted:
                wanted.add(node)
                pending.extend(node.all_input_nodes)
        self.needed = [node for node in program.graph.nodes if node in wanted and node.op != "placeholder"]
        self._run = set(self.needed)
        self.user_to_last_uses = {node: [] for node in program.graph.nodes}  # where a value is let go
        for value, user in last_uses(self.needed).items():
            self.user_to_last_uses[user].append(value)

    def run_observed(
        self, arguments: list[Any], observer: Callable[[str, Any], None], before: Callable[[Node], None]
    ) -> None:
        self._observer, self._before = observer, before
        self.run(*arguments, enable_io_processing=False)

    def run_node(self, node: Node) -> Any:
        if node.op != "placeholder" and node not in self._run:
            return None
        if node.op != "placeholder":
            self._before(node)
        value = super().run_node(node)
        if node.name in self._names:
            self._observer(node.name, value)
        return value


def last_uses(nodes: Sequence[Node]) -> dict[Node, Node]:
    """Return by each node, and each that they read, the last one of these nodes that reads it; itself without any."""
    last: dict[Node, Node] = {}
    for node in nodes:
        last[node] = node
        last |= dict.fromkeys(node.all_input_nodes, node)
    return last
