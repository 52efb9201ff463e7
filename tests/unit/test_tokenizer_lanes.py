import asyncio
import threading

import pytest

from kvmesh.errors import InternalError, InvalidRequestError, OverloadedError
from services.tokenizer.lanes import BATCH_SIZE, Job, Lanes


class Blocker:
    """Work that holds its lane until it is let go."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.go = threading.Event()
        self._loop = asyncio.get_running_loop()

    def __call__(self) -> str:
        self._loop.call_soon_threadsafe(self.started.set)
        assert self.go.wait(30)
        return "blocked"


def opened(long_size=1000, max_waiting=100, max_waiting_size=10**9) -> Lanes:
    return Lanes(long_size=long_size, max_waiting=max_waiting, max_waiting_size=max_waiting_size)


def submit(lanes, work, size=1):
    """Submit and return (job, future of the outcome)."""
    outcome = asyncio.get_running_loop().create_future()
    job = Job(size, work, outcome.set_result)
    lanes.submit(job)
    return job, outcome


async def blocked(lanes, size=1):
    """Fill the lane for this size with a job that runs."""
    blocker = Blocker()
    _, outcome = submit(lanes, blocker, size)
    await blocker.started.wait()
    return blocker, outcome


async def test_results_and_errors_belong_to_their_jobs():
    def refuse():
        raise InvalidRequestError("no")

    async with opened() as lanes:
        outcomes = [submit(lanes, work)[1] for work in (lambda: 1, refuse, lambda: 2)]
        first, second, third = await asyncio.gather(*outcomes)
    assert (first, third) == (1, 2)
    assert isinstance(second, InvalidRequestError)


async def test_a_bug_fails_its_own_job_and_is_logged(caplog):
    async with opened() as lanes:
        outcome = await submit(lanes, lambda: 1 // 0)[1]
        assert await submit(lanes, lambda: "alive")[1] == "alive"
    assert isinstance(outcome, InternalError)
    assert "ZeroDivisionError" in caplog.text


async def test_a38_short_work_does_not_wait_for_long_work():
    async with opened() as lanes:
        blocker, long_outcome = await blocked(lanes, size=1000)
        assert await submit(lanes, lambda: "short", size=999)[1] == "short"
        assert not long_outcome.done()
        blocker.go.set()
        assert await long_outcome == "blocked"


async def test_work_runs_outside_of_the_event_loop_in_order():
    order, threads = [], set()

    def work(number):
        order.append(number)
        threads.add(threading.current_thread())

    async with opened() as lanes:
        await asyncio.gather(*[submit(lanes, lambda n=n: work(n))[1] for n in range(50)])
    assert order == list(range(50))
    assert threading.current_thread() not in threads
    assert len(threads) == 1


async def test_what_gathered_goes_in_batches_of_a_bounded_size():
    async with opened(long_size=10**6) as lanes:
        blocker, outcome = await blocked(lanes)
        done = []
        jobs = [submit(lanes, lambda: None, BATCH_SIZE // 2) for _ in range(5)]
        for number, (_, future) in enumerate(jobs):
            future.add_done_callback(lambda _, n=number: done.append((n, lanes.waiting)))
        blocker.go.set()
        await asyncio.gather(outcome, *[future for _, future in jobs])
    assert [number for number, _ in done] == [0, 1, 2, 3, 4]
    # The first answers came while others still waited.
    assert done[0][1] > 0


async def test_a_cancelled_job_does_not_run_and_is_not_answered():
    ran = []
    async with opened() as lanes:
        blocker, outcome = await blocked(lanes)
        job, never = submit(lanes, lambda: ran.append(1))
        job.cancelled = True
        _, last = submit(lanes, lambda: "last")
        blocker.go.set()
        await asyncio.gather(outcome, last)
    assert ran == []
    assert not never.done()


@pytest.mark.parametrize(
    ("limits", "size"), [({"max_waiting": 2}, 1), ({"max_waiting_size": 25}, 10)]
)
async def test_too_much_waiting_work_is_refused(limits, size):
    async with opened(**limits) as lanes:
        for _ in range(3):  # there is room again each time
            blocker, outcome = await blocked(lanes)
            waiting = [submit(lanes, lambda: None, size)[1] for _ in range(2)]
            assert lanes.waiting == 2
            with pytest.raises(OverloadedError) as caught:
                submit(lanes, lambda: None, size)
            assert caught.value.retry_after
            blocker.go.set()
            await asyncio.gather(outcome, *waiting)
            assert lanes.waiting == 0


async def test_one_job_alone_is_taken_whatever_its_size():
    async with opened(max_waiting_size=10) as lanes:
        assert await submit(lanes, lambda: "big", size=500)[1] == "big"


async def test_leaving_waits_for_running_work_and_drops_the_rest():
    async with opened() as lanes:
        blocker, outcome = await blocked(lanes)
        _, never = submit(lanes, lambda: None)
        blocker.go.set()
    assert not never.done()
    assert lanes.waiting in (0, 1)
    outcome.cancel()


async def test_a_lane_that_breaks_down_is_reported():
    def broken(outcome):
        raise RuntimeError("bug in a callback")

    async with opened() as lanes:
        lanes.submit(Job(1, lambda: None, broken))
        with pytest.raises(RuntimeError, match="bug in a callback"):
            await lanes.failed()
