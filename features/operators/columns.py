"""Operator tables as arrays: columns, and the rows of one family with their device figures."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
    """Rows of an operator table; each column is converted once, on first use.

    Reading a frame's column takes 20 µs, and a query for one operator reads a hundred columns.
    Texts are dictionary-encoded, so that comparisons run over the few distinct texts.

    Args:
        columns: Values by column, shape ``(n,)`` each.
        labels: ``n`` names of the rows for messages.
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
        # Index of each row's label; labels are only needed for messages.
        self._origin = np.arange(len(labels))

    @classmethod
    def of(cls, rows: pd.DataFrame | OpRows) -> OpRows:
        """Wrap a frame; an ``OpRows`` is returned unchanged."""
        if isinstance(rows, OpRows):
            return rows
        labels = rows["id"].to_numpy() if "id" in rows else rows.index
        return cls({str(name): values for name, values in rows.items()}, labels)

    @classmethod
    def of_one(cls, row: Mapping[str, object]) -> OpRows:
        """Wrap a single operator, as returned by :func:`~.query.parse_op`."""
        return cls(
            {c: np.array([v], object if isinstance(v, str) else None) for c, v in row.items()}, (0,)
        )

    def __len__(self) -> int:
        """Number of operators."""
        return len(self._origin)

    def __contains__(self, column: object) -> bool:
        """Whether a column of this name exists."""
        return column in self._values or column in self._coded

    def numbers(self, column: str) -> np.ndarray:
        """Return a column as float64, shape ``(n,)``; missing values are NaN.

        Raises:
            DatasetError: The column contains something that is not a number.
        """
        if column not in self._values:
            return np.full(len(self), np.nan)
        values = self._values[column]
        # Plain NumPy columns convert directly; nullable and object columns take the slow path.
        if isinstance(values.dtype, np.dtype) and values.dtype.kind in "iuf":
            return np.asarray(values).astype(np.float64)
        import pandas as pd

        try:
            return pd.Series(values).to_numpy(np.float64, na_value=np.nan)
        except (ValueError, TypeError) as error:
            raise DatasetError(
                f"column {column!r} contains something that is not a number: {error}",
                where=f"{len(self)} rows of operators",
            ) from None

    def codes(self, column: str) -> tuple[np.ndarray, list[str]]:
        """Return each row's index into a column's distinct texts, shape ``(n,)``, and the texts.

        Missing values, and missing columns, are empty texts. Rows selected from others
        (:meth:`take`) keep all of the originals' distinct texts.
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
        """Return where a condition holds for the text in a column, bool, shape ``(n,)``."""
        code, names = self.codes(column)
        return np.asarray(np.array([holds(name) for name in names], bool)[code])

    def combined(self, columns: Iterable[str]) -> tuple[np.ndarray, list[tuple[str, ...]]]:
        """Return each row's index into the distinct combinations of texts, and these."""
        code = np.zeros(len(self), np.intp)
        combinations: list[tuple[str, ...]] = [()]
        for column in columns:
            own, names = self.codes(column)
            # Texts repeat: only combinations that occur are built, each once.
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
        """Return the rows as a frame with a default index."""
        import pandas as pd

        values = {c: self.texts(c) for c in self._coded} | self._values
        return pd.DataFrame({c: np.asarray(own) for c, own in values.items()})

    def label(self, row: int) -> object:
        """Return the name of a row for messages: its ``id``, else its index in the table."""
        return self._labels[int(self._origin[row])]


