"""Operators that name no library: mixtures over those that were measured."""

import numpy as np
import pandas as pd
import pytest

from opcast.features.operators import op_features
from opcast.features.operators.columns import OpRows
from opcast.models.operators.family import FamilyModel
from opcast.models.operators.family_tables import FamilySettings
from opcast.models.operators.mixture import Choice, Menu, mixed
from opcast.models.operators.prediction import FamilyPrediction

FAMILY = "graph/linear"
FEW = {"rounds": 40, "max_depth": 4, "learning_rate": 0.2, "stop_rounds": 0, "compact": True}
NAMES = pd.DataFrame(
    {
        "op": "linear",
        "dtype": ["bf16"] * 10 + ["fp8"] * 2,
        "backend": ["vllm"] * 8 + ["sglang"] * 2 + ["vllm"] * 2,
        "kernel": ["cutlass"] * 6 + ["triton"] * 2 + ["torch"] * 2 + ["cutlass"] * 2,
        "device": ["a"] * 8 + ["b"] * 2 + ["a"] * 2,
    }
)


def members(latency, lo, hi):
    """Predictions of members, in seconds."""
    n = len(latency)
    return FamilyPrediction(
        np.array(latency), np.array(lo), np.array(hi), np.full(n, 1e-6),
        np.full(n, "memory", object), np.full(n, "known", object), np.ones(n, bool),
    )  # fmt: skip


def test_one_member_is_itself():
    found = mixed(members([1e-4], [8e-5], [1.5e-4]), np.array([0]), np.ones(1), 1)
    assert (found.latency[0], found.lo[0], found.hi[0]) == (1e-4, 8e-5, 1.5e-4)


def test_rows_of_one_member_and_of_several_do_not_mind_each_other():
    """The second row has two members, which alone give the same."""
    times = [1e-4, 2e-4, 3e-4, 5e-4]
    four = members(times, [t * 0.8 for t in times], [t * 1.5 for t in times])
    found = mixed(four, np.array([0, 1, 1, 2]), np.array([1.0, 0.5, 0.5, 1.0]), 3)
    pair = mixed(four.take(np.array([1, 2])), np.zeros(2, int), np.full(2, 0.5), 1)
    for name in ("latency", "lo", "hi"):
        own = getattr(four, name)
        assert getattr(found, name).tolist() == [own[0], getattr(pair, name)[0], own[3]]


def test_a_mixture_reaches_from_its_fastest_to_its_slowest_member():
    # Narrow members: 10 % at 100 µs, 80 % at 120, 10 % at 150. A 90 % interval holds all three, its
    # median is the middle one.
    times = [1e-4, 1.2e-4, 1.5e-4]
    narrow = members(times, [t * 0.999 for t in times], [t * 1.001 for t in times])
    found = mixed(narrow, np.zeros(3, int), np.array([0.1, 0.8, 0.1]), 1)
    assert found.latency[0] == pytest.approx(1.2e-4, rel=2e-3)
    assert found.lo[0] == pytest.approx(1e-4, rel=2e-3)
    assert found.hi[0] == pytest.approx(1.5e-4, rel=2e-3)
    # One in fifty is outside of it.
    found = mixed(narrow, np.zeros(3, int), np.array([0.02, 0.96, 0.02]), 1)
    assert found.hi[0] < 1.21e-4


def test_frameworks_weigh_alike_and_kernels_by_their_rows():
    menu = Menu.of(NAMES)
    asked = {"op": "linear", "dtype": "bf16"}
    weights = {c.names: share for c, share in menu.of_row(asked, "")}
    assert weights == pytest.approx(
        {
            ("sglang", "torch"): 1 / 2,
            ("vllm", "cutlass"): 1 / 2 * 6 / 8,
            ("vllm", "triton"): 1 / 2 * 2 / 8,
        }
    )
    # What was measured on the device itself comes first; a framework that is named alone counts.
    assert [c.names[0] for c, _ in menu.of_row(asked, "b")] == ["sglang"]
    assert [c.names[1] for c, _ in menu.of_row({**asked, "backend": "vllm"}, "b")] == [
        "cutlass",
        "triton",
    ]
    assert menu.of_row({**asked, "dtype": "int8"}, "") == []
    assert Menu.from_list(menu.to_list()).choices == menu.choices
    assert menu.choices[0] == Choice(("linear", "bf16", ""), ("sglang", "torch"), ("b",), 1.0)


def test_tables_that_name_nothing_have_no_menu():
    assert Menu.of(NAMES.drop(columns=["backend", "kernel"])).choices == ()


@pytest.fixture(scope="module")
def chips(round_gpu):
    return {name: round_gpu(name, core_count=n) for name, n in (("a", 100), ("b", 60), ("c", 80))}


