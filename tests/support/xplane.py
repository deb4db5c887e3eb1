"""Profiles by hand, of the message that XLA's profiler writes (tsl's xplane.proto)."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from opcast.common.wire import number, text, varint


@dataclass
class Plane:
    """A plane under construction; times in ns."""

    name: str
    lines: dict[str, list[bytes]] = field(default_factory=dict)
    zero_ns: int = 1_000_000
    _events: dict[str, int] = field(default_factory=dict)
    _stats: dict[str, int] = field(default_factory=dict)
    _own: list[bytes] = field(default_factory=list)

    def event(self, line: str, name: str, start: float, length: float, **stats: object) -> None:
        """Add an event; a text among its statistics is kept once, as XLA's builder does."""
        content = number(1, self._events.setdefault(name, len(self._events) + 1))
        content += number(2, round((start - self.zero_ns) * 1000)) + number(3, round(length * 1000))
        content += b"".join(text(4, self._stat(k, v)) for k, v in stats.items())
        self.lines.setdefault(line, []).append(text(4, content))

    def stat(self, name: str, value: object) -> None:
        """Add a statistic of the plane itself."""
        self._own.append(text(6, self._stat(name, value)))

    def _number(self, name: str) -> int:
        return self._stats.setdefault(name, len(self._stats) + 1)

    def _stat(self, name: str, value: object) -> bytes:
        head = number(1, self._number(name))
        if isinstance(value, str):
            return head + number(7, self._number(value))
        if isinstance(value, bytes):
            return head + text(6, value)
        if isinstance(value, float):
            return head + varint(2 << 3 | 1) + struct.pack("<d", value)
        assert isinstance(value, int)
        return head + number(4, value)

    def encode(self) -> bytes:
        """The plane's message."""
        parts = [number(1, 1), text(2, self.name)]
        for i, (line, events) in enumerate(self.lines.items()):
            head = number(1, i + 1) + text(2, line) + number(3, self.zero_ns)
            parts.append(text(3, head + b"".join(events)))
        for field_number, names in ((4, self._events), (5, self._stats)):
            for name, key in names.items():
                entry = number(1, key) + text(2, number(1, key) + text(2, name))
                parts.append(text(field_number, entry))
        return b"".join(parts + self._own)


def xspace(*planes: Plane) -> bytes:
    """A profile's file."""
    return b"".join(text(1, plane.encode()) for plane in planes)
