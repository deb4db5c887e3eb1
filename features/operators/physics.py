"""What the families share: cache residence, wave quantisation, the combination of limits."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .columns import Machine, OpTable

#: Share of the data-sheet bandwidth that long streams reach.
STREAM = 0.85
#: Words that tell kernels apart, looked for in their names.
KERNEL_WORDS = (
    "triton",
    "cutlass",
    "deepgemm",
    "flashinfer",
    "fa2",
    "fa3",
    "fa4",
    "flash_attention",
    "flash_attn",
    "marlin",
    "torch",
    "smooth",
    "weight_only",
    "sgl_kernel",
    "default",
    "nongated",
    "xpu",
    "fidecode",
    "fiprefill",
    "block",
    "modelopt",
)
BACKENDS = ("sglang", "trtllm", "vllm")


@dataclass(slots=True)
class Physics:
    """Analytical estimate of ``n`` operators.

    Attributes:
        base_s: Estimate that learning corrects, seconds, shape ``(n,)``.
        roofline_s: Lower bound from FLOPs and bytes, seconds.
        compute_bound: Whether the matrix unit limits the roofline, bool.
        features: Dimensionless columns by name, shape ``(n,)`` each.
        specific: Names of columns that identify a device rather than describe a kernel on it; left
            out where a model has to serve devices that it never saw.
        keys: Names of columns that span the domain: distances are taken in them.
        fixed_s: What a kernel costs whatever its size, seconds, shape ``(n,)``.
        flops: Operations, shape ``(n,)``.
        moved: Bytes that have to be read or written once, shape ``(n,)``.
    """

    base_s: np.ndarray
    roofline_s: np.ndarray
    compute_bound: np.ndarray
    fixed_s: np.ndarray
    flops: np.ndarray
    moved: np.ndarray
    features: dict[str, np.ndarray] = field(default_factory=dict)
    specific: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()


def log2(values: np.ndarray) -> np.ndarray:
    """Base-2 logarithm, with zero mapped to the smallest value that matters."""
    return np.asarray(np.log2(np.maximum(values, 1e-9)))


def stream_seconds(size: np.ndarray, resident: np.ndarray, machine: Machine) -> np.ndarray:
    """Time to move ``size`` bytes of which a share ``resident`` comes from the cache."""
    outside = (1 - resident) / (machine.bandwidth * STREAM)
    return np.asarray(size * (resident / machine.cache_bandwidth + outside))


def resident_share(
    footprint: np.ndarray, cache: np.ndarray, upper: float = 1.15, width: float = 0.3
) -> np.ndarray:
    """Share of a footprint that survives in the cache.

    All of it well below the capacity, none above ``upper`` times it, as an LRU cache behaves that
    is swept through again and again.
    """
    return np.asarray(np.clip((upper - footprint / cache) / width, 0, 1))


def combine(*limits: np.ndarray, power: float = 3.0) -> np.ndarray:
    """Soft maximum of times that overlap but compete."""
    return np.asarray(sum(limit**power for limit in limits) ** (1 / power))


def quantised(waves: np.ndarray, tail: float = 0.6) -> np.ndarray:
    """Waves as they run: a last, partly filled wave costs at least ``tail`` of a full one."""
    rest = waves - np.floor(waves)
    return np.asarray(np.floor(waves) + np.where(rest > 0, np.maximum(rest, tail), 0.0))


def fill(waves: np.ndarray) -> np.ndarray:
    """How full the waves are on average, in (0, 1]."""
    return np.asarray(waves / np.ceil(np.maximum(waves, 1e-9)))


def flags(table: OpTable, dtypes: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Who runs the operator, and with which numbers: flags of backend, kernel and dtype."""
    flags_by_name = {f"backend_{b}": table.is_("backend", b) for b in BACKENDS}
    flags_by_name |= {f"kernel_{w}": table.says("kernel", w) for w in KERNEL_WORDS}
    flags_by_name |= {f"dtype_{d}": table.is_("dtype", d) for d in dtypes}
    return {name: value.astype(np.float64) for name, value in flags_by_name.items()}


def non_nvidia(table: OpTable) -> np.ndarray:
    """1 where the device is of another vendor, by vendor's name."""
    return table.of_device([float(d.vendor.upper() != "NVIDIA") for d in table.devices])
