"""Loading torch.export archives, harmless ones and such that would execute code.

Every hostile archive carries a payload that makes a folder. Each test first lets torch.export.load run it, to be sure
that the payload works, and then demands that twellc refuses the archive without running it.
"""

import contextlib
import importlib
import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.export import Dim
from torch.export.pt2_archive._package import package_pt2
from torch.utils._pytree import tree_leaves

from tests.models import Gated, Residual, Written, canonicalize, export, functionalize, llama
from twellc.base.errors import UserError
from twellc.checks.accuracy import OutputAccuracy
from twellc.checks.checking import check
from twellc.compiling.translate import translate_to_file
from twellc.loaders.model import load_model
from twellc.options.commands import CheckOptions, CompileOptions
from twellc.options.source import TracingOptions
from twellc.passes.graph.execution import Runner, example_inputs

Records = dict[str, bytes]
Json = dict[str, Any]

SAMPLE_INPUTS = "data/sample_inputs/model.pt"
WEIGHTS = "data/weights/model_weights_config.json"
GRAPH = "models/model.json"


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def pickled(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def read_records(path: Path) -> Records:
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def write_records(records: Records, folder: str = "m/") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in records.items():
            archive.writestr(zipfile.ZipInfo(f"{folder}{name}"), content)
    return buffer.getvalue()


def with_json(records: Records, name: str, change: Callable[[Json], None]) -> Records:
    content = json.loads(records[name])
    change(content)
    return records | {name: json.dumps(content).encode()}


@pytest.fixture(scope="module")
def harmless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archive") / "harmless.pt2"
    program = export(Residual(Gated(biases="d")), torch.randn(4, 3, 16), dynamic=({0: Dim("b")},))
    torch.export.save(program, path)
    return path


@pytest.mark.parametrize("name", ["model.pt2", "model.pt", "model.zip", "model"])
def test_repacked_archive_of_any_name_loads(harmless: Path, tmp_path: Path, name: str) -> None:
    """The way that the hostile archives below are written is not what they are refused for."""
    path = tmp_path / name
    path.write_bytes(write_records(read_records(harmless)))
    model = load_model(TracingOptions(path))
    assert (model.path, model.kind) == (path, "torch.export archive")
    assert (model.output_names, model.notes) == (["output"], [])


def test_output_classes_of_transformers_are_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive names the class of its results; pytree knows it once its module is imported."""
    outputs = pytest.importorskip("transformers.modeling_outputs")
    torch.export.save(export(Written(lambda s, x: outputs.BaseModelOutput(x + 1))), tmp_path / "model.pt2")
    imported: list[str] = []
    original = importlib.import_module

    def noted(name: str, *rest: Any) -> Any:
        imported.append(name)
        return original(name, *rest)

    monkeypatch.setattr(importlib, "import_module", noted)
    assert load_model(TracingOptions(tmp_path / "model.pt2")).output_names == ["last_hidden_state"]
    assert "transformers.modeling_outputs" in imported


NESTED = Written(lambda _, batch, scale: {"sum": batch["x"] + batch["rest"][0] * scale, "first": batch["x"]})


class Found(nn.Module):
    """A size known only at run time, a constant, buffers, and a number among the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(6))
        self.register_buffer("transient", torch.ones(6), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        rows = torch.nonzero(x[:, 0] > 0).squeeze(-1)
        return x[rows] + self.kept + self.transient + torch.tensor([1.0]), x.shape[0]


class Cached(nn.Module):
    """Attention with keys and values of earlier calls: minima of products of sizes, quotients, remainders in guards."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.spelling = spelling
        self.projection = nn.Linear(16, 48)

    def forward(self, x: Tensor, past: Any, scale: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.projection(x).split(16, -1))
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        if scale is not None:
            q = q * scale
        batch, heads, tokens = k.shape[:3]
        if self.spelling == "reshape":
            y = (q.reshape(-1, q.shape[2], 8) @ k.reshape(-1, tokens, 8).mT).softmax(-1) @ v.reshape(-1, tokens, 8)
        else:
            y = (q.flatten(0, 1) @ k.flatten(0, 1).mT).softmax(-1) @ v.flatten(0, 1)
        return y.view(batch, heads, -1, 8), k, v


AUTO = {0: Dim.AUTO, 1: Dim.AUTO}
X, PAST = torch.randn(2, 3, 16), [torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)]
TWO_DIMS = ({1: Dim("n", max=64)}, [{2: Dim("t", max=64)}] * 2)
GOOD: dict[str, tuple[nn.Module, tuple[Any, ...], Any]] = {
    # Two inputs share a dimension: torch.export writes a guard into the archive.
    "shared dimension": (
        Written(lambda _, x, mask: (x * mask[..., None]).sum(1)),
        (torch.randn(4, 6, 8), torch.ones(4, 6)),
        (({0: Dim("b"), 1: Dim("s")},) * 2,),
    ),
    "nested inputs": (
        NESTED,
        ({"x": torch.randn(4, 6), "rest": [torch.randn(4, 6)]}, torch.randn(4, 1)),
        (({"x": {0: Dim.AUTO}, "rest": [{0: Dim.AUTO}]}, {0: Dim.AUTO}),),
    ),
    # Sizes computed from sizes: floor divisions and remainders in guards and expressions.
    "divided dimensions": (
        Written(lambda _, x: x.view(x.shape[0] // 2, 2, -1).sum(1)),
        (torch.randn(4, 6, 16),),
        ((AUTO,),),
    ),
    # Floating-point numbers in expressions.
    "scaled dimensions": (
        Written(lambda _, x, y: F.interpolate(torch.cat([x, y])[None, None], scale_factor=1.5)[..., ::2]),
        (torch.randn(4, 6), torch.randn(5, 6)),
        ((AUTO, AUTO),),
    ),
    "sizes known at run time": (Found(), (torch.randn(4, 6),), ({0: Dim("b")},)),
    "past, flattened": (Cached("flatten"), (X, PAST), TWO_DIMS),
    "past, reshaped": (Cached("reshape"), (X, PAST), TWO_DIMS),
    "past, Dim.AUTO": (Cached("reshape"), (X, PAST), (AUTO, [{0: Dim.AUTO, 2: Dim.AUTO}] * 2)),
    "past in a dictionary": (
        Cached("flatten"),
        (X, dict(enumerate(PAST))),
        (TWO_DIMS[0], dict(enumerate(TWO_DIMS[1]))),
    ),
    "derived dimension": (
        Written(lambda _, x, y: x + y.unflatten(0, (-1, 2)).sum(1)),
        (torch.randn(4, 6), torch.randn(8, 6)),
        (({0: Dim("n", max=64)}, {0: 2 * Dim("n", max=64)}),),
    ),
    "no inputs that vary": (nn.Linear(16, 16).bfloat16(), (torch.randn(2, 16).bfloat16(),), None),
}


@pytest.mark.parametrize("case", GOOD)
def test_programs_that_torch_export_writes(case: str, tmp_path: Path) -> None:
    """None of these holds code, so none may need --trust-model."""
    module, inputs, dynamic = GOOD[case]
    path = tmp_path / "model.pt2"
    program = export(module, *inputs, dynamic=dynamic)
    torch.export.save(program, path)
    model = load_model(TracingOptions(path))
    outputs = Runner(model.program)(example_inputs(model.program))
    result = module(*inputs)
    expected = list(result.values()) if isinstance(result, dict) else [result]
    expected = list(result) if isinstance(result, tuple) else expected
    for actual, wanted in zip(outputs, (t for t in expected if isinstance(t, Tensor)), strict=True):
        assert torch.equal(actual, wanted)


def test_keyword_inputs(tmp_path: Path) -> None:
    path, module = tmp_path / "model.pt2", Cached("flatten")
    inputs = {"x": X, "past": PAST, "scale": torch.randn(2, 1, 1, 1)}
    dynamic = {"x": AUTO, "past": [{0: Dim.AUTO, 2: Dim.AUTO}] * 2, "scale": {0: Dim.AUTO}}
    torch.export.save(torch.export.export(module, (), inputs, dynamic_shapes=dynamic), path)
    model = load_model(TracingOptions(path))
    for actual, wanted in zip(Runner(model.program)(example_inputs(model.program)), module(**inputs), strict=True):
        assert torch.equal(actual, wanted)


RETURNED: dict[str, tuple[Callable[[Tensor], Any], list[str], list[str]]] = {
    "None behind": (lambda y: (y, None), ["output_0"], ["output_1"]),
    "None before": (lambda y: (None, y, y + 1), ["output_1", "output_2"], ["output_0"]),
    "numbers": (lambda y: (3, y, 1.5, True), ["output_1"], ["output_0", "output_2", "output_3"]),
    "a size": (lambda y: (y.shape[0], y), ["output_1"], ["output_0"]),
    "a dictionary": (lambda y: {"count": 3, "y": y, "none": None}, ["y"], ["count", "none"]),
    "nested": (lambda y: {"a": (y, None), "b": y + 1}, ["a.0", "b"], ["a.1"]),
    "a tensor twice": (lambda y: (y, None, y), ["output_0", "output_2"], ["output_1"]),
}


@pytest.mark.parametrize("case", RETURNED)
def test_results_that_are_no_tensors(case: str, tmp_path: Path) -> None:
    """Model, ONNX graph and their names agree: without what is not a tensor."""
    change, names, removed = RETURNED[case]
    module = Written(lambda self, x: change(self.ffn(x)), ffn=Gated())
    path, x = tmp_path / "m.pt2", torch.randn(4, 3, 16)
    torch.export.save(export(module, x, dynamic=(({0: Dim("b", max=8)},),)), path)
    model = load_model(TracingOptions(path))
    assert model.output_names == names
    assert model.notes == [f"results of the model that are not tensors are left out of the plan: {', '.join(removed)}"]
    wanted = [leaf for leaf in tree_leaves(module(x)) if isinstance(leaf, Tensor)]
    program = functionalize(model.program)
    assert [node.op for node in program.graph.output_node().args[0]] == ["call_function"] * len(names)
    assert not program.graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int)
    for each in (model.program, program):
        for actual, expected in zip(Runner(each)(example_inputs(each)), wanted, strict=True):
            assert torch.equal(actual, expected)
    if case in ("numbers", "nested"):  # one at the top, one within another: what follows takes names as they are
        summary = translate_to_file(CompileOptions(model=path, backend="none"), tmp_path / "m.onnx", lambda step: None)
        assert model.notes[0] in summary.notes
        assert [value.name for value in onnx.load(tmp_path / "m.onnx").graph.output] == names
        result = check(CheckOptions(path, tmp_path / "m.onnx"), lambda step: None)
        assert ([output.name for output in result.outputs], result.within) == (names, True)


def test_no_tensor_at_all(tmp_path: Path) -> None:
    torch.export.save(export(Written(lambda self, x: (x.shape[0], None)), torch.randn(4, 6)), tmp_path / "m.pt2")
    with pytest.raises(UserError, match=r"m\.pt2: the model returns no tensor; expected one at least"):
        load_model(TracingOptions(tmp_path / "m.pt2"))


def test_a_buffer_that_the_model_writes_stays(tmp_path: Path) -> None:
    """What is left out is told from a buffer's new value, which stands among the outputs of the graph, too."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        calls: Tensor

        def forward(self, x: Tensor) -> tuple[None, Tensor]:
            self.calls += 1
            return None, x * self.calls

    path, x = tmp_path / "m.pt2", torch.randn(4, 6)
    torch.export.save(export(Counting(), x), path)
    model = load_model(TracingOptions(path))
    assert model.output_names == ["output_1"]
    assert list(functionalize(model.program).graph_signature.buffers_to_mutate.values()) == ["calls"]
    assert torch.equal(Runner(model.program)({"x": x})[0], x)


def test_what_the_model_writes_is_not_kept(tmp_path: Path) -> None:
    """A plan has no state: compiling a model with a cache says so, and a check compares calls from anew."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ffn = Gated()
            self.register_buffer("cache", torch.zeros(2, 8, 16))

        def forward(self, x: Tensor, place: Tensor, past: Tensor) -> Tensor:
            self.cache.index_copy_(1, place, x)
            past += 1
            return self.ffn(x) + self.cache.sum(1, keepdim=True) + past

    path, graph = tmp_path / "m.pt2", tmp_path / "m.onnx"
    inputs = torch.randn(2, 1, 16), torch.tensor([3]), torch.randn(2, 1, 16)
    torch.export.save(export(Cached(), *inputs), path)
    summary = translate_to_file(CompileOptions(model=path, backend="none"), graph, lambda step: None)
    told = "the model writes to cache, past; the plan does not, so nothing stays from one call to the next"
    assert summary.warnings == [told]
    result = check(CheckOptions(path, graph), lambda step: None)
    (output,) = result.outputs
    assert isinstance(output, OutputAccuracy)
    assert result.within and output.plain.relative < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("strict", [True, False])
def test_static_cache_of_transformers(tmp_path: Path, strict: bool) -> None:
    """Traced in two ways, its cache is a buffer, or a constant under another name than the buffer's."""
    from transformers import GenerationConfig
    from transformers.integrations.executorch import convert_and_export_with_cache

    model = llama()
    cache = {"batch_size": 1, "max_cache_len": 16}
    model.generation_config = GenerationConfig(use_cache=True, cache_implementation="static", cache_config=cache)
    path, graph = tmp_path / "m.pt2", tmp_path / "m.onnx"
    torch.export.save(convert_and_export_with_cache(model, strict=strict), path)
    summary = translate_to_file(CompileOptions(model=path, backend="none"), graph, lambda step: None)
    assert {layer.decision for layer in summary.layers} == {"twell"}
    (warning,) = summary.warnings
    assert "nothing stays from one call to the next" in warning
    assert check(CheckOptions(path, graph), lambda step: None).within


def test_blocks_within_a_condition_are_not_listed(tmp_path: Path) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, self.ffn, lambda y: y * 2.0, (x,)) + self.other(x)

    module = Written(forward, ffn=Gated(), other=Gated()).to(torch.bfloat16)
    path = tmp_path / "m.pt2"
    torch.export.save(export(module, torch.randn(4, 3, 16, dtype=torch.bfloat16)), path)
    summary = translate_to_file(CompileOptions(model=path, backend="none"), tmp_path / "m.onnx", lambda step: None)
    assert [layer.module for layer in summary.layers] == ["other"]
    assert "blocks within cond stay dense and are not listed" in summary.notes


