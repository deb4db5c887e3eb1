"""Why requests of a simulated run wait: a closed loop in lock-step, and the limit that binds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...models.serving.ends import SATURATED
from ...simulate.serving.latencies import queued_share, typical_wait
from ...simulate.serving.load import Load, Run
from ...simulate.serving.policies import framework_defaults
from .deployment import Deployment
from .serving_run import Simulated, run_load

#: Coefficient of variation of output lengths up to which the requests of a closed loop stay in
#: lock-step: at 3 %, 16 and 64 requests of Llama 3.1 70B wait 1.1 and 1.2 times as long as at 12 %,
#: at 0 % four times as long.
LOCK_STEP = 0.03
#: Lengths of requests that drift apart, relative to the mean: uniform between these. A choice.
DRIFT = (0.8, 1.2)


def drifted(load: Load, seed: int) -> tuple[str, Load] | None:
    """Spread the lengths of a closed loop whose requests start and end together.

    Args:
        load: The requests.
        seed: Random seed of the lengths.

    Returns:
        The option that spreads them, and the load; ``None`` if the requests drift apart already.
        Prompts are spread where outputs are too short to differ.
    """
    outputs = load.outputs
    if not 1 < load.concurrency < len(outputs) or outputs.std() > LOCK_STEP * outputs.mean():
        return None
    for name, lengths in (("output", outputs), ("prompt", load.prompts)):
        least, most = (round(share * float(lengths.mean())) for share in DRIFT)
        if least < most:
            drawn = np.random.default_rng(seed).integers(least, most + 1, len(lengths))
            outputs, prompts = (drawn, load.prompts) if name == "output" else (outputs, drawn)
            option = f"--{name} uniform:{least}:{most}"
            return option, replace(load, prompts=prompts, outputs=outputs)
    return None


def waits(load: Load, run: Run) -> bool:
    """Return whether requests spend most of their time to the first token waiting."""
    share = typical_wait(load, run) if load.concurrency else queued_share(load, run)
    return share > SATURATED


def why_waiting(found: Simulated) -> str:
    """Return a note on a load without arrivals whose requests mostly wait; empty if they do not."""
    if not waits(found.load, found.run):
        return ""
    said = "most of the time to the first token is spent waiting"
    if rule := _batching_rule(found):
        return f"{said} {rule}"
    limit = binding_limit(found)
    return f"the engines are saturated: {said}{f' for room in {limit}' if limit else ''}"


def _batching_rule(found: Simulated) -> str:
    """Return the rule for which prompts wait, if without it they would hardly wait."""
    policy = found.stations[0].policy
    if policy.poll == 1 and not policy.gather:
        return ""
    free = [replace(s, policy=replace(s.policy, poll=1, gather=0)) for s in found.stations]
    if waits(found.load, run_load(found.deployment, found.load, free, found.delay, record=False)):
        return ""
    if policy.poll > 1:
        return f"for the next check for new requests, every {policy.poll} passes (--recv-interval)"
    told = found.deployment.options.batch_wait_iters
    whose = "--batch-wait-iters" if told else f"the default of {found.deployment.framework} with dp"
    return f"to be batched with other prompts, for up to {policy.gather} passes ({whose})"


def binding_limit(found: Simulated) -> str:
    """Return the limit of the engines that keeps requests waiting, and what sets it, or empty."""
    load, run, own = found.load, found.run, found.deployment
    policy, cache = found.stations[0].policy, found.stations[0].cache
    if own.prefill is not None:
        return ""
    asked = load.concurrency or len(load.outputs)
    if run.largest_batch >= policy.max_batch and asked > policy.max_batch * own.engine.count:
        return f"a batch of {policy.max_batch} sequences ({_batch_limit(own)})"
    longest = int((load.prompts + load.outputs).max())
    apart = asked > run.largest_batch * own.engine.count or run.evicted
    if (
        apart
        and run.largest_cache / cache.tokens + cache.share_of(longest) > 1.0 - policy.watermark
    ):
        return f"the KV cache of {cache.tokens} tokens (--memory and --kv-cache change it)"
    return ""


def _batch_limit(own: Deployment) -> str:
    """Return what sets the batch limit of an engine."""
    if own.engine.batch or own.options.max_batch:
        return "--max-batch"
    drafting = own.options.drafts and framework_defaults(own.framework).drafting
    whose = f"the default of {own.framework or 'the framework'}{' while drafting' * bool(drafting)}"
    return f"{whose}; --max-batch sets another"
