"""Load sparse autoencoders and transcoders from the files that they are published in.

    sae-lens            a folder with cfg.json and sae_weights.safetensors
    Gemma Scope         params.npz, or a folder with it
    Gemma Scope 2       a folder with config.json and params.safetensors
    Qwen-Scope          layer….sae.pt: a dict of tensors, W_enc [d_features, d_in], W_dec [d_in, d_features]

Of all but the last W_enc is [d_in, d_features] and W_dec [d_features, d_out].
"""

from __future__ import annotations

import contextlib
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from twellc.base.bounds import refuse_bomb, refuse_unfolding
from twellc.base.dtypes import dtype_name
from twellc.base.errors import UserError, first_few, first_line
from twellc.loaders.autoencoder import Dictionary, SparseAutoencoder
from twellc.loaders.checkpoint import read_json, read_tensors
from twellc.loaders.loaded import LoadedModel
from twellc.loaders.other_autoencoders import SAE_LENS, library_of
from twellc.loaders.tracing import keep_tensor_outputs, trace
from twellc.options.source import refuse_missing

_CONFIG, _WEIGHTS = "cfg.json", "sae_weights.safetensors"
_ARRAYS, _PARAMETERS = "params.npz", "params.safetensors"
_COMMON = ("W_enc", "W_dec", "b_dec")
# The weights of each architecture besides the common ones. sae-lens trains the last two, and saves jumprelu.
_ARCHITECTURES = {
    "standard": ("b_enc",),
    "jumprelu": ("b_enc", "threshold"),
    "topk": ("b_enc",),
    "gated": ("b_gate", "b_mag", "r_mag"),
    "transcoder": ("b_enc",),
    "jumprelu_transcoder": ("b_enc", "threshold"),
    "skip_transcoder": ("b_enc", "W_skip"),
    "jumprelu_skip_transcoder": ("b_enc", "threshold", "W_skip"),
    "batchtopk": ("b_enc", "threshold"),
    "matryoshka_batchtopk": ("b_enc", "threshold"),
}
_NORMALISATIONS = ("none", "constant_norm_rescale", "layer_norm")
_FOLDED = ("expected_average_only_in", "covariance_whitening")  # into the weights, or into what x is
_DTYPES = ("float32", "float64", "float16", "bfloat16")
_TOKENS = 1, 2048, 8192


@dataclass
class _Stored:
    """An autoencoder as its files have it.

    Attributes:
        where: The file of its weights, for messages.
        weights: Its weights, by the names that sae-lens has.
        config: What sae-lens says of it in cfg.json.
        notes: What the user should hear.
    """

    where: Path
    weights: dict[str, Tensor]
    config: dict[str, Any]
    notes: list[str] = field(default_factory=list)


# ---- for others ----


def is_autoencoder(path: Path) -> bool:
    """Whether there are files of a sparse autoencoder at a path."""
    return _reader_of(path) is not None


def load_autoencoder(path: str | Path) -> SparseAutoencoder:
    """Return a sparse autoencoder or transcoder as a module in eval mode, on the CPU, in the dtype of its files.

    Its `block` is what the rest of twellc takes for a feed-forward block, and its `encode` gives the features.

    Args:
        path: A folder of sae-lens, params.npz of Gemma Scope or a folder with it or with Gemma Scope 2's
            params.safetensors, or a .pt of Qwen-Scope. Nothing in them is executed.

    Raises:
        UserError: There is none, its files are damaged or do not fit each other, or it is of a kind that is not read.
    """
    path = Path(path)
    refuse_missing(path, EXPECTED)
    read = _reader_of(path)
    if read is None:
        refuse_other_libraries(path)
        raise UserError(str(path), "there is no sparse autoencoder", expected=EXPECTED)
    return _module_of(read(path)).eval().requires_grad_(False)


