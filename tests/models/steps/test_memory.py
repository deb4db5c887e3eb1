"""Intervals of peak memory hold what published steps say of theirs."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from opcast.features.devices.catalogue import find_device
from opcast.models.steps.memory import (
    KNOWN_ENDS,
    OTHER_ENDS,
    MemoryLaw,
    fit_laws,
    interval_of,
    law_of,
    weight_copies,
)
from opcast.predict.cluster.case_table import read_rows
from opcast.predict.cluster.step_table import fullest, step_row
from opcast.simulate.step.fitting import memory_of
from opcast.simulate.step.memory import StageMemory
from opcast.simulate.step.plan import Plan, resolved
from opcast.simulate.step.traffic import layer_held, table_held
from opcast.simulate.step.workload import Workload

STEPS = (
    Path(os.environ.get("OPCAST_PUBLISHED_DATA", "../shared/data"))
    / "published-steps"
    / "steps.csv.gz"
)


def test_a_framework_without_a_law_has_the_wider_interval():
    laws = {"a": MemoryLaw(), "": MemoryLaw()}
    known, other = (interval_of(laws, name, 100.0) for name in ("a", "b"))
    assert (known.lo, known.hi) == pytest.approx((100 * np.exp(-0.17), 100 * np.exp(0.36)))
    assert other.lo < known.lo and other.hi > known.hi
    assert interval_of(laws, "", 100.0) == other


def test_a_framework_without_a_law_has_that_of_its_engine():
    laws = {"nemo": MemoryLaw(0.8, 1.0, 2.0), "megatron-lm": MemoryLaw(1.0, 0.8, 4.0)}
    laws |= {"nanotron": MemoryLaw(2.0, 2.0, 2.0), "": MemoryLaw(1.5, 1.5, 1.5)}
    assert law_of(laws, "nemo") == laws["nemo"]
    assert law_of(laws, "megatron-bridge") == MemoryLaw(0.9, 0.9, 3.0)
    # Another engine, of which nothing was measured, and one of its own.
    assert law_of(laws, "torchtitan") == law_of(laws, "oneflow") == laws[""]


@pytest.mark.parametrize(
    ("device", "products", "quantized", "bytes_each"),
    [
        # Operands in one layout alone: the weights, and transposed, instead of 16 bits or beside.
        ("h100-sxm", "fp8", True, 2.0),
        ("h100-sxm", "fp8", False, 4.0),
        ("h100-sxm", "", None, 2.0),
        ("b200", "fp8", True, 1.0),
        ("b200", "fp8", False, 3.0),
        # Scales of blocks lie along one side.
        ("b200", "mxfp8", True, 2.0),
        ("b200", "nvfp4", False, 3.0),
        ("tpu-v6e", "int8", False, 2.0),
    ],
)
def test_quantised_weights_are_kept_as_products_take_them(device, products, quantized, bytes_each):
    workload = Workload(
        layers=2, d_model=64, heads=8, d_ff=256, vocab=100, seq=16, batch=4, products=products
    )
    plan = resolved(workload, Plan(dp=2, zero=1, quantized_weights=quantized), 2)
    copies = weight_copies(workload, find_device(device))
    (found,) = memory_of(workload, plan, copies)
    # Embedding and head stay in 16 bits.
    layers = 2 * layer_held(workload, plan).total
    tables = 2 * table_held(workload, plan).total
    assert found.parameters == pytest.approx(bytes_each * layers + 2.0 * tables)


def test_parameters_are_counted_exactly_whatever_the_law():
    # Two bytes for each of 8.03e9 parameters; what the law has less or more of them is reserved.
    plain = StageMemory(16.06e9, 16.06e9, 96.4e9, 17e9, 3e9, 5e7)
    for state in (0.99, 1.2):
        found = MemoryLaw(state, 0.9, 2.6).applied(plain)
        assert found.parameters == plain.parameters
        assert found.reserved == pytest.approx(2.6 * 2**30 + (state - 1.0) * 16.06e9)
        by_hand = state * (2 * 16.06e9 + 96.4e9) + 0.9 * 20e9 + 5e7 + 2.6 * 2**30
        assert found.total == pytest.approx(by_hand)
    assert MemoryLaw(0.3, 1.0, 0.0).applied(plain).reserved == 0.0


def test_ends_are_those_of_measured_steps():
    if not STEPS.is_file():
        pytest.skip("the pack published-steps is not here")
    table = pd.read_csv(STEPS)
    rows = [r for r in read_rows(table[table["memory_gib"].notna()], step_row)[0] if r is not None]
    names = [r.framework for r in rows]
    stages = [fullest(r) for r in rows]
    measured = np.array([r.memory_bytes for r in rows])
    laws = fit_laws(names, stages, measured)
    kinds = sorted(set(names))
    own, others = [], []
    for kind in kinds:
        at = [i for i, name in enumerate(names) if name == kind]
        rest = np.median([laws[k].to_list() for k in kinds if k != kind], axis=0)
        for law, errors in ((laws[kind], own), (MemoryLaw(*rest.tolist()), others)):
            errors.append(np.log([measured[i] / law.total(stages[i]) for i in at]))

    def inside(errors: list[np.ndarray], ends: tuple[float, float]) -> float:
        """Every framework counts the same."""
        return float(np.mean([((e >= ends[0]) & (e <= ends[1])).mean() for e in errors]))

    assert len(rows) > 1500
    assert 0.87 < inside(own, KNOWN_ENDS) < 0.95 and 0.87 < inside(others, OTHER_ENDS) < 0.95
