"""Latencies of a served decoder's operators: kernels of its framework, or the roofline.

The model of library operators knows the kernels that vLLM, SGLang and TensorRT-LLM run; what it
does not know (formats, other vendors' devices) gets the roofline at the shares that the vendor's
tuned kernels reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import NamedTuple

from ...common.files import own_data
from ...features.cost.formats import FORMATS
from ...features.devices.device import DeviceSpec
from ...features.ir.program import DTYPE_BITS
from ...features.operators.op import ABSORBED, DISPATCHED, EXPANDED, Op
from ...models.operators import OpModel
from ...simulate.serving.policies import framework_defaults
from ..locate import load_operators
from .prices import REACH, Reach, Row, arithmetic_share, price, weight_only
from .step_operators import named

#: Families of the model that serving asks; the others need not be read.
FAMILIES = (
    "graph/linear",
    "graph/bmm",
    "graph/context_attention",
    "graph/generation_attention",
    "graph/context_mla",
    "graph/generation_mla",
    "graph/moe",
)
#: Distribution of tokens over experts of the tables that serving runs show (``ROUTING_SKEW``).
ROUTING = "power_law_1.2"
#: Kernels of a captured graph are replayed, so that the roofline's fixed cost of a kernel is what
#: one waits for the next, not a launch: as the tables' passes over memory, half of a graph-timed
#: product's 5200 cycles (docs/operators.md).
_REPLAYED = Reach(1.5e-6)
#: Grouped products over rows that are sorted by expert: two kernels and the activation between.
#: DeepGEMM's published ones on H800 (github.com/deepseek-ai/DeepGEMM, README of April 2025: 256 to
#: 8192 rows of 1 to 8 experts, 815 to 1297 TFLOP/s) are within 20 % of it.
_GROUPED = Reach(3 * 1.5e-6, matrix=0.6, memory=0.8)


#: The families of a model of operators that serving needs; ``None`` for ``roofline``.
load_serving_operators = partial(load_operators, only=FAMILIES)


#: A name, or names by architecture with that of all ``other`` ones.
_Named = str | dict[str, str]


class _Kernels(NamedTuple):
    """What ``serving_kernels.yaml`` holds: names of kernels by backend, and of formats."""

    stand_ins: list[str]
    linear: dict[str, dict[str, _Named]]
    moe: dict[str, dict[str, _Named]]
    bmm: dict[str, str]
    attention: dict[str, dict[str, str]]
    absorbed: dict[str, dict[str, str]]
    expanded: dict[str, dict[str, str]]
    formats: dict[str, _Named]
    stands_for: dict[str, str]


@cache
def _kernels() -> _Kernels:
    return _Kernels(**own_data("predict/operator/serving_kernels.yaml"))


class ServingLatency:
    """Prices operators of one framework on one device; answers are remembered.

    Args:
        spec: The device.
        model: Model of library operators; ``None`` for rooflines.
        framework: Such as ``vllm``.
    """

    def __init__(self, spec: DeviceSpec, model: OpModel | None, framework: str) -> None:
        self.spec = spec
        self.backend = framework_defaults(framework).kernels
        self.model = model if spec.runs_cuda else None
        self._known: dict[Op, float] = {}

    def prepare(self, ops: Sequence[Op]) -> None:
        """Ask for many operators at once."""
        new = [op for op in dict.fromkeys(ops) if op not in self._known]
        if not new:
            return
        rows = [self._row(op) if self.model else None for op in new]
        vendor = REACH.get(self.spec.vendor)
        reaches = [vendor.of(op) if vendor else _reach(op) for op in new]
        times = price(new, rows, reaches, self.spec, self.model).times[:, 0]
        self._known.update(zip(new, times.tolist(), strict=True))

    def __call__(self, op: Op) -> float:
        """Seconds of an operator."""
        if op not in self._known:
            self.prepare([op])
        return self._known[op]

    def arithmetic(self, op: Op) -> float:
        """Share of arithmetic in the roofline of an operator; the rest is moving its bytes."""
        return arithmetic_share(op, self.spec)

    def _of(self, names: _Named) -> str:
        """The name for the device's architecture; empty if none is for it."""
        if isinstance(names, str):
            return names
        return names.get(self.spec.architecture.removesuffix("-ultra"), names.get("other", ""))

    def _kernel(
        self, table: dict[str, dict[str, _Named]], dtype: str
    ) -> tuple[str, str, str] | None:
        """Backend, kernel and format in the tables that an operator is looked up as."""
        if dtype == "nvfp4" and weight_only(dtype, self.spec):
            # As Marlin's kernels widen weights of 4 bits of either kind.
            dtype = "int4"
        if _peakless(dtype, self.spec):
            # Without units of its format, a product runs on widened operands.
            return None
        own = _kernels()
        for name in (dtype, own.stands_for.get(dtype, dtype)):
            for backend in (self.backend, *own.stand_ins):
                if name in table[backend]:
                    kernel = self._of(table[backend][name])
                    return backend, kernel, self._of(own.formats.get(name, name))
        return None

    def _row(self, op: Op) -> Row | None:
        """Row for the model of operators; ``None`` for what it does not know."""
        sizes, known = op.sizes(), _kernels()
        dtype = "bf16" if op.dtype == "f16" else op.dtype
        if op.family == "linear":
            found = self._kernel(known.linear, dtype)
            return found and {**sizes, **named("graph/linear", *found), "b": 1}
        if op.variant == DISPATCHED:
            return None
        if op.family == "moe":
            found = self._kernel(known.moe, dtype)
            return found and {**sizes, **named("graph/moe", *found), "distribution": ROUTING}
        if op.family == "bmm":
            return {**sizes, **named("graph/bmm", self.backend, known.bmm[self.backend], "bf16")}
        return self._attention(op) if op.family == "attention" else None

    def _attention(self, op: Op) -> Row:
        tables = {ABSORBED: _kernels().absorbed, EXPANDED: _kernels().expanded}
        latent, table = op.variant in tables, tables.get(op.variant, _kernels().attention)
        sizes = op.sizes()
        for backend in (self.backend, *_kernels().stand_ins):
            if kernel := self._of(table.get(backend, {})):
                break
        phase = "generation" if sizes["q_len"] == 1 else "context"
        key = f"graph/{phase}_{'mla' if latent else 'attention'}"
        cache = "fp8" if op.cache in ("fp8", "int8") else "bf16"
        columns = named(key, backend, kernel, "bf16") | {
            "kv_dtype": cache,
            "window": op.window,
        }
        return sizes | columns


def _reach(op: Op) -> Reach:
    """What kernels of NVIDIA's GPUs reach that are not in the tables."""
    return _GROUPED if op.variant == DISPATCHED else _REPLAYED


def _peakless(dtype: str, spec: DeviceSpec) -> bool:
    """Whether a device has no units for a format that is multiplied as it is."""
    unit = FORMATS[dtype].rate
    return DTYPE_BITS[unit] < 16 and unit not in spec.peak_flops
