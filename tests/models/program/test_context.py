from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opcast.features.devices.device import DeviceSpec
from opcast.features.ir.reader import read_program
from opcast.features.kernels.kernel import Kernel, LoweredProgram
from opcast.features.lowering.lower import lower
from opcast.features.table.columns import COLUMNS, INDEX
from opcast.models.core.base import KernelPrediction
from opcast.models.cost_model import CostModel
from opcast.models.program.context import CONTEXT, context_features, loop_factors
from opcast.models.program.context_trees import in_loops
from opcast.models.program.schedule_cost import inline, schedule_cost

MakeKernel = Callable[..., Kernel]
MB = 1e6  # the cache of the fixture device


def columns(lowered: LoweredProgram, device: DeviceSpec, times: list[float]) -> dict:
    base = 2 * np.array(times)
    found = context_features(np.array(times), base, lowered, device)
    assert found.shape == (len(times), len(CONTEXT)) and np.isfinite(found).all()
    return dict(zip(CONTEXT, found.T.astype(float), strict=True))


def chain(make_kernel: MakeKernel) -> LoweredProgram:
    """a writes 0.25 MB; b reads nothing of it and touches 1.5 MB; c reads a and b."""
    kernels = [
        make_kernel("a", bytes_in=0.25 * MB, bytes_out=0.25 * MB),
        make_kernel("b", bytes_in=1.0 * MB, bytes_out=0.5 * MB),
        make_kernel("c", kind="gemm", bytes_in=1.0 * MB, bytes_out=0.25 * MB, operands=(0, 1)),
    ]
    return LoweredProgram(kernels, "xla", "cpu", peak_memory_bytes=4 * MB)


def test_reuse_distance_counts_what_is_touched_in_between(
    make_kernel: MakeKernel, cpu: DeviceSpec
) -> None:
    found = columns(chain(make_kernel), cpu, [1e-5, 2e-5, 1e-5])
    # a's result: 0.25 MB of its own + 1.5 MB that b touches = 1.75 MB; b's result: 0.5 MB.
    far, near = np.log2(1.75), np.log2(0.5)
    assert found["log_reuse"][2] == pytest.approx(0.25 * far + 0.5 * near + 0.25 * 12, rel=1e-5)
    assert found["log_nearest_reuse"][2] == pytest.approx(near)
    assert found["cached_0.25"][2] == 0.0
    assert found["cached_1"][2] == pytest.approx(0.5)  # of the 1 MB it reads, b's 0.5 MB
    assert found["cached_4"][2] == pytest.approx(0.75)
    assert found["from_previous"][2] == pytest.approx(0.5)
    assert found["from_kernels"][2] == pytest.approx(0.75)
    assert found["log_reuse"][0] == 12 and found["from_kernels"][0] == 0  # arguments of the program


def test_next_use_working_sets_and_memory(make_kernel: MakeKernel, cpu: DeviceSpec) -> None:
    found = columns(chain(make_kernel), cpu, [1e-5, 2e-5, 1e-5])
    assert found["log_next_use"][0] == pytest.approx(np.log2(1.5))  # b lies in between
    assert found["log_next_use"][1] == -12  # at once
    assert found["log_next_use"][2] == 12  # never
    assert found["log_program_bytes"][0] == pytest.approx(np.log2(0.5 + 1.5 + 1.25))
    assert found["log_peak_memory"][0] == pytest.approx(2.0)


def test_position_and_share(make_kernel: MakeKernel, cpu: DeviceSpec) -> None:
    found = columns(chain(make_kernel), cpu, [1e-5, 2e-5, 1e-5])
    np.testing.assert_allclose(found["time_before"], [0.0, 0.25, 0.75], atol=1e-6)
    np.testing.assert_allclose(np.exp(found["log_share"]), [0.25, 0.5, 0.25], rtol=1e-5)
    np.testing.assert_allclose(np.exp(found["log_previous"]), [1.0, 0.5, 2.0], rtol=1e-5)
    np.testing.assert_allclose(found["is_gemm"], [0, 0, 1])
    np.testing.assert_allclose(found["log_ratio"], np.log(1 / 2), rtol=1e-5)


def test_kernels_beside_each_other(make_kernel: MakeKernel, cpu: DeviceSpec) -> None:
    # On two workers a and b start together: a is never alone, b for half of its time, c always.
    found = columns(chain(make_kernel), cpu, [1e-5, 2e-5, 1e-5])
    np.testing.assert_allclose(found["beside"], [1.0, 0.5, 0.0], atol=1e-5)
    assert found["overlap"][0] == pytest.approx(1 - 3 / 4)
    gpu = replace(cpu, platform="gpu")
    alone = columns(chain(make_kernel), gpu, [1e-5, 2e-5, 1e-5])["beside"]
    np.testing.assert_allclose(alone, 0.0, atol=1e-6)


def test_loops_have_a_working_set_and_trips(make_kernel: MakeKernel, cpu: DeviceSpec) -> None:
    inside = {"scope": ("while",), "multiplicity": 16.0, "bytes_in": MB / 4}
    kernels = [
        make_kernel("loop", kind="control"),
        make_kernel("x", **inside),
        make_kernel("y", operands=(0, 1), **inside),
        make_kernel("after", bytes_in=7.5 * MB),
    ]
    found = columns(LoweredProgram(kernels, "xla", "cpu"), cpu, [0.0, 1e-6, 1e-6, 1e-6])
    np.testing.assert_allclose(found["log_loop_bytes"], [3, -1, -1, 3])  # 8 MB, 0.5 MB
    np.testing.assert_allclose(found["log_multiplicity"], [0, 4, 4, 0])
    np.testing.assert_allclose(found["loop_depth"], [0, 1, 1, 0])


