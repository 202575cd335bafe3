"""Options that commands share, and the kinds of their values. Importing this imports nothing large."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from twellc.base.dtypes import DTYPES
from twellc.base.errors import UserError
from twellc.base.files import output_path
from twellc.options.samples import LARGEST_SEED
from twellc.options.source import LOGITS, PADDINGS
from twellc.plugins.block import DEFAULT_COMPRESSION
from twellc.plugins.library import COMPRESSIONS

_Function = TypeVar("_Function", bound=Callable[..., Any])


class FilePath(click.Path):
    """A path that every library can open."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        """Return the path of a text, or fail."""
        if not value:
            self.fail("an empty text is no path.", parameter, context)
        try:
            str(value).encode()
        except UnicodeEncodeError:
            self.fail(f"{value!a} is no UTF-8, which some libraries insist on. Rename it.", parameter, context)
        return super().convert(value, parameter, context)


class OutputPath(FilePath):
    """A path of a file to write."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        """Return the path of a text, or fail."""
        path = super().convert(value, parameter, context)
        output_path(max(parameter.opts, key=len) if parameter else "", value)
        return path


class Share(click.FloatRange):
    """A number from 0 to 1. Any range of click's takes NaN."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> float:
        """Return the number of a text, or fail."""
        share: float = super().convert(value, parameter, context)
        if math.isnan(share):
            self.fail(f"{value} is not in the range 0<=x<=1.", parameter, context)
        return share


class Compression(click.Choice[str]):
    """A TwELL compression factor."""

    def __init__(self) -> None:
        super().__init__(tuple(map(str, COMPRESSIONS)))

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        """Return the factor of a text, or fail."""
        return int(super().convert(str(value), parameter, context))


def _together(*options: Callable[[_Function], _Function]) -> Callable[[_Function], _Function]:
    """Return a decorator that gives a command several options, in this order."""

    def decorate(function: _Function) -> _Function:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


# See `SourceOptions`.
source_options = _together(
    click.option("--trust-model", is_flag=True, help="Load a pickle, or an archive that could execute code."),
    click.option(
        "--import", "import_modules", multiple=True, metavar="MODULE",
        help="A module to import first, such as one that registers operators of the model; several may be given. Its "
        "code runs.",
    ),
    click.option(
        "--input", "inputs", multiple=True, metavar="NAME:DTYPE[DIM,...]",
        help="An input of a pickled module, such as x:float32[batch,sequence,512]; a name stands for a dynamic "
        "dimension.",
    ),
)  # fmt: skip
# See `TracingOptions`.
tracing_options = _together(
    click.option("--dtype", type=click.Choice(tuple(DTYPES)), help="Precision; default: the model's own, else bf16."),
    click.option(
        "--padding", type=click.Choice(PADDINGS),
        help="Of a causal Hugging Face model. none, the default: its only input is input_ids. It is causal by "
        "structure, so prompts may be padded on the right, and what it gives for padding has no meaning. mask: "
        "attention_mask is an input, too, for padding on the left.",
    ),
    click.option(
        "--logits", type=click.Choice(LOGITS),
        help="Of a causal Hugging Face model. all, the default without --kv-cache: compute the logits of each place. "
        "last: of the last place of the sequence axis only, [batch, 1, vocabulary], where a prompt padded on the right "
        "has padding. With --kv-cache last is the default: the logits behind the last real token of each sequence, "
        "[batch, vocabulary].",
    ),
    source_options,
)  # fmt: skip
# See `DecisionOptions`.
decision_options = _together(
    click.option(
        "--layers", default="auto", show_default=True, metavar="auto|all|none|REGEX",
        help="Which matching blocks to rewrite; REGEX is searched in their module paths.",
    ),
    click.option(
        "--compression", type=Compression(),
        help="TwELL compression factor: a tile of 256 neurons keeps 256/N - 1 activations of a token; more of them are "
        "kept apart. It changes speed and memory, never results. Default: "
        f"{DEFAULT_COMPRESSION}, or with --calibration the largest with which few tiles have more.",
    ),
    click.option(
        "--calibration", type=FilePath(), metavar="PROFILE",
        help="How often the model's neurons fire, from `twellc profile`. By it is decided what becomes of each block, "
        "and which of its neurons are hot: these are moved to the front, which is exact.",
    ),
    click.option(
        "--prune-dead", is_flag=True,
        help="Approximate: remove the neurons that never fired in the profile. Other inputs may need them; check "
        "measures what that does.",
    ),
    click.option(
        "--prune-check", type=FilePath(), metavar="PROFILE",
        help="A second profile, of other data: report which share of its non-zeros the removed neurons have.",
    ),
    click.option(
        "--target-gpu", metavar="GPU|FILE",
        help="The GPU that speed is expected and decided for: h100, h200, or a data file of twellc bench "
        "--measure-gpu. Default: the GPU at hand, if its times are known, else h100.",
    ),
)  # fmt: skip
# See `SampleOptions`.
sample_options = _together(
    click.option(
        "--inputs", "arrays", type=FilePath(), metavar="FILE.npz",
        help="Run on these arrays, named as the model's inputs, instead of random inputs.",
    ),
    click.option(
        "--text", type=FilePath(), metavar="FILE",
        help="Run a language model on this text, in UTF-8, through the tokenizer in its Hugging Face directory.",
    ),
    click.option(
        "--seed", type=click.IntRange(0, LARGEST_SEED), metavar="N", help="Seed of random inputs; default: 0."
    ),
)  # fmt: skip
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


def refuse_other_options(context: click.Context, option: str, taken: Collection[str], why: str) -> None:
    """Fail if options are given that have no meaning beside another one.

    Args:
        context: That of the command.
        option: The other one.
        taken: Names of the parameters that have one, its own included.
        why: Why the others have none.

    Raises:
        UserError: There are some.
    """
    for parameter in context.command.params:
        name = parameter.name or ""
        if name not in taken and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise UserError(max(parameter.opts, key=len), why, got=option, fix="Leave one out.")
