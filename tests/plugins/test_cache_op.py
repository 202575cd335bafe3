"""The torch ops of a key-value cache: what they mean on a CPU, and that a GPU computes the same."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.processes import at_once
from tests.tolerance import assert_as_accurate, assert_same
from twellc.plugins import cache_op, library
from twellc.plugins.cache_op import APPEND, APPEND_IN_PLACE, CACHE_MASK, CACHED_ATTENTION

SCALE = 0.17
BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


# batch, tokens, kv_heads, length, width of keys, width of values; starts; counts
APPENDS: dict[str, tuple[tuple[int, ...], list[int], list[int]]] = {
    "one-token": ((3, 1, 2, 9, 16, 16), [0, 4, 8], [1, 1, 1]),
    "none": ((3, 1, 2, 9, 16, 16), [0, 4, 9], [1, 0, 0]),
    "chunk": ((4, 5, 3, 9, 8, 8), [0, 4, 2, 7], [5, 5, 3, 0]),
    "to-the-last-place": ((2, 4, 1, 7, 8, 8), [3, 5], [4, 2]),
    "behind-the-last-place": ((3, 4, 1, 7, 8, 8), [5, 7, 100], [4, 1, 4]),
    "odd-width": ((2, 3, 2, 6, 5, 5), [1, 3], [3, 2]),
    "two-widths": ((2, 3, 2, 6, 24, 16), [1, 3], [3, 2]),
    "one-token-wide": ((3, 1, 2, 9, 64, 128), [0, 4, 8], [1, 1, 0]),
    "large": ((33, 40, 4, 128, 128, 128), [*range(33)], [(7 * i) % 41 for i in range(33)]),
}


def operands(name: str, dtype: torch.dtype) -> list[Tensor]:
    (batch, tokens, heads, length, *widths), starts, counts = APPENDS[name]
    caches = [torch.randn(batch, heads, length, width).to(dtype) for width in widths]
    new = [torch.randn(batch, tokens, heads, width).to(dtype) for width in widths]
    return [*caches, *new, int32(*starts), int32(*counts)]


def appended(cache: Tensor, new: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
    """Return a cache with new rows in it, place by place."""
    cache = cache.clone()
    for row, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        for token in range(count):
            if start + token < cache.shape[2]:
                cache[row, :, start + token] = new[row, token]
    return cache


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])
@pytest.mark.parametrize("name", APPENDS)
def test_append(name: str, dtype: torch.dtype, device: str) -> None:
    keys, values, *new = operands(name, dtype)
    expected = [appended(cache, new[index], new[2], new[3]) for index, cache in enumerate((keys, values))]
    on_device = [tensor.to(device) for tensor in (keys, values, *new)]
    before = [tensor.clone() for tensor in on_device]
    for result, right in zip(APPEND(*on_device), expected, strict=True):
        assert torch.equal(result.cpu(), right)
    for tensor, old in zip(on_device, before, strict=True):
        assert torch.equal(tensor, old)
    cache_op.write_by_torch((before[0], before[1]), (before[2], before[3]), *before[4:])
    APPEND_IN_PLACE(*on_device)
    for tensor, by_torch, right in zip(on_device, before, [*expected, *new], strict=True):
        assert torch.equal(tensor.cpu(), right) and torch.equal(by_torch.cpu(), right)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [1, 4, 8])
def test_append_takes_any_address(offset: int) -> None:
    keys, values, *new = (tensor.cuda() for tensor in operands("chunk", BF16))
    expected = APPEND(keys, values, *new)

    def moved(tensor: Tensor) -> Tensor:
        memory = torch.empty(tensor.numel() + 8, dtype=tensor.dtype, device="cuda")
        return memory[offset : offset + tensor.numel()].view(tensor.shape).copy_(tensor)

    for result, right in zip(APPEND(keys, values, *map(moved, new[:2]), *new[2:]), expected, strict=True):
        assert torch.equal(result, right)


# batch, tokens, heads, kv_heads, length, width; queries and keys of each sequence
ATTENTIONS: dict[str, tuple[tuple[int, ...], list[int], list[int]]] = {
    "one-query": ((3, 1, 4, 2, 9, 16), [1, 1, 1], [1, 5, 9]),
    "chunk": ((3, 4, 4, 2, 9, 16), [4, 3, 1], [9, 3, 2]),
    "mqa": ((2, 3, 4, 1, 7, 8), [3, 2], [7, 6]),
    "full": ((2, 7, 2, 2, 7, 8), [7, 4], [7, 7]),
}
LARGE: dict[str, tuple[tuple[int, ...], list[int], list[int]]] = {
    **{
        f"decode-{batch}-{heads}-{kv_heads}-{width}": (
            (batch, 1, heads, kv_heads, 1024, width),
            [1] * batch,
            [1 + (613 * i + 500) % 1024 for i in range(batch)],
        )
        for batch, heads, kv_heads, width in ((1, 16, 16, 128), (8, 16, 16, 128), (32, 32, 8, 64), (3, 8, 1, 80))
    },
    "decode-4096": ((4, 1, 16, 4, 4096, 128), [1] * 4, [4096, 1, 2047, 3000]),
    "prefill": ((2, 512, 16, 4, 1024, 128), [512, 300], [512, 300]),
    "second-chunk": ((3, 256, 8, 8, 1024, 64), [256, 255, 1], [1024, 400, 1]),
    "odd-chunk": ((2, 37, 8, 2, 333, 128), [37, 5], [333, 64]),
    "wide": ((2, 16, 4, 2, 96, 256), [16, 3], [90, 50]),
    "two-tokens": ((2, 2, 8, 2, 200, 128), [2, 1], [200, 1]),
}


# One token of few sequences, which the library's own kernel attends to.
LENGTHS = [4096, 1, 31, 33, 1000, 32, 129, 1024]
ONE_TOKEN: dict[str, tuple[tuple[int, ...], list[int], list[int]]] = {
    f"one-token-{batch}-{heads}-{kv_heads}-{width}": (
        (batch, 1, heads, kv_heads, max(LENGTHS[-batch:]), width),
        [1] * batch,
        LENGTHS[-batch:],
    )
    for batch, heads, kv_heads, width in (
        (8, 8, 8, 128), (8, 32, 8, 128), (8, 8, 1, 128), (7, 40, 2, 128), (1, 3, 3, 64), (5, 6, 2, 64), (3, 4, 4, 80),
        (3, 6, 2, 96), (4, 8, 1, 256), (8, 2, 2, 256), (2, 16, 16, 128), (1, 16, 16, 128),
    )
}  # fmt: skip


def attention_operands(name: str, dtype: torch.dtype) -> list[Any]:
    (batch, tokens, heads, kv_heads, length, width), queries, keys = (ATTENTIONS | LARGE | ONE_TOKEN)[name]
    shapes = (batch, tokens, heads, width), *[(batch, kv_heads, length, width)] * 2
    return [*(torch.randn(shape).to(dtype) for shape in shapes), int32(*queries), int32(*keys), SCALE]


def attention_of(q: Tensor, keys: Tensor, values: Tensor, queries: Tensor, known: Tensor, scale: float) -> Tensor:
    """Compute it query by query, in the dtype of q where that is wide."""
    y = torch.zeros_like(q)
    group = q.shape[2] // keys.shape[1]
    for row, (count, seen) in enumerate(zip(queries.tolist(), known.tolist(), strict=True)):
        for query in range(count):
            last = seen - count + query + 1
            own_keys, own_values = (each[row, :, :last].repeat_interleave(group, 0) for each in (keys, values))
            weights = (torch.einsum("hw,hkw->hk", q[row, query], own_keys) * scale).softmax(-1)
            y[row, query] = torch.einsum("hk,hkw->hw", weights, own_values)
    return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention(name: str, dtype: torch.dtype) -> None:
    given = attention_operands(name, dtype)
    assert_same(CACHED_ATTENTION(*given), attention_of(*given))


def widths_without_plan(fp8: bool) -> list[int]:
    """Return the widths of heads of the problems so far that the library does not compute."""
    known = cache_op._PLANS.known.items()
    problems = [library.AttentionProblem.from_buffer_copy(key[1]) for key, plan in known if plan is None]
    return [problem.width for problem in problems if problem.fp8 == fp8]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", [*ATTENTIONS, *LARGE, *ONE_TOKEN])
def test_attention_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    q, keys, values, queries, known, scale = attention_operands(name, dtype)
    # What no query sees is in memory, too, and must be finite alone.
    truth = attention_of(q.double(), keys.double(), values.double(), queries, known, scale)
    plain = CACHED_ATTENTION(q, keys, values, queries, known, scale)
    y = CACHED_ATTENTION(*(tensor.cuda() for tensor in (q, keys, values, queries, known)), scale)
    for row, count in enumerate(queries.tolist()):
        assert (y[row, count:] == 0).all()
    assert_as_accurate(y.cpu(), plain, truth)
    assert widths_without_plan(fp8=False) == [], "cuDNN refuses some"


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("name", ONE_TOKEN)
def test_one_token_sees_its_keys_alone(name: str) -> None:
    """The same bits in each call, whatever stands in places that are not used."""
    q, keys, values, *counts = [each.cuda() for each in attention_operands(name, BF16)[:-1]]
    first = CACHED_ATTENTION(q, keys, values, *counts, SCALE)
    for row, known in enumerate(counts[1].tolist()):
        keys[row, :, known:], values[row, :, known:] = float("nan"), float("nan")
    for _ in range(20):
        assert torch.equal(CACHED_ATTENTION(q, keys, values, *counts, SCALE), first)


@pytest.mark.gpu
@pytest.mark.parametrize("place", [0, 30, 1023])
def test_nan_reaches_one_token(place: int) -> None:
    q, keys, values, *counts = [each.cuda() for each in attention_operands("one-token-2-16-16-128", BF16)[:-1]]
    q[1, 0, 3, 7] = keys[1, 5, place, 7] = values[1, 6, place, 7] = float("nan")
    y = CACHED_ATTENTION(q, keys, values, *counts, SCALE)
    expected = torch.zeros_like(y, dtype=torch.bool)
    expected[1, 0, 3] = expected[1, 0, 5] = expected[1, 0, 6, 7] = True
    assert torch.equal(y.isnan(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["one-query", "decode-8-16-16-128", "odd-chunk"])
def test_torch_computes_what_cudnn_does_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_op, "_library_with_cudnn", lambda: None)
    q, keys, values, queries, known, scale = attention_operands(name, BF16)
    truth = attention_of(q.double(), keys.double(), values.double(), queries, known, scale)
    y = CACHED_ATTENTION(*(tensor.cuda() for tensor in (q, keys, values, queries, known)), scale)
    assert_as_accurate(y.cpu(), CACHED_ATTENTION(q, keys, values, queries, known, scale), truth)


# Cosines and sines as well: of some appended keys, and of some queries.
ROTATED = ("chunk", "one-token-wide", "to-the-last-place", "one-token", "two-widths", "large")
ROTATED_QUERIES = (
    "chunk", "one-token-8-32-8-128", "one-token-3-4-4-80", "one-token-3-6-2-96", "one-token-4-8-1-256",
    "one-token-5-6-2-64", "decode-32-32-8-64", "odd-chunk", "prefill",
)  # fmt: skip


def angles_of(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines for rows [batch, tokens, heads, width]."""
    angles = torch.randn(2, *rows.shape[:2], rows.shape[3])
    return angles[0].cos().to(rows.dtype), angles[1].sin().to(rows.dtype)


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    crossed = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cosines[:, :, None] + crossed * sines[:, :, None]


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])
@pytest.mark.parametrize("name", ROTATED)
def test_append_rotates(name: str, dtype: torch.dtype, device: str) -> None:
    keys, values, new_keys, *others = operands(name, dtype)
    angles = angles_of(new_keys)
    turned = rotated(new_keys.double(), *(each.double() for each in angles))
    right = appended(keys.double(), turned, *others[1:])
    yardstick = appended(keys, turned.to(dtype), *others[1:])
    on_device = [tensor.to(device) for tensor in (keys, values, new_keys, *others, *angles)]
    found, found_values = APPEND(*on_device)
    assert_as_accurate(found.cpu(), yardstick, right)
    assert torch.equal(found.cpu()[right == keys], keys[right == keys])
    assert torch.equal(found_values.cpu(), appended(values, *others))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_rotates(name: str, dtype: torch.dtype) -> None:
    q, *others = attention_operands(name, dtype)
    angles = angles_of(q)
    assert_same(CACHED_ATTENTION(q, *others, *angles), attention_of(rotated(q, *angles), *others))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", ROTATED_QUERIES)
