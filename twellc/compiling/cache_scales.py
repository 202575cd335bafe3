"""Choose the scales of key-value caches in FP8: those of a checkpoint, or measured on a text, or 1."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twellc.base.caches import INPUT_IDS, LOGIT_PLACES, TOKEN_COUNT, WRITE_INDEX
from twellc.base.errors import UserError, first_few
from twellc.loaders.cache_scales import stored_scales
from twellc.loaders.loaded import LoadedModel
from twellc.passes.graph.device import on_device
from twellc.passes.graph.execution import Runner
from twellc.passes.sizes.inputs import program_inputs
from twellc.plugins.cache_op import APPEND
from twellc.plugins.fp8 import LARGEST
from twellc.samples.samples import Limits, read_text

# What is larger than anything in the text, up to this many times, is still in range; it costs E4M3 no precision.
_ROOM = 2.0


def choose_scales(model: LoadedModel, text: Path | None, device: torch.device) -> tuple[dict[str, float], list[str]]:
    """Return the scale of each cache, by its input, and a note on them.

    Args:
        model: A model with a cache, as it was traced.
        text: A text to measure them on if the checkpoint has none; None: then they are 1.
        device: Where to run the model for that.

    Raises:
        UserError: Scales of the checkpoint are damaged or of some layers alone, the text cannot be read, or the model
            computes keys or values of it that are not finite.
    """
    assert model.cache is not None
    caches = [pair.input for pair in model.cache.pairs]
    stored = stored_scales(model.path)
    if stored:
        layers = [int(cache.split(".")[1]) for cache in caches]
        missing = [str(layer) for layer in dict.fromkeys(layers) if layer not in stored]
        if missing:
            what = "the checkpoint has scales of the caches of some layers alone"
            raise UserError(str(model.path), what, got=f"none of layer {first_few(missing)}")
        scales = {cache: stored[layer][cache.endswith(".value")] for cache, layer in zip(caches, layers, strict=True)}
        return scales, ["keys and values are kept in FP8, with the scales of the checkpoint"]
    if text is not None:
        return measure_scales(model, text, device), [f"keys and values are kept in FP8, with scales of {text.name}"]
    note = "keys and values are kept in FP8, with scales of 1, as the checkpoint has none; --text FILE measures them"
    return dict.fromkeys(caches, 1.0), [note]


def by_placeholder(model: LoadedModel, scales: Mapping[str, float]) -> dict[str, float]:
    """Return the scales by the placeholders of caches.

    Raises:
        UserError: The model has a cache without one.
    """
    assert model.cache is not None
    missing = [pair.input for pair in model.cache.pairs if pair.input not in scales]
    if missing:
        raise UserError(str(model.path), "has a cache without a scale", got=first_few(missing))
    return {placeholder: scales[name] for placeholder, name in model.input_names.items() if name in scales}


def measure_scales(model: LoadedModel, text: Path, device: torch.device) -> dict[str, float]:
    """Return scales by which the largest keys and values that a model computes of a text become half of E4M3's largest.

    They are 1 where all are 0. See `choose_scales`.
    """
    program = model.program if device.type == "cpu" else on_device(model.program, device, {})
    inputs = program_inputs(model.program, model.input_names)
    ids_alone = replace(inputs, specs=[spec for spec in inputs.specs if spec.name == INPUT_IDS])
    samples = read_text(text, model.path, model.language_model, Limits(ids_alone, None, model.vocabulary)).samples
    places: dict[str, list[str]] = {}
    for node in program.graph.find_nodes(op="call_function", target=APPEND):
        for cache, new in zip(node.args[:2], node.args[2:4], strict=True):
            places.setdefault(new.name, []).append(model.input_names[cache.name])
    largest = dict.fromkeys(itertools.chain.from_iterable(places.values()), 0.0)

    def visit(name: str, value: Any) -> Any:
        for cache in places.get(name, ()):
            found = float(value.abs().amax())
            if not math.isfinite(found):
                what = "the model computes keys or values of it that are not finite"
                raise UserError(f"--text {text}", what, got=f"{found} in {cache}")
            largest[cache] = max(largest[cache], found)
        return value

    runner = Runner(program)
    with torch.no_grad():
        for sample in samples:
            runner(_call(model, sample[INPUT_IDS]), visit)
    return {cache: _scale(found) for cache, found in largest.items()}


def _scale(largest: float) -> float:
    return _ROOM * largest / LARGEST if largest > 0 else 1.0


def _call(model: LoadedModel, ids: Tensor) -> dict[str, Tensor]:
    """Return the inputs of a program with a cache, by placeholder, for tokens [1, tokens] at its first places."""
    assert model.cache is not None
    tokens, count = ids.shape[1], torch.tensor([ids.shape[1]])
    given = {INPUT_IDS: ids, WRITE_INDEX: torch.zeros_like(count), TOKEN_COUNT: count}
    found = {}
    shapes = {pair.input: pair.shape for pair in model.cache.pairs}
    for spec in program_inputs(model.program, model.input_names).specs:
        if spec.name in shapes:
            _, heads, length, width = shapes[spec.name]
            length = length if isinstance(spec.shape[2], int) else max(tokens, 2)
            given[spec.name] = torch.zeros(1, heads, length, width, dtype=spec.dtype)
        elif spec.name == LOGIT_PLACES:
            given[spec.name] = torch.tensor([[tokens - 1]])
    for placeholder, name in model.input_names.items():
        found[placeholder] = given[name]
    return found
