"""The trained and saved bundle: kernel estimator, program model, and devices."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from ..common.errors import ModelError
from ..common.types import JsonMapping, JsonObject
from ..features.devices.catalogue import base_of
from ..features.devices.device import DeviceSpec
from ..features.devices.identity import Comparison, unlike
from ..features.kernels.kernel import Kernel, LoweredProgram
from .adapt.device_correction import DeviceCorrection
from .core.base import Estimator, KernelPrediction
from .core.registry import estimator_class, make_estimator
from .core.store import (
    DAMAGE,
    contents_of,
    pack,
    predicts_operators,
    read_files,
    read_manifest,
    training_info,
    unpack,
    write_folder,
)
from .program.context_trees import ContextCorrection, in_loops
from .program.fused_error import widened
from .program.program_model import ProgramModel, ProgramPrediction
from .program.schedule_cost import UNMEASURED, first_touch_s, least_wall
from .trust.designs import on_design, roofline_ratio

if TYPE_CHECKING:
    from .trust.neighbours import NeighbourTable

_ESTIMATOR = "estimator"
_NEIGHBOURS = "neighbours.npz"
_CONTEXT = "context-{}.ubj"
_CORRECTION = "correction-{}.npz"
#: Entries of the manifest that are parts of the model rather than provenance of its training.
_OWN_ENTRIES = ("estimator", "units", "devices", "program_model", "context", "corrections")


@dataclass
class CostModel:
    """Predicts kernels and programs.

    Attributes:
        estimator: Predicts kernel latencies.
        program_model: Predicts wall time from kernels in their program.
        devices: Devices that it was trained on, by name.
        info: Provenance of the training: dataset hash, split, seed, ``metrics`` by split, rows.
        neighbour_file: Packed table of training kernels; empty without one.
        context: Correction of kernels for their context in a program; ``None`` if it did not
            improve on the plain sum of kernels, or for models of earlier versions.
        corrections: Calibration from a few samples of single devices, by device name.
    """

    estimator: Estimator
    program_model: ProgramModel = field(default_factory=ProgramModel)
    devices: dict[str, DeviceSpec] = field(default_factory=dict)
    info: JsonObject = field(default_factory=dict)
    neighbour_file: bytes = field(default=b"", repr=False)
    context: ContextCorrection | None = None
    corrections: dict[str, DeviceCorrection] = field(default_factory=dict)

    @cached_property
    def neighbours(self) -> NeighbourTable | None:
        """Training kernels for comparison, unpacked on first use; ``None`` without a table.

        Raises:
            ModelError: The table is damaged.
        """
        if not self.neighbour_file:
            return None
        from .trust.neighbours import NeighbourTable

        try:
            return NeighbourTable.from_bytes(self.neighbour_file)
        except (KeyError, ValueError, IndexError, OSError) as error:
            raise ModelError(
                f"neighbour table cannot be read: {error!r}", where=_NEIGHBOURS
            ) from None

    @classmethod
    def untrained(cls, name: str) -> Self:
        """A cost model around an estimator that needs no training, such as the roofline.

        Raises:
            ModelError: No estimator has that name.
        """
        model = cls(make_estimator(name))
        model.program_model.overheads = dict(UNMEASURED)
        return model

    @property
    def name(self) -> str:
        """Name of the estimator."""
        return self.estimator.name

    @property
    def metrics(self) -> Mapping[str, Mapping[str, float]]:
        """Error figures by split, measured after training."""
        metrics: Mapping[str, Mapping[str, float]] = self.info.get("metrics", {})
        return metrics

    def unlike(self, device: DeviceSpec) -> Comparison | None:
        """Compare a device with the training device of the same name.

        Returns:
            ``None`` if they agree, or no training device has the name.
        """
        return unlike(device, self.devices)

    def base_of(self, device: DeviceSpec) -> DeviceSpec | None:
        """The base that a TPU or CPU design is priced by; ``None`` for other devices.

        Trained or calibrated devices are predicted directly, and so is every device if nothing was
        learned.
        """
        known = {*self.devices, *self.corrections}
        if device.platform == "gpu" or not self.devices or device.name in known:
            return None
        return base_of(device) or self.devices.get(device.base)

    def predict_kernels(self, kernels: Sequence[Kernel], device: DeviceSpec) -> KernelPrediction:
        """Predict one execution of every kernel.

        If a device has the name of a training device but different measured peaks, every kernel is
        out of domain, and intervals are widened by the ratio of the peaks. Trees are neither smooth
        nor monotone in a rate: a design of a TPU or CPU is priced as its base, times the ratio of
        their rooflines; GPU estimators do so themselves.
        """
        base = self.base_of(device)
        if base is not None:
            return on_design(self.predict_kernels(kernels, base), kernels, device, base)
        prediction = self.estimator.predict(kernels, device)
        other = self.unlike(device)
        # Corrections are also by name, and do not apply to another machine of that name.
        if other is not None:
            return replace(
                prediction,
                lo=prediction.lo / other.factor,
                hi=prediction.hi * other.factor,
                in_domain=np.zeros(len(prediction.latency), bool),
            )
        correction = self.corrections.get(device.name)
        return prediction if correction is None else correction.correct(prediction, kernels, device)

    def predict_program(
        self, lowered: LoweredProgram, device: DeviceSpec, kernels: KernelPrediction | None = None
    ) -> ProgramPrediction:
        """Predict the wall time of one run of a program.

        Args:
            lowered: The program as the target runs it.
            device: Device it runs on.
            kernels: Predictions of its kernels in isolation; computed if not given.
        """
        return self.predict_in_program(lowered, device, kernels)[1]

    def predict_in_program(
        self,
        lowered: LoweredProgram,
        device: DeviceSpec,
        kernels: KernelPrediction | None = None,
        base_s: np.ndarray | None = None,
    ) -> tuple[KernelPrediction, ProgramPrediction]:
        """Predict a program's kernels in context, and the wall time of one run.

        Args:
            lowered: The program as the target runs it.
            device: Device it runs on.
            kernels: Predictions of its kernels in isolation; computed if not given.
            base_s: Roofline plus floor of its kernels in seconds; computed if not given.
        """
        in_place = kernels or self.predict_kernels(lowered.kernels, device)
        in_place = in_loops(in_place, lowered.kernels, device)
        if self.context is not None:
            in_place = self._in_context(self.context, in_place, lowered, device, base_s)
        wall = self.program_model.predict(
            in_place.latency, lowered, device, in_place.lo, in_place.hi
        )
        other = self.unlike(device)
        if other is not None and device.platform in self.program_model.corrections:
            # Intervals fitted to programs ignore those of the kernels: widen them here.
            wall = wall._replace(lo=wall.lo / other.factor, hi=wall.hi * other.factor)
        wall = widened(wall, lowered, in_place.latency, device)
        wall = wall._replace(hi=wall.hi + first_touch_s(lowered, device))
        least = least_wall(lowered, device)
        latency, lo, hi = (max(end, least) for end in wall[:3])
        return in_place, ProgramPrediction(latency, lo, hi, least)

    def _in_context(
        self,
        context: ContextCorrection,
        kernels: KernelPrediction,
        lowered: LoweredProgram,
        device: DeviceSpec,
        base_s: np.ndarray | None,
    ) -> KernelPrediction:
        base = self.base_of(device)
        if base is None:
            return context.apply(kernels, lowered, device, base_s)
        # A design takes the context of its base: its rates must not change what was learned.
        ratio = roofline_ratio(lowered.kernels, device, base)[0]
        there = context.apply(kernels.scaled(1.0 / ratio), lowered, base)
        return there.scaled(ratio)

    def contents(self) -> tuple[dict[str, object], dict[str, bytes]]:
        """Manifest, with :attr:`info`, and files of the model folder by relative name."""
        files = contents_of(lambda root: self.estimator.save(root / _ESTIMATOR))
        if self.neighbour_file:
            files[_NEIGHBOURS] = self.neighbour_file
        if self.context is not None:
            trees = self.context.trees
            files |= {_CONTEXT.format(i): own.raw for i, own in enumerate(trees)}
        # Numbered, not named: a device name may have characters that a file name must not.
        for place, name in enumerate(sorted(self.corrections)):
            files[_CORRECTION.format(place)] = pack(self.corrections[name].to_arrays())
        manifest = {
            **self.info,
            "estimator": self.name,
            "units": {"latency": "s"},
            "devices": {name: asdict(spec) for name, spec in sorted(self.devices.items())},
            "program_model": self.program_model.to_dict(),
            "context": None if self.context is None else self.context.to_dict(),
            "corrections": sorted(self.corrections),
        }
        return manifest, files

    def save(self, path: Path | str) -> None:
        """Write the model folder; replaces an earlier model at the same place.

        Raises:
            ModelError: The place holds something that is not a model.
        """
        write_folder(Path(path), *self.contents())

    @classmethod
    def load(cls, path: Path | str, schema: str | None = None) -> Self:
        """Read a model folder.

        Args:
            path: The folder.
            schema: Feature schema to expect; ``None`` takes the current one.

        Raises:
            ModelError: The folder is missing, damaged, of another format or feature schema, or its
                estimator is not installed.
        """
        path = Path(path)
        manifest = read_manifest(path)
        if predicts_operators(manifest):
            raise ModelError(
                "holds a model of library operators, which predicts no programs",
                where=str(path),
                hint="use it with: opcast evaluate --published DIR --model NAME --out FILE",
            )
        files = read_files(path, manifest)
        try:
            kind = estimator_class(manifest["estimator"])
            program_model = ProgramModel.from_dict(manifest["program_model"])
            context = _context(manifest.get("context"), files)
            stored = manifest["devices"]
            corrections = {
                name: DeviceCorrection.from_arrays(unpack(files[_CORRECTION.format(place)]))
                for place, name in enumerate(manifest.get("corrections", ()))
            }
            devices = {
                name: DeviceSpec.from_dict(data, where=name) for name, data in stored.items()
            }
        except DAMAGE as error:
            raise ModelError(f"manifest is incomplete: {error!r}", where=str(path)) from None
        # Estimators of other packages need not support schemas.
        extra: dict[str, str] = {}
        if schema is not None and "schema" in inspect.signature(kind.load).parameters:
            extra["schema"] = schema
        try:
            estimator = kind.load(path / _ESTIMATOR, **extra)
        except DAMAGE as error:
            raise ModelError(f"damaged estimator: {error!r}", where=str(path)) from None
        info = training_info(manifest, _OWN_ENTRIES)
        neighbours = files.get(_NEIGHBOURS, b"")
        return cls(estimator, program_model, devices, info, neighbours, context, corrections)


def _context(stored: JsonMapping | None, files: Mapping[str, bytes]) -> ContextCorrection | None:
    if stored is None:
        return None
    raw = [files[_CONTEXT.format(i)] for i in range(stored["trees"])]
    return ContextCorrection.from_dict(stored, raw)
