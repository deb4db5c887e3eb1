"""Error of prices of the lowering ``fused`` relative to those of the compiler's kernels.

Programs of every op and random compositions were lowered both ways and priced by one model, on GPUs
and TPUs; the errors by the dominant group of kernels are in ``models/pretrained/fused.json``, which
``tests/bench/fused_error.py`` writes. They are independent of the kernels' errors and added to
them. On TPUs, which run no program op by op, prices of the lowering ``op`` were compared too.
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
#: Key of the bounds over all programs.
ALL = "all"
#: Fewest programs of a group; smaller groups take the bounds of all programs. Engineering choice.
LEAST = 4
#: Shares of bytes between kernels, and of FLOPs outside products, above which the compiler's counts
#: are reported: below, 6 and 1 % of the random compositions differ by more than a tenth, above 44
#: and 18 % (``tests/bench/fused_error.py``).
COUNTS = {"bytes": 0.2, "flops": 0.5}
#: Groups without transfers to one another that the compiler could keep on the chip: their products
#: and passes are separate kernels in every lowering.
_APART = ("gemm", "conv", "sort", "custom_call")
#: Least fraction of an op-by-op time that remains after joining its kernels. Over programs held out
#: in turn, the median ratio of upper to lower bound is 26 with 0.15 or 0.2, 48 with 0.05, 38 with
#: 0.4 and 73 with 1, which is a single pair of bounds for all programs.
LEAST_LEFT = 0.15
#: Log half-width above which a note is given.
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
    """Group of a kernel: its kind, except for in-place updates and random numbers."""
    if kernel.opcode == "copy" and not _changes_layout(kernel):
        # The copy at the start of an argument's update, which the compiler may omit.
        return "gather_scatter"
    names = {op.opcode for part in kernel.body.computations.values() for op in part.ops}
    return "random" if "rng-bit-generator" in names else kernel.kind


def _changes_layout(kernel: Kernel) -> bool:
    entry = kernel.body.entry_computation
    return any(op.results[0].layout != entry.root_op.results[0].layout for op in entry.parameters)


def shares(kernels: Sequence[Kernel], latency_s: np.ndarray) -> dict[str, float]:
    """Fraction of each group in a program's time, from seconds of one execution, ``(n,)``."""
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
    """Bounds of each group in logarithms, in addition to those of the kernels.

    Args:
        groups: Dominant group of each of ``n`` programs.
        scores: ``log(xla / fused)`` of each, shape ``(n,)``.
        below: Distance of the kernels' lower bound in logarithms, positive, shape ``(n,)``.
        above: Distance of the kernels' upper bound.
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
    """The part, in quadrature, by which the 95 % quantile of both errors exceeds the bounds."""
    # Imported here: only fitting needs it, and it takes longer to load than most predictions.
    from scipy.special import ndtr

    deviation = np.maximum(ends, 1e-3) / NORMAL_90
    low, high = 0.0, float(np.maximum(scores.max(), 0.0) + 4.0 * deviation.max())
    for _ in range(40):  # bisection, to a millionth of a millionth
        middle = 0.5 * (low + high)
        inside = float(ndtr((middle - scores) / deviation).mean())
        low, high = (low, middle) if inside > 0.95 else (middle, high)
    return sqrt(max(high**2 - float(np.median(ends)) ** 2, 0.0))


@cache
def _shipped(platform: str, key: str) -> dict[str, Ends]:
    """Shipped bounds of a platform by name; empty if it was not compared."""
    kept = json.loads(FILE.read_text())["platforms"].get(platform, {})
    return {name: (lo, hi) for name, (lo, hi) in kept.get(key, {}).items()}


def shipped(platform: str) -> Mapping[str, Ends]:
    """Shipped bounds by group; empty for a platform that was not compared."""
    return _shipped(platform, "ends")


def _passed(lowered: LoweredProgram) -> float:
    """Fraction of the bytes that pass between kernels."""
    moved = sum(k.bytes * k.multiplicity for k in lowered.kernels if k.takes_time)
    return max(0.0, 1.0 - lowered.entry_bytes / moved) if moved else 0.0


def left_joined(lowered: LoweredProgram, parts: Mapping[str, float]) -> float:
    """Fraction of a program's op-by-op time that remains without transfers in joined kernels.

    Args:
        lowered: The program by ``op``.
        parts: Fractions of its time by group, from :func:`shares`.
    """
    joined = sum(share for group, share in parts.items() if group not in _APART)
    return max(1.0 - joined * _passed(lowered), LEAST_LEFT)


@cache
def shipped_op(platform: str) -> Ends | None:
    """Log bounds of the compiler's time over the part of op's left by :func:`left_joined`.

    Returns:
        5 and 95 % quantiles; ``None`` for a platform where they were not compared.
    """
    kept = json.loads(FILE.read_text())["platforms"].get(platform, {}).get("op")
    return None if kept is None else (kept[0], kept[1])


def op_ends(left: float, known: Ends) -> Ends:
    """Log bounds around the time by ``op``, which they include.

    Args:
        left: Result of :func:`left_joined`.
        known: Result of :func:`shipped_op`.
    """
    return min(log(left) + known[0], 0.0), max(log(left) + known[1], 0.0)


def uncertain_counts(lowered: LoweredProgram) -> dict[str, float]:
    """Find which of a program's counts depend on how kernels are formed, and to what extent.

    Returns:
        ``bytes``: fraction passed between kernels, which the compiler may join or split
        differently; 1 with library calls, whose layouts are unknown. ``flops``: fraction outside
        products, which each reading kernel may recompute. Only fractions above :data:`COUNTS`.
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


