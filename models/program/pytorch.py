"""Learned times of PyTorch kernels in whole models: effects by class of cost, and intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import exp, hypot
from typing import ClassVar

import numpy as np

from ...common.files import own_data
from ...common.types import JsonMapping, typed
from ...common.versions import version_numbers
from ...features.devices.device import DeviceSpec
from ..core.store import JsonModel
from ..effects import WHOLE, Effects, Level, Levels, Linear, group_weights
from ..trust.calibrator import Ends

#: Relinearizations of a fit.
_ROUNDS = 4
#: Factor on the largest share of a class in the training data up to which a program counts as
#: similar; and up to which errors of whole models apply rather than those of kernels.
_BEYOND, _FAR = 1.1, 2.0
#: Log half-width of the error on GPU programs that are unlike the training data, in formats or mix
#: of kernels. Of 421 rows of transformers and diffusion models on A100, A10, V100 and RTX 4090,
#: before any was learned from, 90 % were inside with it and some 80 % without
#: (huggingface.parquet of the published-torch pack).
UNLIKE = 0.35
#: The same for programs on NVIDIA GPUs with mostly f32 arithmetic: of 157 kernel-bound rows of
#: A100, A10, V100 and RTX 4090, none of which was learned from, 94 % are inside with it
#: (published-torch pack: huggingface and nvidia-examples).
UNLIKE_WIDE = 0.25
#: Log half-width for a chip that differs from the only one in the training data: clock under load,
#: memory, work sharing between two kinds of cores. Engineering estimate.
UNSEEN = 0.4
#: The same for cases without CPU measurements: training, 16 bits, or eager PyTorch if all rows are
#: compiled. Engineering estimate.
_UNLIKE_CPU = 0.7
#: Ratio of the 16-bit matrix peak to the f32 rate above which kernels other than products dominate:
#: it is 2 on GeForce cards, 4 on an A10, 8 on V100 and T4, 16 on A100.
_LEADING = 3.0
#: First release with kernels like those of recent ones, by platform.
_RECENT = {"gpu": (2, 0), "cpu": (2, 4)}

#: Classes of cost, and deviations of the effects on them.
_EFFECTS = own_data("models/program/pytorch.yaml")


def _levels() -> Levels:
    data = _EFFECTS
    ends = ("", "_backward", "_last", "_backward_last")
    costs = [*(f"{kind}{end}" for kind in data["kinds"] for end in ends), *data["others"]]
    levels = (
        Level(cost, name, float(d))
        for cost in costs
        for name, d in deviations().items()
        if name != "framework" or cost not in data["libraries"]
    )
    return Levels(dict.fromkeys(costs, 1.0), tuple(levels), (WHOLE,))


def deviations() -> dict[str, float]:
    """Prior deviation of the effects of each level, in logarithms."""
    return {str(k): float(v) for k, v in _EFFECTS["deviations"].items()}


class TorchEffects(Effects):
    """Learned effects on PyTorch kernels."""

    levels = _levels()


#: Classes of cost.
COSTS = tuple(TorchEffects.levels.prior)


def is_older(release: str, than: tuple[int, int]) -> bool:
    """Whether a release of PyTorch is given and precedes ``than``, a major and minor version."""
    numbers = version_numbers(release)[:2]
    return bool(numbers) and numbers < than


def torch_context(device: DeviceSpec, framework: str, release: str = "") -> dict[str, str]:
    """Levels of a program on a device.

    Args:
        device: The chip.
        framework: ``torch-eager`` or ``torch-compiled``.
        release: Release of PyTorch; empty for a recent one.
    """
    cpu = device.platform == "cpu"
    old = is_older(release, _RECENT["cpu" if cpu else "gpu"])
    return {
        # CPUs of all vendors use the same libraries.
        "all": device.platform if cpu else device.vendor,
        "framework": framework,
        "device": device.name,
        "release": release if old else "",
        "leading": "" if cpu else ("yes" if products_lead(device) else "no"),
    }


def products_lead(device: DeviceSpec) -> bool:
    """Whether 16-bit products are far faster than f32 operations, as on server boards."""
    return device.matrix_peak("f16") >= _LEADING * device.vector_peak("f32")


@dataclass
class TorchModel(JsonModel):
    """Learned factors on the times of PyTorch kernels.

    Attributes:
        effects: Effects by class of cost.
        ends: Interval bounds as logarithms of factors on the estimate, by the keys of
            :func:`end_keys`.
        shares: Largest share of each class of cost in the training data.
        provenance: Description of the training data.
    """

    form, what, command = 1, "torch", "train --models TABLE"
    #: Whether it learned from programs with mostly 16-bit arithmetic, or with wider formats.
    narrow: ClassVar[bool] = True

    effects: TorchEffects = field(default_factory=TorchEffects)
    ends: dict[str, Ends] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)
    provenance: dict[str, object] = field(default_factory=dict)

    @property
    def devices(self) -> list[str]:
        """Chips in the training data."""
        return typed(list[str], self.provenance["devices"], "devices")

    def factors(self, costs: Sequence[str], context: Mapping[str, str]) -> np.ndarray:
        """Factors on the times of kernels of some classes, ``(n,)``; 1 on other vendors'."""
        if not self._learned_of(context):
            return np.ones(len(costs))
        logs = self.effects.log_factors(context)
        return np.array([exp(logs[cost]) for cost in costs])

    def _learned_of(self, context: Mapping[str, str]) -> bool:
        return context["all"] in typed(list[str], self.provenance["vendors"], "vendors")

    def interval(
        self, seconds: Mapping[str, float], context: Mapping[str, str], train: bool, narrow: bool
    ) -> Ends | None:
        """Log bounds of the 90 % interval; ``None`` where errors of kernels are more informative.

        Args:
            seconds: Seconds by class of cost.
            context: From :func:`torch_context`.
            train: Whether it is a training step.
            narrow: Whether its arithmetic is mostly of 16 bits.
        """
        if not self._alike(seconds, narrow, _FAR) or not self._learned_of(context):
            return None
        keys = self._keys(context, train)
        ends = next((self.ends[key] for key in keys if key in self.ends), None)
        alike = self.effects.knows("leading", context["leading"]) and self._alike(seconds, narrow)
        return ends if alike or not ends else widened(ends, UNLIKE)

    def _alike(self, seconds: Mapping[str, float], narrow: bool, beyond: float = _BEYOND) -> bool:
        """Whether no class of cost has a much larger share than in the training data."""
        total = sum(seconds.values())
        shares = all(s <= beyond * self.shares.get(c, 0.0) * total for c, s in seconds.items())
        return shares and narrow == self.narrow

    def _keys(self, context: Mapping[str, str], train: bool) -> tuple[str, ...]:
        known = "known" if self.effects.knows("device", context["device"]) else "new"
        return end_keys(known, context, train)

    def to_dict(self) -> dict[str, object]:
        """Convert to plain data for JSON."""
        return {
            "effects": {k: round(v, 4) for k, v in sorted(self.effects.values.items())},
            "ends": {k: [round(e, 4) for e in v] for k, v in self.ends.items()},
            "shares": {k: round(v, 3) for k, v in sorted(self.shares.items())},
            "provenance": self.provenance,
        }

    @classmethod
    def from_dict(cls, data: JsonMapping) -> TorchModel:
        """Read :meth:`to_dict`'s data."""
        return cls(
            TorchEffects(typed(dict[str, float], data["effects"], "effects")),
            typed(dict[str, Ends], data["ends"], "ends"),
            typed(dict[str, float], data["shares"], "shares"),
            dict(data["provenance"]),
        )


