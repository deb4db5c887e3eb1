"""Reproduces the TPU compiler's estimates of kernels, in milliseconds and without compiling.

The labels are libtpu's estimates of cycles (``estimated_cycles``); nothing was measured. For
kernels that the compiler just compiled, its estimates are available as a separate estimator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from ...common.errors import DeviceError
from ...common.files import own_data
from ...features.devices.catalogue import in_catalogue
from ...features.devices.device import DeviceSpec
from ...features.kernels.extract import kernels_from_irs
from ...features.kernels.kernel import Kernel
from ...features.table.columns import INDEX
from ...features.table.roofline import least_seconds, roofline
from ...features.table.row import rows as kernel_rows
from ...features.table.tpu import (
    grouped_seconds,
    near_share,
    sort_seconds,
    spread_seconds,
    tpu_parts,
    tpu_rows,
)
from ..core.base import KernelPrediction
from ..core.kernel_table import SMALLEST
from ..program.schedule_cost import UNMEASURED, Overhead
from ..simulators.base import Answer, AnsweringEstimator
from ..trust.designs import on_design
from .boosted import BoostedParams, XGBoostEstimator

#: Opcodes for which libtpu writes no ``estimated_cycles`` (docs/tpu.md).
UNESTIMATED = frozenset(("select-and-scatter", "custom-call"))
#: Source of times from the compiler's estimates.
COMPILER = "compiler"
_FILE = own_data("models/estimators/tpu.yaml")
#: Ratio of measured to estimated time by device; 1 for others.
MEASURED: Mapping[str, float] = _FILE["measured_over_estimated"]
#: Factor on roofline plus floor that bounds three quarters of the compiler's estimates of fusions
#: and copies above 20 µs (dataset ``datagen/datasets/tpu``, v5e).
UNSEEN = 4.0
#: The same for products (programs of ``tests/bench/fused_error.py``, v5e).
UNSEEN_PRODUCT = 1.5
#: Least upper bound of convolutions in groups of several channels, relative to their blocks: with
#: the copies around them, groups of 4 and 32 take up to 12 times as long (v5e, v5p and v6e).
REARRANGED = 12.0
#: Log half-width of intervals around the compiler's estimates of products; their error on other
#: programs and generations is unknown. Engineering estimate.
SILICON = 0.25
#: Log upper bound around its estimates of all other kernels. Unfused attention, the only such
#: kernels that were measured, took 0.31 to 1.44 times the estimate (docs/tpu.md): the lower bound
#: is the roofline.
SILICON_ELSE = 0.4
#: Kinds of kernel whose estimates were compared with measured times.
_COMPARED = ("gemm", "conv")


def is_estimated(kernel: Kernel) -> bool:
    """Whether the TPU compiler estimates kernels like this one.

    It does not estimate collectives, asynchronous copies and slices between HBM and VMEM, library
    calls, and select-and-scatter.
    """
    silent = kernel.kind == "collective" or kernel.opcode in UNESTIMATED
    return not (silent or kernel.async_role)


def by_compiler(
    prediction: KernelPrediction,
    kernels: Sequence[Kernel],
    device: DeviceSpec,
    predict: Callable[[Sequence[Kernel], DeviceSpec], KernelPrediction],
    base: DeviceSpec | None = None,
) -> KernelPrediction:
    """Replace predictions by the compiler's estimates for kernels that have them.

    The trees reproduce the compiler, so its own estimate is better; the domain is where it was
    compared with measurements: products, on devices in :data:`MEASURED`. Kernels of another
    lowering have no estimates: the trees learned from the TPU compiler's fusions, not from such
    kernels, and may be off by more than ten times, so these are held within :data:`UNSEEN` of the
    roofline, products within :data:`UNSEEN_PRODUCT`. Devices other than TPUs are unchanged.

    Args:
        prediction: Prediction of the kernels.
        kernels: ``n`` kernels, as the compiler scheduled them.
        device: Device that they were compiled for.
        predict: Predicts any kernels on a device.
        base: For a design, the device whose answer is scaled by the ratio of their rooflines.
    """
    if device.platform != "tpu":
        return prediction
    if base is not None:
        found = by_compiler(predict(kernels, base), kernels, base, predict)
        return on_design(found, kernels, device, base)
    cycles = np.array([k.cycles if is_estimated(k) else 0.0 for k in kernels], np.float64)
    stated = cycles > 0.0
    if not stated.any():
        held = _within_roofline(prediction, kernels, device)
        return _not_below_bf16(held, kernels, device, predict)
    if device.clock_hz <= 0.0:
        return prediction
    # Library kernels such as ragged products, which the trees have not seen.
    held = _within_roofline(prediction, kernels, device)
    silent = ~stated & np.array([is_estimated(k) for k in kernels], bool)
    columns = ("latency", "lo", "hi", "in_domain")
    prediction = replace(
        prediction,
        **{c: np.where(silent, getattr(held, c), getattr(prediction, c)) for c in columns},
    )
    own = cycles / device.clock_hz * MEASURED.get(device.name, 1.0)
    compared = _compared(kernels)
    low = _low(own, kernels, device)
    high = own * np.exp(np.where(compared, SILICON, SILICON_ELSE))
    inside = prediction.in_domain & compared & (device.name in MEASURED)
    return replace(
        prediction,
        latency=np.where(stated, own, prediction.latency),
        lo=np.where(stated, np.minimum(low, own), prediction.lo),
        hi=np.where(stated, high, prediction.hi),
        in_domain=np.where(stated, inside, prediction.in_domain),
        source=np.where(stated, COMPILER, prediction.source).astype(object),
    )


def _compared(kernels: Sequence[Kernel]) -> np.ndarray:
    """Mask of kernels whose estimates were compared with measured times."""
    return np.array([k.kind in _COMPARED for k in kernels], bool)


def _low(latency: np.ndarray, kernels: Sequence[Kernel], device: DeviceSpec) -> np.ndarray:
    """Lower bounds of measured times around the compiler's estimates."""
    return np.where(_compared(kernels), latency * np.exp(-SILICON), least_seconds(kernels, device))


