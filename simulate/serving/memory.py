"""Memory of one device of an engine: weights by part, what the engine keeps, and the cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil
from typing import NamedTuple

from ..step.memory import RESERVED_BYTES
from .policies import Framework
from .served import EnginePlan, ServedModel

#: Share of the memory that engines may be told to take where their own share leaves no cache.
MOST_SHARE = 0.98
#: Layers of one kind share pages with those of another in groups of equal size, that of the rarest
#: kind unless the others are hardly more: then fewer pages are padded (vLLM, design documents,
#: hybrid KV cache manager; the limit is that of its grouping of layers).
_ALIKE = 1.25
#: Tokens of sliding windows that SGLang has room for, of those of all tokens
#: (``--swa-full-tokens-ratio``), recurrent states against the rest of the cache
#: (``--mamba-full-memory-ratio``), and states of a running sequence (``extra_buffer``): defaults of
#: docs.sglang.io, hybrid model memory pools.
_WINDOW_SHARE, _STATE_SHARE, _STATES = 0.8, 0.9, 5
#: Tokens that blocks of attention are a multiple of where they are as large as a state.
_PAGE = 16


class Pool(NamedTuple):
    """One part of the cache, which a sequence takes from by its length.

    Attributes:
        room: What it holds, in units of its own.
        every: What each token of a sequence takes.
        recent: What each of the last :attr:`CacheLayout.window` tokens takes.
        fixed: What a sequence takes, however long it is.
    """

    room: float
    every: float = 1.0
    recent: float = 0.0
    fixed: float = 0.0


@dataclass(frozen=True)
class CacheLayout:
    """What the cache of an engine holds.

    Attributes:
        tokens: As engines log it when they start: those of a sequence in all layers, or in the
            layers without a window where others have a pool of their own.
        pools: Parts; every sequence takes from all of them.
        window: Tokens that some layers keep; 0 where all keep all of them.
        block: Tokens of a block of layers with attention; 0 for the engine's own.
        parts: Bytes of the cache of a device by use.
    """

    tokens: int
    pools: tuple[Pool, ...]
    window: int = 0
    block: int = 0
    parts: dict[str, float] = field(default_factory=dict, compare=False)

    @property
    def plain(self) -> bool:
        """Whether a sequence takes as many tokens as it has, and nothing else counts."""
        return len(self.pools) == 1 and self.pools[0][1:] == (1.0, 0.0, 0.0)

    def share(self, tokens: float, recent: float, sequences: float) -> float:
        """Share of the fullest part that is taken.

        Args:
            tokens: Of all sequences.
            recent: Of all sequences, those within the window.
            sequences: How many there are.
        """
        return max(
            (p.every * tokens + p.recent * recent + p.fixed * sequences) / p.room
            for p in self.pools
        )

    def share_of(self, tokens: float) -> float:
        """Share of the fullest part that one sequence of so many tokens takes."""
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
    """What a cache holds under the rules of a framework.

    Args:
        model: What is served.
        plan: Of the engine.
        framework: Whose rules.
        cache: Bytes of a device.
        drafts: Tokens of a sequence that a step may take back, each with a state of its own.
        reuse: Whether prefixes are kept, for which SGLang holds further states of each sequence.
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
            # Blocks of attention are as large as a state, so that both fit one page.
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
        capacity: Of the device.
        weights: By part of the model, in the order in which memory is taken.
        kept: Of activations and the driver.
        cache: What these leave; negative where they are too large.
        gave_way: Whether the framework's own share of the memory left no cache, so that
            :data:`MOST_SHARE` is taken.
    """

    capacity: float
    weights: dict[str, float]
    kept: float
    cache: float
    gave_way: bool = False

    @property
    def held(self) -> float:
        """All weights."""
        return sum(self.weights.values())

    @property
    def left(self) -> float:
        """What nobody takes; weights that are too large leave nothing."""
        return max(0.0, self.capacity - self.held - self.kept - self.cache)

    def to_dict(self) -> dict[str, float]:
        """Bytes by use as they are shown, in the order in which memory is taken."""
        needed = {**self.weights, "activations and driver": self.kept}
        return {**needed, "left alone": self.left, "cache": self.cache}

    def share_of(self, cache: float, of: str) -> float:
        """The share, as of :func:`memory_parts`, that leaves a cache of so many bytes.

        Args:
            cache: Bytes.
            of: What the share is of.
        """
        if of == "free":
            return cache / (self.capacity - self.held - self.kept)
        if of == "static":
            return (self.held + cache) / (self.capacity - RESERVED_BYTES / 2)
        return (self.held + self.kept + cache) / self.capacity

    def too_large(self) -> str:
        """How much is missing, what each part takes, and which is the first without room."""
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
    told: bool = False,
    draft: ServedModel | None = None,
) -> MemoryParts:
    """How the memory of a device is taken.

    Args:
        capacity: Bytes of the device.
        model: What is served.
        plan: Of the engine.
        share: As the engine's own option has it.
        of: What that is a share of: :attr:`~.policies.Framework.memory_of`.
        told: Whether the user chose that share; else one that leaves no cache gives way to
            :data:`MOST_SHARE`.
        draft: Model that drafts beside it.
    """
    weights = model.weight_parts(plan)
    if draft is not None:
        weights["draft model"] = draft.weight_bytes(plan.of(draft))
    held, kept = sum(weights.values()), RESERVED_BYTES
    cache = _cache(capacity, held, kept, share, of)
    if cache > 0.0 or told:
        return MemoryParts(capacity, weights, kept, cache)
    kept = RESERVED_BYTES / 2
    cache = _cache(capacity, held, kept, MOST_SHARE, "total")
    return MemoryParts(capacity, weights, kept, cache, gave_way=cache > 0.0)


def _cache(capacity: float, held: float, kept: float, share: float, of: str) -> float:
    """Bytes that weights of ``held`` and activations of ``kept`` bytes leave for the cache."""
    if of == "free":
        free = capacity - held - kept
        return share * free if free > 0.0 else free
    if of == "static":
        # Weights and cache take a share of what is free when the process has started; activations
        # have the rest to themselves.
        return (capacity - RESERVED_BYTES / 2) * share - held
    return capacity * share - kept - held
