"""`twellc profile`: counts against a plain run of the model, data of each kind, padding, and what is refused."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import twellc
from tests import models
from tests.conftest import Cli
from tests.models import Gated, Residual, Written, export
from tests.twellc.test_cli import failed, files_in
from twellc.base.dtypes import torch_dtype
from twellc.firing.measure import ProgramObserver
from twellc.passes.block_profile import BlockProfile
from twellc.passes.match.find_ffn import find_ffn_blocks
from twellc.plugins.library import TILE

TEXT = "".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(60))
BERT = {"intermediate_size": 96, "hidden_act": "relu", "max_position_embeddings": 32, "pad_token_id": 0}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny encoder with a mask and blocks without a gate."""
    make = models.family("Bert", "ForMaskedLM", **models.SMALL, **BERT)
    return models.save(make(), tmp_path_factory.mktemp("models") / "bert")


def gates(folder: Path, rows: list[list[int]], module: str) -> list[torch.Tensor]:
    """Return, for each row of token ids, what the activations [tokens, d_ff] called `module` give in transformers."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    seen: list[torch.Tensor] = []
    hook = model.get_submodule(module).register_forward_hook(lambda *call: seen.append(call[-1][0]))
    with torch.no_grad():
        for row in rows:
            model(torch.tensor([row]))
    hook.remove()
    return seen


def assert_counts(block: BlockProfile, activations: list[torch.Tensor]) -> None:
    """Compare all counts of a block with activations [tokens, d_ff] of each sequence."""
    fired = torch.cat(activations) != 0
    assert block.firing.tolist() == fired.sum(0).tolist()
    per_token = fired.sum(1)
    assert block.rows.tolist() == torch.bincount(per_token, minlength=block.d_ff + 1).tolist()
    tiles = torch.cat([part.sum(1) for part in fired.split(TILE, 1)])
    assert block.tiles.tolist() == torch.bincount(tiles, minlength=TILE + 1).tolist()
    assert (block.tokens, block.nonzeros) == (len(fired), int(fired.sum()))
    positions = [position for each in activations for position in range(len(each))]
    for first, last, density in block.density_by_position():
        inside = torch.tensor([first <= position <= last for position in positions])
        assert density == pytest.approx(fired[inside].float().mean().item())
    assert block.positions.sum(0).tolist() == [block.tokens, block.nonzeros]


def test_counts_of_the_trained_model(bytelm: Path, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(TEXT)
    profile = twellc.profile(bytelm, tmp_path / "a.py", tmp_path / "p", sequence=128, batch=3, device="cpu")
    ids = list(TEXT.encode())
    rows = [[0, *ids[start : start + 127]] for start in range(0, len(ids), 127)]
    assert [(each.name, each.kind, each.sequences, each.tokens) for each in profile.data] == [
        ("a.py", "text", len(rows), sum(map(len, rows)))
    ]
    for layer in range(4):
        block = profile.blocks[f"model.layers.{layer}.mlp"]
        activations = gates(bytelm, rows, f"model.layers.{layer}.mlp.act_fn")
        # Runs of several rows, with padding or not, may round a value at the edge of zero the other way.
        fired = torch.cat(activations) != 0
        assert block.tokens == len(fired) and block.d_ff == 1024
        assert np.abs(block.firing - fired.sum(0).numpy()).sum() <= 0.002 * block.nonzeros
    assert (profile.blocks["model.layers.2.mlp"].never.sum()) > 100


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_counts_are_those_of_the_model(request: pytest.FixtureRequest, tmp_path: Path, name: str) -> None:
    """Row by row every count is the same as in transformers."""
    folder = request.getfixturevalue(name)
    rows = torch.randint(3, 90, (5, 12)).tolist()
    np.save(tmp_path / "ids.npy", np.array(rows))
    profile = twellc.profile(folder, tmp_path / "ids.npy", batch=1, device="cpu")
    module = {"llama": "model.layers.1.mlp.act_fn", "opt": "model.decoder.layers.1.activation_fn"}[name]
    block = profile.blocks[{"llama": "model.layers.1.mlp", "opt": "model.decoder.layers.1"}[name]]
    if name == "llama":
        assert_counts(block, gates(folder, rows, module))
    assert (profile.model.dtype, block.variant) == ("bf16", {"llama": "gated", "opt": "plain"}[name])
    places = [(0, 0), (1, 1), (2, 3), (4, 7), (8, 15)]
    assert block.tokens == 60 and [each[:2] for each in block.density_by_position()] == places


ATTENTION: dict[str, Any] = {"layers_block_type": ["attention", "moe"], "num_hidden_layers": 2}
EXPERTS = {
    "plain": lambda: models.nemotron_h(layers_block_type=["attention", "moe"], num_hidden_layers=2),
    "mamba": lambda: models.nemotron_h(),
    "latent": lambda: models.nemotron_h(
        layers_block_type=["attention", "moe"], num_hidden_layers=2, moe_latent_size=16
    ),
    "gated": lambda: models.mixtral(),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.sampled(4)
def test_each_expert_is_counted_without_padding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    """Counts are those of a loop over tokens and their experts; weights that are read by layer give equal ones."""
    model = EXPERTS[name]()
    folder = models.save(model, tmp_path / "model", dtype)
    rows = [torch.randint(3, 90, (length,)).tolist() for length in (9, 2, 17, 5)]
    data = lines(tmp_path / "ids.jsonl", [{"input_ids": row} for row in rows])
    profile = twellc.profile(folder, data, device="cpu", batch=4)
    assert torch_dtype(profile.model.dtype) is dtype and not profile.notes
    assert profile.tokens == sum(map(len, rows))
    path, experts = next((p, m) for p, m in model.named_modules() if type(m).__name__.endswith("Experts"))
    expected, fired = torch.zeros(experts.num_experts, 2, dtype=torch.int64), []

    def count(_: nn.Module, arguments: tuple[torch.Tensor, ...], __: torch.Tensor) -> None:
        x, ids = arguments[:2]
        for token, expert in ((place, int(number)) for place, row in enumerate(ids) for number in row):
            z = x[token] @ (experts.gate_up_proj if experts.has_gate else experts.up_proj)[expert].t()
            on = (z.chunk(2)[0] if experts.has_gate else z) > 0
            expected[expert] += torch.tensor([1, int(on.sum())])
            fired.append(on)

    experts.register_forward_hook(count)
    with torch.no_grad():
        for row in rows:
            model(torch.tensor([row]), use_cache=False)
    block = profile.blocks[path]
    assert (block.tokens, block.variant) == (2 * sum(map(len, rows)), "gated" if experts.has_gate else "plain")
    assert block.experts is not None and block.experts[:, 0].tolist() == expected[:, 0].tolist()
    # What is near zero may be rounded the other way.
    assert np.abs(block.experts[:, 1] - expected[:, 1].numpy()).sum() <= 0.02 * block.nonzeros
    assert np.abs(block.firing - torch.stack(fired).sum(0).numpy()).sum() <= 0.02 * block.nonzeros
    assert block.positions[:, 0].sum() == block.tokens and block.experts[:, 1].sum() == block.nonzeros

    monkeypatch.setattr("twellc.loaders.modules._free_memory", lambda device: 0)
    streamed = twellc.profile(folder, data, device="cpu", batch=4)
    assert "each layer's are read in each run" in " ".join(streamed.notes)
    for module, each in profile.blocks.items():
        other = streamed.blocks[module]
        assert all((getattr(each, array) == getattr(other, array)).all() for array in ("firing", "rows", "positions"))
    assert (streamed.blocks[path].experts == block.experts).all()


def test_profile_of_experts_as_file_table_and_sum(cli: Cli, tmp_path: Path) -> None:
    folder = models.save(EXPERTS["plain"](), tmp_path / "model", torch.float32)
    np.savez(tmp_path / "ids.npz", input_ids=torch.randint(3, 90, (2, 9)).numpy())
    output = tmp_path / "p.profile"
    run = cli("profile", folder, "--data", tmp_path / "ids.npz", "-o", output, "--device", "cpu")
    assert run.exit_code == 0, run.output
    assert "model.layers.1.mixer.experts" in run.stdout and "0 of 4" in run.stdout
    profile = twellc.FiringProfile.read(output)
    block = profile.blocks["model.layers.1.mixer.experts"]
    statistics: Any = profile.to_json()["blocks"]
    found = next(each for each in statistics if each["module"] == block.module)["experts"]
    assert block.experts is not None and found["tokens"] == block.experts[:, 0].tolist()
    assert found["density"] == pytest.approx((block.experts[:, 1] / block.experts[:, 0] / block.d_ff).tolist())
    # One token is sent to each expert with the share s: rows of up s, of down s a.
    share = block.experts[:, 0] / profile.data[0].tokens
    rows = share * np.array(found["density"])
    assert found["gain_by_bytes"]["1"] == pytest.approx(2 * share.sum() / (share + rows).sum())
    assert sorted(found["gain_by_bytes"].values(), reverse=True) == list(found["gain_by_bytes"].values())
    both = profile.merged(profile).blocks[block.module]
    assert both.experts is not None and (both.experts == 2 * block.experts).all()
    damaged = dataclasses.replace(block, experts=block.experts[:, ::-1].copy())
    dataclasses.replace(profile, blocks={block.module: damaged}).write(tmp_path / "damaged.profile")
    with pytest.raises(twellc.UserError, match="contradict each other"):
        twellc.FiringProfile.read(tmp_path / "damaged.profile")


def lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    return path


SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in ("llama", "opt")]


@pytest.mark.parametrize("name", ["bert", "t5", *SLOW])
def test_padding_does_not_count(request: pytest.FixtureRequest, tmp_path: Path, name: str) -> None:
    """Rows of several lengths in one run give what they give one by one."""
    folder = request.getfixturevalue(name)
    rows = [torch.randint(3, 90, (length,)).tolist() for length in (9, 2, 17, 5)]
    if name == "t5":
        ids = np.zeros((4, 17), np.int64)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = row
        arrays = {"input_ids": ids, "attention_mask": ids != 0, "decoder_input_ids": ids[:, :3] + 5}
        arrays["attention_mask"] = arrays["attention_mask"].astype(np.int64)
        together = twellc.profile(folder, arrays)
        parts = [{key: value[i : i + 1] for key, value in arrays.items()} for i in range(4)]
        apart = twellc.profile(folder, parts)
    else:
        data = lines(tmp_path / "ids.jsonl", [{"input_ids": row} for row in rows])
        together = twellc.profile(folder, data, batch=4)
        apart = twellc.profile(folder, data, batch=1)
    assert together.blocks.keys() == apart.blocks.keys()
    for module, block in together.blocks.items():
        alone = apart.blocks[module]
        decoder = name == "t5" and module.startswith("decoder")
        assert block.tokens == alone.tokens == (12 if decoder else 33)
        assert block.positions[:, 0].tolist() == alone.positions[:, 0].tolist()
        assert np.abs(block.firing - alone.firing).sum() <= 0.01 * alone.nonzeros


def test_kinds_of_data_are_the_same_tokens(bytelm: Path, tmp_path: Path) -> None:
    ids = [0, *TEXT.encode()[:63]]
    (tmp_path / "a.txt").write_bytes(bytes(ids[1:]))
    lines(tmp_path / "a.jsonl", [{"content": TEXT[:63]}])
    lines(tmp_path / "ids.jsonl", [{"input_ids": ids}])
    np.save(tmp_path / "a.npy", np.array([ids], np.uint8))
    np.savez(tmp_path / "a.npz", input_ids=np.array([ids]))
    np.savez(tmp_path / "masked.npz", input_ids=np.array([[*ids, 7, 7]]), attention_mask=np.array([[1] * 64 + [0] * 2]))
    found = [
        twellc.profile(bytelm, tmp_path / name, field="content")
        for name in ("a.txt", "a.jsonl", "ids.jsonl", "a.npy", "a.npz", "masked.npz")
    ]
    found.append(twellc.profile(bytelm, {"input_ids": torch.tensor([ids])}))
    for profile in found[1:]:
        for module, block in profile.blocks.items():
            assert block.tokens == 64
            assert np.abs(block.firing - found[0].blocks[module].firing).sum() <= 0.01 * block.nonzeros
    kinds = ["text", "lines of JSON", "lines of JSON", "token ids", "arrays"]
    assert [profile.data[0].kind for profile in found[:5]] == kinds


def test_padding_ids_at_both_ends_do_not_count(opt: Path, tmp_path: Path) -> None:
    """Its config.json says that 1 is padding; between tokens it is a token."""
    ids = np.array([[1, 1, 5, 1, 9, 8], [7, 7, 7, 7, 7, 1]])
    np.save(tmp_path / "ids.npy", ids)
    assert twellc.profile(opt, tmp_path / "ids.npy").tokens == 9
    assert twellc.profile(opt, {"input_ids": ids}).tokens == 9


def test_left_padding_needs_a_mask(cli: Cli, llama: Path, tmp_path: Path) -> None:
    mask = np.array([[0, 1, 1], [1, 1, 1]])
    np.savez(tmp_path / "a.npz", input_ids=np.full((2, 3), 5), attention_mask=mask)
    arguments = [llama, "--data", tmp_path / "a.npz", "-o", tmp_path / "p"]
    failed(cli("profile", *arguments), "padding before tokens", "Add --padding mask")
    assert cli("profile", *arguments, "--padding", "mask").exit_code == 0
    assert twellc.FiringProfile.read(tmp_path / "p").tokens == 5


def test_an_archive_in_memory_and_in_a_file(archive: Path, tmp_path: Path) -> None:
    """Its input is no token ids: every row counts, and its place in the sequence is that in the last axis but one."""
    x = torch.randn(10, models.SEQUENCE, models.D_MODEL)
    profile = twellc.profile(archive, {"x": x}, batch=4)
    block = profile.blocks["ffn"]
    assert (block.tokens, profile.data[0].sequences) == (10 * models.SEQUENCE, 10)
    assert [each[:2] for each in block.density_by_position()] == [(0, 0), (1, 1), (2, 3)]
    np.savez(tmp_path / "x.npz", x=x.numpy())
    assert twellc.profile(archive, tmp_path / "x.npz").blocks["ffn"].firing.tolist() == block.firing.tolist()
    # More rows than the model takes at once, and bfloat16 as it is.
    many = twellc.profile(archive, {"x": x.bfloat16().repeat(7, 1, 1)}, batch=100)
    assert many.data[0].sequences == 70 and many.blocks["ffn"].tokens == 7 * block.tokens
    module = Residual(Gated(d_ff=320)).bfloat16().eval()
    example = (torch.randn(4, 16).bfloat16(),)
    fixed = twellc.profile(module, [{"x": torch.randn(4, 16)}, {"x": torch.randn(4, 16)}], args=example)
    assert fixed.tokens == 8 and fixed.blocks["ffn"].density_by_position() == []
    assert twellc.profile(export(module, *example), {"x": torch.randn(4, 16)}).model.kind == "ExportedProgram in memory"


def test_tokens_end_the_run_early(bytelm: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    read: list[tuple[int, int]] = []
    options: dict[str, Any] = {"batch": 2, "sequence": 64, "advance": lambda *step: read.append(step)}
    profile = twellc.profile(bytelm, tmp_path / "a.txt", tokens=200, **options)
    assert profile.tokens == 256 and len(read) == 2
    read.clear()
    assert twellc.profile(bytelm, tmp_path / "a.txt", **options).tokens > len(TEXT)
    assert read[-1] == (len(TEXT), len(TEXT)) and read == sorted(read)


def test_rows_that_are_no_token_ids_end_the_run_early_too(archive: Path) -> None:
    x = torch.randn(10, models.SEQUENCE, models.D_MODEL)
    profile = twellc.profile(archive, {"x": x}, batch=2, tokens=3 * models.SEQUENCE)
    assert profile.tokens == 4 * models.SEQUENCE and profile.data[0].sequences == 4


NOT_TAKEN: list[tuple[dict[str, Any], str]] = [
    *(
        ({name: value}, f"^--{name}: is (out of its range|not an integer); got .*; expected an integer")
        for name, values in {"batch": (0, 2.5, None), "tokens": (0,), "sequence": (-1, "8")}.items()
        for value in values
    ),
    ({"device": None}, "^--device None: is not a device; expected auto, cpu"),
    ({"device": "tpu"}, "^--device tpu: is not a device; expected auto, cpu"),
    ({"device": "mps"}, "^--device mps: is not a device of"),
    ({"device": 99}, "^--device 99: torch sees no such GPU"),
    *(({"data": data}, "^data: is not data to run a model on; got (int|NoneType);") for data in (5, None, [5], [None])),
]


def test_what_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    for options, message in NOT_TAKEN:
        with pytest.raises(twellc.UserError, match=message):
            twellc.profile("m", **{"data": tmp_path / "a.txt", **options})
    with pytest.raises(twellc.UserError, match="there is not a profile to merge"):
        twellc.merge_profiles([], "merged")


def test_a_text_is_read_piece_by_piece(bytelm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a piece ends within a character."""
    (tmp_path / "a.txt").write_text("äöü äöü\n" * 40 + "ß" * 30)
    whole = twellc.profile(bytelm, tmp_path / "a.txt", sequence=32)
    monkeypatch.setattr("twellc.samples.documents._CHUNK", 7)
    pieces = twellc.profile(bytelm, tmp_path / "a.txt", sequence=32)
    for module, block in whole.blocks.items():
        assert block.firing.tolist() == pieces.blocks[module].firing.tolist()


