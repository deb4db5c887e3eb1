"""Hints that work: extras are those of a clone, since no index has opcast."""

import json
import subprocess
import tomllib
from pathlib import Path

import pytest

from opcast.common import plugins
from opcast.common.errors import ModelError
from opcast.common.paths import PACKAGE
from opcast.workflows import training

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_hint_names_the_clone_and_an_extra_that_exists():
    assert plugins.extra_hint("track") == f"in {PACKAGE}: pip install '.[track]'"
    for name in ("track", "gnn", "serve", "scale", "gpu-compiler", "tpu-compiler"):
        assert name in PROJECT["optional-dependencies"]


def test_the_clone_of_an_installed_package_is_found(tmp_path, monkeypatch):
    clone = tmp_path / "my clone"
    clone.mkdir()
    (clone / "pyproject.toml").write_text("")

    class Installed:
        def read_text(self, name):
            return json.dumps({"url": clone.as_uri(), "dir_info": {}})

    monkeypatch.setattr(plugins, "PACKAGE", tmp_path / "site-packages" / "opcast")
    monkeypatch.setattr(plugins, "distribution", lambda name: Installed())
    assert str(clone) in plugins.extra_hint("track")
    (clone / "pyproject.toml").unlink()
    assert plugins.extra_hint("track").startswith("in your clone of opcast: ")


def test_training_and_sweeping_need_no_extra():
    core = {line.split(">")[0] for line in PROJECT["dependencies"]}
    assert {"matplotlib", "optuna", "scikit-learn", "pandas"} <= core
    # Nothing tells users to install from an index.
    listed = subprocess.run(
        ["git", "grep", "-lE", r"pip install ['\"]opcast\["], cwd=ROOT, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert set(listed.stdout.split()) <= {"tests/project/test_docs.py", "CHANGELOG.md"}


def test_a_missing_mlflow_is_told_before_a_training(monkeypatch):
    monkeypatch.setattr(training, "find_spec", lambda name: None)
    training.require_tracking(None)
    with pytest.raises(ModelError, match="which is not installed") as told:
        training.require_tracking("mine")
    assert "pip install '.[track]'" in str(told.value)
