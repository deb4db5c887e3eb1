"""Which step to measure next."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from opcast.models.steps.effects import informative, slopes_at
from opcast.models.steps.model import StepModel
from opcast.predict.cluster.next_run import next_run
from opcast.predict.cluster.step_table import StepRuns, step_row

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
    assert found is not None and found.nats > 0.0
    assert found.row.plan != row.plan and found.row.workload == row.workload
    assert "16 × a100-sxm-80gb" in found.text()


def test_another_run_of_the_same_kind_tells_less_than_one_of_a_new_kind() -> None:
    rows = [step_row(RUN), step_row(RUN | {"global_batch": 16})]
    runs = StepRuns(rows, None)
    table = StepModel.find().table
    slopes = slopes_at(runs.simulate, table, 2)
    # Smaller batches wait for the network: its slope is higher there.
    assert slopes.slope["between"][1] > slopes.slope["between"][0]
    part = StepRuns([rows[0]] * 6, None)
    known = slopes_at(part.simulate, table, 6)
    nats = informative(known, part.contexts, known.level, slopes, runs.contexts)
    assert nats[1] > nats[0] > 0.0


def test_nothing_is_named_where_no_plan_fits() -> None:
    row = step_row(RUN)
    huge = replace(row, workload=replace(row.workload, d_model=65536, layers=96))
    runs = StepRuns([row], None)
    runs.rows = [huge]
    assert next_run(StepModel.find(), runs, np.log([1.0])) is None
    assert pd.notna(row.share)
