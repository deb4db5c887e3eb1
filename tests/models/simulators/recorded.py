"""Answers of foreign simulators, recorded once and replayed.

``$OPCAST_RECORD=1`` asks the tools themselves and adds their answers to the files in ``data``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from opcast.models.simulators import base

DATA = Path(__file__).parent / "data"
RECORDING = os.environ.get("OPCAST_RECORD") == "1"


class Recorded:
    """Recorded answers of one tool.

    Attributes:
        path: File with the ``versions`` of the tool's packages and its ``replies``, by the request
            as JSON with sorted keys.
    """

    def __init__(self, tool: str) -> None:
        self.path = DATA / f"{tool}.json"
        content = json.loads(self.path.read_text()) if self.path.is_file() else {}
        self.versions: dict[str, str] = content.get("versions", {})
        self.replies: dict[str, dict[str, Any]] = content.get("replies", {})

    def reply(self, job: dict[str, Any]) -> dict[str, Any]:
        """The recorded answer to a request.

        Raises:
            AssertionError: There is none.
        """
        key = json.dumps(job, sort_keys=True)
        assert key in self.replies, f"{self.path.name} lacks {key}: record it with OPCAST_RECORD=1"
        return dict(self.replies[key])

    def add(self, job: dict[str, Any], reply: dict[str, Any]) -> None:
        """Keep an answer in the file."""
        self.replies[json.dumps(job, sort_keys=True)] = reply
        content = {"versions": self.versions, "replies": dict(sorted(self.replies.items()))}
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(json.dumps(content, indent=1) + "\n")


class ReplayedTool(base.ToolProcess):
    """Stands in for a tool's process."""

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        recorded = Recorded(self._tool)
        if not RECORDING:
            return recorded.reply(job)
        reply = super().ask(job)
        recorded.add(job, reply)
        return reply
