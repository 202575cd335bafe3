"""Count the operations and bytes of feed-forward blocks: dense, and where only active neurons are computed.

For a call with M tokens, K = d_model, N = d_ff, O = d_out, a density of d (the share of gate activations that are not
zero) and s bytes an element:

    FLOPs   dense     2 M (P K N + N O)              P = 2 input projections of a gated block, 1 of a plain one
            sparse    2 M K N + 2 M d N ((P - 1) K + O)
    bytes   dense     s (M K + P K N + N O + M N + M O)
            sparse    s (M K + K N + n ((P - 1) K + O) + M O) + 4 M (d N + ceil(N / 256))
            gathered  s M d N ((P - 1) K + O)

FLOPs are those of the matrix products, a multiplication and an addition each; biases, activations and tiles that
overflow and are recomputed do not count. In bytes every tensor counts once: x, the weights, what stands between the
projections (dense: the hidden tensor; sparse: the packed words that are written, see docs/format.md) and y. That is
what memory has to see at least once, as far as no cache keeps it from one kernel or call to the next. Of the up and
down projections the sparse form needs the rows of the n = N (1 - (1 - d)^M) neurons that fire for any token, expected
for neurons that fire independently and equally often; where they fire unequally, fewer. `gathered` is what the kernels
read of these rows token by token, mostly from caches: not traffic to memory, and not in `bytes`.

Of E experts, to t of which each token is sent, M t takes the place of M but for x and y, and of all experts' weights
those count that tokens reach: E (1 - (1 - t / E)^M) experts, and E N (1 - (1 - d t / E)^M) neurons that fire.

These are counts and do not predict time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from twellc.base.records import OPTIONAL, Json, Record
from twellc.options.commands import DEFAULT_DENSITY
from twellc.passes.report import Layer
from twellc.plugins.library import TILE

BYTES_PER_ELEMENT = 2
_WORD = 4


@dataclass(frozen=True)
class Cost(Record):
    """FLOPs, bytes that memory has to see, and bytes gathered from caches, of one call."""

    flops: int
    bytes: int
    gathered: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes, self.gathered + other.gathered)


@dataclass(frozen=True)
class FormCosts(Record):
    """Costs of a block, or of all, in both forms."""

    dense: Cost
    sparse: Cost


@dataclass(frozen=True)
class LayerCosts(FormCosts):
    """Costs of the block of a module.

    Attributes:
        module: Path of the module that holds its weights.
        density: Share of gate activations, of the neurons that are left, that a profile or a short run found not to be
            zero; None where it is assumed, or the block is dense.
    """

    module: str
    density: float | None = field(default=None, metadata=OPTIONAL)

    def to_json(self) -> dict[str, Json]:
        """Return it as JSON types, the module first."""
        return {"module": self.module, **super().to_json()}


@dataclass(frozen=True)
class CostTable(Record):
    """Costs of the blocks of a model in one call.

    Attributes:
        tokens: Tokens in the call.
        assumed_density: Assumed share of gate activations that are not zero, where nothing was measured.
        bytes_per_element: Bytes of an element.
        layers: Costs of each block, in the order of the report.
        total: Their sum.
    """

    tokens: int
    assumed_density: float
    bytes_per_element: int
    layers: list[LayerCosts]
    total: FormCosts


def dense_cost(layer: Layer, tokens: int) -> Cost:
    """Return the cost of a block, described as in a report, with dense products."""
    weights = _inputs(layer) * layer.d_model * layer.d_ff + layer.d_ff * layer.d_out
    rows = tokens * max(layer.top, 1)
    activations = tokens * (layer.d_model + layer.d_out) + rows * layer.d_ff
    read = round(_reached(layer, tokens, 1.0) * weights)
    return Cost(2 * rows * weights, BYTES_PER_ELEMENT * (read + activations))


def sparse_cost(layer: Layer, tokens: int, density: float) -> Cost:
    """Return the cost of a block as a plugin computes it: of the neurons that are left.

    Args:
        layer: The block, described as in a report.
        tokens: Tokens in one call.
        density: Share of their gate activations that are not zero.
    """
    d_model, d_ff, d_out = layer.d_model, layer.kept, layer.d_out
    neuron = (_inputs(layer) - 1) * d_model + d_out
    rows = tokens * max(layer.top, 1)
    active = rows * density * d_ff
    distinct = d_ff * _reached(layer, tokens, density)
    packed = _WORD * (active + rows * -(-d_ff // TILE))
    of_weight = BYTES_PER_ELEMENT if layer.weights is None else layer.weights.bits // 8
    read = of_weight * (_reached(layer, tokens, 1.0) * d_model * d_ff + distinct * neuron)
    return Cost(
        flops=round(2 * rows * d_model * d_ff + 2 * active * neuron),
        bytes=round(BYTES_PER_ELEMENT * tokens * (d_model + d_out) + read + packed),
        gathered=round(of_weight * active * neuron),
    )


def count_costs(layers: list[Layer], tokens: int, density: float | None) -> CostTable:
    """Return the cost of each block and of all together; a block that is left dense costs the same in both forms.

    Args:
        layers: Blocks as in a report.
        tokens: Tokens in one call.
        density: Share of gate activations that are not zero, from 0 to 1, in blocks that no profile knows; None takes
            that of a short run, or else `DEFAULT_DENSITY`.
    """
    rows = []
    assumed = DEFAULT_DENSITY if density is None else density
    for layer in layers:
        dense = dense_cost(layer, tokens)
        profiled = None if layer.neurons is None else layer.neurons.density
        known = layer.density if density is None and layer.decision == "twell" else profiled
        own = assumed if known is None else known
        sparse = sparse_cost(layer, tokens, own) if layer.decision == "twell" else dense
        rows.append(LayerCosts(dense, sparse, layer.module, known))
    nothing = Cost(0, 0)
    total = FormCosts(sum((row.dense for row in rows), nothing), sum((row.sparse for row in rows), nothing))
    return CostTable(tokens, assumed, BYTES_PER_ELEMENT, rows, total)


def _reached(layer: Layer, tokens: int, density: float) -> float:
    """Return in how many experts a neuron of this density fires for any token; of a block, how likely it does."""
    share = density * (layer.top / layer.experts if layer.experts else 1.0)
    fires = -math.expm1(tokens * math.log1p(-share)) if share < 1 else 1.0
    return max(layer.experts, 1) * fires


def _inputs(layer: Layer) -> int:
    """Return the number of projections that read x."""
    return 2 if layer.variant == "gated" else 1
