"""Settings of the commands: one frozen dataclass each, saved beside the command's output."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar

#: Name of the file with the settings in an output folder.
FILE = "settings.json"


@dataclass(frozen=True)
class Settings:
    """What all settings share: the command's name."""

    command: ClassVar[str]

    def save(self, folder: Path) -> None:
        """Write the settings, with the command and its version, into an output folder."""
        from .. import __version__
        from ..common.files import write_text

        content = {"command": f"opcast {self.command}", "opcast": __version__, **asdict(self)}
        folder.mkdir(parents=True, exist_ok=True)
        # ``default=str`` writes paths as text.
        write_text(folder / FILE, json.dumps(content, indent=1, default=str))


@dataclass(frozen=True)
class ProfileSettings(Settings):
    """Settings of ``opcast profile``.

    Attributes:
        out: Folder of the dataset.
        device: ``cpu``, ``gpu``, ``tpu`` or ``local``.
        budget_s: Seconds to measure.
        seed: Seed of the programs.
        suite: Suite of the zoo.
        mix: Shares of the streams, such as ``ops=0.4,random=0.3,zoo=0.3``.
        ray: Address of a Ray cluster, on whose hosts to measure; empty for here.
        progress: Whether to show progress.
    """

    command: ClassVar[str] = "profile"
    out: Path
    device: str
    budget_s: float
    seed: int
    suite: str
    mix: str
    ray: str = ""
    progress: bool = True


@dataclass(frozen=True)
class TrainSettings(Settings):
    """Settings of ``opcast train``; which fields are read depends on the :class:`~.train.Trainer`.

    Attributes:
        data: Folders of the dataset.
        model: Name of the estimator.
        split: Split to test on.
        out: Folder for the model.
        seed: Seed of draws and estimators.
        threads: Threads of the estimators.
        track: Whether to log to MLflow.
        register: Name to register the model under, here and in MLflow.
        final: Save a model fitted to all rows, test rows included.
        params: Hyperparameters of the estimator.
        exclude_device: Devices to exclude from training; an operator model is tested on them.
        max_rows: Maximum rows of an operator family to learn from.
        join: Model of operators whose other families the new one takes over.
        blocks: Instead of ``data``, the folder of the kernel pack's tables of attention and
            experts, layers, and new attention.
    """

    command: ClassVar[str] = "train"
    data: Sequence[Path] = ()
    model: str = "xgboost"
    split: str = "unseen_family"
    out: Path | None = None
    seed: int = 0
    # One thread: XGBoost with more threads than free cores is 30 to 90 times slower than with one.
    threads: int = 1
    track: bool = True
    register: str | None = None
    final: bool = False
    params: Mapping[str, object] = field(default_factory=dict)
    exclude_device: Sequence[str] = ()
    # Bounds the memory that the largest families need. Engineering estimate.
    max_rows: int = 1_000_000
    join: str | None = None
    blocks: Path | None = None


@dataclass(frozen=True)
class TuneSettings(Settings):
    """Settings of ``opcast tune``.

    Attributes:
        data: Folders of the dataset.
        model: Name of the estimator.
        split: Split whose training part is searched on.
        trials: Number of trials, including those of earlier searches in ``study``.
        timeout_s: Seconds after which no trial starts.
        folds: Folds of the cross-validation.
        objective: Error to minimise, ``mean_abs_log`` or ``median_ape``.
        seed: Seed of the search and of the estimators.
        threads: Threads of the estimators.
        study: SQLite file of the trials.
        out: JSON file for the best hyperparameters.
        track: Whether to log the trials to MLflow.
    """

    command: ClassVar[str] = "tune"
    data: Sequence[Path]
    model: str
    split: str
    trials: int
    timeout_s: float | None
    folds: int
    objective: str
    seed: int
    threads: int
    study: Path | None
    out: Path | None
    track: bool


@dataclass(frozen=True)
class CalibrateSettings(Settings):
    """Settings of ``opcast calibrate``, from a dataset or by measuring.

    Attributes:
        device: Name of the device.
        model: Name or folder of the model.
        data: Folders of the dataset; none to measure here.
        budget_s: Seconds for compiling and measuring here; ``None`` with a dataset.
        samples: Samples to learn from a dataset; of operators, of each family.
        by_time: Whether operator families get samples by their share of the time and the expected
            information gain, rather than ``samples`` each.
        out: Folder for the adapted model.
        plot: Image of the error against the number of samples.
        seed: Seed of draws and of the candidates to measure.
        suite: Suite of the zoo whose kernels the measuring is for.
        ops: Number of single-op programs that may be measured.
    """

    command: ClassVar[str] = "calibrate"
    device: str
    model: str = "default"
    data: Sequence[Path] = ()
    budget_s: float | None = None
    # Enough for most families to level off (docs/operator-new-device.md).
    samples: int = 100
    by_time: bool = False
    out: Path | None = None
    plot: Path | None = None
    seed: int = 0
    suite: str = "quick"
    # More than a budget of minutes can measure; the choice among them is what matters.
    ops: int = 600


@dataclass(frozen=True)
class DriftSettings(Settings):
    """Settings of ``opcast drift``.

    Attributes:
        data: Table of newly measured operators, or a folder of such tables.
        model: Name or folder of a model of operators; ``default`` for the shipped one.
        samples: Samples of each drifted library, family and device to repair the model with.
        false_alarms: Probability of one or more false alarms.
        out: Folder for the repaired model.
        seed: Seed of the draw of candidates from many rows.
        devices: Files of devices of the tables that are neither in the model nor in the catalogue.
    """

    command: ClassVar[str] = "drift"
    data: Path
    model: str = "default"
    samples: int = 20
    false_alarms: float = 0.01
    out: Path | None = None
    seed: int = 0
    devices: Sequence[str] = ()


