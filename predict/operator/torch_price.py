"""Times of PyTorch's kernels for a program: eager, or as ``torch.compile`` fuses them.

    time = max(sum of the kernels, launches · host time per launch)

Kernels of 16 bits and fewer are priced as those of training steps (``step_operators.py``), f32
kernels as PyTorch's own, timed alone and composed like published op graphs
(``predict/published/composition.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...common.errors import ProgramError
from ...common.interval import LEAST_SHARE, InSeconds, combined_spread, latency_fields
from ...features.devices.device import DeviceSpec
from ...features.operators.physics import fitted
from ...models.operators import OpModel
from ...models.program.pytorch import (
    UNLIKE,
    UNLIKE_WIDE,
    CpuTorchModel,
    TorchModel,
    products_lead,
    torch_context,
    widened,
)
from ...models.steps.effects import device_context
from ...models.steps.model import StepModel
from ...models.trust.calibrator import Ends
from ..cluster.spread import RHO
from ..devices import generation_note
from ..groups import Group, grouped
from ..published.composition import RHO as RHO_ALONE
from ..published.composition import RUN_ERROR
from .aten_costs import cost_class, measured_costs, seconds_by_class
from .aten_fusion import fused
from .aten_prices import ALONE, AtenPrices, as_set, bound_of, least_times, raised
from .aten_products import check_priced
from .aten_work import AtenKernel, works
from .cpu_prices import CpuPrices
from .torch_choices import check_attention
from .torch_memory import COMPILED_ERROR, ERROR, TorchMemory, compiled_storages, torch_memory
from .torch_notes import (
    GRAPHS,
    RECURRENT,
    attention_notes,
    compiled_notes,
    kernel_name,
    kernel_notes,
    release_notes,
)

if TYPE_CHECKING:
    from ...features.ir.torch.record import Recording

#: Host seconds per launch, and factors by which they vary between machines and software releases.
_HOST = fitted("python")
#: Bytes/s of PCI Express 4.0 x16, as rounded in data sheets; later processors have faster links.
_PCIE_4 = 32e9
#: Maximum ratio of recurrent layers written out step by step to cuDNN's, which has about two
#: kernels for the twenty of a step and does not return to Python in between; lowers the lower
#: bound. Engineering estimate.
_CUDNN_STEPS = 10.0


@dataclass(frozen=True)
class AtenEstimate:
    """One PyTorch operator, or a fused chain. Times of one run, in microseconds.

    Attributes:
        name: Operator.
        kind: ``product``, ``convolution``, ``attention``, ``norm``, ``softmax`` or ``pass``.
        shape: Sizes by kind, see :class:`~.aten_work.AtenKernel`.
        dtype: Element type.
        latency_us: Predicted latency within a stream of kernels.
        lo_us: Lower bound of the 90 % interval.
        hi_us: Upper bound.
        bytes: Memory traffic.
        launches: Host launches.
        bound: Bottleneck of its roofline: ``compute``, ``memory`` or ``latency``.
        source: Family that it was learned from, or ``roofline``.
        source_line: ``file:line`` in the user's model.
        module: Path of its modules.
        phase: ``forward``, ``backward`` or ``optimizer``.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    latency_us: float
    lo_us: float
    hi_us: float
    bytes: float
    launches: int
    bound: str
    source: str
    source_line: str
    module: str
    phase: str

    @property
    def total_us(self) -> float:
        """Microseconds over all executions; there is one."""
        return self.latency_us

    @property
    def source_op(self) -> str:
        """The operator in the program, as of other predictions."""
        return self.name

    @property
    def what(self) -> str:
        """The operator under the name that users know."""
        return self.name


@dataclass(frozen=True)
class TorchPrediction(InSeconds):
    """Predicted time of a program as PyTorch itself runs it.

    Attributes:
        latency_us: Time of one run.
        lo_us: Lower bound of the 90 % interval.
        hi_us: Upper bound.
        framework: ``torch-eager`` or ``torch-compiled``.
        device: Name of the device.
        device_us: Sum of the kernels.
        host_us: Time in which the host launches them; the run takes the longer of both.
        operators: Operators in order.
        parameter_bytes: Bytes of parameters and buffers.
        notes: Assumptions and limits.
        memory: Peak memory and whether it fits; ``None`` if it is not predicted.
    """

    latency_us: float
    lo_us: float
    hi_us: float
    framework: str
    device: str
    device_us: float
    host_us: float
    operators: tuple[AtenEstimate, ...]
    parameter_bytes: int
    notes: tuple[str, ...]
    memory: TorchMemory | None = None

    def __repr__(self) -> str:
        """Return a summary: time, interval, framework and number of operators."""
        return (
            f"TorchPrediction({self._said()} by {self.framework}, {len(self.operators)} operators)"
        )

    @property
    def peak_memory_bytes(self) -> float | None:
        """Peak of the memory that the device reports; ``None`` if it is not predicted."""
        return self.memory.peak_bytes if self.memory else None

    @property
    def fits(self) -> bool | None:
        """Whether the program is more likely than not to fit; ``None`` if that is unknown."""
        return self.memory.fits if self.memory else None

    @property
    def kernels(self) -> tuple[AtenEstimate, ...]:
        """The operators, under the name that other predictions use."""
        return self.operators

    def top(self, count: int = 10) -> list[AtenEstimate]:
        """Return the operators with the longest times."""
        return sorted(self.operators, key=lambda o: -o.total_us)[:count]

    def by(self, key: str) -> list[Group[AtenEstimate]]:
        """Group the operators by ``line``, ``module``, ``kind`` or ``phase``.

        Returns:
            Groups, the longest time first.
        """
        return grouped(self.operators, key)

    def to_dict(self) -> dict[str, object]:
        """Return JSON data, as ``opcast predict --json`` prints it."""
        own = self.memory
        return {
            **asdict(self),
            "peak_memory_bytes": self.peak_memory_bytes,
            "memory_source": own.source if own else "",
            "device_memory_bytes": own.device_bytes if own else 0.0,
            "fits": self.fits,
        }


