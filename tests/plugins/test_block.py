"""The table of a block's tensors and options, and the sources in other languages that spell it again."""

import ctypes
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import captured
from twellc.plugins import library
from twellc.plugins.block import (
    GATED,
    NORM_TENSORS,
    OPTIONS,
    PLAIN,
    SCALES_FLAG,
    TENSORS,
    THRESHOLDS,
    VARIANTS,
    BlockOptions,
    Operands,
    Option,
    Variant,
    WeightOperands,
    call_of,
    compression_of,
    schema_of,
    tensors_of,
)
from twellc.plugins.onnx_node import ATTRIBUTES, node_attributes, read_node
from twellc.plugins.ops import OPS

ROOT = Path(__file__).resolve().parents[2]
TENSORRT = ROOT / "plugins" / "tensorrt"
NORM_FLAGS = {each.flag for each in NORM_TENSORS}
C_TYPES = {str: "int32_t", int: "int32_t", float: "float"}  # an activation is a number there


def test_operands_in_the_order_of_the_op() -> None:
    gated = Operands(residual="r", x="x", w_down="d", b_up="bu", w_up="u", w_gate="g")
    assert gated.variant is GATED and gated.first == ("g", None)
    assert gated.arguments() == ["x", "g", None, "u", "bu", "d", None, "r"]
    assert list(gated.named()) == ["x", "w_gate", "w_up", "b_up", "w_down", "residual"]
    plain = WeightOperands(w_up="u", b_up="bu", w_down="d").of("x")
    assert plain.variant is PLAIN and plain.first == ("u", "bu")
    assert plain.arguments() == ["x", "u", "bu", "d", None, None]
    assert plain.weights == WeightOperands(w_up="u", b_up="bu", w_down="d")
    assert plain.map(len) == Operands(x=1, w_up=1, b_up=2, w_down=1)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=str)
def test_the_schema_takes_the_calls_of_earlier_archives(variant: Variant) -> None:
    """What they hold keeps name, type and place, and whatever came later has a default."""
    first = "Tensor x, Tensor w_gate, Tensor? b_gate, Tensor w_up, Tensor? b_up, Tensor w_down, Tensor? b_down, "
    if variant is PLAIN:
        first = "Tensor x, Tensor w_up, Tensor? b_up, Tensor w_down, Tensor? b_down, "
    first += "Tensor? residual, str activation, float threshold, int compression, int hot"
    held = [re.sub(r"=.*", "", each) for each in re.findall(r"\w+\?? \w+[^,)]*", schema_of(variant).partition("(")[2])]
    assert ", ".join(held).startswith(first)
    arguments = OPS[variant]._schema.arguments
    assert all(each.has_default_value() for each in arguments[len(first.split(", ")) - 1 :])


def test_a_call_is_read_as_it_was_written() -> None:
    for variant in VARIANTS.values():
        operands = Operands(**{each.name: each.name for each in variant.tensors})
        options = BlockOptions(activation="fatrelu", threshold=0.5, compression=2, hot=3, norm="rms", eps=0.25)
        arguments = [*operands.arguments(), *options.arguments()]
        for count in (len(arguments), len(variant.tensors), 1):
            named = dict(zip(variant.arguments, arguments, strict=True))
            rest = {name: value for name, value in named.items() if name not in variant.arguments[:count]}
            assert call_of(variant, arguments[:count], rest) == (operands, options)
        assert call_of(variant, [*operands.arguments(), "relu"], {})[1] == BlockOptions(activation="relu")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "activation": ({"activation": "silu"}, "activation must be one of relu, relu2, fatrelu, got 'silu'"),
    "gated": ({"activation": "drelu"}, "activation must be one of relu, relu2, fatrelu, got 'drelu'"),
    "threshold": ({"threshold": -1.0}, "threshold must be finite and at least 0, got -1.0"),
    "nan": ({"threshold": float("nan")}, "threshold must be finite and at least 0, got nan"),
    "compression": ({"compression": 3}, "compression must be one of 1, 2, 4, 8, got 3"),
    "hot": ({"hot": 41}, "hot must be 0 to d_ff = 40, got 41"),
    "norm": ({"norm": "batch"}, "norm must be one of none, rms, layer, got 'batch'"),
    "eps": ({"eps": float("inf")}, "eps must be finite and at least 0, got inf"),
}


