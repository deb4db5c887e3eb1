"""Repeated executions of a compiled program, with arguments kept valid and out of the cache."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

if TYPE_CHECKING:
    import jax
    import numpy as np

T = TypeVar("T")
Host: TypeAlias = "np.ndarray | jax.Array"
MakeArguments: TypeAlias = Callable[[int], Sequence[Host]]
"""Draws the arguments of a program from a seed."""

#: Bytes of the last-level cache where they are unknown: the cache of a common server core complex
#: (engineering estimate).
DEFAULT_CACHE_BYTES = 32e6
#: Bounds of rotation: tiny arguments stay in the cache anyway, as they do in real programs, and
#: large ones exceed it by themselves.
_MAX_SETS = 8
_MAX_ROTATED_BYTES = 256e6


def module_name(hlo: str) -> str:
    """Return the name of an HLO module, as traces spell it."""
    return re.split(r"[\s,]", hlo.removeprefix("HloModule "), maxsplit=1)[0]


def rotation(argument_bytes: float, cache_bytes: float) -> int:
    """Return the sets of arguments that together exceed the cache; 1 for large programs."""
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
    """Executes a compiled program again and again.

    Donated arguments are fed with the outputs that took their buffers, as a training loop does;
    what was donated without such an output is put back from the host, outside the timed region.

    Args:
        run: Executes the program on a list of device arrays and returns its outputs.
        make_arguments: Draws the arguments from a seed.
        aliases: Pairs (output, parameter) that share a buffer.
        sets: Argument sets to rotate over.
    """

    def __init__(
        self,
        run: Callable[[list[jax.Array]], Sequence[jax.Array]],
        make_arguments: MakeArguments,
        aliases: Sequence[tuple[int, int]] = (),
        sets: int = 1,
    ) -> None:
        self._run = run
        self._make_arguments = make_arguments
        self._aliases = tuple(aliases)
        host = make_arguments(0)
        self._sets = [_put(host) for _ in range(sets)]
        self._turn = 0

    @property
    def arguments(self) -> list[list[jax.Array]]:
        """The argument sets as they are now."""
        return self._sets

    def step(self) -> float:
        """Execute once; return the seconds from the call until the outputs are ready."""
        arguments = self._sets[self._turn]
        start = time.perf_counter()
        outputs = self._run(arguments)
        wait(outputs)
        seconds = time.perf_counter() - start
        self._restore(arguments, outputs)
        self._turn = (self._turn + 1) % len(self._sets)
        return seconds

    def _restore(self, arguments: list[jax.Array], outputs: Sequence[jax.Array]) -> None:
        for output, parameter in self._aliases:
            arguments[parameter] = outputs[output]
        lost = [i for i, array in enumerate(arguments) if array.is_deleted()]
        if lost:
            host = self._make_arguments(0)
            for i, array in zip(lost, _put([host[i] for i in lost]), strict=True):
                arguments[i] = array


def _put(host: Sequence[Host]) -> list[jax.Array]:
    """Arrays on the device, 64-bit types kept."""
    import jax

    with jax.enable_x64(True):
        arrays: list[jax.Array] = jax.device_put(list(host))
    wait(arrays)
    return arrays
