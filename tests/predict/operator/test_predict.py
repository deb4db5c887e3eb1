import io

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

import opcast
from opcast.common.errors import DeviceError, ModelError, ProgramError
from opcast.common.units import duration
from opcast.features.devices.catalogue import find_device
from opcast.features.operators import op_features
from opcast.features.operators.op import Op
from opcast.features.operators.query import parse_op
from opcast.models.operators import OpModel
from opcast.models.operators.explain import MIXTURE
from opcast.models.operators.mixture import Member
from opcast.models.operators.model import default_settings
from opcast.predict.devices import resolve_device
from opcast.predict.locate import OPERATOR_MODEL, find_model
from opcast.predict.operator.case import OperatorCase
from opcast.predict.operator.predict import OpEstimate, explain_operator, predict_op
from opcast.predict.operator.serving_operators import ServingLatency
from opcast.predict.operator.step_operators import OperatorLatency, load_step_model
from opcast.predict.render.operator import print_op, print_op_explanation

LINEAR = "linear m=64 n=4096 k=4096 dtype=bf16 backend=vllm"


@pytest.fixture(scope="module")
def predictor(op_rows, tmp_path_factory):
    """A model of products that take twice their analytical estimate."""
    device = find_device("h100-sxm")
    rows = op_rows("graph/linear", 400).assign(device=device.name)
    base = op_features(rows, "graph/linear", {device.name: device}).base_s
    folder = tmp_path_factory.mktemp("models") / "ops"
    model = OpModel().fit(
        rows.assign(latency_us=2e6 * base), {device.name: device}, default_settings("ridge")
    )
    model.save(folder)
    return opcast.load(folder)


def test_operators_and_kernels_may_be_asked_together(predictor):
    found = predictor.latencies_us([LINEAR, LINEAR.replace("m=64", "m=8192")], "h100-sxm")
    # Never below the bytes of the weights, or the arithmetic, at the peak.
    assert found[0] > 4096 * 4096 * 2 / 3.35e12 * 1e6
    assert found[1] > 2 * 8192 * 4096 * 4096 / 989.4e12 * 1e6
    assert predictor.latency_us(LINEAR, "h100-sxm") == pytest.approx(found[0])
    assert predictor.latency_us(LINEAR, "h100-sxm") == predictor.latency_us(LINEAR, "h100-sxm")
    assert np.all(np.isfinite(found))


def test_what_is_no_operator_or_not_known_is_named(predictor):
    with pytest.raises(ProgramError, match="no operator"):
        predictor.latency_us("conversion m=1 dtype=bf16", "h100-sxm")
    with pytest.raises(ModelError, match="knows no operators"):
        predictor.latency_us("bmm b=2 m=8 n=8 k=8 dtype=bf16", "h100-sxm")


@pytest.mark.parametrize("ask", [predict_op, explain_operator])
def test_the_machine_at_hand_is_no_device_of_operators(ask):
    # Before a model is looked for: the device is refused whatever the model.
    with pytest.raises(DeviceError, match="an operator needs a device"):
        ask(OperatorCase(LINEAR, "local", model="/nowhere"))


@pytest.fixture(scope="module")
def two_libraries(op_rows, tmp_path_factory):
    """A model of products by two frameworks, of which vLLM takes twice as long."""
    device = find_device("h100-sxm")
    rows = op_rows("graph/linear", 400).assign(device=device.name, dtype="bf16", op="linear")
    rows["backend"] = np.where(np.arange(400) % 2, "vllm", "trtllm")
    rows["kernel"] = "torch"
    base = op_features(rows, "graph/linear", {device.name: device}).base_s
    slow = np.where(rows["backend"] == "vllm", 2, 1)
    folder = tmp_path_factory.mktemp("models") / "ops"
    few = {"rounds": 30, "max_depth": 3, "stop_rounds": 0}
    model = OpModel().fit(
        rows.assign(latency_us=1e6 * slow * base),
        {device.name: device},
        default_settings("xgboost", **few),
    )
    model.save(folder)
    return folder


OPEN = "linear m=64 n=4096 k=4096 dtype=bf16"


def test_an_operator_without_a_library_names_those_it_is_predicted_over(two_libraries):
    both = predict_op(OperatorCase(OPEN, "h100-sxm", two_libraries))
    assert [own.backend for own in both.libraries] == ["trtllm", "vllm"]
    assert both.libraries[0].latency_us <= both.latency_us <= both.libraries[1].latency_us
    console = Console(width=200, file=io.StringIO())
    print_op(console, both)
    fast, slow = (duration(own.latency_us) for own in both.libraries)
    assert f"over 2 libraries: trtllm {fast}, vllm {slow};" in console.file.getvalue()
    named = OperatorCase(f"{OPEN} backend=vllm kernel=torch", "h100-sxm", two_libraries)
    assert predict_op(named).libraries == ()


