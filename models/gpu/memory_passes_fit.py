"""Fits the constants of passes over memory to published rows, evaluated on held-out devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...features.dataset import Dataset
from ...features.devices.device import DeviceSpec
from ...features.operators.pointwise import IN_REGISTERS, WORK
from ..cost_model import CostModel
from ..operators.devices import chip_of, twins
from ..operators.rows import rows_of_dataset
from ..program.program_model import ProgramModel
from ..trust.calibrator import Ends, ends, widest
from .estimator import GpuEstimator
from .memory_passes import Constants, MemoryParams, Traffic, pass_seconds

#: Published families of streaming kernels.
FAMILIES = (
    "eager/elementwise",
    "eager/softmax",
    "eager/ln",
    "kernel/elementwise",
    "graph/quantize",
)
#: Ops of ``kernel/elementwise`` that are plain streams. The others (embedding, rope, silu_and_mul)
#: are kernels of one framework version at a fifth to a half of the bandwidth (measured in the
#: published-latency pack), which reflects their code rather than the memory.
KERNEL_OPS = ("add", "gelu")
#: Frameworks whose quantization streams. SGLang's runs at a tenth of the bandwidth
#: (published-tensor-core pack).
QUANTISERS = ("trtllm", "vllm")
#: Shortest kernel-timed rows (Vidur's): their resolution of 1 µs is at most an eighth of the label.
LEAST_KERNEL_US = 8.0
#: Most rows of a device and family in the fit, so that large tables do not dominate. Enough for
#: five constants; more only costs time.
PER_GROUP = 700
#: Largest share of the fitted launch in rows that count as memory-bound. Only those are evaluated.
LAUNCH_SHARE = 0.5
#: Weight of the prior that shrinks the log factors of devices and host launches towards 0, relative
#: to all residuals of a device. Engineering estimate: it keeps the factors from absorbing effects
#: of the shared constants.
PRIOR = 0.15
#: Start of the fit: usual fractions of a data sheet's bandwidths, and a launch of 1.5 to 2 µs.
_START = {"hbm": 0.85, "cache": 0.7, "edge": 0.7, "launch_cycles": 2600.0, "vector": 1.0}
#: Step of finite differences, in logarithms: the square root of double precision.
_STEP = 1.5e-8
#: Largest factor between a constant and its start; wider bounds let undetermined constants drift.
_REACH = 4.0
#: Start of the fit for the host launch of one eagerly timed call, seconds; refitted per host. The
#: eager tables include 26 to 47 µs of it by op (docs/operators.md).
_EAGER_S = {"eager/elementwise": 26e-6, "eager/softmax": 33e-6, "eager/ln": 47e-6}
#: Least correlation of kernel errors in a program. 0.21 was measured between passes of a device,
#: but kernels of one route share its errors (docs/gpu.md). Engineering estimate.
LEAST_CORRELATION = 0.5


@dataclass(frozen=True)
class MemoryFit:
    """Fitted constants, with their errors on devices held out in turn.

    Attributes:
        params: Constants, with the factors of the fitted devices.
        left_out: Interval bounds of the log-ratio for devices without samples.
        known: Interval bounds for devices with samples.
        errors: By device, ``median`` and mean (``mape``) absolute relative error when held out, and
            the number of ``rows``: only rows whose launch is less than half count.
        correlation: Intraclass correlation of the log errors by device.
    """

    params: MemoryParams
    left_out: Ends
    known: Ends
    errors: dict[str, dict[str, float]]
    correlation: float


def suitable(rows: pd.DataFrame) -> np.ndarray:
    """Mask of published rows that the constants can be fitted to, shape ``(n,)``."""
    key, us = rows["key"], rows["latency_us"]
    backend = rows["backend"] if "backend" in rows else pd.Series("", index=rows.index)
    plain = key.isin(["eager/elementwise", "eager/softmax", "eager/ln"])
    kernel = (key == "kernel/elementwise") & rows["op"].isin(KERNEL_OPS) & (us >= LEAST_KERNEL_US)
    graph = (key == "graph/quantize") & backend.isin(QUANTISERS)
    return np.asarray(plain | kernel | graph, bool)


def traffic_of_rows(rows: pd.DataFrame) -> Traffic:
    """Traffic of ``n`` published rows.

    A softmax over rows of more than 1024 elements reads them twice more (maximum, sum, result), a
    layer norm once more; shorter rows of a softmax stay in registers.
    """
    size = rows["rows"].to_numpy(np.float64) * rows["cols"].to_numpy(np.float64)
    width = rows["dtype"].map({"fp32": 4.0}).fillna(2.0).to_numpy(np.float64)
    # Tables of kernel times do not give the number of inputs: one is the common case.
    inputs = rows["n_in"].fillna(1).to_numpy(np.float64)
    quantised = (rows["key"] == "graph/quantize").to_numpy()
    softmax, norm = ((rows["op"] == name).to_numpy() for name in ("softmax", "ln"))
    wide = (rows["cols"] > IN_REGISTERS).to_numpy()
    again = size * width * (2.0 * (softmax & wide) + norm)
    # Four vector instructions per element unless the op is listed, as in the operators' physics
    # (features/operators/pointwise.py); the fitted ``vector`` scales all counts alike.
    work = rows["op"].map(WORK).fillna(4.0).to_numpy(np.float64)
    # Quantization reads two bytes (bf16) and writes one (fp8) per element.
    moved = np.where(quantised, 3.0, (inputs + 1) * width) * size
    zero = np.zeros(len(rows))
    return Traffic(moved, again, work * size, zero, np.ones(len(rows)), zero)


def fit_memory(rows: pd.DataFrame, devices: Mapping[str, DeviceSpec], seed: int = 0) -> MemoryFit:
    """Fit the constants, then hold out one chip after the other for errors and intervals.

    Args:
        rows: Published rows, as of :func:`~opcast.models.operators.rows_of_dataset`.
        devices: Descriptions by name.
        seed: Seed of the draw of rows.

    Raises:
        DatasetError: No row is a pass over memory.
    """
    rows = rows[suitable(rows)].reset_index(drop=True)
    if not len(rows):
        raise DatasetError("no published row is a pass over memory", hint="import both packs")
    drawn = _draw(rows, seed)
    params, launches = _fit(drawn, devices)
    inside, errors, scores = _scores(drawn, devices, params, launches), {}, {}
    names = sorted(set(drawn["device"]))
    # Devices with the same chip are held out together: a twin would make the chip known.
    for group in twins(names, {name: chip_of(devices[name]) for name in names}):
        own = drawn["device"].isin(group).to_numpy()
        other, _ = _fit(drawn[~own], devices)
        # Host launches come from the fit to all rows: they belong to the benchmark's machine rather
        # than the device under test.
        own_scores = _scores(drawn[own], devices, other, launches)
        scores["+".join(group)] = own_scores
        # A score is log(measured / predicted): this is the error relative to the measured time.
        ape = np.abs(np.exp(-own_scores) - 1)
        errors["+".join(group)] = {
            "median": float(np.median(ape)),
            "mape": float(ape.mean()),
            "rows": float(len(ape)),
        }
    # The outermost bounds, because a new device is another draw of a device, and few were drawn.
    left_out = widest(scores.values()) or Constants.unseen
    return MemoryFit(params, left_out, ends(inside), errors, shared_variance(list(scores.values())))


def shared_variance(scores: Sequence[np.ndarray]) -> float:
    """Share of the variance of log errors between devices, 0 to 1.

    This is the intraclass correlation of two passes on one device; 1 if there is no variance.

    Args:
        scores: Log errors of each held-out device.
    """
    within = float(np.mean([s.var() for s in scores]))
    between = float(np.mean([s.mean() ** 2 for s in scores]))
    return between / (between + within) if between + within > 0 else 1.0


def _draw(rows: pd.DataFrame, seed: int) -> pd.DataFrame:
    # Sorted groups and a fixed seed make the draw independent of the order of the table.
    parts = [
        part.sample(min(len(part), PER_GROUP), random_state=seed)
        for _, part in rows.groupby(["device", "key"], sort=True)
    ]
    return pd.concat(parts, ignore_index=True)


def _launch_keys(rows: pd.DataFrame) -> pd.Series:
    """Key of the host launch in each row (device and family); empty unless timed eagerly."""
    eager = rows["key"].str.startswith("eager/")
    return (rows["device"] + " " + rows["key"]).where(eager, "")


def _fit(
    rows: pd.DataFrame, devices: Mapping[str, DeviceSpec]
) -> tuple[MemoryParams, dict[str, float]]:
    """Robust least squares of log-ratios with equal weight per device.

    Returns:
        The constants, and the host launch in seconds by :func:`_launch_keys`.
    """
    from scipy.optimize import least_squares

    names = sorted(set(rows["device"]))
    keys = sorted(set(_launch_keys(rows)) - {""})
    traffic = traffic_of_rows(rows)
    # Natural logarithm of seconds, like the predictions.
    log_us = np.log(rows["latency_us"].to_numpy(np.float64) * 1e-6)
    device = rows["device"].to_numpy()
    # The squared weights of a device sum to 1, whatever the number of its rows.
    weight = 1 / np.sqrt(rows.groupby("device")["device"].transform("size").to_numpy(np.float64))
    number = {key: i for i, key in enumerate(keys)}
    launch_code = _launch_keys(rows).map(number).fillna(-1).to_numpy(np.int64)
    first = np.array([_EAGER_S[k.split(" ")[1]] for k in keys])

    def unpack(x: np.ndarray) -> tuple[MemoryParams, np.ndarray]:
        # All unknowns are logarithms of factors on their start: positive, and of similar scale.
        plain = {n: v * float(np.exp(x[i])) for i, (n, v) in enumerate(_START.items())}
        offsets = dict(zip(names, x[len(_START) : len(_START) + len(names)].tolist(), strict=True))
        launches = first * np.exp(x[len(_START) + len(names) :])
        return MemoryParams(**plain, device_log=offsets), launches

    def residual(x: np.ndarray) -> np.ndarray:
        params, launches = unpack(x)
        # The last entry is for rows that were not timed eagerly.
        host = np.append(launches, 0.0)[launch_code]
        predicted, _ = _seconds(device, traffic, devices, params, host)
        # Only factors of single devices and hosts are shrunk; the shared constants are only
        # bounded.
        prior = PRIOR * x[len(_START) :]
        return np.concatenate([weight * (log_us - np.log(predicted)), prior])

    shared, own = len(_START), len(_START) + len(names)
    size = own + len(keys)
    # Unknowns by the rows they affect: each shared constant affects all rows; the factors of
    # devices and of host launches affect disjoint rows, so that all of a kind can be moved at once.
    kinds = [*([i] for i in range(shared)), range(shared, own), range(own, size)]
    codes = [None] * shared + [np.unique(device, return_inverse=True)[1], launch_code]

    def jacobian(x: np.ndarray) -> np.ndarray:
        before, found = residual(x)[: len(rows)], np.zeros((len(rows) + size - shared, size))
        found[len(rows) :, shared:] = PRIOR * np.eye(size - shared)
        for kind, code in zip(kinds, codes, strict=True):
            moved = x.copy()
            moved[list(kind)] += _STEP
            slope = (residual(moved)[: len(rows)] - before) / _STEP
            for place, unknown in enumerate(kind):
                found[: len(rows), unknown] = slope if code is None else slope * (code == place)
        return found

    reach = np.log(_REACH)
    # soft_l1 becomes linear at a weighted residual of 0.02, in a table of 700 rows an error of half
    # a log unit, so that single faulty rows do not distort the constants.
    solution = least_squares(
        residual, np.zeros(size), jacobian, (-reach, reach),
        loss="soft_l1", f_scale=0.02, max_nfev=60,
    )  # fmt: skip
    params, launches = unpack(solution.x)
    return params, dict(zip(keys, launches.tolist(), strict=True))


def _seconds(
    device: np.ndarray,
    traffic: Traffic,
    devices: Mapping[str, DeviceSpec],
    params: MemoryParams,
    host: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of rows, and of the launch in each, shape ``(n,)``.

    Rows timed eagerly take the ``host`` launch (0 for others) instead of the device's: the host is
    slower, so the device waits for it.
    """
    predicted, launch = np.empty(len(device)), np.empty(len(device))
    for name in sorted(set(device)):
        own = np.flatnonzero(device == name)
        times = pass_seconds(traffic.take(own), devices[name], params)
        launch[own] = np.where(host[own] > 0, host[own], times.launch)
        predicted[own] = launch[own] + times.total - times.launch
    return predicted, launch


