"""Lowering to bfloat16 and float16, and widening to float64."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node

from tests import models
from tests.models import Gated, Plain, Residual, Written, canonical, canonicalize, eager, export, run
from tests.tolerance import assert_as_accurate, assert_same
from twellc.base.errors import UserError
from twellc.passes import precision
from twellc.passes.graph.execution import Runner
from twellc.passes.graph.program import infer, user_inputs
from twellc.passes.match.find_ffn import find_ffn_blocks
from twellc.passes.precision import lower, parameter_dtypes, widen

LOW = [torch.bfloat16, torch.float16]


def mixture() -> nn.Module:
    """Products, a norm, a softmax, an embedding, buffers, integers: what autocast treats differently."""

    def forward(self: Any, x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        h = self.norm(self.linear(x) + self.table(ids)) * self.scale
        return h, h.argmax(-1), torch.softmax(h @ h.mT, -1) @ h, x

    parts = {"linear": nn.Linear(16, 16), "norm": nn.LayerNorm(16), "table": nn.Embedding(8, 16)}
    return Written(forward, {"scale": torch.rand(16) + 0.5}, **parts)


INPUTS = (torch.randn(2, 3, 16), torch.randint(0, 8, (2, 3)))


def dtype_of(program: ExportedProgram, operation: Any) -> set[torch.dtype]:
    """Return the dtypes that an operation's results have."""
    return {
        node.meta["val"].dtype
        for node in program.graph.nodes
        if getattr(node.target, "overloadpacket", None) is operation
    }


def run_as_typed(program: ExportedProgram, x: Tensor) -> Tensor:
    """Return the only output, and check that each operation computes in the dtype that the graph says."""
    said = {node.name: node.meta["val"].dtype for node in program.graph.nodes if hasattr(node.meta.get("val"), "dtype")}
    done: dict[str, Any] = {}
    (x_name,) = (node.name for node in user_inputs(program))
    (y,) = Runner(program)({x_name: x}, lambda name, value: done.setdefault(name, value))
    assert {name: dtype for name, dtype in said.items() if name in done and done[name].dtype != dtype} == {}
    return y


@pytest.mark.parametrize("dtype", LOW)
def test_policy(dtype: torch.dtype) -> None:
    program = canonical(mixture(), *INPUTS)
    result = lower(program, dtype)
    aten = torch.ops.aten
    assert dtype_of(result, aten.linear) == dtype_of(result, aten.matmul) == {dtype}
    assert dtype_of(result, aten.layer_norm) == dtype_of(result, aten.softmax) == {torch.float32}
    assert parameter_dtypes(result) == {dtype}
    assert result.state_dict["scale"].dtype == torch.float32, "buffers stay"
    assert parameter_dtypes(program) == {torch.float32}, "the pass works on a copy"


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_inputs_and_outputs_keep_their_dtypes(source: torch.dtype, dtype: torch.dtype) -> None:
    module, inputs = mixture().to(source), (INPUTS[0].to(source), INPUTS[1])
    module.scale = module.scale.to(source)
    program = canonical(module, *inputs)
    result = lower(program, dtype)
    assert [node.meta["val"].dtype for node in user_inputs(result)] == [source, torch.int64]
    outputs = run(result, *inputs)
    assert [y.dtype for y in outputs] == [source, torch.int64, source, source]
    assert torch.equal(outputs[3], inputs[0])
    truth = run(widen(program), inputs[0].double(), inputs[1])
    coarser = torch.bfloat16 if source == torch.bfloat16 else dtype
    for index in (0, 2):
        native = mixture().to(dtype)
        native.load_state_dict(module.state_dict())
        plain = eager(native, inputs[0].to(dtype), inputs[1])[index]
        assert_as_accurate(outputs[index].to(coarser), plain.to(coarser), truth[index])


def test_lowering_twice_changes_nothing() -> None:
    once = lower(canonical(mixture(), *INPUTS), torch.bfloat16)
    twice = lower(once, torch.bfloat16)
    assert [node.name for node in twice.graph.nodes] == [node.name for node in once.graph.nodes]
    for a, b in zip(run(once), run(twice), strict=True):
        assert torch.equal(a, b)


