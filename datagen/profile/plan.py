"""Programs to measure: endless streams of ops and random programs, the zoo, given programs.

Every item has a key, which includes the seed and identifies its program. A run that is stopped and
restarted therefore draws exactly the programs that it has not measured yet.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...common.errors import ProfileError
from ...common.types import JsonObject
from .runner import WALL_SECONDS
from .worker_client import REPLY_TIMEOUT

if TYPE_CHECKING:
    from ..zoo.registry import Setting
    from ..zoo.workload import PyTree
    from .runner import MakeArguments

#: Streams of programs, with the default share of the time for each.
DEFAULT_MIX: dict[str, float] = {"op": 0.35, "random": 0.35, "zoo": 0.30}
#: Programs measured together in one trace session; models are measured alone.
BATCH_SIZES: dict[str, int] = {"op": 12, "random": 4, "zoo": 1, "given": 4}
#: Separates a program's key from the number of its replicate.
REPLICATE = "#"
#: Fraction of the budget that may be spent waiting for a quiet machine; on one that is never quiet,
#: noisy labels (which the run record counts) are better than none.
PATIENCE = 0.15


@dataclass(frozen=True)
class Item:
    """One program to measure.

    Attributes:
        stream: ``op``, ``random``, ``zoo`` or ``given``.
        index: Position in the stream.
        seed: Seed of the stream.
        suite: Suite of the zoo.
        replicate: 0, or the number of an intended repetition.
        name: Name of a given program.
        family: Family of a given program.
        text: StableHLO of a given program; bytecode is base64 after ``base64:``.
    """

    stream: str
    index: int
    seed: int = 0
    suite: str = ""
    replicate: int = 0
    name: str = ""
    family: str = ""
    text: str = ""

    @property
    def key(self) -> str:
        """Unique name within a dataset, the ``program`` column; replicates end in ``#n``."""
        parts = {"given": self.name, "zoo": f"{self.suite}-{self.index:04d}"}
        tail = parts.get(self.stream, f"{self.seed}-{self.index:06d}")
        return f"{self.stream}-{tail}" + (f"{REPLICATE}{self.replicate}" if self.replicate else "")

    def to_dict(self) -> JsonObject:
        """Plain data for the worker."""
        return asdict(self)


@dataclass(frozen=True)
class LoadedItem:
    """An item with its program, ready to compile.

    Attributes:
        name: Name of the program.
        family: Family, such as ``op:gemm`` or ``gpt``.
        mlir: StableHLO text or bytecode.
        arguments: Arrays of main in order, from a seed; ``None`` to draw them from the types.
        est_bytes: Estimated device memory in bytes, at least for the arguments; 0 if unknown.
    """

    name: str
    family: str
    mlir: str | bytes
    arguments: MakeArguments | None = None
    est_bytes: float = 0.0


@dataclass
class Plan:
    """The order of items: always from the stream that is furthest behind its share of the time.

    Attributes:
        mix: Share of the time by stream.
        seed: Seed of the random streams.
        suite: Suite of the zoo.
        given: Given programs; nothing else is measured then unless ``mix`` includes it.
        spent: Seconds spent by stream.
    """

    mix: Mapping[str, float]
    seed: int = 0
    suite: str = "standard"
    given: Sequence[Item] = ()
    zoo_size: int = 0
    spent: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = set(self.mix) - set(BATCH_SIZES)
        if unknown or any(share < 0 for share in self.mix.values()):
            raise ProfileError(
                f"the mix {dict(self.mix)} has unknown streams or negative shares",
                hint=f"streams are {', '.join(BATCH_SIZES)}",
            )
        self._streams = {s: self._stream(s) for s, share in self.mix.items() if share > 0}

    def _stream(self, stream: str) -> Iterator[Item]:
        if stream == "given":
            yield from self.given
        elif stream == "zoo":
            # A fixed shuffle, so that a short budget covers every part of the suite. 17 only
            # separates the generator from those of the random streams.
            for index in np.random.default_rng([self.seed, 17]).permutation(self.zoo_size):
                yield Item("zoo", int(index), self.seed, suite=self.suite)
        else:
            index = 0
            while True:
                yield Item(stream, index, self.seed)
                index += 1

    def next_batch(self, done: set[str]) -> list[Item]:
        """The next items that are not in ``done``; empty when every stream has ended."""
        while self._streams:
            stream = min(self._streams, key=lambda s: self.spent.get(s, 0.0) / self.mix[s])
            batch: list[Item] = []
            for item in self._streams[stream]:
                if item.key not in done:
                    batch.append(item)
                if len(batch) == BATCH_SIZES[stream]:
                    return batch
            del self._streams[stream]
            if batch:
                return batch
        return []

    def record(self) -> JsonObject:
        """Plain data for the run record."""
        return {
            "mix": dict(self.mix),
            "seed": self.seed,
            "suite": self.suite,
            "given": [item.name for item in self.given],
        }


