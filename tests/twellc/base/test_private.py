"""Private parts of torch and transformers, and what turns tensors into arrays: all is there, each in one file alone."""

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterator

import pytest
import torch
from torch.autograd import forward_ad
from transformers import PrefixConstrainedLogitsProcessor

from tests import models
from tests.test_imports import sources
from twellc.base import torch_private, transformers_private
from twellc.base.transformers_private import NEEDED, allowed_by_prefix, cache_over, keep_rotary_frequencies

# Modules within transformers that its documentation names.
DOCUMENTED = {"transformers.modeling_outputs"}


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


def test_torch_notes_less_and_compiles_later() -> None:
    """What `without_notes` and `compiled_when_run` put in the place of torch's own; nothing of it stays."""

    def exported() -> tuple[torch.export.ExportedProgram, dict[str, object]]:
        program = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
        (node,) = program.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
        return program, node.meta

    with torch_private.without_notes(), torch_private.compiled_when_run():
        program, noted = exported()
    assert noted.get("tensor_meta") is None and noted["val"] is not None
    assert not hasattr(program.graph_module, "_code")
    assert program.graph_module(torch.tensor([-1.0, 2.0]))[0].tolist() == [0, 2]
    program, noted = exported()
    assert noted.get("tensor_meta") is not None and hasattr(program.graph_module, "_code")


def test_a_missing_name_is_called_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_private.NAMES, "gone", "torch._subclasses.fake_tensor.Gone")
    with pytest.raises(ImportError, match=r"torch .* has no torch\._subclasses\.fake_tensor\.Gone; .* 2\.11 to 2\.13"):
        from twellc.base.torch_private import gone  # noqa: F401
    with pytest.raises(AttributeError, match="no attribute 'unknown'"):
        _ = torch_private.unknown


def test_private_torch_is_in_one_file() -> None:
    found = {f"{file}: {name}" for file, tree in sources().items() for name in private_names(tree)}
    assert {each for each in found if "torch_private" not in each.partition(":")[0]} == set()


def private_names(tree: ast.Module) -> Iterator[str]:
    """Yield the private names of torch that a file imports or reads, but for its operators."""
    for node in ast.walk(tree):
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


def test_private_transformers_is_in_one_file() -> None:
    room = sources()["twellc.base.transformers_private"]
    for place in taken_by(room):
        inner = place.replace(":", ".")
        assert place in NEEDED or any(each.startswith(f"{inner}:") for each in NEEDED), f"{place} is not in NEEDED"
    known = {*dir(transformers_private), *dir(object)}
    names = {name for name in attributes_in(room) - known if re.fullmatch(r"_[a-z]\w+", name)}
    assert {"_attn_implementation", "_pad_token_tensor", "_is_stateful"} <= names
    for file, tree in sources().items():
        if file != "twellc.base.transformers_private":
            others = {place for place in taken_by(tree) if place.partition(":")[0] not in DOCUMENTED}
            assert not others and not attributes_in(tree) & names, file


@pytest.mark.parametrize("call", ["numpy", "__array__"])
def test_one_place_turns_tensors_into_arrays(call: str) -> None:
    """A weight may lie on a GPU, where `Tensor.numpy` fails; `to_numpy` moves it before."""
    found = [
        f"{file}:{node.lineno}"
        for file, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == call
    ]
    assert [place for place in found if not place.startswith("twellc.base.arrays:")] == []