def of_linear(forward: Callable[..., Any]) -> nn.Module:
    """Return a function of a linear layer and its inputs as a module."""
    return Written(forward, linear=nn.Linear(16, 16))


def lowered(module: nn.Module, *inputs: Tensor, dtype: torch.dtype = torch.bfloat16) -> ExportedProgram:
    return lower(canonical(module, *inputs), dtype)


def test_shared_parameters_stay_shared() -> None:
    module: Any = mixture()
    head = nn.Linear(16, 8, bias=False)
    head.weight = module.table.weight
    tied = Written(lambda self, x, ids: self.head(self.body(x, ids)[0]), body=module, head=head)
    result = lowered(tied, *INPUTS)
    assert sum(tensor.shape == (8, 16) for tensor in result.state_dict.values()) == 1


def test_parameter_dtypes_ignores_buffers() -> None:
    """A half-precision model with a float32 buffer is a half-precision model."""
    module = mixture().half()
    module.scale = module.scale.float()
    assert parameter_dtypes(canonical(module, INPUTS[0].half(), INPUTS[1])) == {torch.float16}


# ---- operators that need operands of one dtype ----


def put(self: Any, x: Tensor) -> Tensor:
    y = torch.zeros(2, 3, 16)
    y[:, torch.tensor([2, 0, 1])] = self.ffn(x)
    return y


def turned(self: Any, x: Tensor) -> Tensor:
    pairs = torch.view_as_complex(self.ffn(x).view(2, 3, 8, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones(3, 8), self.matrix[:3, :8])).flatten(2)


ROWS = torch.tensor([2, 0, 1])
ELEMENTS = ROWS[None, :, None].expand(2, 3, 16)
# By name: what it computes, and what it needs besides a feed-forward block and a matrix.
PICKY: dict[str, tuple[Callable[..., Any], Callable[[], nn.Module]]] = {
    "conv_transpose1d": (lambda s, x: s.other(x.mT), lambda: nn.ConvTranspose1d(16, 16, 3)),
    "conv_transpose2d": (lambda s, x: s.other(x.mT[..., None]), lambda: nn.ConvTranspose2d(16, 16, 3)),
    "conv_transpose3d": (lambda s, x: s.other(x.mT[..., None, None]), lambda: nn.ConvTranspose3d(16, 16, 3)),
    "lstm": (lambda s, x: s.other(x)[0], lambda: nn.LSTM(16, 16, batch_first=True)),
    "gru": (lambda s, x: s.other(x)[0], lambda: nn.GRU(16, 16, batch_first=True)),
    "rnn_tanh": (lambda s, x: s.other(x)[0], lambda: nn.RNN(16, 16, batch_first=True)),
    "rnn_relu": (lambda s, x: s.other(x)[0], lambda: nn.RNN(16, 16, batch_first=True, nonlinearity="relu")),
    "instance_norm": (lambda s, x: s.other(x), lambda: nn.InstanceNorm1d(3, affine=True)),
    "bilinear": (lambda s, x: s.other(x, s.ffn(x)), lambda: nn.Bilinear(16, 16, 16)),
    "prelu": (lambda s, x: s.other(x), nn.PReLU),
    "addbmm": (lambda s, x: torch.addbmm(x[0].exp(), s.ffn(x)[..., :3], x), nn.Identity),
    "inner": (lambda s, x: torch.inner(x, s.matrix), nn.Identity),
    "tensordot": (lambda s, x: torch.tensordot(x, s.matrix, 1), nn.Identity),
    "mv": (lambda s, x: torch.mv(s.matrix, x[0, 0]), nn.Identity),
    "dot": (lambda s, x: torch.dot(s.matrix[0], x[0, 0]), nn.Identity),
    "lerp": (lambda s, x: torch.lerp(x, s.ffn(x), s.matrix[0].sigmoid()), nn.Identity),
    "lerp by a number": (lambda s, x: torch.lerp(x, s.ffn(x), 0.3), nn.Identity),
    "heaviside": (lambda s, x: torch.heaviside(torch.relu(x), s.ffn(x)), nn.Identity),
    "complex numbers": (turned, nn.Identity),
    "index_add": (lambda s, x: torch.zeros(2, 3, 16).index_add(1, ROWS, s.ffn(x)), nn.Identity),
    "index_put": (put, nn.Identity),
    "scatter": (lambda s, x: torch.zeros(2, 3, 16).scatter(1, ELEMENTS, s.ffn(x)), nn.Identity),
    "scatter_add": (lambda s, x: torch.zeros(2, 3, 16).scatter_add(1, ELEMENTS, s.ffn(x)), nn.Identity),
    "masked_scatter": (lambda s, x: x.masked_scatter(x > 0, s.ffn(x)), nn.Identity),
}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("case", PICKY)
def test_operands_get_one_dtype(case: str, dtype: torch.dtype) -> None:
    forward, other = PICKY[case]
    module = Written(forward, ffn=Plain(), matrix=torch.randn(16, 16) / 4, other=other())
    x = torch.randn(2, 3, 16)
    y = run_as_typed(lowered(module, x, dtype=dtype), x)
    (truth,) = eager(module, x)
    assert (y - truth).norm() < 0.02 * truth.norm()


