"""One NIXL agent over one registered block pool and its board: our few calls, and our errors.

NIXL raises its own exceptions, which share no base class; all become `TransferError`.
"""

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvmesh.errors import TransferError
from kvmesh.kv.base import PoolLayout
from kvmesh.kv.board import SLOTS, WORD_BYTES, slot_of
from kvmesh.kv.nixl_messages import Region, Site

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


class Transfer:
    """Something on its way. `done` says whether all of it is there; release it, whatever it says.

    Releasing one that is not done stops nothing: the agent goes on with it.
    """

    __slots__ = ("done", "handle")

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.done = False


@dataclass(frozen=True, slots=True)
class Source:
    """A peer's blocks and board, ready to be read; see `Agent.prepare`."""

    blocks: Any
    board: Any


class Agent:
    """An agent named `name`. Made, used and closed in one thread; no call but `read` blocks.

    `board` is the address of this pool's own board. Everything raises `TransferError`.
    """

    def __init__(self, name: str, region: Region, board: int) -> None:
        api = load()
        self.name = name
        self._errors = _exceptions(api.nixlBind)
        self._words = np.zeros(SLOTS, np.uint64)  # what was seen on boards, by our own count
        self._closed_word = np.zeros(1, np.uint64)
        self._looks = 0
        with self._translated("NIXL cannot start"):
            config = api.nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND])
            self._agent = api.nixl_agent(name, config)
            if _BACKEND not in self._agent.backends:
                raise TransferError(f"NIXL has no {_BACKEND} backend here")
            seen, closed = self._words.ctypes.data, self._closed_word.ctypes.data
            self._registered = [
                self._agent.register_memory([(address, size, device, "")], kind)
                for address, size, device, kind in (
                    (region.address, region.layout.size, region.device, region.kind),
                    (board, SLOTS * WORD_BYTES, 0, "DRAM"),
                    (seen, SLOTS * WORD_BYTES, 0, "DRAM"),
                    (closed, WORD_BYTES, 0, "DRAM"),
                )
            ]
            self._local = self._descriptors(_OURSELVES, region)
            self._seen = self._descriptors(_OURSELVES, _words(SLOTS, seen))
            self._closed = self._descriptors(_OURSELVES, _words(1, closed))
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

    def prepare(self, name: str, site: Site) -> Source:
        """Return a peer's blocks and board as `read`, `look` and `mark` take them; see `forget`."""
        with self._translated("the peer's pool is not as described"):
            blocks = self._descriptors(name, site.region)
            return Source(blocks, self._descriptors(name, _words(SLOTS, site.board)))

    def forget(self, source: Source) -> None:
        """Release what `prepare` returned."""
        with self._translated("descriptors cannot be released"):
            source.blocks.release()
            source.board.release()

    def read(self, source: Source, remote: Indices, local: Indices) -> Transfer:
        """Start to copy a peer's blocks to ours. On one host it returns when that is done."""
        return self._start("READ", self._local, local, source.blocks, remote)

    def look(self, source: Source, number: int) -> tuple[Transfer, int]:
        """Start to read the word of a ticket's number; it will be at the place returned.

        What `seen` says of a place is good until as many looks later as there are slots.
        """
        self._looks = (self._looks + 1) % SLOTS
        place = self._looks
        self._words[place] = 0
        ours, theirs = _one(place), _one(slot_of(number))
        return self._start("READ", self._seen, ours, source.board, theirs), place

    def seen(self, place: int) -> int:
        """Return the word that a `look` found."""
        return int(self._words[place])

    def mark(self, source: Source, number: int) -> Transfer:
        """Start to clear the word of a ticket's number."""
        theirs = _one(slot_of(number))
        return self._start("WRITE", self._closed, _one(0), source.board, theirs)

    def check(self, transfer: Transfer) -> bool:
        """Return whether all of it is there."""
        with self._translated("the holder is gone"):
            done = transfer.done or _is_done(self._agent.check_xfer_state(transfer.handle))
        transfer.done = done
        return done

    def release(self, transfer: Transfer) -> None:
        """Let go of a transfer."""
        with self._translated("a transfer cannot be released"):
            transfer.handle.release()

    def send(self, name: str, message: bytes) -> None:
        """Send a message to a peer that was `add`ed, or to ourselves."""
        with self._translated("the peer is gone"):
            self._agent.send_notif(name, message)

    def receive(self) -> bool:
        """Let peers' requests proceed; return whether one has sent a message."""
        with self._translated("NIXL failed"):
            return bool(self._agent.get_new_notifs())

    def close(self) -> None:
        """End the agent, and with it every read: nothing is written any more. Once only."""
        agent, self._agent = self._agent, None
        prepared = self._local, self._seen, self._closed
        self._local = self._seen = self._closed = None
        with self._translated("NIXL did not close in order"):
            for each in prepared:
                each.release()
            for each in self._registered:
                agent.deregister_memory(each)
        self._words = self._closed_word = np.empty(0, np.uint64)

    def _descriptors(self, name: str, region: Region) -> Any:
        size, count = region.layout.block_bytes, region.layout.total_blocks
        strided = np.array([[region.address, size, region.device, size, count]], np.uint64)
        return self._agent.prep_xfer_dlist(name, strided, region.kind)

    def _start(
        self, operation: str, ours: Any, local: Indices, theirs: Any, remote: Indices
    ) -> Transfer:
        with self._translated("the holder is gone"):
            handle = self._agent.make_prepped_xfer(operation, ours, local, theirs, remote)
            transfer = Transfer(handle)
            try:
                transfer.done = _is_done(self._agent.transfer(handle))
            except BaseException:
                handle.release()
                raise
        return transfer

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise TransferError(f"{what}: {error}") from error


def _words(count: int, address: int) -> Region:
    return Region(PoolLayout(count, WORD_BYTES), address)


def _one(index: int) -> Indices:
    return np.array([index], np.int32)


def _is_done(state: str) -> bool:
    if state == "ERR":
        raise TransferError("the holder is gone: the transfer failed")
    return state == "DONE"


def _exceptions(bindings: Any) -> tuple[type[Exception], ...]:
    each = vars(bindings).values()
    named = [one for one in each if isinstance(one, type) and issubclass(one, Exception)]
    return (*named, RuntimeError)
