"""Workers whose caches are not what the router thinks are found out."""

import pytest

from services.router.audit import FLAG_AT, WINDOW, Audit, CacheClaim
from services.router.reservations import Life

D0 = Life("d0", "e1")


def answer(
    audit: Audit,
    expected: int,
    cached: int,
    times: int = 1,
    life: Life = D0,
    stored: int | None = None,
) -> None:
    claim = CacheClaim(expected if stored is None else stored, expected)
    for _ in range(times):
        audit.answered(life, prompt_tokens=1000, claim=claim, cached=cached, block_size=16)


@pytest.mark.parametrize(("expected", "cached"), [(0, 800), (800, 0), (160, 800), (800, 16)])
def test_answers_that_keep_disagreeing_flag_their_worker(
    expected: int, cached: int, caplog: pytest.LogCaptureFixture
) -> None:
    audit = Audit()
    answer(audit, expected, cached, FLAG_AT - 1)
    assert not audit.flagged(D0)

    answer(audit, expected, cached, 10)

    assert audit.flagged(D0)
    assert not audit.flagged(Life("d1", "e1"))
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert audit.disagreements == FLAG_AT + 9


@pytest.mark.parametrize(("expected", "cached"), [(800, 800), (800, 784), (0, 15), (15, 0), (0, 0)])
def test_answers_that_agree_do_not(expected: int, cached: int) -> None:
    audit = Audit()
    answer(audit, expected, cached, 100)

    assert not audit.flagged(D0)
    assert audit.disagreements == 0


@pytest.mark.parametrize("cached", [0, 400, 800])
def test_what_earlier_requests_may_have_left_by_then_is_no_mismatch(cached: int) -> None:
    audit = Audit()
    answer(audit, 800, cached, 100, stored=0)

    assert not audit.flagged(D0)
    answer(audit, 400, cached + 800, 100, stored=0)
    assert audit.flagged(D0)


def test_one_answer_in_two_that_came_too_late_is_no_mismatch() -> None:
    audit = Audit()
    for _ in range(50):
        answer(audit, 800, 0)
        answer(audit, 800, 800)

    assert not audit.flagged(D0)


def test_a_worker_that_agrees_again_is_cleared() -> None:
    audit = Audit()
    answer(audit, 800, 0, WINDOW)

    answer(audit, 800, 800, WINDOW)

    assert not audit.flagged(D0)


def test_lives_that_are_over_are_forgotten() -> None:
    audit = Audit()
    answer(audit, 800, 0, WINDOW)

    audit.keep({Life("d0", "e2")})

    assert not audit.flagged(D0)
    answer(audit, 800, 0, FLAG_AT - 1)
    assert not audit.flagged(D0)


def test_hit_rates_are_summed_up() -> None:
    audit = Audit()
    answer(audit, 800, 640)
    answer(audit, 0, 0)

    assert (audit.prompt_tokens, audit.expected_tokens, audit.cached_tokens) == (2000, 800, 640)
