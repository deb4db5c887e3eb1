"""Calibrates a kernel model to a device from a few kernels measured there, and to its speed now.

The errors of a model on a device that it was not trained on, or on another machine of the same
kind, are mostly systematic. They are modelled as a Gaussian process over a few key features, with
the covariance of :mod:`~opcast.models.adapt.gaussian_process`: slopes of compute, memory and
launch, and errors shared by kernels that lie close together or are of the same kind and dtype.

A virtual machine shares its host: it may run at half the speed of the hour before, steadily. The
anchors show by how much for arithmetic on all cores, for one core and for main memory; a kernel is
scaled by the class that limits it. Only slower speeds move an estimate. A probe keeps the best of
its readings as ceilings, but its anchors are what was typical at the time: where they are faster
now, the probe was disturbed, and not the ceilings from which is predicted. Intervals hold both
speeds in either case.
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

#: Features that show how close two kernels are, with their typical spread over the kernels of
#: models, which makes distances dimensionless. The spreads are engineering estimates.
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
#: Share by which a correction must lower the error of samples that are left out, or none is made: a
#: shared machine drifts by more than that from one minute to the next. Engineering estimate.
GAIN = 0.05


@dataclass
class DeviceCorrection:
    """A model's errors on one device, learned from samples.

    Attributes:
        correction: The Gaussian process.
        stretch: Interval ends in units of the model's own half-width, from the errors of samples
            predicted from samples of other programs.
        order: Which of the measured kernels the samples are; not saved.
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
            prediction: Their predictions by the model without correction.
            measured_s: Measured latencies in seconds, shape ``(n,)``, positive.
            programs: Program or round of each, shape ``(n,)``: those of a program are alike, those
                of a round met the machine at one speed, so they are not predicted from each other.
                Each counts by itself by default.
        """
        errors, groups = np.log(measured_s / prediction.latency), programs
        sites, half = kernel_sites(table, device), half_width(prediction)
        # In random order: the strength of the correction is chosen on the first samples.
        order = np.random.default_rng(0).permutation(len(errors))[:MAX_SAMPLES]
        sites, errors, half = sites.take(order), errors[order], half[order]
        groups = None if groups is None else groups[order]
        own = ErrorPosterior.fit(prior_params(), sites, errors, groups=groups, gain=GAIN)
        left_out = left_out_errors(own.inverse, own.weights, groups)
        return cls(own, few_or_ends(left_out / half), order)

    def without(self, kernels: Sequence[int]) -> dict[int, float]:
        """Correction of some measured kernels as learned from all others.

        Args:
            kernels: Their places among those that were given to :meth:`fit`.

        Returns:
            Expected ``log(measured / predicted)`` by place, of those that are samples.
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
        """Take the expected error out of predictions; equal kernels are computed once."""
        if not kernels:
            return prediction
        unique, index = distinct(kernels)
        mean = self.mean(kernel_table(unique, device), device)[index]
        return self.shifted(prediction, mean)

    def shifted(self, prediction: KernelPrediction, mean: np.ndarray) -> KernelPrediction:
        """Take the error ``mean`` out of predictions, and scale their intervals to the device."""
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

    Kernels of compiled programs err more by themselves, and less by the device, than operators of
    libraries do, for which the covariance was made.
    """
    # Engineering estimates, not fitted: there are not enough devices with kernel datasets to fit
    # to.
    return scaled_params(start_params(len(KEYS)), slopes=0.6, noise=3.0, smooth=0.5)


def half_width(prediction: KernelPrediction) -> np.ndarray:
    """Half the width of intervals in log space, shape ``(n,)``."""
    # The guards keep the logarithm finite and the width above zero, by which scores are divided.
    return np.asarray(0.5 * np.log(prediction.hi / np.maximum(prediction.lo, 1e-12)) + 1e-6)


def kernel_sites(table: KernelTable, device: DeviceSpec) -> Sites:
    """Sites of kernels for the covariance of errors."""
    columns = [table.names.index(name) for name in KEYS]
    place = table.X[:, columns].astype(np.float64) / np.array(list(KEYS.values()))
    kind = np.array([CELLS[c] for c in table.cell], object)
    return Sites(place, _shares(table, device), kind, kind + "|" + _dtypes(table))


def _shares(table: KernelTable, device: DeviceSpec) -> np.ndarray:
    """Shares of compute, memory and launch in roofline plus floor, shape ``(n, 3)``."""
    # An error in proportion to one of these shares is an error of that peak, bandwidth or latency.
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


#: Kinds whose kernels on a CPU run on all cores whatever the compiler states: their libraries
#: divide the work themselves.
_PARALLEL = ("gemm", "conv")


def at_present_speed(
    prediction: KernelPrediction, kernels: Sequence[Kernel], speed: Comparison
) -> KernelPrediction:
    """Scale the latencies of kernels that are slower now; intervals hold both speeds.

    Args:
        prediction: Of ``n`` kernels, at the speed of the device's measurement.
        kernels: The kernels.
        speed: Present speed relative to then, by class; empty changes nothing.
    """
    if not speed.ratios or not kernels:
        return prediction
    factor = 1.0 / kernel_speeds(prediction.bound, kernels, speed.ratios)
    slower = np.maximum(factor, 1.0)
    return replace(
        prediction,
        latency=prediction.latency * slower,
        # What was learned at the other speed may hold for part of a kernel: both are possible.
        lo=prediction.lo * np.minimum(factor, 1.0),
        hi=prediction.hi * slower,
        unclamped=None if prediction.unclamped is None else prediction.unclamped * slower,
    )


def at_higher_speed(
    prediction: KernelPrediction, kernels: Sequence[Kernel], speed: Comparison
) -> KernelPrediction:
    """Scale the latencies of kernels whose class is faster now, for the lower end of a program."""
    factor = 1.0 / kernel_speeds(prediction.bound, kernels, speed.ratios)
    return replace(prediction, latency=prediction.latency * np.minimum(factor, 1.0))


def program_at_present_speed(
    now: ProgramPrediction, others: Sequence[ProgramPrediction]
) -> ProgramPrediction:
    """Widen the interval of a program at the present speed to hold those at other speeds."""
    every = [now, *others]
    return now._replace(lo=min(p.lo for p in every), hi=max(p.hi for p in every))


def in_program_at_speeds(
    model: CostModel, lowered: LoweredProgram, device: DeviceSpec, isolated: KernelPrediction
) -> tuple[KernelPrediction, ProgramPrediction]:
    """Predict a program and its kernels in context, at the speeds that a device may have.

    That is its present speed, where it differs from when the device was measured. Intervals hold
    both, and what earlier measurements of its ceilings say.

    Args:
        model: Predicts programs.
        lowered: The program.
        device: Its device.
        isolated: The kernels by themselves, at the speed of the device's measurement.
    """
    kernels, program = model.predict_in_program(lowered, device, isolated)
    others = []
    if (speed := speed_of(device)).ratios:
        faster = at_higher_speed(isolated, lowered.kernels, speed)
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
    return kernels, program_at_present_speed(program, others) if others else program


def kernel_speeds(
    bound: np.ndarray, kernels: Sequence[Kernel], ratios: Mapping[str, float]
) -> np.ndarray:
    """Return the speed of each kernel relative to the device's measurement, shape ``(n,)``.

    Args:
        bound: What limits each, of :class:`~opcast.features.table.roofline.Roofline`.
        kernels: The kernels.
        ratios: Speed by class; a missing class runs as it did.
    """
    row = rows(kernels)
    # XLA states into how many parts it divides a loop, and nothing for one that stays on one core.
    divided = row[:, INDEX["partitions"]] > 1
    library = row[:, INDEX["library"]] > 0
    parallel = divided | library | np.isin([k.kind for k in kernels], _PARALLEL)
    arithmetic, single, memory = (
        ratios.get(name, 1.0) for name in ("arithmetic", "single-thread", "bandwidth")
    )
    by_core = np.where(parallel, arithmetic, single)
    # A latency holds for one core, whatever the kernel would be divided into.
    return np.asarray(np.select([bound == "memory", bound == "latency"], [memory, single], by_core))
