"""Reads Chrome traces object by object: a training step's trace is gigabytes as one value."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from ...common.errors import DatasetError

#: Key of the list of events in a Chrome trace (the "JSON Object Format" of its documentation).
EVENTS = "traceEvents"
#: Bytes read at once, and the longest single value: no event comes near it. Engineering estimates.
_CHUNK, _LONGEST = 4_000_000, 400_000_000


class _Text:
    """A window on a text that moves forward."""

    def __init__(self, path: Path, moved: Callable[[int, int], None]) -> None:
        self._path = path
        self._file: BinaryIO = path.open("rb")
        self._size = path.stat().st_size
        packed = self._file.read(2) == b"\x1f\x8b"
        self._file.seek(0)
        self._stream = gzip.GzipFile(fileobj=self._file) if packed else self._file
        self._decoder = json.JSONDecoder()
        self._moved = moved
        self._ended = False
        self._rest = b""
        self.text, self.place = "", 0

    def close(self) -> None:
        self._file.close()

    def _more(self) -> None:
        """Read on.

        Raises:
            DatasetError: The text ends here, or cannot be unpacked or decoded.
        """
        try:
            chunk = b"" if self._ended else self._stream.read(_CHUNK)
        except (OSError, EOFError, zlib.error) as error:
            raise self._cut(f"the file is cut off or damaged: {error}") from None
        self._moved(self._file.tell(), self._size)
        if not chunk:
            raise self._cut("the file ends in the middle")
        data = self._rest + chunk
        # A character may be cut in two: at most three bytes of it are here.
        whole = len(data)
        while whole > len(data) - 4 and whole and data[whole - 1] & 0xC0 == 0x80:
            whole -= 1
        whole = whole - 1 if whole and data[whole - 1] >= 0xC0 else len(data)
        self._rest = data[whole:]
        # Names of kernels that are no UTF-8 must not stop a trace from being read.
        self.text = self.text[self.place :] + data[:whole].decode(errors="replace")
        self.place = 0

    def _cut(self, what: str) -> DatasetError:
        return DatasetError(what, where=str(self._path), hint="export the trace again")

    def peek(self) -> str:
        """The next character that is no space."""
        while True:
            while self.place < len(self.text) and self.text[self.place] in " \t\r\n":
                self.place += 1
            if self.place < len(self.text):
                return self.text[self.place]
            self._more()

    def take(self, wanted: str) -> None:
        """Pass over one of the characters.

        Raises:
            DatasetError: There is another one.
        """
        if self.peek() not in wanted:
            raise DatasetError(
                f"not a trace: {self.text[self.place : self.place + 20]!r} where one of "
                f"{' '.join(wanted)} is due",
                where=str(self._path),
                hint="expected the JSON that torch.profiler's export_chrome_trace writes",
            )
        self.place += 1

    def value(self) -> object:
        """The next value, whole."""
        self.peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self.text, self.place)
            except json.JSONDecodeError as error:
                # In the middle of what is here no further text would help.
                inside = error.pos < len(self.text) - 100
                if inside and not error.msg.startswith("Unterminated"):
                    raise self._cut(f"not JSON: {error.msg} at {error.pos}") from None
                if len(self.text) - self.place > _LONGEST:
                    raise self._cut("a value does not end") from None
                self._more()
                continue
            # A number at the end of the window may go on behind it.
            if end == len(self.text) and not isinstance(value, dict | list | str):
                self._more()
                continue
            self.place = end
            return value


def stream_events(
    path: Path, moved: Callable[[int, int], None] = lambda done, total: None
) -> Iterator[tuple[str, object]]:
    """Pass over a Chrome trace: ``(traceEvents, event)`` for each event, other keys whole.

    Args:
        path: JSON, also gzipped: an object with ``traceEvents``, or a list of events.
        moved: Told how many bytes of the file are read, and of how many.

    Raises:
        DatasetError: The file is cut off, or no trace.
    """
    text = _Text(path, moved)
    try:
        if text.peek() == "[":
            yield from _items(text)
            return
        text.take("{")
        while text.peek() != "}":
            key = text.value()
            text.take(":")
            if key == EVENTS:
                yield from _items(text)
            else:
                yield str(key), text.value()
            if text.peek() != "}":
                text.take(",")
    finally:
        text.close()


def _items(text: _Text) -> Iterator[tuple[str, object]]:
    text.take("[")
    while text.peek() != "]":
        yield EVENTS, text.value()
        if text.peek() != "]":
            text.take(",")
    text.take("]")
