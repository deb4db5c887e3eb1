"""The command line: ``opcast``, or ``python -m opcast``.

``main`` holds the table of commands; each group of commands has a module of its own.
"""

from __future__ import annotations

from .main import app as app
from .main import main as main
