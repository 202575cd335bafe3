"""What twellc uses of transformers that is private or changes: it is there, and one file alone uses it."""

import ast
import functools
import importlib
import re
from collections.abc import Iterator

import pytest
import torch
from transformers import PrefixConstrainedLogitsProcessor

from tests import models
from tests.conftest import ROOT
from twellc.base import transformers_private
from twellc.base.transformers_private import NEEDED, allowed_by_prefix, cache_over, keep_rotary_frequencies

FILES = [file for folder in ("twellc", "passes", "export", "plugins") for file in (ROOT / folder).rglob("*.py")]
# Modules within transformers that its documentation names.
DOCUMENTED = {"transformers.modeling_outputs"}


@pytest.mark.parametrize("place", NEEDED)
def test_transformers_has(place: str) -> None:
    module, _, path = place.partition(":")
    found = functools.reduce(
        lambda owner, name: getattr(owner, name, None), path.split("."), importlib.import_module(module)
    )
    assert found is not None, f"{place} is missing, and with it: {NEEDED[place]}"


def test_objects_have() -> None:
    """Attributes that are there once an object is made."""
    function = list
    assert allowed_by_prefix(PrefixConstrainedLogitsProcessor(function, 1)) is function
    model = models.llama(num_hidden_layers=1)
    assert any(hasattr(module, "rope_type") for module in model.modules()), "rotary frequencies would change"
    assert keep_rotary_frequencies(model) is None
    kept = []

    class State:
        reported = 3

        def update(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            kept.append(keys.shape)
            return keys, values

        def length(self, tokens: int) -> int:
            return tokens

    ids = torch.ones(1, 2, dtype=torch.int64)
    model(ids, past_key_values=cache_over(State), position_ids=ids, use_cache=True)
    assert kept == [(1, 2, 2, 8)]


def taken_by(tree: ast.Module) -> Iterator[str]:
    """Yield what a file takes from modules within transformers, as `module:name`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(("transformers.", "huggingface_hub")):
            yield from (f"{node.module}:{each.name}" for each in node.names)
        if isinstance(node, ast.Import):
            yield from (f"{each.name}:" for each in node.names if each.name.startswith("transformers."))


def attributes_in(tree: ast.Module) -> set[str]:
    """Return the names of attributes in a file, those in texts for getattr and the like included."""
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call | ast.Tuple))
    texts = (each for call in calls for each in (call.args if isinstance(call, ast.Call) else call.elts))
    return names | {str(each.value) for each in texts if isinstance(each, ast.Constant)}


def test_one_file_alone_uses_it() -> None:
    room = ast.parse((ROOT / "twellc/base/transformers_private.py").read_text())
    for place in taken_by(room):
        inner = place.replace(":", ".")
        assert place in NEEDED or any(each.startswith(f"{inner}:") for each in NEEDED), f"{place} is not in NEEDED"
    known = {*dir(transformers_private), *dir(object)}
    names = {name for name in attributes_in(room) - known if re.fullmatch(r"_[a-z]\w+", name)}
    assert {"_attn_implementation", "_pad_token_tensor", "_is_stateful"} <= names
    for file in FILES:
        if file.name != "transformers_private.py" and "lib" not in file.relative_to(ROOT).parts:
            tree = ast.parse(file.read_text())
            others = {place for place in taken_by(tree) if place.partition(":")[0] not in DOCUMENTED}
            assert not others and not attributes_in(tree) & names, file
