"""Programs of a compile run: rounds of single ops, random programs and the zoo.

A round depends only on its number and the seed, so a stopped run resumes with the next round.
Independent programs are merged into one module, so that a compiler's fixed cost is paid once.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...common.types import MlirObject
from ...features.ir.mlir.bindings import parse_module, tag_locations, walk_ops, write_bytecode
from ...features.kernels.extract import tagged_ops
from ...features.kernels.kernel import Kernel
from ..profile.plan import zoo_suite
from ..programs.draws import DATA
from ..programs.random_program import random_program
from ..programs.single_op import OPCODES, sample_op

if TYPE_CHECKING:
    from jaxlib.mlir import ir

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
_SYMBOL = re.compile(r"@([A-Za-z_][\w.$-]*)")


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


@dataclass(frozen=True)
class MergedModule:
    """Programs merged into one module.

    Attributes:
        data: StableHLO bytecode; the location of each op is its position, as
            :func:`opcast.features.kernels.extract.tagged_ops` reads it.
        starts: Position of each program's first op, ascending.
    """

    data: bytes
    starts: tuple[int, ...]

    def owners(self, kernels: Sequence[Kernel]) -> list[int]:
        """Index of the program that each kernel belongs to.

        A kernel without an origin (a copy that the compiler added) belongs to the program whose
        value it reads, otherwise to the program of its first reader; -1 if neither is known.
        """
        if len(self.starts) == 1:
            return [0] * len(kernels)
        owners = [self._owner(kernel) for kernel in kernels]
        # Forward along the operands first, then backward for the rest (operands precede their
        # readers, so one pass each way is enough).
        for place, kernel in enumerate(kernels):
            if owners[place] < 0:
                owners[place] = next((owners[i] for i in kernel.operands if owners[i] >= 0), -1)
        for place in reversed(range(len(kernels))):
            for source in kernels[place].operands:
                if owners[source] < 0:
                    owners[source] = owners[place]
        return owners

    def _owner(self, kernel: Kernel) -> int:
        for source in kernel.sources:
            for position in tagged_ops(source.op):
                # Ops ahead of the first program are the calls of the new main function.
                return bisect_right(self.starts, position) - 1
        return -1


def merge_programs(programs: Sequence[str | bytes]) -> MergedModule:
    """Merge programs for one device; the new main calls each with separate arguments.

    Args:
        programs: StableHLO as text or bytecode, each with a function ``main``.

    Raises:
        ValueError: One of the programs is not a module.
    """
    parts = [_renamed(program, f"p{number}_") for number, program in enumerate(programs)]
    # As text: the functions of all programs, and a main that passes all arguments through.
    calls, parameters, results, types = [], [], [], []
    for number, (_, inputs, outputs) in enumerate(parts):
        names = [f"%a{number}_{i}" for i in range(len(inputs))]
        parameters += [f"{n}: {t}" for n, t in zip(names, inputs, strict=True)]
        values = [f"%r{number}#{i}" for i in range(len(outputs))]
        results += values if len(outputs) > 1 else [f"%r{number}"] * len(outputs)
        types += outputs
        count = f":{len(outputs)}" if len(outputs) > 1 else ""
        left = f"%r{number}{count} = " if outputs else ""
        calls.append(
            f"{left}func.call @p{number}_main({', '.join(names)}) : "
            f"({', '.join(inputs)}) -> ({', '.join(outputs)})"
        )
    head = f"func.func public @main({', '.join(parameters)}) -> ({', '.join(types)})"
    back = f"func.return {', '.join(results)} : {', '.join(types)}" if types else "func.return"
    main = "\n".join([f"{head} {{", *calls, back, "}"])
    text = "\n".join(["module @merged {", main, *(body for body, _, _ in parts), "}"])
    tagged = tag_locations(parse_module(text))
    return MergedModule(write_bytecode(tagged), _starts(tagged, len(parts)))


def _renamed(program: str | bytes, prefix: str) -> tuple[str, list[str], list[str]]:
    """Prefix a program's functions; return their text, and the types of main's ends."""
    module = parse_module(program)
    functions = [op for op in module.body.operations if op.operation.name == "func.func"]
    by_name = {_name(function): function for function in functions}
    kind = _attribute(by_name["main"], "function_type").value
    inputs, outputs = list(map(str, kind.inputs)), list(map(str, kind.results))
    text = "\n".join(str(op) for op in module.body.operations)

    # Only symbols that the program defines: others are targets of custom calls.
    def rename(match: re.Match[str]) -> str:
        name = match[1]
        return f"@{prefix}{name}" if name in by_name else match[0]

    text = _SYMBOL.sub(rename, text).replace("func.func public", "func.func private")
    return text, inputs, outputs


def _name(function: ir.OpView | ir.Operation) -> str:
    return str(_attribute(function, "sym_name").value)


def _attribute(function: ir.OpView | ir.Operation, name: str) -> MlirObject:
    return function.attributes[name]


def _starts(module: ir.Module, count: int) -> tuple[int, ...]:
    """Position of each program's first function among the ops, which follow in order."""
    starts: dict[int, int] = {}
    for position, op in enumerate(walk_ops(module)):
        if op.operation.name == "func.func" and (own := re.match(r"p(\d+)_", _name(op))):
            starts.setdefault(int(own[1]), position)
    return tuple(starts[number] for number in range(count))
