"""Loads of a service, drawn from a few parameters or read from traces, and SLOs of requests."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from math import inf
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pandas as pd

from ...common.errors import DatasetError, PlanError
from ...common.files import parse_json
from ...common.types import JsonObject
from ...simulate.serving.latencies import Slo
from ...simulate.serving.load import Load
from ...simulate.serving.policies import ROUTERS
from ...simulate.step.settings import pairs_of
from .deployment import Deployment
from .serving_case import MOST, LoadSpec

#: Length distributions and their parameters.
LENGTHS = {
    "uniform": "uniform:LEAST:MOST",
    "geometric": "geometric:MEAN",
    "lognormal": "lognormal:MEAN:DEVIATION of the logarithm",
}
#: Trace columns for arrival, prompt and output: opcast's own, those of AzurePublicDataset (LLM
#: inference traces, 2023 and 2024), and those of BurstGPT (Wang et al., 2024).
TRACE_COLUMNS = (
    ("arrival_s", "prompt", "output"),
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    ("Timestamp", "Request tokens", "Response tokens"),
)
#: Tokens per hashed block in Mooncake traces (Qin et al., Mooncake, FAST 2025).
MOONCAKE_BLOCK = 512
#: Default number of requests: of a closed loop per request in flight, as benchmark scripts send
#: (InferenceX: 10), and of other loads.
WAVES, COUNT = 10, 1000
#: Simulated requests of a closed loop without a given number: the minimum per request in flight,
#: and the maximum of all where that allows it; the last ones represent the rest.
LEAST_WAVES, MOST_REQUESTS = 3, 3000
#: Relative difference below which two rates are considered equal.
RATE_TIE = 0.02
#: Fields of :class:`LoadSpec` under another name in text.
_TEXT_NAMES = {"requests": "trace"}


def draw(spec: LoadSpec) -> Load:
    """Draw the requests of a load, or read them from its trace.

    Raises:
        PlanError: A figure is out of its range.
        DatasetError: The trace cannot be read.
    """
    if spec.requests is not None:
        return read_trace(spec.requests)
    if not 0 <= spec.rate < np.inf or not 0 < spec.burstiness < np.inf:
        raise PlanError(
            f"rate={spec.rate:g}, burstiness={spec.burstiness:g}",
            where="load",
            hint="the rate must be finite and at least 0, burstiness above 0",
        )
    if min(spec.concurrency, spec.batch, spec.count) < 0 or spec.count > MOST:
        raise PlanError(
            f"concurrency={spec.concurrency}, batch={spec.batch}, count={spec.count}",
            where="load",
            hint=f"none may be negative, and count is at most {MOST}",
        )
    count = spec.count or WAVES * spec.concurrency or COUNT
    count = spec.batch if spec.kind == "static-batch" else count
    asked = count
    if spec.concurrency and not spec.count:
        count = min(count, max(LEAST_WAVES * spec.concurrency, MOST_REQUESTS))
    rng = np.random.default_rng(spec.seed)
    arrivals = np.zeros(count)
    if spec.kind == "open-poisson":
        shape = spec.burstiness
        arrivals = np.cumsum(rng.gamma(shape, 1.0 / (spec.rate * shape), count))
    prompts, outputs = (parse_lengths(t)(rng, count) for t in (spec.prompt, spec.output))
    return Load(prompts, outputs, arrivals, spec.concurrency, stands_for=asked)


def parse_load(text: str) -> LoadSpec:
    """Parse a load such as ``concurrency=64,prompt=1024,output=256`` or ``trace=FILE``.

    Raises:
        PlanError: A name is unknown, or a value invalid.
    """
    named = get_type_hints(LoadSpec)
    kinds: dict[str, Callable[[str], Any]] = {
        _TEXT_NAMES.get(f.name, f.name): Path if f.name == "requests" else named[f.name]
        for f in fields(LoadSpec)
    }
    found: JsonObject = {}
    hint = "NAME=VALUE: " + ", ".join(kinds)
    for name, value in pairs_of(text, "load", hint).items():
        if name not in kinds or not value:
            raise PlanError(f"'{name}={value}' is not an option of a load", hint=hint)
        try:
            found[name] = kinds[name](value)
        except ValueError:
            raise PlanError(f"'{name}={value}' is not a number", where="load") from None
    modes = [name for name in ("trace", "concurrency", "batch", "rate") if name in found]
    drawn = {"prompt", "output", "count", "seed", "burstiness"}
    if len(modes) > 1 or ("trace" in found and drawn & set(found)):
        raise PlanError(
            f"{text!r} gives more than one kind of load",
            hint="give one of trace, concurrency, batch and rate; a trace takes no other option",
        )
    if "burstiness" in found and "rate" not in found:
        raise PlanError("burstiness applies only to a rate", where="load", hint="give rate")
    names = {text: name for name, text in _TEXT_NAMES.items()}
    return LoadSpec(**{names.get(name, name): value for name, value in found.items()})


def parse_slo(text: str) -> Slo:
    """Parse an SLO such as ``ttft=500ms,tpot=30ms``; each time needs a unit, ``ms`` or ``s``.

    Raises:
        PlanError: A name is unknown, or a time invalid.
    """
    found: dict[str, float] = {}
    hint = "ttft, tpot or e2e above 0 with a unit, as in ttft=500ms,tpot=30ms,e2e=20s"
    for name, value in pairs_of(text, "SLO", hint).items():
        said = re.fullmatch(r"(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+)(ms|s)", value)
        found[name] = float(said[1]) * {"ms": 1e-3, "s": 1.0}[said[2]] if said else 0.0
        if name not in Slo._fields or not 0.0 < found[name] < inf:
            raise PlanError(f"'{name}={value}' is not an SLO", hint=hint)
    return Slo(**found)


def parse_lengths(text: str) -> Callable[[np.random.Generator, int], np.ndarray]:
    """Parse a length distribution.

    Returns:
        A function that draws a given number of integers of at least 1.

    Raises:
        PlanError: The text is not a length distribution.
    """
    name, *rest = text.split(":")
    try:
        if not rest:
            fixed = int(text)
            if fixed < 1 or fixed > MOST:
                raise ValueError(text)
            return lambda rng, n: np.full(n, fixed)
        figures = [float(value) for value in rest]
        if not all(0 < value < MOST for value in figures):
            raise ValueError(text)
        if name == "uniform":
            least, most = figures
            if least > most:
                raise ValueError(text)
            return lambda rng, n: rng.integers(max(1, round(least)), round(most) + 1, n)
        if name == "geometric":
            (mean,) = figures
            return lambda rng, n: rng.geometric(min(1.0, 1.0 / mean), n)
        if name == "lognormal":
            mean, deviation = figures
            middle = np.log(mean) - deviation**2 / 2.0
            if middle < 0.0:
                raise PlanError(
                    f"the median length of {text!r} is below one token",
                    hint="the deviation is that of the logarithm, for example 0.8",
                )
            return lambda rng, n: np.maximum(
                1, np.rint(rng.lognormal(middle, deviation, n))
            ).astype(int)
    except ValueError:
        pass
    raise PlanError(
        f"{text!r} is not a length distribution",
        hint="give a number of tokens, or "
        + ", ".join(LENGTHS.values())
        + "; give an output of 1 for embeddings and scores of a decoder",
    )


def read_trace(path: Path) -> Load:
    """Read the requests of a trace.

    Formats: CSV with the columns ``arrival_s``, ``prompt`` and ``output``, or those of Azure's or
    BurstGPT's traces; Mooncake's JSON lines, whose block hashes identify shared prefixes; and the
    JSON of ``vllm bench serve --save-result --save-detailed``, whose requests are sent again at its
    rate or concurrency. Arrivals count from the first request.

    Raises:
        DatasetError: The file cannot be read, or has another format.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"the trace cannot be read: {error}", where=str(path)) from None
    start = text.lstrip()[:1]
    try:
        if start == "{" and '"input_lens"' in text:
            return _benchmark(parse_json(text), path)
        if start == "{":
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
            return _from_first(_mooncake(rows, path))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DatasetError(
            f"the trace cannot be read: {error!r}",
            where=str(path),
            hint="timestamp, input_length and output_length, or input_lens and output_lens",
        ) from None
    return _from_first(_csv(_frame(path), path))


