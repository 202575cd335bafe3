"""Serve a model by vLLM in this process, ask it, and print what came of it as JSON: see `conftest.py`.

Arguments: the model's folder and JSON with `options` of `vllm.LLM`, `prompts` of token ids, and `tokens` to generate.
"""

import json
import sys
from typing import Any

import torch


def main() -> None:
    # Here, since vLLM starts processes that import this file.
    from vllm import LLM, SamplingParams

    model, request = sys.argv[1], json.loads(sys.argv[2])
    engine: Any = LLM(model, **request["options"])
    prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
    sampling = SamplingParams(temperature=0, max_tokens=request["tokens"], ignore_eos=True, detokenize=False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        answers = engine.generate(prompts, sampling, use_tqdm=False)
    calls = {event.key: event.count for event in profile.key_averages() if event.key.startswith("twell::")}
    tokens = [list(answer.outputs[0].token_ids) for answer in answers]
    sys.stdout.write("\nANSWER " + json.dumps({"tokens": tokens, "calls": calls}) + "\n")


if __name__ == "__main__":
    main()
