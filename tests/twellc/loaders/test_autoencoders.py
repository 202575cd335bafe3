"""Sparse autoencoders and transcoders, by their formulas, by the commands, and by sae-lens itself."""

import copy
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import twellc
from tests.conftest import Cli
from tests.tolerance import assert_same
from twellc.base.errors import UserError
from twellc.loaders.autoencoder_files import load_autoencoder
from twellc.loaders.loaded import fingerprint
from twellc.loaders.model import load_model
from twellc.options.source import TracingOptions
from twellc.passes.graph.execution import Runner

D_IN, D_SAE, D_OUT, KEPT = 24, 96, 16, 7
Weights = dict[str, Tensor]


def weights(d_out: int = D_IN, **others: Tensor) -> Weights:
    """Draw weights so that about a sixth of the features fire."""
    made = {"W_enc": torch.randn(D_IN, D_SAE) / 5, "W_dec": torch.randn(D_SAE, d_out) / 9, "b_dec": torch.randn(d_out)}
    return made | {"b_enc": torch.randn(D_SAE) - 1} | others


def threshold() -> Tensor:
    return torch.rand(D_SAE)


def sae_lens(path: Path, made: Weights, **config: object) -> Path:
    path.mkdir(exist_ok=True)
    save_file(made, path / "sae_weights.safetensors")
    settings = {"architecture": "standard", "dtype": "float32", "normalize_activations": "none"}
    (path / "cfg.json").write_text(json.dumps({**settings, "metadata": {"sae_lens_version": "6.54.12"}, **config}))
    return path


def decoded(features: Tensor, w: Weights) -> Tensor:
    return features @ w["W_dec"] + w["b_dec"]


def above(pre: Tensor, bound: Tensor) -> Tensor:
    return pre.relu() * (pre > bound)


def largest(pre: Tensor) -> Tensor:
    return pre.relu() * (pre >= pre.sort(dim=-1).values[..., -KEPT, None])


def gemma_scope(folder: Path, w: Weights) -> Path:
    np.savez(folder / "params.npz", **{name: each.numpy() for name, each in w.items()})
    return folder


def gemma_scope_2(folder: Path, w: Weights) -> Path:
    names = {"W_enc": "w_enc", "W_dec": "w_dec", "W_skip": "affine_skip_connection"}
    save_file({names.get(name, name): each for name, each in w.items()}, folder / "params.safetensors")
    (folder / "config.json").write_text('{"architecture": "jump_relu"}')
    return folder


def qwen_scope(folder: Path, w: Weights) -> Path:
    path = folder / f"SAE-Res-Qwen3-1.7B-Base-W32K-L0_{KEPT}" / "layer3.sae.pt"
    path.parent.mkdir()
    torch.save({**w, "W_enc": w["W_enc"].transpose(0, 1), "W_dec": w["W_dec"].t().contiguous()}, path)
    return path


def gated_parts() -> Weights:
    return {"b_gate": torch.randn(D_SAE) - 1, "b_mag": torch.randn(D_SAE), "r_mag": torch.randn(D_SAE) / 3}


def plain(x: Tensor, w: Weights) -> Tensor:
    return x @ w["W_enc"] + w["b_enc"]


def normalised(x: Tensor, w: Weights) -> Tensor:
    mean, deviation = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
    return decoded(plain((x - mean) / (deviation + 1e-5), w).relu(), w) * deviation + mean


def gated(x: Tensor, w: Weights) -> Tensor:
    p = x @ w["W_enc"]
    return decoded((p + w["b_gate"] > 0) * (p * w["r_mag"].exp() + w["b_mag"]).relu(), w)


def by_decoder_norm(x: Tensor, w: Weights) -> Tensor:
    norms = w["W_dec"].norm(dim=-1)
    return decoded(above(plain(x, w) * norms, w["topk_threshold"]) / norms, w)


