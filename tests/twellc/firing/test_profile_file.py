"""The file of a profile: what it holds, and that damage to it is one message."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

import twellc
from twellc.cli import main
from twellc.firing.profile import DataSource, FiringProfile, ProfiledModel
from twellc.passes.block_profile import BlockProfile, rate_bound

FIRING = [3, 0, 1, 3, 0, 2]
ROWS = [0, 1, 1, 2, 0, 0, 0]


def block(module: str = "mlp") -> BlockProfile:
    tiles, positions = np.zeros(257, np.int64), np.zeros((32, 2), np.int64)
    tiles[[1, 2, 3]] = 1, 1, 2
    positions[0], positions[3] = (1, 3), (3, 6)
    return BlockProfile(module, "gated", "relu", np.array(FIRING), np.array(ROWS), tiles, positions)


def profile() -> FiringProfile:
    model = ProfiledModel("m", "Hugging Face directory", "0" * 64, "bf16")
    return FiringProfile(
        model, [DataSource("a.txt", "text", 1, 4)], "2026-11-25T09:30:00+00:00", "0.1.0", [], {"mlp": block()}
    )


def test_statistics() -> None:
    found = block()
    assert (found.d_ff, found.tokens, found.nonzeros, found.largest, found.mean) == (6, 4, 9, 3, 2.25)
    assert found.density == 9 / 24 and found.rates.tolist() == [0.75, 0, 0.25, 0.75, 0, 0.5]
    assert found.order.tolist() == [0, 3, 5, 2, 1, 4]
    assert found.carried_by(2) == 6 / 9 and found.carried_by(6) == 1
    assert found.never.tolist() == [False, True, False, False, True, False]
    assert [found.percentile(share) for share in (0.25, 0.5, 0.75, 1)] == [1, 2, 3, 3]
    assert (found.tiles_over(2), found.tiles_over(3)) == (0.5, 0)
    assert found.density_by_position() == [(0, 0, 0.5), (4, 7, 6 / 18)]


def test_rate_bound() -> None:
    """Not firing has a probability of 5 % at the bound; for many tokens it is 3 / tokens."""
    for tokens in (1, 3, 100, 10**6):
        assert (1 - rate_bound(tokens)) ** tokens == pytest.approx(0.05, rel=1e-6)
    assert rate_bound(10**6) == pytest.approx(3e-6, rel=0.01)
    assert rate_bound(0) == 1


def test_a_file_is_what_was_written(tmp_path: Path) -> None:
    profile().write(tmp_path / "p")
    found = FiringProfile.read(str(tmp_path / "p"))
    assert found.to_json() == profile().to_json()
    assert json.loads(json.dumps(found.to_json())) == found.to_json()
    assert found.blocks["mlp"].firing.tolist() == FIRING
    with pytest.raises(twellc.UserError, match="exists already"):
        found.write(tmp_path / "p")
    found.merged(found).write(tmp_path / "p", overwrite=True)
    assert FiringProfile.read(tmp_path / "p").blocks["mlp"].firing.tolist() == [2 * count for count in FIRING]


def rewritten(path: Path, tensors: dict[str, Any] | None = None, **metadata: str) -> None:
    profile().write(path)
    old = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])["__metadata__"]
    save_file({**load_file(path), **(tensors or {})}, path, {**old, **metadata})


def content(text: str = "", **changes: Any) -> str:
    """Return what a profile says in JSON, with changes; `text` stands for VALUE, as no JSON of Python's would."""
    written = profile().content()
    own = json.loads(json.loads(written[8 : 8 + int.from_bytes(written[:8], "little")])["__metadata__"]["profile"])
    return json.dumps({**own, **changes}).replace('"VALUE"', text)


