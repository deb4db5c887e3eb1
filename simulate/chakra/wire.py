"""Protocol buffers on the wire, as far as traces need them: varints and length-delimited fields.

Written by hand so that traces need no protobuf package. The encoding is that of
https://protobuf.dev/programming-guides/encoding. A field is a key,
``number << 3 | type``, and a value: a varint (type 0), 8 bytes (1), a length and bytes (2), or
4 bytes (5).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...common.errors import DatasetError

#: A field: its number and its value, a whole number or bytes.
Field = tuple[int, int | bytes]
#: Wire types; 3 and 4 are the deprecated groups, which Chakra does not use.
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
#: Negative numbers travel as two's complement of 64 bits, whatever the field's type.
_MASK = 2**64 - 1
#: Bytes of the longest varint: 64 bits at 7 per byte.
_LONGEST = 10


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


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Read a whole number; return it and the position behind it.

    Raises:
        DatasetError: The data ends in it, or it is longer than 64 bits.
    """
    value = 0
    # Seven bits per byte, lowest first; the top bit says that more follow.
    for place, byte in enumerate(data[at : at + _LONGEST]):
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value & _MASK, at + place + 1
    raise DatasetError(f"no whole number at byte {at}", hint="the file is cut off or no trace")


def signed(value: int) -> int:
    """Return the signed number that a varint of 64 bits stands for."""
    return value - 2**64 if value >> 63 else value


def fields(data: bytes) -> Iterator[Field]:
    """Yield the fields of a message, in order.

    Raises:
        DatasetError: It is not a message.
    """
    at = 0
    while at < len(data):
        key, at = read_varint(data, at)
        kind = key & 7
        if kind == VARINT:
            value, at = read_varint(data, at)
            yield key >> 3, value
            continue
        if kind not in (FIXED64, BYTES, FIXED32):
            raise DatasetError(f"unknown wire type {kind} at byte {at}")
        size = {FIXED64: 8, FIXED32: 4}.get(kind, -1)
        if size < 0:
            size, at = read_varint(data, at)
        if at + size > len(data):
            raise DatasetError(f"a field of {size} bytes at byte {at} is cut off")
        yield key >> 3, data[at : at + size]
        at += size


def numbers(value: int | bytes) -> list[int]:
    """Return the elements of a repeated field of whole numbers, packed or not."""
    # Writers may leave a field unpacked, and readers must accept both forms.
    if isinstance(value, int):
        return [value]
    decoded, at = [], 0
    while at < len(value):
        one, at = read_varint(value, at)
        decoded.append(one)
    return decoded
