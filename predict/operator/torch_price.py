"""Times of PyTorch's own kernels for a program: eager, or as ``torch.compile`` fuses them.

    time = max(sum of the kernels, launches · time of the host for one)

Kernels of 16 bits and fewer are priced as those of training steps (``step_operators.py``), f32 ones
as PyTorch's own, timed alone and composed as published op graphs are
(``predict/published/composition.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...common.errors import ProgramError
from ...common.interval import InSeconds, latency_fields
from ...common.versions import is_newer
from ...features.devices.device import DeviceSpec
from ...features.operators.physics import fitted
from ...models.operators import OpModel
from ...models.pytorch.model import UNLIKE, CpuTorchModel, TorchModel, torch_context, widened
from ...models.steps.context import device_context
from ...models.steps.model import StepModel
from ...models.trust.calibrator import Ends
from ..cluster.spread import RHO, combined_spread
from ..devices import generation_note
from ..groups import Group, grouped
from ..published.composition import RHO as RHO_ALONE
from ..published.composition import RUN_ERROR
from .aten_costs import cost_class
from .aten_fusion import fused
from .aten_prices import ALONE, AtenPrices, attention_library, bound_of, least_times
from .aten_work import (
    ATTENTION,
    PRODUCT,
    SORTS,
    AtenKernel,
    check_priced,
    works,
)
from .compiled_storages import compiled_storages
from .cpu_prices import CpuPrices, cpu_notes
from .step_operators import FLASH2
from .torch_attention import CUDNN
from .torch_memory import COMPILED_ERROR, ERROR, TorchMemory, torch_memory

if TYPE_CHECKING:
    from ...features.ir.torch.record import Recording

#: Seconds of the host for a launch, and by which factors it takes less or more, between machines,
#: libraries and releases of Python.
_HOST = fitted("python")
#: Most times that recurrent layers written out step by step take of cuDNN's, which has about two
#: kernels for the twenty of a step and does not return to Python between them. Engineering
#: estimate; it widens the interval downwards.
_CUDNN_STEPS = 10.0
#: Families of operators that measure classes of cost by themselves.
_MEASURED_BY = {
    "graph/linear": ("product", "bmm"),
    "graph/context_attention": ("attention", "attention_backward"),
}
#: Newest release of PyTorch whose whole models were measured (timm.parquet of the published-torch
#: pack).
MEASURED_RELEASE = "2.9"
#: Least share of the estimate that a lower end falls to. Engineering estimate.
_SHORTEST = 0.05
_PREFERRED = (
    "attention is cuDNN's, which PyTorch prefers on this chip since its cuDNN is 9.15.1, as in its "
    "packages for CUDA 13; with an older one, or for CUDA 12, "
)
_RECURRENT_NOTE = (
    "recurrent layers are priced step by step, as written out; cuDNN, which PyTorch calls on GPUs, "
    "may be up to ten times faster, which the interval allows for"
)


@dataclass(frozen=True)
class AtenEstimate:
    """One operator of PyTorch, or a fused chain. Times of one run, in microseconds.

    Attributes:
        name: Operator.
        kind: ``product``, ``convolution``, ``attention``, ``norm``, ``softmax`` or ``pass``.
        shape: By kind, as :class:`~.aten_work.AtenKernel` has it.
        dtype: Element type.
        latency_us: Predicted, within a stream of kernels.
        lo_us: Lower end of the 90 % interval.
        hi_us: Upper end.
        bytes: Traffic.
        launches: Calls of the host.
        bound: What limits it by its roofline: ``compute``, ``memory`` or ``latency``.
        source: What it was learned from, or ``roofline``.
        source_line: ``file:line`` in the user's model.
        module: Modules that it belongs to.
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
        """Microseconds over all executions, of which there is one."""
        return self.latency_us

    @property
    def what(self) -> str:
        """The operator as users know it."""
        return self.name


