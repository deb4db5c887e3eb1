"""The command line: ``opcast``, ``python -m opcast`` and ``python -m opcast.cli``.

``main`` holds the table of commands; each group of commands has a module of its own.
"""

from __future__ import annotations

from .main import app as app
from .main import main as main
