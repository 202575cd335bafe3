"""The documents in the user's files, as texts or token ids, read piece by piece."""

from __future__ import annotations

import codecs
import csv
import json
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twellc.base.errors import UserError, first_few, first_line
from twellc.base.files import open_file, read_file, why_no_file

# Parts of a document, text or token ids, each with the number of bytes read so far.
Document = Iterable[tuple["str | list[int]", int]]

IDS = "input_ids"
_CHUNK = 1 << 16
_HEAD = 1 << 12
_KINDS = {
    ".jsonl": "lines of JSON",
    ".ndjson": "lines of JSON",
    ".json": "JSON",
    ".csv": "table",
    ".tsv": "table",
    ".npz": "arrays",
    ".npy": "token ids",
}
_EXPECTED = "a text, or a .jsonl, .json, .csv, .tsv, .npz or .npy file"
_AS_LINES = 'Write its texts to FILE.jsonl, one {"text": "…"} in each line.'
# Files that are not texts, with advice for each.
_REFUSED = {
    **dict.fromkeys((".gz", ".tgz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".tar", ".7z", ".rar"), "Unpack it first."),
    **dict.fromkeys((".parquet", ".arrow", ".feather", ".orc", ".avro", ".tfrecord", ".sqlite", ".db"), _AS_LINES),
    **dict.fromkeys((".xlsx", ".xls", ".ods", ".pdf", ".docx", ".odt", ".epub"), _AS_LINES),
    **dict.fromkeys(
        (".pt", ".pth", ".pkl", ".pickle", ".safetensors", ".bin", ".h5", ".hdf5"),
        "Write the arrays to FILE.npz, with numpy.savez.",
    ),
}
_MARKUP = (".xml", ".html", ".htm", ".ipynb")


def kind_of(path: Path, option: str = "--data") -> str:
    """Return `text`, `lines of JSON`, `JSON`, `table`, `arrays` or `token ids`: how a file is read, by its suffix.

    Args:
        path: The file.
        option: The option that names it, for messages.

    Raises:
        UserError: The file is missing, empty, or of a kind that is not read.
    """
    where, suffix = f"{option} {path}", path.suffix.lower()
    if not path.is_file():
        raise UserError(where, why_no_file(path), expected=_EXPECTED)
    if path.stat().st_size == 0:
        raise UserError(where, "the file is empty")
    if suffix in _REFUSED:
        raise UserError(where, f"{suffix} files are not read", expected=_EXPECTED, fix=_REFUSED[suffix])
    return _KINDS.get(suffix, "text")


def notes_on(paths: Iterable[Path]) -> list[str]:
    """Return notes on files that are read as texts and seem to hold markup or data."""
    marked = [path.name for path in paths if kind_of(path) == "text" and _seems_marked(path)]
    if not marked:
        return []
    note = "read as plain texts, with all their tags, braces and names of fields: "
    return [f"{note}{first_few(marked)}; .json, .jsonl, .csv and .tsv are read as what they hold"]


def _seems_marked(path: Path) -> bool:
    with open_file(path) as file:
        head = file.read(_HEAD).lstrip()
    start = head.splitlines()[0].strip() if head else b""
    if path.suffix.lower() in _MARKUP or start.lower().startswith((b"<?xml", b"<!doctype", b"<html")):
        return True
    try:
        return isinstance(json.loads(start), dict)
    except (ValueError, RecursionError):
        return False


def read_documents(path: Path, field: str, option: str = "--data") -> Iterator[tuple[str, Document]]:
    """Yield the documents of a file, each with its place for messages; of an array of token ids each row, or parts.

    Args:
        path: The file.
        field: The field of an object, or the column of a table, that holds the text.
        option: The option that names the file, for messages.

    Raises:
        UserError: The file cannot be read as its suffix says, or has no text there.
    """
    where = f"{option} {path}"
    match kind_of(path, option):
        case "arrays":
            raise UserError(where, "holds arrays", expected="texts, or token ids in an .npy file")
        case "token ids":
            return ((where, [(row.tolist(), read)]) for row, read in read_ids(path, where, None))
        case "lines of JSON":
            return _documents_of_lines(path, where, field)
        case "JSON":
            return _documents_of_json(path, where, field)
        case "table":
            return _documents_of_table(path, where, field)
        case _:
            return iter([(where, _pieces(path, where))])


def read_ids(path: Path, where: str, pad: int | None) -> Iterator[tuple[NDArray[Any], int]]:
    """Yield token ids of an .npy file, with the bytes read so far: rows of a matrix, or a vector in parts.

    The file is not read as a whole.

    Args:
        path: The file.
        where: The name of the file in messages.
        pad: The padding token at the beginning and end of rows; None without padding.

    Raises:
        UserError: It is damaged, or holds no token ids.
    """
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy may raise anything for a damaged file
        raise UserError(where, f"cannot be read as an .npy file ({first_line(error)})") from error
    if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu" or ids.ndim not in (1, 2):
        expected = "integers: a vector, or a matrix with a sequence in each row"
        raise UserError(where, "holds no token ids", got=f"{ids.dtype} {list(ids.shape)}", expected=expected)
    size = path.stat().st_size
    if ids.ndim == 1:
        for start in range(0, len(ids), _CHUNK):
            yield np.asarray(ids[start : start + _CHUNK]), size * (start + 1) // len(ids)
        return
    for index, row in enumerate(ids):
        kept = np.flatnonzero(row != pad) if pad is not None else np.arange(len(row))
        if len(kept):
            yield np.asarray(row[kept[0] : kept[-1] + 1]), size * (index + 1) // len(ids)


def _texts(parts: Iterable[bytes], where: str, encoding: str = "utf-8") -> Iterator[tuple[str, int]]:
    """Yield parts of a file as texts, each with the number of bytes read so far."""
    decoder, read = codecs.getincrementaldecoder(encoding)(), 0
    for part in chain(parts, (b"",)):
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(part, final=not part)
        except UnicodeDecodeError as error:
            place = read - pending + error.start
            raise UserError(where, f"is not UTF-8 at byte {place}", expected="a text in UTF-8") from error
        read += len(part)
        yield text, read


def _pieces(path: Path, where: str) -> Iterator[tuple[str, int]]:
    """Yield a text piece by piece; pieces end with a line, or before a space, if there is one."""
    waiting, read = "", 0
    with open_file(path) as file:
        for text, read in _texts(iter(partial(file.read, _CHUNK), b""), where):
            waiting += text
            cut = (waiting.rfind("\n") + 1 or waiting.rfind(" ")) if text else len(waiting)
            cut = cut if cut > 0 else len(waiting)
            if waiting[:cut]:
                yield waiting[:cut], read
            waiting = waiting[cut:]


# ---- JSON ----


def _documents_of_lines(path: Path, where: str, field: str) -> Iterator[tuple[str, Document]]:
    """Yield the text, or else the `input_ids`, of each line that is not empty."""
    read = 0
    with open_file(path) as file:
        for number, line in enumerate(file, 1):
            read += len(line)
            if not line.strip():
                continue
            place = f"{where}, line {number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(place, f"cannot be read as JSON ({first_line(error)})") from error
            yield place, [(_content(place, record, field), read)]


def _documents_of_json(path: Path, where: str, field: str) -> Iterator[tuple[str, Document]]:
    """Yield the text, or else the `input_ids`, of each element of an array, or of one object; strings are texts.

    Files with an object in each line have this suffix, too.
    """
    content = read_file(path)
    try:
        records = json.loads(content)
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
            yield from _documents_of_lines(path, where, field)
            return
        raise UserError(where, f"cannot be read as JSON ({first_line(error)})") from error
    if not isinstance(records, list):
        yield where, [(_content(where, records, field), len(content))]
        return
    for index, record in enumerate(records):
        place, read = f"{where}, element {index}", len(content) * (index + 1) // len(records)
        text = _characters(place, "it", record) if isinstance(record, str) else _content(place, record, field)
        yield place, [(text, read)]


def _content(place: str, record: object, field: str) -> str | list[int]:
    """Return the text, or else the `input_ids`, of an object."""
    fields = record if isinstance(record, dict) else {}
    name = field if field in fields else IDS
    content = fields.get(name)
    if isinstance(content, str):
        return _characters(place, f"the field {name!r}", content)
    if isinstance(content, list) and all(type(token) is int for token in content):
        return content
    if name in fields:
        held = type(content).__name__ + (" with others than integers" if isinstance(content, list) else "")
        raise UserError(place, f"the field {name!r} is neither a text nor a list of token ids", got=held)
    expected, fix = f'{{"{field}": "a text"}}, or token ids in the field {IDS!r}', "Name the field with --field."
    raise UserError(place, f"has no text in the field {field!r}", got=_shown(record), expected=expected, fix=fix)


def _characters(place: str, what: str, content: str) -> str:
    """Return a text, or fail if it holds half a character, which JSON can spell and no tokenizer takes."""
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise UserError(place, f"{what} has half of a surrogate pair", expected="a text in UTF-8") from error
    return content


def _shown(record: object) -> str:
    return f"the fields {', '.join(map(repr, record))}" if isinstance(record, dict) else type(record).__name__


# ---- tables ----


def _documents_of_table(path: Path, where: str, field: str) -> Iterator[tuple[str, Document]]:
    """Yield the text that each row of a .csv or .tsv file has in a column; the first row names the columns."""
    read = number = 0

    def lines() -> Iterator[str]:
        nonlocal read, number
        with open_file(path) as file:
            for text, so_far in _texts(file, where, "utf-8-sig"):
                if text:
                    read, number = so_far, number + 1
                    yield text

    separator = "\t" if path.suffix.lower() == ".tsv" else ","
    before = csv.field_size_limit(sys.maxsize)
    try:
        rows: Any = csv.DictReader(lines(), delimiter=separator, strict=True)
        columns = rows.fieldnames or ()
        if field not in columns:
            what, got = f"has no column {field!r}", f"in its first row {first_few([*map(repr, columns)])}"
            expected = "a row with the names of the columns"
            raise UserError(where, what, got=got, expected=expected, fix="Name the column of the text with --field.")
        for row in rows:
            place = f"{where}, line {number}"
            if row[field] is None or None in row:
                what = "the row has another number of cells than the first row has names"
                raise UserError(place, what, expected=str(len(columns)), fix=_AS_LINES)
            yield place, [(row[field], read)]
    except csv.Error as error:
        raise UserError(f"{where}, line {number}", f"cannot be read as a table ({error})", fix=_AS_LINES) from error
    finally:
        csv.field_size_limit(before)
