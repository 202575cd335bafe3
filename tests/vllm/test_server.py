"""The commands of docs/serve.md: a server for the example model, asked as a whole and as a stream."""

import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest
import torch
import transformers

from tests.conftest import ROOT

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

COMMANDS = re.findall(
    r"^    ((?:vllm|curl) .*examples/bytelm.*)$", (ROOT / "docs" / "serve.md").read_text(), re.MULTILINE
)
PORT = "8000"


@pytest.fixture(scope="module")
def server(vllm_environment: Callable[..., dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start the server of the page on a free port, and return that; its log goes to a file."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = shlex.split(COMMANDS[0])
    assert command[:2] == ["vllm", "serve"]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.cli.main", *command[1:], "--host", "127.0.0.1", "--port", port],
            cwd=ROOT,
            env=vllm_environment(),
            stdout=file,
            stderr=file,
        )
        try:
            until = time.monotonic() + 400
            while not answers(f"http://127.0.0.1:{port}/health"):
                assert process.poll() is None and time.monotonic() < until, log.read_text()
                time.sleep(1)
            assert "4 of 4 feed-forward blocks are run by twellc" in log.read_text()
            yield port
        finally:
            process.terminate()
            process.wait(timeout=60)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def test_the_page_has_both_commands() -> None:
    assert [command.split()[0] for command in COMMANDS] == ["vllm", "curl"]


def test_asking(server: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    command = [part.replace(f"localhost:{PORT}", f"127.0.0.1:{server}") for part in shlex.split(COMMANDS[1])]
    request = json.loads(command[-1])
    reply = json.loads(subprocess.run([*command, "-s"], check=True, capture_output=True, text=True).stdout)
    text = reply["choices"][0]["text"]
    assert reply["usage"]["completion_tokens"] == request["max_tokens"] == len(text.encode())
    # The first tokens: later ones may differ where the model is in doubt.
    assert text[:8] == generate(request["prompt"], 8)


def test_asking_for_a_stream(server: str) -> None:
    body = {"model": "examples/bytelm", "prompt": "def ", "max_tokens": 40, "temperature": 0, "stream": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{server}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=100) as reply:
        lines = [line.removeprefix("data: ") for line in reply.read().decode().splitlines() if line]
    assert lines[-1] == "[DONE]"
    pieces = [json.loads(line)["choices"][0]["text"] for line in lines[:-1]]
    assert len([piece for piece in pieces if piece]) > 1  # a busy server sends several tokens at once
    text = "".join(pieces)
    assert len(text.encode()) == 40 and text[:5] == generate("def ", 5)


def generate(prompt: str, tokens: int) -> str:
    """Return what transformers generates."""
    model = transformers.AutoModelForCausalLM.from_pretrained(ROOT / "examples" / "bytelm")
    ids = torch.tensor([[0, *prompt.encode()]])
    found = model.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return bytes(found[0, ids.shape[1] :].tolist()).decode()
