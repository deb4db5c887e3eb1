"""Reader of measured serving tables: converts a row to a deployment, a load and measurements.

A row specifies the model, the engine, its devices and the load, and holds the latencies and the
throughput that its source measured. Columns are those of published tables (docs/serving.md).
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, gcd, isnan
from pathlib import Path
from typing import Any, cast

import pandas as pd

from ...common.errors import DatasetError, PlanError
from ...common.types import JsonObject
from ...features.devices.catalogue import find_typed
from ...simulate.serving.checkpoints import plain_name, recurrence_of, served_models
from ...simulate.serving.policies import framework_defaults, framework_of, frameworks
from ...simulate.serving.served import EnginePlan, Formats, ServedModel, in_formats
from ...simulate.step.named_workloads import make_workload
from ...simulate.step.presets import find_preset
from ...simulate.step.workload import Workload
from .case_table import (
    Cells,
    case_data,
    meaning,
    noted_share,
    noted_sizes,
    published_engines,
    read_rows,
)
from .deployment import Deployment, Workers, draft_model
from .serving_case import EngineOptions, LoadSpec
from .serving_load import WAVES, draw

#: Kinds of load.
LOADS = ("closed", "open", "open-poisson", "offline", "static-batch", "trace", "single-stream")
#: Measured columns, with their units as suffixes.
ANSWERS = ("ttft_ms", "tpot_ms", "itl_ms", "out_tok_s", "j_per_tok", "power_w")
#: Maximum requests per engine to simulate, except for closed loops.
MOST_REQUESTS = 3000
#: Rate (requests/s) from which all requests are considered sent at once.
UNLIMITED = 1e4
#: Fraction of device memory that weights may use where a table gives no plan and throughput is
#: measured; engineering estimate.
_ROOMY = 0.6
#: Numbers of ranks to try for a worker whose row gives no plan.
_RANKS = (2, 4, 8, 16, 32, 64)
#: Sizes that only models with experts have.
_OF_EXPERTS = ("top_k", "shared_experts", "dense_layers", "dense_ff")


@dataclass(frozen=True)
class ServingRow:
    """A row: a deployment under a load, and what was measured.

    Attributes:
        id: Identifier of the row.
        deployment: The deployment.
        spec: The load.
        group: Name of the group of models of equal shape, as in the table.
        measured: Measured values by names of :data:`ANSWERS`.
    """

    id: str
    deployment: Deployment
    spec: LoadSpec
    group: str
    measured: dict[str, float]

    def closed_output(self) -> float:
        """Return the mean output tokens of a closed loop; 0 for other loads."""
        return float(draw(self.spec).outputs.mean()) if self.spec.concurrency else 0.0


def serving_row(row: Mapping[str, object], folder: Path = Path()) -> ServingRow:
    """Convert a row of a serving table.

    Args:
        row: Cells by column.
        folder: Folder of the row's trace.

    Raises:
        OpcastError: The row cannot be represented; the message gives the reason.
    """
    cell = Cells(row)
    cell.fill(published_engines(cell))
    framework, chunked = framework_of(cell.text("framework")), cell.text("chunked_prefill").lower()
    method, model = cell.text("method").lower(), served_model(cell)
    accepted, drafts = _drafts(cell)
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
            async_scheduling=cell.flag("async_scheduling", None),
            recv_interval=cell.count("recv_interval", 1),
            batch_wait_iters=cell.count("batch_wait_iters", 0),
            batch_wait_ratio=cell.number("batch_wait_ratio", 0.0),
            chunked=chunked.startswith("yes") if chunked.startswith(("yes", "no")) else None,
            accepted=accepted,
            drafts=drafts,
            # Benchmarks with random prompts disable the prefix cache, which could not hit.
            prefix_cache=False,
        ),
        # Tables give a number of drafts only for models that draft by a module of their own.
        draft=draft_model("mtp", model, files=False) if cell.count("drafts", 0) else None,
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


def _drafts(cell: Cells) -> tuple[float, int]:
    """Return the mean tokens of a decoding step, and its draft tokens.

    Each draft token is accepted with the same probability, if those before it are.

    Raises:
        PlanError: A step gives less than a token.
    """
    drafts = cell.count("drafts", -1)
    accepted = sum(case_data()["acceptance"] ** n for n in range(drafts + 1))
    if drafts < 0:
        accepted = meaning("accepted", cell.text("spec_decode").lower())
    accepted = cell.number("spec_accept_len", accepted)
    if accepted < 1.0:
        raise PlanError(f"spec_accept_len={accepted:g} is below 1", hint="tokens of a step")
    return accepted, ceil(accepted) - 1 if drafts < 0 else drafts


def serving_rows(
    table: pd.DataFrame, folder: Path = Path()
) -> tuple[list[ServingRow | None], list[str]]:
    """Convert the rows of a serving table, and give the reason for each that cannot be represented.

    Where recipes size decode engines behind prefill workers for the load (``sized``), a batch limit
    that a row does not give is taken as the power of two at or below the highest concurrency per
    engine in a series. Data-parallel ranks have more room than that.

    Args:
        table: Result of :func:`~.case_table.read_cases`.
        folder: Folder of the traces.
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
            engine = replace(row.deployment.engine, batch=limit)
            rows[at] = replace(row, deployment=replace(row.deployment, engine=engine))
    return rows, reasons


