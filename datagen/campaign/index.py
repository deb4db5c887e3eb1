"""The list of devices that campaigns have measured: ``datagen/campaigns/INDEX.csv`` as a table."""

from __future__ import annotations

import csv
from pathlib import Path

from ...common.errors import DatasetError
from ...common.paths import PACKAGE

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
