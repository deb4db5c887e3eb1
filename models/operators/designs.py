"""Operators on designs (hypothetical devices): predictions on the base chip, scaled by physics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ...features.devices.catalogue import base_of, in_catalogue
from ...features.devices.device import DeviceSpec
from ...features.operators import OpFeatures
from ...features.operators.columns import OpRows
from ...features.operators.schema import FAMILIES
from ..trust.designs import Likeness, ends_of, is_near, scope_of, why_far
from .devices import KnownDevices
from .prediction import FamilyPrediction


class Designs(NamedTuple):
    """Finds the base devices of designs, and scales predictions from these to the designs.

    Attributes:
        family: Key of the family.
        known: Chips and vendors of the devices in the training data.
        learned: Names of these devices.
        own: Names of devices that are predicted directly: these, and those that the model was
            calibrated to.
    """

    family: str
    known: KnownDevices
    learned: tuple[str, ...]
    own: frozenset[str]

    def bases(
        self, rows: OpRows, devices: Mapping[str, DeviceSpec]
    ) -> tuple[OpRows, Mapping[str, DeviceSpec]]:
        """Replace designs by their bases.

        Args:
            rows: Rows of the family.
            devices: Descriptions by the values of ``device``.

        Returns:
            Rows and devices for the learned models; ``rows`` and ``devices`` themselves if no
            device is a design.
        """
        code, names = rows.codes("device")
        bases = {n: base for n in names if n not in self.own and (base := self._base(devices[n]))}
        if not bases:
            return rows, devices
        renamed = np.array([bases[n].name if n in bases else n for n in names], object)[code]
        known = {base.name: base for base in bases.values()}
        return rows.with_texts({"device": renamed}), {**known, **devices}

    def _base(self, device: DeviceSpec) -> DeviceSpec | None:
        """The catalogue device that a design starts from; ``None`` for other devices.

        A design whose file names no base gets one only if the training data has a catalogue chip
        that fits.
        """
        base = base_of(device)
        if base is None or device.base == base.name:
            return base
        name = np.array([device.name], object)
        like, scope = self.known.proxies(name, {device.name: device})
        learned = [str(like[0])] if scope[0] == "sibling" else self.learned
        return base if any(map(in_catalogue, learned)) else None

    def move(
        self, found: FamilyPrediction, features: OpFeatures, ratio: np.ndarray, like: Likeness
    ) -> None:
        """Scale predictions on the bases of designs to the designs, in place.

        Args:
            found: Predictions of ``n`` rows on the bases.
            features: Features of the rows on the designs.
            ratio: Analytical estimates on the designs over those on the bases, shape ``(n,)``.
            like: Similarity of the designs to their bases, from :func:`likeness`.
        """
        if FAMILIES.get(self.family) == "pointwise":
            like = like._replace(reuse=1.0)
        found.lo, found.hi = ends_of((found.lo, found.hi), found.latency, ratio, like)
        found.latency = found.latency * ratio
        found.scope = scope_of(found.scope, ratio, like)
        found.in_domain = found.in_domain & is_near(ratio, like)
        found.roofline, found.bound = features.roofline_s, features.bound


def likeness(
    rows: OpRows,
    devices: Mapping[str, DeviceSpec],
    learned: OpRows,
    known: Mapping[str, DeviceSpec],
) -> Likeness:
    """Similarity of the rows' devices to their stand-ins, shape ``(n,)`` each.

    Args:
        rows: ``n`` rows.
        devices: Descriptions by the values of their ``device``.
        learned: The same rows on the stand-ins.
        known: Descriptions by the values of ``device`` there.
    """
    code, names = rows.codes("device")
    bases = dict(zip(code.tolist(), learned.texts("device").tolist(), strict=True))
    found = {at: Likeness.of(devices[names[at]], known[base]) for at, base in bases.items()}
    akin, reuse = zip(*(found[at] for at in code.tolist()), strict=True)
    return Likeness(np.array(akin), np.array(reuse))


def why_outside(design: DeviceSpec, base: DeviceSpec, ratio: np.ndarray) -> list[str]:
    """Why a base does not represent a design, ``ratio`` apart; at most one reason."""
    if not Likeness.of(design, base).akin:
        return [f"{design.name} is priced as {base.name}, of another architecture or other dies"]
    return [] if is_near(ratio)[0] else [why_far(design.name, base.name, float(ratio[0]))]
