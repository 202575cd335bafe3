"""The weights that `serving.py` draws: in modules with the names of vLLM's, or on disk; and its servers' options."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

D_MODEL, D_FF, EXPERTS, TOKENS = 128, 512, 4, 16


class Experts(nn.Module):
    """As vLLM holds experts: with the matrices in a child, and down stored neuron by neuron."""

    def __init__(self) -> None:
        super().__init__()
        self.routed_experts = nn.Module()
        self.routed_experts.w13_weight = nn.Parameter(torch.empty(EXPERTS, D_FF, D_MODEL))
        self.routed_experts.w2_weight = nn.Parameter(torch.empty(EXPERTS, D_FF, D_MODEL).mT)

    def forward(self, hidden_states: Tensor) -> Tensor:
        up, down = self.routed_experts.w13_weight, self.routed_experts.w2_weight
        h = functional.relu(hidden_states @ up.flatten(0, 1).T).square()
        return h @ down.mT.flatten(0, 1)


class Model(nn.Module):
    """A block and a layer of experts on a residual stream."""

    do_not_compile = False

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(64, D_MODEL)
        self.norm = nn.RMSNorm(D_MODEL)
        self.up_proj, self.down_proj = nn.Linear(D_MODEL, D_FF, bias=False), nn.Linear(D_FF, D_MODEL, bias=False)
        self.experts = Experts()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        x = x + self.down_proj(functional.relu(self.up_proj(self.norm(x))))
        y: Tensor = x + self.experts(hidden_states=self.norm(x))
        return y


@pytest.mark.parametrize("density", [0.05, 0.3])
def test_drawn_weights(benchmark_module: Callable[[str], Any], density: float) -> None:
    """The wanted share of neurons fires, as is counted while asked; the first column of the stream stays as it is."""
    serving, model = benchmark_module("serving"), Model()
    with torch.random.fork_rng(devices=[]):
        serving.draw_weights(model, density)
    counter = serving.Counter(model)
    with torch.inference_mode():
        y = model(torch.arange(TOKENS))
    shares = counter.stop()
    model(torch.arange(TOKENS))
    assert shares.keys() == {"blocks", "experts"} and counter.stop() == shares and not model.do_not_compile
    assert all(abs(share - density) < 0.2 * density for share in shares.values())
    assert torch.allclose(y[:, 0], torch.tensor(D_MODEL**0.5)) and y[:, 1:].std() < 1.2


def test_a_model_on_disk_is_drawn_likewise(benchmark_module: Callable[[str], Any], tmp_path: Path) -> None:
    """For servers, which cannot draw: a prompt finds the wanted share active, in the model that others read, too."""
    serving = benchmark_module("serving")
    serving.DRAWN["opt-smoke"].write(tmp_path)
    with torch.random.fork_rng(devices=[]), pytest.MonkeyPatch.context() as patched:
        patched.setattr(serving.harness, "DEVICE", "cpu")
        (share,) = serving.write_drawn(tmp_path, 0.05, 16).values()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    counter = serving.Counter(model)
    with torch.inference_mode():
        model(torch.arange(16)[None])
    assert all(abs(each - 0.05) < 0.01 for each in (share, *counter.stop().values()))


def test_options_of_a_server(benchmark_module: Callable[[str], Any]) -> None:
    options = {"max_num_seqs": 8, "enforce_eager": True, "enable_prefix_caching": False, "hf_overrides": {"a": ["B"]}}
    assert benchmark_module("serving").command_line(options) == [
        *("--max-num-seqs", "8", "--enforce-eager", "--no-enable-prefix-caching"),
        *("--hf-overrides", '{"a": ["B"]}'),
    ]
