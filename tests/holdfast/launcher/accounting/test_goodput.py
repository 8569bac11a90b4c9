"""The ledger of the launcher: what no rank can measure, and the sum over all places."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.launcher.accounting.goodput import GoodputAccounts
from holdfast.launcher.membership.state import Phase
from holdfast.telemetry.activity import Activity, Meter
from holdfast.telemetry.rank_time import Ledger


class Launcher:
    """The accounts of a launcher and the ranks that report to it, on one clock."""

    def __init__(self) -> None:
        self.now = 50.0
        self.accounts = GoodputAccounts(lambda: self.now)
        self.meters: dict[int, Meter] = {}

    def passes(self, seconds: float) -> None:
        self.now += seconds

    def starts(self, pid: int, place: int = 0) -> None:
        ledger = Ledger(lambda: self.now, lambda report: self.accounts.account(pid, report))
        self.meters[pid] = Meter(ledger)
        self.enters(pid, place)

    def enters(self, pid: int, place: int = 0, *, step: int = 0, syncs: float = 0.5) -> None:
        if self.meters[pid].activity not in (Activity.STARTUP, Activity.PARKED):
            self.meters[pid].enter(Activity.PARKED)
        self.accounts.hello(pid, place)
        self.meters[pid].enter(Activity.SYNC, step)
        self.passes(syncs)
        self.accounts.restored(step)
        self.meters[pid].enter(Activity.DATA, step)

    def steps(self, pid: int, step: int, *, seconds: float = 1.0) -> None:
        self.meters[pid].enter(Activity.COMPUTE)
        self.passes(seconds)
        self.accounts.stepped(pid, step)
        self.meters[pid].enter(Activity.DATA, step)

    @property
    def books(self) -> dict[str, Any]:
        found = self.accounts.to_json()
        assert found is not None
        assert abs(found["unattributedSeconds"]) <= 0.01 * found["wallSeconds"]
        return found


@pytest.fixture
def launcher() -> Launcher:
    return Launcher()


def test_nothing_is_said_before_a_rank_told_its_books(launcher: Launcher) -> None:
    launcher.passes(5)
    assert launcher.accounts.to_json() is None


def test_start_up_is_the_launchers_to_measure(launcher: Launcher) -> None:
    launcher.passes(4)
    launcher.starts(1)
    launcher.steps(1, 1)
    books = launcher.books
    assert books["seconds"]["startup"] == pytest.approx(4.5)
    assert books["seconds"]["productive"] == pytest.approx(1.0)
    assert books["wallSeconds"] == pytest.approx(5.5)


def test_what_ranks_do_adds_up_over_processes(launcher: Launcher) -> None:
    launcher.starts(1)
    launcher.starts(2, 1)
    for pid in (1, 2):
        launcher.steps(pid, 1, seconds=2.0)
    launcher.accounts.ended(1, hung=False)
    launcher.starts(3)
    launcher.steps(3, 2, seconds=3.0)
    assert launcher.books["activities"]["compute"] == pytest.approx(2 * 2.0 + 3.0)


def test_rank_of_a_release_without_activity_reports_is_accounted(launcher: Launcher) -> None:
    launcher.accounts.hello(1, 0)
    report = {"activity": "data", "wall": 0.0, "open": 0.0, "seconds": {}}
    launcher.accounts.account(1, report)
    assert set(launcher.books["activities"].values()) == {0.0}


def test_time_between_hello_and_first_sync_is_start_up(launcher: Launcher) -> None:
    launcher.accounts.hello(1, 0)
    launcher.passes(3)
    launcher.starts(1)
    launcher.steps(1, 1)
    assert launcher.books["seconds"]["startup"] == pytest.approx(3.5)


def test_a_rank_that_dies_before_it_lines_up_leaves_no_gap(launcher: Launcher) -> None:
    launcher.starts(1)
    launcher.steps(1, 1)
    launcher.accounts.ended(1, hung=False)
    launcher.accounts.hello(2, 0)
    launcher.passes(2)
    launcher.accounts.ended(2, hung=False)
    launcher.passes(1)
    launcher.starts(3)
    assert launcher.books["seconds"]["restart"] == pytest.approx(2 + 1 + 0.5)


def test_waiting_for_workers_is_idle(launcher: Launcher) -> None:
    launcher.passes(1)
    launcher.accounts.phase(Phase.WAITING)
    launcher.passes(30)
    launcher.accounts.phase(Phase.FORMING)
    launcher.passes(2)
    launcher.starts(1)
    assert launcher.books["seconds"]["idle"] == pytest.approx(30)
    assert launcher.books["seconds"]["startup"] == pytest.approx(1 + 2 + 0.5)


def test_place_of_a_killed_rank_is_accounted_until_refilled(launcher: Launcher) -> None:
    launcher.starts(1)
    for step in range(1, 4):
        launcher.steps(1, step)
    launcher.meters[1].enter(Activity.COMPUTE)
    launcher.passes(0.7)
    launcher.accounts.ended(1, hung=False)
    launcher.passes(3)
    launcher.starts(2)
    launcher.steps(2, 4)
    seconds = launcher.books["seconds"]
    assert seconds["recompute"] == pytest.approx(0.7)
    assert seconds["restart"] == pytest.approx(3 + 0.5)  # its own start is part of the recovery
    assert seconds["startup"] == pytest.approx(0.5)
    assert seconds["productive"] == pytest.approx(4)


def test_delayed_messages_move_no_time_between_causes(launcher: Launcher) -> None:
    reports: list[dict[str, Any]] = []
    launcher.accounts.hello(1, 0)
    meter = Meter(Ledger(lambda: launcher.now, reports.append))

    def heard_late(*, step: int | None = None, at: float | None = None) -> None:
        launcher.passes(0.2)
        while reports:
            launcher.accounts.account(1, reports.pop(0))
        if step is not None:
            launcher.accounts.stepped(1, step, at)

    launcher.passes(3)
    meter.enter(Activity.SYNC, 0)
    heard_late()
    meter.enter(Activity.DATA, 0)
    meter.enter(Activity.COMPUTE)
    heard_late()
    launcher.passes(0.8)
    heard_late(step=1, at=launcher.now)
    launcher.passes(0.3)
    launcher.accounts.ended(1, hung=False)
    books = launcher.books
    assert books["unattributedSeconds"] == pytest.approx(0, abs=1e-6)
    seconds = {cause: spent for cause, spent in books["seconds"].items() if spent}
    assert seconds == pytest.approx({"startup": 3 + 0.2, "productive": 0.2 + 0.8, "recompute": 0.2 + 0.3})


def test_what_a_hung_rank_did_until_it_was_ended_is_detection(launcher: Launcher) -> None:
    launcher.starts(1)
    launcher.steps(1, 1)
    launcher.meters[1].enter(Activity.COMPUTE)
    launcher.passes(6)
    launcher.accounts.ended(1, hung=True)
    assert launcher.books["seconds"]["detection"] == pytest.approx(6)


def test_end_of_a_blamed_hung_rank_belongs_to_the_recovery(launcher: Launcher) -> None:
    launcher.starts(1)
    launcher.steps(1, 1)
    launcher.meters[1].enter(Activity.COMPUTE)
    before = launcher.books["seconds"]["restart"]
    launcher.passes(6)
    launcher.accounts.failed("Infrastructure")
    launcher.passes(0.3)
    launcher.accounts.ended(1, hung=True)
    launcher.passes(1)
    books = launcher.books
    assert books["seconds"]["detection"] == pytest.approx(6)
    assert books["seconds"]["restart"] - before == pytest.approx(0.3 + 1)
    assert books["unattributedSeconds"] == pytest.approx(0, abs=1e-6)


def test_a_survivors_time_between_worlds_is_restart(launcher: Launcher) -> None:
    launcher.starts(1)
    launcher.steps(1, 1)
    launcher.meters[1].enter(Activity.PARKED)
    launcher.passes(0.2)
    launcher.accounts.phase(Phase.AWAITING_FENCE)
    launcher.passes(10)
    launcher.accounts.phase(Phase.FORMING)
    launcher.enters(1, step=1)
    launcher.steps(1, 2)
    seconds = launcher.books["seconds"]
    assert (seconds["restart"], seconds["idle"]) == (pytest.approx(0.2 + 0.5), pytest.approx(10))


def test_a_rank_that_is_done_costs_nothing_more(launcher: Launcher) -> None:
    launcher.starts(1)
    launcher.steps(1, 1)
    launcher.meters[1].enter(Activity.DONE, 1)
    before = launcher.books["wallSeconds"]
    launcher.passes(60)
    launcher.accounts.ended(1, hung=False)
    assert launcher.books["wallSeconds"] == before


def test_places_add_up(launcher: Launcher) -> None:
    launcher.passes(2)
    launcher.starts(1, 0)
    launcher.starts(2, 1)
    launcher.passes(1)
    assert launcher.books["wallSeconds"] == pytest.approx(2 * 4)
    assert launcher.books["seconds"]["startup"] == pytest.approx(2.5 + 3.0)


def test_standing_by_is_counted_apart(launcher: Launcher) -> None:
    launcher.accounts.standby(9)
    launcher.passes(8)
    launcher.starts(1)
    launcher.accounts.hello(9, 1)
    assert launcher.books["standbySeconds"] == pytest.approx(8.5)


def test_a_recovery_is_told_in_phases_that_add_up(launcher: Launcher) -> None:
    launcher.starts(1)
    launcher.steps(1, 1)
    launcher.passes(0.3)
    launcher.accounts.failed("Infrastructure", 1)
    launcher.passes(0.2)
    launcher.enters(1, step=1, syncs=0.1)
    launcher.passes(0.4)
    recovery = launcher.accounts.stepped(1, 2)
    assert recovery is not None
    assert recovery.seconds == pytest.approx({"detection": 0.3, "restart": 0.2, "sync": 0.1, "step": 0.4})
    assert {known["phase"] for known in launcher.books["recoveries"]} == set(recovery.seconds)


def test_second_failure_before_the_next_step_extends_recovery(launcher: Launcher) -> None:
    launcher.starts(1)
    launcher.steps(1, 1)
    launcher.accounts.failed("OOM", 1)
    launcher.enters(1, step=1)
    launcher.accounts.failed("Infrastructure", 1)
    launcher.enters(1, step=1)
    recovery = launcher.accounts.stepped(1, 2)
    assert recovery is not None
    assert (recovery.cause, launcher.accounts.failures) == ("OOM", 2)
    assert recovery.seconds["restart"] == pytest.approx(0.5)


def test_prepared_step_before_its_state_ends_no_recovery(
    launcher: Launcher,
) -> None:
    """The rank reports the step before it reports the restored state."""
    launcher.starts(1)
    launcher.steps(1, 1)
    launcher.accounts.failed("Infrastructure", 1)
    launcher.meters[1].enter(Activity.PARKED)
    launcher.accounts.hello(1, 0)
    assert launcher.accounts.stepped(1, 2) is None
    launcher.passes(0.3)
    launcher.accounts.restored(2)
    launcher.passes(0.1)
    recovery = launcher.accounts.stepped(1, 3)
    assert recovery is not None
    assert (recovery.seconds["sync"], recovery.seconds["step"]) == (pytest.approx(0.3), pytest.approx(0.1))
    assert (launcher.accounts.steps, launcher.accounts.lost_steps) == (3, 0)


def test_a_rank_that_is_heard_after_the_next_step_has_lost_none(launcher: Launcher) -> None:
    launcher.starts(1)
    launcher.starts(2, 1)
    launcher.steps(1, 1)
    for pid, place in ((1, 0), (2, 1)):
        launcher.accounts.hello(pid, place)
    launcher.accounts.restored(1)
    launcher.accounts.stepped(1, 2)
    launcher.accounts.restored(1)
    assert (launcher.accounts.steps, launcher.accounts.lost_steps) == (2, 0)


def test_steps_that_no_state_has_any_more_are_lost_once(launcher: Launcher) -> None:
    launcher.starts(1)
    for step in range(1, 6):
        launcher.steps(1, step)
    launcher.meters[1].enter(Activity.PARKED)
    launcher.enters(1, step=2)
    launcher.accounts.restored(2)  # reported by another rank
    books = launcher.books
    assert (books["steps"], books["lostSteps"], launcher.accounts.highest) == (5, 3, 5)
