"""XLA profiles read from the file's fields, for releases of JAX without ``ProfileData``.

The message is tsl's XSpace
(https://github.com/openxla/xla/blob/main/third_party/tsl/tsl/profiler/protobuf/xplane.proto):
planes of lines of events, whose names and statistics are stored once per plane. Only the fields
that :func:`opcast.datagen.profile.trace.executed` reads are supported, under the names of JAX.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ...common.wire import fields, signed

Stat = int | float | str | bytes
# Field numbers, by message.
_PLANES = 1
_PLANE_NAME, _LINES, _EVENT_NAMES, _STAT_NAMES, _PLANE_STATS = 2, 3, 4, 5, 6
_VALUE, _ID, _NAME = 2, 1, 2
_LINE_NAME, _LINE_TIME_NS, _EVENTS, _LINE_DISPLAY_NAME = 2, 3, 4, 11
_METADATA, _OFFSET_PS, _DURATION_PS, _EVENT_STATS = 1, 2, 3, 4
_DOUBLE, _UNSIGNED, _SIGNED, _TEXT, _BYTES, _REFERENCE = 2, 3, 4, 5, 6, 7


@dataclass(frozen=True)
class ProfileEvent:
    """An event: a name, times in ns, and statistics by name."""

    name: str
    start_ns: float
    duration_ns: float
    stats: list[tuple[str, Stat]]


@dataclass(frozen=True)
class ProfileLine:
    """A line of events, such as a stream."""

    name: str
    events: list[ProfileEvent]


class ProfilePlane:
    """A plane: a device, or the host.

    Args:
        data: The encoded message.
    """

    def __init__(self, data: memoryview) -> None:
        self.name = ""
        self._lines: list[memoryview] = []
        self._names: dict[int, str] = {}
        self._stat_names: dict[int, str] = {}
        self._own: list[memoryview] = []
        for number, value in fields(data):
            if not isinstance(value, memoryview):
                continue
            if number == _PLANE_NAME:
                self.name = _decoded(value)
            elif number == _LINES:
                self._lines.append(value)
            elif number == _EVENT_NAMES:
                self._names |= _named(value)
            elif number == _STAT_NAMES:
                self._stat_names |= _named(value)
            elif number == _PLANE_STATS:
                self._own.append(value)

    @cached_property
    def stats(self) -> list[tuple[str, Stat]]:
        """Statistics of the plane itself."""
        return list(self._stats(self._own))

    @property
    def lines(self) -> Iterator[ProfileLine]:
        """Lines of the plane."""
        for data in self._lines:
            name, shown, zero_ns = "", "", 0
            events = []
            for number, value in fields(data):
                if number == _LINE_TIME_NS and isinstance(value, int):
                    zero_ns = signed(value)
                elif isinstance(value, memoryview):
                    if number == _EVENTS:
                        events.append(value)
                    elif number == _LINE_NAME:
                        name = _decoded(value)
                    elif number == _LINE_DISPLAY_NAME:
                        shown = _decoded(value)
            yield ProfileLine(shown or name, [self._event(own, zero_ns) for own in events])

    def _event(self, data: memoryview, zero_ns: int) -> ProfileEvent:
        name, offset, duration = "", 0, 0
        stats = []
        for number, value in fields(data):
            if isinstance(value, memoryview):
                if number == _EVENT_STATS:
                    stats.append(value)
            elif number == _METADATA:
                name = self._names.get(value, "")
            elif number == _OFFSET_PS:
                offset = signed(value)
            elif number == _DURATION_PS:
                duration = signed(value)
        start = zero_ns + offset * 1e-3
        return ProfileEvent(name, start, duration * 1e-3, list(self._stats(stats)))

    def _stats(self, messages: list[memoryview]) -> Iterator[tuple[str, Stat]]:
        for message in messages:
            name, found = "", None
            for number, value in fields(message):
                if number == _METADATA and isinstance(value, int):
                    name = self._stat_names.get(value, "")
                else:
                    found = self._value(number, value)
            if found is not None:
                yield name, found

    def _value(self, number: int, value: int | memoryview) -> Stat | None:
        if isinstance(value, int):
            if number == _REFERENCE:  # a text that is stored among the names
                return self._stat_names.get(value, "")
            return signed(value) if number == _SIGNED else value
        if number == _DOUBLE:
            double: float = struct.unpack("<d", value)[0]
            return double
        return _decoded(value) if number == _TEXT else bytes(value)


def read_planes(data: bytes) -> list[ProfilePlane]:
    """Planes of a profile.

    Raises:
        ValueError: It is truncated, or not a profile.
    """
    found = fields(memoryview(data))
    return [ProfilePlane(v) for n, v in found if n == _PLANES and isinstance(v, memoryview)]


@dataclass(frozen=True)
class FileProfile:
    """A profile with the interface of :class:`jax.profiler.ProfileData`."""

    planes: list[ProfilePlane]


def _named(entry: memoryview) -> dict[int, str]:
    """An entry of a map from numbers to messages with a name."""
    message = dict(fields(entry)).get(_VALUE)
    if not isinstance(message, memoryview):
        return {}
    own = dict(fields(message))
    key, name = own.get(_ID, 0), own.get(_NAME)
    if not isinstance(key, int):
        return {}
    return {key: _decoded(name) if isinstance(name, memoryview) else ""}


def _decoded(value: memoryview) -> str:
    return bytes(value).decode(errors="replace")
