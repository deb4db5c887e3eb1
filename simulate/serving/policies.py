"""Defaults of serving frameworks: limits, scheduling, memory and cache (``frameworks.yaml``)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache

from ...common.errors import PlanError
from ...common.files import own_data
from ...common.types import typed
from ...common.versions import can_be_release, is_newer, version_numbers

#: How a router picks an engine: in turn; with the fewest requests; with the fewest tokens to run
#: and to keep, where prefix-cache hits of the request do not count.
ROUTERS = ("round-robin", "least-loaded", "prefix-aware")


@dataclass(frozen=True)
class Policy:
    """Scheduling rules of an engine.

    Attributes:
        max_batch: Maximum number of sequences in flight.
        token_budget: Maximum number of tokens of a forward pass, over all ranks.
        chunked: Whether a prompt may be split where the budget ends (chunked prefill).
        mixed: Whether prompts run in the same pass as decoding; otherwise decoding waits for them.
        reserve: Fraction of a request's output for which the cache must have room at admission;
            below 1, the requests admitted last are evicted when the cache is full.
        swap: Whether the cache of an evicted request is swapped to the host; otherwise it is
            recomputed.
        watermark: Fraction of the cache that must stay free when a request is admitted.
        block: Tokens per cache block; the last block of a sequence is half empty on average.
        ahead: Whether a pass is prepared while the previous one runs, so that a request that
            arrives meanwhile waits for one more pass.
        ranks: Attention data-parallel ranks; each holds different sequences.
        gather: Maximum number of decoding passes for which prompts wait until every rank has one
            to run or, on one rank, they fill a pass; 0 to run prompts as they arrive.
        fill: On one rank, the fraction of the token budget from which prompts no longer wait.
        poll: Decoding passes between two checks for new requests.
    """

    max_batch: int = 256
    token_budget: int = 8192
    chunked: bool = True
    mixed: bool = True
    reserve: float = 0.0
    swap: bool = False
    watermark: float = 0.0
    block: int = 1
    ahead: bool = False
    ranks: int = 1
    gather: int = 0
    fill: float = 0.0
    poll: int = 1

    def __post_init__(self) -> None:
        """Check the limits.

        Raises:
            PlanError: A limit is below 1, or a fraction is out of range.
        """
        shares = 0.0 <= self.reserve <= 1.0 and 0.0 <= self.watermark < 1.0
        if min(self.max_batch, self.token_budget, self.block) < 1 or not shares:
            raise PlanError(
                f"max_batch={self.max_batch}, token_budget={self.token_budget}, "
                f"block={self.block}, reserve={self.reserve}, watermark={self.watermark}",
                hint="limits are at least 1, reserve and watermark are shares",
            )


@dataclass(frozen=True)
class Setting:
    """A flag of a launch command.

    Attributes:
        flag: The flag as written on the command line.
        why: Reason for the flag, a template of facts about the deployment.
        value: Template of its value; empty for a switch.
        when: Fact under which the flag is given; empty for always.
        parts: Entries of a mapping value by the fact under which each is given, in place of
            ``value``.
        in_file: Whether it is an entry of the options file instead of a command-line flag.
    """

    flag: str
    why: str
    value: str = ""
    when: str = ""
    parts: dict[str, str] = field(default_factory=dict)
    in_file: bool = False


@dataclass(frozen=True)
class Launcher:
    """How to launch a worker of a framework.

    Attributes:
        name: Display name of the framework.
        program: Command that precedes the checkpoint.
        limit: Flag for the maximum length of a request in tokens.
        swap: Remark for a deployment that asks for evicted requests to be swapped.
        flags: Flags in order.
        remarks: Further remarks, by the fact under which each applies.
    """

    name: str
    program: str
    limit: str
    swap: str
    flags: tuple[Setting, ...]
    remarks: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Framework:
    """Defaults of a framework.

    Attributes:
        policy: Rules of its scheduler.
        memory: Memory fraction, as the framework's own option defines it.
        memory_of: Base of that fraction: ``total`` memory for weights, activations and cache;
            ``static``: total memory for weights and cache alone; ``free``: the memory that weights
            and activations leave, for the cache.
        hybrid: Cache layout for layers with a sliding window or a recurrent state: ``pages`` of one
            shared pool, ``apart`` for separate pools, empty for the same space as other layers.
        nvidia: Whether it runs on NVIDIA GPUs only.
        words: Regular expression that recognises the framework in engine names.
        rewritten: First version with the rewritten engine.
        ahead: First version that prepares a pass while the device runs the previous one; empty for
            none.
        native: Whether the engine's host code was compiled before the rewrite too.
        fused: Whether layers of the current engine are compiled, or few operators in C++.
        releases: The first release, and the newest with measured runs.
        budgets: Token budget by measurement method, where it differs from the policy's.
        cache_follows: Weight formats whose checkpoints specify an fp8 cache.
        kernels: Framework whose kernels it runs.
        whole_blocks: Whether it rejects plans that split weights within a scaling block.
        drafting: Maximum number of sequences in flight over all ranks of an engine that verifies
            draft tokens and is given no limit; 0 for that of the policy.
        sized: Whether recipes set the engine's batch limit to the concurrency of the load, rounded
            to a power of two.
        launch: How a worker is launched; ``None`` if unknown.
    """

    policy: Policy
    memory: float = 0.9
    memory_of: str = "total"
    hybrid: str = ""
    nvidia: bool = False
    words: str = ""
    rewritten: tuple[int, ...] = (0, 0)
    ahead: tuple[int, ...] = ()
    native: bool = False
    fused: bool = False
    releases: tuple[str, str] = ("", "")
    budgets: dict[str, int] = field(default_factory=dict)
    cache_follows: tuple[str, ...] = ()
    kernels: str = "vllm"
    whole_blocks: bool = False
    drafting: int = 0
    sized: bool = False
    launch: Launcher | None = None

    def has(self, option: str) -> bool:
        """Whether its launch command can set an option of the scheduler."""
        return self.launch is not None and any(flag.when == option for flag in self.launch.flags)

    def frees_windows(self, experts: bool) -> bool:
        """Whether cache entries that have left a sliding window are freed.

        Args:
            experts: Whether the model has experts. SGLang gives a window pool to models it lists by
                name: Llama 4, gpt-oss, MiMo-V2, Step-3.5 and Gemma 4, which all have experts except
                some sizes of Gemma 4; Gemma 2, Gemma 3 and Mistral are not among them.
        """
        return self.hybrid == "pages" or (self.hybrid == "apart" and experts)


@lru_cache(maxsize=1)
def frameworks() -> dict[str, Framework]:
    """Frameworks by lower-case name (``frameworks.yaml``)."""
    read = own_data("simulate/serving/frameworks.yaml")
    return typed(dict[str, Framework], read, "frameworks.yaml")


def framework_defaults(name: str) -> Framework:
    """Defaults of a framework by its lower-case name; of the first one if it is unknown."""
    known = frameworks()
    return known.get(name) or next(iter(known.values()))


def framework_of(text: str) -> str:
    """Canonical lower-case name of a framework; the engines of one project share a name."""
    name, _, remark = text.lower().partition(" (")
    for words in (name, remark):
        # Engines that others build on come first in the file.
        for known, own in reversed(frameworks().items()):
            if re.search(own.words, words):
                return known
    return name.strip()


def known_framework(text: str) -> tuple[str, str]:
    """Canonical name and version of a framework; an empty name is accepted.

    Args:
        text: Name with an optional version, such as ``vllm`` or ``vllm@0.18.0``.

    Raises:
        PlanError: The framework is unknown; the version has no number, is older than the first
            release, or more than a major version ahead of the newest.
    """
    said, _, version = text.partition("@")
    name = framework_of(said)
    if name and name not in frameworks():
        near = get_close_matches(name, frameworks(), n=3, cutoff=0.5) or list(frameworks())
        raise PlanError(
            f"framework {said!r} is not known",
            hint=f"{', '.join(near)}; empty for one that is not listed",
        )
    if "@" in text and not version[:1].isdigit():
        raise PlanError(f"{version!r} is no version of {said}", hint="as in vllm@0.18.0")
    if version and name:
        first, newest = frameworks()[name].releases
        if not can_be_release(version, first, newest):
            raise PlanError(
                f"there is no release {version} of {name}", hint=f"known are {first} to {newest}"
            )
    return name, version


def release_note(name: str, version: str) -> tuple[str, ...]:
    """A note if a release is newer than every release with measured runs.

    Args:
        name: Lower-case name of the framework.
        version: Its version; empty for the newest.
    """
    newest = frameworks()[name].releases[1] if name in frameworks() else ""
    if not is_newer(version, newest):
        return ()
    return (
        f"{name} {version} is newer than the newest release with measured runs ({newest}): it is "
        "predicted as that one",
    )


def runs_on(name: str, platform: str, vendor: str) -> bool:
    """Whether a framework runs on a device at all.

    Args:
        name: Lower-case name of the framework.
        platform: Platform of the device: ``cpu``, ``gpu`` or ``tpu``.
        vendor: Vendor of the device; empty if unknown.
    """
    own = platform == "gpu" and vendor in ("", "NVIDIA")
    return own or not framework_defaults(name).nvidia


def engine_era(name: str, version: str) -> str:
    """``early`` for versions before the engine was rewritten, else ``now``.

    Args:
        name: Lower-case name of the framework.
        version: Its version; empty for the newest.
    """
    known = frameworks().get(name)
    return "now" if _is_since(version, known.rewritten if known else (0, 0)) else "early"


def runs_ahead(name: str, version: str) -> bool:
    """Whether the host prepares a pass while the device runs the previous one.

    Args:
        name: Lower-case name of the framework.
        version: Its version; empty for the newest.
    """
    first = framework_defaults(name).ahead
    return bool(first) and _is_since(version, first)


def _is_since(version: str, first: tuple[int, ...]) -> bool:
    """Whether a version is at least ``first``; an empty version is the newest."""
    numbers = version_numbers(version)[:2]
    return not numbers or numbers >= first


def host_kind(name: str, era: str, platform: str, *, eager: bool = False) -> str:
    """Kind of host code of an engine; empty for Python that launches kernels one by one.

    ``native`` code is compiled, or runs a pass as one program; ``fused`` code launches compiled
    layers; ``interpreted`` code, before the rewrite, also ran in Python between passes.

    Args:
        name: Lower-case name of the framework.
        era: Result of :func:`engine_era`.
        platform: Platform of the device.
        eager: Whether CUDA graphs and compilation of layers are disabled.
    """
    known = framework_defaults(name)
    rewritten = era != "early" and known.rewritten != (0, 0)
    if platform == "tpu" or (known.native and not rewritten):
        return "native"
    if era == "early":
        return "interpreted"
    return "fused" if known.fused and not eager else ""
