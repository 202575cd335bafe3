"""Run a TensorRT plan on this machine's GPU."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from twellc.base.dtypes import BY_TENSORRT
from twellc.base.errors import UserError
from twellc.export.plan import reasons
from twellc.export.tensorrt_host import Host, make_logger
from twellc.passes.sizes.relations import SizeRelation, refuse_unrelated
from twellc.plugins.registration import register


@dataclass(frozen=True)
class OpenPlan:
    """A plan that TensorRT has opened.

    Attributes:
        host: The TensorRT.
        path: The plan's file.
        engine: TensorRT's engine.
        messages: What TensorRT has said of errors; grows.
        device: The GPU that it runs on.
        relations: What sizes of inputs must keep, as the manifest has it.
    """

    host: Host
    path: Path
    engine: Any
    messages: list[str]
    device: torch.device
    relations: list[SizeRelation] = field(default_factory=list)

    def names(self, mode: str) -> list[str]:
        """Return the names of its tensors in order; `mode` is `INPUT` or `OUTPUT`."""
        names = [self.engine.get_tensor_name(i) for i in range(self.engine.num_io_tensors)]
        return [name for name in names if self.engine.get_tensor_mode(name).name == mode]


@dataclass(frozen=True)
class Execution:
    """A plan with tensors on the GPU for inputs of given shapes.

    Attributes:
        plan: The plan.
        context: TensorRT's execution context.
        tensors: Its inputs and outputs by name, where the plan reads and writes them.
        profile: Index of the optimization profile.
    """

    plan: OpenPlan
    context: Any
    tensors: dict[str, torch.Tensor]
    profile: int = 0

    @property
    def outputs(self) -> list[torch.Tensor]:
        """The outputs in the engine's order; each call of `enqueue` writes to them."""
        return [self.tensors[name] for name in self.plan.names("OUTPUT")]

    def bind(self, inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]) -> None:
        """Take other tensors, which may have other shapes.

        Args:
            inputs: Inputs by name; those that are on the plan's GPU are used in place, others are copied there.
            outputs: Outputs by name that have their memory already; there is new memory for others.

        Raises:
            UserError: TensorRT refuses the shapes, or the model does not take them together.
        """
        plan = self.plan
        refuse_unrelated(str(plan.path), plan.relations, {name: tuple(each.shape) for name, each in inputs.items()})
        for name in plan.names("INPUT"):
            self.tensors[name] = inputs[name].to(plan.device).contiguous()
            _check_shape(plan, name, tuple(self.tensors[name].shape), self.profile)
            if not self.context.set_input_shape(name, tuple(self.tensors[name].shape)):
                raise UserError(str(plan.path), f"refuses the shape of {name} ({reasons(plan.messages)})")
        for name in plan.names("OUTPUT"):
            dtype = BY_TENSORRT[plan.engine.get_tensor_dtype(name).name].torch
            shape = tuple(self.context.get_tensor_shape(name))
            given = outputs.get(name)
            self.tensors[name] = torch.empty(shape, dtype=dtype, device=plan.device) if given is None else given
        for name, tensor in self.tensors.items():
            self.context.set_tensor_address(name, tensor.data_ptr())

    def enqueue(self) -> None:
        """Enqueue the plan on torch's current stream.

        Raises:
            UserError: TensorRT refuses.
        """
        with torch.cuda.device(self.plan.device):
            done = self.context.execute_async_v3(torch.cuda.current_stream().cuda_stream)
        if not done:
            raise UserError(str(self.plan.path), f"the plan fails ({reasons(self.plan.messages)})")


