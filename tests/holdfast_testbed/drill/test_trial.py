"""A trial whose fault fails."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast_testbed.drill import trial
from holdfast_testbed.drill.job_view import AttemptId
from holdfast_testbed.drill.matrix import Case


def test_a_fault_without_its_effect_fails_the_trial_and_is_repaired(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    view = SimpleNamespace(incidents_by_cause={}, divergences=0, incidents=())
    job: Any = SimpleNamespace(watcher=SimpleNamespace(view=view), checkpoints=tmp_path, struck=[])
    monkeypatch.setattr(trial, "settle", lambda *_args, **_options: None)
    monkeypatch.setattr(trial, "_await", lambda *_args: AttemptId(generation=1, attempt=1))
    repaired: list[Any] = []

    def inflict(_job: Any) -> None:
        raise TimeoutError("after 150 s still waiting for: the slow rank")

    case = Case("rank-slow", "a slow rank", inflict, repair=repaired.append, misplaced=lambda _job: None)
    result = trial.run(case, job)
    assert not result.held(case)
    assert result.complaint == "after 150 s still waiting for: the slow rank"
    assert repaired == [job]
