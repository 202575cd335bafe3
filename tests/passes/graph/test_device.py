"""Moving programs between devices, without a GPU: what a graph says of devices, and what programs share."""

import torch
from torch import Tensor, nn

from twellc.passes.graph.device import devices_of, on_device

META = torch.device("meta")


class Placing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.ones(4, device=x.device)


def test_tensors_and_devices_of_the_graph_move() -> None:
    program = torch.export.export(Placing().eval(), (torch.randn(2, 4),))
    before = {name: tensor.data_ptr() for name, tensor in program.state_dict.items()}
    moved = on_device(program, META, {})
    assert devices_of(moved) == {META} and devices_of(program) == {torch.device("cpu")}
    named = {node.kwargs["device"] for node in moved.graph.nodes if "device" in node.kwargs}
    assert named == {META}
    assert {node.kwargs["device"].type for node in program.graph.nodes if "device" in node.kwargs} == {"cpu"}
    assert before == {name: tensor.data_ptr() for name, tensor in program.state_dict.items()}


def test_programs_share_tensors_afterwards() -> None:
    program = torch.export.export(Placing().eval(), (torch.randn(2, 4),))
    moved: dict[int, tuple[Tensor, Tensor]] = {}
    first, second = (on_device(program, META, moved) for _ in range(2))
    assert len(moved) == len(program.state_dict)
    assert first.state_dict.keys() == second.state_dict.keys() == program.state_dict.keys()
