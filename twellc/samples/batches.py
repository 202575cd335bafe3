"""The user's data as batches of a model's inputs, read piece by piece: memory does not grow with the data."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import sympy
import torch

from twellc.base.arrays import Array, to_numpy
from twellc.base.errors import UserError, first_line
from twellc.base.files import why_no_file
from twellc.export.profiles import InputSpec
from twellc.samples.samples import Limits, Sample, as_sample, load_npz
from twellc.samples.tokenizer import Tokenizer

_DEFAULT_SEQUENCE = 1024
_CHUNK = 1 << 16
_IDS, _MASK = "input_ids", "attention_mask"

Arrays = Mapping[str, "torch.Tensor | Array"]


@dataclass(frozen=True)
class Batch:
    """Inputs for one run of a model.

    Attributes:
        inputs: The inputs by name.
        counted: Which places of an input of token ids hold tokens of the data, bool [rows, places], by its name; the
            others are padding. An input that is not named here has no padding.
        source: The number of the data that it is from.
        sequences: How many sequences it holds.
        tokens: How many tokens; of inputs that are no tokens, 0.
        read: How many bytes of all data have been read.
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
        limits: What its inputs keep to.
        batch: Sequences in a run.
        sequence: Tokens in a sequence at most; None takes 1024, or what the model takes at most.
        pads_right: Whether it may get padding behind a sequence without a mask that says so.
        pad: The token id of padding in the user's arrays, if that is known.
        field: The field of a line of JSON that holds the text.
        tokenizer: Loads the tokenizer; None for a model that has none.
    """

    limits: Limits
    batch: int
    sequence: int | None
    pads_right: bool
    pad: int | None
    field: str
    tokenizer: Callable[[], Tokenizer] | None


def kind_of(path: Path) -> str:
    """Return `text`, `lines of JSON`, `arrays` or `token ids`: what a file of data is read as, by its suffix.

    Raises:
        UserError: There is no such file, or it is empty.
    """
    where = f"--inputs {path}"
    if not path.is_file():
        raise UserError(where, why_no_file(path), expected="a text, or a .jsonl, .npz or .npy file")
    if path.stat().st_size == 0:
        raise UserError(where, "the file is empty")
    return {".jsonl": "lines of JSON", ".npz": "arrays", ".npy": "token ids"}.get(path.suffix.lower(), "text")


def read_batches(data: Sequence[Path | Arrays], intake: Intake) -> Iterator[Batch]:
    """Yield data as batches; those of one have no data of another.

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
            batches = _array_batches(source, f"--inputs {each}", load_npz(each), size, intake)
        else:
            arrays = {name: _as_array(value) for name, value in each.items()}
            batches = _array_batches(source, f"inputs[{source}]", arrays, size, intake)
        for batch in batches:
            yield Batch(**{**vars(batch), "read": read + batch.read})
        read += size


def _as_array(value: torch.Tensor | Array) -> Array:
    return to_numpy(value.cpu()) if isinstance(value, torch.Tensor) else np.asarray(value)


# ---- sequences of token ids ----


def _token_batches(source: int, path: Path, intake: Intake) -> Iterator[Batch]:
    where = f"--inputs {path}"
    specs = {spec.name: spec for spec in intake.limits.inputs.specs}
    foreign = sorted(specs.keys() - {_IDS, _MASK})
    kinds = (torch.int32, torch.int64)
    if _IDS not in specs or foreign or len(specs[_IDS].shape) != 2 or specs[_IDS].dtype not in kinds:
        raise UserError(
            where, "the model takes other inputs than token ids", got=", ".join(specs), expected=_IDS,
            fix="Give the arrays of all inputs with --inputs FILE.npz.",
        )  # fmt: skip
    spec = specs[_IDS]
    (fewest, most), (shortest, longest) = intake.limits.sizes(spec, 0), intake.limits.sizes(spec, 1)
    if intake.sequence is not None and not shortest <= intake.sequence <= longest:
        raise UserError(
            f"--sequence {intake.sequence}", "the model does not take sequences of this length",
            expected=f"{shortest} to {longest}" if longest > shortest else f"{longest}",
        )  # fmt: skip
    length = intake.sequence or max(min(longest, _DEFAULT_SEQUENCE), shortest)
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
    filled = {_IDS: ids, _MASK: mask.to(torch.int64)}
    inputs = {name: filled[name].to(spec.dtype) for name, spec in specs.items()}
    return Batch(inputs, {_IDS: counted}, source, len(rows), int(counted.sum()), read)


