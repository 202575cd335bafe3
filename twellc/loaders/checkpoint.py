"""The configuration and the weights in a Hugging Face directory, read without transformers.

transformers would look at other files of the directory, too: at adapters, pickles, code and settings of generation.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from twellc.base.errors import UserError, first_few, first_line
from twellc.base.files import open_file, read_file
from twellc.loaders.method import Matrix
from twellc.loaders.quantization import refuse_settings, take_matrices

_WEIGHTS, _INDEX, _ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_config.json"
_EXPORT = "Export it with torch.export.save and compile that archive."
_MERGE = "merge it with merge_and_unload() of peft, and save what that returns with save_pretrained"
# Keys of a configuration that choose implementations, which may be native code of a hub, or name files to fetch.
_CHOICES = {
    "attn_implementation", "_attn_implementation", "_attn_implementation_internal", "_attn_implementation_autoset",
    "experts_implementation", "_experts_implementation", "_experts_implementation_internal", "use_kernels",
    "kernel_config", "fusion_config", "distributed_config", "custom_generate", "transformers_weights",
    "use_pretrained_backbone", "name_or_path", "_name_or_path",
}  # fmt: skip
_QUANTISED, _MODELOPT = ("quantization_config", "compression_config"), "hf_quant_config.json"
# What wraps a module, and so puts a part into the names of its tensors.
_WRAPPERS = {
    "_orig_mod.": "torch.compile",
    "_fsdp_wrapped_module.": "FullyShardedDataParallel",
    "_checkpoint_wrapped_module.": "activation checkpointing",
}
_PARALLEL = "module."
# Numbers of a configuration: of modules, of names, of a base or a token, and of all else.
_PARTS = re.compile("layer|depth|block|stage|repeat")
_DEEPEST = 64
# Sizes under such names are no numbers of parts: `shared_expert_intermediate_size`, `block_size`.
_NO_PARTS = re.compile("size|dim|width|length|window|position|capacity")
_MOST_PARTS, _LARGEST_SIZE = 1024, 1 << 27
_MOST_OF = (
    (re.compile("num_labels"), 10**6),
    (re.compile("theta|base|seed|_id$|_id[.]|token|factor"), 2**63 - 1),
    (re.compile("expert"), 1 << 16),
)


@dataclass(frozen=True)
class Checkpoint:
    """A model as it is stored.

    Attributes:
        config: What config.json says, without what chooses implementations.
        tensors: The weights by name, but those that are quantised; they are in the mapped files.
        matrices: The quantised matrices, by the names of their weights.
        notes: What the user should hear.
    """

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    matrices: dict[str, Matrix]
    notes: list[str]


def read_checkpoint(path: Path) -> Checkpoint:
    """Read config.json and the weights of a directory.

    Raises:
        UserError: One of them is missing, damaged, quantised in a way that is not read, or an adapter, or the model
            needs remote code.
    """
    config = read_config(path)
    stored, notes = _read_weights(path)
    _refuse_adapter(path, stored)
    tensors, wrappers = _unwrapped(stored)
    if len(tensors) < len(stored):
        raise UserError(str(path), "several of its weights have the same name", got=first_few(sorted(stored)))
    if wrappers:
        notes.append(f"the names of the weights hold {' and '.join(wrappers)}; they are taken without that")
    if (path / _ADAPTER).is_file():
        notes.append(f"the adapter beside the model ({_ADAPTER}) is not in the plan: {_MERGE}")
    tensors, matrices, others = take_matrices(path, tensors)
    return Checkpoint(config, tensors, matrices, notes + others)


# ---- config.json ----


def read_config(path: Path) -> dict[str, Any]:
    """Return what config.json of a directory says, without what chooses implementations, and how it is quantised.

    Raises:
        UserError: There is none, it is damaged, or the model is an adapter, quantised in a way that is not read, or
            needs remote code.
    """
    file = path / "config.json"
    if not file.is_file():
        if (path / _ADAPTER).is_file():
            raise _only_an_adapter(path)
        raise UserError(str(path), "no config.json in this folder", expected="a Hugging Face directory")
    config = read_json(file)
    for place, key, value in _entries(config):
        if key == "auto_map":
            what = f"the model needs remote code ({place})"
            raise UserError(str(file), what, expected="an architecture of transformers itself", fix=_EXPORT)
        if key in _QUANTISED and value:
            refuse_settings(str(file), place, value)
    if (path / _MODELOPT).is_file():
        found = read_json(path / _MODELOPT).get("quantization")
        settings = {**found, "quant_method": "modelopt"} if isinstance(found, dict) else None
        refuse_settings(str(path / _MODELOPT), "quantization", settings)
    return dict(_without_choices(config))


def read_generation_config(path: Path) -> dict[str, Any]:
    """Return what generation_config.json of a directory says; nothing where there is none.

    Raises:
        UserError: It is damaged.
    """
    file = path / "generation_config.json"
    return read_json(file) if file.is_file() else {}


def end_tokens(path: Path, config: Any) -> list[int]:
    """Return the tokens that end a text, as generation_config.json has them, else the model's configuration.

    Args:
        path: The model's directory.
        config: Its configuration, of transformers.

    Raises:
        UserError: There is neither an integer nor a list of integers.
    """
    settings = read_generation_config(path)
    source = "generation_config.json" if "eos_token_id" in settings else "config.json"
    found = settings.get("eos_token_id", config.get_text_config(decoder=True).eos_token_id)
    several = found if isinstance(found, list) else [] if found is None else [found]
    if not all(map(_is_token, several)):
        expected = "an integer, a list of integers, or null"
        raise UserError(str(path / source), "eos_token_id is not a token", got=repr(found), expected=expected)
    return several


def pad_token(path: Path) -> int | None:
    """Return the token that pads texts, as generation_config.json of a directory has it, else its config.json.

    Raises:
        UserError: One of these is damaged, or has no integer there.
    """
    for name in ("generation_config.json", "config.json"):
        found = read_json(path / name).get("pad_token_id") if (path / name).is_file() else None
        if found is not None and not _is_token(found):
            raise UserError(
                str(path / name), "pad_token_id is not a token", got=repr(found), expected="an integer, or null"
            )
        if found is not None:
            return int(found)
    return None


def _is_token(value: object) -> bool:
    """Whether it is an integer that a tensor of tokens holds; of some models it is negative, for none."""
    return type(value) is int and -(2**63) <= value < 2**63


def read_json(file: Path) -> dict[str, Any]:
    """Read an object of JSON.

    Raises:
        UserError: The file holds something else, or cannot be read.
    """
    try:
        config = json.loads(read_file(file))
        _refuse_nesting(config)
    except (ValueError, RecursionError) as error:
        raise UserError(str(file), f"cannot be read as JSON ({error})") from error
    if not isinstance(config, dict):
        raise UserError(str(file), "is not a JSON object")
    return config


def _refuse_nesting(value: Any) -> None:
    """Fail with a ValueError for JSON that is nested more deeply than its readers walk down."""
    level = [value]
    for _ in range(_DEEPEST):
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [each for values in inner for each in values]
    if level:
        raise ValueError(f"it is nested more than {_DEEPEST} deep")


def _entries(value: Any, place: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield the entries of a configuration and of those in it, each with its place, such as `text_config.auto_map`."""
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(value, dict):
            yield f"{place}{key}", str(key), each
        if isinstance(each, dict | list):
            yield from _entries(each, f"{place}{key}.")


