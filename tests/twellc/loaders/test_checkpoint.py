"""Hugging Face directories in the states in which they are found: what is taken, with which note; what is refused."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.processes import captured, environment
from twellc.base.errors import UserError
from twellc.loaders.checkpoint import Checkpoint, read_checkpoint
from twellc.loaders.model import load_model
from twellc.options.source import TracingOptions
from twellc.passes.graph.execution import Runner

Tensors = dict[str, torch.Tensor]
INDEX = "model.safetensors.index.json"
MERGE = "merge it with merge_and_unload() of peft, and save what that returns with save_pretrained"


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "model"))


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def stored(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def renaming(change: Callable[[str], str]) -> Callable[[Path], None]:
    def rename(folder: Path) -> None:
        tensors = {change(name): value.clone() for name, value in stored(folder).items()}
        save_file(tensors, folder / "model.safetensors")

    return rename


def leave_an_old_index(folder: Path) -> None:
    weight_map = dict.fromkeys(stored(folder), "model-00001-of-00030.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def add_an_adapter(folder: Path) -> None:
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "some/model", "r": 4, "target_modules": ["up_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    save_file({"base_model.model.x.lora_A.weight": torch.ones(4, 4)}, folder / "adapter_model.safetensors")


def configuring(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder, **changes)


def wrapped(*parts: str) -> str:
    return f"the names of the weights hold {' and '.join(parts)}; they are taken without that"


COMPILED, PARALLEL = "'_orig_mod.' of torch.compile", "'module.' of DataParallel"
TAKEN: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "an index of shards that are gone": (
        leave_an_old_index,
        [f"{INDEX} is not used: the whole model is in model.safetensors"],
    ),
    "an adapter beside it": (
        add_an_adapter,
        [f"the adapter beside the model (adapter_config.json) is not in the plan: {MERGE}"],
    ),
    "compiled": (renaming("_orig_mod.{}".format), [wrapped(COMPILED)]),
    "parallel": (renaming("module.{}".format), [wrapped(PARALLEL)]),
    "compiled, then parallel": (renaming("module._orig_mod.{}".format), [wrapped(COMPILED, PARALLEL)]),
    "parallel, then compiled": (renaming("_orig_mod.module.{}".format), [wrapped(COMPILED, PARALLEL)]),
    "compiled layers": (
        renaming(lambda name: name.replace("layers.0.", "layers.0._orig_mod.").replace("mlp.", "mlp._orig_mod.")),
        [wrapped(COMPILED)],
    ),
    "checkpointed, sharded layers": (
        renaming(lambda name: name.replace("layers.1.", "layers.1._fsdp_wrapped_module._checkpoint_wrapped_module.")),
        [
            wrapped(
                "'_fsdp_wrapped_module.' of FullyShardedDataParallel",
                "'_checkpoint_wrapped_module.' of activation checkpointing",
            )
        ],
    ),
    "no format in the file": (lambda folder: save_file(stored(folder), folder / "model.safetensors"), []),
    "a byte order mark": (
        lambda folder: (folder / "config.json").write_bytes(b"\xef\xbb\xbf" + (folder / "config.json").read_bytes()),
        [],
    ),
    "no settings of generation": (lambda folder: (folder / "generation_config.json").unlink(missing_ok=True), []),
    "dtype by its old name": (configuring(dtype=None, torch_dtype="bfloat16"), []),
    "no dtype": (configuring(dtype=None), []),
    "no quantisation": (configuring(quantization_config=None), []),
}


@pytest.mark.parametrize("state", TAKEN)
def test_taken(state: str, llama: Path, folder: Path) -> None:
    """Configuration and weights are those of the model itself."""
    change, notes = TAKEN[state]
    change(folder)
    found, own = read_checkpoint(folder), read_checkpoint(llama)
    assert found.notes == notes
    assert found.tensors.keys() == own.tensors.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in own.tensors.items())


def logits(folder: Path) -> torch.Tensor:
    torch.manual_seed(0)
    ids = torch.randint(2, 96, (2, 7))
    return Runner(load_model(TracingOptions(folder)).program)({"input_ids": ids})[0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("state", ["an index of shards that are gone", "compiled layers", "dtype by its old name"])
def test_results_are_those_of_the_model(state: str, llama: Path, folder: Path) -> None:
    TAKEN[state][0](folder)
    assert torch.equal(logits(folder), logits(llama))


def test_weights_that_the_model_has_no_place_for(folder: Path) -> None:
    """Layers that the configuration does not count would be missed in silence."""
    edit(folder, num_hidden_layers=1)
    (note,) = load_model(TracingOptions(folder)).notes
    assert note.startswith("9 tensors of the checkpoint have no place in the model: model.layers.1.input_layernorm")
    assert note.endswith(", …")


def test_weights_of_several_dtypes(folder: Path) -> None:
    """As in transformers, all are in the dtype that config.json names, or that of the first."""
    tensors = {
        name: value.to(torch.float32 if "norm" in name else torch.bfloat16) for name, value in stored(folder).items()
    }
    save_file(tensors, folder / "model.safetensors")
    program = load_model(TracingOptions(folder)).program
    assert {value.dtype for value in program.state_dict.values()} == {torch.bfloat16}


PEFT = """
import pathlib
def __getattr__(name):
    raise RuntimeError(f"peft is asked for {name}")
