"""Problems drawn at random, on a GPU: random sizes, kinds, densities and odd rows, held to float64.

A failure shows the seed that draws the problem again.
"""

import math
import random
import sys

import pytest
import torch

from tests.plugins import reference
from tests.plugins.calls import Call, assert_guards, assert_same_bits, splits, ways
from tests.plugins.cases import BF16, FP16, Case, make_block
from tests.plugins.reference import Block
from tests.plugins.seeds import draw_seed

pytestmark = pytest.mark.gpu

PROBLEMS = 60
MOST_PRODUCTS = 2e10  # of a problem, so that float64 takes about a second


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    return int(math.exp(rng.uniform(math.log(low), math.log(high + 1))))


def draw_rows(rng: random.Random) -> int:
    """Few tokens as often as many, and more often around powers of two."""
    if rng.random() < 0.3:
        return max(1, (1 << rng.randint(0, 13)) + rng.randint(-1, 1))
    low, high = rng.choice([(1, 260), (1, 260), (257, 2300), (257, 2300), (2300, 9000)])
    return rng.randint(low, high)


def draw_case(rng: random.Random) -> Case:
    rows = draw_rows(rng)
    d_model = rng.choice([8 * log_uniform(rng, 1, 320), 64 * log_uniform(rng, 1, 40)])
    d_ff = rng.choice([log_uniform(rng, 1, 9000), max(1, 256 * rng.randint(1, 26) + rng.randint(-1, 1))])
    d_out = rng.choice([8 * log_uniform(rng, 1, 300), d_model])
    while rows * d_ff * (2 * d_model + d_out) > MOST_PRODUCTS:
        d_ff = -(-d_ff // 2)
        d_out = max(8, d_out // 16 * 8)
    gated = rng.random() < 0.75
    return Case(
        rows=rows,
        d_model=d_model,
        d_ff=d_ff,
        d_out=d_out,
        compression=rng.choice([1, 2, 4, 8]),
        dtype=rng.choice([BF16, FP16]),
        gated=gated,
        activation=rng.choice(["relu", "relu", "relu2", "fatrelu", *(["drelu"] if gated else [])]),
        density=rng.choice([0.0, 0.001, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3, 0.6, 1.0]),
        biases="".join(name for name in ("gud" if gated else "gd") if rng.random() < 0.4),
        residual=rng.random() < 0.5,
        hot=rng.choice([0, rng.randint(0, d_ff), min(d_ff, 256 * rng.randint(1, 4)), d_ff]),
    )


def disturb(rng: random.Random, block: Block) -> list[str]:
    """Change some rows of x and some neurons, in place; say what has been done.

    The first column of x carries a shift of all gate values, so rows where it is 0 or less are heavy.
    """
    x, w_gate = block.x, block.w_gate
    rows, d_ff = len(x), len(w_gate)
    done = []

    def happens(name: str, probability: float) -> bool:
        if rng.random() < probability:
            done.append(name)
            return True
        return False

    if happens("heavy rows", 0.3):
        x[torch.rand(rows, device="cuda") < rng.choice([0.002, 0.02, 0.2]), 0] = rng.choice([0.0, -1.0])
    if happens("heavy neighbours", 0.1):
        begin = rng.randrange(rows)
        x[begin : begin + rng.choice([1, 8, 64, 300]), 0] = -1.0
    if happens("rows of zeros", 0.2):
        x[torch.rand(rows, device="cuda") < rng.choice([0.05, 0.5])] = 0.0
    if happens("hot neurons", 0.2):
        chosen = torch.randperm(d_ff, device="cuda")[: rng.choice([1, 5, 64, 200])]
        w_gate[chosen, 0] = w_gate[:, 0].abs().max()
    if happens("a value that is not finite", 0.15):
        x[rng.randrange(rows), rng.randrange(x.shape[1])] = rng.choice([math.nan, math.inf, -math.inf])
    if block.residual is not None and happens("a residual that is not finite", 0.15):
        block.residual[rng.randrange(rows), rng.randrange(block.residual.shape[1])] = rng.choice([math.nan, math.inf])
    if happens("a neuron that nothing activates", 0.1):
        neuron = rng.randrange(d_ff)
        w_gate[neuron] = 0
        if block.b_gate is not None:
            block.b_gate[neuron] = -1
        if block.w_up is not None:
            block.w_up[neuron] = math.inf
    return done


@pytest.mark.parametrize("number", range(PROBLEMS))
def test_random_problem(number: int) -> None:
    seed = draw_seed(f"random problem {number}")
    rng = random.Random(seed)
    torch.manual_seed(seed)
    case = draw_case(rng)
    block = make_block(case)
    sys.stdout.write(f"seed {seed}: {case}, {', '.join(disturb(rng, block)) or 'nothing odd'}\n")
    call = Call(block, case.compression, hot=case.hot)
    for name, run in ways(call).items():
        sys.stdout.write(f"{name}\n")
        y = run()
        is_split = splits(call.problem) and name in ("mlp", "split", "split generic")
        reference.assert_close(y, block, split=case.hot if is_split else 0)
        assert_same_bits(run(), y)
        assert_guards(call.y_buffer)
        assert_guards(call.packed_buffer)
