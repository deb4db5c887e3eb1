"""What steps wait for all-to-alls of experts, and how much of that may be saved."""

from __future__ import annotations

from ...simulate.step.compose import StepTime
from ...simulate.step.workload import Workload

#: Share of a training step above which waiting for expert parallelism is noted, and the share of
#: that wait that the best overlap and routing may save. Engineering estimates: DeepSeek-V3's
#: published 1,543 tokens/s and H800 (2,048 of them, 2024, with DualPipe and node-limited routing)
#: stand against 830 that are predicted for as many H100.
EXCHANGE_SHARE, EXCHANGE_SAVED = 0.3, 0.7


def exchange_wait(workload: Workload, step: StepTime) -> float:
    """Seconds in which a training step waits for all-to-alls of expert parallelism.

    They are composed without overlap (:mod:`opcast.simulate.step.stage_times`), so all of them are
    exposed.
    """
    if workload.mode != "train":
        return 0.0
    return min(step.communication.get("expert", 0.0), step.exposed)


def least_seconds(workload: Workload, step: StepTime) -> float:
    """Seconds of a step that hides most of its all-to-alls of experts; all of them if it has few.

    Other stages of a pipeline wait for the same all-to-alls, so the bubble shrinks with them.
    """
    wait = exchange_wait(workload, step)
    if wait <= EXCHANGE_SHARE * step.total:
        return step.total
    return step.total - EXCHANGE_SAVED * wait * step.total / (step.total - step.bubble)
