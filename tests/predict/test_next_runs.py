"""Which runs narrow the interval of an answer most."""

from __future__ import annotations

import itertools
import json
from math import exp, log, sqrt
from pathlib import Path

import numpy as np
import pytest

from opcast.common.interval import Interval
from opcast.models.adapt.active import Errors
from opcast.models.trust.calibrator import NORMAL_90
from opcast.predict.next_runs import Run, next_runs
from opcast.predict.next_samples import next_operators
from opcast.predict.operator.case import OperatorCase
from opcast.predict.operator.predict import predict_op

from ..support.commands import opcast

#: Deviation of 0.2 in the logarithm.
ASKED = Interval(1.0, exp(-0.2 * NORMAL_90), exp(0.2 * NORMAL_90))
RUNS = [Run("near", "do near", 0.1), Run("far", "", 0.1, 10)]
#: The question errs as the first run does, and half as the second.
ALIKE = Errors(np.array([[1.0, 0.5, 1.0], [0.5, 1.0, 0.5], [1.0, 0.5, 1.0]]), 0.01)


def test_an_interval_shrinks_to_the_noise_of_a_measurement_of_the_same() -> None:
    (run,) = next_runs(ASKED, RUNS, [ALIKE], 1, kind="operator").runs
    assert run.what == "near" and run.command == "do near" and run.cost is None
    # 0.2² is 0.03 that may be told and 0.01 of noise: 0.03 · 0.01 / 0.04 of it is left.
    left = sqrt(0.01 + 0.03 * 0.25)
    assert log(run.hi) == pytest.approx(left * NORMAL_90)
    assert log(run.lo) == pytest.approx(-left * NORMAL_90)
    # 10 s to start and 200 repeats of 0.1 s.
    assert run.hours == pytest.approx(30.0 / 3600.0)


def test_what_no_run_tells_stays() -> None:
    (run,) = next_runs(ASKED, RUNS, [ALIKE.given(0.01)], 1, kind="operator", stays=0.03).runs
    assert log(run.hi) == pytest.approx(sqrt(0.03 + 0.01 * 0.5) * NORMAL_90)


def test_with_a_price_a_dear_run_comes_last() -> None:
    errors = Errors(np.array([[1.0, 0.0, 0.5], [0.0, 1.0, 0.6], [0.5, 0.6, 1.0]]), 0.01)
    names = [
        [run.what for run in next_runs(ASKED, RUNS, [errors], 2, kind="operator", price=p).runs]
        for p in (None, 2.0)
    ]
    assert names == [["far", "near"], ["near", "far"]]


def test_no_run_is_named_where_measurements_scatter_as_much() -> None:
    sure = Interval(1.0, exp(-0.05), exp(0.05))
    found = next_runs(sure, RUNS, [ALIKE], 1, kind="operator")
    assert found.runs == () and "measurement noise" in found.notes[0]


def test_an_operator_itself_tells_most_of_it() -> None:
    case = OperatorCase("linear m=64 n=4096 k=4096 dtype=bf16", "l4")
    now, found = predict_op(case), next_operators(case, 3)
    assert found.runs[0].what.startswith(case.op + " backend=")
    assert "torch.randn(64, 4096, " in found.runs[0].command
    ends = [(now.lo_us * 1e-6, now.hi_us * 1e-6), *((run.lo, run.hi) for run in found.runs)]
    for (lo, hi), (inner_lo, inner_hi) in itertools.pairwise(ends):
        assert lo < inner_lo < now.seconds < inner_hi < hi


def test_operators_that_a_device_has_no_room_for_are_not_named() -> None:
    # Each matrix has 8 GiB, of an L4's 22; others of these sizes have up to four times as much.
    case = OperatorCase("linear m=65536 n=65536 k=65536 dtype=bf16", "l4")
    for run in next_operators(case, 5).runs:
        size = {k: int(v) for k, v in (pair.split("=") for pair in run.what.split()[1:4])}
        m, n, k = size["m"], size["n"], size["k"]
        assert 2 * (m * n + m * k + n * k) < 22.2 * 2**30
    huge = next_operators(OperatorCase("linear m=1099511627776 n=4096 k=4096 dtype=bf16", "l4"), 2)
    assert huge.runs == () and "no room" in huge.notes[0]
    # PyTorch's command is of a GPU.
    tpu = next_operators(OperatorCase("linear m=64 n=4096 k=4096 dtype=bf16", "tpu-v5e"), 1)
    assert [run.command for run in tpu.runs] == [""]


def test_kernels_of_a_program_by_command(tmp_path: Path) -> None:
    file = tmp_path / "step.mlir"
    opcast("zoo", "export", "mlp", "--out", file)
    asked = ("explain", file, "--device", "l4", "--lowering", "fused", "--next", 2)
    found = json.loads(opcast(*asked, "--price", 1, "--json").stdout)
    first, second = found["runs"]
    assert log(first["hi"] / first["lo"]) > log(second["hi"] / second["lo"])
    assert first["cost"] == pytest.approx(first["hours"])
    text = opcast(*asked).stdout
    assert "measure next" in text and first["what"].split(" ")[0] in text
    refused = opcast(*asked, "--kernel", "x")
    assert refused.returncode == 2 and "--kernel" in refused.stderr
    idle = opcast("explain", file, "--device", "l4", "--price", 1)
    assert idle.returncode == 2 and "--price" in idle.stderr


def test_loads_of_engines_by_command() -> None:
    asked = ("simulate-serving", "--workload", "llama-3-8b", "--device", "l40s", "--concurrency", 8)
    found = json.loads(opcast(*asked, "--next", 2, "--json").stdout)
    first, second = found["runs"]
    assert log(first["hi"] / first["lo"]) > log(second["hi"] / second["lo"])
    assert first["command"].startswith("vllm bench serve") and "vllm serve" in found["notes"][0]
