"""Which kernels run, as `twell_describe` says it of devices that need not be there: only the last test needs a GPU."""

import ctypes
import functools
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.plugins import cases, test_fp8_blocks
from tests.plugins.calls import BEST, DENSE_BLOCK, GENERIC, GUARD_DECIDES, SM90, Call, Choice, Run, choose
from tests.plugins.cases import Case, make_block
from twellc.base.errors import UserError
from twellc.plugins import library
from twellc.plugins.library import GPUS, Device, Problem

ROOT = Path(__file__).resolve().parents[2]
MOST_MEMORY = 192 << 30  # no weights take more

A100, ADA, H200 = GPUS["A100"], GPUS["L40S"], GPUS["H200"]
MULTIPROCESSORS = (78, 114, 132, 148)


@dataclass(frozen=True)
class Launch:
    """A line of `twell_describe`."""

    row: str  # of the configurations: a name, and numbers
    values: dict[str, str]

    @property
    def kernel(self) -> str:
        return self.row.partition(" ")[0]

    @property
    def grid(self) -> tuple[int, int]:
        x, y = self.values["grid"].split("x")
        return int(x), int(y)


def hopper(multiprocessors: int) -> Device:
    return Device(9, 0, multiprocessors, H200.shared_bytes, H200.l2_bytes)


def problem(
    tokens: int,
    d_model: int,
    d_ff: int,
    d_out: int | None = None,
    *,
    gated: bool = True,
    compression: int = 8,
    hot: int = 0,
) -> Problem:
    return Problem(
        tokens=tokens,
        d_model=d_model,
        d_ff=d_ff,
        d_out=d_out or d_model,
        compression=compression,
        variant=0 if gated else 1,
        hot=hot,
    )


def internal(name: str, *arguments: Any) -> Callable[..., int]:
    """Return a function of the library that gives text, and is in no header; before buffer and size, its arguments."""
    function: Any = getattr(library.load(), name)
    function.restype, function.argtypes = ctypes.c_size_t, [*arguments, ctypes.c_char_p, ctypes.c_size_t]
    return function  # type: ignore[no-any-return]


def launches(
    described: Problem, device: Device, call: Run = Run.ROUTES, kernels: int = BEST
) -> tuple[str, list[Launch]]:
    """Return the route, empty where it is forced, and what is launched; nothing where such kernels cannot run."""
    function = internal(
        "twell_internal_describe", ctypes.POINTER(Problem), ctypes.POINTER(Device), ctypes.POINTER(Choice)
    )
    route, found = "", []
    for line in library.read_text(functools.partial(function, described, device, choose(call, kernels))).splitlines():
        row, bar, rest = line.partition(" | ")
        if bar:
            found.append(Launch(row, dict(value.split("=") for value in rest.split(" "))))
        else:
            route = line.removeprefix("route ")
    return route, found


def configurations() -> list[str]:
    """Return those of blocks; test_linear.py, test_norm.py and test_experts.py have the others."""
    lines = library.read_text(internal("twell_internal_configurations")).splitlines()
    return [line for line in lines if not line.startswith(("linear_", "norm", "experts_"))]


# Where routes begin on 132 multiprocessors, as they were chosen when every limit was a constant: by d_model, d_ff and
# whether there is an up projection.
ONE, FEW, DENSE, MANY = "one_or_two_tokens", "few_tokens", "dense_block", "many_tokens"
ROUTES_OF_132 = {
    (2048, 5632, True): {1: ONE, 3: FEW, 129: DENSE, 1921: MANY},
    (2048, 5632, False): {1: ONE, 3: FEW, 65: DENSE, 1921: MANY},
    (4096, 11008, True): {1: FEW, 65: DENSE, 1281: MANY},
    (4096, 14336, False): {1: FEW, 65: DENSE, 1281: MANY},
    (2048, 8192, True): {1: FEW, 65: DENSE, 1321: MANY},
    (1024, 4096, True): {1: ONE, 3: FEW, 129: DENSE},
    (1024, 4096, False): {1: ONE, 3: FEW, 65: DENSE},
    (1536, 6144, True): {1: ONE, 3: FEW, 129: DENSE, 2347: MANY},
    (1536, 6144, False): {1: ONE, 3: FEW, 65: DENSE},
    (4096, 16384, True): {1: FEW, 17: DENSE, 1281: MANY},
    (4096, 16384, False): {1: FEW, 17: DENSE, 1281: MANY},
    (2048, 6336, True): {1: ONE, 3: FEW, 129: DENSE, 1707: MANY},
    (2048, 6337, True): {1: FEW, 65: DENSE, 1707: MANY},
    (2048, 14784, True): {1: FEW, 65: DENSE, 1281: MANY},
    (2048, 14785, True): {1: FEW, 17: DENSE, 1281: MANY},
    (16392, 8300, True): {1: FEW, 129: MANY},
    (65544, 304, True): {1: MANY},
}


