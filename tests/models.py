"""Small torch modules and Hugging Face models, and how tests export, rewrite and compare them.

Weights are drawn so that feed-forward blocks matter: their output is about as large as their input, so that a test that
compares outputs notices a damaged block.
"""

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from tests.tolerance import assert_same
from twellc.passes.block_profile import BlockProfile, shapes
from twellc.passes.graph.execution import Runner, example_inputs
from twellc.passes.match.find_ffn import FfnBlock, find_ffn_blocks
from twellc.passes.pipeline import PassOptions, Stage, run_until
from twellc.passes.rewrite_ffn import rewrite_ffn
from twellc.plugins.block import BlockOptions

Function = Callable[[Tensor], Tensor]
BATCH, SEQUENCE, D_MODEL, D_FF = 2, 3, 16, 40


def unchanged(tensor: Tensor) -> Tensor:
    return tensor


class _Block(nn.Module):
    projections: tuple[str, ...]

    def __init__(
        self,
        activation: Function = torch.relu,
        *,
        biases: str = "",
        d_model: int = D_MODEL,
        d_ff: int = D_FF,
        d_out: int | None = None,
        swap: bool = False,
        before: Function = unchanged,
        between: Function = unchanged,
    ) -> None:
        super().__init__()
        for name in self.projections:
            setattr(self, name, nn.Linear(d_model, d_ff, bias=name[0] in biases))
        self.down = nn.Linear(d_ff, d_model if d_out is None else d_out, bias="d" in biases)
        self.activation, self.swap, self.before, self.between = activation, swap, before, between
        scale_weights(self)


class Gated(_Block):
    """down(between(activation(gate(x)) * up(x)))."""

    projections = ("gate", "up")

    def forward(self, x: Tensor) -> Tensor:
        rows = self.before(x)
        gate, up = self.activation(self.gate(rows)), self.up(rows)
        return self.down(self.between(up * gate if self.swap else gate * up))


class Plain(_Block):
    """down(between(activation(up(x))))."""

    projections = ("up",)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.activation(self.up(self.before(x)))))


class Residual(nn.Module):
    """x + ffn(x + 1): a block that reads and feeds something else than the program's own inputs and outputs."""

    def __init__(self, ffn: nn.Module) -> None:
        super().__init__()
        self.ffn = ffn

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(x + 1)


class Written(nn.Module):
    """A module written as a function of itself and its inputs, with given buffers, submodules and parameters."""

    def __init__(
        self, function: Callable[..., Any], buffers: dict[str, Tensor] | None = None, **members: nn.Module | Tensor
    ) -> None:
        super().__init__()
        self.function = function
        for name, tensor in (buffers or {}).items():
            self.register_buffer(name, tensor)
        for name, member in members.items():
            setattr(self, name, nn.Parameter(member) if isinstance(member, Tensor) else member)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def of(function: Callable[[Any, Tensor], Any], ffn: nn.Module | None = None) -> nn.Module:
    """Return a function of a block, gated unless another is given, and x as a module."""
    return Written(lambda module, x: function(module.ffn, x), ffn=ffn or Gated())


def scale_weights(module: nn.Module) -> None:
    """Draw weights that keep the size of activations, and biases that matter."""
    for name, parameter in module.named_parameters():
        nn.init.normal_(parameter, std=0.5 if name.endswith("bias") else (2 / parameter.shape[-1]) ** 0.5)


def export(
    module: nn.Module, *inputs: Tensor, dynamic: Any = None, deferred: bool = False, **kwargs: Tensor
) -> ExportedProgram:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return torch.export.export(
            module.eval(),
            inputs or (() if kwargs else (torch.randn(BATCH, SEQUENCE, D_MODEL),)),
            kwargs,
            dynamic_shapes=dynamic,
            prefer_deferred_runtime_asserts_over_guards=deferred,
        )


def functionalize(program: ExportedProgram) -> ExportedProgram:
    """Return a traced program in one form; its values are those of the model."""
    return run_until(program, PassOptions(), Stage.FUNCTIONAL).program


