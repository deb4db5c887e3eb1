"""Checks that physics imposes on predictions for any device, whatever was learned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from typing import TYPE_CHECKING

from .device_rows import ROUNDING

if TYPE_CHECKING:
    import jax

    from ...features.devices.device import DeviceSpec
    from ...features.ir.reader import SourceProgram
    from ...predict.program.predictor import Predictor
    from .device_rows import DeviceRow

#: Programs of the report whose batch is doubled: inference and training, all quick to compile.
DOUBLED = ("mlp-train", "llama-decode", "dlrm-train", "convnet-1d")
#: Side of the matrices, products in the chain, and elements of the added vectors: large enough that
#: one figure of the data sheet decides. A product does 1.1 TFLOP on 400 MB; the vectors hold 1 GiB
#: each, far more than any cache.
SIDE, PRODUCTS, ELEMENTS = 8192, 4, 2**28


@dataclass(frozen=True)
class Check:
    """A check and its outcome.

    Attributes:
        name: The condition that must hold.
        cases: Number of cases tested.
        failures: Descriptions of the cases in which it does not hold.
    """

    name: str
    cases: int
    failures: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether it was tested and held in every case."""
        return self.cases > 0 and not self.failures


def physics_checks(
    predictor: Predictor,
    table: Sequence[DeviceRow],
    devices: Sequence[DeviceSpec],
    lowering: str = "xla",
) -> list[Check]:
    """Check the rows of a report, programs of twice the batch, and the order of devices.

    Args:
        predictor: Predictor with the shipped models.
        table: Rows of the report.
        devices: Devices of the report.
        lowering: Lowering of the report.
    """
    return [
        not_below_roofline(table),
        estimates_below_roofline(table),
        larger_batches(table, _doubled(predictor, table, devices, lowering)),
        *device_orders(predictor, devices, lowering),
    ]


def not_below_roofline(table: Sequence[DeviceRow]) -> Check:
    """Check that no latency is below its roofline with L2 (TPU: on-chip memory).

    The models clamp their kernels to it; :func:`estimates_below_roofline` looks at the estimates
    before that.
    """
    rows = [row for row in table if not row.error]
    failures = [
        f"{row.program} on {row.device}: {row.undercut} of {row.kernels} kernels"
        for row in rows
        if row.undercut
    ]
    # A program may undercut its bound by overlap alone, so it is checked beside its kernels.
    failures += [
        f"{row.program} on {row.device}: {row.learned_us:.4g} µs, least {row.least_us:.4g} µs"
        for row in rows
        if row.learned_us < row.least_us * (1 - ROUNDING)
    ]
    cases = sum(row.kernels + 1 for row in rows)
    return Check("no answer is below its roofline with L2", cases, tuple(failures))


def estimates_below_roofline(table: Sequence[DeviceRow]) -> Check:
    """Check that no estimate is below its roofline before the model clamps it.

    A failure names a device, the share of its kernels that were clamped, the estimate furthest
    below, and programs whose unclamped kernels take less than physics allows the whole program.
    """
    # Sorted by device: ``groupby`` joins only neighbouring rows.
    rows = sorted((row for row in table if not row.error), key=lambda row: row.device)
    failures = []
    for device, group in groupby(rows, key=lambda row: row.device):
        own = list(group)
        # Counted by device: what fails is a model on a device, not a program.
        held, kernels = sum(row.clamped for row in own), sum(row.kernels for row in own)
        short = [r.program for r in own if r.unclamped_us < r.least_us * (1 - ROUNDING)]
        if not held and not short:
            continue
        worst = min(row.worst for row in own)
        programs = f"; whole programs: {', '.join(short)}" if short else ""
        failures.append(
            f"{device}: {held} of {kernels} kernels ({held / max(kernels, 1):.1%}), "
            f"the furthest at {worst:.2f} of its roofline{programs}"
        )
    cases = sum(row.kernels + 1 for row in rows)
    return Check("no estimate has to be held to its roofline", cases, tuple(failures))