def test_empty_program(cpu: DeviceSpec) -> None:
    found = context_features(np.zeros(0), np.zeros(0), LoweredProgram([], "xla", "cpu"), cpu)
    assert found.shape == (0, len(CONTEXT))


def product(make_kernel: MakeKernel, flops: float, size: float, **values: object) -> Kernel:
    row = np.zeros(len(COLUMNS))
    row[INDEX["flops"]] = row[INDEX["matmul_flops"]] = flops
    row[INDEX["bytes_in"]] = size
    return make_kernel("p", kind="gemm", flops=flops, bytes_in=size, row=row, **values)


def test_products_in_loops_read_from_the_cache(make_kernel: MakeKernel, cpu: DeviceSpec) -> None:
    loop = {"scope": ("while",), "multiplicity": 100.0}
    beside = make_kernel("b", bytes_in=0.05 * MB, **loop)
    inside = product(make_kernel, 1e6, 0.2 * MB, **loop)
    # 10 µs of arithmetic, a floor of 1 µs; 0.2 MB take 2 µs from the cache (the loop's 0.25 MB are
    # below half of its 1 MB), and three times 20 µs from main memory, as in the first iteration.
    later, first = 13.0, 71.0
    expected = 0.01 + 0.99 * later / first
    np.testing.assert_allclose(loop_factors([beside, inside], cpu), [1.0, expected], rtol=1e-6)
    # The same product outside a loop, and in one that touches twice the cache in an iteration.
    outside = product(make_kernel, 1e6, 0.2 * MB)
    large = make_kernel("b", bytes_in=2 * MB, **loop)
    np.testing.assert_allclose(loop_factors([outside], cpu), 1.0)
    np.testing.assert_allclose(loop_factors([large, inside], cpu), 1.0)
    # A loop inside the loop counts, too; and nothing is said of other platforms.
    nested = make_kernel("b", bytes_in=2 * MB, scope=("while", "inner"), multiplicity=200.0)
    np.testing.assert_allclose(loop_factors([nested, inside], cpu), 1.0)
    np.testing.assert_allclose(loop_factors([inside], replace(cpu, platform="gpu")), 1.0)


def test_small_kernels_of_a_short_loop_start_once(make_kernel: MakeKernel, cpu: DeviceSpec) -> None:
    """A floor of 1 µs; a kernel that took less is called in 0.03 µs, and has an overhead once."""
    loop = {"scope": ("while",), "multiplicity": 100.0}
    work, tiny, large = (make_kernel("k", bytes_in=size, **loop) for size in (1e3, 10.0, 1e5))
    kernels = [work, tiny, large, make_kernel("o", bytes_in=10.0)]
    alone = KernelPrediction.around(np.array([3e-6, 0.5e-6, 3e-6, 0.5e-6]), (-0.1, 0.1), "learned")
    found = in_loops(alone, kernels, cpu)
    expected = [0.03e-6 + 0.99 * 2e-6, 0.005e-6 + 0.99 * 0.03e-6, 3e-6, 0.5e-6]
    np.testing.assert_allclose(found.latency, expected)
    np.testing.assert_allclose(found.hi / found.latency, np.exp(0.1))
    cost = schedule_cost(found.latency, LoweredProgram(kernels, "xla", "cpu"), cpu)
    assert cost.executions == 1 + 1 + 100 + 1
    # Nine kernels are tasks of their own, and other platforms launch each kernel.
    long = in_loops(
        KernelPrediction.around(np.full(9, 3e-6), (-0.1, 0.1), "learned"), [work] * 9, cpu
    )
    np.testing.assert_allclose(long.latency, 3e-6)
    assert not inline(kernels, replace(cpu, platform="gpu")).any()


def test_operands_sliced_out_of_a_stack_are_not_kept(
    make_kernel: MakeKernel, cpu: DeviceSpec
) -> None:
    inside = product(make_kernel, 1e6, 0.2 * MB, scope=("while",), multiplicity=100.0)
    inside.row[INDEX["n_dynamic_slice"]] = 1.0
    np.testing.assert_allclose(loop_factors([inside], cpu), 1.0)


def test_a_recurrent_program_is_predicted_with_its_matrix_in_the_cache(cpu: DeviceSpec) -> None:
    def recurrent(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 50, lambda _, h: jnp.tanh(h @ w), x)

    x, w = jnp.ones((4, 128)), jnp.ones((128, 128))
    lowered = lower(read_program(jax.jit(recurrent).lower(x, w).as_text()))
    (place,) = (i for i, k in enumerate(lowered.kernels) if k.kind == "gemm")
    model = CostModel.untrained("roofline")
    plain = model.predict_kernels(lowered.kernels, cpu)
    # The roofline knows caches already; a learned latency is of a matrix read from main memory.
    same, _ = model.predict_in_program(lowered, cpu, plain)
    small = inline(lowered.kernels, cpu)
    assert small.any() and not small[place]
    np.testing.assert_allclose(same.latency[~small], plain.latency[~small])
    learned = replace(plain, source=np.full(len(plain.source), "learned", object))
    inside, wall = model.predict_in_program(lowered, cpu, learned)
    factor = inside.latency / plain.latency
    assert 0.1 < factor[place] < 0.6 and factor[place] == inside.hi[place] / plain.hi[place]
    assert (factor[~small] == 1.0).sum() == (~small).sum() - 1
    before = model.program_model.predict(plain.latency, lowered, cpu, plain.lo, plain.hi)
    runs = np.array([k.multiplicity * k.takes_time for k in lowered.kernels])
    saved = runs @ (plain.latency - inside.latency)
    assert before.latency - wall.latency == pytest.approx(saved)
