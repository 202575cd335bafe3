"""Time training: a block, forward and backward, and a step of a whole model of 1.5 billion parameters with optimizer.

python benchmarks/train.py block --json results.json
python benchmarks/train.py step --json results.json
python benchmarks/train.py step --smoke

`block` takes blocks whose neurons fire equally often, and those of four trained layers (data/README.md). Which neurons
are hot is chosen as in training, from how often each fired. Dense rivals are eager and compiled, with gate and up
projection in one product; everything is a CUDA graph of one forward and backward, and contestants take turns.
Gradients are compared first: a case where twell is further from dense than bfloat16 explains is named, not timed.

`step` trains a ReLU Llama by AdamW in bfloat16, on sequences of 2048 tokens, with the L1 term: densely, eager and
compiled, and with its blocks by the kernels of `twellc.optimize(model, training=True)`. The micro-batch is the largest
of --batches with which compiled dense and compiled twell fit the GPU. All take the same batches. The learning rate is
0, so that neurons fire as they were made to, and losses and norms of gradients can be compared: where they differ,
nothing is timed. Decoder layers are compiled, and the loss, in both.

Neurons fire as those of four trained layers (data/README.md), layer after layer in turns, or equally often at
--density; the JSON file has what was counted.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
import harness
import torch
import transformers
from draw import TRAINED_LAYERS, Neurons, make_inputs, offsets
from harness import NUMBERS, Columns, Result, Run, field, median, over, times_of
from model import ModelOptions, draw_ids
from torch import Tensor, nn
from torch.nn import functional
from trained import Penalised, dense_blocks, dense_term
from transformers.models.llama.modeling_llama import LlamaMLP

import twellc
from twellc.base.errors import UserError
from twellc.benchmarking.energy import EnergyMeter
from twellc.benchmarking.forms import COMPILED, EAGER, combine, compile_rival
from twellc.options.option import COUNT, NOT_NEGATIVE, option
from twellc.plugins.block import BlockOptions, Operands
from twellc.plugins.training import TrainingState, train_block
from twellc.training import L1Penalty, take_counts

DENSE, TWELL = "dense compiled", "twell compiled"
CONTESTANTS = (DENSE, TWELL, "dense eager", "twell eager")
# Over compiled dense: tokens a second, and peak memory.
TARGETS = (1.25, 0.75)
_WARM_UPS = 12  # by then which neurons are hot was chosen from enough tokens
_LOSS, _NORM = 0.02, 0.1  # by how much twell may differ from dense, as a share
_GIB = 1 << 30
_GRADIENT = 0.02  # relative error of gradients against dense ones: two roundings of bfloat16 each


@dataclass(frozen=True)
class Task:
    """What every contestant computes.

    Attributes:
        model: The model.
        batches: Token ids, int64 [batch, sequence + 1] each, that take turns.
        penalty: The coefficient of the L1 term.
    """

    model: Any
    batches: list[Tensor]
    penalty: float

    @property
    def tokens(self) -> int:
        """Tokens in a step."""
        return self.batches[0][:, 1:].numel()


def make_trained(model: Any) -> None:
    """Let neurons fire as those of the trained layers, in turns."""
    root = model.config.hidden_size**0.5
    activity = torch.special.ndtr(-model.model.embed_tokens.weight[:, 0].float() / root)
    for place, layer in enumerate(model.model.layers):
        rates = Neurons("trained", layer=place % TRAINED_LAYERS).rates().to(activity.device)
        gate = layer.mlp.gate_proj.weight
        if len(rates) != len(gate):
            raise click.ClickException(f"trained neurons are {len(rates)}, not {len(gate)}: use --neurons equal")
        gate[:, 1] = (offsets(rates, activity) / root).to(gate.dtype)


def entropy(hidden: Tensor, head_weight: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of targets [batch, sequence], given hidden states [batch, sequence, d_model]."""
    logits = functional.linear(hidden, head_weight).float()
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Contestant:
    """A way to train the model, put into it while the context is open."""

    def __init__(self, task: Task, name: str) -> None:
        self._task, self._twell, self._compiled = task, name.startswith("twell"), name.endswith("compiled")
        self._penalty: L1Penalty | None = None
        self._entropy: Callable[[Tensor, Tensor, Tensor], Tensor] = entropy
        self._step = 0

    def __enter__(self) -> Contestant:
        layers = self._task.model.model.layers
        torch._dynamo.reset()
        if self._twell:
            twellc.optimize(self._task.model, training=True)
            self._penalty = L1Penalty(self._task.model, self._task.penalty)
        else:
            dense_blocks(self._task.model, Penalised)
        if self._compiled:
            for layer in layers:
                if self._twell:
                    layer.compile(dynamic=False)  # blocks in training stay outside of graphs
                else:
                    layer._compiled_call_impl = compile_rival(layer._call_impl)
            self._entropy = compile_rival(entropy)
        self._optimizer = torch.optim.AdamW(
            self._task.model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1, fused=harness.DEVICE == "cuda"
        )
        return self

    def __exit__(self, *_: object) -> None:
        for layer in self._task.model.model.layers:
            layer._compiled_call_impl = None
        if not self._twell:
            dense_blocks(self._task.model, LlamaMLP)
        twellc.restore(self._task.model)
        self._task.model.zero_grad(set_to_none=True)
        self._penalty = None
        del self._optimizer
        gc.collect()
        if harness.DEVICE == "cuda":
            torch.cuda.empty_cache()

    def step(self) -> tuple[Tensor, Tensor]:
        """Train on a batch; return the loss with the L1 term, and the norm of the gradients."""
        model, ids = self._task.model, self._task.batches[self._step % len(self._task.batches)]
        self._step += 1
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        loss = self._entropy(hidden, model.lm_head.weight, ids[:, 1:])
        if self._penalty is not None:
            loss = loss + self._penalty(self._step)
        else:
            loss = loss + self._task.penalty * dense_term(model)
        torch.autograd.backward(loss)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach(), norm