@dataclass(frozen=True)
class TorchPrediction(InSeconds):
    """Predicted time of a program as PyTorch itself runs it.

    Attributes:
        latency_us: Time of one run.
        lo_us: Lower end of the 90 % interval.
        hi_us: Upper end.
        framework: ``torch-eager`` or ``torch-compiled``.
        device: Name of the device.
        device_us: Sum of the kernels.
        host_us: What the host takes to launch them; the run takes the longer of both.
        operators: In order.
        parameter_bytes: Bytes of parameters and buffers.
        notes: What the figures mean, and their limits.
        memory: Peak memory and whether it fits; ``None`` where it is not predicted.
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
        """Time, interval, device and number of operators; the fields would fill pages."""
        return (
            f"TorchPrediction({self._said()} by {self.framework}, {len(self.operators)} operators)"
        )

    @property
    def peak_memory_bytes(self) -> float | None:
        """What the device sees at the peak; ``None`` where it is not predicted."""
        return self.memory.peak_bytes if self.memory else None

    @property
    def fits(self) -> bool | None:
        """Whether it is more likely than not to run on the device; ``None`` if that is unknown."""
        return self.memory.fits if self.memory else None

    @property
    def kernels(self) -> tuple[AtenEstimate, ...]:
        """The operators, under the name that other predictions have for them."""
        return self.operators

    def top(self, count: int = 10) -> list[AtenEstimate]:
        """Return the operators that take most time."""
        return sorted(self.operators, key=lambda o: -o.total_us)[:count]

    def by(self, key: str) -> list[Group[AtenEstimate]]:
        """Put the operators together by ``line``, ``module``, ``kind`` or ``phase``.

        Returns:
            What takes most time first.
        """
        return grouped(self.operators, key)

    def to_dict(self) -> dict[str, object]:
        """Plain data, as ``opcast predict --json`` prints it."""
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
    """Times of kernels, and of a run of them one after the other.

    Attributes:
        times: Seconds and both ends of the 90 % interval of each, shape ``(n, 3)``.
        sources: What each was learned from, or ``roofline``.
        seconds: Time of the run: the kernels, or the host's launches if these take longer.
        lo: Lower end of its 90 % interval.
        hi: Upper end.
        device_s: Sum of the kernels.
        host_s: What the host takes to launch them.
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
) -> Priced:
    """Price kernels that run one after the other.

    Args:
        found: The kernels.
        spec: The device.
        framework: ``torch-eager`` or ``torch-compiled``.
        bundle: Model of operators; ``None`` for rooflines.
        kept: Memory that outlives them.
        release: Of PyTorch; empty for a recent one.
    """
    compiled = framework == "torch-compiled"
    times, sources, host = unlearned(found, spec, framework, bundle, kept, release)
    least = least_times(found, spec)
    ends: Ends | None = None
    cpu, narrow = spec.platform == "cpu", computes_narrow(found)
    if bundle is not None and (cpu or narrow):
        learned = (CpuTorchModel if cpu else TorchModel).find()
        context = torch_context(spec, framework, release)
        costs = [cost_class(w, compiled) for w in found]
        factors = learned.factors(costs, context)
        if context["leading"] == "yes" or not learned.effects.knows("device", spec.name):
            own = measured_costs(spec, bundle)
            factors[[cost in own for cost in costs]] = 1.0
        times = np.maximum(times * factors[:, None], least[:, None])
        train = any(w.phase == "backward" for w in found)
        ends = learned.interval(seconds_by_class(costs, times[:, 0]), context, train, narrow)
    total = float(times[:, 0].sum())
    # Errors of calls timed alone are less alike than those that steps were fitted with.
    alone = np.array([s.removeprefix("learned:").startswith(ALONE) for s in sources])
    rho = RHO_ALONE if times[alone, 0].sum() > 0.5 * total else RHO
    reach = np.stack([times[:, 0] - times[:, 1], times[:, 2] - times[:, 0]], axis=1)
    down, up = np.hypot(combined_spread(reach, rho), RUN_ERROR * total)
    if ends is None and not cpu:
        # Of the kernels' own errors, in a program unlike those that whole models taught of.
        shortest = np.log(max(1.0 - down / total, _SHORTEST))
        ends = widened((float(shortest), float(np.log1p(up / total))), UNLIKE)
    if ends is not None:
        # Errors of whole models that were left out hold those of their kernels.
        down, up = -np.expm1(ends[0]) * total, np.expm1(ends[1]) * total
    seconds = max(total, host)
    lo = max(total - down, _SHORTEST * total, float(least.sum()), host / _HOST.less)
    hi = max(total + up, host * _HOST.more)
    return Priced(times, sources, seconds, min(lo, seconds), hi, total, host)


