"""Small files that would make a reader compute, unpack or allocate without end are refused, or read in moments."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import twellc
from tests.processes import captured
from tests.twellc.loaders import evil_files as evil
from twellc.base.errors import UserError
from twellc.loaders.checkpoint import Checkpoint, refuse_absurd_sizes

Write = Callable[[Path], None]
KINDS = {".pt2": evil.ARCHIVES, ".onnx": evil.ONNX, "": evil.DIRECTORIES, ".sae": evil.AUTOENCODERS}
REFUSED = [pytest.param(write, end, id=name) for end, files in KINDS.items() for name, write in files.items()]
READ = [pytest.param(write, ".onnx", id=name) for name, write in evil.HARMLESS_ONNX.items()]
GOOD = {".pt2": evil.good_archive, ".onnx": evil.good_onnx, "": evil.good_directory, ".sae": evil.good_autoencoder}
# What a file takes: seconds of the processor, and kilobytes at most.
_MEASURE = """
import json, resource, sys
import onnx, torch, transformers, twellc.inspection.models
from twellc.base.errors import UserError
from twellc.loaders.checkpoint import Checkpoint, refuse_absurd_sizes
def used():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss
resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
before, refused = used(), False
try:
    twellc.inspect(sys.argv[1])
except UserError:
    refused = True
print(json.dumps([refused, *(now - then for now, then in zip(used(), before))]))
"""


def made(write: Write, tmp_path: Path, end: str) -> Path:
    path = tmp_path / f"model{end}"
    write(path)
    return next(path.rglob("*.sae.pt"), path) if path.is_dir() else path


def in_process(name: str) -> bool:
    """Whether it is among the few that are quick to run here without a limit on what they take."""
    return name in ("sparse", "functions that double", "promised shape", "nested less", "compressed arrays", "layers")


@pytest.mark.parametrize(("write", "end"), [each for each in REFUSED if in_process(str(each.id))])
def test_is_refused(write: Write, end: str, tmp_path: Path) -> None:
    path = made(write, tmp_path, end)
    with pytest.raises(UserError):
        twellc.inspect(path)


def measured(path: Path) -> tuple[bool, float, float]:
    done = captured([sys.executable, "-c", _MEASURE, path])
    assert done.returncode == 0, done.stderr
    refused, seconds, kilobytes = json.loads(done.stdout.splitlines()[-1])
    return refused, seconds, kilobytes


@pytest.mark.slow
@pytest.mark.parametrize(("write", "end", "refused"), [
    *(pytest.param(*each.values, True, id=str(each.id)) for each in REFUSED),
    *(pytest.param(*each.values, False, id=str(each.id)) for each in READ),
])  # fmt: skip
def test_takes_little_more_than_a_good_file(write: Write, end: str, refused: bool, tmp_path: Path) -> None:
    """Five seconds and two gigabytes."""
    (tmp_path / "good").mkdir()
    _, seconds, kilobytes = measured(made(GOOD[end], tmp_path / "good", end))
    was_refused, more_seconds, more_kilobytes = measured(made(write, tmp_path, end))
    assert was_refused or not refused
    assert more_seconds < seconds + 5
    assert more_kilobytes < kilobytes + 2e6


def test_sizes_of_every_family_are_none_of_evil_files() -> None:
    """The default configurations of transformers, beside weights far smaller than they are for."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    families = 0
    for kind in CONFIG_MAPPING:
        try:
            config = json.loads(json.dumps(CONFIG_MAPPING[kind]().to_dict()))
        except Exception:  # of some, which need another package or an argument
            continue
        refuse_absurd_sizes(Path(kind), Checkpoint(config, {}, {}, []))
        families += 1
    assert families > 300
