"""The inputs of transformers' models, from their classes and configurations."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from twellc.base.errors import UserError
from twellc.export.shapes import FixedSizes
from twellc.loaders.loaded import DimensionRange


@dataclass(frozen=True)
class Dynamic:
    """A dynamic dimension.

    Attributes:
        name: Its name.
        traced: The size to trace it with. Those of one model differ: torch.export gives equal sizes one symbol.
        least, largest: What the model takes.
        default: (min, opt, max) of the default optimization profile.
    """

    name: str
    traced: int
    least: int
    largest: int
    default: DimensionRange


@dataclass(frozen=True)
class Input:
    """An input: its dtype, and its shape of sizes and dynamic dimensions."""

    dtype: torch.dtype
    shape: tuple[int | Dynamic, ...]

    def example(self, sizes_of: Mapping[str, int] | None = None) -> torch.Tensor:
        """Return a tensor to trace with; integers are ones, which are token ids and masks of every model.

        Args:
            sizes_of: Sizes of dynamic dimensions by name, in the place of those that they are traced with.
        """
        given = sizes_of or {}
        sizes = [dim if isinstance(dim, int) else given.get(dim.name, dim.traced) for dim in self.shape]
        if not self.dtype.is_floating_point:
            return torch.ones(sizes, dtype=self.dtype)
        return torch.randn(sizes, generator=torch.Generator().manual_seed(0)).to(self.dtype)

    def dynamic(self) -> dict[int, Dynamic]:
        """Return the dynamic dimensions by axis."""
        return {axis: dim for axis, dim in enumerate(self.shape) if isinstance(dim, Dynamic)}


_BATCH = Dynamic("batch", 2, 1, 65536, (1, 1, 8))
_IMAGES = Dynamic("images", 3, 1, 65536, (1, 1, 8))  # of a model that compares each text with each image
# Models whose configuration fixes no size of images, such as DETR.
_HEIGHT = Dynamic("height", 96, 64, 8192, (64, 800, 1344))
_WIDTH = Dynamic("width", 160, 64, 8192, (64, 800, 1344))
_TRACED_SEQUENCE, _TRACED_FRAMES = 16, 16
_DEFAULT_SEQUENCE = 2048
_LONGEST_SAMPLES = 1 << 24
_DEFAULT_SAMPLES = (80_000, 480_000)  # 5 and 30 seconds at 16 kHz


# What configurations of models of several parts call the one of the text that goes in, and of what comes out.
_READS = ("text_config", "text_encoder", "llm_config", "encoder", "decoder", "generator")
_WRITES = ("decoder", "generator", "text_config", "llm_config")
_SEES = ("vision_config", "vision_encoder", "encoder")


def _part(config: Any, names: tuple[str, ...], *keys: str) -> Any:
    """Return the first of some configurations inside of one that says something under one of the keys; else itself."""
    parts = [getattr(config, name, None) for name in names]
    return next((part for part in parts if any(getattr(part, key, None) is not None for key in keys)), config)


def text_config(model: Any, decodes: bool = False) -> Any:
    """Return the part of a model's configuration that is about the text that it reads, or that its decoder writes."""
    return _part(model.config, _WRITES if decodes else _READS, "vocab_size")


def vocabulary_of(model: Any, inputs: dict[str, Input]) -> int | None:
    """Return how many token ids all inputs of token ids take; None without any."""
    names = [name for name in inputs if name.endswith("input_ids")]
    sizes = [getattr(text_config(model, name.startswith("decoder")), "vocab_size", None) for name in names]
    return min((size for size in sizes if isinstance(size, int)), default=None)


def longest_text(model: Any, decodes: bool = False) -> int:
    """Return how many tokens the model, or its decoder, takes at most. XLNet says -1 for any number."""
    keys = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
    config = text_config(model, decodes)
    limits = (getattr(config, key, None) for key in keys)
    longest = next((limit for limit in limits if isinstance(limit, int) and limit > 0), 1 << 20)
    part = getattr(model, "decoder" if decodes else "encoder", model) if config is not model.config else model
    for name, module in part.named_modules():
        padding = getattr(module, "padding_idx", None)
        # RoBERTa and its like count positions from behind that of padding, in a table of max_position_embeddings rows.
        # Tables called embed_positions (M2M100) have more rows, or grow.
        if name.endswith("position_embeddings") and padding is not None:
            longest = min(longest, module.weight.shape[0] - padding - 1)
    return longest


def at_sizes(inputs: dict[str, Input], sizes: FixedSizes) -> dict[str, Input]:
    """Return inputs with fixed sizes in place of dynamic dimensions, wherever these occur."""
    fixed: dict[str, int] = {}
    for name, shape in sizes:
        for axis, dim in inputs[name].dynamic().items() if name in inputs else ():
            size = shape[axis] if len(shape) == len(inputs[name].shape) else 0
            if size and not dim.least <= size <= dim.largest:
                what = f"the model does not take this size in dimension {axis} of {name}"
                raise UserError("--optimization-profile", what, got=str(size), expected=f"{dim.least} to {dim.largest}")
            fixed |= {dim.name: size} if size else {}
    return {
        name: Input(each.dtype, tuple(fixed.get(d.name, d) if isinstance(d, Dynamic) else d for d in each.shape))
        for name, each in inputs.items()
    }