@pytest.mark.parametrize("layer", ROUTES_OF_132, ids=str)
def test_routes_of_132_multiprocessors(layer: tuple[int, int, bool]) -> None:
    d_model, d_ff, gated = layer
    found: dict[int, str] = {}
    for tokens in (*range(1, 2400), 4096, 8192, 131072):
        route, _ = launches(problem(tokens, d_model, d_ff, gated=gated), H200)
        if not found or route != list(found.values())[-1]:
            found[tokens] = route
    assert found == ROUTES_OF_132[layer]


@pytest.mark.parametrize("multiprocessors", MULTIPROCESSORS)
def test_limits_are_rounds_of_the_device(multiprocessors: int) -> None:
    """A layer of one neuron more than a round has another route, whatever the device."""
    device = hopper(multiprocessors)
    for tokens, neurons, below, above in ((1, 48, ONE, FEW), (128, 48, FEW, DENSE), (64, 112, FEW, DENSE)):
        round_ = neurons * multiprocessors
        assert launches(problem(tokens, 2048, round_), device)[0] == below
        assert launches(problem(tokens, 2048, round_ + 1), device)[0] == above


# The first token count at which a layer with hot neurons is split.
SPLIT_FROM = {(2048, 5632, True): 961, (2048, 4392, True): 1232, (4096, 11008, True): 641, (1536, 6144, False): None}


@pytest.mark.parametrize("layer", SPLIT_FROM, ids=str)
def test_calls_are_split_from_half_as_many_tokens(layer: tuple[int, int, bool]) -> None:
    d_model, d_ff, gated = layer
    split = [
        tokens
        for tokens in range(129, 2000)
        if launches(problem(tokens, d_model, d_ff, gated=gated, hot=512), H200)[0] == MANY
    ]
    begin = SPLIT_FROM[layer]
    assert split == ([] if begin is None else list(range(begin, 2000)))
    for tokens in split[:1]:
        kernels = [launch.kernel for launch in launches(problem(tokens, d_model, d_ff, gated=gated, hot=512), H200)[1]]
        assert kernels[:2] == ["hidden_gated_sm90", "dense_down_sm90"], kernels
        assert "gate_sm90" in kernels


def drawn(rng: random.Random, count: int) -> Iterator[Problem]:
    """Draw problems of every size whose weights some GPU could hold."""
    made = 0
    while made < count:
        d_model, d_out = (8 * int(2 ** rng.uniform(0, 16)) for _ in range(2))
        d_ff, tokens = int(2 ** rng.uniform(0, 16)), int(2 ** rng.uniform(0, 29))
        if 2 * d_ff * (2 * d_model + d_out) + 2 * tokens * (d_model + d_ff + d_out) <= MOST_MEMORY:
            made += 1
            yield problem(tokens, d_model, d_ff, d_out, gated=rng.random() < 0.7, compression=rng.choice((1, 2, 4, 8)))


@pytest.mark.parametrize("multiprocessors", MULTIPROCESSORS)
def test_nothing_overflows(multiprocessors: int) -> None:
    device = hopper(multiprocessors)
    rng = random.Random(multiprocessors)
    edges = [tokens + step for tokens in (1, 2, 4, 8, 16, 64, 128, 256, 1280, 1920, 4096, 16384) for step in (0, 1)]
    layers = [(2048, 48 * multiprocessors), (2048, 112 * multiprocessors), *(layer[:2] for layer in ROUTES_OF_132)]
    edge_problems = [
        problem(tokens, *layer, gated=gated) for tokens in edges for layer in layers for gated in (True, False)
    ]
    for each in (*drawn(rng, 4000), *edge_problems):
        route, found = launches(each, device)
        assert found, each.tokens
        for launch in found:
            assert_fits(launch, device, launch.kernel)
            if launch.kernel == "gate_up_sm90" and each.d_model <= 16384 and route == FEW:
                assert launch.grid[0] <= multiprocessors, "one round"
        if each.d_model <= 16384:
            for launch in launches(each, device, DENSE_BLOCK)[1]:
                assert_fits(launch, device, launch.kernel)
        for kernels in (BEST, SM90):
            for launch in launches(each, device, GUARD_DECIDES, kernels)[1]:
                assert_fits(launch, device, launch.kernel)


