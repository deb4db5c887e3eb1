"""Settings of the reports, saved beside their output like other commands' settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..settings import Settings


@dataclass(frozen=True)
class AccuracyReportSettings(Settings):
    """Settings of ``opcast report accuracy``.

    Attributes:
        data: Folders of the dataset; none for the committed one.
        out: JSON file for the figures.
        threads: Threads for training.
    """

    command: ClassVar[str] = "report accuracy"
    data: Sequence[Path] = ()
    out: Path | None = None
    threads: int = 2


@dataclass(frozen=True)
class DeviceReportSettings(Settings):
    """Settings of ``opcast report devices``.

    Attributes:
        programs: Names of programs; none for all.
        devices: Names or device files; none for ``DEVICES`` of :mod:`.devices`.
        lowering: Lowering of all programs.
        out: File for the figures: Markdown if it ends in ``.md``, else JSON.
    """

    command: ClassVar[str] = "report devices"
    programs: Sequence[str] = ()
    devices: Sequence[str] = ()
    lowering: str = "xla"
    out: Path | None = None


@dataclass(frozen=True)
class ClusterReportSettings(Settings):
    """Settings of ``opcast report clusters``.

    Attributes:
        published: Folder with measured collectives; ``None`` omits them.
        out: JSON file for the figures; plots and parts go into a folder of its name.
        models: Names of ``MODELS`` of :mod:`.clusters`; none for all.
        scaling: Numbers of devices; none for ``SCALING``.
        grid: Axes of the search for the best plan; ``None`` for ``GRID``.
        workers: Processes of the searches.
    """

    command: ClassVar[str] = "report clusters"
    published: Path | None = None
    out: Path = Path("report-out") / "clusters.json"
    models: Sequence[str] = ()
    scaling: Sequence[int] = ()
    grid: Mapping[str, Sequence[str]] | None = None
    workers: int = 1

    @property
    def folder(self) -> Path:
        """Folder of the plots and of the results of searches and fits."""
        return self.out.with_suffix("")


@dataclass(frozen=True)
class OperatorReportSettings(Settings):
    """Settings of ``opcast report operators``.

    Attributes:
        published: Folder with published tables, itself or in its subfolders.
        out: JSON file for the figures; the parts go into :attr:`folder`.
        studies: Names of ``STUDIES`` of :mod:`~opcast.models.operators.studies`; none for all.
        estimators: Estimators, instead of the studies' own.
        families: Families to restrict the report to.
        max_rows: Maximum rows, instead of the studies' own.
        seed: Seed of draws and regressors.
        threads: Threads of the estimators.
        track: Whether to log to MLflow.
    """

    command: ClassVar[str] = "report operators"
    published: Path
    out: Path = Path("report-out") / "operators.json"
    studies: Sequence[str] = ()
    estimators: Sequence[str] = ()
    families: Sequence[str] = ()
    max_rows: int | None = None
    seed: int = 0
    threads: int = 1
    track: bool = True

    @property
    def folder(self) -> Path:
        """Folder of the parts of the report."""
        return self.out.with_name(f"{self.out.stem}-parts")
