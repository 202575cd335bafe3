"""The pages against the tree: paths exist, snippets use what exists, messages are those of the program."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import pytest

import twellc
from tests.twellc.reporting import pages
from twellc.cli import main
from twellc.training.log import LoggedRun, LoggedStep

ROOT = Path(__file__).resolve().parents[2]
PAGES = [str(page.relative_to(ROOT)) for folder in ("", "docs/") for page in sorted(ROOT.glob(f"{folder}*.md"))]
READMES = [str(page.relative_to(ROOT)) for pattern in ("benchmarks/**/*.md", "examples/**/*.md", "plugins/**/*.md")
           for page in sorted(ROOT.glob(pattern))]  # fmt: skip
# Top-level folders: what starts with one of these and a slash is a path from the root.
FOLDERS = ("twellc", "passes", "export", "plugins", "tests", "examples", "benchmarks", "docs")
# What a build makes.
BUILT = ("plugins/lib",)
# Options of other programs that pages show.
FOREIGN = (
    "all-files", "backend-config", "build", "dist", "dumpLayerInfo", "dumpProfile", "dynamicPlugins", "fsdp_version",
    "hf-overrides", "loadEngine", "local-dir", "model-repository", "nproc-per-node", "saveEngine", "shapes",
    "staticPlugins", "tensor-parallel-size", "tokenizer", "use_fsdp", "versionCompatible",
)  # fmt: skip


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page: str) -> None:
    paths = re.findall(rf"(?<![\w/.-])((?:{'|'.join(FOLDERS)})/[\w./-]*[\w/])", text_of(page))
    missing = [path for path in paths if not (ROOT / path).exists() and not path.startswith(BUILT)]
    assert missing == []


@pytest.mark.parametrize("page", [*PAGES, *READMES])
def test_named_sources_exist(page: str) -> None:
    """A file of code that a page names without its folder, such as `routes.cu`."""
    named = re.findall(r"`([\w./-]+\.(?:py|cuh?|cpp|h))`", text_of(page))
    known = {file.name for folder in FOLDERS for file in (ROOT / folder).rglob("*.*")}
    assert [name for name in named if Path(name).name not in known] == []


@pytest.mark.parametrize("page", sorted({*PAGES, *READMES} - {"CHANGELOG.md"}))
def test_named_parts_of_the_package_exist(page: str) -> None:
    """Such as twellc.training.L1Penalty, or twellc.plugins.library.limits()."""
    named = set(re.findall(r"(?<![\w./-])twellc(?:\.[A-Za-z_]\w*)+", text_of(page)))
    assert [name for name in sorted(named) if not is_there(name)] == []


def is_there(name: str) -> bool:
    """Whether a dotted name is that of a module, or of something in one."""
    parts, found = name.split("."), importlib.import_module(name.partition(".")[0])
    for end, part in enumerate(parts[1:], 2):
        try:
            found = getattr(found, part, None) or importlib.import_module(".".join(parts[:end]))
        except ImportError:
            return False
    return True


# ---- options ----


def options_of(command: click.Command) -> set[str]:
    """Return the options that a command shows in its help."""
    shown = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
    return {name for each in shown for name in (*each.opts, *each.secondary_opts)} | {"--help"}


@pytest.mark.parametrize("page", sorted({*PAGES, *READMES} - {"CHANGELOG.md", "benchmarks/LOG.md"}))
def test_named_options_exist(page: str) -> None:
    """Those of a command of twellc where a page shows the command; others of any command or script of the tree."""
    scripts = [file for folder in ("benchmarks", "examples", "tests") for file in (ROOT / folder).rglob("*.py")]
    of_scripts = set(re.findall(r'["/](--[a-z][\w-]*)', " ".join(file.read_text() for file in scripts)))
    known = of_scripts.union({f"--{name}" for name in FOREIGN}, *map(options_of, [main, *main.commands.values()]))
    known -= {"--calibrate"}  # the old name of --measure-gpu
    assert sorted(set(re.findall(r"(?<![\w-])--[a-zA-Z][\w-]*", text_of(page))) - known) == []
    for line in re.findall(r"^    (twellc .*)$|`(twellc [^`\n]*)`", text_of(page), re.MULTILINE):
        for command, rest in re.findall(r"twellc (\w+)([^|;&#]*)", "".join(line)):
            if command in main.commands:
                given = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", rest))
                assert sorted(given - options_of(main.commands[command])) == [], line


def test_the_api_page_tells_options_with_other_names_in_python() -> None:
    table = text_of("docs/api.md").partition("| command line | Python |")[2].partition("\n\n")[0]
    other = {
        field.name
        for name in ("Compile", "Inspect", "Check", "Profile", "Bench")
        for field in fields(getattr(twellc, f"{name}Options"))
        if f"--{field.name.replace('_', '-')}" not in options_of(main.commands[name.lower()])
    }
    # Those that users do not give, and what is an argument of the command.
    other -= {"attention_forms", "decided", "in_memory", "model", "candidate"}
    assert sorted(name for name in other if not re.search(rf"`{name}[`=]", table)) == []
    assert {"arrays", "profiles"} <= other


def test_the_profile_page_tells_what_its_json_has() -> None:
    def keys(found: Any) -> Iterator[str]:
        for key, value in found.items():
            yield key
            for each in value if isinstance(value, list) else [value]:
                yield from keys(each) if isinstance(each, dict) and key != "data" and key != "model" else ()

    section = text_of("docs/profile.md").partition("## What is counted")[2].partition("\n## ")[0]
    found = {key for key in keys(pages.profile().to_json()) if not key.isdigit()}
    assert len(found) > 20
    assert sorted(key for key in found if f"`{key}`" not in section) == []


def rows_of(page: str, heading: str) -> list[str]:
    """Return the first cells of the tables of a section."""
    section = text_of(page).partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)


def test_the_bench_page_tells_keys_that_its_json_has() -> None:
    named = {name for row in rows_of("docs/bench.md", "What comes out") for name in re.findall(r"\w+", row)}
    known = set(re.findall(r'"(\w+)": ', text_of("docs/schema/bench.json")))
    assert len(named) > 15 and sorted(named - known) == []


def test_the_training_page_tells_the_fields_of_a_log() -> None:
    named = {name for row in rows_of("docs/training.md", "The log") for name in re.findall(r"\w+", row)}
    assert named == {field.name for record in (LoggedRun, LoggedStep) for field in fields(record)}


@pytest.mark.parametrize("page", READMES)
def test_links_exist(page: str) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text_of(page)):
        assert (ROOT / page).parent.joinpath(target).exists(), target


@pytest.mark.parametrize("page", [*PAGES, *READMES])
def test_anchors_exist(page: str) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", text_of(page)):
        file = (ROOT / page).parent / target if target else ROOT / page
        assert anchor in anchors_of(file.read_text()), f"{target}#{anchor}"


def anchors_of(text: str) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_named_functions_are_in_their_files() -> None:
    """Of a table's row that links a file and then names functions of it: `| [file](…) | `function`, … | …`."""
    checked = 0
    for page in PAGES:
        last = ""
        for line in text_of(page).splitlines():
            row = re.match(r"\| (?:\[`[^`]*`\]\(([^)]*)\)|the same) \| ((?:`\w+`(?:, )?)+)[ |:]", line)
            if row is None:
                continue
            last = row[1] or last
            place = (ROOT / page).parent / last
            files = [place] if place.is_file() else list(place.rglob("*.cu*"))
            source = " ".join(file.read_text() for file in files)
            for name in re.findall(r"`(\w+)`", row[2]):
                assert name in source, f"{page}: {last}: {name}"
                checked += 1
    assert checked > 10


