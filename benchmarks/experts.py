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
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import session
import torch
from torch import Tensor
from torch.nn import functional

from twellc.benchmarking import contest
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
            return torch.randn(*sizes, dtype=torch.bfloat16, device=session.DEVICE)

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
    rank = torch.arange(1, experts + 1, device=session.DEVICE, dtype=torch.float32)
    often = torch.ones_like(rank) if routing == "even" else 1 / rank
    return torch.multinomial(often.expand(tokens, -1), top)


def contestants(sets: list[Experts], x: Tensor, ids: Tensor, weights: Tensor) -> Iterator[tuple[str, list[Any]]]:
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
            yield (
                f"{TRITON} {config}",
                [
                    functools.partial(
                        grouped_triton.run, x, each.up, each.down_by_output, weights, routing, config, each.scales
                    )
                    for each in sets
                ],
            )
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
        click.echo(f"without {name}: {type(error).__name__}: {error}".splitlines()[0], err=True)
        return None
    if name == GROUPED:  # of pairs, without weights and sum
        return float("nan")
    off = float((y[:CHECKED_TOKENS].double() - exact).norm() / exact.norm())
    if not off <= MOST_ERROR:
        click.echo(f"without {name}: it is off by {off:.2e}", err=True)
        return None
    return off


def measure(sets: list[Experts], tokens: int, top: int, density: float, routing: str, repeats: int) -> dict[str, Any]:
    """Check and time one number of tokens at one density."""
    experts, _, d_model = sets[0].up.shape
    shift = statistics.NormalDist().inv_cdf(density) if density < 1 else 16.0
    x = torch.randn(tokens, d_model, device=session.DEVICE)
    x[:, 0] = shift
    x = x.bfloat16()
    ids = route(tokens, experts, top, routing)
    weights = torch.softmax(torch.randn(tokens, top, device=session.DEVICE), dim=1)
    exact = sets[0].exact(x[:CHECKED_TOKENS], ids[:CHECKED_TOKENS], weights[:CHECKED_TOKENS])
    kept, errors = {}, {}
    for name, calls in contestants(sets, x, ids, weights):
        error = check(name, calls[0], exact)
        if error is not None:
            kept[name], errors[name] = calls, error
    times: dict[str, Any] = {}
    for name, found in contest.time_rotated(kept, repeats).items():
        short = name.partition(" ")[0]
        if short not in times or found.median_us < times[short]["median_us"]:
            times[short] = {**found.to_json(), "error": errors[name], "contestant": name}
    hit = len({*ids.flatten().tolist()})
    return {"tokens": tokens, "density": density, "routing": routing, "experts_hit": hit, "times": times}


HEADER = f"| active | tokens | experts hit | {TWELL}, µs | {' | '.join(RIVALS)} | over the fastest |\n|" + " ---: |" * 8


def table_row(found: dict[str, Any]) -> str:
    """One line of the Markdown table."""
    median = {name: each["median_us"] for name, each in found["times"].items()}
    rivals = [median[name] for name in RIVALS if name in median]
    gain = f"{min(rivals) / median[TWELL]:.2f}" if rivals and TWELL in median else "-"
    cells = [f"{found['density']:.0%}", str(found["tokens"]), str(found["experts_hit"])]
    cells += [f"{median[name]:.1f}" if name in median else "-" for name in (TWELL, *RIVALS)]
    return "| " + " | ".join([*cells, gain]) + " |"


@click.command()
@click.option("--size", default="128x1856x2688x6", show_default=True, help="Those of Nano; Super: 512x2688x1024x22.")
@click.option("--tokens", default="1,4,16,64,128,512,2048", show_default=True)
@click.option("--density", default="0.05,0.1,0.2,1", show_default=True, help="Shares of active neurons of a token.")
@click.option("--routing", type=click.Choice(["even", "zipf"]), default="even", show_default=True)
@click.option("--weights", type=click.Choice(["bf16", "fp8"]), default="bf16", show_default=True)
@click.option("--sets", "num_sets", default=2, show_default=True, help="Of weights, in turns.")
@click.option("--repeats", default=10, show_default=True)
@click.option("--seed", default=0, show_default=True)
@session.json_option
@session.smoke_option(size="8x96x64x2", tokens="1,5,300", density="0.1,1", repeats=2)
def main(
    size: str,
    tokens: str,
    density: str,
    routing: str,
    weights: str,
    num_sets: int,
    repeats: int,
    seed: int,
    json_path: Path | None,
) -> None:
    """Print a Markdown table of times in microseconds."""
    session.refuse_without_gpu()
    torch.manual_seed(seed)
    random.seed(seed)
    report = session.new_report()
    experts, d_ff, d_model, top = (int(part) for part in size.split("x"))
    sets = [Experts.draw(experts, d_ff, d_model, weights == "fp8") for _ in range(num_sets)]
    click.echo(f"{report['machine']['gpu']}: {size}, {weights}, routing {routing}\n\n{HEADER}")
    for share in density.split(","):
        for count in tokens.split(","):
            found = measure(sets, int(count), top, float(share), routing, repeats)
            click.echo(table_row(found))
            report["results"].append(found)
            session.write_results(json_path, report)


if __name__ == "__main__":
    main()
