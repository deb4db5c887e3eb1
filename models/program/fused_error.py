"""How far a price of the lowering ``fused`` may be from one of the compiler's kernels.

Programs of every op and random compositions were lowered both ways and priced by one model, on GPUs
and on TPUs; their errors by what takes most of the time are in ``models/pretrained/fused.json``,
which ``tests/bench/fused_error.py`` writes. They add to the errors of the kernels, of which they
are independent. On TPUs, which run no program op by op, the prices of the lowering ``op`` were
compared too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from math import exp, hypot, log, sqrt
from pathlib import Path

import numpy as np

from ...features.devices.device import DeviceSpec
from ...features.kernels.kernel import Kernel, LoweredProgram
from ..trust.calibrator import NORMAL_90, Ends
from .program_model import ProgramPrediction

FILE = Path(__file__).parents[1] / "pretrained" / "fused.json"
#: Key of the ends of all programs together.
ALL = "all"
#: Programs that a group has at least: its ends are those of all programs else. Engineering choice.
LEAST = 4
#: Share of bytes between kernels, and of FLOPs outside products, from which the compiler's counts
#: are told: below, 6 and 1 % of the random compositions differ by more than a tenth, above 44 and
#: 18 % (``tests/bench/fused_error.py``).
COUNTS = {"bytes": 0.2, "flops": 0.5}
#: Groups that pass nothing to one another which the compiler could keep on the chip: their products
#: and passes are kernels of their own in every lowering.
_APART = ("gemm", "conv", "sort", "custom_call")
#: Share of an op-by-op time that is left at least where its kernels are joined. Of programs left
#: out in turn, the median of upper over lower end is 26 with 0.15 or 0.2, 48 with 0.05, 38 with 0.4
#: and 73 with 1, which is one pair of ends for all programs.
LEAST_LEFT = 0.15
#: Half-width in logarithms from which a note says so.
_TELLING = log(1.25)
_COUNTED = {
    "bytes": "bytes ({share:.0%} pass between kernels or through library calls, which it may join, "
    "part or lay out otherwise)",
    "flops": "FLOPs ({share:.0%} are outside products: what several kernels read, each may compute "
    "again)",
}
_WORDS = {
    "gather_scatter": "gathers and updates in place",
    "random": "random numbers",
    "conv": "convolutions",
    "gemm": "products",
    "reduce": "reductions",
    "copy": "copies and transposes",
    "fusion": "element-wise kernels",
    "control": "loops and branches",
    "custom_call": "library calls",
    "sort": "sorts",
}


def group_of(kernel: Kernel) -> str:
    """What a kernel counts as: its kind, apart from updates in place and generated numbers."""
    if kernel.opcode == "copy" and not _changes_layout(kernel):
        # The copy that an update of an argument starts from: the compiler may do without.
        return "gather_scatter"
    names = {op.opcode for part in kernel.body.computations.values() for op in part.ops}
    return "random" if "rng-bit-generator" in names else kernel.kind


def _changes_layout(kernel: Kernel) -> bool:
    entry = kernel.body.entry_computation
    return any(op.results[0].layout != entry.root_op.results[0].layout for op in entry.parameters)


def shares(kernels: Sequence[Kernel], latency_s: np.ndarray) -> dict[str, float]:
    """Share of each group in the time of a program, from seconds of one execution, ``(n,)``."""
    found: dict[str, float] = {}
    for kernel, seconds in zip(kernels, latency_s.tolist(), strict=True):
        if kernel.takes_time:
            group = group_of(kernel)
            found[group] = found.get(group, 0.0) + seconds * kernel.multiplicity
    total = sum(found.values())
    return {group: seconds / total for group, seconds in found.items()} if total else {}


def fit(
    groups: Sequence[str], scores: np.ndarray, below: np.ndarray, above: np.ndarray
) -> dict[str, Ends]:
    """Ends of each group in logarithms, on top of those of the kernels.

    Args:
        groups: What takes most of the time of each of ``n`` programs.
        scores: ``log(xla / fused)`` of each, shape ``(n,)``.
        below: Distance of the kernels' lower end in logarithms, positive, shape ``(n,)``.
        above: That of the upper end.
    """
    own = np.array(groups)
    counts = {group: int((own == group).sum()) for group in sorted(set(groups))}
    chosen = {group: own == group for group, count in counts.items() if count >= LEAST}
    chosen[ALL] = np.ones(len(own), bool)
    return {
        group: (-_beyond(-scores[at], below[at]), _beyond(scores[at], above[at]))
        for group, at in chosen.items()
    }


def _beyond(scores: np.ndarray, ends: np.ndarray) -> float:
    """What is missing to the 95 % quantile of both errors together, in quadrature."""
    # Only fitting asks for it, and it takes longer to load than most programs to predict.
    from scipy.special import ndtr

    deviation = np.maximum(ends, 1e-3) / NORMAL_90
    low, high = 0.0, float(np.maximum(scores.max(), 0.0) + 4.0 * deviation.max())
    for _ in range(40):  # bisection, to a millionth of a millionth
        middle = 0.5 * (low + high)
        inside = float(ndtr((middle - scores) / deviation).mean())
        low, high = (low, middle) if inside > 0.95 else (middle, high)
    return sqrt(max(high**2 - float(np.median(ends)) ** 2, 0.0))


@cache
def shipped(platform: str) -> Mapping[str, Ends]:
    """Ends by group, as they ship; empty for a platform that was not compared."""
    kept = json.loads(FILE.read_text())["platforms"].get(platform, {"ends": {}})
    return {group: (lo, hi) for group, (lo, hi) in kept["ends"].items()}


def _passed(lowered: LoweredProgram) -> float:
    """Share of the bytes that pass between kernels."""
    moved = sum(k.bytes * k.multiplicity for k in lowered.kernels if k.takes_time)
    return max(0.0, 1.0 - lowered.entry_bytes / moved) if moved else 0.0


def left_joined(lowered: LoweredProgram, parts: Mapping[str, float]) -> float:
    """Share of a program's time op by op that is left if nothing passes between joined kernels.

    Args:
        lowered: The program by ``op``.
        parts: Shares by group of its time, as :func:`shares` gives them.
    """
    joined = sum(share for group, share in parts.items() if group not in _APART)
    return max(1.0 - joined * _passed(lowered), LEAST_LEFT)


@cache
def shipped_op(platform: str) -> Ends | None:
    """Ends in logarithms of the compiler's time over what :func:`left_joined` leaves of op's.

    Returns:
        5 and 95 % quantiles; ``None`` for a platform where they were not compared.
    """
    kept = json.loads(FILE.read_text())["platforms"].get(platform, {}).get("op")
    return None if kept is None else (kept[0], kept[1])


def op_ends(left: float, known: Ends) -> Ends:
    """Ends in logarithms around the time by ``op``, which they hold.

    Args:
        left: As :func:`left_joined`.
        known: As :func:`shipped_op`.
    """
    return min(log(left) + known[0], 0.0), max(log(left) + known[1], 0.0)


def uncertain_counts(lowered: LoweredProgram) -> dict[str, float]:
    """Find which of a program's counts rest on how kernels are formed, and by what share.

    Returns:
        ``bytes``: share of those that pass between kernels, which the compiler may join or part
        otherwise; with library calls, 1, for their layouts are not known. ``flops``: share of those
        outside products, which each kernel that reads them may compute again. Only where they are
        above :data:`COUNTS`.
    """
    kernels = [k for k in lowered.kernels if k.takes_time]
    flops = sum(k.flops * k.multiplicity for k in kernels)
    alone = sum(k.flops * k.multiplicity for k in kernels if k.kind not in ("gemm", "conv"))
    found = {
        "bytes": _passed(lowered),
        "flops": alone / flops if flops and len(kernels) > 1 else 0.0,
    }
    if any(k.kind == "custom_call" for k in kernels):
        found["bytes"] = 1.0
    return {what: share for what, share in found.items() if share > COUNTS[what]}


@cache
def shipped_counts(platform: str) -> Mapping[str, Ends]:
    """The compiler's count over ours where :func:`uncertain_counts` names it: 5 and 95 % ends."""
    kept = json.loads(FILE.read_text())["platforms"].get(platform, {})
    return {what: (lo, hi) for what, (lo, hi) in kept.get("counts", {}).items()}


