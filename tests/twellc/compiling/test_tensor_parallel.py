"""`--tensor-parallel`: a plan and a graph for each rank, what is told of them, and what cannot be done."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import twellc
from tests import models
from tests.conftest import Cli
from tests.onnx_graphs import gated
from tests.twellc.test_cli import failed
from twellc.base.errors import UserError

pytestmark = pytest.mark.usefixtures("compiles_here")


def collectives(path: Path) -> list[dict[str, Any]]:
    """Return the attributes of the collectives of a graph."""
    nodes = [node for node in onnx.load(path).graph.node if node.op_type == "DistCollective"]
    assert all(node.domain == "trt" for node in nodes)
    return [{each.name: onnx.helper.get_attribute_value(each) for each in node.attribute} for node in nodes]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_plan_for_each_rank(cli: Cli, tmp_path: Path, ranks: int) -> None:
    pytest.importorskip("tensorrt_rtx_bindings")
    model = models.save(models.llama(num_key_value_heads=4, num_hidden_layers=1), tmp_path / "llama")
    plan, graph = tmp_path / "out.plan", tmp_path / "out.onnx"
    done = cli("compile", model, "-o", plan, "--onnx", graph, "--tensor-parallel", ranks, "--backend", "tensorrt-rtx")
    assert done.exit_code == 0, done.output
    assert f"1 plugin layers, in {ranks} plans, one a GPU" in done.stdout
    plans = [tmp_path / f"out.plan.rank{rank}" for rank in range(ranks)]
    graphs = [tmp_path / f"out.rank{rank}.onnx" for rank in range(ranks)]
    assert sorted(tmp_path.iterdir()) == sorted([model, plan, tmp_path / "out.plan.json", *plans, *graphs])
    assert plan.is_symlink() and str(plan.readlink()) == "out.plan.rank0"
    manifest = json.loads((tmp_path / "out.plan.json").read_text())
    assert manifest["settings"]["tensor_parallel"] == ranks and manifest["plan"]["file"] == "out.plan"
    for each, made, written in zip(manifest["ranks"], plans, graphs, strict=True):
        for record, file in ((each["plan"], made), (each["onnx"], written)):
            assert (record["file"], record["sha256"]) == (file.name, hashlib.sha256(file.read_bytes()).hexdigest())
        assert len(each["plan"]["plugin_layers"]) == 1
        expected = {"collective_operation": b"all_reduce", "reduce_op": b"sum", "root": -1, "group_size": 0}
        assert collectives(written) == [{**expected, "nb_rank": ranks}] * 2
    # Each has its own neurons, and an equal number of them.
    weights = [
        {tuple(onnx.numpy_helper.to_array(each).shape) for each in onnx.load(path).graph.initializer} for path in graphs
    ]
    assert all((320 // ranks, 32) in shapes and (320, 32) not in shapes for shapes in weights)
    # Again over what is there, and what it is to `inspect` and `check`.
    assert cli("compile", model, "-o", plan, "--tensor-parallel", ranks, "--overwrite").exit_code == 0
    assert cli("inspect", plan).exit_code == 0
    message = f"is the plan of one of several ranks, whose manifest is for all of them; got {plan.name}.json"
    failed(cli("inspect", plans[1]), message)
    for candidate in (plan, graphs[0]):
        failed(cli("check", model, candidate), f"computes a part of the model, for one of {ranks} GPUs")


def test_nothing_is_overwritten_unasked(cli: Cli, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "m.rank1.onnx").write_text("mine")
    outputs = ("--backend", "none", "--onnx", tmp_path / "m.onnx")
    failed(cli("compile", llama, *outputs, "--tensor-parallel", 2), "m.rank1.onnx: the file exists already")
    assert [path.name for path in tmp_path.iterdir()] == ["m.rank1.onnx"]


def test_graphs_alone(cli: Cli, archive: Path, tmp_path: Path) -> None:
    done = cli("compile", archive, "--backend", "none", "--onnx", tmp_path / "m.onnx", "--tensor-parallel", 2)
    assert done.exit_code == 0, done.output
    assert f"{tmp_path}/m.rank0.onnx: ONNX, bf16, in 2 graphs, one a GPU; no plan was built" in done.stdout
    made = twellc.compile(archive, backend="none", onnx=tmp_path / "m.onnx", tensor_parallel=2, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.rank0.onnx", "m.rank1.onnx"]
    assert made.ranks is not None and [each.onnx.file for each in made.ranks] == ["m.rank0.onnx", "m.rank1.onnx"]
    assert made.plan is None and made.warnings == []
    # Before it is evaluated, which its collectives cannot be.
    failed(cli("check", archive, tmp_path / "m.rank0.onnx"), "computes a part of the model, for one of 2 GPUs")


def test_a_model_that_keeps_parts_whole_says_so(tmp_path: Path) -> None:
    class Normed(models.Gated):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.relu(self.gate(x)) * self.up(x)
            return self.down(torch.nn.functional.rms_norm(h, h.shape[-1:]))  # type: ignore[no-any-return]

    module = torch.nn.Sequential(Normed(d_ff=320), models.Gated(d_ff=320)).bfloat16().eval()
    x = torch.randn(2, 16).bfloat16()
    made = twellc.compile(module, args=(x,), backend="none", onnx=tmp_path / "m.onnx", tensor_parallel=2)
    assert [note for note in made.notes if note.startswith("block 0 stays whole on every rank: ")]


@pytest.mark.slow
def test_all_reduces_that_are_not_in_order(t5: Path, tmp_path: Path) -> None:
    """The decoder begins beside the encoder."""
    made = twellc.compile(t5, backend="none", onnx=tmp_path / "m.onnx", tensor_parallel=2)
    (warning,) = made.warnings
    assert warning.startswith("not every all-reduce depends on the one before it")


def test_triton(cli: Cli, archive: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx_bindings")
    options = ("--triton", tmp_path, "--tensor-parallel", 2, "--backend", "tensorrt-rtx")
    two = ("--optimization-profile", "x:1x3x16:1x3x16:1x3x16", "--optimization-profile", "x:2x3x16:2x3x16:4x3x16")
    message = "--optimization-profile: Triton runs plans for several GPUs with one optimization profile; got 2 profiles"
    failed(cli("compile", archive, *options, *two), message)
    assert list(tmp_path.iterdir()) == []
    assert cli("compile", archive, *options).exit_code == 0
    folder = tmp_path / "gated"
    names = ["1", "config.pbtxt", "model.plan", "model.plan.json", "model.plan.rank0", "model.plan.rank1"]
    assert sorted(path.name for path in folder.rglob("*")) == names
    assert (folder / "1" / "model.plan").readlink() == Path("model.plan.rank0")
    config = (folder / "config.pbtxt").read_text()
    assert "KIND_MODEL" in config and 'key: "multi_device_gpus" value: { string_value: "0,1" }' in config


def test_graphs_of_ranks_that_are_no_more(cli: Cli, archive: Path, tmp_path: Path) -> None:
    command = ["compile", archive, "--backend", "none", "--onnx", tmp_path / "m.onnx", "--layers", "none"]
    assert cli(*command, "--tensor-parallel", 2).exit_code == 0
    (tmp_path / "m.rank7.onnx").write_text("mine")
    message = "for more GPUs wrote to the same place; got m.rank0.onnx, m.rank1.onnx. Add --overwrite"
    failed(cli(*command), message)
    assert not (tmp_path / "m.onnx").exists()
    done = cli(*command, "--overwrite")
    assert done.exit_code == 0 and "were removed: m.rank0.onnx, m.rank1.onnx" in done.stderr
    assert sorted(path.name for path in tmp_path.glob("m.*")) == ["m.onnx", "m.rank7.onnx"]


def test_plans_of_ranks_that_are_no_more(cli: Cli, archive: Path, tmp_path: Path) -> None:
    """Those that were written here go; a file that is not as it was written may belong to another program."""
    pytest.importorskip("tensorrt_rtx_bindings")
    command = ["compile", archive, "-o", tmp_path / "m.plan", "--backend", "tensorrt-rtx", "--layers", "none"]

    def plans(*options: object) -> tuple[list[str], str]:
        done = cli(*command, *options)
        assert done.exit_code == 0, done.output
        return sorted(path.name for path in tmp_path.glob("m.plan*")), done.stderr

    ranks = ["m.plan.rank0", "m.plan.rank1", "m.plan.rank2", "m.plan.rank3"]
    found, stderr = plans("--tensor-parallel", 4)
    assert found == ["m.plan", "m.plan.json", *ranks]
    assert "removed" not in stderr
    with (tmp_path / ranks[3]).open("ab") as file:
        file.write(b"mine")
    found, stderr = plans("--tensor-parallel", 2, "--overwrite")
    assert found == ["m.plan", "m.plan.json", *ranks[:2], ranks[3]]
    assert "files that an earlier compilation for more GPUs wrote were removed: m.plan.rank2." in stderr
    found, stderr = plans("--overwrite")
    assert found == ["m.plan", "m.plan.json", ranks[3]]
    assert "wrote were removed: m.plan.rank0, m.plan.rank1." in stderr
    assert not (tmp_path / "m.plan").is_symlink()


@pytest.mark.slow
def test_calibrated_ranks_have_equal_activity(llama: Path, tmp_path: Path) -> None:
    """The neurons that fire are dealt out: by their numbers, the first rank would have all of the hot ones."""
    ids = torch.randint(3, 96, (8, 32), generator=torch.Generator().manual_seed(0))
    profile = twellc.profile(llama, {"input_ids": ids}, tmp_path / "p.profile")
    options: dict[str, Any] = {"backend": "none", "tensor_parallel": 2, "firing_profile": tmp_path / "p.profile"}
    made = twellc.compile(llama, onnx=tmp_path / "m.onnx", layers="all", **options)
    assert [layer.kept for layer in made.layers] == [320, 320]
    weight = models.llama().to(torch.bfloat16).model.layers[0].mlp.gate_proj.weight.detach().float().numpy()
    rates = profile.blocks["model.layers.0.mlp"].rates
    shares = []
    for rank in range(2):
        stored = onnx.load(tmp_path / f"m.rank{rank}.onnx").graph.initializer
        arrays = map(onnx.numpy_helper.to_array, stored)
        rows = [each.astype(np.float32) for each in arrays if each.shape == (160, 32)]
        (gate,) = (each for each in rows if (each[0] == weight).all(1).any())
        own = [int(np.flatnonzero((weight == row).all(1))[0]) for row in gate]
        shares.append(rates[own].sum())
    assert abs(shares[0] - shares[1]) < 0.02 * sum(shares)


HEADS = "has 4 heads of queries and 2 of keys and values; expected a number that divides both"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 3}, HEADS),
        ({"tensor_parallel": 4}, HEADS),
        (
            {"tensor_parallel": 1000},
            "the block model.layers.0.mlp has 320 neurons; expected one for each rank at least",
        ),
        ({"tensor_parallel": 0}, "--tensor-parallel: is out of its range; got 0; expected an integer from 1 on."),
        ({"tensor_parallel": True}, "--tensor-parallel: is not an integer; got True"),
    ],
)
def test_numbers_that_do_not_fit(llama: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        twellc.compile(llama, backend="none", onnx=tmp_path / "m.onnx", **options)
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_onnx_files_cannot_be_shared(cli: Cli, tmp_path: Path) -> None:
    onnx.save(gated(), tmp_path / "m.onnx")
    options = ("--backend", "none", "--onnx", tmp_path / "o.onnx", "--tensor-parallel", 2)
    failed(cli("compile", tmp_path / "m.onnx", *options), "--tensor-parallel 2: an ONNX file cannot be shared")


@pytest.mark.parametrize("rank", [2, -1, "0"])
def test_ranks_that_there_are_not(rank: Any) -> None:
    with pytest.raises(UserError, match=r"^rank: there is no such rank; got .*; expected 0 to 1\.$"):
        twellc.rewrite(models.Gated().eval(), args=(torch.randn(2, 16),), tensor_parallel=2, rank=rank)
