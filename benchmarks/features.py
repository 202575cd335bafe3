"""Time encoding and decoding of sparse autoencoders (JumpReLU, bf16) against dense torch, and the memory of each.

python benchmarks/features.py --tokens 8,8192 --json results.json
python benchmarks/features.py --sizes 2304x16384x60 --weights fp8
python benchmarks/features.py --smoke

A size is d_model x d_ff x active neurons of a token. Rivals: the dense formula under torch.compile, and what sae-lens
does with sparse activations: a dense encoder, a COO tensor of float32, torch.sparse.mm; left out where w_dec in float32
takes too much memory. "block" is the `twell` op, which gives y alone. Times are of a call among others, with what the
host needs for it, in turns; and of a CUDA graph of it, which of features has a capacity of twice what is active. With
--weights fp8 the encoder's are of E4M3, and all of those of the dense rival, which has a scale for each row of what it
multiplies; there is no block. Memory is what a call takes beside weights and x. Some tokens are compared with float64
before anything is timed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any

import click
import harness
import torch
from harness import NUMBERS, Columns, Result, Run, field, over, relative_error, shapes, times_of
from torch import Tensor

from twellc.benchmarking import timing
from twellc.benchmarking.forms import DenseFp8Linear, compile_rival
from twellc.benchmarking.timing import Call
from twellc.features import Features, decode, encode
from twellc.options.option import COUNT, option
from twellc.plugins.block import BlockOptions, Operands
from twellc.plugins.fp8 import Fp8
from twellc.plugins.ops import run_block

CHECKED_TOKENS = 8
CALLS = 4  # that are timed together
MOST_BYTES_OF_FLOAT32 = 8e9
TWELL, BLOCK, DENSE, COO = "twell", "block", "dense", "COO"
IN_GRAPH = " in a graph"


@dataclasses.dataclass(frozen=True)
class Sae:
    """An autoencoder: w_enc [d_ff, d_model], b_enc and thresholds [d_ff], w_dec [d_ff, d_model], b_dec [d_model].

    A w_enc of E4M3 has a scale for each neuron; `narrow` is encoder and decoder of the dense rival, in FP8 both.
    """

    w_enc: Tensor
    b_enc: Tensor
    thresholds: Tensor
    w_dec: Tensor
    b_dec: Tensor
    w_enc_scale: Tensor | None = None
    narrow: tuple[DenseFp8Linear, DenseFp8Linear] | None = None

    @classmethod
    def draw(cls, d_model: int, d_ff: int, active: int, narrow: bool = False) -> Sae:
        """Draw one of which about so many neurons are active for x of variance 1; narrow: in E4M3."""

        def normal(*sizes: int) -> Tensor:
            return torch.randn(*sizes, dtype=torch.bfloat16, device=harness.DEVICE)

        cut = statistics.NormalDist().inv_cdf(1 - active / d_ff)
        thresholds = cut + 0.05 * torch.rand(d_ff, device=harness.DEVICE)
        w_enc = normal(d_ff, d_model).mul_(d_model**-0.5)
        others = normal(d_ff).mul_(0.01), thresholds, normal(d_ff, d_model), normal(d_model)
        if not narrow:
            return cls(w_enc, *others)
        values, scale = Fp8.quantize(w_enc, "row")
        return cls(values, *others, scale, (DenseFp8Linear(w_enc), DenseFp8Linear(others[2].t().contiguous())))

    def rows(self, which: Tensor | slice) -> Tensor:
        """Return rows of w_enc, dequantized to float32."""
        rows = self.w_enc[which].float()
        return rows if self.w_enc_scale is None else rows * self.w_enc_scale[which]

    def encode(self, x: Tensor, capacity: int | None = None) -> Features:
        """Return the features of x [tokens, d_model]."""
        cut: dict[str, Any] = {"activation": "fatrelu", "thresholds": self.thresholds}
        return encode(x, self.w_enc, self.b_enc, w_enc_scale=self.w_enc_scale, capacity=capacity, **cut)

    def by_features(self, x: Tensor, capacity: int | None = None) -> Tensor:
        """Return y [tokens, d_model], as are those below."""
        return decode(self.encode(x, capacity), self.w_dec, self.b_dec)

    def by_block(self, x: Tensor) -> Tensor:
        """Compute it by the op of a plain block."""
        operands = Operands(
            x=x, w_up=self.w_enc, b_up=self.b_enc, w_down=self.w_dec, b_down=self.b_dec, thresholds=self.thresholds
        )
        return run_block(operands, BlockOptions(activation="fatrelu"))

    def by_coo(self, x: Tensor, w_dec: Tensor) -> Tensor:
        """Compute it as sae-lens does, with w_dec in float32."""
        z = torch.nn.functional.linear(x, self.w_enc, self.b_enc)
        kept = (torch.relu(z) * (z > self.thresholds)).float().to_sparse()
        y: Tensor = torch.sparse.mm(kept, w_dec)
        return y.add_(self.b_dec).to(x.dtype)

    def by_dense(self, x: Tensor) -> Tensor:
        """Compute it by dense products, between which torch.compile fuses all."""
        layers: tuple[Any, Any] = self.narrow or (self.w_enc, self.w_dec)
        function = _compiled(_dense if self.narrow is None else _dense_fp8)
        y: Tensor = function(x, *layers, self.b_enc, self.thresholds, self.b_dec)
        return y


def _dense(x: Tensor, w_enc: Tensor, w_dec: Tensor, b_enc: Tensor, thresholds: Tensor, b_dec: Tensor) -> Tensor:
    z = torch.nn.functional.linear(x, w_enc, b_enc)
    return torch.addmm(b_dec, torch.relu(z) * (z > thresholds), w_dec)


def _dense_fp8(
    x: Tensor, enc: DenseFp8Linear, dec: DenseFp8Linear, b_enc: Tensor, thresholds: Tensor, b_dec: Tensor
) -> Tensor:
    z = enc(x) + b_enc  # not every cuBLAS adds biases behind scales for rows
    return dec(torch.relu(z) * (z > thresholds)) + b_dec


@functools.cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return compile_rival(function, dynamic=True)  # its products are cuBLAS's, whatever the sizes


def check(sae: Sae, x: Tensor) -> float:
    """Compare features and y of some tokens with float64; return how many neurons a token has.

    Raises:
        click.ClickException: They differ by more than rounding.
    """
    most_off = 0.05 if sae.w_enc_scale is None else 0.2  # x is rounded to E4M3, too
    found = sae.encode(x)
    y = decode(found, sae.w_dec, sae.b_dec)
    for token in torch.randint(len(x), (CHECKED_TOKENS,)).tolist():
        own = slice(*found.offsets[token : token + 2].tolist())
        indices, values = found.indices[own].long(), found.values[own].double()
        z = torch.cat([sae.rows(slice(i, i + 65536)) @ x[token].float() for i in range(0, len(sae.w_enc), 65536)])
        z += sae.b_enc.float()
        exact = sae.rows(indices).double() @ x[token].double() + sae.b_enc[indices].double()
        expected = int((z > sae.thresholds).sum())
        off = float((values - exact).abs().max()) if len(values) else 0.0
        error = relative_error(y[token], values @ sae.w_dec[indices].double() + sae.b_dec.double())
        # Those beside their threshold may be rounded to either side of it.
        if abs(len(values) - expected) > 2 + 0.1 * expected or not off <= most_off or not error <= 2**-7:
            raise click.ClickException(
                f"token {token}: {len(values)} neurons for {expected}, off by {off:.2e}, y by {error:.2e}"
            )
    return len(found.indices) / len(x)


def bytes_of(call: Call) -> int | None:
    """Return the most memory that a call takes; None where there is too little."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    try:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    except torch.OutOfMemoryError:
        return None
    finally:
        torch.cuda.empty_cache()