def test_the_command_and_its_table(cli: Cli, bytelm: Path, tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(TEXT)
    result = cli("profile", bytelm, "--data", tmp_path / "a.txt", tmp_path / "b.txt", "-o", tmp_path / "p")
    assert result.exit_code == 0
    assert "model.layers.3.mlp" in result.stdout and "of 1024" in result.stdout and "95 % confidence" in result.stdout
    profile = twellc.FiringProfile.read(tmp_path / "p")
    assert [each.name for each in profile.data] == ["a.txt", "b.txt"]
    failed(cli("profile", bytelm, "--data", tmp_path / "a.txt", "-o", tmp_path / "p"), "exists already")
    again = cli("profile", bytelm, tmp_path / "a.txt", "-o", tmp_path / "p", "--overwrite", "--json")
    assert json.loads(again.stdout)["blocks"][0]["tokens"] * 2 == profile.tokens


def test_merging(cli: Cli, bytelm: Path, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text(TEXT[500:])
    both = twellc.profile(bytelm, [tmp_path / "a.txt", tmp_path / "b.txt"])
    for name in ("a", "b"):
        twellc.profile(bytelm, tmp_path / f"{name}.txt", tmp_path / name)
    assert cli("profile", "--merge", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "c").exit_code == 0
    merged = twellc.FiringProfile.read(tmp_path / "c")
    assert merged.data == both.data
    for module, block in both.blocks.items():
        for name in ("firing", "rows", "tiles", "positions"):
            assert getattr(block, name).tolist() == getattr(merged.blocks[module], name).tolist()
    twellc.profile(llama, {"input_ids": np.full((1, 4), 5)}, tmp_path / "other")
    before = files_in(tmp_path)
    arguments = ["--merge", tmp_path / "a", tmp_path / "other", "-o", tmp_path / "d"]
    failed(cli("profile", *arguments), "is a profile of another model", "expected bytelm")
    twellc.profile(bytelm, tmp_path / "a.txt", tmp_path / "half", dtype="fp16")
    arguments = ["--merge", tmp_path / "a", tmp_path / "half", "-o", tmp_path / "d"]
    failed(cli("profile", *arguments), "in another precision; got fp16; expected bf16")
    assert files_in(tmp_path).keys() - {"half"} == before.keys()


@pytest.mark.parametrize(
    "option", ["--data x", "--dtype bf16", "--tokens 5", "--padding none", "--batch 8", "--trust-model"]
)
def test_merging_takes_no_option_of_a_run(cli: Cli, tmp_path: Path, option: str) -> None:
    """Not even a default one."""
    name, *_ = words = option.split()
    result = cli("profile", "--merge", tmp_path / "a", "-o", tmp_path / "b", *words)
    failed(result, f"Error: {name}: merging profiles runs no model; got --merge. Leave one out.")


def test_few_tokens_are_warned_of(cli: Cli, bytelm: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab")
    result = cli("profile", bytelm, "--data", tmp_path / "a.txt", "-o", tmp_path / "p")
    assert "3 tokens are few: a neuron that never fired may fire for up to 63.16% of the tokens" in " ".join(
        result.stderr.split()
    )


def npz(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def npy(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


IDS = np.ones((1, 3), np.int64)
DATA = {
    "missing.txt": (None, "there is no such file"),
    "empty.txt": (b"", "the file is empty"),
    "binary.txt": (b"abc\n" + b"\xff\xfe", "is not UTF-8 at byte 4"),
    "empty.jsonl": (b"\n \n", "nothing in it becomes a token"),
    "no-text.jsonl": (b'{"text": ""}\n', "nothing in it becomes a token"),
    "damaged.jsonl": (b'{"text": "a"}\n{"text": \n', "line 2: cannot be read as JSON"),
    "list.jsonl": (b"[1]\n", "line 1: has no text in the field 'text'; got list"),
    "other.jsonl": (b'{"body": "a"}\n', "Name the field with --field"),
    "ids.jsonl": (
        b'{"input_ids": [1, 256]}\n',
        "line 1: has token ids that the model has not; got 1 to 256; expected 0 to 255",
    ),
    "number.jsonl": (b'{"text": 1, "input_ids": [1]}\n', "is neither a text nor a list of token ids; got int"),
    "floats.jsonl": (b'{"input_ids": [1, 2.0]}\n', "the field 'input_ids' is neither a text nor a list of token ids"),
    "suffix.NPY": (b"\x93NUMPY", "cannot be read as an .npy file"),
    "half.jsonl": (b'{"text": "a\\ud800"}\n', "line 1: the field 'text' has half of a surrogate pair"),
    "damaged.npy": (b"\x93NUMPY", "cannot be read as an .npy file"),
    "damaged.npz": (b"PK\x03\x04", "cannot be read as an .npz file"),
    "floats.npy": (npy(np.ones((2, 3))), "holds no token ids; got float64"),
    "none.npz": (npz(input_ids=IDS[:0]), "leaves what the model can take"),
    "names.npz": (npz(ids=IDS), "has no array input_ids"),
    "masked.npz": (npz(input_ids=IDS, attention_mask=IDS < 0), "holds no token"),
    "nan.npz": (npz(input_ids=IDS, attention_mask=IDS * np.nan), "attention_mask: holds no whole numbers; got float64"),
    "texts.npz": (
        npz(input_ids=IDS, attention_mask=IDS.astype("U1")),
        "attention_mask: holds no whole numbers; got <U1",
    ),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", DATA)
def test_bad_data(cli: Cli, bytelm: Path, tmp_path: Path, name: str) -> None:
    content, message = DATA[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    before = files_in(tmp_path)
    failed(cli("profile", bytelm, "--data", tmp_path / name, "-o", tmp_path / "p"), name, message)
    assert files_in(tmp_path) == before


def test_token_ids_that_no_integer_of_the_model_holds(tmp_path: Path) -> None:
    """Of a model that is no Hugging Face directory it is not known how many token ids there are."""

    class Embedded(Residual):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return super().forward(nn.functional.one_hot(input_ids, models.D_MODEL).bfloat16())

    program = export(Embedded(Gated()).bfloat16(), torch.ones(1, 3, dtype=torch.int64))
    data = lines(tmp_path / "ids.jsonl", [{"input_ids": [1, 2**80, 3]}])
    with pytest.raises(twellc.UserError, match=f"got 1 to {2**80}; expected 0 to {2**63 - 1}"):
        twellc.profile(program, data)


def test_what_does_not_fit(cli: Cli, bytelm: Path, archive: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    text = ["--data", tmp_path / "a.txt"]
    failed(cli("profile", bytelm, "-o", tmp_path / "p"), "there is no data")
    failed(cli("profile", bytelm, "--data", tmp_path, "-o", tmp_path / "p"), "is a folder; expected a text")
    failed(cli("profile", bytelm, "--data", "/dev/null", "-o", tmp_path / "p"), "/dev/null: is a device or a pipe")
    failed(cli("profile", bytelm, *text, "-o", tmp_path / "p", "--sequence", 4096), "--sequence 4096", "1 to 1024")
    failed(cli("profile", bytelm, *text, "-o", tmp_path / "p", "--sequence", 1), "no place for a token")
    failed(cli("profile", archive, *text, "-o", tmp_path / "p"), "takes other inputs than token ids")
    failed(cli("profile", bytelm, *text, "-o", tmp_path / "no" / "p"), "the output folder does not exist")
    failed(cli("profile", bytelm, *text, "-o", bytelm / "p.safetensors"), "belongs to the model")
    failed(cli("profile", archive, *text, "-o", archive, "--overwrite"), "belongs to the model")
    (tmp_path / "link").symlink_to(tmp_path / "a.txt")
    for name in ("a.txt", "link"):
        onto_itself = ["--data", tmp_path / "link", "-o", tmp_path / name, "--overwrite"]
        failed(cli("profile", bytelm, *onto_itself), f"{name}: is a file that is read")
    (tmp_path / "link").unlink()
    torch.save(nn.Linear(8, 8), tmp_path / "m.pt")
    arguments = ["--trust-model", "--input-spec", "input:float32[batch,8]", "--data", tmp_path / "a.txt"]
    failed(cli("profile", tmp_path / "m.pt", *arguments, "-o", tmp_path / "p"), "has no feed-forward block")
    assert sorted(files_in(tmp_path)) == ["a.txt", "m.pt"]


def test_nan_is_refused(cli: Cli, archive: Path, tmp_path: Path) -> None:
    x = np.zeros((1, models.SEQUENCE, models.D_MODEL))
    x[0, 0, 0] = np.nan
    np.savez(tmp_path / "x.npz", x=x)
    arguments = ["--data", tmp_path / "x.npz", "-o", tmp_path / "p"]
    failed(cli("profile", archive, *arguments), "layer ffn: its activations are NaN for", "x.npz", "Check the data")
    assert not (tmp_path / "p").exists()


def test_tensors_that_the_model_makes_lie_where_it_runs() -> None:
    """Whichever device it was traced on, the CPU included: a graph names the device of each tensor that it makes."""

    def compute(module: Any, x: torch.Tensor) -> Any:
        return module.ffn(x + torch.arange(x.shape[-1], device=x.device, dtype=x.dtype))

    program = export(Written(compute, ffn=Gated()), torch.randn(5, 16))
    expected = twellc.profile(program, {"inputs_0": torch.ones(5, 16)}, device="cpu")
    canonical = models.canonicalize(program)
    (made,) = (node for node in canonical.graph.nodes if "device" in node.kwargs)
    made.update_kwarg("device", torch.device("meta"))
    observer = ProgramObserver(canonical, find_ffn_blocks(canonical), torch.device("cpu"))
    observer.run({"inputs_0": torch.ones(5, 16)}, {}, "here")
    ((block,), (other,)) = observer.profiles(), expected.blocks.values()
    assert np.array_equal(block.firing, other.firing) and block.nonzeros > 0
