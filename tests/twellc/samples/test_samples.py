"""Inputs for `twellc check` that are given: arrays and text."""

import io
import json
import math
import pickle
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import sympy
import torch

import twellc
from tests.conftest import Cli
from tests.models import Gated, Written, export
from tests.twellc.checks.runs import graph_of
from twellc.base.errors import UserError
from twellc.commands.check import print_accuracy
from twellc.export.shapes import Shape, ShapeProfile, ShapeRange
from twellc.passes.sizes.inputs import InputSpec, ModelInputs
from twellc.samples.samples import Limits, draw_samples, read_arrays, read_text

BATCH, HALF = (sympy.Symbol(name, positive=True, integer=True) for name in ("batch", "half"))
SPECS = {
    "x": InputSpec("x", torch.bfloat16, (BATCH, 3)),
    "scale": InputSpec("scale", torch.float16, (BATCH,)),
    "input_ids": InputSpec("input_ids", torch.int64, (BATCH, 2 * HALF)),
    "mask": InputSpec("mask", torch.bool, (2 * HALF,)),
    "position": InputSpec("position", torch.int32, ()),
}
INPUTS = ModelInputs(list(SPECS.values()), {"batch": (1, 64)}, {"batch": 2, "half": 2})


def arrays(**changes: Any) -> dict[str, Any]:
    good = {
        "x": np.linspace(-1, 1, 6).reshape(2, 3),
        "scale": np.ones(2, np.float32),
        "input_ids": np.array([[0, 9, 3, 1], [2, 2, 0, 5]], np.uint8),
        "mask": np.array([True, False, True, True]),
        "position": np.array(-7),
    }
    return {name: array for name, array in (good | changes).items() if array is not None}


def read(folder: Path, found: dict[str, Any], profile: ShapeProfile | None = None) -> dict[str, torch.Tensor]:
    np.savez(folder / "given.npz", **found)
    return read_arrays(folder / "given.npz", Limits(INPUTS, profile, token_ids=10))


def test_arrays_become_inputs(tmp_path: Path) -> None:
    sample = read(tmp_path, arrays())
    assert {name: tensor.dtype for name, tensor in sample.items()} == {name: s.dtype for name, s in SPECS.items()}
    assert torch.equal(sample["x"], torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3).bfloat16())
    assert sample["input_ids"].tolist() == [[0, 9, 3, 1], [2, 2, 0, 5]]
    assert sample["mask"].tolist() == [True, False, True, True]
    assert (sample["position"].item(), tuple(sample["position"].shape)) == (-7, ())


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.dtype(">f4"), ml_dtypes.bfloat16])
def test_every_float_is_taken_nan_and_infinity_too(tmp_path: Path, dtype: Any) -> None:
    x = np.array([[np.nan, np.inf, -np.inf], [0.5, -2.0, 3.0]]).astype(dtype)
    sample = read(tmp_path, arrays(x=x))
    expected = torch.tensor([[math.nan, math.inf, -math.inf], [0.5, -2.0, 3.0]])
    assert sample["x"].dtype == torch.bfloat16
    torch.testing.assert_close(sample["x"].float(), expected, equal_nan=True, rtol=0, atol=0)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a name is missing": ({"x": None}, "has no array x; got input_ids, mask, position, scale; expected"),
    "a name is too many": ({"y": np.zeros(2)}, "has an array y, which is not an input"),
    "integers for floats": ({"x": np.zeros((2, 3), int)}, r"array x: has another dtype .*got int64; expected bfloat16"),
    "floats for integers": ({"input_ids": np.zeros((2, 4))}, "array input_ids: has another dtype .*got float64"),
    "integers for bool": ({"mask": np.ones(4, int)}, "array mask: has another dtype .*got int64; expected bool"),
    "text": ({"x": np.array([["a", "b", "c"]] * 2)}, "array x: has another dtype .*got <U1"),
    "complex numbers": ({"x": np.zeros((2, 3), complex)}, "array x: has another dtype"),
    "objects": ({"x": np.array([[1, "a", None]] * 2, object)}, "cannot be read as an .npz file .*allow_pickle=False"),
    "overflow of float16": ({"scale": np.array([1.0, 1e5])}, r"array scale: .* overflow float16; got 1e\+05"),
    "overflow of int32": ({"position": np.array(2**31)}, "array position: has values out of range; got 2147483648"),
    "a huge unsigned integer": ({"position": np.array(2**63, np.uint64)}, "array position: has values out of range"),
    "an unknown token": ({"input_ids": np.array([[0, 10]] * 2)}, "array input_ids: .* out of range; got 0 to 10"),
    "a negative token": ({"input_ids": np.array([[0, -1]] * 2)}, "got -1 to 0; expected 0 to 9"),
    "another rank": ({"x": np.zeros(3)}, r"array x: has 1 dimensions; got 3; expected 2 \(1 to 64 x 3\)"),
    "a fixed size": ({"x": np.zeros((2, 4))}, "another size of dimension 1; got 2x4; expected 1 to 64 x 3"),
    "an empty dimension": ({"x": np.zeros((0, 3))}, "array x: dimension 0 leaves what the model can take; got 0x3"),
    "too large": ({"x": np.zeros((65, 3))}, r"array x: dimension 0 leaves .*got 65x3; expected 1 to 64"),
    "shared dimensions differ": ({"scale": np.zeros(3)}, "array scale: dimension 0 contradicts x, which shares it"),
    "a multiple of a shared dimension": ({"mask": np.ones(6, bool)}, "array mask: .* input_ids, which.*expected 4"),
    "no multiple": ({"input_ids": np.zeros((2, 3), int)}, r"got 2x3; expected from 2, of the form 2\*n"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_arrays(tmp_path: Path, case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(UserError, match=message) as caught:
        read(tmp_path, arrays(**changes))
    assert str(caught.value).startswith(f"--arrays {tmp_path / 'given.npz'}")


def test_arrays_keep_to_the_profile(tmp_path: Path) -> None:
    shapes: dict[str, Shape] = {"x": (2, 3), "scale": (2,), "input_ids": (2, 4), "mask": (4,), "position": ()}
    profile = {name: ShapeRange(shape, shape, shape) for name, shape in shapes.items()}
    read(tmp_path, arrays(), profile)
    with pytest.raises(
        UserError, match="leaves what the plan's profile and the model can take; got 1x3; expected 2 to 2"
    ):
        read(tmp_path, arrays(x=np.zeros((1, 3)), scale=np.zeros(1), input_ids=np.zeros((1, 4), int)), profile)


def test_random_samples_of_a_sum_of_symbols() -> None:
    """Each symbol keeps to its own bounds."""
    first, second = (sympy.Symbol(name, positive=True, integer=True) for name in ("first", "second"))
    specs = [InputSpec("x", torch.float32, (first + second,)), InputSpec("y", torch.float32, (first, second))]
    bounds = {"first": (2, 5), "second": (7, 9)}
    inputs = ModelInputs(specs, bounds, {"first": 3, "second": 8})
    samples = draw_samples(Limits(inputs, None, None), {}, seed=0)
    assert [tuple(sample["y"].shape) for sample in samples] == [(2, 7), (3, 8), (5, 9)]
    assert [tuple(sample["x"].shape) for sample in samples] == [(9,), (11,), (14,)]


class Payload:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("pickle-ran"),))


