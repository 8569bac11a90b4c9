"""When a notice ended in an agreed commit, and what is said when it did not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast_testbed.drill.departure import Departure, complaints, exit_code
from holdfast_testbed.drill.job_view import AttemptId
from holdfast_testbed.drill.script_log import Note

WORLD, NEXT = AttemptId(generation=3, attempt=1), AttemptId(generation=3, attempt=2)
GOOD = Departure(
    noticed=100.0,
    deadline=130.0,
    touched=101.0,
    answered=101.4,
    result="Committed",
    step=8,
    shards=3,
    exit_code=75,
)


def note(attempt_id: AttemptId, step: int, do: str = "commit") -> Note:
    return Note(at=0.0, do=do, pod="w0", attempt_id=attempt_id, step=step)


TOLD = [note(WORLD, 7), note(WORLD, 8), note(WORLD, 9, do="take"), note(NEXT, 9)]


def test_a_complete_checkpoint_in_time_is_agreed() -> None:
    assert complaints(GOOD, WORLD, 3, TOLD) == ()


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (replace(GOOD, touched=None), "never reached"),
        (replace(GOOD, answered=None, result=""), "not acknowledged: no answer"),
        (replace(GOOD, result="Failed"), "not acknowledged: Failed"),
        (replace(GOOD, answered=130.5), "0.5 s after the deadline"),
        (replace(GOOD, shards=2), "2 of 3 ranks"),
        (replace(GOOD, exit_code=137), "ended with 137"),
        (replace(GOOD, exit_code=None), "ended with None"),
    ],
)
def test_what_lacks_is_named(seen: Departure, words: str) -> None:
    assert any(words in complaint for complaint in complaints(seen, WORLD, 3, TOLD))


def test_a_step_after_the_commit_is_no_agreement() -> None:
    [complaint] = complaints(GOOD, WORLD, 3, [*TOLD, note(WORLD, 9)])
    assert complaint == "the attempt's last step is 9, its checkpoint is of step 8"


def pod(**state: object) -> dict[str, object]:
    sidecar = {"name": "proxy", "state": {"terminated": {"exitCode": 1}}}
    return {"status": {"containerStatuses": [sidecar, {"name": "trainer", "state": state}]}}


def test_the_trainer_s_end_is_told_apart_from_other_containers() -> None:
    assert exit_code(pod(terminated={"exitCode": 75})) == 75
    assert exit_code(pod(running={})) is None
    assert exit_code({"status": {}}) is None
