"""Tables of measured serving: a row's columns in, the model, engine and load that it means out.

A row says what was served, by which engine on what, under which load; where its source measured
them, latencies and throughput. The columns are those of published tables (docs/serving.md).
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, gcd
from pathlib import Path
from typing import Any, cast

import pandas as pd

from ...common.errors import DatasetError, PlanError
from ...common.types import JsonObject
from ...features.devices.catalogue import find_typed
from ...simulate.serving.checkpoints import plain_name, recurrence_of, served_models
from ...simulate.serving.formats import Formats, in_formats
from ...simulate.serving.policies import framework_defaults, framework_of, frameworks
from ...simulate.serving.served import EnginePlan, ServedModel
from ...simulate.step.named_workloads import make_workload
from ...simulate.step.presets import find_preset
from ...simulate.step.workload import Workload
from .case_table import Cells, meaning, noted_share, noted_sizes, read_rows
from .deployment import Deployment, Workers
from .serving_case import EngineOptions, LoadSpec
from .serving_load import WAVES, draw

#: Kinds of load.
LOADS = ("closed", "open", "open-poisson", "offline", "static-batch", "trace", "single-stream")
#: What may be measured, with its unit as the suffix says.
ANSWERS = ("ttft_ms", "tpot_ms", "itl_ms", "out_tok_s", "j_per_tok", "power_w")
#: Most requests of an engine that are simulated of loads that are no closed loops.
MOST_REQUESTS = 3000
#: Requests a second from which all are sent at once.
UNLIMITED = 1e4


@dataclass(frozen=True)
class ServingRow:
    """A row: what is asked, as users ask it, and what was measured.

    Attributes:
        id: Of the row.
        deployment: What serves.
        spec: The load.
        group: Models of equal shape, as the table names them.
        measured: Answers that the row gives, by names of :data:`ANSWERS`.
    """

    id: str
    deployment: Deployment
    spec: LoadSpec
    group: str
    measured: dict[str, float]

    def closed_output(self) -> float:
        """Mean tokens of an output of a closed loop; 0 of other loads."""
        return float(draw(self.spec).outputs.mean()) if self.spec.concurrency else 0.0


def serving_row(row: Mapping[str, object], folder: Path = Path()) -> ServingRow:
    """A row of a table of serving.

    Args:
        row: Cells by column.
        folder: That its trace is in.

    Raises:
        OpcastError: The row says something that cannot be expressed; the message says what.
    """
    cell = Cells(row)
    framework, chunked = framework_of(cell.text("framework")), cell.text("chunked_prefill").lower()
    method, model = cell.text("method").lower(), served_model(cell)
    accepted = cell.number("spec_accept_len", meaning("accepted", cell.text("spec_decode").lower()))
    if accepted < 1.0:
        raise PlanError(f"spec_accept_len={accepted:g} is below 1", hint="tokens of a step")
    budgets = framework_defaults(framework).budgets.items()
    engine, prefill = _workers(cell, model)
    spec = _load(cell, folder, engine.count)
    own = Deployment(
        model=model,
        device=find_typed(cell.text("device")).name,
        framework=framework if framework in frameworks() else "",
        engine=engine,
        prefill=prefill,
        options=EngineOptions(
            max_batch=cell.count("max_num_seqs", 0),
            token_budget=cell.count("max_num_batched_tokens", 0)
            or next((own for way, own in budgets if method.startswith(way)), 0),
            chunked=chunked.startswith("yes") if chunked.startswith(("yes", "no")) else None,
            accepted=accepted,
            drafts=ceil(accepted) - 1,
            # Benchmarks of random prompts turn off what could not be found again.
            prefix_cache=False,
        ),
        version=_version(cell, spec),
        source=cell.text("source").split("@")[0],
    )
    measured = {name: cell.number(name) for name in ANSWERS}
    return ServingRow(
        id=cell.text("id"),
        deployment=own,
        spec=spec,
        group=cell.text("model_group") or cell.text("model"),
        measured={name: value for name, value in measured.items() if value == value},
    )


def serving_rows(
    table: pd.DataFrame, folder: Path = Path()
) -> tuple[list[ServingRow | None], list[str]]:
    """Rows of a table of serving, and for each that cannot be expressed why.

    Of engines behind workers that run prompts alone, what no column says is how many sequences they
    were started for: where recipes size them (``sized``), the power of two below what the most
    requests of a series give a rank. Ranks with sequences of their own have more room than that.

    Args:
        table: As :func:`~.case_table.read_cases` gives.
        folder: That its traces are in.
    """
    rows, reasons = read_rows(table, partial(serving_row, folder=folder))
    series: dict[Hashable, list[int]] = {}
    for at, row in enumerate(rows):
        if row is not None and _is_sized(row):
            spec = replace(row.spec, concurrency=0, count=0)
            series.setdefault((row.deployment, spec), []).append(at)
    for places in series.values():
        own = [row for row in map(rows.__getitem__, places) if row is not None]
        most = max(row.spec.concurrency for row in own) / own[0].deployment.engine.count
        limit = 1 << max(0, int(most).bit_length() - 1)
        for at, row in zip(places, own, strict=True):
            options = replace(row.deployment.options, max_batch=limit)
            rows[at] = replace(row, deployment=replace(row.deployment, options=options))
    return rows, reasons


def _is_sized(row: ServingRow) -> bool:
    """Whether a row's decoding engines were started for its load, without a limit that it says."""
    own = row.deployment
    apart = own.prefill is not None and own.engine.plan.dp == 1 and row.spec.concurrency > 0
    return apart and framework_defaults(own.framework).sized and not own.options.max_batch


