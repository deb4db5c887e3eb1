"""The command that adapts a model to a device: from a dataset of it, or by measuring here."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .cli_common import make_console, seconds_of


class Allocation(StrEnum):
    """How the samples of an operator model are divided among families.

    ``family`` gives each the same number; ``time`` gives the next one to the family whose share of
    the time, times what its next sample is expected to say, is largest.
    """

    FAMILY = "family"
    TIME = "time"


def calibrate(
    device: Annotated[str, typer.Option(help="Device to adapt to; local for the one at hand.")],
    data: Annotated[
        list[Path] | None, typer.Option("--data", help="Dataset of it; may be given again.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Without --data: time to measure here, such as 5m.")
    ] = None,
    model: Annotated[str, typer.Option("--model", help="Model name or folder.")] = "default",
    samples: Annotated[
        int, typer.Option(min=1, help="Samples to learn from; of operators, of each family.")
    ] = 100,
    allocate: Annotated[
        Allocation, typer.Option(help="Divide samples of operators evenly, or by share of time.")
    ] = Allocation.FAMILY,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the model.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write error against samples.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
) -> None:
    """Adapt a model to a device from few samples, of a dataset or measured here, chosen to tell."""
    if bool(data) == (budget is not None):
        raise typer.BadParameter("give either --data or --budget")

    console = make_console()
    if budget is not None:
        from .calibration import run_calibrate_budget

        if plot is not None or allocate is not Allocation.FAMILY:
            raise typer.BadParameter("--plot and --allocate go with --data")
        run_calibrate_budget(console, device, model, seconds_of(budget), out=out, seed=seed)
        return
    from .calibration_data import run_calibrate_kernels, run_calibrate_operators
    from .features.dataset import Dataset
    from .operators import is_operator_dataset

    dataset = Dataset.load(*(data or ()))
    if is_operator_dataset(dataset):
        run_calibrate_operators(
            console, dataset, device, model, samples=samples, out=out, plot=plot, seed=seed,
            by_time=allocate is Allocation.TIME,
        )  # fmt: skip
    else:
        run_calibrate_kernels(
            console, dataset, device, model, samples=samples, out=out, plot=plot, seed=seed
        )


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(calibrate)