def test_attention_rotates_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    q, keys, values, queries, known, scale = attention_operands(name, dtype)
    angles = angles_of(q)
    wide = rotated(q.double(), *(each.double() for each in angles))
    truth = attention_of(wide, keys.double(), values.double(), queries, known, scale)
    plain = CACHED_ATTENTION(q, keys, values, queries, known, scale, *angles)
    on_gpu = [tensor.cuda() for tensor in (q, keys, values, queries, known)]
    y = CACHED_ATTENTION(*on_gpu, scale, *(each.cuda() for each in angles))
    assert_as_accurate(y.cpu(), plain, truth)


# Scales of keys and values in FP8.
FP8_SCALES = (0.013, 0.4)
OVER_FP8 = ("chunk", "one-query", *LARGE, *ONE_TOKEN)


def in_fp8(x: Tensor, scale: float) -> Tensor:
    return (x.float() / scale).clamp(-448, 448).to(E4M3)


def bits_of(x: Tensor) -> Tensor:
    """Return the bits of E4M3, those of NaN without a sign."""
    bits = x.view(torch.uint8)
    return torch.where(x.float().isnan(), 0x7F, bits)


def fp8_operands(name: str, dtype: torch.dtype) -> tuple[list[Any], Tensor]:
    """Return operands over caches in FP8, and the right result in float64."""
    q, keys, values, *others = attention_operands(name, dtype)
    caches = [in_fp8(each, scale) for each, scale in zip((keys, values), FP8_SCALES, strict=True)]
    wide = [each.double() * scale for each, scale in zip(caches, FP8_SCALES, strict=True)]
    return [q, *caches, *others, None, None, *FP8_SCALES], attention_of(q.double(), *wide, *others)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    "name", ["chunk", "one-token-wide", "behind-the-last-place", "odd-width", "two-widths", "large"]
)
def test_append_rounds_to_fp8(name: str, dtype: torch.dtype, device: str) -> None:
    """Numbers beyond the range become the largest ones, and NaN stays NaN."""
    keys, values, new_keys, new_values, *others = operands(name, dtype)
    new_keys[0, 0, 0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 400])
    caches = [in_fp8(keys, 1.0), in_fp8(values, 1.0)]
    rounded = [in_fp8(new, scale) for new, scale in zip((new_keys, new_values), FP8_SCALES, strict=True)]
    right = [appended(cache, new, *others) for cache, new in zip(caches, rounded, strict=True)]
    given = [each.to(device) for each in (*caches, new_keys, new_values, *others)]
    for found, expected in zip(APPEND(*given, None, None, *FP8_SCALES), right, strict=True):
        assert torch.equal(bits_of(found.cpu()), bits_of(expected))


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("name", ["chunk", "one-token-wide"])
def test_append_rotates_before_it_rounds_to_fp8(name: str, device: str) -> None:
    keys, values, new_keys, new_values, starts, counts = operands(name, BF16)
    angles = angles_of(new_keys)
    turned = rotated(new_keys.double(), *(each.double() for each in angles))
    right = appended(torch.zeros(keys.shape, dtype=torch.float64), turned, starts, counts)
    given = [torch.zeros_like(each, dtype=E4M3) for each in (keys, values)]
    on_device = [each.to(device) for each in (*given, new_keys, new_values, starts, counts, *angles)]
    found = APPEND(*on_device, *FP8_SCALES)[0].cpu().double() * FP8_SCALES[0]
    # Rounded to bfloat16 once, and to E4M3 once, whose least number is 2^-9.
    assert ((found - right).abs() <= right.abs() * (2**-4 + 2**-7) + FP8_SCALES[0] * 2**-9).all()


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_over_fp8(name: str) -> None:
    given, truth = fp8_operands(name, torch.float64)
    assert_same(CACHED_ATTENTION(*given), truth)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", OVER_FP8)
