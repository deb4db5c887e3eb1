"""Inputs and results of a serving simulation: engines and their costs, requests, and the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from ...common.errors import PlanError
from .memory import CacheLayout
from .policies import Policy

#: Cost classes of a pass, in the order of cost vectors. Products are split by their rooflines into
#: reading weights (``stream``) and arithmetic (``product``), experts likewise into ``experts`` and
#: ``grouped``; ``prefill`` and ``decode`` are attention; ``host`` counts passes, ``sequence`` the
#: sequences of each pass, and ``launch`` the layers of passes with prompts, which are not replayed
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
#: Cost class incurred once per request before the engine: HTTP, tokenisation, routing.
REQUEST = "request"
#: Smallest batch size for which the capacity of engines is determined under an open load: a few
#: requests that arrive apart do not fill an engine. Larger batches hardly increase capacity: Llama
#: 3.1 8B on an H100 serves 20 requests per second of 1,024 prompt and 256 output tokens at 256
#: sequences as at 1,024.
_FULL_BATCH = 256


class Chunk(NamedTuple):
    """A part of one request's prompt that runs in one pass.

    Attributes:
        tokens: Tokens of the chunk.
        past: Earlier tokens of the same prompt, to which the chunk attends.
    """

    tokens: int
    past: int = 0


class PassCosts(Protocol):
    """Costs of passes by class, shape ``(classes,)``, before weighting."""

    def decode(self, batch: int, cached: float, steps: int) -> np.ndarray:
        """Total over ``steps`` passes that decode ``batch`` sequences.

        Args:
            batch: Number of sequences.
            cached: Tokens in all their caches before the first pass.
            steps: Number of passes; each adds the tokens it yields to every cache.
        """

    def mixed(self, chunks: Sequence[Chunk], batch: int, cached: float) -> np.ndarray:
        """One pass over prompt chunks, beside ``batch`` decoding sequences."""

    def swap(self, tokens: float) -> np.ndarray:
        """Move the cache of ``tokens`` between device and host, one way."""


@dataclass(frozen=True)
class Station:
    """A group of identical engines.

    Attributes:
        costs: Costs of passes by class.
        weights: Seconds per unit of each class, shape ``(classes,)``.
        cache: Cache layout of each engine.
        policy: Scheduling rules of each engine.
        count: Number of engines.
        accepted: Tokens that a decoding pass yields for each sequence.
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
        prompts: Prompt lengths in tokens, shape ``(n,)``.
        outputs: Output lengths in tokens, shape ``(n,)``.
        arrivals: Times in seconds at which requests are sent, shape ``(n,)``; ignored by a closed
            loop.
        concurrency: Requests in flight in a closed loop; 0 for an open load.
        ready: Whether prompts are in the cache already, as on a decoding worker.
        hits: Cached tokens at the start of each prompt, shape ``(n,)``; ``None`` for none.
        blocks: Identifiers of the blocks of each prompt, equal for equal prefixes; empty if
            unknown.
        block_tokens: Tokens per such block.
        stands_for: Length of a longer closed loop of which these are the first requests; 0 if there
            are no others.
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
        """Number of requests that the load represents."""
        return max(self.stands_for, len(self.prompts))

    @property
    def counts(self) -> np.ndarray:
        """Number of requests that each simulated request represents, shape ``(n,)``.

        The requests sent at the start of a closed loop queue for prefill as no later ones do, and
        the last ones run in batches that drain. Both occur once however long the loop lasts, so
        only the requests in between represent those that are not simulated.
        """
        each = np.ones(len(self.prompts))
        if self.count > len(each):
            ends = self.concurrency
            each[ends:-ends] = (self.count - 2.0 * ends) / (len(each) - 2.0 * ends)
        return each

    @property
    def largest_batch(self) -> int:
        """Largest batch size for which costs are needed."""
        asked = self.concurrency or len(self.prompts)
        return max(asked, _FULL_BATCH) if self.rate else asked

    @property
    def rate(self) -> float:
        """Requests per second until the last is sent; 0 for closed loops or all at once."""
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
    """States of one engine after each event, lists of equal length except ``gaps``.

    Attributes:
        time: Time in seconds at the end of the event.
        spans: Duration of its passes in seconds.
        batch: Sequences in each pass.
        waiting: Requests in the queue.
        held: Occupied tokens of the cache.
        chunk: Prompt tokens in the pass; 0 for pure decoding.
        passes: Number of passes.
        gaps: Inter-token times in seconds, each with the number of tokens that came after it.
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
        """Record the state after an event."""
        self.time.append(time)
        self.spans.append(span)
        self.batch.append(batch)
        self.waiting.append(waiting)
        self.held.append(held)
        self.chunk.append(chunk)
        self.passes.append(passes)


@dataclass
class Run:
    """Simulated times in seconds, arrays of shape ``(n,)`` over requests, and totals.

    Attributes:
        sent: Time at which each request was sent.
        first: Time of its first token.
        finished: Time of its last token.
        makespan: End of the last pass.
        waits: Mean time to the first token by class, weighted seconds, shape ``(classes,)``.
        tokens: Mean time from the first to the last token by class, likewise.
        busy: Time of all passes of all engines by class, likewise.
        iterations: Passes of all engines.
        evicted: Number of evictions.
        largest_batch: Largest batch of a pass.
        largest_cache: Largest cache occupancy of an engine in tokens.
        hit_tokens: Prompt tokens found in a cache.
        found: Prefix-cache hit of each prompt in tokens, at its first admission.
        engine: Engine that decoded each request.
        histories: Histories of all engines, if recorded.
        moves: For each cache transferred between workers, the time at which it was ready and the
            time at which its link was free, shape ``(n, 2)``.
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
    """State of the requests of a load, shared by all engines; lists by request.

    Args:
        load: The load.
        classes: Number of cost classes.
    """

    def __init__(self, load: Load, classes: int) -> None:
        n = len(load.prompts)
        self.prompts: list[int] = load.prompts.astype(int).tolist()
        self.outputs: list[int] = load.outputs.astype(int).tolist()
        self.hits: list[int] = [0] * n if load.hits is None else load.hits.astype(int).tolist()
        self.blocks = load.blocks
        #: Prefix-cache hit of each prompt in tokens at its first admission.
        self.found = [0] * n
        self.sent = [0.0] * n
        self.first = [-1.0] * n
        self.finished = [0.0] * n
        #: Tokens generated so far; fractional if passes accept draft tokens on average.
        self.made = [0.0] * n
        self.engine = [0] * n
        self.waits, self.tokens = np.zeros(classes), np.zeros(classes)
