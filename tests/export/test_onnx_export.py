"""The ONNX file: its twell nodes, names, and bytes."""

import logging
from pathlib import Path
from typing import Any

import onnx
import onnx.numpy_helper
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from tests.models import Function, Gated, Plain, Residual, canonical, rewrite
from twellc.base.errors import UserError
from twellc.checks.evaluator import OnnxEvaluator
from twellc.export import onnx_export
from twellc.export.onnx_export import export_onnx, save_onnx
from twellc.passes.attention import MATMUL, rewrite_attention


class Of(nn.Module):
    """A function of x."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def written(program: ExportedProgram, path: Path, names: dict[str, str] | None = None) -> onnx.ModelProto:
    """Export a program with one input and one output, and read the file back."""
    model = export_onnx(program, ["x"], ["y"], names or {})
    assert save_onnx(model, path) == [path]
    return onnx.load(path)


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


def initializers(model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    return {tensor.name: tensor for tensor in model.graph.initializer}


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.int16).numpy().tobytes()


@pytest.mark.parametrize(
    ("kind", "letters", "dtype", "compression"),
    [(Gated, ("g", "u", "d"), torch.bfloat16, 4), (Plain, ("u", "d"), torch.float16, 8)],
)
def test_nodes(
    kind: type[nn.Module], letters: tuple[str, ...], dtype: torch.dtype, compression: int, tmp_path: Path
) -> None:
    """Their attributes, and their operands: x, weights and biases, and the residual."""
    combinations = ["", *letters, "".join(letters)]
    module = nn.Sequential(*(Residual(kind(biases=biases, d_ff=24)) for biases in combinations)).to(dtype)
    program = canonical(module, torch.randn(5, 16).to(dtype))
    model = written(rewrite(program, compression), tmp_path / "m.onnx")
    known = initializers(model)
    nodes = [node for node in model.graph.node if node.domain == "twell"]
    before = "x"
    for node, biases, block in zip(nodes, combinations, module, strict=True):
        assert node.op_type == ("TwellGatedMlp" if kind is Gated else "TwellMlp")
        names = {"g": "gate", "u": "up", "d": "down"}
        assert attributes(node) == {
            "activation": "relu", "threshold": 0.0, "compression": compression, "hot": 0,
            **{f"{names[letter]}_bias": int(letter in biases) for letter in letters},
            "residual": 1, "scales": 0, "thresholds": 0, "norm": "none", "eps": 0.0, "norm_weight": 0, "norm_bias": 0,
            "plugin_version": "twellc-3", "plugin_namespace": "twell",
        }  # fmt: skip
        parts = [getattr(block.ffn, names[letter]) for letter in letters]
        weights = [*(part.weight for part in parts[:-1]), parts[-1].weight.t()]
        pairs = zip(weights, (part.bias for part in parts), strict=True)
        expected = [tensor for pair in pairs for tensor in pair if tensor is not None]
        assert node.input[0] not in known, "x comes first"
        assert node.input[-1] == before, "the residual comes last"
        before = node.output[0]
        for name, tensor in zip(node.input[1:-1], expected, strict=True):
            assert known[name].data_type == (onnx.TensorProto.BFLOAT16 if kind is Gated else onnx.TensorProto.FLOAT16)
            assert tuple(known[name].dims) == tuple(tensor.shape)
            assert known[name].raw_data == bits(tensor)


def test_activation_attributes(tmp_path: Path) -> None:
    squared = Gated(lambda t: torch.relu(t) ** 2)
    above = Gated(lambda t: nn.functional.threshold(t, 0.25, 0.0))
    model = written(rewrite(canonical(nn.Sequential(squared, above))), tmp_path / "m.onnx")
    found = [(attributes(node)["activation"], attributes(node)["threshold"]) for node in model.graph.node]
    assert found == [("relu2", 0.0), ("fatrelu", 0.25)]
    assert [attributes(node)["residual"] for node in model.graph.node] == [0, 0]


def test_no_dense_projection_is_left(tmp_path: Path) -> None:
    model = written(rewrite(canonical(nn.Sequential(Residual(Gated()), Residual(Plain())))), tmp_path / "m.onnx")
    assert sorted(node.op_type for node in model.graph.node) == ["Add"] * 4 + ["TwellGatedMlp", "TwellMlp"]
    weights = [tensor for tensor in model.graph.initializer if len(tensor.dims) == 2]
    assert len(weights) == 5
    assert {entry.domain: entry.version for entry in model.opset_import} == {"": 20, "twell": 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "scale"), [(32, None), (64, None), (16, 0.3), (128, None)])
def test_scale_of_attention(tmp_path: Path, dtype: torch.dtype, width: int, scale: float | None) -> None:
    """Logits carry the scale as float32 has it: torch's own attention also keeps logits in float32."""
    attention = Of(lambda x: F.scaled_dot_product_attention(x, x.flip(-2), x, scale=scale))
    x = torch.randn(2, 3, 24, width).to(dtype)
    path = tmp_path / "m.onnx"
    program, _ = rewrite_attention(canonical(attention, x), (MATMUL,))
    model = written(program, path)
    factors = [onnx.numpy_helper.to_array(t) for t in initializers(model).values() if not t.dims and t.data_type != 7]
    exact = width**-0.5 if scale is None else scale
    assert [float(factor) for factor in factors if factor.dtype != bool] == [pytest.approx(exact, rel=1e-7)]
    (ours,) = OnnxEvaluator(path, model).run({"x": x})
    truth = attention(x.double())
    plain = (attention(x).double() - truth).norm()
    assert (ours.double() - truth).norm() <= 2.5 * plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_tanh_is_computed_in_float32_at_least(tmp_path: Path, dtype: torch.dtype) -> None:
    """A plan in bfloat16 was far off: the logits of a softcap are small values of tanh, times 30."""
    softcap = Of(lambda x: 30 * torch.tanh(x / 30))
    x = torch.randn(3, 5).to(dtype)
    model = written(canonical(softcap, x), tmp_path / "m.onnx")
    wide = [] if dtype in (torch.float32, torch.float64) else ["Cast"]
    assert [node.op_type for node in model.graph.node] == ["Div", *wide, "Tanh", *wide, "Mul"]
    if wide:
        assert next(attributes(node)["to"] for node in model.graph.node if node.op_type == "Cast") == 1  # float32
    (ours,) = OnnxEvaluator(tmp_path / "m.onnx", model).run({"x": x})
    torch.testing.assert_close(ours, softcap(x))


