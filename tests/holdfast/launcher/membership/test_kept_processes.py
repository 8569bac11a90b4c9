"""Rank processes that outlive attempts keep their state."""

from __future__ import annotations

from dataclasses import replace

from simulation import Simulation

from holdfast.core.attempt import AttemptId
from holdfast.launcher.membership import events
from holdfast.launcher.membership.held_shards import HeldShards
from holdfast.launcher.membership.state import Phase


def training(replicas: int = 3, **settings: object) -> Simulation:
    """A job whose workers are all training and have saved a checkpoint."""
    sim = Simulation(replicas, **settings)  # type: ignore[arg-type]
    names = [f"w{number}" for number in range(replicas)]
    assert sim.run(20, lambda: sim.trains_with(*names) and sim.committed() >= 2)
    return sim


def holding(sim: Simulation, *shards: str) -> None:
    """Let each worker report the shards of its ranks, one digit per shard."""
    count = len(set("".join(shards)))
    for number, numbers in enumerate(shards):
        held = HeldShards(
            attempt_id=sim.trainings[-1].world.attempt_id, count=count, shards=frozenset(map(int, numbers))
        )
        sim.pods[f"w{number}"].local.append(events.Holds(held=held if numbers else None))
    sim.run(2)


def _size(sim: Simulation) -> int:
    now = sim.training_now()
    return 0 if now is None else len(now.world.uids)


# Processes that outlive attempts


def test_a_killed_rank_costs_no_step_and_writes_no_claim() -> None:
    sim = training()
    before = sim.training_now()
    assert before is not None
    assert sim.run(5, lambda: len(before.steps) > before.saved)
    sim.kill_rank("w1")
    assert sim.run(
        5, lambda: (t := sim.training_now()) is not None and t.world.attempt_id == AttemptId(1, 2) and t.made
    )
    after = sim.training_now()
    assert after is not None
    assert after.base == before.steps
    assert set(sim.claims) == {AttemptId(1, 1)}


def test_prepared_step_is_applied_if_all_survivors_prepared_it() -> None:
    sim = training()
    before = sim.training_now()
    assert before is not None
    made = before.steps
    for uid in ("w0", "w1", "w2"):
        sim.prepare(before, uid)
    sim.kill_rank("w1")
    assert sim.run(5, lambda: (t := sim.training_now()) is not None and t.world.attempt_id == AttemptId(1, 2))
    assert sim.training_now().base == (*made, AttemptId(1, 1))  # type: ignore[union-attr]


def test_step_that_a_survivor_did_not_prepare_is_discarded() -> None:
    sim = training()
    before = sim.training_now()
    assert before is not None
    made = before.steps
    for uid in ("w0", "w1"):
        sim.prepare(before, uid)
    sim.kill_rank("w1")
    assert sim.run(5, lambda: (t := sim.training_now()) is not None and t.world.attempt_id == AttemptId(1, 2))
    assert sim.training_now().base == made  # type: ignore[union-attr]


def test_who_hangs_is_replaced_and_takes_the_state_over() -> None:
    sim = training()
    before = sim.training_now()
    assert before is not None
    sim.hang("w2")
    sim.kill_rank("w1")
    assert sim.run(
        5, lambda: (t := sim.training_now()) is not None and t.world.attempt_id == AttemptId(1, 2) and t.made
    )
    after = sim.training_now()
    assert after is not None
    assert after.base == before.steps
    assert len({sim.pods[uid].process.line for uid in ("w0", "w1", "w2")}) == 1  # type: ignore[union-attr]


def test_growth_waits_until_the_newcomer_is_prepared() -> None:
    sim = training()
    sim.crash("w2")
    assert sim.run(5, lambda: sim.trains_with("w0", "w1"))
    sim.prove(sim.pods["w2"])
    sim.replenish()
    newcomer = sim.pods["w3"]
    sim.feed(newcomer, events.Prepared(prepared=False))
    assert not sim.run(10, lambda: sim.trains_with("w0", "w1", "w3"))
    assert sim.trains_with("w0", "w1")
    phases = {name: sim.pods[name].state.phase for name in ("w0", "w1", "w3")}
    assert phases == {"w0": Phase.RUNNING, "w1": Phase.RUNNING, "w3": Phase.WAITING}
    sim.feed(newcomer, events.Prepared(prepared=True))
    assert sim.run(10, lambda: sim.trains_with("w0", "w1", "w3"))


