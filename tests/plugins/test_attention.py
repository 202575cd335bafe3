"""The attention op, and the attention library in real TensorRT registries and builders on a CPU."""

import math
import re
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import helper
from torch import Tensor

from tests.plugins.attention_reference import BF16, CASES, FP16, operands, plain, truth
from tests.processes import captured, environment
from tests.tolerance import assert_as_accurate, assert_same
from twellc.checks.evaluator import OnnxEvaluator, plugin_nodes
from twellc.export.plan import build_plan
from twellc.export.shapes import ShapeRange
from twellc.plugins import library
from twellc.plugins.attention_op import ATTENTION
from twellc.plugins.onnx_node import attention_attributes


def run(tensors: tuple[Tensor, Tensor, Tensor], lengths: list[int] | None, causal: bool, scale: float = 0.3) -> Tensor:
    counts = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    y: Tensor = ATTENTION(*tensors, counts, scale, causal)
    return y


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_meaning(name: str, dtype: torch.dtype) -> None:
    extents, lengths, causal = CASES[name]
    tensors = operands(*extents, dtype=dtype)
    y = run(tensors, lengths, causal)
    assert y.is_contiguous()
    assert_same(y, truth(*tensors, lengths, 0.3, causal).to(dtype))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_low_precision_is_rounded_once(name: str, dtype: torch.dtype) -> None:
    extents, lengths, causal = CASES[name]
    tensors = operands(*extents, dtype=dtype)
    wide = ATTENTION(
        *(t.float() for t in tensors), None if lengths is None else torch.tensor(lengths).int(), 0.3, causal
    )
    y = run(tensors, lengths, causal)
    assert torch.equal(y, wide.to(dtype))
    expected = truth(*tensors, lengths, 0.3, causal)
    assert_as_accurate(y, plain(*tensors, lengths, 0.3, causal).contiguous(), expected)


@pytest.mark.parametrize("name", CASES)
def test_the_yardstick_means_the_same(name: str) -> None:
    # In float64 it is the reference of the GPU tests.
    extents, lengths, causal = CASES[name]
    tensors = operands(*extents, dtype=torch.float64)
    assert_same(plain(*tensors, lengths, 0.3, causal), truth(*tensors, lengths, 0.3, causal))


def test_strided_operands() -> None:
    # As the projections of a model give them: one tensor, cut.
    both = torch.randn(2, 5, 3 * 32)
    q, k, v = (part.unflatten(-1, (2, 16)) for part in both.chunk(3, -1))
    assert_same(run((q, k, v), None, True), truth(q, k, v, None, 0.3, True).float())


@pytest.mark.parametrize("slot", [0, 1, 2])
def test_nan_reaches_the_result(slot: int) -> None:
    tensors = operands(2, 5, 5, 4, 2, 16)
    tensors[slot][1, 0, 0, 0] = math.nan
    y = run(tensors, None, True)
    heads = slice(0, 1 if slot == 0 else 2)
    if slot == 0:
        assert y[1, 0, heads].isnan().all()
    else:
        assert y[1, :, heads].isnan().any(-1).all()
    assert y[0].isfinite().all()
    assert y[1, :, 2:].isfinite().all()


def test_no_tokens() -> None:
    assert run(operands(0, 4, 4, 2, 1, 8), None, True).shape == (0, 4, 2, 8)
    assert run(operands(2, 0, 4, 2, 1, 8), None, False).shape == (2, 0, 2, 8)