def test_attention_over_fp8_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    given, truth = fp8_operands(name, dtype)
    y = CACHED_ATTENTION(*(each.cuda() if isinstance(each, Tensor) else each for each in given))
    for row, count in enumerate(given[3].tolist()):
        assert (y[row, count:] == 0).all()
    assert_as_accurate(y.cpu(), CACHED_ATTENTION(*given), truth)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["odd-chunk", "prefill", "one-token-3-4-4-80", "decode-32-32-8-64"])
def test_attention_over_fp8_rotates_on_a_gpu(name: str) -> None:
    given, _ = fp8_operands(name, BF16)
    q, keys, values, *others = given[:6]
    angles = angles_of(q)
    wide = [each.double() * scale for each, scale in zip((keys, values), FP8_SCALES, strict=True)]
    truth = attention_of(rotated(q.double(), *(each.double() for each in angles)), *wide, *others)
    plain = CACHED_ATTENTION(*given[:6], *angles, *FP8_SCALES)
    on_gpu = [each.cuda() if isinstance(each, Tensor) else each for each in (*given[:6], *angles)]
    y = CACHED_ATTENTION(*on_gpu, *FP8_SCALES)
    assert_as_accurate(y.cpu(), plain, truth)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("name", ["odd-chunk", "two-tokens", "wide", "one-token-8-32-8-128", "one-token-3-6-2-96"])
