"""Notes of a table's rows, of which those that differ in figures alone are told once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

#: A figure, which is no part of a name such as ``a100-sxm-80gb``.
_NUMBER = re.compile(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?![\w.-]*\w)")
#: Stands for the device of a row while notes are compared.
_DEVICE = "\N{REPLACEMENT CHARACTER}"
#: Most rows that a note names.
_NAMED = 6


class Noted(NamedTuple):
    """A row of a table.

    Attributes:
        name: By which notes refer to it; rows may share one.
        device: Name of its device.
        notes: Of it.
    """

    name: str
    device: str
    notes: Sequence[str]


def folded(rows: Sequence[Noted]) -> list[str]:
    """Notes in the order of the rows, each with the rows that it is about unless these are all.

    Args:
        rows: Of one table.
    """
    alike: dict[str, list[tuple[Noted, str]]] = {}
    for row in rows:
        own = re.compile(rf"(?<![\w-]){re.escape(row.device)}(?![\w-])")
        for note in dict.fromkeys(row.notes):
            text = own.sub(_DEVICE, note)
            alike.setdefault(_NUMBER.sub("0", text), []).append((row, text))
    every = dict.fromkeys(row.name for row in rows)
    return [_told(group, len(every)) for group in alike.values()]


def _told(group: Sequence[tuple[Noted, str]], count: int) -> str:
    devices = dict.fromkeys(row.device for row, _ in group)
    figures = zip(*(_NUMBER.findall(text) for _, text in group), strict=True)
    spans = iter([_span(own) for own in figures])
    text = _NUMBER.sub(lambda _: next(spans), group[0][1])
    text = text.replace(_DEVICE, next(iter(devices)) if len(devices) == 1 else "the device")
    names = list(dict.fromkeys(row.name for row, _ in group))
    if len(names) == count or (len(names) == 1 and names[0] in text):
        return text
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}: {text}"


def _span(texts: Sequence[str]) -> str:
    """Figures as one, or as the least and the largest."""
    ordered = sorted(set(texts), key=lambda text: float(text.replace(",", "")))
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]}\N{EN DASH}{ordered[-1]}"
