"""twellc compiles transformers with sparse feed-forward layers into TensorRT engines.

docs/api.md shows the functions below; importing this imports neither torch nor anything else that is large.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from twellc.base.version import __version__

if TYPE_CHECKING:
    from twellc import features, plugins, torch_tensorrt, training, vllm
    from twellc.api import bench, check, compile, inspect, merge_profiles, profile, report, rewrite
    from twellc.base.errors import UserError
    from twellc.benchmarking.result import BenchResult
    from twellc.checks.checking import CheckResult
    from twellc.compiling.manifest import Manifest
    from twellc.eager.optimization import optimize, optimized_blocks, restore
    from twellc.firing.profile import FiringProfile
    from twellc.generation.llm import LLM
    from twellc.generation.sampling import CompletionOutput, GenerationStats, RequestOutput, SamplingParams
    from twellc.inspection.description import Inspection
    from twellc.loaders.autoencoder_files import load_autoencoder
    from twellc.options.commands import BenchOptions, CheckOptions, CompileOptions, InspectOptions, ProfileOptions
    from twellc.passes.block_profile import BlockProfile
    from twellc.passes.pipeline import Rewritten
    from twellc.passes.report import Layer

__all__ = [
    "LLM",
    "BenchOptions",
    "BenchResult",
    "BlockProfile",
    "CheckOptions",
    "CheckResult",
    "CompileOptions",
    "CompletionOutput",
    "FiringProfile",
    "GenerationStats",
    "InspectOptions",
    "Inspection",
    "Layer",
    "Manifest",
    "ProfileOptions",
    "RequestOutput",
    "Rewritten",
    "SamplingParams",
    "UserError",
    "__version__",
    "bench",
    "check",
    "compile",
    "features",
    "inspect",
    "load_autoencoder",
    "merge_profiles",
    "optimize",
    "optimized_blocks",
    "plugins",
    "profile",
    "report",
    "restore",
    "rewrite",
    "torch_tensorrt",
    "training",
    "vllm",
]

_HOMES = {
    "api": ("bench", "check", "compile", "inspect", "merge_profiles", "profile", "report", "rewrite"),
    "benchmarking.result": ("BenchResult",),
    "firing.profile": ("FiringProfile",),
    "checks.checking": ("CheckResult",),
    "options.commands": ("BenchOptions", "CheckOptions", "CompileOptions", "InspectOptions", "ProfileOptions"),
    "base.errors": ("UserError",),
    "generation.llm": ("LLM",),
    "generation.sampling": ("CompletionOutput", "GenerationStats", "RequestOutput", "SamplingParams"),
    "inspection.description": ("Inspection",),
    "loaders.autoencoder_files": ("load_autoencoder",),
    "compiling.manifest": ("Manifest",),
    "eager.optimization": ("optimize", "optimized_blocks", "restore"),
    "passes.block_profile": ("BlockProfile",),
    "passes.pipeline": ("Rewritten",),
    "passes.report": ("Layer",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
_MODULES = ("features", "plugins", "torch_tensorrt", "training", "vllm")


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"twellc.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'twellc' has no attribute {name!r}")
    return getattr(importlib.import_module(f"twellc.{_HOME[name]}"), name)
