"""What `twellc check` compares FP8 with: blocks and linear layers in dense FP8, weights of 16 bits, rounded caches."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.export import ExportedProgram

from twellc.base.errors import UserError
from twellc.passes.attention import find_attention
from twellc.passes.fp8 import QUANTISED, both_forms
from twellc.passes.graph.program import editable, finish, stored_tensors, tensor_of
from twellc.passes.match.find_ffn import FfnBlock
from twellc.passes.match.linear import Linear, Weight, width
from twellc.passes.pipeline import Rewritten
from twellc.passes.report import reads_fp8
from twellc.plugins.block import BlockOptions, WeightOperands
from twellc.plugins.fp8 import E4M3, LARGEST, Fp8, scale_blocks
from twellc.plugins.meaning import activate, cast, dequantize
from twellc.plugins.ops import run_block

_KEYS = re.compile(r"past_key_values\.(\d+)\.key")  # the input of a cache, by its layer


@dataclass(frozen=True)
class Fp8Block:
    """A block of the model whose weights the candidate reads in FP8.

    Attributes:
        weights: Its FP8 weights, with their scales, and its biases.
        wide: Those that the model has where these are of 16 bits, else None.
        options: How it is computed.
    """

    weights: WeightOperands[Tensor]
    wide: WeightOperands[Tensor] | None
    options: BlockOptions

    def by_dense_fp8(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Return y [..., d_out] as dense FP8 computes it: rows of x and of h in E4M3, with a scale each.

        It is the yardstick: no kernel may have a larger error (docs/weights.md).
        """
        given = self.weights.map(lambda each: each.to(x.device)).of(_rounded(x.float()))
        block = dequantize(given, torch.float32).map(Tensor.float)
        weight, bias = block.first
        z = torch.nn.functional.linear(block.x, weight, bias).to(x.dtype)
        threshold = self.options.threshold if block.thresholds is None else block.thresholds
        h = activate(z, self.options.activation, threshold).float()
        if block.w_gate is not None:
            up = torch.nn.functional.linear(block.x, block.w_up, block.b_up)
            h = h * (torch.relu(up) if self.options.activation == "drelu" else up)
        y = torch.nn.functional.linear(_rounded(h), block.w_down.t(), block.b_down)
        return (y if residual is None else residual.float() + y).to(x.dtype)

    def by_both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return y in float64, with weights in FP8 and with those of 16 bits."""
        assert self.wide is not None
        x = x.cpu().double()
        forms = (cast(each.map(lambda tensor: tensor.detach().cpu()), x.dtype) for each in (self.weights, self.wide))
        y8, y = (run_block(each.of(x), self.options) for each in forms)
        return y8, y


@dataclass(frozen=True)
class Fp8Layer:
    """A linear layer of the model whose weight the candidate reads in FP8, [out, in], and its bias."""

    weight: Fp8
    bias: Tensor | None

    def by_dense_fp8(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Return y [..., out] as dense FP8 computes it, without a residual; see `Fp8Block`."""
        assert residual is None
        weight = self.weight.dequantize(torch.float32).to(x.device)
        bias = None if self.bias is None else self.bias.float()
        return torch.nn.functional.linear(_rounded(x.float()), weight, bias).to(x.dtype)


def fp8_layers(found: Rewritten) -> Iterator[tuple[Linear, Fp8Layer]]:
    """Yield the linear layers that are read in FP8, as they are compared."""
    for layer in found.fp8_linears:
        joined = found.in_fp8(layer)
        assert joined is not None
        widths = [width(each.node) for each in layer.linears]
        heights = [scale_blocks(each, 1)[0] for each in widths] if joined.form == "block" else widths
        values, scales = torch.split(joined.values.view(torch.uint8), widths), torch.split(joined.scale, heights)
        for each, part, scale in zip(layer.linears, values, scales, strict=True):
            bias = None if each.bias is None else tensor_of(found.program, each.bias.name).detach()
            yield each, Fp8Layer(Fp8(part.view(E4M3), scale), bias)


