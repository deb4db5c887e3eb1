"""Prepares a dataset for training: kernels as a feature table, programs as schedules.

Kernels are parsed and featurized once per (kernel, device), for any number of rows, splits and
models. Rows are referred to by position in :attr:`PreparedDataset.frame` throughout.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...features.dataset import Dataset
from ...features.devices.device import DeviceSpec
from ...features.kernels.kernel import LoweredProgram
from ..core.kernel_table import KernelGraphs, KernelTable, concatenate, kernel_table
from .splits import is_family

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ProgramSample:
    """A measured program.

    Attributes:
        row: Position in the frame.
        lowered: Its schedule.
        entries: Position of each of its kernels in the feature table.
        wall_s: Measured wall time.
        device: Device it was measured on.
        name: Name of the program.
        family: Model family, or ``random``.
    """

    row: int
    lowered: LoweredProgram
    entries: np.ndarray
    wall_s: float
    device: DeviceSpec
    name: str
    family: str

    @property
    def group(self) -> str:
        """Group that is held out together: its model family, or a generated program itself."""
        return self.family if is_family(self.family) else self.name


@dataclass
class PreparedDataset:
    """A dataset with features.

    Attributes:
        frame: Rows with a usable label.
        devices: Device descriptions by name.
        table: Features of the unique (kernel, device) pairs.
        entry: Position in ``table`` of each row, shape ``(rows,)``; -1 for program rows.
        programs: The program rows.
        irs: Kernel text of each entry.
        entry_device: Device name of each entry.
        dataset_hash: Digest of the dataset.
        runs: Run records of the dataset.
    """

    frame: pd.DataFrame
    devices: dict[str, DeviceSpec]
    table: KernelTable
    entry: np.ndarray
    programs: list[ProgramSample] = field(default_factory=list)
    irs: list[str] = field(default_factory=list)
    entry_device: list[str] = field(default_factory=list)
    dataset_hash: str = ""
    runs: dict[str, dict[str, object]] = field(default_factory=dict)

    @property
    def latency_s(self) -> np.ndarray:
        """Median measured latency of every row in seconds, shape ``(rows,)``."""
        return self.frame["latency_us_p50"].to_numpy(np.float64) * 1e-6

    @property
    def kernel_frame(self) -> pd.DataFrame:
        """The kernel rows."""
        return self.frame[self.entry >= 0]

    @property
    def inside(self) -> dict[str, set[str]]:
        """Hashes of the kernels inside each program row, by ``sample_id``."""
        ids = self.frame["sample_id"]
        return {ids.iloc[p.row]: {k.hash for k in p.lowered.kernels} for p in self.programs}

    def kernel_rows(self, rows: np.ndarray | None = None) -> np.ndarray:
        """The kernel rows among the given ones (or all), by position."""
        own = np.arange(len(self.frame)) if rows is None else rows
        return np.asarray(own[self.entry[own] >= 0])

    def programs_among(self, rows: np.ndarray) -> list[ProgramSample]:
        """The program rows among the given ones."""
        wanted = set(rows.tolist())
        return [p for p in self.programs if p.row in wanted]

    @cached_property
    def _labels(self) -> dict[tuple[str, str], float]:
        """Measured seconds by program and kernel hash."""
        part = self.kernel_frame
        seconds = part["latency_us_p50"].to_numpy(np.float64) * 1e-6
        names = zip(part["program"], part["kernel_hash"], strict=True)
        return dict(zip(names, seconds, strict=True))

    def label_sum_s(self, sample: ProgramSample) -> float:
        """Sum of the measured kernel times of a program in seconds; NaN if one is missing."""
        kernels = [k for k in sample.lowered.kernels if k.takes_time]
        labels = [self._labels.get((sample.name, k.hash), np.nan) for k in kernels]
        return float(np.dot(labels, [k.multiplicity for k in kernels])) if kernels else 0.0

    def subset(self, rows: np.ndarray) -> Dataset:
        """The given rows as a dataset."""
        return Dataset(self.frame.iloc[rows].reset_index(drop=True), self.runs)


def prepare(dataset: Dataset | PreparedDataset, *, programs: bool = True) -> PreparedDataset:
    """Read and featurize a dataset.

    Args:
        dataset: Samples; returned unchanged if already prepared.
        programs: Whether to include program rows.

    Raises:
        DatasetError: No kernel row with a usable label, or a device without description.
    """
    if isinstance(dataset, PreparedDataset):
        return dataset
    frame = _usable(dataset.frame)
    if not programs:
        frame = frame[frame["level"] != "program"].reset_index(drop=True)
    is_program = (frame["level"] == "program").to_numpy()
    if is_program.all():
        raise DatasetError(
            "no kernel rows to learn from", hint="profile kernels, not only programs"
        )
    devices = dataset.devices
    unknown = sorted(set(frame["device"]) - set(devices))
    if unknown:
        raise DatasetError(f"no run record describes device {unknown[0]!r}")
    kernel_part = frame[~is_program]
    irs = dict(zip(kernel_part["kernel_hash"], kernel_part["kernel_ir"], strict=True))
    # Schedules first: programs may have kernels without kernel rows.
    lowered = _schedules(frame, np.flatnonzero(is_program), irs)
    keys = _keys(frame, is_program, lowered, irs)
    table, position = _featurise(keys, irs, devices)
    pairs = zip(frame["device"], frame["kernel_hash"], is_program, strict=True)
    entry = np.array([-1 if program else position[d, h] for d, h, program in pairs], np.int64)
    return PreparedDataset(
        frame=frame,
        devices=devices,
        table=table,
        entry=entry,
        programs=[
            _program_sample(frame, row, program, position, devices)
            for row, program in lowered.items()
        ],
        irs=[irs[h] for _, h in keys],
        entry_device=[d for d, _ in keys],
        dataset_hash=dataset.hash,
        runs=dataset.runs,
    )


def _usable(frame: pd.DataFrame) -> pd.DataFrame:
    label = frame["latency_us_p50"].to_numpy(np.float64)
    good = np.isfinite(label) & (label > 0)
    if not good.all():
        # The logarithm is learned, which a zero or missing label lacks.
        logger.warning("left out %d rows without a positive latency", int((~good).sum()))
    if not good.any():
        raise DatasetError("no row has a positive latency")
    usable: pd.DataFrame = frame[good].reset_index(drop=True)
    return usable


def _schedules(
    frame: pd.DataFrame, rows: np.ndarray, irs: dict[str, str]
) -> dict[int, LoweredProgram]:
    """Schedules of program rows; a row with unknown kernels is left out and logged."""
    from ...features.kernels.program_json import schedule_from_json

    schedules = {}
    for row in rows.tolist():
        try:
            schedules[row] = schedule_from_json(frame["kernel_ir"].iloc[row], irs)
        except DatasetError as error:
            logger.warning("left out program %s: %s", frame["program"].iloc[row], error)
    for program in schedules.values():
        irs.update({k.hash: k.ir for k in program.kernels if k.hash not in irs})
    return schedules


def _keys(
    frame: pd.DataFrame,
    is_program: np.ndarray,
    lowered: Mapping[int, LoweredProgram],
    irs: Mapping[str, str],
) -> list[tuple[str, str]]:
    """Unique (device, kernel hash), grouped by device."""
    part = frame[~is_program]
    keys = dict.fromkeys(zip(part["device"], part["kernel_hash"], strict=True))
    for row, program in lowered.items():
        device = frame["device"].iloc[row]
        keys.update(dict.fromkeys((device, k.hash) for k in program.kernels if k.hash in irs))
    # Sorted by device, since a feature table is for one device; the sort is stable.
    return sorted(keys, key=lambda key: key[0])


def _featurise(
    keys: Sequence[tuple[str, str]], irs: Mapping[str, str], devices: Mapping[str, DeviceSpec]
) -> tuple[KernelTable, dict[tuple[str, str], int]]:
    from ...features.kernels.extract import kernels_from_irs

    hashes = list(dict.fromkeys(h for _, h in keys))
    kernels = dict(zip(hashes, kernels_from_irs([irs[h] for h in hashes]), strict=True))
    tables = []
    for device in dict.fromkeys(d for d, _ in keys):
        own = [kernels[h] for d, h in keys if d == device]
        tables.append(kernel_table(own, devices[device]))
    table = concatenate(tables)
    # From the text: keeping all parsed kernels would take gigabytes.
    table.graphs = KernelGraphs.of([h for _, h in keys], [irs[h] for _, h in keys])
    return table, {key: index for index, key in enumerate(keys)}


def _program_sample(
    frame: pd.DataFrame,
    row: int,
    lowered: LoweredProgram,
    position: Mapping[tuple[str, str], int],
    devices: Mapping[str, DeviceSpec],
) -> ProgramSample:
    record = frame.iloc[row]
    device = str(record["device"])
    return ProgramSample(
        row=row,
        lowered=lowered,
        entries=np.array([position[device, k.hash] for k in lowered.kernels], np.int64),
        wall_s=float(record["latency_us_p50"]) * 1e-6,
        device=devices[device],
        name=str(record["program"]),
        family=str(record["family"]),
    )