def pickled_sample_inputs(records: Records, marker: Path) -> Records:
    return records | {SAMPLE_INPUTS: pickled(((Payload(marker),), {}))}


def pickled_weight(records: Records, marker: Path) -> Records:
    name = next(name for name in records if name.endswith("weights/weight_0"))

    def change(config: Json) -> None:
        entry = next(meta for meta in config["config"].values() if meta["path_name"] == "weight_0")
        entry["use_pickle"] = True

    return with_json(records, WEIGHTS, change) | {name: pickled(Payload(marker))}


def code_in_an_expression(records: Records, marker: Path, code: str = "") -> Records:
    code = code or f"__import__('os').mkdir('{marker}')"

    def change(graph: Json) -> None:
        pending: list[Any] = [graph]
        while pending:
            value = pending.pop()
            if isinstance(value, dict):
                if "expr_str" in value:
                    value["expr_str"] = code
                pending += value.values()
            elif isinstance(value, list):
                pending += value

    return with_json(records, GRAPH, change)


def import_through_a_container(records: Records, marker: Path) -> Records:
    module = marker.parent / "twellc_test_payload.py"
    module.write_text(f"import os\nos.mkdir({str(marker)!r})\nclass E: pass\n")
    context = json.dumps({"__enum__": True, "fqn": "twellc_test_payload:E", "name": "x"})
    spec = {"type": "builtins.dict", "context": context, "children_spec": []}

    def change(graph: Json) -> None:
        signature = graph["graph_module"]["module_call_graph"][0]["signature"]
        signature["out_spec"] = json.dumps([1, spec]).replace("__enum__", r"\\u005f_enum__")

    return with_json(records, GRAPH, change)


