"""Serve a model by OpenAI's chat API, with LitServe's server and specification.

    python serve.py MODEL [--port 8000] [--host 127.0.0.1] [--device auto] [--max-length N] [--compile]

MODEL is what `twellc.LLM` takes: a Hugging Face directory, or a plan with a key-value cache. Requests are answered one
after another. Of a model without a chat template, as bytelm, the last message is the prompt.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import litserve
from fastapi import HTTPException

from twellc import LLM, SamplingParams, UserError


class Chat(litserve.LitAPI):  # type: ignore[misc]
    """Answers a request for a chat completion piece by piece."""

    def __init__(self, load: functools.partial[LLM]) -> None:
        super().__init__(spec=litserve.OpenAISpec())
        self._load = load

    def setup(self, device: str) -> None:
        """Load the model, in the process that answers; LitServe's device is not asked, the command line says it."""
        self.llm = self._load()

    def predict(self, request: Any) -> Iterator[dict[str, Any]]:
        """Yield pieces of the answer; the last one says how many tokens there were.

        Raises:
            HTTPException: The request does not fit the model.
        """
        tokens, prompt = 0, 0
        try:
            messages = [{"role": each.role, "content": _text_of(each.content)} for each in request.messages]
            params = _params_of(request)
            if self.llm.has_chat_template:
                pieces = self.llm.chat_stream(messages, params)
            else:
                pieces = self.llm.generate_stream(messages[-1]["content"], params)
            for piece in pieces:
                tokens, prompt = tokens + len(piece.outputs[0].token_ids), len(piece.prompt_token_ids)
                yield {"role": "assistant", "content": piece.outputs[0].text}
        except UserError as error:
            raise HTTPException(400, str(error)) from error
        usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        yield {"role": "assistant", "content": "", **usage}


def _text_of(content: Any) -> str:
    """Return the text of a message, which may have parts."""
    if isinstance(content, list):
        others = [part.type for part in content if part.type != "text"]
        if others:
            raise UserError("a message", "has a part that is not text", got=others[0])
        return "".join(part.text for part in content)
    return content or ""


def _params_of(request: Any) -> SamplingParams:
    """Return how to answer a request; what it leaves out is as `SamplingParams` has it.

    Raises:
        UserError: It asks for what is not there, or for values out of range.
    """
    for name in ("tools", "response_format", "presence_penalty", "frequency_penalty"):
        if getattr(request, name):
            raise UserError(name, "is not there", fix="Leave it out.")
    limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    given = {"max_tokens": limit, "temperature": request.temperature, "top_p": request.top_p, "stop": request.stop}
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def main() -> None:
    """Serve the model named on the command line."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("model", type=Path)
    arguments.add_argument("--host", default="127.0.0.1")
    arguments.add_argument("--port", type=int, default=8000)
    arguments.add_argument("--device", default="auto", help="where a directory runs: auto, cpu, cuda or cuda:N")
    arguments.add_argument("--max-length", type=int, help="tokens of a prompt and its answer together")
    arguments.add_argument("--compile", action="store_true", help="let torch.compile compile a directory")
    options = arguments.parse_args()
    load = functools.partial(
        LLM, options.model, device=options.device, max_model_len=options.max_length, compiled=options.compile
    )
    # One process holds the model; which device it takes is its own business.
    server = litserve.LitServer(Chat(load), accelerator="cpu", timeout=False)
    server.run(host=options.host, port=options.port, generate_client_file=False)


if __name__ == "__main__":
    main()
