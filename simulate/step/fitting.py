"""Whether a plan fits the memory of its devices, and the smallest change that makes it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from ...common.errors import PlanError
from .memory import StageMemory, box_host, stage_memory
from .plan import Plan, resolved
from .workload import Workload

#: Memory of every stage under a resolved plan.
MemoryOf = Callable[[Workload, Plan], tuple[StageMemory, ...]]
#: Maximum number of settings changed together: the neighbourhood grows about tenfold with each
#: change, and advice that changes more amounts to a different plan (engineering choice).
MOST_CHANGES = 3
#: Maximum number of fitting plans whose step times are compared, since each costs a simulation
#: (engineering choice).
COMPARED = 24


class Host(NamedTuple):
    """Host memory of a box, which offloading fills.

    Attributes:
        box: Devices per host.
        capacity: Bytes of host memory.
        source: Where the capacity comes from, for messages.
    """

    box: int = 1
    capacity: float = inf
    source: str = ""


#: A host without a known limit.
ANY_HOST = Host()


@dataclass(frozen=True)
class Fit:
    """Memory of a plan.

    Attributes:
        memory: Memory of each stage.
        capacity: Bytes of a device.
        change: Settings that would make it fit, such as ``recompute=full``; empty if it fits or no
            change was found; ``None`` if none was searched for.
        plan: The plan with these settings; ``None`` if ``change`` is empty or ``None``.
        offloaded: Bytes offloaded to the host of the fullest box.
        host: That host.
    """

    memory: tuple[StageMemory, ...]
    capacity: float
    change: str | None = None
    plan: Plan | None = None
    offloaded: float = 0.0
    host: Host = ANY_HOST

    @property
    def worst(self) -> StageMemory:
        """Memory of the fullest stage."""
        return max(self.memory, key=lambda m: m.total)

    @property
    def fits(self) -> bool:
        """Whether every stage and its offloaded data fit."""
        return self.worst.total <= self.capacity and self.host_fits

    @property
    def host_fits(self) -> bool:
        """Whether the offloaded data fit the host's memory."""
        return self.offloaded <= self.host.capacity

    def reason(self) -> str:
        """What does not fit and what would help; empty if it fits."""
        if self.fits:
            return ""
        told = []
        if self.worst.total > self.capacity:
            # Users cannot reduce "reserved".
            parts = {
                k: v for k, v in self.worst.to_dict().items() if k not in ("total", "reserved")
            }
            largest = sorted(parts.items(), key=lambda item: -item[1])[:2]
            listed = " and ".join(f"{name} {value / 2**30:.1f} GiB" for name, value in largest)
            told.append(f"needs {_against(self.worst.total, self.capacity)}: {listed}")
        if not self.host_fits:
            told.append(
                f"offloading needs {_against(self.offloaded, self.host.capacity)} of the host's "
                f"memory in a box of {self.host.box} ({self.host.source})"
            )
        if self.change is not None:
            told.append(
                f"would fit with {self.change}" if self.change else "no small change would fit"
            )
        return "; ".join(told)


def _against(needed: float, capacity: float) -> str:
    """Required and available bytes, as text."""
    needed, capacity = needed / 2**30, capacity / 2**30
    # Enough digits to tell the two apart if a plan is short of a few MiB.
    digits = 1 if f"{needed:.1f}" != f"{capacity:.1f}" else 3
    return f"{needed:.{digits}f} GiB of {capacity:.{digits}f} GiB"


def memory_of(workload: Workload, plan: Plan, copies: int = 0) -> tuple[StageMemory, ...]:
    """Memory of every stage of a resolved plan (:func:`stage_memory`)."""
    return tuple(stage_memory(workload, plan, stage, copies) for stage in range(plan.pp))


def find_fit(
    workload: Workload,
    plan: Plan,
    capacity: float,
    seconds: Callable[[Plan], float],
    memory: MemoryOf = memory_of,
    host: Host = ANY_HOST,
) -> Fit:
    """Compute a plan's memory and, if it does not fit, the smallest change that makes it fit.

    A breadth-first search: fewest changed settings first; among those the fastest plan.

    Args:
        workload: Model.
        plan: Resolved plan.
        capacity: Bytes of a device.
        seconds: Predicts the step time of a plan.
        memory: Computes the memory of the stages of a plan.
        host: Host memory of each box.
    """

    def most(of: Plan) -> float:
        return max(stage.total for stage in memory(workload, of))

    offloaded = box_host(workload, plan, host.box)
    fit = Fit(memory(workload, plan), capacity, "", offloaded=offloaded, host=host)
    if fit.fits:
        return fit
    seen, front = {plan}, [plan]
    for _ in range(MOST_CHANGES):
        nearby = [p for old in front for p in _neighbours(workload, old)]
        front = [p for p in dict.fromkeys(nearby) if p not in seen]
        seen.update(front)
        fitting = [
            p
            for p in front
            if most(p) <= capacity and box_host(workload, p, host.box) <= host.capacity
        ]
        if fitting:
            # Memory is much cheaper to evaluate than time, so it preselects.
            best = min(sorted(fitting, key=most)[:COMPARED], key=seconds)
            return replace(fit, change=_difference(plan, best), plan=best)
    return fit


def _neighbours(workload: Workload, plan: Plan) -> Iterator[Plan]:
    """Yield valid plans on the same devices that differ in one setting."""
    for changes in _changes(plan):
        try:
            yield resolved(workload, plan.changed(**changes), plan.devices)
        except PlanError:
            continue


def _changes(plan: Plan) -> Iterator[Mapping[str, object]]:
    if plan.recompute == "none":
        yield {"recompute": "selective"}
    if plan.recompute != "full":
        yield {"recompute": "full"}
    # Every change below saves memory; ZeRO stages exist only for plain data parallelism.
    if plan.fsdp == 1 and plan.dp > 1:
        yield from ({"zero": stage} for stage in (1, 2, 3) if stage > plan.zero)
    if plan.fsdp > 1 and plan.stage < 3:
        yield {"zero": 3}
    if plan.virtual > 1:
        # Activations of one chunk instead of several: two settings that belong together.
        yield {"schedule": "1f1b", "virtual": 1}
    yield {"microbatches": plan.microbatches * 2}
    if plan.tp > 1 and not plan.sp:
        yield {"sp": True}
    data = "fsdp" if plan.fsdp > 1 else "dp"
    if getattr(plan, data) % 2 == 0:
        # Half as many replicas have twice the sequences each: with twice the micro-batches, the
        # size of a micro-batch stays the same.
        fewer = {data: getattr(plan, data) // 2, "microbatches": plan.microbatches * 2}
        yield from ({**fewer, axis: getattr(plan, axis) * 2} for axis in ("tp", "pp", "cp"))
    if plan.offload != "none":
        # The host's memory is limited, too.
        yield {"offload": "none"}
    else:
        yield from ({"offload": what} for what in ("optimizer", "activations"))


def _difference(old: Plan, new: Plan) -> str:
    names = [
        f"{name}={str(getattr(new, name)).lower()}"
        for name in Plan.__dataclass_fields__
        if getattr(old, name) != getattr(new, name)
    ]
    return ",".join(names)
