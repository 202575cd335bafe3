"""Decide for each feed-forward block, and each linear layer outside of them, whether TwELL runs it, and say why."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch.fx import Node

from twellc.base.dtypes import dtype_name, kernel_dtypes
from twellc.base.errors import UserError, first_few
from twellc.passes.match.find_ffn import FfnBlock
from twellc.passes.match.find_linear import FoundLinear
from twellc.passes.match.linear import Weight, width
from twellc.passes.neurons import Staying, all_of
from twellc.passes.report import KEPT_WITH_BLOCKS, Choice, Layer, Linear, Repeated, Weights, reads_fp8
from twellc.plugins.block import BlockOptions, compression_of
from twellc.plugins.experts_op import exceeded_limit
from twellc.plugins.library import MAX_D_FF, MAX_PACKED_D_FF

KERNEL_DTYPES = kernel_dtypes()
# `--linear auto` takes linear layers where an optimization profile has at most so many tokens a call, as there the time
# goes into reading weights; and in FP8 where each has so many that their products are faster than those of 16.
FEW_TOKENS, MANY_TOKENS = 16, 512


# Says what is best for a block that can be rewritten and keeps these neurons.
Advise = Callable[[FfnBlock, Staying], Choice]


def repeat(decided: Mapping[str, Repeated]) -> Advise:
    """Return advice as it was decided before, by module; other blocks are taken."""
    choices = {module: Choice(**vars(each), expectation=None) for module, each in decided.items()}
    unknown = Choice("twell", "matches", 0, None, None)
    return lambda block, neurons: choices.get(block.module, unknown)


def decide(
    blocks: Sequence[FfnBlock],
    layers: str,
    advise: Advise | None = None,
    staying: Sequence[Staying] | None = None,
    decided: Sequence[str] = (),
    calls: Callable[[Node], Sequence[int]] = lambda x: (),
) -> list[Layer]:
    """Return a decision for each block.

    Args:
        blocks: What `find_ffn_blocks` found.
        layers: `auto`, `all`, `none`, or a regular expression that is searched in the module paths.
        advise: Decides for `auto`; None takes every match. It notes what it expects of other blocks, too.
        staying: Of each block the neurons that stay if TwELL runs it; None where all do, and nothing is known of them.
        decided: Paths of other blocks that are decided already: `layers` may match these alone.
        calls: Returns the most rows of a tensor in a call of each optimization profile.

    Raises:
        UserError: `layers` is not a regular expression, or matches none of the blocks.
    """
    pattern = None
    if layers not in ("auto", "all", "none"):
        try:
            pattern = re.compile(layers)
        except re.error as error:
            raise UserError(
                "--layers", f"not a regular expression ({error})", got=repr(layers), expected="auto, all, none or REGEX"
            ) from error
        paths = [*decided, *(block.module for block in blocks)]
        if paths and not any(map(pattern.search, paths)):
            modules = first_few([path or "'', the model itself" for path in paths])
            raise UserError("--layers", "matches no feed-forward block", got=repr(layers), expected=f"one of {modules}")
    result: list[Layer] = []
    taken: dict[Node, str] = {}  # projections of the blocks that TwELL runs
    owners: dict[tuple[Weight, ...], str] = {}  # first blocks with these weights
    for block, neurons in zip(blocks, staying or map(all_of, blocks), strict=True):
        refusal = block.refusal or _limits(block, calls) or _conflict(block, taken)
        layer = _decide(block, neurons, layers, pattern, refusal, advise)
        weights = tuple(part.weight for part in (block.gate, block.up, block.down) if part)
        owner = owners.setdefault(weights, block.module)
        if owner != block.module and block.up is not None:  # without it not all of the weights are known
            layer = replace(layer, reason=f"{layer.reason}; it has the weights of {owner}")
        if layer.decision == "twell":
            taken[block.down.node] = block.module
        result.append(layer)
    return result


def decide_linear(
    found: Sequence[FoundLinear],
    linear: str,
    calls: Callable[[Node], Sequence[int]],
    ranks: int = 1,
    taken: Collection[str] | None = None,
    weights: Callable[[FoundLinear], Weights | None] = lambda each: None,
) -> list[Linear]:
    """Return a decision for each linear layer outside of feed-forward blocks.

    Args:
        found: What `find_linear` found.
        linear: `auto`, `twell` or `tensorrt`.
        calls: Returns the most rows of a tensor in a call of each optimization profile.
        ranks: How many ranks share the program.
        taken: See `left_alone`.
        weights: Says in how many bits the weights are read if TwELL runs it; None if there is nothing to report.
    """
    result = []
    for each in found:
        limit = _linear_limits(each)
        bits = weights(each)
        multiplied = reads_fp8(bits) and bits != KEPT_WITH_BLOCKS  # with many tokens, in FP8
        reason = limit or left_alone(each.site, linear, calls(each.x), ranks, taken, fp8=multiplied)
        bits = None if reason else bits
        result.append(
            Linear(
                modules=list(each.modules),
                d_in=width(each.x),
                widths=each.widths,
                norm="none" if reason or each.norm is None else each.norm.kind,
                residual=not reason and each.residual is not None,
                choose=not reason and each.choice is not None,
                matched=not limit,
                decision="tensorrt" if reason else "twell",
                reason=reason or ("matches" if bits is None else f"matches; {bits}"),
                weights=bits,
            )
        )
    return result


def left_alone(
    site: str,
    linear: str,
    calls: Sequence[int],
    ranks: int,
    taken: Collection[str] | None,
    *,
    fp8: bool = False,
) -> str:
    """Say why a linear layer, or a norm, that the kernels take is left to TensorRT; empty where it is not.

    Args:
        site: What the layer is called, see `FoundLinear`; or the block behind the norm.
        linear: See `decide_linear`.
        calls: The most rows of what it reads, in a call of each optimization profile.
        ranks: How many ranks share the program.
        taken: What an earlier compilation has taken, to do it again.
        fp8: Whether many tokens would be multiplied in FP8.
    """
    if taken is not None:
        return "" if site in taken else "an earlier compilation left it"
    if ranks > 1:
        return "ranks share the model"
    fewest = min(calls, default=FEW_TOKENS + 1)
    if linear == "auto" and fewest > FEW_TOKENS and not (fp8 and fewest >= MANY_TOKENS):
        others = f", nor has each {MANY_TOKENS} or more" if fp8 else ""
        return f"no profile has at most {FEW_TOKENS} tokens a call{others}"
    return "--linear tensorrt" if linear == "tensorrt" else ""


def options_of(block: FfnBlock, layer: Layer, compression: int | None) -> BlockOptions:
    """Return how a block is computed by what was decided of it.

    Args:
        block: The block.
        layer: The decision.
        compression: The TwELL compression factor where the decision names none; None takes the default.
    """
    return BlockOptions(
        activation=block.activation,
        threshold=block.threshold,
        compression=compression_of(layer.compression, compression),
        hot=layer.hot,
        norm="none" if block.norm is None else block.norm.kind,
        eps=0.0 if block.norm is None else block.norm.eps,
    )


def _decide(
    block: FfnBlock,
    neurons: Staying,
    layers: str,
    pattern: re.Pattern[str] | None,
    refusal: str,
    advise: Advise | None,
) -> Layer:
    hot, compression = 0, None
    choice = advise(block, neurons) if advise is not None and not refusal else None
    if refusal:
        decision, reason = "dense", refusal
    elif layers == "none":
        decision, reason = "dense", "--layers none"
    elif pattern is not None and not pattern.search(block.module):
        decision, reason = "dense", f"not matched by --layers {pattern.pattern}"
    elif choice is None:
        decision, reason = "twell", "matches"
    elif layers == "auto" and choice.decision == "dense":
        decision, reason = "dense", f"left dense: {choice.facts}"
    else:
        decision, reason, hot, compression = "twell", choice.facts, choice.hot, choice.compression
    weights = block.weights if decision == "twell" else None
    return Layer(
        module=block.module,
        variant=block.variant,
        activation=block.activation,
        d_model=block.d_model,
        d_ff=block.d_ff,
        d_out=block.d_out,
        experts=0 if block.routing is None else block.routing.experts,
        top=0 if block.routing is None else block.routing.top,
        matched=not refusal,
        decision=decision,
        reason=reason if weights is None else f"{reason}; {weights}",
        weights=weights,
        residual=decision == "twell" and block.residual is not None,
        norm="none" if decision != "twell" or block.norm is None else block.norm.kind,
        hot=hot,
        compression=compression,
        expectation=choice.expectation if choice is not None else None,
        short_run=choice.short_run if choice is not None else None,
    )


def _limits(block: FfnBlock, calls: Callable[[Node], Sequence[int]]) -> str:
    """Return the limit of the kernels that the block exceeds, or an empty string."""
    if block.dtype not in KERNEL_DTYPES:
        return _dtype_limit(block.dtype)
    if 0 in (block.d_model, block.d_ff, block.d_out):
        return "one of its widths is 0"
    if block.routing is not None:
        experts, top, tokens = block.routing.experts, block.routing.top, max(calls(block.x), default=0)
        return exceeded_limit(experts, block.d_ff, (block.d_model, block.d_out), top=top, tokens=tokens)
    most = MAX_D_FF if block.gate is None else MAX_PACKED_D_FF
    if block.d_ff > most:
        return f"d_ff is {block.d_ff}; the kernels take at most {most} neurons of a {block.variant} block"
    for name, size in (("d_model", block.d_model), ("the output width", block.d_out)):
        if size % 8:
            return f"{name} is {size}; the kernels need a multiple of 8 (16-byte rows)"
    return ""


def _linear_limits(layer: FoundLinear) -> str:
    """Return the limit of the kernels that linear layers exceed, or an empty string."""
    dtype = layer.x.meta["val"].dtype
    if dtype not in KERNEL_DTYPES:
        return _dtype_limit(dtype)
    odd = [each for each in (width(layer.x), *layer.widths) if each % 8 or not each]
    return f"a width is {odd[0]}; the kernels need a positive multiple of 8 (16-byte rows)" if odd else ""


def _dtype_limit(dtype: torch.dtype) -> str:
    return f"computes in {dtype_name(dtype)}; the kernels take bfloat16 and float16"


def _conflict(block: FfnBlock, taken: dict[Node, str]) -> str:
    """Return which block has one of this one's projections already, or an empty string.

    In a stack of linears and ReLUs every inner projection is the down of one block and the up of the next, or the
    packed gate and up.
    """
    nodes = (node for part in (block.gate, block.up) if part for node in part.nodes)
    owner = next((taken[node] for node in nodes if node in taken), None)
    return f"it shares a projection with the block {owner}" if owner else ""