# How each kind is written, its weights, and what it computes.
KINDS: dict[str, tuple[Callable[..., Path], Callable[[], Weights], Callable[[Tensor, Weights], Tensor]]] = {
    "params.npz of Gemma Scope": (
        gemma_scope, lambda: weights(threshold=threshold()), lambda x, w: decoded(above(plain(x, w), w["threshold"]), w)
    ),
    "affine transcoder of Gemma Scope 2": (
        gemma_scope_2, lambda: weights(D_OUT, threshold=threshold(), W_skip=torch.randn(D_IN, D_OUT)),
        lambda x, w: decoded(above(plain(x, w), w["threshold"]), w) + x @ w["W_skip"],
    ),
    "dict of Qwen-Scope": (qwen_scope, weights, lambda x, w: decoded(largest(plain(x, w)), w)),
    "sae-lens": (sae_lens, weights, lambda x, w: decoded(plain(x - w["b_dec"], w).relu(), w)),
    "sae-lens, normalised": (
        lambda folder, w: sae_lens(folder, w, apply_b_dec_to_input=False, normalize_activations="layer_norm"),
        weights, normalised,
    ),
    "sae-lens, gated": (
        # The last is of top-k alone.
        lambda folder, w: sae_lens(
            folder, w, architecture="gated", apply_b_dec_to_input=False, rescale_acts_by_decoder_norm=True
        ),
        lambda: {name: each for name, each in weights(**gated_parts()).items() if name != "b_enc"}, gated,
    ),
    "sae-lens, batch top-k in training": (
        lambda folder, w: sae_lens(
            folder, w, architecture="batchtopk", apply_b_dec_to_input=False, rescale_acts_by_decoder_norm=True
        ),
        lambda: weights(topk_threshold=torch.tensor(0.3, dtype=torch.float64)), by_decoder_norm,
    ),
    "sae-lens before 6, top-k": (
        lambda folder, w: sae_lens(
            folder, w, dtype="torch.float32", normalize_activations=False, apply_b_dec_to_input=False,
            activation_fn_str="topk", activation_fn_kwargs={"k": KEPT},
        ),
        weights, lambda x, w: decoded(largest(plain(x, w)), w),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_computes_its_formula(kind: str, tmp_path: Path) -> None:
    write, draw, compute = KINDS[kind]
    made, x = draw(), torch.randn(9, D_IN)
    model = load_model(TracingOptions(write(tmp_path, made)))
    assert model.kind == "sparse autoencoder"
    (y,) = Runner(model.program)({"x": x})
    assert_same(y, compute(x.double(), {name: each.double() for name, each in made.items()}).float())


@pytest.mark.parametrize("kind", ["params.npz of Gemma Scope", "dict of Qwen-Scope", "sae-lens"])
def test_features_without_a_dense_tensor(kind: str, tmp_path: Path) -> None:
    write, draw, _ = KINDS[kind]
    module, x = load_autoencoder(write(tmp_path, draw())), torch.randn(3, 5, D_IN)
    features = module.encode(x)
    z = x - module.block.decoder.bias if module.centred else x
    assert_same(features.to_sparse_csr().to_dense(), module.block.features(z).flatten(end_dim=1))
    y = twellc.features.decode(features, module.block.decoder.weight.t(), module.block.decoder.bias)
    assert_same(y, module(x))
    one = module.encode(x[0, 0])
    assert torch.equal(one.indices, features.indices[: features.offsets[1]]) and one.leading == ()


def test_nothing_is_above_a_threshold_that_is_nan(tmp_path: Path) -> None:
    made = weights(threshold=threshold())
    made["threshold"][::3] = torch.nan
    module, x = load_autoencoder(gemma_scope(tmp_path, made)), torch.randn(9, D_IN)
    assert_same(module.encode(x).to_sparse_csr().to_dense(), module.block.features(x))


CASTS: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "bfloat16": lambda module: module.bfloat16(),
    "half and float": lambda module: module.half().float(),
    "to(dtype)": lambda module: module.to(torch.bfloat16),
    "to(device, dtype)": lambda module: module.to("cpu", torch.float16),
    "to(tensor)": lambda module: module.to(torch.zeros(1, dtype=torch.bfloat16)),
    "type": lambda module: module.type(torch.bfloat16),
    "double": lambda module: module.double(),
    "its parent": lambda module: torch.nn.ModuleList([module]).bfloat16()[0],
    "copied": lambda module: copy.deepcopy(module.bfloat16()),
    "pickled": lambda module: pickle.loads(pickle.dumps(module.bfloat16())),
    "optimized": lambda module: twellc.optimize(module, layers="all").bfloat16(),
}


@pytest.mark.parametrize("cast", CASTS)
def test_thresholds_stay_float32(cast: str, tmp_path: Path) -> None:
    """Just below z, which is above all of them only so; in bfloat16 they would be z."""
    made = weights(threshold=torch.linspace(1.005, 1.0051, D_SAE), W_enc=torch.zeros(D_IN, D_SAE))
    made["W_enc"][0], made["b_enc"] = 1, torch.zeros(D_SAE)
    module = CASTS[cast](load_autoencoder(gemma_scope(tmp_path, made)))
    block = module.get_submodule("block")
    x = torch.zeros(1, D_IN, dtype=block.get_parameter("encoder.weight").dtype)
    x[0, 0] = 1.0078125
    assert torch.equal(block.get_parameter("threshold"), made["threshold"])
    assert len(module.encode(x).indices) == D_SAE  # type: ignore[operator]
    active = decoded(torch.full((1, D_SAE), 1.0078125), made)
    assert (module(x) - active).abs().max() < 0.1 < (active - made["b_dec"]).abs().max()
    block.load_state_dict(block.state_dict())
    assert torch.equal(block.get_parameter("threshold"), made["threshold"])


def test_thresholds_in_files_of_another_dtype(tmp_path: Path) -> None:
    folder = sae_lens(tmp_path / "sae", weights(threshold=threshold()), architecture="jumprelu", dtype="bfloat16")
    module, (layer,) = load_autoencoder(folder), twellc.inspect(folder).layers
    stored = load_file(folder / "sae_weights.safetensors")["threshold"]
    assert torch.equal(module.block.threshold, stored) and module.block.encoder.weight.dtype == torch.bfloat16
    assert layer.decision == "twell"
    found = twellc.rewrite(folder)
    assert any(each.dtype == stored.dtype and torch.equal(each, stored) for each in found.program.state_dict.values())


@pytest.mark.parametrize(
    ("folders", "kept"),
    [
        ("sweep-L0_10/SAE-Res-W64-L0_5", 5), ("SAE-Res-W64-L0_5/run-L0_10", 5), ("mine-L0_6/more", 6),
        ("models--Qwen--SAE-Res-W64-L0_50/snapshots/abc", 50),
    ],
)  # fmt: skip
def test_k_is_that_of_the_folder_named_as_the_repository(folders: str, kept: int, tmp_path: Path) -> None:
    path = qwen_scope(tmp_path, weights())
    (tmp_path / folders).mkdir(parents=True)
    assert load_autoencoder(path.rename(tmp_path / folders / path.name)).block.k == kept


def test_a_file_that_is_none_is_not_read(tmp_path: Path) -> None:
    """Of a dict of weights only their names are looked at."""
    torch.save({"weight": torch.zeros(1 << 24)}, tmp_path / "model.pt")

    def read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = read()
    with pytest.raises(UserError, match="holds no module; got weights by their names"):
        load_model(TracingOptions(tmp_path / "model.pt"))
    assert read() - before < 1 << 20


def other_folder(name: str, config: str | None, file: str, made: Weights) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / name / file
        path.parent.mkdir(parents=True)
        if config is not None:
            (folder / name / "config.json").write_text(config)
        (save_file if file.endswith(".safetensors") else torch.save)(made, path)
        return folder / name

    return write


def other_file(name: str, made: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(made, folder / name)
        return folder / name

    return write


LINEAR = {"encoder.weight": torch.randn(D_SAE, D_IN), "decoder.weight": torch.randn(D_IN, D_SAE)}
OTHERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "dictionary_learning": (
        other_folder("ae", '{"trainer": {"k": 8}}', "ae.pt", LINEAR | {"b_dec": torch.zeros(D_IN)}),
        "dictionary_learning",
    ),
    "hook_z": (other_file("gpt2-small_L5_Hcat_z.pt", weights()), "sae-lens"),
    "hook_z in a folder of k": (other_file("hook_z-L0_50/gpt2-small_L5_Hcat_z.pt", weights()), "sae-lens"),
    "sparsify": (other_folder("layers.5", None, "sae.safetensors", LINEAR | {"W_dec": torch.zeros(2)}), "sparsify"),
    "Llama Scope": (other_folder("L5R-8x", None, "checkpoints/final.safetensors", LINEAR), "another library"),
    "OpenMOSS": (other_folder("L5R", '{"sae_type": "sae"}', "sae_weights.safetensors", LINEAR), "another library"),
    "OpenAI": (
        other_file("5.pt", {"pre_bias": torch.zeros(2), "latent_bias": torch.zeros(2), "activation": "TopK"}),
        "OpenAI's sparse_autoencoder",
    ),
    "Goodfire": (
        other_file("l19.pth", {"encoder_linear.weight": torch.zeros(2), "decoder_linear.weight": torch.zeros(2)}),
        "Goodfire",
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_of_other_libraries(kind: str, tmp_path: Path) -> None:
    write, library = OTHERS[kind]
    path = write(tmp_path)
    for load in (load_autoencoder, twellc.inspect):
        with pytest.raises(UserError, match=f"in a form that is not read; got weights as {library} names") as refusal:
            load(path)
        assert "Qwen-Scope). Write cfg.json and sae_weights.safetensors as sae-lens does" in str(refusal.value)


def test_by_the_commands(cli: Cli, tmp_path: Path) -> None:
    folder = sae_lens(tmp_path / "sae", weights())
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).standard_normal((50, D_IN), np.float32))
    onnx = tmp_path / "sae.onnx"
    assert cli("compile", folder, "--backend", "none", "--onnx", onnx).exit_code == 0
    assert cli("check", folder, onnx).exit_code == 0
    firing = tmp_path / "sae.profile"
    assert cli("profile", folder, "--data", tmp_path / "x.npz", "-o", firing).exit_code == 0
    assert list(twellc.FiringProfile.read(firing).blocks) == ["block"]
    first = fingerprint(folder)
    sae_lens(folder, weights())
    assert fingerprint(folder) != first


def test_arrays_belong_to_the_fingerprint(tmp_path: Path) -> None:
    prints = {fingerprint(gemma_scope(tmp_path, weights(threshold=threshold()))) for _ in range(2)}
    assert len(prints) == 2


@pytest.mark.parametrize("kind", ["params.npz of Gemma Scope", "affine transcoder of Gemma Scope 2", "sae-lens, gated"])
def test_blocks_are_taken(kind: str, tmp_path: Path) -> None:
    write, draw, _ = KINDS[kind]
    folder = write(tmp_path, draw())
    (layer,) = twellc.inspect(folder).layers
    assert (layer.module, layer.variant, layer.activation, layer.decision) == ("block", "plain", "fatrelu", "twell")
    module, x = load_autoencoder(folder), torch.randn(9, D_IN)
    before = module(x)
    assert len(twellc.optimized_blocks(twellc.optimize(module))) == 1
    assert_same(module(x), before)


def test_top_k_stays_dense_by_name(tmp_path: Path) -> None:
    (layer,) = twellc.inspect(qwen_scope(tmp_path, weights())).layers
    assert layer.reason == "activation is top-k; TwELL needs a ReLU family"


def test_nan_stays(tmp_path: Path) -> None:
    module = load_autoencoder(gemma_scope(tmp_path, weights(threshold=threshold())))
    assert module(torch.full((1, D_IN), torch.nan)).isnan().all()


def of_sae_lens(**config: object) -> Callable[[Path], Path]:
    return lambda folder: sae_lens(folder, weights(), **config)


def cut_npz(folder: Path) -> Path:
    gemma_scope(folder, weights(threshold=threshold()))
    content = (folder / "params.npz").read_bytes()
    (folder / "params.npz").write_bytes(content[: len(content) // 2])
    return folder


def pickled_array(folder: Path) -> Path:
    np.savez(folder / "params.npz", W_enc=np.array([object()]), allow_pickle=True)
    return folder


def nameless(folder: Path) -> Path:
    path = qwen_scope(folder, weights())
    return path.rename(folder / path.name)


def nested(folder: Path) -> Path:
    folder.mkdir()
    return folder


BAD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "kind": (
        of_sae_lens(architecture="temporal"),
        "cfg.json: this kind of autoencoder is not read; got temporal; expected stand",
    ),
    "activation": (of_sae_lens(activation_fn_str="tanh-relu"), "this activation is not read; got 'tanh-relu'"),
    "normalisation": (of_sae_lens(normalize_activations="z"), "this normalisation is not read; got 'z'"),
    "dtype": (of_sae_lens(dtype="int8"), "not a dtype; got 'int8'"),
    "k": (of_sae_lens(architecture="topk", k=D_SAE + 1), "k is not a number of features; got 97"),
    "not a bool": (
        of_sae_lens(apply_b_dec_to_input="false"),
        "cfg.json: apply_b_dec_to_input does not fit; got 'fal",
    ),
    "b_dec of y": (
        of_sae_lens(architecture="transcoder", apply_b_dec_to_input=True),
        "expected false, as it is a tra",
    ),
    "no threshold": (of_sae_lens(architecture="jumprelu"), "other weights than its kind has; got no threshold; exp"),
    "shapes": (lambda folder: gemma_scope(folder, weights(D_OUT, threshold=threshold())), "do not fit each other"),
    "no matrix": (
        lambda folder: qwen_scope(folder, weights(W_enc=torch.randn(D_IN, D_SAE, 1))),
        "do not fit each other",
    ),
    "cut": (cut_npz, "cannot be read as an .npz file"),
    "pickled": (pickled_array, "pickled objects are never loaded"),
    "no k": (nameless, "no folder says how many features of a token are kept, and the file does not; expected one fol"),
    "two k": (
        lambda folder: qwen_scope(nested(folder / "SAE-Res-W64-L0_9"), weights()),
        "different numbers of features that are kept; got SAE-Res-W64-L0_9, SAE-Res-Qwen3-1.7B-Base-W32K-L0_7; exp",
    ),
    "weights without their settings": (
        lambda folder: sae_lens(folder / "sae", weights()) / "sae_weights.safetensors",
        "is read with cfg.json beside it. Name the folder that holds both.",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(case: str, tmp_path: Path) -> None:
    write, message = BAD[case]
    with pytest.raises(UserError) as refusal:
        load_model(TracingOptions(write(tmp_path)))
    assert message in str(refusal.value)


# ---- sae-lens itself ----

# Run in the Python that has it: writes an autoencoder of each kind, and what it makes of x.
SCRIPT = """
import itertools, sys, pathlib, torch
from sae_lens.registry import get_sae_class, get_sae_training_class
folder, (d_in, d_sae, d_out, kept) = pathlib.Path(sys.argv[1]), map(int, sys.argv[2:])
torch.manual_seed(0)
kinds = ("standard", "jumprelu", "topk", "gated", "transcoder", "skip_transcoder", "jumprelu_transcoder",
         "jumprelu_skip_transcoder", "batchtopk", "matryoshka_batchtopk")
for kind, norm in itertools.product(kinds, ("none", "constant_norm_rescale", "layer_norm")):
    trained = "batchtopk" in kind
    kept_here = {"k": kept} if "topk" in kind else {}
    given = {"d_out": d_out, "apply_b_dec_to_input": False} if "transcoder" in kind else kept_here
    given |= {"matryoshka_widths": [d_sae // 2, d_sae]} if "matryoshka" in kind else {}
    module, config = (get_sae_training_class if trained else get_sae_class)(kind)
    sae = module(config(d_in=d_in, d_sae=d_sae, normalize_activations=norm, **given)).eval()
    for parameter in sae.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    if trained:
        sae.topk_threshold += 0.4
    name = f"{kind}, {norm}"
    sae.save_model(folder / name)
    if trained:
        sae.save_inference_model(folder / f"{name}, saved")
        sae = get_sae_class("jumprelu")[0].load_from_disk(folder / f"{name}, saved")
    x = torch.randn(9, d_in)
    with torch.no_grad():
        torch.save({"x": x, "features": sae.encode(x), "y": sae(x)}, folder / f"{name}.pt")
"""


@pytest.mark.slow
@pytest.mark.sae_lens
def test_as_sae_lens(tmp_path: Path) -> None:
    python = os.environ.get("TWELLC_SAE_LENS_PYTHON", sys.executable)
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    sizes = map(str, (D_IN, D_SAE, D_OUT, KEPT))
    subprocess.run([python, "-c", SCRIPT, tmp_path, *sizes], env={**own, "HF_HUB_OFFLINE": "1"}, check=True)
    found = sorted(tmp_path.glob("*.pt"))
    assert len(found) == 30
    for file in found:
        expected: dict[str, Any] = torch.load(file)
        for folder in tmp_path.glob(f"{file.stem}*/"):
            module = load_autoencoder(folder)
            assert_same(module(expected["x"]), expected["y"])
            if module.normalised == "none":
                x = expected["x"] - module.block.decoder.bias if module.centred else expected["x"]
                assert_same(module.block.features(x), expected["features"])
