from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from opcast.common.errors import ModelError
from opcast.models.core.registry import estimator_class, make_estimator
from opcast.models.training.tuning import (
    TrialRecord,
    Tuning,
    read_params,
    search_space,
    tune,
    write_params,
)
from opcast.models.training_data.metrics import mean_abs_log, median_ape
from opcast.models.training_data.prepared import PreparedDataset

pytest.importorskip("optuna", reason="the search needs optuna, of the extra tune")


class Middle:
    """A trial that takes the lower end, and the first choice."""

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float:
        return low

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int:
        return low

    def suggest_categorical(self, name: str, choices):  # type: ignore[no-untyped-def]
        return choices[0]


@pytest.mark.parametrize("model", ["ridge", "forest", "xgboost", "ensemble"])
def test_spaces_draw_what_the_estimator_takes(model: str) -> None:
    params = search_space(model)(Middle())
    assert params
    made = make_estimator(model, **params)
    assert {k: made.settings[k] for k in params} == params  # type: ignore[attr-defined]


def test_an_estimator_may_declare_its_own_space(monkeypatch: pytest.MonkeyPatch) -> None:
    own = classmethod(lambda cls, trial: {"alpha": trial.suggest_float("alpha", 0.5, 1.0)})
    monkeypatch.setattr(estimator_class("ridge"), "search_space", own, raising=False)
    assert search_space("ridge")(Middle()) == {"alpha": 0.5}


def test_without_a_space_the_choices_are_listed() -> None:
    with pytest.raises(ModelError, match=r"roofline.*ensemble, forest, ridge, xgboost"):
        search_space("roofline")


def test_objectives() -> None:
    measured, predicted = np.array([1.0, 2.0, 4.0]), np.array([2.0, 2.0, 1.0])
    assert mean_abs_log(measured, predicted) == pytest.approx((np.log(2) + 0 + np.log(4)) / 3)
    assert median_ape(measured, predicted) == pytest.approx(0.75)  # of 1, 0 and 0.75


@pytest.fixture(scope="module")
def found(prepared: PreparedDataset, tmp_path_factory: pytest.TempPathFactory) -> Tuning:
    return tune(prepared, "ridge", 6, folds=2, study=tmp_path_factory.mktemp("s") / "study.db")


def test_search_keeps_the_best_trial(found: Tuning) -> None:
    assert len(found.trials) == 6
    whole = [t.error for t in found.trials if not t.pruned]
    assert found.error == min(found.default_error, *whole)
    if found.best:
        assert found.best in [t.params for t in found.trials]
    assert list(found.table()["error"]) == sorted(whole)
    assert {"trial", "error", "alpha", "huber"} == set(found.table())


def test_search_resumes_and_adds_only_what_is_missing(
    prepared: PreparedDataset, found: Tuning
) -> None:
    seen: list[tuple[int, int]] = []

    def on_trial(trial: TrialRecord, finished: int) -> None:
        seen.append((trial.number, finished))

    again = tune(prepared, "ridge", 8, folds=2, study=found.study, on_trial=on_trial)
    assert seen == [(6, 7), (7, 8)]
    assert again.trials[:6] == found.trials
    assert len({t.params["alpha"] for t in again.trials}) == 8  # it draws anew, not the same again
    done = tune(prepared, "ridge", 3, folds=2, study=found.study)
    assert done.trials == again.trials


def test_test_rows_are_never_looked_at(prepared: PreparedDataset, tmp_path: Path) -> None:
    """Spoiling every label of the test families changes nothing in a search."""
    import dataclasses

    spoilt = prepared.frame.copy()
    test = spoilt["family"].isin(["net2", "net5", "net8"])
    spoilt.loc[test, "latency_us_p50"] *= 1e3
    other = dataclasses.replace(prepared, frame=spoilt)
    first = tune(prepared, "ridge", 2, folds=2, study=tmp_path / "a.db")
    second = tune(other, "ridge", 2, folds=2, study=tmp_path / "b.db")
    assert first.default_error == second.default_error
    assert [t.error for t in first.trials] == [t.error for t in second.trials]


def test_defaults_stay_if_nothing_beats_them(prepared: PreparedDataset, tmp_path: Path) -> None:
    bad = Tuning("ridge", "random", "median_ape", {}, 0.1, 0.1, (), tmp_path / "s.db")
    assert bad.to_dict()["params"] == {}
    timed = tune(prepared, "ridge", 50, folds=2, timeout_s=0.0, study=tmp_path / "t.db")
    assert len(timed.trials) <= 1


def test_parameters_go_through_a_file(found: Tuning, tmp_path: Path) -> None:
    file = tmp_path / "deep" / "ridge.json"
    write_params(file, found)
    assert read_params(file, "ridge") == found.best
    with pytest.raises(ModelError, match="are for 'ridge', not 'forest'"):
        read_params(file, "forest")
    file.write_text(json.dumps({"alpha": 0.5}))
    assert read_params(file, "ridge") == {"alpha": 0.5}
    file.write_text(json.dumps({"alpha": 0.5, "seed": 3}))
    with pytest.raises(ModelError, match="'seed' is a setting of the training"):
        read_params(file, "ridge")


@pytest.mark.parametrize("text", ["[]", "{", '{"params": 3}'])
def test_bad_parameter_files_are_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text(text)
    with pytest.raises(ModelError, match=r"p\.json"):
        read_params(file, "ridge")
    with pytest.raises(ModelError, match="no such parameter file"):
        read_params(tmp_path / "none.json", "ridge")


def test_bad_choices_are_refused(prepared: PreparedDataset, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no objective 'beauty'"):
        tune(prepared, "ridge", 1, objective="beauty")
    file = tmp_path / "notes.db"
    file.write_text("not a database, but long enough to be taken for one" * 40)
    with pytest.raises(ModelError, match=r"notes\.db"):
        tune(prepared, "ridge", 1, study=file)


def test_without_optuna_it_says_what_to_install(
    prepared: PreparedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ModelError, match=r"pip install 'optuna"):
        tune(prepared, "ridge", 1)
