"""What `twellc check` says of models with experts, where rounding may choose other ones."""

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
import transformers
from onnx import TensorProto, helper

from tests import models
from tests.twellc.checks.runs import changed, graph_of, run_check, set_tensor, twell_nodes

ROUTER = "model.layers.0.mlp.gate.weight"
EXPERTS = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer with attention and four experts, two for a token; those in the middle have nearly the same scores."""
    sizes = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    model = models.family("Qwen3Moe", **models.WIDE, **sizes, hidden_act="relu2")(num_hidden_layers=1)
    with torch.no_grad():
        router = model.get_parameter(ROUTER)
        router[2] = router[1]
        router[2, 0] *= 1 + torch.finfo(torch.bfloat16).eps
    folder = tmp_path_factory.mktemp("mixture")
    graph_of(models.save(model, folder / "model"), folder / "m.onnx")
    return folder


def exchange(one: int, other: int) -> Callable[[onnx.ModelProto], None]:
    """Return what sends the tokens of one expert to another one, and the other way round."""

    def swap(rows: torch.Tensor) -> None:
        rows[[one, other]] = rows[[other, one]]

    return lambda graph: set_tensor(graph, ROUTER, swap)


def scale_attention(graph: onnx.ModelProto) -> None:
    (product,) = (node for node in graph.graph.node if "o_proj" in node.name)
    set_tensor(graph, product.input[1], lambda weight: weight.mul_(1.1))


def scale_an_expert(graph: onnx.ModelProto) -> None:
    set_tensor(graph, twell_nodes(graph)[0].input[3], lambda down: down[2].mul_(1.1))


def scale_routing(graph: onnx.ModelProto) -> None:
    (node,) = twell_nodes(graph)
    graph.graph.initializer.append(helper.make_tensor("factor", TensorProto.FLOAT, [], [1.1]))
    place = list(graph.graph.node).index(node)
    graph.graph.node.insert(place, helper.make_node("Mul", [node.input[5], "factor"], ["scaled"]))
    node.input[5] = "scaled"


# What is changed, whether the candidate is still right, and the block that is not.
CHANGES: dict[str, tuple[Callable[[onnx.ModelProto], None], bool, str | None]] = {
    "experts of nearly the same scores": (exchange(1, 2), True, None),
    "other experts": (exchange(0, 3), False, None),
    "attention": (scale_attention, False, None),
    "weights of an expert": (scale_an_expert, False, EXPERTS),
    "weights of the sum": (scale_routing, False, None),
}


@pytest.mark.parametrize("case", CHANGES)
def test_other_choices(case: str, mixture: Path, tmp_path: Path) -> None:
    change, within, block = CHANGES[case]
    result = run_check(mixture / "model", changed(mixture / "m.onnx", tmp_path / "m.onnx", change))
    assert (result.within, result.first_divergence) == (within, block)
    certain, near = result.outputs
    assert (certain.name, near.name) == ("logits", "logits (near ties)")
    assert 0 < near.elements < certain.elements


@pytest.fixture(scope="module", params=[64, 6])
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Switch's encoder: a token has one of four experts by argmax; those in the middle have nearly the same scores.

    An expert has room for all tokens of a text, or for so few that another choice of one leaves others without it.
    """
    folder = tmp_path_factory.mktemp("encoder")
    whole = models.save(models.switch(expert_capacity=request.param), folder / "whole")
    model = transformers.SwitchTransformersEncoderModel.from_pretrained(whole)
    with torch.no_grad():
        router = model.encoder.block[0].layer[1].mlp.router.classifier.weight
        router[2] = router[1]
        router[2, 0] *= 1 + torch.finfo(torch.bfloat16).eps
    graph_of(models.save(model, folder / "model"), folder / "m.onnx")
    return folder


@pytest.mark.parametrize(("one", "other", "within"), [(1, 2, True), (0, 3, False)])
def test_other_choices_by_argmax(one: int, other: int, within: bool, encoder: Path, tmp_path: Path) -> None:
    def swap(graph: onnx.ModelProto) -> None:
        arrays = {each.name: list(each.dims) for each in graph.graph.initializer}
        (router,) = (name for name, dims in arrays.items() if dims == [32, 4] and "bias" not in name)
        set_tensor(graph, router, exchanged)

    def exchanged(columns: torch.Tensor) -> None:
        columns[:, [one, other]] = columns[:, [other, one]]

    result = run_check(encoder / "model", changed(encoder / "m.onnx", tmp_path / "m.onnx", swap))
    assert result.within == within
    certain, near = result.outputs
    assert near.name == "last_hidden_state (near ties)" and 0 < near.elements < certain.elements
