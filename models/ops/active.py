"""Which operators to measure next on a new device: those that say most about all the others.

Measuring a kernel lowers the variance of the error of every kernel that errs like it. The choice is
greedy: the candidate whose measurement is expected to lower the variance most, summed over what the
device is to be asked, each kernel weighted by its share of time (active learning of Cohn, Neural
Networks 9, 1996, with the covariance of :mod:`~opcast.models.ops.kriging`). It needs no labels, so
the whole order is known before anything is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ...features.device import DeviceSpec
from ...features.errors import DatasetError
from .family import FamilyModel
from .kriging import Sites, covariance, noise_variance

#: Candidates and targets that are looked at; more are drawn down to so many.
MAX_CANDIDATES = 1200
COUNTS = (0, 10, 25, 50, 100)
#: Repeats of the random choice that the active one is compared with.
RANDOM_DRAWS = 5


def choose(sites: Sites, params: np.ndarray, count: int, weight: np.ndarray) -> np.ndarray:
    """Order in which to measure kernels.

    Args:
        sites: Candidates; they stand for what will be asked, too.
        params: Of the covariance.
        count: How many to choose.
        weight: Importance of each, shape ``(n,)``, such as its share of time.

    Returns:
        Positions of the chosen ones, most telling first.
    """
    posterior = covariance(sites, sites, params)
    noise = noise_variance(params)
    chosen: list[int] = []
    open_ = np.ones(len(sites), bool)
    for _ in range(min(count, len(sites))):
        own = np.diag(posterior)
        gain = (weight[:, None] * posterior**2).sum(axis=0) / (own + noise)
        best = int(np.argmax(np.where(open_, gain, -1.0)))
        chosen.append(best)
        open_[best] = False
        column = posterior[:, best].copy()
        posterior -= np.outer(column, column) / (column[best] + noise)
    return np.array(chosen, np.int64)


@dataclass(frozen=True)
class Curve:
    """Error against number of samples for one family on one device.

    Attributes:
        family: The family.
        device: The device.
        counts: Numbers of samples.
        active: MAPE on the other rows with chosen samples, one a count.
        random: The same with random samples, mean over draws.
    """

    family: str
    device: str
    counts: tuple[int, ...]
    active: tuple[float, ...]
    random: tuple[float, ...]


def error_curve(
    model: FamilyModel,
    device: str,
    pool: pd.DataFrame,
    test: pd.DataFrame,
    devices: Mapping[str, DeviceSpec],
    counts: Sequence[int] = COUNTS,
    seed: int = 0,
) -> Curve:
    """Compare active with random choice of samples.

    Args:
        model: Fitted without the device; its correction of the device is replaced and removed.
        device: Name of the device.
        pool: Rows that may be measured, with ``latency_us``.
        test: Rows that the error is taken on.
        devices: Descriptions by name.
        counts: Numbers of samples.
        seed: Of the random draws.

    Raises:
        DatasetError: The pool or the test rows are empty.
    """
    if not len(pool) or not len(test):
        raise DatasetError(f"no rows of {model.family} to measure or to test on {device}")
    rng = np.random.default_rng(seed)
    pool, test = _some(pool, MAX_CANDIDATES, rng), _some(test, 4000, rng)
    order = order_of(model, pool, devices, max(counts))
    before = model.corrections.pop(device, None)
    active = [_error(model, device, pool.iloc[order[:n]], test, devices) for n in counts]
    random = np.zeros((RANDOM_DRAWS, len(counts)))
    for draw in range(RANDOM_DRAWS):
        shuffled = rng.permutation(len(pool))
        for place, n in enumerate(counts):
            random[draw, place] = _error(model, device, pool.iloc[shuffled[:n]], test, devices)
    if before is not None:
        model.corrections[device] = before
    return Curve(model.family, device, tuple(counts), tuple(active), tuple(random.mean(axis=0)))


def order_of(
    model: FamilyModel, pool: pd.DataFrame, devices: Mapping[str, DeviceSpec], count: int
) -> np.ndarray:
    """Positions in ``pool`` of the rows to measure, most telling first."""
    sites = model.sites(pool, model.features(pool, devices))
    return choose(sites, model.params, count, np.ones(len(pool)) / len(pool))


def _some(rows: pd.DataFrame, count: int, rng: np.random.Generator) -> pd.DataFrame:
    if len(rows) <= count:
        return rows.reset_index(drop=True)
    return rows.iloc[rng.choice(len(rows), count, replace=False)].reset_index(drop=True)


def _error(
    model: FamilyModel, device: str, samples: pd.DataFrame, test: pd.DataFrame,
    devices: Mapping[str, DeviceSpec],
) -> float:  # fmt: skip
    """MAPE on the test rows after learning from the samples; leaves no correction behind."""
    if len(samples):
        model.calibrate(device, samples, devices)
    predicted = model.predict(test, devices).latency * 1e6
    model.corrections.pop(device, None)
    return float(np.mean(np.abs(predicted / test["latency_us"].to_numpy(np.float64) - 1)))
