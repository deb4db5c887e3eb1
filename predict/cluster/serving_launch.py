"""Flags and commands that launch a deployment under each framework that says how.

What a framework calls things is data (``launch`` in ``simulate/serving/frameworks.yaml``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...simulate.serving.checkpoints import UNKNOWN, Checkpoint
from ...simulate.serving.formats import Formats, format_in, in_formats
from ...simulate.serving.policies import Launcher, framework_defaults, frameworks, runs_on
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
        for framework, own_rules in frameworks().items():
            how = own_rules.launch
            if how is None or not runs_on(framework, own.spec.platform, own.spec.vendor):
                continue
            facts = worker.facts(own_rules.memory_of)
            flags = tuple(_flags(how, facts))
            remarks = list(times)
            if worker.taken.fallback:
                remarks.append(
                    "the default share of the memory leaves no cache, so that nearly all is taken"
                )
            if limit and not known:
                remarks.append(f"give {how.limit} if {model} takes more than {limit} tokens")
            if narrow and not (facts["quantize"] and any(f.when == "quantize" for f in how.flags)):
                # Their launchers take the format from the checkpoint's own configuration.
                remarks.append(f"{model} has to be a checkpoint in {narrow}")
            if own.model.cache == "int8":
                remarks.append("it has no cache in int8")
            remarks += [text.format_map(facts) for at, text in how.remarks.items() if facts[at]]
            if own.options.preemption == "swap":
                remarks.append(how.swap)
            if own.options.watermark:
                remarks.append("it has no flag for the share of the cache that is kept free")
            if facts["model_drafts"]:
                remarks.append(f"the checkpoint of {own.options.draft} drafts")
            launch = Launch(f"{how.program} {model}", flags, tuple(remarks))
            found[f"{how.name} {role}".strip()] = launch
    return found


#: Tokens that a model may take whose configuration is not known; longer ones are rare.
_LONG = 131072
#: Share of the cache that the longest request may take where its tokens are limited to what fits,
#: since what activations take is an estimate; engineering choice.
_FILLED = 0.9


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
        self.own, self.workers, self.role, self.fp8, self.limit = own, workers, role, fp8, limit
        self.taken = engine_memory(own, workers)

    def facts(self, memory_of: str) -> dict[str, str]:
        """What flags say, and what has to hold for them, by name; empty for what does not hold.

        Numbers of devices hold where they are above 1, apart from ``tp`` and ``ranks``; limits are
        of a rank with sequences of its own, or with ``engine_`` of all of them.

        Args:
            memory_of: What the framework's share of the memory is a share of.
        """
        own, plan, options, role = self.own, self.workers.plan, self.own.options, self.role
        policy = framework_defaults(own.framework).policy
        batch = self.workers.batch or options.max_batch or policy.max_batch
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
            "block": options.block,
            "limit": self.limit,
            "drafts": options.drafts,
            "step_tokens": options.drafts + 1,
            "copies": plan.copies(own.model.workload.experts),
        }
        holds = {
            "whole": options.chunked is False,
            "cut": options.chunked is not False,
            "told_to_cut": options.chunked,
            "quantize": self.fp8,
            "cache_fp8": own.model.cache == "fp8",
            "fresh": not options.prefix_cache,
            "eager": options.eager,
            "windows": own.model.cache_layers()[2],
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
    """The flags of a launcher for which the facts hold."""
    for own in how.flags:
        parts = [text.format_map(facts) for at, text in own.parts.items() if facts[at]]
        if (own.when and not facts[own.when]) or (own.parts and not parts):
            continue
        value = f"{{{', '.join(parts)}}}" if parts else own.value.format_map(facts)
        yield Flag(own.flag, value, own.why.format_map(facts), own.in_file)


#: What SGLang and TensorRT-LLM count as tp where ranks attend apart: these are among them.
_RANKS_APART = "devices that share each layer's products; attention runs apart on groups of them"
_ROLES = {"prefill": "prompts alone", "decode": "everything after the prompts"}
