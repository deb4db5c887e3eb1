"""Commands about the TPU compiler's own estimates: datasets of them, and models beside them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .cli_common import Json, make_console, print_json, seconds_of

#: TPUs of the catalogue that libtpu compiles for.
GENERATIONS = ("tpu-v3", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e")


def register(data_app: typer.Typer) -> None:
    """Add the commands ``data compile`` and ``data agree``."""
    data_app.command("compile")(data_compile)
    data_app.command("agree")(data_agree)


def data_compile(
    out: Annotated[Path, typer.Option("--out", help="Folder of the dataset.")],
    device: Annotated[
        list[str] | None, typer.Option(help="TPU of the catalogue; may be given again.")
    ] = None,
    budget: Annotated[str, typer.Option(help="Time, such as 90s, 20m or 8h.")] = "20m",
    suite: Annotated[
        str, typer.Option(help="Suite of the zoo: quick, standard, full; '' for none.")
    ] = "quick",
    ops: Annotated[int, typer.Option(min=0, help="Single ops of a round.")] = 16,
    random: Annotated[int, typer.Option(min=0, help="Random programs of a round.")] = 8,
    zoo: Annotated[int, typer.Option(min=0, help="Programs of the zoo of a round.")] = 1,
    large: Annotated[
        int, typer.Option(min=0, help="Single ops of a round at the size of large models.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    merge: Annotated[
        bool, typer.Option(help="At the end make one file with one row for each kernel.")
    ] = True,
) -> None:
    """Collect what the TPU's compiler expects of its kernels: estimates, not measurements."""
    from .datagen.compile_plan import CompilePlan
    from .datagen.compile_run import compile_dataset, merge_dataset
    from .features.catalogue import find_device

    result = compile_dataset(
        out, [find_device(name) for name in device or GENERATIONS], seconds_of(budget),
        plan=CompilePlan(ops, random, suite, seed, zoo, large),
    )  # fmt: skip
    typer.echo(
        f"{result.folder}: {result.samples} estimates of kernels of {result.programs} programs, "
        f"{result.failed} failed, {result.elapsed_s:.0f} s, {result.stopped}"
    )
    if result.stopped == "interrupted":
        raise KeyboardInterrupt
    if merge and result.samples:
        typer.echo(f"{len(merge_dataset(result.folder))} kernels once each; estimates of libtpu")


def data_agree(
    program: Annotated[list[Path], typer.Argument(help="StableHLO programs.")],
    device: Annotated[
        list[str] | None, typer.Option(help="TPU of the catalogue; may be given again.")
    ] = None,
    model: Annotated[str, typer.Option("--model", help="Model name or folder.")] = "default",
    json_output: Json = False,
) -> None:
    """Compile programs for TPUs; print the compiler's estimates beside the model's."""
    from .compiler_check import agreement, print_agreement
    from .features.catalogue import find_device
    from .predict.predictor import load

    predictor = load(model)
    found = [
        agreement(path, find_device(name), predictor)
        for path in program
        for name in device or GENERATIONS
    ]
    if json_output:
        print_json([asdict(own) for own in found])
    else:
        print_agreement(make_console(), found)
