"""HTML page of a program on a device: total time, components, and explanations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...common.errors import OpcastError
from ...features.devices.device import DeviceSpec
from ...features.ir.platforms import platform_of
from ...features.ir.reader import SourceProgram, read_program
from ...features.kernels.kernel import LoweredProgram
from ...features.kernels.provenance import ModulePaths
from ...features.lowering.lower import lower, lower_with
from ...features.lowering.options import DEFAULTS, LoweringOptions
from ..devices import resolve_device, shown_devices
from ..program.explain import ProgramExplanation, explain_lowered
from ..program.predictor import Prediction, Predictor
from .assemble import Page, assemble, rounded, short
from .kernel_data import kernel_columns, memory_data, peak_lines, schedule_of

SCRIPTS = (
    "breakdown.js",
    "timeline.js",
    "roofline.js",
    "devices.js",
    "whatif.js",
    "table.js",
    "report.js",
)
#: Default lowering of the comparison: needs no compiler and takes seconds per device.
LOWERING = "fused"
#: Lowering shown for a program that is already optimised.
AS_GIVEN = "as given"
#: Number of distinct kernels to explain, most expensive first, and of training neighbours for each.
#: Engineering estimates: beyond some tens, kernels rarely take a visible share.
EXPLAINED, NEIGHBOURS = 40, 3
#: Maximum characters of a kernel's HLO on the page; texts of large fusions are far longer.
_TEXT = 2000
#: Maximum contributions, and features outside the training range, listed per kernel.
_CONTRIBUTIONS, _OUTSIDE = 8, 4


@dataclass(frozen=True)
class ReportOptions:
    """Options of a page.

    Attributes:
        lowering: Lowering options of the program, including the device.
        compare: Devices to compare with; empty for no comparison.
        compare_lowering: Lowering of the comparison.
        title: Name of the program; by default the name of its file.
    """

    lowering: LoweringOptions = DEFAULTS
    compare: Sequence[str] = field(default_factory=lambda: shown_devices("reports"))
    compare_lowering: str = LOWERING
    title: str = ""


def report_page(
    predictor: Predictor,
    program: object,
    options: ReportOptions | None = None,
    tell: Callable[[str], None] = lambda what: None,
) -> str:
    """Predict a program and return its page.

    Args:
        predictor: Predictor with the model.
        program: Program, as accepted by :meth:`Predictor.predict`.
        options: Lowering, comparison and title.
        tell: Called with a description of each stage of the work.

    Returns:
        Self-contained HTML.

    Raises:
        OpcastError: The program, device or lowering is not usable.
    """
    options = options or ReportOptions()
    spec = resolve_device(options.lowering.device, predictor.devices)
    source = read_program(
        program, trip_counts=options.lowering.trip_counts, platform=platform_of(spec)
    )
    tell(f"kernels for {spec.name}")
    lowered = lower_with(source, replace(options.lowering, device=spec, cache=predictor.cache))
    data = report_data(predictor, source, lowered, spec)
    data["program"] = options.title or _name(source)
    if options.compare:
        rows = compare_devices(predictor, source, options.compare, options.compare_lowering, tell)
        how = AS_GIVEN if is_optimised(source) else options.compare_lowering
        data["compare"] = {"rows": rows, "lowering": how}
    return assemble(Page(f"{data['program']} on {spec.name}", data, SCRIPTS))


def report_data(
    predictor: Predictor, source: SourceProgram, lowered: LoweredProgram, device: DeviceSpec
) -> dict[str, object]:
    """Return the page's data for a lowered program; times in microseconds."""
    found = explain_lowered(predictor, lowered, device, top=EXPLAINED, neighbours=NEIGHBOURS)
    p = found.prediction
    schedule = schedule_of(p, lowered, device)
    kernels = kernel_columns(p, lowered, device, schedule, ModulePaths(source))
    # Only needed here, to attach explanations to rows.
    position = kernels.pop("position")
    return {
        "device": _device(device),
        "model": p.model,
        "lowering": p.lowering,
        "compiler": p.compiler,
        "total": {"us": short(p.latency_us), "lo": short(p.lo_us), "hi": short(p.hi_us)},
        "inside": short(p.in_domain_share),
        "notes": list(p.notes),
        "standing": list(p.standing),
        "kernels": kernels,
        "peaks": peak_lines(kernels, device),
        "streams": schedule.names,
        "stretch": short(schedule.stretch),
        "memory": memory_data(p, lowered, schedule),
        "explained": _explained(found, lowered, position),
    }


