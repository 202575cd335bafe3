"""The plugin library in real TensorRT registries, parsers and builders, all on a CPU.

TensorRT-RTX comes with the project. The lean runtimes of TensorRT 10 and 11 are installed from PyPI into pytest's cache
folder; without a package index those tests are skipped, or fail if TWELLC_REQUIRE_LEAN=1.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runtimes import LEAN_VERSIONS
from twellc.plugins.block import OPTIONS
from twellc.plugins.library import library_path

HERE = Path(__file__).resolve().parent
PLUGINS = ("TwellGatedMlp", "TwellMlp")
Report = dict[str, Any]


def talk(runtime: str, request: dict[str, Any], folder: Path | None = None) -> Report:
    """Run registry_child.py and return its report, with what it wrote to stderr under "stderr"."""
    command = [sys.executable, str(HERE / "registry_child.py"), runtime, str(library_path())]
    if folder is not None:
        command += ["--path", str(folder)]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    report: Report = json.loads(done.stdout)
    report["stderr"] = done.stderr
    return report


def loud(result: Report) -> list[str]:
    """Return what TensorRT or the plugin complained about."""
    return [text for severity, text in result["log"] if severity in ("WARNING", "ERROR", "INTERNAL_ERROR")]


# ---- creators and fields ----

Field = list[Any]


def fields(plugin: str, **changes: Field | None) -> list[Field]:
    """Return good ONNX fields of `plugin`, [name, type, value] each; a change replaces a field, None drops it."""
    kinds = {str: "CHAR", float: "FLOAT32", int: "INT32"}
    good: dict[str, Field | None] = {
        **{each.name: [kinds[each.kind], each.default] for each in OPTIONS},
        "activation": ["CHAR", "relu"],
        "up_bias": ["INT32", 0],
        "down_bias": ["INT32", 1],
        "residual": ["INT32", 0],
    }
    if plugin == "TwellGatedMlp":
        good["gate_bias"] = ["INT32", 0]
    return [[name, *value] for name, value in (good | changes).items() if value is not None]


def plan_fields(plugin: str, **changes: Field | None) -> list[Field]:
    """Return good fields as a plan holds them."""
    return fields(plugin, **({"schema": ["INT32", 3], "activation": ["INT32", 0]} | changes))


GATED, PLAIN = PLUGINS
ACCEPTED: dict[str, tuple[str, str, list[Field]]] = {
    **{f"{plugin}-good": (plugin, "BUILD", fields(plugin)) for plugin in PLUGINS},
    **{f"{plugin}-nul": (plugin, "BUILD", fields(plugin, activation=["CHAR", "relu2\0"])) for plugin in PLUGINS},
    **{f"{plugin}-no-threshold": (plugin, "BUILD", fields(plugin, threshold=None)) for plugin in PLUGINS},
    **{f"{plugin}-plan": (plugin, "RUNTIME", plan_fields(plugin)) for plugin in PLUGINS},
    "drelu": (GATED, "BUILD", fields(GATED, activation=["CHAR", "drelu"])),
    **{f"{plugin}-hot": (plugin, "BUILD", fields(plugin, hot=["INT32", 65536])) for plugin in PLUGINS},
    "fatrelu": (PLAIN, "BUILD", fields(PLAIN, activation=["CHAR", "fatrelu"], threshold=["FLOAT32", 0.5])),
}

# name: plugin, phase, fields, what the message says
REFUSED: dict[str, tuple[str, str, list[Field], str]] = {
    "activation-missing": (
        GATED,
        "BUILD",
        fields(GATED, activation=None),
        "field 'activation' is missing; allowed: relu, relu2, fatrelu or drelu",
    ),
    "activation-unknown": (
        GATED,
        "BUILD",
        fields(GATED, activation=["CHAR", "silu\0"]),
        "field 'activation': got 'silu'; allowed: relu, relu2, fatrelu or drelu",
    ),
    "activation-number": (
        GATED,
        "BUILD",
        fields(GATED, activation=["INT32", 0]),
        "field 'activation': got 1 of type int32; allowed: a string, relu",
    ),
    "activation-long": (
        PLAIN,
        "BUILD",
        fields(PLAIN, activation=["CHAR", "x" * 1000]),
        "field 'activation': got '" + "x" * 64 + "...'; allowed: relu, relu2 or fatrelu",
    ),
    "activation-control-characters": (
        PLAIN,
        "BUILD",
        fields(PLAIN, activation=["CHAR", "re\0lu\n"]),
        "field 'activation': got 're?lu?'; allowed",
    ),
    "drelu-without-gate": (
        PLAIN,
        "BUILD",
        fields(PLAIN, activation=["CHAR", "drelu"]),
        "field 'activation': got 'drelu'; allowed: relu, relu2 or fatrelu",
    ),
    "threshold-without-fatrelu": (
        GATED,
        "BUILD",
        fields(GATED, threshold=["FLOAT32", 0.5]),
        "field 'threshold': got 0.5; allowed: 0, because only fatrelu takes a threshold",
    ),
    "threshold-tiny": (
        PLAIN,
        "BUILD",
        fields(PLAIN, threshold=["FLOAT32", 1e-7]),
        "field 'threshold': got 1e-07; allowed: 0, because only fatrelu takes a threshold",
    ),
    "threshold-negative": (
        GATED,
        "BUILD",
        fields(GATED, activation=["CHAR", "fatrelu"], threshold=["FLOAT32", -1.0]),
        "field 'threshold': got -1; allowed: finite and at least 0",
    ),
    "threshold-nan": (
        GATED,
        "BUILD",
        fields(GATED, activation=["CHAR", "fatrelu"], threshold=["FLOAT32", float("nan")]),
        "field 'threshold': got nan; allowed: finite and at least 0",
    ),
    "threshold-integer": (
        GATED,
        "BUILD",
        fields(GATED, threshold=["INT32", 0]),
        "field 'threshold': got 1 of type int32; allowed: one float32, 0",
    ),
    "compression-missing": (
        PLAIN,
        "BUILD",
        fields(PLAIN, compression=None),
        "field 'compression' is missing; allowed: 1, 2, 4 or 8",
    ),
    "compression-three": (
        PLAIN,
        "BUILD",
        fields(PLAIN, compression=["INT32", 3]),
        "field 'compression': got 3; allowed: 1, 2, 4 or 8",
    ),
    "compression-list": (
        PLAIN,
        "BUILD",
        fields(PLAIN, compression=["INT32", [4, 8]]),
        "field 'compression': got 2 of type int32; allowed: one int32, 1, 2, 4 or 8",
    ),
    "compression-int64": (
        GATED,
        "BUILD",
        fields(GATED, compression=["INT64", 8]),
        "field 'compression': got 1 of type int64; allowed: one int32",
    ),
    "hot-missing": (GATED, "BUILD", fields(GATED, hot=None), "field 'hot' is missing; allowed: 0 to 65536"),
    "hot-negative": (PLAIN, "BUILD", fields(PLAIN, hot=["INT32", -1]), "field 'hot': got -1; allowed: 0 to 65536"),
    "hot-beyond-limits": (GATED, "BUILD", fields(GATED, hot=["INT32", 65537]), "field 'hot': got 65537; allowed: 0 to"),
    "hot-float": (PLAIN, "BUILD", fields(PLAIN, hot=["FLOAT32", 8.0]), "field 'hot': got 1 of type float32; allowed:"),
    "gate-bias-missing": (
        GATED,
        "BUILD",
        fields(GATED, gate_bias=None),
        "field 'gate_bias' is missing; allowed: 0 or 1",
    ),
    "up-bias-two": (GATED, "BUILD", fields(GATED, up_bias=["INT32", 2]), "field 'up_bias': got 2; allowed: 0 or 1"),
    "residual-missing": (GATED, "BUILD", fields(GATED, residual=None), "field 'residual' is missing"),
    "residual-other": (
        PLAIN,
        "BUILD",
        fields(PLAIN, residual=["INT32", 2]),
        "field 'residual': got 2; allowed: 0 or 1",
    ),
    "down-bias-missing": (PLAIN, "BUILD", fields(PLAIN, down_bias=None), "field 'down_bias' is missing"),
    "gate-bias-without-gate": (
        PLAIN,
        "BUILD",
        fields(PLAIN, gate_bias=["INT32", 0]),
        "field 'gate_bias' is unknown; allowed: activation, threshold, compression, hot, up_bias, down_bias, residual",
    ),
    "unknown": (GATED, "BUILD", fields(GATED, tile=["INT32", 256]), "field 'tile' is unknown; allowed: activation,"),
    "schema-at-build": (GATED, "BUILD", fields(GATED, schema=["INT32", 1]), "field 'schema' is unknown"),
    "twice": (GATED, "BUILD", [*fields(GATED), ["compression", "INT32", 4]], "field 'compression' is given twice"),
    "none": (PLAIN, "BUILD", [], "field 'activation' is missing"),
    "plan-of-another-schema": (
        GATED,
        "RUNTIME",
        plan_fields(GATED, schema=["INT32", 2], hot=None),
        "field 'schema': got 2; allowed: 3. The plan is damaged, or built for another libtwell_plugins.so",
    ),
    "plan-without-schema": (PLAIN, "RUNTIME", plan_fields(PLAIN, schema=None), "field 'schema' is missing"),
    "plan-activation-range": (
        GATED,
        "RUNTIME",
        plan_fields(GATED, activation=["INT32", 4]),
        "field 'activation': got 4; allowed: 0, 1, 2 or 3",
    ),
    "plan-activation-without-gate": (
        PLAIN,
        "RUNTIME",
        plan_fields(PLAIN, activation=["INT32", 3]),
        "field 'activation': got 3; allowed: 0, 1 or 2",
    ),
    "plan-activation-text": (
        PLAIN,
        "RUNTIME",
        plan_fields(PLAIN, activation=["CHAR", "relu"]),
        "field 'activation': got 4 of type char; allowed: one int32",
    ),
    "plan-without-threshold": (GATED, "RUNTIME", plan_fields(GATED, threshold=None), "field 'threshold' is missing"),
    "plan-compression": (GATED, "RUNTIME", plan_fields(GATED, compression=["INT32", 0]), "field 'compression': got 0"),
    "plan-without-hot": (PLAIN, "RUNTIME", plan_fields(PLAIN, hot=None), "field 'hot' is missing"),
    "plan-hot": (GATED, "RUNTIME", plan_fields(GATED, hot=["INT32", -8]), "field 'hot': got -8"),
    "plan-unknown": (GATED, "RUNTIME", plan_fields(GATED, tile=["INT32", 256]), "field 'tile' is unknown"),
}


@pytest.fixture(scope="module", params=["rtx", "lean10", "lean11"])
def created(request: pytest.FixtureRequest, lean_folder: Any) -> tuple[str, Report]:
    """Load the library three times into one registry, then try every case above."""
    cases = [*ACCEPTED.values(), *(case[:3] for case in REFUSED.values())]
    order = {"loads": 3, "create": [{"plugin": name, "phase": phase, "fields": given} for name, phase, given in cases]}
    if request.param == "rtx":
        report = talk("rtx", order)
    else:
        report = talk("lean", order, lean_folder(request.param))
        assert report["version"] == LEAN_VERSIONS[request.param]
    report["results"] = dict(zip([*ACCEPTED, *REFUSED], report["results"], strict=True))
    return request.param, report


def test_both_creators_are_registered(created: tuple[str, Report]) -> None:
    _, report = created
    found = {creator["name"]: creator for creator in report["creators"]}
    assert sorted(found) == sorted(PLUGINS)
    common = {
        "activation": "CHAR",
        "threshold": "FLOAT32",
        "compression": "INT32",
        "hot": "INT32",
        "up_bias": "INT32",
        "down_bias": "INT32",
        "residual": "INT32",
    }
    assert found[PLAIN]["fields"] == common
    assert found[GATED]["fields"] == common | {"gate_bias": "INT32"}
    assert {(creator["version"], creator["namespace"]) for creator in found.values()} == {("twellc-3", "twell")}


def test_loading_again_does_no_harm(created: tuple[str, Report]) -> None:
    # TensorRT itself refuses a second library with the same creators; the first stays usable, as the cases show.
    assert created[1]["loads"] == [True, False, False]


@pytest.mark.parametrize("name", ACCEPTED)
def test_good_fields_are_accepted(created: tuple[str, Report], name: str) -> None:
    result = created[1]["results"][name]
    assert result["created"]
    assert not loud(result)


@pytest.mark.parametrize("name", REFUSED)
def test_bad_fields_are_refused_with_a_reason(created: tuple[str, Report], name: str) -> None:
    runtime, report = created
    plugin, _, _, text = REFUSED[name]
    result = report["results"][name]
    expected = f"{plugin} 'layer0': {text}"
    assert not result["created"]
    if runtime == "rtx":
        assert len(loud(result)) == 1
        assert loud(result)[0].startswith(expected)
    else:
        # No logger without a Runtime, which needs a GPU: then errors go to stderr.
        assert any(expected in line for line in [*report["stderr"].splitlines(), *(text for _, text in result["log"])])


# ---- hosts that cannot be installed here ----


@pytest.mark.parametrize(
    ("file", "version", "layout", "has_logger"),
    [
        ("libnvinfer.so.10", 101401, 10, True),
        ("libnvinfer.so", 100300, 10, True),
        ("libnvinfer_lean.so.10", 101601, 10, True),
        ("libnvinfer.so.11", 110100, 11, True),
        ("libnvinfer_dispatch.so.11", 110400, 11, True),
        ("libtensorrt_rtx.so.1", 10701, 11, True),
        # Layouts that nobody has seen: calling a logger there could crash.
        ("libnvinfer.so.12", 120000, 11, False),
        ("libtensorrt_rtx.so.1", 10400, 10, False),
        ("libsomething.so", 101401, 10, False),
    ],
)
def test_logger_and_plan_fields_in_every_host(
    tmp_path: Path, file: str, version: int, layout: int, has_logger: bool
) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile the stand-in for TensorRT")
    host = tmp_path / file
    flags = ["-std=c++17", "-shared", "-fPIC", f"-DHOST_VERSION={version}", f"-DHOST_LAYOUT={layout}"]
    subprocess.run([compiler, *flags, "-o", str(host), str(HERE / "fake_host.cpp"), "-ldl"], check=True)
    code = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).run(sys.argv[2].encode()))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(host), str(library_path())],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    messages = (
        [line.removeprefix("log 1 ") for line in lines if line.startswith("log 1 ")]
        if has_logger
        else [line.removeprefix("[twell] error: ") for line in done.stderr.splitlines()]
    )
    assert len(messages) == 2
    assert messages[0] == "TwellGatedMlp 'layer0': the host passed no field collection"
    assert messages[1].startswith("TwellGatedMlp 'layer0': no usable GPU: ")
    assert [line for line in lines if not line.startswith("log ")] == [
        "creators 2",
        "refused 1",
        "field schema 3",
        "field activation 2",
        "field threshold 0.25",
        "field compression 4",
        "field hot 512",
        "field gate_bias 0",
        "field up_bias 1",
        "field down_bias 1",
        "field residual 1",
        "attached 0",
    ]


# ---- ONNX to plan ----


def block(plugin: str, dtype: str = "bf16", **changes: Any) -> dict[str, Any]:
    """Return a build case for registry_child.py."""
    return {"plugin": plugin, "dtype": dtype, "d_model": 64, "d_ff": 300, "d_out": 64} | changes


ALL_BIASES = {GATED: ["gate", "up", "down"], PLAIN: ["up", "down"]}
BUILT: dict[str, dict[str, Any]] = {
    **{
        f"{plugin}-{dtype}-{'biases' if biases else 'no-biases'}": block(plugin, dtype, biases=biases)
        for plugin in PLUGINS
        for dtype in ("bf16", "fp16")
        for biases in ([], ALL_BIASES[plugin])
    },
    **{
        f"{plugin}-residual-{'biases' if biases else 'no-biases'}": block(plugin, biases=biases, residual=True)
        for plugin in PLUGINS
        for biases in ([], ALL_BIASES[plugin])
    },
    "residual-of-one-token": block(PLAIN, leading=[], residual=True, d_out=8),
    "residual-of-rank-five": block(GATED, "fp16", leading=["a", "b", "c", "d"], residual=True),
    "some-biases": block(GATED, biases=["up"]),
    "one-neuron": block(GATED, d_ff=1),
    "whole-tiles": block(PLAIN, d_ff=512),
    "other-width-out": block(PLAIN, d_out=8),
    "one-token": block(GATED, leading=[]),
    "tokens-only": block(GATED, leading=["tokens"]),
    "rank-five": block(PLAIN, leading=["a", "b", "c", "d"]),
    "relu2": block(PLAIN, attributes={"activation": "relu2", "compression": 1}),
    "fatrelu": block(GATED, attributes={"activation": "fatrelu", "threshold": 0.01}),
    "drelu": block(GATED, attributes={"activation": "drelu", "compression": 2}),
    "hot": block(GATED, d_ff=512, attributes={"hot": 256}, residual=True),
    "all-hot": block(PLAIN, attributes={"hot": 300}, biases=["up", "down"]),
}

# name: case, what the message says
NOT_BUILT: dict[str, tuple[dict[str, Any], str]] = {
    "d_model-not-of-8": (block(GATED, d_model=60, d_out=64), "d_model must be a positive multiple of 8 (x [?, ?, 60]"),
    "d_out-not-of-8": (block(PLAIN, d_out=4), "d_out must be a positive multiple of 8"),
    "d_ff-too-large": (block(PLAIN, d_model=8, d_ff=65537, d_out=8), "d_ff must be 1 to 65536"),
    "hot-beyond-d_ff": (block(PLAIN, attributes={"hot": 301}), "field 'hot': got 301; allowed: 0 to d_ff = 300"),
    "down-of-other-d_ff": (
        block(GATED, shapes={"w_down": [256, 64]}),
        "input w_down has shape [256, 64]; expected [d_ff, d_out] = [300, 64]",
    ),
    "up-transposed": (
        block(GATED, shapes={"w_up": [64, 300]}),
        "input w_up has shape [64, 300]; expected [d_ff, d_model] = [300, 64]",
    ),
    "bias-as-matrix": (
        block(PLAIN, biases=["up"], shapes={"b_up": [1, 300]}),
        "input b_up has shape [1, 300]; expected [d_ff] = [300]",
    ),
    "x-of-other-width": (
        block(PLAIN, x_columns=32),
        "input x has shape [?, ?, 32]; its last extent must be d_model = 64, as in w_up [d_ff, d_model]",
    ),
    "bias-not-given": (
        block(GATED, attributes={"gate_bias": 1}),
        "got 4 inputs; expected 5: x, w_gate, b_gate, w_up, w_down",
    ),
    "bias-not-said": (
        block(PLAIN, biases=["down"], attributes={"down_bias": 0}),
        "got 4 inputs; expected 3: x, w_up, w_down",
    ),
    "residual-not-given": (
        block(PLAIN, attributes={"residual": 1}),
        "got 3 inputs; expected 4: x, w_up, w_down, residual",
    ),
    "residual-not-said": (
        block(GATED, residual=True, attributes={"residual": 0}),
        "got 5 inputs; expected 4: x, w_gate, w_up, w_down",
    ),
    "residual-of-other-width": (
        block(PLAIN, residual=["batch", "sequence", 32]),
        "input residual has shape [?, ?, 32]; expected that of y, [..., d_out] = [?, ?, 64]",
    ),
    "residual-of-other-rank": (
        block(PLAIN, residual=["sequence", 64]),
        "input residual has shape [?, 64]; expected that of y, [..., d_out] = [?, ?, 64]",
    ),
    "residual-of-other-type": (
        block(GATED, residual=True, dtypes={"residual": "fp16"}),
        "input residual is fp16; all inputs must be bf16, or all fp16 (x is bf16)",
    ),
    "a weight whose shape varies": (
        block(PLAIN, dynamic={"w_down": [300, "d_out"]}),
        "input w_down has shapes from [300, 8] to [300, 64]; expected a fixed shape",
    ),
    "float32": (block(PLAIN, dtype="fp32"), "input x is float32; all inputs must be bf16, or all fp16"),
    "mixed-types": (
        block(GATED, dtypes={"w_down": "fp16"}),
        "input w_down is fp16; all inputs must be bf16, or all fp16 (x is bf16)",
    ),
    "activation": (block(GATED, attributes={"activation": "silu"}), "field 'activation': got 'silu'; allowed: relu,"),
    "attribute-type": (
        block(GATED, attributes={"compression": 8.0}),
        "field 'compression': got 1 of type float32; allowed: one int32, 1, 2, 4 or 8",
    ),
}


@pytest.fixture(scope="module")
def built() -> dict[str, Report]:
    """Parse and build every case in one TensorRT-RTX process."""
    report = talk("rtx", {"build": [*BUILT.values(), *(case for case, _ in NOT_BUILT.values())]})
    return dict(zip([*BUILT, *NOT_BUILT], report["results"], strict=True))


@pytest.mark.parametrize("name", BUILT)
def test_engine_is_built(built: dict[str, Report], name: str) -> None:
    result, case = built[name], BUILT[name]
    assert result["plan_bytes"] > 0, result["parser"] + loud(result)
    assert result["in_plan"]
    assert not loud(result)
    assert result["dtype"] == {"bf16": "BF16", "fp16": "HALF"}[case["dtype"]]
    assert result["shape"] == [-1] * len(case.get("leading", ["batch", "sequence"])) + [case["d_out"]]


@pytest.mark.parametrize("name", NOT_BUILT)
def test_bad_node_is_refused_with_a_reason(built: dict[str, Report], name: str) -> None:
    result = built[name]
    case, text = NOT_BUILT[name]
    assert result["plan_bytes"] == 0
    assert any(message.startswith(f"{case['plugin']} 'block0': {text}") for message in loud(result)), loud(result)
