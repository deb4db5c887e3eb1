"""Predicts XLA's kernels on any described GPU, from published operators and passes over memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np

from ...common.errors import DatasetError, ModelError
from ...common.types import JsonMapping
from ...features.dataset import Dataset
from ...features.devices.catalogue import base_of
from ...features.devices.device import DeviceSpec
from ...features.kernels.kernel import Kernel
from ..core.base import KernelPrediction, distinct
from ..core.kernel_table import KernelTable, kernel_table
from ..core.store import check_estimator, contents_of, read_files, read_manifest, write_folder
from ..program.schedule_cost import Overhead
from ..trust.calibrator import UNCALIBRATED, with_error
from ..trust.designs import Likeness, ends_of, is_near
from .attention import attention_answer
from .library_calls import library_answer
from .memory_passes import (
    LOWER,
    UPPER,
    Constants,
    MemoryParams,
    depthwise_seconds,
    launch_seconds,
    pass_seconds,
    shipped_constants,
)
from .operator_library import SHIPPED, Correction, Estimates, Operators, canonical
from .products import Products
from .routes import (
    ATTENTION,
    CONV,
    DEPTHWISE,
    LIBRARY,
    LONG_ROWS,
    OTHER,
    PASS,
    PRODUCT,
    Described,
    describe,
    filter_gradients,
    irregular,
    limit_notes,
    products,
    route_notes,
    traffic,
)

#: Log half-widths added to the intervals of passes, because XLA's fusions differ from the published
#: kernels (``FUSED``) and factors for irregular access are estimates (``IRREGULAR``). Engineering
#: estimates, not fitted: the package has no GPU kernels measured under XLA.
FUSED, IRREGULAR = 0.15, 0.4
#: Passes of a radix sort over its keys: one for the histograms and one for each of the four 8-bit
#: digits of a 32-bit key (Adinets and Merrill, Onesweep, arXiv:2206.01784, 2022).
SORT_PASSES = 5.0
#: Footprint in bytes (16 GiB) above which a pass is outside the domain of the published rows.
#: Engineering estimate; not fitted.
LARGEST = 2.0**34
#: Source of predictions for kernels without similar published rows.
ROOFLINE = "roofline"
_CORRECTION = "correction"
#: Kinds of kernels that keep operand tiles in a core's shared memory; custom calls are attention.
TILED = ("gemm", "conv", "custom_call")


class GpuEstimator:
    """Predicts XLA's kernels on GPUs without training on any of them.

    Products, convolutions and attention are looked up in published operator models; depthwise
    convolutions follow the loads of direct kernels; fusions, reductions and copies follow a model
    of memory traffic fitted to published passes; all other kernels take the roofline with a wide
    interval. No prediction is below the roofline. Kernels measured under XLA train an optional
    correction.

    Args:
        operators: Folder of the operator model; ``None`` takes the shipped one.
        constants: Constants of passes over memory; ``None`` takes the shipped model's.
        params: Parameters of the estimator that learns the correction.
    """

    name = "gpu-xla"

    def __init__(
        self,
        operators: str | Path | None = None,
        constants: Constants | None = None,
        **params: object,
    ) -> None:
        self.operators_path = Path(operators) if operators else SHIPPED
        self.constants = constants or shipped_constants()
        self.settings = params
        self.correction: Correction | None = None

    @property
    def memory(self) -> MemoryParams:
        """Constants of passes over memory."""
        return self.constants.memory

    @property
    def overheads(self) -> dict[str, Overhead]:
        """Default program overheads beyond the kernels, by platform.

        The published times of graph-replayed kernels include the gap to the next one. XLA records
        most kernels into CUDA graphs, but not all, so half a gap is added.
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
        """Learn a correction from kernels measured under XLA; the rest of the model is unchanged.

        Raises:
            DatasetError: The dataset has no kernel measured on a GPU.
        """
        from ..training_data.prepared import prepare
        from ..training_data.splits import fold_groups

        data = prepare(dataset, programs=False)
        rows = data.kernel_rows(np.arange(len(data.frame)))
        devices = data.frame["device"].to_numpy(object)[rows]
        gpu = np.array([data.devices[str(d)].platform == "gpu" for d in devices], bool)
        if not gpu.any():
            raise DatasetError(
                "no kernel was measured on a GPU", hint="measure some with: opcast profile"
            )
        rows, devices = rows[gpu], devices[gpu]
        from ..training_data.crossfit import predict_entries

        # A second fit must learn from the published prediction, not from an earlier correction.
        plain = self._clone_without_correction()
        entries = data.entry[rows]
        predicted = predict_entries(plain, data, entries).latency
        frame = data.frame.iloc[rows].reset_index(drop=True)
        # Hold out whole model families, so that the intervals apply to a new program.
        groups = np.unique(fold_groups(frame, "unseen_family").astype(str), return_inverse=True)[1]
        table = data.table.take(entries)
        self.correction = Correction.fit(
            table, predicted, data.latency_s[rows], groups, sorted(set(devices)), **self.settings
        )
        return self

    @cached_property
    def _physics(self) -> GpuEstimator:
        """The same estimator with operators' analytical estimates instead of learned models."""
        other = self._clone_without_correction()
        other.__dict__["operators"] = Estimates(self.operators)
        return other

    def _clone_without_correction(self) -> GpuEstimator:
        other = GpuEstimator(self.operators_path, self.constants, **self.settings)
        # Presets the cached property: reading the operator model takes seconds.
        other.__dict__["operators"] = self.operators
        return other

    def predict(self, kernels: Sequence[Kernel], device: DeviceSpec) -> KernelPrediction:
        """Predict every kernel on the device; equal kernels are only computed once."""
        unique, index = distinct(kernels)
        if not unique:
            return KernelPrediction.empty(0)
        base = self._base_of(device)
        if base is not None:
            return self._on_design(unique, device, base).take(index)
        table = kernel_table(unique, device)
        prediction = self._predict(unique, canonical(device), table)
        if self.correction is not None:
            prediction = self.correction.apply(prediction, table, device.name)
        return _guarded(prediction, table, device).take(index)

    def _base_of(self, device: DeviceSpec) -> DeviceSpec | None:
        """The base of a design without measurements; ``None`` for other devices."""
        measured = self.correction is not None and device.name in self.correction.devices
        return None if measured else base_of(device)

    def _on_design(
        self, kernels: Sequence[Kernel], device: DeviceSpec, base: DeviceSpec
    ) -> KernelPrediction:
        """Predict distinct kernels on a design: those on its base, times the physical ratio."""
        found, table = self.predict(kernels, base), kernel_table(kernels, device)
        # Under the same name, so that both take the same routes.
        here_as = replace(device, name=base.name, base=base.name)
        there, here = (
            self._physics._predict(kernels, spec, kernel_table(kernels, spec)).latency
            for spec in (base, here_as)
        )
        # Attention has a start of its own, and is no shorter than a launch either.
        least = launch_seconds(here_as, self.memory) / found.latency
        ratio = np.maximum(here / there, np.minimum(least, device.floor / base.floor))
        like = Likeness.of(device, base)
        tiled = np.array([k.kind in TILED for k in kernels])
        like = like._replace(reuse=np.where(tiled, like.reuse, 1.0))
        lo, hi = ends_of((found.lo, found.hi), found.latency, ratio, like)
        moved = replace(
            found,
            latency=found.latency * ratio,
            lo=lo,
            hi=hi,
            bound=table.bound.copy(),
            in_domain=found.in_domain & is_near(ratio, like),
        )
        return _guarded(moved, table, device)

    def _predict(
        self, kernels: Sequence[Kernel], device: DeviceSpec, table: KernelTable
    ) -> KernelPrediction:
        described = describe(kernels, device)
        answer = KernelPrediction.empty(len(kernels))
        # One call per route: the operator models are vectorized, and a call has a fixed cost.
        for route in (PRODUCT, CONV, DEPTHWISE, ATTENTION, LIBRARY, PASS, OTHER):
            at = np.flatnonzero(described.route == route)
            if len(at):
                answer.put(at, self._route(route, described, at, device, table))
        return replace(answer, bound=table.bound.copy())

    def _route(
        self,
        route: str,
        described: Described,
        at: np.ndarray,
        device: DeviceSpec,
        table: KernelTable,
    ) -> KernelPrediction:
        if route == PRODUCT:
            return Products(self.operators, device, self.memory).gemms(products(described, at))
        if route == CONV:
            return Products(self.operators, device, self.memory).convs(products(described, at))
        if route == DEPTHWISE:
            return self._depthwise(described, at, device)
        if route == ATTENTION:
            calls = [described.attention[i] for i in at.tolist()]
            return attention_answer(calls, self.operators, device)
        if route == LIBRARY:
            own = [described.library[i] for i in at.tolist()]
            least = table.base_s[at] - device.floor
            return library_answer(own, least, device, self.memory, ROOFLINE)
        if route == PASS:
            return self._passes(described.row[at], device)
        return self._others(described.row[at], device, table.base_s[at])

    def _passes(self, row: np.ndarray, device: DeviceSpec) -> KernelPrediction:
        passes = traffic(row)
        # Two independent errors add in quadrature: of the fitted passes, and of XLA's fusion or
        # irregular access.
        times = pass_seconds(passes, device, self.memory)
        known = device.name in self.memory.device_log
        # A device without samples takes the widest bounds over held-out devices.
        ends = self.constants.known if known else self.constants.unseen
        odd = irregular(row)
        extra = np.where(odd, IRREGULAR, FUSED)
        inside = ~odd & (passes.moved < LARGEST)
        low, high = (np.full(len(odd), end) for end in ends)
        both = with_error((low, high), (extra, extra))
        found = KernelPrediction.around(times.total, both, "learned:memory-bound", inside)
        # Long rows were only seen in whole steps: elsewhere they may stream, and longer rows may
        # take as long per byte as those (docs/gpu.md).
        rows = LONG_ROWS * passes.moved * (passes.again > 0)
        stream, whole = (
            pass_seconds(replace(passes, again=again), device, self.memory).total
            for again in (np.zeros(len(passes)), rows)
        )
        found.lo = np.minimum(found.lo, stream * np.exp(both[0]))
        found.hi = np.maximum(found.hi, whole * np.exp(both[1]))
        return found

    def _depthwise(
        self, described: Described, at: np.ndarray, device: DeviceSpec
    ) -> KernelPrediction:
        sizes = products(described, at)
        moved = sizes["moved"].to_numpy(np.float64)
        multiplied = sizes[["b", "m", "n", "k"]].prod(axis=1).to_numpy(np.float64)
        seconds = depthwise_seconds(
            moved,
            moved / sizes["width"].to_numpy(np.float64),
            multiplied * (sizes["times"] * sizes["dense"]).to_numpy(np.float64),
            filter_gradients(described.row[at]),
            device,
            self.memory,
        )
        latency = launch_seconds(device, self.memory) + seconds
        return KernelPrediction.around(latency, (-LOWER, UPPER), ROOFLINE)

    def _others(self, row: np.ndarray, device: DeviceSpec, base_s: np.ndarray) -> KernelPrediction:
        from ...features.table.columns import INDEX

        launch = launch_seconds(device, self.memory)
        # Library sorts are the only kernels of this route with known traffic.
        sorts = row[:, INDEX["sort_length"]] > 1
        streamed = pass_seconds(traffic(row), device, self.memory).memory
        # The description's floor is a launch from the host; kernels of a program are replayed in a
        # graph, so the launch fitted to graphs replaces it.
        latency = np.where(sorts, SORT_PASSES * (launch + streamed), base_s - device.floor + launch)
        return unknown(np.maximum(latency, launch))

    def routes(self, kernels: Sequence[Kernel], device: DeviceSpec) -> list[str]:
        """Describe the published operator that each kernel is predicted from, in one sentence."""
        return route_notes(kernels, device, self.memory)

    def notes(self, kernels: Sequence[Kernel], device: DeviceSpec) -> tuple[str, ...]:
        """Limitations of the predictions on a device; none once it was measured."""
        if self.correction is not None and device.name in self.correction.devices:
            return ()
        base = self._base_of(device)
        if base is not None:
            said = f"{device.name} is priced as {base.name}, times what physics says of both"
            return (*limit_notes(kernels, base, self.devices()), said)
        return limit_notes(kernels, canonical(device), self.devices())

    def devices(self) -> frozenset[str]:
        """Devices whose published rows the model was fitted to."""
        return frozenset(self.operators.devices) | frozenset(self.memory.device_log)

    def save(self, path: Path) -> None:
        """Write the model folder; it refers to the operator model by path."""
        files: dict[str, bytes] = {}
        if self.correction is not None:
            correction = self.correction
            files = contents_of(lambda root: correction.save(root / _CORRECTION))
        # ``None`` stands for the shipped model, so that the folder works with any installation.
        shipped = self.operators_path.resolve() == SHIPPED
        write_folder(
            Path(path),
            {
                "estimator": self.name,
                "units": {"latency": "s"},
                "operators": None if shipped else str(self.operators_path.resolve()),
                "params": self.settings,
                "constants": self.constants.to_dict(),
                "correction": None if self.correction is None else self.correction.stored(),
            },
            files,
        )

    @classmethod
    def load(cls, path: Path, schema: str | None = None) -> Self:
        """Read a model folder.

        Args:
            path: The folder.
            schema: Feature schema to expect of a correction; ``None`` takes the current one.

        Raises:
            ModelError: The folder is missing, damaged or has another estimator.
        """
        path = Path(path)
        manifest = read_manifest(path)
        check_estimator(path, manifest, cls.name)
        read_files(path, manifest)
        try:
            return cls._from_manifest(path, manifest, schema)
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"model folder is incomplete: {error!r}", where=str(path)) from None

    @classmethod
    def _from_manifest(cls, path: Path, manifest: JsonMapping, schema: str | None) -> Self:
        constants = Constants.from_dict(manifest["constants"])
        model = cls(manifest["operators"], constants, **manifest["params"])
        if manifest["correction"] is not None:
            model.correction = Correction.load(path / _CORRECTION, manifest["correction"], schema)
        return model


def unknown(latency: np.ndarray) -> KernelPrediction:
    """Roofline predictions with an interval from a quarter of the latency to sixteen times it.

    A roofline is a lower bound, so the interval is twice as wide upwards (docs/gpu.md).

    Args:
        latency: Roofline plus launch in seconds, shape ``(n,)``.
    """
    return KernelPrediction.around(latency, (-UNCALIBRATED, 2 * UNCALIBRATED), ROOFLINE)


def _guarded(
    prediction: KernelPrediction, table: KernelTable, device: DeviceSpec
) -> KernelPrediction:
    """Raise latencies to the roofline with caches; make each interval contain its latency."""
    # Without the floor: a graph-replayed kernel may take less than a launch from the host.
    least = table.base_s - device.floor
    latency = np.maximum(prediction.latency, least)
    lo = np.clip(prediction.lo, np.minimum(least, latency), latency)
    hi = np.maximum(prediction.hi, latency)
    return replace(prediction, latency=latency, lo=lo, hi=hi, unclamped=prediction.latency)
