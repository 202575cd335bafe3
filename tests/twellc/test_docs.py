"""The pages against the tree: paths exist, snippets use what exists, messages are those of the program."""

import ast
import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import Any
from xml.etree import ElementTree

import twellc
from tests.conftest import ROOT
from tests.generated_docs import options_of
from tests.processes import listed_by_git
from tests.twellc.reporting import pages
from twellc.cli import main
from twellc.training.log import LoggedRun, LoggedStep

PAGES = [str(page.relative_to(ROOT)) for folder in ("", "docs/") for page in sorted(ROOT.glob(f"{folder}*.md"))]
READMES = [
    str(page.relative_to(ROOT))
    for folder in ("benchmarks", "examples", "plugins")
    for page in sorted((ROOT / folder).rglob("*.md"))
]
TEXTS = {page: (ROOT / page).read_text() for page in (*PAGES, *READMES)}
# What names things as they were.
PAST = {"CHANGELOG.md"}
# Top-level folders: what starts with one of these and a slash is a path from the root.
FOLDERS = ("twellc", "passes", "export", "plugins", "tests", "examples", "benchmarks", "docs")
# What a build makes.
BUILT = ("twellc/plugins/lib",)
# Options of other programs that pages show.
FOREIGN = re.compile(
    "--(additional-config|all-files|backend-config|build|config-settings|dist|dumpLayerInfo|dumpProfile|dynamicPlugins"
    "|enable-expert-parallel|fsdp_version|hf-overrides|load-format|loadEngine|local-dir|model-repository"
    "|nproc-per-node|quantization|saveEngine|shapes|staticPlugins|tensor-parallel-size|tokenizer|use_fsdp|versionCompatible)"
)


def section(page: str, heading: str) -> str:
    return TEXTS[page].partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def refuse(find: Callable[[str], Iterable[str]], without: Iterable[str] = ()) -> None:
    """Demand that `find` finds nothing wrong in the text of any page."""
    wrong = {page: list(find(page)) for page in sorted(TEXTS.keys() - {*without})}
    assert {page: found for page, found in wrong.items() if found} == {}


def test_paths_exist() -> None:
    def missing(page: str) -> Iterator[str]:
        for path in re.findall(rf"(?<![\w/.-])((?:{'|'.join(FOLDERS)})/[\w./-]*[\w/])", TEXTS[page]):
            if not (ROOT / path).exists() and not path.startswith(BUILT):
                yield path

    refuse(missing, READMES)


def test_named_sources_exist() -> None:
    """A file of code that a page names without its folder, such as `routes.cu`."""
    known = {file.name for folder in FOLDERS for file in (ROOT / folder).rglob("*.*")}
    named = re.compile(r"`(?:[\w.-]+/)*([\w.-]+\.(?:py|cuh?|cpp|h))`")
    refuse(lambda page: {*named.findall(TEXTS[page])} - known)


def test_named_parts_of_the_package_exist() -> None:
    """Such as twellc.training.L1Penalty, or twellc.plugins.library.limits()."""

    def missing(page: str) -> Iterator[str]:
        named = set(re.findall(r"(?<![\w./-])twellc(?:\.[A-Za-z_]\w*)+", TEXTS[page]))
        return (name for name in named if not is_there(name))

    refuse(missing, PAST)


def is_there(name: str) -> bool:
    """Whether a dotted name is that of a module, or of something in one."""
    parts, found = name.split("."), importlib.import_module(name.partition(".")[0])
    for end, part in enumerate(parts[1:], 2):
        try:
            found = getattr(found, part, None) or importlib.import_module(".".join(parts[:end]))
        except ImportError:
            return False
    return True


def test_links_lead_somewhere() -> None:
    def missing(page: str) -> Iterator[str]:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", TEXTS[page]):
            file = (ROOT / page).parent / target if target else ROOT / page
            if not file.exists() or (anchor and anchor not in anchors_of(file.read_text())):
                yield f"{target}#{anchor}"

    refuse(missing)


