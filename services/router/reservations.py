"""What this router has placed and not yet seen end, exact to the unit.

A reservation is taken when a request is planned and ends when its client says so or
its stream ends: never by age. Figures are kept per life of a worker, so that nothing
of an earlier life weighs on the next one.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvmesh.types import Leg


class Life(NamedTuple):
    """One life of one worker: its id in the registry and its epoch."""

    worker_id: str
    epoch: str


class Held:
    """What is reserved on one life of one worker. Every figure is >= 0.

    `requests` counts all that are planned here; `present` those of them that are
    thought to have reached the worker, so that its own report counts them too: a
    decode with remote prefill is reserved long before it arrives. `decode_blocks`
    is KV to be held until the end, `prefill_blocks` prompt work still to be done.
    """

    __slots__ = ("decode_blocks", "prefill_blocks", "present", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.present = 0
        self.decode_blocks = 0
        self.prefill_blocks = 0

    @property
    def blocks(self) -> int:
        """All reserved work, in blocks."""
        return self.decode_blocks + self.prefill_blocks

    def is_zero(self) -> bool:
        """Return whether nothing is reserved."""
        return not (self.requests or self.present or self.decode_blocks or self.prefill_blocks)


NOTHING_HELD = Held()
"""The figures of a worker on which nothing is reserved. Never written to."""


class Expected(Protocol):
    """What follows from a planned prompt. Exactly one of these is called, once."""

    def computed(self) -> None:
        """The prompt is computed."""
        ...

    def dropped(self) -> None:
        """The request was over before that."""
        ...


class Trial(Protocol):
    """Learns how the workers of a planned request do."""

    def generating(self) -> None:
        """All its workers have done their parts so far."""
        ...

    def failed(self, leg: Leg, *, timed_out: bool) -> None:
        """One part of the request failed, or was not done when its time was up."""
        ...

    def ended(self) -> None:
        """The request is over."""
        ...


@dataclass(slots=True, eq=False)
class Reservation:
    """One planned request's hold on its workers. Made and changed by `Ledger` only.

    `prefill` None: the decode worker computes the prompt, and `prefill_held` is its too.
    `expected` are told when the prompt is computed, or that it will not be. `trial`, where
    there is one, is told all of it.
    """

    decode: Life
    decode_held: Held
    decode_blocks: int
    prefill: Life | None
    prefill_held: Held
    prefill_blocks: int
    prefilled: bool = False
    released: bool = False
    expected: Sequence[Expected] = field(default=())
    trial: Trial | None = None


class Ledger:
    """All reservations of this router.

    Each reservation remembers the very figures it was added to. Forgetting a life takes
    its figures out of the ledger, and what is released later no longer shows anywhere.
    """

    def __init__(self) -> None:
        self._held: dict[Life, Held] = {}
        self._active = 0
        self._changed: set[Life] = set()

    @property
    def active(self) -> int:
        """Reservations that were taken and not released."""
        return self._active

    def held(self, life: Life) -> Held:
        """Return the figures of one life. Read only; good until the next change."""
        return self._held.get(life, NOTHING_HELD)

    @property
    def lives_held(self) -> Mapping[Life, Held]:
        """The figures of all lives on which anything is reserved. Read only."""
        return self._held

    def changed(self) -> Collection[Life]:
        """Return the lives whose figures have changed since this was last asked."""
        changed, self._changed = self._changed, set()
        return changed

    def lives(self) -> tuple[Life, ...]:
        """Return the lives on which anything is reserved."""
        return tuple(self._held)

    def reserve(
        self, decode: Life, decode_blocks: int, prefill: Life | None, prefill_blocks: int
    ) -> Reservation:
        """Take a reservation. `prefill` None: the decode worker computes the prompt."""
        on_decode = self._open(decode)
        on_decode.requests += 1
        on_decode.decode_blocks += decode_blocks
        if prefill is None:
            on_prefill = on_decode
        else:
            on_prefill = self._open(prefill)
            on_prefill.requests += 1
        on_prefill.present += 1
        on_prefill.prefill_blocks += prefill_blocks
        self._active += 1
        self._note(decode, prefill)
        return Reservation(decode, on_decode, decode_blocks, prefill, on_prefill, prefill_blocks)

    def prefilled(self, reservation: Reservation) -> None:
        """End the prefill part: the prompt is computed. Again, or after the end: no effect."""
        if reservation.prefilled or reservation.released:
            return
        self._end_prefill(reservation)
        if reservation.prefill is not None:
            reservation.decode_held.present += 1
        self._note(reservation.decode, reservation.prefill)
        for expected in reservation.expected:
            expected.computed()

    def release(self, reservation: Reservation) -> None:
        """End the whole reservation. A second time has no effect."""
        if reservation.released:
            return
        held = reservation.decode_held
        if reservation.prefill is None or reservation.prefilled:
            held.present -= 1
        if not reservation.prefilled:
            self._end_prefill(reservation)
            for expected in reservation.expected:
                expected.dropped()
        held.requests -= 1
        held.decode_blocks -= reservation.decode_blocks
        reservation.released = True
        self._active -= 1
        self._note(reservation.decode, reservation.prefill)
        self._close(reservation.decode, held)
        if reservation.trial is not None:
            reservation.trial.ended()

    def forget(self, life: Life) -> None:
        """Drop the figures of a life that is over."""
        self._held.pop(life, None)
        self._note(life, None)

    def _end_prefill(self, reservation: Reservation) -> None:
        reservation.prefilled = True
        held = reservation.prefill_held
        held.prefill_blocks -= reservation.prefill_blocks
        if reservation.prefill is not None:
            held.requests -= 1
            held.present -= 1
            self._close(reservation.prefill, held)

    def _note(self, decode: Life, prefill: Life | None) -> None:
        self._changed.add(decode)
        if prefill is not None:
            self._changed.add(prefill)

    def _open(self, life: Life) -> Held:
        held = self._held.get(life)
        if held is None:
            held = self._held[life] = Held()
        return held

    def _close(self, life: Life, held: Held) -> None:
        if held.is_zero() and self._held.get(life) is held:
            del self._held[life]