def canonicalize(program: ExportedProgram) -> ExportedProgram:
    """Return a traced program as the matcher reads it, in the precision that it has."""
    return run_until(program, PassOptions(), Stage.ARRANGING).program


def canonical(module: nn.Module, *inputs: Tensor, dynamic: Any = None) -> ExportedProgram:
    return canonicalize(export(module, *inputs, dynamic=dynamic))


def blocks_of(module: nn.Module, *inputs: Tensor) -> list[FfnBlock]:
    return find_ffn_blocks(canonical(module, *inputs))


def rewrite(program: ExportedProgram, compression: int = 8) -> ExportedProgram:
    """Rewrite every block of a canonical program that is not refused, whatever its dtype."""
    return rewrite_ffn(
        program, [(block, options_of(block, compression)) for block in find_ffn_blocks(program) if not block.refusal]
    )


class Rewritten(NamedTuple):
    """A canonical program, its blocks, and the program rewritten."""

    before: ExportedProgram
    blocks: list[FfnBlock]
    after: ExportedProgram


def assert_rewrites(
    module: nn.Module, *inputs: Tensor, dynamic: Any = None, at: tuple[Tensor, ...] | None = None
) -> Rewritten:
    """Rewrite a module, of which every block must match, and compare with it, at other inputs if these are given."""
    program = canonical(module, *inputs, dynamic=dynamic)
    blocks = find_ffn_blocks(program)
    assert {block.refusal for block in blocks} == {""}
    result = rewrite(program)
    given = at or inputs
    for actual, expected in zip(run(result, *given), eager(module, *given), strict=True):
        assert_same(actual, expected)
    return Rewritten(program, blocks, result)


def options_of(block: FfnBlock, compression: int = 8, hot: int = 0) -> BlockOptions:
    return BlockOptions(activation=block.activation, threshold=block.threshold, compression=compression, hot=hot)


def block_profile(
    module: str, firing: np.ndarray[Any, Any], tokens: dict[int, int], variant: str = "gated"
) -> BlockProfile:
    """Return a profile of a block of which only its neurons are known, and how many fire for how many tokens."""
    arrays = {name: np.zeros(shape, np.int64) for name, shape in shapes(len(firing)).items()}
    for count, seen in tokens.items():
        arrays["rows"][count] = seen
    return BlockProfile(module, variant, "relu", **{**arrays, "firing": firing})


def calls(program: ExportedProgram) -> Counter[str]:
    """Count the operations of a graph by name, without what computes shapes."""
    names = (
        str(getattr(getattr(node.target, "overloadpacket", None), "__name__", node.target))
        for node in program.graph.nodes
        if node.op == "call_function"
    )
    return Counter(name for name in names if not name.startswith("sym_size"))


def run(program: ExportedProgram, *inputs: Tensor) -> list[Tensor]:
    """Run a program on its example inputs, or on others in the program's order."""
    named = example_inputs(program)
    if inputs:
        named = dict(zip(named, inputs, strict=True))
    return Runner(program)(named)


