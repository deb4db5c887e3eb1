"""Micro-batching: the queries that arrive while a batch is computed form the next batch.

No query waits for others to arrive: on an idle server, a single query is a batch of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, NamedTuple

from ..common.errors import OpcastError

#: Most rows of a batch, so that small queries do not wait long for large ones; a request with more
#: rows is a batch by itself. At 40 µs for a new row (docs/server.md) a full batch takes under a
#: second. Engineering estimate.
BATCH_ROWS = 20_000


class _Item(NamedTuple):
    group: Hashable
    work: object
    rows: int
    answer: asyncio.Future[object]


class MicroBatcher:
    """Collects queries and computes the queries of a group together, one batch at a time.

    Args:
        compute: Called with a group and the ``work`` of its queries; returns an answer for each.
            If it raises an error that users can cause, every query is computed by itself, so that
            only the one that caused it fails.
        told: Called with the number of queries and of rows of each batch.
    """

    def __init__(
        self,
        compute: Callable[[Any, Sequence[Any]], Awaitable[Sequence[Any]]],
        told: Callable[[int, int], None] = lambda queries, rows: None,
    ) -> None:
        self._compute = compute
        self._told = told
        self._waiting: list[_Item] = []
        self._running: asyncio.Task[None] | None = None

    async def ask(self, group: Hashable, work: object, rows: int) -> Any:
        """The answer to a query.

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
            # At most one batch is computed at a time: everything that arrives meanwhile joins the
            # next one.
            self._running = asyncio.create_task(self._run())
        return await answer

    async def _run(self) -> None:
        try:
            while self._waiting:
                await self._one_batch(self._next())
        finally:
            self._running = None

    def _next(self) -> list[_Item]:
        """Take the oldest query and others of its group, up to :data:`BATCH_ROWS` rows."""
        group, rows = self._waiting[0].group, 0
        batch: list[_Item] = []
        rest: list[_Item] = []
        for item in self._waiting:
            # Its request timed out or was disconnected while it waited.
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
        self._told(len(batch), sum(item.rows for item in batch))
        try:
            answers = await self._compute(batch[0].group, [item.work for item in batch])
        except OpcastError as error:
            if len(batch) == 1:
                _refuse(batch[0], error)
                return
            # One bad query must not fail the others: each is computed by itself.
            for item in batch:
                await self._one_batch([item])
        except Exception as error:  # the requests end with it, not the batches after it
            for item in batch:
                _refuse(item, error)
        else:
            for item, answer in zip(batch, answers, strict=True):
                if not item.answer.done():
                    item.answer.set_result(answer)


def _refuse(item: _Item, error: Exception) -> None:
    if not item.answer.done():
        item.answer.set_exception(error)
