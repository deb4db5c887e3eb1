"""Commands that train, tune, evaluate and list models, and the demo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from ..common.options import (
    Budget,
    Json,
    ModelOpt,
    Option,
    Out,
    folder,
    json_file,
    page_file,
    table_file,
)
from ..workflows.settings import TrainSettings, TuneSettings
from .options import kinds_of, make_console, named_out, refuse, refuse_unused, run_kind


@dataclass(frozen=True)
class Learned:
    """Tables to train on instead of a dataset."""

    steps: Annotated[
        list[Path] | None,
        Option("Instead of --data: table of measured training steps; may be given again."),
    ] = None
    serving: Annotated[
        list[Path] | None,
        Option("Instead of --data: table of measured serving runs; may be given again."),
    ] = None
    models: Annotated[
        list[Path] | None,
        Option("Instead of --data: table of whole PyTorch models; may be given again."),
    ] = None
    power: Annotated[
        Path | None, Option("Instead of --data: a table of operators with their board power.")
    ] = None
    tiles: Annotated[
        Path | None, Option("Instead of --data: a table of kernels with tile configurations.")
    ] = None
    blocks: Annotated[
        Path | None, Option("Instead of --data: folder of tables of layers and mixed batches.")
    ] = None


def train(
    context: typer.Context,
    settings: TrainSettings,
    tables: Learned,
    params: Annotated[
        Path | None, Option("JSON file with hyperparameters, as opcast tune writes it.")
    ] = None,
    start: Annotated[
        str | None,
        Option("With --serving: model to start from; 'default' is the shipped one.", ("--from",)),
    ] = None,
    left_out: Annotated[
        Path | None,
        Option(
            "With --steps, --serving or --models: table for the predictions of held-out rows.",
            check=table_file,
        ),
    ] = None,
    samples: Annotated[
        int | None,
        Option(
            "With --models: maximum models per family, each in every mode; all by default.",
            least=1,
        ),
    ] = None,
) -> None:
    """Train a model, print its metrics, save and track it.

    The metrics are printed beside the label noise, and the run is logged to MLflow.
    """
    kinds = kinds_of("train")
    files = any(context.params[name] for name, kind in kinds.items() if kind.out)
    named_out(settings.out, json_file if files else folder)
    if run_kind(context, kinds, "data"):
        return
    from ..features.dataset import Dataset
    from ..workflows.train_kernels import trainer_of
    from ..workflows.training import require_tracking

    if params is not None:
        from ..models.training.tuning import read_params

        settings = replace(settings, params=read_params(params, settings.model))
    dataset = Dataset.load(*settings.data)
    # The contents of the dataset determine which options apply.
    trainer = trainer_of(dataset, settings.model)
    refuse_unused(context, trainer.subject, trainer.fields)
    if settings.track:
        require_tracking(settings.register)
    trainer.run(make_console(), dataset, settings)


def tune(settings: TuneSettings) -> None:
    """Search for a model's hyperparameters by cross-validation.

    It can be stopped at any time and resumes when it is run again.
    """
    from ..workflows.train_kernels import run_tune

    run_tune(make_console(), settings)


def demo(
    out: Out = Path("demo-out"),
    budget: Budget = 180.0,
) -> None:
    """Run the demo: predict for absent chips, calibrate to this machine, test, track."""
    from ..workflows.demo import run_demo

    run_demo(make_console(), out, budget)


@dataclass(frozen=True)
class Evaluated:
    """The tables to evaluate, the model, and the files to write."""

    out: Annotated[
        Path, Option("Table of the predictions: .parquet, .csv or .json.", check=table_file)
    ]
    published: Annotated[
        Path | None, Option("Published table of operators, products or collectives, or a folder.")
    ] = None
    steps: Annotated[
        Path | None, Option("Table of training steps, CSV or parquet; see docs/steps.md.")
    ] = None
    serving: Annotated[
        Path | None, Option("Table of serving runs, CSV or parquet; see docs/serving.md.")
    ] = None
    models: Annotated[
        Path | None,
        Option("Table of whole PyTorch models, CSV or parquet; see docs/torch.md."),
    ] = None
    programs: Annotated[
        Path | None,
        Option("Folder of programs, with a CSV of their files, devices and times, or of steps."),
    ] = None
    regions: Annotated[Path | None, Option("Folder of regions of programs, like --programs.")] = (
        None
    )
    lowering: Annotated[str, Option("With --programs and --regions: xla, fused, op or auto.")] = (
        "auto"
    )
    model: ModelOpt = "default"
    calibrate: Annotated[
        bool,
        Option("Calibrate on the rows of calib_* splits that have a latency.", ("--calibrate",)),
    ] = False
    page: Annotated[
        Path | None,
        Option(
            "With --steps and --models: HTML page with the errors and parity plots.",
            check=page_file,
        ),
    ] = None
    track: Annotated[bool, Option("Except with --published: log the figures to MLflow.")] = True
    limit: Annotated[
        int | None, Option("Maximum rows of each operator table, drawn at random.", least=1)
    ] = None
    ray: Annotated[
        str, Option("With --published and --models: address of a Ray cluster; 'local' starts one.")
    ] = ""
    devices: Annotated[
        Sequence[str],
        Option(
            "With --published: file of a device that is not in the catalogue; may be given again.",
            ("--device",),
        ),
    ] = ()


def evaluate(context: typer.Context, asked: Evaluated) -> None:
    """Predict tables of operators, steps, serving, models or programs and print the errors.

    Every row is predicted; the errors are of the rows that have a measured latency.
    """
    run_kind(context, kinds_of("evaluate"))


def compare(
    context: typer.Context,
    names: Annotated[
        Sequence[str],
        Option("Runs to compare, by name or id.", metavar="[RUN RUN...]", argument=True),
    ] = (),
    limit: Annotated[int, Option("Number of newest runs to print.", least=1)] = 20,
) -> None:
    """Print tracked runs side by side."""
    from ..common.tables_text import print_frame
    from ..models.tracking.tracked_runs import compare as compare_runs
    from ..models.tracking.tracked_runs import differences

    if not names:
        # Dropped first on a narrow terminal; a run's name contains the model and the split.
        spare = ("spearman", "split", "model", "noise_median_ape", "bias")
        print_frame(make_console(), compare_runs(limit=limit), "runs (0.1 is 10 %)", spare)
        return
    refuse(context, "a comparison of named runs", {"limit"})
    if len(names) < 2:
        raise typer.BadParameter("name two runs or more; opcast compare lists them")
    print_frame(make_console(), differences(names), "differences, and overall metrics")


def ui(port: Annotated[int, Option("Port on localhost.", least=1, most=65535)] = 5000) -> None:
    """Open MLflow's user interface for the runs tracked here."""
    from ..models.tracking.mlflow_store import serve_ui

    raise typer.Exit(serve_ui(port, typer.echo))


def models(
    name: Annotated[
        str | None, Option("Model whose card to print; default: list all models.", argument=True)
    ] = None,
    against: Annotated[
        str | None, Option("Another model, to print its errors beside those of the first.")
    ] = None,
    json_output: Json = False,
) -> None:
    """List the available models, or print a model card.

    These are the models that ship with opcast and those registered by opcast train.
    """
    from ..workflows.model_cards import list_models, show_model

    if json_output and against is not None:
        raise typer.BadParameter("--against prints a table: leave --json out")
    if name is None and against is not None:
        raise typer.BadParameter("name both models: opcast models NAME --against OTHER")
    if name is None:
        list_models(make_console(), as_json=json_output)
    else:
        show_model(make_console(), name, as_json=json_output, against=against)
