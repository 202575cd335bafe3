"""Whether a candidate with a key-value cache generates as its model does.

The candidate reads prompts of unequal lengths, in chunks, and goes on greedily by its own choices. The model, which has
no cache, then computes the whole texts at once: behind a token it gives what the candidate gave in that step, since the
text before is the same. So a step is measured by itself, also behind one in which the candidate chose another token
than float64 would have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch
from torch import Tensor

from twellc.base.arrays import Array
from twellc.base.caches import INPUT_IDS, TOKEN_COUNT, WRITE_INDEX
from twellc.base.dtypes import BY_ONNX
from twellc.base.errors import UserError
from twellc.base.records import Amount, Count, Record, Share
from twellc.checks.accuracy import measure
from twellc.compiling.manifest import Manifest
from twellc.compiling.settings import CacheSettings
from twellc.export.runner import OpenPlan
from twellc.generation.plan import PlanBackend, TensorRTCalls

STEPS = 32  # of a token each, behind the prompts
_ROWS, _LONGEST_PROMPT = 3, 48

# Computes logits, of each row or of each token, of input_ids, write_index and token_count.
Call = Callable[[Tensor, Tensor, Tensor], Tensor]
Outputs = list[Tensor]


@dataclass(frozen=True)
class Steps:
    """What runs a candidate step by step.

    Attributes:
        vocabulary: How many logits it computes.
        start: Returns the call for a number of rows, whose caches are empty.
        largest: The most rows that each of a plan's optimization profiles for single tokens takes, in rising order;
            empty for a graph.
    """

    vocabulary: int
    start: Callable[[int], Call]
    largest: Sequence[int] = ()

    def other_sizes(self, rows: int) -> list[int]:
        """Return numbers of rows for the profiles for single tokens that this number of rows does not use."""
        least = [1, *(size + 1 for size in self.largest)]
        return [least[i] for i, most in enumerate(self.largest) if not least[i] <= rows <= most]


@dataclass(frozen=True)
class StepAccuracy(Record):
    """How accurate the logits of a step are; the first step is that of the prompts.

    Attributes:
        error, plain_error: Relative error against float64, of the candidate and of the plain low-precision model.
        agreement, plain_agreement: Share of the sequences whose largest logit is that of float64.
    """

    error: Amount
    plain_error: Amount
    agreement: Share
    plain_agreement: Share


@dataclass(frozen=True)
class GenerationAccuracy(Record):
    """How accurately a candidate with a key-value cache generates.

    Attributes:
        prompts: How many tokens each prompt has; the longest one comes again for each other profile of a plan.
        steps: The steps.
        first_difference: The first step in which a sequence goes on with another token than float64 would, from 0 on;
            None without one.
        plain_first_difference: The first in which the plain low-precision model would.
    """

    prompts: list[Count]
    steps: list[StepAccuracy]
    first_difference: Count | None
    plain_first_difference: Count | None


@dataclass(frozen=True)
class Generated:
    """What a candidate has made of prompts.

    Attributes:
        ids: Prompts and what follows, padded on the right, [rows, tokens].
        prompts: How many tokens each prompt has.
        logits: Those that it chose each token by, [steps, rows, vocabulary].
    """

    ids: Tensor
    prompts: list[int]
    logits: Tensor

    @classmethod
    def joined(cls, parts: list[Generated]) -> Generated:
        """Return the rows of several, which are all of one length."""
        prompts = [count for part in parts for count in part.prompts]
        return cls(torch.cat([part.ids for part in parts]), prompts, torch.cat([part.logits for part in parts], 1))

    def first_row(self) -> Generated:
        """Return the first row alone."""
        return Generated(self.ids[:1], self.prompts[:1], self.logits[:, :1])

    def of_model(self, outputs: Outputs) -> Tensor:
        """Return the same of what a model without a cache computes for the texts, [rows, tokens, vocabulary]."""
        every, count = outputs[0], len(self.logits)
        return torch.stack([every[row, end - 1 : end - 1 + count] for row, end in enumerate(self.prompts)], 1)

    def accuracy(self, plain: Tensor, truth: Tensor) -> GenerationAccuracy:
        """Measure each step; `plain` and `truth` are as `logits`."""
        steps, choices = [], [each.argmax(-1) for each in (self.logits, plain, truth)]
        for logits in zip(self.logits, plain, truth, strict=True):
            found = measure("logits", *logits, language_model=True)
            assert found.top1 is not None
            assert found.plain_top1 is not None
            errors = found.candidate.relative, found.plain.relative
            steps.append(StepAccuracy(*errors, found.top1, found.plain_top1))
        differences = [_first(each != choices[2]) for each in choices[:2]]
        return GenerationAccuracy(self.prompts, steps, *differences)


def _first(differs: Tensor) -> int | None:
    """Return the first step of [steps, rows] in which a row differs."""
    found = differs.any(-1).nonzero().flatten().tolist()
    return found[0] if found else None


# ---- prompts ----


def prompt_lengths(cache: CacheSettings, most: int | None = None) -> list[int]:
    """Return how many tokens the prompts have: of several sequences unequal numbers, and one in several chunks.

    Args:
        cache: The sizes of the cache.
        most: How many tokens of text there are; None where there are any number.
    """
    steps = min(STEPS, cache.length // 2)
    longest = min(cache.length - steps, max(_LONGEST_PROMPT, min(2 * cache.prefill_chunk, 2 * _LONGEST_PROMPT)))
    longest = max(1, longest if most is None else min(longest, most))
    return [longest, max(1, longest // 2), 1][: min(cache.batch, _ROWS)]


def read_prompts(where: str, arrays: dict[str, Array], cache: CacheSettings, vocabulary: int) -> list[list[int]]:
    """Return the prompts that the user gave as arrays: `input_ids` [rows, tokens] and maybe `token_count` [rows].

    Raises:
        UserError: They are not such prompts, or do not fit into the cache.
    """
    ids = arrays.get(INPUT_IDS)
    if ids is None or ids.ndim != 2 or ids.dtype.kind not in "iu" or not ids.size:
        raise UserError(where, f"holds no {INPUT_IDS}", expected=f"prompts as integers [rows, tokens] in {INPUT_IDS}")
    unknown = sorted(arrays.keys() - {INPUT_IDS, TOKEN_COUNT})
    if unknown:
        what, got = f"has an array {unknown[0]}, which is not a part of prompts", ", ".join(sorted(arrays))
        expected = f"{INPUT_IDS}, and {TOKEN_COUNT} if they are padded: caches start empty"
        raise UserError(where, what, got=got, expected=expected)
    counts = [ids.shape[1]] * len(ids)
    if TOKEN_COUNT in arrays:
        counts = arrays[TOKEN_COUNT].flatten().tolist()
    if len(counts) != len(ids) or not all(type(each) is int and 1 <= each <= ids.shape[1] for each in counts):
        expected = f"{len(ids)} numbers from 1 to {ids.shape[1]}"
        raise UserError(where, f"{TOKEN_COUNT} does not fit {INPUT_IDS}", got=str(counts)[:60], expected=expected)
    if len(ids) > cache.batch or max(counts) >= cache.length:
        got = f"{len(ids)} of up to {max(counts)} tokens"
        expected = f"at most {cache.batch}, of at most {cache.length - 1} tokens"
        raise UserError(where, "the prompts do not fit into the cache", got=got, expected=expected)
    prompts = [row[:count].tolist() for row, count in zip(ids, counts, strict=True)]
    if not all(0 <= each < vocabulary for prompt in prompts for each in prompt):
        raise UserError(where, "holds ids that are not tokens", expected=f"0 to {vocabulary - 1}")
    return prompts


# ---- running ----


def generate(steps: Steps, prompts: list[list[int]], cache: CacheSettings) -> Generated:
    """Feed prompts in chunks, and go on greedily as long as there is room, for `STEPS` tokens at most."""
    call, counts = steps.start(len(prompts)), [len(prompt) for prompt in prompts]
    more = min(STEPS, cache.length - max(counts))
    ids = torch.zeros(len(prompts), max(counts) + more, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : counts[row]] = torch.tensor(prompt)
    first: list[Tensor | None] = [None] * len(prompts)
    for begin in range(0, max(counts), cache.prefill_chunk):
        real = [min(max(count - begin, 0), cache.prefill_chunk) for count in counts]
        starts = [min(begin, count) for count in counts]
        logits = call(ids[:, begin : begin + max(real)], torch.tensor(starts), torch.tensor(real))
        for row, count in enumerate(real):
            if count:
                first[row] = (logits[row] if logits.dim() == 2 else logits[row, count - 1]).cpu()
    chosen = [torch.stack([each for each in first if each is not None])]
    ends = torch.tensor(counts)
    for _ in range(more):
        tokens = chosen[-1].argmax(-1)
        ids[torch.arange(len(prompts)), ends] = tokens
        logits = call(tokens[:, None], ends, torch.ones_like(ends))
        chosen.append((logits if logits.dim() == 2 else logits[:, 0]).cpu())
        ends = ends + 1
    return Generated(ids, counts, torch.stack(chosen))


def generate_by_all_profiles(steps: Steps, prompts: list[list[int]], cache: CacheSettings) -> Generated:
    """Generate, and again for each other profile of a plan: the longest prompt, as often at once as brings it in."""
    longest = max(prompts, key=len)
    others = [generate(steps, [longest] * rows, cache).first_row() for rows in steps.other_sizes(len(prompts))]
    return Generated.joined([generate(steps, prompts, cache), *others])


def graph_steps(path: Path, run: Callable[[dict[str, Tensor]], Outputs], model: onnx.ModelProto) -> Steps:
    """Return what runs an ONNX graph, whose caches go out of one call and into the next.

    Args:
        path: The graph's file, for messages.
        run: Runs the graph.
        model: The graph.

    Raises:
        UserError: The graph is not one that computes logits and caches of tokens and caches.
    """
    fed = (INPUT_IDS, WRITE_INDEX, TOKEN_COUNT)
    inputs = {value.name: value.type.tensor_type for value in model.graph.input}
    outputs = [value.type.tensor_type.shape.dim for value in model.graph.output]
    sizes = {name: [dim.dim_value for dim in kind.shape.dim][1:] for name, kind in inputs.items() if name not in fed}
    sound = tuple(inputs)[: len(fed)] == fed and len(outputs) == 1 + len(sizes) and outputs[0]
    if not sound or any(inputs[name].elem_type not in BY_ONNX or 0 in each for name, each in sizes.items()):
        raise UserError(str(path), "is damaged: it says that it has a cache, and has not its inputs and outputs")
    vocabulary = outputs[0][-1].dim_value

    def start(rows: int) -> Call:
        caches = {
            name: torch.zeros(rows, *each, dtype=BY_ONNX[inputs[name].elem_type].torch) for name, each in sizes.items()
        }

        def call(*given: Tensor) -> Tensor:
            logits, *after = run({**dict(zip(fed, given, strict=True)), **caches})
            if tuple(logits.shape) not in ((rows, vocabulary), (*given[0].shape, vocabulary)):
                what, got = "is damaged: its logits are not of the shape that it says", str(tuple(logits.shape))
                raise UserError(str(path), what, got=got, expected=f"{vocabulary} for each row or token")
            caches.update(zip(caches, after, strict=True))
            return logits

        return call

    return Steps(vocabulary, start)


def plan_steps(plan: OpenPlan, manifest: Manifest) -> Steps:
    """Return what runs a plan, whose caches stay where they are."""
    assert manifest.cache is not None
    cache, calls = manifest.cache, TensorRTCalls(plan, manifest)

    def start(rows: int) -> Call:
        PlanBackend(plan.path.name, cache, calls).begin(rows, cache.length)

        def call(*given: Tensor) -> Tensor:
            inputs = dict(
                zip((INPUT_IDS, WRITE_INDEX, TOKEN_COUNT), (each.to(calls.device) for each in given), strict=True)
            )
            logits = calls.run(inputs).cpu()
            torch.cuda.synchronize(calls.device)  # the inputs are kept until they are read
            return logits

        return call

    largest = sorted({profile[INPUT_IDS].max[0] for profile in manifest.profiles if profile[INPUT_IDS].max[1] == 1})
    return Steps(cache.vocabulary, start, largest)
