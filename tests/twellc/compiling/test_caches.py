"""`twellc compile --kv-cache`: what is written, what it says, and what it refuses."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

import twellc
from tests import models
from tests.caches import FAMILIES
from tests.conftest import Cli, run_here
from tests.processes import captured
from tests.twellc.generation.test_fp8_cache import SCALES, with_scales
from tests.twellc.test_cli import failed
from twellc.base.errors import UserError
from twellc.compiling.manifest import read_manifest
from twellc.options.commands import compile_options
from twellc.plugins.library import attention_library_path

needs_library = pytest.mark.skipif(attention_library_path() is None, reason="the attention library was not built")
SIZES = ["--kv-cache", 24, "--max-batch-size", 3, "--prefill-chunk", 8]


@pytest.fixture(scope="module")
def model(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with some of the files that turn text into tokens and back."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    shutil.copytree(llama, folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    return folder


@pytest.fixture(scope="module")
def plan(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of TensorRT-RTX, which needs no GPU to build one."""
    if attention_library_path() is None:
        pytest.skip("the attention library was not built")
    path = tmp_path_factory.mktemp("plans") / "llm.plan"
    sizes = {"kv_cache": 24, "max_batch_size": 3, "prefill_chunk": 8}
    with pytest.MonkeyPatch.context() as patch:
        run_here(patch)
        twellc.compile(model, path, layers="all", backend="tensorrt-rtx", onnx=path.with_suffix(".onnx"), **sizes)
    return path


def test_manifest(plan: Path) -> None:
    manifest = read_manifest(plan)
    cache = manifest.cache
    assert cache is not None
    assert (cache.length, cache.batch, cache.prefill_chunk, cache.logits) == (24, 3, 8, "last")
    assert manifest.plan is not None
    inputs = {tensor.name: (tensor.dtype, tensor.shape) for tensor in manifest.plan.inputs}
    outputs = {tensor.name: (tensor.dtype, tensor.shape) for tensor in manifest.plan.outputs}
    assert inputs.pop("input_ids") == ("int64", [-1, -1])
    assert inputs.pop("write_index") == inputs.pop("token_count") == ("int64", [-1])
    assert outputs.pop("logits") == ("bf16", [-1, 96])
    shapes = {("bf16", tuple(shape)) for _, shape in (*inputs.values(), *outputs.values())}
    assert shapes == {("bf16", (-1, 2, 24, 8))}
    assert [(pair.input, pair.output) for pair in cache.pairs] == list(zip(inputs, outputs, strict=True))
    ids = [profile["input_ids"] for profile in manifest.profiles]
    ranges = [(each.min, each.opt, each.max) for each in ids]
    assert ranges == [((1, 1), (1, 8), (3, 8)), ((1, 1), (3, 1), (3, 1)), ((1, 1), (1, 1), (1, 1))]
    assert manifest.plugins.names == ["TwellGatedMlp", "TwellLinear", "TwellAppendCaches"]
    assert {(block.form, block.mask) for block in manifest.attention} == {("operator", "causal")}
    assert manifest.plugins.register is not None
    assert "libtwell_attention.so" in manifest.plugins.register["trtexec"]


def test_files_for_text(plan: Path, model: Path) -> None:
    cache = read_manifest(plan).cache
    assert cache is not None
    assert cache.text == "llm.plan.text"
    folder = plan.with_name(cache.text)
    kept = {str(file.relative_to(folder)): file for file in folder.rglob("*") if file.is_file()}
    assert sorted(kept) == [
        *("additional_chat_templates/tool_use.jinja", "chat_template.jinja", "config.json"),
        *("generation_config.json", "tokenizer_config.json"),
    ]
    assert all(file.read_bytes() == (model / name).read_bytes() for name, file in kept.items())