def test_attention_over_fp8_sees_its_keys_alone(name: str) -> None:
    """The same bits in each call, whatever stands in places that are not used."""
    given, _ = fp8_operands(name, BF16)
    q, keys, values, *others = (each.cuda() if isinstance(each, Tensor) else each for each in given)
    first = CACHED_ATTENTION(q, keys, values, *others)
    for row, known in enumerate(given[4].tolist()):
        keys[row, :, known:], values[row, :, known:] = float("nan"), float("nan")
    for _ in range(20):
        assert torch.equal(CACHED_ATTENTION(q, keys, values, *others), first)
    assert max(widths_without_plan(fp8=True), default=0) < 64, "the kernel refuses some"


@pytest.mark.gpu
@pytest.mark.parametrize("place", [0, 30, 1023])
def test_nan_reaches_attention_over_fp8(place: int) -> None:
    given, _ = fp8_operands("one-token-2-16-16-128", BF16)
    q, keys, values, *others = (each.cuda() if isinstance(each, Tensor) else each for each in given)
    q[1, 0, 3, 7] = keys[1, 5, place, 7] = values[1, 6, place, 7] = float("nan")
    expected = torch.zeros_like(q, dtype=torch.bool)
    expected[1, 0, 3] = expected[1, 0, 5] = expected[1, 0, 6, 7] = True
    assert torch.equal(CACHED_ATTENTION(q, keys, values, *others).isnan(), expected)