def count_note(lowered: LoweredProgram, device: DeviceSpec) -> tuple[str, ...]:
    """Say by how much the compiler's counts of bytes and FLOPs may differ, and why."""
    ends = shipped_counts(device.platform)
    said = []
    for what, share in uncertain_counts(lowered).items() if lowered.lowering == "fused" else ():
        if what in ends:
            low, high = ends[what]
            said.append(f"{low:.2f} to {high:.2f} times the {_COUNTED[what].format(share=share)}")
    return (f"counts of lowering fused: the compiler's are {', and '.join(said)}",) if said else ()


def ends_of(parts: Mapping[str, float], known: Mapping[str, Ends]) -> Ends:
    """Ends of a program in logarithms from the share of each group in its time.

    Groups err independently of each other, so that their parts add in quadrature.

    Args:
        parts: Shares by group.
        known: Ends by group, as :func:`shipped` or :func:`fit` give them.
    """
    pairs = [(share, known.get(group, known[ALL])) for group, share in parts.items()]
    low, high = (hypot(*(share * ends[side] for share, ends in pairs)) for side in (0, 1))
    return -low, high


def widened(
    wall: ProgramPrediction, lowered: LoweredProgram, latency_s: np.ndarray, device: DeviceSpec
) -> ProgramPrediction:
    """Widen a program's interval by what its lowering may be wrong by.

    A TPU runs no program op by op: there the ends of ``op`` are those of the compiler's time over
    its own, whatever such kernels may be off by, which nobody runs.

    Args:
        wall: Time and ends in seconds.
        lowered: The program; nothing changes unless it was lowered by ``fused``, or by ``op`` for a
            TPU.
        latency_s: Seconds of one execution of each kernel, shape ``(n,)``.
        device: Nothing is known of the error on platforms that were not compared.
    """
    if (by_op := _ends_by_op(lowered, latency_s, device)) is not None:
        low, high = by_op
        return wall._replace(lo=wall.latency * exp(low), hi=wall.latency * exp(high))
    known = shipped(device.platform)
    if lowered.lowering != "fused" or not known or wall.lo <= 0.0:
        return wall
    low, high = ends_of(shares(lowered.kernels, latency_s), known)
    return wall._replace(
        lo=wall.latency * exp(-hypot(log(wall.latency / wall.lo), low)),
        hi=wall.latency * exp(hypot(log(wall.hi / wall.latency), high)),
    )


