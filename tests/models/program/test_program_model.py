from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opcast.features.devices.catalogue import find_device
from opcast.features.devices.device import DeviceSpec
from opcast.features.kernels.kernel import Kernel, LoweredProgram
from opcast.features.lowering.lower import lower
from opcast.models.program.program_model import ProgramModel, fit_physics, physics_time
from opcast.models.program.schedule_cost import first_touch_s, reads, schedule_cost
from opcast.simulate.program.list_schedule import list_schedule

MakeKernel = Callable[..., Kernel]


def diamond(make_kernel: MakeKernel) -> LoweredProgram:
    """a feeds b and c, which feed d."""
    kernels = [
        make_kernel("a"),
        make_kernel("b", operands=(0,)),
        make_kernel(
            "c", kind="gemm", operands=(0,), multiplicity=2.0, scope=("loop",), bytes_in=1e5
        ),
        make_kernel("d", operands=(1, 2)),
    ]
    return LoweredProgram(kernels, "xla", "cpu")


def test_sum_critical_path_and_makespan(make_kernel: MakeKernel, cpu: DeviceSpec) -> None:
    times = np.array([1.0, 2.0, 3.0, 4.0]) * 1e-6  # c runs twice: 6 µs
    cost = schedule_cost(times, diamond(make_kernel), cpu)
    assert cost.total == pytest.approx(13e-6)  # 1 + 2 + 6 + 4
    assert cost.critical == pytest.approx(11e-6)  # a, c, d
    assert cost.makespan == pytest.approx(11e-6)  # two workers run b beside c
    assert cost.executions == 5
    assert cost.gaps == pytest.approx(5 * 2e-6)
    assert cost.baseline == pytest.approx(13e-6 + 10e-6 + 10e-6)
    assert cost.loop_share == pytest.approx(6 / 13)
    assert cost.iterations == 2


def test_one_worker_makes_the_sum(make_kernel: MakeKernel) -> None:
    kernels = diamond(make_kernel).kernels
    times = np.array([1.0, 2.0, 6.0, 4.0])
    assert list_schedule(times, reads(kernels), 1).makespan == pytest.approx(13.0)


def test_asynchronous_collective_overlaps_with_compute(
    make_kernel: MakeKernel, cpu: DeviceSpec
) -> None:
    kernels = [
        make_kernel("start", kind="collective", async_role="start", async_peer=2),
        make_kernel("work"),
        make_kernel("done", kind="collective", operands=(0,), async_role="done", async_peer=0),
        make_kernel("after", operands=(2,)),
        make_kernel("loop", kind="control"),
    ]
    lowered = LoweredProgram(kernels, "xla", "cpu")
    cost = schedule_cost(np.array([5.0, 3.0, 1.0, 2.0, 9.0]), lowered, cpu)
    assert cost.total == pytest.approx(5 + 3 + 2)  # the pair once, control not at all
    assert cost.makespan == pytest.approx(5 + 2)  # the work hides behind the transfer


def test_gpu_runs_one_kernel_at_a_time(make_kernel: MakeKernel, cpu: DeviceSpec) -> None:
    gpu = replace(cpu, platform="gpu", core_count=132)
    cost = schedule_cost(np.array([1.0, 2.0, 3.0, 4.0]), diamond(make_kernel), gpu)
    assert cost.makespan == pytest.approx(13.0)


Programs = tuple[list[np.ndarray], list[LoweredProgram], np.ndarray, list[str]]


def programs(make_kernel: MakeKernel, cpu: DeviceSpec, n: int, seed: int) -> Programs:
    """Programs whose wall time is makespan + 3 × executions × floor + 2 × dispatch, ± 3 %."""
    rng = np.random.default_rng(seed)
    latencies, lowered, walls = [], [], []
    for _ in range(n):
        size = int(rng.integers(3, 30))
        kernels = [
            make_kernel(f"k{i}", operands=tuple(rng.integers(0, i, 1)) if i else ())
            for i in range(size)
        ]
        program = LoweredProgram(kernels, "xla", "cpu")
        times = np.exp(rng.normal(size=size) - 11)
        cost = schedule_cost(times, program, cpu)
        wall = cost.makespan + 3 * cost.floors + 2 * cost.dispatch
        walls.append(wall * np.exp(0.03 * rng.normal()))
        latencies.append(times)
        lowered.append(program)
    return latencies, lowered, np.array(walls), [f"family{i % 11}" for i in range(n)]