@pytest.mark.gpu
def test_sanitize() -> None:
    for name in ("one-token-5-6-2-64", "odd-chunk", "wide"):
        given, _ = fp8_operands(name, BF16)
        y = CACHED_ATTENTION(*(each.cuda() if isinstance(each, Tensor) else each for each in given))
        assert y.isfinite().all()
    for name in ("one-token-5-6-2-64", "one-token-2-16-16-128", "one-token-4-8-1-256"):
        q, *others = (each.cuda() if isinstance(each, Tensor) else each for each in attention_operands(name, BF16))
        assert CACHED_ATTENTION(q, *others, *(each.cuda() for each in angles_of(q))).isfinite().all()
    for name in ("chunk", "one-token-wide", "two-widths"):
        given = [each.cuda() for each in operands(name, BF16)]
        angles = [each.cuda() for each in angles_of(given[2])]
        assert all(cache.isfinite().all() for cache in APPEND(*given, *angles))
        caches = [torch.zeros_like(each, dtype=E4M3) for each in given[:2]]
        assert APPEND(*caches, *given[2:], *angles, *FP8_SCALES)[0].float().isfinite().all()


def assert_near(y: Tensor, expected: Tensor) -> None:
    """Compare results of cuDNN, which rounds an element otherwise now and then: see docs/limits.md."""
    torch.testing.assert_close(y, expected, rtol=2**-7, atol=2**-8 * float(expected.abs().max()))


