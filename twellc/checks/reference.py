"""What `twellc check` compares a candidate with: the model in low precision and in float64.

docs/accuracy.md says what the runs below are for. A candidate's plugin nodes are compared with the model's own blocks
both in the whole model and block by block, each block for the input that it has in the plain low-precision model.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
import torch
from torch.export import ExportedProgram

from twellc.base.dtypes import DTYPES, torch_dtype
from twellc.base.errors import UserError
from twellc.checks.evaluator import ExpertsNode, OnnxEvaluator, PluginNode
from twellc.checks.fp8 import (
    Fp8Block,
    Fp8Layer,
    dequantized,
    fp8_block,
    fp8_layers,
    is_quantised,
    kept_in_fp8,
    quantised_constants,
    rounded_in_cache,
)
from twellc.checks.routing import Choice, other_choices, routers_of
from twellc.compiling.fp8 import wish_of
from twellc.compiling.settings import Settings
from twellc.loaders.loaded import LoadedModel
from twellc.loaders.onnx_models import choose_onnx_dtype, integer_range, model_inputs, open_model, refuse_rewritten
from twellc.loaders.precision import choose_dtype
from twellc.options.declared_inputs import InputDeclaration
from twellc.options.weights import KEEP, WeightOptions
from twellc.passes.decide import options_of, repeat
from twellc.passes.fp8 import QUANTISED, Change, Wish, quantised_linear
from twellc.passes.graph.constants import ProgramConstants
from twellc.passes.graph.execution import Runner, Visit, example_inputs
from twellc.passes.graph.program import editable, finish, replace_node, tensor_of
from twellc.passes.match.find_ffn import FfnBlock
from twellc.passes.match.linear import Weight
from twellc.passes.onnx.ffn import Ends, OnnxBlocks, find_onnx_blocks, fp8_weights, lower_onnx
from twellc.passes.onnx.part import part_of
from twellc.passes.onnx.precision import widen_onnx
from twellc.passes.pipeline import PassOptions, Rewritten, Stage, run_until
from twellc.passes.precision import round_numbers, widen
from twellc.passes.report import Layer
from twellc.passes.sizes.inputs import ModelInputs, program_inputs
from twellc.plugins.fp8 import Fp8
from twellc.samples.samples import Sample

Outputs = list[torch.Tensor]
# Stages of the pipeline that change the program in which linear layers are found, and are left out for that.
_BEHIND_DECIDE = tuple(stage for stage in Stage if Stage.DECIDE < stage < Stage.FIND_LINEAR)
Progress = Callable[[str], None]
_Run = Callable[[Sample, Visit], Outputs]  # of a program


@dataclass(frozen=True)
class CandidateGraph:
    """The ONNX graph of a candidate.

    Attributes:
        path, model: The file and its content.
        nodes: The plugin nodes that stand for the blocks of the model, in order.
        outputs: What the graph gives for each sample, if it was run already.
    """

    path: Path
    model: onnx.ModelProto
    nodes: list[PluginNode | ExpertsNode]
    outputs: list[Outputs] | None = None


@dataclass(frozen=True)
class BlockRuns:
    """A block of the model with its plugin node, and what both give for each sample, [..., d_out], on the CPU.

    Attributes:
        ends: Names of what the block reads and computes.
        node: The plugin node that stands for it.
        plain: The block in low precision.
        ours: The plugin node in low precision.
        exact: The block in float64, with the weights of the low precision.
        rewritten: The plugin node in float64.
        active, activations: How many activations of the gate were not zero, and how many there were.
        change: By how much FP8 changes it; nothing where the model has no weights of 16 bits, or the node reads those.
    """

    ends: Ends
    node: PluginNode | ExpertsNode
    plain: Outputs = field(default_factory=list)
    ours: Outputs = field(default_factory=list)
    exact: Outputs = field(default_factory=list)
    rewritten: Outputs = field(default_factory=list)
    active: list[int] = field(default_factory=list)
    activations: list[int] = field(default_factory=list)
    change: Change = field(default_factory=Change)

    @property
    def reads(self) -> list[str]:
        """Names of x, and of the residual, if there is one; or of the experts of tokens, and their weights."""
        return [self.ends.x, *([] if self.ends.residual is None else [self.ends.residual]), *self.ends.routing]

    def run_node(self, values: Sample) -> torch.Tensor:
        """Run the node on what the block reads, which stands in `values` by its name."""
        return self.node.run(*(values[name] for name in self.reads))

    def add_low(self, values: Sample, plain: torch.Tensor) -> None:
        """Run the node in low precision; `plain` is what the block gives."""
        y = self.run_node(values).cpu()
        self.plain.append(plain.to(y.dtype).cpu())
        self.ours.append(y)
        self.active.append(self.node.active(*(values[name] for name in self.reads)))
        rows = values[self.ends.routing[0]].numel() if self.ends.routing else y.numel() // y.shape[-1]
        self.activations.append(rows * self.node.widths[1])

    def add_wide(self, values: Sample, exact: torch.Tensor) -> None:
        """Run the node in float64, for the same values; `exact` is what the block gives."""
        self.exact.append(exact.cpu())
        self.rewritten.append(self.run_node(widen_sample({name: values[name] for name in self.reads})).cpu())


@dataclass(frozen=True)
class Runs:
    """What the model gives for each sample: a list of its outputs, on the CPU.

    Attributes:
        plain: In low precision.
        truth: In float64.
        original: With the weights and numbers of the low precision, and float64 arithmetic; `truth` where the model is
            in it.
        spliced: As `plain`, with the candidate's plugin nodes in the place of its blocks.
        rewritten: As `original`, with the candidate's plugin nodes in the place of its blocks.
        others: As `truth`, twice, with other experts where rounding may choose them; empty where it never does.
        blocks: The blocks that have a plugin node, in order.
        exact: Whether `rewritten` has the weights of `original`; else it has some that the model computes from others,
            in low precision, and that were folded.
    """

    plain: list[Outputs]
    truth: list[Outputs]
    original: list[Outputs] = field(default_factory=list)
    spliced: list[Outputs] = field(default_factory=list)
    rewritten: list[Outputs] = field(default_factory=list)
    others: list[list[Outputs]] = field(default_factory=list)
    blocks: list[BlockRuns] = field(default_factory=list)
    exact: bool = True


class Reference(ABC):
    """A model to compare a candidate with.

    Attributes:
        inputs: Its inputs.
        integers: Least and largest value to draw for an integer input.
        token_ids: Number of token ids; None where that is not known.
        outputs: Names of its outputs.
        language_model: Whether the first output holds logits over a vocabulary.
        dtype: The low precision.
        layers: The blocks that the candidate has a plugin node for.
    """

    inputs: ModelInputs
    integers: dict[str, tuple[int, int]]
    token_ids: int | None
    outputs: list[str]
    language_model: bool
    dtype: torch.dtype
    layers: list[Layer]

    @abstractmethod
    def run(self, samples: list[Sample], graph: CandidateGraph | None, progress: Progress) -> Runs:
        """Run the model.

        Args:
            samples: Its inputs.
            graph: The candidate's graph, with one plugin node for each of `layers`; without it the runs with plugin
                nodes are left out.
            progress: Receives the name of each step.
        """


def _runs_of(graph: CandidateGraph | None, ends: list[Ends], exact: bool) -> Runs:
    """Return runs to fill, with the blocks to compare; see `Reference.run`."""
    nodes = zip(ends, graph.nodes, strict=True) if graph else ()
    return Runs([], [], blocks=[BlockRuns(each, node) for each, node in nodes], exact=exact)


def _counter(progress: Progress, precision: str, blocks: int) -> Callable[[], None]:
    """Name a step, and return what to call for each block that is done in it."""
    step, done = f"running the model in {precision}", itertools.count(1)
    progress(step)
    return lambda: progress(f"{step}: block {next(done)} of {blocks}")


# ---- models that torch traces ----


class TorchReference(Reference):
    """A traced model; see `Reference`."""

    def __init__(self, model: LoadedModel, settings: Settings) -> None:
        """Lower the model as its compilation did, by the settings of the candidate, and find its blocks."""
        self.dtype = torch_dtype(settings.dtype if settings.dtype in DTYPES else choose_dtype(model, None)[0])
        self._cache_scales = settings.cache_scales or {}
        options = PassOptions(self.dtype, weights=_wish(settings))
        functional = run_until(model.program, options, Stage.FUNCTIONAL)
        arranged = run_until(functional, options, Stage.ARRANGING)
        with_blocks = run_until(arranged, options, Stage.PRECISION)
        self._source, self._with_blocks = functional.program, with_blocks.program
        # The yardstick of the model takes no part in the passes that bring its blocks into form.
        self._plain = self._with_blocks
        if arranged.program is not self._source:
            self._plain = run_until(functional, options, Stage.PRECISION, without=(Stage.ARRANGING,)).program
        own = replace(options, earlier=replace(settings, linear_taken=settings.linear_taken or []))
        decided = _decided(with_blocks, own, settings)
        chosen = decided.chosen
        self._with_blocks = _with_own_norms(self._with_blocks, [block for block, _ in chosen])
        # Of a block in FP8 what comes behind its norm is compared.
        alone = [(replace(block, norm=None), layer) for block, layer in chosen]
        pairs = [(block, options_of(block, layer, None)) for block, layer in alone]
        before = self._with_blocks
        self._fp8_blocks = [fp8_block(before, *pair, functional.fp8) for pair in pairs]
        self._fp8 = dict(functional.fp8)
        for block, _ in chosen:
            if is_quantised(block):
                self._fp8 |= quantised_constants(before, block)
        found = decided
        if own.earlier.linear_taken:
            found = run_until(decided, own, Stage.FIND_LINEAR, _BEHIND_DECIDE)
        self._fp8 |= _quantised_linears(found)
        self._fp8_layers = list(fp8_layers(found))
        if self._fp8_layers or any(self._fp8_blocks):
            # Weights are those in FP8, whose places only the program with blocks in their form tells.
            self._source = dequantized(arranged.program, self._fp8)
            self._with_blocks = dequantized(before, self._fp8)
            self._plain = self._with_blocks
            if before is arranged.program:
                self._source = self._plain
        self.inputs = program_inputs(self._source)
        self.integers = integer_ranges(model)
        self.token_ids = model.vocabulary
        self.outputs = model.output_names
        self.language_model = model.language_model
        self._ends = [_ends_of(block) for block, _ in chosen]
        self._ends_alone = [_ends_of(block) for block, _ in alone]
        self.layers = [layer for _, layer in chosen]
        self._routers = routers_of(decided.blocks)

    def run(self, samples: list[Sample], graph: CandidateGraph | None, progress: Progress) -> Runs:
        """See `Reference`."""
        runs = _runs_of(graph, self._ends, self._with_blocks is self._plain)
        blocks, inputs = runs.blocks, list[Sample]()
        count = _counter(progress, "low precision", 2 * len(samples) * len(blocks))
        run_blocks = self._runner(self._with_blocks)
        run_plain = run_blocks if runs.exact else self._runner(self._plain)
        fp8: list[tuple[Ends, Fp8Block | Fp8Layer]] = [
            (ends, form) for ends, form in zip(self._ends_alone, self._fp8_blocks, strict=True) if form is not None
        ]
        fp8 += [(Ends(each.x.name, None, each.node.name), form) for each, form in self._fp8_layers]
        choices = [Choice(self._routers) for _ in samples]
        for sample, choice in zip(samples, choices, strict=True):
            visitor = _Visitor(blocks, count, fp8=fp8)
            visits = fp8 or (graph and runs.exact)
            plain = run_blocks(sample, choice.alike(visitor)) if visits else run_plain(sample, choice.alike())
            runs.plain.append(_on_cpu(plain))
            if graph is None:
                continue
            if not runs.exact:
                run_blocks(sample, choice.alike(visitor))
            inputs.append(visitor.read)
            for index, block in enumerate(blocks):
                block.add_low(visitor.read, visitor.y[index])
            spliced = run_blocks(sample, choice.alike(_Visitor(blocks, count, splice=True)))
            runs.spliced.append(_on_cpu(spliced))
        del run_blocks, run_plain
        count = _counter(progress, "float64", 2 * len(samples) * len(blocks))
        wide = self._widened(round_numbers(self._plain))
        runs.original.extend(_true(wide, samples, choices))
        is_truth = self._plain is self._source
        if is_truth:
            runs.others.extend(_others(wide, samples, choices))
        if not runs.exact:
            del wide  # a large model is larger in float64
            wide = self._widened(round_numbers(self._with_blocks))
        # Without a graph there are no inputs of blocks.
        for sample, choice, given in zip(samples, choices, inputs, strict=False):
            widened = widen_sample(sample)
            rewritten = wide(widened, choice.alike(_Visitor(blocks, count, splice=True)))
            runs.rewritten.append(_on_cpu(rewritten))
            visitor = _Visitor(blocks, count, given=widen_sample(given))
            wide(widened, visitor)
            for index, (block, ends, form) in enumerate(zip(blocks, self._ends_alone, self._fp8_blocks, strict=True)):
                block.add_wide(given, visitor.y[index])
                if form is not None and form.wide is not None:
                    block.change.add(*form.by_both(given[ends.x]))
        if is_truth:
            return replace(runs, truth=runs.original)
        del wide
        wide = self._widened(self._source)
        runs.truth.extend(_true(wide, samples, choices))
        runs.others.extend(_others(wide, samples, choices))
        return runs

    def _runner(self, program: ExportedProgram) -> _Run:
        """Return what runs a program, with keys and values rounded as the caches of the candidate keep them."""
        runner, scales = Runner(program), kept_in_fp8(program, self._cache_scales)

        def run(sample: Sample, visit: Visit) -> Outputs:
            def see(name: str, value: Any) -> Any:
                return visit(name, rounded_in_cache(value, scales[name]) if name in scales else value)

            return runner(sample, see)

        return run

    def _widened(self, program: ExportedProgram) -> _Run:
        """Return what runs a program in float64, with FP8 weights dequantized exactly."""
        return self._runner(dequantized(widen(program), self._fp8))


def _true(wide: _Run, samples: list[Sample], choices: list[Choice]) -> list[Outputs]:
    """Return what a model gives in float64, with the experts that were chosen before."""
    pairs = zip(samples, choices, strict=True)
    return [_on_cpu(wide(widen_sample(sample), choice.alike())) for sample, choice in pairs]


def _others(wide: _Run, samples: list[Sample], choices: list[Choice]) -> list[list[Outputs]]:
    """Return `Runs.others`; behind `_true`."""
    return [[_on_cpu(wide(widen_sample(sample), visit)) for sample in samples] for visit in other_choices(choices)]


def _with_own_norms(program: ExportedProgram, blocks: Sequence[FfnBlock]) -> ExportedProgram:
    """Return a program with the vectors of blocks' norms as nodes have them, rounded; itself if that changes none."""
    constants, rounded = ProgramConstants(program), dict[str, torch.Tensor]()
    for block in blocks:
        vectors = () if block.norm is None else (block.norm.weight, block.norm.bias)
        for node in filter(None, vectors):
            value = constants.value(node)
            kept = value.to(block.dtype).to(value.dtype)
            if not torch.equal(kept, value):
                rounded[node.name] = kept
    if not rounded:
        return program
    program = editable(program)
    constants = ProgramConstants(program)
    for node in [node for node in program.graph.nodes if node.name in rounded]:
        made = constants.add(f"{node.name}_rounded", rounded[node.name], list(constants.names))
        replace_node(program, node, made)
    return finish(program)


