"""HTML pages, each a self-contained file with its data, readable offline.

``report.py`` makes the page of a program, ``cluster.py`` of a step on a cluster or a service,
``accuracy.py`` of tracked runs; ``assemble.py`` puts data, style and
scripts of ``static/`` into one file.
"""

from .assemble import Page, assemble

__all__ = ["Page", "assemble"]
