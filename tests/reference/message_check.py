"""Closed forms compared with message-level simulation, for every collective and topology.

``python -m opcast.tests.reference.message_check [--devices 4,8,16,64]`` prints, in per cent,
the largest difference of each algorithm on each topology over the sizes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from opcast.simulate.clusters.topology import Dimension, Topology
from opcast.simulate.collectives.choose import COLLECTIVES, candidates

from .message_composed import message_seconds

#: Bytes that each rank contributes: the first is bound by latency, the last by bandwidth.
SIZES = (2.0**16, 2.0**18, 2.0**20, 2.0**22, 2.0**28)
#: Powers of two, which every algorithm and shape accepts; more cost too many messages.
DEVICES = (4, 8, 16, 64)
#: Round figures of the order of NVLink and InfiniBand: 100 GB/s and 1 us.
_BANDWIDTH, _LATENCY = 1e11, 1e-6


@dataclass(frozen=True)
class Case:
    """One comparison, in seconds."""

    topology: str
    devices: int
    collective: str
    algorithm: str
    size: float
    formula: float
    messages: float

    @property
    def error(self) -> float:
        """Relative error of the formula."""
        return self.formula / self.messages - 1.0


def topologies(n: int) -> dict[str, Topology]:
    """Return one topology of each kind, and three of several dimensions, for ``n`` devices."""

    def one(kind: str, size: int = n, speed: float = 1.0, **more: object) -> Dimension:
        # Slower dimensions are also farther away, as networks are compared with boxes.
        return Dimension(kind, size, speed * _BANDWIDTH, _LATENCY / speed, **more)  # type: ignore[arg-type]

    # Sides of the most even grids of two and three axes.
    low = 1 << ((n.bit_length() - 1) // 2)
    third = 1 << max((n.bit_length() - 1) // 3, 0)
    inside = max(n // 8, 2) if n < 64 else 8
    shapes = {
        "ring": (one("ring"),),
        "fully_connected": (one("fully_connected"),),
        "switch": (one("switch"),),
        "switch, tree reduction": (one("switch", reduction="tree"),),
        "switch, multicast": (one("switch", reduction="multicast"),),
        "torus 2-D": (one("torus", shape=(low, n // low)),),
        "torus 3-D": (one("torus", shape=(third, third, n // third**2)),),
        "fat tree 1:1": (one("fat_tree", radix=max(n // 4, 2)),),
        "fat tree 2:1": (one("fat_tree", radix=max(n // 4, 2), oversubscription=2.0),),
        "switch × switch": (one("switch", inside), one("switch", n // inside, 0.125)),
        "switch × fat tree": (
            one("switch", 2),
            one("fat_tree", n // 2, 0.125, radix=max(n // 8, 1), oversubscription=2.0),
        ),
        "ring × torus": (one("ring", 2), one("torus", n // 2, 0.25, shape=_grid(n // 2))),
    }
    return {name: Topology(dims) for name, dims in shapes.items()}


def _grid(n: int) -> tuple[int, int]:
    low = 1 << ((n.bit_length() - 1) // 2)
    return low, n // low


def cases(n: int, sizes: Sequence[float] = SIZES) -> Iterator[Case]:
    """Yield every comparison with ``n`` devices."""
    for name, topology in topologies(n).items():
        for kind in COLLECTIVES:
            plain = kind.removeprefix("ragged_")
            if plain != kind:
                continue  # the same messages
            group = 2 if kind == "send_recv" else n
            for size in sizes:
                for algorithm, cost in candidates(kind, size, topology.group_dims(group)):
                    seconds = sum(cost)
                    sent = message_seconds(kind, size, topology, algorithm)
                    yield Case(name, n, kind, algorithm, size, seconds, sent)


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    words = list(arguments)
    devices: Sequence[int] = DEVICES
    if "--devices" in words:
        devices = [int(n) for n in words[words.index("--devices") + 1].split(",")]
    rows = pd.DataFrame(
        {**case.__dict__, "error_percent": 100 * case.error} for n in devices for case in cases(n)
    )
    worst = rows.pivot_table(
        index=["topology", "collective", "algorithm"],
        columns="devices",
        values="error_percent",
        aggfunc=lambda errors: max(errors, key=abs),
    )
    table = worst.round(2).reset_index().to_string(index=False, na_rep="")
    largest = rows["error_percent"].abs().max()
    sys.stdout.write(f"{table}\n{len(rows)} comparisons, largest difference {largest:.2f} %\n")


if __name__ == "__main__":
    main(sys.argv[1:])
