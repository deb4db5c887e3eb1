"""The fitted models of a family and their files; fits them and evaluates them on held-out rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...common.errors import ModelError
from ...common.types import JsonMapping
from ...features.devices.device import DeviceSpec
from ...features.operators import OpFeatures
from ...features.operators.columns import OpRows
from ...features.operators.features import ops_schema_hash
from ...features.operators.schema import faulty
from ..adapt.covariance import Scale, time_shares
from ..core.kernel_table import KernelTable
from ..core.registry import estimator_class
from ..estimators.tabular import TabularEstimator
from .device_errors import DeviceErrors
from .devices import Chip, DeviceEffects, KnownDevices, twins
from .family_tables import (
    FamilySettings,
    GeneralFit,
    balanced_weights,
    constants,
    draw_rows,
    target_of,
)
from .prediction import FOREIGN, UNSEEN, DeviceIntervals
from .regressors import Folds, KnownModel, Strategy, UnseenFit, UnseenModel, error_figures
from .rows import among, codes, dispatch, drawn, group_names, held_out, libraries

if TYPE_CHECKING:
    import pandas as pd

#: Fewest rows of groups that are held out in turn. Engineering estimate.
LEAST_TESTED = 10_000
#: Separator between a device and a group of its training rows.
GROUP = "|"
#: Fewest rows on a device for a group to count as known there, and fewest relative to the median of
#: the device's groups. Errors on held-out rows of layers of ``tuned/linear`` with 10 to 20 other
#: rows are -12 to 14 %, as for layers with 40 to 100; with fewer -50 to 40 %. Where other groups
#: have hundreds of rows, ten are those of a single batch size.
GROUP_ROWS, GROUP_SHARE = 10, 0.25
_Tests = Iterable[tuple[KnownModel, np.ndarray]]


@dataclass(frozen=True, slots=True)
class Fitted:
    """The fitted models of a family.

    Attributes:
        known: Model of known devices.
        unseen: Model of unseen devices.
        errors: Covariance of errors on a new device, and corrections.
    """

    known: KnownModel
    unseen: UnseenModel
    errors: DeviceErrors

    def choose(
        self, features: OpFeatures, device: np.ndarray
    ) -> tuple[TabularEstimator, KernelTable]:
        """The regressor for rows of one device, and its feature table of them.

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
        """Uncorrected latencies in seconds, and whether they are in the domain, shape ``(n,)``.

        Args:
            rows: ``n`` rows.
            features: Their features.
            device: As for :meth:`choose`, possibly of several devices.
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
        """Contributions of the device effects to the log-ratio of one row, by level.

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
        """Fraction of the learned log-ratio that is kept, 1 on known devices, shape ``(n,)``."""
        known = np.isin(device, self.known.devices)
        return np.where(known, 1.0, self.unseen.kept(rows, devices))

    def save(self, path: Path) -> dict[str, object]:
        """Write both regressors below ``path``; returns the entries for the manifest.

        Entries keep the names of the released format: "way" is the strategy, "slopes" are the
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
            ModelError: A regressor is damaged, has other features, or does not use a table.
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


class Learned(NamedTuple):
    """Result of :meth:`FamilyFit.run`.

    Attributes:
        models: The fitted models.
        intervals: Interval bounds.
        groups: Known groups by device, as in :class:`.family.FamilyModel`.
        left_out: Errors on each chip when held out; by names of devices joined by ``+``.
    """

    models: Fitted
    intervals: DeviceIntervals
    groups: frozenset[str]
    left_out: dict[str, dict[str, float]]


@dataclass
class FamilyFit:
    """Fits a family to its rows.

    Attributes:
        family: Key of the family.
        settings: Settings of its regressors.
        rows: ``n`` rows with their latencies.
        features: Features of the rows.
    """

    family: str
    settings: FamilySettings
    rows: pd.DataFrame
    features: OpFeatures
    intervals: DeviceIntervals = field(default_factory=DeviceIntervals, init=False)

    def __post_init__(self) -> None:
        self.ratio = target_of(self.rows, self.features)
        self.device, self.code = self.rows["device"].to_numpy(object), codes(self.rows)
        self.names = tuple(sorted(set(self.device)))
        self.rng = np.random.default_rng(self.settings.seed)

    def run(self, known_devices: KnownDevices, vendors: frozenset[str]) -> Learned:
        """Fit, and calibrate intervals on held-out rows.

        Args:
            known_devices: Chips and vendors of the rows' devices.
            vendors: Vendors on whose unseen devices the ratios apply; empty for all.
        """
        held, parts = held_out(self.rows, self.family, self.settings.seed, self.rng)
        known = self._known(np.flatnonzero(~held), self.settings.max_rows)
        groups = self._judge_known(known, held, parts)
        job = GeneralFit(
            self.family, self.settings, self.features, self.ratio, self.device, self.code[0]
        )
        # Rows that mislead about other devices are still correct for their own: only the model of
        # unseen devices leaves them out.
        usable = ~faulty(self.rows, "local")
        fit = UnseenFit(job, known_devices, libraries(self.rows), usable, self.rng)
        unseen, folds = fit.make(np.flatnonzero(~held))
        unseen.vendors = vendors
        left_out = self._judge_unseen(known_devices.foreign, folds)
        errors = DeviceErrors.fit(
            known, unseen, known_devices.chips, self.features, self.code, self.ratio, folds
        )
        return Learned(Fitted(known, unseen, errors), self.intervals, groups, left_out)

    def _known(self, fitting: np.ndarray, most: int) -> KnownModel:
        """Fit the model of known devices to at most ``most`` of the rows at ``fitting``."""
        fitting = draw_rows(self.rng, fitting, balanced_weights(self.device[fitting]), most)
        args = self.features, self.device, self.code[0], self.ratio, fitting
        return KnownModel.fit(self.family, self.names, self.settings, *args)

    def _judge_known(
        self, known: KnownModel, held: np.ndarray, parts: list[np.ndarray]
    ) -> frozenset[str]:
        """Calibrate intervals of known devices on held-out rows; returns the known groups.

        Args:
            known: Model fitted without the rows ``held``.
            held: Mask of the held-out rows, shape ``(n,)``.
            parts: Masks of the folds of groups, likewise.
        """
        tested, left = [(known, np.flatnonzero(held))], []
        for part in parts:
            # About as many rows of new groups as of known ones.
            own, most = np.flatnonzero(part), max(LEAST_TESTED, int(held.sum())) // len(parts)
            own = draw_rows(self.rng, own, balanced_weights(self.device[own]), most)
            single = ~part & drawn(len(self.rows), self.rng)
            fold = self._known(np.flatnonzero(~part & ~single), self.settings.fold_rows)
            left.append((fold, own))
            # A fold fitted to fewer rows errs more on known groups than the final model.
            if len(self.rows) <= self.settings.fold_rows:
                tested.append((fold, np.flatnonzero(single)))
        own, scores, predicted, near = self._errors(tested)
        groups: frozenset[str] = frozenset()
        if parts:
            names = group_names(self.rows, self.family)
            groups = _known_groups(self.device, names)
            others, new_scores, _, new_near = self._errors(left)
            self.intervals.fit_groups(new_scores, names[others], self.device[others])
            near = np.concatenate([near, new_near])
        if len(own):
            if known.regressor.domain is not None:
                known.regressor.domain.calibrate(near)
            # With fewer than ten scores, a device takes the bounds of an unseen one.
            dtype = OpRows.of(self.rows).texts("dtype")[own]
            self.intervals.fit_devices(self.device[own], dtype, scores, predicted, 10)
        return groups

    def _errors(self, tests: _Tests) -> list[np.ndarray]:
        """Positions of tested rows, and the results of :meth:`KnownModel.held_out` on them."""
        found = [
            (
                own,
                *model.held_out(
                    self.features.take(own), self.device[own], self.code[0][own], self.ratio[own]
                ),
            )
            for model, own in tests
        ]
        return [np.concatenate(part) for part in zip(*found, strict=True)]

    def _judge_unseen(self, foreign: Sequence[str], folds: Folds) -> dict[str, dict[str, float]]:
        """Calibrate intervals of unseen devices on the errors on held-out chips.

        Args:
            foreign: Devices of minority vendors.
            folds: Log-ratios by models fitted without a chip.

        Returns:
            Error figures of each chip, with bounds calibrated on the other chips.
        """
        if not folds:
            return {}
        # Errors on held-out chips estimate those on a new device. Twins count as one device.
        scores = {group[0]: self.ratio[own] - left for group, (own, left) in folds.items()}
        widened = self.family in constants()["widened"]
        figures = {}
        for group in folds:
            others = {name: own for name, own in scores.items() if name != group[0]}
            judged = DeviceIntervals()
            judged.fit_unseen(others, foreign, widened)
            kind = FOREIGN if group[0] in foreign else UNSEEN
            ends = judged.ends.ends[kind, 0]
            figures["+".join(group)] = error_figures(scores[group[0]], ends)
        self.intervals.fit_unseen(scores, foreign, widened)
        return figures


def _known_groups(device: np.ndarray, group: np.ndarray) -> frozenset[str]:
    """Groups with enough rows on a device, as device, :data:`GROUP` and group."""
    pairs, counts = np.unique((device + GROUP + group).astype(str), return_counts=True)
    # A few rows of a group do not determine its others.
    own = np.char.partition(pairs, GROUP)[:, 0]
    usual = {name: np.median(counts[own == name]) for name in set(own.tolist())}
    least = np.array([max(GROUP_ROWS, GROUP_SHARE * usual[name]) for name in own.tolist()])
    return frozenset(pairs[counts >= least].tolist())
