"""Settings of the commands: a frozen dataclass each, saved beside the command's output.

Fields with an ``Option`` are the command's options (``common/options.py``).
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
    """Base of all settings: the name of the command, and writing them to a file."""

    command: ClassVar[str]

    def save(self, folder: Path) -> None:
        """Write the settings, the command and the version into an output folder."""
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
    # Equals DEFAULT_MIX of datagen/profile/plan.py.
    mix: Annotated[str, Option("Shares of single ops, random programs and zoo programs.")] = (
        "ops=0.35,random=0.35,zoo=0.3"
    )
    ray: Annotated[
        str, Option("Address of a Ray cluster: measure on its hosts with the device.")
    ] = ""
    quiet: Annotated[bool, Option("Hide the progress bar.", ("--quiet",))] = False


@dataclass(frozen=True)
class TrainSettings(Settings):
    """Settings of ``opcast train``; each :class:`~.train_kernels.Trainer` reads some of them.

    Attributes:
        params: Hyperparameters of the estimator.
        tables: Instead of ``data``: folders with tables of attention, experts and layers.
    """

    command: ClassVar[str] = "train"
    data: Data = ()
    model: Annotated[str, Option("Estimator to train.")] = "xgboost"
    split: Annotated[str, Option("For kernels: split to test on, or file with your own.")] = (
        "unseen_family"
    )
    out: Annotated[
        Path | None,
        Option(
            "Folder for the model, by default that of --register or models-out; a JSON file with "
            "--steps, --serving, --models, --power and --tiles."
        ),
    ] = None
    seed: Seed = 0
    # XGBoost with more threads than free cores is 30 to 90 times slower than with one.
    threads: Threads = 1
    track: Annotated[bool, Option("Log the run to MLflow.")] = True
    register: Annotated[
        str | None, Option("Register the model under this name, locally and in MLflow.")
    ] = None
    final: Annotated[
        bool, Option("After testing, save a model fitted on all rows.", ("--final",))
    ] = False
    params: Mapping[str, object] = field(default_factory=dict)
    exclude_device: Annotated[
        Sequence[str],
        Option("Exclude a device, by name or file, from training; may be given again."),
    ] = ()
    # Limits the memory for the largest families. Engineering estimate.
    max_rows: Annotated[
        int, Option("For operators: maximum rows per family to learn from.", least=1)
    ] = 1_000_000
    join: Annotated[
        str | None, Option("For operators: copy all other families from this model.")
    ] = None
    tables: Sequence[Path] = ()


@dataclass(frozen=True)
class TuneSettings(Settings):
    """Settings of ``opcast tune``."""

    command: ClassVar[str] = "tune"
    data: Data
    model: Annotated[str, Option("Estimator to train.")] = "xgboost"
    trials: Annotated[
        int, Option("Number of trials, including those of resumed searches.", least=1)
    ] = 20
    split: Annotated[
        str, Option("Split whose training part is searched on; the test part is held out.")
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
    """How samples are divided among operator families.

    ``family`` gives every family the same number; ``time`` gives each sample to the family with the
    largest product of its share of the time and the sample's expected information gain.
    """

    FAMILY = "family"
    TIME = "time"


@dataclass(frozen=True)
class CalibrateSettings(Settings):
    """Settings of ``opcast calibrate``, from a dataset or by measuring.

    Attributes:
        suite: Zoo suite whose kernels the calibration targets.
        ops: Number of single-op programs among the candidates.
    """

    command: ClassVar[str] = "calibrate"
    device: Annotated[
        str,
        Option("Device to adapt to, name or file; with --budget the default is local."),
    ] = ""
    data: Annotated[
        Sequence[Path], Option("Dataset measured on the device; may be given again.")
    ] = ()
    budget_s: Annotated[
        float | None,
        Option(
            "Instead of --data: time to spend on measuring here, such as 5m.",
            ("--budget",),
            parse=seconds_of,
        ),
    ] = None
    model: ModelOpt = "default"
    # Errors of most families level off by then (docs/operator-new-device.md).
    samples: Annotated[
        int,
        Option("With --data: samples to learn from, per family for operators.", least=1),
    ] = 100
    allocate: Annotated[
        Allocation, Option("Divide samples of operators evenly, or by share of the time.")
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
    # More than can be measured in minutes, to have a choice.
    ops: int = 600

    @property
    def by_time(self) -> bool:
        """Whether samples are divided by share of the time."""
        return self.allocate is Allocation.TIME


@dataclass(frozen=True)
class DriftSettings(Settings):
    """Settings of ``opcast drift``."""

    command: ClassVar[str] = "drift"
    data: Annotated[Path, Option("Table of newly measured operators, or a folder.")]
    model: ModelOpt = "default"
    samples: Annotated[int, Option("Samples for the repair of each drifted group.", least=1)] = 20
    false_alarms: Annotated[
        float, Option("Probability of at least one false alarm.", least=1e-9, most=0.5)
    ] = 0.01
    out: Annotated[Path | None, Option("Folder for the repaired model.", check=folder)] = None
    seed: Seed = 0
    devices: OwnDevices = ()


@dataclass(frozen=True)
class TableSettings:
    """Settings of commands that train on, evaluate or calibrate with tables of measurements.

    ``Kind`` in ``cli/options.py`` defines which of them a command reads.

    Attributes:
        tables: Tables, CSV or parquet, or a folder of tables.
        out: File for the predictions or the model.
        model: Name, file or folder of a model; ``default`` for the shipped one.
        start: Model to start training from; empty for none.
        left_out: Table for the predictions of held-out rows; ``None`` for none.
        calibrate: Whether to adapt to the measured rows of ``calib_*`` splits.
        limit: Maximum rows of each operator table.
        samples: Maximum models per family of a table of whole models; ``None`` for all.
        devices: Files of devices that are not in the catalogue.
        lowering: Lowering of programs, as for ``opcast predict``.
        on_stream: Whether measured times exclude the launch by the host, as those of regions do.
        page: HTML page for the figures.
        track: Whether to log to MLflow.
        ray: Address of a Ray cluster; empty for none.
        seed: Random seed.
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
        """File or folder of finished parts, which is deleted once the predictions are written."""
        return self.out.with_name(f"{self.out.stem}-parts{suffix}")


def prices_of(texts: Sequence[str]) -> dict[str, float]:
    """Parse prices: ``DEVICE=2.5`` for a device, ``2.5`` for all others (with an empty name).

    Raises:
        ValueError: A price is not a non-negative number.
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


#: Prices per device and hour, by name; an empty name stands for all others.
Prices = Annotated[
    Mapping[str, float],
    Option(
        "Price per device and hour, 2.5, or of a certain device, h100-sxm=2.5; may be given again. "
        "Prints the cost.",
        ("--price",),
        collect=prices_of,
    ),
]
