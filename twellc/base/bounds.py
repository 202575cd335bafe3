"""Limits of the memory for a file, from the bytes that it stores; checked before it is read, unpacked or computed."""

from __future__ import annotations

import zipfile
from pathlib import Path

from twellc.base.errors import UserError

# A file may unfold to this many bytes, plus this many times those that it stores.
_SPARE = 256 << 20
_MOST = 4


def unfolds_too_far(size: int, stored: int, most: int = _MOST) -> bool:
    """Whether `size` bytes are more than a file of `stored` bytes may take: `most` times these, and some to spare."""
    return size > _SPARE + most * stored


def refuse_unfolding(where: str, what: str, size: int, stored: int, most: int = _MOST) -> None:
    """Fail where a file would take far more memory than it stores bytes.

    Raises:
        UserError: It would; `what` names the part.
    """
    if unfolds_too_far(size, stored, most):
        raise UserError(
            where,
            f"{what} would take far more memory than the file has bytes",
            got=f"{_shown(size)}, of {_shown(stored)} that are stored",
            expected=f"at most {most} times that, and {_shown(_SPARE)}",
            fix="Write it again, without compression, and with each tensor as large as it is.",
        )


def refuse_bomb(path: Path) -> None:
    """Fail where the entries of a zip archive are much larger than the archive; other files pass.

    Raises:
        UserError: They are.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
    except Exception:  # zipfile raises anything for other or damaged files; the reader of the file reports them
        return
    refuse_unfolding(str(path), "what is compressed in it", size, path.stat().st_size)


def _shown(size: int) -> str:
    return f"{size:,} bytes" if size < 10**18 else "more than 10^18 bytes"
