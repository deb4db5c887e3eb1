"""Make datasets of kernels whose latencies come from a simulator."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ..common.errors import ModelError

if TYPE_CHECKING:
    from ..datagen.dataset_folder import RunWriter
    from ..features.devices.device import DeviceSpec
    from ..features.kernels.kernel import LoweredProgram
    from ..models.simulators import SimulatorEstimator

#: Estimators that can label kernels.
TOOLS = ("scalesim", "zigzag", "iree")


@dataclass(frozen=True)
class SimulateResult:
    """Outcome of a labelling run.

    Attributes:
        device: Name of the device.
        source: The rows' ``source``, such as ``simulator:scalesim``.
        samples: Rows written.
        programs: Programs labelled.
        skipped: Programs labelled by an earlier call.
        refused: Kernels that the tool cannot model, which have no rows.
    """

    device: str
    source: str
    samples: int
    programs: int
    skipped: int
    refused: int


def simulate_dataset(
    out: Path | str,
    programs: Sequence[Path | str],
    device: str | Path | DeviceSpec,
    tool: str,
    *,
    lowering: str = "auto",
    family: str = "",
) -> SimulateResult:
    """Label the kernels of programs with a simulator.

    A label is the latency of one execution. Kernels that the simulator does not model are left out,
    because their roofline is not a label. A program's rows are written before it is recorded as
    done, so that a stopped call can be resumed.

    Args:
        out: Folder of the dataset.
        programs: Files of StableHLO or HLO.
        device: Name, path of a device file, or description.
        tool: One of :data:`TOOLS`.
        lowering: Lowering of the programs.
        family: Family of all programs; empty for the name of each file.

    Raises:
        ModelError: There is no such tool, or it is not installed.
        DeviceError: The tool cannot model the device.
        OpcastError: A program cannot be read or lowered.
    """
    from ..common.progress import tracked
    from ..features.ir.reader import read_program
    from ..features.lowering.lower import lower
    from ..predict.devices import resolve_device

    spec = resolve_device(device, {})
    estimator = _estimator(tool)
    # Checked before lowering programs, which may take minutes.
    estimator.check(spec)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    run = _writer(folder, estimator, spec, lowering)
    done: list[str] = run.record["done"]
    before = len(done)
    samples = refused = skipped = 0
    for path in tracked(map(Path, programs), len(programs), f"{tool} on {spec.name}"):
        key = _key(path)
        if key in done:
            skipped += 1
            continue
        lowered = lower(read_program(path), lowering, device=spec)
        rows, left = _rows(lowered, estimator, spec)
        names = {"program": path.stem, "family": family or path.stem}
        run.add_rows([row | names for row in rows], spec.name)
        # Write the rows before the mark: after a crash in between, the program is repeated, and its
        # shard of the same name replaced.
        run.flush(key)
        done.append(key)
        run.record["refused"] += left
        run.save_record()
        samples, refused = samples + len(rows), refused + left
    labelled = len(done) - before
    return SimulateResult(spec.name, estimator.source, samples, labelled, skipped, refused)


def _estimator(tool: str) -> SimulatorEstimator:
    from ..models.core.registry import make_estimator

    if tool not in TOOLS:
        raise ModelError(f"no simulator {tool!r}", hint=f"one of: {', '.join(TOOLS)}")
    return cast("SimulatorEstimator", make_estimator(tool, progress=True))


def _key(path: Path) -> str:
    """Identify a program by the name and content of its file."""
    try:
        return f"{path.stem}-{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
    except FileNotFoundError:
        return path.stem  # reading the file reports the error


def _rows(
    lowered: LoweredProgram, estimator: SimulatorEstimator, device: DeviceSpec
) -> tuple[list[dict[str, object]], int]:
    """Rows of the distinct kernels that the tool models, and the number that it does not."""
    from ..datagen.dataset_folder import kernel_row

    # Distinct kernels only, because a simulator takes seconds for each.
    kernels = list({k.hash: k for k in lowered.kernels if k.takes_time}.values())
    found = estimator.predict(kernels, device)
    rows = [
        # A single latency, so all quantiles are equal.
        kernel_row(kernel, [latency_s]) | {"level": "kernel", "source": estimator.source}
        for kernel, latency_s, own in zip(
            kernels, found.latency.tolist(), found.in_domain.tolist(), strict=True
        )
        if own
    ]
    return rows, len(kernels) - len(rows)


def _writer(
    folder: Path, estimator: SimulatorEstimator, device: DeviceSpec, lowering: str
) -> RunWriter:
    """Open the run of a tool, device and lowering in a dataset, resuming an existing one."""
    from ..datagen.dataset_folder import RunWriter

    # A run must not mix versions, parameters or device descriptions.
    described = [estimator.version, estimator.params, asdict(device), lowering]
    text = json.dumps(described, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    run = RunWriter(folder, f"{device.name}-{estimator.name}-{digest}")
    if not run.resumed:
        run.record |= {
            "date": datetime.datetime.now(datetime.UTC).isoformat(),
            "device": asdict(device),
            "compiler": estimator.version,
            "source": estimator.source,
            "params": estimator.params,
            "lowering": lowering,
            "done": [],
            "refused": 0,
        }
    return run
