"""A campaign's folder: a journal of started and finished cases, and rows in separate files.

Every line is on disk before the next step, and a file of rows is complete before the journal names
it, so that a kill at any moment only costs the work in progress.
"""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from ...common.files import append_lines, read_lines, write_bytes
from ...common.types import JsonObject

_JOURNAL = "journal.jsonl"
_ROWS = "rows-{:05d}.jsonl.gz"
#: Attempts in which a case may take the campaign down before it is left out.
_ATTEMPTS = 2
KILLED = "the campaign was killed while it ran, twice"


class Journal:
    """The history of a campaign, and the folder where it is kept.

    Args:
        folder: The campaign's folder; created if missing.

    Attributes:
        done: Keys of measured cases.
        failed: Reasons by key of cases that failed.
        spent_s: Seconds by stage.
        slices: Number of slices started.
        began: Time of the first slice, seconds since the epoch; 0 before it.
        each_s: Seconds per case, by stage and kind.
        notes: Other events, such as a worker that did not start.
        platform: ``gpu``, ``tpu`` or ``cpu``; empty before the first slice.
        hosts: Description of the machine in each slice.
        used_up_s: Budget that a slice used up, in seconds; 0 if none did.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._path = folder / _JOURNAL
        self.done: set[str] = set()
        self.failed: dict[str, str] = {}
        self.spent_s: dict[str, float] = defaultdict(float)
        self.each_s: dict[tuple[str, str], float] = {}
        self._closed_s = 0.0
        self.slices = 0
        self.began = 0.0
        self._begun: Counter[str] = Counter()
        self._under_way: list[str] = []
        self._slice_began = self._last = 0.0
        self._files: list[str] = []
        self.notes: list[str] = []
        self.platform = ""
        self.hosts: list[JsonObject] = []
        self.used_up_s = 0.0
        for event in read_lines(self._path):
            if "event" in event:
                self._take(event)
        self._close_slice()
        for key, times in self._begun.items():
            if times >= _ATTEMPTS and key not in self.done and key not in self.failed:
                self.add("failed", key=key, reason=KILLED)

    def _close_slice(self) -> None:
        self._closed_s += max(0.0, self._last - self._slice_began)
        self._slice_began = self._last = 0.0

    def _take(self, event: JsonObject) -> None:
        """Account for a line."""
        what, now = event["event"], float(event["time"])
        if what == "slice":
            self._close_slice()
            self._slice_began = now
            self.began = self.began or now
            self.slices += 1
        self._last = now
        if what == "begin":
            self._begun.update(event["keys"])
            self._under_way = list(event["keys"])
        elif what == "end":
            # An interrupted campaign does not blame the cases in progress.
            self._begun.subtract(self._under_way)
            self._under_way = []
            self.used_up_s = max(self.used_up_s, float(event.get("used_up_s", 0.0)))
        elif what == "failed":
            self.failed[event["key"]] = str(event["reason"])
        elif what == "host":
            self.platform = str(event["platform"])
            self.hosts.append({"slice": self.slices, **event["record"]})
        elif what == "note":
            self.notes.append(str(event["text"]))
        elif what == "block":
            self.done.update(event["done"])
            self.failed.update(event["failed"])
            # These were cut off by the end of the time, through no fault of their own.
            self._begun.subtract(event["unfinished"])
            self._under_way = []
            self.spent_s[event["stage"]] += float(event["seconds"])
            count = len(event["done"]) + len(event["failed"])
            if count:
                self.each_s[event["stage"], event["kind"]] = float(event["seconds"]) / count
            if event["rows"]:
                self._files.append(str(event["rows"]))

    def add(self, what: str, **values: object) -> None:
        """Append a line, which is on disk on return."""
        event: JsonObject = {"event": what, "time": time.time(), **values}
        append_lines(self._path, json.dumps(event, sort_keys=True) + "\n")
        self._take(event)

    def keep(self, rows: Iterable[Mapping[str, object]]) -> str:
        """Write rows into a new file; returns its name for the line of their block."""
        text = "".join(json.dumps(row, sort_keys=True) + "\n" for row in rows)
        if not text:
            return ""
        number = len(list(self._folder.glob("rows-*.jsonl.gz")))
        name = _ROWS.format(number)
        # No time stamp: equal rows make equal files.
        write_bytes(self._folder / name, gzip.compress(text.encode(), mtime=0))
        return name

    def rows(self) -> Iterable[JsonObject]:
        """Rows of all finished blocks, in order."""
        for name in self._files:
            for line in gzip.decompress((self._folder / name).read_bytes()).splitlines():
                yield json.loads(line)

    @property
    def elapsed_s(self) -> float:
        """Total seconds of all slices, each until its last line."""
        return self._closed_s + max(0.0, self._last - self._slice_began)

    @property
    def finished(self) -> set[str]:
        """Keys of cases that need no further attempt."""
        return self.done | set(self.failed)
