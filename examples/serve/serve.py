"""Serve a model by OpenAI's chat API.

    python serve.py MODEL [--port 8000] [--host 127.0.0.1] [--device auto] [--max-length N] [--compile]

MODEL is what `twellc.LLM` takes: a Hugging Face directory, or a plan with a key-value cache. Requests are answered one
after another, by one process. Of a model without a chat template, as bytelm, the last message is the prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from twellc import LLM, SamplingParams, UserError
from twellc.generation.sampling import RequestOutput
from twellc.generation.vllm_names import SAMPLING, Names, refuse_others

_T = TypeVar("_T")
_LOG = logging.getLogger("uvicorn.error")
# How long a request may go on after a signal that ends the server.
SECONDS_TO_END = 2
MOST_ANSWERS = 128
_TEMPLATE = ("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
_NO_TOOLS, _TEXT_ALONE = "tools are not there", "is not there: messages and answers are text"
# Names of OpenAI: values that ask for nothing, or None for any, and what to say of others.
OPENAI: Names = {
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none", "auto"), _NO_TOOLS),
    "functions": (([],), _NO_TOOLS),
    "function_call": (("none", "auto"), _NO_TOOLS),
    "response_format": (({"type": "text"},), "is not there"),
    "modalities": ((["text"],), _TEXT_ALONE),
    "audio": ((), _TEXT_ALONE),
    "prediction": ((), "is not there"),
    "web_search_options": ((), "is not there"),
    "top_logprobs": ((0,), "log probabilities are not returned"),
    "store": ((False,), "answers are not stored"),
    **dict.fromkeys(
        (
            "user",
            "metadata",
            "service_tier",
            "reasoning_effort",
            "verbosity",
            "parallel_tool_calls",
            "safety_identifier",
            "prompt_cache_key",
        ),
        (None, ""),
    ),
}


@dataclass(frozen=True)
class Asked:
    """A request.

    Attributes:
        model: The name of the model.
        messages: The conversation, texts alone.
        params: How tokens are chosen, for each answer.
        template: What the chat template takes besides.
        streams: Whether pieces are sent as they come.
        wants_usage: Whether a stream ends with the numbers of tokens by themselves.
    """

    model: str
    messages: list[dict[str, str]]
    params: list[SamplingParams]
    template: dict[str, Any]
    streams: bool
    wants_usage: bool


def read(given: Any, model: str) -> Asked:
    """Take the JSON of a request; what it leaves out is as `SamplingParams` has it.

    Raises:
        UserError: It asks for what is not there, or for values out of range.
    """
    if not isinstance(given, dict):
        raise UserError("the request", "must be a JSON object", got=type(given).__name__)
    given = {name: value for name, value in given.items() if value is not None}
    name, messages, count = given.pop("model", model), given.pop("messages", None), given.pop("n", 1)
    streams, options = given.pop("stream", False), given.pop("stream_options", {})
    template = {name: given.pop(name) for name in _TEMPLATE if name in given}
    if "max_completion_tokens" in given:
        given["max_tokens"] = given.pop("max_completion_tokens")
    listed = isinstance(messages, list) and messages and all(isinstance(each, dict) for each in messages)
    for where, value, holds, expected in (
        ("model", name, isinstance(name, str), "a name"),
        ("messages", messages, listed, "a list of at least one message"),
        ("n", count, type(count) is int and 1 <= count <= MOST_ANSWERS, f"an integer from 1 to {MOST_ANSWERS}"),
        ("stream", streams, isinstance(streams, bool), "true or false"),
        ("stream_options", options, isinstance(options, dict), "an object"),
        ("chat_template_kwargs", template, isinstance(template.get("chat_template_kwargs", {}), dict), "an object"),
    ):
        if not holds:
            raise UserError(where, "is out of its range", got=repr(value)[:80], expected=expected)
    known = {each.name for each in fields(SamplingParams)}
    refuse_others(
        "the request",
        {**SAMPLING, **OPENAI},
        [*known, "messages"],
        {name: value for name, value in given.items() if name not in known},
    )
    chosen = {name: value for name, value in given.items() if name in known}
    if isinstance(chosen.get("logit_bias"), dict):  # names of JSON are texts
        bias = chosen["logit_bias"]
        chosen["logit_bias"] = {int(key) if key.isdecimal() else key: value for key, value in bias.items()}
    seed = SamplingParams(**chosen).seed
    params = [
        SamplingParams(**chosen | ({} if seed in (None, -1) else {"seed": (seed + number) % 2**63}))
        for number in range(count)
    ]
    wants_usage = bool(options.get("include_usage"))
    return Asked(name, [_text_message(each) for each in messages], params, template, streams, wants_usage)


def _text_message(message: dict[str, Any]) -> dict[str, str]:
    """Return a message with its text, which may have parts.

    Raises:
        UserError: It has parts that are not text, or no role.
    """
    role, content = message.get("role"), message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            got = part.get("type", "") if isinstance(part, dict) else type(part).__name__
            raise UserError("a message", "has a part that is not text", got=str(got))
    if not isinstance(role, str):
        raise UserError("a message", "has no role", got=repr(message)[:80], expected="user, assistant or system")
    return {"role": role, "content": "".join(part["text"] for part in parts)}


class Chat:
    """Answers requests for chat completions."""

    def __init__(self, llm: LLM, name: str) -> None:
        self._llm, self._name, self._began = llm, name, int(time.time())
        self._thread, self._turn = ThreadPoolExecutor(1), asyncio.Lock()

    async def _run(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Call a function in the thread of the model."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _begin(self, asked: Asked, params: SamplingParams) -> Iterator[RequestOutput]:
        if self._llm.has_chat_template or "chat_template" in asked.template:
            return self._llm.chat_stream(asked.messages, params, **asked.template)
        return self._llm.generate_stream(asked.messages[-1]["content"], params)

    async def _pieces(self, asked: Asked) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Yield pieces of answers, each with the number of its answer."""
        async with self._turn:
            for number, params in enumerate(asked.params):
                pieces = await self._run(self._begin, asked, params)
                while (piece := await self._run(next, pieces, None)) is not None:
                    yield number, piece

    async def models(self, request: Request) -> Response:
        """Say which model there is."""
        found = {"id": self._name, "object": "model", "created": self._began, "owned_by": "twellc"}
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": [found]})
        if name == self._name:
            return JSONResponse(found)
        error = UserError("model", "is not served here", got=repr(name), expected=repr(self._name))
        return refusal(404, str(error), "model", "model_not_found")

    async def complete(self, request: Request) -> Response:
        """Answer a request."""
        given: Any = None
        try:
            try:
                given = json.loads(await request.body())
            except (ValueError, RecursionError) as error:
                raise UserError("the request", f"is not JSON ({error})") from error
            asked = read(given, self._name)
            pieces = self._pieces(asked)
            answer = _Answer(asked.model, len(asked.params))
            first = await anext(pieces)  # mistakes are found before a stream begins
            if asked.streams:
                events = self._events(answer, first, pieces, asked.wants_usage)
                return StreamingResponse(events, media_type="text/event-stream")
            answer.take(*first)
            async for number, piece in pieces:
                answer.take(number, piece)
            return JSONResponse(answer.whole())
        except Exception as error:
            return refusal(*_status(error, given))

    async def _events(
        self, answer: _Answer, first: tuple[int, RequestOutput], pieces: Any, wants_usage: bool
    ) -> AsyncIterator[str]:
        """Yield the events of a stream."""
        try:
            for number in range(len(answer.texts)):
                yield _event(answer.chunk(number, {"role": "assistant", "content": ""}))
            yield _event(answer.take(*first))
            async for number, piece in pieces:
                yield _event(answer.take(number, piece))
            if wants_usage:
                yield _event({**answer.head("chat.completion.chunk"), "choices": [], "usage": answer.usage()})
            yield "data: [DONE]\n\n"
        except Exception as error:
            yield _event(_body(*_status(error, {})))


