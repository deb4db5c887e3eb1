"""The kinds of tables of the published packs, as ``packs.yaml`` lists them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from ...common.files import parse_yaml
from ...common.parquet import read_table

#: Kinds whose rows are matrix products, and layers or blocks of models.
PRODUCTS = ("matmul", "gemm")
BLOCK_TABLES = ("attention_moe", "layers", "new_attention")


@dataclass(frozen=True)
class Kind:
    """A kind of table; ``packs.yaml`` explains the fields."""

    files: tuple[str, ...]
    names: tuple[str, ...] = ()
    columns: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()

    def has(self, name: str, columns: Collection[str]) -> bool:
        """Whether a table of a name with some columns is of the kind."""
        if any(fnmatchcase(name, pattern) for pattern in self.names):
            return True
        return bool(self.columns) and self.columns <= set(columns) and not self.without & {*columns}


@cache
def pack_data() -> Any:
    """What ``packs.yaml`` holds."""
    return parse_yaml((Path(__file__).parent / "packs.yaml").read_text(encoding="utf-8"))


@cache
def kinds() -> dict[str, Kind]:
    """Kinds of tables by name, in the order in which a table is compared with them."""
    return {
        name: Kind(
            tuple(own["files"]),
            tuple(own.get("names", ())),
            frozenset(own.get("columns", ())),
            frozenset(own.get("without", ())),
        )
        for name, own in pack_data()["kinds"].items()
    }


def kind_of(columns: Iterable[object], name: str = "") -> str:
    """Kind of a table; empty if it is of none.

    Args:
        columns: Its columns.
        name: Name of its file; without one, the columns alone tell.
    """
    known = {str(column) for column in columns}
    return next((kind for kind, own in kinds().items() if own.has(name, known)), "")


def files_of(folder: Path, kind: str) -> list[Path]:
    """Files of a kind: of its first pattern that has any below the folder; a file if it is one."""
    if folder.is_file():
        return [folder] if kind_of(read_table(folder).columns, folder.name) == kind else []
    for pattern in kinds()[kind].files:
        files = sorted(folder.rglob(pattern))
        if files:
            return files
    return []
