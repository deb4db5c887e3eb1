from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend.backend import get_backend, get_compile_options

from opcast.common.errors import ProfileError
from opcast.datagen.programs.draws import FLOATS, Draws, indices
from opcast.datagen.programs.random_program import random_program
from opcast.datagen.programs.random_values import MOTIFS, Pool, Step, backward
from opcast.datagen.programs.source import Arg, ProgramSource

from ...support.cases import every, later

SMALL: dict[str, Any] = {"max_bytes": 4e6, "max_flops": 1e8}
#: Ops that the programs together must contain.
VOCABULARY = set(
    re.findall(
        r"\w+",
        """
        add multiply subtract divide maximum minimum exponential tanh rsqrt sqrt compare select
        dot_general convolution reduce transpose reshape broadcast_in_dim concatenate slice pad
        gather scatter dynamic_slice dynamic_update_slice convert iota while reduce_window sort
        rng_bit_generator
        """,
    )
)


def draw(seed: int, **settings: Any) -> ProgramSource:
    return random_program(np.random.default_rng([5, seed]), **(settings or SMALL))


def check_run(source: ProgramSource) -> None:
    client = get_backend()
    quick = {"xla_backend_optimization_level": 0}
    options = get_compile_options(1, 1, env_options_overrides=quick)
    program = client.compile_and_load(source.mlir, client.devices()[:1], options)
    outputs = program.execute([jax.device_put(a) for a in source.arguments(0)])
    assert outputs
    for out in map(np.asarray, outputs):
        if out.dtype.kind in "fV":
            assert np.isfinite(out.astype(np.float32)).all(), source.name


@pytest.mark.parametrize("seed", every(2, range(20)))
def test_programs_compile_and_run(seed: int) -> None:
    check_run(draw(seed, n_ops=(4, 16), **SMALL))


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed",
    [*range(100, 103), *map(later, range(103, 160))],
)
def test_large_programs_compile_and_run(seed: int) -> None:
    check_run(draw(seed))


def test_the_same_state_gives_the_same_program() -> None:
    for seed in range(6):
        first, second = draw(seed), draw(seed)
        assert first == second
        assert first.family == "random"
        pairs = zip(first.arguments(1), second.arguments(1), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs)
    assert draw(0).mlir != draw(1).mlir


def test_limits_hold_and_the_vocabulary_is_covered() -> None:
    seen: set[str] = set()
    modes = set()
    for seed in range(50):
        source = draw(seed)
        assert 0 < source.est_bytes <= SMALL["max_bytes"]
        assert source.est_flops <= SMALL["max_flops"]
        # Nothing but arguments can be large: constants would be folded away.
        assert 'dense<"0x' not in source.mlir
        seen.update(re.findall(r"\bstablehlo\.(\w+)", source.mlir))
        modes.add(source.name.split("-")[2])
    missing = VOCABULARY - seen
    assert not missing
    assert modes == {"forward", "mixed", "train"}


def test_parameters_match_arguments() -> None:
    for seed in range(10):
        source = draw(seed)
        main = re.search(r"func\.func public @main\((.*?)\) ->", source.mlir)
        assert main is not None
        assert main[1].count("%arg") == len(source.args) == len(source.arguments())


def test_n_ops_bounds_the_length() -> None:
    def ops(source: ProgramSource) -> int:
        return int(re.search(r"-(\d+)ops-", source.name)[1])  # type: ignore[index]

    short = [ops(draw(seed, n_ops=(1, 4), **SMALL)) for seed in range(5)]
    long = [ops(draw(seed, n_ops=(50, 60), **SMALL)) for seed in range(5)]
    assert np.median(short) < 30
    assert np.median(long) >= 40


def test_integer_arguments_stay_in_range() -> None:
    for seed in range(8):
        source = draw(seed)
        for arg, value in zip(source.args, source.arguments(seed), strict=True):
            if arg.kind == "integer" and value.size:
                assert arg.low <= value.min() <= value.max() < arg.high


@pytest.mark.parametrize(
    "shape, dtype",
    [((4, 8, 64), "f32"), ((2, 16, 16, 8), "bf16"), ((16, 32), "f32"), ((64,), "f16"), ((), "f32"),
     ((4, 8), "s32"), ((8,), "pred")],
)  # fmt: skip
def test_every_motif_fits_or_declines(shape: tuple[int, ...], dtype: str) -> None:
    pool = Pool(Draws(np.random.default_rng(0), 1e8, 1e9))
    x = pool.argument(indices(shape, 2) if dtype not in FLOATS else Arg(shape, dtype))
    x = type(x)(x.index, shape, dtype)
    taken = 0
    for motif in MOTIFS:
        step = motif(pool, x)
        if step is not None:
            closed, cost = pool.cost(step)
            assert closed.out_avals and cost.peak_bytes > 0, motif.__name__
            taken += 1
    assert taken >= (20 if dtype in FLOATS and len(shape) > 1 else 2)


def test_backward_gives_one_gradient_per_float() -> None:
    pool = Pool(Draws(np.random.default_rng(0), 1e8, 1e9))
    x = pool.argument(Arg((4, 8), "f32"))
    w, picks = Arg((8, 16), "f32"), indices((2,), 4)
    step = Step(lambda v, a, i: (v @ a)[i], (x,), (w, picks))
    gradient = backward(pool, step)
    assert gradient is not None
    results = pool.add(gradient)
    # One each for x and w; none for the integers.
    assert [r.shape for r in results] == [(4, 8), (8, 16)]


def test_values_without_a_reader_are_leaves() -> None:
    pool = Pool(Draws(np.random.default_rng(0), 1e8, 1e9))
    x = pool.argument(Arg((4,), "f32"))
    (y,) = pool.add(Step(lambda v: v * 2, (x,)))
    (z,) = pool.add(Step(lambda v: v + 1, (y,)))
    assert pool.leaves() == [z]
    result = pool.run([np.array([0.0, 1.0, 2.0, 3.0], np.float32)])[z.index]
    assert np.array_equal(result, [1.0, 3.0, 5.0, 7.0])


def test_steps_beyond_the_limits_are_refused() -> None:
    pool = Pool(Draws(np.random.default_rng(0), 1e6, 1e5))
    x = pool.argument(Arg((100, 100), "f32"))
    assert pool.add(Step(lambda v: v @ v, (x,))) == ()  # 2·100³ FLOPs are above 1e5
    assert pool.steps == []


def test_bad_limits_are_errors() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ProfileError, match="leave no room"):
        random_program(rng, max_bytes=100)
    with pytest.raises(ProfileError, match="not a range"):
        random_program(rng, n_ops=(9, 3))
