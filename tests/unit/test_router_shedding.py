"""Who is turned away: when lines are full, and when a turn would come too late."""

import random

import pytest

from kvmesh.errors import DeadlineError, MeshError, OverloadedError
from kvmesh.types import Member, Role, State, WorkerNews
from services.router.admission import MAX_RETRY_AFTER_SECONDS, Admission, QueueConfig
from services.router.dispatcher import Dispatcher
from services.router.fair import Waiter
from services.router.pace import EVIDENCE
from services.router.planner import Decision, Planner, RoutingConfig
from services.router.plugins import Policies
from services.router.policy import Demand
from services.router.reservations import Ledger, Life
from services.router.state import Fleet


class FakeClock:
    time = 100.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time


class Rig:
    """One place on one worker for each model, and lines in front."""

    def __init__(self, *models: str, **limits: object) -> None:
        self.ledger = Ledger()
        self.fleet = Fleet(self.ledger)
        names = models or ("m",)
        self.fleet.update(
            Member(f"d-{model}", Role.DECODE, "e1", "h:1", State.READY, model) for model in names
        )
        for model in names:
            self.fleet.apply(Life(f"d-{model}", "e1"), WorkerNews("", "e1", 1, ()))
        planner = Planner(
            self.fleet,
            self.ledger,
            RoutingConfig(max_requests_per_worker=1),
            Policies("least_loaded"),
            random.Random(3),
        )
        self.admission = Admission(self.fleet, planner, QueueConfig(**limits))  # type: ignore[arg-type]
        self.holders = {model: self.decide(model) for model in names}

    def decide(self, model: str) -> Decision:
        decision = self.admission.submit(Demand("holder", model, 10), 0.0, None)
        assert isinstance(decision, Decision)
        return decision

    def wait(
        self, key: str = "", now: float = 0.0, deadline: float | None = None, **fields: object
    ) -> Waiter:
        fields = {"model": "m", "prompt_tokens": 10} | fields
        demand = Demand(f"r-{key}", fair_key=key, **fields)  # type: ignore[arg-type]
        waiter = self.admission.submit(demand, now, deadline)
        assert isinstance(waiter, Waiter)
        return waiter

    def serve(self, now: float, model: str = "m") -> Waiter:
        self.ledger.release(self.holders[model].reservation)
        ((waiter, self.holders[model]),) = self.admission.pump(model, now)
        return waiter

    def shed(self) -> list[Waiter]:
        taken = self.admission.take_shed()
        assert all(isinstance(error, OverloadedError) for _, error in taken)
        return [waiter for waiter, _ in taken]


def paced(seconds: float, **limits: object) -> Rig:
    """Return a rig whose line is known to move once in so many seconds; it is 0 s now."""
    rig = Rig(**limits)
    begin = -seconds * EVIDENCE
    for _ in range(EVIDENCE + 1):
        rig.wait(now=begin)
    for number in range(EVIDENCE):
        rig.serve(begin + seconds * (number + 1))
    return rig


def test_when_lines_are_full_the_greediest_key_pays_for_a_modest_one() -> None:
    rig = Rig(max_requests=4)
    crowd = [rig.wait("a") for _ in range(4)]

    modest = rig.wait("b")

    assert rig.shed() == [crowd[-1]]
    assert rig.shed() == []
    assert rig.admission.waiting == 4
    assert modest.in_line
    assert not crowd[-1].in_line


def test_a_key_that_has_its_share_gets_no_more() -> None:
    rig = Rig(max_requests=4)
    for key in "aaaa":
        rig.wait(key)
    rig.wait("b")
    rig.wait("b")

    for key in "ab":
        with pytest.raises(OverloadedError):
            rig.wait(key)
    assert len(rig.shed()) == 2
    rig.wait("c")
    assert len(rig.shed()) == 1


def test_keys_do_not_take_the_odd_place_from_each_other() -> None:
    rig = Rig(max_requests=5)
    for key in "aaabb":
        rig.wait(key)

    with pytest.raises(OverloadedError):
        rig.wait("b")


def test_shares_of_the_lines_go_by_weight() -> None:
    rig = Rig(max_requests=6, weights=("a=2",))
    for key in "aaaabb":
        rig.wait(key)

    for key in "ab":
        with pytest.raises(OverloadedError):
            rig.wait(key)


def test_an_urgent_request_takes_the_place_of_its_own_keys_last() -> None:
    rig = Rig(max_requests=3)
    rig.wait("a", priority=0)
    bulk = [rig.wait("a", priority=5), rig.wait("a", priority=5)]

    urgent = rig.wait("a", priority=0)

    assert rig.shed() == [bulk[1]]
    with pytest.raises(OverloadedError):
        rig.wait("a", priority=5)
    assert urgent.in_line


def test_who_pays_is_found_in_other_models_lines_too() -> None:
    rig = Rig("m", "n", max_requests=2)
    first, second = rig.wait("a", model="n"), rig.wait("a", model="n")

    rig.wait("b")

    assert rig.shed() == [second]
    assert rig.serve(1.0, "n") is first


def test_without_any_place_nobody_waits() -> None:
    rig = Rig(max_requests=0)

    with pytest.raises(OverloadedError):
        rig.wait("a")


