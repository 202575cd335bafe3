"""`twellc generate` on the command line. Importing this imports nothing large."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from twellc.base.errors import UserError, first_line
from twellc.base.files import read_file
from twellc.commands.options import FilePath, options_of
from twellc.commands.terminal import Command, say, show_progress
from twellc.generation.sampling import PromptError, SamplingParams
from twellc.options.commands import GenerateOptions

if TYPE_CHECKING:
    from twellc.generation.llm import LLM
    from twellc.generation.sampling import GenerationStats, RequestOutput

# What the command line calls arguments of `LLM` and `SamplingParams`; others have the same name.
_OPTIONS = {"max_model_len": "--max-model-len", "compiled": "--compiled", "max_tokens": "--max-tokens"}


@click.command(cls=Command)
@click.argument("model", type=FilePath())
@options_of(GenerateOptions)
@click.option(
    "--chat-template/--no-chat-template",
    "template",
    default=None,
    help="Whether a prompt is a message to write down by the tokenizer's chat template. Default: where it has one.",
)
def generate(model: Path, template: bool | None, **options: Any) -> None:
    """Answer prompts by MODEL: a Hugging Face directory of a causal language model, or a plan with a key-value cache.

    A directory runs in torch, its feed-forward blocks by the kernels. Without --prompt and --prompts-file it answers
    standard input line by line; with a chat template as a conversation.
    """
    given = GenerateOptions(**options)
    if given.prompt is not None and given.prompts_file is not None:
        raise UserError("--prompts-file", "there is a prompt already", got="--prompt, too", fix="Leave one out.")
    sampling = {field.name: options[field.name] for field in fields(SamplingParams) if field.name in options}
    with _as_typed(*sampling):
        params = SamplingParams(**sampling)
    requests = None if given.prompts_file is None else _read_prompts(given.prompts_file)
    if given.prompt is not None:
        requests = [("--prompt", given.prompt)]
    with show_progress() as progress:
        progress("loading the model")
        from twellc.generation.llm import LLM, joined

        with _as_typed("device", "max_model_len", "compiled", "weights", "fp8_error", "linear"):
            llm = LLM(
                model,
                device=given.device,
                max_model_len=given.max_model_len,
                compiled=given.compiled,
                weights=given.weights,
                fp8_error=given.fp8_error,
                text=given.text,
                linear=given.linear,
            )
    for note in llm.notes:
        say("Note:", f"{note}.")
    writes = llm.has_chat_template if template is None else template
    if requests is None:
        _converse(llm, params, writes, given.as_json)
    else:
        outputs = _answer(llm, requests, params, writes)
        if given.stream and given.as_json:
            for output in outputs:
                click.echo(json.dumps(output.to_json()))
            click.echo(json.dumps({"stats": llm.stats.to_json()}))
        elif given.as_json:
            whole = joined(outputs)
            found = {"answers": [each.to_json() for each in whole], "stats": llm.stats.to_json()}
            click.echo(json.dumps(found, indent=2))
        elif given.stream and len(requests) == 1:
            for output in outputs:
                _show(output.outputs[0].text, end="")
            click.echo()
        else:
            for number, output in enumerate(joined(outputs), 1):
                if len(requests) > 1:
                    click.echo(f"--- {number} of {len(requests)} ---")
                _show(output.outputs[0].text)
    if llm.stats.new_tokens:
        _say_stats(llm.stats, given.stats)


@contextmanager
def _as_typed(*names: str) -> Iterator[None]:
    """Let messages about arguments name options as the command line does."""
    try:
        yield
    except UserError as error:
        if error.where not in names:
            raise
        option = _OPTIONS.get(error.where, f"--{error.where}".replace("_", "-"))
        raise error.at(option) from error


def _answer(llm: LLM, requests: list[tuple[str, Any]], params: SamplingParams, writes: bool) -> Iterator[RequestOutput]:
    """Answer texts and conversations; of each is said where it stands."""
    prompts = [prompt for _, prompt in requests]
    try:
        if all(isinstance(each, str) for each in prompts) and not writes:
            yield from llm.generate_stream(prompts, params)
        elif not writes and llm.has_chat_template:
            what = "there are conversations, which the template writes down"
            raise UserError("--no-chat-template", what, fix="Leave it out, or give prompts.")
        else:
            yield from llm.chat_stream([_conversation(each) for each in prompts], params)
    except PromptError as error:
        where, _ = requests[error.index]
        raise error.of(error.index, where) from error


def _conversation(request: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": request}] if isinstance(request, str) else request


def _converse(llm: LLM, params: SamplingParams, writes: bool, as_json: bool) -> None:
    """Answer standard input line by line."""
    messages: list[dict[str, Any]] = []
    while line := _next_line():
        messages.append({"role": "user", "content": line})
        answer = ""
        for output in llm.chat_stream(messages, params) if writes else llm.generate_stream(line, params):
            answer += output.outputs[0].text
            if as_json:
                click.echo(json.dumps(output.to_json()))
            else:
                _show(output.outputs[0].text, end="")
        if not as_json:
            click.echo()
        messages.append({"role": "assistant", "content": answer})


def _next_line() -> str:
    """Return the next line of standard input that is not empty; an empty text at its end."""
    while True:
        if sys.stdin.isatty():
            click.echo("> ", nl=False, err=True)
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise UserError("standard input", f"is not a text in UTF-8 ({error})") from error
        if not line and sys.stdin.isatty():
            click.echo(err=True)
        if not line or line.strip():
            return line.strip()


def _read_prompts(path: Path) -> list[tuple[str, Any]]:
    """Return the prompts of a file, texts and conversations, and where each stands."""
    try:
        text = read_file(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(str(path), f"is not a text in UTF-8 ({error})") from error
    # Not splitlines: it also splits at characters that stand within a line, and within JSON.
    every = enumerate(re.split("\r\n|\r|\n", text), 1)
    lines = [(f"{path}, line {number}", line) for number, line in every if line.strip()]
    if not lines:
        raise UserError(str(path), "there is no prompt in it")
    if path.suffix.lower() not in (".jsonl", ".ndjson"):
        return lines
    return [(where, _request(where, line)) for where, line in lines]


def _request(where: str, line: str) -> Any:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(where, f"is not JSON ({first_line(error)})") from error
    prompt = found.get("prompt") if isinstance(found, dict) else None
    messages = found.get("messages") if isinstance(found, dict) else None
    if isinstance(prompt, str):
        return prompt
    if isinstance(messages, list) and messages and all(isinstance(each, dict) for each in messages):
        return messages
    raise UserError(where, "holds neither a prompt nor messages", expected='{"prompt": "…"}, or {"messages": [{…}]}')


def _show(text: str, end: str = "\n") -> None:
    """Print a piece of an answer. A terminal gets no control characters that it would obey."""
    if sys.stdout.isatty():
        text = "".join(each if each in "\n\t" or each.isprintable() else ascii(each)[1:-1] for each in text)
    click.echo(text + end, nl=False)
    sys.stdout.flush()


def _say_stats(stats: GenerationStats, all_of_them: bool) -> None:
    """Say how fast it was, of the last call."""
    say(
        "Note:",
        f"prefill {stats.prefill_tokens_per_second:.0f} tokens/s, decode "
        f"{stats.decode_tokens_per_second:.0f} tokens/s.",
    )
    if all_of_them:
        gap = (
            "" if stats.gap_us is None else f"; between steps {stats.gap_us:.1f} us, {stats.gap_share:.1%} of the time"
        )
        say(
            "Note:",
            f"{stats.backend}; prompts: {stats.sequences} of {stats.prompt_tokens} tokens; new tokens: "
            f"{stats.new_tokens} in {stats.steps} steps{', each one CUDA graph' if stats.graph else ''}; first "
            f"tokens after {stats.first_token_seconds:.3f} s, the others in {stats.decode_seconds:.3f} s{gap}.",
        )
