"""Pauses garbage collection while many objects are created."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collection() -> Iterator[None]:
    """Pause the collection of reference cycles.

    While hundreds of thousands of a program's objects are created, it traverses all live objects
    repeatedly, a third of the time of predicting 12,000 ops, and finds almost no garbage.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
