"""The list of measured devices, and the page that shows it."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from opcast.common.errors import DatasetError
from opcast.common.paths import PACKAGE
from opcast.datagen.campaign.plan import load_plan

INDEX = PACKAGE / "datagen" / "campaigns" / "INDEX.csv"
#: Columns: device by the catalogue's name, day, who gave it, minutes, cases measured, median
#: difference of programs measured twice, opcast's version, digest of the archive, its folder here.
COLUMNS = ("device", "date", "by", "minutes", "cases", "noise", "opcast", "digest", "folder")
_NONE = "No device has been measured by a campaign yet."


def index_table(path: Path = INDEX) -> str:
    """Return the list as a Markdown table, or a sentence if it is empty.

    Raises:
        DatasetError: Its columns are not :data:`COLUMNS`, or a row lacks one.
    """
    with path.open(newline="", encoding="utf-8") as file:
        head, *rows = csv.reader(file)
    if tuple(head) != COLUMNS or any(len(row) != len(COLUMNS) for row in rows):
        raise DatasetError(f"expected the columns {', '.join(COLUMNS)}", where=str(path))
    if not rows:
        return _NONE
    lines = [head, ["---"] * len(head), *sorted(rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


PAGE = (PACKAGE / "docs" / "contribute-a-gpu.md").read_text(encoding="utf-8")


def test_the_page_shows_the_list() -> None:
    found = re.search(r"<!-- index -->\n(.*)\n<!-- /index -->", PAGE, re.S)
    assert found
    assert found[1] == index_table()


def test_shares_on_the_page_are_those_of_the_plan() -> None:
    for stage, share in load_plan("gpu").shares.items():
        assert f"| {stage} | {share:.0%} |".replace("%", " %") in PAGE


def test_rows_become_a_table(tmp_path: Path) -> None:
    path = tmp_path / "INDEX.csv"
    row = "h200-sxm,2026-11-28,someone,25,600,1.2 %,0.1.0,abc,h200-sxm-2026-11-28"
    path.write_text(",".join(COLUMNS) + f"\n{row}\n")
    head, rule, line = index_table(path).splitlines()
    assert head.startswith("| device | date | by |")
    assert rule.count("---") == len(COLUMNS)
    assert line == "| " + row.replace(",", " | ") + " |"
    path.write_text(",".join(COLUMNS) + "\nh200-sxm\n")
    with pytest.raises(DatasetError, match="expected the columns"):
        index_table(path)
