"""Parts shared by the families: cache residence, wave quantization, combination of limits.

Constants that were fitted to measurements or read off them are in ``fitted.yaml``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache

import numpy as np

from ...common.files import own_data
from .columns import OpTable
from .machine import Machine
from .schema import FLAGS

#: Fraction of the data-sheet bandwidth that long streams reach. Engineering estimate for every
#: family; the learned ratio corrects it.
STREAM = 0.85
#: Serving frameworks, and words that distinguish kernels: one flag each.
BACKENDS, KERNEL_WORDS = FLAGS["backends"], FLAGS["kernel_words"]


#: Numbers by key.
Table = dict[str, tuple[float, ...]]


class Fitted:
    """Constants of one section of ``fitted.yaml`` as attributes, and its tables.

    Attributes:
        values: Constants by name.
        tables: Tables by name.
    """

    def __init__(self, section: dict[str, object]) -> None:
        self.values: dict[str, float] = {}
        self.tables: dict[str, Table] = {}
        for name, own in section.items():
            if isinstance(own, dict):
                self.tables[name] = {
                    str(k): tuple(map(float, str(v).split())) for k, v in own.items()
                }
            elif name != "rests_on":
                # A number and its unit.
                self.values[name] = float(str(own).split()[0])

    def __getattr__(self, name: str) -> float:
        """Return a constant by name."""
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(f"no constant {name!r} in fitted.yaml") from None

    def numbers(self, table: str) -> dict[str, float]:
        """Return a table with one number per key."""
        return {key: own[0] for key, own in self.tables[table].items()}

    def rows(self, table: str) -> dict[tuple[str, ...], tuple[float, ...]]:
        """Return a table whose keys are split into words."""
        return {tuple(key.split()): own for key, own in self.tables[table].items()}


@cache
def fitted(section: str) -> Fitted:
    """Return a section of ``fitted.yaml``."""
    return Fitted(own_data("features/operators/fitted.yaml")[section])


@dataclass(slots=True)
class Physics:
    """Analytical estimate of ``n`` operators.

    Attributes:
        base_s: Estimate that the learned model corrects, seconds, shape ``(n,)``.
        compute_s: Lower bound on the arithmetic, seconds, shape ``(n,)``.
        least_s: Lower bound on the traffic, seconds, shape ``(n,)``.
        features: Dimensionless columns by name, shape ``(n,)`` each.
        specific: Columns that identify a device rather than describe a kernel on it; withheld from
            models for unseen devices.
        keys: Columns in which distances between operators are measured.
        fixed_s: Fixed cost of a kernel, seconds, shape ``(n,)``.
        flops: Operations, shape ``(n,)``.
        moved: Bytes that have to be read or written once, shape ``(n,)``.
        kernels: Kernels per call, over which the estimate is averaged, broadcastable to ``(n,)``.
    """

    base_s: np.ndarray
    compute_s: np.ndarray
    least_s: np.ndarray
    fixed_s: np.ndarray
    flops: np.ndarray
    moved: np.ndarray
    features: dict[str, np.ndarray] = field(default_factory=dict)
    specific: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    kernels: np.ndarray = field(default_factory=lambda: np.ones(1))


def log2(values: np.ndarray) -> np.ndarray:
    """Return the base-2 logarithm, clamped below at 1e-9 so that zero stays finite."""
    # Arguments are ratios of times and sizes; 1e-9 (-30) is below any real one.
    return np.asarray(np.log2(np.maximum(values, 1e-9)))


def logs(**values: np.ndarray) -> dict[str, np.ndarray]:
    """Return base-2 logarithms as features ``log_…``.

    One call for all columns, which for few rows takes as long as a single column.
    """
    names = (f"log_{name}" for name in values)
    return dict(zip(names, log2(np.array(list(values.values()))), strict=True))


def stream_seconds(
    size: np.ndarray, resident: np.ndarray, machine: Machine, share: float = STREAM
) -> np.ndarray:
    """Return the seconds to move ``size`` bytes, a fraction ``resident`` of which is cached."""
    # Cache bandwidths of device descriptions are sustained rates, main memory's is the data sheet's
    # peak: only the latter is derated, to a fraction `share`.
    outside = (1 - resident) / (machine.bandwidth * share)
    return np.asarray(size * (resident / machine.cache_bandwidth + outside))


def least_seconds(size: np.ndarray, resident: np.ndarray, machine: Machine) -> np.ndarray:
    """Return :func:`stream_seconds` at the data sheet's bandwidth, for rooflines."""
    return stream_seconds(size, resident, machine, share=1.0)


