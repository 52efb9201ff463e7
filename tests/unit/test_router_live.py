"""Settings that change while a router runs: taken whole or not at all, and gone back from."""

import asyncio
import json
import logging
import random
import subprocess
import sys
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.config import ConfigError
from kvmesh.discovery.base import Stored
from kvmesh.telemetry import quiet_telemetry
from kvmesh.testing.discovery import MemoryText
from services.router.admission import QueueConfig
from services.router.live import Live, following
from services.router.planner import RoutingConfig
from services.router.plugins import Policies
from services.router.tuning import MAX_CHARS, Tunable, changes, edit, read

BASE = Tunable(RoutingConfig(policy="least_loaded"), QueueConfig(max_requests=10))


class Rig:
    """The settings in force, and what was done with them."""

    def __init__(self) -> None:
        self.telemetry = quiet_telemetry()
        self.applied: list[Tunable] = []
        self.changed = asyncio.Event()
        self.live = Live(BASE, self._apply, self.telemetry.meter)

    def _apply(self, changed: Tunable, policies: Policies) -> None:
        assert policies.default == changed.routing.policy
        self.applied.append(changed)
        self.changed.set()

    def metric(self, name: str) -> float:
        for line in self.telemetry.render().decode().splitlines():
            if line.startswith(f"kvmesh_router_config_{name}"):
                return float(line.rpartition(" ")[2])
        return 0.0


