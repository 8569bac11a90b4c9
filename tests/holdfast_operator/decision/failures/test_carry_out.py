"""Which worker's message explains the end of a job."""

from __future__ import annotations

from holdfast_operator.api.status import Worker
from holdfast_operator.decision.failures.carry_out import most_detailed


def test_traceback_explains_more_than_a_longer_message() -> None:
    short = Worker(incarnation=0, batch=0, message="exit code 1")
    long = Worker(incarnation=1, batch=0, message="exit code 1: lost its peers")
    traced = Worker(incarnation=2, batch=0, message="ValueError", traceback=True)
    assert most_detailed([short, long, traced]) is traced
    assert most_detailed([short, long]) is long
    assert most_detailed([]) is None
