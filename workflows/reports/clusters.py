"""Report on clusters: errors of collectives, run time of simulations, scaling, best plans."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ...common.files import own_data

if TYPE_CHECKING:
    from rich.console import Console

    from ...models.operators import OpModel
    from ...predict.cluster.step import StepPrediction
    from ...simulate.step.workload import Workload
    from .settings import ClusterReportSettings

_DATA = own_data("workflows/reports/reports.yaml")["clusters"]
#: Models to search the best plan of, and plans of the 8B decoder by number of devices.
MODELS, SIZES = _DATA["models"], _DATA["sizes"]
#: Numbers of devices of the scaling plots, and the global batch of strong scaling; weak scaling has
#: one sequence per device.
SCALING, STRONG = (8, 16, 32, 64, 128, 256, 512), 64
#: Axes of the searches.
GRID, SCALING_GRID = _DATA["grid"], _DATA["scaling_grid"]
#: Cluster of the search for the best plans.
CLUSTER = "dgx-h100-x64"
#: Number of plans to print for each model.
_BEST = 5
#: Groupings of the tables of collectives, for held-out rows and for held-out machines.
KNOWN_BY = (("source",), ("source", "size"), ("machine", "size"), ("op",), ("fabric", "world_size"))
UNSEEN_BY = (("source",), ("machine",), ("machine", "size"), ("fabric", "world_size"))

Rows = list[dict[str, object]]


def run_cluster_report(console: Console, settings: ClusterReportSettings) -> dict[str, object]:
    """Compute and print all parts, and write figures and plots; earlier results are reused.

    Args:
        console: Console to print to.
        settings: The measurements, the models, the sizes and the output.

    Returns:
        The figures, as written to ``settings.out``.

    Raises:
        DatasetError: ``settings.published`` contains no measured collectives.
    """
    from ...common.files import write_text
    from ...common.progress import wrote

    settings.save(settings.folder)
    figures: dict[str, object] = {}
    if settings.published is None:
        console.print("collectives: no measurements given; --published DIR")
    else:
        errors = collective_errors(console, settings.published, settings.folder)
        figures["collectives"] = print_collectives(console, errors)
    figures["cost"] = _print(console, simulation_cost(), "cost of one step, 8B decoder")
    figures["sanity"] = _print(console, orders_of_magnitude(), "orders of magnitude")
    figures["scaling"] = _print_scaling(console, *scaling(settings))
    figures["best"] = [
        _print_best(console, name, best_plans(settings, name)) for name in settings.models or MODELS
    ]
    write_text(settings.out, json.dumps(figures, indent=1))
    wrote(settings.out, f"figures; plots in {settings.folder}")
    return figures


def collective_errors(console: Console, published: Path, folder: Path) -> pd.DataFrame:
    """Compute errors of collectives by row with :func:`~opcast.models.collectives.study.study`.

    Fits take minutes, so the errors are stored in the folder until the measurements change.
    """
    from ...common.errors import DatasetError
    from ...common.parquet import kept_table
    from ...models.collectives.measurements import read_collectives
    from ...models.collectives.study import study

    files = sorted({p.parent for p in published.rglob("collectives*.csv*")})
    if not files:
        raise DatasetError("no collectives*.csv here", where=str(published))
    rows, find = read_collectives(files)
    digest = hashlib.sha256(rows.to_csv(index=False).encode()).hexdigest()[:16]
    return kept_table(
        folder / f"collectives-{digest}.parquet",
        lambda: study(rows, find, lambda text: console.print(f"collectives: {text}")),
    )


def simulation_cost() -> pd.DataFrame:
    """Measure time and memory of simulating a step by number of devices, in a new process."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    # Spawned, because a fork would inherit the memory peak of earlier parts.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pd.DataFrame(pool.submit(_measure_cost).result())


