"""Adapt a model to a device from a dataset, as if its rows were measured one by one.

Samples are chosen by their expected information gain; the same number of random samples is the
baseline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ..common.errors import DatasetError
from ..common.progress import stages, tracked, wrote
from ..features.devices.identity import identified
from ..predict.locate import OPERATOR_MODEL
from .measured.calibration_samples import FAR, check_unseen, far_off
from .train_operators import TRAINING

if TYPE_CHECKING:
    from rich.console import Console

    from ..features.dataset import Dataset
    from ..features.devices.device import DeviceSpec
    from ..models.core.base import KernelPrediction, ModelBundle
    from ..models.core.kernel_table import KernelTable
    from ..models.cost_model import CostModel
    from ..models.operators import OpModel
    from ..models.operators.curves import Asked, Curve, Trial
    from .settings import CalibrateSettings

#: Most samples of a family relative to the mean, when samples are allocated by share of the time.
#: Engineering estimate: it bounds the candidates that each trial has to order.
FAVOURED = 3
#: Most samples that are chosen for a single operator: more is a campaign. Engineering choice.
MOST_ASKED = 25


def run_calibrate_operators(
    console: Console, dataset: Dataset, settings: CalibrateSettings
) -> list[Curve]:
    """Adapt a model to a device, and print the error against the number of samples.

    Samples are chosen among the rows of training and calibration splits by their expected
    information gain; errors are measured on the other splits.

    Args:
        console: Console to print to.
        dataset: Published operators.
        settings: The device, the model, and how many samples are chosen how.

    Raises:
        DatasetError: The dataset has too few rows of the device, or none.
        DeviceError: The device is neither the dataset's, nor the model's, nor in the catalogue.
        WorseModelError: It is worse than before on what it did not learn from.
    """
    from ..features.devices.catalogue import choose_described
    from ..models.adapt.active import allocate, shares_of, spread_evenly
    from ..models.operators import OpModel, rows_of_dataset
    from ..models.operators.curves import COUNTS, error_curve, joint_curve
    from ..predict.locate import find_model

    name = OPERATOR_MODEL if settings.model == "default" else settings.model
    model = OpModel.load(find_model(name))
    samples, seed = settings.samples, settings.seed
    # The dataset's description first: it is the one under which the rows were taken.
    spec = choose_described(settings.device, {**model.devices, **dataset.devices})
    rows = rows_of_dataset(dataset)
    if not (rows["device"] == spec.name).any():
        held = ", ".join(sorted(rows["device"].unique()))
        raise DatasetError(f"no rows of {spec.name}", hint=f"its devices are {held}: --device")
    rows = rows[(rows["device"] == spec.name) & rows["key"].isin(list(model.families))]
    trials = _trials(console, model, rows, spec, samples, seed)
    # The requested number ends the curve, whatever the standard counts are.
    counts = (*(n for n in COUNTS if n < samples), samples)
    curves = [
        error_curve(trial, spec.name, counts, seed)
        for trial in tracked(trials, len(trials), "errors by number of samples")
    ]
    if len(trials) > 1:
        curves.append(joint_curve(trials, spec.name, counts, seed))
    _print_curves(console, curves, "MAPE in % by samples of each family")
    few = [n for n in counts if n <= MOST_ASKED]
    asked = [
        trial.asked(few, seed)
        for trial in tracked(trials, len(trials), "samples chosen for single operators")
    ]
    _print_asked(console, asked, spec.name)
    shares = shares_of({trial.family: trial.seconds for trial in trials})
    gains = {trial.family: trial.gains for trial in trials}
    total = samples * len(trials)
    # Gains are known before anything is measured: they depend on features, not on labels.
    numbers = (
        allocate(gains, shares, total) if settings.by_time else spread_evenly(list(gains), total)
    )
    # A family that gets worse on the rows that it did not learn from stays as it is.
    unseen = {c.family: (c.active[0], c.active[-1]) for c in curves if c.family in gains}
    better = {family for family, (before, after) in unseen.items() if after <= before}
    for family in sorted(unseen.keys() - better):
        console.print(
            f"{family} is left as it is: adapted, its error on other rows is "
            f"{unseen[family][1]:.1%}, not {unseen[family][0]:.1%}",
            highlight=False,
        )
    kept = {family: unseen[family] for family in better} or unseen
    before, after = np.mean(list(kept.values()), axis=0).tolist()
    judged = f"other rows of {len(kept)} families"
    check_unseen(console, judged, before, after, keep=settings.out is not None)
    for trial in trials:
        chosen = trial.rows.iloc[trial.order[: numbers[trial.family]]]
        if len(chosen) and trial.family in better:
            model.families[trial.family].calibrate(spec.name, chosen, {spec.name: spec})
    model.devices[spec.name] = spec
    save_adapted(console, model, settings)
    _plot(console, curves, settings.plot)
    return curves


def _trials(
    console: Console, model: OpModel, rows: pd.DataFrame, spec: DeviceSpec, samples: int, seed: int
) -> list[Trial]:
    """Prepare a trial for each family that has enough rows."""
    from ..models.operators.curves import Trial

    trials = []
    keys = sorted(set(rows["key"]))
    for key in tracked(keys, len(keys), "choosing samples of families"):
        own = _near(console, model, rows[rows["key"] == key].reset_index(drop=True), spec)
        pool, test = _pool(own, seed)
        if len(pool) < samples or not len(test):
            console.print(f"{key}: only {len(pool)} rows to choose from, left out")
            continue
        family = model.families[key]
        # With --allocate time a family may get more than its even share.
        trials.append(Trial.of(family, pool, test, {spec.name: spec}, FAVOURED * samples, seed))
    if not trials:
        raise DatasetError(
            f"no family has {samples} rows of {spec.name} to learn from and others to be judged on",
            hint="ask for fewer --samples, or import more",
        )
    return trials


def _near(console: Console, model: OpModel, rows: pd.DataFrame, spec: DeviceSpec) -> pd.DataFrame:
    """Rows of a family, but those that :func:`far_off` takes for another unit, which it names."""
    key = str(rows["key"].iloc[0])
    logs = model.families[key].site_errors(rows, {spec.name: spec})[1]
    far = np.abs(logs) > np.log(FAR)
    if far.any():
        what = f"{key}: the farthest of {int(far.sum())} of {len(rows)} rows"
        told = far_off(what, float(logs[np.argmax(np.abs(logs))]))
        console.print(told, highlight=False, soft_wrap=True)
    # Most rows in another unit: so are the few that happen to be nearer.
    near: pd.DataFrame = rows[~far & (far.mean() < 0.5)].reset_index(drop=True)
    return near


def _pool(rows: pd.DataFrame, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows that may be sampled and rows to test on: by split, or a random half each."""
    split = rows["split"].astype(str)
    mine = (split.isin(TRAINING) | split.str.startswith("calib")).to_numpy()
    if not mine.any() or mine.all():
        mine = np.random.default_rng(seed).random(len(rows)) < 0.5
    return rows[mine], rows[~mine]


