"""The log of the kernels: every entry has the form and is in the index, every line of the index leads to an entry."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

LOG = (Path(__file__).resolve().parents[2] / "benchmarks" / "LOG.md").read_text()
OUTCOMES = ("taken", "partly taken", "given up", "measured")
HEADING = re.compile(rf"(\d{{4}}-\d\d-\d\d) · (.+) · ({'|'.join(OUTCOMES)})( \([0-9a-f]{{7}}(, [0-9a-f]{{7}})*\))?")
PARTS = ("Question", "Change", "Expected", "Measured", "Result")
# Where an entry has several changes, one table stands for the three parts in the middle.
PARTS_OF_SEVERAL = ("Question", "Changes", "Result")


def sections() -> dict[str, str]:
    """Return the text below each heading."""
    pieces = re.split(r"^## (.*)$", LOG, flags=re.MULTILINE)
    headings = pieces[1::2]
    assert len(headings) == len(set(headings))
    return dict(zip(headings, pieces[2::2], strict=True))


def index() -> list[list[str]]:
    """Return the cells of the index's lines: idea, tokens, outcome, gain, entry."""
    lines = [line for line in sections()["Index"].splitlines() if line.startswith("| ")]
    assert lines[0] == "| idea | tokens | outcome | gain | entry |"
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


ENTRIES = {heading: text for heading, text in sections().items() if heading not in ("Index", "Form of an entry")}


def anchor(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_there_are_entries_in_the_order_of_their_days() -> None:
    days = [heading[:10] for heading in ENTRIES]
    assert len(days) > 40 and days == sorted(days)


@pytest.mark.parametrize("heading", ENTRIES)
def test_entry_has_the_form(heading: str) -> None:
    match = HEADING.fullmatch(heading)
    assert match, "DATE · Title · OUTCOME (commits)"
    text, outcome = ENTRIES[heading], match[3]
    parts = re.findall(r"^\*\*(Question|Changes?|Expected|Measured|Result)\.\*\*", text, re.MULTILINE)
    assert tuple(parts) in (PARTS, PARTS_OF_SEVERAL)
    if "Changes" in parts:
        table = text.split("**Changes.**")[1].split("\n\n| change |")[1].split("\n\n")[0]
        rows = [line.strip("|").split(" | ")[-1].strip() for line in table.splitlines()]
        assert rows[0] == "outcome" and set(rows[2:]) <= set(OUTCOMES)
        found = set(rows[2:]) - {"measured"}
        assert outcome == (found.pop() if len(found) == 1 else "partly taken")


@pytest.mark.parametrize("heading", ENTRIES)
def test_numbers_stand_in_tables(heading: str) -> None:
    """A sentence with a dozen of before and after is a table."""
    for paragraph in ENTRIES[heading].split("\n\n"):
        if not paragraph.startswith("|"):
            assert paragraph.count("→") < 8, paragraph


def test_index_and_entries_match() -> None:
    anchors = {anchor(heading): heading for heading in ENTRIES}
    outcomes: dict[str, set[str]] = {heading: set() for heading in ENTRIES}
    order = []
    for idea, tokens, outcome, gain, entry in index():
        link = re.fullmatch(r"\[(\d{4}-\d\d-\d\d)\]\(#(.*)\)", entry)
        assert link and link[2] in anchors, entry
        heading = anchors[link[2]]
        assert heading.startswith(link[1])
        assert outcome in OUTCOMES and idea and tokens and gain
        outcomes[heading].add(outcome)
        order.append(list(ENTRIES).index(heading))
    assert order == sorted(order)
    for heading, named in outcomes.items():
        match = HEADING.fullmatch(heading)
        assert match and named, f"{heading} is not in the index"
        assert match[3] in named or match[3] == "partly taken", heading
