"""TensorRT fuses attention: a compiled model has one kernel for each attention block, which is what its layers say."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from tests import models
from tests.models import functionalize
from tests.tensorrt.plans import run
from tests.tolerance import assert_as_accurate
from twellc.checks.reference import widen_sample
from twellc.compiling.translate import translate_any
from twellc.export.onnx_export import save_onnx
from twellc.export.plan import build_plan
from twellc.export.runner import engine_layers, open_plan, prepare
from twellc.export.shapes import ShapeRange
from twellc.export.tensorrt_host import Host
from twellc.loaders.model import load_model
from twellc.options.commands import CompileOptions
from twellc.passes.attention import CUDNN, MATMUL
from twellc.passes.graph.execution import Runner, example_inputs
from twellc.passes.precision import in_precision, widen
from twellc.passes.report import Earlier

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
    """A model, and the --padding that it is compiled with."""

    make: Callable[[], Any] | None
    padding: str | None = None

    def save(self, folder: Path, dtype: torch.dtype) -> Path:
        if self.make is None:
            return save_unmasked(folder, dtype)
        return models.save(self.make(), folder / "model", dtype)


CASES = {
    "causal": Case(lambda: llama(HEADS)),
    "causal, grouped": Case(lambda: llama(2)),
    "causal, one head of keys": Case(lambda: llama(1)),
    "causal, with biases": Case(opt),
    "causal and padding": Case(lambda: llama(HEADS), "mask"),
    "causal, grouped, and padding": Case(lambda: llama(2), "mask"),
    "padding": Case(lambda: bert(**SIZES, intermediate_size=2 * WIDTH)),
    "unmasked": Case(None),
}


# Of archives, and of Hugging Face directories.
PROFILES = {
    ".pt2": ("x", ShapeRange((1, 1, WIDTH), (2, 24, WIDTH), (2, 512, WIDTH))),
    "": ("input_ids", ShapeRange((1, 1), (2, 16), (2, 512))),
}


def check_layers(host: Host, model: Path, dtype: str, forms: tuple[str, ...], padding: str | None, layer: str) -> None:
    """Compile a model in this process; its plan has one layer of that name for each attention block, and is right."""
    folder = model.parent
    given: dict[str, Any] = {
        "earlier": Earlier(attention_forms=list(forms)),
        "optimization_profiles": (PROFILES[model.suffix],),
    }
    options = CompileOptions(model, backend=host.name, dtype=dtype, padding=padding, **given)
    translation = translate_any(options, lambda step: None)
    save_onnx(translation.graph, folder / "m.onnx")
    build_plan(
        host.name, folder / "m.onnx", folder / "m.plan", translation.profiles, [], [], "", False, lambda phase: None
    )
    plan = open_plan(host, folder / "m.plan", host.version)
    loaded = load_model(options)
    dense = in_precision(functionalize(loaded.program), DTYPES[dtype])
    inputs = example_inputs(loaded.program)
    if "input_ids" in inputs:
        inputs["input_ids"] = torch.randint(0, 96, inputs["input_ids"].shape)
    execution = prepare(plan, inputs)
    names = [found["Name"] for found in engine_layers(execution)]
    assert sum(layer in name for name in names) == LAYERS, names
    (ours,), plain = run(plan, inputs), Runner(dense)(inputs)[0]
    truth = Runner(widen(dense))(widen_sample(inputs))[0]
    assert_as_accurate(ours, plain, truth)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_tensorrt_fuses_attention(tensorrt: Host, tmp_path: Path, case: str, dtype: str) -> None:
    model = CASES[case].save(tmp_path, DTYPES[dtype])
    check_layers(tensorrt, model, dtype, (MATMUL,), CASES[case].padding, FUSED)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [case for case in CASES if "padding" not in case])
def test_cudnn_computes_attention(tensorrt: Host, tmp_path: Path, case: str, dtype: str) -> None:
    model = CASES[case].save(tmp_path, DTYPES[dtype])
    check_layers(tensorrt, model, dtype, (CUDNN, MATMUL), None, "attention")
