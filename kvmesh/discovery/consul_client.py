"""The few calls that discovery makes to a Consul agent: py-consul over an asyncio transport.

py-consul's own asyncio transport needs another HTTP client, sets no time limits and fails
on answers without an index; its plain one can't be cancelled. It takes any transport, so
it gets one from httpx.
"""

import asyncio
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from consul import base
from consul.exceptions import ConsulException

from kvmesh.discovery.config import DiscoveryConfig
from kvmesh.discovery.entry import split_address
from kvmesh.errors import UnavailableError

T = TypeVar("T")

REQUEST_SECONDS = 3.0
"""An agent answers within milliseconds; one that doesn't is as good as unreachable."""

MAX_CONNECTIONS = 128
"""Each watch holds one connection for each role; an agent takes 200 from one address."""

_Params = Sequence[tuple[str, Any]] | None
_Headers = Mapping[str, str] | None


class ConsulClient:
    """An async context manager. Every call raises UnavailableError if it doesn't succeed,
    within `REQUEST_SECONDS` plus the time that it was told to wait.
    """

    def __init__(self, config: DiscoveryConfig) -> None:
        host, port = split_address(config.consul_address)
        self.address = config.consul_address
        self._http = _Transport(host, port, "https" if config.consul_tls else "http")
        self._tls = _tls_context(config) if config.consul_tls else None
        self._consul = _Consul(self._http)
        # py-consul lets the environment override a token that is passed in.
        self._consul.token = config.consul_token or None

    async def __aenter__(self) -> Self:
        self._http.open(self._tls)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.close()

    async def register(self, service: Mapping[str, Any]) -> None:
        """Register a service with its checks; other checks of that service id are removed."""
        with self._errors():
            _require(await self._consul.agent.service.register(**service))

    async def deregister(self, service_id: str) -> None:
        """Remove a service and its checks."""
        with self._errors():
            _require(await self._consul.agent.service.deregister(service_id))

    async def service_meta(self, service_id: str) -> Mapping[str, str] | None:
        """Return the metadata of a service of this agent, None if it has no such service."""
        with self._errors():
            # Not the call for one service: py-consul leaves the token out of that.
            quoted = service_id.replace("\\", "\\\\").replace('"', '\\"')
            found = await self._consul.agent.services(filter_expr=f'ID == "{quoted}"')
        return (found[service_id].get("Meta") or {}) if found and service_id in found else None

    async def check_passes(self, check_id: str, note: str) -> None:
        """Say that a TTL check passes, which starts its time anew."""
        with self._errors():
            _require(await self._consul.agent.check.ttl_pass(check_id, notes=note))

    async def check_fails(self, check_id: str, note: str) -> None:
        """Say that a TTL check fails."""
        with self._errors():
            _require(await self._consul.agent.check.ttl_fail(check_id, notes=note))

    async def instances(
        self, service: str, index: int, wait_seconds: int
    ) -> tuple[str, Sequence[Mapping[str, Any]]]:
        """Return index and instances of a service with their checks, healthy or not.

        With an index above 0 the answer comes when the index has passed it, or after the
        wait. The index comes as it was sent, empty if it wasn't.
        """
        with self._errors():
            header, found = await self._consul.health.service(
                service, index=index, wait=f"{wait_seconds}s"
            )
        if not isinstance(found, list):
            raise UnavailableError(f"Consul at {self.address}: not a list of services")
        return header, found

    async def value(self, key: str, index: int, wait_seconds: int) -> tuple[str, str | None, str]:
        """Return index, value and version of a key; without the key, None and "0".

        With an index above 0 the answer comes as that of `instances` does.
        """
        with self._errors():
            header, found = await self._consul.kv.get(key, index=index, wait=f"{wait_seconds}s")
        if found is None:
            return header, None, "0"
        text = (found["Value"] or b"").decode("utf-8", "replace")
        return header, text, str(found["ModifyIndex"])

    async def set_value(self, key: str, text: str, version: str) -> bool:
        """Set a key that is of that version still; False, and nothing done, if it isn't."""
        with self._errors():
            return bool(await self._consul.kv.put(key, text.encode(), cas=version))

    async def delete_value(self, key: str, version: str) -> bool:
        """Delete a key that is of that version still; False, and nothing done, if it isn't."""
        with self._errors():
            return bool(await self._consul.kv.delete(key, cas=version))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (httpx.HTTPError, OSError, ConsulException) as error:
            # OSError: a TLS alert that comes after the handshake is passed on as it is.
            detail = str(error) or type(error).__name__
            raise UnavailableError(f"Consul at {self.address}: {detail}") from error


