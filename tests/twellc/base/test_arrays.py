"""Tensors as arrays of NumPy."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
HOME = ROOT / "twellc" / "base" / "arrays.py"
PRODUCT = sorted(
    path
    for folder in ("twellc", "passes", "export", "plugins")
    for path in (ROOT / folder).rglob("*.py")
    if path != HOME
)


@pytest.mark.parametrize("call", ["numpy", "__array__"])
def test_one_place_turns_tensors_into_arrays(call: str) -> None:
    """A weight may lie on a GPU, where `Tensor.numpy` fails; `to_numpy` moves it before."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in PRODUCT
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == call
    ]
    assert len(PRODUCT) > 100 and found == []
