"""Docstrings name what is there: parameters of functions under Args, fields of records under Attributes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.conftest import ROOT

FILES = [
    file
    for folder in ("twellc", "passes", "export", "plugins")
    for file in sorted((ROOT / folder).rglob("*.py"))
    if "lib" not in file.relative_to(ROOT).parts
]
Described = ast.FunctionDef | ast.ClassDef


def described(tree: ast.Module, section: str) -> list[tuple[Described, set[str]]]:
    """Return functions and classes with such a section, and the names in it."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, Described):
            text = (ast.get_docstring(node) or "").partition(f"{section}:\n")[2]
            entries = re.findall(r"^    (\w[\w*, ]*):", text.partition("\n\n")[0], re.MULTILINE)
            found.append((node, {name.strip() for entry in entries for name in entry.split(",")}))
    return [(node, names) for node, names in found if names]


def is_record(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(each) for each in node.decorator_list)


def fields_of(node: ast.ClassDef) -> set[str]:
    declared = [each for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)]
    return {
        ast.unparse(each.target) for each in declared if not re.search("ClassVar|KW_ONLY", ast.unparse(each.annotation))
    }


def methods_of(node: ast.ClassDef) -> set[str]:
    return {each.name for each in node.body if isinstance(each, ast.FunctionDef)}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_docstrings_name_what_is_there(file: Path) -> None:
    tree = ast.parse(file.read_text())
    for node, names in described(tree, "Args"):
        if isinstance(node, ast.FunctionDef):
            given = node.args
            every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
            parameters = {each.arg for each in every if each is not None} - {"self", "cls"}
            assert names == {name for name in parameters if name in names or not name.startswith("_")}, node.name
    for node, names in described(tree, "Attributes"):
        if isinstance(node, ast.ClassDef) and is_record(node):
            assert fields_of(node) <= names <= fields_of(node) | methods_of(node), node.name


def test_every_file_is_looked_at() -> None:
    trees = [ast.parse(file.read_text()) for file in FILES]
    assert sum(len(described(tree, "Args")) for tree in trees) > 100
    assert sum(len(described(tree, "Attributes")) for tree in trees) > 100