def test_what_a_document_sets_holds_and_what_it_does_not_stays() -> None:
    rig = Rig()

    assert rig.live.take("[routing]\npolicy = 'session'\n[routing.cost]\nwork = 2", "a test")

    (now,) = rig.applied
    assert (now.routing.policy, now.routing.cost.work) == ("session", 2.0)
    assert now.queue == BASE.queue
    assert now.routing.cost.eviction == BASE.routing.cost.eviction
    assert rig.metric("version") == 1


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ("[routing]\npolicy = 'sesion'", ["routing.policy", "'sesion'", "least_loaded"]),
        ("[routing]\npolicy_by_model = ['m=x']", ["routing.policy_by_model", "'x'"]),
        ("[routing]\npolicy_by_model = ['m']", ["routing.policy_by_model", "'m'"]),
        ("[routing]\npolicy = 7", ["routing.policy", "7", "not a string"]),
        ("[routing.cost]\nwork = -1", ["routing.cost.work", "-1", "less than"]),
        ("[routing.cost]\nwork = nan", ["routing.cost.work", "nan"]),
        ("[queue]\nmax_requests = 1.5", ["queue.max_requests", "1.5"]),
        ("[queue]\nweights = ['a=0']", ["weights", "'a=0'"]),
        ("[rpc]\nport = 1", ["rpc", "unknown key"]),
        ("[routing]\npolicyy = 'kv'", ["routing.policyy", "unknown key", "'kv'"]),
        ("[routing", ["not valid TOML"]),
        ("#" * (MAX_CHARS + 1), ["longer than"]),
    ],
)
def test_what_is_wrong_is_not_taken_not_even_the_good_half(
    document: str, told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig()
    good = "[queue]\nmax_requests = 7\n"
    assert rig.live.take(good, "a test")

    both = document if "queue" in document or "#" in document else f"{good}{document}"
    assert not rig.live.take(both, "a test")

    assert [each.queue.max_requests for each in rig.applied] == [7]
    assert rig.live.settings.queue.max_requests == 7
    assert (rig.metric("rejected_total"), rig.metric("version")) == (1, 1)
    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert all(word in record.getMessage() for word in told)


def test_without_a_document_the_settings_of_the_start_hold_again() -> None:
    rig = Rig()
    rig.live.take("[queue]\nmax_requests = 7", "a test")

    assert rig.live.take(None, "a test")

    assert rig.applied[-1] == BASE
    assert rig.metric("version") == 2


def test_a_document_that_changes_nothing_is_no_change() -> None:
    rig = Rig()

    assert rig.live.take("[queue]\nmax_requests = 10", "a test")
    assert rig.live.take("", "a test")

    assert rig.applied == []
    assert rig.metric("version") == 0


async def test_the_first_document_holds_before_the_first_request() -> None:
    rig, text = Rig(), MemoryText()
    await text.write("[queue]\nmax_requests = 7", "0")

    async with following(rig.live, text, random.Random(1)):
        assert rig.live.settings.queue.max_requests == 7


async def test_each_change_is_followed_past_wrong_ones() -> None:
    rig, text = Rig(), MemoryText()
    async with asyncio.timeout(30), following(rig.live, text, random.Random(1)):
        for number, document in enumerate(["[queue]\nmax_requests = -1", "[" * 3000, "[queue"]):
            await text.write(document, str(number))
        await text.write("[queue]\nmax_requests = 9", "3")
        await rig.changed.wait()

    assert [each.queue.max_requests for each in rig.applied] == [9]


def test_a_document_that_breaks_the_parser_changes_nothing() -> None:
    rig = Rig()

    rig.live._take_safely(f"a = {'[' * 20_000}", "a test")

    assert rig.applied == []
    assert rig.metric("rejected_total") == 1


class Shaky:
    """A text whose watch fails as often as it is told, then works."""

    where = "a shaky place"

    def __init__(self, failures: int) -> None:
        self.failures = failures

    async def watch(self) -> AsyncGenerator[str | None, None]:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("it broke")
        yield "[queue]\nmax_requests = 9"
        await asyncio.Event().wait()

    async def read(self) -> Stored:
        raise NotImplementedError

    async def write(self, text: str | None, version: str) -> bool:
        raise NotImplementedError


async def test_a_watch_that_breaks_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.router.live.MAX_BACKOFF_SECONDS", 0.001)
    rig = Rig()
    async with asyncio.timeout(30), following(rig.live, Shaky(3), random.Random(1)):
        await rig.changed.wait()

    assert rig.live.settings.queue.max_requests == 9


async def test_a_place_that_does_not_answer_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.router.live.FIRST_SECONDS", 0.01)
    monkeypatch.setattr("services.router.live.MAX_BACKOFF_SECONDS", 0.001)
    rig = Rig()
    async with asyncio.timeout(30), following(rig.live, Shaky(10**9), random.Random(1)):
        assert rig.live.settings == BASE


def test_a_document_is_edited_by_key() -> None:
    document = edit("", {"routing.policy": "session", "queue.max_requests": "7"}, [])
    document = edit(
        document,
        {"routing.policy_by_model": "a=kv,b=random", "routing.cost.work": "0.75"},
        ["queue.max_requests"],
    )

    told = dict(each.split("=", 1) for each in changes(BASE, read(BASE, document, "it")[0]))
    assert told == {
        "routing.policy": "session",
        "routing.policy_by_model": "a=kv,b=random",
        "routing.cost.work": "0.75",
    }
    assert edit(document, {}, ["routing"]) == ""


def test_what_is_wrong_already_can_be_taken_out() -> None:
    assert edit("[routing]\n'no such' = 1\npolicy = 'kv'", {}, ["routing.no such"]) == (
        '[routing]\npolicy = "kv"\n'
    )


@pytest.mark.parametrize(
    ("sets", "unset"),
    [
        ({"routing.policy": "x"}, []),
        ({"queue.max_requests": "x"}, []),
        ({"queue.max_request": "1"}, []),
        ({"rpc.port": "1"}, []),
        ({}, ["queue.max_requests"]),
    ],
)
def test_an_edit_that_is_wrong_names_its_key(sets: dict[str, str], unset: list[str]) -> None:
    key = next(iter(sets), *unset)
    with pytest.raises(ConfigError, match=key):
        edit("", sets, unset)


def test_a_document_that_is_none_is_told() -> None:
    with pytest.raises(ConfigError, match="not valid TOML"):
        edit("[", {"queue.max_requests": "1"}, [])


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["queue.max_requests", "routing.cost.work", "queue.shed_margin"]),
        st.integers(0, 10**9),
    ),
    st.lists(st.from_regex(r"[a-z =\"',é]{0,9}=(kv|random)", fullmatch=True), max_size=3),
)
def test_edits_say_what_they_were_told(numbers: dict[str, int], models: list[str]) -> None:
    models = [each for each in models if not each.startswith("=")]
    sets = {key: str(number) for key, number in numbers.items()}
    sets["routing.policy_by_model"] = json.dumps(models)

    changed, policies = read(Tunable(), edit("", sets, []), "it")

    assert list(changed.routing.policy_by_model) == models
    for key, number in numbers.items():
        section, *names = key.split(".")
        value = getattr(changed, section)
        for name in names:
            value = getattr(value, name)
        assert value == number
    for each in models:
        assert policies.name(each.rpartition("=")[0]) in ("kv", "random")


@pytest.mark.parametrize(("value", "code"), [("7", 0), ("x", 2)])
def test_the_command_line_edits_through_a_process(value: str, code: int) -> None:
    asked = {"document": "", "set": {"queue.max_requests": value}, "unset": []}
    done = subprocess.run(
        [sys.executable, "-m", "services.router.tuning"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == code
    assert done.stdout == ("" if code else "[queue]\nmax_requests = 7\n")
    assert done.stderr == (
        "queue.max_requests: 'x' is not an integer (from --set)\n" if code else ""
    )
