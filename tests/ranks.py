"""Run the programs of all ranks in one process: a thread each, which wait for each other where they reduce."""

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from tests.processes import at_once
from twellc.plugins.all_reduce_op import ALL_REDUCE

_PATIENCE = 60  # seconds


class _Rank(Interpreter):
    def __init__(self, module: GraphModule, rank: int, others: list[Tensor | None], barrier: threading.Barrier) -> None:
        super().__init__(module)
        self._rank, self._parts, self._barrier = rank, others, barrier

    def run_node(self, node: Node) -> Any:
        if node.target is not ALL_REDUCE:
            return super().run_node(node)
        own, ranks = self.map_nodes_to_values(node.args, node)
        assert isinstance(own, Tensor)
        self._parts[self._rank] = own
        assert ranks == len(self._parts)
        self._barrier.wait(_PATIENCE)
        total = sum(part for part in self._parts if part is not None)
        self._barrier.wait(_PATIENCE)
        return total


def run_ranks(programs: Sequence[ExportedProgram], *inputs: Tensor) -> list[list[Tensor]]:
    barrier = threading.Barrier(len(programs))
    parts: list[Tensor | None] = [None] * len(programs)
    outputs: list[list[Tensor]] = [[] for _ in programs]
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        module = programs[rank].module(check_guards=False)
        assert isinstance(module, GraphModule)
        try:
            with torch.no_grad():
                outputs[rank] = pytree.tree_leaves(_Rank(module, rank, parts, barrier).run(*inputs))
        except BaseException as error:  # the others must not wait
            errors.append(error)
            barrier.abort()

    at_once(run, len(programs))
    if errors:
        raise errors[0]
    return outputs
