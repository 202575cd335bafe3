"""vLLM with the `twell` ops: a model class that runs the ReLU blocks of Hugging Face models by them.

    vllm serve MODEL --hf-overrides '{"architectures": ["TwellForCausalLM"]}'

vLLM finds `register` by the entry point `vllm.general_plugins` and calls it in each of its processes. docs/serve.md
shows a server. Importing this module imports neither torch nor vLLM.
"""

from __future__ import annotations

import importlib
import logging
import re

from twellc.base.errors import UserError

ARCHITECTURE = "TwellForCausalLM"
# What config.json of a SparseLM names; there is no other class for it.
SPARSELM = "SparseLlamaForCausalLM"
# Releases of vLLM that this ran in, by their first two numbers.
TESTED = ((0, 26), (0, 32))
# Below vLLM's own logger, so that its log shows what is said here.
LOG = logging.getLogger("vllm.twellc")


def register() -> None:
    """Make the model class known to vLLM, and SparseLM's configuration to transformers.

    Calling it again does nothing.

    Raises:
        UserError: vLLM is not installed, or cannot be imported.
    """
    fix = "Install it: pip install 'twellc[vllm]'."
    try:
        package = importlib.import_module("vllm")
        registry = importlib.import_module("vllm.model_executor.models.registry").ModelRegistry
    except ModuleNotFoundError as error:
        raise UserError("twellc.vllm", f"the module {error.name} is not installed", fix=fix) from error
    except (ImportError, OSError, RuntimeError) as error:
        raise UserError("twellc.vllm", f"vLLM cannot be imported ({error})", fix=fix) from error
    from twellc.vllm.sparselm import register_configuration

    if registry.models.get(ARCHITECTURE) is None:
        version = str(package.__version__)
        if tuple(map(int, re.findall(r"\d+", version)[:2])) not in TESTED:
            tested = ", ".join(f"{major}.{minor}" for major, minor in TESTED)
            LOG.warning("vLLM %s was not tried with twellc; tried: %s", version, tested)
        for name in (ARCHITECTURE, SPARSELM):
            registry.register_model(name, f"twellc.vllm.model:{ARCHITECTURE}")
    register_configuration()
