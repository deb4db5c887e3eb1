"""Where opcast keeps what it makes for the user: caches, measured devices, registered models."""

from __future__ import annotations

import os
from pathlib import Path

#: The package's folder, which is the repository's root in a checkout.
PACKAGE = Path(__file__).resolve().parents[1]


def home() -> Path:
    """Return the user's folder: ``$OPCAST_CACHE``, else ``opcast`` in the XDG cache folder."""
    if override := os.environ.get("OPCAST_CACHE"):
        return Path(override)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "opcast"
