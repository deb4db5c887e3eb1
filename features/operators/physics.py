"""What the families share: cache residence, wave quantisation, the combination of limits.

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

#: Share of the data-sheet bandwidth that long streams reach. Engineering estimate, used by every
#: family; the learned ratio corrects it.
STREAM = 0.85
#: Serving frameworks, and words that tell kernels apart: one flag each.
BACKENDS, KERNEL_WORDS = FLAGS["backends"], FLAGS["kernel_words"]


#: Numbers by key.
Table = dict[str, tuple[float, ...]]


class Fitted:
    """Constants of one section of the file, as attributes, and its tables.

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
        """A constant."""
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(f"no constant {name!r} in fitted.yaml") from None

    def numbers(self, table: str) -> dict[str, float]:
        """A table of one number a key."""
        return {key: own[0] for key, own in self.tables[table].items()}

    def rows(self, table: str) -> dict[tuple[str, ...], tuple[float, ...]]:
        """A table by the words of its keys."""
        return {tuple(key.split()): own for key, own in self.tables[table].items()}


@cache
def fitted(section: str) -> Fitted:
    """A section of ``fitted.yaml``."""
    return Fitted(own_data("features/operators/fitted.yaml")[section])


@dataclass(slots=True)
class Physics:
    """Analytical estimate of ``n`` operators.

    Attributes:
        base_s: Estimate that learning corrects, seconds, shape ``(n,)``.
        compute_s: Least seconds of the arithmetic, shape ``(n,)``.
        least_s: Least seconds of the traffic, shape ``(n,)``.
        features: Dimensionless columns by name, shape ``(n,)`` each.
        specific: Names of columns that identify a device rather than describe a kernel on it; left
            out where a model has to serve devices that it never saw.
        keys: Names of columns that span the domain: distances are taken in them.
        fixed_s: What a kernel costs whatever its size, seconds, shape ``(n,)``.
        flops: Operations, shape ``(n,)``.
        moved: Bytes that have to be read or written once, shape ``(n,)``.
        kernels: Kernels of a call, of which the estimate is the mean, broadcasts to ``(n,)``.
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
    # Times over a base and sizes over a cache are shares; 1e-9 (-30) lies below any real one.
    return np.asarray(np.log2(np.maximum(values, 1e-9)))


def logs(**values: np.ndarray) -> dict[str, np.ndarray]:
    """Return base-2 logarithms as features ``log_…``, all in one call.

    For few rows that takes as long as a single one.
    """
    names = (f"log_{name}" for name in values)
    return dict(zip(names, log2(np.array(list(values.values()))), strict=True))


def stream_seconds(size: np.ndarray, resident: np.ndarray, machine: Machine) -> np.ndarray:
    """Return the seconds to move ``size`` bytes, of which a share ``resident`` hits the cache."""
    # The cache bandwidth of a device description is a sustained rate already, that of main memory
    # is the data sheet's peak: only the latter is derated.
    outside = (1 - resident) / (machine.bandwidth * STREAM)
    return np.asarray(size * (resident / machine.cache_bandwidth + outside))


def least_seconds(size: np.ndarray, resident: np.ndarray, machine: Machine) -> np.ndarray:
    """Return :func:`stream_seconds` at the data sheet's bandwidth, for rooflines."""
    outside = (1 - resident) / machine.bandwidth
    return np.asarray(size * (resident / machine.cache_bandwidth + outside))


def resident_share(
    footprint: np.ndarray, cache: np.ndarray, upper: float = 1.15, width: float = 0.3
) -> np.ndarray:
    """Return the share of a footprint that survives in the cache from one call to the next.

    Cyclic sweeps over an LRU cache hit either everything or nothing, with a short transition
    around the capacity: all of it below ``(upper - width)``, none above ``upper`` times it.
    """
    # Bounds and widths, here and where callers give others, are engineering estimates.
    return np.asarray(np.clip((upper - footprint / cache) / width, 0, 1))


def combine(*limits: np.ndarray, power: float = 3.0) -> np.ndarray:
    """Return the soft maximum ``(Σ tᵖ)^(1/p)`` of times that overlap but compete.

    A plain maximum would have a kink where two limits meet, and a sum would ignore the overlap.
    """
    return np.asarray(sum(limit**power for limit in limits) ** (1 / power))


def quantised(waves: np.ndarray, tail: float = 0.6) -> np.ndarray:
    """Round waves up as they run: a partly filled last wave costs at least ``tail`` of a full one.

    The blocks of a thin wave run faster, since each has more of the device's bandwidth to itself.
    The share is an engineering estimate.
    """
    rest = waves - np.floor(waves)
    return np.asarray(np.floor(waves) + np.where(rest > 0, np.maximum(rest, tail), 0.0))


def fill(waves: np.ndarray) -> np.ndarray:
    """Return how full the waves are on average, in (0, 1]."""
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
    """Spread the flags of a column's distinct texts over the rows, by column and flag."""
    code, names = table.rows.codes(column)
    found = np.array([of(name) for name in names], np.float64).reshape(-1, len(flags))
    spread = np.take(found.T, code, axis=1)
    return {f"{column}_{flag}": own for flag, own in zip(flags, spread, strict=True)}


@lru_cache(maxsize=1024)
def _words_of(kernel: str) -> tuple[bool, ...]:
    """Which of :data:`KERNEL_WORDS` the name of a kernel holds."""
    name = kernel.lower()
    # FlashInfer hands these on to TensorRT-LLM, and has none of its own in them.
    name = name.replace("flashinfer", "") if "trtllm" in name else name
    return tuple(word in name for word in KERNEL_WORDS)


def other_vendor(table: OpTable, factor: float) -> np.ndarray:
    """Return ``factor`` where the device does not run NVIDIA's libraries, else 1, ``(n,)``."""
    return table.of_device(lambda device: 1.0 if device.runs_cuda else factor)


def fills(**values: tuple[np.ndarray, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Return the shares of whole tiles that sizes fill, as features ``…_fill_…``.

    Args:
        values: Sizes, shape ``(n,)``, and tiles, by name.
    """
    return {
        f"{name}_fill_{tile}": size / (np.ceil(size / tile) * tile)
        for name, (size, tiles) in values.items()
        for tile in tiles
    }


def multiples(**values: tuple[np.ndarray, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Return whether sizes are multiples, as features ``…_of_…``; arguments as of :func:`fills`."""
    return {
        f"{name}_of_{step}": (size % step == 0) * 1.0
        for name, (size, steps) in values.items()
        for step in steps
    }