def _check_range(where: str, ids: list[int], spec: InputSpec, vocabulary: int | None) -> None:
    """Fail where the model has not these token ids; of a model whose vocabulary is not known, where its input has not.

    Raises:
        UserError: It has not.
    """
    largest = torch.iinfo(spec.dtype).max if vocabulary is None else vocabulary - 1
    if not 0 <= min(ids) <= max(ids) <= largest:
        raise UserError(
            where, "has token ids that the model has not", got=f"{min(ids)} to {max(ids)}",
            expected=f"0 to {largest}",
            fix="Check that the tokenizer is that of the model.",
        )  # fmt: skip


def _sequences(path: Path, where: str, intake: Intake, length: int) -> Iterator[tuple[list[int], int, str]]:
    """Yield sequences of at most `length` tokens, with the number of bytes read so far and what to call their place.

    A document is cut into sequences without overlap; where it is text, each gets the tokenizer's special tokens.
    """
    kind = kind_of(path)
    if kind == "token ids":
        for row, read in _ids_of_array(path, where, intake.pad):
            for start in range(0, len(row), length):
                yield [int(token) for token in row[start : start + length]], read, where
        return
    whole: list[tuple[str, _Document]] = [(where, _pieces(path, where))]
    documents = _documents_of_lines(path, where, intake.field) if kind == "lines of JSON" else whole
    for place, document in documents:
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
            where, "text needs a language model in a Hugging Face directory, with its tokenizer",
            fix="Turn the text into token ids yourself and give them with --inputs FILE.npz, FILE.npy, or as input_ids "
            "in FILE.jsonl.",
        )  # fmt: skip
    return intake.tokenizer()


# Parts of a document, text or token ids, each with the number of bytes read so far.
_Document = Iterable[tuple[str | list[int], int]]


