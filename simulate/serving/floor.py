"""Times that no engine falls below: the roofline at the rates of a device's data sheet.

Counted is only what a pass cannot do without, so that the floor holds whatever the kernels: the
weights that one sequence reaches and its own cache are read once, and its prompt is multiplied at
the dense peak of its operands (Williams et al., Roofline, 2009). Collectives, launches and passes
over activations are free; caches of the layers that see a part of what came before, through a
window, in chunks or by an indexer, are left out, and so is what the last cache of the device may
hold of the weights.
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
    """Least seconds of each request, shape ``(n,)``.

    Attributes:
        ttft: To its first token.
        tpot: Of each further token on average.
        e2e: To its last token.
    """

    ttft: np.ndarray
    tpot: np.ndarray
    e2e: np.ndarray


#: Where nothing is known.
NO_FLOOR = Floors(np.zeros(1), np.zeros(1), np.zeros(1))


class EngineFloor:
    """Floors of one model on one kind of engine.

    Args:
        model: What is served.
        plan: Of the engine.
        spec: Its devices.
    """

    def __init__(self, model: ServedModel, plan: EnginePlan, spec: DeviceSpec) -> None:
        self.model, self.plan, self.spec = model, plan, spec
        self.partial = any(layer.window for layer in kinds_of(model.workload))
        ops = token_ops(model, plan, 1)
        # A token passes all stages of a pipeline, each of which may keep something in its cache.
        weights = sum(self._weights(op) * count for op, count in [*ops, *head_ops(model, plan, 1)])
        kept = spec.cache_bytes * plan.pp
        #: Seconds of reading the weights that one token reaches.
        self.reading = max(0.0, weights - kept) / spec.bandwidth
        # Stages run chunks of one prompt side by side.
        self._token = sum(self._multiplying(op) * count for op, count in ops) / plan.pp

    def first_token(self, prompts: np.ndarray, found: np.ndarray) -> np.ndarray:
        """Least seconds to run prompts, shape ``(n,)``.

        Args:
            prompts: Tokens of each.
            found: How many of them a cache has already.
        """
        new = prompts - found
        seconds = new * self._token
        if not self.partial:
            # Causal attention: each token sees itself and all before it.
            pairs = new * (found + (new + 1.0) / 2.0)
            # One token that sees itself alone is one pair.
            one = sum(op.flops() * n for op, n in prefill_ops(self.model, self.plan, 1, 1, 0))
            peak = FORMATS[self.model.cache].peak_on(self.spec)
            seconds = seconds + pairs * one / peak / self.plan.pp
        return np.asarray(np.maximum(seconds, self.reading))

    def further_token(
        self, prompts: np.ndarray, outputs: np.ndarray, accepted: float
    ) -> np.ndarray:
        """Least seconds of a further token, shape ``(n,)``.

        Args:
            prompts: Tokens of each prompt.
            outputs: Tokens that each request makes.
            accepted: Tokens that a pass yields.
        """
        cached = 0.0
        if not self.partial:
            # What one token more in the cache adds; the cache grows by one from pass to pass.
            one, two = (
                sum(op.moved() * n for op, n in decode_ops(self.model, self.plan, 1, length))
                for length in (1, 2)
            )
            cached = (two - one) / self.spec.bandwidth
        return (self.reading + cached * (prompts + outputs / 2.0)) / accepted

    def _weights(self, op: Op) -> float:
        """Bytes of the weights that one token reaches."""
        s, one = op.shape, FORMATS[op.dtype].weight_bytes
        if op.family == "linear":
            return one * s[1] * s[2]
        if op.family == "bmm":
            # Up-projections of latent attention: in 16 bits, or as its other weights.
            own = min(one, FORMATS[self.model.attention_format].weight_bytes)
            return own * s[0] * s[2] * s[3]
        if op.family == "moe":
            _, hidden, inter, topk, _, tp, ep = s
            # The rank that holds most of the chosen experts holds one at least.
            return one * 3.0 * max(1.0, topk / ep) * hidden * inter / tp
        return 0.0

    def _multiplying(self, op: Op) -> float:
        """Seconds of the products of one token."""
        own = self.model.attention_format if op.family == "bmm" else op.dtype
        # Experts are asked for with a token of every rank.
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
    """Least times of requests.

    Args:
        model: What is served.
        spec: Devices of the engines.
        plan: Of the engines that decode.
        prefill: Of those that run prompts; the same where they are no others.
        prompts: Tokens of each prompt, shape ``(n,)``.
        outputs: Tokens that each request makes.
        found: Tokens of each prompt that a cache has already.
        accepted: Tokens that a decoding pass yields.
    """
    decoding = EngineFloor(model, plan, spec)
    ahead = decoding if prefill == plan else EngineFloor(model, prefill, spec)
    first = ahead.first_token(prompts, found)
    further = decoding.further_token(prompts, outputs, accepted)
    return Floors(first, further, first + further * np.maximum(outputs - 1.0, 0.0))
