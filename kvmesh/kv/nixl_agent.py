"""One NIXL agent over one registered block pool: our few calls, and our errors.

NIXL raises its own exceptions, which share no base class; all become `TransferError`.
"""

import importlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvmesh.errors import TransferError
from kvmesh.kv.nixl_messages import Region

Indices = NDArray[np.int32]

# The meta package, then what it consists of: one of them is enough.
_MODULES = ("nixl._api", "nixl_cu13._api", "nixl_cu12._api")
_BACKEND = "UCX"
_OURSELVES = "NIXL_INIT_AGENT"


def load() -> Any:
    """Return NIXL's Python API. Raises `TransferError` where it isn't installed."""
    raises = logging.raiseExceptions
    for name in _MODULES:
        try:
            api = importlib.import_module(name)
        except ImportError:
            continue
        # Importing it routes its records to stdout and hides errors of everybody's logging.
        logging.raiseExceptions = raises
        logger = logging.getLogger("nixl")
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.WARNING)
        return api
    raise TransferError("the nixl transport needs NIXL: pip install 'kvmesh[nixl]'")


class Read:
    """Blocks on their way. `done` says whether all are here; release it, whatever it says.

    Releasing one that is not done stops nothing: the agent goes on writing to its blocks.
    """

    __slots__ = ("done", "handle")

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.done = False


class Agent:
    """An agent named `name`. Made, used and closed in one thread; no call but `read` blocks.

    Everything raises `TransferError`.
    """

    def __init__(self, name: str, region: Region) -> None:
        api = load()
        self.name = name
        self._errors = _exceptions(api.nixlBind)
        with self._translated("NIXL cannot start"):
            config = api.nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND])
            self._agent = api.nixl_agent(name, config)
            if _BACKEND not in self._agent.backends:
                raise TransferError(f"NIXL has no {_BACKEND} backend here")
            whole = [(region.address, region.layout.size, region.device, "")]
            self._registered = self._agent.register_memory(whole, region.kind)
            self._local = self.prepare(_OURSELVES, region)
            self.metadata: bytes = self._agent.get_agent_metadata()

    def add(self, metadata: bytes) -> str:
        """Get to know a peer by its metadata, again if need be; return its name."""
        with self._translated("the peer cannot be reached"):
            name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove(self, name: str) -> None:
        """Forget a peer and disconnect from it. Its `prepare`d blocks must be released."""
        with self._translated("the peer cannot be removed"):
            self._agent.remove_remote_agent(name)

    def prepare(self, name: str, region: Region) -> Any:
        """Return a peer's blocks, or our own, as `read` takes them; see `forget`."""
        size, count = region.layout.block_bytes, region.layout.total_blocks
        strided = np.array([[region.address, size, region.device, size, count]], np.uint64)
        with self._translated("the peer's pool is not as described"):
            return self._agent.prep_xfer_dlist(name, strided, region.kind)

    def forget(self, prepared: Any) -> None:
        """Release what `prepare` returned."""
        with self._translated("descriptors cannot be released"):
            prepared.release()

    def read(self, peer: Any, remote: Indices, local: Indices) -> Read:
        """Start to copy a peer's blocks to ours. On one host it returns when that is done."""
        with self._translated("the holder is gone"):
            handle = self._agent.make_prepped_xfer("READ", self._local, local, peer, remote)
            read = Read(handle)
            try:
                read.done = _is_done(self._agent.transfer(handle))
            except BaseException:
                handle.release()
                raise
        return read

    def check(self, read: Read) -> bool:
        """Return whether all blocks are here."""
        with self._translated("the holder is gone"):
            read.done = read.done or _is_done(self._agent.check_xfer_state(read.handle))
        return read.done

    def release(self, read: Read) -> None:
        """Let go of a read."""
        with self._translated("a read cannot be released"):
            read.handle.release()

    def send(self, name: str, message: bytes) -> None:
        """Send a message to a peer that was `add`ed, or to ourselves."""
        with self._translated("the peer is gone"):
            self._agent.send_notif(name, message)

    def receive(self) -> Sequence[tuple[str, bytes]]:
        """Let peers' requests proceed; return messages as (sender, message)."""
        with self._translated("NIXL failed"):
            received = self._agent.get_new_notifs()
        return [(name, message) for name, each in received.items() for message in each]

    def close(self) -> None:
        """End the agent, and with it every read: nothing is written any more. Once only."""
        agent, self._agent = self._agent, None
        local, self._local = self._local, None
        with self._translated("NIXL did not close in order"):
            local.release()
            agent.deregister_memory(self._registered)

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise TransferError(f"{what}: {error}") from error


def _is_done(state: str) -> bool:
    if state == "ERR":
        raise TransferError("the holder is gone: the transfer failed")
    return state == "DONE"


def _exceptions(bindings: Any) -> tuple[type[Exception], ...]:
    each = vars(bindings).values()
    named = [one for one in each if isinstance(one, type) and issubclass(one, Exception)]
    return (*named, RuntimeError)
