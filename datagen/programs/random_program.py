"""Random programs: graphs of layers and ops that always compile, forward or with gradients."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from ...common.errors import ProfileError
from . import random_layers as random_layers  # their motifs
from . import random_ops as random_ops
from .draws import BATCHES, CHANNELS, FLOATS, HEAD_WIDTHS, IMAGES, LENGTHS, WIDTHS, Draft, Draws
from .draws import indices as index_argument
from .draws import values as value_argument
from .random_values import MOTIFS, Pool, Step, Value, backward
from .single_op import limits, to_source, trace
from .source import Arg, ProgramSource

#: Below these there is no room for a program of several ops.
_LEAST_BYTES = 256e3
_LEAST_FLOPS = 1e7
#: Programs that are drawn, each with half of the limits of the previous one.
_ATTEMPTS = 12
#: Rejected steps after which a program is taken as it is.
_REJECTIONS = 15
#: Weights of a program's starting values (engineering choice).
_THEMES = {"tokens": 0.35, "image": 0.3, "matrix": 0.25, "vector": 0.1}
#: Weights of the use of gradients: none, of single steps, or of the whole program.
_MODES = {"forward": 0.45, "mixed": 0.3, "train": 0.25}


def random_program(
    rng: np.random.Generator,
    *,
    n_ops: tuple[int, int] = (4, 60),
    max_bytes: float | None = None,
    max_flops: float | None = None,
    platform: str = "",
) -> ProgramSource:
    """Draw a program of layers and ops; its inputs are arguments, and all its work is returned.

    Args:
        rng: Source of all randomness; the same state gives the same program.
        n_ops: Minimum and maximum number of ops to aim at, log-uniform; the last step may exceed
            it.
        max_bytes: Maximum bytes of arguments, results and intermediates alive at a time; None for
            a suitable limit for the local backend.
        max_flops: Maximum work, as in :func:`~opcast.datagen.programs.single_op.sample_op`.
        platform: JAX's name of the platform to lower for; empty for the local backend.

    Raises:
        ProfileError: The limits leave no room, or ``n_ops`` is not a range.
    """
    max_bytes, max_flops = limits(max_bytes, max_flops, (_LEAST_BYTES, _LEAST_FLOPS))
    if not 1 <= n_ops[0] <= n_ops[1]:
        raise ProfileError(f"n_ops={n_ops} is not a range", hint="give (fewest, most) from 1 on")
    seed = int(rng.integers(2**32))
    for attempt in range(_ATTEMPTS):
        shrink = 0.5**attempt
        draws = Draws(rng, max_bytes * shrink, max_flops * shrink)
        # Gradients exceed limits most often: the last attempts have none.
        mode = draws.weighted(_MODES) if attempt < _ATTEMPTS - 4 else "forward"
        pool, theme = _grow(draws, n_ops, mode)
        draft = Draft(*_function(pool, mode, draws), f"{theme}-{mode}")
        traced, cost = trace(draft, f"random_{theme}_{mode}_{seed:08x}")
        if cost.peak_bytes <= max_bytes and cost.work <= max_flops:
            name = f"random-{theme}-{mode}-{cost.n_ops}ops-{seed:08x}"
            return to_source(name, "random", draft, traced, cost, platform)
    raise ProfileError(
        f"no program fits within {max_bytes:.3g} bytes and {max_flops:.3g} FLOPs",
        hint="give higher limits",
    )


def _grow(draws: Draws, n_ops: tuple[int, int], mode: str) -> tuple[Pool, str]:
    """Grow a pool to a random number of ops; return it and its theme."""
    target = round(draws.log_uniform(*n_ops))
    if mode == "train":
        target = max(1, target // 3)  # gradients make about two more for each
    # Programs of very different total work, rather than all at the limit.
    work = draws.log_uniform(draws.max_flops / 300, draws.max_flops)
    pool = Pool(Draws(draws.rng, draws.max_bytes, work))
    theme = draws.weighted(_THEMES)
    for _ in range(draws.choice((1, 1, 2, 3))):
        _start(pool, theme)
    # Every program has its own preferences, so that programs differ more than their draws would.
    favourites = {m: w * draws.log_uniform(0.25, 4) for m, w in MOTIFS.items()}
    rejected = 0
    while pool.n_ops < target and rejected < _REJECTIONS:
        step = draws.weighted(favourites)(pool, pool.pick())
        if step is None:
            continue
        if not pool.add(step):
            rejected += 1
            continue
        if mode == "mixed" and step.smooth and draws.flip(0.4):
            _add_gradient(pool, step)
    if not pool.steps:
        x = pool.values[0]
        pool.add(Step(lambda v: v + v, (x,)))
    return pool, theme


def _add_gradient(pool: Pool, step: Step) -> None:
    # The gradient reads the arguments of the step itself, which were added last, not copies.
    count = len(step.args)
    shared = tuple(pool.values[index] for index, _ in pool.args[len(pool.args) - count :])
    gradient = backward(pool, Step(step.function, (*step.inputs, *shared)))
    if gradient is not None:
        pool.add(gradient)


def _start(pool: Pool, theme: str) -> Value:
    """Add an input of the theme; a theme's sizes stay far below the limit."""
    draws = pool.draws
    # Elements of an input: room for two dozen f32 values of its size, and for about 75 element-wise
    # ops (20 of work each) on it.
    budget = draws.log_uniform(4096, max(8192.0, draws.max_bytes / 4 / 24))
    budget = min(budget, draws.max_flops / 1500)
    dtype = draws.dtype()
    if theme == "vector":
        return pool.argument(value_argument(draws.shape(int(budget), 1, 2), dtype))

    def propose() -> tuple[int, ...]:
        if theme == "image":
            side = draws.size(4, 224, IMAGES)
            return (draws.choice(BATCHES[:7]), side, side, draws.choice(CHANNELS))
        width = draws.choice(HEAD_WIDTHS) * draws.choice((1, 2, 4, 6, 8, 12, 16))
        if theme == "tokens":
            return (draws.choice(BATCHES[:7]), draws.size(4, 2048, LENGTHS), width)
        return (draws.size(1, 8192), draws.size(2, 8192, WIDTHS))

    shape = draws.closest(propose, lambda s: float(np.prod(s)), budget)
    shape = shape or {"image": (1, 8, 8, 3), "tokens": (1, 4, 32), "matrix": (8, 16)}[theme]
    value = pool.argument(value_argument(shape, dtype))
    if theme == "tokens" and draws.flip(0.3):
        pool.argument(index_argument(shape[:-1], 32000))
    return value