HOSTILE: dict[str, tuple[Callable[[Records, Path], Records], str]] = {
    "pickled sample inputs": (pickled_sample_inputs, "its sample inputs are pickled objects"),
    "pickled weight": (pickled_weight, "is pickled"),
    "code in an expression": (code_in_an_expression, "its graph holds the expression"),
    "import through a container": (import_through_a_container, "hold objects of other modules"),
    "legacy weights": (
        lambda records, marker: records | {"data/weights/model.pt": pickled({"x": Payload(marker)})},
        "it holds 'data/weights/model.pt'",
    ),
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_hostile_archive(attack: str, harmless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build, reason = HOSTILE[attack]
    path, marker = tmp_path / "model.pt2", tmp_path / "marker"
    path.write_bytes(write_records(build(read_records(harmless), marker)))
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    with pytest.raises(UserError, match="add --trust-model") as refusal:
        load_model(TracingOptions(path))
    assert reason in str(refusal.value)
    assert not marker.exists(), "the payload ran"
    with contextlib.suppress(UserError):  # torch may stumble over what the payload leaves behind
        load_model(TracingOptions(path, trust_model=True))
    assert marker.is_dir(), "the payload does not work: this test shows nothing"


def two_archives_in_one(shown: bytes, hidden: bytes) -> bytes:
    """Return a file in which Python's zipfile sees `shown`, and a reader that trusts the end record sees `hidden`.

    The end record gives position and size of the directory. zipfile takes the size and looks right before the end
    record; torch's reader takes the position. Both archives must have records of the same names.
    """

    def split(archive: bytes) -> tuple[bytes, bytes, bytes]:
        end = archive.rfind(b"PK\5\6")
        size, position = struct.unpack_from("<II", archive, end + 12)
        return archive[:position], archive[position : position + size], archive[end:]

    hidden_files, hidden_directory, end = split(hidden)
    shown_files, directory, _ = split(shown)
    assert len(directory) == len(hidden_directory)
    hidden_files += bytes(len(shown_files))  # zipfile moves all positions by what it takes for a prefix
    start = len(hidden_files) + len(hidden_directory)
    prefix = len(shown_files) + len(directory)
    moved, at = bytearray(directory), 0
    while at < len(moved):
        lengths = struct.unpack_from("<HHH", moved, at + 28)
        struct.pack_into("<I", moved, at + 42, struct.unpack_from("<I", moved, at + 42)[0] + start - prefix)
        at += 46 + sum(lengths)
    ending = bytearray(end)
    struct.pack_into("<I", ending, 16, len(hidden_files))
    return hidden_files + hidden_directory + shown_files + bytes(moved) + bytes(ending)


def test_archive_that_shows_other_records_to_other_readers(harmless: Path, tmp_path: Path) -> None:
    path, marker = tmp_path / "model.pt2", tmp_path / "marker"
    records = read_records(harmless)
    path.write_bytes(two_archives_in_one(write_records(records), write_records(pickled_sample_inputs(records, marker))))
    assert read_records(path) == records, "zipfile must see the harmless archive"
    with pytest.raises(UserError, match="its sample inputs are pickled objects"):
        load_model(TracingOptions(path))
    assert not marker.exists()
    with contextlib.suppress(UserError):
        load_model(TracingOptions(path, trust_model=True))
    assert marker.is_dir(), "torch must see the hostile archive"


def test_older_format_behind_a_broken_archive(harmless: Path, tmp_path: Path) -> None:
    """Where an archive cannot be read, torch.export.load goes on to older formats, in which all weights are pickles."""
    path, marker = tmp_path / "model.pt2", tmp_path / "marker"
    records = read_records(harmless)
    version = json.loads(records[GRAPH])["schema_version"]
    older = {
        "version": f"{version['major']}.{version['minor']}".encode(),
        "serialized_exported_program.json": records[GRAPH],
        **{f"serialized_{part}.pt": pickled(Payload(marker)) for part in ("state_dict", "constants", "example_inputs")},
        **{f"m/{name}": records[name] for name in ("archive_format", "archive_version")},
    }
    broken = bytearray(write_records(records))
    header = broken.index(b"m/data/weights/weight_0") - 30  # the file's own header, which ends with its name
    broken[header : header + 4] = bytes(4)

    def older_archive(padding: int) -> bytes:
        return write_records(older | {"extra_files/" + "x" * padding: b""}, folder="")

    def directory_size(archive: bytes) -> int:
        return int(struct.unpack_from("<I", archive, archive.rfind(b"PK\5\6") + 12)[0])

    padding = directory_size(bytes(broken)) - directory_size(older_archive(0))
    path.write_bytes(two_archives_in_one(older_archive(padding), bytes(broken)))
    with pytest.raises(UserError, match="cannot load the archive"):
        load_model(TracingOptions(path))
    assert not marker.exists(), "the payload ran"
    with contextlib.suppress(Exception):
        torch.export.load(path)
    assert marker.is_dir(), "the payload does not work: this test shows nothing"


def test_extra_records(harmless: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    names = "data/aotinductor/model/x.so", "extra/notes.txt", "data/constants/custom_obj_0", "DATA/weights/weight_0"
    for name in names:
        path.write_bytes(write_records(read_records(harmless) | {name: b"x"}))
        with pytest.raises(UserError, match="could execute code"):
            load_model(TracingOptions(path))


def test_foreign_operators(harmless: Path, tmp_path: Path) -> None:
    def change(graph: Json) -> None:
        graph["graph_module"]["graph"]["nodes"][0]["target"] = "builtins.eval"

    path = tmp_path / "model.pt2"
    path.write_bytes(write_records(with_json(read_records(harmless), GRAPH, change)))
    with pytest.raises(UserError, match=r"its graph calls 'builtins\.eval'"):
        load_model(TracingOptions(path))


@pytest.mark.parametrize("damage", ["graph", "weights", "missing graph", "missing weight", "json", "version"])
def test_damaged_archive_is_a_user_error(damage: str, harmless: Path, tmp_path: Path) -> None:
    records = read_records(harmless)
    records |= {
        "graph": {GRAPH: records[GRAPH][:100]},
        "weights": {WEIGHTS: b"{}"},
        "json": {GRAPH: b"[1, 2]"},
        "version": {"archive_version": b"99"},
    }.get(damage, {})
    if damage.startswith("missing"):
        del records[GRAPH if damage == "missing graph" else "data/weights/weight_0"]
    path = tmp_path / "model.pt2"
    path.write_bytes(write_records(records))
    with pytest.raises(UserError, match=r"model\.pt2"):
        load_model(TracingOptions(path))


def test_graph_that_does_not_fit_together(harmless: Path, tmp_path: Path) -> None:
    """It loads; nothing looks at its shapes before it is traced again."""
    records = read_records(harmless)
    graph = json.loads(records[GRAPH])
    node = next(node for node in graph["graph_module"]["graph"]["nodes"] if "aten.linear" in node["target"])
    weight = next(each["arg"]["as_tensor"] for each in node["inputs"] if each["name"] == "weight")
    weight["name"] = weight["name"].replace("gate", "down")
    path = tmp_path / "model.pt2"
    path.write_bytes(write_records(records | {GRAPH: json.dumps(graph).encode()}))
    model = load_model(TracingOptions(path))
    with pytest.raises(UserError, match=r"the model's graph: torch .* cannot run it on shapes .*Export the model"):
        canonicalize(model.program)


@pytest.mark.parametrize("trust_model", [False, True])
def test_flipped_weight_is_noticed(harmless: Path, tmp_path: Path, trust_model: bool) -> None:
    """Torch reads records without a look at their checksums."""
    content, path = bytearray(harmless.read_bytes()), tmp_path / "model.pt2"
    content[content.index(read_records(harmless)["data/weights/weight_0"])] ^= 1
    path.write_bytes(content)
    assert torch.export.load(path), "torch notices by itself: the check is not needed"
    with pytest.raises(UserError, match=r"data/weights/weight_0' does not have its checksum\. Copy it again"):
        load_model(TracingOptions(path, trust_model=trust_model))


def test_the_only_program_of_an_archive(tmp_path: Path) -> None:
    program = torch.export.export(Residual(Gated()).eval(), (torch.randn(2, 3, 16),))
    package_pt2(tmp_path / "net.pt2", exported_programs={"net": program})
    model = load_model(TracingOptions(tmp_path / "net.pt2"))
    assert model.notes == ["the program of the archive is called 'net'"]
    inputs = example_inputs(program)
    torch.testing.assert_close(Runner(model.program)(inputs), Runner(program)(inputs))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["encoder", "decoder"], r"does not hold one program; got 'decoder', 'encoder'; expected one, or .* 'model'\."),
        (["model", "draft"], ""),
    ],
)
def test_several_programs(names: list[str], message: str, tmp_path: Path) -> None:
    """One that is called `model` is taken, whatever lies beside it."""
    programs = {
        name: torch.export.export(nn.Linear(4, 4 + index), (torch.ones(2, 4),)) for index, name in enumerate(names)
    }
    package_pt2(tmp_path / "two.pt2", exported_programs=programs)
    if message:
        with pytest.raises(UserError, match=message):
            load_model(TracingOptions(tmp_path / "two.pt2"))
    else:
        model = load_model(TracingOptions(tmp_path / "two.pt2"))
        assert model.notes == ["other programs of the archive are left out: draft"]
        assert Runner(model.program)({"input": torch.ones(2, 4)})[0].shape == (2, 4)


