"""Tables of measured serving: a row's columns in, the model, engine and load that it means out.

A row says what was served, by which engine on what, under which load; where its source measured
them, latencies and throughput. The columns are those of published tables (docs/serving.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from pathlib import Path

import pandas as pd

from ...common.errors import DatasetError, OpcastError, PlanError
from ...features.devices.catalogue import find_device
from ...features.devices.device import DeviceSpec
from ...simulate.clusters.catalogue import joined
from ...simulate.clusters.topology import Cluster
from ...simulate.serving.served import EnginePlan, ServedModel
from ...simulate.step.workload import Workload
from .step_table import FAULTS, Cells, reason_of

#: Columns that a row cannot do without.
NEEDED = ("device", "framework", "load")
#: Kinds of load.
LOADS = ("closed", "open", "open-poisson", "offline", "static-batch", "trace", "single-stream")
#: What may be measured, with its unit as the suffix says.
ANSWERS = ("ttft_ms", "tpot_ms", "itl_ms", "out_tok_s")
#: Formats of weights by the names that sources use.
_WEIGHTS = {
    "fp16/bf16": "bf16",
    "fp16": "f16",
    "fp8-block": "fp8_block",
    "fp8_block": "fp8_block",
    "int8": "int8",
    "w8a8": "int8",
    "int4": "int4",
    "awq": "int4",
    "gptq": "int4",
    "fp4": "nvfp4",
}
#: Sizes of models whose tables lack them, from their ``config.json`` files. DeciLM's key-value
#: heads differ by layer: 2 on average.
_SIZES: dict[str, dict[str, int | bool | str]] = {
    "decilm-7b": {"layers": 32, "d_model": 4096, "heads": 32, "kv_heads": 2, "d_ff": 14336},
    "aquila-7b": {"layers": 32, "d_model": 4096, "heads": 32, "d_ff": 11008, "vocab": 100008},
    "bloom-7b1": {
        "layers": 30,
        "d_model": 4096,
        "heads": 32,
        "d_ff": 16384,
        "vocab": 250880,
        "gated": False,
        "tied": True,
    },
    "opt-6.7b": {
        "layers": 32,
        "d_model": 4096,
        "heads": 32,
        "d_ff": 16384,
        "vocab": 50272,
        "gated": False,
        "tied": True,
    },
    "qwen2.5-vl-72b": {
        "layers": 80,
        "d_model": 8192,
        "heads": 64,
        "kv_heads": 8,
        "d_ff": 29568,
        "vocab": 152064,
    },
}


@dataclass(frozen=True)
class ServingLoad:
    """Requests of a row.

    Attributes:
        kind: One of :data:`LOADS`.
        prompt: Mean tokens of a prompt.
        output: Mean tokens that a request generates.
        spread: Lowest length over the highest: lengths are uniform between; 1 for fixed ones.
        concurrency: Requests in flight of a closed loop, or of a static batch; 0 if open.
        rate: Requests a second of an open load; 0 for all at once.
        count: Requests; 0 if the row does not say.
        trace: File with arrivals and lengths; empty for none.
    """

    kind: str
    prompt: float
    output: float
    spread: float = 1.0
    concurrency: int = 0
    rate: float = 0.0
    count: int = 0
    trace: str = ""


@dataclass(frozen=True)
class Workers:
    """Workers of one kind.

    Attributes:
        plan: Of each.
        count: How many; replicas of an engine that prefills and decodes.
        batch: Most sequences of each; 0 if the row does not say.
    """

    plan: EnginePlan
    count: int = 1
    batch: int = 0

    @property
    def devices(self) -> int:
        """Devices of all of them."""
        return self.plan.devices * self.count


@dataclass(frozen=True)
class ServingRow:
    """A row, as the simulator takes it.

    Attributes:
        id: Of the row.
        source: Who measured it, without a revision.
        framework: Lower case, such as ``vllm``.
        version: Of the framework; empty if the row does not say.
        group: Models of equal shape.
        model: What is served.
        cluster: Devices and links of the largest worker.
        engine: Workers that decode, and prefill as well unless ``prefill`` does.
        prefill: Workers that only prefill; ``None`` where engines do both.
        load: Requests.
        max_batch: Most sequences of an engine; 0 for the framework's own limit.
        token_budget: Most tokens of a pass; 0 for the framework's own.
        chunked: Whether prompts may be cut; ``None`` for what the framework does by itself.
        speculative: What the row says of speculative decoding: ``no``, ``ambiguous``, or ``yes``.
        accepted: Tokens that a step of speculative decoding yields; 1 without.
        measured: Answers that the row gives, by names of :data:`ANSWERS`.
    """

    id: str
    source: str
    framework: str
    version: str
    group: str
    model: ServedModel
    cluster: Cluster
    engine: Workers
    prefill: Workers | None
    load: ServingLoad
    max_batch: int
    token_budget: int
    chunked: bool | None
    speculative: str
    accepted: float
    measured: dict[str, float]

    @property
    def devices(self) -> int:
        """Devices of all workers."""
        return self.engine.devices + (self.prefill.devices if self.prefill else 0)


def read_serving(path: str | Path) -> pd.DataFrame:
    """A table of measured serving from CSV or parquet.

    Raises:
        DatasetError: The file cannot be read, or lacks columns.
    """
    file = Path(path)
    try:
        if file.suffix == ".parquet":
            table = pd.read_parquet(file)
        else:
            table = pd.read_csv(file, low_memory=False)
    except (OSError, ValueError) as error:
        raise DatasetError(f"the table cannot be read: {error}", where=str(file)) from None
    missing = [name for name in NEEDED if name not in table]
    if missing:
        raise DatasetError(
            f"no columns {', '.join(missing)}",
            where=str(file),
            hint="docs/serving.md lists the columns of a table of serving",
        )
    if "id" not in table:
        table.insert(0, "id", [f"row{number}" for number in range(len(table))])
    return table


def read_serving_rows(
    table: pd.DataFrame, folder: Path = Path()
) -> tuple[list[ServingRow | None], list[str]]:
    """Rows of a table, and for each that cannot be expressed why; empty for the others.

    Args:
        table: From :func:`read_serving`.
        folder: That its traces are in.
    """
    rows: list[ServingRow | None] = []
    reasons = []
    for record in table.to_dict("records"):
        try:
            rows.append(serving_row({str(k): v for k, v in record.items()}, folder))
            reasons.append("")
        except (OpcastError, *FAULTS) as error:
            rows.append(None)
            reasons.append(reason_of(error))
    return rows, reasons


def serving_row(row: Mapping[str, object], folder: Path = Path()) -> ServingRow:
    """A row of a table of serving.

    Args:
        row: Cells by column.
        folder: That its trace is in.

    Raises:
        OpcastError: The row says something that cannot be expressed; the message says what.
    """
    cell = Cells(row)
    spec = find_device(cell.text("device"))
    model = _model(cell, spec)
    engine, prefill = _workers(cell, model)
    largest = max(w.plan.devices for w in (engine, prefill) if w)
    measured = {name: cell.number(name) for name in ANSWERS}
    says = cell.text("spec_decode").lower()
    chunked = cell.text("chunked_prefill").lower()
    return ServingRow(
        id=cell.text("id"),
        source=cell.text("source").split("@")[0],
        framework=framework_of(cell.text("framework")),
        version=cell.text("framework_version"),
        group=cell.text("model_group") or cell.text("model"),
        model=model,
        cluster=joined(spec.name, largest),
        engine=engine,
        prefill=prefill,
        load=_load(cell, folder),
        max_batch=cell.count("max_num_seqs", 0),
        token_budget=cell.count("max_num_batched_tokens", 0) or _budget(cell),
        chunked=chunked.startswith("yes") if chunked.startswith(("yes", "no")) else None,
        speculative=_speculative(says),
        accepted=_accepted(cell, _speculative(says)),
        measured={name: value for name, value in measured.items() if value == value and value > 0},
    )


#: Tokens of a pass under Dynamo: its workers are not vLLM's own server, for which vLLM's default is
#: 2048, and the times to the first token of both vLLM and TensorRT-LLM under it agree with that.
_DYNAMO_BUDGET = 2048


def _budget(cell: Cells) -> int:
    """Token budget that the way of measuring implies; 0 for the framework's own."""
    dynamo = cell.text("method").lower().startswith("dynamo")
    return _DYNAMO_BUDGET if dynamo and framework_of(cell.text("framework")) != "sglang" else 0


