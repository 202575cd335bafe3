"""Write output files so that a failed or interrupted run leaves nothing behind and destroys nothing."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import signal
import stat
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from twellc.base.errors import UserError

# Signals that ask a program to end: Ctrl-C, kill, and a terminal that closes.
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The hidden folder `.twellc-…` beside the output NAME holds `staged/NAME` and `scratch/NAME/…`, and at the end
# `replaced/NAME`, the file that was there, until all outputs are in their places.
_STAGING = ".twellc-"
_STAGED, _SCRATCH, _REPLACED = "staged", "scratch", "replaced"


class OutputFiles:
    """The files that a command writes: staged in hidden folders beside their destinations, moved at the very end.

    Use as a context manager; without `commit` no file remains.
    """

    def __init__(self, overwrite: bool) -> None:
        self._overwrite = overwrite
        self._folders: dict[Path, Path] = {}
        self._staged: list[tuple[Path, Path]] = []
        self._removed: list[Path] = []
        self._created: list[Path] = []

    def __enter__(self) -> OutputFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with uninterrupted():
            for folder in self._folders.values():
                shutil.rmtree(folder, ignore_errors=True)
            for folder in self._created:
                with contextlib.suppress(OSError):  # it holds something: an output, or a file of another program
                    folder.rmdir()

    def make_folder(self, path: Path) -> None:
        """Create a folder and those above it; without outputs in them they are removed again."""
        with uninterrupted():
            self._created += [folder for folder in (path, *path.parents) if not folder.exists()]
            path.mkdir(parents=True, exist_ok=True)

    def check(self, option: str, path: Path) -> None:
        """Fail now rather than after the work is done if `path` cannot be written.

        Raises:
            UserError: Its folder is missing or not writable, or the path exists already.
        """
        folder = path.parent
        if not folder.is_dir():
            raise UserError(f"{option} {path}", "the output folder does not exist", got=str(folder))
        if not os.access(folder, os.W_OK):
            raise UserError(f"{option} {path}", "the output folder is not writable", got=str(folder))
        if path.is_dir():
            raise UserError(f"{option} {path}", "is a folder", expected="a file")
        if (path.exists() and not path.is_file()) or _leads_to_open_file(path):
            raise UserError(f"{option} {path}", "is a device or a pipe", expected="a file")
        self._refuse_existing(f"{option} {path}", path)

    def _refuse_existing(self, where: str, path: Path) -> None:
        if os.path.lexists(path) and not self._overwrite:
            raise UserError(where, "the file exists already", fix="Add --overwrite to replace it.")

    def check_folder(self, option: str, path: Path) -> None:
        """Fail now if a folder cannot be made at `path`, or files in an existing one would be overwritten.

        Raises:
            UserError: There is a file, or a folder that is not empty.
        """
        if path.exists() and not path.is_dir():
            raise UserError(f"{option} {path}", "is a file", expected="a folder")
        if path.is_dir() and any(path.iterdir()) and not self._overwrite:
            raise UserError(
                f"{option} {path}", "the folder is not empty", fix="Add --overwrite to replace files in it."
            )

    def stage(self, path: Path) -> Path:
        """Return a path, of the same name and on the same file system, to write the future `path` to."""
        temporary = self._folder(path, _STAGED) / path.name
        self._staged.append((temporary, path))
        return temporary

    def scratch(self, path: Path, name: str) -> Path:
        """Return a path for a temporary file from which the future `path` is made."""
        folder = self._folder(path, _SCRATCH) / path.name
        with writing(path):
            folder.mkdir(exist_ok=True)
        return folder / name

    def _folder(self, path: Path, kind: str) -> Path:
        with uninterrupted(), writing(path):
            folder = self._folders.get(path.parent)
            if folder is None:
                folder = Path(tempfile.mkdtemp(prefix=_STAGING, dir=path.parent))
                self._folders[path.parent] = folder
            folder = folder / kind
            folder.mkdir(exist_ok=True)
        return folder

    def write(self, path: Path, content: str | bytes) -> None:
        """Stage a file: a text in UTF-8, or bytes."""
        with writing(path):
            self.stage(path).write_bytes(content.encode() if isinstance(content, str) else content)

    def link(self, path: Path, target: str) -> None:
        """Stage a link to a file beside it, of the name `target`."""
        with writing(path):
            self.stage(path).symlink_to(target)

    def remove(self, path: Path) -> None:
        """Remove a file beside an output when the output is moved to its destination."""
        self._removed.append(path)

    def commit(self) -> None:
        """Move every staged file that was written to its destination: all of them, or none where one cannot be moved.

        Where two runs write the same files, one moves all its files before the other moves any. Then the command is
        done: it ignores signals that would end it (`end_commands_by`).

        Raises:
            UserError: A file cannot be moved, or another program has put one there since the check.
        """
        with _locked(self._folders), uninterrupted() as handlers, contextlib.ExitStack() as undo:
            for path in self._removed:
                with writing(path):
                    undo.callback(self._keep(path))
                    path.unlink(missing_ok=True)
            for temporary, path in self._staged:
                if os.path.lexists(temporary):
                    self._refuse_existing(str(path), path)
                    with writing(path):
                        undo.callback(self._keep(path))
                        temporary.replace(path)
            undo.pop_all()
            ours = (number for number, handler in handlers.items() if handler in _ENDS_OF_COMMANDS)
            handlers.update(dict.fromkeys(ours, signal.SIG_IGN))

    def _keep(self, path: Path) -> Callable[[], object]:
        """Keep the file at `path` in the hidden folder; return a function that puts it back."""
        if not os.path.lexists(path):
            return functools.partial(path.unlink, missing_ok=True)
        kept = self._folder(path, _REPLACED) / path.name
        try:
            os.link(path, kept, follow_symlinks=False)
        except OSError:
            if path.is_dir():
                raise
            path.rename(kept)  # a file system without hard links
        return functools.partial(kept.replace, path)


@contextmanager
def _locked(folders: Iterable[Path]) -> Iterator[None]:
    """Keep other runs out of this part of the program for the same folders; runs lock these in the order of inodes."""
    with contextlib.ExitStack() as opened:
        places = {(status.st_dev, status.st_ino): folder for folder in folders for status in [folder.stat()]}
        for _, folder in sorted(places.items()):
            with contextlib.suppress(OSError):  # a folder that may not be read, or a file system without locks
                descriptor = os.open(folder, os.O_RDONLY)
                opened.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _leads_to_open_file(path: Path) -> bool:
    """Whether this is a link such as /dev/stdout, which must stay even if it leads to a plain file now."""
    return path.is_symlink() and path.readlink().is_relative_to("/proc")


def end_commands_by(handler: Callable[[int, FrameType | None], None]) -> None:
    """Let signals end the command of this process until its outputs are written; ignored signals stay ignored."""
    _ENDS_OF_COMMANDS.add(handler)
    for number in ENDING_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, handler)


_ENDS_OF_COMMANDS: set[Any] = set()


@contextmanager
def uninterrupted() -> Iterator[dict[signal.Signals, Any]]:
    """Hold back signals that would end the program, until a step that must not stop halfway is done.

    Yields the handlers that the signals get back after it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield {}  # signals are handled in the main thread
        return
    held: list[int] = []

    def hold(number: int, _: FrameType | None) -> None:
        held.append(number)

    handlers = {number: signal.signal(number, hold) for number in ENDING_SIGNALS}
    try:
        yield handlers
    finally:
        # Ctrl-C last: an interrupt between two would leave the others held back.
        for number, handler in reversed(handlers.items()):
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0])


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder, and remove it at the end even after a signal."""
    folder = None
    try:
        with uninterrupted():
            folder = Path(tempfile.mkdtemp(prefix="twellc-"))
        yield folder
    finally:
        with uninterrupted():
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Add the name of the file to errors of the system, such as that of a full disk.

    Args:
        path: The file; for a staged or a temporary one the message names the output.

    Raises:
        UserError: It cannot be written.
    """
    try:
        yield
    except OSError as error:
        for folder in path.parents:
            if folder.name in (_STAGED, _SCRATCH) and folder.parent.name.startswith(_STAGING):
                path = folder.parent.with_name(path.relative_to(folder).parts[0])
                break
        what, fix = f"cannot be written: {error.strerror or error}", "Make room, or write to another place."
        raise UserError(str(path), what, fix=fix) from error


