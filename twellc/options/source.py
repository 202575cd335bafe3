"""Options that name a model, how to load and trace it, and the inputs to run it on."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from twellc.base.dtypes import DTYPES
from twellc.base.errors import UserError
from twellc.options.declared_inputs import InputDeclaration, parse_input
from twellc.options.option import SEED, option

PADDINGS = ("none", "mask")
LOGITS = ALL_LOGITS, LAST_LOGITS, GREEDY_LOGITS = ("all", "last", "greedy")
# The most tokens of a sequence in a call of a model with a cache, without --prefill-chunk.
DEFAULT_CHUNK = 2048


@dataclass(frozen=True)
class CacheOptions:
    """The key-value cache of a causal Hugging Face model.

    Attributes:
        length: The most tokens of a sequence.
        batch: The most sequences of a call.
        prefill_chunk: The most tokens of a sequence in a call; None takes 2048, or all that fit.
    """

    length: int
    batch: int = 1
    prefill_chunk: int | None = None

    @property
    def chunk(self) -> int:
        """The most tokens of a sequence in a call."""
        return min(self.length, DEFAULT_CHUNK) if self.prefill_chunk is None else self.prefill_chunk


@dataclass(frozen=True, kw_only=True)
class Example:
    """Example inputs of a module in memory, as `torch.export.export` takes them.

    Attributes:
        args: Inputs by position.
        kwargs: Inputs by name.
        dynamic_shapes: Their dynamic dimensions.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    dynamic_shapes: Any = None


@dataclass(frozen=True, kw_only=True)
class RunOptions(Example):
    """The arguments of a function of the API besides the options of a command.

    Attributes:
        progress: Receives the name of each step.
    """

    progress: Callable[[str], None] = lambda step: None


@dataclass(frozen=True)
class SourceOptions:
    """The options that name a model and load it.

    Attributes:
        model: A torch.export archive, a Hugging Face directory, an ONNX file, a pickled module or a sparse autoencoder.
        trust_model: Load a pickle, or an archive that could execute code.
        import_modules: A module to import first, such as one that registers operators of the model; several may be
            given. Its code runs.
        input_specs: An input of a pickled module, such as x:float32[batch,sequence,512]; a name is a dynamic dimension.
        in_memory: The name, for messages, of a model in memory, which `model` holds only during the command; empty for
            a file.
    """

    model: Path
    _: KW_ONLY
    trust_model: bool = option(False)
    import_modules: tuple[str, ...] = option((), "MODULE", names=("--import",))
    input_specs: tuple[InputDeclaration, ...] = option((), "NAME:DTYPE[DIM,...]", parse_input, names=("--input-spec",))
    in_memory: str = ""


@dataclass(frozen=True)
class TracingOptions(SourceOptions):
    """The options that name a model and say how to trace it.

    Attributes:
        dtype: Precision; default: the model's own, else bf16.
        padding: For a causal Hugging Face model. none, the default: its only input is input_ids. It is causal by
            structure, so prompts may be padded on the right; outputs for padding have no meaning. mask: attention_mask
            is an input, too, for padding on the left.
        logits: For a causal Hugging Face model. all, the default without --kv-cache: compute the logits of each place.
            last: only those of the last place of the sequence axis, [batch, 1, vocabulary], where a prompt padded on
            the right has padding. With --kv-cache last is the default: the logits behind the last real token of each
            sequence, [batch, vocabulary]. greedy, with --kv-cache only: just the index of the largest of these, the
            next token of each sequence, [batch]; nothing can be sampled from that.
    """

    _: KW_ONLY
    dtype: str | None = option(None, kind=tuple(DTYPES))
    padding: str | None = option(None, kind=PADDINGS)
    logits: str | None = option(None, kind=LOGITS)


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """The inputs to run a model on; at most one of these is given.

    Attributes:
        arrays: Run on these arrays, named as the model's inputs, instead of random inputs.
        text: Run a language model on this text, in UTF-8, through the tokenizer in its Hugging Face directory.
        seed: Seed of random inputs; default: 0.
    """

    arrays: Path | None = option(None, "FILE.npz", Path)
    text: Path | None = option(None, "FILE", Path)
    seed: int | None = option(None, "N", SEED)


def refuse_several_inputs(options: SampleOptions) -> None:
    """Raise `UserError` if inputs are given in more than one way."""
    ways = {"--arrays": options.arrays, "--text": options.text, "--seed": options.seed}
    given = [name for name, value in ways.items() if value is not None]
    if len(given) > 1:
        raise UserError(given[0], "the inputs are given twice", got=f"{given[1]}, too", fix="Leave one out.")


class NoChoiceError(UserError):
    """A choice of `padding` or `logits` was made for a model that offers none."""


def refuse_choices(padding: str | None, logits: str | None, target: str) -> None:
    """Raise `NoChoiceError` if a choice is made that only causal Hugging Face models offer."""
    chosen = [f"--padding {padding}"] if padding is not None else []
    chosen += [f"--logits {logits}"] if logits not in (None, ALL_LOGITS) else []
    if chosen:
        raise NoChoiceError(
            chosen[0], "only a causal Hugging Face model leaves the choice", got=target, fix="Leave it out."
        )


def refuse_tracing(options: TracingOptions, target: str) -> None:
    """Raise `UserError` if options of tracing are given for a model that is compiled already."""
    if options.dtype is not None:
        what = "what is compiled keeps its precision"
        raise UserError(f"--dtype {options.dtype}", what, got=target, expected="a model", fix="Leave it out.")
    refuse_choices(options.padding, options.logits, target)


def refuse_missing(path: Path, expected: str) -> None:
    """Fail if a file or folder is missing; a name of Hugging Face's hub, such as `org/name`, is not a path.

    Raises:
        UserError: It is missing.
    """
    if path.exists():
        return
    of_hub = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", str(path)) and not path.parent.exists()
    fix = f"Only local folders are read; fetch one by `hf download {path} --local-dir {path.name}`." if of_hub else ""
    raise UserError(str(path), "there is no such file or folder", expected=expected, fix=fix)
