"""Metrics in Prometheus' format, and logs as lines of JSON with the id of the request."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

__all__ = ["CONTENT_TYPE", "REQUEST_ID", "JsonLines", "Metrics", "write_json_lines"]

# Bucket bounds in seconds and rows. Cached answers take well under 10 ms, programs and compilations
# up to the time limit (docs/server.md, "Performance").
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0)
_ROWS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096, 16384, 65536)
#: Id of the current request: the client's ``X-Request-ID`` header, or a generated one.
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")


class Metrics:
    """The metrics of a server."""

    def __init__(self) -> None:
        # Not the global registry, because a process may run several servers, as in tests.
        own = self.registry = CollectorRegistry()
        # Memory, CPU time and open files of the server.
        ProcessCollector(registry=own)
        self.requests = Counter(
            "opcast_requests", "Requests answered.", ("path", "status"), registry=own
        )
        self.seconds = Histogram(
            "opcast_request_seconds",
            "Time of a request.",
            ("path",),
            registry=own,
            buckets=_SECONDS,
        )
        self.in_flight = Gauge("opcast_requests_in_flight", "Requests in flight.", registry=own)
        self.rows = Counter("opcast_kernels", "Kernels and operators predicted.", registry=own)
        self.batch = Histogram(
            "opcast_batch_rows", "Kernels computed together.", registry=own, buckets=_ROWS
        )

    def watch(self, name: str, about: str, read: Callable[[], float]) -> None:
        """Add a gauge that is read whenever the metrics are requested."""
        Gauge(name, about, registry=self.registry).set_function(read)

    def count(self, name: str, about: str, read: Callable[[], float]) -> None:
        """Add a counter that is kept elsewhere and read whenever the metrics are requested."""
        self.registry.register(_Kept(name, about, read))

    def done(self, path: str, status: int, seconds: float) -> None:
        """Count a request."""
        self.requests.labels(path, status).inc()
        self.seconds.labels(path).observe(seconds)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


@dataclass(frozen=True)
class _Kept(Collector):
    """A counter whose value is kept elsewhere; ``Counter`` has no ``set_function``."""

    name: str
    about: str
    read: Callable[[], float]

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(self.name, self.about, value=self.read())


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON, with its ``facts`` as top-level keys."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if name := REQUEST_ID.get():
            line["request"] = name
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def write_json_lines() -> None:
    """Log to standard error as lines of JSON, from level ``info`` on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
