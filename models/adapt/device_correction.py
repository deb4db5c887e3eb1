"""Calibrates a kernel model to a device from a few measured kernels, and to its present speed.

The errors of a model on an unseen device, or on another machine of the same kind, are mostly
systematic. They are modelled as a Gaussian process over a few key features, with the covariance of
:mod:`~opcast.models.adapt.gaussian_process`: slopes of compute, memory and launch, and errors
shared by kernels that are close or have the same kind and dtype.

A virtual machine shares its host and may run steadily at half the speed of the hour before.
Reference benchmarks measure this for arithmetic on all cores, for one core and for main memory; a
kernel is scaled by the class that limits it. Only slower speeds change an estimate: a probe keeps
its best readings as ceilings but typical ones as references, so that a faster reference only means
that the probe was disturbed, not that the ceilings were. Intervals include both speeds either way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from ...features.devices.device import DeviceSpec
from ...features.devices.identity import Comparison, former_speeds, speed_of
from ...features.kernels.kernel import Kernel, LoweredProgram
from ...features.table.columns import INDEX
from ...features.table.row import rows
from ..core.base import KernelPrediction, distinct
from ..core.kernel_table import CELLS, KernelTable, kernel_table
from ..program.program_model import ProgramPrediction
from ..trust.calibrator import Ends, few_or_ends
from .covariance import Sites, scaled_params, start_params
from .gaussian_process import MAX_SAMPLES, ErrorPosterior, left_out_errors

if TYPE_CHECKING:
    from ..cost_model import CostModel

#: Features that determine the distance of two kernels, with their typical spread over the kernels
#: of models, which makes distances dimensionless. The spreads are engineering estimates.
KEYS = {
    "log_roofline_floor": 4.0,
    "compute_over_memory": 3.0,
    "log_n_ops": 2.0,
    "log_out_minor": 3.0,
    "log_out_outer": 4.0,
    "log_n_inputs": 1.0,
    "log_reduce_length": 4.0,
}
_DTYPES = "dtype_"
#: Least relative reduction of the held-out error by a correction: a shared machine drifts by more
#: than that from one minute to the next. Engineering estimate.
GAIN = 0.05
#: Kinds of kernels that use all cores of a CPU whatever the compiler states: their libraries
#: parallelize themselves.
_PARALLEL = ("gemm", "conv")


@dataclass
class DeviceCorrection:
    """A model's errors on one device, learned from samples.

    Attributes:
        correction: The Gaussian process.
        stretch: Interval bounds in units of the model's half-width, from errors of samples
            predicted from samples of other programs.
        order: Indices of the samples among the measured kernels; not saved.
    """

    correction: ErrorPosterior
    stretch: Ends
    order: np.ndarray = field(default_factory=lambda: np.zeros(0, int))

    @classmethod
    def fit(
        cls,
        table: KernelTable,
        device: DeviceSpec,
        prediction: KernelPrediction,
        measured_s: np.ndarray,
        programs: np.ndarray | None = None,
    ) -> DeviceCorrection:
        """Learn from measured kernels.

        Args:
            table: Features of ``n`` kernels.
            device: Device they were measured on.
            prediction: Predictions of the model without correction.
            measured_s: Measured latencies in seconds, shape ``(n,)``, positive.
            programs: Program or round of each, shape ``(n,)``. Kernels of a program are similar and
                those of a round met the machine at one speed, so they are not predicted from each
                other. By default, each kernel is a separate group.
        """
        errors, groups = np.log(measured_s / prediction.latency), programs
        sites, half = kernel_sites(table, device), half_width(prediction)
        # In random order: the strength of the correction is selected on the first samples.
        order = np.random.default_rng(0).permutation(len(errors))[:MAX_SAMPLES]
        sites, errors, half = sites.take(order), errors[order], half[order]
        groups = None if groups is None else groups[order]
        own = ErrorPosterior.fit(prior_params(), sites, errors, groups=groups, gain=GAIN)
        left_out = left_out_errors(own.inverse, own.weights, groups)
        return cls(own, few_or_ends(left_out / half), order)

    def without(self, kernels: Sequence[int]) -> dict[int, float]:
        """Correction of some measured kernels, learned without them.

        Args:
            kernels: Their indices among the arguments of :meth:`fit`.

        Returns:
            Expected ``log(measured / predicted)`` by index, for those that are samples.
        """
        own = np.flatnonzero(np.isin(self.order, list(kernels)))
        inverse, weights = self.correction.inverse, self.correction.weights
        if not len(own):
            return {}
        errors = np.linalg.solve(inverse, weights)[own]
        left = np.linalg.solve(inverse[np.ix_(own, own)], weights[own])
        return dict(zip(self.order[own].tolist(), (errors - left).tolist(), strict=True))

    @property
    def count(self) -> int:
        """Number of samples."""
        return self.correction.count

    def mean(self, table: KernelTable, device: DeviceSpec) -> np.ndarray:
        """Expected ``log(measured / predicted)`` of kernels, shape ``(n,)``."""
        return self.correction.apply(kernel_sites(table, device))[0]

    def correct(
        self, prediction: KernelPrediction, kernels: Sequence[Kernel], device: DeviceSpec
    ) -> KernelPrediction:
        """Remove the expected error from predictions; equal kernels are only computed once."""
        if not kernels:
            return prediction
        unique, index = distinct(kernels)
        mean = self.mean(kernel_table(unique, device), device)[index]
        return self.shifted(prediction, mean)

    def shifted(self, prediction: KernelPrediction, mean: np.ndarray) -> KernelPrediction:
        """Remove the error ``mean`` from predictions, and scale their intervals to the device."""
        latency = prediction.latency * np.exp(mean)
        half = half_width(prediction)
        lo, hi = latency * np.exp(self.stretch[0] * half), latency * np.exp(self.stretch[1] * half)
        unclamped = prediction.estimate * np.exp(mean)
        return replace(prediction, latency=latency, lo=lo, hi=hi, unclamped=unclamped)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Arrays to save."""
        return {**self.correction.to_arrays(), "stretch": np.array(self.stretch)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> DeviceCorrection:
        """Read :meth:`to_arrays`'s arrays."""
        low, high = arrays["stretch"].tolist()
        return cls(ErrorPosterior.from_arrays(arrays), (low, high))


def prior_params() -> np.ndarray:
    """Parameters of the covariance before any sample.

    Errors of compiled kernels are more individual, and less due to the device, than those of
    library operators, for which the covariance was made.
    """
    # Engineering estimates, not fitted: there are too few devices with kernel datasets.
    return scaled_params(start_params(len(KEYS)), slopes=0.6, noise=3.0, smooth=0.5)


def half_width(prediction: KernelPrediction) -> np.ndarray:
    """Half the width of intervals in log space, shape ``(n,)``."""
    # The guards keep the logarithm finite and the width, which divides scores, above zero.
    return np.asarray(0.5 * np.log(prediction.hi / np.maximum(prediction.lo, 1e-12)) + 1e-6)


def kernel_sites(table: KernelTable, device: DeviceSpec) -> Sites:
    """Sites of kernels for the covariance of errors."""
    columns = [table.names.index(name) for name in KEYS]
    place = table.X[:, columns].astype(np.float64) / np.array(list(KEYS.values()))
    kind = np.array([CELLS[c] for c in table.cell], object)
    return Sites(place, _shares(table, device), kind, kind + "|" + _dtypes(table))


def _shares(table: KernelTable, device: DeviceSpec) -> np.ndarray:
    """Shares of compute, memory and launch in roofline plus floor, shape ``(n, 3)``."""
    # An error proportional to one of these shares is an error of that peak, bandwidth or latency.
    launch = np.clip(device.floor / table.base_s, 0, 1)
    over = table.X[:, table.names.index("compute_over_memory")].astype(np.float64)
    compute = 1 / (1 + np.exp2(-2 * over))  # as squares, so that the larger one counts for more
    return np.stack([compute * (1 - launch), (1 - compute) * (1 - launch), launch], axis=1)


def _dtypes(table: KernelTable) -> np.ndarray:
    names = [n for n in table.names if n.startswith(_DTYPES)]
    values = table.X[:, [table.names.index(n) for n in names]]
    distinct_rows, code = np.unique(values, axis=0, return_inverse=True)
    texts = np.array([",".join(f"{v:g}" for v in row) for row in distinct_rows], object)
    return np.asarray(texts[code.reshape(-1)], object)


def at_present_speed(
    prediction: KernelPrediction, kernels: Sequence[Kernel], speed: Comparison
) -> KernelPrediction:
    """Scale the latencies of kernels that are slower now; intervals include both speeds.

    Args:
        prediction: Prediction of ``n`` kernels, at the speed of the device's measurement.
        kernels: The kernels.
        speed: Present speed relative to that, by class; empty changes nothing.
    """
    if not speed.ratios or not kernels:
        return prediction
    factor = 1.0 / kernel_speeds(prediction.bound, kernels, speed.ratios)
    slower = np.maximum(factor, 1.0)
    return replace(
        prediction,
        latency=prediction.latency * slower,
        # The learned part may still hold at the other speed: both are possible.
        lo=prediction.lo * np.minimum(factor, 1.0),
        hi=prediction.hi * slower,
        unclamped=None if prediction.unclamped is None else prediction.unclamped * slower,
    )


def in_program_at_speeds(
    model: CostModel, lowered: LoweredProgram, device: DeviceSpec, isolated: KernelPrediction
) -> tuple[KernelPrediction, ProgramPrediction]:
    """Predict a program and its kernels in context, at the possible speeds of a device.

    The estimate is at the present speed, if it differs from that when the device was measured.
    Intervals include both, and earlier measurements of the device's ceilings.

    Args:
        model: Predicts programs.
        lowered: The program.
        device: Its device.
        isolated: Predictions of the kernels in isolation, at the measured speed of the device.
    """
    kernels, program = model.predict_in_program(lowered, device, isolated)
    others = []
    if (speed := speed_of(device)).ratios:
        factor = 1.0 / kernel_speeds(isolated.bound, lowered.kernels, speed.ratios)
        faster = replace(isolated, latency=isolated.latency * np.minimum(factor, 1.0))
        others = [program, model.predict_program(lowered, device, faster)]
        isolated = at_present_speed(isolated, lowered.kernels, speed)
        kernels, program = model.predict_in_program(lowered, device, isolated)
    if (formers := former_speeds(device)) and lowered.kernels:
        slow, fast = (
            1.0 / kernel_speeds(isolated.bound, lowered.kernels, own.ratios) for own in formers
        )
        others += [
            model.predict_program(
                lowered, device, replace(isolated, latency=isolated.latency * own)
            )
            for own in (slow, fast)
        ]
        kernels = replace(kernels, lo=kernels.lo * fast, hi=kernels.hi * slow)
    every = [program, *others]
    return kernels, program._replace(lo=min(p.lo for p in every), hi=max(p.hi for p in every))


def kernel_speeds(
    bound: np.ndarray, kernels: Sequence[Kernel], ratios: Mapping[str, float]
) -> np.ndarray:
    """Return the speed of each kernel relative to the device's measurement, shape ``(n,)``.

    Args:
        bound: Limiting term of each, from :class:`~opcast.features.table.roofline.Roofline`.
        kernels: The kernels.
        ratios: Speed by class; a missing class is unchanged.
    """
    row = rows(kernels)
    # XLA states the number of parts of a parallel loop, and nothing for a loop on one core.
    divided = row[:, INDEX["partitions"]] > 1
    library = row[:, INDEX["library"]] > 0
    parallel = divided | library | np.isin([k.kind for k in kernels], _PARALLEL)
    arithmetic, single, memory = (
        ratios.get(name, 1.0) for name in ("arithmetic", "single-thread", "bandwidth")
    )
    by_core = np.where(parallel, arithmetic, single)
    # A latency is of one core, however the kernel is divided.
    return np.asarray(np.select([bound == "memory", bound == "latency"], [memory, single], by_core))
