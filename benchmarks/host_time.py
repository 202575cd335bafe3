"""Time what the host needs for a call from torch: of blocks, linear layers, experts and features.

python benchmarks/host_time.py --json results.json
python benchmarks/host_time.py --only block --tokens 1
python benchmarks/host_time.py --smoke --device cpu

A few calls follow each other, and no one waits for the GPU, whose queue they do not fill: the time until the last one
returns is the host's. Calls take turns. Below some hundred tokens it is more than the kernels take, so that without
CUDA graphs it is the time of a model. "torch" names torch's own functions for the same, to compare with. On a CPU the
ops compute as they are called, and the figures mean nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import time

import harness
import torch
from harness import Columns, Run, field, time_of
from torch import Tensor, nn
from torch.nn import functional

import twellc
from twellc.benchmarking import timing
from twellc.benchmarking.timing import Call
from twellc.features import decode, encode
from twellc.options.option import COUNT, option
from twellc.plugins.block import BlockOptions, Operands
from twellc.plugins.experts_op import EXPERTS
from twellc.plugins.fp8 import Fp8
from twellc.plugins.linear import LinearOperands, LinearOptions
from twellc.plugins.linear_op import run_linear
from twellc.plugins.ops import GATED_MLP, run_block

CALLS = 20  # that are timed together
EXPERT_COUNT, TOP = 8, 2
HOST = "host"


class Mlp(nn.Module):
    """A gated block, as a model has it."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(d_model, d_ff, bias=False) for _ in range(2))
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute y [..., d_model]."""
        y: Tensor = self.down(functional.relu(self.gate(x)) * self.up(x))
        return y


def draw(*sizes: int) -> Tensor:
    """Draw numbers in bfloat16."""
    return torch.randn(*sizes, dtype=torch.bfloat16, device=harness.DEVICE)


def blocks(x: Tensor, d_ff: int) -> dict[str, Call]:
    """Return calls of a gated block."""
    d_model = x.shape[1]
    gate, up, down = (draw(d_ff, d_model) for _ in range(3))
    dense = Mlp(d_model, d_ff).to(x).eval()
    module = twellc.optimize(Mlp(d_model, d_ff).to(x).eval(), layers="all")
    bf16 = Operands(x=x, w_gate=gate, w_up=up, w_down=down)
    scaled = {name: Fp8.quantize(each, "row") for name, each in bf16.weights.named().items()}
    scales = {f"{name}_scale": each.scale for name, each in scaled.items()}
    fp8 = Operands(x=x, **{name: each.values for name, each in scaled.items()}, **scales)
    norm = dataclasses.replace(bf16, norm_weight=draw(d_model), residual=x)
    options = BlockOptions(activation="relu")
    return {
        "block, op": functools.partial(GATED_MLP, x, gate, None, up, None, down, None, None, "relu"),
        "block": functools.partial(run_block, bf16, options),
        "block in FP8": functools.partial(run_block, fp8, options),
        "block, norm and residual": functools.partial(
            run_block, norm, BlockOptions(activation="relu", norm="rms", eps=1e-5)
        ),
        "block, module": functools.partial(module, x),
        "block, torch": functools.partial(dense, x),
    }


def linears(x: Tensor) -> dict[str, Call]:
    """Return calls of a linear layer."""
    weight = draw(x.shape[1], x.shape[1])
    narrow, scale = Fp8.quantize(weight, "row")
    norm = LinearOperands(x=x, weight=weight, norm_weight=draw(x.shape[1]), residual=x)
    return {
        "linear, norm and residual": functools.partial(run_linear, norm, LinearOptions(norm="rms", eps=1e-5)),
        "linear in FP8": functools.partial(
            run_linear, LinearOperands(x=x, weight=narrow, weight_scale=scale), LinearOptions()
        ),
        "linear, torch": functools.partial(functional.linear, x, weight),
    }


def experts(x: Tensor, d_ff: int) -> dict[str, Call]:
    """Return a call of experts."""
    up, down = (draw(EXPERT_COUNT, d_ff, x.shape[1]) for _ in range(2))
    ids = torch.rand(len(x), EXPERT_COUNT, device=x.device).topk(TOP).indices
    weights = torch.rand(len(x), TOP, device=x.device)
    return {"experts": functools.partial(EXPERTS, x, up, None, down, ids, weights, "relu2")}


def features(x: Tensor, d_ff: int) -> dict[str, Call]:
    """Return calls of features, which have a capacity: without it the host waits for the GPU."""
    w_enc, w_dec, thresholds = draw(d_ff, x.shape[1]), draw(d_ff, x.shape[1]), torch.rand(d_ff, device=x.device)
    narrow, scale = Fp8.quantize(w_enc, "row")
    call = functools.partial(
        encode, x, activation="fatrelu", thresholds=thresholds, b_enc=draw(d_ff), capacity=x.shape[0] * d_ff
    )
    found = call(w_enc=w_enc)
    return {
        "encode": functools.partial(call, w_enc=w_enc),
        "encode in FP8": functools.partial(call, w_enc=narrow, w_enc_scale=scale),
        "decode": functools.partial(decode, found, w_dec, draw(x.shape[1])),
    }


def wait() -> None:
    """Wait until the GPU has done all calls."""
    if harness.DEVICE == "cuda":
        torch.cuda.synchronize()


def time_host(call: Call) -> float:
    """Return microseconds of the host for a call."""
    wait()
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - begin) / CALLS * 1e6


COLUMNS: Columns = {"call": field("call"), "tokens": field("tokens"), "host, µs": time_of(HOST)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(harness.Options):
    """The options of this benchmark."""

    tokens: int = option(8, "N", COUNT)
    d_model: int = option(2048, "N", COUNT)
    d_ff: int = option(5632, "N", COUNT)
    device: str = option("cuda", kind=("cuda", "cpu"))


@harness.benchmark(Options, tokens=3, d_model=128, d_ff=256, repeats=2)
def main(run: Run, options: Options) -> None:
    """Print a Markdown table of times."""
    x = draw(options.tokens, options.d_model)
    with torch.no_grad():
        all_calls = blocks(x, options.d_ff) | linears(x) | experts(x, options.d_ff) | features(x, options.d_ff)
        calls = run.chosen(all_calls)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for call in calls.values():
            call()
        for _ in range(options.repeats):
            for name, call in calls.items():
                times[name].append(time_host(call))
    wait()
    run.begin(COLUMNS)
    for name, found in times.items():
        run.add({"call": name, "tokens": options.tokens, "times": {HOST: timing.times_of(found).to_json()}})


if __name__ == "__main__":
    main()
