"""What serving frameworks do by themselves: limits, order of work, use of the cache.

Frameworks are data (``frameworks.yaml``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache

from ...common.errors import PlanError
from ...common.files import own_data
from ...common.types import typed
from ...common.versions import can_be_release, is_newer, version_numbers

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
        ahead: Whether a pass is prepared while the one before runs, so that a request which comes
            then waits for one pass more.
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
class Setting:
    """A flag of a launch command.

    Attributes:
        flag: As it is written.
        why: What of a deployment it says, a template of facts.
        value: The same; empty for a switch.
        when: Fact that has to hold; empty for always.
        parts: Values of a mapping by the fact that has to hold for each, in place of ``value``.
        in_file: Whether it stands in a file of options instead of the command.
    """

    flag: str
    why: str
    value: str = ""
    when: str = ""
    parts: dict[str, str] = field(default_factory=dict)
    in_file: bool = False


@dataclass(frozen=True)
class Launcher:
    """How a worker of a framework is launched.

    Attributes:
        name: Of the framework, as it is written.
        program: What starts it, before the checkpoint.
        limit: Flag that limits the tokens of a request.
        swap: What becomes of evicted requests that are to be swapped.
        flags: In their order.
        remarks: What else has to be seen to, by the fact that has to hold.
    """

    name: str
    program: str
    limit: str
    swap: str
    flags: tuple[Setting, ...]
    remarks: dict[str, str] = field(default_factory=dict)


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
        words: Pattern by which names of engines are recognised as this framework.
        rewritten: First version whose engine was rewritten.
        ahead: First version that prepares a pass while the device runs the one before; empty for
            none.
        native: Whether the host of its engine was compiled before that too.
        fused: Whether layers of its engine today are compiled, or of few operators in C++.
        releases: The first one, and the newest of which runs were measured.
        budgets: Tokens of a pass by the way of measuring, where it is not the policy's.
        cache_follows: Formats of weights whose checkpoints say fp8 for the cache.
        kernels: Whose kernels it runs.
        whole_blocks: Whether it refuses plans that cut weights within a block of scales.
        sized: Whether recipes start its engines for as many sequences as a load has, a power of
            two.
        handover: What a note says of handing requests over; empty for nothing.
        launch: How a worker is launched; ``None`` where that is not known.
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
    sized: bool = False
    handover: str = ""
    launch: Launcher | None = None

    def frees_windows(self, experts: bool) -> bool:
        """Whether what a window has passed is freed.

        Args:
            experts: Whether the model has experts. SGLang knows models with a pool for windows by
                name: Llama 4, gpt-oss, MiMo-V2, Step-3.5 and Gemma 4, which have experts but for
                some sizes of Gemma 4; Gemma 2, Gemma 3 and Mistral are none of them.
        """
        return self.hybrid == "pages" or (self.hybrid == "apart" and experts)


@lru_cache(maxsize=1)
def frameworks() -> dict[str, Framework]:
    """Frameworks by name, in lower case (``frameworks.yaml``)."""
    read = own_data("simulate/serving/frameworks.yaml")
    return typed(dict[str, Framework], read, "frameworks.yaml")


def framework_defaults(name: str) -> Framework:
    """Defaults of a framework by its name in lower case; of another those of the first."""
    known = frameworks()
    return known.get(name) or next(iter(known.values()))


def framework_of(text: str) -> str:
    """A framework's name in lower case, with the engines of one project as one."""
    name, _, remark = text.lower().partition(" (")
    for words in (name, remark):
        # Engines that others are built on come first in the file.
        for known, own in reversed(frameworks().items()):
            if re.search(own.words, words):
                return known
    return name.strip()


def known_framework(text: str) -> tuple[str, str]:
    """:func:`framework_of` of an engine that is known, or that is not named, and its version.

    Args:
        text: Such as ``vllm`` or ``vllm@0.18.0``.

    Raises:
        PlanError: The name is none of a framework; the version has no number, is older than the
            first release, or more than a major version ahead of the newest one.
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
    """A note where a release is newer than all that were measured.

    Args:
        name: Of a framework, in lower case.
        version: Of it; empty for the newest.
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
        name: Of the framework, in lower case.
        platform: Of the device: ``cpu``, ``gpu`` or ``tpu``.
        vendor: Who makes it; empty if its description does not say.
    """
    own = platform == "gpu" and vendor in ("", "NVIDIA")
    return own or not framework_defaults(name).nvidia


def engine_era(name: str, version: str) -> str:
    """``early`` for engines before they were rewritten, else ``now``.

    Args:
        name: Of a framework, in lower case.
        version: Of it; empty for the newest.
    """
    known = frameworks().get(name)
    return "now" if _is_since(version, known.rewritten if known else (0, 0)) else "early"


def runs_ahead(name: str, version: str) -> bool:
    """Whether an engine's host prepares a pass while the device runs the one before.

    Args:
        name: Of a framework, in lower case.
        version: Of it; empty for the newest.
    """
    first = framework_defaults(name).ahead
    return bool(first) and _is_since(version, first)


def _is_since(version: str, first: tuple[int, ...]) -> bool:
    """Whether a version is at least the first one; where none is said it is the newest."""
    numbers = version_numbers(version)[:2]
    return not numbers or numbers >= first


def host_kind(name: str, era: str, platform: str, *, eager: bool = False) -> str:
    """What the host of an engine runs; empty for Python that launches kernels one by one.

    ``native`` hosts are compiled, or run a pass as one program; ``fused`` ones run layers that are;
    ``interpreted`` ones were in Python between passes too, before engines were rewritten.

    Args:
        name: Of a framework, in lower case.
        era: From :func:`engine_era`.
        platform: Of the device.
        eager: Whether neither graphs are captured nor layers compiled.
    """
    known = framework_defaults(name)
    rewritten = era != "early" and known.rewritten != (0, 0)
    if platform == "tpu" or (known.native and not rewritten):
        return "native"
    if era == "early":
        return "interpreted"
    return "fused" if known.fused and not eager else ""