@dataclass(slots=True)
class OpTable:
    """``n`` operators of one family.

    Attributes:
        family: One of :data:`~opcast.features.operators.schema.FAMILIES`.
        columns: Parameters, float64, shape ``(n,)`` each; missing ones are nan.
        rows: Source of the operators' text parameters.
        code: Index of each row's device in ``devices``, shape ``(n,)``.
        devices: Device descriptions.
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
        """Build a table from rows that are all of one family.

        Args:
            rows: Columns of a published table; column ``device`` names the device.
            family: The family of the rows.
            parameters: Integer columns of the family.
            devices: Device descriptions by the names in ``device``.
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
        """Look up a number by the text in a column, shape ``(n,)``."""
        code, values = self.rows.codes(column)
        figures: np.ndarray = np.array([table.get(v, default) for v in values], np.float64)
        return np.asarray(figures[code])

    def mentions(self, column: str, *words: str) -> np.ndarray:
        """Return where the text in a column contains any of the words, bool, shape ``(n,)``."""
        code, values = self.rows.codes(column)
        # Texts repeat, so only the distinct ones are searched.
        has = [any(w in v.lower() for w in words) for v in values]
        # All or none match in most cases, which needs no look-up.
        if all(has) or not any(has):
            return np.full(len(code), bool(has) and has[0])
        return np.asarray(np.array(has, bool)[code])

    def is_(self, column: str, value: str) -> np.ndarray:
        """Return where a text column equals the value, bool, shape ``(n,)``."""
        code, values = self.rows.codes(column)
        return code == values.index(value) if value in values else np.zeros(len(code), bool)

    def by_pair(
        self,
        pair: tuple[str, str],
        table: Mapping[tuple[str, ...], tuple[float, ...]],
        default: tuple[float, ...],
    ) -> np.ndarray:
        """Look up numbers by the texts in two columns, shape ``(n_numbers, n)``."""
        (first, left), (second, right) = (self.rows.codes(column) for column in pair)
        figures = [[table.get((a, b), default) for b in right] for a in left]
        return np.asarray(np.array(figures, np.float64)[first, second].T)

    @property
    def weight_bytes(self) -> np.ndarray:
        """Bytes of a stored weight, shape ``(n,)``."""
        bits = {name: kind.weight_bits for name, kind in TABLE_FORMATS.items()}
        return self.mapped("dtype", bits, 16.0) / 8

    @property
    def activation_bytes(self) -> np.ndarray:
        """Bytes of an activation as the matrix unit reads it, shape ``(n,)``."""
        bits = {name: kind.activation_bits for name, kind in TABLE_FORMATS.items()}
        return self.mapped("dtype", bits, 16.0) / 8

    def matrix_peak(self) -> np.ndarray:
        """Return the data sheet's dense FLOP/s for each row's dtype and device."""
        return self._rates(lambda device, dtype: device.matrix_peak(dtype))

    def vector_peak(self) -> np.ndarray:
        """Return the element-wise FLOP/s for each row's dtype and device."""
        return self._rates(lambda device, dtype: device.vector_peak(dtype))

    def power_rate(self) -> np.ndarray:
        """Return the FLOP/s sustainable within the power limit; infinite where it is unknown."""
        # The energy per operation is known for FP32 only (`f32_joules` of the architectures).
        return self._rates(lambda device, dtype: power_rate(device) if dtype == "f32" else np.inf)

    def _rates(self, rate: Callable[[DeviceSpec, str], float]) -> np.ndarray:
        code, values = self.rows.codes("dtype")
        formats = [TABLE_FORMATS.get(v, TABLE_FORMATS["bf16"]) for v in values]
        # One rate for each pair of device and dtype, gathered per row by index.
        rates = np.array(
            [[rate(d, format_rate(kind, d)) for kind in formats] for d in self.devices]
        )
        return np.asarray(rates[self.code, code])

    def machine(self, *, multiprocessors: bool = False) -> Machine:
        """Return device figures per row.

        Args:
            multiprocessors: Count cores in GPU multiprocessors, for estimates with a
                multiprocessor's tiles and ports, which do not apply to a TPU core or to a device
                described without a core count.
        """
        cores = multiprocessors_of if multiprocessors else lambda device: float(device.core_count)
        # A typical boost clock for devices described without one: fixed costs are in cycles.
        clock = self.of_device(lambda d: d.clock_hz or 1.5e9)
        count = self.of_device(cores)
        matrix = self.of_device(lambda d: d.matrix_peak("bf16"))
        return Machine(
            cores=count,
            clock=clock,
            # Never zero, since footprints are divided by it. One byte: nothing is resident.
            cache=self.of_device(lambda d: max(d.cache_bytes, 1.0)),
            cache_bandwidth=self.of_device(lambda d: d.levels[0].bandwidth),
            bandwidth=self.of_device(lambda d: d.bandwidth),
            vector=self.of_device(lambda d: d.vector_peak("f32")),
            width=np.maximum(matrix / count / clock / WIDEST, 1.0),
        )


#: Largest number of values that :func:`distinct` processes without pandas.
_FEW = 64


def _at(values: pd.Series | np.ndarray, rows: np.ndarray) -> pd.Series | np.ndarray:
    """Select values by position."""
    if isinstance(values.dtype, np.dtype):
        return np.asarray(np.asarray(values)[rows])
    import pandas as pd

    return pd.Series(values).iloc[rows]


def distinct(values: pd.Series | np.ndarray) -> tuple[np.ndarray, list[Any]]:
    """Return each value's index into the distinct ones, in order of first occurrence, and these.

    Missing values have index -1.
    """
    # For few values, pandas' overhead dominates, and importing it takes half a second.
    if len(values) <= _FEW and isinstance(values, np.ndarray):
        listed = values.tolist()
        if values.dtype.kind in "iu" or all(type(value) is str for value in listed):
            place = {value: at for at, value in enumerate(dict.fromkeys(listed))}
            return np.array([place[value] for value in listed], np.intp), list(place)
    import pandas as pd

    code, found = pd.factorize(values)
    return code, list(found)


def by_name(names: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the distinct names in alphabetical order, each with its positions."""
    code, found = distinct(names)
    for place in sorted(range(len(found)), key=lambda at: str(found[at])):
        yield str(found[place]), np.flatnonzero(code == place)


def texts_of(values: pd.Series) -> np.ndarray:
    """Return the texts of a column, object, shape ``(n,)``; missing values are empty."""
    import pandas as pd

    objects = values.to_numpy(object)
    missing = pd.isna(objects)
    return np.asarray(np.where(missing, "", objects) if missing.any() else objects, object)
