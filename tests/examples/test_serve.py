"""examples/serve with OpenAI's client."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.processes import at_once, end_with_parent, environment
from twellc import LLM, SamplingParams

openai = pytest.importorskip("openai", reason="pip install twellc[serve,dev]")
pytest.importorskip("starlette", reason="pip install twellc[serve]")
pytest.importorskip("uvicorn", reason="pip install twellc[serve]")


def user(content: Any) -> Any:
    return [{"role": "user", "content": content}]


MESSAGES = user("the lazy dog")


@contextlib.contextmanager
def serving(model: Path, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run a server; yield it and its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = ROOT / "examples" / "serve" / "serve.py"
    command = [sys.executable, script, model, "--port", str(port), "--device", "cpu", *options]
    server = subprocess.Popen(
        command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=end_with_parent
    )
    try:
        deadline = time.monotonic() + 120
        while True:
            assert server.poll() is None and time.monotonic() < deadline, "the server does not start"
            try:
                if urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200:
                    break
            except OSError:
                time.sleep(0.2)
        yield server, f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait(30)


@pytest.fixture(scope="module")
def served(talker: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    with serving(talker) as server_and_address:
        yield server_and_address


@pytest.fixture(scope="module")
def address(served: tuple[subprocess.Popen[bytes], str]) -> str:
    return served[1]


@pytest.fixture(scope="module")
def client(address: str) -> Any:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def ask(client: Any, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": "talker", "messages": MESSAGES, "temperature": 0, **options})


def post(address: str, body: bytes, path: str = "/v1/chat/completions") -> tuple[int, Any]:
    """Return the status and the JSON of an answer."""
    request = urllib.request.Request(address + path, body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_an_answer_is_that_of_llm(client: Any, talker: Path) -> None:
    (expected,) = LLM(talker, device="cpu").chat(MESSAGES, SamplingParams(max_tokens=20))
    answer = ask(client, max_tokens=20)
    assert answer.choices[0].message.content == expected.outputs[0].text
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == len(expected.outputs[0].token_ids)
    parts = user([{"type": "text", "text": text} for text in ("the lazy ", "dog")])
    again = ask(client, messages=parts, max_completion_tokens=20)
    assert again.choices[0].message.content == expected.outputs[0].text
    stop = expected.outputs[0].text[6:9]
    cut = ask(client, max_tokens=20, stop=[stop]).choices[0].message.content
    assert cut == expected.outputs[0].text.partition(stop)[0]


def test_a_stream(client: Any) -> None:
    whole = ask(client, max_tokens=20)
    chunks = list(ask(client, max_tokens=20, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert len(chunks) > 10 and not any(chunk.usage for chunk in chunks)
    assert {chunk.id for chunk in chunks} == {chunks[0].id} and chunks[0].choices[0].delta.role == "assistant"
    *others, last = ask(client, max_tokens=20, stream=True, stream_options={"include_usage": True})
    assert (last.choices, last.usage) == ([], whole.usage) and not any(chunk.usage for chunk in others)


def test_why_an_answer_ends(client: Any) -> None:
    whole = ask(client, max_tokens=8).choices[0]
    assert whole.finish_reason == "length"
    stop = whole.message.content[2:4]
    for options, reason in (({}, "length"), ({"stop": stop}, "stop")):
        assert ask(client, max_tokens=8, **options).choices[0].finish_reason == reason
        *_, last = ask(client, max_tokens=8, stream=True, **options)
        assert last.choices[0].finish_reason == reason


def test_seeds_and_several_answers(client: Any) -> None:
    def drawn(**options: Any) -> list[str]:
        return [each.message.content for each in ask(client, max_tokens=12, temperature=2, **options).choices]

    assert drawn(seed=1) == drawn(seed=1) != drawn(seed=2)
    one, other = drawn(seed=1, n=2)
    assert [one, other] == drawn(seed=1) + drawn(seed=2)
    texts = ["", ""]
    for chunk in ask(client, max_tokens=12, temperature=2, seed=1, n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [one, other]
    assert ask(client, max_tokens=1, n=3).usage.completion_tokens == 3


def test_neutral_values_and_names_of_vllm(client: Any) -> None:
    plain = ask(client, max_tokens=6).choices[0].message.content
    neutral: dict[str, Any] = {
        "logprobs": False,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "tools": [],
        "user": "me",
    }
    neutral |= {"response_format": {"type": "text"}, "extra_body": {"top_k": 5, "min_p": 0.1, "ignore_eos": False}}
    assert ask(client, max_tokens=6, **neutral).choices[0].message.content == plain
    biased = ask(client, max_tokens=3, logit_bias={"7": 100}, extra_body={"ignore_eos": True})
    assert biased.usage.completion_tokens == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: is out of its range; got 0"),
        ({"response_format": {"type": "json_object"}}, "response_format: is not there"),
        ({"frequency_penalty": "much"}, "frequency_penalty: does not take this value; got 'much'; expected a number"),
        ({"n": 0}, "n: is out of its range; got 0; expected an integer from 1 to 128"),
        ({"max_tokens": "5"}, "max_tokens: does not take this value; got '5'; expected an integer"),
        ({"temperature": "hot"}, "temperature: does not take this value; got 'hot'; expected a number"),
        ({"stop": [""]}, "stop: does not take this value; got ['']"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options: "),
        ({"logprobs": 3}, "logprobs: does not take this value; got 3; expected true or false"),
        ({"top_logprobs": 3}, "top_logprobs: is there with logprobs alone"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: is out of its range; got 21"),
        ({"logit_bias": {"x": 1}}, "logit_bias: does not take this value"),
        ({"logit_bias": {"1" * 5000: 1}}, "logit_bias: does not take this value"),
        ({"messages": "hello"}, "messages: does not take this value; got 'hello'"),
        ({"messages": []}, "messages: does not take this value"),
        ({"extra_body": {"chat_template": "x"}}, "chat_template: is not taken from requests"),
        ({"extra_body": {"chat_template_kwargs": {"tokenize": True}}}, "chat_template_kwargs: say how a conversation"),
        ({"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}}, "chat_template_kwargs: say how a conv"),
        ({"extra_body": {"chat_template_kwargs": []}}, "chat_template_kwargs: does not take this value; got []"),
        ({"messages": [{"content": "a"}]}, "a message: has no role"),
        ({"messages": [{"role": "user", "content": 5}]}, "a message: has a part that is not text"),
        ({"messages": user([{"type": "image_url"}])}, "a message: has a part that is not text; got image_url"),
        ({"messages": user("größer " * 400)}, "the prompt: is longer than the cache; got "),
        ({"extra_body": {"max_token": 3}}, "the request: has no such argument; got 'max_token'; expected max_tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_there(client: Any, options: dict[str, Any], message: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        ask(client, **{"stream": stream, **options})
    assert message in refusal.value.message and message in refusal.value.body["message"]
    assert refusal.value.type == "invalid_request_error"
    given = {**options, **options.get("extra_body", {})}
    where = message.partition(":")[0]
    assert refusal.value.param == (where if where in given else None)


def test_requests_that_cannot_be_read(client: Any, address: str) -> None:
    """In OpenAI's form, each."""
    for body in (
        b"{",
        b"\xff",
        b"[" * 100000,
        b"",
        b"[]",
        b"null",
        b'"text"',
        b'{"model": 5}',
        b"{}",
        b'{"stream": "yes"}',
        b'{"model": "\\ud83d"}',
        b'{"n": ' + b"1" * 5000 + b"}",
        b'{"temperature": NaN}',
    ):
        status, found = post(address, body)
        assert status == 400 and set(found["error"]) == {"message", "type", "param", "code"}, (body, found)
    for path, status in (("/v1/complete", 404), ("/health", 405), ("/", 404)):
        found = post(address, b"{}", path)
        assert found[0] == status and "POST /v1/chat/completions" in found[1]["error"]["message"]
    assert ask(client, model="gpt").model == "gpt"  # there is one model
    assert [each.id for each in client.models.list()] == ["talker"] and client.models.retrieve("talker").id == "talker"
    with pytest.raises(openai.NotFoundError) as refusal:
        client.models.retrieve("gpt")
    assert refusal.value.code == "model_not_found" and "got 'gpt'; expected 'talker'" in refusal.value.message