def run_calibrate_kernels(
    console: Console, dataset: Dataset, settings: CalibrateSettings
) -> list[Curve]:
    """Adapt a kernel model to a device from a profiled dataset of it.

    Kernels of half of the programs may be chosen; errors are taken on those of the others.

    Args:
        console: Console to print to.
        dataset: Kernels measured on the device, as ``opcast profile`` writes them.
        settings: The device, the model, and how many kernels to learn from.

    Raises:
        DatasetError: The dataset has too few kernels of the device.
        WorseModelError: It is worse than before on what it did not learn from.
    """
    from ..models.adapt.device_correction import DeviceCorrection
    from ..models.cost_model import CostModel
    from ..models.operators.curves import COUNTS, error_curve
    from ..predict.locate import find_model, trained_devices

    samples, seed = settings.samples, settings.seed
    given = None if settings.model == "default" else CostModel.load(find_model(settings.model))
    described = _described(dataset, settings.device, given.devices if given else trained_devices())
    model = given or CostModel.load(find_model("default", described.platform))
    rows = _kernel_rows(dataset, described.name, samples)
    # Another machine of a trained device's name does not take its place in the model.
    spec = identified(described, model.devices)
    trial = _kernel_trial(model, rows, spec, samples, seed)
    counts = (*(n for n in COUNTS if n < samples), samples)
    curves = [error_curve(trial, spec.name, counts, seed)]
    _print_curves(console, curves, "MAPE in % by kernels learned")
    active = curves[0].active
    keep = settings.out is not None
    check_unseen(console, "kernels of the other programs", active[0], active[-1], keep=keep)
    chosen = trial.rows.iloc[trial.order[:samples]]
    table, plain, measured = _featurised(model, chosen, spec)
    programs = chosen["program"].to_numpy(object).astype(str)
    model.corrections[spec.name] = DeviceCorrection.fit(table, spec, plain, measured, programs)
    model.devices[spec.name] = spec
    save_adapted(console, model, settings)
    _plot(console, curves, settings.plot)
    return curves


def _described(dataset: Dataset, device: str, known: Mapping[str, DeviceSpec]) -> DeviceSpec:
    """The device as described by the dataset's runs, else as found by name."""
    from ..predict.devices import resolve_device

    own = dataset.devices
    # The dataset's runs hold the ceilings under which its labels were taken.
    return own[device] if device in own else resolve_device(device, {**known, **own})


def _kernel_rows(dataset: Dataset, device: str, samples: int) -> pd.DataFrame:
    """Measured kernels of a device, each once with its median latency."""
    frame = dataset.frame
    own = frame[(frame["device"] == device) & (frame["level"] != "program")]
    # A latency of zero is a kernel that the trace's clock could not resolve.
    own = own[own["latency_us_p50"] > 0]
    # A kernel may have been measured in several programs and runs.
    median = own.groupby("kernel_hash")["latency_us_p50"].median()
    rows = own.drop_duplicates("kernel_hash")[["kernel_hash", "kernel_ir", "program"]]
    # Half of the kernels are kept for testing.
    if not len(rows):
        held = ", ".join(sorted(frame["device"].unique()))
        raise DatasetError(f"no kernels of {device}", hint=f"its devices are {held}: --device")
    if len(rows) < 2 * samples:
        raise DatasetError(
            f"only {len(rows)} kernels of {device}, {2 * samples} are needed to learn from "
            f"{samples} and to judge on others",
            hint="ask for fewer --samples, or profile for longer",
        )
    return rows.assign(latency_us=rows["kernel_hash"].map(median)).reset_index(drop=True)


