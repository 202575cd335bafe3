"""Features: encoded and decoded as the dense formula says, on a CPU, and on a GPU by the kernels."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.tolerance import assert_as_accurate
from twellc.features import Features, decode, encode
from twellc.plugins.fp8 import Fp8
from twellc.plugins.meaning import activate

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BF16 = torch.bfloat16


def autoencoder(tokens: int, d_model: int, d_ff: int, density: float, device: str) -> tuple[Tensor, ...]:
    """Return x, w_enc, b_enc, thresholds, w_dec and b_dec in bfloat16, of which about so many neurons are active.

    Pre-activations are small whole numbers, which are the same whatever the order of sums is.
    """
    made = torch.Generator().manual_seed(0)

    def whole(*sizes: int) -> Tensor:
        return torch.randint(-1, 2, sizes, generator=made)

    shift = {0.0: -100, 1.0: 100}.get(density, 0)
    above = torch.distributions.Normal(0.0, 2 / 3 * d_model**0.5).icdf(torch.tensor(1 - density).clamp(0.5, 0.9999))
    thresholds = above.floor() + 0.25 + whole(d_ff)
    w_dec, b_dec = torch.randn(d_ff, d_model, generator=made), torch.randn(d_model, generator=made)
    given = (whole(tokens, d_model), whole(d_ff, d_model), whole(d_ff) + shift, w_dec, b_dec)
    x, w_enc, b_enc, w_dec, b_dec = (each.to(device, BF16) for each in given)
    return x, w_enc, b_enc, thresholds.to(device), w_dec, b_dec


def dense(x: Tensor, w_enc: Tensor, b_enc: Tensor, thresholds: Tensor) -> Tensor:
    """Return the dense activations, in the dtype of x; z as the kernels round it."""
    z = torch.nn.functional.linear(x.float(), w_enc.float(), b_enc.float()).to(x.dtype)
    return activate(z, "fatrelu", thresholds)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(actual.nan_to_num(1e30), expected.nan_to_num(1e30))


def as_dense(found: Features) -> Tensor:
    rows = torch.arange(len(found.offsets) - 1, device=found.offsets.device).repeat_interleave(found.offsets.diff())
    total = len(rows)
    result = found.values.new_zeros(len(found.offsets) - 1, found.d_ff)
    result[rows, found.indices[:total].long()] = found.values[:total]
    return result


CASES = [
    (tokens, d_ff, density)
    for tokens, d_ff in ((1, 300), (7, 65536), (33, 65544), (300, 1000), (9, 200_000), (700, 4096))
    for density in (0.0, 0.001, 0.02, 1.0)
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.sampled(12)
@pytest.mark.parametrize(("tokens", "d_ff", "density"), CASES)
def test_features_are_those_of_the_dense_formula(tokens: int, d_ff: int, density: float, device: str) -> None:
    x, w_enc, b_enc, thresholds, w_dec, b_dec = autoencoder(tokens, 64, d_ff, density, device)
    if density == 0.001 and tokens > 1:
        x[tokens // 2, 3] = math.nan
    found = encode(x, w_enc, b_enc, activation="fatrelu", thresholds=thresholds)
    expected = dense(x, w_enc, b_enc, thresholds)
    assert found.indices.dtype == torch.int32 and found.values.dtype == BF16 and found.d_ff == d_ff
    ascending = found.indices.diff() > 0
    inner = found.offsets[1:-1][(found.offsets[1:-1] > 0) & (found.offsets[1:-1] < len(found.indices))]
    ascending[inner - 1] = True
    assert ascending.all() and found.offsets[0] == 0 and found.offsets[-1] == len(found.indices) == len(found.values)
    actual = as_dense(found)
    assert_equal(actual, expected)
    y = decode(found, w_dec, b_dec)
    exact = actual.double() @ w_dec.double() + b_dec.double()
    plain = (actual.float() @ w_dec.float() + b_dec.float()).to(BF16)
    known = ~exact.isnan().any(1)
    assert torch.equal(y.isnan(), exact.isnan())
    assert_as_accurate(y[known], plain[known], exact[known])
    assert_equal(decode(found, w_dec, b_dec), y)  # the same bits


@pytest.mark.parametrize("device", DEVICES)
def test_features_of_torch_topk_decode(device: str) -> None:
    x, w_enc, b_enc, _, w_dec, _ = autoencoder(5, 64, 70_000, 1.0, device)
    values, indices = torch.nn.functional.linear(x, w_enc, b_enc).topk(37)
    values[1, 4:], indices[1, 4:] = 0, -1  # BatchTopK has fewer of some tokens: an index of none is then nothing
    w_dec[65_000:] = math.inf
    w_dec[indices.unique().clamp_min(0)] = 1.5
    y = decode((indices.view(5, 1, 37), values.view(5, 1, 37)), w_dec)
    assert_equal(y, (values.float().sum(-1)[:, None, None] * 1.5).to(BF16).expand(5, 1, 64))
    indices[2, 0] = 70_000
    assert decode((indices, values), w_dec).isnan().all(1).tolist() == [False, False, True, False, False]
    narrow = torch.full((5, 1), 200, dtype=torch.uint8, device=device)
    one = values[:, :1]
    assert_equal(decode((narrow, one), w_dec), (one.float() * w_dec[200].float()).to(BF16))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "outside"),
    [
        (torch.uint8, [70, 255]), (torch.int8, [70, -1, -128]), (torch.int16, [70, -1, 32767]),
        (torch.int32, [70, -1, 2**31 - 1, -(2**31)]), (torch.uint16, [70, 65535]), (torch.uint32, [70, 2**32 - 1]),
        (torch.int64, [70, -1, 2**31, 2**32, 2**32 + 5, -(2**32), 2**63 - 1, -(2**63)]),
        (torch.uint64, [70, 2**32, 2**63, 2**64 - 1]),
    ],
    ids=str,
)  # fmt: skip
def test_an_index_outside_of_the_range(dtype: torch.dtype, outside: list[int], device: str) -> None:
    """Its token's y is NaN, and nothing is waited for, unless its value is 0."""
    w_dec = torch.arange(70 * 8).view(70, 8).to(device, BF16)
    indices = torch.tensor([[5], *([each] for each in outside), [5]], dtype=dtype).to(device)
    values = torch.ones(len(indices), 1, dtype=BF16, device=device)
    decode((indices, values), w_dec)  # what is loaded and set up once is waited for
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        y = decode((indices, values), w_dec)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert_equal(y[[0, -1]], w_dec[[5, 5]])
    assert y[1:-1].isnan().all()
    assert not decode((indices, values * 0), w_dec).any()


