"""What needs no GPU of benchmarks/engine.py: its shapes, its kinds of layers on a real network, and its page."""

from pathlib import Path
from typing import Any

import pytest

from twellc.compiling.translate import translate_any
from twellc.export.onnx_export import save_onnx
from twellc.export.tensorrt_host import create_network, load_host, make_logger
from twellc.options.commands import CompileOptions
from twellc.plugins import register


def network_of(model: Path, layers: str, folder: Path) -> list[Any]:
    path = folder / "m.onnx"
    save_onnx(translate_any(CompileOptions(model, backend="none", layers=layers), lambda step: None).graph, path)
    host = load_host("tensorrt-rtx")
    register(host.module)
    logger = make_logger(host, [])
    network = create_network(host, host.module.Builder(logger))
    assert host.module.OnnxParser(network, logger).parse_from_file(str(path))
    return [network.get_layer(i) for i in range(network.num_layers)]


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["all", "none"])
def test_kinds_of_layers(engine: Any, llama: Path, tmp_path: Path, layers: str) -> None:
    """Each kind is found in the layers that TensorRT's parser makes, by the node that it notes for each of them."""
    found: dict[str, set[str]] = {}
    for layer in network_of(llama, layers, tmp_path):
        (node,) = engine.onnx_nodes(layer.metadata) or [""]
        found.setdefault(engine.kind_of("", [node]), set()).add(node)
    assert set(found) == set(engine.TABLE_KINDS)

    def scopes(kind: str) -> set[str]:
        return {node.rpartition("/")[0] for node in found[kind]}

    blocks = ("mlp.down_proj/gated_mlp",) if layers == "all" else ("mlp.gate_proj/linear", "mlp.down_proj/linear")
    for block in blocks:
        assert any(f"model.layers.1.{block}" in scope for scope in scopes("feed-forward")), scopes("feed-forward")
    assert {scope.partition("/")[0] for scope in scopes("projections")} == {
        f"model.layers.{i}.self_attn.{name}_proj" for i in range(2) for name in "qkvo"
    }
    assert {scope.partition("/")[0] for scope in scopes("norms")} == {
        *(f"model.layers.{i}.{name}_layernorm" for i in range(2) for name in ("input", "post_attention")),
        "model.norm",
    }
    assert any(scope.startswith("model.rotary_emb/cos") for scope in scopes("rotary"))
    assert any(".self_attn/" in scope for scope in scopes("rotary"))
    assert any("softmax" in node for node in found["attention"]), found["attention"]
    assert {scope.partition("/")[0] for scope in scopes("logits")} == {"lm_head"}
    assert not any(".self_attn" in scope or ".mlp" in scope for scope in scopes("rest"))


def test_fused_layers(engine: Any) -> None:
    """A layer of many nodes is of the kind that weighs most among them."""
    assert engine.kind_of("_gemm_mha_v2_myl0_5", ["model.layers.0.self_attn/mul_1/node_mul_1"]) == "attention"
    norm = ["model.layers.0/add_3/node_add_3", "model.layers.0.post_attention_layernorm/mean/node_mean"]
    assert engine.kind_of("__myl_AddMean_myl0_7", norm) == "norms"
    product = ["model.layers.0.self_attn.o_proj/linear_3/node_linear_3", "model.layers.0/add_3/node_add_3"]
    assert engine.kind_of("gemm_myl0_6", product) == "projections"
    keys = ["model.layers.0.self_attn/mul_1/node_mul_1", "model.layers.0.self_attn/transpose_1/node_transpose_1"]
    assert engine.kind_of("__myl_MulTran_myl0_4", keys) == "rotary"
    assert engine.kind_of("reformat", []) == "rest"


def test_page(engine: Any) -> None:
    def times(**milliseconds: float) -> dict[str, Any]:
        names = {"ours": "plan twell", "plan": "plan dense", "user": "torch dense compiled, sdpa"}
        names |= {"narrow": "plan twell FP8", "rival": "torch dense FP8, causal"}
        names["best"] = "torch dense compiled, causal"
        values = {names[name]: 1e3 * value for name, value in milliseconds.items()}
        return {label: {"median_us": value, "p10_us": value, "p90_us": value} for label, value in values.items()}

    kinds = dict.fromkeys(engine.TABLE_KINDS, 100.0)
    results = [
        {
            "shape": "1x512",
            "times": times(ours=2, plan=3, user=4, best=2.5, narrow=1.5, rival=1.8),
            "errors": {"plan twell": 0.0051},
            "layers": {"plan twell": {"kinds_us": kinds, "sum_us": 700.0}},
            "failed": {},
        },
        {"shape": "1x1", "times": times(user=1), "errors": {}, "layers": {}, "failed": {"plan twell": "no room"}},
    ]
    report = {"machine": {}, "density": {}, "parameters": 10**9, "failed": {}, "results": results}
    page = engine.markdown(report, "a model")
    for line in (
        "| plan twell | 2.000 (2.000 to 2.000) | - |",
        "| plan twell over the dense plan | 1.50 | - |",
        "| plan twell over compiled dense torch, sdpa | 2.00 | - |",
        "| plan twell over the fastest dense torch | 1.25 | - |",
        "| plan twell FP8 over the dense plan | 2.00 | - |",
        "| plan twell FP8 over the fastest dense torch in FP8 | 1.20 | - |",
        "| sum | 700.0 |",
        "| in a CUDA graph | 2000.0 |",
        "| plan twell | 0.0051 | - |",
        "- 1x1, plan twell: no room",
    ):
        assert line in page.splitlines()
