"""What reports are made of, for a model that there is not."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from twellc.firing.profile import DataSource, FiringProfile, ProfiledModel
from twellc.passes.block_profile import BlockProfile
from twellc.plugins.library import TILE
from twellc.training.log import LoggedBlock, LoggedStep, LogWriter

SHA256 = "0" * 64
MODULES = tuple(f"model.layers.{index}.mlp" for index in range(3))
D_FF, TOKENS = 512, 400
REFUSAL = "the gate is silu; TwELL needs a ReLU"


def block(module: str, activity: float) -> BlockProfile:
    """A block whose neurons fire ever less often; the last eighth never does."""
    rates = activity * np.geomspace(1, 1e-3, D_FF)
    rates[-D_FF // 8 :] = 0
    fired = np.random.default_rng(0).random((TOKENS, D_FF)) < rates
    rows, tiles = fired.sum(1), fired.reshape(TOKENS, -1, TILE).sum(2)
    positions = np.zeros((32, 2), np.int64)
    bins = np.array([(position % 50).bit_length() for position in range(TOKENS)])
    for index in np.unique(bins):
        positions[index] = (bins == index).sum(), rows[bins == index].sum()
    return BlockProfile(
        module,
        "gated",
        "relu",
        fired.sum(0),
        np.bincount(rows, minlength=D_FF + 1),
        np.bincount(tiles.ravel(), minlength=TILE + 1),
        positions,
    )


def profile(modules: Sequence[str] = MODULES, name: str = "tiny") -> FiringProfile:
    blocks = {module: block(module, 0.5 / (index + 1)) for index, module in enumerate(modules)}
    model = ProfiledModel(name, "Hugging Face directory", SHA256, "bf16")
    data = [DataSource("a.txt", "text", 8, TOKENS)]
    return FiringProfile(model, data, "2026-11-25T09:30:00+00:00", "0.1.0", ["the text is short"], blocks)


def profile_of_experts(layers: int = 1, experts: int = 4) -> FiringProfile:
    """A profile of layers of experts with a shared one each; half of a layer's tokens went to one, others got none."""
    modules = [f"model.layers.{2 * layer + 1}.mixer" for layer in range(layers)]
    found = profile([f"{module}.{part}" for module in modules for part in ("experts", "shared_experts")])
    for module in modules:
        seen = found.blocks[f"{module}.experts"]
        counts = np.zeros((experts, 2), np.int64)
        counts[1] = TOKENS // 2, seen.nonzeros // 4
        counts[3] = (TOKENS, seen.nonzeros) - counts[1]
        found.blocks[f"{module}.experts"] = dataclasses.replace(seen, experts=counts)
    return found


def layers(modules: Sequence[str] = MODULES, assumed: bool = False) -> list[dict[str, Any]]:
    """What became of the blocks: TwELL runs all but the last, the first one with hot neurons."""

    def layer(index: int, module: str) -> dict[str, Any]:
        refused = index == len(modules) - 1
        times = [
            {"tokens": 1, "dense_us": 30.0, "twell_us": 10.0},
            {"tokens": 2048, "dense_us": 100.0, "twell_us": 80.0},
        ]
        found: dict[str, Any] = {
            "module": module, "variant": "gated", "activation": "silu" if refused else "relu", "d_model": 64,
            "d_ff": D_FF, "d_out": 64, "matched": not refused, "decision": "dense" if refused else "twell",
            "residual": index == 1, "reason": REFUSAL if refused else "matches", "hot": 0 if index else 128,
        }  # fmt: skip
        if not refused:
            expected = {"gpu": "H100", "assumed": assumed, "density": 0.02, "gain": 1.25, "pays_below": 0.123}
            found["expectation"] = {**expected, "times": times}
        return found

    return [layer(index, module) for index, module in enumerate(modules)]


