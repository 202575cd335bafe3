"""`twellc check`: is a candidate as accurate as the plain low-precision model?"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sympy
import torch

from twellc.accuracy import OutputAccuracy, measure
from twellc.config import DTYPES, CompileOptions
from twellc.errors import UserError
from twellc.export.evaluator import OnnxEvaluator
from twellc.export.onnx_export import save_onnx
from twellc.export.profiles import InputSpec, ModelInputs, program_inputs, symbol_value
from twellc.export.runner import run_plan
from twellc.export.tensorrt_host import load_host, why_not_here
from twellc.files import digest
from twellc.inputs import InputDeclaration
from twellc.loaders.model import LoadedModel, load_model
from twellc.loaders.onnx_file import load_onnx, looks_like_onnx
from twellc.manifest import manifest_path, read_manifest
from twellc.onnx_models import open_reference
from twellc.passes.canonicalize import canonicalize
from twellc.passes.execution import example_inputs, run_program
from twellc.passes.precision import lower, parameter_dtypes, widen
from twellc.translation import METADATA_KEY, choose_dtype, torch_dtype, translate_any

Sample = dict[str, torch.Tensor]


@dataclass(frozen=True)
class CheckResult:
    """What `twellc check` found.

    Attributes:
        executed: What was run for the candidate, in words.
        note: Why that was not the candidate itself; empty when it was.
        outputs: Accuracy of each output.
    """

    executed: str
    note: str
    outputs: list[OutputAccuracy]

    @property
    def within(self) -> bool:
        """Whether every output is within tolerance."""
        return all(output.within for output in self.outputs)


@dataclass(frozen=True)
class _Candidate:
    """Something to run: `settings` are those of its compilation, where it says so."""

    run: Callable[[Sample], list[torch.Tensor]]
    inputs: list[str]
    settings: dict[str, Any]
    executed: str
    note: str = ""
    profile: dict[str, Any] | None = None


@dataclass(frozen=True)
class _Reference:
    """What a candidate is compared with: the model in low precision and in float64, and how to draw its inputs."""

    inputs: ModelInputs
    integers: dict[str, tuple[int, int]]
    plain: Callable[[Sample], list[torch.Tensor]]
    truth: Callable[[Sample], list[torch.Tensor]]
    outputs: list[str]
    language_model: bool


def check(
    model_path: Path,
    candidate_path: Path,
    seed: int,
    trust_model: bool,
    inputs: tuple[InputDeclaration, ...],
    progress: Callable[[str], None],
) -> CheckResult:
    """Compare a candidate with the model that it was made from, on random inputs of several shapes.

    Args:
        model_path: The model, as `twellc compile` takes it.
        candidate_path: A rewritten ONNX file, or a plan with its manifest.
        seed: Seed of the inputs.
        trust_model: Load a pickle, or an archive that could execute code.
        inputs: The inputs of a pickled module.
        progress: Receives the name of each step.

    Raises:
        UserError: One of the two cannot be read, or they do not belong together.
    """
    if not candidate_path.is_file():
        raise UserError(str(candidate_path), "there is no such file", expected="an ONNX file or a plan")
    if manifest_path(candidate_path).is_file() and candidate_path.suffix != ".onnx":
        candidate = _open_plan(model_path, candidate_path, trust_model, inputs, progress)
    else:
        progress("reading the candidate")
        candidate = _open_onnx(candidate_path)
    if looks_like_onnx(model_path):
        progress("loading the model")
        reference = _onnx_reference(model_path, candidate.settings, inputs)
    else:
        progress("loading and tracing the model")
        reference = _torch_reference(load_model(model_path, trust_model, inputs), candidate.settings)
    specs = reference.inputs.specs
    if sorted(candidate.inputs) != sorted(spec.name for spec in specs):
        raise UserError(
            str(candidate_path), "does not belong to the model: their inputs differ",
            got=", ".join(candidate.inputs), expected=", ".join(spec.name for spec in specs),
        )  # fmt: skip
    samples = draw_samples(reference.inputs, reference.integers, seed, candidate.profile)
    ours, theirs, true = [], [], []
    for index, sample in enumerate(samples):
        progress(f"running sample {index + 1} of {len(samples)}")
        ours.append(candidate.run(sample))
        if len(ours[-1]) != len(reference.outputs):
            raise UserError(
                str(candidate_path), "does not belong to the model: their outputs differ",
                got=str(len(ours[-1])), expected=", ".join(reference.outputs),
            )  # fmt: skip
        theirs.append(reference.plain(sample))
        true.append(reference.truth({name: _widened(tensor) for name, tensor in sample.items()}))
    outputs = []
    for position, name in enumerate(reference.outputs):
        tensors = tuple(_stack([result[position] for result in results]) for results in (ours, theirs, true))
        if tensors[0].shape != tensors[1].shape:
            raise UserError(
                str(candidate_path), f"output {name} has another shape than the model's",
                got=str(tuple(ours[0][position].shape)), expected=str(tuple(theirs[0][position].shape)),
            )  # fmt: skip
        language_model = reference.language_model and position == 0
        outputs.append(measure(name, tensors[0], tensors[1], tensors[2], language_model=language_model))
    return CheckResult(candidate.executed, candidate.note, outputs)


def _torch_reference(model: LoadedModel, settings: dict[str, Any]) -> _Reference:
    source = canonicalize(model.program)
    name = settings.get("dtype")
    dtype = torch_dtype(name if name in DTYPES else choose_dtype(model, None)[0])
    plain = lower(source, dtype) if parameter_dtypes(source) - {dtype} else source
    truth = widen(source)
    return _Reference(
        inputs=program_inputs(source),
        integers=_traced_integers(model),
        plain=lambda sample: run_program(plain, sample),
        truth=lambda sample: run_program(truth, sample),
        outputs=model.output_names,
        language_model=model.language_model,
    )


def _onnx_reference(path: Path, settings: dict[str, Any], declared: tuple[InputDeclaration, ...]) -> _Reference:
    reference = open_reference(path, settings, declared)
    # The evaluator is slow, and nothing was traced: small sizes.
    hints = {symbol: min(2 * hint, 8) for symbol, hint in reference.inputs.hints.items()}
    return _Reference(
        inputs=replace(reference.inputs, hints=hints),
        integers=reference.integers,
        plain=reference.plain.run,
        truth=reference.truth.run,
        outputs=reference.outputs,
        language_model=reference.outputs[0] == "logits",
    )


def make_samples(model: LoadedModel, specs: list[InputSpec], seed: int, profile: dict[str, Any] | None) -> list[Sample]:
    """Make random inputs of a traced model: token ids from its vocabulary, other integers from the traced range.

    Args:
        model: Gives the vocabulary and the traced values.
        specs: The inputs.
        seed: Seed of the generator.
        profile: See `draw_samples`.
    """
    return draw_samples(replace(program_inputs(model.program), specs=specs), _traced_integers(model), seed, profile)


def _traced_integers(model: LoadedModel) -> dict[str, tuple[int, int]]:
    ranges = {}
    for name, example in example_inputs(model.program).items():
        if model.vocabulary is not None and name.endswith("input_ids"):
            ranges[name] = (0, model.vocabulary - 1)
        elif not example.is_floating_point():
            ranges[name] = (int(example.min()), int(example.max())) if example.numel() else (0, 1)
    return ranges


def draw_samples(
    inputs: ModelInputs, integers: dict[str, tuple[int, int]], seed: int, profile: dict[str, Any] | None
) -> list[Sample]:
    """Make random inputs: at the smallest shapes, at the shapes that the model hints at, and at larger ones.

    Args:
        inputs: The inputs.
        integers: Least and largest value of integer inputs; floats are drawn from a normal distribution.
        seed: Seed of the generator.
        profile: Shape ranges of a plan (`min` and `max` by input name) that the samples must keep to.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes: list[dict[str, tuple[int, ...]]] = []
    for factor in (0, 1, 3):
        sizes = {}
        for node_spec in inputs.specs:
            for axis, dim in enumerate(node_spec.shape):
                for symbol in getattr(dim, "free_symbols", ()):
                    least, largest = inputs.bounds.get(str(symbol), (1, None))
                    low, high = max(1, least), int(str(largest)) if str(largest).isdigit() else 1 << 30
                    if profile is not None:
                        limits = profile[node_spec.name]
                        low = max(low, symbol_value(dim, limits["min"][axis]) or 1)
                        high = min(high, symbol_value(dim, limits["max"][axis]) or high)
                    sizes[symbol] = min(max(inputs.hints[str(symbol)] * factor, low), high)
        shape = {spec.name: tuple(_size(dim, sizes) for dim in spec.shape) for spec in inputs.specs}
        if shape not in shapes:
            shapes.append(shape)
    return [
        {spec.name: _random(spec, shape[spec.name], integers.get(spec.name), generator) for spec in inputs.specs}
        for shape in shapes
    ]


