"""Which of the screened plans are worth compiling, and in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from math import inf

from .cost import Screened
from .space import Change, Plan

#: Compiled plans over the same mesh with other cuts by ``tensor``: several meshes are tried.
_SAME_MESH = 3
#: The screening overstates memory, by up to 1.7 times for two decoders: plans up to this many
#: times the device's may fit. At most half of what is compiled are such plans.
_MEMORY_SLACK = 2.0
#: Share of the compiled plans that may be pipelines: each has two to four programs of its own.
_PIPELINES = 1 / 3


def axes_of(screened: Iterable[Screened]) -> list[str]:
    """Axes of the mesh that plans have."""
    return list(dict.fromkeys(axis for own in screened for axis in own.plan.sizes))


def chosen(screened: Sequence[Screened], most: int, devices: int, memory: float) -> list[Plan]:
    """Plans that are worth compiling: the fastest, one of each kind, the best over fewer devices.

    Args:
        screened: All plans, the fastest first.
        most: Most plans to choose.
        devices: Devices of the cluster.
        memory: Bytes that a device may use; 0 if unknown.

    Returns:
        In the order in which they are to be compiled: a budget may end the search early.
    """
    most_memory = _MEMORY_SLACK * memory or inf
    fit = [s for s in screened if s.memory <= most_memory]
    # Nothing fits: those that need least say how much is missing.
    ordered = fit or sorted(screened, key=lambda s: s.memory)
    full = [s for s in ordered if s.plan.devices == devices]
    fewer: dict[int, Screened] = {}
    for own in ordered:
        if own.plan.devices < devices:
            fewer.setdefault(own.plan.devices, own)
    least = min(full or ordered, key=lambda s: s.memory)
    # What most people do first, over as many devices as the batch and a box have.
    pure = ([s for s in fit if list(s.plan.sizes) == [axis]] for axis in ("data", "tensor"))
    kinds = [max(of, key=lambda s: (s.plan.devices, -s.seconds)).plan for of in pure if of]
    # Of every other kind the fastest: screening knows the order within a kind best.
    for axis in axes_of(ordered):
        if not any(axis in plan.sizes for plan in [(full or ordered)[0].plan, *kinds]):
            kinds.append(next(s.plan for s in [*full, *ordered] if axis in s.plan.sizes))
    meshes: Counter[tuple[tuple[tuple[str, int], ...], Change]] = Counter()
    plans: list[Plan] = []
    doubtful = 0
    staged = int(least.plan.stages > 1)
    for own in full:
        doubts = bool(memory) and own.memory > memory
        kind = own.plan.mesh, own.plan.change
        if own.plan.stages > 1 and own is not least:
            if staged >= max(int(_PIPELINES * most), 1):
                continue
            staged += 1
        if meshes[kind] < _SAME_MESH and not (doubts and 2 * doubtful > most):
            meshes[kind] += 1
            doubtful += doubts
            plans.append(own.plan)
    room = max(most - 1 - len(kinds) - min(len(fewer), 2), 1)
    # One of each kind before a second of any: a budget may end the search early.
    picked = [*plans[:1], *kinds, *plans[1:room], least.plan]
    picked += [s.plan for s in islice(fewer.values(), 2)]
    return list(dict.fromkeys([*picked, *plans[room:]]))[:most]
