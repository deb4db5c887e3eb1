"""Tables of training steps: a row's columns in, the workload, plan and cluster that it means out.

A row says what was trained, how it was spread and on what; where its source measured the step, how
long that took. The columns are those of published tables of training runs (docs/steps.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, gcd
from pathlib import Path

import pandas as pd

from ...common.errors import DatasetError, OpcastError, PlanError
from ...features.cost.formats import format_name
from ...features.devices.catalogue import find_device
from ...models.steps.context import COMPILED
from ...simulate.clusters.catalogue import joined
from ...simulate.clusters.topology import Cluster
from ...simulate.step.placement import resolved
from ...simulate.step.plan import Plan
from ...simulate.step.workload import DTYPES, PRODUCTS, Workload

#: What a rule of opcast may raise on sizes that it was not made for.
FAULTS = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, AssertionError)
#: Frameworks whose tensor parallelism keeps the whole sequence on every rank between products:
#: sequence parallelism came to Megatron-LM in 2022 (Korthikanti et al., arXiv:2205.05198), after
#: Megatron-DeepSpeed had branched off, and never came to OneFlow's.
_WHOLE_SEQUENCES = ("megatron-deepspeed", "oneflow")
#: Dtypes whose recipes have names of their own.
_FAMILIES = ("fp8", "int8", "mxfp8", "nvfp4")
#: Columns that a row cannot do without.
NEEDED = ("device", "n_devices", "layers", "d_model", "heads", "d_ff", "vocab", "seq")


@dataclass(frozen=True)
class StepRow:
    """A row, as the simulator takes it.

    Attributes:
        id: Of the row.
        source: Who measured it, without a revision; empty if the row does not say.
        framework: Lower case, without remarks in brackets; empty if the row does not say.
        workload: What is trained; of the batch that whole micro-batches make up.
        plan: Resolved.
        cluster: Devices and links.
        share: Steps of the row over steps of the workload: below 1 where the last micro-batch of
            the row is smaller than the others.
        launched: Whether the host launches every kernel in every step.
        measured_s: Seconds; NaN if the row does not say.
        memory_bytes: Peak of a device; NaN if the row does not say.
    """

    id: str
    source: str
    framework: str
    workload: Workload
    plan: Plan
    cluster: Cluster
    share: float
    launched: bool
    measured_s: float
    memory_bytes: float


def read_steps(path: str | Path) -> pd.DataFrame:
    """A table of steps from CSV or parquet.

    Raises:
        DatasetError: The file cannot be read, or lacks columns.
    """
    file = Path(path)
    try:
        table = pd.read_parquet(file) if file.suffix == ".parquet" else pd.read_csv(file)
    except (OSError, ValueError) as error:
        raise DatasetError(f"the table cannot be read: {error}", where=str(file)) from None
    missing = [name for name in NEEDED if name not in table]
    if missing:
        raise DatasetError(
            f"no columns {', '.join(missing)}",
            where=str(file),
            hint="docs/steps.md lists the columns of a table of steps",
        )
    if "id" not in table:
        table.insert(0, "id", [f"row{number}" for number in range(len(table))])
    return table


def step_row(row: Mapping[str, object]) -> StepRow:
    """A row of a table of steps.

    Raises:
        OpcastError: The row says something that cannot be expressed; the message says what.
    """
    cell = Cells(row)
    cluster = _cluster(cell)
    spec = find_device(cluster.device)
    framework = cell.text("framework").lower().split(" (")[0]
    plan = _plan(cell, cluster.size)
    batch = cell.count("global_batch", 1)
    micro = cell.count("micro_batch", 0) or max(1, batch // (plan.batch_ranks))
    rounds = cell.count("grad_accum", 0) or ceil(batch / (micro * plan.batch_ranks))
    whole = micro * rounds * plan.batch_ranks
    workload = _workload(cell, whole, spec.platform)
    plan = plan.changed(microbatches=rounds)
    if plan.pp > 1 and cell.count("virtual", 1) > 1 and rounds % plan.pp == 0:
        plan = plan.changed(schedule="interleaved", virtual=cell.count("virtual", 1))
    overlap = cell.text("overlap").lower()
    return StepRow(
        id=cell.text("id"),
        source=cell.text("source").split("@")[0],
        framework=framework,
        workload=workload,
        plan=resolved(workload, plan, cluster.size),
        cluster=cluster,
        share=batch / whole,
        launched=not (
            cell.flag("compile", False)
            or "cuda graph" in overlap
            or spec.platform != "gpu"
            or framework.startswith(COMPILED)
        ),
        measured_s=cell.number("step_s"),
        memory_bytes=cell.number("memory_gib") * 2.0**30,
    )


class Cells:
    """Cells of a row by type; an empty cell, or no such column, is the default."""

    def __init__(self, row: Mapping[str, object]) -> None:
        self._row = row

    def _value(self, name: str) -> object | None:
        value = self._row.get(name)
        return None if value is None or value != value or value == "" else value

    def filled(self) -> dict[str, object]:
        """The cells that are not empty."""
        return {name: value for name in self._row if (value := self._value(name)) is not None}

    def text(self, name: str) -> str:
        """Text of a cell."""
        value = self._value(name)
        return "" if value is None else str(value)

    def number(self, name: str, default: float = float("nan")) -> float:
        """Number of a cell.

        Raises:
            DatasetError: It is none.
        """
        value = self._value(name)
        try:
            return default if value is None else float(str(value))
        except ValueError:
            raise DatasetError(f"{name}={value!r} is not a number", where=self.text("id")) from None

    def count(self, name: str, default: int) -> int:
        """Whole number of a cell."""
        return round(self.number(name, default))

    def flag(self, name: str, default: bool) -> bool:
        """Whether a cell says yes."""
        text = self.text(name).lower()
        return text in ("true", "1", "1.0", "yes") if text else default


def _cluster(cell: Cells) -> Cluster:
    device, count = cell.text("device"), cell.count("partitions", 0) or cell.count("n_devices", 1)
    per_node = cell.count("devices_per_node", 0)
    network = cell.number("network") * 1e9
    if cell.text("network_scope") == "node" and per_node:
        network /= per_node
    return joined(device, count, per_node, network if network == network else 0.0)


def _plan(cell: Cells, devices: int) -> Plan:
    fsdp, zero = cell.count("fsdp", 1), cell.count("zero", 0)
    dp, tp = cell.count("dp", 1), cell.count("tp", 1)
    if fsdp > 1 and zero in (1, 2):
        # Ranks that shard gradients or the optimiser alone are replicas here.
        dp, fsdp = dp * fsdp, 1
    policy = cell.text("recompute") or "none"
    reduce = format_name(cell.text("reduce_dtype"))
    ep = cell.count("ep", 1)
    pp, cp = cell.count("pp", 1), cell.count("cp", 1)
    if ep > 1 and dp * fsdp * tp * pp * cp * ep == devices:
        # MaxText's expert axis has ranks of its own, which hold parts of the batch, too.
        dp *= ep
    return Plan(
        dp=dp,
        fsdp=fsdp,
        tp=tp,
        sp=cell.text("framework").lower() not in _WHOLE_SEQUENCES
        and "no sequence parallelism" not in cell.text("notes"),
        pp=pp,
        # Experts are spread over data-parallel ranks first; what is left spans tensor ranks,
        # which hold whole experts then.
        ep=gcd(ep, dp * fsdp),
        cp=cp,
        zero=0 if fsdp > 1 else zero,
        recompute="full" if policy == "offload" else policy,
        offload="activations" if policy == "offload" else "none",
        reduce=reduce,
    )


def _workload(cell: Cells, batch: int, platform: str) -> Workload:
    dtype = format_name(cell.text("dtype") or "bf16")
    # Recipes of one type, such as fp8_full, differ in what they leave out.
    dtype = next((d for d in _FAMILIES if dtype.startswith(f"{d}_")), dtype)
    if dtype not in PRODUCTS:
        raise PlanError(f"dtype {dtype!r} is not known", hint=", ".join(PRODUCTS))
    plain = dtype if dtype in DTYPES and dtype != "fp8" else "bf16"
    experts = cell.count("experts", 0)
    sizes = _notes(cell.text("arch_note"))
    return Workload(
        layers=cell.count("layers", 1),
        d_model=cell.count("d_model", 1),
        heads=cell.count("heads", 1),
        kv_heads=cell.count("kv_heads", 0),
        head_dim=cell.count("head_dim", 0),
        d_ff=cell.count("d_ff", 1),
        vocab=cell.count("vocab", 1),
        seq=cell.count("seq", 1),
        batch=batch,
        dtype=plain,
        products="" if plain == dtype else dtype,
        experts=experts,
        top_k=cell.count("top_k", 0),
        gated=cell.flag("gated", True),
        tied=cell.flag("tied", False),
        norm=cell.text("norm") or "rmsnorm",
        rope=cell.text("position") == "rope",
        positions=cell.text("position") == "learned",
        attention=_attention(cell.text("attention")),
        **sizes,  # type: ignore[arg-type]
    )


def _attention(text: str) -> str:
    """Implementation of attention by the source's words; the fastest if it says nothing."""
    word = text.lower()
    if word.startswith("torch") or "eager" in word or "unfused" in word:
        return "eager"
    if "naive" in word or "dot_product" in word:
        return "naive"
    return "flash2" if "flash2" in word or "triton" in word else "fused"


