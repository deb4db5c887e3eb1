"""Sweeps over plans, clusters and batch sizes: resumable, with a Pareto front at the end.

Results are written in pieces as soon as they are computed; a sweep restarted in the same folder
evaluates only what is missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...common.files import read_json, write_text
from ...common.parquet import read_table, write_table
from ...common.tasks import run_pieces
from ...common.types import JsonObject
from ...simulate.clusters.catalogue import find_cluster
from ...simulate.clusters.topology import Cluster
from ...simulate.step.plan import Plan
from .job import SweepJob, judge, rests_on
from .space import (
    AXES,
    Candidate,
    axis_values,
    candidates,
    chunks,
    make_plan,
    no_candidates,
    undominated,
    why_none,
)

#: Candidates per piece: the unit of work of a worker, and the most that an interruption loses.
#: Engineering estimate.
PIECE = 16
#: What the Pareto front minimises.
OBJECTIVES = ("step_us", "memory_bytes_per_device", "devices", "energy_j", "cost")
#: Objectives of a step, compared per sequence; else the smallest batch would win them all.
_OF_STEP = ("step_us", "energy_j", "cost")
_PARTS, _SETTINGS, _RESULT = "parts", "sweep.json", "sweep.parquet"
#: Key in the settings file for digests of models and clusters.
_RESTS_ON = "rests_on"
Rows = list[dict[str, object]]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Sweep:
    """A sweep and the folder of its results.

    Attributes:
        job: Settings that all candidates share.
        folder: Folder of the results.
        workers: Number of processes; 1 for this one.
        ray: Address of a Ray cluster; empty for none.
        prices: Dollars per device hour, by device; an empty name applies to all others.
    """

    job: SweepJob
    folder: Path
    workers: int = 1
    ray: str = ""
    prices: Mapping[str, float] = field(default_factory=dict)

    def run(
        self,
        items: Sequence[Candidate],
        progress: Progress | None = None,
        absent: Mapping[tuple[str, int], str] | None = None,
    ) -> pd.DataFrame:
        """Evaluate the candidates that have no result yet; return the results of all of them.

        After Ctrl-C, return the results so far, with the number of missing candidates in
        ``attrs["left"]``.

        Args:
            items: The candidates.
            progress: Called with the numbers of finished and of all candidates.
            absent: Clusters and batches without a candidate, with the reason; each gets a row with
                an ``error`` and no plan.

        Raises:
            PlanError: There are no candidates.
            DatasetError: The folder holds a sweep of another workload, model or power cap, or one
                of its clusters or models has changed since.
            OpcastError: Workers die repeatedly, or there is no Ray cluster.
        """
        if not items:
            raise no_candidates(absent)
        self._claim({item.cluster for item in items})
        done = set(self.results()["key"])
        left = [item for item in items if item.key not in done]
        count = len(items) - len(left)
        pieces = list(chunks(left, PIECE))
        try:
            for _, rows in run_pieces(judge, self.job, pieces, self.workers, self.ray):
                self._write(rows)
                count += len(rows)
                if progress is not None:
                    progress(count, len(items))
        except KeyboardInterrupt:
            if not count:
                raise
        results = self.results()
        wanted = {item.key for item in items}
        results = results[results["key"].isin(wanted)].sort_values(["step_us", "key"])
        results = self._priced(_with_absent(results, absent or {}))
        results.attrs["left"] = len(items) - count
        write_table(results, self.folder / _RESULT)
        return results

    def _priced(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Add the cost of each step; it is not stored, so that prices may change."""
        if not self.prices:
            return rows
        other = self.prices.get("", float("nan"))
        price = rows["device"].map(lambda name: self.prices.get(name, other)).astype(float)
        rate = price * rows["devices"] * 1e-6 / 3600.0
        cost = rate * rows["step_us"]
        tokens = rows["batch"] * self.job.workload.seq
        ends = {
            f"cost_{end}": rate * rows[f"{end}_us"] for end in ("lo", "hi") if f"{end}_us" in rows
        }
        return rows.assign(cost=cost, **ends, cost_per_million_tokens=cost / tokens * 1e6)

    def known(self, clusters: Iterable[str]) -> dict[str, JsonObject]:
        """Return the rows of the folder by key, for a sweep over these clusters."""
        self._claim(clusters)
        rows: Any = self.results().to_dict("records")
        return {row["key"]: row for row in rows}

    def judge_one(self, item: Candidate) -> JsonObject:
        """Evaluate one candidate in this process and write its row."""
        rows = judge(self.job, [item])
        self._write(rows)
        return rows[0]

    def results(self) -> pd.DataFrame:
        """Read all results in the folder."""
        parts = sorted((self.folder / _PARTS).glob("*.parquet"))
        frames = [read_table(part) for part in parts]
        if not frames:
            return pd.DataFrame({"key": pd.Series(dtype=str)})
        # A piece may have been written twice if it was given to a second worker.
        rows = pd.concat(frames, ignore_index=True).drop_duplicates("key")
        # Parts written before latency_us existed hold the same time as step_us only.
        rows = rows.assign(latency_us=rows["step_us"])
        # Tables written before plans could fail have no such column.
        return rows.assign(error=rows["error"].fillna("") if "error" in rows else "")

    def _write(self, rows: Rows) -> None:
        if rows:
            write_table(pd.DataFrame(rows), self.folder / _PARTS / f"{rows[0]['key']}.parquet")

    def _claim(self, clusters: Iterable[str]) -> None:
        """Record which sweep the folder holds, or check that it holds this one."""
        sizes = asdict(self.job.workload)
        # The batch is an axis, so sweeps over different batches may share a folder.
        sizes.pop("batch")
        settings = {**asdict(self.job), "workload": sizes}
        path = self.folder / _SETTINGS
        # Older folders have no power cap, and no digests.
        held = {"power_cap_w": None, **(read_json(path) if path.is_file() else settings)}
        before, now = held.pop(_RESTS_ON, {}), rests_on(self.job, clusters)
        if held != settings:
            raise DatasetError(
                "the folder holds a sweep of another workload, model or power cap",
                where=str(self.folder),
                hint="use another folder",
            )
        if changed := [name for name, own in now.items() if before.get(name, own) != own]:
            raise DatasetError(
                f"the folder's results are outdated; changed since: {', '.join(changed)}",
                where=str(self.folder),
                hint="use another folder, or delete this one",
            )
        write_text(path, json.dumps({**settings, _RESTS_ON: {**before, **now}}, indent=1))


