"""Known devices of operator models: stand-ins for other devices, and device effects.

Effects are factors on compute, memory and launch, the linear part of a family's log-ratio:

    log-ratio ≈ w · (g + d[device] + k[device, op and library])

with ``w`` the shares of compute, memory and launch in the analytical estimate. Where one of these
dominates, the ratio is a constant of the device at any kernel size, which a tree cannot extrapolate
beyond the sizes in its training data. Each level is a ridge regression on the residuals of the
level above, so that a library with few rows falls back to its device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...common.types import JsonMapping
from ...features.devices.device import DeviceSpec, line_of
from ...features.operators.columns import OpRows, by_name, distinct

#: Architecture, number of cores, lanes per core; devices with the same chip differ in memory or
#: power only.
Chip = tuple[str, int, int]
#: Largest relative difference in cores between chips of one design, which have different numbers of
#: cores disabled (B200 and GB200 2.7 %, MI210 and MI250X 5.8 %).
DISABLED = 0.08
#: Ridge penalty of each level, as a number of prior rows with effect 0: the rows a device or
#: library needs before its own effect outweighs the level above. Engineering estimate; not fitted.
RIDGE = 20.0
#: Separator between device and library in keys of the table: names contain no tabs.
_SEPARATOR = "\t"


def chip_of(spec: DeviceSpec) -> Chip:
    """Identity of a device's chip."""
    return spec.architecture, spec.core_count, spec.lanes_per_core


def alike(first: Chip, second: Chip) -> bool:
    """Whether two chips share a design: the same die or a revision, with similar core counts."""
    (a, cores, lanes), (b, others, other_lanes) = first, second
    near = abs(cores - others) <= DISABLED * max(cores, others)
    return near and lanes == other_lanes and line_of(a) == line_of(b)


def twins(names: Sequence[str], chips: Mapping[str, Chip]) -> list[tuple[str, ...]]:
    """Group devices by design: holding out one of them alone would leave its twin in."""
    found: list[list[str]] = []
    for name in names:
        near = [group for group in found if any(alike(chips[name], chips[o]) for o in group)]
        found = [group for group in found if group not in near]
        found.append([*(other for group in near for other in group), name])
    order = {name: place for place, name in enumerate(names)}
    groups = [tuple(sorted(group, key=order.__getitem__)) for group in found]
    return sorted(groups, key=lambda group: order[group[0]])


