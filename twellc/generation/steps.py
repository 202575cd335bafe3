"""Decode: one step after another, each a token of every row.

    prompts, but for their last tokens ──▶ cache
    last tokens ──▶ model ──▶ logits ──▶ processors ──▶ argmax or a draw ──▶ next tokens ─┐
                     ▲                                                                     │
                     └─────────────────────────────────────────────────────────────────────┘

On a GPU a step is one CUDA graph: from the tokens, which never leave the device, to the next ones. The host reads the
tokens of a step while the next one runs, so that the device does not wait for it; when that ends an answer, what ran
ahead is dropped. Processors that cannot be in a graph, since they look at all tokens before, run behind one of the
model alone: see `choice`.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twellc.base.errors import UserError
from twellc.generation.backend import Backend
from twellc.generation.choice import MOST_VALUES, Choice, Prompt
from twellc.generation.logprobs import Table, Wanted
from twellc.generation.sampling import GenerationStats, Logprobs, PromptError

_LOG = logging.getLogger("twellc")
# Held while a graph is recorded: torch empties its cache of memory before, which another recording does not survive.
_RECORDING = threading.Lock()
# Streams for recording that no decoder has. Graphs of one stream may share memory that cuBLAS works in: decoders that
# are there at the same time have other ones.
_FREE_STREAMS: dict[torch.device, list[torch.cuda.Stream]] = {}


@dataclass
class Step:
    """New tokens.

    Attributes:
        tokens: Of each row; that of a row which has ended before means nothing.
        limited: Whether each row takes no more tokens than these.
        ended: Whether each row has ended, with this token or before. A reader may end more rows.
        logprobs: Of each row, of its token and the likeliest; None unless wanted.
        prompt_logprobs: Of each prompt, of its tokens but the first; None unless wanted, and after the first step.
    """

    tokens: list[int]
    limited: list[bool]
    ended: list[bool]
    logprobs: list[Logprobs] | None = None
    prompt_logprobs: list[list[Logprobs]] | None = None


class Decoder:
    """Decodes by a backend; keeps the graphs of its steps.

    Attributes:
        backend: What computes.
        stats: Those of the last call.
        most_tokens: How many tokens of prompts are computed at once, all rows together; None for all.
        lock: Held while a step is computed; held over a whole call, it keeps other calls from taking the cache.
    """

    def __init__(self, backend: Backend) -> None:
        # A graph with the logits that it writes. None after a first step without one, False where there cannot be one.
        # Named before the backend, and so released before it: the graph of a plan must not outlive the plan.
        self._graphs: dict[Any, tuple[torch.cuda.CUDAGraph, Tensor] | bool | None] = {}
        self.backend = backend
        self.most_tokens: int | None = None
        self.stats, self.lock = GenerationStats(), threading.RLock()
        self._generator = torch.Generator(backend.device)
        self._tokens = self._places = torch.empty(0, device=backend.device)
        self._last = torch.zeros((), dtype=torch.int64, device=backend.device)
        self._values = torch.zeros(MOST_VALUES, dtype=torch.float64, device=backend.device)
        self._recording = _stream_for(self, backend.device) if backend.device.type == "cuda" else None
        self._call = 0

    @torch.no_grad()
    def steps(
        self,
        prompts: Sequence[Prompt],
        draws: bool = False,
        pad: int = 0,
        seed: int | None = None,
        wanted: Wanted | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> Iterator[Step]:
        """Decode until every row has ended.

        Args:
            prompts: The prompts, of as many rows each.
            draws: Whether a token is drawn; else the likeliest is taken.
            pad: What stands behind the end of a row, where the others of its prompt go on.
            seed: Seed of what is drawn, for each prompt as if it were alone; None draws anew.
            wanted: Which log probabilities are wanted; None for none.
            stopped: Asked before each chunk of the prompts and each step whether to end here.

        Raises:
            UserError: The cache does not hold a prompt, there are more rows than the backend takes, or another call
                has taken the cache meanwhile; or logits are needed, and the backend gives tokens alone, or those behind
                prompts alone.
        """
        wanted = wanted or Wanted()
        self._refuse_unscored(prompts, draws, wanted)
        began = time.perf_counter()
        rows = [row for prompt in prompts for row in prompt.tokens]
        most = [prompt.most for prompt in prompts for _ in prompt.tokens]
        rooms = [self.backend.longest - len(row) + 1 for row in rows]
        ended, first = [False] * len(rows), 0.0
        with self.lock:
            choice = Choice(prompts, draws, pad, ended, self.backend.device, seed is not None)
            of_prompts = self._begin(rows, most, seed, choice.values, wanted, stopped)
            call, stats = self._call, self.stats
        watch = Stopwatch(self.backend.device)
        known = [prompt.tokens for prompt in prompts]
        try:
            running = self._run(call, min(max(most), max(rooms)), choice, watch, wanted, stopped)
            for number, (tokens, table) in enumerate(running, 1):
                now = time.perf_counter()
                first = first or now
                stats.first_token_seconds, stats.decode_seconds = first - began, now - first
                stats.new_tokens += ended.count(False)
                shown = [pad if over else token for token, over in zip(tokens, ended, strict=True)]
                limited = [number >= min(limits) for limits in zip(most, rooms, strict=True)]
                step = Step(shown, limited, [any(why) for why in zip(ended, limited, strict=True)])
                step.logprobs, step.prompt_logprobs = table.rows() if table is not None else None, of_prompts
                of_prompts = None
                _end_rows(step, prompts, known, ended)
                yield step
                ended[:] = step.ended
                if all(ended):
                    return
        finally:
            with self._on_device():
                stats.steps, stats.gap_us, stats.gap_share = watch.read()

    @torch.no_grad()
    def logits(self, rows: Sequence[Tensor]) -> Tensor:
        """Return the logits behind prompts, each int64 [tokens]: float32 [batch, vocabulary]."""
        self._refuse_without_logits("logits")
        with self.lock:
            self._begin(rows, [1] * len(rows), None, [], Wanted(), None)
            with self._on_device():
                return self.backend.decode(self._tokens, self._places).float().clone()

    def _refuse_unscored(self, prompts: Sequence[Prompt], draws: bool, wanted: Wanted) -> None:
        """Fail if what `steps` is asked for needs logits that the backend does not give."""
        asked = ["temperature"] * draws
        asked += [
            name
            for name, count in (("logprobs", wanted.answer), ("prompt_logprobs", wanted.prompt))
            if count is not None
        ]
        for each in asked + [_argument_of(each) for prompt in prompts for each in prompt.processors]:
            self._refuse_without_logits(each)
        if wanted.prompt is not None and not self.backend.scores_prompts:
            what = "the plan gives the logits behind prompts, and none within"
            fix = "Compile the model with --logits all, or give its directory."
            raise UserError("prompt_logprobs", what, got=str(wanted.prompt), expected="None", fix=fix)

    def _refuse_without_logits(self, asked: str) -> None:
        if self.backend.chooses:
            what = "needs logits, and the plan gives the likeliest tokens alone"
            raise UserError(asked, what, fix="Leave it out, or compile the model with --logits last.")

    def _on_device(self) -> AbstractContextManager[Any]:
        """Let streams, events and graphs be those of the backend's device, whichever is the thread's."""
        device = self.backend.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def _begin(
        self,
        rows: Sequence[Tensor],
        most: Sequence[int],
        seed: int | None,
        values: Sequence[float],
        wanted: Wanted,
        stopped: Callable[[], bool] | None,
    ) -> list[list[Logprobs]] | None:
        """Put prompts into the cache, but for their last tokens, which the first step computes.

        Return the log probabilities of their tokens, where these are wanted.
        """
        backend, batch, lengths = self.backend, len(rows), [len(row) for row in rows]
        if backend.largest_batch is not None and batch > backend.largest_batch:
            what = f"takes at most {backend.largest_batch} prompts per call"
            fix = "Give fewer, or compile the model with a larger --max-batch-size."
            raise UserError(backend.name, what, got=str(batch), fix=fix)
        for row, length in enumerate(lengths):
            if length > backend.longest:
                raise PromptError(
                    "the prompt",
                    "is longer than the cache",
                    index=row,
                    got=f"{length} tokens",
                    expected=f"{backend.longest} at most",
                    fix="Shorten it, or make the cache longer if the model allows it.",
                )
        self._call += 1
        if batch != len(self._tokens):
            self._graphs.clear()
        needed = max(length + count for length, count in zip(lengths, most, strict=True)) - 1
        places = min(needed, backend.longest)
        with self._on_device():
            if backend.begin(batch, places) or len(self._tokens) != batch:
                self._graphs.clear()
                self._tokens, self._places = (
                    torch.zeros(batch, dtype=torch.int64, device=backend.device) for _ in range(2)
                )
            self._generator.manual_seed(seed) if seed is not None else self._generator.seed()
            self.stats = GenerationStats(backend.name, batch, sum(lengths))
            self._places.copy_(torch.tensor(lengths) - 1)
            self._last.fill_(places - 1)
            self._tokens.copy_(torch.stack([row[-1] for row in rows]))
            self._values[: len(values)] = torch.tensor(values, dtype=torch.float64)
            return self._fill(rows, wanted, stopped)

    def _fill(
        self, rows: Sequence[Tensor], wanted: Wanted, stopped: Callable[[], bool] | None
    ) -> list[list[Logprobs]] | None:
        """Compute prompts but for their last tokens, in chunks; return the log probabilities wanted of them."""
        backend, batch, lengths = self.backend, len(rows), [len(row) for row in rows]
        # Behind its end a row goes on with its last token: no other one, whose keys may be NaN, is in its cache.
        width = max(lengths) - 1
        ends = [torch.arange(width).clamp(max=length - 1) for length in lengths]
        padded = torch.stack([row[end] for row, end in zip(rows, ends, strict=True)]).to(backend.device)
        found: list[list[Logprobs]] = [[] for _ in rows[:: wanted.copies]]
        chunk = min(backend.chunk, max((self.most_tokens or backend.chunk * batch) // batch, 1))
        chunk = wanted.chunk(batch, backend.vocabulary, chunk)
        for start in range(0, width, chunk):
            if stopped is not None and stopped():
                break
            logits = backend.fill(padded[:, start : start + chunk], start, wanted.prompt is not None)
            if wanted.prompt is None:
                continue
            for known, prompt, behind in zip(found, rows[:: wanted.copies], logits[:: wanted.copies], strict=True):
                tokens = prompt[start + 1 : start + 1 + chunk].to(behind.device)
                known += wanted.table(behind[: len(tokens)], tokens, wanted.prompt).rows()
        return None if wanted.prompt is None else found

    def _run(
        self,
        call: int,
        count: int,
        choice: Choice,
        watch: Stopwatch,
        wanted: Wanted,
        stopped: Callable[[], bool] | None,
    ) -> Iterator[tuple[list[int], Table | None]]:
        """Compute the steps of a call; yield their tokens and what is wanted of them; on a GPU, while the next runs."""
        on_gpu = self.backend.device.type == "cuda"
        running: deque[tuple[Callable[[], list[int]], Table | None]] = deque()
        slots: list[Tensor] = []
        for number in range(count):
            if stopped is not None and stopped():
                return
            with self.lock, self._on_device():
                if call != self._call:
                    fix = "Read a stream to its end first, or make an LLM for each."
                    raise UserError("the stream", "was given up by a later call, which took its cache", fix=fix)
                if len(slots) < 2:
                    slots.append(torch.zeros(len(self._tokens), dtype=torch.int64, pin_memory=on_gpu))
                if number:
                    choice.observe(self._tokens)
                scores = self._step(choice, watch, wanted.processed)
                table = None
                if wanted.answer is not None:  # before the next step, which may overwrite them
                    table = wanted.table(scores, self._tokens, wanted.answer).on_host()
                running.append((_start_reading(self._tokens, slots[number % 2]), table))
            if len(running) > (on_gpu and choice.may_run_ahead):
                read, table = running.popleft()
                yield read(), table
        for read, table in running:
            yield read(), table

    def _step(self, choice: Choice, watch: Stopwatch, processed: bool) -> Tensor:
        """Compute the next tokens in place of those that were.

        Return the logits that the model gave; with `processed` what tokens were chosen from.
        """

        def model() -> Tensor:
            found = self.backend.decode(self._tokens, self._places)
            return found if self.backend.chooses else found.float()

        def whole() -> Tensor:
            logits = model()
            scores = self._choose(choice, logits)
            return scores if processed else logits

        body = model if choice.key is None else whole
        key = None if choice.key is None else (processed, *choice.key)
        recorded = self._graph(key, body, watch) if self.backend.device.type == "cuda" else None
        with watch:
            if recorded is None:
                logits = body()
            else:
                graph, logits = recorded
                graph.replay()
            if choice.key is None:
                scores = self._choose(choice, logits)
                logits = scores if processed else logits
        self.stats.graph = recorded is not None and choice.key is not None
        return logits

    def _graph(
        self, key: Any, body: Callable[[], Tensor], watch: Stopwatch
    ) -> tuple[torch.cuda.CUDAGraph, Tensor] | None:
        """Return a graph of what a step does, and the logits that it writes.

        None in the first such step, which warms up, and where no graph can be.
        """
        if key not in self._graphs:
            self._graphs[key] = None
            watch.pause()
            return None
        if self._graphs[key] is None:
            watch.pause()
            graph, state = torch.cuda.CUDAGraph(), self._generator.get_state()
            graph.register_generator_state(self._generator)
            try:
                # Other threads may allocate and wait meanwhile, as those do that read the tokens of a step.
                # Where recording fails, torch would leave the thread on another stream than `here`.
                here = torch.cuda.stream(torch.cuda.current_stream())
                recording = torch.cuda.graph(graph, stream=self._recording, capture_error_mode="thread_local")
                with _RECORDING, here, recording:
                    logits = body()
                self._graphs[key] = graph, logits
            except RuntimeError as error:  # such as of a model that asks for a value
                _LOG.warning("no CUDA graph can hold a step: %s", error)
                # The failed recording holds the generator, by which earlier graphs draw, too.
                self._graphs = {key: False}
                self._generator = torch.Generator(self.backend.device)
                self._generator.set_state(state)
        found = self._graphs[key]
        return found if isinstance(found, tuple) else None

    def _choose(self, choice: Choice, logits: Tensor) -> Tensor:
        """Take the next tokens, and return what they were chosen from."""
        scores = logits if self.backend.chooses else choice.scores(logits, self._values)
        self._tokens.copy_(scores if self.backend.chooses else choice.tokens(scores, self._generator))
        # A row that has ended goes on; in the last place of its own cache it changes no other row.
        self._places.copy_(torch.minimum(self._places + 1, self._last))
        return scores


def _end_rows(step: Step, prompts: Sequence[Prompt], known: list[Tensor], ended: Sequence[bool]) -> None:
    """Note in a step which rows end with it, by the tokens that end answers of their prompts and by their criteria.

    Args:
        step: The step.
        prompts: The prompts, of as many rows each.
        known: Of each prompt the tokens of its rows, int64 [rows, tokens]. Those of the step are put behind them.
        ended: Which rows have ended before.
    """
    copies = len(prompts[0].tokens)
    for index, prompt in enumerate(prompts):
        own = slice(index * copies, (index + 1) * copies)
        tokens = step.tokens[own]
        step.ended[own] = [over or token in prompt.ends for over, token in zip(step.ended[own], tokens, strict=True)]
        if prompt.criteria and not all(ended[own]):
            known[index] = torch.cat([known[index], torch.tensor(tokens)[:, None]], dim=-1)
            over = prompt.criteria(known[index], None).tolist()
            step.ended[own] = [any(why) for why in zip(step.ended[own], over, strict=True)]


def _argument_of(processor: Any) -> str:
    """Return the argument of `generate` that a processor of transformers stands for; other classes by their names."""
    name, ending, _ = type(processor).__name__.partition("LogitsProcessor")
    return re.sub("(?<=.)(?=[A-Z])", "_", name).lower() if ending else name


def _stream_for(decoder: Decoder, device: torch.device) -> torch.cuda.Stream:
    """Return a stream for recording, which is free again when the decoder is gone."""
    free = _FREE_STREAMS.setdefault(device, [])
    stream = free.pop() if free else torch.cuda.Stream(device)
    weakref.finalize(decoder, free.append, stream)
    return stream


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
