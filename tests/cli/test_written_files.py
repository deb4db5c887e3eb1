"""What commands write: the file is what its name says, and each says what it wrote and where."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import typer
from typer.testing import CliRunner, Result

from opcast.cli import app
from opcast.cli.main import COMMANDS

from .test_lazy import entries

OP = ("--op", "linear m=1/64 n=4096 k=4096 dtype=bf16", "--device", "h100-sxm")
STEP = ("--workload", "llama", "--set", "layers=2,d_model=512,heads=8,batch=8,seq=512")
#: Options for files whose format is the command's and whatever one calls it: programs and texts
#: that other tools read by their content; and --out that is checked with the kind of training.
ANY_NAME = {
    ("lower", "out"),
    ("partition", "out"),
    ("plan", "save_program"),
    ("zoo export", "out"),
    ("export simai", "out"),
    ("export xla-perf-table", "out"),
    ("export xla-perf-table", "collectives"),
    ("train", "out"),
    ("calibrate", "out"),
}
WRITTEN = {"out", "plot", "timeline", "html", "page", "scaling", "save", "astra", "save_program"}


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def options() -> Iterator[tuple[str, typer.core.TyperOption]]:
    for words, _ in entries(COMMANDS):
        command = typer.main.get_command(app)
        for word in words:
            command = command.commands[word]  # type: ignore[attr-defined]
        for parameter in command.params:
            if parameter.name in WRITTEN and not parameter.is_flag:
                yield " ".join(words), parameter  # type: ignore[misc]


def test_every_option_for_a_file_checks_its_name() -> None:
    found = {(command, option.name): option.callback is not None for command, option in options()}
    assert len(found) > 30
    unchecked = {key for key, checked in found.items() if not checked}
    assert unchecked <= ANY_NAME, unchecked - ANY_NAME


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".json"])
def test_a_table_is_what_its_name_says(suffix: str, tmp_path: Path) -> None:
    out = tmp_path / "new" / f"t{suffix}"
    done = invoke("export", "table", *OP, "--out", out)
    assert done.exit_code == 0, done.output
    assert done.stderr.splitlines()[-1] == f"wrote {out}: 2 rows"
    assert not done.stdout
    read = {".csv": pd.read_csv, ".parquet": pd.read_parquet, ".json": pd.read_json}[suffix]
    table = read(out)
    assert list(table["op"]) == ["graph/linear"] * 2 and (table["latency_us"] > 0).all()


@pytest.mark.parametrize(
    ("command", "kinds"),
    [
        (("export", "table", *OP, "--out", "t.xlsx"), ".parquet, .csv or .json"),
        (("evaluate", "--published", "p", "--out", "t.txt"), ".parquet, .csv or .json"),
        (("audit", "t.csv", "--out", "flagged"), ".parquet, .csv or .json"),
        (("export", "llmservingsim", *STEP, "--device", "l4", "--out", "a.parquet"), ".csv"),
        (("export", "calculon", "--cluster", "h100-sxm-x8", "--out", "a.yaml"), ".json"),
        (("simulate", *STEP, "--cluster", "h100-sxm-x8", "--html", "p.pdf"), ".html or .htm"),
        (("simulate", *STEP, "--cluster", "h100-sxm-x8", "--timeline", "t.csv"), ".json"),
        (("predict", "p", "--plot", "p.xyz"), ".png, .svg, .pdf or .jpg"),
        (("cluster", "h100-sxm-x8", "--save", "c.json"), ".yaml or .yml"),
        (("train", "--steps", "s.csv", "--out", "m.csv"), ".json"),
        (("train", "--data", "d", "--out", "m.json"), "a folder is written"),
        (("calibrate", "--steps", "s.csv", "--out", "m"), ".json"),
        (("drift", "--data", "s.csv", "--out", "m.parquet"), "a folder is written"),
        (("sweep", *STEP, "--cluster", "h100-sxm-x8", "--out", "s.csv"), "a folder is written"),
    ],
    ids=lambda value: "-".join(value[:2]) if isinstance(value, tuple) else None,
)
def test_a_name_of_another_format_is_refused_before_the_work(
    command: tuple[str, ...], kinds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = invoke(*command)
    assert done.exit_code == 2
    assert kinds in " ".join(done.output.split())
    assert not list(tmp_path.iterdir())


def test_a_step_says_what_it_wrote_beside_its_json(tmp_path: Path) -> None:
    page, trace = tmp_path / "step.html", tmp_path / "step.json"
    asked = ("simulate", *STEP, "--cluster", "h100-sxm-x8", "--model", "roofline")
    done = invoke(*asked, "--html", page, "--timeline", trace, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["step_us"] > 0
    said = done.stderr.splitlines()
    assert f"wrote {trace}: Chrome trace" in said
    assert f"wrote {page}: page; open it in a browser" in said


def test_a_sweep_and_a_cluster_say_what_they_wrote(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    assert f"wrote {file}: cluster" in invoke("cluster", "h100-sxm-x8", "--save", file).stderr
    asked = ("sweep", *STEP, "--cluster", file, "--grid", "tp=1/2", "--model", "roofline")
    done = invoke(*asked, "--out", tmp_path / "sweep")
    assert done.exit_code == 0, done.output
    assert f"wrote {tmp_path / 'sweep' / 'sweep.parquet'}: " in done.stderr