def _is_sized(row: ServingRow) -> bool:
    """Return whether a row's decode engines were sized for its load without a given limit."""
    own = row.deployment
    apart = own.prefill is not None and own.engine.plan.dp == 1 and row.spec.concurrency > 0
    told = own.options.max_batch or own.engine.batch
    return apart and own.rules.sized and not told


def served_model(cell: Cells) -> ServedModel:
    """Return the model of a row, from the sizes in the row or else from the model's name.

    Raises:
        PlanError: Sizes or formats are unknown or inconsistent.
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
    """Return the model sizes in a row, as fields of a workload."""
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
    # Dense layers of a model with experts; their position does not affect its time.
    if share := noted_share("with_experts", note):
        sizes["dense_layers"] = round(sizes["layers"] * (1.0 - share))
    if sizes.get("dense_layers"):
        sizes["dense_ff"] = sizes["d_ff"]
    return {**sizes, "d_ff": cell.count("moe_d_ff", 0) or sizes["d_ff"]}


def _version(cell: Cells, spec: LoadSpec) -> str:
    """Return the version of the engine; empty for the newest.

    Static batches without a version were run on engines from before their rewrite.
    """
    said = cell.text("framework_version")
    return said if said[:1].isdigit() else "0" if spec.batch else ""


def _plan(cell: Cells, model: ServedModel, prefix: str = "") -> EnginePlan | None:
    """Return the plan in columns with a prefix; ``None`` if the row has none."""
    if not cell.text(f"{prefix}tp"):
        return None
    tp, pp = cell.count(f"{prefix}tp", 1), max(1, cell.count(f"{prefix}pp", 1))
    dp, ep = max(1, cell.count(f"{prefix}dp", 1)), cell.count(f"{prefix}ep", 0)
    moe_tp = cell.count(f"{prefix}moe_tp", 0)
    if not model.workload.experts:
        return EnginePlan(tp=tp, pp=pp, dp=dp, moe_tp=tp * dp)
    if moe_tp * ep > tp * dp:
        # In some tables, tp counts only the tensor-parallel ranks of attention.
        dp = max(1, moe_tp * ep // tp)
    if model.workload.heads % tp:
        # Heads cannot be split evenly, so attention is data parallel and tp counts all ranks.
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
            raise PlanError("the row has neither tp nor n_gpus", hint="give tp")
        plan = _filled(cell, model, devices)
    plain = not model.workload.experts
    # Tables differ in whether n_gpus includes the dp ranks of models with experts.
    least = plan.tp * plan.pp * (plan.dp if plain else 1)
    if 0 < devices < least:
        raise PlanError(f"n_gpus={devices}, but tp, pp and dp spread the model over {least}")
    if plain and plan.dp > 1:
        # Without experts, data parallelism means independent engines.
        one = EnginePlan(tp=plan.tp, pp=plan.pp, moe_tp=plan.tp)
        return Workers(one, plan.dp), None
    replicas = devices // plan.devices if devices > plan.devices else 1
    return Workers(plan, replicas), None


def _filled(cell: Cells, model: ServedModel, devices: int) -> EnginePlan:
    """Return the plan to assume for a row that gives none.

    By default engines use tensor parallelism over all devices. For throughput benchmarks (offline
    and open loads) it is the fewest ranks that leave room for a KV cache.
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
    """Return the first number of ranks that leaves room for a KV cache; 0 if none does."""
    most = share * find_typed(cell.text("device")).usable_bytes
    return next((n for n in ranks if model.weight_bytes(plan) / n <= most), 0)