def _name(source: SourceProgram) -> str:
    return Path(source.origin).name if source.origin else "program"


def _device(device: DeviceSpec) -> dict[str, object]:
    return {
        "name": device.name,
        "vendor": device.vendor,
        "platform": device.platform,
        "bandwidth": short(device.bandwidth),
        "levels": [[short(v.capacity), short(v.bandwidth)] for v in device.levels],
        "cores": device.core_count,
        "clock": short(device.clock_hz),
        "floor": short(device.floor * 1e6),
        "memory": short(device.memory_bytes),
    }


def _explained(
    found: ProgramExplanation, lowered: LoweredProgram, position: dict[int, int]
) -> list[dict[str, object]]:
    """Return explanations of the most expensive distinct kernels, with the rows of equal ones."""
    rows: dict[str, list[int]] = {}
    for place, kernel in enumerate(lowered.kernels):
        if place in position:
            rows.setdefault(kernel.hash, []).append(position[place])
    texts = {kernel.hash: kernel.ir for kernel in lowered.kernels}
    listed = []
    for own in found.kernels:
        e = own.explanation
        # The page omits this kernel.
        if e.kernel_hash not in rows:
            continue
        listed.append(
            {
                "rows": rows[e.kernel_hash],
                "text": texts[e.kernel_hash][:_TEXT],
                "cut": max(0, len(texts[e.kernel_hash]) - _TEXT),
                "alone": short(e.latency_us),
                "roofline": short(e.roofline_us),
                "floor": short(e.floor_us),
                "factor": short(e.factor),
                "method": e.method,
                "parts": [[c.group, short(c.log_ratio)] for c in e.contributions[:_CONTRIBUTIONS]],
                # Estimators without a training domain have no score.
                "score": rounded(
                    [v for v in (e.domain_score, e.domain_threshold) if v is not None]
                ),
                "outside": [
                    [o.feature, *rounded([o.value, o.low, o.high])] for o in e.outside[:_OUTSIDE]
                ],
                "near": [
                    [n.label, n.device, *rounded([n.measured_us, n.predicted_us, n.distance])]
                    for n in e.neighbours
                ],
                "notes": list(e.notes),
            }
        )
    return listed


def compare_devices(
    predictor: Predictor,
    source: SourceProgram,
    devices: Sequence[str],
    lowering: str = LOWERING,
    tell: Callable[[str], None] = lambda device: None,
) -> list[dict[str, object]]:
    """Predict a program on devices; failures are reported per device.

    Args:
        predictor: Predictor with the model.
        source: The program; if already optimised, its kernels are used unchanged.
        devices: Names or device files.
        lowering: Lowering for all devices.
        tell: Called with a description of each stage of the work.

    Returns:
        One row per device, in the order given.
    """
    # ``xla`` reads scheduled HLO unchanged and compiles nothing.
    how = "xla" if is_optimised(source) else lowering
    rows = []
    for name in devices:
        tell(f"comparing with {name}")
        try:
            device = resolve_device(name, predictor.devices)
            lowered = lower(
                source, how, cache=predictor.cache, trip_counts=source.trip_counts, device=device
            )
            rows.append(_row(name, predictor.predict_lowered(lowered, device)))
        # One device that cannot be predicted must not prevent the page.
        except OpcastError as error:
            rows.append({"device": name, "error": str(error)})
    return rows


def is_optimised(source: SourceProgram) -> bool:
    """Return whether a program is a compiler's output, which is not lowered again."""
    return source.kind == "hlo" and source.program.is_scheduled


def _row(name: str, prediction: Prediction) -> dict[str, object]:
    return {
        "device": name,
        "us": short(prediction.latency_us),
        "lo": short(prediction.lo_us),
        "hi": short(prediction.hi_us),
        "inside": short(prediction.in_domain_share),
        "peak_bytes": short(prediction.peak_memory_bytes),
        "device_bytes": short(prediction.device_memory_bytes),
        "fits": prediction.fits,
        "lowering": prediction.lowering,
        "model": prediction.model,
        "notes": list(prediction.notes),
        "error": "",
    }
