"""Processes that end with the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal

#: Of Linux's <sys/prctl.h>.
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """End when the process that started this one ends, however that happens (on Linux).

    Args:
        parent: Its id, where it may have ended already; this process then ends at once.
    """
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return
    if parent is not None and os.getppid() != parent:
        os._exit(1)
