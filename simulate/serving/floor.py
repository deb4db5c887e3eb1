"""Lower bounds on latencies: the roofline at the rates of a device's data sheet.

Only indispensable work counts, so that the bound holds whatever the kernels: the weights that one
sequence activates and its KV cache are read once, and its prompt is multiplied at the dense peak of
its operands (Williams et al., Roofline, 2009). Collectives, launches and passes over activations
cost nothing. Caches of layers that see only part of the context (through a window, in chunks or by
an indexer) are left out, and so are the weights that the device's last-level cache may hold.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...features.cost.formats import FORMATS
from ...features.devices.device import DeviceSpec
from ...features.operators.op import Op
from .forward import decode_ops, head_ops, prefill_ops, token_ops
from .served import EnginePlan, ServedModel, kinds_of


class Floors(NamedTuple):
    """Lower bounds in seconds for each request, shape ``(n,)``.

    Attributes:
        ttft: Time to the first token.
        tpot: Mean time per output token after the first.
        e2e: Time to the last token.
    """

    ttft: np.ndarray
    tpot: np.ndarray
    e2e: np.ndarray


#: No bounds.
NO_FLOOR = Floors(np.zeros(1), np.zeros(1), np.zeros(1))


class EngineFloor:
    """Lower bounds for one model on one kind of engine.

    Args:
        model: Served model.
        plan: Parallelism of the engine.
        spec: Specification of its devices.
    """

    def __init__(self, model: ServedModel, plan: EnginePlan, spec: DeviceSpec) -> None:
        self.model, self.plan, self.spec = model, plan, spec
        self.partial = any(layer.window for layer in kinds_of(model.workload))
        ops = token_ops(model, plan, 1)
        # A token passes all pipeline stages, each of which may hold weights in its cache.
        weights = sum(self._weights(op) * count for op, count in [*ops, *head_ops(model, plan, 1)])
        kept = spec.cache_bytes * plan.pp
        #: Seconds to read the weights that one token activates.
        self.reading = max(0.0, weights - kept) / spec.bandwidth
        # Pipeline stages run chunks of one prompt concurrently.
        self._token = sum(self._multiplying(op) * count for op, count in ops) / plan.pp

    def first_token(self, prompts: np.ndarray, found: np.ndarray) -> np.ndarray:
        """Least seconds to run prompts, shape ``(n,)``.

        Args:
            prompts: Prompt lengths in tokens.
            found: Prefix-cache hits in tokens.
        """
        new = prompts - found
        seconds = new * self._token
        if not self.partial:
            # Causal attention: each token attends to itself and all earlier ones.
            pairs = new * (found + (new + 1.0) / 2.0)
            # FLOPs of one query-key pair, from one token that attends to itself.
            one = sum(op.flops() * n for op, n in prefill_ops(self.model, self.plan, 1, 1, 0))
            peak = FORMATS[self.model.cache].peak_on(self.spec)
            seconds = seconds + pairs * one / peak / self.plan.pp
        return np.asarray(np.maximum(seconds, self.reading))

    def further_token(
        self, prompts: np.ndarray, outputs: np.ndarray, accepted: float
    ) -> np.ndarray:
        """Least seconds per output token after the first, shape ``(n,)``.

        Args:
            prompts: Prompt lengths in tokens.
            outputs: Output lengths in tokens.
            accepted: Tokens that a pass yields.
        """
        cached = 0.0
        if not self.partial:
            # Cost of one more token in the cache, which grows by one per pass.
            one, two = (
                sum(op.moved() * n for op, n in decode_ops(self.model, self.plan, 1, length))
                for length in (1, 2)
            )
            cached = (two - one) / self.spec.bandwidth
        return (self.reading + cached * (prompts + outputs / 2.0)) / accepted

    def _weights(self, op: Op) -> float:
        """Bytes of the weights that one token activates."""
        s, one = op.shape, FORMATS[op.dtype].weight_bytes
        if op.family == "linear":
            return one * s[1] * s[2]
        if op.family == "bmm":
            # Up-projections of latent attention: in 16 bits, or in the format of attention.
            own = min(one, FORMATS[self.model.attention_format].weight_bytes)
            return own * s[0] * s[2] * s[3]
        if op.family == "moe":
            _, hidden, inter, topk, _, tp, ep = s
            # Of all ranks, the one with most of the chosen experts holds at least one.
            return one * 3.0 * max(1.0, topk / ep) * hidden * inter / tp
        return 0.0

    def _multiplying(self, op: Op) -> float:
        """Seconds of the products of one token."""
        own = self.model.attention_format if op.family == "bmm" else op.dtype
        # The operator list holds one token of every rank for the experts.
        alone = self.plan.dp if op.family == "moe" else 1
        return op._replace(dtype=own).least_s(self.spec) / alone


def floors(
    model: ServedModel,
    spec: DeviceSpec,
    plan: EnginePlan,
    prefill: EnginePlan,
    prompts: np.ndarray,
    outputs: np.ndarray,
    found: np.ndarray,
    accepted: float = 1.0,
) -> Floors:
    """Lower bounds on the latencies of requests.

    Args:
        model: Served model.
        spec: Specification of the engines' devices.
        plan: Parallelism of the decoding engines.
        prefill: Parallelism of the prefill engines; equal to ``plan`` if there are none.
        prompts: Prompt lengths in tokens, shape ``(n,)``.
        outputs: Output lengths in tokens, shape ``(n,)``.
        found: Prefix-cache hits in tokens, shape ``(n,)``.
        accepted: Tokens that a decoding pass yields.
    """
    decoding = EngineFloor(model, plan, spec)
    ahead = decoding if prefill == plan else EngineFloor(model, prefill, spec)
    first = ahead.first_token(prompts, found)
    further = decoding.further_token(prompts, outputs, accepted)
    return Floors(first, further, first + further * np.maximum(outputs - 1.0, 0.0))
