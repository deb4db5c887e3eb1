"""Public entry: predict a program or kernel on a device, with intervals and notes."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...common.errors import StrictError
from ...common.files import printable
from ...common.interval import InSeconds, Interval, latency_fields, latency_of
from ...features.devices.identity import BY_NAME, MEASURED_AT, base_name, speed_of
from ...features.kernels.kernel import Kernel, LoweredProgram
from ...models.power.energy import energy_fields
from ..devices import resolve_device
from ..groups import Group, grouped
from ..locate import OPERATOR_MODEL, PLATFORM_DEFAULTS, find_model, is_untrained
from .energy import program_energy

if TYPE_CHECKING:
    from ...features.devices.device import DeviceSpec
    from ...features.ir.reader import SourceProgram
    from ...features.kernels.module_paths import ModulePath
    from ...features.lowering.cache import LoweringCache
    from ...features.lowering.options import LoweringOptions
    from ...features.lowering.target_compiler.process import CompileSettings
    from ...models.cost_model import CostModel
    from ...models.operators import OpModel

#: Names that XLA's HloRematerialization gives to the copies that it computes again.
_REMATERIALISED = re.compile(r"\.remat\d*(?:\.|$)")
#: Single-kernel answers that :meth:`Predictor.latency_us` remembers; a full memory is emptied. It
#: bounds the memory of long runs. Engineering estimate.
MEMO_SIZE = 200_000


@dataclass(frozen=True, slots=True)
class KernelEstimate:
    """One kernel of a prediction. Times are of one execution, in microseconds.

    Attributes:
        name: Instruction name in the lowered program.
        kind: Kind of kernel.
        latency_us: Predicted latency.
        lo_us: Lower end of the 90 % interval.
        hi_us: Upper end of the 90 % interval.
        multiplicity: Executions per program run.
        bound: ``compute``, ``memory``, ``latency`` or ``communication``.
        source: ``measured``, ``learned``, ``roofline`` or ``compiler``; a colon and what it was
            learned from may follow.
        in_domain: Whether the model was trained on similar kernels.
        flops: Floating-point operations of one execution.
        bytes: Bytes touched by one execution.
        source_op: StableHLO op that it mainly came from.
        source_line: ``file:line`` in the user's program, or empty.
        module: Modules that it belongs to, such as ``Llama/Block_0/attention``, or empty.
        phase: ``forward``, ``backward`` or ``recomputed``; empty where no gradient is taken.
    """

    name: str
    kind: str
    latency_us: float
    lo_us: float
    hi_us: float
    multiplicity: float
    bound: str
    source: str
    in_domain: bool
    flops: float
    bytes: float
    source_op: str
    source_line: str
    module: str = ""
    phase: str = ""

    @property
    def total_us(self) -> float:
        """Microseconds over all executions."""
        return self.latency_us * self.multiplicity

    @property
    def what(self) -> str:
        """The op that it mainly came from, as the user's code names it, or its kind."""
        return self.source_op.removeprefix("stablehlo.") or self.kind


class Memory(NamedTuple):
    """Memory that a program needs.

    Attributes:
        peak_bytes: Peak on the device.
        device_bytes: What the device has; 0 if not known.
        fits: Whether the peak is within it; ``None`` if that is not known.
        source: ``compiler`` or ``liveness``.
    """

    peak_bytes: float
    device_bytes: float
    fits: bool | None
    source: str


