"""Load a torch.export archive, after looking for parts of it that could execute code.

`torch.export.load` is not a safe format by itself: it unpickles sample inputs, weights and constants that say so, loads
native code, and evaluates expressions. An archive that holds nothing but tensors as plain bytes, a graph of registered
operators and plain integer expressions is loaded; any other needs the user's word.
"""

from __future__ import annotations

import functools
import importlib
import io
import json
import math
import re
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from twellc.base.bounds import refuse_bomb, refuse_unfolding
from twellc.base.changes import Change, Changed
from twellc.base.errors import UnregisteredOperatorsError, UserError, first_line
from twellc.base.torch_private import FakeTensor, PyTorchFileReader, pt2_package, serialize
from twellc.base.transformers_private import GROUPED_PRODUCT, grouped_product_op
from twellc.loaders.expressions import LARGEST_POWER, Extent, extent_of, is_size_expression
from twellc.loaders.loaded import LoadedModel
from twellc.loaders.tracing import keep_tensor_outputs
from twellc.passes.graph.program import quiet_torch

_PLAIN_RECORDS = re.compile(
    r"archive_format|archive_version|byteorder|\.data/(version|serialization_id)|\.format_version|\.storage_alignment"
    r"|models/[^/]+\.json|data/sample_inputs/[^/]+\.pt"
    r"|data/weights/(weight_\d+|[^/]+_weights_config\.json)|data/constants/(tensor_\d+|[^/]+_constants_config\.json)"
)
# Descriptions of input and output containers, JSON in strings, and what makes pytree import a module there.
_CONTAINERS = ("in_spec", "out_spec", "context")
_IMPORTS = ("__enum__", "default_factory_module")
_NAME = "model"  # of the program that torch.export.save writes
_AGAIN = "Copy it again, or export the model again."
# The module of an output class of transformers, which tells pytree of it; the class is named in JSON in a string.
_OUTPUT_CLASS = re.compile(rb'\\"type\\": \\"(transformers\.(?:modeling_outputs|models\.\w+\.modeling_\w+))\.')
_TARGET = re.compile(r'"target": "torch\.ops\.(\w+\.\w+)')
_OPERATORS = re.compile(
    r"torch\.ops\.[\w.]+|torch\.sym_\w+|math\.(trunc|floor|ceil|sqrt)"
    r"|_operator\.(getitem|eq|ne|le|ge|lt|gt|neg|pos|mul|add|sub|floordiv|mod|pow|truediv|and_|or_|lshift|rshift)"
)
_ARITHMETIC = re.compile(r"(?:_operator|math|torch)\.(?!getitem)(\w+)")
_NUMBERS = {"as_int", "as_float", "as_bool", "as_sym_int", "as_sym_float", "as_sym_bool", "as_none"}


def load_archive(path: Path, trust_model: bool) -> LoadedModel:
    """Load a torch.export archive.

    Raises:
        UserError: It is damaged, of a torch that this one cannot read, or could execute code and is not trusted.
    """
    refuse_bomb(path)
    if not trust_model:
        _refuse_code(path)
    _refuse_damage(path)
    try:
        with quiet_torch(), _on_the_cpu():
            _import_from_transformers(path)
            # Not torch.export.load: after a failure that looks for pickles of older formats, which no scan saw.
            programs = pt2_package.load_pt2(path).exported_programs
    except Exception as error:  # any damage inside surfaces here, as whatever the deserializer stumbles over
        missing = _unregistered(path)
        if missing:
            raise UnregisteredOperatorsError(str(path), missing) from error
        if "set_grad_enabled" in first_line(error):
            raise UserError(
                str(path),
                f"it switches gradients on within its graph, which torch {torch.__version__} cannot load"
                f" ({first_line(error)})",
                fix="Export the model under torch.no_grad(); let torch.utils.checkpoint have use_reentrant=False.",
            ) from error
        what = f"torch {torch.__version__} cannot load the archive ({first_line(error)})"
        fix = "Export it again, with this version of torch, from a model that returns tensors, tuples or dicts."
        raise UserError(str(path), what, fix=fix) from error
    program, notes = _one_of(path, programs)
    _forget_ranges_of_expressions(program)
    names, left_out = keep_tensor_outputs(path, program)
    return LoadedModel(path, "torch.export archive", program, names, notes=notes + left_out)


