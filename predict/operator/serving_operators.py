"""Latencies of a served decoder's operators: kernels of its framework, or the roofline.

The operator model covers the kernels of vLLM, SGLang and TensorRT-LLM; other formats and vendors
get the roofline at the fractions that the vendor's tuned kernels reach.
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
from ...simulate.serving.forward import ROUTING_SKEW
from ...simulate.serving.policies import framework_defaults
from ..locate import load_operators
from .prices import REACH, Reach, Row, arithmetic_share, price, weight_only
from .step_operators import named

#: Families of the model that serving uses; the others need not be loaded.
FAMILIES = (
    "graph/linear",
    "graph/bmm",
    "graph/context_attention",
    "graph/generation_attention",
    "graph/context_mla",
    "graph/generation_mla",
    "graph/moe",
)
#: Distribution of tokens over experts in the tables, as in serving runs.
ROUTING = f"power_law_{ROUTING_SKEW}"
#: Captured graphs are replayed, so the roofline's fixed cost of a kernel is its wait for the next
#: one, not a launch: as for the tables' memory passes, half of a graph-timed product's 5200 cycles
#: (docs/operators.md).
_REPLAYED = Reach(1.5e-6)
#: Grouped products over rows sorted by expert: two kernels and the activation between them.
#: DeepGEMM's published times on H800 (github.com/deepseek-ai/DeepGEMM, README of April 2025: 256 to
#: 8192 rows of 1 to 8 experts, 815 to 1297 TFLOP/s) are within 20 % of it.
_GROUPED = Reach(3 * 1.5e-6, matrix=0.6, memory=0.8)


#: The families of a model of operators that serving needs; ``None`` for ``roofline``.
load_serving_operators = partial(load_operators, only=FAMILIES)


#: A name, or names by architecture with ``other`` for all others.
_Named = str | dict[str, str]


class _Kernels(NamedTuple):
    """Contents of ``serving_kernels.yaml``: names of kernels by backend, and of formats."""

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
    """Prices operators of one framework on one device, and caches the results.

    Args:
        spec: The device.
        model: Operator model; ``None`` for rooflines.
        framework: Serving framework, such as ``vllm``.
    """

    def __init__(self, spec: DeviceSpec, model: OpModel | None, framework: str) -> None:
        self.spec = spec
        self.backend = framework_defaults(framework).kernels
        self.model = model if spec.runs_cuda else None
        self._known: dict[Op, float] = {}

    def prepare(self, ops: Sequence[Op]) -> None:
        """Price many operators in one batch."""
        new = [op for op in dict.fromkeys(ops) if op not in self._known]
        if not new:
            return
        rows = [self._row(op) if self.model else None for op in new]
        vendor = REACH.get(self.spec.vendor)
        reaches = [vendor.of(op) if vendor else _reach(op) for op in new]
        times = price(new, rows, reaches, self.spec, self.model).times[:, 0]
        self._known.update(zip(new, times.tolist(), strict=True))

    def __call__(self, op: Op) -> float:
        """Return the seconds of an operator."""
        if op not in self._known:
            self.prepare([op])
        return self._known[op]

    def arithmetic(self, op: Op) -> float:
        """Return the share of arithmetic in an operator's roofline; the rest is its traffic."""
        return arithmetic_share(op, self.spec)

    def _of(self, names: _Named) -> str:
        """Return the name for the device's architecture; empty if there is none."""
        if isinstance(names, str):
            return names
        return names.get(self.spec.line, names.get("other", ""))

    def _kernel(
        self, table: dict[str, dict[str, _Named]], dtype: str
    ) -> tuple[str, str, str] | None:
        """Return backend, kernel and format that an operator is looked up under in the tables."""
        if weight_only(dtype, self.spec):
            # Marlin's kernels widen 4-bit weights of every kind.
            dtype = "int4"
        if _peakless(dtype, self.spec):
            # Without units for its format, a product runs on widened operands.
            return None
        own = _kernels()
        for name in (dtype, own.stands_for.get(dtype, dtype)):
            for backend in (self.backend, *own.stand_ins):
                if kernel := self._of(table[backend].get(name, "")):
                    return backend, kernel, self._of(own.formats.get(name, name))
        return None

    def _row(self, op: Op) -> Row | None:
        """Return the row of an operator for the model; ``None`` if the model does not cover it."""
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
    """Return what NVIDIA kernels reach that are not in the tables."""
    return _GROUPED if op.variant == DISPATCHED else _REPLAYED


def _peakless(dtype: str, spec: DeviceSpec) -> bool:
    """Return whether a device has no units for a narrow format that is multiplied as it is."""
    unit = FORMATS[dtype].rate
    return DTYPE_BITS[unit] < 16 and unit not in spec.peak_flops