@dataclass(frozen=True)
class Prediction(InSeconds):
    """Predicted time of a program on a device, with its interval, kernels and notes.

    Attributes:
        latency_us: Time of one run of the program.
        lo_us: Lower end of the 90 % interval.
        hi_us: Upper end of the 90 % interval.
        kernels: Kernels in schedule order.
        peak_memory_bytes: Peak device memory.
        memory_source: ``compiler`` or ``liveness``.
        lowering: ``xla``, ``fused`` or ``op``.
        model: Name of the estimator.
        device: Name of the device.
        notes: Known limits of the prediction.
        compiler: Compiler and version, if a compiler made the kernels.
        device_memory_bytes: Memory of the device; 0 if not known.
        energy: Joules of one run with their 90 % interval; ``None`` if the device's power limit is
            not known.
        standing: Those of ``notes`` that are about the model and the device, whatever the program.
    """

    latency_us: float
    lo_us: float
    hi_us: float
    kernels: tuple[KernelEstimate, ...]
    peak_memory_bytes: float
    memory_source: str
    lowering: str
    model: str
    device: str
    notes: tuple[str, ...] = field(default=())
    compiler: str = ""
    device_memory_bytes: float = 0.0
    standing: tuple[str, ...] = ()
    energy: Interval | None = None

    def __repr__(self) -> str:
        """Time, interval, device and number of kernels; the fields would fill pages."""
        return f"Prediction({self._said()}, {len(self.kernels)} kernels)"

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the device's memory; ``None`` if that is not known."""
        if not self.device_memory_bytes:
            return None
        return self.peak_memory_bytes <= self.device_memory_bytes

    @property
    def memory(self) -> Memory:
        """Peak memory, what the device has, and whether that is enough."""
        return Memory(
            self.peak_memory_bytes, self.device_memory_bytes, self.fits, self.memory_source
        )

    @property
    def share_by_kind(self) -> dict[str, float]:
        """Share of the summed kernel time by kind, largest first."""
        sums: Counter[str] = Counter()
        for kernel in self.kernels:
            sums[kernel.kind] += kernel.total_us  # type: ignore[assignment]
        total = sum(sums.values()) or 1.0
        return {kind: value / total for kind, value in sums.most_common()}

    @property
    def in_domain_share(self) -> float:
        """Share of the summed kernel time that lies within the model's training domain."""
        total = sum(k.total_us for k in self.kernels) or 1.0
        return sum(k.total_us for k in self.kernels if k.in_domain) / total

    def top(self, count: int = 10) -> list[KernelEstimate]:
        """Return the kernels that take most time over all their executions."""
        return sorted(self.kernels, key=lambda k: -k.total_us)[:count]

    def by(self, key: str) -> list[Group[KernelEstimate]]:
        """Put the kernels together by ``line``, ``module``, ``kind`` or ``phase``.

        Returns:
            What takes most time first.
        """
        return grouped(self.kernels, key)

    def to_dict(self) -> dict[str, object]:
        """Plain data, as ``opcast predict --json`` prints it."""
        return {
            **latency_of(self),
            **energy_fields(self.energy),
            # Not ``asdict``, which copies recursively: programs have tens of thousands of kernels.
            "kernels": [
                {name: getattr(k, name) for name in KernelEstimate.__slots__} for k in self.kernels
            ],
            "share_by_kind": self.share_by_kind,
            "in_domain_share": self.in_domain_share,
            "peak_memory_bytes": self.peak_memory_bytes,
            "memory_source": self.memory_source,
            "device_memory_bytes": self.device_memory_bytes,
            "fits": self.fits,
            "compiler": self.compiler,
            "lowering": self.lowering,
            "model": self.model,
            "device": self.device,
            "notes": list(self.notes),
        }


