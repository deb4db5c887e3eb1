"""The pages of accuracy: current, and right about what the shipped models keep."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from opcast.common.errors import DatasetError
from opcast.common.tables_text import markdown_table
from opcast.models.core.registry import PRETRAINED
from opcast.workflows.reports.pages import MADE_BY, operator_errors, pages, run_pages
from opcast.workflows.reports.settings import PagesSettings

from ...support.commands import opcast

DOCS = Path(__file__).resolve().parents[3] / "docs" / "accuracy"


def test_the_pages_in_the_docs_are_current() -> None:
    found = pages()
    plots = set(re.findall(r"\]\((\w+\.png)\)", "".join(found.values())))
    assert {path.name for path in DOCS.iterdir()} == set(found) | plots and plots
    for name, text in found.items():
        assert (DOCS / name).read_text("utf-8") == text, f"write the pages anew: {MADE_BY}"


def test_figures_are_of_the_models_that_ship() -> None:
    stated = re.findall(r"(\S+\.json) ([0-9a-f]{12})", "".join(pages().values()))
    assert len(stated) >= 6
    for name, digest in stated:
        own = hashlib.sha256((PRETRAINED / name).read_bytes()).hexdigest()
        assert own.startswith(digest), f"state the figures of {name} anew in pages.yaml"


def test_a_family_s_error_is_the_mean_over_its_rows() -> None:
    manifest = json.loads((PRETRAINED / "gpu-operators" / "manifest.json").read_text())
    rows = [*manifest["metrics"], *(m for own in manifest["added"] for m in own["metrics"])]
    own = [r for r in rows if (r["key"], r["split"]) == ("graph/bmm", "val_group")]
    error = sum(r["mape"] * r["n"] for r in own) / sum(r["n"] for r in own)
    (found,) = [e for e in operator_errors() if (e.key, e.left) == ("graph/bmm", "val_group")]
    assert found.mape == pytest.approx(error)
    line = (
        f"| `graph/bmm` | layers, heads, models | {sum(r['n'] for r in own):,} | {100 * error:.1f} "
    )
    assert line in pages()["operators.md"]


def test_every_page_says_how_sure_and_how_noisy() -> None:
    for name, text in pages().items():
        assert "Generated" in text
        if name not in ("index.md", "operators.md"):
            assert "| what | held out | error | inside | width | noise | blind |" in text
            assert "$ opcast " in text and "Models: " in text


def test_a_table_in_markdown() -> None:
    assert list(markdown_table(["a", "b"], [["1", ""]])) == ["| a | b |", "|---|---|", "| 1 |  |"]


def test_the_command_writes_them(tmp_path: Path) -> None:
    assert opcast("report", "pages", "--out", tmp_path / "new").returncode == 0
    assert (tmp_path / "new" / "steps.md").read_text("utf-8") == pages()["steps.md"]


def test_plots_of_what_was_left_out(tmp_path: Path) -> None:
    measured = np.geomspace(0.1, 10.0, 40)
    rows = {"id": "r", "metric": "step", "left_out": "source", "measured": measured}
    left = pd.DataFrame({**rows, "predicted": 1.1 * measured})
    left.to_parquet(tmp_path / "steps.parquet")
    run_pages(Console(), PagesSettings(tmp_path / "a", tmp_path))
    assert (tmp_path / "a" / "steps.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "a" / "serving.png").exists()
    # The same rows, in whatever order, and no other way of leaving out.
    other = left.assign(left_out="row", predicted=5.0)
    pd.concat([other, left[::-1]]).to_parquet(tmp_path / "steps.parquet")
    run_pages(Console(), PagesSettings(tmp_path / "b", tmp_path))
    first, second = ((tmp_path / name / "steps.png").read_bytes() for name in "ab")
    assert first == second
    other.to_parquet(tmp_path / "steps.parquet")
    with pytest.raises(DatasetError, match="left_out=source"):
        run_pages(Console(), PagesSettings(tmp_path / "b", tmp_path))
    with pytest.raises(DatasetError, match=r"none of steps\.parquet"):
        run_pages(Console(), PagesSettings(tmp_path / "b", tmp_path / "a"))
