"""A served decoder with its number formats, by any of their names, and an engine's parallelism."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ...common.errors import PlanError
from ...common.files import own_data
from ...features.cost.formats import FORMATS
from ..step.presets import Recurrence
from ..step.workload import Workload, layer_kinds
from .policies import framework_defaults
from .token_exchange import slots_of

#: Weight formats.
WEIGHTS = (
    *("f32", "bf16", "f16", "fp8", "fp8_block", "int8", "fp8_wo", "int8_wo", "int4", "mxfp4"),
    *("mxfp4_a4", "nvfp4"),
)
#: Side of the square blocks of weights that share a scale (DeepSeek-V3, 2024, section 3.3.2).
BLOCKS = {"fp8_block": 128}
#: Formats of the KV cache.
CACHES = ("bf16", "f16", "fp8", "int8")
#: Bytes per token and layer that the indexer of sparse attention caches in addition to the latent:
#: a key of 128 in fp8 with a 32-bit scale (``index_head_dim`` of DeepSeek-V3.2, 2025).
INDEX_BYTES = 132.0
#: Largest expert parallelism that gathers tokens on all ranks; wider engines exchange them
#: (TensorRT-LLM's blog, Scaling Expert Parallelism, 2025: reduce-scatter up to 8, else all-to-all).
NARROW = 8
#: Bytes per element of a recurrent state (``mamba_ssm_dtype`` of published configurations).
STATE_BYTES = 4.0
#: Name patterns of formats.
_NAMES = own_data("simulate/serving/names.yaml")


@dataclass(frozen=True)
class ServedModel:
    """A decoder model as it is served.

    Attributes:
        workload: Model sizes; ``batch``, ``seq``, ``mode`` and ``products`` are ignored.
        weights: Weight format outside experts, one of :data:`WEIGHTS`.
        expert_weights: Weight format of experts, except shared ones.
        cache: Format of the KV cache, one of :data:`CACHES`.
        linear_layers: Number of layers with a recurrent state instead of a KV cache (gated delta
            nets, Mamba-2).
        attention_weights: Weight format of attention if it differs; empty for ``weights``.
        recurrence: Sizes of the recurrent layers; ``None`` for heads like those of attention.
        bare_layers: Number of attention or recurrent layers without a feed-forward.
        mtp: Whether the model has multi-token-prediction modules; ``None`` if unknown.
        left_out: Note on the parts of the model that are not modelled.
        block: Side of the scaling blocks of fp8 weights that are priced as plain ``fp8``; 0 for
            none.
    """

    workload: Workload
    weights: str = "bf16"
    expert_weights: str = "bf16"
    cache: str = "bf16"
    linear_layers: int = 0
    attention_weights: str = ""
    recurrence: Recurrence | None = None
    bare_layers: int = 0
    mtp: bool | None = None
    left_out: str = ""
    block: int = 0

    def __post_init__(self) -> None:
        """Check formats and layer counts.

        Raises:
            PlanError: A format is unknown, or a layer count is out of range.
        """
        for name in (self.weights, self.expert_weights, self.attention_weights or self.weights):
            if name not in WEIGHTS:
                raise PlanError(
                    f"weights in {name!r} are not known",
                    hint=f"{', '.join(WEIGHTS)}; --weights int4 takes other weights of 4 bits for "
                    "those, --weights int8 --activations bf16 those of 8",
                )
        if self.cache not in CACHES:
            raise PlanError(f"a cache in {self.cache!r} is not known", hint=", ".join(CACHES))
        if not 0 <= self.linear_layers < self.workload.layers:
            raise PlanError(
                f"linear_layers={self.linear_layers} of {self.workload.layers} layers",
                hint="at least one layer has attention",
            )
        if not 0 <= self.bare_layers < self.workload.layers:
            raise PlanError(
                f"bare_layers={self.bare_layers} of {self.workload.layers} layers",
                hint="at least one layer has a feed-forward",
            )

    @property
    def attention_format(self) -> str:
        """Weight format of the products of attention."""
        return self.attention_weights or self.weights

    def formats(self) -> dict[str, str]:
        """Formats by component; ``experts`` and ``attention`` only if they differ."""
        found = {"weights": self.weights}
        if self.workload.experts and self.expert_weights != self.weights:
            found["experts"] = self.expert_weights
        if self.attention_format != self.weights:
            found["attention"] = self.attention_format
        return {**found, "cache": self.cache}

    def cut_blocks(self, plan: EnginePlan) -> str:
        """The products that a plan splits within a scaling block, as text; empty for none."""
        w = self.workload
        dense = w.d_ff if not w.experts else w.dense_ff if w.dense_layers else 0
        for name, own, width, ranks in (
            ("experts", self.expert_weights, w.d_ff if w.experts else 0, plan.moe_tp),
            ("shared experts", self.weights, w.shared_experts * w.d_ff, plan.tp),
            ("feed-forwards", self.weights, dense, plan.tp),
        ):
            block = BLOCKS.get(own, self.block if own == "fp8" else 0)
            if block and ranks > 1 and width % (block * ranks):
                return (
                    f"{name} of {width} columns over {ranks} ranks are {width / ranks:g} each, no "
                    f"whole blocks of {block}, which {own} weights have one scale for"
                )
        return ""

    @property
    def recurrent(self) -> Recurrence:
        """Sizes of a recurrent layer."""
        if self.recurrence is not None:
            return self.recurrence
        w = self.workload
        # Queries, keys, values and gates of the attention heads; one state matrix per head.
        return Recurrence(w.head * 2 * (w.heads + w.groups), w.heads * w.head, w.heads * w.head**2)

    @property
    def fed(self) -> float:
        """Fraction of the layers that have a feed-forward."""
        return 1.0 - self.bare_layers / self.workload.layers

    def shape(self) -> str:
        """Key of the model's sizes, independent of formats."""
        w = self.workload
        sizes = (w.layers, w.d_model, w.heads, w.groups, w.d_ff, w.experts, w.top_k, w.kv_lora)
        return "x".join(map(str, sizes))

    def weight_bytes(self, plan: EnginePlan) -> float:
        """Bytes of weights on one device of an average pipeline stage."""
        return sum(self.weight_parts(plan).values())

    def weight_parts(self, plan: EnginePlan) -> dict[str, float]:
        """:meth:`weight_bytes` by part of the model; absent parts are omitted."""
        w = self.workload
        parts = dict.fromkeys(("embedding and head", "attention", "feed-forward", "experts"), 0.0)
        # Embedding and head stay in 16 bits, and are split over all tensor-parallel ranks.
        tables = w.table_parameters * (1 if w.tied else 2) / plan.tp
        parts["embedding and head"] = 16.0 * tables / 8.0
        own, linear = self.recurrence, self.linear_layers / w.layers
        for layer, count in kinds_of(w).items():
            # A pipeline stage holds its share of the layers.
            share = count / plan.pp / 8.0
            attention = float(layer.attention_parameters)
            if own is not None:
                recurrent = w.d_model * (own.inner + own.outer)
                attention += linear * (recurrent - attention)
            bits = FORMATS[self.attention_format].weight_bits
            parts["attention"] += share * attention / plan.tp * bits
            share *= self.fed
            one = float(layer.expert_parameters)
            if layer.experts:
                held = plan.experts_held(layer.experts)
                bits = FORMATS[self.expert_weights].weight_bits
                parts["experts"] += share * one * held / plan.moe_tp * bits
                one *= layer.shared_experts
            parts["feed-forward"] += share * one / plan.tp * FORMATS[self.weights].weight_bits
        return {name: value for name, value in parts.items() if value}

    def token_bytes(self, plan: EnginePlan) -> float:
        """Bytes per token in the KV cache of one device."""
        w, width = self.workload, FORMATS[self.cache].element_bytes
        layers = (w.layers - self.linear_layers) / plan.pp
        if w.kv_lora:
            # Latent, which serves as keys and values, and the rotary part (DeepSeek-V2, section
            # 2.1.3); every rank holds them for all heads.
            index = INDEX_BYTES if w.window else 0.0
            return layers * ((w.kv_lora + w.rope_dim) * width + index)
        # A rank holds at least one key-value head.
        return 2.0 * layers * max(1.0, w.groups / plan.tp) * w.head * width

    def state_bytes(self, plan: EnginePlan) -> float:
        """Bytes of the recurrent states of one sequence on one device."""
        return STATE_BYTES * self.linear_layers * self.recurrent.state / plan.tp / plan.pp

    def cache_layers(self) -> tuple[float, float, int]:
        """Number of layers that cache all tokens, number with a window, and the window in tokens.

        Sparse attention over a latent caches all tokens: its indexer selects a window from them.
        """
        share = 1.0 - self.linear_layers / self.workload.layers
        full = windowed = 0.0
        for layer, count in kinds_of(self.workload).items():
            if layer.window and not layer.kv_lora:
                windowed += count * share
            else:
                full += count * share
        return full, windowed, self.workload.window if windowed else 0


