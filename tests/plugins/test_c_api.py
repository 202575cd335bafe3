"""The parts of the C API that need no GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from twellc import __version__
from twellc.plugins import library

HEADER = Path(__file__).resolve().parents[2] / "plugins" / "include" / "twell" / "twell.h"


def problem(**changes: float) -> library.Problem:
    fields = {
        "tokens": 100,
        "d_model": 72,
        "d_ff": 600,
        "d_out": 136,
        "compression": 8,
        "dtype": 0,
        "variant": 0,
        "activation": 0,
        "threshold": 0.0,
        "hot": 0,
    }
    return library.Problem(**{**fields, **changes})


def test_version() -> None:
    assert library.load().twell_version().decode() == __version__


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tokens": 0},
        {"tokens": 2**29},
        {"d_ff": 1},
        {"d_ff": 65536},
        {"d_model": 8},
        {"d_out": 100_000},
        {"d_model": 2**30, "d_out": 2**30},
        {"activation": 3},
        {"variant": 1, "activation": 2, "threshold": 0.5},
        {"hot": 7},
        {"hot": 600},
    ],
    ids=str,
)
def test_validate_accepts(changes: dict[str, float]) -> None:
    assert library.load().twell_validate(problem(**changes)) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": -1}, "tokens"),
        ({"tokens": 2**29 + 1}, "tokens"),
        ({"d_model": 0}, "d_model"),
        ({"d_model": 12}, "d_model"),
        ({"d_model": -8}, "d_model"),
        ({"d_out": 4}, "d_out"),
        ({"d_model": 2**30 + 8}, "d_model"),
        ({"d_out": 2**31 - 8}, "d_out"),
        ({"d_ff": 0}, "d_ff"),
        ({"d_ff": 65537}, "d_ff"),
        ({"compression": 3}, "compression"),
        ({"compression": 16}, "compression"),
        ({"dtype": 2}, "dtype"),
        ({"variant": -1}, "variant"),
        ({"activation": 4}, "activation"),
        ({"activation": 3, "variant": 1}, "drelu"),
        ({"activation": 2, "threshold": -0.5}, "threshold"),
        ({"activation": 2, "threshold": float("nan")}, "threshold"),
        ({"activation": 2, "threshold": float("inf")}, "threshold"),
        ({"hot": -1}, "hot"),
        ({"hot": 601}, "hot"),
    ],
    ids=str,
)
def test_validate_rejects(changes: dict[str, float], message: str) -> None:
    lib = library.load()
    fault = lib.twell_validate(problem(**changes))
    assert fault is not None and message in fault.decode()
    assert lib.twell_packed_bytes(problem(**changes)) == 0
    assert lib.twell_workspace_bytes(problem(**changes)) == 0


def test_validate_rejects_null() -> None:
    assert library.load().twell_validate(None) is not None


@pytest.mark.parametrize("compression", [1, 2, 4, 8])
def test_sizes(compression: int) -> None:
    lib = library.load()
    before = 0
    for tokens in (0, 1, 7, 8, 100, 2**29):
        tried = problem(tokens=tokens, compression=compression)
        packed = lib.twell_packed_bytes(tried)
        assert packed == tokens * 3 * (256 // compression) * 4
        workspace = lib.twell_workspace_bytes(tried)
        assert workspace >= max(packed, before)
        before = workspace


@pytest.mark.parametrize("variant", [0, 1], ids=("gated", "plain"))
@pytest.mark.parametrize("d_ff", [1, 60, 5632, 16384])
@pytest.mark.parametrize("d_out", [8, 136, 1024, 2048, 2560, 5120, 17000, 40000])
@pytest.mark.parametrize("hot", [0.0, 0.1, 1.0])
def test_workspace_never_shrinks(hot: float, d_out: int, d_ff: int, variant: int) -> None:
    """A plan has the workspace of its largest call: all smaller ones must do with that."""
    lib = library.load()
    sizes = {"d_model": 1024, "d_ff": d_ff, "d_out": d_out, "hot": int(hot * d_ff)}
    edges = (1, 2, 8, 16, 24, 32, 64, 128, 192, 256, 768, 1280, 2048, 4096, 8192, 16384)
    counts = sorted({tokens for edge in edges for tokens in (edge - 1, edge, edge + 1)})
    found = [lib.twell_workspace_bytes(problem(tokens=tokens, variant=variant, **sizes)) for tokens in counts]
    assert found == sorted(found)


@pytest.mark.parametrize(("hot", "splits"), [(0, False), (8, False), (127, False), (128, True), (500, True)])
def test_workspace_of_a_split(hot: int, splits: bool) -> None:
    """The sums over the hot neurons are in the workspace, beside what either part needs."""
    lib = library.load()
    tokens, d_out = 4096, 2048
    for d_ff in (600, 5632):
        whole = lib.twell_workspace_bytes(problem(tokens=tokens, d_model=2048, d_ff=d_ff, d_out=d_out))
        tried = lib.twell_workspace_bytes(problem(tokens=tokens, d_model=2048, d_ff=d_ff, d_out=d_out, hot=hot))
        rest = lib.twell_workspace_bytes(problem(tokens=tokens, d_model=2048, d_ff=d_ff - hot // 8 * 8, d_out=d_out))
        assert tried >= whole if splits else tried == whole
        assert not splits or tried >= rest + tokens * d_out * 2 - 256


def test_header_says_the_same() -> None:
    text = HEADER.read_text()
    assert f"#define TWELL_TILE {library.TILE}\n" in text
    assert f"#define TWELL_MAX_D_FF {library.MAX_D_FF}\n" in text
    constants = {name.lower(): int(value) for name, value in re.findall(r"\bTWELL_(\w+) = (\d+)", text)}
    assert constants == {"bf16": 0, "fp16": 1, **library.VARIANTS, **library.ACTIVATIONS}
    for struct, mirror in (("twell_problem", library.Problem), ("twell_tensors", library.Tensors)):
        body = re.search(r"typedef struct \{([^}]*)\} " + struct, text)
        assert body is not None
        names = re.findall(r"(\w+);", re.sub(r"//.*", "", body.group(1)))
        assert names == [field[0] for field in mirror._fields_]