def test_inspect_shows_the_pairs(cli: Cli, plan: Path) -> None:
    shown = cli("inspect", plan).output
    assert "up to 24 tokens of each of up to 3 sequences" in shown
    assert "past_key_values.1.value" in shown
    assert "present.1.value" in shown
    found = json.loads(cli("inspect", plan, "--json").stdout)
    ends = {"input": "past_key_values.0.key", "output": "present.0.key"}
    assert found["cache"]["pairs"][0] == {**ends, "shape": [-1, 2, 24, 8]}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads a kernel reads in FP8, with scales for them."""
    model = models.llama(head_dim=64, num_hidden_layers=2)
    return with_scales(models.save(model, tmp_path_factory.mktemp("models") / "wide", torch.bfloat16))


@needs_library
def test_a_cache_in_fp8(cli: Cli, wide: Path, tmp_path: Path) -> None:
    plan, graph = tmp_path / "m.plan", tmp_path / "m.onnx"
    options = ["--backend", "tensorrt-rtx", "--kv-cache-dtype", "fp8"]
    done = cli("compile", wide, "-o", plan, "--onnx", graph, *SIZES, *options)
    assert done.exit_code == 0, done.output
    assert "kept in FP8, with the scales of the checkpoint" in done.output.replace("\n", " ")
    manifest = read_manifest(plan)
    assert manifest.cache is not None
    assert manifest.cache.dtype == "fp8"
    names = [pair.input for pair in manifest.cache.pairs]
    scales = [each for layer in SCALES for each in layer]
    assert manifest.settings.cache_scales == pytest.approx(dict(zip(names, scales, strict=True)))
    assert manifest.plan is not None
    tensors = [*manifest.plan.inputs, *manifest.plan.outputs]
    assert {each.dtype for each in tensors if ".value" in each.name or ".key" in each.name} == {"fp8"}
    assert next(each.dtype for each in tensors if each.name == "logits") == "bf16"
    assert {(block.form, block.mask) for block in manifest.attention} == {("cudnn", "causal")}
    found = [
        {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
        for node in onnx.load(graph).graph.node
        if node.op_type in ("TwellAppendCaches", "TwellCachedAttention")
    ]
    given = [(each["fp8"], each["key_scale"], each["value_scale"]) for each in found]
    assert given == [pytest.approx((1, *SCALES[layer])) for layer in (0, 0, 1, 1)]
    assert "0.01229 MB a sequence, fp8" in cli("inspect", plan).output


def test_caches_in_fp8_that_are_refused(cli: Cli, wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["compile", "-o", tmp_path / "m.plan", "--backend", "tensorrt-rtx", "--kv-cache-dtype", "fp8"]
    failed(cli(*options, wide), "--kv-cache-dtype: only a model with a key-value cache has one")
    own = "--kv-cache-dtype fp8: TensorRT's own attention does not read such a cache; got --attention tensorrt"
    failed(cli(*options, wide, *SIZES, "--attention", "tensorrt"), own)
    monkeypatch.setattr("twellc.compiling.compiler.compute_capability", lambda: (8, 9))
    failed(cli(*options, wide, *SIZES), "no kernel reads such a cache on this GPU; got compute capability 8.9")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@needs_library
def test_a_width_of_heads_that_no_kernel_reads_in_fp8(llama: Path, tmp_path: Path) -> None:
    """The plugin says so in TensorRT's log, which is that of the first logger of a process."""
    command = [sys.executable, "-m", "twellc", "compile", llama, "-o", tmp_path / "m.plan"]
    done = captured([*command, *SIZES, "--backend", "tensorrt-rtx", "--kv-cache-dtype", "fp8"])
    assert done.returncode == 2, done.stderr
    assert "caches in FP8 need heads of a width of 64, 80, 96, 128 or 256, got" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_report_says_why_attention_is_decomposed(cli: Cli, tmp_path: Path) -> None:
    model, report = models.save(FAMILIES["gemma2"](num_hidden_layers=1), tmp_path / "gemma2"), tmp_path / "report.json"
    options = ["--backend", "none", "--onnx", tmp_path / "m.onnx", "--attention", "cudnn", "--manifest", report]
    done = cli("compile", model, *SIZES, *options)
    assert done.exit_code == 0, done.output
    assert "as the model has them, since aten.tanh stands between its products" in done.output
    found = json.loads(report.read_text())
    assert {block["form"] for block in found["attention"]} == {"as written"}
    assert found["cache"]["text"] is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "form", "mask", "names"),
    [
        (24, "matmul", "tensor", ["TwellAppendCaches"]),
        # The window holds the whole cache.
        (5, "cudnn", "causal", ["TwellCachedAttention", "TwellAppendCaches"]),
    ],
)
def test_windows_are_masks(length: int, form: str, mask: str, names: list[str], tmp_path: Path) -> None:
    model = models.save(FAMILIES["phi3-window"](num_hidden_layers=1), tmp_path / "phi3")
    options = {"attention": "cudnn", "layers": "none", "linear": "tensorrt", "kv_cache": length, "max_batch_size": 3}
    manifest = twellc.compile(model, backend="none", onnx=tmp_path / "m.onnx", **options)
    assert {(block.form, block.mask) for block in manifest.attention} == {(form, mask)}
    assert manifest.plugins.names == names
    assert ("no mask that the model computes" in manifest.attention[0].reason) == (mask == "tensor")