def _ends_of(block: FfnBlock) -> Ends:
    """Return what a block reads and computes, its norm included."""
    if block.routing is not None:
        return Ends(block.x.name, None, block.y.name, (block.routing.ids.name, block.routing.weights.name))
    residual = block.residual.other.name if block.residual else None
    return Ends((block.norm or block).x.name, residual, block.y.name)


def _on_cpu(outputs: Outputs) -> Outputs:
    """Return outputs where the candidate's are; the model runs where it lies."""
    return [output.cpu() for output in outputs]


class _Visitor:
    """Notes what blocks read and compute while a program runs.

    Attributes:
        read: What blocks read, by name.
        y: The output of each block, by its number.
    """

    def __init__(
        self,
        blocks: list[BlockRuns],
        count: Callable[[], None],
        splice: bool = False,
        given: Sample | None = None,
        fp8: Sequence[tuple[Ends, Fp8Block | Fp8Layer]] = (),
    ) -> None:
        """Prepare a run.

        Args:
            blocks: The blocks.
            count: Is called when a block is done.
            splice: Whether the plugin nodes give the output of the blocks.
            given: What blocks read instead of what the program computes.
            fp8: Blocks and linear layers that are computed by dense FP8 instead.
        """
        self._blocks, self._count, self._splice, self._given = blocks, count, splice, given
        self._forms = {ends.y: (ends, form) for ends, form in fp8}
        self._names = {name for block in blocks for name in block.reads}
        self._names |= {name for ends, _ in fp8 for name in (ends.x, ends.residual) if name is not None}
        self._writers = {block.ends.y: index for index, block in enumerate(blocks)}
        self.read: Sample = {}
        self.y: dict[int, torch.Tensor] = {}

    def __call__(self, name: str, value: Any) -> Any:
        if name in self._forms:
            ends, form = self._forms[name]
            x, residual = self.read[ends.x], None if ends.residual is None else self.read[ends.residual]
            value = form.by_dense_fp8(x, residual).reshape(value.shape)
        writer = self._writers.get(name)
        if writer is not None:
            self.y[writer] = value
            if self._splice:
                value = self._blocks[writer].run_node(self.read).to(value.dtype)
            self._count()
        if name in self._names:
            if self._given is not None:
                value = self._given[name]
            self.read[name] = value
        return value