def _measure_cost() -> list[dict[str, object]]:
    import resource

    def peak() -> float:
        # Linux reports KiB.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0

    before = peak()
    operators, rows = _operators(), []
    for devices, text in SIZES.items():
        # The batch grows with the cluster, and is large enough for micro-batches on small ones.
        work = replace(_workload("8B decoder"), batch=max(32, devices // 4))
        loaded, times = peak(), []
        # The first run includes one-time costs; the minimum of three is that of a further step.
        for _ in range(3):
            start = time.perf_counter()
            _predict(work, f"dgx-h100-x{devices}", text, operators)
            times.append(time.perf_counter() - start)
        rows.append(
            {
                "devices": devices,
                "plan": text,
                "seconds": min(times),
                "first_s": times[0],
                "more_mb": (peak() - loaded) / 1e6,
                "process_mb": peak() / 1e6,
                "bare_mb": before / 1e6,
                "cores": os.cpu_count(),
            }
        )
    return rows


def orders_of_magnitude() -> pd.DataFrame:
    """Compare predictions with back-of-the-envelope estimates."""
    from ...models.core.registry import OPERATOR_MODEL
    from ...predict.cluster.deployment import Deployment
    from ...predict.cluster.serving import ServingPredictor
    from ...predict.cluster.serving_case import LoadSpec
    from ...predict.operator.serving_operators import load_serving_operators
    from ...simulate.serving.served import ServedModel

    operators, work = _operators(), replace(_workload("8B decoder"), batch=256)
    # HBM3 bandwidth of an H100 SXM in bytes/s (NVIDIA's data sheet).
    spec_bytes, rows = 3.35e12, []
    step = _predict(work, "dgx-h100-x128", "fsdp=128", operators)
    # A lower bound: every model FLOP at the data sheet's dense bf16 peak.
    least = work.model_flops() / 128 / step.peak_flops
    rows.append(_row("8B step on 128 H100, s", least, step.step.total, "FLOPs at the peak"))
    # Middle of the usual range for dense decoders.
    rows.append(_row("its MFU", 0.425, least / step.step.total, "0.35 to 0.5 is usual"))
    # Two bytes per parameter. A decode step reads all weights once, except the embedding table, of
    # which it reads a row per token.
    weights = 2.0 * (work.parameters - work.table_parameters)
    serving = ServingPredictor(load_serving_operators(OPERATOR_MODEL))
    one = LoadSpec(prompt="128", output="64", concurrency=1, count=1)
    tokens = serving.predict(Deployment(ServedModel(work), "h100-sxm"), one).figures["tpot/mean"]
    rows.append(
        _row(
            "8B decode on one H100, ms per token",
            1e3 * weights / spec_bytes,
            1e3 * tokens.value,
            "weights over the bandwidth",
        )
    )
    # Bytes of a layer's bf16 parameters, which FSDP gathers before the layer runs.
    layer = 2.0 * work.layer_parameters
    gather = _collective("all_gather", layer / 64, CLUSTER)
    rows.append(
        _row(
            "gather of a layer over 64 H100, ms",
            # A node of 8 already holds 8/64; the rest arrives over 8 ports of 50 GB/s (400 Gbit/s
            # InfiniBand).
            1e3 * layer * 56 / 64 / 400e9,
            1e3 * gather,
            "bytes into a node over its 8 ports",
        )
    )
    inside = _collective("all_reduce", 2.0**30, "h100-sxm-x8")
    rows.append(
        _row(
            "all-reduce of 1 GiB in a node, ms",
            # Ring bytes 2 (n-1)/n over NVLink 4, 450 GB/s in one direction (H100 data sheet: 900
            # both ways).
            1e3 * 2 * 7 / 8 * 2**30 / 450e9,
            1e3 * inside,
            "ring bytes over NVLink",
        )
    )
    return pd.DataFrame(rows)


def _row(what: str, least: float, predicted: float, by: str) -> dict[str, object]:
    ratio = predicted / least
    return {"what": what, "by_hand": least, "predicted": predicted, "hand": by, "ratio": ratio}


def scaling(settings: ClusterReportSettings) -> tuple[pd.DataFrame, Path]:
    """Find the best plans of the 8B decoder by number of devices; plot strong and weak scaling."""
    from ...predict.sweep.plots import best_by_size, plot_scaling

    frames = []
    for name in ("strong", "weak"):
        for devices in settings.scaling or SCALING:
            batch = STRONG if name == "strong" else devices
            frames.append(
                _sweep(settings, "8B decoder", [f"dgx-h100-x{devices}"], batch, SCALING_GRID)
            )
    # Strong and weak scaling coincide where the number of devices equals the batch.
    rows = pd.concat(frames, ignore_index=True).drop_duplicates("key")
    path = settings.folder / "scaling.png"
    plot_scaling(rows, path)
    return best_by_size(rows), path


def best_plans(settings: ClusterReportSettings, name: str) -> pd.DataFrame:
    """Evaluate a model's plans on :data:`CLUSTER`, and plot their Pareto front."""
    from ...predict.sweep.plots import plot

    batch = _workload(name).batch
    plans = _sweep(settings, name, [CLUSTER], batch, settings.grid or GRID)
    plot(plans, settings.folder / f"{name.replace(' ', '-')}.png")
    return plans


def _sweep(
    settings: ClusterReportSettings,
    name: str,
    clusters: Sequence[str],
    batch: int,
    values: Mapping[str, Sequence[str]],
) -> pd.DataFrame:
    from ...models.core.registry import OPERATOR_MODEL
    from ...predict.sweep.job import SweepJob
    from ...predict.sweep.run import Sweep, grid

    folder = settings.folder / f"sweep-{name.replace(' ', '-')}"
    job = Sweep(SweepJob(_workload(name), model=OPERATOR_MODEL), folder, settings.workers)
    return grid(job, clusters, [batch], values)


def _workload(name: str) -> Workload:
    from ...simulate.step.named_workloads import read_workload

    model, *settings = MODELS[name]
    return read_workload(model, settings)


def _operators() -> OpModel | None:
    from ...models.core.registry import OPERATOR_MODEL
    from ...predict.operator.step_operators import load_step_model

    return load_step_model(OPERATOR_MODEL)


def _predict(work: Workload, cluster: str, plan: str, operators: OpModel | None) -> StepPrediction:
    from ...predict.cluster.step import StepPredictor
    from ...simulate.clusters.catalogue import find_cluster
    from ...simulate.step.plan import parse_plan

    return StepPredictor(find_cluster(cluster), operators).predict(work, parse_plan(plan))


def _collective(kind: str, size: float, cluster: str) -> float:
    from ...predict.cluster.network import learned_time
    from ...simulate.clusters.catalogue import find_cluster

    own = find_cluster(cluster)
    return float(np.asarray(learned_time(kind, size, range(own.size), own).value))


def print_collectives(console: Console, errors: pd.DataFrame) -> dict[str, Rows]:
    """Print errors of collectives, beside those of simpler models."""
    from ...models.collectives.study import KNOWN, UNSEEN, summary

    tables = {}
    for groups, columns, title in (
        (KNOWN_BY, KNOWN, "collectives, held-out rows"),
        (UNSEEN_BY, UNSEEN, "collectives, machines held out, with four sizes each, A100 only"),
    ):
        for by in groups:
            table = summary(errors, by, columns).reset_index()
            name = f"{title}, error in % by {', '.join(by)}"
            tables[name] = _print(console, table, name)
    return tables


def _print_scaling(console: Console, best: pd.DataFrame, path: Path) -> Rows:
    """Print the best plan by number of devices, with strong and weak efficiency."""
    table = best.assign(step_s=best["step_us"] / 1e6).sort_values(["batch", "devices"])[
        ["devices", "batch", "step_s", "strong", "weak", "plan"]
    ]
    rows = _print(console, table, "scaling of the 8B decoder, best plans")
    console.print(f"{path}: strong and weak scaling", highlight=False)
    return rows


def _print_best(console: Console, name: str, frame: pd.DataFrame) -> dict[str, object]:
    """Print the fastest plans that fit, and the reasons for their order."""
    from ...predict.sweep.reasons import reasons, runner_up

    fitting = frame[frame["fits"]].sort_values("step_us")
    table = pd.DataFrame(
        {
            "plan": fitting["plan"],
            "step_s": fitting["step_us"] / 1e6,
            "compute_s": fitting["compute_us"] / 1e6,
            "exposed_s": fitting["exposed_communication_us"] / 1e6,
            "bubble_s": fitting["bubble_us"] / 1e6,
            "host_s": fitting["host_us"] / 1e6,
            "mfu": fitting["mfu"],
            "gib": fitting["memory_bytes_per_device"] / 2**30,
        }
    ).head(_BEST)
    cluster = str(frame["cluster"].iloc[0])
    title = f"{name}, batch {int(frame['batch'].iloc[0])}, on {cluster}"
    title += f": best of {len(frame)} plans, {len(fitting)} of which fit"
    rows = _print(console, table, title)
    lines = [*runner_up(frame), *reasons(frame)]
    for line in lines:
        console.print(f"  {line}", highlight=False, markup=False)
    counts = {"plans": len(frame), "fit": len(fitting)}
    return {"model": name, **counts, "best": rows, "reasons": lines}


def _print(console: Console, frame: pd.DataFrame, title: str) -> Rows:
    """Print a table, and return its rows as plain data."""
    from rich.table import Table
    from rich.text import Text

    table = Table(*map(str, frame.columns), title=title, title_justify="left", box=None)
    for values in frame.to_numpy(dtype=object):
        table.add_row(*(Text(_text(v)) for v in values))
    console.print(table)
    # JSON has no NaN.
    rows = frame.astype(object).where(frame.notna(), None).to_numpy().tolist()
    return [dict(zip(map(str, frame.columns), row, strict=True)) for row in rows]


def _text(value: object) -> str:
    if isinstance(value, float):
        # NaN: the group has no such figure.
        return "–" if value != value else f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return str(value)