def framework_of(text: str) -> str:
    """A framework's name in lower case, with the engines of one project as one."""
    name = text.lower().split(" (")[0].strip()
    for known in ("tensorrt-llm", "sglang", "vllm", "lmdeploy", "deepspeed-mii"):
        if known in name.replace("trtllm", "tensorrt-llm").replace("trt-llm", "tensorrt-llm"):
            return known
    return name


def _speculative(text: str) -> str:
    if text.startswith(("ambiguous", "unstated")):
        return text.split()[0]
    return "no" if not text or text.startswith("no") else "yes"


#: Tokens of a step where drafts are made and nothing says how many are accepted: one of
#: DeepSeek-V3's extra predictions, of which 85 to 90 % are (DeepSeek-V3, 2024, section 5.4.3).
_ACCEPTED = 1.85


def _accepted(cell: Cells, speculative: str) -> float:
    """Tokens that a step of decoding yields."""
    length = cell.number("spec_accept_len", _ACCEPTED if speculative == "yes" else 1.0)
    if length < 1.0:
        raise PlanError(f"spec_accept_len={length:g} is below 1", hint="tokens of a step")
    return length


def _model(cell: Cells, spec: DeviceSpec) -> ServedModel:
    known = _SIZES.get(cell.text("model").lower(), {})

    def size(name: str, default: int = 0) -> int:
        return cell.count(name, int(known.get(name, default)))

    if not size("layers") or not size("d_model"):
        raise PlanError(
            f"the sizes of {cell.text('model') or 'the model'} are not known",
            hint="give layers, d_model, heads, d_ff and vocab",
        )
    experts = size("experts")
    note = cell.text("attention_note")
    width = size("moe_d_ff") if experts else size("d_ff")
    arch = cell.text("arch").lower()
    gated = bool(known.get("gated", arch != "gpt"))
    dense = _dense_layers(cell, note, size("layers")) if experts else 0
    latent = _latent(note) if cell.flag("mla", False) or "kv_lora" in note else {}
    windows = _window(note, size("layers"))
    head = latent.pop("head_dim", 0) or size("head_dim")
    workload = Workload(
        layers=size("layers"),
        d_model=size("d_model"),
        heads=size("heads", 1),
        kv_heads=0 if latent else size("kv_heads"),
        head_dim=head,
        d_ff=width or size("d_ff"),
        vocab=size("vocab", 32000),
        seq=1,
        batch=1,
        dtype="bf16",
        experts=experts,
        top_k=size("top_k") if experts else 0,
        shared_experts=size("shared_experts") if experts else 0,
        dense_layers=dense,
        dense_ff=size("d_ff") if dense else 0,
        gated=gated,
        norm="layernorm" if arch == "gpt" else "rmsnorm",
        tied=bool(known.get("tied", False)),
        mode="forward",
        **latent,  # type: ignore[arg-type]
        **windows,  # type: ignore[arg-type]
    )
    return _formats(cell, workload, _linear_layers(note, arch, workload.layers), spec)