def _rounded(rows: Tensor) -> Tensor:
    return Fp8.round_rows(rows).dequantize(torch.float32)


def fp8_block(
    program: ExportedProgram, block: FfnBlock, options: BlockOptions, stored: Mapping[str, Fp8]
) -> Fp8Block | None:
    """Return a block as it is compared; None where its weights are read in 16 bits.

    Args:
        program: The program that it was found in.
        block: The block.
        options: How it is computed.
        stored: The weights that the model has in FP8, by name.
    """
    if not reads_fp8(block.weights):
        return None

    def tensor(weight: Weight) -> Tensor:
        return tensor_of(program, weight.name).detach()

    weights, wide = both_forms(block, lambda each: stored.get(each.name), tensor)
    return Fp8Block(weights, wide if is_quantised(block) else None, options)


def is_quantised(block: FfnBlock) -> bool:
    """Whether the model has the weights of a block in 16 bits, and they are read in eight."""
    return block.weights is not None and block.weights.reason == QUANTISED


def quantised_constants(program: ExportedProgram, block: FfnBlock) -> dict[str, Fp8]:
    """Return the matrices of a quantised block in FP8, in the shapes of their constants, by name."""
    found = {}
    for part in (block.gate, block.up, block.down):
        if part is None:
            continue
        weight = part.weight
        matrix = tensor_of(program, weight.name).detach()
        matrix = matrix.squeeze() if matrix.dim() > 2 else matrix
        rows_are_outputs = not weight.in_out
        kind = "row" if rows_are_outputs == (part is not block.down) else "column"
        found[weight.name] = Fp8.quantize(matrix, kind, f"layer {block.module}: {weight.name}")
    return found


def dequantized(program: ExportedProgram, known: Mapping[str, Fp8]) -> ExportedProgram:
    """Return a program with FP8 weights dequantized to the types of the constants that hold them."""
    names = {name for name in stored_tensors(program).values() if name in known}
    if not names:
        return program
    program = editable(program)
    for name in names:
        old = tensor_of(program, name)
        new = known[name].dequantize(torch.float64).to(old.dtype).reshape(old.shape).to(old.device)
        tensors = program.state_dict if name in program.state_dict else program.constants
        tensors[name] = torch.nn.Parameter(new, requires_grad=False) if isinstance(old, torch.nn.Parameter) else new
    return finish(program)


def kept_in_fp8(program: ExportedProgram, scales: Mapping[str, float]) -> dict[str, float]:
    """Return the scales of the keys and values that attention reads, by their nodes.

    Args:
        program: A model without a cache.
        scales: Those of the caches that a candidate has in FP8, by their inputs.

    Raises:
        UserError: The model has attention of another kind, or in other layers.
    """
    layers = sorted({int(found[1]) for found in map(_KEYS.fullmatch, scales) if found})
    caches = [f"past_key_values.{layer}.{part}" for layer in layers for part in ("key", "value")]
    blocks = [each.block for each in find_attention(program.graph)] if scales else []
    read = dict.fromkeys(node.name for block in blocks if block is not None for node in (block.k, block.v))
    if len(read) != len(caches) or scales.keys() != set(caches):
        what = "does not tell which keys and values a cache in FP8 would keep"
        got = f"{len(scales)} caches, and {len(blocks)} layers of attention"
        raise UserError("the model", what, got=got, fix="Check a candidate without --kv-cache-dtype.")
    return dict(zip(read, map(scales.__getitem__, caches), strict=True))


def rounded_in_cache(value: Tensor, scale: float) -> Tensor:
    """Return keys or values as a cache in FP8 keeps them, in their own type."""
    wide = value if value.dtype == torch.float64 else value.float()
    return ((wide / scale).clamp(-LARGEST, LARGEST).to(E4M3).double() * scale).to(value.dtype)
