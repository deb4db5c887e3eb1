"""Messages of Chakra's schema 0.0.4: metadata and nodes, encoded and decoded.

Field numbers are those of ``et_def.proto`` of the MLCommons Chakra working group
(https://github.com/mlcommons/chakra). A file holds the metadata and then the nodes, each message
preceded by its length as a varint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from ...common.errors import DatasetError
from ...common.wire import fields, number, numbers, packed, read_varint, signed, text, varint

#: Schema version, which files state in their metadata.
VERSION = "0.0.4"
#: Supported values of attributes.
Value = int | str | bool
#: Field numbers of an attribute's value with one number: signed, unsigned, zigzag.
_SIGNED, _UNSIGNED, _ZIGZAG = (7, 9), (11, 13), (15, 17)
#: Field numbers of ``AttributeProto``'s ``oneof value`` that are written.
_INT32, _INT64, _UINT64, _BOOL, _STRING = 7, 9, 13, 27, 29
#: Attributes of 32 bits, and unsigned ones; other whole numbers are ``int64``.
_OF_32_BITS = ("comm_src", "comm_dst", "comm_tag")
_OF_UNSIGNED = ("tensor_size",)


class NodeType(IntEnum):
    """Node types, with the numbers of ``et_def.proto``."""

    INVALID = 0
    METADATA = 1
    MEM_LOAD = 2
    MEM_STORE = 3
    COMP = 4
    COMM_SEND = 5
    COMM_RECV = 6
    COMM_COLL = 7


class CommType(IntEnum):
    """Collectives, with the numbers of ``et_def.proto``."""

    ALL_REDUCE = 0
    REDUCE = 1
    ALL_GATHER = 2
    GATHER = 3
    SCATTER = 4
    BROADCAST = 5
    ALL_TO_ALL = 6
    REDUCE_SCATTER = 7
    REDUCE_SCATTER_BLOCK = 8
    BARRIER = 9


@dataclass(frozen=True)
class EtNode:
    """A node of an execution trace.

    Attributes:
        id: Number; ASTRA-sim issues ready nodes in this order.
        name: Label.
        type: Node type.
        deps: Nodes whose results it needs.
        micros: Duration in whole microseconds.
        attrs: Attributes such as ``comm_size``.
    """

    id: int
    name: str
    type: NodeType
    deps: tuple[int, ...] = ()
    micros: int = 0
    attrs: Mapping[str, Value] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes that the rank contributes to communication; 0 for computation."""
        return int(self.attrs.get("comm_size", 0))

    @property
    def kernels(self) -> int:
        """Number of kernels in it; 1 if the trace does not specify it, 0 for communication."""
        return 0 if self.collective else int(self.attrs.get("kernels", 1))

    @property
    def collective(self) -> str:
        """Name of the collective, or of the transfer; empty for computation."""
        if self.type == NodeType.COMM_COLL:
            return CommType(int(self.attrs["comm_type"])).name.lower()
        sends = self.type in (NodeType.COMM_SEND, NodeType.COMM_RECV)
        return self.type.name.removeprefix("COMM_").lower() if sends else ""


def encode(nodes: Iterable[EtNode]) -> bytes:
    """Encode a trace."""
    messages = [text(1, VERSION), *map(_node, nodes)]
    return b"".join(varint(len(m)) + m for m in messages)


def decode(data: bytes, where: str = "") -> list[EtNode]:
    """Decode the nodes of a trace.

    Args:
        data: Content of the file.
        where: Name of the file, for messages.

    Raises:
        DatasetError: It is not a trace, or has another version.
    """
    try:
        messages = list(_messages(data))
        version = dict(fields(messages[0])).get(1, b"") if messages else b""
        if version != VERSION.encode():
            raise DatasetError(f"the trace is of version {version!r}, not {VERSION}")
        return [_checked(_read_node(m)) for m in messages[1:]]
    # The file is untrusted: any failure to decode it becomes one kind of error.
    except (DatasetError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = error.what if isinstance(error, DatasetError) else str(error)
        raise DatasetError(
            f"no Chakra trace: {what}", where=where, hint="files of opcast export chakra end in .et"
        ) from None


def _checked(node: EtNode) -> EtNode:
    """Return the node if its attributes have the right types."""
    # Evaluating ``bytes`` and ``kernels`` also converts them, which raises for other types.
    if min(node.bytes, node.kernels) < 0:
        raise ValueError(f"node {node.id} has a negative size")
    return node


def _messages(data: bytes) -> Iterable[bytes]:
    at = 0
    while at < len(data):
        size, at = read_varint(data, at)
        if at + size > len(data):
            raise DatasetError(f"a message of {size} bytes at byte {at} is cut off")
        yield data[at : at + size]
        at += size


def _node(node: EtNode) -> bytes:
    # 1 id, 2 name, 3 type, 5 data_deps, 7 duration_micros, 10 attr.
    parts = [number(1, node.id), text(2, node.name), number(3, node.type), packed(5, node.deps)]
    if node.micros:
        parts.append(number(7, node.micros))
    parts += [text(10, _attribute(name, value)) for name, value in node.attrs.items()]
    return b"".join(parts)


def _attribute(name: str, value: Value) -> bytes:
    if isinstance(value, bool):
        content = number(_BOOL, value)
    elif isinstance(value, str):
        content = text(_STRING, value)
    else:
        short = _INT32 if name in _OF_32_BITS else _INT64
        content = number(_UINT64 if name in _OF_UNSIGNED else short, value)
    return text(1, name) + content


def _read_node(data: bytes) -> EtNode:
    single: dict[int, int | bytes] = {1: 0, 2: b"", 3: 0, 7: 0}
    deps: list[int] = []
    attrs: dict[str, Value] = {}
    for key, value in fields(data):
        if key in single:
            single[key] = value
        # Control and data dependencies (4, 5) order nodes alike here.
        elif key in (4, 5):
            deps += numbers(value)
        elif key == 10 and isinstance(value, bytes):
            attrs.update(_read_attribute(value))
    name = single[2]
    return EtNode(
        id=_whole(single[1]),
        name=name.decode("utf-8") if isinstance(name, bytes) else "",
        type=NodeType(_whole(single[3])),
        deps=tuple(sorted(set(deps))),
        micros=_whole(single[7]),
        attrs=attrs,
    )


def _read_attribute(data: bytes) -> dict[str, Value]:
    """Decode an attribute; lists, fractions and bytes are skipped."""
    name, values = "", dict[str, Value]()
    for key, value in fields(data):
        if key == 1 and isinstance(value, bytes):
            name = value.decode("utf-8")
        elif key == _STRING and isinstance(value, bytes):
            values[name] = value.decode("utf-8")
        elif key == _BOOL:
            values[name] = bool(value)
        elif key in _SIGNED and isinstance(value, int):
            values[name] = signed(value)
        elif key in _UNSIGNED and isinstance(value, int):
            values[name] = value
        elif key in _ZIGZAG and isinstance(value, int):
            # ZigZag decoding of ``sint32`` and ``sint64``.
            values[name] = (value >> 1) ^ -(value & 1)
    return values


def _whole(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise TypeError("a number is expected where bytes are")
    return value
