"""Time experts with squared ReLU, as Nemotron 3 has them, against what computes every neuron.

python benchmarks/experts.py --json results.json
python benchmarks/experts.py --size 512x2688x1024x22 --routing zipf --weights fp8
python benchmarks/experts.py --smoke

A size is experts x d_ff x d_model x experts of a token. Contestants: `torch.ops.twell.experts`, which sorts tokens and
adds up; two calls of torch._grouped_mm alone, without sorting, weights and sum; a Triton kernel after vLLM's, sorted
beforehand, the fastest of a few configurations (grouped_triton.py); and vLLM's own, where it is installed. Times are of
one call within a CUDA graph that holds one for each of several sets of weights. Each is compared with float64 first;
one that fails is named. Speed-ups are over the fastest of the others.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import click
import harness
import torch
from harness import NUMBERS, SHARES, Calls, Columns, Result, Run, field, over, relative_error, shapes, times_of
from torch import Tensor
from torch.nn import functional

from twellc.base.errors import first_line
from twellc.options.option import COUNT, option
from twellc.plugins.experts_op import EXPERTS
from twellc.plugins.fp8 import Fp8

CHECKED_TOKENS = 4
MOST_ERROR = 2**-6
FEW_TOKENS = 128  # up to which the Triton kernel has blocks of 16 tokens
TWELL, GROUPED, TRITON, VLLM = "twell", "grouped_mm", "Triton", "vLLM"
RIVALS = (GROUPED, TRITON, VLLM)


@dataclass(frozen=True)
class Experts:
    """Up [experts, d_ff, d_model], and down both ways; scales in FP8: [experts, d_ff] and [experts, d_model]."""

    up: Tensor
    down: Tensor
    down_by_output: Tensor
    scales: tuple[Tensor, Tensor] | None

    @classmethod
    def draw(cls, experts: int, d_ff: int, d_model: int, narrow: bool) -> Experts:
        """Draw experts whose first column is 1: column 0 of x shifts all neurons of a token."""

        def normal(*sizes: int) -> Tensor:
            return torch.randn(*sizes, dtype=torch.bfloat16, device=harness.DEVICE)

        up = normal(experts, d_ff, d_model).mul_(d_model**-0.5)
        up[:, :, 0] = 1
        by_output = normal(experts, d_model, d_ff).mul_(d_ff**-0.5)
        if not narrow:
            return cls(up, by_output.transpose(1, 2).contiguous(), by_output, None)
        first, last = Fp8.round_rows(up), Fp8.round_rows(by_output)
        down = last.values.transpose(1, 2).contiguous()
        return cls(first.values, down, last.values, (first.scale[..., 0], last.scale[..., 0]))

    def by_twell(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return y [tokens, d_model], as do those below."""
        scales: dict[str, Tensor] = {}
        if self.scales is not None:
            scales = {"up_scale": self.scales[0][:, :, None], "down_scale": self.scales[1][:, None]}
        y: Tensor = EXPERTS(x, self.up, None, self.down, ids, weights, "relu2", **scales)
        return y

    def by_grouped(self, sorted_x: Tensor, offsets: Tensor) -> Tensor:
        """Return y of each pair, of rows sorted by expert, without its weight."""
        h = torch._grouped_mm(sorted_x, self.up.transpose(1, 2), offs=offsets)
        return torch._grouped_mm(functional.relu(h).square(), self.down, offs=offsets)

    def by_vllm(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Compute them by what vLLM has for weights of 16 bits."""
        from vllm.model_executor.layers.fused_moe import fused_experts

        y: Tensor = fused_experts(x, self.up, self.down_by_output, weights, ids, activation="relu2_no_mul")
        return y

    def exact(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Compute them in float64, with z rounded to the type of x."""
        rows = []
        for row, experts, factors in zip(x.double(), ids.tolist(), weights.double(), strict=True):
            total = torch.zeros_like(row)
            for expert, factor in zip(experts, factors, strict=True):
                up, down = self.up[expert].double(), self.down[expert].double()
                if self.scales is not None:
                    up, down = up * self.scales[0][expert, :, None], down * self.scales[1][expert]
                z = (up @ row).to(x.dtype)
                total += factor * (functional.relu(z).square().double() @ down)
            rows.append(total)
        return torch.stack(rows)


def route(tokens: int, experts: int, top: int, routing: str) -> Tensor:
    """Draw ids [tokens, top], all of a token different: equally often, or by Zipf's law."""
    rank = torch.arange(1, experts + 1, device=harness.DEVICE, dtype=torch.float32)
    often = torch.ones_like(rank) if routing == "even" else 1 / rank
    return torch.multinomial(often.expand(tokens, -1), top)


def contestants(sets: list[Experts], x: Tensor, ids: Tensor, weights: Tensor) -> Iterator[tuple[str, Calls]]:
    """Yield names and calls, one for each set of weights; of Triton's several."""
    experts = len(sets[0].up)
    yield TWELL, [functools.partial(each.by_twell, x, ids, weights) for each in sets]
    few = len(x) <= FEW_TOKENS
    try:
        import grouped_triton
    except ImportError as error:
        click.echo(f"without Triton: {error}", err=True)
    else:
        routing = grouped_triton.Routing.of(ids, experts, 16 if few else 64)
        for config in grouped_triton.FEW if few else grouped_triton.MANY:
            given = [(x, each.up, each.down_by_output, weights, routing, config, each.scales) for each in sets]
            yield f"{TRITON} {config}", [functools.partial(grouped_triton.run, *each) for each in given]
    if sets[0].scales is None:
        order = ids.flatten().argsort(stable=True)
        offsets = ids.flatten().bincount(minlength=experts).cumsum(0).int()
        yield GROUPED, [functools.partial(each.by_grouped, x[order // ids.shape[1]], offsets) for each in sets]
        yield VLLM, [functools.partial(each.by_vllm, x, ids, weights) for each in sets]


def check(name: str, call: Callable[[], Tensor], exact: Tensor) -> float | None:
    """Return a contestant's relative error, or None, with a word to the user, if it fails or is wrong."""
    try:
        y = call()
        torch.cuda.synchronize()
    except Exception as error:  # whatever it is, the others go on
        click.echo(f"without {name}: {type(error).__name__}: {first_line(error)}", err=True)
        return None
    if name == GROUPED:  # of pairs, without weights and sum
        return float("nan")
    off = relative_error(y[:CHECKED_TOKENS], exact)
    if not off <= MOST_ERROR:
        click.echo(f"without {name}: it is off by {off:.2e}", err=True)
        return None
    return off


def measure(run: Run, sets: list[Experts], tokens: int, top: int, density: float, routing: str) -> Result:
    """Check and time one number of tokens at one density."""
    experts, _, d_model = sets[0].up.shape
    shift = statistics.NormalDist().inv_cdf(density) if density < 1 else 16.0
    x = torch.randn(tokens, d_model, device=harness.DEVICE)
    x[:, 0] = shift
    x = x.bfloat16()
    ids = route(tokens, experts, top, routing)
    weights = torch.softmax(torch.randn(tokens, top, device=harness.DEVICE), dim=1)
    exact = sets[0].exact(x[:CHECKED_TOKENS], ids[:CHECKED_TOKENS], weights[:CHECKED_TOKENS])
    kept, errors = {}, {}
    for name, calls in contestants(sets, x, ids, weights):
        error = check(name, calls[0], exact) if run.wants(name) else None
        if error is not None:
            kept[name], errors[name] = calls, error
    times: Result = {}
    for name, found in run.time(kept).items():
        short = name.partition(" ")[0]
        if short not in times or found["median_us"] < times[short]["median_us"]:
            times[short] = {**found, "error": errors[name], "contestant": name}
    hit = len({*ids.flatten().tolist()})
    return {"tokens": tokens, "density": density, "routing": routing, "experts_hit": hit, "times": times}


COLUMNS: Columns = {
    "active": field("density", ".0%"),
    "tokens": field("tokens"),
    "experts hit": field("experts_hit"),
    **times_of(TWELL, *RIVALS),
    "over the fastest": over(RIVALS, TWELL),
}


@dataclass(frozen=True, kw_only=True)
class Options(harness.Options):
    """The options of this benchmark.

    Attributes:
        size: Experts, d_ff, d_model, and experts of a token; those of Nano; Super: 512x2688x1024x22.
        routing: Experts are drawn equally often, or by Zipf's law.
        sets: Of weights, in turns.
    """

    size: tuple[tuple[int, int, int, int], ...] = option("128x1856x2688x6", "SIZE", shapes("128x1856x2688x6"))
    tokens: tuple[int, ...] = option("1,4,16,64,128,512,2048", "N,…", NUMBERS)
    density: tuple[float, ...] = option("0.05,0.1,0.2,1", "SHARE,…", SHARES)
    routing: str = option("even", kind=("even", "zipf"))
    weights: str = option("bf16", kind=("bf16", "fp8"))
    sets: int = option(2, "N", COUNT)
    repeats: int = option(10, "N", COUNT)


@harness.benchmark(Options, size="8x96x64x2", tokens="1,5,300", density="0.1,1", repeats=2)
def main(run: Run, options: Options) -> None:
    """Print a Markdown table of times in microseconds."""
    for experts, d_ff, d_model, top in options.size:
        sets = [Experts.draw(experts, d_ff, d_model, options.weights == "fp8") for _ in range(options.sets)]
        run.begin(COLUMNS, f"{experts}x{d_ff}x{d_model}x{top}, {options.weights}, routing {options.routing}, µs")
        for density in options.density:
            for tokens in options.tokens:
                run.add(measure(run, sets, tokens, top, density, options.routing))


if __name__ == "__main__":
    main()
