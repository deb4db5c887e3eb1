"""Columns of operators as arrays, and those of one family with the facts of their devices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...common.errors import DatasetError
from ..cost.formats import TABLE_FORMATS
from ..devices.device import DeviceSpec
from .machine import WIDEST, Machine, format_rate, multiprocessors_of, power_rate

if TYPE_CHECKING:
    import pandas as pd


class OpRows:
    """Rows of a table of operators, each column converted once, when it is first asked for.

    A look at a column of a frame takes 20 µs, and a query of one operator looks a hundred times.
    Texts are places among distinct texts, so that thousands of rows are compared by few.

    Args:
        columns: Values by column, shape ``(n,)`` each.
        labels: What messages call the rows, ``n`` of them.
    """

    __slots__ = ("_coded", "_labels", "_origin", "_values")

    def __init__(
        self,
        columns: Mapping[str, pd.Series | np.ndarray],
        labels: Sequence[object] | np.ndarray | pd.Index,
    ) -> None:
        self._values = dict(columns)
        self._coded: dict[str, tuple[np.ndarray, list[str]]] = {}
        self._labels = labels
        # Which label is each row's, since they are needed for messages alone.
        self._origin = np.arange(len(labels))

    @classmethod
    def of(cls, rows: pd.DataFrame | OpRows) -> OpRows:
        """Take a frame's columns; rows of this class stay as they are."""
        if isinstance(rows, OpRows):
            return rows
        labels = rows["id"].to_numpy() if "id" in rows else rows.index
        return cls({str(name): values for name, values in rows.items()}, labels)

    @classmethod
    def of_one(cls, row: Mapping[str, object]) -> OpRows:
        """Take a single operator, as :func:`~.query.parse_op` gives it."""
        return cls(
            {c: np.array([v], object if isinstance(v, str) else None) for c, v in row.items()}, (0,)
        )

    def __len__(self) -> int:
        """Number of operators."""
        return len(self._origin)

    def __contains__(self, column: object) -> bool:
        """Whether there is a column of this name."""
        return column in self._values or column in self._coded

    def numbers(self, column: str) -> np.ndarray:
        """Return a column as float64, shape ``(n,)``; missing values are nan.

        Raises:
            DatasetError: It holds what is no number.
        """
        if column not in self._values:
            return np.full(len(self), np.nan)
        values = self._values[column]
        # Plain NumPy columns convert at once; nullable and object columns take the slow path below.
        if isinstance(values.dtype, np.dtype) and values.dtype.kind in "iuf":
            return np.asarray(values).astype(np.float64)
        import pandas as pd

        try:
            return pd.Series(values).to_numpy(np.float64, na_value=np.nan)
        except (ValueError, TypeError) as error:
            raise DatasetError(
                f"column {column!r} holds what is no number: {error}",
                where=f"{len(self)} rows of operators",
            ) from None

    def codes(self, column: str) -> tuple[np.ndarray, list[str]]:
        """Give each row's place among the distinct texts of a column, shape ``(n,)``, and these.

        Missing values are empty texts, and so is a column that is not there. Rows that were taken
        from others (:meth:`take`) keep the distinct texts of those.
        """
        found = self._coded.get(column)
        if found is None and column not in self._values:
            return np.zeros(len(self), np.intp), [""]
        if found is None:
            code, values = distinct(self._values[column])
            names = [str(value) for value in values]
            if len(code) and code.min() < 0:
                code, names = np.where(code < 0, len(names), code), [*names, ""]
            found = self._coded[column] = code, names
        return found

    def texts(self, column: str) -> np.ndarray:
        """Return a column's texts, object, shape ``(n,)``; missing values are empty."""
        code, names = self.codes(column)
        return np.asarray(np.array(names, object)[code])

    def where(self, column: str, holds: Callable[[str], bool]) -> np.ndarray:
        """Return whether a condition holds for each row's text of a column, bool, ``(n,)``."""
        code, names = self.codes(column)
        return np.asarray(np.array([holds(name) for name in names], bool)[code])

    def combined(self, columns: Iterable[str]) -> tuple[np.ndarray, list[tuple[str, ...]]]:
        """Give each row's place among the distinct combinations of texts, and these."""
        code = np.zeros(len(self), np.intp)
        combinations: list[tuple[str, ...]] = [()]
        for column in columns:
            own, names = self.codes(column)
            # Texts repeat: only combinations that occur are written, each once.
            code, both = distinct(code * len(names) + own)
            combinations = [
                (*combinations[pair // len(names)], names[pair % len(names)]) for pair in both
            ]
        return code, combinations

    def take(self, rows: np.ndarray, columns: Collection[str] | None = None) -> OpRows:
        """Select rows by position, and columns by name; all columns by default."""

        def kept(column: str) -> bool:
            return columns is None or column in columns

        raw = {c: v for c, v in self._values.items() if kept(c) and c not in self._coded}
        part = OpRows({c: _at(values, rows) for c, values in raw.items()}, ())
        part._coded = {c: (code[rows], own) for c, (code, own) in self._coded.items() if kept(c)}
        part._labels, part._origin = self._labels, self._origin[rows]
        return part

    def with_texts(self, columns: Mapping[str, np.ndarray]) -> OpRows:
        """Add or replace columns of texts, object, shape ``(n,)`` each."""
        part = OpRows({**self._values, **columns}, ())
        part._coded = {c: own for c, own in self._coded.items() if c not in columns}
        part._labels, part._origin = self._labels, self._origin
        return part

    def frame(self) -> pd.DataFrame:
        """Return a frame of these rows, indexed by number."""
        import pandas as pd

        values = {c: self.texts(c) for c in self._coded} | self._values
        return pd.DataFrame({c: np.asarray(own) for c, own in values.items()})

    def label(self, row: int) -> object:
        """Return what messages call a row: its ``id``, else its index in the table."""
        return self._labels[int(self._origin[row])]


@dataclass(slots=True)
class OpTable:
    """``n`` operators of one family.

    Attributes:
        family: One of :data:`~opcast.features.operators.schema.FAMILIES`.
        columns: Parameters, float64, shape ``(n,)`` each; missing ones are nan.
        rows: What the operators' text parameters are read from.
        code: Index into ``devices``, shape ``(n,)``.
        devices: Descriptions.
    """

    family: str
    columns: dict[str, np.ndarray]
    rows: OpRows
    code: np.ndarray
    devices: tuple[DeviceSpec, ...]

    @classmethod
    def of(
        cls,
        rows: pd.DataFrame | OpRows,
        family: str,
        parameters: tuple[str, ...],
        devices: Mapping[str, DeviceSpec],
    ) -> OpTable:
        """Take the rows of a table, all of one family.

        Args:
            rows: Columns of a published table; ``device`` names the device.
            family: Its family.
            parameters: Integer columns that the family has.
            devices: Descriptions by the names in ``device``.
        """
        rows = OpRows.of(rows)
        # Devices as small integers: their figures are looked up by index for millions of rows.
        code, order = rows.codes("device")
        columns = {c: rows.numbers(c) for c in parameters}
        return cls(family, columns, rows, code, tuple(devices[name] for name in order))

    def __len__(self) -> int:
        """Number of operators."""
        return len(self.code)

    def numbers(self, *wanted: str) -> list[np.ndarray]:
        """Return parameter columns, float64, shape ``(n,)`` each."""
        return [self.columns[c] for c in wanted]

    def of_device(self, figure: Callable[[DeviceSpec], float]) -> np.ndarray:
        """Return a figure of each row's device, float64, shape ``(n,)``."""
        figures: np.ndarray = np.array([figure(device) for device in self.devices], np.float64)
        return np.asarray(figures[self.code])

    def is_on(self, holds: Callable[[DeviceSpec], bool]) -> np.ndarray:
        """Return whether a condition holds for each row's device, bool, shape ``(n,)``."""
        return np.asarray(np.array([holds(device) for device in self.devices], bool)[self.code])

    def mapped(self, column: str, table: Mapping[str, float], default: float) -> np.ndarray:
        """Look up a figure by a text column."""
        code, values = self.rows.codes(column)
        figures: np.ndarray = np.array([table.get(v, default) for v in values], np.float64)
        return np.asarray(figures[code])

    def says(self, column: str, *words: str) -> np.ndarray:
        """Return whether a text column holds any of the words, bool."""
        code, values = self.rows.codes(column)
        # Texts repeat: the search runs over the distinct ones.
        has = [any(w in v.lower() for w in words) for v in values]
        # Mostly none or all, which needs no look-up.
        if all(has) or not any(has):
            return np.full(len(code), bool(has) and has[0])
        return np.asarray(np.array(has, bool)[code])

    def is_(self, column: str, value: str) -> np.ndarray:
        """Return whether a text column has the value, bool."""
        code, values = self.rows.codes(column)
        return code == values.index(value) if value in values else np.zeros(len(code), bool)

    def by_pair(
        self,
        pair: tuple[str, str],
        table: Mapping[tuple[str, ...], tuple[float, ...]],
        default: tuple[float, ...],
    ) -> np.ndarray:
        """Look up figures by two text columns, shape ``(figures, n)``."""
        (first, left), (second, right) = (self.rows.codes(column) for column in pair)
        figures = [[table.get((a, b), default) for b in right] for a in left]
        return np.asarray(np.array(figures, np.float64)[first, second].T)

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
        code, values = self.rows.codes("dtype")
        formats = [TABLE_FORMATS.get(v, TABLE_FORMATS["bf16"]) for v in values]
        # One rate for each pair of device and dtype, spread over the rows by index.
        rates = np.array(
            [[rate(d, format_rate(kind, d)) for kind in formats] for d in self.devices]
        )
        return np.asarray(rates[self.code, code])

    def machine(self, *, multiprocessors: bool = False) -> Machine:
        """Return the facts of each row's device.

        Args:
            multiprocessors: Count cores as multiprocessors of GPUs: estimates whose tiles and ports
                are those of one mean nothing for the core of a TPU, or of a device that is
                described without a count.
        """
        cores = multiprocessors_of if multiprocessors else lambda device: float(device.core_count)
        # A usual boost clock, for devices described without one: fixed costs are in cycles.
        clock = self.of_device(lambda d: d.clock_hz or 1.5e9)
        count = self.of_device(cores)
        matrix = self.of_device(lambda d: d.matrix_peak("bf16"))
        return Machine(
            cores=count,
            clock=clock,
            # Never zero: it divides footprints. One byte means that nothing is resident.
            cache=self.of_device(lambda d: max(d.cache_bytes, 1.0)),
            cache_bandwidth=self.of_device(lambda d: d.levels[0].bandwidth),
            bandwidth=self.of_device(lambda d: d.bandwidth),
            vector=self.of_device(lambda d: d.vector_peak("f32")),
            width=np.maximum(matrix / count / clock / WIDEST, 1.0),
        )


#: So few values are told apart in Python.
_FEW = 64


def _at(values: pd.Series | np.ndarray, rows: np.ndarray) -> pd.Series | np.ndarray:
    """Select values by position."""
    if isinstance(values.dtype, np.dtype):
        return np.asarray(np.asarray(values)[rows])
    import pandas as pd

    return pd.Series(values).iloc[rows]


def distinct(values: pd.Series | np.ndarray) -> tuple[np.ndarray, list[Any]]:
    """Give each value's place among the distinct ones, in the order in which they come, and these.

    Missing values have place -1.
    """
    # Of few values pandas would make a table first, and its import takes half a second.
    if len(values) <= _FEW and isinstance(values, np.ndarray):
        listed = values.tolist()
        if values.dtype.kind in "iu" or all(type(value) is str for value in listed):
            place = {value: at for at, value in enumerate(dict.fromkeys(listed))}
            return np.array([place[value] for value in listed], np.intp), list(place)
    import pandas as pd

    code, found = pd.factorize(values)
    return code, list(found)


def texts_of(values: pd.Series) -> np.ndarray:
    """Return the texts of a column, object, shape ``(n,)``; missing values are empty."""
    import pandas as pd

    objects = values.to_numpy(object)
    missing = pd.isna(objects)
    return np.asarray(np.where(missing, "", objects) if missing.any() else objects, object)
