"""The parts of the C API that need no GPU."""

import ctypes
import re
from pathlib import Path

import pytest

from twellc import __version__
from twellc.plugins import fp8, library

INVALID_VALUE, MISALIGNED_ADDRESS = 1, 716
HEADER = Path(__file__).resolve().parents[2] / "plugins" / "include" / "twell" / "twell.h"


def problem(**changes: float) -> library.Problem:
    sizes = {"tokens": 100, "d_model": 72, "d_ff": 600, "d_out": 136, "compression": 8}
    return library.Problem(**{**sizes, **changes})


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
        {"d_ff": 2**20, "variant": 1},
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
        ({"d_ff": 65537, "variant": 1, "weight_dtype": 2}, "d_ff must be 1 to 65536 in a gated block, and with e4m3"),
        ({"d_ff": 2**20 + 1, "variant": 1}, "d_ff must be 1 to 1048576"),
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
        ({"weight_dtype": 1}, "weight_dtype must be the same as dtype"),
        ({"dtype": 1, "weight_dtype": 0}, "weight_dtype must be the same as dtype"),
        ({"reserved": 1}, "reserved"),
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


# Bytes of the first layouts of the second version of the API: these must never change.
LEAST_BYTES = {"problem": 48, "tensors": 80}


class LongerProblem(ctypes.Structure):
    _fields_ = (("known", library.Problem), ("more", ctypes.c_int64 * 40))


def longer(struct_bytes: int, more: int) -> LongerProblem:
    made = LongerProblem(known=problem(struct_bytes=struct_bytes))
    made.more[-1] = more
    made.more[0] = more
    return made


def test_a_struct_of_an_older_caller() -> None:
    """The fields that it does not have count as 0, whatever lies behind it."""
    lib = library.load()
    older = problem(struct_bytes=LEAST_BYTES["problem"], hot=-5, reserved=7)
    assert lib.twell_validate(older) is None
    assert lib.twell_workspace_bytes(older) == lib.twell_workspace_bytes(problem())


@pytest.mark.parametrize("struct_bytes", [0, 4, LEAST_BYTES["problem"] - 4])
def test_a_struct_that_is_too_short(struct_bytes: int) -> None:
    fault = library.load().twell_validate(problem(struct_bytes=struct_bytes))
    assert fault is not None and b"struct_bytes must be sizeof(twell_problem): it is shorter" in fault


def test_a_struct_of_a_newer_caller() -> None:
    lib = library.load()
    size = ctypes.sizeof(library.Problem)
    validate = lib.twell_validate
    for extra in (4, 8, 256 - size):
        known = longer(size + extra, more=0)
        assert validate(ctypes.byref(known.known)) is None
        assert lib.twell_workspace_bytes(ctypes.byref(known.known)) == lib.twell_workspace_bytes(problem())
    fault = validate(ctypes.byref(longer(size + 8, more=3).known))
    assert fault is not None and b"twell_problem has fields that this library does not know" in fault
    fault = validate(ctypes.byref(longer(257, more=0).known))
    assert fault is not None and b"longer than that of any version" in fault


def test_structs_are_made_by_keyword() -> None:
    with pytest.raises(TypeError, match="positional"):
        library.Problem(100, 72)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        library.Tensors(256)  # type: ignore[call-arg]
    made = library.Problem(tokens=3, dtype=1)
    assert (made.struct_bytes, made.dtype, made.weight_dtype) == (ctypes.sizeof(library.Problem), 1, 1)
    assert library.Tensors(x=256).struct_bytes == ctypes.sizeof(library.Tensors)


def tensors(**changes: int | None) -> library.Tensors:
    names = ("x", "w_gate", "b_gate", "w_up", "b_up", "w_down", "b_down", "residual")
    addresses = {name: (1 << 20) * (i + 1) for i, name in enumerate((*names, "y"))}
    return library.Tensors(**{**addresses, **changes})


