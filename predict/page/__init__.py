"""HTML pages: one self-contained file each, with its data, readable without a network.

``report.py`` makes the page of a program, ``step.py`` of a step on a cluster, ``accuracy.py`` of
tracked runs; ``assemble.py`` puts data, style and scripts of ``static/`` into one file.
"""

from .assemble import Page, assemble

__all__ = ["Page", "assemble"]
