"""One list of passes: what each does shows in its graph, and every command takes its passes from there."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import twellc
from tests.conftest import Cli
from tests.models import BATCH, D_MODEL, SEQUENCE, Gated, export
from twellc.passes import pipeline
from twellc.passes.dump import GraphDump
from twellc.passes.pipeline import STEPS, PassOptions, Rewritten, Stage, run_until

ROOT = Path(__file__).resolve().parents[2]
X = torch.randn(2, 8, 4)


class Everything(nn.Module):
    """Has something for each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv1d(8, 32, 1), nn.Conv1d(32, 8, 1)
        self.scale = nn.Parameter(torch.linspace(0.5, 2, 32))
        self.block = Gated(d_model=8, d_ff=32)
        self.narrow = nn.Parameter(torch.eye(8).to(torch.float8_e4m3fn), requires_grad=False)
        self.experts = nn.ParameterList([torch.randn(2, 16, 8), torch.randn(2, 8, 16)])

    def mixture(self, x: Tensor) -> Tensor:
        weights, ids = x[:, :2].topk(1)
        rows, (up, down) = x.repeat_interleave(1, 0), (each[ids.view(-1)] for each in self.experts)
        hidden = torch.bmm(up, rows.unsqueeze(-1)).squeeze(-1).relu()
        return (torch.bmm(down, hidden.unsqueeze(-1)).squeeze(-1) * weights.view(-1, 1)).view(-1, 1, 8).sum(1)

    def forward(self, x: Tensor) -> Tensor:
        z = nn.functional.conv1d(x.add_(1.0), self.up.weight * self.scale[:, None, None])
        y = torch.maximum(self.down(z * (z > 0).type_as(z) / 2), torch.tensor(0.5))
        seen = nn.functional.linear(y.transpose(1, 2), self.narrow.float() * 0.5) + self.block(y.transpose(1, 2))
        seen = seen + self.mixture(seen.reshape(-1, 8)).view_as(seen)
        return nn.functional.scaled_dot_product_attention(seen[:, None], seen[:, None], seen[:, None])


def dumped(module: nn.Module, folder: Path) -> dict[str, str]:
    program = export(module.eval().requires_grad_(False), X.clone())
    options = PassOptions(torch.bfloat16, "all", attention=("matmul",), linear="twell", dump=GraphDump(folder))
    pipeline.run_passes(program, options)
    return {path.stem.partition("-")[2]: path.read_text() for path in sorted(folder.iterdir())}


def test_each_pass_is_seen(tmp_path: Path) -> None:
    graphs = dumped(Everything(), tmp_path)
    assert list(graphs) == [
        "traced", "decompose", "name_casts", "dequantize", "write_numbers", "merge_views", "name_relus", "fold_weights",
        "fold_constants", "feature_last", "in_precision", "rewrite_ffn", "rewrite_experts", "rewrite_attention",
        "caches_in_fp8", "rewrite_linear", "rotate_in_caches",
    ]  # fmt: skip
    assert graphs.pop("rotate_in_caches") == graphs["rewrite_linear"]  # there is no cache
    assert graphs.pop("caches_in_fp8") == graphs["rewrite_attention"]  # likewise
    texts = list(graphs.values())
    assert all(before != after for before, after in itertools.pairwise(texts))
    expected = {
        "decompose": "aten.add.Tensor", "name_casts": "aten._to_copy.default",
        "write_numbers": "aten.full.default", "name_relus": "aten.relu.default",
        "feature_last": "aten.linear.default", "in_precision": "bf16", "rewrite_ffn": "twell.gated_mlp.default",
        "rewrite_experts": "twell.experts.default",
        "rewrite_attention": "aten.matmul.default", "rewrite_linear": "twell.linear.default",
    }  # fmt: skip
    before = dict(zip(graphs, ["", *texts], strict=False))
    for name, operation in expected.items():
        assert graphs[name].count(operation) > before[name].count(operation), name
    views = [text.count("aten.transpose.int") for text in (before["merge_views"], graphs["merge_views"])]
    assert views[1] < views[0]


def test_every_pass_is_in_the_list() -> None:
    """Each file beside pipeline.py is a pass, or one of those that are named here."""
    others = {"__init__", "pipeline", "dump", "block_profile"}
    files = {path.stem for path in (ROOT / "twellc/passes").glob("*.py")} - others
    # Steps and the files that they call have the same names but for these.
    renamed = {"in_precision": "precision", "dequantize": "fp8", "rewrite_attention": "attention",
               "stay": "neurons", "order": "neurons", "share": "neurons"}  # fmt: skip
    steps = {each.name for steps in STEPS.values() for each in steps} - {"find", "find_linear"}
    assert files == {renamed.get(name, name) for name in steps}
    assert list(STEPS) == sorted(STEPS) == list(Stage)[1:]