@pytest.mark.parametrize("device", [A100, ADA, GPUS["RTX-5090"], Device(8, 6, 84, 99 << 10, 6 << 20)])
def test_nothing_overflows_elsewhere(device: Device) -> None:
    for each in drawn(random.Random(0), 4000):
        for launch in launches(each, device)[1]:
            assert "sm90" not in launch.kernel
            assert_fits(launch, device, launch.kernel)


PERSISTENT = ("gate_sm90", "hidden_gated_sm90", "hidden_plain_sm90", "dense_up_sm90", "dense_down_sm90", "hot_sm90")


def assert_fits(launch: Launch, device: Device, kernel: str) -> None:
    x, y = launch.grid
    assert 1 <= x < 2**31 and 1 <= y < 2**16, launch
    assert 1 <= int(launch.values["threads"]) <= 1024, launch
    assert int(launch.values["shared"]) <= device.shared_bytes, launch
    if kernel in PERSISTENT:
        assert x % 2 == 0 and x <= device.multiprocessors, launch  # clusters of two, a CTA each multiprocessor
    if "scratch" in launch.values:
        used, most = launch.values["scratch"].split("/")
        assert int(used) <= int(most), launch


def test_table_of_the_readme() -> None:
    """The kernels' README quotes the table as it is in the code."""
    page = (ROOT / "plugins/kernels/README.md").read_text()
    quoted = re.search(r"<!-- routes -->\n(.*?)<!-- /routes -->", page, re.DOTALL)
    assert quoted is not None and quoted.group(1) == library.read_text(internal("twell_internal_routes"))


PAGES = ("docs/format.md", "docs/profile.md", "docs/when-it-pays.md")


@pytest.mark.parametrize("page", PAGES)
def test_numbers_of_the_pages(page: str) -> None:
    """A comment before a number says which limit it is: <!-- few_tokens + 1 -->17."""
    limits = {name: getattr(library.limits(), name) for name, *_ in library.Limits._fields_}
    quoted = re.findall(r"<!-- (\w+)(?: ([+/]) ([\d /]+?))? -->(\d+)", (ROOT / page).read_text())
    assert len(quoted) >= 2
    for name, operator, operands, number in quoted:
        value = limits[name]
        for operand in map(int, re.findall(r"\d+", operands)):
            value = value + operand if operator == "+" else value // operand
        assert value == int(number), f"{page}: {name}"


def test_limits_are_those_of_the_table() -> None:
    table = library.read_text(internal("twell_internal_routes"))
    at = library.limits()
    for text in (
        f"`one_or_two_tokens` | 8.0 and later | any | 1 to {at.one_or_two_tokens} |",
        f"`few_tokens` | 8.0 and later | any | 1 to {at.few_tokens} |",
        f"`few_tokens` | 8.0 and later | any | 17 to {at.few_tokens_generic} |",
        f"`few_tokens` | 9.0 | any | 17 to {at.few_tokens_sm90} |",
        f"`dense_block` | 9.0 | gated | 17 and more | up to {at.narrow_gated} |",
        f"`dense_block` | 9.0 | plain | 17 and more | up to {at.narrow_plain} |",
        f"`dense_block` | 9.0 | any | 17 to {at.dense_block_tokens_if_split} | up to 16384 | any | any | any |",
        f"`dense_block` | 9.0 | any | 17 to {at.dense_block_tokens} | up to 16384 | any | any | no split |",
        f"| any | up to {at.dense_block_products_if_split // (2048 * 5632)} · 2048 · 5632 |",
        f"| no split | up to {at.dense_block_products // (2048 * 5632)} · 2048 · 5632 |",
    ):
        assert text in table, text


@pytest.mark.parametrize("below", [True, False], ids=("below", "at"))
def test_limits_of_hot_neurons_and_chunks(below: bool) -> None:
    at = library.limits()
    hot = problem(8192, 2048, 5632, hot=at.fewest_hot - 8 * below)
    assert ("hidden_gated_sm90" in library.describe(hot, H200)) != below
    chunks = problem(at.chunk_tokens - below, 4096, 11008)
    assert ("chunk_up" in library.describe(chunks, H200)) != below


def test_describe() -> None:
    text = library.describe(problem(1, 2048, 5632), H200)
    assert text.splitlines()[0] == "route one_or_two_tokens"
    assert "contribute tokens=1 | grid=396x1 threads=256" in text
    assert library.describe(problem(0, 2048, 5632), H200) == ""


def test_text_is_cut_off() -> None:
    function = functools.partial(library.load().twell_describe, problem(1, 2048, 5632), H200)
    whole = library.read_text(function)
    for size in (0, 1, 5, len(whole), len(whole) + 1, len(whole) + 100):
        buffer = ctypes.create_string_buffer(b"#" * (len(whole) + 200))
        assert function(buffer, size) == len(whole) + 1
        kept = max(0, min(size - 1, len(whole)))
        assert buffer.raw[:kept].decode() == whole[:kept]
        assert buffer.raw[size : size + 20] == b"#" * 20
        assert size == 0 or buffer.raw[kept] == 0


