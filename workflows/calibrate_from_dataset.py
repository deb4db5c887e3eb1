"""Adapt a model to a device from a dataset, as if its rows were measured one by one.

Samples are chosen by their expected information gain, and compared with random samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ..common.errors import DatasetError
from ..common.progress import stages, tracked, wrote
from ..common.tables_text import print_frame
from ..features.devices.identity import identified
from ..predict.locate import OPERATOR_MODEL
from .measured.calibration_samples import FAR, check_unseen, far_off
from .train_operators import TRAINING

if TYPE_CHECKING:
    from rich.console import Console

    from ..features.dataset import Dataset
    from ..features.devices.device import DeviceSpec
    from ..models.core.base import KernelPrediction
    from ..models.core.kernel_table import KernelTable
    from ..models.cost_model import CostModel
    from ..models.operators import OpModel
    from ..models.operators.curves import Asked, Curve, Trial
    from .settings import CalibrateSettings

#: Maximum samples of a family relative to the mean, when samples are allocated by share of the
#: time; bounds the number of candidates that are ordered. Engineering estimate.
FAVOURED = 3
#: Maximum number of samples chosen for a single operator. Engineering choice.
MOST_ASKED = 25


def run_calibrate_operators(
    console: Console, dataset: Dataset, settings: CalibrateSettings
) -> list[Curve]:
    """Adapt an operator model to a device, and print the error against the number of samples.

    Samples are chosen from the training and calibration splits by their expected information gain;
    errors are measured on the other splits.

    Args:
        console: Console to print to.
        dataset: Published operators.
        settings: The device, the model, and the number and allocation of samples.

    Raises:
        DatasetError: The dataset has too few rows of the device.
        DeviceError: The device is unknown to the dataset, the model and the catalogue.
        WorseModelError: The adapted model is worse on held-out rows.
    """
    from ..features.devices.catalogue import choose_described
    from ..models.adapt.active import allocate, shares_of, spread_evenly
    from ..models.operators import OpModel, rows_of_dataset
    from ..models.operators.curves import COUNTS, error_curve, joint_curve
    from ..predict.locate import find_model

    name = OPERATOR_MODEL if settings.model == "default" else settings.model
    model = OpModel.load(find_model(name))
    samples, seed = settings.samples, settings.seed
    # The dataset's description takes precedence, as the rows were measured under it.
    spec = choose_described(settings.device, {**model.devices, **dataset.devices})
    rows = rows_of_dataset(dataset)
    if not (rows["device"] == spec.name).any():
        held = ", ".join(sorted(rows["device"].unique()))
        raise DatasetError(f"no rows of {spec.name}", hint=f"its devices are {held}: --device")
    rows = rows[(rows["device"] == spec.name) & rows["key"].isin(list(model.families))]
    trials = _trials(console, model, rows, spec, samples, seed)
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
    # The gains depend on features only, so they are known before anything is measured.
    numbers = (
        allocate(gains, shares, total) if settings.by_time else spread_evenly(list(gains), total)
    )
    # A family whose error on held-out rows increases is not adapted.
    unseen = {c.family: (c.active[0], c.active[-1]) for c in curves if c.family in gains}
    better = {family for family, (before, after) in unseen.items() if after <= before}
    for family in sorted(unseen.keys() - better):
        console.print(
            f"{family} is not adapted: its error on other rows would change from "
            f"{unseen[family][0]:.1%} to {unseen[family][1]:.1%}",
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
    """Prepare a trial for each family with enough rows."""
    from ..models.operators.curves import Trial

    trials = []
    keys = sorted(set(rows["key"]))
    for key in tracked(keys, len(keys), "choosing samples of families"):
        own = _near(console, model, rows[rows["key"] == key].reset_index(drop=True), spec)
        pool, test = _pool(own, seed)
        if len(pool) < samples or not len(test):
            console.print(f"{key}: skipped, as there are only {len(pool)} rows to choose from")
            continue
        family = model.families[key]
        # With --allocate time a family may get more than its even share.
        trials.append(Trial.of(family, pool, test, {spec.name: spec}, FAVOURED * samples, seed))
    if not trials:
        raise DatasetError(
            f"no family has {samples} rows of {spec.name} to learn from and others to test on",
            hint="give fewer --samples, or import more",
        )
    return trials


def _near(console: Console, model: OpModel, rows: pd.DataFrame, spec: DeviceSpec) -> pd.DataFrame:
    """Rows of a family without those that are probably in a wrong unit (:func:`far_off`)."""
    key = str(rows["key"].iloc[0])
    logs = model.families[key].site_errors(rows, {spec.name: spec})[1]
    far = np.abs(logs) > np.log(FAR)
    if far.any():
        what = f"{key}: the farthest of {int(far.sum())} of {len(rows)} rows"
        told = far_off(what, float(logs[np.argmax(np.abs(logs))]))
        console.print(told, highlight=False, soft_wrap=True)
    # If most rows are far off, the others are wrong, too.
    near: pd.DataFrame = rows[~far & (far.mean() < 0.5)].reset_index(drop=True)
    return near


def _pool(rows: pd.DataFrame, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows to sample from and rows to test on: by split, or a random half each."""
    split = rows["split"].astype(str)
    mine = (split.isin(TRAINING) | split.str.startswith("calib")).to_numpy()
    if not mine.any() or mine.all():
        mine = np.random.default_rng(seed).random(len(rows)) < 0.5
    return rows[mine], rows[~mine]