def wait() -> None:
    """Wait for the GPU, if there is one."""
    if harness.DEVICE == "cuda":
        torch.cuda.synchronize()


def measure(task: Task, name: str, steps: int, expected: dict[str, float] | None) -> dict[str, Any]:
    """Train by one contestant, and return what it took.

    Args:
        task: What to train.
        name: The contestant.
        steps: Steps that count.
        expected: Loss and norm of the gradients of another one, to compare with; None for the first.

    Raises:
        click.ClickException: They differ.
    """
    if harness.DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with Contestant(task, name) as contestant:
        began = time.perf_counter()
        loss, norm = (float(each) for each in contestant.step())
        first = time.perf_counter() - began
        if expected is not None:
            for what, found, allowed in (("loss", loss, _LOSS), ("norm", norm, _NORM)):
                if not abs(found - expected[what]) <= allowed * abs(expected[what]):
                    raise click.ClickException(f"{name}: {what} {found}, of dense {expected[what]}")
        for _ in range(_WARM_UPS):
            contestant.step()
        wait()
        counts = take_counts(task.model) if name.startswith("twell") else {}
        meter = EnergyMeter() if harness.DEVICE == "cuda" else None
        joules, seconds = meter.joules() if meter else 0.0, []
        for _ in range(steps):
            began = time.perf_counter()
            contestant.step()
            wait()
            seconds.append(time.perf_counter() - began)
        joules = meter.joules() - joules if meter else 0.0
        peak = torch.cuda.max_memory_allocated() if harness.DEVICE == "cuda" else 0
    median = statistics.median(seconds)
    return {
        "contestant": name,
        "tokens": task.tokens,
        "seconds": seconds,
        "tokens_per_second": task.tokens / median,
        "peak_bytes": peak,
        "joules_per_token": joules / (steps * task.tokens),
        "loss": loss,
        "norm": norm,
        "first_step_seconds": first,
        "density": [float(each.density) for each in counts.values()],
        "dead": [float(each.dead.double().mean()) for each in counts.values()],
    }


def fits(run: Run, task: Task) -> bool:
    """Measure contestants, compiled dense first; return False, and leave off, where it or compiled twell do not fit."""
    found: dict[str, Any] | None = None
    for name in run.chosen(dict.fromkeys(CONTESTANTS), DENSE):
        try:
            result = measure(task, name, run.options.repeats, found)
        except torch.OutOfMemoryError:
            if name in (DENSE, TWELL):
                return False
            result = {"contestant": name, "tokens": task.tokens, "out_of_memory": True}
        found = found or result
        run.add(result)
    return True


class DenseBlock(nn.Module):
    """A dense block, with gate and up projection in one product, or plain."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        first = [weights[name] for name in ("w_gate", "w_up") if name in weights]
        self.first, self.down = nn.Parameter(torch.cat(first)), nn.Parameter(weights["w_down"].t().contiguous())
        self.gated = len(first) == 2

    def forward(self, x: Tensor) -> Tensor:
        """Compute y [tokens, d_model]."""
        z = functional.linear(x, self.first)
        gate, up = z.chunk(2, -1) if self.gated else (z, None)
        return functional.linear(combine(gate, up, "relu", 0.0), self.down)


class TwellBlock(nn.Module):
    """The same by the kernels."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterDict(weights)
        self.state = TrainingState(len(weights["w_down"]), weights["w_down"].device)

    def forward(self, x: Tensor) -> Tensor:
        """Compute y [tokens, d_model]."""
        operands = Operands(x=x, **dict(self.weights.items()))
        return train_block(operands, BlockOptions(activation="relu"), self.state)[0]