def on_a_gpu(value: Any) -> Any:
    """Return an archive's JSON as it would be of a model on a GPU."""
    if isinstance(value, dict):
        if value.get("type") == "cpu" and "index" in value:
            return {"type": "cuda", "index": 0}
        return {key: on_a_gpu(each) for key, each in value.items()}
    return [on_a_gpu(each) for each in value] if isinstance(value, list) else value


def test_an_archive_from_a_gpu_is_loaded_on_the_cpu(tmp_path: Path) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.down(torch.relu(self.up(x.to(torch.float32))))
        return y + torch.zeros(16, device=x.device) + torch.tensor([2.0]).to(x.device)

    model, x = Written(forward, up=nn.Linear(16, 64), down=nn.Linear(64, 16)).eval(), torch.randn(4, 16)
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "cpu.pt2")
    with zipfile.ZipFile(tmp_path / "cpu.pt2") as source, zipfile.ZipFile(tmp_path / "cuda.pt2", "w") as target:
        for name in source.namelist():
            data = source.read(name)
            target.writestr(name, json.dumps(on_a_gpu(json.loads(data))) if name.endswith(".json") else data)
    with zipfile.ZipFile(tmp_path / "cuda.pt2") as archive:
        assert any(b'"cuda"' in archive.read(name) for name in archive.namelist()), "the test moves nothing"
    before = torch.load
    program = load_model(TracingOptions(tmp_path / "cuda.pt2")).program
    assert torch.load is before
    assert {tensor.device.type for tensor in program.state_dict.values()} == {"cpu"}
    assert torch.equal(program.module()(x), model(x))


def test_an_operator_of_another_package_is_named(tmp_path: Path) -> None:
    library = torch.library.Library("fieldtest", "DEF")
    library.define("squared(Tensor x) -> Tensor")
    library.impl("squared", lambda x: x**2, "CompositeExplicitAutograd")
    library.impl("squared", torch.empty_like, "Meta")

    program = export(Written(lambda _, x: torch.ops.fieldtest.squared(x)), torch.randn(4))
    torch.export.save(program, tmp_path / "m.pt2")
    library._destroy()
    expected = r"torch\.ops\.fieldtest\.squared is not registered: its package must be imported\. Add --import MODULE"
    with pytest.raises(UserError, match=expected) as raised:
        load_model(TracingOptions(tmp_path / "m.pt2"))
    again = pickle.loads(pickle.dumps(raised.value))
    assert again.operators == ["fieldtest.squared"] and str(again) == str(raised.value)
