"""Predicts and explains one operator of a library, given by its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ..features.errors import DatasetError, DeviceError, ModelError
from ..features.ops.query import parse_op
from ..features.tables import read_table
from .devices import resolve_device
from .locate import OPERATOR_MODEL, find_model
from .render import duration, headline

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from ..models.ops.explain import OpExplanation
    from ..models.ops.family import FamilyModel

#: Measured rows to look for neighbours among.
MAX_MEASURED = 20_000
#: Reasons for being outside the domain that are printed.
SHOWN_REASONS = 4


@dataclass(frozen=True)
class OpEstimate:
    """How long an operator takes on a device; times in microseconds.

    Attributes:
        family: ``method/family``.
        device: Where it runs.
        latency_us: Predicted.
        lo_us: Lower end of the 90 % interval.
        hi_us: Upper end.
        roofline_us: From FLOPs and bytes alone.
        bound: What limits the analytical estimate.
        scope: ``known``, ``sibling``, ``unseen`` or ``calibrated``.
        in_domain: Whether training rows are near.
        outside: Why not, if they are not.
    """

    family: str
    device: str
    latency_us: float
    lo_us: float
    hi_us: float
    roofline_us: float
    bound: str
    scope: str
    in_domain: bool
    outside: tuple[str, ...] = ()


def predict_op(text: str, device: str, model: str | Path = OPERATOR_MODEL) -> OpEstimate:
    """Predict an operator.

    Args:
        text: As :func:`~opcast.features.ops.query.parse_op` takes it.
        device: Name, or path of a device file.
        model: Name or folder of a model of operators; ``default`` is the shipped one.

    Raises:
        ProgramError: The text is no operator.
        DeviceError: The device is not known.
        ModelError: The model is none of operators, or does not know the family.
    """
    from ..models.ops import OpModel

    row = parse_op(text)
    if device == "local":
        raise DeviceError(
            "an operator needs a device",
            hint="name one with --device, such as h100-sxm; list them with: opcast device --list",
        )
    bundle = OpModel.load(_folder(model), only=[row["key"]])
    family = _family(bundle, row["key"], model)
    spec = resolve_device(device, bundle.devices)
    frame = pd.DataFrame([{**row, "device": spec.name}])
    found = family.predict(frame, {spec.name: spec})
    return OpEstimate(
        family=row["key"],
        device=spec.name,
        latency_us=float(found.latency[0]) * 1e6,
        lo_us=float(found.lo[0]) * 1e6,
        hi_us=float(found.hi[0]) * 1e6,
        roofline_us=float(found.roofline[0]) * 1e6,
        bound=str(found.bound[0]),
        scope=str(found.scope[0]),
        in_domain=bool(found.in_domain[0]),
        outside=() if found.in_domain[0] else tuple(family.why_outside(frame, {spec.name: spec})),
    )


def explain_operator(
    text: str,
    device: str,
    model: str | Path = OPERATOR_MODEL,
    data: Sequence[Path] = (),
    k: int = 3,
) -> OpExplanation:
    """Explain the prediction of an operator; see :func:`predict_op`.

    Args:
        text: The operator.
        device: Where it runs.
        model: Model of operators.
        data: Datasets of operators to look for measured neighbours in.
        k: Neighbours to name.

    Raises:
        DatasetError: A dataset cannot be read.
    """
    from ..models.ops import OpModel
    from ..models.ops.explain import explain_op

    row = parse_op(text)
    bundle = OpModel.load(_folder(model), only=[row["key"]])
    family = _family(bundle, row["key"], model)
    spec = resolve_device(device, bundle.devices)
    measured = measured_rows(data, row["key"], spec.name) if data else None
    return explain_op(family, row, spec, measured, k)


def _folder(model: str | Path) -> Path:
    return find_model(OPERATOR_MODEL if str(model) == "default" else model)


def _family(bundle: Any, key: str, model: str | Path) -> FamilyModel:
    if key not in bundle.families:
        raise ModelError(
            f"model {str(model)!r} knows no operators {key!r}",
            hint="train one on a dataset that has them",
        )
    found: FamilyModel = bundle.families[key]
    return found


def measured_rows(data: Sequence[Path], key: str, device: str) -> pd.DataFrame | None:
    """Measured rows of a family on a device, at most :data:`MAX_MEASURED`; ``None`` for none.

    Raises:
        DatasetError: A folder holds no dataset.
    """
    from ..features.ops.ir import op_frame

    parts = []
    for folder in data:
        shards = sorted(folder.glob("*.parquet"))
        if not shards:
            raise DatasetError("no dataset here: expected *.parquet", where=str(folder))
        wanted = [("family", "==", f"op:{key}"), ("device", "==", device)]
        columns = ["program", "kernel_ir", "latency_us_p50", "device"]
        parts += [read_table(s, columns, wanted) for s in shards]
    found = pd.concat(parts, ignore_index=True)
    if not len(found):
        return None
    if len(found) > MAX_MEASURED:
        keep = np.random.default_rng(0).choice(len(found), MAX_MEASURED, replace=False)
        found = found.iloc[np.sort(keep)].reset_index(drop=True)
    rows = op_frame(found["kernel_ir"])
    return rows.assign(id=found["program"], device=device, latency_us=found["latency_us_p50"])


def print_op(console: Console, found: OpEstimate) -> None:
    """Print a prediction in two lines."""
    console.print(_headline(found, found.family))
    console.print(
        f"  roofline {duration(found.roofline_us)} [{found.bound}]; {_trust(found)}",
        highlight=False, markup=False,
    )  # fmt: skip
    for reason in found.outside[:SHOWN_REASONS]:
        console.print(f"  outside: {reason}", highlight=False, markup=False)
    if len(found.outside) > SHOWN_REASONS:
        rest = len(found.outside) - SHOWN_REASONS
        console.print(f"  outside: {rest} more reasons (--json)", highlight=False)


def print_op_explanation(console: Console, found: OpExplanation) -> None:
    """Print what a prediction is made of."""
    from rich.text import Text

    console.print(_headline(found, found.family))
    console.print(
        f"  {duration(found.latency_us)} = analytical estimate {duration(found.base_us)} "
        f"[{found.bound}] × {found.factor:.2f}; roofline {duration(found.roofline_us)}",
        highlight=False, markup=False,
    )  # fmt: skip
    terms = ", ".join(f"{name} {duration(us)}" for name, us in _known(found.terms).items())
    console.print(f"  estimate of {terms}; what overlaps does not add up", highlight=False)
    parts = [("in other sizes", found.baseline)]
    parts += [(c.group, c.log_ratio) for c in found.contributions]
    console.print(_factors([*parts, ("together", found.log_ratio)]))
    console.print(f"  {_trust(found)}", highlight=False)
    for near in found.neighbours:
        console.print(
            f"  measured {duration(near.measured_us)} at distance {near.distance:.2f}: "
            f"{near.label}",
            highlight=False, markup=False,
        )  # fmt: skip
    for note in found.notes:
        console.print(Text(f"note: {note}", style="yellow"))


def _headline(found: OpEstimate | OpExplanation, what: str) -> Text:
    return headline(
        duration(found.latency_us),
        f"  (90 % interval {duration(found.lo_us)} to {duration(found.hi_us)})"
        f"  {what} on {found.device}",
    )


def _trust(found: OpEstimate | OpExplanation) -> str:
    side = "inside" if found.in_domain else "outside"
    return f"device {found.scope}, {side} the training domain"


def _known(terms: Mapping[str, float]) -> dict[str, float]:
    return {name: us for name, us in terms.items() if us > 0}


def _factors(parts: Sequence[tuple[str, float]]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2), header_style="bold")
    table.add_column("  learned on top, by group")
    table.add_column("factor", justify="right")
    table.add_column("log", justify="right")
    for name, value in parts:
        table.add_row(f"  {name}", f"× {np.exp(value):.2f}", f"{value:+.3f}")
    return table