def _ends_by_op(lowered: LoweredProgram, latency_s: np.ndarray, device: DeviceSpec) -> Ends | None:
    known = shipped_op(device.platform) if lowered.lowering == "op" else None
    if known is None:
        return None
    return op_ends(left_joined(lowered, shares(lowered.kernels, latency_s)), known)


def lowering_note(
    lowered: LoweredProgram, latency_s: np.ndarray, device: DeviceSpec
) -> tuple[str, ...]:
    """Say where the compiler's kernels may take a time of their own; as :func:`widened`."""
    if (by_op := _ends_by_op(lowered, latency_s, device)) is not None:
        low, high = by_op
        return (
            f"lowering op: a TPU runs no program op by op; its compiler's kernels may take "
            f"{exp(low):.2f} to {exp(high):.2f} times as long as these: --lowering fused is closer",
        )
    if lowered.lowering == "op":
        return _op_note(lowered, latency_s)
    known = shipped(device.platform)
    if lowered.lowering != "fused" or not known:
        return ()
    counted = count_note(lowered, device)
    parts = shares(lowered.kernels, latency_s)
    low, high = ends_of(parts, known)
    if max(-low, high) < _TELLING:
        return counted
    worst = max(parts, key=lambda group: parts[group] * max(map(abs, known.get(group, known[ALL]))))
    return (
        f"lowering fused: the compiler's kernels may take {exp(low):.2f} to {exp(high):.2f} times "
        f"as long as these, mostly for {_WORDS.get(worst, worst)} ({parts[worst]:.0%} of the time)",
        *counted,
    )


def _op_note(lowered: LoweredProgram, latency_s: np.ndarray) -> tuple[str, ...]:
    """Say what share is left where a compiler joins kernels: the interval is that of ops alone."""
    left = left_joined(lowered, shares(lowered.kernels, latency_s))
    # A compiler's own kernels are joined already.
    if -log(left) < _TELLING or any(k.opcode == "fusion" for k in lowered.kernels):
        return ()
    least = " or less" if left == LEAST_LEFT else ""
    return (
        "lowering op: every op is a kernel of its own, as without jax.jit, and the interval is "
        "that of such kernels; a compiler that joins them may take "
        f"{left:.2f} times as long{least}: --lowering fused is closer",
    )
