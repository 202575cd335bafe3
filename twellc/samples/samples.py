"""The inputs that `twellc check` runs a model on: random ones, given arrays, or text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import ml_dtypes
import numpy as np
import torch

from twellc.base.arrays import Array, to_numpy, to_torch
from twellc.base.dtypes import dtype_name
from twellc.base.errors import UserError, first_line
from twellc.base.files import read_file, why_no_file
from twellc.export.profiles import symbol_sizes
from twellc.export.shapes import ShapeProfile
from twellc.passes.sizes.conditions import fitting_sizes
from twellc.passes.sizes.find_relations import relations_of
from twellc.passes.sizes.inputs import InputSpec, ModelInputs, form_of, size_at, size_of, symbol_value
from twellc.passes.sizes.relations import refuse_unrelated
from twellc.samples.tokenizer import FIX, load_tokenizer

Sample = dict[str, torch.Tensor]

_UNBOUNDED = 1 << 30
_LARGEST_WINDOW = 512


@dataclass(frozen=True)
class Limits:
    """The limits of samples.

    Attributes:
        inputs: The inputs of the model.
        profile: The first optimization profile of a plan, if there is one.
        token_ids: Number of token ids, if it is known; they go into the inputs whose names end in `input_ids`.
    """

    inputs: ModelInputs
    profile: ShapeProfile | None
    token_ids: int | None

    @cached_property
    def ranges(self) -> dict[str, tuple[int, int]]:
        """The least and the largest value of each symbol in the shapes of inputs, in their order."""
        told = {} if self.profile is None else symbol_sizes(self.inputs, self.profile)
        found = {}
        for spec in self.inputs.specs:
            for dim in spec.shape:
                for symbol in sorted(map(str, getattr(dim, "free_symbols", ()))):
                    low, high = self.inputs.bounds.get(symbol, (1, None))
                    least, _, largest = told.get(symbol, (low, 0, _UNBOUNDED))
                    found[symbol] = max(1, low, least), min(_UNBOUNDED if high is None else high, largest)
        return found

    def sizes(self, spec: InputSpec, axis: int) -> tuple[int, int]:
        """Return the least and the largest size of a dimension that is fixed or a symbol."""
        dim = spec.shape[axis]
        return (dim, dim) if isinstance(dim, int) else self.ranges[str(dim)]


# ---- random ----


def draw_samples(limits: Limits, integers: dict[str, tuple[int, int]], seed: int) -> list[Sample]:
    """Make random inputs: at the smallest shapes, at the shapes of the model's hints, and at larger ones.

    Args:
        limits: Their limits.
        integers: Least and largest value of integer inputs; floats are drawn from a normal distribution.
        seed: Seed of the generator.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen: list[dict[str, int]] = []
    hints, ranges = limits.inputs.hints, limits.ranges
    for factor in (0, 1, 3):
        wanted = {symbol: min(max(hints[symbol] * factor, low), high) for symbol, (low, high) in ranges.items()}
        sizes = fitting_sizes(limits.inputs.conditions, ranges, wanted) or wanted
        if sizes not in chosen:
            chosen.append(sizes)
    return [draw_sample(limits, integers, sizes, generator) for sizes in chosen]


def draw_sample(
    limits: Limits, integers: dict[str, tuple[int, int]], sizes: Mapping[str, int], generator: torch.Generator
) -> Sample:
    """Make random inputs of one shape: `sizes` are the values of the symbols; see `draw_samples`."""
    return {
        spec.name: _random(spec, tuple(size_of(dim, sizes) for dim in spec.shape), integers.get(spec.name), generator)
        for spec in limits.inputs.specs
    }


def _random(
    spec: InputSpec, shape: tuple[int, ...], integers: tuple[int, int] | None, generator: torch.Generator
) -> torch.Tensor:
    if spec.dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(spec.dtype)
    low, high = integers or (0, 1)
    return torch.randint(low, high + 1, shape, generator=generator).to(spec.dtype)


# ---- given arrays ----


def read_arrays(path: Path, limits: Limits) -> Sample:
    """Read one sample from an `.npz` file with an array for each input, by its name.

    Arrays of any floating-point dtype are rounded to the input's, integers are converted if they fit. NaN and infinity
    are values like others.

    Raises:
        UserError: It is not such a file, or holds other names, kinds of dtypes, values or shapes than the model takes.
    """
    return as_sample(f"--arrays {path}", load_npz(path), limits)


def as_sample(where: str, arrays: dict[str, Array], limits: Limits) -> Sample:
    """Turn arrays into a sample; `where` names them in messages. See `read_arrays`."""
    specs = {spec.name: spec for spec in limits.inputs.specs}
    missing, unknown = sorted(specs.keys() - arrays.keys()), sorted(arrays.keys() - specs.keys())
    if missing or unknown:
        what = f"has no array {missing[0]}" if missing else f"has an array {unknown[0]}, which is not an input"
        expected = ", ".join(sorted(specs))
        fix = "Name each array as the model's input: numpy.savez(FILE, NAME=array, ...)."
        raise UserError(where, what, got=", ".join(sorted(arrays)) or "no arrays", expected=expected, fix=fix)
    sample = {name: _as_input(where, spec, arrays[name], limits.token_ids) for name, spec in specs.items()}
    _check_shapes(where, limits, sample)
    return sample