def _formats(cell: Cells, workload: Workload, linear: int, spec: DeviceSpec) -> ServedModel:
    text = cell.text("weight_dtype").lower() or "bf16"
    weights = next((v for k, v in _WEIGHTS.items() if text == k), text)
    plain = "bf16"
    other, attention, experts = weights, "", weights
    if workload.experts and weights in ("mxfp4", "int4"):
        # Published MoE checkpoints in these formats quantise their experts only (gpt-oss, Kimi).
        other = plain
    if weights == "fp8" and workload.kv_lora:
        # DeepSeek's checkpoints have scales for blocks of 128 x 128.
        other = experts = "fp8_block"
    if weights == "nvfp4" and workload.kv_lora:
        # NVIDIA's checkpoints of DeepSeek's models leave attention in 16 bits.
        attention = plain
    cache = cell.text("kv_dtype").lower()
    if not cache and weights in ("fp8", "nvfp4", "mxfp4") and _quantises_cache(cell):
        cache = "fp8"
    cache = "fp8" if cache.startswith("fp8") else "int8" if cache.startswith("int8") else plain
    return ServedModel(workload, other, experts, cache, linear, attention)


def _quantises_cache(cell: Cells) -> bool:
    """Whether a framework takes an fp8 cache by itself under quantised weights.

    TensorRT-LLM follows the checkpoint, and those of NVIDIA's quantiser say fp8.
    """
    return framework_of(cell.text("framework")) == "tensorrt-llm"