def read_traces(path: Path) -> dict[str, Load]:
    """Read the requests of a trace by its column ``model``; without one, under an empty name.

    Raises:
        DatasetError: See :func:`read_trace`.
    """
    frame = _frame(path) if path.suffix == ".csv" else pd.DataFrame()
    if "model" not in frame:
        return {"": read_trace(path)}
    loads = {str(name): _csv(own, path) for name, own in frame.groupby("model")}
    first = min((load.arrivals[0] for load in loads.values()), default=0.0)
    return {name: _from_first(load, first) for name, load in loads.items()}


def _from_first(load: Load, first: float | None = None) -> Load:
    """Count arrivals from the first request, as benchmarks do; files may have times of a clock."""
    start = load.arrivals[0] if first is None else first
    return replace(load, arrivals=load.arrivals - start)


def _frame(path: Path) -> pd.DataFrame:
    try:
        return pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise DatasetError(f"the trace cannot be read: {error}", where=str(path)) from None


def _csv(frame: pd.DataFrame, path: Path) -> Load:
    for columns in TRACE_COLUMNS:
        if set(columns) <= set(frame):
            break
    else:
        missing = [c for c in TRACE_COLUMNS[0] if c not in frame]
        raise DatasetError(
            f"columns {missing} are missing",
            where=str(path),
            hint="; or ".join(str(list(known)) for known in TRACE_COLUMNS),
        )
    own = frame[list(columns)].set_axis(list(TRACE_COLUMNS[0]), axis=1)
    if columns[0] == "TIMESTAMP":
        times = pd.to_datetime(own["arrival_s"], errors="coerce", format="ISO8601")
        own["arrival_s"] = (times - times.min()).dt.total_seconds()
    known = own.apply(pd.to_numeric, errors="coerce")
    if columns[0] != TRACE_COLUMNS[0][0]:
        # Failed requests have no output and are skipped.
        kept = ~((known["output"] < 1) | (known["prompt"] < 1))
        own, known = own[kept], known[kept]
    return _checked(known, own, path)