def run_calibrate_kernels(
    console: Console, dataset: Dataset, settings: CalibrateSettings
) -> list[Curve]:
    """Adapt a kernel model to a device from a profiled dataset.

    Samples are chosen from the kernels of one half of the programs; errors are measured on the
    other half.

    Args:
        console: Console to print to.
        dataset: Kernels measured on the device, as written by ``opcast profile``.
        settings: The device, the model, and the number of kernels to learn from.

    Raises:
        DatasetError: The dataset has too few kernels of the device.
        WorseModelError: The adapted model is worse on held-out kernels.
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
    # A different machine with the name of a trained device must not replace it in the model.
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
    """The device as described in the dataset, else as found by name."""
    from ..predict.devices import resolve_device

    own = dataset.devices
    # The dataset records the peaks at the time of its measurements.
    return own[device] if device in own else resolve_device(device, {**known, **own})


def _kernel_rows(dataset: Dataset, device: str, samples: int) -> pd.DataFrame:
    """Distinct measured kernels of a device with their median latencies."""
    frame = dataset.frame
    own = frame[(frame["device"] == device) & (frame["level"] != "program")]
    # Zero latencies are below the resolution of the trace's clock.
    own = own[own["latency_us_p50"] > 0]
    # Over all programs and runs that measured a kernel.
    median = own.groupby("kernel_hash")["latency_us_p50"].median()
    rows = own.drop_duplicates("kernel_hash")[["kernel_hash", "kernel_ir", "program"]]
    if not len(rows):
        held = ", ".join(sorted(frame["device"].unique()))
        raise DatasetError(f"no kernels of {device}", hint=f"its devices are {held}: --device")
    if len(rows) < 2 * samples:
        raise DatasetError(
            f"only {len(rows)} kernels of {device}, but {2 * samples} are needed to learn from "
            f"{samples} and to test on others",
            hint="give fewer --samples, or profile for longer",
        )
    return rows.assign(latency_us=rows["kernel_hash"].map(median)).reset_index(drop=True)


def _featurised(
    model: CostModel, rows: pd.DataFrame, spec: DeviceSpec
) -> tuple[KernelTable, KernelPrediction, np.ndarray]:
    """Features, uncorrected predictions and measured seconds of kernels."""
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
    # Split by program, because kernels of a program share shapes and the state of the machine.
    programs = rng.permutation(rows["program"].unique())
    mine = rows["program"].isin(programs[: max(len(programs) // 2, 1)]).to_numpy()
    if mine.sum() < samples or mine.all():  # too few programs: half of the kernels
        mine = rng.random(len(rows)) < 0.5
    parts = []
    # Gaussian processes are cubic in the candidates and quadratic in the test rows.
    for mask, most in ((mine, MAX_CANDIDATES), (~mine, MAX_TEST)):
        own = np.flatnonzero(mask)
        own = rng.choice(own, min(most, len(own)), replace=False)
        table, plain, measured = _featurised(model, rows.iloc[own], spec)
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


def save_adapted(console: Console, model: CostModel | OpModel, settings: CalibrateSettings) -> None:
    """Save an adapted model with its settings if an output folder is given."""
    out = settings.out
    if out is None:
        console.print("the adapted model is not saved: give --out to save it")
        return
    with stages("reading") as tell:
        tell("saving the model")
        model.save(out)
    settings.save(out)
    wrote(out, f"adapted model; predict with it: --model {out}")


def _print_curves(console: Console, curves: Sequence[Curve], what: str) -> None:
    print_frame(console, _curve_table(curves), f"{curves[0].device}: {what}")


def _print_asked(console: Console, asked: Sequence[Asked], device: str) -> None:
    print_frame(
        console,
        pd.DataFrame([row for own in asked for row in _asked_rows(own)]),
        f"{device}: samples chosen for single operators (MAPE in %, expected remaining deviation, "
        "coverage of the interval)",
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
    """Errors by family and choice; ``needed`` chosen samples match all random ones."""
    records = []
    for curve in curves:
        needed = curve.needed(curve.counts[-1])
        for choice in ("active", "random"):
            errors = getattr(curve, choice)
            figures = {f"{n}": round(100 * e, 1) for n, e in zip(curve.counts, errors, strict=True)}
            # Infinite if the chosen samples never reach the last error of random ones.
            own = f"{needed:.0f}" if np.isfinite(needed) else "more"
            last = own if choice == "active" else f"{curve.counts[-1]}"
            records.append({"family": curve.family, "choice": choice, **figures, "needed": last})
    return pd.DataFrame(records)
