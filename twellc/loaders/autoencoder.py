"""A sparse autoencoder or transcoder as a module: what it computes, whichever files it was stored in.

    z = normalised(x) - b_dec                  x [..., d_in]; each of the two only where the files say so
    f = activation(z W_enc + b_enc)            f [..., d_features], the features, mostly zeros
    y = restored(f W_dec + b_dec) + x W_skip   y [..., d_out]; W_skip of some transcoders

The middle, with `f W_dec + b_dec`, is a plain feed-forward block. All else stays outside of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from twellc.base.casts import moves_only
from twellc.features import Features, encode

_EPSILON = 1e-5  # what sae-lens adds to the deviation


class Dictionary(nn.Module):
    """The features of an autoencoder, and what they add up to: its feed-forward block.

    Attributes:
        encoder, decoder: Its two products.
        threshold: JumpReLU's, float32 [d_features]: a feature that is not larger is zero; None for plain ReLU. It
            stays float32 where the rest is cast, as by `.bfloat16()`: rounded it would turn features on and off.
        k: How many features of a token are kept, the largest; None keeps all.
    """

    def __init__(self, encoder: nn.Linear, decoder: nn.Linear, threshold: Tensor | None, k: int | None) -> None:
        super().__init__()
        self.encoder, self.decoder, self.k = encoder, decoder, k
        self.threshold = None if threshold is None else nn.Parameter(threshold.float().contiguous())

    def features(self, z: Tensor) -> Tensor:
        """Return the features [..., d_features] of z [..., d_in]."""
        pre: Tensor = self.encoder(z)
        if self.k is not None:
            values, places = pre.topk(self.k, dim=-1, sorted=False)
            return torch.zeros_like(pre).scatter(-1, places, values.relu())
        if self.threshold is not None:
            return pre.relu() * (pre > self.threshold)
        return pre.relu()

    def forward(self, z: Tensor) -> Tensor:
        """Return what the features of z [..., d_in] add up to, [..., d_out]."""
        y: Tensor = self.decoder(self.features(z))
        return y

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Dictionary:
        """Let `.to()` and its kind move thresholds, but never convert them."""
        super()._apply(moves_only(fn, [self.threshold]), recurse)  # type: ignore[no-untyped-call]
        return self


class SparseAutoencoder(nn.Module):
    """A sparse autoencoder or transcoder, as sae-lens computes it.

    Attributes:
        block: Its features.
        skip: A product of x that is added to the result; None without.
        centred: Whether the decoder's bias is subtracted from x first.
        normalised: How each x is normalised, and the result restored: `none`, `layer_norm`, or
            `constant_norm_rescale`, to a norm of sqrt(d_in).
        restores: Whether the result is restored; that of a transcoder is not.
        notes: What a user should hear about how it was read.
    """

    def __init__(
        self,
        block: Dictionary,
        skip: nn.Linear | None,
        *,
        centred: bool,
        normalised: str,
        restores: bool,
        notes: list[str],
    ) -> None:
        super().__init__()
        self.block, self.skip, self.centred = block, skip, centred
        self.normalised, self.restores, self.notes = normalised, restores, notes

    def forward(self, x: Tensor) -> Tensor:
        """Return the reconstruction, or what a transcoder predicts: [..., d_out] of x [..., d_in]."""
        z, restored = self._read(x)
        y: Tensor = self.block(z)
        if self.restores:
            y = restored(y)
        if self.skip is not None:
            y = y + self.skip(x)
        return y

    def encode(self, x: Tensor) -> Features:
        """Return the features of x [..., d_in] that are not zero; without a dense tensor, but for top-k.

        `twellc.features.decode` gives what they add up to: `self.block(z)` of the same z, neither restored nor with a
        skip.

        Raises:
            ValueError, TypeError: See `twellc.features.encode`.
        """
        z, _ = self._read(x)
        block, threshold = self.block, self.block.threshold
        if block.k is not None:
            dense = block.features(z).reshape(-1, block.encoder.out_features)
            token, place = dense.nonzero(as_tuple=True)
            offsets = torch.cat([token.new_zeros(1), token.bincount(minlength=len(dense)).cumsum(0)])
            return Features(place.int(), dense[token, place], offsets, dense.shape[-1], x.shape[:-1])
        if threshold is None:
            return encode(z, block.encoder.weight, block.encoder.bias)
        bounds = threshold.float().nan_to_num(math.inf, math.inf)  # nothing is above NaN
        return encode(z, block.encoder.weight, block.encoder.bias, activation="fatrelu", thresholds=bounds)

    def _read(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return what the block reads of x, and what restores its result."""
        z, restored = self._normalise(x)
        return z - self.block.decoder.bias if self.centred else z, restored

    def _normalise(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return x normalised, and what undoes that for the result."""
        if self.normalised == "layer_norm":
            mean = x.mean(dim=-1, keepdim=True)
            deviation = (x - mean).std(dim=-1, keepdim=True)
            return (x - mean) / (deviation + _EPSILON), lambda y: y * deviation + mean
        if self.normalised == "constant_norm_rescale":
            factor = x.shape[-1] ** 0.5 / x.norm(dim=-1, keepdim=True)
            return x * factor, lambda y: y / factor
        return x, lambda y: y
