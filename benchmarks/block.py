"""Time the kernels of one feed-forward block against dense torch: the gate and the whole block.

python benchmarks/block.py --tokens 2048,8192 --json results.json
python benchmarks/block.py --suite --json results.json > results.md

Builds nothing: it uses the plugin library that twellc finds. Every size is checked against float64 before it is timed.
Times are of one call within a CUDA graph that holds one call for each of several sets of weights, so that weights come
from memory as they do in a model. All contestants take turns, in a new order in each repetition.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import platform
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from torch.nn import functional

from twellc.plugins import library

# Weights in rotation come to about this much, several times the L2 of any GPU.
_ROTATED_BYTES = 512 << 20
_CHECKED_ROWS = 64
# So many standard deviations from zero a gate value is active, or is not, whatever else is drawn.
_CERTAIN = 30.0


@dataclasses.dataclass(frozen=True)
class Weights:
    """One block: gate and up [d_ff, d_model]; down [d_model, d_ff] for torch and [d_ff, d_model] for twellc.

    A plain block has no up.
    """

    gate: Tensor
    up: Tensor | None
    down: Tensor
    down_by_neuron: Tensor

    def dense(self, x: Tensor) -> Tensor:
        """Compute the block for x [tokens, d_model] by matrix products."""
        return dense(x, self.gate, self.up, self.down)


class Twell:
    """The kernels, called for one x, with weights that may change."""

    def __init__(self, x: Tensor, d_ff: int, compression: int, variant: str) -> None:
        self._lib = library.load()
        self._x = x
        tokens, d_model = x.shape
        self._problem = library.Problem(
            tokens=tokens,
            d_model=d_model,
            d_ff=d_ff,
            d_out=d_model,
            compression=compression,
            dtype=library.DTYPES[str(x.dtype).removeprefix("torch.")],
            variant=library.VARIANTS[variant],
        )
        words = -(-d_ff // library.TILE) * (library.TILE // compression)
        self.packed = torch.empty((tokens, words), dtype=torch.int32, device="cuda")
        self.workspace = torch.empty(self._lib.twell_workspace_bytes(self._problem), dtype=torch.uint8, device="cuda")
        self.y = torch.empty_like(x)

    def _tensors(self, w: Weights) -> library.Tensors:
        pointers = {"w_gate": w.gate, "w_up": w.up, "w_down": w.down_by_neuron, "x": self._x, "y": self.y}
        return library.Tensors(**{name: tensor.data_ptr() for name, tensor in pointers.items() if tensor is not None})

    def _run(self, function: Callable[..., int], w: Weights, *arguments: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        status = function(ctypes.byref(self._problem), ctypes.byref(self._tensors(w)), *arguments, stream)
        if status != 0:
            raise RuntimeError(f"{function.__name__}: CUDA error {status}")

    def gate(self, w: Weights) -> None:
        """Run the gate alone."""
        self._run(self._lib.twell_gate, w, self.packed.data_ptr())

    def mlp(self, w: Weights) -> None:
        """Run the whole block."""
        self._run(self._lib.twell_mlp, w, self.workspace.data_ptr(), self.workspace.numel())


def dense(x: Tensor, gate: Tensor, up: Tensor | None, down: Tensor) -> Tensor:
    """The same block as two or three matmuls."""
    g = torch.relu(functional.linear(x, gate))
    return functional.linear(g if up is None else g * functional.linear(x, up), down)


def quantile(p: Tensor) -> Tensor:
    """Where a standard normal variable is exceeded with probability p."""
    normal = torch.distributions.Normal(torch.zeros((), device="cuda"), torch.ones((), device="cuda"))
    value: Tensor = normal.icdf(1 - p)  # type: ignore[no-untyped-call]
    return value


def make_inputs(
    tokens: int, d_model: int, d_ff: int, dtype: torch.dtype, density: float, neurons: str, variant: str, heavy: int = 0
) -> tuple[Tensor, list[Weights]]:
    """Draw x [tokens, d_model] and sets of weights.

    The first column of x carries how active a token is (log-normal, scaled to the density; at a density of 1, all is),
    the second is constant: its weights carry how active a neuron is, equally or by Zipf's law. The third one makes the
    first `heavy` neurons active for the token in the middle.
    """

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda")

    active = torch.exp(0.8 * draw(tokens))
    active = (active / active.mean() * density).clamp(max=0.9)
    x = draw(tokens, d_model)
    x[:, 0] = (quantile(active) if density < 1 else -_CERTAIN) * d_model**0.5
    x[:, 1] = d_model**0.5
    if heavy > 0:
        x[:, 2] = 0
        x[tokens // 2, 2] = _CERTAIN * d_model**0.5
    count = max(2, min(12, _ROTATED_BYTES // (3 * d_model * d_ff * 2)))
    if tokens > 8192:
        count = 2
    sets = []
    for _ in range(count):
        gate = draw(d_ff, d_model) / d_model**0.5
        gate[:, 0] = -1 / d_model**0.5
        gate[:, 1] = 0
        if heavy > 0:
            gate[:, 2] = 0
            gate[:heavy, 2] = 1 / d_model**0.5
        if neurons == "zipf":
            rank = torch.randperm(d_ff, device="cuda") + 1.0
            share = 1 / rank
            share = (share / share.mean() * density).clamp(1e-7, 0.5)
            gate[:, 1] = (quantile(torch.tensor(density, device="cuda")) - quantile(share)) / d_model**0.5
        up = None if variant == "plain" else (draw(d_ff, d_model) / d_model**0.5).to(dtype)
        down = (draw(d_model, d_ff) * 0.2).to(dtype)
        sets.append(Weights(gate.to(dtype), up, down, down.t().contiguous()))
    return x.to(dtype), sets


def check(x: Tensor, w: Weights, twell: Twell) -> dict[str, float]:
    """Compare some rows of the block with float64; a kernel may be twice as wrong as dense torch.

    Raises:
        click.ClickException: It is more wrong.
    """
    rows = torch.randperm(len(x), device="cuda")[:_CHECKED_ROWS]
    exact = dense(x[rows].double(), w.gate.double(), None if w.up is None else w.up.double(), w.down.double())

    def error(y: Tensor) -> float:
        return float((y.double() - exact).norm() / exact.norm())

    base = error(w.dense(x[rows]))
    errors = {"dense": base}
    twell.y.fill_(float("nan"))
    twell.mlp(w)
    errors["mlp"] = error(twell.y[rows])
    if not errors["mlp"] <= 2 * base + 1e-3:
        raise click.ClickException(f"{len(x)} tokens: mlp is off by {errors['mlp']:.2e}, dense by {base:.2e}")
    return errors


def time_all(calls: dict[str, Callable[[Weights], Any]], sets: list[Weights], repeats: int) -> dict[str, list[float]]:
    """Time one call of each contestant, in microseconds, `repeats` times."""
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, call in calls.items():
        for w in sets:
            call(w)
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for w in sets:
                call(w)
    times: dict[str, list[float]] = {name: [] for name in calls}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for repetition in range(-1, repeats):  # the first one warms up
        for name in random.sample(list(graphs), len(graphs)):
            graphs[name].replay()
            start.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            if repetition >= 0:
                times[name].append(start.elapsed_time(end) * 1e3 / len(sets))
    return times


def contestants(
    x: Tensor, twell: Twell, compiled_dense: Callable[..., Tensor] | None
) -> dict[str, Callable[[Weights], Any]]:
    """What takes turns in being timed."""
    calls: dict[str, Callable[[Weights], Any]] = {
        "dense eager": lambda w: w.dense(x),
        "cuBLAS gate": lambda w: functional.linear(x, w.gate),
        "gate": twell.gate,
        "mlp": twell.mlp,
    }
    if compiled_dense is not None:
        calls["dense compiled"] = lambda w: compiled_dense(x, w.gate, w.up, w.down)
    return calls


def machine() -> dict[str, str]:
    """Say what was measured on and with."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "multiprocessors": str(properties.multi_processor_count),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "twellc": library.load().twell_version().decode(),
    }


