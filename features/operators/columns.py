"""Columns of one family of operators as arrays, with the facts of the devices that they run on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ..devices.device import DeviceSpec
from ..devices.rules import IDLE_W, rules_of
from ..ir.dtypes import TABLE_FORMATS
from .schema import NAMES


def power_rate(spec: DeviceSpec) -> float:
    """Return the FP32 operations per second that a device's power limit feeds.

    ``(power - idle) / energy of an operation``; infinite where the power limit or the energy of an
    operation on the chip's process is not known.
    """
    energy = rules_of(spec.architecture, spec.platform).f32_joules
    if spec.power_w <= IDLE_W or not energy:
        return float("inf")
    return (spec.power_w - IDLE_W) / energy


@dataclass(slots=True)
class OpTable:
    """``n`` operators of one family.

    Attributes:
        family: One of :data:`~opcast.features.operators.schema.FAMILIES`.
        columns: Parameters, float64, shape ``(n,)`` each; missing ones are nan.
        names: Text parameters, object, shape ``(n,)`` each; missing ones are empty.
        code: Index into ``devices``, shape ``(n,)``.
        devices: Descriptions.
    """

    family: str
    columns: dict[str, np.ndarray]
    names: dict[str, np.ndarray]
    code: np.ndarray
    devices: tuple[DeviceSpec, ...]
    _coded: dict[str, tuple[np.ndarray, list[str]]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        frame: pd.DataFrame,
        family: str,
        parameters: tuple[str, ...],
        devices: Mapping[str, DeviceSpec],
    ) -> OpTable:
        """Take the rows of a frame, all of one family.

        Args:
            frame: Columns of a published table; ``device`` names the device.
            family: Its family.
            parameters: Integer columns that the family has.
            devices: Descriptions by the names in ``device``.
        """
        n = len(frame)
        columns = {c: _numbers(frame, c, n) for c in parameters}
        names = {c: _texts(frame, c, n) for c in NAMES}
        # Devices as small integers: their figures are looked up by index for millions of rows.
        code, order = pd.factorize(texts_of(frame["device"]))
        return cls(family, columns, names, code, tuple(devices[str(d)] for d in order))

    def __len__(self) -> int:
        """Number of operators."""
        return len(self.code)

    def numbers(self, *wanted: str) -> list[np.ndarray]:
        """Return parameter columns, float64, shape ``(n,)`` each."""
        return [self.columns[c] for c in wanted]

    def of_device(self, values: list[float]) -> np.ndarray:
        """Spread a figure for each of ``devices`` over the rows, shape ``(n,)``."""
        figures: np.ndarray = np.asarray(values, np.float64)
        return np.asarray(figures[self.code])

    def mapped(self, column: str, table: Mapping[str, float], default: float) -> np.ndarray:
        """Look up a figure by a text column."""
        code, values = self._codes(column)
        figures: np.ndarray = np.array([table.get(str(v), default) for v in values], np.float64)
        return np.asarray(figures[code])

    def says(self, column: str, *words: str) -> np.ndarray:
        """Return whether a text column holds any of the words, bool."""
        code, values = self._codes(column)
        # Texts repeat: the search runs over the distinct ones.
        has = [any(w in str(v).lower() for w in words) for v in values]
        # Mostly none or all, which needs no look-up.
        if all(has) or not any(has):
            return np.full(len(code), bool(has) and has[0])
        return np.asarray(np.array(has, bool)[code])

    def is_(self, column: str, value: str) -> np.ndarray:
        """Return whether a text column has the value, bool."""
        code, values = self._codes(column)
        return code == values.index(value) if value in values else np.zeros(len(code), bool)

    def by_pair(
        self,
        pair: tuple[str, str],
        table: Mapping[tuple[str, str], tuple[float, ...]],
        default: tuple[float, ...],
    ) -> np.ndarray:
        """Look up figures by two text columns, shape ``(figures, n)``."""
        (first, left), (second, right) = (self._codes(column) for column in pair)
        figures = [[table.get((str(a), str(b)), default) for b in right] for a in left]
        return np.asarray(np.array(figures, np.float64)[first, second].T)

    def _codes(self, column: str) -> tuple[np.ndarray, list[str]]:
        """Give each row's place among the distinct texts of a column, and these."""
        coded = self._coded.get(column)
        if coded is None:
            code, texts = pd.factorize(self.names[column])
            coded = self._coded[column] = code, list(texts)
        return coded

    @property
    def weight_bytes(self) -> np.ndarray:
        """Bytes of a stored weight."""
        bits = {name: kind.weight_bits for name, kind in TABLE_FORMATS.items()}
        return self.mapped("dtype", bits, 16.0) / 8

    @property
    def activation_bytes(self) -> np.ndarray:
        """Bytes of an activation as the matrix unit reads it."""
        bits = {name: kind.activation_bits for name, kind in TABLE_FORMATS.items()}
        return self.mapped("dtype", bits, 16.0) / 8

    def matrix_peak(self) -> np.ndarray:
        """Return the dense FLOP/s of each row's dtype on its device, by its data sheet."""
        return self._rates(lambda device, dtype: device.matrix_peak(dtype))

    def vector_peak(self) -> np.ndarray:
        """Return the element-wise FLOP/s of each row's dtype on its device."""
        return self._rates(lambda device, dtype: device.vector_peak(dtype))

    def power_rate(self) -> np.ndarray:
        """Return the FLOP/s that the power limit feeds; infinite where that is not known."""
        # Energies are known for FP32 operations alone (`_NM16` … in devices/rules.py).
        return self._rates(lambda device, dtype: power_rate(device) if dtype == "f32" else np.inf)

    def _rates(self, rate: Callable[[DeviceSpec, str], float]) -> np.ndarray:
        code, values = self._codes("dtype")
        formats = [TABLE_FORMATS.get(str(v), TABLE_FORMATS["bf16"]) for v in values]
        # One rate for each pair of device and dtype, spread over the rows by index.
        rates = np.array([[rate(d, kind.rate) for kind in formats] for d in self.devices])
        return np.asarray(rates[self.code, code])

    def machine(self, *, multiprocessors: bool = False) -> Machine:
        """Return the facts of each row's device.

        Args:
            multiprocessors: Count cores as multiprocessors of GPUs: estimates whose tiles and ports
                are those of one mean nothing for the core of a TPU, or of a device that is
                described without a count.
        """
        d = self.devices
        cores = [_multiprocessors(x) if multiprocessors else x.core_count for x in d]
        return Machine(
            cores=self.of_device(cores),
            # A usual boost clock, for devices described without one: fixed costs are in cycles.
            clock=self.of_device([x.clock_hz or 1.5e9 for x in d]),
            # Never zero: it divides footprints. One byte means that nothing is resident.
            cache=self.of_device([max(x.cache_bytes, 1.0) for x in d]),
            cache_bandwidth=self.of_device([x.levels[0].bandwidth for x in d]),
            bandwidth=self.of_device([x.bandwidth for x in d]),
            vector=self.of_device([x.vector_peak("f32") for x in d]),
        )


