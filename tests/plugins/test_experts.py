"""`torch.ops.twell.experts`: its meaning on a CPU, its node, its kernels on a GPU, against float64."""

import ctypes
import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.plugins import plugin_host
from tests.plugins.plugin_host import host
from twellc.checks.evaluator import OnnxEvaluator
from twellc.export.onnx_export import export_onnx, save_onnx
from twellc.plugins import library
from twellc.plugins.experts_op import EXPERTS
from twellc.plugins.onnx_node import experts_attributes, read_experts

__all__ = ["host"]

E4M3 = torch.float8_e4m3fn


@dataclass
class Drawn:
    """A call of the op. `gate_up` holds gate and up of gated experts, and up of others."""

    x: Tensor
    gate_up: Tensor
    down: Tensor
    ids: Tensor
    weights: Tensor
    activation: str = "relu2"
    gated: bool = False
    threshold: float = 0.0
    thresholds: Tensor | None = None
    scales: tuple[Tensor, Tensor] | None = None  # of gate_up and down

    @property
    def matrices(self) -> tuple[Tensor, Tensor | None]:
        """Up and gate, views of gate_up."""
        d_ff = self.down.shape[1]
        return (self.gate_up[:, d_ff:], self.gate_up[:, :d_ff]) if self.gated else (self.gate_up, None)

    def scale_of(self, matrix: int) -> Tensor | None:
        """That of gate (0), up (1) or down (2)."""
        if self.scales is None:
            return None
        scale, d_ff = self.scales[matrix // 2], self.down.shape[1]
        if matrix < 2 and self.gated and scale.dim() and scale.shape[1] > 1:
            return scale[:, d_ff:].contiguous() if matrix else scale[:, :d_ff].contiguous()
        return scale

    def on_gpu(self) -> "Drawn":
        """Return the same call on the GPU."""
        moved: dict[str, Any] = {name: value.cuda() for name, value in vars(self).items() if isinstance(value, Tensor)}
        if self.scales is not None:
            moved["scales"] = tuple(each.cuda() for each in self.scales)
        return replace(self, **moved)

    def run(self) -> Tensor:
        """Call the op."""
        up, gate = self.matrices
        result: Tensor = EXPERTS(
            self.x,
            up,
            gate,
            self.down,
            self.ids,
            self.weights,
            self.activation,
            self.threshold,
            up_scale=self.scale_of(1),
            gate_scale=self.scale_of(0) if self.gated else None,
            down_scale=self.scale_of(2),
            thresholds=self.thresholds,
        )
        return result

    def oracle(self) -> Tensor:
        """The formula, token by token, in float64."""
        up, gate = self.matrices
        y = torch.zeros(self.x.shape[0], self.down.shape[2], dtype=torch.float64)

        def dequantized(matrix: Tensor, which: int, expert: int) -> Tensor:
            scale = self.scale_of(which)
            one = matrix[expert].double()
            return one if scale is None else one * (scale[expert] if scale.dim() else scale).double()

        for token, experts in enumerate(self.ids.tolist()):
            row = self.x[token].double()
            for place, expert in enumerate(experts):
                if not 0 <= expert < self.down.shape[0]:
                    continue
                u = dequantized(up, 1, expert) @ row
                z = (u if gate is None else dequantized(gate, 0, expert) @ row).to(self.x.dtype)
                cut = self.threshold if self.thresholds is None else self.thresholds[expert].clamp_min(0)
                g = torch.where(z <= cut, torch.zeros_like(z), z)
                h = (g * g if self.activation == "relu2" else g).double()
                if gate is not None:
                    h = h * (u.relu() if self.activation == "drelu" else u)
                y[token] += self.weights[token, place].double() * (h @ dequantized(self.down, 2, expert))
        return y


def draw(
    tokens: int,
    experts: int,
    top: int,
    widths: tuple[int, int, int] = (16, 24, 32),
    dtype: torch.dtype = torch.float64,
    activation: str = "relu2",
    *,
    gated: bool = False,
    scale: str | None = None,
    seed: int = 0,
) -> Drawn:
    """Draw a call. Some ids are out of range, and some experts are there twice in a token."""
    generator = torch.Generator().manual_seed(seed)
    d_model, d_ff, d_out = widths
    x = torch.randn(tokens, d_model, generator=generator).to(dtype)
    rows = 2 * d_ff if gated else d_ff
    gate_up = torch.randn(experts, rows, d_model, generator=generator) * d_model**-0.5
    down = torch.randn(experts, d_ff, d_out, generator=generator) * d_ff**-0.5
    ids = torch.randint(-1, experts + 1, (tokens, top), generator=generator)
    weights = torch.rand(tokens, top, generator=generator)
    scales = None
    if scale is not None:
        shapes = {
            "tensor": ((), ()),
            "expert": ((experts, 1, 1), (experts, 1, 1)),
            "row": ((experts, rows, 1), (experts, d_ff, 1)),
            "column": ((experts, rows, 1), (experts, 1, d_out)),
        }[scale]
        first, second = (torch.rand(shape, generator=generator) + 0.5 for shape in shapes)
        scales = (first, second)
    weight_dtype = dtype if scale is None else E4M3
    return Drawn(
        x, gate_up.to(weight_dtype), down.to(weight_dtype), ids, weights, activation, gated=gated, scales=scales
    )


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_cpu_is_the_formula(data: st.DataObject) -> None:
    gated = data.draw(st.booleans())
    activation = data.draw(st.sampled_from(("relu", "relu2", "fatrelu", *(("drelu",) if gated else ()))))
    call = draw(
        tokens=data.draw(st.integers(0, 6)),
        experts=data.draw(st.integers(1, 5)),
        top=data.draw(st.integers(1, 7)),
        widths=(data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))),
        activation=activation,
        gated=gated,
        scale=data.draw(st.sampled_from((None, "tensor", "expert", "row", "column"))),
        seed=data.draw(st.integers(0, 1000)),
    )
    if activation == "fatrelu":
        if data.draw(st.booleans()):
            call.threshold = 0.4
        else:
            call.thresholds = torch.randn(call.down.shape[:2])
    torch.testing.assert_close(call.run(), call.oracle(), rtol=1e-12, atol=1e-12)