def why_no_file(path: Path) -> str:
    """Return the reason why a path is not a plain file."""
    if path.is_dir():
        return "is a folder"
    if path.exists():
        return "is a device or a pipe"
    return "is a link to a file that is not there" if path.is_symlink() else "there is no such file"


def open_file(path: Path) -> BufferedReader:
    """Open a plain file to read; opening a pipe would wait, and a device may do anything.

    Raises:
        UserError: There is none at the path.
    """
    if path.is_file():
        # Another file may be there by now: a pipe is opened without waiting, and refused below.
        stream = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
        if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            return stream
        stream.close()
    raise UserError(str(path), why_no_file(path), expected="a plain file")


def read_file(path: Path) -> bytes:
    """Return the bytes of a plain file.

    Raises:
        UserError: There is none at the path.
    """
    with open_file(path) as stream:
        return stream.read()


def output_path(option: str, given: str | os.PathLike[str]) -> Path:
    """Return the path of a file to write; `Path` alone would lose the slash that marks a folder.

    Raises:
        UserError: It names a folder.
    """
    if os.fspath(given).endswith(("/", "/.")):
        raise UserError(f"{option} {given}", "is a folder", expected="a file")
    return Path(given)


def refuse_replacing(option: str, path: Path, inputs: Iterable[Path | None]) -> None:
    """Fail where an output would replace a file that the user gave to read.

    Raises:
        UserError: It would.
    """
    if any(given is not None and places(path) & places(given) for given in inputs):
        raise UserError(f"{option} {path}", "is a file that is read", fix="Write to another place.")


def places(path: Path) -> set[Path]:
    """Return the paths of a file: its target, and the place of a link itself."""
    return {Path(os.path.realpath(path)), Path(os.path.realpath(path.parent), path.name)}


def external_data(onnx_path: Path) -> Path:
    """Return the path for the weights of a large ONNX file."""
    return onnx_path.with_name(onnx_path.name + ".data")


def digest(*paths: Path) -> str:
    """Return a SHA-256 over files: the one that `sha256sum` prints for one file, else one over their digests."""
    digests = []
    for path in paths:
        with open_file(path) as stream:
            digests.append(hashlib.file_digest(stream, "sha256"))
    if len(digests) == 1:
        return digests[0].hexdigest()
    return hashlib.sha256(b"".join(each.digest() for each in digests)).hexdigest()