def larger_batches(table: Sequence[DeviceRow], doubled: Sequence[DeviceRow]) -> Check:
    """Check that twice the batch takes no less time.

    Args:
        table: Rows of programs.
        doubled: Rows of the same names with twice the batch.
    """
    once = {(row.program, row.device): row for row in table if not row.error}
    failures, cases = [], 0
    for row in doubled:
        single = once.get((row.program, row.device))
        if single is None or row.error:
            continue
        cases += 1
        # Equal times are fine: a program may be bound by launches at both sizes.
        if row.learned_us < single.learned_us:
            failures.append(
                f"{row.program} on {row.device}: {single.learned_us:.4g} µs, twice the batch "
                f"{row.learned_us:.4g} µs"
            )
    return Check("doubling the batch makes no program faster", cases, tuple(failures))


def device_orders(
    predictor: Predictor, devices: Sequence[DeviceSpec], lowering: str = "xla"
) -> list[Check]:
    """Check that devices are ordered as in their data sheets where one figure decides."""
    if len(devices) < 2:
        return []
    from .device_rows import device_row

    programs = {"compute": compute_bound(), "memory": memory_bound()}
    table = {
        name: [device_row(predictor, name, source, device, lowering) for device in devices]
        for name, source in programs.items()
    }
    matrix = {d.name: d.matrix_peak("bf16") / 1e12 for d in devices}
    memory = {d.name: d.bandwidth / 1e9 for d in devices}
    return [
        in_order("bf16 products: devices as their peaks", table["compute"], matrix, "TFLOP/s"),
        in_order("additions: devices as their bandwidths", table["memory"], memory, "GB/s"),
    ]


def in_order(name: str, table: Sequence[DeviceRow], rates: dict[str, float], unit: str) -> Check:
    """Check for every two devices that the one with the higher rate is faster.

    Args:
        name: Name of the check.
        table: One program on several devices.
        rates: Rate from the data sheet, by device.
        unit: Unit of the rates.
    """
    failures = [f"{row.device}: {row.error}" for row in table if row.error]
    pairs = list(combinations([row for row in table if not row.error], 2))
    cases = 0
    for one, other in pairs:
        fast, slow = sorted((one, other), key=lambda row: -rates[row.device])
        # Equal rates do not decide the order.
        if rates[fast.device] == rates[slow.device]:
            continue
        cases += 1
        if fast.learned_us >= slow.learned_us:
            failures.append(
                f"{fast.device} ({rates[fast.device]:.4g} {unit}) {fast.learned_us:.4g} µs, "
                f"{slow.device} ({rates[slow.device]:.4g} {unit}) {slow.learned_us:.4g} µs"
            )
    return Check(name, cases, tuple(failures))


def compute_bound(side: int = SIDE) -> SourceProgram:
    """Make a chain of square bf16 products."""

    def chain(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(PRODUCTS):
            # Each product needs the result of the one before: nothing can overlap or be merged.
            x = x @ w
        return x

    return _traced(chain, ((side, side), (side, side)), "bfloat16")


def memory_bound(elements: int = ELEMENTS) -> SourceProgram:
    """Make a scaled sum of two long f32 vectors, as STREAM's triad."""
    return _traced(lambda x, y: 1.5 * x + y, ((elements,), (elements,)), "float32")


def _traced(
    function: Callable[..., jax.Array], shapes: Sequence[tuple[int, ...]], dtype: str
) -> SourceProgram:
    import jax

    from ...features.ir.reader import read_program

    make: Callable[..., jax.ShapeDtypeStruct] = jax.ShapeDtypeStruct
    specs = [make(shape, dtype) for shape in shapes]
    return read_program(jax.jit(function), *specs)


def _doubled(
    predictor: Predictor, table: Sequence[DeviceRow], devices: Sequence[DeviceSpec], lowering: str
) -> list[DeviceRow]:
    from ...common.progress import tracked
    from ...datagen.zoo import parse_settings, resolve
    from .device_rows import PROGRAMS, build_program, device_row

    rows = []
    names = [name for name in DOUBLED if any(row.program == name for row in table)]
    for name in tracked(names, len(names), "twice the batch"):
        family, *pairs = PROGRAMS[name].split()
        # The family's default where the report's settings name no batch.
        batch = int(resolve(family, parse_settings(family, pairs))["batch"])
        source = build_program(PROGRAMS[name], batch=2 * batch)
        rows += [device_row(predictor, name, source, d, lowering) for d in devices]
    return rows
