"""What a report is made of: what became of the blocks, and what was measured. A profile is read by its own class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from twellc.base.errors import UserError, first_few
from twellc.base.files import why_no_file
from twellc.base.records import OPTIONAL, Json, Record, of_json, parse_json
from twellc.compiling.manifest import SCHEMA, ModelFile, is_plan, read_manifest
from twellc.export.plan import Backend
from twellc.firing.profile import FiringProfile, refuse_other_model
from twellc.passes.report import Attention, Compression, Layer, Linear, missing_blocks
from twellc.training.log import TrainingLog

if TYPE_CHECKING:
    from twellc.benchmarking.result import BenchResult

_Record = TypeVar("_Record", bound=Record)
DECISIONS, BENCH, TRAINING = "--decisions", "--bench", "--training"
_EXPECTED = "a plan, its manifest, or JSON of `twellc compile --manifest` or `twellc inspect --json`"


@dataclass(frozen=True)
class Settings(Record):
    """Precision, and the compression factor of a tile."""

    dtype: str
    compression: Compression


@dataclass(frozen=True)
class Decisions(Record):
    """What became, or would become, of a model's blocks: what `compile` and `inspect` write of it.

    Attributes:
        layers: What became of each feed-forward block.
        attention: What became of each attention block; None where it was not looked at.
        linear: What became of linear layers outside of the blocks; None likewise.
        notes: What the user should know.
        warnings: What the user should worry about.
        model: The model; None where it is not named, as by `inspect`.
        settings: See `Settings`; None likewise.
        backend: The TensorRT that built a plan; None where none did.
    """

    layers: list[Layer]
    attention: list[Attention] | None = field(default=None, metadata=OPTIONAL)
    linear: list[Linear] | None = field(default=None, metadata=OPTIONAL)
    notes: list[str] | None = field(default=None, metadata=OPTIONAL)
    warnings: list[str] | None = field(default=None, metadata=OPTIONAL)
    model: ModelFile | None = field(default=None, metadata=OPTIONAL)
    settings: Settings | None = field(default=None, metadata=OPTIONAL)
    backend: Backend | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, eq=False)
class Sources:
    """What a report is made of: at least one of these.

    Attributes:
        profile: Which neurons fire.
        decisions: What became of the blocks.
        bench: What was measured.
        training: How the model was trained.
    """

    profile: FiringProfile | None
    decisions: Decisions | None
    bench: BenchResult | None
    training: TrainingLog | None = None

    @property
    def layers(self) -> list[Layer]:
        """What became of each feed-forward block, as far as anything says it."""
        if self.decisions is not None:
            return self.decisions.layers
        return self.bench.layers if self.bench is not None else []


def read_decisions(path: Path) -> Decisions:
    """Read what became of a model's blocks from the file of a plan, or from JSON.

    Raises:
        UserError: The file is neither, or damaged, or of another version.
    """
    where = f"{DECISIONS} {path}"
    if path.suffix != ".json" and is_plan(path):
        return decisions_of(read_manifest(path).to_json(), where)
    return decisions_of(_read_json(path, where, _EXPECTED), where)


def decisions_of(content: Mapping[str, Json], where: str) -> Decisions:
    """Return the decisions in what `compile` and `inspect` write.

    Args:
        content: The JSON.
        where: What to call it in a message.

    Raises:
        UserError: It is something else, or of another version.
    """
    if "layers" not in content or "results" in content:
        raise UserError(where, "says nothing of what became of a model's blocks", expected=_EXPECTED)
    again = "Use the twellc that made it, or compile the model again."
    return _record(Decisions, {"schema": SCHEMA, **content}, SCHEMA, where, again)


def read_bench(path: Path) -> BenchResult:
    """Read what `twellc bench --json` printed.

    Raises:
        UserError: The file is something else, or damaged, or of another version.
    """
    from twellc.benchmarking.result import SCHEMA, BenchResult

    where, expected = f"{BENCH} {path}", "what `twellc bench --json` prints"
    content = _read_json(path, where, expected)
    if "results" not in content:
        raise UserError(where, "holds no measurements", expected=expected)
    result = _record(BenchResult, content, SCHEMA, where, "Use the twellc that made it, or run `twellc bench` again.")
    if not result.results:
        raise UserError(where, "nothing was measured: results is empty", fix="Run `twellc bench` again.")
    return result


def _record(kind: type[_Record], content: Mapping[str, Json], schema: int, where: str, again: str) -> _Record:
    found = content.get("schema")
    if found != schema:
        raise UserError(where, "is of another version", got=f"schema {found!r}", expected=str(schema), fix=again)
    try:
        return of_json(kind, content)
    except ValueError as error:
        raise UserError(where, f"is damaged: {error}", fix=again) from error


def read_training(path: Path) -> TrainingLog:
    """Read the log of a training run.

    Raises:
        UserError: The file is something else, or damaged, or has no record yet.
    """
    log = TrainingLog.read(path, f"{TRAINING} {path}")
    if not log.steps:
        raise UserError(f"{TRAINING} {path}", "has no record of a step yet", fix="Train on, or log more often.")
    return log


def _read_json(path: Path, where: str, expected: str) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(where, why_no_file(path), expected=expected)
    if path.stat().st_size == 0:
        raise UserError(where, "the file is empty", expected=expected)
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(where, f"cannot be read as JSON ({error})", expected=expected) from error
    if not isinstance(content, dict):
        raise UserError(where, "holds no JSON object", expected=expected)
    return content


def gather(
    profile: FiringProfile | None,
    decisions: Decisions | None,
    bench: BenchResult | None,
    training: TrainingLog | None = None,
) -> Sources:
    """Put together what a report is made of.

    Raises:
        UserError: There is nothing, or the parts are of different models.
    """
    if profile is None and decisions is None and bench is None and training is None:
        what, fix = "there is nothing to report on", "`twellc profile` makes a profile."
        raise UserError("report", what, expected=f"a profile, {DECISIONS}, {BENCH} or {TRAINING}", fix=fix)
    if profile is not None and decisions is not None and decisions.model is not None:
        refuse_other_model("the profile", profile, decisions.model.sha256, decisions.model.name)
    widths = {} if profile is None else {module: block.d_ff for module, block in profile.blocks.items()}
    if decisions is not None:
        _refuse_other_blocks(DECISIONS, decisions.layers, widths)
        widths = widths or {layer.module: layer.d_ff for layer in decisions.layers}
    if bench is not None:
        _refuse_other_blocks(BENCH, bench.layers, widths)
        widths = widths or {layer.module: layer.d_ff for layer in bench.layers}
    for block in training.run.blocks if training is not None and widths else []:
        if widths.get(block.module) != block.d_ff:
            known = first_few([f"{module} with {d_ff}" for module, d_ff in widths.items()])
            raise _of_another_model(TRAINING, f"{block.module} with d_ff {block.d_ff}", known)
    return Sources(profile, decisions, bench, training)


def _refuse_other_blocks(where: str, layers: list[Layer], widths: dict[str, int]) -> None:
    """Fail if a model's blocks are not those that are known already, by module with their d_ff."""
    own = {layer.module: layer.d_ff for layer in layers}
    missing = missing_blocks(layers, widths)
    if missing:
        module = missing[0]
        got = f"d_ff {own[module]} of {module}" if module in own else f"blocks {first_few(list(own)) or 'none'}"
        raise _of_another_model(where, got, f"{module} with d_ff {widths[module]}")


def _of_another_model(where: str, got: str, expected: str) -> UserError:
    what = "is of another model than the rest of the report"
    return UserError(where, what, got=got, expected=expected, fix="Give files of one model.")