def _without_choices(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_choices(each) for key, each in value.items() if key not in (*_CHOICES, *_QUANTISED)}
    return [_without_choices(each) for each in value] if isinstance(value, list) else value


def refuse_absurd_sizes(path: Path, checkpoint: Checkpoint) -> None:
    """Fail if a number of a configuration is far from what the weights can be for, before a model is made of it.

    Raises:
        UserError: It is.
    """
    stored = list(checkpoint.tensors.values())
    elements = sum(each.numel() for each in stored) + sum(each.shape.numel() for each in checkpoint.matrices.values())
    for place, _, value in _entries(checkpoint.config):
        if type(value) is not int:
            continue
        most = next((limit for pattern, limit in _MOST_OF if pattern.search(place)), max(_LARGEST_SIZE, elements))
        if _PARTS.search(place) and not _NO_PARTS.search(place):
            most = max(_MOST_PARTS, len(stored) + len(checkpoint.matrices))
        if abs(value) > most:
            raise UserError(
                str(path / "config.json"),
                f"{place} is no size of a model with these weights",
                got=str(value) if abs(value) < 10**18 else "more than 10^18",
                expected=f"at most {most}",
                fix="Check that config.json and the weights belong together.",
            )


def activations(config: dict[str, Any]) -> dict[str, str]:
    """Return what a configuration and those in it say under names of activations, by their places."""
    return {place: value for place, key, value in _entries(config) if "act" in key and isinstance(value, str)}


