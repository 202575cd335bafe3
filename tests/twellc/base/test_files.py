"""Outputs: whatever others do meanwhile, all that a run writes is there at its end, or all is as it was.

`TWELLC_FUZZ_EXAMPLES=2000 pytest tests/twellc/base/test_files.py` runs longer, and with other examples each time.
"""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

from tests.drawn import examples
from twellc.base import files
from twellc.base.errors import UserError
from twellc.base.files import ENDING_SIGNALS, OutputFiles

# What stands at a name: its kind, and what it holds or where it leads.
Place = tuple[str, str]
FOLDER = ("folder", "")
NAMES, STEPS = st.sampled_from(["a", "b", "new/a", "new/b"]), st.integers(-240, 120)  # below 0: none
KINDS = st.sampled_from(["write", "write", "link", "scratch", "stage"])


def came(number: int, _: object) -> None:
    raise KeyboardInterrupt(number)


def listen() -> None:
    for number in ENDING_SIGNALS:
        signal.signal(number, came)


@contextmanager
def interrupted(step: int, held: bool = False) -> Iterator[None]:
    """Send Ctrl-C at the call number `step` of `files`, of all or of those while signals are held back."""
    count = [0]

    def watch(frame: Any, event: str, _: object) -> None:
        callers = frame.f_code.co_filename, frame.f_back.f_code.co_filename
        if event not in ("call", "c_call") or files.__file__ not in callers:
            return
        if not held or signal.getsignal(signal.SIGINT) is not came:
            count[0] += 1
            if count[0] - 1 == step:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None)


class Run:
    """The outputs of a run, and what it has done with them."""

    def __init__(self, overwrite: bool) -> None:
        self.outputs, self.overwrite, self.makes_folder = OutputFiles(overwrite).__enter__(), overwrite, False
        self.staged, self.written = set[str](), dict[str, Place]()


class Outputs(RuleBasedStateMachine):
    """Runs that write to the same names, others that do likewise, and Ctrl-C at any call."""

    runs = Bundle("runs")

    def __init__(self) -> None:
        super().__init__()
        self.folder, self.there, self.open = Path(tempfile.mkdtemp()), dict[str, Place](), set[Run]()
        listen()

    def teardown(self) -> None:
        for run in [*self.open]:
            self.leave(run, -1)
        assert self.found() == self.there
        shutil.rmtree(self.folder)

    def found(self) -> dict[str, Place]:
        """Return what is in the folder; hidden files, too, where no run may have any."""
        places: dict[str, Place] = {}
        for path in [*self.folder.iterdir(), *self.folder.glob("new/*")]:
            if not self.open or not path.name.startswith("."):
                plain = FOLDER if path.is_dir() else ("file", path.read_text() if path.is_file() else "")
                place = ("link", str(path.readlink())) if path.is_symlink() else plain
                places[str(path.relative_to(self.folder))] = place
        return places

    @invariant()
    def as_it_must_be(self) -> None:
        assert self.found() == self.there
        assert {*map(signal.getsignal, ENDING_SIGNALS)} == {came}

    @rule(name=NAMES, kind=st.sampled_from(["file", "link", "folder", "nothing"]))
    def others(self, name: str, kind: str) -> None:
        """Let somebody else write a file, a link or a folder, or remove what is there."""
        path = self.folder / name
        if path.parent != self.folder:
            path.parent.mkdir(exist_ok=True)
            self.there["new"] = FOLDER
        path.rmdir() if self.there.pop(name, None) == FOLDER else path.unlink(missing_ok=True)
        put = {"file": path.write_text, "link": path.symlink_to, "folder": lambda _: path.mkdir()}
        if kind in put:
            put[kind]("precious")
            self.there[name] = FOLDER if kind == "folder" else (kind, "precious")

    @rule(target=runs, overwrite=st.booleans())
    def begin(self, overwrite: bool) -> Run:
        run = Run(overwrite)
        self.open.add(run)
        return run

    @rule(run=runs, kinds=st.dictionaries(NAMES, KINDS, min_size=1, max_size=3), step=STEPS)
    def write(self, run: Run, kinds: dict[str, str], step: int) -> None:
        for name, kind in kinds.items():
            self.write_one(run, name, kind, step)

    def write_one(self, run: Run, name: str, kind: str, step: int) -> None:
        path, below = self.folder / name, name.startswith("new/")
        if run not in self.open or name in run.staged:
            return
        run.makes_folder |= below and "new" not in self.there
        self.there |= {"new": FOLDER} if below else {}
        run.staged.add(name)
        try:
            with interrupted(step):
                if below:
                    run.outputs.make_folder(path.parent)
                # Files that are only staged are not written, and leave nothing.
                made = getattr(run.outputs, kind)(path, *([] if kind == "stage" else ["text"]))
                if kind == "scratch":
                    made.write_text("for a while")
        except KeyboardInterrupt:
            self.leave(run, -1)
        else:
            run.written |= {name: ("file" if kind == "write" else kind, "text")} if kind in ("write", "link") else {}

    @rule(run=consumes(runs), removed=st.sets(NAMES, max_size=2), commits=st.integers(0, 4), step=STEPS, last=STEPS)
    def end(self, run: Run, removed: set[str], commits: int, step: int, last: int) -> None:
        for name in removed:
            run.outputs.remove(self.folder / name)
        written, folders = run.written.keys(), {name for name, place in self.there.items() if place == FOLDER}
        after = {name: place for name, place in self.there.items() if name not in removed}
        refused = folders & (removed | written) or (not run.overwrite and written & after.keys())
        after |= run.written
        if run in self.open and commits:
            try:
                with interrupted(step):
                    run.outputs.commit()
                assert not refused
                self.there = after
                if files._ENDS_OF_COMMANDS:  # the command is done: no signal ends it any more
                    assert {*map(signal.getsignal, ENDING_SIGNALS)} == {signal.SIG_IGN}
                    listen()
            except UserError as error:
                assert refused, error
            except KeyboardInterrupt:
                # Before files are moved, or behind that.
                self.there = after if not refused and self.found() == after else self.there
        if run in self.open:
            self.leave(run, last)

    def leave(self, run: Run, step: int) -> None:
        try:
            with interrupted(step, held=True):
                run.outputs.__exit__(None, None, None)
        except KeyboardInterrupt:
            assert step >= 0
        self.open.remove(run)
        kept = self.there.keys() | set().union(*(each.staged for each in self.open))
        if run.makes_folder and not any(name.startswith("new/") for name in kept):
            del self.there["new"]


@pytest.mark.parametrize(("links", "command"), [(True, False), (False, True)])
def test_all_or_none(links: bool, command: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system without hard links what is replaced is moved aside; a command ends with its outputs."""

    def no_links(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(files, "_ENDS_OF_COMMANDS", {came} if command else set())
    run_state_machine_as_test(Outputs, settings=examples(250, 30))
