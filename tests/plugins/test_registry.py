"""The plugin libraries in real TensorRT registries, parsers and builders, all on a CPU.

TensorRT-RTX comes with the project. The lean runtimes of TensorRT 10 and 11 are installed from PyPI into pytest's cache
folder; without a package index those tests are skipped, or fail if TWELLC_REQUIRE_LEAN=1.
"""

import functools
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.plugin_host import compile_host
from tests.processes import captured, environment
from tests.runtimes import LEAN_VERSIONS
from twellc.plugins.block import NORM_TENSORS, OPTIONS, SCALES_FLAG, TENSORS, THRESHOLDS
from twellc.plugins.library import ATTENTION_NAMES, PLUGIN_VERSION, attention_library_path, library_path

HERE = Path(__file__).resolve().parent
GATED, PLAIN = BLOCKS = ("TwellGatedMlp", "TwellMlp")
LINEAR, EXPERTS = "TwellLinear", "TwellExperts"
ATTENTION, CACHED, APPEND = "TwellAttention", "TwellCachedAttention", "TwellAppendCaches"
Report = dict[str, Any]
Field = list[Any]


def talk(runtime: str, request: dict[str, Any], folder: Path | None = None) -> Report:
    """Run registry_child.py with both libraries, the first one thrice; add what it wrote to standard error."""
    attention = attention_library_path()
    libraries = [str(path) for path in (library_path(), library_path(), library_path(), attention) if path]
    command = [sys.executable, "-P", str(HERE / "registry_child.py"), runtime, *libraries]
    if folder is not None:
        command += ["--path", str(folder)]
    done = subprocess.run(
        command, input=json.dumps(request), capture_output=True, text=True, check=False, timeout=300, env=environment()
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    report: Report = json.loads(done.stdout)
    return report | {"stderr": done.stderr}


def loud(result: Report) -> list[str]:
    """Return what TensorRT or the plugin complained about; not of outputs in int64, of which its parser warns."""
    severities = ("WARNING", "ERROR", "INTERNAL_ERROR")
    return [text for level, text in result["log"] if level in severities and "has Int64 binding" not in text]


def need(plugin: str) -> None:
    if plugin in ATTENTION_NAMES and attention_library_path() is None:
        pytest.skip("the attention library was not built")


FLAGS = ("bias", "norm_weight", "norm_bias", "residual", "scales")  # of a linear layer
FLAGS_OF_EXPERTS = ("gate", "scales", "thresholds")


KINDS = {str: "CHAR", float: "FLOAT32", int: "INT32"}


def fields(plugin: str, phase: str, **changes: Field | None) -> list[Field]:
    """Return good fields of a node or, at RUNTIME, of a plan, [name, type, value] each; None drops one."""
    good: dict[str, Field | None]
    if plugin == ATTENTION:
        good = {"scale": ["FLOAT32", 0.5], "causal": ["INT32", 1], "lengths": ["INT32", 0]}
        plan = {"schema": ["INT32", 1], "workspace_mib": ["INT32", 32]}
    elif plugin == LINEAR:
        good = {"norm": ["CHAR", "layer"], "eps": ["FLOAT32", 1e-5], "splits": ["INT32", 64]}
        good |= {flag: ["INT32", 0] for flag in FLAGS}
        plan = {"schema": ["INT32", 1], "norm": ["INT32", 2]}
    elif plugin == EXPERTS:
        good = {"activation": ["CHAR", "relu2"], "threshold": ["FLOAT32", 0.0]}
        good |= {flag: ["INT32", 0] for flag in FLAGS_OF_EXPERTS}
        plan = {"schema": ["INT32", 1], "activation": ["INT32", 1]}
    else:
        biases = ("gate_bias", "up_bias", "residual") if plugin == GATED else ("up_bias", "residual")
        good = {each.name: [KINDS[each.kind], each.default] for each in OPTIONS}
        good |= {"activation": ["CHAR", "relu"], "down_bias": ["INT32", 1], **{name: ["INT32", 0] for name in biases}}
        plan = {"schema": ["INT32", 3], "activation": ["INT32", 0], "norm": ["INT32", 0]}
    good |= (plan if phase == "RUNTIME" else {}) | changes
    return [[name, *value] for name, value in good.items() if value is not None]


def accepted(plugin: str, phase: str = "BUILD", **changes: Field | None) -> tuple[str, str, list[Field]]:
    return plugin, phase, fields(plugin, phase, **changes)


ACCEPTED = [
    *(accepted(plugin, phase) for plugin in (*BLOCKS, LINEAR, EXPERTS, ATTENTION) for phase in ("BUILD", "RUNTIME")),
    *(accepted(plugin, activation=["CHAR", "relu2\0"]) for plugin in BLOCKS),
    *(accepted(plugin, threshold=None) for plugin in BLOCKS),
    *(accepted(plugin, hot=["INT32", 1 << 20]) for plugin in BLOCKS),
    *(accepted(plugin, phase, scales=["INT32", 1]) for plugin in BLOCKS for phase in ("BUILD", "RUNTIME")),
    *(accepted(plugin, activation=["CHAR", "fatrelu"], thresholds=["INT32", 1]) for plugin in BLOCKS),
    # Nodes and plans of before blocks had norms.
    *(accepted(plugin, phase, norm=None, eps=None) for plugin in BLOCKS for phase in ("BUILD", "RUNTIME")),
    *(accepted(plugin, norm=["CHAR", "layer"], norm_weight=["INT32", 1], norm_bias=["INT32", 1]) for plugin in BLOCKS),
    accepted(GATED, "RUNTIME", norm=["INT32", 1], eps=["FLOAT32", 1e-5], norm_weight=["INT32", 1]),
    accepted(GATED, activation=["CHAR", "drelu"]),
    accepted(PLAIN, activation=["CHAR", "fatrelu"], threshold=["FLOAT32", 0.5]),
    *(accepted(LINEAR, phase, splits=["INT32", [64, 8, 8, 16]]) for phase in ("BUILD", "RUNTIME")),
    accepted(LINEAR, **{flag: ["INT32", 1] for flag in FLAGS}),
    *(accepted(LINEAR, phase, choose=["INT32", 1]) for phase in ("BUILD", "RUNTIME")),
    accepted(EXPERTS, activation=["CHAR", "drelu"], gate=["INT32", 1], scales=["INT32", 1]),
    accepted(EXPERTS, "RUNTIME", activation=["INT32", 2], thresholds=["INT32", 1]),
    accepted(ATTENTION, lengths=["INT32", 1], causal=["INT32", 0], scale=["FLOAT32", -2.0]),
]


def refused(
    plugin: str, field: str, value: Field | None, text: str, phase: str = "BUILD", **others: Field
) -> tuple[str, str, list[Field], str]:
    """Return a case in which one field is wrong, and what is said of it."""
    return plugin, phase, fields(plugin, phase, **{**others, field: value}), f"field '{field}'{text}"


in_plan = functools.partial(refused, phase="RUNTIME")
# A node and a plan may lack these: both were written before blocks had norms.
OPTIONAL = {(plugin, phase, name) for plugin in BLOCKS for phase in ("BUILD", "RUNTIME") for name in ("norm", "eps")}
OPTIONAL |= {(plugin, "BUILD", "threshold") for plugin in (*BLOCKS, EXPERTS)}
SWITCHES = {*FLAGS, *FLAGS_OF_EXPERTS, "gate_bias", "up_bias", "down_bias", "choose", "causal", "lengths"}


def of_each_field() -> Iterator[tuple[str, str, list[Field], str]]:
    """Return cases in which a field is missing, of another type, beyond 0 and 1, unknown, or of another version."""
    for plugin in (*BLOCKS, LINEAR, EXPERTS, ATTENTION):
        for phase in ("BUILD", "RUNTIME"):
            for name, _, value in fields(plugin, phase):
                if (plugin, phase, name) not in OPTIONAL:
                    yield refused(plugin, name, None, " is missing; allowed: ", phase)
                yield refused(plugin, name, ["INT64", 1], ": got 1 of type int64; allowed: ", phase)
                if name in SWITCHES:
                    yield refused(plugin, name, ["INT32", 2], ": got 2; allowed: 0 or 1", phase)
                if name == "schema":
                    own = f"libtwell_{'attention' if plugin == ATTENTION else 'plugins'}.so than this one"
                    text = f": got 9; allowed: {value}. The plan is damaged, or built for another {own}"
                    yield refused(plugin, name, ["INT32", 9], text, phase)
            yield refused(plugin, "more", ["INT32", 1], " is unknown; allowed: ", phase)


ALL_NAMES, PLAIN_NAMES = "allowed: relu, relu2, fatrelu or drelu", "allowed: relu, relu2 or fatrelu"
ZERO = "allowed: 0, because only fatrelu takes a threshold"
FATRELU = ["CHAR", "fatrelu"]
REFUSED = [
    *of_each_field(),
    refused(GATED, "activation", None, f" is missing; {ALL_NAMES}"),
    refused(GATED, "activation", ["CHAR", "silu\0"], f": got 'silu'; {ALL_NAMES}"),
    refused(PLAIN, "activation", ["CHAR", "x" * 1000], f": got '{'x' * 64}...'; {PLAIN_NAMES}"),
    refused(PLAIN, "activation", ["CHAR", "re\0lu\n"], ": got 're?lu?'; allowed"),
    refused(PLAIN, "activation", ["CHAR", "drelu"], f": got 'drelu'; {PLAIN_NAMES}"),
    refused(GATED, "threshold", ["FLOAT32", 0.5], f": got 0.5; {ZERO}"),
    refused(PLAIN, "threshold", ["FLOAT32", 1e-7], f": got 1e-07; {ZERO}"),
    refused(GATED, "threshold", ["FLOAT32", -1.0], ": got -1; allowed: finite and at least 0", activation=FATRELU),
    refused(GATED, "threshold", ["FLOAT32", math.nan], ": got nan; allowed: finite and at least 0", activation=FATRELU),
    refused(PLAIN, "compression", ["INT32", 3], ": got 3; allowed: 1, 2, 4 or 8"),
    refused(PLAIN, "compression", ["INT32", [4, 8]], ": got 2 of type int32; allowed: one int32, 1, 2, 4 or 8"),
    refused(PLAIN, "hot", ["INT32", -1], ": got -1; allowed: 0 to 1048576"),
    refused(GATED, "hot", ["INT32", (1 << 20) + 1], ": got 1048577; allowed: 0 to"),
    refused(GATED, "scales", ["INT32", 2], ": got 2; allowed: 0 or 1"),
    refused(PLAIN, "norm", ["CHAR", "batch"], ": got 'batch'; allowed: none, rms or layer"),
    refused(GATED, "eps", ["FLOAT32", -1.0], ": got -1.000000; allowed: finite and at least 0"),
    refused(GATED, "norm_weight", ["INT32", 1], ": got 1; allowed: 0 without a norm"),
    refused(PLAIN, "norm_bias", ["INT32", 1], ": got 1; allowed: 0 without a layer norm", norm=["CHAR", "rms"]),
    refused(PLAIN, "thresholds", ["INT32", 1], ": got 1; allowed: 0, because only fatrelu with threshold 0 takes"),
    refused(
        PLAIN,
        "gate_bias",
        ["INT32", 0],
        " is unknown; allowed: activation, threshold, compression, hot, up_bias, down_bias, residual, scales, "
        "thresholds, norm, eps, norm_weight, norm_bias",
    ),
    (GATED, "BUILD", [*fields(GATED, "BUILD"), ["compression", "INT32", 4]], "field 'compression' is given twice"),
    (PLAIN, "BUILD", [], "field 'activation' is missing"),
    in_plan(GATED, "activation", ["INT32", 4], ": got 4; allowed: 0, 1, 2 or 3"),
    in_plan(PLAIN, "activation", ["INT32", 3], ": got 3; allowed: 0, 1 or 2"),
    in_plan(GATED, "compression", ["INT32", 0], ": got 0"),
    in_plan(GATED, "hot", ["INT32", -8], ": got -8"),
    refused(LINEAR, "norm", ["CHAR", "group"], ": got 'group'; allowed: none, rms or layer"),
    refused(LINEAR, "eps", ["FLOAT32", -1.0], ": got -1.000000; allowed: finite and at least 0"),
    refused(LINEAR, "splits", ["INT32", [8] * 5], ": got 5 of type int32; allowed: 1 to 4 positive multiples of 8"),
    refused(LINEAR, "splits", ["INT32", [8, -8]], ": got -8; allowed: 1 to 4 positive multiples of 8"),
    refused(LINEAR, "choose", ["INT32", 1], ": got 1; allowed: 0 with several outputs", splits=["INT32", [8, 8]]),
    refused(LINEAR, "norm_weight", ["INT32", 1], ": got 1; allowed: 0 without a norm", norm=["CHAR", "none"]),
    refused(LINEAR, "norm_bias", ["INT32", 1], ": got 1; allowed: 0 without a layer norm", norm=["CHAR", "rms"]),
    refused(LINEAR, "residual", ["INT32", 1], ": got 1; allowed: 0 with several outputs", splits=["INT32", [8, 8]]),
    in_plan(LINEAR, "norm", ["INT32", 3], ": got 3; allowed: 0, 1 or 2"),
    refused(EXPERTS, "activation", ["CHAR", "drelu"], f": got 'drelu'; {PLAIN_NAMES}"),
    refused(EXPERTS, "threshold", ["FLOAT32", 0.5], f": got 0.5; {ZERO}"),
    refused(EXPERTS, "thresholds", ["INT32", 1], ": got 1; allowed: 0, because only fatrelu with threshold 0 takes"),
    refused(ATTENTION, "scale", ["FLOAT32", math.nan], ": got nan; allowed: finite"),
    refused(ATTENTION, "scale", ["FLOAT32", -math.inf], ": got infinity; allowed: finite"),
    refused(ATTENTION, "lengths", ["INT32", [0, 1]], ": got 2 of type int32"),
    in_plan(ATTENTION, "workspace_mib", ["INT32", -1], ": got -1"),
]


@pytest.fixture(scope="module", params=["rtx", *LEAN_VERSIONS])
def created(request: pytest.FixtureRequest, lean_folder: Any) -> tuple[str, Report]:
    """Load the libraries into one registry, then try every case above."""
    cases = [case[:3] for case in (*ACCEPTED, *REFUSED) if case[0] != ATTENTION or attention_library_path()]
    if request.param == "rtx":
        report = talk("rtx", {"create": cases})
    else:
        report = talk("lean", {"create": cases}, lean_folder(request.param))
        assert report["version"] == LEAN_VERSIONS[request.param]
    report["results"] = dict(zip(map(json.dumps, cases), report["results"], strict=True))
    return request.param, report


def test_creators_are_registered(created: tuple[str, Report]) -> None:
    flags = {each.flag: each.gated_only for each in TENSORS if each.flag}
    flags |= dict.fromkeys((SCALES_FLAG, THRESHOLDS.flag, *(each.flag for each in NORM_TENSORS)), False)
    common = {each.name: KINDS[each.kind] for each in OPTIONS} | dict.fromkeys(set(flags) - {"gate_bias"}, "INT32")
    expected: dict[str, dict[str, str]] = {PLAIN: common, GATED: common | {"gate_bias": "INT32"}}
    assert [flag for flag, gated_only in flags.items() if gated_only] == ["gate_bias"]
    integers = dict.fromkeys(("splits", "choose", *FLAGS), "INT32")
    expected |= {LINEAR: {"norm": "CHAR", "eps": "FLOAT32", **integers}}
    options = {"activation": "CHAR", "threshold": "FLOAT32"}
    expected |= {EXPERTS: options | dict.fromkeys(FLAGS_OF_EXPERTS, "INT32")}
    if attention_library_path():
        expected |= {ATTENTION: {"scale": "FLOAT32", "causal": "INT32", "lengths": "INT32"}}
        cached = {"rotated": "INT32", "fp8": "INT32", "key_scale": "FLOAT32", "value_scale": "FLOAT32"}
        expected |= {CACHED: {"scale": "FLOAT32"} | cached, APPEND: cached}
    assert created[1]["creators"] == {name: [PLUGIN_VERSION, given] for name, given in expected.items()}


def test_loading_again_does_no_harm(created: tuple[str, Report]) -> None:
    # TensorRT itself refuses a second library with the same creators; the first stays usable, as the cases show.
    assert created[1]["loads"] == [True, False, False, True][: len(created[1]["loads"])]


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: f"{case[0]}-{case[1]}")
def test_good_fields_are_accepted(created: tuple[str, Report], case: tuple[str, str, list[Field]]) -> None:
    need(case[0])
    result = created[1]["results"][json.dumps(case)]
    assert result["created"]
    assert not loud(result)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: f"{case[0]}-{case[3]}")
