"""Repeated executions of a compiled program, with arguments kept valid and out of the cache."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeAlias, TypeVar

if TYPE_CHECKING:
    import jax
    import numpy as np

T = TypeVar("T")
Host: TypeAlias = "np.ndarray | jax.Array"
MakeArguments: TypeAlias = Callable[[int], Sequence[Host]]
"""Draws the arguments of a program from a seed."""

# Budgets of one program. They trade the noise of a label against the number of labels in a run, of
# which more help a model more (engineering choices; docs/measuring.md).
#: Seconds for the executions of one program.
PROGRAM_SECONDS = 1.2
#: Seconds for whole executions of a program without a trace, in one round.
WALL_SECONDS = 0.5
#: First round of executions: seconds, minimum and maximum number. Nine give a median whose 95 %
#: interval lies inside the sample; beyond 25 it narrows slowly, with the square root of the number.
_FIRST_SECONDS, _MIN_RUNS, _MAX_RUNS = 0.2, 9, 25
#: Duration in seconds from which a program gets the minimum number of executions.
LONG_SECONDS = 1.0
#: Default bytes of the last-level cache: that of a common server core complex (engineering
#: estimate).
DEFAULT_CACHE_BYTES = 32e6
#: Bounds of rotation: tiny arguments stay in the cache anyway, as they do in real programs, and
#: large ones exceed it by themselves.
_MAX_SETS = 8
_MAX_ROTATED_BYTES = 256e6
#: Programs with more argument bytes than this are traced alone, since a session keeps the arguments
#: of all its programs in memory.
SHARED_BYTES = 256e6
#: Ratio of a reading to the best one up to which the machine counts as undisturbed (engineering
#: estimate; not fitted).
STEADY = 1.4
# 0.5 MB of f32, which XLA's CPU backend spreads over several threads; 40 kernels in a row, because
# one of them is shorter than the timer's noise. A reading is the median of 3 runs; 30 readings at
# the start find the machine's best.
_ELEMENTS, _CHAIN, _RUNS, _FIRST = 131072, 40, 3, 30


def first_runs(seconds: float) -> int:
    """Executions in the first session of a program that takes ``seconds``."""
    # The minimum number may use 70 % of the budget, which leaves some for a second session.
    least = _MIN_RUNS if _MIN_RUNS * seconds <= PROGRAM_SECONDS * 0.7 else long_runs(seconds)
    return max(least, min(_MAX_RUNS, int(_FIRST_SECONDS / max(seconds, 1e-6))))


def wall_runs(seconds: float) -> int:
    """Executions for the wall time of a program that takes ``seconds``."""
    return max(long_runs(seconds), min(_MAX_RUNS, int(WALL_SECONDS / max(seconds, 1e-6))))


def long_runs(seconds: float) -> int:
    """Executions of a program so long that it gets the minimum number."""
    return 3 if seconds < LONG_SECONDS else 2


def module_name(hlo: str) -> str:
    """Name of an HLO module, as traces spell it."""
    return re.split(r"[\s,]", hlo.removeprefix("HloModule "), maxsplit=1)[0]


def rotation(argument_bytes: float, cache_bytes: float) -> int:
    """Number of argument sets that together exceed the cache; 1 for large programs."""
    if argument_bytes <= 0:
        return 1
    # A quarter more than the cache, since replacement is not exactly least-recently-used.
    wanted = math.ceil(1.25 * cache_bytes / argument_bytes)
    return max(1, min(wanted, _MAX_SETS, int(_MAX_ROTATED_BYTES / argument_bytes)))


def wait(values: T) -> T:
    """Wait until arrays are computed; returns them."""
    import jax

    ready: T = jax.block_until_ready(values)  # type: ignore[no-untyped-call]
    return ready


class Runner:
    """Executes a compiled program repeatedly.

    Donated arguments are replaced by the outputs that took their buffers, as in a training loop;
    arguments donated without such an output are restored from the host, outside the timed region.

    Args:
        run: Executes the program on a list of device arrays and returns its outputs.
        make_arguments: Draws the arguments from a seed.
        aliases: Pairs (output, parameter) that share a buffer.
        sets: Number of argument sets to rotate over.

    Attributes:
        run: As above; may be replaced by another compilation of the program.
    """

    def __init__(
        self,
        run: Callable[[list[jax.Array]], Sequence[jax.Array]],
        make_arguments: MakeArguments,
        aliases: Sequence[tuple[int, int]] = (),
        sets: int = 1,
    ) -> None:
        self.run = run
        self._make_arguments = make_arguments
        self._aliases = tuple(aliases)
        host = make_arguments(0)
        self._sets = [_put(host) for _ in range(sets)]
        self._turn = 0

    @property
    def arguments(self) -> list[list[jax.Array]]:
        """The current argument sets."""
        return self._sets

    def step(self) -> float:
        """Execute once; return the seconds from the call until the outputs are ready."""
        arguments = self._sets[self._turn]
        start = time.perf_counter()
        outputs = self.run(arguments)
        wait(outputs)
        seconds = time.perf_counter() - start
        self._restore(arguments, outputs)
        self._turn = (self._turn + 1) % len(self._sets)
        return seconds

    def launch(self) -> Sequence[jax.Array]:
        """Execute once without waiting; returns the outputs."""
        arguments = self._sets[self._turn]
        outputs = self.run(arguments)
        self._restore(arguments, outputs)
        self._turn = (self._turn + 1) % len(self._sets)
        return outputs

    def _restore(self, arguments: list[jax.Array], outputs: Sequence[jax.Array]) -> None:
        for output, parameter in self._aliases:
            arguments[parameter] = outputs[output]
        lost = [i for i, array in enumerate(arguments) if array.is_deleted()]
        if lost:
            host = self._make_arguments(0)
            for i, array in zip(lost, _put([host[i] for i in lost]), strict=True):
                arguments[i] = array


def wide_types() -> AbstractContextManager[object]:
    """JAX with 64-bit types, which it would silently halve."""
    import jax

    # Experimental in JAX before 0.8.
    place = jax if hasattr(jax, "enable_x64") else jax.experimental
    context: AbstractContextManager[object] = place.enable_x64(True)
    return context


def _put(host: Sequence[Host]) -> list[jax.Array]:
    """Arrays on the device, 64-bit types kept."""
    import jax

    with wide_types():
        arrays: list[jax.Array] = jax.device_put(list(host))
    wait(arrays)
    return arrays


class Pulse:
    """Readings of the machine's speed.

    A profiler session slows the chain itself, so readings during one are only compared with each
    other.

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
        """Take a reading: the factor by which the machine is slower than at its best.

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
    """A pulse if programs run on host processors; ``None`` on an accelerator."""
    import jax

    # Accelerators are not shared between virtual machines in this way; anchors check them.
    return Pulse(best_s) if jax.default_backend() == "cpu" else None