# ---- weights ----


def read_stored(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a directory as its files have them, by name; they are in the mapped files.

    Raises:
        UserError: The files are missing or damaged.
    """
    return _read_weights(path)[0]


def _read_weights(path: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    files, notes = _weight_files(path)
    stored: dict[str, torch.Tensor] = {}
    for file in files:
        stored |= read_tensors(file)
    return stored, notes


def _weight_files(path: Path) -> tuple[list[Path], list[str]]:
    """Return the weights' files, which are safetensors inside of the folder; and a note on an index of no use."""
    index = path / _INDEX
    if (path / _WEIGHTS).is_file():
        note = f"{_INDEX} is not used: the whole model is in {_WEIGHTS}"
        return [path / _WEIGHTS], [note] if index.is_file() else []
    if not index.is_file():
        raise _no_weights(path)
    try:
        names = set(json.loads(read_file(index))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise UserError(str(index), f"is not an index of weights ({error!r})") from error
    for name in sorted(map(str, names)):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise UserError(str(index), "names a file outside of its folder", got=repr(name))
        if Path(name).name != name:
            what = "names a file in another folder"
            fix = "Move the files beside config.json, and name them without the folder."
            raise UserError(str(index), what, got=repr(name), expected="files beside it", fix=fix)
        if not (path / name).is_file():
            raise UserError(
                str(path / name),
                "the weights are missing",
                expected="safetensors",
                fix=f"{_INDEX} names this file: get it, too, or remove the index.",
            )
    return [path / str(name) for name in sorted(names)], []


def _no_weights(path: Path) -> UserError:
    """Say what there is instead of the weights."""
    if (path / _ADAPTER).is_file():
        return _only_an_adapter(path)
    file, expected = str(path / _WEIGHTS), "safetensors"
    names = sorted(each.name for each in path.iterdir() if each.is_file())
    others = [name for name in names if name.endswith(".safetensors")]
    if others:
        fix = f"If that is the model, call it {_WEIGHTS}; if these are its parts, add {_INDEX}."
        return UserError(file, "the weights are missing", got=first_few(others), expected=_WEIGHTS, fix=fix)
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickles:
        return UserError(
            file,
            "the weights are missing",
            got=f"{first_few(pickles)}, which may execute code",
            expected=expected,
            fix="If you trust their author, load the model with transformers and write it with save_pretrained.",
        )
    foreign = [name for name in names if name.endswith((".gguf", ".h5", ".msgpack", ".onnx"))]
    return UserError(
        file,
        "the weights are missing",
        got=first_few(foreign),
        expected=expected,
        fix="Get the rest of the model's files." if not foreign else "",
    )


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Read a safetensors file.

    Raises:
        UserError: It is damaged, or cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    open_file(file).close()  # safetensors says of a file that may not be read that it is missing
    try:
        return load_file(file)
    except SafetensorError as error:
        raise UserError(
            str(file), f"is not a whole safetensors file ({first_line(error)})", fix="Copy or download it again."
        ) from error


def _unwrapped(stored: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return tensors by the names that they have in the model itself, and what was in their names besides."""
    found: Counter[str] = Counter()
    names = {}
    for name in stored:
        short = name
        for part, wrapper in _WRAPPERS.items():
            if f".{part}" in f".{short}":
                found[f"{part!r} of {wrapper}"] += 1
                short = f".{short}".replace(f".{part}", ".").removeprefix(".")
        names[name] = short
    if names and all(name.startswith(_PARALLEL) for name in names.values()):
        found[f"{_PARALLEL!r} of DataParallel"] += 1
        names = {name: short.removeprefix(_PARALLEL) for name, short in names.items()}
    return {names[name]: tensor for name, tensor in stored.items()}, list(found)


# ---- adapters ----


def _only_an_adapter(path: Path) -> UserError:
    base = read_json(path / _ADAPTER).get("base_model_name_or_path")
    return UserError(
        str(path), "holds an adapter, and no model", got=f"an adapter of {base}" if base else "", fix=f"First {_MERGE}."
    )


def _refuse_adapter(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    parts = [name for name in tensors if re.search(r"\.(lora_[A-Za-z_]+|base_layer|modules_to_save)\.", name)]
    if parts:
        what = "the weights hold an adapter beside the model's own"
        raise UserError(str(path), what, got=first_few(parts), fix=f"First {_MERGE}.")
