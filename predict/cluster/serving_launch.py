"""Flags and commands that launch a deployment under vLLM, SGLang and TensorRT-LLM."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ...simulate.serving.formats import Formats, format_in, in_formats
from ...simulate.serving.memory import memory_parts, share_of_cache
from ...simulate.serving.policies import Policy, framework_defaults
from .deployment import Deployment
from .serving_table import Workers

#: Checkpoints on huggingface.co by the names of presets; of models whose weights come in several
#: tunings, the one that follows instructions.
_CHECKPOINTS = {
    "llama-2-7b": "meta-llama/Llama-2-7b-chat-hf",
    "llama-2-13b": "meta-llama/Llama-2-13b-chat-hf",
    "llama-2-70b": "meta-llama/Llama-2-70b-chat-hf",
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B-Instruct",
    "llama-3-70b": "meta-llama/Meta-Llama-3-70B-Instruct",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama-3.1-70b": "meta-llama/Llama-3.1-70B-Instruct",
    "llama-3.1-405b": "meta-llama/Llama-3.1-405B-Instruct",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B-Instruct",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B-Instruct",
    "llama-3.3-70b": "meta-llama/Llama-3.3-70B-Instruct",
    "mistral-7b": "mistralai/Mistral-7B-Instruct-v0.1",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "mixtral-8x22b": "mistralai/Mixtral-8x22B-Instruct-v0.1",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "kimi-k2": "moonshotai/Kimi-K2-Instruct",
    "glm-4.5": "zai-org/GLM-4.5",
    "glm-4.5-air": "zai-org/GLM-4.5-Air",
    "minimax-m2": "MiniMaxAI/MiniMax-M2",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "qwen-3-8b": "Qwen/Qwen3-8B",
    "qwen-3-14b": "Qwen/Qwen3-14B",
    "qwen-3-32b": "Qwen/Qwen3-32B",
    "qwen-3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen-3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "qwen-3-coder-480b-a35b": "Qwen/Qwen3-Coder-480B-A35B-Instruct",
    "qwen-2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen-2.5-32b": "Qwen/Qwen2.5-32B-Instruct",
    "qwen-2.5-72b": "Qwen/Qwen2.5-72B-Instruct",
    "gemma-3-27b": "google/gemma-3-27b-it",
}
#: Stands for a checkpoint that opcast cannot name.
PLACEHOLDER = "MODEL"


def checkpoint_of(name: str) -> str:
    """The checkpoint that a model's name stands for in a command; :data:`PLACEHOLDER` if unknown.

    Args:
        name: Of a preset, a checkpoint with its owner, or a ``config.json``, whose folder it is in.
    """
    if name.endswith("config.json"):
        return str(Path(name).parent)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.endswith((".yaml", ".yml")):
        return name
    return _CHECKPOINTS.get(name.lower().replace("_", "-"), PLACEHOLDER)


@dataclass(frozen=True)
class Flag:
    """One setting of a launch command.

    Attributes:
        name: As it is written, such as ``--max-num-seqs``; of TensorRT-LLM also keys of its YAML
            file of options.
        value: Empty for a switch.
        why: What of the deployment it says.
        in_file: Whether it stands in the file of options instead of the command.
    """

    name: str
    value: str
    why: str
    in_file: bool = False


@dataclass(frozen=True)
class Launch:
    """How a worker of a deployment is launched.

    Attributes:
        program: Such as ``vllm serve``, the model's checkpoint included.
        flags: Its settings.
        remarks: What else has to be seen to.
    """

    program: str
    flags: tuple[Flag, ...]
    remarks: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """The command for a shell."""
        words = [self.program]
        words += [f"{f.name} {_quoted(f.value)}".strip() for f in self.flags if not f.in_file]
        lines = [f"{f.name}: {f.value}" for f in self.flags if f.in_file]
        if lines:
            # printf writes line ends where echo of bash does not.
            words.append("--extra_llm_api_options <(printf '" + "\\n".join(lines) + "\\n')")
        return " ".join(words) + (f"   # {', '.join(self.remarks)}" if self.remarks else "")

    def rows(self) -> list[dict[str, str]]:
        """The table of flags as plain data."""
        file = {False: "command", True: "file of options"}
        return [
            {"flag": f.name, "value": f.value, "in": file[f.in_file], "why": f.why}
            for f in self.flags
        ]


def _quoted(value: str) -> str:
    return f"'{value}'" if value.startswith("{") else value


def launches(own: Deployment, model: str = PLACEHOLDER) -> dict[str, Launch]:
    """How one worker of a deployment is launched under vLLM, SGLang and TensorRT-LLM.

    Flags are those of their current documentation: ``vllm serve``, ``sglang.launch_server`` and
    ``trtllm-serve``. Workers that run prompts have a command of their own, by name ``… prefill``.

    Args:
        own: What serves.
        model: Checkpoint.
    """
    found = {}
    parts = (
        [("", own.engine)]
        if own.prefill is None
        else [("prefill", own.prefill), ("decode", own.engine)]
    )
    for role, workers in parts:
        front = f"x {workers.count}, behind a router: {own.options.router}"
        if role == "decode":
            front = f"x {workers.count}"
        times = [front] if workers.count > 1 else []
        for name, (program, of) in _FRAMEWORKS.items():
            narrow = "" if _is_published_in(model, own) else _narrow(own)
            flags = tuple(of(_Worker(own, workers, role, fp8=narrow == "fp8")))
            remarks = list(times)
            if narrow and not any(flag.name == _QUANTIZED for flag in flags):
                # Their launchers take the format from the checkpoint's own configuration.
                remarks.append(f"{model} has to be a checkpoint in {narrow}")
            if own.model.cache == "int8":
                remarks.append("it has no cache in int8")
            if name == "TensorRT-LLM" and own.model.cache_layers()[2]:
                remarks.append("max_attention_window frees what windows have passed")
            if own.options.swap:
                remarks.append(_SWAP[name])
            if own.options.watermark:
                remarks.append("it has no flag for the share of the cache that is kept free")
            if own.options.drafts and own.options.draft_name not in ("ngram", "mtp"):
                remarks.append(f"the checkpoint of {own.options.draft_name} drafts")
            found[f"{name} {role}".strip()] = Launch(f"{program} {model}", flags, tuple(remarks))
    return found


#: What becomes of evicted requests: those that engines compute again have no other way.
_SWAP = {
    "vLLM": "it computes evicted requests again, caches are not swapped",
    "SGLang": "it computes evicted requests again, caches are not swapped",
    "TensorRT-LLM": "host_cache_size of kv_cache_config says how much is swapped",
}
#: What vLLM and SGLang quantise 16-bit checkpoints by when they load them; a checkpoint in fp8 runs
#: under it as well.
_QUANTIZED = "--quantization"


def _narrow(own: Deployment) -> str:
    """Formats of the weights below 16 bits; empty if there are none."""
    model = own.model
    formats = [model.weights, *([model.expert_weights] if model.workload.experts else [])]
    return " and ".join(dict.fromkeys(f for f in formats if f not in ("bf16", "f16", "f32")))


def _is_published_in(model: str, own: Deployment) -> bool:
    """Whether a checkpoint brings the formats of a deployment itself, so that no flag says them.

    vLLM refuses ``--quantization fp8`` for a checkpoint whose own configuration names another
    method, as those of compressed-tensors do.
    """
    weights = format_in(model) if model != PLACEHOLDER else ""
    if not weights:
        return False
    said = in_formats(own.model.workload, Formats(weights))
    return (said.weights, said.expert_weights, said.attention_format) == (
        own.model.weights,
        own.model.expert_weights,
        own.model.attention_format,
    )


class _Worker:
    """What the flags of one kind of workers follow from.

    Args:
        own: What serves.
        workers: One kind of its workers.
        role: Such as ``prefill``; empty where all do the same.
        fp8: Whether the engine quantises the checkpoint to fp8 when it loads it.
    """

    def __init__(self, own: Deployment, workers: Workers, role: str, *, fp8: bool) -> None:
        self.own, self.plan, self.role = own, workers.plan, role
        policy: Policy = framework_defaults(own.framework).policy
        #: Limits of a rank with sequences of its own.
        self.batch = workers.batch // workers.plan.dp or own.max_batch or policy.max_batch
        self.budget = own.token_budget or policy.token_budget
        rank = " of each rank" if workers.plan.dp > 1 else ""
        self.batch_why = f"most sequences{rank}"
        self.budget_why = f"most tokens of a pass{rank}"
        self.fp8 = fp8

    def size(self, name: str, count: int, why: str) -> Iterator[Flag]:
        """A flag of a number of devices, where it is above 1."""
        if count > 1:
            yield Flag(name, str(count), why)

    def memory(self, of: str) -> float:
        """The share of the memory as another framework's option counts it.

        Args:
            of: What that is a share of: :attr:`Framework.memory_of`.
        """
        own, capacity = self.own, self.own.spec.memory_bytes
        rules = framework_defaults(own.framework)
        parts = memory_parts(
            capacity,
            own.model,
            self.plan,
            own.options.memory,
            of=rules.memory_of,
            told=True,
            draft=own.options.draft,
        )
        return share_of_cache(capacity, parts, parts["cache"], of)


_TP, _PP = "devices that share each layer", "pipeline stages"
_DP, _EP = "ranks that attend to sequences of their own", "ranks over which experts are spread"
_FP8, _CACHE = "weights in fp8", "format of the cache"
_MEMORY, _EAGER = "share of the memory", "no CUDA graphs"
_WHOLE, _BLOCK = "prompts are not cut", "tokens of a block of the cache"
_FRESH = "nothing is kept of prompts that ended"
_DRAFTS = "drafts that a step verifies"


def _vllm(of: _Worker) -> Iterator[Flag]:
    own, plan, options = of.own, of.plan, of.own.options
    yield Flag("--tensor-parallel-size", str(plan.tp), _TP)
    yield from of.size("--pipeline-parallel-size", plan.pp, _PP)
    yield from of.size("--data-parallel-size", plan.dp, _DP)
    if plan.ep > 1:
        yield Flag("--enable-expert-parallel", "", _EP)
    yield Flag("--max-num-seqs", str(of.batch), of.batch_why)
    yield Flag("--max-num-batched-tokens", str(of.budget), of.budget_why)
    if own.chunked is False:
        yield Flag("--no-enable-chunked-prefill", "", _WHOLE)
    if of.fp8:
        yield Flag(_QUANTIZED, "fp8", _FP8)
    if own.model.cache == "fp8":
        yield Flag("--kv-cache-dtype", "fp8", _CACHE)
    if options.block:
        yield Flag("--block-size", str(options.block), _BLOCK)
    if not options.prefix_cache:
        yield Flag("--no-enable-prefix-caching", "", _FRESH)
    if options.memory:
        yield Flag("--gpu-memory-utilization", f"{of.memory('total'):.3g}", _MEMORY)
    if options.eager:
        yield Flag("--enforce-eager", "", _EAGER)
    if options.drafts:
        how: dict[str, object] = {"method": options.draft_name}
        if options.draft_name not in ("ngram", "mtp"):
            how = {"model": options.draft_name}
        how["num_speculative_tokens"] = options.drafts
        yield Flag("--speculative-config", json.dumps(how, separators=(",", ":")), _DRAFTS)
    if of.role:
        kind = "kv_producer" if of.role == "prefill" else "kv_consumer"
        config = f'{{"kv_connector":"NixlConnector","kv_role":"{kind}"}}'
        yield Flag("--kv-transfer-config", config, f"it runs {_ROLES[of.role]}")


def _sglang(of: _Worker) -> Iterator[Flag]:
    own, plan, options = of.own, of.plan, of.own.options
    yield Flag("--tp-size", str(plan.ranks), "devices of a pipeline stage")
    yield from of.size("--pp-size", plan.pp, _PP)
    if plan.dp > 1:
        yield Flag("--dp-size", str(plan.dp), _DP)
        yield Flag("--enable-dp-attention", "", _DP)
    yield from of.size("--ep-size", plan.ep, _EP)
    # Both are shared out among the ranks of attention data parallelism.
    yield Flag("--max-running-requests", str(of.batch * plan.dp), "most sequences of the engine")
    budget = -1 if own.chunked is False else of.budget * plan.dp
    why = _WHOLE if own.chunked is False else "most tokens of prompts in a pass of the engine"
    yield Flag("--chunked-prefill-size", str(budget), why)
    if of.fp8:
        yield Flag(_QUANTIZED, "fp8", _FP8)
    if own.model.cache == "fp8":
        yield Flag("--kv-cache-dtype", "fp8_e4m3", _CACHE)
    if options.block:
        yield Flag("--page-size", str(options.block), _BLOCK)
    if not options.prefix_cache:
        yield Flag("--disable-radix-cache", "", _FRESH)
    if options.memory:
        why = "share of the memory for weights and cache, without what passes need"
        yield Flag("--mem-fraction-static", f"{of.memory('static'):.3g}", why)
    if options.eager:
        yield Flag("--disable-cuda-graph", "", _EAGER)
    if options.drafts:
        algorithm = {"ngram": "NGRAM", "mtp": "EAGLE"}.get(options.draft_name, "STANDALONE")
        yield Flag("--speculative-algorithm", algorithm, "what drafts")
        if algorithm == "STANDALONE":
            yield Flag("--speculative-draft-model-path", options.draft_name, "what drafts")
        if algorithm != "NGRAM":
            yield Flag("--speculative-num-steps", str(options.drafts), "passes of what drafts")
            yield Flag("--speculative-eagle-topk", "1", "a chain of drafts, not a tree")
        tokens = str(options.drafts + 1)
        yield Flag("--speculative-num-draft-tokens", tokens, "tokens of a step, drafts and one")
    if of.role:
        yield Flag("--disaggregation-mode", of.role, f"it runs {_ROLES[of.role]}")


def _trtllm(of: _Worker) -> Iterator[Flag]:
    own, plan, options = of.own, of.plan, of.own.options
    # TensorRT-LLM counts the ranks of a stage as tp; an option says that they attend apart.
    yield Flag("--tp_size", str(plan.ranks), "devices of a pipeline stage")
    yield from of.size("--pp_size", plan.pp, _PP)
    yield from of.size("--ep_size", plan.ep, _EP)
    yield Flag("--max_batch_size", str(of.batch), of.batch_why)
    yield Flag("--max_num_tokens", str(of.budget), of.budget_why)
    if options.memory:
        why = "share for the cache of what weights leave"
        yield Flag("--kv_cache_free_gpu_memory_fraction", f"{of.memory('free'):.3g}", why)
    if own.chunked:
        yield Flag("enable_chunked_prefill", "true", "prompts may be cut", in_file=True)
    if plan.dp > 1:
        yield Flag("enable_attention_dp", "true", _DP, in_file=True)
    cache = {
        "dtype": "fp8" if own.model.cache == "fp8" else "",
        "tokens_per_block": str(options.block or ""),
        "enable_block_reuse": "" if options.prefix_cache else "false",
    }
    told = ", ".join(f"{key}: {value}" for key, value in cache.items() if value)
    if told:
        yield Flag(
            "kv_cache_config", f"{{{told}}}", "format, blocks and reuse of the cache", in_file=True
        )
    if options.eager:
        yield Flag("cuda_graph_config", "null", _EAGER, in_file=True)
    if options.drafts:
        how = {
            "ngram": f"decoding_type: NGram, max_draft_len: {options.drafts}",
            "mtp": f"decoding_type: MTP, num_nextn_predict_layers: {options.drafts}",
        }.get(
            options.draft_name,
            f"decoding_type: DraftTarget, max_draft_len: {options.drafts}, "
            f"speculative_model_dir: {options.draft_name}",
        )
        yield Flag("speculative_config", f"{{{how}}}", _DRAFTS, in_file=True)
    if of.role:
        why = f"it runs {_ROLES[of.role]}"
        yield Flag("cache_transceiver_config", "{backend: DEFAULT}", why, in_file=True)


_ROLES = {"prefill": "prompts alone", "decode": "everything after the prompts"}
#: By name: the program, and its flags.
_FRAMEWORKS: dict[str, tuple[str, Callable[[_Worker], Iterator[Flag]]]] = {
    "vLLM": ("vllm serve", _vllm),
    "SGLang": ("python -m sglang.launch_server --model-path", _sglang),
    "TensorRT-LLM": ("trtllm-serve", _trtllm),
}