def resident_share(
    footprint: np.ndarray, cache: np.ndarray, upper: float = 1.15, width: float = 0.3
) -> np.ndarray:
    """Return the fraction of a footprint that stays cached from one call to the next.

    Cyclic sweeps over an LRU cache hit either everything or nothing, with a short transition around
    the capacity: everything up to ``upper - width`` times the capacity, nothing above ``upper``.
    """
    # These bounds, and those that callers pass, are engineering estimates.
    return np.asarray(np.clip((upper - footprint / cache) / width, 0, 1))


def combine(*limits: np.ndarray, power: float = 3.0) -> np.ndarray:
    """Return the soft maximum ``(Σ tᵖ)^(1/p)`` of times that overlap but compete.

    A plain maximum would have a kink where two limits meet, and a sum would ignore the overlap.
    """
    return np.asarray(sum(limit**power for limit in limits) ** (1 / power))


def quantised(waves: np.ndarray, tail: float = 0.6) -> np.ndarray:
    """Return the effective number of waves (wave quantization).

    A partly filled last wave costs at least ``tail`` of a full one (engineering estimate): its
    blocks run faster because each has more of the device's bandwidth.
    """
    rest = waves - np.floor(waves)
    return np.asarray(np.floor(waves) + np.where(rest > 0, np.maximum(rest, tail), 0.0))


def fill(waves: np.ndarray) -> np.ndarray:
    """Return the mean occupancy of the waves, in (0, 1]."""
    return np.asarray(waves / np.ceil(np.maximum(waves, 1e-9)))


def flags(table: OpTable, dtypes: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Return the flags of backend, kernel and dtype by name, float64, shape ``(n,)`` each."""
    return {
        **_spread(table, "backend", BACKENDS, lambda name: [name == b for b in BACKENDS]),
        **_spread(table, "kernel", KERNEL_WORDS, _words_of),
        **_spread(table, "dtype", dtypes, lambda name: [name == d for d in dtypes]),
    }


def _spread(
    table: OpTable, column: str, flags: tuple[str, ...], of: Callable[[str], Sequence[bool]]
) -> dict[str, np.ndarray]:
    """Compute a column's flags for its distinct texts and gather them per row."""
    code, names = table.rows.codes(column)
    found = np.array([of(name) for name in names], np.float64).reshape(-1, len(flags))
    spread = np.take(found.T, code, axis=1)
    return {f"{column}_{flag}": own for flag, own in zip(flags, spread, strict=True)}


@lru_cache(maxsize=1024)
def _words_of(kernel: str) -> tuple[bool, ...]:
    """Return which of :data:`KERNEL_WORDS` the name of a kernel contains."""
    name = kernel.lower()
    # FlashInfer only forwards these calls to TensorRT-LLM, so its name is ignored.
    name = name.replace("flashinfer", "") if "trtllm" in name else name
    return tuple(word in name for word in KERNEL_WORDS)


def other_vendor(table: OpTable, factor: float) -> np.ndarray:
    """Return ``factor`` where the device does not run NVIDIA's libraries, else 1, ``(n,)``."""
    return table.of_device(lambda device: 1.0 if device.runs_cuda else factor)


def fills(**values: tuple[np.ndarray, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Return the fraction of whole tiles that sizes fill, as features ``…_fill_…``.

    Args:
        values: Sizes, shape ``(n,)``, and tile sizes, by name.
    """
    return {
        f"{name}_fill_{tile}": size / (np.ceil(size / tile) * tile)
        for name, (size, tiles) in values.items()
        for tile in tiles
    }


def multiples(**values: tuple[np.ndarray, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Return whether sizes are multiples, as features ``…_of_…``; arguments of :func:`fills`."""
    return {
        f"{name}_of_{step}": (size % step == 0) * 1.0
        for name, (size, steps) in values.items()
        for step in steps
    }
