"""Load a Hugging Face directory through transformers' own classes, and trace it."""

from __future__ import annotations

import functools
import inspect
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from twellc.base.errors import UserError, first_few, first_line
from twellc.base.files import temporary_folder
from twellc.base.transformers_private import causal_lm_classes, is_causal, keep_rotary_frequencies, nothing_fetched
from twellc.export.shapes import FixedSizes
from twellc.loaders import sparselm
from twellc.loaders.attention import traced_attention
from twellc.loaders.checkpoint import activations, read_checkpoint, refuse_absurd_sizes
from twellc.loaders.huggingface_inputs import Input, at_sizes, inputs_of, longest_text, vocabulary_of, written_sizes
from twellc.loaders.loaded import LoadedModel
from twellc.loaders.method import Matrix
from twellc.loaders.placing import kept_layers, notes_on, places_of, put, refuse_overflow, stand_ins
from twellc.loaders.switch import stack_experts
from twellc.loaders.tracing import keep_tensor_outputs, trace
from twellc.options.source import GREEDY_LOGITS, PADDINGS, NoChoiceError, refuse_choices
from twellc.passes.sizes.conditions import failing_assertions

ATTENTION_MODELS = "a decoder of attention layers and layers without a state, such as LlamaForCausalLM"
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_LAYERS_WITHOUT_STATE = {"mlp", "moe"}  # feed-forward blocks that are layers by themselves, as in Nemotron-H


def load_directory(
    path: Path,
    padding: str | None = None,
    logits: str = "all",
    sizes: FixedSizes = (),
    cached: bool = False,
) -> LoadedModel:
    """Load and trace a model from config.json and safetensors, in the precision of its weights.

    The program takes `input_ids` and, if the model does and may be padded on the left, `attention_mask`, int64
    [batch, sequence], and `decoder_input_ids`, int64 [batch, decoder_sequence]; of models for images and audio,
    `pixel_values`, `input_features` or `input_values`, see `inputs_of`. It keeps no key-value cache.

    Args:
        path: The directory.
        padding: `mask` gives a causal model an `attention_mask`, and `none` none; None is `none` for causal models.
        logits: `last` computes the logits of the last place of a causal model only, [batch, 1, vocabulary].
        sizes: The only sizes that are asked for; a model that does not take every size is traced for these.
        cached: Whether it is to compute what it does over a cache: see `cached_length`.

    Raises:
        UserError: The directory is incomplete, needs remote code, or holds a model that cannot be traced, or that
            leaves no choice of `padding` or `logits`.
    """
    with nothing_fetched():
        model, config, notes = open_directory(path)
        if cached:
            cached_length(model)
        return _trace(path, model, config, notes, padding, logits, sizes)


def open_directory(
    path: Path, in_dtype: Callable[[torch.dtype], torch.dtype] | None = None
) -> tuple[Any, dict[str, Any], list[str]]:
    """Return the model of a directory, in eval mode, what its config.json says, and notes for the user.

    To be called where nothing is fetched, see `nothing_fetched`.

    Args:
        path: The directory.
        in_dtype: Returns the dtype to make the model in, given that of its weights; None keeps it. Transformers keeps
            what must not be rounded in float32 whatever that is, such as rotary frequencies: `model.to` would not.

    Raises:
        UserError: The directory is incomplete, needs remote code, or holds a model that transformers cannot make.
    """
    checkpoint = read_checkpoint(path)
    matrices = checkpoint.matrices
    refuse_absurd_sizes(path, checkpoint)
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if checkpoint.config.get("model_type") == sparselm.MODEL_TYPE:
        given = checkpoint.tensors | {name: each.dequantize(torch.bfloat16) for name, each in matrices.items()}
        llama, tensors = sparselm.as_llama(path, checkpoint.config, given)
        model, notes = _make_model(path, transformers.LlamaForCausalLM, llama, tensors, {}, in_dtype)
        notes = notes_on(matrices, {}, torch.bfloat16) + notes
    else:
        model_class = class_of(path, checkpoint.config)
        config = configuration_of(path, model_class, checkpoint.config)
        model, notes = _make_model(path, model_class, config, checkpoint.tensors, matrices, in_dtype)
    return model, checkpoint.config, checkpoint.notes + notes


