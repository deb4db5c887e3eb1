"""Devices of one name are told apart by their ceilings."""

from dataclasses import asdict, replace

import pandas as pd
import pytest

from opcast.features.dataset import COLUMNS, Dataset
from opcast.features.devices.device import DeviceSpec, MemoryLevel
from opcast.features.devices.identity import (
    CACHE_BYTES,
    FORMER,
    MOST_FORMER,
    SINGLE_THREAD,
    Comparison,
    compare_ceilings,
    distinct,
    former_speeds,
    identified,
    remeasured,
    unlike,
)

SPEC = DeviceSpec(
    "cpu-x", "cpu", {"f32": 200e9, "f64": 100e9}, {"f32": 50e9},
    (MemoryLevel(1e6, 1e11), MemoryLevel(1e9, 40e9)), 1e-6, source="measured",
    extra={SINGLE_THREAD: 30e9, CACHE_BYTES: 32e6},
)  # fmt: skip


def scaled(factor: float, spec: DeviceSpec = SPEC) -> DeviceSpec:
    """The same machine with all speeds multiplied."""
    return replace(
        spec,
        peak_flops={d: factor * r for d, r in spec.peak_flops.items()},
        vector_flops={d: factor * r for d, r in spec.vector_flops.items()},
        levels=tuple(MemoryLevel(x.capacity, factor * x.bandwidth) for x in spec.levels),
        extra={**spec.extra, SINGLE_THREAD: factor * spec.extra[SINGLE_THREAD]},
    )


def test_ratios_by_class_of_what_both_list():
    now = replace(
        SPEC, peak_flops={"f32": 100e9, "s8": 1.0}, vector_flops={"f32": 12.5e9},
        levels=(MemoryLevel(1e9, 60e9),), extra={SINGLE_THREAD: 15e9},
    )  # fmt: skip
    found = compare_ceilings(now, SPEC)
    # f32: 1/2 in products and 1/4 in vectors.
    assert found.ratios["arithmetic"] == pytest.approx(8**-0.5)
    assert found.ratios["single-thread"] == pytest.approx(0.5)
    assert found.ratios["bandwidth"] == pytest.approx(1.5)
    assert found.cache == 1.0
    assert found.overall == pytest.approx((8**-0.5 * 0.5 * 1.5) ** (1 / 3))
    assert found.reach == pytest.approx((1 / 1.5, 8**0.5))
    assert found.factor == pytest.approx(8**0.5)


@pytest.mark.parametrize(
    ("ratios", "cache", "same"),
    [
        ({"arithmetic": 1.4, "bandwidth": 1.4}, 1.0, True),
        ({"arithmetic": 0.55, "bandwidth": 0.55}, 1.0, False),  # 724 ms, later 1.34 s
        ({"arithmetic": 0.55, "bandwidth": 1.0}, 1.0, True),  # one reading of one anchor
        ({"arithmetic": 0.45, "bandwidth": 1.2}, 1.0, False),
        ({"arithmetic": 1.0, "bandwidth": 1.0}, 0.25, False),
        ({}, 1.0, True),
    ],
)
def test_what_measuring_repeats_is_one_device(ratios, cache, same):
    assert Comparison(ratios, cache).same is same


def test_documents_are_not_compared():
    sheet = replace(scaled(0.1), source="data sheet")
    assert compare_ceilings(sheet, SPEC) == Comparison()
    assert identified(sheet, {"cpu-x": SPEC}) is sheet


def test_a_measured_device_gets_the_name_of_the_one_that_it_is():
    slow = distinct(scaled(0.5))
    assert slow.name == "cpu-x~100gf-20gbs"
    assert slow.aliases == ("cpu-x",)
    known = {"cpu-x": SPEC, slow.name: slow}
    assert identified(scaled(1.1), known).name == "cpu-x"
    assert identified(scaled(0.45), known).name == slow.name
    assert identified(scaled(0.2), known).name == "cpu-x~40gf-8gbs"
    assert identified(scaled(0.2), {}).name == "cpu-x"


def test_unlike_every_known_device_of_the_name():
    known = {"cpu-x": SPEC, "other": scaled(0.5)}
    assert unlike(SPEC, known) is None
    assert unlike(scaled(1.2), known) is None
    assert unlike(replace(scaled(0.5), name="new"), known) is None
    found = unlike(distinct(scaled(0.5)), known)
    assert found is not None
    assert set(found.ratios.values()) == {0.5}
    assert unlike(scaled(0.5), known) == found


def run(folder, run_id, date, spec):
    """A dataset of one run with one sample."""
    values = {c: "x" if t == "str" else 1 for c, t in COLUMNS.items()}
    row = {**values, "sample_id": run_id, "run_id": run_id, "device": spec.name}
    record = {"device": asdict(spec), "date": date, "run_id": run_id}
    Dataset(pd.DataFrame([row]), {run_id: record}).save(folder)
    return folder


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_runs_of_one_name_on_other_machines_are_other_devices(tmp_path, order, caplog):
    folders = [
        run(tmp_path / "a", "a", "2026-01-01", SPEC),
        run(tmp_path / "b", "b", "2026-01-02", scaled(0.5)),
        run(tmp_path / "c", "c", "2026-01-03", scaled(0.9)),
    ]
    dataset = Dataset.load(*(folders[i] for i in order))
    devices = dataset.frame.set_index("run_id")["device"].to_dict()
    assert devices == {"a": "cpu-x", "b": "cpu-x~100gf-20gbs", "c": "cpu-x"}
    assert set(dataset.devices) == set(devices.values())
    assert dataset.devices["cpu-x~100gf-20gbs"].bandwidth == 20e9
    assert "run b" in caplog.text
    # What was told apart stays so, however it is stored.
    dataset.save(tmp_path / "all")
    again = Dataset.load(tmp_path / "all")
    assert again.frame.set_index("run_id")["device"].to_dict() == devices


def test_rows_follow_their_run_when_an_older_one_joins(tmp_path):
    late = run(tmp_path / "late", "b", "2026-01-02", distinct(scaled(0.5)))
    early = run(tmp_path / "early", "a", "2026-01-01", scaled(0.5))
    frame = Dataset.load(late, early).frame
    assert set(frame["device"]) == {"cpu-x"}


def test_earlier_ceilings_are_kept_relative_to_those_of_now():
    first, second, third = scaled(1.0), scaled(0.8), scaled(1.2)
    now = remeasured(third, remeasured(second, first))
    # Relative to 1.2: 0.8 is slower by a third, 1.0 by a sixth.
    for former, factor in zip(now.extra[FORMER], (0.8 / 1.2, 1.0 / 1.2), strict=True):
        assert former == pytest.approx(dict.fromkeys(former, factor))
    slow, fast = former_speeds(now)
    assert slow.ratios == pytest.approx(dict.fromkeys(slow.ratios, 0.8 / 1.2))
    assert set(fast.ratios.values()) == {1.0}
    # Another machine of the name, or one that is not the same any more, tells nothing.
    assert FORMER not in remeasured(scaled(2.5), first).extra
    assert former_speeds(first) is None
    assert former_speeds(remeasured(scaled(1.01), first)) is None
    many = first
    for n in range(8):
        many = remeasured(scaled(1.0 + 0.01 * n), many)
    assert len(many.extra[FORMER]) == MOST_FORMER