@pytest.mark.parametrize("case", WRONG)
def test_values_out_of_range(case: str) -> None:
    changes, message = WRONG[case]
    with pytest.raises(ValueError, match=re.escape(f"twell: {message}")):
        BlockOptions(**{"activation": "relu", **changes}).check(PLAIN, 40)


def test_a_range_of_numbers_is_checked() -> None:
    option = Option("spare", int, 0, "nothing", least=1, most=7)
    assert [option.fault(value, (), {}) for value in (0, 1, 7, 8)] == ["1 to 7", "", "", "1 to 7"]


def test_the_default_compression() -> None:
    assert compression_of() == compression_of(None, None) == 8
    assert compression_of(None, 4, 2) == 4


def test_nodes_are_read_as_they_are_written() -> None:
    for variant in VARIANTS.values():
        for absent in [*(each.name for each in variant.tensors if each.flag), ""]:
            names = [each.name for each in variant.tensors if each.name != absent]
            names += variant.by_name if absent == "residual" else ()
            operands = Operands(**{name: name for name in names})
            options = BlockOptions(activation="relu2", compression=4, hot=8, norm="layer", eps=0.5)
            attributes = node_attributes(operands, options)
            assert attributes.keys() == {*ATTRIBUTES[variant.node], "plugin_version", "plugin_namespace"}
            stored = {name: value.encode() if isinstance(value, str) else value for name, value in attributes.items()}
            assert read_node(variant.node, list(operands.named().values()), stored) == (operands, options)
            for broken in (["x"], [*operands.named().values(), "more"]):
                with pytest.raises(ValueError, match="not the fields and inputs of one"):
                    read_node(variant.node, broken, stored)
            for name in ATTRIBUTES[variant.node].keys() - {"scales", "thresholds", "norm", "eps", *NORM_FLAGS}:
                rest = {key: value for key, value in stored.items() if key != name}
                with pytest.raises(ValueError, match="not the fields and inputs of one"):
                    read_node(variant.node, list(operands.named().values()), rest)


def without_comments(path: Path) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)


def members(name: str) -> dict[str, str]:
    text = without_comments(ROOT / "plugins" / "include" / "twell" / "twell.h")
    bodies = re.findall(r"struct\s*\w*\s*\{([^{}]*)\}\s*(\w+);", text)
    (body,) = (body for body, struct in bodies if struct == name)
    return {member: kind.strip() for kind, member in re.findall(r"([\w\s*]+?)\b(\w+);", body)}


def test_the_problem_of_the_header_has_every_option() -> None:
    found = members("twell_problem")
    assert {each.name: found.get(each.name) for each in OPTIONS} == {each.name: C_TYPES[each.kind] for each in OPTIONS}


@pytest.mark.parametrize(("struct", "mirror"), [("twell_problem", library.Problem), ("twell_tensors", library.Tensors)])
def test_the_mirrors_of_structures(struct: str, mirror: type[ctypes.Structure]) -> None:
    kinds = {
        "int32_t": ctypes.c_int32,
        "uint32_t": ctypes.c_uint32,
        "int64_t": ctypes.c_int64,
        "float": ctypes.c_float,
        "void const*": ctypes.c_void_p,
        "void*": ctypes.c_void_p,
    }
    assert [(name, kinds.get(kind, kind)) for name, kind in members(struct).items()] == [
        (each[0], each[1]) for each in mirror._fields_
    ]


def test_the_tensors_of_the_header() -> None:
    assert [name for name in members("twell_tensors") if name in {each.name for each in TENSORS}] == [
        each.name for each in TENSORS
    ]


def test_the_first_projection_is_the_gate_of_the_c_api() -> None:
    pointers = tensors_of(Operands(x=1, w_up=2, b_up=3, w_down=4, residual=6), 7)
    assert (pointers.x, pointers.w_gate, pointers.b_gate, pointers.w_up, pointers.b_up) == (1, 2, 3, None, None)
    assert (pointers.w_down, pointers.b_down, pointers.residual, pointers.y) == (4, None, 6, 7)
    pointers = tensors_of(Operands(x=1, w_gate=8, w_up=2, b_up=3, w_down=4), 7)
    assert (pointers.w_gate, pointers.b_gate, pointers.w_up, pointers.b_up) == (8, None, 2, 3)


