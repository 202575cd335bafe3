"""Models are loaded and traced once for all tests of this folder."""

import pytest


@pytest.fixture(autouse=True)
def _remembered(remembered_models: None) -> None:
    pass
