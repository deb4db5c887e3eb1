"""Short names of devices, as people type them: ``v5e``, ``rtx4090``, ``mi300``, ``a100-80g``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

#: Sockets SXM2 to SXM6 are one of each generation; 80g is 80gb.
_SPELLINGS = re.compile(r"(?<=sxm)\d|(?<=\dg)b")


def shortened(slug: str, names: Mapping[str, Sequence[str]]) -> list[str]:
    """Find devices by the parts of their names that a short name keeps, in order.

    Args:
        slug: Short name, in lower case with dashes; these may be left out.
        names: Names of each device, of the same form.

    Returns:
        Devices with a name that has all parts of the short one, the chip's own part among them.
    """
    plain = _SPELLINGS.sub("", slug).replace("-", "")
    return [device for device, full in names.items() if any(_shortens(plain, f) for f in full)]


def _shortens(plain: str, full: str) -> bool:
    parts = _SPELLINGS.sub("", full).split("-")
    # The first part with a digit names the chip; the others are its vendor, socket or memory.
    chip = next((i for i, part in enumerate(parts) if re.search(r"\d", part)), None)
    if chip is None:
        return False
    pattern = "".join(
        _chip(part) if i == chip else f"(?:{re.escape(part)})?" for i, part in enumerate(parts)
    )
    return re.fullmatch(pattern, plain) is not None


def _chip(part: str) -> str:
    """The chip's part, whose last letter may be left out: MI300 for MI300X, v5 for v5e and v5p."""
    return re.escape(part) + ("?" if part[-1].isalpha() else "")
