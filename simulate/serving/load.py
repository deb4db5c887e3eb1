"""What engines are and cost, what a fleet of them is asked to serve, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from ...common.errors import PlanError
from .memory import CacheLayout
from .policies import Policy

#: Classes of a pass, in the order of cost vectors. Products are split into reading weights
#: (``stream``) and arithmetic (``product``) by their rooflines, experts into ``experts`` and
#: ``grouped`` alike; ``prefill`` and ``decode`` are attention; ``host`` counts passes, ``sequence``
#: the sequences of each, and ``launch`` the layers of passes with prompts, which are not replayed
#: from captured graphs.
CLASSES = (
    "stream",
    "product",
    "experts",
    "grouped",
    "prefill",
    "decode",
    "memory",
    "network",
    "host",
    "sequence",
    "launch",
)
#: Once for each request, before the engine sees it: HTTP, tokenisation, routing.
REQUEST = "request"
#: Sequences of a batch that a load with arrivals is taken to fill where it is asked what engines
#: serve at most: a load of few requests that were sent apart says nothing of what they can serve.
#: Larger batches hardly serve more: Llama 3.1 8B on an H100 serves 20 requests a second of 1,024
#: and 256 tokens at 256 sequences as at 1,024.
_FULL_BATCH = 256


class Chunk(NamedTuple):
    """A part of one request's prompt that an iteration runs.

    Attributes:
        tokens: Tokens of the part.
        past: Tokens of the same prompt from earlier iterations, which the part attends to.
    """

    tokens: int
    past: int = 0


class PassCosts(Protocol):
    """Costs of passes by class, shape ``(classes,)``, before their weights."""

    def decode(self, batch: int, cached: float, steps: int) -> np.ndarray:
        """Sum over ``steps`` passes that decode ``batch`` sequences.

        Args:
            batch: Sequences.
            cached: Tokens in the caches of all of them before the first pass.
            steps: Passes; each adds what it yields to every cache.
        """

    def mixed(self, chunks: Sequence[Chunk], batch: int, cached: float) -> np.ndarray:
        """A pass over chunks of prompts, beside ``batch`` decoding sequences."""

    def swap(self, tokens: float) -> np.ndarray:
        """Moving the cache of ``tokens`` between device and host, one way."""


@dataclass(frozen=True)
class Station:
    """Equal engines.

    Attributes:
        costs: Of passes, by class.
        weights: Of the classes: what the unit of each costs in seconds.
        cache: What the cache of each holds.
        policy: Rules of each.
        count: How many.
        accepted: Tokens of each sequence that a decoding pass yields.
    """

    costs: PassCosts
    weights: np.ndarray
    cache: CacheLayout
    policy: Policy
    count: int = 1
    accepted: float = 1.0


@dataclass(frozen=True)
class Load:
    """Requests in the order in which they are sent.

    Attributes:
        prompts: Tokens of each prompt, shape ``(n,)``.
        outputs: Tokens that each generates.
        arrivals: Seconds at which each is sent; ignored by a closed loop.
        concurrency: Requests in flight of a closed loop; 0 for an open one.
        ready: Whether prompts are in the cache already, as on a decoding worker.
        hits: Tokens at the start of each prompt whose keys and values are kept already, shape
            ``(n,)``; ``None`` for none.
        blocks: Names of the blocks of each prompt, equal where prompts begin alike; empty for a
            load that says nothing of them.
        block_tokens: Tokens of each of these blocks.
        stands_for: Requests of a closed loop that goes on, of which these are the first; 0 for
            these alone.
    """

    prompts: np.ndarray
    outputs: np.ndarray
    arrivals: np.ndarray
    concurrency: int = 0
    ready: bool = False
    hits: np.ndarray | None = None
    blocks: Sequence[Sequence[int]] = ()
    block_tokens: int = 512
    stands_for: int = 0

    @property
    def count(self) -> int:
        """Requests that are asked about."""
        return max(self.stands_for, len(self.prompts))

    @property
    def counts(self) -> np.ndarray:
        """How many requests each stands for, shape ``(n,)``.

        Those that a closed loop sends at once when it begins queue for prompts as no later ones do,
        the last run in batches that empty, and both come once, however long the loop lasts: those
        between them stand for what is not simulated.
        """
        each = np.ones(len(self.prompts))
        if self.count > len(each):
            ends = self.concurrency
            each[ends:-ends] = (self.count - 2.0 * ends) / (len(each) - 2.0 * ends)
        return each

    @property
    def largest_batch(self) -> int:
        """Most sequences of a batch that engines are asked about."""
        asked = self.concurrency or len(self.prompts)
        return max(asked, _FULL_BATCH) if self.rate else asked

    @property
    def rate(self) -> float:
        """Requests a second until the last one is sent; 0 for all at once and closed loops."""
        last = 0.0 if self.concurrency else float(self.arrivals.max())
        return len(self.arrivals) / last if last > 0.0 else 0.0

    def __post_init__(self) -> None:
        """Check the requests.

        Raises:
            PlanError: There are none, or one has no tokens.
        """
        if not len(self.prompts) or self.prompts.min() < 1 or self.outputs.min() < 1:
            raise PlanError(
                "a load needs requests, each with a token of prompt and output at least",
                where="load",
            )


@dataclass
class History:
    """States of one engine after each of its events; lists of equal lengths.

    Attributes:
        time: Seconds at its end.
        spans: Seconds of its passes.
        batch: Sequences of the pass.
        waiting: Requests in its queue.
        held: Tokens of the cache that are taken.
        chunk: Tokens of prompts of the pass; 0 where it only decodes.
        passes: Passes since the event before.
        gaps: Seconds between tokens of a sequence, and how many tokens came after each.
    """

    time: list[float] = field(default_factory=list)
    spans: list[float] = field(default_factory=list)
    batch: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    held: list[float] = field(default_factory=list)
    chunk: list[int] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    gaps: list[tuple[float, int]] = field(default_factory=list)

    def add(
        self,
        time: float,
        span: float,
        batch: int,
        waiting: int,
        held: float,
        chunk: int,
        passes: int,
    ) -> None:
        """Write down the state after an event."""
        self.time.append(time)
        self.spans.append(span)
        self.batch.append(batch)
        self.waiting.append(waiting)
        self.held.append(held)
        self.chunk.append(chunk)
        self.passes.append(passes)


@dataclass
class Run:
    """What happened to each request; arrays have shape ``(n,)``, in seconds.

    Attributes:
        sent: When it was sent.
        first: When its first token came.
        finished: When its last token came.
        makespan: End of the last pass.
        waits: Classes' share of the mean time to the first token, shape ``(classes,)``, weighted
            seconds.
        tokens: The same of the mean time from the first to the last token.
        busy: The same of all passes of all engines.
        iterations: Passes of all engines.
        evicted: Times that a request was evicted.
        largest_batch: Most sequences in a pass.
        largest_cache: Most tokens in the cache of an engine.
        hit_tokens: Tokens of prompts that were found in a cache.
        found: The same of each prompt, when it was first admitted.
        engine: Engine that decoded each.
        histories: Of each engine, where it was asked for.
        moves: Of each cache that moved to another worker, when it was ready and when its link was
            free, shape ``(n, 2)``.
    """

    sent: np.ndarray
    first: np.ndarray
    finished: np.ndarray
    makespan: float = 0.0
    waits: np.ndarray = field(default_factory=lambda: np.zeros(0))
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0))
    busy: np.ndarray = field(default_factory=lambda: np.zeros(0))
    iterations: int = 0
    evicted: int = 0
    largest_batch: int = 0
    largest_cache: int = 0
    hit_tokens: int = 0
    found: np.ndarray = field(default_factory=lambda: np.zeros(0, int))
    engine: np.ndarray = field(default_factory=lambda: np.zeros(0, int))
    histories: list[History] = field(default_factory=list)
    moves: np.ndarray = field(default_factory=lambda: np.zeros((0, 2)))


class Requests:
    """State of the requests of a load that all engines share, by position.

    Args:
        load: The load.
        classes: Classes of cost.
    """

    def __init__(self, load: Load, classes: int) -> None:
        n = len(load.prompts)
        self.prompts: list[int] = load.prompts.astype(int).tolist()
        self.outputs: list[int] = load.outputs.astype(int).tolist()
        self.hits: list[int] = [0] * n if load.hits is None else load.hits.astype(int).tolist()
        self.blocks = load.blocks
        #: Tokens of each prompt that a cache had when it was first admitted.
        self.found = [0] * n
        self.sent = [0.0] * n
        self.first = [-1.0] * n
        self.finished = [0.0] * n
        #: Tokens that each made; a share where a pass yields one of drafts on average.
        self.made = [0.0] * n
        self.engine = [0] * n
        self.waits, self.tokens = np.zeros(classes), np.zeros(classes)
