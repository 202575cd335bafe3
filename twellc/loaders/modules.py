"""Open a language model of transformers to run its modules one by one: on a device, or layer by layer from the disk."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import sympy
import torch

from twellc.base.dtypes import DTYPES, dtype_name, torch_dtype
from twellc.base.errors import UserError, first_line
from twellc.base.files import temporary_folder
from twellc.base.transformers_private import experts_of, is_causal, nothing_fetched
from twellc.loaders import sparselm
from twellc.loaders.checkpoint import read_config
from twellc.loaders.huggingface import class_of, configuration_of, open_directory, settings_of
from twellc.loaders.huggingface_inputs import Dynamic, inputs_of, vocabulary_of
from twellc.passes.sizes.inputs import InputSpec, ModelInputs

# Of free memory: the rest is for what a batch needs.
_SHARE_OF_WEIGHTS = 0.8


@dataclass(frozen=True)
class OpenModel:
    """A language model of transformers.

    Attributes:
        model: The model, in eval mode.
        inputs: Its inputs: `input_ids` and, if rows may be padded, `attention_mask`, int64 [batch, sequence].
        vocabulary: Number of token ids.
        padding: `mask` or `none`, see `TracingOptions`.
        dtype: The precision of its weights, bf16 or fp16.
        notes: What the user should hear about how it was loaded.
    """

    model: Any
    inputs: ModelInputs
    vocabulary: int | None
    padding: str
    dtype: str
    notes: list[str]


def empty_with_experts(path: Path) -> Any | None:
    """Return a causal language model with experts, without weights; None for a directory of another model."""
    config = read_config(path)
    if config.get("model_type") == sparselm.MODEL_TYPE:
        return None
    with nothing_fetched():
        model_class = class_of(path, config)
        made = configuration_of(path, model_class, config)
        try:
            with torch.device("meta"):
                model = model_class(copy.deepcopy(made)).eval()
        except Exception:  # transformers' own; whoever loads the model says what is wrong with it
            return None
        return model if experts_of(model) and is_causal(model) else None


@contextmanager
def opened(
    path: Path, empty: Any, padding: str | None, requested: str | None, device: torch.device
) -> Iterator[OpenModel]:
    """Open the model of a directory within this context.

    Where its weights do not fit into the memory of the device, each layer's are read from the disk in each run.

    Args:
        path: The directory.
        empty: The same model without weights.
        padding: See `TracingOptions`.
        requested: The precision asked for, bf16 or fp16; None takes what config.json says of the weights, or bf16.
        device: Where it is to run.

    Raises:
        UserError: It cannot be loaded, or leaves no choice of `padding`.
    """
    own = empty.config.dtype  # None where config.json has none
    dtype = requested or next((name for name in DTYPES if torch_dtype(name) is own), "bf16")
    is_own = own in (None, torch_dtype(dtype))
    notes = [] if is_own else [f"the model is in {dtype_name(own)}; it runs in {DTYPES[dtype]}"]
    size = sum(each.numel() for each in empty.parameters()) * 2
    with nothing_fetched(), temporary_folder() as folder:
        if size <= _SHARE_OF_WEIGHTS * _free_memory(device):
            model, _, others = open_directory(path, lambda _: torch_dtype(dtype))
            model = model.to(device)
        else:
            model, others = (
                _from_disk(path, empty, torch_dtype(dtype), device, folder),
                [f"its weights, {size / 1e9:.0f} GB, do not fit into memory: each layer's are read in each run"],
            )
        settings = settings_of(path, model, padding, "all")
        masked = settings.get("padding") != "none"
        yield OpenModel(
            model,
            _inputs(path, model, masked),
            vocabulary_of(model, inputs_of(path, model, masked)),
            settings.get("padding", "none"),
            dtype,
            notes + others,
        )


def _free_memory(device: torch.device) -> int:
    """Return how many bytes of a device's memory are free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _from_disk(path: Path, empty: Any, dtype: torch.dtype, device: torch.device, folder: Path) -> Any:
    """Return the model with its layers' weights on the disk; those that it makes of several go into a folder."""
    if find_spec("accelerate") is None:
        what = "its weights do not fit into memory, and reading them by layer needs accelerate"
        raise UserError(str(path), what, fix="Run `pip install accelerate`, or use more memory.")
    blocks = {name for name, module in empty.named_modules() if type(module) is torch.nn.ModuleList}
    outer = {name for name in blocks if not any(name.startswith(f"{each}.") for each in blocks)}
    placed: dict[str, Any] = {}
    for name, _ in [*empty.named_parameters(), *empty.named_buffers()]:
        within = next((each for each in outer if name.startswith(f"{each}.")), None)
        if within is None:
            placed[name.rpartition(".")[0] or name] = device.index if device.type == "cuda" else "cpu"
        else:
            placed[f"{within}.{name.removeprefix(f'{within}.').split('.')[0]}"] = "disk"
    try:
        model = type(empty).from_pretrained(
            str(path), device_map=placed, offload_folder=str(folder), dtype=dtype, local_files_only=True
        )
    except Exception as error:  # transformers raises what it likes
        raise UserError(str(path), f"transformers cannot read it layer by layer ({first_line(error)})") from error
    return model.eval().requires_grad_(False)


def _inputs(path: Path, model: Any, masked: bool) -> ModelInputs:
    specs, hints = [], {}
    bounds: dict[str, tuple[int, int | None]] = {}
    for name, each in inputs_of(path, model, masked).items():
        shape = tuple(sympy.Symbol(dim.name) if isinstance(dim, Dynamic) else dim for dim in each.shape)
        specs.append(InputSpec(name, each.dtype, shape))
        for dim in each.dynamic().values():
            bounds[dim.name], hints[dim.name] = (dim.least, dim.largest), dim.traced
    return ModelInputs(specs, bounds, hints)
