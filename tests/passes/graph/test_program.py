"""Editing programs, and the checks that hold after every pass."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from tests.models import Gated, Plain, Residual, calls, canonical, canonicalize, export
from twellc.passes.graph.execution import Runner, example_inputs
from twellc.passes.graph.program import (
    constants_of,
    editable,
    tensor_of,
    user_inputs,
    verify,
    written_tensors,
)

UP = "ffn.up.weight"


def read_before_it_is_written(program: ExportedProgram) -> None:
    first, second = program.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    first.replace_input_with(first.args[0], second)


DAMAGES: dict[str, Callable[[ExportedProgram], object]] = {
    "a smaller parameter": lambda program: program.state_dict.update({UP: nn.Parameter(torch.zeros(39, 16))}),
    "another dtype": lambda program: program.state_dict.update({UP: nn.Parameter(torch.zeros(40, 16).half())}),
    "no parameter": lambda program: program.state_dict.pop(UP),
    "a renamed placeholder": lambda program: setattr(next(iter(program.graph.nodes)), "name", "something_else"),
    "a value that is read before it is written": read_before_it_is_written,
    "no output": lambda program: setattr(program.graph_signature.output_specs[0].arg, "name", "nothing"),
    "no input": lambda program: program.graph_signature.input_specs.pop(0),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_verify_notices(damage: str) -> None:
    program = editable(canonical(Residual(Plain(biases="u"))))
    verify(program)
    DAMAGES[damage](program)
    with pytest.raises(Exception):  # noqa: B017 - torch's own checks raise what they like; that they do is the point
        verify(program)


def test_constants_of() -> None:
    class Buffers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16))
            self.register_buffer("kept", torch.randn(16))
            self.register_buffer("transient", torch.randn(16), persistent=False)
            self.register_buffer("mutated", torch.zeros(16))

        def forward(self, x: Tensor) -> Tensor:
            self.mutated.add_(1)
            return x * self.weight + self.kept + self.transient + self.mutated

    program = canonical(Buffers(), torch.randn(5, 16))
    constants = constants_of(program)
    assert set(constants.values()) == {"weight", "kept", "transient"}
    for name in constants.values():
        assert torch.is_tensor(tensor_of(program, name))


def test_user_inputs_are_tensors_in_order() -> None:
    class Inputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16))

        def forward(self, second: Tensor, scale: float, first: dict[str, Tensor], flag: bool = True) -> Tensor:
            return second * self.weight * scale + first["b"] - first["a"] if flag else second

    inputs = {"a": torch.randn(16), "b": torch.randn(16)}
    program = export(Inputs(), torch.randn(16), 2.0, inputs)
    names = [node.name for node in user_inputs(program)]
    assert names == ["second", "first_a", "first_b"]
    examples = example_inputs(program)
    assert list(examples) == names
    (y,) = Runner(program)({name: torch.full((16,), float(i)) for i, name in enumerate(names)})
    assert torch.equal(y, torch.ones(16)), "0 * w * 2 + 2 - 1"


def test_a_constant_that_is_written_to() -> None:
    """As the caches of transformers: they are buffers, and the code has them from elsewhere."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(4), persistent=False)
            self.layers = [self.cache]

        def forward(self, x: Tensor) -> Tensor:
            self.layers[0].add_(x)
            return self.layers[0] * 2

    exported = export(Cached(), torch.zeros(4))
    assert not written_tensors(exported)
    program = canonicalize(exported)
    assert len(written_tensors(program)) == 1
    for _ in range(2):
        assert Runner(program)({"x": torch.ones(4)})[0].tolist() == [2] * 4


def test_canonicalize_drops_assertions_and_keeps_linear() -> None:
    module = Gated(biases="gud", between=lambda t: t.to(torch.float64).to(torch.float32))
    program = export(module)
    assert "_assert_tensor_metadata" in calls(program)
    result = calls(canonicalize(program))
    assert result == {"linear": 3, "relu": 1, "mul": 1}