def test_requests_at_once_and_one_that_is_given_up(client: Any) -> None:
    expected = ask(client, max_tokens=12).choices[0].message.content
    chunks = ask(client, max_tokens=200, stream=True, extra_body={"ignore_eos": True})
    next(iter(chunks))
    chunks.close()
    found: list[str] = []
    at_once(lambda _: found.append(ask(client, max_tokens=12).choices[0].message.content), 20)
    assert found == [expected] * 20


def test_completions(client: Any, talker: Path) -> None:
    """Texts and token ids, several at once, echoed, with log probabilities of the prompt: as lm-eval asks for them."""
    llm = LLM(talker, device="cpu")
    params = SamplingParams(max_tokens=5, logprobs=2, prompt_logprobs=2)
    expected = llm.generate(["the lazy dog", "fox"], params)
    for prompts in (["the lazy dog", "fox"], [each.prompt_token_ids for each in expected]):
        found = client.completions.create(
            model="any", prompt=prompts, max_tokens=5, temperature=0, echo=True, logprobs=2, n=2
        )
        assert [each.index for each in found.choices] == [0, 1, 2, 3]
        for choice, whole in zip(found.choices, [each for each in expected for _ in range(2)], strict=True):
            answer = whole.outputs[0]
            assert choice.text.endswith(answer.text) and "".join(choice.logprobs.tokens) == choice.text
            rows = [*(whole.prompt_logprobs or ()), *(answer.logprobs or ())]
            for token, row, value, top in zip(
                whole.prompt_token_ids + answer.token_ids, rows, choice.logprobs.token_logprobs,
                choice.logprobs.top_logprobs, strict=True,
            ):  # fmt: skip
                assert (row is None) == (value is None) == (top is None)
                assert row is None or (abs(row[token].logprob - value) < 1e-4 and value in top.values())
        assert found.usage.prompt_tokens == sum(len(each.prompt_token_ids) for each in expected)
    chunks = list(client.completions.create(
        model="any", prompt="fox", max_tokens=5, temperature=0, echo=True, logprobs=0, stream=True,
        stream_options={"include_usage": True},
    ))  # fmt: skip
    assert "".join(each.choices[0].text for each in chunks[:-1]) == "fox" + expected[1].outputs[0].text
    assert sum(len(each.choices[0].logprobs.tokens) for each in chunks[:-1]) == chunks[-1].usage.total_tokens
    scored = client.completions.create(model="any", prompt="fox", max_tokens=0, echo=True, logprobs=1)
    assert scored.choices[0].text == "fox" and scored.usage.completion_tokens == 0
    assert len(scored.choices[0].logprobs.token_logprobs) == scored.usage.prompt_tokens
    bad: list[Any] = [None, 5, [], [[]], [5, "a"], ["a", 5], [[True]], [10**6], [-1], ""]
    for prompt in bad:
        for echo in (False, True):
            with pytest.raises(openai.BadRequestError, match="prompt"):
                client.completions.create(model="any", prompt=prompt, extra_body={"echo": echo})


