"""Flags and commands that launch a deployment under vLLM, SGLang and TensorRT-LLM."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...simulate.serving.checkpoints import UNKNOWN, Checkpoint
from ...simulate.serving.formats import Formats, format_in, in_formats
from ...simulate.serving.policies import Policy, framework_defaults, runs_on
from ...simulate.serving.served import EnginePlan
from .deployment import Deployment, Workers
from .serving_engine import engine_cache, engine_memory


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


def launches(
    own: Deployment, checkpoint: Checkpoint = UNKNOWN, longest: int = 0
) -> dict[str, Launch]:
    """How one worker of a deployment is launched under vLLM, SGLang and TensorRT-LLM.

    Those that do not run on its device are left out.

    Flags are those of their current documentation: ``vllm serve``, ``sglang.launch_server`` and
    ``trtllm-serve``. Workers that run prompts have a command of their own, by name ``… prefill``.

    Args:
        own: What serves.
        checkpoint: Of the model.
        longest: Tokens of the longest request that it has to serve.
    """
    found, model = {}, checkpoint.name
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
        narrow = "" if _is_published_in(checkpoint, own) else _narrow(own)
        limit = _longest(own, workers, checkpoint.context or _LONG, longest)
        known = limit if checkpoint.context else 0
        worker = _Worker(own, workers, role, fp8=narrow == "fp8", limit=known)
        for name, (program, of) in _FRAMEWORKS.items():
            if not runs_on(name.lower(), own.spec.platform, own.spec.vendor):
                continue
            flags = tuple(of(worker))
            remarks = list(times)
            if worker.taken.gave_way:
                remarks.append(
                    "the default share of the memory leaves no cache, so that nearly all is taken"
                )
            if limit and not known:
                remarks.append(f"give {_LIMITS[name]} if {model} takes more than {limit} tokens")
            if narrow and not any(flag.name == _QUANTIZED for flag in flags):
                # Their launchers take the format from the checkpoint's own configuration.
                remarks.append(f"{model} has to be a checkpoint in {narrow}")
            if own.model.cache == "int8":
                remarks.append("it has no cache in int8")
            if name == "TensorRT-LLM" and own.model.cache_layers()[2]:
                remarks.append("max_attention_window frees what windows have passed")
            if name == "TensorRT-LLM" and workers.plan.dp > 1 and workers.plan.tp > 1:
                # Its attention is either cut over all ranks or not at all (docs.nvidia.com/dynamo,
                # attention data parallelism: its size is tp_size).
                remarks.append(
                    f"its attention runs apart on all {workers.plan.ranks} ranks, here on "
                    f"{workers.plan.dp} groups of {workers.plan.tp}"
                )
            if own.options.preemption == "swap":
                remarks.append(_SWAP[name])
            if own.options.watermark:
                remarks.append("it has no flag for the share of the cache that is kept free")
            if own.options.drafts and own.options.draft not in ("ngram", "mtp"):
                remarks.append(f"the checkpoint of {own.options.draft} drafts")
            found[f"{name} {role}".strip()] = Launch(f"{program} {model}", flags, tuple(remarks))
    return found


#: Tokens that a model may take whose configuration is not known; longer ones are rare.
_LONG = 131072
#: Share of the cache that the longest request may take where its tokens are limited to what fits,
#: since what activations take is an estimate; engineering choice.
_FILLED = 0.9
#: Flags that limit the tokens of a request.
_LIMITS = {
    "vLLM": "--max-model-len",
    "SGLang": "--context-length",
    "TensorRT-LLM": "--max_seq_len",
}


def _longest(own: Deployment, workers: Workers, context: int, asked: int) -> int:
    """Tokens that requests have to be limited to, since the cache holds no more; 0 for no limit.

    vLLM does not start where one request of all the tokens that its model takes does not fit.

    Args:
        own: What serves.
        workers: Some of its workers.
        context: Tokens that the model takes.
        asked: Tokens of the longest request that has to be served.
    """
    if engine_memory(own, workers).cache <= 0.0:
        return 0
    layout = engine_cache(own, workers)
    # Each rank with sequences of its own has its share of the cache.
    ranks = workers.plan.dp
    if layout.share_of(context) * ranks <= 1.0:
        return 0
    room = bisect_right(range(context), _FILLED, key=lambda n: layout.share_of(n) * ranks) - 1
    return min(context, max(asked, room))


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


def _is_published_in(checkpoint: Checkpoint, own: Deployment) -> bool:
    """Whether a checkpoint brings the formats of a deployment itself, so that no flag says them.

    vLLM refuses ``--quantization fp8`` for a checkpoint whose own configuration names another
    method, as those of compressed-tensors do.
    """
    weights = format_in(checkpoint.name) if checkpoint != UNKNOWN else ""
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
        limit: Most tokens of a request, fewer than its model takes; 0 for no limit.
    """

    def __init__(
        self, own: Deployment, workers: Workers, role: str, *, fp8: bool, limit: int = 0
    ) -> None:
        self.own, self.plan, self.role, self.limit = own, workers.plan, role, limit
        self.taken = engine_memory(own, workers)
        policy: Policy = framework_defaults(own.framework).policy
        #: Limits of a rank with sequences of its own.
        self.batch = workers.batch or own.options.max_batch or policy.max_batch
        self.budget = own.options.token_budget or policy.token_budget
        rank = " of each rank" if workers.plan.dp > 1 else ""
        self.batch_why = f"most sequences{rank}"
        self.budget_why = f"most tokens of a pass{rank}"
        self.fp8 = fp8

    def size(self, name: str, count: int, why: str) -> Iterator[Flag]:
        """A flag of a number of devices, where it is above 1."""
        if count > 1:
            yield Flag(name, str(count), why)

    def memory(self, name: str, of: str, why: str) -> Iterator[Flag]:
        """The share of the memory as a framework's option counts it, where it is not the default.

        Args:
            name: Of the flag.
            of: What that is a share of: :attr:`Framework.memory_of`.
            why: What it says.
        """
        if self.own.options.memory or self.taken.gave_way:
            share = self.taken.share_of(self.taken.cache, of)
            yield Flag(name, f"{share:.3g}", why)

    def limited(self, name: str) -> Iterator[Flag]:
        """A flag of the longest request, where the cache holds less than the model takes."""
        if self.limit:
            yield Flag(_LIMITS[name], str(self.limit), _LIMIT)