def test_learns_overlap_and_overheads(make_kernel: MakeKernel, cpu: DeviceSpec) -> None:
    latencies, lowered, walls, groups = programs(make_kernel, cpu, 150, 0)
    model = ProgramModel().fit(latencies, lowered, [cpu] * 150, walls, groups)
    errors = model.corrections["cpu"].error
    assert errors["chosen"] < 0.3 * errors["sum"]
    latencies, lowered, walls, _ = programs(make_kernel, cpu, 200, 1)
    pairs = zip(latencies, lowered, strict=True)
    found = np.array([model.predict(times, program, cpu)[:3] for times, program in pairs])
    latency, lo, hi = found.T
    assert np.abs(latency / walls - 1).mean() < 0.05
    assert (lo <= latency).all() and (latency <= hi).all()
    assert 0.8 < np.mean((walls >= lo) & (walls <= hi)) < 0.98


def test_physics_finds_its_coefficients(make_kernel: MakeKernel, cpu: DeviceSpec) -> None:
    latencies, lowered, _, _ = programs(make_kernel, cpu, 60, 0)
    pairs = zip(latencies, lowered, strict=True)
    costs = [schedule_cost(times, program, cpu) for times, program in pairs]
    parts = [(0.6 * c.total + 0.4 * c.makespan, 2 * c.floors, 3 * c.dispatch) for c in costs]
    wall = np.array([sum(part) for part in parts])
    np.testing.assert_allclose(fit_physics(costs, wall), [0.6, 0.4, 2.0, 3.0], atol=1e-6)


def test_overheads_of_small_programs_do_not_lengthen_the_kernels_of_large_ones(
    make_kernel: MakeKernel, cpu: DeviceSpec
) -> None:
    lowered = LoweredProgram([make_kernel("a"), make_kernel("b", operands=(0,))], "xla", "cpu")
    small = [schedule_cost(np.full(2, 2e-6), lowered, cpu)] * 90
    large = [schedule_cost(np.full(2, 5e-3), lowered, cpu)] * 10
    wall = np.array([20e-6] * 90 + [10e-3] * 10)  # 4 µs of kernels take 20; 10 ms take 10
    coef = fit_physics([*small, *large], wall)
    assert physics_time(large, coef)[0] == pytest.approx(10e-3, rel=0.01)
    assert physics_time(small, coef)[0] == pytest.approx(20e-6, rel=0.01)


def test_keeps_the_sum_where_nothing_beats_it(make_kernel: MakeKernel, cpu: DeviceSpec) -> None:
    latencies, lowered, _, groups = programs(make_kernel, cpu, 60, 0)
    pairs = zip(latencies, lowered, strict=True)
    walls = np.array([schedule_cost(times, program, cpu).baseline for times, program in pairs])
    model = ProgramModel().fit(latencies, lowered, [cpu] * 60, walls, groups)
    found = model.predict(latencies[0], lowered[0], cpu)
    assert found.latency == pytest.approx(walls[0])


def test_platform_never_fitted_gets_the_sum(make_kernel: MakeKernel, cpu: DeviceSpec) -> None:
    times = np.array([1.0, 2.0, 3.0, 4.0]) * 1e-6
    program = diamond(make_kernel)
    found = ProgramModel().predict(times, program, cpu, times / 2, times * 3)
    assert found.latency == pytest.approx(13e-6 + 10e-6 + 10e-6)
    assert found.lo == pytest.approx(6.5e-6 + 20e-6)
    assert found.hi == pytest.approx(39e-6 + 20e-6)
    blind = ProgramModel().predict(times, program, cpu)
    assert blind.lo < blind.latency < blind.hi


def test_empty_program_takes_the_dispatch(cpu: DeviceSpec) -> None:
    found = ProgramModel().predict(np.zeros(0), LoweredProgram([], "xla", "cpu"), cpu)
    assert found.latency == pytest.approx(cpu.dispatch, rel=0.02)


