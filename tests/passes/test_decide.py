"""The decision for each block, and its reason."""

import copy
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models import Gated, Plain, Residual, Written, blocks_of, calls, eager, export, run
from tests.tolerance import assert_as_accurate
from twellc.base.errors import UserError
from twellc.passes.decide import decide
from twellc.passes.match.find_ffn import FfnBlock
from twellc.passes.pipeline import PassOptions, run_passes
from twellc.plugins.library import MAX_D_FF, MAX_PACKED_D_FF

X = torch.randn(2, 3, 16).bfloat16()


@pytest.fixture(scope="module")
def blocks() -> list[FfnBlock]:
    """Three blocks that match, 0.ffn, 1.ffn and 2.ffn, and one with silu."""
    layers = [Residual(Gated()), Residual(Plain()), Residual(Gated()), Residual(Gated(nn.functional.silu))]
    return blocks_of(nn.Sequential(*layers).bfloat16(), X)


@pytest.mark.parametrize("layers", ["auto", "all"])
def test_every_match(blocks: list[FfnBlock], layers: str) -> None:
    result = decide(blocks, layers)
    assert [(row.module, row.decision, row.matched) for row in result] == [
        ("0.ffn", "twell", True),
        ("1.ffn", "twell", True),
        ("2.ffn", "twell", True),
        ("3.ffn", "dense", False),
    ]
    assert [row.reason for row in result] == ["matches"] * 3 + ["gate activation is silu; TwELL needs a ReLU family"]
    assert [row.variant for row in result] == ["gated", "plain", "gated", "gated"]
    assert (result[0].activation, result[0].d_model, result[0].d_ff, result[0].d_out) == ("relu", 16, 40, 16)


def test_none(blocks: list[FfnBlock]) -> None:
    result = decide(blocks, "none")
    assert {row.decision for row in result} == {"dense"}
    assert [row.matched for row in result] == [True, True, True, False]
    assert result[0].reason == "--layers none"
    assert "silu" in result[3].reason


def test_regex_is_searched_in_the_path(blocks: list[FfnBlock]) -> None:
    result = decide(blocks, r"^[02]\.")
    assert [row.decision for row in result] == ["twell", "dense", "twell", "dense"]
    assert result[1].reason == r"not matched by --layers ^[02]\."
    assert [row.decision for row in decide(blocks, "ffn")] == ["twell"] * 3 + ["dense"]


def test_regex_cannot_force_a_refused_block(blocks: list[FfnBlock]) -> None:
    result = decide(blocks, r"^3\.")
    assert [row.decision for row in result] == ["dense"] * 4
    assert "silu" in result[3].reason


def test_regex_errors(blocks: list[FfnBlock]) -> None:
    with pytest.raises(UserError, match=r"--layers: not a regular expression .* got '\('"):
        decide(blocks, "(")
    with pytest.raises(UserError, match=r"matches no feed-forward block; got 'layers\.9'; expected one of 0\.ffn"):
        decide(blocks, "layers.9")


def test_no_blocks_at_all() -> None:
    assert decide([], "auto") == decide([], "layers.9") == []


