"""Settings of a profile run, and what it gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .plan import DEFAULT_MIX, WALL_SECONDS
from .worker_client import REPLY_TIMEOUT

#: Part of the budget that may go into waiting for a quiet machine; on one that is never quiet,
#: noisy labels (which the run record counts) are better than none.
PATIENCE = 0.15


@dataclass(frozen=True)
class ProfileSettings:
    """Settings of a profile run, kept in its record.

    Attributes:
        device: ``local`` for whatever JAX sees, or ``cpu``, ``gpu``, ``tpu``.
        budget_s: Seconds of all runs of this plan in the folder together; ``None`` for as long as
            there are given programs.
        mix: Share of the time by stream (``op``, ``random``, ``zoo``, ``given``).
        suite: Suite of the zoo.
        seed: Seed of the random streams.
        max_memory: Bytes that one program may need; ``None`` for 70 % of what is free.
        check_every_s: Time between two checks of the anchors, and so between two shards.
        replicate_share: Part of the programs that are measured again in another process.
        recycle_every_s: Time after which the worker is replaced; ``None`` for a part of the budget.
        timeout_s: Time without a reply after which a program counts as stuck.
        wall_s: Seconds of whole executions of each program.
        patience: Share of the time that may go into waiting for an undisturbed machine.
    """

    device: str = "local"
    budget_s: float | None = None
    mix: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_MIX))
    suite: str = "standard"
    seed: int = 0
    max_memory: float | None = None
    check_every_s: float = 30.0
    replicate_share: float = 0.03
    recycle_every_s: float | None = None
    timeout_s: float = REPLY_TIMEOUT
    wall_s: float = WALL_SECONDS
    patience: float = PATIENCE


@dataclass(frozen=True)
class ProfileResult:
    """Outcome of a profile run.

    Attributes:
        folder: Folder of the dataset.
        run_id: The run, empty if there was nothing left to do.
        samples: Rows written.
        programs: Programs measured.
        failed: Programs that failed; reasons are in ``failures.jsonl``.
        elapsed_s: Seconds that it took.
        stopped: Reason of the end: ``done``, ``budget`` or ``interrupted``.
        setup_s: Of ``elapsed_s``, those before the first program: starting JAX, the probe.
        check_s: Of ``elapsed_s``, those after the last one: programs measured again, anchors.
    """

    folder: Path
    run_id: str
    samples: int
    programs: int
    failed: int
    elapsed_s: float
    stopped: str
    setup_s: float = 0.0
    check_s: float = 0.0
