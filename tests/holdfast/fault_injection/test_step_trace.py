"""The cost of a fault follows from the trace of steps alone."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from holdfast.cli.chaos.report import Cost, summary
from holdfast.fault_injection.step_trace import (
    Injection,
    JsonLines,
    StepRecord,
    first_after,
    lost_steps,
    steps_of_all,
)


def mark(time: float, step: int, *, rank: int = 0, size: int = 2, began: float | None = None) -> StepRecord:
    return StepRecord(time=time, began=time - 0.9 if began is None else began, rank=rank, pid=1, step=step, size=size)


STEADY = [mark(float(step), step, rank=rank) for step in range(1, 6) for rank in range(2)]


def test_a_step_in_flight_is_not_the_next_one() -> None:
    marks = [*STEADY, mark(5.6, 6, began=5.1), mark(9.0, 7, began=8.5)]
    found = first_after(marks, 5.5)
    assert found is not None
    assert found.step == 7


def test_nothing_is_lost_when_the_count_goes_on() -> None:
    assert lost_steps([*STEADY, mark(9.0, 6, began=8.5)], 5.5) == 0


def test_steps_made_again_are_lost() -> None:
    assert lost_steps([*STEADY, mark(9.0, 3, began=8.5)], 5.5) == 3


def test_a_rank_that_was_ahead_made_nothing_again() -> None:
    behind = mark(6.1, 6, rank=0, began=5.6)
    assert lost_steps([*STEADY, mark(6.0, 6, rank=1, began=5.4), behind, mark(7.0, 7, rank=1)], 5.5) == 0


def test_without_a_next_step_nothing_is_known() -> None:
    assert first_after(STEADY, 5.5) is None
    assert lost_steps(STEADY, 5.5) == 0


def test_a_step_of_all_is_one_that_every_rank_made() -> None:
    marks = [*STEADY, mark(7.0, 6, rank=0)]
    assert steps_of_all(marks, 0.0, size=2) == 5
    assert steps_of_all(marks, 3.5, size=2) == 1
    assert steps_of_all(marks, 0.0, size=3) == 0


def test_half_a_line_waits_for_its_rest(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "file")
    assert lines.read_new() == []
    with (tmp_path / "file").open("a") as file:
        file.write('{"a": 1}\n{"b"')
        file.flush()
        assert lines.read_new() == [{"a": 1}]
        file.write(": 2}\n")
        file.flush()
        assert lines.read_new() == [{"b": 2}]


def test_an_injection_is_counted_as_what_was_noticed_of_its_rank() -> None:
    injection = Injection(number=1, kind="kill", rank=1, pid=7, step=5, time=5.5, wall=1_000_000.0)

    def incident(rank: int | None, seconds: float, reason: str) -> dict[str, object]:
        when = datetime.fromtimestamp(1_000_000.0 + seconds, UTC).isoformat()
        return {"rank": rank, "detectedTime": when, "cause": "Infrastructure", "reason": reason}

    incidents = [incident(1, -9.0, "Earlier"), incident(0, 0.1, "PeerLost"), incident(1, 0.2, "RankKilled")]
    cost = Cost.of(injection, [*STEADY, mark(9.0, 6, began=8.5)], incidents)
    assert (cost.next_step, cost.lost, cost.counted_as) == (3.5, 0, "Infrastructure/RankKilled")
    text = summary([cost], seed=7, uses_holdfast=True)
    assert "3.50 s" in text
    assert "1 fault, 0 steps lost; --seed 7" in text
