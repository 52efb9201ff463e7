"""Options of the test run."""

import pytest

from kvmesh.testing.fuzzing import Fuzz

FUZZ = pytest.StashKey[Fuzz]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-requests",
        type=int,
        metavar="N",
        help="requests that the fuzzers of each API send, at random; default: a few, not random",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FUZZ] = Fuzz(config.getoption("fuzz_requests"))


@pytest.fixture(scope="session")
def fuzz(pytestconfig: pytest.Config) -> Fuzz:
    return pytestconfig.stash[FUZZ]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for line in config.stash[FUZZ].report():
        terminalreporter.write_line(f"fuzz {line}")
