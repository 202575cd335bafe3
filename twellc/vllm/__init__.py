"""vLLM with the `twell` ops: model classes that run ReLU blocks, and experts, by them.

    vllm serve MODEL --hf-overrides '{"architectures": ["TwellNemotronHForCausalLM"]}'
    vllm serve MODEL --hf-overrides '{"architectures": ["TwellForCausalLM"]}'

The first is vLLM's own class of a model, by its name with `Twell` before it (`native.py`); the second is vLLM's class
over that of transformers (`model.py`). vLLM finds `register` by the entry point `vllm.general_plugins` and calls it in
each of its processes. docs/serve.md shows a server. Importing this module imports neither torch nor vLLM.
"""

from __future__ import annotations

import logging

from twellc.base.modules import Extra

ARCHITECTURE = "TwellForCausalLM"
# The prefix to names of vLLM's own classes.
PREFIX = "Twell"
# The class that config.json of a SparseLM names; nobody else defines it.
SPARSELM = "SparseLlamaForCausalLM"
VLLM = Extra("twellc.vllm", "vllm", "vLLM", "vllm", tested=((0, 26), (0, 32)))
# A child of vLLM's own logger, so that its log shows these messages.
LOG = logging.getLogger("vllm.twellc")


def register() -> None:
    """Make the model classes known to vLLM, and SparseLM's configuration to transformers.

    A second call does nothing.

    Raises:
        UserError: vLLM is not installed, or cannot be imported.
    """
    registry = VLLM.load("model_executor.models.registry").ModelRegistry
    from twellc.vllm.sparselm import register_configuration

    known = registry.get_supported_archs()
    if ARCHITECTURE not in known:
        VLLM.warn_of_untried(LOG)
        own = [name for name in known if not name.startswith("Transformers")]
        for name in own:
            registry.register_model(f"{PREFIX}{name}", f"twellc.vllm.native:{PREFIX}{name}")
        for name in (ARCHITECTURE, SPARSELM):
            registry.register_model(name, f"twellc.vllm.model:{ARCHITECTURE}")
        # vLLM also looks up settings for a model by the name of the class.
        settings = VLLM.load("model_executor.models.config").MODELS_CONFIG_MAP
        settings.update({f"{PREFIX}{name}": settings[name] for name in own if name in settings})
    register_configuration()
