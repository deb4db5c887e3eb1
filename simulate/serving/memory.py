"""Memory of one device of an engine: weights by part, activations, and the KV cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil
from typing import NamedTuple

from ..step.memory import RESERVED_BYTES
from .policies import Framework
from .served import EnginePlan, ServedModel

#: Memory fraction used when the framework's default leaves no cache.
MOST_SHARE = 0.98
#: Layers share pages in groups of equal size: that of the rarest kind of layer, or that of the most
#: frequent one if it is less than this many times as frequent, so that fewer pages are padded
#: (vLLM, design documents, hybrid KV cache manager; the limit is that of its grouping of layers).
_ALIKE = 1.25
#: SGLang's defaults: tokens of sliding windows as a fraction of all tokens
#: (``--swa-full-tokens-ratio``), recurrent states relative to the rest of the cache
#: (``--mamba-full-memory-ratio``), and states per running sequence (``extra_buffer``); from
#: docs.sglang.io, hybrid model memory pools.
_WINDOW_SHARE, _STATE_SHARE, _STATES = 0.8, 0.9, 5
#: Granularity in tokens of attention blocks that are padded to the size of a recurrent state.
_PAGE = 16


class Pool(NamedTuple):
    """One part of the cache, from which every sequence allocates.

    Attributes:
        room: Capacity, in units of this pool.
        every: Units taken by each token of a sequence.
        recent: Units taken by each of the last :attr:`CacheLayout.window` tokens.
        fixed: Units taken by a sequence of any length.
    """

    room: float
    every: float = 1.0
    recent: float = 0.0
    fixed: float = 0.0


@dataclass(frozen=True)
class CacheLayout:
    """Layout and capacity of an engine's KV cache.

    Attributes:
        tokens: Capacity as engines log it at start-up: tokens in all layers, or in the layers
            without a window if others have a separate pool.
        pools: Parts; every sequence allocates from all of them.
        window: Tokens that windowed layers keep; 0 if all layers keep all tokens.
        block: Tokens per block of attention layers; 0 for the engine's default.
        parts: Bytes of the cache on one device by use.
    """

    tokens: int
    pools: tuple[Pool, ...]
    window: int = 0
    block: int = 0
    parts: dict[str, float] = field(default_factory=dict, compare=False)

    @property
    def plain(self) -> bool:
        """Whether a sequence takes one unit per token and nothing else."""
        return len(self.pools) == 1 and self.pools[0][1:] == (1.0, 0.0, 0.0)

    def share(self, tokens: float, recent: float, sequences: float) -> float:
        """Occupancy of the fullest pool, as a fraction.

        Args:
            tokens: Tokens of all sequences.
            recent: Those of them within the window.
            sequences: Number of sequences.
        """
        return max(
            (p.every * tokens + p.recent * recent + p.fixed * sequences) / p.room
            for p in self.pools
        )

    def share_of(self, tokens: float) -> float:
        """Fraction of the fullest pool taken by one sequence of ``tokens``."""
        return self.share(tokens, min(tokens, self.window), 1.0)


def cache_layout(
    model: ServedModel,
    plan: EnginePlan,
    framework: Framework,
    cache: float,
    *,
    drafts: int = 0,
    reuse: bool = True,
) -> CacheLayout:
    """Layout of a KV cache under the rules of a framework.

    Args:
        model: Served model.
        plan: Parallelism of the engine.
        framework: Framework whose rules apply.
        cache: Bytes of the cache on one device.
        drafts: Draft tokens per sequence that a step may reject, each with its own state.
        reuse: Whether prefixes are cached, for which SGLang keeps extra states per sequence.
    """
    full, windowed, window = model.cache_layers()
    state = model.state_bytes(plan)
    token = model.token_bytes(plan)
    states = 1 + drafts
    if not framework.frees_windows(bool(model.workload.experts)) or (
        framework.hybrid == "apart" and not full
    ):
        full, windowed, window = full + windowed, 0.0, 0
    if framework.hybrid == "apart" and (windowed or state):
        kept = cache * _STATE_SHARE / (1.0 + _STATE_SHARE) if state else 0.0
        one = token / (full + windowed)
        tokens = (cache - kept) / (one * (full + _WINDOW_SHARE * windowed)) * plan.dp
        pools, parts = [Pool(tokens)], {"recurrent states": kept} if state else {}
        if windowed:
            pools.append(Pool(_WINDOW_SHARE * tokens, every=0.0, recent=1.0))
            parts["cache of windows"] = tokens / plan.dp * one * _WINDOW_SHARE * windowed
        if state:
            room = kept / state * plan.dp
            pools.append(Pool(room, every=0.0, fixed=float((_STATES if reuse else 1) + drafts)))
        parts["cache"] = cache - sum(parts.values())
        return CacheLayout(int(tokens), tuple(pools), window, parts=parts)
    block = 0
    if framework.hybrid == "pages" and (windowed or state):
        recurrent = model.linear_layers
        kinds = [n for n in (full, windowed, recurrent) if n]
        size = max(kinds) if max(kinds) < _ALIKE * min(kinds) else min(kinds)
        one = token / (full + windowed)
        full, windowed = (ceil(n / size - 1e-9) * size for n in (full, windowed))
        token = one * (full + windowed)
        if state:
            # Attention blocks are padded to the size of a state, so that both fit one page.
            block = ceil(state / recurrent / one * plan.pp / _PAGE) * _PAGE
            state *= ceil(recurrent / size - 1e-9) * size / recurrent
    tokens = cache / token * plan.dp
    recent = windowed / (full + windowed)
    pool = Pool(tokens, 1.0 - recent, recent, states * state / token)
    return CacheLayout(int(tokens), (pool,), window, block, {"cache": cache})


@dataclass(frozen=True)
class MemoryParts:
    """Bytes of one device of an engine by use.

    Attributes:
        capacity: Memory of the device.
        weights: Weights by part of the model, in the order of allocation.
        kept: Activations and the driver.
        cache: Remainder for the KV cache; negative if the others do not fit.
        fallback: Whether the framework's default left no cache, so that :data:`MOST_SHARE` is used.
    """

    capacity: float
    weights: dict[str, float]
    kept: float
    cache: float
    fallback: bool = False

    @property
    def held(self) -> float:
        """All weights."""
        return sum(self.weights.values())

    @property
    def left(self) -> float:
        """Unused memory; 0 if the weights do not fit."""
        return max(0.0, self.capacity - self.held - self.kept - self.cache)

    def to_dict(self) -> dict[str, float]:
        """Bytes by use under display names, in the order of allocation."""
        needed = {**self.weights, "activations and driver": self.kept}
        return {**needed, "left alone": self.left, "cache": self.cache}

    def share_of(self, cache: float, of: str) -> float:
        """The memory fraction of :func:`memory_parts` that leaves ``cache`` bytes of cache.

        Args:
            cache: Bytes of the cache.
            of: Base of the fraction.
        """
        if of == "free":
            return cache / (self.capacity - self.held - self.kept)
        if of == "static":
            return (self.held + cache) / (self.capacity - RESERVED_BYTES / 2)
        return (self.held + self.kept + cache) / self.capacity

    def too_large(self) -> str:
        """Error text: the missing memory, the size of each part, and the first without room."""
        totals = zip(self.to_dict(), accumulate((*self.weights.values(), self.kept)), strict=False)
        room = self.capacity - self.left
        first = next((name for name, total in totals if total > room), "the cache")
        listed = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in self.weights.items())
        alone = f" and {self.left / 2**30:.1f} GiB left alone" if self.left else ""
        return (
            f"weights of {self.held / 2**30:.1f} GiB, {self.kept / 2**30:.1f} GiB for activations "
            f"and driver{alone} do not fit into the {self.capacity / 2**30:.1f} GiB of a device: "
            f"{max(0.0, -self.cache) / 2**30:.1f} GiB are missing, from {first} on (weights in "
            f"GiB: {listed})"
        )


def memory_parts(
    capacity: float,
    model: ServedModel,
    plan: EnginePlan,
    share: float,
    *,
    of: str = "total",
    chosen: bool = False,
    draft: ServedModel | None = None,
) -> MemoryParts:
    """Divide the memory of a device between weights, activations and cache.

    Args:
        capacity: Bytes of the device.
        model: Served model.
        plan: Parallelism of the engine.
        share: Memory fraction, as the engine's own option defines it.
        of: Base of the fraction: :attr:`~.policies.Framework.memory_of`.
        chosen: Whether the user chose the fraction; otherwise one that leaves no cache is replaced
            by :data:`MOST_SHARE`.
        draft: Draft model that runs beside it.
    """
    weights = model.weight_parts(plan)
    if draft is not None:
        weights["draft model"] = draft.weight_bytes(plan.of(draft))
    held, kept = sum(weights.values()), RESERVED_BYTES
    cache = _cache(capacity, held, kept, share, of)
    if cache > 0.0 or chosen:
        return MemoryParts(capacity, weights, kept, cache)
    kept = RESERVED_BYTES / 2
    cache = _cache(capacity, held, kept, MOST_SHARE, "total")
    return MemoryParts(capacity, weights, kept, cache, fallback=cache > 0.0)


def _cache(capacity: float, held: float, kept: float, share: float, of: str) -> float:
    """Bytes that weights (``held``) and activations (``kept``) leave for the cache."""
    if of == "free":
        free = capacity - held - kept
        return share * free if free > 0.0 else free
    if of == "static":
        # The fraction applies to memory that is free at process start-up; activations use the rest.
        return (capacity - RESERVED_BYTES / 2) * share - held
    return capacity * share - kept - held
