"""Switch Transformers, whose experts are stacked for tracing: what transformers computes, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

import twellc
from tests import models
from tests.models import calls, run
from tests.tolerance import assert_as_accurate
from twellc.base.errors import UserError
from twellc.loaders.model import load_model
from twellc.options.source import TracingOptions
from twellc.passes.graph.execution import Runner

ROOM = 3  # tokens of a text that an expert takes


def inputs() -> dict[str, Tensor]:
    """Return texts of which one is padded, and so has more of the same token."""
    ids = torch.randint(2, 96, (3, 17))
    mask = torch.ones_like(ids)
    mask[1, 10:] = 0
    return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": torch.randint(2, 96, (3, 12))}


def dropped_by(model: Any, given: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Return a model's logits, and how many tokens its experts had no room for."""
    routed: list[Tensor] = []
    for layer in model.modules():
        if type(layer).__name__ == "SwitchTransformersExperts":
            layer.register_forward_hook(lambda _, given, result: routed.append(given[1].sum(-1)))
    with torch.no_grad():
        logits = model(**given, use_cache=False).logits
    return logits, sum(int((each == 0).sum()) for each in routed)


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        (torch.bfloat16, {"expert_capacity": ROOM}),
        (torch.bfloat16, {"expert_capacity": 64, "router_bias": True, "router_dtype": "bfloat16"}),
        (torch.float32, {"expert_capacity": ROOM, "router_bias": True, "dense_act_fn": "relu2"}),
    ],
)
def test_what_transformers_computes(dtype: torch.dtype, changes: dict[str, Any], tmp_path: Path) -> None:
    """With the tokens that experts have no room for; each weight is held once."""
    path, given = models.save(models.switch(**changes), tmp_path, dtype), inputs()
    own = transformers.SwitchTransformersForConditionalGeneration.from_pretrained(path, dtype=dtype).eval()
    expected, dropped = dropped_by(own, given)
    assert (dropped > 0) == (changes["expert_capacity"] == ROOM)
    program = load_model(TracingOptions(path)).program
    found = Runner(program)(given)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=0 if dtype == torch.bfloat16 else 1e-5)
    experts = {name: list(each.shape) for name, each in program.state_dict.items() if "experts" in name}
    layer = "encoder.block.0.layer.1.mlp.experts"
    assert experts.pop(f"{layer}.up_proj") == [4, 96, 32] and experts.pop(f"{layer}.down_proj") == [4, 32, 96]
    assert len(experts) == 2


def test_a_layer_in_memory() -> None:
    """Beside float64; the layer stays as it is, and a token without a place in an expert gets 0."""
    config = transformers.SwitchTransformersConfig(d_model=32, d_ff=96, num_experts=4, expert_capacity=ROOM)
    layer: Any = SwitchTransformersSparseMLP(config).eval().requires_grad_(False)
    models.scale_weights(layer)
    layer, x = layer.bfloat16(), torch.randn(3, 11, 32).bfloat16()
    expected, names = layer(x), list(layer.state_dict())
    sizes = {0: torch.export.Dim("batch", min=2), 1: torch.export.Dim("tokens", min=2)}
    done = twellc.rewrite(layer, args=(torch.randn(2, 5, 32).bfloat16(),), dynamic_shapes=(sizes,))
    assert calls(done.program)["experts"] == 1
    assert [(row.experts, row.top, row.reason) for row in done.layers] == [(4, 1, "matches")]
    (found,) = run(done.program, x)
    assert_as_accurate(found, expected, layer.double()(x.double()))
    nothing = (expected == 0).all(-1)
    assert nothing.any() and torch.equal((found == 0).all(-1), nothing)
    assert list(layer.state_dict()) == names


def test_nllb_moe_is_refused(tmp_path: Path) -> None:
    """Of four experts transformers runs the first two, whatever the router says."""
    experts, sizes = {"num_experts": 4, "encoder_sparse_step": 1, "decoder_sparse_step": 1}, {"d_model": 32}
    sizes |= {f"{part}_{name}": 1 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    model = models.family("NllbMoe", "ForConditionalGeneration", vocab_size=96, **sizes, **experts)().eval()
    ran = set()
    for name, module in model.model.encoder.layers[0].ffn.experts.named_children():
        module.register_forward_hook(lambda *_, name=name: ran.add(name))
    ids = torch.randint(2, 96, (2, 50))
    model(input_ids=ids, decoder_input_ids=ids)
    assert ran == {"expert_0", "expert_1"}, "transformers is right again: let twellc take the family"
    with pytest.raises(UserError, match="computes NLLB-MoE by its experts 0 and 1 alone, whatever the router says"):
        load_model(TracingOptions(models.save(model, tmp_path)))