def backward_of(
    block: nn.Module, x: Tensor, dy: Tensor, call: Callable[[Tensor], Tensor] | None = None
) -> Callable[[], None]:
    """Return what runs a block forward and backward; `call`: the block, compiled."""
    forward = call or block

    def run() -> None:
        x.grad = None
        block.zero_grad(set_to_none=True)
        torch.autograd.backward(forward(x), dy)

    return run


def compare(dense: DenseBlock, twell: TwellBlock, x_gradients: tuple[Tensor, Tensor]) -> None:
    """Fail where gradients differ by more than bfloat16 explains.

    Raises:
        click.ClickException: They do.
    """
    assert dense.first.grad is not None and dense.down.grad is not None
    parts = dense.first.grad.chunk(2 if dense.gated else 1)
    names = ("w_gate", "w_up") if dense.gated else ("w_up",)
    pairs = {name: (part, twell.weights[name].grad) for name, part in zip(names, parts, strict=True)}
    pairs |= {"w_down": (dense.down.grad.t(), twell.weights["w_down"].grad), "x": x_gradients}
    for name, (expected, found) in pairs.items():
        error = (found.float() - expected.float()).norm() / expected.float().norm()
        if not error <= _GRADIENT:
            raise click.ClickException(f"the gradient of {name} is {float(error):.1e} from dense")


def measure_block(run: Run, tokens: int, neurons: Neurons, d_model: int, d_ff: int, variant: str) -> Result:
    """Compare one block with its rivals, and time them in turns."""
    x, sets = make_inputs(tokens, d_model, d_ff, torch.bfloat16, neurons, variant, harness.DEVICE)
    drawn = sets[0]
    first = {"w_up": drawn.block.gate} if variant == "plain" else {"w_gate": drawn.block.gate, "w_up": drawn.block.up}
    weights = {
        name: value.clone() for name, value in {**first, "w_down": drawn.down_by_neuron}.items() if value is not None
    }
    del sets, drawn, first
    x, dy = x.requires_grad_(), torch.randn_like(x)
    dense, twell = DenseBlock(weights), TwellBlock(weights)
    run_twell = backward_of(twell, x, dy)
    for _ in range(_WARM_UPS):  # by then it has been chosen how the block is computed
        run_twell()
    found = x.grad
    backward_of(dense, x, dy)()
    assert found is not None and x.grad is not None
    compare(dense, twell, (x.grad, found))
    compiled: Any = compile_rival(dense)
    contestants = {EAGER: backward_of(dense, x, dy), COMPILED: backward_of(dense, x, dy, compiled), "twell": run_twell}
    times = run.time({name: [call] for name, call in run.chosen(contestants, EAGER, "twell").items()})
    step = twell.state.step
    return {
        "tokens": tokens,
        "neurons": neurons.distribution,
        "layer": neurons.layer,
        "variant": variant,
        "hot": step.hot,
        "pairs": step.pairs,
        "density": float(twell.state.counts.sum() / (twell.state.tokens * d_ff)),
        "times": times,
    }


def name_of(result: Result) -> str:
    """Return which neurons fire."""
    trained = result["neurons"] == "trained"
    return f"trained layer {result['layer']}" if trained else f"equal, {result['variant']}"


BLOCK_COLUMNS: Columns = {
    "tokens": field("tokens"),
    "neurons": name_of,
    "active": field("density", ".2%"),
    "hot": field("hot"),
    **times_of(EAGER, COMPILED, "twell", digits=0),
    "over the faster": over([EAGER, COMPILED], "twell"),
}


@dataclass(frozen=True, kw_only=True)
class BlockSizes(harness.Options):
    """The options of `block`.

    Attributes:
        trained: Take the trained layers, too.
    """

    tokens: tuple[int, ...] = option("2048,16384,65536", "N,…", NUMBERS)
    d_model: int = option(2048, "N", COUNT)
    d_ff: int = option(5632, "N", COUNT)
    repeats: int = option(7, "N", COUNT)
    trained: bool = option(True)


