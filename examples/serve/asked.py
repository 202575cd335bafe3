"""Requests: from the JSON of OpenAI's API to what `twellc.LLM` takes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from twellc import SamplingParams, UserError
from twellc.base.records import parse_json
from twellc.generation.sampling import misfit
from twellc.generation.vllm_names import SAMPLING, Names, refuse_others

MOST_ANSWERS, MOST_LOGPROBS = 128, 20
# As many tokens as OpenAI's completions have unless told otherwise.
TOKENS_OF_A_COMPLETION = 16
_TEMPLATE = ("chat_template_kwargs", "add_generation_prompt", "continue_final_message")
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
    "suffix": (("",), "is not there: an answer stands behind its prompt"),
    "store": ((False,), "answers are not stored"),
    "prompt_logprobs": ((), "are returned by /v1/completions, with echo and logprobs"),
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
        params: How tokens are chosen, for each answer of a prompt.
        streams: Whether pieces are sent as they come.
        wants_usage: Whether a stream ends with the numbers of tokens.
        messages: The conversation, texts alone; None for a completion.
        template: What the chat template takes besides.
        prompts: The prompts of a completion, texts or token ids.
        echo: Whether a completion begins with its prompt.
        answers: Whether there are answers at all, and not prompts alone.
    """

    model: str
    params: list[SamplingParams]
    streams: bool
    wants_usage: bool
    messages: list[dict[str, str]] | None = None
    template: dict[str, Any] = field(default_factory=dict)
    prompts: list[Any] = field(default_factory=list)
    echo: bool = False
    answers: bool = True


def parse(body: bytes) -> Any:
    """Return what the body of a request says.

    Raises:
        UserError: It is not JSON, or has texts that are none in UTF-8.
    """
    try:
        return parse_json(body)
    except UnicodeError as error:
        raise UserError("the request", f"has a text that is not one in UTF-8 ({error.reason})") from error  # type: ignore[attr-defined]
    except ValueError as error:
        raise UserError("the request", f"cannot be read as JSON ({error})") from error


def read(given: Any, model: str, *, is_chat: bool, trusts_templates: bool) -> Asked:
    """Take the JSON of a request; what it leaves out is as `SamplingParams` has it, and OpenAI.

    Args:
        given: The JSON.
        model: The name of the model, where it has none.
        is_chat: Whether it asks for a chat completion, and not for a completion.
        trusts_templates: Whether it may have a chat template.

    Raises:
        UserError: It asks for what is not there, or for values out of range.
    """
    if not isinstance(given, dict):
        raise UserError("the request", "must be a JSON object", got=type(given).__name__)
    given = {name: value for name, value in given.items() if value is not None}
    name, streams = _taken(given, "model", model, str, "a name"), _flag(given, "stream")
    options = _taken(given, "stream_options", None, dict, "an object")
    if options is not None and not streams:
        raise UserError("stream_options", "is there for streams alone", fix="Set stream, or leave it out.")
    wants_usage = (options or {}).get("include_usage")
    if wants_usage is not None and not isinstance(wants_usage, bool):
        raise misfit("stream_options", options, "include_usage: true or false")
    count = given.pop("n", 1)
    if type(count) is not int or not 1 <= count <= MOST_ANSWERS:
        raise misfit("n", count, f"an integer from 1 to {MOST_ANSWERS}")
    of_kind = _chat(given, trusts_templates) if is_chat else _completion(given)
    if isinstance(given.get("logit_bias"), dict):  # names of JSON are texts; a token has few digits
        bias = given["logit_bias"]
        given["logit_bias"] = {
            int(key) if key.isdecimal() and len(key) < 20 else key: value for key, value in bias.items()
        }
    known = {each.name for each in fields(SamplingParams)} - {"prompt_logprobs"}
    mine = of_kind.pop("sampling")
    others = {name: value for name, value in given.items() if name not in known}
    refuse_others("the request", {**SAMPLING, **OPENAI}, [*known, "messages", "prompt"], others)
    chosen = {name: value for name, value in given.items() if name in known} | mine
    seed = SamplingParams(**chosen).seed
    params = [
        SamplingParams(**chosen | ({} if seed in (None, -1) else {"seed": (seed + number) % 2**63}))
        for number in range(count)
    ]
    return Asked(name, params, streams, bool(wants_usage), **of_kind)


