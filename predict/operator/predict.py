"""Predict and explain a single library operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...common.errors import DatasetError, DeviceError, ModelError
from ...common.interval import InSeconds, latency_fields
from ...common.parquet import read_table
from ...common.types import JsonObject
from ...common.units import duration, size
from ...features.cost.formats import TABLE_FORMATS
from ...features.devices.catalogue import has_ranges
from ...features.devices.device import DeviceSpec
from ...features.operators.columns import OpRows
from ...features.operators.features import op_features
from ...features.operators.query import OTHER_LIBRARIES, parse_op
from ...models.core.store import read_manifest
from ...models.power.caps import capped, fed
from ...models.power.law import Work, board_law, grown_peaks
from ..devices import generation_note, resolve_device
from ..locate import OPERATOR_MODEL, find_model, is_untrained, read_operators
from .case import OperatorCase

if TYPE_CHECKING:
    import pandas as pd

    from ...models.operators import OpModel
    from ...models.operators.explain import OpExplanation
    from ...models.operators.mixture import Member

#: Maximum measured rows to search for neighbours: enough for a dense neighbourhood, few enough to
#: featurize in seconds. Engineering estimate.
MAX_MEASURED = 20_000
#: Ratio of the time from main memory to the roofline above which the effect of the cache is noted.
#: Engineering estimate: smaller ratios lie within the interval.
_CACHED = 1.1


@dataclass(frozen=True)
class OpEstimate(InSeconds):
    """Predicted latency of an operator on a device; times in microseconds.

    Attributes:
        family: ``method/family``.
        device: Name of the device.
        latency_us: Predicted latency.
        lo_us: Lower bound of the 90 % interval.
        hi_us: Upper bound.
        roofline_us: Latency from FLOPs and bytes alone.
        bound: Bottleneck of the analytical estimate.
        scope: ``known``, ``sibling``, ``unseen`` or ``calibrated``.
        in_domain: Whether there are similar training rows.
        outside: Reasons, one per feature, if there are none.
        libraries: If the operator does not name its library: the libraries that the prediction is
            a mixture of, fastest first.
        notes: Notes on the device and the cache.
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
    libraries: tuple[Member, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Return JSON data, as ``opcast predict --json`` prints it."""
        return asdict(self)


def predict_op(case: OperatorCase) -> OpEstimate:
    """Predict an operator.

    Raises:
        ProgramError: The text does not describe an operator.
        DeviceError: The device is unknown, or a cap is outside its range.
        ModelError: The model is not an operator model, or lacks the family.
    """
    spec, price = operator_prices(case)
    return price(spec)


def operator_prices(case: OperatorCase) -> tuple[DeviceSpec, Callable[[DeviceSpec], OpEstimate]]:
    """Return the device of a case, and a function that predicts its operator on a device.

    Raises:
        OpcastError: See :func:`predict_op`.
    """
    row, bundle, spec = asked_operator(case)
    return spec, lambda device: _estimate(row, bundle, device, case.power_cap_w)


def _estimate(
    row: JsonObject, bundle: OpModel, spec: DeviceSpec, power_cap_w: float | None
) -> OpEstimate:
    spec, cap = fed(power_cap_w, spec)
    rows = OpRows.of_one({**row, "device": spec.name})
    prediction, libraries = bundle.with_members(rows, spec)
    times = np.stack([prediction.latency, prediction.lo, prediction.hi], axis=1)
    if cap < 1.0:
        times = capped(times, _work(rows, row["key"], spec, times[:, 0]), cap, board_law(spec))
        libraries = [_capped_member(m, rows, row["key"], spec, cap) for m in libraries]
    return OpEstimate(
        family=row["key"],
        device=spec.name,
        **latency_fields(*map(float, times[0])),
        roofline_us=float(prediction.roofline[0]) * 1e6,
        bound=str(prediction.bound[0]),
        scope=str(prediction.scope[0]),
        in_domain=bool(prediction.in_domain[0]),
        outside=()
        if prediction.in_domain[0]
        else tuple(bundle.families[row["key"]].why_outside(rows, {spec.name: spec})),
        libraries=tuple(sorted(libraries, key=lambda m: m.latency_us)),
        notes=(
            *_cache_note(rows, row["key"], spec, float(prediction.roofline[0])),
            *generation_note(spec),
        ),
    )


def asked_operator(case: OperatorCase) -> tuple[JsonObject, OpModel, DeviceSpec]:
    """Return the row of an operator on a device, a model with its family, and the device."""
    row = parse_op(case.op)
    _check_named(case.device)
    folder = _folder(case.model)
    # Only the requested family: loading the others would take most of the time.
    bundle = read_operators(folder, [row["key"]])
    # The description that the model was trained with takes precedence over the catalogue's.
    spec = resolve_device(case.device, bundle.devices)
    if spec.vendor in OTHER_LIBRARIES:
        own = parse_op(case.op, spec.vendor)
        other = read_operators(folder, [own["key"]])
        if own["key"] in other.families:
            row, bundle = own, other
    _check_family(bundle, row["key"], case.model, folder)
    return row, bundle, spec


def _work(rows: OpRows, key: str, spec: DeviceSpec, seconds: np.ndarray) -> Work:
    """Return how busy operators of a family keep a device's units."""
    found = op_features(rows, key, {spec.name: spec})
    format_ = TABLE_FORMATS.get(rows.texts("dtype")[0], TABLE_FORMATS["bf16"])
    return Work.of(
        found.flops,
        found.moved,
        seconds,
        found.floor_s,
        spec.matrix_peak(format_.rate),
        spec.bandwidth,
        np.full(len(rows), "attention" in key),
        grown_peaks(spec, [format_.rate]),
    )


def _cache_note(rows: OpRows, key: str, spec: DeviceSpec, roofline_s: float) -> tuple[str, ...]:
    """Return a note if the roofline is shorter than the operator's traffic from main memory."""
    moved = float(op_features(rows, key, {spec.name: spec}).moved[0])
    main = moved / spec.bandwidth
    if not spec.cache_bytes or main < _CACHED * roofline_s:
        return ()
    return (
        f"a repeated call finds part of its {size(moved)} in the cache of "
        f"{size(spec.cache_bytes)}, as in the measurements; from main memory alone it would take "
        f"{duration(main * 1e6)}, as does the first call or one after other work",
    )


def _capped_member(member: Member, rows: OpRows, key: str, spec: DeviceSpec, cap: float) -> Member:
    """Return a library's time under a power cap; faster libraries draw more power and slow more."""
    times = np.array([[member.latency_us, member.lo_us, member.hi_us]])
    found = capped(times, _work(rows, key, spec, times[:, 0] * 1e-6), cap, board_law(spec))
    latency, lo, hi = map(float, found[0])
    return replace(member, latency_us=latency, lo_us=lo, hi_us=hi)


def explain_operator(case: OperatorCase, data: Sequence[Path] = (), k: int = 3) -> OpExplanation:
    """Explain the prediction of an operator; the effect of a power cap is one contribution.

    Args:
        case: See :func:`predict_op`.
        data: Operator datasets to search for measured neighbours.
        k: Number of neighbours to list.

    Raises:
        ProgramError: The text does not describe an operator.
        DeviceError: The device is unknown, or a cap is outside its range.
        ModelError: The model is not an operator model, or lacks the family.
        DatasetError: A dataset cannot be read.
    """
    from ...models.operators.explain import explain_op

    row, bundle, spec = asked_operator(case)
    spec, cap = fed(case.power_cap_w, spec)
    measured = measured_rows(data, row["key"], spec.name) if data else None
    found = explain_op(bundle.families[row["key"]], row, spec, measured, k)
    rows = OpRows.of_one({**row, "device": spec.name})
    prediction, _ = bundle.with_members(rows, spec)
    ends = latency_fields(
        *(float(each[0]) for each in (prediction.latency, prediction.lo, prediction.hi))
    )
    found = replace(found, lo_us=ends["lo_us"], hi_us=ends["hi_us"])
    cached = _cache_note(rows, row["key"], spec, found.roofline_us * 1e-6)
    found = replace(found, notes=(*found.notes, *cached, *generation_note(spec)))
    return found if cap == 1.0 else _explained_under_cap(found, row, spec, cap)


def _explained_under_cap(
    found: OpExplanation, row: JsonObject, spec: DeviceSpec, cap: float
) -> OpExplanation:
    """Add the effect of a power cap to an explanation."""
    from ...models.contributions import POWER_CAP, ranked

    rows = OpRows.of_one({**row, "device": spec.name})
    times = np.array([[found.latency_us, found.lo_us, found.hi_us]])
    work = _work(rows, found.family, spec, times[:, 0] * 1e-6)
    latency, lo, hi = map(float, capped(times, work, cap, board_law(spec))[0])
    slower = float(np.log(latency / found.latency_us))
    parts = {c.group: c.log_ratio for c in found.contributions}
    return replace(
        found,
        latency_us=latency,
        lo_us=lo,
        hi_us=hi,
        log_ratio=found.log_ratio + slower,
        contributions=ranked({**parts, POWER_CAP: slower}, 0.0),
        libraries=tuple(_capped_member(m, rows, found.family, spec, cap) for m in found.libraries),
    )


def _check_named(device: str) -> None:
    """Refuse devices other than a single named one.

    Raises:
        DeviceError: The device is ``local``, since operator models are fitted to published tables
            and nothing is measured here; or there are several, or designs of a file with ranges.
    """
    if "," in device:
        given = " ".join(f"--device {name.strip()}" for name in device.split(",") if name.strip())
        raise DeviceError(
            f"an operator is predicted for one device, not for {device!r}",
            hint=f"for several: opcast export table --op '…' {given} --out FILE.parquet",
        )
    if has_ranges(device):
        raise DeviceError(
            "the file has ranges, and an operator is predicted for one design",
            where=device,
            hint="for all designs: opcast export table --op '…' "
            f"--device {device} --out FILE.parquet; or give one number for each value",
        )
    if device == "local":
        raise DeviceError(
            "an operator needs a device",
            hint="name one with --device, such as h100-sxm; list them with: opcast device --list",
        )


def _folder(model: str | Path) -> Path:
    if str(model) == "roofline" and is_untrained(model):
        raise ModelError(
            "an operator's roofline is printed beside its prediction",
            where="--model roofline",
            hint="omit --model: see the line 'roofline', or roofline_us of --json",
        )
    if is_untrained(model):
        raise ModelError(
            f"{str(model)!r} predicts programs, not single operators",
            hint="omit --model, or give the folder of an operator model",
        )
    return find_model(OPERATOR_MODEL if str(model) == "default" else model)


def _check_family(bundle: OpModel, key: str, model: str | Path, folder: Path) -> None:
    if key not in bundle.families:
        known = sorted(read_manifest(folder).get("families", {}))
        same = [name for name in known if name.split("/")[1] == key.split("/")[1]]
        hint = "train a model on a dataset with this family; the model has: " + ", ".join(known)
        if same:
            hint = f"use --op '{same[0]} …'; the model has: {', '.join(known)}"
        raise ModelError(f"model {str(model)!r} has no operators {key!r}", hint=hint)


def measured_rows(data: Sequence[Path], key: str, device: str) -> pd.DataFrame | None:
    """Read a family's measured rows on a device, at most :data:`MAX_MEASURED`; else ``None``.

    Raises:
        DatasetError: A folder holds no dataset.
    """
    import pandas as pd

    from ...features.operators.hlo import op_frame

    parts = []
    for folder in data:
        shards = sorted(folder.glob("*.parquet"))
        if not shards:
            raise DatasetError("no dataset here; expected *.parquet", where=str(folder))
        # Pushed down to parquet: shards hold many families and devices.
        wanted = [("family", "==", f"op:{key}"), ("device", "==", device)]
        columns = ["program", "kernel_ir", "latency_us_p50", "device"]
        parts += [read_table(s, columns, wanted) for s in shards]
    measured = pd.concat(parts, ignore_index=True)
    if not len(measured):
        return None
    if len(measured) > MAX_MEASURED:
        # A fixed sample, so that explanations are reproducible; sorted to keep the order of rows.
        keep = np.random.default_rng(0).choice(len(measured), MAX_MEASURED, replace=False)
        measured = measured.iloc[np.sort(keep)].reset_index(drop=True)
    rows = op_frame(measured["kernel_ir"])
    return rows.assign(id=measured["program"], device=device, latency_us=measured["latency_us_p50"])
