import json
import threading
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import opcast
from opcast.common.errors import DeviceError, LoweringError, ModelError, StrictError
from opcast.features.ir.reader import read_program
from opcast.features.kernels.extract import kernel_from_ir
from opcast.features.lowering.lower import lower

REQUIRED = {
    "name", "kind", "latency_us", "lo_us", "hi_us", "bound", "source", "in_domain", "flops",
    "bytes", "source_line",
}  # fmt: skip


def test_prediction_is_complete_and_consistent(predictor, device, step_file):
    p = predictor.predict(step_file, device=device)
    assert p.device == device.name
    assert p.lowering == "xla"
    assert 0 < p.lo_us <= p.latency_us <= p.hi_us
    assert p.kernels
    for k in p.kernels:
        assert 0 < k.lo_us <= k.latency_us <= k.hi_us
        assert k.bound in ("compute", "memory", "latency", "communication")
        assert k.source in ("measured", "learned", "roofline", "compiler")
    assert sum(p.share_by_kind.values()) == pytest.approx(1.0)
    assert list(p.share_by_kind.values()) == sorted(p.share_by_kind.values(), reverse=True)
    assert 0 <= p.in_domain_share <= 1


def test_top_orders_by_time_over_all_runs(predictor, device, step_file):
    p = predictor.predict(step_file, device=device)
    totals = [k.latency_us * k.multiplicity for k in p.top(4)]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] == max(k.latency_us * k.multiplicity for k in p.kernels)


def test_dictionary_has_the_documented_keys_and_is_json(predictor, device, step_file):
    data = json.loads(json.dumps(predictor.predict(step_file, device=device).to_dict()))
    assert {
        "latency_us", "lo_us", "hi_us", "kernels", "peak_memory_bytes", "lowering", "model",
        "device",
    } <= set(data)  # fmt: skip
    assert all(set(k) >= REQUIRED for k in data["kernels"])


def test_kernels_name_the_line_of_the_users_program(predictor, device, step_file):
    lines = step_file.read_text().splitlines()
    p = predictor.predict(step_file, device=device)
    gemms = [k for k in p.kernels if k.kind == "gemm"]
    assert len(gemms) == 5  # two forward, two weight gradients, one input gradient
    for k in gemms:
        file, line = k.source_line.rsplit(":", 1)
        assert file == str(step_file)
        assert "dot_general" in lines[int(line) - 1] or "transpose" in lines[int(line) - 1]


def test_gemm_flops_are_two_m_n_k(predictor, device, step_file):
    p = predictor.predict(step_file, device=device)
    flops = sorted(k.flops for k in p.kernels if k.kind == "gemm")
    big, small = 2 * 128 * 256 * 512, 2 * 128 * 512 * 16
    # Forward and weight gradient of the first layer; forward, input and weight gradient of the
    # second. Fused element-wise work adds a little.
    assert [round(f / small) for f in flops if f < 2 * small] == [1, 1, 1]
    assert [f for f in flops if f > 2 * small] == pytest.approx([big, big], rel=0.02)


def test_jitted_function_text_and_file_agree(predictor, device, step, step_file):
    by_file = predictor.predict(step_file, device=device).latency_us
    assert predictor.predict(step.as_text(), device=device).latency_us == by_file
    assert predictor.predict(step, device=device).latency_us == by_file


def test_op_lowering_says_so_and_has_more_kernels(predictor, device, step_file):
    xla = predictor.predict(step_file, device=device)
    op = predictor.predict(step_file, device=device, lowering="op")
    assert op.lowering == "op"
    assert len(op.kernels) > len(xla.kernels)
    assert op.memory_source == "liveness"


def test_loops_multiply(predictor, device):
    def scan(x):
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ c), None), x, None, length=7)[0]

    p = predictor.predict(jax.jit(scan), jnp.ones((64, 64)), device=device)
    assert {k.multiplicity for k in p.kernels if k.kind == "gemm"} == {7.0}


def test_peak_memory_covers_arguments_and_results(predictor, device):
    def double(x):
        return x * 2

    p = predictor.predict(jax.jit(double), jax.ShapeDtypeStruct((1 << 20,), jnp.float32),
                          device=device)  # fmt: skip
    assert p.peak_memory_bytes >= 2 * 4 * (1 << 20)
    assert p.peak_memory_bytes < 3 * 4 * (1 << 20)
    assert p.memory_source == "compiler"


def test_unknown_names_list_the_choices(predictor, step_file):
    with pytest.raises(DeviceError, match="known: cpu-amd"):
        predictor.predict(step_file, device="abacus")
    with pytest.raises(ModelError, match="one of: blocks, cpu-xgboost"):
        opcast.load("no-such-model")
    with pytest.raises(LoweringError, match="xla"):
        predictor.predict(step_file, device=next(iter(predictor.model.devices)), lowering="magic")