@dataclass(frozen=True)
class Priced:
    """Times of kernels, and of a sequential run of them.

    Attributes:
        times: Seconds with both bounds of the 90 % interval, shape ``(n, 3)``.
        sources: Family that each was learned from, or ``roofline``.
        seconds: Time of the run: the kernels, or the host's launches if these take longer.
        lo: Lower bound of its 90 % interval.
        hi: Upper bound.
        device_s: Sum of the kernels.
        host_s: Time in which the host launches them.
    """

    times: np.ndarray
    sources: list[str]
    seconds: float
    lo: float
    hi: float
    device_s: float
    host_s: float


def price_works(
    found: Sequence[AtenKernel],
    spec: DeviceSpec,
    framework: str,
    bundle: OpModel | None,
    kept: Collection[int] = (),
    release: str = "",
    graphs: bool = False,
) -> Priced:
    """Price kernels that run one after the other.

    Args:
        found: The kernels.
        spec: The device.
        framework: ``torch-eager`` or ``torch-compiled``.
        bundle: Operator model; ``None`` for rooflines.
        kept: Memory that outlives the kernels.
        release: PyTorch release; empty for a recent one.
        graphs: Whether the compiled passes are CUDA graphs.
    """
    compiled = framework == "torch-compiled"
    times, sources, host = unlearned(found, spec, framework, bundle, kept, release, graphs)
    least = least_times(found, spec)
    ends: Ends | None = None
    cpu, narrow = spec.platform == "cpu", computes_narrow(found)
    if bundle is not None and (cpu or narrow):
        learned = (CpuTorchModel if cpu else TorchModel).find()
        context = torch_context(spec, framework, release)
        costs = [cost_class(w, compiled, spec.platform) for w in found]
        factors = learned.factors(costs, context)
        if context["leading"] == "yes" or not learned.effects.knows("device", spec.name):
            own = measured_costs(spec, bundle)
            factors[[cost in own for cost in costs]] = 1.0
        times = raised(times * factors[:, None], least)
        train = any(w.phase == "backward" for w in found)
        ends = learned.interval(seconds_by_class(costs, times[:, 0]), context, train, narrow)
    total = float(times[:, 0].sum())
    # Errors of calls timed alone, and of f32 kernels without measurements, are less correlated than
    # those of the kernels that steps were fitted with.
    alone = np.array([s.removeprefix("learned:").startswith(ALONE) for s in sources])
    rho = RHO if narrow and times[alone, 0].sum() <= 0.5 * total else RHO_ALONE
    reach = np.stack([times[:, 0] - times[:, 1], times[:, 2] - times[:, 0]], axis=1)
    down, up = np.hypot(combined_spread(reach, rho), RUN_ERROR * total)
    if ends is None and not cpu:
        # From the kernels' own errors, for a program unlike those in the training data.
        shortest = np.log(max(1.0 - down / total, LEAST_SHARE))
        wide = bundle is not None and spec.runs_cuda and not narrow
        ends = (float(shortest), float(np.log1p(up / total)))
        ends = widened(ends, UNLIKE_WIDE if wide else UNLIKE)
    if ends is not None:
        # Held-out errors of whole models include those of their kernels.
        down, up = -np.expm1(ends[0]) * total, np.expm1(ends[1]) * total
    seconds = max(total, host)
    lo = max(total - down, LEAST_SHARE * total, float(least.sum()), host / _HOST.less)
    hi = max(total + up, host * _HOST.more)
    return Priced(times, sources, seconds, min(lo, seconds), hi, total, host)


def unlearned(
    found: Sequence[AtenKernel],
    spec: DeviceSpec,
    framework: str,
    bundle: OpModel | None,
    kept: Collection[int] = (),
    release: str = "",
    graphs: bool = False,
) -> tuple[np.ndarray, list[str], float]:
    """Price kernels without the factors learned from whole models; see :func:`price_works`.

    Returns:
        Seconds with both bounds of the 90 % interval, shape ``(n, 3)``; the family that each was
        learned from; and host seconds to launch them.
    """
    if spec.platform == "cpu":
        # On a CPU, host work is part of the kernel's time.
        return *CpuPrices(spec)(found, kept), 0.0
    bits = 32 if _mostly_f32(found) else 16
    effects = StepModel.find().table.effects(device_context(spec, bits))
    prices = AtenPrices(spec, bundle, effects.product, effects.attention, release)
    return *prices(found, kept), _host_seconds(found, spec, framework, effects.launch_s, graphs)


