"""Fixtures: servers that fail on command, and the sidecar's process among them."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clocks import DEADLINE, Document, FakeClock, golden, wait_until
from fake_servers import Authority, FakeCloud, FakeOperator
from sidecar_process import SidecarProcess

from holdfast_sidecar import constants

PATIENT = "from holdfast_sidecar import constants; constants.FINAL_REPORT_SECONDS = 120.0"
"""Before the sidecar runs: its last report may take as long as it likes, so that a busy machine does not lose it."""


@pytest.fixture(autouse=True)
def no_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked within this process is answered however busy the machine is; a test of such a time sets it."""
    for name in ("METADATA_TIMEOUT_SECONDS", "EXPORTER_TIMEOUT_SECONDS", "REPORT_TIMEOUT_SECONDS"):
        monkeypatch.setattr(constants, name, DEADLINE)


@pytest.fixture
def wait() -> Callable[..., Any]:
    return wait_until


@pytest.fixture(name="golden")
def golden_fixture() -> Callable[[str], Document]:
    return golden


@pytest.fixture
def authority_named(tmp_path: Path) -> Callable[[str], Authority]:
    return lambda name: Authority(tmp_path, name)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "first")


@pytest.fixture
def operator(authority: Authority) -> Iterator[FakeOperator]:
    server = FakeOperator(authority)
    server.start()
    yield server
    server.release.set()
    server.close()


@pytest.fixture
def leader(authority: Authority, operator: FakeOperator) -> Iterator[FakeOperator]:
    """Another replica, which leads; `operator` stands by and says so."""
    server = FakeOperator(authority)
    server.start()
    operator.status, operator.leader = 503, server.url
    yield server
    server.release.set()
    server.close()


@pytest.fixture
def metadata() -> Iterator[FakeCloud]:
    """A metadata service whose clock is the machine's, for the real process."""
    cloud = FakeCloud(lambda: dt.datetime.now(dt.UTC))
    with cloud.server:
        yield cloud


@pytest.fixture
def sky(clock: FakeClock) -> Iterator[FakeCloud]:
    """A metadata service whose clock is the test's, for a source alone."""
    cloud = FakeCloud(clock.now, clock.monotonic)
    with cloud.server:
        yield cloud


@pytest.fixture
def patient(sidecar: SidecarProcess) -> None:
    """Its last report gets through however busy the machine is."""
    sidecar.before = PATIENT


@pytest.fixture
def sidecar(
    tmp_path: Path, run_dir: Path, authority: Authority, operator: FakeOperator, metadata: FakeCloud
) -> Iterator[SidecarProcess]:
    """Set up, not started."""
    token, bundle = tmp_path / "token", tmp_path / "ca.crt"
    token.write_text("first-token")
    bundle.write_bytes(authority.file.read_bytes())
    pod = golden("report.json")["pod"]
    found = SidecarProcess(
        environment={
            **{name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")},
            "HOLDFAST_RUN_DIR": str(run_dir),
            "HOLDFAST_POD_UID": pod["uid"],
            "HOLDFAST_POD_NAME": pod["name"],
            "HOLDFAST_POD_NAMESPACE": pod["namespace"],
            "HOLDFAST_NODE_NAME": pod["node"],
            "HOLDFAST_OPERATOR_URL": operator.url,
            "HOLDFAST_TOKEN_FILE": str(token),
            "HOLDFAST_CA_FILE": str(bundle),
            "HOLDFAST_NOTICE_PROVIDERS": "AWS",
            "HOLDFAST_METADATA_URL": metadata.url,
            "HOLDFAST_SIDECAR_PORT": "0",
            "HOLDFAST_SIDECAR_ADDRESS": "127.0.0.1",
        },
        run_dir=run_dir,
        log=tmp_path / "sidecar.log",
    )
    yield found
    for process in found.started:
        process.kill()
        process.wait(DEADLINE)
