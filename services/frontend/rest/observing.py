"""What is told of HTTP requests, whatever becomes of them: a span each, and a count."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from kvmesh.telemetry import OTHER, Kind, Telemetry, parse_traceparent
from services.frontend.rest.asgi import Exchange

PROBES = ("/health", "/ready", "/metrics")
"""Asked every few seconds by machines: counted, not traced."""

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

_SERVER_ERROR = 500


class Observer:
    """Traces and counts exchanges. Paths that are no route are all called `other`."""

    def __init__(self, telemetry: Telemetry, routes: Collection[str], model_route: str) -> None:
        """Take the routes; paths below `model_route` are one route."""
        self._tracer = telemetry.tracer
        self._routes = frozenset(routes)
        self._model_route = model_route
        self._responses = telemetry.meter.counter(
            "kvmesh_http_responses", "HTTP responses.", labels=("route", "status")
        )

    @contextmanager
    def observed(self, exchange: Exchange) -> Iterator[None]:
        """Trace an exchange for as long as the block runs; its work goes under that span."""
        route = self._route(exchange.path)
        if route in PROBES:
            try:
                yield
            finally:
                self._count(route, exchange)
            return
        method = exchange.scope["method"]
        method = method if method in _METHODS else "_OTHER"
        span = self._tracer.span(
            method if route == OTHER else f"{method} {route}",
            parse_traceparent(exchange.header(b"traceparent")),
            {"http.request.method": method},
            kind=Kind.SERVER,
        )
        if route != OTHER:
            span.set("http.route", route)
        exchange.traceparent = span.traceparent
        with span:
            try:
                yield
            finally:
                self._count(route, exchange)
                if exchange.status:
                    span.set("http.response.status_code", exchange.status)
                if exchange.status >= _SERVER_ERROR:
                    span.fail(str(exchange.status))
                elif not exchange.complete:
                    span.fail("CANCELLED")

    def _route(self, path: str) -> str:
        if path in self._routes:
            return path
        return f"{self._model_route}/{{model}}" if path.startswith(self._model_route) else OTHER

    def _count(self, route: str, exchange: Exchange) -> None:
        # 499 as others call it: the client was gone before there was a status.
        self._responses.add(route=route, status=str(exchange.status or 499))
