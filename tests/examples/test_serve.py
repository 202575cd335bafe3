"""examples/serve with OpenAI's client."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.processes import environment
from twellc import LLM, SamplingParams

openai = pytest.importorskip("openai", reason="pip install twellc[serve,dev]")
pytest.importorskip("litserve", reason="pip install twellc[serve]")

MESSAGES: Any = [{"role": "user", "content": "the lazy dog"}]


@pytest.fixture(scope="module")
def client(talker: Path) -> Iterator[Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, ROOT / "examples" / "serve" / "serve.py", talker, "--port", str(port), "--device", "cpu"]
    server = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while True:
            assert server.poll() is None and time.monotonic() < deadline, "the server does not start"
            try:
                if urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200:
                    break
            except OSError:
                time.sleep(0.2)
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    finally:
        server.terminate()
        server.wait(30)


def ask(client: Any, **options: Any) -> Any:
    return client.chat.completions.create(model="talker", messages=MESSAGES, **{"temperature": 0, **options})


def test_an_answer_is_that_of_llm(client: Any, talker: Path) -> None:
    (expected,) = LLM(talker, device="cpu").chat(MESSAGES, SamplingParams(max_tokens=20))
    answer = ask(client, max_tokens=20)
    assert answer.choices[0].message.content == expected.outputs[0].text
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == len(expected.outputs[0].token_ids)
    parts = [{"role": "user", "content": [{"type": "text", "text": "the lazy "}, {"type": "text", "text": "dog"}]}]
    again = client.chat.completions.create(model="talker", messages=parts, temperature=0, max_completion_tokens=20)
    assert again.choices[0].message.content == expected.outputs[0].text
    stop = expected.outputs[0].text[6:9]
    cut = ask(client, max_tokens=20, stop=[stop]).choices[0].message.content
    assert cut == expected.outputs[0].text.partition(stop)[0]


def test_a_stream(client: Any) -> None:
    whole = ask(client, max_tokens=20)
    chunks = list(ask(client, max_tokens=20, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert len(chunks) > 10 and chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].usage == whole.usage


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: is out of its range; got 0"),
        ({"top_p": 0}, "top_p: is out of its range; got 0.0"),
        ({"response_format": {"type": "json_object"}}, "response_format: is not there"),
        ({"frequency_penalty": 0.5}, "frequency_penalty: is not there"),
    ],
)
def test_what_is_not_there(client: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        ask(client, **options)
    assert message in refusal.value.response.text


def test_images(client: Any) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(model="talker", messages=[{"role": "user", "content": [image]}])
    assert "a message: has a part that is not text; got image_url" in refusal.value.response.text


def test_a_prompt_that_does_not_fit(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(model="talker", messages=[{"role": "user", "content": "größer " * 400}])
    assert "the prompt: is longer than the cache; got " in refusal.value.response.text
    assert ask(client, max_tokens=2).choices[0].message.content is not None
