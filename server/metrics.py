"""Metrics of a server in Prometheus' format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

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

__all__ = ["CONTENT_TYPE", "Metrics"]

# Bucket bounds: cached answers take well under 10 ms, programs and compilations up to the time
# limit (docs/server.md, "Performance").
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0)
_ROWS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096, 16384, 65536)


class Metrics:
    """The counters of a server."""

    def __init__(self) -> None:
        # Not the global registry: several servers may live in one process, as in tests.
        own = self.registry = CollectorRegistry()
        # Memory, CPU time and files of the server, as Prometheus' clients name them.
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
        self.in_flight = Gauge("opcast_requests_in_flight", "Requests at work.", registry=own)
        self.rows = Counter("opcast_kernels", "Kernels and operators answered.", registry=own)
        self.batch = Histogram(
            "opcast_batch_rows", "Kernels computed together.", registry=own, buckets=_ROWS
        )

    def watch(self, name: str, about: str, read: Callable[[], float]) -> None:
        """Add a gauge that is read when the metrics are requested."""
        Gauge(name, about, registry=self.registry).set_function(read)

    def count(self, name: str, about: str, read: Callable[[], float]) -> None:
        """Add a counter that is kept elsewhere and read when the metrics are requested."""
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
