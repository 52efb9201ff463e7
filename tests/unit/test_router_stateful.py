"""Any order of requests, reports, failures and restarts: the figures stay true.

A model beside the router keeps what is planned, by hand; after each step the ledger
must equal it, and once all is over everything must be exactly zero.
"""

import random
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvmesh.errors import OverloadedError, UnavailableError, UnknownModelError
from kvmesh.types import BlocksStored, Load, Member, Role, State, WorkerNews
from services.router.admission import Admission, QueueConfig
from services.router.fair import Waiter
from services.router.planner import Decision, Planner, RoutingConfig
from services.router.plugins import Policies
from services.router.policies import BUILT_IN
from services.router.policy import Demand
from services.router.reservations import Ledger, Life
from services.router.state import CAPACITY_LABEL, EVENTS_LABEL, Fleet
from services.router.worker import REPORTS_TO_SETTLE

CAP = 3
NAMES = ("d0", "d1", "d2", "p0", "p1")
SILENT = "d2"
"""One that does not tell what it has cached."""


@dataclass
class Planned:
    decision: Decision
    prefilled: bool = False
    forgotten: set[Life] = field(default_factory=set)


class RouterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.capacity = CAP
        self.wait = QueueConfig().wait_for_worker_seconds
        self.epochs = dict.fromkeys(NAMES, 0)
        self.listed: set[str] = set()
        self.ledger = Ledger()
        self.fleet = Fleet(self.ledger)
        self.planned: list[Planned] = []
        self.waiters: list[Waiter] = []
        self.sequence: dict[Life, int] = {}

    @initialize(
        policy=st.sampled_from(sorted(BUILT_IN)),
        seed=st.integers(0, 9),
        shed_margin=st.sampled_from([0.0, 2.0]),
    )
    def build(self, policy: str, seed: int, shed_margin: float) -> None:
        self.shed_margin = shed_margin
        routing = RoutingConfig(max_requests_per_worker=CAP)
        self.planner = Planner(
            self.fleet, self.ledger, routing, Policies(policy), random.Random(seed)
        )
        queue = QueueConfig(max_requests=6, shed_margin=shed_margin)
        self.admission = Admission(self.fleet, self.planner, queue)
        self.listed = set(NAMES)
        self.tell_members()
        for name in NAMES:
            self.snapshot(name)

    def life(self, name: str) -> Life:
        return Life(name, f"e{self.epochs[name]}")

    def tell_members(self) -> None:
        self.fleet.update(
            Member(
                id=name,
                role=Role.DECODE if name.startswith("d") else Role.PREFILL,
                epoch=f"e{self.epochs[name]}",
                address=name,
                state=State.READY,
                model="m",
                block_size=16,
                layout_fingerprint="layout",
                total_blocks=40,
                labels={
                    EVENTS_LABEL: "no" if name == SILENT else "yes",
                    CAPACITY_LABEL: str(self.capacity),
                },
            )
            for name in self.listed
        )
        self.take(self.admission.fleet_changed(self.now))

    def take(self, admitted: list[tuple[Waiter, Decision]]) -> None:
        for waiter, decision in admitted:
            self.waiters.remove(waiter)
            self.planned.append(Planned(decision))

    def changed(self) -> None:
        self.take(self.admission.pump("m", self.now))

    @rule(
        tokens=st.integers(1, 200),
        max_tokens=st.integers(0, 400),
        priority=st.integers(-1, 1),
        excluded=st.frozensets(st.sampled_from(NAMES), max_size=2),
        patience=st.none() | st.floats(0.1, 20),
        key=st.sampled_from(["", "a", "b"]),
    )
    def submit(
        self,
        tokens: int,
        max_tokens: int,
        priority: int,
        excluded: frozenset[str],
        patience: float | None,
        key: str,
    ) -> None:
        demand = Demand("r", "m", tokens, max_tokens, (1, 2), 16, excluded, priority, fair_key=key)
        deadline = None if patience is None else self.now + patience
        try:
            result = self.admission.submit(demand, self.now, deadline)
        except OverloadedError:
            assert len(self.waiters) == 6 or self.shed_margin
            return
        except UnavailableError:
            assert not self.wait
            listed = {worker.id for worker in self.fleet.routable("m", Role.DECODE)}
            assert listed <= excluded
            return
        if isinstance(result, Decision):
            assert result.plan.decode.id not in excluded
            assert result.plan.prefill is None or result.plan.prefill.id not in excluded
            self.planned.append(Planned(result))
        else:
            for waiter, _ in self.admission.take_shed():
                assert not waiter.in_line
                self.waiters.remove(waiter)
            self.waiters.append(result)

    @rule(
        policy=st.sampled_from(sorted(BUILT_IN)),
        wait=st.floats(0, 5),
        weights=st.sampled_from([(), ("a=3",), ("=0.5", "b=2")]),
    )
    def configure(self, policy: str, wait: float, weights: tuple[str, ...]) -> None:
        routing = RoutingConfig(policy=policy, max_requests_per_worker=CAP)
        self.planner.configure(routing, Policies(policy))
        self.wait = wait
        self.admission.configure(
            QueueConfig(
                max_requests=6,
                wait_for_worker_seconds=wait,
                shed_margin=self.shed_margin,
                weights=weights,
            )
        )
        self.take(self.admission.fleet_changed(self.now))

    @rule()
    def submit_unknown(self) -> None:
        try:
            self.admission.submit(Demand("r", "never", 1), self.now, None)
        except UnknownModelError:
            return
        raise AssertionError("an unknown model was taken")

    @precondition(lambda self: self.waiters)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(self.waiters))
        self.waiters.remove(waiter)
        self.admission.withdraw(waiter)

    @precondition(lambda self: self.planned)
    @rule(data=st.data())
    def prefill_done(self, data: st.DataObject) -> None:
        planned = data.draw(st.sampled_from(self.planned))
        planned.prefilled = True
        self.ledger.prefilled(planned.decision.reservation)

    @precondition(lambda self: self.planned)
    @rule(data=st.data(), twice=st.booleans())
    def finish(self, data: st.DataObject, twice: bool) -> None:
        planned = data.draw(st.sampled_from(self.planned))
        self.planned.remove(planned)
        for _ in range(1 + twice):
            self.ledger.release(planned.decision.reservation)
        self.changed()

    @rule(name=st.sampled_from(NAMES))
    def leave(self, name: str) -> None:
        self.listed.discard(name)
        self.tell_members()

    @rule(name=st.sampled_from(NAMES), restart=st.booleans())
    def join(self, name: str, restart: bool) -> None:
        if restart and name in self.listed:
            for planned in self.planned:
                planned.forgotten.add(self.life(name))
        if restart:
            self.epochs[name] += 1
        self.listed.add(name)
        self.tell_members()

    @rule(capacity=st.integers(1, CAP))
    def limit(self, capacity: int) -> None:
        self.capacity = capacity
        self.tell_members()

    @rule(name=st.sampled_from(NAMES))
    def snapshot(self, name: str) -> None:
        life = self.life(name)
        self.sequence[life] = 1
        self.fleet.apply(life, WorkerNews(name, life.epoch, 1, [BlocksStored((1,))]))
        self.take(self.admission.fleet_changed(self.now))

    @rule(name=st.sampled_from(NAMES))
    def suspect(self, name: str) -> None:
        self.fleet.suspect(self.life(name))
        self.take(self.admission.fleet_changed(self.now))

    @rule(
        name=st.sampled_from(NAMES),
        running=st.integers(0, 5),
        waiting=st.integers(0, 3),
        used=st.integers(0, 50),
        lost=st.booleans(),
    )
    def report(self, name: str, running: int, waiting: int, used: int, lost: bool) -> None:
        life = self.life(name)
        sequence = self.sequence.get(life, 0) + 1 + lost
        load = Load(running, waiting, used, 50)
        self.fleet.apply(life, WorkerNews(name, life.epoch, sequence, [load]))
        worker = self.fleet.find(life)
        if worker is not None:
            self.sequence[life] = worker.sequence
        self.changed()

    @rule(name=st.sampled_from(NAMES), seconds=st.floats(0.001, 1))
    def compute(self, name: str, seconds: float) -> None:
        self.fleet.computed(self.life(name), 1000, seconds)

    @rule(seconds=st.floats(0.1, 5))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for waiter, _ in self.admission.expire(self.now):
            self.waiters.remove(waiter)
        assert all(self.admission.expiry(waiter) > self.now for waiter in self.waiters)

    @invariant()
    def figures_equal_the_model(self) -> None:
        assert self.ledger.active == len(self.planned)
        expected: dict[Life, list[int]] = {}
        for planned in self.planned:
            for life, figures in footprint(planned):
                if life not in planned.forgotten:
                    sums = expected.setdefault(life, [0, 0, 0, 0])
                    sums[:] = [a + b for a, b in zip(sums, figures, strict=True)]
        assert set(self.ledger.lives()) == set(expected)
        for life, sums in expected.items():
            held = self.ledger.held(life)
            figures = [held.requests, held.present, held.decode_blocks, held.prefill_blocks]
            assert figures == sums
            assert held.requests <= CAP

    @invariant()
    def waiting_equals_the_model(self) -> None:
        if hasattr(self, "admission"):
            assert self.admission.waiting == len(self.waiters) <= 6
            assert all(waiter.in_line for waiter in self.waiters)
        for worker in self.fleet.workers():
            assert worker.others >= 0
            assert worker.other_blocks >= 0

    @invariant()
    def standings_are_of_now(self) -> None:
        workers = self.fleet.workers()
        kept = self.fleet.standings(workers)
        assert kept == [worker.stand(self.ledger.held(worker.life)) for worker in workers]

    def teardown(self) -> None:
        for waiter in self.waiters:
            self.admission.withdraw(waiter)
        for planned in self.planned:
            self.ledger.release(planned.decision.reservation)
        assert self.ledger.active == 0
        assert self.ledger.lives() == ()
        for name in NAMES:
            for _ in range(REPORTS_TO_SETTLE):
                self.report(name, 0, 0, 0, lost=False)
        for index in self.fleet.indexes():
            assert index.expected == 0
        if hasattr(self, "admission"):
            assert self.admission.waiting == 0
            assert self.admission.next_expiry() is None


def footprint(planned: Planned) -> list[tuple[Life, list[int]]]:
    """Return what one planned request holds: requests, present, decode and prefill blocks."""
    taken = planned.decision.reservation
    prefill_blocks = 0 if planned.prefilled else taken.prefill_blocks
    if taken.prefill is None:
        return [(taken.decode, [1, 1, taken.decode_blocks, prefill_blocks])]
    on_decode = (taken.decode, [1, int(planned.prefilled), taken.decode_blocks, 0])
    if planned.prefilled:
        return [on_decode]
    return [on_decode, (taken.prefill, [1, 1, 0, prefill_blocks])]


TestRouterMachine = RouterMachine.TestCase
TestRouterMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
