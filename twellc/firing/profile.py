"""A profile: how often the neurons of a model fire. Its file is documented in docs/profile.md.

Importing this imports no torch.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from twellc.base.errors import UserError, first_line
from twellc.base.files import OutputFiles, output_path, why_no_file
from twellc.base.records import LARGEST, Count, Json, Range, Record, as_json, of_json, parse_json
from twellc.base.version import __version__
from twellc.export.shapes import LARGEST_SIZE
from twellc.passes.block_profile import ARRAYS, BlockProfile, rate_bound, shapes
from twellc.plugins.library import TILE

FORMAT, VERSION = "twellc profile", 1
PERCENTILES = (0.5, 0.9, 0.99, 0.999)
# What a tile may hold beside its count: 256/8 - 1 = 31 with the default compression.
SLOTS = (7, 15, 31, 63, 127)
HOTTEST = (128, 512, 1024, 2048)
# Sequences of a step for which is said what skipping pays in experts.
SEQUENCES = (1, 4, 16, 64)
# Above this, a neuron that never fired may fire often enough to matter; 3000 tokens take the bound below it.
_HIGH_BOUND = 0.001
_FIX = "Run `twellc profile` again."


@dataclass(frozen=True)
class ProfiledModel(Record):
    """The model: name of its file or folder, kind, SHA-256 of its files, and the precision that it ran in."""

    name: str
    kind: str
    sha256: str
    dtype: str


@dataclass(frozen=True)
class DataSource(Record):
    """Data that a model was run on: its name, kind, and how many sequences and tokens of it."""

    name: str
    kind: str
    sequences: Count
    tokens: Count


@dataclass(frozen=True)
class ProfiledBlock(Record):
    """A block, as the file names it beside its counts: see `BlockProfile`."""

    module: str
    variant: str
    activation: str
    d_ff: Annotated[int, Range(1, LARGEST_SIZE)]
    experts: Annotated[int, Range(0, LARGEST_SIZE)] = 0


@dataclass(frozen=True)
class _Content(Record):
    """What the file of a profile says in JSON; the counts are tensors."""

    model: ProfiledModel
    data: list[DataSource]
    created: str
    twellc: str
    notes: list[str]
    blocks: list[ProfiledBlock]


@dataclass(frozen=True, eq=False)
class FiringProfile:
    """How often the neurons of a model's feed-forward blocks fired on the user's data.

    Attributes:
        model: The model.
        data: What it was run on, in order.
        created: When, as `2026-11-25T09:30:00+00:00`.
        twellc: The version of twellc that counted.
        notes: What the user should know.
        blocks: What was counted, by the path of the module that holds a block's weights.
    """

    model: ProfiledModel
    data: list[DataSource]
    created: str
    twellc: str
    notes: list[str]
    blocks: dict[str, BlockProfile]

    @property
    def tokens(self) -> int:
        """How many tokens the block saw that saw fewest; those of encoder and decoder may see different numbers.

        Experts, whose counts have a token once for each of its experts, saw all tokens of the data together.
        """
        seen = [block.tokens for block in self.blocks.values() if block.experts is None]
        return min(seen, default=sum(source.tokens for source in self.data))

    @property
    def warnings(self) -> list[str]:
        """What the user should worry about."""
        bound = rate_bound(self.tokens)
        if bound <= _HIGH_BOUND:
            return []
        return [
            f"{self.tokens} tokens are few: a neuron that never fired may fire for up to {bound:.2%} of the tokens "
            "(95 % confidence)"
        ]

    def to_json(self) -> dict[str, Json]:
        """Return what was found as JSON types: statistics of each block, without the counts of each neuron."""
        return {
            "format": VERSION,
            **{name: as_json(getattr(self, name)) for name in ("model", "data", "created", "twellc", "notes")},
            "warnings": list(self.warnings),
            "blocks": [_statistics(block) | self._of_experts(block) for block in self.blocks.values()],
        }

    def _of_experts(self, block: BlockProfile) -> dict[str, Json]:
        """Return the statistics that experts have besides; nothing for other blocks."""
        if block.experts is None:
            return {}
        sent = sum(source.tokens for source in self.data)
        tokens, fired = block.experts.T.tolist()
        densities = [count / (seen * block.d_ff) if seen else None for seen, count in zip(tokens, fired, strict=True)]
        gains = {str(count): block.gain_of_experts(count, sent) for count in SEQUENCES}
        return {"experts": {"tokens": tokens, "density": densities, "gain_by_bytes": as_json(gains)}}

    def merged(self, other: FiringProfile, where: str = "merge") -> FiringProfile:
        """Return the profile of one model over the data of two.

        Args:
            other: The other profile.
            where: What to call it in a message.

        Raises:
            UserError: They are of different models, or of the same in different precisions.
        """
        refuse_other_model(where, other, self.model.sha256, self.model.name)
        if other.model.dtype != self.model.dtype or _form(other) != _form(self):
            raise UserError(
                where, "the model ran in another precision", got=other.model.dtype, expected=self.model.dtype, fix=_FIX
            )
        blocks = {module: block.plus(other.blocks[module]) for module, block in self.blocks.items()}
        notes = list(dict.fromkeys(self.notes + other.notes))
        created = max(self.created, other.created)
        return FiringProfile(self.model, self.data + other.data, created, __version__, notes, blocks)

    @classmethod
    def read(cls, path: str | os.PathLike[str], option: str = "") -> FiringProfile:
        """Read the file of a profile.

        Args:
            path: The file.
            option: The option that names it, for messages.

        Raises:
            UserError: It is not a profile, damaged, or of another version of the format.
        """
        return _read(Path(path), f"{option} {path}".strip())

    def write(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the file of a profile.

        Raises:
            UserError: It cannot be written, or exists and `overwrite` is not set.
        """
        output = output_path("--output", path)
        with OutputFiles(overwrite) as outputs:
            outputs.check("--output", output)
            outputs.write(output, self.content())
            outputs.commit()

    def content(self) -> bytes:
        """Return the content of the file."""
        return _content(self)


