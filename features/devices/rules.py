"""Rules that fill in figures omitted from a device file.

Each rule is a rough engineering estimate with its reason. A filled figure is listed in
``DeviceSpec.defaulted`` and its rule in ``DeviceSpec.provenance``, so that no default is hidden.
Keys and units are those of a device file (``features/devices/sheet.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from ...common.files import own_data
from ...common.types import JsonObject
from ..ir.program import DTYPE_BITS

#: Matrix types that a device file may list; every other type takes the rate of one of them.
MATRIX_TYPES = ("f64", "f32", "tf32", "f16", "bf16", "f8e4m3fn", "f8e5m2", "f4e2m1fn", "s8", "s4")
#: The same for the vector unit.
VECTOR_TYPES = ("f64", "f32", "f16", "bf16", "s32")
#: A network card per device uses four fifths of a PCIe slot: 100, 200 and 400 Gb/s for the 16, 32
#: and 64 GB/s of x16 slots of generations 3, 4 and 5.
_NETWORK_OVER_PCIE = 0.78
#: Lower bound on the ratio of cache to main-memory bandwidth.
_L2_OVER_HBM = 1.5
#: The same ratio for devices without cores and clock: between P100 (2.2) and L40S (6).
_L2_OVER_HBM_BLIND = 4.0
#: FLOP per clock and core: in f32, with the 128 lanes of NVIDIA's multiprocessors since Ampere and
#: of AMD's CDNA 3; at most in bf16, on data-centre Blackwell; and a typical clock.
_LANES_FLOP, _MATRIX_FLOP, _USUAL_MHZ = 256.0, 8192.0, 1500.0
#: Devices of a typical server: NVIDIA's HGX and AMD's OAM boards carry eight.
_NODE = 8.0
#: Power of memory, clocks and leakage in watts, before arithmetic; engineering estimate.
IDLE_W = 20.0
#: Figures of a processor's cores, and of its efficient cores if it has two kinds.
LANES = ("lanes_per_core", "core_count", "boost_mhz")
EFFICIENT = ("efficient_lanes_per_core", "efficient_cores", "efficient_mhz")
#: Source of figures by compute capability.
SOURCE = "CUDA C++ programming guide, technical specifications by compute capability, from memory"
#: Prefix of the names of NVIDIA's architectures.
NVIDIA = "sm_"
#: Keys of a device file that only a compiler needs.
COMPILER_KEYS = (
    "threads_per_core",
    "shared_kb_per_block_optin",
    "shared_kb_per_block",
    "threads_per_block",
    "registers_per_core",
    "registers_per_block",
)


@dataclass(frozen=True)
class Architecture:
    """Rules for one generation of devices.

    Attributes:
        vendor: Vendor.
        l2_bytes_per_clock: Sustained bytes per core and clock between L2 and the cores.
        half: Ratio of the vector rates of f16 and f32.
        brain: Ratio of the vector rates of bf16 and f32.
        integer: Ratio of the vector rates of s32 and f32.
        double: Ratio of the vector rates of f64 and f32.
        floor_us: Shortest kernel by the device's own clock.
        gap_us: Time from the end of a kernel to the start of the next in one stream.
        dispatch_us: Time from the call of an empty program until the host sees it completed.
        f32_joules: Energy of an FP32 operation; 0 if none was derived from a chip of its process.
        revises: Generation that its chips revise, with other rates of some units; empty for a new
            design.
        asynchronous: Whether copies and matrix instructions are asynchronous, for which libraries
            have dedicated attention kernels: data-centre chips from Hopper on.
        warp_groups: Whether products are those of four warps, which read an operand from registers
            (``wgmma``, PTX ISA): FlashAttention 3 is written for them (Shah et al., 2024).
        paired_cores: Whether two cores share a tile's operands, each holding half of one of them
            (``tcgen05`` with ``cta_group::2``, PTX ISA); TensorRT-LLM generates attention kernels
            for such chips, which other libraries call through FlashInfer ("trtllm-gen").
        fast_exponentials: Whether the special-function units are twice as wide.
        whole_keys: Whether TensorRT-LLM's grouped decode does not split the keys of an fp8 cache.
        untuned_convolutions: Whether MIOpen's kernels were written for earlier chips: they do not
            pair vector instructions, multiply 16-bit numbers at half the rate of the newest matrix
            instructions (CDNA 3 instruction set), and include no single-kernel implicit product,
            which wins no row of MI300X but a third of those of MI250X.
        ample_power: Whether products never reach the power limit.
    """

    # Defaults are typical of the generations in the file; each row lists only deviations.
    l2_bytes_per_clock: float = 20.0
    half: float = 2.0
    brain: float = 1.0
    integer: float = 0.5
    double: float = 1 / 32
    floor_us: float = 2.0
    gap_us: float = 1.0
    dispatch_us: float = 20.0
    f32_joules: float = 0.0
    vendor: str = "NVIDIA"
    revises: str = ""
    asynchronous: bool = False
    warp_groups: bool = False
    paired_cores: bool = False
    fast_exponentials: bool = False
    whole_keys: bool = False
    untuned_convolutions: bool = False
    ample_power: bool = False


#: Rules for a GPU of unknown generation.
GENERIC = Architecture()


class Generations(NamedTuple):
    """Contents of ``generations/architectures.yaml``.

    Attributes:
        architectures: Rules by generation.
        nearest: Nearest NVIDIA architecture of each of AMD's, since XLA's compiler for AMD does not
            run without the device.
        references: Catalogue device that represents GPUs of unknown architecture, by vendor.
        capabilities: Figures of a core and a block that only a compiler needs, by compute
            capability × 10, in the units of a device file.
        narrow: 8-bit floats that matrix units multiply, by compiler target.
        xla_fields: Keys of a device file by field of XLA's GPU description.
        tpus: Generations that libtpu compiles for: ``host``, ``cores`` and ``config``.
    """

    architectures: dict[str, Architecture]
    nearest: dict[str, str]
    references: dict[str, str]
    capabilities: dict[int, dict[str, float]]
    narrow: dict[str, list[str]]
    xla_fields: dict[str, str]
    tpus: dict[str, JsonObject]


@cache
def generations() -> Generations:
    """Read the file, on first use."""
    read = own_data("features/devices/generations/architectures.yaml")
    shared, blocks = read["vendors"], read["blocks"]
    return Generations(
        {
            name: Architecture(**{**shared.get(own.get("vendor"), {}), **own})
            for name, own in read["architectures"].items()
        },
        read["nearest"],
        read["references"],
        {capability: {**own, **blocks} for capability, own in read["capabilities"].items()},
        read["narrow"],
        read["xla_fields"],
        read["tpus"],
    )


@cache
def makers() -> frozenset[str]:
    """Return the vendors whose generations are listed."""
    return frozenset(own.vendor for own in generations().architectures.values())


Values = dict[str, float]
_Rule = Callable[[Values, Architecture], tuple[float, str] | None]


def rules_of(architecture: str, platform: str) -> Architecture:
    """Return the rules of an architecture, or of its platform if it is not listed."""
    known = generations().architectures
    # One entry covers all generations of TPUs.
    return known.get(architecture) or known.get(platform, GENERIC)


def named_architecture(text: str) -> str:
    """Normalise an architecture's name as in the rules: ``Hopper`` becomes ``hopper``."""
    return text.lower() if text.lower() in generations().architectures else text


