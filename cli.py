"""The command line. Every command imports what it needs when it runs, so that --help stays fast."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from . import (
    cli_cluster,
    cli_data,
    cli_export,
    cli_fidelities,
    cli_lower,
    cli_models,
    cli_partition,
    cli_report,
    cli_serve,
    cli_simulate,
)
from .cli_calibrate import register as register_calibrate
from .cli_common import (
    Json,
    make_console,
    measure_once,
    one_line,
    print_json,
    seconds_of,
    trips_of,
)
from .cli_guard import guarded

app = typer.Typer(
    name="opcast",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Predict how long an ML program takes on a device, why, and how sure that is.",
)
cli_simulate.register(app)
cli_data.register(app)
cli_cluster.register(app)
cli_models.register(app)
cli_export.register(app)
cli_partition.register(app)
cli_report.register(app)
cli_serve.register(app)
cli_fidelities.register(app)

Out = Annotated[Path, typer.Option("--out", help="Folder or file to write.")]
Data = Annotated[list[Path], typer.Option("--data", help="Dataset folder; may be given again.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
Threads = Annotated[int, typer.Option("--threads", help="Threads for training.")]
ProgramArg = Annotated[Path, typer.Argument(help="StableHLO text, bytecode, export, or HLO text.")]
ProgramOrNone = Annotated[
    Path | None, typer.Argument(help="StableHLO text, bytecode, export, or HLO text.")
]
OpOpt = Annotated[
    str | None,
    typer.Option(
        "--op", help="Instead: a library operator, 'linear m=1 n=4096 k=4096 dtype=bf16'."
    ),
]
DeviceOpt = Annotated[
    str, typer.Option("--device", help="Name (opcast device --list), device file, or 'local'.")
]
ModelOpt = Annotated[
    str, typer.Option("--model", help="Model name or folder; predict: or several, comma-separated.")
]
LoweringOpt = Annotated[str, typer.Option("--lowering", help="auto, xla, fused or op.")]
Trips = Annotated[
    list[str] | None,
    typer.Option("--trip-count", help="Trips of a loop, LOOP=N, or N for all unknown loops."),
]


def _version(wanted: bool) -> None:
    if wanted:
        from . import __version__

        typer.echo(f"opcast {__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Predict how long an ML program takes on a device, why, and how sure that is."""


@app.command()
def predict(
    program: ProgramOrNone = None,
    device: DeviceOpt = "local",
    model: ModelOpt = "default",
    lowering: LoweringOpt = "auto",
    top: Annotated[int, typer.Option(min=1, help="Kernels to print.")] = 10,
    json_output: Json = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail without learned estimate.")
    ] = False,
    trip_count: Trips = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Write a Chrome trace of the predicted schedule.")
    ] = None,
    fallback: Annotated[
        str, typer.Option(help="Lowering where the device's compiler is missing or fails.")
    ] = "",
    op: OpOpt = None,
    cluster: Annotated[
        str, typer.Option(help="For a partitioned program: its devices, such as h100-sxm-x4.")
    ] = "",
) -> None:
    """Predict a program's time on a device or a cluster: total, kernels, memory."""
    if _one_of(program, op):
        from .predict.operator import predict_op, print_op

        estimate = predict_op(str(op), device, model)
        print_json(asdict(estimate)) if json_output else print_op(make_console(), estimate)
        return
    assert program is not None
    if cluster:
        cli_simulate.predict_on_cluster(
            program, cluster, model, lowering, trips=trips_of(trip_count), top=top,
            timeline=timeline, json_output=json_output, fallback=fallback,
        )  # fmt: skip
        return
    if "," in model:
        if strict or timeline:
            raise typer.BadParameter("--strict and --timeline take a single --model")
        cli_fidelities.predict_side_by_side(
            program, device, model, lowering, trips=trips_of(trip_count), fallback=fallback,
            top=top, json_output=json_output,
        )  # fmt: skip
        return
    from .predict.predictor import load_for_programs

    predictor = load_for_programs(model)
    measure_once(device, predictor)
    prediction = predictor.predict(
        program, device=device, lowering=lowering, strict=strict, trip_counts=trips_of(trip_count),
        fallback=fallback,
    )  # fmt: skip
    if timeline is not None:
        from .predict.timeline import write_chrome_trace

        write_chrome_trace(prediction, timeline)
    if json_output:
        print_json(prediction.to_dict())
        return
    from .predict.render import print_prediction

    print_prediction(make_console(), prediction, top)