def _scores(
    rows: pd.DataFrame,
    devices: Mapping[str, DeviceSpec],
    params: MemoryParams,
    launches: Mapping[str, float],
) -> np.ndarray:
    """Log-ratios of measured to predicted times, of rows that are not mostly launch.

    The time of launch-bound rows does not depend on the device, so they are not evaluated.
    """
    host = _launch_keys(rows).map(launches).fillna(0.0).to_numpy(np.float64)
    traffic = traffic_of_rows(rows)
    predicted, launch = _seconds(rows["device"].to_numpy(), traffic, devices, params, host)
    measured = rows["latency_us"].to_numpy(np.float64) * 1e-6
    telling = launch < LAUNCH_SHARE * predicted
    return np.asarray(np.log(measured[telling] / predicted[telling]))


def pass_rows(dataset: Dataset) -> tuple[pd.DataFrame, str]:
    """Rows of a published dataset that are passes over memory, and the digest of their samples.

    Raises:
        DatasetError: The dataset has no such row.
    """
    names = sorted({family.split("/")[1] for family in FAMILIES})
    # Search the text first: parsing millions of kernels only to drop most of them is slow.
    mark = '"family":"(?:' + "|".join(names) + ')"'
    some = dataset.frame["kernel_ir"].str.contains(mark, regex=True)
    part = dataset.select(some.to_numpy())
    return rows_of_dataset(part), part.hash


def build_gpu_model(
    rows: pd.DataFrame, devices: Mapping[str, DeviceSpec], info: Mapping[str, object], seed: int = 0
) -> tuple[CostModel, MemoryFit]:
    """Fit the constants of passes and assemble the cost model.

    Args:
        rows: Published rows, from :func:`pass_rows`.
        devices: Descriptions by name.
        info: Further entries of the manifest.
        seed: Seed of the draw of rows.

    Raises:
        DatasetError: No row is a pass over memory.
    """
    fit = fit_memory(rows, devices, seed)
    together = max(fit.correlation, LEAST_CORRELATION)
    constants = Constants(fit.params, fit.known, fit.left_out, together)
    estimator = GpuEstimator(constants=constants)
    program_model = ProgramModel()
    program_model.overheads.update(estimator.overheads)
    metrics = {f"passes, {name} left out": errors for name, errors in fit.errors.items()}
    about = {**info, "metrics": metrics, "pass_correlation": fit.correlation, "seed": seed}
    return CostModel(estimator, program_model, {}, about), fit