def refuse_other_model(where: str, profile: FiringProfile, sha256: str, name: str) -> None:
    """Raise a UserError if a profile is of another model than the one with this fingerprint."""
    if profile.model.sha256 != sha256:
        what = "is a profile of another model, or the model has changed since"
        got, expected = f"{profile.model.name}, SHA-256 {profile.model.sha256[:12]}…", f"{name}, {sha256[:12]}…"
        raise UserError(where, what, got=got, expected=expected, fix="Profile this model with `twellc profile`.")


def _form(profile: FiringProfile) -> list[tuple[str, str, str, int]]:
    return [(each.module, each.variant, each.activation, each.d_ff) for each in profile.blocks.values()]


def _statistics(block: BlockProfile) -> dict[str, Json]:
    return {
        "module": block.module,
        "variant": block.variant,
        "activation": block.activation,
        "d_ff": block.d_ff,
        "tokens": block.tokens,
        "density": block.density,
        "nonzeros_per_token": {
            "mean": block.mean,
            **{f"p{100 * share:g}": block.percentile(share) for share in PERCENTILES},
            "largest": block.largest,
        },
        "tiles_over": {str(count): block.tiles_over(count) for count in SLOTS},
        "carried_by_hottest": {str(count): block.carried_by(count) for count in HOTTEST if count < block.d_ff},
        "never_fired": int(block.never.sum()),
        "never_fired_rate_bound": rate_bound(block.tokens),
        "by_position": [
            {"first": first, "last": last, "density": density} for first, last, density in block.density_by_position()
        ],
    }


# ---- the file ----


