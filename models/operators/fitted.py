"""The fitted models of a family of operators, and their files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...common.errors import ModelError
from ...common.types import JsonMapping
from ...features.devices.device import DeviceSpec
from ...features.operators import OpFeatures
from ...features.operators.columns import OpRows
from ...features.operators.features import ops_schema_hash
from ..adapt.covariance import Scale, time_shares
from ..core.kernel_table import KernelTable
from ..core.registry import estimator_class
from ..estimators.tabular import TabularEstimator
from .device_errors import DeviceErrors
from .devices import Chip, DeviceEffects, twins
from .regressors import KnownModel, Strategy, UnseenModel
from .rows import among, dispatch


@dataclass(frozen=True, slots=True)
class Fitted:
    """The models of a family.

    Attributes:
        known: Of known devices.
        unseen: Of unseen ones.
        errors: Covariance of errors on a new device, and corrections.
    """

    known: KnownModel
    unseen: UnseenModel
    errors: DeviceErrors

    def choose(
        self, features: OpFeatures, device: np.ndarray
    ) -> tuple[TabularEstimator, KernelTable]:
        """The regressor that predicts rows, all of one device, and its table of them.

        Args:
            features: Features of ``n`` rows.
            device: Known device that stands in for each row's own, or another, shape ``(n,)``.
        """
        if device[0] in self.known.devices:
            return self.known.regressor, self.known.table(features, device)
        return self.unseen.regressor, self.unseen.table(features)

    def latency_s(
        self,
        rows: OpRows,
        features: OpFeatures,
        device: np.ndarray,
        devices: Mapping[str, DeviceSpec],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Uncorrected latencies in seconds, and whether training rows are near, shape ``(n,)``.

        Args:
            rows: ``n`` rows.
            features: Their features.
            device: As for :meth:`choose`, of any devices.
            devices: Descriptions by the values of the rows' ``device``.
        """
        own = among(device, self.known.devices)
        latency, inside = np.empty(len(rows)), np.zeros(len(rows), bool)
        for mask, model in ((own, self.known), (~own, self.unseen)):
            at = np.flatnonzero(mask)
            if not len(at):
                continue
            some = features.take(at) if len(at) < len(rows) else features
            mine = rows.take(at) if len(at) < len(rows) else rows
            if isinstance(model, KnownModel):
                part = model.table(some, device[at])
                latency[at] = model.latency_s(some, part, device[at], dispatch(mine))
            else:
                part = model.table(some)
                latency[at] = some.base_s * np.exp(model.log_ratio(mine, some, part, devices))
            domain = model.regressor.domain
            inside[at] = domain.contains(part) if domain is not None else True
        return latency, inside

    def linear_parts(
        self, rows: OpRows, features: OpFeatures, device: np.ndarray
    ) -> dict[str, float]:
        """Contributions of the effects of devices to the log-ratio of one row, by level.

        Args:
            rows: The row.
            features: Its features.
            device: As for :meth:`choose`.
        """
        library, share = dispatch(rows), time_shares(features)
        if device[0] in self.known.devices:
            return self.known.effects.parts(share, str(device[0]), str(library[0]))
        return {"mean of known devices": float(self.unseen.effects.unseen(share, library)[0])}

    def carried(
        self, rows: OpRows, device: np.ndarray, devices: Mapping[str, DeviceSpec]
    ) -> np.ndarray:
        """Share of the learned log-ratio that is kept, 1 on known devices, shape ``(n,)``."""
        known = np.isin(device, self.known.devices)
        return np.where(known, 1.0, self.unseen.kept(rows, devices))

    def save(self, path: Path) -> dict[str, object]:
        """Write both regressors below ``path``; returns what the manifest has to hold.

        Names of entries are those of the released format: "way" is the strategy, "slopes" are the
        effects.
        """
        self.known.regressor.save(path / "known")
        self.unseen.regressor.save(path / "general")
        scale = self.errors.scale
        return {
            "devices": list(self.known.devices),
            "seen_chips": self.unseen.seen,
            "way": self.unseen.strategy._asdict(),
            "scale": {"centre": scale.centre.tolist(), "spread": scale.spread.tolist()},
            "slopes": self.known.effects.to_dict(),
            "general_slopes": self.unseen.effects.to_dict(),
            "covariance_log": self.errors.params.tolist(),
        }

    @classmethod
    def load(
        cls,
        family: str,
        path: Path,
        manifest: JsonMapping,
        chips: Mapping[str, Chip],
    ) -> Fitted:
        """Read what :meth:`save` wrote.

        Args:
            family: Key of the family.
            path: Folder of the regressors.
            manifest: The family's entries of the manifest.
            chips: Identity of the chip by known device.

        Raises:
            ModelError: A regressor is damaged, of other features, or of a kind without a table.
            KeyError: The manifest lacks an entry.
        """
        kind = estimator_class(manifest["estimator"])
        if not issubclass(kind, TabularEstimator):
            raise ModelError(f"estimator {manifest['estimator']!r} has no feature table")
        schema = ops_schema_hash(family)
        devices = tuple(manifest["devices"])
        effects = DeviceEffects.from_dict(manifest["slopes"])
        known = KnownModel(family, devices, kind.load(path / "known", schema), effects)
        way = manifest["way"]
        unseen = UnseenModel(
            family,
            kind.load(path / "general", schema),
            DeviceEffects.from_dict(manifest.get("general_slopes", {})),
            Strategy(way["within"], float(way["shrunk"]), way["alien"]),
            {name: int(count) for name, count in manifest["seen_chips"].items()},
        )
        centre, spread = (np.array(manifest["scale"][key]) for key in ("centre", "spread"))
        covariance = np.array(manifest["covariance_log"])
        errors = DeviceErrors(
            known, unseen, twins(devices, chips), Scale(centre, spread), covariance
        )
        return cls(known, unseen, errors)
