from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from opcast.common.errors import DatasetError
from opcast.features.dataset import Dataset, sample_frame
from opcast.features.devices.device import DeviceSpec
from opcast.features.ir.hlo_reader import parse_hlo
from opcast.features.kernels.extract import extract_kernels
from opcast.features.kernels.kernel import Kernel, LoweredProgram
from opcast.features.kernels.program_json import schedule_to_json
from opcast.models.cost_model import CostModel
from opcast.models.estimators.boosted import XGBoostEstimator
from opcast.models.estimators.linear import RidgeEstimator, RooflineEstimator
from opcast.models.training_data.prepared import prepare

HLO = """HloModule net, is_scheduled=true

ENTRY main {
  x = f32[ROWS,512] parameter(0)
  w = f32[512,256] parameter(1)
  y = f32[ROWS,256] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  e = f32[ROWS,256] exponential(y)
  ROOT z = f32[ROWS,256] add(e, y)
}
"""


def kernels_of(rows: int) -> list[Kernel]:
    return extract_kernels(parse_hlo(HLO.replace("ROWS", str(rows))))[0]


@pytest.fixture(scope="module")
def dataset(cpu: DeviceSpec) -> Dataset:
    """Twelve programs of three kernels; labels are 1.5 × (1 µs + bytes / 10 GB/s)."""
    rows = []
    for index in range(12):
        kernels = kernels_of(64 + 32 * index)
        base = {"device": cpu.name, "run_id": "r0", "repeats": 5, "source": "measured:trace"}
        base |= {"family": f"net{index % 4}", "program": f"net{index % 4}-{index}", "dtype": "f32"}
        wall = 0.0
        for kernel in kernels:
            label = 1.5 * (1.0 + kernel.bytes / 10e9 * 1e6)
            wall += label
            row = base | {"kernel_hash": kernel.hash, "kernel_ir": kernel.ir, "level": "kernel"}
            row |= {"kind": kernel.kind, "flops": kernel.flops, "bytes": kernel.bytes}
            rows.append(row | {"latency_us_p50": label})
        lowered = LoweredProgram(kernels, "xla", "cpu")
        text = schedule_to_json(lowered, {k.hash for k in kernels})
        row = base | {"kernel_hash": f"program{index}", "kernel_ir": text, "level": "program"}
        rows.append(row | {"kind": "program", "latency_us_p50": wall})
    full = [{"sample_id": f"s{i}", **row} for i, row in enumerate(rows)]
    missing = {"latency_us_p10": 0.0, "latency_us_p90": 0.0, "flops": 0.0, "bytes": 0.0}
    frame = sample_frame([missing | row for row in full])
    return Dataset(frame, {"r0": {"device": json.loads(cpu.to_json())}})


def test_labels_of_a_program_add_up_to_its_wall_time(dataset: Dataset) -> None:
    data = prepare(dataset)
    for program in data.programs:
        assert data.label_sum_s(program) == pytest.approx(program.wall_s)
    alone = replace(data.programs[0], name="no such program")
    assert np.isnan(data.label_sum_s(alone))


def test_every_kernel_is_featurised_once(dataset: Dataset) -> None:
    twice = Dataset(
        dataset.frame.loc[[*range(len(dataset.frame)), 0]]
        .reset_index(drop=True)
        .assign(sample_id=[f"t{i}" for i in range(len(dataset.frame) + 1)]),
        dataset.runs,
    )
    data = prepare(twice)
    assert len(data.table) == 36
    assert data.entry[0] == data.entry[-1]
    assert (data.entry == -1).sum() == 12 == len(data.programs)
    program = data.programs[0]
    np.testing.assert_array_equal(program.entries, data.entry[:3])
    assert data.inside[data.frame["sample_id"].iloc[3]] == {k.hash for k in kernels_of(64)}
    assert prepare(data) is data


def test_program_with_unknown_kernels_is_left_out(
    dataset: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        data = prepare(Dataset(dataset.frame.drop(index=0).reset_index(drop=True), dataset.runs))
    assert len(data.programs) == 11
    assert "net0-0" in caplog.text


def test_device_without_record_is_refused(dataset: Dataset) -> None:
    with pytest.raises(DatasetError, match="cpu-test"):
        prepare(Dataset(dataset.frame, {}))


def test_roofline_of_a_real_kernel_by_hand(cpu: DeviceSpec) -> None:
    add = kernels_of(4096)[-1]
    # 3 × 4096 × 256 × 4 bytes = 12.6 MB is far past the 1 MB cache: 10 GB/s, plus 1 µs.
    read_and_written = 3 * 4096 * 256 * 4
    assert add.bytes == read_and_written
    found = RooflineEstimator().predict([add, add], cpu)
    assert found.latency[0] == pytest.approx(read_and_written / 10e9 + 1e-6)
    assert found.latency[0] == found.latency[1]
    assert found.bound[0] == "memory"
    assert found.source[0] == "roofline"


def test_fit_predict_save_load_from_kernels(
    dataset: Dataset, cpu: DeviceSpec, tmp_path: Path
) -> None:
    model = RidgeEstimator().fit(dataset)
    kernels = kernels_of(100)
    found = model.predict(kernels, cpu)
    labels = np.array([1.5e-6 * (1.0 + k.bytes / 10e9 * 1e6) for k in kernels])
    assert np.abs(found.latency / labels - 1).max() < 0.5
    model.save(tmp_path / "m")
    again = RidgeEstimator.load(tmp_path / "m").predict(kernels, cpu)
    np.testing.assert_array_equal(again.latency, found.latency)


def test_no_kernels_give_empty_predictions(cpu: DeviceSpec) -> None:
    found = RooflineEstimator().predict([], cpu)
    assert found.latency.shape == found.bound.shape == found.in_domain.shape == (0,)


def test_bundle_of_a_fitted_estimator(dataset: Dataset, cpu: DeviceSpec, tmp_path: Path) -> None:
    estimator = XGBoostEstimator(rounds=10, max_depth=3).fit(dataset)
    bundle = CostModel(estimator, devices={cpu.name: cpu})
    bundle.save(tmp_path / "m")
    again = CostModel.load(tmp_path / "m")
    assert asdict(again.devices[cpu.name]) == asdict(cpu)
    lowered = LoweredProgram(kernels_of(64), "xla", "cpu")
    first, second = (m.predict_program(lowered, cpu) for m in (bundle, again))
    assert first == second
    kernels = bundle.predict_kernels(lowered.kernels, cpu)
    # No program model: the sum, three gaps of 2 µs and the dispatch of 10 µs.
    assert first.latency == pytest.approx(kernels.latency.sum() + 3 * 2e-6 + 10e-6)
