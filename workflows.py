"""What joins several folders: measuring, training, reporting, and the demonstration."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from .features.errors import DatasetError

if TYPE_CHECKING:
    from rich.console import Console

    from .features.dataset import Dataset
    from .features.device import DeviceSpec
    from .models.prepared import Prepared
    from .models.train import TrainResult

logger = logging.getLogger(__name__)

#: The dataset that comes with the repository.
COMMITTED = Path(__file__).resolve().parent / "datagen" / "datasets" / "cpu"
#: Streams of a profile run as the command line spells them.
_STREAMS = {"ops": "op", "random": "random", "zoo": "zoo"}
_SHOWN = (
    "group", "n", "median_ape", "mape", "bias", "spearman", "kendall", "top_k_recall", "coverage",
    "width_median", "noise_median_ape", "noise_mape", "mean_abs_log",
)  # fmt: skip
_PERCENT = {
    "median_ape", "mape", "bias", "coverage", "width_median", "noise_median_ape", "noise_mape",
    "top_k_recall",
}  # fmt: skip


def parse_mix(text: str) -> dict[str, float]:
    """Shares such as ``ops=0.4,random=0.3,zoo=0.3``.

    Raises:
        DatasetError: A stream is unknown or a share is not a number.
    """
    try:
        pairs = (part.split("=", 1) for part in text.split(","))
        return {_STREAMS[name.strip()]: float(share) for name, share in pairs}
    except (KeyError, ValueError):
        raise DatasetError(
            f"{text!r} is not a mix", hint="write shares such as ops=0.4,random=0.3,zoo=0.3"
        ) from None


def run_profile(
    out: Path, device: str, budget_s: float, *, seed: int, suite: str, mix: str, progress: bool
) -> None:
    """Measure into ``out`` and print what was done."""
    from .datagen.profiler import profile

    result = profile(
        out, device=device, budget_s=budget_s, seed=seed, suite=suite, mix=parse_mix(mix),
        progress=progress,
    )  # fmt: skip
    print(
        f"{result.folder}: {result.samples} samples of {result.programs} programs, "
        f"{result.failed} failed, {result.elapsed_s:.0f} s, {result.stopped}"
    )
    if result.stopped == "interrupted":
        raise KeyboardInterrupt


def measure_device(*, save: bool) -> DeviceSpec:
    """Measure the local device; keep it for ``--device local`` if ``save``."""
    from .datagen.device_probe import probe_device
    from .features.files import write_text
    from .predict.devices import measured_path

    spec = probe_device()
    if save:
        path = measured_path(spec.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, spec.to_json())
    return spec


def show_device(console: Console, name: str, *, as_json: bool) -> None:
    """Print a device with its sources: measured here, of the catalogue, or of a device file."""
    from .predict.device_view import print_device
    from .predict.devices import resolve_device
    from .predict.locate import trained_devices

    spec = resolve_device(name, trained_devices())
    if as_json:
        print(spec.to_json())
    else:
        print_device(console, spec)


def list_devices(console: Console, *, as_json: bool) -> None:
    """Print the catalogue as a table."""
    from .features.catalogue import device_names, find_device
    from .predict.device_view import print_devices

    specs = [find_device(name) for name in device_names()]
    if as_json:
        print(json.dumps([json.loads(spec.to_json()) for spec in specs]))
    else:
        print_devices(console, specs)


def show_data(console: Console, paths: Sequence[Path], *, plot: Path | None, as_json: bool) -> None:
    """Print what datasets hold."""
    from .datagen.show import describe, tables
    from .datagen.show import plot as draw
    from .features.dataset import Dataset

    dataset = Dataset.load(*paths)
    found = describe(dataset)
    if plot is not None:
        draw(dataset, plot)
    if as_json:
        print(json.dumps(found))
        return
    for title, table in tables(found).items():
        print_frame(console, table, title.replace("_", " "))


def load_for_training(data: Sequence[Path], exclude: Sequence[str]) -> tuple[Dataset, bool]:
    """A dataset, and whether it is one of library operators.

    Devices to exclude are taken out here, except for operators, which are judged on them.
    """
    from .features.dataset import Dataset
    from .operators import is_operator_dataset

    dataset = Dataset.load(*data)
    if is_operator_dataset(dataset) or not exclude:
        return dataset, is_operator_dataset(dataset)
    missing = sorted(set(exclude) - set(dataset.frame["device"]))
    if missing:
        have = ", ".join(sorted(set(dataset.frame["device"])))
        raise DatasetError(f"device {missing[0]!r} is not in the dataset", hint=f"it has: {have}")
    return dataset.select(~dataset.frame["device"].isin(exclude)), False


def run_train(
    console: Console,
    dataset: Dataset,
    model: str,
    split: str,
    *,
    out: Path | None,
    seed: int,
    threads: int,
    track: bool,
    register: str | None,
    final: bool,
    params: Mapping[str, Any] | None = None,
) -> TrainResult:
    """Train, print the metrics beside the noise, save, register and track."""
    from .models.prepared import prepare
    from .models.train import train_final
    from .predict.locate import registered

    prepared = prepare(dataset)
    result, model = _train_or_choose(console, prepared, model, split, seed, threads, params or {})
    print_metrics(console, result.metrics, f"{model}, kernels, split {split}")
    if len(result.program_metrics):
        print_metrics(console, result.program_metrics, f"{model}, programs, split {split}")
    bundle = result.model
    if final:
        bundle = train_final(
            prepared, model, seed=seed, n_jobs=threads, metrics={split: result.flat_metrics},
            **result.params,
        )  # fmt: skip
        kept = {k: v for k, v in result.model.info.items() if k == "ensemble_choice"}
        bundle.info.update(kept)
    folder = out or (registered() / register if register else Path("models-out") / model)
    bundle.save(folder)
    if register and out is not None:
        bundle.save(registered() / register)
    console.print(f"saved to {folder} after {result.seconds:.1f} s of training", highlight=False)
    if track:
        run_id = track_training(result, folder, model, split, seed, register)
        console.print(f"logged to MLflow as {run_id}; see it with: opcast ui", highlight=False)
    return result


def _train_or_choose(
    console: Console,
    prepared: Prepared,
    model: str,
    split: str,
    seed: int,
    threads: int,
    params: Mapping[str, Any],
) -> tuple[TrainResult, str]:
    """The training and the name of what was trained: an ensemble only if it beats its members."""
    from .models.train import train

    if model != "ensemble":
        return train(prepared, model, split, seed=seed, n_jobs=threads, **params), model
    from .models.ensemble_choice import train_ensemble

    result, choice = train_ensemble(prepared, split, seed, threads, **params)
    print_metrics(console, choice.table, "cross-validated on training rows, to choose by")
    print_metrics(console, choice.test, "test part, not used to choose")
    console.print(choice.sentence, highlight=False)
    return result, choice.winner


def track_training(
    result: TrainResult, folder: Path, model: str, split: str, seed: int, register: str | None
) -> str:
    """Log a training to MLflow; returns the run's id."""
    from .models.plots import all_figures
    from .models.tracking import RunLog, log_run

    info = result.model.info
    params = {
        "model": model, "split": split, "seed": seed, "dataset_hash": info.get("dataset_hash"),
        "devices": ",".join(result.model.devices), "rows": info.get("rows"),
        **result.params,
    }  # fmt: skip
    title = f"{model}, split {split}"
    tables = {"metrics": result.metrics, "predictions": result.predictions}
    if len(result.programs):
        tables["programs"] = result.programs
    run = RunLog(
        name=f"{model}-{split}",
        params=params,
        metrics={_metric_name(k): v for k, v in result.flat_metrics.items()}
        | {"train_seconds": result.seconds},
        tables=tables,
        figures=all_figures(result.predictions, title),
        model_dir=folder,
        predictions=_tracked_rows(result, split),
    )
    return log_run(run, register=register)


