"""`twellc generate`: what it prints, and where."""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest

from tests.twellc.test_cli import failed
from twellc import LLM, SamplingParams
from twellc.cli import main

GREEDY = SamplingParams(max_tokens=8)
DEF = "import os\n\n\ndef "


@pytest.fixture(scope="module")
def load_once() -> Callable[..., LLM]:
    remembered = functools.cache(LLM)

    def load(model: Path, **options: Any) -> LLM:
        return remembered(model, **{"device": "cpu", **options})

    return load


@pytest.fixture(autouse=True)
def remembered(load_once: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twellc.generation.llm.LLM", load_once)


def generate(*arguments: object, given: str | bytes = "", tokens: int = 8) -> click.testing.Result:
    shared = ("generate", "--device", "cpu", "--max-tokens", tokens, *arguments)
    return click.testing.CliRunner().invoke(main, list(map(str, shared)), input=given)


def refused(done: click.testing.Result, *messages: str) -> None:
    failed(done, *messages)
    assert done.stdout == ""


@pytest.fixture(scope="module")
def answer(bytelm: Path, load_once: Callable[..., LLM]) -> str:
    return load_once(bytelm).generate(DEF, GREEDY)[0].outputs[0].text


def test_bytelm_answers(bytelm: Path, answer: str) -> None:
    done = generate(bytelm, "--prompt", DEF)
    assert (done.exit_code, done.stdout) == (0, answer + "\n")
    assert re.search(r"^Note: prefill \d+ tokens/s, decode \d+ tokens/s\.$", done.stderr, re.MULTILINE)
    assert generate(bytelm, "--prompt", DEF, "--stream").stdout == done.stdout
    quiet = generate(bytelm, "--prompt", DEF, "-q")
    assert (quiet.stdout, quiet.stderr) == (done.stdout, "")
    told = generate(bytelm, "--prompt", DEF, "--stats").stderr
    assert "4 feed-forward blocks by the twell ops; prompts: 1 of 17 tokens; new tokens: 8 in 8 steps; " in told
    assert re.search(r"between steps \d+\.\d us, \d+\.\d% of the time", told)


def test_json(bytelm: Path, answer: str) -> None:
    found = json.loads(generate(bytelm, "--prompt", DEF, "--json").stdout)
    (given,) = found["answers"]
    assert given["prompt"] == DEF and given["finished"] is True
    assert given["outputs"] == [
        {"index": 0, "text": answer, "token_ids": list(answer.encode()), "finish_reason": "length", "stop_reason": None}
    ]
    assert found["stats"]["new_tokens"] == 8 and found["stats"]["decode_tokens_per_second"] > 0
    *pieces, last = map(json.loads, generate(bytelm, "--prompt", DEF, "--json", "--stream").stdout.splitlines())
    assert "".join(piece["outputs"][0]["text"] for piece in pieces) == answer
    assert last["stats"]["new_tokens"] == 8


def test_stops_and_draws(bytelm: Path, answer: str) -> None:
    prompt = ("--prompt", DEF)
    assert generate(bytelm, *prompt, "--stop", "zzz", "--stop", answer[5:8]).stdout == answer[:5] + "\n"
    drawn = ("--temperature", "1.1", "--top-k", 40, "--top-p", "0.95", "--min-p", "0.01", "--repetition-penalty", "1.1")
    first, again, other = (generate(bytelm, *prompt, *drawn, "--seed", seed, tokens=16).stdout for seed in (1, 1, 2))
    assert first == again != other


def test_prompts_of_a_file(talker: Path, load_once: Callable[..., LLM], tmp_path: Path) -> None:
    llm = load_once(talker)
    plain = [each.outputs[0].text for each in llm.generate(["fox", "größer"], GREEDY)]
    (tmp_path / "p.txt").write_text("fox\n\ngrößer\n")
    done = generate(talker, "--prompts-file", tmp_path / "p.txt", "--no-chat-template")
    assert done.stdout == "--- 1 of 2 ---\n{}\n--- 2 of 2 ---\n{}\n".format(*plain)
    conversation = [{"role": "user", "content": "fox"}]
    talked = llm.chat(conversation, GREEDY)[0].outputs[0].text
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "fox"}) + "\n" + json.dumps({"messages": conversation}))
    answers = json.loads(generate(talker, "--prompts-file", tmp_path / "p.jsonl", "--json").stdout)["answers"]
    assert [each["outputs"][0]["text"] for each in answers] == [talked, talked] != [plain[0], plain[0]]
    what = "--no-chat-template: there are conversations, which the template writes down"
    refused(generate(talker, "--prompts-file", tmp_path / "p.jsonl", "--no-chat-template"), what)


def test_a_mistake_in_a_prompt_of_a_file(talker: Path, tmp_path: Path) -> None:
    long = {"role": "user", "content": "fox " * 300}
    for others, line, message in (
        (["--no-chat-template"], {"prompt": ""}, "is empty"),
        ([], {"messages": [long]}, "is longer than the cache; got "),
        ([], {"messages": [{"role": 1}]}, "is not a list of messages; got "),
    ):
        path = tmp_path / "p.jsonl"
        path.write_text("\n\n".join(map(json.dumps, [{"prompt": "fox"}, line, {"prompt": "dog"}])))
        failed(generate(talker, "--prompts-file", path, *others), f"{path}, line 3: {message}")