def test_strict_refuses_what_was_not_learned(predictor, device, step_file):
    lowered = lower(read_program(step_file))
    predictor.predict_lowered(lowered, device, strict=True)
    call = kernel_from_ir(
        "HloModule k\n\nENTRY e {\n  p0 = f32[8]{0} parameter(0)\n  ROOT v0 = f32[8]{0} "
        'custom-call(p0), custom_call_target="PadToStatic"\n}\n'
    )
    lowered.kernels.append(call)
    if predictor.predict_lowered(lowered, device).kernels[-1].source == "roofline":
        with pytest.raises(StrictError, match="custom_call"):
            predictor.predict_lowered(lowered, device, strict=True)


def test_single_queries_equal_the_batch_and_are_remembered(predictor, device, step_file):
    kernels = lower(read_program(step_file)).kernels
    batch = predictor.latencies_us(kernels, device)
    single = [predictor.latency_us(k, device) for k in kernels]
    assert np.allclose(single, batch, rtol=1e-6)
    assert single == [predictor.latency_us(k, device) for k in kernels]


def test_threads_may_share_a_predictor(predictor, device, step_file):
    kernels = lower(read_program(step_file)).kernels
    expected = predictor.latencies_us(kernels, device)
    found: list[np.ndarray] = []

    def work():
        found.append(np.array([predictor.latency_us(k, device) for k in kernels]))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 4
    assert all(np.allclose(f, expected, rtol=1e-6) for f in found)


def test_a_device_that_the_model_never_saw_is_noted(predictor, device, step):
    assert predictor.predict(step, device=device).notes == ()
    other = replace(device, name="another-cpu")
    (note,) = predictor.predict(step, device=other).notes
    assert device.name in note and "another-cpu" in note


def test_threads_get_the_answers_of_one(predictor, device):
    from concurrent.futures import ThreadPoolExecutor

    fresh = opcast.Predictor(predictor.model)
    text = (
        "HloModule m\nENTRY e {{\n  p = f32[{n}] parameter(0)\n  ROOT r = f32[{n}] add(p, p)\n}}\n"
    )
    kernels = [kernel_from_ir(text.format(n=2**i)) for i in range(8, 20)]
    alone = predictor.latencies_us(kernels, device)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda k: fresh.latency_us(k, device), kernels * 20))
    assert np.allclose(found, np.tile(alone, 20))


def test_devices_of_one_name_are_told_apart(predictor, device):
    kernel = kernel_from_ir(
        "HloModule m\nENTRY e {\n  p = f32[4194304] parameter(0)\n"
        "  ROOT r = f32[4194304] add(p, p)\n}\n"
    )
    levels = tuple(replace(x, bandwidth=x.bandwidth / 4) for x in device.levels)
    slow = replace(device, levels=levels)
    assert predictor.latency_us(kernel, slow) > 1.5 * predictor.latency_us(kernel, device)


def test_a_product_that_a_compiler_writes_as_a_convolution_is_named_a_product(predictor, device):
    """A user of a TPU finds no convolution in a program that has none."""

    def product(x, w):
        return x @ w

    lowered = lower(read_program(product, jnp.ones((64, 64)), jnp.ones((64, 64))), "op")
    (dot,) = [k for k in lowered.kernels if k.kind == "gemm"]
    written = replace(lowered, kernels=(replace(dot, kind="conv"),))
    (found,) = predictor.predict_lowered(written, device).kernels
    assert (found.kind, found.source_op) == ("gemm", "stablehlo.dot_general")
    own = dot.sources[0]._replace(op="stablehlo.convolution")
    written = replace(lowered, kernels=(replace(dot, kind="conv", sources=(own,)),))
    assert predictor.predict_lowered(written, device).kernels[0].kind == "conv"


def test_a_loop_that_data_end_has_no_sure_upper_end(predictor, device):
    def loop(n, x):
        state = jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 2), (0, x))
        return state[1] + 1

    inputs = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((64, 64), jnp.float32)
    text = jax.jit(loop).lower(*inputs).as_text()
    lowered = lower(text, "op")
    found = predictor.predict_lowered(lowered, device)
    # What is in the loop may run 999 times more.
    inside = [k for k, own in zip(found.kernels, lowered.kernels, strict=True) if own.endless]
    assert 0 < len(inside) < len(found.kernels) and not any(k.in_domain for k in inside)
    again = sum(k.hi_us * k.multiplicity for k in inside) * 999
    assert again < found.hi_us < 1.1 * again and any("unknown length" in n for n in found.notes)
    known = predictor.predict_lowered(lower(text, "op", trip_counts=1), device)
    assert known.hi_us == pytest.approx(found.hi_us - again) and known.lo_us == found.lo_us
