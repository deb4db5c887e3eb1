"""Finds the known device that stands in for another one, by chip and by vendor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ...common.types import JsonMapping
from ...features.devices.device import DeviceSpec
from ...features.operators.columns import distinct
from .family_tables import chip_of


@dataclass
class KnownDevices:
    """Chips and vendors of the devices that a model was fitted to.

    Attributes:
        chips: Identity of the chip (:func:`~.family_tables.chip_of`) by device.
        vendors: Vendor by device.
        platforms: Kinds of device, such as ``gpu``.
    """

    chips: dict[str, tuple[object, ...]] = field(default_factory=dict)
    vendors: dict[str, str] = field(default_factory=dict)
    platforms: frozenset[str] = frozenset(("gpu",))

    @classmethod
    def of(cls, devices: Mapping[str, DeviceSpec]) -> KnownDevices:
        """Take chips and vendors from device descriptions."""
        return cls(
            {name: chip_of(spec) for name, spec in devices.items()},
            {name: spec.vendor for name, spec in devices.items()},
            frozenset(spec.platform for spec in devices.values()),
        )

    @classmethod
    def from_dict(cls, data: JsonMapping) -> KnownDevices:
        """Read :meth:`to_dict`'s data; the first released models lack the platforms."""
        chips = {name: tuple(chip) for name, chip in data["chips"].items()}
        return cls(chips, dict(data["vendors"]), frozenset(data.get("platforms", ("gpu",))))

    def to_dict(self) -> dict[str, object]:
        """Plain data for the manifest."""
        chips = {name: list(chip) for name, chip in self.chips.items()}
        return {"chips": chips, "vendors": self.vendors, "platforms": sorted(self.platforms)}

    @property
    def foreign(self) -> list[str]:
        """Devices of other vendors than the one with the most chips."""
        owned: dict[str, set[tuple[object, ...]]] = {}
        for name, chip in self.chips.items():
            owned.setdefault(self.vendors[name], set()).add(chip)
        first = max(owned, key=lambda vendor: (len(owned[vendor]), vendor), default="")
        return [name for name in self.chips if self.vendors[name] != first]

    def native(self, device: np.ndarray) -> np.ndarray:
        """Rows of the most common vendor's devices, bool, shape ``(n,)``.

        A model of unseen devices may learn from these alone: chips of other vendors mislead as
        often as they help (docs/operator-learning.md). All rows, if that vendor has one chip only.

        Args:
            device: Known devices, shape ``(n,)``.
        """
        foreign = self.foreign
        own = {chip for name, chip in self.chips.items() if name not in foreign}
        return ~np.isin(device, foreign) if len(own) > 1 else np.ones(len(device), bool)

    def chip_names(self, device: np.ndarray) -> np.ndarray:
        """Name of each row's chip, equal for devices of the same chip, shape ``(n,)``."""
        order, code = np.unique(device.astype(str), return_inverse=True)
        return np.array([str(self.chips[str(name)]) for name in order], object)[code]

    def proxies(
        self, device: np.ndarray, devices: Mapping[str, DeviceSpec]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Find the known device that stands in for each row's own.

        An unseen device of a minority vendor is more like that vendor's known one than like those
        that the model of unseen devices learned from.

        Args:
            device: Any devices, shape ``(n,)``.
            devices: Descriptions by name.

        Returns:
            Names of the known devices (the row's own name if none fits), and scopes: ``known``,
            ``sibling`` or ``unseen``, shape ``(n,)`` each.
        """
        # Reversed, so that of several devices the first one wins.
        by_chip = {chip: name for name, chip in reversed(self.chips.items())}
        by_vendor = {self.vendors[name]: name for name in reversed(self.foreign)}
        names, scopes = {}, {}
        code, found = distinct(device)
        for name in found:
            sibling = by_chip.get(chip_of(devices[name]))
            like = sibling or by_vendor.get(devices[name].vendor)
            names[name] = name if name in self.chips else (like or name)
            scopes[name] = "known" if name in self.chips else "sibling" if sibling else "unseen"
        return (
            np.array([names[d] for d in found], object)[code],
            np.array([scopes[d] for d in found], object)[code],
        )
