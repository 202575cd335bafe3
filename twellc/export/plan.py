"""Build a TensorRT plan from an ONNX file with `twell` nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from twellc.base.errors import UserError
from twellc.base.files import external_data
from twellc.base.records import Range, Record
from twellc.export.mapped_file import pages_given_back
from twellc.export.refused_nodes import RefusedNode, cure, describe, nodes_of
from twellc.export.shapes import LARGEST_SIZE, ShapeProfile
from twellc.export.tensorrt_host import Host, create_network, load_host, make_logger, write_plan
from twellc.plugins.library import PLUGIN_NAMESPACE, attention_library_path
from twellc.plugins.other_libraries import PluginLibrary, register_libraries
from twellc.plugins.registration import register


@dataclass(frozen=True)
class Backend(Record):
    """The TensorRT that built a plan."""

    name: str
    version: str


@dataclass(frozen=True)
class PlanTensor(Record):
    """An input or output of a plan; -1 stands for a dynamic dimension."""

    name: str
    dtype: str
    shape: list[Annotated[int, Range(-1, LARGEST_SIZE)]]


@dataclass(frozen=True)
class Plan:
    """A built plan.

    Attributes:
        backend: The TensorRT that built it.
        inputs: Its input tensors.
        outputs: Its output tensors.
        plugin_layers: Names of its plugin layers.
        libraries: Other people's plugin libraries that were registered for it.
    """

    backend: Backend
    inputs: list[PlanTensor]
    outputs: list[PlanTensor]
    plugin_layers: list[str]
    libraries: list[PluginLibrary] = field(default_factory=list)


def check_builder(
    backend: str, attention: str, cached: bool, libraries: list[Path], progress: Callable[[str], None]
) -> None:
    """Fail now rather than after a model is translated if no plan can be built.

    Args:
        backend: The TensorRT to build with: `tensorrt` or `tensorrt-rtx`.
        attention: `auto`, `tensorrt` or `cudnn`, as for `compile`.
        cached: Whether the model has a key-value cache.
        libraries: Other people's plugin libraries.
        progress: Receives the name of the step.

    Raises:
        UserError: TensorRT or a plugin library is missing or cannot be loaded, or attention cannot be had as asked.
    """
    progress("loading TensorRT and the plugins")
    host = load_host(backend)
    register(host.module)
    register_libraries(host.module, host.version, libraries)
    if cached:
        _refuse_caches(host)
    if attention == "cudnn":
        from twellc.export.attention_forms import choose_forms  # imports torch, which nothing else here needs

        choose_forms(backend, attention, cached)


def _refuse_caches(host: Host) -> None:
    """Fail if plans of models with a key-value cache cannot be built here.

    Raises:
        UserError: They cannot.
    """
    if not hasattr(host.module.PreviewFeature, _ALIASED):
        raise UserError(
            "--kv-cache", "this TensorRT cannot write to a cache in place", got=str(host),
            expected="TensorRT 10.3 or newer, or TensorRT-RTX",
        )  # fmt: skip
    if attention_library_path() is None:
        raise UserError(
            "--kv-cache", "libtwell_attention.so is not there: this twellc was built without cuDNN's headers",
            fix="Install twellc with pip again.",
        )  # fmt: skip


# The preview feature with which plugins may write to their inputs.
_ALIASED = "ALIASED_PLUGIN_IO_10_03"


def build_plan(
    backend: str,
    onnx_path: Path,
    plan_path: Path,
    profiles: list[ShapeProfile],
    embedded: list[Path],
    libraries: list[Path],
    needs: str,
    cached: bool,
    progress: Callable[[str], None],
) -> Plan:
    """Build a plan and write it.

    Args:
        backend: The TensorRT to build with: `tensorrt` or `tensorrt-rtx`.
        onnx_path: An ONNX file; external data is read from its folder.
        plan_path: Where to write the plan.
        profiles: Optimization profiles.
        embedded: Plugin libraries to put into the plan.
        libraries: Other people's plugin libraries, which nodes of the graph name plugins of.
        needs: What to say in the plan that it needs; empty where it needs nothing.
        cached: Whether the graph has key-value caches, which it writes to in place.
        progress: Receives the name of each phase of the build.

    Raises:
        UserError: TensorRT refuses the graph, the shapes or a plugin.
    """
    host = load_host(backend)
    trt = host.module
    register(host.module)
    registered = register_libraries(host.module, host.version, libraries)
    messages: list[str] = []
    logger = make_logger(host, messages)
    builder = trt.Builder(logger)
    network = create_network(host, builder)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(onnx_path)):
        raise _refusal(host, onnx_path, [parser.get_error(i) for i in range(parser.num_errors)], messages)
    config = _configured(host, builder, embedded, cached, progress)
    _add_profiles(builder, config, network, profiles)
    plugin_layers = _adjust_layers(trt, network, config)
    if needs:
        # The one text in a plan that is ours to choose. A plan may be found without its manifest.
        network.name = f"{onnx_path.stem}: {needs}"
    with pages_given_back(external_data(onnx_path)):
        written = write_plan(host, builder, network, config, plan_path)
    if not written:
        raise UserError(
            str(host), f"the builder refuses the network ({reasons(messages)})",
            fix="If a shape is to blame, change --optimization-profile.",
        )  # fmt: skip
    return Plan(
        backend=Backend(host.name, host.version),
        inputs=[_describe(network.get_input(i)) for i in range(network.num_inputs)],
        outputs=[_describe(network.get_output(i)) for i in range(network.num_outputs)],
        plugin_layers=plugin_layers,
        libraries=registered,
    )


def _configured(host: Host, builder: Any, embedded: list[Path], cached: bool, progress: Callable[[str], None]) -> Any:
    config = builder.create_builder_config()
    config.progress_monitor = _monitor(host, progress)
    # Layers of a plan can then be told by the nodes that they were made of; see `runner.engine_layers`.
    config.profiling_verbosity = host.module.ProfilingVerbosity.DETAILED
    if embedded:
        config.plugins_to_serialize = list(map(str, embedded))
    if cached:
        config.set_preview_feature(getattr(host.module.PreviewFeature, _ALIASED), True)
    return config


def _add_profiles(builder: Any, config: Any, network: Any, profiles: list[ShapeProfile]) -> None:
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    if not any(-1 in tensor.shape for tensor in inputs):
        return
    for ranges in profiles:
        profile = builder.create_optimization_profile()
        for tensor in inputs:
            shapes = ranges[tensor.name]
            profile.set_shape(tensor.name, shapes.min, shapes.opt, shapes.max)
        config.add_optimization_profile(profile)


def _adjust_layers(trt: Any, network: Any, config: Any) -> list[str]:
    """Allow what layers of some kinds need; return the names of those that are plugins."""
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    for layer in layers:
        if layer.type == getattr(trt.LayerType, "ATTENTION_INPUT", None):
            # Where no kernel has the block's sizes, such as heads of 16, it is taken apart instead of refused.
            layer.__class__ = trt.IAttentionInputLayer  # get_layer does not tell which it is
            layer.attention.decomposable = True
    early_collectives = getattr(trt.PreviewFeature, "MULTIDEVICE_RUNTIME_10_16", None)
    if early_collectives is not None and any(layer.type == trt.LayerType.DIST_COLLECTIVE for layer in layers):
        config.set_preview_feature(early_collectives, True)
    return [layer.name for layer in layers if layer.type == trt.LayerType.PLUGIN_V3]


def reasons(messages: list[str]) -> str:
    """Join the first lines of TensorRT's error messages."""
    lines = [line.strip() for message in messages for line in message.strip().splitlines() if line.strip()]
    return "; ".join(dict.fromkeys(lines[:3])) or "it gives no reason"


