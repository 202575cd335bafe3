"""Load a Hugging Face directory through transformers' own classes, and trace it."""

from __future__ import annotations

import functools
import inspect
import json
import warnings
from pathlib import Path
from typing import Any

import torch

from twellc.base.errors import UserError, first_few, first_line
from twellc.loaders import sparselm
from twellc.loaders.attention import traced_attention
from twellc.loaders.huggingface_inputs import inputs_of, longest_text, text_config
from twellc.loaders.loaded import LoadedModel, NoChoiceError, refuse_choices
from twellc.loaders.tracing import keep_tensor_outputs, trace
from twellc.options.commands import PADDINGS


def load_directory(path: Path, padding: str | None = None, logits: str = "all") -> LoadedModel:
    """Load and trace a model from config.json and safetensors, in the precision of its weights.

    The program takes `input_ids` and, if the model does and may be padded on the left, `attention_mask`, int64
    [batch, sequence], and `decoder_input_ids`, int64 [batch, decoder_sequence]; of models for images and audio,
    `pixel_values`, `input_features` or `input_values`, see `inputs_of`. It keeps no key-value cache.

    Args:
        path: The directory.
        padding: `mask` gives a causal model an `attention_mask`, and `none` none; None is `none` for causal models.
        logits: `last` computes the logits of the last place of a causal model only, [batch, 1, vocabulary].

    Raises:
        UserError: The directory is incomplete, needs remote code, or holds a model that cannot be traced, or that
            leaves no choice of `padding` or `logits`.
    """
    config = _read_config(path)
    files = _weight_files(path)
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if config.get("model_type") == sparselm.MODEL_TYPE:
        model, notes = _load_weights(transformers.LlamaForCausalLM, path, **sparselm.as_llama(config, files))
        return _trace(path, model, config, notes, padding, logits)
    architectures = config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    model_class = getattr(transformers, str(architecture), None)
    if architecture is None or not isinstance(model_class, type):
        raise UserError(
            str(path / "config.json"),
            f"transformers {transformers.__version__} has no such architecture",
            got=repr(architecture),
            expected="the name of a transformers class under `architectures`",
        )
    model, notes = _load_weights(model_class, path)
    return _trace(path, model, config, notes, padding, logits)


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        raise UserError(str(path), "no config.json in this folder", expected="a Hugging Face directory")
    try:
        config = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(str(file), f"cannot be read as JSON ({error})") from error
    if not isinstance(config, dict):
        raise UserError(str(file), "is not a JSON object")
    if "auto_map" in config:
        raise UserError(
            str(file), "the model needs remote code (auto_map)",
            expected="an architecture of transformers itself",
            fix="Export it with torch.export.save and compile that archive.",
        )  # fmt: skip
    return config


def _weight_files(path: Path) -> list[Path]:
    """Return the weights' files after checking that they are safetensors inside of the folder."""
    index = path / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.is_file():
        try:
            files = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise UserError(str(index), f"is not an index of weights ({error!r})") from error
    for name in sorted(map(str, files)):
        file = path / name
        if Path(name).name != name or name in (".", ".."):
            raise UserError(str(index), "names a file outside of its folder", got=repr(name))
        if not file.is_file():
            raise UserError(str(file), "the weights are missing", expected="safetensors")
        file.open("rb").close()  # safetensors says of a file that may not be read that it is missing
    return [path / str(name) for name in sorted(files)]


def _load_weights(model_class: Any, path: Path, **instead: Any) -> tuple[Any, list[str]]:
    """Load a model from its folder, or from a configuration and tensors given `instead`; and say what was left out."""
    source = {"pretrained_model_name_or_path": None if instead else path, "dtype": "auto", **instead}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, info = model_class.from_pretrained(
                **source, local_files_only=True, use_safetensors=True, output_loading_info=True
            )
    except Exception as error:  # transformers and safetensors raise what they like for a damaged folder
        raise UserError(
            str(path), f"transformers cannot load the model ({first_line(error)})",
            fix="Check that config.json and the weights are whole and belong together.",
        ) from error  # fmt: skip
    missing = sorted(info["missing_keys"])
    if missing or info["mismatched_keys"]:
        what = f"{len(missing)} weights are missing" if missing else "weights have other shapes than the config says"
        raise UserError(
            str(path), what, got=first_few(missing or sorted(info["mismatched_keys"])),
            fix="Check that config.json and the weights belong together.",
        )  # fmt: skip
    unused = sorted(info["unexpected_keys"])
    note = f"{len(unused)} tensors of the checkpoint have no place in the model: {first_few(unused)}"
    return model.eval().requires_grad_(False), [note] if unused else []