def shipped_counts(platform: str) -> Mapping[str, Ends]:
    """Ratio of the compiler's counts to ours for :func:`uncertain_counts`: 5 and 95 % bounds."""
    return _shipped(platform, "counts")


def count_note(lowered: LoweredProgram, device: DeviceSpec) -> tuple[str, ...]:
    """A note on how much the compiler's counts of bytes and FLOPs may differ, and why."""
    ends = shipped_counts(device.platform)
    said = []
    for what, share in uncertain_counts(lowered).items() if lowered.lowering == "fused" else ():
        if what in ends:
            low, high = ends[what]
            said.append(f"{low:.2f} to {high:.2f} times the {_COUNTED[what].format(share=share)}")
    return (f"counts of lowering fused: the compiler's are {', and '.join(said)}",) if said else ()


def ends_of(parts: Mapping[str, float], known: Mapping[str, Ends]) -> Ends:
    """Log bounds of a program from the fraction of each group in its time.

    Errors of groups are independent, so that their parts add in quadrature.

    Args:
        parts: Fractions by group.
        known: Bounds by group, from :func:`shipped` or :func:`fit`.
    """
    pairs = [(share, known.get(group, known[ALL])) for group, share in parts.items()]
    low, high = (hypot(*(share * ends[side] for share, ends in pairs)) for side in (0, 1))
    return -low, high


def widened(
    wall: ProgramPrediction, lowered: LoweredProgram, latency_s: np.ndarray, device: DeviceSpec
) -> ProgramPrediction:
    """Widen a program's interval by the error of its lowering.

    A TPU runs no program op by op: there the bounds of ``op`` are those of the compiler's time,
    whatever the error of such kernels, which never run.

    Args:
        wall: Time and bounds in seconds.
        lowered: The program; only changed if it was lowered by ``fused``, or by ``op`` for a TPU.
        latency_s: Seconds of one execution of each kernel, shape ``(n,)``.
        device: The device; no change on platforms that were not compared.
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
    """A note if the compiler's kernels may take a different time, as in :func:`widened`."""
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
    """A note on the time left if a compiler joins kernels: the interval is for single ops."""
    left = left_joined(lowered, shares(lowered.kernels, latency_s))
    # A compiler's kernels are already joined.
    if -log(left) < _TELLING or any(k.opcode == "fusion" for k in lowered.kernels):
        return ()
    least = " or less" if left == LEAST_LEFT else ""
    return (
        "lowering op: every op is a kernel of its own, as without jax.jit, and the interval is "
        "that of such kernels; a compiler that joins them may take "
        f"{left:.2f} times as long{least}: --lowering fused is closer",
    )
