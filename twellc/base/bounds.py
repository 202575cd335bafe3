"""What a file may make us hold, judged by what it has stored before anything is read, unpacked or computed."""

from __future__ import annotations

import zipfile
from pathlib import Path

from twellc.base.errors import UserError

# What a file of any size may unfold to, and how many times what it stores a large one may.
_SPARE = 256 << 20
_MOST = 4


def unfolds_too_far(size: int, stored: int, most: int = _MOST) -> bool:
    """Whether `size` bytes are more than a file may make of the `stored` ones that it has: `most` times these."""
    return size > _SPARE + most * stored


def refuse_unfolding(where: str, what: str, size: int, stored: int, most: int = _MOST) -> None:
    """Fail where a file makes far more of the bytes that it has stored.

    Raises:
        UserError: It does; `what` says which of its parts.
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
    except Exception:  # zipfile raises what it likes for what is none, or damaged; what reads it says so
        return
    refuse_unfolding(str(path), "what is compressed in it", size, path.stat().st_size)


def _shown(size: int) -> str:
    return f"{size:,} bytes" if size < 10**18 else "more than 10^18 bytes"
