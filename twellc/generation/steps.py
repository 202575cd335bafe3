"""Decode: one step after another, each a token of every row.

    prompts, but for their last tokens ──▶ cache
    last tokens ──▶ model ──▶ logits ──▶ processors ──▶ argmax or a draw ──▶ next tokens ─┐
                     ▲                                                                     │
                     └─────────────────────────────────────────────────────────────────────┘

On a GPU a step is one CUDA graph: from the tokens, which never leave the device, to the next ones. The host reads the
tokens of a step while the next one runs, so that the device does not wait for it; when that ends an answer, what ran
ahead is dropped. Processors that cannot be in a graph, since they look at all tokens before, run behind one of the
model alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from twellc.base.errors import UserError
from twellc.generation.backend import Backend
from twellc.generation.sampling import GenerationStats, PromptError

_LOG = logging.getLogger("twellc")
# These look at the scores alone, and wait for nothing.
_IN_GRAPH = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
# Held while a graph is recorded: torch has one stream for that.
_RECORDING = threading.Lock()


@dataclass
class Step:
    """New tokens.

    Attributes:
        tokens: Of each row; that of a row which has ended before means nothing.
        limited: Whether each row takes no more tokens than these.
        ended: Whether each row has ended, with this token or before. Whoever reads it may end more rows.
    """

    tokens: list[int]
    limited: list[bool]
    ended: list[bool]


@dataclass(frozen=True)
class Choice:
    """How the next tokens are chosen.

    Attributes:
        processors: transformers' own, over the scores.
        draws: Whether a token is drawn; else the likeliest is taken.
    """

    processors: LogitsProcessorList
    draws: bool

    @property
    def key(self) -> tuple[Any, ...] | None:
        """What makes it differ from others, if it can be in a graph; else None."""
        if any(type(each) not in _IN_GRAPH for each in self.processors):
            return None
        return self.draws, *((type(each), repr(sorted(vars(each).items()))) for each in self.processors)


class Decoder:
    """Decodes by a backend; keeps the graphs of its steps.

    Attributes:
        backend: What computes.
        stats: Those of the last call.
        lock: Held while a step is computed. Whoever holds it over a whole call keeps others from taking its cache.
    """

    def __init__(self, backend: Backend) -> None:
        # None after a first step without a graph, False where there cannot be one. What is named first goes first: the
        # graph of a plan must not outlive the plan.
        self._graphs: dict[Any, torch.cuda.CUDAGraph | bool | None] = {}
        self.backend = backend
        self.stats, self.lock = GenerationStats(), threading.RLock()
        self._generator = torch.Generator(backend.device)
        self._tokens = self._places = self._logits = torch.empty(0, device=backend.device)
        self._last = torch.zeros((), dtype=torch.int64, device=backend.device)
        self._call = 0

    @torch.no_grad()
    def steps(
        self,
        input_ids: Tensor,
        lengths: list[int],
        most: int,
        choice: Choice,
        criteria: StoppingCriteriaList,
        pad: int = 0,
        seed: int | None = None,
    ) -> Iterator[Step]:
        """Decode until every row has ended.

        Args:
            input_ids: Prompts [batch, tokens], padded on the left.
            lengths: How many of these tokens are each row's own.
            most: How many new tokens a row gets at most.
            choice: How they are chosen.
            criteria: transformers' own, over all tokens; they see `pad` behind the end of a row.
            pad: That token.
            seed: Seed of what is drawn; None draws anew.

        Raises:
            UserError: The cache does not hold a prompt, there are more rows than the backend takes, or another call
                has taken the cache meanwhile.
        """
        began = time.perf_counter()
        with self.lock:
            self._begin(input_ids, lengths, most, seed)
            call, stats = self._call, self.stats
        known, ended, first = input_ids.cpu(), [False] * len(lengths), 0.0
        rooms = [self.backend.longest - length + 1 for length in lengths]
        watch = Stopwatch(self.backend.device)
        try:
            for number, tokens in enumerate(self._run(call, min(most, max(rooms)), choice, input_ids, watch), 1):
                now = time.perf_counter()
                first = first or now
                stats.first_token_seconds, stats.decode_seconds = first - began, now - first
                stats.new_tokens += ended.count(False)
                shown = [pad if over else token for token, over in zip(tokens, ended, strict=True)]
                known = torch.cat([known, torch.tensor(shown, dtype=known.dtype)[:, None]], dim=-1)
                over = criteria(known, None).tolist()
                limited = [number >= min(most, room) for room in rooms]
                step = Step(shown, limited, [any(why) for why in zip(ended, over, limited, strict=True)])
                yield step
                ended = step.ended
                if all(ended):
                    return
        finally:
            stats.steps, stats.gap_us, stats.gap_share = watch.read()

    def logits(self, input_ids: Tensor, lengths: list[int]) -> Tensor:
        """Return the logits behind prompts, float32 [batch, vocabulary]; see `steps`."""
        with self.lock:
            self._begin(input_ids, lengths, 1, None)
            return self.backend.decode(self._tokens, self._places).float()

    def _begin(self, input_ids: Tensor, lengths: list[int], most: int, seed: int | None) -> None:
        """Put prompts into the cache, but for their last tokens, which the first step computes."""
        backend, batch = self.backend, len(lengths)
        if backend.largest_batch is not None and batch > backend.largest_batch:
            raise UserError(
                backend.name, "does not take so many prompts at once", got=str(batch),
                expected=f"{backend.largest_batch} at most",
                fix="Give fewer, or compile the model with a larger --batch.",
            )  # fmt: skip
        for row, length in enumerate(lengths):
            if length > backend.longest:
                raise PromptError(
                    "the prompt", "is longer than the cache", index=row, got=f"{length} tokens",
                    expected=f"{backend.longest} at most",
                    fix="Shorten it, or make the cache longer if the model allows it.",
                )  # fmt: skip
        self._call += 1
        if batch != len(self._tokens):
            self._graphs.clear()
        places = min(max(lengths) + most - 1, backend.longest)
        if backend.begin(batch, places) or len(self._tokens) != batch:
            self._graphs.clear()
            self._tokens, self._places = (
                torch.zeros(batch, dtype=torch.int64, device=backend.device) for _ in range(2)
            )
        self._generator.manual_seed(seed) if seed is not None else self._generator.seed()
        self.stats = GenerationStats(backend.name, batch, sum(lengths))
        counts = torch.tensor(lengths, device=backend.device)
        self._places.copy_(counts - 1)
        self._last.fill_(places - 1)
        self._tokens.copy_(input_ids[:, -1])
        width = max(lengths) - 1
        # From the left to the right: a row begins behind its padding. Behind its end stands anything.
        starts = input_ids.shape[1] - counts[:, None]
        columns = (starts + torch.arange(width, device=backend.device)).clamp(max=input_ids.shape[1] - 1)
        rows = input_ids.to(backend.device).gather(1, columns)
        for start in range(0, width, backend.chunk):
            backend.fill(rows[:, start : start + backend.chunk], start)

    def _run(self, call: int, count: int, choice: Choice, input_ids: Tensor, watch: Stopwatch) -> Iterator[list[int]]:
        """Compute the steps of a call and yield their tokens; on a GPU, while the next step runs."""
        on_gpu = self.backend.device.type == "cuda"
        slots = [torch.zeros(len(input_ids), dtype=torch.int64, pin_memory=on_gpu) for _ in range(2)]
        running: deque[Callable[[], list[int]]] = deque()
        known = input_ids.to(self.backend.device)
        for number in range(count):
            with self.lock:
                if call != self._call:
                    raise UserError(
                        "the stream", "was given up by a later call, which took its cache",
                        fix="Read a stream to its end first, or make an LLM for each.",
                    )  # fmt: skip
                self._step(choice, known, watch)
                if choice.key is None:
                    known = torch.cat([known, self._tokens[:, None]], dim=-1)
                running.append(_start_reading(self._tokens, slots[number % 2]))
            if len(running) > on_gpu:
                yield running.popleft()()
        while running:
            yield running.popleft()()

    def _step(self, choice: Choice, known: Tensor, watch: Stopwatch) -> None:
        """Compute the next tokens in place of those that were."""
        key = choice.key

        def model() -> None:
            self._logits = self.backend.decode(self._tokens, self._places).float()

        def whole() -> None:
            model()
            self._choose(choice, known)

        body = model if key is None else whole
        graph = self._graph(key, body, watch) if self.backend.device.type == "cuda" else None
        with watch:
            if graph is None:
                body()
            else:
                graph.replay()
            if key is None:
                self._choose(choice, known)
        self.stats.graph = graph is not None and key is not None

    def _graph(self, key: Any, body: Callable[[], None], watch: Stopwatch) -> torch.cuda.CUDAGraph | None:
        """Return a graph of what a step does; None in the first such step, which warms up, and where none can be."""
        if key not in self._graphs:
            self._graphs[key] = None
            watch.pause()
            return None
        if self._graphs[key] is None:
            watch.pause()
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(self._generator)
            try:
                # Other threads may allocate and wait meanwhile, as those do that read the tokens of a step.
                with _RECORDING, torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    body()
                self._graphs[key] = graph
            except RuntimeError as error:  # such as of a model that asks for a value
                _LOG.warning("no CUDA graph can hold a step: %s", error)
                self._graphs[key] = False
        found = self._graphs[key]
        return found if isinstance(found, torch.cuda.CUDAGraph) else None

    def _choose(self, choice: Choice, known: Tensor) -> None:
        processors: Any = choice.processors
        scores = processors(known, self._logits)
        if choice.draws:
            tokens = torch.multinomial(scores.softmax(-1), 1, generator=self._generator).squeeze(1)
        else:
            tokens = scores.argmax(-1)
        self._tokens.copy_(tokens)
        # A row that has ended goes on; in the last place of its own cache it harms nobody.
        self._places.copy_(torch.minimum(self._places + 1, self._last))


def _start_reading(tokens: Tensor, slot: Tensor) -> Callable[[], list[int]]:
    """Begin to copy tokens to the host; the result waits for them."""
    slot.copy_(tokens, non_blocking=True)
    if tokens.device.type != "cuda":
        return slot.tolist
    event = torch.cuda.Event()
    event.record()

    def wait() -> list[int]:
        event.synchronize()
        return slot.tolist()

    return wait


class Stopwatch:
    """Times steps, as a context around each, and what lies between them: on the device where that is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[Any, Any]] = []
        # Steps before which the time does not count.
        self._pauses = {0}

    def pause(self) -> None:
        """Leave out what lies between the last step and the next."""
        self._pauses.add(len(self._marks))

    def __enter__(self) -> None:
        """Begin a step."""
        self._marks.append((self._now(), None))

    def __exit__(self, *_: object) -> None:
        """End it."""
        self._marks[-1] = (self._marks[-1][0], self._now())

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self) -> tuple[int, float | None, float | None]:
        """Return how many steps there were, the mean gap in microseconds, and the share of gaps in all that counts."""
        if self._on_gpu and self._marks:
            self._marks[-1][1].synchronize()

        def seconds(start: Any, end: Any) -> float:
            return float(start.elapsed_time(end) / 1e3 if self._on_gpu else end - start)

        counted = [number for number in range(1, len(self._marks)) if number not in self._pauses]
        gaps = sum(seconds(self._marks[number - 1][1], self._marks[number][0]) for number in counted)
        steps = sum(seconds(*self._marks[number]) for number in counted)
        if not counted:
            return len(self._marks), None, None
        return len(self._marks), gaps / len(counted) * 1e6, gaps / (gaps + steps)