def test_files_that_are_no_npz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    whole = io.BytesIO()
    np.savez(whole, **arrays())
    single, pickled = io.BytesIO(), io.BytesIO()
    np.save(single, np.zeros(3))
    np.savez(pickled, x=np.array([Payload()], object))
    contents = {
        "empty": (b"", "cannot be read as an .npz file"),
        "text": (b"hello", "cannot be read as an .npz file"),
        "truncated": (whole.getvalue()[:-40], "cannot be read as an .npz file"),
        "single": (single.getvalue(), "is a single array"),
        "pickle": (pickle.dumps(Payload()), "cannot be read as an .npz file"),
        "pickles inside": (pickled.getvalue(), "pickled objects are never loaded"),
    }
    damaged = bytearray(whole.getvalue())
    damaged[damaged.index(b"descr") + 12] ^= 0xFF
    contents["damaged"] = (bytes(damaged), "cannot be read as an .npz file")
    for name, (content, message) in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=message):
            read_arrays(tmp_path / name, Limits(INPUTS, None, None))
    for path, message in ((tmp_path / "missing", "there is no such file"), (tmp_path, "is a folder")):
        with pytest.raises(UserError, match=message):
            read_arrays(path, Limits(INPUTS, None, None))
    assert not (tmp_path / "pickle-ran").exists()


def text_limits(vocabulary: int | None, shortest: int = 1, longest: int = 1024, rows: int = 1) -> Limits:
    sequence = sympy.Symbol("sequence", positive=True, integer=True)
    specs = [InputSpec(name, torch.int64, (BATCH, sequence)) for name in ("input_ids", "attention_mask")]
    inputs = ModelInputs(specs, {"batch": (1, 64), "sequence": (1, 1024)}, {})
    shapes = ShapeRange((rows, shortest), (8, longest), (8, longest))
    return Limits(inputs, {spec.name: shapes for spec in specs}, vocabulary)


