"""Metrics for Prometheus: rendered as text, and served over HTTP.

The server has threads of its own, so that a process whose event loop is stuck still
tells how it is.
"""

import math
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6, socket

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector

from kvmesh.config import ConfigError
from kvmesh.telemetry.histogram import Distribution, Histogram

CONTENT_TYPE = CONTENT_TYPE_LATEST

# Scrapes at once. One every few seconds is usual; the rest are closed unanswered.
_MAX_CONNECTIONS = 8
# A peer that sends or reads nothing for this long is hung up on.
_IO_TIMEOUT_S = 5.0
# How often the server's thread looks whether it is to end: bounds the wait at exit.
_POLL_S = 0.1


class Exposition:
    """The process's metrics as Prometheus reads them, CPU and memory included."""

    def __init__(self, histograms: Sequence[Histogram]) -> None:
        self._registry = CollectorRegistry()
        self._lock = threading.Lock()
        self.reader = PrometheusMetricReader(registry=self._registry, scope_info_enabled=False)
        self._registry.register(_Histograms(histograms))
        ProcessCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def render(self) -> bytes:
        """Return all metrics in the text format; takes a millisecond or so."""
        # The reader hands over through a queue that two collections would mix up.
        with self._lock:
            return generate_latest(self._registry)


class _Histograms(Collector):
    """Our histograms, named as the reader of the rest names its own."""

    def __init__(self, histograms: Sequence[Histogram]) -> None:
        self._histograms = histograms

    def collect(self) -> Iterator[HistogramMetricFamily]:
        for histogram in tuple(self._histograms):
            name = _plain(histogram.name) + _SUFFIXES.get(histogram.unit, "")
            family = HistogramMetricFamily(name, histogram.description)
            found = histogram.read()
            for distribution in found:
                _add(family, distribution)
            if found:
                yield family


_SUFFIXES = {"s": "_seconds", "By": "_bytes"}


def _plain(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


def _add(family: HistogramMetricFamily, distribution: Distribution) -> None:
    labels = {_plain(name): value for name, value in distribution.labels.items() if value}
    up_to = 0
    for bound, count in zip((*distribution.bounds, math.inf), distribution.counts, strict=True):
        up_to += count
        bucket = {**labels, "le": "+Inf" if bound == math.inf else repr(float(bound))}
        family.add_sample(f"{family.name}_bucket", bucket, up_to)
    family.add_sample(f"{family.name}_count", labels, up_to)
    family.add_sample(f"{family.name}_sum", labels, distribution.sum)


@contextmanager
def serve_metrics(host: str, port: int, render: Callable[[], bytes]) -> Iterator[str]:
    """Serve `render` at /metrics while inside; yields `host:port`. Port 0: any free one.

    Leaving takes up to 0.1 s. Raises ConfigError if the address can't be had.
    """
    try:
        server = _Server(host, port, render)
    except OSError as error:
        raise ConfigError(
            f"telemetry.metrics_port: can't listen on {host}:{port}: {error.strerror}"
        ) from error
    thread = threading.Thread(
        target=server.serve_forever, args=(_POLL_S,), name="metrics", daemon=True
    )
    thread.start()
    try:
        yield f"[{host}]:{server.server_port}" if ":" in host else f"{host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, render: Callable[[], bytes]) -> None:
        self.address_family = AF_INET6 if ":" in host else AF_INET
        self.render = render
        self._slots = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        super().__init__((host, port), _Handler)

    def process_request(self, request: "socket | tuple[bytes, socket]", client: object) -> None:
        if self._slots.acquire(blocking=False):
            super().process_request(request, client)
        else:
            self.shutdown_request(request)

    def process_request_thread(
        self, request: "socket | tuple[bytes, socket]", client: object
    ) -> None:
        try:
            super().process_request_thread(request, client)
        finally:
            self._slots.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: a scraper that hangs up is no news."""


class _Handler(BaseHTTPRequestHandler):
    timeout = _IO_TIMEOUT_S
    server: _Server

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404)
            return
        body = self.server.render()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass
