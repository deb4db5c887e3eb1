"""Parts of a report on operators: which rows, which fits, what is kept, whose noise."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from opcast.features.operators import op_features
from opcast.models.operators.report import Part, draw, judge, kept_path, possible, side_by_side
from opcast.models.operators.studies import (
    STUDIES,
    noise_table,
    parts_of,
    repeat_noise,
    replicate_noise,
)

KEY = "eager/linear"
PART = Part("estimators", "ridge", KEY, 100)
#: Name: factor on the physics. ``twin`` has the chip of ``one``; ``new`` has no training rows.
FACTORS = {"one": 1.2, "twin": 1.25, "two": 1.5, "new": 1.4}


@pytest.fixture(scope="module")
def devices(round_gpu):
    found = {name: round_gpu(name) for name in FACTORS}
    return found | {"twin": replace(found["one"], name="twin", power_w=200.0)}


@pytest.fixture(scope="module")
def rows(op_rows, devices):
    """400 rows a device: a quarter validates, all of ``new`` are of a test split."""
    tables = []
    for seed, (name, factor) in enumerate(FACTORS.items()):
        own = op_rows(KEY, 400, seed).assign(device=name)
        base = op_features(own, KEY, devices).base_s
        split = np.where(np.arange(400) % 4 == 0, "val", "train")
        own["split"] = "dev_unseen_gpu" if name == "new" else split
        own["id"] = [f"{name}-{i}" for i in range(400)]
        tables.append(own.assign(latency_us=base * 1e6 * factor))
    return pd.concat(tables, ignore_index=True)


def test_all_estimators_learn_from_the_same_rows(rows):
    found = [draw(replace(PART, estimator=name), rows) for name in ("ridge", "xgboost")]
    assert list(found[0].learned["id"]) == list(found[1].learned["id"])
    assert list(found[0].judged["id"]) == list(found[1].judged["id"])
    assert set(found[0].learned["split"]) == {"train"}


def test_rows_are_capped_for_learning_and_for_each_split(rows):
    found = draw(PART, rows)
    assert len(found.learned) == 100
    assert found.judged["split"].value_counts().to_dict() == {"val": 100, "dev_unseen_gpu": 100}
    whole = draw(replace(PART, rows=10_000), rows)
    assert len(whole.learned) == 3 * 300
    assert whole.judged["split"].value_counts().to_dict() == {"val": 300, "dev_unseen_gpu": 400}
    assert not len(whole.pool)


def test_left_out_devices_are_judged_alone(rows):
    found = draw(replace(PART, rows=10_000, left_out=("one", "twin")), rows)
    assert set(found.learned["device"]) == {"two"}
    assert set(found.judged["device"]) == set(found.pool["device"]) == {"one", "twin"}
    assert set(found.judged["split"]) == {"val"}
    assert set(found.pool["split"]) == {"train"}


def test_half_of_a_device_without_training_rows_is_there_to_adapt_with(rows):
    found = draw(replace(PART, rows=10_000, left_out=("new",)), rows)
    assert set(found.judged["device"]) == set(found.pool["device"]) == {"new"}
    assert not set(found.judged["id"]) & set(found.pool["id"])
    assert len(found.judged) + len(found.pool) == 400
    assert 150 < len(found.pool) < 250


def test_labels_that_say_nothing_of_the_device_are_not_learned_from(rows):
    throttled = rows.assign(device=rows["device"].replace("two", "p4"))
    found = draw(replace(PART, rows=10_000), throttled)
    assert "p4" not in set(found.learned["device"])
    assert "p4" in set(found.judged["device"])
    assert not len(draw(replace(PART, left_out=("p4",)), throttled).pool)


def test_few_rows_make_no_part(rows):
    assert possible(draw(replace(PART, rows=200), rows))
    assert not possible(draw(replace(PART, rows=199), rows))
    assert not possible(draw(replace(PART, key="eager/bmm"), rows))


def test_a_part_judges_the_left_out_device_before_and_after_samples(rows, devices):
    part = replace(PART, rows=400, left_out=("two",), samples=(0, 20, 1000))
    found = judge(part, draw(part, rows), devices)
    assert set(found["samples"]) == {0, 20}, "the device has not 1000 rows to adapt with"
    assert set(found["scope"][found["samples"] == 0]) == {"unseen"}
    assert set(found["scope"][found["samples"] == 20]) == {"calibrated"}
    assert set(found["left_out"]) == {"two"} and set(found["estimator"]) == {"ridge"}
    error = (found["predicted_us"] / found["measured_us"] - 1).abs()
    plain, adapted = (error[found["samples"] == n].mean() for n in (0, 20))
    # Physics times 1.2 to 1.4 was learned, the device has 1.5.
    assert 0.05 < plain < 0.25
    assert adapted < 0.3 * plain


def test_parts_leave_out_devices_of_a_chip_together(rows, devices):
    parts = list(parts_of(["left-out"], rows, devices))
    assert {p.estimator for p in parts} == set(STUDIES["left-out"].estimators)
    assert {p.key for p in parts} == {KEY}
    assert {p.left_out for p in parts} == {("new",), ("one", "twin"), ("two",)}
    one = list(parts_of(["left-out"], rows[rows["device"] == "one"], devices))
    assert one == [], "nothing would be left to learn from"


def test_parts_of_a_study_without_left_out_chips(rows, devices):
    parts = list(parts_of(["estimators"], rows, devices, max_rows=77, seed=3))
    assert list(dict.fromkeys(p.estimator for p in parts)) == list(STUDIES["estimators"].estimators)
    assert {(p.rows, p.left_out, p.samples, p.seed) for p in parts} == {(77, (), (0,), 3)}
    own = list(parts_of(["estimators"], rows, devices, ["mlp"], ["eager/ln", "graph/moe"]))
    assert [p.key for p in own] == ["eager/ln"], "experts are not in this study"
    chosen = list(parts_of(["tensor-core"], rows, devices, ["mlp"]))
    assert {p.estimator for p in chosen} == {"mlp"}
    assert all(p.key.startswith("graph/") for p in chosen)


def test_a_kept_part_is_found_until_something_changes(rows, tmp_path):
    found = draw(PART, rows)
    path = kept_path(tmp_path, PART, found)
    assert kept_path(tmp_path, PART, draw(PART, rows)) == path
    relabelled = rows.assign(latency_us=rows["latency_us"] * 1.01)
    others = {
        kept_path(tmp_path, PART, draw(PART, relabelled)),
        *(
            kept_path(tmp_path, p, draw(p, rows))
            for p in (replace(PART, rows=99), replace(PART, seed=1))
        ),
        kept_path(tmp_path, replace(PART, samples=(0, 10)), found),
        kept_path(tmp_path, replace(PART, estimator="forest"), found),
    }
    assert path not in others and len(others) == 5


def test_noise_of_replicates():
    rows = pd.DataFrame(
        {
            "key": KEY, "op": "linear", "dtype": "fp32", "b": 1, "m": [8, 8, 8, 8, 16],
            "n": 4, "k": 2, "device": ["one", "one", "one", "two", "one"],
            "latency_us": [10.0, 12.0, 12.0, 99.0, 50.0],
        }
    )  # fmt: skip
    found = replicate_noise(rows)
    # Two pairs: |10 - 12| / 11 and none between the equal ones.
    assert list(found["difference"]) == pytest.approx([2 / 11, 0.0])
    table = noise_table(found).iloc[0]
    assert table["noise_pairs"] == 2
    assert table["noise_mape"] == pytest.approx(1 / 11)
    assert list(replicate_noise(rows.iloc[3:])) == ["key", "dtype", "difference"]


def test_noise_of_second_versions():
    repeats = pd.DataFrame(
        {"family": ["moe"], "dtype": ["fp8"], "latency_first_us": [30.0], "latency_us": [50.0]}
    )
    found = repeat_noise(repeats).iloc[0]
    assert (found["key"], found["dtype"]) == ("graph/moe", "fp8")
    assert found["difference"] == pytest.approx(20 / 40)


def test_estimators_side_by_side():
    found = pd.DataFrame(
        {
            "key": ["a", "a", "b", "a", "a"], "estimator": ["x", "x", "x", "w", "w"],
            "measured_us": 10.0, "predicted_us": [11.0, 13.0, 10.0, 5.0, 10.0],
            "lo_us": 1.0, "hi_us": 20.0, "in_domain": True, "scope": "known",
        }
    )  # fmt: skip
    wide = side_by_side(found, ("key",), "mape")
    assert list(wide) == ["key", "n", "x", "w"]
    assert wide["n"].tolist() == [2, 1]
    assert wide["x"].tolist() == pytest.approx([0.2, 0.0])
    assert wide["w"][0] == pytest.approx(0.25) and np.isnan(wide["w"][1])
