"""A row of a table is answered as the command that a user would type for it, to the last digit."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from opcast.cli import app
from opcast.common.parquet import read_table
from opcast.datagen.published.packs import conv_rows, kind_of, product_rows
from opcast.features.operators.physics import BACKENDS
from opcast.features.operators.schema import FAMILIES, NAMES, PARAMETERS, family_keys

from ...support.cases import later

ROOT = Path(__file__).resolve().parents[3]
PACKS = Path(os.environ.get("OPCAST_PUBLISHED_DATA", ROOT.parent / "shared" / "data"))
INVENTED = ROOT / "tests" / "golden" / "inputs" / "operators.csv"


def call(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def typed(row: pd.Series, key: str) -> list[object]:
    """The command for an operator of a table."""
    names = [
        c for c in (*PARAMETERS[FAMILIES[key]], *NAMES, "version") if c in row and c != "family"
    ]
    given = {c: row[c] for c in names if pd.notna(row[c]) and row[c] != ""}
    if "backend" not in given:
        given.pop("version", None)
    pairs = [f"{c}={v if isinstance(v, str) else int(v)}" for c, v in given.items()]
    return ["predict", "--op", " ".join([key, *pairs]), "--device", row["device"], "--json"]


def assert_as_typed(path: Path, rows: pd.DataFrame, tmp_path: Path) -> int:
    out = tmp_path / "out.csv"
    call("evaluate", "--published", path, "--out", out)
    table = pd.read_csv(out, dtype={"id": str}).set_index("id")
    compared = 0
    for (_, row), key in zip(rows.iterrows(), family_keys(rows), strict=True):
        told = table.loc[str(row["id"])]
        if pd.isna(told["latency_us"]):
            continue
        alone = json.loads(call(*typed(row, key)))
        for column in ("latency_us", "lo_us", "hi_us"):
            assert alone[column] == pytest.approx(told[column], rel=1e-12), (key, row.to_dict())
        compared += 1
    return compared


def test_invented_rows(tmp_path: Path) -> None:
    rows = pd.read_csv(INVENTED)
    path = tmp_path / "operators.csv"
    rows.to_csv(path, index=False)
    assert assert_as_typed(path, rows, tmp_path) == 9


def test_times_under_another_name_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "operators.csv"
    rows = pd.read_csv(INVENTED).drop(columns="latency_us", errors="ignore")
    rows.assign(latency_ms=1.0).to_csv(path, index=False)
    call("evaluate", "--published", path, "--out", tmp_path / "out.csv")
    assert "column 'latency_ms' is not read: is it 'latency_us'" in caplog.text


@pytest.mark.parametrize(
    "name",
    [
        "published-latency/ops_neusight.parquet",
        later("published-latency/ops_vidur.parquet"),
        later("published-tensor-core/ops_tc.parquet"),
        "published-kernels/gemm.parquet",
        "published-kernels/conv.parquet",
    ],
)
def test_published_rows(name: str, tmp_path: Path) -> None:
    path = PACKS / name
    if not path.is_file():
        pytest.skip(f"{name} is not at {PACKS} (OPCAST_PUBLISHED_DATA)")
    table = read_table(path)
    if "backend" in table and "ops_" in name:
        table = table[table["backend"].isin(BACKENDS)]
    table = table.sample(6, random_state=0).reset_index(drop=True)
    own = tmp_path / Path(name).name
    table.to_parquet(own)
    readers = {"gemm": product_rows, "conv": conv_rows}
    rows = readers.get(kind_of(table.columns), pd.DataFrame)(table)
    assert assert_as_typed(own, rows, tmp_path) >= 3
