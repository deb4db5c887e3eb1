"""Quantities as text with SI prefixes, without exponents."""

from __future__ import annotations

from math import isfinite, log10

#: SI prefixes with their factors, the largest first.
_PREFIXES = (
    (1e18, "E"),
    (1e15, "P"),
    (1e12, "T"),
    (1e9, "G"),
    (1e6, "M"),
    (1e3, "k"),
    (1.0, ""),
    (1e-3, "m"),
    (1e-6, "µ"),
    (1e-9, "n"),
)


def plain(value: float, digits: int = 3) -> str:
    """Write a number with a few significant digits and without an exponent.

    Whole numbers have thousands separators: ``12345.6`` is ``12,300``, ``0.0000123`` is
    ``0.0000123``.

    Args:
        value: The number.
        digits: Significant digits.
    """
    if not isfinite(value) or value == 0.0:
        return f"{value:g}"
    short = f"{value:.{digits}g}"
    if "e" not in short:
        return short
    rounded = float(short)
    if abs(rounded) >= 1.0:
        return f"{rounded:,.0f}"
    return f"{rounded:.{digits - 1 - round(log10(abs(rounded)) - 0.5)}f}".rstrip("0")


def per_second(value: float) -> str:
    """Write a rate: whole from ten on, below with three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 10.0 else plain(value)


def quantity(value: float, unit: str, digits: int = 3) -> str:
    """Write a quantity with the SI prefix that leaves one to three digits before the point.

    Args:
        value: Value in the unit without a prefix.
        unit: Unit, such as ``J`` or ``FLOP/s``.
        digits: Significant digits.
    """
    if not isfinite(value) or value == 0.0:
        return f"{value:g} {unit}"
    # Rounded first: 999.6 J is 1 kJ, not 1,000 J.
    rounded = float(f"{value:.{digits}g}")
    scale, prefix = next((p for p in _PREFIXES if abs(rounded) >= p[0]), _PREFIXES[-1])
    return f"{plain(rounded / scale, digits)} {prefix}{unit}"


def duration(us: float) -> str:
    """Write microseconds with a readable unit, three significant digits."""
    # Kiloseconds are not in use.
    return f"{plain(us / 1e6)} s" if abs(us) >= 999.5e6 else quantity(us / 1e6, "s")


def energy(joules: float) -> str:
    """Write joules with a readable unit, four significant digits."""
    return quantity(joules, "J", 4)


def size(count: float) -> str:
    """Write bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB" if abs(count) < 1e5 else f"{plain(count / 1024)} TiB"


def likely(chance: float) -> str:
    """Write a probability, but never as a certainty."""
    percent = round(100 * chance)
    if percent in (0, 100):
        return "over 99 %" if percent else "under 1 %"
    return f"{percent} %"
