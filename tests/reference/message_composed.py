"""Message schedules over several dimensions: hierarchical, multi-ring, direct, point to point."""

from __future__ import annotations

from opcast.common.errors import DeviceError
from opcast.simulate.clusters.topology import Dimension, Topology
from opcast.simulate.collectives.one_dimension import fastest

from .message_schedules import PHASES, Schedule, run_phase
from .messages import Links


def message_seconds(kind: str, size: float, topology: Topology, algorithm: str) -> float:
    """Simulate a collective of all devices, message by message; return seconds without the launch.

    Args:
        kind: As in ``choose``, ragged all-to-all apart.
        size: Bytes that each rank puts in.
        topology: Where.
        algorithm: As in ``choose``; ``hierarchical`` takes the fastest in each dimension, as
            the formula does.

    Raises:
        DeviceError: The algorithm has no schedule for it.
    """
    schedule = Schedule(Links(topology))
    # A torus counts as several dimensions here: its axes are rings of their own.
    alone = len(topology.dims) == 1 and topology.dims[0].kind != "torus"
    if alone and algorithm in PHASES and kind not in ("collective_permute", "send_recv"):
        run_phase(schedule, [(PHASES[algorithm], 0, kind, size)])
        return schedule.seconds()
    _compose(schedule, kind, size, topology, algorithm)
    if not schedule.messages:
        raise DeviceError(f"no schedule of {algorithm} for {kind}", where="topology")
    return schedule.seconds()


def _compose(
    schedule: Schedule, kind: str, size: float, topology: Topology, algorithm: str
) -> None:
    if kind in ("collective_permute", "send_recv"):
        _shift(schedule, size, topology.size if kind == "collective_permute" else 2)
    elif algorithm == "hierarchical":
        _hierarchical(schedule, kind, size, topology)
    elif algorithm == "multi_ring":
        _multi_ring(schedule, kind, size, topology)
    elif algorithm == "direct":
        _direct(schedule, size, topology.size)
    elif algorithm == "ring":
        _torus(schedule, kind, size, topology.dims[0], 0)


def _shift(schedule: Schedule, size: float, n: int) -> None:
    for i in range(n):
        schedule.send(i, (i + 1) % n, size, ())


def _direct(schedule: Schedule, size: float, n: int) -> None:
    # Farthest receivers first, so that the outermost links are busy from the beginning.
    for step in sorted(range(1, n), key=lambda k: -min(k, n - k)):
        for i in range(n):
            schedule.send(i, (i + step) % n, size / n, ())


def _hierarchical(schedule: Schedule, kind: str, size: float, topology: Topology) -> None:
    """The order of ``choose.hierarchical``."""
    first = [sum(len(d.rings()) for d in topology.dims[:i]) for i in range(len(topology.dims))]
    jobs = list(zip(topology.dims, first, strict=True))
    if kind == "all_reduce":
        for dim, at in jobs[:-1]:
            _phase(schedule, "reduce_scatter", size, dim, at)
            size /= dim.size
        _phase(schedule, "all_reduce", size, *jobs[-1])
        for dim, at in reversed(jobs[:-1]):
            _phase(schedule, "all_gather", size, dim, at)
            size *= dim.size
        return
    inwards = kind in ("all_gather", "broadcast")
    growth = {"all_gather": 1, "reduce_scatter": -1}.get(kind, 0)
    for dim, at in reversed(jobs) if inwards else jobs:
        _phase(schedule, kind, size, dim, at)
        size *= float(dim.size) ** growth


def _phase(schedule: Schedule, kind: str, size: float, dim: Dimension, at: int) -> None:
    if dim.kind == "torus":
        _torus(schedule, kind, size, dim, at)
        return
    # The formula's own choice, so that both sides run the same algorithm.
    best = fastest(kind, dim, size)[0]
    run_phase(schedule, [(PHASES[best], at, kind, size)])


def _torus(schedule: Schedule, kind: str, size: float, dim: Dimension, at: int) -> None:
    """Parts of the bytes take the axes in turn, as ``one_dimension.torus``."""
    if kind == "all_reduce":
        _torus(schedule, "reduce_scatter", size, dim, at)
        _torus(schedule, "all_gather", size / dim.size, dim, at)
        return
    axes = dim.axes
    if kind == "broadcast":
        for axis in range(len(axes)):
            run_phase(schedule, [(PHASES["ring"], at + axis, kind, size)])
        return
    own = [size / len(axes)] * len(axes)
    for phase in range(len(axes)):
        jobs = []
        for part in range(len(axes)):
            axis = (part + phase) % len(axes)
            jobs.append((PHASES["ring"], at + axis, kind, own[part]))
            growth = {"all_gather": float(axes[axis]), "reduce_scatter": 1 / axes[axis]}
            own[part] *= growth.get(kind, 1.0)
        run_phase(schedule, jobs)


def _multi_ring(schedule: Schedule, kind: str, size: float, topology: Topology) -> None:
    g, boxes = (d.size for d in topology.dims)
    n = g * boxes
    message = (size if kind == "all_gather" else size / n) / g
    seats = [[ring_seat(ring, place, g) for place in range(n)] for ring in range(g)]
    # What each place of each ring received last, which its next message forwards.
    last: list[list[tuple[int, ...]]] = [[()] * n for _ in range(g)]
    for _ in range((2 if kind == "all_reduce" else 1) * (n - 1)):
        for ring, seat in enumerate(seats):
            sent = [
                schedule.send(seat[p], seat[(p + 1) % n], message, last[ring][p]) for p in range(n)
            ]
            last[ring] = [(sent[p - 1],) for p in range(n)]


def ring_seat(ring: int, place: int, per_box: int) -> int:
    """Return the rank at a place of ring number ``ring`` of ``multi_ring``.

    Even boxes are traversed upwards from rank ``ring``, odd ones downwards from the rank before it,
    so that a ring enters the next box at the rank with the same number (the same rail).
    """
    box, step = divmod(place, per_box)
    inside = ring + step if box % 2 == 0 else ring - 1 - step
    return box * per_box + inside % per_box
