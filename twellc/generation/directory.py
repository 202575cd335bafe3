"""A Hugging Face directory as the program that `twellc compile --kv-cache` makes a plan of, run by torch.

    directory ─ traced with caches ─ passes ─ program with `twell` ops ─ torch, see `program.py`

So a step has the very ops of a plan, whatever the passes find. `PlanBackend` decides when each part is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from twellc.base.caches import ASKED, FP8_CACHE, KeyValueCache
from twellc.base.devices import choose_device
from twellc.base.dtypes import DTYPES
from twellc.base.errors import UserError, first_few
from twellc.base.threads import uncollected
from twellc.compiling.cache_scales import by_placeholder, choose_scales
from twellc.compiling.fp8 import measure_errors, wish_of
from twellc.eager.optimization import refuse_other_weights
from twellc.generation.plan import PlanBackend
from twellc.generation.program import ProgramCalls
from twellc.loaders.cached import LARGEST_BATCH, NO_LIMIT, load_with_cache
from twellc.loaders.model import load_model
from twellc.loaders.precision import choose_dtype
from twellc.options.commands import CACHE_DTYPES, LLMOptions
from twellc.options.source import CacheOptions, TracingOptions
from twellc.options.weights import refuse_samples
from twellc.passes.attention import CUDNN, OPERATOR
from twellc.passes.graph.device import on_device
from twellc.passes.graph.program import quiet_torch, user_inputs
from twellc.passes.pipeline import PassOptions, Rewritten, run_passes
from twellc.passes.report import reads_fp8
from twellc.passes.sizes.inputs import program_inputs
from twellc.plugins.cache_op import attends_by_cudnn
from twellc.samples.samples import Limits, read_text

# Tokens of a row in a call: there a mask says which keys are seen, and all are read that come later in the same call.
_CHUNKS = {"cpu": 256}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def load_directory(path: Path, options: LLMOptions) -> tuple[PlanBackend, KeyValueCache, list[str]]:
    """Load a Hugging Face directory, its blocks and the linear layers outside of them by the `twell` ops.

    Args:
        path: The directory.
        options: How it is run; tokenizer and chunks of prompts are not for here.

    Returns:
        What computes it, what is known of its cache, and what the user should know.

    Raises:
        UserError: There is no causal language model, no such device, or see `load_with_cache`.
    """
    refuse_other_weights(options.weights, options.fp8_error)
    fp8_cache = _asks_for_fp8(options.kv_cache_dtype)
    refuse_samples(options, {"--text": options.text}, only_to_measure=not fp8_cache)
    chosen, length = choose_device(options.device), options.max_model_len
    in_dtype, notes = _precision_for(options.dtype, chosen)
    sizes = CacheOptions(NO_LIMIT if length is None else length, LARGEST_BATCH, _CHUNKS.get(chosen.type))
    loaded = load_with_cache(path, sizes, ASKED, in_dtype)
    cache = loaded.cache
    assert cache is not None
    errors = None
    # A model with a cache has other inputs than a text; its blocks are those without.
    if options.fp8_error is not None and options.text is not None:
        plain = load_model(TracingOptions(path))
        limits = Limits(program_inputs(plain.program), None, plain.vocabulary)
        samples = read_text(options.text, path, plain.language_model, limits).samples
        precision = cache.dtype if cache.dtype in DTYPES else None
        errors = measure_errors(plain, choose_dtype(plain, precision)[0], samples, lambda _: None)
    scales = None
    if fp8_cache:
        found, said_of_scales = choose_scales(loaded, options.text, chosen)
        scales = by_placeholder(loaded, found)
        cache, notes = replace(cache, dtype=FP8_CACHE), [*notes, *said_of_scales]
    by_lengths = fp8_cache or (chosen.type == "cuda" and attends_by_cudnn())
    attention = (CUDNN, OPERATOR) if by_lengths else (OPERATOR,)
    wanted = PassOptions(
        layers=options.layers,
        attention=attention,
        cache_scales=scales,
        weights=wish_of(options, errors),
        linear="twell",
        experts=False,
        device=chosen,
    )
    with quiet_torch():
        rewritten = run_passes(loaded.program, wanted)
    names = [loaded.input_names[node.name] for node in user_inputs(loaded.program)]
    notes = [*loaded.notes, *notes, *rewritten.notes]
    said, of_blocks = _said(rewritten, options.layers, chosen)
    name = f"torch on {_device_name(chosen)}, {said} by the twell ops"
    name += ", a cache in FP8" * fp8_cache + ", compiled" * options.compiled
    with uncollected():
        calls = ProgramCalls(on_device(rewritten.program, chosen, {}), names, chosen, options.compiled)
    return PlanBackend(name, cache, calls, growing=length is None), cache, [*notes, *of_blocks]


def _asks_for_fp8(kv_cache_dtype: str) -> bool:
    """Whether caches are to be in FP8.

    Raises:
        UserError: There is no such choice.
    """
    if kv_cache_dtype not in CACHE_DTYPES:
        what = "no such choice"
        raise UserError("kv_cache_dtype", what, got=repr(kv_cache_dtype), expected=" or ".join(CACHE_DTYPES))
    return kv_cache_dtype == FP8_CACHE


def _said(rewritten: Rewritten, layers: str, device: torch.device) -> tuple[str, list[str]]:
    """Return what the ops compute, in words, and a note where there are no blocks."""
    said = []
    kinds = ((rewritten.layers, "feed-forward blocks"), (rewritten.linear, "linear layers"))
    for found, what in kinds if device.type == "cuda" else kinds[:1]:  # on a CPU linear layers are torch's own
        taken = [each for each in found if each.decision == "twell"]
        fp8 = sum(reads_fp8(each.weights) for each in taken)
        said.append(f"{len(taken)} {what}{f' ({fp8} in FP8)' if fp8 else ''}")
    wide = [
        f"{each.module}, {each.weights}"
        for each in rewritten.layers
        if each.decision == "twell" and each.weights and not reads_fp8(each.weights)
    ]
    notes = [f"{len(wide)} feed-forward blocks are not read in FP8: {first_few(wide, '; ')}"] if wide else []
    if layers != "none" and all(each.decision != "twell" for each in rewritten.layers):
        reasons = list(dict.fromkeys(each.reason for each in rewritten.layers))
        notes.append(f"no feed-forward block is run by the twell ops{': ' * bool(reasons)}{first_few(reasons)}")
    return " and ".join(said), notes


def _precision_for(dtype: str | None, device: torch.device) -> tuple[Callable[[torch.dtype], torch.dtype], list[str]]:
    """Return what says in which precision a model runs, given its own, and notes on that, which are there then.

    Raises:
        UserError: There is no such `dtype`.
    """
    if dtype is not None and dtype not in tuple(_DTYPES):
        raise UserError("dtype", "no such choice", got=repr(dtype), expected=" or ".join(_DTYPES))
    notes = list[str]()

    def in_dtype(own: torch.dtype) -> torch.dtype:
        if dtype is not None:
            return _DTYPES[dtype]
        if device.type != "cuda" or own != torch.float32:
            return own
        notes.append("the model is in float32; on the GPU it runs in bfloat16")
        return torch.bfloat16

    return in_dtype, notes


def _device_name(device: torch.device) -> str:
    """Return what people call a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
