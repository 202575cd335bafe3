"""Measure what vLLM serves of a ReLU Llama of 1.5 billion parameters, with twellc's model class and without it.

python benchmarks/serving.py --json results.json
python benchmarks/serving.py --weights fp8 --json results.json
python benchmarks/serving.py --model FOLDER --json results.json
python benchmarks/serving.py --drawn nano --density 0.1 --requests 1,4,16,64 --uncompiled --json results.json
python benchmarks/serving.py --drawn opt-6.7b --density 0.05 --server --json results.json
python benchmarks/serving.py --smoke --device cpu

The model is that of `model.py`: random weights, sparse gates. `dense` is vLLM's own class over transformers, the only
one of its classes that takes a ReLU Llama. With `--weights fp8` both get a checkpoint whose linear layers are in E4M3,
with a scale for each output, and `dense` computes them by vLLM's own FP8. With `--model` and `--drawn` it is vLLM's own
class of that model, such as OPT's or Nemotron-H's, and `twell` the same class with the ops.

`--drawn` takes the sizes of a published model and draws its weights in the engines, so that about `--density` of the
neurons fire: the first column of the embedding is constant, no layer writes to it, and the first columns of up
projections shift each neuron. The share is counted in a call, and printed.

Each engine has its own process; they start at the same time and then take turns. Both compile the model and replay CUDA
graphs, of the numbers of tokens that vLLM chooses; with `--uncompiled` they replay graphs of each step alone. All
requests are there at the start. Tokens a second of the prompts are from calls that generate one token; those of the
answers from what longer calls take beyond that; "whole" are the tokens of answers by all that such a call takes,
prompts included. Medians of several calls.

With `--server` each is a `vllm serve`, and every request goes through HTTP. A server cannot draw weights, so a model of
`--drawn` is made by transformers first, and written to disk.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import multiprocessing
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import click
import harness
import torch
import transformers
from harness import NUMBERS, Result, Run, field
from model import CAUSAL, ModelOptions, describe_model
from safetensors.torch import load_file, save_file

from twellc.options.option import COUNT, option
from twellc.plugins.fp8 import Fp8
from twellc.vllm import ARCHITECTURE, PREFIX

CONTESTANTS: dict[str, dict[str, Any]] = {
    "dense": {"model_impl": "transformers"},
    "twell": {"hf_overrides": {"architectures": [ARCHITECTURE]}},
}
_KINDS = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}


@dataclass(frozen=True)
class Drawn:
    """A model whose weights engines draw.

    Attributes:
        architecture: The name of vLLM's class.
        config: What differs from the defaults of transformers' configuration.
        cache: Gigabytes for the cache of keys, values and states.
    """

    architecture: str
    config: dict[str, Any]
    cache: int

    def write(self, folder: Path) -> None:
        """Write its configuration."""
        kind = getattr(transformers, self.architecture.replace("ForCausalLM", "Config"))
        kind(architectures=[self.architecture], dtype="bfloat16", **self.config).save_pretrained(folder)


def _hybrid(layers: str, cache: int, **sizes: Any) -> Drawn:
    kinds = {"num_hidden_layers": len(layers), "layers_block_type": [_KINDS[each] for each in layers]}
    return Drawn("NemotronHForCausalLM", {**kinds, **sizes}, cache)


def _opt(layers: int, d_model: int, cache: int) -> Drawn:
    sizes = {"num_hidden_layers": layers, "hidden_size": d_model, "word_embed_proj_dim": d_model}
    return Drawn("OPTForCausalLM", {**sizes, "ffn_dim": 4 * d_model, "num_attention_heads": d_model // 128}, cache)


_EXPERTS = {"n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "n_shared_experts": 1}
_NANO = {"hidden_size": 2688, "num_key_value_heads": 2, "mamba_num_heads": 64, "routed_scaling_factor": 2.5}
DRAWN = {
    "nano": _hybrid(
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", 5,
        **_EXPERTS, **_NANO, moe_shared_expert_intermediate_size=3712,
    ),
    "nemotron-h-8b": _hybrid("M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", 20),
    "opt-6.7b": _opt(32, 4096, 20),
    "opt-smoke": _opt(2, 128, 1),
}  # fmt: skip


# ---- weights ----


# Endings of the names of weights: of up projections, and of layers that write to the residual stream.
_UP = ("up_proj.weight", "fc1.weight", "w13_weight")
_WRITES = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "fc2.weight", "w2_weight")


@torch.inference_mode()
def draw_weights(model: Any, density: float) -> None:
    """Draw the weights of a model in vLLM, in place, so that this share of the neurons fires."""
    torch.manual_seed(0)
    shift = statistics.NormalDist().inv_cdf(density)
    for name, weight in model.named_parameters():
        if weight.dim() < 2:
            if "norm" in name and name.endswith("weight"):
                weight.fill_(1)
            elif name.endswith(".A"):
                weight.fill_(-1)  # states decay
        elif "embed_tokens" in name:
            weight.normal_()
            weight[:, 0] = weight.shape[1] ** 0.5
        elif "embed" not in name:
            std = weight.shape[-1] ** -0.5
            if name.endswith(_WRITES):
                weight.normal_(std=0.03 * std)[..., 0, :] = 0
            else:
                weight.normal_(std=std)[..., 0] = shift * std if name.endswith(_UP) else 0


class Counter:
    """Counts which share of a model's neurons fires, in a few tokens of each call while it listens."""

    def __init__(self, model: Any) -> None:
        self._shares: dict[str, list[float]] = {"blocks": [], "experts": []}
        self._compiled = [each for each in model.modules() if getattr(each, "do_not_compile", None) is False]
        self._hooks = [
            each.register_forward_pre_hook(functools.partial(self._count, *found), with_kwargs=True)
            for name, each in model.named_modules()
            if (found := self._of(name, each))
        ]
        for each in self._compiled:
            each.do_not_compile = True

    @staticmethod
    def _of(name: str, module: Any) -> tuple[str, Any] | None:
        """Return the kind of what follows in a module, and the module with the weights; None for other modules."""
        if f"{name}.weight".endswith(_UP):
            return "blocks", module
        return ("experts", module.routed_experts) if hasattr(module, "routed_experts") else None

    def _count(self, kind: str, held: Any, _: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        weight = held.weight if kind == "blocks" else held.w13_weight.flatten(0, 1)
        x = next(iter((*given, *named.values())))[:16]
        self._shares[kind].append((x @ weight.t() > 0).double().mean().item())

    def stop(self) -> dict[str, float]:
        """Stop, and return the mean share of each kind."""
        for hook in self._hooks:
            hook.remove()
        for each in self._compiled:
            each.do_not_compile = False
        return {kind: round(statistics.mean(shares), 4) for kind, shares in self._shares.items() if shares}


def quantize_folder(model: Path, folder: Path) -> None:
    """Write a checkpoint's linear layers in E4M3 as compressed-tensors does: `FP8_DYNAMIC`, a scale for each output."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
    inputs = {**weights, "strategy": "token", "dynamic": True}
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "ignore": ["lm_head"],
    }
    tensors = {name: each for path in model.glob("*.safetensors") for name, each in load_file(path).items()}
    for name in [each for each in tensors if each.endswith("_proj.weight")]:
        matrix = Fp8.quantize(tensors[name].to(harness.DEVICE), "row")
        tensors |= {name: matrix.values.cpu(), f"{name}_scale": matrix.scale.cpu()}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


# ---- engines ----


@torch.inference_mode()
def write_drawn(folder: Path, density: float, prompt: int) -> dict[str, float]:
    """Draw the weights of a folder's configuration, and write them there; return the share that fires in a prompt."""
    config, kind = transformers.AutoConfig.from_pretrained(folder), cast(Any, transformers.AutoModelForCausalLM)
    with torch.device(harness.DEVICE):
        model = kind.from_config(config, dtype=torch.bfloat16).eval()
        draw_weights(model, density)
        counter = Counter(model)
        model(torch.randint(config.vocab_size, (1, prompt)))
    model.save_pretrained(folder)
    return counter.stop()


@torch.no_grad()
def make_folder(run: Run, options: Options, folder: Path) -> None:
    """Make the model, unless it is in the folder; count what is active in prompts of as many requests as there are."""
    if not (folder / "config.json").exists():
        options.make().save_pretrained(folder)
    model: Any = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation=CAUSAL)
    click.echo(describe_model(run.report, model.to(harness.DEVICE), max(options.requests), options.prompt))
    del model
    free_memory()