@harness.benchmark(BlockSizes, tokens="2048", d_model=256, d_ff=1024, repeats=1, trained=False)
def block(run: Run, options: BlockSizes) -> None:
    """Time blocks forward and backward; print a Markdown table in microseconds."""
    report = run.report
    report["faults"] = []
    run.begin(BLOCK_COLUMNS)
    cases = [(Neurons("equal", 29 / 5632), "gated"), (Neurons("equal", 29 / 5632), "plain")]
    cases += [(Neurons("equal", 1.0), "gated")]
    cases += [(Neurons("trained", layer=layer), "gated") for layer in range(TRAINED_LAYERS if options.trained else 0)]
    for tokens in options.tokens:
        layers: list[Result] = []
        for neurons, variant in cases:
            torch._dynamo.reset()
            try:
                run.add(measure_block(run, tokens, neurons, options.d_model, options.d_ff, variant))
                layers += report["results"][-1:] if neurons.distribution == "trained" else []
            except click.ClickException as fault:  # the other cases are timed all the same
                name = name_of({**vars(neurons), "neurons": neurons.distribution, "variant": variant})
                report["faults"].append(f"{tokens} tokens, {name}: {fault.message}")
                click.echo(report["faults"][-1], err=True)
                run.write()
        if len(layers) == TRAINED_LAYERS:
            dense, twell = (
                sum(median(each, names) or 0.0 for each in layers) for names in ((EAGER, COMPILED), ("twell",))
            )
            click.echo(f"{tokens} tokens, trained layers together: {dense:.0f} / {twell:.0f} = {dense / twell:.2f}")
    if report["faults"]:
        raise click.ClickException("gradients differ, see above")


def step_columns(report: dict[str, Any]) -> Columns:
    """Return the columns of contestants, beside compiled dense, which is the first."""

    def cell(text: Callable[[Result, Result], str]) -> Callable[[Result], str]:
        return lambda each: "out of memory" if "seconds" not in each else text(each, report["results"][0])

    return {
        "": field("contestant"),
        "ms": cell(lambda each, _: f"{1e3 * statistics.median(each['seconds']):.1f}"),
        "tokens/s": cell(lambda each, _: f"{each['tokens_per_second']:.0f}"),
        "over compiled dense": cell(lambda each, d: f"{each['tokens_per_second'] / d['tokens_per_second']:.3f}"),
        "peak GiB": cell(lambda each, _: f"{each['peak_bytes'] / _GIB:.2f}"),
        "of dense": cell(lambda each, d: f"{each['peak_bytes'] / max(d['peak_bytes'], 1):.3f}"),
        "mJ a token": cell(lambda each, _: f"{1e3 * each['joules_per_token']:.2f}"),
    }


@dataclass(frozen=True, kw_only=True)
class StepOptions(ModelOptions):
    """The options of `step`.

    Attributes:
        batches: Micro-batches to try, the largest first.
        sequence: Tokens in a sequence.
        neurons: How often they fire: as those of trained layers, or equally, at --density.
        l1: Coefficient of the L1 term.
        repeats: Steps that count.
    """

    batches: tuple[int, ...] = option("16,12,8,6,4,2,1", "N,…", NUMBERS)
    sequence: int = option(2048, "N", COUNT)
    neurons: str = option("trained", kind=("trained", "equal"))
    l1: float = option(2e-5, "NUMBER", NOT_NEGATIVE)
    repeats: int = option(8, "N", COUNT)


@harness.benchmark(StepOptions, batches="2", sequence=64, layers=2, d_model=256, d_ff=768, neurons="equal", repeats=2)
def step(run: Run, options: StepOptions) -> None:
    """Time a step of a whole model; print a Markdown table: milliseconds, tokens a second, memory and energy."""
    with torch.no_grad():
        model = options.make()
        if options.neurons == "trained":
            make_trained(model)
    model.train().requires_grad_(True)
    report = run.report
    report["machine"]["transformers"] = transformers.__version__
    report["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    for batch in options.batches:
        report["results"], report["batch"] = [], batch
        task = Task(model, [draw_ids(model, batch, options.sequence + 1) for _ in range(4)], options.l1)
        size = f"{report['parameters'] / 1e9:.2f} billion parameters, micro-batch {batch}, {task.tokens} tokens a step"
        run.begin(step_columns(report), size)
        if fits(run, task):
            break
        click.echo(f"a micro-batch of {batch} does not fit", err=True)
    else:
        raise UserError("--batches", "none fits this GPU", got=",".join(map(str, options.batches)))


main = click.Group(help=__doc__, commands={"block": block, "step": step})

if __name__ == "__main__":
    main()