def load_npz(path: Path, option: str = "--arrays") -> dict[str, Array]:
    """Read the arrays of an `.npz` file.

    Args:
        path: The file.
        option: The option that names it, for messages.

    Raises:
        UserError: It is not such a file.
    """
    if not path.is_file():
        raise UserError(f"{option} {path}", why_no_file(path), expected="an .npz file")
    try:
        loaded = np.load(path, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            where, fix = f"{option} {path}", "Write it with numpy.savez(FILE, NAME=array, ...)."
            raise UserError(where, "is a single array", expected="an .npz file with an array for each input", fix=fix)
        with loaded:
            arrays = {name: loaded[name] for name in loaded.files}
    except UserError:
        raise
    except Exception as error:  # numpy, zipfile and zlib may raise anything for a damaged file
        where = f"{option} {path}"
        expected = "arrays of numbers as numpy.savez writes them; pickled objects are never loaded"
        raise UserError(where, f"cannot be read as an .npz file ({first_line(error)})", expected=expected) from error
    foreign = sorted(name for name, array in arrays.items() if not isinstance(array, np.ndarray))
    if foreign:
        raise UserError(f"{option} {path}", f"{foreign[0]!r} in it is not an array")
    return arrays


def _as_input(where: str, spec: InputSpec, array: Array, token_ids: int | None) -> torch.Tensor:
    where = f"{where}, array {spec.name}"
    if array.dtype == ml_dtypes.bfloat16 and spec.dtype.is_floating_point:
        array = array.astype(np.float32)  # numpy does not know it as a floating-point dtype
    if array.dtype == np.dtype("V2") and spec.dtype == torch.bfloat16:
        return to_torch(array.view(ml_dtypes.bfloat16))  # numpy.savez stores bfloat16 as raw bytes
    kinds = "f" if spec.dtype.is_floating_point else "b" if spec.dtype == torch.bool else "iu"
    if array.dtype.kind not in kinds:
        meant = {"f": "a floating-point dtype", "b": "bool", "iu": "an integer dtype"}[kinds]
        expected = f"{dtype_name(spec.dtype)}, or {meant} that fits" if kinds != "b" else meant
        raise UserError(where, "has another dtype than the input", got=str(array.dtype), expected=expected)
    if kinds == "f":
        tensor = to_torch(array.astype(np.float64)).to(spec.dtype)
        if not np.array_equal(np.isinf(array), to_numpy(tensor.isinf())):
            got, expected = f"{np.nanmax(np.abs(array)):.3g}", f"at most {torch.finfo(spec.dtype).max:.3g}"
            raise UserError(where, f"has values that overflow {dtype_name(spec.dtype)}", got=got, expected=expected)
        return tensor
    if kinds == "iu" and array.size:
        info = torch.iinfo(spec.dtype)
        low, high = info.min, info.max
        if token_ids is not None and spec.name.endswith("input_ids"):
            low, high = 0, token_ids - 1
        least, largest = int(array.min()), int(array.max())
        if least < low or largest > high:
            raise UserError(where, "has values out of range", got=f"{least} to {largest}", expected=f"{low} to {high}")
        return to_torch(array.astype(np.int64)).to(spec.dtype)
    return to_torch(array.astype(bool if kinds == "b" else np.int64)).to(spec.dtype)


def places_of_tokens(sample: Sample) -> torch.Tensor | None:
    """Return the places of outputs [batch, tokens, …] that are not padding, bool [batch, tokens]; None for all.

    They follow from the mask of a decoder, if the model has one.
    """
    decoder = any(name.startswith("decoder_") for name in sample)
    mask = sample.get("decoder_attention_mask" if decoder else "attention_mask")
    if mask is None or mask.dim() != 2:
        return None
    tokens = mask != 0
    return None if tokens.all() or not tokens.any() else tokens


def _check_shapes(source: str, limits: Limits, sample: Sample) -> None:
    """Check shapes against the model, the profile and each other.

    Raises:
        UserError: They contradict one of these.
    """
    fixed: dict[str, tuple[int, str]] = {}
    for spec in limits.inputs.specs:
        where, shape = f"{source}, array {spec.name}", tuple(sample[spec.name].shape)
        expected = " x ".join(_sizes(limits, spec, axis) for axis in range(len(spec.shape))) or "a scalar"
        if len(shape) != len(spec.shape):
            raise UserError(
                where, f"has {len(shape)} dimensions", got=_text(shape), expected=f"{len(spec.shape)} ({expected})"
            )
        for axis, dim in enumerate(spec.shape):
            if isinstance(dim, int):
                if shape[axis] != dim:
                    raise UserError(where, f"has another size of dimension {axis}", got=_text(shape), expected=expected)
                continue
            if len(dim.free_symbols) != 1:
                continue  # the model itself refuses a size that does not fit
            (symbol,) = map(str, dim.free_symbols)
            size, (low, high) = symbol_value(dim, shape[axis]), limits.ranges[symbol]
            if size is None or not low <= size <= high:
                limit = "the plan's profile and the model" if limits.profile is not None else "the model"
                what = f"dimension {axis} leaves what {limit} can take"
                raise UserError(where, what, got=_text(shape), expected=_sizes(limits, spec, axis))
            before, owner = fixed.setdefault(symbol, (size, spec.name))
            if before != size:
                what = f"dimension {axis} contradicts {owner}, which shares it"
                raise UserError(where, what, got=_text(shape), expected=f"{size_at(dim, before)}")
    shapes = {name: tuple(tensor.shape) for name, tensor in sample.items()}
    refuse_unrelated(source, relations_of(limits.inputs), shapes)


def _sizes(limits: Limits, spec: InputSpec, axis: int) -> str:
    """Write the sizes that a dimension takes, without the names of symbols."""
    dim = spec.shape[axis]
    if isinstance(dim, int):
        return str(dim)
    if len(dim.free_symbols) != 1:
        return "any"
    (symbol,) = map(str, dim.free_symbols)
    low, high = limits.ranges[symbol]
    least, largest = size_at(dim, low), size_at(dim, high)
    sizes = f"from {least}" if high == _UNBOUNDED else f"{least} to {largest}"
    return sizes if dim.is_Symbol else f"{sizes}, of the form {form_of(dim)}"


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a scalar"


# ---- text ----


@dataclass(frozen=True)
class Text:
    """A text as samples.

    Attributes:
        samples: Its windows, [1, tokens] each, without overlap, in order.
        predicts_next: Whether the model predicts the next token, so that its logits have a likelihood for the text.
        notes: Notes for the user.
    """

    samples: list[Sample]
    predicts_next: bool
    notes: list[str]


def read_text(path: Path, model: Path, language_model: bool, limits: Limits) -> Text:
    """Turn a UTF-8 text, as one document, into token ids by the tokenizer of a Hugging Face directory.

    Nothing is downloaded, and no code of the directory is run. A model of 256 token ids and without a tokenizer gets
    the bytes of the text, behind the token that its config.json names as `bos_token_id`. Windows have as many tokens
    as the model and the plan's profile take, at most 512.

    Args:
        path: The text.
        model: The model.
        language_model: Whether the model is a language model.
        limits: The limits of samples.

    Raises:
        UserError: The text is missing, empty, too short or not UTF-8, or the model takes no text or has no tokenizer.
    """
    if not path.is_file():
        raise UserError(f"--text {path}", why_no_file(path), expected="a text in UTF-8")
    specs = {spec.name: spec for spec in limits.inputs.specs}
    foreign = sorted(specs.keys() - {"input_ids", "attention_mask"})
    if not model.is_dir() or not language_model or foreign or limits.token_ids is None:
        reason = f"its input {foreign[0]} is not a text" if foreign else "the model is none"
        what = "needs a language model in a Hugging Face directory, with its tokenizer"
        raise UserError(f"--text {path}", what, got=f"{model}: {reason}", fix=FIX)
    try:
        text = read_file(path).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"--text {path}", f"is not UTF-8 at byte {error.start}", expected="a text in UTF-8") from error
    if not text:
        raise UserError(f"--text {path}", "the file is empty")
    config = json.loads(read_file(model / "config.json"))
    tokenizer = load_tokenizer(model, limits.token_ids)
    ids, notes = tokenizer(text), list(tokenizer.notes)
    if not ids:
        raise UserError(f"--text {path}", "the tokenizer makes no token of it")
    if max(ids) >= limits.token_ids:
        what, got = "its tokenizer is of another model", f"the token id {max(ids)}"
        raise UserError(str(model), what, got=got, expected=f"less than {limits.token_ids}, the size of the vocabulary")
    spec = specs["input_ids"]
    (rows, _), (shortest, longest) = limits.sizes(spec, 0), limits.sizes(spec, 1)
    if rows > 1 or len(ids) < shortest:
        what = "does not fit into the plan's profile"
        raise UserError(f"--text {path}", what, got=f"1x{len(ids)} tokens", expected=f"from {rows}x{shortest}", fix=FIX)
    length = max(min(longest, _LARGEST_WINDOW), shortest)
    windows = [ids[start : start + length] for start in range(0, len(ids), length)]
    if len(windows[-1]) < shortest:
        notes.append(f"the last {len(windows.pop())} tokens of {path.name} are too few for the plan's profile")
    samples = []
    for window in windows:
        tokens = torch.tensor([window])
        filled = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        samples.append({name: filled[name].to(spec.dtype) for name, spec in specs.items()})
    masked = any(str(name).endswith("ForMaskedLM") for name in config.get("architectures") or [])
    return Text(samples, not masked, notes)
