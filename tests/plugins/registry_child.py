"""Load the plugin library into one TensorRT and report what happened; run as a process of its own by the tests.

A TensorRT cannot be unloaded and its flavours share module names, so each test talks to a fresh interpreter:

    python registry_child.py RUNTIME LIBRARY [--path DIR] < request.json > report.json

RUNTIME is `rtx` (tensorrt_rtx_bindings) or `lean` (tensorrt_lean_bindings, found in DIR).
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


def create(trt: Any, registry: Any, case: dict[str, Any]) -> bool:
    """Ask the creator of `case["plugin"]` for a plugin with `case["fields"]`: [name, type, value] each."""
    types = {"FLOAT32": np.float32, "INT32": np.int32, "INT64": np.int64}
    # A PluginField points into the data that it is made of and does not keep it alive.
    data = [
        value.encode() if kind == "CHAR" else np.array(value, dtype=types[kind]).reshape(-1)
        for _, kind, value in case["fields"]
    ]
    fields = [
        trt.PluginField(name, values, getattr(trt.PluginFieldType, kind))
        for (name, kind, _), values in zip(case["fields"], data, strict=True)
    ]
    creator = registry.get_creator(case["plugin"], "twellc-3", "twell")
    phase = getattr(trt.TensorRTPhase, case.get("phase", "BUILD"))
    return creator.create_plugin("layer0", trt.PluginFieldCollection(fields), phase) is not None


def make_onnx(case: dict[str, Any]) -> bytes:
    """Build an ONNX graph with one twell node over random weights, between two plain nodes.

    A weight of `case["dynamic"]` is an input of the graph, with the extents that stand there; so is the residual of
    `case["residual"]`, true for one of the shape of y.
    """
    from onnx import TensorProto, helper

    dtypes = {"bf16": TensorProto.BFLOAT16, "fp16": TensorProto.FLOAT16, "fp32": TensorProto.FLOAT}
    dtype = dtypes[case["dtype"]]
    d_model, d_ff, d_out = case["d_model"], case["d_ff"], case["d_out"]
    biases: list[str] = case.get("biases", [])
    projections = ["gate", "up"] if case["plugin"] == "TwellGatedMlp" else ["up"]
    shapes: dict[str, list[int]] = {}
    for name in projections:
        shapes[f"w_{name}"] = [d_ff, d_model]
        if name in biases:
            shapes[f"b_{name}"] = [d_ff]
    shapes["w_down"] = [d_ff, d_out]
    if "down" in biases:
        shapes["b_down"] = [d_out]
    shapes.update(case.get("shapes", {}))

    rng = np.random.default_rng(0)
    weights = []
    dynamic: dict[str, list[Any]] = case.get("dynamic", {})
    for name, shape in shapes.items():
        if name in dynamic:
            continue
        values = rng.standard_normal(shape, dtype=np.float32)
        kind = case.get("dtypes", {}).get(name, case["dtype"])
        if kind == "bf16":  # the upper half of a float32
            values = (values.view(np.uint32) >> 16).astype(np.uint16)
        elif kind == "fp16":
            values = values.astype(np.float16)
        weights.append(helper.make_tensor(name, dtypes[kind], shape, values.tobytes(), raw=True))
    attributes: dict[str, Any] = {f"{name}_bias": int(name in biases) for name in [*projections, "down"]}
    leading = case.get("leading", ["batch", "sequence"])
    residual = residual_shape(case)
    attributes |= {"activation": "relu", "threshold": 0.0, "compression": 8, "hot": 0}
    attributes["residual"] = int(residual is not None)
    attributes |= case.get("attributes", {})
    node = helper.make_node(
        case["plugin"],
        ["h", *shapes, *(["residual"] if residual is not None else [])],
        ["z"],
        name="block0",
        domain="twell",
        plugin_version="twellc-3",
        plugin_namespace="twell",
        **attributes,
    )
    kind = dtypes[case.get("dtypes", {}).get("residual", case["dtype"])]
    graph = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["h"]), node, helper.make_node("Neg", ["z"], ["y"])],
        "block",
        [
            helper.make_tensor_value_info("x", dtype, [*leading, case.get("x_columns", d_model)]),
            *(helper.make_tensor_value_info(name, dtype, extents) for name, extents in dynamic.items()),
            *([] if residual is None else [helper.make_tensor_value_info("residual", kind, residual)]),
        ],
        [helper.make_tensor_value_info("y", dtype, [*leading, d_out])],
        weights,
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("twell", 1)]
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return model


def residual_shape(case: dict[str, Any]) -> list[Any] | None:
    """Return the extents of the residual, None where there is none."""
    residual = case.get("residual", False)
    if isinstance(residual, bool):
        return [*case.get("leading", ["batch", "sequence"]), case["d_out"]] if residual else None
    return list(residual)


def build(trt: Any, logger: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Parse the graph of `case` and build an engine ahead of time, as on a machine without a GPU."""
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(make_onnx(case)):
        return {"plan_bytes": 0, "parser": [parser.get_error(i).desc() for i in range(parser.num_errors)]}
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM80, 0)
    dynamic = len(case.get("leading", ["batch", "sequence"]))
    if dynamic:
        profile = builder.create_optimization_profile()
        sizes = [(extent,) * dynamic + (case["d_model"],) for extent in (1, 4, 64)]
        profile.set_shape("x", *sizes)
        for name, extents in case.get("dynamic", {}).items():
            shapes = [tuple(size if isinstance(size, int) else extent for size in extents) for extent in (8, 16, 64)]
            profile.set_shape(name, *shapes)
        if (residual := residual_shape(case)) is not None:
            shapes = [tuple(size if isinstance(size, int) else extent for size in residual) for extent in (1, 4, 64)]
            profile.set_shape("residual", *shapes)
        config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    output = network.get_output(0)
    return {
        "plan_bytes": 0 if plan is None else plan.nbytes,
        "in_plan": plan is not None and case["plugin"].encode() in bytes(memoryview(plan)),
        "parser": [],
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
    # The first builder or runtime decides where the global registry's messages go. A lean Runtime needs a GPU, and
    # without one its destructor crashes; so a lean registry has no logger here.
    builder = trt.Builder(logger) if options.runtime == "rtx" else None
    registry = trt.get_plugin_registry()
    request = json.load(sys.stdin)
    report: dict[str, Any] = {"version": trt.__version__, "results": []}
    report["loads"] = [registry.load_library(options.library) is not None for _ in range(request.get("loads", 1))]
    if options.runtime == "rtx":
        # See rtx_shim.cpp: the parser opens this name when it meets a plugin node.
        ctypes.CDLL(str(Path(options.library).with_name("libtensorrt_rtx.so")))
    report["creators"] = [
        {
            "name": creator.name,
            "version": creator.plugin_version,
            "namespace": creator.plugin_namespace,
            "fields": {field.name: field.type.name for field in creator.field_names},
        }
        for creator in registry.all_creators
        if creator.plugin_namespace == "twell"
    ]
    for case in request.get("create", []):
        logger.messages.clear()
        created = create(trt, registry, case)
        report["results"].append({"created": created, "log": list(logger.messages)})
    for case in request.get("build", []):
        logger.messages.clear()
        result = build(trt, logger, case)
        report["results"].append(result | {"log": list(logger.messages)})
    del builder
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
