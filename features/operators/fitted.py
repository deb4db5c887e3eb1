"""Constants of the physics that were fitted to measurements or read off them (``fitted.yaml``)."""

from __future__ import annotations

from functools import cache

from ...common.files import parse_yaml
from ...common.paths import PACKAGE

#: Numbers by key.
Table = dict[str, tuple[float, ...]]


class Fitted:
    """Constants of one section of the file, as attributes, and its tables.

    Attributes:
        values: Constants by name.
        tables: Tables by name.
    """

    def __init__(self, section: dict[str, object]) -> None:
        self.values: dict[str, float] = {}
        self.tables: dict[str, Table] = {}
        for name, own in section.items():
            if isinstance(own, dict):
                self.tables[name] = {
                    str(k): tuple(map(float, str(v).split())) for k, v in own.items()
                }
            elif name != "rests_on":
                # A number and its unit.
                self.values[name] = float(str(own).split()[0])

    def __getattr__(self, name: str) -> float:
        """A constant."""
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(f"no constant {name!r} in fitted.yaml") from None

    def numbers(self, table: str) -> dict[str, float]:
        """A table of one number a key."""
        return {key: own[0] for key, own in self.tables[table].items()}

    def rows(self, table: str) -> dict[tuple[str, ...], tuple[float, ...]]:
        """A table by the words of its keys."""
        return {tuple(key.split()): own for key, own in self.tables[table].items()}


@cache
def fitted(section: str) -> Fitted:
    """Read a section of the file, which is parsed once."""
    return _sections()[section]


@cache
def _sections() -> dict[str, Fitted]:
    text = (PACKAGE / "features" / "operators" / "fitted.yaml").read_text(encoding="utf-8")
    read = parse_yaml(text)
    assert isinstance(read, dict)
    return {str(name): Fitted(own) for name, own in read.items() if isinstance(own, dict)}