def search(
    sweep: Sweep,
    clusters: Sequence[str],
    batches: Sequence[int],
    values: Mapping[str, Sequence[str]],
    trials: int,
    seed: int,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Search for the fastest plan that fits with Optuna's TPE sampler, instead of trying all.

    Args:
        sweep: Sweep that holds the results; existing ones are reused.
        clusters: Names or files of clusters.
        batches: Batch sizes.
        values: Values of some axes; the others take the defaults of each cluster.
        trials: Plans to try; invalid choices do not count, up to ten times as many.
        seed: Random seed of the search.
        progress: Called with the numbers of finished and of all trials.

    Raises:
        PlanError: No choice was valid.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # In memory: a search resumes from the rows on disk, and the seed repeats the proposals.
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    visited: dict[Candidate, None] = {}
    known = {name: find_cluster(name) for name in clusters}
    work = sweep.job.workload
    own = {name: axis_values(work, cluster, values) for name, cluster in known.items()}
    # One space for all trials, since the sampler needs fixed axes: the union over all clusters.
    # Values that the chosen cluster does not allow make an invalid choice.
    every = {axis: list(dict.fromkeys(chain(*(o[axis] for o in own.values())))) for axis in AXES}
    rows = sweep.known(clusters)
    per_token = work.seq * 1e-6
    for _ in range(10 * trials):
        if len(visited) >= trials:
            break
        trial = study.ask()
        choice = {axis: trial.suggest_categorical(axis, every[axis]) for axis in AXES}
        name = trial.suggest_categorical("cluster", list(clusters))
        batch = trial.suggest_categorical("batch", list(batches))
        plan: Plan | str = ""
        if all(value in own[name][axis] for axis, value in choice.items()):
            plan = make_plan(choice, replace(work, batch=batch), known[name])
        if isinstance(plan, str):
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            continue
        item = Candidate(name, batch, plan)
        row = rows.get(item.key) or sweep.judge_one(item)
        rows[item.key] = row
        if row["error"]:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            visited[item] = None
            continue
        # Time per token, so that batches compare. A plan that does not fit counts as ten times
        # slower (engineering estimate): worse than any that fits, yet its time still guides the
        # sampler.
        over = 1.0 if row["fits"] else 10.0
        # Logarithms: TPE models densities of the objective, and step times span orders of
        # magnitude.
        study.tell(trial, float(np.log(row["step_us"] / (batch * per_token) * over)))
        visited[item] = None
        if progress is not None:
            progress(len(visited), trials)
    return sweep.run(list(visited), absent=_absent(sweep, known, batches, values, visited))


def _absent(
    sweep: Sweep,
    clusters: Mapping[str, Cluster],
    batches: Sequence[int],
    values: Mapping[str, Sequence[str]],
    items: Iterable[Candidate],
) -> dict[tuple[str, int], str]:
    """Return clusters and batches without a candidate, with the reason."""
    present = {(item.cluster, item.batch) for item in items}
    work = sweep.job.workload
    found = {}
    for name, batch in product(clusters, batches):
        if (name, batch) not in present:
            why = why_none(work, clusters[name], batch, values)
            found[name, batch] = why or "no trial was a valid plan for it: increase --trials"
    return found


def _with_absent(rows: pd.DataFrame, absent: Mapping[tuple[str, int], str]) -> pd.DataFrame:
    """Add a row with an ``error`` and no figures for each cluster and batch without a plan."""
    rows = rows.reset_index(drop=True)
    if not absent:
        return rows
    # Settings keep their types: 0 and "" mark that there is no plan.
    none = {name: type(value)() for name, value in asdict(Plan()).items() if name in rows}
    more = [
        {
            **dict.fromkeys(rows, float("nan")),
            **none,
            "key": "",
            "cluster": name,
            "device": cluster.device,
            "batch": batch,
            "plan": "",
            "devices": cluster.size,
            "fits": False,
            "error": why,
        }
        for (name, batch), why in absent.items()
        for cluster in [find_cluster(name)]
    ]
    return pd.concat([rows, pd.DataFrame(more, columns=rows.columns)], ignore_index=True)


def grid(
    sweep: Sweep,
    clusters: Sequence[str],
    batches: Sequence[int],
    values: Mapping[str, Sequence[str]],
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Evaluate all valid combinations; for arguments see :func:`search`."""
    known = {name: find_cluster(name) for name in clusters}
    items = candidates(sweep.job.workload, known, batches, values)
    return sweep.run(items, progress, _absent(sweep, known, batches, values, items))


def pareto(frame: pd.DataFrame, objectives: Sequence[str] = OBJECTIVES) -> pd.DataFrame:
    """Select the Pareto front, fastest first: rows that fit and that no other row dominates.

    Times, energy and cost of steps are compared per sequence, so that batches compare.
    """
    fitting = frame[frame["fits"]]
    if fitting.empty:
        return fitting.reset_index(drop=True)
    # An objective that some rows lack (energy without a known power, cost without a price) cannot
    # order them.
    used = [o for o in objectives if o in fitting and fitting[o].notna().all()]
    points = fitting[used].astype(float)
    shared = [o for o in used if o in _OF_STEP]
    points[shared] = points[shared].div(fitting["batch"], axis=0)
    kept = points[undominated(points)].sort_values("step_us", kind="stable")
    return fitting.loc[kept.index].reset_index(drop=True)