def constants() -> dict[str, str]:
    """Return the names of a block's fields, by their constants: some plugins share those of options.h."""
    text = "".join(without_comments(TENSORRT / name) for name in ("options.h", "options.cpp"))
    return dict(re.findall(r'constexpr char const\* (k\w+) = "(\w+)";', text))


def function(name: str) -> str:
    """Return the body of a function of options.cpp, without the namespace of shared constants."""
    text = without_comments(TENSORRT / "options.cpp").replace("field::", "")
    start = re.search(rf"^[\w:<> ]*\b{re.escape(name)}\([^;{{]*?\)[^;{{]*\{{", text, flags=re.MULTILINE)
    assert start is not None, name
    return text[start.end() : text.index("\n}", start.end())]


FLAGS = {each.flag: each for each in TENSORS if each.flag}
ALL_FLAGS = {*FLAGS, SCALES_FLAG, THRESHOLDS.flag, *NORM_FLAGS}


def test_what_the_plugins_allow() -> None:
    names = {name: constant for constant, name in constants().items()}
    text, body = without_comments(TENSORRT / "options.cpp"), function("read_fields")
    for each in OPTIONS:
        assert re.search(rf"options\.{each.name} = ", body), each.name
        read = re.search(rf"options\.{each.name} = fields\.integer\({names[each.name]}, (.*)\);", body)
        if each.kind is int:
            assert read is not None, each.name
            if each.choices:
                assert read[1] == "{" + ", ".join(map(str, each.choices)) + "}"
            else:
                most = f"TWELL_MAX_{each.most.upper()}" if isinstance(each.most, str) else f"{each.most}"
                assert read[1] == f"{each.least}, {most}"
    table = text.partition("kActivations[] = {")[2].partition("};")[0]
    named = re.findall(r'\{"(\w+)", (TWELL_\w+)\}', table)
    assert {name: enumerators()[constant] for name, constant in named} == library.ACTIVATIONS
    # The last one is not for plain blocks.
    assert {name for name, _ in named[:-1]} == set(PLAIN.activations)
    counts = re.search(r"TWELL_GATED \? (\d+) : (\d+)", text)
    assert counts is not None and counts.groups() == (str(len(GATED.activations)), str(len(PLAIN.activations)))


def enumerators() -> dict[str, int]:
    text = without_comments(ROOT / "plugins" / "include" / "twell" / "twell.h")
    return {name: int(number) for name, number in re.findall(r"(TWELL_\w+) = (\d+)", text)}


def test_the_numbers_of_the_header() -> None:
    assert {each.name: enumerators()[f"TWELL_{each.name.upper()}"] for each in VARIANTS.values()} == library.VARIANTS
    assert {name: enumerators()[f"TWELL_{name.upper()}"] for name in library.ACTIVATIONS} == library.ACTIVATIONS


def test_the_plugins_write_all_fields_into_a_plan() -> None:
    names = {name: constant for constant, name in constants().items()}
    body = function("plan_fields_of")
    for each in OPTIONS:
        assert f"add({names[each.name]}, options.{each.name})" in body, each.name
    for flag in ALL_FLAGS:
        assert f"add({names[flag]}, " in body, flag


def test_the_options_of_the_plugins() -> None:
    body = without_comments(TENSORRT / "options.h").partition("struct Options {")[2].partition("};")[0]
    found = {name: (kind, default) for kind, name, default in re.findall(r"(\w+) (\w+) = (\S+);", body)}
    for each in OPTIONS:
        kind, default = found[each.name]
        assert kind == C_TYPES[each.kind]
        if each.kind is str:
            assert each.default is None or default.endswith(f"_{str(each.default).upper()}")
        else:
            assert float(default.removesuffix("F")) == each.default


