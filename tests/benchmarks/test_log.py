"""The log of tries: every line has the form, stands in the order of its days, and the index names every subject."""

import re
from pathlib import Path

import pytest

LOG = (Path(__file__).resolve().parents[2] / "benchmarks" / "LOG.md").read_text()
HEADER = "| date | what | expected | got | outcome | commit |"
NONE = "\N{EN DASH}"
OUTCOMES = {"taken", "partly taken", "given up", "measured"}


def sections() -> dict[str, str]:
    """Return the text below each heading."""
    pieces = re.split(r"^## (.*)$", LOG, flags=re.MULTILINE)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


SUBJECTS = {heading: text for heading, text in sections().items() if heading != "Index"}


def rows(text: str) -> list[list[str]]:
    """Return the cells of the lines of a subject's table."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines[0] == HEADER
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


@pytest.mark.parametrize("subject", SUBJECTS)
def test_lines_have_the_form(subject: str) -> None:
    for row in rows(SUBJECTS[subject]):
        date, what, expected, got, outcome, commit = row
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", date) and what and expected and got, row
        assert outcome in OUTCOMES, row
        assert commit == NONE or re.fullmatch(r"[0-9a-f]{7}(, [0-9a-f]{7})*", commit), row


@pytest.mark.parametrize("subject", SUBJECTS)
def test_lines_stand_in_the_order_of_their_days(subject: str) -> None:
    days = [row[0] for row in rows(SUBJECTS[subject])]
    assert days and days == sorted(days)


def test_the_index_names_every_subject() -> None:
    assert re.findall(r"^\| \[([^]]*)\]\(#", sections()["Index"], re.MULTILINE) == list(SUBJECTS)