@app.command()
def explain(
    program: ProgramOrNone = None,
    device: DeviceOpt = "local",
    model: ModelOpt = "default",
    lowering: LoweringOpt = "auto",
    kernel: Annotated[
        str | None, typer.Option("--kernel", help="Explain the kernel of this name.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Costliest kernels to explain.")] = 3,
    neighbours: Annotated[
        int, typer.Option(min=0, help="Measured kernels to show beside each.")
    ] = 3,
    trip_count: Trips = None,
    json_output: Json = False,
    op: OpOpt = None,
    data: Annotated[
        list[Path] | None,
        typer.Option("--data", help="With --op: dataset to look for measured neighbours in."),
    ] = None,
) -> None:
    """Say why the costliest kernels of a program, or an operator, take what they take."""
    if _one_of(program, op):
        from .predict.operator import explain_operator, print_op_explanation

        reasons = explain_operator(str(op), device, model, data or (), neighbours)
        print_json(reasons.to_dict()) if json_output else print_op_explanation(
            make_console(), reasons
        )
        return
    from .predict.explain import explain as explain_program
    from .predict.predictor import load_for_programs

    predictor = load_for_programs(model)
    measure_once(device, predictor)
    found = explain_program(
        predictor, program, device=device, lowering=lowering, trip_counts=trips_of(trip_count),
        kernel=kernel, top=top, neighbours=neighbours,
    )  # fmt: skip
    if json_output:
        print_json(found.to_dict())
        return
    from .predict.render_explain import print_explanation

    print_explanation(make_console(), found)


@app.command()
def check(
    program: ProgramArg,
    model: ModelOpt = "default",
    top: Annotated[int, typer.Option(min=1, help="Kernels to print.")] = 10,
    json_output: Json = False,
) -> None:
    """Run a program on this machine and print predicted beside measured, kernel by kernel."""
    from .checking import check_programs, print_check
    from .predict.predictor import load_for_programs

    (result,) = check_programs([program], load_for_programs(model))
    if json_output:
        print_json(result.to_dict())
    else:
        print_check(make_console(), result, top)