@dataclass
class KnownDevices:
    """Chips and vendors of the devices that a model was fitted to.

    Attributes:
        chips: Identity of the chip (:func:`chip_of`) by device.
        vendors: Vendor by device.
        platforms: Platforms of the devices, such as ``gpu``.
    """

    chips: dict[str, Chip] = field(default_factory=dict)
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
        chips = {name: (a, cores, lanes) for name, (a, cores, lanes) in data["chips"].items()}
        return cls(chips, dict(data["vendors"]), frozenset(data.get("platforms", ("gpu",))))

    def to_dict(self) -> dict[str, object]:
        """Convert to plain data for the manifest."""
        chips = {name: list(chip) for name, chip in self.chips.items()}
        return {"chips": chips, "vendors": self.vendors, "platforms": sorted(self.platforms)}

    @property
    def foreign(self) -> list[str]:
        """Devices of other vendors than the one with the most chips."""
        owned: dict[str, set[Chip]] = {}
        for name, chip in self.chips.items():
            owned.setdefault(self.vendors[name], set()).add(chip)
        first = max(owned, key=lambda vendor: (len(owned[vendor]), vendor), default="")
        return [name for name in self.chips if self.vendors[name] != first]

    def own_vendors(self, named: bool) -> frozenset[str]:
        """Vendors to whose unseen devices the learned ratios apply; empty for all.

        Where rows do not name a library, each vendor uses its own, and ratios do not transfer
        between vendors: XLA's matrix products run in cuBLAS on NVIDIA and in hipBLASLt on AMD chips
        (docs/operator-accuracy.md, "Products under XLA").

        Args:
            named: Whether rows name their library.
        """
        # Descriptions may omit the vendor.
        return frozenset() if named else frozenset({"", *self.vendors.values()})

    def elsewhere(self, rows: OpRows, devices: Mapping[str, DeviceSpec]) -> np.ndarray:
        """Mask of rows on a platform outside the training data, such as TPUs, shape ``(n,)``."""
        if not self.platforms <= {"gpu"}:
            return np.zeros(len(rows), bool)
        return rows.where("device", lambda name: devices[name].platform != "gpu")

    def native(self, device: np.ndarray) -> np.ndarray:
        """Mask of rows on the most common vendor's devices, shape ``(n,)``.

        A model of unseen devices may learn from these alone: chips of other vendors mislead as
        often as they help (docs/operator-learning.md). All rows, if that vendor has only one chip.

        Args:
            device: Known devices, shape ``(n,)``.
        """
        foreign = self.foreign
        own = {chip for name, chip in self.chips.items() if name not in foreign}
        return ~np.isin(device, foreign) if len(own) > 1 else np.ones(len(device), bool)

    def chip_names(self, device: np.ndarray) -> np.ndarray:
        """Name of each row's chip design, shape ``(n,)``."""
        group = {name: own[0] for own in twins(list(self.chips), self.chips) for name in own}
        code, order = distinct(device)
        return np.asarray(np.array([group[str(name)] for name in order], object)[code])

    def proxies(
        self, device: np.ndarray, devices: Mapping[str, DeviceSpec]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Find the known device that stands in for each row's device.

        An unseen device of a minority vendor resembles that vendor's known device more than the
        devices that the model of unseen devices learned from.

        Args:
            device: Devices, shape ``(n,)``.
            devices: Descriptions by name.

        Returns:
            Names of the known devices (the row's own name if none fits), and scopes: ``known``,
            ``sibling`` (one of the same design is known) or ``unseen``, shape ``(n,)`` each.
        """
        # Reversed, so that the first device of a vendor wins.
        by_vendor = {self.vendors[name]: name for name in reversed(self.foreign)}
        names, scopes = {}, {}
        code, found = distinct(device)
        for name in found:
            sibling = self._sibling(chip_of(devices[name]))
            like = sibling or by_vendor.get(devices[name].vendor)
            names[name] = name if name in self.chips else (like or name)
            scopes[name] = "known" if name in self.chips else "sibling" if sibling else "unseen"
        return (
            np.array([names[d] for d in found], object)[code],
            np.array([scopes[d] for d in found], object)[code],
        )

    def _sibling(self, chip: Chip) -> str | None:
        """The known device with the most similar chip of the same design, if any."""
        near = [name for name, own in self.chips.items() if alike(own, chip)]
        # A revision changes rates; disabled cores do not.
        return min(
            near,
            key=lambda name: (
                self.chips[name][0] != chip[0],
                abs(self.chips[name][1] - chip[1]),
            ),
            default=None,
        )


class DeviceEffects:
    """Effects by device, and by library on a device.

    Attributes:
        table: Effects on compute, memory and launch, shape ``(3,)``, by ``""`` (all devices),
            ``device`` and ``device`` + tab + ``library``.
    """

    def __init__(self, table: dict[str, np.ndarray] | None = None) -> None:
        self.table = table or {}

    def fit(
        self, share: np.ndarray, ratio: np.ndarray, device: np.ndarray, library: np.ndarray
    ) -> DeviceEffects:
        """Learn the effects.

        Args:
            share: Shares of compute, memory and launch, shape ``(n, 3)``.
            ratio: Log-ratios of measured latency to the estimate, shape ``(n,)``.
            device: Names of devices, shape ``(n,)``.
            library: Library that runs each row, shape ``(n,)``.
        """
        self.table = {"": _ridge(share, ratio)}
        rest = ratio - share @ self.table[""]
        for name, rows in by_name(device):
            self.table[name] = _ridge(share[rows], rest[rows])
            own = rest[rows] - share[rows] @ self.table[name]
            for inner, some in by_name(library[rows]):
                effect = _ridge(share[rows][some], own[some])
                self.table[f"{name}{_SEPARATOR}{inner}"] = effect
        return self

    def predict(self, share: np.ndarray, device: np.ndarray, library: np.ndarray) -> np.ndarray:
        """Linear part of the log-ratio, shape ``(n,)``; 0 if nothing was fitted."""
        ratio = np.zeros(len(share))
        if not self.table:
            return ratio
        for name, rows in by_name(device):
            above = self.table[""] + self.table.get(name, np.zeros(3))
            for inner, some in by_name(library[rows]):
                effect = above + self.table.get(f"{name}{_SEPARATOR}{inner}", np.zeros(3))
                ratio[rows[some]] = share[rows[some]] @ effect
        return ratio

    def parts(self, share: np.ndarray, device: str, library: str) -> dict[str, float]:
        """Contribution of each level to one row's log-ratio; ``share`` has shape ``(1, 3)``."""
        levels = {
            "all devices": "",
            "this device": device,
            "library on this device": f"{device}{_SEPARATOR}{library}",
        }
        none = np.zeros(3)
        return {what: float(share[0] @ self.table.get(at, none)) for what, at in levels.items()}

    def knows(self, device: np.ndarray, library: np.ndarray) -> np.ndarray:
        """Mask of rows whose library was fitted on their device, shape ``(n,)``."""
        found = np.zeros(len(device), bool)
        for name, rows in by_name(device):
            for inner, some in by_name(library[rows]):
                found[rows[some]] = f"{name}{_SEPARATOR}{inner}" in self.table
        return found

    def measured(self, device: np.ndarray, format_: np.ndarray, library: np.ndarray) -> np.ndarray:
        """Mask of rows whose format was fitted on their device under their library, ``(n,)``.

        Args:
            device: Known devices, shape ``(n,)``.
            format_: Formats of the operators, shape ``(n,)``.
            library: Their libraries, shape ``(n,)``; an empty one stands for any.
        """
        # Keys of the table: the device, and the format and library at the end.
        named = [name.split(_SEPARATOR) for name in self.table if _SEPARATOR in name]
        known = {(d, *inner.split("|")[-2:]) for d, inner in named}
        known |= {(d, f, "") for d, f, _ in known}
        rows = zip(device.tolist(), format_.tolist(), library.tolist(), strict=True)
        return np.fromiter((row in known for row in rows), bool, len(device))

    def unseen(self, share: np.ndarray, library: np.ndarray) -> np.ndarray:
        """Linear part for a device that was not fitted: the mean over the fitted devices.

        Args:
            share: Shares of compute, memory and launch, shape ``(n, 3)``.
            library: Library that runs each row, shape ``(n,)``.

        Returns:
            Shape ``(n,)``; 0 if nothing was fitted.
        """
        ratio = np.zeros(len(share))
        devices = [name for name in self.table if name and _SEPARATOR not in name]
        if not devices:
            return ratio
        for inner, rows in by_name(library):
            # Devices with this library predict better; without any, use all devices.
            own = [d for d in devices if f"{d}{_SEPARATOR}{inner}" in self.table]
            effects = [self.table[d] + self.table[f"{d}{_SEPARATOR}{inner}"] for d in own]
            effects = effects or [self.table[d] for d in devices]
            ratio[rows] = share[rows] @ (self.table[""] + np.mean(effects, axis=0))
        return ratio

    def to_dict(self) -> dict[str, list[float]]:
        """Plain data for the manifest."""
        # Five decimals of a log-ratio are 0.001 %, and keep the manifest readable.
        return {name: [round(float(v), 5) for v in values] for name, values in self.table.items()}

    @classmethod
    def from_dict(cls, data: dict[str, list[float]]) -> DeviceEffects:
        """Read :meth:`to_dict`'s data."""
        return cls({name: np.array(values) for name, values in data.items()})


def _ridge(share: np.ndarray, ratio: np.ndarray) -> np.ndarray:
    square = share.T @ share + RIDGE * np.eye(share.shape[1])
    return np.asarray(np.linalg.solve(square, share.T @ ratio))