@pytest.mark.parametrize(
    "changes",
    [{}, {"b_gate": None, "b_up": None, "b_down": None, "residual": None}, {"struct_bytes": LEAST_BYTES["tensors"]}],
    ids=str,
)
def test_validate_tensors_accepts(changes: dict[str, int | None]) -> None:
    assert library.load().twell_validate_tensors(problem(), tensors(**changes)) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": None}, "x is missing"),
        ({"w_gate": None}, "w_gate is missing"),
        ({"w_up": None}, "w_up is missing"),
        ({"w_down": None}, "w_down is missing"),
        ({"y": None}, "y is missing"),
        ({"b_down": 8}, "b_down must be aligned to 16 bytes"),
        ({"residual": 9 << 20}, "residual must not overlap y"),
        ({"residual": (9 << 20) - 16}, "residual must not overlap y"),
        ({"thresholds": 256}, "thresholds are for fatrelu with threshold 0 alone"),
        ({"w_gate_scale": 256}, "w_gate_scale"),
        ({"w_up_scale": 256}, "w_up_scale"),
        ({"w_down_scale": 256}, "w_down_scale"),
        ({"struct_bytes": 8}, "struct_bytes must be sizeof(twell_tensors): it is shorter"),
        ({"struct_bytes": 1000}, "struct_bytes must be sizeof(twell_tensors): it is longer"),
        ({"reserved": 1}, "reserved"),
    ],
    ids=str,
)
def test_validate_tensors_rejects(changes: dict[str, int | None], message: str) -> None:
    lib = library.load()
    fault = lib.twell_validate_tensors(problem(), tensors(**changes))
    assert fault is not None and message in fault.decode()
    status = lib.twell_mlp(problem(), tensors(**changes), 256, 1 << 40, None)
    assert status == (MISALIGNED_ADDRESS if "aligned" in message else INVALID_VALUE)


def test_scales_of_a_caller_that_has_none_are_not_read() -> None:
    older = tensors(struct_bytes=LEAST_BYTES["tensors"], w_gate_scale=256)
    assert library.load().twell_validate_tensors(problem(), older) is None


def test_plain_block_takes_no_up_projection() -> None:
    lib = library.load()
    assert b"w_up and b_up must be null" in lib.twell_validate_tensors(problem(variant=1), tensors())
    assert lib.twell_validate_tensors(problem(variant=1), tensors(w_up=None, b_up=None)) is None


def test_limits() -> None:
    """They are numbers of the table of routes, in which a test looks them up; of a shorter struct a part is written."""
    limits = library.limits()
    assert (limits.one_or_two_tokens, limits.few_tokens, limits.few_tokens_sm90) == (2, 16, 128)
    part = library.Limits(struct_bytes=8, few_tokens=-1)
    library.load().twell_get_limits(part)
    assert (part.one_or_two_tokens, part.few_tokens) == (2, -1)


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


@pytest.mark.sampled(24)
@pytest.mark.parametrize("variant", [0, 1], ids=("gated", "plain"))
@pytest.mark.parametrize("d_ff", [1, 60, 5632, 16384, 200_000])
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
    assert f"#define TWELL_MAX_PACKED_D_FF {library.MAX_PACKED_D_FF}\n" in text
    constants = {name.lower(): int(value) for name, value in re.findall(r"\bTWELL_(\w+) = (\d+)", text)}
    experts = HEADER.with_name("twell_experts.h").read_text()
    assert f"#define TWELL_SCALE_EXPERT {library.SCALE_FORMS['expert']}\n" in experts
    assert f"#define TWELL_SCALE_BLOCK_SIZE {fp8.BLOCK}\n" in text
    for name in ("EXPERTS", "EXPERTS_OF_TOKEN", "EXPERT_PAIRS", "EXPERT_D_FF", "EXPERT_WIDTH"):
        assert f"#define TWELL_MAX_{name} {getattr(library, f'MAX_{name}')}\n" in experts
    forms = {"tensor": "tensor", "row": "neuron", "column": "output", "block": "block"}  # rows are neurons
    scales = {f"scale_{name}": library.SCALE_FORMS[form] for form, name in forms.items()}
    norms = {f"norm_{name}": value for name, value in library.NORMS.items()}
    types = {"bf16": 0, "fp16": 1, "e4m3": library.E4M3}
    assert constants == {**types, **scales, **norms, **library.VARIANTS, **library.ACTIVATIONS}
    for struct, mirror in (
        ("twell_problem", library.Problem),
        ("twell_tensors", library.Tensors),
        ("twell_limits", library.Limits),
        ("twell_device", library.Device),
    ):
        body = re.search(r"typedef struct \{([^}]*)\} " + struct, text)
        assert body is not None
        names = re.findall(r"(\w+);", re.sub(r"//.*", "", body.group(1)))
        assert names == [field[0] for field in mirror._fields_]
