"""`twellc check`: is a candidate as accurate as the plain low-precision model, and where does its error come from?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from twellc.base.caches import INPUT_IDS, TOKEN_COUNT, WRITE_INDEX
from twellc.base.dtypes import dtype_name
from twellc.base.errors import UserError, first_line
from twellc.base.files import temporary_folder
from twellc.base.modules import import_modules
from twellc.base.records import OPTIONAL, Record
from twellc.checks.accuracy import (
    COARSE,
    DiscreteAccuracy,
    OutputAccuracy,
    TextAccuracy,
    measure,
    measure_discrete,
    rows_near_ties,
    separate,
    text_bits,
)
from twellc.checks.candidate import Candidate, open_candidate
from twellc.checks.evaluator import ExpertsNode, plugin_nodes
from twellc.checks.generation import GenerationAccuracy, generate_by_all_profiles, prompt_lengths, read_prompts
from twellc.checks.reference import BlockRuns, CandidateGraph, OnnxReference, Outputs, Reference, Runs, TorchReference
from twellc.compiling.result import noted_layers
from twellc.compiling.settings import CacheSettings, Settings
from twellc.export.shapes import ShapeProfile
from twellc.loaders.huggingface_inputs import read_sizes
from twellc.loaders.loaded import LoadedModel
from twellc.loaders.model import load_model
from twellc.loaders.onnx_format import looks_like_onnx
from twellc.options.commands import CheckOptions
from twellc.options.source import ALL_LOGITS, GREEDY_LOGITS, NoChoiceError, TracingOptions, refuse_several_inputs
from twellc.passes.report import Layer, Neurons
from twellc.samples.samples import Limits, Sample, draw_samples, load_npz, places_of_tokens, read_arrays, read_text


@dataclass(frozen=True)
class BlockAccuracy(Record):
    """Accuracy of one plugin node, for the inputs that its block has in the plain low-precision model.

    Attributes:
        module: Path of the module that holds the block's weights.
        density: Share of the gate's activations that are not zero for these inputs.
        accuracy: Accuracy of the node's output; the truth is the block in float64 with the weights of low precision.
        quantisation: Of a block that was quantised, how much that changes its output: the norm of the difference over
            the norm of the output, in float64; None of any other.
    """

    computed = ("diverges",)

    module: str
    density: float
    accuracy: OutputAccuracy
    quantisation: float | None = field(default=None, metadata=OPTIONAL)

    @property
    def diverges(self) -> bool:
        """Whether the node is outside of its tolerance, or computes something else in float64."""
        separation = self.accuracy.separation
        return not self.accuracy.within or (separation is not None and not separation.rewrite_within)


@dataclass(frozen=True)
class CheckResult(Record):
    """What `twellc check` found.

    Attributes:
        executed: What was run for the candidate, in words.
        note: Why that was not the candidate itself; empty when it was.
        inputs: What it was run on, in words.
        notes: What the user should know besides.
        outputs: Accuracy of each output; rows that depend on experts with nearly the same scores are one by themselves.
        blocks: Accuracy of each plugin node, in order.
        text: How well the text was predicted; None without one, or where the model does not predict the next token.
        generation: How accurately a candidate with a key-value cache generates; None of another one.
    """

    computed = ("within", "first_divergence", "causes")

    executed: str
    note: str
    inputs: str
    notes: list[str]
    outputs: list[OutputAccuracy | DiscreteAccuracy]
    blocks: list[BlockAccuracy]
    text: TextAccuracy | None
    generation: GenerationAccuracy | None = None

    @property
    def within(self) -> bool:
        """Whether every output and every block is within tolerance, and there was something to compare."""
        compared = any(output.elements for output in self.outputs)
        return compared and all(output.within for output in self.outputs) and self.first_divergence is None

    @property
    def first_divergence(self) -> str | None:
        """Module of the first block that diverges."""
        return next((block.module for block in self.blocks if block.diverges), None)

    @property
    def causes(self) -> list[str]:
        """What put the candidate outside of tolerance: some of the shares of `Separation`; empty where not known.

        It is `low_precision` where the plain model is NaN or infinite as well.
        """
        outputs = [output for output in self.outputs if isinstance(output, OutputAccuracy)]
        measured = [*outputs, *(block.accuracy for block in self.blocks)]
        separations = [each.separation for each in measured if each.separation is not None]
        if self.within:
            return []
        found = ["low_precision"] if any(each.overflows for each in measured) else []
        found += [] if all(each.rewrite_within for each in separations) else ["rewrite"]
        found += [] if all(each.kernels_within for each in separations) else ["kernels"]
        unexplained = separations and not all(each.excusable for each in measured)
        return found or (["rest"] if unexplained else [])


def check(options: CheckOptions, progress: Callable[[str], None]) -> CheckResult:
    """Compare a candidate with the model that it was made from.

    Args:
        options: See `CheckOptions`.
        progress: Receives the name of each step.

    Raises:
        UserError: Something cannot be read, or model, candidate and inputs do not belong together.
    """
    import_modules(options.import_modules)
    with temporary_folder() as folder:
        return _check(options, folder, progress)


def _check(options: CheckOptions, folder: Path, progress: Callable[[str], None]) -> CheckResult:
    refuse_several_inputs(options)
    candidate = open_candidate(options, folder, progress)
    if candidate.settings.cache is not None:
        return _check_generation(options, candidate, progress)
    reference: Reference
    if looks_like_onnx(options.model):
        progress("loading the model")
        reference = OnnxReference(options.model, candidate.settings, options.input_specs)
    else:
        progress("loading and tracing the model")
        reference = TorchReference(_load_as_compiled(options, candidate.settings), candidate.settings)
    names = [spec.name for spec in reference.inputs.specs]
    if sorted(candidate.inputs) != sorted(names):
        raise _does_not_belong(options, "their inputs differ", candidate.inputs, names)
    samples, described, notes, predicts_next = _samples(options, reference, candidate.profile)
    if predicts_next and candidate.settings.logits == "last":
        predicts_next = False
        notes.append("how well the text is predicted is not measured: --logits last computes one place of a window")
    ours: list[Outputs] = []
    for index, sample in enumerate(samples):
        progress(f"running the candidate: sample {index + 1} of {len(samples)}")
        ours.append(candidate.run(sample))
        if len(ours[-1]) != len(reference.outputs):
            raise _does_not_belong(options, "their outputs differ", [len(ours[-1])], reference.outputs)
    comparison = _Comparison(candidate, reference)
    if comparison.dead:
        notes.append(
            f"{comparison.dead} neurons were removed by --prune-dead: what they would add is an error of the rewriting"
        )
    try:
        runs = comparison.run(samples, ours if candidate.is_graph else None, progress)
    except (IndexError, RuntimeError) as error:  # torch's own; random inputs are made so that they fit
        if options.arrays is None:
            raise
        where, fix = f"--arrays {options.arrays}", "Check their values, such as indices into tables."
        raise UserError(where, f"the model fails on these inputs ({first_line(error)})", fix=fix) from error
    text = None
    if predicts_next:
        ids = [sample["input_ids"].long() for sample in samples]
        bits = [text_bits([outputs[0] for outputs in each], ids) for each in (ours, runs.plain, runs.truth)]
        text = TextAccuracy(bits[0][0], *(each for _, each in bits)) if bits[0][0] else None
    tokens = [places_of_tokens(sample) for sample in samples]
    if any(each is not None for each in tokens):
        comparison.notes.append("places of padding are not compared: what a model gives for them has no meaning")
    found = [_output(options, comparison, reference, index, ours, tokens) for index in range(len(reference.outputs))]
    return comparison.result(described, notes, [part for parts in found for part in parts], text=text)


def _output(
    options: CheckOptions,
    comparison: _Comparison,
    reference: Reference,
    index: int,
    ours: list[Outputs],
    tokens: list[torch.Tensor | None],
) -> list[OutputAccuracy | DiscreteAccuracy]:
    """Return the accuracy of one output; `tokens` says of each sample which of its places are not padding."""
    name, plain = reference.outputs[index], comparison.runs.plain
    for got, expected in zip(ours, plain, strict=True):
        if got[index].shape != expected[index].shape:
            raise UserError(
                str(options.candidate),
                f"output {name} has another shape than the model's",
                got=str(tuple(got[index].shape)),
                expected=str(tuple(expected[index].shape)),
            )

    def stacked(results: list[Outputs]) -> torch.Tensor:
        return _stack([_without_padding(each[index], own) for each, own in zip(results, tokens, strict=True)])

    # Rows whose length varies with the input are not logits over a vocabulary.
    same_width = len({_width(each[index]) for each in plain}) == 1
    language_model = reference.language_model and index == 0 and same_width
    return comparison.output(name, stacked(ours), stacked, language_model)


def _does_not_belong(
    options: CheckOptions, why: str, got: Sequence[object] = (), expected: Sequence[object] = ()
) -> UserError:
    shown = ", ".join(map(str, got or [options.model]))
    what = f"does not belong to the model: {why}"
    return UserError(str(options.candidate), what, got=shown, expected=", ".join(map(str, expected)))


def _check_generation(options: CheckOptions, candidate: Candidate, progress: Callable[[str], None]) -> CheckResult:
    """Compare a candidate with a key-value cache with the model that it was made from, which gets none; see `check`."""
    path, steps = str(options.candidate), candidate.steps
    if candidate.settings.logits == GREEDY_LOGITS:
        what, fix = "gives tokens, and check compares logits", "Compile the model with --logits last, and check that."
        raise UserError(path, what, got=f"--logits {GREEDY_LOGITS}", fix=fix)
    cache = candidate.settings.cache
    assert cache is not None
    if steps is None or candidate.inputs[:3] != [INPUT_IDS, WRITE_INDEX, TOKEN_COUNT]:
        raise UserError(path, "is damaged: it says that it has a cache, and has not its inputs")
    if looks_like_onnx(options.model):
        raise _does_not_belong(options, "it has a cache, and ONNX files get none")
    progress("loading and tracing the model")
    settings = replace(candidate.settings, logits=ALL_LOGITS)
    reference = TorchReference(_load_as_compiled(options, settings), settings)
    if [spec.name for spec in reference.inputs.specs] != [INPUT_IDS] or reference.token_ids is None:
        raise _does_not_belong(options, "it has a cache of keys and values")
    if reference.token_ids != steps.vocabulary:
        raise _does_not_belong(options, "their vocabularies differ", [steps.vocabulary], [reference.token_ids])
    prompts, described, notes = _prompts(options, reference, cache, reference.token_ids)
    progress("running the candidate")
    ours = generate_by_all_profiles(steps, prompts, cache)
    others = steps.other_sizes(len(prompts))
    if others:
        notes.append(
            f"the longest prompt is computed again with {' and '.join(map(str, others))} at a time, for which the plan "
            "has other optimization profiles"
        )
    if candidate.settings.cache_scales:
        notes.append("keys and values are rounded to FP8 in the model, too: the error leaves that rounding out")
    comparison = _Comparison(candidate, reference)
    runs = comparison.run([{INPUT_IDS: ours.ids}], None, progress)

    def logits(results: list[Outputs]) -> torch.Tensor:
        return ours.of_model(results[0])

    outputs = comparison.output("logits", ours.logits.flatten(0, 1), lambda each: logits(each).flatten(0, 1), True)
    generation = ours.accuracy(logits(runs.plain), logits(runs.truth))
    return comparison.result(described, notes, outputs, generation=generation)


class _Comparison:
    """A candidate, its model, and what both give.

    Attributes:
        dead: How many neurons were removed.
        notes: What could not be compared, and why.
    """

    runs: Runs

    def __init__(self, candidate: Candidate, reference: Reference) -> None:
        layers = [] if candidate.graph is None else noted_layers(candidate.graph[1])
        self._neurons = {_key(layer): layer.neurons for layer in layers if layer.neurons is not None}
        self._candidate, self._reference = candidate, reference
        self.dead = sum(each.dead for each in self._neurons.values())
        self._graph, obstacle = _graph(candidate, reference, self._neurons)
        self.notes = [f"blocks are not compared, and the error is not separated: {obstacle}"] if obstacle else []

    def run(self, samples: list[Sample], ours: list[Outputs] | None, progress: Callable[[str], None]) -> Runs:
        """Run the model; `ours` is what the candidate's graph gives, if that was run."""
        graph = self._graph and replace(self._graph, outputs=ours)
        self.runs = self._reference.run(samples, graph, progress)
        return self.runs

    def output(
        self, name: str, ours: torch.Tensor, of: Callable[[list[Outputs]], torch.Tensor], language_model: bool
    ) -> list[OutputAccuracy | DiscreteAccuracy]:
        """Return the accuracy of one output; `of` returns it, [rows, width], of what a model gives for the samples.

        Rows that another choice of experts changes are judged apart: see `Runs.others`.
        """
        runs = self.runs
        plain, truth, others = of(runs.plain), of(runs.truth), [of(each) for each in runs.others]
        if not plain.is_floating_point():
            return [measure_discrete(name, ours, plain, truth, others)]

        def judge(part: str, rows: torch.Tensor | slice, yardsticks: list[torch.Tensor]) -> OutputAccuracy:
            given, dtype = (ours[rows], plain[rows], truth[rows]), self._reference.dtype
            result = measure(part, *given, language_model, dtype, [each[rows] for each in yardsticks])
            if not runs.spliced:
                return result
            spliced, rewritten, original = (of(each)[rows] for each in (runs.spliced, runs.rewritten, runs.original))
            exact = runs.exact and not self.dead
            separation = separate(given[0], spliced, *given[1:], rewritten, original, exact, dtype)
            return replace(result, separation=separation)

        near = rows_near_ties(truth, others)
        if not bool(near.any()):
            return [judge(name, slice(None), [])]
        self.notes.append(
            f"rounding chooses between experts with nearly the same scores: {int(near.sum())} of {len(near)} rows "
            f"of {name} depend on it, are judged apart, and may be off by twice what another choice changes"
        )
        certain = [] if bool(near.all()) else [judge(name, ~near, [])]
        return [*certain, judge(f"{name} (near ties)", near, others)]

    def result(
        self,
        inputs: str,
        notes: list[str],
        outputs: list[OutputAccuracy | DiscreteAccuracy],
        text: TextAccuracy | None = None,
        generation: GenerationAccuracy | None = None,
    ) -> CheckResult:
        """Return what was found, with the accuracy of each block."""
        blocks = zip(self._reference.layers, self.runs.blocks, strict=False)
        notes = notes + self.notes + [note for each in outputs for note in _notes(each, self._reference.dtype)]
        coarse = ", ".join(output.name for output in outputs if output.coarse)
        if coarse:
            notes.append(f"within tolerance says little: low precision alone is more than {COARSE:.0%} off in {coarse}")
        return CheckResult(
            executed=self._candidate.executed,
            note=self._candidate.note,
            inputs=inputs,
            notes=notes,
            outputs=outputs,
            blocks=[_block(layer, block, self._neurons.get(_key(layer))) for layer, block in blocks],
            text=text,
            generation=generation,
        )


