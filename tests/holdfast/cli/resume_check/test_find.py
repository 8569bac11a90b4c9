"""The difference that `holdfast resume-check` finds, and the runs that it needs. Tests write their checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.folder.claims import highest_generation, write_claim
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.cli.resume_check import run
from holdfast.cli.resume_check.options import Plan
from holdfast.cli.resume_check.report import Diagnosis, Finding
from holdfast.core.attempt import AttemptId, Claim

PLAN = Plan(steps=6, timeout=1, script=())
Weight = Callable[[str, int, bool], int]
"""The weight after a step of a run, and whether the run was restarted before."""
Find = Callable[[Weight], Finding | int]


@pytest.fixture
def trained() -> list[tuple[str, int]]:
    """The runs, and the step to which each was trained."""
    return []


@pytest.fixture
def find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit: Callable[..., Any], trained: list[tuple[str, int]]
) -> Find:
    """Compare runs with one tensor that never differs, and another with this weight."""

    def look(weight: Weight) -> Finding | int:
        def train(own: run._Run, step: int) -> None:
            trained.append((own._root.name, step))
            begin, attempt_id = begin_attempt(own._folder)
            for each in range(begin + 1, step + 2):  # the script makes another step before it is stopped
                changed = bytes([weight(own._root.name, each, begin > 0)])
                commit(own._folder, each, {"fixed": b"\1", "weight": changed}, attempt_id)

        monkeypatch.setattr(run._Run, "train", train)
        return run._find(PLAN, tmp_path, {})

    return look


def begin_attempt(folder: Path) -> tuple[int, AttemptId]:
    """Claim the next attempt from the newest checkpoint. Return its step, 0 without one, and the attempt."""
    folder.mkdir(parents=True, exist_ok=True)
    attempt_id = AttemptId(highest_generation(folder) + 1, 1)
    newest = max(FolderStore(folder).commits(), default=None, key=lambda name: name.step)
    step, before = (0, None) if newest is None else (newest.step, newest.attempt_id)
    write_claim(
        folder,
        Claim(attempt_id=attempt_id, job_uid="job-1", publication="p1", from_step=step, from_attempt_id=before),
    )
    return step, attempt_id


def test_equal_runs_need_no_third_one(find: Find, trained: list[tuple[str, int]]) -> None:
    assert find(lambda _name, step, _restarted: step) == 2, "tensors"
    assert trained == [("whole", 6), ("restarted", 3), ("restarted", 6)]


@pytest.mark.parametrize("first", [1, 3])
def test_difference_before_the_restart_needs_none(find: Find, trained: list[tuple[str, int]], first: int) -> None:
    found = find(lambda name, step, _restarted: step + 5 * (name == "restarted" and step >= first))
    assert isinstance(found, Finding)
    assert (found.diagnosis, found.step, found.largest) == (Diagnosis.NOT_DETERMINISTIC, first, 5.0)
    assert (found.difference.changed, found.difference.same) == (("weight",), 1)
    assert trained == [("whole", 6), ("restarted", 3)]


def test_difference_that_only_a_restart_causes_is_of_the_restart(find: Find, trained: list[tuple[str, int]]) -> None:
    found = find(lambda _name, step, restarted: step + 7 * restarted)
    assert isinstance(found, Finding)
    assert (found.diagnosis, found.step, found.largest) == (Diagnosis.NOT_RESUMED, 4, 7.0)
    assert found.difference.changed == ("weight",)
    assert trained[2:] == [("restarted", 6), ("again", 4)]


@pytest.mark.parametrize("again", [5, 6])
def test_difference_that_occurs_without_a_restart_too_is_of_the_script(find: Find, again: int) -> None:
    first = {"whole": 9, "restarted": 6, "again": again}
    found = find(lambda name, step, _restarted: step + 2 * (step >= first[name]))
    assert isinstance(found, Finding)
    assert (found.diagnosis, found.step, found.largest) == (Diagnosis.NOT_DETERMINISTIC, again, 2.0)
