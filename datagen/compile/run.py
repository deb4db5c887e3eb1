"""A compile run: labels for kernels of absent TPUs, from their compiler's estimates.

The TPU compiler writes the estimated cycles of each kernel into every optimised module. These are
estimates, not measurements. Programs are small and independent, so many of them share a module and
a compiler process, whose fixed costs exceed those of most kernels.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd

from ...common.errors import (
    CompilerError,
    CompilerStartError,
    DatasetError,
    DeviceError,
    LoweringError,
)
from ...common.progress import Progress
from ...common.types import JsonObject
from ...features.dataset import Dataset, write_record
from ...features.devices.catalogue import find_device, in_catalogue
from ...features.devices.device import DeviceSpec
from ...features.ir.hlo_reader import parse_hlo
from ...features.ir.precision import as_computed
from ...features.kernels.extract import extract_kernels
from ...features.lowering.target_compiler.process import (
    CompiledModule,
    CompileSettings,
    compile_programs,
)
from ...features.lowering.target_compiler.target import CompileTarget, target_of
from ..dataset_folder import Row, RunWriter, kernel_row, replace_shards
from ..profile.plan import RunResult
from .plan import CompileItem, CompilePlan, MergedModule, merge_programs

logger = logging.getLogger(__name__)

#: Value of the column ``source``: compiler estimates, not measurements.
SOURCE = "compiler:libtpu"
#: Seconds per module after which the compiler counts as stuck: several times the duration of a
#: round of merged programs.
_TIMEOUT_S = 240.0
#: Counts that a run adds up over its devices.
_COUNTS = ("samples", "programs", "failed")


def compile_dataset(
    out: Path | str,
    devices: Sequence[DeviceSpec],
    budget_s: float,
    *,
    plan: CompilePlan | None = None,
    progress: bool = True,
) -> RunResult:
    """Compile programs for TPUs and record the compiler's estimates, until the budget ends.

    The run can be stopped at any point, and resumes when called again with the same folder, plan
    and devices; no device lags another by more than one round.

    Args:
        out: Folder of the dataset.
        devices: TPUs of the catalogue.
        budget_s: Seconds of this call. The current round is finished.
        plan: Sizes of a round; None for the defaults.
        progress: Whether to show progress.

    Raises:
        CompilerError: The TPU compiler is not installed or does not start.
        DatasetError: A device is not a TPU.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    plan = plan or CompilePlan()
    runs = [_DeviceRun(folder, device, plan) for device in devices]
    start, stopped = time.monotonic(), "budget"
    with Progress(budget_s, "s", progress) as bar:
        try:
            while time.monotonic() - start < budget_s:
                # Always the device that is furthest behind: a dataset that is stopped at any time
                # has the same programs for every device.
                run = min(runs, key=lambda own: own.rounds)
                if not run.one_round():
                    stopped = "done"
                    break
                bar.update(time.monotonic() - start, **_totals(runs), note=run.device.name)
        except KeyboardInterrupt:
            stopped = "interrupted"
    elapsed_s = time.monotonic() - start
    return RunResult(folder, elapsed_s=elapsed_s, stopped=stopped, **_totals(runs))


def _totals(runs: Sequence[_DeviceRun]) -> dict[str, int]:
    return {name: sum(run.counts[name] for run in runs) for name in _COUNTS}


def merge_dataset(folder: Path | str) -> Dataset:
    """Merge a dataset's shards into one file, with one row for each kernel and device.

    Records get the current catalogue descriptions of their devices. Only the clock affects labels;
    if it has changed, a record stays as it is.

    Raises:
        DatasetError: There is no dataset.
    """
    root = Path(folder)
    dataset = Dataset.load(root)
    runs = {run_id: _described_anew(record) for run_id, record in dataset.runs.items()}
    merged = Dataset(without_doubles(dataset.frame), runs)
    replace_shards(root, merged.frame)
    for run_id, record in runs.items():
        write_record(root, run_id, record)
    return merged


def _described_anew(record: JsonObject) -> dict[str, object]:
    known = record["device"]
    if not in_catalogue(known["name"]):
        return record
    device = find_device(known["name"])
    same = known["clock_hz"] == device.clock_hz
    return record | {"device": asdict(device)} if same else record


