"""When a report is due, and what is known of a launcher that speaks, falls silent or writes nonsense."""

import json
import os
from pathlib import Path

import pytest

from holdfast_sidecar.operator_api.report_schedule import NOTHING_REPORTED, accepted, failed, report_due
from holdfast_sidecar.protocol.report import SIGNIFICANT, significant
from holdfast_sidecar.run_dir.launcher_status import LauncherStatus, LauncherStatusWatcher


def beat(step: int = 1, sequence: int = 1, **fields: object) -> LauncherStatus:
    status = {"version": 1, "phase": "Running", "committedStep": step, **fields}
    return LauncherStatus(status=status, changed_at=0.0, significance=significant(status), sequence=sequence)


def due(state, now_beat: LauncherStatus, notices: int = 0) -> float:
    return report_due(state, now_beat, notices)[0]


def test_the_first_report_is_due_at_once():
    assert due(NOTHING_REPORTED, beat()) <= 0


def test_a_step_is_worth_a_report_a_second():
    state = accepted(beat(1, 1), 0, monotonic=100.0)
    assert due(state, beat(2, 2)) == 101.0


def test_without_any_change_one_is_due_every_five_seconds():
    assert due(accepted(beat(), 0, monotonic=100.0), beat()) == 105.0


def test_while_the_revisions_differ_the_operator_is_asked_again_soon():
    state = accepted(beat(), 0, monotonic=100.0, settled=False)
    assert due(state, beat()) == 101.0


@pytest.mark.parametrize("field", SIGNIFICANT)
def test_a_significant_change_is_due_at_once(field: str):
    state = accepted(beat(), 0, monotonic=100.0)
    assert due(state, beat(1, 2, **{field: "something new"})) < 100.0


def test_a_notice_is_due_at_once():
    assert due(accepted(beat(), 0, monotonic=100.0), beat(), notices=1) < 100.0


def test_after_a_failure_the_back_off_holds_also_for_what_is_significant():
    state = accepted(beat(), 0, monotonic=100.0)
    state = failed(state, 110.0, 0.5)
    state = failed(state, 111.0, 1.0)
    assert due(state, beat(1, 2, phase="Forming")) == 112.0


def test_what_changed_during_an_absence_is_still_due_after_it():
    state = accepted(beat(), 0, monotonic=100.0)
    state = failed(state, 110.0, 1.0)
    assert due(accepted(beat(), 0, monotonic=120.0), beat(1, 2, phase="Forming")) < 120.0


@pytest.fixture
def heartbeat(run_dir: Path, clock) -> LauncherStatusWatcher:
    return LauncherStatusWatcher(run_dir, clock)


def write(run_dir: Path, content: str) -> None:
    (run_dir / ".new").write_text(content)
    (run_dir / ".new").rename(run_dir / "status.json")


def test_before_the_first_status_the_launcher_is_silent_since_the_start(heartbeat, clock):
    clock.forward(7)
    assert not heartbeat.poll()
    assert heartbeat.current().status is None
    assert heartbeat.current().silent_seconds(clock.monotonic()) == 7


def test_silence_is_counted_from_the_last_change(heartbeat, run_dir, clock):
    write(run_dir, '{"version": 1, "phase": "Running"}')
    heartbeat.poll()
    clock.forward(100)
    write(run_dir, '{"version": 1, "phase": "Running", "committedStep": 2}')
    assert heartbeat.poll()
    clock.forward(3)
    assert not heartbeat.poll()
    assert heartbeat.current().silent_seconds(clock.monotonic()) == 3


def test_a_sign_of_life_without_news_ends_the_silence_and_is_no_news(heartbeat, run_dir, clock):
    write(run_dir, '{"version": 1, "phase": "AwaitingFence"}')
    heartbeat.poll()
    before = heartbeat.current().sequence
    clock.forward(100)
    os.utime(run_dir / "status.json", (5e9, 5e9))
    assert not heartbeat.poll()
    assert heartbeat.current().sequence == before
    assert heartbeat.current().silent_seconds(clock.monotonic()) == 0


def test_a_status_older_than_the_sidecar_counts_with_its_age(heartbeat, run_dir, clock):
    write(run_dir, '{"version": 1}')
    written = clock.now().timestamp() - 40
    os.utime(run_dir / "status.json", (written, written))
    heartbeat.poll()
    assert heartbeat.current().silent_seconds(clock.monotonic()) == pytest.approx(40)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"version": 2}', "status.json has version 2; this sidecar understands 1"),
        ("x" * (2 << 20), "larger than"),
    ],
)
def test_a_status_that_cannot_be_used_is_said_once_and_its_successor_read(heartbeat, run_dir, caplog, content, why):
    for padding in ("", " ", "  "):
        write(run_dir, content + padding)
        heartbeat.poll()
    assert heartbeat.current().status is None
    assert [why in record.message for record in caplog.records] == [True]
    write(run_dir, '{"version": 1, "ready": true}')
    heartbeat.poll()
    assert heartbeat.current().status == {"version": 1, "ready": True}


@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
def test_what_is_no_plain_file_neither_hangs_nor_misleads(heartbeat, run_dir, tmp_path, kind):
    path = run_dir / "status.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        (tmp_path / "elsewhere").write_text(json.dumps({"version": 1}))
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.mkdir()
    heartbeat.poll()
    assert heartbeat.current().status is None


def test_a_launcher_that_falls_silent_is_news_once_and_again_when_it_speaks(run_dir, clock):
    heartbeat = LauncherStatusWatcher(run_dir, clock)
    clock.forward(60)
    assert not heartbeat.poll(), "who never spoke is not silent, but starting"
    assert not heartbeat.current().silent
    status = run_dir / "status.json"
    status.write_text('{"version": 1, "phase": "Running"}')
    assert heartbeat.poll()
    state = accepted(heartbeat.current(), 0, monotonic=clock.monotonic())
    clock.forward(4.9)
    assert not heartbeat.poll()
    clock.forward(0.1)
    assert heartbeat.poll()
    assert heartbeat.current().silent
    assert due(state, heartbeat.current()) < clock.monotonic(), "the operator hears of it at once"
    assert not heartbeat.poll(), "once"
    state = accepted(heartbeat.current(), 0, monotonic=clock.monotonic())
    os.utime(status, (5e9, 5e9))
    assert heartbeat.poll()
    assert not heartbeat.current().silent
    assert due(state, heartbeat.current()) < clock.monotonic()
