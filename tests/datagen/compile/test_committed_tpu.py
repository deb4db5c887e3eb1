"""The committed dataset of the TPU compiler's estimates."""

from __future__ import annotations

from pathlib import Path

import pytest

from opcast.datagen.compile.run import SOURCE
from opcast.features.dataset import Dataset
from opcast.features.devices.catalogue import find_device

FOLDER = Path(__file__).parents[3] / "datagen" / "datasets" / "tpu"
GENERATIONS = {"tpu-v3", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e"}


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return Dataset.load(FOLDER)


def test_every_label_says_that_it_is_an_estimate(dataset: Dataset) -> None:
    assert set(dataset.frame["source"]) == {SOURCE}
    assert set(dataset.frame["device"]) == GENERATIONS
    assert (dataset.frame["latency_us_p50"] > 0).all()
    for record in dataset.runs.values():
        assert "libtpu" in record["compiler"]
        assert "nothing was measured" in record["labels"]


def test_it_is_large_for_every_generation(dataset: Dataset) -> None:
    assert len(dataset.frame) >= 20_000
    assert dataset.frame["device"].value_counts().min() >= 3_000


def test_kernels_say_what_lies_on_the_chip(dataset: Dataset) -> None:
    entry = dataset.frame["kernel_ir"].str.partition("ENTRY")[2]
    spaces = {"tpu-v3": "S(1)", "tpu-v4": "S(3)", "tpu-v5e": "S(1)", "tpu-v6e": "S(1)"}
    share = {
        name: entry[dataset.frame["device"] == name].str.contains(space, regex=False).mean()
        for name, space in spaces.items()
    }
    assert share.pop("tpu-v3") == 0.0
    assert min(share.values()) > 0.7


def test_equal_kernels_have_equal_estimates(dataset: Dataset) -> None:
    often = dataset.frame[dataset.frame["repeats"] > 1]
    assert len(often) > 500
    assert (often["latency_us_p90"] <= often["latency_us_p10"] * (1 + 1e-9)).all()


def test_kernels_are_there_once_for_each_device(dataset: Dataset) -> None:
    assert not dataset.frame.duplicated(["device", "kernel_hash"]).any()


def test_single_labels_are_whole_cycles_of_the_catalogue_clock(dataset: Dataset) -> None:
    single = dataset.frame[dataset.frame["repeats"] == 1]
    for name, rows in single.groupby("device"):
        cycles = rows["latency_us_p50"] * find_device(str(name)).clock_hz / 1e6
        assert (cycles - cycles.round()).abs().max() < 1e-3


def test_it_is_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 10e6
