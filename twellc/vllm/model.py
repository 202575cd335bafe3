"""`TwellForCausalLM`: vLLM's model class over transformers, whose ReLU blocks the `twell` ops run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.models.transformers import TransformersForCausalLM

from twellc.base.changes import Changed
from twellc.base.errors import UserError
from twellc.base.transformers_private import causal_lm_classes
from twellc.loaders import sparselm
from twellc.vllm import ARCHITECTURE, PREFIX, blocks
from twellc.vllm.sparselm import register_model
from twellc.vllm.taking import Candidate, take


class TwellForCausalLM(TransformersForCausalLM):
    """A causal language model of transformers, served by vLLM.

    The `twell` ops run its ReLU blocks, of 16 bits or of E4M3; vLLM's log says how many, and why not others. Blocks of
    16 bits are quantised if `--additional-config` says so. All else is inherited from `TransformersForCausalLM`.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        register_model()
        config = vllm_config.model_config.hf_config
        # vLLM finds the weights' names in checkpoints by transformers' own name of the class.
        own = causal_lm_classes().get(config.model_type)
        if vllm_config.model_config.is_moe or any(name.startswith("mamba_") for name in vars(config)):
            _refuse(config.model_type, own)
        with Changed((config, "architectures", [own] if own else config.architectures)):
            super().__init__(vllm_config=vllm_config, prefix=prefix)

    def recursive_replace(self) -> None:
        """Put the ops in place, before vLLM replaces all other layers."""
        take(self._candidates, (), get_current_vllm_config())
        super().recursive_replace()

    def _candidates(self) -> Iterator[Candidate]:
        config, ranks = get_current_vllm_config(), get_tensor_model_parallel_world_size()
        for found in blocks.find(self.model):
            layers = partial(blocks.parallel, found, f"model.{found.path}", config.quant_config)
            yield Candidate(found, layers, partial(blocks.put, self.model, found), ranks)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load a checkpoint; a SparseLM's may have other names and transposed weights."""
        if self.config.model_type == sparselm.MODEL_TYPE:
            weights = sparselm.as_linears(weights, self.config.hidden_size, self.config.intermediate_size)
        loaded: set[str] = super().load_weights(weights)
        return loaded


def _refuse(model_type: str, own: str | None) -> None:
    """Raise a UserError: vLLM's class over transformers supports neither separate experts nor states of Mamba."""
    fix = "Serve it without --hf-overrides."
    if own in ModelRegistry.models:
        fix = f'Take vLLM\'s own class: --hf-overrides \'{{"architectures": ["{PREFIX}{own}"]}}\'.'
    raise UserError(ARCHITECTURE, "it serves no mixtures of experts, and no Mamba", got=model_type, fix=fix)
