"""`twellc report`: what its pages say, which files they take it from, and what is refused."""

import builtins
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import twellc
from tests.conftest import Cli
from tests.twellc.reporting.pages import (
    MODULES,
    REFUSAL,
    bench_result,
    decisions,
    profile,
    profile_of_experts,
    varied_layers,
    write_log,
)
from tests.twellc.test_cli import failed, files_in
from twellc.reporting.words import percent

TIMES = "\N{MULTIPLICATION SIGN}"


class Page(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self.feed(page)
        self.close()
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def write(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    folder = tmp_path / "given"
    folder.mkdir()
    profile().write(folder / "tiny.profile")
    return {
        "profile": folder / "tiny.profile",
        "decisions": write(folder / "d.json", decisions()),
        "bench": write(folder / "b.json", bench_result()),
    }


def test_whole_page(cli: Cli, files: dict[str, Path], tmp_path: Path) -> None:
    arguments = ("report", files["profile"], "--decisions", files["decisions"], "--bench", files["bench"])
    result = cli(*arguments, "-o", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    assert "page.html: " in result.stdout
    page = Page((tmp_path / "page.html").read_text())
    never = profile().blocks[MODULES[0]].never.sum()
    for expected in (
        "2 of 3 feed-forward blocks run by TwELL",
        REFUSAL,
        "plugin TwellGatedMlp, 128 hot neurons",
        "linear: plugin TwellLinear rms norm → q | k, 64 → 64 | 32 attention:",
        "o + residual, 64 → 64",
        f"1.25 to 3.00 {TIMES} the speed of dense blocks, expected at 1 to 2048 tokens a call",
        f"1.25 {TIMES}",
        f"1.50 to 2.00 {TIMES} the speed of the fastest dense blocks, measured at 1 to 2048",
        "12.3 %",
        "compression 8, as compiled",
        "128 hot neurons, computed densely, have",
        f"{never} never fired",
        "half of the non-zeros",
        "NVIDIA H100",
        "Over 400 tokens of a.txt, in bf16",
        "energy was not measured",
        "the text is short",
        "400 tokens are few",
        "Left dense",
        "tensorrt 10.6",
        "down + residual",
        "twell, expected",
        f"12.3 % 1.25 {TIMES} matches",
        f"12.3 % 1.28 {TIMES} matches",
        "dense packed 41.0 32.0 1.28",
        "Is it sparse?",
        "What was done?",
        "1 left dense: 2",
        "What is gained?",
        f"1.25 to 1.50 {TIMES} the speed of the fastest dense model, measured at 1 to 2048",
    ):
        assert expected in page.text
    assert page.tags.count("svg") == 2 + 4 + 3
    assert not {"script", "img", "iframe", "object"} & set(page.tags)

    failed(cli(*arguments, "-o", tmp_path / "page.html"), "the file exists already", "--overwrite")
    assert cli(*arguments, "-o", tmp_path / "page.html", "--overwrite").exit_code == 0
    assert twellc.report(**files) == (tmp_path / "page.html").read_text()


def test_experts() -> None:
    """Of experts the page has what each got and what skipping would pay by bytes; nothing of single neurons."""
    made = profile_of_experts()
    statistics: Any = made.to_json()["blocks"]
    experts, shared = statistics
    gains = experts["experts"]["gain_by_bytes"].values()
    page = Page(twellc.report(profile=made))
    for expected in (
        "2 of 4 experts got no token",
        f"{min(gains):.2f} to {max(gains):.2f} {TIMES} fewer bytes of the experts to read in a step of 1 to 64",
        "model.layers.1.mixer.experts gated, relu, 4 experts",
        "0 to 200 2 of 4 " + " ".join(f"{gain:.2f} {TIMES}" for gain in gains),
        f"The busiest expert got 2.00 {TIMES} an even share. 2 got no tokens.",
        f"0 no tokens 1 200 {percent(experts['experts']['density'][1])} 2 no tokens",
        f"{shared['never_fired']} of 512",
    ):
        assert expected in page.text
    # Density, non-zeros, positions and tiles; the experts; the curve of the shared expert alone.
    assert page.tags.count("svg") == 4 + 1 + 1
    assert page.text.count("have half of the non-zeros") == 1


def test_many_blocks(tmp_path: Path) -> None:
    """Of a model of many blocks the page shows what they have in common, and names those that stand out."""
    modules = [f"model.layers.{index}.mlp" for index in range(32)]
    layers = {"layers": varied_layers(modules), "warnings": [f"layer {module} is odd" for module in modules]}
    page = twellc.report(
        profile=profile(modules),
        decisions=write(tmp_path / "d.json", decisions(modules) | layers),
        bench=write(tmp_path / "b.json", bench_result(modules) | layers),
    )
    folded = re.compile(r"<details>(?:(?!<details>).)*?</details>", re.DOTALL)
    seen = page
    while folded.search(seen):
        seen = folded.sub("", seen)
    at_once, whole = Page(seen), Page(page)
    for expected in (
        "28 of 32 feed-forward blocks run by TwELL",
        "4 left dense: 7, 15, 23, 31",
        "0.222 to 7.31 % by block",
        "28 blocks: 0 to 6, 8 to 14, 16 to 22, 24 to 30",
        f"gains least: 0 (1.25 {TIMES}), most: 30 (2.19 {TIMES}); densest: 0 (7.31 %)",
        "4 blocks: 7, 15, 23, 31",
        "such as 7: 0.9 % active, pays below 0.2 % at 2048 tokens",
        "32 blocks, those that are alike in one row. They are named by what differs in model.layers.….mlp",
    ):
        assert expected in at_once.text
    # Rows of blocks, warnings and stages of the graph are on the page, but folded.
    assert at_once.tags.count("tr") == 1 + 2
    assert at_once.text.count("is odd") < whole.text.count("is odd") == 32
    assert at_once.text.count("attention:") == 8 and whole.text.count("attention:") == 32
    for module in modules:
        assert f"{module} gated" in whole.text
    # By shape: the sum over the blocks, and those that gain least and most; each block is one level deeper.
    assert f"1x1 1 1705.0 992.0 1.72 0 (1.25 {TIMES}) 30 (2.19 {TIMES})" in whole.text
    assert whole.text.count("Each block at") == 2 and "dense packed 70.0 32.0 2.19" in whole.text


def test_one_block_is_not_summed_up(tmp_path: Path) -> None:
    (module,) = modules = ["model.layers.0.mlp"]
    layers = {"layers": varied_layers(modules)}
    page = Page(
        twellc.report(profile=profile(modules), decisions=write(tmp_path / "d.json", decisions(modules) | layers))
    )
    assert f"{module} gated, relu, 64 → 512 TwELL" in page.text
    for unwanted in ("alike in one row", "by block", "left dense", "named by what differs"):
        assert unwanted not in page.text


@pytest.mark.parametrize("given", ["profile", "decisions", "bench"])
def test_each_part_by_itself(files: dict[str, Path], given: str) -> None:
    page = Page(twellc.report(**{given: files[given]}))
    figures = {"profile": 4 + 3, "decisions": 0, "bench": 2}[given]
    assert page.tags.count("svg") == figures and page.text.startswith("tiny")
    assert ("The rewritten graph" in page.text) == (given != "profile")
    assert ("Density by layer" in page.text) == (given == "profile")
    assert ("What was measured" in page.text) == (given == "bench")


def test_what_was_assumed_is_no_expectation(tmp_path: Path) -> None:
    path = write(tmp_path / "d.json", decisions(assumed=True))
    text = Page(twellc.report(decisions=path)).text
    assert f"1.25 {TIMES} (density assumed)" in text and "the speed of dense blocks" not in text


def test_results_in_memory(archive: Path, tmp_path: Path) -> None:
    found = twellc.inspect(archive)
    page = Page(twellc.report(tmp_path / "page.html", decisions=found))
    assert "1 of 1" in page.text and found.layers[0].module in page.text


def test_a_block_that_never_fires() -> None:
    """No curve, and no share, of nothing."""
    made = profile()
    silent = made.blocks[MODULES[1]]
    for counts in (silent.firing, silent.rows, silent.tiles):
        counts[:] = 0
    silent.rows[0], silent.tiles[0], silent.positions[:, 1] = 400, 800, 0
    text = Page(twellc.report(profile=made)).text
    assert "512 never fired" in text and "0 %" in text and "nan %" not in text


def test_names_are_text(tmp_path: Path) -> None:
    """Names of modules and of files come from others: they are shown, and do nothing."""
    hostile = ["</svg><script>alert(1)</script>", "$\\frac{", "\x00\x1b[31m & \"'", "名前." + "x" * 90, "#000001"]
    content = decisions(hostile) | {"notes": ["<b>note</b>"]}
    content["layers"][-1]["reason"] = "<img src=x onerror=alert(1)>"
    content["model"]["name"] = "<i>m"
    page = Page(twellc.report(profile=profile(hostile, "<i>m"), decisions=write(tmp_path / "d.json", content)))
    assert not {"script", "img", "i"} & set(page.tags)
    for expected in (hostile[0], hostile[1], "\\x00\\x1b[31m & \"'", "<b>note</b>", "<i>m", "<img src=x"):
        assert expected in page.text
    # Half a character, which no file can hold.
    assert "m\\ud800" in Page(twellc.report(tmp_path / "page.html", profile=profile(["m\ud800", "n"]))).text


def changed(content: Callable[[], dict[str, Any]], **values: Any) -> dict[str, Any]:
    return {name: value for name, value in (content() | values).items() if value is not None}


WIDER = [layer | {"d_ff": 1024} for layer in bench_result()["layers"]]
OTHER = {"name": "m", "kind": "k", "sha256": "1" * 64}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "there is nothing to report on"),
    "no profile": ({"profile": b"{}"}, "is not a profile of twellc"),
    "empty profile": ({"profile": b""}, "the file is empty"),
    "missing": ({"decisions": None}, "there is no such file"),
    "empty": ({"bench": b""}, "the file is empty"),
    "no JSON": ({"decisions": b"{"}, "cannot be read as JSON"),
    "binary": ({"decisions": b"\xff\xfe"}, "cannot be read as JSON"),
    "a list": ({"bench": []}, "holds no JSON object"),
    "deep": ({"bench": b"[" * 100_000}, "cannot be read as JSON"),
    "a half": ({"decisions": b'{"layers": [], "x": "\\ud800"}'}, "cannot be read as JSON"),
    "bench as decisions": ({"decisions": bench_result()}, "says nothing of what became of a model's blocks"),
    "decisions as bench": ({"bench": decisions()}, "holds no measurements"),
    "old decisions": ({"decisions": changed(decisions, schema=2)}, "is of another version; got schema 2; expected 3"),
    "new bench": ({"bench": changed(bench_result, schema=9)}, "is of another version; got schema 9; expected 1"),
    "no results": ({"bench": changed(bench_result, results=[])}, "nothing was measured"),
    "no machine": ({"bench": changed(bench_result, machine=None)}, "is damaged: has no machine"),
    "a text": ({"decisions": changed(decisions, layers=[{"module": 1}])}, "is damaged: layers[0].module is not a"),
    "other model": ({"profile": "", "decisions": changed(decisions, model=OTHER)}, "is a profile of another model"),
    "other blocks": (
        {"profile": "", "bench": bench_result(["a", "b"])}, f"blocks a, b; expected {MODULES[0]} with d_ff 512",
    ),
    "other widths": (
        {"profile": "", "bench": changed(bench_result, layers=WIDER)},
        f"got d_ff 1024 of {MODULES[0]}; expected {MODULES[0]} with d_ff 512",
    ),
}  # fmt: skip


def test_a_page_replaces_nothing_that_it_is_made_of(files: dict[str, Path]) -> None:
    for option, path in files.items():
        content = path.read_bytes()
        with pytest.raises(twellc.UserError, match="is a file that is read"):
            twellc.report(path, overwrite=True, **{option: path})
        assert path.read_bytes() == content


@pytest.mark.parametrize("case", BAD)
def test_refuses(cli: Cli, files: dict[str, Path], tmp_path: Path, case: str) -> None:
    given, message = BAD[case]
    arguments: list[Any] = []
    for option, content in given.items():
        path = tmp_path / "given" / option
        if content == "":
            path = files[option]
        elif isinstance(content, bytes):
            path.write_bytes(content)
        elif content is not None:
            write(path, content)
        arguments += [path] if option == "profile" else [f"--{option}", path]
    before = files_in(tmp_path)
    failed(cli("report", *arguments, "-o", tmp_path / "page.html"), message)
    assert files_in(tmp_path) == before


def test_without_matplotlib(
    cli: Cli, files: dict[str, Path], archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    failed(cli("report", files["profile"], "-o", tmp_path / "page.html"), "needs matplotlib", "twellc[plot]")
    # Decisions have no figures.
    assert cli("report", "--decisions", files["decisions"], "-o", tmp_path / "page.html").exit_code == 0
    arguments = ("compile", archive, "--backend", "none", "--onnx", tmp_path / "m.onnx", "--html", tmp_path / "m.html")
    failed(cli(*arguments, "--firing-profile", files["profile"]), "--html", "needs matplotlib")


def test_compile_writes_a_page(cli: Cli, archive: Path, tmp_path: Path) -> None:
    arguments = ("compile", archive, "--backend", "none", "--onnx", tmp_path / "m.onnx", "--html")
    result = cli(*arguments, tmp_path / "m.html")
    assert result.exit_code == 0, result.output
    page = Page((tmp_path / "m.html").read_text())
    assert "1 of 1 feed-forward blocks run by TwELL" in page.text and "The rewritten graph" in page.text
    failed(cli(*arguments, tmp_path / "m.html"), "the file exists already")
    failed(cli(*arguments, tmp_path / "m.onnx", "--overwrite"), "is the same file as --onnx")


@pytest.mark.slow
def test_compile_shows_its_calibration(cli: Cli, llama: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(64).reshape(4, 16) + 3)
    twellc.profile(llama, tmp_path / "ids.npy", tmp_path / "p", device="cpu")
    outputs = ["--backend", "none", "--onnx", tmp_path / "m.onnx", "--html", tmp_path / "m.html"]
    result = cli("compile", llama, *outputs, "--firing-profile", tmp_path / "p", "--layers", "all")
    assert result.exit_code == 0, result.output
    page = Page((tmp_path / "m.html").read_text())
    assert "Density by layer" in page.text and "The rewritten graph" in page.text and "expected" in page.text


def test_a_training_run(cli: Cli, tmp_path: Path) -> None:
    log = write_log(tmp_path / "t.jsonl", ["a.0.mlp", "a.1.mlp"], [64, 128], eval_loss=2.5)
    result = cli("report", "--training", log, "-o", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    page = Page((tmp_path / "page.html").read_text())
    for expected in (
        "How did it train? 2 loss at step 3000, 6 at 1000",
        "26.2 % of the activations are not zero, 67.5 % at step 1000",
        "8.75 % of the neurons did not fire in the last steps",
        "2 blocks, 3000 steps",
        "on held-out data",
        "a.0.mlp 64 30 % 10 %",
        "a.1.mlp 128 22.5 % 7.5 %",
        "How the model was trained",
    ):
        assert expected in page.text, page.text
    assert page.tags.count("svg") == 3
    assert twellc.report(training=log) == (tmp_path / "page.html").read_text()


def test_one_record_and_a_loss_that_is_not_known(tmp_path: Path) -> None:
    log = write_log(tmp_path / "t.jsonl", ["a"], [64], steps=1, loss=float("nan"), density=[0.0], dead=[1.0])
    page = Page(twellc.report(training=log))
    assert "100 % of the neurons did not fire" in page.text and page.tags.count("svg") == 3


def test_a_training_run_beside_a_profile(tmp_path: Path) -> None:
    own = profile()
    widths = [own.blocks[module].d_ff for module in MODULES]
    log = write_log(tmp_path / "t.jsonl", list(MODULES), widths)
    page = Page(twellc.report(profile=own, training=log))
    assert "How did it train?" in page.text and "Is it sparse?" in page.text
    other = write_log(tmp_path / "o.jsonl", list(MODULES), [width + 8 for width in widths])
    with pytest.raises(twellc.UserError, match="--training: is of another model than the rest of the report"):
        twellc.report(profile=own, training=other)


def test_refuses_a_training_log(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    failed(cli("report", "--training", path, "-o", tmp_path / "p.html"), "there is no such file")
    path.write_text(json.dumps({"a": 1}))
    failed(cli("report", "--training", path, "-o", tmp_path / "p.html"), "is not a log of training")
    path.unlink()  # a log replaces no other file
    write_log(path, ["a"], [64], steps=0)
    failed(cli("report", "--training", path, "-o", tmp_path / "p.html"), "has no record of a step yet")
    failed(cli("report", "--training", path, "-o", path), str(path))
    assert not (tmp_path / "p.html").exists()
