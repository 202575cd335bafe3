"""A translated model, and what its graph notes of the translation."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import onnx
import onnx_ir

from twellc.base.errors import UserError, first_few
from twellc.base.records import of_json, parse_json
from twellc.base.version import __version__
from twellc.compiling.settings import Settings
from twellc.compiling.summary import Translated
from twellc.options.commands import CompileOptions
from twellc.passes.report import Layer

METADATA_KEY = "twellc"


@dataclass(frozen=True, kw_only=True)
class Translation(Translated):
    """A model rewritten and translated to ONNX, in memory.

    Attributes:
        kind: The kind of model.
        graph: The graph.
    """

    kind: str
    graph: onnx_ir.Model


def annotate(graph: onnx_ir.Model, layers: list[Layer], settings: Settings) -> None:
    """Write into a graph what was done: what became of each feed-forward block, by which settings."""
    done = {"twellc": __version__, "settings": settings.to_json(), "layers": [_noted(layer) for layer in layers]}
    graph.metadata_props[METADATA_KEY] = json.dumps(done)


def noted_settings(model: onnx.ModelProto) -> Settings | None:
    """Return the settings that a graph notes; None where it notes none, or not in the form of `annotate`."""
    try:
        return of_json(Settings, _notes(model)["settings"])
    except (KeyError, TypeError, ValueError):
        return None


def noted_layers(model: onnx.ModelProto) -> list[Layer]:
    """Return what became of feed-forward blocks as a graph notes it; see `noted_settings`."""
    try:
        return [of_json(Layer, layer) for layer in _notes(model)["layers"]]
    except (KeyError, TypeError, ValueError):
        return []


def _notes(model: onnx.ModelProto) -> Any:
    return parse_json({entry.key: entry.value for entry in model.metadata_props}[METADATA_KEY])


def _noted(layer: Layer) -> dict[str, Any]:
    """Return what a graph says of a layer: nothing of what changes no graph, such as what is expected on a GPU."""
    neurons = layer.neurons and replace(layer.neurons, lost=None, lost_of=None)
    return asdict(replace(layer, neurons=neurons, expectation=None, short_run=None))


def check_matches(layers: list[Layer], options: CompileOptions, *, has_calls: bool = False) -> list[str]:
    """Return the warnings about blocks that did not match; `has_calls` says that the model calls ops of plugins itself.

    Raises:
        UserError: There are some, and `strict` is set.
    """
    refused = [layer for layer in layers if not layer.matched]
    warnings = []
    if not has_calls and not any(layer.matched for layer in layers):
        warnings.append("no feed-forward block can be rewritten: the plan is dense throughout")
    warnings += [f"layer {layer.module}: {layer.reason}. Left dense" for layer in refused]
    if warnings and options.strict:
        raise UserError(
            str(options.model), first_few(warnings, "; "), fix="--strict was given; without it such blocks stay dense."
        )
    return warnings
