"""Outputs: whatever others do meanwhile, all that a run writes is there at its end, or all is as it was."""

import os
import random
from pathlib import Path

import pytest

from twellc.base.errors import UserError
from twellc.base.files import OutputFiles

# What stands at a name: its kind, and what it holds or where it leads.
Place = tuple[str, str]
NAMES = ("a", "b", "c", "d")


def found(folder: Path) -> dict[str, Place]:
    """Return what is in a folder, hidden files included."""
    places: dict[str, Place] = {}
    for path in folder.iterdir():
        if path.is_symlink():
            places[path.name] = "link", str(path.readlink())
        else:
            places[path.name] = ("folder", "") if path.is_dir() else ("file", path.read_text())
    return places


def put(path: Path, kind: str, content: str, there: dict[str, Place]) -> None:
    """Let somebody else write a file, a link or a folder, or remove what is there."""
    if there.pop(path.name, ("", ""))[0] == "folder":
        path.rmdir()
    path.unlink(missing_ok=True)
    if kind == "file":
        path.write_text(content)
    elif kind == "link":
        path.symlink_to(content)
    elif kind == "folder":
        path.mkdir()
    if kind != "nothing":
        there[path.name] = kind, "" if kind == "folder" else content


def run(folder: Path, draw: random.Random, there: dict[str, Place]) -> bool | None:
    """Write and remove drawn files; return whether that fails, or None where nothing is committed."""
    written: dict[str, Place] = {}
    overwrite = draw.random() < 0.8
    with OutputFiles(overwrite) as outputs:
        for name in draw.sample(NAMES, 3):
            kind = draw.choice(("file", "link", "nothing"))
            if kind == "file":
                outputs.write(folder / name, "written")
            elif kind == "link":
                outputs.link(folder / name, "written")
            written |= {name: (kind, "written")} if kind != "nothing" else {}
        removed = set(draw.sample(NAMES, draw.randint(0, 2)))
        for name in removed:
            outputs.remove(folder / name)
        if draw.random() < 0.5:
            put(folder / draw.choice(NAMES), draw.choice(("file", "link", "folder")), "meanwhile", there)
        if draw.random() < 0.1:
            return None
        folders = {name for name, (kind, _) in there.items() if kind == "folder"}
        after = {name: place for name, place in there.items() if name not in removed}
        if folders & (removed | written.keys()) or (not overwrite and written.keys() & after.keys()):
            with pytest.raises(UserError, match=r"cannot be written|the file exists already\. Add --overwrite"):
                outputs.commit()
            return True
        outputs.commit()
    there.clear()
    there.update(after | written)
    return False


@pytest.mark.parametrize("links", [True, False])
def test_all_or_none(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs one after the other; on a file system without hard links what is replaced is moved aside."""

    def no_links(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", no_links)
    draw, there, ends = random.Random(68), dict[str, Place](), []
    for _ in range(300):
        kind = draw.choice(("file", "link", "folder", "nothing"))
        put(tmp_path / draw.choice(NAMES), kind, "precious", there)
        ends.append(run(tmp_path, draw, there))
        assert found(tmp_path) == there
    assert min(map(ends.count, (True, False, None))) > 10
