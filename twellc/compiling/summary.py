"""What is known of a translated model, also once its graph is in a file. Importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from twellc.base.caches import KeyValueCache
from twellc.compiling.settings import Settings
from twellc.export.shapes import ShapeProfile
from twellc.passes.report import Attention, Layer, Linear
from twellc.passes.sizes.relations import SizeRelation


@dataclass(frozen=True)
class GraphFiles:
    """A graph that was written.

    Attributes:
        files: Names of the files: the graph, and its weights where they stand apart.
        digest: SHA-256 of these files.
    """

    files: list[str]
    digest: str


@dataclass(frozen=True, kw_only=True)
class Translated:
    """What is known of a model that was rewritten and translated to ONNX.

    Attributes:
        settings: The settings that decide what the graph is.
        layers: What became of each feed-forward block.
        attention: What became of each attention block.
        linear: What became of linear layers outside of the blocks.
        notes: What the user should know.
        warnings: What the user should worry about.
        cache: The key-value cache; None of a model without one.
        profiles: The optimization profiles.
        relations: What a caller must keep of sizes of inputs.
    """

    settings: Settings
    layers: list[Layer]
    attention: list[Attention] = field(default_factory=list)
    linear: list[Linear] = field(default_factory=list)
    notes: list[str]
    warnings: list[str]
    cache: KeyValueCache | None = None
    profiles: list[ShapeProfile]
    relations: list[SizeRelation] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class TranslationSummary(Translated):
    """What is left of a translation once the graph is in a file.

    Attributes:
        model: Name, kind and SHA-256 of the model.
        graphs: The graph; one for each rank if there are several.
        plugins: Names of the plugins that the graph has nodes for.
        external_data: The files beside an ONNX model that hold its weights.
    """

    model: dict[str, str]
    graphs: list[GraphFiles]
    plugins: list[str]
    external_data: list[Path]
