"""Private names of torch: all are looked up in one file, and an error says which is missing."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad

from twellc.base import torch_private

ROOT = Path(torch_private.__file__).parents[2]


def test_torch_has_every_name() -> None:
    missing = []
    for name in torch_private.NAMES:
        try:
            getattr(torch_private, name)
        except ImportError as error:
            missing.append(str(error))
    assert missing == []


def test_torch_has_every_attribute() -> None:
    program = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
    torch_private.set_guards(program, ["True"])
    assert torch_private.guards_of(program) == ["True"]
    assert torch_private.schema_of(torch.ops.aten.add_.Tensor).is_mutable
    assert torch_private.forward_mode_level() == -1
    with forward_ad.dual_level():
        assert torch_private.forward_mode_level() == 0


def test_type_promotion_is_as_known() -> None:
    """What `promoting_by_known_values` puts in the place of torch's own."""
    interpreter = torch_private.type_promotion._TypePromotionInterpreter
    for name in ("run_node", "_set_current_node", "_maybe_promote_node"):
        assert hasattr(interpreter, name), f"torch {torch.__version__} has no {name}"
    source = inspect.getsource(interpreter.run_node)
    assert "self._maybe_promote_node(n, rule)" in source and "return super().run_node(n)" in source, source
    with torch_private.promoting_by_known_values():
        assert torch_private.type_promotion._TypePromotionInterpreter is not interpreter
    assert torch_private.type_promotion._TypePromotionInterpreter is interpreter


def test_a_missing_name_is_called_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_private.NAMES, "gone", "torch._subclasses.fake_tensor.Gone")
    with pytest.raises(ImportError, match=r"torch .* has no torch\._subclasses\.fake_tensor\.Gone; .* 2\.11 to 2\.13"):
        from twellc.base.torch_private import gone  # noqa: F401
    with pytest.raises(AttributeError, match="no attribute 'unknown'"):
        _ = torch_private.unknown


def test_private_torch_is_in_one_file() -> None:
    sources = [path for part in ("twellc", "passes", "export", "plugins") for path in (ROOT / part).rglob("*.py")]
    found = {f"{path}: {name}" for path in sources for name in private_names(path.read_text(encoding="utf-8"))}
    assert {each for each in found if "torch_private.py" not in each} == set()


def private_names(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            names = [text] if re.fullmatch(r"torch\.[\w.]+", text) else []
            if node.attr in ("_schema", "_guards_code", "_current_level"):
                yield text
        for name in names:
            parts = name.split(".")
            private = any(part.startswith("_") and not part.startswith("__") for part in parts[1:])
            if parts[0] == "torch" and parts[1:2] != ["ops"] and private:
                yield name
