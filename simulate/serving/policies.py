"""What serving frameworks do by themselves: limits, order of work, use of the cache.

vLLM: https://docs.vllm.ai (engine arguments, optimisation and tuning). SGLang:
https://docs.sglang.ai (server arguments, hyperparameter tuning). TensorRT-LLM:
https://nvidia.github.io/TensorRT-LLM (batch manager, useful runtime options).
"""

from __future__ import annotations

from dataclasses import dataclass

from .engine import Policy


@dataclass(frozen=True)
class Framework:
    """A framework's defaults.

    Attributes:
        policy: Rules of its scheduler.
        memory: Share of the device's memory that weights, activations and cache may take.
    """

    policy: Policy
    memory: float = 0.9


#: vLLM since V1 schedules prompts and decoding in one budget, cuts prompts, and evicts; SGLang runs
#: prompts first and admits by a ratio of the outputs that it lowers as requests end; TensorRT-LLM
#: admits what is sure to finish (``GUARANTEED_NO_EVICT``). DeepSpeed-FastGen's Dynamic SplitFuse
#: fills a budget of 2048 (Holmes et al., 2024). LMDeploy runs prompts first.
FRAMEWORKS = {
    "vllm": Framework(Policy(1024, 8192)),
    "sglang": Framework(Policy(4096, 8192, mixed=False, reserve=0.5), 0.88),
    "tensorrt-llm": Framework(Policy(2048, 8192, chunked=False, reserve=1.0)),
    "deepspeed-mii": Framework(Policy(512, 2048, reserve=1.0), 0.8),
    "lmdeploy": Framework(Policy(256, 8192, mixed=False), 0.8),
}
#: A framework that is not known batches as vLLM does.
OTHER = FRAMEWORKS["vllm"]


def framework_defaults(name: str) -> Framework:
    """Defaults of a framework by its name in lower case."""
    return FRAMEWORKS.get(name, OTHER)