def eager(module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    with torch.no_grad():
        result = module.eval()(*inputs)
    return list(result) if isinstance(result, tuple | list) else [result]


SMALL = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {**SMALL, "intermediate_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 64}
_SINGLE = {**SMALL, "intermediate_size": 96, "max_position_embeddings": 64}
_GPT = {"vocab_size": 96, "n_embd": 32, "n_inner": 96, "n_head": 4, "n_positions": 64, "activation_function": "relu"}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2}


def family(name: str, kind: str = "ForCausalLM", **options: Any) -> Callable[..., Any]:
    """Return what makes a tiny model of transformers, with changes of these options."""

    def make(**changes: Any) -> Any:
        import transformers

        config = getattr(transformers, f"{name}Config")(**{**options, **changes})
        return _seeded(getattr(transformers, f"{name}{kind}"), config)

    return make


def llama(activation: str = "relu", **changes: Any) -> Any:
    return family("Llama", **{**WIDE, "intermediate_size": 320})(hidden_act=activation, **changes)


class Logits(nn.Module):
    """A causal model as a function from token ids to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


opt = family("OPT", **SMALL, ffn_dim=96, word_embed_proj_dim=32, max_position_embeddings=64, pad_token_id=1)
T5: dict[str, Any] = {
    "vocab_size": 96,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 96,
    "num_heads": 4,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "decoder_start_token_id": 0,
}
t5 = family("T5", "ForConditionalGeneration", **T5, feed_forward_proj="relu")
m2m100 = family(
    "M2M100",
    "ForConditionalGeneration",
    vocab_size=96,
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=96,
    decoder_ffn_dim=96,
    max_position_embeddings=64,
    decoder_start_token_id=2,
)
# A layer of four experts, one for each token, in encoder and decoder; an expert takes three tokens of a text.
switch = family(
    "SwitchTransformers",
    "ForConditionalGeneration",
    **T5,
    num_sparse_encoder_layers=1,
    num_sparse_decoder_layers=1,
    num_experts=4,
    expert_capacity=3,
)
# Its projections are Conv1D, that is addmm with a weight stored [in, out].
gpt2 = family("GPT2", "LMHeadModel", **_GPT, n_layer=1)
# Squared ReLU without a gate; Arcee has other norms, Persimmon and Jais-2 biases, Persimmon Q, K and V in one product.
nemotron = family("Nemotron", **WIDE)
arcee = family("Arcee", **WIDE, **_ENDS)
persimmon = family("Persimmon", **_SINGLE)
jais2 = family("Jais2", **WIDE, **_ENDS)
# Attention and block read the same x; Q, K and V of a head are one after the other in one product.
gpt_neox = family("GPTNeoX", **_SINGLE, hidden_act="relu")
# Attention and block read the same; positions turn neighbouring features.
gptj = family("GPTJ", **_GPT, **_ENDS, n_layer=2, rotary_dim=4)
# A group's queries, its key and its value are one after the other in one product.
falcon = family("Falcon", **SMALL, ffn_hidden_size=96, activation="relu", new_decoder_architecture=True, num_kv_heads=2)
# Gate and up projection are one product, as are Q, K and V.
phi3 = family("Phi3", **WIDE, **_ENDS, hidden_act="relu", pad_token_id=0)
# A mixture of two experts.
mixtral = family("Mixtral", **WIDE, hidden_act="relu", num_local_experts=2)
# Mamba, experts with squared ReLU and without a gate, beside a shared one, and attention.
nemotron_h = family(
    "NemotronH",
    **WIDE,
    head_dim=8,
    layers_block_type=["mamba", "moe", "attention"],
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=48,
    moe_shared_expert_intermediate_size=64,
    mamba_num_heads=4,
    mamba_head_dim=16,
    ssm_state_size=8,
    n_groups=2,
    chunk_size=32,
    pad_token_id=0,
)
# Squared ReLU with a gate, and an RMSNorm between the hidden tensor and the down projection.
bitnet = family("BitNet", **WIDE, hidden_act="relu2", pad_token_id=0)


def rwkv(**changes: Any) -> Any:
    """Squared ReLU without a gate; the result is multiplied with a sigmoid outside of the block."""
    sizes = {**SMALL, "attention_hidden_size": SMALL["hidden_size"], "intermediate_size": 96, "context_length": 64}
    model = family("Rwkv", **sizes)(**changes)
    model(torch.ones(1, 2, dtype=torch.int64))  # the first call in eval mode rescales its weights, in place
    return model


def _seeded(model_class: Any, config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name and "shared" not in name:
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
            elif name.endswith("bias"):
                nn.init.normal_(parameter, std=0.1)
    return model.eval()


def save(model: Any, folder: Path, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Path:
    model.to(dtype).save_pretrained(folder, **options)
    return folder


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
VOCABULARY = 320


def make_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    """Save a byte-level BPE tokenizer of `VOCABULARY` tokens; 0 is its end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["the quick brown fox jumps over the lazy dog, größer und schöner"] * 9, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<end>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def without_expectation(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of a report without what is expected of the sizes of a call, which differ between commands."""
    return [{name: value for name, value in layer.items() if name != "expectation"} for layer in layers]


@dataclasses.dataclass
class Pair:
    hidden: Tensor
    other: Tensor
