"""Lowers a program with many equal layers by compiling it with four and with two of them.

Layers of a compiled program are repetitive to the kernel: what four layers have more than two are
two layers. So kernels, memory and work of ``n`` layers are those of four, and ``(n - 4) / 2`` times
the difference.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...kernels.kernel import Kernel, LoweredProgram

if TYPE_CHECKING:
    from jaxlib.mlir import ir

#: Layers of the two programs that are compiled.
FULL, HALF = 4, 2
#: With fewer layers two small programs take longer to compile than the whole: XLA compiles equal
#: kernels of one program for a GPU once, for a TPU each time (docs/lowering.md, Equal layers).
MIN_LAYERS = {"cuda": 12, "tpu": 7}


@dataclass(frozen=True)
class ShortPrograms:
    """A program with fewer layers.

    Attributes:
        layers: Layers of the whole program.
        modules: MLIR modules with :data:`FULL` and with :data:`HALF` layers.
    """

    layers: int
    modules: tuple[ir.Module, ir.Module]


def shorten(module: ir.Module, tagged: ir.Module, least: int) -> ShortPrograms | None:
    """Find equal layers, and take most of them out.

    Args:
        module: The program; it is not changed.
        tagged: A copy whose ops carry their positions, so that kernels can be traced back.
        least: Fewest layers for which it is worth it.

    Returns:
        The two short programs; ``None`` if the program has no such structure.
    """
    from ...ir.jax_compat import copy_module
    from .excise import excise
    from .find import find_repeats
    from .mlir_excise import main_function, read_table, write_excised

    function = main_function(module)
    table = read_table(function) if function is not None else None
    repeats = find_repeats(table) if table is not None else None
    if table is None or repeats is None or repeats.layers < least:
        return None
    modules = []
    for keep in (FULL, HALF):
        excision = excise(table, repeats, keep)
        short = copy_module(tagged)
        main = main_function(short)
        if excision is None or main is None or not write_excised(short, main, table, excision):
            return None
        modules.append(short)
    return ShortPrograms(repeats.layers, (modules[0], modules[1]))


def extrapolate(full: LoweredProgram, half: LoweredProgram, layers: int) -> LoweredProgram:
    """Extrapolate to the program with all its layers.

    Kernels are those of the program with :data:`FULL` layers, executed as often as they come in
    ``layers``. Those whose shapes depend on the number of layers are scaled by their bytes.

    Args:
        full: With :data:`FULL` layers.
        half: With :data:`HALF` layers.
        layers: Layers of the whole program.
    """
    steps = (layers - FULL) / (FULL - HALF)
    factors = _factors(full.kernels, half.kernels, steps)
    kernels = [
        replace(k, multiplicity=k.multiplicity * f)
        for k, f in zip(full.kernels, factors, strict=True)
    ]
    # Saved activations grow with the layers; a compiler that frees more with more layers does not
    # count.
    peak = full.peak_memory_bytes + steps * (full.peak_memory_bytes - half.peak_memory_bytes)
    note = (
        f"{layers} equal runs of ops (layers): compiled with {FULL} and with {HALF} of them; "
        "the executions of kernels and the peak memory are extrapolated"
    )
    return replace(
        full,
        kernels=kernels,
        peak_memory_bytes=max(peak, full.peak_memory_bytes),
        notes=[*full.notes, note],
        compile_seconds=full.compile_seconds + half.compile_seconds,
    )


def _factors(full: Sequence[Kernel], half: Sequence[Kernel], steps: float) -> list[float]:
    """Return how often each kernel of ``full`` stands for one."""
    # n(layers) = n(4) + steps · (n(4) - n(2)), for each distinct kernel.
    more, less = _executions(full), _executions(half)
    counts = {h: n + steps * (n - less.get(h, 0.0)) for h, n in more.items()}
    # Kernels of the long program only (stacked over layers, say), or fewer in it than in the short
    # one.
    odd = {h for h in more if h not in less or counts[h] < 0}
    gone = {h for h in less if h not in more} | (odd & set(less))
    # Kernels whose shape depends on the number of layers: all of a kind together, by bytes.
    # Such as a stack of all layers' gradients: its size grows with the layers, not its count.
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for side, kernels, chosen in ((0, full, odd), (1, half, gone)):
        for k in kernels:
            if k.hash in chosen and k.takes_time:
                sums[k.kind][side] += k.multiplicity * (k.bytes or 1.0)
    scale = {
        kind: max(1.0, 1 + steps * (have - had) / have) if have else 1.0
        for kind, (have, had) in sums.items()
    }
    return [
        scale.get(k.kind, 1.0) if k.hash in odd else counts[k.hash] / more[k.hash] for k in full
    ]


def _executions(kernels: Sequence[Kernel]) -> Counter[str]:
    executions: Counter[str] = Counter()
    for kernel in kernels:
        executions[kernel.hash] += kernel.multiplicity  # type: ignore[assignment]
    return executions
