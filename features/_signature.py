"""Cheap keys of instructions: equal keys mean equal kernels, made canonical only once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .ir import Op, Program


class Signatures:
    """Keys of a program's instructions and computations; names do not enter.

    Args:
        program: The program.
        ids: Numbers of computations by content, shared between programs.
    """

    def __init__(self, program: Program, ids: dict[Any, int]) -> None:
        self._program = program
        self._ids = ids
        self._known: dict[str, int] = {}

    def of(self, op: Op, operands: Sequence[Op]) -> tuple[Any, ...]:
        """Key of an instruction with the ops that it reads; equal operands count as one."""
        places = {id(operand): i for i, operand in enumerate(operands)}
        reads = [(o.results, o.is_tuple, o.attrs.get("nesting"), places[id(o)]) for o in operands]
        return (
            *self._own(op),
            tuple(reads),
            self._program.num_replicas,
            self._program.num_partitions,
        )

    def _own(self, op: Op) -> tuple[Any, ...]:
        called = tuple([self._computation(name) for name in op.called]) if op.called else ()
        attrs = _frozen(op.attrs) if op.attrs else ()
        return op.opcode, op.results, op.is_tuple, called, attrs

    def _computation(self, name: str) -> int:
        found = self._known.get(name)
        if found is None:
            comp = self._program.computations[name]
            key = (comp.root, *[(*self._own(op), op.operands) for op in comp.ops])
            found = self._known[name] = self._ids.setdefault(key, len(self._ids))
        return found


#: Written out: containers have no hash, NaN and -0.0 compare wrongly, and 1 equals 1.0 and True.
_WRITTEN = (dict, list, set, float, bool)


def _frozen(attrs: dict[str, Any]) -> tuple[Any, ...]:
    return tuple([(k, repr(v) if type(v) in _WRITTEN else v) for k, v in attrs.items()])
