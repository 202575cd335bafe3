"""Load plugin libraries into one TensorRT and report what happened; run as a separate process by the tests.

A TensorRT cannot be unloaded and its flavours share module names, so each runtime has a fresh interpreter:

    python registry_child.py RUNTIME [--path DIR] LIBRARY... < request.json > report.json

RUNTIME is `rtx` (tensorrt_rtx_bindings) or `lean` (tensorrt_lean_bindings, found in DIR). A request holds "create",
cases of [plugin, phase, fields], and "build", cases for `build`.
"""

import argparse
import ctypes
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from twellc.plugins.library import PLUGIN_NAMESPACE, PLUGIN_VERSION


def create(trt: Any, registry: Any, plugin: str, phase: str, given: list[list[Any]]) -> bool:
    """Ask the creator of `plugin` for one with these fields, [name, type, value] each."""
    types = {"FLOAT32": np.float32, "INT32": np.int32, "INT64": np.int64}
    # A PluginField points into the data that it is made of and does not keep it alive.
    data = [
        value.encode() if kind == "CHAR" else np.array(value, dtype=types[kind]).reshape(-1) for _, kind, value in given
    ]
    fields = [
        trt.PluginField(name, values, getattr(trt.PluginFieldType, kind))
        for (name, kind, _), values in zip(given, data, strict=True)
    ]
    creator = registry.get_creator(plugin, PLUGIN_VERSION, PLUGIN_NAMESPACE)
    phase = getattr(trt.TensorRTPhase, phase)
    return creator.create_plugin("layer0", trt.PluginFieldCollection(fields), phase) is not None


def is_weight(name: str, extents: list[Any]) -> bool:
    """Say whether an input of the node is a random weight, and no input of the graph."""
    begin = ("w_", "b_", "weight", "bias", "norm_", "up", "gate", "down")
    return name.startswith(begin) and all(isinstance(size, int) for size in extents)


def make_onnx(case: dict[str, Any]) -> bytes:
    """Build an ONNX graph of one node, whose inputs are [name, dtype, extents] each, text for a dynamic extent.

    Its outputs are [dtype, extents] each. A block, which has one, is between two plain nodes.
    """
    from onnx import TensorProto, helper

    dtypes = {
        "bf16": TensorProto.BFLOAT16,
        "fp16": TensorProto.FLOAT16,
        "fp32": TensorProto.FLOAT,
        "fp8": TensorProto.FLOAT8E4M3FN,
        "int8": TensorProto.INT8,
        "int32": TensorProto.INT32,
        "int64": TensorProto.INT64,
    }
    rng = np.random.default_rng(0)
    inputs, weights = [], []
    for name, kind, extents in case["inputs"]:
        if not is_weight(name, extents):
            inputs.append(helper.make_tensor_value_info(name, dtypes[kind], extents))
            continue
        values = rng.standard_normal(extents, dtype=np.float32)
        if kind == "bf16":  # the upper half of a float32
            values = (values.view(np.uint32) >> 16).astype(np.uint16)
        elif kind == "fp16":
            values = values.astype(np.float16)
        elif kind in ("fp8", "int8"):
            values = values.astype(np.int8)  # small numbers
        weights.append(helper.make_tensor(name, dtypes[kind], extents, values.tobytes(), raw=True))
    outputs = [
        helper.make_tensor_value_info(f"y{i}", dtypes[kind], extents)
        for i, (kind, extents) in enumerate(case["outputs"])
    ]
    names, results = [name for name, *_ in case["inputs"]], [value.name for value in outputs]
    before, after = [], []
    if weights:
        before, after = [helper.make_node("Neg", ["x"], ["h"])], [helper.make_node("Neg", ["z"], ["y0"])]
        names, results = ["h", *names[1:]], ["z", *results[1:]]
    node = helper.make_node(
        case["plugin"],
        names,
        results,
        name="node0",
        domain=PLUGIN_NAMESPACE,
        plugin_version=PLUGIN_VERSION,
        plugin_namespace=PLUGIN_NAMESPACE,
        **case["attributes"],
    )
    graph = helper.make_graph([*before, node, *after], "graph", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(PLUGIN_NAMESPACE, 1)]
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return model


def build(trt: Any, logger: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Parse the graph of `case` and build an engine ahead of time, as on a machine without a GPU.

    Dynamic extents run from 1, or 8 for d_..., to 64 times the number of the profile.
    """
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(make_onnx(case)):
        return {"plan_bytes": 0, "parser": [parser.get_error(i).desc() for i in range(parser.num_errors)]}
    config = builder.create_builder_config()
    if len(case["outputs"]) > 1:
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    config.num_compute_capabilities = 1
    has_fp8 = any(kind == "fp8" for _, kind, _ in case["inputs"])
    config.set_compute_capability(trt.ComputeCapability.SM89 if has_fp8 else trt.ComputeCapability.SM80, 0)
    dynamic = [each for each in case["inputs"] if any(isinstance(size, str) for size in each[2])]
    for scale in range(1, case.get("profiles", 1) + 1) if dynamic else ():
        profile = builder.create_optimization_profile()
        for name, _, extents in dynamic:
            sizes = [
                tuple(
                    size if isinstance(size, int) else max(of, 8 if size.startswith("d_") else 1) * scale
                    for size in extents
                )
                for of in (1, 16, 64)
            ]
            profile.set_shape(name, *sizes)
        config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    output = network.get_output(0)
    return {
        "plan_bytes": 0 if plan is None else plan.nbytes,
        "in_plan": plan is not None and case["plugin"].encode() in bytes(memoryview(plan)),
        "parser": [],
        "output": [output.dtype.name, list(output.shape)],
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("runtime", choices=["rtx", "lean"])
    arguments.add_argument("libraries", nargs="+")
    arguments.add_argument("--path")
    options = arguments.parse_args()
    if options.path:
        sys.path.insert(0, options.path)
    trt = importlib.import_module(f"tensorrt_{options.runtime}_bindings")

    class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.messages: list[list[str]] = []

        def log(self, severity: Any, text: str) -> None:
            self.messages.append([severity.name, text])

    logger = Logger()
    # The first builder or runtime decides where the global registry's messages go. A lean Runtime needs a GPU, and
    # without one its destructor crashes; so a lean registry has no logger here.
    builder = trt.Builder(logger) if options.runtime == "rtx" else None
    registry = trt.get_plugin_registry()
    request = json.load(sys.stdin)
    report: dict[str, Any] = {"version": trt.__version__, "results": []}
    report["loads"] = [registry.load_library(library) is not None for library in options.libraries]
    if options.runtime == "rtx":
        # See rtx_shim.cpp: the parser opens this name when it meets a plugin node.
        ctypes.CDLL(str(Path(options.libraries[0]).with_name("libtensorrt_rtx.so")))
    report["creators"] = {
        creator.name: [creator.plugin_version, {field.name: field.type.name for field in creator.field_names}]
        for creator in registry.all_creators
        if creator.plugin_namespace == PLUGIN_NAMESPACE
    }
    for case in request.get("create", []):
        logger.messages.clear()
        created = create(trt, registry, *case)
        report["results"].append({"created": created, "log": list(logger.messages)})
    for case in request.get("build", []):
        logger.messages.clear()
        result = build(trt, logger, case)
        report["results"].append(result | {"log": list(logger.messages)})
    del builder
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
