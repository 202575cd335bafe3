"""Serve a model by OpenAI's API: chat completions and completions.

    python serve.py MODEL [--port 8000] [--host 127.0.0.1] [--device auto] [--max-length N] [--api-key KEY]

MODEL is what `twellc.LLM` takes: a Hugging Face directory, or a plan with a key-value cache. Requests are answered one
after another, by one process. Of a model without a chat template, as bytelm, the last message is the prompt.

    request ─ read (asked.py) ─ written down, in a thread of its own ─ waits ─ the model's thread ─ answers.py ─ client

A request whose client has hung up leaves the queue, or is given up before the next chunk of its prompt or step.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import json
import logging
import signal
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
import uvicorn
from answers import Answer
from asked import Asked, parse, read
from starlette.applications import Starlette
from starlette.authentication import (
    AuthCredentials,
    AuthenticationBackend,
    AuthenticationError,
    BaseUser,
    SimpleUser,
)
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from twellc import LLM, UserError
from twellc.generation.sampling import RequestOutput

_T = TypeVar("_T")
_LOG = logging.getLogger("uvicorn.error")
# How long a request may go on after a signal that ends the server.
SECONDS_TO_END = 2
# Tokens of a prompt that are computed before it is asked again whether the client is there.
CHUNK_ON_A_CPU, CHUNK_ON_A_GPU = 32, 2048
# A piece of an answer, behind its number.
_Piece = tuple[int, RequestOutput]


class Service:
    """Answers requests.

    Args:
        llm: The model.
        name: Its name.
        most_waiting: How many requests may wait while one is answered.
        most_bytes: How long the body of a request may be.
        trusts_templates: Whether requests may have chat templates.
    """

    def __init__(self, llm: LLM, name: str, most_waiting: int, most_bytes: int, trusts_templates: bool) -> None:
        self._llm, self._name, self._began = llm, name, int(time.time())
        self._most_waiting, self._most_bytes, self._trusts_templates = most_waiting, most_bytes, trusts_templates
        self._thread, self._there = ThreadPoolExecutor(1), 0

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

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._complete(request, is_chat=True)

    async def completions(self, request: Request) -> Response:
        """Answer prompts."""
        return await self._complete(request, is_chat=False)

    async def _complete(self, request: Request, is_chat: bool) -> Response:
        given: Any = None
        try:
            given = parse(await self._body(request))
            asked = read(given, self._name, is_chat=is_chat, trusts_templates=self._trusts_templates)
            if not asked.streams:
                return JSONResponse(await _unless_gone(request, self._whole(asked)))
            events = self._events(asked)
            first = await _unless_gone(request, anext(events))  # mistakes are found before a stream begins
            return _Stream(_with(first, events), media_type="text/event-stream")
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except HTTPException as error:
            return refusal(error.status_code, error.detail, headers=error.headers)
        except Exception as error:
            return refusal(*_status(error, given))

    async def _body(self, request: Request) -> bytes:
        """Return the body of a request, of which no more is kept than may be there."""
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._most_bytes:
                raise HTTPException(413, f"the request: is longer than {self._most_bytes} bytes")
        return bytes(body)

    async def _whole(self, asked: Asked) -> dict[str, Any]:
        """Return the whole answer to a request."""
        async with contextlib.aclosing(self._pieces(asked)) as pieces:
            answer = await anext(pieces)
            async for piece in pieces:
                answer.take(*piece)
        whole: dict[str, Any] = answer.whole()
        return whole

    async def _events(self, asked: Asked) -> AsyncGenerator[str, None]:
        """Yield the events of a stream."""
        begun = False
        async with contextlib.aclosing(self._pieces(asked)) as pieces:
            try:
                answer = await anext(pieces)
                async for piece in pieces:
                    for each in [*([] if begun else answer.opening()), answer.take(*piece)]:
                        yield _event(each)
                    begun = True
            except Exception as error:
                if not begun:
                    raise
                yield _event(_body(*_status(error, {})))
                return
        for each in answer.closing():
            yield _event(each)
        yield "data: [DONE]\n\n"

    async def _pieces(self, asked: Asked) -> AsyncGenerator[Any, None]:
        """Yield what takes the pieces of an answer, and then these; who reads them slowly lets nobody wait."""
        if self._there > self._most_waiting:
            what = f"too many requests: {self._most_waiting} are waiting already"
            raise HTTPException(429, what, headers={"Retry-After": "1"})
        arrived: asyncio.Queue[_Piece | None] = asyncio.Queue()
        loop, gone, work = asyncio.get_running_loop(), threading.Event(), None
        self._there += 1
        try:
            prompts, texts = await _apart(self._write, asked)
            yield Answer(asked, len(prompts), texts, lambda token: self._llm.detokenize([token]))

            def put(piece: _Piece) -> None:
                loop.call_soon_threadsafe(arrived.put_nowait, piece)

            work = loop.run_in_executor(self._thread, self._compute, asked, prompts, put, gone)
            work.add_done_callback(lambda _: arrived.put_nowait(None))
            while (piece := await arrived.get()) is not None:
                yield piece
            work.result()
        finally:
            gone.set()
            if work is not None:
                work.cancel()
            self._there -= 1

    def _write(self, asked: Asked) -> tuple[list[list[int]], list[str]]:
        """Return the tokens of prompts, and the texts of those that are echoed; it does not touch the model."""
        if asked.messages is not None:
            if self._llm.has_chat_template or "chat_template" in asked.template:
                return [self._llm.write(asked.messages, **asked.template)], []
            return [self._llm.tokenize(asked.messages[-1]["content"])], []
        prompts = [self._llm.tokenize(each) if isinstance(each, str) else each for each in asked.prompts]
        if not asked.echo:
            return prompts, []
        return prompts, [each if isinstance(each, str) else self._llm.detokenize(each) for each in asked.prompts]

    def _compute(
        self, asked: Asked, prompts: list[list[int]], put: Callable[[_Piece], None], gone: threading.Event
    ) -> None:
        """Answer prompts in the thread of the model."""
        for number, (tokens, params) in enumerate((each, params) for each in prompts for params in asked.params):
            for piece in self._llm.generate_stream([tokens], params, stopped=gone.is_set):
                put((number, piece))
            if gone.is_set():
                return


async def _apart(function: Callable[..., _T], *arguments: Any) -> _T:
    """Call a function in a thread of its own, which ends with the process: others go on, whatever it does."""
    found: Future[_T] = Future()

    def call() -> None:
        try:
            found.set_result(function(*arguments))
        except BaseException as error:
            found.set_exception(error)

    found.set_running_or_notify_cancel()
    threading.Thread(target=call, daemon=True).start()
    return await asyncio.wrap_future(found)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Return what a coroutine does; end it when the client hangs up.

    Raises:
        ClientDisconnect: It has.
    """

    async def hangs_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(hangs_up())
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _with(first: str, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    async with contextlib.aclosing(events):
        yield first
        async for event in events:
            yield event


class _Stream(StreamingResponse):
    """A stream whose generator is closed as soon as nobody reads it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            iterator: Any = self.body_iterator
            await iterator.aclose()


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _status(error: Exception, given: Any) -> tuple[int, str, str | None]:
    """Return status, message and parameter of a mistake; a fault of the server stands in its log."""
    if not isinstance(error, UserError):
        _LOG.error("a request failed", exc_info=error)
        return 500, f"the server failed ({type(error).__name__}): its log says more", None
    where = str(error).partition(":")[0]
    return 400, str(error), where if isinstance(given, dict) and where in given else None


def _body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return a mistake in OpenAI's form."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = "server_error" if status >= 500 else kinds.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refusal(
    status: int, message: str, param: str | None = None, code: str | None = None, headers: Any = None
) -> Response:
    """Return the answer to a request with a mistake."""
    return JSONResponse(_body(status, message, param, code), status, headers)


async def _other(request: Request, error: Exception) -> Response:
    """Answer requests for what is not there."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}: is not a path of this server; expected POST /v1/chat/completions"
    code = "unknown_url" if error.status_code == 404 else "method_not_supported"
    return refusal(error.status_code, f"{what} or /v1/completions.", code=code)


class _Keys(AuthenticationBackend):
    """Lets those use the API who have the key; `/health` is for all."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, BaseUser] | None:
        """Look at a request.

        Raises:
            AuthenticationError: It does not have the key.
        """
        if conn.url.path == "/health":
            return None
        scheme, _, key = conn.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode("latin-1"), self._key):
            raise AuthenticationError("the request: has no valid key; expected Authorization: Bearer KEY")
        return AuthCredentials(["authenticated"]), SimpleUser("client")


def _without_key(_: HTTPConnection, error: Exception) -> Response:
    return refusal(401, str(error), code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def make_app(
    llm: LLM,
    name: str,
    *,
    api_key: str | None = None,
    most_waiting: int = 64,
    most_bytes: int = 4 << 20,
    trusts_templates: bool = False,
) -> Starlette:
    """Return the application for a model of that name; requests may call it anything."""
    service = Service(llm, name, most_waiting, most_bytes, trusts_templates)
    routes = [
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/v1/completions", service.completions, methods=["POST"]),
        Route("/v1/models", service.models),
        Route("/v1/models/{name:path}", service.models),
        Route("/health", lambda _: Response("ok")),
    ]
    keys = Middleware(AuthenticationMiddleware, backend=_Keys(api_key or ""), on_error=_without_key)
    return Starlette(
        routes=routes, middleware=[keys] if api_key is not None else [], exception_handlers={HTTPException: _other}
    )


def _count(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if int(text) < least:
            raise ValueError
        return int(text)

    return count


def main() -> None:
    """Serve the model named on the command line."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("model", type=Path)
    arguments.add_argument("--host", default="127.0.0.1")
    arguments.add_argument("--port", type=int, default=8000)
    arguments.add_argument("--device", default="auto", help="where it runs: auto, cpu, cuda or cuda:N")
    arguments.add_argument("--max-length", type=int, help="tokens of a prompt and its answer together")
    arguments.add_argument("--compile", action="store_true", help="let torch.compile compile a directory")
    arguments.add_argument("--api-key", help="answer those alone who send it as Authorization: Bearer KEY")
    arguments.add_argument(
        "--max-waiting", type=_count(0), default=64, help="requests that wait at most; others get status 429"
    )
    arguments.add_argument(
        "--max-body-bytes", type=_count(1), default=4 << 20, help="length of a request; longer ones get status 413"
    )
    arguments.add_argument(
        "--max-num-batched-tokens",
        type=_count(1),
        help=f"tokens of a prompt that are computed at once: {CHUNK_ON_A_CPU} on a CPU, {CHUNK_ON_A_GPU} on a GPU",
    )
    arguments.add_argument(
        "--trust-request-chat-template",
        action="store_true",
        help="take chat templates from requests: these are programs, which may run without end",
    )
    options = arguments.parse_args()
    if options.api_key == "":
        arguments.error("argument --api-key: is empty")
    # Signals end the process at once; the server, once it runs, gives requests a little time first.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    on_cpu = options.device == "cpu" or not torch.cuda.is_available()
    chunk = options.max_num_batched_tokens or (CHUNK_ON_A_CPU if on_cpu else CHUNK_ON_A_GPU)
    try:
        llm = LLM(
            options.model,
            device=options.device,
            max_model_len=options.max_length,
            compiled=options.compile,
            max_num_batched_tokens=chunk,
        )
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
    app = make_app(
        llm,
        options.model.resolve().name,
        api_key=options.api_key,
        most_waiting=options.max_waiting,
        most_bytes=options.max_body_bytes,
        trusts_templates=options.trust_request_chat_template,
    )
    uvicorn.run(app, host=options.host, port=options.port, timeout_graceful_shutdown=SECONDS_TO_END, lifespan="off")


if __name__ == "__main__":
    main()