def _size(dim: int | sympy.Expr, sizes: dict[sympy.Expr, int]) -> int:
    return dim if isinstance(dim, int) else int(dim.xreplace({s: sympy.Integer(n) for s, n in sizes.items()}))


def _random(
    spec: InputSpec, shape: tuple[int, ...], integers: tuple[int, int] | None, generator: torch.Generator
) -> torch.Tensor:
    if spec.dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(spec.dtype)
    low, high = integers or (0, 1)
    return torch.randint(low, high + 1, shape, generator=generator).to(spec.dtype)


def _open_onnx(path: Path) -> _Candidate:
    evaluator = OnnxEvaluator(path, load_onnx(path))
    try:
        settings = json.loads(evaluator.metadata[METADATA_KEY])["settings"]
    except (KeyError, ValueError):
        settings = {}
    return _Candidate(evaluator.run, evaluator.inputs, settings, "the ONNX graph, in onnx's reference evaluator")


def _open_plan(
    model_path: Path,
    plan: Path,
    trust_model: bool,
    inputs: tuple[InputDeclaration, ...],
    progress: Callable[[str], None],
) -> _Candidate:
    progress("reading the manifest")
    manifest = read_manifest(plan)
    settings, profile = manifest["settings"], manifest["profiles"][0]
    backend = manifest["backend"]["name"]
    obstacle = why_not_here(backend)
    if not obstacle:
        host = load_host(backend)
        names = [tensor["name"] for tensor in manifest["plan"]["inputs"]]
        return _Candidate(lambda sample: run_plan(host, plan, sample), names, settings, "the plan", profile=profile)
    note = f"the plan itself was NOT run: {obstacle}"
    expected = manifest["onnx"]["sha256"]
    kept = plan.parent / str(manifest["onnx"]["file"])
    data = kept.with_name(kept.name + ".data")
    if kept.is_file() and digest(kept, *([data] if data.is_file() else [])) == expected:
        candidate, source = _open_onnx(kept), f"{kept.name}, the ONNX graph that it was built from"
    else:
        options = CompileOptions(model_path, backend="none", trust_model=trust_model, inputs=inputs, **settings)
        translation = translate_any(options, progress)
        with tempfile.TemporaryDirectory(prefix="twellc-") as folder:
            written = save_onnx(translation.graph, Path(folder) / "model.onnx")
            if digest(*written) != expected:
                raise UserError(
                    str(plan), f"was not built from {model_path} by this version of twellc",
                    fix="Compile again, and keep the graph with --onnx to check a plan later.",
                )  # fmt: skip
            candidate, source = _open_onnx(written[0]), "the ONNX graph that it was built from, made again"
    return _Candidate(
        candidate.run, candidate.inputs, settings, f"{source}, in onnx's reference evaluator", note, profile
    )


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _stack(outputs: list[torch.Tensor]) -> torch.Tensor:
    """Join the samples' outputs, of different leading dimensions, row by row."""
    return torch.cat([output.reshape(-1, output.shape[-1] if output.dim() else 1) for output in outputs])
