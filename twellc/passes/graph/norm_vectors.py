"""Weights and biases of norms as `twell` ops read them: vectors [features] in the type of x, as parameters."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from twellc.passes.graph.constants import ProgramConstants
from twellc.passes.graph.program import add_parameter


class NormVectors:
    """Those of a program that is rewritten. What is computed from others, as Gemma's 1 + w, is rounded once."""

    def __init__(self, program: ExportedProgram) -> None:
        self._program, self._constants = program, ProgramConstants(program)
        self._nodes: dict[str, Node] = {node.name: node for node in program.graph.nodes}
        self._made: dict[tuple[str, torch.dtype], Node] = {}

    def placeholder(self, node: Node | None, dtype: torch.dtype) -> Node | None:
        """Return the placeholder of a weight or bias of a `Norm`, which was found before the program was copied."""
        if node is None:
            return None
        known = self._nodes[node.name]
        if known.op == "placeholder" and known.meta["val"].dim() == 1 and known.meta["val"].dtype == dtype:
            return known
        if (node.name, dtype) not in self._made:
            value = self._constants.value(known).reshape(-1).to(dtype)
            like = next(iter(self._constants.names))
            self._made[node.name, dtype] = add_parameter(self._program, f"{node.name}_of_norm", value, like=like)
        return self._made[node.name, dtype]