@app.command()
def profile(
    out: Out,
    device: Annotated[str, typer.Option(help="cpu, gpu, tpu or local.")] = "local",
    budget: Annotated[str, typer.Option(help="Time to spend, such as 90s, 10m or 2h.")] = "10m",
    seed: Seed = 0,
    suite: Annotated[str, typer.Option(help="Zoo suite: quick, standard or full.")] = "standard",
    mix: Annotated[
        str, typer.Option(help="Shares of ops, random programs and zoo.")
    ] = "ops=0.35,random=0.35,zoo=0.3",
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Measure kernels and programs on a device into a dataset. Stop it any time; it resumes."""
    from .workflows import run_profile

    run_profile(
        out, device, seconds_of(budget), seed=seed, suite=suite, mix=mix, progress=not quiet
    )


@app.command()
def device(
    name: Annotated[
        str | None, typer.Argument(help="Name or device file to print instead of measuring.")
    ] = None,
    save: Annotated[bool, typer.Option("--save", help="Keep it for --device local.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="List the catalogue.")] = False,
    json_output: Json = False,
) -> None:
    """Measure this device and print it as a device file; or print a known device, or all."""
    from .workflows import list_devices, measure_device, show_device

    if sum((name is not None, save, listed)) > 1:
        raise typer.BadParameter("give a NAME, --save or --list")
    if listed:
        list_devices(make_console(), as_json=json_output)
    elif name is not None:
        show_device(make_console(), name, as_json=json_output)
    else:
        sys.stdout.write(measure_device(save=save).to_json() + "\n")


@app.command()
def train(
    data: Data,
    model: Annotated[str, typer.Option(help="Name of the estimator.")] = "xgboost",
    split: Annotated[str, typer.Option(help="Split to evaluate on.")] = "unseen_family",
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the model.")] = None,
    seed: Seed = 0,
    threads: Threads = 1,
    track: Annotated[bool, typer.Option(help="Log the run to MLflow.")] = True,
    register: Annotated[
        str | None, typer.Option(help="Name to register the model under, here and in MLflow.")
    ] = None,
    final: Annotated[
        bool, typer.Option("--final", help="Save the model fitted on all rows after evaluating.")
    ] = False,
    params: Annotated[
        Path | None,
        typer.Option("--params", help="JSON with the model's parameters, as opcast tune writes."),
    ] = None,
    exclude_device: Annotated[
        list[str] | None,
        typer.Option("--exclude-device", help="Leave a device out; may be given again."),
    ] = None,
    max_rows: Annotated[
        int, typer.Option(help="Operator datasets: most rows of a family to learn from.")
    ] = 1_000_000,
) -> None:
    """Train a model, print its metrics beside the label noise, save it, log it to MLflow."""
    from .operators import run_train_operators
    from .workflows import load_for_training, run_train

    chosen = {}
    if params is not None:
        from .models.tuned import read_params

        chosen = read_params(params, model)
    dataset, operators = load_for_training(data, exclude_device or ())
    if operators and model == "gpu-xla":
        from .shipped import run_train_passes

        run_train_passes(make_console(), dataset, out=out, seed=seed, register=register)
        return
    if operators:
        run_train_operators(
            make_console(), dataset, model, out=out, exclude=exclude_device or (), seed=seed,
            threads=threads, final=final, track=track, max_rows=max_rows, params=chosen,
        )  # fmt: skip
        return
    run_train(
        make_console(), dataset, model, split, out=out, seed=seed, threads=threads, track=track,
        register=register, final=final, params=chosen,
    )  # fmt: skip


@app.command()
def tune(
    data: Data,
    model: Annotated[str, typer.Option(help="Name of the estimator.")] = "xgboost",
    trials: Annotated[int, typer.Option(help="Trials, those of earlier searches included.")] = 20,
    split: Annotated[
        str, typer.Option(help="Split; its test part is not looked at while searching.")
    ] = "unseen_family",
    timeout: Annotated[
        str | None, typer.Option(help="No trial starts after this time, such as 90s or 2h.")
    ] = None,
    folds: Annotated[int, typer.Option(help="Folds of the cross-validation.")] = 3,
    objective: Annotated[
        str, typer.Option(help="What to minimise: mean_abs_log or median_ape.")
    ] = "mean_abs_log",
    seed: Seed = 0,
    threads: Threads = 1,
    study: Annotated[
        Path | None, typer.Option(help="SQLite file of the trials; a search resumes from it.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="JSON file for the parameters.")] = None,
    track: Annotated[bool, typer.Option(help="Log the trials to MLflow.")] = True,
) -> None:
    """Search for a model's best parameters by cross-validation. Stop it any time; it resumes."""
    from .search import run_tune

    run_tune(
        make_console(), data, model, split, trials=trials, folds=folds, objective=objective,
        timeout_s=None if timeout is None else seconds_of(timeout), seed=seed, threads=threads,
        study=study, out=out, track=track,
    )  # fmt: skip


@app.command()
def compare(limit: Annotated[int, typer.Option(help="Newest runs to show.")] = 20) -> None:
    """Print tracked runs side by side."""
    from .models.tracking import compare as compare_runs
    from .workflows import print_frame

    print_frame(make_console(), compare_runs(limit=limit), "runs")


@app.command()
def ui(port: Annotated[int, typer.Option(help="Port on localhost.")] = 5000) -> None:
    """Open MLflow on the store of this folder."""
    from .models.tracking import serve_ui

    raise typer.Exit(serve_ui(port))


@app.command()
def demo(
    out: Out = Path("demo-out"),
    budget: Annotated[str, typer.Option(help="Time to spend on measuring.")] = "4m",
) -> None:
    """Profile this machine, train, predict unseen programs, run them, compare."""
    from .demo import run_demo

    run_demo(make_console(), out, seconds_of(budget))


@app.command()
def evaluate(
    published: Annotated[Path, typer.Option(help="Folder with tables of published latencies.")],
    out: Annotated[Path, typer.Option("--out", help="Parquet file for the predictions.")],
    model: ModelOpt = "default",
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Learn from answered rows of calib_* splits.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Most rows of each operator table, drawn at random.")
    ] = None,
) -> None:
    """Predict every row of published tables; judge those whose latency is given."""
    from .operators import run_evaluate

    run_evaluate(make_console(), published, out, model, calibrate=calibrate, limit=limit)


register_calibrate(app)


cli_lower.register(app)


def main() -> NoReturn:
    """Entry point: one line on stderr and status 1 for what the user can mend."""
    guarded(sys.argv[1:], _main)
    raise SystemExit(0)


def _main() -> NoReturn:
    from .features.errors import OpcastError
    from .models.lean import own_process

    own_process()
    try:
        app(standalone_mode=True)
    except OpcastError as error:
        sys.stderr.write(f"opcast: error: {one_line(error)}\n")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        sys.stderr.write("opcast: stopped\n")
        raise SystemExit(130) from None
    raise SystemExit(0)


def _one_of(program: Path | None, op: str | None) -> bool:
    """Whether it is an operator, of a program or an operator."""
    if (program is None) == (op is None):
        raise typer.BadParameter("give a PROGRAM, or an operator with --op")
    return op is not None


if __name__ == "__main__":
    main()
