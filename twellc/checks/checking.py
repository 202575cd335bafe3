"""`twellc check`: is a candidate as accurate as the plain low-precision model, and where does its error come from?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import torch

from twellc.base.caches import INPUT_IDS, TOKEN_COUNT, WRITE_INDEX
from twellc.base.dtypes import DTYPES, dtype_name
from twellc.base.errors import UserError, first_line
from twellc.base.files import digest, external_data, temporary_folder, why_no_file
from twellc.base.modules import import_modules
from twellc.base.records import Record, of_json, parse_json
from twellc.checks.accuracy import (
    COARSE,
    DiscreteAccuracy,
    OutputAccuracy,
    TextAccuracy,
    measure,
    measure_discrete,
    separate,
    text_bits,
)
from twellc.checks.evaluator import OnnxEvaluator, plugin_nodes, runs_kernels
from twellc.checks.generation import (
    GenerationAccuracy,
    Steps,
    generate_by_all_profiles,
    graph_steps,
    plan_steps,
    prompt_lengths,
    read_prompts,
)
from twellc.checks.reference import BlockRuns, CandidateGraph, OnnxReference, Outputs, Reference, Runs, TorchReference
from twellc.compiling.manifest import UNKEPT_GRAPH, CacheSettings, is_plan, read_manifest, refuse_other_plugins
from twellc.compiling.result import METADATA_KEY
from twellc.compiling.translate import translate_any
from twellc.export.onnx_export import save_onnx
from twellc.export.runner import PlanRunner, open_plan
from twellc.export.tensorrt_host import load_host, why_not_here
from twellc.loaders.huggingface_inputs import read_sizes
from twellc.loaders.loaded import LoadedModel
from twellc.loaders.model import load_model
from twellc.loaders.onnx_file import load_onnx
from twellc.loaders.onnx_format import looks_like_onnx
from twellc.options.commands import CheckOptions, CompileOptions
from twellc.options.source import ALL_LOGITS, LOGITS, PADDINGS, NoChoiceError, TracingOptions
from twellc.passes.report import Layer, Neurons
from twellc.samples.samples import Limits, Sample, draw_samples, load_npz, places_of_tokens, read_arrays, read_text


@dataclass(frozen=True)
class BlockAccuracy(Record):
    """Accuracy of one plugin node, for the inputs that its block has in the plain low-precision model.

    Attributes:
        module: Path of the module that holds the block's weights.
        density: Share of the gate's activations that are not zero for these inputs.
        accuracy: Accuracy of the node's output; the truth is the block in float64 with the weights of low precision.
    """

    computed = ("diverges",)

    module: str
    density: float
    accuracy: OutputAccuracy

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
        outputs: Accuracy of each output.
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


@dataclass(frozen=True)
class _Candidate:
    """Something to run: `settings` are those of its compilation, where it says so; `graph` its ONNX file, if known.

    `steps` runs it step by step, if it has a key-value cache.
    """

    run: Callable[[Sample], Outputs]
    inputs: list[str]
    settings: dict[str, Any]
    executed: str
    graph: tuple[Path, onnx.ModelProto] | None
    is_graph: bool
    note: str = ""
    profile: dict[str, Any] | None = None
    steps: Steps | None = None


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
    candidate_path = options.candidate
    sources = {"--inputs": options.arrays, "--text": options.text, "--seed": options.seed}
    given = [option for option, value in sources.items() if value is not None]
    if len(given) > 1:
        raise UserError(given[0], "the inputs are given twice", got=f"{given[1]}, too", fix="Leave one out.")
    if not candidate_path.is_file():
        raise UserError(str(candidate_path), "there is no such file", expected="an ONNX file or a plan")
    if looks_like_onnx(candidate_path):
        progress("reading the candidate")
        candidate = _open_onnx(candidate_path)
        _refuse_other_profile(options, candidate.settings.get("calibration"))
    elif is_plan(candidate_path):
        candidate = _open_plan(options, folder, progress)
    else:
        raise UserError(str(candidate_path), "is neither an ONNX file nor a plan with its manifest beside it")
    if "cache" in candidate.settings:
        return _check_generation(options, candidate, progress)
    reference: Reference
    if looks_like_onnx(options.model):
        progress("loading the model")
        reference = OnnxReference(options.model, candidate.settings, options.inputs)
    else:
        progress("loading and tracing the model")
        reference = TorchReference(_load_as_compiled(options, candidate.settings), candidate.settings)
    specs = reference.inputs.specs
    if sorted(candidate.inputs) != sorted(spec.name for spec in specs):
        raise UserError(
            str(candidate_path), "does not belong to the model: their inputs differ",
            got=", ".join(candidate.inputs), expected=", ".join(spec.name for spec in specs),
        )  # fmt: skip
    samples, described, notes, predicts_next = _samples(options, reference, candidate.profile)
    if predicts_next and candidate.settings.get("logits") == "last":
        predicts_next = False
        notes.append("how well the text is predicted is not measured: --logits last computes one place of a window")
    ours: list[Outputs] = []
    for index, sample in enumerate(samples):
        progress(f"running the candidate: sample {index + 1} of {len(samples)}")
        ours.append(candidate.run(sample))
        if len(ours[-1]) != len(reference.outputs):
            raise UserError(
                str(candidate_path), "does not belong to the model: their outputs differ",
                got=str(len(ours[-1])), expected=", ".join(reference.outputs),
            )  # fmt: skip
    neurons = {} if candidate.graph is None else _neurons(candidate.graph[1])
    dead = sum(each.dead for each in neurons.values())
    graph, obstacle = _graph(candidate, reference, neurons)
    if dead:
        notes.append(f"{dead} neurons were removed by --prune-dead: what they would add is an error of the rewriting")
    notes += [f"blocks are not compared, and the error is not separated: {obstacle}"] if obstacle else []
    try:
        runs = reference.run(samples, graph, ours if candidate.is_graph else None, progress)
    except (IndexError, RuntimeError) as error:  # torch's own; random inputs are made so that they fit
        if options.arrays is None:
            raise
        raise UserError(
            f"--inputs {options.arrays}", f"the model fails on these inputs ({first_line(error)})",
            fix="Check their values, such as indices into tables.",
        ) from error  # fmt: skip
    text = None
    if predicts_next:
        ids = [sample["input_ids"].long() for sample in samples]
        bits = [text_bits([outputs[0] for outputs in each], ids) for each in (ours, runs.plain, runs.truth)]
        text = TextAccuracy(bits[0][0], *(each for _, each in bits)) if bits[0][0] else None
    tokens = [places_of_tokens(sample) for sample in samples]
    if any(each is not None for each in tokens):
        notes.append("places of padding are not compared: what a model gives for them has no meaning")
    count = len(reference.outputs)
    outputs = [_output(candidate_path, reference, runs, ours, index, dead > 0, tokens) for index in range(count)]
    notes += [note for output in outputs for note in _notes(output, reference.dtype)]
    coarse = ", ".join(output.name for output in outputs if output.coarse)
    if coarse:
        notes.append(f"within tolerance says little: low precision alone is more than {COARSE:.0%} off in {coarse}")
    return CheckResult(
        executed=candidate.executed,
        note=candidate.note,
        inputs=described,
        notes=notes,
        outputs=outputs,
        blocks=[
            _block(layer, block, neurons.get(_key(layer)))
            for layer, block in zip(reference.layers, runs.blocks, strict=False)
        ],
        text=text,
    )


def _check_generation(options: CheckOptions, candidate: _Candidate, progress: Callable[[str], None]) -> CheckResult:
    """Compare a candidate with a key-value cache with the model that it was made from, which gets none; see `check`."""
    path = options.candidate
    try:
        cache = of_json(CacheSettings, candidate.settings["cache"])
    except ValueError as error:
        raise UserError(str(path), f"is damaged: what it says of its cache is wrong ({error})") from error
    if candidate.steps is None or candidate.inputs[:3] != [INPUT_IDS, WRITE_INDEX, TOKEN_COUNT]:
        raise UserError(str(path), "is damaged: it says that it has a cache, and has not its inputs")
    if looks_like_onnx(options.model):
        raise UserError(str(path), "does not belong to the model: it has a cache, and ONNX files get none",
                        got=str(options.model))  # fmt: skip
    progress("loading and tracing the model")
    settings = {**candidate.settings, "logits": ALL_LOGITS}
    reference = TorchReference(_load_as_compiled(options, settings), settings)
    if [spec.name for spec in reference.inputs.specs] != [INPUT_IDS] or reference.token_ids is None:
        raise UserError(str(path), "does not belong to the model: it has a cache of keys and values",
                        got=str(options.model))  # fmt: skip
    if reference.token_ids != candidate.steps.vocabulary:
        raise UserError(
            str(path), "does not belong to the model: their vocabularies differ", got=str(candidate.steps.vocabulary),
            expected=str(reference.token_ids),
        )  # fmt: skip
    prompts, described, notes = _prompts(options, reference, cache, reference.token_ids)
    progress("running the candidate")
    ours = generate_by_all_profiles(candidate.steps, prompts, cache)
    others = candidate.steps.other_sizes(len(prompts))
    if others:
        notes.append(
            f"the longest prompt is computed again with {' and '.join(map(str, others))} at a time, for which the plan "
            "has optimization profiles of its own"
        )
    neurons = {} if candidate.graph is None else _neurons(candidate.graph[1])
    graph, obstacle = _graph(candidate, reference, neurons)
    notes += [f"blocks are not compared, and the error is not separated: {obstacle}"] if obstacle else []
    runs = reference.run([{INPUT_IDS: ours.ids}], graph, None, progress)
    plain, truth = (ours.of_model(outputs[0]) for outputs in (runs.plain, runs.truth))

    def rows(logits: torch.Tensor) -> torch.Tensor:
        return logits.flatten(0, 1)

    result = measure("logits", rows(ours.logits), rows(plain), rows(truth), True, reference.dtype)
    if runs.spliced:
        spliced, rewritten, original = (
            rows(ours.of_model(outputs[0])) for outputs in (runs.spliced, runs.rewritten, runs.original)
        )
        pruned = any(each.dead for each in neurons.values())
        separation = separate(
            rows(ours.logits), spliced, rows(plain), rows(truth), rewritten, original, runs.exact and not pruned,
            reference.dtype,
        )  # fmt: skip
        result = replace(result, separation=separation)
    blocks = zip(reference.layers, runs.blocks, strict=False)
    return CheckResult(
        executed=candidate.executed,
        note=candidate.note,
        inputs=described,
        notes=notes + _notes(result, reference.dtype),
        outputs=[result],
        blocks=[_block(layer, block, neurons.get(_key(layer))) for layer, block in blocks],
        text=None,
        generation=ours.accuracy(plain, truth),
    )


def _prompts(
    options: CheckOptions, reference: TorchReference, cache: CacheSettings, vocabulary: int
) -> tuple[list[list[int]], str, list[str]]:
    """Return prompts, what they are, and notes on them."""
    if options.arrays is not None:
        prompts = read_prompts(f"--inputs {options.arrays}", load_npz(options.arrays), cache, vocabulary)
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


def _load_as_compiled(options: CheckOptions, settings: dict[str, Any]) -> LoadedModel:
    """Load the model as the compilation of the candidate did, by its settings.

    Raises:
        UserError: The model cannot be loaded, or leaves no such settings.
    """
    padding, logits, sizes = settings.get("padding"), settings.get("logits"), settings.get("sizes")
    try:
        return load_model(
            TracingOptions(
                options.model, trust_model=options.trust_model, inputs=options.inputs,
                padding=padding if padding in PADDINGS else None, logits=logits if logits in LOGITS else LOGITS[0],
            ),
            read_sizes(str(sizes)), cached="cache" in settings,
        )  # fmt: skip
    except NoChoiceError as error:
        raise UserError(
            str(options.candidate), "does not belong to the model: it is of a causal Hugging Face model",
            got=str(options.model),
        ) from error  # fmt: skip


def _samples(
    options: CheckOptions, reference: Reference, profile: dict[str, Any] | None
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


# ---- the candidate ----


def _open_onnx(path: Path) -> _Candidate:
    model = load_onnx(path)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    try:
        settings = dict(parse_json(metadata[METADATA_KEY])["settings"])
    except (KeyError, TypeError, ValueError):
        settings = {}
    _refuse_ranks(path, settings)
    evaluator = OnnxEvaluator(path, model)
    executed = "the ONNX graph, in onnx's reference evaluator"
    if runs_kernels():
        executed += f", its plugin nodes by the CUDA kernels on {torch.cuda.get_device_name()}"
    steps = graph_steps(path, evaluator.run, model) if "cache" in settings else None
    return _Candidate(evaluator.run, evaluator.inputs, settings, executed, (path, model), is_graph=True, steps=steps)


def _open_plan(options: CheckOptions, folder: Path, progress: Callable[[str], None]) -> _Candidate:
    """Open a plan, or the graph that it was built from where no GPU can run it; made again in `folder` if need be."""
    plan = options.candidate
    progress("reading the manifest")
    manifest = read_manifest(plan)
    if manifest.plugins.libraries:
        raise UserError(
            str(plan), "holds plugins of other people, which the float64 model cannot compute",
            got=", ".join(f"{name} ({each.file})" for each in manifest.plugins.libraries for name in each.names),
            fix="Check the model without them; compare this plan's outputs by hand.",
        )  # fmt: skip
    settings: dict[str, Any] = manifest.settings.to_json()
    _refuse_ranks(plan, settings)
    _refuse_other_profile(options, settings.get("calibration"))
    profile = {name: vars(shapes) for name, shapes in manifest.profiles[0].items()}
    assert manifest.backend is not None and manifest.plan is not None  # see read_manifest
    backend, expected, kept_name = manifest.backend.name, manifest.onnx.sha256, manifest.onnx.file
    kept = plan.parent / str(kept_name)
    data = external_data(kept)
    is_kept = kept.is_file() and digest(kept, *([data] if data.is_file() else [])) == expected
    obstacle = why_not_here(backend)
    if not obstacle:
        refuse_other_plugins(plan, manifest)
        progress("opening the plan")
        opened = open_plan(load_host(backend), plan, manifest.backend.version, manifest.relations)
        run = PlanRunner(opened)
        names = [tensor.name for tensor in manifest.plan.inputs]
        graph = (kept, load_onnx(kept)) if is_kept else None
        steps = None if manifest.cache is None else plan_steps(opened, manifest)
        return _Candidate(run, names, settings, "the plan", graph, is_graph=False, profile=profile, steps=steps)
    if is_kept:
        candidate, source = _open_onnx(kept), f"{kept.name}, the ONNX graph that it was built from"
    else:
        if "calibration" in settings and options.calibration is None:
            raise UserError(
                str(plan), "was compiled with a profile, which is needed to make its graph again",
                fix="Give it with --calibration PROFILE; or compile again, and keep the graph with --onnx.",
            )  # fmt: skip
        dtype = settings["dtype"] if settings["dtype"] in DTYPES else None  # of a graph that was left as it is
        asked = {name: value for name, value in settings.items() if name != "cache"}
        if "cache" in settings:
            length, batch, chunk = (settings["cache"][name] for name in ("length", "batch", "prefill_chunk"))
            asked |= {"kv_cache": length, "batch": batch, "prefill_chunk": chunk}
        compilation = CompileOptions(
            options.model, backend="none", trust_model=options.trust_model, inputs=options.inputs,
            **{**asked, "dtype": dtype, "calibration": options.calibration},
        )  # fmt: skip
        # Its name is in the graph where weights stand in a file of their own.
        written = save_onnx(translate_any(compilation, progress).graph, folder / (kept_name or UNKEPT_GRAPH))
        if digest(*written) != expected:
            raise UserError(
                str(plan), f"was not built from {options.model} by this version of twellc",
                fix="Compile again, and keep the graph with --onnx to check a plan later.",
            )  # fmt: skip
        candidate, source = _open_onnx(written[0]), "the ONNX graph that it was built from, made again"
    executed = candidate.executed.replace("the ONNX graph", source, 1)
    note = f"the plan itself was NOT run: {obstacle}"
    return replace(candidate, settings=settings, executed=executed, note=note, profile=profile)


def _refuse_ranks(candidate: Path, settings: dict[str, Any]) -> None:
    """Fail if a candidate is for one of several GPUs, and computes a part of what the model does.

    Raises:
        UserError: It is.
    """
    ranks = settings.get("tensor_parallel")
    if ranks is not None:
        raise UserError(
            str(candidate), f"computes a part of the model, for one of {ranks} GPUs",
            fix="Check the model compiled without --tensor-parallel; benchmarks/tensor_parallel.py compares the ranks.",
        )  # fmt: skip


def _refuse_other_profile(options: CheckOptions, sha256: str | None) -> None:
    """Fail if a profile is given that is not the one that the candidate was compiled with.

    Args:
        options: See `CheckOptions`.
        sha256: SHA-256 of the profile that it was compiled with; None where there was none.

    Raises:
        UserError: It is.
    """
    path = options.calibration
    if path is None:
        return
    where, expected = f"--calibration {path}", f"the profile that {options.candidate} was compiled with"
    if not path.is_file():
        raise UserError(where, why_no_file(path), expected=expected)
    if sha256 is None:
        raise UserError(where, f"{options.candidate} was compiled without a profile", fix="Leave it out.")
    own = digest(path)
    if own != sha256:
        raise UserError(
            where, "is another profile", got=f"SHA-256 {own[:12]}…", expected=f"{expected}, {str(sha256)[:12]}…",
            fix="Give that one, or none.",
        )  # fmt: skip


def _graph(
    candidate: _Candidate, reference: Reference, neurons: dict[tuple[str, int], Neurons]
) -> tuple[CandidateGraph | None, str]:
    """Return the candidate's graph if its plugin nodes stand for the model's blocks, else why there is none."""
    if candidate.graph is None:
        return None, "the graph that the plan was built from is not beside it; keep it with --onnx"
    path, model = candidate.graph
    try:
        nodes = plugin_nodes(model)
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


def _neurons(model: onnx.ModelProto) -> dict[tuple[str, int], Neurons]:
    """Return what became of the neurons of blocks, by module and d_ff, as far as a graph says so."""
    text = next((entry.value for entry in model.metadata_props if entry.key == METADATA_KEY), "")
    try:
        layers = [of_json(Layer, layer) for layer in parse_json(text)["layers"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {_key(layer): layer.neurons for layer in layers if layer.neurons is not None}


# ---- accuracy ----


def _output(
    candidate: Path,
    reference: Reference,
    runs: Runs,
    ours: list[Outputs],
    index: int,
    pruned: bool,
    tokens: list[torch.Tensor | None],
) -> OutputAccuracy | DiscreteAccuracy:
    def stacked(results: list[Outputs]) -> torch.Tensor:
        return _stack([_without_padding(each[index], own) for each, own in zip(results, tokens, strict=True)])

    name = reference.outputs[index]
    for got, expected in zip(ours, runs.plain, strict=True):
        if got[index].shape != expected[index].shape:
            raise UserError(
                str(candidate), f"output {name} has another shape than the model's",
                got=str(tuple(got[index].shape)), expected=str(tuple(expected[index].shape)),
            )  # fmt: skip
    mine, plain, truth = stacked(ours), stacked(runs.plain), stacked(runs.truth)
    if not plain.is_floating_point():
        return measure_discrete(name, mine, plain, truth)
    # A row whose length varies with the input is no row of logits over a vocabulary.
    language_model = reference.language_model and index == 0 and len({_width(each[index]) for each in runs.plain}) == 1
    result = measure(name, mine, plain, truth, language_model, reference.dtype)
    if not runs.spliced:
        return result
    rewritten, original = stacked(runs.rewritten), stacked(runs.original)
    exact = runs.exact and not pruned
    separation = separate(mine, stacked(runs.spliced), plain, truth, rewritten, original, exact, reference.dtype)
    return replace(result, separation=separation)


def _notes(output: OutputAccuracy | DiscreteAccuracy, dtype: torch.dtype) -> list[str]:
    """Say what could not be compared in an output, and why; `dtype` is what the model was compiled in."""
    name, low = output.name, dtype_name(dtype)
    if not output.elements:
        return [f"{name} has no elements for these inputs: there is nothing to compare"]
    if isinstance(output, DiscreteAccuracy):
        many = f"low precision alone has {output.plain_differing} of {output.elements} elements of {name} wrong"
        return [f"{many}, and is no yardstick"] if output.lacks_yardstick else []
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
    return BlockAccuracy(layer.module, density, replace(result, separation=separation))


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
