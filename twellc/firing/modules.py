"""Run a language model of transformers as it is, and count which neurons of its blocks and experts fire.

Mixtures of experts are counted so. A traced program does not say which row of its grouped products is which token, and
models with Mamba layers are traced for one length alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from twellc.base.arrays import to_numpy
from twellc.base.transformers_private import experts_computed_by
from twellc.eager.experts import expert_blocks, hidden_of, up_of
from twellc.eager.module_blocks import find_blocks, operands_of
from twellc.firing.counter import FiringCounter, position_bins, refuse_nan
from twellc.passes.block_profile import BlockProfile
from twellc.passes.match.find_ffn import FfnBlock
from twellc.samples.samples import Sample

IDS, MASK = "input_ids", "attention_mask"


@dataclass(frozen=True)
class CountedBlock:
    """A feed-forward block of a model whose modules run one by one.

    Attributes:
        block: What the matcher found.
        layer: Path of the linear layer whose output the activation decides by; of experts, that of their module.
        columns: Which columns of that output they are; None for all.
        experts: How many experts it is; 0 of a block that all tokens go through.
    """

    block: FfnBlock
    layer: str
    columns: slice | None = None
    experts: int = 0


def counted_blocks(model: nn.Module) -> tuple[list[CountedBlock], list[str]]:
    """Return the blocks and the experts of a model that are counted, and why others are not.

    Args:
        model: A model of transformers; its tensors may be on torch's device `meta`.
    """
    counted: list[CountedBlock] = []
    reasons: list[str] = []
    for found in find_blocks(model, ranks=(3,)):
        weights = found.weights or operands_of(found.module, found.block)
        named = weights.named() if weights else {}
        first = named.get("w_gate") or named.get("w_up")
        refusal = found.block.refusal
        if refusal or first is None or found.block.thresholds is not None:
            reasons.append(f"{found.block.module}: {refusal or 'its weights or thresholds are computed'}")
            continue
        columns = None if first.rows is None else slice(*first.rows)
        counted.append(CountedBlock(found.block, ".".join(filter(None, (found.path, first.layer))), columns))
    for path, experts, block in expert_blocks(model):
        if isinstance(block, str):
            reasons.append(f"{path}: {block}")
        else:
            counted.append(CountedBlock(block, path, experts=experts.num_experts))
    order = {path: place for place, (path, _) in enumerate(model.named_modules())}
    return sorted(counted, key=lambda each: order[each.layer]), reasons


class ModuleObserver:
    """Runs a language model of transformers, and counts.

    Attributes:
        tokens: How many tokens it has seen, without padding.
    """

    def __init__(self, model: Any, blocks: list[CountedBlock], device: torch.device) -> None:
        """Prepare to run.

        Args:
            model: The model; it takes `input_ids` and, if a batch has one, `attention_mask`.
            blocks: Its blocks, of `counted_blocks`.
            device: Where it runs.
        """
        self.tokens = 0
        self._model, self._device = model, device
        self._counters: dict[str, FiringCounter] = {}
        self._experts: dict[str, Tensor] = {}
        self._rows: Tensor | None = None
        self._bins = torch.empty(0, dtype=torch.int64)
        self._blocks = {each.layer: each for each in blocks}
        for path, each in self._blocks.items():
            block = each.block
            self._counters[path] = FiringCounter(
                block.module, block.variant, block.activation, block.threshold, block.d_ff, device
            )
            if each.experts:
                self._experts[path] = torch.zeros((each.experts, 2), dtype=torch.int64, device=device)

    def run(self, inputs: Sample, counted: dict[str, Tensor], where: str) -> None:
        """Run the model on a batch, and count.

        Args:
            inputs: The inputs, on the CPU.
            counted: See `Batch`.
            where: What to call the data in a message.

        Raises:
            UserError: An activation is NaN.
        """
        mask = counted.get(IDS, torch.ones_like(inputs[IDS], dtype=torch.bool))
        self._rows = mask.flatten().to(self._device)
        self._bins = position_bins((mask.cumsum(1) - 1).clamp(min=0).flatten()).to(self._device)
        with torch.no_grad(), self._observed():
            self._model(**{name: each.to(self._device) for name, each in inputs.items()}, use_cache=False)
        self.tokens += int(mask.sum())
        refuse_nan(self._counters.values(), where)

    def profiles(self) -> list[BlockProfile]:
        """Return what was counted, by block; blocks that saw no token are left out."""
        found = []
        for path, counter in self._counters.items():
            experts = self._experts.get(path)
            if int(counter.tokens):
                counts = None if experts is None else to_numpy(experts).copy()
                found.append(replace(counter.profile(), experts=counts))
        return found

    @contextmanager
    def _observed(self) -> Iterator[None]:
        handles = [
            self._model.get_submodule(path).register_forward_hook(self._hook(each))
            for path, each in self._blocks.items()
            if not each.experts
        ]
        of_module = {self._model.get_submodule(path): path for path in self._experts}

        def compute(module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            return self._compute(of_module.get(module), module, x, ids, weights)

        try:
            with experts_computed_by(self._model, compute):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, each: CountedBlock) -> Any:
        def count(_: nn.Module, __: Any, z: Tensor) -> None:
            z = z if each.columns is None else z[..., each.columns]
            self._count(each.layer, z.reshape(-1, z.shape[-1]), None)

        return count

    def _count(self, path: str, z: Tensor, tokens: Tensor | None) -> Tensor:
        """Count rows of z [rows, d_ff], which are all places or those of `tokens`; return which are no padding."""
        assert self._rows is not None
        rows, bins = (each if tokens is None else each[tokens] for each in (self._rows, self._bins))
        self._counters[path].add(z[rows], bins[rows])
        return rows

    def _compute(self, path: str | None, experts: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Compute experts one after the other, as the modules of transformers do by themselves, and count.

        Args:
            path: Their path; None of experts that are not counted.
            experts: Their module.
            x: [tokens, d_model].
            ids: The experts of each token, [tokens, k]; a number that is not one of an expert stands for none.
            weights: The factor of each, [tokens, k].
        """
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        up = up_of(experts)
        up_bias = experts.gate_up_proj_bias if experts.has_gate and experts.has_bias else None
        up_bias = experts.up_proj_bias if experts.has_bias and not experts.has_gate else up_bias

        def project(x: Tensor, matrices: Tensor, biases: Tensor | None, index: int) -> Tensor:
            matrix = matrices[index].t() if experts.is_transposed else matrices[index]
            return nn.functional.linear(x, matrix, None if biases is None else biases[index])

        for index in torch.unique(ids).tolist():
            if not 0 <= index < experts.num_experts:
                continue
            tokens, places = (ids == index).nonzero(as_tuple=True)
            z = project(x[tokens], up, up_bias, index)
            if path is not None:
                self._count_expert(path, index, _gate(experts, z), tokens)
            out = project(hidden_of(experts, z), experts.down_proj, getattr(experts, "down_proj_bias", None), index)
            if getattr(experts, "has_post_expert_norm", False):
                out = experts.post_expert_norm(out)
            y.index_add_(0, tokens, (out * weights[tokens, places, None]).float())
        return y.to(x.dtype)

    def _count_expert(self, path: str, index: int, z: Tensor, tokens: Tensor) -> None:
        fired = self._counters[path].counts["firing"].sum()
        rows = self._count(path, z, tokens)
        after = self._counters[path].counts["firing"].sum()
        self._experts[path][index] += torch.stack([rows.sum(), after - fired])


def _gate(experts: Any, z: Tensor) -> Tensor:
    """Return what the activation of experts decides by, of their first product [rows, d_ff] or [rows, 2 d_ff]."""
    if not experts.has_gate:
        return z
    return z.chunk(2, dim=-1)[0] if experts.is_concatenated else z[..., ::2]
