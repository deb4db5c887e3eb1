"""Programs of a compile run: rounds of single ops, random programs and the zoo.

A round depends only on its number and the seed, so a stopped run resumes with the next round.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..profile.plan import zoo_suite
from ..programs.draws import DATA
from ..programs.random_program import random_program
from ..programs.single_op import OPCODES, sample_op

#: Maximum bytes and FLOPs of a generated program: a merged module of two dozen fits the memory of
#: every TPU, 16 GB for a v5e at least.
MAX_BYTES, MAX_FLOPS = 256e6, 1e11
#: Bounds of a large op, which is a separate module: maximum bytes and FLOPs, and minimum of either.
LARGE_BYTES, LARGE_FLOPS = 4e9, 4e12
LEAST_BYTES, LEAST_FLOPS = 1e8, 2e10
#: Ops that are left out, and those that are drawn large.
SKIPPED_OPS, LARGE_OPS = frozenset(DATA["compile"]["skipped"]), DATA["compile"]["large"]
#: Draws until a large op is large enough; the last one is taken as it is.
_ATTEMPTS = 12
#: Seed component of each stream: streams must not share random numbers.
_STREAMS = {"op": 31, "random": 32, "zoo": 33, "large": 34}


@dataclass(frozen=True)
class CompileItem:
    """A program of a round.

    Attributes:
        key: Unique name, the ``program`` column of a dataset.
        family: ``op:<opcode>``, ``random`` or a model family.
        mlir: StableHLO.
        merged: Whether it is compiled in one module with the others of its stream.
    """

    key: str
    family: str
    mlir: str | bytes
    merged: bool


@dataclass(frozen=True)
class CompilePlan:
    """Sizes of a round.

    Attributes:
        ops: Number of single-op programs, merged into one module.
        random: Number of random programs, merged into one module.
        suite: Suite of the zoo, whose programs are taken until all are done. Empty for none.
        seed: Seed of everything random.
        zoo: Number of zoo programs, each a separate module.
        large: Number of single ops at the size of large models, each a separate module.
    """

    ops: int = 16
    random: int = 8
    suite: str = "quick"
    seed: int = 0
    zoo: int = 1
    large: int = 0

    def round(self, number: int) -> list[CompileItem]:
        """Programs of a round, ops first.

        Raises:
            ProfileError: The zoo has no such suite.
        """
        items = [self._op(number * self.ops + i) for i in range(self.ops)]
        items += [self._random(number * self.random + i) for i in range(self.random)]
        items += [self._large(number * self.large + i) for i in range(self.large)]
        return items + self._zoo(number)

    def _op(self, index: int) -> CompileItem:
        rng = self._rng("op", index)
        kinds = {name: kind.weight for name, kind in OPCODES.items() if name not in SKIPPED_OPS}
        shares = np.array(list(kinds.values())) / sum(kinds.values())
        opcode = str(rng.choice(list(kinds), p=shares))
        source = sample_op(rng, opcode, max_bytes=MAX_BYTES, max_flops=MAX_FLOPS)
        return CompileItem(f"op-{self.seed}-{index:06d}", source.family, source.mlir, True)

    def _large(self, index: int) -> CompileItem:
        rng = self._rng("large", index)
        opcode = LARGE_OPS[index % len(LARGE_OPS)]
        for _ in range(_ATTEMPTS):
            source = sample_op(rng, opcode, max_bytes=LARGE_BYTES, max_flops=LARGE_FLOPS)
            if source.est_bytes >= LEAST_BYTES or source.est_flops >= LEAST_FLOPS:
                break
        return CompileItem(f"large-{self.seed}-{index:06d}", source.family, source.mlir, False)

    def _random(self, index: int) -> CompileItem:
        rng = self._rng("random", index)
        source = random_program(rng, max_bytes=MAX_BYTES, max_flops=MAX_FLOPS)
        return CompileItem(f"random-{self.seed}-{index:06d}", source.family, source.mlir, True)

    def _zoo(self, number: int) -> list[CompileItem]:
        if not self.suite:
            return []
        from ..zoo import build

        programs = zoo_suite(self.suite)
        # Shuffled by the seed alone, so that a short run covers many families without repetition.
        order = np.random.default_rng([self.seed, _STREAMS["zoo"]]).permutation(len(programs))
        items = []
        for index in order[number * self.zoo : (number + 1) * self.zoo].tolist():
            family, settings = programs[index]
            workload = build(family, **settings)
            key = f"zoo-{self.suite}-{index:04d}"
            items.append(CompileItem(key, workload.family, workload.mlir(), merged=False))
        return items

    def _rng(self, stream: str, index: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, _STREAMS[stream], index])
