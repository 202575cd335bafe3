"""What `twellc inspect` counts, against counts of real computations."""

import functools
import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.conftest import Cli
from tests.models import Gated, Plain, Residual, export
from tests.onnx_graphs import gated
from tests.twellc.checks.runs import changed, twell_nodes
from tests.twellc.test_cli import failed
from twellc.commands.blocks import print_layers
from twellc.decisions import targets
from twellc.inspection.flops import Cost, count_costs, dense_cost, sparse_cost
from twellc.inspection.kernels import list_kernels
from twellc.passes.report import Layer, Neurons
from twellc.plugins.library import gpu_named

D_MODEL, D_FF, D_OUT = 32, 600, 48


def layer(variant: str, **changes: Any) -> Layer:
    widths = {"d_model": D_MODEL, "d_ff": D_FF, "d_out": D_OUT}
    row = {"module": "mlp", "variant": variant, "activation": "relu", "matched": True, "decision": "twell"}
    return Layer(**{**row, "reason": "", "residual": False, **widths, **changes})


def block(variant: str) -> torch.nn.Module:
    return (Gated if variant == "gated" else Plain)(d_model=D_MODEL, d_ff=D_FF, d_out=D_OUT).bfloat16()


@pytest.mark.parametrize("variant", ["gated", "plain"])
@pytest.mark.parametrize("tokens", [1, 37])
def test_dense_counts(variant: str, tokens: int) -> None:
    module, x = block(variant), torch.randn(tokens, D_MODEL).bfloat16()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        y = module(x)
    cost = dense_cost(layer(variant), tokens)
    assert cost.flops == counter.get_total_flops()
    hidden = torch.empty(tokens, D_FF, dtype=torch.bfloat16)
    assert cost.bytes == sum(each.nbytes for each in (x, y, hidden, *module.parameters()))
    assert cost.gathered == 0


@pytest.mark.parametrize("variant", ["gated", "plain"])
def test_sparse_counts_of_real_activations(variant: str) -> None:
    """Count the products of each token with its own active neurons, one by one."""
    torch.manual_seed(3)
    module, x = block(variant), torch.randn(50, D_MODEL).bfloat16()
    first = module.gate if variant == "gated" else module.up
    active = torch.relu(first(x) - 1.5) > 0
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        first(x)
        rows = 0
        for token, neurons in zip(x, active, strict=True):
            row = token[None]
            if variant == "gated":
                row @ module.up.weight[neurons].t()
            hidden = torch.zeros(1, int(neurons.sum())).bfloat16()
            hidden @ module.down.weight[:, neurons].t()
            rows += int(neurons.sum())
    cost = sparse_cost(layer(variant), 50, float(active.double().mean()))
    assert cost.flops == counter.get_total_flops()
    width = D_OUT + (D_MODEL if variant == "gated" else 0)
    assert cost.gathered == 2 * rows * width


@pytest.mark.parametrize("variant", ["gated", "plain"])
def test_sparse_bytes(variant: str) -> None:
    neuron = D_OUT + (D_MODEL if variant == "gated" else 0)
    always = 2 * (D_MODEL + D_MODEL * D_FF + D_OUT)  # x, the weights whose product is activated, and y, for one token
    empty = sparse_cost(layer(variant), 1, 0.0)
    assert empty == Cost(2 * D_MODEL * D_FF, always + 4 * 3, 0)  # the counts of three tiles, the last of them narrower
    one = sparse_cost(layer(variant), 1, 0.25)
    assert one.bytes == always + 4 * (3 + 150) + 2 * 150 * neuron
    assert one.gathered == 2 * 150 * neuron
    assert sparse_cost(layer(variant), 64, 1.0).flops == dense_cost(layer(variant), 64).flops
    # Of many tokens each neuron fires for some: all rows are needed once, and no more than that.
    many, rows = sparse_cost(layer(variant), 10_000, 0.25), 10_000 * 150
    assert many.gathered == 2 * rows * neuron
    assert many.bytes == 2 * (10_000 * (D_MODEL + D_OUT) + D_MODEL * D_FF + D_FF * neuron) + 4 * (rows + 30_000)


def test_rows_of_several_tokens() -> None:
    """The expected number of neurons that fire for any of the tokens, against drawing them."""
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.rand(2000, 8, D_FF, generator=generator) < 0.1).any(1).sum(1).double().mean()
    bytes_without_rows = 2 * (8 * (D_MODEL + D_OUT) + D_MODEL * D_FF) + 4 * 8 * (60 + 3)
    rows = (sparse_cost(layer("plain"), 8, 0.1).bytes - bytes_without_rows) / (2 * D_OUT)
    assert rows == pytest.approx(float(drawn), rel=0.01)