class Predictor:
    """Predicts programs and kernels with one loaded model.

    Args:
        model: A loaded cost model.
        cache: Cache of lowered programs; ``None`` takes the default folder.
        by_platform: Models for devices of a platform that ``model`` was not trained on.
        operators: Name or folder of the model that answers for operators of libraries.

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
        # The predictor's own model wins where several describe a device.
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
        # the default model of CPUs would.
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
        **kwargs: object,
    ) -> Prediction:
        """Predict a whole program.

        Args:
            program: Path, text or bytes of StableHLO or HLO, an exported or lowered JAX function,
                or a function, jitted or not, followed by its example arguments; it is lowered for
                the platform of ``device``, wherever this runs.
            args: Example arguments of a function: arrays or ``jax.ShapeDtypeStruct``.
            device: Name, path of a device file, or description.
            lowering: ``xla`` (the device's own compiler, present or not), ``fused`` (our own
                fusion rules), ``op``, or ``auto``: ``xla`` where that compiler is installed.
            trip_counts: Trips of loops whose count cannot be found: one number for all, or by name.
            strict: Raise instead of falling back to the roofline for a kernel.
            fallback: Lowering to take where the device's compiler is missing or fails.
            settings: Limits and options of that compiler.
            kwargs: Keyword arguments of a function. One that has the name of an option here goes
                into a lambda around it.

        Raises:
            OpcastError: The program, device or lowering is not usable, ``strict`` is not met, or
                the program is for several devices (``predict_partitioned`` takes those).
        """
        from ...features.lowering.options import LoweringOptions

        options = LoweringOptions(lowering, device, trip_counts, fallback, settings)
        return self.predict_with(program, options, *args, strict=strict, **kwargs)

    def predict_with(
        self,
        program: object,
        options: LoweringOptions,
        *args: object,
        strict: bool = False,
        **kwargs: object,
    ) -> Prediction:
        """Predict a whole program, as :meth:`predict`, with the lowering options as one value.

        Args:
            program: Program, as for :meth:`predict`.
            options: Lowering options; the predictor's cache replaces theirs.
            args: As for :meth:`predict`.
            strict: As for :meth:`predict`.
            kwargs: As for :meth:`predict`.

        Raises:
            OpcastError: As for :meth:`predict`.
        """
        from ...features.ir.partitioning import check_one_device
        from ...features.ir.platforms import platform_of
        from ...features.ir.reader import read_program
        from ...features.ir.untrusted import well_formed
        from ...features.lowering.lower import lower_with
        from ...simulate.clusters.catalogue import named_cluster

        spec = resolve_device(options.device, self.devices)
        source = read_program(
            program,
            *args,
            trip_counts=options.trip_counts,
            platform=platform_of(spec),
            **kwargs,
        )
        check_one_device(source, spec.name, named_cluster)
        lowered = lower_with(source, replace(options, device=spec, cache=self.cache))
        # HLO attributes that contradict their shapes surface only while features are computed.
        with well_formed(source):
            return self.predict_lowered(lowered, spec, strict=strict, source=source)

    def predict_lowered(
        self,
        lowered: LoweredProgram,
        device: str | Path | DeviceSpec,
        *,
        strict: bool = False,
        source: SourceProgram | None = None,
    ) -> Prediction:
        """Predict a program that is already lowered.

        Args:
            lowered: Its kernels.
            device: The device.
            strict: As for :meth:`predict`.
            source: The program that they were made of, which names their modules.

        Raises:
            DeviceError: The device is not known.
            StrictError: ``strict`` is set and a kernel has no learned estimate.
        """
        device = resolve_device(device, self.devices)
        model = self.model_for(device)
        kernels = model.predict_kernels(lowered.kernels, device)
        if device.platform == "tpu":
            from ...models.estimators.tpu import by_compiler

            kernels = by_compiler(kernels, lowered.kernels, device)
        # On the kernels in isolation: corrections for the context say nothing about the source.
        if strict:
            _require_learned(lowered.kernels, kernels.source)
        # Latencies in context (cache contents left by neighbours) may differ from those in
        # isolation.
        isolated = kernels
        kernels, program = model.predict_in_program(lowered, device, isolated)
        if (speed := speed_of(device)).ratios:
            from ...models.adapt.present_speed import (
                at_higher_speed,
                at_present_speed,
                program_at_present_speed,
            )

            faster = at_higher_speed(isolated, lowered.kernels, speed)
            others = [program, model.predict_program(lowered, device, faster)]
            kernels, program = model.predict_in_program(
                lowered, device, at_present_speed(isolated, lowered.kernels, speed)
            )
            program = program_at_present_speed(program, others)
        rows = zip(
            lowered.kernels,
            _places(lowered.kernels, source),
            # Converted as whole columns: reading NumPy scalars one by one is many times slower.
            (kernels.latency * 1e6).tolist(),
            (kernels.lo * 1e6).tolist(),
            (kernels.hi * 1e6).tolist(),
            kernels.bound.tolist(),
            kernels.source.tolist(),
            kernels.in_domain.tolist(),
            strict=True,
        )
        standing = model_notes(model, lowered.kernels, device)
        return Prediction(
            **latency_fields(program.latency, program.lo, program.hi),
            kernels=tuple(_estimate(*row) for row in rows),
            peak_memory_bytes=lowered.peak_memory_bytes,
            memory_source=lowered.memory_source,
            lowering=lowered.lowering,
            model=model.name,
            device=device.name,
            # What the lowering could not do comes first, then what the model does not know.
            notes=(
                *_again(lowered.kernels, kernels.latency),
                *lowered.notes,
                *standing,
            ),
            standing=standing,
            energy=program_energy(
                lowered.kernels,
                kernels.latency,
                Interval(program.latency, program.lo, program.hi),
                device,
            ),
            compiler=lowered.compiler,
            device_memory_bytes=device.memory_bytes,
        )

    def latency_us(self, what: Kernel | str, device: str | DeviceSpec = "local") -> float:
        """Predict the latency of one execution in microseconds; repeated queries are cached.

        Args:
            what: A kernel, or an operator as accepted by
                :func:`~opcast.features.operators.query.parse_op`.
            device: Name, path of a device file, or description.

        Raises:
            DeviceError: The device is not known.
            ProgramError: The text does not describe an operator.
            ModelError: The model does not know the family.
        """
        ask = what if isinstance(what, str) else what.hash
        key = (ask, device if isinstance(device, str) else id(device))
        # Read without the lock: a dict look-up is atomic, and a miss is checked again by computing
        # it.
        found = self._memo.get(key)
        if found is None:
            with self._lock:
                found = float(self.latencies_us([what], device)[0])
                if len(self._memo) >= MEMO_SIZE:
                    # Dropping everything is cheaper than keeping an order of use for each of
                    # millions of hits.
                    self._memo.clear()
                    self._described.clear()
                if not isinstance(device, str):
                    # Kept alive, so that its id stays its own.
                    self._described[id(device)] = device
                self._memo[key] = found
        return found

    def latencies_us(
        self, what: Sequence[Kernel | str], device: str | DeviceSpec = "local"
    ) -> np.ndarray:
        """Predict latencies of many kernels or operators in microseconds, shape ``(n,)``.

        Raises:
            OpcastError: As for :meth:`latency_us`.
        """
        spec = self._spec(device)
        kernels = [(i, w) for i, w in enumerate(what) if not isinstance(w, str)]
        texts = [(i, w) for i, w in enumerate(what) if isinstance(w, str)]
        # Kernels and operators go to different models, each in one call, and back in their order.
        found = np.empty(len(what))
        # Models are loaded and their tables built on first use, which threads must not do at once.
        with self._lock:
            if kernels:
                own = self.model_for(spec).predict_kernels([k for _, k in kernels], spec)
                found[[i for i, _ in kernels]] = own.latency * 1e6
            if texts:
                found[[i for i, _ in texts]] = self._operators_us([t for _, t in texts], spec)
        return found

    def _spec(self, device: str | DeviceSpec) -> DeviceSpec:
        """Description of a device, cached by name, since looking for files takes a millisecond."""
        if not isinstance(device, str):
            return device
        found = self._specs.get(device)
        if found is None:
            found = self._specs[device] = resolve_device(device, self.devices)
        return found

    def _operators_us(self, texts: Sequence[str], spec: DeviceSpec) -> np.ndarray:
        import pandas as pd

        from ...features.operators.query import parse_op

        rows = pd.DataFrame([{**parse_op(t), "device": spec.name} for t in texts])
        self.operators.devices[spec.name] = spec
        latency: np.ndarray = self.operators.predict(rows).latency
        return latency * 1e6


def load(model: str | Path = "default", *, cache: LoweringCache | None = None) -> Predictor:
    """Load a model by name (shipped or registered) or from its folder.

    ``default`` loads the shipped model of every platform; the device selects one of them. A model
    of library operators is loaded together with those of ``default``, which predict programs. The
    roofline and the simulators learn nothing and have no folder, only a name.

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
    """Make a predictor that uses the roofline alone, for any device."""
    from ...models.cost_model import CostModel
    from ...models.estimators.roofline import RooflineEstimator

    return Predictor(CostModel(RooflineEstimator()))


