import numpy as np
import pytest

from opcast.simulate.program.list_schedule import NO_WORKER, critical_path, list_schedule


def test_chain_runs_one_after_another_whatever_the_workers():
    timeline = list_schedule([1.0, 2.0, 3.0], [(), (0,), (1,)], workers=4)
    assert timeline.start.tolist() == [0.0, 1.0, 3.0]
    assert timeline.makespan == 1.0 + 2.0 + 3.0


def test_independent_kernels_share_two_workers():
    # Worker 0 takes 3 s, worker 1 takes 1 s and then 2 s more.
    timeline = list_schedule([3.0, 1.0, 2.0], [(), (), ()], workers=2)
    assert timeline.start.tolist() == [0.0, 0.0, 1.0]
    assert timeline.worker.tolist() == [0, 1, 1]
    assert timeline.makespan == 3.0


def test_communication_overlaps_on_a_channel_of_its_own():
    # Two transfers share the channel (2 + 2 s) while the only worker computes for 3 s.
    timeline = list_schedule([2.0, 3.0, 2.0], [(), (), ()], workers=1, channel=[True, False, True])
    assert timeline.end.tolist() == [2.0, 3.0, 4.0]
    assert timeline.worker.tolist() == [1, 0, 1]


def test_kernels_without_duration_take_no_worker():
    timeline = list_schedule([1.0, 0.0, 1.0], [(), (0,), (1,)], workers=1)
    assert timeline.worker.tolist() == [0, NO_WORKER, 0]
    assert timeline.makespan == 2.0


def test_loop_carried_operand_does_not_delay():
    assert list_schedule([1.0, 1.0], [(1,), ()], workers=2).makespan == 1.0


def test_empty():
    assert list_schedule([], []).makespan == 0.0
    assert critical_path([], []) == 0.0


@pytest.mark.parametrize("seed", range(20))
def test_makespan_lies_between_critical_path_and_sum(seed):
    rng = np.random.default_rng(seed)
    durations = rng.uniform(0.1, 1.0, 40)
    operands = [tuple(rng.integers(0, i, size=min(i, 2))) if i else () for i in range(40)]
    makespan = list_schedule(durations, operands, workers=3).makespan
    assert critical_path(durations, operands) - 1e-12 <= makespan <= durations.sum() + 1e-12
    assert makespan >= durations.sum() / 3 - 1e-12