def _latent(note: str) -> dict[str, int]:
    """Widths of latent attention, DeepSeek-V3's where the note does not say."""

    def of(name: str, default: int) -> int:
        found = re.search(rf"{name} (\d+)", note)
        return int(found[1]) if found else default

    return {
        "kv_lora": of("kv_lora", 512),
        "q_lora": of("q_lora", 0 if "kv_lora" in note else 1536),
        "rope_dim": of("rope", 64),
        "head_dim": of("nope", 128),
        "v_dim": of(r"\bv", 128),
    }


def _window(note: str, layers: int) -> dict[str, object]:
    """Window of sliding or chunked attention, and the share of layers that have it."""
    found = re.search(r"(?:sliding window|chunked attention|window) (?:of )?(\d+)", note)
    if not found:
        return {}
    share = _share(note.split(found[0])[0] or note, layers)
    return {"window": int(found[1]), "window_share": share}


def _share(note: str, layers: int) -> float:
    """Share of layers that words before a feature name; 1 for all."""
    some = re.findall(r"(\d+) (?:of|in|:) ?(\d+) ?(?:layers)?", note)
    if some:
        part, whole = map(int, some[-1])
        return min(1.0, part / max(whole, 1))
    every = re.search(r"every (\d+)(?:nd|rd|th)", note)
    if every:
        return 1.0 / int(every[1])
    return 0.5 if "every second" in note else 1.0


def _dense_layers(cell: Cells, note: str, layers: int) -> int:
    """Layers without experts; where they stand in the model does not matter to its time."""
    every = re.search(r"MoE every (\d+)(?:nd|rd|th) layer", note)
    if every:
        return layers - layers // int(every[1])
    return cell.count("dense_layers", 0)


#: Words for layers with a recurrent state instead of attention over a cache.
_RECURRENT = r"gated delta|gdn|deltanet|mamba|linear|lightning|kda|recurrent|ssm"


def _linear_layers(note: str, arch: str, layers: int) -> int:
    found = re.search(rf"(\d+) of (\d+) (?:layers )?[^,;]*?(?:{_RECURRENT})", note, re.IGNORECASE)
    if found:
        share = int(found[1]) / int(found[2])
    elif re.search(_RECURRENT, note, re.IGNORECASE) or arch == "hybrid":
        # Three of four layers, as published hybrids have (Qwen3-Next, Kimi Linear).
        full = re.search(r"every (\d+)th layer (?:is )?(?:full|softmax)", note)
        share = 1.0 - 1.0 / int(full[1]) if full else 0.75
    else:
        return 0
    return min(layers - 1, round(layers * share))


