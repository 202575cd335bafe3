"""Renamed options: the old name works for one release, with a warning. CHANGELOG.md lists them.

An old name works where the command or the function has the new one, and no other option of the old name.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

from twellc.base.errors import UserError

# On the command line, and as keywords in Python.
RENAMED = {
    "--batch": ("--max-batch-size",),
    "--calibrate": ("--measure-gpu",),
    "--calibration": ("--firing-profile",),
    "--compile": ("--compiled",),
    "--input": ("--input-spec",),
    "--inputs": ("--arrays", "--data"),
    "--max-length": ("--max-model-len",),
    "--max-new-tokens": ("--max-tokens",),
    "--profile": ("--optimization-profile",),
    "--report": ("--manifest",),
    "batch": ("max_batch_size",),
    "calibration": ("firing_profile",),
    "inputs": ("input_specs",),
    "profiles": ("optimization_profiles",),
    "report": ("manifest",),
}


def new_name(name: str, known: Collection[str]) -> str:
    """Return the present name for a given one, where only the names `known` are taken."""
    return name if name in known else next((new for new in RENAMED.get(name, ()) if new in known), name)


def by_new_names(keywords: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return keywords of a function by their present names; warn of old ones.

    Raises:
        UserError: One is given by its old name, too.
    """
    given: dict[str, Any] = {}
    for old, value in keywords.items():
        new = new_name(old, known)
        if new != old:
            warnings.warn(sentence(old, new), FutureWarning, stacklevel=2)
        if new in given:
            raise UserError(new, "is given twice", got="its old name, too", fix="Leave one out.")
        given[new] = value
    return given


def sentence(old: str, new: str) -> str:
    """Say that a name has changed."""
    return f"{old} is called {new} now; the next version does not know the old name."