#: 16-bit operations a clock of a multiprocessor of H100, and of a core that is none: data-centre
#: Blackwell's do 8192, a TPU's core from 100,000 on.
_MULTIPROCESSOR, _LARGEST = 4096.0, 20_000.0


def _multiprocessors(device: DeviceSpec) -> float:
    """Cores of a device, or as many multiprocessors of H100 as have its matrix rate."""
    rate = device.matrix_peak("bf16") / (device.clock_hz or 1.5e9)
    large = rate > _LARGEST * device.core_count
    return max(1.0, round(rate / _MULTIPROCESSOR)) if large else float(device.core_count)


@dataclass(frozen=True, slots=True)
class Machine:
    """Device facts, one a row: SMs, clock (Hz), last-level cache (bytes), rates (1/s)."""

    cores: np.ndarray
    clock: np.ndarray
    cache: np.ndarray
    cache_bandwidth: np.ndarray
    bandwidth: np.ndarray
    vector: np.ndarray


def _numbers(frame: pd.DataFrame, column: str, n: int) -> np.ndarray:
    if column not in frame:
        return np.full(n, np.nan)
    values = frame[column]
    # Plain NumPy columns convert at once; nullable and object columns take the slow path below.
    if isinstance(values.dtype, np.dtype) and values.dtype.kind in "iuf":
        return values.to_numpy().astype(np.float64)
    try:
        return values.to_numpy(np.float64, na_value=np.nan)
    except (ValueError, TypeError) as error:
        raise DatasetError(
            f"column {column!r} holds what is no number: {error}", where=f"{n} rows of operators"
        ) from None


def _texts(frame: pd.DataFrame, column: str, n: int) -> np.ndarray:
    if column not in frame:
        return np.full(n, "", dtype=object)
    return texts_of(frame[column])


def texts_of(values: pd.Series) -> np.ndarray:
    """Return the texts of a column, object, shape ``(n,)``; missing values are empty."""
    objects = values.to_numpy(object)
    missing = pd.isna(objects)
    return np.asarray(np.where(missing, "", objects) if missing.any() else objects, object)
