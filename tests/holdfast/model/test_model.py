"""Membership, claims and completion as pure transitions: no order of faults breaks them, and training resumes."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from machine import Job

BOUNDED = settings(
    derandomize=True,
    max_examples=300,
    stateful_step_count=40,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def test_no_order_of_faults_breaks_safety_and_training_resumes() -> None:
    run_state_machine_as_test(Job, settings=BOUNDED)  # type: ignore[no-untyped-call]
