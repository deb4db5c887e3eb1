"""Properties of a GPU that fusion depends on, from the description of a device."""

from __future__ import annotations

from dataclasses import dataclass

from ....devices.device import DeviceSpec
from ....devices.rules import capability_of

#: Seconds that one more kernel costs: the launch overhead that XLA's GpuPerformanceModel assumes,
#: not what a launch takes on the device (its floor).
LAUNCH_S = 1e-6


@dataclass(frozen=True, slots=True)
class Machine:
    """Properties of a GPU that fusion depends on; by default those of an H100 SXM (data sheet).

    Attributes:
        bandwidth: Bytes per second of the memory.
        cache: Bytes of the last-level cache.
        cores: Multiprocessors.
        clock: Hertz.
        lanes: Vector lanes of a multiprocessor.
        tensor_fusion: Whether softmax becomes one kernel (Triton: compute capability 8.0 up).
        channels_last: Whether convolutions in 32-bit floats run with channels innermost.
        half_channels_last: The same for 16-bit floats.
    """

    bandwidth: float = 3.35e12
    cache: float = 50e6
    cores: int = 132
    clock: float = 1.98e9
    lanes: int = 128
    tensor_fusion: bool = True
    channels_last: bool = True
    half_channels_last: bool = True


def machine_of(device: DeviceSpec | None) -> Machine:
    """Derive the machine from a device description.

    An H100 stands in for a missing description, for one of another platform, and for figures that
    the description leaves out.
    """
    usual = Machine()
    if device is None or device.platform != "gpu" or not device.levels:
        return usual
    capability = capability_of(str(device.compiler.get("target", "")))
    # Without a target (or on another vendor's GPU) units for bf16 reveal the generation.
    # Triton needs compute capability 8.0; cuDNN prefers NHWC for TF32, which came with it, and for
    # f16 since tensor cores (7.0).
    modern = capability >= 80 if capability else "bf16" in device.peak_flops
    cache = device.levels[-2].capacity if len(device.levels) > 1 else usual.cache
    return Machine(
        bandwidth=device.levels[-1].bandwidth,
        cache=cache,
        cores=device.core_count or usual.cores,
        clock=device.clock_hz or usual.clock,
        lanes=device.lanes_per_core or usual.lanes,
        tensor_fusion=modern,
        channels_last=modern,
        half_channels_last=capability >= 70 if capability else True,
    )
