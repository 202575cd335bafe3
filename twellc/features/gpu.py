"""Features on a GPU, by kernels of the plugin library."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from twellc.base.devices import is_sm90
from twellc.base.dtypes import dtype_name
from twellc.features.encoder import Encoder, check_decoder
from twellc.plugins import library
from twellc.plugins.block import PLAIN, BlockOptions, problem_of, set_scales
from twellc.plugins.kernel_calls import Given, Prepared, Reading, check_on_gpu, check_problem, launch, run_on

# The lists have room for one in so many neurons to be active, and for so many of each token at least; if more are
# active, everything is encoded again.
_GUESSED, _FEWEST_GUESSED = 64, 64
# The names of tensors in the C API.
_ENCODER = {
    "x": "x", "w_enc": "w_gate", "b_enc": "b_gate", "w_enc_scale": "w_gate_scale", "thresholds": "thresholds"
}  # fmt: skip
_DECODER = {"w_dec": "w_down", "b_dec": "b_down"}


@dataclass(frozen=True)
class _Part:
    """A part of a plain block that the kernels compute, as all calls alike have it.

    Attributes:
        problem: The block.
        reading: How the tensors are read.
        workspace_bytes: The size of the workspace of `encode`, and of it with `keeps_all`.
    """

    problem: library.Problem
    reading: Reading
    workspace_bytes: tuple[int, ...] = ()


def _prepare_encoder(given: Given) -> _Part:
    encoder, x = Encoder.of(given), given["x"]
    encoder.check(x)
    check_on_gpu({name: given[name] for name in _ENCODER if given[name] is not None})
    (d_ff, d_model), scale = encoder.weight.shape, encoder.scale
    if scale is not None and (not is_sm90(x.device) or d_model % 128):
        raise ValueError("twell: w_enc in E4M3 needs compute capability 9.0 and a d_model of a multiple of 128")
    tokens, lib = x.shape[:-1].numel(), library.load()
    problem = _problem(encoder.options, x, tokens=tokens, d_model=d_model, d_ff=d_ff, d_out=d_model)
    with torch.cuda.device(x.device):
        check_problem(problem)
        if scale is not None:
            set_scales(problem, *(["row" if scale.dim() else "tensor"] * 2))
        return _Part(problem, Reading.of(given, _ENCODER), tuple(lib.twell_encode_bytes(problem, i) for i in (0, 1)))


def _prepare_decoder(given: Given) -> _Part:
    check_decoder(given)
    there = {name: given[name] for name in _DECODER if given[name] is not None}
    check_on_gpu({"x": given["values"], "indices": given["indices"], **there})
    d_ff, d_out = given["w_dec"].shape
    options, sizes = BlockOptions(activation="relu"), {"tokens": given["tokens"], "d_ff": d_ff}
    problem = _problem(options, given["values"], **sizes, d_model=d_out, d_out=d_out)
    check_problem(problem)
    return _Part(problem, Reading.of(given, _DECODER))


_ENCODERS, _DECODERS = Prepared(_prepare_encoder), Prepared(_prepare_decoder, free=("indices", "values"))


def encode(given: Given, capacity: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same as `cpu.encode`."""
    x, part = given["x"], _ENCODERS.of(given)
    addresses, _copies = part.reading.addresses(given)
    problem, tensors = part.problem, library.Tensors(**addresses)
    tokens = problem.tokens
    offsets = x.new_empty(tokens + 2, dtype=torch.int64)
    if not tokens:
        places = capacity or 0
        return x.new_zeros(places, dtype=torch.int32), x.new_zeros(places), offsets.zero_()[:1]

    def run(places: int, keeps_all: bool) -> tuple[Tensor, Tensor]:
        places = max(1, places)
        indices, values = x.new_empty(places, dtype=torch.int32), x.new_empty(places)
        lists = indices.data_ptr(), values.data_ptr(), offsets.data_ptr(), places
        function, size = library.load().twell_encode, part.workspace_bytes[keeps_all]
        launch(x.device, function, size, problem, tensors, keeps_all, *lists)
        return indices, values

    if capacity is not None:
        return *run(capacity, keeps_all=True), offsets[:-1]
    places, keeps_all = tokens * max(problem.d_ff // _GUESSED, _FEWEST_GUESSED), False
    while True:
        indices, values = run(places, keeps_all)
        total, missing = offsets[-2:].tolist()
        if not missing:
            return indices[:total].clone(), values[:total].clone(), offsets[:-1]
        places, keeps_all = max(places, total), keeps_all or total <= places


def decode(given: Given, offsets: Tensor | None, leading: torch.Size) -> Tensor:
    """Return the same as `cpu.decode`."""
    indices: Tensor = given["indices"]
    values: Tensor = given["values"].contiguous()
    part = _DECODERS.of({**given, "tokens": math.prod(leading)})
    addresses, _copies = part.reading.addresses(given)
    y = values.new_empty((*leading, part.problem.d_out))
    tensors = library.Tensors(**addresses, y=y.data_ptr())
    if indices.dtype.itemsize > 4:  # else clamp to the range of an index
        indices = indices.long().clamp(-1, part.problem.d_ff)
    indices = indices.int().contiguous()
    begins = None if offsets is None else offsets.data_ptr()
    lists = indices.data_ptr(), values.data_ptr(), begins, indices.numel()
    run_on(values.device, library.load().twell_decode, part.problem, tensors, *lists)
    return y


def _problem(options: BlockOptions, like: Tensor, **sizes: int) -> library.Problem:
    """Return the plain block of which the kernels compute a part, with the element type of `like`."""
    return problem_of(PLAIN, options, dtype_name(like.dtype), **sizes)
