"""Where models by name lie."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from opcast.common.paths import data_home
from opcast.predict.locate import available, registered


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a user without variables of opcast."""
    for name in ("OPCAST_CACHE", "OPCAST_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path


def test_models_of_the_cache_move_to_the_data_folder(
    user: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for where, name, text in (
        ("cache", "own", "1"),
        ("cache", "two", "old"),
        ("data", "two", "new"),
    ):
        folder = user / where / "opcast" / "models" / name
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(text)
    with caplog.at_level(logging.WARNING):
        found = available()
    assert registered() == user / "data" / "opcast" / "models"
    assert found["own"].parent == found["two"].parent == registered()
    # One of its name is not overwritten.
    assert (found["two"] / "manifest.json").read_text() == "new"
    assert [record.getMessage() for record in caplog.records] == [
        f"moved the registered model own to {registered()}"
    ]


def test_one_folder_may_hold_all(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPCAST_CACHE", str(user / "one"))
    assert data_home() == user / "one"
    monkeypatch.setenv("OPCAST_DATA", str(user / "two"))
    assert data_home() == user / "two" and registered() == user / "two" / "models"
