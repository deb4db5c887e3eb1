"""opcast inside other programs: latencies, budgets of jitted functions, the pytest plug-in."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import opcast
from opcast.common.errors import DeviceError, ModelError, OpcastError
from opcast.features.devices.catalogue import find_device
from opcast.features.operators import op_features
from opcast.models.core.registry import PRETRAINED
from opcast.models.operators import OpModel
from opcast.models.operators.model import default_settings
from opcast.predict import library, pytest_plugin
from opcast.predict.library import BudgetExceeded

pytest_plugins = ["pytester"]

X = jax.ShapeDtypeStruct((256, 512), jnp.float32)
W = jax.ShapeDtypeStruct((512, 1024), jnp.float32)


def layer(x, w):
    return jax.nn.softmax(jax.nn.gelu(x @ w))


def test_latency_of_operators_and_kernels_is_the_predictors():
    text = "linear m=4096 n=4096 k=4096 dtype=bf16 backend=vllm"
    one = opcast.latency(text, "h100-sxm")
    # 2 · 4096³ FLOP at the H100's 989 TFLOP/s are 139 µs.
    assert 139e-6 < one.seconds < 250e-6
    assert one.lo_us < one.latency_us < one.hi_us
    assert one < 1e-3
    lowered = opcast.lower(jax.jit(layer).lower(X, W), "fused")
    found = opcast.load("gpu-xla").predict(
        jax.jit(layer).lower(X, W), device="h100-sxm", lowering="fused"
    )
    kernel = next(k for k in lowered.kernels if k.kind == "gemm")
    expected = next(k for k in found.kernels if k.kind == "gemm")
    one = opcast.latency(kernel, "h100-sxm")
    assert one.latency_us == pytest.approx(expected.latency_us, rel=0.02)
    with pytest.raises(DeviceError):
        opcast.latency(text, "no-such-gpu")


def test_latencies_may_be_asked_from_threads():
    texts = [f"linear m={m} n=4096 k=4096 dtype=bf16 backend=vllm" for m in (1, 16, 256, 4096)] * 8
    alone = [opcast.latency(text, "a100-sxm-80gb") for text in texts[:4]]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda text: opcast.latency(text, "a100-sxm-80gb"), texts))
    assert found == alone * 8


def test_a_loop_asks_the_model_once_for_each_operator(monkeypatch):
    text = "linear m=77 n=4096 k=4096 dtype=bf16 backend=vllm"
    first = opcast.latency(text, "h100-sxm")

    def asked_again(*_):
        raise AssertionError("the model is asked for what it answered")

    monkeypatch.setattr("opcast.predict.operator.predict.predict_op", asked_again)
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda _: opcast.latency(text, "h100-sxm"), range(60)))
    assert found == [first] * 60
    # Another device, operator or model is another question.
    for other in ((text, "a100-sxm-80gb"), (text.replace("77", "78"), "h100-sxm")):
        with pytest.raises(AssertionError, match="asked for"):
            opcast.latency(*other)


def test_the_memory_of_answers_is_bounded(monkeypatch):
    monkeypatch.setattr(library, "ANSWERS", 3)
    texts = [f"linear m={m} n=4096 k=1024 dtype=bf16 backend=vllm" for m in (3, 5, 7, 9, 11)]
    before = [opcast.latency(text, "h100-sxm") for text in texts]
    assert len(library._answers) <= 3
    assert [opcast.latency(text, "h100-sxm") for text in texts] == before


@pytest.mark.parametrize("asked", ["operator", "kernel"])
def test_a_replaced_model_does_not_answer_from_the_old_one(asked, tmp_path, op_rows):
    """Two models of one name after another, of which the second takes twice as long."""
    place = tmp_path / "m"
    if asked == "operator":
        what = "linear m=512 n=4096 k=4096 dtype=bf16"
        names = [tmp_path / name for name in ("first", "second")]
        for factor, name in zip((1.0, 2.0), names, strict=True):
            _operators(op_rows, factor).save(name)
    else:
        lowered = opcast.lower(jax.jit(layer).lower(X, W), "fused")
        what = next(k for k in lowered.kernels if k.kind == "gemm")
        names = [PRETRAINED / "gpu-xla", PRETRAINED / "cpu-xgboost"]
    found = []
    for name in names:
        shutil.copytree(name, place)
        found.append(opcast.latency(what, "h100-sxm", model=place))
        assert opcast.latency(what, "h100-sxm", model=place) == found[-1]
        assert found[-1] == opcast.latency(what, "h100-sxm", model=name)
        shutil.rmtree(place)
    first, second = (one.latency_us for one in found)
    if asked == "operator":
        assert second == pytest.approx(2 * first, rel=0.1)
    else:
        assert second != pytest.approx(first, rel=0.01)
    # And a folder that is gone answers nothing.
    with pytest.raises(ModelError, match="no model"):
        opcast.latency(what, "h100-sxm", model=place)


def _operators(op_rows, factor):
    rows = op_rows("graph/linear", 400, 0).assign(device="h100-sxm", dtype="bf16", split="train")
    rows = rows.assign(version="", backend="vllm", source="aiconfigurator")
    devices = {"h100-sxm": find_device("h100-sxm")}
    base = op_features(rows, "graph/linear", devices).base_s
    rows = rows.assign(latency_us=factor * base * 1e6)
    settings = default_settings("ridge", max_rows=400)
    return OpModel().fit(rows, devices, settings)


def test_an_edited_device_file_is_another_device(tmp_path):
    chip = tmp_path / "chip.yaml"
    text = "linear m=1 n=8192 k=8192 dtype=bf16 backend=vllm"
    found = []
    for rate in (3350, 1675):
        chip.write_text(f"name: chip\nbase: h100-sxm\nhbm_bandwidth_gbps: {rate}\n")
        found.append(opcast.latency(text, chip).latency_us)
        assert opcast.latency(text, str(chip)).latency_us == found[-1]
    # Reading the weights takes all the time.
    assert found[1] > 1.5 * found[0]


def test_predictions_compare_with_seconds():
    found = opcast.predict(layer, X, W, device="h100-sxm", lowering="fused")
    assert found < 1.0
    assert not found < found.latency_us / 1e6
    assert found <= found.latency_us / 1e6
    assert found > 0
    assert float(found) == found.latency_us / 1e6
    slower = opcast.predict(layer, X, W, device="t4", lowering="fused")
    assert slower > found
    with pytest.raises(TypeError, match="compared with seconds, not with str"):
        assert found < "5 ms"


def test_a_budget_predicts_what_is_first_called_inside(capsys):
    first, random, before = (
        jax.jit(lambda x, w: layer(x, w)),
        jax.jit(lambda x: x + jax.random.normal(jax.random.key(0), x.shape)),
        jax.jit(layer),
    )
    x, w = jnp.ones(X.shape), jnp.ones(W.shape)
    before(x, w)
    with opcast.budget(device="h100-sxm", lowering="fused") as seen:
        first(x, w)
        first(x, w)
        first(x[:128], w)
        random(x)
        before(x, w)
    names = list(seen.predictions)
    assert names == ["<lambda>", "<lambda>#2", "<lambda>#3"]
    expected = opcast.predict(layer, x, w, device="h100-sxm", lowering="fused")
    assert seen.predictions["<lambda>"].latency_us == pytest.approx(expected.latency_us)
    # Random numbers are lowered for the GPU: one fused pass, not the CPU's loop.
    assert len(seen.predictions["<lambda>#3"].kernels) < 10
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert "on h100-sxm" in lines[0]


def test_a_budget_that_saw_nothing_is_not_kept(capsys):
    double = jax.jit(lambda x: 2 * x)
    x = jnp.ones(512)
    double(x)
    with (
        pytest.raises(opcast.OpcastError, match=r"no jitted function .*clear_caches"),
        opcast.budget(1e-9, device="h100-sxm", lowering="fused"),
    ):
        double(x)
    with opcast.budget(device="h100-sxm", lowering="fused") as seen:
        double(x)
    assert "no jitted function was called for the first time" in capsys.readouterr().out
    assert repr(seen) == "Budget(device='h100-sxm', limit=None, predictions={})"


def test_a_function_beyond_its_budget_is_named():
    def slow(x, w):
        return layer(x, w)

    with (
        pytest.raises(BudgetExceeded, match=r"slow: predicted to take .* more than 1 µs; .* takes"),
        opcast.budget(1e-6, device="h100-sxm", lowering="fused", quiet=True),
    ):
        jax.jit(slow)(jnp.ones(X.shape), jnp.ones(W.shape))
    with pytest.raises(DeviceError), opcast.budget(device="no-such-gpu"):
        raise AssertionError("the block must not run")
    with (
        pytest.raises(OpcastError, match="the limit is -1"),
        opcast.budget(-1, device="h100-sxm", quiet=True),
    ):
        raise AssertionError("the block must not run")


def test_a_budget_predicts_modules_that_are_called_inside(capsys):
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
    x = torch.zeros(8, 64)
    call = torch.nn.Module.__call__
    with opcast.budget(device="h100-sxm") as seen:
        module(x)
        module(x)
        module(x[:4])
        torch.compile(module, backend="eager")(x)
    assert torch.nn.Module.__call__ is call
    # Neither layers of the module, nor shapes that it was called with before.
    assert list(seen.predictions) == ["Sequential", "Sequential#2", "Sequential#3"]
    frameworks = [own.framework for own in seen.predictions.values()]
    assert frameworks == ["torch-eager", "torch-eager", "torch-compiled"]
    own = opcast.predict(module, x, device="h100-sxm", framework="torch-eager")
    assert seen.predictions["Sequential"].latency_us == own.latency_us
    assert len(capsys.readouterr().out.splitlines()) == 3
    with (
        pytest.raises(BudgetExceeded, match=r"Sequential: predicted to take .* addmm takes"),
        opcast.budget(1e-6, device="h100-sxm", quiet=True),
    ):
        module(x)


def test_a_baseline_holds_kernels_that_launches_hide(request, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    options = {"device": "h100-sxm", "framework": "torch-eager"}
    x = torch.empty(64, 64, device="meta", dtype=torch.bfloat16)
    words = {"--opcast-baseline": str(tmp_path / "b.json"), "--opcast-update": True}
    config = SimpleNamespace(rootpath=tmp_path, getoption=words.get)
    asked = SimpleNamespace(config=config, node=SimpleNamespace(nodeid="t"))
    check = pytest_plugin.predicted.__wrapped__

    def module(width):
        with torch.device("meta"):
            return torch.nn.Linear(64, width, bias=False, dtype=torch.bfloat16)

    first = check(asked)(module(64), x, **options)
    words["--opcast-update"] = False
    check(asked)(module(64), x, **options)
    # The host's launch takes longer than either.
    more = opcast.predict(module(1 << 16), x, **options)
    assert more.latency_us == first.latency_us and more.device_us > 3 * first.device_us
    with pytest.raises(pytest.fail.Exception, match="µs of kernels on h100-sxm, at most"):
        check(asked)(module(1 << 16), x, **options)


SUITE = """
import jax, jax.numpy as jnp, opcast

X = jax.ShapeDtypeStruct((SIZE, 512), jnp.float32)

def test_fast_enough():
    assert opcast.predict(jnp.tanh, X, device="h100-sxm", lowering="fused") < 1e-9

def test_as_before(predicted):
    predicted(jnp.tanh, X, device="h100-sxm", lowering="fused")
"""


def test_the_plug_in_explains_and_compares_with_a_baseline(pytester):
    pytester.makeconftest('pytest_plugins = ["opcast.predict.pytest_plugin"]')
    pytester.makepyfile(SUITE.replace("SIZE", "4096"))
    run = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    run.assert_outcomes(failed=2)
    # No line of opcast stands for the user's.
    run.stdout.no_fnmatch_line("*wrapped_tanh*predict*")
    run.stdout.fnmatch_lines(["*assert * µs (* to *) < 1 ns*", "*run pytest --opcast-update*"])
    # Once in a process of its own; what compares is the same in this one, which has imported
    # before what pytester would take away again.
    opcast.predict(jnp.tanh, X, device="h100-sxm", lowering="fused")
    run = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--opcast-update")
    run.assert_outcomes(failed=1, passed=1)
    (entry,) = json.loads((pytester.path / "opcast-baseline.json").read_text()).values()
    assert entry["lo_us"] < entry["latency_us"] < entry["hi_us"]
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(failed=1, passed=1)
    # Sixteen times the work is beyond any interval.
    pytester.makepyfile(SUITE.replace("SIZE", "65536"))
    run = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    run.assert_outcomes(failed=2)
    run.stdout.fnmatch_lines(["*on h100-sxm, at most * by opcast-baseline.json*"])
