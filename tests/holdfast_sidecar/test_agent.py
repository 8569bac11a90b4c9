"""Reports and membership against the real protocol over TLS, with time in the test's hand."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from holdfast_sidecar import constants
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


def stored(run_dir: Path) -> bytes:
    return (run_dir / "membership.json").read_bytes()


def test_a_poll_asks_for_what_is_above_the_stored_revision(membership, operator, run_dir):
    first = operator.membership(7)
    assert membership.step() == 0
    assert membership.step() == 0
    assert operator.polls == [0, 7]
    assert stored(run_dir) == first


def test_the_same_document_again_is_not_written_again(membership, operator, run_dir, clock):
    operator.membership(7)
    membership.step()
    before = (run_dir / "membership.json").stat().st_ino
    membership.expect(3)
    clock.forward(2)
    membership.expect(3)
    membership.step()
    assert operator.polls == [0, 2]
    assert (run_dir / "membership.json").stat().st_ino == before


def test_an_answer_about_a_revision_still_on_its_way_disturbs_nothing(membership, operator, clock):
    operator.membership(7)
    membership.step()
    membership.expect(8)
    clock.forward(0.5)
    membership.expect(8)
    operator.membership(8)
    membership.step()
    membership.expect(8)
    clock.forward(5)
    membership.expect(8)
    assert operator.polls == [0, 7]


def test_a_restored_backup_is_followed_downwards(membership, operator, run_dir, clock):
    operator.membership(9)
    membership.step()
    restored = operator.membership(4)
    membership.expect(4)
    clock.forward(2)
    membership.expect(4)
    membership.step()
    assert operator.polls == [0, 3]
    assert stored(run_dir) == restored


def test_no_membership_any_more_keeps_the_stored_one_and_asks_from_the_start(membership, operator, run_dir, clock):
    kept = operator.membership(9)
    membership.step()
    operator.publish(b"", 0)
    membership.expect(0)
    clock.forward(2)
    membership.expect(0)
    membership.step()
    assert operator.polls == [0, 0]
    assert stored(run_dir) == kept


def test_a_poll_that_waits_on_a_dead_connection_is_begun_again_without_a_pause(membership, operator, clock, wait):
    operator.membership(7)
    membership.step()
    operator.hold = 30.0
    waits: list[float] = []
    poller = threading.Thread(target=lambda: waits.append(membership.step()), daemon=True)
    poller.start()
    wait(lambda: len(operator.polls) == 2, "the long poll")
    membership.expect(8)
    clock.forward(2)
    membership.expect(8)
    poller.join(240)
    assert waits == [0.0]


def test_failures_wait_ever_longer_up_to_three_seconds(membership, operator):
    operator.status = 500
    assert [membership.step() for _ in range(6)] == [0.2, 0.4, 0.8, 1.6, 3.0, 3.0]
    operator.status = None
    assert membership.step() == 0


def test_a_document_of_an_unknown_version_is_not_fetched_in_a_busy_loop(membership, operator, run_dir):
    operator.membership(1, version=7)
    assert [membership.step() for _ in range(3)] == [0.2, 0.4, 0.8]
    assert not (run_dir / "membership.json").exists()


def test_a_membership_that_cannot_be_written_is_fetched_again(membership, operator, run_dir):
    wanted = operator.membership(5)
    run_dir.rename(run_dir.with_name("away"))
    assert membership.step() > 0
    run_dir.with_name("away").rename(run_dir)
    membership.step()
    assert stored(run_dir) == wanted


def test_reports_are_numbered_and_paced(reporter, operator, clock):
    assert reporter.step() == 0
    assert reporter.step() == 5.0
    clock.forward(5)
    assert reporter.step() == 0
    assert [report["sidecar"]["number"] for report in operator.reports] == [1, 2]


def test_a_failed_report_is_tried_again_after_its_pause_under_a_new_number(reporter, operator, clock):
    operator.status = 503
    reporter.step()
    assert reporter.step() == pytest.approx(0.2)
    operator.status = None
    clock.forward(0.2)
    reporter.step()
    assert [report["sidecar"]["number"] for report in operator.reports] == [2]


def test_a_standby_leads_to_the_leader(reporter, operator, leader, clock):
    for _ in range(4):
        clock.forward(5)
        reporter.step()
    assert len(operator.tries) == 1
    assert [report["sidecar"]["number"] for report in leader.reports] == [2, 3, 4]


def test_a_leader_that_died_leads_back_within_the_same_report(reporter, operator, leader, clock):
    for _ in range(2):
        clock.forward(5)
        reporter.step()
    leader.stop()
    operator.status = None
    clock.forward(5)
    reporter.step()
    assert [report["sidecar"]["number"] for report in operator.reports] == [3], "it leads now"


def test_a_standby_that_still_names_the_dead_leader_is_one_refusal(reporter, operator, leader, clock, caplog):
    leader.stop()
    for _ in range(6):
        clock.forward(5)
        reporter.step()
    assert len(operator.tries) == 6
    assert [record.message for record in caplog.records if "do not reach" in record.message] == [
        f"reports do not reach the operator: the operator is not serving now (503), its leader is {leader.url}"
    ]


@pytest.mark.parametrize(
    "said", [None, "", "http://127.0.0.1:{port}", "https://localhost:{port}", "nonsense", "https://[::1", 7]
)
def test_only_an_address_over_tls_is_followed(reporter, operator, leader, clock, said):
    operator.leader = said.format(port=leader.port) if isinstance(said, str) else said
    for _ in range(3):
        clock.forward(5)
        reporter.step()
    assert leader.tries == []
    assert len(operator.tries) == 3


def test_a_service_that_leads_to_a_lost_machine_is_asked_again_soon(unanswered, run_dir, clock, monkeypatch):
    monkeypatch.setattr(constants, "CONNECT_SECONDS", 0.05)
    monkeypatch.setattr(constants, "MEMBERSHIP_TIMEOUT_SECONDS", 1e6)
    assert Membership(unanswered, run_dir, clock, highest).step() == pytest.approx(0.2)


def test_the_membership_is_fetched_from_the_leader(membership, operator, leader, run_dir):
    leader.hold = 0.05
    wanted = leader.membership(5)
    membership.step()
    membership.step()
    assert stored(run_dir) == wanted


def test_the_last_report_is_skipped_only_if_the_operator_knows_all_of_it(reporter, link, operator, run_dir):
    api = link[0]
    reporter.step()
    assert reporter.send_final(api, lambda _: None)
    assert len(operator.reports) == 1
    (run_dir / "status.json").write_text('{"version": 1, "exit": {"code": 0}}')
    assert reporter.send_final(api, lambda _: None)
    assert operator.latest()["launcher"]["exit"] == {"code": 0}


def test_the_last_report_gives_up_in_time(reporter, link, operator, clock):
    operator.status = 500
    started = clock.monotonic()
    assert not reporter.send_final(link[0], clock.forward)
    assert clock.monotonic() - started <= 5.0 + 1e-6
    assert len(operator.tries) > 2


@pytest.mark.parametrize("token", ["", "two\nlines", "\x00", None])
def test_a_token_that_cannot_be_sent_is_an_error_of_its_own(reporter, operator, tmp_path, caplog, token):
    (tmp_path / "token").unlink()
    if token is not None:
        (tmp_path / "token").write_text(token)
    reporter.step()
    assert operator.tries == []
    assert "the token" in caplog.text
    assert "lines" not in caplog.text


@pytest.mark.parametrize(("said", "pause"), [("7", 7.0), ("9999", 30.0), ("soon", 0.2), ("", 0.2), ("-3", 0.2)])
def test_who_asks_too_often_comes_again_when_the_operator_says(reporter, operator, clock, said, pause):
    operator.status, operator.retry_after = 429, said
    reporter.step()
    assert reporter.step() == pytest.approx(pause)
    operator.status = None
    clock.forward(pause)
    assert reporter.step() == 0
    assert len(operator.reports) == 1


def test_a_poll_keeps_the_pause_too(membership, operator):
    operator.status, operator.retry_after = 429, "7"
    assert membership.step() == pytest.approx(7.0)
