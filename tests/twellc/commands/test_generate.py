"""`twellc generate`: what it prints, and where."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click.testing
import pytest

from tests.conftest import Cli
from twellc import LLM, SamplingParams
from twellc.cli import main

GREEDY = SamplingParams(max_tokens=24)
DEF = "import os\n\n\ndef "


def lines(prompt: str, *arguments: object) -> click.testing.Result:
    """Run the command with a standard input."""
    return click.testing.CliRunner().invoke(main, ["generate", *map(str, arguments)], input=prompt)


@pytest.fixture(scope="module")
def answer(bytelm: Path) -> str:
    return LLM(bytelm, device="cpu").generate(DEF, GREEDY)[0].outputs[0].text


def test_bytelm_answers(cli: Cli, bytelm: Path, answer: str) -> None:
    options = ("generate", bytelm, "--device", "cpu", "--prompt", DEF, "--max-new-tokens", 24)
    done = cli(*options)
    assert (done.exit_code, done.stdout) == (0, answer + "\n")
    assert re.search(r"^Note: prefill \d+ tokens/s, decode \d+ tokens/s\.$", done.stderr, re.MULTILINE)
    assert cli(*options, "--stream").stdout == done.stdout
    quiet = cli(*options, "-q")
    assert (quiet.stdout, quiet.stderr) == (done.stdout, "")
    told = cli(*options, "--stats").stderr
    assert "4 feed-forward blocks by the twell ops; prompts: 1 of 17 tokens; new tokens: 24 in 24 steps; " in told
    assert re.search(r"between steps \d+\.\d us, \d+\.\d% of the time", told)


def test_json(cli: Cli, bytelm: Path, answer: str) -> None:
    options = ("generate", bytelm, "--device", "cpu", "--prompt", DEF, "--max-new-tokens", 24, "--json")
    found = json.loads(cli(*options).stdout)
    (given,) = found["answers"]
    assert given["prompt"] == DEF and given["finished"] is True
    assert given["outputs"] == [
        {"index": 0, "text": answer, "token_ids": list(answer.encode()), "finish_reason": "length", "stop_reason": None}
    ]
    assert found["stats"]["new_tokens"] == 24 and found["stats"]["decode_tokens_per_second"] > 0
    *pieces, last = map(json.loads, cli(*options, "--stream").stdout.splitlines())
    assert "".join(piece["outputs"][0]["text"] for piece in pieces) == answer
    assert last["stats"]["new_tokens"] == 24


def test_stops_and_draws(cli: Cli, bytelm: Path, answer: str) -> None:
    options = ("generate", bytelm, "--device", "cpu", "--prompt", DEF, "--max-new-tokens", 24)
    assert cli(*options, "--stop", "zzz", "--stop", answer[5:8]).stdout == answer[:5] + "\n"
    drawn = ("--temperature", "1.1", "--top-k", 40, "--top-p", "0.95", "--min-p", "0.01", "--repetition-penalty", "1.1")
    first, again, other = (cli(*options, *drawn, "--seed", seed).stdout for seed in (1, 1, 2))
    assert first == again != other


def test_prompts_of_a_file(cli: Cli, talker: Path, tmp_path: Path) -> None:
    llm = LLM(talker, device="cpu")
    plain = [each.outputs[0].text for each in llm.generate(["fox", "größer"], GREEDY)]
    (tmp_path / "p.txt").write_text("fox\n\ngrößer\n")
    options = ("generate", talker, "--device", "cpu", "--max-new-tokens", 24, "--prompts-file")
    done = cli(*options, tmp_path / "p.txt", "--no-chat-template")
    assert done.stdout == "--- 1 of 2 ---\n{}\n--- 2 of 2 ---\n{}\n".format(*plain)
    conversation = [{"role": "user", "content": "fox"}]
    talked = llm.chat(conversation, GREEDY)[0].outputs[0].text
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "fox"}) + "\n" + json.dumps({"messages": conversation}))
    answers = json.loads(cli(*options, tmp_path / "p.jsonl", "--json").stdout)["answers"]
    assert [each["outputs"][0]["text"] for each in answers] == [talked, talked] != [plain[0], plain[0]]


def test_a_mistake_in_a_prompt_of_a_file(cli: Cli, talker: Path, tmp_path: Path) -> None:
    long = {"role": "user", "content": "fox " * 300}
    for others, line, message in (
        (["--no-chat-template"], {"prompt": ""}, "is empty"),
        ([], {"messages": [long]}, "is longer than the cache; got "),
        ([], {"messages": [{"role": 1}]}, "is not a list of messages; got "),
    ):
        path = tmp_path / "p.jsonl"
        path.write_text("\n\n".join(map(json.dumps, [{"prompt": "fox"}, line, {"prompt": "dog"}])))
        failed = cli("generate", talker, "--device", "cpu", "--prompts-file", path, *others)
        assert failed.exit_code == 2 and f"{path}, line 3: {message}" in failed.stderr, failed.stderr


def test_lines_of_a_file(cli: Cli, bytelm: Path, tmp_path: Path) -> None:
    """A line ends where editors end it, not at every character that may separate lines; a mark of order is no text."""
    options = ("generate", bytelm, "--device", "cpu", "--max-new-tokens", 1, "--json", "--prompts-file")
    (tmp_path / "p.txt").write_bytes("\ufeffa\x0cb\r\n\r\n c \u2028d\x85\re\n".encode())
    (tmp_path / "p.JSONL").write_text('{"prompt": "a\u2028b"}\n\n{"prompt": "c"}', encoding="utf-8")
    for name, prompts in (("p.txt", ["a\x0cb", " c \u2028d\x85", "e"]), ("p.JSONL", ["a\u2028b", "c"])):
        answers = json.loads(cli(*options, tmp_path / name).stdout)["answers"]
        assert [each["prompt"] for each in answers] == prompts


def test_conversations_need_the_template(cli: Cli, talker: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}')
    failed = cli("generate", talker, "--device", "cpu", "--prompts-file", tmp_path / "p.jsonl", "--no-chat-template")
    assert failed.exit_code == 2 and failed.stdout == ""
    assert "--no-chat-template: there are conversations, which the template writes down" in failed.stderr


def test_standard_input_that_is_no_text(bytelm: Path) -> None:
    arguments = ["generate", str(bytelm), "--device", "cpu", "--max-new-tokens", "1"]
    failed = click.testing.CliRunner().invoke(main, arguments, input=b"a\xff\n")
    assert failed.exit_code == 2 and "standard input: is not a text in UTF-8" in failed.stderr


def test_lines_of_standard_input(bytelm: Path, talker: Path) -> None:
    llm = LLM(bytelm, device="cpu")
    expected = [each.outputs[0].text for each in llm.generate(["class A", "def"], GREEDY)]
    done = lines("class A\n\ndef\n", bytelm, "--device", "cpu", "--max-new-tokens", 24)
    assert (done.exit_code, done.stdout) == (0, "".join(f"{text}\n" for text in expected))
    # With a template the second line goes on with the conversation.
    llm = LLM(talker, device="cpu")
    messages: list[dict[str, Any]] = []
    said = []
    for line in ("fox", "dog"):
        messages.append({"role": "user", "content": line})
        said.append(llm.chat(messages, GREEDY)[0].outputs[0].text)
        messages.append({"role": "assistant", "content": said[-1]})
    done = lines("fox\ndog\n", talker, "--device", "cpu", "--max-new-tokens", 24)
    assert done.stdout == "".join(f"{text}\n" for text in said)
    pieces = lines("fox\n", talker, "--device", "cpu", "--max-new-tokens", 24, "--json").stdout.splitlines()
    assert "".join(json.loads(piece)["outputs"][0]["text"] for piece in pieces) == said[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt", "a" * 2000), "--prompt: is longer than the cache; got 2001 tokens; expected 1024 at most"),
        (("--prompt", "abcd", "--max-length", 4), "got 5 tokens; expected 4 at most"),
        (("--prompt", "a", "--max-length", 1025), "--max-length: is out of range for this model's cache"),
        (("--prompt", "a", "--chat-template"), "has no tokenizer, and so no chat template"),
        (("--prompt", "a", "--prompts-file", "b"), "--prompts-file: there is a prompt already; got --prompt, too"),
        (("--prompt", "a", "--temperature", "nan"), "temperature: is out of its range; got nan"),
        (("--prompt", "a", "--device", "tpu"), "--device tpu: is not a device"),
        (("--prompts-file", "missing.txt"), "missing.txt"),
    ],
)
def test_bad_options(cli: Cli, bytelm: Path, arguments: tuple[object, ...], message: str) -> None:
    failed = cli("generate", bytelm, *arguments)
    assert failed.exit_code == 2 and failed.stdout == ""
    assert failed.stderr.count("Error: ") == 1 and message in failed.stderr and "Traceback" not in failed.stderr


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
def test_bad_files(cli: Cli, bytelm: Path, tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    failed = cli("generate", bytelm, "--prompts-file", tmp_path / name)
    assert failed.exit_code == 2 and message in failed.stderr and failed.stderr.count("Error: ") == 1


def test_bad_models(cli: Cli, t5: Path, llama: Path, archive: Path, tmp_path: Path) -> None:
    for model, message in (
        (t5, "t5, a T5ForConditionalGeneration: is not a causal language model; expected"),
        (llama, "has no tokenizer; expected tokenizer.json"),
        (tmp_path / "nothing", "nothing"),
        (archive, "gated.pt2"),
    ):
        failed = cli("generate", model, "--prompt", "a")
        assert failed.exit_code == 2 and message in failed.stderr and failed.stderr.count("Error: ") == 1, failed.stderr