def refuse_other_libraries(path: Path) -> None:
    """Raise `UserError` for a sparse autoencoder in files that are not read."""
    found = library_of(path)
    if found is not None:
        file, library = found
        beside = {_WEIGHTS: _CONFIG, _PARAMETERS: "config.json"}.get(file.name)
        if beside is not None and library == SAE_LENS:
            raise UserError(str(file), f"is read with {beside} beside it", fix="Name the folder that holds both.")
        raise UserError(
            str(file),
            "holds a sparse autoencoder in a form that is not read",
            got=f"weights as {library} names them",
            expected=EXPECTED,
            fix=f"Write {_CONFIG} and {_WEIGHTS} as sae-lens does: W_enc [d_in, d_sae], W_dec [d_sae, d_in], b_enc, "
            "b_dec.",
        )


def trace_autoencoder(path: Path) -> LoadedModel:
    """Load and trace the autoencoder at a path: it takes `x` [tokens, d_in].

    Raises:
        UserError: See `load_autoencoder`.
    """
    module = load_autoencoder(path)
    weight = module.block.encoder.weight
    x = torch.zeros(2, weight.shape[1], dtype=weight.dtype)
    program = trace(str(path), module, (), {"x": x}, {"x": {0: torch.export.Dim("tokens", min=1)}})
    (given,) = (node for node in program.graph.find_nodes(op="placeholder") if node.name == "x")
    tokens = str(given.meta["val"].shape[0])
    names, left_out = keep_tensor_outputs(path, program)
    return LoadedModel(
        path=path,
        kind="sparse autoencoder",
        program=program,
        output_names=names,
        dimension_names={tokens: "tokens"},
        dimension_ranges={tokens: _TOKENS},
        notes=module.notes + left_out,
    )


EXPECTED = (
    f"a sparse autoencoder ({_CONFIG} and {_WEIGHTS} of sae-lens, {_ARRAYS} or {_PARAMETERS} of Gemma Scope, a .pt of "
    "Qwen-Scope)"
)


# ---- files ----


def _reader_of(path: Path) -> Callable[[Path], _Stored] | None:
    """Return the function that reads a path, chosen by content; None for anything else."""
    if path.is_dir():
        names = {each.name for each in path.iterdir() if each.is_file()}
        if {_CONFIG, _WEIGHTS} <= names:
            return _read_sae_lens
        if _ARRAYS in names:
            return lambda folder: _read_arrays(folder / _ARRAYS)
        return _read_parameters if {"config.json", _PARAMETERS} <= names else None
    if not path.is_file():
        return None
    refuse_bomb(path)
    # Of other files and damaged ones zipfile and torch raise what they like.
    with contextlib.suppress(Exception), zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        if names & {"W_enc.npy", "w_enc.npy"}:
            return _read_arrays
        if any(name.endswith("/data.pkl") for name in names):
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)  # reads no weights
            return _read_dict if isinstance(content, dict) and _is_qwen_scope(content) else None
    return None


def _is_qwen_scope(content: dict[str, Any]) -> bool:
    """Whether a dict is of Qwen-Scope: others, such as the files that sae-lens calls hook_z, turn W_enc round."""
    if not {"W_enc", "W_dec"} <= content.keys():
        return False
    shape, features = (list(getattr(content.get(name), "shape", ())) for name in ("W_enc", "b_enc"))
    return shape[1:] != features or shape[:1] == features


def _read_sae_lens(folder: Path) -> _Stored:
    config, where = read_json(folder / _CONFIG), folder / _WEIGHTS
    weights = read_tensors(where)
    activation = config.get("activation_fn", config.get("activation_fn_str", "relu"))  # before sae-lens 6
    if activation == "topk":
        settings = config.get("activation_fn_kwargs")
        config |= {"architecture": "topk", "k": settings.get("k") if isinstance(settings, dict) else None}
    elif activation != "relu":
        raise UserError(
            str(folder / _CONFIG), "this activation is not read", got=repr(activation), expected="relu, topk"
        )
    factor = weights.pop("scaling_factor", None)
    if factor is not None and not torch.all(factor == 1):
        raise UserError(str(where), "holds a scaling_factor of finetuning", fix="Multiply W_dec by it, and remove it.")
    if "b_enc" in weights and "topk_threshold" in weights and weights["topk_threshold"].dim() == 0:
        weights["threshold"] = weights.pop("topk_threshold").expand_as(weights["b_enc"])
    dtype = str(config.get("dtype", "float32")).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise UserError(str(folder / _CONFIG), "not a dtype", got=repr(dtype), expected=", ".join(_DTYPES))
    others = {name: each.to(getattr(torch, dtype)) for name, each in weights.items() if name != "threshold"}
    stored = _Stored(where, weights | others, config)
    hook = str(config.get("hook_name", config.get("hook_point", "")))
    if config.get("reshape_activations", "hook_z" if "hook_z" in hook else "none") != "none":
        stored.notes.append("x holds the outputs of all heads of a token side by side (hook_z)")
    return stored