def class_of(path: Path, config: dict[str, Any]) -> Any:
    """Return the class of transformers that the config.json of a directory names.

    Raises:
        UserError: There is no such class.
    """
    import transformers

    architectures = config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    model_class = getattr(transformers, str(architecture), None)
    if not isinstance(model_class, type) or not issubclass(model_class, transformers.PreTrainedModel):
        what = f"transformers {transformers.__version__} has no such architecture"
        expected = "the name of a transformers class under `architectures`"
        raise UserError(str(path / "config.json"), what, got=repr(architecture), expected=expected)
    return model_class


def configuration_of(path: Path, model_class: Any, config: dict[str, Any]) -> Any:
    """Return the configuration that the config.json of a directory describes, of a class of transformers.

    Raises:
        UserError: transformers does not take it.
    """
    try:
        with temporary_folder() as folder:
            (folder / "config.json").write_text(json.dumps(config))
            return model_class.config_class.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers' and its helpers' own, for values that they do not take
        where = str(path / "config.json")
        raise UserError(where, f"transformers cannot read the configuration ({first_line(error)})") from error


def _make_model(
    path: Path,
    model_class: Any,
    config: Any,
    tensors: dict[str, torch.Tensor],
    matrices: dict[str, Matrix],
    in_dtype: Callable[[torch.dtype], torch.dtype] | None,
) -> tuple[Any, list[str]]:
    """Make a model from a configuration and tensors; and say which tensors were left out, and dequantised."""
    # As transformers finds the dtype "auto".
    stored = next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), torch.float32)
    own = config.dtype if isinstance(config.dtype, torch.dtype) else stored
    dtype = in_dtype(own) if in_dtype else own
    refuse_overflow(path, matrices, dtype)
    given = stand_ins(matrices, dtype)

    def load() -> tuple[Any, dict[str, Any]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return model_class.from_pretrained(  # type: ignore[no-any-return]
                None,
                config=config,
                state_dict=tensors | given,
                dtype=dtype if in_dtype else "auto",
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )

    try:
        model, info = load()
        places = places_of(model, given)
        lost = matrices.keys() - places.values() - info["unexpected_keys"]
        if lost:  # transformers makes other weights of them, as it merges experts: it is given them dequantized
            del model
            given |= {name: matrices[name].dequantize(dtype) for name in lost}
            model, info = load()
            places = places_of(model, {name: each for name, each in given.items() if name not in lost})
        kept = kept_layers(model_class, config, matrices, places) if matrices else {}
    except Exception as error:  # transformers raises what it likes for a configuration that does not fit
        raise _cannot_make(path, config, error) from error
    missing = sorted(info["missing_keys"])
    if missing or info["mismatched_keys"]:
        what = f"{len(missing)} weights are missing" if missing else "weights have other shapes than the config says"
        others = [f"{name} {list(stored)} for {list(made)}" for name, stored, made in sorted(info["mismatched_keys"])]
        fix = "Check that config.json and the weights belong together."
        raise UserError(str(path), what, got=first_few(missing or others), fix=fix)
    unused = sorted(info["unexpected_keys"])
    notes = notes_on(matrices, put(model, kept, matrices, places), dtype)
    if unused:
        notes.append(f"{len(unused)} tensors of the checkpoint have no place in the model: {first_few(unused)}")
    return model.eval().requires_grad_(False), notes


def _cannot_make(path: Path, config: Any, error: Exception) -> UserError:
    for place, name in activations(config.to_dict()).items():
        if isinstance(error, KeyError) and error.args == (name,):
            return UserError(
                str(path / "config.json"),
                "transformers has no such activation",
                got=f"{place} {name!r}",
                fix="Export the model with torch.export.save, from the code that computes this activation, and compile"
                " that archive.",
            )
    fix = "Check that config.json and the weights are whole and belong together."
    return UserError(str(path), f"transformers cannot load the model ({first_line(error)})", fix=fix)


def cannot_be_run(where: str, model: Any, error: Exception) -> UserError:
    """Return what to say of a model that fails in any call, as where its configuration contradicts itself."""
    fix = "Check that the numbers in config.json belong together."
    return UserError(where, f"the model cannot be run ({first_line(error)})", got=type(model).__name__, fix=fix)


def cache_argument(model: Any, where: str) -> str:
    """Return what the forward of a causal language model calls its cache of keys and values.

    Args:
        model: A model of transformers.
        where: What to call it in messages.

    Raises:
        UserError: It is another kind of model, has layers with another state, or takes no positions or cache.
    """
    if not is_causal(model) or type(model).__name__ not in causal_lm_classes().values():
        expected = "a class of transformers that generates text, such as LlamaForCausalLM"
        raise UserError(where, "is not a causal language model", expected=expected)
    taken = inspect.signature(model.forward).parameters
    others = [f"layers of {kind}" for kind in _kinds_with_another_state(model)]
    others += [f"no {each}" for each in ("input_ids", "position_ids") if each not in taken]
    argument = next((each for each in ("cache", "past_key_values") if each in taken), None)
    if argument is None or others:
        what = "its cache is not one of keys and values alone, at positions that can be given"
        raise UserError(where, what, got=first_few(others), expected=ATTENTION_MODELS, fix=other_ways(model))
    return argument


def other_ways(model: Any, compiles: bool = True) -> str:
    """Return what runs a model that takes no cache of ours; `compiles` where torch.export may trace it without one."""
    without = " `twellc compile` may take it without a cache." if compiles else ""
    return (
        f"Call twellc.optimize(model), and transformers' own generate. {_served(model)}"
        f" `twellc profile` takes it, too.{without}"
    )


def _served(model: Any) -> str:
    return f"vLLM serves it, as Twell{type(model).__name__} if it has that class (docs/serve.md)."


def _kinds_with_another_state(model: Any) -> list[str]:
    """Return which kinds of layers keep something else than keys and values, as Mamba, linear attention or `conv`."""
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    return sorted(set(kinds) - _ATTENTION_LAYERS - _LAYERS_WITHOUT_STATE)


def cached_length(model: Any) -> int:
    """Return how many tokens a cache of the model can hold, with rotary frequencies that stay as they are until there.

    From now on the model does not ask how long a text is.
    """
    longest, limit = longest_text(model), keep_rotary_frequencies(model)
    return longest if limit is None else min(longest, limit)


def settings_of(path: Path, model: Any, padding: str | None, logits: str) -> dict[str, str]:
    """Return what a model is traced by, with defaults filled in.

    Raises:
        NoChoiceError: The model leaves no choice of `padding` or `logits`, and one is made.
    """
    name, taken = type(model).__name__, inspect.signature(model.forward).parameters
    if not is_causal(model):
        refuse_choices(padding, logits, f"{path}, a {name}")
        return {}
    if logits == GREEDY_LOGITS:
        what = "only a model with a key-value cache computes tokens"
        raise UserError(f"--logits {logits}", what, fix="Leave it out, or compile the model with --kv-cache.")
    settings = {"logits": logits}
    if "attention_mask" in taken:
        settings["padding"] = padding or PADDINGS[0]
    elif padding is not None:
        raise NoChoiceError(
            f"--padding {padding}", "the model takes no attention_mask", got=f"{path}, a {name}", fix="Leave it out."
        )
    language_model = name in causal_lm_classes().values()
    if logits != "all" and not (language_model and "logits_to_keep" in taken):
        what = "the model cannot compute the logits of some places only"
        expected = "a causal language model of transformers whose forward takes logits_to_keep"
        raise NoChoiceError(f"--logits {logits}", what, got=f"{path}, a {name}", expected=expected, fix="Leave it out.")
    return settings


def _fix_arguments(model: Any, settings: dict[str, str]) -> None:
    """Give the model's forward the arguments that are not inputs of the program."""
    forward, fixed = model.forward, {"logits_to_keep": 1} if settings.get("logits") == "last" else {}

    def unpadded(input_ids: torch.Tensor) -> Any:
        # Without any mask transformers looks for packed sequences, by operations on tokens x tokens.
        return forward(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), **fixed)

    if settings.get("padding") == "none":
        model.forward = unpadded
    elif fixed:
        model.forward = functools.partial(forward, **fixed)