def test_the_plugins_pass_all_options_on() -> None:
    text = without_comments(TENSORRT / "feed_forward_plugin.cpp")
    for each in OPTIONS:
        assert f"problem.{each.name} = options_.{each.name};" in text, each.name
    table = text.partition(" roles_of(")[2].partition("}};")[0]
    roles = re.findall(r'\{(?:gated \? )?"(\w+)"(?: : "(\w+)")?, [\w:]+, (gated)?', table)
    names = {GATED: [name for name, _, _ in roles], PLAIN: [other or name for name, other, gated in roles if not gated]}
    for variant, found in names.items():
        assert found == [*(each.name for each in variant.tensors), *variant.by_name]


OPTION = '    spare: int = _option("nothing", 0, least=0, most=7)\n'
ADDED = """
import warnings
from pathlib import Path
import torch
from torch import nn
import twellc
from twellc.checks.evaluator import OnnxEvaluator, plugin_nodes
from twellc.export.onnx_export import export_onnx, save_onnx
from twellc.passes.pipeline import PassOptions, run_passes
from twellc.plugins.block import GATED, BlockOptions, Operands, problem_of
from twellc.plugins.ops import MLP, run_block

x, up, down = torch.randn(3, 16), torch.randn(24, 16), torch.randn(24, 16)
operands = Operands(x=x, w_up=up, w_down=down)
y = run_block(operands, BlockOptions(activation="relu"))
assert torch.equal(MLP(x, up, None, down, None, None, "relu", 0.0, 8, 0, "none", 0.0, 3), y), "op"
for wrong in (-1, 8):
    try:
        run_block(operands, BlockOptions(activation="relu", spare=wrong))
    except ValueError as error:
        assert f"spare must be 0 to 7, got {wrong}" in str(error)
    else:
        raise AssertionError(wrong)


class Called(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(up), nn.Parameter(down)

    def forward(self, x):
        return torch.ops.twell.mlp(x, self.up, None, self.down, None, None, "relu", 0.0, 8, 0, "none", 0.0, 3)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 24, bias=False), nn.Linear(24, 16, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def written(program):
    save_onnx(export_onnx(program, ["x"], ["y"], {}), Path("m.onnx"))
    evaluator = OnnxEvaluator(Path("m.onnx"))
    import onnx
    (node,) = plugin_nodes(onnx.load("m.onnx"))
    return evaluator, node


evaluator, node = written(torch.export.export(Called(), (x,)))
assert node.options.spare == 3, "ONNX"
assert torch.equal(evaluator.run({"x": x})[0], y) and torch.equal(node.run(x, None), y), "evaluator"
low = torch.export.export(Block().bfloat16().requires_grad_(False), (x.bfloat16(),))
assert written(run_passes(low, PassOptions(torch.bfloat16, "all")).program)[1].options.spare == 0, "passes"
module = nn.Sequential(Block()).eval().requires_grad_(False)
expected = module(x)
twellc.optimize(module)
assert len(twellc.optimized_blocks(module)) == 1 and module._twellc[0].options.spare == 0, "optimize"
torch.testing.assert_close(module(x), expected)
assert problem_of(GATED, BlockOptions(activation="relu", spare=5), "bfloat16", tokens=1, d_model=8, d_ff=8,
                  d_out=8).spare == 5, "C API"
"""


@pytest.mark.slow
def test_an_option_that_is_added_to_the_table_reaches_everything(tmp_path: Path) -> None:
    """In a copy of the package: the table and the mirror of the C structure are all of Python that changes."""
    package = tmp_path / "twellc"
    ignored = shutil.ignore_patterns("lib", "__pycache__", "*.so")
    shutil.copytree(ROOT / "twellc", package, ignore=ignored)
    table, mirror = package / "plugins" / "block.py", package / "plugins" / "library.py"
    last = re.findall(r"^    eps: float = _option\(.*\)\n", table.read_text(), flags=re.MULTILINE)[0]
    table.write_text(table.read_text().replace(last, last + OPTION))
    fields = '(_I32, "hot reserved gate_up_scale down_scale")'
    assert mirror.read_text().count(fields) == 1
    mirror.write_text(mirror.read_text().replace(fields, '(_I32, "hot spare reserved gate_up_scale down_scale")'))
    (tmp_path / "added.py").write_text(ADDED)
    done = captured([sys.executable, "added.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