def _pool(plan: EnginePlan, cell: Cells, model: ServedModel, prefix: str) -> Workers:
    """Return the prefill or decode workers of a row with separate prefill workers.

    Raises:
        PlanError: The row does not give their number.
    """
    if plan.devices == 1 and not _roomy(cell, model, plan, (1,), 1.0):
        # The table lost the plan (all ones): assume the fewest devices with room for a cache.
        ranks = _roomy(cell, model, plan, _RANKS) or 1
        plan = EnginePlan(tp=ranks, moe_tp=ranks)
    count = cell.count(f"{prefix}workers", 0) or cell.count(f"n_{prefix}gpus", 0) // plan.devices
    if not count:
        raise PlanError(
            "the number of workers is not given",
            hint=f"give {prefix}workers or n_{prefix}gpus",
        )
    if plan.dp > 1 and plan.ep == 1:
        count, plan = count * plan.dp, EnginePlan(tp=plan.tp, pp=plan.pp, moe_tp=plan.tp)
    return Workers(plan, count, cell.count(f"{prefix}max_num_seqs", 0))


def _means(cell: Cells) -> tuple[float, float]:
    """Return the mean tokens of a prompt and of an output."""
    prompt, output = (
        cell.number(f"{name}_mean" if cell.text(f"{name}_mean") else name, least=1.0)
        for name in ("isl", "osl")
    )
    if isnan(prompt + output):
        raise PlanError("the lengths of prompts and outputs are not given", hint="isl and osl")
    return prompt, output


def _load(cell: Cells, folder: Path, engines: int) -> LoadSpec:
    kind = cell.text("load").lower()
    if kind not in LOADS:
        raise PlanError(f"load {kind!r} is not known", hint=", ".join(LOADS))
    trace = cell.text("trace")
    if trace and kind in ("trace", "open"):
        file = folder / trace
        if not file.exists():
            raise DatasetError(f"there is no trace {trace}", where=str(folder))
        return LoadSpec(requests=file)
    concurrency = cell.count("concurrency", 0, least=1)
    count = cell.count("n_requests", 0)
    if kind in ("closed", "static-batch") and concurrency < 1:
        raise PlanError(f"load {kind} needs a concurrency of at least 1", hint="give concurrency")
    if kind == "single-stream" or (kind == "offline" and 0 < concurrency < count):
        # All requests are available at once, but concurrency limits those in flight.
        kind, concurrency = "closed", max(concurrency, 1)
    words, means = cell.text("length_dist"), _means(cell)
    spread = _spread(words)
    prompt, output = (
        _lengths(mean, spread, re.search(rf"{whose} (geometric|lognormal)(?: ([\d.]+))?", words))
        for whose, mean in zip(("prompts", "outputs"), means, strict=True)
    )
    own = LoadSpec(prompt=prompt, output=output)
    most = MOST_REQUESTS * engines
    if kind == "static-batch":
        return replace(own, batch=concurrency)
    if kind == "closed":
        # Longer loops only reduce the weight of the start; simulate the default length.
        count = max(concurrency, min(count, WAVES * concurrency)) if count else 0
        return replace(own, concurrency=concurrency, count=count)
    rate = cell.number("request_rate", 0.0) if kind.startswith("open") else 0.0
    count = min(most, count or most)
    return replace(own, rate=rate if 0.0 < rate < UNLIMITED else 0.0, count=count)


def _lengths(mean: float, spread: float, named: re.Match[str] | None) -> str:
    """Return a length distribution as text.

    Args:
        mean: Mean length in tokens.
        spread: Shortest over longest length; 1 for equal lengths.
        named: Name of the distribution and its parameter, if the row gives them.
    """
    if named:
        return ":".join(filter(None, (named[1], f"{mean:g}", named[2])))
    if spread >= 1.0:
        return str(max(1, round(mean)))
    high = 2.0 * mean / (1.0 + spread)
    return f"uniform:{max(1, round(high * spread))}:{max(1, round(high))}"


def _spread(text: str) -> float:
    """Return the shortest over the longest length of a distribution described in words."""
    if "uniform 1..nominal" in text:
        return 0.0
    found = re.search(r"uniform ([\d.]+)\.\.", text)
    return min(1.0, float(found[1])) if found and float(found[1]) <= 1.0 else 1.0