def _at_one_size(inputs: dict[str, Input]) -> str:
    """Return options that fix all dimensions of inputs."""
    options, fixed = [], set[str]()
    for name, each in inputs.items():
        if {dim.name for dim in each.dynamic().values()} - fixed:
            fixed |= {dim.name for dim in each.dynamic().values()}
            size = "x".join(str(dim if isinstance(dim, int) else dim.default[1]) for dim in each.shape)
            options.append(f"--optimization-profile {name}:{size}:{size}:{size}")
    return " ".join(options)


def _trace_inputs(path: Path, model: Any, inputs: dict[str, Input]) -> ExportedProgram:
    dynamic = {dim.name: dim for each in inputs.values() for dim in each.dynamic().values()}
    dims = {name: torch.export.Dim(name, min=dim.least, max=dim.largest) for name, dim in dynamic.items()}
    shapes = {name: {axis: dims[dim.name] for axis, dim in each.dynamic().items()} for name, each in inputs.items()}
    examples = {name: each.example() for name, each in inputs.items()}
    fix = "Change the model's code, export it with torch.export.save, and compile that archive."
    if any("expert" in f"{name} {type(module).__name__}".lower() for name, module in model.named_modules()):
        fix = f"Mixture-of-experts models cannot be exported as they are. {fix}"
    fix_sizes = f"Compile it for one size, such as {_at_one_size(inputs)}." if dynamic else ""
    if _kinds_with_another_state(model):
        fix, fix_sizes = (f"{text} {_served(model)}".strip() for text in (fix, fix_sizes))
    try:
        with traced_attention(model, padded="attention_mask" in inputs, longest=longest_text(model)):
            return trace(str(path), model, (), examples, shapes, fix, fix_sizes)
    except UserError as refusal:
        # Some models want inputs of one length.
        lengths = {dim.name: 16 for each in inputs.values() for axis, dim in each.dynamic().items() if axis}
        alike = {name: each.example(lengths) for name, each in inputs.items()}
        faults = [fault for given in (examples, alike) if (fault := _why_not_run(model, given)) is not None]
        if len(faults) == 2:
            raise cannot_be_run(str(path), model, faults[1]) from refusal
        raise


