"""Which step to measure next."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from opcast.models.steps.effects import slopes_at
from opcast.models.steps.model import StepModel
from opcast.predict.cluster.next_run import next_run, next_steps
from opcast.predict.cluster.step_case import StepCase
from opcast.predict.cluster.step_table import StepRuns, step_row
from opcast.simulate.step.named_workloads import read_workload

RUN = {
    "id": "r", "source": "own", "framework": "llm-foundry", "device": "a100-sxm-80gb",
    "n_devices": 16, "dtype": "bf16", "layers": 8, "d_model": 2048, "heads": 16, "d_ff": 8192,
    "vocab": 32000, "seq": 2048, "global_batch": 128, "fsdp": 16, "position": "rope",
}  # fmt: skip


def test_the_run_that_talks_more_between_boxes_is_named_after_one_that_hardly_does() -> None:
    # Eight sequences a device: the network hides behind the products.
    row = step_row(RUN)
    runs = StepRuns([row], None)
    found = next_run(StepModel.find(), runs, np.log([1.0]))
    assert found is not None and found.fall > 0.0
    assert found.row.plan != row.plan and found.row.workload == row.workload
    assert "16 × a100-sxm-80gb" in found.text()


def test_another_run_of_the_same_kind_tells_less_than_one_of_a_new_kind() -> None:
    rows = [step_row(RUN), step_row(RUN | {"global_batch": 16})]
    runs = StepRuns([rows[0]] * 6 + rows, None)
    slopes = slopes_at(runs.simulate, StepModel.find().table, 8)
    # Smaller batches wait for the network: its slope is higher there.
    assert slopes.slope["between"][7] > slopes.slope["between"][6]
    left = slopes.linear(runs.contexts, slopes.level).unsure(np.arange(8) < 6)
    assert left.covariance[1, 1] > left.covariance[0, 0] > 0.0


def test_steps_for_a_question_narrow_its_interval_one_by_one() -> None:
    case = StepCase(
        workload="llama-3-8b",
        settings={"batch": 64, "seq": 4096},
        cluster="dgx-h100-x32",
        plan="tp=8,dp=4",
        price=2.0,
    )
    work = read_workload(case.workload, case.settings)
    asked = case.predict(work, None)
    found = next_steps(case, work, None, 3)
    widths = [np.log(run.hi / run.lo) for run in found.runs]
    now = np.log(asked.interval.hi / asked.interval.lo)
    assert now > widths[0] > widths[1] > widths[2] > 0.0
    # With a price a run of few devices comes before one of all of them.
    assert all("x32" not in run.what for run in found.runs)
    assert found.runs[0].cost == pytest.approx(2.0 * found.runs[0].hours)
    dear = next_steps(replace(case, price=None), work, None, 1).runs[0]
    assert dear.cost is None and np.log(dear.hi / dear.lo) <= widths[0]
    assert "--cluster" in dear.command and "--plan" in dear.command


def test_nothing_is_named_where_no_plan_fits() -> None:
    row = step_row(RUN)
    huge = replace(row, workload=replace(row.workload, d_model=65536, layers=96))
    runs = StepRuns([row], None)
    runs.rows = [huge]
    assert next_run(StepModel.find(), runs, np.log([1.0])) is None
    assert pd.notna(row.share)
