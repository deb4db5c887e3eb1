from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.backend import get_backend, get_compile_options

from opcast.common.errors import ProfileError
from opcast.datagen.programs.cost import estimate
from opcast.datagen.programs.draws import Draws
from opcast.datagen.programs.single_op import OPCODES, sample_op
from opcast.datagen.programs.source import Arg, ProgramSource, numpy_dtype

TINY: dict[str, Any] = {"max_bytes": 1e5, "max_flops": 2e6}
#: Ops of StableHLO and CHLO that the sampler must reach.
VOCABULARY = set(
    re.findall(
        r"\w+",
        """
        abs add and atan2 bitcast_convert broadcast_in_dim cbrt ceil clamp compare complex
        concatenate convert convolution cosine count_leading_zeros divide dot_general
        dynamic_slice dynamic_update_slice exponential exponential_minus_one fft floor gather imag
        iota is_finite log log_plus_one maximum minimum multiply negate not or pad popcnt power
        real reduce reduce_window remainder reshape reverse rng_bit_generator round_nearest_even
        rsqrt scatter select select_and_scatter shift_left shift_right_arithmetic
        shift_right_logical sign sine slice sort sqrt subtract tan tanh transpose while xor erf
        erf_inv lgamma top_k
        """,
    )
)


def draw(opcode: str | None, seed: int, **limits: Any) -> ProgramSource:
    return sample_op(np.random.default_rng(seed), opcode, **(limits or TINY))


def run(source: ProgramSource) -> list[np.ndarray[Any, Any]]:
    client = get_backend()
    quick = {"xla_backend_optimization_level": 0}
    options = get_compile_options(1, 1, env_options_overrides=quick)
    program = client.compile_and_load(source.mlir, client.devices()[:1], options)
    arguments = [jax.device_put(a) for a in source.arguments(0)]
    return [np.asarray(out) for out in program.execute(arguments)]


def is_finite(array: np.ndarray[Any, Any]) -> bool:
    if array.dtype.kind not in "fcV":
        return True
    wide = np.complex64 if array.dtype.kind == "c" else np.float32
    return bool(np.isfinite(array.astype(wide)).all())


@pytest.mark.parametrize("opcode", OPCODES)
def test_every_op_compiles_and_gives_finite_results(opcode: str) -> None:
    source = draw(opcode, 1)
    assert source.family == f"op:{opcode}"
    assert 0 < source.est_bytes <= TINY["max_bytes"]
    outputs = run(source)
    assert outputs
    # A conversion to integers or to 8-bit floats may overflow; its values do not matter.
    assert opcode == "convert" or all(is_finite(out) for out in outputs)


@pytest.mark.exhaustive
@pytest.mark.parametrize("opcode", OPCODES)
def test_variants_of_every_op_run(opcode: str) -> None:
    for seed in range(10, 16):
        outputs = run(draw(opcode, seed))
        assert opcode == "convert" or all(is_finite(out) for out in outputs)


def test_the_same_state_gives_the_same_program() -> None:
    for seed in range(12):
        first, second = draw(None, seed), draw(None, seed)
        assert first == second
        pairs = zip(first.arguments(3), second.arguments(3), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs)
    assert draw(None, 1).mlir != draw(None, 2).mlir


def test_arguments_have_the_types_of_main() -> None:
    for seed in range(30):
        source = draw(None, seed)
        main = re.search(r"func\.func public @main\((.*?)\) ->", source.mlir)
        assert main is not None
        types = re.findall(r"tensor<([^>]*)>", main[1])
        arguments = source.arguments()
        assert ["x".join([*map(str, a.shape), mlir_name(a.dtype)]) for a in arguments] == types, (
            source.name
        )


def mlir_name(dtype: np.dtype[Any]) -> str:
    names = {"bool": "i1", "bfloat16": "bf16", "complex64": "complex<f32"}
    name = names.get(dtype.name, dtype.name)
    for long, short in (("uint", "ui"), ("int", "i"), ("float", "f")):
        name = name.replace(long, short) if name.startswith(long) else name
    return {"f8_e4m3fn": "f8E4M3FN", "f8_e5m2": "f8E5M2"}.get(name, name)


def test_default_limits_hold_and_sizes_spread_over_decades() -> None:
    kinds = ("add", "reduce", "transpose", "dot_general", "gather", "convolution")
    drawn = ((kind, np.random.default_rng(seed)) for kind in kinds for seed in range(12))
    sources = [sample_op(rng, kind) for kind, rng in drawn]
    need = np.array([s.est_bytes for s in sources])
    work = np.array([s.est_flops for s in sources])
    if jax.default_backend() == "cpu":
        assert need.max() <= 128e6
        assert work.max() <= 4e9
    # Log-uniform from a few kilobytes on: small programs are as frequent as big ones.
    decades = np.log10(need)
    assert np.quantile(decades, 0.9) - np.quantile(decades, 0.1) > 1.5


