"""vLLM with the `twell` ops: a model class that runs the ReLU blocks of Hugging Face models by them.

    vllm serve MODEL --hf-overrides '{"architectures": ["TwellForCausalLM"]}'

vLLM finds `register` by the entry point `vllm.general_plugins` and calls it in each of its processes. docs/serve.md
shows a server. Importing this module imports neither torch nor vLLM.
"""

from __future__ import annotations

import logging

from twellc.base.modules import Extra

ARCHITECTURE = "TwellForCausalLM"
# What config.json of a SparseLM names; there is no other class for it.
SPARSELM = "SparseLlamaForCausalLM"
VLLM = Extra("twellc.vllm", "vllm", "vLLM", "vllm", tested=((0, 26), (0, 32)))
# Below vLLM's own logger, so that its log shows these messages.
LOG = logging.getLogger("vllm.twellc")


def register() -> None:
    """Make the model class known to vLLM, and SparseLM's configuration to transformers.

    Calling it again does nothing.

    Raises:
        UserError: vLLM is not installed, or cannot be imported.
    """
    registry = VLLM.load("model_executor.models.registry").ModelRegistry
    from twellc.vllm.sparselm import register_configuration

    if registry.models.get(ARCHITECTURE) is None:
        VLLM.warn_of_untried(LOG)
        for name in (ARCHITECTURE, SPARSELM):
            registry.register_model(name, f"twellc.vllm.model:{ARCHITECTURE}")
    register_configuration()