def test_bytes(bytelm: Path, tmp_path: Path) -> None:
    """A model of 256 token ids without a tokenizer; windows keep to the profile, and nothing is lost."""
    content = ("def f(ä):\r\n    return 1\n" * 20).encode()
    (tmp_path / "t.py").write_bytes(content)
    for longest in (512, 100):
        text = read_text(tmp_path / "t.py", bytelm, True, text_limits(256, longest=longest))
        joined = torch.cat([sample["input_ids"][0] for sample in text.samples])
        assert joined.tolist() == [0, *content]
        assert [sample["input_ids"].shape[1] for sample in text.samples[:-1]] == [longest] * (len(text.samples) - 1)
        assert all(torch.equal(s["attention_mask"], torch.ones_like(s["input_ids"])) for s in text.samples)
        assert text.notes == [
            "the model has 256 token ids and no tokenizer: the text is read as bytes, behind the token 0"
        ]
        assert text.predicts_next


def test_models_without_a_mask(bytelm: Path, tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"x" * 99)
    limits = text_limits(256)
    limits.inputs.specs.pop()
    (sample,) = read_text(tmp_path / "t", bytelm, True, limits).samples
    assert list(sample) == ["input_ids"]


def test_a_window_below_the_profile_is_left_out(bytelm: Path, tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"x" * 99)
    text = read_text(tmp_path / "t", bytelm, True, text_limits(256, shortest=40, longest=40))
    assert [sample["input_ids"].shape[1] for sample in text.samples] == [40, 40]
    assert "the last 20 tokens of t are too few for the plan's profile" in text.notes


