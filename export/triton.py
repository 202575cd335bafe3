"""The configuration of a model in a Triton model repository, in protobuf's text format."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from twellc.base.version import __version__
from twellc.plugins.registration import NEEDS_PLUGINS, how_to_register

if TYPE_CHECKING:
    from twellc.export.plan import Plan, Tensor

CONFIG_NAME = "config.pbtxt"
PLAN_NAME = "model.plan"
VERSION = "1"

# TensorRT's names, in lower case.
_TYPES = {
    "float": "TYPE_FP32",
    "half": "TYPE_FP16",
    "bf16": "TYPE_BF16",
    "int8": "TYPE_INT8",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "uint8": "TYPE_UINT8",
    "bool": "TYPE_BOOL",
}


def model_folder(repository: Path, model: Path) -> Path:
    """Return the folder of a model in a repository: named as the model, of characters that Triton takes in a URL."""
    path = model.resolve()
    name = path.name if path.is_dir() else path.stem
    return repository / (re.sub(r"[^A-Za-z0-9_.-]", "_", name).lstrip(".") or "model")


def model_config(name: str, plan: Plan, profiles: int, needs_plugins: bool) -> str:
    """Return the text of config.pbtxt.

    `max_batch_size` is 0: the dimensions are the engine's own, whole, because a first dimension need not be a batch.

    Args:
        name: Name of the model's folder.
        plan: The plan.
        profiles: Number of its optimization profiles.
        needs_plugins: Whether it needs the plugins.
    """
    lines = [f"# Written by twellc {__version__}."]
    if needs_plugins:
        command = how_to_register(PLAN_NAME, "tensorrt")["triton"]
        lines += [f"# The plan {NEEDS_PLUGINS}:", f"#   {command}"]
    lines += [f"name: {json.dumps(name)}", 'backend: "tensorrt"', "max_batch_size: 0"]
    lines += [_tensor("input", tensor) for tensor in plan.inputs]
    lines += [_tensor("output", tensor) for tensor in plan.outputs]
    if profiles > 1:
        # Triton picks the profile that fits a request, among those of the instance.
        numbers = ", ".join(f'"{number}"' for number in range(profiles))
        lines.append(f"instance_group {{ count: 1 kind: KIND_GPU profile: [ {numbers} ] }}")
    return "\n".join(lines) + "\n"


def _tensor(kind: str, tensor: Tensor) -> str:
    # Triton has no tensors of rank 0, but gives the engine another shape than the client's.
    shape = tensor.shape or (1,)
    reshape = "" if tensor.shape else " reshape { shape: [ ] }"
    dims = ", ".join(map(str, shape))
    return f"{kind} {{ name: {json.dumps(tensor.name)} data_type: {_TYPES[tensor.dtype]} dims: [ {dims} ]{reshape} }}"
