"""The agents' API over TLS, with time in the test's hand."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from holdfast_sidecar.operator_api.client import OperatorApi, connect
from holdfast_sidecar.operator_api.membership import Membership
from holdfast_sidecar.operator_api.reporter import Reporter
from holdfast_sidecar.protocol.report import Pod
from holdfast_sidecar.run_dir.emergency_checkpoint import NoticeLedger
from holdfast_sidecar.run_dir.launcher_status import LauncherStatusWatcher
from holdfast_sidecar.runtime.clock import SystemClock

POD = Pod(namespace="ml", name="gpt-w0", uid="uid-w0", node="node-1")


def highest(_: float, high: float) -> float:
    return high


@pytest.fixture
def link(operator, authority, tmp_path: Path):
    """An API over its own connection, and that connection."""
    (tmp_path / "token").write_text("first-token\n")
    return connect(operator.url, tmp_path / "token", authority.file, SystemClock().monotonic)


@pytest.fixture
def membership(link, operator, run_dir, clock) -> Membership:
    operator.hold = 0.05
    return Membership(link[0], run_dir, clock, highest, abort=link[1].abort)


@pytest.fixture
def reporter(link, run_dir, clock) -> Reporter:
    return Reporter(
        api=link[0],
        pod=POD,
        start_id="abc",
        launcher=LauncherStatusWatcher(run_dir, clock),
        ledger=NoticeLedger(run_dir),
        clock=clock,
        jitter=highest,
    )


@pytest.fixture
def unanswered(authority, tmp_path: Path) -> Iterator[OperatorApi]:
    """An API at a host that answers no more than one that has lost its power: its queue of connections is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        host, port = listener.getsockname()
        stack.enter_context(socket.create_connection((host, port)))
        (tmp_path / "token").write_text("first-token\n")
        yield connect(f"https://{host}:{port}", tmp_path / "token", authority.file, SystemClock().monotonic)[0]
