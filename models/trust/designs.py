"""Designs: hypothetical chips that differ from a measured one in the figures of their file.

A design is priced as its base, times a ratio from physics. The base's prediction has everything
that was learned, and the ratio is smooth in every rate, which trees are not. An unchanged copy of a
chip therefore has identical predictions, and figures outside the physics have no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...features.devices.device import DeviceSpec
from ...features.kernels.kernel import Kernel
from ...features.table.roofline import least_seconds, roofline
from ..core.base import KernelPrediction
from ..core.kernel_table import SMALLEST

#: Largest error, in logarithms, of the physical ratio of the times of two chips. Compared with the
#: model's ratio for pairs of measured chips, 90 % of products, attention, experts and passes err by
#: 0.03 to 0.19 between chips of one architecture and by 0.09 to 0.61 between architectures (norms
#: of A40 relative to A100 by 0.94), however far the ratio is from 1. Chosen between them, not
#: fitted (docs/devices.md).
FAR = 0.35
#: Log distances of the ratio from 1 up to which a design counts as its base, and as a sibling of
#: it, and from which it is outside the domain. The first is the variation of a chip's clock, the
#: second the difference of measured siblings (H100 and H200: 0.36), the third twice that.
SAME, SIBLING, OUTSIDE = 0.03, 0.36, 0.72
#: Least error of the ratio to a base of another architecture: the largest of the above between
#: architectures, except for norms.
OTHER_ARCHITECTURE = 0.61


class Likeness(NamedTuple):
    """Similarity of a design and its base in properties that the physical ratio ignores.

    Attributes:
        akin: Whether they have the same architecture and number of dies.
        reuse: Ratio of bytes moved by tiles that fill a core's shared memory: the traffic of a
            product is inversely proportional to the square root of the tile memory (Hong and Kung,
            I/O complexity: the red-blue pebble game, 1981).
    """

    akin: np.ndarray | bool = True
    reuse: np.ndarray | float = 1.0

    @classmethod
    def of(cls, design: DeviceSpec, base: DeviceSpec) -> Likeness:
        """Compare two descriptions."""
        # A file without dies means one, or as many as the base.
        dies = design.dies or base.dies, base.dies or 1
        akin = design.architecture == base.architecture and (dies[0] or 1) == dies[1]
        shared, own = base.shared_bytes_per_core, design.shared_bytes_per_core
        # Unspecified sizes are taken as equal.
        return cls(akin, float(np.sqrt(shared / own)) if shared and own else 1.0)


#: Similarity of a design that differs from its base in rates only.
ALIKE = Likeness()


def drift(ratio: np.ndarray) -> np.ndarray:
    """Half-width of the 90 % interval of a physical ratio, in logarithms, shape ``(n,)``.

    The error of small ratios equals their size; that of large ones is limited to :data:`FAR`.
    """
    return np.asarray(FAR * np.tanh(np.abs(np.log(ratio)) / FAR))


def ends_of(
    ends: tuple[np.ndarray, np.ndarray],
    latency: np.ndarray,
    ratio: np.ndarray,
    like: Likeness = ALIKE,
) -> tuple[np.ndarray, np.ndarray]:
    """Interval bounds of a design in seconds, shape ``(n,)`` each.

    Args:
        ends: Bounds of its base.
        latency: Latency of the base, in seconds.
        ratio: Time on the design over that on the base.
        like: Properties that the ratio ignores.
    """
    half = np.maximum(drift(ratio), np.where(like.akin, 0.0, OTHER_ARCHITECTURE))
    fewer, more = np.minimum(like.reuse, 1.0), np.maximum(like.reuse, 1.0)

    def moved(end: np.ndarray) -> np.ndarray:
        # Without any difference, the bounds are exactly the base's.
        own = np.abs(np.log(end / latency))
        return np.asarray(np.hypot(own, half) - own)

    low, high = (end * ratio * np.exp(s * moved(end)) for s, end in zip((-1, 1), ends, strict=True))
    return low * fewer, high * more


def scope_of(scope: np.ndarray, ratio: np.ndarray, like: Likeness = ALIKE) -> np.ndarray:
    """Scope of a design, from its base's scope and its distance from it, shape ``(n,)``."""
    far = np.where(like.akin, np.abs(np.log(ratio)), np.inf)
    known = scope != "unseen"
    found = np.where(known & (far > SAME), "sibling", scope)
    return np.asarray(np.where(far > SIBLING, "unseen", found), object)


def is_near(ratio: np.ndarray, like: Likeness = ALIKE) -> np.ndarray:
    """Mask of designs that their base still represents, shape ``(n,)``."""
    return np.asarray((np.abs(np.log(ratio)) < OUTSIDE) & like.akin)


def why_far(name: str, base: str, ratio: float) -> str:
    """A message on why a design is outside the domain."""
    return f"{name} takes {ratio:.2g} times as long as {base}, farther than measured siblings lie"


def roofline_ratio(
    kernels: Sequence[Kernel], design: DeviceSpec, base: DeviceSpec
) -> tuple[np.ndarray, np.ndarray]:
    """Time on a design over that on its base by roofline and floor, shape ``(n,)``.

    Returns:
        The ratio, 1 for kernels that take no time; the limiting term of each kernel on the design.
    """
    line = roofline(kernels, design)
    here, there = line.latency_s + design.floor, roofline(kernels, base).latency_s + base.floor
    return np.divide(here, there, out=np.ones(len(kernels)), where=there > 0.0), line.bound


def on_design(
    found: KernelPrediction, kernels: Sequence[Kernel], design: DeviceSpec, base: DeviceSpec
) -> KernelPrediction:
    """Scale predictions on a base to a design of it by the ratio of their rooflines.

    Args:
        found: Predictions of the kernels on the base.
        kernels: ``n`` kernels.
        design: The device to predict for.
        base: The device that it is based on.
    """
    if not kernels:
        return found
    ratio, bound = roofline_ratio(kernels, design, base)
    like = Likeness.of(design, base)._replace(reuse=1.0)
    lo, hi = ends_of((found.lo, found.hi), found.latency, ratio, like)
    # Not below the design's physical limit, unless the base's prediction is below its own limit,
    # such as if caches hold more than the physics assumes.
    below = np.minimum(found.latency / np.maximum(least_seconds(kernels, base), SMALLEST), 1.0)
    least = least_seconds(kernels, design) * below
    latency = np.maximum(found.latency * ratio, least)
    return replace(
        found,
        latency=latency,
        lo=np.clip(lo, np.minimum(least, latency), latency),
        hi=np.maximum(hi, latency),
        bound=bound.astype(object),
        in_domain=found.in_domain & is_near(ratio, like),
        unclamped=found.latency * ratio,
    )