def _pieces(path: Path, where: str) -> Iterator[tuple[str, int]]:
    """Yield a text piece by piece; pieces end with a line, or before a space, if there is one."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    waiting, read = "", 0
    with path.open("rb") as file:
        while True:
            chunk = file.read(_CHUNK)
            pending = len(decoder.getstate()[0])
            try:
                waiting += decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                raise UserError(
                    where, f"is no UTF-8 at byte {read - pending + error.start}", expected="a text in UTF-8"
                ) from error
            read += len(chunk)
            cut = waiting.rfind("\n") + 1 or waiting.rfind(" ")
            cut = cut if chunk and cut > 0 else len(waiting)
            if waiting[:cut]:
                yield waiting[:cut], read
            waiting = waiting[cut:]
            if not chunk:
                return


def _documents_of_lines(path: Path, where: str, field: str) -> Iterator[tuple[str, _Document]]:
    """Yield the text, or else the `input_ids`, of each line, with what to call its place; empty ones are left out."""
    read = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            read += len(line)
            if not line.strip():
                continue
            place = f"{where}, line {number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(place, f"cannot be read as JSON ({first_line(error)})") from error
            fields = record if isinstance(record, dict) else {}
            name = field if field in fields else _IDS
            content = fields.get(name)
            if isinstance(content, str) and not _is_text(content):
                raise UserError(place, f"the field {name!r} has half of a surrogate pair", expected="a text in UTF-8")
            if isinstance(content, str) or (isinstance(content, list) and all(type(token) is int for token in content)):
                yield place, [(content, read)]
            elif name in fields:
                held = type(content).__name__ + (" with others than integers" if isinstance(content, list) else "")
                raise UserError(place, f"the field {name!r} is neither a text nor a list of token ids", got=held)
            else:
                raise UserError(
                    place, f"has no text in the field {field!r}", got=_shown(record),
                    expected=f'{{"{field}": "a text"}}, or token ids in the field {_IDS!r}',
                    fix="Name the field with --field.",
                )  # fmt: skip


def _is_text(content: str) -> bool:
    """Whether there are characters for all of a text: JSON can spell half of one, which no tokenizer takes."""
    try:
        content.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(record: object) -> str:
    return f"the fields {', '.join(map(repr, record))}" if isinstance(record, dict) else type(record).__name__


def _ids_of_array(path: Path, where: str, pad: int | None) -> Iterator[tuple[Array, int]]:
    """Yield each row of a matrix of token ids, without padding at its ends, or a vector; it is not read as a whole."""
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy raises what it likes for a damaged file
        raise UserError(where, f"cannot be read as an .npy file ({first_line(error)})") from error
    if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu" or ids.ndim not in (1, 2):
        raise UserError(
            where, "holds no token ids", got=f"{ids.dtype} {list(ids.shape)}",
            expected="integers: a vector, or a matrix with a sequence in each row",
        )  # fmt: skip
    size = path.stat().st_size
    if ids.ndim == 1:
        for start in range(0, len(ids), _CHUNK):
            yield np.asarray(ids[start : start + _CHUNK]), size * (start + 1) // len(ids)
        return
    for index, row in enumerate(ids):
        kept = np.flatnonzero(row != pad) if pad is not None else np.arange(len(row))
        if len(kept):
            yield np.asarray(row[kept[0] : kept[-1] + 1]), size * (index + 1) // len(ids)


# ---- arrays by the names of inputs ----


def _array_batches(source: int, where: str, arrays: dict[str, Array], size: int, intake: Intake) -> Iterator[Batch]:
    specs = {spec.name: spec for spec in intake.limits.inputs.specs}
    mask = None
    if _MASK in arrays and _MASK not in specs and _IDS in specs:
        mask = _right_padding(where, arrays.pop(_MASK), arrays.get(_IDS))
    symbol = _row_symbol(specs)
    sample = as_sample(where, arrays, _without_most(intake.limits, symbol))
    counted = {
        name: _without_padding(tensor, intake.pad)
        for name, tensor in sample.items()
        if name.endswith(_IDS) and tensor.dim() == 2
    }
    mask = sample.get(_MASK) if mask is None else mask
    if mask is not None and _IDS in counted and mask.shape == counted[_IDS].shape:
        counted[_IDS] = mask != 0
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
    """Return limits by which a dimension may be as large as it likes; an empty symbol stands for none."""
    least, _ = limits.inputs.bounds.get(symbol, (1, None))
    return replace(limits, inputs=replace(limits.inputs, bounds={**limits.inputs.bounds, symbol: (least, None)}))


def _right_padding(where: str, mask: Array, ids: Array | None) -> torch.Tensor:
    """Return the mask of a model that takes none, since no token of it sees a later one: padding must come last."""
    if mask.dtype.kind not in "biu":
        raise UserError(
            f"{where}, array {_MASK}", "holds no whole numbers", got=str(mask.dtype),
            expected="1 for tokens, 0 for padding",
        )  # fmt: skip
    tensor = torch.from_numpy(np.array(mask) != 0)
    if ids is None or tensor.shape != ids.shape or tensor.dim() != 2:
        raise UserError(f"{where}, array {_MASK}", "has another shape than input_ids", got=str(list(tensor.shape)))
    if (tensor[:, 1:] & ~tensor[:, :-1]).any():
        raise UserError(
            f"{where}, array {_MASK}", "has padding before tokens, and the model is traced without a mask",
            fix="Add --padding mask.",
        )  # fmt: skip
    return tensor


def _without_padding(ids: torch.Tensor, pad: int | None) -> torch.Tensor:
    """Return which places of [rows, places] are not padding at either end of their row."""
    if pad is None:
        return torch.ones(ids.shape, dtype=torch.bool)
    tokens = (ids != pad).int()
    return (tokens.cumsum(1) > 0) & (tokens.flip(1).cumsum(1).flip(1) > 0)
