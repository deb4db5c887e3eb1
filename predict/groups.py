"""Kernels of a prediction put together by source line, module, kind or pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from ..common.errors import OpcastError

#: What kernels may be put together by.
KEYS = ("line", "module", "kind", "phase")
#: Name of the group of kernels without a source line.
NO_LINE = "(no line)"
#: Numbers of layers, as in ``layers.0`` and ``Block_0``; not of names such as ``conv1``.
_NUMBER = re.compile(r"(?<![A-Za-z\d])\d+")
#: A name that ends in a number: a layer (``enc0``) where its neighbours do the same, else a name.
_NAMED = re.compile(r"(.*[A-Za-z])(\d+)")
#: Share of what modules do inside them that is the same of repeated layers: the compiler names a
#: fusion by one of its parts, not always the same. Engineering estimate; stages of a ResNet, which
#: differ in their blocks, share 0.83 at most.
_ALIKE = 0.9


class Timed(Protocol):
    """A kernel of XLA, or an operator of PyTorch."""

    @property
    def kind(self) -> str:
        """Kind of kernel."""

    @property
    def total_us(self) -> float:
        """Microseconds over all executions."""

    @property
    def source_line(self) -> str:
        """``file:line`` in the user's program, or empty."""

    @property
    def module(self) -> str:
        """Modules that it belongs to, joined by slashes, or empty."""

    @property
    def phase(self) -> str:
        """Pass that it belongs to, or empty."""

    @property
    def what(self) -> str:
        """Operation as the user's code names it."""


K = TypeVar("K", bound=Timed)


@dataclass(frozen=True)
class Group(Generic[K]):
    """Kernels of one source line, module, kind or pass.

    Attributes:
        name: The line (``file:line``), module (a star for each number, and its pass unless that is
            the forward one), kind or pass. Where it is unknown :data:`NO_LINE`, otherwise empty.
        total_us: Microseconds over all their executions in one run of the program.
        share: Of the summed kernel time.
        kernels: The costliest first.
    """

    name: str
    total_us: float
    share: float
    kernels: tuple[K, ...]

    def shares(self, key: Callable[[K], str]) -> dict[str, float]:
        """Share of the group's time by what ``key`` gives of a kernel, largest first."""
        sums: dict[str, float] = {}
        for k in self.kernels:
            sums[key(k)] = sums.get(key(k), 0.0) + k.total_us
        total = self.total_us or 1.0
        return {n: v / total for n, v in sorted(sums.items(), key=lambda item: -item[1])}


def grouped(kernels: Sequence[K], by: str) -> list[Group[K]]:
    """Put kernels together; what takes most time comes first.

    Args:
        kernels: All kernels of a program.
        by: One of :data:`KEYS`.

    Raises:
        OpcastError: There is no such key.
    """
    star = starring((k.module, k.what) for k in kernels)
    keys: dict[str, Callable[[K], str]] = {
        "line": lambda k: k.source_line or NO_LINE,
        "module": lambda k: _with_pass(star(k.module), k.phase),
        "kind": lambda k: k.kind,
        "phase": lambda k: k.phase,
    }
    if by not in keys:
        raise OpcastError(f"kernels are not put together by {by!r}", hint="by " + ", ".join(KEYS))
    found: dict[str, list[K]] = {}
    for k in sorted(kernels, key=lambda k: -k.total_us):
        found.setdefault(keys[by](k), []).append(k)
    total = sum(k.total_us for k in kernels) or 1.0
    sums = [(name, sum(k.total_us for k in own), tuple(own)) for name, own in found.items()]
    groups = [Group(name, time, time / total, own) for name, time, own in sums]
    return sorted(groups, key=lambda group: -group.total_us)


def _with_pass(module: str, phase: str) -> str:
    return " ".join(filter(None, (module, f"({phase})" if phase not in ("", "forward") else "")))


def starring(work: Iterable[tuple[str, str]]) -> Callable[[str], str]:
    """Make what puts a star for the numbers of a program's layers into the name of a module.

    Numbers between separators (``layers.0``, ``Block_0``) are those of layers. One at the end of a
    name is where all modules of that name beside it have the same inside: ``enc0`` and ``enc1``,
    but neither ``conv1`` and ``conv2``, which hold no modules, nor the stages of a ResNet.

    Args:
        work: Module and operation of each of the program's kernels.
    """
    inside: dict[tuple[str, ...], set[tuple[tuple[str, ...], str]]] = {}
    for module, what in set(work):
        parts = tuple(module.split("/"))
        for depth in range(1, len(parts)):
            inside.setdefault(parts[:depth], set()).add((parts[depth:], what))
    siblings: dict[tuple[tuple[str, ...], str], list[tuple[str, ...]]] = {}
    for path in inside:
        if named := _NAMED.fullmatch(path[-1]):
            siblings.setdefault((path[:-1], named[1]), []).append(path)
    layers: set[tuple[str, ...]] = set()
    for own in siblings.values():
        first = inside[own[0]]
        alike = (len(first & inside[p]) >= _ALIKE * len(first | inside[p]) for p in own)
        if len(own) > 1 and all(alike):
            layers.update(own)

    def star(module: str) -> str:
        parts = tuple(module.split("/"))
        named = [
            _NAMED.sub(r"\1*", part) if parts[: depth + 1] in layers else part
            for depth, part in enumerate(parts)
        ]
        return _NUMBER.sub("*", "/".join(named))

    return star