def load_for_programs(model: str | Path = "default") -> Predictor:
    """Load a model for programs; as :func:`load`, but refuses models of library operators.

    Raises:
        ModelError: As for :func:`load`, or the model is one of library operators.
    """
    from ...models.core.store import predicts_operators, read_manifest
    from ...models.cost_model import CostModel

    if not is_untrained(model) and predicts_operators(read_manifest(find_model(model))):
        CostModel.load(find_model(model))  # raises an error that says what the folder holds
    return load(model)


def model_notes(model: CostModel, kernels: Sequence[Kernel], device: DeviceSpec) -> tuple[str, ...]:
    """Collect notes on the model's limits for a device and on the device's description."""
    return (*_model_limits(model, kernels, device), *_device_notes(device))


def _device_notes(device: DeviceSpec) -> tuple[str, ...]:
    """Notes on how a device was found, when it was measured, and how fast it runs now."""
    speed = speed_of(device)
    changed = (
        f"this machine runs at {speed} of when it was measured: times are scaled by what is "
        "slower, and intervals hold both speeds",
    )
    return (*_taken(device), *(changed if speed.ratios else ()))


def _taken(device: DeviceSpec) -> tuple[str, ...]:
    """A note that a device was matched by name alone, or the time of its measurement."""
    if device.extra.get(BY_NAME):
        return (
            f"this machine is taken for the {device.name} of the model by its name alone; "
            "to measure it: opcast device --save",
        )
    if isinstance(taken := device.extra.get(MEASURED_AT), str):
        # Device files are untrusted: their text is cut and printed without control sequences.
        return (f"{device.name} was measured on {printable(taken[:40])}",)
    return ()