def _one_of(path: Path, programs: dict[str, ExportedProgram]) -> tuple[ExportedProgram, list[str]]:
    """Return the program that torch.export.save writes, or the only one under another name, with a note.

    Raises:
        UserError: There is none, or there are several under other names.
    """
    if _NAME in programs:
        others = sorted(programs.keys() - {_NAME})
        return programs[_NAME], [f"other programs of the archive are left out: {', '.join(others)}"] if others else []
    if len(programs) != 1:
        raise UserError(
            str(path),
            "the archive does not hold one program",
            got=", ".join(map(repr, sorted(programs))) or "none",
            expected=f"one, or one that is called {_NAME!r}",
            fix="Write each program to a separate archive, with torch.export.save(program, FILE).",
        )
    ((name, program),) = programs.items()
    return program, [f"the program of the archive is called {name!r}"]


def _on_the_cpu() -> Changed:
    """Let torch load an archive's tensors, and its graph's devices, on the CPU: torch.export.load maps none.

    Other threads load theirs as ever meanwhile.
    """
    thread = threading.get_ident()

    def here(instead: Any, original: Any, *arguments: Any, **named: Any) -> Any:
        return (instead if threading.get_ident() == thread else original)(*arguments, **named)

    patched: list[Change] = [
        (serialize, "deserialize_device", lambda device: torch.device("cpu")),
        (pt2_package, "deserialize_device", lambda device: torch.device("cpu")),
        (torch, "load", functools.partial(torch.load, map_location="cpu")),
    ]
    partial = functools.partial
    return Changed(*((owner, name, partial(here, instead, getattr(owner, name))) for owner, name, instead in patched))


def _targets(path: Path) -> set[str]:
    """Return the names of torch's operators in an archive's graphs; none of an archive that is damaged."""
    try:
        archive = PyTorchFileReader(str(path))
        texts = [archive.get_record(name).decode() for name in archive.get_all_records() if name.startswith("models/")]
    except (RuntimeError, ValueError):
        return set()
    return {name for text in texts for name in _TARGET.findall(text)}


def _unregistered(path: Path) -> list[str]:
    """Return the operators of an archive that no package has registered here, as `namespace.name`."""
    missing = []
    for target in sorted(_targets(path)):
        namespace, name = target.split(".")[:2]
        if not hasattr(getattr(torch.ops, namespace), name):
            missing.append(f"{namespace}.{name}")
    return list(dict.fromkeys(missing))


def _import_from_transformers(path: Path) -> None:
    """Import the modules of transformers, and no others, with the classes of the archive's results and its op."""
    archive = PyTorchFileReader(str(path))
    for record in archive.get_all_records():
        if record.startswith("models/"):
            text = archive.get_record(record)
            for module in sorted(set(_OUTPUT_CLASS.findall(text))):
                importlib.import_module(module.decode())
            if GROUPED_PRODUCT.encode() in text:
                grouped_product_op()


def _forget_ranges_of_expressions(program: ExportedProgram) -> None:
    """Undo what torch.export.load does for a dimension such as 2*s: it notes its range among those of symbols.

    torch itself stumbles over that as soon as it functionalises the program.
    """
    for node in program.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        shape_env = value.fake_mode.shape_env if isinstance(value, FakeTensor) else None
        if shape_env is not None:
            for expression in [key for key in shape_env.var_to_range if not key.is_Symbol]:
                del shape_env.var_to_range[expression]
            return


def _refuse_damage(path: Path) -> None:
    """Compare every record with its checksum, which torch does not."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except Exception as error:  # zipfile raises what it likes for a damaged archive
        raise UserError(str(path), f"the archive is damaged ({first_line(error)})", fix=_AGAIN) from error
    if damaged is not None:
        raise UserError(str(path), f"the archive is damaged: {damaged!r} does not have its checksum", fix=_AGAIN)


def _size_of_records(path: Path, archive: Any) -> int:
    """Return how many bytes an archive unfolds to, as its reader or, of torch 2.11, Python's zipfile says."""
    if hasattr(archive, "get_record_size"):
        return sum(map(archive.get_record_size, archive.get_all_records()))
    with zipfile.ZipFile(path) as read:
        return sum(each.file_size for each in read.infolist())


