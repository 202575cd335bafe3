"""What real clients get of a server: `python clients.py CLIENT ADDRESS TOKENIZER` prints it as JSON.

It imports nothing of this project, so that an environment with the clients alone can run it. Exit status 3: the client
is not installed.
"""

import json
import sys
from typing import Any

MESSAGES = [{"role": "user", "content": "the lazy dog"}]
AT_ONCE = 20
# Two in a request, so that AT_ONCE requests are made.
PAIRS = [("the lazy" + " quick" * number, " brown fox") for number in range(2 * AT_ONCE)]


def langchain(url: str, _: str) -> Any:
    from langchain_openai import ChatOpenAI, OpenAI

    options: Any = {"base_url": url, "api_key": "none", "model": "any", "max_tokens": 14, "temperature": 0}
    chat = ChatOpenAI(**options, stream_usage=True)
    pieces = list(chat.stream("the lazy dog"))
    streamed = sum(pieces[1:], pieces[0])
    (first, *_) = (
        chat.bind(logprobs=True, top_logprobs=2).invoke("the lazy dog").response_metadata["logprobs"]["content"]
    )
    return {
        "text": chat.invoke("the lazy dog").content,
        "streamed": streamed.content,
        "tokens": streamed.usage_metadata["output_tokens"],
        "at once": [each.content for each in chat.batch(["the lazy dog"] * AT_ONCE, {"max_concurrency": AT_ONCE})],
        "first": first["logprob"],
        "completion": OpenAI(**options).invoke("the lazy dog"),
    }


def litellm(url: str, _: str) -> Any:
    import litellm

    options: Any = {"api_base": url, "api_key": "none", "max_tokens": 14, "temperature": 0}
    chat = {**options, "model": "openai/any", "messages": MESSAGES}
    whole = litellm.completion(**chat, logprobs=True, top_logprobs=2)
    pieces = litellm.completion(**chat, stream=True)
    many = litellm.batch_completion(**{**chat, "messages": [MESSAGES] * AT_ONCE}, max_workers=AT_ONCE)
    text = litellm.text_completion(**options, model="text-completion-openai/any", prompt="the lazy dog")
    return {
        "text": whole.choices[0].message.content,
        "streamed": "".join(each.choices[0].delta.content or "" for each in pieces),
        "tokens": whole.usage.completion_tokens,
        "at once": [each.choices[0].message.content for each in many],
        "first": whole.choices[0].logprobs.content[0].logprob,
        "completion": text.choices[0].text,
    }


def lm_eval(url: str, tokenizer: str) -> Any:
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    model: Any = LocalCompletionsAPI(
        model="any",
        base_url=f"{url}/completions",
        tokenizer_backend="huggingface",
        tokenizer=tokenizer,
        max_length=64,
        batch_size=2,
        num_concurrent=AT_ONCE,
    )
    asked: Any = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(PAIRS)]
    until: Any = [Instance("generate_until", {}, ("the lazy dog", {"until": ["\0"], "max_gen_toks": 14}), 0)]
    tokens = [[model.tok_encode(text) for text in (first, first + second)] for first, second in PAIRS]
    return {"likely": model.loglikelihood(asked), "tokens": tokens, "completion": model.generate_until(until)[0]}


if __name__ == "__main__":
    name, url, tokenizer = sys.argv[1:]
    try:
        found = {"langchain": langchain, "litellm": litellm, "lm_eval": lm_eval}[name](url, tokenizer)
    except ModuleNotFoundError as error:
        sys.stderr.write(str(error))
        sys.exit(3)
    sys.stdout.write("\n" + json.dumps(found))