def _decided(prepared: Rewritten, options: PassOptions, settings: Settings) -> Rewritten:
    """Find the blocks, and decide what becomes of each as the compilation did."""
    try:
        return run_until(prepared, replace(options, layers=settings.layers), Stage.DECIDE)
    except UserError:
        return run_until(prepared, options, Stage.DECIDE)  # the blocks are not those that the settings are for


def _wish(settings: Settings) -> Wish:
    """Return which weights a compilation has quantised."""
    options = WeightOptions(weights=settings.weights or KEEP, fp8_error=settings.fp8_error)
    return wish_of(options, settings.fp8_errors)


def _quantised_linears(found: Rewritten) -> dict[str, Fp8]:
    """Return the weights of linear layers that a compilation has quantised, by the names of their constants."""

    def tensor(weight: Weight) -> torch.Tensor:
        return tensor_of(found.program, weight.name)

    quantised = [layer for layer, weights in found.fp8_linears.items() if weights.reason == QUANTISED]
    weights = [each.weight for layer in quantised for each in layer.linears]
    return {weight.name: quantised_linear(weight, tensor) for weight in weights}


def integer_ranges(model: LoadedModel) -> dict[str, tuple[int, int]]:
    """Return the range of each integer input: token ids of the vocabulary, other integers as in the traced values."""
    ranges = {}
    for name, example in example_inputs(model.program).items():
        if model.vocabulary is not None and name.endswith("input_ids"):
            ranges[name] = (0, model.vocabulary - 1)
        elif not example.is_floating_point():
            ranges[name] = (int(example.min()), int(example.max())) if example.numel() else (0, 1)
    return ranges