def filled(x: Tensor) -> Tensor:
    """Write to slices of a tensor."""
    y = x.new_zeros(*x.shape[:-1], 12)
    y[..., :5] = x[..., :5].exp()
    y[..., 5:] = x.sin()[..., :7]
    y[:, 1:-2] = y[:, 1:-2] + 1
    y[..., 3:3] = x[..., :0]
    y[..., 2:9:3] = x[..., :3]  # stays as torch writes it
    return y


def test_slices_that_are_written_to(tmp_path: Path) -> None:
    """TensorRT 10.6 refuses ScatterND in bfloat16."""
    x = torch.randn(2, 6, 8).bfloat16()
    model = written(canonical(Of(filled), x), tmp_path / "m.onnx")
    assert [node.op_type for node in model.graph.node].count("ScatterND") == 1
    assert torch.equal(OnnxEvaluator(tmp_path / "m.onnx").run({"x": x})[0], filled(x))


def test_names_and_dimensions(tmp_path: Path) -> None:
    module = Residual(Gated())
    program = canonical(module, torch.randn(4, 6, 16), dynamic=({0: Dim("a"), 1: Dim("b")},))
    (node,) = (n for n in program.graph.find_nodes(op="placeholder") if n.name == "x")
    names = {str(node.meta["val"].shape[0]): "batch", str(node.meta["val"].shape[1]): "sequence"}
    model = written(rewrite(program), tmp_path / "m.onnx", names)
    for value in (*model.graph.input, *model.graph.output):
        dims = [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        assert (value.name, dims) == ("x" if value.name == "x" else "y", ["batch", "sequence", 16])


def test_nodes_are_named_by_module(tmp_path: Path) -> None:
    """TensorRT names layers after nodes, and a profiler of a plan shows these names."""
    program = rewrite(canonical(nn.Sequential(nn.Linear(16, 16), Residual(Gated()))))
    names = [node.name for node in written(program, tmp_path / "m.onnx").graph.node]
    assert len(set(names)) == len(names)
    scopes = [name.rpartition("/")[0] for name in names]
    assert "0/linear" in scopes and "1.ffn.down/gated_mlp" in scopes, names


def test_nothing_of_the_machine_is_in_the_file(tmp_path: Path) -> None:
    model = rewrite(canonical(Residual(Gated())))
    written(model, tmp_path / "m.onnx")
    content = (tmp_path / "m.onnx").read_bytes()
    for trace in (str(Path(__file__).parents[2]), str(tmp_path), "site-packages", "stack_trace", ".py", 'File "'):
        assert trace.encode() not in content


def test_weights_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = rewrite(canonical(Residual(Gated(biases="gud")).bfloat16(), torch.randn(5, 16).bfloat16()))
    whole = written(program, tmp_path / "whole.onnx")
    monkeypatch.setattr(onnx_export, "_LARGEST_SINGLE_FILE", 0)
    path = tmp_path / "apart.onnx"
    files = save_onnx(export_onnx(program, ["x"], ["y"], {}), path)
    assert files == [path, tmp_path / "apart.onnx.data"]
    assert path.stat().st_size < (tmp_path / "whole.onnx").stat().st_size
    bare = onnx.load(path, load_external_data=False)
    outside = [t for t in bare.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    assert {entry.value for t in outside for entry in t.external_data if entry.key == "location"} == {"apart.onnx.data"}
    apart = initializers(onnx.load(path))
    for name, tensor in initializers(whole).items():
        assert onnx.numpy_helper.to_array(apart[name]).tobytes() == onnx.numpy_helper.to_array(tensor).tobytes()


def test_unsupported_operation() -> None:
    inverse = Of(lambda x: torch.linalg.eigvalsh(x @ x.mT))
    with pytest.raises(UserError, match=r"ONNX export: torch\.ops\.aten\._linalg_eigh\.default has no ONNX form"):
        export_onnx(canonical(inverse, torch.randn(4, 4)), ["x"], ["y"], {})


def test_failure_leaves_no_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch logs what it fails to decompose, with a traceback of many lines, and raises too."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    monkeypatch.setattr(log, "handlers", [caplog.handler])

    def fail(*args: Any, **kwargs: Any) -> None:
        log.error("failed while attempting to run meta")
        raise torch.onnx.errors.OnnxExporterError("dtypes differ")

    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(UserError, match=r"ONNX export: the model cannot be written as ONNX \(dtypes differ\)"):
        export_onnx(canonical(Gated()), ["x"], ["y"], {})
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
