"""Random programs lowered by ``fused`` and by XLA's compilers for absent GPUs, priced alike."""

from __future__ import annotations

from dataclasses import replace
from math import log

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opcast.features.devices.catalogue import find_device
from opcast.features.lowering.lower import lower
from opcast.models.program.fused_error import (
    ALL,
    COUNTS,
    count_note,
    ends_of,
    fit,
    lowering_note,
    shipped,
    shipped_counts,
)
from opcast.predict.program.predictor import load

from ....support.cases import later
from ....support.drawn_programs import COMPOSITIONS, cases, text_of
from ....support.two_lowerings import compiled, on_stream, prices


def check(names, device_name):
    """Compare prices; gives the cases that are off twofold without a note and an interval."""
    device, predictor = on_stream(find_device(device_name)), load()
    texts = {name: text_of(name) for name in names}
    modules = compiled(texts, device)
    assert len(modules) == len(texts)
    errors, silent, held, unsaid = [], set(), [], []
    for name, text in texts.items():
        ours, theirs = prices(predictor, text, modules[name], device)
        ratio = theirs.us / ours.us
        errors.append(abs(ours.us / theirs.us - 1.0))
        low, high = ends_of(ours.shares, shipped(device.platform))
        inside = (
            -np.hypot(log(ours.us / ours.lo), low)
            <= log(ratio)
            <= np.hypot(log(ours.hi / ours.us), high)
        )
        held.append(inside)
        for what in set(COUNTS) - set(ours.uncertain):
            count, truth = getattr(ours, what), getattr(theirs, what)
            unsaid.append(abs(count - truth) > 0.1 * truth + 1e3)
        if not 0.5 <= ratio <= 2.0 and not (inside and ours.notes):
            silent.add(name)
    assert np.median(errors) <= 0.20
    assert np.mean(held) >= 0.85
    # Counts of which the answer says nothing agree within a tenth.
    assert np.mean(unsaid) <= 0.06
    return silent


@pytest.mark.parametrize("every", [120, later(10)])
def test_random_compositions_cost_what_the_compilers_kernels_cost(every):
    assert check([f"random/{n}" for n in range(0, COMPOSITIONS, every)], "h100-sxm") == set()


def _kernels(text, lowering, device):
    found = lower(text, lowering, device=device if lowering == "fused" else None).kernels
    return sorted((k.kind, round(k.bytes_in), k.bytes_out) for k in found if k.takes_time)


def _rows(x):
    """Values that a kernel of rows makes, of which products take in nothing."""
    return x - x.max(-1, keepdims=True)


OPERANDS = (
    jnp.exp,
    jnp.tanh,
    jnp.negative,
    lambda v: jnp.maximum(v, 0),
    lambda v: jnp.exp(v * 0.5),
    lambda v: v * v,
    lambda v: jnp.clip(v, -1, 1),
    lambda v: jnp.exp(v.astype(jnp.float32)).astype(v.dtype),
)


def _products(*arguments):
    """Products that compute their operands themselves, or not, or what follows them; a softmax."""
    pairs = zip(arguments[::2], arguments[1::2], strict=True)
    made = [jax.lax.dot(f(_rows(a)), b) for f, (a, b) in zip(OPERANDS, pairs, strict=False)]
    return [*made, jnp.tanh(jax.lax.dot(*arguments[-2:])), jax.nn.softmax(arguments[-2])]


def test_products_and_rows_are_the_compilers_kernels_where_bf16_has_no_arithmetic():
    device, bf16 = find_device("a100-sxm-40gb"), jnp.bfloat16
    shapes = [s for i in range(len(OPERANDS) + 1) for s in ((1024 + 128 * i, 1024), (1024, 1024))]
    traced = jax.jit(_products).trace(*[jax.ShapeDtypeStruct(s, bf16) for s in shapes])
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    modules = compiled({"products": text}, device)
    assert _kernels(text, "fused", device) == _kernels(modules["products"], "xla", device)


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["h100-sxm", "a100-sxm-80gb"])
def test_every_op_and_composition_costs_what_the_compilers_kernels_cost(device):
    assert check([case.name for case in cases()], device) == set()


@pytest.mark.exhaustive
def test_every_case_is_drawn_alike_again():
    assert all(text_of(case.name) == text_of(case.name) for case in cases()[::40])


def test_errors_of_lowering_add_to_those_of_kernels():
    # Without errors of the kernels the ends are the quantiles of the scores alone.
    scores = np.repeat([-0.5, 0.0, 1.0], [10, 80, 10])
    exact = np.full(100, 1e-3)
    low, high = fit(["gemm"] * 100, scores, exact, exact)["gemm"]
    assert (low, high) == (pytest.approx(-0.5, abs=0.01), pytest.approx(1.0, abs=0.01))
    # Without errors of the lowering nothing is added.
    wide = np.full(100, 0.4)
    low, high = fit(["gemm"] * 100, np.zeros(100), wide, wide)["gemm"]
    assert max(-low, high) < 0.01


def test_a_program_has_the_ends_of_what_takes_its_time():
    ends = {ALL: (-0.1, 0.1), "sort": (-0.4, 0.2)}
    low, high = ends_of({"sort": 0.5, "copy": 0.5}, ends)
    assert (low, high) == (pytest.approx(-np.hypot(0.2, 0.05)), pytest.approx(np.hypot(0.1, 0.05)))


def test_the_interval_of_fused_is_wider_than_that_of_its_kernels():
    predictor, device = load(), find_device("h100-sxm")
    lowered = lower(text_of("random/0"), "fused", device=device)
    ours = predictor.predict_lowered(lowered, device)
    alone = predictor.predict_lowered(replace(lowered, lowering="xla"), device)
    low, high = shipped("gpu")[ALL]
    assert low < 0.0 < high
    assert ours.latency_us == alone.latency_us
    assert ours.lo_us < alone.lo_us < alone.hi_us < ours.hi_us


def test_an_answer_says_which_counts_rest_on_how_kernels_are_formed():
    device = find_device("h100-sxm")

    def notes(text):
        return count_note(lower(text, "fused", device=device), device)

    one = """module @m { func.func public @main(%x: tensor<4096xf32>) -> tensor<4096xf32> {
      %0 = stablehlo.tanh %x : tensor<4096xf32>
      return %0 : tensor<4096xf32> } }"""
    assert notes(one) == ()
    (said,) = notes(text_of("cumlogsumexp"))
    assert "bytes" in said and "FLOPs" in said
    for low, high in shipped_counts("gpu").values():
        assert 0.3 < low <= 1.0 <= high < 3.0


def test_an_answer_op_by_op_says_what_is_left_where_kernels_are_joined():
    device = find_device("h100-sxm")

    def notes(function):
        text = jax.jit(function).lower(jax.ShapeDtypeStruct((1024, 1024), jnp.float32)).as_text()
        lowered = lower(text, "op", device=device)
        return lowering_note(lowered, np.full(len(lowered.kernels), 1e-5), device)

    assert notes(jnp.tanh) == ()
    # Three passes of 8 MiB each, of which a compiler keeps one.
    (note,) = notes(lambda x: jnp.tanh(jnp.exp(-x)))
    assert "may take 0.33 times as long: --lowering fused" in note
