"""What fusion depends on of a GPU, derived from a device's description."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...devices.device import DeviceSpec
from ...devices.rules import capability_of, narrow_floats_of

#: Types that Triton converts, as the compiler (JAX 0.10) lets products for an A100, L40S, H100 and
#: B200 read them: no unsigned integers, and fp8 of three bits from compute capability 9.0 on.
_CONVERTED = frozenset(("pred", "s4", "s8", "s16", "s32", "bf16", "f16", "f32", "f8e5m2"))
_FROM_HOPPER = frozenset(("f8e4m3fn",))


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
        bf16_arithmetic: Whether sums and products of bf16 have instructions of their own.
        channels_last: Whether convolutions of any type run with channels innermost.
        half_channels_last: Whether those of images in 16-bit floats do.
        fused_products: Whether products take in what makes their operands and follows them, and
            read and write any order of dimensions, as on TPUs.
        host: Whether it is a CPU, whose libraries take other forms of convolutions and the largest
            elements, and nothing of what follows them.
        converted: Types from which a generated product converts its operands itself; none where
            all products are the libraries'.
        narrow: 8-bit floats that products multiply as they are; ``None`` for all of them.
        capability: Compute capability × 10; 0 of other makers' GPUs.
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

    An H100 stands in for a missing description, for one of another platform, and for figures that
    the description leaves out.
    """
    platform = device.platform if device is not None else "gpu"
    usual = Machine(fused_products=platform == "tpu", host=platform == "cpu")
    if platform != "gpu":
        return replace(usual, converted=frozenset())
    if device is None or not device.levels:
        return usual
    target = str(device.compiler.get("target", ""))
    capability = capability_of(target)
    # Without a target (or on another vendor's GPU) units for bf16 reveal the generation.
    # Triton needs compute capability 8.0. For cuDNN XLA has channels innermost in images of 16 bits
    # from 7.0 on (tensor cores), and in all but volumes from 9.0 on.
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