def maker_of(vendor: str, architecture: str, platform: str) -> tuple[str, str]:
    """Return the vendor whose kernels and libraries a device runs, and the rule if not given.

    Args:
        vendor: Vendor in the file, in any case; empty if absent.
        architecture: Architecture, likewise.
        platform: ``cpu``, ``gpu`` or ``tpu``.

    Returns:
        The vendor, and the reason if the file omits it. CPUs need none.
    """
    if vendor:
        return next((own for own in makers() if own.lower() == vendor.lower()), vendor), ""
    if platform == "cpu":
        return "", ""
    why = (
        f"of {architecture}"
        if architecture in generations().architectures
        else f"usual for a {platform}"
    )
    return rules_of(architecture, platform).vendor, why


def fill(given: Values, rules: Architecture) -> tuple[Values, dict[str, str]]:
    """Fill in figures that a device file omits.

    Args:
        given: Figures by dotted key, in the file's units (``peak_tflops.bf16``, ``l2_mb`` …).
        rules: Rules of its architecture.

    Returns:
        All figures, and the rule in words for each filled key. A figure that follows from no other
        (such as the power) stays absent.
    """
    values, why = dict(given), dict[str, str]()
    for key, rule in _RULES.items():
        if key in values:
            continue
        filled = rule(values, rules)
        if filled is not None:
            values[key], why[key] = filled
    return values, why


