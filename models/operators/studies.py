"""Studies of a report on published operator tables, and the noise of the labels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ...common.files import own_data
from ...common.types import typed
from ...datagen.published.clones import version_numbers
from ...features.devices.device import DeviceSpec
from ...features.operators import FAMILIES
from ...features.operators.schema import NAMES, PARAMETERS
from .devices import chip_of, twins
from .report import Part


@dataclass(frozen=True)
class Study:
    """A study of the report.

    Attributes:
        title: Title of its tables.
        methods: Timing methods of its labels.
        estimators: Default estimators to compare.
        rows: Default limits on the training rows of a family, and on the test rows of a split.
        leaves_out: Whether to leave out each chip in turn, with all devices that have it.
        samples: Samples of a left-out device to adapt with before the test.
        next_version: Whether to learn from earlier versions of libraries and test on the next.
    """

    title: str
    methods: tuple[str, ...]
    estimators: tuple[str, ...]
    rows: int
    leaves_out: bool = False
    samples: tuple[int, ...] = (0,)
    next_version: bool = False


#: Studies by name, in the order of the report.
STUDIES = {
    name: typed(Study, own, name) for name, own in own_data("models/operators/studies.yaml").items()
}


def parts_of(
    names: Iterable[str],
    rows: pd.DataFrame,
    devices: Mapping[str, DeviceSpec],
    estimators: Sequence[str] = (),
    families: Sequence[str] = (),
    max_rows: int | None = None,
    seed: int = 0,
) -> Iterator[Part]:
    """Parts of studies, in the order of computation.

    Args:
        names: Names of the studies.
        rows: Operators, with ``key`` and ``device``.
        devices: Descriptions by name.
        estimators: Estimators to use instead of the studies' own.
        families: Families to restrict the studies to; all if empty.
        max_rows: Limit on rows that replaces those of the studies.
        seed: Seed of draws and regressors.
    """
    for name in names:
        study = STUDIES[name]
        keys = [k for k in FAMILIES if k.split("/")[0] in study.methods]
        keys = [k for k in keys if not families or k in families]
        for estimator in estimators or study.estimators:
            for key in keys:
                own = sorted(set(rows.loc[rows["key"] == key, "device"]))
                for group in _groups(own, devices) if study.leaves_out else [()]:
                    count = max_rows or study.rows
                    yield Part(
                        name, estimator, key, count, group, study.samples, seed, study.next_version
                    )


def _groups(names: Sequence[str], devices: Mapping[str, DeviceSpec]) -> list[tuple[str, ...]]:
    """Devices of each chip; empty for a single chip, which leaves nothing to learn from."""
    chips = twins(names, {name: chip_of(devices[name]) for name in names})
    return chips if len(chips) > 1 else []


def replicate_noise(rows: pd.DataFrame) -> pd.DataFrame:
    """Differences between rows of one table that agree in everything but their label.

    Compares neighbouring pairs in the order of the table.

    Returns:
        ``key``, ``dtype`` and ``difference`` = ``|a - b| / ((a + b) / 2)``, one row per pair.
    """
    parts = [_pairs(own, str(key)) for key, own in rows.groupby("key", sort=True)]
    empty = pd.DataFrame({"key": [], "dtype": [], "difference": []})
    return pd.concat(parts, ignore_index=True) if parts else empty


def _pairs(rows: pd.DataFrame, key: str) -> pd.DataFrame:
    columns = [c for c in (*PARAMETERS[FAMILIES[key]], *NAMES, "device") if c in rows]
    code = rows.groupby(columns, dropna=False, sort=False).ngroup().to_numpy()
    order = np.argsort(code, kind="stable")
    ordered, latency = code[order], rows["latency_us"].to_numpy(np.float64)[order]
    # Neighbours rather than all pairs: otherwise frequently measured shapes would dominate.
    same = ordered[1:] == ordered[:-1]
    a, b = latency[:-1][same], latency[1:][same]
    dtype = rows["dtype"].to_numpy(object)[order][1:][same]
    return pd.DataFrame({"key": key, "dtype": dtype, "difference": 2 * np.abs(a - b) / (a + b)})


def earlier_versions(rows: pd.DataFrame, repeats: pd.DataFrame) -> pd.DataFrame:
    """Rows with latencies under an earlier version of their library, marked ``earlier``.

    Args:
        rows: Operators, with ``id`` and ``version``.
        repeats: ``of_id``, ``version`` and ``latency_us`` of second measurements.

    Returns:
        Second measurements whose version precedes their row's.
    """
    again = repeats[["of_id", "version", "latency_us"]].rename(columns={"of_id": "id"})
    joined = rows.merge(again, on="id", suffixes=("_next", ""))
    before = [
        version_numbers(str(a)) < version_numbers(str(b))
        for a, b in zip(joined["version"], joined["version_next"], strict=True)
    ]
    return joined.loc[before, rows.columns].assign(earlier=True)


def repeat_noise(repeats: pd.DataFrame) -> pd.DataFrame:
    """Differences between two measurements of one operator by two versions of its framework.

    Args:
        repeats: ``family``, ``dtype``, ``latency_first_us`` and ``latency_us``.

    Returns:
        As :func:`replicate_noise`.
    """
    a, b = (repeats[c].to_numpy(np.float64) for c in ("latency_first_us", "latency_us"))
    return pd.DataFrame(
        {
            "key": "graph/" + repeats["family"].astype(str),
            "dtype": repeats["dtype"].astype(str),
            "difference": 2 * np.abs(a - b) / (a + b),
        }
    )


def noise_table(differences: pd.DataFrame, by: Sequence[str] = ("key",)) -> pd.DataFrame:
    """Median and mean difference by group, and the number of pairs."""
    return (
        differences.groupby(list(by), sort=True)["difference"]
        .agg(noise_pairs="size", noise_median_ape="median", noise_mape="mean")
        .reset_index()
    )
