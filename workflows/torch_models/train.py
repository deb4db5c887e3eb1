"""Train factors on PyTorch's kernels with tables of whole models.

From large tables, a few models of each family are drawn, each in every way of running.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ... import __version__
from ...common.errors import DatasetError, DeviceError
from ...common.progress import counting
from ...common.tables_text import in_percent, print_frame
from ...features.operators.physics import fitted
from ...models.program.pytorch import (
    COSTS,
    UNSEEN,
    CpuTorchModel,
    Measured,
    TorchEffects,
    TorchModel,
    end_keys,
    torch_context,
    widened,
)
from ...models.trust.calibrator import Calibrator, Ends
from ...predict.cluster.case_table import read_cases, read_rows
from ...predict.devices import resolve_device
from ...predict.locate import OPERATOR_MODEL, model_hash
from ...predict.operator.aten_costs import measured_costs
from ...predict.operator.torch_framework import operator_bundle
from ..judging import FOLDS, WIDTHS, keep_learned, left_out_rows, parts_of, print_reasons
from .rows import Asking, ModelRow, model_row, seconds_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from ..settings import TableSettings


#: Columns that define a way of running.
_WAY = ("device", "framework", "mode", "layout")
#: Optional columns of a table, with defaults.
_ABSENT: Mapping[str, str | float] = {
    "framework": "",
    "mode": "",
    "layout": "",
    "batch": 1,
    "img_size": 0,
    "param_m": 0.0,
}
#: Models of a family per drawn model. Engineering choice.
_LEAST = 6
#: What is held out for the intervals of known and of new chips.
_LEFT = {"known": "family", "new": "chip"}


def drawn(table: pd.DataFrame, samples: int, seed: int = 0) -> pd.DataFrame:
    """Draw a sample of the rows of a table.

    Candidates are the smaller half of the models with the most ways of running, which are fastest
    to record. If possible, the rows of a model have the same batch and image size, so that they
    share a recording. Of rows that differ only by release, one is drawn.

    Args:
        table: Table with a row for each run, with ``family`` and the parameters ``param_m``.
        samples: Maximum models per family, at most a sixth of it but at least one.
        seed: Random seed.

    Returns:
        Rows of the table, in its order.
    """
    columns, table = list(table), table.copy()
    for name, default in _ABSENT.items():
        if name not in table:
            table[name] = default
    table = table.fillna({"param_m": 0.0})
    table["way"] = table[list(_WAY)].astype(str).agg("/".join, axis=1)
    # CPUs have a separate model.
    platforms = table["device"].map({d: platform_of(d) for d in table["device"].unique()})
    found = [at for _, own in table.groupby(platforms) for at in _drawn(own, samples, seed)]
    return table.loc[sorted(found), columns]


def platform_of(device: str) -> str:
    """Platform of a device by name; empty if there is no such device."""
    try:
        return resolve_device(device, {}).platform
    except DeviceError:
        return ""


def _drawn(table: pd.DataFrame, samples: int, seed: int) -> list[int]:
    """Labels of drawn rows."""
    rng = np.random.default_rng(seed)
    models = table.groupby("model")
    ways, size = models["way"].nunique(), models["param_m"].first()
    rounds: list[list[str]] = [[] for _ in range(samples)]
    for _, own in table.groupby("family"):
        names = own["model"].unique()
        most = ways[names].index[ways[names] >= ways[names].max()]
        best = sorted(most[size[most] <= size[most].median()])
        picked = rng.choice(best, min(len(best), samples), replace=False)
        for at, name in enumerate(picked[: max(1, len(names) // _LEAST)]):
            rounds[at].append(str(name))
    for own_round in rounds:
        rng.shuffle(own_round)
    order = [name for own in rounds for name in own]
    return [at for name in order for at in _rows(table[table["model"] == name], rng)]


def _rows(own: pd.DataFrame, rng: np.random.Generator) -> list[int]:
    """Labels of a row for each way of running a model."""
    found = []
    for _, rows in own.groupby("mode"):
        sizes = rows["batch"].astype(str) + "x" + rows["img_size"].astype(str)
        common = rows.groupby(sizes)["way"].nunique().sort_values(ascending=False).index[0]
        for _, same in rows.groupby("way"):
            alike = same[sizes[same.index] == common]
            alike = alike if len(alike) else same
            found.append(alike.index.to_list()[int(rng.integers(len(alike)))])
    return found


def measured_models(
    rows: Sequence[ModelRow], seconds: Sequence[object]
) -> tuple[Measured, list[ModelRow]]:
    """Select rows to train on, with their seconds by class of cost.

    Args:
        rows: The rows.
        seconds: Predictions of the rows, from :func:`~.rows.seconds_of`.

    Raises:
        DatasetError: No row can be used.
    """
    found, kept = [], []
    for row, own in zip(rows, seconds, strict=True):
        if not isinstance(own, dict) or not np.isfinite(row.measured_s):
            continue
        times = [float(own.get(cost, 0.0)) for cost in COSTS]
        # If the host may take longer than the kernels, the time is not that of the kernels.
        if own["host"] * fitted("python").more < sum(times):
            found.append(times)
            kept.append(row)
    if not found:
        raise DatasetError(
            "no row with a measured time can be used", hint="give latency_ms in milliseconds"
        )
    contexts, bundle = [], operator_bundle("default")
    apart = np.zeros((len(kept), len(COSTS)), bool)
    for row, own in zip(kept, apart, strict=True):
        (framework, _, release), spec = row.framework.partition("@"), resolve_device(row.device, {})
        contexts.append(torch_context(spec, framework, release))
        if contexts[-1]["leading"] == "yes" and bundle is not None:
            measured = measured_costs(spec, bundle)
            own[:] = [cost in measured for cost in COSTS]
    logs = np.log([row.measured_s for row in kept])
    groups = np.array([row.case.model for row in kept])
    return Measured(np.array(found), contexts, logs, groups, apart), kept


def train_models(
    data: Measured,
    rows: Sequence[ModelRow],
    families: Sequence[str],
    seed: int = 0,
    kind: type[TorchModel] = TorchModel,
) -> tuple[TorchModel, dict[str, np.ndarray]]:
    """Fit effects and calibrate intervals.

    Args:
        data: Measured models.
        rows: Their rows.
        families: Family of each row.
        seed: Random seed of the folds of families.
        kind: Class of the model, for GPUs or CPUs.

    Returns:
        The model, and for each way of holding out the errors ``log(measured / predicted)`` and the
        bounds of the intervals, shape ``(n, 3)``; NaN if there are no other rows, and for bounds
        also if those of the kernels apply.
    """
    left = left_out_keys(rows, families, seed)
    trained = np.array([row.case.mode == "train" for row in rows])
    found = {name: np.full((len(rows), 3), np.nan) for name in left}
    parts = list(parts_of(left))
    fits = [data.fit(part.learn) for part in parts]
    for part, effects in zip(parts, fits, strict=True):
        found[part.name][part.judge, 0] = data.errors(effects)[part.judge]
    errors = {name: own[:, 0].copy() for name, own in found.items()}
    for part in parts:
        if part.name == _LEFT["known"]:
            # A chip without other rows is not known.
            away = part.judge & ~np.isin(left["chip"], left["chip"][part.learn])
            errors[part.name][away] = np.nan
    keys = {
        known: np.array(
            [end_keys(known, *own) for own in zip(data.contexts, trained.tolist(), strict=True)]
        )
        for known in _LEFT
    }

    def made(effects: TorchEffects, learn: np.ndarray) -> TorchModel:
        model = kind(effects)
        model.ends = _ends(errors, keys, left["chip"], learn)
        own = data.predicted(effects)[learn]
        shares = (own / own.sum(axis=1, keepdims=True)).max(axis=0)
        model.shares = {cost: float(s) for cost, s in zip(COSTS, shares, strict=True) if s > 0.0}
        model.provenance = {
            "rows": int(learn.sum()),
            "models": int(pd.Series([row.case.model for row in rows])[learn].nunique()),
            "devices": sorted(set(left["chip"][learn].tolist())),
            "vendors": sorted({data.contexts[at]["all"] for at in np.flatnonzero(learn)}),
        }
        return model

    for part, effects in zip(parts, fits, strict=True):
        model, seconds = made(effects, part.learn), data.predicted(effects)
        for at in np.flatnonzero(part.judge):
            own = dict(zip(COSTS, seconds[at].tolist(), strict=True))
            span = model.interval(own, data.contexts[at], bool(trained[at]), kind.narrow)
            found[part.name][at, 1:] = span or np.nan
    everything = np.ones(len(rows), bool)
    return made(data.fit(everything), everything), found


def left_out_keys(
    rows: Sequence[ModelRow], families: Sequence[str], seed: int = 0
) -> dict[str, np.ndarray]:
    """Value of each row for each way of holding out: strings, shape ``(n,)``."""
    codes = pd.factorize(pd.Series(families))[0]
    order = np.random.default_rng(seed).permutation(codes.max() + 1)
    return {
        "family": (order[codes] % FOLDS).astype(str),
        "chip": np.array([row.device for row in rows]),
        "mode": np.array([row.case.mode for row in rows]),
        "layout": np.array([row.case.layout for row in rows]),
        "release": np.array([row.case.torch for row in rows]),
    }


def _ends(
    errors: Mapping[str, np.ndarray],
    keys: Mapping[str, np.ndarray],
    chips: np.ndarray,
    learn: np.ndarray,
) -> dict[str, Ends]:
    """Calibrate bounds of intervals: for known chips on held-out families, for new ones on chips.

    A new chip may resemble any of the measured ones, which have equal weights.

    Args:
        errors: Errors of held-out rows for each way of holding out.
        keys: Keys of bounds for ``known`` and ``new`` chips, most specific first, ``(n, keys)``.
        chips: Chip of each row.
        learn: Mask of the rows to use.
    """
    found = Calibrator[str]()
    for known, way in _LEFT.items():
        at = np.flatnonzero(learn & np.isfinite(errors[way]))
        levels, group = [level.tolist() for level in keys[known][at].T], None
        if known == "new":
            # There are too few chips to treat those with leading products separately.
            levels = [[key.replace("/leading", "") for key in level] for level in levels]
            group = chips[at]
        found.pool(errors[way][at], *levels, group=group)
        found.pool(errors[way][at], levels[-1], least=1, group=group)
    # Chips with leading products last, because their bounds must contain the others.
    for key in sorted((k for k in found.ends if k.startswith("known")), key=_is_leading):
        new = key.replace("known", "new", 1)
        for own in (key, new) if _is_leading(key) else ():
            found.widen(own, own.replace("/leading", ""))
        # Bounds for new chips contain those for known ones.
        found.widen(new, key)
    # The prediction error of a further chip includes that of the mean of n chips.
    count = len(set(chips[learn]))
    more = (1.0 + 1.0 / count) ** 0.5 if count > 1 else 1.0
    for key in [k for k in found.ends if k.startswith("new")]:
        found.ends[key] = (more * found.ends[key][0], more * found.ends[key][1])
    leads = np.array([_is_leading(key) for key in keys["new"][:, 0]])
    for kind, alike in (("new", np.full(len(leads), True)), ("new/leading", leads)):
        if len(set(chips[learn & alike])) == 1:
            # The differences between chips cannot be estimated from one.
            found.ends.setdefault(kind, found.ends["new"])
            for key in [k for k in found.ends if k.startswith(kind)]:
                found.ends[key] = widened(found.ends[key], UNSEEN)
    return found.ends


def _is_leading(key: str) -> bool:
    return "/leading" in key


def run_train_models(console: Console, settings: TableSettings) -> dict[str, TorchModel]:
    """Train on tables of whole models, print held-out errors, save and track.

    Returns:
        The models by platform. That for GPUs is saved to the file of the settings, that for CPUs
        beside it.
    """
    read: list[tuple[ModelRow, str, str]] = []
    for path in settings.tables:
        table = read_cases(path, "models")
        if settings.samples is not None:
            note = "using all rows, because there is no column family to sample by"
            if "family" in table:
                table = drawn(table, settings.samples, settings.seed)
                note = f"{len(table)} rows are drawn"
            console.print(f"{path.stem}: {note}", highlight=False)
        families = table["family"] if "family" in table else pd.Series("", table.index)
        for row, family in zip(read_rows(table, model_row)[0], families, strict=True):
            if row is not None and np.isfinite(row.measured_s):
                # Presets are named model/part.
                read.append((row, path.stem, str(family or row.case.model.partition("/")[0])))
    rows = [row for row, _, _ in read]
    if len({row.id for row in rows}) < len(rows):
        raise DatasetError("several rows have the same id", hint="give each row a different id")
    kept = settings.out.with_name(f"{settings.out.stem}-seconds.jsonl")
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    identity = f"{__version__} {model_hash(OPERATOR_MODEL)}"
    with counting("recording models") as show:
        seconds = Asking("default", settings.ray, kept, identity, seconds_of).predict(rows, show)
    reasons = [own for own in seconds if isinstance(own, str)]
    print_reasons(console, reasons, "rows not used")
    of_row = {row.id: (table, family) for row, table, family in read}
    platforms = [platform_of(row.device) for row in rows]
    found = {}
    for platform, kind in (("gpu", TorchModel), ("cpu", CpuTorchModel)):
        at = [i for i, own in enumerate(platforms) if own == platform]
        if not at and (platform != "gpu" or set(platforms) & {"cpu"}):
            continue
        data, own = measured_models([rows[i] for i in at], [seconds[i] for i in at])
        names = [of_row[row.id][1] for row in own]
        model, judged = train_models(data, own, names, settings.seed, kind)
        known = pd.DataFrame({"id": [row.id for row in own], "metric": "latency"})
        tables = [of_row[row.id][0] for row in own]
        known["table"] = pd.Categorical(tables, list(dict.fromkeys(tables)))
        known["measured"] = [row.measured_s for row in own]
        left = left_out_rows(known, judged)
        figures = left_out_figures(left)
        title = f"held-out models ({platform}), errors in %"
        print_frame(console, in_percent(figures), title)
        named = figures.assign(left_out=figures["table"] + "/" + figures["left_out"])
        long = named.melt("left_out", ["mape", "median_ape"])
        if platform == "cpu":
            out, into = settings.out, settings.left_out
            into = into and into.with_stem(f"{into.stem}-cpu")
            settings = replace(settings, out=out.with_stem(f"{out.stem}-cpu"), left_out=into)
        keep_learned(console, settings, model, len(model.effects.values), left, figures, long)
        found[platform] = model
    return found


def left_out_figures(left: pd.DataFrame) -> pd.DataFrame:
    """Held-out errors by ``table`` and by what is held out; widths are medians.

    Args:
        left: From :func:`~opcast.workflows.judging.left_out_rows`.
    """
    by = left.groupby(["table", "left_out"], observed=True)
    return by.agg(**WIDTHS).reset_index().astype({"table": str, "left_out": str})