def _as(source: str, reason: str = "", factor: float = 1.0) -> _Rule:
    """Make the rule that copies the figure of another key, if given."""

    def rule(values: Values, _: Architecture) -> tuple[float, str] | None:
        if source not in values:
            return None
        # The text is the figure's provenance, which `opcast device NAME` prints.
        text = f"{factor:.3g} × {source}" if factor != 1.0 else f"as {source}"
        return values[source] * factor, f"{text}: {reason}" if reason else text

    return rule


def _first(*rules: _Rule) -> _Rule:
    """Make the rule that takes the first result of several rules."""

    def rule(values: Values, of: Architecture) -> tuple[float, str] | None:
        return next((filled for r in rules if (filled := r(values, of)) is not None), None)

    return rule


def _ratio(name: str) -> _Rule:
    """Make the rule that multiplies the vector rate of f32 by the architecture's ratio."""

    def rule(values: Values, of: Architecture) -> tuple[float, str] | None:
        factor = float(getattr(of, name))
        base = values.get("vector_tflops.f32")
        text = f"{factor:.3g} × vector_tflops.f32, the architecture's ratio"
        return None if base is None else (base * factor, text)

    return rule


def _constant(name: str, text: str) -> _Rule:
    return lambda _, of: (float(getattr(of, name)), text)


def lanes_tflops(values: Values) -> tuple[float, str] | None:
    """Return the TFLOP/s of all cores' lanes, and the rule; ``None`` if a figure is absent."""
    if not all(key in values for key in LANES):
        return None
    lanes, cores, mhz = (values[key] for key in LANES)
    # A fused multiply-add counts as two operations; MHz to TFLOP/s.
    if not all(key in values for key in EFFICIENT):
        return 2e-6 * lanes * cores * mhz, f"2 × {' × '.join(LANES)}"
    own_lanes, own, own_mhz = (values[key] for key in EFFICIENT)
    total = 2e-6 * (lanes * (cores - own) * mhz + own_lanes * own * own_mhz)
    return total, "2 × lanes × cores × clock of both kinds of cores"


def _l2_bandwidth(values: Values, of: Architecture) -> tuple[float, str] | None:
    hbm = values.get("hbm_bandwidth_gbps")
    if "l2_mb" not in values or hbm is None:
        return None
    if "core_count" not in values or "boost_mhz" not in values:
        return _L2_OVER_HBM_BLIND * hbm, f"{_L2_OVER_HBM_BLIND:g} × hbm_bandwidth_gbps"
    rate = of.l2_bytes_per_clock
    # L2 runs at the cores' clock, so its bandwidth follows cores × clock rather than main memory
    # (H100 and H200 share one L2). MHz × bytes to GB/s.
    by_clock = rate * values["core_count"] * values["boost_mhz"] * 1e-3
    if by_clock < _L2_OVER_HBM * hbm:
        return _L2_OVER_HBM * hbm, f"{_L2_OVER_HBM:g} × hbm_bandwidth_gbps, at least"
    return by_clock, f"{rate:g} bytes per core and clock, the architecture's rate"


def _f8(values: Values, _: Architecture) -> tuple[float, str] | None:
    names = [k for k in ("peak_tflops.f16", "peak_tflops.bf16") if k in values]
    # Without fp8 units, operands are widened to the faster of the 16-bit types.
    best = max(names, key=lambda k: values[k], default=None)
    return None if best is None else (values[best], f"as {best}: no unit of its own, converted")


def _cores(values: Values, of: Architecture) -> tuple[float, str]:
    mhz = values.get("boost_mhz", _USUAL_MHZ)
    # A TPU has one or two cores per chip, whatever their rate.
    if of.vendor == "Google":
        return 1.0, "not known"
    lanes = values.get("vector_tflops.f32", 0.0) / _LANES_FLOP
    matrix = values.get("peak_tflops.bf16", 0.0) / _MATRIX_FLOP
    # TFLOP/s over MHz.
    count = max(1, round(max(lanes, matrix) * 1e6 / mhz))
    return count, "at 256 FLOP of f32 or 8192 of bf16 a clock, as multiprocessors have"