def served_model(cell: Cells) -> ServedModel:
    """The model of a row: of the sizes that the row gives, or those of its name.

    Raises:
        PlanError: Its sizes or formats are unknown, or do not make a model.
    """
    name, note = cell.text("model"), cell.text("attention_note")
    known, linear, recurrence = plain_name(name), 0, None
    one_pass: JsonObject = {"mode": "forward", "seq": 1, "batch": 1}
    entry = served_models().get(known, {})
    if cell.count("layers", 0) and cell.count("d_model", 0):
        work = Workload(**{**_row_sizes(cell, note), **one_pass})
        share = noted_share("linear", f"{note}; {cell.text('arch').lower()}") or 0.0
        linear = min(work.layers - 1, round(work.layers * share))
    elif "sizes" in entry:
        work = Workload(**{**cast("JsonObject", entry["sizes"]), **cell.sizes(), **one_pass})
        linear = cast("int", entry.get("linear_layers", 0))
    elif find_preset(known) is not None:
        work = make_workload(known, one_pass)
    else:
        raise PlanError(
            f"the sizes of {name or 'the model'} are not known",
            hint="give layers, d_model, heads, d_ff and vocab",
        )
    if linear:
        recurrence = recurrence_of(known)
    formats = Formats(
        cell.text("weight_dtype"),
        cell.text("kv_dtype"),
        linear_layers=linear,
        framework=framework_of(cell.text("framework")),
    )
    return replace(in_formats(work, formats), recurrence=recurrence)


def _row_sizes(cell: Cells, note: str) -> JsonObject:
    """Sizes that a row gives, fields of a workload."""
    noted = noted_sizes(note, latent=cell.flag("mla", False))
    sizes: dict[str, Any] = {"heads": 1, "kv_heads": 0, "d_ff": 0, **cell.sizes(), **noted}
    if "kv_lora" in noted:
        sizes["kv_heads"] = 0
    if cell.text("arch").lower() == "gpt":
        sizes |= {"gated": False, "norm": "layernorm"}
    if "window" in noted:
        sizes["window_share"] = noted_share("window_share", note) or 1.0
    if not sizes.get("experts"):
        return {k: v for k, v in sizes.items() if k not in _OF_EXPERTS}
    # Layers without experts: where they stand in the model does not matter to its time.
    if share := noted_share("with_experts", note):
        sizes["dense_layers"] = round(sizes["layers"] * (1.0 - share))
    if sizes.get("dense_layers"):
        sizes["dense_ff"] = sizes["d_ff"]
    return {**sizes, "d_ff": cell.count("moe_d_ff", 0) or sizes["d_ff"]}


#: Sizes that only models with experts have.
_OF_EXPERTS = ("top_k", "shared_experts", "dense_layers", "dense_ff")


def _version(cell: Cells, spec: LoadSpec) -> str:
    """Version of the engine; empty for the newest.

    Whole batches without a version are of engines before they were rewritten.
    """
    said = cell.text("framework_version")
    return said if said[:1].isdigit() else "0" if spec.batch else ""


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
    if model.workload.heads % tp:
        # Heads that do not share out stay whole: the table counts all ranks as tp.
        tp, dp = 1, tp * dp
    if not moe_tp and not ep and dp == 1 and meaning("apart_as_tp", cell.text("note")):
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
            _pool(decode, cell, model, "decode_"),
            _pool(prefill, cell, model, "prefill_"),
        )
    plan = _plan(cell, model)
    devices = cell.count("n_gpus", 0)
    if plan is None:
        if not devices:
            raise PlanError("neither tp nor n_gpus say how the model is spread", hint="give tp")
        # Tensor parallelism over all devices of a box is what engines do by default.
        plan = _filled(cell, model, devices)
    plain = not model.workload.experts
    # How tables count the ranks of experts differs.
    least = plan.tp * plan.pp * (plan.dp if plain else 1)
    if 0 < devices < least:
        raise PlanError(f"n_gpus={devices}, but tp, pp and dp spread the model over {least}")
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
    if cell.text("load").lower() in ("offline", "open", "open-poisson") and dp == 1:
        tp = _roomy(cell, model, EnginePlan(pp=pp), [n for n in range(1, most) if most % n == 0])
        tp = tp or most
    return EnginePlan(tp=tp, pp=pp, dp=dp, ep=1, moe_tp=tp * dp)


