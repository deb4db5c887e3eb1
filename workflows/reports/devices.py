"""Report on absent devices: zoo programs, lowered by the compiler of each device."""

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

    Compiled programs are cached, so that a stopped report can be resumed.

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
    """Raise if a compiler is missing, instead of failing for each program."""
    from ...features.lowering.target_compiler.target import target_of

    if lowering == "xla":
        for device in devices:
            target_of(device)


#: Columns by heading, with functions that format a row without an error.
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
#: Left-aligned columns.
_LEFT = ("program", "device", "fits")
#: Programs of the report whose batch is doubled: inference and training, all quick to compile.
DOUBLED = ("mlp-train", "llama-decode", "dlrm-train", "convnet-1d")
#: Sizes of two programs that a single hardware rate determines: side of the matrices and number of
#: products in the chain (1.1 TFLOP on 400 MB each), and elements of the vectors (1 GiB each, far
#: more than any cache).
SIDE, PRODUCTS, ELEMENTS = 8192, 4, 2**28


def print_report(console: Console, table: Sequence[DeviceRow], checks: Sequence[Check]) -> None:
    """Print a table of all programs and devices, then the physics checks."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(title="predictions for devices", title_justify="left", box=None, pad_edge=False)
    for name in COLUMNS:
        shown.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=True)
    for _, group in groupby(table, key=lambda row: row.program):
        for place, row in enumerate(group):
            cells = cells_of(row)
            # The program's name is printed only in its first row.
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
    """Format checks: a line each, followed by a line for each failure."""
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


@dataclass(frozen=True)
class Check:
    """A check with its result.

    Attributes:
        name: The condition that must hold.
        cases: Number of tested cases.
        failures: Descriptions of the cases in which it does not hold.
    """

    name: str
    cases: int
    failures: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether it was tested and holds in every case."""
        return self.cases > 0 and not self.failures


def physics_checks(
    predictor: Predictor,
    table: Sequence[DeviceRow],
    devices: Sequence[DeviceSpec],
    lowering: str = "xla",
) -> list[Check]:
    """Check the rows of a report, programs with twice the batch, and the order of devices.

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
    """Check that no prediction is below its roofline with L2 (TPU: on-chip memory).

    Predictions are clamped to it; :func:`estimates_below_roofline` checks the estimates before
    clamping.
    """
    rows = [row for row in table if not row.error]
    failures = [
        f"{row.program} on {row.device}: {row.undercut} of {row.kernels} kernels"
        for row in rows
        if row.undercut
    ]
    # Programs are checked separately, because overlap could make them too fast.
    failures += [
        f"{row.program} on {row.device}: {row.learned_us:.4g} µs, least {row.least_us:.4g} µs"
        for row in rows
        if row.learned_us < row.least_us * (1 - ROUNDING)
    ]
    cases = sum(row.kernels + 1 for row in rows)
    return Check("no prediction is below its roofline with L2", cases, tuple(failures))


def estimates_below_roofline(table: Sequence[DeviceRow]) -> Check:
    """Check that no estimate is below its roofline before clamping.

    A failure has the device, the share of clamped kernels, the smallest ratio of an estimate to its
    roofline, and the programs whose time with unclamped kernels is below the program's bound.
    """
    # Sorted for ``groupby``, which joins only neighbouring rows.
    rows = sorted((row for row in table if not row.error), key=lambda row: row.device)
    failures = []
    for device, group in groupby(rows, key=lambda row: row.device):
        own = list(group)
        held, kernels = sum(row.clamped for row in own), sum(row.kernels for row in own)
        short = [r.program for r in own if r.unclamped_us < r.least_us * (1 - ROUNDING)]
        if not held and not short:
            continue
        worst = min(row.worst for row in own)
        programs = f"; whole programs: {', '.join(short)}" if short else ""
        failures.append(
            f"{device}: {held} of {kernels} kernels ({held / max(kernels, 1):.1%}), "
            f"the lowest at {worst:.2f} of its roofline{programs}"
        )
    cases = sum(row.kernels + 1 for row in rows)
    return Check("no estimate has to be clamped to its roofline", cases, tuple(failures))


def larger_batches(table: Sequence[DeviceRow], doubled: Sequence[DeviceRow]) -> Check:
    """Check that a program with twice the batch takes no less time.

    Args:
        table: Rows of programs.
        doubled: Rows of the same programs with twice the batch.
    """
    once = {(row.program, row.device): row for row in table if not row.error}
    failures, cases = [], 0
    for row in doubled:
        single = once.get((row.program, row.device))
        if single is None or row.error:
            continue
        cases += 1
        # Times may be equal, if launches dominate.
        if row.learned_us < single.learned_us:
            failures.append(
                f"{row.program} on {row.device}: {single.learned_us:.4g} µs, with twice the batch "
                f"{row.learned_us:.4g} µs"
            )
    return Check("doubling the batch makes no program faster", cases, tuple(failures))


def device_orders(
    predictor: Predictor, devices: Sequence[DeviceSpec], lowering: str = "xla"
) -> list[Check]:
    """Check that devices are ordered by the rate that determines a program's time."""
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
        in_order("bf16 products: order of the peaks", table["compute"], matrix, "TFLOP/s"),
        in_order("additions: order of the bandwidths", table["memory"], memory, "GB/s"),
    ]


def in_order(name: str, table: Sequence[DeviceRow], rates: dict[str, float], unit: str) -> Check:
    """Check for all pairs of devices that the one with the higher rate is faster.

    Args:
        name: Name of the check.
        table: A program on several devices.
        rates: Rate from the data sheet, by device.
        unit: Unit of the rates.
    """
    failures = [f"{row.device}: {row.error}" for row in table if row.error]
    pairs = list(combinations([row for row in table if not row.error], 2))
    cases = 0
    for one, other in pairs:
        fast, slow = sorted((one, other), key=lambda row: -rates[row.device])
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
    """Make a chain of square bf16 matrix products."""

    def chain(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(PRODUCTS):
            # Dependent products, which can neither overlap nor be merged.
            x = x @ w
        return x

    return _traced(chain, ((SIDE, SIDE), (SIDE, SIDE)), "bfloat16")


def memory_bound() -> SourceProgram:
    """Make a scaled sum of two long f32 vectors, like STREAM's triad."""
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
        batch = int(resolve(family, parse_settings(family, pairs))["batch"])
        source = build_program(PROGRAMS[name], batch=2 * batch)
        rows += [device_row(predictor, name, source, d, lowering) for d in devices]
    return rows
