"""Seeds of what tests draw: fixed ones, or with TWELLC_FRESH_SEEDS=1 others in each run."""

import os
import random
import zlib


def draw_seed(name: str) -> int:
    """Return a seed that follows from the name, or a fresh one."""
    if os.environ.get("TWELLC_FRESH_SEEDS") == "1":
        return random.SystemRandom().randrange(2**32)
    return zlib.crc32(name.encode())
