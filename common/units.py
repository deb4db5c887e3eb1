"""Times, energies and sizes as text with readable units."""

from __future__ import annotations

#: Units of time with their size in microseconds, the largest first.
_UNITS = ((1e6, "s"), (1e3, "ms"), (1.0, "µs"))
#: Units of energy with their size in joules, the largest first.
_JOULES = ((1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ"))


def duration(us: float) -> str:
    """Write microseconds with a readable unit, three significant digits."""
    for scale, unit in _UNITS:
        if abs(us) >= scale:
            return f"{us / scale:.3g} {unit}"
    return f"{us * 1e3:.3g} ns"


def energy(joules: float) -> str:
    """Write joules with a readable unit, four significant digits."""
    for scale, unit in _JOULES:
        if abs(joules) >= scale:
            return f"{joules / scale:.4g} {unit}"
    return f"{joules:.4g} J"


def size(count: float) -> str:
    """Write bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB" if abs(count) < 1e5 else f"{count / 1024:.3g} TiB"
