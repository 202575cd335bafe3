"""Real plans, built by TensorRT-RTX on a CPU."""

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn
from torch.export import Dim

from tests.models import Gated, Plain, Residual, canonical, rewrite
from twellc.base.errors import UserError
from twellc.export.onnx_export import export_onnx, save_onnx
from twellc.export.plan import Plan, PlanTensor, build_plan
from twellc.export.refused_nodes import COLLECTIVE, TENSORRT_DOMAIN, RefusedNode, cure, describe
from twellc.export.shapes import ShapeProfile, ShapeRange

BF16, FP16 = torch.bfloat16, torch.float16


def profile(*shapes: tuple[int, ...]) -> ShapeProfile:
    return {"x": ShapeRange(*shapes)}


SMALL = profile((1, 16), (4, 16), (64, 16))


def save(module: nn.Module, path: Path, dtype: torch.dtype, shape: tuple[int, ...] = (4, 16)) -> Path:
    """Rewrite a module and write it as ONNX; the first dimension is dynamic if there are two."""
    x = torch.randn(shape).to(dtype)
    dynamic = ({0: Dim("n", min=1, max=4096)},) if len(shape) > 1 else None
    save_onnx(export_onnx(rewrite(canonical(module.to(dtype), x, dynamic=dynamic)), ["x"], ["y"], {}), path)
    return path


def build(onnx_path: Path, *profiles: ShapeProfile, progress: Callable[[str], None] = lambda phase: None) -> Plan:
    return build_plan(
        "tensorrt-rtx", onnx_path, onnx_path.with_suffix(".plan"), list(profiles), [], [], "", False, progress
    )


@pytest.mark.parametrize(
    ("module", "dtype"),
    [
        (Gated(), BF16),
        (Gated(biases="gud", d_ff=300, d_out=24), FP16),
        (Plain(biases="ud"), FP16),
        (Plain(), BF16),
    ],
)
def test_one_block(module: nn.Module, dtype: torch.dtype, tmp_path: Path) -> None:
    path, phases = save(module, tmp_path / "m.onnx", dtype), list[str]()
    plan = build(path, SMALL, progress=phases.append)
    name = {BF16: "bf16", FP16: "half"}[dtype]
    assert plan.inputs == [PlanTensor("x", name, [-1, 16])]
    assert plan.outputs == [PlanTensor("y", name, [-1, 24 if isinstance(module, Gated) and dtype == FP16 else 16])]
    assert len(plan.plugin_layers) == 1
    assert plan.backend.name == "tensorrt-rtx"
    assert (tmp_path / "m.plan").stat().st_size > 1000
    assert phases


def test_dense_model(tmp_path: Path) -> None:
    plan = build(save(nn.Linear(16, 16), tmp_path / "m.onnx", BF16), SMALL)
    assert plan.plugin_layers == []


def test_several_profiles(tmp_path: Path) -> None:
    path = save(Residual(Gated()), tmp_path / "m.onnx", BF16)
    plan = build(path, profile((1, 16), (1, 16), (8, 16)), profile((8, 16), (512, 16), (4096, 16)))
    assert len(plan.plugin_layers) == 1


@pytest.mark.parametrize("shape", [(16,), (2, 3, 16), (2, 1, 3, 16)])
def test_any_rank(shape: tuple[int, ...], tmp_path: Path) -> None:
    path = save(Gated(), tmp_path / "m.onnx", BF16, shape)
    dims = [(size, *shape[1:]) for size in (1, 2, 8)] if len(shape) > 1 else [shape] * 3
    plan = build(path, profile(*dims))
    assert plan.inputs[0].shape == ([-1, *shape[1:]] if len(shape) > 1 else list(shape))
    assert len(plan.plugin_layers) == 1


def test_weights_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twellc.export.onnx_export._LARGEST_SINGLE_FILE", 0)
    path = save(Gated(), tmp_path / "m.onnx", BF16)
    assert (tmp_path / "m.onnx.data").is_file()
    assert len(build(path, SMALL).plugin_layers) == 1


# ---- refusals: messages, never an end of the process ----


@pytest.mark.parametrize(
    "ranges",
    [
        profile((1, 24), (4, 24), (64, 24)),
        profile((8, 16), (4, 16), (64, 16)),
        profile((1, 16, 1), (4, 16, 1), (64, 16, 1)),
    ],
)
def test_refused_shapes(ranges: ShapeProfile, tmp_path: Path) -> None:
    path = save(Gated(), tmp_path / "m.onnx", BF16)
    with pytest.raises(UserError, match=r"^tensorrt-rtx .*(refuse|shape|profile)"):
        build(path, ranges)
    assert not (tmp_path / "m.plan").exists() or (tmp_path / "m.plan").stat().st_size == 0


def edited(path: Path, change: Callable[[onnx.NodeProto], None]) -> Path:
    model = onnx.load(path)
    (node,) = (node for node in model.graph.node if node.domain == "twell")
    change(node)
    onnx.save(model, path)
    return path


def set_attribute(name: str, value: object) -> Callable[[onnx.NodeProto], None]:
    def change(node: onnx.NodeProto) -> None:
        kept = [attribute for attribute in node.attribute if attribute.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])

    return change


def drop_input(node: onnx.NodeProto) -> None:
    del node.input[-1]


BROKEN: dict[str, Callable[[onnx.NodeProto], None]] = {
    "compression": set_attribute("compression", 3),
    "activation": set_attribute("activation", "silu"),
    "biases": set_attribute("gate_bias", 1),
    "version": set_attribute("plugin_version", "99"),
    "inputs": drop_input,
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_node(case: str, tmp_path: Path) -> None:
    path = edited(save(Gated(), tmp_path / "m.onnx", BF16), BROKEN[case])
    with pytest.raises(UserError, match=r"^tensorrt-rtx .* refuses the (model|network)"):
        build(path, SMALL)


def test_float32_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^tensorrt-rtx .* refuses"):
        build(save(Gated(), tmp_path / "m.onnx", torch.float32), SMALL)


def test_unknown_operator(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])
    graph = helper.make_graph([helper.make_node("Whatever", ["x"], ["y"], domain="other")], "g", [value], [output])
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("other", 1)]
    onnx.save(helper.make_model(graph, opset_imports=imports), tmp_path / "m.onnx")
    with pytest.raises(UserError, match=r"the ONNX parser does not know other\.Whatever\. .*--plugin-library"):
        build(tmp_path / "m.onnx")


def test_no_onnx_at_all(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"hello")
    with pytest.raises(UserError, match="refuses the"):
        build(tmp_path / "m.onnx")


def test_a_tensorrt_without_collectives_is_named() -> None:
    node = RefusedNode("linear/all_reduce", COLLECTIVE, TENSORRT_DOMAIN)
    assert describe([node]) == "DistCollective (node linear/all_reduce)"
    assert cure([node]) == "Plans for several GPUs need TensorRT 10.16 or newer, or TensorRT-RTX 1.7."
