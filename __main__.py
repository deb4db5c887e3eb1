"""Run the command line as ``python -m opcast``."""

from __future__ import annotations

from .cli import main

main()
