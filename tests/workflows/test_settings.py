"""Settings are saved beside what a command writes."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path

import opcast
from opcast.workflows import settings
from opcast.workflows.reports.settings import ClusterReportSettings
from opcast.workflows.settings import Settings, TrainSettings


def test_settings_are_saved_with_the_command_and_every_field(tmp_path: Path) -> None:
    own = TrainSettings(data=[Path("d")], params={"depth": 3}, exclude_device=("l4",))
    own.save(tmp_path / "model")
    saved = json.loads((tmp_path / "model" / settings.FILE).read_text())
    assert saved.pop("command") == "opcast train"
    assert saved.pop("opcast") == opcast.__version__
    assert set(saved) == {f.name for f in fields(TrainSettings)}
    assert saved["data"] == ["d"]
    assert saved["params"] == {"depth": 3}
    assert saved["exclude_device"] == ["l4"]
    assert saved["out"] is None


def test_every_command_has_settings_of_its_own() -> None:
    kinds = Settings.__subclasses__()
    assert all(is_dataclass(kind) for kind in kinds)
    assert len({kind.command for kind in kinds}) == len(kinds)


def test_the_parts_of_a_report_lie_beside_its_figures() -> None:
    assert ClusterReportSettings(out=Path("a/b.json")).folder == Path("a/b")