def _model_limits(
    model: CostModel, kernels: Sequence[Kernel], device: DeviceSpec
) -> tuple[str, ...]:
    """The estimator's own notes, or a note that it was not trained on the device."""
    # First: a machine that only shares its name with a trained one would pass as known below.
    other = model.unlike(device)
    if other is not None:
        return (
            f"{device.name} measures {other} of the {base_name(device.name)} that the model was "
            "trained on: it is taken for another device, intervals are wider; profile this device "
            "and train on it, or adapt the model: opcast calibrate --device local --budget 5m",
        )
    own = getattr(model.estimator, "notes", None)
    if own is not None:
        found: tuple[str, ...] = own(kernels, device)
        return found
    if not model.devices:
        return ("nothing was learned or calibrated on any device",)
    if device.name in model.devices:
        return ()
    known = ", ".join(sorted(model.devices))
    return (
        f"the model was trained on {known}, not on {device.name}: errors may exceed the "
        "intervals; profile this device and train on it",
    )


def _require_learned(kernels: Sequence[Kernel], source: np.ndarray) -> None:
    for kernel, origin in zip(kernels, source.tolist(), strict=True):
        # Control kernels take no time of their own, so there is nothing to learn about them.
        own = origin.split(":")[0] in ("learned", "measured", "simulator")
        if not own and kernel.kind != "control":
            where = f"{kernel.sources[0].file}:{kernel.sources[0].line}" if kernel.sources else ""
            raise StrictError(
                f"kernel {kernel.name} ({kernel.kind}) has only a {origin} estimate",
                where=where,
                hint="profile such kernels and train again, or predict without --strict",
            )


def _places(kernels: Sequence[Kernel], source: SourceProgram | None) -> list[ModulePath]:
    """Modules and pass of each kernel; nowhere without the program."""
    from ...features.kernels.module_paths import ModulePath, ModulePaths

    if source is None:
        return [ModulePath()] * len(kernels)
    paths = ModulePaths(source)
    return [paths.of(kernel) for kernel in kernels]


def _again(kernels: Sequence[Kernel], latency: np.ndarray) -> tuple[str, ...]:
    """A note if the compiler computes values again that it has no memory to keep."""
    own = np.array([bool(_REMATERIALISED.search(k.name)) for k in kernels], bool)
    if not own.any():
        return ()
    times = latency * np.array([k.multiplicity for k in kernels], np.float64)
    share = float(times[own].sum() / (times.sum() or 1.0))
    return (
        f"to need less memory, the compiler computes {int(own.sum())} kernels' values again "
        f"(rematerialisation), {share:.1%} of the kernels' time: a smaller batch or "
        "recomputation of your own choice may be faster",
    )


def _estimate(
    kernel: Kernel,
    place: ModulePath,
    latency: float,
    lo: float,
    hi: float,
    bound: str,
    source: str,
    in_domain: bool,
) -> KernelEstimate:
    # The first source is the op that the kernel mainly came from.
    main = kernel.sources[0] if kernel.sources else None
    line = f"{main.file}:{main.line}" if main and main.line else ""
    return KernelEstimate(
        name=kernel.name,
        kind=kernel.kind,
        latency_us=latency,
        lo_us=lo,
        hi_us=hi,
        multiplicity=kernel.multiplicity,
        bound=bound,
        source=source,
        in_domain=in_domain,
        flops=kernel.flops,
        bytes=kernel.bytes,
        source_op=main.op if main else "",
        source_line=line,
        module="/".join(place.modules),
        phase=place.phase,
    )


def origin(kernel: KernelEstimate) -> str:
    """Format the StableHLO op and source line that a kernel mainly came from."""
    line = kernel.source_line.rsplit("/", 1)[-1]
    op = kernel.source_op.removeprefix("stablehlo.")
    return f"{op} {line}".strip()
