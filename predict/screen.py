"""Predict thousands of candidates at once and select those worth measuring.

A candidate is a mapping, such as a line of JSON: an operator of a library (``op`` with sizes), a
kernel with a tile configuration (``op``, ``implementation``, ``args``, ``config``), or a training
step under a plan (``workload``, ``cluster``, ``plan``). Candidates of one ``group`` compete: each
gets the probability that it is the fastest, or within :data:`CLOSE` of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ..common.errors import OpcastError, ProgramError, meant
from ..common.files import parse_json
from ..common.interval import latency_fields
from ..common.types import JsonMapping, JsonObject
from ..models.tile_rows import FLAGS, SIZES
from ..models.trust.calibrator import NORMAL_90

if TYPE_CHECKING:
    from ..simulate.step.workload import Workload
    from .cluster.step import StepPredictor

#: Function that predicts the candidates of one kind.
Answering = Callable[[Sequence[JsonObject]], "Sequence[Screened | OpcastError]"]
#: Fraction by which a candidate may be slower than the fastest and still count as fastest.
CLOSE = 0.05
#: Number of error samples; the standard error of a probability of 5 % is 0.7 %.
_DRAWS = 1000
#: Minimum probability on a device without similar measurements. With each device of the table of
#: tiles left out, 13 % of the candidates whose probability comes out below 5 % are among the
#: fastest (tests/predict/test_screen.py): there the order is too uncertain to discard any.
LEAST_UNSEEN = 0.2
#: Scopes of estimates based on measurements of the device or of a similar one.
_KNOWN = ("known", "sibling", "calibrated")
#: Scope that corresponds to each tier of a training step's prediction.
_OF_TIERS = {"cluster": "known", "framework": "known", "architecture": "sibling", "new": "unseen"}


@dataclass(frozen=True)
class Screened:
    """Predicted time of a candidate, in microseconds.

    Attributes:
        latency_us: Estimate.
        lo_us: Lower bound of the 90 % interval.
        hi_us: Upper bound.
        scope: Basis of the estimate: ``known``, ``sibling``, ``calibrated`` or ``unseen``.
        chance: Probability of being among the fastest of its group; ``None`` without a group.
        fits: Whether a plan fits the memory of its devices; ``None`` for other candidates.
        reason: What does not fit, and the smallest change that would make it fit.
    """

    latency_us: float
    lo_us: float
    hi_us: float
    scope: str
    chance: float | None = None
    fits: bool | None = None
    reason: str = ""


def chances(
    latency: np.ndarray, lo: np.ndarray, hi: np.ndarray, groups: Sequence[Hashable]
) -> np.ndarray:
    """Return each candidate's probability of being within :data:`CLOSE` of its group's fastest.

    Errors are log-normal on each side and independent. Common errors, which do not change an order,
    are thus counted as well, so fewer candidates are discarded than possible.

    Args:
        latency: Estimates, shape ``(n,)``.
        lo: Lower bounds of their 90 % intervals.
        hi: Upper bounds.
        groups: Group of each candidate; candidates of a group compete.

    Returns:
        Probabilities, shape ``(n,)``.
    """
    _, own = np.unique([str(group) for group in groups], return_inverse=True)
    order = np.argsort(own, kind="stable")
    starts = np.flatnonzero(np.diff(own[order], prepend=-1))
    place = own[order]
    middle = np.log(latency[order])
    ends = np.log(latency[order] / lo[order]), np.log(hi[order] / latency[order])
    below, above = (end / NORMAL_90 for end in ends)
    random, count = np.random.default_rng(0), np.zeros(len(order))
    for _ in range(_DRAWS):
        error = random.standard_normal(len(order))
        drawn = middle + error * np.where(error < 0.0, below, above)
        count += drawn <= np.minimum.reduceat(drawn, starts)[place] + np.log1p(CLOSE)
    found = np.empty(len(order))
    found[order] = count / _DRAWS
    return found


def screen(candidates: Sequence[JsonMapping], device: str = "") -> list[Screened | OpcastError]:
    """Predict candidates and their probabilities of being among the fastest of their groups.

    Args:
        candidates: Candidates as described in the module's docstring. Without a ``group``, kernels
            with tiles and plans compete with those of the same problem, other operators with none.
        device: Device of candidates that do not name one.

    Returns:
        For each candidate its answer or error. Plans that do not fit do not compete.
    """
    found: list[Screened | OpcastError] = [ProgramError("not answered")] * len(candidates)
    groups: dict[int, Hashable] = {}
    asked: dict[Answering, list[int]] = {}
    given = [_given(candidate, device) for candidate in candidates]
    for number, own in enumerate(given):
        kind: Answering = _tiles if "implementation" in own else _operators
        if "plan" in own or "workload" in own:
            kind = _plans
        wrong = _unknown(candidates[number], kind) or _lacking(own, kind)
        if wrong is not None:
            found[number] = wrong
            continue
        asked.setdefault(kind, []).append(number)
        if group := own.get("group"):
            groups[number] = str(group)
        elif kind is not _operators:
            groups[number] = _problem(kind, own)
    for kind, numbers in asked.items():
        answers = _each(kind, [given[number] for number in numbers])
        for number, answer in zip(numbers, answers, strict=True):
            found[number] = answer
    known = [
        (n, own)
        for n, own in enumerate(found)
        if isinstance(own, Screened) and n in groups and own.fits is not False
    ]
    if known:
        latency, low, high = np.array([(o.latency_us, o.lo_us, o.hi_us) for _, o in known]).T
        likely = chances(latency, low, high, [groups[n] for n, _ in known]).tolist()
        for (n, answer), chance in zip(known, likely, strict=True):
            least = 0.0 if answer.scope in _KNOWN else LEAST_UNSEEN
            found[n] = replace(answer, chance=max(chance, least))
    return found


def answer_lines(
    lines: Iterable[str], device: str = "", least: float = 0.05
) -> Iterator[list[JsonObject]]:
    """Answer lines of JSON in order; an empty line ends a batch, within which candidates compete.

    Args:
        lines: One JSON object per line.
        device: Device of candidates that do not name one.
        least: Minimum probability of being among the fastest that is worth a measurement.

    Yields:
        Per batch, for each candidate: the fields of :class:`Screened`, its ``id`` if given, and
        ``measure`` if it competes with others or does not fit; or ``error``.
    """
    batch: list[JsonObject] = []
    for line in chain(lines, [""]):
        if line.strip():
            batch.append(_read(line))
            continue
        good = [own for own in batch if "error" not in own]
        answers = iter(screen(good, device))
        told = [own if "error" in own else _told(own, next(answers), least) for own in batch]
        if told:
            yield told
        batch = []


def _read(line: str) -> JsonObject:
    try:
        found = parse_json(line)
    except ValueError as error:
        how = 'an operator is {"op": "…"}, or its text in quotation marks'
        return {"error": f"not JSON: {error} ({how})"}
    if isinstance(found, str):
        return {"op": found}
    return found if isinstance(found, dict) else {"error": "not a JSON object"}


def _told(asked: JsonObject, answer: Screened | OpcastError, least: float) -> JsonObject:
    named = {"id": asked["id"]} if "id" in asked else {}
    if isinstance(answer, OpcastError):
        return {**named, "error": str(answer)}
    own = {k: v for k, v in asdict(answer).items() if k == "chance" or v not in (None, "")}
    said = {**named, **own}
    if answer.fits is False:
        return {**said, "measure": False}
    return said if answer.chance is None else {**said, "measure": answer.chance >= least}


def _given(candidate: JsonMapping, device: str) -> JsonObject:
    own = {"device": device, **candidate} if device else dict(candidate)
    # Settings may be an object as well as text.
    pairs = ((name, own.get(name)) for name in ("set", "plan"))
    texts = {
        name: ",".join(f"{key}={value}" for key, value in sorted(given.items()))
        for name, given in pairs
        if isinstance(given, Mapping)
    }
    return {**own, **texts}


def _unknown(candidate: JsonMapping, kind: Answering) -> ProgramError | None:
    """Return the error for an unknown key of a candidate; ignoring it would hide a misspelling."""
    own = (*_NEEDED[kind], *_OPTIONAL[kind], *_OF_ALL)
    for key in candidate:
        if key not in own:
            what = f"unknown key {key!r} of {_NAMED[kind]}"
            return ProgramError(what, hint=meant(key, tuple(dict.fromkeys(own))))
        if key in _TEXTS and not isinstance(candidate[key], str | None):
            return ProgramError(f"{key} is text in quotation marks, not {candidate[key]!r}")
    return None


def _lacking(own: JsonMapping, kind: Answering) -> ProgramError | None:
    lacking = [name for name in _NEEDED[kind] if not own.get(name)]
    also = " or --device" if "device" in lacking else ""
    return ProgramError(f"give {', '.join(lacking)}{also}") if lacking else None


def _problem(kind: Answering, own: JsonObject) -> Hashable:
    """Return the problem that a candidate solves, independent of notation; equal problems compete.

    Returns an empty string for a faulty candidate, whose answer reports the error.
    """
    from ..features.devices.catalogue import find_device
    from ..simulate.clusters.catalogue import find_cluster

    try:
        if kind is _plans:
            return str(find_cluster(str(own["cluster"]))), _workload(own)
        args = own["args"] if not isinstance(own["args"], str) else parse_json(own["args"])
        name = find_device(str(own["device"])).name
        return name, str(own["op"]), json.dumps(args, sort_keys=True)
    except (OpcastError, ValueError, TypeError):
        return ""


def _workload(own: JsonMapping) -> Workload:
    """Return the model and batch of a plan, with defaults filled in."""
    return _read_workload(str(own["workload"]), str(own.get("set", "")))


@lru_cache(maxsize=64)
def _read_workload(name: str, settings: str) -> Workload:
    from ..simulate.step.named_workloads import read_workload
    from ..simulate.step.settings import sizes_of

    return read_workload(name, sizes_of([settings]))


def _each(kind: Answering, asked: Sequence[JsonObject]) -> list[Screened | OpcastError]:
    """Answer candidates of one kind all at once, or by halves if one of them is faulty."""
    try:
        return list(kind(asked))
    except OpcastError as error:
        wrong = error
    except (KeyError, ValueError, TypeError) as error:
        wrong = ProgramError(f"not as described: {type(error).__name__}: {error}")
    if len(asked) == 1:
        return [wrong]
    # Bisection, so that a few faulty ones among thousands cost little.
    middle = len(asked) // 2
    return [*_each(kind, asked[:middle]), *_each(kind, asked[middle:])]


def _rows(
    latency: np.ndarray, lo: np.ndarray, hi: np.ndarray, scope: Sequence[str]
) -> list[Screened]:
    """Return answers from times in seconds."""
    times = (each.tolist() for each in latency_fields(latency, lo, hi).values())
    return [
        Screened(middle, low, high, str(kind))
        for middle, low, high, kind in zip(*times, scope, strict=True)
    ]


def _operators(asked: Sequence[JsonObject]) -> list[Screened]:
    from ..features.operators.query import OTHER_LIBRARIES, parse_op
    from .devices import resolve_device
    from .locate import OPERATOR_MODEL, find_model, read_operators

    specs = {name: resolve_device(name, {}) for name in {str(own["device"]) for own in asked}}
    rows = []
    for own in asked:
        spec = specs[str(own["device"])]
        vendor = spec.vendor if spec.vendor in OTHER_LIBRARIES else ""
        rows.append({**parse_op(str(own["op"]), vendor), "device": spec.name})
    keys = sorted({str(row["key"]) for row in rows})
    model = read_operators(find_model(OPERATOR_MODEL), keys)
    # A device of the model keeps the model's description.
    model.described.update((s.name, s) for s in specs.values() if s.name not in model.devices)
    said = model.predict(pd.DataFrame(rows))
    return _rows(said.latency, said.lo, said.hi, said.scope.tolist())


def _tiles(asked: Sequence[JsonObject]) -> list[Screened]:
    from ..models.tile_rows import tile_rows
    from ..models.tiles import TileModel
    from .published.tile_table import check_settings

    texts = [
        {k: json.dumps(v) if k in ("args", "config") and not isinstance(v, str) else v
         for k, v in own.items()}
        for own in asked
    ]  # fmt: skip
    rows, model = tile_rows(pd.DataFrame(texts)), TileModel.find()
    check_settings(rows, model)
    said = model.predict(rows)
    return _rows(said.seconds, said.lo, said.hi, said.scope.tolist())


def _plans(asked: Sequence[JsonObject]) -> list[Screened | OpcastError]:
    found: list[Screened | OpcastError] = []
    for own in asked:
        # Individually, since steps are not priced in batches.
        try:
            found.append(_plan(own))
        except OpcastError as error:
            found.append(error)
    return found


def _plan(own: JsonObject) -> Screened:
    from .cluster.step_case import StepCase

    case = StepCase(
        cluster=str(own["cluster"]),
        workload=str(own["workload"]),
        framework=str(own.get("framework", "")),
        plan=str(own.get("plan", "")),
    )
    predictor = _step_predictor(case.cluster, case.framework)
    said = case.by(predictor, _workload(own))
    middle, low, high = (1e6 * end for end in said.interval)
    scope = _OF_TIERS[said.known]
    return Screened(middle, low, high, scope, fits=said.fit.fits, reason=said.fit.reason())


#: Required keys of each kind of candidate.
_NEEDED: dict[Answering, tuple[str, ...]] = {
    _operators: ("op", "device"),
    _tiles: ("op", "implementation", "args", "device"),
    _plans: ("workload", "cluster"),
}
#: Optional keys of each kind.
_OPTIONAL: dict[Answering, tuple[str, ...]] = {
    _operators: (),
    _tiles: ("config", *SIZES, *FLAGS),
    _plans: ("plan", "set", "framework"),
}
#: Optional keys of every kind.
_OF_ALL = ("device", "group", "id")
#: Keys whose values are text.
_TEXTS = ("op", "implementation", "workload", "cluster", "framework", "device")
#: Name of each kind in messages.
_NAMED: dict[Answering, str] = {
    _operators: "an operator",
    _tiles: "a kernel with tiles",
    _plans: "a step under a plan",
}


@lru_cache(maxsize=8)
def _step_predictor(cluster: str, framework: str) -> StepPredictor:
    from ..models.core.registry import OPERATOR_MODEL
    from .cluster.step_case import StepsBy
    from .operator.step_operators import load_step_model

    return StepsBy(framework=framework).predictor(cluster, load_step_model(OPERATOR_MODEL))
