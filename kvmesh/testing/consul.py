"""A real Consul agent for tests: from PATH, or fetched once from Debian and checked."""

import asyncio
import hashlib
import json
import platform
import re
import shutil
import socket
import subprocess
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from kvmesh.config import environment

PACKAGE_VERSION = "1.8.7+dfsg1-2+b3"
PACKAGE_FILE = f"consul_{PACKAGE_VERSION}_amd64.deb"
PACKAGE_SHA256 = "e4e888bba104daba1d9161f49bfc52649a7e4efd45b1a7ead5bc54f2cb9c89d9"
SUITE = "bullseye"

START_SECONDS = 30.0
STOP_SECONDS = 10.0
FETCH_SECONDS = 300.0

_SOURCES = Path("/etc/apt")
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_MIRROR = re.compile(r"https?://[^\s\]#]+/debian/?(?=\s|$)")


class ConsulMissingError(RuntimeError):
    """There is no Consul to be had. The message says what was tried and what helps."""


class ConsulAgent:
    """An agent in development mode on free ports of the loopback: one server, no data on disk.

    An async context manager, bound to no event loop. `settings` are merged into the
    agent's configuration. What it logs is in `log`.
    """

    def __init__(
        self, settings: dict[str, Any] | None = None, *, token: str = "", http_port: int = 0
    ) -> None:
        self._settings = settings or {}
        self._token = token
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._binary = Path()
        self._process: subprocess.Popen[bytes] | None = None
        self.http_port = http_port

    @property
    def address(self) -> str:
        """`host:port` of the HTTP API."""
        return f"127.0.0.1:{self.http_port}"

    @property
    def log(self) -> str:
        """What the agent has written so far."""
        path = self._path / "consul.log"
        return path.read_text(errors="replace") if path.exists() else ""

    async def __aenter__(self) -> Self:
        self._binary = await asyncio.to_thread(consul_binary)
        self._directory = tempfile.TemporaryDirectory(prefix="kvmesh-consul-")
        http, server, serf = free_ports(3)
        self.http_port = self.http_port or http
        ports = {"http": self.http_port, "server": server, "serf_lan": serf}
        ports |= {"dns": -1, "grpc": -1, "https": -1, "serf_wan": -1}
        config = {
            "bind_addr": "127.0.0.1",
            "disable_update_check": True,
            "node_name": "kvmesh-test",
            **self._settings,
            "ports": {**ports, **self._settings.get("ports", {})},
        }
        (self._path / "agent.json").write_text(json.dumps(config))
        try:
            await self.start()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._close()

    async def start(self) -> None:
        """Start the agent, empty, on the same ports; return when it has elected itself."""
        config = str(self._path / "agent.json")
        command = [str(self._binary), "agent", "-dev", "-config-file", config]
        with (self._path / "consul.log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - no child watcher, no loop
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._path
            )
        try:
            async with asyncio.timeout(START_SECONDS):
                while not await self._is_ready():  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise RuntimeError(f"Consul did not start:\n{self.log[-2000:]}") from None

    async def kill(self) -> None:
        """Kill the agent; everything it knew is lost."""
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait, STOP_SECONDS)
            self._process = None

    def signal(self, number: int) -> None:
        """Send a signal to the agent, such as SIGSTOP and SIGCONT."""
        if self._process is not None:
            self._process.send_signal(number)

    async def get(self, path: str) -> Any:
        """Return the JSON that the HTTP API answers to a GET, e.g. of `/v1/agent/services`."""
        return await self._call("GET", path)

    async def put(self, path: str, body: Any = None) -> Any:
        """Return the JSON, or None, that the HTTP API answers to a PUT."""
        return await self._call("PUT", path, body)

    async def _call(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"X-Consul-Token": self._token} if self._token else {}
        async with httpx.AsyncClient(trust_env=False, headers=headers) as client:
            response = await client.request(method, f"http://{self.address}{path}", json=body)
            response.raise_for_status()
            return response.json() if response.content else None

    async def _is_ready(self) -> bool:
        if self._process is not None and self._process.poll() is not None:
            raise RuntimeError(f"Consul ended at once:\n{self.log[-2000:]}")
        with suppress(httpx.HTTPError):
            return bool(await self.get("/v1/health/node/kvmesh-test"))
        return False

    async def _close(self) -> None:
        await self.kill()
        if self._directory is not None:
            self._directory.cleanup()

    @property
    def _path(self) -> Path:
        if self._directory is None:
            raise RuntimeError("the agent is not started")
        return Path(self._directory.name)


