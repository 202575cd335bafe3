"""Load the attention library into TensorRT-RTX or a lean TensorRT and report what happens; run by test_attention.py.

    python attention_child.py RUNTIME LIBRARY [--path DIR] < request.json > report.json

A request holds "create", cases of [phase, fields], and "build", cases of attributes and inputs; see `create`, `build`.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from twellc.plugins.library import ATTENTION_NAME, PLUGIN_NAMESPACE, PLUGIN_VERSION


def create(trt: Any, registry: Any, phase: str, given: list[list[Any]]) -> bool:
    """Ask the creator for a plugin with fields, [name, type, value] each."""
    types = {"FLOAT32": np.float32, "INT32": np.int32}
    # A PluginField points into the data that it is made of and does not keep it alive.
    data = [np.array(value, dtype=types[kind]).reshape(-1) for _, kind, value in given]
    fields = [
        trt.PluginField(name, values, getattr(trt.PluginFieldType, kind))
        for (name, kind, _), values in zip(given, data, strict=True)
    ]
    creator = registry.get_creator(ATTENTION_NAME, PLUGIN_VERSION, PLUGIN_NAMESPACE)
    return (
        creator.create_plugin("layer0", trt.PluginFieldCollection(fields), getattr(trt.TensorRTPhase, phase))
        is not None
    )


def make_onnx(case: dict[str, Any]) -> bytes:
    """Build an ONNX graph of one node; `case["inputs"]` are [name, dtype, extents] each, text for a dynamic one.

    It has as many outputs as `case["outputs"]` says, which are like the first inputs.
    """
    from onnx import TensorProto, helper

    dtypes = {"bf16": 16, "fp16": 10, "fp32": 1, "int32": 6, "int64": 7}
    assert dtypes["bf16"] == TensorProto.BFLOAT16
    values = [helper.make_tensor_value_info(name, dtypes[kind], shape) for name, kind, shape in case["inputs"]]
    results = [
        helper.make_tensor_value_info(f"y{i}" if i else "y", dtypes[kind], shape)
        for i, (_, kind, shape) in enumerate(case["inputs"][: case.get("outputs", 1)])
    ]
    node = helper.make_node(
        case.get("node", ATTENTION_NAME),
        [value.name for value in values],
        [value.name for value in results],
        name="attention0",
        domain=PLUGIN_NAMESPACE,
        plugin_version=PLUGIN_VERSION,
        plugin_namespace=PLUGIN_NAMESPACE,
        **case["attributes"],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(PLUGIN_NAMESPACE, 1)]
    graph = helper.make_graph([node], "attention", values, results)
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return model


def build(trt: Any, logger: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Parse the graph of `case` and build an engine ahead of time; dynamic extents run from 1 by 16 to 64."""
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(make_onnx(case)):
        return {"plan_bytes": 0}
    config = builder.create_builder_config()
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM80, 0)
    for scale in range(1, case.get("profiles", 1) + 1):
        profile = builder.create_optimization_profile()
        for name, _, extents in case["inputs"]:
            sizes = [tuple(size if isinstance(size, int) else of * scale for size in extents) for of in (1, 16, 64)]
            profile.set_shape(name, *sizes)
        config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    output = network.get_output(0)
    in_plan = plan is not None and case.get("node", ATTENTION_NAME).encode() in bytes(memoryview(plan))
    return {
        "plan_bytes": 0 if plan is None else plan.nbytes,
        "in_plan": in_plan,
        "shape": list(output.shape),
        "dtype": output.dtype.name,
    }


def main() -> None:
    """Answer the request on stdin with a report on stdout."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("runtime", choices=["rtx", "lean"])
    arguments.add_argument("library")
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
    # The first builder decides where the global registry's messages go; a lean TensorRT has none here.
    builder = trt.Builder(logger) if options.runtime == "rtx" else None
    registry = trt.get_plugin_registry()
    request = json.load(sys.stdin)
    report: dict[str, Any] = {"loaded": registry.load_library(options.library) is not None, "results": []}
    if options.runtime == "rtx":
        ctypes.CDLL(str(Path(options.library).with_name("libtensorrt_rtx.so")))
    report["creators"] = [
        [creator.name, creator.plugin_version, creator.plugin_namespace, [field.name for field in creator.field_names]]
        for creator in registry.all_creators
        if creator.plugin_namespace == PLUGIN_NAMESPACE
    ]
    for phase, fields in request.get("create", []):
        logger.messages.clear()
        created = create(trt, registry, phase, fields)
        report["results"].append({"created": created, "log": list(logger.messages)})
    for case in request.get("build", []):
        logger.messages.clear()
        result = build(trt, logger, case)
        report["results"].append(result | {"log": list(logger.messages)})
    del builder
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
