"""Imports XGBoost without parts that prediction does not need.

XGBoost imports scikit-learn for its estimator interface, which takes a third of the time of a
command that only predicts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

_own_process = False


def own_process() -> None:
    """Declare that this process only runs an opcast command.

    Only then may imports be modified: a user's program may need XGBoost's scikit-learn interface.
    """
    global _own_process
    _own_process = True


def xgboost() -> Any:
    """Import ``xgboost``; in an opcast command without its scikit-learn interface."""
    if not _own_process or "xgboost" in sys.modules:
        return import_module("xgboost")
    with hidden("sklearn"):
        return import_module("xgboost")


@contextmanager
def hidden(package: str) -> Iterator[None]:
    """Make a package appear not installed; no effect if it is already imported."""
    if package in sys.modules:
        yield
        return
    # An import of a module whose entry is None raises ImportError (Python reference, import
    # system), which XGBoost handles as scikit-learn not being installed.
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]