def test_log_probabilities_and_penalties_of_a_chat(client: Any, talker: Path) -> None:
    (expected,) = LLM(talker, device="cpu").chat(MESSAGES, SamplingParams(max_tokens=6, logprobs=3))
    found = ask(client, max_tokens=6, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    rows = expected.outputs[0].logprobs or []
    for token, row, entry in zip(expected.outputs[0].token_ids, rows, found, strict=True):
        assert abs(entry.logprob - row[token].logprob) < 1e-4 and entry.token == row[token].decoded_token
        values = [each.logprob for each in entry.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True) and values[0] == entry.logprob
    penalised = ask(client, max_tokens=20, frequency_penalty=2, presence_penalty=2).choices[0].message.content
    assert penalised != ask(client, max_tokens=20).choices[0].message.content


def slow_model(folder: Path) -> Path:
    """Return a model whose prompts of four thousand tokens, and answers, take some seconds."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8}
    config = LlamaConfig(vocab_size=256, max_position_embeddings=4096, hidden_act="relu", eos_token_id=None, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def hang_up(address: str, body: dict[str, Any], after: float) -> None:
    """Ask, and hang up without an answer."""
    host, port = address.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=after)
    with contextlib.suppress(TimeoutError):
        connection.request("POST", "/v1/completions", json.dumps(body), {
            "content-type": "application/json", "authorization": "Bearer secret",
        })  # fmt: skip
        connection.getresponse().read(1)
    connection.close()


@pytest.mark.slow
def test_clients_that_hang_up_a_full_queue_a_key_and_a_limit(tmp_path: Path) -> None:
    options = ("--api-key", "secret", "--max-waiting", "1", "--max-body-bytes", "200000")
    with serving(slow_model(tmp_path), *options) as (_, address):
        assert post(address, b"{}", "/v1/completions")[0] == 401
        assert urllib.request.urlopen(f"{address}/health").status == 200
        for key in ("secre", "secret2", "größer"):
            with pytest.raises((openai.AuthenticationError, UnicodeEncodeError)):
                openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0).models.list()
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=0)
        with pytest.raises(openai.APIStatusError) as refusal:
            client.completions.create(model="any", prompt="a" * 200001)
        assert refusal.value.status_code == 413

        def short() -> Any:
            return client.completions.create(model="any", prompt="a", max_tokens=1)

        long: dict[str, Any] = {"prompt": [5] * 4000, "max_tokens": 1}
        answer: dict[str, Any] = {"prompt": [5], "max_tokens": 4000, "ignore_eos": True}
        short()
        for body in (long, answer, answer | {"stream": True}):
            began = time.monotonic()
            hang_up(address, body, 2)
            assert body.get("stream") or time.monotonic() - began > 1.9, "too quick for this test"
            began = time.monotonic()
            short()
            assert time.monotonic() - began < 1.5
        holding = [threading.Thread(target=hang_up, args=(address, answer, 4), daemon=True) for _ in range(2)]
        for each in holding:
            each.start()
        time.sleep(1)
        with pytest.raises(openai.RateLimitError) as full:
            short()
        assert full.value.response.headers["retry-after"] == "1"
        for each in holding:
            each.join()
        short()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["langchain", "litellm", "lm_eval"])
def test_real_clients(name: str, address: str, talker: Path) -> None:
    """In the environment of TWELLC_CLIENTS_PYTHON, or in this one; 20 requests at once, too."""
    python = os.environ.get("TWELLC_CLIENTS_PYTHON", sys.executable)
    command = [python, str(ROOT / "tests" / "examples" / "clients.py"), name, f"{address}/v1", str(talker)]
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **offline})
    if run.returncode == 3 and not os.environ.get("TWELLC_REQUIRE_CLIENTS"):
        pytest.skip(f"{run.stderr.strip()} in {python}")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.strip().splitlines()[-1])
    llm, params = LLM(talker, device="cpu"), SamplingParams(max_tokens=14, logprobs=1)
    assert found["completion"] == llm.generate("the lazy dog", params)[0].outputs[0].text
    if name == "lm_eval":
        for (context, whole), (likely, greedy) in zip(found["tokens"], found["likely"], strict=True):
            (output,) = llm.generate([whole], SamplingParams(max_tokens=1, prompt_logprobs=1))
            rows = list(zip(whole, output.prompt_logprobs or (), strict=True))[len(context) :]
            assert likely == pytest.approx(sum(row[token].logprob for token, row in rows if row), abs=1e-3)
            assert greedy == all(row[token].rank == 1 for token, row in rows if row)
        return
    answer = llm.chat(MESSAGES, params)[0].outputs[0]
    assert found["text"] == found["streamed"] == answer.text and found["tokens"] == len(answer.token_ids)
    assert found["at once"] == [answer.text] * 20
    first = (answer.logprobs or [])[0][answer.token_ids[0]].logprob
    assert found["first"] == pytest.approx(first, abs=1e-4)


def ends_by(server: subprocess.Popen[bytes], address: str, signals: tuple[signal.Signals, ...], busy: bool) -> None:
    """Demand that signals end a server with all of its processes, in an answer, too, and that the port is free then."""
    psutil = pytest.importorskip("psutil")
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    if busy:
        chunks = iter(ask(client, model="any", max_tokens=200, stream=True, extra_body={"ignore_eos": True}))
        next(chunks)
    family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    for each in signals:
        os.kill(server.pid, each)
        time.sleep(0.1)
    _, alive = psutil.wait_procs(family[1:], timeout=5)
    server.wait(5)
    assert not alive
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", int(address.rpartition(":")[2])))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signals", "busy"),
    [
        ((signal.SIGTERM,), False),
        ((signal.SIGTERM, signal.SIGTERM), True),
        ((signal.SIGINT,), True),
        ((signal.SIGKILL,), True),
    ],
)
def test_signals_end_all_of_it(signals: tuple[signal.Signals, ...], busy: bool, bytelm: Path) -> None:
    with serving(bytelm) as (server, address):
        ends_by(server, address, signals, busy)


def test_a_signal_ends_all_of_it(served: tuple[subprocess.Popen[bytes], str]) -> None:
    """The last test of the module: the server of all others is gone then."""
    ends_by(*served, (signal.SIGTERM,), True)
