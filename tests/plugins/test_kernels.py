"""The kernels behind twell.h, on a GPU: one kernel_table of cases, then what a kernel_table cannot say.

Real-valued blocks are held to the tolerance of `reference.assert_close`. Blocks of small integers, whose sums are exact
in any order, must match bit by bit, and so must their packed matrices.
"""

import dataclasses
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from tests.plugins import calls, reference
from tests.plugins.calls import FEW_TOKENS, INVALID_VALUE, SUCCESS, Call, assert_guards, assert_same_bits, bits_of
from tests.plugins.cases import FP16, MANY_NEURONS, SMALL_KERNELS, Case, kernel_table, make_block
from tests.plugins.reference import Block
from twellc.plugins import library

pytestmark = pytest.mark.gpu


def measured_density(block: Block) -> float:
    return float((reference.gate_values(block) != 0).double().mean())


@pytest.mark.parametrize("case", list(kernel_table()), ids=str)
def test_against_float64(case: Case) -> None:
    block = make_block(case)
    if case.rows * case.d_ff >= 10_000 and case.d_model >= 16 and case.activation != "fatrelu":
        assert case.density / 3 <= measured_density(block) <= 2 * case.density + 1e-3
    call = Call(block, case.compression)
    y = call.run()
    reference.assert_close(y, block)
    assert_guards(call.y_buffer)
    assert_guards(call.packed_buffer)
    calls.assert_packed_near(call)


def rounds_h(block: Block) -> bool:
    """Say whether a call for few tokens rounds h, and nothing else, on the way: some kernels of Hopper do."""
    fits = min(*block.w_gate.shape, block.w_down.shape[1]) >= calls.MOST_COLUMNS_OF_BOX
    return calls.FEW_TOKENS_EXACT < len(block.x) <= FEW_TOKENS and fits and torch.cuda.get_device_capability() == (9, 0)


def may_be_dense(block: Block) -> bool:
    """Say whether few tokens' u may be rounded, or h that is in fp32 elsewhere: the kernels' rule, with a margin."""
    rows = len(block.x)
    if rows > calls.FEW_TOKENS_EXACT:
        return False
    active = torch.nn.functional.pad(reference.gate_values(block) != 0, (0, -len(block.w_gate) % 16))
    of_token = active.view(rows, -1, 16).sum(dim=2).amax(dim=0).sum()
    scale = 0.9 * len(block.w_gate) / 5632
    return rows > 1 and (int(active.sum()) > scale * (1500 + 120 * rows) or int(of_token) > scale * 1500)


@pytest.mark.parametrize("case", [*kernel_table(), *SMALL_KERNELS], ids=str)
def test_integers_match_bit_by_bit(case: Case) -> None:
    block = make_block(case, integers=True)
    call = Call(block, case.compression)
    y = call.run()
    calls.assert_packed(call, bits_of(reference.gate_values(block)))
    if reference.is_exact(block):
        # Few tokens or not, sums in another order are exact; only the dense paths round u and h.
        expected = reference.emulate(block)
        if case.rows > FEW_TOKENS:
            same = ~call.dense_rows()
            assert_same_bits(y[same], expected[same])
        elif not may_be_dense(block):
            assert_same_bits(y, reference.emulate(block, rounds_h=rounds_h(block)))
        steps = call.steps()
        same = ~call.dense_rows_of_steps()
        assert_same_bits(steps[same], expected[same])
    reference.assert_close(y, block)
    assert_guards(call.y_buffer)
    assert_guards(call.packed_buffer)


def test_table_has_exact_and_overflowing_cases() -> None:
    """The two checks above must not pass for want of what they check."""
    exact = overflowed = few = few_dense = 0
    for case in kernel_table():
        if case.d_ff > 2000:
            continue
        block = make_block(case, integers=True)
        exact += reference.is_exact(block)
        few += reference.is_exact(block) and case.rows <= FEW_TOKENS and not may_be_dense(block)
        few_dense += case.rows <= FEW_TOKENS and may_be_dense(block)
        call = Call(block, case.compression)
        call.gate()
        overflowed += bool(call.decoded().overflowed.any())
    assert exact >= 100
    assert overflowed >= 20
    assert few >= 10
    assert few_dense >= 10