def _plan(cell: Cells, model: ServedModel, prefix: str = "") -> EnginePlan | None:
    """Plan of the workers whose columns have a prefix; ``None`` if the row says nothing of it."""
    if not cell.text(f"{prefix}tp"):
        return None
    tp, pp = cell.count(f"{prefix}tp", 1), max(1, cell.count(f"{prefix}pp", 1))
    dp, ep = max(1, cell.count(f"{prefix}dp", 1)), cell.count(f"{prefix}ep", 0)
    moe_tp = cell.count(f"{prefix}moe_tp", 0)
    if not model.workload.experts:
        return EnginePlan(tp=tp, pp=pp, dp=dp, moe_tp=tp * dp)
    if moe_tp * ep > tp * dp:
        # Some tables count the tensor-parallel ranks of attention alone.
        dp = max(1, moe_tp * ep // tp)
    if not moe_tp and not ep and dp == 1 and "enable_attention_dp true" in cell.text("note"):
        # TensorRT-LLM's published tables give the ranks as tp.
        tp, dp = 1, tp
    ranks = tp * dp
    ep = gcd(ep or (dp if dp > 1 else 1), ranks)
    if dp > 1:
        # Attention data parallelism spreads experts over all ranks.
        ep = max(ep, gcd(ranks, model.workload.experts))
    return EnginePlan(tp=tp, pp=pp, dp=dp, ep=ep, moe_tp=ranks // ep)


def _workers(cell: Cells, model: ServedModel) -> tuple[Workers, Workers | None]:
    prefill = _plan(cell, model, "prefill_")
    decode = _plan(cell, model, "decode_")
    if prefill and decode:
        return (
            _pool(decode, cell, "decode_"),
            _pool(prefill, cell, "prefill_"),
        )
    plan = _plan(cell, model)
    devices = cell.count("n_gpus", 0)
    if plan is None:
        if not devices:
            raise PlanError("neither tp nor n_gpus say how the model is spread", hint="give tp")
        # Tensor parallelism over all devices of a box is what engines do by default.
        plan = _filled(cell, model, devices)
    plain = not model.workload.experts
    if plain and plan.dp > 1:
        # Data parallelism without experts is so many engines.
        one = EnginePlan(tp=plan.tp, pp=plan.pp, moe_tp=plan.tp)
        return Workers(one, plan.dp), None
    replicas = devices // plan.devices if devices > plan.devices else 1
    return Workers(plan, replicas), None


def _filled(cell: Cells, model: ServedModel, devices: int) -> EnginePlan:
    pp = max(1, cell.count("pp", 1))
    dp = max(1, cell.count("dp", 1))
    tp = max(1, devices // (pp * dp))
    return EnginePlan(tp=tp, pp=pp, dp=dp, ep=1, moe_tp=tp * dp)


def _pool(plan: EnginePlan, cell: Cells, prefix: str) -> Workers:
    count = max(1, cell.count(f"{prefix}workers", 1))
    if plan.dp > 1 and plan.ep == 1:
        count, plan = count * plan.dp, EnginePlan(tp=plan.tp, pp=plan.pp, moe_tp=plan.tp)
    # Batch limits are of ranks with sequences of their own.
    return Workers(plan, count, cell.count(f"{prefix}batch", 0) * plan.dp)


def _load(cell: Cells, folder: Path) -> ServingLoad:
    kind = cell.text("load").lower()
    if kind not in LOADS:
        raise PlanError(f"a load {kind!r} is not known", hint=", ".join(LOADS))
    trace = cell.text("trace")
    if trace and kind in ("trace", "open"):
        file = folder / trace
        if not file.exists():
            raise DatasetError(f"there is no trace {trace}", where=str(folder))
        return ServingLoad(kind, 0.0, 0.0, rate=cell.number("request_rate", 0.0), trace=str(file))
    prompt = cell.number("isl_mean", cell.number("isl"))
    output = cell.number("osl_mean", cell.number("osl"))
    if not prompt >= 1 or not output >= 1:
        raise PlanError("the lengths of prompts and outputs are not given", hint="isl and osl")
    concurrency = cell.count("concurrency", 0)
    count = cell.count("n_requests", 0)
    if kind in ("closed", "static-batch") and concurrency < 1:
        raise PlanError(f"a load {kind} has a concurrency", hint="give concurrency")
    rate = cell.number("request_rate", 0.0)
    if kind == "single-stream" or (kind == "offline" and 0 < concurrency < count):
        # All requests at hand, but so many in flight at a time.
        kind, concurrency = "closed", max(concurrency, 1)
    return ServingLoad(
        kind,
        prompt,
        output,
        _spread(cell.text("length_dist")),
        concurrency,
        rate if rate == rate and rate < 1e4 else 0.0,
        count,
    )


def _spread(text: str) -> float:
    """Lowest over highest length of a distribution, by its words."""
    if "uniform 1..nominal" in text:
        return 0.0
    found = re.search(r"uniform ([\d.]+)\.\.", text)
    return min(1.0, float(found[1])) if found and float(found[1]) <= 1.0 else 1.0
