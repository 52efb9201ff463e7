"""The workers that have room for a request, and what it would be to each of them. Pure.

Every decision looks at all workers of a model: what does not depend on the request is in
their standings, and what is made here of each is one bare tuple. A `Candidate` is made of the
two when somebody looks at it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import cast, overload

from services.router.cost import Work
from services.router.policy import Candidate, Demand
from services.router.worker import Standing, WorkerState

Figures = tuple[int, float, float, float, float, float, float]
"""What a `Work` says, in its order, in a fraction of the time that it takes to make one."""


class Candidates(Sequence[Candidate]):
    """Candidates that are made when they are looked at. What they say is of one instant."""

    def __init__(
        self, standings: Sequence[Standing], figures: Sequence[Figures], prompt_tokens: int
    ) -> None:
        self._standings = standings
        self._figures = figures
        self._prompt_tokens = prompt_tokens

    @property
    def works(self) -> Sequence[Work]:
        """The work of each, to be unpacked only: its fields have no names there."""
        return cast("Sequence[Work]", self._figures)

    @property
    def requests(self) -> Sequence[int]:
        """The requests on each."""
        return [standing.requests for standing in self._standings]

    def where(self, fits: Callable[[WorkerState], bool]) -> "Candidates":
        """Return those whose workers fit."""
        kept = [at for at, standing in enumerate(self._standings) if fits(standing.worker)]
        standings, figures = self._standings, self._figures
        return Candidates(
            [standings[at] for at in kept], [figures[at] for at in kept], self._prompt_tokens
        )

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._figures)

    @overload
    def __getitem__(self, at: int) -> Candidate: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Candidate]: ...

    def __getitem__(self, at: int | slice) -> Candidate | Sequence[Candidate]:
        """Return one of them, or some."""
        if isinstance(at, slice):
            return Candidates(self._standings[at], self._figures[at], self._prompt_tokens)
        return next(self._made([self._standings[at]], [self._figures[at]]))

    def __iter__(self) -> Iterator[Candidate]:
        """Make them all, one after the other."""
        return self._made(self._standings, self._figures)

    def _made(
        self, standings: Iterable[Standing], figures: Iterable[Figures]
    ) -> Iterator[Candidate]:
        new = tuple.__new__  # a third of the time that calling the classes takes
        for standing, work in zip(standings, figures, strict=True):
            cached = self._prompt_tokens - work[0]
            yield new(Candidate, (*standing[:3], cached, new(Work, work)))


def works_of(candidates: Sequence[Candidate]) -> Sequence[Work]:
    """Return the work of each, to be unpacked only. Quick where there are many."""
    if isinstance(candidates, Candidates):
        return candidates.works
    return [candidate.work for candidate in candidates]


def requests_of(candidates: Sequence[Candidate]) -> Sequence[int]:
    """Return the requests on each. Quick where there are many."""
    if isinstance(candidates, Candidates):
        return candidates.requests
    return [candidate.requests for candidate in candidates]


def with_room(
    standings: Sequence[Standing],
    demand: Demand,
    overlaps: Mapping[int, int],
    *,
    completion: float,
    max_requests: int,
    prefill_us: float,
) -> Candidates:
    """Return those that have room, in their order. The hot loop.

    `overlaps` are the leading blocks of the prompt that each seat has, `completion` the tokens
    to be decoded. `max_requests` is a limit for all workers, 0: each one's own. Where it is
    not known how quickly they compute, a prompt token takes `prefill_us`.
    """
    completion = float(completion)
    prompt, asked, hits_at = demand.prompt_tokens, demand.block_size, overlaps.get
    roomy = [each for each in standings if each.requests < (max_requests or each.max_requests)]
    figures: list[Figures] = [
        (
            uncached := prompt - (hits_at(seat, 0) * size if size == asked else 0),
            queued,
            decoding,
            held,
            completion,
            evicted if (evicted := uncached + completion - free) > 0 else 0.0,
            known_us or prefill_us,
        )
        for _, _, _, _, seat, size, queued, decoding, held, free, known_us in roomy
    ]
    return Candidates(roomy, figures, prompt)