def anchors_of(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_can_be_reached() -> None:
    found, new = set(), {ROOT / "README.md"}
    while new:
        found |= new
        links = ((page.parent, re.findall(r"\]\((?!https?:)([^)#]+\.md)", page.read_text())) for page in new)
        new = {(folder / link).resolve() for folder, every in links for link in every} - found
    assert {ROOT / page for page in TEXTS if page.split("/")[0] in ("docs", "examples", "plugins")} <= found


def test_every_folder_is_described_once() -> None:
    files = listed_by_git("twellc", "passes", "export", "plugins", "tests")
    deepest = {"twellc": 3, "passes": 2, "plugins": 2, "tests": 2, "export": 1}
    folders = {
        "/".join(parts[:depth])
        for parts in (file.split("/")[:-1] for file in files)
        if parts
        for depth in range(1, min(len(parts), deepest[parts[0]]) + 1)
    }
    rows = "\n".join(rows_of("CONTRIBUTING.md", "Where things are"))
    named = re.findall(r"`([^`]*)/`", rows)
    assert sorted(set(named) - {"benchmarks", "docs", "examples"}) == sorted(folders)
    assert len(named) == len(set(named))


def test_ci_runs_the_commands_of_the_readme() -> None:
    """One installs and compiles, one installs what the tests need and runs them."""
    commands = re.findall(r"^    (pip install .*) && (.*)$", TEXTS["README.md"], re.MULTILINE)
    assert len(commands) == 2
    for command in (part.split(" -o ")[0] for both in commands for part in both):
        assert command in (ROOT / ".ci" / "run").read_text()


def test_named_options_exist() -> None:
    """Those of a command of twellc where a page shows the command; others of any command or script of the tree."""
    scripts = [file for folder in ("benchmarks", "examples", "tests") for file in (ROOT / folder).rglob("*.py")]
    of_scripts = set(re.findall(r'["/](--[a-z][\w-]*)', " ".join(file.read_text() for file in scripts)))
    of_commands = {command: names_of(command) for command in ("twellc", *main.commands)}
    known = of_scripts.union(*of_commands.values())

    def missing(page: str) -> Iterator[str]:
        named = set(re.findall(r"(?<![\w-])--[a-zA-Z][\w-]*", TEXTS[page]))
        yield from (name for name in named - known if not FOREIGN.fullmatch(name))
        for line in re.findall(r"^    (twellc .*)$|`(twellc [^`\n]*)`", TEXTS[page], re.MULTILINE):
            for command, rest in re.findall(r"twellc (\w+)([^|;&#]*)", "".join(line)):
                if command in main.commands:
                    yield from set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", rest)) - of_commands[command]

    refuse(missing, {*PAST, *(page for page in TEXTS if page.startswith(("benchmarks/LOG", "benchmarks/results")))})


def names_of(command: str) -> set[str]:
    """Return all names of the options that a command shows in its help."""
    return {"--help"}.union(*((*each.opts, *each.secondary_opts) for each in options_of(command).values()))


def test_the_api_page_tells_options_with_other_names_in_python() -> None:
    table = TEXTS["docs/api.md"].partition("| command line | Python |")[2].partition("\n\n")[0]
    other = {
        field.name
        for name in ("Compile", "Inspect", "Check", "Profile", "Bench")
        for field in fields(getattr(twellc, f"{name}Options"))
        if f"--{field.name.replace('_', '-')}" not in names_of(name.lower())
    }
    # Those that users do not give, and what is an argument of the command.
    other -= {"earlier", "in_memory", "model", "candidate"}
    assert sorted(name for name in other if not re.search(rf"`{name}[`=]", table)) == []
    assert {"optimization_profiles", "input_specs"} <= other


def test_the_profile_page_tells_what_its_json_has() -> None:
    def keys(found: Any) -> Iterator[str]:
        for key, value in found.items():
            yield key
            for each in value if isinstance(value, list) else [value]:
                yield from keys(each) if isinstance(each, dict) and key != "data" and key != "model" else ()

    told = section("docs/profile.md", "What is counted")
    found = {key for key in keys(pages.profile().to_json()) if not key.isdigit()}
    assert len(found) > 20
    assert sorted(key for key in found if f"`{key}`" not in told) == []


def rows_of(page: str, heading: str) -> list[str]:
    """Return the first cells of the tables of a section."""
    return re.findall(r"^\| (`[^|]*) \|", section(page, heading), re.MULTILINE)


def test_the_bench_page_tells_keys_that_its_json_has() -> None:
    named = {name for row in rows_of("docs/bench.md", "What comes out") for name in re.findall(r"\w+", row)}
    known = set(re.findall(r'"(\w+)": ', (ROOT / "docs/schema/bench.json").read_text()))
    assert len(named) > 15 and sorted(named - known) == []


def test_the_training_page_tells_the_fields_of_a_log() -> None:
    named = {name for row in rows_of("docs/training.md", "The log") for name in re.findall(r"\w+", row)}
    assert named == {field.name for record in (LoggedRun, LoggedStep) for field in fields(record)}


def test_named_functions_are_in_their_files() -> None:
    """Of a table's row that links a file and then names functions of it: `| [file](…) | `function`, … | …`."""
    checked = 0
    for page in PAGES:
        last = ""
        for line in TEXTS[page].splitlines():
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


def test_the_picture_stands_alone_in_dark_and_light() -> None:
    text = (ROOT / "docs/block.svg").read_text()
    assert re.search(r"!\[[^\]]{20,}\]\(docs/block\.svg\)", TEXTS["README.md"])
    assert "prefers-color-scheme: dark" in text
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"@import|@font-face|url\((?!#)|<image|<script", text)
    root = ElementTree.fromstring(text)
    space = {"svg": "http://www.w3.org/2000/svg"}
    assert root.find("svg:title", space) is not None and root.find("svg:desc", space) is not None
    # It has its own background: a page may be dark where the reader's system is light.
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    card = root.find("svg:rect", space)
    assert card is not None and card.attrib["class"] == "card"
    assert float(card.attrib["width"]) > 0.99 * width and float(card.attrib["height"]) > 0.99 * height


DEPLOY = TEXTS["docs/deploy.md"]


def test_deploying_python_uses_what_the_tested_programs_use() -> None:
    """The whole recipe runs in tests/tensorrt; without a TensorRT at least the names must be those that run there."""
    blocks = re.findall(r"^```python\n(.*?)^```$", DEPLOY, re.MULTILINE | re.DOTALL)
    tested = [*(ROOT / "examples" / "hosts").rglob("*.py"), ROOT / "twellc/export/runner.py"]
    tested.append(ROOT / "tests" / "tensorrt" / "test_execution.py")
    known = " ".join(file.read_text() for file in tested)
    tree = ast.parse("".join(blocks))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("tensorrt", "runtime", "engine", "context")
    }
    assert len(used) > 10
    assert [name for name in sorted(used) if name not in known] == []


def test_deploying_cpp_uses_what_the_tested_program_uses() -> None:
    (block,) = re.findall(r"^```cpp\n(.*?)^```$", DEPLOY, re.MULTILINE | re.DOTALL)
    program = (ROOT / "examples/hosts/cpp/host.h").read_text()
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
        assert "State:" in section("docs/deploy.md", host), host