def _why_not_run(model: Any, arguments: dict[str, torch.Tensor]) -> Exception | None:
    try:
        with torch.no_grad():
            model(**arguments)
    except (RuntimeError, IndexError) as error:  # torch's own, where a configuration contradicts itself
        return error
    except Exception:  # transformers' own, for values of inputs that it does not take
        return None
    return None


def _trace(
    path: Path,
    model: Any,
    config: dict[str, Any],
    notes: list[str],
    padding: str | None,
    logits: str,
    sizes: FixedSizes,
) -> LoadedModel:
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False
    stack_experts(str(path), model)
    settings = settings_of(path, model, padding, logits)
    inputs = inputs_of(path, model, masked=settings.get("padding") != "none")
    _fix_arguments(model, settings)
    try:
        program = _trace_inputs(path, model, inputs)
        fixed = at_sizes(inputs, sizes) if failing_assertions(program) else inputs
    except UserError:
        fixed = at_sizes(inputs, sizes)
        if fixed == inputs:
            raise
    if fixed != inputs:
        inputs = fixed
        program = _trace_inputs(path, model, inputs)
        settings |= {"sizes": written_sizes(sizes)}
    names: dict[str, str] = {}
    ranges = {}
    for node in program.graph.find_nodes(op="placeholder"):
        for axis, dimension in inputs[node.name].dynamic().items() if node.name in inputs else ():
            symbol = str(node.meta["val"].shape[axis])
            names[symbol], ranges[symbol] = dimension.name, dimension.default
    outputs, left_out = keep_tensor_outputs(path, program)
    return LoadedModel(
        path=path,
        kind="Hugging Face directory",
        program=program,
        output_names=outputs,
        dimension_names=names,
        dimension_ranges=ranges,
        vocabulary=vocabulary_of(model, inputs),
        declared_activation=str(config.get("hidden_act") or config.get("activation_function") or ""),
        language_model=outputs[0] == "logits"
        and type(model).__name__.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM")),
        notes=notes + left_out,
        settings=settings,
    )