COMPILE = ("compile", "MODEL", "--backend", "none", "--onnx")
COMMANDS: dict[str, tuple[str, ...] | Callable[[Path], object]] = {
    "compile": (*COMPILE, "m.onnx", "--overwrite"),
    "compile for ranks": (*COMPILE, "ranks.onnx", "--tensor-parallel", "2"),
    "inspect": ("inspect", "MODEL"),
    "profile": lambda model: twellc.profile(model, {"x": torch.randn(BATCH, SEQUENCE, D_MODEL).bfloat16()}),
    "check": ("check", "MODEL", "m.onnx"),
    "optimize": lambda model: twellc.optimize(Gated(d_model=8, d_ff=32)),
}


def run_command(name: str, cli: Cli, model: Path, folder: Path) -> None:
    command = COMMANDS[name]
    if not isinstance(command, tuple):
        command(model)
        return
    words = [model if word == "MODEL" else folder / word if word.endswith(".onnx") else word for word in command]
    assert cli(*words).exit_code == 0


FOR_RANKS = {Stage.SHARE, Stage.SPLIT}
ALL = set(STEPS) - FOR_RANKS
UP_TO_DECIDE = {stage for stage in STEPS if stage <= Stage.DECIDE}


@pytest.mark.parametrize(
    ("command", "stages"),
    [
        ("compile", ALL),
        ("compile for ranks", ALL | FOR_RANKS),
        ("inspect", ALL - {Stage.FFN, Stage.LINEAR}),
        ("profile", UP_TO_DECIDE),
        ("check", UP_TO_DECIDE),
        ("optimize", {stage for stage in STEPS if stage <= Stage.FIND}),
    ],
)
def test_commands_take_their_steps_from_the_list(
    command: str, stages: set[Stage], cli: Cli, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that is added to a stage is run by every command that comes there."""
    run_command("compile", cli, archive, tmp_path)
    ran = set()

    def added(stage: Stage) -> pipeline.Step:
        def run(passed: Rewritten, options: PassOptions) -> Rewritten:
            ran.add(stage)
            return passed

        return pipeline.Step("added", run)

    for stage, steps in STEPS.items():
        monkeypatch.setitem(STEPS, stage, (*steps, added(stage)))
    run_command(command, cli, archive, tmp_path)
    assert ran == stages


def test_a_run_goes_on_where_another_has_stopped() -> None:
    """And gives what one run gives; a stage that is left out is not run later."""
    program = export(Everything().eval().requires_grad_(False), X.clone())
    options = PassOptions(torch.bfloat16, "all", attention=("matmul",), linear="twell")
    whole = pipeline.run_passes(program, options)
    passed = Rewritten(program, program)
    for stage in STEPS:
        passed = run_until(passed, options, stage)
        assert passed.stage == stage
    assert passed.layers == whole.layers and passed.attention == whole.attention
    assert passed.linear == whole.linear
    assert passed.program.graph_module.code == whole.program.graph_module.code
    left_out = run_until(program, options, Stage.FIND, without=(Stage.ARRANGING,))
    assert "conv1d" in left_out.program.graph_module.code
    assert "conv1d" in run_until(left_out, options, Stage.ATTENTION).program.graph_module.code


def test_copies_of_weights_are_made_where_the_program_goes() -> None:
    """None of them is in the host's memory, and all else is as it was."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.block = nn.RMSNorm(D_MODEL), Gated()
            self.q, self.k = (nn.Linear(D_MODEL, D_MODEL, bias=False) for _ in "qk")

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            return self.block(self.q(y) * self.k(y))

    program = export(Layer().bfloat16(), torch.randn(BATCH, SEQUENCE, D_MODEL).bfloat16())
    options = PassOptions(layers="all", linear="twell")
    here = pipeline.run_passes(program, options).program
    there = pipeline.run_passes(program, replace(options, device=torch.device("meta"))).program
    assert there.graph_module.code == here.graph_module.code
    moved = {name for name, tensor in there.state_dict.items() if tensor.is_meta}
    assert moved == there.state_dict.keys() - program.state_dict.keys() and len(moved) == 2
    for node in there.graph.find_nodes(op="placeholder"):
        assert node.meta["val"].device.type == "cpu"


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_products_of_several_dtypes(low: torch.dtype, tmp_path: Path, cli: Cli) -> None:
    """torch exports a bfloat16 module with a float32 input, and cannot compute it."""
    module = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)).to(low).eval()
    torch.export.save(torch.export.export(module, (torch.randn(4, 16),)), tmp_path / "m.pt2")
    done = cli("compile", tmp_path / "m.pt2", "--backend", "none", "--onnx", tmp_path / "m.onnx")
    assert done.exit_code == 2
    message = " ".join(done.stderr.split())
    name = str(low).removeprefix("torch.")
    assert f"has operands of several dtypes; got float32 and {name}" in message
    assert "Export the model with inputs in the dtype of its weights" in message
    assert not (tmp_path / "m.onnx").exists()
