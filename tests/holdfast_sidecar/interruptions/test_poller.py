"""A source is asked at the pace that its answers set."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

from holdfast_sidecar.errors import SourceError
from holdfast_sidecar.interruptions.poller import InterruptionPoller
from holdfast_sidecar.protocol.notice import Notice
from holdfast_sidecar.run_dir.emergency_checkpoint import NoticeLedger

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def notice(name: str = "aws-spot-1", action: str = "terminate", minutes: float = 2) -> Notice:
    deadline = NOON + timedelta(minutes=minutes)
    return Notice(id=name, reason=action, source="AWS", action=action, deadline=deadline, observed_at=NOON)


def touch(run_dir: Path) -> dict[str, object]:
    return json.loads((run_dir / "emergency_checkpoint").read_text())


class Scripted:
    """A source that plays a script."""

    name = "AWS"
    longest = 1.0

    def __init__(self, *answers: Notice | Exception | None, known: bool = False) -> None:
        self._answers = list(answers)
        self.known = known

    def poll(self, now: datetime) -> tuple[Notice, ...]:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        self.known = True
        return () if answer is None else (answer,)


def watch(run_dir: Path, clock: object, *answers: Notice | Exception | None) -> tuple[list[float], list[Notice]]:
    told: list[Notice] = []
    watcher = InterruptionPoller(
        Scripted(*answers), NoticeLedger(run_dir), clock, lambda low, high: high, on_notice=told.append
    )
    return [watcher.tick() for _ in answers], told


def test_a_notice_that_holds_is_told_once(run_dir: Path, clock):
    waits, told = watch(run_dir, clock, None, notice(), notice(), notice())
    assert told == [notice()]
    assert waits == [2.0] * 4


def test_the_pause_counts_from_the_beginning_of_a_poll(run_dir: Path, clock):
    """A service that holds its answers back until there is news is asked again at once."""

    class Holding(Scripted):
        def poll(self, now: datetime) -> tuple[Notice, ...]:
            clock.forward(self.held)
            return super().poll(now)

    source = Holding(None, None)
    watcher = InterruptionPoller(source, NoticeLedger(run_dir), clock, lambda low, high: high)
    source.held = 0.5
    assert watcher.tick() == 1.5
    source.held = 30
    assert watcher.tick() == 0


def test_all_notices_of_one_poll_are_passed_on(run_dir: Path, clock):
    class Two(Scripted):
        def poll(self, now: datetime) -> tuple[Notice, ...]:
            return notice("a", "rebalance"), notice("b", "rebalance", minutes=1)

    ledger = NoticeLedger(run_dir)
    InterruptionPoller(Two(), ledger, clock, lambda low, high: high).tick()
    assert [known.id for known in ledger.notices()] == ["a", "b"]
    assert (touch(run_dir)["id"], touch(run_dir)["supersedes"]) == ("a", ["b"])


def test_absent_source_is_polled_with_back_off(run_dir: Path, clock, caplog):
    """The log has one line."""
    caplog.set_level("INFO")
    waits, _ = watch(run_dir, clock, *[SourceError("refused")] * 9)
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    assert len(caplog.records) == 1


def test_a_source_that_has_answered_is_never_left_for_long(run_dir: Path, clock):
    waits, _ = watch(run_dir, clock, None, *[SourceError("500")] * 9)
    assert max(waits) == 5.0


def test_busy_known_source_is_polled_often(run_dir: Path, clock, caplog):
    source = Scripted(*[SourceError("429")] * 9, known=True)
    watcher = InterruptionPoller(source, NoticeLedger(run_dir), clock, lambda low, high: high)
    assert max(watcher.tick() for _ in range(9)) == 5.0
    assert "no notices for now" in caplog.text


def test_a_source_that_is_found_after_all_is_said(run_dir: Path, clock, caplog):
    source = Scripted(SourceError("refused"), SourceError("429"))
    watcher = InterruptionPoller(source, NoticeLedger(run_dir), clock, lambda low, high: high)
    watcher.tick()
    source.known = True
    watcher.tick()
    assert [record.message.partition(" (")[0] for record in caplog.records] == ["AWS: no notices for now"]


def test_unexpected_error_costs_its_source_one_poll(run_dir: Path, clock, caplog):
    """The log has the traceback."""
    waits, told = watch(run_dir, clock, None, RecursionError("deep"), RecursionError("deep"), notice())
    assert (waits[1:3], told) == ([1.0, 2.0], [notice()])
    assert [record.exc_info is not None for record in caplog.records if "own" in record.message] == [True]


def test_a_source_that_recovers_is_polled_at_its_usual_pace(run_dir: Path, clock):
    waits, told = watch(run_dir, clock, None, SourceError("500"), SourceError("500"), notice())
    assert waits[-1] == 2.0
    assert told == [notice()]


def test_a_touch_file_that_cannot_be_written_is_tried_again(tmp_path: Path, clock):
    gone = tmp_path / "run"
    watcher = InterruptionPoller(Scripted(notice(), notice()), NoticeLedger(gone), clock, lambda low, high: high)
    watcher.tick()
    gone.mkdir()
    watcher.tick()
    assert touch(gone)["id"] == "aws-spot-1"