def open_plan(
    host: Host, path: Path, built_with: str, relations: list[SizeRelation] | None = None,
    device: torch.device | None = None,
) -> OpenPlan:  # fmt: skip
    """Open a plan, with the plugins registered.

    Args:
        host: The TensorRT to run it with.
        path: The plan.
        built_with: The version of this TensorRT that built it, for the message where it does not open.
        relations: What sizes of inputs must keep, as the manifest has it.
        device: The GPU that it is to run on; None and one without a number are torch's current one.

    Raises:
        UserError: TensorRT refuses the plan, or torch sees no GPU.
    """
    register(host.module)
    messages: list[str] = []
    has_torch_cuda = torch.cuda.is_available()
    with torch.cuda.device(device) if has_torch_cuda else nullcontext():  # None is the current one
        runtime = host.module.Runtime(make_logger(host, messages))
        engine = runtime.deserialize_cuda_engine(path.read_bytes())
        number = torch.cuda.current_device() if has_torch_cuda else 0
    if engine is None:
        raise UserError(
            str(path), f"the plan cannot be opened ({reasons(messages)})", got=str(host),
            expected=f"{host.name} {built_with}, which built it, on a GPU that it was built for",
            fix="Compile the model again with this TensorRT, or install the other. If a plugin is missing, `twellc "
            "plugins --check` says whether this TensorRT takes the plugins.",
        )  # fmt: skip
    if not has_torch_cuda:
        raise UserError(str(path), "this torch was built without CUDA", fix="Install a CUDA build of torch.")
    return OpenPlan(host, path, engine, messages, torch.device("cuda", number), relations or [])


def prepare(
    plan: OpenPlan,
    inputs: dict[str, torch.Tensor],
    profile: int = 0,
    outputs: dict[str, torch.Tensor] | None = None,
) -> Execution:
    """Make an execution context for inputs of given shapes.

    Args:
        plan: The plan.
        inputs: See `Execution.bind`.
        profile: Index of the optimization profile.
        outputs: See `Execution.bind`.

    Raises:
        UserError: TensorRT refuses the shapes.
    """
    with torch.cuda.device(plan.device):
        context = plan.engine.create_execution_context()
        if context is None:
            raise UserError(str(plan.path), f"there is no room to run the plan ({reasons(plan.messages)})")
        if profile and not context.set_optimization_profile_async(profile, torch.cuda.current_stream().cuda_stream):
            raise UserError(str(plan.path), f"has no optimization profile {profile} ({reasons(plan.messages)})")
        execution = Execution(plan, context, {}, profile)
        execution.bind(inputs, outputs or {})
    return execution


def _check_shape(plan: OpenPlan, name: str, shape: tuple[int, ...], profile: int) -> None:
    """Fail for a shape outside of the profile: TensorRT 10.6 takes it, and says nothing."""
    least, _, most = (tuple(dims) for dims in plan.engine.get_tensor_profile_shape(name, profile))
    sizes = zip(least, shape, most, strict=False)
    if len(shape) != len(least) or not all(low <= size <= high for low, size, high in sizes):
        raise UserError(
            str(plan.path), f"optimization profile {profile} does not take this shape of {name}", got=str(shape),
            expected=f"{least} to {most}", fix="Compile the model again with another --optimization-profile.",
        )  # fmt: skip


class PlanRunner:
    """Runs an open plan any number of times, in its first optimization profile; prepared again where shapes change."""

    def __init__(self, plan: OpenPlan) -> None:
        self._plan = plan
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._execution: Execution | None = None

    def __call__(self, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs as CPU tensors, in the engine's order, for CPU tensors by name.

        Raises:
            UserError: TensorRT refuses the shapes, or fails.
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
        if self._execution is None or shapes != self._shapes:
            self._execution = None  # and its memory, before there is another
            self._execution, self._shapes = prepare(self._plan, inputs), shapes
        else:
            for name in self._plan.names("INPUT"):
                self._execution.tensors[name].copy_(inputs[name])
        self._execution.enqueue()
        return [tensor.cpu() for tensor in self._execution.outputs]


def engine_layers(execution: Execution) -> list[dict[str, Any]]:
    """Return what TensorRT made of the network: its layers for all profiles, as its inspector names them.

    `Name` is that under which a profiler reports a layer, `Metadata` names the ONNX nodes that it was made of.
    """
    # NOTE: not given the context: 10.6 then says nothing, or dies, where a plan has several profiles.
    inspector = execution.plan.engine.create_engine_inspector()
    text = inspector.get_engine_information(execution.plan.host.module.LayerInformationFormat.JSON)
    layers: list[dict[str, Any]] = json.loads(text, strict=False)["Layers"]  # control characters between names
    return layers