def test_a_mixture_is_explained_by_its_typical_library(two_libraries):
    case = OperatorCase(OPEN, "h100-sxm", two_libraries)
    found = explain_operator(case)
    assert found.latency_us == pytest.approx(predict_op(case).latency_us)
    assert len(found.libraries) == 2
    assert "no library is named" in found.notes[0]
    parts = {c.group: c.log_ratio for c in found.contributions}
    assert MIXTURE in parts
    assert sum(parts.values()) + found.baseline == pytest.approx(found.log_ratio, abs=1e-5)
    console = Console(width=200, file=io.StringIO())
    print_op_explanation(console, found)
    assert "over 2 libraries" in console.file.getvalue()


@pytest.mark.parametrize("device", ["tpu-v5e", "tpu-v7x", "counted by nobody"])
@pytest.mark.parametrize(
    "operator",
    [
        "linear m=4096 n=4096 k=4096 dtype=bf16 backend=vllm",
        "context_attention batch=4 q_heads=32 kv_heads=8 q_len=4096 kv_len=4096 head_dim=128 "
        "dtype=bf16",
        "moe tokens=8192 hidden=4096 inter=1536 topk=8 experts=64 dtype=bf16",
    ],
)
def test_a_core_that_is_no_multiprocessor_is_not_one_slow_multiprocessor(
    operator, device, tmp_path
):
    if device == "counted by nobody":
        path = tmp_path / "tiny.yaml"
        path.write_text(
            "name: tiny-npu\nplatform: gpu\nhbm_bandwidth_gbps: 2000\nmemory_gb: 48\n"
            "peak_tflops: {f32: 40, bf16: 400}\n"
        )
        device = str(path)
    found = predict_op(OperatorCase(operator, device))
    # Counted as one multiprocessor, they took 16 to 90 times their roofline.
    assert 1 <= found.latency_us / found.roofline_us < 3.5


def test_tensorrt_llm_is_no_library_of_other_vendors():
    operator = "linear m=8192 n=50304 k=2048 dtype=bf16"
    there = {member.backend for member in predict_op(OperatorCase(operator, "h100-sxm")).libraries}
    here = {
        member.backend
        for member in predict_op(OperatorCase(f"graph/{operator}", "mi300x")).libraries
    }
    assert there - here == {"trtllm"} and here
    named = predict_op(OperatorCase(f"{operator} backend=trtllm", "mi300x"))
    assert not named.in_domain and any("NVIDIA" in why for why in named.outside)
    assert named.hi_us / named.lo_us > 2


def test_16_bit_products_of_amd_are_those_measured_on_amd() -> None:
    text = "linear m=8192 n=8192 k=8192 dtype=bf16"
    found = predict_op(OperatorCase(text, "mi300x"))
    assert found.family == "xla/linear"
    # 1,307 TFLOP/s by the data sheet; the fastest published product of the chip reaches 577.
    assert 450e12 < 2 * 8192**3 / (found.latency_us * 1e-6) < 1.1 * 577e12
    assert predict_op(OperatorCase(text, "h100-sxm")).family == "graph/linear"
    # A method that is named stays.
    assert predict_op(OperatorCase(f"graph/{text}", "mi300x")).family == "graph/linear"


def test_8_bit_products_of_amd_are_those_measured_on_amd() -> None:
    text = "linear m=8192 n=8192 k=8192 dtype=fp8"
    found = predict_op(OperatorCase(text, "mi355x"))
    assert (found.family, found.scope) == ("tuned/linear", "known")
    # 5,033 TFLOP/s by the data sheet; the fastest published product of the chip reaches 2,997.
    assert 2000e12 < 2 * 8192**3 / (found.latency_us * 1e-6) < 1.1 * 2997e12
    assert predict_op(OperatorCase(text, "h100-sxm")).family == "graph/linear"
    # Batched ones were measured under XLA alone.
    batched = "bmm b=16 m=512 n=512 k=512 dtype=fp8"
    assert predict_op(OperatorCase(batched, "mi355x")).family == "xla/bmm"
    # Nobody measured NVIDIA's format there.
    nvfp4 = predict_op(OperatorCase(text.replace("fp8", "nvfp4"), "mi355x"))
    assert (nvfp4.family, nvfp4.scope) == ("graph/linear", "unseen")


@pytest.mark.parametrize("library", ["backend=vllm kernel=vllm_default", "backend=trtllm", ""])
@pytest.mark.parametrize("device", ["h100-sxm", "b200"])
def test_operators_alone_are_predicted_as_they_are_together(library, device):
    """Few rows are walked through the trees here, and more of them in XGBoost."""
    texts = [f"linear m={m} n=4096 k=2048 dtype=bf16 {library}" for m in range(3, 6000, 400)]
    rows = pd.DataFrame([{**parse_op(text), "device": device} for text in texts])
    together = OpModel.load(find_model(OPERATOR_MODEL), ["graph/linear"]).predict(rows)
    alone = [opcast.latency(text, device).latency_us for text in texts]
    assert alone == pytest.approx(together.latency * 1e6, rel=1e-6)


