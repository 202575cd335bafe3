"""The programs of ranks: what each has, and that together they compute what the single program does."""

import copy
import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from tests import models
from tests.models import Gated, Logits, Plain, Residual, calls, eager, export, run
from tests.ranks import run_ranks
from tests.tolerance import assert_as_accurate, assert_same
from twellc.base.errors import UserError
from twellc.passes.block_profile import Calibration
from twellc.passes.graph.program import constants_of, editable
from twellc.passes.match.linear import LinearReader
from twellc.passes.match.shared_axis import Part, follow
from twellc.passes.pipeline import PassOptions, Rewritten, run_for_ranks, run_passes
from twellc.passes.tensor_parallel import is_in_order
from twellc.plugins.all_reduce_op import ALL_REDUCE
from twellc.plugins.ops import GATED_MLP, MLP

X = torch.randn(2, 5, models.D_MODEL).bfloat16()
FORMS = {"as written": (), "operator": ("operator",), "matmul": ("matmul",)}


def split(
    module: nn.Module, *inputs: Tensor, ranks: int = 2, **options: Any
) -> tuple[ExportedProgram, list[Rewritten]]:
    """Return the program of a module, its first two dimensions dynamic, and what became of it for each rank."""
    dims = {0: Dim("batch", min=1, max=8), 1: Dim("tokens", min=2, max=64)}
    program = export(module, *inputs, dynamic=(dims,))
    dtype = next(module.parameters()).dtype
    wanted = PassOptions(dtype, **{"layers": "all", **options}, part=Part(0, ranks))
    return program, list(run_for_ranks(program, wanted))


def assert_right(module: nn.Module, found: list[Rewritten], *inputs: Tensor) -> None:
    """Fail unless every rank gives what the module does."""
    outputs = run_ranks([each.program for each in found], *inputs)
    (plain,) = eager(module, *inputs)
    for (own,) in outputs:
        if plain.dtype == torch.float32:
            assert_same(own, plain)
        else:
            (truth,) = eager(
                copy.deepcopy(module).double(), *(x.double() if x.is_floating_point() else x for x in inputs)
            )
            assert_as_accurate(own, plain, truth)


def shared(module: nn.Module, **options: Any) -> list[Rewritten]:
    """Share a module, brought to bfloat16, and compare what its ranks give for `X`."""
    _, found = split(module.bfloat16().eval(), X, **options)
    assert_right(module, found, X)
    return found


def reductions(found: list[Rewritten]) -> list[int]:
    return [calls(each.program)["all_reduce"] for each in found]


def stored(program: ExportedProgram) -> int:
    return sum(tensor.numel() for tensor in program.state_dict.values())


# ---- whole models ----

MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": models.llama,
    "llama with biases": lambda: models.llama(attention_bias=True, mlp_bias=True),
    "llama with SiLU": lambda: models.llama("silu"),
    "opt": models.opt,
    "gpt2": models.gpt2,
    "nemotron": models.nemotron,
    "persimmon": models.persimmon,
    "gpt-neox": models.gpt_neox,
    "gpt-j": models.gptj,
    "falcon": models.falcon,
}
# Attention and block read the same, and share an all-reduce where TwELL runs the block.
BESIDE = {"gpt-neox", "gpt-j", "falcon"}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("layers", ["all", "none"])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_compute_what_the_model_does(name: str, layers: str) -> None:
    module = Logits(MODELS[name]()).bfloat16().eval()
    ids = torch.randint(3, 96, (2, 7), generator=torch.Generator().manual_seed(0))
    program, found = split(module, ids, layers=layers)
    assert all(each.notes == [] for each in found)
    blocks = len(found[0].layers)
    assert reductions(found) == [blocks if name in BESIDE and layers == "all" else 2 * blocks] * 2
    assert_right(module, found, ids)
    # Half of everything but embedding, norms and logits: none of these weights is there whole.
    whole = stored(run_passes(program, PassOptions(torch.bfloat16, layers)).program)
    kept = sum(p.numel() for n, p in module.named_parameters() if re.search("embed|wte|wpe|norm|ln_|lm_head", n))
    assert all(stored(each.program) - kept < 0.52 * (whole - kept) for each in found)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_forms_of_attention(form: str, ranks: int) -> None:
    """Keys and values of one head are left for four ranks, and a group of two heads reads each of them for two."""
    module = Logits(models.llama(num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=4)).bfloat16().eval()
    ids = torch.randint(3, 96, (2, 7), generator=torch.Generator().manual_seed(0))
    _, found = split(module, ids, ranks=ranks, attention=FORMS[form])
    assert_right(module, found, ids)
    assert_right(module, found, ids[:1, :5])
    for each in found[0].attention:
        assert (each.heads, each.kv_heads, each.reason) == (8 // ranks, 4 // ranks, "")


def test_a_bias_for_each_head_is_cut() -> None:
    """T5 adds to its scores what an embedding of relative positions has for each head."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = models.t5().encoder

        def forward(self, ids: Tensor) -> Tensor:
            states: Tensor = self.encoder(input_ids=ids).last_hidden_state
            return states

    module, ids = Encoder().bfloat16().eval(), torch.randint(3, 96, (2, 7))
    _, found = split(module, ids)
    assert found[0].notes == [] and reductions(found) == [2, 2]
    assert_right(module, found, ids)


# ---- blocks ----


@pytest.mark.parametrize("biases", ["", "gud"])
@pytest.mark.parametrize("kind", [Gated, Plain])
def test_down_bias_and_residual_are_on_the_first(kind: type[nn.Module], biases: str) -> None:
    found = shared(nn.Sequential(*(Residual(kind(biases=biases, d_ff=320)) for _ in range(2))))
    for rank, each in enumerate(found):
        for node in each.program.graph.nodes:
            if node.target in (GATED_MLP, MLP):
                b_down, residual = node.args[6:8] if node.target is GATED_MLP else node.args[4:6]
                assert (b_down is not None) == (rank == 0 and bool(biases))
                assert (residual is not None) == (rank == 0)


class Attention(nn.Module):
    def __init__(self, heads: int = 4, width: int = 8, turn: models.Function = models.unchanged,
                 returns_keys: bool = False) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.turn, self.returns_keys, d_model = heads, turn, returns_keys, models.D_MODEL
        self.qkv, self.o = nn.Linear(d_model, 3 * heads * width), nn.Linear(heads * width, d_model)
        models.scale_weights(self)

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.turn(q), k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.o(y.transpose(1, 2).flatten(2))
        return (y, k) if self.returns_keys else y


class Beside(nn.Module):
    """Layers whose attention and block read the same; `add` joins what they make with x."""

    def __init__(self, add: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.attention = nn.ModuleList(Attention() for _ in range(2))
        self.blocks = nn.ModuleList(Gated(biases="gud", d_ff=320) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(models.D_MODEL) for _ in range(2))
        self.add = add

    def forward(self, x: Tensor) -> Tensor:
        for attention, block, norm in zip(self.attention, self.blocks, self.norms, strict=True):
            h = norm(x)
            x = self.add(x, attention(h), block(h))
        return x


SUMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "block + (attention + x)": lambda x, a, b: b + (a + x),
    "(block + attention) + x": lambda x, a, b: b + a + x,
    "(x + attention) + block": lambda x, a, b: x + a + b,
    "block + attention": lambda x, a, b: b + a,
}


@pytest.mark.parametrize("name", SUMS)
def test_attention_beside_a_block_shares_its_all_reduce(name: str) -> None:
    found = shared(Beside(SUMS[name]))
    assert reductions(found) == [2, 2] and found[0].notes == []
    assert all(is_in_order(each.program) for each in found)


def test_all_reduces_of_a_dense_block_beside_attention_are_not_in_order() -> None:
    found = shared(Beside(SUMS["(x + attention) + block"]), layers="none")
    assert reductions(found) == [4, 4]
    assert not any(is_in_order(each.program) for each in found)


class Halves(nn.Module):
    """y = a(x) + b(x): each block's result is all that the other adds to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Gated(d_ff=320), Gated(d_ff=320)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("module", [Residual(Gated(d_ff=320)), Halves()], ids=["x + f(x + 1)", "f(x) + g(x)"])
def test_ranks_reduce_equally_often(module: nn.Module) -> None:
    """Whatever the first rank alone adds, the others must reach every all-reduce, too."""
    assert len(set(reductions(shared(module)))) == 1


# ---- neurons ----


def profile(firing: np.ndarray) -> Calibration:
    counts = {min(len(firing), int(firing.sum()) // 1000): 1000}
    return Calibration({"ffn": models.block_profile("ffn", firing, counts)})


def neurons_of(made: Rewritten) -> list[int]:
    """Return which neurons a rank has: each one's number is its bias of the gate."""
    (node,) = (node for node in made.program.graph.nodes if node.target is GATED_MLP)
    names = {spec.arg.name: spec.target for spec in made.program.graph_signature.input_specs}
    return made.program.state_dict[names[node.args[2].name]].int().tolist()  # type: ignore[no-any-return]


def numbered(d_ff: int) -> nn.Module:
    module = Residual(Gated(biases="gud", d_ff=d_ff)).bfloat16().eval()
    with torch.no_grad():
        module.ffn.gate.bias.copy_(torch.arange(d_ff))  # type: ignore[union-attr, operator]
    return module


@pytest.mark.parametrize(("d_ff", "ranks"), [(256, 2), (256, 4), (248, 2)])
def test_ranks_get_equal_activity(d_ff: int, ranks: int) -> None:
    """Of 248 neurons one of two ranks gets eight more, which are the coldest."""
    firing = np.random.default_rng(0).permutation((1000 / np.arange(1, d_ff + 1)).astype(np.int64))
    _, found = split(numbered(d_ff), X, ranks=ranks, calibration=profile(firing))
    own = [neurons_of(each) for each in found]
    assert sorted(itertools.chain.from_iterable(own)) == list(range(d_ff))
    shares = [firing[each].sum() for each in own]
    hottest = firing.max()
    assert max(shares) - min(shares) <= hottest  # contiguous parts of this order differ by more
    assert all(each == sorted(each) for each in own)


def test_hot_neurons_are_the_hottest_of_a_rank_and_come_first() -> None:
    from twellc.passes.report import Choice

    firing = np.arange(1, 65, dtype=np.int64)
    seen = []

    def advise(block: Any, neurons: Any) -> Choice:
        seen.append(len(neurons.kept))
        return Choice("twell", "matches", 8, 8, None)

    _, found = split(numbered(64), X, calibration=profile(firing), advise=advise)
    assert seen == [32]  # advice is about what a rank has
    firsts = [set(neurons_of(each)[:8]) for each in found]
    assert set.union(*firsts) == set(range(48, 64)) and not firsts[0] & firsts[1]
    for each in found:
        (node,) = (node for node in each.program.graph.nodes if node.target is GATED_MLP)
        assert node.args[-3] == 8


@pytest.mark.parametrize(("d_ff", "sizes"), [(256, [128, 128]), (40, [24, 16]), (42, [24, 18]), (10, [5, 5])])
def test_ranks_get_multiples_of_8(d_ff: int, sizes: list[int]) -> None:
    _, found = split(numbered(d_ff), X)
    assert [len(neurons_of(each)) for each in found] == sizes


def test_neurons_of_which_nothing_is_known_alternate() -> None:
    _, found = split(numbered(32), X)
    assert neurons_of(found[0])[:4] == [0, 3, 4, 7] and neurons_of(found[1])[:4] == [1, 2, 5, 6]


# ---- what cannot be shared ----


def error_of(module: nn.Module, *inputs: Tensor, ranks: int, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        split(module, *inputs, ranks=ranks, **options)
    return str(caught.value)


@pytest.mark.parametrize(("ranks", "heads"), [(4, 2), (3, 4), (8, 4)])
def test_heads_that_ranks_do_not_divide(ranks: int, heads: int) -> None:
    module = Logits(models.llama(num_hidden_layers=1, num_key_value_heads=heads)).bfloat16().eval()
    assert error_of(module, torch.ones(2, 5, dtype=torch.int64), ranks=ranks) == (
        f"--tensor-parallel {ranks}: model.model.layers.0.self_attn has 4 heads of queries and {heads} of keys and "
        f"values; expected a number that divides both, in all layers: {'2 or 4' if heads == 4 else '2'}."
    )


def test_nothing_to_share() -> None:
    message = error_of(nn.Sequential(nn.Linear(16, 16)).bfloat16(), X, ranks=2)
    assert message == "--tensor-parallel 2: nothing in the model can be shared. Leave it out."


def test_fewer_neurons_than_ranks() -> None:
    message = error_of(numbered(3), X, ranks=4)
    assert message == (
        "--tensor-parallel 4: the block ffn has 3 neurons; expected one for each rank at least. "
        "Share the model among fewer."
    )


def normed_heads(q: Tensor) -> Tensor:
    """A norm over all heads together stands between projection and attention, as in OLMo 2."""
    return nn.functional.rms_norm(q, q.shape[-1:])


@pytest.mark.parametrize(
    ("turn", "returned", "reason"),
    [(normed_heads, False, "works across what ranks would share"), (models.unchanged, True, "the model returns it")],
)
def test_attention_of_other_forms_stays_whole(turn: models.Function, returned: bool, reason: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.ffn = Attention(turn=turn, returns_keys=returned), Gated(d_ff=320)

        def forward(self, x: Tensor) -> Any:
            y = self.attention(x)
            return (self.ffn(y[0]), y[1]) if returned else self.ffn(y)

    _, found = split(Model().bfloat16().eval(), X)
    (note,) = found[0].notes
    assert note.startswith("attention attention stays whole on every rank: ") and reason in note
    assert reductions(found) == [1, 1]
    single = run(found[0].dense, X)
    for own in run_ranks([each.program for each in found], X):
        for mine, other in zip(own, single, strict=True):
            assert ((mine - other).float().norm() / other.float().norm()) < 0.02


@pytest.mark.parametrize(
    "between",
    [
        lambda h: nn.functional.rms_norm(h, h.shape[-1:]),
        lambda h: h * h.mean(dim=(), keepdim=True),
        lambda h: h * h.amax(dim=(), keepdim=True),
        lambda h: h * h.mean(None, True),
    ],
)
def test_a_norm_or_a_sum_over_all_dimensions_keeps_a_block_whole(between: models.Function) -> None:
    module = nn.Sequential(Gated(d_ff=320, between=between), Gated(d_ff=320)).bfloat16().eval()
    _, found = split(module, X)
    (note,) = found[0].notes
    assert note.startswith("block 0 stays whole on every rank: ")
    assert reductions(found) == [1, 1]


def test_what_has_none_of_a_shared_axis_is_not_cut() -> None:
    """Heads stand before the dimensions of what is added, whose rows are as many."""

    def add(h: Tensor) -> Tensor:
        heads = h.unflatten(-1, (4, -1)).permute(2, 0, 1, 3)
        return (heads + torch.ones(4, 1)).permute(1, 2, 0, 3).flatten(2)

    program = editable(export(Plain(add), torch.randn(2, 4, models.D_MODEL)).run_decompositions({}))
    reader = LinearReader(constants_of(program))
    start = next(node for node in program.graph.nodes if reader.linear(node) is not None)
    region = follow(program.graph, reader, [start], 2)
    assert len(region.ends) == 1 and region.cuts == []


def test_one_rank_is_the_program_itself() -> None:
    program = export(Residual(Gated(d_ff=320)).bfloat16(), X)
    (alone,) = run_for_ranks(program, PassOptions(torch.bfloat16, "all"))
    other = run_passes(program, PassOptions(torch.bfloat16, "all"))
    assert str(alone.program.graph) == str(other.program.graph)
    assert ALL_REDUCE not in {node.target for node in alone.program.graph.nodes}


def test_without_a_process_group_the_op_says_what_it_needs() -> None:
    with pytest.raises(RuntimeError, match=r"needs 2 processes in torch.distributed's default group, got no process"):
        ALL_REDUCE(torch.ones(2), 2)


def test_parts_of_an_axis() -> None:
    assert [Part(rank, 4).of(8) for rank in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
