"""Launch commands of a deployment for each framework with known flags.

The names of the flags are data: ``launch`` in ``simulate/serving/frameworks.yaml``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...simulate.serving.checkpoints import UNKNOWN, Checkpoint
from ...simulate.serving.policies import Launcher, frameworks, runs_on
from ...simulate.serving.served import Formats, format_in, in_formats
from .deployment import Deployment, Workers
from .serving_engine import engine_cache, engine_memory

#: Context length (tokens) assumed for a model without a known configuration; longer ones are rare.
_LONG = 131072
#: Fraction of the KV cache that the longest allowed request may fill; the rest is a margin for the
#: estimated size of activations. Engineering choice.
_FILLED = 0.9
#: Meaning of SGLang's and TensorRT-LLM's tp with data-parallel attention.
_RANKS_APART = "devices that share each layer's products; attention runs apart on groups of them"
#: Roles of workers, and what they run.
_ROLES = {"prefill": "prompts alone", "decode": "everything after the prompts"}


@dataclass(frozen=True)
class Flag:
    """One setting of a launch command.

    Attributes:
        name: Flag, such as ``--max-num-seqs``; for TensorRT-LLM also a key of its YAML options
            file.
        value: Value of the flag; empty for a switch.
        why: The property of the deployment that the flag sets.
        in_file: Whether the setting belongs in the options file instead of the command.
    """

    name: str
    value: str
    why: str
    in_file: bool = False


@dataclass(frozen=True)
class Launch:
    """Launch command of a worker of a deployment.

    Attributes:
        program: Program and model checkpoint, such as ``vllm serve MODEL``.
        flags: Settings.
        remarks: What the command does not cover.
    """

    program: str
    flags: tuple[Flag, ...]
    remarks: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """The command as a shell line, with the remarks as a comment."""
        words = [self.program]
        words += [f"{f.name} {_quoted(f.value)}".strip() for f in self.flags if not f.in_file]
        lines = [f"{f.name}: {f.value}" for f in self.flags if f.in_file]
        if lines:
            # printf expands \n, which bash's echo does not.
            words.append("--extra_llm_api_options <(printf '" + "\\n".join(lines) + "\\n')")
        return " ".join(words) + (f"   # {', '.join(self.remarks)}" if self.remarks else "")

    def rows(self) -> list[dict[str, str]]:
        """Return the flags as rows of JSON data."""
        file = {False: "command", True: "file of options"}
        return [
            {"flag": f.name, "value": f.value, "in": file[f.in_file], "why": f.why}
            for f in self.flags
        ]


def _quoted(value: str) -> str:
    return f"'{value}'" if value.startswith("{") else value


def launches(
    deployment: Deployment, checkpoint: Checkpoint = UNKNOWN, longest: int = 0
) -> dict[str, Launch]:
    """Return the launch commands of a deployment's workers for vLLM, SGLang and TensorRT-LLM.

    Frameworks that do not run on the device are left out. Flags follow the current documentation of
    ``vllm serve``, ``sglang.launch_server`` and ``trtllm-serve``.

    Args:
        deployment: The deployment.
        checkpoint: Checkpoint of the model.
        longest: Tokens of the longest request that has to be served.

    Returns:
        Commands by framework; with separate prefill workers by framework and role, such as
        ``vLLM prefill``.
    """
    found, model = {}, checkpoint.name
    parts = (
        [("", deployment.engine)]
        if deployment.prefill is None
        else [("prefill", deployment.prefill), ("decode", deployment.engine)]
    )
    for role, workers in parts:
        front = f"x {workers.count}, behind a router: {deployment.options.router}"
        if role == "decode":
            front = f"x {workers.count}"
        times = [front] if workers.count > 1 else []
        narrow = "" if _is_published_in(checkpoint, deployment) else _narrow(deployment)
        limit = _longest(deployment, workers, checkpoint.context or _LONG, longest)
        known = limit if checkpoint.context else 0
        worker = _Worker(deployment, workers, role, fp8=narrow == "fp8", limit=known)
        for framework, own_rules in frameworks().items():
            how = own_rules.launch
            if how is None or not runs_on(
                framework, deployment.spec.platform, deployment.spec.vendor
            ):
                continue
            facts = worker.facts(own_rules.memory_of)
            flags = tuple(_flags(how, facts))
            remarks = list(times)
            if worker.taken.fallback:
                remarks.append(
                    "the default memory fraction leaves no cache, so nearly all memory is used"
                )
            if limit and not known:
                remarks.append(f"give {how.limit} if {model} takes more than {limit} tokens")
            if narrow and not (facts["quantize"] and any(f.when == "quantize" for f in how.flags)):
                # The launcher reads the format from the checkpoint's configuration.
                remarks.append(f"{model} has to be a checkpoint in {narrow}")
            if deployment.model.cache == "int8":
                remarks.append("it has no int8 KV cache")
            remarks += [text.format_map(facts) for at, text in how.remarks.items() if facts[at]]
            if deployment.options.preemption == "swap":
                remarks.append(how.swap)
            if deployment.options.watermark:
                remarks.append("it has no flag for the fraction of the KV cache kept free")
            if facts["model_drafts"]:
                remarks.append(f"drafts come from the checkpoint of {deployment.options.draft}")
            launch = Launch(f"{how.program} {model}", flags, tuple(remarks))
            found[f"{how.name} {role}".strip()] = launch
    return found


def _longest(deployment: Deployment, workers: Workers, context: int, asked: int) -> int:
    """Return the request length in tokens that the KV cache requires; 0 for no limit.

    vLLM refuses to start if one request of the model's full context length does not fit.

    Args:
        deployment: The deployment.
        workers: The prefill or decode workers.
        context: Context length of the model in tokens.
        asked: Tokens of the longest request that has to be served.
    """
    if engine_memory(deployment, workers).cache <= 0.0:
        return 0
    layout = engine_cache(deployment, workers)
    # Each data-parallel rank holds its share of the cache.
    ranks = workers.plan.dp
    if layout.share_of(context) * ranks <= 1.0:
        return 0
    room = bisect_right(range(context), _FILLED, key=lambda n: layout.share_of(n) * ranks) - 1
    return min(context, max(asked, room))


def _narrow(deployment: Deployment) -> str:
    """Return the weight formats below 16 bits; empty if there are none."""
    model = deployment.model
    formats = [model.weights, *([model.expert_weights] if model.workload.experts else [])]
    return " and ".join(dict.fromkeys(f for f in formats if f not in ("bf16", "f16", "f32")))


def _is_published_in(checkpoint: Checkpoint, deployment: Deployment) -> bool:
    """Return whether a checkpoint is published in the deployment's formats and needs no flag.

    vLLM refuses ``--quantization fp8`` for a checkpoint whose configuration names another method,
    such as compressed-tensors.
    """
    weights = format_in(checkpoint.name) if checkpoint != UNKNOWN else ""
    if not weights:
        return False
    said = in_formats(deployment.model.workload, Formats(weights))
    return (said.weights, said.expert_weights, said.attention_format) == (
        deployment.model.weights,
        deployment.model.expert_weights,
        deployment.model.attention_format,
    )


class _Worker:
    """The facts that the flags of the prefill or decode workers are derived from.

    Args:
        deployment: The deployment.
        workers: The prefill or decode workers.
        role: ``prefill`` or ``decode``; empty if all workers do both.
        fp8: Whether the engine quantizes the checkpoint to fp8 while loading it.
        limit: Maximum tokens of a request where below the model's context length; 0 for no limit.
    """

    def __init__(
        self, deployment: Deployment, workers: Workers, role: str, *, fp8: bool, limit: int = 0
    ) -> None:
        self.deployment, self.workers, self.role, self.fp8, self.limit = (
            deployment,
            workers,
            role,
            fp8,
            limit,
        )
        self.taken = engine_memory(deployment, workers)

    def facts(self, memory_of: str) -> dict[str, str]:
        """Return values and conditions of flags by name; an empty string means false or unset.

        Parallel degrees other than ``tp`` and ``ranks`` are set only above 1. Limits apply to a
        data-parallel rank, those with ``engine_`` to the whole engine.

        Args:
            memory_of: The quantity that the framework's memory fraction refers to.
        """
        deployment, plan, options, role = (
            self.deployment,
            self.workers.plan,
            self.deployment.options,
            self.role,
        )
        policy = deployment.rules.policy
        batch = deployment.rank_batch(self.workers)
        budget = options.token_budget or policy.token_budget
        share = ""
        if options.memory or self.taken.fallback:
            share = f"{self.taken.share_of(self.taken.cache, memory_of):.3g}"
        kind = options.draft if options.draft in ("ngram", "mtp") else "model_drafts"
        kind = kind if options.drafts else ""
        numbers = {
            "tp": plan.tp,
            "ranks": plan.ranks,
            **{name: n for name in ("pp", "dp", "ep") if (n := getattr(plan, name)) > 1},
            "batch": batch,
            "budget": budget,
            "engine_batch": batch * plan.dp,
            "engine_budget": budget * plan.dp,
            "gather": policy.gather if plan.dp > 1 else 0,
            "recv_interval": options.recv_interval if options.recv_interval > 1 else 0,
            "batch_wait_iters": options.batch_wait_iters,
            "batch_wait_ratio": options.batch_wait_ratio,
            "block": options.block,
            "limit": self.limit,
            "drafts": options.drafts,
            "step_tokens": options.drafts + 1,
            "copies": plan.copies(deployment.model.workload.experts),
        }
        holds = {
            "whole": options.chunked is False,
            "cut": options.chunked is not False,
            "told_to_cut": options.chunked,
            "quantize": self.fp8,
            "cache_fp8": deployment.model.cache == "fp8",
            "fresh": not options.prefix_cache,
            "ahead_on": options.async_scheduling,
            "ahead_off": options.async_scheduling is False,
            "eager": options.eager,
            "windows": deployment.model.cache_layers()[2],
            "groups": plan.dp > 1 and plan.tp > 1,
            "wide": plan.wide,
            "balanced": plan.wide and plan.redundant != 0,
            "halves": plan.wide and options.overlap is not False,
            "bare_draft": kind in ("ngram", "mtp"),
            "passes_draft": kind in ("mtp", "model_drafts"),
            **{name: kind == name for name in ("ngram", "mtp", "model_drafts")},
            **{name: role == name for name in _ROLES},
        }
        apart = plan.dp > 1
        return {
            **dict.fromkeys(("pp", "dp", "ep"), ""),
            **{name: str(value or "") for name, value in numbers.items()},
            **{name: "yes" if value else "" for name, value in holds.items()},
            "memory": share,
            "draft": options.draft,
            "role": role,
            "work": _ROLES.get(role, ""),
            "of_rank": " of each rank" if apart else "",
            "ranks_why": _RANKS_APART if apart else "devices that share each layer",
        }


def _flags(how: Launcher, facts: Mapping[str, str]) -> Iterator[Flag]:
    """Yield the flags of a launcher whose conditions hold."""
    for entry in how.flags:
        parts = [text.format_map(facts) for at, text in entry.parts.items() if facts[at]]
        if (entry.when and not facts[entry.when]) or (entry.parts and not parts):
            continue
        value = f"{{{', '.join(parts)}}}" if parts else entry.value.format_map(facts)
        yield Flag(entry.flag, value, entry.why.format_map(facts), entry.in_file)
