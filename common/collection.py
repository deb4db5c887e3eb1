"""Garbage collection, put off while much is made and little thrown away."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collection() -> Iterator[None]:
    """Pause the collection of cycles.

    It walks all that is alive again and again while a program's hundred thousands of objects are
    made, a third of the time of predicting 12,000 ops, and finds next to no garbage.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
