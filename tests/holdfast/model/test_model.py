"""Membership, claims and completion as pure transitions: no order of faults breaks them, and training resumes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from machine import InSteps, Job
from simulated_cluster import ViolationError
from simulation import Simulation

from holdfast.checkpoint.policy import fencing
from holdfast.launcher.membership.quorum import WeakenedQuorum
from holdfast.launcher.membership.state import Phase

BOUNDED = settings(
    derandomize=True,
    max_examples=400,
    stateful_step_count=40,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def test_no_order_of_faults_breaks_safety_and_training_resumes() -> None:
    run_state_machine_as_test(Job, settings=BOUNDED)  # type: ignore[no-untyped-call]


def test_nor_does_any_where_workers_train_in_steps_of_two() -> None:
    run_state_machine_as_test(InSteps, settings=settings(BOUNDED, max_examples=150))  # type: ignore[no-untyped-call]


# Each rule is needed: without it, and with the same faults, the model finds a violation.


def split(**weakened: Any) -> Simulation:
    """w2 is lost, and w3 replaces it in generation 2. Before w1 receives it, w1 is cut off together with w2."""
    sim = Simulation(3, replace_lost=False, **weakened)
    assert sim.run(20, lambda: sim.trains_with("w0", "w1", "w2"))
    sim.freeze("w2")
    assert sim.run(10, lambda: sim.trains_with("w0", "w1"))
    sim.run(3)
    sim.cut_from_operator |= {"w1", "w2"}
    sim.new_pod()
    assert sim.run(2, lambda: sim.status is not None and sim.status.generation == 2)
    sim.thaw("w2")
    sim.cut(["w0", "w3"], ["w1", "w2"])
    sim.run(30)
    return sim


def test_the_rules_keep_the_two_sides_of_a_growth_apart() -> None:
    sim = split()
    assert sim.trains_with("w1", "w2")
    assert sim.pods["w0"].state.phase is Phase.AWAITING_FENCE
    assert "w1, w2 of generation 1 may still train" in sim.pods["w0"].state.message


def test_without_rule_c_both_sides_train() -> None:
    with pytest.raises(ViolationError, match="two worlds at once"):
        split(weakened=WeakenedQuorum(older_generations=True))


def halves(**weakened: Any) -> Simulation:
    """Four workers train, and are partitioned into two and two."""
    sim = Simulation(4, replace_lost=False, **weakened)
    assert sim.run(20, lambda: sim.trains_with("w0", "w1", "w2", "w3"))
    sim.operator_up = False
    sim.cut(["w0", "w1"], ["w2", "w3"])
    sim.run(20)
    return sim


def test_no_half_trains_without_the_other() -> None:
    assert halves().training_now() is None


def test_without_the_majority_both_halves_train() -> None:
    with pytest.raises(ViolationError, match=r"one attempt ID|two worlds"):
        halves(weakened=WeakenedQuorum(majority=True))


def late_write(**weakened: Any) -> Simulation:
    """A save is in progress when its world ends. It is published after the successor has resumed from an older
    checkpoint."""
    sim = Simulation(3, replace_lost=False, keeps=False, **weakened)
    assert sim.run(
        20, lambda: (t := sim.training_now()) is not None and len(t.steps) == 4 and t.in_flight is not None
    )
    doomed = sim.training_now()
    assert doomed is not None
    sim.crash("w0")
    assert sim.run(20, lambda: sim.trains_with("w1", "w2") and sim.committed() >= 4)
    sim.land(doomed)
    return sim


def test_what_a_zombie_writes_late_is_never_read() -> None:
    sim = late_write()
    late = sim.commits[-1].commit
    verdict = fencing.readable(late, sim.claims.values(), job_uid=sim.job)
    assert not verdict.ok
    assert "fenced by claim 1.2" in verdict.reason


def test_without_claims_the_zombies_commit_is_readable() -> None:
    with pytest.raises(ViolationError, match=r"two lines can be read|zombie"):
        late_write(ignore_claims=True)


def kill_a_rank(sim: Simulation) -> tuple[str, ...]:
    sim.kill_rank("w1")
    return "w0", "w1", "w2"


def lose_a_pod(sim: Simulation) -> tuple[str, ...]:
    sim.crash("w1")
    return "w0", "w2"


def restart_a_launcher(sim: Simulation) -> tuple[str, ...]:
    sim.restart("w1")
    return "w0", "w1", "w2"


def cut_a_pod_off_and_back(sim: Simulation) -> tuple[str, ...]:
    sim.cut(["w1"], ["w0", "w2"])
    assert sim.run(20, lambda: sim.trains_with("w0", "w2"))
    sim.heal()
    return "w0", "w1", "w2"


@pytest.mark.parametrize("fault", [kill_a_rank, lose_a_pod, restart_a_launcher, cut_a_pod_off_and_back])
def test_one_fault_costs_no_claim(fault: Callable[[Simulation], tuple[str, ...]]) -> None:
    sim = Simulation(3, replace_lost=False)
    assert sim.run(20, lambda: sim.trains_with("w0", "w1", "w2"))
    sim.operator_up = False
    claims = dict(sim.claims)
    left = fault(sim)
    assert sim.run(20, lambda: sim.trains_with(*left) and sim.trainings[-1].world.attempt_id.attempt > 1)
    assert sim.claims == claims


def dead_majority(**weakened: Any) -> Simulation:
    """w0 is cut off, and the others continue. Their ranks die or freeze during a save, and w0 returns."""
    sim = Simulation(4, replace_lost=False, **weakened)
    assert sim.run(20, lambda: sim.trains_with("w0", "w1", "w2", "w3"))
    sim.operator_up = False
    sim.cut(["w0"], ["w1", "w2", "w3"])
    assert sim.run(
        20, lambda: sim.trains_with("w1", "w2", "w3") and (t := sim.training_now()) is not None and bool(t.in_flight)
    )
    doomed = sim.training_now()
    assert doomed is not None
    sim.freeze("w3")
    sim.kill_rank("w1")
    sim.kill_rank("w2")
    sim.heal()
    sim.freeze("w3")
    assert sim.run(20, lambda: sim.trains_with("w0", "w1", "w2") and sim.committed() > 0)
    sim.land(doomed)
    return sim


def test_who_goes_on_from_below_a_dead_majority_claims_anew() -> None:
    sim = dead_majority()
    doomed = sim.commits[-1].commit
    assert "fenced by claim" in fencing.readable(doomed, sim.claims.values(), job_uid=sim.job).reason


def test_old_claim_would_read_the_checkpoint_of_a_dead_majority(monkeypatch: pytest.MonkeyPatch) -> None:
    inherits = fencing.inherits
    monkeypatch.setattr(
        fencing, "inherits", lambda attempt_id, **told: inherits(attempt_id, **{**told, "trained": []})
    )
    with pytest.raises(ViolationError, match="two lines can be read"):
        dead_majority()
