"""The membership by long poll, against the real protocol over TLS."""

import threading
from pathlib import Path

import pytest

from holdfast_sidecar import constants
from holdfast_sidecar.operator_api.membership import Membership


def highest(_: float, high: float) -> float:
    return high


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


def test_answer_about_an_unknown_revision_is_ignored(membership, operator, clock):
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


def test_missing_membership_keeps_the_stored_one(membership, operator, run_dir, clock):
    """The next poll asks for any revision."""
    kept = operator.membership(9)
    membership.step()
    operator.publish(b"", 0)
    membership.expect(0)
    clock.forward(2)
    membership.expect(0)
    membership.step()
    assert operator.polls == [0, 0]
    assert stored(run_dir) == kept


def test_poll_on_a_dead_connection_restarts_at_once(membership, operator, clock, wait):
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


def test_unknown_version_is_not_fetched_in_a_busy_loop(membership, operator, run_dir):
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


def test_service_with_a_lost_replica_is_retried_soon(unanswered, run_dir, clock, monkeypatch):
    monkeypatch.setattr(constants, "CONNECT_SECONDS", 0.05)
    monkeypatch.setattr(constants, "MEMBERSHIP_TIMEOUT_SECONDS", 1e6)
    assert Membership(unanswered, run_dir, clock, highest).step() == pytest.approx(0.2)


def test_the_membership_is_fetched_from_the_leader(membership, operator, leader, run_dir):
    leader.hold = 0.05
    wanted = leader.membership(5)
    membership.step()
    membership.step()
    assert stored(run_dir) == wanted


def test_a_poll_keeps_the_pause_too(membership, operator):
    operator.status, operator.retry_after = 429, "7"
    assert membership.step() == pytest.approx(7.0)
