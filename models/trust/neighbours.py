"""Compact table of training kernels, for showing which ones a prediction resembles.

A row is a kernel on a device: its key features (those of the domain), standardized and rounded to
16 bits, its measured latency, its held-out prediction, and its origin. At most :data:`MAX_ROWS` are
kept, with all of rare kinds, so that the file stays below 1 MB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ..core.kernel_table import CELLS, KernelTable, by_cell
from ..core.store import pack, unpack
from ..training_data.splits import draw
from .domain import key_columns

if TYPE_CHECKING:
    from ..training_data.crossfit import CrossFit
    from ..training_data.prepared import PreparedDataset

#: Most kernels to keep: with about eight features of 16 bits each, the file stays below 1 MB.
MAX_ROWS = 16_000
#: Characters to keep of a program's name and of a kernel's hash.
_LABEL, _HASH = 32, 16


@dataclass(frozen=True)
class Neighbour:
    """A measured kernel near another one.

    Attributes:
        label: Family and program of origin.
        kind: Platform and kind, such as ``cpu/gemm``.
        device: Device that it was measured on.
        measured_us: Median measured latency.
        predicted_us: Prediction by a model fitted without it.
        distance: Root mean square difference of the key features, in standard deviations.
        kernel_hash: Its hash, cut to 16 characters.
    """

    label: str
    kind: str
    device: str
    measured_us: float
    predicted_us: float
    distance: float
    kernel_hash: str


@dataclass(frozen=True)
class NeighbourTable:
    """Training kernels by their key features.

    Attributes:
        keys: Names of the key features, shape ``(k,)``.
        mean: Means of the key features, shape ``(k,)``.
        scale: Their standard deviations, shape ``(k,)``.
        values: Standardized key features, float16, shape ``(n, k)``.
        cell: Index into ``CELLS``, shape ``(n,)``.
        measured_s: Measured latencies, float32, shape ``(n,)``.
        predicted_s: Held-out predictions, float32, shape ``(n,)``.
        hashes: Kernel hashes, bytes, shape ``(n,)``.
        label: Index into ``labels``, shape ``(n,)``.
        labels: Programs.
        device: Index into ``devices``, shape ``(n,)``.
        devices: Device names.
        medians: Median of every feature by cell, float32, shape ``(cells, features)``; those of all
            rows for cells without rows.
    """

    keys: np.ndarray
    mean: np.ndarray
    scale: np.ndarray
    values: np.ndarray
    cell: np.ndarray
    measured_s: np.ndarray
    predicted_s: np.ndarray
    hashes: np.ndarray
    label: np.ndarray
    labels: np.ndarray
    device: np.ndarray
    devices: np.ndarray
    medians: np.ndarray

    @classmethod
    def fit(cls, data: PreparedDataset, crossed: CrossFit) -> NeighbourTable:
        """Make a table from the training kernels of a cross-fitting.

        A kernel measured more than once on a device is one row with its median latency.

        Args:
            data: The prepared dataset.
            crossed: Its training rows and their held-out predictions.
        """
        rows = _unique_rows(data, crossed)
        table = data.table.take(rows["entry"].to_numpy())
        columns = key_columns(table)
        values = table.X[:, columns].astype(np.float64)
        mean, spread = values.mean(axis=0), values.std(axis=0)
        scale = np.where(spread > 0, spread, 1.0)
        kept = _sample(rows["hash"], table.cell)
        part = rows.iloc[kept]
        label, labels = pd.factorize(part["program"].str.slice(0, _LABEL))
        device, devices = pd.factorize(part["device"])
        return cls(
            keys=np.array([table.names[c] for c in columns]),
            mean=mean.astype(np.float32),
            scale=scale.astype(np.float32),
            values=_standardise(table.X[kept][:, columns], mean, scale),
            cell=table.cell[kept].astype(np.int16),
            measured_s=part["measured_s"].to_numpy(np.float32),
            predicted_s=part["predicted_s"].to_numpy(np.float32),
            hashes=part["hash"].str.slice(0, _HASH).to_numpy().astype(f"S{_HASH}"),
            label=label.astype(np.int32),
            labels=np.array(labels, dtype=str),
            device=device.astype(np.int16),
            devices=np.array(devices, dtype=str),
            medians=_medians(table),
        )

    def __len__(self) -> int:
        """Number of kernels."""
        return len(self.values)

    def nearest(self, table: KernelTable, hashes: list[str], k: int = 3) -> list[list[Neighbour]]:
        """The nearest training kernels of every kernel of a table, nearest first.

        They have the same platform and kind if there are any, else any. Of equally near kernels,
        the kernel itself comes first.

        Args:
            table: ``n`` kernels.
            hashes: Their hashes.
            k: Number of neighbours.
        """
        columns = [table.names.index(name) for name in self.keys.tolist()]
        asked = _standardise(table.X[:, columns], self.mean, self.scale)
        return [
            self._nearest(value, int(cell), digest, k)
            for value, cell, digest in zip(asked, table.cell, hashes, strict=True)
        ]

    def _nearest(self, value: np.ndarray, cell: int, digest: str, k: int) -> list[Neighbour]:
        own = np.flatnonzero(self.cell == cell)
        rows = own if len(own) else np.arange(len(self))
        difference = self.values[rows].astype(np.float32) - value.astype(np.float32)
        distance = np.sqrt((difference**2).mean(axis=1))
        # Rounding to 16 bits makes distinct kernels equally near: put the kernel itself first.
        other = self.hashes[rows] != digest[:_HASH].encode()
        order = np.lexsort((other, distance))[:k]
        return [self._neighbour(int(rows[i]), float(distance[i])) for i in order]

    def _neighbour(self, row: int, distance: float) -> Neighbour:
        return Neighbour(
            label=str(self.labels[self.label[row]]),
            kind=CELLS[self.cell[row]],
            device=str(self.devices[self.device[row]]),
            measured_us=float(self.measured_s[row]) * 1e6,
            predicted_us=float(self.predicted_s[row]) * 1e6,
            distance=distance,
            kernel_hash=self.hashes[row].decode(),
        )

    def to_bytes(self) -> bytes:
        """Convert to a compressed ``.npz``."""
        return pack({**self.__dict__, "cells": np.array(CELLS)})

    @classmethod
    def from_bytes(cls, data: bytes) -> NeighbourTable:
        """Read :meth:`to_bytes`'s bytes; cells are matched by name.

        Raises:
            KeyError: An array is missing.
            ValueError: The bytes are not an archive of arrays.
        """
        arrays = unpack(data)
        names = [str(name) for name in arrays.pop("cells")]
        # Kinds that this version lacks count as "other".
        place = np.array([CELLS.index(n) if n in CELLS else len(CELLS) - 1 for n in names])
        arrays["cell"] = place[arrays["cell"]].astype(np.int16)
        arrays["medians"] = by_cell(names, arrays["medians"], arrays["medians"][-1])
        return cls(**{name: arrays[name] for name in cls.__dataclass_fields__})


def _unique_rows(data: PreparedDataset, crossed: CrossFit) -> pd.DataFrame:
    part = data.frame.iloc[crossed.rows]
    rows = pd.DataFrame(
        {
            "entry": data.entry[crossed.rows],
            "hash": part["kernel_hash"].astype(str).to_numpy(),
            "program": [
                _label(*pair) for pair in zip(part["family"], part["program"], strict=True)
            ],
            "device": part["device"].astype(str).to_numpy(),
            "measured_s": data.latency_s[crossed.rows],
            "predicted_s": crossed.predicted_s,
        }
    )
    how = {"hash": "first", "program": "first", "device": "first"}
    seconds = {"measured_s": "median", "predicted_s": "median"}
    return rows.groupby("entry").agg({**how, **seconds}).reset_index()


def _label(family: str, program: str) -> str:
    """Label of a program: family and name, or the name alone if the program was generated."""
    return (program if family == "random" else f"{family} {program}").strip()


def _standardise(values: np.ndarray, mean: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Standardized values as float16, with mean and scale rounded to their stored precision."""
    shift, unit = mean.astype(np.float32), scale.astype(np.float32)
    # Clipped below the largest float16 (65,504), so that outliers do not become infinite.
    return np.asarray(np.clip((values - shift) / unit, -6e4, 6e4).astype(np.float16))


def _sample(hashes: pd.Series, cell: np.ndarray) -> np.ndarray:
    """Rows to keep, ascending: all of small cells, with the remaining rows shared by large ones."""
    drawn = np.array([draw(h, 0) for h in hashes])
    kept: list[np.ndarray] = []
    cells, counts = np.unique(cell, return_counts=True)
    # Small cells first: the unused part of their share goes to the larger ones.
    room = MAX_ROWS
    for done, index in enumerate(np.argsort(counts)):
        share = room // (len(cells) - done)
        own = np.flatnonzero(cell == cells[index])
        kept.append(own[np.argsort(drawn[own], kind="stable")[:share]])
        room -= len(kept[-1])
    return np.sort(np.concatenate(kept))


def _medians(table: KernelTable) -> np.ndarray:
    medians = np.tile(np.median(table.X, axis=0), (len(CELLS), 1)).astype(np.float32)
    for cell in np.unique(table.cell):
        medians[cell] = np.median(table.X[table.cell == cell], axis=0)
    return medians