def written_sizes(sizes: FixedSizes) -> str:
    """Return sizes as text, such as `input_ids:1x128`, for `read_sizes`."""
    return ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in sizes)


def read_sizes(text: str) -> FixedSizes:
    """Return the sizes that `written_sizes` wrote; none for any other text."""
    found = re.findall(r"(?:^|,)([^,:]+):(\d{1,10}(?:x\d{1,10})*)(?=,|$)", text)
    return tuple((name, tuple(map(int, shape.split("x")))) for name, shape in found)


def inputs_of(path: Path, model: Any, masked: bool) -> dict[str, Input]:
    """Return the inputs that a model is traced with, by parameter of its forward.

    These are what it is made for (token ids, images, audio), the `attention_mask` of its tokens, and the ids that its
    decoder has made so far; floats are in the model's dtype. Masks of images and audio are left out.

    Args:
        path: Where the model came from, for messages.
        model: A model of transformers.
        masked: Whether its tokens may be padded, if it takes an `attention_mask`.

    Raises:
        UserError: The inputs of this architecture are not known, or it takes less than two tokens.
    """
    taken = inspect.signature(model.forward).parameters
    main = model.main_input_name
    inputs: dict[str, Input] = {}
    if main == "input_ids":
        inputs["input_ids"] = Input(torch.int64, (_BATCH, _tokens(path, model, "sequence", _TRACED_SEQUENCE)))
        if "attention_mask" in taken and masked:
            inputs["attention_mask"] = inputs["input_ids"]
        sees = _part(model.config, _SEES, "image_size")
        if "pixel_values" in taken and getattr(sees, "image_size", None) is not None and not model.can_generate():
            # Without a part for images, text and image are one sequence.
            images = _BATCH if sees is model.config else _IMAGES
            inputs["pixel_values"] = Input(model.dtype, (images, *_image(sees)))
    else:
        sees = _part(model.config, _SEES, "image_size")
        shape = _image(sees) if main == "pixel_values" else _audio(main, model.config)
        inputs |= {main: Input(model.dtype, (_BATCH, *shape))} if shape is not None else {}
    if "decoder_input_ids" in taken:
        # Another length than the encoder's.
        decoded = _tokens(path, model, "decoder_sequence", _TRACED_SEQUENCE // 2, decodes=True)
        inputs["decoder_input_ids"] = Input(torch.int64, (_BATCH, decoded))
    required = [name for name, parameter in taken.items() if _is_required(parameter)]
    unknown = [name for name in (main, *required) if name not in inputs]
    if unknown:
        raise UserError(
            str(path),
            "twellc does not know the inputs of this architecture",
            got=f"{type(model).__name__} with the input {unknown[0]}",
            expected="input_ids, pixel_values of images, input_features as of Whisper, or input_values as of Wav2Vec2",
            fix="Export it with torch.export.save and compile that archive.",
        )
    return inputs


def _is_required(parameter: inspect.Parameter) -> bool:
    variadic = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and not variadic


def _tokens(path: Path, model: Any, name: str, traced: int, decodes: bool = False) -> Dynamic:
    longest = longest_text(model, decodes)
    if longest < 2:
        what = "the model takes too few tokens to trace it"
        fix = "Check max_position_embeddings in config.json."
        raise UserError(str(path), what, got=f"at most {longest}", expected="2 at least", fix=fix)
    default = (1, min(128, longest), min(_DEFAULT_SEQUENCE, longest))
    return Dynamic(name, min(traced, longest * traced // _TRACED_SEQUENCE), 1, longest, default)


def _image(config: Any) -> tuple[int | Dynamic, ...]:
    """Return [channels, height, width] of images."""
    channels, size = getattr(config, "num_channels", None) or 3, getattr(config, "image_size", None)
    if size is None:
        return channels, _HEIGHT, _WIDTH
    return (channels, size, size) if isinstance(size, int) else (channels, *size)


def _audio(name: str, config: Any) -> tuple[int | Dynamic, ...] | None:
    """Return the shape of one recording, as spectrogram or samples; None where it is not known."""

    def has(*keys: str) -> bool:
        return all(getattr(config, key, None) is not None for key in keys)

    if name == "input_features" and has("num_mel_bins", "max_source_positions"):
        return config.num_mel_bins, 2 * config.max_source_positions  # Whisper: a convolution halves the frames
    if name == "input_values" and has("conv_kernel", "conv_stride"):
        return (_samples(config),)
    return None


def _samples(config: Any) -> Dynamic:
    """Return the dimension of samples for Wav2Vec2 and its like, which make frames of them by convolutions."""

    def of_frames(count: int) -> int:
        for kernel, stride in reversed(list(zip(config.conv_kernel, config.conv_stride, strict=True))):
            count = (count - 1) * stride + kernel
        return count

    least = of_frames(2)  # torch.export takes a single frame for a constant
    typical, largest = (max(size, least) for size in _DEFAULT_SAMPLES)
    return Dynamic("samples", of_frames(_TRACED_FRAMES), least, _LONGEST_SAMPLES, (least, typical, largest))
