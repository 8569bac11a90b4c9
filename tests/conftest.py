"""The order of the tests, and which of them share a process when there are several (`-n`)."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

HERE = Path(__file__).parent
CLUSTERS = ("integration", "e2e")
REMOVAL_SECONDS = 30
"""After Ctrl-C, for clusters to be taken down."""
TOLD_LINES = 60
"""Of each of a failed test's logs and outputs, the last ones: more would bury what failed under it."""

# How long an example takes says how much else the machine has to do.
settings.register_profile("holdfast", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("holdfast")


DURATIONS = HERE / "durations.json"
"""Seconds of each piece of work that takes more than `SHORT_SECONDS`; `make test-durations` writes it."""
SHORT_SECONDS = 5
SLOWER = 2.0
"""A piece that takes this many times its recorded duration is reported."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help=f"write {DURATIONS.name} after the run")


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Durations(config.getoption("--record-durations")))


def piece_of_work(nodeid: str) -> str:
    """Return what one process runs as a whole: a file, or the folder of all tests that share a cluster."""
    path = nodeid.split("::", 1)[0]
    folder = path.removeprefix("tests/").split("/", 1)[0]
    return folder if folder in CLUSTERS else path


class Durations:
    """Add up the seconds of each piece of work, and report the pieces that became slower."""

    def __init__(self, record: bool) -> None:
        self._record = record
        self._recorded: dict[str, int] = json.loads(DURATIONS.read_text())
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        piece = piece_of_work(report.nodeid)
        self._seconds[piece] = self._seconds.get(piece, 0.0) + report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for piece, seconds in sorted(self._seconds.items()):
            recorded = max(self._recorded.get(piece, 0), SHORT_SECONDS)
            if seconds > SLOWER * recorded:
                terminalreporter.write_line(
                    f"slower: {piece} took {seconds:.0f} s; {DURATIONS.name} has {recorded} s"
                )
        if self._record:
            long = {piece: round(s) for piece, s in sorted(self._seconds.items()) if s >= SHORT_SECONDS}
            DURATIONS.write_text(json.dumps(long, indent=1) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest pieces of work first, so that no stream is left with one at the end.

    Inside a piece the order is left as it is, so that shuffled tests stay shuffled.
    """
    recorded: dict[str, int] = json.loads(DURATIONS.read_text())
    items.sort(key=lambda item: (-recorded.get(piece_of_work(item.nodeid), 0), _place(item)))


def _place(item: pytest.Item) -> int:
    """Return the place inside a piece: tests of one running job come last, because the job takes CPU all the time."""
    fixtures = set(getattr(item, "fixturenames", ()))
    return 2 if "running_job" in fixtures else int("cluster" in fixtures)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tell the end of what a test printed."""
    report = yield
    report.sections = [(title, _end(text)) for title, text in report.sections]
    return report


def _end(text: str) -> str:
    lines = text.splitlines()
    left_out = len(lines) - TOLD_LINES
    return text if left_out <= 0 else "\n".join([f"[{left_out} earlier lines]", *lines[-TOLD_LINES:]])


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for that of a socket: with several processes `tmp_path` does not."""
    with tempfile.TemporaryDirectory(prefix="test-") as folder:
        yield Path(folder)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file at a time, in the order of the tests; what shares a cluster is one piece of work for one process."""
    from xdist.scheduler import LoadScopeScheduling
    from xdist.workermanage import NodeManager

    NodeManager.EXIT_TIMEOUT = REMOVAL_SECONDS

    class ByCluster(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return piece_of_work(nodeid)

    return ByCluster(config, log)


def pytest_keyboard_interrupt() -> None:
    """One of several processes is told to end again while its fixtures take their clusters down."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
