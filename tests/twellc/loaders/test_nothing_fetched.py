"""No file of a model makes transformers run or fetch code, whatever packages are installed.

A stand-in for the package `kernels`, which fetches native code from a hub, writes down each time that it is asked for
something. Every test first lets transformers alone ask it, to be sure that the stand-in works.
"""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.utils.import_utils import KERNELS_MIN_VERSION

from tests import models
from tests.processes import captured, environment
from twellc.base.errors import UserError
from twellc.base.transformers_private import nothing_fetched
from twellc.loaders.model import load_model
from twellc.options.source import TracingOptions
from twellc.samples.tokenizer import load_tokenizer

STAND_IN = """
import os, pathlib, types

def note(what):
    with pathlib.Path(os.environ["ASKED"]).open("a") as file:
        file.write(what + "\\n")

note("imported")

class Anything:
    def __init__(self, *args, **kwargs): pass
    def __getattr__(self, name): return name

def get_kernel(name, **options):
    note(f"get_kernel {name}")
    raise FileNotFoundError(name)

def use_kernel_forward_from_hub(name):
    return lambda each: each

def use_kernelized_func(*names):
    return lambda each: each

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything
"""
BY_TRANSFORMERS = """
import os, pathlib, sys, transformers
for folder in sys.argv[1:]:
    with pathlib.Path(os.environ["ASKED"]).open("a") as file:
        file.write(f"folder {pathlib.Path(folder).name}\\n")
    try:
        transformers.AutoModel.from_pretrained(folder)
    except Exception as error:
        print(type(error).__name__, error)
"""
BY_TWELLC = """
import sys
from pathlib import Path
from twellc.loaders.model import load_model
from twellc.options.source import TracingOptions
from twellc.samples.tokenizer import load_tokenizer
if sys.argv[1] == "late":
    import kernels, transformers.integrations.hub_kernels
for folder in map(Path, sys.argv[2:]):
    try:
        load_model(TracingOptions(folder))
        load_tokenizer(folder, 256)
    except Exception as error:
        sys.exit(f"{folder.name}: {error!r}")
"""
KERNEL = "kernels-community/stand-in"
CHOICES: dict[str, dict[str, Any]] = {
    "attention": {"attn_implementation": KERNEL},
    "attention inside": {"_attn_implementation": KERNEL},
    "attention internally": {"_attn_implementation_internal": KERNEL},
    "attention by part": {"attn_implementation": {"": KERNEL, "text_config": KERNEL, "vision_config": KERNEL}},
    "paged attention": {"attn_implementation": f"paged|{KERNEL}"},
    "flash attention": {"attn_implementation": "flash_attention_2"},
    "a kernel of a file": {"attn_implementation": f"{KERNEL}@main:attention"},
    "experts": {"experts_implementation": KERNEL, "_experts_implementation": KERNEL},
    "all kernels": {
        "use_kernels": True,
        "kernel_config": {"kernel_mapping": {"RMSNorm": KERNEL}},
        "allow_all_kernels": True,
        "trust_remote_code": True,
    },
    "fusions": {"fusion_config": {"patch_embeddings": True}},
}
ASKING = {
    "attention",
    "attention inside",
    "attention by part",
    "paged attention",
    "flash attention",
    "a kernel of a file",
}


def stand_in(folder: Path) -> Path:
    (folder / "kernels").mkdir(parents=True)
    (folder / "kernels/__init__.py").write_text(STAND_IN)
    about = folder / f"kernels-{KERNELS_MIN_VERSION}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n")
    return folder


def asked(script: str, tmp_path: Path, *arguments: str | Path) -> list[str]:
    """Return what a script in a separate process asks the stand-in for."""
    packages = tmp_path / "packages"
    if not packages.exists():
        stand_in(packages)
    record = tmp_path / "asked"
    record.write_text("")
    run = captured([sys.executable, "-P", "-c", script, *arguments], env=environment(packages, ASKED=str(record)))
    assert run.returncode == 0, run.stderr[-2000:]
    return record.read_text().splitlines()


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose sizes lie in two configurations of its parts."""
    small = {**models.SMALL, "num_hidden_layers": 1, "intermediate_size": 64}
    text = {**small, "vocab_size": 256, "max_position_embeddings": 16, "eos_token_id": 2}
    vision = {**small, "image_size": 16, "patch_size": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    return models.save(transformers.CLIPModel(config).eval(), tmp_path_factory.mktemp("models") / "clip")


def configured(source: Path, folder: Path, changes: dict[str, Any], part: str = "") -> Path:
    """Link a model's files, beside a config.json with changes in it, or in one of its parts."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "config.json").unlink()
    config = json.loads((source / "config.json").read_text())
    (config[part] if part else config).update(changes)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_kernels_are_missing_for_transformers() -> None:
    hub_kernels: Any = importlib.import_module("transformers.integrations.hub_kernels")
    before = hub_kernels.is_kernels_available
    with nothing_fetched():
        assert not hub_kernels.is_kernels_available()
    assert hub_kernels.is_kernels_available is before


