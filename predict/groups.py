"""Group the kernels of a prediction by source line, module, kind or pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from ..common.errors import OpcastError

#: Keys by which kernels can be grouped.
KEYS = ("line", "module", "kind", "phase")
#: Name of the group of kernels without a source line.
NO_LINE = "(no line)"
#: Numbers of layers, as in ``layers.0`` and ``Block_0``; not of names such as ``conv1``.
_NUMBER = re.compile(r"(?<![A-Za-z\d])\d+")
#: A name that ends in a number: a layer (``enc0``) if its siblings have the same contents.
_NAMED = re.compile(r"(.*[A-Za-z])(\d+)")
#: Minimum shared fraction of the contents of repeated layers: the compiler names a fusion by one of
#: its parts, not always the same one. Engineering estimate; stages of a ResNet, which differ in
#: their blocks, share at most 0.83.
_ALIKE = 0.9


class Timed(Protocol):
    """An XLA kernel or a PyTorch operator."""

    @property
    def kind(self) -> str:
        """Return the kind of kernel."""

    @property
    def total_us(self) -> float:
        """Return the microseconds over all executions."""

    @property
    def source_line(self) -> str:
        """Return ``file:line`` in the user's program, or an empty string."""

    @property
    def module(self) -> str:
        """Return the modules that contain it, joined by slashes, or an empty string."""

    @property
    def phase(self) -> str:
        """Return the pass that it belongs to, or an empty string."""

    @property
    def what(self) -> str:
        """Return the operation's name in the user's code."""


K = TypeVar("K", bound=Timed)


@dataclass(frozen=True)
class Group(Generic[K]):
    """Kernels of one source line, module, kind or pass.

    Attributes:
        name: The line (``file:line``), module (with a star for each layer number, followed by the
            pass unless it is the forward pass), kind or pass. If unknown, :data:`NO_LINE` for
            lines and empty otherwise.
        total_us: Microseconds over all executions in one run of the program.
        share: Fraction of the summed kernel time.
        kernels: Kernels, the most expensive first.
    """

    name: str
    total_us: float
    share: float
    kernels: tuple[K, ...]

    def shares(self, key: Callable[[K], str]) -> dict[str, float]:
        """Return the fraction of the group's time per value of ``key``, largest first."""
        sums: dict[str, float] = {}
        for k in self.kernels:
            sums[key(k)] = sums.get(key(k), 0.0) + k.total_us
        total = self.total_us or 1.0
        return {n: v / total for n, v in sorted(sums.items(), key=lambda item: -item[1])}


def grouped(kernels: Sequence[K], by: str) -> list[Group[K]]:
    """Group kernels; the group with the most time comes first.

    Args:
        kernels: All kernels of a program.
        by: One of :data:`KEYS`.

    Raises:
        OpcastError: The key is unknown.
    """
    star = starring((k.module, k.what) for k in kernels)
    keys: dict[str, Callable[[K], str]] = {
        "line": lambda k: k.source_line or NO_LINE,
        "module": lambda k: _with_pass(star(k.module), k.phase),
        "kind": lambda k: k.kind,
        "phase": lambda k: k.phase,
    }
    if by not in keys:
        raise OpcastError(f"kernels cannot be grouped by {by!r}", hint="by " + ", ".join(KEYS))
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
    """Return a function that replaces the layer numbers in a module's name by stars.

    Numbers between separators (``layers.0``, ``Block_0``) number layers. A number at the end of a
    name numbers layers if all sibling modules of that name have the same contents: ``enc0`` and
    ``enc1``, but neither ``conv1`` and ``conv2``, which contain no modules, nor ResNet stages.

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