# ---- ONNX files ----


class OnnxReference(Reference):
    """An ONNX file of plain operators; see `Reference`."""

    def __init__(self, path: Path, settings: Settings, declared: tuple[InputDeclaration, ...]) -> None:
        """Load the model and lower it as its compilation did.

        Raises:
            UserError: It cannot be loaded, inputs are declared for it, or it is rewritten already.
        """
        self._path = path
        self._model = open_model(path, declared)
        refuse_rewritten(path, self._model)
        name = settings.dtype
        self.dtype = torch_dtype(name if name in DTYPES else choose_onnx_dtype(self._model, None))
        found = _decided_onnx(self._model, self.dtype, settings)
        changed = found.casts or found.folds or found.fp8
        self._with_blocks = lower_onnx(found) if changed else self._model
        self._plain = self._with_blocks if found.casts or found.fp8 else self._model
        self._low = lower_onnx(found, dense_fp8=True) if found.fp8 else self._plain
        # A model is measured by its quantised weights, dequantized.
        self._source = self._with_blocks if found.fp8 else self._model
        self._fp8_blocks = _fp8_onnx(found)
        pairs = zip(found.ends, found.layers, strict=True)
        chosen = [(ends, layer) for ends, layer in pairs if layer.decision == "twell"]
        self._ends = [ends for ends, _ in chosen]
        self.layers = [layer for _, layer in chosen]
        inputs = model_inputs(path, self._model)
        # The evaluator is slow, and nothing was traced: small sizes.
        self.inputs = replace(inputs, hints={symbol: min(2 * hint, 8) for symbol, hint in inputs.hints.items()})
        graph = self._model.graph
        self.integers = {value.name: integer_range(graph, value.name) for value in graph.input}
        self.token_ids = None
        self.outputs = [value.name for value in graph.output]
        self.language_model = self.outputs[0] == "logits"

    def run(self, samples: list[Sample], graph: CandidateGraph | None, progress: Progress) -> Runs:
        """See `Reference`."""
        runs = _runs_of(graph, self._ends, self._with_blocks is self._plain)
        blocks, inputs = runs.blocks, list[Sample]()
        count = _counter(progress, "low precision", len(samples) * len(blocks))
        read = {name for block in blocks for name in block.reads}
        needed = {*self.outputs, *read, *(block.ends.y for block in blocks)}
        evaluator = OnnxEvaluator(self._path, self._low)
        evaluate_blocks = evaluator if runs.exact else OnnxEvaluator(self._path, self._with_blocks)
        for sample in samples:
            found = evaluate_blocks.run_to(sample, needed)
            runs.plain.append([found[name] for name in self.outputs] if runs.exact else evaluator.run(sample))
            inputs.append({name: found[name] for name in read})
            for block in blocks:
                # Of a block in float32 the plugin node reads x behind a cast, and its result is cast back.
                dtype = self._dtype_of(found[block.ends.x])
                block.add_low(_cast({name: found[name] for name in block.reads}, dtype), found[block.ends.y].to(dtype))
                count()
        count = _counter(progress, "float64", len(samples) * len(blocks))
        wide = widen_onnx(self._plain)
        evaluator = OnnxEvaluator(self._path, wide)
        runs.original.extend(evaluator.run(widen_sample(sample)) for sample in samples)
        if not runs.exact:
            wide = widen_onnx(self._with_blocks)
        for block, form in zip(blocks, self._fp8_blocks, strict=False):  # there are no blocks without a graph
            part = OnnxEvaluator(self._path, part_of(wide, list(dict.fromkeys(block.reads)), block.ends.y))
            for sample, found in zip(samples, inputs, strict=True):
                given = _cast({name: found[name] for name in block.reads}, self._dtype_of(found[block.ends.x]))
                (exact,) = part.run({**widen_sample(sample), **widen_sample(given)})
                block.add_wide(given, exact)
                if form is not None and form.wide is not None:
                    block.change.add(*form.by_both(given[block.ends.x]))
                count()
        if graph is not None:
            evaluator = OnnxEvaluator(graph.path, graph.model)
            runs.spliced.extend(graph.outputs or [evaluator.run(sample) for sample in samples])
            evaluator = OnnxEvaluator(graph.path, widen_onnx(graph.model))
            runs.rewritten.extend(evaluator.run(widen_sample(sample)) for sample in samples)
        if self._plain is self._source:
            return replace(runs, truth=runs.original)
        evaluator = OnnxEvaluator(self._path, widen_onnx(self._source))
        runs.truth.extend(evaluator.run(widen_sample(sample)) for sample in samples)
        return runs

    def _dtype_of(self, x: torch.Tensor) -> torch.dtype:
        """Return the type that the plugin node of a block computes in, which reads x in the model."""
        return self.dtype if x.dtype == torch.float32 else x.dtype


def _decided_onnx(model: onnx.ModelProto, dtype: torch.dtype, settings: Settings) -> OnnxBlocks:
    """Find the blocks, and decide what becomes of each as the compilation did."""
    advise = None if settings.decided is None else repeat(settings.decided)
    return find_onnx_blocks(model, dtype, settings.layers, advise, _wish(settings))


def _fp8_onnx(found: OnnxBlocks) -> list[Fp8Block | None]:
    """Return each block that is rewritten as it is compared; None where its weights are read in 16 bits."""
    if not found.fp8:
        return [None for layer in found.layers if layer.decision == "twell"]
    chosen = [pair for pair in zip(found.blocks, found.layers, strict=True) if pair[1].decision == "twell"]
    forms: list[Fp8Block | None] = []
    for (block, layer), weights in zip(chosen, fp8_weights(found), strict=True):
        wide = weights[1] if weights is not None and is_quantised(block) else None
        forms.append(None if weights is None else Fp8Block(weights[0], wide, options_of(block, layer, None)))
    return forms


def _cast(tensors: Sample, dtype: torch.dtype) -> Sample:
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def widen_sample(sample: Sample) -> Sample:
    """Return a sample with floating-point inputs in float64."""
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in sample.items()}
