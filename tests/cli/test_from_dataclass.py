"""Options of a command from dataclasses: names, defaults, conversions, sections and refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

import pytest
import typer
from typer.testing import CliRunner

from opcast.cli.from_dataclass import flat, names_of
from opcast.cli.lazy import GroupedCommand
from opcast.cli.options import refuse_unused
from opcast.common.options import Budget, Option, json_file


def speeds(texts: Sequence[str]) -> dict[int, float]:
    try:
        return {int(rank): float(value) for rank, value in (t.split("=") for t in texts)}
    except ValueError:
        raise ValueError("write --speed RANK=0.9") from None


@dataclass(frozen=True)
class Place:
    section: ClassVar[str] = "Device and plan"
    device: Annotated[str, Option("Device.")]
    speed: Annotated[Mapping[int, float], Option("Speed.", collect=speeds)] = field(
        default_factory=dict
    )


@dataclass(frozen=True)
class Case:
    place: Place
    names: Annotated[tuple[str, ...], Option("Name.", ("--name",))] = ()
    budget_s: Budget = 600.0
    memory: Annotated[int, Option("GiB.", unit=2.0**30, least=1.0)] = 2 * 2**30
    out: Annotated[Path | None, Option("File.", check=json_file)] = None
    strict: Annotated[bool, Option("Strict.", ("--strict",), section="Estimates")] = False
    known: object = None


@dataclass(frozen=True)
class Operator:
    device: Annotated[str, Option("Device.")]
    op: Annotated[str, Option("Operator.")] = ""


def tool() -> typer.Typer:
    made = typer.Typer(rich_markup_mode=None)

    def work(
        context: typer.Context,
        case: Case,
        operator: Operator,
        json_output: Annotated[bool, Option("Print JSON.", ("--json",))] = False,
    ) -> None:
        if operator.op:
            refuse_unused(context, "an operator", names_of(Operator))
        typer.echo(f"{case} {operator} {json_output}")

    made.command(cls=GroupedCommand)(flat(work))
    return made


def said(*words: str) -> str:
    return CliRunner().invoke(tool(), words).output


def test_what_is_not_given_is_the_dataclass_own_default() -> None:
    assert said("--device", "l4") == f"{Case(Place('l4'))} {Operator('l4')} False\n"


def test_values_are_converted_to_the_fields() -> None:
    own = Case(
        Place("l4", {0: 0.9, 3: 0.8}), ("a", "b"), 120.0, 3 * 2**29, Path("x.json"), strict=True
    )
    words = ["--device", "l4", "--speed", "0=0.9", "--speed", "3=0.8", "--name", "a", "--name", "b"]
    words += ["--budget", "2m", "--memory", "1.5", "--out", "x.json", "--strict", "--json"]
    assert said(*words) == f"{own} {Operator('l4')} True\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--budget", "soon"), "'--budget': 'soon' is not a duration: write 90s"),
        (("--speed", "fast"), "'--speed': write --speed RANK=0.9"),
        (("--out", "x.csv"), "'--out': 'x.csv' has to be called .json"),
        (("--memory", "0.5"), "'--memory': Input should be greater than or equal to 1"),
        (("--op", "gemm", "--strict"), "--strict does not apply to an operator"),
    ],
)
def test_a_value_that_does_not_fit_names_its_option(words: tuple[str, ...], message: str) -> None:
    assert message in " ".join(said("--device", "l4", *words).split())


def test_help_has_the_defaults_as_they_are_typed_and_the_sections_of_the_dataclasses() -> None:
    text = CliRunner().invoke(tool(), ["--help"], env={"COLUMNS": "100"}).output
    assert "[default: 10m]" in text and "[default: 2.0; x>=1.0]" in text and "known" not in text
    assert "[required]" in text.split("--device")[1].splitlines()[0]
    assert names_of(Case) == {
        *("device", "speed", "names", "budget_s", "memory", "out", "strict"),
    }  # fmt: skip
