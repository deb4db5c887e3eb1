"""Imports XGBoost, without what commands that only predict do not need.

XGBoost imports scikit-learn for its interface, which is a third of such a command's time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

_own_process = False


def own_process() -> None:
    """Say that this process runs a command of ours and nothing else."""
    global _own_process
    _own_process = True


def xgboost() -> Any:
    """The module ``xgboost``; in a process of our own without its interface of scikit-learn."""
    if not _own_process or "xgboost" in sys.modules:
        return import_module("xgboost")
    with hidden("sklearn"):
        return import_module("xgboost")


@contextmanager
def hidden(package: str) -> Iterator[None]:
    """Let a package count as not installed; one that is imported already stays."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]
