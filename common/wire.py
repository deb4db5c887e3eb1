"""Protocol buffer encoding, as far as traces need it: varints and length-delimited fields.

Written by hand so that traces need no protobuf package, and readers can skip fields. The encoding
is that of https://protobuf.dev/programming-guides/encoding. A field is a key,
``number << 3 | type``, and a value: a varint (type 0), 8 bytes (1), a length and bytes (2), or
4 bytes (5).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

#: An encoded message: bytes, or a view of them, whose parts are views.
Data = TypeVar("Data", bytes, memoryview)
#: Wire types; 3 and 4 are the deprecated groups, which are no longer written.
VARINT, BYTES = 0, 2
#: Bytes of the values of fixed-size types.
_SIZES = {1: 8, 5: 4}
#: Negative numbers are encoded in two's complement of 64 bits for any field type.
_MASK = 2**64 - 1
#: Shifts of a varint's bytes: 64 bits at 7 per byte.
_SHIFTS = range(0, 70, 7)


def varint(value: int) -> bytes:
    """Encode a whole number, a negative one in two's complement of 64 bits."""
    value &= _MASK
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def number(field: int, value: int) -> bytes:
    """Encode a field with a whole number."""
    return varint(field << 3 | VARINT) + varint(value)


def text(field: int, value: str | bytes) -> bytes:
    """Encode a field with text, or with an encoded message."""
    content = value.encode() if isinstance(value, str) else value
    return varint(field << 3 | BYTES) + varint(len(content)) + content


def packed(field: int, values: Iterable[int]) -> bytes:
    """Encode a repeated field of whole numbers; empty if there are none."""
    content = b"".join(map(varint, values))
    return text(field, content) if content else b""


def read_varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """Read a whole number; return it and the position after it.

    Raises:
        ValueError: The data is cut off, or the number is longer than 64 bits.
    """
    value, start = 0, at
    # Seven bits per byte, lowest first; the top bit marks a continuation.
    for shift in _SHIFTS:
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _MASK, at
    raise ValueError(f"no whole number at byte {start}: the file is cut off or no trace")


def signed(value: int) -> int:
    """Return the signed number that a 64-bit varint encodes."""
    return value - 2**64 if value >> 63 else value


def fields(data: Data) -> Iterator[tuple[int, int | Data]]:
    """Iterate over the fields of a message: number, and the whole number or the bytes.

    Floats and fixed-size integers are returned as bytes.

    Raises:
        ValueError: The message is cut off or malformed.
    """
    at = 0
    while at < len(data):
        key, at = read_varint(data, at)
        kind = key & 7
        if kind == VARINT:
            value, at = read_varint(data, at)
            yield key >> 3, value
            continue
        if kind == BYTES:
            size, at = read_varint(data, at)
        elif kind in _SIZES:
            size = _SIZES[kind]
        else:
            raise ValueError(f"unknown wire type {kind} at byte {at}")
        if key >> 3 == 0 or at + size > len(data):
            raise ValueError(f"a field of {size} bytes at byte {at} of {len(data)} is cut off")
        yield key >> 3, data[at : at + size]
        at += size


def numbers(value: int | bytes) -> list[int]:
    """Return the elements of a repeated field of whole numbers, packed or not."""
    # Writers may leave a field unpacked; readers must accept both forms.
    if isinstance(value, int):
        return [value]
    decoded, at = [], 0
    while at < len(value):
        one, at = read_varint(value, at)
        decoded.append(one)
    return decoded