def _within_roofline(
    prediction: KernelPrediction, kernels: Sequence[Kernel], device: DeviceSpec
) -> KernelPrediction:
    """Limit the prediction of kernels that the TPU compiler did not generate.

    Learned times are at most :data:`UNSEEN` times the roofline, those of products
    :data:`UNSEEN_PRODUCT` times, and out of domain. Their lower bounds are no closer than those of
    the compiler's own estimates, which the trees reproduce. ``models/program/fused_error.py`` has
    the error of whole programs.
    """
    if not kernels:
        return prediction
    # A layout change also moves padding, and a reshape is not an alias of its operand here. What
    # lies on the chip passes through registers, for which the roofline has no time.
    rows, own = kernel_rows(kernels), tpu_rows(kernels)
    parts = tpu_parts(rows, own, device)
    moves = np.array([k.opcode in ("copy", "reshape") for k in kernels], bool)
    products = np.array([k.kind == "gemm" for k in kernels], bool)
    passed = np.maximum(moves * parts["main"], ~products * near_share(own) * parts["registers"])
    base = np.maximum(
        np.maximum(roofline(kernels, device).latency_s, passed) + device.floor, SMALLEST
    )
    # Nor are convolutions in groups faster than the dense blocks that the compiler makes of them.
    dense = np.maximum(grouped_seconds(rows, device), spread_seconds(kernels, device))
    most = np.maximum(base * np.where(products, UNSEEN_PRODUCT, UNSEEN), dense + device.floor)
    learned = np.array([str(source).startswith("learned") for source in prediction.source], bool)
    prediction = _slowed(prediction, learned * dense)
    wide = np.where(rows[:, INDEX["conv_depthwise"]] > 0.0, 0.0, REARRANGED * learned * dense)
    prediction = replace(prediction, hi=np.maximum(prediction.hi, wide))
    high = learned & (prediction.latency > most)
    latency = np.where(high, most, prediction.latency)
    low = np.minimum(prediction.lo, np.maximum(_low(latency, kernels, device), device.floor))
    return replace(
        prediction,
        latency=latency,
        lo=np.where(learned, np.where(high, np.minimum(low, base), low), prediction.lo),
        hi=np.where(high, np.clip(prediction.hi, most, most * UNSEEN), prediction.hi),
        in_domain=prediction.in_domain & ~learned,
    )


def _not_below_bf16(
    prediction: KernelPrediction,
    kernels: Sequence[Kernel],
    device: DeviceSpec,
    predict: Callable[[Sequence[Kernel], DeviceSpec], KernelPrediction],
) -> KernelPrediction:
    """Make no f32 product faster than the same product in bf16.

    At default precision a TPU rounds the operands to bf16 and moves twice the bytes.
    """
    wide = [i for i, k in enumerate(kernels) if k.kind == "gemm" and k.dtype == "f32"]
    if not wide:
        return prediction
    narrow = kernels_from_irs(kernels[i].ir.replace("f32[", "bf16[") for i in wide)
    least = np.zeros(len(kernels))
    least[wide] = _within_roofline(predict(narrow, device), narrow, device).latency
    return _slowed(prediction, least)


def _slowed(prediction: KernelPrediction, least: np.ndarray) -> KernelPrediction:
    """Raise estimates to at least ``least`` seconds, with the same error upwards."""
    latency = np.maximum(prediction.latency, least)
    return replace(prediction, latency=latency, hi=prediction.hi * latency / prediction.latency)


@dataclass(frozen=True)
class TpuParams(BoostedParams):
    """Parameters of boosted trees for a compiler's estimates.

    The labels have no noise (equal kernels always have equal estimates, docs/tpu.md), which allows
    smaller leaves and a faster learning rate than the defaults of :class:`.boosted.BoostedParams`.
    """

    rounds: int = 400
    learning_rate: float = 0.08
    min_child_weight: float = 3.0
    compact: bool = True


