"""Features on a GPU, by kernels of the plugin library."""

from __future__ import annotations

import torch
from torch import Tensor

from twellc.base.dtypes import dtype_name
from twellc.plugins import library
from twellc.plugins.block import PLAIN, BlockOptions, Operands, problem_of, set_scales, tensors_of
from twellc.plugins.meaning import as_read, check_on_gpu, check_problem, check_status, launch, scale_kinds, widths_of

# Lists have places for one active neuron of so many, and for so many of a token at least; if more are active, all is
# encoded again.
_GUESSED, _FEWEST_GUESSED = 64, 64


def encode(
    operands: Operands[Tensor], x: Tensor, options: BlockOptions, capacity: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `cpu.encode` does."""
    named, kinds = operands.named(), scale_kinds(operands)
    check_on_gpu(named)
    if kinds is not None and (torch.cuda.get_device_capability(x.device) != (9, 0) or x.shape[1] % 128):
        raise ValueError("twell: w_enc in FP8 needs compute capability 9.0 and a d_model of a multiple of 128")
    read = {name: as_read(each) for name, each in named.items()} | {"x": as_read(x)}
    problem = problem_of(PLAIN, options, dtype_name(x.dtype), tokens=len(x), **widths_of(operands))
    tensors = tensors_of(Operands(**{name: each.data_ptr() for name, each in read.items()}), 0)
    offsets = x.new_empty(len(x) + 2, dtype=torch.int64)
    with torch.cuda.device(x.device):
        check_problem(problem)
        if kinds is not None:
            set_scales(problem, *kinds)
        if not len(x):
            places = capacity or 0
            return x.new_zeros(places, dtype=torch.int32), x.new_zeros(places), offsets.zero_()[:1]

        def run(places: int, keeps_all: bool) -> tuple[Tensor, Tensor]:
            lib, places = library.load(), max(1, places)
            indices, values = x.new_empty(places, dtype=torch.int32), x.new_empty(places)
            lists = indices.data_ptr(), values.data_ptr(), offsets.data_ptr(), places
            launch(lib.twell_encode, lib.twell_encode_bytes(problem, keeps_all), problem, tensors, keeps_all, *lists)
            return indices, values

        if capacity is not None:
            return *run(capacity, keeps_all=True), offsets[:-1]
        places, keeps_all = len(x) * max(len(operands.w_up) // _GUESSED, _FEWEST_GUESSED), False
        while True:
            indices, values = run(places, keeps_all)
            total, missing = offsets[-2:].tolist()
            if not missing:
                return indices[:total].clone(), values[:total].clone(), offsets[:-1]
            places, keeps_all = max(places, total), keeps_all or total <= places


def decode(operands: Operands[Tensor], entries: tuple[Tensor, Tensor], offsets: Tensor | None, tokens: int) -> Tensor:
    """Return what `cpu.decode` does."""
    indices, values = entries
    given = {name: each for name, each in operands.named().items() if name.endswith("down")}
    check_on_gpu({"x": values, "indices": indices, **given})
    problem = problem_of(
        PLAIN, BlockOptions(activation="relu"), dtype_name(values.dtype), tokens=tokens, **widths_of(operands)
    )
    read = {name: as_read(each) for name, each in given.items()}
    y = values.new_empty(tokens, operands.w_down.shape[1])
    tensors = library.Tensors(**{name: each.data_ptr() for name, each in read.items()}, y=y.data_ptr())
    if indices.dtype.itemsize > 4:  # else cut to what may be an index
        indices = indices.long().clamp(-1, len(operands.w_down))
    indices, values = indices.int().contiguous(), values.contiguous()
    with torch.cuda.device(values.device):
        check_problem(problem)
        begins, stream = None if offsets is None else offsets.data_ptr(), torch.cuda.current_stream().cuda_stream
        lists = indices.data_ptr(), values.data_ptr(), begins, len(indices)
        check_status(library.load().twell_decode(problem, tensors, *lists, stream))
    return y
