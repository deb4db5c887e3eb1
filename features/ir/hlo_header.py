"""Header of an HLO module: its attributes, and the tables that map ops to lines of user code."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .hlo_attributes import ATTRIBUTE, QUOTED, read_backend_config, unquote
from .mlir.locations import FRAMEWORK, STARTS
from .program import Program, Source

_MODULE = re.compile(r"HloModule\s+([^\s,]+)")
# ``{0}: (2, {}, may-alias)``: output 0 shares the buffer of parameter 2.
_ALIAS = re.compile(r"\{([\d,\s]*)\}:\s*\((\d+)")
# ``(2, {})``: parameter 2 makes room for any output.
_DONOR = re.compile(r"\((\d+),")
# ``op_name="jit(f)/add" source_line=3``.
_FIELD = re.compile(rf"(\w+)=({QUOTED}|\S+)")
#: Tables between the header and the first computation, in the order in which they refer to each
#: other.
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")

Tables = dict[str, dict[int, str]]


class Frame(NamedTuple):
    """A line of the user's code."""

    file: str = ""
    line: int = 0


class Sources:
    """Reads ``metadata={...}``; equal texts are read once."""

    def __init__(self, frames: Mapping[int, Frame]) -> None:
        self._frames = frames
        self._known: dict[str, Source | None] = {}

    def read(self, text: str) -> Source | None:
        """Read the source of an op from the text between the braces."""
        if text not in self._known:
            self._known[text] = self._read(text)
        return self._known[text]

    def _read(self, text: str) -> Source | None:
        fields = dict(_FIELD.findall(text))
        name = unquote(fields.get("op_name", '""'))
        frame = self._frames.get(int(fields.get("stack_frame_id", 0)), Frame())
        # XLA before stack frames wrote file and line into each instruction.
        if "source_file" in fields:
            frame = Frame(unquote(fields["source_file"]), int(fields.get("source_line", 0)))
        return Source(name, frame.file, frame.line) if name or frame.file else None


def read_header(lines: Sequence[str], program: Program) -> tuple[int, Sources]:
    """Read everything before the first computation.

    Args:
        lines: The whole text.
        program: Gets the module's name and attributes.

    Returns:
        Index of the first computation's line, and a reader of metadata.

    Raises:
        ValueError: There is no ``HloModule`` line.
    """
    heads = (i for i, line in enumerate(lines) if line.lstrip().startswith("HloModule"))
    start = next(heads, -1)
    match = _MODULE.match(lines[start].strip()) if start >= 0 else None
    if match is None:
        raise ValueError("no HloModule line with a name")
    program.name = match[1]
    _module_attributes(dict(ATTRIBUTE.findall(match.string, match.end())), program)
    tables: Tables = {name: {} for name in _TABLES}
    table: dict[int, str] = {}
    for number in range(start + 1, len(lines)):
        text = lines[number].rstrip()
        if text.endswith("{"):
            return number, Sources(_frames(tables))
        head, _, rest = text.partition(" ")
        if text in tables:
            table = tables[text]
        # Rows of the tables: a number, then text.
        elif head.isdigit():
            table[int(head)] = rest
    return len(lines), Sources({})


def _module_attributes(attributes: Mapping[str, str], program: Program) -> None:
    program.is_scheduled = attributes.get("is_scheduled") == "true"
    program.num_replicas = int(attributes.get("replica_count", 1))
    program.num_partitions = int(attributes.get("num_partitions", 1))
    program.dialect = attributes.get("dialect", "hlo")
    aliases = _ALIAS.findall(attributes.get("input_output_alias", ""))
    program.aliases = tuple((int(o.split(",")[0] or 0), int(p)) for o, p in aliases)
    donors = _DONOR.findall(attributes.get("buffer_donor", ""))
    program.donors = tuple(int(number) for number in donors)
    meshes = read_backend_config(attributes.get("meshes", "{}"))
    program.meshes = meshes if isinstance(meshes, dict) else {}


def _frames(tables: Tables) -> dict[int, Frame]:
    """Return the innermost frame outside of frameworks, by stack frame number."""
    files = {key: unquote(value) for key, value in tables["FileNames"].items()}
    places = {}
    for key, value in tables["FileLocations"].items():
        fields = _int_fields(value)
        places[key] = Frame(files.get(fields.get("file_name_id", 0), ""), fields.get("line", 0))
    rows = {key: _int_fields(value) for key, value in tables["StackFrames"].items()}
    # XLA prints the parent's number plus one (1: no parent); a zero can only stand in text that
    # holds the numbers themselves.
    shift = 0 if any(row.get("parent_frame_id", 0) == 0 for row in rows.values()) else 1
    return {key: _user_frame(key, rows, places, shift) for key in rows}


def _user_frame(
    key: int, rows: Mapping[int, dict[str, int]], places: Mapping[int, Frame], shift: int
) -> Frame:
    innermost = places.get(rows[key].get("file_location_id", 0), Frame())
    frame, seen = innermost, {key}
    # Outwards to the user's own code; `seen` ends circles in damaged tables.
    while FRAMEWORK.search(frame.file):
        key = rows[key].get("parent_frame_id", 0) - shift
        if key in seen or key not in rows:
            return Frame() if STARTS.search(innermost.file) else innermost
        seen.add(key)
        frame = places.get(rows[key].get("file_location_id", 0), Frame())
    return frame


def _int_fields(text: str) -> dict[str, int]:
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", text)}