class _Consul(base.Consul):  # type: ignore[misc]
    """py-consul's calls, on our transport."""

    def __init__(self, http: "_Transport") -> None:
        self._transport = http
        # Everything is passed, so that nothing is read from the environment.
        super().__init__(host=http.host, port=http.port, scheme=http.scheme, verify=True)

    def http_connect(self, *_: object, **__: object) -> "_Transport":
        return self._transport


class _Transport(base.HTTPClient):  # type: ignore[misc]
    """py-consul's idea of an HTTP client: its calls return awaitables."""

    def __init__(self, host: str, port: int, scheme: str) -> None:
        super().__init__(f"[{host}]" if ":" in host else host, port, scheme)
        self._http: httpx.AsyncHTTPTransport | None = None

    def open(self, tls: ssl.SSLContext | None) -> None:
        # A bare transport, not a client: that would log every heartbeat.
        self._http = httpx.AsyncHTTPTransport(
            verify=tls or False,
            trust_env=False,
            limits=httpx.Limits(max_connections=MAX_CONNECTIONS, keepalive_expiry=30.0),
        )

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()

    async def get(
        self,
        callback: Callable[[Any], T],
        path: str,
        params: _Params = None,
        headers: _Headers = None,
        raw: bool = False,
    ) -> T:
        wait = float(dict(params or ()).get("wait", "0s").removesuffix("s"))
        # Consul adds up to a sixteenth to a wait.
        seconds = REQUEST_SECONDS + wait * 17 / 16
        request = httpx.Request("GET", self.uri(path, params), headers=headers)
        return await self._send(callback, request, seconds)

    async def put(
        self,
        callback: Callable[[Any], T],
        path: str,
        params: _Params = None,
        data: str | bytes = "",
        headers: _Headers = None,
    ) -> T:
        request = httpx.Request("PUT", self.uri(path, params), headers=headers, content=data)
        return await self._send(callback, request, REQUEST_SECONDS)

    def post(self, *_: object, **__: object) -> Any:
        raise NotImplementedError("discovery posts nothing")

    async def delete(
        self, callback: Callable[[Any], T], path: str, params: _Params, headers: _Headers
    ) -> T:
        request = httpx.Request("DELETE", self.uri(path, params), headers=headers)
        return await self._send(callback, request, REQUEST_SECONDS)

    async def _send(
        self, callback: Callable[[Any], T], request: httpx.Request, seconds: float
    ) -> T:
        if self._http is None:
            raise RuntimeError("the client is not open")
        request.extensions["timeout"] = httpx.Timeout(REQUEST_SECONDS, read=seconds).as_dict()
        handshake = _Handshake()
        request.extensions["trace"] = handshake.trace
        try:
            response = await self._http.handle_async_request(request)
        except asyncio.CancelledError:
            await handshake.abandon()
            raise
        try:
            body = (await response.aread()).decode("utf-8", "replace")
        finally:
            await response.aclose()
        # py-consul insists on an index where it is asked for; what its lack means is our affair.
        response.headers.setdefault("X-Consul-Index", "")
        return callback(base.Response(response.status_code, response.headers, body))


class _Handshake:
    """Remembers the socket of a TLS handshake: httpcore forgets it when it is cancelled."""

    def __init__(self) -> None:
        self._socket: Any = None

    async def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Follow httpcore's events."""
        if event == "connection.connect_tcp.complete":
            self._socket = info["return_value"]
        elif event == "connection.start_tls.complete":
            self._socket = None

    async def abandon(self) -> None:
        """Close the socket if its handshake has not ended. Without TLS: close it again."""
        if self._socket is not None:
            await self._socket.aclose()


def _require(succeeded: bool) -> None:
    """Raise for what py-consul returns as False: an answer of 404."""
    if not succeeded:
        raise ConsulException("not known to the agent")


def _tls_context(config: DiscoveryConfig) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=config.consul_ca_file or None)
    if config.consul_cert_file:
        context.load_cert_chain(config.consul_cert_file, config.consul_key_file)
    return context
