"""Who can be asked: the discovered processes, by model, and turns among them."""

import random
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from kvmesh.errors import UnavailableError, UnknownModelError
from kvmesh.rpc.peer import Peer, PeerPool
from kvmesh.types import Member, Role, State, Worker

RETRY_AFTER_SECONDS = 2.0
"""What a caller is told to wait when a model has no workers: about a discovery round."""

_CALLED = (Role.TOKENIZER, Role.ROUTER, Role.PREFILL, Role.DECODE)


@dataclass(frozen=True, slots=True)
class Model:
    """A model that can be served end to end now.

    `context_length` is in tokens, the smallest of its decode workers'; 0: not known.
    `block_size` is that of the block hashes.
    """

    name: str
    tokenizers: tuple[Worker, ...]
    decoders: tuple[Worker, ...]
    context_length: int
    block_size: int


class Fleet:
    """The mesh as this frontend sees it. For one event loop."""

    def __init__(self, pool: PeerPool, rng: random.Random) -> None:
        self._pool = pool
        self._rng = rng
        self._models: dict[str, Model] = {}
        self._known: set[str] = set()
        self._routers: tuple[Worker, ...] = ()
        self._epochs: dict[str, str] = {}
        self._turns: Counter[Role] = Counter()
        self.decoding: Counter[str] = Counter()
        """Requests of this frontend on each decode worker, by id."""

    def update(self, members: Iterable[Member]) -> None:
        """Take a new membership."""
        members = [member for member in members if member.role in _CALLED]
        ready = [member for member in members if member.state is State.READY]
        self._known |= {member.model for member in members if member.model}
        served = (_model(name, ready) for name in sorted({member.model for member in ready}))
        self._models = {model.name: model for model in served if model is not None}
        self._routers = _workers(ready, Role.ROUTER)
        self._epochs = {member.id: member.epoch for member in members}
        self._pool.retain([_worker(member) for member in members])

    def models(self) -> Sequence[Model]:
        """Return what can be served end to end now, by name."""
        return tuple(self._models.values())

    def knows(self, name: str) -> bool:
        """Return whether a model of this name was ever announced."""
        return name in self._known

    def model(self, name: str) -> Model:
        """Return a model that can be served.

        Raises `UnknownModelError` for one that nobody ever announced, `UnavailableError`
        for one that lacks workers now.
        """
        model = self._models.get(name)
        if model is not None:
            return model
        if name in self._known:
            raise UnavailableError(
                f"no worker can serve the model {name!r} now", retry_after=RETRY_AFTER_SECONDS
            )
        raise UnknownModelError(f"the model {name[:128]!r} does not exist", field="model")

    def tokenizers(self, model: Model) -> list[Peer]:
        """Return the model's tokenizers, in the order to try them in: the next one first."""
        return self._in_turn(Role.TOKENIZER, model.tokenizers)

    def routers(self) -> list[Peer]:
        """Return the routers, in the order to try them in: the next one first."""
        return self._in_turn(Role.ROUTER, self._routers)

    def least_busy(self, model: Model, excluded: Collection[str]) -> Worker:
        """Return the decode worker on which this frontend has least running."""
        current = self._models.get(model.name, model).decoders
        candidates = [worker for worker in current if worker.id not in excluded]
        if not candidates:
            raise UnavailableError(
                f"no decode worker is left for the model {model.name!r}",
                retry_after=RETRY_AFTER_SECONDS,
            )
        least = min(self.decoding[worker.id] for worker in candidates)
        return self._rng.choice([w for w in candidates if self.decoding[w.id] == least])

    def same_lives(self, workers: Iterable[Worker]) -> list[str]:
        """Return the ids of those workers that have not been started anew since, as far as known.

        What a life failed with says nothing of the next one.
        """
        epochs = self._epochs
        return [w.id for w in workers if epochs.get(w.id, w.epoch) in ("", w.epoch)]

    def peer(self, worker: Worker) -> Peer:
        """Return the connection to a worker."""
        return self._pool.get(worker)

    def _in_turn(self, role: Role, workers: Sequence[Worker]) -> list[Peer]:
        # Turns of their own: a request asks a tokenizer and a router, so that of two routers
        # shared turns would lead to the same one each time.
        self._turns[role] += 1
        start = self._turns[role] % len(workers) if workers else 0
        return [self._pool.get(worker) for worker in (*workers[start:], *workers[:start])]


def _model(name: str, ready: Sequence[Member]) -> Model | None:
    own = [member for member in ready if member.model == name]
    decoders = [member for member in own if member.role is Role.DECODE]
    tokenizers = _workers(own, Role.TOKENIZER)
    if not name or not decoders or not tokenizers:
        return None
    lengths = [member.context_length for member in decoders if member.context_length]
    return Model(
        name,
        tokenizers,
        _workers(decoders, Role.DECODE),
        context_length=min(lengths, default=0),
        block_size=decoders[0].block_size,
    )


def _workers(members: Iterable[Member], role: Role) -> tuple[Worker, ...]:
    return tuple(_worker(member) for member in members if member.role is role)


def _worker(member: Member) -> Worker:
    return Worker(member.id, member.epoch, member.address)
