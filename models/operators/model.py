"""Bundle of operator models (families, devices, corrections), saved as one folder."""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...common.errors import ModelError
from ...common.files import own_data
from ...common.types import JsonMapping, listed
from ...features.devices.catalogue import find_described, find_device, in_catalogue
from ...features.devices.device import DeviceSpec, usable_cores
from ...features.operators.columns import OpRows
from ...features.operators.schema import BLOCKS, NAMES, faulty, parameters_of
from ..adapt.gaussian_process import ErrorPosterior
from ..core.store import (
    DAMAGE,
    OPERATORS,
    contents_of,
    pack,
    predicts_operators,
    read_files,
    read_manifest,
    training_info,
    unpack,
    write_folder,
)
from .family import FamilyModel
from .family_tables import FOLD_ROWS, FamilySettings
from .mixture import Member
from .prediction import SEPARATOR, FamilyPrediction, joined, widen_unknown
from .rows import joined_versions, versions_of

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger(__name__)

#: Fewest rows of a family: only a few per cent of them are held out, and fewer would not be enough
#: to calibrate intervals with.
MIN_ROWS = 200
#: Most rows to predict in one task, and fewest rows for using several cores: larger tasks are no
#: faster, and smaller ones keep all cores busy until the end.
TASK_ROWS = 8192
#: Most rows that a family of blocks learns from, in total and per fold without a chip: tables of
#: mixed batches are large even for one device. Engineering estimates.
BLOCK_ROWS, BLOCK_FOLD_ROWS = 80_000, 8000