def unlearned(
    found: Sequence[AtenKernel],
    spec: DeviceSpec,
    framework: str,
    bundle: OpModel | None,
    kept: Collection[int] = (),
    release: str = "",
) -> tuple[np.ndarray, list[str], float]:
    """Price kernels without what whole models taught; arguments as of :func:`price_works`.

    Returns:
        Seconds and both ends of the 90 % interval of each, shape ``(n, 3)``, what they were
        learned from, and seconds of the host to launch them.
    """
    if spec.platform == "cpu":
        # What the host does for a kernel is part of it.
        return *CpuPrices(spec)(found, kept), 0.0
    bits = 32 if _mostly_f32(found) else 16
    effects = StepModel.find().table.effects(device_context(spec, bits))
    prices = AtenPrices(spec, bundle, effects.product, effects.attention, release)
    return *prices(found, kept), _host_seconds(found, framework, effects.launch_s)


def _host_seconds(found: Sequence[AtenKernel], framework: str, launch: float) -> float:
    """Seconds in which the host launches kernels.

    Args:
        found: The kernels.
        framework: As of :func:`price_works`.
        launch: For a launch beside the model's own Python: autograd's, of a compiled backward graph
            too (no table has one, and it does not launch more than eager does), and the optimiser's
            of lists.
    """
    python = _HOST.compiled_s if framework == "torch-compiled" else _HOST.eager_s
    each = [python if w.phase == "forward" else launch for w in found]
    return float(np.dot([w.launches for w in found], each))


def computes_narrow(found: Sequence[AtenKernel]) -> bool:
    """Whether most arithmetic of kernels is in 16 bits, as in all models that were learned from."""
    flops = {"narrow": 0.0, "others": 0.0}
    for w in found:
        flops["narrow" if w.dtype in ("f16", "bf16") else "others"] += w.op.flops()
    return flops["narrow"] > flops["others"]


def measured_costs(spec: DeviceSpec, bundle: OpModel) -> frozenset[str]:
    """Classes of cost whose kernels were measured by themselves on a chip of the architecture.

    How fast products and attention are under load differs most between architectures (clocks,
    power), so that nothing is taken over from models on chips of others.
    """
    found: set[str] = set()
    for key, costs in _MEASURED_BY.items():
        family = bundle.families.get(key)
        chips = [bundle.devices[name] for name in family.devices] if family else []
        if any(chip.architecture == spec.architecture for chip in chips):
            found |= set(costs)
    return frozenset(found)


def seconds_by_class(costs: Sequence[str], seconds: np.ndarray) -> dict[str, float]:
    """Sums of seconds, shape ``(n,)``, by class of cost."""
    sums: dict[str, float] = {}
    for cost, own in zip(costs, seconds.tolist(), strict=True):
        sums[cost] = sums.get(cost, 0.0) + own
    return sums


def works_of(recording: Recording, framework: str) -> list[AtenKernel]:
    """Kernels that a framework launches for a recording, in order."""
    return fused(recording) if framework == "torch-compiled" else works(recording.calls)


def price(
    recording: Recording,
    spec: DeviceSpec,
    framework: str,
    bundle: OpModel | None,
    release: str = "",
) -> TorchPrediction:
    """Price what a program launches; see :class:`TorchPredictor`."""
    check_priced(recording.calls, spec)
    written = recording.otherwise
    older = price(written, spec, framework, bundle, release) if written else None
    found = works_of(recording, framework)
    if not found:
        raise ProgramError("the program launches no kernels", hint="it only views its inputs")
    priced = price_works(found, spec, framework, bundle, recording.kept, release)
    times, sources = priced.times, priced.sources
    forward = sum(c.phase == "forward" for c in recording.calls)
    lo = priced.lo * (1.0 - (1.0 - 1.0 / _CUDNN_STEPS) * recording.recurrent / max(forward, 1))
    compiled = framework == "torch-compiled"
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
                name=_named(w, spec),
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
            *_notes(framework, spec, found, times, sources, priced.host_s > priced.device_s),
            *_attention_notes(recording, spec, found, older),
            *((_RECURRENT_NOTE,) if recording.recurrent else ()),
            *recording.notes,
            *_release_notes(release),
            *generation_note(spec),
        ),
        memory=memory,
    )


def _release_notes(release: str) -> tuple[str, ...]:
    """A note where a release is newer than all that were measured."""
    if not is_newer(release, MEASURED_RELEASE):
        return ()
    return (
        f"PyTorch {release} is newer than the newest release with measured models "
        f"({MEASURED_RELEASE}): it is predicted as that one",
    )


