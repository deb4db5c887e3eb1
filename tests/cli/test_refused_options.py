"""An option that a command would not read in the mode that it is in is refused, never ignored."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from opcast.cli import app
from opcast.cli.options import given, refuse_unused

OP = ("--op", "linear m=1 n=64 k=64 dtype=bf16", "--device", "h100-sxm")
STEP = ("--workload", "llama", "--cluster", "h100-sxm-x2")
SERVED = ("--workload", "llama", "--set", "layers=2", "--device", "l4")
PLANNED = ("--model", "llama", "--device", "l4", "--gpus", "1", "--load", "concurrency=1")
#: Command lines, and what of them does not apply.
CASES: list[tuple[tuple[str, ...], str]] = [
    (("predict", *OP, "--lowering", "op"), "--lowering"),
    (("predict", *OP, "--top", "10"), "--top"),
    (("predict", *OP, "--strict"), "--strict"),
    (("predict", *OP, "--trip-count", "3"), "--trip-count"),
    (("predict", *OP, "--timeline", "t.json"), "--timeline"),
    (("predict", *OP, "--fallback", "op"), "--fallback"),
    (("predict", *OP, "--cluster", "h100-sxm-x4"), "--cluster"),
    (("predict", "p", "--cluster", "h100-sxm-x4", "--strict"), "--strict"),
    (("predict", "p", "--cluster", "h100-sxm-x4", "--device", "l4"), "--device"),
    (("predict", "p", "--model", "roofline,scalesim", "--strict"), "--strict"),
    (("predict", "p", "--model", "roofline,scalesim", "--timeline", "t"), "--timeline"),
    (("predict", "p", "--json", "--top", "3"), "--top"),
    (("predict", "p", "--lowering", "op", "--fallback", "fused"), "--fallback"),
    (("explain", *OP, "--lowering", "op"), "--lowering"),
    (("explain", *OP, "--top", "3"), "--top"),
    (("explain", *OP, "--kernel", "k"), "--kernel"),
    (("explain", *OP, "--trip-count", "3"), "--trip-count"),
    (("explain", *OP, "--neighbours", "2"), "--neighbours"),
    (("explain", "p", "--data", "d"), "--data"),
    (("explain", "p", "--kernel", "k", "--top", "2"), "--top"),
    (("check", "p", "--json", "--top", "2"), "--top"),
    (("device", "h100-sxm", "--list"), "NAME"),
    (("device", "h100-sxm", "--save"), "--save"),
    (("device", "--list", "--save"), "--save"),
    (("report", "program", "p", "--data", "d"), "--data"),
    (("report", "program", "p", "--compare", "none", "--compare-lowering", "op"), "--compare-low"),
    (("report", "accuracy", "--run", "r", "--out", "o"), "--out"),
    (("report", "accuracy", "--html", "x.html"), "--html"),
    (("report", "devices", "--threads", "3"), "--threads"),
    (("report", "clusters", "--seed", "1"), "--seed"),
    (("report", "operators", "--published", "p", "--lowering", "op"), "--lowering"),
    (("report", "--html", "x.html"), "--html"),
    (("simulate", *STEP, "--seed", "1"), "--seed"),
    (("sweep", *STEP, "--out", "o", "--seed", "1"), "--seed"),
    (("sweep", *STEP, "--out", "o", "--ray", "local", "--workers", "2"), "--workers"),
    *(
        (("simulate-serving", *STEP, "--requests", "r.csv", option, "1"), option)
        for option in ("--rate", "--count", "--prompt", "--output", "--seed")
    ),
    (("simulate-serving", *SERVED, "--router", "least-loaded"), "--router"),
    (("simulate-serving", *SERVED, "--concurrency", "4", "--seed", "3"), "--seed"),
    *((("plan-serving", *PLANNED, option, "2"), option) for option in ("--accepted", "--draft")),
    (("plan-serving", *PLANNED, "--all-gpus"), "--all-gpus"),
    *((("plan-serving", *PLANNED, *o), o[0]) for o in (("--transfer", "9"), ("--router", "x"))),
    (("plan-serving", *PLANNED, "--json", "--top", "2"), "--top"),
    (("plan-serving", *PLANNED, "--together", "--transfer", "9"), "--transfer"),
    (("calibrate", "--device", "local", "--budget", "5m", "--samples", "9"), "--samples"),
    (("calibrate", "--device", "local", "--budget", "5m", "--plot", "p.png"), "--plot"),
    (("calibrate", "--device", "local", "--budget", "5m", "--allocate", "time"), "--allocate"),
    # This machine is the device of what is measured here: no need to name it.
    (("calibrate", "--budget", "5m", "--samples", "9"), "--samples"),
    (("calibrate", "--data", "d"), "--budget"),
    (("check", "p", "--device", "h100-sxm"), "--device"),
    (("cluster", "h100-sxm-x4", "--list"), "NAME"),
    (("cluster", "--list", "--save", "c.yaml"), "--save"),
    (("cluster", "--list", "--astra", "c.yaml"), "--astra"),
    (("calibrate-collectives", "d", "--out", "o.json", "--known-only"), "--known-only"),
    (("calibrate-collectives", "d", "--report", "--fresh"), "--fresh"),
    (("export", "table", *OP, "--out", "o.csv", "--lowering", "op"), "--lowering"),
    (("export", "table", *OP, "--out", "o.csv", "--kernels", "ridge"), "--kernels"),
    (
        ("export", "table", "p", "--device", "l4", "--out", "o.csv", "--model", "roofline"),
        "--model",
    ),
    (("lower", "p", "--lowering", "op", "--no-cache"), "--no-cache"),
    (("lower", "p", "--device", "l4", "--lowering", "op", "--xla-flag", "a=1"), "--xla-flag"),
    (("lower", "p", "--device", "l4", "--lowering", "fused", "--whole"), "--whole"),
    (("lower", "p", "--device", "l4", "--lowering", "fused", "--out", "o.hlo"), "--out"),
    (("lower", "p", "--device", "l4", "--lowering", "op", "--out", "o.hlo"), "--out"),
    (("partition", "p", "--out", "o.mlir", "--device", "l4"), "--device"),
    (("explain", "p", "--device", "l4", "--neighbours", "1"), "--neighbours"),
    (("lower", "p", "--device", "l4", "--lowering", "fused", "--xla-flag", "a=1"), "--xla-flag"),
    (("lower", "p", "--compile-timeout", "9"), "--compile-timeout"),
]


@pytest.mark.parametrize(("words", "option"), CASES, ids=[" ".join(w) for w, _ in CASES])
def test_what_does_not_apply_is_refused(
    words: tuple[str, ...], option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2, done.output
    assert option in done.output
    assert not list(tmp_path.iterdir())


def test_calibrating_on_kernels_divides_nothing_among_families(cpu_rows: Path) -> None:
    done = CliRunner().invoke(
        app, ["calibrate", "--device", "x", "--data", str(cpu_rows), "--allocate", "time"]
    )
    assert done.exit_code == 2
    assert "--allocate does not apply to a dataset of kernels" in done.output


@pytest.fixture
def cpu_rows(tmp_path: Path) -> Path:
    """A few rows of the committed dataset."""
    from opcast.features.dataset import Dataset
    from opcast.workflows.reports.accuracy import COMMITTED

    dataset = Dataset.load(COMMITTED)
    Dataset(dataset.frame.head(20), dataset.runs).save(tmp_path / "rows")
    return tmp_path / "rows"


def _tool() -> typer.Typer:
    tool = typer.Typer(rich_markup_mode=None)

    @tool.command()
    def work(
        context: typer.Context, name: str = typer.Argument("x"), count: int = 3, track: bool = True
    ) -> None:
        typer.echo(",".join(given(context).values()))
        refuse_unused(context, "a rest day", {"name"})
        typer.echo(f"{name} {count} {track}")

    return tool


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), ""),
        (("y",), "NAME"),
        (("--count", "3"), "--count does not apply to a rest day"),  # given, though the default
        (("--no-track", "--count", "4"), "--count, --no-track do not apply to a rest day"),
    ],
)
def test_only_what_was_given_is_refused(words: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(_tool(), words)
    assert said in done.output
    assert done.exit_code == (2 if "apply" in said else 0)