class _DeviceRun:
    """One device's part of a run, with its record.

    Attributes:
        device: The device.
        rounds: Number of finished rounds of the plan.
        counts: Samples, programs and failures of this call.
    """

    def __init__(self, folder: Path, device: DeviceSpec, plan: CompilePlan) -> None:
        if device.platform != "tpu":
            raise DatasetError(
                f"{device.name} is not a TPU: only a TPU's compiler estimates kernels",
                hint="measure a device with: opcast profile",
            )
        self.device = device
        self.counts = dict.fromkeys(_COUNTS, 0)
        self._plan = plan
        # The progress bar of the run is shown instead of one per module.
        self._settings = CompileSettings(timeout_s=_TIMEOUT_S, progress=False)
        self._target: CompileTarget = target_of(device)
        self._run = RunWriter(folder, self._run_id())
        if not self._run.resumed:
            self._run.record |= self._new_record()
        self.rounds = int(self._run.record["rounds"])

    def _new_record(self) -> dict[str, object]:
        return {
            "date": datetime.datetime.now(datetime.UTC).isoformat(),
            "device": asdict(self.device),
            "compiler": self._target.compiler.version,
            "target": self._target.architecture,
            "source": SOURCE,
            "labels": "the compiler's estimated cycles over the clock of the device; nothing "
            "was measured",
            "plan": asdict(self._plan),
            "rounds": 0,
            "programs": 0,
            "failed": 0,
            "elapsed_s": 0.0,
        }

    def _run_id(self) -> str:
        # A different compiler or plan is a different run: its rounds are not comparable.
        text = f"{self._target.compiler.version} {sorted(asdict(self._plan).items())}"
        return f"{self.device.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def one_round(self) -> bool:
        """Compile a round, write its rows, and then the record that it is done.

        A kill in between repeats the round, whose shard then replaces itself.

        Returns:
            Whether there was something left to do.
            Whether there was something left to do.
        """
        start = time.monotonic()
        items = self._plan.round(self.rounds)
        if not items:
            return False
        rows = self._compile(_groups(items))
        self._run.add_rows(rows, self.device.name)
        self._run.flush(f"{self.rounds:05d}")
        self.rounds += 1
        record = self._run.record
        record["rounds"] = self.rounds
        record["programs"] += len(items)
        record["elapsed_s"] += time.monotonic() - start
        self.counts["samples"] += len(rows)
        self.counts["programs"] += len(items)
        self._run.save_record()
        return True

    def _compile(self, groups: Sequence[Sequence[CompileItem]]) -> list[dict[str, object]]:
        """Rows of groups of programs, each group in a separate module."""
        merged = [merge_programs([item.mlir for item in group]) for group in groups]
        rows: list[JsonObject] = []
        results = self._results(merged)
        for group, module, result in zip(groups, merged, results, strict=True):
            if isinstance(result, CompiledModule):
                rows += estimated_rows(result.hlo, group, self.device, module)
            elif len(group) > 1:
                # One program spoils the module: bisect, which finds it in log2(n) rounds.
                half = len(group) // 2
                rows += self._compile([group[:half], group[half:]])
            else:
                self._fail(group[0], result)
        return rows

    def _results(self, merged: Sequence[MergedModule]) -> list[CompiledModule | LoweringError]:
        data = [module.data for module in merged]
        try:
            return compile_programs(data, [(1, 1)] * len(data), self._target, self._settings)
        # A compiler that does not start will not do so for any program.
        except CompilerStartError:
            raise
        except CompilerError as error:
            if len(data) == 1:
                return [error]
            # One of them took too long or crashed the process: run each in a separate process.
            return [self._results([module])[0] for module in merged]

    def _fail(self, item: CompileItem, error: LoweringError) -> None:
        logger.info("%s on %s: %s", item.key, self.device.name, error.what)
        self._run.add_failure(item.key, error.what)
        self.counts["failed"] += 1
        self._run.record["failed"] += 1


def _groups(items: Sequence[CompileItem]) -> list[list[CompileItem]]:
    """Group the programs that share a module: ops, random programs, and all others one by one."""
    groups: dict[str, list[CompileItem]] = {}
    for item in items:
        groups.setdefault(item.key.split("-")[0] if item.merged else item.key, []).append(item)
    return list(groups.values())


def estimated_rows(
    hlo: str, items: Sequence[CompileItem], device: DeviceSpec, merged: MergedModule | None = None
) -> list[dict[str, object]]:
    """One row per kernel with an estimate; ``latency = cycles / clock``.

    Kernels without one (collectives, asynchronous copies, select-and-scatter, some fusions) get no
    row.

    Args:
        hlo: Optimised module.
        items: The programs in it, one if it is not merged.
        device: Device whose clock converts cycles to time.
        merged: Merged module, which assigns ops to programs; None for a single program.

    Raises:
        DeviceError: The device has no clock.
    """
    if not device.clock_hz:
        raise DeviceError("key 'boost_mhz' is missing to turn cycles into time", where=device.name)
    kernels, _ = extract_kernels(as_computed(parse_hlo(hlo), device.platform))
    owners = merged.owners(kernels) if merged else [0] * len(kernels)
    rows: dict[tuple[str, int], Row] = {}
    for kernel, owner in zip(kernels, owners, strict=True):
        if kernel.cycles <= 0 or not kernel.takes_time or owner < 0:
            continue
        item = items[owner]
        # Equal kernels of a program are one row. The estimate is deterministic: its quantiles are
        # those of a single execution.
        rows[kernel.hash, owner] = kernel_row(kernel, [kernel.cycles / device.clock_hz]) | {
            "level": "op" if item.family.startswith("op:") else "kernel",
            "source": SOURCE,
            "family": item.family,
            "program": item.key,
        }
    return list(rows.values())


def without_doubles(frame: pd.DataFrame) -> pd.DataFrame:
    """Merge rows to one for each kernel and device, with the quantiles of its estimates.

    ``repeats`` counts the occurrences of a kernel. The row belongs to a model's family if the
    kernel is part of one, so that splits by family hold out whole models.

    Args:
        frame: Rows with the dataset's columns.
    """
    generated = frame["family"].eq("random") | frame["family"].str.startswith("op:")
    order = np.argsort(generated.to_numpy(), kind="stable")
    frame = frame.iloc[order]
    groups = frame.groupby(["device", "kernel_hash"], sort=False)
    first = groups.head(1).set_index(["device", "kernel_hash"])
    # Each column's own quantile: rows that were merged before keep their spread.
    for column, q in (("latency_us_p10", 0.1), ("latency_us_p50", 0.5), ("latency_us_p90", 0.9)):
        first[column] = groups[column].quantile(q)
    first["repeats"] = groups["repeats"].sum()
    return first.reset_index()[list(frame.columns)]
