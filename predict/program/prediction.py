"""Prediction of a program: its time, kernels, memory and energy, with notes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...common.errors import UnknownCallError
from ...common.interval import InSeconds, Interval, latency_of
from ...common.units import duration
from ...features.cost.library_calls import unknown_calls, useless_costs
from ...features.devices.identity import former_speeds, speed_of
from ...features.kernels.kernel import is_attention
from ...models.power.energy import energy_fields
from ..groups import Group, grouped

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...features.devices.device import DeviceSpec
    from ...features.ir.reader import SourceProgram
    from ...features.kernels.kernel import Kernel, LoweredProgram
    from ...models.core.base import KernelPrediction
    from ...models.cost_model import CostModel
    from ...models.program.program_model import ProgramPrediction

#: Maximum source lines to name in a refusal.
_LINES = 3
#: Sources of estimates that do not depend on what a kernel does.
_OBSERVED = ("measured", "simulator", "compiler")
#: User ops that are matrix products.
_PRODUCTS = ("stablehlo.dot_general", "stablehlo.dot")


@dataclass(frozen=True, slots=True)
class KernelEstimate:
    """One kernel of a prediction. Times are per execution, in microseconds.

    Attributes:
        name: Instruction name in the lowered program.
        kind: Kind of kernel.
        latency_us: Predicted latency.
        lo_us: Lower bound of the 90 % interval.
        hi_us: Upper bound of the 90 % interval.
        multiplicity: Executions per program run.
        bound: ``compute``, ``memory``, ``latency`` or ``communication``.
        source: ``measured``, ``learned``, ``roofline`` or ``compiler``, optionally followed by a
            colon and the training data.
        in_domain: Whether the model was trained on similar kernels.
        flops: Floating-point operations of one execution.
        bytes: Bytes touched by one execution.
        source_op: StableHLO op that it mainly came from.
        source_line: ``file:line`` in the user's program, or empty.
        module: Modules that it belongs to, such as ``Llama/Block_0/attention``, or empty.
        phase: ``forward``, ``backward`` or ``recomputed``; empty without gradients.
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
        """The op that it mainly came from, as named in the user's code, or its kind."""
        return self.source_op.removeprefix("stablehlo.") or self.kind


class Memory(NamedTuple):
    """Memory that a program needs.

    Attributes:
        peak_bytes: Peak on the device.
        device_bytes: Memory of the device; 0 if unknown.
        fits: Whether the peak fits; ``None`` if that is unknown.
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
        lo_us: Lower bound of the 90 % interval.
        hi_us: Upper bound of the 90 % interval.
        kernels: Kernels in schedule order.
        peak_memory_bytes: Peak device memory.
        memory_source: ``compiler`` or ``liveness``.
        lowering: ``xla``, ``fused`` or ``op``.
        model: Name of the estimator.
        device: Name of the device.
        notes: Known limits of the prediction.
        compiler: Compiler and version, if a compiler made the kernels.
        device_memory_bytes: Device memory available to programs; 0 if unknown.
        energy: Joules of one run with their 90 % interval; ``None`` if the device's power limit is
            unknown.
        standing: The ``notes`` on the model and the device, independent of the program.
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
        """Return a summary: time, interval, device and number of kernels."""
        return f"Prediction({self._said()}, {len(self.kernels)} kernels)"

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits into the device's memory; ``None`` if that is unknown."""
        if not self.device_memory_bytes:
            return None
        return self.peak_memory_bytes <= self.device_memory_bytes

    @property
    def memory(self) -> Memory:
        """Peak memory, memory of the device, and whether it fits."""
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
        """Return the kernels with the longest time over all executions."""
        return sorted(self.kernels, key=lambda k: -k.total_us)[:count]

    def by(self, key: str) -> list[Group[KernelEstimate]]:
        """Group the kernels by ``line``, ``module``, ``kind`` or ``phase``.

        Returns:
            Groups, the longest time first.
        """
        return grouped(self.kernels, key)

    def to_dict(self) -> dict[str, object]:
        """Return JSON data, as ``opcast predict --json`` prints it."""
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


def in_program(
    model: CostModel, lowered: LoweredProgram, device: DeviceSpec, isolated: KernelPrediction
) -> tuple[KernelPrediction, ProgramPrediction]:
    """Predict a program and its kernels in context, at the speeds that its device may have.

    Args:
        model: Predictor of programs.
        lowered: The program.
        device: The device.
        isolated: Predictions of the isolated kernels.
    """
    if speed_of(device).ratios or former_speeds(device):
        from ...models.adapt.device_correction import in_program_at_speeds

        return in_program_at_speeds(model, lowered, device, isolated)
    return model.predict_in_program(lowered, device, isolated)


