"""Options that say which model is meant, how it is loaded and traced, and on which inputs it runs."""

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
# The most tokens of a sequence in a call of a model with a cache, unless --prefill-chunk says it.
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
        args: Those by position.
        kwargs: Those by name.
        dynamic_shapes: Which of their dimensions are dynamic.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    dynamic_shapes: Any = None


@dataclass(frozen=True, kw_only=True)
class RunOptions(Example):
    """What a function of the API takes besides the options of its command.

    Attributes:
        progress: Receives the name of each step.
    """

    progress: Callable[[str], None] = lambda step: None


@dataclass(frozen=True)
class SourceOptions:
    """Which model is meant.

    Attributes:
        model: A torch.export archive, a Hugging Face directory, an ONNX file, a pickled module or a sparse autoencoder.
        trust_model: Load a pickle, or an archive that could execute code.
        import_modules: A module to import first, such as one that registers operators of the model; several may be
            given. Its code runs.
        input_specs: An input of a pickled module, such as x:float32[batch,sequence,512]; a name stands for a dynamic
            dimension.
        in_memory: What to call a model that is in memory, and in `model` only for the command; empty for a file.
    """

    model: Path
    _: KW_ONLY
    trust_model: bool = option(False)
    import_modules: tuple[str, ...] = option((), "MODULE", names=("--import",))
    input_specs: tuple[InputDeclaration, ...] = option((), "NAME:DTYPE[DIM,...]", parse_input, names=("--input-spec",))
    in_memory: str = ""


@dataclass(frozen=True)
class TracingOptions(SourceOptions):
    """Which model is meant, and how it is traced.

    Attributes:
        dtype: Precision; default: the model's own, else bf16.
        padding: Of a causal Hugging Face model. none, the default: its only input is input_ids. It is causal by
            structure, so prompts may be padded on the right, and what it gives for padding has no meaning. mask:
            attention_mask is an input, too, for padding on the left.
        logits: Of a causal Hugging Face model. all, the default without --kv-cache: compute the logits of each place.
            last: of the last place of the sequence axis only, [batch, 1, vocabulary], where a prompt padded on the
            right has padding. With --kv-cache last is the default: the logits behind the last real token of each
            sequence, [batch, vocabulary]. greedy, with --kv-cache only: of these just which one is the largest, the
            next token of each sequence, [batch]; nothing can be drawn from that.
    """

    _: KW_ONLY
    dtype: str | None = option(None, kind=tuple(DTYPES))
    padding: str | None = option(None, kind=PADDINGS)
    logits: str | None = option(None, kind=LOGITS)


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Which inputs a model is run on; at most one of these is given.

    Attributes:
        arrays: Run on these arrays, named as the model's inputs, instead of random inputs.
        text: Run a language model on this text, in UTF-8, through the tokenizer in its Hugging Face directory.
        seed: Seed of random inputs; default: 0.
    """

    arrays: Path | None = option(None, "FILE.npz", Path)
    text: Path | None = option(None, "FILE", Path)
    seed: int | None = option(None, "N", SEED)


class NoChoiceError(UserError):
    """A choice of `padding` or `logits` was made, and the model leaves none."""


def refuse_choices(padding: str | None, logits: str | None, target: str) -> None:
    """Raise `NoChoiceError` if a choice is made that only causal Hugging Face models leave."""
    chosen = [f"--padding {padding}"] if padding is not None else []
    chosen += [f"--logits {logits}"] if logits not in (None, ALL_LOGITS) else []
    if chosen:
        raise NoChoiceError(
            chosen[0], "only a causal Hugging Face model leaves the choice", got=target, fix="Leave it out."
        )


def refuse_tracing(options: TracingOptions, target: str) -> None:
    """Raise `UserError` if something is asked for of a model that is compiled already and is not traced."""
    if options.dtype is not None:
        what = "what is compiled keeps its precision"
        raise UserError(f"--dtype {options.dtype}", what, got=target, expected="a model", fix="Leave it out.")
    refuse_choices(options.padding, options.logits, target)


def refuse_missing(path: Path, expected: str) -> None:
    """Fail if there is no such file or folder; a name of Hugging Face's hub, such as `org/name`, is not a path.

    Raises:
        UserError: There is none.
    """
    if path.exists():
        return
    of_hub = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", str(path)) and not path.parent.exists()
    fix = f"Only local folders are read; fetch one by `hf download {path} --local-dir {path.name}`." if of_hub else ""
    raise UserError(str(path), "there is no such file or folder", expected=expected, fix=fix)
