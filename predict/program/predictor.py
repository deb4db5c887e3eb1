"""Public entry: predict a program or kernel on a device, with intervals and notes."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...common.collection import paused_collection
from ...common.errors import StrictError
from ...common.interval import Interval, latency_fields
from ...features.kernels.kernel import Kernel, LoweredProgram
from ...models.power.caps import fed
from ...models.power.energy import capped_kernels, capped_total, program_energy
from ...models.program.fused_error import lowering_note
from ..devices import generation_note, resolve_device
from ..locate import OPERATOR_MODEL, PLATFORM_DEFAULTS, find_model, is_untrained
from .case import ProgramCase as ProgramCase
from .model_notes import capped_note, model_notes, rematerialised
from .prediction import KernelEstimate as KernelEstimate
from .prediction import Memory as Memory
from .prediction import Prediction as Prediction
from .prediction import check_known, in_program, kernel_estimates

if TYPE_CHECKING:
    from ...features.devices.device import DeviceSpec
    from ...features.ir.reader import SourceProgram
    from ...features.lowering.cache import LoweringCache
    from ...features.lowering.target_compiler.process import CompileSettings
    from ...models.cost_model import CostModel
    from ...models.operators import OpModel

#: Maximum single-kernel results that :meth:`Predictor.latency_us` caches before it empties the
#: cache. Engineering estimate, to bound the memory of long runs.
MEMO_SIZE = 200_000
#: Trips that the upper bound of a program's time assumes for a loop with a data-dependent count.
#: Engineering estimate.
_TRIPS = 1000
_OPEN_NOTE = (
    f"a loop of unknown length is counted as one trip; the upper bound assumes {_TRIPS:,} trips"
)


class Predictor:
    """Predicts programs and kernels with one loaded model.

    Args:
        model: A loaded cost model.
        cache: Cache of lowered programs; ``None`` for the default folder.
        by_platform: Models for devices of platforms that ``model`` was not trained on.
        operators: Name or folder of the model for library operators.

    Single latencies may be queried from several threads.
    """

    def __init__(
        self,
        model: CostModel,
        cache: LoweringCache | None = None,
        by_platform: Mapping[str, CostModel] | None = None,
        operators: str | Path = OPERATOR_MODEL,
    ) -> None:
        self.model = model
        self.cache = cache
        self.by_platform = dict(by_platform or {})
        self._memo: dict[tuple[str, str | int], float] = {}
        self._described: dict[int, DeviceSpec] = {}
        self._specs: dict[str, DeviceSpec] = {}
        self._operators = operators
        self._bundle: OpModel | None = None
        # Reentrant: ``latency_us`` calls ``latencies_us`` while it holds the lock.
        self._lock = threading.RLock()

    @property
    def devices(self) -> dict[str, DeviceSpec]:
        """Devices that any of the models was trained on, by name."""
        others = [model.devices for model in self.by_platform.values()]
        found: dict[str, DeviceSpec] = {}
        # The predictor's own model takes precedence.
        for known in (*others, self.model.devices):
            found.update(known)
        return found

    @property
    def operators(self) -> OpModel:
        """The model of library operators, loaded on first use.

        Raises:
            ModelError: The model cannot be read.
        """
        if self._bundle is None:
            from ...models.operators import OpModel

            self._bundle = OpModel.load(find_model(self._operators))
        return self._bundle

    def model_for(self, device: DeviceSpec) -> CostModel:
        """Select the model for a device."""
        # By platform, not by name: a model of GPUs extrapolates to an unseen GPU far better than
        # the default CPU model would.
        if any(d.platform == device.platform for d in self.model.devices.values()):
            return self.model
        return self.by_platform.get(device.platform, self.model)

    def predict(
        self,
        program: object,
        *args: object,
        device: str | Path | DeviceSpec = "local",
        lowering: str = "auto",
        trip_counts: dict[str, int] | int | None = None,
        strict: bool = False,
        fallback: str = "",
        settings: CompileSettings | None = None,
        power_cap_w: float | None = None,
        **kwargs: object,
    ) -> Prediction:
        """Predict a whole program.

        Args:
            program: Path, text or bytes of StableHLO or HLO, an exported or lowered JAX function,
                or a function, jitted or not, followed by its example arguments; it is lowered for
                the platform of ``device``, wherever this runs.
            args: Example arguments of a function: arrays or ``jax.ShapeDtypeStruct``.
            device: Name, path of a device file, or description.
            lowering: ``xla`` (the device's own compiler, with or without the device), ``fused``
                (opcast's fusion rules), ``op``, or ``auto``: ``xla`` if that compiler is installed.
            trip_counts: Trips of loops with unknown counts: one number for all, or by name.
            strict: Raise instead of falling back to the roofline for a kernel.
            fallback: Lowering to use if the device's compiler is missing or fails.
            settings: Limits and options of that compiler.
            power_cap_w: Sustained power of the device in watts, below its limit.
            kwargs: Keyword arguments of a function. Wrap the function in a lambda if one has the
                name of an option here.

        Raises:
            OpcastError: The program, device, lowering or power cap is not usable, ``strict`` is not
                met, or the program is for several devices (``predict_partitioned`` takes those).
        """
        from ...features.lowering.options import LoweringOptions

        options = LoweringOptions(lowering, device, trip_counts, fallback, settings)
        return self.answer(ProgramCase(program, options, args, kwargs, strict, power_cap_w))

    def answer(self, case: ProgramCase) -> Prediction:
        """Predict a whole program; the cache in its options is replaced by the predictor's.

        Raises:
            OpcastError: See :meth:`predict`.
        """
        from ...features.ir.untrusted import well_formed

        with paused_collection():
            source, lowered, device = case.lower(self)
        # HLO attributes that contradict their shapes are only noticed when features are computed.
        with well_formed(source), paused_collection():
            return self.predict_lowered(
                lowered,
                device,
                strict=case.strict,
                source=source,
                power_cap_w=case.power_cap_w,
            )

    def predict_lowered(
        self,
        lowered: LoweredProgram,
        device: str | Path | DeviceSpec,
        *,
        strict: bool = False,
        source: SourceProgram | None = None,
        power_cap_w: float | None = None,
    ) -> Prediction:
        """Predict a program that is already lowered.

        Args:
            lowered: The lowered program.
            device: The device.
            strict: See :meth:`predict`.
            source: The program before lowering, which names the kernels' modules.
            power_cap_w: See :meth:`predict`.

        Raises:
            DeviceError: The device is unknown, or a cap is outside its range.
            StrictError: ``strict`` is set and a kernel has no learned estimate.
            UnknownCallError: A kernel runs an unknown custom call.
        """
        device = resolve_device(device, self.devices)
        device, cap = fed(power_cap_w, device)
        model = self.model_for(device)
        kernels = model.predict_kernels(lowered.kernels, device)
        if device.platform == "tpu":
            from ...models.estimators.tpu import by_compiler

            kernels = by_compiler(
                kernels, lowered.kernels, device, model.predict_kernels, model.base_of(device)
            )
        # Arguments and results of the program may belong only to the refused calls.
        rest = replace(lowered, entry_bytes=0.0)
        asked = lowered.kernels, kernels.source
        check_known(*asked, lambda out: model.predict_program(rest, device, kernels.without(out)))
        # On the isolated kernels: corrections for context do not change the source.
        if strict:
            _require_learned(lowered.kernels, kernels.source)
        # Latencies in context (cache contents left by neighbours) may differ from isolated ones.
        own = model, lowered, device
        isolated = capped_kernels(kernels, lowered.kernels, device, cap)
        # A cap makes nothing faster, so the lower bound stays above that without a cap.
        free = in_program(*own, kernels)[1].lo if cap < 1.0 else 0.0
        kernels, program = in_program(*own, isolated)
        total = Interval(program.latency, program.lo, program.hi)
        total = capped_total(total, device, cap, max(program.least, free))
        endless = np.array([kernel.endless for kernel in lowered.kernels], bool)
        if endless.any():
            times = np.array([k.multiplicity for k in lowered.kernels])[endless]
            again = (_TRIPS - 1) * float(kernels.hi[endless] @ times)
            total = total._replace(hi=total.hi + again)
            kernels = replace(kernels, in_domain=kernels.in_domain & ~endless)
        standing = model_notes(model, lowered.kernels, device)
        formed = lowering_note(lowered, kernels.latency, device)
        return Prediction(
            **latency_fields(*total),
            kernels=kernel_estimates(lowered.kernels, kernels, source),
            peak_memory_bytes=lowered.peak_memory_bytes,
            memory_source=lowered.memory_source,
            lowering=lowered.lowering,
            model=model.name,
            device=device.name,
            # Notes on the lowering come first, then those on the model.
            notes=(
                *rematerialised(lowered.kernels, kernels.latency),
                *lowered.notes,
                *([_OPEN_NOTE] if endless.any() else []),
                *formed,
                *(capped_note(cap * device.power_w) if cap < 1.0 else ()),
                *standing,
            ),
            # A value that the user's own device file could give is not a limit of the model.
            standing=tuple(n for n in standing if n not in generation_note(device)),
            energy=program_energy(
                lowered.kernels,
                kernels.latency,
                total,
                device,
                cap,
            ),
            compiler=lowered.compiler,
            device_memory_bytes=device.usable_bytes,
        )

    def latency_us(self, what: Kernel | str, device: str | DeviceSpec = "local") -> float:
        """Predict the latency of one execution in microseconds; repeated queries are cached.

        Args:
            what: A kernel, or an operator as accepted by
                :func:`~opcast.features.operators.query.parse_op`.
            device: Name, path of a device file, or description.

        Raises:
            DeviceError: The device is unknown.
            ProgramError: The text does not describe an operator.
            ModelError: The model lacks the family.
        """
        ask = what if isinstance(what, str) else what.hash
        key = (ask, device if isinstance(device, str) else id(device))
        # Read without the lock: a dict look-up is atomic, and a miss only repeats the computation.
        found = self._memo.get(key)
        if found is None:
            with self._lock:
                found = float(self.latencies_us([what], device)[0])
                if len(self._memo) >= MEMO_SIZE:
                    # Emptying is cheaper than tracking the order of use over millions of hits.
                    self._memo.clear()
                    self._described.clear()
                if not isinstance(device, str):
                    # Kept alive, so that its id is not reused.
                    self._described[id(device)] = device
                self._memo[key] = found
        return found

    def latencies_us(
        self, what: Sequence[Kernel | str], device: str | DeviceSpec = "local"
    ) -> np.ndarray:
        """Predict latencies of many kernels or operators in microseconds, shape ``(n,)``.

        Raises:
            OpcastError: See :meth:`latency_us`.
        """
        spec = self._spec(device)
        kernels = [(i, w) for i, w in enumerate(what) if not isinstance(w, str)]
        texts = [(i, w) for i, w in enumerate(what) if isinstance(w, str)]
        # Kernels and operators go to different models, each in one call, and are merged in order.
        found = np.empty(len(what))
        # Models are loaded and their tables built on first use, which is not thread-safe.
        with self._lock:
            if kernels:
                asked = [k for _, k in kernels]
                own = self.model_for(spec).predict_kernels(asked, spec)
                check_known(asked, own.source)
                found[[i for i, _ in kernels]] = own.latency * 1e6
            if texts:
                found[[i for i, _ in texts]] = self._operators_us([t for _, t in texts], spec)
        return found

    def _spec(self, device: str | DeviceSpec) -> DeviceSpec:
        """Return a device's description, cached by name, since finding files takes a ms."""
        if not isinstance(device, str):
            return device
        found = self._specs.get(device)
        if found is None:
            found = self._specs[device] = resolve_device(device, self.devices)
        return found

    def operator_vendor(self, spec: DeviceSpec) -> str:
        """Return the vendor of the libraries that run operators on a device; empty for NVIDIA.

        Only a model with XLA's products covers other vendors.
        """
        return spec.vendor if "xla/linear" in self.operators.families else ""

    def _operators_us(self, texts: Sequence[str], spec: DeviceSpec) -> np.ndarray:
        import pandas as pd

        from ...features.operators.query import parse_op

        vendor = self.operator_vendor(spec)
        rows = pd.DataFrame([{**parse_op(t, vendor), "device": spec.name} for t in texts])
        self.operators.devices[spec.name] = spec
        latency: np.ndarray = self.operators.predict(rows).latency
        return latency * 1e6


def load(model: str | Path = "default", *, cache: LoweringCache | None = None) -> Predictor:
    """Load a model by name (shipped or registered) or from its folder.

    ``default`` loads the shipped models of all platforms; the device selects one of them. A model
    of library operators is loaded together with the ``default`` models, which predict programs. The
    roofline and the simulators are not trained and have a name, but no folder.

    Raises:
        ModelError: No such model, or its folder is damaged or of another version.
    """
    from ...models.core.store import predicts_operators, read_manifest
    from ...models.cost_model import CostModel

    if is_untrained(model):
        return Predictor(CostModel.untrained(str(model)), cache)
    folder = find_model(model)
    operators: str | Path = OPERATOR_MODEL
    if predicts_operators(read_manifest(folder)):
        # Programs are then predicted by the default models.
        operators, model, folder = folder, "default", find_model("default")
    others = PLATFORM_DEFAULTS if str(model) == "default" else {}
    by_platform = {name: CostModel.load(find_model(other)) for name, other in others.items()}
    return Predictor(CostModel.load(folder), cache, by_platform, operators)


def roofline_predictor() -> Predictor:
    """Return a predictor that only uses the roofline, for any device."""
    from ...models.cost_model import CostModel
    from ...models.estimators.linear import RooflineEstimator

    return Predictor(CostModel(RooflineEstimator()))


def load_for_programs(model: str | Path = "default") -> Predictor:
    """Load a model for programs like :func:`load`, but refuse models of library operators.

    Raises:
        ModelError: See :func:`load`; or the model is one of library operators.
    """
    from ...models.core.store import predicts_operators, read_manifest
    from ...models.cost_model import CostModel

    if not is_untrained(model) and predicts_operators(read_manifest(find_model(model))):
        CostModel.load(find_model(model))  # raises with the contents of the folder
    return load(model)


def _require_learned(kernels: Sequence[Kernel], source: np.ndarray) -> None:
    for kernel, origin in zip(kernels, source.tolist(), strict=True):
        # Control kernels take no time, so there is nothing to learn about them.
        own = origin.split(":")[0] in ("learned", "measured", "simulator")
        if not own and kernel.kind != "control":
            where = f"{kernel.sources[0].file}:{kernel.sources[0].line}" if kernel.sources else ""
            raise StrictError(
                f"kernel {kernel.name} ({kernel.kind}) has only a {origin} estimate",
                where=where,
                hint="profile such kernels and train again, or predict without --strict",
            )
