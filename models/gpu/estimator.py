"""Kernels of XLA on any GPU with a description, from published operators and passes over memory."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from ...features.dataset import Dataset
from ...features.device import DeviceSpec
from ...features.errors import DatasetError, ModelError
from ...features.kernel import Kernel
from ..base import KernelPrediction, distinct
from ..program_overhead import Overhead
from ..store import read_files, read_manifest, write_folder
from ..tables import KernelTable, kernel_table
from .answers import Answer, unknown
from .attention import attention_answer
from .constants import Constants, shipped_constants
from .correction import Correction
from .describe import (
    ATTENTION,
    CONV,
    OTHER,
    PASS,
    PRODUCT,
    Described,
    describe,
    irregular,
    products,
    traffic,
)
from .library import SHIPPED, Operators, canonical
from .products import Products
from .traffic import MemoryParams, launch_seconds, pass_seconds
from .words import limits_in_words, routes_in_words

#: Log half-widths added to the intervals of passes: XLA's fusions are not the published kernels;
#: what they do besides streaming rests on estimates.
FUSED, IRREGULAR = 0.15, 0.4
#: A radix sort reads and writes its keys this often (four digits and their histograms).
SORT_PASSES = 5.0
#: Footprint up to which published passes go, bytes.
LARGEST = 2.0**34
_CORRECTION = "correction"


class GpuEstimator:
    """Predicts the kernels of XLA on GPUs without having seen one.

    Products, convolutions and attention are asked of published operator models; fusions, reductions
    and copies of constants of memory traffic fitted to published passes; the rest is left to the
    roofline with a wide interval. Nothing is predicted below the roofline. Kernels measured under
    XLA, if there are any, teach a correction on top.

    Args:
        operators: Folder of the operator model; ``None`` takes the shipped one.
        constants: Of passes over memory; ``None`` takes those of the shipped model.
        params: Parameters of the estimator that learns the correction.
    """

    name = "gpu-xla"

    def __init__(
        self, operators: str | Path | None = None, constants: Constants | None = None,
        **params: Any,
    ) -> None:  # fmt: skip
        self.operators_path = Path(operators) if operators else SHIPPED
        self.constants = constants or shipped_constants()
        self.params = params
        self.correction: Correction | None = None

    @property
    def memory(self) -> MemoryParams:
        """Constants of passes over memory."""
        return self.constants.memory

    @property
    def overheads(self) -> dict[str, Overhead]:
        """What programs cost beyond their kernels, by platform, until measured ones say so.

        Times of kernels replayed as a graph hold the gap to the next one. XLA records most kernels
        into graphs, but not all: half of a gap is expected besides.
        """
        return {"gpu": Overhead(correlation=self.constants.correlation)}

    @cached_property
    def operators(self) -> Operators:
        """Published families, read on first use.

        Raises:
            ModelError: There is no operator model in the folder.
        """
        return Operators(self.operators_path)

    def fit(self, dataset: Dataset) -> Self:
        """Learn a correction from kernels measured under XLA; the rest of the model stays.

        Raises:
            DatasetError: The dataset has no kernel measured on a GPU.
        """
        from ..prepared import prepare
        from ..splits import fold_groups

        data = prepare(dataset, programs=False)
        rows = data.kernel_rows(np.arange(len(data.frame)))
        devices = data.frame["device"].to_numpy(object)[rows]
        gpu = np.array([data.devices[str(d)].platform == "gpu" for d in devices], bool)
        if not gpu.any():
            raise DatasetError(
                "no kernel was measured on a GPU", hint="measure some with: opcast profile"
            )
        rows, devices = rows[gpu], devices[gpu]
        from ..crossfit import predict_entries

        plain = self._clone_without_correction()
        entries = data.entry[rows]
        predicted = predict_entries(plain, data, entries).latency
        frame = data.frame.iloc[rows].reset_index(drop=True)
        groups = np.unique(fold_groups(frame, "unseen_family").astype(str), return_inverse=True)[1]
        table = data.table.take(entries)
        self.correction = Correction.fit(
            table, predicted, data.latency_s[rows], groups, sorted(set(devices)), **self.params
        )
        return self

    def _clone_without_correction(self) -> GpuEstimator:
        other = GpuEstimator(self.operators_path, self.constants, **self.params)
        other.__dict__["operators"] = self.operators
        return other

    def predict(self, kernels: Sequence[Kernel], device: DeviceSpec) -> KernelPrediction:
        """Predict every kernel on the device; equal kernels are computed once."""
        unique, index = distinct(kernels)
        if not unique:
            empty, names = np.zeros(0), np.zeros(0, object)
            return KernelPrediction(empty, empty, empty, names, names, np.zeros(0, bool))
        table = kernel_table(unique, device)
        found = self._predict(unique, canonical(device), table)
        if self.correction is not None:
            found = self.correction.apply(found, table, device.name)
        return _guarded(found, table, device).take(index)

    def _predict(
        self, kernels: Sequence[Kernel], device: DeviceSpec, table: KernelTable
    ) -> KernelPrediction:
        described = describe(kernels)
        answer = Answer.empty(len(kernels))
        for route in (PRODUCT, CONV, ATTENTION, PASS, OTHER):
            at = np.flatnonzero(described.route == route)
            if len(at):
                answer.put(at, self._route(route, described, at, device, table))
        return KernelPrediction(
            answer.latency, answer.lo, answer.hi, table.bound.copy(), answer.source,
            answer.in_domain,
        )  # fmt: skip

    def _route(
        self, route: str, found: Described, at: np.ndarray, device: DeviceSpec, table: KernelTable
    ) -> Answer:
        if route == PRODUCT:
            return Products(self.operators, device, self.memory).gemms(products(found, at))
        if route == CONV:
            return Products(self.operators, device, self.memory).convs(products(found, at))
        if route == ATTENTION:
            calls = [found.attention[i] for i in at.tolist()]
            return attention_answer(calls, self.operators, device)
        if route == PASS:
            return self._passes(found.row[at], device)
        return self._others(found.row[at], device, table.base_s[at])

    def _passes(self, row: np.ndarray, device: DeviceSpec) -> Answer:
        passes = traffic(row)
        times = pass_seconds(passes, device, self.memory)
        known = device.name in self.memory.device_log
        lo, hi = self.constants.known if known else self.constants.unseen
        odd = irregular(row)
        extra = np.where(odd, IRREGULAR, FUSED)
        inside = ~odd & (passes.moved < LARGEST)
        return Answer.around(
            times.total, np.hypot(-lo, extra), np.hypot(hi, extra), "learned:passes", inside
        )

    def _others(self, row: np.ndarray, device: DeviceSpec, base_s: np.ndarray) -> Answer:
        from ...features._columns import INDEX

        launch = launch_seconds(device, self.memory)
        sorts = row[:, INDEX["sort_length"]] > 1
        streamed = pass_seconds(traffic(row), device, self.memory).memory
        latency = np.where(sorts, SORT_PASSES * (launch + streamed), base_s - device.floor + launch)
        return unknown(np.maximum(latency, launch))

    def routes(self, kernels: Sequence[Kernel], device: DeviceSpec) -> list[str]:
        """For each kernel what it is asked as, in words."""
        return routes_in_words(kernels, device, self.memory)

    def notes(self, kernels: Sequence[Kernel], device: DeviceSpec) -> tuple[str, ...]:
        """What a user should know of predictions on a device."""
        if self.correction is not None and device.name in self.correction.devices:
            return ()
        return limits_in_words(kernels, canonical(device), self.devices())

    def devices(self) -> frozenset[str]:
        """Devices of which published rows were learned from."""
        return frozenset(self.operators.devices) | frozenset(self.memory.device_log)

    def save(self, path: Path) -> None:
        """Write the model folder. The operator model is named, not copied."""
        files: dict[str, bytes] = {}
        stored = None
        with tempfile.TemporaryDirectory() as scratch:
            if self.correction is not None:
                root = Path(scratch) / _CORRECTION
                stored = self.correction.save(root)
                inner = [p for p in sorted(root.rglob("*")) if p.is_file()]
                files = {p.relative_to(scratch).as_posix(): p.read_bytes() for p in inner}
        shipped = self.operators_path.resolve() == SHIPPED
        write_folder(Path(path), {
            "estimator": self.name,
            "units": {"latency": "s"},
            "operators": None if shipped else str(self.operators_path.resolve()),
            "params": self.params,
            "constants": self.constants.to_dict(),
            "correction": stored,
        }, files)  # fmt: skip

    @classmethod
    def load(cls, path: Path, schema: str | None = None) -> Self:
        """Read a model folder.

        Args:
            path: The folder.
            schema: Feature schema to expect of a correction; ``None`` takes today's.

        Raises:
            ModelError: The folder is missing, damaged or of another estimator.
        """
        path = Path(path)
        manifest = read_manifest(path)
        if manifest.get("estimator") != cls.name:
            raise ModelError(
                f"holds a {manifest.get('estimator')!r} model, not {cls.name!r}", where=str(path)
            )
        read_files(path, manifest)
        try:
            return cls._from_manifest(path, manifest, schema)
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"model folder is incomplete: {error!r}", where=str(path)) from None

    @classmethod
    def _from_manifest(cls, path: Path, manifest: Mapping[str, Any], schema: str | None) -> Self:
        constants = Constants.from_dict(manifest["constants"])
        model = cls(manifest["operators"], constants, **manifest["params"])
        if manifest["correction"] is not None:
            model.correction = Correction.load(path / _CORRECTION, manifest["correction"], schema)
        return model


def _guarded(found: KernelPrediction, table: KernelTable, device: DeviceSpec) -> KernelPrediction:
    """Nothing is faster than the roofline with its cache; the interval holds the prediction."""
    least = table.base_s - device.floor
    latency = np.maximum(found.latency, least)
    lo = np.clip(found.lo, np.minimum(least, latency), latency)
    hi = np.maximum(found.hi, latency)
    return KernelPrediction(latency, lo, hi, found.bound, found.source, found.in_domain)