def _named(work: AtenKernel, spec: DeviceSpec) -> str:
    """An operator's name, of attention with the library that PyTorch calls."""
    library = attention_library(spec, work) if work.kind == ATTENTION else ""
    return f"{work.name} ({library})" if library else work.name


def _attention_notes(
    recording: Recording,
    spec: DeviceSpec,
    found: Sequence[AtenKernel],
    older: TorchPrediction | None,
) -> tuple[str, ...]:
    """Whose attention is called, and what other releases of PyTorch call."""
    if spec.platform == "cpu":
        return ()
    notes = []
    calls = [w for w in found if w.kind == ATTENTION]
    by_cudnn = [w for w in calls if attention_library(spec, w) == CUDNN]
    if older is not None:
        notes.append(
            f"{_PREFERRED}no fused kernel takes it (a mask rules FlashAttention out, grouped keys "
            "the memory-efficient one): keys and values are repeated, the softmax goes over "
            f"memory, and the program takes {older.latency_us / 1e3:.3g} ms, which the interval "
            "reaches to; repeating keys and values in the model (repeat_interleave) avoids that"
        )
    elif by_cudnn:
        plain = any(not w.masked for w in by_cudnn)
        factor = FLASH2.get(spec.architecture, 1.0)
        notes.append(
            _PREFERRED
            + "it is "
            + (
                "FlashAttention 2 (as with sdpa_kernel(SDPBackend.FLASH_ATTENTION)), about "
                f"{factor:g} times as long over many queries"
                if plain
                else "the memory-efficient kernel, which takes a mask and is slower"
            )
        )
    if any(not one for one in recording.attention.values()):
        notes.append(
            "attention is written out (SDPBackend.MATH), as no fused kernel of PyTorch takes it on "
            "this device: FlashAttention takes no mask, nor is_causal where there are other "
            "numbers of queries and keys; the memory-efficient one takes no grouped keys "
            "(enable_gqa); all need four dimensions and heads of a multiple of 8"
        )
    return tuple(notes)


def _mostly_f32(found: Sequence[AtenKernel]) -> bool:
    sizes = {"f32": 0.0, "narrow": 0.0}
    for w in found:
        sizes["f32" if w.dtype == "f32" else "narrow"] += w.bytes
    return sizes["f32"] > sizes["narrow"]


def _notes(
    framework: str,
    spec: DeviceSpec,
    found: Sequence[AtenKernel],
    times: np.ndarray,
    sources: Sequence[str],
    host_bound: bool,
) -> tuple[str, ...]:
    if spec.platform == "cpu":
        known = CpuTorchModel.find().devices
        return cpu_notes(spec, found, framework == "torch-compiled", known)
    kernels = (
        "the operators of ATen as eager PyTorch launches them, one kernel after the other, without "
        "CUDA graphs"
        if framework == "torch-eager"
        else "products and attention of PyTorch's libraries, with chains of element-wise operators "
        "fused as torch.compile does; gradients keep what the forward pass computed"
    )
    train = any(w.phase == "backward" for w in found)
    notes = [
        kernels
        + ("; the backward pass is autograd's own graph, the optimiser foreach's" if train else "")
        + "; for the same program under XLA leave --framework out"
    ]
    if host_bound:
        compiled = framework == "torch-compiled"
        faster = "CUDA graphs" if compiled else "torch.compile or CUDA graphs"
        notes.append(
            "the host's launches take longer than the kernels: a larger batch takes little longer, "
            f"and {faster} would be faster; the estimate is for libraries such as transformers; "
            "plain modules on a fast processor take down to a quarter of it"
        )
    guessed = times[[s == "roofline" for s in sources], 0].sum() / (times[:, 0].sum() or 1.0)
    if guessed > 0.25:
        notes.append(f"{guessed:.0%} of the kernels' time is of the roofline of {spec.name}")
    wide = any(w.dtype == "f32" and w.kind == PRODUCT for w in found)
    if wide and spec.matrix_peak("tf32") > 1.5 * spec.matrix_peak("f32"):
        notes.append(
            "matrix products of f32 run in full f32, PyTorch's default; "
            "torch.set_float32_matmul_precision('high') would take TF32, which is not predicted"
        )
    if any(f"aten.{w.name}" in SORTS for w in found):
        notes.append(
            "sort and topk are priced by the passes of a radix sort over their values, not by "
            "measured kernels"
        )
    return tuple(notes)
