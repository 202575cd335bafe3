"""Read what the options of a compilation name as profiles."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from twellc.base.errors import UserError, first_few
from twellc.base.files import digest
from twellc.firing.profile import FiringProfile, refuse_other_model
from twellc.loaders.loaded import fingerprint
from twellc.options.decisions import DecisionOptions, refuse_pruning
from twellc.passes.block_profile import Calibration, rate_bound
from twellc.passes.report import Layer, missing_blocks


@dataclass(frozen=True, eq=False)
class LoadedCalibration:
    """A calibration, and the profiles that it is made of.

    Attributes:
        path: The file of the profile.
        profile: The profile.
        calibration: What passes know of it.
        sha256: The SHA-256 of the file.
    """

    path: Path
    profile: FiringProfile
    calibration: Calibration
    sha256: str

    def refuse_other_blocks(self, layers: list[Layer]) -> None:
        """Raise a UserError if the model lacks a block of the profile, as of one from another version of twellc."""
        blocks = self.profile.blocks
        missing = missing_blocks(layers, {module: block.d_ff for module, block in blocks.items()})
        if missing:
            raise UserError(
                f"--firing-profile {self.path}",
                "counts the neurons of a block that the model has not",
                got=f"{missing[0]} with d_ff {blocks[missing[0]].d_ff}",
                expected=first_few([f"{layer.module} with {layer.d_ff}" for layer in layers]) or "no block",
                fix="Profile this model with `twellc profile`.",
            )

    def notes(self, layers: list[Layer], dtype: str) -> list[str]:
        """Say what the calibration was, and what was removed by it.

        Args:
            layers: What became of the blocks.
            dtype: The precision that the model is compiled in.
        """
        data = first_few([source.name for source in self.profile.data])
        notes = [f"calibrated by {self.path.name}: {self.profile.tokens} tokens of {data}"]
        ran_in = self.profile.model.dtype
        if dtype != ran_in:
            notes.append(f"the profile is of the model in {ran_in}, compiled in {dtype}: other neurons may fire there")
        found = [layer.neurons for layer in layers if layer.neurons is not None]
        dead = sum(neurons.dead for neurons in found)
        if not self.calibration.prune_dead:
            return notes
        if not dead:
            return [*notes, "--prune-dead removed no neuron"]
        bound = rate_bound(self.profile.tokens)
        note = (
            f"approximate, as --prune-dead asks for: {dead} neurons that never fired in {self.profile.tokens} tokens "
            f"were removed; each fires for at most {bound:.2g} of such tokens (95 % confidence)"
        )
        unseen = self.calibration.unseen
        if unseen is not None:
            checked = [
                (neurons.lost, unseen[layer.module].nonzeros)
                for layer in layers
                if (neurons := layer.neurons) is not None and neurons.lost is not None
            ]
            lost = sum(share * count for share, count in checked) / max(sum(count for _, count in checked), 1)
            note += f"; they have {lost:.2g} of the non-zeros of --prune-check"
        return [*notes, note]


def load_calibration(options: DecisionOptions, model: Path) -> LoadedCalibration | None:
    """Read the profiles that options name; None where they name none.

    Raises:
        UserError: A profile cannot be read or is of another model, or an option needs another one.
    """
    if options.firing_profile is None:
        refuse_pruning(options)
        return None
    sha256 = fingerprint(model)
    profile = _read(options.firing_profile, "--firing-profile", sha256, model)
    unseen = None
    if options.prune_check is not None:
        if not options.prune_dead:
            raise UserError("--prune-check", "there is nothing to check without --prune-dead", fix="Leave it out.")
        unseen = _read(options.prune_check, "--prune-check", sha256, model).blocks
    calibration = Calibration(profile.blocks, options.prune_dead, unseen)
    return LoadedCalibration(options.firing_profile, profile, calibration, digest(options.firing_profile))


def _read(path: Path, option: str, sha256: str, model: Path) -> FiringProfile:
    profile = FiringProfile.read(path, option)
    refuse_other_model(f"{option} {path}", profile, sha256, model.name)
    return profile