BLOCK = {"module": "mlp", "variant": "gated", "activation": "relu"}
SOURCE = {"name": "a", "kind": "text", "sequences": 1}
DAMAGE: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "another format": ({}, {"format": "another"}, "is not a profile of twellc; expected a file that"),
    "another version": ({}, {"version": "2"}, "the profile is of another version of the format; got 2; expected 1"),
    "no JSON": ({}, {"profile": "{"}, "the profile is damaged"),
    "no object": ({}, {"profile": "[1]"}, "the profile is damaged"),
    "no blocks": ({}, {"profile": json.dumps({"blocks": []})}, r"the profile is damaged \(has no model\)"),
    "none of any": ({}, {"profile": content(blocks=[])}, r"the profile is damaged \(it has no block\)"),
    "floats": ({"mlp/firing": np.ones(6)}, {}, "the counts mlp/firing are missing or are not counts"),
    "another width": ({"mlp/firing": np.ones(7, np.int64)}, {}, "the counts mlp/firing are missing or are not counts"),
    "negative": ({"mlp/tiles": np.full(257, -1)}, {}, "the counts mlp/tiles are missing or are not counts"),
    **{
        f"{text} tokens": ({}, {"profile": content(text, data=[{**SOURCE, "tokens": "VALUE"}])}, message)
        for text, message in {
            "Infinity": "Infinity is not a number of JSON",
            "NaN": "NaN is not a number of JSON",
            "1e999": r"data\[0\].tokens is not an integer",
            "-1": r"data\[0\].tokens is not at least 0: -1",
            "9223372036854775808": r"data\[0\].tokens is not at most",
        }.items()
    },
    **{
        f"{text} neurons": ({}, {"profile": content(text, blocks=[{**BLOCK, "d_ff": "VALUE"}])}, message)
        for text, message in {
            "Infinity": "Infinity is not a number of JSON",
            "1e999": r"blocks\[0\].d_ff is not an integer",
            "0": r"blocks\[0\].d_ff is not at least 1: 0",
            "4294967296": r"blocks\[0\].d_ff is not at most",
        }.items()
    },
    "counts whose sum has no 64 bits": ({"mlp/rows": np.full(7, 2**62)}, {}, "mlp/rows are missing or are not counts"),
    "contradiction": ({"mlp/firing": np.ones(6, np.int64)}, {}, "the counts of mlp contradict each other"),
    "more often than there are tokens": ({"mlp/firing": np.array([9, 0, 0, 0, 0, 0])}, {}, "contradict each other"),
    "more tiles than there are": ({"mlp/tiles": np.array([1, 1, 1, 2, *[0] * 253])}, {}, "contradict each other"),
    "more places than tokens": ({"mlp/positions": np.full((32, 2), 5)}, {}, "contradict each other"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage(tmp_path: Path, name: str) -> None:
    tensors, metadata, message = DAMAGE[name]
    rewritten(tmp_path / "p", tensors, **metadata)
    with pytest.raises(twellc.UserError, match=message):
        FiringProfile.read(tmp_path / "p", "--firing-profile")


@pytest.mark.parametrize("content", [b"", b"{}", b"\x00" * 64, b"\xff" * 8])
def test_no_profile(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "p").write_bytes(content)
    with pytest.raises(
        twellc.UserError, match=r"^--firing-profile .*p: (the file is empty|is not a profile of twellc)"
    ):
        FiringProfile.read(tmp_path / "p", "--firing-profile")
    with pytest.raises(twellc.UserError, match="there is no such file"):
        FiringProfile.read(tmp_path / "missing")


def test_every_cut_is_noticed(tmp_path: Path) -> None:
    profile().write(tmp_path / "p")
    whole = (tmp_path / "p").read_bytes()
    for size in range(1, len(whole), 97):
        (tmp_path / "p").write_bytes(whole[:size])
        with pytest.raises(twellc.UserError, match="is not a profile"):
            FiringProfile.read(tmp_path / "p")


@pytest.mark.parametrize("text", ["Infinity", "1e999", "NaN"])
def test_commands_refuse_numbers_that_are_none(text: str, archive: Path, tmp_path: Path) -> None:
    """A traceback and exit status 70 would blame twellc."""
    bad, page = tmp_path / "p", tmp_path / "p.html"
    rewritten(bad, profile=content(text, data=[{**SOURCE, "tokens": "VALUE"}]))
    for arguments in (
        ["report", bad, "-o", page],
        ["inspect", archive, "--firing-profile", bad],
        ["profile", "--merge", bad, bad, "-o", tmp_path / "q"],
    ):
        result = CliRunner().invoke(main, list(map(str, arguments)))
        assert result.exit_code == 2, result.output
        assert result.stderr.count("Error: ") == 1 and "the profile is damaged" in result.stderr