def consul_binary(cache: Path | None = None) -> Path:
    """Return a Consul executable: the one on PATH, or Debian's in `cache`, fetched if needed.

    Blocks, for a minute or so if it fetches. Raises ConsulMissingError.
    """
    found = shutil.which("consul")
    if found:
        return Path(found)
    home = Path(environment().get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = (cache or home / "kvmesh" / "consul") / PACKAGE_SHA256[:16]
    binary = directory / "usr" / "bin" / "consul"
    if not binary.exists():
        _install(directory)
    return binary


def _install(directory: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix="fetch-") as work:
        package = _fetch(Path(work))
        digest = hashlib.sha256(package.read_bytes()).hexdigest()
        if digest != PACKAGE_SHA256:
            raise ConsulMissingError(f"{PACKAGE_FILE} has SHA-256 {digest}: not what we expect")
        unpacked = Path(work) / "unpacked"
        _run(["dpkg-deb", "-x", str(package), str(unpacked)])
        # Another process may have been faster; its copy is as good.
        with suppress(OSError):
            unpacked.rename(directory)
    if not directory.exists():
        raise ConsulMissingError(f"{directory} can't be written")


def _fetch(work: Path) -> Path:
    """Download the package with apt, which touches nothing outside `work`."""
    if platform.machine() != "x86_64":
        raise ConsulMissingError(
            _advice(f"Debian's package is for amd64, not {platform.machine()}")
        )
    mirrors = _mirrors()
    if not mirrors:
        raise ConsulMissingError(_advice(f"no Debian mirror is configured in {_SOURCES}"))
    failures = []
    for mirror in mirrors:
        try:
            return _fetch_from(mirror, work)
        except ConsulMissingError as error:
            failures.append(f"{mirror}: {error}")
    raise ConsulMissingError(_advice("\n".join(failures)))


def _fetch_from(mirror: str, work: Path) -> Path:
    for name in ("sources", "lists/partial", "cache/archives/partial"):
        (work / name).mkdir(parents=True, exist_ok=True)
    source = f"Types: deb\nURIs: {mirror}\nSuites: {SUITE}\nComponents: main\n"
    if _KEYRING.exists():
        source += f"Signed-By: {_KEYRING}\n"
    (work / "sources" / "consul.sources").write_text(source)
    settings = {
        "Dir::Etc::SourceList": "/dev/null",
        "Dir::Etc::SourceParts": work / "sources",
        "Dir::State": work,
        "Dir::State::Lists": work / "lists",
        "Dir::Cache": work / "cache",
        "APT::Architecture": "amd64",
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Acquire::Retries": "2",
        # The suite is old; what counts is the checksum above.
        "Acquire::Check-Valid-Until": "false",
    }
    apt = ["apt-get", "-q"]
    for name, value in settings.items():
        apt += ["-o", f"{name}={value}"]
    _run([*apt, "update"], work)
    _run([*apt, "download", f"consul={PACKAGE_VERSION}"], work)
    return work / PACKAGE_FILE


def _mirrors() -> list[str]:
    """Return the Debian mirrors that this machine is configured to use, in their order."""
    files = [_SOURCES / "sources.list"]
    files += sorted((_SOURCES / "sources.list.d").glob("*.list"))
    files += sorted((_SOURCES / "sources.list.d").glob("*.sources"))
    found: dict[str, None] = {}
    for file in files:
        if file.is_file():
            lines = file.read_text(errors="replace").splitlines()
            text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
            found |= dict.fromkeys(_MIRROR.findall(text))
    return list(found)


def _run(command: list[str], directory: Path | None = None) -> None:
    try:
        subprocess.run(
            command, cwd=directory, check=True, capture_output=True, timeout=FETCH_SECONDS
        )
    except FileNotFoundError:
        raise ConsulMissingError(f"{command[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise ConsulMissingError(f"{command[0]} took more than {FETCH_SECONDS:.0f} s") from None
    except subprocess.CalledProcessError as error:
        output = error.stderr.decode(errors="replace").strip()
        raise ConsulMissingError(f"{command[0]} failed: {output[-1000:]}") from None


def _advice(problem: str) -> str:
    return (
        "tests need a Consul agent; put `consul` on PATH, or let apt reach a Debian mirror "
        f"that has {SUITE} ({PACKAGE_FILE}).\n{problem}"
    )


def free_ports(count: int) -> list[int]:
    """Return ports that are free now, for TCP on the loopback."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
