"""The tables of speed: a row that misses its target has its physical bound beside it, and a table of the results that it was measured in exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NUMBER = r"\d+(?:\.\d+)?"


def tables(text: str) -> list[list[str]]:
    """Returns the cells of each row of the tables in ``text``, without their headers."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [row for at, row in enumerate(rows) if not row[1].startswith("---") and not (at + 1 < len(rows) and rows[at + 1][1].startswith("---"))]


def test_a_row_of_the_readme_that_names_a_missed_target_has_its_bound() -> None:
    section = (ROOT / "README.md").read_text().partition("\n## Speed\n")[2].partition("\n## ")[0]
    rows = tables(section)
    assert len(rows) >= 6
    for what, measured, bound in rows:
        assert re.search(NUMBER, measured), what
        assert not bound or re.search(rf"rate of [a-z0-9 ]+ allows {NUMBER}|the same rate allows {NUMBER}", bound), (what, bound)


def test_a_row_of_the_document_that_misses_its_target_has_its_bound_and_the_share_of_it() -> None:
    rows = [row for row in tables((ROOT / "docs" / "speed.md").read_text()) if "missed" in row[2]]
    assert len(rows) > 20
    for what, _, _, bound in rows:
        # Where nothing physical is in the way, the reason stands in its place.
        has_bound = re.match(rf"(?:about |of `int4` )?{NUMBER}", bound) and "%" in bound
        assert has_bound or re.match(r"none: |no physical bound explains it: ", bound), (what, bound)


@pytest.mark.parametrize("document", ["README.md", "docs/speed.md", "docs/inference.md", "docs/training.md", "docs/quantization.md", "docs/models.md"])
def test_every_table_of_results_that_a_document_names_is_there(document: str) -> None:
    path = ROOT / document
    named = re.findall(r"benchmarks/results/([\w.-]+\.(?:md|csv))", path.read_text())
    assert [name for name in named if not (ROOT / "benchmarks" / "results" / name).exists()] == []
