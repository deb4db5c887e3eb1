"""Fields of protocol buffers, without their schema compiled in.

Encoding: https://protobuf.dev/programming-guides/encoding/. Only what a few messages need: no
groups, which nobody writes any more.
"""

from __future__ import annotations

from collections.abc import Iterator

#: Wire types: a varint, eight bytes, bytes with their length, four bytes.
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5


def fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Pass over the fields of a message: number, and the integer or the bytes that it holds.

    Floats and fixed integers come as their bytes.

    Raises:
        ValueError: The message is cut off, or is none.
    """
    place, end = 0, len(data)
    while place < end:
        key, place = _varint(data, place)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, place = _varint(data, place)
            yield number, value
            continue
        if kind == _BYTES:
            size, place = _varint(data, place)
        elif kind in (_EIGHT, _FOUR):
            size = 8 if kind == _EIGHT else 4
        else:
            raise ValueError(f"wire type {kind} at byte {place}")
        if number == 0 or place + size > end:
            raise ValueError(f"a field of {size} bytes at byte {place} of {end}")
        yield number, data[place : place + size]
        place += size


def _varint(data: memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    # Ten bytes hold 64 bits.
    for _ in range(10):
        if place >= len(data):
            break
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
    raise ValueError(f"a number that does not end at byte {place}")
