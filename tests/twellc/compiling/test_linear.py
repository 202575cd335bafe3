"""`--linear`: what is written and said of linear layers outside of the blocks, and what is refused."""

from pathlib import Path

import onnx
import pytest

import twellc
from tests.conftest import Cli
from twellc.base.errors import UserError
from twellc.plugins.library import LINEAR_NAME

pytestmark = pytest.mark.usefixtures("remembered_models")


def nodes_in(graph: Path) -> list[onnx.NodeProto]:
    return [node for node in onnx.load(graph).graph.node if node.op_type == LINEAR_NAME]


def test_compile_and_inspect(cli: Cli, llama: Path, tmp_path: Path) -> None:
    graph = tmp_path / "m.onnx"
    manifest = twellc.compile(llama, backend="none", onnx=graph, linear="twell")
    assert manifest.linear is not None and {row.decision for row in manifest.linear} == {"twell"}
    assert [len(node.output) for node in nodes_in(graph)] == [len(row.widths) for row in manifest.linear]
    assert manifest.settings.linear == "twell" and LINEAR_NAME in manifest.plugins.names
    assert twellc.inspect(llama, linear="twell").description.linear == manifest.linear
    shown = cli("inspect", llama, "--linear", "twell").output
    assert "9 of 9 linear layers outside of blocks rewritten as 5: 3 with an RMSNorm, 2 with residual" in shown
    with pytest.raises(UserError, match="--linear: what becomes of the blocks is decided already"):
        twellc.inspect(graph, linear="twell")
    with pytest.raises(UserError, match="--linear twell: linear layers outside of blocks stay as they are in an ONNX"):
        twellc.compile(graph, backend="none", onnx=tmp_path / "again.onnx", linear="twell")


def test_auto_leaves_them(cli: Cli, llama: Path, tmp_path: Path) -> None:
    manifest = twellc.compile(llama, backend="none", onnx=tmp_path / "m.onnx")
    assert manifest.settings.linear is None and LINEAR_NAME not in manifest.plugins.names
    assert not nodes_in(tmp_path / "m.onnx")
    assert "0 of 9 linear layers outside of blocks rewritten" in cli("inspect", llama).output


@pytest.mark.slow
def test_with_a_cache(cli: Cli, opt: Path, tmp_path: Path) -> None:
    """The last norm stands before the logits of the last token alone."""
    graph = tmp_path / "m.onnx"
    sizes = {"kv_cache": 24, "batch": 2, "prefill_chunk": 8}
    manifest = twellc.compile(opt, backend="none", onnx=graph, linear="twell", **sizes)
    assert [row.norm for row in manifest.linear or ()] == ["layer", "none", "layer", "none", "layer"]
    done = cli("check", opt, graph)
    assert done.exit_code == 0 and "within tolerance" in done.output, done.output
