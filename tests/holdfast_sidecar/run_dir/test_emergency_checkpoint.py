"""A notice reaches the launcher once, and never at the cost of a request that is already there."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_sidecar.constants import MAX_NOTICES
from holdfast_sidecar.protocol.document import dump_document, format_time, parse_time
from holdfast_sidecar.protocol.notice import Notice
from holdfast_sidecar.run_dir.checkpoint_request import merge
from holdfast_sidecar.run_dir.emergency_checkpoint import NoticeLedger

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def notice(name: str = "aws-spot-1", action: str = "terminate", minutes: float = 2) -> Notice:
    deadline = NOON + timedelta(minutes=minutes)
    return Notice(id=name, reason=action, source="AWS", action=action, deadline=deadline, observed_at=NOON)


def touch(run_dir: Path) -> dict[str, object]:
    return json.loads((run_dir / "emergency_checkpoint").read_text())


def test_an_interruption_asks_for_a_drain_by_its_deadline(run_dir: Path):
    assert NoticeLedger(run_dir).publish(notice())
    assert touch(run_dir) == notice().as_request()
    assert touch(run_dir)["drain"] is True
    assert touch(run_dir)["deadline"] == "2026-01-31T12:02:00.000000Z"


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate", "preempt", "redeploy", "reboot"])
def test_each_interruption_drains(action: str):
    assert notice(action=action).drain


@pytest.mark.parametrize("action", ["rebalance", "migrate", "freeze", "maintenance"])
def test_what_the_machine_survives_asks_for_a_checkpoint_only(run_dir: Path, action: str):
    NoticeLedger(run_dir).publish(notice(action=action))
    assert touch(run_dir)["drain"] is False


def test_a_notice_that_the_launcher_has_taken_does_not_come_back(run_dir: Path):
    ledger = NoticeLedger(run_dir)
    ledger.publish(notice())
    (run_dir / "emergency_checkpoint").unlink()
    assert not ledger.publish(notice())
    assert not NoticeLedger(run_dir).publish(notice()), "nor after a restart of the sidecar"
    assert not (run_dir / "emergency_checkpoint").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("emergency_checkpoint", {"version": 1, "id": "aws-spot-1", "drain": True}),
        ("emergency_checkpoint.ack", {"version": 1, "id": "aws-spot-1", "result": "Committed"}),
        ("status.json", {"version": 1, "notices": [{"id": "aws-spot-1"}]}),
        ("emergency_checkpoint", {"version": 1, "id": "by-hand", "supersedes": ["aws-spot-1"]}),
        ("status.json", {"version": 1, "id": [], "notices": [7, {"id": {}}, {"id": "aws-spot-1"}]}),
    ],
)
def test_killed_sidecar_finds_its_unrecorded_request(run_dir: Path, name: str, content: object):
    (run_dir / name).write_text(json.dumps(content))
    assert NoticeLedger(run_dir).publish(notice()), "it is reported"
    assert json.loads((run_dir / name).read_text()) == content, "and not asked for again"
    assert (run_dir / "emergency_checkpoint").exists() == (name == "emergency_checkpoint")


def test_a_full_ledger_drops_a_request_for_a_checkpoint_before_a_drain(run_dir: Path):
    ledger = NoticeLedger(run_dir)
    ledger.publish(notice())
    for number in range(MAX_NOTICES):
        ledger.publish(notice(f"gpu-{number}", "checkpoint"))
    assert [known.id for known in ledger.notices()] == ["aws-spot-1", *(f"gpu-{n}" for n in range(1, MAX_NOTICES))]


def test_a_later_and_other_notice_is_passed_on_too(run_dir: Path):
    ledger = NoticeLedger(run_dir)
    assert ledger.publish(notice("aws-rebalance-1", "rebalance"))
    (run_dir / "emergency_checkpoint").unlink()
    assert ledger.publish(notice("aws-spot-2"))
    assert touch(run_dir)["id"] == "aws-spot-2"
    assert [known.id for known in NoticeLedger(run_dir).notices()] == ["aws-rebalance-1", "aws-spot-2"]


def test_checkpoint_keeps_an_unreadable_request(run_dir: Path, tmp_path: Path):
    (run_dir / "emergency_checkpoint").symlink_to(tmp_path / "elsewhere")
    assert NoticeLedger(run_dir).publish(notice(action="rebalance"))
    assert (run_dir / "emergency_checkpoint").is_symlink()


def test_drain_replaces_an_unreadable_request(run_dir: Path, tmp_path: Path):
    (run_dir / "emergency_checkpoint").symlink_to(tmp_path / "elsewhere")
    assert NoticeLedger(run_dir).publish(notice())
    assert touch(run_dir)["id"] == "aws-spot-1"
    assert not (tmp_path / "elsewhere").exists()


def test_a_damaged_memory_starts_anew(run_dir: Path):
    (run_dir / "sidecar-notices.json").write_text('{"version": 1, "notices": [{"id": 3}]}')
    assert NoticeLedger(run_dir).notices() == ()


@pytest.mark.parametrize("content", [b"", b" \n", b"garbage", b'{"version": 9, "id": "later"}'])
def test_a_request_without_readable_content_gives_way(content: bytes):
    assert merge(content, notice().as_request()).request == notice().as_request()


def test_a_drain_takes_over_a_checkpoint_that_waits_and_names_it():
    waiting = notice("aws-rebalance-1", "rebalance", minutes=1).as_request()
    merged = merge(dump_document(waiting), notice("aws-spot-1").as_request()).request
    assert (merged["id"], merged["drain"], merged["supersedes"]) == ("aws-spot-1", True, ["aws-rebalance-1"])
    assert merged["deadline"] == waiting["deadline"], "the earlier deadline holds"


@pytest.mark.parametrize("deadline", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
def test_a_deadline_out_of_all_range_is_none(deadline: str):
    waiting = dump_document({"version": 1, "id": "by-hand", "deadline": deadline})
    joined = merge(waiting, notice().as_request()).request
    assert joined["deadline"] == notice().as_request()["deadline"]


def test_the_earliest_time_of_all_is_read_as_it_was_written():
    earliest = datetime.min.replace(tzinfo=UTC)
    assert parse_time(format_time(earliest)) == earliest


def test_a_checkpoint_does_not_displace_a_drain_that_waits():
    waiting = notice("aws-spot-1").as_request()
    new = notice("aws-rebalance-1", "rebalance", minutes=9).as_request()
    merged = merge(dump_document(waiting), new).request
    assert merged == {**waiting, "supersedes": ["aws-rebalance-1"]}


def acknowledge(run_dir: Path, name: str, result: str = "Committed") -> None:
    beside = run_dir / "ack.new"
    beside.write_text(json.dumps({"version": 1, "id": name, "result": result}))
    beside.rename(run_dir / "emergency_checkpoint.ack")


def test_a_commit_is_made_when_the_launcher_says_so(run_dir: Path):
    ledger = NoticeLedger(run_dir)
    ledger.publish(notice())
    assert not ledger.committed("aws-spot-1")
    for name, result in (("aws-spot-1", "Failed"), ("another", "Committed")):
        acknowledge(run_dir, name, result)
        assert not ledger.committed("aws-spot-1")
    acknowledge(run_dir, "aws-spot-1")
    assert ledger.committed("aws-spot-1")


def test_one_acknowledgement_answers_joined_requests(run_dir: Path):
    ledger = NoticeLedger(run_dir)
    ledger.publish(notice("aws-rebalance-1", "rebalance"))
    ledger.publish(notice("aws-spot-1"))
    acknowledge(run_dir, "aws-spot-1")
    assert ledger.committed("aws-rebalance-1")
    assert ledger.committed("aws-spot-1")


def test_an_acknowledgement_is_news_once(run_dir: Path):
    acknowledge(run_dir, "of-old")
    ledger = NoticeLedger(run_dir)
    assert not ledger.acknowledged()
    acknowledge(run_dir, "aws-spot-1")
    assert ledger.acknowledged()
    assert not ledger.acknowledged()


@pytest.mark.parametrize("content", [b"", b"garbage", b"[]", b'{"version": 9, "id": "aws-spot-1"}'])
def test_an_acknowledgement_that_cannot_be_read_is_none(run_dir: Path, content: bytes):
    (run_dir / "emergency_checkpoint.ack").write_bytes(content)
    assert not NoticeLedger(run_dir).committed("aws-spot-1")


requests = st.builds(
    lambda name, action, minutes: notice(name, action, minutes).as_request(),
    st.sampled_from(["a", "b", "c", "d"]),
    st.sampled_from(["terminate", "rebalance"]),
    st.integers(min_value=1, max_value=90),
)


@given(st.lists(requests, min_size=1, max_size=6))
def test_no_order_of_requests_loses_a_drain_a_deadline_or_a_name(waiting: list[dict[str, object]]):
    unique = list({request["id"]: request for request in waiting}.values())
    held = unique[0]
    for request in unique[1:]:
        held = merge(dump_document(held), request).request
    assert held["drain"] == any(request["drain"] for request in unique)
    assert parse_time(str(held["deadline"])) == min(parse_time(str(request["deadline"])) for request in unique)
    assert {held["id"], *held.get("supersedes", [])} == {request["id"] for request in unique}