def test_defaults(llama: Path) -> None:
    for length, chunk in ((64, 64), (4096, 2048)):
        cache = compile_options(llama, Path("m.plan"), kv_cache=length).cache
        assert cache is not None
        assert (cache.batch, cache.chunk) == (1, chunk)


REFUSED: dict[str, tuple[str, list[Any], str]] = {
    "another kind of model": ("archive", SIZES, "only a Hugging Face directory can be compiled with a cache"),
    "no causal language model": ("t5", SIZES, "is not a causal language model"),
    "longer than the model": ("llama", ["--kv-cache", 65], "is longer than what the model was made for; got"),
    "one place": ("llama", ["--kv-cache", 1], "--kv-cache: is too short; got 1; expected 2 at least"),
    "a long chunk": ("llama", [*SIZES, "--prefill-chunk", 25], "--prefill-chunk 25: is longer than the cache"),
    "a batch alone": (
        "llama",
        ["--max-batch-size", 2],
        "--max-batch-size: only a model with a key-value cache has one",
    ),
    "a chunk alone": ("llama", ["--prefill-chunk", 2], "--prefill-chunk: only a model with a key-value cache"),
    "profiles": (
        "llama",
        [*SIZES, "--optimization-profile", "input_ids:1x1:1x2:1x3"],
        "--optimization-profile: a model with a cache has its",
    ),
    "padding": ("llama", [*SIZES, "--padding", "mask"], "--padding: a model with a cache is told by token_count"),
    "several GPUs": (
        "llama",
        [*SIZES, "--tensor-parallel", 2],
        "--tensor-parallel: a model with a cache is not shared",
    ),
    "inputs": (
        "llama",
        [*SIZES, "--input-spec", "x:float32[1]"],
        "--input-spec: a model with a cache has inputs of its own",
    ),
    "no tokens": ("llama", ["--kv-cache", 0], "Invalid value for '--kv-cache'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(request: pytest.FixtureRequest, cli: Cli, tmp_path: Path, name: str) -> None:
    fixture, options, message = REFUSED[name]
    model = request.getfixturevalue(fixture)
    failed(cli("compile", model, "-o", tmp_path / "m.plan", "--backend", "tensorrt-rtx", *options), message)
    assert list(tmp_path.iterdir()) == []


def test_other_ways_are_refused(cli: Cli, llama: Path, plan: Path, tmp_path: Path) -> None:
    for model, option, file, message in (
        (llama, "--triton", "repository", "--triton: Triton would copy the caches in every call"),
        (plan.with_suffix(".onnx"), "-o", "m.plan", "--kv-cache: only a Hugging Face directory can be compiled with a"),
    ):
        done = cli("compile", model, option, tmp_path / file, *SIZES)
        assert (done.exit_code, list(tmp_path.iterdir())) == (2, [])
        assert message in done.output


def test_files_for_text_are_not_overwritten(cli: Cli, llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "m.plan.text"
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    done = cli("compile", llama, "-o", tmp_path / "m.plan", "--backend", "tensorrt-rtx", *SIZES)
    assert (done.exit_code, list(tmp_path.iterdir())) == (2, [folder])
    assert "the folder is not empty" in done.output


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        pytest.param("_ALIASED", "NOT_THERE", "this TensorRT cannot write to a cache in place", marks=needs_library),
        ("attention_library_path", lambda: None, "libtwell_attention.so is not there"),
    ],
)
def test_what_is_installed_lacks_something(
    monkeypatch: pytest.MonkeyPatch, cli: Cli, llama: Path, tmp_path: Path, name: str, value: Any, message: str
) -> None:
    monkeypatch.setattr(f"twellc.export.plan.{name}", value)
    done = cli("compile", llama, "-o", tmp_path / "m.plan", "--backend", "tensorrt-rtx", *SIZES)
    assert (done.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert f"--kv-cache: {message}" in done.output


def test_keywords() -> None:
    with pytest.raises(UserError, match="--kv-cache: is out of its range; got 0"):
        twellc.compile("m", "m.plan", kv_cache=0)
    with pytest.raises(UserError, match=r"--prefill-chunk: is not an integer; got 2\.5"):
        twellc.compile("m", "m.plan", kv_cache=8, prefill_chunk=2.5)  # type: ignore[arg-type]
