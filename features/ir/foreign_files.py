"""Files of other tools that users take for a program, told by content or suffix, and what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from ...common.files import parse_yaml
from ...common.types import JsonObject

_FILE = Path(__file__).with_name("foreign_files.yaml")
#: How a zip archive begins.
_ZIP = b"PK\x03\x04"


class Foreign(NamedTuple):
    """A file of another tool.

    Attributes:
        what: What it is.
        hint: What to do instead.
    """

    what: str
    hint: str


@cache
def _files() -> Mapping[str, JsonObject]:
    """Kinds of files by name, with ``what``, ``hint``, ``suffixes`` and ``content``."""
    read: Any = parse_yaml(_FILE.read_text(encoding="utf-8"))
    hints = read["hints"]
    return {
        name: own | {"hint": hints.get(own["hint"], own["hint"])}
        for name, own in read["files"].items()
    }


#: Most bytes of the end of a zip archive: 22, and a comment.
_ZIP_END = 22 + 65535
#: How StableHLO, HLO or an export begins, whatever the file is called.
_PROGRAM = re.compile(rb"\s*(?:(?://|#)[^\n]*\n\s*)*(?:module\b|HloModule\b|ML\xefR)")


def foreign_file(name: str, data: bytes) -> Foreign | None:
    """Recognise a file that holds no program; ``None`` if it may hold one.

    Args:
        name: Its name; content takes precedence over the suffix.
        data: Its content.
    """
    # Bytecode may stand inside an export, so it is looked for everywhere.
    if _PROGRAM.match(data) or b"ML\xefR" in data:
        return None
    kind = _by_content(data)
    if not kind and data.startswith(_ZIP):
        # PyTorch packs whatever it saves.
        kind = _by_members(data) or _by_suffix(name) or "checkpoint"
    kind = kind or _by_suffix(name)
    return Foreign(_files()[kind]["what"], _files()[kind]["hint"]) if kind else None


def _by_suffix(name: str) -> str:
    suffix = PurePath(name).suffix.lower()
    return next((kind for kind, own in _files().items() if suffix in own.get("suffixes", ())), "")


def _by_content(data: bytes) -> str:
    for kind, own in _files().items():
        at = own.get("content", {}).get("at", 0)
        if "content" in own and data[at:].startswith(own["content"]["bytes"].encode("latin-1")):
            return kind
    # The length of a JSON header, then the header.
    if data[8:10] == b'{"' and 0 < int.from_bytes(data[:8], "little") <= len(data):
        return "safetensors"
    # A pickle of protocol 2 or later, as older versions of PyTorch save.
    if data[:1] == b"\x80" and data[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "checkpoint"
    return "configuration" if data.lstrip()[:1] == b"{" and b'"model_type"' in data else ""


def _by_members(data: bytes) -> str:
    """What a zip archive is by the files in it."""
    if b"archive_format" in data[:4096] or b"/models/model.json" in data:
        # An archive ends with the list of its files, through which it is read.
        return "program_of_torch" if b"PK\x05\x06" in data[-_ZIP_END:] else "damaged"
    # Code of TorchScript stands beside its constants.
    return "torchscript" if b"/code/__torch__" in data or b"/constants.pkl" in data else ""
