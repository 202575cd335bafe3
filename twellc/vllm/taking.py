"""Choose the blocks and experts of a model in vLLM that the ops run, and log these and the others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import vllm.envs
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.platforms import current_platform

from twellc.base.dtypes import dtype_name
from twellc.base.errors import UserError, first_few
from twellc.base.version import __version__
from twellc.eager.module_blocks import FoundBlock
from twellc.options.weights import FP8_BLOCKS, KEEP, WEIGHTS, refuse_weights_of_linear
from twellc.passes.decide import decide, options_of
from twellc.plugins import library
from twellc.plugins.block import BlockOptions, problem_of
from twellc.vllm import LOG, blocks
from twellc.vllm.experts import put_experts, refusal_of_experts

# The least compute capability that the kernels need.
_CAPABILITY = (8, 0)
Layers = dict[str, LinearBase]


@dataclass(frozen=True)
class Candidate:
    """A block of a model, and the way to let the op run it.

    Attributes:
        found: The block; with whole weights if it is still to be sharded among `ranks`.
        layers: Gives vLLM's layers for the projections, by their paths.
        put: Puts these layers in place of the block.
        ranks: The number of ranks among which its neurons are still to be sharded.
    """

    found: FoundBlock
    layers: Callable[[], Layers]
    put: Callable[[Layers], None]
    ranks: int = 1


def take(find: Callable[[], Iterable[Candidate]], experts: Iterable[tuple[str, Any]], config: VllmConfig) -> None:
    """Let the ops run the blocks and experts that they can; log these, and why others stay.

    Args:
        find: Finds the blocks of a model whose weights are not loaded yet.
        experts: Paths and modules of the experts.
        config: vLLM's configuration; its additional settings will name the blocks that the ops run.

    Raises:
        UserError: These settings have a value for twellc that it does not know.
    """
    quantise = _wanted_weights(config.additional_config) == FP8_BLOCKS
    unfit = _unfit(config)
    if unfit:
        LOG.warning("all feed-forward blocks stay dense: %s", unfit)
        return
    with torch.device("cpu"):
        candidates = list(find())
    kinds = {
        "feed-forward blocks": _take_blocks(candidates, config, quantise),
        "layers of experts": _take_experts(experts),
    }
    taken: dict[str, Any] = {}
    for kind, (those, refused) in kinds.items():
        count = len(those) + sum(map(len, refused.values()))
        for reason, modules in refused.items():
            LOG.warning("%d of %d %s stay dense (%s): %s", len(modules), count, kind, first_few(modules), reason)
        if those:
            LOG.info("%d of %d %s are run by twellc %s", len(those), count, kind, __version__)
            scaled = sum(each["weight_bits"] == 8 for each in those.values())
            if scaled:
                LOG.info("%d of them read FP8 weights", scaled)
        taken |= those
    if taken:
        # vLLM caches compiled code by its configuration, and does not see which modules a model has.
        config.additional_config["twellc_blocks"] = {"version": __version__, "blocks": taken}
    elif not any(refused for _, refused in kinds.values()):
        LOG.warning("no feed-forward block was found that twellc can run")


Taken = tuple[dict[str, dict[str, Any]], Mapping[str, list[str]]]


def _take_blocks(candidates: list[Candidate], config: VllmConfig, quantise: bool) -> Taken:
    """Take blocks, quantised if asked; return the taken ones, and the others by reason."""
    dtype = config.model_config.dtype
    decisions = decide([replace(each.found.block, dtype=dtype) for each in candidates], "all")
    taken: dict[str, Any] = {}
    refused: dict[str, list[str]] = {}
    for each, layer in zip(candidates, decisions, strict=True):
        block = each.found.block
        options = options_of(block, layer, None)
        stays = block.refusal or ("" if layer.decision == "twell" else layer.reason)
        reason = stays or _misfit(each, options, dtype)
        layers: Layers = {}
        if not reason:
            layers = each.layers()
            fp8 = all(map(blocks.in_fp8, layers.values()))
            if not fp8 and any(type(made.quant_method) is not UnquantizedLinearMethod for made in layers.values()):
                reason = "its layers are quantised, and not by a checkpoint to E4M3 with a scale for a tensor or output"
        if reason:
            refused.setdefault(reason, []).append(layer.module)
        else:
            blocks.compute_by_op(each.found, layers, options, quantise and not fp8)
            each.put(layers)
            taken[layer.module] = {**asdict(options), "weight_bits": 8 if fp8 or quantise else 16}
    return taken, refused


def _take_experts(experts: Iterable[tuple[str, Any]]) -> Taken:
    """Take the experts of layers; return the taken ones, and the others by reason."""
    taken: dict[str, Any] = {}
    refused: dict[str, list[str]] = {}
    for path, module in experts:
        reason = refusal_of_experts(module)
        if reason:
            refused.setdefault(reason, []).append(path)
        else:
            put_experts(module)
            taken[path] = {"weight_bits": 8 * module.w2_weight.element_size()}
    return taken, refused


def _wanted_weights(settings: dict[str, Any]) -> str:
    """Return the type of the weights of blocks that `--additional-config` asks for.

    Raises:
        UserError: It has another value for twellc.
    """
    given = settings.get("twellc", {})
    wanted = given.get("weights", KEEP) if isinstance(given, dict) and given.keys() <= {"weights"} else None
    if wanted not in WEIGHTS:
        expected = " or ".join(f'{{"twellc": {{"weights": "{each}"}}}}' for each in (KEEP, FP8_BLOCKS))
        got = json.dumps({"twellc": given})
        raise UserError("--additional-config", "twellc knows no such settings", got=got, expected=expected)
    refuse_weights_of_linear("--additional-config", "vLLM computes the linear layers outside of blocks", str(wanted))
    return str(wanted)


def _unfit(config: VllmConfig) -> str:
    """Return why the ops can run no block of the model; an empty text where they can."""
    if config.lora_config is not None:
        return "LoRA is switched on, which needs the results of each layer"
    if vllm.envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT is set; a block's result may differ in rounding with the number of tokens"
    if current_platform.is_cpu():
        return ""
    if not current_platform.is_cuda():
        return f"the ops run on CPUs and NVIDIA GPUs, not on {current_platform.device_name}"
    capability = tuple(current_platform.get_device_capability() or (0, 0))
    if capability < _CAPABILITY:
        return f"the GPU has compute capability {'.'.join(map(str, capability))}; the kernels need 8.0 or newer"
    return ""


def _misfit(candidate: Candidate, options: BlockOptions, dtype: torch.dtype) -> str:
    """Return why the op cannot compute the share of one rank; an empty text where it can."""
    ranks, block, weights = candidate.ranks, candidate.found.block, candidate.found.weights
    assert weights is not None
    if block.d_ff % ranks:
        return f"its {block.d_ff} neurons cannot be shared out evenly among {ranks} ranks"
    if ranks > 1 and any(operand.rows is not None for operand in weights.named().values()):
        return "its gate and up projections are one layer, which cannot be shared out"
    if current_platform.is_cpu():
        return ""
    widths = {"d_model": block.d_model, "d_ff": block.d_ff // ranks, "d_out": block.d_out}
    problem = problem_of(weights.variant, options, dtype_name(dtype), tokens=1, **widths)
    return library.fault_of(problem)