def test_products_of_the_matcher_run_in_low_precision() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        inner = torch.inner(torch.relu(torch.inner(x, self.up)), self.down)
        return inner + torch.tensordot(torch.relu(torch.tensordot(x, self.up.T, 1)), self.down.T, 1)

    module = Written(forward, up=torch.randn(40, 16), down=torch.randn(16, 40))
    blocks = find_ffn_blocks(lowered(module, torch.randn(5, 16)))
    assert [(b.dtype, b.refusal) for b in blocks] == [(torch.bfloat16, "")] * 2


def test_a_tensor_without_dimensions_widens_none_that_has_some() -> None:
    """As torch has it: here a float32 number is put into a bfloat16 tensor."""
    result = lowered(of_linear(lambda self, x: self.linear(x).index_put((ROWS,), x.sum())), torch.randn(5, 16))
    assert dtype_of(result, torch.ops.aten.index_put) == {torch.bfloat16}


# ---- rotary angles ----


def multiplied(inverse: Tensor, positions: Tensor, x: Tensor) -> Tensor:
    """As transformers does it."""
    return (inverse[None, :, None].expand(positions.shape[0], -1, 1) @ positions[:, None, :].float()).mT


def by_einsum(inverse: Tensor, positions: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("bi,j->bij", positions.float(), inverse)


def scaled(inverse: Tensor, positions: Tensor, x: Tensor) -> Tensor:
    """A weight computed from a buffer, to be folded."""
    return 8 * multiplied(inverse / 8, positions, x)


def counted(inverse: Tensor, positions: Tensor, x: Tensor) -> Tensor:
    """Positions that take the shape of data, but not its values."""
    return by_einsum(inverse, torch.ones_like(x[..., 0]).cumsum(1) + 959, x)


@pytest.mark.parametrize("angles", [multiplied, by_einsum, scaled, counted])
def test_rotary_angles_stay_in_float32(angles: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """In bfloat16 the angle of position 1000 would be off by up to 2 radians."""

    def rotary(self: Any, x: Tensor, positions: Tensor) -> Tensor:
        twice = angles(self.inverse, positions, x).repeat(1, 1, 2)
        q = self.linear(x)
        return self.ffn(q * twice.cos() + torch.cat((-q[..., 8:], q[..., :8]), -1) * twice.sin())

    x, positions = torch.randn(1, 64, 16), torch.arange(960, 1024)[None]
    inverse = 1 / 10000 ** (torch.arange(0, 16, 2) / 16)
    program = canonical(Written(rotary, {"inverse": inverse}, linear=nn.Linear(16, 16), ffn=Gated()), x, positions)
    low = lower(program, torch.bfloat16)
    assert [(b.dtype, b.refusal) for b in find_ffn_blocks(low)] == [(torch.bfloat16, "")]
    (y,), (truth,) = run(low), run(widen(program), x.double(), positions)
    assert (y - truth).norm() < 0.02 * truth.norm()


def test_embedding_in_a_buffer_is_data() -> None:
    def forward(self: Any, ids: Tensor) -> Tensor:
        h = nn.functional.embedding(ids, self.table)
        return self.linear(h @ h.mT @ h)

    model = Written(forward, {"table": torch.randn(8, 16)}, linear=nn.Linear(16, 16))
    result = lowered(model, torch.randint(0, 8, (2, 3)))
    assert dtype_of(result, torch.ops.aten.matmul) == {torch.bfloat16}
    assert result.state_dict["table"].dtype == torch.float32, "buffers stay"


# ---- weights in buffers ----


def buffered(function: Callable[..., Any], **buffers: Tensor) -> nn.Module:
    return Written(function, buffers, ffn=Plain(biases="ud"))


UP, DOWN, BIAS = torch.randn(40, 16) / 4, torch.randn(16, 40) / 6, torch.randn(40)
ALL = {"up": UP, "down": DOWN, "bias": BIAS}
BUFFERED: dict[str, Callable[[], nn.Module]] = {
    "all": lambda: buffered(lambda s, x: F.linear(torch.relu(F.linear(x, s.up, s.bias)), s.down), **ALL),
    "views": lambda: buffered(lambda s, x: torch.relu(x @ s.up.T) @ s.down.view(16, 40).mT, up=UP, down=DOWN),
    "addmm": lambda: buffered(lambda s, x: torch.relu(torch.addmm(s.bias, x, s.up.T)) @ s.down.T, **ALL),
    "down": lambda: buffered(lambda s, x: F.linear(torch.relu(s.ffn.up(x)), s.down), down=DOWN),
    "a bias": lambda: buffered(lambda s, x: s.ffn.down(torch.relu(F.linear(x, s.ffn.up.weight) + s.bias)), bias=BIAS),
    "a tensor of the code": lambda: buffered(lambda s, x: F.linear(torch.relu(s.ffn.up(x)), DOWN)),
    "computed": lambda: buffered(lambda s, x: F.linear(torch.relu(s.ffn.up(x)), s.down / 3), down=DOWN),
}  # fmt: skip


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("case", BUFFERED)
def test_weights_in_buffers(case: str, dtype: torch.dtype) -> None:
    x = torch.randn(5, 16)
    program = canonical(BUFFERED[case](), x)
    assert parameter_dtypes(program) == {torch.float32}
    low = lower(program, dtype)
    assert parameter_dtypes(low) == {dtype}
    assert [(b.variant, b.dtype, b.refusal) for b in find_ffn_blocks(low)] == [("plain", dtype, "")]
    assert {tensor.dtype for tensor in (low.state_dict | low.constants).values()} == {dtype}
    (truth,) = run(widen(program), x.double())
    for result in (low, models.rewrite(low)):
        assert (run(result)[0] - truth).norm() < 0.01 * truth.norm()


def test_products_that_a_model_widens_are_not_its_precision() -> None:
    module = buffered(
        lambda s, x: (y := F.linear(x, s.up).float()) @ y.mT @ F.linear(x, s.up).float(), up=UP.bfloat16()
    )
    assert parameter_dtypes(canonical(module, torch.randn(5, 16).bfloat16())) == {torch.bfloat16}
    module = buffered(lambda s, x: F.linear(x.float(), s.up.float()), up=UP.bfloat16())
    assert parameter_dtypes(canonical(module, torch.randn(5, 16).bfloat16())) == {torch.bfloat16}


def test_dtype_of_weights_that_are_stored_as_integers() -> None:
    module = buffered(
        lambda s, x: F.linear(x, s.up.float() * 0.25), up=torch.randint(-8, 8, (40, 16), dtype=torch.int8)
    )
    program = export(module, torch.randn(5, 16))
    assert parameter_dtypes(program) == parameter_dtypes(canonicalize(program)) == {torch.float32}


def test_a_buffer_that_is_more_than_a_weight_stays() -> None:
    module = buffered(
        lambda s, x: (x @ s.table, x @ s.shared, s.shared.exp()), table=torch.eye(16), shared=torch.eye(16)
    )
    result = lowered(module, torch.randn(5, 16))
    assert [result.state_dict[name].dtype for name in ("table", "shared")] == [torch.bfloat16, torch.float32]
    assert dtype_of(result, torch.ops.aten.matmul) == {torch.bfloat16}


def test_frequencies_and_masks_are_not_weights() -> None:
    least = torch.finfo(torch.float32).min
    module = buffered(
        lambda s, x, t: torch.baddbmm(s.mask, x, x.mT) + (t[:, None].float() @ s.inverse).sin().sum(),
        mask=torch.full((3, 3), least).triu(1).expand(2, 3, 3),
        inverse=torch.rand(1, 8),
    )
    result = lowered(module, torch.randn(2, 3, 16), torch.arange(900, 903), dtype=torch.float16)
    assert [result.state_dict[name].dtype for name in ("mask", "inverse")] == [torch.float32] * 2


# ---- what may go wrong ----


@pytest.mark.parametrize(
    ("module", "what"),
    [
        (Written(lambda s, x: F.linear(x, s.up), {"up": UP * 1e6}), "buffer up"),
        (Written(lambda s, x: F.linear(x, s.up), up=UP * 1e6), "parameter up"),
    ],
)
def test_numbers_that_overflow_float16(module: nn.Module, what: str) -> None:
    program = canonical(module, torch.randn(5, 16))
    with pytest.raises(UserError, match=rf"{what}: its values overflow float16; .* Use --dtype bf16"):
        lower(program, torch.float16)
    lower(program, torch.bfloat16)


def test_infinite_parameter_stays_infinite() -> None:
    module = nn.Linear(16, 16)
    with torch.no_grad():
        module.bias[3] = -torch.inf
    assert run(lowered(module, torch.randn(5, 16), dtype=torch.float16))[0][:, 3].isneginf().all()


def attention_with_a_filled_mask(self: nn.Module, x: Tensor) -> Tensor:
    q = self.linear(x)
    causal = torch.ones(3, 3, dtype=torch.bool).tril()
    return torch.softmax((q @ q.mT).masked_fill(~causal, torch.finfo(torch.float32).min), -1) @ q


def clamped(self: nn.Module, x: Tensor) -> Tensor:
    return self.linear(x).clamp(min=-1.0, max=torch.finfo(torch.float32).max)


def chosen(self: nn.Module, x: Tensor) -> Tensor:
    y = self.linear(x)
    return torch.softmax(torch.where(y > 0, y, -1e30), -1)


def assert_close(module: nn.Module, x: Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
    """Compare a lowered module with itself in float32; what is not finite fails."""
    (y,) = run(lowered(module, x, dtype=dtype))
    torch.testing.assert_close(y, eager(module, x)[0], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("forward", [attention_with_a_filled_mask, clamped, chosen])
@pytest.mark.parametrize("dtype", LOW)
def test_numbers_beyond_the_range(forward: Callable[..., Tensor], dtype: torch.dtype) -> None:
    assert_close(of_linear(forward), torch.randn(2, 3, 16), dtype)


def test_where_that_gives_indices() -> None:
    module = of_linear(lambda self, x: self.linear(x).sum(-1)[torch.where(x[..., 0] > 0)])
    assert_close(module, torch.randn(2, 3, 16))


def test_batch_norm() -> None:
    assert_close(nn.Sequential(nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4)), torch.randn(2, 4, 10))


def test_parameter_as_an_output() -> None:
    result = lowered(of_linear(lambda self, x: (self.linear(x), self.linear.weight)), torch.randn(5, 16))
    assert [y.dtype for y in run(result)] == [torch.float32, torch.float32]


def test_control_flow_is_a_user_error() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda z: self.linear(z), lambda z: self.linear(z) * 2, (x,))

    program = canonical(of_linear(forward), torch.randn(5, 16))
    with pytest.raises(UserError, match=r"cannot change its precision \(it has inner graphs\)"):
        lower(program, torch.bfloat16)


def test_refusal_leaves_no_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch tells what cannot run on shapes, with a traceback of many lines, and raises too."""
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "handlers", [caplog.handler])
    program = canonical(of_linear(lambda self, x: torch.linalg.inv(self.linear(x))), torch.eye(16))
    with pytest.raises(UserError, match=r"operation linalg_inv .* Low precision dtypes not supported"):
        lower(program, torch.bfloat16)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_other_powers_run_in_float32() -> None:
    module = Written(lambda self, x: self.ffn(x) * (self.ffn(x) ** 2).mean(-1, keepdim=True), ffn=Plain())
    program = lowered(module, torch.randn(5, 16))
    (power,) = (node for node in program.graph.nodes if "pow" in str(node.target))
    assert power.meta["val"].dtype == torch.float32


# ---- float64 ----


def test_widen_is_the_module_in_float64() -> None:
    module = mixture()
    program = canonical(module, *INPUTS)
    wide = widen(program)
    assert {node.meta["val"].dtype for node in user_inputs(wide)} == {torch.float64, torch.int64}
    expected = eager(module.double(), INPUTS[0].double(), INPUTS[1])
    for actual, wanted in zip(run(wide, INPUTS[0].double(), INPUTS[1]), expected, strict=True):
        assert_same(actual, wanted)


def test_widen_removes_explicit_casts() -> None:
    """`.float()` and bfloat16 round trips of a model are not part of the truth."""
    module = Written(lambda self, x: self.ffn(x.bfloat16().float()).to(torch.float16), ffn=Residual(Gated()))
    x = torch.randn(5, 16)
    (y,) = run(widen(canonical(module, x)), x.double())
    assert_same(y, eager(module.ffn.double(), x.double())[0])


FROM_NOTHING: dict[str, Callable[[Tensor], Tensor]] = {
    "ones": lambda x: torch.tril(torch.ones(3, 3)) @ x / 3,
    "zeros": lambda x: torch.zeros(2, 3, 16).index_add(1, torch.tensor([2, 0, 1]), x),
    "full": lambda x: torch.full((3, 3), 0.1) @ x,
    "eye": lambda x: torch.eye(3) @ x,
    "linspace": lambda x: torch.linspace(0, 1, 9).view(3, 3) @ x,
    "arange": lambda x: torch.arange(0, 0.9, 0.1).view(3, 3) @ x,
    "scalar_tensor": lambda x: torch.scalar_tensor(0.1).expand(3, 3) @ x,
    "integers divided": lambda x: (torch.arange(9).view(3, 3) / 9) @ x,
    "integers multiplied": lambda x: (torch.arange(9).view(3, 3) * 0.25) @ x,
    "integers in a function": lambda x: torch.sin(torch.arange(9).view(3, 3)) @ x,
    "an output": lambda x: torch.ones(3) / 3,
    "polar": lambda x: torch.view_as_real(torch.polar(torch.ones(2, 3, 16), x).mT @ x.to(torch.complex64)),
}


@pytest.mark.parametrize("case", FROM_NOTHING)
def test_widen_reaches_what_is_made_without_floats(case: str) -> None:
    module, x = Written(lambda self, x: FROM_NOTHING[case](x)), torch.randn(2, 3, 16)
    y = run_as_typed(widen(canonical(module, x)), x.double())
    assert y.dtype == torch.float64
    torch.testing.assert_close(y, FROM_NOTHING[case](x).double(), rtol=1e-5, atol=1e-5)


def test_operations_that_are_alike_are_run_on_shapes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    inferred = []

    def counted(node: Node, *others: Any) -> None:
        inferred.append(node.target)
        infer(node, *others)

    monkeypatch.setattr(precision, "infer", counted)
    program = canonical(nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))), torch.randn(2, 16))
    widen(program)
    assert inferred == [torch.ops.aten.linear.default]