def _host_seconds(
    found: Sequence[AtenKernel], spec: DeviceSpec, framework: str, launch: float, graphs: bool
) -> float:
    """Return the seconds in which the host launches kernels.

    Args:
        found: The kernels.
        spec: The device.
        framework: See :func:`price_works`.
        launch: Seconds per launch outside the model's own Python: autograd's (also for a compiled
            backward graph, which has no measurements and launches no more than eager does), and the
            optimizer's.
        graphs: Whether the forward and the backward pass are one launch each.
    """
    python = _HOST.compiled_s if framework == "torch-compiled" else _HOST.eager_s
    if products_lead(spec) and spec.host_link <= _PCIE_4:
        python *= _HOST.server
    launches = {"forward": 0, "backward": 0, "optimizer": 0}
    for w in found:
        launches[w.phase] += w.launches
    if graphs and framework == "torch-compiled":
        launches |= {phase: min(launches[phase], 1) for phase in ("forward", "backward")}
    return launches.pop("forward") * python + sum(launches.values()) * launch


def computes_narrow(found: Sequence[AtenKernel]) -> bool:
    """Return whether most arithmetic is in 16 bits, as in all models in the training data."""
    flops = {"narrow": 0.0, "others": 0.0}
    for w in found:
        flops["narrow" if w.dtype in ("f16", "bf16") else "others"] += w.op.flops()
    return flops["narrow"] > flops["others"]


def works_of(recording: Recording, framework: str, spec: DeviceSpec) -> list[AtenKernel]:
    """Return the kernels that a framework launches for a recording on a device, in order."""
    found = fused(recording) if framework == "torch-compiled" else works(recording.calls)
    return [as_set(work, recording.tf32, spec) for work in found]


def price(
    recording: Recording,
    spec: DeviceSpec,
    framework: str,
    bundle: OpModel | None,
    release: str = "",
) -> TorchPrediction:
    """Price the kernels of a recording; see :class:`TorchPredictor`."""
    check_priced(recording.calls, spec)
    check_attention(recording.attention, spec)
    written = recording.otherwise
    older = price(written, spec, framework, bundle, release) if written else None
    found = works_of(recording, framework, spec)
    if not found:
        raise ProgramError(
            "the program launches no kernels",
            hint="it only views its inputs, or its results are empty",
        )
    priced = price_works(found, spec, framework, bundle, recording.kept, release, recording.graphs)
    times, sources = priced.times, priced.sources
    forward = sum(c.phase == "forward" for c in recording.calls)
    lo = priced.lo * (1.0 - (1.0 - 1.0 / _CUDNN_STEPS) * recording.recurrent / max(forward, 1))
    compiled = framework == "torch-compiled"
    graphs = compiled and recording.graphs
    hosted = priced.host_s > priced.device_s and not graphs
    if recording.compiled and not compiled:
        lo = min(lo, price(recording, spec, "torch-compiled", bundle, release).lo_us * 1e-6)
    storages = compiled_storages(recording) if compiled else recording.storages
    error = COMPILED_ERROR if compiled else ERROR
    memory = torch_memory(storages, spec, error) if storages else None
    return TorchPrediction(
        **latency_fields(priced.seconds, lo, max(priced.hi, older.hi_us * 1e-6 if older else 0.0)),
        framework=framework,
        device=spec.name,
        device_us=priced.device_s * 1e6,
        host_us=priced.host_s * 1e6,
        operators=tuple(
            AtenEstimate(
                name=kernel_name(w, spec),
                kind=w.kind,
                shape=w.shape,
                dtype=w.dtype,
                latency_us=float(t[0]) * 1e6,
                lo_us=float(t[1]) * 1e6,
                hi_us=float(t[2]) * 1e6,
                bytes=w.bytes,
                launches=w.launches,
                bound=bound_of(w, spec),
                source=source,
                source_line=f"{w.place.file}:{w.place.line}" if w.place.file else "",
                module=w.place.modules,
                phase=w.phase,
            )
            for w, t, source in zip(found, times, sources, strict=True)
        ),
        parameter_bytes=recording.parameter_bytes,
        notes=(
            *kernel_notes(framework, spec, found, times, sources, hosted),
            *attention_notes(recording, spec, found, older.latency_us if older else None),
            *((RECURRENT,) if recording.recurrent else ()),
            *recording.notes,
            *((GRAPHS,) if graphs else ()),
            *(() if compiled else compiled_notes(recording.compiled)),
            *release_notes(release),
            *generation_note(spec),
        ),
        memory=memory,
    )


def _mostly_f32(found: Sequence[AtenKernel]) -> bool:
    wide = sum(w.bytes for w in found if w.dtype in ("f32", "tf32"))
    return wide > sum(w.bytes for w in found) - wide
