"""Memory of one device of an engine: weights by part, what the engine keeps, and the cache."""

from __future__ import annotations

from itertools import accumulate

from ..step.memory import RESERVED_BYTES
from .served import EnginePlan, ServedModel

#: Share of the memory that engines may be told to take where their own share leaves no cache.
MOST_SHARE = 0.98


def memory_parts(
    capacity: float,
    model: ServedModel,
    plan: EnginePlan,
    share: float,
    *,
    told: bool = False,
    draft: ServedModel | None = None,
) -> dict[str, float]:
    """Bytes by use, in the order in which memory is taken; ``cache`` is what they leave, if any.

    Args:
        capacity: Bytes of the device.
        model: What is served.
        plan: Of the engine.
        share: Of the capacity that weights, activations and cache may take.
        told: Whether the user chose that share; else one that leaves no cache gives way to
            :data:`MOST_SHARE`.
        draft: Model that drafts beside it.
    """
    parts = model.weight_parts(plan)
    if draft is not None:
        parts["draft model"] = draft.weight_bytes(plan.of(draft))
    held, kept = sum(parts.values()), RESERVED_BYTES
    cache = capacity * share - kept - held
    if cache <= 0.0 and not told:
        share, kept = MOST_SHARE, RESERVED_BYTES / 2
        cache = capacity * share - kept - held
    reserved = {"activations and driver": kept, "left alone": capacity * (1.0 - share)}
    return {**parts, **reserved, "cache": cache}


def what_is_too_large(capacity: float, parts: dict[str, float]) -> str:
    """Which part of :func:`memory_parts` is the first that does not fit, with the sizes of all."""
    kept = parts["left alone"]
    needed = {k: v for k, v in parts.items() if k not in ("left alone", "cache")}
    totals = zip(needed, accumulate(needed.values()), strict=True)
    first = next((name for name, total in totals if total > capacity - kept), "the cache")
    weights = {k: v for k, v in parts.items() if k not in ("activations and driver", "left alone")}
    held = sum(value for name, value in weights.items() if name != "cache")
    listed = ", ".join(f"{k} {v / 2**30:.1f}" for k, v in parts.items() if k != "cache" and v)
    return (
        f"weights of {held / 2**30:.1f} GiB on a device do not fit into "
        f"{capacity / 2**30:.1f} GiB: first {first} does not (GiB: {listed})"
    )
