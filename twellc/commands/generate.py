"""`twellc generate` on the command line. Importing this imports nothing large."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from twellc.base.errors import UserError, first_line
from twellc.base.files import read_file
from twellc.commands.options import FilePath, options_of
from twellc.commands.terminal import Command, say, show_progress
from twellc.generation.sampling import PromptError, SamplingParams
from twellc.options.commands import GenerateOptions, LLMOptions
from twellc.options.option import declared

if TYPE_CHECKING:
    from twellc.generation.llm import LLM
    from twellc.generation.sampling import GenerationStats, RequestOutput

# The fields of `SamplingParams` that are options.
_SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop")
_ARGUMENTS = (*_SAMPLING, *(field.name for field in declared(LLMOptions)))


@click.command(cls=Command)
@click.argument("model", type=FilePath())
@options_of(GenerateOptions)
@options_of(SamplingParams, _SAMPLING)
@click.option(
    "--chat-template/--no-chat-template",
    "template",
    default=None,
    help="Whether a prompt is a message to write down by the tokenizer's chat template. Default: where it has one.",
)
@click.option("--linear", hidden=True, help="Linear layers are taken by the number of tokens of a call.")
def generate(model: Path, template: bool | None, linear: str | None, **options: Any) -> None:
    """Answer prompts by MODEL: a Hugging Face directory of a causal language model, or a plan with a key-value cache.

    A directory runs in torch, its feed-forward blocks and linear layers by the kernels. Without --prompt and
    --prompts-file it answers standard input line by line; with a chat template as a conversation.
    """
    sampling = {name: options.pop(name) for name in _SAMPLING}
    given = GenerateOptions(**options)
    if linear is not None:
        what = "has no effect any more, since linear layers are taken by the number of tokens of a call"
        say("Note:", f"--linear {what}; the next version does not know it.")
    if given.prompt is not None and given.prompts_file is not None:
        raise UserError("--prompts-file", "there is a prompt already", got="--prompt, too", fix="Leave one out.")
    params = SamplingParams(**sampling)
    requests = None if given.prompts_file is None else _read_prompts(given.prompts_file)
    if given.prompt is not None:
        requests = [("--prompt", given.prompt)]
    with _as_typed(), show_progress() as progress:
        progress("loading the model")
        from twellc.generation.llm import LLM

        llm = LLM(model, **{field.name: getattr(given, field.name) for field in declared(LLMOptions)})
    for note in llm.notes:
        say("Note:", f"{note}.")
    writes = llm.has_chat_template if template is None else template
    with _as_typed():
        if requests is None:
            _converse(llm, params, writes, given.as_json)
        else:
            _print_answers(_answer(llm, requests, params, writes), llm, len(requests), given)
    if llm.stats.new_tokens:
        _say_stats(llm.stats, given.stats)


def _print_answers(outputs: Iterator[RequestOutput], llm: LLM, count: int, given: GenerateOptions) -> None:
    """Print the answers to `count` prompts."""
    from twellc.generation.llm import joined

    if given.stream and given.as_json:
        for output in outputs:
            click.echo(json.dumps(output.to_json()))
        click.echo(json.dumps({"stats": llm.stats.to_json()}))
    elif given.as_json:
        whole = joined(outputs)
        click.echo(json.dumps({"answers": [each.to_json() for each in whole], "stats": llm.stats.to_json()}, indent=2))
    elif given.stream and count == 1:
        for output in outputs:
            _show(output.outputs[0].text, end="")
        click.echo()
    else:
        for number, output in enumerate(joined(outputs), 1):
            if count > 1:
                click.echo(f"--- {number} of {count} ---")
            _show(output.outputs[0].text)


@contextmanager
def _as_typed() -> Iterator[None]:
    """Let messages about arguments name options as the command line does."""
    try:
        yield
    except UserError as error:
        name, value, given = error.where.partition(" ")
        if name not in _ARGUMENTS:
            raise
        raise error.at(f"--{name.replace('_', '-')}{value}{given}") from error


def _answer(llm: LLM, requests: list[tuple[str, Any]], params: SamplingParams, writes: bool) -> Iterator[RequestOutput]:
    """Answer texts and conversations, each given with its place for messages."""
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
    """Return the next line of standard input that is not empty; an empty text at the end."""
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
    """Return the prompts of a file, texts and conversations, each with its place."""
    try:
        text = read_file(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(str(path), f"is not a text in UTF-8 ({error})") from error
    # Not splitlines: it also splits at characters that may be within a line, and within JSON.
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
    """Print a piece of an answer; for a terminal without control characters that it would obey."""
    if sys.stdout.isatty():
        text = "".join(each if each in "\n\t" or each.isprintable() else ascii(each)[1:-1] for each in text)
    click.echo(text + end, nl=False)
    sys.stdout.flush()


def _say_stats(stats: GenerationStats, all_of_them: bool) -> None:
    """Print how fast the last call was."""
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
