"""Programs of a single op: every kind, weighted roughly by its share of time in real programs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import jax
import numpy as np

from ...common.errors import ProfileError
from .cost import Estimate, estimate
from .draws import DATA, Draft, Draws, struct
from .elementwise import BINARY, UNARY, binary, unary
from .source import Arg, ProgramSource

#: Maximum bytes and work (FLOPs) of a program on a CPU, and on an accelerator: tens of milliseconds
#: on either, so that a run measures many of them.
CPU_LIMITS = (128e6, 4e9)
ACCELERATOR_LIMITS = (2e9, 1e12)
#: Below these no op has room for even the smallest sizes.
_LEAST_BYTES = 64e3
_LEAST_FLOPS = 1e6
#: Drafts of one op, each at 0.6 of the limits of the previous one.
_ATTEMPTS = 16
#: Weights of frequent element-wise ops; the others have 0.25 each.
_COMMON_ELEMENTWISE = {"add": 2.0, "multiply": 2.0, "exponential": 1.0, "tanh": 1.0, "divide": 1.0}


@dataclass(frozen=True)
class OpKind:
    """A kind of op.

    Attributes:
        weight: Share among the samples, not normalised.
        build: Draws one.
    """

    weight: float
    build: Callable[[Draws], Draft]


def _builder(function: str) -> Callable[[Draws], Draft]:
    module, _, name = function.partition(".")
    build: Callable[[Draws], Draft] = getattr(import_module(f".{module}", __package__), name)
    return build


#: Every kind of op by name: StableHLO names, and names of small groups of ops.
OPCODES: dict[str, OpKind] = {
    **{name: OpKind(weight, _builder(own)) for name, (own, weight) in DATA["ops"].items()},
    **{
        name: OpKind(_COMMON_ELEMENTWISE.get(name, 0.25), functools.partial(build, name))
        for table, build in ((UNARY, unary), (BINARY, binary))
        for name in table
    },
}


def sample_op(
    rng: np.random.Generator,
    opcode: str | None = None,
    *,
    max_bytes: float | None = None,
    max_flops: float | None = None,
    platform: str = "",
) -> ProgramSource:
    """Draw a program of one op, its total size log-uniform within the limits.

    Args:
        rng: Source of all randomness; the same state gives the same program.
        opcode: A key of ``OPCODES``; None for one in proportion to the weights.
        max_bytes: Maximum bytes of arguments, results and intermediates alive at a time; None for
            a suitable limit for the local backend.
        max_flops: Maximum work; None for a suitable limit for the local backend. Ops that are far
            slower per FLOP than matrix products count for more, so that by default most programs
            take 2 µs to 50 ms on two CPU cores, and no longer on an accelerator.
        platform: JAX's name of the platform to lower for; empty for the local backend.

    Raises:
        ProfileError: The opcode is unknown, or the limits leave no room.
    """
    if opcode is not None and opcode not in OPCODES:
        raise ProfileError(f"no op {opcode!r} can be sampled", hint=f"ops: {', '.join(OPCODES)}")
    max_bytes, max_flops = limits(max_bytes, max_flops, (_LEAST_BYTES, _LEAST_FLOPS))
    draws = Draws(rng, max_bytes, max_flops)
    name = opcode or draws.weighted({key: kind.weight for key, kind in OPCODES.items()})
    for attempt in range(_ATTEMPTS):
        # A builder only estimates its sizes: a draft over the limits leads to a smaller one.
        shrink = 0.6**attempt
        smaller = Draws(rng, max_bytes * shrink, max_flops * shrink)
        draft = OPCODES[name].build(smaller)
        traced, cost = trace(draft, f"op_{name}")
        if cost.peak_bytes <= max_bytes and cost.work <= max_flops:
            title = "-".join(filter(None, (name, draft.note, *map(_describe, draft.args[:3]))))
            return to_source(title, f"op:{name}", draft, traced, cost, platform)
    raise ProfileError(
        f"no {name} fits within {max_bytes:.3g} bytes and {max_flops:.3g} FLOPs",
        hint="give higher limits",
    )


def limits(
    max_bytes: float | None, max_flops: float | None, least: tuple[float, float]
) -> tuple[float, float]:
    """The given limits, with suitable defaults for the local backend.

    Raises:
        ProfileError: They are below ``least``.
    """
    default = CPU_LIMITS if jax.default_backend() == "cpu" else ACCELERATOR_LIMITS
    max_bytes = default[0] if max_bytes is None else max_bytes
    max_flops = default[1] if max_flops is None else max_flops
    if max_bytes < least[0] or max_flops < least[1]:
        raise ProfileError(
            f"the limits of {max_bytes:.3g} bytes and {max_flops:.3g} FLOPs leave no room",
            hint=f"give at least {least[0]:.0f} bytes and {least[1]:.0f} FLOPs",
        )
    return max_bytes, max_flops


def trace(draft: Draft, name: str) -> tuple[jax.stages.Traced, Estimate]:
    """Trace a draft; return the result of `jax.jit(…).trace`, and the cost."""

    def main(*args: jax.Array) -> object:
        return draft.function(*args)

    main.__name__ = name  # names the module, which identifies the program in traces
    like = [struct(a.shape, a.dtype) for a in draft.args]
    # Unused arguments are kept, because values are drawn for every one of them.
    traced = jax.jit(main, keep_unused=True).trace(*like)
    return traced, estimate(traced.jaxpr)


def to_source(
    name: str,
    family: str,
    draft: Draft,
    traced: jax.stages.Traced,
    cost: Estimate,
    platform: str = "",
) -> ProgramSource:
    """Lower the result of :func:`trace` to StableHLO text for a JAX platform, or the local one."""
    text = traced.lower(lowering_platforms=(platform,) if platform else None).as_text()
    return ProgramSource(name, family, text, draft.args, cost.peak_bytes, cost.flops)


def _describe(arg: Arg) -> str:
    return f"{arg.dtype}_{'x'.join(map(str, arg.shape)) or 'scalar'}"