@pytest.mark.parametrize(
    ("described", "device", "message"),
    [
        (problem(1, 12, 8), H200, "d_model must be a positive multiple of 8"),
        (problem(1, 16, 8), Device(7, 5, 72, 64 << 10, 6 << 20), "compute capability 8.0"),
        (problem(1, 16, 8), Device(9, 0, 0, 227 << 10, 50 << 20), "compute capability 8.0"),
    ],
)
def test_what_cannot_be_described(described: Problem, device: Device, message: str) -> None:
    with pytest.raises(UserError, match=message):
        library.describe(described, device)


def of(case: Case) -> Problem:
    return Problem(
        tokens=case.rows,
        d_model=case.d_model,
        d_ff=case.d_ff,
        d_out=case.d_out,
        compression=case.compression,
        dtype=library.DTYPES[str(case.dtype).removeprefix("torch.")],
        variant=library.VARIANTS["gated" if case.gated else "plain"],
        activation=library.ACTIVATIONS[case.activation],
        threshold=0.25 if case.activation == "fatrelu" else 0.0,
    )


def all_calls() -> Iterator[tuple[Problem, Run, int]]:
    """What the tests against the reference call: problem, call, kernels."""
    for case in (*cases.kernel_table(), *cases.SMALL_KERNELS):
        yield of(case), Run.ROUTES, BEST
    for case in (*cases.gate_table(), *cases.SMALL_GATE):
        for kernels in (GENERIC, SM90):
            yield of(case), Run.GATE, kernels
    for case in cases.generic_guard_table():
        yield of(case), GUARD_DECIDES, GENERIC
    for case in cases.guard_table():
        yield of(case), GUARD_DECIDES, BEST
        yield of(case), GUARD_DECIDES, SM90
    for case in cases.block_table():
        yield of(case), DENSE_BLOCK, BEST
    for case in cases.chunk_table():
        yield of(case), GUARD_DECIDES, SM90
    for case, _ in cases.hot_table():
        yield of(case), GUARD_DECIDES, SM90
    for scaled, path in test_fp8_blocks.called():
        yield scaled, path, BEST
    yield problem(300, 64, 70_000, 64, gated=False), Run.ROUTES, BEST  # test_autoencoders.py
    yield problem(300, 8192, 8192, 64), GUARD_DECIDES, BEST  # test_direct.test_columns_in_several_launches


def test_every_route_and_configuration_is_reached() -> None:
    """By cases of the tests, on the GPU that they are run on."""
    routes: set[str] = set()
    rows: set[str] = set()
    for described, call, kernels in all_calls():
        route, found = launches(described, H200, call, kernels)
        routes.add(route)
        rows |= {launch.row for launch in found}
        if call == Run.ROUTES:  # generic kernels for few tokens: as if the library had no others
            rows |= {launch.row for launch in launches(described, A100)[1]}
    assert routes - {""} == {ONE, FEW, DENSE, MANY, "wide"}
    assert rows <= set(configurations())
    assert sorted(set(configurations()) - rows) == []


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        Case(rows=1),
        Case(rows=5, d_model=264, d_ff=8192),
        Case(rows=40, d_model=264),
        Case(rows=100, d_model=264),
        Case(rows=30, d_model=264, d_ff=20000),
        Case(rows=500, d_model=264, biases=""),
        Case(rows=2500, d_model=2048, d_ff=5632, d_out=2048, density=0.01, biases=""),
        Case(rows=20000, d_model=2048, d_ff=5632, d_out=2048, density=0.01, biases=""),
        Case(rows=300, d_model=65544, d_ff=300, d_out=24),
    ],
    ids=str,
)
def test_what_is_said_is_what_runs(case: Case, tmp_path: Path) -> None:
    """The launches of a call, by the profiler: as many, of the same sizes, in the same order."""
    call = Call(make_block(case), case.compression)
    call.mlp()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call.mlp()
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kernels = sorted((event for event in events if event.get("cat") == "kernel"), key=lambda event: event["ts"])
    ran = [(tuple(event["args"]["grid"][:2]), event["args"]["block"][0]) for event in kernels]
    said = library.describe(call.problem).splitlines()[1:]
    parsed = [re.search(r"grid=(\d+)x(\d+) threads=(\d+)", line) for line in said]
    assert ran == [((int(m[1]), int(m[2])), int(m[3])) for m in parsed if m is not None]
