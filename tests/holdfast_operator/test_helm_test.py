"""The job of `helm test`: what is told of it, and that it is always deleted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from holdfast_operator.helm_test import run, verdict


class Played:
    """A job whose story is a list of statuses, one for each look."""

    def __init__(self, *story: Any, left_over: int = 0) -> None:
        self.story = list(story)
        self.left_over = left_over
        self.calls: list[str] = []
        self.time = 0.0
        self.said: list[str] = []

    def create(self, body: Mapping[str, Any]) -> None:
        self.calls.append("create")

    def delete(self) -> None:
        self.calls.append("delete")

    def read(self) -> Mapping[str, Any] | None:
        if "create" not in self.calls:
            self.left_over -= 1
            return {} if self.left_over >= 0 else None
        return {"status": self.story.pop(0) if len(self.story) > 1 else self.story[0]}

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def ends_well(self) -> bool:
        return run(self, {}, 60, clock=lambda: self.time, sleep=self.sleep, say=self.said.append)


def status(word: str, *conditions: str, message: str = "") -> dict[str, Any]:
    return {"status": word, "conditions": [{"type": c, "status": "True", "message": message} for c in conditions]}


def test_a_job_that_completes_is_told_step_by_step_and_deleted() -> None:
    job = Played({}, status("Starting"), status("Starting"), status("Training", "Ready", message="2 train"),
                 status("Completed", "Complete", message="all is done"))  # fmt: skip
    assert job.ends_well()
    assert job.said == ["not seen by the operator yet", "Starting", "Training: 2 train", "Complete: all is done"]
    assert job.calls == ["delete", "create", "delete"]


def test_a_job_that_fails_says_why() -> None:
    job = Played(status("BudgetExceeded", "Failed", message="python: not found"))
    assert not job.ends_well()
    assert job.said == ["Failed: python: not found"]
    assert job.calls[-1] == "delete"


def test_a_job_that_goes_nowhere_is_given_up() -> None:
    job = Played(status("Pending", "Degraded", message="no node has room"))
    assert not job.ends_well()
    assert job.said == ["Pending: no node has room", "not complete after 60 s"]
    assert job.calls[-1] == "delete"


def test_what_an_earlier_test_left_is_waited_for() -> None:
    job = Played(status("x", "Complete"), left_over=3)
    assert job.ends_well()
    assert job.time == 3


def test_an_error_on_the_way_deletes_the_job_as_well() -> None:
    job = Played(None)
    job.story = []
    with pytest.raises(IndexError):
        job.ends_well()
    assert job.calls[-1] == "delete"


def test_a_condition_that_is_not_true_decides_nothing() -> None:
    assert verdict({"status": {"status": "x", "conditions": [{"type": "Failed", "status": "False"}]}}) == (None, "x")