def _prompts(
    options: CheckOptions, reference: TorchReference, cache: CacheSettings, vocabulary: int
) -> tuple[list[list[int]], str, list[str]]:
    """Return prompts, what they are, and notes on them."""
    if options.arrays is not None:
        prompts = read_prompts(f"--arrays {options.arrays}", load_npz(options.arrays), cache, vocabulary)
        return prompts, f"{len(prompts)} prompts in {options.arrays.name}", []
    if options.text is not None:
        limits = Limits(reference.inputs, None, vocabulary)
        text = read_text(options.text, options.model, reference.language_model, limits)
        ids = [token for sample in text.samples for token in sample[INPUT_IDS][0].tolist()]
        source, notes = f"from the start of {options.text.name}", text.notes
        counts = prompt_lengths(cache, len(ids))
        prompts = [ids[:count] for count in counts]
    else:
        seed, notes = options.seed or 0, []
        generator, counts = torch.Generator().manual_seed(seed), prompt_lengths(cache)
        prompts = [torch.randint(vocabulary, (count,), generator=generator).tolist() for count in counts]
        source = f"at random, seed {seed}"
    return prompts, f"prompts of {', '.join(map(str, counts))} tokens {source}, and greedy steps", notes


def _load_as_compiled(options: CheckOptions, settings: Settings) -> LoadedModel:
    """Load the model as the compilation of the candidate did, by its settings.

    Raises:
        UserError: The model cannot be loaded, or leaves no such settings.
    """
    try:
        tracing = TracingOptions(
            options.model,
            trust_model=options.trust_model,
            input_specs=options.input_specs,
            padding=settings.padding,
            logits=settings.logits or ALL_LOGITS,
        )
        return load_model(tracing, read_sizes(settings.sizes or ""), cached=settings.cache is not None)
    except NoChoiceError as error:
        raise _does_not_belong(options, "it is of a causal Hugging Face model") from error