def _notes(note: str) -> dict[str, object]:
    """Sizes that tables have no columns for: latent attention, dense layers, shared experts."""
    sizes: dict[str, object] = {}
    latent = re.search(r"MLA q_lora (\d+) kv_lora (\d+) nope \d+ rope (\d+) v (\d+)", note)
    if latent:
        names = ("q_lora", "kv_lora", "rope_dim", "v_dim")
        sizes |= dict(zip(names, map(int, latent.groups()), strict=True))
    dense = re.search(r"first (?:(\d+) )?layers? dense ff (\d+)", note)
    if dense:
        sizes |= {"dense_layers": int(dense[1] or 1), "dense_ff": int(dense[2])}
    shared = re.search(r"(\d+) shared experts?", note)
    if shared:
        sizes["shared_experts"] = int(shared[1])
    window = re.search(r"sliding window of (\d+)", note)
    if window:
        some = re.search(r"(\d+) of (\d+) layers", note)
        share = int(some[1]) / int(some[2]) if some else 1.0
        share = 0.5 if "every second layer" in note else share
        sizes |= {"window": int(window[1]), "window_share": share}
    return sizes


def read_rows(table: pd.DataFrame) -> tuple[list[StepRow | None], list[str]]:
    """Rows of a table, and for each that cannot be expressed why; empty for the others."""
    rows: list[StepRow | None] = []
    reasons = []
    for record in table.to_dict("records"):
        try:
            rows.append(step_row({str(k): v for k, v in record.items()}))
            reasons.append("")
        except (OpcastError, *FAULTS) as error:
            rows.append(None)
            reasons.append(reason_of(error))
    return rows, reasons


def reason_of(error: Exception) -> str:
    """Why a row has no prediction; one row that opcast fails on does not cost the others."""
    if isinstance(error, OpcastError):
        return str(error)
    return f"opcast fails on this row, please report it: {type(error).__name__}: {error}"
