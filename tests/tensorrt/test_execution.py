"""How a plan with plugins runs in real TensorRT: shapes and profiles, CUDA graphs, threads, repeats and NaN."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from tests.models import Gated, Plain, Residual
from tests.tensorrt.plans import build, run, same_bits, yardsticks
from tests.tolerance import assert_as_accurate
from twellc.base.errors import UserError
from twellc.export.runner import OpenPlan, prepare
from twellc.export.shapes import ShapeRange
from twellc.export.tensorrt_host import Host

pytestmark = [pytest.mark.tensorrt, pytest.mark.xdist_group("execution")]

WIDTH, NEURONS = 256, 1024
# (min, opt, max) of the optimization profiles.
PROFILES = ((1, 8, 16), (17, 300, 2100))
TOKENS = (1, 3, 16, 17, 65, 300, 2100)


@pytest.fixture(scope="module")
def module() -> nn.Module:
    torch.manual_seed(0)
    blocks = [Residual(kind(d_model=WIDTH, d_ff=NEURONS)) for kind in (Gated, Plain, Gated)]
    module = nn.Sequential(*blocks).to(torch.bfloat16).eval().requires_grad_(False)
    for gate in (blocks[0].ffn.gate, blocks[1].ffn.up, blocks[2].ffn.gate):
        gate.weight[:, 0] = -1  # type: ignore[index, operator, union-attr]
    return module


@pytest.fixture(scope="module")
def plan(tensorrt: Host, module: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> OpenPlan:
    profiles = [{"input": ShapeRange(*((size, WIDTH) for size in sizes))} for sizes in PROFILES]
    dynamic = ({0: torch.export.Dim("tokens", min=1, max=4096)},)
    example = torch.randn(5, WIDTH).bfloat16()
    return build(tensorrt, module, tmp_path_factory.mktemp("stack"), torch.bfloat16, [example], dynamic, profiles)


def inputs(tokens: int, seed: int = 0) -> Tensor:
    """Draw x [tokens, WIDTH]; how many neurons of the first block a row activates depends on its first value."""
    x = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(seed))
    x[:, 0] = 2 * x[:, 0].abs()
    return x.bfloat16()


def profile_of(tokens: int) -> int:
    return next(index for index, (low, _, high) in enumerate(PROFILES) if low <= tokens <= high)


def result(plan: OpenPlan, x: Tensor) -> Tensor:
    (y,) = run(plan, {"input": x}, profile_of(len(x)))
    return y


@pytest.mark.parametrize("tokens", TOKENS)
def test_every_profile_and_size(plan: OpenPlan, module: nn.Module, tokens: int) -> None:
    x = inputs(tokens)
    ((plain, truth),) = yardsticks(module, x)
    assert_as_accurate(result(plan, x), plain, truth)


def test_size_outside_of_a_profile(plan: OpenPlan) -> None:
    with pytest.raises(
        UserError,
        match=r"profile 0 does not take this shape of input; got \(17, 256\); expected \(1, 256\) to \(16, 256\)",
    ):
        prepare(plan, {"input": inputs(17)}, profile=0)


@pytest.mark.parametrize("tokens", TOKENS)
def test_same_bits_each_time(plan: OpenPlan, tokens: int) -> None:
    x = inputs(tokens)
    execution = prepare(plan, {"input": x}, profile_of(tokens))
    first = result(plan, x)
    for _ in range(10):
        execution.outputs[0].fill_(float("nan"))
        execution.enqueue()
        torch.cuda.synchronize()
        assert same_bits(execution.outputs[0], first)


@pytest.mark.parametrize("tokens", [1, 16, 300, 2100])
def test_cuda_graph(plan: OpenPlan, tokens: int) -> None:
    """Recorded once, replayed with other inputs."""
    execution = prepare(plan, {"input": inputs(tokens)}, profile_of(tokens))
    execution.enqueue()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        execution.enqueue()
    for seed in (1, 2, 3):
        x = inputs(tokens, seed)
        execution.tensors["input"].copy_(x)
        execution.outputs[0].fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(execution.outputs[0], result(plan, x))


def test_two_threads_on_two_streams(plan: OpenPlan) -> None:
    sizes = (16, 65, 2100)
    expected = {(tokens, seed): result(plan, inputs(tokens, seed)) for tokens in sizes for seed in range(4)}
    assert not same_bits(expected[16, 0], expected[16, 1])
    start, engine = threading.Barrier(2), threading.Lock()  # contexts are apart, but the engine makes one at a time

    def work(seeds: tuple[int, ...]) -> list[tuple[int, int]]:
        """Return what came out otherwise than in one thread."""
        wrong = []
        with torch.cuda.stream(torch.cuda.Stream()):
            with engine:
                executions = {tokens: prepare(plan, {"input": inputs(tokens)}, profile_of(tokens)) for tokens in sizes}
            torch.cuda.current_stream().synchronize()
            start.wait(60)
            for _ in range(10):
                for tokens, execution in executions.items():
                    for seed in seeds:
                        execution.tensors["input"].copy_(inputs(tokens, seed))
                        execution.outputs[0].fill_(float("nan"))
                        execution.enqueue()
                        torch.cuda.current_stream().synchronize()
                        if not same_bits(execution.outputs[0], expected[tokens, seed]):
                            wrong.append((tokens, seed))
        return wrong

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(work, [(0, 1), (2, 3)]))
    assert results == [[], []]


@pytest.mark.parametrize("tokens", TOKENS)
def test_nan_stays_in_its_row(plan: OpenPlan, tokens: int) -> None:
    x = inputs(tokens)
    row = tokens // 2
    x[row, 3] = float("nan")
    y = result(plan, x)
    expected = torch.zeros(tokens, dtype=torch.bool)
    expected[row] = True
    assert torch.equal(y.isnan().all(dim=1), expected)
    assert y[~expected].isfinite().all()
