"""Nodes of a partitioned program: kernels that compute, and collectives that wait for partners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...common.errors import ProgramError
from ...features.kernels.kernel import Kernel
from ..collectives.choose import collective_name


@dataclass(frozen=True)
class Collective:
    """A collective of one device.

    Attributes:
        kind: Name as in :data:`~opcast.simulate.collectives.choose.COLLECTIVES`.
        size: Bytes that each rank contributes.
        group: Ranks; one group stands for all.
        waits: Whether the device blocks on it at its place in the schedule.
        groups: All groups; for transfers from device to device, pairs of source and target.
        reduction: Element type and op of a reduction, ``None`` for what reduces nothing.
    """

    kind: str
    size: float
    group: tuple[int, ...]
    waits: bool = False
    groups: tuple[tuple[int, ...], ...] = field(default=(), compare=False)
    reduction: tuple[str, str] | None = field(default=None, compare=False)

    @property
    def whole(self) -> float:
        """Bytes of the whole buffer: what a gather results in, what others take, as NCCL counts."""
        return self.size * (len(self.group) if self.kind == "all_gather" else 1)


@dataclass(frozen=True)
class Node:
    """A kernel of a program.

    Attributes:
        name: Name in the program.
        opcode: HLO opcode.
        operands: Positions of earlier nodes whose results it reads.
        seconds: Computation, all executions; 0 for collectives and for kernels that take no time.
        collective: The collective, if it is one.
        result_bytes: Bytes that it writes.
        times: Executions (the trip count of its loops).
        members: Positions of the kernels that it stands for.
        done: Whether it is the ``done`` half of an asynchronous pair, which only waits.
    """

    name: str
    opcode: str
    operands: tuple[int, ...]
    seconds: float = 0.0
    collective: Collective | None = None
    result_bytes: float = 0.0
    times: float = 1.0
    members: tuple[int, ...] = ()
    done: bool = False


def program_nodes(
    kernels: Sequence[Kernel], seconds: Sequence[float], devices: int, *, scheduled: bool
) -> list[Node]:
    """Make nodes of lowered kernels.

    Args:
        kernels: Kernels in program order.
        seconds: Seconds of one execution of each; collectives' are ignored.
        devices: Devices of the program, which is what empty replica groups mean.
        scheduled: Whether the order is the target's schedule. If so, a collective that is not a
            start/done pair, or is marked ``is_sync``, blocks the device.

    Raises:
        ProgramError: A collective names no partners.
    """
    nodes = []
    for place, kernel in enumerate(kernels):
        done = kernel.async_role == "done" and kernel.async_peer >= 0
        collective = None
        if kernel.kind == "collective" and not done:
            collective = _collective(kernel, devices, scheduled=scheduled)
        # The time of an asynchronous collective belongs to its start; the done half waits for it.
        operands = (*kernel.operands, kernel.async_peer) if done else kernel.operands
        time = 0.0 if collective or done or not kernel.takes_time else float(seconds[place])
        nodes.append(
            Node(
                name=kernel.name,
                opcode=kernel.opcode,
                # Later positions are loop carries: their values come from the last iteration.
                operands=tuple(o for o in operands if 0 <= o < place),
                seconds=time * kernel.multiplicity,
                collective=collective,
                result_bytes=float(kernel.op.result_bytes),
                times=kernel.multiplicity,
                members=(place,),
                done=done,
            )
        )
    return nodes


def _collective(kernel: Kernel, devices: int, *, scheduled: bool) -> Collective | None:
    op, entry = kernel.op, kernel.body.entry_computation
    opcode = op.opcode.removesuffix("-start")
    # Identity ops move nothing; the time of a transfer is the time of its ``send``.
    if opcode in ("partition-id", "replica-id", "recv", "send-done", "recv-done"):
        return None
    # Operands, not results: the convention is bytes contributed (a gather's result is larger).
    size = float(sum(entry.ops[i].result_bytes for i in op.operands))
    group = _partners(kernel, devices)
    # Nothing to exchange: the node takes no time.
    if len(group) < 2 or size <= 0:
        return None
    waits = scheduled and (kernel.async_role != "start" or _is_sync(kernel))
    groups, reduction = _groups(kernel, group), _reduction(kernel)
    return Collective(collective_name(opcode), size, group, waits, groups, reduction)


def _reduction(kernel: Kernel) -> tuple[str, str] | None:
    """Return element type and op of a reduction; one of several ops has the kernel's own name."""
    if not kernel.op.called:
        return None
    only = kernel.body.computations[kernel.op.called[0]].only_op
    if only is None:
        # Other collectives are left alone: XLA combines none of these.
        return kernel.op.type.dtype, kernel.name
    return only.type.dtype, only.opcode


def _groups(kernel: Kernel, group: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return all groups in the order of the program; ``group`` if it names none."""
    attrs = kernel.op.attrs
    named = attrs.get("source_target_pairs") or attrs.get("replica_groups") or (group,)
    return tuple(tuple(int(d) for d in g) for g in named)


def _partners(kernel: Kernel, devices: int) -> tuple[int, ...]:
    attrs = kernel.op.attrs
    if "source_target_pairs" in attrs:
        return _chain([(int(a), int(b)) for a, b in attrs["source_target_pairs"]])
    groups = attrs.get("replica_groups") or ()
    # Empty groups mean all devices (HLO's semantics of ``replica_groups={}``).
    if not groups:
        if kernel.opcode in ("send", "recv"):
            return tuple(range(min(2, devices)))
        return tuple(range(devices))
    # All groups run at once; the largest one ends last.
    return max((tuple(int(d) for d in g) for g in groups), key=lambda g: len(g))


def _chain(pairs: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Return the ranks of a permutation's longest chain, in the order in which data moves."""
    ahead = {a: b for a, b in pairs if a != b}
    best: tuple[int, ...] = ()
    for first in ahead:
        chain, at = [first], ahead[first]
        while at not in chain and at in ahead:
            chain.append(at)
            at = ahead[at]
        if at not in chain:
            chain.append(at)
        if len(chain) > len(best):
            best = tuple(chain)
        # A cycle through all sources: no other start can give a longer chain.
        if len(best) == len(ahead):
            break
    return best


def _is_sync(kernel: Kernel) -> bool:
    # XLA moved the flag from the top of ``backend_config`` into ``collective_backend_config``.
    config = kernel.op.attrs.get("backend_config")
    inner = config.get("collective_backend_config", config) if isinstance(config, dict) else {}
    return bool(isinstance(inner, dict) and inner.get("is_sync"))


def check_devices(nodes: Sequence[Node], size: int) -> None:
    """Refuse a program that was partitioned for more devices than there are.

    Raises:
        ProgramError: A collective names a rank that the cluster lacks.
    """
    for node in nodes:
        if node.collective and max(node.collective.group) >= size:
            raise ProgramError(
                f"the program talks to device {max(node.collective.group)}, the cluster has {size}",
                where=node.name,
                hint="take a cluster of as many devices as the program was partitioned for",
            )