@pytest.mark.parametrize(
    ("extents", "message"),
    [
        ((1, 4, 5, 2, 1, 8), "causal attention needs as many keys as tokens, got 5 and 4"),
        ((1, 4, 4, 3, 2, 8), "heads must be a positive multiple of kv_heads, got 4, 3 and 2"),
        ((1, 0, 0, 2, 1, 8), "there must be keys"),
    ],
)
def test_wrong_extents(extents: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(operands(*extents), None, True)


def test_wrong_operands() -> None:
    q, k, v = operands(2, 4, 4, 2, 1, 8)
    with pytest.raises(ValueError, match=r"q must have four dimensions, got \(2, 4, 16\)"):
        ATTENTION(q.flatten(2), k, v, None, 1.0, False)
    with pytest.raises(ValueError, match=r"v must have shape \(2, 4, 1, 8\), got \(2, 3, 1, 8\)"):
        ATTENTION(q, k, v[:, :3], None, 1.0, False)
    with pytest.raises(TypeError, match=r"k must be torch\.float32 like q, got torch\.float16"):
        ATTENTION(q, k.half(), v, None, 1.0, False)
    with pytest.raises(TypeError, match="must be of a floating point type"):
        ATTENTION(q.int(), k.int(), v.int(), None, 1.0, False)
    with pytest.raises(ValueError, match=r"lengths must be int32 of shape \(2,\), got torch\.int64 \(2,\)"):
        ATTENTION(q, k, v, torch.tensor([1, 2]), 1.0, False)
    with pytest.raises(ValueError, match=r"lengths must be int32 of shape \(2,\), got torch\.int32 \(1,\)"):
        ATTENTION(q, k, v, torch.tensor([1]).int(), 1.0, False)


@pytest.mark.parametrize("name", ["gqa-causal", "lengths-causal", "other-keys"])
def test_opcheck(name: str) -> None:
    extents, lengths, causal = CASES[name]
    counts = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    utilities = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(ATTENTION, (*operands(*extents), counts, 0.3, causal), test_utils=utilities)


def test_meta_gives_shape_and_dtype() -> None:
    q, k, v = (t.to("meta") for t in operands(2, 5, 7, 4, 2, 16, FP16))
    y = ATTENTION(q, k, v, None, 0.3, False)
    assert (y.shape, y.dtype, y.device.type) == ((2, 5, 4, 16), FP16, "meta")


def node_model(
    q: Tensor, k: Tensor, lengths: bool, causal: bool, dtype: int = onnx.TensorProto.BFLOAT16, batch: Any = "batch"
) -> onnx.ModelProto:
    names = ["q", "k", "v", *(["lengths"] if lengths else [])]
    shapes = {"q": q.shape, "k": k.shape, "v": k.shape}
    values = [helper.make_tensor_value_info(n, dtype, [batch, "tokens", *s[2:]]) for n, s in shapes.items()]
    if lengths:
        values.append(helper.make_tensor_value_info("lengths", onnx.TensorProto.INT32, [batch]))
    attributes = attention_attributes(0.3, causal, lengths)
    node = helper.make_node("TwellAttention", names, ["y"], name="a0", domain="twell", **attributes)
    y = helper.make_tensor_value_info("y", dtype, [batch, "tokens", *q.shape[2:]])
    graph = helper.make_graph([node], "attention", values, [y])
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("twell", 1)], ir_version=10
    )


@pytest.mark.parametrize("name", ["gqa", "gqa-causal", "lengths-causal"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_evaluator_runs_the_op(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    extents, lengths, causal = CASES[name]
    q, k, v = operands(*extents, dtype=dtype)
    kind = {BF16: onnx.TensorProto.BFLOAT16, FP16: onnx.TensorProto.FLOAT16}[dtype]
    model = node_model(q, k, lengths is not None, causal, kind)
    inputs = {"q": q, "k": k, "v": v}
    if lengths is not None:
        inputs["lengths"] = torch.tensor(lengths, dtype=torch.int32)
    (y,) = OnnxEvaluator(tmp_path / "m.onnx", model).run(inputs)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    expected = ATTENTION(
        *(t.to(device) for t in (q, k, v)), None if lengths is None else inputs["lengths"].to(device), 0.3, causal
    )
    assert torch.equal(y, expected.cpu())
    assert plugin_nodes(model) == []


def attention_library() -> Path:
    path = library.attention_library_path()
    if path is None:
        pytest.skip("the attention library was not built")
    return path


def problem(**changes: float) -> library.AttentionProblem:
    extents = {"batch": 2, "tokens": 16, "keys": 16, "heads": 4, "kv_heads": 2, "width": 64}
    good: dict[str, float] = extents | {"dtype": 0, "causal": 1, "lengths": 0, "scale": 0.125}
    return library.AttentionProblem(**(good | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"batch": 0},
        {"tokens": 0, "causal": 0},
        {"keys": 3, "causal": 0},
        {"width": 256},
        {"width": 8},
        {"heads": 4, "kv_heads": 4},
        {"kv_heads": 1},
        {"dtype": 1},
        {"lengths": 1},
        {"scale": -1.0},
        {"causal": 0, "cached": 1},
        {"causal": 0, "cached": 1, "tokens": 1, "keys": 700},
    ],
    ids=str,
)
def test_validate_accepts(changes: dict[str, float]) -> None:
    attention_library()
    lib = library.load_attention()
    assert lib is not None
    assert lib.twell_attention_validate(problem(**changes)) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": -1}, "batch and tokens"),
        ({"tokens": 2**31, "keys": 2**31}, "batch and tokens"),
        ({"keys": 0, "causal": 0}, "keys must be"),
        ({"keys": 17}, "tokens and keys must be equal"),
        ({"kv_heads": 3}, "heads must be a positive multiple"),
        ({"kv_heads": 0}, "heads must be a positive multiple"),
        ({"heads": 0}, "heads must be a positive multiple"),
        ({"width": 12}, "width must be a positive multiple of 8"),
        ({"width": 0}, "width must be a positive multiple of 8"),
        ({"width": 264}, "up to 256"),
        ({"dtype": 2}, "dtype"),
        ({"causal": 2}, "causal and lengths"),
        ({"lengths": -1}, "causal and lengths"),
        ({"causal": 0, "cached": 2}, "cached must be 0 or 1"),
        ({"cached": 1}, "causal and lengths must be 0 where keys and values are cached"),
        ({"causal": 0, "cached": 1, "lengths": 1}, "causal and lengths must be 0 where keys and values are cached"),
        ({"causal": 0, "cached": 1, "keys": 15}, "must not be more tokens than keys"),
        ({"fp8": 1, "key_scale": 1.0, "value_scale": 1.0}, "fp8 must be 0 or 1"),
        ({"causal": 0, "cached": 1, "fp8": 1, "key_scale": 1.0}, "with positive, finite scales"),
        ({"scale": math.nan}, "scale must be finite"),
        ({"scale": math.inf}, "scale must be finite"),
    ],
    ids=str,
)
def test_validate_refuses(changes: dict[str, float], message: str) -> None:
    attention_library()
    lib = library.load_attention()
    assert lib is not None
    assert message in lib.twell_attention_validate(problem(**changes)).decode()


