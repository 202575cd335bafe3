"""SparseLM (Sakana AI): ReLU-gated Llamas that transformers has no class for.

Their config.json says `hidden_act: silu`, while the model type `llama_sparse_relu` means ReLU. Their checkpoints name
the projections as Llama does, or `gate_weight` [d_model, d_ff], `up_weight` [d_ff, d_model] and `down_weight`
[d_ff, d_model], and hold counters of the training besides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from twellc.base.errors import UserError, first_line

if TYPE_CHECKING:
    from transformers import LlamaConfig

MODEL_TYPE = "llama_sparse_relu"
_COUNTERS = ("tracker.", "metrics_accumulator.")
_BARE_WEIGHT = re.compile(r"(.*\.mlp)\.(gate|up|down)_weight")


def as_llama(
    path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> tuple[LlamaConfig, dict[str, torch.Tensor]]:
    """Return the configuration and the tensors of a LlamaForCausalLM for those of a SparseLM checkpoint.

    Raises:
        UserError: The configuration is damaged, or a projection has an unexpected shape.
    """
    from transformers import LlamaConfig

    kept = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    try:
        llama = LlamaConfig(**{**kept, "hidden_act": "relu"})
    except Exception as error:  # transformers' and its helpers' own, for values that they do not take
        where = str(path / "config.json")
        raise UserError(where, f"transformers cannot read the configuration ({first_line(error)})") from error
    arranged = dict(as_linears(tensors.items(), llama.hidden_size, llama.intermediate_size))
    dtypes = {tensor.dtype for tensor in arranged.values() if tensor.is_floating_point()}
    llama.dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return llama, arranged


def as_linears(
    tensors: Iterable[tuple[str, torch.Tensor]], d_model: int, d_ff: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint with the names and shapes that they have in a Llama, without the counters.

    Raises:
        UserError: A projection has an unexpected shape.
    """
    for name, tensor in tensors:
        if not any(counter in name for counter in _COUNTERS):
            yield _as_linear(name, tensor, d_model, d_ff)


def _as_linear(name: str, tensor: torch.Tensor, d_model: int, d_ff: int) -> tuple[str, torch.Tensor]:
    """Return a tensor with the name and the shape, [out, in], that it has in a Llama."""
    found = _BARE_WEIGHT.fullmatch(name)
    if found is None:
        return name, tensor
    block, projection = found[1], found[2]
    stored = (d_model, d_ff) if projection == "gate" else (d_ff, d_model)
    if tuple(tensor.shape) != stored:
        raise UserError(f"weight {name}", "has an unexpected shape", got=str(tuple(tensor.shape)), expected=str(stored))
    return f"{block}.{projection}_proj.weight", tensor if projection == "up" else tensor.t().contiguous()
