"""What a step shares with other steps: framework, chip generation, number formats, cluster."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import log

from ...common.files import own_data
from ...features.devices.catalogue import measured_as
from ...features.devices.device import DeviceSpec
from ..effects.effects import CLUSTER, Value

#: Power limit over the matrix rate in 16 bits of an H100, W per TFLOP/s: 700 W and 989 TFLOP/s of
#: its data sheet. Other chips' headroom is relative to it.
_H100_HEADROOM = 0.7075
#: The same of an A100 (400 W, 312 TFLOP/s), the most of any chip whose steps were learned from. A
#: chip with more watts for each operation, such as one with slow matrix units, is no faster for it.
_MOST_HEADROOM = 1.282
#: Source of runs that name none: one's own.
OWN = "own"
#: Framework, or cluster, of a step that says nothing of it, and its value as a level.
UNKNOWN = ""
UNNAMED = ("", 1.0)
#: What is known of frameworks by name: ``engines`` of those that share one, those that are
#: ``compiled``, and ``whole_sequences``.
FRAMEWORKS = own_data("models/effects/steps.yaml")


@dataclass(frozen=True)
class StepContext:
    """Levels that effects are learned on.

    Attributes:
        framework: Such as ``nanotron``; :data:`UNKNOWN` if it is not known.
        architecture: Of the chip; both kinds of Blackwell count as one.
        platform: ``gpu`` or ``tpu``.
        bits: Of the operands of products: ``16``, ``8`` or ``4`` (``32`` for f32).
        launched: Whether the host launches every kernel.
        cluster: Whose machines, and which: the source of measurements and the device.
        headroom: Logarithm of the chip's power limit over its 16-bit matrix rate, relative to an
            H100: chips with less of it lower their clocks more under minutes of products. 0 for
            chips without a stated limit, and for TPUs.
        boxes: Logarithm of the number of boxes that the devices are in.
        device: Name of the chip.
    """

    framework: str
    architecture: str
    platform: str
    bits: str
    launched: bool
    cluster: str
    headroom: float
    boxes: float = 0.0
    device: str = UNKNOWN

    @cached_property
    def _levels(self) -> dict[str, Value]:
        # A framework or cluster that is not named is one of all that could be.
        engine = FRAMEWORKS["engines"].get(self.framework, "") if self.framework else UNNAMED
        return {
            "all": self.platform,
            "architecture": self.architecture,
            "device": self.device,
            "bits": self.bits if self.platform == "gpu" else f"tpu-{self.bits}",
            "headroom": ("slope", self.headroom),
            "framework": self.framework or UNNAMED,
            "engine": engine,
            CLUSTER: self.cluster or UNNAMED,
            f"{CLUSTER}-boxes": (self.cluster, self.boxes),
        }

    def get(self, key: str, default: str, /) -> Value:
        """Value of a level of :mod:`~opcast.models.effects.effects`, or ``default``."""
        return self._levels.get(key, default)


def is_compiled(framework: str) -> bool:
    """Whether a framework compiles a step, or replays it, whatever is asked."""
    return framework.startswith(tuple(FRAMEWORKS["compiled"]))


def device_context(
    device: DeviceSpec,
    bits: int,
    framework: str = UNKNOWN,
    source: str = UNKNOWN,
    *,
    launched: bool = True,
    boxes: int = 1,
) -> StepContext:
    """Context of what runs on a device.

    Args:
        device: Which chip.
        bits: Of the operands of products.
        framework: Which framework runs it.
        source: Whose cluster it is.
        launched: Whether the host launches every kernel; compiled and captured steps do not.
        boxes: That the devices are in.
    """
    name = measured_as(device)
    return StepContext(
        framework=framework,
        architecture=device.architecture.removesuffix("-ultra"),
        platform=device.platform,
        bits=str(bits),
        launched=launched and device.platform == "gpu",
        cluster=f"{source}|{name}" if source else UNKNOWN,
        headroom=_headroom(device),
        boxes=log(boxes),
        device=name,
    )


def _headroom(device: DeviceSpec) -> float:
    # Before Ampere the limit never bound: V100 has 2.4 W a TFLOP/s.
    if device.platform != "gpu" or not device.power_w or device.architecture == "volta":
        return 0.0
    own = device.power_w / device.matrix_peak("bf16") * 1e12
    return log(min(own, _MOST_HEADROOM) / _H100_HEADROOM)
