"""Folders of opcast's files: caches, measured devices, registered models."""

from __future__ import annotations

import os
from pathlib import Path

#: The package's folder, which is the repository's root in a checkout.
PACKAGE = Path(__file__).resolve().parents[1]


def home() -> Path:
    """Return the cache folder: ``$OPCAST_CACHE``, else ``opcast`` in the XDG cache folder."""
    if override := os.environ.get("OPCAST_CACHE"):
        return Path(override)
    return _xdg("XDG_CACHE_HOME", ".cache")


def data_home() -> Path:
    """Return the folder of irreplaceable data, such as registered models.

    ``$OPCAST_DATA``, else ``$OPCAST_CACHE`` if set, which once was the folder of everything, else
    ``opcast`` in the XDG data folder.
    """
    if override := os.environ.get("OPCAST_DATA") or os.environ.get("OPCAST_CACHE"):
        return Path(override)
    return _xdg("XDG_DATA_HOME", ".local/share")


def _xdg(variable: str, default: str) -> Path:
    base = os.environ.get(variable)
    return (Path(base) if base else Path.home() / default) / "opcast"