_TP, _PP = "devices that share each layer", "pipeline stages"
_DP, _EP = "ranks that attend to sequences of their own", "ranks over which experts are spread"
_SPREAD = "whole experts are spread over all ranks instead of being cut over them"
_FP8, _CACHE = "weights in fp8", "format of the cache"
_MEMORY, _EAGER = "share of the memory", "no CUDA graphs"


def _ranks(plan: EnginePlan) -> str:
    """What SGLang and TensorRT-LLM count as tp: ranks that attend apart are among them."""
    if plan.dp == 1:
        return _TP
    return "devices that share each layer's products; attention runs apart on groups of them"


_LIMIT = "tokens of a request, more of which the cache does not hold"
_WHOLE, _BLOCK = "prompts are not cut", "tokens of a block of the cache"
_FRESH = "nothing is kept of prompts that ended"
_DRAFTS = "drafts that a step verifies"


def _vllm(of: _Worker) -> Iterator[Flag]:
    own, plan, options = of.own, of.plan, of.own.options
    yield Flag("--tensor-parallel-size", str(plan.tp), _TP)
    yield from of.size("--pipeline-parallel-size", plan.pp, _PP)
    yield from of.size("--data-parallel-size", plan.dp, _DP)
    if plan.ep > 1:
        yield Flag("--enable-expert-parallel", "", _SPREAD)
    yield Flag("--max-num-seqs", str(of.batch), of.batch_why)
    yield Flag("--max-num-batched-tokens", str(of.budget), of.budget_why)
    if own.options.chunked is False:
        yield Flag("--no-enable-chunked-prefill", "", _WHOLE)
    if of.fp8:
        yield Flag(_QUANTIZED, "fp8", _FP8)
    if own.model.cache == "fp8":
        yield Flag("--kv-cache-dtype", "fp8", _CACHE)
    if options.block:
        yield Flag("--block-size", str(options.block), _BLOCK)
    if not options.prefix_cache:
        yield Flag("--no-enable-prefix-caching", "", _FRESH)
    yield from of.memory("--gpu-memory-utilization", "total", _MEMORY)
    yield from of.limited("vLLM")
    if options.eager:
        yield Flag("--enforce-eager", "", _EAGER)
    if options.drafts:
        how: dict[str, object] = {"method": options.draft}
        if options.draft not in ("ngram", "mtp"):
            how = {"model": options.draft}
        how["num_speculative_tokens"] = options.drafts
        yield Flag("--speculative-config", json.dumps(how, separators=(",", ":")), _DRAFTS)
    if of.role:
        kind = "kv_producer" if of.role == "prefill" else "kv_consumer"
        config = f'{{"kv_connector":"NixlConnector","kv_role":"{kind}"}}'
        yield Flag("--kv-transfer-config", config, f"it runs {_ROLES[of.role]}")