#: In this order, because later rules build on earlier ones.
_RULES: dict[str, _Rule] = {
    "vector_tflops.f32": _first(lambda values, _: lanes_tflops(values), _as("peak_tflops.f32")),
    "peak_tflops.f32": _as("vector_tflops.f32", "no matrix unit for it"),
    "vector_tflops.f16": _ratio("half"),
    "vector_tflops.bf16": _ratio("brain"),
    "vector_tflops.f64": _ratio("double"),
    "vector_tflops.s32": _ratio("integer"),
    "peak_tflops.f64": _as("vector_tflops.f64", "no matrix unit for it"),
    "peak_tflops.tf32": _as("peak_tflops.f32", "no unit of its own"),
    "peak_tflops.bf16": _as("peak_tflops.f32", "no unit of its own, converted"),
    "peak_tflops.f16": _as("peak_tflops.bf16"),
    "peak_tflops.f8e4m3fn": _f8,
    "peak_tflops.f8e5m2": _as("peak_tflops.f8e4m3fn"),
    "peak_tflops.f4e2m1fn": _as("peak_tflops.f8e4m3fn", "no unit of its own, converted"),
    "peak_tflops.s8": _as("vector_tflops.s32", "no matrix unit for it"),
    "peak_tflops.s4": _as("peak_tflops.s8", "no unit of its own, converted"),
    "l2_bandwidth_gbps": _l2_bandwidth,
    "launch_floor_us": _constant("floor_us", "shortest kernel by the device's own clock, about"),
    "launch_gap_us": _constant("gap_us", "between kernels of one stream, about"),
    "dispatch_us": _constant("dispatch_us", "empty program from call to ready, about"),
    "link_gbps": _as("pcie_gbps", "no scale-up link"),
    "inter_node_gbps": _as(
        "pcie_gbps", "a network card for each device in a like slot", _NETWORK_OVER_PCIE
    ),
    "devices_per_node": lambda _, __: (_NODE, "usual for a server"),
    "core_count": _cores,
}


def matrix_rates(listed: Values) -> Values:
    """Extend the rates of :data:`MATRIX_TYPES` to all HLO types and ``tf32`` on the matrix unit.

    Types of the same width and family run at the same rate; integers beyond 8 bits use the vector
    unit (key ``s32``), 64-bit ones at a quarter of its rate; complex types have their parts' rate.
    """
    rates = {name: listed[name] for name in MATRIX_TYPES}
    for name, bits in DTYPE_BITS.items():
        if name not in rates and bits:
            rates[name] = _like(name, bits, listed)
    return rates


def vector_rates(listed: Values) -> Values:
    """Extend the vector unit's rates likewise; narrow floats run as f16, narrow integers as s32."""
    rates = {name: listed[name] for name in VECTOR_TYPES}
    for name, bits in DTYPE_BITS.items():
        if name in rates or not bits:
            continue
        if name[0] == "f":
            rates[name] = listed["f16"]
        else:
            rates[name] = _wide(name, bits, listed)
    return rates


def _like(name: str, bits: int, listed: Values) -> float:
    if name[0] == "f":
        return listed["f8e5m2" if name.startswith("f8e5m2") else "f8e4m3fn"]
    if name == "pred" or bits == 8:
        return listed["s8"]
    # 1- and 2-bit integers run at the rate of s4, the narrowest type that vendors list.
    return listed["s4"] if bits < 8 else _wide(name, bits, listed)


def _wide(name: str, bits: int, listed: Values) -> float:
    if name[0] == "c":
        # c64 is a pair of f32, c128 of f64; products count the real ones that they consist of.
        return listed["f32" if bits == 64 else "f64"]
    # A 64-bit multiplication takes about four 32-bit ones. Engineering estimate.
    return listed["s32"] if bits <= 32 else listed["s32"] / 4


def capability_of(architecture: str) -> int | None:
    """Return compute capability × 10, such as 90 for ``sm_90``; ``None`` for other vendors."""
    digits = architecture.removeprefix(NVIDIA)
    return int(digits) if architecture.startswith(NVIDIA) and digits.isdigit() else None


def narrow_floats_of(target: str) -> frozenset[str] | None:
    """Return the 8-bit floats that a compiler target multiplies directly; ``None`` if unknown.

    Args:
        target: ``sm_90``, ``gfx942`` …
    """
    rules = generations()
    capability = capability_of(target)
    if capability is None:
        known = target in rules.narrow or target in rules.nearest
        return frozenset(rules.narrow.get(target, ())) if known else None
    since = [number for name in rules.narrow if (number := capability_of(name) or 0)]
    reached = [number for number in since if number <= capability]
    return frozenset(rules.narrow[f"{NVIDIA}{max(reached)}"]) if reached else frozenset()