def _content(profile: FiringProfile) -> bytes:
    blocks = [
        ProfiledBlock(
            block.module,
            block.variant,
            block.activation,
            block.d_ff,
            0 if block.experts is None else len(block.experts),
        )
        for block in profile.blocks.values()
    ]
    content = _Content(profile.model, profile.data, profile.created, profile.twellc, profile.notes, blocks).to_json()
    names = (*ARRAYS, "experts")
    arrays = {f"{module}/{name}": getattr(block, name) for module, block in profile.blocks.items() for name in names}
    tensors = {name: counts for name, counts in arrays.items() if counts is not None}
    metadata = {"format": FORMAT, "version": str(VERSION), "profile": json.dumps(content)}
    return bytes(save(tensors, metadata))


def _read(path: Path, where: str) -> FiringProfile:
    if not path.is_file():
        raise UserError(where, why_no_file(path), expected="a profile, as `twellc profile` writes it")
    if path.stat().st_size == 0:
        raise UserError(where, "the file is empty", expected="a profile, as `twellc profile` writes it")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()} if _is_ours(metadata) else {}  # noqa: SIM118
    except (SafetensorError, ValueError, TypeError, AttributeError) as error:
        raise UserError(where, f"is not a profile of twellc ({first_line(error)})", fix=_FIX) from error
    if metadata.get("format") != FORMAT:
        raise UserError(where, "is not a profile of twellc", expected="a file that `twellc profile` wrote", fix=_FIX)
    if not _is_ours(metadata):
        what = "the profile is of another version of the format"
        fix = "Use the twellc that made it, or run `twellc profile` again."
        raise UserError(where, what, got=str(metadata.get("version")), expected=str(VERSION), fix=fix)
    try:
        return _of_content(of_json(_Content, parse_json(metadata.get("profile", ""))), tensors)
    except ValueError as error:
        raise UserError(where, f"the profile is damaged ({first_line(error)})", fix=_FIX) from error


def _is_ours(metadata: dict[str, str]) -> bool:
    return metadata.get("format") == FORMAT and metadata.get("version") == str(VERSION)


def _of_content(content: _Content, tensors: dict[str, Any]) -> FiringProfile:
    """Return the profile of a file's metadata and tensors.

    Raises:
        ValueError: They contradict each other.
    """
    blocks = {}
    for described in content.blocks:
        module = described.module
        arrays = {}
        expected = shapes(described.d_ff) | ({"experts": (described.experts, 2)} if described.experts else {})
        for name, shape in expected.items():
            counts = tensors.get(f"{module}/{name}")
            if counts is None or counts.dtype != np.int64 or counts.shape != shape or not _are_counts(counts):
                raise ValueError(f"the counts {module}/{name} are missing or are not counts")
            arrays[name] = counts
        block = BlockProfile(module, described.variant, described.activation, **arrays)
        by_row, by_tile = (int(counts @ np.arange(len(counts))) for counts in (block.rows, block.tiles))
        possible = block.firing.max() <= block.tokens and (block.positions <= (block.tokens, block.nonzeros)).all()
        whole = block.tiles.sum() == block.tokens * -(-block.d_ff // TILE)
        if block.experts is not None:
            sent = sum(source.tokens for source in content.data)
            possible &= block.experts.sum(0).tolist() == [block.tokens, block.nonzeros]
            possible &= block.experts[:, 0].max() <= sent
        if not (by_row == by_tile == block.nonzeros and possible and whole):
            raise ValueError(f"the counts of {module} contradict each other")
        if block.tokens == 0:
            raise ValueError(f"{module} has seen no token")
        blocks[module] = block
    if not blocks:
        raise ValueError("it has no block")
    return FiringProfile(content.model, content.data, content.created, content.twellc, content.notes, blocks)


def _are_counts(counts: np.ndarray[Any, np.dtype[np.int64]]) -> bool:
    """Whether numbers are counts, whose sum, each times its place, fits into 64 bits."""
    most = float(counts.max()) * len(counts) * len(counts)
    return bool(counts.min() >= 0) and most < LARGEST
