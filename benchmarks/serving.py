"""Measure what vLLM serves of a ReLU Llama of 1.5 billion parameters, with twellc's model class and without it.

python benchmarks/serving.py --json results.json
python benchmarks/serving.py --model FOLDER --json results.json
python benchmarks/serving.py --smoke --device cpu

The model is that of `model.py`: random weights, sparse gates. `dense` is vLLM's own class over transformers, the only
one of its classes that takes a ReLU Llama. With `--model` it is vLLM's own class of that model, such as OPT's or
Nemotron-H's, and `twell` the same class with the ops; `--dummy` draws weights for a folder that has none.

Each engine has its own process; they start at the same time and then take turns. Both compile the model and replay CUDA
graphs. All requests are there at the start. Tokens a second of the prompts are from calls that generate one token;
those of the answers from what longer calls take beyond that. Medians of several calls.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import harness
import torch
import transformers
from harness import NUMBERS, Columns, Result, Run, field
from model import CAUSAL, ModelOptions, describe_model

from twellc.options.option import COUNT, option
from twellc.vllm import ARCHITECTURE, PREFIX

CONTESTANTS: dict[str, dict[str, Any]] = {
    "dense": {"model_impl": "transformers"},
    "twell": {"hf_overrides": {"architectures": [ARCHITECTURE]}},
}


@torch.no_grad()
def make_folder(run: Run, options: Options, folder: Path) -> None:
    """Make the model, unless it is in the folder; count what is active in prompts of as many requests as there are."""
    if not (folder / "config.json").exists():
        options.make().save_pretrained(folder)
    model: Any = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation=CAUSAL)
    click.echo(describe_model(run.report, model.to(harness.DEVICE), max(options.requests), options.prompt))
    del model
    if harness.DEVICE == "cuda":
        gc.collect()
        torch.cuda.empty_cache()  # for the engines


@dataclass(frozen=True)
class Setting:
    """What every engine serves, and how."""

    folder: Path
    batches: tuple[int, ...]
    prompt: int
    tokens: int
    options: dict[str, Any]
    device: str
    smoke: bool
    is_own: bool

    def contestant(self, name: str) -> dict[str, Any]:
        """Return the options by which an engine serves the model with the ops, or without them."""
        if not self.is_own:
            return CONTESTANTS[name]
        (own,) = json.loads((self.folder / "config.json").read_text())["architectures"]
        return {"hf_overrides": {"architectures": [f"{PREFIX}{own}"]}} if name == "twell" else {}


class Engine:
    """An engine in a child process."""

    def __init__(self, name: str, setting: Setting) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=serve, args=(name, setting, other), daemon=True)
        self._process.start()
        other.close()

    def read(self) -> Any:
        """Return what the process sends next.

        Raises:
            click.ClickException: It has ended.
        """
        try:
            return self._pipe.recv()
        except EOFError:
            raise click.ClickException("an engine has ended") from None

    def seconds(self, count: int, length: int) -> float:
        """Return what a call takes that answers `count` requests with `length` tokens each."""
        self._pipe.send((count, length))
        return float(self.read())

    def stop(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join()


def serve(name: str, setting: Setting, pipe: Any) -> None:
    """Make an engine, tell its figures, and answer what is asked until nobody asks any more."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if setting.device == "cpu":
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    # Here, so that the environment is set, and in this process alone.
    from vllm import LLM, SamplingParams, __version__

    started = time.perf_counter()
    engine: Any = LLM(
        str(setting.folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_num_seqs=max(setting.batches),
        max_model_len=setting.prompt + setting.tokens + 8,
        enable_prefix_caching=False,
        enforce_eager=setting.smoke,
        compilation_config={"cudagraph_capture_sizes": list(setting.batches)},
        **setting.options,
        **setting.contestant(name),
    )
    (blocks,) = engine.apply_model(count_blocks)
    if (blocks > 0) != (name == "twell"):
        raise click.ClickException(f"{name}: twellc runs {blocks} blocks")
    pipe.send({"vllm": __version__, "blocks": blocks, "start_s": time.perf_counter() - started})
    vocabulary = int(engine.llm_engine.model_config.get_vocab_size())
    while True:
        try:
            count, length = pipe.recv()
        except EOFError:
            return
        draw = random.Random(count)
        prompts = [{"prompt_token_ids": draw.choices(range(vocabulary), k=setting.prompt)} for _ in range(count)]
        sampling = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        engine.generate(prompts, sampling, use_tqdm=False)
        pipe.send(time.perf_counter() - begin)


def time_in_turns(engines: dict[str, Engine], count: int, tokens: int, repeats: int) -> dict[str, dict[str, float]]:
    """Return the medians of short and long calls of each engine, in seconds."""
    times: dict[str, dict[str, list[float]]] = {name: {"one_token_s": [], "all_tokens_s": []} for name in engines}
    for engine in engines.values():
        engine.seconds(count, 1 + tokens)
    for _ in range(repeats):
        for name, engine in engines.items():
            times[name]["one_token_s"].append(engine.seconds(count, 1))
            times[name]["all_tokens_s"].append(engine.seconds(count, 1 + tokens))
    return {name: {kind: statistics.median(each) for kind, each in found.items()} for name, found in times.items()}


def count_blocks(model: Any) -> int:
    """Return how many blocks, and layers of experts, of a model in vLLM the ops run."""
    # Here, since only engines have vLLM.
    from twellc.vllm.blocks import CallsOp
    from twellc.vllm.experts import TwellExpertsMethod

    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    return sum(isinstance(method, (CallsOp, TwellExpertsMethod)) for method in methods)


def _tokens_per_second(name: str) -> Callable[[Result], str]:
    return lambda result: "{prompt_tokens_per_s:.0f}, {answer_tokens_per_s:.0f}".format(**result["times"][name])


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """The options of this benchmark.

    Attributes:
        requests: How many at once.
        prompt: Tokens of each prompt.
        tokens: Tokens of each answer.
        model: Serve this folder instead.
        dummy: Draw the weights of --model.
        folder: Keep the model here, or take it.
    """

    requests: tuple[int, ...] = option("1,8,32,128", "N,…", NUMBERS)
    prompt: int = option(128, "N", COUNT)
    tokens: int = option(128, "N", COUNT)
    repeats: int = option(7, "N", COUNT)
    device: str = option("cuda", kind=("cuda", "cpu"))
    model: Path | None = option(None, "DIR", Path)
    dummy: bool = option(False)
    folder: Path | None = option(None, "DIR", Path)


@harness.benchmark(Options, layers=2, d_model=128, d_ff=256, requests="1,3", prompt=8, tokens=4, repeats=1)
def main(run: Run, options: Options) -> None:
    """Print tokens a second for each number of requests."""
    most, length = max(options.requests), options.prompt + options.tokens
    if options.model is None:
        folder = options.folder or Path(harness.scratch_folder())
        make_folder(run, options, folder)
        # Memory for the cache is named, since engines that start at the same time would each take what is there.
        memory = 4 * options.layers * options.d_model * most * (length + 32)
        given: dict[str, Any] = {"kv_cache_memory_bytes": memory, "gpu_memory_utilization": 0.3}
    else:
        folder = options.model
        if not (folder / "config.json").exists():
            raise click.UsageError(f"--model {folder} has no config.json")
        given = {"load_format": "dummy" if options.dummy else "auto", "gpu_memory_utilization": 0.45}
    setting = Setting(
        folder, options.requests, options.prompt, options.tokens, given, options.device, harness.is_smoke(),
        is_own=options.model is not None,
    )  # fmt: skip
    engines = {name: Engine(name, setting) for name in run.chosen(CONTESTANTS)}
    run.report["engines"] = {name: engine.read() for name, engine in engines.items()}
    columns: Columns = {f"{name}: prompt, answer tokens/s": _tokens_per_second(name) for name in engines}
    run.begin({"requests": field("requests"), **columns}, str(run.report["engines"]))
    for count in options.requests:
        found = time_in_turns(engines, count, options.tokens, options.repeats)
        for times in found.values():
            times["prompt_tokens_per_s"] = count * options.prompt / times["one_token_s"]
            times["answer_tokens_per_s"] = (
                count * options.tokens / max(times["all_tokens_s"] - times["one_token_s"], 1e-9)
            )
        run.add({"requests": count, "times": found})
    for engine in engines.values():
        engine.stop()


if __name__ == "__main__":
    main()