@dataclass(frozen=True)
class EvaluateSettings(Settings):
    """Settings of ``opcast evaluate``.

    Attributes:
        published: Folder with tables of published latencies.
        out: Parquet file for the predictions.
        model: Name or folder of the operator model.
        calibrate: Whether to calibrate on the rows of ``calib_*`` splits that have a latency.
        limit: Maximum rows of each operator table.
        ray: Address of a Ray cluster; empty for none.
        devices: Files of devices of the tables that are not in the catalogue.
    """

    command: ClassVar[str] = "evaluate"
    published: Path
    out: Path
    model: str
    calibrate: bool = False
    limit: int | None = None
    ray: str = ""
    devices: Sequence[str] = ()

    @property
    def kept(self) -> Path:
        """Folder of finished pieces, there until the predictions are written."""
        return self.out.with_name(f"{self.out.stem}-parts")


@dataclass(frozen=True)
class StepSettings(Settings):
    """Settings of the commands that learn from, predict or adapt to a table of steps.

    Attributes:
        table: The table, CSV or parquet.
        out: File for the predictions or the model.
        model: File of a model of steps; ``default`` for the one that ships.
        calibrate: Whether to adapt to the rows of ``calib_*`` splits that have a time.
        page: HTML page for the figures.
        track: Whether to log to MLflow.
        seed: Of draws.
    """

    command: ClassVar[str] = "evaluate --steps"
    table: Path
    out: Path
    model: str = "default"
    calibrate: bool = False
    page: Path | None = None
    track: bool = True
    seed: int = 0


@dataclass(frozen=True)
class ServingSettings(StepSettings):
    """Settings of the commands that learn from, predict or adapt to a table of serving.

    Attributes:
        start: Model that learning starts from; empty for none.
    """

    command: ClassVar[str] = "evaluate --serving"
    start: str = ""


@dataclass(frozen=True)
class PowerSettings(Settings):
    """Settings of ``opcast train --power``.

    Attributes:
        table: Operators with their board power, parquet.
        out: File for the model.
        seed: Of the trees' draws.
    """

    command: ClassVar[str] = "train --power"
    table: Path
    out: Path
    seed: int = 0


@dataclass(frozen=True)
class TileSettings(PowerSettings):
    """Settings of ``opcast train --tiles``."""

    command: ClassVar[str] = "train --tiles"


@dataclass(frozen=True)
class ProgramSettings(Settings):
    """Settings of ``opcast evaluate`` on a folder of programs.

    Attributes:
        folder: The folder, with one CSV that lists files and devices.
        out: Parquet file for the predictions.
        model: Name or folder of the model of kernels.
        lowering: As of ``opcast predict``.
        track: Whether to log to MLflow.
        on_stream: Whether times exclude the host's call, as times of regions do.
    """

    command: ClassVar[str] = "evaluate --programs"
    folder: Path
    out: Path
    model: str = "default"
    lowering: str = "auto"
    track: bool = True
    on_stream: bool = False


@dataclass(frozen=True)
class SweepSettings(Settings):
    """Settings of ``opcast sweep``.

    Attributes:
        workload: Family of the model, or a YAML file with family and sizes.
        clusters: Names or files of clusters.
        out: Folder of the results.
        sizes: Sizes of the model, such as ``layers=32``.
        batches: Batch sizes; none for the workload's own.
        grid: Values of each axis, such as ``tp=4/8,recompute=none/full``, or a YAML file.
        trials: Plans to search with Optuna; 0 evaluates all.
        model: Name or folder of the operator model; ``roofline`` for none.
        framework: Framework that runs the steps; empty for an average one.
        compiled: Whether steps are compiled, or replayed as CUDA graphs.
        steps: File of a model of steps; ``default`` for the one that ships.
        prices: Of a device for an hour, by device; under an empty name, of all others.
        power_cap_w: Sustained power of a device in watts; ``None`` for its limit.
        workers: Worker processes.
        ray: Address of a Ray cluster; empty for none.
        seed: Seed of the search.
        top: Number of plans to print.
        plot: Image of memory against time.
        scaling: Image of strong and weak scaling over the clusters.
    """

    command: ClassVar[str] = "sweep"
    workload: str
    clusters: Sequence[str]
    out: Path
    sizes: Sequence[str] = ()
    batches: Sequence[int] = ()
    grid: str = ""
    trials: int = 0
    model: str = ""
    framework: str = ""
    compiled: bool = False
    steps: str = "default"
    prices: Mapping[str, float] = field(default_factory=dict)
    power_cap_w: float | None = None
    workers: int = 1
    ray: str = ""
    seed: int = 0
    top: int = 15
    plot: Path | None = None
    scaling: Path | None = None


@dataclass(frozen=True)
class FidelitySettings(Settings):
    """Settings of ``opcast fidelities``.

    Attributes:
        devices: Names of devices.
        models: Estimators, as of :func:`~opcast.predict.program.fidelities.compare_fidelities`.
        out: Folder of the predictions, one file for each program and device.
        suite: Suite of the zoo; empty for ``PROGRAMS`` of :mod:`.reports.fidelities`.
        lowering: Lowering of the programs.
        limit: Maximum number of programs, drawn evenly from the suite; 0 for all.
        progress: Whether to show progress.
    """

    command: ClassVar[str] = "fidelities"
    devices: Sequence[str]
    models: Sequence[str]
    out: Path
    suite: str = ""
    lowering: str = "auto"
    limit: int = 0
    progress: bool = True
