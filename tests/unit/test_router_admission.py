"""Who waits in the router, in what order, and how the wait ends."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from kvmesh.clock import SystemClock
from kvmesh.errors import (
    DeadlineError,
    MeshError,
    OverloadedError,
    UnavailableError,
    UnknownModelError,
)
from kvmesh.types import Load, Member, Role, State, WorkerNews
from services.router.admission import Admission, QueueConfig
from services.router.dispatcher import Dispatcher
from services.router.fair import Waiter
from services.router.planner import Decision, Planner, RoutingConfig
from services.router.plugins import Policies
from services.router.policy import Demand
from services.router.reservations import Ledger, Life
from services.router.state import Fleet


def worker(name: str = "d0", model: str = "m", **fields: object) -> Member:
    return Member(
        id=name,
        role=Role.DECODE,
        epoch="e1",
        address=f"{name}:1",
        state=State.READY,
        model=model,
        **fields,  # type: ignore[arg-type]
    )


def news(sequence: int, *events: Load) -> WorkerNews:
    return WorkerNews("", "e1", sequence, events)


class Rig:
    """One place on each worker, and a line in front."""

    def __init__(self, *members: Member, **limits: float) -> None:
        self.ledger = Ledger()
        self.fleet = Fleet(self.ledger)
        self.join(*members)
        planner = Planner(
            self.fleet,
            self.ledger,
            RoutingConfig(max_requests_per_worker=1),
            Policies("least_loaded"),
            random.Random(3),
        )
        self.admission = Admission(
            self.fleet,
            planner,
            QueueConfig(**limits),  # type: ignore[arg-type]
        )

    def join(self, *members: Member) -> None:
        self.fleet.update(members)
        for member in members:
            self.fleet.apply(Life(member.id, "e1"), news(1))

    def admit(self, name: str = "r", **fields: object) -> Decision:
        decision = self.admission.submit(demand(name, **fields), 0.0, None)
        assert isinstance(decision, Decision)
        return decision

    def wait(
        self, name: str, now: float = 0.0, deadline: float | None = None, **fields: object
    ) -> Waiter:
        waiter = self.admission.submit(demand(name, **fields), now, deadline)
        assert isinstance(waiter, Waiter)
        return waiter

    def pump(self, model: str = "m", now: float = 0.0) -> list[str]:
        return [waiter.demand.request_id for waiter, _ in self.admission.pump(model, now)]

    def drain_in_order(self, first: Decision) -> list[str]:
        order = []
        decision = first
        while self.admission.waiting:
            self.ledger.release(decision.reservation)
            ((waiter, decision),) = self.admission.pump("m", 0.0)
            order.append(waiter.demand.request_id)
        self.ledger.release(decision.reservation)
        return order


def demand(name: str = "r", model: str = "m", **fields: object) -> Demand:
    return Demand(name, model, 10, **fields)  # type: ignore[arg-type]


def told(rig: Rig, now: float) -> list[tuple[str, type[MeshError]]]:
    return [(w.demand.request_id, type(error)) for w, error in rig.admission.expire(now)]


def test_requests_are_admitted_by_priority_then_by_arrival() -> None:
    rig = Rig(worker())
    first = rig.admit()
    for name, priority in [("a", 1), ("b", 0), ("c", 1), ("d", -1), ("e", 0)]:
        rig.wait(name, priority=priority)

    assert rig.drain_in_order(first) == ["d", "b", "e", "a", "c"]
    assert rig.ledger.lives() == ()


def test_a_withdrawn_request_is_not_admitted() -> None:
    rig = Rig(worker())
    first = rig.admit()
    gone, _ = rig.wait("gone"), rig.wait("stays")

    rig.admission.withdraw(gone)
    rig.admission.withdraw(gone)

    assert rig.drain_in_order(first) == ["stays"]


def test_lines_of_different_models_do_not_hold_each_other_up() -> None:
    rig = Rig(worker(), worker("d1", model="n"))
    rig.admit()
    rig.wait("full")

    assert rig.admit("other", model="n").plan.decode.id == "d1"


def test_the_line_is_bounded_over_all_models() -> None:
    rig = Rig(worker(), worker("d1", model="n"), max_requests=2)
    rig.admit()
    rig.admit(model="n")
    rig.wait("a")
    rig.wait("b", model="n")

    with pytest.raises(OverloadedError) as caught:
        rig.wait("c")
    assert caught.value.retry_after == 1.0
    assert rig.admission.waiting == 2


def test_one_that_excludes_the_free_worker_is_passed_by() -> None:
    rig = Rig(worker("d0"), worker("d1"))
    held = {d.plan.decode.id: d for d in (rig.admit(), rig.admit())}
    rig.wait("picky", excluded=frozenset({"d0"}))
    rig.wait("plain")

    rig.ledger.release(held["d0"].reservation)

    assert rig.pump() == ["plain"]
    rig.ledger.release(held["d1"].reservation)
    assert rig.pump() == ["picky"]


def test_nobody_is_overtaken_by_one_who_could_use_the_same_room() -> None:
    rig = Rig(worker("d0"), worker("d1"))
    held = {d.plan.decode.id: d for d in (rig.admit(), rig.admit())}
    rig.wait("first")
    rig.wait("second", excluded=frozenset({"d0"}))

    rig.ledger.release(held["d1"].reservation)

    assert rig.pump() == ["first"]


def test_an_unknown_model_is_refused_at_once() -> None:
    rig = Rig(worker())

    with pytest.raises(UnknownModelError) as caught:
        rig.admission.submit(demand(model="never"), 0.0, None)
    assert caught.value.field == "model"


def test_time_that_is_up_already_is_refused() -> None:
    rig = Rig(worker())

    with pytest.raises(DeadlineError):
        rig.admission.submit(demand(), 5.0, 5.0)


def test_a_deadline_in_the_line_ends_the_wait() -> None:
    rig = Rig(worker())
    rig.admit()
    rig.wait("a", deadline=3.0)
    rig.wait("b", deadline=2.0)

    assert rig.admission.next_expiry() == 2.0
    assert told(rig, 1.9) == []
    assert told(rig, 2.0) == [("b", DeadlineError)]
    assert told(rig, 9.0) == [("a", DeadlineError)]
    assert rig.admission.next_expiry() is None


def test_a_wait_without_a_deadline_is_bounded() -> None:
    rig = Rig(worker(), max_seconds=60.0)
    rig.admit()
    rig.wait("a", now=5.0)

    assert told(rig, 64.9) == []
    assert told(rig, 65.0) == [("a", OverloadedError)]


def test_without_a_worker_the_wait_is_short() -> None:
    rig = Rig(worker(), wait_for_worker_seconds=2.0)
    rig.join()
    rig.wait("a", now=1.0)
    rig.wait("b", now=1.0, deadline=2.0)

    assert told(rig, 2.0) == [("b", DeadlineError)]
    ((_, error),) = rig.admission.expire(3.0)
    assert isinstance(error, UnavailableError)
    assert error.retry_after == 1.0


def test_without_a_worker_and_without_patience_it_is_refused_at_once() -> None:
    rig = Rig(worker(), wait_for_worker_seconds=0.0)
    rig.join()

    with pytest.raises(UnavailableError):
        rig.wait("a")
    assert rig.admission.waiting == 0


def test_a_worker_that_comes_in_time_takes_those_who_wait() -> None:
    rig = Rig(worker())
    rig.join()
    rig.wait("a")

    rig.join(worker())

    assert [w.demand.request_id for w, _ in rig.admission.fleet_changed(1.0)] == ["a"]
    assert rig.admission.waiting == 0


def test_the_short_wait_begins_when_the_last_worker_goes_and_ends_when_one_comes() -> None:
    rig = Rig(worker(), wait_for_worker_seconds=2.0)
    rig.admit()
    rig.wait("a", deadline=100.0)
    rig.fleet.suspect(Life("d0", "e1"))
    rig.admission.fleet_changed(10.0)
    assert rig.admission.next_expiry() == 12.0

    rig.fleet.apply(Life("d0", "e1"), news(1))
    rig.admission.fleet_changed(11.0)
    assert rig.admission.next_expiry() == 100.0
    assert told(rig, 12.0) == []


# The dispatcher: the same, with a timer and answers.


@pytest.fixture
async def live() -> AsyncIterator[tuple[Rig, Dispatcher]]:
    rig = Rig(worker(), wait_for_worker_seconds=0.02)
    async with Dispatcher(rig.fleet, rig.ledger, rig.admission, SystemClock()) as dispatcher:
        yield rig, dispatcher


async def test_a_freed_place_is_given_on_at_once(live: tuple[Rig, Dispatcher]) -> None:
    rig, dispatcher = live
    answers: list[Decision | MeshError] = []
    first = dispatcher.submit(demand("a"), None, answers.append)
    second = dispatcher.submit(demand("b"), None, answers.append)
    assert len(answers) == 1

    dispatcher.end(first)

    assert all(isinstance(answer, Decision) for answer in answers)
    assert len(answers) == 2
    dispatcher.end(second)
    dispatcher.end(second)
    assert rig.ledger.active == 0
    assert rig.ledger.lives() == ()


async def test_a_load_report_that_shows_room_lets_the_next_one_in(
    live: tuple[Rig, Dispatcher],
) -> None:
    _, dispatcher = live
    life = Life("d0", "e1")
    dispatcher.apply(life, news(2, Load(running=1)))
    answers: list[Decision | MeshError] = []
    dispatcher.submit(demand("a"), None, answers.append)
    assert answers == []

    dispatcher.apply(life, news(3, Load(running=0)))

    assert len(answers) == 1


async def test_ending_a_request_in_line_leaves_nothing(live: tuple[Rig, Dispatcher]) -> None:
    rig, dispatcher = live
    answers: list[Decision | MeshError] = []
    first = dispatcher.submit(demand("a"), None, answers.append)
    dispatcher.end(dispatcher.submit(demand("b"), None, answers.append))

    dispatcher.end(first)

    assert len(answers) == 1
    assert rig.admission.waiting == 0
    assert rig.ledger.lives() == ()


async def test_the_timer_tells_each_whose_wait_is_over(live: tuple[Rig, Dispatcher]) -> None:
    rig, dispatcher = live
    clock = SystemClock()
    dispatcher.submit(demand("holder"), None, lambda _: None)
    loop = asyncio.get_running_loop()
    deadline: asyncio.Future[Decision | MeshError] = loop.create_future()
    unserved: asyncio.Future[Decision | MeshError] = loop.create_future()
    dispatcher.submit(demand("a"), clock.now() + 60, unserved.set_result)
    dispatcher.submit(demand("b"), clock.now() + 0.01, deadline.set_result)

    assert isinstance(await deadline, DeadlineError)
    dispatcher.suspect(Life("d0", "e1"))
    assert isinstance(await unserved, UnavailableError)
    assert rig.admission.waiting == 0


async def test_members_that_arrive_let_those_in_who_wait(live: tuple[Rig, Dispatcher]) -> None:
    _, dispatcher = live
    dispatcher.update_members([])
    answers: list[Decision | MeshError] = []
    dispatcher.submit(demand("a"), None, answers.append)

    dispatcher.update_members([worker()])
    assert answers == []
    dispatcher.apply(Life("d0", "e1"), news(1))

    assert len(answers) == 1