def test_tried_model_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model that docs/add-a-model-family.md makes is seen as the page says."""
    page = text_of("docs/add-a-model-family.md")
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "docs/add-a-model-family.md", "exec"), {"__name__": "example"})
    layers = twellc.inspect("persimmon").layers
    assert [(layer.variant, layer.activation, layer.residual) for layer in layers] == [("plain", "relu2", True)] * 2


# ---- the picture ----


def test_the_picture_stands_alone_in_dark_and_light() -> None:
    text = text_of("docs/block.svg")
    assert re.search(r"!\[[^\]]{20,}\]\(docs/block\.svg\)", text_of("README.md"))
    assert "prefers-color-scheme: dark" in text
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"@import|@font-face|url\((?!#)|<image|<script", text)
    root = ElementTree.fromstring(text)
    space = {"svg": "http://www.w3.org/2000/svg"}
    assert root.find("svg:title", space) is not None and root.find("svg:desc", space) is not None
    # A background of its own: a page may be dark where the reader's system is light.
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    card = root.find("svg:rect", space)
    assert card is not None and card.attrib["class"] == "card"
    assert float(card.attrib["width"]) > 0.99 * width and float(card.attrib["height"]) > 0.99 * height


# ---- docs/deploy.md ----

DEPLOY = text_of("docs/deploy.md")


def test_deploying_python_uses_what_the_tested_programs_use() -> None:
    """The whole recipe runs in tests/tensorrt; without a TensorRT at least the names must be those that run there."""
    blocks = re.findall(r"^```python\n(.*?)^```$", DEPLOY, re.MULTILINE | re.DOTALL)
    tested = [*(ROOT / "examples" / "hosts").rglob("*.py"), ROOT / "export" / "runner.py"]
    tested.append(ROOT / "tests" / "tensorrt" / "test_execution.py")
    known = " ".join(file.read_text() for file in tested)
    tree = ast.parse("".join(blocks))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        and node.value.id in ("tensorrt", "runtime", "engine", "context")
    }  # fmt: skip
    assert len(used) > 10
    assert [name for name in sorted(used) if name not in known] == []


def test_deploying_cpp_uses_what_the_tested_program_uses() -> None:
    (block,) = re.findall(r"^```cpp\n(.*?)^```$", DEPLOY, re.MULTILINE | re.DOTALL)
    program = text_of("examples/hosts/cpp/host.h")
    for name in ("dlopen", "dlsym", "RTLD_NOW", "initLibTwellPlugins"):
        assert name in block and name in program


def test_messages_are_those_of_the_program() -> None:
    rows = re.findall(r"^\| (?:twellc|the plugin's log|the C\+\+ program) \| (.*?) \|", DEPLOY, re.MULTILINE)
    assert len(rows) > 8
    folders = ("twellc", "export", "plugins", "examples")
    sources = [file for folder in folders for file in (ROOT / folder).rglob("*.[pch]*") if "lib" not in file.parts]
    said = " ".join(file.read_text() for file in sources if file.suffix in (".py", ".cpp", ".h"))
    said = re.sub(r'"\s*f?"', "", said)  # strings that go on in the next line
    for message in (each for row in rows for each in re.findall("«(.*?)»", row)):
        for piece in re.split(r"…|\(|\)|\d[\d.]*|'", message):
            assert piece.strip(" .;,:") in said, message


def test_every_host_says_what_was_run() -> None:
    for host in ("C++", "trtexec", "Triton", "PyCUDA"):
        section = DEPLOY.split(f"## {host}\n")[1].split("\n## ")[0]
        assert "State:" in section, host
