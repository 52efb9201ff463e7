"""What differs between two answers, and whether that is known."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

from kvmesh.testing.differential.answers import Answer, Choice, Position, PromptLogprobs, Ranked
from kvmesh.testing.differential.asks import Ask

LOGPROB_TOLERANCE = 1e-2
"""Two engines add the same numbers in another order; float32 leaves less than this."""


RANK_TOLERANCE = 0.02
"""Share of a rank: so near to each other are tokens that nothing but noise puts in order."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that is not the same in our answer and in theirs.

    `what` names it: `status 400|200`, `error`, `choices`, `text`, `finish_reason`,
    `stop_reason`, `usage`, `usage_with_text`, `logprobs`, `bytes`, `offsets`, `prompt`,
    `prompt_text`, `labels`, `done` or `document`.
    """

    ask: Ask
    what: str
    ours: object
    theirs: object

    def __str__(self) -> str:
        """Return it for people, on three lines."""
        return f"{self.ask.name}: {self.what}\n  ours:   {self.ours!r}\n  theirs: {self.theirs!r}"


@dataclass(frozen=True, slots=True)
class Known:
    """A difference that is meant. `asks` and `what` are globs.

    `title` is the heading under which users read what it is, and why. `also` says
    whether our answer and theirs differ in this way and in no other.
    """

    title: str
    asks: tuple[str, ...]
    what: tuple[str, ...]
    also: Callable[[Any, Any], bool] = lambda ours, theirs: True

    def covers(self, difference: Difference) -> bool:
        """Return whether it is this one."""
        return (
            any(fnmatchcase(difference.ask.name, glob) for glob in self.asks)
            and any(fnmatchcase(difference.what, glob) for glob in self.what)
            and self.also(difference.ours, difference.theirs)
        )


@dataclass(slots=True)
class Verdict:
    """Differences that no entry of a table covers, and entries that covered none."""

    unexplained: list[Difference] = field(default_factory=list)
    explained: dict[Known, list[Difference]] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)


def judge(differences: Iterable[Difference], table: Sequence[Known]) -> Verdict:
    """Hold differences against the table. Each goes to the first entry that covers it.

    An entry's unused globs are told one by one, so that none outlives its reason.
    """
    verdict = Verdict(explained={known: [] for known in table})
    for difference in differences:
        known = next((known for known in table if known.covers(difference)), None)
        if known is None:
            verdict.unexplained.append(difference)
        else:
            verdict.explained[known].append(difference)
    for known, covered in verdict.explained.items():
        names = {difference.ask.name for difference in covered}
        kinds = {difference.what for difference in covered}
        for glob, values in chain(
            ((glob, names) for glob in known.asks), ((glob, kinds) for glob in known.what)
        ):
            if not any(fnmatchcase(value, glob) for value in values):
                verdict.unused.append(f"{known.title}: {glob}")
    return verdict


def differences(ask: Ask, ours: Answer, theirs: Answer) -> Iterator[Difference]:
    """Yield what differs. After another status nothing else is compared."""
    if ours.status != theirs.status:
        yield Difference(ask, f"status {ours.status}|{theirs.status}", ours.raw, theirs.raw)
        return
    for what in ("error", "done", "document", "labels", "usage", "usage_with_text"):
        one, other = getattr(ours, what), getattr(theirs, what)
        if one != other:
            yield Difference(ask, what, one, other)
    yield from _prompt(ask, ours.prompt, theirs.prompt)
    if ours.choices.keys() != theirs.choices.keys():
        yield Difference(ask, "choices", sorted(ours.choices), sorted(theirs.choices))
        return
    for index, choice in sorted(ours.choices.items()):
        yield from _choice(ask, choice, theirs.choices[index])


def _choice(ask: Ask, ours: Choice, theirs: Choice) -> Iterator[Difference]:
    for what in ("text", "finish_reason", "stop_reason"):
        one, other = getattr(ours, what), getattr(theirs, what)
        if one != other:
            yield Difference(ask, what, one, other)
    yield from _prompt(ask, ours.prompt, theirs.prompt)
    if ours.logprobs is None or theirs.logprobs is None:
        if ours.logprobs != theirs.logprobs:
            yield Difference(ask, "logprobs", ours.logprobs, theirs.logprobs)
        return
    if len(ours.logprobs) != len(theirs.logprobs):
        yield Difference(ask, "logprobs", _tokens(ours), _tokens(theirs))
        return
    pairs = list(zip(ours.logprobs, theirs.logprobs, strict=True))
    unlike = next((pair for pair in pairs if not _alike(*pair)), None)
    if unlike is not None:
        yield Difference(ask, "logprobs", *unlike)
    for what, name in (("offsets", "offset"), ("bytes", "utf8")):
        one = [getattr(mine, name) for mine, _ in pairs]
        other = [getattr(their, name) for _, their in pairs]
        if one != other:
            yield Difference(ask, what, one, other)


def _prompt(
    ask: Ask, ours: PromptLogprobs | None, theirs: PromptLogprobs | None
) -> Iterator[Difference]:
    """Compare what is told of a prompt: `prompt`, and as what text `prompt_text`."""
    if ours is None or theirs is None or len(ours) != len(theirs):
        if ours != theirs:
            yield Difference(ask, "prompt", ours, theirs)
        return
    texts: list[tuple[Ranked, Ranked]] = []
    for mine, their in zip(ours, theirs, strict=True):
        if mine is None or their is None:
            if mine is not their:
                yield Difference(ask, "prompt", mine, their)
            continue
        if not _told_alike(mine, their):
            yield Difference(ask, "prompt", mine, their)
            return
        texts += [(mine[id_], their[id_]) for id_ in mine.keys() & their.keys()]
    unlike = next(((a.text, b.text) for a, b in texts if a.text != b.text), None)
    if unlike is not None:
        yield Difference(ask, "prompt_text", *unlike)


def _told_alike(ours: dict[str, Ranked], theirs: dict[str, Ranked]) -> bool:
    """Return whether two rows say the same; the prompt's own token is the first in each."""
    if len(ours) != len(theirs) or next(iter(ours)) != next(iter(theirs)):
        return False
    last = min(each.logprob for each in (*ours.values(), *theirs.values()))
    for id_ in ours.keys() | theirs.keys():
        one, other = ours.get(id_), theirs.get(id_)
        if not _near(one.logprob if one else last, other.logprob if other else last):
            return False
        if one and other and not _as_high(one.rank, other.rank):
            return False
    return True


def _as_high(ours: int | None, theirs: int | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return abs(ours - theirs) <= 1 + RANK_TOLERANCE * max(ours, theirs)


def _tokens(choice: Choice) -> list[str]:
    return [position.token for position in choice.logprobs or []]


def _alike(ours: Position, theirs: Position) -> bool:
    if ours.token != theirs.token or not _near(ours.logprob, theirs.logprob):
        return False
    if len(ours.top) != len(theirs.top):
        return False
    # The last of the likeliest may be another one, if it is as likely.
    last = min([*ours.top.values(), *theirs.top.values()], default=0.0)
    return all(
        _near(ours.top.get(token, last), theirs.top.get(token, last))
        for token in ours.top.keys() | theirs.top.keys()
    )


def _near(ours: float | None, theirs: float | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return abs(ours - theirs) <= LOGPROB_TOLERANCE
