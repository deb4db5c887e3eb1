from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from opcast.common import plugins
from opcast.common.errors import DatasetError, OpcastError
from opcast.models.training_data.splits import SPLITS, Split, fold_groups, make_folds, make_split

Frames = Callable[..., pd.DataFrame]


@pytest.fixture
def frame(make_frame: Frames) -> pd.DataFrame:
    """600 rows of 240 kernels: nine families, generated programs, two devices, two runs."""
    rng = np.random.default_rng(0)
    n = 600
    family = rng.choice([*(f"net{i}" for i in range(9)), "random", "op:dot"], n)
    kernel = rng.integers(0, 240, n)
    return make_frame(
        kernel_hash=[f"k{k}" for k in kernel],
        kind=[["gemm", "fusion", "copy"][k % 3] for k in kernel],
        flops=[float(k) for k in kernel],
        bytes=[float(k) for k in kernel],
        family=list(family),
        program=[f"{f}-{i % 7}" for i, f in enumerate(family)],
        device=list(rng.choice(["d0", "d1"], n)),
        run_id=list(rng.choice(["r0", "r1"], n)),
    )


def hashes(frame: pd.DataFrame, rows: np.ndarray) -> set[str]:
    return set(frame["kernel_hash"].iloc[rows])


def assert_no_leak(frame: pd.DataFrame, split: Split) -> None:
    parts = [hashes(frame, p) for p in (split.train, split.validation, split.test)]
    assert not parts[0] & parts[2]
    assert not parts[1] & parts[2]
    assert not parts[0] & parts[1]


@pytest.mark.parametrize("name", SPLITS)
def test_no_kernel_in_two_parts_and_reproducible(frame: pd.DataFrame, name: str) -> None:
    split = make_split(frame, name, seed=1)
    assert_no_leak(frame, split)
    again = make_split(frame, name, seed=1)
    for part in ("train", "validation", "test"):
        np.testing.assert_array_equal(getattr(split, part), getattr(again, part))


def test_random_takes_about_a_fifth_and_depends_on_the_seed(frame: pd.DataFrame) -> None:
    split = make_split(frame, "random")
    assert 0.12 < len(split.test) / len(frame) < 0.28
    assert set(split.test) != set(make_split(frame, "random", seed=1).test)


def test_random_does_not_depend_on_row_order(frame: pd.DataFrame) -> None:
    split = make_split(frame, "random")
    turned = frame.iloc[::-1].reset_index(drop=True)
    assert hashes(turned, make_split(turned, "random").test) == hashes(frame, split.test)


def test_unseen_shape_holds_out_the_largest_of_each_kind(frame: pd.DataFrame) -> None:
    split = make_split(frame, "unseen_shape")
    for kind in ("gemm", "fusion", "copy"):
        own = frame[frame["kind"] == kind]["bytes"]
        train, test = (own[own.index.isin(part)] for part in (split.train, split.test))
        assert test.min() > train.max()


def test_unseen_family_takes_every_third_and_keeps_generated_programs(frame: pd.DataFrame) -> None:
    split = make_split(frame, "unseen_family")
    # Nine families in order: the third of each three.
    assert split.held_out == ("net2", "net5", "net8")
    assert set(frame["family"].iloc[split.test]) == {"net2", "net5", "net8"}
    assert {"random", "op:dot"} <= set(frame["family"].iloc[split.train])
    others = [set(make_split(frame, "unseen_family", seed=s).held_out) for s in range(3)]
    assert set.union(*others) == {f"net{i}" for i in range(9)}


def test_unseen_family_drops_kernels_inside_held_out_programs(make_frame: Frames) -> None:
    frame = make_frame(
        sample_id=["s0", "s1", "s2", "prog"],
        kernel_hash=["a", "b", "c", "whole"],
        level=["kernel", "kernel", "kernel", "program"],
        family=["net0", "net0", "net1", "net1"],
    )
    split = make_split(frame, "unseen_family", seed=1, inside={"prog": {"b", "c"}})
    assert split.held_out == ("net1",)
    assert split.test.tolist() == [2, 3]
    assert split.train.tolist() == [0]  # b is part of the held-out program


def test_unseen_device_and_run_hold_out_one_value(frame: pd.DataFrame) -> None:
    split = make_split(frame, "unseen_device", held_out="d0")
    assert split.held_out == ("d0",)
    assert set(frame["device"].iloc[split.test]) == {"d0"}
    assert set(frame["device"].iloc[split.train]) == {"d1"}
    run = make_split(frame, "unseen_run")
    assert set(frame["run_id"].iloc[run.test]) == {"r1"}


