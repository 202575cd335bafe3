"""mypy looks at every file of Python that git has."""

import tomllib
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.processes import listed_by_git


def test_mypy_sees_every_file() -> None:
    pytest.importorskip("mypy")
    from mypy.config_parser import parse_config_file
    from mypy.find_sources import create_source_list
    from mypy.fscache import FileSystemCache
    from mypy.options import Options

    options = Options()
    parse_config_file(options, lambda: None, str(ROOT / "pyproject.toml"))
    files = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
    options.mypy_path = [str(ROOT / each) for each in options.mypy_path]
    seen = create_source_list([str(ROOT / each) for each in files], options, FileSystemCache())
    # The folders beside twellc/ are seen through the links in it, and so as twellc.passes and the like.
    paths = {Path(str(each.path)).resolve() for each in seen}
    assert sorted(str(path) for path in {ROOT / each for each in listed_by_git("*.py")} - paths) == []
    names = {each.module for each in seen}
    assert {"twellc.passes.pipeline", "block", "tests.conftest"} <= names and len(names) == len(seen)
