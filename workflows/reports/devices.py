"""The report on absent devices: programs of the zoo, lowered by each device's own compiler."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, groupby
from typing import TYPE_CHECKING

from ...common.tables_text import markdown_table
from ...common.units import duration, size
from .device_rows import ROUNDING, DeviceRow, known_programs, rows

if TYPE_CHECKING:
    import jax
    from rich.console import Console

    from ...features.devices.device import DeviceSpec
    from ...features.ir.reader import SourceProgram
    from ...predict.program.predictor import Predictor
    from .settings import DeviceReportSettings


def run_device_report(
    console: Console, settings: DeviceReportSettings
) -> tuple[list[DeviceRow], list[Check]]:
    """Lower, predict and check programs on devices, print and write the figures.

    What a compiler made is cached, so a report that was stopped goes on where it was.

    Args:
        console: Console to print to.
        settings: The programs, the devices and the file for the figures.

    Raises:
        CompilerStartError: A compiler is installed, but does not start.
        OpcastError: A program or device is unknown, or a compiler is missing.
    """
    from ...common.files import write_text
    from ...common.progress import tracked, wrote
    from ...predict.devices import resolve_device, shown_devices
    from ...predict.program.predictor import load

    lowering, out = settings.lowering, settings.out
    chosen = known_programs(settings.programs)
    predictor = load()
    names = settings.devices or shown_devices("reports")
    specs = [resolve_device(name, predictor.devices) for name in names]
    # Before the first of a hundred lowerings.
    _require_compilers(specs, lowering)
    count = len(chosen) * len(specs)
    pending = rows(predictor, chosen, specs, lowering)
    table = list(tracked(pending, count, "programs on devices"))
    checks = physics_checks(predictor, table, specs, lowering)
    print_report(console, table, checks)
    if out is not None:
        data = {"rows": [asdict(r) for r in table], "checks": [asdict(c) for c in checks]}
        text = markdown(table, checks) if out.suffix == ".md" else json.dumps(data, indent=1)
        write_text(out, text)
        wrote(out, f"{len(table)} predictions")
    return table, checks


def _require_compilers(devices: Sequence[DeviceSpec], lowering: str) -> None:
    """Raise at once if a compiler is missing, instead of failing for each program."""
    from ...features.lowering.target_compiler.target import target_of

    if lowering == "xla":
        for device in devices:
            target_of(device)


#: Columns by heading: their text for a row without an error.
COLUMNS: dict[str, Callable[[DeviceRow], str]] = {
    "program": lambda r: r.program,
    "device": lambda r: r.device,
    "compiled in s": lambda r: f"{r.compile_s:.1f}",
    "from cache in s": lambda r: f"{r.lower_s:.2f}",
    "kernels": lambda r: str(r.kernels),
    "roofline": lambda r: duration(r.roofline_us),
    "compiler": lambda r: "–" if r.compiler_us is None else duration(r.compiler_us),
    "learned": lambda r: duration(r.learned_us),
    "90 % interval": lambda r: f"{duration(r.learned_lo_us)} – {duration(r.learned_hi_us)}",
    "peak memory": lambda r: size(r.peak_memory_bytes),
    "fits": lambda r: {True: "yes", False: "no", None: "–"}[r.fits],
}
#: Columns of text; the others hold figures.
_LEFT = ("program", "device", "fits")


def print_report(console: Console, table: Sequence[DeviceRow], checks: Sequence[Check]) -> None:
    """Print all programs on all devices, then the physics checks."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(title="predictions for devices", title_justify="left", box=None, pad_edge=False)
    for name in COLUMNS:
        shown.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=True)
    for _, group in groupby(table, key=lambda row: row.program):
        for place, row in enumerate(group):
            cells = cells_of(row)
            # A program's name stands once, above all of its devices.
            shown.add_row(*(Text(c) for c in (cells if not place else ("", *cells[1:]))))
    console.print(shown)
    for row in table:
        if row.error:
            console.print(Text(f"{row.program} on {row.device}: {row.error}", style="yellow"))
    for line in check_lines(checks):
        console.print(Text(line))


def cells_of(row: DeviceRow) -> list[str]:
    """Format a row as text, in the order of :data:`COLUMNS`."""
    if row.error:
        return [row.program, row.device, *["–"] * (len(COLUMNS) - 3), "no: see below"]
    return [cell(row) for cell in COLUMNS.values()]


def check_lines(checks: Sequence[Check]) -> list[str]:
    """Format checks: one line each, and one for each failure."""
    lines = []
    for check in checks:
        state = "met" if check.passed else "NOT met" if check.cases else "not tested"
        lines.append(f"{state}: {check.name} ({check.cases} cases)")
        lines += [f"  {failure}" for failure in check.failures]
    return lines


def markdown(table: Sequence[DeviceRow], checks: Sequence[Check]) -> str:
    """Format the report as Markdown: a table, then errors and checks as lists."""
    lines = markdown_table(COLUMNS, map(cells_of, table), {*COLUMNS} - {*_LEFT})
    errors = [f"- {row.program} on {row.device}: {row.error}" for row in table if row.error]
    demands = [
        f"- {line}" if line[0] != " " else f"  - {line.strip()}" for line in check_lines(checks)
    ]
    return "\n".join([*lines, "", *errors, *([""] if errors else []), *demands, ""])


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


def compute_bound() -> SourceProgram:
    """Make a chain of square bf16 products."""

    def chain(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(PRODUCTS):
            # Each product needs the result of the one before: nothing can overlap or be merged.
            x = x @ w
        return x

    return _traced(chain, ((SIDE, SIDE), (SIDE, SIDE)), "bfloat16")


def memory_bound() -> SourceProgram:
    """Make a scaled sum of two long f32 vectors, as STREAM's triad."""
    return _traced(lambda x, y: 1.5 * x + y, ((ELEMENTS,), (ELEMENTS,)), "float32")


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