def free_memory() -> None:
    """Free the GPU's memory for the engines."""
    if harness.DEVICE == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


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
    uncompiled: bool
    drawn: float | None

    def contestant(self, name: str) -> dict[str, Any]:
        """Return the options by which an engine serves the model with the ops, or without them."""
        if not self.is_own:
            return CONTESTANTS[name]
        (own,) = self.config["architectures"]
        return {"hf_overrides": {"architectures": [f"{PREFIX}{own}"]}} if name == "twell" else {}

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The model's `config.json`."""
        found: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        return found

    def options_of(self, name: str) -> dict[str, Any]:
        """Return the options of `vllm.LLM`, which are those of `vllm serve`."""
        return {
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "max_num_seqs": max(self.batches),
            "max_model_len": self.prompt + self.tokens + 8,
            "enable_prefix_caching": False,
            "enforce_eager": self.smoke,
            **({"compilation_config": _UNCOMPILED} if self.uncompiled else {}),
            **self.options,
            **self.contestant(name),
        }

    def environment(self) -> dict[str, str]:
        """Return what the environment of an engine has beside the parent's."""
        on_cpu = {"VLLM_CPU_KVCACHE_SPACE": "1"} if self.device == "cpu" else {}
        return {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **on_cpu}

    def draw_prompts(self, count: int) -> list[list[int]]:
        """Draw prompts of token ids, the same ones in each call."""
        draw, vocabulary = random.Random(count), self.config.get("text_config", self.config)["vocab_size"]
        return [draw.choices(range(vocabulary), k=self.prompt) for _ in range(count)]


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


