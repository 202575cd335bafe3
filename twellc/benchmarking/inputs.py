"""The shapes that a model is measured at, and its inputs."""

from __future__ import annotations

import torch

from twellc.base.errors import UserError
from twellc.checks.reference import integer_ranges
from twellc.export.shapes import Shape
from twellc.loaders.loaded import LoadedModel
from twellc.options.commands import BenchOptions
from twellc.options.source import refuse_several_inputs
from twellc.passes.sizes.conditions import fitting_sizes
from twellc.passes.sizes.find_relations import relations_of
from twellc.passes.sizes.inputs import program_inputs
from twellc.samples.samples import Limits, Sample, draw_sample, read_arrays, read_text

# Sizes to measure at, by the number of dynamic dimensions, as far as the model takes them. For a language model they
# are sequences and their tokens: one token, and prompts.
USUAL_SHAPES: dict[int, tuple[Shape, ...]] = {
    0: ((),),
    1: ((1,), (32,), (512,), (2048,), (8192,)),
    2: ((1, 1), (1, 32), (1, 512), (1, 2048), (4, 2048)),
}


def make_samples(options: BenchOptions, model: LoadedModel) -> tuple[dict[str, Sample], str]:
    """Return the inputs of each shape, by the shape's name such as `1x512`, and a description of them.

    Raises:
        UserError: The model does not take a requested shape, or the inputs cannot be read.
    """
    limits = Limits(program_inputs(model.program), None, model.vocabulary)
    refuse_several_inputs(options)
    if options.arrays is not None:
        if options.shapes:
            raise UserError("--shapes", "the shapes are those of the arrays", got="--arrays, too")
        sample = read_arrays(options.arrays, limits)
        name = " ".join("x".join(map(str, tensor.shape)) or "1" for tensor in sample.values())
        return {name: sample}, f"the arrays in {options.arrays.name}"
    chosen = _shapes(options, limits)
    if options.text is not None:
        text = read_text(options.text, options.model, model.language_model, limits)
        ids = torch.cat([sample["input_ids"].flatten() for sample in text.samples])
        samples = {_name(shape): _windows(text.samples[0], ids, shape) for shape in chosen}
        return samples, f"{options.text.name}: {ids.numel()} tokens, repeated where a shape has more"
    seed, integers = options.seed or 0, integer_ranges(model)
    generator = torch.Generator().manual_seed(seed)
    samples = {
        _name(shape): draw_sample(limits, integers, dict(zip(limits.ranges, shape, strict=True)), generator)
        for shape in chosen
    }
    return samples, f"random, seed {seed}; how many neurons fire for them may be unlike real inputs"


def _name(shape: Shape) -> str:
    return "x".join(map(str, shape)) or "fixed"


def _shapes(options: BenchOptions, limits: Limits) -> list[Shape]:
    bounds = list(limits.ranges.values())

    def fits(shape: Shape) -> bool:
        return len(shape) == len(bounds) and all(
            low <= size <= high for size, (low, high) in zip(shape, bounds, strict=True)
        )

    if not options.shapes:
        usual = [shape for shape in USUAL_SHAPES.get(len(bounds), ()) if fits(shape)]
        return list(dict.fromkeys(_together(limits, shape) for shape in usual or [_hints(limits)]))
    for shape in options.shapes:
        if not fits(shape):
            ranges = " x ".join(f"{low} to {high}" for low, high in bounds) or "no dynamic dimension"
            raise UserError("--shapes", "the model does not take these sizes", got=_name(shape), expected=ranges)
        if _together(limits, shape) != shape:
            expected = "; ".join(relation.text for relation in relations_of(limits.inputs))
            what = "the model does not take these sizes together"
            raise UserError(
                "--shapes", what, got=_name(shape), expected=expected, fix=f"In the order {_order(limits)}."
            )
    return list(dict.fromkeys(options.shapes))


def _hints(limits: Limits) -> Shape:
    return tuple(limits.inputs.hints[symbol] for symbol in limits.ranges)


def _order(limits: Limits) -> str:
    """Say which dimensions of the inputs the sizes of a shape are, in order."""
    places: dict[str, str] = {}
    for spec in limits.inputs.specs:
        for axis, dim in enumerate(spec.shape):
            for symbol in getattr(dim, "free_symbols", ()):
                places.setdefault(str(symbol), f"{spec.name}[{axis}]")
    return " x ".join(places[symbol] for symbol in limits.ranges)


def _together(limits: Limits, shape: Shape) -> Shape:
    """Return the nearest sizes that the model takes together; these where there are none."""
    ranges = limits.ranges
    fitting = fitting_sizes(limits.inputs.conditions, ranges, dict(zip(ranges, shape, strict=True)))
    return shape if fitting is None else tuple(fitting[symbol] for symbol in ranges)


def _windows(sample: Sample, ids: torch.Tensor, shape: Shape) -> Sample:
    """Cut rows without padding out of the middle of a text, as first tokens are unlike others."""
    rows, length = shape
    count = rows * length
    start = max(0, (ids.numel() - count) // 2)
    tokens = ids[start:].repeat(-(-count // (ids.numel() - start)))[:count].reshape(rows, length)
    return {
        name: tokens if name == "input_ids" else torch.ones_like(tokens, dtype=tensor.dtype)
        for name, tensor in sample.items()
    }
