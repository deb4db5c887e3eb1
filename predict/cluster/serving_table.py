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
from ...simulate.clusters.catalogue import joined
from ...simulate.clusters.topology import Cluster
from ...simulate.serving.served import EnginePlan, ServedModel
from .served_row import framework_of, served_model
from .step_table import FAULTS, Cells, reason_of

#: Columns that a row cannot do without.
NEEDED = ("device", "framework", "load")
#: Kinds of load.
LOADS = ("closed", "open", "open-poisson", "offline", "static-batch", "trace", "single-stream")
#: What may be measured, with its unit as the suffix says.
ANSWERS = ("ttft_ms", "tpot_ms", "itl_ms", "out_tok_s")


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
        counted: Whether the row says how many there are; otherwise ``count`` is 1, and workers that
            decode alone are as many as hold the requests in flight.
    """

    plan: EnginePlan
    count: int = 1
    batch: int = 0
    counted: bool = True

    @property
    def devices(self) -> int:
        """Devices of all of them."""
        return self.plan.devices * self.count


@dataclass(frozen=True)
class EngineOptions:
    """What may be told to an engine beside its plan; defaults are the framework's own.

    Attributes:
        memory: Share of the memory for weights, activations and cache; 0 for the framework's.
        block: Tokens of a block of the cache; 0 for the framework's.
        swap: Whether the cache of an evicted request moves to the host.
        watermark: Share of the cache that stays free when a request is admitted.
        eager: Whether passes are launched kernel by kernel, not replayed from captured graphs.
        prefix_cache: Whether what prompts begin with is kept for later ones.
        drafts: Tokens that are drafted for a step of speculative decoding; 0 without.
        draft: Model that drafts them; ``None`` for drafts at no cost, as of n-grams.
        draft_name: What drafts: ``ngram``, ``mtp``, or the name of a model.
        transfer: Bytes a second at which caches move between workers; 0 for the links' own.
        router: One of :data:`~opcast.simulate.serving.fleet.ROUTERS`.
    """

    memory: float = 0.0
    block: int = 0
    swap: bool = False
    watermark: float = 0.0
    eager: bool = False
    prefix_cache: bool = True
    drafts: int = 0
    draft: ServedModel | None = None
    draft_name: str = "ngram"
    transfer: float = 0.0
    router: str = "round-robin"


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
        options: What else the engine is told.
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
    options: EngineOptions = EngineOptions()

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
    model = served_model(cell)
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
        # Benchmarks of random prompts turn off what could not be found again.
        options=EngineOptions(prefix_cache=False),
    )


#: Tokens of a pass under Dynamo: its workers are not vLLM's own server, for which vLLM's default is
#: 2048, and the times to the first token of both vLLM and TensorRT-LLM under it agree with that.
_DYNAMO_BUDGET = 2048


def _budget(cell: Cells) -> int:
    """Token budget that the way of measuring implies; 0 for the framework's own."""
    dynamo = cell.text("method").lower().startswith("dynamo")
    return _DYNAMO_BUDGET if dynamo and framework_of(cell.text("framework")) != "sglang" else 0


def _speculative(text: str) -> str:
    if text.startswith(("ambiguous", "unstated")):
        return text.split()[0]
    return "no" if not text or text.startswith("no") else "yes"


#: Tokens of a step where drafts are made and nothing says how many are accepted: one of
#: DeepSeek-V3's extra predictions, of which 85 to 90 % are (DeepSeek-V3, 2024, section 5.4.3).
_ACCEPTED = 1.85
#: The same where rows with and without drafts are mixed: times of a further token are 0.67 times
#: those of their twins without (published-serving pack, README, trap 3).
_MIXED = 1.5


def _accepted(cell: Cells, speculative: str) -> float:
    """Tokens that a step of decoding yields."""
    usual = {"yes": _ACCEPTED, "ambiguous": _MIXED}.get(speculative, 1.0)
    length = cell.number("spec_accept_len", usual)
    if length < 1.0:
        raise PlanError(f"spec_accept_len={length:g} is below 1", hint="tokens of a step")
    return length


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


#: Share of a device's memory that weights may take where a table does not say how a model is spread
#: and throughput is what counts; engineering estimate.
_ROOMY = 0.6


def _filled(cell: Cells, model: ServedModel, devices: int) -> EnginePlan:
    """Plan of a row that says nothing of it.

    Tensor parallelism over all devices is what engines do by default; where throughput is asked
    for, as of whole queues and of rates, the fewest ranks that leave room for a cache are.
    """
    pp = max(1, cell.count("pp", 1))
    dp = max(1, cell.count("dp", 1))
    most = max(1, devices // (pp * dp))
    tp = most
    memory = find_device(cell.text("device")).memory_bytes
    if cell.text("load").lower() in ("offline", "open", "open-poisson") and dp == 1 and memory:
        weights = model.weight_bytes(EnginePlan(pp=pp))
        enough = (n for n in range(1, most) if most % n == 0)
        tp = next((n for n in enough if weights / n <= _ROOMY * memory), most)
    return EnginePlan(tp=tp, pp=pp, dp=dp, ep=1, moe_tp=tp * dp)


def _pool(plan: EnginePlan, cell: Cells, prefix: str) -> Workers:
    count = max(1, cell.count(f"{prefix}workers", 1))
    if plan.dp > 1 and plan.ep == 1:
        count, plan = count * plan.dp, EnginePlan(tp=plan.tp, pp=plan.pp, moe_tp=plan.tp)
    counted = cell.count(f"{prefix}workers", 0) > 0
    # Batch limits are of ranks with sequences of their own.
    return Workers(plan, count, cell.count(f"{prefix}batch", 0) * plan.dp, counted)


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
