"""The user's data as batches of a model's inputs, read piece by piece, so that memory does not grow with the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import sympy
import torch

from twellc.base.arrays import Array, to_numpy
from twellc.base.errors import UserError
from twellc.passes.sizes.inputs import InputSpec
from twellc.samples.documents import IDS, kind_of, read_documents, read_ids
from twellc.samples.samples import Limits, Sample, as_sample, load_npz
from twellc.samples.tokenizer import Tokenizer

DEFAULT_SEQUENCE = 1024
_MASK = "attention_mask"

Arrays = Mapping[str, "torch.Tensor | Array"]


@dataclass(frozen=True)
class Batch:
    """Inputs for one run of a model.

    Attributes:
        inputs: The inputs by name.
        counted: For an input of token ids, by name, the places that hold tokens of the data, bool [rows, places]; the
            others are padding. An input that is not named here has no padding.
        source: The index of the data that the batch is from.
        sequences: The number of sequences.
        tokens: The number of tokens; 0 for inputs that are not tokens.
        read: The bytes of all data that have been read.
    """

    inputs: Sample
    counted: dict[str, torch.Tensor]
    source: int
    sequences: int
    tokens: int
    read: int


@dataclass(frozen=True)
class Intake:
    """How a model takes data.

    Attributes:
        limits: The limits of the inputs.
        batch: Sequences in a run.
        sequence: Tokens in a sequence at most; None takes 1024, or the most that the model takes.
        pads_right: Whether it may get padding behind a sequence without a mask that says so.
        pad: The token id of padding in the user's arrays, if that is known.
        field: The field of an object, or the column of a table, that holds the text.
        tokenizer: Loads the tokenizer; None for a model that has none.
    """

    limits: Limits
    batch: int
    sequence: int | None
    pads_right: bool
    pad: int | None
    field: str
    tokenizer: Callable[[], Tokenizer] | None


def read_batches(data: Sequence[Path | Arrays], intake: Intake) -> Iterator[Batch]:
    """Yield data as batches; no batch mixes several items of the data.

    Args:
        data: Files, or inputs by name.
        intake: How the model takes them.

    Raises:
        UserError: A file cannot be read, holds no token, or does not fit the model.
    """
    read = 0
    for source, each in enumerate(data):
        size = each.stat().st_size if isinstance(each, Path) else 0
        if isinstance(each, Path) and kind_of(each) != "arrays":
            batches = _token_batches(source, each, intake)
        elif isinstance(each, Path):
            batches = _array_batches(source, f"--data {each}", load_npz(each, "--data"), size, intake)
        else:
            arrays = {name: _as_array(value) for name, value in each.items()}
            batches = _array_batches(source, f"inputs[{source}]", arrays, size, intake)
        for batch in batches:
            yield Batch(**{**vars(batch), "read": read + batch.read})
        read += size


def _as_array(value: torch.Tensor | Array) -> Array:
    return to_numpy(value) if isinstance(value, torch.Tensor) else np.asarray(value)


# ---- sequences of token ids ----


def _token_batches(source: int, path: Path, intake: Intake) -> Iterator[Batch]:
    where = f"--data {path}"
    specs = {spec.name: spec for spec in intake.limits.inputs.specs}
    foreign = sorted(specs.keys() - {IDS, _MASK})
    kinds = (torch.int32, torch.int64)
    if IDS not in specs or foreign or len(specs[IDS].shape) != 2 or specs[IDS].dtype not in kinds:
        what, got = "the model takes other inputs than token ids", ", ".join(specs)
        raise UserError(where, what, got=got, expected=IDS, fix="Give the arrays of all inputs with --data FILE.npz.")
    spec = specs[IDS]
    (fewest, most), (shortest, longest) = intake.limits.sizes(spec, 0), intake.limits.sizes(spec, 1)
    if intake.sequence is not None and not shortest <= intake.sequence <= longest:
        what = "the model does not take sequences of this length"
        expected = f"{shortest} to {longest}" if longest > shortest else f"{longest}"
        raise UserError(f"--sequence {intake.sequence}", what, expected=expected)
    length = intake.sequence or max(min(longest, DEFAULT_SEQUENCE), shortest)
    rows = max(min(intake.batch, most), fewest)
    pads = intake.pads_right or _MASK in specs
    waiting: list[list[int]] = []
    found, tokens = False, 0

    def flush(read: int) -> Iterator[Batch]:
        nonlocal tokens
        if waiting:
            width = max(max(map(len, waiting)), shortest)
            batch = _padded(specs, waiting, width, fewest, source, read)
            tokens += batch.tokens
            yield batch
            waiting.clear()

    read = 0
    for ids, read, place in _sequences(path, where, intake, length):
        found = True
        _check_range(place, ids, spec, intake.limits.token_ids)
        if not pads and len(ids) < shortest:
            continue
        if waiting and (len(waiting) == rows or (not pads and len(ids) != len(waiting[0]))):
            yield from flush(read)
        waiting.append(ids)
    yield from flush(read)
    if not found:
        raise UserError(where, "nothing in it becomes a token", fix="Give a file with text or token ids in it.")
    if not tokens:
        raise UserError(where, "its sequences are shorter than the model takes", expected=f"{shortest} tokens at least")


def _padded(
    specs: dict[str, InputSpec], rows: list[list[int]], width: int, fewest: int, source: int, read: int
) -> Batch:
    """Return rows padded on the right to one width, and with copies of the last row to the least number of rows."""
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.zeros((max(len(rows), fewest), width), dtype=torch.int64)
    for index in range(len(ids)):
        row = rows[min(index, len(rows) - 1)]
        ids[index, : len(row)] = torch.tensor(row)
    counted = torch.zeros(ids.shape, dtype=torch.bool)
    counted[: len(rows)] = torch.arange(width) < lengths[:, None]
    mask = counted.clone()
    mask[len(rows) :] = mask[len(rows) - 1]
    filled = {IDS: ids, _MASK: mask.to(torch.int64)}
    inputs = {name: filled[name].to(spec.dtype) for name, spec in specs.items()}
    return Batch(inputs, {IDS: counted}, source, len(rows), int(counted.sum()), read)


def _check_range(where: str, ids: list[int], spec: InputSpec, vocabulary: int | None) -> None:
    """Fail if token ids are outside of the model's vocabulary, or of the range of its input if that is not known.

    Raises:
        UserError: One is.
    """
    largest = torch.iinfo(spec.dtype).max if vocabulary is None else vocabulary - 1
    if not 0 <= min(ids) <= max(ids) <= largest:
        got, fix = f"{min(ids)} to {max(ids)}", "Check that the tokenizer is that of the model."
        raise UserError(where, "has token ids that the model has not", got=got, expected=f"0 to {largest}", fix=fix)


def _sequences(path: Path, where: str, intake: Intake, length: int) -> Iterator[tuple[list[int], int, str]]:
    """Yield sequences of at most `length` tokens, each with the bytes read so far and its place for messages.

    A document is cut into sequences without overlap; where it is text, each gets the tokenizer's special tokens.
    """
    if kind_of(path) == "token ids":
        for row, read in read_ids(path, where, intake.pad):
            for start in range(0, len(row), length):
                yield [int(token) for token in row[start : start + length]], read, where
        return
    for place, document in read_documents(path, intake.field):
        before: list[int] = []
        after: list[int] = []
        waiting: list[int] = []
        read = 0
        for piece, read in document:
            if isinstance(piece, str):
                tokenizer = _tokenizer(where, intake)
                before, after = tokenizer.before, tokenizer.after
                piece = tokenizer.encode(piece)
            waiting += piece
            content = length - len(before) - len(after)
            if content < 1:
                raise UserError(f"--sequence {length}", "has no place for a token beside the special ones")
            while len(waiting) >= content:
                yield before + waiting[:content] + after, read, place
                del waiting[:content]
        if waiting:
            yield before + waiting + after, read, place


def _tokenizer(where: str, intake: Intake) -> Tokenizer:
    if intake.tokenizer is None:
        raise UserError(
            where,
            "text needs a language model in a Hugging Face directory, with its tokenizer",
            fix="Turn the text into token ids yourself and give them with --data FILE.npz, FILE.npy, or as input_ids "
            "in FILE.jsonl.",
        )
    return intake.tokenizer()


# ---- arrays by the names of inputs ----


def _array_batches(source: int, where: str, arrays: dict[str, Array], size: int, intake: Intake) -> Iterator[Batch]:
    specs = {spec.name: spec for spec in intake.limits.inputs.specs}
    mask = None
    if _MASK in arrays and _MASK not in specs and IDS in specs:
        mask = _right_padding(where, arrays.pop(_MASK), arrays.get(IDS))
    symbol = _row_symbol(specs)
    sample = as_sample(where, arrays, _without_most(intake.limits, symbol))
    counted = {
        name: _without_padding(tensor, intake.pad)
        for name, tensor in sample.items()
        if name.endswith(IDS) and tensor.dim() == 2
    }
    mask = sample.get(_MASK) if mask is None else mask
    if mask is not None and IDS in counted and mask.shape == counted[IDS].shape:
        counted[IDS] = mask != 0
    if any(not tensor.numel() for tensor in sample.values()) or any(not each.any() for each in counted.values()):
        raise UserError(where, "holds no token", got=", ".join(f"{n} {list(t.shape)}" for n, t in sample.items()))
    rows, step = 0, intake.batch
    if symbol:
        first = next(iter(specs.values()))
        rows, step = len(sample[first.name]), min(step, intake.limits.sizes(first, 0)[1])
    for start in range(0, rows, step) if rows else (0,):
        part = slice(start, start + step) if rows else slice(None)
        chosen = {name: tensor[part] if rows else tensor for name, tensor in sample.items()}
        places = {name: each[part] for name, each in counted.items()}
        read = size * min(start + step, rows) // rows if rows else size
        tokens = sum(int(each.sum()) for each in places.values())
        yield Batch(chosen, places, source, min(step, rows - start) if rows else 1, tokens, read)


def _row_symbol(specs: dict[str, InputSpec]) -> str:
    """Return the symbol of the rows of all inputs if these can run in parts; an empty text if they cannot."""
    first = {str(spec.shape[0]) if spec.shape else "" for spec in specs.values()}
    others = {str(symbol) for spec in specs.values() for dim in spec.shape[1:] for symbol in _symbols(dim)}
    (symbol,) = first if len(first) == 1 else ("",)
    return symbol if symbol.isidentifier() and symbol not in others else ""


def _symbols(dim: int | sympy.Expr) -> set[sympy.Expr]:
    return set() if isinstance(dim, int) else dim.free_symbols


def _without_most(limits: Limits, symbol: str) -> Limits:
    """Return limits without a largest size for one dimension; for none if the symbol is empty."""
    least, _ = limits.inputs.bounds.get(symbol, (1, None))
    return replace(limits, inputs=replace(limits.inputs, bounds={**limits.inputs.bounds, symbol: (least, None)}))


def _right_padding(where: str, mask: Array, ids: Array | None) -> torch.Tensor:
    """Return the mask for a causal model that takes none as input: padding must come last."""
    if mask.dtype.kind not in "biu":
        what = "holds no whole numbers"
        raise UserError(f"{where}, array {_MASK}", what, got=str(mask.dtype), expected="1 for tokens, 0 for padding")
    tensor = torch.from_numpy(np.array(mask) != 0)
    if ids is None or tensor.shape != ids.shape or tensor.dim() != 2:
        raise UserError(f"{where}, array {_MASK}", "has another shape than input_ids", got=str(list(tensor.shape)))
    if (tensor[:, 1:] & ~tensor[:, :-1]).any():
        what = "has padding before tokens, and the model is traced without a mask"
        raise UserError(f"{where}, array {_MASK}", what, fix="Add --padding mask.")
    return tensor


def _without_padding(ids: torch.Tensor, pad: int | None) -> torch.Tensor:
    """Return the places, bool [rows, places], that are not padding at either end of a row."""
    if pad is None:
        return torch.ones(ids.shape, dtype=torch.bool)
    tokens = (ids != pad).int()
    return (tokens.cumsum(1) > 0) & (tokens.flip(1).cumsum(1).flip(1) > 0)
