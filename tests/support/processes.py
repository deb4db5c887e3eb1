"""Whether processes that a test started have ended."""

from __future__ import annotations

import time
from pathlib import Path


def runs(pid: int) -> bool:
    """Whether a process runs; one that only waits to be collected does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_for_end(pid: int) -> None:
    """Fails if a process still runs after ten seconds."""
    until = time.monotonic() + 10
    while time.monotonic() < until and runs(pid):
        time.sleep(0.05)
    assert not runs(pid)
