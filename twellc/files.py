"""Write output files so that a failed or interrupted run leaves nothing behind and destroys nothing."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from twellc.errors import UserError


class Outputs:
    """The files that a command writes: staged in hidden folders beside their destinations, moved at the very end.

    Use as a context manager; without `commit` nothing of them remains.
    """

    def __init__(self, overwrite: bool) -> None:
        self._overwrite = overwrite
        self._folders: dict[Path, Path] = {}
        self._staged: list[tuple[Path, Path]] = []
        self._created: list[Path] = []

    def __enter__(self) -> Outputs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for folder in self._folders.values():
            shutil.rmtree(folder, ignore_errors=True)
        for folder in self._created:
            with contextlib.suppress(OSError):  # it holds something: an output, or what somebody else put there
                folder.rmdir()

    def make_folder(self, path: Path) -> None:
        """Create a folder and those above it; without outputs in them they are removed again."""
        self._created += [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)

    def check(self, option: str, path: Path) -> None:
        """Fail now rather than after the work is done if `path` cannot be written.

        Raises:
            UserError: Its folder is missing or not writable, or there is something there already.
        """
        folder = path.parent
        if not folder.is_dir():
            raise UserError(f"{option} {path}", "the output folder does not exist", got=str(folder))
        if not os.access(folder, os.W_OK):
            raise UserError(f"{option} {path}", "the output folder is not writable", got=str(folder))
        if path.is_dir():
            raise UserError(f"{option} {path}", "is a folder", expected="a file")
        if path.exists() and not self._overwrite:
            raise UserError(f"{option} {path}", "the file exists already", fix="Add --overwrite to replace it.")

    def stage(self, path: Path) -> Path:
        """Return a path, of the same name and on the same file system, to write the future `path` to."""
        folder = self._folders.get(path.parent)
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix=".twellc-", dir=path.parent))
            self._folders[path.parent] = folder
        temporary = folder / path.name
        self._staged.append((temporary, path))
        return temporary

    def commit(self) -> None:
        """Move every staged file that was written to its destination."""
        for temporary, path in self._staged:
            if temporary.exists():
                temporary.replace(path)


def external_data(onnx_path: Path) -> Path:
    """Where twellc puts the weights of a large ONNX file."""
    return onnx_path.with_name(onnx_path.name + ".data")


def digest(*paths: Path) -> str:
    """Return a SHA-256 over files: of one file what `sha256sum` prints, of several over their digests."""
    digests = []
    for path in paths:
        with path.open("rb") as stream:
            digests.append(hashlib.file_digest(stream, "sha256"))
    if len(digests) == 1:
        return digests[0].hexdigest()
    return hashlib.sha256(b"".join(each.digest() for each in digests)).hexdigest()
