"""Run the command line as ``python -m opcast.cli``."""

from __future__ import annotations

from . import main

main()