def test_lines_of_a_file(bytelm: Path, tmp_path: Path) -> None:
    """A line ends where editors end it, not at each character that may separate lines. A byte order mark is dropped."""
    (tmp_path / "p.txt").write_bytes("\ufeffa\x0cb\r\n\r\n c \u2028d\x85\re\n".encode())
    (tmp_path / "p.JSONL").write_text('{"prompt": "a\u2028b"}\n\n{"prompt": "c"}', encoding="utf-8")
    for name, prompts in (("p.txt", ["a\x0cb", " c \u2028d\x85", "e"]), ("p.JSONL", ["a\u2028b", "c"])):
        done = generate(bytelm, "--json", "--prompts-file", tmp_path / name, tokens=1)
        assert [each["prompt"] for each in json.loads(done.stdout)["answers"]] == prompts


def test_lines_of_standard_input(bytelm: Path, talker: Path, load_once: Callable[..., LLM]) -> None:
    llm = load_once(bytelm)
    expected = [each.outputs[0].text for each in llm.generate(["class A", "def"], GREEDY)]
    done = generate(bytelm, given="class A\n\ndef\n")
    assert (done.exit_code, done.stdout) == (0, "".join(f"{text}\n" for text in expected))
    # With a template the second line goes on with the conversation.
    llm = load_once(talker)
    messages: list[dict[str, Any]] = []
    said = []
    for line in ("fox", "dog"):
        messages.append({"role": "user", "content": line})
        said.append(llm.chat(messages, GREEDY)[0].outputs[0].text)
        messages.append({"role": "assistant", "content": said[-1]})
    assert generate(talker, given="fox\ndog\n").stdout == "".join(f"{text}\n" for text in said)
    pieces = generate(talker, "--json", given="fox\n").stdout.splitlines()
    assert "".join(json.loads(piece)["outputs"][0]["text"] for piece in pieces) == said[0]
    failed(generate(bytelm, given=b"a\xff\n", tokens=1), "standard input: is not a text in UTF-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt", "a" * 2000), "--prompt: is longer than the cache; got 2001 tokens; expected 1024 at most"),
        (("--prompt", "abcd", "--max-model-len", 4), "got 5 tokens; expected 4 at most"),
        (("--prompt", "a", "--max-model-len", 1025), "--max-model-len: is out of range for this model's cache"),
        (("--prompt", "a", "--chat-template"), "has no tokenizer, and so no chat template"),
        (("--prompt", "a", "--prompts-file", "b"), "--prompts-file: there is a prompt already; got --prompt, too"),
        (("--prompt", "a", "--temperature", "nan"), "Invalid value for '--temperature': nan is out of its range"),
        (("--prompt", "a", "--top-p", 0), "'--top-p': 0 is out of its range; expected a number above 0 to 1."),
        (("--prompt", "a", "--top-k", -2), "'--top-k': -2 is out of its range; expected an integer from -1 on."),
        (("--prompt", "a", "--seed", 1.5), "'--seed': 1.5 is not an integer; expected an integer from -1 to 922"),
        (("--prompt", "a", "--dtype", "int8"), "--dtype"),
        (("--prompt", "a", "--tokenizer", "nowhere"), "--tokenizer nowhere: there is no such folder"),
        (("--prompt", "a", "--device", "tpu"), "--device tpu: is not a device"),
        (
            ("--prompt", "a", "--weights", "fp8", "--fp8-error", 1),
            "--fp8-error 1.0: is measured on samples; got none; expected --text",
        ),
        (("--prompt", "a", "--text", "a.txt"), "--text a.txt: the model is run only to measure FP8"),
        (("--prompts-file", "missing.txt"), "missing.txt"),
    ],
)
def test_bad_options(bytelm: Path, arguments: tuple[object, ...], message: str) -> None:
    refused(generate(bytelm, *arguments), message)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", b"", "there is no prompt in it"),
        ("p.txt", b"\xff\xff", "is not a text in UTF-8"),
        ("p.jsonl", b"{", "line 1: is not JSON"),
        ("p.jsonl", b'{"prompt": "a"}\n{"text": "a"}', "line 2: holds neither a prompt nor messages"),
        ("p.jsonl", b'\n\n{"text": "a"}', "line 3: holds neither a prompt nor messages"),
        ("p.jsonl", b'{"prompt": "a"}\n\n{"prompt": "a\\ud800"}', "p.jsonl, line 3: is not a text in UTF-8"),
        ("p.txt", b"a\n\n" + b"a" * 2000, "p.txt, line 3: is longer than the cache; got 2001 tokens"),
        ("p.jsonl", b"[]", "line 1: holds neither a prompt nor messages"),
    ],
)
def test_bad_files(bytelm: Path, tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    failed(generate(bytelm, "--prompts-file", tmp_path / name), message)


def test_in_fp8(bytelm: Path, answer: str, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("def read_text(path):\n    return path.read_text()\n")
    measured = ("--text", text, "--prompt", DEF)
    done = generate(bytelm, "--weights", "fp8:blocks", "--fp8-error", 0.5, *measured, "--stats")
    assert done.exit_code == 0 and done.stdout
    assert re.search(r"(\d+) feed-forward blocks \(\1 in FP8\) by the twell ops", done.stderr)
    done = generate(bytelm, "--weights", "fp8:blocks", "--fp8-error", 0.0001, *measured)
    assert done.stdout == f"{answer}\n"
    assert re.search(r"4 feed-forward blocks are not read in FP8: .*, weights in 16 bits, FP8 changes", done.stderr)
    refused(generate(bytelm, "--fp8-error", 0.5, "--prompt", DEF), "--fp8-error 0.5: no weights are quantised")