def check_known(
    kernels: Sequence[Kernel],
    source: np.ndarray,
    rest: Callable[[np.ndarray], ProgramPrediction] | None = None,
) -> None:
    """Refuse a time that would depend on unknown custom calls.

    Args:
        kernels: Kernels of a program.
        source: Source of each estimate; measured and compiler estimates are always accepted.
        rest: Predicts the program without the masked kernels, for the message.

    Raises:
        UnknownCallError: A kernel runs an unknown custom call.
    """
    # Imported late: lowering takes long to import, and few programs have such a call.
    from ...features.lowering.op import call_remedy

    apart = np.zeros(len(kernels), bool)
    counts: Counter[str] = Counter()
    useless: dict[str, None] = {}
    for place, (kernel, origin_of) in enumerate(zip(kernels, source.tolist(), strict=True)):
        if kernel.takes_time and origin_of.split(":")[0] not in _OBSERVED:
            calls = unknown_calls(kernel.body)
            apart[place] = bool(calls)
            counts.update(calls)
            useless |= dict.fromkeys(useless_costs(kernel.body) if calls else ())
    if not counts:
        return
    named = [f"{call} ({count}×)" if count > 1 else call for call, count in counts.items()]
    sources = [own for k, out in zip(kernels, apart, strict=True) if out for own in k.sources[:1]]
    lines = dict.fromkeys(f"{own.file}:{own.line}" for own in sources if own.line)
    known = "".join(f"; {said}" for said in useless)
    if rest is not None and any(
        k.takes_time and not out for k, out in zip(kernels, apart, strict=True)
    ):
        own = rest(apart)
        ends = f"{duration(own.lo * 1e6)} to {duration(own.hi * 1e6)}"
        known += f"; all else takes {duration(own.latency * 1e6)} (90 % interval {ends})"
    raise UnknownCallError(
        f"outside what opcast knows: the custom call{'s' if len(counts) > 1 else ''} "
        f"{', '.join(named)}, whose work no rule or package describes{known}",
        where=", ".join(list(lines)[:_LINES]),
        hint="; ".join(dict.fromkeys(map(call_remedy, counts))),
    )


def origin(kernel: KernelEstimate) -> str:
    """Format the StableHLO op and source line that a kernel mainly came from."""
    line = kernel.source_line.rsplit("/", 1)[-1]
    op = kernel.source_op.removeprefix("stablehlo.")
    return f"{op} {line}".strip()


def kernel_estimates(
    kernels: Sequence[Kernel], found: KernelPrediction, source: SourceProgram | None
) -> tuple[KernelEstimate, ...]:
    """Return kernels with their predictions.

    Args:
        kernels: Kernels of a program.
        found: Their predictions.
        source: The program before lowering, which names their modules.
    """
    from ...features.kernels.provenance import ModulePath, ModulePaths

    paths = ModulePaths(source) if source is not None else None
    # Whole columns are converted, since reading NumPy scalars one by one is far slower.
    times = [(own * 1e6).tolist() for own in (found.latency, found.lo, found.hi)]
    about = [own.tolist() for own in (found.bound, found.source, found.in_domain)]
    estimates = []
    for kernel, *figures in zip(kernels, *times, *about, strict=True):
        latency, lo, hi, bound, origin_of, in_domain = figures
        # The first source is the op that the kernel mainly came from.
        main = kernel.sources[0] if kernel.sources else None
        place = paths.of(kernel) if paths is not None else ModulePath()
        estimates.append(
            KernelEstimate(
                name=kernel.name,
                kind=_kind(kernel),
                latency_us=latency,
                lo_us=lo,
                hi_us=hi,
                multiplicity=kernel.multiplicity,
                bound=bound,
                source=origin_of,
                in_domain=in_domain,
                flops=kernel.flops,
                bytes=kernel.bytes,
                source_op=main.op if main else "",
                source_line=f"{main.file}:{main.line}" if main and main.line else "",
                module="/".join(place.modules),
                phase=place.phase,
            )
        )
    return tuple(estimates)


def _kind(kernel: Kernel) -> str:
    """Return the kind of a kernel in the user's terms.

    A TPU's compiler turns products into convolutions, and fused attention into two products.
    """
    if kernel.kind == "gemm" and is_attention(kernel.op):
        return "attention"
    product = kernel.sources and kernel.sources[0].op in _PRODUCTS
    return "gemm" if kernel.kind == "conv" and product else kernel.kind