def _read_arrays(file: Path) -> _Stored:
    refuse_bomb(file)
    try:
        with np.load(file, allow_pickle=False) as arrays:
            weights = {name: torch.from_numpy(arrays[name]) for name in arrays}
    except Exception as error:  # numpy and zipfile raise what they like for a damaged file
        expected = "arrays of numbers as numpy.savez writes them; pickled objects are never loaded"
        raise UserError(
            str(file), f"cannot be read as an .npz file ({first_line(error)})", expected=expected
        ) from error
    return _of_gemma_scope(file, weights)


def _read_parameters(folder: Path) -> _Stored:
    return _of_gemma_scope(folder / _PARAMETERS, read_tensors(folder / _PARAMETERS))


def _of_gemma_scope(file: Path, stored: dict[str, Tensor]) -> _Stored:
    weights = {re.sub("^w_", "W_", name): each for name, each in stored.items()}
    config: dict[str, Any] = {"architecture": "jumprelu", "apply_b_dec_to_input": False}
    if "affine_skip_connection" in weights:
        weights["W_skip"] = _turned(weights.pop("affine_skip_connection"))
        config["architecture"] = "jumprelu_skip_transcoder"
    return _Stored(file, weights, config)


def _read_dict(file: Path) -> _Stored:
    kept = _kept_by(file)
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises what it likes for a damaged file
        raise UserError(str(file), f"torch cannot read it ({first_line(error)})") from error
    weights = {name: each for name, each in content.items() if isinstance(each, Tensor)}
    size = sum(each.numel() * each.element_size() for each in weights.values())
    refuse_unfolding(str(file), "its tensors", size, file.stat().st_size)
    weights |= {name: _turned(weights[name]) for name in ("W_enc", "W_dec") if name in weights}
    return _Stored(file, weights, {"architecture": "topk", "k": kept, "apply_b_dec_to_input": False})


def _kept_by(file: Path) -> int:
    """Return how many features are kept: the file does not say it, but a folder above does, also in a cache.

    A folder that is named as a repository of Qwen-Scope counts before others.
    """
    folders = [match for part in file.absolute().parts[:-1] if (match := re.search(r"-L0_(\d+)$", part))]
    named = [match for match in folders if re.search(r"(^|--)SAE-", match.string)] or folders
    said = {int(match[1]) for match in named}
    if len(said) == 1:
        return min(said)
    raise UserError(
        str(file),
        "its folders say different numbers of features that are kept"
        if said
        else "no folder says how many features of a token are kept, and the file does not",
        got=", ".join(match.string for match in named),
        expected="one folder named as the repository, such as SAE-Res-Qwen3-1.7B-Base-W32K-L0_50",
        fix="Rename the others." if said else "Name a folder above the file so.",
    )


def _turned(matrix: Tensor) -> Tensor:
    """Return a matrix with its axes exchanged; other tensors are refused later, as they are."""
    return matrix.t() if matrix.dim() == 2 else matrix


# ---- the module ----