def _samples(
    options: CheckOptions, reference: Reference, profile: ShapeProfile | None
) -> tuple[list[Sample], str, list[str], bool]:
    """Return the samples, what they are, notes on them, and whether they are a text to predict."""
    limits = Limits(reference.inputs, profile, reference.token_ids)
    if options.arrays is not None:
        return [read_arrays(options.arrays, limits)], f"the arrays in {options.arrays.name}", [], False
    if options.text is not None:
        text = read_text(options.text, options.model, reference.language_model, limits)
        tokens = sum(sample["input_ids"].numel() for sample in text.samples)
        described = f"{options.text.name}: {tokens} tokens in {len(text.samples)} windows"
        return text.samples, described, text.notes, text.predicts_next
    seed = options.seed or 0
    samples = draw_samples(limits, reference.integers, seed)
    return samples, f"random inputs of {len(samples)} shapes, seed {seed}", [], False


# ---- the candidate's blocks ----


def _graph(
    candidate: Candidate, reference: Reference, neurons: dict[tuple[str, int], Neurons]
) -> tuple[CandidateGraph | None, str]:
    """Return the candidate's graph if its plugin nodes stand for the model's blocks, else why there is none."""
    if candidate.graph is None:
        return None, "the graph that the plan was built from is not beside it; keep it with --onnx"
    path, model = candidate.graph
    try:
        nodes = plugin_nodes(model)
        if not any(layer.experts for layer in reference.layers):  # others are those that the model calls by itself
            nodes = [node for node in nodes if not isinstance(node, ExpertsNode)]
    except ValueError as error:
        return None, str(error)
    kept = [neurons[key].kept if (key := _key(layer)) in neurons else layer.d_ff for layer in reference.layers]
    wanted = [
        ((layer.d_model, count, layer.d_out), layer.residual)
        for layer, count in zip(reference.layers, kept, strict=True)
    ]
    if [(node.widths, node.residual) for node in nodes] != wanted:
        same = "blocks of the same shapes, with and without a residual"
        blocks = same if len(nodes) == len(wanted) else f"{len(wanted)} such blocks"
        return None, f"the candidate has {len(nodes)} plugin nodes, and the model not {blocks}"
    return CandidateGraph(path, model, nodes), ""


