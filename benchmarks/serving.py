"""Measure what vLLM serves of a ReLU Llama of 1.5 billion parameters, with twellc's model class and without it.

python benchmarks/serving.py --json results.json
python benchmarks/serving.py --smoke --device cpu

The model is that of `model.py`: random weights, sparse gates. `dense` is vLLM's own class over transformers, the only
one of its classes that takes a ReLU Llama. Each engine has a process of its own, so they take no turns; both compile
the model and replay CUDA graphs. All requests are there at the start. Tokens a second of the prompts are from calls
that generate one token; those of the answers from what longer calls take beyond that. Medians of several calls.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import click
import session
import torch
import transformers
from model import CAUSAL, causal_attention, make_model

from twellc.vllm import ARCHITECTURE

CONTESTANTS: dict[str, dict[str, Any]] = {
    "dense": {"model_impl": "transformers"},
    "twell": {"hf_overrides": {"architectures": [ARCHITECTURE]}},
}


@click.command()
@click.option("--layers", default=28, show_default=True)
@click.option("--d-model", default=2048, show_default=True, help="Multiple of 128.")
@click.option("--d-ff", default=5632, show_default=True)
@click.option("--density", default=0.01, show_default=True, help="Mean share of gate activations that are not zero.")
@click.option("--requests", default="1,8,32,128", show_default=True, help="How many at once, with commas.")
@click.option("--prompt", default=128, show_default=True, help="Tokens of each prompt.")
@click.option("--tokens", default=128, show_default=True, help="Tokens of each answer.")
@click.option("--repeats", default=3, show_default=True)
@click.option("--only", type=click.Choice(sorted(CONTESTANTS)), multiple=True, help="Measure these alone.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="Keep the model here, or take it.")
@session.json_option
@session.smoke_option(layers=2, d_model=128, d_ff=256, requests="1,3", prompt=8, tokens=4, repeats=1)
def main(
    layers: int,
    d_model: int,
    d_ff: int,
    density: float,
    requests: str,
    prompt: int,
    tokens: int,
    repeats: int,
    only: tuple[str, ...],
    device: str,
    folder: Path | None,
    json_path: Path | None,
) -> None:
    """Print tokens a second for each number of requests."""
    session.DEVICE = device
    if device == "cuda":
        session.refuse_without_gpu()
    report, batches = session.new_report(), [int(each) for each in requests.split(",")]
    folder = folder or Path(session.scratch_folder())
    if not (folder / "config.json").exists():
        transformers.AttentionInterface.register(CAUSAL, causal_attention)  # what the model is made with
        make_model(layers, d_model, d_ff, density, "equal").save_pretrained(folder)
        if device == "cuda":
            torch.cuda.empty_cache()
    for name in only or CONTESTANTS:
        # A process of its own, which leaves nothing behind on the GPU.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            found = pool.submit(measure, folder, name, batches, prompt, tokens, repeats, device, session.is_smoke())
            report["results"].append(found.result())
        session.write_results(json_path, report)
        click.echo(table(report["results"]))


def measure(
    folder: Path, name: str, batches: list[int], prompt: int, tokens: int, repeats: int, device: str, smoke: bool
) -> dict[str, Any]:
    """Serve the model and time it for each number of requests."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if device == "cpu":
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    # Here, so that the environment is set, and in this process alone.
    from vllm import LLM, SamplingParams, __version__

    started = time.perf_counter()
    engine: Any = LLM(
        str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=prompt + tokens + 8,
        max_num_seqs=max(batches), enable_prefix_caching=False, enforce_eager=smoke, gpu_memory_utilization=0.6,
        compilation_config={"cudagraph_capture_sizes": batches}, **CONTESTANTS[name],
    )  # fmt: skip
    (blocks,) = engine.apply_model(count_blocks)
    if (blocks > 0) != (name == "twell"):
        raise click.ClickException(f"{name}: twellc runs {blocks} blocks")
    result: dict[str, Any] = {
        "contestant": name, "vllm": __version__, "blocks": blocks, "start_s": time.perf_counter() - started,
        "requests": {},
    }  # fmt: skip
    vocabulary = int(engine.llm_engine.model_config.get_vocab_size())

    def seconds(count: int, length: int) -> tuple[float, list[int]]:
        draw = random.Random(count)
        prompts = [{"prompt_token_ids": draw.choices(range(vocabulary), k=prompt)} for _ in range(count)]
        sampling = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        answers = engine.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - begin, [answer.outputs[0].token_ids[0] for answer in answers]

    for count in batches:
        seconds(count, 1 + tokens)
        short = statistics.median(seconds(count, 1)[0] for _ in range(repeats))
        long = statistics.median(seconds(count, 1 + tokens)[0] for _ in range(repeats))
        result["requests"][str(count)] = {
            "prompt_tokens_per_s": count * prompt / short,
            "answer_tokens_per_s": count * tokens / max(long - short, 1e-9),
            "call_s": long,
            "first_tokens": seconds(count, 1)[1],
        }
    return result


def count_blocks(model: Any) -> int:
    """Return how many blocks of a model in vLLM the ops run."""
    return sum(type(module).__name__ == "TwellBlock" for module in model.modules())


def table(results: list[dict[str, Any]]) -> str:
    """Return what was measured as Markdown."""
    names = [each["contestant"] for each in results]
    lines = ["", "| requests | " + " | ".join(f"{name}: prompt, answer tokens/s" for name in names) + " |"]
    lines.append("| --- " * (1 + len(names)) + "|")
    for count in results[0]["requests"]:
        rows = [each["requests"][count] for each in results]
        cells = [f"{row['prompt_tokens_per_s']:.0f}, {row['answer_tokens_per_s']:.0f}" for row in rows]
        lines.append(f"| {count} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
