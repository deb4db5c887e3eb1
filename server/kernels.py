"""Answer queries about kernels and operators, from a cache or batched with other queries."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ..common.errors import OpcastError, ProgramError
from ..common.interval import LATENCY_KEYS, latency_fields
from ..features.devices.device import DeviceSpec
from ..features.operators.query import parse_op, parse_op_columns
from ..predict.locate import is_untrained
from ..predict.program.predictor import Predictor
from .cache import LruCache
from .errors import RequestError
from .metrics import Metrics
from .sandbox import Sandbox
from .schemas import ColumnsQuery, KernelsQuery, OpsQuery
from .settings import ServerSettings

#: Maximum rows of a batch, so that small queries do not wait long for large ones; a larger query is
#: a batch by itself. At 40 µs per new row (docs/server.md) a full batch takes less than a second.
#: Engineering estimate.
BATCH_ROWS = 20_000
OP_COLUMNS = (*LATENCY_KEYS, "roofline_us", "bound", "scope", "in_domain")
KERNEL_COLUMNS = (*LATENCY_KEYS, "bound", "source", "in_domain")
AnyQuery = OpsQuery | ColumnsQuery | KernelsQuery


class _Group(NamedTuple):
    """Key of queries that can share a batch: operators or kernels of one model and device.

    ``vendor`` determines the default library of operators that specify none.
    """

    model: str
    device: str
    kernels: bool
    vendor: str


class KernelService:
    """Answers queries about kernels and operators.

    Args:
        settings: Limits.
        predictors: Loaded models by name.
        sandbox: Parses the HLO of kernels.
        metrics: Metrics that count rows and batches.
    """

    def __init__(
        self,
        settings: ServerSettings,
        predictors: Mapping[str, Predictor],
        sandbox: Sandbox,
        metrics: Metrics,
    ) -> None:
        self.settings = settings
        self.predictors = predictors
        self.sandbox = sandbox
        self.metrics = metrics
        self.cache = LruCache(settings.cache_entries)
        # One thread: XGBoost releases the GIL, so the event loop keeps answering from the cache; a
        # concurrent second batch would only slow the first.
        self._thread = ThreadPoolExecutor(1, "kernels")
        # Separate, because kernels wait for a process that parses them, operators only for the
        # thread.
        self._batches = {
            kernels: MicroBatcher(self._compute, metrics.batch.observe) for kernels in (False, True)
        }

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def answer(self, query: AnyQuery, model: str, device: DeviceSpec) -> dict[str, object]:
        """Predict by column, as in :class:`~opcast.server.answers.KernelAnswers`.

        Raises:
            OpcastError: A row is not an operator or kernel, or a field is unknown.
        """
        names = KERNEL_COLUMNS if isinstance(query, KernelsQuery) else OP_COLUMNS
        wanted = _wanted(query.fields, names)
        kernels = isinstance(query, KernelsQuery)
        if not kernels and is_untrained(model):
            raise RequestError(
                422,
                f"{model!r} predicts programs, not single operators",
                where="model",
                hint="serve another, whose answers have roofline_us: opcast serve --model default",
            )
        vendor = "" if kernels else self.predictors[model].operator_vendor(device)
        group = _Group(model, device.name, kernels, vendor)
        if isinstance(query, ColumnsQuery):
            rows = await self._columns(query, group)
        elif isinstance(query, OpsQuery):
            rows = await self._texts(query.ops, group, query.ops)
        else:
            # Digests as keys, because the HLO of kernels may be long.
            rows = await self._texts(query.kernels, group, [_digest(t) for t in query.kernels])
        self.metrics.rows.inc(len(rows))
        columns = dict(zip(names, zip(*rows, strict=True), strict=True))
        answer: dict[str, object] = {"device": device.name, "model": model, "count": len(rows)}
        return answer | {name: columns[name] for name in wanted}

    async def _texts(
        self, texts: Sequence[str], group: _Group, marks: Sequence[Hashable]
    ) -> list[object]:
        self._check_rows(len(texts))

        def work(places: Sequence[int]) -> object:
            if group.kernels:
                return [texts[i] for i in places]
            return pd.DataFrame([_row(texts[i], i, group.vendor) for i in places])

        return await self._remembered(group, [(group, mark) for mark in marks], work)

    async def _columns(self, query: ColumnsQuery, group: _Group) -> list[object]:
        row = parse_op_columns(query.operator, query.columns, group.vendor)
        varying = {k: v for k, v in row.items() if isinstance(v, np.ndarray)}
        self._check_rows(len(next(iter(varying.values()))) if varying else 1)
        # Parameters shared by all rows are hashed once, as part of the group; a row's key is the
        # tuple of the varying ones.
        same = tuple(sorted((k, v) for k, v in row.items() if k not in varying))
        lists = [v.tolist() for v in varying.values()]
        marks = zip(*lists, strict=True) if lists else [()]
        mine = (group, tuple(varying), same)

        def work(places: Sequence[int]) -> object:
            data = {k: v[places] if k in varying else v for k, v in row.items()}
            return pd.DataFrame(data, index=range(len(places)))

        return await self._remembered(group, [(mine, mark) for mark in marks], work)

    async def _remembered(
        self,
        group: _Group,
        keys: Sequence[Hashable],
        work: Callable[[Sequence[int]], object],
    ) -> list[object]:
        """Look up answers by key; ``work`` makes the query for the positions of missing ones."""
        answers = self.cache.get_many(keys)
        missing = [i for i, value in enumerate(answers) if value is None]
        if missing:
            # By key, so that duplicate rows of a request are computed once.
            own = {keys[i]: i for i in missing}
            fresh = await self._fresh(group, work(list(own.values())), list(own))
            for i in missing:
                answers[i] = fresh[keys[i]]
        return answers

    async def _fresh(
        self, group: _Group, work: object, keys: Sequence[Hashable]
    ) -> dict[Hashable, Any]:
        """Compute rows, cache them, and return them by key."""
        columns = await self._batches[group.kernels].ask(group, work, len(keys))
        rows = dict(zip(keys, zip(*columns, strict=True), strict=True))
        for key, value in rows.items():
            self.cache.put(key, value)
        return rows

    def _check_rows(self, count: int) -> None:
        if count > self.settings.max_rows:
            raise RequestError(
                413,
                f"{count} kernels exceed the limit of {self.settings.max_rows} per request",
                hint="split them, or start the server with: opcast serve --max-rows",
            )

    async def _compute(self, group: _Group, works: Sequence[Any]) -> list[list[Sequence[object]]]:
        """Compute the queries of a group together; return the columns of each."""
        ends = np.cumsum([len(work) for work in works])
        if group.kernels:
            columns = await self._read(group, [text for work in works for text in work])
        else:
            frame = works[0] if len(works) == 1 else pd.concat(works, ignore_index=True)
            loop = asyncio.get_running_loop()
            columns = await loop.run_in_executor(self._thread, self._operators, group, frame)
        starts = [0, *ends[:-1]]
        return [[column[a:b] for column in columns] for a, b in zip(starts, ends, strict=True)]

    def _operators(self, group: _Group, frame: pd.DataFrame) -> list[list[object]]:
        bundle = self.predictors[group.model].operators
        estimates = bundle.predict(frame.assign(device=group.device))
        own = latency_fields(estimates.latency, estimates.lo, estimates.hi)
        times = [*own.values(), estimates.roofline * 1e6]
        # JSON has no infinity, and the schema does not exclude all sizes that lead to it.
        if not all(np.isfinite(t).all() for t in times):
            raise ProgramError("an operator has no finite latency", hint="give smaller sizes")
        rest = (estimates.bound, estimates.scope, estimates.in_domain)
        return [column.tolist() for column in (*times, *rest)]

    async def _read(self, group: _Group, texts: Sequence[str]) -> list[list[object]]:
        task = {"kind": "kernels", "model": group.model, "device": group.device}
        # HLO is untrusted, so it is parsed in a process that may crash.
        status, body = await self.sandbox.run(task, json.dumps(texts).encode())
        data = json.loads(body)
        if status != 200:
            raise RequestError(
                status, data["what"], where=data["where"], hint=data["hint"], name=data["error"]
            )
        return [data[name] for name in KERNEL_COLUMNS]


def _wanted(fields: Sequence[str] | None, names: tuple[str, ...]) -> Sequence[str]:
    unknown = [f for f in fields or () if f not in names]
    if unknown:
        raise RequestError(
            422, f"no field {unknown[0]!r}", where="fields", hint="fields: " + ", ".join(names)
        )
    return names if fields is None else fields


def _row(text: str, place: int, vendor: str) -> dict[str, object]:
    try:
        return parse_op(text, vendor)
    except ProgramError as error:
        where = f"ops[{place}], {error.where}"
        raise ProgramError(error.what, where=where, hint=error.hint) from None


def _digest(text: str) -> bytes:
    # The text may contain lone surrogates, which UTF-8 cannot encode.
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()


class _Item(NamedTuple):
    group: Hashable
    work: object
    rows: int
    answer: asyncio.Future[object]


class MicroBatcher:
    """Collects queries and computes those of the same group together, one batch at a time.

    Args:
        compute: Called with a group and the ``work`` of its queries; returns an answer for each.
            If it raises an :class:`OpcastError`, the queries are computed one by one, so that only
            the one that caused it fails.
        report: Called with the number of rows of each batch.
    """

    def __init__(
        self,
        compute: Callable[[Any, Sequence[Any]], Awaitable[Sequence[Any]]],
        report: Callable[[int], None] = lambda rows: None,
    ) -> None:
        self._compute = compute
        self._report = report
        self._waiting: list[_Item] = []
        self._running: asyncio.Task[None] | None = None

    async def ask(self, group: Hashable, work: object, rows: int) -> Any:
        """Answer a query.

        Args:
            group: Key of the queries that can be computed together.
            work: The query, as ``compute`` takes it.
            rows: Number of its rows.

        Raises:
            OpcastError: The query cannot be answered.
        """
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Item(group, work, rows, answer))
        if self._running is None:
            # One batch at a time; queries that arrive meanwhile join the next one.
            self._running = asyncio.create_task(self._run())
        return await answer

    async def _run(self) -> None:
        try:
            while self._waiting:
                await self._one_batch(self._next())
        finally:
            self._running = None

    def _next(self) -> list[_Item]:
        """Remove the oldest query and others of its group, up to :data:`BATCH_ROWS` rows."""
        group, rows = self._waiting[0].group, 0
        batch: list[_Item] = []
        rest: list[_Item] = []
        for item in self._waiting:
            # The request timed out or its client disconnected.
            if item.answer.cancelled():
                continue
            # The first query is always taken, however many rows it has.
            if item.group == group and (not batch or rows + item.rows <= BATCH_ROWS):
                batch.append(item)
                rows += item.rows
            else:
                rest.append(item)
        self._waiting = rest
        return batch

    async def _one_batch(self, batch: list[_Item]) -> None:
        if not batch:
            return
        self._report(sum(item.rows for item in batch))
        try:
            answers = await self._compute(batch[0].group, [item.work for item in batch])
        except OpcastError as error:
            if len(batch) == 1:
                _refuse(batch[0], error)
                return
            # Computed one by one, so that a bad query does not fail the others.
            for item in batch:
                await self._one_batch([item])
        except Exception as error:  # fails these requests, not later batches
            for item in batch:
                _refuse(item, error)
        else:
            for item, answer in zip(batch, answers, strict=True):
                if not item.answer.done():
                    item.answer.set_result(answer)


def _refuse(item: _Item, error: Exception) -> None:
    if not item.answer.done():
        item.answer.set_exception(error)
