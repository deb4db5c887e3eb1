"""opcast inside other programs: latencies, budgets of jitted functions, the pytest plug-in."""

import json
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

import opcast
from opcast.common.errors import DeviceError
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
    run = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--opcast-update")
    run.assert_outcomes(failed=1, passed=1)
    (entry,) = json.loads((pytester.path / "opcast-baseline.json").read_text()).values()
    assert entry["lo_us"] < entry["latency_us"] < entry["hi_us"]
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(failed=1, passed=1)
    # Sixteen times the work is beyond any interval.
    pytester.makepyfile(SUITE.replace("SIZE", "65536"))
    run = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    run.assert_outcomes(failed=2)
    run.stdout.fnmatch_lines(["*on h100-sxm, at most * by opcast-baseline.json*"])
