"""Documents in files of each kind, by what their suffixes say."""

import json
from pathlib import Path
from typing import Any

import pytest

import twellc
from twellc.base.errors import UserError
from twellc.samples.documents import kind_of, notes_on, read_documents

TEXTS = ["The quick, brown fox", 'says "no"\nand runs', "", "naïve ∞", "home\tagain"]


def contents(path: Path, field: str = "text") -> list[Any]:
    """Return what the documents of a file are, put together from their parts."""
    found = []
    for _, document in read_documents(path, field):
        parts = [part for part, _ in document]
        found.append("".join(parts) if all(isinstance(part, str) for part in parts) else parts[0])
    return found


def quoted(cells: list[str], separator: str) -> str:
    return separator.join('"' + cell.replace('"', '""') + '"' for cell in cells)


def table(separator: str, end: str = "\n") -> str:
    return end.join(quoted(cells, separator) for cells in [["id", "text"], *(["7", text] for text in TEXTS)]) + end


OBJECTS = [{"id": 7, "text": text} for text in TEXTS]
LINES = "\n".join(map(json.dumps, OBJECTS))
FILES: dict[str, str] = {
    "a.jsonl": LINES,
    "a.ndjson": LINES,
    "blank.NDJSON": LINES.replace("\n", "\r\n\r\n"),
    "array.json": json.dumps(OBJECTS, indent=1),
    "mark.json": "\ufeff" + json.dumps(OBJECTS),
    "strings.json": json.dumps(TEXTS, ensure_ascii=False),
    "lines.json": LINES,
    "a.csv": table(","),
    "windows.csv": "\ufeff" + table(",", "\r\n"),
    "a.TSV": table("\t"),
}


@pytest.mark.parametrize("name", FILES)
def test_the_same_texts(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FILES[name].encode())
    assert contents(tmp_path / name) == TEXTS
    assert notes_on([tmp_path / name]) == []


def test_one_object_and_token_ids(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps({"text": "a", "input_ids": [3]}))
    assert contents(tmp_path / "one.json") == ["a"]
    assert contents(tmp_path / "one.json", "content") == [[3]]
    (tmp_path / "ids.json").write_text(json.dumps([{"input_ids": [1, 2]}, {"input_ids": []}]))
    assert contents(tmp_path / "ids.json") == [[1, 2], []]


def test_cells_of_any_length(tmp_path: Path) -> None:
    """Python's own limit is 131 072 characters."""
    (tmp_path / "long.csv").write_text("text\n" + "x" * 200_000 + "\n")
    assert contents(tmp_path / "long.csv") == ["x" * 200_000]


def test_places_and_progress(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('text,id\n"a\nb",1\nc,2\n')
    documents = read_documents(tmp_path / "a.csv", "text")
    found = [(place.rpartition(", ")[2], list(document)) for place, document in documents]
    assert found == [("line 3", [("a\nb", 16)]), ("line 4", [("c", 20)])]


REFUSED: dict[str, tuple[bytes, str]] = {
    "a.csv": (b"id;text\n1;x\n", r"has no column 'text'; got in its first row 'id;text'; .* with --field\."),
    "short.csv": (b"id,text\n1\n", r"line 2: the row has another number of cells .*; expected 2\. Write its texts to"),
    "long.tsv": (b"text\na\tb\n", "line 2: the row has another number of cells"),
    "quotes.tsv": (b'text\n"no" he said\n', r"line 2: cannot be read as a table \('\t' expected after '\"'\)"),
    "open.csv": (b'text\n"no\n', r"cannot be read as a table \(unexpected end of data\)"),
    "bytes.csv": (b"text\nab\nc\xff\n", "is not UTF-8 at byte 9"),
    "damaged.json": (b'[{"text": "a"},\n', "cannot be read as JSON"),
    "numbers.json": (b"[1]", "element 0: has no text in the field 'text'; got int"),
    "nested.json": (b'{"data": [{"text": "a"}]}', "has no text in the field 'text'; got the fields 'data'"),
    "half.json": (b'["a\\ud800"]', "element 0: it has half of a surrogate pair"),
    "later.json": (b'{"text": "a"}\n{"text": 1}\n', "line 2: the field 'text' is neither a text nor"),
    "a.jsonl.gz": (b"\x1f\x8b", r"\.gz files are not read; expected a text, or a \.jsonl.* Unpack it first\."),
    "a.tar": (b"x", r"\.tar files are not read"),
    "a.parquet": (b"PAR1", r"\.parquet files are not read; .*Write its texts to FILE\.jsonl"),
    "a.PT": (b"PK", r"\.pt files are not read; .* with numpy\.savez"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    content, message = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        contents(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "noted"),
    [
        ("a.txt", "Plain {text}, no more.\n", False),
        ("a.py", "[1, 2]\n", False),
        ("data", '\n{"text": "a"}\n{"text": "b"}\n', True),
        ("a.log", "<?xml version='1.0'?><a/>", True),
        ("a.txt", "<!DOCTYPE html><p>", True),
        ("a.html", "<p>text", True),
    ],
)
def test_texts_that_look_like_data(name: str, content: str, noted: bool, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    note = f"read as plain texts, with all their tags, braces and names of fields: {name}; .json, .jsonl"
    assert [each.startswith(note) for each in notes_on([tmp_path / name])] == [True] * noted
    assert contents(tmp_path / name) == [content]


def test_a_profile_of_each_kind_counts_the_same(bytelm: Path, tmp_path: Path) -> None:
    names = ["a.jsonl", "a.ndjson", "array.json", "a.csv", "a.TSV"]
    for name in names:
        (tmp_path / name).write_text(FILES[name])
    (tmp_path / "b.txt").write_text('{"text": "a"}\n')
    profiles = [twellc.profile(bytelm, tmp_path / name, device="cpu") for name in names]
    tokens = sum(len(text.encode()) + 1 for text in TEXTS if text)
    assert [[(each.kind, each.tokens) for each in profile.data] for profile in profiles] == [
        [(kind_of(tmp_path / name), tokens)] for name in names
    ]
    first = profiles[0].blocks["model.layers.2.mlp"].firing.tolist()
    assert all(profile.blocks["model.layers.2.mlp"].firing.tolist() == first for profile in profiles)
    noted = twellc.profile(bytelm, tmp_path / "b.txt", device="cpu").notes
    assert any("names of fields: b.txt" in note for note in noted)