def test_accepted_world_may_start_before_its_members_try_another() -> None:
    sim = training()
    sim.crash("w2")
    assert sim.run(5, lambda: sim.trains_with("w0", "w1"))
    sim.prove(sim.pods["w2"])
    sim.replenish()
    first, newcomer = sim.pods["w0"], sim.pods["w3"]
    assert sim.run(5, lambda: "w3" in first.state.peers)
    muted = replace(first.state.peers["w3"], muted_until=sim.now + 1000)  # as if it had not accepted in time
    first.state = replace(first.state, peers={**first.state.peers, "w3": muted})
    assert sim.run(90, lambda: newcomer.state.proposal is not None), "it steps in, as nobody takes it in"
    sim.withheld = {("w3", "start"), ("w3", "hello")}
    proposed = newcomer.state.proposal
    assert proposed is not None
    assert sim.run(5, lambda: newcomer.state.started == proposed.world.attempt_id)
    assert not sim.run(1, lambda: first.state.accepted != proposed.world.attempt_id)
    sim.withheld = set()
    assert sim.run(5, lambda: sim.trains_with("w0", "w1", "w3"))
    assert sim.run(3) is False
    assert {(i.attempt_id, i.failure.pod) for pod in sim.alive() for i in pod.state.incidents} == {
        (AttemptId(1, 1), "w2")
    }


def test_coordinator_lost_before_start_is_not_waited_for() -> None:
    sim = training()
    sim.withheld = {("w0", "start"), ("w0", "hello")}
    sim.kill_rank("w1")
    assert sim.run(5, lambda: sim.pods["w0"].state.started == AttemptId(1, 2))
    sim.crash("w0")
    sim.withheld = set()
    assert sim.run(4, lambda: sim.trains_with("w1", "w2"))


def test_last_holder_of_a_shard_stays_after_two_losses() -> None:
    sim = training(9, replica_step=3)
    holding(sim, *"012012012")
    sim.operator_up = False
    sim.crash("w2")
    sim.crash("w5")
    assert sim.run(10, lambda: sim.trains_with("w0", "w1", "w3", "w4", "w6", "w8"))


def test_one_of_two_replicas_continues_whichever_worker_is_lost() -> None:
    """Both continue when a replacement is there."""
    for lost in ("w0", "w1", "w2", "w3"):
        sim = training(4, min_replicas=2, replica_step=2)
        holding(sim, *"0101")
        sim.crash(lost)
        others = [name for name in ("w0", "w1", "w2", "w3") if name != lost]
        assert sim.run(10, lambda sim=sim: _size(sim) == 2), sim.show()
        world = sim.trainings[-1].world
        assert {int(uid[1]) % 2 for uid in world.uids} == {0, 1}, "a replica has both shards"
        sim.replenish()
        assert sim.run(20, lambda sim=sim, others=others: sim.trains_with(*others, "w4")), sim.show()
        assert sim.trainings[-1].world.uids > world.uids


def test_without_a_word_on_shards_the_lowest_indexes_train() -> None:
    sim = training(9, replica_step=3)
    sim.operator_up = False
    sim.crash("w2")
    sim.crash("w5")
    assert sim.run(10, lambda: sim.trains_with("w0", "w1", "w3", "w4", "w6", "w7"))


def test_lowest_index_without_a_shard_does_not_block_a_world() -> None:
    """The chosen world leaves the lowest index out."""
    sim = training(9, replica_step=3)
    holding(sim, "", *"012345", "", "")
    sim.operator_up = False
    sim.crash("w7")
    sim.crash("w8")
    assert sim.run(10, lambda: sim.trains_with("w1", "w2", "w3", "w4", "w5", "w6"))
    assert sim.trainings[-1].world.coordinator == "w1"
