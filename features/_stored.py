"""Kernels of a compiled module as plain data: a warm start need not read the module again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .errors import DatasetError
from .ir import Source
from .kernel import LoweredProgram
from .schedule import schedule_from_json, schedule_to_json

#: Raised whenever the same module would give other kernels, so that older data is not used.
EXTRACTION_VERSION = 3


def to_data(lowered: LoweredProgram) -> dict[str, Any]:
    """Kernels with their names, and sources as walk indices.

    Args:
        lowered: Compiled from StableHLO, with the trip counts of all loops known.
    """
    return {
        "version": EXTRACTION_VERSION,
        "schedule": schedule_to_json(lowered),
        "names": [k.name for k in lowered.kernels],
        "sources": [[s.index for s in k.sources] for k in lowered.kernels],
        "cycles": [k.cycles for k in lowered.kernels],
    }


def from_data(data: Mapping[str, Any], ops: Sequence[Source], hlo: str) -> LoweredProgram | None:
    """Rebuild what :func:`to_data` wrote; ``None`` if it is damaged or of another version.

    Args:
        data: The plain data.
        ops: Sources by walk index.
        hlo: Text of the compiled module.
    """
    try:
        if data["version"] != EXTRACTION_VERSION:
            return None
        lowered = schedule_from_json(data["schedule"], {})
        columns = (data["names"], data["sources"], data["cycles"])
        for kernel, name, indices, cycles in zip(lowered.kernels, *columns, strict=True):
            kernel.name = name
            kernel.cycles = float(cycles)
            kernel.sources = tuple([ops[i] for i in indices])
    except (DatasetError, KeyError, ValueError, TypeError, IndexError):
        return None
    lowered.hlo = hlo
    return lowered