CREATE = """
import ctypes, sys
from twellc.plugins import library
lib = library.load_attention()
problem = library.AttentionProblem(2, 16, 16, 4, 2, 64, 0, 1, 0, 0.125)
message = ctypes.create_string_buffer(1000)
assert not lib.twell_attention_create(problem, message, 1000)
print(message.value.decode())
"""


def create_without_cudnn(code: str, path: str) -> str:
    """Run a program whose only cuDNN is the one that $TWELLC_CUDNN names; return what it prints."""
    return captured([sys.executable, "-P", "-c", code], env=environment(TWELLC_CUDNN=path), check=True).stdout.strip()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "/nowhere/libcudnn.so.9",
            r"cannot load cuDNN 9 \(.*/nowhere/libcudnn\.so\.9.*\). Install it, such as by "
            r"`pip install nvidia-cudnn-cu13` for Python, or set TWELLC_CUDNN to the path of libcudnn\.so\.9",
        ),
        ("libc.so.6", r"libc\.so\.6 is no cuDNN 9: it has no function cudnnGetVersion"),
    ],
)
def test_without_cudnn_there_is_one_message(path: str, message: str) -> None:
    attention_library()
    assert re.fullmatch(message, create_without_cudnn(CREATE, path))


def test_a_message_is_cut_to_fit() -> None:
    attention_library()
    assert create_without_cudnn(CREATE.replace("1000)", "12)"), "/nowhere/libcudnn.so.9") == "cannot load"


def test_registering_brings_the_cudnn_of_this_python() -> None:
    attention_library()
    pytest.importorskip("tensorrt_rtx_bindings")
    if next(iter(Path(torch.__file__).parents[1].glob("nvidia/cudnn*/lib/libcudnn.so.9")), None) is None:
        pytest.skip("no wheel of cuDNN is installed")
    code = (
        "import ctypes, os, sys, tensorrt_rtx_bindings, twellc.plugins; twellc.plugins.register()\n"
        "ctypes.CDLL('libcudnn.so.9', os.RTLD_NOLOAD | os.RTLD_NOW); print('torch' in sys.modules)"
    )
    done = captured([sys.executable, "-P", "-c", code])
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


@pytest.mark.parametrize("swapped", [False, True])
def test_both_libraries_can_be_preloaded(swapped: bool) -> None:
    # A program's call reaches the hooks of the first library only.
    pytest.importorskip("tensorrt_rtx_bindings")
    paths = [str(library.library_path()), str(attention_library())]
    code = (
        "import tensorrt_rtx_bindings as trt; from twellc.plugins import library\n"
        "names = *library.PLUGIN_NAMES, library.ATTENTION_NAME\n"
        "get = trt.get_plugin_registry().get_creator\n"
        "print([name for name in names if get(name, library.PLUGIN_VERSION, 'twell') is None])"
    )
    settings = environment(LD_PRELOAD=":".join(reversed(paths) if swapped else paths))
    done = captured([sys.executable, "-P", "-c", code], env=settings)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_plan_through_the_compiler(tmp_path: Path) -> None:
    attention_library()
    pytest.importorskip("tensorrt_rtx_bindings")
    q, k, _ = operands(1, 4, 4, 4, 2, 64)
    path = tmp_path / "m.onnx"
    onnx.save(node_model(q, k, lengths=True, causal=True), path)
    shapes = {name: [(b, t, heads, 64) for b, t in ((1, 1), (1, 16), (4, 64))] for name, heads in (("q", 4), ("k", 2))}
    profile = {
        "q": ShapeRange(*shapes["q"]),
        "k": ShapeRange(*shapes["k"]),
        "v": ShapeRange(*shapes["k"]),
        "lengths": ShapeRange((1,), (1,), (4,)),
    }
    plan = build_plan("tensorrt-rtx", path, tmp_path / "m.plan", [profile], [], [], "", False, lambda phase: None)
    assert [each.name for each in plan.inputs] == ["q", "k", "v", "lengths"]
    assert b"TwellAttention" in (tmp_path / "m.plan").read_bytes()