def given_items(sources: Sequence[object]) -> list[Item]:
    """Items of given programs: paths, StableHLO texts, or objects with ``mlir`` and ``name``.

    Raises:
        ProfileError: A file cannot be read, or two programs have the same name.
    """
    items = [_given(source, index) for index, source in enumerate(sources)]
    names = [item.name for item in items]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ProfileError(f"two programs are named {twice!r}", hint="give each its own name")
    return items


def _given(source: Any, index: int) -> Item:
    name, family = f"program-{index}", "given"
    # StableHLO text has several lines or a function; anything else is a path.
    if isinstance(source, str) and ("\n" in source or "func" in source):
        data: str | bytes = source
    elif isinstance(source, (str, Path)):
        path = Path(source)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ProfileError(f"cannot be read: {error.strerror}", where=str(path)) from None
        name = path.stem
    else:
        mlir = source.mlir
        data = mlir() if callable(mlir) else mlir
        name, family = str(source.name), str(source.family)
    # Requests to the worker are JSON; a NUL byte distinguishes bytecode from text.
    if isinstance(data, bytes):
        text = "base64:" + base64.b64encode(data).decode() if b"\0" in data else data.decode()
    else:
        text = data
    return Item("given", index, name=re.sub(r"[^\w.\-]+", "_", name), family=family, text=text)


def load_item(item: Item) -> LoadedItem:
    """Generate the program of an item.

    Raises:
        ProfileError: The zoo has no such suite or program.
    """
    if item.stream == "given":
        mlir: str | bytes = item.text
        if item.text.startswith("base64:"):
            mlir = base64.b64decode(item.text.removeprefix("base64:"))
        return LoadedItem(item.name, item.family, mlir)
    if item.stream == "zoo":
        from ..zoo import build

        family, settings = zoo_suite(item.suite)[item.index]
        workload = build(family, **settings)
        return LoadedItem(
            workload.name,
            workload.family,
            workload.mlir(),
            workload.arguments,
            _tree_bytes(workload.abstract_args),
        )
    # The generator depends on the item alone, so that any item can be drawn without the ones
    # before it; the middle number separates the streams.
    rng = np.random.default_rng([item.seed, {"op": 1, "random": 2}[item.stream], item.index])
    if item.stream == "op":
        from ..programs.single_op import sample_op

        source = sample_op(rng)
    else:
        from ..programs.random_program import random_program

        source = random_program(rng)
    return LoadedItem(
        source.name, source.family, source.mlir, source.arguments, float(source.est_bytes)
    )


def _tree_bytes(tree: PyTree) -> float:
    import jax

    return float(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)))


def zoo_suite(name: str) -> list[tuple[str, dict[str, Setting]]]:
    """Families and settings of a suite of the zoo, in a fixed order."""
    from ..zoo import suite

    return list(suite(name))


@dataclass(frozen=True)
class ProfileSettings:
    """Settings of a profile run, kept in its record.

    Attributes:
        device: ``local`` for the default device of JAX, or ``cpu``, ``gpu``, ``tpu``.
        budget_s: Seconds of all runs of this plan in the folder together; ``None`` for as long as
            there are given programs.
        mix: Share of the time by stream (``op``, ``random``, ``zoo``, ``given``); by default only
            given programs if there are any, else :data:`DEFAULT_MIX`.
        suite: Suite of the zoo.
        seed: Seed of the random streams.
        max_memory: Bytes that one program may need; ``None`` for 70 % of the free memory.
        check_every_s: Time between two checks of the anchors, and so between two shards.
        replicate_share: Fraction of the programs that are measured again in another process.
        recycle_every_s: Time after which the worker is replaced; ``None`` for a fraction of the
            budget.
        timeout_s: Time without a reply after which a program counts as stuck.
        wall_s: Seconds of whole executions of each program; longer runs average over the speeds
            of a shared machine.
        patience: Fraction of the time that may be spent waiting for an undisturbed machine.
    """

    device: str = "local"
    budget_s: float | None = None
    mix: Mapping[str, float] = field(default_factory=dict)
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
class RunResult:
    """Outcome of a run that adds to a dataset.

    Attributes:
        folder: Folder of the dataset.
        samples: Rows written, including kernels that occurred before.
        programs: Programs measured or compiled, counted once per device.
        failed: Programs that failed; reasons are in ``failures.jsonl``.
        elapsed_s: Duration in seconds.
        stopped: Reason for the end: ``done`` (the plan is complete), ``budget`` or ``interrupted``.
    """

    folder: Path
    samples: int
    programs: int
    failed: int
    elapsed_s: float
    stopped: str


@dataclass(frozen=True)
class ProfileResult(RunResult):
    """Outcome of a profile run.

    Attributes:
        run_id: The run, empty if there was nothing left to do.
        setup_s: Part of ``elapsed_s`` before the first program: starting JAX, the probe.
        check_s: Part of ``elapsed_s`` after the last one: replicates, anchors.
    """

    run_id: str
    setup_s: float = 0.0
    check_s: float = 0.0
