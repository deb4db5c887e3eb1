"""The file of a model of steps, and the one that ships."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from opcast.common.errors import ModelError
from opcast.models.core.registry import PRETRAINED
from opcast.models.steps.effects import EffectTable
from opcast.models.steps.memory import MemoryLaw, fit_laws, law_of
from opcast.models.steps.model import StepModel
from opcast.simulate.step.memory import StageMemory

from .test_fit import context


def test_a_saved_model_answers_as_before(tmp_path: Path) -> None:
    model = StepModel(
        EffectTable({"whole/cluster/x|h100-sxm": 0.25}, {"whole/cluster/x|h100-sxm": 0.05}),
        {"cluster": (-0.1, 0.2)},
        {"a": MemoryLaw(1.5, 2.0, 3.0)},
        {"rows": 80},
    )
    model.save(tmp_path / "steps.json")
    again = StepModel.load(tmp_path / "steps.json")
    assert again.table == model.table
    assert again.provenance == {"rows": 80} and again.memory == model.memory
    assert again.ends == model.ends
    ours, others = (context("a", f"{name}|h100-sxm") for name in "xy")
    assert again.tier(ours) == model.tier(ours) == "cluster"
    assert again.table.log_factors(ours)["whole"] == 0.25
    assert again.table.log_factors(others)["whole"] == 0.0


def test_memory_of_a_framework_is_learned_from_its_peaks() -> None:
    draw = np.random.default_rng(2)
    stages = [
        StageMemory(*(draw.uniform(1, 8, 5) * 2**30).tolist(), buffers=0.0) for _ in range(60)
    ]
    truth = MemoryLaw(1.3, 1.8, 4.0)
    measured = [truth.total(stage) for stage in stages] + [float("nan")]
    laws = fit_laws(["a"] * 60 + ["b"], [*stages, stages[0]], measured)
    said = np.array([laws["a"].total(stage) for stage in stages])
    assert np.abs(said / measured[:-1] - 1).max() < 0.03
    # A framework without peaks gets the mean of the others.
    assert "b" not in laws and law_of(laws, "b") == laws[""]
    assert law_of({}, "b") == MemoryLaw()


def test_a_damaged_model_is_named(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    path.write_text('{"format": 4, "effects": 3}')
    with pytest.raises(ModelError, match="cannot be read") as caught:
        StepModel.load(path)
    assert caught.value.where == str(path)
    path.write_text('{"format": 9}')
    with pytest.raises(ModelError, match="format 9"):
        StepModel.load(path)


def test_the_shipped_model_knows_what_it_was_learned_from() -> None:
    model = StepModel.find()
    assert (PRETRAINED / "steps.json").stat().st_size < 30_000
    assert {"h100-sxm", "a100-sxm-80gb", "gb200", "tpu-v6e"} <= set(model.provenance["devices"])
    for low, high in model.ends.values():
        assert -3.0 < low < 0.0 < high < 5.0  # in deviations
    known = ("cluster", "elsewhere", "cluster/experts", "elsewhere/experts")
    assert set(known) <= set(model.ends)