"""


def test_an_adapter_where_peft_is_installed(llama: Path, folder: Path, tmp_path: Path) -> None:
    """transformers would load the adapter's base model, by its name, and the adapter into it."""
    add_an_adapter(folder)
    (tmp_path / "packages/peft").mkdir(parents=True)
    (tmp_path / "packages/peft/__init__.py").write_text(PEFT)
    about = tmp_path / "packages/peft-0.19.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 0.19.0\n")
    script = (
        "import sys, pathlib\nfrom twellc.loaders.huggingface import nothing_fetched, open_directory\n"
        "with nothing_fetched():\n    print(open_directory(pathlib.Path(sys.argv[1]))[2])"
    )
    run = captured([sys.executable, "-P", "-c", script, folder], env=environment(tmp_path / "packages"))
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == str(TAKEN["an adapter beside it"][1])


def writing(name: str, text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(text)

    return change


def writing_index(text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        (folder / "model.safetensors.index.json").write_text(text)

    return change


def index(weight_map: object) -> Callable[[Path], None]:
    return writing_index(json.dumps({"metadata": {}, "weight_map": weight_map}))


def lose_a_weight(folder: Path) -> None:
    tensors = stored(folder)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def quantising(place: str = "", **settings: Any) -> Callable[[Path], None]:
    changes = {"quantization_config": settings}
    return lambda folder: edit(folder, **({place: changes} if place else changes))


def storing(name: str, value: torch.Tensor) -> Callable[[Path], None]:
    return lambda folder: save_file(stored(folder) | {name: value}, folder / "model.safetensors")


def leave(*files: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        for file in files:
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_bytes(b"x")

    return change


def an_adapter_without(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        add_an_adapter(folder)
        (folder / name).unlink()

    return change


def shards_in_a_folder(folder: Path) -> None:
    (folder / "parts").mkdir()
    (folder / "model.safetensors").rename(folder / "parts/a.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "parts/a.safetensors"}}))


def twice(folder: Path) -> None:
    tensors = stored(folder)
    save_file(tensors | {"_orig_mod.lm_head.weight": tensors["lm_head.weight"] * 2}, folder / "model.safetensors")


UP = "model.layers.0.mlp.up_proj"
QUANTISED = "this form of quantised weights is not read; got "
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (
        lambda folder: list(map(Path.unlink, folder.iterdir())),
        "no config.json in this folder; expected a Hugging Face directory",
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), "no config.json in this folder"),
    "config is not JSON": (writing("config.json", "{"), "cannot be read as JSON"),
    "config is a list": (writing("config.json", "[]"), "is not a JSON object"),
    "no architectures": (configuring(architectures=None), "no such architecture; got None"),
    "empty architectures": (configuring(architectures=[]), "no such architecture; got None"),
    "unknown architecture": (configuring(architectures=["FooForCausalLM"]), "got 'FooForCausalLM'"),
    "architecture is not a class": (configuring(architectures=["pipeline"]), "no such architecture; got 'pipeline'"),
    "architectures is a number": (configuring(architectures=3), "no such architecture; got None"),
    "remote code": (configuring(auto_map={"AutoModel": "x.Y"}), "the model needs remote code (auto_map)"),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "model.safetensors: the weights are missing",
    ),
    "one position": (configuring(max_position_embeddings=1), "too few tokens to trace it; got at most 1; expected 2"),
    "a number as text": (
        configuring(max_position_embeddings="64"),
        "Validation error for field 'max_position_embeddings': TypeError",
    ),
    "truncated weights": (
        lambda folder: os.truncate(folder / "model.safetensors", 5000),
        "model.safetensors: is not a whole safetensors file",
    ),
    "a weight is missing": (lose_a_weight, "1 weights are missing; got model.layers.1.mlp.up_proj.weight"),
    "other shapes": (
        configuring(intermediate_size=64),
        "have other shapes than the config says; got model.layers.0.mlp.down_proj.weight [32, 320] for [32, 64]",
    ),
    "a shard is missing": (index({"x": "model-00001-of-00002.safetensors"}), "the weights are missing"),
    "index is not an index": (writing_index("[]"), "is not an index of weights"),
    "index without a map": (writing_index("{}"), "is not an index of weights"),
    "index maps to numbers": (index({"x": 3}), "the weights are missing"),
    "a shard outside": (index({"x": "../secret.safetensors"}), "names a file outside of its folder; got '../secret"),
    "a shard elsewhere": (index({"x": "/etc/passwd"}), "names a file outside of its folder"),
    "a shard that is the folder": (index({"x": ".."}), "names a file outside of its folder"),
    "gptq": (
        quantising(quant_method="gptq", bits=4),
        f"{QUANTISED}quantization_config of gptq; expected 16 or 32 bits, or float-quantized",
    ),
    "no method": (quantising(load_in_8bit=True), f"{QUANTISED}quantization_config; expected"),
    "quantised text": (quantising("text_config", quant_method="awq"), f"{QUANTISED}text_config.quantization_config of"),
    "compressed": (configuring(compression_config={"a": 1}), f"{QUANTISED}compression_config"),
    "int8 weights": (
        storing(f"{UP}.weight", torch.zeros(320, 32, dtype=torch.int8)),
        f"{QUANTISED}{UP}.weight of int8",
    ),
    "packed weights": (storing(f"{UP}.qweight", torch.zeros(4, dtype=torch.int32)), f"{QUANTISED}{UP}.qweight of"),
    "an adapter alone": (
        an_adapter_without("config.json"),
        f"holds an adapter, and no model; got an adapter of some/model. First {MERGE}.",
    ),
    "an adapter and a config": (
        an_adapter_without("model.safetensors"),
        "holds an adapter, and no model; got an adapter of some",
    ),
    "an adapter in the weights": (
        storing(f"{UP}.lora_A.weight", torch.ones(4, 4)),
        f"the weights hold an adapter beside the model's own; got {UP}.lora_A.weight. First {MERGE}",
    ),
    "a base layer": (storing(f"{UP}.base_layer.weight", torch.ones(4, 4)), "hold an adapter beside the model's own"),
    "a name twice": (twice, "several of its weights have the same name"),
    "an unknown activation": (
        configuring(hidden_act="fatrelu", hidden_act_param=0.01),
        "config.json: transformers has no such activation; got hidden_act 'fatrelu'. Export the model with",
    ),
    "shards in a folder": (
        shards_in_a_folder,
        "names a file in another folder; got 'parts/a.safetensors'; expected files beside it. Move",
    ),
    "another name": (
        leave("model.fp16.safetensors"),
        "the weights are missing; got model.fp16.safetensors; expected model.safetensors. If that is the model,",
    ),
    "pickles": (
        leave("pytorch_model.bin"),
        "the weights are missing; got pytorch_model.bin, which may execute code; expected safetensors. If you trust",
    ),
    "another format": (leave("model.gguf"), "the weights are missing; got model.gguf; expected safetensors."),
    "a dtype that is none": (configuring(dtype="bf16"), "transformers cannot "),
}


@pytest.mark.parametrize("state", REFUSED)
def test_refused(state: str, folder: Path) -> None:
    change, message = REFUSED[state]
    (folder.parent / "secret.safetensors").write_bytes(b"x")
    change(folder)
    with pytest.raises(UserError) as refusal:
        load_model(TracingOptions(folder))
    assert str(refusal.value).startswith(str(folder)) and message in str(refusal.value)


def test_a_parameter_called_module(folder: Path) -> None:
    """Where not all names begin with it, it belongs to the model."""
    tensors = stored(folder) | {"module.bias": torch.ones(2)}
    save_file(tensors, folder / "model.safetensors")
    found: Checkpoint = read_checkpoint(folder)
    assert "module.bias" in found.tensors and found.notes == []


@pytest.mark.timeout(60)
def test_a_shard_that_is_a_pipe(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "a.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    with pytest.raises(UserError, match=r"a\.safetensors: the weights are missing"):
        load_model(TracingOptions(folder))


def test_weights_that_may_not_be_read(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read all; safetensors says that such a file is missing."""
    really = os.open

    def refuse(path: Path, *rest: Any, **options: Any) -> int:
        if str(path).endswith(".safetensors"):
            raise PermissionError(13, "Permission denied", str(path))
        return really(path, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError, match=r"model\.safetensors"):
        read_checkpoint(llama)


def sparselm(llama: Path, folder: Path, bare_weights: bool) -> Path:
    folder.mkdir()
    config = json.loads((llama / "config.json").read_text())
    config |= {"model_type": "llama_sparse_relu", "architectures": ["SparseLlamaForCausalLM"], "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, tensor in load_file(llama / "model.safetensors").items():
        if bare_weights and ".mlp." in name:
            for projection in ("gate", "up", "down"):
                name = name.replace(f"{projection}_proj.weight", f"{projection}_weight")
            tensor = tensor if "up_weight" in name else tensor.t()
        tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
    tensors["model.layers.0.mlp.tracker.count"] = torch.zeros(3)
    tensors["metrics_accumulator.total"] = torch.zeros(1)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("bare_weights", [False, True])
def test_layouts(llama: Path, tmp_path: Path, bare_weights: bool) -> None:
    ids = torch.randint(0, 90, (2, 9))
    inputs = {"input_ids": ids}
    loaded = load_model(TracingOptions(sparselm(llama, tmp_path / "sparselm", bare_weights)))
    expected = Runner(load_model(TracingOptions(llama)).program)(inputs)[0]
    assert torch.equal(Runner(loaded.program)(inputs)[0], expected)
    assert loaded.declared_activation == "silu"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "down",
            lambda weight: weight.t().contiguous(),
            r"weight model.layers.0.mlp.down_weight: has an unexpected shape",
        ),
        ("up", None, r"1 weights are missing; got model\.layers\.0\.mlp\.up_proj\.weight"),
    ],
)
def test_weights_of_a_sparselm_that_do_not_fit(
    llama: Path, tmp_path: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor] | None, message: str
) -> None:
    folder = sparselm(llama, tmp_path / "sparselm", bare_weights=True)
    tensors = stored(folder)
    weight = tensors.pop(f"model.layers.0.mlp.{name}_weight")
    if change is not None:
        tensors[f"model.layers.0.mlp.{name}_weight"] = change(weight)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=message):
        load_model(TracingOptions(folder))