@pytest.mark.parametrize("case", SMALL_KERNELS, ids=str)
def test_sanitize(case: Case) -> None:
    """What sanitize.py runs."""
    block = make_block(case, integers=True, device="cpu")

    def steps(call: Call) -> None:
        call.gate()
        call.start_steps(0)

    for start in (steps, Call.mlp):
        calls.run_plain_buffers(block, start, case.compression)


def make_one_infinity(rows: int, d_model: int, device: str = "cuda") -> tuple[Block, torch.Tensor]:
    """Draw a block in which infinity ends the first row of x and reaches one neuron; also y of that row."""
    case = Case(rows=rows, d_model=d_model, d_ff=600, d_out=72, density=0.3, biases="")
    block = make_block(case, device=device)
    assert block.w_up is not None
    block.x[0, -1] = float("inf")
    block.w_gate[:, -1] = -1.0
    block.w_gate[300, -1] = 1.0
    block.w_up[300, -1] = 1.0
    return block, torch.sign(block.w_down[300]) * float("inf")


@pytest.mark.parametrize("rows", [1, 2, 4, 40])
@pytest.mark.parametrize("d_model", [72, 1032, 2048])
def test_infinity_is_not_multiplied_by_absent_weights(rows: int, d_model: int) -> None:
    block, expected = make_one_infinity(rows, d_model)
    call = Call(block, 8)
    y = call.poisoned(call.mlp)
    assert_same_bits(y[0], expected)
    assert torch.isfinite(y[1:]).all()


@pytest.mark.parametrize("b_down", [True, False])
@pytest.mark.parametrize("rows", [5, 200])
def test_rows_without_active_neurons(rows: int, b_down: bool) -> None:
    block = make_block(Case(rows=rows, density=0.0, biases="d" if b_down else ""))
    y = Call(block, 8).run()
    expected = torch.zeros_like(y) if block.b_down is None else block.b_down.expand_as(y)
    assert_same_bits(y, expected.contiguous())


@pytest.mark.parametrize("active", [100, 1000, 1300, 2816])
@pytest.mark.parametrize("rows", [2, 12, 20, 40, 100])
def test_one_heavy_token(rows: int, active: int) -> None:
    """A token with many active neurons among others with few, on either side of where the whole call becomes dense."""
    block = make_block(Case(rows=rows, d_model=256, d_ff=2816, d_out=264, density=0.002))
    heavy = rows // 2
    block.x[:, 7] = 0
    block.x[heavy, 7] = 8
    block.w_gate[:active, 7] = 1
    counts = (reference.gate_values(block) != 0).sum(dim=1)
    assert counts[heavy] >= 0.9 * active and counts.median() < 50
    reference.assert_close(Call(block, 8).run(), block)


