"""`TwellForCausalLM`: vLLM's model class over transformers, whose ReLU blocks the `twell` ops run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
import vllm.envs
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.models.transformers import TransformersForCausalLM
from vllm.platforms import current_platform

from twellc.base.dtypes import dtype_name
from twellc.base.errors import UserError, first_few
from twellc.base.transformers_private import causal_lm_classes
from twellc.base.version import __version__
from twellc.eager.module_blocks import FoundBlock
from twellc.loaders import sparselm
from twellc.options.weights import FP8_BLOCKS, KEEP, WEIGHTS, refuse_weights_of_linear
from twellc.passes.decide import decide, options_of
from twellc.plugins import library
from twellc.plugins.block import BlockOptions, problem_of
from twellc.vllm import ARCHITECTURE, LOG, blocks
from twellc.vllm.sparselm import register_model

# Of the GPU's compute capability, that the kernels need.
_CAPABILITY = (8, 0)


class TwellForCausalLM(TransformersForCausalLM):
    """A causal language model of transformers, served by vLLM.

    Its ReLU blocks, of 16 bits or of E4M3, are run by the `twell` ops; vLLM's log says how many, and why others are
    not. Those of 16 bits are quantised if `--additional-config` says so. All else is what `TransformersForCausalLM`
    does.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        register_model()
        config = vllm_config.model_config.hf_config
        if vllm_config.model_config.is_moe:
            what = "a mixture of experts has no blocks that twellc runs"
            raise UserError(ARCHITECTURE, what, got=config.model_type, fix="Serve it without --hf-overrides.")
        # By transformers' own name vLLM finds how checkpoints name their weights.
        own = causal_lm_classes().get(config.model_type)
        with _changed(config, architectures=[own] if own else config.architectures):
            super().__init__(vllm_config=vllm_config, prefix=prefix)

    def recursive_replace(self) -> None:
        """Put the ops in their places, before vLLM replaces all other layers."""
        config = get_current_vllm_config()
        wanted, unfit = _wanted_weights(config.additional_config), _unfit(config)
        if unfit:
            LOG.warning("all feed-forward blocks stay dense: %s", unfit)
        else:
            with torch.device("cpu"):
                found = list(blocks.find(self.model))
            _replace_blocks(self.model, found, config, wanted == FP8_BLOCKS)
        super().recursive_replace()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load a checkpoint; that of a SparseLM may name and transpose its weights in its own way."""
        if self.config.model_type == sparselm.MODEL_TYPE:
            weights = sparselm.as_linears(weights, self.config.hidden_size, self.config.intermediate_size)
        loaded: set[str] = super().load_weights(weights)
        return loaded


@contextmanager
def _changed(config: Any, **values: Any) -> Iterator[None]:
    """Let some of a configuration's values be others meanwhile."""
    before = {name: getattr(config, name) for name in values}
    try:
        for name, value in values.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def _replace_blocks(model: torch.nn.Module, found: list[FoundBlock], config: VllmConfig, quantise: bool) -> None:
    """Replace the blocks that the ops can run, quantised if asked; log which these are, and why others stay."""
    dtype = config.model_config.dtype
    decisions = decide([replace(each.block, dtype=dtype) for each in found], "all")
    taken: dict[str, Any] = {}
    refused: dict[str, list[str]] = {}
    for each, layer in zip(found, decisions, strict=True):
        options = options_of(each.block, layer, None)
        stays = each.block.refusal or ("" if layer.decision == "twell" else layer.reason)
        reason = stays or _misfit(each, options, dtype)
        layers: dict[str, LinearBase] = {}
        if not reason:
            layers = blocks.parallel(each, f"model.{each.path}", config.quant_config)
            fp8 = all(map(blocks.in_fp8, layers.values()))
            if not fp8 and any(type(made.quant_method) is not UnquantizedLinearMethod for made in layers.values()):
                reason = "its layers are quantised otherwise than to E4M3 with a scale for a tensor or an output"
        if reason:
            refused.setdefault(reason, []).append(layer.module)
        else:
            blocks.put(model, each, layers, options, quantise and not fp8)
            taken[layer.module] = {**asdict(options), "wfp8": 8 if fp8 or quantise else 16}
    for reason, modules in refused.items():
        LOG.warning(
            "%d of %d feed-forward blocks stay dense (%s): %s", len(modules), len(found), first_few(modules), reason
        )
    if taken:
        LOG.info("%d of %d feed-forward blocks are run by twellc %s", len(taken), len(found), __version__)
        scaled = sum(each["wfp8"] == 8 for each in taken.values())
        if scaled:
            LOG.info("%d of them read FP8 weights", scaled)
        # vLLM keeps compiled code by its configuration, and does not see which modules a model has.
        config.additional_config["twellc_blocks"] = {"version": __version__, "blocks": taken}
    elif not found:
        LOG.warning("no feed-forward block was found that twellc can run")


def _wanted_weights(settings: dict[str, Any]) -> str:
    """Return in which type the weights of blocks are to be read, of what `--additional-config` says.

    Raises:
        UserError: It says something else of twellc.
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
    """Say why no block of the model can be run by the ops; empty where blocks can be."""
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


def _misfit(found: FoundBlock, options: BlockOptions, dtype: torch.dtype) -> str:
    """Say why the share of one rank cannot be computed by the op; empty where it can."""
    ranks, block, weights = get_tensor_model_parallel_world_size(), found.block, found.weights
    assert weights is not None
    if block.d_ff % ranks:
        return f"its {block.d_ff} neurons cannot be shared out evenly among {ranks} ranks"
    if ranks > 1 and any(operand.rows is not None for operand in weights.named().values()):
        return "its gate and up projections are one layer, which cannot be shared out"
    if current_platform.is_cpu():
        return ""
    widths = {"d_model": block.d_model, "d_ff": block.d_ff // ranks, "d_out": block.d_out}
    problem = problem_of(weights.variant, options, dtype_name(dtype), tokens=1, **widths)
    fault: bytes | None = library.load().twell_validate(problem)
    return "" if fault is None else fault.decode()