def varied_layers(modules: Sequence[str]) -> list[dict[str, Any]]:
    """What became of the blocks of a larger model: every eighth is too dense, others differ in gain and hot neurons."""
    found = layers([*modules, "last"])[:-1]
    for index, layer in enumerate(found):
        active, gain = f"{0.2 + index / 10:.1f} %", 1.1 + index / 40
        if index % 8 == 7:
            layer |= {"decision": "dense", "hot": 0, "reason": f"{active} active, pays below 0.2 % at 2048 tokens"}
            layer["expectation"] = layer["expectation"] | {"gain": 0.9, "pays_below": 0.002}
        else:
            layer |= {"reason": f"{active} active, expected {gain:.2f} times as fast", "hot": 128 * (index % 3)}
            layer["expectation"] = layer["expectation"] | {"gain": gain}
    return found


def decisions(modules: Sequence[str] = MODULES, assumed: bool = False) -> dict[str, Any]:
    """What `twellc compile --manifest` writes, as far as a report reads it."""
    return {
        "schema": 3, "model": {"name": "tiny", "kind": "Hugging Face directory", "sha256": SHA256},
        "settings": {"dtype": "bf16", "compression": 8}, "layers": layers(modules, assumed),
        "attention": [
            {"module": module.replace("mlp", "attn"), "heads": 4, "kv_heads": 4, "width": 16, "mask": "causal",
             "form": "matmul", "reason": ""}
            for module in modules
        ],
        "linear": [
            {"modules": [module.replace("mlp", f"attn.{name}") for name in names], "d_in": 64,
             "widths": [64, 32][: len(names)],
             "norm": norm, "residual": norm == "none", "matched": True, "decision": "twell", "reason": "matches"}
            for module in modules for names, norm in ((["q", "k"], "rms"), (["o"], "none"))
        ],
        "notes": ["compiled by a test"], "warnings": [f"layer {modules[-1]}: the gate is silu. Left dense"],
        "backend": {"name": "tensorrt", "version": "10.6"},
    }  # fmt: skip


def bench_result(modules: Sequence[str] = MODULES) -> dict[str, Any]:
    """What `twellc bench --json` prints, of calls of 1 and 2048 tokens."""

    def standings(gain: float) -> dict[str, Any]:
        times = {"dense eager": 130.0, "dense packed": 100.0, "dense FP8": 80.0}
        times |= dict.fromkeys(("twell", "twell eager"), 100 / gain)
        return {
            "times": {label: {"median_us": us, "p10_us": us - 1, "p90_us": us + 1} for label, us in times.items()},
            "errors": dict.fromkeys(times), "failed": {"dense compiled": "it was left out"}, "joules_per_token": {},
        }  # fmt: skip

    return {
        "schema": 1, "model": "tiny", "dtype": "bf16", "inputs": "a.txt: 2048 tokens", "layers": layers(modules),
        "machine": {"gpu": "NVIDIA H100", "multiprocessors": 132, "python": "3.13", "torch": "2.13", "cuda": "13.0",
                    "twellc": "0.1.0"},
        "notes": ["energy was not measured"],
        "results": [
            {"shape": f"1x{tokens}", "tokens": tokens, "densities": [0.01] * len(modules),
             "model": standings(1 + (gain - 1) / 2), "blocks": standings(gain),
             "by_block": [
                 {"module": module, "dense": "dense packed", "dense_us": 40.0 + index, "twell_us": 32.0}
                 for index, module in enumerate(modules[:-1])
             ]}
            for tokens, gain in ((1, 2.0), (2048, 1.5))
        ],
    }  # fmt: skip


def write_log(path: Path, modules: list[str], widths: list[int], steps: int = 3, **changes: Any) -> Path:
    writer = LogWriter(path, "tiny", "ab", [LoggedBlock(*each) for each in zip(modules, widths, strict=True)], 0)
    for step in range(1, steps + 1):
        shares = [0.9 / (step + place) for place in range(len(modules))]
        values: dict[str, Any] = {"step": 1000 * step, "loss": 6.0 / step, "l1": 1.0, "coefficient": 0.1, "tokens": 64}
        values |= {"density": shares, "dead": [share / 3 for share in shares], "relu": 1.0, "reinitialised": 0}
        writer.add(LoggedStep(**{**values, **changes}))
    return path