# vLLM does not compile, and replays a graph of each step that has no prompts.
_UNCOMPILED = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


def serve(name: str, setting: Setting, pipe: Any) -> None:
    """Make an engine, tell its figures, and answer what is asked until nobody asks any more."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **setting.environment()}
    # Here, so that the environment is set, and in this process alone.
    from vllm import LLM, SamplingParams, __version__

    started = time.perf_counter()
    engine: Any = LLM(str(setting.folder), **setting.options_of(name))
    (blocks,) = engine.apply_model(count_blocks)
    if (blocks > 0) != (name == "twell"):
        raise click.ClickException(f"{name}: twellc runs {blocks} blocks")

    def generate(count: int, length: int) -> None:
        prompts = [{"prompt_token_ids": ids} for ids in setting.draw_prompts(count)]
        sampling = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
        engine.generate(prompts, sampling, use_tqdm=False)

    active: dict[str, float] = {}
    if setting.drawn is not None:
        engine.apply_model(functools.partial(draw_weights, density=setting.drawn))
        (counter,) = engine.apply_model(Counter)
        generate(max(setting.batches), 1)
        active = counter.stop()
    start = round(time.perf_counter() - started, 1)
    pipe.send({"vllm": __version__, "blocks": blocks, "active": active, "start_s": start})
    while True:
        try:
            count, length = pipe.recv()
        except EOFError:
            return
        begin = time.perf_counter()
        generate(count, length)
        pipe.send(time.perf_counter() - begin)


class Server:
    """`vllm serve` in a child process, asked by HTTP."""

    def __init__(self, name: str, setting: Setting) -> None:
        self._name, self._setting, self._started = name, setting, time.perf_counter()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._address = f"http://127.0.0.1:{port}"
        self._log = Path(harness.scratch_folder()) / "log"
        fixed = {"host": "127.0.0.1", "port": port, "served_model_name": name}
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(setting.folder)]
        command += command_line({**setting.options_of(name), **fixed})
        with self._log.open("w") as log:
            environment = os.environ | setting.environment() | {"VLLM_LOGGING_LEVEL": "INFO"}
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        click.get_current_context().call_on_close(self._process.terminate)

    def read(self) -> Any:
        """Wait for the server, and return its figures.

        Raises:
            click.ClickException: It has ended, or does not run what it should.
        """
        version = ""
        while not version:
            if self._process.poll() is not None:
                raise click.ClickException(f"{self._name}: the server has ended\n{self._log.read_text()[-2000:]}")
            time.sleep(1)
            try:
                with urllib.request.urlopen(f"{self._address}/version") as reply:
                    version = json.load(reply)["version"]
            except OSError:
                pass  # it does not listen yet
        blocks = sum(map(int, re.findall(r"(\d+) of \d+ [a-z -]+ are run by twellc", self._log.read_text())))
        if (blocks > 0) != (self._name == "twell"):
            raise click.ClickException(f"{self._name}: twellc runs {blocks} blocks")
        return {"vllm": version, "blocks": blocks, "start_s": round(time.perf_counter() - self._started, 1)}

    def seconds(self, count: int, length: int) -> float:
        """Return what `count` requests at once take until the last of them has its answer of `length` tokens."""
        prompts = self._setting.draw_prompts(count)
        begin = time.perf_counter()
        asyncio.run(self._ask(prompts, length))
        return time.perf_counter() - begin

    async def _ask(self, prompts: list[list[int]], length: int) -> None:
        import aiohttp  # here, as vLLM brings it; openai's client takes 4 ms for a request

        given = {"model": self._name, "max_tokens": length, "temperature": 0, "ignore_eos": True}

        async def ask(prompt: list[int]) -> None:
            async with session.post("/v1/completions", json={"prompt": prompt, **given}) as reply:
                usage = (await reply.json()).get("usage", {})
            if usage.get("completion_tokens") != length:
                raise click.ClickException(f"{self._name}: the server did not answer with {length} tokens")

        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(self._address, connector=connector, timeout=timeout) as session:
            await asyncio.gather(*map(ask, prompts))

    def stop(self) -> None:
        """End the server."""
        self._process.terminate()
        self._process.wait()


def command_line(options: dict[str, Any]) -> list[str]:
    """Return options of `vllm.LLM` as `vllm serve` takes them."""
    given: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            given.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            given += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return given


Times = dict[str, dict[str, float]]


def time_in_turns(engines: Mapping[str, Engine | Server], count: int, tokens: int, repeats: int) -> Times:
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


_RATES = [f"{each}_tokens_per_s" for each in ("prompt", "answer", "whole")]


def _tokens_per_second(name: str) -> Callable[[Result], str]:
    return lambda result: ", ".join(f"{result['times'][name][rate]:.0f}" for rate in _RATES)


def _times_as_fast(result: Result) -> str:
    if result["times"].keys() < CONTESTANTS.keys():
        return "-"
    dense, twell = (result["times"][name] for name in CONTESTANTS)
    return ", ".join(f"{twell[rate] / dense[rate]:.2f}" for rate in _RATES)


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """The options of this benchmark.

    Attributes:
        requests: How many at once.
        prompt: Tokens of each prompt.
        tokens: Tokens of each answer.
        model: Serve this folder instead.
        drawn: Serve a model of these sizes instead.
        uncompiled: CUDA graphs alone, without compiled code.
        server: Ask `vllm serve` by HTTP.
        folder: Keep the model here, or take it.
    """

    requests: tuple[int, ...] = option("1,8,32,128", "N,…", NUMBERS)
    prompt: int = option(128, "N", COUNT)
    tokens: int = option(128, "N", COUNT)
    repeats: int = option(7, "N", COUNT)
    device: str = option("cuda", kind=("cuda", "cpu"))
    model: Path | None = option(None, "DIR", Path)
    drawn: str | None = option(None, kind=tuple(DRAWN))
    weights: str = option("bf16", kind=("bf16", "fp8"))
    uncompiled: bool = option(False)
    server: bool = option(False)
    folder: Path | None = option(None, "DIR", Path)


@harness.benchmark(Options, layers=2, d_model=128, d_ff=256, requests="1,3", prompt=8, tokens=4, repeats=1)
def main(run: Run, options: Options) -> None:
    """Print tokens a second for each number of requests."""
    most, length = max(options.requests), options.prompt + options.tokens
    if sum(map(bool, (options.model, options.drawn, options.weights == "fp8"))) > 1:
        raise click.UsageError("of --model, --drawn and --weights fp8 only one can be given")
    # Memory for the cache is named where it can be, since engines that start at once would each take what is there.
    given: dict[str, Any] = {"gpu_memory_utilization": 0.3, "max_num_batched_tokens": max(2048, most * options.prompt)}
    folder = options.model or options.folder or Path(harness.scratch_folder())
    if options.model is not None:
        if not (folder / "config.json").exists():
            raise click.UsageError(f"--model {folder} has no config.json")
        given["gpu_memory_utilization"] = 0.45
    elif options.drawn is not None:
        drawn = DRAWN[options.drawn]
        if options.server and "n_routed_experts" in drawn.config:
            raise click.UsageError("--server takes no drawn mixture, which is too large to be written")
        if options.device == "cpu" and not options.server:
            raise click.UsageError("--drawn needs a GPU: on a CPU vLLM packs weights, which then cannot be drawn")
        drawn.write(folder)
        given["kv_cache_memory_bytes"] = drawn.cache << 30
        if options.server:
            run.report["active"] = write_drawn(folder, options.density, options.prompt)
            click.echo(f"active: {run.report['active']}")
            free_memory()
        else:
            given["load_format"] = "dummy"
    else:
        make_folder(run, options, folder)
        given["kv_cache_memory_bytes"] = 4 * options.layers * options.d_model * most * (length + 32)
        if options.weights == "fp8":
            quantize_folder(folder, folder / "fp8")
            folder /= "fp8"
    setting = Setting(
        folder, options.requests, options.prompt, options.tokens, given, options.device, harness.is_smoke(),
        is_own=bool(options.model or options.drawn), uncompiled=options.uncompiled,
        drawn=options.density if given.get("load_format") else None,
    )  # fmt: skip
    kind = Server if options.server else Engine
    engines: dict[str, Engine | Server] = {name: kind(name, setting) for name in run.chosen(CONTESTANTS)}
    run.report["engines"] = {name: engine.read() for name, engine in engines.items()}
    columns: dict[str, Callable[[Result], str]] = {
        f"{name}: prompt, answer, whole tokens/s": _tokens_per_second(name) for name in engines
    }
    columns["times as fast"] = _times_as_fast
    run.begin({"requests": field("requests"), **columns}, str(run.report["engines"]))
    for count in options.requests:
        found = time_in_turns(engines, count, options.tokens, options.repeats)
        for times in found.values():
            times["prompt_tokens_per_s"] = count * options.prompt / times["one_token_s"]
            times["answer_tokens_per_s"] = (
                count * options.tokens / max(times["all_tokens_s"] - times["one_token_s"], 1e-9)
            )
            times["whole_tokens_per_s"] = count * (1 + options.tokens) / times["all_tokens_s"]
        run.add({"requests": count, "times": found})
    for engine in engines.values():
        engine.stop()


if __name__ == "__main__":
    main()