@pytest.fixture(scope="module")
def with_tokenizer(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tokenizers
    import transformers

    folder = tmp_path_factory.mktemp("models") / "words"
    shutil.copytree(llama, folder)
    words = {"<s>": 1, "the": 2, "cat": 3, "sat": 4, "<unk>": 0}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>").save_pretrained(folder)
    return folder


def test_tokenizer_of_the_folder(with_tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "t").write_text("the cat sat\nthe dog sat")
    text = read_text(tmp_path / "t", with_tokenizer, True, text_limits(96))
    assert [sample["input_ids"].tolist() for sample in text.samples] == [[[1, 2, 3, 4, 2, 0, 4]]]
    assert (text.notes, text.predicts_next) == ([], True)
    with pytest.raises(UserError, match="its tokenizer is of another model; got the token id 4; expected less than 4"):
        read_text(tmp_path / "t", with_tokenizer, True, text_limits(4))


def test_tokenizers_that_do_not_load(with_tokenizer: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(with_tokenizer, folder)
    (tmp_path / "t").write_text("the cat")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"transformers cannot load the tokenizer .*an \.npz file holds them"):
        read_text(tmp_path / "t", folder, True, text_limits(96))


def test_code_of_a_tokenizer_does_not_run(with_tokenizer: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(with_tokenizer, folder)
    (tmp_path / "t").write_text("the cat")
    proof = tmp_path / "code-ran"
    (folder / "evil.py").write_text(f"open({str(proof)!r}, 'w')\nclass Evil:\n    pass\n")
    for name in ("tokenizer_config.json", "config.json"):
        config = json.loads((folder / name).read_text())
        config |= {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"}
        (folder / name).write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"needs remote code \(auto_map\)"):
        read_text(tmp_path / "t", folder, True, text_limits(96))
    assert not proof.exists()


def test_refused_texts(bytelm: Path, llama: Path, tmp_path: Path) -> None:
    def refused(content: bytes | None, model: Path, message: str, limits: Limits, language_model: bool = True) -> None:
        path = tmp_path / "t.txt"
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(UserError, match=message):
            read_text(path, model, language_model, limits)

    limits = text_limits(256)
    refused(None, bytelm, "there is no such file", limits)
    refused(b"", bytelm, "the file is empty", limits)
    refused(b"ab\xff", bytelm, "is not UTF-8 at byte 2", limits)
    refused(b"a", llama, "has no tokenizer; expected tokenizer.json. Put the files of", text_limits(96))
    refused(b"a", bytelm, "needs a language model in a Hugging Face directory", limits, language_model=False)
    refused(b"a", tmp_path / "m.onnx", "needs a language model in a Hugging Face directory", text_limits(None))
    refused(b"a", bytelm, "its input mask is not a text", Limits(INPUTS, None, 256))
    refused(
        b"abc", bytelm, "does not fit into the plan's profile; got 1x4 tokens; expected from 1x5", text_limits(256, 5)
    )
    refused(b"abc", bytelm, "expected from 2x1", text_limits(256, rows=2))


@pytest.mark.slow
def test_check_on_text(bytelm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The likelihood of real text, against transformers' own loss in float64; and the density of a trained model."""
    import transformers

    content = Path(shutil.__file__).read_bytes()[:700]
    (tmp_path / "shutil.py").write_bytes(content)
    result = twellc.check(bytelm, graph_of(bytelm, tmp_path / "bytelm.onnx"), text=tmp_path / "shutil.py")
    found: Any = result.to_json()
    assert result.within and found["inputs"] == "shutil.py: 701 tokens in 2 windows"
    model = transformers.AutoModelForCausalLM.from_pretrained(bytelm, dtype=torch.float64)
    ids, total = torch.tensor([[0, *content]]), 0.0
    for window in (ids[:, :512], ids[:, 512:]):
        with torch.no_grad():
            total += float(model(input_ids=window, labels=window).loss) * (window.shape[1] - 1)
    text = found["text"]
    assert text["tokens"] == 699
    assert text["truth_bits"] == pytest.approx(total / 699 / math.log(2), rel=1e-6)
    assert text["candidate_bits"] == pytest.approx(text["truth_bits"], rel=0.01)
    assert text["candidate_bits"] != text["plain_bits"] != text["truth_bits"]
    assert text["truth_bits"] < 3, "it was trained on such text"
    densities = [block["density"] for block in found["blocks"]]
    assert 0.005 < min(densities) < max(densities) < 0.15, "random bytes make it denser"
    print_accuracy(result)
    shown = capsys.readouterr().out
    assert "Note: the model has 256 token ids and no tokenizer" in shown
    assert f"699 tokens of text predicted: {text['candidate_bits']:.4f} bits a token" in shown
    assert f"perplexity {2 ** text['candidate_bits']:.4f}" in shown
    assert "gate density on these inputs" in shown


def test_check_on_arrays(cli: Cli, archive: Path, tmp_path: Path) -> None:
    plan, graph, given = tmp_path / "m.plan", tmp_path / "m.onnx", tmp_path / "x.npz"
    profile = ["--optimization-profile", "x:1x3x16:2x3x16:4x3x16"]
    assert cli("compile", archive, "-o", plan, "--onnx", graph, *profile).exit_code == 0
    x = np.random.default_rng(0).normal(size=(3, 3, 16)).astype(np.float32)
    x[1, 2, 5] = np.nan
    np.savez(given, x=x)
    results = [cli("check", archive, candidate, "--arrays", given, "--json") for candidate in (plan, graph, graph)]
    assert [result.exit_code for result in results] == [0, 0, 0], results[0].output
    _, first, again = (json.loads(result.stdout) for result in results)
    assert first["inputs"] == "the arrays in x.npz" and first == again, "nothing is random"
    np.savez(given, x=np.zeros((5, 3, 16)))
    assert cli("check", archive, graph, "--arrays", given).exit_code == 0
    result = cli("check", archive, plan, "--arrays", given)
    assert result.exit_code == 2
    assert "leaves what the plan's profile and the model can take; got 5x3x16; expected 1 to 4" in result.stderr


@pytest.mark.parametrize("options", [("--arrays", "--text"), ("--arrays", "--seed"), ("--text", "--seed")])
def test_check_takes_inputs_of_one_kind(cli: Cli, archive: Path, options: tuple[str, str]) -> None:
    result = cli("check", archive, archive, *(word for option in options for word in (option, 0)))
    assert result.exit_code == 2
    assert f"{options[0]}: the inputs are given twice; got {options[1]}, too" in result.stderr


def test_values_that_the_model_cannot_take(cli: Cli, tmp_path: Path) -> None:
    model, given = tmp_path / "m.pt2", tmp_path / "given.npz"
    # It reads rows of a table, from which nothing says how many there are.
    table = Written(lambda m, index: m.mlp(m.table(index)), table=torch.nn.Embedding(7, 16), mlp=Gated())
    torch.export.save(export(table.bfloat16(), torch.tensor([0, 6, 3])), model)
    assert cli("compile", model, "--backend", "none", "--onnx", tmp_path / "m.onnx").exit_code == 0
    np.savez(given, inputs_0=np.array([6, 5, 0]))
    assert cli("check", model, tmp_path / "m.onnx", "--arrays", given).exit_code == 0
    np.savez(given, inputs_0=np.array([0, 7, 3]))
    result = cli("check", model, tmp_path / "m.onnx", "--arrays", given)
    assert result.exit_code == 2
    assert result.stderr.count("Error: ") == 1
    assert "cannot be evaluated with inputs_0 (3,)" in result.stderr
    # Where the candidate does not mind, the model does.
    rows = onnx.helper.make_tensor("table", onnx.TensorProto.BFLOAT16, [100, 16], [0.0] * 1600)
    node = onnx.helper.make_node("Gather", ["table", "inputs_0"], ["y"])
    inputs = [onnx.helper.make_tensor_value_info("inputs_0", onnx.TensorProto.INT64, [3])]
    outputs = [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.BFLOAT16, [3, 16])]
    graph = onnx.helper.make_graph([node], "g", inputs, outputs, [rows])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)]), tmp_path / "other.onnx")
    result = cli("check", model, tmp_path / "other.onnx", "--arrays", given)
    assert result.exit_code == 2
    assert f"--arrays {given}: the model fails on these inputs (index out of range" in result.stderr
