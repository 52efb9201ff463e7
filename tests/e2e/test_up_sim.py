"""`kvmesh up`, `status`, `chat` and `down` as a newcomer types them, on the simulated engine."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvmesh.cli.procs import start_ticks
from kvmesh.config import environment
from kvmesh.testing.consul import free_ports

ROOT = Path(__file__).parents[2]
SECONDS = 120
ROLES = {"frontend", "tokenizer", "router", "prefill", "decode"}


class Cli:
    """The command, with a state directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.state_dir = directory / "state"
        self.http_port, self.grpc_port = free_ports(2)
        # A short drain, so that a failing test doesn't wait for long.
        self.up = (
            "up", "--engine", "sim",
            "--http-port", str(self.http_port), "--grpc-port", str(self.grpc_port),
            "--set", "rpc.drain_seconds=10", "--timeout", str(SECONDS),
        )  # fmt: skip
        self._environ = environment() | {"XDG_CACHE_HOME": str(directory / "cache")}

    def argv(self, command: str, *rest: str) -> list[str]:
        options = ["--state-dir", str(self.state_dir)]
        return [sys.executable, "-m", "kvmesh.cli", *command.split(), *options, *rest]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(*arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS + 60,
            env=self._environ,
            cwd=ROOT,
            check=False,
        )

    def start(self, *arguments: str, **files: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self.argv(*arguments), env=self._environ, cwd=ROOT, **files)

    def processes(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.run("status", "--json").stdout)["processes"]
        return found


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    command = Cli(tmp_path)
    yield command
    command.run("down", "--now")


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS  # noqa: TID251 - bounds a wait for other processes
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"  # noqa: TID251
        time.sleep(0.1)


def test_a_newcomers_day(cli: Cli) -> None:
    up = cli.run(*cli.up, "--detach")
    assert up.returncode == 0, up.stderr + up.stdout
    assert "What is the capital of France?" in up.stdout
    assert f"http://127.0.0.1:{cli.http_port}/v1" in up.stdout

    processes = cli.processes()
    assert {item["role"] for item in processes} == ROLES
    assert all(item["state"] == "ready" and start_ticks(item["pid"]) for item in processes)
    assert len({item["epoch"] for item in processes}) == 5
    worker = next(item for item in processes if item["role"] == "decode")
    assert worker["model"] == "tiny"
    assert worker["load"]["total_blocks"] > 0

    again = cli.run(*cli.up, "--detach")
    assert again.returncode == 1
    assert "runs already" in again.stderr

    chat = cli.run("chat", "Tell me a joke", "--max-tokens", "8")
    assert (chat.returncode, chat.stderr) == (0, "")
    assert chat.stdout.strip()
    decided = cli.run("router decisions", "--worker", "decode-1", "--limit", "1")
    assert (decided.returncode, decided.stderr) == (0, "")
    assert {"router-1", "tiny", "kv", "decode-1"} <= set(decided.stdout.split())
    unknown = cli.run("chat", "Hi", "--model", "nobody")
    assert unknown.returncode == 1
    assert "nobody" in unknown.stderr

    os.kill(worker["pid"], signal.SIGKILL)
    until(lambda: len(cli.processes()) == 4, "the killed worker vanishes")
    assert worker["pid"] not in {item["pid"] for item in cli.processes()}
    assert f"decode-1 (pid {worker['pid']}) is gone" in cli.run("status").stderr

    down = cli.run("down")
    assert down.returncode == 0, down.stderr
    assert not [item["pid"] for item in processes if start_ticks(item["pid"])]
    assert cli.run("status").returncode == 1
    assert not (cli.state_dir / "cluster.json").exists()


def test_ctrl_c_drains_and_a_death_is_told(cli: Cli, tmp_path: Path) -> None:
    output = tmp_path / "up.log"
    with output.open("wb") as file, cli.start(*cli.up, stdout=file, stderr=file) as up:
        until(lambda: "Ctrl-C stops it." in output.read_text() or up.poll() is not None, "ready")
        assert up.poll() is None, output.read_text()
        processes = cli.processes()
        worker = next(item for item in processes if item["role"] == "prefill")
        os.kill(worker["pid"], signal.SIGKILL)
        until(lambda: "killed by SIGKILL" in output.read_text(), "the death is told")
        up.send_signal(signal.SIGINT)
        assert up.wait(SECONDS) == 0, output.read_text()
    text = output.read_text()
    assert f"prefill-1 (pid {worker['pid']}) ended: killed by SIGKILL" in text
    assert "The rest goes on." in text
    assert "killed\n" not in text.partition("Stopping")[2]  # nobody had to be killed
    assert not [item["pid"] for item in processes if start_ticks(item["pid"])]


def test_a_process_that_cannot_start_ends_it_all(cli: Cli) -> None:
    up = cli.run(*cli.up, "--set", "decode:rpc.host=203.0.113.7", "--set", "rpc.port=0")
    assert up.returncode == 1
    assert "use --grpc-port" in up.stderr
    up = cli.run(*cli.up, "--set", "decode:engine.sim.blocksize=1")
    assert up.returncode == 1
    assert "KVMESH_ENGINE_SIM_BLOCKSIZE: unknown setting" in up.stderr
    up = cli.run(*cli.up, "--set", "decode:rpc.host=203.0.113.7")  # not an address of this machine
    assert up.returncode == 1
    assert "decode-1" in up.stderr
    assert "exit code 1" in up.stderr
    assert "203.0.113.7" in up.stderr  # from the end of its log
    assert cli.run("status").returncode == 1


def test_on_a_terminal_there_is_a_live_table(cli: Cli) -> None:
    ours, theirs = pty.openpty()
    seen = b""
    with cli.start(*cli.up, "--no-chat", stdin=theirs, stdout=theirs, stderr=theirs) as up:
        os.close(theirs)
        try:
            while b"Ctrl-C stops it." not in seen:
                seen += os.read(ours, 65536)
            up.send_signal(signal.SIGINT)
            while up.poll() is None:
                seen += os.read(ours, 65536)
        except OSError:  # the other end is closed
            pass
        finally:
            os.close(ours)
        assert up.wait(SECONDS) == 0
    assert b"last line of its log" in seen
    assert b"\x1b[" in seen
    assert b"Stopped." in seen