def _roomy(
    cell: Cells, model: ServedModel, plan: EnginePlan, ranks: Iterable[int], share: float = _ROOMY
) -> int:
    """First of some numbers of ranks whose weights leave room for a cache; 0 for none."""
    most = share * find_typed(cell.text("device")).usable_bytes
    return next((n for n in ranks if model.weight_bytes(plan) / n <= most), 0)


#: Ranks of a worker whose row does not say how the model is spread.
_RANKS = (2, 4, 8, 16, 32, 64)


def _pool(plan: EnginePlan, cell: Cells, model: ServedModel, prefix: str) -> Workers:
    """Workers of one kind, of two that share the requests.

    Raises:
        PlanError: Nothing says how many they are: of two, each takes half of what one does.
    """
    if plan.devices == 1 and not _roomy(cell, model, plan, (1,), 1.0):
        # Tables that lost the plan give ones; the fewest devices that leave room for a cache.
        ranks = _roomy(cell, model, plan, _RANKS) or 1
        plan = EnginePlan(tp=ranks, moe_tp=ranks)
    count = cell.count(f"{prefix}workers", 0) or cell.count(f"n_{prefix}gpus", 0) // plan.devices
    if not count:
        raise PlanError(
            "how many workers share the requests is not said",
            hint=f"give {prefix}workers or n_{prefix}gpus",
        )
    if plan.dp > 1 and plan.ep == 1:
        count, plan = count * plan.dp, EnginePlan(tp=plan.tp, pp=plan.pp, moe_tp=plan.tp)
    return Workers(plan, count)


def _means(cell: Cells) -> tuple[float, float]:
    """Mean tokens of a prompt and of an output."""
    prompt = cell.number("isl_mean", cell.number("isl"))
    output = cell.number("osl_mean", cell.number("osl"))
    if not prompt >= 1 or not output >= 1:
        raise PlanError("the lengths of prompts and outputs are not given", hint="isl and osl")
    return prompt, output


def _load(cell: Cells, folder: Path, engines: int) -> LoadSpec:
    kind = cell.text("load").lower()
    if kind not in LOADS:
        raise PlanError(f"a load {kind!r} is not known", hint=", ".join(LOADS))
    trace = cell.text("trace")
    if trace and kind in ("trace", "open"):
        file = folder / trace
        if not file.exists():
            raise DatasetError(f"there is no trace {trace}", where=str(folder))
        return LoadSpec(requests=file)
    concurrency = cell.count("concurrency", 0)
    count = cell.count("n_requests", 0)
    if kind in ("closed", "static-batch") and concurrency < 1:
        raise PlanError(f"a load {kind} has a concurrency", hint="give concurrency")
    if kind == "single-stream" or (kind == "offline" and 0 < concurrency < count):
        # All requests at hand, but so many in flight at a time.
        kind, concurrency = "closed", max(concurrency, 1)
    words, means = cell.text("length_dist"), _means(cell)
    spread = _spread(words)
    prompt, output = (_lengths(mean, spread) for mean in means)
    if found := re.search(r"outputs (geometric|lognormal)(?: ([\d.]+))?", words):
        output = ":".join(filter(None, (found[1], f"{means[1]:g}", found[2])))
    own = LoadSpec(prompt=prompt, output=output)
    most = MOST_REQUESTS * engines
    if kind == "static-batch":
        return replace(own, batch=concurrency)
    if kind == "closed":
        # Longer loops are as those of the default length, but for a start that counts less.
        count = max(concurrency, min(count, WAVES * concurrency)) if count else 0
        return replace(own, concurrency=concurrency, count=count)
    rate = cell.number("request_rate", 0.0) if kind.startswith("open") else 0.0
    count = min(most, count or most)
    return replace(own, rate=rate if 0.0 < rate < UNLIMITED else 0.0, count=count)


def _lengths(mean: float, spread: float) -> str:
    """A distribution of lengths.

    Args:
        mean: Of the lengths.
        spread: Lowest over highest; 1 for equal ones.
    """
    if spread >= 1.0:
        return str(max(1, round(mean)))
    high = 2.0 * mean / (1.0 + spread)
    return f"uniform:{max(1, round(high * spread))}:{max(1, round(high))}"


def _spread(text: str) -> float:
    """Lowest over highest length of a distribution, by its words."""
    if "uniform 1..nominal" in text:
        return 0.0
    found = re.search(r"uniform ([\d.]+)\.\.", text)
    return min(1.0, float(found[1])) if found and float(found[1]) <= 1.0 else 1.0
