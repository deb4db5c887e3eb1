"""``opcast sweep``: evaluates many parallel plans and prints the Pareto front."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from .settings import SweepSettings


def run_sweep(console: Console, settings: SweepSettings) -> pd.DataFrame:
    """Evaluate plans, print the Pareto front of those that fit, and draw the plots.

    Args:
        console: Console to print to.
        settings: The workload, the clusters, the plans and the folder, from which it resumes.

    Returns:
        All evaluated plans, one row each.

    Raises:
        DatasetError: The folder holds a sweep of another workload or model.
        OpcastError: A workload, cluster, axis or model is unknown, or the workers fail.
    """
    from ..common.progress import counting, wrote
    from ..predict.cluster.step_case import StepsBy
    from ..predict.devices import cluster_device, generation_note
    from ..predict.render.parts import print_notes
    from ..predict.render.step import print_front
    from ..predict.sweep import run as sweeps
    from ..predict.sweep.job import SweepJob, nearest_miss
    from ..predict.sweep.reasons import reasons
    from ..predict.sweep.space import parse_grid
    from ..simulate.clusters.catalogue import find_cluster
    from ..simulate.step.workload import read_workload

    work = read_workload(settings.workload, list(settings.sizes))
    batches = list(settings.batches) or [work.batch]
    grid = parse_grid(settings.grid) if settings.grid else {}
    clusters, out = list(settings.clusters), settings.out
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
    # After the first results: ``Sweep`` refuses a folder of another sweep before anything is
    # overwritten.
    settings.save(out)
    if settings.plot is not None:
        sweeps.plot(rows, settings.plot)
        wrote(settings.plot, "plot")
    if settings.scaling is not None:
        from ..predict.sweep.scaling import plot_scaling

        plot_scaling(rows, settings.scaling)
        wrote(settings.scaling, "plot")
    print_front(console, sweeps.pareto(rows), len(rows), int(rows["fits"].sum()), settings.top)
    if missed := nearest_miss(own, rows):
        console.print(missed, soft_wrap=True)
    failed = rows[rows["error"] != ""]
    if len(failed):
        one = failed.iloc[0]
        console.print(
            f"{len(failed)} could not be evaluated and were left out, such as {one['plan']}: "
            f"{one['error']}"
        )
    # Once for each device, since all plans on it share its description.
    specs = {find_cluster(name).device: cluster_device(find_cluster(name)) for name in clusters}
    print_notes(console, [note for spec in specs.values() for note in generation_note(spec)])
    for line in reasons(rows[rows["error"] == ""]):
        console.print(f"because of {line}")
    wrote(out / "sweep.parquet", f"{len(rows)} plans")
    return rows
