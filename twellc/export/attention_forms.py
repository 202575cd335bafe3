"""Choose the forms of attention that the TensorRT at hand computes fastest; `twellc/passes/attention.py` has them."""

from __future__ import annotations

import ctypes

import onnx
from onnx import TensorProto, helper

from twellc.base.errors import UserError
from twellc.export.tensorrt_host import choose_host, compute_capability, create_network, load_host, make_logger
from twellc.passes.attention import CUDNN, MATMUL, OPERATOR
from twellc.plugins.library import AttentionProblem, load_attention
from twellc.plugins.registration import load_cudnn

# Where cuDNN was measured faster than what TensorRT has: benchmarks/README.md.
_CUDNN_IS_FASTER = {("tensorrt", (9, 0))}


def choose_forms(backend: str, attention: str, cached: bool = False) -> tuple[str, ...]:
    """Return the forms to write attention in, the best first.

    Args:
        backend: `auto`, `tensorrt`, `tensorrt-rtx` or `none`, as for `compile`.
        attention: What computes attention: `auto`, `tensorrt` or `cudnn`. `auto` takes cuDNN where it is at hand and
            was measured faster than TensorRT on this architecture.
        cached: Whether keys and values are in a cache. TensorRT 10 then has nothing for lengths but a mask, so `auto`
            takes cuDNN wherever it is at hand.

    Raises:
        UserError: cuDNN is asked for, and cannot be had.
    """
    host = None if backend == "none" else choose_host(backend)
    own = OPERATOR if host is not None and takes_operator(host) else MATMUL
    if attention == "tensorrt":
        return (own,)
    gpu = compute_capability()
    is_faster = (host, gpu) in _CUDNN_IS_FASTER or (cached and host == "tensorrt" and gpu is not None)
    if attention == "auto" and not is_faster:
        return (own,)
    obstacle = "" if host is None else why_no_cudnn(cached)
    if obstacle and attention == "cudnn":
        raise UserError("--attention cudnn", obstacle, fix="Use --attention tensorrt, or install what is missing.")
    return (own,) if obstacle else (CUDNN, own)


def why_no_cudnn(cached: bool = False) -> str:
    """Say why the attention plugin cannot be used here, over caches or without, or return an empty string."""
    library = load_attention()
    if library is None:
        return "libtwell_attention.so is not there: this twellc was built without cuDNN's headers"
    if compute_capability() is None:
        return ""  # a plan can be built without a GPU, and runs elsewhere
    load_cudnn()
    problem = AttentionProblem(batch=1, tokens=64, keys=64, heads=1, kv_heads=1, width=64, dtype=0, scale=1.0,
                               causal=int(not cached), cached=int(cached))  # fmt: skip
    message = ctypes.create_string_buffer(512)
    plan = library.twell_attention_create(ctypes.byref(problem), message, len(message))
    if not plan:
        return message.value.decode(errors="replace")
    library.twell_attention_destroy(plan)
    return ""


def takes_operator(host_name: str) -> bool:
    """Whether the ONNX parser of a TensorRT takes Attention, causal and with a mask, as one layer."""
    host = load_host(host_name)
    logger = make_logger(host, [])
    network = create_network(host, host.module.Builder(logger))
    parser = host.module.OnnxParser(network, logger)
    return bool(parser.parse(_attention_model().SerializeToString()))


def _attention_model() -> onnx.ModelProto:
    def tensor(name: str, *shape: int | str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.BFLOAT16, shape)

    nodes = [
        helper.make_node("Attention", ["q", "k", "v"], ["y"], is_causal=1, scale=1.0),
        helper.make_node("Attention", ["y", "k", "v", "mask"], ["z"], scale=1.0),
    ]
    q, y = (tensor(name, "batch", 4, "tokens", 64) for name in "qz")
    k, v = (tensor(name, "batch", 2, "tokens", 64) for name in "kv")
    graph = helper.make_graph(nodes, "attention", [q, k, v, tensor("mask", "batch", 1, "tokens", "tokens")], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
