"""Calls of the kernels with tensors of torch.

The host's work for a call takes longer than the kernels of a few tokens. So `Prepared` does once, checks included, all
that calls with the same options, shapes, strides, dtypes and GPU have in common. Only the
addresses of tensors differ, and nothing that is remembered holds a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from twellc.base import torch_private
from twellc.base.dtypes import dtype_name
from twellc.plugins import library

# The arguments of a call by their names; those that are not there may be None.
Given = Mapping[str, Any]
P = TypeVar("P")

_ALIGNMENT = 16  # of addresses, in bytes
_MOST_PREPARED = 4096


def check_on_gpu(tensors: Mapping[str, Tensor]) -> None:
    """Raise TypeError if the kernels do not take the dtype of x, ValueError if tensors are not all on one device."""
    dtype, device = dtype_name(tensors["x"].dtype), tensors["x"].device
    if dtype not in library.DTYPES:
        raise TypeError(f"twell: the CUDA kernels take {' or '.join(library.DTYPES)}, got {dtype}")
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(f"twell: {name} must be on {device}, got {tensor.device}")


def check_problem(problem: library.Problem | library.LinearProblem | library.ExpertsProblem) -> None:
    """Raise ValueError if the library refuses a problem."""
    fault = library.fault_of(problem)
    if fault:
        raise ValueError(f"twell: {fault}")


def check_status(status: int) -> None:
    """Raise RuntimeError if a function of the C API has returned an error of CUDA."""
    if status:
        raise RuntimeError(f"twell: the kernels failed with CUDA error {status}")


def as_read(tensor: Tensor) -> Tensor:
    """Return the tensor as the kernels read it: contiguous, and in memory from a multiple of 16 bytes on."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()


def run_on(device: torch.device, function: Callable[..., int], *arguments: Any) -> None:
    """Call a function of the C API on a GPU, with its current stream as the last argument."""
    index = device.index
    with torch.cuda.device(index):  # given the device, torch takes some microseconds to find the index
        check_status(function(*arguments, torch_private.current_raw_stream(index)))


def launch(device: torch.device, function: Callable[..., int], workspace_bytes: int, *arguments: Any) -> None:
    """Call a function of the C API likewise, with a workspace before the stream."""
    workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=device)
    run_on(device, function, *arguments, workspace.data_ptr(), workspace_bytes)


class Prepared(Generic[P]):
    """What calls have in common, worked out once for all calls that look alike.

    Args:
        prepare: Checks a call and works it out, from nothing of tensors but shapes, strides, dtypes and the device.
        free: Names of tensors of which it looks at dtype and device alone.
    """

    def __init__(self, prepare: Callable[[Given], P], free: tuple[str, ...] = ()) -> None:
        self._prepare, self._free = prepare, free
        self._known: dict[tuple[Any, ...], P] = {}

    def of(self, given: Given) -> P:
        """Return what is known about a call.

        Raises:
            ValueError, TypeError: As `prepare` does, at each call.
        """
        facts: list[Any] = []
        add = facts.append
        for name, value in given.items():
            if value is None:
                continue
            add(name)
            if not isinstance(value, Tensor):
                add(tuple(value) if isinstance(value, list) else value)
                continue
            add(value.dtype)
            add(value.device)
            if name not in self._free:
                add(value.shape)
                add(value.is_contiguous() or value.stride())
        key = tuple(facts)
        found = self._known.get(key)
        if found is None:
            found = self._prepare(given)
            if len(self._known) >= _MOST_PREPARED:
                self._known.clear()
            self._known[key] = found
        return found


@dataclass(frozen=True)
class Reading:
    """How the kernels read the tensors of a call.

    Attributes:
        fields: The names of operands in the C API, by those of tensors.
        copied: For tensors of which the kernels read a copy, what makes it; others are copied if they are not aligned.
    """

    fields: Mapping[str, str]
    copied: Mapping[str, Callable[[Tensor], Tensor]]

    @classmethod
    def of(cls, given: Given, fields: Mapping[str, str]) -> Reading:
        """Return how those of the tensors that are there are read: as copies where they are not contiguous."""
        there = {name: each for name, each in fields.items() if given[name] is not None}
        return cls(there, {name: as_read for name in there if not given[name].is_contiguous()})

    def addresses(self, given: Given) -> tuple[dict[str, int], list[Tensor]]:
        """Return addresses by names of the C API, and the copies: to be kept until the kernels are launched."""
        found, copies = {}, []
        for name, each in self.fields.items():
            tensor = given[name]
            address = tensor.data_ptr()
            if name in self.copied or address % _ALIGNMENT:
                tensor = self.copied.get(name, as_read)(tensor)
                copies.append(tensor)
                address = tensor.data_ptr()
            found[each] = address
        return found, copies


@dataclass(frozen=True)
class KernelCall:
    """What calls of an op have in common.

    Attributes:
        function: The function of the C API.
        problem: The problem.
        workspace_bytes: The size of the workspace.
        tensors: The type of its struct of addresses.
        reading: How its operands are read.
        results: Shape and dtype of each result.
        fixed: Tensors that cannot be copies, and so must be aligned.
        otherwise: Computes calls in which one of these is not.
    """

    function: Callable[..., int]
    problem: library.Problem | library.LinearProblem | library.ExpertsProblem
    workspace_bytes: int
    tensors: type[library.Tensors | library.LinearTensors | library.ExpertsTensors]
    reading: Reading
    results: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    fixed: tuple[str, ...] = ()
    otherwise: Callable[[Given], list[Tensor]] | None = None

    def __call__(self, given: Given) -> list[Tensor]:
        """Run the kernels on the current stream of the GPU of x."""
        for name in self.fixed:
            if given[name].data_ptr() % _ALIGNMENT:
                assert self.otherwise is not None
                return self.otherwise(given)
        x = given["x"]
        addresses, _copies = self.reading.addresses(given)
        results = [x.new_empty(shape, dtype=dtype) for shape, dtype in self.results]
        y = tuple(each.data_ptr() for each in results)
        tensors = self.tensors(**addresses, y=y if self.tensors is library.LinearTensors else y[0])
        launch(x.device, self.function, self.workspace_bytes, self.problem, tensors)
        return results