def test_sixteen_bits_are_rounded_once() -> None:
    call = draw(9, 4, 3, dtype=torch.bfloat16, gated=True, activation="relu")
    torch.testing.assert_close(call.run(), call.oracle().bfloat16(), rtol=1e-2, atol=1e-5)


def test_what_takes_no_part_is_not_read() -> None:
    call = draw(2, 3, 2)
    call.ids = torch.tensor([[0, 3], [-1, 3]])
    call.weights[:, 1] = torch.nan
    y = call.run()
    assert not y.isnan().any()
    assert not y[1].any()


def test_nan_of_x_reaches_its_row_alone() -> None:
    call = draw(4, 3, 2)
    call.ids.fill_(1)
    call.x[2, 0] = torch.nan
    nan = call.run().isnan()
    assert nan[2].all()
    assert not nan[[0, 1, 3]].any()


def test_shapes_are_inferred() -> None:
    call = draw(5, 3, 2, dtype=torch.bfloat16, gated=True)
    moved = {name: value.to("meta") for name, value in vars(call).items() if isinstance(value, Tensor)}
    y = replace(call, **moved).run()
    assert (y.shape, y.dtype) == ((5, 32), torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 3, 16)}, r"x must have 2 dimensions"),
        ({"x": torch.zeros(5, 17)}, r"x must have shape \(5, 16\)"),
        ({"down": torch.zeros(3, 25, 32)}, r"down must have shape \(3, 24, 32\)"),
        ({"weights": torch.zeros(5, 3)}, r"weights must have shape \(5, 2\)"),
        ({"weights": torch.zeros(5, 2).double()}, r"weights must be torch.float32"),
        ({"ids": torch.zeros(5, 2)}, r"ids must be torch.int32 or torch.int64"),
        ({"down": torch.zeros(3, 24, 32).half()}, r"down must be torch.float32 like x"),
        ({"x": torch.zeros(5, 16, dtype=torch.int32)}, r"x must be of a floating point type"),
        ({"activation": "silu"}, r"activation must be one of relu, relu2, fatrelu, got 'silu'"),
        ({"activation": "drelu"}, r"activation must be one of"),
        ({"threshold": 0.5}, r"threshold must be 0 with activation relu2"),
        ({"activation": "fatrelu", "threshold": -1.0}, r"threshold must be finite and at least 0, got -1"),
        ({"thresholds": torch.zeros(3, 24)}, r"thresholds are for fatrelu"),
        ({"scales": (torch.tensor(1.0), torch.tensor(1.0))}, r"have a scale each, and others none"),
    ],
)
def test_wrong_operands(change: dict[str, object], message: str) -> None:
    call = replace(draw(5, 3, 2, dtype=torch.float32), **change)
    with pytest.raises((ValueError, TypeError), match=message):
        call.run()