class TpuEstimator(XGBoostEstimator):
    """Boosted trees fitted to the compiler's estimates; the roofline for kernels without any.

    A kernel without an estimate is never free: it takes ``roofline + floor``, marked ``roofline``
    and out of domain, with a wide interval. Kinds of kernels with too few estimates take the
    roofline as well. No kernel is faster than
    :func:`~opcast.features.table.roofline.least_seconds`.
    """

    name = "tpu-xgboost"
    overheads: ClassVar[Mapping[str, Overhead]] = UNMEASURED
    keywords = TpuParams
    params: TpuParams

    def predict(self, kernels: Sequence[Kernel], device: DeviceSpec) -> KernelPrediction:
        """Predict every kernel on the device; kernels without estimates take the roofline."""
        prediction = super().predict(kernels, device)
        if not kernels:
            return prediction
        silent = np.array([not is_estimated(kernel) for kernel in kernels], bool)
        if silent.any():
            prediction = self._with_rooflines(prediction, kernels, device, silent)
        prediction = _with_sorts(prediction, kernels, device)
        return _not_below(prediction, least_seconds(kernels, device))

    def _with_rooflines(
        self,
        prediction: KernelPrediction,
        kernels: Sequence[Kernel],
        device: DeviceSpec,
        silent: np.ndarray,
    ) -> KernelPrediction:
        left = [k for k, own in zip(kernels, silent, strict=True) if own]
        # The plain roofline: the trees' base includes register passes that these kernels lack.
        base_s = np.maximum(roofline(left, device).latency_s + device.floor, SMALLEST)
        latency, lo, hi = prediction.latency.copy(), prediction.lo.copy(), prediction.hi.copy()
        latency[silent] = base_s
        lo[silent] = base_s * np.exp(self.fallback[0])
        # An asynchronous transfer only moves its bytes.
        alone = np.array([bool(kernel.async_role) for kernel in left], bool)
        hi[silent] = base_s * np.where(alone, UNSEEN, np.exp(self.fallback[1]))
        return KernelPrediction(
            latency,
            lo,
            hi,
            prediction.bound,
            source=np.where(silent, "roofline", prediction.source).astype(object),
            in_domain=prediction.in_domain & ~silent,
        )

    def notes(self, kernels: Sequence[Kernel], device: DeviceSpec) -> tuple[str, ...]:
        """Limitations of the prediction, for its notes."""
        notes = ["learned from estimates of the TPU's compiler, not from measurements"]
        estimated = [k for k in kernels if is_estimated(k)]
        if estimated and not any(k.cycles > 0.0 for k in estimated):
            notes.append(
                "the TPU's compiler estimated none of these kernels; its own have estimates: "
                "--lowering xla, where it is installed (opcast compilers install tpu)"
            )
        if not in_catalogue(device.name):
            notes.append(f"the estimates are for TPUs of the catalogue, not for {device.name}")
        left = sum(not is_estimated(k) for k in kernels if k.takes_time)
        if left:
            notes.append(f"{left} kernels without an estimate take their roofline")
        return tuple(notes)


def _with_sorts(
    prediction: KernelPrediction, kernels: Sequence[Kernel], device: DeviceSpec
) -> KernelPrediction:
    """Price sorts as sorting networks, within :data:`UNSEEN`: none was measured."""
    seconds = device.floor + sort_seconds(kernel_rows(kernels), device)
    slower = seconds > np.maximum(prediction.latency, device.floor)
    return replace(
        prediction,
        latency=np.where(slower, seconds, prediction.latency),
        lo=np.where(slower, seconds / UNSEEN, prediction.lo),
        hi=np.where(slower, seconds * UNSEEN, prediction.hi),
    )


def _not_below(prediction: KernelPrediction, least: np.ndarray) -> KernelPrediction:
    """Raise kernels and interval bounds to at least ``least`` seconds."""
    return replace(
        prediction,
        latency=np.maximum(prediction.latency, least),
        lo=np.maximum(prediction.lo, least),
        hi=np.maximum(prediction.hi, least),
        unclamped=prediction.latency,
    )


class CompilerEstimator(AnsweringEstimator):
    """Returns the cycles that libtpu wrote into each kernel's ``backend_config``, over the clock.

    They are estimates, not measurements. Only lowering ``xla`` for a TPU has them, and not for
    every kernel (docs/tpu.md).
    """

    name = "compiler"
    source = "compiler:libtpu"

    def __init__(self) -> None:
        super().__init__()

    @property
    def version(self) -> str:
        """A generic name: the prediction names the version that compiled the kernels."""
        return "the TPU's compiler"

    def answers(self, kernels: Sequence[Kernel], device: DeviceSpec) -> list[Answer]:
        """The compiler's estimate of each kernel.

        Raises:
            DeviceError: The device is not a TPU, or its clock is unknown.
        """
        if device.platform != "tpu" or not device.clock_hz:
            raise DeviceError(
                "no compiler estimates the time of its kernels: only the TPUs' does",
                where=device.name,
                hint="--device tpu-v4 with --lowering xla; or another estimator",
            )
        return [
            Answer(kernel.cycles / device.clock_hz)
            if kernel.cycles > 0
            else Answer(0.0, f"the compiler has no estimate ({kernel.kind})")
            for kernel in kernels
        ]