class _Answer:
    """What was answered so far."""

    def __init__(self, model: str, count: int) -> None:
        self.texts, self._reasons, self._tokens, self._prompt = [""] * count, [""] * count, 0, 0
        self._model, self._id, self._created = model, f"chatcmpl-{uuid.uuid4().hex}", int(time.time())

    def take(self, number: int, piece: RequestOutput) -> dict[str, Any]:
        """Take a piece, and return it as a chunk of a stream."""
        (output,) = piece.outputs
        self.texts[number] += output.text
        self._reasons[number] = output.finish_reason or ""
        self._tokens, self._prompt = self._tokens + len(output.token_ids), len(piece.prompt_token_ids)
        return self.chunk(number, {"content": output.text}, output.finish_reason)

    def head(self, kind: str) -> dict[str, Any]:
        """Return what is the same in all answers to a request."""
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def usage(self) -> dict[str, int]:
        """Return the numbers of tokens; the prompt counts once."""
        total = self._prompt + self._tokens
        return {"prompt_tokens": self._prompt, "completion_tokens": self._tokens, "total_tokens": total}

    def chunk(self, number: int, delta: dict[str, str], reason: str | None = None) -> dict[str, Any]:
        """Return a chunk of a stream; the last one says how many tokens there were."""
        choice = {"index": number, "delta": delta, "finish_reason": reason, "logprobs": None}
        usage = {"usage": self.usage()} if all(self._reasons) else {}
        return {**self.head("chat.completion.chunk"), "choices": [choice], **usage}

    def whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        choices = [
            {
                "index": number,
                "message": {"role": "assistant", "content": text},
                "finish_reason": reason,
                "logprobs": None,
            }
            for number, (text, reason) in enumerate(zip(self.texts, self._reasons, strict=True))
        ]
        return {**self.head("chat.completion"), "choices": choices, "usage": self.usage()}


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _status(error: Exception, given: Any) -> tuple[int, str, str | None, str | None]:
    """Return status, message, parameter and code of a mistake; a fault of the server stands in its log."""
    if not isinstance(error, UserError):
        _LOG.error("a request failed", exc_info=error)
        return 500, f"the server failed ({type(error).__name__}): its log says more", None, None
    where = str(error).partition(":")[0]
    return 400, str(error), where if isinstance(given, dict) and where in given else None, None


