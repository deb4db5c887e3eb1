"""Evaluate many parallel plans and print the Pareto front (``opcast sweep``)."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from ..common.errors import DatasetError, DeviceError
from ..common.options import Option, PowerCapOpt, Ray, folder, plot_file
from ..common.options import Settings as Sizes
from ..predict.cluster.step_case import StepsBy
from .settings import Prices, Settings

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console


@dataclass(frozen=True)
class SweepSettings(Settings, StepsBy):
    """Settings of ``opcast sweep``.

    Attributes:
        workload: Family of the model, or a YAML file with family and sizes.
    """

    command: ClassVar[str] = "sweep"
    clusters: Annotated[
        Sequence[str], Option("Cluster name or file; may be given again.", ("--cluster",))
    ]
    out: Annotated[Path, Option("Results folder; a sweep resumes from it.", check=folder)]
    workload: str = ""
    sizes: Sizes = ()
    batches: Annotated[
        Sequence[int], Option("Batch size; may be given again.", ("--batch",), least=1)
    ] = ()
    grid: Annotated[
        str,
        Option("Values of each axis, such as tp=4/8,recompute=none/full, or a YAML file."),
    ] = ""
    trials: Annotated[
        int, Option("Number of plans to search with Optuna; 0 evaluates all.", least=0)
    ] = 0
    prices: Prices = field(default_factory=dict)
    power_cap_w: PowerCapOpt = None
    workers: Annotated[int, Option("Worker processes.", least=1)] = 1
    ray: Ray = ""
    seed: Annotated[int, Option("With --trials: random seed of the search.", least=0)] = 0
    top: Annotated[int, Option("Number of plans to print.", least=1)] = 15
    plot: Annotated[Path | None, Option("Plot memory against time.", check=plot_file)] = None
    scaling: Annotated[
        Path | None, Option("Plot strong and weak scaling over the clusters.", check=plot_file)
    ] = None

    def as_step(self, row: pd.Series) -> str:
        """Format a row of the sweep as options of ``opcast simulate``, for copying."""
        from ..simulate.step.settings import sizes_of

        sizes = {**sizes_of(self.sizes), "batch": row["batch"]}
        model = "--hf" if self.workload.lower().endswith(".json") else "--workload"
        words = [model, self.workload, "--cluster", row["cluster"]]
        words += ["--set", ",".join(f"{name}={value}" for name, value in sizes.items())]
        for own in fields(StepsBy):
            if (value := getattr(self, own.name)) != own.default:
                words += [f"--{own.name}"] if value is True else [f"--{own.name}", str(value)]
        if self.power_cap_w is not None:
            words += ["--power-cap", f"{self.power_cap_w:g}W"]
        return shlex.join([*words, "--plan", row["plan"]])


def run_sweep(console: Console, settings: SweepSettings) -> pd.DataFrame:
    """Evaluate plans, print the Pareto front of those that fit, and draw the plots.

    Args:
        console: Console to print to.
        settings: The workload, the clusters, the plans, and the folder to resume from.

    Returns:
        A row for each evaluated plan, and for each cluster and batch without one.

    Raises:
        DatasetError: The folder contains a sweep of another workload or model, or scaling is
            requested for clusters of one size.
        OpcastError: A workload, cluster, axis or model is unknown, or the workers fail.
    """
    from ..common.progress import counting, wrote
    from ..predict.devices import cluster_device, generation_note
    from ..predict.render.parts import print_notes
    from ..predict.render.step import print_clusters, print_front
    from ..predict.sweep import plots
    from ..predict.sweep import run as sweeps
    from ..predict.sweep.job import SweepJob, front_notes, nearest_miss
    from ..predict.sweep.reasons import reasons
    from ..predict.sweep.space import parse_grid
    from ..simulate.clusters.catalogue import find_cluster
    from ..simulate.step.named_workloads import read_workload

    work = read_workload(settings.workload, list(settings.sizes))
    batches = list(settings.batches) or [work.batch]
    grid = parse_grid(settings.grid) if settings.grid else {}
    clusters, out = list(settings.clusters), settings.out
    known = [find_cluster(name) for name in clusters]
    specs = {own.device: cluster_device(own) for own in known}
    _check_asked(settings, {own.size for own in known}, {spec.name for spec in specs.values()})
    by = {f.name: getattr(settings, f.name) for f in fields(StepsBy)}
    own = SweepJob(work, settings.power_cap_w, **by)
    job = sweeps.Sweep(own, out, settings.workers, settings.ray, settings.prices)
    with counting("plans") as advance:
        if settings.trials:
            rows = sweeps.search(
                job, clusters, batches, grid, settings.trials, settings.seed, advance
            )
        else:
            rows = sweeps.grid(job, clusters, batches, grid, advance)
    # Only now, because ``Sweep`` first refuses a folder of another sweep.
    settings.save(out)
    plans, front = rows[rows["plan"] != ""], sweeps.pareto(rows)
    print_front(console, front, len(plans), int(rows["fits"].sum()), settings.top)
    if len(front):
        best, several = front.iloc[0], front["batch"].nunique() > 1
        what = "fastest for each sequence" if several else "fastest"
        # Not wrapped, so that it can be copied.
        console.print(f"{what}: {settings.as_step(best)}", soft_wrap=True)
    if len(rows.groupby(["cluster", "batch"])) > 1:
        print_clusters(console, rows)
    if missed := nearest_miss(own, rows, settings.as_step):
        console.print(missed, soft_wrap=True)
    failed = plans[plans["error"] != ""]
    if len(failed):
        one = failed.iloc[0]
        console.print(f"{len(failed)} plans failed, such as {one['plan']}: {one['error']}")
    notes = [note for spec in specs.values() for note in generation_note(spec)]
    print_notes(console, list(dict.fromkeys([*notes, *front_notes(own, front)])))
    for line in reasons(rows[rows["error"] == ""]):
        console.print(f"because of {line}")
    wrote(out / "sweep.parquet", f"{len(plans)} plans")
    if settings.plot is not None:
        plots.plot(rows, settings.plot)
        wrote(settings.plot, "plot")
    if settings.scaling is not None:
        plots.plot_scaling(rows, settings.scaling)
        wrote(settings.scaling, "plot")
    return rows


def _check_asked(settings: SweepSettings, sizes: Collection[int], devices: Collection[str]) -> None:
    """Check scaling and prices against the clusters, before hours of evaluation.

    Args:
        settings: Settings of the sweep.
        sizes: Numbers of devices of its clusters.
        devices: Names of their devices.

    Raises:
        DatasetError: Scaling is requested for clusters of one size.
        DeviceError: A price is given for a device that no cluster has.
    """
    if settings.scaling is not None and len(sizes) < 2:
        raise DatasetError(
            "--scaling needs clusters of at least two sizes", hint="give --cluster several times"
        )
    if idle := set(settings.prices) - {"", *devices}:
        raise DeviceError(
            f"--price is for {', '.join(sorted(idle))}, which no cluster has",
            hint=f"give prices of {' and '.join(sorted(devices))}",
        )
