"""Settings of the commands: one frozen dataclass each, saved beside the command's output.

Fields with an ``Option`` are the options of the command (``common/options.py``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar

from ..common.options import (
    Budget,
    Data,
    ModelOpt,
    Option,
    Out,
    OwnDevices,
    Seed,
    Threads,
    folder,
    json_file,
    plot_file,
    seconds_of,
)

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
        # ``default=str`` writes paths as text.
        write_text(folder / FILE, json.dumps(content, indent=1, default=str))


@dataclass(frozen=True)
class ProfileSettings(Settings):
    """Settings of ``opcast profile``."""

    command: ClassVar[str] = "profile"
    out: Out
    device: Annotated[str, Option("cpu, gpu, tpu or local.")] = "local"
    budget_s: Budget = 600.0
    seed: Seed = 0
    suite: Annotated[str, Option("Zoo suite: quick, standard or full.")] = "standard"
    # Repeats DEFAULT_MIX of datagen/profile/plan.py, so that --help can show it.
    mix: Annotated[str, Option("Shares of single ops, random programs and zoo programs.")] = (
        "ops=0.35,random=0.35,zoo=0.3"
    )
    ray: Annotated[
        str, Option("Address of a Ray cluster: measure on its hosts with the device.")
    ] = ""
    quiet: Annotated[bool, Option("Hide the progress bar.", ("--quiet",))] = False


@dataclass(frozen=True)
class TrainSettings(Settings):
    """Settings of ``opcast train``; the :class:`~.train_kernels.Trainer` decides which it reads.

    Attributes:
        params: Hyperparameters of the estimator.
        tables: Instead of ``data``, folders of the kernel pack's tables of attention and experts,
            layers, and new attention.
    """

    command: ClassVar[str] = "train"
    data: Data = ()
    model: Annotated[str, Option("Estimator to train.")] = "xgboost"
    split: Annotated[str, Option("For kernels: split to test on, or a table of your own.")] = (
        "unseen_family"
    )
    out: Annotated[
        Path | None,
        Option(
            "Folder for the model, by default that of --register or models-out; with --steps, "
            "--serving, --power and --tiles a JSON file."
        ),
    ] = None
    seed: Seed = 0
    # One thread: XGBoost with more threads than free cores is 30 to 90 times slower than with one.
    threads: Threads = 1
    track: Annotated[bool, Option("Log the run to MLflow.")] = True
    register: Annotated[
        str | None, Option("Register the model under this name, here and in MLflow.")
    ] = None
    final: Annotated[
        bool, Option("After testing, save a model fitted on all rows.", ("--final",))
    ] = False
    params: Mapping[str, object] = field(default_factory=dict)
    exclude_device: Annotated[
        Sequence[str],
        Option("Exclude a device, by name or file, from training; may be given again."),
    ] = ()
    # Bounds the memory that the largest families need. Engineering estimate.
    max_rows: Annotated[
        int, Option("For operators: maximum rows of a family to learn from.", least=1)
    ] = 1_000_000
    join: Annotated[
        str | None, Option("For operators: take over the other families of this model.")
    ] = None
    tables: Sequence[Path] = ()


@dataclass(frozen=True)
class TuneSettings(Settings):
    """Settings of ``opcast tune``."""

    command: ClassVar[str] = "tune"
    data: Data
    model: Annotated[str, Option("Estimator to train.")] = "xgboost"
    trials: Annotated[
        int, Option("Number of trials, including those of earlier searches.", least=1)
    ] = 20
    split: Annotated[
        str, Option("Split whose training part to search on; its test part is held out.")
    ] = "unseen_family"
    timeout_s: Annotated[
        float | None,
        Option(
            "Start no trial after this time, such as 90s or 2h.", ("--timeout",), parse=seconds_of
        ),
    ] = None
    folds: Annotated[int, Option("Number of cross-validation folds.", least=2)] = 3
    objective: Annotated[str, Option("Error to minimise: mean_abs_log or median_ape.")] = (
        "mean_abs_log"
    )
    seed: Seed = 0
    threads: Threads = 1
    study: Annotated[
        Path | None, Option("SQLite file for the trials; a search resumes from it.")
    ] = None
    out: Annotated[
        Path | None, Option("JSON file for the best hyperparameters.", check=json_file)
    ] = None
    track: Annotated[bool, Option("Log the trials to MLflow.")] = True


class Allocation(StrEnum):
    """How samples of an operator model are divided among operator families.

    ``family`` gives every family the same number; ``time`` gives the next sample to the family with
    the largest product of its share of the time and the sample's expected information gain.
    """

    FAMILY = "family"
    TIME = "time"


@dataclass(frozen=True)
class CalibrateSettings(Settings):
    """Settings of ``opcast calibrate``, from a dataset or by measuring.

    Attributes:
        suite: Suite of the zoo whose kernels the measuring is for.
        ops: Number of single-op programs that may be measured.
    """

    command: ClassVar[str] = "calibrate"
    device: Annotated[
        str,
        Option("Device to adapt to, name or file; with --budget this machine by default (local)."),
    ] = ""
    data: Annotated[
        Sequence[Path], Option("Dataset measured on the device; may be given again.")
    ] = ()
    budget_s: Annotated[
        float | None,
        Option(
            "Without --data: time to spend on measuring here, such as 5m.",
            ("--budget",),
            parse=seconds_of,
        ),
    ] = None
    model: ModelOpt = "default"
    # Enough for most families to level off (docs/operator-new-device.md).
    samples: Annotated[
        int,
        Option("With --data: samples to learn from; for operators, of each family.", least=1),
    ] = 100
    allocate: Annotated[
        Allocation, Option("Divide operator samples evenly, or by share of the time.")
    ] = Allocation.FAMILY
    out: Annotated[
        Path | None,
        Option("Folder for the adapted model; with --steps and --serving a JSON file."),
    ] = None
    plot: Annotated[
        Path | None, Option("Plot error against number of samples.", check=plot_file)
    ] = None
    seed: Seed = 0
    suite: str = "quick"
    # More than a budget of minutes can measure; the choice among them is what matters.
    ops: int = 600

    @property
    def by_time(self) -> bool:
        """Whether operator families get samples by their share of the time."""
        return self.allocate is Allocation.TIME


@dataclass(frozen=True)
class DriftSettings(Settings):
    """Settings of ``opcast drift``."""

    command: ClassVar[str] = "drift"
    data: Annotated[Path, Option("Table of newly measured operators, or a folder.")]
    model: ModelOpt = "default"
    samples: Annotated[
        int, Option("Samples of each drifted library, family and device to repair.", least=1)
    ] = 20
    false_alarms: Annotated[
        float, Option("Probability of one or more false alarms.", least=1e-9, most=0.5)
    ] = 0.01
    out: Annotated[Path | None, Option("Folder for the repaired model.", check=folder)] = None
    seed: Seed = 0
    devices: OwnDevices = ()


@dataclass(frozen=True)
class TableSettings:
    """What a command is to do with tables that it learns from, predicts or adapts a model to.

    Which of them a command reads is a ``Kind`` of ``cli/options.py``.

    Attributes:
        tables: The tables, CSV or parquet, or a folder of them.
        out: File for the predictions or the model.
        model: Name, file or folder of a model; ``default`` for the one that ships.
        start: Model that learning starts from; empty for none.
        left_out: Table for the predictions of rows that were left out; ``None`` for none.
        calibrate: Whether to adapt to the rows of ``calib_*`` splits that have an answer.
        limit: Maximum rows of each operator table.
        samples: Most models of a family of a table of whole models; ``None`` for all.
        devices: Files of devices of the tables that are not in the catalogue.
        lowering: Of programs, as of ``opcast predict``.
        on_stream: Whether times of programs exclude the host's call, as times of regions do.
        page: HTML page for the figures.
        track: Whether to log to MLflow.
        ray: Address of a Ray cluster; empty for none.
        seed: Of draws.
    """

    tables: Sequence[Path]
    out: Path
    model: str = "default"
    start: str = ""
    left_out: Path | None = None
    calibrate: bool = False
    limit: int | None = None
    samples: int | None = None
    devices: Sequence[str] = ()
    lowering: str = "auto"
    on_stream: bool = False
    page: Path | None = None
    track: bool = True
    ray: str = ""
    seed: int = 0

    @property
    def table(self) -> Path:
        """The only table or folder."""
        (table,) = self.tables
        return table

    def parts(self, suffix: str = "") -> Path:
        """File or folder of finished parts, there until the predictions are written."""
        return self.out.with_name(f"{self.out.stem}-parts{suffix}")


def prices_of(texts: Sequence[str]) -> dict[str, float]:
    """Parse prices: ``DEVICE=2.5`` of one device, ``2.5`` of all others (under an empty name).

    Raises:
        ValueError: One is no number, or below zero.
        DeviceError: A device is not in the catalogue.
    """
    prices = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        try:
            price = float(number)
        except ValueError:
            price = math.nan
        if not 0.0 <= price < math.inf:
            raise ValueError(f"{text!r} is not a price: write 2.5, or h100-sxm=2.5")
        if name:
            from ..features.devices.catalogue import find_typed

            name = find_typed(name).name
        prices[name] = price
    return prices


#: Prices of devices for an hour, by name; under an empty name, of all others.
Prices = Annotated[
    Mapping[str, float],
    Option(
        "Price of a device for an hour, 2.5, or of one by name, h100-sxm=2.5; may be given again. "
        "Prints the cost.",
        ("--price",),
        collect=prices_of,
    ),
]
