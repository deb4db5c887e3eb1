"""Settings of the reports, saved beside their output like those of other commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from ...common.options import (
    Devices,
    LoweringOpt,
    Option,
    Out,
    Seed,
    Threads,
    called,
    folder,
    json_file,
)
from ..settings import Settings

Figures = Annotated[Path, Option("JSON file for the figures.", check=json_file)]


@dataclass(frozen=True)
class AccuracyReportSettings(Settings):
    """Settings of ``opcast report accuracy``."""

    command: ClassVar[str] = "report accuracy"
    data: Annotated[Sequence[Path], Option("Dataset; default: the committed one.")] = ()
    out: Annotated[Path | None, Option("Also write the figures as JSON.", check=json_file)] = None
    threads: Threads = 2


@dataclass(frozen=True)
class DeviceReportSettings(Settings):
    """Settings of ``opcast report devices``.

    Attributes:
        devices: Names or device files; by default those of ``shown_devices.yaml``.
    """

    command: ClassVar[str] = "report devices"
    programs: Annotated[
        Sequence[str], Option("Program by name; may be given again. Default: all.")
    ] = ()
    devices: Devices = ()
    lowering: Annotated[str, Option("xla, fused or op.")] = "xla"
    out: Annotated[
        Path | None,
        Option("Also write the figures: Markdown (.md) or JSON.", check=called(".md", ".json")),
    ] = None


@dataclass(frozen=True)
class SupportReportSettings(Settings):
    """Settings of ``opcast report support``."""

    command: ClassVar[str] = "report support"
    out: Annotated[Path | None, Option("Also write it as Markdown.", check=called(".md"))] = None


@dataclass(frozen=True)
class PagesSettings(Settings):
    """Settings of ``opcast report pages``."""

    command: ClassVar[str] = "report pages"
    out: Out
    left_out: Annotated[
        Path | None,
        Option(
            "Folder with tables of train --left-out (steps.parquet ...) to redraw the plots of."
        ),
    ] = None


@dataclass(frozen=True)
class ClusterReportSettings(Settings):
    """Settings of ``opcast report clusters``.

    Attributes:
        out: JSON file for the figures; plots and parts are written to a folder of the same name.
        models: Names in ``MODELS`` of :mod:`.clusters`; empty for all.
        scaling: Numbers of devices; empty for ``SCALING``.
        grid: Axes of the search for the best plan; ``None`` for ``GRID``.
        workers: Number of processes.
    """

    command: ClassVar[str] = "report clusters"
    published: Annotated[Path | None, Option("Folder with tables of measured collectives.")] = None
    out: Figures = Path("report-out/clusters.json")
    models: Sequence[str] = ()
    scaling: Sequence[int] = ()
    grid: Mapping[str, Sequence[str]] | None = None
    workers: Annotated[int, Option("Processes.", ("--threads",), least=1)] = 2

    @property
    def folder(self) -> Path:
        """Folder of the plots and of intermediate results."""
        return self.out.with_suffix("")


@dataclass(frozen=True)
class OperatorReportSettings(Settings):
    """Settings of ``opcast report operators``.

    Attributes:
        out: JSON file for the figures; parts are written to :attr:`folder`.
        studies: Names in ``STUDIES`` of :mod:`~opcast.models.operators.studies`; empty for all.
    """

    command: ClassVar[str] = "report operators"
    published: Annotated[Path, Option("Folder with tables of published latencies.")]
    out: Figures = Path("report-out/operators.json")
    studies: Annotated[
        Sequence[str],
        Option(
            "estimators, left-out, tensor-core, tensor-core-left-out, next-version; may be given "
            "again. Default: all.",
            ("--study",),
        ),
    ] = ()
    estimators: Annotated[
        Sequence[str], Option("Estimator; may be given again.", ("--model",))
    ] = ()
    families: Annotated[
        Sequence[str], Option("Family such as eager/bmm; may be given again.", ("--family",))
    ] = ()
    # Families with fewer than 200 rows are not fitted (docs/operator-learning.md).
    max_rows: Annotated[
        int | None,
        Option("Maximum rows per family to learn from, and per test split.", least=200),
    ] = None
    seed: Seed = 0
    threads: Threads = 2
    track: Annotated[bool, Option("Log to MLflow.")] = True

    @property
    def folder(self) -> Path:
        """Folder of finished parts of the report."""
        return self.out.with_name(f"{self.out.stem}-parts")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


@dataclass(frozen=True)
class FidelitySettings(Settings):
    """Settings of ``opcast fidelities``.

    Attributes:
        models: Estimators, as for :func:`~opcast.predict.program.fidelities.compare_fidelities`.
        progress: Whether to show progress.
    """

    command: ClassVar[str] = "fidelities"
    devices: Devices = ("tpu-v3", "tpu-v4")
    models: Annotated[
        Sequence[str],
        Option(
            "Estimators, comma-separated.",
            ("--model",),
            parse=_names,
            shown=",".join,
        ),
    ] = ("roofline", "scalesim", "zigzag", "learned", "compiler")
    suite: Annotated[str, Option("Zoo suite: quick, standard, full; default: small programs.")] = ""
    lowering: LoweringOpt = "auto"
    limit: Annotated[int, Option("Maximum number of programs; 0 for all.", least=0)] = 0
    out: Annotated[
        Path, Option("Folder for the predictions; a run resumes from it.", check=folder)
    ] = Path("fidelities-out")
    progress: bool = True
