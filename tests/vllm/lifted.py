"""Let vLLM make experts without a gate on a CPU, where it has no kernel for them: a plugin of vLLM, for tests.

vLLM refuses them before it asks who computes them. With this, those that `twellc.vllm` takes run by the op's meaning,
and all around them by vLLM's own code; any others fail once they are called.
"""

from __future__ import annotations

import contextlib
from typing import Any


def lift() -> None:
    """Take back the refusal; calling it again changes nothing."""
    from vllm.model_executor.layers.fused_moe import config, unquantized_fused_moe_method
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.quantization import modelopt

    kind: Any = config.FusedMoEConfig
    own = kind.__post_init__

    def without_refusal(self: Any) -> None:
        with contextlib.suppress(NotImplementedError):  # raised last
            own(self)

    kind.__post_init__ = without_refusal
    methods: Any = (unquantized_fused_moe_method, modelopt)
    methods[0].select_unquantized_moe_backend = lambda **_: (UnquantizedMoeBackend.OOT, None)
    methods[1].select_fp8_moe_backend = lambda **_: (None, None)
