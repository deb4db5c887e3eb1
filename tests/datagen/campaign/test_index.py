"""The list of measured devices, and the page that shows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from opcast.common.errors import DatasetError
from opcast.common.paths import PACKAGE
from opcast.datagen.campaign.index import COLUMNS, index_table
from opcast.datagen.campaign.plan import load_plan

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