def test_folds_of_families_test_every_row_once(frame: pd.DataFrame) -> None:
    folds = make_folds(frame, fold_groups(frame), folds=4)
    tested = np.concatenate([fold.test for fold in folds])
    assert sorted(tested.tolist()) == list(range(len(frame)))
    for fold in folds:
        assert_no_leak(frame, fold)
        nets = {f for f in frame["family"].iloc[fold.test] if f.startswith("net")}
        assert not nets & set(frame["family"].iloc[fold.train])


def test_user_mistakes_say_what_to_do(frame: pd.DataFrame, make_frame: Frames) -> None:
    with pytest.raises(DatasetError, match="unseen_shape"):
        make_split(frame, "sideways")
    single = make_frame(family=["random", "random"])
    with pytest.raises(DatasetError, match="two model families"):
        make_split(single, "unseen_family")
    with pytest.raises(DatasetError, match="d0"):
        make_split(single, "unseen_device", held_out="d9")


def halves(frame: pd.DataFrame, seed: int) -> np.ndarray:
    """A split as a package gives it: families by name; generated programs are left out."""
    family = frame["family"]
    parts = np.where(family < f"net{5 + seed}", "train", "test").astype(object)
    return np.where(family.str.startswith("net"), parts, "")


def test_a_split_of_another_package(frame: pd.DataFrame, monkeypatch: pytest.MonkeyPatch):
    point = EntryPoint("halves", f"{__name__}:halves", "opcast.splits")
    monkeypatch.setattr(plugins, "found", lambda group: {"halves": point})
    split = make_split(frame, "halves", 1)
    assert_no_leak(frame, split)
    assert set(frame["family"].iloc[split.test]) == {"net6", "net7", "net8"}
    assert set(frame["family"].iloc[split.train]) == {f"net{i}" for i in range(6)}
    with pytest.raises(DatasetError, match=r"no split 'thirds' .*unseen_run, halves; or a table"):
        make_split(frame, "thirds")
    monkeypatch.setattr(plugins, "load", lambda point: lambda frame, seed: ["train"])
    with pytest.raises(DatasetError, match=r"shape \(1,\) for 600 rows"):
        make_split(frame, "halves")


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_split_of_a_file(frame: pd.DataFrame, tmp_path: Path, suffix: str):
    path = tmp_path / f"parts{suffix}"
    table = pd.DataFrame({"sample_id": frame["sample_id"], "part": halves(frame, 0)})

    def written(table: pd.DataFrame) -> str:
        write = table.to_csv if suffix == ".csv" else table.to_parquet
        write(path, index=False)
        return str(path)

    # Rows that it does not name are in no part.
    split = make_split(frame, written(table[table["part"] != ""]))
    assert_no_leak(frame, split)
    assert set(split.test) == set(np.flatnonzero(halves(frame, 0) == "test"))
    assert set(make_split(frame, written(table)).test) == set(split.test)
    for wrong, what in (
        (table.assign(part="tets"), "no part 'tets' .*train, validation, test"),
        (table.assign(sample_id="s"), "a sample is there twice|'s' is not in the dataset"),
        (table.drop(columns="part"), "column 'part' is missing"),
        (table.assign(part="train"), "leaves no test rows"),
    ):
        with pytest.raises(DatasetError, match=what):
            make_split(frame, written(wrong))
    with pytest.raises(DatasetError, match="nowhere"):
        make_split(frame, str(tmp_path / f"nowhere{suffix}"))


def wrong(frame: pd.DataFrame, seed: int) -> list[str]:
    return list(frame.groupby("kind")["latency_us"].median())


def test_a_fault_of_a_plug_in_is_told_as_its_own(frame, monkeypatch):
    """A researcher's column that is not there: their line, not one of opcast or pandas."""
    point = EntryPoint("mine", f"{__name__}:wrong", "opcast.splits")
    monkeypatch.setattr(plugins, "found", lambda group: {"mine": point})
    with pytest.raises(OpcastError, match="Column not found: latency_us") as told:
        make_split(frame, "mine")
    line = wrong.__code__.co_firstlineno + 1
    assert told.value.where == f"{__file__}:{line}"
    assert "its fault, not opcast's" in told.value.hint