@pytest.fixture(scope="module")
def fitted(op_rows, chips):
    """A family of two frameworks, of which one takes twice as long, on two chips."""
    rows = []
    for place, device in enumerate("ab"):
        own = op_rows(FAMILY, 500, place).assign(device=device, dtype="bf16", op="linear")
        own["backend"] = np.where(np.arange(500) % 2, "vllm", "trtllm")
        own["kernel"] = np.where(own["backend"] == "vllm", "torch", "cutlass")
        base = op_features(own, FAMILY, chips).base_s
        rows.append(own.assign(latency_us=base * 1e6 * np.where(own["backend"] == "vllm", 2, 1)))
    table = pd.concat(rows, ignore_index=True).assign(split="train", key=FAMILY)
    return FamilyModel(FAMILY, FamilySettings("xgboost", FEW, FEW)).fit(table, chips)


def row(device, **names):
    sizes = {"op": "linear", "dtype": "bf16", "b": 1, "m": 256, "n": 4096, "k": 4096}
    return pd.DataFrame([{**sizes, "device": device, **names}])


@pytest.mark.parametrize("device", ["a", "c"])
def test_an_open_library_is_a_mixture_that_naming_collapses(fitted, chips, device):
    slow = fitted.predict(row(device, backend="vllm", kernel="torch"), chips)
    fast = fitted.predict(row(device, backend="trtllm", kernel="cutlass"), chips)
    both = fitted.predict(row(device), chips)
    assert fast.latency[0] <= both.latency[0] <= slow.latency[0]
    # The interval holds whichever it turns out to be.
    assert both.lo[0] < fast.latency[0] * 1.01
    assert both.hi[0] > slow.latency[0] * 0.99
    assert both.in_domain[0] == (slow.in_domain[0] and fast.in_domain[0])
    named = fitted.predict(row(device, backend="vllm"), chips)
    assert named.latency[0] == slow.latency[0]
    _, found = fitted.with_members(OpRows.of(row(device)), chips)
    assert [(m.backend, m.weight) for m in found] == [("trtllm", 0.5), ("vllm", 0.5)]
    assert found[0].latency_us == pytest.approx(fast.latency[0] * 1e6)
    own = OpRows.of(row(device, backend="vllm", kernel="torch"))
    assert fitted.with_members(own, chips)[1] == []


def test_why_a_mixture_is_outside_is_not_that_it_names_nothing(fitted, chips):
    far = row("a").assign(m=2**30)
    assert not fitted.predict(far, chips).in_domain[0]
    reasons = fitted.why_outside(far, chips)
    assert reasons
    assert "not named" not in " ".join(reasons)


def test_tables_may_mix_named_and_open_rows(fitted, chips):
    named = row("a", backend="vllm", kernel="torch")
    table = pd.concat([row("a", backend="", kernel=""), named, row("c")], ignore_index=True)
    found = fitted.predict(table, chips)
    single = [fitted.predict(table.iloc[[i]], chips).latency[0] for i in range(3)]
    assert found.latency == pytest.approx(single)
    assert found.scope.tolist() == ["known", "known", "unseen"]


def test_formats_without_a_known_library_stay_outside(fitted, chips):
    found = fitted.predict(row("a").assign(dtype="int4_wo"), chips)
    assert not found.in_domain[0]
    assert "not named" in " ".join(fitted.why_outside(row("a").assign(dtype="int4_wo"), chips))


def test_saved_families_keep_their_menu(fitted, tmp_path):
    manifest = fitted.save(tmp_path)
    again = FamilyModel.load(FAMILY, tmp_path, manifest)
    assert again.menu.choices == fitted.menu.choices


def test_gated_experts_are_not_mixed_with_kernels_that_have_no_gate():
    formats = ("moe", "bf16", "")
    names = (("trtllm", "moe_torch_flow_nongated"), ("trtllm", "moe_torch_flow_cutlass"))
    menu = Menu([Choice(formats, own, ("a",), 0.5) for own in names])
    # Mixtral, and Nemotron 3, whose experts have no gate: either kernel runs these.
    sizes = {"tokens": 8, "hidden": 4096, "inter": [14336, 1856], "topk": [2, 6]}
    rows = pd.DataFrame({**sizes, "experts": [8, 128], "op": "moe", "dtype": "bf16"})
    place = np.full(2, "a", object)
    table, origin, weight = menu.expanded(rows, place, np.full(2, "NVIDIA", object))
    assert [list(table.texts("kernel")[origin == at]) for at in (0, 1)] == [
        [names[1][1]],
        [own[1] for own in names],
    ]
    assert weight.tolist() == [1.0, 0.5, 0.5]
    # Named, it is what was asked for.
    named = menu.of_row({"op": "moe", "dtype": "bf16", "kernel": names[0][1]}, "a")
    assert [choice.names for choice, _ in named] == [names[0]]