def _key(layer: Layer) -> tuple[str, int]:
    return layer.module, layer.d_ff


# ---- accuracy ----


def _notes(output: OutputAccuracy | DiscreteAccuracy, dtype: torch.dtype) -> list[str]:
    """Say what could not be compared in an output, and why; `dtype` is what the model was compiled in."""
    name, low = output.name, dtype_name(dtype)
    if not output.elements:
        return [f"{name} has no elements for these inputs: there is nothing to compare"]
    if isinstance(output, DiscreteAccuracy):
        many = f"low precision alone has {output.plain_differing} of {output.elements} elements of {name} wrong"
        return [f"{many}, so it cannot be used as a reference"] if output.lacks_yardstick else []
    cure = (
        f"compile it with --dtype bf16, which has the range of float32; float16 ends at {torch.finfo(dtype).max:g}"
        if dtype == torch.float16
        else f"{low} has the range of float32, and no other --dtype has a larger one"
    )
    of = f"of {output.elements} elements of {name}"
    own, plain = output.stray - output.shared_stray, output.plain_stray - output.shared_stray
    notes = []
    if output.shared_stray:
        notes.append(
            f"{output.shared_stray} {of} are NaN or infinite in the candidate and in the plain model, and finite in "
            f"float64: the model overflows {low}; {cure}"
        )
    if own:
        notes.append(
            f"{own} {of} are NaN or infinite in the candidate alone, where the plain model agrees with float64, or are "
            "not so where they must be"
        )
    if plain:
        notes.append(
            f"{plain} {of} are NaN or infinite in the plain model in {low} alone: its error is taken from the others, "
            "and as two roundings at least"
        )
    if output.not_finite:
        notes.append(f"{output.not_finite} {of} are NaN or infinite in float64, and must be the same in the candidate")
    if output.extreme:
        notes.append(
            f"{output.extreme} {of} are beyond half of the range of their dtype in float64: each is judged by itself"
        )
    if not output.compared:
        notes.append(f"no element of {name} could be compared")
    return notes


