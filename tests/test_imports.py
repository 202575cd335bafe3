"""Imports point one way: between the layers down, and nowhere in a circle, not even inside of functions."""

import ast
import functools
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# From the bottom to the top; everything else in twellc is above all of them.
LAYERS = ("base", "plugins", "passes", "export")
# The modules that vLLM imports by name, and those that name
# themselves in their messages.
RUN_BY_NAME = {"twellc.torch_tensorrt", "twellc.vllm", "twellc.vllm.model", "twellc.vllm.native"}


@functools.cache
def sources() -> dict[str, ast.Module]:
    """Return every module of the package, under the name that it is imported by."""
    found = {}
    for path in sorted((ROOT / "twellc").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if not name.startswith("twellc.plugins.lib."):
            found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imports(tree: ast.Module, known: set[str]) -> Iterator[str]:
    """Yield the modules of the package that a module imports anywhere: at its top, in functions, for types only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for each in node.names:
                inner = f"{node.module}.{each.name}"
                yield inner if inner in known else node.module


@functools.cache
def imported() -> dict[str, set[str]]:
    """Return the modules that each module imports."""
    return {name: set(imports(tree, set(sources()))) - {name} for name, tree in sources().items()}


def layer(module: str) -> int:
    folder = module.split(".")[1] if "." in module else ""
    return LAYERS.index(folder) if folder in LAYERS else len(LAYERS)


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return the nodes of a circle in a graph, or an empty list."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def by_folder(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the graph with each folder, inner ones too, as one node: of all files that lie in it itself."""

    def folder(module: str) -> str:
        return module if ROOT.joinpath(*module.split(".")).is_dir() else module.rpartition(".")[0]

    folders: dict[str, set[str]] = {}
    for module, imported in graph.items():
        folders.setdefault(folder(module), set()).update(map(folder, imported))
    return {name: imported - {name} for name, imported in folders.items()}


def test_every_folder_is_seen() -> None:
    assert {"twellc.cli", "twellc.base.errors", "twellc.passes.match.linear", "twellc.export.plan"} <= imported().keys()
    assert "twellc.plugins.ops" in imported()["twellc.passes.rewrite_ffn"]
    assert "twellc.compiling.translate" in imported()["twellc.compiling.compiler"]  # inside of a function


def test_imports_between_layers_point_down() -> None:
    upward = [
        f"{module} -> {each}" for module, found in imported().items() for each in found if layer(each) > layer(module)
    ]
    assert not upward


def test_no_circle() -> None:
    assert not circle(imported()) and not circle(by_folder(imported()))


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("twellc.base.errors", "def f():\n    from twellc.base import files"),
        ("twellc.passes.match.linear", "from twellc.passes.match.find_ffn import FfnBlock"),
        ("twellc.passes.graph.program", "import twellc.passes.match.linear"),
        ("twellc.passes.match.residual", "from twellc.passes.merge_views import merge_views"),
        ("twellc.commands.bench", "import twellc"),
    ],
)
def test_a_circle_is_found(module: str, text: str) -> None:
    planted = {**imported(), module: imported()[module] | set(imports(ast.parse(text), set(sources())))}
    assert circle(planted) or circle(by_folder(planted))


def test_modules_are_not_named_by_strings() -> None:
    """Neither mypy nor this test would see such an import."""
    named = {
        node.value.partition(":")[0]
        for tree in sources().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert named & sources().keys() - {"twellc"} == RUN_BY_NAME
