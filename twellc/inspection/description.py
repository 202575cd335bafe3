"""What `twellc inspect` shows. Importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from twellc.base.records import OPTIONAL, Json, Record
from twellc.compiling.manifest import Manifest
from twellc.inspection.flops import CostTable
from twellc.inspection.kernels import KernelTable
from twellc.passes.report import Attention, Layer, Linear


@dataclass(frozen=True)
class PluginNode(Record):
    """A `twell` node of a rewritten ONNX file.

    Attributes:
        name: Its name.
        type: The plugin.
        dtype: Element type of its weights; None where they are not constants.
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
        linear: What becomes of linear layers outside of the blocks; None likewise.
        nodes: The `twell` nodes of a rewritten ONNX file; None of anything else.
        manifest: The manifest of a plan; None of anything else.
    """

    kind: str
    layers: list[Layer]
    notes: list[str]
    dtype: str | None = field(default=None, metadata=OPTIONAL)
    attention: list[Attention] | None = field(default=None, metadata=OPTIONAL)
    linear: list[Linear] | None = field(default=None, metadata=OPTIONAL)
    nodes: list[PluginNode] | None = field(default=None, metadata=OPTIONAL)
    manifest: Manifest | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True)
class Inspection(Record):
    """What `twellc inspect` found.

    Attributes:
        description: What is known of the model or plan.
        cost: Operations and bytes of one call.
        kernels: Which kernels compute the blocks in one call.
    """

    description: Description
    cost: CostTable
    kernels: KernelTable

    @property
    def layers(self) -> list[Layer]:
        """What becomes, or became, of each feed-forward block."""
        return self.description.layers

    def to_json(self) -> dict[str, Json]:
        """Return everything as JSON types in one object; of a plan with what its manifest holds."""
        manifest = self.description.manifest
        if manifest is None:
            found = self.description.to_json()
        else:
            found = {"kind": self.description.kind, **manifest.to_json()}
        return {**found, "cost": self.cost.to_json(), "kernels": self.kernels.to_json()}