LIMITS: dict[str, tuple[dict[str, Any], str]] = {
    "float32": ({"dtype": torch.float32}, "computes in float32; the kernels take bfloat16 and float16"),
    "float64": ({"dtype": torch.float64}, "computes in float64; the kernels take bfloat16 and float16"),
    "gated": ({"d_ff": MAX_PACKED_D_FF + 1}, "d_ff is 65537; the kernels take at most 65536 neurons of a gated block"),
    "plain": (
        {"d_ff": MAX_D_FF + 1, "gate": None, "variant": "plain"},
        "d_ff is 1048577; the kernels take at most 1048576 neurons of a plain block",
    ),
    "no neurons": ({"d_ff": 0}, "one of its widths is 0"),
    "no inputs": ({"d_model": 0}, "one of its widths is 0"),
    "no outputs": ({"d_out": 0}, "one of its widths is 0"),
    "d_model": ({"d_model": 12}, "d_model is 12; the kernels need a multiple of 8 (16-byte rows)"),
    "d_out": ({"d_out": 20}, "the output width is 20; the kernels need a multiple of 8 (16-byte rows)"),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_limits_of_the_kernels(blocks: list[FfnBlock], limit: str) -> None:
    changes, reason = LIMITS[limit]
    (row,) = decide([replace(blocks[0], **changes)], "all")
    assert (row.matched, row.decision, row.reason) == (False, "dense", reason)


@pytest.mark.parametrize(
    "changes",
    [
        {"d_ff": MAX_PACKED_D_FF},
        {"d_ff": MAX_D_FF, "gate": None, "variant": "plain"},
        {"d_ff": 1},
        {"dtype": torch.float16},
        {"d_model": 8},
    ],
)
def test_within_the_limits(blocks: list[FfnBlock], changes: dict[str, Any]) -> None:
    (row,) = decide([replace(blocks[0], **changes)], "auto")
    assert (row.matched, row.decision) == (True, "twell")


def test_a_model_beyond_the_limits() -> None:
    """Straight from a graph, not from a changed match."""
    (narrow,) = decide(blocks_of(Gated(d_model=12).bfloat16(), torch.randn(2, 12).bfloat16()), "auto")
    assert narrow.reason.startswith("d_model is 12")
    (wide,) = decide(blocks_of(Gated(), torch.randn(2, 16)), "auto")
    assert wide.reason.startswith("computes in float32")


def stack(*widths: int) -> nn.Module:
    """Linear layers with a ReLU between each two: every inner one is the down of one block and the up of the next."""
    layers = [nn.Sequential(nn.Linear(d_in, d_out), nn.ReLU()) for d_in, d_out in pairwise(widths)]
    return nn.Sequential(*layers).bfloat16()


def test_stacked_projections_are_shared_by_one_block_at_most() -> None:
    module, x = stack(16, 24, 40, 16, 8), torch.randn(64, 16).bfloat16()
    passed = run_passes(export(module, x), PassOptions(torch.bfloat16))
    result = passed.layers
    shared = f"it shares a projection with the block {result[0].module}"
    assert [(row.decision, row.matched, row.reason) for row in result] == [
        ("twell", True, "matches"),
        ("dense", False, shared),
        ("twell", True, "matches"),
    ]
    assert calls(passed.program) == {"mlp": 2, "relu": 2}, "one behind each block"
    truth = eager(copy.deepcopy(module).double(), x.double())[0]
    assert_as_accurate(run(passed.program, x)[0], run(passed.dense, x)[0], truth)


def test_a_packed_projection_is_shared_by_one_block_at_most() -> None:
    """The down projection of the first block is gate and up of the second."""

    def forward(self: Any, x: Tensor) -> Tensor:
        gate, up = self.first(x).chunk(2, -1)
        return self.down(torch.relu(gate) * up)

    module = Written(forward, first=Plain(d_out=80), down=nn.Linear(40, 16)).bfloat16()
    passed = run_passes(export(module, X), PassOptions(torch.bfloat16))
    assert [(row.decision, row.reason) for row in passed.layers] == [
        ("twell", "matches"),
        ("dense", "it shares a projection with the block first"),
    ]
    assert calls(passed.program)["mlp"] == 1


def test_a_second_call_of_a_module_has_the_weights_of_the_first() -> None:
    """Unlike a second block in a module."""

    def two_blocks(self: Any, x: Tensor) -> Tensor:
        return self.fc4(torch.relu(self.fc3(self.fc2(torch.relu(self.fc1(x))))))

    pair = Written(two_blocks, **{f"fc{number}": nn.Linear(16, 16) for number in range(1, 5)})
    module = Written(lambda self, x: self.pair(self.ffn(self.ffn(x))), ffn=Gated(), pair=pair)
    assert [(row.module, row.reason) for row in decide(blocks_of(module.bfloat16(), X), "auto")] == [
        ("ffn", "matches"),
        ("ffn#2", "matches; it has the weights of ffn"),
        ("pair", "matches"),
        ("pair.fc3", "matches"),
    ]


@pytest.mark.parametrize(("d_model", "named"), [(30, False), (16, True)])
def test_a_block_that_stays_dense_takes_no_projection(d_model: int, named: bool) -> None:
    """Neither for its width nor as it is not named."""
    first, second = blocks_of(stack(d_model, 96, 64, 32), torch.randn(5, d_model).bfloat16())
    layers = f"^{re.escape(second.module)}$" if named else "auto"
    assert [row.decision for row in decide([first, second], layers)] == ["dense", "twell"]
