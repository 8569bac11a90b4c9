"""The cost of a fault follows from the trace of steps alone."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from holdfast.cli.chaos.report import costs, summary
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


def test_steps_made_again_after_later_steps_are_lost() -> None:
    later = [mark(6.0 + step, step) for step in (6, 7, 4, 5, 6, 7, 8, 6)]
    assert lost_steps([*STEADY, *later], 5.05) == 4 + 3


def test_a_fall_of_the_step_belongs_to_the_fault_before_it() -> None:
    marks = [*STEADY, mark(9.0, 3, began=8.5), mark(10.0, 4), mark(11.0, 5), mark(19.0, 5, began=18.5)]
    assert lost_steps(marks, 5.5, 12.0) == 3
    assert lost_steps(marks, 12.0) == 1


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


def injected(rank: int, time: float, step: int) -> Injection:
    return Injection(number=1, kind="kill", rank=rank, pid=7, step=step, time=time, wall=1_000_000.0 + time)


def incident(rank: int | None, time: float, reason: str) -> dict[str, object]:
    when = datetime.fromtimestamp(1_000_000.0 + time, UTC).isoformat()
    return {"rank": rank, "detectedTime": when, "cause": "Infrastructure", "reason": reason}


def test_an_injection_is_counted_as_what_was_noticed_of_its_rank() -> None:
    incidents = [incident(1, -3.5, "Earlier"), incident(0, 5.6, "PeerLost"), incident(1, 5.7, "RankKilled")]
    (cost,) = costs([injected(1, 5.5, 5)], [*STEADY, mark(9.0, 6, began=8.5)], incidents)
    assert (cost.next_step, cost.lost, cost.counted_as) == (3.5, 0, "Infrastructure/RankKilled")
    text = summary([cost], seed=7, uses_holdfast=True)
    assert "3.50 s" in text
    assert "1 fault, 0 steps lost; --seed 7" in text


def test_incidents_and_steps_after_the_next_injection_belong_to_that_one() -> None:
    first, second, last = injected(1, 2.5, 2), injected(0, 5.5, 5), injected(1, 20.0, 5)
    marks = [*STEADY, mark(9.0, 3, began=8.5), mark(10.0, 4), mark(11.0, 5)]
    found = costs([second, last, first], marks, [incident(1, 5.6, "RankKilled")])
    assert [(cost.injection, cost.lost, cost.counted_as) for cost in found] == [
        (first, 0, ""),
        (second, 3, "Infrastructure/RankKilled"),
        (last, 0, ""),
    ]
