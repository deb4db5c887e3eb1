"""The bundle that is trained, saved and used: a kernel estimator, a program model, and devices."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ..features.device import DeviceSpec
from ..features.errors import ModelError
from ..features.kernel import Kernel, LoweredProgram
from .base import Estimator, KernelPrediction
from .context_correction import ContextCorrection
from .device_correction import DeviceCorrection
from .program_model import ProgramModel, ProgramPrediction
from .program_overhead import UNMEASURED
from .registry import estimator_class, make_estimator
from .store import DAMAGE, OPERATORS, pack, read_files, read_manifest, unpack, write_folder

if TYPE_CHECKING:
    from .neighbours import NeighbourTable

_ESTIMATOR = "estimator"
_NEIGHBOURS = "neighbours.npz"
_CONTEXT = "context-{}.ubj"
_CORRECTION = "correction-{}.npz"


@dataclass
class CostModel:
    """Predicts kernels and programs.

    Attributes:
        estimator: Kernel latencies.
        program_model: From kernels in their program to wall time.
        devices: Devices that it was trained on, by name.
        info: What is known of its training: dataset hash, split, seed, ``metrics`` by split, rows.
        neighbour_file: Packed table of training kernels; empty if there is none.
        context: Correction of kernels for their place in a program; ``None`` if the sum of kernels
            as they are was no worse, or the model was made by an earlier version.
        corrections: What was learned from few samples of single devices, by device.
    """

    estimator: Estimator
    program_model: ProgramModel = field(default_factory=ProgramModel)
    devices: dict[str, DeviceSpec] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    neighbour_file: bytes = field(default=b"", repr=False)
    context: ContextCorrection | None = None
    corrections: dict[str, DeviceCorrection] = field(default_factory=dict)

    @cached_property
    def neighbours(self) -> NeighbourTable | None:
        """Training kernels to compare with, unpacked on first use; ``None`` if there are none.

        Raises:
            ModelError: The table is damaged.
        """
        if not self.neighbour_file:
            return None
        from .neighbours import NeighbourTable

        try:
            return NeighbourTable.from_bytes(self.neighbour_file)
        except (KeyError, ValueError, IndexError, OSError) as error:
            raise ModelError(
                f"neighbour table cannot be read: {error!r}", where=_NEIGHBOURS
            ) from None

    @classmethod
    def untrained(cls, name: str) -> Self:
        """The model of an estimator that learns nothing.

        Raises:
            ModelError: There is no such estimator.
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
        """Figures by split, measured when it was trained."""
        found: Mapping[str, Mapping[str, float]] = self.info.get("metrics", {})
        return found

    def predict_kernels(self, kernels: Sequence[Kernel], device: DeviceSpec) -> KernelPrediction:
        """Predict one execution of every kernel."""
        found = self.estimator.predict(kernels, device)
        correction = self.corrections.get(device.name)
        return found if correction is None else correction.correct(found, kernels, device)

    def predict_program(
        self,
        lowered: LoweredProgram,
        device: DeviceSpec,
        kernels: KernelPrediction | None = None,
    ) -> ProgramPrediction:
        """Predict the wall time of one run of a program.

        Args:
            lowered: The program as the target runs it.
            device: Where it runs.
            kernels: Predictions of its kernels each by itself, if they are there already.
        """
        return self.predict_in_program(lowered, device, kernels)[1]

    def predict_in_program(
        self,
        lowered: LoweredProgram,
        device: DeviceSpec,
        kernels: KernelPrediction | None = None,
        base_s: np.ndarray | None = None,
    ) -> tuple[KernelPrediction, ProgramPrediction]:
        """Predict a program's kernels in their place, and the wall time of one run.

        Args:
            lowered: The program as the target runs it.
            device: Where it runs.
            kernels: Predictions of its kernels each by itself, if they are there already.
            base_s: Roofline plus floor of its kernels, likewise.
        """
        found = kernels or self.predict_kernels(lowered.kernels, device)
        if self.context is not None:
            found = self.context.apply(found, lowered, device, base_s)
        wall = self.program_model.predict(found.latency, lowered, device, found.lo, found.hi)
        return found, wall

    def save(self, path: Path | str) -> None:
        """Write the model folder; replaces an earlier model at the same place.

        Raises:
            ModelError: The place holds something that is no model.
        """
        with tempfile.TemporaryDirectory() as scratch:
            root = Path(scratch)
            self.estimator.save(root / _ESTIMATOR)
            inner = [p for p in sorted(root.rglob("*")) if p.is_file()]
            files = {p.relative_to(root).as_posix(): p.read_bytes() for p in inner}
        if self.neighbour_file:
            files[_NEIGHBOURS] = self.neighbour_file
        if self.context is not None:
            trees = self.context.trees
            files |= {_CONTEXT.format(i): own.raw for i, own in enumerate(trees)}
        corrected = sorted(self.corrections)
        for place, name in enumerate(corrected):
            files[_CORRECTION.format(place)] = pack(self.corrections[name].to_arrays())
        manifest = {
            **self.info,
            "estimator": self.name,
            "units": {"latency": "s"},
            "devices": {name: asdict(spec) for name, spec in sorted(self.devices.items())},
            "program_model": self.program_model.to_dict(),
            "context": None if self.context is None else self.context.to_dict(),
            "corrections": corrected,
        }
        write_folder(Path(path), manifest, files)

    @classmethod
    def load(cls, path: Path | str, schema: str | None = None) -> Self:
        """Read a model folder.

        Args:
            path: The folder.
            schema: Feature schema to expect; ``None`` takes today's.

        Raises:
            ModelError: The folder is missing, damaged, of another format or feature schema, or its
                estimator is not installed.
        """
        path = Path(path)
        manifest = read_manifest(path)
        if manifest.get("kind") == OPERATORS:
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
        extra: dict[str, Any] = {}
        if schema is not None and "schema" in inspect.signature(kind.load).parameters:
            extra["schema"] = schema
        try:
            estimator = kind.load(path / _ESTIMATOR, **extra)
        except DAMAGE as error:
            raise ModelError(f"damaged estimator: {error!r}", where=str(path)) from None
        fixed = {"format", "files", "libraries", "program_model", "context", "devices"}
        fixed |= {"estimator", "units", "corrections"}
        info = {k: v for k, v in manifest.items() if k not in fixed}
        neighbours = files.get(_NEIGHBOURS, b"")
        return cls(estimator, program_model, devices, info, neighbours, context, corrections)


def _context(
    stored: Mapping[str, Any] | None, files: Mapping[str, bytes]
) -> ContextCorrection | None:
    if stored is None:
        return None
    raw = [files[_CONTEXT.format(i)] for i in range(stored["trees"])]
    return ContextCorrection.from_dict(stored, raw)
