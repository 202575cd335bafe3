"""Docstrings name what is there: parameters of functions under Args, fields of records under Attributes."""

import ast
import re

from tests.test_imports import sources

Described = ast.FunctionDef | ast.ClassDef


def described(tree: ast.Module, section: str) -> list[tuple[Described, set[str]]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, Described):
            text = (ast.get_docstring(node) or "").partition(f"{section}:\n")[2]
            entries = re.findall(r"^    (\w[\w*, ]*):", text.partition("\n\n")[0], re.MULTILINE)
            found.append((node, {name.strip() for entry in entries for name in entry.split(",")}))
    return [(node, names) for node, names in found if names]


def fields_of(node: ast.ClassDef) -> set[str]:
    declared = [each for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)]
    return {
        ast.unparse(each.target) for each in declared if not re.search("ClassVar|KW_ONLY", ast.unparse(each.annotation))
    }


def test_arguments_are_those_of_the_function() -> None:
    found = [(file, *each) for file, tree in sources().items() for each in described(tree, "Args")]
    assert len(found) > 100
    for file, node, names in found:
        if isinstance(node, ast.FunctionDef):
            given = node.args
            every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
            parameters = {each.arg for each in every if each is not None} - {"self", "cls"}
            expected = {name for name in parameters if name in names or not name.startswith("_")}
            assert names == expected, f"{file}: {node.name}"


def test_attributes_are_those_of_the_record() -> None:
    found = [(file, *each) for file, tree in sources().items() for each in described(tree, "Attributes")]
    assert len(found) > 100
    for file, node, names in found:
        if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(each) for each in node.decorator_list):
            methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
            assert fields_of(node) <= names <= fields_of(node) | methods, f"{file}: {node.name}"