def _function(pool: Pool, mode: str, draws: Draws) -> tuple[Callable[..., object], tuple[Arg, ...]]:
    """The program as a function of its arguments, which returns all values without readers."""
    leaves = pool.leaves()
    # Some results are reduced, so that not every program ends in large writes.
    means = {v.index for v in leaves if v.is_float and v.rank and draws.flip(0.35)}
    args = tuple(arg for _, arg in pool.args)

    def forward(*xs: jax.Array) -> tuple[jax.Array, ...]:
        env = pool.run(xs)
        return tuple(
            jnp.mean(env[v.index], -1) if v.index in means else env[v.index] for v in leaves
        )

    wanted = tuple(i for i, arg in enumerate(args) if arg.dtype in FLOATS)
    if mode != "train" or not wanted or not any(v.is_float for v in leaves):
        return forward, args
    return _training(forward, wanted, draws.flip(0.6)), args


def _training(
    forward: Callable[..., tuple[jax.Array, ...]], wanted: tuple[int, ...], update: bool
) -> Callable[..., tuple[jax.Array, ...]]:
    """Loss, and the gradients of the wanted arguments, or these arguments after a step."""

    def loss(*xs: jax.Array) -> jax.Array | int:
        floats = [y.astype(jnp.float32) for y in forward(*xs) if y.dtype.kind in "fV"]
        return sum(jnp.mean(y * y) for y in floats)

    def function(*xs: jax.Array) -> tuple[jax.Array, ...]:
        value, grads = jax.value_and_grad(loss, wanted)(*xs)
        if update:
            # A rate of the argument's type keeps the update in that type.
            grads = tuple(xs[i] - 1e-2 * g for i, g in zip(wanted, grads, strict=True))
        return value, *grads

    return function
