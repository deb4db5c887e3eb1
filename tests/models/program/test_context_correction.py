"""The correction of kernels for their place in a program, and the decision to keep it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from opcast.features.devices.device import DeviceSpec
from opcast.features.kernels.kernel import LoweredProgram
from opcast.models.core.base import KernelPrediction
from opcast.models.core.registry import make_estimator
from opcast.models.cost_model import CostModel
from opcast.models.program.context_choice import (
    ContextChoice,
    choose_context,
    held_out_shifts,
    pair_correlation,
)
from opcast.models.program.context_trees import (
    BEND_KERNEL,
    BEND_SUM,
    SUM_WEIGHT,
    ContextCorrection,
    ContextProgram,
    ContextTrees,
    objective,
)
from opcast.models.training_data.crossfit import CrossFit
from opcast.models.training_data.prepared import PreparedDataset, ProgramSample

CACHED = 0.4  # what its predecessor wrote, a kernel reads in this share of the time


def placed(prepared: PreparedDataset, factor: float) -> PreparedDataset:
    """Some kernels of each program read what the one before wrote; they take ``factor`` times."""
    rng = np.random.default_rng(1)
    latency = prepared.frame["latency_us_p50"].to_numpy(np.float64, copy=True)
    samples: list[ProgramSample] = []
    names = zip(prepared.frame["program"], prepared.frame["kernel_hash"], strict=True)
    rows = {key: row for row, key in enumerate(names)}
    for sample in prepared.programs:
        reads = rng.random(len(sample.entries)) < rng.random()
        reads[0] = False
        kernels = [
            replace(k, operands=(i - 1,) if reads[i] else (), bytes_in=1e5, bytes_out=1e5)
            for i, k in enumerate(sample.lowered.kernels)
        ]
        own = [rows[sample.name, k.hash] for k in kernels]
        latency[own] *= np.where(reads, factor, 1.0)
        wall = 1.2e-6 * latency[own].sum() + 30e-6
        lowered = LoweredProgram(kernels, "xla", "cpu")
        samples.append(replace(sample, lowered=lowered, wall_s=wall))
    frame = prepared.frame.assign(latency_us_p50=latency)
    return replace(prepared, frame=frame, programs=samples)


def perfect_crossfit(prepared: PreparedDataset, noise: float) -> CrossFit:
    """Predictions of each kernel by itself, the same wherever it lies, ± ``noise``."""
    rng = np.random.default_rng(0)
    by_entry = np.zeros(len(prepared.table))
    rows = prepared.kernel_rows()
    by_entry[prepared.entry[rows]] = prepared.latency_s[rows]
    by_entry *= np.exp(noise * rng.normal(size=len(by_entry)))
    kernels = {p.row: by_entry[p.entries] for p in prepared.programs}
    return CrossFit(rows, by_entry[prepared.entry[rows]], np.full(len(rows), np.nan), kernels)


def choice_of(prepared: PreparedDataset, factor: float) -> ContextChoice:
    return choose_context(placed(prepared, factor), perfect_crossfit(prepared, 0.05))


@pytest.fixture(scope="module")
def kept(prepared: PreparedDataset) -> ContextChoice:
    return choice_of(prepared, CACHED)


def test_is_kept_where_the_place_matters(kept: ContextChoice) -> None:
    before, after = kept.figures
    assert kept.winner == "trees"
    assert (before["model"], after["model"]) == ("sum", "trees")
    assert after["family_error"] < 0.8 * before["family_error"]
    assert after["kernel_error"] < 0.5 * before["kernel_error"]
    assert json.loads(json.dumps(kept.to_dict()))["winner"] == "trees"


def test_sum_stays_where_the_place_does_not_matter(prepared: PreparedDataset) -> None:
    found = choice_of(prepared, 1.0)
    assert found.winner == "sum" and found.correction is None
    assert len(found.figures) == 2  # it was tried


def test_too_few_programs_are_not_tried(prepared: PreparedDataset) -> None:
    few = replace(prepared, programs=prepared.programs[:20])
    found = choose_context(few, perfect_crossfit(few, 0.05))
    assert found.winner == "sum" and found.figures == []


def test_only_labels_of_the_given_rows_count(prepared: PreparedDataset) -> None:
    crossed = perfect_crossfit(prepared, 0.05)
    nothing = CrossFit(np.zeros(0, np.int64), np.zeros(0), np.zeros(0), crossed.program_kernels)
    assert choose_context(placed(prepared, CACHED), nothing).figures == []


def prediction(latency: np.ndarray, source: str) -> KernelPrediction:
    n = len(latency)
    names = np.full(n, source, object)
    return KernelPrediction(
        latency, latency / 2, latency * 2, np.full(n, "memory", object), names, np.ones(n, bool)
    )


def test_corrects_kernels_that_read_what_was_just_written(
    kept: ContextChoice, prepared: PreparedDataset, cpu: DeviceSpec
) -> None:
    assert kept.correction is not None
    sample = placed(prepared, CACHED).programs[0]
    latency = perfect_crossfit(prepared, 0.0).program_kernels[sample.row]
    found = kept.correction.apply(
        prediction(latency, "learned"), sample.lowered, cpu, prepared.table.base_s[sample.entries]
    )
    factor = found.latency / latency
    cached = np.array([bool(k.operands) for k in sample.lowered.kernels])
    np.testing.assert_allclose(np.median(factor[cached]), CACHED, rtol=0.15)
    np.testing.assert_allclose(np.median(factor[~cached]), 1.0, rtol=0.1)
    np.testing.assert_allclose(found.hi / found.lo, 4.0)  # the interval moves with it


def test_leaves_the_roofline_and_other_platforms_alone(
    kept: ContextChoice, prepared: PreparedDataset, cpu: DeviceSpec
) -> None:
    assert kept.correction is not None
    sample = placed(prepared, CACHED).programs[0]
    latency = perfect_crossfit(prepared, 0.0).program_kernels[sample.row]
    base = prepared.table.base_s[sample.entries]
    bare = kept.correction.apply(prediction(latency, "roofline"), sample.lowered, cpu, base)
    np.testing.assert_array_equal(bare.latency, latency)
    gpu = replace(cpu, platform="gpu")
    other = kept.correction.apply(prediction(latency, "learned"), sample.lowered, gpu, base)
    np.testing.assert_array_equal(other.latency, latency)


def test_saved_with_the_model(
    kept: ContextChoice, prepared: PreparedDataset, cpu: DeviceSpec, tmp_path: Path
) -> None:
    sample = placed(prepared, CACHED).programs[0]
    alone = prediction(np.full(len(sample.entries), 1e-4), "learned")
    model = CostModel(
        make_estimator("roofline"), kept.program_model, {cpu.name: cpu},
        {"context_choice": kept.to_dict()}, context=kept.correction,
    )  # fmt: skip
    model.save(tmp_path / "m")
    again = CostModel.load(tmp_path / "m")
    assert again.info["context_choice"] == kept.to_dict()
    base = prepared.table.base_s[sample.entries]
    kernels, wall = again.predict_in_program(sample.lowered, cpu, alone, base)
    expected, total = model.predict_in_program(sample.lowered, cpu, alone, base)
    np.testing.assert_array_equal(kernels.latency, expected.latency)
    assert wall == total and (kernels.latency != alone.latency).any()
    stored = {**kept.correction.to_dict(), "features": ["another"]}  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="features"):
        ContextCorrection.from_dict(stored, [])


def test_objective_is_the_gradient_of_its_loss() -> None:
    rng = np.random.default_rng(0)
    ratio, times = rng.normal(size=12), np.exp(rng.normal(size=12))
    where, known = np.repeat([0, 1, 2], 4), np.array([True, True, False])

    def huber(x: np.ndarray, bend: float) -> np.ndarray:
        return np.where(np.abs(x) <= bend, x**2 / 2 / bend, np.abs(x) - bend / 2)

    def loss(shift: np.ndarray) -> float:
        sums = [np.bincount(where, times * np.exp(s)) for s in (shift, ratio)]
        program = huber(np.log(sums[0] / sums[1]), BEND_SUM) * known
        weight = SUM_WEIGHT * 12 / 3
        return float(huber(shift - ratio, BEND_KERNEL).sum() + weight * program.sum())

    shift = 0.3 * rng.normal(size=12)
    gradient, curvature = objective(ratio, times, where, known)(shift, None)
    step = 1e-6 * np.eye(12)
    numeric = [(loss(shift + s) - loss(shift - s)) / 2e-6 for s in step]
    np.testing.assert_allclose(gradient, numeric, rtol=1e-4, atol=1e-6)
    assert (curvature > 0).all()


def test_held_out_kernels_are_not_learned_from() -> None:
    """What a family takes 1.65 times for, trees learn; unless its kernels are held out."""
    rng = np.random.default_rng(0)

    def program(group: str, digest: str, ratio: float) -> ContextProgram:
        features = rng.normal(size=(200, 3)).astype(np.float32)
        ones = np.ones(200)
        hashes = np.array([f"{digest}{i}" for i in range(200)])
        return ContextProgram(features, ones, np.exp(ratio) * ones, ones, hashes, group)

    a, b = program("a", "x", 0.5), program("b", "y", 0.0)
    shifts = held_out_shifts([a, b])
    assert np.abs(shifts[0]).max() < 0.1  # b has nothing to correct
    assert np.median(shifts[1]) > 0.3  # a has
    trees = ContextTrees.fit([a, b], without=frozenset(a.hashes.tolist()))
    assert np.abs(trees.shift(a.features)).max() < 0.1


def test_sums_with_unlabelled_kernels_do_not_count() -> None:
    label = np.array([1.0, np.nan, 1.0])
    program = ContextProgram(
        np.zeros((3, 1)), np.array([1.0, 0.01, 1.0]), label, np.ones(3), np.array(list("abc")), "g"
    )
    assert program.labelled.tolist() == [True, False, True] and program.sum_is_known
    assert not replace(program, predicted_s=np.array([1.0, 1.0, 1.0])).sum_is_known
    assert replace(program, predicted_s=np.ones(3), executions=np.array([1.0, 0, 1])).sum_is_known


def test_correlation_of_errors_in_a_program() -> None:
    # Errors ±1 in pairs: 15 pairs agree, 5 do not; ρ = (15 - 5) / 20.
    agree = [np.array([s, s]) for s in (1.0, -1.0) * 8][:15]
    differ = [np.array([1.0, -1.0])] * 5
    errors = [*agree, np.array([-1.0, -1.0]), *differ]  # the mean of all is 0
    assert pair_correlation(errors) == pytest.approx((16 - 5) / 21)
    assert pair_correlation([np.array([1.0, -1.0])] * 30) == 0.0
    assert pair_correlation(errors[:10]) == 1.0  # too few to tell
    assert pair_correlation([np.array([0.3])] * 50) == 1.0
