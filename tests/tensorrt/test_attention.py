"""TensorRT fuses attention: a compiled model has one kernel for each attention block, which is what its layers say."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from tests import models
from tests.conftest import Cli
from twellc.export.runner import _TORCH_DTYPES, engine_layers, open_plan, prepare
from twellc.export.tensorrt_host import Host
from twellc.manifest import manifest_path

pytestmark = pytest.mark.tensorrt

LAYERS, WIDTH, HEADS = 2, 256, 4
# TensorRT 10.6 names its fused attention _gemm_mha_v2_….
FUSED = "mha"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Unmasked(nn.Module):
    """Attention of every token to every token, and a feed-forward block, LAYERS times."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.blocks = nn.ModuleList(models.Plain(d_model=WIDTH, d_ff=2 * WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for projection, block in zip(self.projections, self.blocks, strict=True):
            q, k, v = (
                part.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2) for part in projection(x).chunk(3, -1)
            )
            x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + block(x)
        return x


def save_unmasked(folder: Path, dtype: torch.dtype) -> Path:
    path, x = folder / "unmasked.pt2", torch.randn(2, 24, WIDTH).to(dtype)
    dims = {0: torch.export.Dim("batch", min=1, max=8), 1: torch.export.Dim("sequence", min=1, max=1024)}
    torch.export.save(models.export(Unmasked().to(dtype), x, dynamic=(dims,)), path)
    return path


def bert(**sizes: Any) -> Any:
    import transformers

    config = transformers.BertConfig(vocab_size=96, hidden_act="relu", max_position_embeddings=512, **sizes)
    return models._seeded(transformers.BertForMaskedLM, config)


SIZES = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
POSITIONS = {"max_position_embeddings": 512}


def llama(kv_heads: int) -> Any:
    return models.llama(**SIZES, **POSITIONS, intermediate_size=2 * WIDTH, num_key_value_heads=kv_heads)


def opt() -> Any:
    return models.opt(**SIZES, **POSITIONS, ffn_dim=2 * WIDTH, word_embed_proj_dim=WIDTH)


@dataclass(frozen=True)
class Case:
    """A model, and the options that it is compiled with."""

    make: Callable[[], Any] | None
    options: tuple[str, ...] = ()

    def save(self, folder: Path, dtype: torch.dtype) -> Path:
        if self.make is None:
            return save_unmasked(folder, dtype)
        return models.save(self.make(), folder / "model", dtype)


CASES = {
    "causal": Case(lambda: llama(HEADS)),
    "causal, grouped": Case(lambda: llama(2)),
    "causal, one head of keys": Case(lambda: llama(1)),
    "causal, with biases": Case(opt),
    "causal and padding": Case(lambda: llama(HEADS), ("--padding", "mask")),
    "causal, grouped, and padding": Case(lambda: llama(2), ("--padding", "mask")),
    "padding": Case(lambda: bert(**SIZES, intermediate_size=2 * WIDTH)),
    "unmasked": Case(None),
}


def opt_inputs(plan: Path, dtypes: dict[str, torch.dtype]) -> dict[str, Tensor]:
    """Return ones of the shapes that the first profile is tuned for."""
    profile = json.loads(manifest_path(plan).read_text())["profiles"][0]
    return {name: torch.ones(shapes["opt"], dtype=dtypes[name]) for name, shapes in profile.items() if name in dtypes}


def check_layers(cli: Cli, host: Host, model: Path, plan_path: Path, layer: str, *options: str) -> None:
    """Compile a model; its plan has one layer of that name for each attention block, and passes `twellc check`."""
    shapes = "x:1x1x256:1x128x256:2x512x256" if model.suffix == ".pt2" else "input_ids:1x1:1x128:2x512"
    done = cli("compile", model, "-o", plan_path, "--backend", "tensorrt", "--profile", shapes, *options)
    assert done.exit_code == 0, done.output
    plan = open_plan(host, plan_path, host.version)
    dtypes = {name: _TORCH_DTYPES[plan.engine.get_tensor_dtype(name).name] for name in plan.names("INPUT")}
    names = [found["Name"] for found in engine_layers(prepare(plan, opt_inputs(plan_path, dtypes)))]
    assert sum(layer in name for name in names) == LAYERS, names
    checked = cli("check", model, plan_path)
    assert checked.exit_code == 0, checked.output


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_tensorrt_fuses_attention(cli: Cli, tensorrt: Host, tmp_path: Path, case: str, dtype: str) -> None:
    model = CASES[case].save(tmp_path, DTYPES[dtype])
    options = ("--dtype", dtype, "--attention", "tensorrt", *CASES[case].options)
    check_layers(cli, tensorrt, model, tmp_path / "m.plan", FUSED, *options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [case for case in CASES if "padding" not in case])
def test_cudnn_computes_attention(cli: Cli, tensorrt: Host, tmp_path: Path, case: str, dtype: str) -> None:
    model = CASES[case].save(tmp_path, DTYPES[dtype])
    options = ("--dtype", dtype, "--attention", "cudnn", *CASES[case].options)
    check_layers(cli, tensorrt, model, tmp_path / "m.plan", "TwellAttention", *options)