def _module_of(stored: _Stored) -> SparseAutoencoder:
    config, where = stored.config, str(stored.where)
    said = str(stored.where.with_name(_CONFIG)) if stored.where.name == _WEIGHTS else where
    architecture = str(config.get("architecture", "standard"))
    if architecture not in _ARCHITECTURES:
        raise UserError(
            said, "this kind of autoencoder is not read", got=architecture, expected=", ".join(_ARCHITECTURES)
        )
    transcodes = "transcoder" in architecture
    centred = config.get("apply_b_dec_to_input", not transcodes)
    if centred not in ((False,) if transcodes else (False, True)):
        expected = "false, as it is a transcoder" if transcodes else "false or true"
        raise UserError(said, "apply_b_dec_to_input does not fit", got=repr(centred), expected=expected)
    _check_weights(where, stored.weights, {*_COMMON, *_ARCHITECTURES[architecture]}, transcodes)
    normalised = config.get("normalize_activations") or "none"
    if normalised in (True, *_FOLDED):
        stored.notes.append(f"x is taken as it is, without normalize_activations {normalised!r}: sae-lens does so, too")
        normalised = "none"
    if normalised not in _NORMALISATIONS:
        raise UserError(
            said, "this normalisation is not read", got=repr(normalised), expected=", ".join(_NORMALISATIONS)
        )
    weights = _as_jumprelu(stored.weights, config)
    kept = config.get("k") if architecture == "topk" else None
    if architecture == "topk" and (type(kept) is not int or not 0 < kept <= len(weights["b_enc"])):
        raise UserError(said, "k is not a number of features", got=repr(kept), expected="1 to d_sae")
    block = Dictionary(
        _linear(weights["W_enc"].t().contiguous(), weights["b_enc"]),
        # Not copied: so the rows of W_dec, which kernels read, stay contiguous.
        _linear(weights["W_dec"].contiguous().t(), weights["b_dec"]),
        weights.get("threshold"),
        kept,
    )
    skip = _linear(weights["W_skip"].contiguous(), None) if "W_skip" in weights else None
    return SparseAutoencoder(
        block, skip, centred=bool(centred), normalised=normalised, restores=not transcodes, notes=stored.notes
    )


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight)
    if bias is not None:
        layer.bias = nn.Parameter(bias)
    return layer


def _check_weights(where: str, weights: dict[str, Tensor], needed: set[str], transcodes: bool) -> None:
    """Fail if weights are missing, unknown, or do not fit each other."""
    if weights.keys() != needed:
        others = [*(f"no {name}" for name in sorted(needed - weights.keys())), *sorted(weights.keys() - needed)]
        raise UserError(
            where, "holds other weights than its kind has", got=first_few(others), expected=", ".join(sorted(needed))
        )
    sizes = {name: tuple(each.shape) for name, each in weights.items()}
    d_in, features = (*sizes["W_enc"], 0, 0)[:2]
    d_out = (*sizes["W_dec"], 0, 0)[1] if transcodes else d_in
    shapes = {"W_enc": (d_in, features), "W_dec": (features, d_out), "W_skip": (d_out, d_in), "b_dec": (d_out,)}
    dtypes = {each.dtype for name, each in weights.items() if name != "threshold"}
    fits = all(size == shapes.get(name, (features,)) for name, size in sizes.items())
    if not fits or len(dtypes) != 1 or not dtypes.pop().is_floating_point:
        got = [f"{name} {list(size)} {dtype_name(weights[name].dtype)}" for name, size in sorted(sizes.items())]
        raise UserError(
            where,
            "its weights do not fit each other",
            got=", ".join(got),
            expected="one dtype, W_enc [d_in, d_sae], W_dec [d_sae, d_out], b_dec [d_out], others [d_sae]",
        )


def _as_jumprelu(weights: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Return weights of the same features with W_enc, b_enc and perhaps threshold in place of what has other names.

    A gated one keeps exp(r) p + b_mag where p + b_gate > 0, for p = x W_enc, which is where the former is larger than
    b_mag - exp(r) b_gate.
    """
    weights = dict(weights)
    if "r_mag" in weights:
        factor, magnitude = weights.pop("r_mag").exp(), weights.pop("b_mag")
        threshold = magnitude.float() - factor.float() * weights.pop("b_gate").float()
        weights |= {"W_enc": weights["W_enc"] * factor, "b_enc": magnitude, "threshold": threshold.clamp(min=0)}
    if config.get("rescale_acts_by_decoder_norm") and "topk" in str(config.get("architecture")):
        norms = weights["W_dec"].norm(dim=-1)
        weights |= {"W_enc": weights["W_enc"] * norms, "b_enc": weights["b_enc"] * norms}
        weights["W_dec"] = weights["W_dec"] / norms[:, None]
    return weights