def new_report() -> dict[str, Any]:
    """What a script that runs under click writes down first: machine and arguments, but no paths."""
    given = click.get_current_context().params
    arguments = {name: value for name, value in given.items() if name not in ("json_path", "plans")}
    return {"machine": machine(), "arguments": arguments, "results": []}


def spread(values: list[float]) -> dict[str, float]:
    """Median and the range that holds the middle 80 %."""
    deciles = statistics.quantiles(values, n=10) if len(values) > 1 else [values[0]] * 9
    return {"median_us": statistics.median(values), "p10_us": deciles[0], "p90_us": deciles[-1]}


def table_row(result: dict[str, Any]) -> str:
    """One line of the Markdown table."""
    median = {name: value["median_us"] for name, value in result["times"].items()}
    best = min(median["dense eager"], median.get("dense compiled", float("inf")))
    compiled = f"{median['dense compiled']:.1f}" if "dense compiled" in median else "-"
    cells = [
        f"{result['tokens']}",
        f"{result['mean_nonzeros']:.1f} / {result['max_nonzeros']}",
        f"{median['dense eager']:.1f}",
        compiled,
        f"{median['cuBLAS gate']:.1f}",
        f"{median['gate']:.1f} ({median['gate'] / median['cuBLAS gate']:.2f})",
        f"{median['mlp']:.1f}",
        f"{best / median['mlp']:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


HEADER = (
    "| tokens | non-zeros a row, mean / max | dense eager | dense compiled | cuBLAS gate | twell gate (ratio) "
    "| mlp | speed-up |\n|" + " ---: |" * 8
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What one table is about."""

    tokens: tuple[int, ...]
    d_model: int = 2048
    d_ff: int = 5632
    dtype: str = "bfloat16"
    density: float = 0.005
    neurons: str = "equal"
    compression: int = 8
    variant: str = "gated"
    heavy: int = 0

    def __str__(self) -> str:
        heavy = f", one token with {self.heavy} active neurons" if self.heavy > 0 else ""
        return (
            f"d_model {self.d_model}, d_ff {self.d_ff}, {self.dtype}, density {self.density:g}, {self.neurons} neurons,"
            f" {self.variant}{heavy}"
        )


# Token counts on both sides of wherever other kernels take over.
_FEW = (1, 2, 4, 8, 16, 24, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256)
_SWEEP = (*_FEW, 257, 320, 384, 448, 512, 768, 1024, 1536, 1920, 1921, 2048, 3072, 4096)
_PLAIN = (1, 16, 17, 32, 33, 64, 128, 256, 512, 1024, 2048, 8192)
_DECIDED = (2, 8, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128)  # by what the gate has counted
_LARGE_MODEL = (1, 4, 16, 17, 32, 33, 48, 64, 128, 256, 512, 1024, 1280, 1281, 2048, 8192, 32768)

# All that this project states about the kernels: token counts, the neurons' distribution, sizes of larger models, and
# densities on both sides of break-even, up to dense layers; one heavy token.
SUITE = (
    Setting((*_SWEEP, 8192, 32768, 131072)),
    Setting((*_SWEEP, 8192), density=0.1),
    Setting((*_SWEEP, 8192), density=1.0),
    Setting(_DECIDED, density=0.02),
    Setting(_DECIDED, heavy=2816),
    Setting((2048, 8192, 32768, 131072), neurons="zipf"),
    *(Setting((8192, 32768), density=density, neurons="zipf") for density in (0.01, 0.02)),
    Setting((8192, 16384), d_model=4096, d_ff=11008, neurons="zipf"),
    Setting(_LARGE_MODEL, d_model=4096, d_ff=11008),
    Setting(_LARGE_MODEL, d_model=4096, d_ff=14336),
    Setting((1, 16, 17, 32, 33, 48, 64, 256, 1024, 1280, 1281, 2048, 8192), d_model=4096, d_ff=11008, density=0.1),
    Setting((1, 16, 17, 32, 33, 48, 64, 128, 2048), d_model=5120, d_ff=13824),
    Setting((8, 16, 17, 32, 33, 48, 64, 128), d_model=5120, d_ff=13824, density=0.1),
    *(Setting((1, 4, 8, 16, 17, 32, 64), d_model=2048, d_ff=8192, density=density) for density in (0.005, 0.1)),
    *(Setting((17, 32, 64), d_model=2560, d_ff=6912, density=density) for density in (0.005, 0.1)),
    *(Setting((17, 32, 64), d_model=2560, d_ff=10240, density=density, variant="plain") for density in (0.005, 0.1)),
    *(Setting((17, 32, 48, 64), d_model=4096, d_ff=14336, density=density) for density in (0.02, 0.1)),
    *(Setting((2048, 8192), density=density) for density in (0.001, 0.002, 0.01, 0.02, 0.05)),
    *(
        Setting(_PLAIN, d_model, d_ff, density=density, variant="plain")
        for d_model, d_ff in ((1024, 4096), (2048, 8192), (4096, 16384))
        for density in (0.005, 0.1)
    ),
    *(Setting((1, 4, 16, 17, 32, 64), d_model, 4 * d_model, density=1.0, variant="plain") for d_model in (1024, 2048)),
)


def measure(
    setting: Setting, tokens: int, compiled_dense: Callable[..., Tensor] | None, repeats: int
) -> dict[str, Any]:
    """Check and time one size."""
    dtype = getattr(torch, setting.dtype)
    x, sets = make_inputs(
        tokens,
        setting.d_model,
        setting.d_ff,
        dtype,
        setting.density,
        setting.neurons,
        setting.variant,
        setting.heavy,
    )
    twell = Twell(x, setting.d_ff, setting.compression, setting.variant)
    errors = check(x, sets[0], twell)
    nonzeros = (functional.linear(x, sets[0].gate) > 0).sum(dim=1)
    times = time_all(contestants(x, twell, compiled_dense), sets, repeats)
    return {
        **dataclasses.asdict(setting),
        "tokens": tokens,
        "mean_nonzeros": float(nonzeros.double().mean()),
        "max_nonzeros": int(nonzeros.max()),
        "weight_sets": len(sets),
        "errors": errors,
        "times": {name: spread(values) for name, values in times.items()},
    }


@click.command()
@click.option("--tokens", default="256,1024,2048,4096,8192,32768,131072", show_default=True, help="Row counts.")
@click.option("--d-model", default=2048, show_default=True)
@click.option("--d-ff", default=5632, show_default=True)
@click.option("--dtype", type=click.Choice(sorted(library.DTYPES)), default="bfloat16", show_default=True)
@click.option(
    "--density",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.005,
    show_default=True,
    help="Share of non-zero gate activations.",
)
@click.option("--neurons", type=click.Choice(["equal", "zipf"]), default="equal", show_default=True)
@click.option("--compression", type=click.Choice(["1", "2", "4", "8"]), default="8", show_default=True)
@click.option("--variant", type=click.Choice(["gated", "plain"]), default="gated", show_default=True)
@click.option(
    "--heavy",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Neurons made active for the token in the middle.",
)
@click.option("--suite", is_flag=True, help="Run all settings that benchmarks/README.md states, not the one above.")
@click.option("--repeats", default=20, show_default=True)
@click.option(
    "--compiled/--no-compiled", default=True, show_default=True, help="Also time torch.compile's dense block."
)
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write results here.")
def main(
    tokens: str,
    d_model: int,
    d_ff: int,
    dtype: str,
    density: float,
    neurons: str,
    compression: str,
    variant: str,
    heavy: int,
    suite: bool,
    repeats: int,
    compiled: bool,
    seed: int,
    json_path: Path | None,
) -> None:
    """Print Markdown tables of times in microseconds; the speed-up is over the faster dense block."""
    if not torch.cuda.is_available():
        raise click.ClickException("there is no CUDA device")
    if density == 1 and neurons == "zipf":
        raise click.UsageError("--density 1 leaves no neuron less active than another: use --neurons equal")
    torch.manual_seed(seed)
    random.seed(seed)
    counts = tuple(int(value) for value in tokens.split(","))
    setting = Setting(counts, d_model, d_ff, dtype, density, neurons, int(compression), variant, heavy)
    settings = SUITE if suite else (setting,)
    report = new_report()
    compiled_dense = torch.compile(dense, dynamic=False) if compiled else None
    torch._dynamo.config.recompile_limit = 256
    for setting in settings:
        click.echo(f"{report['machine']['gpu']}, torch {report['machine']['torch']}: {setting}\n\n{HEADER}")
        for count in setting.tokens:
            result = measure(setting, count, compiled_dense, repeats)
            report["results"].append(result)
            click.echo(table_row(result))
            if json_path is not None:  # after every size, so that an interrupted run leaves what it has
                json_path.write_text(json.dumps(report, indent=1) + "\n")
        click.echo()


if __name__ == "__main__":
    main()
