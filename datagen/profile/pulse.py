"""A pulse of the machine: whether all of its processors answer as fast as they can.

A neighbour on the same host can take a virtual processor away for seconds. Kernels that run on
several threads then take up to eight times as long, and single-threaded ones less than usual, while
the guest sees no other load. A short chain of small parallel kernels, timed between measurements,
reveals such moments.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

#: Reading, relative to the best one, up to which the machine counts as undisturbed (engineering
#: estimate; not fitted).
STEADY = 1.4
# 0.5 MB of f32, which XLA's CPU backend spreads over several threads; 40 kernels in a row, because
# one of them is shorter than the timer's noise. A reading is the median of 3 runs; 30 readings at
# the start find the machine's best.
_ELEMENTS, _CHAIN, _RUNS, _FIRST = 131072, 40, 3, 30


class Pulse:
    """Readings of the machine's speed.

    A profiler session makes the chain itself slower, so that readings during one are compared among
    themselves only.

    Args:
        best_s: Best ``plain`` and ``traced`` readings of an earlier process.
    """

    def __init__(self, best_s: Mapping[str, float] | None = None) -> None:
        import jax
        import jax.numpy as jnp

        # A loop, so that XLA cannot fuse the steps into one kernel.
        def chain(x: jax.Array) -> jax.Array:
            y: jax.Array = jax.lax.fori_loop(0, _CHAIN, lambda _, v: v * 1.0001 + 0.1, x)
            return y

        self._run = jax.jit(chain)
        self._argument = jnp.ones(_ELEMENTS, jnp.float32)
        # The first run compiles.
        self._time()
        self.best_s = dict(best_s or {})
        for _ in range(_FIRST):
            self.ratio()

    def ratio(self, *, traced: bool = False) -> float:
        """Take a reading: by what factor the machine is slower than at its best.

        Args:
            traced: Whether a profiler session is open.
        """
        kind = "traced" if traced else "plain"
        reading = statistics.median(self._time() for _ in range(_RUNS))
        self.best_s[kind] = min(self.best_s.get(kind, reading), reading)
        return reading / self.best_s[kind]

    def _time(self) -> float:
        start = time.perf_counter()
        self._run(self._argument).block_until_ready()
        return time.perf_counter() - start


def local_pulse(best_s: Mapping[str, float] | None = None) -> Pulse | None:
    """Return a pulse where programs run on host processors; ``None`` on an accelerator."""
    import jax

    # An accelerator is not shared between virtual machines in this way; anchors watch it.
    return Pulse(best_s) if jax.default_backend() == "cpu" else None
