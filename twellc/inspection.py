"""What `twellc inspect` shows of a model or a plan. Importing this imports no torch, and a plan needs none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from twellc.config import InspectOptions, refuse_dtype
from twellc.cost import CostTable, count_costs
from twellc.errors import UserError
from twellc.files import uninterrupted
from twellc.inputs import refuse_inputs
from twellc.loaders.onnx_format import looks_like_onnx
from twellc.manifest import Manifest, is_plan, read_manifest
from twellc.passes.report import Attention, Layer
from twellc.records import OPTIONAL, Json, Record


@dataclass(frozen=True)
class PluginNode(Record):
    """A `twell` node of a rewritten ONNX file.

    Attributes:
        name: Its name.
        type: The plugin.
        dtype: Element type of its weights; None where they are no constants.
        inputs: Names of its inputs.
        outputs: Names of its outputs.
        weights: Shapes of its weights by name.
        fields: The plugin's fields by name.
    """

    name: str
    type: str
    dtype: str | None
    inputs: list[str]
    outputs: list[str]
    weights: dict[str, list[int]]
    fields: dict[str, Json]


@dataclass(frozen=True)
class Description(Record):
    """What is known of a model or a plan.

    Attributes:
        kind: `plan`, `rewritten ONNX file`, or the kind of model.
        layers: What becomes, or became, of each feed-forward block.
        notes: What the user should know.
        dtype: The precision that a model is judged in; None where a rewritten file does not say it.
        attention: What becomes of each attention block; None of an ONNX file, where attention stays as it is.
        nodes: The `twell` nodes of a rewritten ONNX file; None of anything else.
        manifest: The manifest of a plan; None of anything else.
    """

    kind: str
    layers: list[Layer]
    notes: list[str]
    dtype: str | None = field(default=None, metadata=OPTIONAL)
    attention: list[Attention] | None = field(default=None, metadata=OPTIONAL)
    nodes: list[PluginNode] | None = field(default=None, metadata=OPTIONAL)
    manifest: Manifest | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True)
class Inspection(Record):
    """What `twellc inspect` found.

    Attributes:
        description: What is known of the model or plan.
        cost: Operations and bytes of one call.
    """

    description: Description
    cost: CostTable

    @property
    def layers(self) -> list[Layer]:
        """What becomes, or became, of each feed-forward block."""
        return self.description.layers

    def to_json(self) -> dict[str, Json]:
        """Return everything as JSON types in one object; of a plan with what its manifest holds."""
        manifest = self.description.manifest
        if manifest is None:
            return {**self.description.to_json(), "cost": self.cost.to_json()}
        return {"kind": self.description.kind, **manifest.to_json(), "cost": self.cost.to_json()}


def inspect_model(options: InspectOptions, progress: Callable[[str], None]) -> Inspection:
    """Return what is known of a model or a plan, and what its blocks cost.

    Args:
        options: See `InspectOptions`.
        progress: Receives the name of each step.

    Raises:
        UserError: It is neither a model nor a plan, or not one that `dtype` or `inputs` are for.
    """
    found = _describe(options, progress)
    if options.in_memory:
        found = replace(found, kind=options.in_memory)
    return Inspection(found, count_costs(found.layers, options.tokens, options.density))


def _describe(options: InspectOptions, progress: Callable[[str], None]) -> Description:
    target = options.target
    if not target.exists():
        raise UserError(str(target), "there is no such file or folder", expected="a model or a plan")
    if not looks_like_onnx(target) and is_plan(target):
        refuse_inputs(options.inputs, f"{target}, a plan")
        refuse_dtype(options.dtype, f"{target}, a plan")
        progress("reading the manifest")
        manifest = read_manifest(target)
        return Description("plan", manifest.layers, manifest.notes, attention=manifest.attention, manifest=manifest)
    with uninterrupted():  # native modules do not survive an interrupt while they are imported
        from twellc.model_inspection import describe_model

    return describe_model(options, progress)
