"""Explanations of operators with the shipped model."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from opcast.cli import app
from opcast.common.errors import OpcastError
from opcast.datagen.published.importer import import_published
from opcast.features.devices.catalogue import find_device
from opcast.features.operators import FAMILIES, op_features
from opcast.features.operators.features import feature_names
from opcast.features.operators.query import parse_op
from opcast.models.contributions import OPERATOR_GROUPS, SIZES, shapley
from opcast.models.operators import OpModel
from opcast.models.operators.explain import explain_op
from opcast.predict.locate import find_model

LINEAR = "linear m=512 n=4096 k=4096 dtype=bf16 backend=trtllm kernel=torch_flow"
KEY = "graph/linear"


@pytest.fixture(scope="module")
def bundle():
    return OpModel.load(find_model("gpu-operators"), only=[KEY])


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)


def test_only_the_wanted_family_is_read(bundle):
    assert list(bundle.families) == [KEY]


@pytest.mark.parametrize("device", ["a100-sxm-80gb", "l4", "a100-pcie-80gb"])
def test_parts_add_up_to_the_prediction(bundle, device):
    spec = find_device(device)
    found = explain_op(bundle.families[KEY], parse_op(LINEAR), spec)
    total = found.baseline + sum(c.log_ratio for c in found.contributions)
    assert total == pytest.approx(found.log_ratio, abs=1e-5)
    assert found.latency_us == pytest.approx(found.base_us * found.factor)
    assert found.lo_us < found.latency_us < found.hi_us
    assert found.terms["compute"] < found.base_us
    assert found.scope == {"l4": "unseen"}.get(device, found.scope)
    names = {c.group for c in found.contributions}
    assert ("this device" in names) == (found.scope != "unseen")


@pytest.mark.parametrize(
    ("text", "added", "overlapping"),
    [
        (
            "context_attention batch=4 q_heads=32 kv_heads=8 head_dim=128 q_len=2048 kv_len=2048 "
            "dtype=bf16 backend=vllm kernel=vllm_flash_attn_fa3",
            {"beside it"}, lambda t: (t["compute"], t["memory"]),
        ),
        (
            "moe tokens=512 hidden=4096 inter=14336 topk=2 experts=8 tp=1 ep=1 dtype=bf16 "
            "backend=trtllm kernel=moe_torch_flow_cutlass",
            {"streams", "routing"}, lambda t: (t["compute"] + t["blocks"], t["memory"]),
        ),
    ],
)  # fmt: skip
def test_terms_make_the_analytical_estimate(text, added, overlapping):
    op = parse_op(text)
    model = OpModel.load(find_model("gpu-operators"), only=[op["key"]])
    found = explain_op(model.families[op["key"]], op, find_device("b200"))
    both = sum(t**3 for t in overlapping(found.terms)) ** (1 / 3)
    apart = sum(found.terms[name] for name in (*added, "fixed"))
    assert found.base_us == pytest.approx(both + apart, rel=1e-5)


def test_a_calibrated_device_shows_what_the_samples_add(bundle):
    family, spec = bundle.families[KEY], find_device("l4")
    row = parse_op(LINEAR)
    import pandas as pd

    rows = pd.DataFrame([{**row, "m": 2**i, "device": "l4"} for i in range(6, 14)])
    plain = family.predict(rows, {"l4": spec}).latency * 1e6
    family.calibrate("l4", rows.assign(latency_us=1.5 * plain), {"l4": spec})
    try:
        found = explain_op(family, row, spec)
    finally:
        family.corrections.clear()
    parts = {c.group: c.log_ratio for c in found.contributions}
    assert parts["calibration"] == pytest.approx(np.log(1.5), abs=0.15)
    assert sum(parts.values()) + found.baseline == pytest.approx(found.log_ratio, abs=1e-5)


class Product:
    """A log-ratio with an interaction: the waves times the sizes."""

    def log_ratio(self, table):
        at = [table.names.index(n) for n in ("log_waves", "log_m")]
        return table.X[:, at[0]].astype(float) * table.X[:, at[1]]


def test_shapley_values_by_hand(bundle):
    """x·y from (1, 2) to (3, 5): x adds 4 or 10, y adds 3 or 9, whichever comes first."""
    family, spec = bundle.families[KEY], find_device("l4")
    import pandas as pd

    frame = pd.DataFrame([{**parse_op(LINEAR), "device": "l4"}])
    features = family.features(frame, {"l4": spec})
    _, table = family.fitted.choose(features, np.array(["l4"], object))
    other = table.take(np.array([0]))
    at = [table.names.index(n) for n in ("log_waves", "log_m")]
    table.X[0, at], other.X[0, at] = (3.0, 5.0), (1.0, 2.0)
    baseline, parts = shapley(Product(), table, other, OPERATOR_GROUPS)
    assert baseline == pytest.approx(2.0)
    assert parts == pytest.approx({"tiles and waves": 7.0, SIZES: 6.0})


def test_every_feature_has_a_group():
    for key in FAMILIES:
        for name in feature_names(key):
            group = OPERATOR_GROUPS.of(name)
            assert (group == "limits") == (
                name.endswith("_base") or name in ("log_intensity", "log_cycles")
            )


def test_neighbours_come_from_a_dataset(bundle, op_rows, tmp_path):
    rows = op_rows(KEY, 60, 0).assign(
        device="NVIDIA A100-SXM4-80GB", source="aiconfigurator", dtype="bf16", backend="trtllm",
        kernel="torch_flow", b=1, op="linear", split="train",
    )  # fmt: skip
    spec = {"NVIDIA A100-SXM4-80GB": find_device("NVIDIA A100-SXM4-80GB")}
    rows["latency_us"] = op_features(rows, KEY, spec).base_s * 1.2e6
    rows["id"] = [f"T{i}" for i in range(60)]
    (tmp_path / "t").mkdir()
    rows.drop(columns=["key", "method"]).to_parquet(tmp_path / "t" / "ops_tc.parquet")
    import_published(tmp_path / "t", tmp_path / "d")
    one = rows.iloc[7]
    text = f"{KEY} m={one.m} n={one.n} k={one.k} dtype=bf16 backend=trtllm kernel=torch_flow"
    result = run("explain", "--op", text, "--device", "a100-sxm-80gb", "--data", tmp_path / "d",
                 "--json")  # fmt: skip
    found = json.loads(result.output)
    assert len(found["neighbours"]) == 3
    assert found["neighbours"][0]["distance"] == 0
    assert found["neighbours"][0]["measured_us"] == pytest.approx(one.latency_us, rel=1e-4)
    gaps = [n["distance"] for n in found["neighbours"]]
    assert gaps == sorted(gaps)


def test_the_command_prints_what_it_is_made_of():
    result = run("explain", "--op", LINEAR.replace(" kernel=torch_flow", ""), "--device", "l4")
    assert result.exit_code == 0, result.output
    for word in ("analytical estimate", "compute", "tiles and waves", "together", "no library"):
        assert word in result.output


def test_predict_takes_an_operator():
    result = run("predict", "--op", LINEAR, "--device", "a100-sxm-80gb")
    assert "90 % interval" in result.output and "device known" in result.output
    found = json.loads(run("predict", "--op", LINEAR, "--device", "a100-sxm-80gb", "--json").output)
    assert found["lo_us"] < found["latency_us"] < found["hi_us"] and found["in_domain"]
    assert run("predict", "--device", "l4").exit_code == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--device", "b200,mi355x"), "export table --op '…' --device b200 --device mi355x --out"),
        (("--device", "l4", "--model", "roofline"), "roofline is printed beside its prediction"),
        (("--device", "l4", "--model", "scalesim"), "'scalesim' predicts programs"),
        (("--device", "RANGES"), "export table --op '…' --device RANGES --out"),
    ],
)
def test_what_an_operator_does_not_take_says_what_to_do(tmp_path, options, said):
    designs = tmp_path / "designs.yaml"
    designs.write_text("name: wide\nbase: h100-sxm\nmemory_gb: [80, 160]\n")
    words = [word.replace("RANGES", str(designs)) for word in options]
    result = CliRunner().invoke(app, ["predict", "--op", LINEAR, *words])
    assert isinstance(result.exception, OpcastError)
    assert said.replace("RANGES", str(designs)) in str(result.exception)


def test_an_operator_or_a_program():
    assert run("explain", "x.mlir", "--op", LINEAR).exit_code == 2


def test_what_the_cache_serves_is_told():
    pointwise = "elementwise rows={} cols=1024 n_in=2 op=add dtype=fp16"
    model = OpModel.load(find_model("gpu-operators"), only=["kernel/elementwise"])
    spec = find_device("rtx-4090")
    for rows, held in ((4096, True), (1 << 20, False)):
        found = explain_op(
            model.families["kernel/elementwise"], parse_op(pointwise.format(rows)), spec
        )
        assert any("the cache of" in note for note in found.notes) == held
