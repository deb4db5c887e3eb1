"""What serving frameworks do by themselves: limits, order of work, use of the cache.

vLLM: https://docs.vllm.ai (engine arguments, optimisation and tuning). SGLang:
https://docs.sglang.ai (server arguments, hyperparameter tuning). TensorRT-LLM:
https://nvidia.github.io/TensorRT-LLM (batch manager, useful runtime options).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...common.errors import PlanError

#: Who gets the next request: each in turn; who has fewest; who has least to run and to keep, of the
#: request only what its cache does not have.
ROUTERS = ("round-robin", "least-loaded", "prefix-aware")


@dataclass(frozen=True)
class Policy:
    """Rules by which an engine batches.

    Attributes:
        max_batch: Most sequences at a time.
        token_budget: Most tokens of a pass, over all ranks.
        chunked: Whether a prompt may be cut where the budget ends.
        mixed: Whether prompts run beside decoding; otherwise decoding waits while there are any.
        reserve: Share of a request's output that the cache must have room for when the request is
            admitted; below 1, the last admitted are evicted where room runs out.
        swap: Whether the cache of an evicted request moves to the host and back; otherwise it is
            computed again.
        watermark: Share of the cache that stays free when a request is admitted.
        block: Tokens of a block of the cache; the last block of a sequence is half empty on
            average.
    """

    max_batch: int = 256
    token_budget: int = 8192
    chunked: bool = True
    mixed: bool = True
    reserve: float = 0.0
    swap: bool = False
    watermark: float = 0.0
    block: int = 1

    def __post_init__(self) -> None:
        """Check the limits.

        Raises:
            PlanError: One is below 1, or a share is none.
        """
        shares = 0.0 <= self.reserve <= 1.0 and 0.0 <= self.watermark < 1.0
        if min(self.max_batch, self.token_budget, self.block) < 1 or not shares:
            raise PlanError(
                f"max_batch={self.max_batch}, token_budget={self.token_budget}, "
                f"block={self.block}, reserve={self.reserve}, watermark={self.watermark}",
                hint="limits are at least 1, reserve and watermark are shares",
            )


@dataclass(frozen=True)
class Framework:
    """A framework's defaults.

    Attributes:
        policy: Rules of its scheduler.
        memory: Share of the memory, as the framework's own option counts it.
        memory_of: What that is a share of: ``total`` memory for weights, activations and cache;
            ``static`` for weights and cache alone, of the total; ``free`` for the cache, of what
            weights and activations leave.
        hybrid: What layers with a window, or with a recurrent state, take of the cache: ``pages``
            of one pool for each kind of layers, ``apart`` for pools of their own, or as much as
            all others (empty).
        nvidia: Whether it runs on NVIDIA's GPUs alone.
    """

    policy: Policy
    memory: float = 0.9
    memory_of: str = "total"
    hybrid: str = ""
    nvidia: bool = False

    def frees_windows(self, experts: bool) -> bool:
        """Whether what a window has passed is freed.

        Args:
            experts: Whether the model has experts. SGLang knows models with a pool for windows by
                name: Llama 4, gpt-oss, MiMo-V2, Step-3.5 and Gemma 4, which have experts but for
                some sizes of Gemma 4; Gemma 2, Gemma 3 and Mistral are none of them.
        """
        return self.hybrid == "pages" or (self.hybrid == "apart" and experts)


#: vLLM since V1 schedules prompts and decoding in one budget, cuts prompts, and evicts; SGLang runs
#: prompts first and admits by a ratio of the outputs that it lowers as requests end; TensorRT-LLM
#: admits what is sure to finish (``GUARANTEED_NO_EVICT``). DeepSpeed-FastGen's Dynamic SplitFuse
#: fills a budget of 2048 (Holmes et al., 2024). LMDeploy runs prompts first.
#:
#: Shares of the memory are of ``--gpu-memory-utilization`` (vLLM), ``--mem-fraction-static``
#: (SGLang), ``free_gpu_memory_fraction`` (TensorRT-LLM) and ``--cache-max-entry-count`` (LMDeploy).
#: vLLM's hybrid KV cache manager gives each kind of layers pages of one pool; SGLang has pools of
#: fixed sizes; kernels of TensorRT-LLM and of DeepSpeed-MII's FastGen are written for NVIDIA's
#: GPUs. TensorRT-LLM keeps all tokens unless ``max_attention_window`` names the windows.
FRAMEWORKS = {
    "vllm": Framework(Policy(1024, 8192, block=16), hybrid="pages"),
    "sglang": Framework(
        Policy(4096, 8192, mixed=False, reserve=0.5), 0.88, memory_of="static", hybrid="apart"
    ),
    "tensorrt-llm": Framework(
        Policy(2048, 8192, chunked=False, reserve=1.0, block=32), memory_of="free", nvidia=True
    ),
    "deepspeed-mii": Framework(Policy(512, 2048, reserve=1.0, block=64), 0.8, nvidia=True),
    "lmdeploy": Framework(Policy(256, 8192, mixed=False, block=64), 0.8, memory_of="free"),
}
#: A framework that is not known batches as vLLM does.
OTHER = FRAMEWORKS["vllm"]


def framework_defaults(name: str) -> Framework:
    """Defaults of a framework by its name in lower case."""
    return FRAMEWORKS.get(name, OTHER)


def runs_on(name: str, platform: str, vendor: str) -> bool:
    """Whether a framework runs on a device at all.

    Args:
        name: Of the framework, in lower case.
        platform: Of the device: ``cpu``, ``gpu`` or ``tpu``.
        vendor: Who makes it; empty if its description does not say.
    """
    own = platform == "gpu" and vendor in ("", "NVIDIA")
    return own or not framework_defaults(name).nvidia


#: First versions whose engines were rewritten: vLLM's V1, TensorRT-LLM's PyTorch backend.
_REWRITTEN = {"vllm": (0, 8), "tensorrt-llm": (0, 17)}


def engine_era(name: str, version: str) -> str:
    """``early`` for engines before they were rewritten, else ``now``.

    Args:
        name: Of a framework, in lower case.
        version: Of it; empty for the newest.
    """
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    return "early" if numbers and numbers < _REWRITTEN.get(name, (0, 0)) else "now"