def _refuse_code(path: Path) -> None:
    try:
        # The reader that torch.export.load uses: a crafted file can show other records to Python's zipfile.
        archive = PyTorchFileReader(str(path))
        refuse_unfolding(str(path), "what is compressed in it", _size_of_records(path, archive), path.stat().st_size)
        reason = next(_code_in(archive), None)
        refuse_unfolding(str(path), "its tensors", _size_of_tensors(archive), path.stat().st_size)
    except (RuntimeError, OSError, ValueError, KeyError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise UserError(str(path), f"the archive is damaged ({first_line(error)})", fix=_AGAIN) from error
    if reason is not None:
        what = f"loading this archive could execute code, or not end: {reason}"
        raise UserError(str(path), what, fix="If you trust its author, add --trust-model.")


def _code_in(archive: Any) -> Iterator[str]:
    """Yield a reason for every part of the archive that is more than tensors and a plain graph."""
    records = archive.get_all_records()
    if len({record.lower() for record in records}) != len(records):
        yield "several of its records have the same name"
    for record in records:
        if not _PLAIN_RECORDS.fullmatch(record):
            yield f"it holds {record!r}"
        elif record.startswith("data/sample_inputs/"):
            try:
                torch.load(io.BytesIO(archive.get_record(record)), map_location="cpu", weights_only=True)
            except Exception:  # anything that the restricted unpickler does not take
                yield "its sample inputs are pickled objects"
        elif record.endswith("_config.json"):
            for entry, meta in json.loads(archive.get_record(record))["config"].items():
                if meta.get("use_pickle") is not False:
                    yield f"the tensor {entry!r} is pickled"
        elif record.startswith("models/"):
            yield from _code_in_graph(json.loads(archive.get_record(record)))


def _size_of_tensors(archive: Any) -> int:
    """Return about how many bytes the weights and constants have by their shapes: two for each element."""
    size = 0
    for record in archive.get_all_records():
        if record.endswith("_config.json"):
            for meta in json.loads(archive.get_record(record))["config"].values():
                sizes = (meta.get("tensor_meta") or {"sizes": []})["sizes"]
                size += 2 * math.prod(dim["as_int"] for dim in sizes)
    return size


def _code_in_graph(model: Any) -> Iterator[str]:
    pending = [model]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending.extend(value)
        if not isinstance(value, dict):
            continue
        pending.extend(value.values())
        if isinstance(value.get("nodes"), list):
            yield from _endless_in(value["nodes"])
        pending.extend(json.loads(value[key]) for key in _CONTAINERS if isinstance(value.get(key), str))
        if any(key in value for key in _IMPORTS):
            yield "its inputs or outputs hold objects of other modules"
        for key in ("target", "as_operator"):
            if isinstance(value.get(key), str) and "inputs" in value and not _OPERATORS.fullmatch(value[key]):
                yield f"its graph calls {value[key]!r}"
        expressions = [value.get("expr_str"), value.get("as_expr")]
        if isinstance(value.get("guards_code"), list) and value["guards_code"]:
            expressions += value["guards_code"]
        for expression in expressions:
            if isinstance(expression, str) and not is_size_expression(expression):
                yield f"its graph holds the expression {expression[:200]!r}"


def _endless_in(nodes: list[Any]) -> Iterator[str]:
    """Yield a reason for every node of a graph that computes more with sizes than sizes need."""
    extents: dict[str, Extent] = {}
    for node in nodes:
        found = _ARITHMETIC.fullmatch(node["target"])
        if found is None:
            continue
        arguments = [each["arg"] for each in node["inputs"]]
        if any(len(each) != 1 or not each.keys() <= _NUMBERS for each in arguments):
            yield f"{node['target']!r} is given something else than numbers"
            return
        values = [next(iter(each.values())) for each in arguments]
        values = [value.get("as_int", value.get("as_float", value)) if isinstance(value, dict) else value
                  for value in values]  # fmt: skip
        operands = [
            extents.get(value["as_name"], Extent())
            if isinstance(value, dict) else Extent(int(value).bit_length() if isinstance(value, int) else 64)
            for value in values
        ]  # fmt: skip
        name, exponent = found[1], None
        if name in ("pow", "lshift"):
            exponent = values[1]
            if not isinstance(exponent, int | float) or not abs(exponent) <= LARGEST_POWER:
                yield f"{node['target']!r} is given the exponent {str(exponent)[:40]}"
                return
        extent = extent_of(name, operands, exponent)
        if not extent.bounded:
            yield f"{node['name']!r} comes to a number that is no size"
            return
        for output in node["outputs"]:
            extents |= {each["as_name"]: extent for each in output.values() if isinstance(each, dict)}
