"""The order of the tests, and which of them share a process when there are several (`-n`)."""

from __future__ import annotations

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


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs a cluster comes last.

    A cluster stands from the first test that needs it to the end of the session, and takes CPU all the time. Inside a
    group the order is left as it is, so that shuffled tests stay shuffled.
    """
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    """Tests that hand one running job on to the next come last of all, together: it takes CPU for as long."""
    fixtures = set(getattr(item, "fixturenames", ()))
    folder = item.path.relative_to(HERE).parts[0]
    if "running_job" in fixtures:
        return 4
    return {"integration": 1, "scale": 2, "e2e": 3 if "cluster" in fixtures else 2}.get(folder, 0)


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
            path = nodeid.split("::", 1)[0]
            folder = path.removeprefix("tests/").split("/", 1)[0]
            return folder if folder in CLUSTERS else path

    return ByCluster(config, log)


def pytest_keyboard_interrupt() -> None:
    """One of several processes is told to end again while its fixtures take their clusters down."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