@pytest.mark.parametrize("device", DEVICES)
def test_no_tokens_with_a_capacity(device: str) -> None:
    x, w_enc, b_enc, _, w_dec, _ = autoencoder(6, 64, 300, 0.02, device)
    found = encode(x[:0], w_enc, b_enc, capacity=10)
    assert (found.indices.shape, found.values.shape, found.offsets.tolist()) == ((10,), (10,), [0])
    assert decode(found, w_dec).shape == (0, 64)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "d_ff"), [(100_003, 256), (4099, 70_000)])
@pytest.mark.parametrize("is_bounded", [False, True])
def test_many_tokens(tokens: int, d_ff: int, is_bounded: bool) -> None:
    """The lists are those of a CPU, in each run, where counts of a part are more than one round of their scan."""
    x, w_enc, b_enc, thresholds, *_ = autoencoder(tokens, 64, d_ff, 0.01, "cuda")
    capacity = tokens * d_ff // 50 if is_bounded else None

    def lists(device: str) -> list[Tensor]:
        given = (each.to(device) for each in (x, w_enc, b_enc))
        bounds = thresholds.to(device)
        found = encode(*given, activation="fatrelu", thresholds=bounds, capacity=capacity)
        total = int(found.offsets[-1])
        assert 0 < total <= len(found.indices)
        return [found.offsets.cpu(), found.indices[:total].cpu(), found.values[:total].cpu()]

    expected = lists("cpu")
    for _ in range(2):
        for actual, wanted in zip(lists("cuda"), expected, strict=True):
            assert torch.equal(actual, wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_sparse_csr(device: str) -> None:
    x, w_enc, b_enc, thresholds, *_ = autoencoder(6, 64, 300, 0.02, device)
    found = encode(x.view(2, 3, 64), w_enc, b_enc, activation="fatrelu", thresholds=thresholds)
    matrix = found.to_sparse_csr()
    assert (matrix.layout, matrix.shape, found.leading) == (torch.sparse_csr, (6, 300), (2, 3))
    assert_equal(matrix.to_dense(), as_dense(found))
    empty = encode(x[:0], w_enc, b_enc)
    assert empty.to_sparse_csr().shape == (0, 300) and decode(empty, w_enc).shape == (0, 64)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["row", "tensor"])
@pytest.mark.parametrize(("tokens", "d_ff", "density"), [(3, 300, 0.02), (40, 70_000, 0.001), (700, 4096, 0.02)])
def test_weights_in_fp8(tokens: int, d_ff: int, density: float, kind: str, device: str) -> None:
    """Those of x, which fit into E4M3, are not rounded, and the largest of a row is worth 448."""
    x, w_enc, b_enc, thresholds, *_ = autoencoder(tokens, 128, d_ff, density, device)
    narrow, scale = Fp8.quantize(w_enc, kind)
    found = encode(
        x, narrow, b_enc, w_enc_scale=scale, activation="fatrelu", thresholds=thresholds, capacity=tokens * d_ff
    )
    assert_equal(as_dense(found), dense(x, w_enc, b_enc, thresholds))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("tokens", "density"), [(7, 0.02), (300, 0.02), (300, 1.0)])