# ---- the node in ONNX files ----


class Model(torch.nn.Module):
    """A router in front of experts whose matrices are those of a call."""

    def __init__(self, call: Drawn) -> None:
        super().__init__()
        self.call = call
        self.router = torch.nn.Linear(call.x.shape[1], call.down.shape[0], dtype=call.x.dtype)
        for name, value in vars(call).items():
            if isinstance(value, Tensor) and name not in ("x", "ids", "weights"):
                self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).float().softmax(-1).topk(self.call.ids.shape[1])
        return replace(self.call, x=x, ids=ids, weights=weights).run()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("scale", [None, "row"])
def test_a_program_as_onnx_gives_the_same(gated: bool, scale: str | None, tmp_path: Path) -> None:
    call = draw(5, 4, 2, dtype=torch.bfloat16, activation="fatrelu", gated=gated, scale=scale)
    call.thresholds = torch.full(call.down.shape[:2], 0.1)
    module = Model(call).eval()
    program = torch.export.export(module, (call.x,), dynamic_shapes=({0: torch.export.Dim("tokens")},))
    save_onnx(export_onnx(program.run_decompositions({}), ["x"], ["y"], {}), tmp_path / "m.onnx")
    (node,) = [each for each in onnx.load(tmp_path / "m.onnx").graph.node if each.domain == "twell"]
    fields = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    assert node.op_type == "TwellExperts"
    assert fields == {
        **{"activation": b"fatrelu", "threshold": 0.0, "gate": gated, "scales": scale is not None, "thresholds": 1},
        **{"plugin_version": b"twellc-3", "plugin_namespace": b"twell"},
    }
    assert torch.equal(OnnxEvaluator(tmp_path / "m.onnx").run({"x": call.x})[0], module(call.x))
    with pytest.raises(ValueError, match="not the fields and inputs of one"):
        read_experts(node.input[:-1], fields)


# ---- the plugin ----


def inputs_of(call: Drawn) -> list[Tensor]:
    """Return the inputs of a call's node, contiguous."""
    up, gate = call.matrices
    scales = [call.scale_of(1), call.scale_of(0) if call.gated else None, call.scale_of(2)]
    tensors = [call.x, up, gate, call.down, call.ids, call.weights, *scales, call.thresholds]
    return [each.contiguous() for each in tensors if each is not None]


def created(host: ctypes.CDLL, call: Drawn) -> Any:
    names = ["gate"] * call.gated + ["up_scale"] * (call.scales is not None)
    attributes = experts_attributes(names, call.activation, call.threshold)
    fields = {name: value for name, value in attributes.items() if name[:6] != "plugin"}
    return plugin_host.create_plugin(host, library.library_path(), 3, fields)


