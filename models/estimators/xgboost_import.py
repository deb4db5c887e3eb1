"""Imports XGBoost without the parts that commands which only predict do not need.

XGBoost imports scikit-learn for its estimator interface, which takes a third of such a command's
time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

_own_process = False


def own_process() -> None:
    """Declare that this process runs one of opcast's commands and nothing else.

    Only then may imports be tampered with: a user's own program may want XGBoost's interface.
    """
    global _own_process
    _own_process = True


def xgboost() -> Any:
    """Import ``xgboost``, in a process of our own without its scikit-learn interface."""
    if not _own_process or "xgboost" in sys.modules:
        return import_module("xgboost")
    with hidden("sklearn"):
        return import_module("xgboost")


@contextmanager
def hidden(package: str) -> Iterator[None]:
    """Make a package look as if it were not installed; one that is imported already stays."""
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
