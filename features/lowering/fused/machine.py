"""Properties of a GPU that fusion depends on, derived from a device description."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...devices.device import DeviceSpec
from ...devices.rules import capability_of, narrow_floats_of

#: Types that Triton converts, as in products compiled for an A100, L40S, H100 and B200 (JAX 0.10):
#: no unsigned integers, and fp8 with three mantissa bits from compute capability 9.0 on.
_CONVERTED = frozenset(("pred", "s4", "s8", "s16", "s32", "bf16", "f16", "f32", "f8e5m2"))
_FROM_HOPPER = frozenset(("f8e4m3fn",))


@dataclass(frozen=True, slots=True)
class Machine:
    """Properties of a GPU that fusion depends on; defaults are those of an H100 SXM (data sheet).

    Attributes:
        bandwidth: Memory bandwidth in bytes per second.
        cache: Size of the last-level cache in bytes.
        cores: Number of multiprocessors.
        clock: Clock rate in hertz.
        lanes: Vector lanes per multiprocessor.
        tensor_fusion: Whether softmax becomes one kernel (Triton: compute capability 8.0 up).
        bf16_arithmetic: Whether bf16 sums and products have native instructions.
        channels_last: Whether convolutions of any type run with channels innermost.
        half_channels_last: Whether convolutions of images in 16-bit floats do.
        fused_products: Whether products fuse their producers and consumers, and read and write any
            dimension order, as on TPUs.
        host: Whether it is a CPU, whose libraries take other forms of convolutions and top-k, and
            fuse no epilogues.
        converted: Types from which a generated product can convert its operands; empty if all
            products are library calls.
        narrow: 8-bit floats that products multiply natively; ``None`` for all of them.
        capability: Compute capability × 10; 0 for other vendors' GPUs.
    """

    bandwidth: float = 3.35e12
    cache: float = 50e6
    cores: int = 132
    clock: float = 1.98e9
    lanes: int = 128
    tensor_fusion: bool = True
    bf16_arithmetic: bool = True
    channels_last: bool = True
    half_channels_last: bool = True
    fused_products: bool = False
    host: bool = False
    converted: frozenset[str] = _CONVERTED | _FROM_HOPPER
    narrow: frozenset[str] | None = frozenset(("f8e4m3fn", "f8e5m2"))
    capability: int = 90


def machine_of(device: DeviceSpec | None) -> Machine:
    """Derive the machine from a device description.

    H100 values are used if the description is missing, is of another platform, or lacks a figure.
    """
    platform = device.platform if device is not None else "gpu"
    usual = Machine(fused_products=platform == "tpu", host=platform == "cpu")
    if platform != "gpu":
        return replace(usual, converted=frozenset())
    if device is None or not device.levels:
        return usual
    target = str(device.compiler.get("target", ""))
    capability = capability_of(target)
    # Without a target (or on another vendor's GPU) bf16 units indicate the generation. Triton needs
    # compute capability 8.0. XLA puts channels innermost for cuDNN in 16-bit images from 7.0 on
    # (tensor cores), and in everything but volumes from 9.0 on.
    modern = capability >= 80 if capability else "bf16" in device.peak_flops
    cache = device.levels[-2].capacity if len(device.levels) > 1 else usual.cache
    return Machine(
        bandwidth=device.levels[-1].bandwidth,
        cache=cache,
        cores=device.core_count or usual.cores,
        clock=device.clock_hz or usual.clock,
        lanes=device.lanes_per_core or usual.lanes,
        tensor_fusion=modern,
        converted=_converted(capability or 80) if modern else frozenset(),
        narrow=narrow_floats_of(target),
        capability=capability or 0,
        bf16_arithmetic=(capability or 0) >= 90,
        channels_last=capability >= 90 if capability else modern,
        half_channels_last=capability >= 70 if capability else True,
    )


def _converted(capability: int) -> frozenset[str]:
    return _CONVERTED | _FROM_HOPPER if capability >= 90 else _CONVERTED