def time_all(calls: dict[str, Call], repeats: int) -> dict[str, Any]:
    """Return the time of each call in microseconds, with what the host needs for it; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            call()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            events[0].record()
            for _ in range(CALLS):
                call()
            events[1].record()
            torch.cuda.synchronize()
            times[name].append(events[0].elapsed_time(events[1]) * 1000 / CALLS)
    return {name: timing.times_of(found).to_json() for name, found in times.items()}


def measure(run: Run, sae: Sae, tokens: int, repeats: int) -> Result:
    """Check and time one autoencoder at one number of tokens; leave out what finds no memory."""
    d_ff, d_model = sae.w_enc.shape
    x = torch.randn(tokens, d_model, dtype=torch.bfloat16, device=harness.DEVICE)
    active = check(sae, x)
    calls: dict[str, Call] = {TWELL: functools.partial(sae.by_features, x), DENSE: functools.partial(sae.by_dense, x)}
    if sae.w_enc_scale is None:
        calls[BLOCK] = functools.partial(sae.by_block, x)
        if d_model * d_ff * 4 <= MOST_BYTES_OF_FLOAT32:
            calls[COO] = functools.partial(sae.by_coo, x, sae.w_dec.float())
    taken = {name: most for name, call in run.chosen(calls).items() if (most := bytes_of(call)) is not None}
    timed = {name: calls[name] for name in taken}
    calls[TWELL] = functools.partial(sae.by_features, x, round(2 * active * tokens))  # a graph needs a capacity
    for name in (name for name in taken if name != COO):
        with contextlib.suppress(torch.OutOfMemoryError):
            timed[name + IN_GRAPH] = timing.record([calls[name]])
        torch.cuda.empty_cache()
    times = time_all(timed, repeats)
    return {"d_model": d_model, "d_ff": d_ff, "tokens": tokens, "active": active, "times": times, "bytes": taken}


def _megabytes(name: str) -> Callable[[Result], str]:
    return lambda result: f"{result['bytes'][name] / 1e6:.1f}" if name in result["bytes"] else "-"


COLUMNS: Columns = {
    "d_model / d_ff": lambda result: f"{result['d_model']} / {result['d_ff']}",
    "active": field("active", ".0f"),
    "tokens": field("tokens"),
    **times_of(TWELL, BLOCK, DENSE, COO, *(name + IN_GRAPH for name in (TWELL, BLOCK, DENSE)), digits=0),
    "over dense": over([DENSE], TWELL),
    "in graphs": over([DENSE + IN_GRAPH], TWELL + IN_GRAPH),
    "over COO": over([COO], TWELL),
    **{f"{name}, MB": _megabytes(name) for name in (TWELL, DENSE, COO)},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(harness.Options):
    """The options of this benchmark.

    Attributes:
        sizes: Of each autoencoder, d_model, d_ff, and the active neurons of a token.
    """

    sizes: tuple[tuple[int, int, int], ...] = option(
        "2304x16384x60,3584x131072x100,5120x1048576x150", "SIZE,…", shapes("2304x16384x60")
    )
    tokens: tuple[int, ...] = option("8,8192", "N,…", NUMBERS)
    weights: str = option("bf16", kind=("bf16", "fp8"))
    repeats: int = option(10, "N", COUNT)


@harness.benchmark(Options, sizes="64x300x10,64x70000x20", tokens="3,40", repeats=2)
def main(run: Run, options: Options) -> None:
    """Print a Markdown table of times and memory."""
    run.begin(COLUMNS)
    for size in options.sizes:
        sae = Sae.draw(*size, options.weights == "fp8")
        for tokens in options.tokens:
            run.add({**measure(run, sae, tokens, options.repeats), "weights": options.weights})


if __name__ == "__main__":
    main()
