"""Features on a GPU, by kernels of the plugin library."""

from __future__ import annotations

import torch
from torch import Tensor

from twellc.base.dtypes import dtype_name
from twellc.features.encoder import Encoder
from twellc.plugins import library
from twellc.plugins.block import PLAIN, BlockOptions, problem_of, set_scales
from twellc.plugins.meaning import as_read, check_on_gpu, check_problem, check_status, launch

# The lists have room for one in so many neurons to be active, and for so many of each token at least; if more are
# active, everything is encoded again.
_GUESSED, _FEWEST_GUESSED = 64, 64


def encode(encoder: Encoder, x: Tensor, capacity: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same as `cpu.encode`."""
    named = {
        "x": x,
        "w_gate": encoder.weight,
        "b_gate": encoder.bias,
        "w_gate_scale": encoder.scale,
        "thresholds": encoder.thresholds,
    }
    given = {name: each for name, each in named.items() if each is not None}
    check_on_gpu(given)
    (d_ff, d_model), scale = encoder.weight.shape, encoder.scale
    if scale is not None and (torch.cuda.get_device_capability(x.device) != (9, 0) or d_model % 128):
        raise ValueError("twell: w_enc in E4M3 needs compute capability 9.0 and a d_model of a multiple of 128")
    read = {name: as_read(each) for name, each in given.items()}
    problem = _problem(encoder.options, x, tokens=len(x), d_model=d_model, d_ff=d_ff, d_out=d_model)
    tensors = library.Tensors(**{name: each.data_ptr() for name, each in read.items()})
    offsets = x.new_empty(len(x) + 2, dtype=torch.int64)
    with torch.cuda.device(x.device):
        check_problem(problem)
        if scale is not None:
            set_scales(problem, *(["row" if scale.dim() else "tensor"] * 2))
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
        places, keeps_all = len(x) * max(d_ff // _GUESSED, _FEWEST_GUESSED), False
        while True:
            indices, values = run(places, keeps_all)
            total, missing = offsets[-2:].tolist()
            if not missing:
                return indices[:total].clone(), values[:total].clone(), offsets[:-1]
            places, keeps_all = max(places, total), keeps_all or total <= places


def decode(
    entries: tuple[Tensor, Tensor], offsets: Tensor | None, tokens: int, w_dec: Tensor, b_dec: Tensor | None
) -> Tensor:
    """Return the same as `cpu.decode`."""
    indices, values = entries
    given = {"w_down": w_dec} if b_dec is None else {"w_down": w_dec, "b_down": b_dec}
    check_on_gpu({"x": values, "indices": indices, **given})
    d_ff, d_out = w_dec.shape
    problem = _problem(BlockOptions(activation="relu"), values, tokens=tokens, d_model=d_out, d_ff=d_ff, d_out=d_out)
    read = {name: as_read(each) for name, each in given.items()}
    y = values.new_empty(tokens, d_out)
    tensors = library.Tensors(**{name: each.data_ptr() for name, each in read.items()}, y=y.data_ptr())
    if indices.dtype.itemsize > 4:  # else clamp to the range of an index
        indices = indices.long().clamp(-1, d_ff)
    indices, values = indices.int().contiguous(), values.contiguous()
    with torch.cuda.device(values.device):
        check_problem(problem)
        begins, stream = None if offsets is None else offsets.data_ptr(), torch.cuda.current_stream().cuda_stream
        lists = indices.data_ptr(), values.data_ptr(), begins, len(indices)
        check_status(library.load().twell_decode(problem, tensors, *lists, stream))
    return y


def _problem(options: BlockOptions, like: Tensor, **sizes: int) -> library.Problem:
    """Return the plain block of which the kernels compute a part, with the element type of `like`."""
    return problem_of(PLAIN, options, dtype_name(like.dtype), **sizes)