@dataclass(frozen=True)
class EnginePlan:
    """Parallelism of one engine.

    Attributes:
        tp: Tensor-parallel ranks of attention and dense feed-forwards.
        pp: Pipeline stages.
        dp: Data-parallel attention groups of ``tp`` ranks with separate sequences; experts are
            distributed over all of them.
        ep: Expert-parallel ranks.
        moe_tp: Tensor-parallel ranks of an expert.
        redundant: Copies of busy experts placed by a load balancer in a wide engine; ``None`` for
            the default, 0 for no balancer.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    moe_tp: int = 1
    redundant: int | None = None

    def __post_init__(self) -> None:
        """Check that the numbers are consistent.

        Raises:
            PlanError: A number is below 1, attention and experts use different ranks, or expert
                copies are requested for an engine that is not wide.
        """
        if self.redundant is not None and (self.redundant < 0 or not self.wide):
            raise PlanError(
                f"redundant={self.redundant} with dp={self.dp} and ep={self.ep}",
                hint=f"at least 0, of engines with dp and ep of more than {NARROW}",
            )
        if min(self.tp, self.pp, self.dp, self.ep, self.moe_tp) < 1:
            raise PlanError(f"{self}", hint="all of them are at least 1")
        if self.ep * self.moe_tp != self.tp * self.dp:
            raise PlanError(
                f"experts over ep={self.ep} x moe_tp={self.moe_tp} ranks, attention over "
                f"tp={self.tp} x dp={self.dp}",
                hint="both are the ranks of one pipeline stage",
            )

    @property
    def wide(self) -> bool:
        """Whether tokens are sent only to the ranks of their experts, instead of all ranks."""
        return self.dp > 1 and self.ep > NARROW

    def experts_held(self, experts: int) -> float:
        """Experts of a layer on one rank (whole or split), including copies."""
        return slots_of(experts, self.ep, self.redundant) if self.wide else experts / self.ep

    def copies(self, experts: int) -> int:
        """Copies of a layer's experts on all ranks."""
        return round(self.experts_held(experts) * self.ep - experts) if self.wide else 0

    @property
    def ranks(self) -> int:
        """Devices of a pipeline stage."""
        return self.tp * self.dp

    @property
    def devices(self) -> int:
        """Devices of the engine."""
        return self.ranks * self.pp

    def of(self, model: ServedModel) -> EnginePlan:
        """The plan under which the engine runs another model, such as a draft model."""
        if model.workload.experts:
            return self
        return replace(self, ep=1, moe_tp=self.ranks)

    def text(self) -> str:
        """Text form such as ``tp=8,ep=8``; sizes of 1 are omitted."""
        parts = {"tp": self.tp, "pp": self.pp, "dp": self.dp, "ep": self.ep}
        told = [f"{k}={v}" for k, v in parts.items() if v > 1]
        told += [] if self.redundant is None else [f"redundant={self.redundant}"]
        return ",".join(told) or "tp=1"


