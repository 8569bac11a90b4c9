"""A job has failed when a budget of restarts is spent."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim import Sim

from holdfast_operator.api.reasons import Cause
from holdfast_operator.api.status import IncidentCount

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


@given(st.lists(st.integers(0, 10**6), max_size=20), st.integers(1, 10**6), st.integers(0, 10**6))
def test_a_longer_window_never_counts_less(ages: list[int], window: int, more: int) -> None:
    count = IncidentCount(cause=Cause.OOM, times=tuple(sorted(NOW - timedelta(seconds=age) for age in ages)))
    inner, outer = count.within(NOW, window), count.within(NOW, window + more)
    assert set(inner) <= set(outer)
    assert len(count.within(NOW + timedelta(seconds=more), window)) <= len(inner)


@pytest.mark.parametrize("budget", [999, 1000, 10_000])
def test_a_budget_of_any_size_ends_the_job_when_it_is_spent(trained: Sim, budget: int) -> None:
    trained.body["spec"]["recovery"] = {"budgets": [{"cause": "Infrastructure", "maxRestarts": budget}]}
    spent = IncidentCount(cause=Cause.INFRASTRUCTURE, times=(trained.now,) * budget, total=budget)
    trained.body["status"]["incidentsByCause"] = [spent.to_json()]
    trained.run(10)
    assert not trained.status.terminal
    trained.end("gpt-w1", 137)
    trained.run(60, until=lambda: trained.status.summary == "InfrastructureBudgetExceeded")
