"""Editing programs, and the checks that hold after every pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from tests.models import Gated, Plain, Residual, Written, calls, canonical, canonicalize, eager, export, run
from tests.tolerance import assert_same
from twellc.passes.graph.execution import Runner, example_inputs
from twellc.passes.graph.program import (
    add_parameter,
    constants_of,
    drop_unused_constants,
    editable,
    finish,
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


def test_editable_is_a_copy() -> None:
    program = canonical(Residual(Plain()))
    nodes, state = [node.name for node in program.graph.nodes], set(program.state_dict)
    copy = editable(program)
    assert [node.name for node in copy.graph.nodes] == nodes
    assert tensor_of(copy, "ffn.up.weight") is tensor_of(program, "ffn.up.weight"), "tensors are shared, not copied"
    for node in copy.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
        node.replace_all_uses_with(node.args[0])
    finish(copy)
    copy.state_dict.clear()
    assert calls(program)["relu"] == 1
    assert [node.name for node in program.graph.nodes] == nodes
    assert set(program.state_dict) == state


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


def test_add_parameter_makes_its_name_unique() -> None:
    program = editable(canonical(nn.Linear(16, 16, bias=False), torch.randn(5, 16)))
    (placeholder,) = constants_of(program)
    first = add_parameter(program, "weight", torch.ones(3), like=placeholder)
    second = add_parameter(program, "weight", torch.zeros(3), like=placeholder)
    assert set(program.state_dict) == {"weight", "weight_2", "weight_3"}
    assert first.name != second.name
    verify(program)
    drop_unused_constants(program)
    assert set(program.state_dict) == {"weight"}
    verify(program)


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


def test_each_run_computes_from_the_same_values() -> None:
    def writing(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        x.add_(1)
        self.count.add_(1)
        return x * 2, self.count + 0

    program = canonical(Written(writing, {"count": torch.zeros(())}), torch.zeros(4))
    x = torch.zeros(4)
    for _ in range(2):
        y, count = run(program, x)
        assert (y.tolist(), count.item()) == ([2] * 4, 1)
    assert x.tolist() == [0] * 4


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


def test_a_visitor_sees_and_replaces_values() -> None:
    class Chain(nn.Module):
        def forward(self, x: Tensor, scale: float, pair: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"y": torch.relu(x * scale) + pair["b"], "x": x}

    program = export(Chain(), torch.randn(4), 2.0, {"b": torch.randn(4)})
    inputs = {"x": torch.tensor([-1.0, 0.0, 1.0, 2.0]), "pair_b": torch.ones(4)}
    seen: dict[str, Any] = {}

    def visit(name: str, value: Any) -> Any:
        seen[name] = value
        return value + 10 if name == "relu" else value

    y, x = Runner(program)(inputs, visit)
    assert y.tolist() == [11, 11, 13, 15]
    assert torch.equal(x, inputs["x"])
    assert seen["relu"].tolist() == [0, 0, 2, 4], "the value that the program computed"
    assert seen["mul"].tolist() == [-2, 0, 2, 4]
    assert [each.tolist() for each in Runner(program)(inputs)] == [[1, 1, 3, 5], [-1, 0, 1, 2]]


def test_a_visitor_sees_the_names_of_the_program() -> None:
    """Copying a graph renames what is called as a function of Python is."""

    class Sum(nn.Module):
        def forward(self, input: Tensor, sum: Tensor) -> Tensor:
            return torch.relu(input) + sum

    program = export(Sum(), torch.randn(4), torch.randn(4))
    seen: dict[str, Any] = {}
    Runner(program)({"input": torch.ones(4), "sum": torch.zeros(4)}, lambda name, value: seen.setdefault(name, value))
    assert [node.name for node in program.graph.nodes] == list(seen) == ["input", "sum", "relu", "add", "output"]
    assert seen["input"].tolist() == [1] * 4 and seen["sum"].tolist() == [0] * 4


def test_canonicalize_functionalises() -> None:
    def in_place(self: Any, x: Tensor) -> Tensor:
        y = x.clone()
        y.view(-1)[:3].mul_(2)
        return nn.functional.relu(y, inplace=True)

    module, x = Written(in_place), torch.randn(4, 3)
    program = canonicalize(export(module, x))
    assert not any(name.rstrip("0123456789").endswith("_") for name in calls(program))
    assert_same(run(program)[0], eager(module, x)[0])


def test_canonicalize_drops_assertions_and_keeps_linear() -> None:
    module = Gated(biases="gud", between=lambda t: t.to(torch.float64).to(torch.float32))
    program = export(module)
    assert "_assert_tensor_metadata" in calls(program)
    result = calls(canonicalize(program))
    assert result == {"linear": 3, "relu": 1, "mul": 1}