@lru_cache(maxsize=1024)
def kinds_of(workload: Workload) -> dict[Workload, int]:
    """Number of layers of each kind, in order of first occurrence."""
    return dict(Counter(layer_kinds(workload)))


class Formats(NamedTuple):
    """Number formats given by the user; empty for those of the published checkpoint.

    Attributes:
        weights: Weight format, such as ``fp8``.
        cache: Format of the KV cache.
        experts: Format of the experts only.
        activations: ``bf16`` for weight-only quantisation.
        linear_layers: Layers with a recurrent state; 0 for the model's own number.
        framework: Lower-case name of the framework, which may choose the cache format.
    """

    weights: str = ""
    cache: str = ""
    experts: str = ""
    activations: str = ""
    linear_layers: int = 0
    framework: str = ""


def format_in(name: str) -> str:
    """Weight format in a checkpoint's name, or else the one in which its model is published.

    Empty for 16 bits. Examples: ``openai/gpt-oss-120b``: ``mxfp4``; ``Qwen/Qwen3-32B-FP8``:
    ``fp8``.
    """
    text = name.lower().replace("_", "-").rsplit("/", 1)[-1]
    rules = (*_NAMES["weights"].items(), *_NAMES["published"].items())
    return next((own for pattern, own in rules if re.search(pattern, text)), "")


