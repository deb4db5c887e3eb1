"""Campaigns and their import, on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from opcast.cli import app
from opcast.datagen.campaign.archive import pack

from ..support.campaigns import ROWS, campaign


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    journal, plan = campaign(tmp_path / "campaign", ROWS)
    pack(tmp_path / "campaign", journal, plan, "all is measured")
    return tmp_path / "campaign"


def invoke(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == code, result.output
    return " ".join(f"{result.output} {result.exception or ''}".split())


def test_an_import_says_what_it_holds(folder: Path, tmp_path: Path) -> None:
    said = invoke("data", "import", "campaign", folder, "--out", tmp_path / "out")
    assert "h200-sxm: 6 samples of kernels and programs" in said
    assert "1 of operators" in said
    assert "noise of events: 9.5% over 1 measured twice" in said
    assert "drift of xla product_us: 18.2% over 2 workers" in said
    # 64 x 64 x 128 in 12 µs is far from what the chip can do.
    assert "contradicted" not in said
    said = invoke("data", "show", tmp_path / "out" / "kernels")
    assert "fusion" in said


def test_what_the_device_cannot_do_is_told(folder: Path, tmp_path: Path) -> None:
    said = invoke(
        "data", "import", "campaign", folder, "--out", tmp_path / "out", "--device", _slow(tmp_path)
    )
    assert "contradicted: " in said
    assert "above the" in said


def _slow(folder: Path) -> Path:
    """A device that needs longer than what was measured."""
    path = folder / "slow.json"
    path.write_text(
        '{"name": "slow", "platform": "gpu", "peak_flops": {"bf16": 1e9, "f32": 1e9},'
        ' "vector_flops": {"f32": 1e9, "bf16": 1e9}, "floor": 1e-6,'
        ' "levels": [{"capacity": 1e9, "bandwidth": 1e8}]}'
    )
    return path


def test_what_cannot_be_imported_is_refused(folder: Path, tmp_path: Path) -> None:
    command = ("data", "import", "campaign")
    assert "no archive of a campaign" in invoke(*command, tmp_path, "--out", tmp_path / "o", code=1)
    said = invoke(*command, folder, "--keep-names", "--out", tmp_path / "o", code=2)
    assert "--keep-names" in said
    assert "one campaign" in invoke(*command, folder, folder, "--out", tmp_path / "o", code=2)
    assert "choose: published, trace, campaign" in invoke(
        "data", "import", "nothing", folder, "--out", tmp_path / "o", code=2
    )


def test_a_campaign_whose_budget_is_used_up_only_packs(folder: Path) -> None:
    (folder / "campaign.zip").unlink()
    said = invoke("campaign", "--out", folder, "--budget", "0.1s", "--device", "gpu")
    assert "the budget is used up" in said
    assert (folder / "campaign.zip").is_file()
    assert "unknown device" in invoke("campaign", "--out", folder, "--device", "fpga", code=1)


def test_a_plan_is_told_and_nothing_is_written(tmp_path: Path) -> None:
    said = invoke("campaign", "--out", tmp_path / "none", "--budget", "13m", "--plan")
    assert "plan for a gpu, 13 minutes" in said
    assert "programs (traced): " in said
    assert not (tmp_path / "none").exists()
