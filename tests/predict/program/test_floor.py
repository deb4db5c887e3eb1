"""No answer and no end of an interval lies below what the machine needs at least."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import opcast
from opcast.datagen.programs.single_op import OPCODES, sample_op
from opcast.features.devices.catalogue import find_device
from opcast.features.ir.precision import arithmetic
from opcast.features.ir.reader import read_program
from opcast.features.lowering.lower import lower
from opcast.features.table.columns import COLUMNS, INDEX
from opcast.models.program.program_model import ProgramModel, ProgramPrediction
from opcast.models.program.schedule_cost import least_wall, saved

from ...support.cases import every

ALL_OPS = Path(__file__).parents[2] / "features" / "data" / "all_ops.mlir"
DEVICES = ("h100-sxm", "mi300x", "tpu-v5e", "cpu")
#: Ops that read or write a part of an argument alone.
PARTIAL = ("gather", "slice", "dynamic", "scatter", "while", "pad")


def device_of(predictor, name):
    if name != "cpu":
        return find_device(name)
    return next(d for d in predictor.devices.values() if d.platform == "cpu")


def floor_us(source, lowered, device):
    """Microseconds of products at their peak, and of arguments and results, counted apart."""
    products = 0.0
    for kernel in lowered.kernels:
        ops = kernel.inner.ops
        for op in ops:
            if op.opcode in ("dot", "convolution"):
                rate = arithmetic(ops[op.operands[0]].type.dtype, op.attrs).rate
                # No window is done with fewer than a quarter of the multiplications.
                part = 1.0 if op.opcode == "dot" else 0.25
                flops = min(kernel.flops, kernel.multiplicity * kernel.flops)
                products += part * 0.9 * flops / device.matrix_peak(rate)
    entry = source.program.entry_computation
    moved = sum(t.nbytes for t in entry.root_op.results)
    if not any(part in op.opcode for op in entry.ops for part in PARTIAL):
        read = {i for op in entry.ops for i in op.operands}
        moved += sum(entry.ops[i].result_bytes for i in read if entry.ops[i].opcode == "parameter")
    fits = device.platform != "tpu" and moved <= 1.15 * device.cache_bytes
    rate = max(level.bandwidth for level in device.levels) if fits else device.bandwidth
    return 1e6 * max(products, moved / rate)


def is_ordered(found):
    return found.lo_us <= found.latency_us <= found.hi_us and all(
        0 <= k.lo_us <= k.latency_us <= k.hi_us for k in found.kernels
    )


@pytest.fixture(scope="module")
def sampled():
    """A program of each op, which all devices run."""
    drawn = (
        sample_op(np.random.default_rng(seed), opcode, max_bytes=3e8, max_flops=1e13)
        for seed, opcode in enumerate(OPCODES)
    )
    return [read_program(own.mlir) for own in drawn]


@pytest.mark.parametrize("name", every(2, DEVICES))
def test_no_sampled_op_is_faster_than_its_floor(predictor, sampled, name):
    device = device_of(predictor, name)
    for opcode, source in zip(OPCODES, sampled, strict=True):
        lowered = lower(source, lowering="fused", device=device)
        found = predictor.predict_lowered(lowered, device)
        assert floor_us(source, lowered, device) <= found.lo_us * 1.0001, opcode
        assert is_ordered(found), opcode


@pytest.mark.parametrize("lowering", ["op", "fused"])
@pytest.mark.parametrize("name", DEVICES)
def test_every_op_of_stablehlo_and_chlo_has_an_interval_above_its_floor(predictor, name, lowering):
    device = device_of(predictor, name)
    lowered = lower(read_program(ALL_OPS), lowering=lowering, device=device)
    # Two of the calls are unknown: the program as a whole has no answer, its kernels do.
    kernels, wall = predictor.model_for(device).predict_in_program(lowered, device)
    assert least_wall(lowered, device) <= wall.lo <= wall.latency <= wall.hi
    assert (kernels.lo >= 0).all()
    assert ((kernels.lo <= kernels.latency) & (kernels.latency <= kernels.hi)).all()


def product(rows, depth, columns):
    kinds = [f"tensor<{a}x{b}xbf16>" for a, b in ((rows, depth), (depth, columns), (rows, columns))]
    return read_program(f"""module {{
      func.func public @main(%a: {kinds[0]}, %b: {kinds[1]}) -> {kinds[2]} {{
        %0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]
          : ({kinds[0]}, {kinds[1]}) -> {kinds[2]}
        return %0 : {kinds[2]}
      }} }}""")


def test_the_floor_by_hand(round_gpu):
    gpu = round_gpu()
    # 2 · 4096³ FLOP at 1 PFLOP/s take longer than 3 · 32 MiB at 1 TB/s: 137 and 101 us.
    whole = lower(product(4096, 4096, 4096), lowering="op", device=gpu)
    assert least_wall(whole, gpu) == pytest.approx(2 * 4096**3 / 1e15)
    # With a sixteenth of the columns the traffic is longer.
    thin = lower(product(4096, 4096, 256), lowering="op", device=gpu)
    assert least_wall(thin, gpu) == pytest.approx(2 * (4096**2 + 2 * 4096 * 256) / 1e12)
    # What fits the cache of 1 MB comes from it, at 10 TB/s.
    small = lower(product(256, 256, 256), lowering="op", device=gpu)
    assert least_wall(small, gpu) == pytest.approx(3 * 2 * 256**2 / 1e13)


def test_winograd_saves_multiplications():
    row = np.zeros((3, len(COLUMNS)))
    row[1, INDEX["conv_rank"]], row[1, INDEX["conv_window"]] = 2, 9
    row[2, INDEX["conv_rank"]], row[2, INDEX["conv_window"]] = 2, 1
    assert saved(row).tolist() == pytest.approx([1.0, 2.25, 1.0])


def test_an_answer_below_the_floor_is_raised_to_it(monkeypatch, round_gpu, predictor):
    gpu = round_gpu()
    lowered = lower(product(4096, 4096, 4096), lowering="op", device=gpu)
    least = least_wall(lowered, gpu)
    low = ProgramPrediction(least / 2, least / 4, 2 * least)
    monkeypatch.setattr(ProgramModel, "predict", lambda *args: low)
    wall = predictor.model_for(gpu).predict_program(lowered, gpu)
    assert wall == ProgramPrediction(least, least, 2 * least, least)


@pytest.mark.parametrize("device", ["h100-sxm", "tpu-v5e"])
def test_the_hosts_call_alone_is_not_known_to_the_digit(device):
    text = "func.func @main(%a: tensor<8xf32>) -> tensor<8xf32> { return %a : tensor<8xf32> }"
    found = opcast.load().predict(text, device=device, lowering="op")
    assert not found.kernels and found.latency_us > 0.0
    # A factor of four to each side, as of a roofline that nothing was compared with; a TPU, which
    # runs no program op by op, has the ends of such programs.
    assert found.lo_us <= found.latency_us / 2 and found.hi_us >= found.latency_us * 2
