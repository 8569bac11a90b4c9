"""How often a job is looked at that nothing has woken."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from sim import Sim

from holdfast_operator.decision.decide import decide


@pytest.mark.parametrize(("jobs", "seconds"), [(1, 5), (250, 5), (1000, 20), (3000, 60)])
def test_with_many_jobs_each_is_looked_at_less_often(trained: Sim, jobs: int, seconds: float) -> None:
    trained.run(10)
    assert decide(replace(trained.observe(), jobs=jobs), trained.now).requeue_after == seconds


def test_with_many_jobs_progress_is_written_less_often(trained: Sim) -> None:
    trained.run(10)
    written = trained.status.progress
    trained.step += 100
    trained.report()
    soon, later = (written.time + timedelta(seconds=seconds) for seconds in (19, 20))
    seen = replace(trained.observe(), jobs=1000)
    assert decide(seen, soon).status.progress.step == written.step
    assert decide(seen, later).status.progress.step == trained.step


def test_what_is_due_is_done_in_time_however_many_there_are(trained: Sim) -> None:
    trained.run(10)
    active = (trained.now - trained.status.start_time).total_seconds()
    trained.body["spec"]["activeDeadlineSeconds"] = int(active) + 3
    plan = decide(replace(trained.observe(), jobs=3000), trained.now)
    assert plan.requeue_after == 3 - active % 1
