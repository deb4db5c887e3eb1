"""Designs: chips that differ from a measured one in the figures of their file.

A design is priced as its base, times what physics says of both. The base's answer carries all that
was learned of it, and the ratio is smooth in every rate, where what is learned by trees is not. So
an unchanged copy is equal to the bit, and what physics does not know of moves nothing.
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

#: Largest error, in logarithms, of the ratio that physics gives to the times of two chips. Beside
#: the ratio that the model predicts for pairs of measured chips, 90 % of products, attention,
#: experts and passes err by 0.03 to 0.19 between chips of one architecture and by 0.09 to 0.61
#: between architectures (norms of A40 beside A100 by 0.94), however far the ratio is from 1. Chosen
#: between them, not fitted (docs/devices.md).
FAR = 0.35
#: Distances of the ratio from 1, in logarithms, up to which a design counts as its base and as a
#: sibling of it, and from which it lies outside the domain. The first is what a chip's own clock
#: varies by, the second what siblings that were measured differ by (H100 and H200: 0.36), the third
#: twice that.
SAME, SIBLING, OUTSIDE = 0.03, 0.36, 0.72
#: Least error of the ratio to a base of another architecture: the largest of the above between two
#: of them, but for the norms.
OTHER_ARCHITECTURE = 0.61


class Likeness(NamedTuple):
    """How a design and its base are alike in what the ratio of physics does not see.

    Attributes:
        akin: Whether they are of one architecture and have as many dies.
        reuse: Bytes that tiles move on the design over those on the base, if they fill the shared
            memory of a core: a product moves as many as the root of what holds its tiles is small
            (Hong and Kung, I/O complexity: the red-blue pebble game, 1981).
    """

    akin: np.ndarray | bool = True
    reuse: np.ndarray | float = 1.0

    @classmethod
    def of(cls, design: DeviceSpec, base: DeviceSpec) -> Likeness:
        """Compare two descriptions."""
        # Of chips whose file leaves out the dies one is meant, or those of the base.
        dies = design.dies or base.dies, base.dies or 1
        akin = design.architecture == base.architecture and (dies[0] or 1) == dies[1]
        shared, own = base.shared_bytes_per_core, design.shared_bytes_per_core
        # What a file leaves out tells nothing.
        return cls(akin, float(np.sqrt(shared / own)) if shared and own else 1.0)


#: Of a design that differs from its base in nothing but rates.
ALIKE = Likeness()


def drift(ratio: np.ndarray) -> np.ndarray:
    """Half-width of the 90 % interval of a ratio that physics gives, in logarithms, ``(n,)``.

    Small ratios are as uncertain as they are large; large ones no more than those of unlike chips.
    """
    return np.asarray(FAR * np.tanh(np.abs(np.log(ratio)) / FAR))


def ends_of(
    ends: tuple[np.ndarray, np.ndarray],
    latency: np.ndarray,
    ratio: np.ndarray,
    like: Likeness = ALIKE,
) -> tuple[np.ndarray, np.ndarray]:
    """Ends of a design's interval in seconds, shape ``(n,)`` each.

    Args:
        ends: Those of its base.
        latency: Of the base, in seconds.
        ratio: Time on the design over that on the base.
        like: What the ratio does not see.
    """
    half = np.maximum(drift(ratio), np.where(like.akin, 0.0, OTHER_ARCHITECTURE))
    fewer, more = np.minimum(like.reuse, 1.0), np.maximum(like.reuse, 1.0)

    def moved(end: np.ndarray) -> np.ndarray:
        # Where nothing differs, the end is the base's to the bit.
        own = np.abs(np.log(end / latency))
        return np.asarray(np.hypot(own, half) - own)

    low, high = (end * ratio * np.exp(s * moved(end)) for s, end in zip((-1, 1), ends, strict=True))
    return low * fewer, high * more


def scope_of(scope: np.ndarray, ratio: np.ndarray, like: Likeness = ALIKE) -> np.ndarray:
    """How well a design is known, by how well its base is and how far it is from that, ``(n,)``."""
    far = np.where(like.akin, np.abs(np.log(ratio)), np.inf)
    known = scope != "unseen"
    found = np.where(known & (far > SAME), "sibling", scope)
    return np.asarray(np.where(far > SIBLING, "unseen", found), object)


def is_near(ratio: np.ndarray, like: Likeness = ALIKE) -> np.ndarray:
    """Whether what was learned of the base still describes a design, bool, shape ``(n,)``."""
    return np.asarray((np.abs(np.log(ratio)) < OUTSIDE) & like.akin)


def why_far(name: str, base: str, ratio: float) -> str:
    """The reason why a design is outside the domain, in words."""
    return f"{name} takes {ratio:.2g} times as long as {base}, farther than measured siblings lie"


def roofline_ratio(
    kernels: Sequence[Kernel], design: DeviceSpec, base: DeviceSpec
) -> tuple[np.ndarray, np.ndarray]:
    """Time on a design over that on its base by roofline and floor, and its bounds, ``(n,)`` each.

    Returns:
        The ratio, 1 for kernels that take no time; what limits each kernel on the design.
    """
    line = roofline(kernels, design)
    here, there = line.latency_s + design.floor, roofline(kernels, base).latency_s + base.floor
    return np.divide(here, there, out=np.ones(len(kernels)), where=there > 0.0), line.bound


def on_design(
    found: KernelPrediction, kernels: Sequence[Kernel], design: DeviceSpec, base: DeviceSpec
) -> KernelPrediction:
    """Move predictions from a base to a design of it by the ratio of their rooflines.

    Args:
        found: Of the kernels on the base.
        kernels: ``n`` kernels.
        design: The device to predict for.
        base: The device that it was made of.
    """
    if not kernels:
        return found
    ratio, bound = roofline_ratio(kernels, design, base)
    like = Likeness.of(design, base)._replace(reuse=1.0)
    lo, hi = ends_of((found.lo, found.hi), found.latency, ratio, like)
    # Not below what bounds the design, unless the base's answer is below its own bound, as where
    # caches hold more than physics knows.
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