def _body(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    """Return a mistake in OpenAI's form."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refusal(status: int, message: str, param: str | None = None, code: str | None = None) -> Response:
    """Return the answer to a request with a mistake."""
    return JSONResponse(_body(status, message, param, code), status)


async def _other(request: Request, error: Exception) -> Response:
    """Answer requests for what is not there."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}: is not a path of this server; expected POST /v1/chat/completions."
    return refusal(error.status_code, what, code="unknown_url" if error.status_code == 404 else "method_not_supported")


def make_app(llm: LLM, name: str) -> Starlette:
    """Return the application for a model of that name; requests may call it anything."""
    chat = Chat(llm, name)
    routes = [
        Route("/v1/chat/completions", chat.complete, methods=["POST"]),
        Route("/v1/models", chat.models),
        Route("/v1/models/{name:path}", chat.models),
        Route("/health", lambda _: Response("ok")),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _other})


def main() -> None:
    """Serve the model named on the command line."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("model", type=Path)
    arguments.add_argument("--host", default="127.0.0.1")
    arguments.add_argument("--port", type=int, default=8000)
    arguments.add_argument("--device", default="auto", help="where it runs: auto, cpu, cuda or cuda:N")
    arguments.add_argument("--max-length", type=int, help="tokens of a prompt and its answer together")
    arguments.add_argument("--compile", action="store_true", help="let torch.compile compile a directory")
    options = arguments.parse_args()
    # Signals end the process at once; the server, once it runs, gives requests a little time first.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        llm = LLM(options.model, device=options.device, max_model_len=options.max_length, compiled=options.compile)
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
    app = make_app(llm, options.model.resolve().name)
    uvicorn.run(app, host=options.host, port=options.port, timeout_graceful_shutdown=SECONDS_TO_END, lifespan="off")


if __name__ == "__main__":
    main()
