"""Options that say which model is meant, and how it is loaded and traced."""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from twellc.base.errors import UserError
from twellc.options.declared_inputs import InputDeclaration

PADDINGS = ("none", "mask")
LOGITS = ALL_LOGITS, LAST_LOGITS = ("all", "last")
# The most tokens of a sequence in a call of a model with a cache, where nobody says.
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

    def settings(self) -> dict[str, int]:
        """Return the sizes as a manifest has them."""
        return {"length": self.length, "batch": self.batch, "prefill_chunk": self.chunk}

    @property
    def chunk(self) -> int:
        """The most tokens of a sequence in a call."""
        return min(self.length, DEFAULT_CHUNK) if self.prefill_chunk is None else self.prefill_chunk


@dataclass(frozen=True)
class SourceOptions:
    """Which model is meant.

    Attributes:
        model: A torch.export archive, a Hugging Face directory, an ONNX file or a pickled module.
        trust_model: Whether to load a pickle, or an archive that could execute code.
        inputs: The inputs of a pickled module.
        import_modules: Modules to import first, such as those that register operators of a model; their code runs.
        in_memory: What to call a model that is in memory, and in `model` only for the command; empty for a file.
    """

    model: Path
    _: KW_ONLY
    trust_model: bool = False
    inputs: tuple[InputDeclaration, ...] = ()
    import_modules: tuple[str, ...] = ()
    in_memory: str = ""


@dataclass(frozen=True)
class TracingOptions(SourceOptions):
    """Which model is meant, and how it is traced.

    Attributes:
        dtype: `bf16` or `fp16`; None takes the model's own, or bf16 where that is neither.
        padding: Whether a causal Hugging Face model takes no `attention_mask` (`none`) or one (`mask`); None takes the
            default of the model, `none` where it is causal.
        logits: The places whose logits a causal Hugging Face model computes: `all` or the `last` one; None takes
            `all`, and of a model with a cache `last`.
    """

    _: KW_ONLY
    dtype: str | None = None
    padding: str | None = None
    logits: str | None = None


class NoChoiceError(UserError):
    """A choice of `padding` or `logits` was made, and the model leaves none."""


def refuse_choices(padding: str | None, logits: str | None, target: str) -> None:
    """Fail if a choice is made that only causal Hugging Face models leave.

    Raises:
        NoChoiceError: It is.
    """
    chosen = [f"--padding {padding}"] if padding is not None else []
    chosen += [f"--logits {logits}"] if logits not in (None, ALL_LOGITS) else []
    if chosen:
        raise NoChoiceError(
            chosen[0], "only a causal Hugging Face model leaves the choice", got=target, fix="Leave it out."
        )


def refuse_tracing(options: TracingOptions, target: str) -> None:
    """Fail if something is asked for of a model that is compiled already and is not traced.

    Raises:
        UserError: It is.
    """
    if options.dtype is not None:
        raise UserError(
            f"--dtype {options.dtype}", "what is compiled keeps its precision", got=target, expected="a model",
            fix="Leave it out.",
        )  # fmt: skip
    refuse_choices(options.padding, options.logits, target)


def refuse_missing(path: Path, expected: str) -> None:
    """Fail if there is no such file or folder; a name of Hugging Face's hub, such as `org/name`, is no path.

    Raises:
        UserError: There is none.
    """
    if path.exists():
        return
    of_hub = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", str(path)) and not path.parent.exists()
    fix = f"Only local folders are read; fetch one by `hf download {path} --local-dir {path.name}`." if of_hub else ""
    raise UserError(str(path), "there is no such file or folder", expected=expected, fix=fix)