@pytest.mark.parametrize("rows", [20, 40, 100])
def test_long_list(rows: int) -> None:
    """About as many active neurons of a token as a sparse down projection lists on Hopper, over two passes."""
    block = make_block(Case(rows=rows, d_model=16392, d_ff=8300, d_out=264, density=0.0002))
    block.x[:, 7] = 0
    block.x[rows // 2, 7] = 8
    block.w_gate[6500:, 7] = 100
    counts = (reference.gate_values(block) != 0).sum(dim=1)
    assert 1700 < counts[rows // 2] < 1900 and counts.median() < 20
    reference.assert_close(Call(block, 8).run(), block)


@pytest.mark.parametrize("count", [30, 31, 32, 62, 63, 64, 126, 127, 128, 254, 255, 256])
@pytest.mark.parametrize("compression", [1, 2, 4, 8])
def test_counts_at_the_number_of_slots(count: int, compression: int) -> None:
    """A tile of exactly as many non-zeros as slots fits; one more overflows."""
    block = make_block(Case(rows=20, biases=""), integers=True)
    block.x.fill_(0)
    block.x[:, 0] = 1
    block.w_gate.fill_(0)
    block.w_gate[:, 0] = -1
    chosen = torch.randperm(256, device="cuda")[:count] + 256
    block.w_gate[chosen, 0] = 3
    call = Call(block, compression)
    y = call.run()
    calls.assert_packed(call, bits_of(reference.gate_values(block)))
    assert call.decoded().overflowed[:, 1].all() == (count > 256 // compression - 1)
    assert_same_bits(y, reference.emulate(block))


def test_full_empty_and_overflowed_tiles_beside_each_other() -> None:
    """Lists of about as many non-zeros as a sparse row may have."""
    d_ff = 256 * 12
    block = make_block(Case(rows=140, d_model=16, d_ff=d_ff, d_out=24, biases=""), integers=True)
    block.x.fill_(0)
    block.x[:, 0] = 1
    block.w_gate.fill_(0)
    per_tile = [127, 0, 128, 0, 0, 256, 1, 127, 0, 0, 0, 127]
    for tile, count in enumerate(per_tile):
        chosen = torch.randperm(256, device="cuda")[:count] + 256 * tile
        block.w_gate[chosen, 0] = 2
    call = Call(block, 2)
    y = call.run()
    assert call.decoded().counts[0].tolist() == per_tile
    assert call.decoded().overflowed[0].tolist() == [count > 127 for count in per_tile]
    assert_same_bits(y, reference.emulate(block))
    assert_same_bits(call.steps(), y)
    assert not call.dense_rows_of_steps().any()


@pytest.mark.parametrize("density", [0.005, 0.3, 0.9])
@pytest.mark.parametrize(
    ("rows", "d_ff"),
    [(1, 2000), (3, 2000), (14, 2000), (30, 2000), (60, 2000), (200, 2000), (50, 11008), (60, MANY_NEURONS)],
)
def test_bitwise_repeatable(rows: int, d_ff: int, density: float) -> None:
    block = make_block(Case(rows=rows, d_model=1024, d_ff=d_ff, d_out=1032, density=density))
    call = Call(block, 8)
    steps, whole = call.steps(), call.run()
    packed = call.packed.clone()
    for _ in range(100):
        call.packed.fill_(calls.POISON_WORD - (1 << 32))
        assert_same_bits(call.steps(), steps)
        assert torch.equal(call.packed, packed)
        call.y.view(torch.int16).fill_(calls.POISON)
        call.mlp()
        assert_same_bits(call.y, whole)


def test_calls_close_behind_each_other() -> None:
    block = make_block(Case(rows=7, d_model=512, d_ff=2000, d_out=512, density=0.1, biases=""))
    block.w_gate[:, 0] = 0.0  # about half of the neurons are active, whatever x is
    calls.assert_chain_agrees(calls.chain(block, reads="x"), Call.mlp)


def test_rows_do_not_depend_on_their_number() -> None:
    """All configurations of the two steps give the same bits for a row."""
    block = make_block(Case(rows=300, d_model=264, d_out=1100 // 8 * 8, density=0.1))
    whole = Call(block, 8).steps()
    for begin, end in ((0, 1), (7, 20), (100, 150), (150, 290)):
        part = dataclasses.replace(block, x=block.x[begin:end].contiguous())
        assert_same_bits(Call(part, 8).steps(), whole[begin:end])


@pytest.mark.parametrize("rows", [1, 8, 16, 40, 200])
def test_cuda_graph(rows: int) -> None:
    case = Case(rows=rows, density=0.1)
    call = Call(make_block(case), case.compression)
    replay = calls.replays(call, call.mlp)
    for _ in range(3):
        call.block.x.copy_(make_block(case).x)
        reference.assert_close(replay(), call.block)


@pytest.mark.parametrize("rows", [1, 200])
def test_cuda_graph_without_warm_up(rows: int) -> None:
    """The first call of a process may be one that is captured: loading kernels and setting attributes must be legal."""
    script = f"""
        import torch
        from tests.plugins import reference, test_kernels
        case = test_kernels.Case(rows={rows}, density=0.1)
        call = test_kernels.Call(test_kernels.make_block(case), case.compression)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call.mlp()
        graph.replay()
        torch.cuda.synchronize()
        reference.assert_close(call.y, call.block)
    """
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, cwd=root, env=environment)


def test_streams_at_once() -> None:
    cases = (
        Case(rows=700, d_model=1024, density=0.05),
        Case(rows=40, d_model=1024, dtype=FP16, density=0.3),
        Case(rows=1, d_model=1024, density=0.3),
        Case(rows=1, d_model=1024, density=0.1),
        Case(rows=1, d_model=1024, d_ff=3000, density=0.9),
    )
    calls.assert_streams_agree([Call(make_block(case), case.compression) for case in cases], Call.mlp, runs=5)


@pytest.mark.parametrize(
    ("rows", "d_model", "d_ff", "d_out", "compression"),
    [(1_100_000, 2048, 256, 2048, 8), (40_000, 8, 65536, 8, 1)],
    ids=("x and y", "packed"),
)
def test_more_than_2_31_elements(rows: int, d_model: int, d_ff: int, d_out: int, compression: int) -> None:
    if torch.cuda.get_device_properties(0).total_memory < 40e9:
        pytest.skip("needs 40 GB of device memory")
    case = Case(rows=64, d_model=d_model, d_ff=d_ff, d_out=d_out, compression=compression, density=0.01, biases="")
    block = make_block(case)
    picked = torch.tensor([0, 1, rows // 2, rows - 129, rows - 2, rows - 1], device="cuda")
    x = torch.zeros((rows, d_model), dtype=block.x.dtype, device="cuda")
    x[picked] = block.x[: len(picked)]
    call = Call(dataclasses.replace(block, x=x), compression)
    call.gate()
    call.start_steps(0)
    reference.assert_close(call.y[picked], dataclasses.replace(block, x=block.x[: len(picked)].contiguous()))
    assert torch.isfinite(call.y[-1000:]).all()
    assert_guards(call.y_buffer)
    assert_guards(call.packed_buffer)


@pytest.fixture
def call() -> Call:
    return Call(make_block(Case(residual=True)), 8)


def status_of(call: Call) -> tuple[int, int]:
    """What twell_gate and twell_mlp return for the call's problem and tensors."""
    stream = torch.cuda.current_stream().cuda_stream
    packed, workspace = call.packed.data_ptr(), (call.workspace.data_ptr(), call.workspace.numel())
    return (
        call.lib.twell_gate(call.problem, call.tensors, packed, stream),
        call.lib.twell_mlp(call.problem, call.tensors, *workspace, stream),
    )


@pytest.mark.parametrize("name", ["x", "w_gate", "w_up", "w_down", "y", "b_gate", "b_up", "b_down", "residual"])
def test_bad_pointers(call: Call, name: str) -> None:
    assert status_of(call) == (SUCCESS, SUCCESS)
    gate_reads = name in ("x", "w_gate", "b_gate")
    pointer = getattr(call.tensors, name)
    setattr(call.tensors, name, pointer + 8)
    wrong = calls.MISALIGNED_ADDRESS
    assert status_of(call) == (wrong if gate_reads else SUCCESS, wrong)
    setattr(call.tensors, name, None)
    wrong = SUCCESS if name.startswith("b_") or name == "residual" else INVALID_VALUE
    assert status_of(call) == (wrong if gate_reads else SUCCESS, wrong)
    torch.cuda.synchronize()


def test_residual_must_not_overlap_y(call: Call) -> None:
    y, size = call.y.data_ptr(), call.y.numel() * call.y.element_size()
    for residual in (y, y + size - 16, y - size + 16):
        call.tensors.residual = residual
        assert status_of(call) == (SUCCESS, INVALID_VALUE)
    torch.cuda.synchronize()


def test_bad_workspace(call: Call) -> None:
    pointer, size = call.workspace.data_ptr(), call.workspace.numel()
    packed = call.packed.data_ptr()
    mlp, gate = call.lib.twell_mlp, call.lib.twell_gate
    assert mlp(call.problem, call.tensors, pointer, size - 1, None) == INVALID_VALUE
    assert mlp(call.problem, call.tensors, None, size, None) == INVALID_VALUE
    assert mlp(call.problem, call.tensors, pointer + 16, size, None) == calls.MISALIGNED_ADDRESS
    assert gate(call.problem, call.tensors, None, None) == INVALID_VALUE
    assert gate(call.problem, None, packed, None) == INVALID_VALUE
    assert gate(call.problem, call.tensors, packed + 4, None) == calls.MISALIGNED_ADDRESS


def test_bad_problem(call: Call) -> None:
    call.problem.d_model = 70
    assert status_of(call) == (INVALID_VALUE, INVALID_VALUE)


def test_plain_takes_no_up_weights() -> None:
    call = Call(make_block(Case(gated=False)), 8)
    call.tensors.w_up = call.tensors.w_gate
    assert status_of(call) == (SUCCESS, INVALID_VALUE)


def test_no_tokens(call: Call) -> None:
    """Nothing is read or written, so nothing has to be there."""
    call.problem.tokens = 0
    nothing = library.Tensors()
    assert call.lib.twell_packed_bytes(call.problem) == 0
    assert call.lib.twell_gate(call.problem, nothing, None, None) == SUCCESS
    assert call.lib.twell_mlp(call.problem, nothing, None, 0, None) == SUCCESS
