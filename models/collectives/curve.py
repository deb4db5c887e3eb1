"""Time of a collective by bytes and number of devices: an alpha–beta curve in three parts.

Communication libraries change their algorithm with the message size: a low-latency protocol (flags
beside the data, one shot for custom all-reduces), an intermediate one, and a chunked bulk one. In
each part

    time = clock scale · (a + b · steps(n)) + wire bytes / (efficiency · r(n) · link bandwidth)

and the bulk part has an additional ``q · sqrt(wire time)``: with ``k`` chunks the pipeline costs
``α·k`` in start-ups and ``T/k`` to fill, and the best ``k`` leaves a term proportional to ``√T``.
The parts are joined at two sizes in bytes. Where the host issues the calls one by one, its time is
a lower bound, and the message is copied once.

``wire bytes`` is what each device sends in a ring: ``2 (n-1)/n`` of the buffer for an all-reduce,
``(n-1)/n`` of the full buffer for all-gather, reduce-scatter and all-to-all (Thakur, Rabenseifner
and Gropp, Int. J. High Perform. Comput. Appl. 19, 2005); the low-latency part of a custom
all-reduce sends ``n-1`` buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Parameters, in the order of the vector: start-up, time per step and efficiency of each part; the
#: chunking term; bandwidth of 4 and 8 devices relative to 2; sizes at which the parts are joined,
#: in octaves (log2 bytes) for 4 devices, and their slopes per octave of devices; host time. ``log``
#: parameters are natural logarithms of microseconds or of ratios.
PARAMETERS = (
    "log_a_low",
    "log_b_low",
    "log_e_low",
    "log_a_mid",
    "log_b_mid",
    "log_e_mid",
    "log_a_bulk",
    "log_b_bulk",
    "log_e_bulk",
    "log_q",
    "log_r4",
    "log_r8",
    "switch_mid",
    "switch_mid_n",
    "switch_bulk",
    "switch_bulk_n",
    "log_host",
)
#: Start of a fit without a parent: plausible values of a fast scale-up fabric under NCCL, which
#: switches protocol near 46 KB (octave 15.5) and 1.5 MB (20.5). Engineering estimate: every group
#: is fitted away from it.
START = np.array(
    [
        *np.log([5.0, 1.2, 0.15]),
        *np.log([7.0, 1.2, 0.4]),
        *np.log([15.0, 1.5, 0.75]),
        *np.log([1.0, 1.0, 1.0]),
        *[15.5, 0.0, 20.5, 0.0],
        np.log(25.0),
    ]
)
#: Distance of each parameter from its prior that costs as much as a residual of 10 %. Start-ups and
#: efficiencies may differ by a factor e, the effect of the number of devices by less. Engineering
#: estimates; not fitted.
SPREAD = np.array([1.0, 1.0, 1.0] * 3 + [1.5, 0.4, 0.4, 1.0, 0.5, 1.0, 0.5, 0.8])
#: Width of a protocol change, in octaves of the size. Libraries switch abruptly; a narrow ramp
#: keeps the curve differentiable for the fit.
SWITCH_WIDTH = 0.12
#: Fraction of the memory bandwidth at which a message is copied: that of long streams (0.90 was
#: fitted to passes over memory, docs/gpu.md).
COPY_EFFICIENCY = 0.9


@dataclass(frozen=True)
class Points:
    """Collectives as arrays of shape ``(n,)``, in bytes, microseconds and bytes/us.

    Attributes:
        size: Bytes of the buffer.
        world: Devices in the group.
        steps: Sequential start-ups, as :func:`steps` counts them.
        spread: Devices that determine the bandwidth ratio: the whole group, or twice the devices of
            a node if the network is the limit.
        wire: Bytes that each device sends in a ring.
        wire_low: Bytes that each device sends in the low-latency part.
        bandwidth: Bandwidth of the limiting link, one direction.
        scale: Start-up times as a multiple of those at the reference clock.
        copy: Time to copy the message once if the host issues the calls; else 0.
        eager: Whether the host issues the calls one by one (1.0 or 0.0).
    """

    size: np.ndarray
    world: np.ndarray
    steps: np.ndarray
    spread: np.ndarray
    wire: np.ndarray
    wire_low: np.ndarray
    bandwidth: np.ndarray
    scale: np.ndarray
    copy: np.ndarray
    eager: np.ndarray

    def take(self, rows: np.ndarray) -> Points:
        """The points at ``rows``, a mask or positions."""
        return Points(**{name: getattr(self, name)[rows] for name in self.__dataclass_fields__})


def wire_bytes(op: str, size: np.ndarray, world: np.ndarray, gathers_shards: bool) -> np.ndarray:
    """Bytes that each device of a ring sends.

    Args:
        op: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``alltoall``, ``send_recv`` or
            another, which counts as one transfer of the buffer.
        size: Bytes of the buffer, shape ``(n,)``: the full buffer, as in nccl-tests.
        world: Devices, shape ``(n,)``.
        gathers_shards: Whether ``size`` of an all-gather is one device's share, not the full
            buffer (oneCCL's benchmark).
    """
    # The share of the buffer that a device does not hold yet.
    share = (world - 1.0) / world
    if op == "all_reduce":
        return np.asarray(2.0 * share * size)
    if op == "all_gather" and gathers_shards:
        return np.asarray((world - 1.0) * size)
    if op in ("all_gather", "reduce_scatter", "alltoall"):
        return np.asarray(share * size)
    return np.asarray(size, dtype=float)


def steps(world: np.ndarray, ring: np.ndarray | bool = False) -> np.ndarray:
    """Number of sequential start-ups: ``n - 1`` up to 8 devices, then two per doubling (a tree).

    Args:
        world: Devices in the group, shape ``(n,)``.
        ring: Whether each device passes data to the next, which takes ``n - 1`` for any number of
            devices; shape ``(n,)``.
    """
    tree = 2.0 * np.log2(np.maximum(world, 8.0) / 8.0)
    return np.where(ring, world - 1.0, np.minimum(world, 8.0) - 1.0 + tree)


def curve_us(parameters: np.ndarray, points: Points) -> np.ndarray:
    """Latency in microseconds.

    Args:
        parameters: As listed in :data:`PARAMETERS`, shape ``(17,)``, or several, ``(17, m, 1)``.
        points: The collectives, ``n`` of them.

    Returns:
        Shape ``(n,)`` or ``(m, n)``, positive.
    """
    p = dict(zip(PARAMETERS, parameters, strict=True))
    # Most machines were measured with 2, 4 and 8 devices; np.interp is constant beyond these.
    octave = np.log2(points.spread)
    four, eight = (np.interp(octave, [1.0, 2.0, 3.0], own) for own in ([0, 1, 0], [0, 0, 1]))
    ratio = np.exp(p["log_r4"] * four + p["log_r8"] * eight)
    count = points.steps
    ideal = points.wire / (ratio * points.bandwidth)
    shot = points.wire_low / (ratio * points.bandwidth)
    low = _start(p, "low", count, points) + shot / np.exp(p["log_e_low"])
    mid = _start(p, "mid", count, points) + ideal / np.exp(p["log_e_mid"])
    bulk = _start(p, "bulk", count, points) + ideal / np.exp(p["log_e_bulk"])
    bulk = bulk + np.exp(p["log_q"]) * np.sqrt(ideal)
    # Blending logarithms keeps the curve positive and treats relative errors of both parts alike.
    # Switch sizes refer to 4 devices (octave 2).
    to_mid = _switch(points.size, p["switch_mid"] + p["switch_mid_n"] * (octave - 2.0))
    to_bulk = _switch(points.size, p["switch_bulk"] + p["switch_bulk_n"] * (octave - 2.0))
    smooth = (1.0 - to_mid) * np.log(low) + to_mid * np.log(mid)
    # Added rather than overlapped: vLLM and SGLang copy the message into a registered buffer before
    # an eager all-reduce starts.
    device = np.exp((1.0 - to_bulk) * smooth + to_bulk * np.log(bulk)) + points.copy
    host = np.exp(p["log_host"]) * points.eager
    # A smooth maximum of device and host time (8-norm: equal times give 9 % more than either), so
    # that the fit sees a gradient on both sides.
    return np.asarray((device**8 + host**8) ** 0.125)


def _start(p: dict[str, np.ndarray], part: str, count: np.ndarray, points: Points) -> np.ndarray:
    base = np.exp(p[f"log_a_{part}"]) + np.exp(p[f"log_b_{part}"]) * count
    return np.asarray(base * points.scale)


def _switch(size: np.ndarray, octave: np.ndarray) -> np.ndarray:
    # Clipped so that the exponential cannot overflow.
    distance = np.clip((np.log2(size) - octave) / SWITCH_WIDTH, -30.0, 30.0)
    return np.asarray(1.0 / (1.0 + np.exp(-distance)))