def test_est_bytes_covers_arguments_and_results() -> None:
    for seed in range(20):
        source = draw("concatenate", seed)
        inputs = sum(a.nbytes for a in source.arguments())
        # The result is as large as the inputs together.
        assert source.est_bytes == 2 * inputs


def test_indices_are_below_the_dimension_they_index() -> None:
    for seed in range(24):
        source = draw("gather", seed)
        table, picks = source.arguments(seed)
        assert picks.min() >= 0
        assert picks.max() < max(table.shape)
        if "-rows-" in source.name:
            assert picks.max() < table.shape[0]
    for seed in range(20):
        operand, update, start = draw("dynamic_update_slice", seed).arguments(seed)
        axis = [i for i in range(operand.ndim) if operand.shape[i] != update.shape[i]]
        if axis:
            assert 0 <= start <= operand.shape[axis[0]] - update.shape[axis[0]]


def test_the_vocabulary_is_covered() -> None:
    seen: set[str] = set()
    for opcode in OPCODES:
        seen.update(ops_of(draw(opcode, 0).mlir))
    for seed in range(1, 9):
        for opcode in ("complex", "activation", "scatter"):
            seen.update(ops_of(draw(opcode, seed).mlir))
    missing = VOCABULARY - seen
    assert not missing


def ops_of(text: str) -> set[str]:
    return set(re.findall(r"\b(?:stablehlo|chlo)\.(\w+)", text))


def test_gemm_has_every_layout() -> None:
    forms = set()
    for seed in range(120):
        match = re.search(r"(batching_dims.*?)?contracting_dims = (\[\d\] x \[\d\])",
                          draw("dot_general", seed).mlir)  # fmt: skip
        if match is not None:
            forms.add((bool(match[1]), match[2]))
    plain = {form for batched, form in forms if not batched}
    assert {"[1] x [0]", "[1] x [1]", "[0] x [0]", "[0] x [1]"} <= plain
    assert len([f for batched, f in forms if batched]) >= 4


def test_weights_favour_what_real_programs_spend_their_time_on() -> None:
    draws = Draws(np.random.default_rng(0), 1e6, 1e7)
    weights = {name: kind.weight for name, kind in OPCODES.items()}
    counts = Counter(draws.weighted(weights) for _ in range(4000))
    assert counts.most_common(1)[0][0] == "dot_general"
    share = sum(weights[k] for k in weights if k.startswith("conv")) / sum(weights.values())
    measured = sum(n for k, n in counts.items() if k.startswith("conv")) / 4000
    assert measured == pytest.approx(share, abs=0.03)


def test_errors_name_the_choices() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ProfileError, match="dot_general"):
        sample_op(rng, "gemm")
    with pytest.raises(ProfileError, match="leave no room"):
        sample_op(rng, "add", max_bytes=10)


def test_estimate_of_a_product_and_a_loop() -> None:
    def loop(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 5, lambda _, v: v @ w, x)

    x, w = jnp.zeros((8, 16)), jnp.zeros((16, 16))
    cost = estimate(jax.make_jaxpr(loop)(x, w))
    # Five products of 2·8·16·16 FLOPs; the counter adds a few.
    assert cost.flops == pytest.approx(5 * 2 * 8 * 16 * 16, rel=0.01)
    plain = estimate(jax.make_jaxpr(lambda a, b: jnp.tanh(a @ b))(x, w))
    assert plain.flops == 2 * 8 * 16 * 16 + 8 * 16
    # The arguments stay; product and tanh are alive together: 4 · (128 + 256 + 128 + 128) bytes.
    assert plain.peak_bytes == 4 * (128 + 256 + 128 + 128)
    assert plain.n_ops == 2


def test_values_of_each_kind() -> None:
    rng = np.random.default_rng(0)
    integers = Arg((1000,), "s8", "integer", -3, 4).draw(rng)
    assert integers.dtype == np.int8
    assert (integers.min(), integers.max()) == (-3, 3)
    uniform = Arg((1000,), "f32", "uniform", 0.5, 2.0).draw(rng)
    assert 0.5 <= uniform.min() < uniform.max() < 2.0
    assert Arg((7, 3), "bf16").draw(rng).dtype == numpy_dtype("bf16")
    spd = Arg((2, 40, 40), "f32", "spd").draw(rng)
    assert np.linalg.eigvalsh(spd).min() > 0.1
    triangular = Arg((40, 40), "f32", "triangular").draw(rng)
    assert np.array_equal(triangular, np.tril(triangular))
    # Long arguments repeat a block of random values.
    assert np.unique(Arg((2**21,), "f32").draw(rng)).size > 5e5