def _sglang(of: _Worker) -> Iterator[Flag]:
    own, plan, options = of.own, of.plan, of.own.options
    yield Flag("--tp-size", str(plan.ranks), _ranks(plan))
    yield from of.size("--pp-size", plan.pp, _PP)
    if plan.dp > 1:
        yield Flag("--dp-size", str(plan.dp), _DP)
        yield Flag("--enable-dp-attention", "", "attention by data, the rest of a layer by tensors")
    yield from of.size("--ep-size", plan.ep, _EP)
    # Both are shared out among the ranks of attention data parallelism.
    yield Flag("--max-running-requests", str(of.batch * plan.dp), "most sequences of the engine")
    budget = -1 if own.options.chunked is False else of.budget * plan.dp
    why = (
        _WHOLE if own.options.chunked is False else "most tokens of prompts in a pass of the engine"
    )
    yield Flag("--chunked-prefill-size", str(budget), why)
    if of.fp8:
        yield Flag(_QUANTIZED, "fp8", _FP8)
    if own.model.cache == "fp8":
        yield Flag("--kv-cache-dtype", "fp8_e4m3", _CACHE)
    if options.block:
        yield Flag("--page-size", str(options.block), _BLOCK)
    if not options.prefix_cache:
        yield Flag("--disable-radix-cache", "", _FRESH)
    why = "share of the memory for weights and cache, without what passes need"
    yield from of.memory("--mem-fraction-static", "static", why)
    yield from of.limited("SGLang")
    if options.eager:
        yield Flag("--disable-cuda-graph", "", _EAGER)
    if options.drafts:
        algorithm = {"ngram": "NGRAM", "mtp": "EAGLE"}.get(options.draft, "STANDALONE")
        yield Flag("--speculative-algorithm", algorithm, "what drafts")
        if algorithm == "STANDALONE":
            yield Flag("--speculative-draft-model-path", options.draft, "what drafts")
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
    yield Flag("--tp_size", str(plan.ranks), _ranks(plan))
    yield from of.size("--pp_size", plan.pp, _PP)
    yield from of.size("--ep_size", plan.ep, _EP)
    yield Flag("--max_batch_size", str(of.batch), of.batch_why)
    yield Flag("--max_num_tokens", str(of.budget), of.budget_why)
    why = "share for the cache of what weights leave"
    yield from of.memory("--kv_cache_free_gpu_memory_fraction", "free", why)
    yield from of.limited("TensorRT-LLM")
    if own.options.chunked:
        yield Flag("enable_chunked_prefill", "true", "prompts may be cut", in_file=True)
    if plan.dp > 1:
        why = "each rank attends to sequences of its own"
        yield Flag("enable_attention_dp", "true", why, in_file=True)
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
            options.draft,
            f"decoding_type: DraftTarget, max_draft_len: {options.drafts}, "
            f"speculative_model_dir: {options.draft}",
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
