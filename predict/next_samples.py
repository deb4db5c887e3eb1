"""Choose operators or kernels to measure so that a prediction's interval narrows most."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from ..common.errors import ProgramError
from ..common.interval import Interval
from ..features.operators.columns import OpRows
from ..features.operators.schema import FAMILIES
from ..models.adapt.active import Errors, RemainingVariance, errors_at
from ..models.adapt.device_correction import kernel_sites, prior_params
from ..models.core.base import distinct
from ..models.core.kernel_table import kernel_table
from ..models.operators.device_errors import OF_LIBRARY
from ..models.operators.explain import other_sizes, typical_member
from .next_runs import NextRuns, Run, next_runs, variance_of
from .operator.case import OperatorCase
from .operator.predict import asked_operator
from .program.prediction import origin
from .program.predictor import Predictor, ProgramCase

#: PyTorch names of the formats used in tables.
_TORCH = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
#: Operand shapes of products, and the PyTorch expression that computes them.
_PRODUCTS = {
    "linear": ("m k", "n k", "torch.nn.functional.linear(a, b)"),
    "bmm": ("b m k", "b k n", "a @ b"),
}


def next_operators(case: OperatorCase, count: int, price: float | None = None) -> NextRuns:
    """Choose operators to measure on the device, including the requested one.

    Args:
        case: The operator and device.
        count: Number of operators.
        price: Price of a device hour; if given, gains are weighed against costs.

    Raises:
        OpcastError: As for :func:`~opcast.predict.operator.predict.predict_op`.
    """
    row, bundle, spec = asked_operator(case)
    model, specs = bundle.families[row["key"]], {spec.name: spec}
    asked = pd.DataFrame([{**row, "device": spec.name}])
    prediction, members = model.with_members(OpRows.of(asked), specs)
    named = typical_member(members, float(prediction.latency[0]))
    others = other_sizes({**row, **named}, FAMILIES[model.family], spec.name)
    # The requested operator is a candidate, too, and is appended once more as the target.
    asked = asked.assign(**named)
    rows = pd.concat([asked, others, asked], ignore_index=True)
    rows = pd.concat([rows.iloc[:-1].drop_duplicates(), rows.iloc[-1:]], ignore_index=True)
    features = model.features(rows, specs)
    # Operators that exceed the device's memory cannot be measured; the target stays at the end.
    held = features.moved <= (spec.usable_bytes or np.inf)
    held[-1] = True
    asked_about = Interval(
        *(float(x[0]) for x in (prediction.latency, prediction.lo, prediction.hi))
    )
    if held.sum() == 1:
        return NextRuns(asked_about, (), (), ("the device has no room for operators such as this",))
    rows, features = rows[held].reset_index(drop=True), model.features(rows[held], specs)
    sites = model.fitted.errors.sites(OpRows.of(rows), features, specs)
    library = str(named.get("backend") or row.get("backend") or "")
    corrections = model.corrections
    known = corrections.get(f"{spec.name}{OF_LIBRARY}{library}", corrections.get(spec.name))
    errors = errors_at(sites, model.fitted.errors.params, known.sites if known else None)
    seconds = model.predict(rows, specs).latency
    runs = [
        Run(_text(case.op, own, named), _command(own) if spec.platform == "gpu" else "", float(s))
        for own, s in zip(rows.to_dict("records")[:-1], seconds[:-1], strict=True)
    ]
    return next_runs(
        asked_about,
        runs,
        errors,
        count,
        kind="operator",
        price=price,
        then=(
            f"opcast calibrate --device {case.device} --data ROWS --samples {count} --out adapted",
            f"opcast predict --op '{case.op}' --device {case.device} --model adapted",
        ),
        notes=["ROWS is a table of the measured times (docs/operator-tables.md)"],
    )


def _text(asked: str, row: Mapping[object, object], named: Mapping[str, str]) -> str:
    """Return an operator of other sizes than the requested one, as text for ``--op``."""
    head, *pairs = asked.split()
    names = [pair.partition("=")[0] for pair in pairs]
    own = [*names, *(name for name, value in named.items() if value and name not in names)]
    return " ".join([head, *(f"{name}={row.get(name, '')}" for name in own)])


def _command(row: Mapping[object, object]) -> str:
    """Return a PyTorch command that times a product; empty for other operators."""
    dtype = _TORCH.get(str(row["dtype"]))
    if row["family"] not in _PRODUCTS or dtype is None:
        return ""
    first, second, call = _PRODUCTS[str(row["family"])]
    made = [
        f"{name} = torch.randn({', '.join(str(row[size]) for size in sizes.split())}, "
        f"device='cuda', dtype=torch.{dtype})"
        for name, sizes in (("a", first), ("b", second))
    ]
    setup = f"import torch; {'; '.join(made)}; wait = torch.cuda.synchronize"
    return f'python -m timeit -n 1 -s "{setup}" "for _ in range(100): {call}" "wait()"'


def next_kernels(
    predictor: Predictor, case: ProgramCase, count: int, price: float | None = None
) -> NextRuns:
    """Choose kernels of a program to measure, in isolation or within any program.

    Args:
        predictor: Predictor of the program.
        case: The program and device.
        count: Number of kernels; equal ones count once.
        price: Price of a device hour; if given, gains are weighed against costs.

    Raises:
        OpcastError: The program, device or lowering is not usable.
    """
    _, lowered, device = case.lower(predictor)
    prediction = predictor.predict_lowered(lowered, device)
    if not lowered.kernels:
        raise ProgramError("the program has no kernel", hint="nothing can be measured of it")
    kernels, index = distinct(lowered.kernels)
    total = np.bincount(index, [k.total_us for k in prediction.kernels], len(kernels))
    first = [int(np.argmax(index == place)) for place in range(len(kernels))]
    share = total / (total.sum() or 1.0)
    sites = kernel_sites(kernel_table(kernels, device), device)
    known = predictor.model_for(device).corrections.get(device.name)
    measured = known.correction.sites if known else None
    # As in opcast calibrate --budget: the parameters are already cautious, so no variants.
    left = RemainingVariance.of(sites, prior_params(), share, measured)
    errors = _with_sum(Errors(left.posterior, left.noise), share)
    ends = (prediction.latency_us, prediction.lo_us, prediction.hi_us)
    asked = Interval(*(us * 1e-6 for us in ends))
    # Errors specific to each kernel average out over a program.
    stays = left.noise * float((share**2).sum())
    told = max(variance_of(asked) - stays, 0.0)
    runs = [
        Run(f"{own.name} ({part:.0%} of the time; {origin(own)})", "", own.latency_us * 1e-6)
        for own, part in zip((prediction.kernels[at] for at in first), share.tolist(), strict=True)
    ]
    return next_runs(
        asked,
        runs,
        [errors.given(told)],
        count,
        kind="kernel",
        price=price,
        stays=stays,
        then=(
            "opcast campaign --programs FOLDER --out measured   # on the device; "
            "FOLDER holds the program, or smaller ones with these kernels",
            "opcast data import campaign measured --out rows",
            f"opcast calibrate --device {device.name} --data rows --samples {count} --out adapted",
        ),
    )


def _with_sum(errors: Errors, share: np.ndarray) -> Errors:
    """Append the error of the sum of kernels, weighted by their shares of the time."""
    joint = np.vstack([np.eye(len(share)), share])
    return Errors(joint @ errors.covariance @ joint.T, errors.noise)
