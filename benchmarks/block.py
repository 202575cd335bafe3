"""Time the kernels of one feed-forward block against dense torch: the gate and the whole block.

python benchmarks/block.py --tokens 2048,8192 --json results.json
python benchmarks/block.py --suite --json results.json > results.md
python benchmarks/block.py --smoke

Builds nothing: it uses the plugin library that twellc finds. Every size is checked against float64 before it is timed.
Times are of one call within a CUDA graph that holds one call for each of several sets of weights, so that weights come
from memory as they do in a model. All contestants take turns, in a new order in each repetition. The speed-up is over
the fastest of three dense blocks; dense FP8 and INT4 round more, and have their own columns.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import session
import torch
from draw import DISTRIBUTIONS, TRAINED_LAYERS, Neurons, Weights, make_inputs
from torch import Tensor
from torch.nn import functional

from twellc.benchmarking import contest
from twellc.benchmarking.forms import BASELINES, COMPILED, EAGER, FP8, INT4, LOSSY, PACKED, dense_forms
from twellc.plugins import library

CHECKED_ROWS = 64
# The contestant without --hot.
WHOLE = "mlp, whole"


class Twell:
    """The kernels, called for one x, with weights that may change."""

    def __init__(self, x: Tensor, d_ff: int, compression: int, variant: str, hot: int = 0) -> None:
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
            hot=hot,
        )
        words = -(-d_ff // library.TILE) * (library.TILE // compression)
        self.packed = torch.empty((tokens, words), dtype=torch.int32, device=x.device)
        size = self._lib.twell_workspace_bytes(self._problem)
        self.workspace = torch.empty(size, dtype=torch.uint8, device=x.device)
        self.y = torch.empty_like(x)

    def kernels(self) -> list[str]:
        """Return the route of the whole block, then its launches."""
        return library.describe(self._problem).splitlines()

    def _tensors(self, w: Weights) -> library.Tensors:
        pointers = {"w_gate": w.block.gate, "w_up": w.block.up, "w_down": w.down_by_neuron, "x": self._x, "y": self.y}
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


def relative_error(y: Tensor, exact: Tensor) -> float:
    """Return how far y is from the exact result in float64, relative to that."""
    return float((y.double() - exact).norm() / exact.norm())


def refuse_error(what: str, error: float, base: float) -> None:
    """Fail if something is more than twice as wrong as eager dense torch.

    Raises:
        click.ClickException: It is.
    """
    if not error <= 2 * base + 1e-3:
        raise click.ClickException(f"{what} is off by {error:.2e}, dense by {base:.2e}")


def check(x: Tensor, w: Weights, twell: Twell, forms: dict[str, Callable[[Tensor], Tensor]]) -> dict[str, float]:
    """Compare some rows of the block with float64; dense FP8 and INT4 may be as wrong as they are.

    Raises:
        click.ClickException: Something is more than twice as wrong as eager dense torch.
    """
    rows = torch.randperm(len(x), device=x.device)[:CHECKED_ROWS]
    exact = w.block.double().dense(x[rows].double())
    errors = {name: relative_error(form(x)[rows], exact) for name, form in forms.items()}
    twell.y.fill_(float("nan"))
    twell.mlp(w)
    errors["mlp"] = relative_error(twell.y[rows], exact)
    for name, error in errors.items():
        if name not in LOSSY:
            refuse_error(f"{len(x)} tokens: {name}", error, errors[EAGER])
    return errors


def fastest(median: dict[str, float]) -> float:
    """Return the time of the fastest dense block in the element type of the model."""
    return min(median[name] for name in BASELINES if name in median)


def table_row(result: dict[str, Any]) -> str:
    """One line of the Markdown table."""
    median = {name: value["median_us"] for name, value in result["times"].items()}

    def time_of(name: str) -> str:
        return f"{median[name]:.1f}" if name in median else "-"

    cells = [
        f"{result['tokens']}",
        f"{result['mean_nonzeros']:.1f} / {result['max_nonzeros']}",
        *(time_of(name) for name in (EAGER, COMPILED, PACKED, FP8, INT4, "cuBLAS gate")),
        f"{median['gate']:.1f} ({median['gate'] / median['cuBLAS gate']:.2f})",
        time_of("mlp") + (f" (whole {time_of(WHOLE)})" if WHOLE in median else ""),
        f"{fastest(median) / median['mlp']:.2f}",
        f"{median[FP8] / median['mlp']:.2f}" if FP8 in median else "-",
    ]
    return "| " + " | ".join(cells) + " |"


HEADER = (
    "| tokens | non-zeros a row, mean / max | dense eager | dense compiled | dense packed | dense FP8 | dense INT4 "
    "| cuBLAS gate | twell gate (ratio) | mlp | speed-up | over FP8 |\n|" + " ---: |" * 12
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
    layer: int = 0
    compression: int = 8
    variant: str = "gated"
    heavy: int = 0
    hot: int = 0

    def __str__(self) -> str:
        heavy = f", one token with {self.heavy} active neurons" if self.heavy > 0 else ""
        trained = self.neurons == "trained"
        neurons = f"trained layer {self.layer}" if trained else f"density {self.density:g}, {self.neurons} neurons"
        hot = f", the {self.hot} hottest as a dense block" if self.hot > 0 else ""
        return f"d_model {self.d_model}, d_ff {self.d_ff}, {self.dtype}, {neurons}, {self.variant}{heavy}{hot}"


# Token counts on both sides of wherever other kernels take over.
_LIMITS = library.limits()
_GENERIC, _HOPPER = _LIMITS.few_tokens_generic, _LIMITS.few_tokens_sm90
_BLOCK = _LIMITS.dense_block_products // (2048 * 5632)
_FEW = (1, 2, 4, 8, _LIMITS.few_tokens, 24, 32, 33, 48, _GENERIC, _GENERIC + 1, 96, _HOPPER, _HOPPER + 1, 192, 256)
_SWEEP = (*_FEW, 257, 320, 384, 448, 512, 768, 1024, 1536, _BLOCK, _BLOCK + 1, 2048, 3072, 4096)
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
    *(Setting((1, 8, 32, 256, 2048, 8192, 32768), neurons="trained", layer=layer) for layer in range(TRAINED_LAYERS)),
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

_QUICKEST = min(range(len(SUITE)), key=lambda index: (len(SUITE[index].tokens), max(SUITE[index].tokens)))


def measure(setting: Setting, tokens: int, compiled: bool, repeats: int) -> dict[str, Any]:
    """Check and time one size."""
    torch._dynamo.reset()  # or compiled kernels would be launched as suits the size before
    dtype = getattr(torch, setting.dtype)
    neurons = Neurons(setting.neurons, setting.density, setting.layer, setting.heavy, setting.hot)
    x, sets = make_inputs(tokens, setting.d_model, setting.d_ff, dtype, neurons, setting.variant, session.DEVICE)
    twell = Twell(x, setting.d_ff, setting.compression, setting.variant, setting.hot)
    forms = [dense_forms(w.block, x, compiled) for w in sets]
    errors = check(x, sets[0], twell, forms[0])
    nonzeros = sets[0].block.active(x).sum(dim=1)
    contestants: dict[str, Sequence[Callable[[], object]]] = {
        name: [functools.partial(each[name], x) for each in forms] for name in forms[0]
    }
    contestants |= {
        "cuBLAS gate": [functools.partial(functional.linear, x, w.block.gate) for w in sets],
        "gate": [functools.partial(twell.gate, w) for w in sets],
        "mlp": [functools.partial(twell.mlp, w) for w in sets],
    }
    if setting.hot > 0:
        whole = Twell(x, setting.d_ff, setting.compression, setting.variant)
        contestants[WHOLE] = [functools.partial(whole.mlp, w) for w in sets]
    times = time_rotated(contestants, repeats)
    return {
        **dataclasses.asdict(setting),
        "tokens": tokens,
        "mean_nonzeros": float(nonzeros.double().mean()),
        "max_nonzeros": int(nonzeros.max()),
        "weight_sets": len(sets),
        "kernels": twell.kernels(),
        "errors": errors,
        "times": times,
    }


def settings_of(part: str) -> tuple[Setting, ...]:
    """Return a part of the suite, such as `2/3`.

    Raises:
        click.BadParameter: There is no such part.
    """
    number, _, count = part.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count) <= len(SUITE)):
        raise click.BadParameter(f"{part!r} is not a part of the suite; expected one such as 2/3", param_hint="--part")
    return SUITE[int(number) - 1 :: int(count)]


def time_rotated(contestants: Mapping[str, Sequence[Callable[[], object]]], repeats: int) -> dict[str, Any]:
    """Time one call of each contestant, which has one for each set of weights, in microseconds, as JSON."""
    return {name: times.to_json() for name, times in contest.time_rotated(contestants, repeats).items()}


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
@click.option(
    "--neurons",
    type=click.Choice(DISTRIBUTIONS),
    default="equal",
    show_default=True,
    help="How often they fire: equally, by Zipf's law, or as those of --layer of a trained model, which has a density "
    "and its own widths.",
)
@click.option("--layer", type=click.IntRange(0, TRAINED_LAYERS - 1), default=0, show_default=True)
@click.option("--compression", type=click.Choice(["1", "2", "4", "8"]), default="8", show_default=True)
@click.option("--variant", type=click.Choice(["gated", "plain"]), default="gated", show_default=True)
@click.option(
    "--heavy",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Neurons made active for the token in the middle.",
)
@click.option(
    "--hot",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Put this many neurons first, those that fire most often, and compute them as a dense block.",
)
@click.option("--suite", is_flag=True, help="Run all settings that benchmarks/README.md states, not the one above.")
@click.option("--part", default="1/1", show_default=True, help="Of the suite: 2/3 is the second of three parts.")
@click.option("--repeats", default=20, show_default=True)
@click.option(
    "--compiled/--no-compiled",
    default=True,
    show_default=True,
    help="Also time the dense block through torch.compile as a whole.",
)
@click.option("--seed", default=0, show_default=True)
@session.json_option
@session.smoke_option(tokens="1,40", d_model=256, d_ff=768, part=f"{_QUICKEST + 1}/{len(SUITE)}", repeats=2)
def main(
    tokens: str,
    d_model: int,
    d_ff: int,
    dtype: str,
    density: float,
    neurons: str,
    layer: int,
    compression: str,
    variant: str,
    heavy: int,
    hot: int,
    suite: bool,
    part: str,
    repeats: int,
    compiled: bool,
    seed: int,
    json_path: Path | None,
) -> None:
    """Print Markdown tables of times in microseconds; the speed-up is over the fastest dense block in bf16 or fp16."""
    session.refuse_without_gpu()
    if density == 1 and neurons == "zipf":
        raise click.UsageError("--density 1 leaves no neuron less active than another: use --neurons equal")
    if neurons == "trained" and (d_model, d_ff) != (2048, 5632):
        raise click.UsageError("--neurons trained are those of layers with d_model 2048 and d_ff 5632")
    if hot > d_ff:
        raise click.UsageError(f"--hot {hot} are more neurons than --d-ff {d_ff}")
    torch.manual_seed(seed)
    random.seed(seed)
    counts = tuple(int(value) for value in tokens.split(","))
    setting = Setting(counts, d_model, d_ff, dtype, density, neurons, layer, int(compression), variant, heavy, hot)
    settings = settings_of(part) if suite else (setting,)
    report = session.new_report()
    for setting in settings:
        click.echo(f"{report['machine']['gpu']}, torch {report['machine']['torch']}: {setting}\n\n{HEADER}")
        for count in setting.tokens:
            result = measure(setting, count, compiled, repeats)
            report["results"].append(result)
            click.echo(table_row(result))
            session.write_results(json_path, report)
        click.echo()


if __name__ == "__main__":
    main()
