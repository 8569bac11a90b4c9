"""When a report is due."""

import os

import pytest

from holdfast_sidecar.operator_api.report_schedule import NOTHING_REPORTED, accepted, failed, report_due
from holdfast_sidecar.protocol.report import SIGNIFICANT, significant
from holdfast_sidecar.run_dir.launcher_status import LauncherStatus, LauncherStatusWatcher


def launcher(step: int = 1, sequence: int = 1, **fields: object) -> LauncherStatus:
    status = {"version": 1, "phase": "Running", "committedStep": step, **fields}
    return LauncherStatus(status=status, changed_at=0.0, significance=significant(status), sequence=sequence)


def due(state, now: LauncherStatus, notices: int = 0) -> float:
    return report_due(state, now, notices)[0]


def test_the_first_report_is_due_at_once():
    assert due(NOTHING_REPORTED, launcher()) <= 0


def test_a_step_is_worth_a_report_a_second():
    state = accepted(launcher(1, 1), 0, monotonic=100.0)
    assert due(state, launcher(2, 2)) == 101.0


def test_without_any_change_one_is_due_every_five_seconds():
    assert due(accepted(launcher(), 0, monotonic=100.0), launcher()) == 105.0


def test_different_revisions_are_polled_again_soon():
    state = accepted(launcher(), 0, monotonic=100.0, settled=False)
    assert due(state, launcher()) == 101.0


@pytest.mark.parametrize("field", SIGNIFICANT)
def test_a_significant_change_is_due_at_once(field: str):
    state = accepted(launcher(), 0, monotonic=100.0)
    assert due(state, launcher(1, 2, **{field: "something new"})) < 100.0


def test_a_notice_is_due_at_once():
    assert due(accepted(launcher(), 0, monotonic=100.0), launcher(), notices=1) < 100.0


def test_back_off_holds_for_significant_changes_too():
    state = accepted(launcher(), 0, monotonic=100.0)
    state = failed(state, 110.0, 0.5)
    state = failed(state, 111.0, 1.0)
    assert due(state, launcher(1, 2, phase="Forming")) == 112.0


def test_what_changed_during_an_absence_is_still_due_after_it():
    state = accepted(launcher(), 0, monotonic=100.0)
    state = failed(state, 110.0, 1.0)
    assert due(accepted(launcher(), 0, monotonic=120.0), launcher(1, 2, phase="Forming")) < 120.0


def test_silence_of_a_launcher_is_reported_once(run_dir, clock):
    """The next report of the launcher is significant again."""
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