def test_the_workspace_is_that_of_the_most_tokens(host: ctypes.CDLL, capfd: pytest.CaptureFixture[str]) -> None:
    sizes = []
    for tokens in (1, 600):
        call = draw(tokens, 16, 1, (64, 24, 64), torch.bfloat16)
        sizes.append([(tuple(each.shape), plugin_host.KINDS[each.dtype]) for each in inputs_of(call)])
    plugin, ranges = created(host, call), plugin_host.make_ranges(*sizes)
    # Of computed tensors TensorRT may know a bound only.
    ranges[3].max = plugin_host.make_dims((9000, 1))
    assert host.configure(plugin, ranges, len(ranges), None) == 0
    expected = library.load().twell_experts_workspace_bytes(problem(600))
    assert host.workspace_size(plugin, ranges, len(ranges), None) == expected > 0
    given = plugin_host.make_descs(sizes[1])
    assert host.shape_change(plugin, given, len(given), None) == 0
    given[4] = plugin_host.make_desc((599, 1), plugin_host.FLOAT32)
    assert host.shape_change(plugin, given, len(given), None) != 0
    host.destroy(plugin)
    message = "input weights has shape [599, 1]; expected [tokens, top] = [600, 1]"
    assert f"log 1 TwellExperts 'layer0': {message}" in capfd.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [0, 1, 16, 512])
@pytest.mark.parametrize(("gated", "scale", "ids"), [(False, None, torch.int64), (True, "row", torch.int32)])
def test_the_plugin_runs_the_kernels(
    host: ctypes.CDLL, tokens: int, gated: bool, scale: str | None, ids: torch.dtype
) -> None:
    call = draw(tokens, 8, 3, (64, 48, 32), torch.bfloat16, gated=gated, scale=scale)
    call.ids = call.ids.to(ids)
    call = call.on_gpu()
    plugin, expected = created(host, call), call.run()
    y, size = torch.full_like(expected, torch.nan), 1 << 26
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    assert plugin_host.enqueue(host.enqueue, plugin, inputs_of(call), y, workspace) == 0
    torch.cuda.synchronize()
    host.destroy(plugin)
    assert torch.equal(y.view(torch.int16), expected.view(torch.int16))


# ---- the C API ----


def problem(tokens: int, variant: str = "plain", experts: int = 16) -> library.ExpertsProblem:
    """Return a problem with an expert a token."""
    return library.ExpertsProblem(
        d_model=64,
        tokens=tokens,
        experts=experts,
        top=1,
        d_ff=24,
        d_out=64,
        variant=library.VARIANTS[variant],
        id_bytes=8,
        gate=library.ExpertStrides(24 * 64, 64) if variant == "gated" else library.ExpertStrides(),
        up=library.ExpertStrides(24 * 64, 64),
        down=library.ExpertStrides(24 * 64, 64),
    )


def test_every_configuration_is_chosen() -> None:
    function: Any = library.load().twell_internal_configurations
    function.restype, function.argtypes = ctypes.c_size_t, [ctypes.c_char_p, ctypes.c_size_t]
    known = {line for line in library.read_text(function).splitlines() if line.startswith("experts")}
    found = set()
    means = (0, 1, 4, 10, 24, 64, 500)
    for mean, variant, experts, gpu in itertools.product(means, ("plain", "gated"), (16, 1024), ("H200", "A100")):
        given = problem(max(mean * experts, 1), variant, experts)  # at 0, one token in all

        def describe(text: Any, size: int, given: library.ExpertsProblem = given, gpu: str = gpu) -> int:
            count: int = library.load().twell_experts_describe(given, library.GPUS[gpu], text, size)
            return count

        found |= {line.partition(" | ")[0] for line in library.read_text(describe).splitlines()}
    assert found == known