def _tracked_rows(result: TrainResult, split: str) -> pd.DataFrame:
    """Predictions of the test part, kernels and programs."""
    from .models.tracked import tidy

    kernels = tidy(result.predictions, split)
    if not len(result.programs):
        return kernels
    programs = tidy(result.programs.drop(columns="kind", errors="ignore"), split, "program")
    return pd.concat([kernels, programs], ignore_index=True)


def run_report(
    console: Console, data: Sequence[Path] | None, *, out: Path | None, threads: int
) -> None:
    """Print every model on every split, and programs of held-out families."""
    from .features.dataset import Dataset
    from .models.evaluate import compare_models, program_report
    from .models.prepared import prepare

    dataset = Dataset.load(*(data or [COMMITTED]))
    prepared = prepare(dataset)
    console.print(
        f"dataset {prepared.dataset_hash}: {len(dataset)} samples of {', '.join(dataset.devices)}",
        highlight=False,
    )
    kernels = compare_models(prepared, n_jobs=threads)
    print_metrics(console, kernels, "kernels")
    if "program_n" in kernels:
        own = kernels[kernels["program_n"].notna()].filter(regex="^(split|model|program_.*)$")
        own = own.rename(columns=lambda name: name.removeprefix("program_"))
        print_metrics(console, own, "whole programs in the test part of a split")
    programs = program_report(prepared, n_jobs=threads)
    print_metrics(console, programs.metrics, "whole programs, their families held out in turn")
    print_frame(console, programs.families, "by family")
    shown = programs.programs
    if len(shown):
        for name, part in shown.groupby("set"):
            ratio = (part["labels_us"] / part["measured_us"]).dropna()
            console.print(
                f"measured kernels add up to {ratio.median():.2f} of the measured wall time "
                f"(median of {len(ratio)} {name} programs; 10 % below {ratio.quantile(0.1):.2f}, "
                f"10 % above {ratio.quantile(0.9):.2f})",
                highlight=False,
            )
        zoo = shown[shown["set"] == "zoo"].sort_values("measured_us")
        columns = ["family", "measured_us", "predicted_us", "sum_us", "kernels", "error"]
        print_frame(console, zoo[columns], "each program of the zoo")
    if out is not None:
        from .features.files import write_text

        found = {"kernels": kernels, "programs": programs.metrics, "each": programs.programs}
        data_out = {name: json.loads(t.to_json(orient="records")) for name, t in found.items()}
        write_text(out, json.dumps(data_out, indent=1))


def print_metrics(console: Console, table: pd.DataFrame, title: str) -> None:
    """Print a metrics table, relative figures in percent."""
    keep = [c for c in table.columns if c in _SHOWN or not pd.api.types.is_numeric_dtype(table[c])]
    shown = table[keep].copy()
    for column in keep:
        if column in _PERCENT:
            shown[column] = [f"{v:.1%}" if v == v else "–" for v in table[column]]
        elif column == "n":
            shown[column] = table[column].astype(int)
    print_frame(console, shown, title)


def print_frame(console: Console, frame: pd.DataFrame, title: str) -> None:
    """Print a frame as a table."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in frame.columns:
        text = not pd.api.types.is_numeric_dtype(frame[column])
        table.add_column(str(column).replace("_", " "), justify="left" if text else "right")
    for row in frame.itertuples(index=False):
        table.add_row(*(Text(f"{v:.3g}" if isinstance(v, float) else str(v)) for v in row))
    console.print(table)


def _metric_name(name: str) -> str:
    """MLflow allows letters, digits and ``_ - . / space :``."""
    return name.replace("=", ":")