def _block(layer: Layer, runs: BlockRuns, neurons: Neurons | None) -> BlockAccuracy:
    ours, plain, exact, rewritten = map(_stack, (runs.ours, runs.plain, runs.exact, runs.rewritten))
    result = measure(layer.module, ours, plain, exact, language_model=False)
    pruned = neurons is not None and neurons.dead > 0
    separation = separate(ours, ours, plain, exact, rewritten, exact, exact=not pruned)
    kept = 1.0 if neurons is None else neurons.kept / layer.d_ff
    density = kept * sum(runs.active) / max(sum(runs.activations), 1)
    quantisation = runs.change.error if runs.change.size else None
    return BlockAccuracy(layer.module, density, replace(result, separation=separation), quantisation)


def _without_padding(output: torch.Tensor, tokens: torch.Tensor | None) -> torch.Tensor:
    """Return an output [batch, tokens, …] as [places, …] without those of padding; any other as it is."""
    if tokens is None or output.dim() < 3 or output.shape[:2] != tokens.shape:
        return output
    return output[tokens.to(output.device)]


def _stack(outputs: Outputs) -> torch.Tensor:
    """Join the samples' outputs row by row, or element by element where the lengths of their rows differ."""
    widths = {_width(output) for output in outputs}
    width = max(widths) if len(widths) == 1 else 1
    return torch.cat([output.reshape(-1, width) for output in outputs])


def _width(output: torch.Tensor) -> int:
    return max(output.shape[-1], 1) if output.dim() else 1