@pytest.mark.parametrize("variant", ["gated", "plain"])
def test_experts(variant: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One token reads two experts, and is computed by them; many tokens read each of the eight. A row names both."""
    mixture, one = layer(variant, experts=8, top=2), layer(variant)
    for cost in (dense_cost, functools.partial(sparse_cost, density=0.25)):
        found, single = cost(mixture, tokens=1), cost(one, tokens=1)
        assert (found.flops, found.gathered) == (2 * single.flops, 2 * single.gathered)
        assert found.bytes == 2 * single.bytes - 2 * (D_MODEL + D_OUT)  # x and y are there once
        many, of_block = cost(mixture, tokens=10_000), cost(one, tokens=20_000)
        weights = (1 + (variant == "gated")) * D_MODEL * D_FF + D_FF * D_OUT
        assert many.bytes == of_block.bytes + 2 * 7 * weights - 2 * 10_000 * (D_MODEL + D_OUT)
        assert many.flops == of_block.flops
    (kernels,) = list_kernels([mixture], 16, "H100").blocks
    assert kernels.route == "experts" and kernels.launches[-1].startswith("experts_add")
    print_layers([mixture])
    assert "2 of 8" in capsys.readouterr().out


def test_totals_and_blocks_left_dense() -> None:
    rewritten, dense = layer("gated"), layer("plain", decision="dense")
    found = count_costs([rewritten, dense], 16, 0.01)
    assert found.layers[1].sparse == found.layers[1].dense
    assert found.layers[0].sparse.flops < found.layers[0].dense.flops
    for form in ("dense", "sparse"):
        for quantity in ("flops", "bytes", "gathered"):
            costs = [getattr(getattr(row, form), quantity) for row in found.layers]
            assert getattr(getattr(found.total, form), quantity) == sum(costs)
    assert count_costs([], 16, 0.01).total.dense.flops == 0


def test_what_a_profile_knows_is_not_assumed() -> None:
    """Sparse counts are of the neurons that are left, dense ones of all."""
    pruned = layer("gated", neurons=Neurons(kept=D_FF - 200, unable=0, dead=200, density=0.25))
    unknown = layer("gated", module="other", neurons=Neurons(kept=D_FF, unable=0, dead=0))
    found = count_costs([pruned, unknown], 16, 0.01)
    assert [row.density for row in found.layers] == [0.25, None]
    assert found.layers[0].sparse == sparse_cost(layer("gated", d_ff=D_FF - 200), 16, 0.25)
    assert found.layers[1].sparse == sparse_cost(layer("gated"), 16, 0.01)
    assert [row.dense for row in found.layers] == [dense_cost(layer("gated"), 16)] * 2


def test_inspect_counts_in_every_kind_of_file(cli: Cli, tmp_path: Path) -> None:
    """A model, the plan and the rewritten graph of it have the same blocks, so the same counts."""
    model, plan, graph = tmp_path / "m.pt2", tmp_path / "m.plan", tmp_path / "m.onnx"
    torch.export.save(export(Residual(Gated(d_ff=320)).bfloat16(), torch.randn(4, 16).bfloat16()), model)
    assert cli("compile", model, "-o", plan, "--onnx", graph).exit_code == 0
    row = layer("gated", module="ffn", d_model=16, d_ff=320, d_out=16)
    expected = count_costs([row], tokens=7, density=0.125)
    for target in (model, plan, graph):
        found = json.loads(cli("inspect", target, "--json", "--tokens", 7, "--density", 0.125).stdout)
        assert found["cost"] == expected.to_json()
    for target, kind in ((plan, "a plan"), (graph, "a rewritten graph")):
        failed(cli("inspect", target, "--dtype", "bf16"), "--dtype bf16: what is compiled keeps", f"{target}, {kind}")
        failed(cli("inspect", target, "--weights", "fp8"), "--weights fp8: what is compiled keeps", f"{target}, {kind}")
        failed(
            cli("inspect", target, "--input-spec", "x:float32[2]"),
            "--input-spec: only a pickled module needs",
            str(target),
        )
    shown = cli("inspect", plan, "--tokens", 7, "--density", 0.125).stdout
    assert "7 tokens a call, at an assumed density of 12.5 %" in shown
    assert "no prediction of time" in shown
    assert "0.000215" in shown  # GFLOP, dense: 2 · 7 · 3 · 16 · 320
    assert "at an assumed density of 0.5 %" in cli("inspect", graph).stdout


def test_inspect_shows_plugin_nodes(cli: Cli, tmp_path: Path) -> None:
    """Their fields, and how many neurons are hot in a graph that does not say what its layers were."""
    onnx.save(gated("fp16", biases=True), tmp_path / "m.onnx")
    # The report has the name that the manifest of a plan called so would have.
    graph, report = tmp_path / "g.onnx", tmp_path / "g.onnx.json"
    options = ["--backend", "none", "--onnx", graph, "--compression", 4, "--manifest", report]
    assert cli("compile", tmp_path / "m.onnx", *options).exit_code == 0
    found = json.loads(cli("inspect", graph, "--json").stdout)
    assert found["kind"] == "rewritten ONNX file"
    (node,) = found["nodes"]
    flags = {"gate_bias": 1, "up_bias": 1, "down_bias": 1, "residual": 0, "scales": 0, "thresholds": 0}
    flags |= {"norm_weight": 0, "norm_bias": 0}
    identity = {"plugin_version": "twellc-3", "plugin_namespace": "twell"}
    options_of_node = {"activation": "relu", "threshold": 0.0, "compression": 4, "hot": 0, "norm": "none", "eps": 0.0}
    assert node["fields"] == {**options_of_node, **flags, **identity}
    shown = cli("inspect", graph).stdout
    assert all(f"{name}={value}" in shown for name, value in node["fields"].items())

    def heat(model: onnx.ModelProto) -> None:
        (hot,) = (each for each in twell_nodes(model)[0].attribute if each.name == "hot")
        hot.i = 24
        del model.metadata_props[:]

    changed(graph, tmp_path / "hot.onnx", heat)
    assert "rewritten, 24 hot" in cli("inspect", tmp_path / "hot.onnx").stdout
    (row,) = json.loads(cli("inspect", tmp_path / "hot.onnx", "--json").stdout)["layers"]
    assert row["hot"] == 24


def test_inspect_without_blocks_counts_nothing(cli: Cli, tmp_path: Path) -> None:
    torch.export.save(export(torch.nn.Linear(16, 16), torch.randn(4, 16)), tmp_path / "m.pt2")
    result = cli("inspect", tmp_path / "m.pt2")
    assert result.exit_code == 0
    assert "no feed-forward blocks" in result.stdout
    assert "density" not in result.stdout


def test_inspect_a_node_without_known_widths(cli: Cli, tmp_path: Path) -> None:
    """Its weights are inputs of a graph of another origin."""
    node = onnx.helper.make_node("TwellMlp", list("xud"), ["y"], "node", domain="twell", activation="relu")
    kind = onnx.TensorProto.BFLOAT16
    *inputs, output = (onnx.helper.make_tensor_value_info(name, kind, ["a", "b"]) for name in "xudy")
    graph = onnx.helper.make_graph([node], "g", inputs, [output])
    opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("twell", 1)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "m.onnx")
    result = cli("inspect", tmp_path / "m.onnx")
    assert result.exit_code == 0, result.output
    assert "node: TwellMlp\n" in result.stdout, "no dtype or shapes of weights that are not known"
    (row,) = (line for line in result.stdout.splitlines() if line.startswith("│ node") and "rewritten" not in line)
    assert row.split("│")[4].strip() == "-", "no ratio of nothing"


def wide(**changes: Any) -> Layer:
    return layer("gated", **{"d_model": 2048, "d_ff": 5632, "d_out": 2048, **changes})


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
    (block,) = list_kernels([wide()], tokens, gpu).blocks
    assert block.route == route
    assert block.launches[0].startswith(kernel)


def test_hot_neurons_are_a_dense_block_of_their_own() -> None:
    (block,) = list_kernels([wide(hot=512)], 8192, "H200").blocks
    assert block.launches[0].startswith("hidden_gated_sm90")
    assert any(launch.startswith("sparse_down") for launch in block.launches)


def test_only_neurons_that_are_left_are_computed() -> None:
    pruned = wide(neurons=Neurons(kept=1024, unable=0, dead=5632 - 1024))
    assert list_kernels([pruned], 64, "H200").blocks == list_kernels([wide(d_ff=1024)], 64, "H200").blocks


def test_only_rewritten_blocks_have_kernels() -> None:
    layers = [wide(decision="dense"), wide(activation="silu"), wide(d_model=0, d_ff=0), wide(module="last")]
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
    assert "kernels on H200" in cli("inspect", model, "--target-gpu", "H200").output
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
