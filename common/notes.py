"""Notes on the limits of an answer."""

from __future__ import annotations

#: Begins a note that must not be overlooked: the answer may be far off. Outputs print it first.
WARNING = "warning: "