def in_formats(workload: Workload, formats: Formats) -> ServedModel:
    """Apply formats to a model, as published checkpoints with these formats do.

    Args:
        workload: Model sizes.
        formats: Number formats.

    Raises:
        PlanError: A format is unknown, or applies to a part that the model lacks.
    """
    cache, experts, activations = formats.cache, formats.experts, formats.activations
    weights = _weights_of(formats.weights) or "bf16"
    if experts and not workload.experts:
        raise PlanError(f"experts in {experts!r}: the model has none", where="experts")
    if activations not in ("", "bf16", "f16", weights):
        raise PlanError(
            f"activations in {activations!r} under weights in {weights!r}",
            hint="bf16 for quantised weights alone; empty for those of the format",
        )
    if activations in ("bf16", "f16") and weights in ("fp8", "int8"):
        weights += "_wo"
    elif activations in ("bf16", "f16") and weights in ("fp8_block", "nvfp4"):
        raise PlanError(f"products of {weights} take activations in it", hint="fp8, int8 or int4")
    other, attention, every = weights, "", weights
    if workload.experts and weights in ("mxfp4", "int4"):
        # Published MoE checkpoints in these formats quantise only their experts (gpt-oss, Kimi).
        other = "bf16"
    elif weights == "mxfp4" and not activations:
        # Those of models without experts quantise activations, too (AMD Quark).
        other = every = "mxfp4_a4"
    if weights == "fp8" and workload.kv_lora:
        # DeepSeek's checkpoints have one scale per block of 128 x 128.
        other = every = "fp8_block"
    if weights == "nvfp4" and workload.kv_lora:
        # NVIDIA's checkpoints of DeepSeek models leave attention in 16 bits.
        attention = "bf16"
    kept = "" if cache.lower() == "auto" else cache.lower().replace("-", "_")
    if not kept and weights in framework_defaults(formats.framework).cache_follows:
        kept = "fp8"
    kept = _NAMES["caches"].get(kept, kept)
    own = _weights_of(experts) or every
    return ServedModel(workload, other, own, kept, formats.linear_layers, attention)


def _weights_of(text: str) -> str:
    """The member of :data:`WEIGHTS` for a format name, or the name itself if there is none."""
    name = text.lower()
    if name in WEIGHTS:
        return name
    return next(
        (own for pattern, own in _NAMES["weights"].items() if re.search(pattern, name)), name
    )
