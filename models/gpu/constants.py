"""What was fitted to published passes over memory, and where the shipped figures are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..conformal import Ends
from ..names import GPU_MODEL, PRETRAINED
from ..store import read_manifest
from .traffic import MemoryParams

_SHIPPED = PRETRAINED / GPU_MODEL / "estimator"


@dataclass(frozen=True)
class Constants:
    """What was fitted to published passes over memory.

    Attributes:
        memory: Constants of their times.
        known: Interval ends of the log-ratio on devices that were fitted.
        unseen: The same on devices that were left out.
        correlation: Of the log errors of two kernels of a program.
    """

    memory: MemoryParams = field(default_factory=MemoryParams)
    known: Ends = (-0.3, 0.3)
    unseen: Ends = (-0.8, 0.8)
    correlation: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a manifest."""
        ends = {"known_log": list(self.known), "unseen_log": list(self.unseen)}
        return {"memory": self.memory.to_dict(), **ends, "correlation": self.correlation}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Constants:
        """Read :meth:`to_dict`'s data.

        Raises:
            KeyError: An entry is missing.
            TypeError: A constant is unknown.
        """
        (low, high), (least, most) = data["known_log"], data["unseen_log"]
        memory = MemoryParams.from_dict(data["memory"])
        known, unseen = (float(low), float(high)), (float(least), float(most))
        return cls(memory, known, unseen, float(data["correlation"]))


def shipped_constants() -> Constants:
    """Constants of the shipped model; rough ones where it is not there."""
    if not (_SHIPPED / "manifest.json").is_file():
        return Constants()
    return Constants.from_dict(read_manifest(_SHIPPED)["constants"])
