"""Features of sparse autoencoders: the active neurons of each token with their values, without a dense tensor.

    encode    x [..., d_model]  ->  features: for each token the neurons where act(x W^T + b) is not 0, and the values
    decode    features          ->  y [..., d_out] = sum of value * w_dec[neuron] + b_dec

docs/features.md has an example. On a GPU both run kernels of the plugin library, in bfloat16 and float16; on a CPU they
are computed in pieces. The pre-activation is rounded to the element type, as in a `twell` block. y is a sum in float32,
rounded once. The same call on the same device gives the same bits. Nothing is recorded for gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twellc.features import cpu, gpu


@dataclass(frozen=True)
class Features:
    """Active neurons of tokens, token after token, in ascending order within each.

    Attributes:
        indices: Which neurons, int32 [entries], or [capacity] if one was given.
        values: Their activations, in the dtype of x [entries], or [capacity].
        offsets: Where each token's entries begin, and where the last one's end, int64 [tokens + 1]. Entries behind that
            end have no meaning; an end behind the capacity means that entries are missing.
        d_ff: How many neurons there are.
        leading: The dimensions of x but the last; their product is `tokens`.
    """

    indices: Tensor
    values: Tensor
    offsets: Tensor
    d_ff: int
    leading: torch.Size

    def to_sparse_csr(self) -> Tensor:
        """Return them as a sparse tensor [tokens, d_ff] of torch, in the layout `torch.sparse_csr`.

        Raises:
            ValueError: Entries are missing.
        """
        total, capacity = int(self.offsets[-1]), len(self.indices)
        if total > capacity:
            raise ValueError(f"twell: features must have a capacity of {total} at least, got {capacity}")
        narrow = total <= torch.iinfo(torch.int32).max
        rows = self.offsets.int() if narrow else self.offsets
        columns = self.indices[:total] if narrow else self.indices[:total].long()
        return torch.sparse_csr_tensor(rows, columns, self.values[:total], (len(self.offsets) - 1, self.d_ff))


def encode(
    x: Tensor,
    w_enc: Tensor,
    b_enc: Tensor | None = None,
    *,
    w_enc_scale: Tensor | None = None,
    activation: str = "relu",
    threshold: float = 0.0,
    thresholds: Tensor | None = None,
    capacity: int | None = None,
) -> Features:
    """Return which neurons are active for each token, and their activations.

    On a GPU it waits for the number of active neurons. With a capacity it does not, so a CUDA graph can hold it.

    Args:
        x: [..., d_model], in the dtype of w_enc and b_enc.
        w_enc: [d_ff, d_model], up to 2^20 neurons; or in float8_e4m3fn.
        b_enc: [d_ff], or None.
        w_enc_scale: The scales of a float8_e4m3fn w_enc, float32: [], or [d_ff, 1], as docs/weights.md says.
        activation: relu, relu2 or fatrelu.
        threshold: Of fatrelu, which keeps the values above it.
        thresholds: Of fatrelu (JumpReLU), float32 [d_ff]: one for each neuron. Below 0 counts as 0.
        capacity: Room for this many entries of all tokens together; None: for as many as there are.

    Raises:
        ValueError: A shape does not fit, an option is out of range, or the kernels do not take the widths.
        TypeError: A dtype does not fit; on a GPU, one other than bfloat16 and float16.
    """
    if capacity is not None and capacity < 1:
        raise ValueError(f"twell: capacity must be 1 or more, got {capacity}")
    given = {"x": x, "w_enc": w_enc, "b_enc": b_enc, "w_enc_scale": w_enc_scale, "thresholds": thresholds}
    run = gpu.encode if x.is_cuda else cpu.encode
    lists = run({**given, "activation": activation, "threshold": threshold}, capacity)
    return Features(*lists, w_enc.shape[0], x.shape[:-1])


def decode(features: Features | tuple[Tensor, Tensor], w_dec: Tensor, b_dec: Tensor | None = None) -> Tensor:
    """Return y [..., d_out], the sum of each token's rows of w_dec times their values.

    A value of 0 adds exactly 0. An index outside of 0 to d_ff - 1 makes its token's y NaN, unless its value is 0. So
    does an entry that is missing for want of capacity.

    Args:
        features: The result of `encode`; or indices, of an integer dtype, and values, both [..., k], as `torch.topk`.
        w_dec: [d_ff, d_out], in the dtype of the values.
        b_dec: [d_out], or None.

    Raises:
        ValueError: A shape does not fit, or the kernels do not take the widths.
        TypeError: A dtype does not fit; on a GPU, one other than bfloat16 and float16.
    """
    offsets: Tensor | None = None
    if isinstance(features, Features):
        indices, values, offsets, leading = features.indices, features.values, features.offsets, features.leading
    else:
        (indices, values), leading = features, features[1].shape[:-1]
        if indices.shape != values.shape or indices.is_floating_point():
            got = f"{tuple(indices.shape)} of {indices.dtype} and {tuple(values.shape)}"
            raise ValueError(f"twell: indices, of integers, and values must have one shape [..., k], got {got}")
    d_ff = features.d_ff if isinstance(features, Features) else len(w_dec)
    given = {"indices": indices, "values": values, "w_dec": w_dec, "b_dec": b_dec, "d_ff": d_ff}
    run = gpu.decode if values.is_cuda else cpu.decode
    return run(given, offsets, leading)
