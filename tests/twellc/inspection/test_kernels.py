"""Which kernels `twellc inspect` names."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Cli
from tests.models import Gated, Residual, export
from twellc.decisions import targets
from twellc.inspection.kernels import list_kernels
from twellc.passes.report import Layer, Neurons
from twellc.plugins.library import gpu_named


def layer(**changes: Any) -> Layer:
    row = {"module": "mlp", "variant": "gated", "activation": "relu", "matched": True, "decision": "twell"}
    widths = {"d_model": 2048, "d_ff": 5632, "d_out": 2048}
    return Layer(**{**row, "reason": "", "residual": False, **widths, **changes})


@pytest.mark.parametrize(
    ("tokens", "gpu", "route", "kernel"),
    [
        (1, "H200", "one_or_two_tokens", "contribute"),
        (64, "H200", "few_tokens", "gate_up_sm90 neurons=96"),
        (64, "H100-PCIe", "few_tokens", "gate_up_sm90 neurons=128"),
        (64, "A100", "few_tokens", "gate_up_few"),
        (512, "H100", "dense_block", "hidden_gated_sm90"),
        (8192, "H20", "many_tokens", "gate_sm90"),
        (8192, "RTX-4090", "many_tokens", "gate_generic"),
    ],
)
def test_route_of_a_block(tokens: int, gpu: str, route: str, kernel: str) -> None:
    (block,) = list_kernels([layer()], tokens, gpu).blocks
    assert block.route == route
    assert block.launches[0].startswith(kernel)


def test_hot_neurons_are_a_dense_block_of_their_own() -> None:
    (block,) = list_kernels([layer(hot=512)], 8192, "H200").blocks
    assert block.launches[0].startswith("hidden_gated_sm90")
    assert any(launch.startswith("sparse_down") for launch in block.launches)


def test_only_neurons_that_are_left_are_computed() -> None:
    pruned = layer(neurons=Neurons(kept=1024, unable=0, dead=5632 - 1024))
    assert list_kernels([pruned], 64, "H200").blocks == list_kernels([layer(d_ff=1024)], 64, "H200").blocks


def test_only_rewritten_blocks_have_kernels() -> None:
    layers = [layer(decision="dense"), layer(activation="silu"), layer(d_model=0, d_ff=0), layer(module="last")]
    assert [block.module for block in list_kernels(layers, 1, "H200").blocks] == ["last"]


def test_command(cli: Cli, tmp_path: Path) -> None:
    model = tmp_path / "m.pt2"
    torch.export.save(export(Residual(Gated(d_ff=320)).bfloat16(), torch.randn(4, 16).bfloat16()), model)
    result = cli("inspect", model, "--tokens", "1", "--gpu", "A100")
    assert result.exit_code == 0, result.output
    assert "kernels on A100, 1 tokens: one_or_two_tokens, for" in result.output
    assert "contribute tokens=1 | grid=" in result.output
    table = json.loads(cli("inspect", model, "--json", "--target-gpu", "h100").stdout)["kernels"]
    assert (table["gpu"], table["tokens"]) == ("H100", 2048)
    assert [block["route"] for block in table["blocks"]] == ["dense_block"]
    assert "kernels on H200" in cli("inspect", model, "--target-gpu", "h200").output
    assert "kernels on L40S" in cli("inspect", model, "--target-gpu", "h200", "--gpu", "L40S").output


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA B200", None),
    ],
)
def test_names_that_drivers_have(driver: str, name: str | None) -> None:
    assert gpu_named(driver) == name


def test_target_that_is_not_known(cli: Cli, archive: Path, tmp_path: Path) -> None:
    """Its times are, from a data file; of which size it is, is not."""
    times = (Path(targets.__file__).with_name("data") / "h200.json").read_text()
    (tmp_path / "times.json").write_text(times.replace('"NVIDIA H200"', '"NVIDIA B200"'))
    result = cli("inspect", archive, "--target-gpu", tmp_path / "times.json")
    assert "kernels on H100" in result.output
    assert "the kernels are those of an H100, since NVIDIA B200 is not known (--gpu changes it)" in result.output


def test_a_rewritten_graph_is_described_for_the_gpu_that_models_are(cli: Cli, archive: Path, tmp_path: Path) -> None:
    """Nothing is expected of it, so no GPU is named; it took another one than the model itself."""
    graph = tmp_path / "m.onnx"
    assert cli("compile", archive, "--backend", "none", "--onnx", graph).exit_code == 0
    outputs = [cli("inspect", each).output for each in (archive, graph)]
    assert all("kernels on H100, 2048 tokens" in output for output in outputs)