def test_a_deadline_that_is_hopeless_is_refused_at_once_and_told_when_to_retry() -> None:
    rig = paced(2.0, shed_margin=2.0)
    for _ in range(9):
        rig.wait()
    assert rig.admission.waiting == 10

    with pytest.raises(OverloadedError) as caught:
        rig.wait(deadline=10.9)
    assert caught.value.retry_after == pytest.approx(22.0)
    rig.wait(deadline=11.1)


def test_so_is_a_wait_without_a_deadline_that_would_be_too_long() -> None:
    rig = paced(100.0, max_seconds=60.0, max_requests=100)
    with pytest.raises(OverloadedError) as caught:
        rig.wait()
    assert caught.value.retry_after == MAX_RETRY_AFTER_SECONDS


def test_a_modest_key_is_not_refused_for_the_length_of_anothers_line() -> None:
    rig = paced(1.0)
    for _ in range(100):
        rig.wait("crowd")

    with pytest.raises(OverloadedError):
        rig.wait("crowd", deadline=20.0)
    assert rig.wait("modest", deadline=20.0).position <= 3


def test_without_a_margin_nobody_is_refused_for_his_deadline() -> None:
    rig = paced(100.0, shed_margin=0.0)

    rig.wait(deadline=0.1)


def test_nothing_is_held_hopeless_before_the_pace_is_known() -> None:
    rig = Rig()
    for _ in range(EVIDENCE):
        rig.wait()
    for number in range(EVIDENCE - 1):
        rig.serve(100.0 * number)

    rig.wait(now=800.0, deadline=800.1)


def test_who_is_refused_for_a_full_line_learns_how_long_it_is() -> None:
    rig = paced(2.0, max_requests=EVIDENCE + 1)
    for _ in range(EVIDENCE):
        rig.wait()

    with pytest.raises(OverloadedError) as caught:
        rig.wait()
    assert caught.value.retry_after == pytest.approx(2.0 * (EVIDENCE + 2))


def test_a_waiter_knows_where_it_stood_and_how_long_it_waited() -> None:
    rig = Rig()
    first, second = rig.wait("a", now=1.0), rig.wait("a", now=2.0)
    other = rig.wait("b", now=3.0)

    assert [(w.position, w.line_length) for w in (first, second, other)] == [(1, 1), (2, 2), (2, 3)]
    assert rig.serve(4.5) is first
    assert first.waited == 3.5


def test_other_bounds_hold_from_the_moment_they_are_set() -> None:
    rig = Rig(max_requests=4, wait_for_worker_seconds=5.0)
    waiters = [rig.wait("a", deadline=50.0) for _ in range(4)]
    rig.fleet.suspect(Life("d-m", "e1"))
    rig.admission.fleet_changed(1.0)
    assert rig.admission.next_expiry() == 6.0
    rig.admission.configure(QueueConfig(max_requests=4, wait_for_worker_seconds=3.0))
    assert rig.admission.next_expiry() == 4.0

    rig.admission.configure(QueueConfig(max_requests=2, wait_for_worker_seconds=9.0))

    assert rig.admission.next_expiry() == 10.0
    assert rig.admission.waiting == 4
    with pytest.raises(OverloadedError):
        rig.wait("a", deadline=50.0)
    rig.fleet.apply(Life("d-m", "e1"), WorkerNews("", "e1", 1, ()))
    rig.admission.fleet_changed(2.0)
    assert rig.admission.next_expiry() == 50.0
    expired = rig.admission.expire(50.0)
    assert {waiter for waiter, _ in expired} == set(waiters)
    assert all(isinstance(error, DeadlineError) for _, error in expired)


def test_other_weights_count_from_the_next_turn_on() -> None:
    rig = Rig(max_requests=1000)
    for key in "ab" * 100:
        rig.wait(key)
    rig.admission.configure(QueueConfig(max_requests=1000, weights=("a=4",)))

    served = [rig.serve(1.0).demand.fair_key for _ in range(50)]

    assert served.count("a") == pytest.approx(40, abs=2)


def test_many_who_come_and_go_leave_nothing_behind() -> None:
    rig = Rig(max_requests=5)
    stays = rig.wait("a", deadline=1e6)
    for number in range(5000):
        rig.admission.withdraw(rig.wait(str(number), deadline=1e6))

    assert len(rig.admission._looks) < 200
    assert dict(rig.admission._held) == {"a": 1}
    rig.admission.withdraw(stays)
    assert rig.admission.next_expiry() is None
    assert rig.admission._lines == {}


async def test_who_loses_his_place_is_told_so() -> None:
    rig = Rig(max_requests=1)
    answers: dict[str, Decision | MeshError] = {}
    async with Dispatcher(rig.fleet, rig.ledger, rig.admission, FakeClock()) as dispatcher:
        for key, priority in [("crowd", 5), ("urgent", 0)]:
            demand = Demand(key, "m", 10, priority=priority)
            dispatcher.submit(demand, None, lambda answer, key=key: answers.update({key: answer}))  # type: ignore[misc]

        assert list(answers) == ["crowd"]
        assert isinstance(answers["crowd"], OverloadedError)
        assert rig.admission.waiting == 1
