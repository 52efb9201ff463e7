"""What a cluster leaves on disk, and who of it still runs."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmesh.cli.console import CommandError
from kvmesh.cli.procs import Running, how_it_ended, last_lines, start_ticks
from kvmesh.cli.state import ClusterState, StateDir
from kvmesh.types import Role


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    with subprocess.Popen(command, start_new_session=True) as process:
        yield process
        process.kill()


def running(pid: int, name: str = "frontend-1", role: Role = Role.FRONTEND) -> Running:
    started = start_ticks(pid)
    assert started is not None
    return Running(name, role, pid, started, Path("/nowhere.log"))


def cluster(*processes: Running) -> ClusterState:
    return ClusterState(
        engine="sim",
        model="tiny",
        model_path="/m/tiny",
        discovery={"kind": "local", "directory": "/d"},
        http=("http://127.0.0.1:8000", "http://127.0.0.1:8001"),
        grpc=("127.0.0.1:9000", "127.0.0.1:9001"),
        drain_seconds=30.0,
        processes=processes,
    )


def test_a_cluster_is_read_as_it_was_written(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "new")
    assert state.read() is None
    written = cluster(running(os.getpid()))
    state.write(written)
    assert state.read() == written
    assert not list(state.path.glob("*.tmp"))
    state.clear()
    assert state.read() is None


def test_a_file_that_is_not_ours_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text('{"format": 99}')
    with pytest.raises(CommandError, match="another version"):
        StateDir(tmp_path).read()
    (tmp_path / "cluster.json").write_text("{")
    with pytest.raises(CommandError, match="can't be read"):
        StateDir(tmp_path).read()


def test_two_commands_cannot_hold_one_directory(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    with state.locked(), pytest.raises(CommandError, match=rf"pid {os.getpid()}"), state.locked():
        pass
    with state.locked():
        pass


def test_a_reused_number_is_not_taken_for_the_process(child: subprocess.Popen[bytes]) -> None:
    now = running(child.pid)
    earlier = Running(now.name, now.role, now.pid, now.started - 1, now.log)
    assert now.is_alive()
    assert not earlier.is_alive()
    earlier.send(signal.SIGKILL)
    earlier.kill()
    assert child.poll() is None
    assert cluster(earlier).alive() == []


def test_a_killed_process_is_gone_even_before_it_is_reaped(
    child: subprocess.Popen[bytes],
) -> None:
    process = running(child.pid)
    process.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and a zombie still
    assert not process.is_alive()
    assert start_ticks(child.pid) is None
    assert child.wait() == -signal.SIGKILL


def test_urls_are_of_frontends_that_run(child: subprocess.Popen[bytes]) -> None:
    dead = Running("frontend-1", Role.FRONTEND, child.pid, 1, Path("/nowhere.log"))
    alive = running(child.pid, "frontend-2")
    assert cluster(dead, alive).live_urls() == ["http://127.0.0.1:8001"]


def test_the_end_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    assert last_lines(log, 3) == []
    log.write_bytes(b"one\n\ntwo\n\xffthree\n\n")
    assert last_lines(log, 2) == ["two", "\ufffdthree"]
    assert last_lines(log, 9, limit=8) == ["\ufffdthree"]


@pytest.mark.parametrize(
    ("code", "words"), [(0, "exit code 0"), (3, "exit code 3"), (-9, "killed by SIGKILL")]
)
def test_return_codes_in_words(code: int, words: str) -> None:
    assert how_it_ended(code) == words
