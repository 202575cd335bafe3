"""What tests of `twellc check` share: graphs of models, changed graphs, and what is found of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
from torch import Tensor

from twellc.base.arrays import to_numpy, to_torch
from twellc.checks.checking import CheckResult, check
from twellc.compiling.summary import TranslationSummary
from twellc.compiling.translate import translate_to_file
from twellc.options.commands import CheckOptions, CompileOptions


def translate(model: Path, path: Path, **options: Any) -> TranslationSummary:
    return translate_to_file(CompileOptions(model, backend="none", **options), path, lambda step: None)


def graph_of(model: Path, path: Path, **options: Any) -> Path:
    translate(model, path, **options)
    return path


def run_check(model: Path, candidate: Path, **options: Any) -> CheckResult:
    return check(CheckOptions(model, candidate, **options), lambda step: None)


def changed(graph: Path, to: Path, change: Callable[[onnx.ModelProto], object]) -> Path:
    model = onnx.load(graph)
    change(model)
    onnx.save(model, to)
    return to


def set_tensor(model: onnx.ModelProto, name: str, change: Callable[[Tensor], object]) -> None:
    (tensor,) = (each for each in model.graph.initializer if each.name == name)
    values = to_torch(onnx.numpy_helper.to_array(tensor))
    change(values)
    tensor.CopyFrom(onnx.numpy_helper.from_array(to_numpy(values), name))


def twell_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.domain == "twell"]
