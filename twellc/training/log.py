"""The log of a training run, which `twellc report --training` shows. docs/training.md documents the file.

It has a JSON object in each line: the first describes the run, the others are records of logging steps. Importing this
imports no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from twellc.base.errors import UserError
from twellc.base.files import OutputFiles, why_no_file, writing
from twellc.base.records import OPTIONAL, Amount, Count, Range, Record, Share, of_json, parse_json
from twellc.base.version import __version__
from twellc.export.shapes import LARGEST_SIZE

FORMAT, VERSION = "twellc training log", 1
_EXPECTED, _FIX = "a log that twellc.training.SparsityCallback wrote", "Name another file."


@dataclass(frozen=True)
class LoggedBlock(Record):
    """A block: the path of its module, and the number of neurons."""

    module: str
    d_ff: Annotated[int, Range(1, LARGEST_SIZE)]


@dataclass(frozen=True)
class LoggedRun(Record):
    """The first line: the model in training.

    Attributes:
        format: The kind of the file.
        version: The version of its form.
        twellc: The version of twellc.
        model: Name of the model that training began with.
        sha256: The SHA-256 of the model's files; empty where it has none.
        blocks: The blocks in training, in the order of the model.
    """

    format: str
    version: int
    twellc: str
    model: str
    sha256: str
    blocks: list[LoggedBlock]


@dataclass(frozen=True)
class LoggedStep(Record):
    """A record of the steps since the one before.

    Attributes:
        step: Steps of the optimizer so far.
        loss: Mean of the loss, without the L1 term; null where it is not known.
        l1: Mean over layers and tokens of the sum over neurons of |h|.
        coefficient: The coefficient of l1 in the last step.
        tokens: Tokens that the blocks saw, padding included.
        density: For each block, the share of the activations that were not zero.
        dead: For each block, the share of the neurons that never fired.
        relu: How far activations have come on their way to ReLU, 0 to 1.
        reinitialised: Gate rows that were moved towards random ones, over all steps and blocks.
        eval_loss: Loss on held-out data, where it was measured.
    """

    step: Count
    loss: float
    l1: Amount
    coefficient: Amount
    tokens: Count
    density: list[Share]
    dead: list[Share]
    relu: Share
    reinitialised: Count
    eval_loss: float | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True)
class TrainingLog:
    """A log: the model in training, and the records."""

    run: LoggedRun
    steps: list[LoggedStep]

    @property
    def model(self) -> str:
        """Name of the model that training began with."""
        return self.run.model

    @classmethod
    def read(cls, path: str | os.PathLike[str], where: str = "") -> TrainingLog:
        """Read a log; leave out an incomplete last line, which a run that was cut short may leave.

        Args:
            path: The file.
            where: The name of the file in messages.

        Raises:
            UserError: It is not a log, or damaged, or of another version.
        """
        where, path = where or str(path), Path(path)
        if not path.is_file():
            raise UserError(where, why_no_file(path), expected=_EXPECTED, fix=_FIX)
        try:
            text = path.read_text(encoding="utf-8")
            whole, _, last = text.rpartition("\n")
            lines = [parse_json(line) for line in whole.splitlines() if line.strip()]
            try:
                lines += [parse_json(last)] if last.strip() else []
            except ValueError:
                if not lines:
                    raise
        except ValueError as error:
            raise UserError(
                where, f"cannot be read as lines of JSON ({error})", expected=_EXPECTED, fix=_FIX
            ) from error
        if not lines or not isinstance(lines[0], dict) or lines[0].get("format") != FORMAT:
            raise UserError(where, "is not a log of training", expected=_EXPECTED, fix=_FIX)
        if lines[0].get("version") != VERSION:
            what, got = "is of another version", repr(lines[0].get("version"))
            raise UserError(where, what, got=got, expected=str(VERSION), fix="Use the twellc that wrote it.")
        try:
            run = of_json(LoggedRun, lines[0])
            steps = [of_json(LoggedStep, line, f"line {number}") for number, line in enumerate(lines[1:], 2)]
        except ValueError as error:
            raise UserError(where, f"is damaged: {error}", expected=_EXPECTED) from error
        if not run.blocks:
            raise UserError(where, "is damaged: it has no blocks", expected=_EXPECTED)
        for number, step in enumerate(steps, 2):
            if not len(step.density) == len(step.dead) == len(run.blocks):
                raise UserError(where, f"is damaged: line {number} has other blocks than the first one")
        return cls(run, steps)


class LogWriter:
    """Writes a log line by line, as a run may be cut short."""

    def __init__(
        self, path: Path, model: str, sha256: str, blocks: Sequence[LoggedBlock], step: int, overwrite: bool = False
    ) -> None:
        """Begin a log, or go on with one at a step.

        Args:
            path: The file.
            model: Name of the model.
            sha256: The SHA-256 of the model's files.
            blocks: The blocks in training.
            step: The step that the run begins with. Records of later steps in the file are dropped.
            overwrite: Whether a run from step 0 on replaces the log of another run.

        Raises:
            UserError: The file cannot be written, is not a log, or is one of another model or, from step 0 on, of
                another run.
        """
        self._path = path
        run = LoggedRun(FORMAT, VERSION, __version__, model, sha256, list(blocks))
        kept: list[LoggedStep] = []
        found = os.path.lexists(path)
        if found:
            log = TrainingLog.read(path)
            if step > 0:
                refuse_other_run(log.run, run, str(path))
                kept = [each for each in log.steps if each.step <= step]
            elif not overwrite:
                raise UserError(
                    str(path),
                    "is the log of an earlier run",
                    got=f"{len(log.steps)} records of {log.model}",
                    fix="Name another file, go on from a checkpoint of that run, or replace it by "
                    "SparsityCallback(overwrite=True).",
                )
        with OutputFiles(overwrite=found) as outputs:
            outputs.check("log", path)
            outputs.write(path, "".join(f"{json.dumps(each.to_json())}\n" for each in (run, *kept)))
            outputs.commit()

    def add(self, record: LoggedStep) -> None:
        """Append a record.

        Raises:
            UserError: The file cannot be written.
        """
        with writing(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(record.to_json())}\n")


def refuse_other_run(found: LoggedRun, run: LoggedRun, where: str) -> None:
    """Raise a UserError if a log is of another model."""
    for what, read in _IDENTITY.items():
        if read(found) != read(run):
            raise UserError(
                where,
                f"is the log of a run with another model: {what}",
                got=str(read(run)),
                expected=str(read(found)),
                fix="Give the model that the run began with, or another output folder.",
            )


_IDENTITY: dict[str, Callable[[LoggedRun], Any]] = {
    "the SHA-256 of its files differs": lambda run: run.sha256,
    "its blocks differ": lambda run: [f"{each.module} with {each.d_ff}" for each in run.blocks],
}
