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
from collections.abc import Callable

import click
import harness
import torch
from draw import DISTRIBUTIONS, TRAINED_LAYERS, Neurons, Weights, make_inputs
from harness import CHECKED_ROWS, NUMBERS, Calls, Columns, Result, Run, check, field, over, time_of, times_of
from torch import Tensor
from torch.nn import functional

from twellc.benchmarking.forms import BASELINES, COMPILED, EAGER, FP8, INT4, PACKED, dense_forms
from twellc.options.option import COUNT, Number, option
from twellc.plugins import library

CUBLAS = "cuBLAS gate"
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
        self.y = torch.full_like(x, float("nan"))

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

    def mlp(self, w: Weights) -> Tensor:
        """Run the whole block; return its result, which the next call overwrites."""
        self._run(self._lib.twell_mlp, w, self.workspace.data_ptr(), self.workspace.numel())
        return self.y


def nonzeros(result: Result) -> str:
    """Return how many neurons are active for a token: on average, and the most."""
    return f"{result['mean_nonzeros']:.1f} / {result['max_nonzeros']}"


def gate(result: Result) -> str:
    """Return the time of the gate alone, and its ratio to cuBLAS's."""
    ratio = over(["gate"], CUBLAS)(result)
    return f"{time_of('gate')(result)} ({ratio})"


def mlp(result: Result) -> str:
    """Return the time of the whole block, and without hot neurons where there are any."""
    whole = f" (whole {time_of(WHOLE)(result)})" if WHOLE in result["times"] else ""
    return time_of("mlp")(result) + whole


COLUMNS: Columns = {
    "tokens": field("tokens"),
    "non-zeros a row, mean / max": nonzeros,
    **times_of(EAGER, COMPILED, PACKED, FP8, INT4, CUBLAS),
    "twell gate (ratio)": gate,
    "mlp": mlp,
    "speed-up": over(BASELINES, "mlp"),
    "over FP8": over([FP8], "mlp"),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """What one table is about.

    Attributes:
        dtype: Type of x and the weights.
        neurons: How often they fire: equally, by Zipf's law, or as those of --layer of a trained model, which has a
            density and its own widths.
        layer: Of the trained model.
        compression: Of TwELL.
        variant: With a gate or without.
        heavy: Neurons made active for the token in the middle.
        hot: Put this many neurons first, those that fire most often, and compute them as a dense block.
    """

    tokens: tuple[int, ...] = option("256,1024,2048,4096,8192,32768,131072", "N,…", NUMBERS)
    d_model: int = option(2048, "N", COUNT)
    d_ff: int = option(5632, "N", COUNT)
    dtype: str = option("bfloat16", kind=tuple(sorted(library.DTYPES)))
    density: float = option(0.005, "SHARE", Number(0.0, 1.0, above=True))
    neurons: str = option("equal", kind=DISTRIBUTIONS)
    layer: int = option(0, kind=tuple(range(TRAINED_LAYERS)))
    compression: int = option(8, kind=library.COMPRESSIONS)
    variant: str = option("gated", kind=("gated", "plain"))
    heavy: int = option(0, "N", Number(0))
    hot: int = option(0, "N", Number(0))

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


def measure(run: Run, setting: Setting, tokens: int, compiled: bool) -> Result:
    """Check and time one size."""
    torch._dynamo.reset()  # or compiled kernels would be launched as suits the size before
    dtype = getattr(torch, setting.dtype)
    neurons = Neurons(setting.neurons, setting.density, setting.layer, setting.heavy, setting.hot)
    x, sets = make_inputs(tokens, setting.d_model, setting.d_ff, dtype, neurons, setting.variant, harness.DEVICE)
    twell = Twell(x, setting.d_ff, setting.compression, setting.variant, setting.hot)
    forms = [dense_forms(w.block, x, compiled) for w in sets]
    contestants: dict[str, Calls] = {name: [functools.partial(each[name], x) for each in forms] for name in forms[0]}
    contestants["mlp"] = [functools.partial(twell.mlp, w) for w in sets]
    if setting.hot > 0:
        whole = Twell(x, setting.d_ff, setting.compression, setting.variant)
        contestants[WHOLE] = [functools.partial(whole.mlp, w) for w in sets]
    contestants = run.chosen(contestants, EAGER)
    rows = torch.randperm(len(x), device=x.device)[:CHECKED_ROWS]
    errors = check(f"{tokens} tokens", contestants, sets[0].block.double().dense(x[rows].double()), rows)
    gates: dict[str, Calls] = {
        CUBLAS: [functools.partial(functional.linear, x, w.block.gate) for w in sets],
        "gate": [functools.partial(twell.gate, w) for w in sets],
    }
    active = sets[0].block.active(x).sum(dim=1)
    return {
        **{each.name: getattr(setting, each.name) for each in dataclasses.fields(Setting)},
        "tokens": tokens,
        "mean_nonzeros": float(active.double().mean()),
        "max_nonzeros": int(active.max()),
        "weight_sets": len(sets),
        "kernels": twell.kernels(),
        "errors": errors,
        "times": run.time(contestants | run.chosen(gates)),
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Setting, harness.Options):
    """The options of this benchmark: the setting of a table, or a suite of them.

    Attributes:
        suite: Run all settings that benchmarks/README.md states, not the one above.
        part: Of the suite: 2/3 is the second of three parts.
        compiled: Also time the dense block through torch.compile as a whole.
    """

    suite: bool = option(False)
    part: str = option("1/1", "N/COUNT")
    compiled: bool = option(True)


@harness.benchmark(Options, tokens="1,40", d_model=256, d_ff=768, part=f"{_QUICKEST + 1}/{len(SUITE)}", repeats=2)
def main(run: Run, options: Options) -> None:
    """Print Markdown tables of times in microseconds; the speed-up is over the fastest dense block in bf16 or fp16."""
    if options.density == 1 and options.neurons == "zipf":
        raise click.UsageError("--density 1 leaves no neuron less active than another: use --neurons equal")
    if options.neurons == "trained" and (options.d_model, options.d_ff) != (2048, 5632):
        raise click.UsageError("--neurons trained are those of layers with d_model 2048 and d_ff 5632")
    if options.hot > options.d_ff:
        raise click.UsageError(f"--hot {options.hot} are more neurons than --d-ff {options.d_ff}")
    for setting in settings_of(options.part) if options.suite else (options,):
        run.begin(COLUMNS, str(setting))
        for tokens in setting.tokens:
            run.add(measure(run, setting, tokens, options.compiled))
        click.echo()


if __name__ == "__main__":
    main()