def _featurised(
    model: CostModel, rows: pd.DataFrame, spec: DeviceSpec
) -> tuple[KernelTable, KernelPrediction, np.ndarray]:
    """Features, predictions without correction, and measured seconds of kernels."""
    from ..features.kernels.extract import kernels_from_irs
    from ..models.core.kernel_table import kernel_table

    kernels = kernels_from_irs(rows["kernel_ir"].tolist())
    plain = model.estimator.predict(kernels, spec)
    return kernel_table(kernels, spec), plain, rows["latency_us"].to_numpy(np.float64) * 1e-6


def _kernel_trial(
    model: CostModel, rows: pd.DataFrame, spec: DeviceSpec, samples: int, seed: int
) -> Trial:
    from ..models.adapt.device_correction import kernel_sites, prior_params
    from ..models.operators.curves import MAX_CANDIDATES, MAX_TEST, Trial

    rng = np.random.default_rng(seed)
    # By program: kernels of one program share shapes and the state of the machine, so a random half
    # of the kernels would be judged by its siblings.
    programs = rng.permutation(rows["program"].unique())
    mine = rows["program"].isin(programs[: max(len(programs) // 2, 1)]).to_numpy()
    if mine.sum() < samples or mine.all():  # too few programs: half of the kernels
        mine = rng.random(len(rows)) < 0.5
    parts = []
    # Gaussian processes cost the cube of the candidates and the square of the test rows.
    for mask, most in ((mine, MAX_CANDIDATES), (~mine, MAX_TEST)):
        own = np.flatnonzero(mask)
        own = rng.choice(own, min(most, len(own)), replace=False)
        table, plain, measured = _featurised(model, rows.iloc[own], spec)
        # Log-ratios, as the correction learns them: factors err symmetrically.
        errors = np.log(measured / plain.latency)
        parts.append((own, kernel_sites(table, spec), errors, float(measured.sum())))
    (own, sites, errors, seconds), (_, other, judged, _) = parts
    chosen = rows.iloc[own].reset_index(drop=True)
    return Trial.of_sites(
        "kernels",
        prior_params(),
        chosen,
        (sites, errors),
        (other, judged),
        seconds,
        samples,
        pd.factorize(chosen["program"])[0],
    )


def save_adapted(console: Console, model: ModelBundle, settings: CalibrateSettings) -> None:
    """Save an adapted model with its settings, or print that it is not kept."""
    out = settings.out
    if out is None:
        console.print("the adapted model is not kept: give --out to save it")
        return
    with stages("reading") as tell:
        tell("saving the model")
        model.save(out)
    settings.save(out)
    wrote(out, f"adapted model; predict with it: --model {out}")


def _print_curves(console: Console, curves: Sequence[Curve], what: str) -> None:
    from ..common.tables_text import print_frame

    print_frame(console, _curve_table(curves), f"{curves[0].device}: {what}")


def _print_asked(console: Console, asked: Sequence[Asked], device: str) -> None:
    from ..common.tables_text import print_frame

    print_frame(
        console,
        pd.DataFrame([row for own in asked for row in _asked_rows(own)]),
        f"{device}: single operators, samples chosen for each (MAPE in %, share of the deviation "
        "that is expected to be left, share inside the interval then)",
    )


def _asked_rows(asked: Asked) -> list[dict[str, object]]:
    figures = {
        "chosen": asked.chosen,
        "random": asked.random,
        "left": asked.narrowed,
        "inside": asked.inside,
    }
    return [
        {
            "family": asked.family,
            "": name,
            **{f"{n}": round(100 * v, 1) for n, v in zip(asked.counts, own, strict=True)},
        }
        for name, own in figures.items()
    ]


def _plot(console: Console, curves: Sequence[Curve], plot: Path | None) -> None:
    if plot is None:
        return
    from ..models.tracking.plots import calibration_plot, save_figure

    save_figure(calibration_plot(curves), plot)
    wrote(plot, "plot")


def _curve_table(curves: Sequence[Curve]) -> pd.DataFrame:
    """Errors by family and choice; ``needed``: chosen samples for the last error of random ones."""
    records = []
    for curve in curves:
        needed = curve.needed(curve.counts[-1])
        for choice in ("active", "random"):
            errors = getattr(curve, choice)
            figures = {f"{n}": round(100 * e, 1) for n, e in zip(curve.counts, errors, strict=True)}
            # Infinite: the chosen samples never reach the last error of random ones.
            own = f"{needed:.0f}" if np.isfinite(needed) else "more"
            last = own if choice == "active" else f"{curve.counts[-1]}"
            records.append({"family": curve.family, "choice": choice, **figures, "needed": last})
    return pd.DataFrame(records)