def test_a_capacity(tokens: int, density: float, device: str) -> None:
    """With room for all the same features; with less those that there is room for, and NaN for the tokens cut off."""
    x, w_enc, b_enc, thresholds, w_dec, _ = autoencoder(tokens, 64, 1000, density, device)
    exact = encode(x, w_enc, b_enc, activation="fatrelu", thresholds=thresholds)
    y, total = decode(exact, w_dec), len(exact.indices)
    for capacity in (total + 5, total, total - total // 3, 1):
        found = encode(x, w_enc, b_enc, activation="fatrelu", thresholds=thresholds, capacity=capacity)
        kept = min(capacity, total)
        assert len(found.indices) == len(found.values) == capacity and torch.equal(found.offsets, exact.offsets)
        assert torch.equal(found.indices[:kept], exact.indices[:kept])
        assert torch.equal(found.values[:kept], exact.values[:kept])
        expected = y.masked_fill((exact.offsets[1:] > capacity)[:, None], math.nan)
        assert_equal(decode(found, w_dec), expected)
    with pytest.raises(ValueError, match=f"must have a capacity of {total} at least, got 1"):
        found.to_sparse_csr()
    assert_equal(replace(found, indices=exact.indices, values=exact.values).to_sparse_csr().values(), exact.values)


@pytest.mark.gpu
def test_a_cuda_graph_holds_features_with_a_capacity() -> None:
    x, w_enc, b_enc, thresholds, w_dec, b_dec = autoencoder(300, 64, 70_000, 0.02, "cuda")

    def call(capacity: int | None) -> Tensor:
        found = encode(x, w_enc, b_enc, activation="fatrelu", thresholds=thresholds, capacity=capacity)
        return decode(found, w_dec, b_dec)

    capacity = 300 * 7000
    call(capacity)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(capacity)
    for _ in range(2):
        x.copy_(x.roll(1, 0))
        graph.replay()
        assert_equal(y, call(None))


def test_what_does_not_fit() -> None:
    x, w_enc, b_enc, thresholds, w_dec, b_dec = autoencoder(6, 64, 300, 0.02, "cpu")
    with pytest.raises(TypeError, match=r"x must be torch.bfloat16 like the weights, got torch.float32"):
        encode(x.float(), w_enc)
    with pytest.raises(ValueError, match=r"x must have shape \(6, 64\), got \(6, 32\)"):
        encode(x[:, :32], w_enc)
    with pytest.raises(ValueError, match=r"activation must be one of relu, relu2, fatrelu, got 'drelu'"):
        encode(x, w_enc, activation="drelu")
    with pytest.raises(ValueError, match="thresholds are for fatrelu"):
        encode(x, w_enc, thresholds=thresholds)
    with pytest.raises(ValueError, match=r"b_enc must have shape \(300,\), got \(299,\)"):
        encode(x, w_enc, b_enc[1:])
    with pytest.raises(TypeError, match=r"x must be of a floating-point dtype, got torch.int32"):
        encode(x.int(), w_enc.int())
    found = encode(x, w_enc, b_enc)
    with pytest.raises(ValueError, match=r"w_dec must have shape \(300, 64\), got \(299, 64\)"):
        decode(found, w_dec[1:])
    with pytest.raises(TypeError, match=r"values must be torch.float32 like the weights, got torch.bfloat16"):
        decode(found, w_dec.float(), b_dec.float())
    with pytest.raises(ValueError, match=r"b_dec must have shape \(64,\), got \(63,\)"):
        decode(found, w_dec, b_dec[1:])
    with pytest.raises(ValueError, match=r"must have one shape \[..., k\], got \(6, 3\) of torch.int64 and \(6, 2\)"):
        decode((torch.zeros(6, 3, dtype=torch.int64), torch.zeros(6, 2, dtype=BF16)), w_dec)
    wrong = replace(found, d_ff=301)
    with pytest.raises(ValueError, match="w_dec must have shape"):
        decode(wrong, w_dec)


@pytest.mark.gpu
def test_no_dense_tensor_on_a_gpu() -> None:
    """What is taken beside weights and features is a tenth of the dense tensor at most."""
    tokens, d_ff = 2048, 131_072
    x, w_enc, b_enc, thresholds, w_dec, b_dec = autoencoder(tokens, 64, d_ff, 0.001, "cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = encode(x, w_enc, b_enc, activation="fatrelu", thresholds=thresholds)
    decode(found, w_dec, b_dec)
    assert torch.cuda.max_memory_allocated() - before <= 0.1 * tokens * d_ff * 2