class CpuTorchModel(TorchModel):
    """The same for kernels on CPUs, with wider intervals for cases outside the training data."""

    what = "torch-cpu"
    narrow: ClassVar[bool] = False

    def interval(
        self, seconds: Mapping[str, float], context: Mapping[str, str], train: bool, narrow: bool
    ) -> Ends | None:
        """As in :class:`TorchModel`; never ``None``."""
        special, *_, known = self._keys(context, train)
        if special in self.ends and self._alike(seconds, narrow):
            return self.ends[special]
        return widened(self.ends.get(special, self.ends[known]), _UNLIKE_CPU)


def widened(ends: Ends, by: float) -> Ends:
    """Bounds with an independent error of half-width ``by`` added, all in logarithms."""
    return -hypot(ends[0], by), hypot(ends[1], by)


def end_keys(known: str, context: Mapping[str, str], train: bool) -> tuple[str, ...]:
    """Keys of interval bounds, the most specific first.

    Args:
        known: ``known`` for chips in the training data, else ``new``.
        context: From :func:`torch_context`.
        train: Whether it is a training step.
    """
    own = f"{known}/leading" if context["leading"] == "yes" else known
    return f"{own}/{context['framework']}/{'train' if train else 'infer'}", own, known


@dataclass(frozen=True)
class Measured:
    """Measurements of ``n`` whole models.

    Attributes:
        seconds: Seconds without effects, by class of :data:`COSTS`, shape ``(n, costs)``.
        contexts: From :func:`torch_context`.
        logs: Logarithms of measured seconds, shape ``(n,)``.
        groups: Model of each row: models are weighted by the square root of their rows.
        apart: Mask of classes without effects, since their kernels were measured individually,
            shape ``(n, costs)``.
    """

    seconds: np.ndarray
    contexts: list[dict[str, str]]
    logs: np.ndarray
    groups: np.ndarray
    apart: np.ndarray

    def predicted(self, effects: TorchEffects) -> np.ndarray:
        """Seconds by class of cost under effects, shape ``(n, costs)``."""
        distinct, rows = self._distinct
        logs = [effects.log_factors(context) for context in distinct]
        each = np.array([[own[cost] for cost in COSTS] for own in logs])[rows]
        return np.asarray(self.seconds * np.exp(np.where(self.apart, 0.0, each)))

    @cached_property
    def _distinct(self) -> tuple[list[dict[str, str]], list[int]]:
        """Contexts that differ, and the one of each row."""
        found = {frozenset(own.items()): own for own in self.contexts}
        places = {kind: place for place, kind in enumerate(found)}
        return list(found.values()), [places[frozenset(own.items())] for own in self.contexts]

    def fit(self, learn: np.ndarray) -> TorchEffects:
        """Fit effects to the rows ``learn`` (bool, shape ``(n,)``)."""
        effects, weight = TorchEffects(), group_weights(self.groups[learn])
        for _ in range(_ROUNDS):
            own = self.predicted(effects)
            total = own.sum(axis=1)
            shares = np.where(self.apart, 0.0, own / total[:, None])
            slopes = dict(zip(COSTS, shares.T, strict=True))
            slopes[WHOLE] = np.ones(len(total))
            linear = Linear.around(effects, self.contexts, slopes, self.logs, np.log(total))
            effects = linear.solve(learn, weight)
        return TorchEffects(effects.values)

    def errors(self, effects: TorchEffects) -> np.ndarray:
        """Logarithms of measured over predicted seconds, shape ``(n,)``."""
        return np.asarray(self.logs - np.log(self.predicted(effects).sum(axis=1)))
