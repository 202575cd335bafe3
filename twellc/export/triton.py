"""The configuration of a model in a Triton model repository, in protobuf's text format."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from twellc.base.dtypes import BY_TENSORRT
from twellc.base.errors import UserError
from twellc.base.version import __version__

if TYPE_CHECKING:
    from twellc.export.plan import Plan, PlanTensor

CONFIG_NAME = "config.pbtxt"
PLAN_NAME = "model.plan"
VERSION = "1"


def model_folder(repository: Path, model: Path) -> Path:
    """Return the folder of a model in a repository: named as the model, of characters that Triton takes in a URL."""
    path = model.resolve()
    name = path.name if path.is_dir() else path.stem
    return repository / (re.sub(r"[^A-Za-z0-9_.-]", "_", name).lstrip(".") or "model")


def model_config(name: str, plan: Plan, profiles: int, register: dict[str, str] | None, ranks: int = 1) -> str:
    """Return the text of config.pbtxt.

    `max_batch_size` is 0: the dimensions are the engine's own, whole, because a first dimension need not be a batch.

    Args:
        name: Name of the model's folder.
        plan: The plan.
        profiles: Number of its optimization profiles.
        register: How to register the plugins that it needs, see `how_to_register`; None where it needs none.
        ranks: How many GPUs the plans of the model are for.

    Raises:
        UserError: An input or output is of a type that Triton does not have.
    """
    lines = [f"# Written by twellc {__version__}."]
    if register is not None:
        lines += ["# The plan needs TensorRT plugins; `twellc plugins` says where those of twellc are:"]
        lines.append(f"#   {register['triton']}")
    lines += [f"name: {json.dumps(name)}", 'backend: "tensorrt"', "max_batch_size: 0"]
    lines += [_tensor("input", tensor) for tensor in plan.inputs]
    lines += [_tensor("output", tensor) for tensor in plan.outputs]
    if ranks > 1:
        lines.append("# The backend must be built with TRITON_ENABLE_TENSORRT_MULTI_DEVICE, for TensorRT 11 or newer.")
        lines.append("instance_group { count: 1 kind: KIND_MODEL }")
        parameters = {
            "enable_multi_device": "true",
            "multi_device_gpus": ",".join(map(str, range(ranks))),
            "multi_device_per_rank_engines": "true",
        }
        lines += [f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}'
                  for key, value in parameters.items()]  # fmt: skip
    elif profiles > 1:
        # Triton picks the profile that fits a request, among those of the instance.
        numbers = ", ".join(f'"{number}"' for number in range(profiles))
        lines.append(f"instance_group {{ count: 1 kind: KIND_GPU profile: [ {numbers} ] }}")
    return "\n".join(lines) + "\n"


def _tensor(kind: str, tensor: PlanTensor) -> str:
    # Triton has no tensors of rank 0, but gives the engine another shape than the client's.
    shape = tensor.shape or (1,)
    reshape = "" if tensor.shape else " reshape { shape: [ ] }"
    dims, dtype = ", ".join(map(str, shape)), BY_TENSORRT[tensor.dtype.upper()].triton
    if not dtype:
        raise UserError("--triton", "Triton has no tensors of this type", got=f"{tensor.name} in {tensor.dtype}")
    return f"{kind} {{ name: {json.dumps(tensor.name)} data_type: {dtype} dims: [ {dims} ]{reshape} }}"