@pytest.mark.gpu
def test_threads_share_plans() -> None:
    """At once, on a stream each: no thread makes a plan anew, or changes what another computes."""
    q, keys, values, queries, known, scale = attention_operands("decode-8-16-16-128", BF16)
    on_gpu = [tensor.cuda() for tensor in (q, keys, values, queries, known)]
    expected = CACHED_ATTENTION(*on_gpu, scale)
    torch.cuda.synchronize()
    plans, found = dict(cache_op._PLANS.known), list[Tensor]()

    def compute(_: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            results = [CACHED_ATTENTION(*on_gpu, scale) for _ in range(50)]
        stream.synchronize()
        found.extend(results)

    at_once(compute, 4)
    assert len(found) == 200
    for result in found:
        assert_near(result, expected)
    assert cache_op._PLANS.known == plans


@pytest.mark.gpu
def test_a_graph_replays_over_growing_lengths() -> None:
    q, keys, values, queries, known, scale = attention_operands("decode-8-16-16-128", BF16)
    on_gpu = [tensor.cuda() for tensor in (q, keys, values, queries, known)]
    CACHED_ATTENTION(*on_gpu, scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = CACHED_ATTENTION(*on_gpu, scale)
    for more in (0, 1, 100):
        grown = (known + more).clamp(max=keys.shape[2])
        on_gpu[4].copy_(grown)
        graph.replay()
        torch.cuda.synchronize()
        assert_near(y, CACHED_ATTENTION(*on_gpu, scale))


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_mask(device: str) -> None:
    mask = CACHE_MASK(int32(0, 3, 2).to(device), int32(3, 2, 0).to(device), 3, 6).cpu()
    assert mask.shape == (3, 1, 3, 6)
    # The last key of each query; behind the last real one that is its own.
    assert (mask.sum(-1)[:, 0] - 1).tolist() == [[0, 1, 2], [3, 4, 4], [2, 2, 2]]
    assert torch.equal(mask, mask.cummin(-1).values)


def test_mask_and_counts_agree() -> None:
    q, keys, values, queries, known, scale = attention_operands("chunk", torch.float64)
    mask = CACHE_MASK(known - queries, queries, q.shape[1], keys.shape[2])
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, mask, scale=scale, enable_gqa=True
    )
    y = CACHED_ATTENTION(q, keys, values, queries, known, scale)
    for row, count in enumerate(queries.tolist()):
        assert_same(y[row, :count].contiguous(), expected.transpose(1, 2)[row, :count].contiguous())


def test_ops_are_well_formed() -> None:
    new = operands("chunk", torch.float32)
    torch.library.opcheck(APPEND, tuple(new))
    torch.library.opcheck(APPEND_IN_PLACE, tuple(new))
    torch.library.opcheck(CACHED_ATTENTION, tuple(attention_operands("chunk", torch.float32)))
    torch.library.opcheck(APPEND, (*new, *angles_of(new[2])))
    given = attention_operands("chunk", torch.float32)
    torch.library.opcheck(CACHED_ATTENTION, (*given, *angles_of(given[0])))
    torch.library.opcheck(CACHE_MASK, (int32(0, 3), int32(1, 2), 2, 5))


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda x: x[0], "keys must have four dimensions"),
        (1, lambda x: x[:, :, :5], "the caches differ"),
        (2, lambda x: x[:, :, :1], "the new keys must have shape"),
        (3, lambda x: x[:, :2], "the new values must have shape"),
        (3, lambda x: x.double(), "values must be of one floating point type"),
        (4, lambda x: x.long(), "starts must be int32"),
        (5, lambda x: x[:2], "counts must be int32"),
    ],
)
def test_append_refuses(index: int, change: Any, message: str) -> None:
    given = operands("chunk", torch.float32)
    given[index] = change(given[index])
    with pytest.raises((ValueError, TypeError), match=message):
        APPEND(*given)


@pytest.mark.parametrize(("scale", "fp8"), [(2.0, False), (0.0, True), (float("inf"), True), (float("nan"), True)])
def test_scales_are_refused(scale: float, fp8: bool) -> None:
    new, given = operands("chunk", torch.float32), attention_operands("chunk", torch.float32)
    for op, operands_of, first in ((APPEND, new, 0), (CACHED_ATTENTION, given, 1)):
        if fp8:
            operands_of[first : first + 2] = [each.to(E4M3) for each in operands_of[first : first + 2]]
        with pytest.raises(ValueError, match="value_scale must be"):
            op(*operands_of, key_scale=1.0, value_scale=scale)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda cosines, sines: (cosines, None), "cosines without sines"),
        (lambda cosines, sines: (cosines, sines[:, :2]), "sines must be torch.float32 of shape"),
        (lambda cosines, sines: (cosines.double(), sines), "cosines must be torch.float32 of shape"),
    ],
)
def test_angles_are_refused(change: Any, message: str) -> None:
    new, given = operands("chunk", torch.float32), attention_operands("chunk", torch.float32)
    for op, operands_of, rows in ((APPEND, new, new[2]), (CACHED_ATTENTION, given, given[0])):
        with pytest.raises(ValueError, match=message):
            op(*operands_of, *change(*angles_of(rows)))


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda x: x[0], "q must have four dimensions"),
        (0, lambda x: x[:, :, :3], "heads must be a positive multiple"),
        (1, lambda x: x[:, :, :5], "values must have shape"),
        (2, lambda x: x.double(), r"values must be torch\.float32 like q"),
        (3, lambda x: x.long(), "query_counts must be int32"),
        (4, lambda x: x[:2], "key_counts must be int32"),
    ],
)
def test_attention_refuses(index: int, change: Any, message: str) -> None:
    given = attention_operands("chunk", torch.float32)
    given[index] = change(given[index])
    with pytest.raises((ValueError, TypeError), match=message):
        CACHED_ATTENTION(*given)