class OpModel:
    """Latencies of library operators, on known devices and on any device with a description.

    Attributes:
        families: Models by family.
        devices: Descriptions of the devices that the model was fitted or calibrated to.
        described: Further descriptions for predictions, which take precedence; not saved.
        versions: Versions of each library in the training rows, where these name them; those of
            calibration rows by library, device and family.
        info: Provenance of the training.
    """

    def __init__(self) -> None:
        self.families: dict[str, FamilyModel] = {}
        self.devices: dict[str, DeviceSpec] = {}
        self.described: dict[str, DeviceSpec] = {}
        self.versions: dict[str, list[str]] = {}
        self.info: dict[str, object] = {}

    def fit(
        self,
        rows: pd.DataFrame,
        devices: Mapping[str, DeviceSpec],
        settings: Callable[[str], FamilySettings],
        progress: Callable[[str, float], None] = lambda family, seconds: None,
    ) -> OpModel:
        """Learn every family with enough rows; rows with known faults are left out.

        Args:
            rows: Result of :func:`~opcast.models.operators.rows_of_dataset`.
            devices: Descriptions by name.
            settings: Settings by family.
            progress: Called with each fitted family and its seconds.

        Raises:
            ModelError: No family has enough rows.
        """
        # Faulty labels are dropped here once and for all; rows that only mislead about other
        # devices stay for the regressor of known devices.
        good = rows[~faulty(rows, "wrong")]
        self.devices = {name: devices[name] for name in sorted(set(good["device"]))}
        self.versions = versions_of(good)
        for key in sorted(set(good["key"])):
            part = good[good["key"] == key]
            if len(part) < MIN_ROWS:
                logger.warning("left out %s: only %d rows", key, len(part))
                continue
            start = time.perf_counter()
            self.families[key] = FamilyModel(key, settings(key)).fit(part, devices)
            progress(key, time.perf_counter() - start)
        if not self.families:
            raise ModelError(f"no family of operators has {MIN_ROWS} rows or more")
        return self

    def own(self) -> OpModel:
        """A copy whose devices and corrections can change without changing these."""
        result = copy.copy(self)
        result.families = {key: family.own() for key, family in self.families.items()}
        result.devices, result.described = dict(self.devices), dict(self.described)
        result.info = dict(self.info)
        return result

    def joined(self, other: OpModel) -> OpModel:
        """Merge in another model's families, which replace families of the same name."""
        result = OpModel()
        result.families = self.families | other.families
        result.devices = self.devices | other.devices
        result.versions = joined_versions(self.versions, other.versions)
        # The first model's provenance is kept, with the other's below "added".
        added = [*listed(self.info.get("added")), {**other.info, "families": [*other.families]}]
        # Figures of families that are replaced do not describe the result.
        figures = [f for f in listed(self.info.get("metrics")) if not _is_of(f, other.families)]
        result.info = {**self.info, "added": added}
        if "metrics" in self.info:
            result.info["metrics"] = figures
        return result

    def spec(self, name: str) -> DeviceSpec:
        """Description of a device: from :attr:`described`, the model, or the catalogue.

        Raises:
            DeviceError: There is no such device.
        """
        return find_described(name, {**self.devices, **self.described})

    def describes(self, name: str) -> bool:
        """Whether :meth:`spec` finds a device."""
        return name in self.devices or name in self.described or in_catalogue(name)

    def predict(self, rows: pd.DataFrame | OpRows) -> FamilyPrediction:
        """Predict rows of any families, in their order.

        Args:
            rows: ``key``, ``device`` and the columns of the families' parameters. A library
                ``version`` outside the training data widens the interval.

        Raises:
            ModelError: A family was not learned; the message lists those that were.
            DatasetError: A row lacks a parameter.
        """
        rows = OpRows.of(rows)
        code, keys = rows.codes("key")
        missing = sorted(set(keys) - set(self.families))
        if missing:
            known = ", ".join(sorted(self.families))
            raise ModelError(
                f"the model knows no operators {missing[0]!r}", hint=f"it has: {known}"
            )
        specs = {name: self.spec(name) for name in rows.codes("device")[1]}
        n = len(rows)
        # A query of one operator, the common case, needs none of the copies below.
        if len(keys) == 1 and n < TASK_ROWS:
            prediction = self.families[keys[0]].predict(rows, specs)
            widen_unknown(prediction, rows, self.versions)
            return prediction
        # Encode the shared columns once for all parts.
        for column in NAMES:
            rows.codes(column)

        def run(task: tuple[str, np.ndarray]) -> tuple[np.ndarray, FamilyPrediction]:
            key, at = task
            # Copy only the columns that the family needs.
            part = rows.take(at, (*parameters_of(key), *NAMES, "device"))
            return at, self.families[key].predict(part, specs)

        tasks = [
            (key, at)
            for place, key in enumerate(keys)
            for own in [np.flatnonzero(code == place)]
            for at in np.array_split(own, -(-len(own) // TASK_ROWS))
        ]
        threads = min(_threads(), len(tasks)) if n >= TASK_ROWS else 1
        if threads > 1:
            # XGBoost and NumPy release the GIL; unlike OpenMP's, these threads do not wait for each
            # other within a call. The largest parts go first.
            tasks.sort(key=lambda task: -len(task[1]))
            with ThreadPoolExecutor(threads) as pool:
                prediction = joined(n, pool.map(run, tasks))
        else:
            prediction = joined(n, map(run, tasks))
        widen_unknown(prediction, rows, self.versions)
        return prediction

    def with_members(
        self, row: OpRows, device: DeviceSpec
    ) -> tuple[FamilyPrediction, list[Member]]:
        """Predict a single operator like :meth:`predict`, with the libraries of its mixture.

        Args:
            row: The operator, of a learned family; its ``device`` is the name of ``device``.
            device: Description of its device.
        """
        family = self.families[row.texts("key")[0]]
        prediction, members = family.with_members(row, {device.name: device})
        widen_unknown(prediction, row, self.versions)
        return prediction, members

    def calibrate(self, rows: pd.DataFrame) -> dict[str, int]:
        """Adapt to the devices of measured rows.

        Args:
            rows: ``key``, ``device``, ``latency_us`` and parameters.

        Returns:
            Number of rows used by ``family @ device``.

        Raises:
            DatasetError: A row lacks a parameter, or has no positive latency.
            DeviceError: A device has no description.
        """
        used = {}
        for (key, device), part in rows.groupby(["key", "device"], sort=True):
            if key not in self.families:
                continue
            spec = self.spec(str(device))
            # Keep the description under which the model was calibrated.
            self.devices[str(device)] = spec
            correction = self.families[key].calibrate(str(device), part, {str(device): spec})
            used[f"{key} @ {device}"] = correction.count
            self.learn_versions(part, str(device), str(key))
        return used

    def learn_versions(self, rows: pd.DataFrame, device: str, family: str) -> None:
        """Add the versions in some rows to the known ones of their family on their device."""
        # A library without any known version has no unknown ones either; that must not change.
        found = {k: own for k, own in versions_of(rows).items() if k in self.versions}
        here = {SEPARATOR.join((library, device, family)): own for library, own in found.items()}
        self.versions = joined_versions(self.versions, here)

    def contents(self) -> tuple[dict[str, object], dict[str, bytes]]:
        """Manifest, with :attr:`info`, and files of the model folder by relative name."""
        families: dict[str, object] = {}

        def save_families(root: Path) -> None:
            for key, model in self.families.items():
                folder = root / _folder(key)
                families[key] = model.save(folder)
                for device, correction in model.corrections.items():
                    data = pack(correction.to_arrays())
                    (folder / f"correction-{device}.npz").write_bytes(data)

        files = contents_of(save_families)
        manifest = {
            **self.info,
            "kind": OPERATORS,
            "units": {"latency": "s"},
            "devices": {name: _spec_data(spec) for name, spec in sorted(self.devices.items())},
            "families": families,
            **({"versions": self.versions} if self.versions else {}),
        }
        return manifest, files

    def save(self, path: Path | str) -> None:
        """Write the model folder; replaces an earlier model at the same place."""
        write_folder(Path(path), *self.contents())

    @classmethod
    def load(cls, path: Path | str, only: Sequence[str] | None = None) -> OpModel:
        """Read a model folder.

        Args:
            path: The folder.
            only: Families to read, to save time; all by default.

        Raises:
            ModelError: The folder is missing, damaged, or holds another kind of model.
        """
        path = Path(path)
        manifest = read_manifest(path)
        if not predicts_operators(manifest):
            raise ModelError(
                "holds no model of library operators",
                where=str(path),
                hint="train one on a dataset that `opcast data import published` made",
            )
        files = read_files(path, manifest, None if only is None else [_folder(k) for k in only])
        try:
            return cls._read(path, manifest, files, only)
        except DAMAGE as error:
            raise ModelError(
                f"damaged model: {type(error).__name__}: {error}",
                where=str(path),
                hint="train or copy it again",
            ) from None

    @classmethod
    def _read(
        cls,
        path: Path,
        manifest: JsonMapping,
        files: Mapping[str, bytes],
        only: Sequence[str] | None,
    ) -> OpModel:
        model = cls()
        model.devices = {
            name: find_device(name) if data is None else DeviceSpec.from_dict(data, where=name)
            for name, data in manifest["devices"].items()
        }
        for key, data in manifest["families"].items():
            if only is not None and key not in only:
                continue
            family = FamilyModel.load(key, path / _folder(key), data)
            prefix = f"{_folder(key)}/correction-"
            for name, content in files.items():
                if name.startswith(prefix):
                    device = name.removeprefix(prefix).removesuffix(".npz")
                    family.corrections[device] = ErrorPosterior.from_arrays(unpack(content))
            model.families[key] = family
        # Models from tables without versions, and the first released ones, lack this entry.
        versions = manifest.get("versions", {})
        model.versions = {str(k): [str(v) for v in own] for k, own in versions.items()}
        entries = ("kind", "units", "devices", "families", "versions")
        model.info = training_info(manifest, entries)
        return model


def default_settings(
    estimator: str = "xgboost",
    n_jobs: int = 1,
    seed: int = 0,
    max_rows: int = 1_000_000,
    **params: Any,
) -> Callable[[str], FamilySettings]:
    """Settings of every family for an estimator.

    Args:
        estimator: Name of the estimator.
        n_jobs: Threads.
        seed: Seed of draws and regressors.
        max_rows: Most rows a family's regressor for known devices learns from.
        params: Parameters of the estimator that replace the defaults of both regressors.
    """
    # Estimators without an entry use their defaults for both regressors.
    own = own_data("models/operators/defaults.yaml").get(estimator, {})

    def of(family: str) -> FamilySettings:
        block = family in BLOCKS
        other = own.get("blocks", {}) if block else {}
        fewer = own.get("families", {}).get(family, {})
        return FamilySettings(
            estimator,
            {**own.get("known", {}), **other.get("known", {}), **fewer, **params},
            {**own.get("general", {}), **other.get("general", {}), **params},
            min(max_rows, BLOCK_ROWS) if block else max_rows,
            seed,
            n_jobs,
            BLOCK_FOLD_ROWS if block else FOLD_ROWS,
        )

    return of


def _threads() -> int:
    """Cores that this process may use; fewer if ``OMP_NUM_THREADS`` asks for fewer."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return min(usable_cores(), int(asked)) if asked.isdecimal() and int(asked) else usable_cores()


def _is_of(figure: object, families: Mapping[str, FamilyModel]) -> bool:
    return isinstance(figure, Mapping) and figure.get("key") in families


def _folder(key: str) -> str:
    return key.replace("/", "-")


def _spec_data(spec: DeviceSpec) -> dict[str, object] | None:
    """Data of a device for the manifest; ``None`` if the catalogue has the same description."""
    if in_catalogue(spec.name) and find_device(spec.name) == spec:
        return None
    return asdict(spec)