def _taken(given: dict[str, Any], name: str, default: Any, kind: type, expected: str) -> Any:
    """Take a value of one kind out of a request."""
    value = given.pop(name, default)
    if value is not default and not isinstance(value, kind):
        raise misfit(name, value, expected)
    return value


def _flag(given: dict[str, Any], name: str) -> bool:
    value = given.pop(name, False)
    if value is not None and not isinstance(value, bool):
        raise misfit(name, value, "true or false")
    return bool(value)


def _likeliest(given: dict[str, Any], name: str) -> int | None:
    """Take how many of the likeliest tokens are asked for."""
    value = given.pop(name, None)
    if value is not None and (type(value) is not int or not 0 <= value <= MOST_LOGPROBS):
        raise misfit(name, value, f"an integer from 0 to {MOST_LOGPROBS}")
    return value


def _chat(given: dict[str, Any], trusts_templates: bool) -> dict[str, Any]:
    """Take what chat completions alone have."""
    messages = given.pop("messages", None)
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise misfit("messages", messages, "a list of at least one message")
    template = {name: given.pop(name) for name in _TEMPLATE if name in given}
    _taken(dict(template), "chat_template_kwargs", {}, dict, "an object")
    for name in ("add_generation_prompt", "continue_final_message"):
        _flag(dict(template), name)
    if "chat_template" in given:
        if not trusts_templates:
            what, fix = "is not taken from requests", "Start the server with --trust-request-chat-template."
            raise UserError("chat_template", what, fix=fix)
        template["chat_template"] = _taken(given, "chat_template", None, str, "a text")
    if "max_completion_tokens" in given:
        given["max_tokens"] = given.pop("max_completion_tokens")
    wants, likeliest = _flag(given, "logprobs"), _likeliest(given, "top_logprobs")
    if likeliest and not wants:
        raise UserError("top_logprobs", "is there with logprobs alone", fix="Set logprobs, or leave it out.")
    sampling = {"logprobs": likeliest or 0} if wants else {}
    return {"messages": [_text_message(each) for each in messages], "template": template, "sampling": sampling}


def _completion(given: dict[str, Any]) -> dict[str, Any]:
    """Take what completions alone have."""
    prompts, echo, likeliest = given.pop("prompt", None), _flag(given, "echo"), _likeliest(given, "logprobs")
    expected = "a text, token ids, or a list of such, at least one"
    several = prompts if isinstance(prompts, list) and prompts and not _is_token(prompts[0]) else [prompts]
    for each in several:
        if not isinstance(each, str) and not (isinstance(each, list) and all(map(_is_token, each))):
            raise misfit("prompt", prompts, expected)
    sampling: dict[str, Any] = {"max_tokens": given.pop("max_tokens", TOKENS_OF_A_COMPLETION)}
    answers = type(sampling["max_tokens"]) is not int or sampling["max_tokens"] != 0
    if not answers:
        sampling |= {"max_tokens": 1, "min_tokens": 0}
    if likeliest is not None:
        sampling |= {"logprobs": likeliest} | ({"prompt_logprobs": likeliest} if echo else {})
    return {"prompts": several, "echo": echo, "answers": answers, "sampling": sampling}


def _is_token(value: object) -> bool:
    return type(value) is int


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
            raise UserError("a message", "has a part that is not text", got=str(got)[:80])
    if not isinstance(role, str):
        raise UserError("a message", "has no role", got=repr(message)[:80], expected="user, assistant or system")
    return {"role": role, "content": "".join(part["text"] for part in parts)}