def _refusal(host: Host, onnx_path: Path, errors: list[Any], messages: list[str]) -> UserError:
    """Return what to say of a graph that the parser does not take: which nodes, and what to do about them."""
    import onnx  # not needed of a manifest, and large

    domains = {node.op_type: node.domain for node in nodes_of(onnx.load(onnx_path, load_external_data=False).graph)}
    codes = host.module.ErrorCode
    refused = [
        RefusedNode(error.node_name(), error.node_operator(), domains.get(error.node_operator(), ""))
        for error in errors
        # A node of a domain that the parser does not know is looked for among the plugins.
        if error.code() == codes.UNSUPPORTED_NODE or (error.code() == codes.INVALID_NODE and "Plugin" in error.desc())
    ]
    # Our own plugins are there: what they refuse are fields and inputs, which TensorRT's log names.
    nodes = [node for node in refused if node.domain != PLUGIN_NAMESPACE]
    if nodes:
        return UserError(str(host), f"the ONNX parser does not know {describe(nodes)}", fix=cure(nodes))
    return UserError(
        str(host), f"the ONNX parser refuses the model ({reasons(messages + [error.desc() for error in errors])})",
        fix="Keep the graph with --onnx to look at it.",
    )  # fmt: skip


def _describe(tensor: Any) -> PlanTensor:
    return PlanTensor(tensor.name, tensor.dtype.name.lower(), list(tensor.shape))


def _monitor(host: Host, progress: Callable[[str], None]) -> Any:
    class Monitor(host.module.IProgressMonitor):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            progress(phase_name)

        def phase_finish(self, phase_name: str) -> None:
            pass

        def step_complete(self, phase_name: str, step: int) -> bool:
            return True

    return Monitor()
