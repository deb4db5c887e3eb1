"""Commands that train, tune, evaluate and list models, and the demonstration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import (
    Data,
    Json,
    ModelOpt,
    OptionalData,
    Out,
    Seed,
    Threads,
    folder,
    json_file,
    make_console,
    named_out,
    page_file,
    refuse,
    refuse_unused,
    seconds_of,
    table_file,
)


def train(
    context: typer.Context,
    data: OptionalData = None,
    steps: Annotated[
        Path | None,
        typer.Option(help="Instead of --data: a table of measured training steps to learn from."),
    ] = None,
    serving: Annotated[
        Path | None,
        typer.Option(help="Instead of --data: a table of measured serving to learn from."),
    ] = None,
    power: Annotated[
        Path | None,
        typer.Option(help="Instead of --data: a table of operators with their board power."),
    ] = None,
    tiles: Annotated[
        Path | None,
        typer.Option(help="Instead of --data: a table of kernels with tile configurations."),
    ] = None,
    blocks: Annotated[
        Path | None,
        typer.Option(help="Instead of --data: folder of tables of layers and mixed batches."),
    ] = None,
    model: Annotated[str, typer.Option(help="Estimator to train.")] = "xgboost",
    split: Annotated[
        str, typer.Option(help="For kernels: split to test on, or a table of your own.")
    ] = "unseen_family",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Folder for the model, by default that of --register or models-out; with --steps, "
            "--serving, --power and --tiles a JSON file.",
        ),
    ] = None,
    seed: Seed = 0,
    threads: Threads = 1,
    track: Annotated[bool, typer.Option(help="Log the run to MLflow.")] = True,
    register: Annotated[
        str | None, typer.Option(help="Register the model under this name, here and in MLflow.")
    ] = None,
    final: Annotated[
        bool, typer.Option("--final", help="After testing, save a model fitted on all rows.")
    ] = False,
    params: Annotated[
        Path | None,
        typer.Option("--params", help="JSON file with hyperparameters, as opcast tune writes it."),
    ] = None,
    exclude_device: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude-device",
            help="Exclude a device, by name or file, from training; may be given again.",
        ),
    ] = None,
    max_rows: Annotated[
        int, typer.Option(help="For operators: maximum rows of a family to learn from.")
    ] = 1_000_000,
    join: Annotated[
        str | None,
        typer.Option(help="For operators: take over the other families of this model."),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            "--from", help="For serving: model to start from; 'default' for the one that ships."
        ),
    ] = None,
) -> None:
    """Train a model, print its metrics, save and track it.

    The metrics are printed beside the label noise; the run is logged to MLflow.
    """
    if sum(given is not None for given in (data, steps, serving, power, tiles, blocks)) != 1:
        raise typer.BadParameter(
            "give one of --data, --steps, --serving, --power, --tiles and --blocks"
        )
    # Small models are files, the others folders.
    if any(given is not None for given in (steps, serving, power, tiles)):
        named_out(out, json_file)
    else:
        named_out(out, folder)
    if tiles is not None:
        refuse_unused(context, "training on tiles", {"tiles", "out", "seed"})
        from ..workflows.measured.tiles import run_train_tiles
        from ..workflows.settings import TileSettings

        run_train_tiles(make_console(), TileSettings(tiles, out or Path("tiles.json"), seed=seed))
        return
    if power is not None:
        refuse_unused(context, "training on power", {"power", "out", "seed"})
        from ..workflows.measured.power import run_train_power
        from ..workflows.settings import PowerSettings

        run_train_power(make_console(), PowerSettings(power, out or Path("power.json"), seed=seed))
        return
    if serving is not None:
        used = {"serving", "out", "seed", "track", "start"}
        refuse_unused(context, "training on serving", used)
        from ..workflows.serving.train import run_train_serving
        from ..workflows.settings import ServingSettings

        told = ServingSettings(
            serving, out or Path("serving.json"), seed=seed, track=track, start=start or ""
        )
        run_train_serving(make_console(), told)
        return
    if steps is not None:
        refuse_unused(context, "training on steps", {"steps", "out", "seed", "track"})
        from ..workflows.settings import StepSettings
        from ..workflows.train_steps import run_train_steps

        run_train_steps(
            make_console(), StepSettings(steps, out or Path("steps.json"), seed=seed, track=track)
        )
        return
    if blocks is not None:
        used = {"out", "seed", "threads", "track", "register", "final", "exclude_device"}
        refuse_unused(context, "training on blocks", used | {"blocks", "max_rows", "join"})
        from ..workflows.settings import TrainSettings
        from ..workflows.train_operators import run_train_blocks

        own = TrainSettings(
            blocks=blocks,
            out=out,
            seed=seed,
            threads=threads,
            track=track,
            register=register,
            final=final,
            exclude_device=exclude_device or (),
            max_rows=max_rows,
            join=join,
        )
        run_train_blocks(make_console(), own)
        return
    assert data is not None
    from ..features.dataset import Dataset
    from ..workflows.settings import TrainSettings
    from ..workflows.train import trainer_of
    from ..workflows.training import require_tracking

    chosen = {}
    if params is not None:
        from ..models.training.tuning import read_params

        # Refused if the file was written for another model.
        chosen = read_params(params, model)
    dataset = Dataset.load(*data)
    # What the dataset holds decides which options apply, so it is read before they are checked.
    trainer = trainer_of(dataset, model)
    # Options that the chosen trainer would ignore are refused, not accepted silently.
    refuse_unused(context, trainer.subject, trainer.fields)
    if track:
        require_tracking(register)
    settings = TrainSettings(
        data=data,
        model=model,
        split=split,
        out=out,
        seed=seed,
        threads=threads,
        track=track,
        register=register,
        final=final,
        params=chosen,
        exclude_device=exclude_device or (),
        max_rows=max_rows,
        join=join,
    )
    trainer.run(make_console(), dataset, settings)


def tune(
    data: Data,
    model: Annotated[str, typer.Option(help="Estimator to train.")] = "xgboost",
    trials: Annotated[
        int, typer.Option(help="Number of trials, including those of earlier searches.")
    ] = 20,
    split: Annotated[
        str, typer.Option(help="Split whose training part to search on; its test part is held out.")
    ] = "unseen_family",
    timeout: Annotated[
        str | None, typer.Option(help="Start no trial after this time, such as 90s or 2h.")
    ] = None,
    folds: Annotated[int, typer.Option(help="Number of cross-validation folds.")] = 3,
    objective: Annotated[
        str, typer.Option(help="Error to minimise: mean_abs_log or median_ape.")
    ] = "mean_abs_log",
    seed: Seed = 0,
    threads: Threads = 1,
    study: Annotated[
        Path | None, typer.Option(help="SQLite file for the trials; a search resumes from it.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", callback=json_file, help="JSON file for the best hyperparameters."),
    ] = None,
    track: Annotated[bool, typer.Option(help="Log the trials to MLflow.")] = True,
) -> None:
    """Search for a model's hyperparameters by cross-validation.

    It can be stopped at any time, and resumes.
    """
    from ..workflows.settings import TuneSettings
    from ..workflows.tune import run_tune

    settings = TuneSettings(
        data=data,
        model=model,
        split=split,
        trials=trials,
        timeout_s=None if timeout is None else seconds_of(timeout),
        folds=folds,
        objective=objective,
        seed=seed,
        threads=threads,
        study=study,
        out=out,
        track=track,
    )
    run_tune(make_console(), settings)


def demo(
    out: Out = Path("demo-out"),
    budget: Annotated[str, typer.Option(help="Time to spend on calibrating.")] = "3m",
) -> None:
    """Predict for absent chips, calibrate to this machine, test, track."""
    from ..workflows.demo import run_demo

    run_demo(make_console(), out, seconds_of(budget))


def evaluate(
    context: typer.Context,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            callback=table_file,
            help="Table of the predictions: .parquet, .csv or .json.",
        ),
    ],
    published: Annotated[
        Path | None,
        typer.Option(help="Published table of operators, products or collectives, or a folder."),
    ] = None,
    steps: Annotated[
        Path | None,
        typer.Option(help="Table of training steps, CSV or parquet; see docs/steps.md."),
    ] = None,
    serving: Annotated[
        Path | None,
        typer.Option(help="Table of measured serving, CSV or parquet; see docs/serving.md."),
    ] = None,
    programs: Annotated[
        Path | None,
        typer.Option(
            help="Folder of programs with a CSV of their files, devices and times, or of steps."
        ),
    ] = None,
    regions: Annotated[
        Path | None, typer.Option(help="Folder of regions of programs, like --programs.")
    ] = None,
    lowering: Annotated[
        str, typer.Option(help="With --programs and --regions: xla, fused, op or auto.")
    ] = "auto",
    model: ModelOpt = "default",
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="Calibrate on the rows of calib_* splits that have a latency."
        ),
    ] = False,
    page: Annotated[
        Path | None,
        typer.Option(
            callback=page_file, help="With --steps: HTML page with the errors and parity plots."
        ),
    ] = None,
    track: Annotated[
        bool, typer.Option(help="Except with --published: log the figures to MLflow.")
    ] = True,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum rows of each operator table, drawn at random."),
    ] = None,
    ray: Annotated[
        str,
        typer.Option(help="With --published: address of a Ray cluster; 'local' starts one."),
    ] = "",
    device: Annotated[
        list[str] | None,
        typer.Option(
            help="With --published: file of a device of the table that is not in the catalogue; "
            "may be given again."
        ),
    ] = None,
) -> None:
    """Predict published tables of operators, steps, serving or programs and print the errors.

    Every row is predicted; errors are printed for the rows that have a latency.
    """
    if sum(table is not None for table in (published, steps, serving, programs, regions)) != 1:
        raise typer.BadParameter(
            "give one of --published, --steps, --serving, --programs and --regions"
        )
    if serving is not None:
        used = {"out", "serving", "model", "calibrate", "track"}
        refuse_unused(context, "evaluating serving", used)
        from ..workflows.serving.evaluate import run_evaluate_serving
        from ..workflows.settings import ServingSettings

        asked = ServingSettings(serving, out, model, calibrate=calibrate, track=track)
        run_evaluate_serving(make_console(), asked)
        return
    measured = programs or regions
    if measured is not None:
        used = {"out", "programs", "regions", "model", "lowering", "track"}
        refuse_unused(context, "evaluating programs", used)
        from ..workflows.evaluate_programs import run_evaluate_programs
        from ..workflows.settings import ProgramSettings

        on_stream = regions is not None
        chosen = ProgramSettings(measured, out, model, lowering, track, on_stream)
        run_evaluate_programs(make_console(), chosen)
        return
    if steps is not None:
        used = {"out", "steps", "model", "calibrate", "page", "track"}
        refuse_unused(context, "evaluating steps", used)
        from ..workflows.settings import StepSettings
        from ..workflows.steps import run_evaluate_steps

        settings = StepSettings(steps, out, model, calibrate=calibrate, page=page, track=track)
        run_evaluate_steps(make_console(), settings)
        return
    assert published is not None
    used = {"out", "published", "model", "calibrate", "limit", "ray", "device"}
    refuse_unused(context, "evaluating operators", used)
    from ..workflows.settings import EvaluateSettings
    from ..workflows.train_operators import run_evaluate

    asked_rows = EvaluateSettings(published, out, model, calibrate, limit, ray, device or ())
    run_evaluate(make_console(), asked_rows)


def compare(
    context: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN RUN...]", help="Runs by name or id: what differs in them."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Number of newest runs to print.")] = 20,
) -> None:
    """Print tracked runs side by side."""
    from ..common.tables_text import print_frame
    from ..models.tracking.mlflow_store import compare as compare_runs
    from ..models.tracking.mlflow_store import differences

    if not names:
        # A run's name contains model and split, which is enough on a narrow terminal.
        spare = ("spearman", "split", "model", "noise_median_ape", "bias")
        print_frame(make_console(), compare_runs(limit=limit), "runs (0.1 is 10 %)", spare)
        return
    refuse(context, "a comparison of named runs", {"limit"})
    if len(names) < 2:
        raise typer.BadParameter("name two runs or more; opcast compare lists them")
    print_frame(make_console(), differences(names), "what differs, and metrics of the whole")


def ui(port: Annotated[int, typer.Option(help="Port on localhost.")] = 5000) -> None:
    """Open MLflow's user interface on the runs tracked here."""
    from ..models.tracking.mlflow_store import serve_ui

    raise typer.Exit(serve_ui(port, typer.echo))


def models(
    name: Annotated[
        str | None, typer.Argument(help="Model whose card to print; default: list all models.")
    ] = None,
    json_output: Json = False,
) -> None:
    """List the available models, or print a model card.

    Available are the models that ship with opcast and those registered by opcast train.
    """
    from ..workflows.model_cards import list_models, show_model

    if name is None:
        list_models(make_console(), as_json=json_output)
    else:
        show_model(make_console(), name, as_json=json_output)