def test_an_explanation_under_a_power_cap_is_that_of_the_prediction() -> None:
    text = "linear m=8192 n=8192 k=8192 dtype=bf16"
    free = explain_operator(OperatorCase(text, "h100-sxm"))
    found = explain_operator(OperatorCase(text, "h100-sxm", power_cap_w=350.0))
    said = predict_op(OperatorCase(text, "h100-sxm", power_cap_w=350.0))
    assert (found.latency_us, found.lo_us, found.hi_us) == pytest.approx(
        (said.latency_us, said.lo_us, said.hi_us)
    )
    parts = {c.group: c.log_ratio for c in found.contributions}
    assert found.latency_us / free.latency_us == pytest.approx(np.exp(parts["power cap"]))
    assert parts["power cap"] > 0.1
    assert found.baseline + sum(parts.values()) == pytest.approx(found.log_ratio, abs=1e-5)
    assert [m.latency_us for m in found.libraries] == pytest.approx(
        [m.latency_us for m in explain_members(said)]
    )
    with pytest.raises(DeviceError, match="power cap of 900 W"):
        explain_operator(OperatorCase(text, "h100-sxm", power_cap_w=900.0))


def explain_members(said: OpEstimate) -> list[Member]:
    return sorted(said.libraries, key=lambda member: member.latency_us)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_no_end_of_a_product_is_below_the_peak_of_the_data_sheet(dtype: str) -> None:
    # H100 SXM: 66.9 TFLOP/s in f32, 989.4 in bf16.
    peak = {"fp32": 66.9e12, "bf16": 989.4e12}[dtype]
    found = predict_op(OperatorCase(f"linear m=4096 n=4096 k=4096 dtype={dtype}", "h100-sxm"))
    least = 2 * 4096**3 / peak * 1e6
    assert least * (1 - 1e-3) < found.lo_us <= found.latency_us <= found.hi_us


OWN = """
platform: gpu
hbm_bandwidth_gbps: 4000
memory_gb: 96
core_count: 140
boost_mhz: 1800
lanes_per_core: 128
l2_mb: 60
peak_tflops: {bf16: 1100}
"""


@pytest.mark.parametrize("maker", ["", "vendor: nvidia\n", "architecture: Hopper\n"])
def test_a_described_gpu_is_priced_alike_as_an_operator_of_a_step_and_of_serving(maker, tmp_path):
    """An architect's file without a vendor, or with one in small letters: one rule everywhere."""
    path = tmp_path / "own.yaml"
    path.write_text(f"name: own\n{maker}{OWN}")
    spec = resolve_device(path, {})
    assert spec.vendor == "NVIDIA"
    text = "linear m=2048 n=4096 k=4096 dtype=bf16 backend=vllm"
    asked = predict_op(OperatorCase(f"{text} kernel=torch.nn.functional.linear", str(path)))
    model = load_step_model(OPERATOR_MODEL)
    call = Op("linear", (2048, 4096, 4096), "bf16", name="product")
    step = OperatorLatency(spec, model)([call])[0, 0]
    served = ServingLatency(spec, model, "vllm")
    op = Op("linear", (2048, 4096, 4096), "bf16")
    assert step * 1e6 == pytest.approx(asked.latency_us, rel=1e-3)
    assert served(op) * 1e6 == pytest.approx(asked.latency_us, rel=1e-3)


def test_a_gpu_of_no_known_generation_is_said_to_be_one(tmp_path):
    def said(extra):
        path = tmp_path / "own.yaml"
        path.write_text(f"name: own\n{extra}{OWN}")
        asked = "linear m=64 n=16384 k=8192 dtype=bf16"
        return " ".join(predict_op(OperatorCase(asked, str(path))).notes)

    assert "a GPU of NVIDIA of unknown generation" in said("")
    assert "`architecture:`" in said("vendor: AMD\n") and "cdna4" in said("vendor: AMD\n")
    assert "'hoper', which has no rules" in said("architecture: hoper\n")
    assert said("architecture: hoper\n").endswith("(hopper)")
    assert "no GPU of MyCo was measured" in said("vendor: MyCo\n")
    assert said("architecture: hopper\n") == ""
    assert predict_op(OperatorCase("linear m=64 n=4096 k=4096 dtype=bf16", "h100-sxm")).notes == ()


def test_an_operator_that_the_cache_keeps_says_what_main_memory_would_take():
    """An addition of 2048 × 4096 in fp16 reads and writes 2 · 16 MiB: 10 µs at 3.35 TB/s."""
    asked = "kernel/elementwise op=add rows=2048 cols=4096 dtype=fp16"
    found = predict_op(OperatorCase(asked, "h100-sxm"))
    assert found.latency_us < 32 * 2**20 / 3.35e12 * 1e6
    assert "32.0 MiB" in found.notes[0] and "take 10 µs" in found.notes[0].replace("\n", " ")
    assert any("10 µs" in note for note in explain_operator(OperatorCase(asked, "h100-sxm")).notes)
    # Beyond the cache there is nothing to say.
    assert predict_op(OperatorCase(asked.replace("2048", "65536"), "h100-sxm")).notes == ()