def test_round_trip(make_kernel: MakeKernel, cpu: DeviceSpec) -> None:
    latencies, lowered, walls, groups = programs(make_kernel, cpu, 80, 0)
    model = ProgramModel().fit(latencies, lowered, [cpu] * 80, walls, groups)
    again = ProgramModel.from_dict(json.loads(json.dumps(model.to_dict())))
    assert again.predict(latencies[0], lowered[0], cpu) == model.predict(
        latencies[0], lowered[0], cpu
    )
    stale = model.to_dict()
    stale["cpu"]["features"] = ["another"]
    with pytest.raises(ValueError, match="features"):
        ProgramModel.from_dict(stale)


def test_concentration_counts_equal_kernels_once(make_kernel: MakeKernel, cpu: DeviceSpec) -> None:
    kernels = [make_kernel("a"), make_kernel("a"), make_kernel("b", multiplicity=2.0)]
    lowered = LoweredProgram(kernels, "xla", "cpu")
    cost = schedule_cost(np.array([1.0, 1.0, 1.0]), lowered, cpu)
    assert cost.concentration == pytest.approx(0.5**2 + 0.5**2)
    single = schedule_cost(np.array([1.0]), LoweredProgram(kernels[:1], "xla", "cpu"), cpu)
    assert single.concentration == 1.0
    together = [own.together(0.2) for own in (cost, single)]
    np.testing.assert_allclose(together, [np.sqrt(0.2 + 0.8 * 0.5), 1.0], rtol=1e-12)


def test_programs_of_many_kernels_get_narrower_intervals(
    make_kernel: MakeKernel, cpu: DeviceSpec
) -> None:
    """Kernels err independently: intervals must cover few and many kernels alike."""
    rng = np.random.default_rng(0)
    latencies, lowered, walls = [], [], []
    for n in range(400):
        size = 1 if n % 2 else 25
        kernels = [make_kernel(f"k{i}") for i in range(size)]
        times = np.full(size, 1e-3 / size)
        true = times * np.exp(0.4 * rng.normal(size=size))
        latencies.append(times)
        lowered.append(LoweredProgram(kernels, "xla", "gpu"))
        walls.append(true.sum())
    gpu = replace(cpu, platform="gpu")
    model = ProgramModel()
    names = [f"f{i % 20}" for i in range(400)]
    model.fit(latencies, lowered, [gpu] * 400, np.array(walls), names, correlation=0.0)
    found = [model.predict(*pair, gpu) for pair in zip(latencies, lowered, strict=True)]
    inside = np.array([p.lo <= w <= p.hi for p, w in zip(found, walls, strict=True)])
    assert 0.85 < inside[1::2].mean() < 0.97 and 0.85 < inside[::2].mean() < 0.99
    widths = np.array([p.hi / p.lo for p in found])
    assert np.log(widths[0]) < 0.35 * np.log(widths[1])


def test_a_cpu_may_touch_all_pages_of_large_temporaries_anew():
    """24 MiB are kept by glibc, 48 MiB are not: 12,288 pages of 2 µs."""
    spec = jax.ShapeDtypeStruct((96, 64), jnp.float32)
    wide = jax.ShapeDtypeStruct((64, 65536), jnp.float32)
    cpu = replace(find_device("cpu-i7-12700h"), name="cpu")
    lowered = lower(jax.jit(lambda x, w: (x @ w).sum()).lower(spec, wide), "fused", device=cpu)
    assert lowered.peak_memory_bytes - (96 + 65536) * 64 * 4 == pytest.approx(24 * 2**20, rel=0.01)
    assert first_touch_s(lowered, cpu) == 0.0
    more = replace(lowered, peak_memory_bytes=lowered.peak_memory_bytes + 24 * 2**20)
    assert first_touch_s(more, cpu) == pytest.approx(2 * 24 * 2**20 / 4096 * 2e-6, rel=0.01)
    assert first_touch_s(more, find_device("h100-sxm")) == 0.0


@pytest.mark.parametrize(
    ("given", "pages"), [({}, 16384), ({"donate_argnums": 0}, 0)], ids=["new", "donated"]
)
def test_a_cpu_may_touch_all_pages_of_large_results_anew(given: dict[str, int], pages: int) -> None:
    """64 MiB are 16,384 pages of 2 µs; a result in the place of its argument has none."""
    step = jax.jit(lambda x: x + 1, **given).lower(jax.ShapeDtypeStruct((1 << 24,), jnp.float32))
    cpu = replace(find_device("cpu-i7-12700h"), name="cpu")
    assert first_touch_s(lower(step, "fused", device=cpu), cpu) == pytest.approx(pages * 2e-6)