def _checked(known: pd.DataFrame, said: pd.DataFrame, path: Path) -> Load:
    """Return a load, sorted by arrival, or refuse the first invalid row."""
    whole = (known[["prompt", "output"]] % 1 == 0).all(axis=1)
    enough = (known[["prompt", "output"]] >= 1).all(axis=1)
    finite = np.isfinite(known.to_numpy(float)).all(axis=1)
    good = (finite & whole & enough & (known["arrival_s"] >= 0)).to_numpy()
    if not good.all() or not len(known):
        row = int(np.flatnonzero(~good)[0]) if len(known) else -1
        shown = said.iloc[row].to_dict() if len(known) else "the trace is empty"
        raise DatasetError(
            f"row {row + 1} is not a request: {shown}",
            where=str(path),
            hint="arrivals are seconds of at least 0, prompt and output whole numbers of tokens",
        )
    # Stable, so that requests with equal arrival times keep the order of the file.
    rows = known.sort_values("arrival_s", kind="stable")
    return Load(
        rows["prompt"].to_numpy(int),
        rows["output"].to_numpy(int),
        rows["arrival_s"].to_numpy(float),
    )


def _mooncake(rows: Sequence[JsonObject], path: Path) -> Load:
    frame = pd.DataFrame(
        {
            # Milliseconds.
            "arrival_s": [float(row["timestamp"]) / 1e3 for row in rows],
            "prompt": [row["input_length"] for row in rows],
            "output": [row["output_length"] for row in rows],
        }
    )
    load = _checked(frame.apply(pd.to_numeric, errors="coerce"), frame, path)
    if not all("hash_ids" in row for row in rows):
        return load
    order = np.argsort(frame["arrival_s"].to_numpy(), kind="stable")
    blocks = [tuple(int(block) for block in rows[at]["hash_ids"]) for at in order]
    return Load(
        load.prompts, load.outputs, load.arrivals, blocks=blocks, block_tokens=MOONCAKE_BLOCK
    )


