"""A plan of `twellc compile --kv-cache`, which keeps its keys and values in memory of the host's.

Each cache is an input and an output of the plan, both bound to one address: the plan writes it in place. What is bound
where is `PlanCalls`' business; what is computed when, `PlanBackend`'s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from twellc.base.caches import (
    ALL,
    ASKED,
    CACHE_TYPES,
    GREEDY,
    INPUT_IDS,
    LOGIT_PLACES,
    TOKEN_COUNT,
    WRITE_INDEX,
    KeyValueCache,
)
from twellc.base.devices import choose_device
from twellc.base.dtypes import BY_NAME
from twellc.base.errors import UserError
from twellc.compiling.manifest import Manifest, read_manifest, refuse_other_plugins
from twellc.export.runner import Execution, OpenPlan, open_plan, prepare
from twellc.export.tensorrt_host import load_host, why_not_here
from twellc.generation.backend import places_for


class PlanCalls(Protocol):
    """What runs a plan.

    Attributes:
        device: Where its tensors are.
    """

    device: torch.device

    def bind(self, caches: dict[str, Tensor]) -> None:
        """Take the caches, by the names of inputs and by those of outputs: each tensor has two names."""

    def run(self, inputs: dict[str, Tensor]) -> Tensor:
        """Run the plan for these inputs; return its output, the next call's to keep."""


