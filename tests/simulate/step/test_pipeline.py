import pytest

from opcast.simulate.step.pipeline import (
    BACKWARD,
    FORWARD,
    WEIGHTS,
    Task,
    in_flight,
    orders,
    run_pipeline,
)
from opcast.simulate.step.stage_times import Pass, run_passes

CASES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zero-bubble", 1)]


def bubble_seconds(
    schedule: str,
    stages: int,
    micros: int,
    forward: float,
    backward: float,
    weights: float = 0.0,
    chunks: int = 1,
) -> float:
    """Return the idle time of a device in a pipeline of equal stages and free transfers.

    ``(p - 1)(F + B)`` for GPipe and 1F1B, that over ``v`` for interleaved chunks, and
    ``(p - 1)(F + B - W)`` for ZB-H1, where ``B`` is the backward pass without the gradients of
    weights ``W`` (1F1B: ``B + W``); with ``m < p`` micro-batches ZB-H1 has less to fill it with.

    Args:
        schedule: One of :data:`~.plan.SCHEDULES`.
        stages: Devices ``p``.
        micros: Micro-batches ``m``.
        forward: Seconds ``F`` of a micro-batch through a device.
        backward: Seconds ``B`` of its backward pass, without ``weights`` for ``zero-bubble`` and
            whole for the others.
        weights: Seconds ``W``; only for ``zero-bubble``.
        chunks: Chunks ``v`` of a device.
    """
    if schedule == "zero-bubble":
        return (stages - 1) * (forward + backward - weights)
    return (stages - 1) * (forward + backward) / chunks


def _run(schedule, stages, micros, chunks, forward, backward, weights, hop=0.0):
    seconds = {FORWARD: forward / chunks, BACKWARD: backward / chunks, WEIGHTS: weights}
    order = orders(schedule, stages, micros, chunks)
    return run_pipeline(order, lambda stage, task: seconds[task.kind], hop, chunks)


@pytest.mark.parametrize(("schedule", "chunks"), CASES)
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_bubble_formulas_equal_the_simulated_schedule(schedule, chunks, stages, rounds):
    weights = 0.7 if schedule == "zero-bubble" else 0.0
    micros = stages * rounds
    run = _run(schedule, stages, micros, chunks, 1.0, 1.5, weights)
    bubble = bubble_seconds(schedule, stages, micros, 1.0, 1.5, weights, chunks)
    assert run.makespan == pytest.approx(micros * (1.0 + 1.5 + weights) + bubble)
    assert run.busy(0) == pytest.approx(micros * (1.0 + 1.5 + weights))


@pytest.mark.parametrize(("schedule", "chunks"), CASES)
def test_micro_batches_in_flight_equal_those_of_the_run(schedule, chunks):
    stages, micros = 4, 12
    run = _run(schedule, stages, micros, chunks, 1.0, 2.0, 1.0)
    last = WEIGHTS if schedule == "zero-bubble" else BACKWARD
    for stage, track in enumerate(run.tasks):
        kept = most = 0
        for task, _, _ in track:
            kept += (task.kind == FORWARD) - (task.kind == last)
            most = max(most, kept)
        assert in_flight(schedule, stage, stages, micros, chunks) == pytest.approx(most / chunks)


def test_1f1b_by_hand():
    # p=2, m=2, F=1, B=2: stage 1 works from 1 to 7, then stage 0 ends its last backward at 9.
    run = _run("1f1b", 2, 2, 1, 1.0, 2.0, 0.0)
    assert [(t.kind, t.micro, s, e) for t, s, e in run.tasks[1]] == [
        ("F", 0, 1, 2), ("B", 0, 2, 4), ("F", 1, 4, 5), ("B", 1, 5, 7),
    ]  # fmt: skip
    assert run.makespan == 9
    # A transfer takes 0.5 s: one way down and one way up for every micro-batch in turn.
    assert _run("1f1b", 2, 2, 1, 1.0, 2.0, 0.0, hop=0.5).makespan == 10.0


def test_orders_that_wait_for_each_other_are_refused():
    stuck = ((Task(BACKWARD, 0), Task(FORWARD, 0)),)
    with pytest.raises(ValueError, match="wait for one another"):
        run_pipeline(stuck, lambda stage, task: 1.0)


def test_prefetch_by_hand():
    # Gathers of 2 s, layers of 3 s: 2 exposed, then 3 + 3 + 3 with the gathers hidden.
    assert run_passes([Pass([3.0] * 3, [2.0] * 3)]).total == 2 + 9
    # Layers of 1 s: the links are busy all the time, and the last layer runs after its gather.
    assert run_passes([Pass([1.0] * 3, [2.0] * 3)]).total == 6 + 1
    assert run_passes([Pass([1.0, 1.0], [0.0, 0.0])]).total == 2.0


def test_scatter_by_hand():
    # All but the last layer's reduction hides behind the next layer.
    assert run_passes([Pass([3.0, 3.0], (), [2.0, 2.0])]).total == 6 + 2
    # Reductions of 4 s: they follow one another after the first layer.
    assert run_passes([Pass([3.0, 3.0], (), [4.0, 4.0])]).total == 3 + 8
    # In a second pass of the same layers the first one's last reduction is hidden.
    twice = run_passes([Pass([3.0, 3.0], (), [2.0, 2.0])] * 2)
    assert (twice.ends, twice.total) == ((6.0, 12.0), 12 + 2)


@pytest.mark.parametrize("compute", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("gather", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("scatter", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("layers", [1, 2, 7])
def test_overlap_lies_between_the_longer_part_and_the_sum(compute, gather, scatter, layers):
    one = Pass([compute] * layers, [gather] * layers, [scatter] * layers)
    sent = layers * (gather + scatter)
    for count in (1, 3):
        total = run_passes([one] * count).total / count
        assert max(layers * compute, sent) - 1e-9 <= total <= layers * compute + sent + 1e-9
