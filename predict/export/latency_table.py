"""Latency tables of operators and kernels on devices, with intervals, for use by other tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ...common.errors import ProgramError
from ...common.interval import LATENCY_KEYS, latency_fields
from ...features.devices.catalogue import Design
from ...features.devices.device import DeviceSpec
from ...features.ir.jax_function import FunctionCall
from ...features.kernels.kernel import LoweredProgram
from ...features.lowering.lower import lower
from ...features.operators import op_features
from ...features.operators.query import parse_op
from ...features.operators.schema import FAMILIES, PARAMETERS
from ...models.cost_model import CostModel
from ...models.operators import OpModel
from ..devices import generation_note
from ..operator.prices import ROOFLINE_FACTOR
from ..program.many import find_chips
from ..program.prediction import check_known
from ..program.predictor import Predictor

#: Columns of a table. ``shape`` is JSON; times are per execution, in microseconds.
COLUMNS = ("op", "shape", "dtype", "device", *LATENCY_KEYS, "source", "in_domain")
#: Maximum number of rows: a larger grid is most likely a mistake. Engineering estimate.
MOST_ROWS = 1_000_000


def latency_table(
    devices: Sequence[str],
    grids: Sequence[str],
    operators: OpModel | None,
    programs: Sequence[Path | FunctionCall],
    kernels: Predictor | None,
    lowering: str,
) -> tuple[pd.DataFrame, list[str]]:
    """Tabulate the operators of grids and the kernels of programs, for every design of all devices.

    Args:
        devices: Names or files, which may have ranges.
        grids: Grids of operators, see :func:`expand_ops`.
        operators: Operator model; ``None`` for the analytical estimate.
        programs: Files or functions.
        kernels: Predictor of their kernels; ``None`` without programs.
        lowering: Lowering of the programs.

    Returns:
        Columns :data:`COLUMNS` and one per range, and notes on programs and devices.
    """
    parts = []
    designs: list[Design] = []
    notes: list[str] = []
    if grids:
        designs = [own for chip in find_chips(devices, {}) for own in chip.designs]
        texts = [text for grid in grids for text in expand_ops(grid)]
        specs = {own.device.name: own.device for own in designs}
        parts.append(operator_table(texts, specs, operators))
    if kernels is not None:
        # Kernels also support devices known only to the model; operators need a description.
        for chip in find_chips(devices, kernels.devices):
            designs += chip.designs
            for program in programs:
                # A table of many programs should not fail at the first that the compiler refuses.
                # All designs share the kernels of the first.
                lowered = lower(program, lowering, device=chip.designs[0].device, fallback="op")
                notes += lowered.notes
                for _, spec in chip.designs:
                    parts.append(kernel_table(lowered, spec, kernels.model_for(spec)))
    # Programs share kernels, and grids may overlap.
    table = pd.concat(parts, ignore_index=True).drop_duplicates(["op", "shape", "dtype", "device"])
    notes += [note for own in designs for note in generation_note(own.device)]
    return with_figures(table, designs), list(dict.fromkeys(notes))


def expand_ops(text: str) -> list[str]:
    """Expand a grid of operators: ``linear m=1/64 n=4096 k=4096 dtype=bf16`` becomes two operators.

    Raises:
        ProgramError: The grid has more than :data:`MOST_ROWS` operators.
    """
    words = [w.partition("=") for w in text.split()]
    choices = [
        [f"{k}={v}" for v in values.split("/")] if mark else [k] for k, mark, values in words
    ]
    # In floats: a product of many long lists could overflow 64-bit integers silently.
    count = int(np.prod([len(c) for c in choices], dtype=float))
    if count > MOST_ROWS:
        raise ProgramError(
            f"the grid has {count:,} operators", where=f"operator {text!r}", hint="use fewer sizes"
        )
    return [" ".join(c) for c in product(*choices)]


def operator_table(
    texts: Sequence[str], devices: Mapping[str, DeviceSpec], model: OpModel | None
) -> pd.DataFrame:
    """Tabulate latencies of operators on every device.

    Args:
        texts: Operators, as accepted by :func:`~opcast.features.operators.query.parse_op`.
        devices: Descriptions by name.
        model: Operator model; ``None`` for the analytical estimate.

    Returns:
        Columns :data:`COLUMNS`.

    Raises:
        ProgramError: A text does not describe an operator.
        ModelError: The model lacks the family.
    """
    # A user's own model may lack the family of XLA's products on AMD chips.
    known = model is not None and "xla/linear" in model.families
    vendors = {d: spec.vendor if known else "" for d, spec in devices.items()}
    rows = pd.DataFrame([{**parse_op(t, vendors[d]), "device": d} for t in texts for d in devices])
    if model is None:
        times, source, inside = _analytical(rows, devices), np.full(len(rows), "roofline"), False
        return _frame(_named(rows), times, source, inside)
    # Device files may describe devices that are not in the model.
    model.devices.update(devices)
    prediction = model.predict(rows)
    times = np.stack([prediction.latency, prediction.lo, prediction.hi], axis=1)
    scopes = np.array([f"learned:{s}" for s in prediction.scope])
    return _frame(_named(rows), times, scopes, prediction.in_domain)


def kernel_table(lowered: LoweredProgram, device: DeviceSpec, model: CostModel) -> pd.DataFrame:
    """Tabulate latencies of a program's distinct kernels, except those that take no time.

    Returns:
        Columns :data:`COLUMNS`; ``op`` is the opcode and ``shape`` has ``operands`` and
        ``results``, each a list of types, and the hash of the kernel.
    """
    kernels = list({k.hash: k for k in lowered.kernels if k.takes_time}.values())
    prediction = model.predict_kernels(kernels, device)
    check_known(kernels, prediction.source)
    names = pd.DataFrame(
        {
            "op": [k.opcode for k in kernels],
            "shape": [json.dumps(_kernel_shape(k)) for k in kernels],
            "dtype": [k.dtype for k in kernels],
            "device": device.name,
        }
    )
    times = np.stack([prediction.latency, prediction.lo, prediction.hi], axis=1)
    return _frame(names, times, prediction.source, prediction.in_domain)


def with_figures(table: pd.DataFrame, designs: Sequence[Design]) -> pd.DataFrame:
    """Add a column per range of device files, after the device; empty for other devices."""
    figures = {own.device.name: own.figures for own in designs}
    place = list(table.columns).index("device") + 1
    for key in dict.fromkeys(key for own in figures.values() for key in own):
        table.insert(place, key, [figures[name].get(key) for name in table["device"]])
        place += 1
    return table


def _analytical(rows: pd.DataFrame, devices: Mapping[str, DeviceSpec]) -> np.ndarray:
    middle = np.empty(len(rows))
    for key, part in rows.groupby("key", sort=False):
        middle[part.index] = op_features(part.reset_index(drop=True), str(key), devices).base_s
    # The same uncertainty as the roofline of steps, since nothing was learned or measured here.
    return np.stack([middle, middle / ROOFLINE_FACTOR, middle * ROOFLINE_FACTOR], axis=1)


def _named(rows: pd.DataFrame) -> pd.DataFrame:
    shapes = []
    for row in rows.to_dict("records"):
        kept = PARAMETERS[FAMILIES[str(row["key"])]]
        shape: dict[str, object] = {
            c: int(row[c]) for c in kept if row.get(c) == row.get(c, 0) and row.get(c) is not None
        }
        extra = {
            c: row[c]
            for c in ("backend", "kernel", "kv_dtype", "distribution")
            if isinstance(row.get(c), str) and row[c]
        }
        shapes.append(json.dumps({**shape, **extra}))
    names = [
        # A family such as ``elementwise`` has several operators, so names include the operator.
        f"{k}:{o}" if o != f else k
        for k, o, f in zip(rows["key"], rows["op"], rows["family"], strict=True)
    ]
    return pd.DataFrame(
        {"op": names, "shape": shapes, "dtype": rows["dtype"], "device": rows["device"]}
    )


def _kernel_shape(kernel: Any) -> dict[str, object]:
    entry = kernel.body.entry_computation
    operands = [str(t) for o in kernel.op.operands for t in entry.ops[o].results]
    results = [str(t) for t in kernel.op.results]
    return {"operands": operands, "results": results, "kernel": kernel.hash}


def _frame(names: pd.DataFrame, times: np.ndarray, source: Any, inside: Any) -> pd.DataFrame:
    table = names.assign(**latency_fields(*times.T), source=source, in_domain=inside)
    return table[list(COLUMNS)]