def test_bad_fields_are_refused_with_a_reason(created: tuple[str, Report], case: tuple[Any, ...]) -> None:
    need(case[0])
    runtime, report = created
    result = report["results"][json.dumps(case[:3])]
    expected = f"{case[0]} 'layer0': {case[3]}"
    assert not result["created"]
    if runtime == "rtx":
        assert [text.startswith(expected) for text in loud(result)] == [True], loud(result)
    else:
        # No logger without a Runtime, which needs a GPU: then errors go to stderr.
        assert any(expected in line for line in [*report["stderr"].splitlines(), *(text for _, text in result["log"])])


@pytest.mark.parametrize(
    ("file", "version", "layout", "has_logger"),
    [
        ("libnvinfer.so.10", 101401, 10, True),
        ("libnvinfer.so", 100300, 10, True),
        ("libnvinfer_lean.so.10", 101601, 10, True),
        ("libnvinfer.so.11", 110100, 11, True),
        ("libnvinfer_dispatch.so.11", 110400, 11, True),
        ("libtensorrt_rtx.so.1", 10701, 11, True),
        # Unknown layouts: calling a logger there could crash.
        ("libnvinfer.so.12", 120000, 11, False),
        ("libtensorrt_rtx.so.1", 10400, 10, False),
        ("libsomething.so", 101401, 10, False),
    ],
)
def test_logger_and_plan_fields_in_every_host(
    tmp_path: Path, file: str, version: int, layout: int, has_logger: bool
) -> None:
    host = compile_host(tmp_path / file, version, layout)
    code = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).run(sys.argv[2].encode()))"
    done = captured([sys.executable, "-c", code, host, library_path()], env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    prefix, messages = ("log 1 ", lines) if has_logger else ("[twell] error: ", done.stderr.splitlines())
    first, second = (line.removeprefix(prefix) for line in messages if line.startswith(prefix))
    assert first == "TwellGatedMlp 'layer0': the host passed no field collection"
    assert second.startswith("TwellGatedMlp 'layer0': no usable GPU: ")
    assert ", ".join(line for line in lines if not line.startswith("log ")) == (
        "creators 4, refused 1, field schema 3, field activation 2, field threshold 0.25, field compression 4, "
        "field hot 512, field gate_bias 0, field up_bias 1, field down_bias 1, field residual 1, attached 0"
    )


Input = list[Any]  # dtype, extents
Case = dict[str, Any]
LEADING = ("batch", "sequence")


def node(plugin: str, inputs: dict[str, Input | None], outputs: int = 1, **attributes: Any) -> Case:
    """Return a build case for registry_child.py; outputs are like as many first inputs."""
    given = {name: value for name, value in inputs.items() if value is not None}
    first = list(given.values())[:outputs]
    return {"plugin": plugin, "inputs": [[n, *v] for n, v in given.items()], "outputs": first, "attributes": attributes}


def block(
    plugin: str, dtype: str = "bf16", *, biases: str = "", residual: bool | Input = False, **changes: Any
) -> Case:
    """Return a build case of a block; `biases` are some of g(ate), u(p), d(own).

    A change is one of a size, the leading extents or attributes, or replaces an input.
    """
    d_model, d_ff, d_out = (
        changes.pop(name, default) for name, default in (("d_model", 64), ("d_ff", 300), ("d_out", 64))
    )
    leading, attributes = changes.pop("leading", LEADING), changes.pop("attributes", {})
    inputs: dict[str, Input | None] = {"x": [dtype, [*leading, d_model]]}
    said: dict[str, Any] = {"activation": "relu", "threshold": 0.0, "compression": 8, "hot": 0, "scales": 0}
    said |= {"thresholds": 0, "norm": "none", "eps": 0.0, "norm_weight": 0, "norm_bias": 0}
    for name in ("gate", "up", "down") if plugin == GATED else ("up", "down"):
        inputs[f"w_{name}"] = [dtype, [d_ff, d_out if name == "down" else d_model]]
        inputs[f"b_{name}"] = [dtype, [d_out if name == "down" else d_ff]] if name[0] in biases else None
        said[f"{name}_bias"] = int(name[0] in biases)
    inputs["residual"] = (residual if isinstance(residual, list) else [dtype, [*leading, d_out]]) if residual else None
    case = node(plugin, inputs | changes, **said | {"residual": int(bool(residual))} | attributes)
    return case | {"outputs": [[dtype, [*leading, d_out]]]}


EACH = {"activation": "fatrelu", "thresholds": 1}
RMS = {"norm": "rms", "eps": 1e-5, "norm_weight": 1}
LAYER = {"norm": "layer", "eps": 1e-5, "norm_weight": 1, "norm_bias": 1}


def scaled(case: Case, gate_up: list[int], down: list[int], stored: str = "fp8", **changes: Input) -> Case:
    """Return a case of a block with weights of fp8, and scales of these extents behind its inputs."""
    inputs = [[n, stored if n[:2] == "w_" else kind, extents] for n, kind, extents in case["inputs"]]
    names = [name for name, *_ in inputs if name[:2] == "w_"]
    inputs += [[f"{name}_scale", "fp32", down if name == "w_down" else gate_up] for name in names]
    inputs = [[name, *changes.get(name, value)] for name, *value in inputs]
    return case | {"inputs": inputs, "attributes": {**case["attributes"], "scales": 1}}


def linear(dtype: str = "bf16", *, splits: tuple[int, ...] = (64,), norm: str = "rms", **inputs: Any) -> Case:
    """Return a build case of a linear layer; `inputs` are those beside x and the weight, or replace these."""
    attributes, out = inputs.pop("attributes", {}), sum(splits)
    given = {"x": [dtype, [*LEADING, 128]], "weight": [dtype, [out, 128]]} | inputs
    said = {flag: int((flag if flag != "scales" else "weight_scale") in given) for flag in FLAGS} | {"choose": 0}
    case = node(LINEAR, given, norm=norm, eps=1e-5, splits=list(splits), **said | attributes)
    outputs: list[Input] = [[dtype, [*LEADING, width]] for width in splits]
    return case | {"outputs": [["int64", [*LEADING]]] if attributes.get("choose") else outputs}


def experts(dtype: str = "bf16", **changes: Any) -> Case:
    """Return a build case of experts: 4 of widths 64, 24 and 32, 2 a token. A change is that of an input."""
    attributes = {"activation": "relu2", "threshold": 0.0, "gate": int("gate" in changes), "scales": 0}
    attributes |= {"thresholds": 0} | changes.pop("attributes", {})
    inputs: dict[str, Input | None] = {
        "x": [dtype, ["tokens", 64]],
        "up": [dtype, [4, 24, 64]],
        "gate": None,
        "down": [dtype, [4, 24, 32]],
        "ids": ["int64", ["tokens", 2]],
        "weights": ["fp32", ["tokens", 2]],
    }
    return node(EXPERTS, inputs | changes, **attributes) | {"outputs": [[dtype, ["tokens", 32]]]}


def scaled_experts(up: list[int], down: list[int], *, stored: str = "fp8", **changes: Any) -> Case:
    """Return a build case of gated experts with weights of fp8, and scales of these extents."""
    matrices = {name: [stored, [4, 24, 32 if name == "down" else 64]] for name in ("up", "gate", "down")}
    scales = {"up_scale": ["fp32", up], "gate_scale": ["fp32", up], "down_scale": ["fp32", down]}
    return experts(attributes={"scales": 1, "activation": "relu"}, **matrices | scales | changes)


def attention(
    dtype: str = "bf16", *, lengths: bool | Input = False, causal: bool = True, profiles: int = 1, **changes: Any
) -> Case:
    attributes = changes.pop("attributes", {})
    inputs: dict[str, Input | None] = {
        name: [dtype, ["batch", "tokens", heads, 64]] for name, heads in (("q", 4), ("k", 2), ("v", 2))
    }
    inputs["lengths"] = (lengths if isinstance(lengths, list) else ["int32", ["batch"]]) if lengths else None
    said = {"scale": 0.125, "causal": int(causal), "lengths": int(bool(lengths))} | attributes
    return node(ATTENTION, inputs | changes, **said) | {"profiles": profiles}


def cached(dtype: str = "bf16", *, rotated: bool = False, fp8: bool = False, **changes: Any) -> Case:
    attributes = {"scale": 0.125, **of_caches(rotated, fp8), **changes.pop("attributes", {})}
    inputs = {
        "q": [dtype, ["batch", "tokens", 4, 64]],
        **{name: ["fp8" if fp8 else dtype, ["batch", 2, 128, 64]] for name in ("keys", "values")},
        **{name: ["int32", ["batch"]] for name in ("query_counts", "key_counts")},
        **(angles(dtype) if rotated else {}),
    }
    return node(CACHED, inputs | changes, **attributes) | {"profiles": 2}


def appending(dtype: str = "bf16", *, rotated: bool = False, fp8: bool = False, **changes: Any) -> Case:
    attributes = of_caches(rotated, fp8) | changes.pop("attributes", {})
    inputs = {
        **{name: ["fp8" if fp8 else dtype, ["batch", 2, 128, 64]] for name in ("keys", "values")},
        **{name: [dtype, ["batch", "tokens", 2, 64]] for name in ("new_keys", "new_values")},
        **{name: ["int32", ["batch"]] for name in ("starts", "counts")},
        **(angles(dtype) if rotated else {}),
    }
    return node(APPEND, inputs | changes, outputs=2, **attributes) | {"profiles": 2}


def of_caches(rotated: bool, fp8: bool) -> dict[str, Any]:
    return {"rotated": int(rotated), "fp8": int(fp8), "key_scale": 0.5, "value_scale": 0.01}


def angles(dtype: str) -> dict[str, Input]:
    return {name: [dtype, ["batch", "tokens", 64]] for name in ("cosines", "sines")}


ALL_BIASES = {GATED: "gud", PLAIN: "ud"}
RANK_FIVE = ("a", "b", "c", "d")
QKV_256, FIXED = ({n: ["bf16", extents] for n in "qkv"} for extents in (["batch", "tokens", 2, 256], [2, 40, 2, 64]))
KEYS = ["bf16", ["batch", "keys", 2, 64]]
BUILT: dict[str, Case] = {
    **{
        f"{plugin}-{dtype}-{biases}": block(plugin, dtype, biases=biases)
        for plugin in BLOCKS
        for dtype in ("bf16", "fp16")
        for biases in ("", ALL_BIASES[plugin])
    },
    **{
        f"{plugin}-residual-{biases}": block(plugin, biases=biases, residual=True)
        for plugin in BLOCKS
        for biases in ("", ALL_BIASES[plugin])
    },
    "residual-of-one-token": block(PLAIN, leading=(), residual=True, d_out=8),
    "residual-of-rank-five": block(GATED, "fp16", leading=RANK_FIVE, residual=True),
    "some-biases": block(GATED, biases="u"),
    "one-neuron": block(GATED, d_ff=1),
    "whole-tiles": block(PLAIN, d_ff=512),
    "other-width-out": block(PLAIN, d_out=8),
    "one-token": block(GATED, leading=()),
    "tokens-only": block(GATED, leading=("tokens",)),
    "rank-five": block(PLAIN, leading=RANK_FIVE),
    "relu2": block(PLAIN, attributes={"activation": "relu2", "compression": 1}),
    "fatrelu": block(GATED, attributes={"activation": "fatrelu", "threshold": 0.01}),
    "drelu": block(GATED, attributes={"activation": "drelu", "compression": 2}),
    "hot": block(GATED, d_ff=512, attributes={"hot": 256}, residual=True),
    "all-hot": block(PLAIN, attributes={"hot": 300}, biases="ud"),
    "scales-by-neuron": scaled(block(GATED, biases="gud", residual=True), [300, 1], [300, 1]),
    "scales-by-output": scaled(block(PLAIN, "fp16", attributes={"hot": 300}), [300, 1], [1, 64]),
    "scales-of-one-neuron": scaled(block(GATED, d_ff=1), [1, 1], [1, 1]),
    "one-scale": scaled(block(GATED), [], []),
    "scales-of-int8": scaled(block(GATED, biases="u"), [300, 1], [300, 1], stored="int8"),
    "thresholds": block(PLAIN, "fp16", biases="ud", d_ff=300, attributes=EACH, thresholds=["fp32", [300]]),
    "rms": block(GATED, attributes=RMS, residual=True, norm_weight=["bf16", [64]]),
    "layer": block(PLAIN, "fp16", attributes=LAYER, norm_weight=["fp16", [64]], norm_bias=["fp16", [64]]),
    "one-scale-plain": scaled(block(PLAIN, biases="d"), [], [300, 1]),
    "linear": linear(norm_weight=["bf16", [128]]),
    "linear-fp16-splits": linear("fp16", splits=(64, 8, 24), norm="none"),
    "linear-choose": linear(attributes={"choose": 1}),
    "linear-all": linear(
        norm="layer",
        bias=["bf16", [64]],
        norm_weight=["bf16", [128]],
        norm_bias=["bf16", [128]],
        residual=["bf16", [*LEADING, 64]],
    ),
    "linear-fp8": linear(weight=["fp8", [64, 128]], weight_scale=["fp32", [64, 1]]),
    "linear-one-scale": linear("fp16", weight=["int8", [64, 128]], weight_scale=["fp32", []]),
    "experts": experts(),
    "experts-fp16": experts(
        "fp16", gate=["fp16", [4, 24, 64]], ids=["int32", ["tokens", 2]], attributes={"activation": "drelu"}
    ),
    "experts-thresholds": experts(attributes={"activation": "fatrelu", "thresholds": 1}, thresholds=["fp32", [4, 24]]),
    "experts-one-scale": scaled_experts([], []),
    "experts-scale-each": scaled_experts([4, 1, 1], [4, 1, 1], stored="int8"),
    "experts-scales": scaled_experts([4, 24, 1], [4, 1, 32]),
    "cached": cached(),
    "cached-fp16": cached("fp16"),
    "cached-rotated": cached(rotated=True),
    "cached-fp8": cached(fp8=True),
    "cached-fp8-rotated": cached("fp16", rotated=True, fp8=True),
    "append": appending(),
    "append-rotated": appending("fp16", rotated=True),
    "append-fp16": appending("fp16"),
    "append-fp8": appending(fp8=True),
    "append-fp8-rotated": appending("fp16", rotated=True, fp8=True),
    "append-two-widths": appending(
        values=["bf16", ["batch", 2, 128, 32]], new_values=["bf16", ["batch", "tokens", 2, 32]]
    ),
    "attention": attention(),
    "attention-fp16": attention("fp16"),
    "lengths": attention(lengths=True),
    "not-causal": attention("fp16", causal=False),
    "not-causal-lengths": attention(causal=False, lengths=True),
    "other-keys": attention(causal=False, k=KEYS, v=KEYS),
    "width-256": attention(**QKV_256),
    "fixed": attention(**FIXED),
    "profiles": attention(profiles=3, lengths=True),
}


def wrong_shape(name: str, found: str, expected: str) -> str:
    return f"input {name} has shape {found}; expected {expected}"


QKV_60, QKV_264 = ({n: ["bf16", ["batch", "tokens", 2, width]] for n in "qkv"} for width in (60, 264))
OTHER_KEYS = {n: ["bf16", [1, 8 if n == "q" else 9, 2, 64]] for n in "qkv"}
NARROW_CACHES = {n: ["fp8", ["batch", 2, 128, 32]] for n in ("keys", "values")}
SHORT_CACHES = {n: ["bf16", ["batch", 2, 32, 64]] for n in ("keys", "values")}
ONE_TYPE_CACHES = "q, keys and values must all be bf16, or all fp16 (q"
ONE_TYPE, ONE_TYPE_QKV = "all inputs must be bf16, or all fp16 (x", "q, k and v must all be bf16, or all fp16 (q"
OF_KEYS, OF_Y = "[batch, keys, kv_heads, width]", "that of y, [..., d_out] = [?, ?, 64]"
OF_CACHE, OF_ROWS = "[batch, kv_heads, length, width]", "[batch, tokens, kv_heads, width]"
MULTIPLE_HEADS = "heads must be a positive multiple of kv_heads (q [?, ?, 3, 64], k [?, ?, 2, 64])"
# Cases, and what the message says.
NOT_BUILT: list[tuple[Case, str]] = [
    (block(GATED, d_model=60, d_out=64), "d_model must be a positive multiple of 8 (x [?, ?, 60]"),
    (block(PLAIN, d_out=4), "d_out must be a positive multiple of 8"),
    (block(PLAIN, d_model=8, d_ff=(1 << 20) + 1, d_out=8), "d_ff must be 1 to 1048576 (2^20)"),
    (block(GATED, d_model=8, d_ff=65537, d_out=8), "d_ff must be 1 to 65536 in a gated block, and with e4m3 weights"),
    (block(PLAIN, attributes={"hot": 301}), "field 'hot': got 301; allowed: 0 to d_ff = 300"),
    (block(GATED, w_down=["bf16", [256, 64]]), wrong_shape("w_down", "[256, 64]", "[d_ff, d_out] = [300, 64]")),
    (block(GATED, w_up=["bf16", [64, 300]]), wrong_shape("w_up", "[64, 300]", "[d_ff, d_model] = [300, 64]")),
    (
        block(PLAIN, x=["bf16", [*LEADING, 32]]),
        "input x has shape [?, ?, 32]; its last extent must be d_model = 64, as in w_up [d_ff, d_model]",
    ),
    (block(GATED, attributes={"gate_bias": 1}), "got 4 inputs; expected 5: x, w_gate, b_gate, w_up, w_down"),
    (block(PLAIN, biases="d", attributes={"down_bias": 0}), "got 4 inputs; expected 3: x, w_up, w_down"),
    (block(PLAIN, attributes={"residual": 1}), "got 3 inputs; expected 4: x, w_up, w_down, residual"),
    (block(GATED, residual=True, attributes={"residual": 0}), "got 5 inputs; expected 4: x, w_gate, w_up, w_down"),
    (block(PLAIN, residual=["bf16", [*LEADING, 32]]), wrong_shape("residual", "[?, ?, 32]", OF_Y)),
    (
        block(PLAIN, w_down=["bf16", [300, "d_out"]]),
        "input w_down has shapes from [300, 8] to [300, 64]; expected a fixed shape",
    ),
    (block(GATED, w_down=["fp16", [300, 64]]), f"input w_down is fp16; {ONE_TYPE} is bf16)"),
    (block(GATED, attributes={"activation": "silu"}), "field 'activation': got 'silu'; allowed: relu,"),
    (
        block(GATED, attributes={"compression": 8.0}),
        "field 'compression': got 1 of type float32; allowed: one int32, 1, 2, 4 or 8",
    ),
    (
        scaled(block(GATED), [300, 1], [], w_up_scale=["fp32", []]),
        wrong_shape("w_up_scale", "[]", "that of w_gate_scale = [300, 1]"),
    ),
    (
        scaled(block(GATED), [], [1, 300]),
        wrong_shape("w_down_scale", "[1, 300]", "none, [d_ff / 128, d_out / 128], [d_ff, 1] or [1, d_out] = [1, 64]"),
    ),
    (block(PLAIN, attributes=EACH, thresholds=["fp32", [299]]), wrong_shape("thresholds", "[299]", "[d_ff] = [300]")),
    (
        block(PLAIN, attributes=RMS, norm_weight=["bf16", [300]]),
        wrong_shape("norm_weight", "[300]", "[d_model] = [64]"),
    ),
    (block(GATED, attributes={"scales": 1}), "got 4 inputs; expected 7: x, w_gate, w_up, w_down, w_gate_scale, w_up"),
    (
        linear(weight=["bf16", [72, 128]]),
        wrong_shape("weight", "[72, 128]", "[out, in], out the sum of splits = [64, ?]"),
    ),
    (
        linear(weight=["bf16", [64, 64]]),
        "input x has shape [?, ?, 128]; its last extent must be in = 64, as in weight [out, in]",
    ),
    (linear(bias=["bf16", [8]]), wrong_shape("bias", "[8]", "[out] = [64]")),
    (
        linear(residual=["bf16", [*LEADING, 32]]),
        wrong_shape("residual", "[?, ?, 32]", "that of y, [..., out] = [?, ?, 64]"),
    ),
    (linear(splits=(64, 12)), "field 'splits': got 12; allowed: 1 to 4 positive multiples of 8"),
    (linear(attributes={"bias": 1}), "got 2 inputs; expected 3: x, weight, bias"),
    (
        linear(weight=["fp8", [64, 128]], weight_scale=["fp32", [64]]),
        wrong_shape("weight_scale", "[64]", "none, [out / 128, in / 128] or [out, 1] = [64, 1]"),
    ),
    (experts(x=["bf16", ["tokens", 32]]), wrong_shape("x", "[?, 32]", "[tokens, d_model] = [?, 64]")),
    (
        experts(down=["bf16", [4, 32, 24]]),
        wrong_shape("down", "[4, 32, 24]", "[experts, d_ff, d_out] = [4, 24, ?]"),
    ),
    (experts(ids=["int64", ["tokens", "top"]]), "input ids has shape [?, ?]; its last extent, top, must be fixed"),
    (experts(weights=["fp32", ["tokens", 3]]), wrong_shape("weights", "[?, 3]", "[tokens, top] = [?, 2]")),
    (
        experts(x=["bf16", ["tokens", 60]], up=["bf16", [4, 24, 60]]),
        "d_model must be a positive multiple of 8, of 16 with e4m3 weights, at most 65536 (x [?, 60], up [4, 24, 60], "
        "down [4, 24, 32], ids [?, 2])",
    ),
    (
        experts(up=["bf16", [4, "d_ff", 64]]),
        "input up has shapes from [4, 8, 64] to [4, 64, 64]; expected a fixed shape",
    ),
    (
        scaled_experts([4, 1, 1], [], gate_scale=["fp32", []]),
        wrong_shape("gate_scale", "[]", "that of up_scale = [4, 1, 1]"),
    ),
    (
        scaled_experts([], [4, 1, 64]),
        wrong_shape(
            "down_scale", "[4, 1, 64]", "none, [experts, 1, 1], [experts, d_ff, 1] or [experts, 1, d_out] = [4, 1, 32]"
        ),
    ),
    (attention(**QKV_60), "width must be a positive multiple of 8, up to 256 (q [?, ?, 2, 60]"),
    (attention(**QKV_264), "width must be a positive multiple of 8, up to 256 (q [?, ?, 2, 264]"),
    (attention(q=["bf16", ["batch", "tokens", 3, 64]]), MULTIPLE_HEADS),
    (
        attention(v=["bf16", ["batch", "tokens", 4, 64]]),
        wrong_shape("v", "[?, ?, 4, 64]", f"{OF_KEYS} = [?, ?, 2, 64]"),
    ),
    (attention(**OTHER_KEYS), wrong_shape("k", "[1, 9, 2, 64]", f"{OF_KEYS} = [1, 8, ?, 64]")),
    (attention(v=["fp16", ["batch", "tokens", 2, 64]]), f"input v is fp16; {ONE_TYPE_QKV} is bf16)"),
    (attention(lengths=True, attributes={"lengths": 0}), "got 4 inputs; expected 3: q, k, v"),
    (attention(attributes={"lengths": 1}), "got 3 inputs; expected 4: q, k, v, lengths"),
    (attention(attributes={"causal": 3}), "field 'causal': got 3; allowed: 0 or 1"),
    (
        cached(keys=["bf16", ["batch", 128, 2, 32]]),
        wrong_shape("keys", "[?, 128, 2, 32]", f"{OF_CACHE} = [?, ?, ?, 64]"),
    ),
    (
        cached(values=["bf16", ["batch", 2, 96, 64]]),
        wrong_shape("values", "[?, 2, 96, 64]", f"{OF_CACHE} = [?, 2, 128, 64]"),
    ),
    (cached(key_counts=None), "got 4 inputs; expected 5: q, keys, values, query_counts, key_counts"),
    (
        cached(rotated=True, sines=["bf16", ["batch", "tokens", 32]]),
        wrong_shape("sines", "[?, ?, 32]", "[batch, tokens, width] = [?, ?, 64]"),
    ),
    (
        cached(rotated=True, cosines=None),
        "got 6 inputs; expected 7: q, keys, values, query_counts, key_counts, cosines, sines",
    ),
    (
        appending(
            rotated=True,
            **{name: ["bf16", ["batch", 2, 128, 24]] for name in ("keys", "values")},
            **{name: ["bf16", ["batch", "tokens", 2, 24]] for name in ("new_keys", "new_values")},
            **{name: ["bf16", ["batch", "tokens", 24]] for name in ("cosines", "sines")},
        ),
        "keys that are rotated must have a width of a multiple of 16, and values one of 8",
    ),
    (cached(**SHORT_CACHES), "there must not be more tokens than keys where these are cached"),
    (
        appending(new_keys=["bf16", ["batch", "tokens", 3, 64]]),
        wrong_shape("new_keys", "[?, ?, 3, 64]", f"{OF_ROWS} = [?, ?, 2, 64]"),
    ),
    (
        appending(values=["bf16", ["batch", 2, 96, 64]]),
        wrong_shape("values", "[?, 2, 96, 64]", f"{OF_CACHE} = [?, 2, 128, ?]"),
    ),
    (cached(keys=["fp8", ["batch", 2, 128, 64]]), f"input keys is fp8; {ONE_TYPE_CACHES} is bf16)"),
    (
        cached(fp8=True, attributes={"key_scale": 0.0}),
        "field 'key_scale': got 0.000000; allowed: positive and finite",
    ),
    (
        appending(fp8=True, attributes={"value_scale": math.inf}),
        "field 'value_scale': got inf; allowed: positive and finite",
    ),
    (appending(fp8=True, new_values=["fp16", ["batch", "tokens", 2, 64]]), "input new_values is fp16; expected bf16"),
    (
        appending(
            fp8=True,
            values=["fp8", ["batch", 2, 128, 36]],
            new_values=["bf16", ["batch", "tokens", 2, 36]],
        ),
        "caches in FP8 must have widths of multiples of 8, got [?, 2, 128, 64] and [?, 2, 128, 36]",
    ),
    (
        cached(fp8=True, q=["bf16", ["batch", "tokens", 4, 32]], **NARROW_CACHES),
        "caches in FP8 need heads of a width of 64, 80, 96, 128 or 256, got [?, 2, 128, 32]",
    ),
    (appending(counts=None), "got 5 inputs; expected 6: keys, values, new_keys, new_values, starts, counts"),
]


def with_a_wrong_input() -> Iterator[tuple[Case, str]]:
    """Return cases in which an input has another type, or a dimension more."""
    norms = {"norm_weight": ["bf16", [64]], "norm_bias": ["bf16", [64]]}
    whole = block(GATED, biases="gud", residual=True, attributes=LAYER | EACH, thresholds=["fp32", [300]], **norms)
    gated = experts(gate=["bf16", [4, 24, 64]], attributes=EACH, thresholds=["fp32", [4, 24]])
    others = ["scales-by-output", "linear-all", "linear-fp8", "experts-scales", "lengths", "cached-rotated"]
    others += ["cached-fp8-rotated", "append-rotated", "append-fp8"]
    for case in (whole, gated, *(BUILT[name] for name in others)):
        for place, (name, kind, extents) in enumerate(case["inputs"]):
            wrong = "bf16" if kind == "fp32" else "fp32"
            given = {f"is {wrong.replace('fp32', 'float32')}; ": [wrong, extents], "has shape ": [kind, [*extents, 8]]}
            for text, other in given.items():
                inputs = [*case["inputs"][:place], [name, *other], *case["inputs"][place + 1 :]]
                yield case | {"inputs": inputs}, f"input {name} {text}"


NOT_BUILT += with_a_wrong_input()


def build_all(cases: dict[str, Case]) -> dict[str, Report]:
    """Parse and build cases in one TensorRT-RTX process; leave out those of a library that was not built."""
    known = {
        name: case for name, case in cases.items() if case["plugin"] not in ATTENTION_NAMES or attention_library_path()
    }
    return dict(zip(known, talk("rtx", {"build": list(known.values())})["results"], strict=True))


@pytest.fixture(scope="module")
def built() -> dict[str, Report]:
    return build_all(BUILT)


@pytest.fixture(scope="module")
def not_built() -> dict[str, Report]:
    return build_all({json.dumps(case): case for case, _ in NOT_BUILT})


@pytest.mark.parametrize("name", BUILT)
def test_engine_is_built(built: dict[str, Report], name: str) -> None:
    case = BUILT[name]
    need(case["plugin"])
    result = built[name]
    assert result["plan_bytes"] > 0, result["parser"] + loud(result)
    assert result["in_plan"]
    assert not loud(result)
    dtype, extents = case["outputs"][0]
    sizes = [size if isinstance(size, int) else -1 for size in extents]
    assert result["output"] == [{"bf16": "BF16", "fp16": "HALF", "int64": "INT64", "fp8": "FP8"}[dtype], sizes]


@pytest.mark.parametrize(("case", "text"), NOT_BUILT, ids=[f"{case['plugin']}-{text}" for case, text in NOT_BUILT])
def test_bad_node_is_refused_with_a_reason(not_built: dict[str, Report], case: Case, text: str) -> None:
    need(case["plugin"])
    result = not_built[json.dumps(case)]
    assert result["plan_bytes"] == 0
    assert any(message.startswith(f"{case['plugin']} 'node0': {text}") for message in loud(result)), loud(result)
