"""What a message of ours quotes of a library's error."""

import pytest

from twellc.base.errors import first_few, first_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", "ValueError"),
        ("\n  one\ntwo", "one"),
        (
            "Validation error for field 'x':\n    TypeError: expected int\nmore",
            "Validation error for field 'x': TypeError: expected int",
        ),
        ("nothing follows:", "nothing follows:"),
        ("x" * 1000, "x" * 1000),
        ("x" * 1001, "x" * 1000 + "…"),
    ],
)
def test_first_line(text: str, shown: str) -> None:
    assert first_line(ValueError(text)) == shown


def test_first_few() -> None:
    assert first_few([]) == ""
    assert first_few(["a", "b", "c"]) == "a, b, c"
    assert first_few([1, 2, 3, 4, 5], "; ") == "1; 2; 3; …"