@pytest.mark.slow
def test_no_key_of_a_configuration_asks_for_kernels(llama: Path, clip: Path, tmp_path: Path) -> None:
    whole = [configured(llama, tmp_path / name, changes) for name, changes in CHOICES.items()]
    parts = [
        configured(clip, tmp_path / f"{part} {name}", changes, part)
        for part in ("text_config", "vision_config")
        for name, changes in CHOICES.items()
        if name in ("attention", "attention inside", "all kernels")
    ]
    found, current = set(), ""
    for line in asked(BY_TRANSFORMERS, tmp_path, *whole, *parts):
        kind, _, name = line.partition(" ")
        current = name if kind == "folder" else current
        found |= {current} if kind == "get_kernel" else set()
    assert found == ASKING
    everything: dict[str, Any] = {key: value for changes in CHOICES.values() for key, value in changes.items()}
    folders = [
        configured(llama, tmp_path / "everything", everything),
        *parts,
        *whole[:3],
        configured(clip, tmp_path / "everything in a part", everything, "text_config"),
    ]
    assert asked(BY_TWELLC, tmp_path, "", *folders) == []
    # A process that has imported them keeps both; nothing more is asked for.
    assert asked(BY_TWELLC, tmp_path, "late", *folders[:2]) == ["imported"]


@pytest.mark.parametrize(
    ("place", "changes"),
    [
        ("auto_map", {"auto_map": {"AutoModel": "code.Model"}}),
        ("text_config.auto_map", {"text_config": {"auto_map": {"AutoConfig": "somebody/model--code.Config"}}}),
        ("parts.0.auto_map", {"parts": [{"auto_map": {}}]}),
    ],
)
def test_remote_code_is_refused_wherever_it_is_named(
    place: str, changes: dict[str, Any], llama: Path, tmp_path: Path
) -> None:
    folder = configured(llama, tmp_path / "model", changes)
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(UserError, match=rf"config\.json: the model needs remote code \({place}\)"):
        load_model(TracingOptions(folder))
    assert not (tmp_path / "ran").exists()


def test_code_beside_a_model_is_not_run(bytelm: Path, tmp_path: Path) -> None:
    """Generation that the folder defines, processors and tokenizers."""
    folder = configured(bytelm, tmp_path / "model", {})
    payload = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    (folder / "custom_generate").mkdir()
    for file in ("custom_generate/generate.py", "code.py", "tokenization_code.py"):
        (folder / file).write_text(payload + "class Code: pass\ndef generate(model): pass\n")
    code = {"auto_map": {"AutoTokenizer": ["code.Code", "code.Code"], "AutoProcessor": "code.Code"}}
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "generation_config.json").write_text(json.dumps({"custom_generate": "custom_generate/generate.py"}))
    (folder / "processor_config.json").write_text(json.dumps(code))
    load_model(TracingOptions(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps(code | {"tokenizer_class": "Code"}))
    with pytest.raises(UserError, match="cannot load the tokenizer"):
        load_tokenizer(folder, 256)
    assert not (tmp_path / "ran").exists()


NAMES = [
    "notes.json", "generation_config.json", "processor_config.json", "adapter_config.json", "extra.safetensors",
    "model.safetensors.index.json", "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "vocab.json", "merges.txt", "README.md",
]  # fmt: skip


@pytest.mark.timeout(60)
def test_pipes_among_the_files_of_a_model(bytelm: Path, tmp_path: Path) -> None:
    """None is waited for, also where a link leads to it."""
    from twellc.loaders.loaded import fingerprint

    folder = configured(bytelm, tmp_path / "model", {})
    os.mkfifo(tmp_path / "pipe")
    for index, name in enumerate(NAMES):
        (folder / name).unlink(missing_ok=True)
        if index % 2:
            os.mkfifo(folder / name)
        else:
            (folder / name).symlink_to(tmp_path / "pipe")
    (folder / "folder.json").mkdir()
    load_model(TracingOptions(folder))
    assert load_tokenizer(folder, 256)("ab") == [0, 97, 98]
    fingerprint(folder)
    (folder / "vocab.txt").write_text("a\nb\n")  # now there is a tokenizer, of which most is missing
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    load_tokenizer(folder, 256)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_in_place_of_a_file_that_is_needed(name: str, llama: Path, tmp_path: Path) -> None:
    folder = configured(llama, tmp_path / "model", {})
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(UserError, match=r"no config\.json in this folder|the weights are missing"):
        load_model(TracingOptions(folder))