def _benchmark(data: JsonObject, path: Path) -> Load:
    """Return a load of the lengths, and the rate or concurrency, of a benchmark run."""
    lengths = {"prompt": data["input_lens"], "output": data["output_lens"]}
    frame = pd.DataFrame({"arrival_s": 0.0, **lengths})
    frame = frame[frame["output"] >= 1].reset_index(drop=True)
    rate = float(data.get("request_rate") or np.inf)
    shape = float(data.get("burstiness") or 1.0)
    if np.isfinite(rate) and rate > 0:
        gaps = np.random.default_rng(0).gamma(shape, 1.0 / (rate * shape), len(frame))
        frame["arrival_s"] = np.cumsum(gaps)
    load = _checked(frame.apply(pd.to_numeric, errors="coerce"), frame, path)
    limit = int(data.get("max_concurrency") or 0)
    if limit and np.isfinite(rate):
        raise DatasetError(
            f"request_rate={rate:g} and max_concurrency={limit} cannot be combined",
            where=str(path),
            hint="remove one of them from the file",
        )
    return Load(load.prompts, load.outputs, load.arrivals, limit)


def is_open(spec: LoadSpec, load: Load) -> bool:
    """Return whether arrivals are independent of the engines and spread over time."""
    return spec.kind in ("trace", "open-poisson") and load.rate > 0.0


def load_of(deployment: Deployment, load: Load) -> Load:
    """Return the load as a deployment sees it, with the cached prefix of each prompt.

    Raises:
        PlanError: The load lacks the block hashes that the router needs, has block hashes besides
            a given hit rate, or has prompts that exceed a pass and may not be chunked.
    """
    options = deployment.options
    budget = options.token_budget or deployment.rules.policy.token_budget
    longest = int(load.prompts.max())
    if options.chunked is False and longest > budget:
        raise PlanError(
            f"a prompt has {longest} tokens, a pass at most {budget}",
            where="whole prompts",
            hint="use a larger token budget, or chunked prefill",
        )
    router = options.router
    if router not in ROUTERS:
        raise PlanError(f"router {router!r} is not known", hint=", ".join(ROUTERS))
    if not options.prefix_cache:
        load = replace(load, blocks=())
    if router == "prefix-aware" and not load.blocks:
        raise PlanError(
            "a prefix-aware router needs a prefix cache and a trace with block hashes",
            where="router",
            hint="use a Mooncake trace with hash_ids, or the router least-loaded",
        )
    if not options.prefix_hits:
        return load
    if load.blocks:
        raise PlanError(
            "the shared prefixes of the prompts are in the trace already",
            where="prefix_hits",
            hint="omit the hit rate",
        )
    return replace(load, hits=(load.prompts * options.prefix_hits).astype(int))


def context_note(context: int, load: Load) -> tuple[str, ...]:
    """Return a note on the requests of a load that exceed a checkpoint's context length."""
    lengths = load.prompts + load.outputs
    beyond = int((lengths > context).sum())
    if not context or not beyond:
        return ()
    return (
        f"{beyond} of {len(lengths)} requests are longer than the {context} tokens that the "
        f"checkpoint allows (max_position_embeddings), the longest by {lengths.max() - context}: "
        "engines refuse them",
    )
