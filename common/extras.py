"""How to get an optional part of opcast: extras of the clone that it was installed from."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlparse

from .paths import PACKAGE


def extra_hint(extra: str) -> str:
    """Return how to install an extra; no package index has opcast.

    Args:
        extra: Name of the extra, such as ``track``.
    """
    clone = _clone()
    where = f"in {clone}" if clone else "in your clone of opcast"
    return f"{where}: pip install '.[{extra}]'"


def _clone() -> Path | None:
    """The clone that opcast runs in or was installed from, if it is still there."""
    if (PACKAGE / "pyproject.toml").is_file():
        return PACKAGE
    try:
        text = distribution("opcast").read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    # PEP 610: pip writes down which folder it installed from.
    url = urlparse(json.loads(text).get("url", "")) if text else None
    if url is None or url.scheme != "file":
        return None
    folder = Path(unquote(url.path))
    return folder if (folder / "pyproject.toml").is_file() else None