def _is_causal(model: Any) -> bool:
    """Say whether a model is a decoder alone, so that no token sees a later one, by the registers of transformers."""
    from transformers.models.auto import modeling_auto

    config, kind = model.config, model.config.model_type
    if kind not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or config.is_encoder_decoder:
        return False
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        return False
    base = str(modeling_auto.MODEL_MAPPING_NAMES.get(kind))
    may_be_an_encoder = kind in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES or base.endswith("Encoder")
    return bool(getattr(config, "is_decoder", False)) or not may_be_an_encoder


def _settings(path: Path, model: Any, padding: str | None, logits: str) -> dict[str, str]:
    """Return what a model is traced by, with defaults filled in.

    Raises:
        NoChoiceError: The model leaves no choice of `padding` or `logits`, and one is made.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name, taken = type(model).__name__, inspect.signature(model.forward).parameters
    if not _is_causal(model):
        refuse_choices(padding, logits, f"{path}, a {name}")
        return {}
    settings = {"logits": logits}
    if "attention_mask" in taken:
        settings["padding"] = padding or PADDINGS[0]
    elif padding is not None:
        raise NoChoiceError(
            f"--padding {padding}", "the model takes no attention_mask", got=f"{path}, a {name}", fix="Leave it out."
        )
    language_model = name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    if logits != "all" and not (language_model and "logits_to_keep" in taken):
        raise NoChoiceError(
            f"--logits {logits}", "the model cannot compute the logits of some places only", got=f"{path}, a {name}",
            expected="a causal language model of transformers whose forward takes logits_to_keep", fix="Leave it out.",
        )  # fmt: skip
    return settings


def _fix_arguments(model: Any, settings: dict[str, str]) -> None:
    """Give the model's forward the arguments that are no inputs of the program."""
    forward, fixed = model.forward, {"logits_to_keep": 1} if settings.get("logits") == "last" else {}

    def unpadded(input_ids: torch.Tensor) -> Any:
        # Without any mask transformers looks for packed sequences, by operations on tokens x tokens.
        return forward(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), **fixed)

    if settings.get("padding") == "none":
        model.forward = unpadded
    elif fixed:
        model.forward = functools.partial(forward, **fixed)


def _trace(
    path: Path, model: Any, config: dict[str, Any], notes: list[str], padding: str | None, logits: str
) -> LoadedModel:
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False
    settings = _settings(path, model, padding, logits)
    inputs = inputs_of(path, model, masked=settings.get("padding") != "none")
    dynamic = {dim.name: dim for each in inputs.values() for dim in each.dynamic().values()}
    dims = {name: torch.export.Dim(name, min=dim.least, max=dim.largest) for name, dim in dynamic.items()}
    shapes = {name: {axis: dims[dim.name] for axis, dim in each.dynamic().items()} for name, each in inputs.items()}
    fix = (
        "Control flow that depends on values cannot be exported. Where only a size must not vary, export the model at"
        " one size with torch.export.save, and compile that archive."
    )
    if any("expert" in f"{name} {type(module).__name__}".lower() for name, module in model.named_modules()):
        fix = f"Mixture-of-experts models cannot be exported as they are. {fix}"
    _fix_arguments(model, settings)
    with traced_attention(padded="attention_mask" in inputs, longest=longest_text(model)):
        program = trace(path, model, {name: each.example() for name, each in inputs.items()}, shapes, fix)
    experts = next((node for node in program.graph.nodes if "grouped_mm" in str(node.target)), None)
    if experts is not None:
        raise UserError(
            str(path), "mixture-of-experts models cannot be compiled as they are",
            got=f"the operation {experts.target}",
            fix='Its experts would stay dense. Call model.set_experts_implementation("batched_mm"), for which ONNX has'
            " operators, export the model with torch.export.save, and compile that archive.",
        )  # fmt: skip
    names: dict[str, str] = {}
    ranges = {}
    for node in program.graph.find_nodes(op="placeholder"):
        for axis, dimension in inputs[node.name].dynamic().items() if node.name in inputs else ():
            symbol = str(node.meta["val"].shape[axis])
            names[symbol], ranges[symbol] = dimension.name, dimension.default
    outputs, left_out = keep_tensor_outputs(path, program)
    has_tokens = any(name.endswith("input_ids") for name in inputs)
    vocabulary = getattr(text_config(model), "vocab_size", None) if has_tokens else None
    return LoadedModel(
        path=path,
        kind="Hugging Face directory",
        program=program,
        output_names=outputs,
        dimension_names=names,
        dimension_ranges=ranges,
        vocabulary=vocabulary,
        declared_activation=str(config.get("hidden_act") or config.get("activation_function") or ""),
        language_model=outputs[0] == "logits"
        and type(model).__name__.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM")),
        notes=notes + left_out,
        settings=settings,
    )