def test_the_workspace_does_not_shrink() -> None:
    sizes = [library.load().twell_experts_workspace_bytes(problem(tokens)) for tokens in range(600)]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": 1025}, b"experts must be 1 to 1024"),
        ({"top": 65}, b"top must be 1 to 64"),
        ({"tokens": (1 << 20) + 1}, b"tokens must be at least 0"),
        ({"d_ff": 32769}, b"d_ff must be"),
        ({"d_model": 12}, b"d_model must be"),
        ({"weight_dtype": library.E4M3, "d_out": 72}, b"d_out must be"),
        ({"activation": library.ACTIVATIONS["drelu"]}, b"activation must be"),
        ({"threshold": 1.0}, b"threshold must be"),
        ({"id_bytes": 2}, b"id_bytes must be"),
        ({"down_scale": 1}, b"down_scale must be"),
        ({"up": library.ExpertStrides(0, 60)}, b"strides must be"),
    ],
)
def test_wrong_problems(change: dict[str, Any], message: bytes) -> None:
    given = problem(4)
    assert library.load().twell_experts_validate(given) is None
    for name, value in change.items():
        setattr(given, name, value)
    assert library.load().twell_experts_validate(given).startswith(message)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 40, 300])
@pytest.mark.parametrize("scale", [None, "tensor", "expert", "row", "column"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels(tokens: int, scale: str | None, gated: bool, dtype: torch.dtype) -> None:
    call = draw(tokens, 8, 3, (160, 52, 112), dtype, gated=gated, scale=scale, seed=tokens)
    expected = call.oracle()
    on_gpu = call.on_gpu()
    y = on_gpu.run()
    error = (y.cpu().double() - expected).norm() / expected.norm()
    assert error < (8e-3 if dtype == torch.bfloat16 else 2e-3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = on_gpu.run()
    graph.replay()
    assert torch.equal(y.view(torch.int16), again.view(torch.int16))


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [None, "column"])
@pytest.mark.parametrize("gated", [False, True])
def test_many_tokens_of_wide_experts(gated: bool, scale: str | None) -> None:
    """Several tiles of neurons, outputs and columns, the last ones not whole; infinity counts where it is active."""
    call = draw(500, 5, 2, (208, 600, 528), torch.bfloat16, gated=gated, scale=scale)
    call.ids[:400, 0] = 3
    call.x[7, 3] = torch.nan
    expected = call.oracle()
    if scale is None:
        call.down[3, 5, 9] = torch.inf
    y = call.on_gpu().run().cpu().double()
    infinite = y.isinf()
    assert bool(infinite[:, 9].any()) == (scale is None)
    assert torch.equal(y.isfinite() | infinite, expected.isfinite())
    assert not infinite[:, :9].any()
    assert not infinite[:, 10:].any()
    known = y.isfinite()
    assert (y - expected)[known].norm() < 8e-3 * expected[known].norm()


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "top"), [(1, 2), (5, 2), (15, 2), (40, 2), (60, 2), (700, 6)])
def test_sanitize(tokens: int, top: int) -> None:
    """What sanitize.py runs: one token, each width of groups, and more pairs than one CTA sorts."""
    for gated, scale in ((False, None), (True, "row")):
        call = draw(tokens, 4, top, (48, 20, 32), torch.bfloat16, gated=gated, scale=scale)
        assert not call.on_gpu().run().isnan().any()


@pytest.mark.gpu
def test_skewed_experts_and_rows_of_nan() -> None:
    call = draw(200, 8, 2, (64, 48, 64), torch.bfloat16)
    call.ids[:150] = 5
    call.x[7, 3] = torch.nan
    y = call.on_gpu().run().cpu().double()
    expected = call.oracle()
    assert torch.equal(y.isnan(), expected.isnan())
    rows = ~expected.isnan().any(1)
    assert (y[rows] - expected[rows]).norm() < 8e-3 * expected[rows].norm()