class PlanBackend:
    """A plan as a `Backend`."""

    def __init__(self, name: str, cache: KeyValueCache, calls: PlanCalls, growing: bool = False) -> None:
        """Take a plan.

        Args:
            name: What computes, for people.
            cache: What its manifest says of the cache.
            calls: What runs it.
            growing: Whether caches have as many places as are needed, and not always all that they may have.
        """
        self.name, self.device, self.vocabulary = name, calls.device, cache.vocabulary
        self.longest, self.chunk = cache.length, cache.prefill_chunk
        self.largest_batch: int | None = cache.batch
        self.chooses, self.scores_prompts = cache.logits == GREEDY, cache.logits in (ALL, ASKED)
        # For each new size of a call TensorRT and cuDNN prepare themselves.
        self._pads = cache.logits != ASKED or calls.device.type == "cuda"
        self._cache, self._calls, self._growing = cache, calls, growing
        self._rows = self._places = 0
        self._memory: list[Tensor] = []
        self._ones = self._first = torch.empty(0)

    def begin(self, batch: int, places: int) -> bool:
        """Make room; see `Backend`."""
        if batch == self._rows and places <= self._places:
            for memory in self._memory:
                memory.zero_()  # a NaN at a place that no query sees would reach its result
            return False
        self._rows = 0  # none, if memory ends midway
        self._memory.clear()
        self._places = places_for(places, self.longest) if self._growing else self.longest
        dtype = BY_NAME[CACHE_TYPES.get(self._cache.dtype, self._cache.dtype)].torch
        caches: dict[str, Tensor] = {}
        self._calls.bind(caches)  # and give back the memory of the others, before there are new ones
        for pair in self._cache.pairs:
            _, heads, _, width = pair.shape
            memory = torch.zeros(batch, heads, self._places, width, dtype=dtype, device=self.device)
            caches |= {pair.input: memory, pair.output: memory}
            self._memory.append(memory)
        self._calls.bind(caches)
        self._ones = torch.ones(batch, dtype=torch.int64, device=self.device)
        self._first = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)
        self._rows = batch
        return True

    def fill(self, input_ids: Tensor, start: int, every: bool = False) -> Tensor:
        """Compute the first tokens of rows; see `Backend`."""
        tokens = input_ids.shape[1]
        if self._pads:
            padding = min(_size(tokens), self.chunk, self.longest - start) - tokens
            input_ids = torch.nn.functional.pad(input_ids, (0, padding))
        return self._run(input_ids, start * self._ones, tokens, every)

    def decode(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Compute a token of each row; see `Backend`."""
        return self._run(tokens[:, None], places, 1)

    def _run(self, input_ids: Tensor, starts: Tensor, real: int, every: bool = False) -> Tensor:
        """Run the plan for tokens of which each row has `real` before its padding.

        Return what is behind these; with `every` behind each of them.
        """
        counts = self._ones if real == 1 else real * self._ones
        inputs = {INPUT_IDS: input_ids, WRITE_INDEX: starts, TOKEN_COUNT: counts}
        logits = self._cache.logits
        if logits == ASKED:
            if every:
                places = torch.arange(real, device=self.device).expand(len(input_ids), -1)
                return self._calls.run({**inputs, LOGIT_PLACES: places})
            last = self._first if real == 1 else self._first + (real - 1)
            return self._calls.run({**inputs, LOGIT_PLACES: last})[:, 0]
        found = self._calls.run(inputs)
        if every:
            return found[:, :real]
        return found[:, real - 1] if logits == ALL else found


def _size(tokens: int) -> int:
    """Return the next of few sizes, four in an octave."""
    step = max(4, 1 << max((tokens - 1).bit_length() - 3, 0))
    return max(16, -(-tokens // step) * step)


class TensorRTCalls:
    """Runs a plan in TensorRT: one context for the first tokens of rows and one for the others, see `PlanCalls`."""

    def __init__(self, plan: OpenPlan, manifest: Manifest) -> None:
        self.device = plan.device
        self._plan = plan
        assert manifest.cache is not None
        self._largest, self._output = [profile[INPUT_IDS].max for profile in manifest.profiles], manifest.cache.output
        self._executions: dict[bool, Execution] = {}
        self._caches: dict[str, Tensor] = {}

    def bind(self, caches: dict[str, Tensor]) -> None:
        """Take the caches; see `PlanCalls`."""
        self._caches = caches
        self._executions.clear()

    def run(self, inputs: dict[str, Tensor]) -> Tensor:
        """Run the plan; see `PlanCalls`."""
        with torch.cuda.device(self.device):
            return self._run(inputs)

    def _run(self, inputs: dict[str, Tensor]) -> Tensor:
        rows, tokens = inputs[INPUT_IDS].shape
        decodes = tokens == 1
        execution = self._executions.pop(decodes, None)  # gone where this fails midway
        if execution is None:
            profile = profile_for(rows, tokens, self._largest)
            execution = prepare(self._plan, {**inputs, **self._caches}, profile, self._caches)
        elif any(not _same(execution.tensors[name], tensor) for name, tensor in inputs.items()):
            found = execution.tensors[self._output]
            fits = len(found) == len(inputs[INPUT_IDS]) and found.dim() < 3
            execution.bind({**inputs, **self._caches}, {**self._caches, **({self._output: found} if fits else {})})
        self._executions[decodes] = execution
        execution.enqueue()
        return execution.tensors[self._output]


def profile_for(rows: int, tokens: int, largest: list[tuple[int, ...]]) -> int:
    """Return the narrowest optimization profile that takes such a call, by the largest shapes that each takes."""
    sizes = [(width, batch, index) for index, (batch, width) in enumerate(largest)]
    return min(each for each in sizes if tokens <= each[0] and rows <= each[1])[2]


def _same(bound: Tensor, tensor: Tensor) -> bool:
    return bound.data_ptr() == tensor.data_ptr() and bound.shape == tensor.shape


def load_plan(path: Path, device: str | torch.device | None = "auto") -> tuple[PlanBackend, KeyValueCache]:
    """Open a plan; return it, and what its manifest says of its cache.

    Args:
        path: The plan.
        device: The GPU that it is to run on: `cuda` or `cuda:N`; `auto` and None are torch's current one.

    Raises:
        UserError: It has no cache, the device is not a GPU, or this machine cannot run it.
    """
    manifest = read_manifest(path)
    if manifest.cache is None:
        what = "has no key-value cache, so it can score a text and not answer"
        raise UserError(str(path), what, fix="Compile a causal language model with --kv-cache LENGTH.")
    chosen = torch.device("cuda") if device in (None, "auto") else choose_device(device)
    if chosen.type != "cuda":
        raise UserError(f"--device {device}", "a plan runs on a GPU", expected="auto, cuda or cuda:N")
    assert manifest.backend is not None  # of every plan
    why = why_not_here(manifest.backend.name)
    if why:
        raise UserError(
            str(path), f"the plan cannot run here: {why}", fix="Give the model's directory, which runs in torch."
        )
    refuse_other_plugins(path, manifest)
    host = load_host(manifest.backend.name)
    plan = open_plan(host, path, manifest.backend.version, manifest.relations, chosen)
    name = f"{host.name} {host.version} on {torch.cuda.get_device_name(plan.device)}"
    return PlanBackend(name, manifest.cache, TensorRTCalls(plan, manifest)), manifest.cache
