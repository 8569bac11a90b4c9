"""Named cases of membership: what happens, who trains, what is counted. Played with the production transitions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from simulation import Pod, Simulation, Stored

from holdfast.checkpoint.policy import fencing
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.protocol import Cause
from holdfast.launcher.hang.stall_reports import Stall
from holdfast.launcher.membership import events
from holdfast.launcher.membership.document import Budget, Membership
from holdfast.launcher.membership.held_shards import HeldShards
from holdfast.launcher.membership.messages import Failure, Priority
from holdfast.launcher.membership.state import Phase
from holdfast.launcher.options import RunOptions
from holdfast.launcher.rendezvous.roster import Joined, Record, Roster, RunRequest
from holdfast.telemetry.activity import Activity
from holdfast_operator.api.reasons import MembershipReason
from holdfast_operator.decision.membership.candidates import Wait


def training(replicas: int = 3, **settings: object) -> Simulation:
    """A job whose workers all train and have committed something."""
    sim = Simulation(replicas, **settings)  # type: ignore[arg-type]
    names = [f"w{number}" for number in range(replicas)]
    assert sim.run(20, lambda: sim.trains_with(*names) and sim.committed() >= 2)
    return sim


def incident(pod: Pod, pair: AttemptId) -> Cause:
    return next(i.failure.cause for i in pod.state.incidents if i.pair == pair)


def test_three_shrink_to_two_without_the_operator_and_grow_back_with_it() -> None:
    sim = training()
    sim.operator_up = False
    sim.crash("w2")
    assert sim.run(5, lambda: sim.trains_with("w0", "w1"))
    assert sim.status is not None
    assert sim.status.generation == 1

    sim.operator_up = True
    sim.prove(sim.pods["w2"])
    sim.replenish()
    assert sim.run(20, lambda: sim.trains_with("w0", "w1", "w3"))
    assert sim.status.generation == 2
    assert [member.pod_uid for member in sim.status.members] == ["w0", "w1", "w3"]


def test_survivors_wait_for_a_replacement_before_they_shrink_if_they_are_told_to() -> None:
    sim = training(shrink_after=10.0, replace_lost=False)
    sim.crash("w2")
    assert not sim.run(8, lambda: sim.trains_with("w0", "w1"))
    assert sim.run(10, lambda: sim.trains_with("w0", "w1"))
    sim.kill_rank("w1")
    before = sim.trainings[-1].world.pair
    assert sim.run(6, lambda: sim.trains_with("w0", "w1") and sim.trainings[-1].world.pair > before), (
        "nobody is missed"
    )


def test_a_replacement_that_comes_in_time_spares_the_shrink() -> None:
    sim = training(shrink_after=30.0)
    sim.crash("w2")
    sim.prove(sim.pods["w2"])
    sim.replenish()
    assert sim.run(25, lambda: sim.trains_with("w0", "w1", "w3"))
    assert not [t for t in sim.trainings if {member.pod_uid for member in t.world.members} == {"w0", "w1"}]


def test_the_wait_ends_though_the_lowest_index_is_the_lost_one() -> None:
    sim = training(shrink_after=5.0, replace_lost=False)
    sim.crash("w0")
    assert not sim.run(3, lambda: sim.trains_with("w1", "w2"))
    assert sim.run(10, lambda: sim.trains_with("w1", "w2"))


def test_the_wait_for_a_replacement_ends_though_a_member_that_never_accepts_is_asked_again_meanwhile() -> None:
    sim = training(shrink_after=10.0)
    sim.deaf = {"w2"}
    sim.kill_rank("w1")
    assert not sim.run(9, lambda: sim.trains_with("w0", "w1"))
    assert sim.run(15, lambda: sim.trains_with("w0", "w1"))


def test_growth_loses_no_step() -> None:
    sim = training()
    sim.crash("w2")
    assert sim.run(5, lambda: sim.trains_with("w0", "w1"))
    sim.prove(sim.pods["w2"])
    sim.replenish()
    before = sim.training_now()
    assert before is not None
    assert sim.run(20, lambda: sim.trains_with("w0", "w1", "w3"))
    after = sim.training_now()
    assert after is not None
    assert after.base == before.steps


def test_nobody_is_taken_in_before_a_checkpoint_has_ended() -> None:
    sim = training()
    sim.crash("w2")
    assert sim.run(5, lambda: sim.trains_with("w0", "w1"))
    for uid in ("w0", "w1"):
        sim.feed(sim.pods[uid], events.Saves(saving=True))
    sim.prove(sim.pods["w2"])
    sim.replenish()
    assert not sim.run(60, lambda: not sim.trains_with("w0", "w1"))

    for uid in ("w0", "w1"):
        sim.feed(sim.pods[uid], events.Saves(saving=False))
    assert sim.run(10, lambda: sim.trains_with("w0", "w1", "w3"))


def test_nobody_stops_for_a_newcomer_before_all_have_heard_of_its_generation() -> None:
    sim = training()
    sim.crash("w2")
    assert sim.run(5, lambda: sim.trains_with("w0", "w1"))
    sim.prove(sim.pods["w2"])
    sim.cut_from_operator |= {"w1"}
    sim.withheld |= {("w0", "share"), ("w3", "share")}
    sim.replenish()

    before = sim.committed()
    assert not sim.run(5, lambda: not sim.trains_with("w0", "w1"))
    assert sim.committed() > before

    sim.withheld.clear()
    assert sim.run(20, lambda: sim.trains_with("w0", "w1", "w3")), "the others tell them"
    for uid in ("w0", "w1"):
        assert [i.pair for i in sim.pods[uid].state.incidents] == [AttemptId(1, 1)]


def test_a_lost_pod_is_one_incident_on_every_launcher() -> None:
    sim = training()
    sim.crash("w2")
    assert sim.run(5, lambda: sim.trains_with("w0", "w1"))
    assert sim.run(3) is False
    for uid in ("w0", "w1"):
        incidents = sim.pods[uid].state.incidents
        assert [i.pair for i in incidents] == [AttemptId(1, 1)]
        assert incidents[0].failure.cause is Cause.INFRASTRUCTURE
        assert incidents[0].failure.pod == "w2"
        assert incidents[0].action == "Shrink"
        assert incidents[0].resumed is not None
        assert incidents[0].lost_steps is not None


def test_nobody_claims_that_nothing_is_lost_where_no_incident_tells_how_far_the_attempt_before_came() -> None:
    sim = Simulation(1)
    here = sim.pods["w0"]
    assert sim.run(20, lambda: here.state.attempt is not None)
    sim.kill_rank("w0")
    assert sim.run(20, lambda: bool(here.state.incidents) and here.state.incidents[0].resumed is not None)
    assert [(known.failure.step, known.lost_steps) for known in here.state.incidents] == [(None, None)]


def test_an_attempt_that_ends_before_its_first_step_lost_none_beside_the_one_before() -> None:
    sim = training(replace_lost=False)
    sim.kill_rank("w2")
    here = sim.pods["w0"]
    assert sim.run(10, lambda: here.state.attempt is not None and here.state.attempt.world.pair == AttemptId(1, 2))
    assert here.state.attempt is not None
    assert here.state.attempt.step is None
    sim.crash("w2")
    assert sim.run(20, lambda: sim.trains_with("w0", "w1") and (t := sim.training_now()) is not None and t.made)
    assert sim.run(5, lambda: all(known.resumed is not None for known in here.state.incidents))
    assert [(known.pair, known.lost_steps) for known in here.state.incidents] == [
        (AttemptId(1, 1), 0),
        (AttemptId(1, 2), 0),
    ]


def test_a_killed_rank_restarts_in_place_in_the_same_generation() -> None:
    sim = training()
    sim.kill_rank("w1")
    assert sim.run(5, lambda: (t := sim.training_now()) is not None and t.world.pair == AttemptId(1, 2))
    assert sim.trains_with("w0", "w1", "w2") or sim.run(5, lambda: sim.trains_with("w0", "w1", "w2"))
    assert {pod.state.incidents[0].action for pod in sim.alive()} == {"InPlace"}


def test_ranks_that_stopped_for_a_claim_that_is_known_by_now_are_ended_and_the_job_goes_on() -> None:
    sim = training()
    before = sim.training_now()
    pod = sim.pods["w0"]
    assert before is not None
    assert pod.state.membership is not None
    claim = Claim(pair=AttemptId(1, 7), job_uid="older", publication="p", from_step=0)
    pod.state = replace(pod.state, membership=replace(pod.state.membership, claims=(claim,)))
    sim.feed(pod, events.ForeignClaims(pair=before.world.pair, claims=(claim,)))
    assert pod.state.attempt is None
    assert pod.state.foreign == ()
    assert sim.run(20, lambda: (t := sim.training_now()) is not None and t.world.pair > before.world.pair)


def test_the_root_cause_is_the_exception_and_not_the_peers_that_miss_it() -> None:
    sim = training()
    for uid in ("w0", "w2"):
        sim.kill_rank(uid, Cause.INFRASTRUCTURE, Priority.PEER_LOST)
    sim.kill_rank("w1", Cause.APPLICATION, Priority.EXCEPTION)
    assert sim.run(10, lambda: (t := sim.training_now()) is not None and t.world.pair == AttemptId(1, 2))
    assert {incident(pod, AttemptId(1, 1)) for pod in sim.alive()} == {Cause.APPLICATION}


def test_what_a_launcher_says_of_its_stalled_ranks_reaches_the_others_at_once_and_is_taken_back() -> None:
    sim = training()
    stall = Stall(
        pair=AttemptId(1, 1), rank=1, activity=Activity.VOTE, step=9, silent=False, seconds=0.6, deadline=0.85
    )

    def heard() -> set[tuple[Stall, ...]]:
        hellos = [sim.pods[uid].state.peers["w1"].hello for uid in ("w0", "w2")]
        return {hello.stalls for hello in hellos if hello is not None}

    sim.feed(sim.pods["w1"], events.Stalled(stalls=(stall,)))
    assert sim.run(0.9, lambda: heard() == {(stall,)})
    sim.feed(sim.pods["w1"], events.Stalled(stalls=()))
    assert sim.run(0.9, lambda: heard() == {()})
    assert sim.trains_with("w0", "w1", "w2"), "nothing follows from it here"


def test_the_other_launchers_of_the_attempt_hear_of_a_hang_and_keep_their_stacks() -> None:
    sim = training()
    found = events.HangFound(pair=AttemptId(1, 1), message="rank 1 has been busy for 1.0 s")
    sim.feed(sim.pods["w1"], found)
    assert sim.run(0.9, lambda: all(sim.pods[uid].kept_stacks for uid in ("w0", "w2")))
    keep = events.KeepStacks(pair=AttemptId(1, 1), message="rank 1 has been busy for 1.0 s")
    assert [sim.pods[uid].kept_stacks for uid in ("w0", "w1", "w2")] == [[keep], [], [keep]]
    sim.feed(sim.pods["w1"], replace(found, pair=AttemptId(1, 0)))
    sim.run(0.9, lambda: False)
    assert [len(sim.pods[uid].kept_stacks) for uid in ("w0", "w2")] == [1, 1], "a hang of an attempt that is over"
    assert sim.trains_with("w0", "w1", "w2"), "nothing else follows from it"


def test_of_two_pods_one_lost_waits_for_the_operator_who_publishes_the_survivor() -> None:
    sim = training(2, replace_lost=False)
    sim.operator_up = False
    sim.crash("w1")
    assert not sim.run(5, lambda: sim.training_now() is not None)
    assert sim.pods["w0"].state.phase is Phase.WAITING
    sim.operator_up = True
    assert sim.run(10, lambda: sim.trains_with("w0"))
    assert sim.status is not None
    assert sim.status.generation == 2


def test_of_two_pods_the_survivor_takes_the_replacement() -> None:
    sim = training(2, may_shrink=False)
    sim.crash("w1")
    sim.prove(sim.pods["w1"])
    sim.replenish()
    assert sim.run(20, lambda: sim.trains_with("w0", "w2"))


def test_one_pod_is_replaced_only_when_it_is_proved_gone() -> None:
    sim = training(1)
    sim.freeze("w0")
    sim.run(5)
    sim.replenish()
    assert not sim.run(10, lambda: sim.trains_with("w1"))
    assert isinstance(sim.verdict, Wait)
    assert sim.verdict.reason is MembershipReason.AWAITING_FENCE
    assert "w0" in sim.verdict.message

    sim.crash("w0")
    sim.prove(sim.pods["w0"])
    assert sim.run(10, lambda: sim.trains_with("w1"))


def test_the_coordinator_is_lost_while_the_operator_is_away() -> None:
    sim = training()
    sim.operator_up = False
    sim.crash("w0")
    assert sim.run(5, lambda: sim.trains_with("w1", "w2"))
    assert sim.training_now().world.coordinator == "w1"  # type: ignore[union-attr]


@pytest.mark.parametrize("operator_side", ["majority", "minority"])
def test_a_partition_lets_only_the_majority_train_and_heals(operator_side: str) -> None:
    sim = training(replace_lost=False)
    sim.cut(["w0"], ["w1", "w2"])
    sim.cut_from_operator |= {"w0"} if operator_side == "majority" else {"w1", "w2"}
    assert sim.run(8, lambda: sim.trains_with("w1", "w2"))
    assert sim.pods["w0"].state.world is None

    sim.heal()
    assert sim.run(20, lambda: sim.trains_with("w0", "w1", "w2"))


def test_a_partition_with_replacements_on_the_operators_minority_side_awaits_the_fence() -> None:
    sim = training()
    sim.cut(["w0"], ["w1", "w2"])
    sim.cut_from_operator |= {"w1", "w2"}
    sim.run(6)
    sim.replenish()
    sim.cut(["w3", "w4"], ["w1", "w2"])
    sim.run(10)
    assert sim.trains_with("w1", "w2")
    assert isinstance(sim.verdict, Wait)
    assert sim.verdict.reason is MembershipReason.AWAITING_FENCE

    sim.heal()
    assert sim.run(30, lambda: sim.trains_with("w0", "w1", "w2"))


def test_a_member_that_never_accepts_is_left_out_and_comes_back_when_it_heals() -> None:
    sim = training()
    sim.deaf = {"w2"}
    sim.kill_rank("w1")
    assert sim.run(15, lambda: sim.trains_with("w0", "w1"))
    sim.deaf = set()
    assert sim.run(30, lambda: sim.trains_with("w0", "w1", "w2"))


def test_a_member_that_refuses_time_and_again_is_left_out_and_comes_back_when_it_heals() -> None:
    sim = training()
    sim.operator_up = False
    stubborn = sim.pods["w2"]
    stubborn.state = replace(stubborn.state, conflict=1)
    sim.kill_rank("w1")
    assert sim.run(15, lambda: sim.trains_with("w0", "w1"))
    stubborn.state = replace(stubborn.state, conflict=None)
    assert sim.run(30, lambda: sim.trains_with("w0", "w1", "w2"))


def test_all_pods_crash_and_their_replacements_go_on_from_the_newest_commit() -> None:
    sim = training()
    committed = sim.committed()
    for uid in ("w0", "w1", "w2"):
        sim.crash(uid)
    for uid in ("w0", "w1", "w2"):
        sim.prove(sim.pods[uid])
    sim.replenish()
    assert sim.run(20, lambda: sim.trains_with("w3", "w4", "w5"))
    assert sim.training_now().restored >= committed  # type: ignore[union-attr]


def test_the_operator_comes_back_after_all_crashed() -> None:
    sim = training()
    sim.operator_up = False
    for uid in ("w0", "w1", "w2"):
        sim.crash(uid)
    sim.run(10)
    sim.operator_up = True
    for uid in ("w0", "w1", "w2"):
        sim.prove(sim.pods[uid])
    sim.replenish()
    assert sim.run(20, lambda: sim.trains_with("w3", "w4", "w5"))


def test_an_operator_that_comes_after_the_pods_publishes_them() -> None:
    sim = Simulation(operator=False)
    assert not sim.run(10, lambda: sim.training_now() is not None)
    assert {pod.state.phase for pod in sim.alive()} == {Phase.WAITING}
    sim.operator_up = True
    assert sim.run(10, lambda: sim.trains_with("w0", "w1", "w2"))


def test_completion_is_said_when_all_are_done_and_all_exit_with_0() -> None:
    sim = training(last_step=6)
    assert sim.run(20, lambda: all(pod.exit_code == 0 for pod in sim.pods.values()))
    assert len(sim.announced) == 1


def test_a_rank_that_finishes_first_is_no_failure_and_restarts_if_another_fails_after_it() -> None:
    sim = training()
    attempt = sim.training_now()
    assert attempt is not None
    sim.feed(sim.pods["w0"], events.LocalDone(pair=attempt.world.pair))
    sim._end_ranks(sim.pods["w0"])
    attempt.finished.add("w0")
    sim.run(3)
    assert sim.pods["w0"].state.incidents == ()
    assert not sim.announced

    sim.kill_rank("w1")
    assert sim.run(10, lambda: (t := sim.training_now()) is not None and t.world.pair == AttemptId(1, 2))
    assert sim.run(5, lambda: sim.trains_with("w0", "w1", "w2"))


def test_a_rank_that_ends_early_while_others_miss_it_is_an_application_failure() -> None:
    sim = training()
    attempt = sim.training_now()
    assert attempt is not None
    sim.feed(sim.pods["w0"], events.LocalDone(pair=attempt.world.pair))
    sim._end_ranks(sim.pods["w0"])
    sim.run(1)
    sim.kill_rank("w1", Cause.INFRASTRUCTURE, Priority.PEER_LOST)
    assert sim.run(10, lambda: (t := sim.training_now()) is not None and t.world.pair == AttemptId(1, 2))
    assert incident(sim.pods["w1"], AttemptId(1, 1)) is Cause.APPLICATION


def test_a_drained_pod_leaves_with_75_after_an_agreed_commit_and_nothing_is_lost() -> None:
    sim = training(replace_lost=False)
    before = sim.training_now()
    assert before is not None
    sim.drain("w1")
    assert sim.run(15, lambda: sim.trains_with("w0", "w2"))
    assert sim.pods["w1"].exit_code == 75
    assert sim.training_now().base == before.steps  # type: ignore[union-attr]
    for uid in ("w0", "w2"):
        assert incident(sim.pods[uid], AttemptId(1, 1)) is Cause.INTERRUPTION


@pytest.mark.parametrize("by", ["w0", "w1"])
@pytest.mark.parametrize("also", ["", "w2"])
@pytest.mark.parametrize("blind", [False, True])
def test_who_must_leave_stays_for_the_next_attempt_if_another_launcher_is_taken_for_lost(
    by: str, also: str, blind: bool
) -> None:
    sim = training(4, replace_lost=False)
    for uid in filter(None, ["w1", also]):
        sim.drain(uid)
    if blind:
        gone = Failure(cause=Cause.INFRASTRUCTURE, reason="PeerLost", message="", priority=Priority.PEER_LOST)
        sim.feed(sim.pods["w1"], events.RankFailed(pair=AttemptId(1, 1), failure=gone))
    sim.miss(by, "w3")
    assert sim.run(15, lambda: sim.trains_with(*sorted({"w0", "w1", "w2", "w3"} - {"w1", also})))
    assert sim.pods["w1"].exit_code == 75
    agreed = [world for world in sim.trainings if "w1" in world.world.uids and world.quiesced and world.commit]
    assert [world.world.pair for world in agreed] == [AttemptId(1, 2)]
    assert any(stored.lineage == agreed[0].steps for stored in sim.readable())
    causes = [incident(sim.pods["w0"], pair) for pair in (AttemptId(1, 1), AttemptId(1, 2))]
    assert causes == [Cause.INFRASTRUCTURE, Cause.INTERRUPTION]


def asked(until: float, cause: Cause | None = Cause.INTERRUPTION) -> events.DrainAsked:
    return events.DrainAsked(id="spot", reason="the machine goes", until=until, cause=cause)


@pytest.mark.parametrize(("cause", "seconds"), [(None, 5.0), (Cause.INTERRUPTION, 1.0)])
def test_an_order_of_the_operator_and_a_deadline_that_is_close_wait_for_no_other_attempt(
    cause: Cause | None, seconds: float
) -> None:
    sim = training(replace_lost=False)
    sim.feed(sim.pods["w1"], asked(sim.now + seconds, cause))
    sim.miss("w1", "w2")
    sim.feed(sim.pods["w1"], events.Tick())
    assert sim.pods["w1"].state.leaving is not None


def test_an_order_of_the_operator_ends_the_wait_for_the_next_attempt() -> None:
    sim = training(2, replace_lost=False)
    sim.feed(sim.pods["w1"], asked(sim.now + 5.0))
    sim.crash("w0")
    assert sim.run(5, lambda: sim.pods["w1"].state.postponed is not None and sim.pods["w1"].state.attempt is None)
    sim.feed(sim.pods["w1"], asked(sim.now + 5.0, None))
    assert sim.pods["w1"].state.leaving is not None


def test_who_waits_for_an_attempt_that_never_comes_leaves_when_its_time_is_up() -> None:
    sim = training(2, min_replicas=2, replace_lost=False)
    sim.feed(sim.pods["w1"], asked(sim.now + 5.0))
    until = sim.now + 5.0
    sim.crash("w0")
    assert not sim.run(4, lambda: sim.pods["w1"].exit_code is not None)
    assert sim.run(2, lambda: sim.pods["w1"].exit_code == 75)
    assert sim.now <= until + 1.0


def test_the_only_one_left_keeps_the_state_until_the_operator_lets_it_commit() -> None:
    sim = training(2, replace_lost=False)
    before = sim.training_now()
    assert before is not None
    sim.feed(sim.pods["w1"], asked(sim.now + 30.0))
    sim.crash("w0")
    sim.prove(sim.pods["w0"])
    assert sim.run(20, lambda: sim.pods["w1"].exit_code == 75)
    assert sim.committed() > len(before.steps), "no step is lost, and one was made for the commit"


def test_two_workers_on_one_noticed_node_leave_together_as_one_incident() -> None:
    sim = training(5, pods_per_node=2, replace_lost=False)
    before = sim.training_now()
    assert before is not None
    sim.notice("w2")
    sim.run(1.5)
    sim.notice("w3")  # its own sidecar hears of it a moment later
    assert sim.run(15, lambda: sim.trains_with("w0", "w1", "w4"))
    assert [sim.pods[uid].exit_code for uid in ("w2", "w3")] == [75, 75]
    after = sim.training_now()
    assert after is not None
    assert after.world.pair == AttemptId(1, 2)
    assert after.base == before.steps
    said = {(i.pair, i.failure.cause, i.failure.message) for pod in sim.pods.values() for i in pod.state.incidents}
    assert said == {(AttemptId(1, 1), Cause.INTERRUPTION, "w2, w3 leave: node-1 goes")}


@pytest.mark.parametrize("shared", [True, False])
def test_a_drain_that_is_not_for_the_node_leaves_its_neighbour_alone(shared: bool) -> None:
    sim = training(3, pods_per_node=2 if shared else 1, replace_lost=False)
    sim.drain("w1") if shared else sim.notice("w1")
    assert sim.run(15, lambda: sim.trains_with("w0", "w2"))


def test_workers_on_nodes_without_a_name_are_no_neighbours() -> None:
    sim = Simulation(3, replace_lost=False)
    for pod in sim.pods.values():
        pod.node = ""
    assert sim.run(20, lambda: sim.trains_with("w0", "w1", "w2") and sim.committed() >= 2)
    sim.notice("w1")
    assert sim.run(15, lambda: sim.trains_with("w0", "w2"))


@pytest.mark.parametrize("keeps", [True, False])
def test_a_drain_whose_commit_is_not_made_in_time_is_an_incident_and_what_nobody_keeps_is_lost(keeps: bool) -> None:
    sim = training(replace_lost=False, keeps=keeps)
    before = sim.training_now()
    assert before is not None
    assert sim.run(5, lambda: len(before.steps) > before.saved)
    until, made, saved = sim.now + 0.2, len(before.steps), before.saved
    sim.feed(sim.pods["w1"], events.DrainAsked(id="spot", reason="the machine goes", until=until))
    sim.tick(0.25)
    assert sim.run(15, lambda: sim.trains_with("w0", "w2"))
    sim.round()
    assert incident(sim.pods["w1"], AttemptId(1, 1)) is Cause.INTERRUPTION
    for uid in ("w0", "w2"):
        (known,) = sim.pods[uid].state.incidents
        assert (known.pair, known.failure.cause) == (AttemptId(1, 1), Cause.INTERRUPTION)
        assert known.lost_steps == (0 if keeps else made - saved)


def test_a_lone_worker_that_drains_without_a_commit_says_so() -> None:
    sim = training(1, replace_lost=False)
    sim.feed(sim.pods["w0"], events.DrainAsked(id="spot", reason="the machine goes", until=sim.now))
    (known,) = sim.pods["w0"].state.incidents
    assert known.failure.cause is Cause.INTERRUPTION
    assert known.failure.step == len(sim.trainings[0].steps)


def test_the_coordinator_may_be_drained() -> None:
    sim = training(replace_lost=False)
    sim.drain("w0")
    assert sim.run(15, lambda: sim.trains_with("w1", "w2"))
    assert sim.pods["w0"].exit_code == 75


def test_a_lone_worker_that_is_drained_leaves_with_75() -> None:
    sim = training(1, replace_lost=False)
    sim.drain("w0")
    assert sim.run(15, lambda: sim.pods["w0"].exit_code == 75)


def test_a_drain_that_the_operator_ordered_is_no_incident() -> None:
    sim = training(replace_lost=False)
    sim.feed(sim.pods["w2"], events.DrainAsked(id="d", reason="scaled down", cause=None))
    assert sim.run(15, lambda: sim.trains_with("w0", "w1"))
    assert sim.pods["w2"].exit_code == 75
    assert sim.pods["w0"].state.incidents == ()


@pytest.mark.parametrize("hears", ["w1", "w2"])
def test_a_member_that_is_gone_after_the_agreed_commit_of_a_drain_is_not_lost(hears: str) -> None:
    """Its launcher may hear of the commit, and say that it left, before our own rank has told us."""
    sim = training(replace_lost=False)
    pod = sim.pods[hears]
    sim.feed(sim.pods["w2"], events.DrainAsked(id="d", reason="scaled down", cause=None))
    if hears != "w2":
        sim.feed(pod, events.Received(sender="w2", message=sim.pods["w2"].state.hello))
    gone = replace(sim.pods["w0"].state.hello, world=None, left=AttemptId(1, 1))
    sim.feed(pod, events.Received(sender="w0", message=gone))
    assert sim.run(15, lambda: sim.trains_with("w0", "w1"))
    assert [one.state.incidents for one in sim.pods.values()] == [(), (), ()]


@pytest.mark.parametrize("order", ["w0 w1 w2", "w2 w1 w0", "w1 w0 w2"])
@pytest.mark.parametrize("rounds_between", [0, 1])
def test_all_that_are_told_to_leave_commit_their_last_step_and_go(order: str, rounds_between: int) -> None:
    """A suspended job: the document reaches its launchers one after the other."""
    sim = training(replace_lost=False)
    for uid in order.split():
        if sim.pods[uid].alive:
            sim.feed(sim.pods[uid], events.DrainAsked(id="drain-9", reason="the operator asked", cause=None))
        for _ in range(rounds_between):
            sim.round()
    assert sim.run(20, lambda: all(pod.exit_code == 75 for pod in sim.pods.values()))
    assert sim.committed() == max(len(world.steps) for world in sim.trainings), "no step is lost"
    assert all(pod.state.incidents == () for pod in sim.pods.values())


def test_who_sees_ranks_of_a_suspended_job_go_before_it_hears_of_that_counts_nobody_as_lost() -> None:
    """Before the first step there is nothing to commit: who hears first leaves, one of its ranks before the other."""
    sim = Simulation(3, replace_lost=False)
    assert sim.run(20, lambda: any(world.base is not None for world in sim.trainings))
    pair = sim.trainings[-1].world.pair
    first, *others = sim.pods.values()
    ordered = events.DrainAsked(id="drain-9", reason="the operator asked", cause=None)
    sim.feed(first, ordered)
    held, first.local = first.local, []
    sim.deliver_all()
    for pod in others:
        gone = Failure(cause=Cause.INFRASTRUCTURE, reason="PeerLost", message="", priority=Priority.PEER_LOST)
        sim.feed(pod, events.RankFailed(pair=pair, failure=gone))
    sim.tick(0.5)
    sim.deliver_all()
    first.local = held
    for pod in others:
        sim.feed(pod, ordered)
    assert sim.run(20, lambda: all(pod.exit_code == 75 for pod in sim.pods.values()))
    assert [pod.state.incidents for pod in sim.pods.values()] == [(), (), ()]


def test_a_spent_budget_ends_the_job_on_every_launcher_with_the_applications_code() -> None:
    budget = Budget(cause=Cause.APPLICATION, max_restarts=1, window=3600.0)
    sim = training(budgets=(budget,), replace_lost=False)
    sim.kill_rank("w1", Cause.APPLICATION, Priority.EXCEPTION)
    assert sim.run(10, lambda: (t := sim.training_now()) is not None and t.world.pair == AttemptId(1, 2) and t.made)
    sim.kill_rank("w1", Cause.APPLICATION, Priority.EXCEPTION)
    assert sim.run(10, lambda: not sim.alive())
    assert {pod.exit_code for pod in sim.pods.values()} == {1}
    assert {pod.state.exit.final for pod in sim.pods.values() if pod.state.exit} == {True}


def _fail_twice(first: str, second: str, *, step_between: bool = False, **settings: object) -> Simulation:
    """The script fails in two attempts in a row; the settings allow a hundred of them."""
    budget = Budget(cause=Cause.APPLICATION, max_restarts=100, window=3600.0)
    sim = training(budgets=(budget,), replace_lost=False, **settings)
    before = sim.trainings[-1].world.pair

    def tries_again() -> bool:
        now = sim.training_now()
        return now is not None and now.world.pair > before and bool(now.made) is step_between

    sim.kill_rank("w1", Cause.APPLICATION, Priority.EXCEPTION, mistake=first)
    assert sim.run(10, tries_again)
    sim.kill_rank("w1", Cause.APPLICATION, Priority.EXCEPTION, mistake=second)
    sim.run(10, lambda: not sim.alive())
    return sim


def test_the_same_mistake_again_with_no_step_made_ends_the_job_at_once() -> None:
    sim = _fail_twice("NameError at train.py:7", "NameError at train.py:7")
    assert {pod.exit_code for pod in sim.pods.values()} == {1}
    assert all(pod.state.exit.final and "the same error" in pod.state.exit.message for pod in sim.pods.values())


@pytest.mark.parametrize(
    ("first", "second", "step_between"),
    [
        ("NameError at train.py:7", "NameError at train.py:8", False),
        ("", "", False),  # a failure that a restart may cure
        ("ValueError at train.py:7", "ValueError at train.py:7", True),
    ],
)
def test_any_other_failure_again_is_left_to_the_budget(first: str, second: str, step_between: bool) -> None:
    assert _fail_twice(first, second, step_between=step_between).alive()


def test_attempts_that_fail_before_their_first_step_back_off() -> None:
    sim = Simulation(1)
    started = set()
    for _ in range(40):
        sim.round()
        started |= {training.world.pair for training in sim.trainings}
        sim.kill_rank("w0")
    assert 2 <= len(started) <= 10


def test_a_generation_published_twice_is_held_in_reported_and_overtaken() -> None:
    sim = training()
    sim.operator_up = False
    here = sim.pods["w1"]
    sim.feed(here, events.MembershipSeen(membership=replace(sim.document(), publication="twin", revision=99)))
    assert here.state.conflict == 1
    assert here.state.world is not None
    for uid in ("w0", "w1", "w2"):
        sim.pods[uid].state = replace(sim.pods[uid].state, conflict=1)
    sim.kill_rank("w1")
    assert not sim.run(10, lambda: sim.training_now() is not None)
    assert "was published twice" in here.state.message

    sim.operator_up = True
    assert sim.run(20, lambda: sim.trains_with("w0", "w1", "w2"))
    assert sim.status is not None
    assert sim.status.generation == 2


def test_a_job_applied_again_on_an_old_folder_resumes_it_above_the_old_claims() -> None:
    sim = Simulation(job="job-b", last_step=20)
    old = Claim(pair=AttemptId(4, 2), job_uid="job-a", publication="old", from_step=0)
    sim.claims[old.pair] = old
    line = (AttemptId(4, 2),) * 6
    sim.commits.append(Stored(fencing.Commit(step=6, pair=AttemptId(4, 2), job_uid="job-a"), line))
    assert sim.run(30, lambda: sim.trains_with("w0", "w1", "w2"))
    running = sim.training_now()
    assert running is not None
    assert running.world.pair.generation == 5
    assert running.base == line

    zombie = Stored(fencing.Commit(step=9, pair=AttemptId(4, 2), job_uid="job-a"), (AttemptId(4, 2),) * 9)
    sim.commits.append(zombie)
    sim.check_line()
    assert sim.run(60, sim.completed)


def test_a_status_from_an_old_backup_is_overtaken() -> None:
    sim = training()
    backup = sim.status
    sim.crash("w2")
    sim.prove(sim.pods["w2"])
    sim.replenish()
    assert sim.run(20, lambda: sim.trains_with("w0", "w1", "w3"))
    sim.status, sim.backups_restored = backup, 1
    sim.pods["w3"].served = 0
    sim.crash("w3")
    sim.prove(sim.pods["w3"])
    sim.replenish()
    assert sim.run(40, lambda: sim.trains_with("w0", "w1", "w4"))
    assert sim.status is not None
    assert sim.status.generation > 2


class Endpoint:
    """Two hosts without an operator: the launcher at the endpoint (w0) keeps the roster and tells the other."""

    def __init__(self) -> None:
        self.sim = Simulation(2, operator=False, replace_lost=False)
        terms = RunRequest(options=RunOptions(nodes=(1, 2)), run_id="run", last_call=1.0)
        self.roster = Roster(terms=terms, publication="x")
        self.revision, self.told = 0, ()
        for pod in self.sim.pods.values():
            self.join(pod)

    def join(self, pod: Pod) -> None:
        member = Joined.of(uid=pod.uid, name=pod.uid, host="127.0.0.1", control=1, store=2, node="")
        self.roster = self.roster.joined(member, self.sim.now)

    def round(self) -> None:
        sim = self.sim
        for member in self.roster.present:
            if not sim.pods[member.uid].alive:
                self.roster = self.roster.left(member.uid, sim.now)
        self.roster = self.roster.publish(sim.now)
        started = sim.pods["w0"].state.started
        state = (len(self.roster.published), started)
        if self.roster.published and state != self.told:
            self.told, self.revision = state, self.revision + 1
            document = self.roster.document(Record(started=started), now=sim.now, revision=self.revision)
            membership = replace(Membership.from_json(document), rules=sim.rules)
            sim.feed(sim.pods["w0"], events.MembershipSeen(membership=membership))
        sim.round()

    def run(self, seconds: float, until: Callable[[], bool]) -> bool:
        end = self.sim.now + seconds
        while self.sim.now < end and not until():
            self.round()
        return until()


def test_two_hosts_without_an_operator() -> None:
    hosts = Endpoint()
    sim = hosts.sim
    assert hosts.run(20, lambda: sim.trains_with("w0", "w1") and sim.committed() >= 2)
    sim.crash("w1")
    assert hosts.run(20, lambda: sim.trains_with("w0"))
    hosts.join(sim.new_pod())
    assert hosts.run(30, lambda: sim.trains_with("w0", "w2"))


# Processes that outlive attempts


def test_a_killed_rank_costs_no_step_and_writes_no_claim() -> None:
    sim = training()
    before = sim.training_now()
    assert before is not None
    assert sim.run(5, lambda: len(before.steps) > before.saved)
    sim.kill_rank("w1")
    assert sim.run(5, lambda: (t := sim.training_now()) is not None and t.world.pair == AttemptId(1, 2) and t.made)
    after = sim.training_now()
    assert after is not None
    assert after.base == before.steps
    assert set(sim.claims) == {AttemptId(1, 1)}


def test_a_step_in_doubt_is_applied_if_all_survivors_were_prepared() -> None:
    sim = training()
    before = sim.training_now()
    assert before is not None
    made = before.steps
    for uid in ("w0", "w1", "w2"):
        sim.prepare(before, uid)
    sim.kill_rank("w1")
    assert sim.run(5, lambda: (t := sim.training_now()) is not None and t.world.pair == AttemptId(1, 2))
    assert sim.training_now().base == (*made, AttemptId(1, 1))  # type: ignore[union-attr]


def test_a_step_for_which_a_survivor_was_not_prepared_is_discarded() -> None:
    sim = training()
    before = sim.training_now()
    assert before is not None
    made = before.steps
    for uid in ("w0", "w1"):
        sim.prepare(before, uid)
    sim.kill_rank("w1")
    assert sim.run(5, lambda: (t := sim.training_now()) is not None and t.world.pair == AttemptId(1, 2))
    assert sim.training_now().base == made  # type: ignore[union-attr]


def test_who_hangs_is_replaced_and_takes_the_state_over() -> None:
    sim = training()
    before = sim.training_now()
    assert before is not None
    sim.hang("w2")
    sim.kill_rank("w1")
    assert sim.run(5, lambda: (t := sim.training_now()) is not None and t.world.pair == AttemptId(1, 2) and t.made)
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
    sim.feed(newcomer, events.Prepared(prepared=True))
    assert sim.run(10, lambda: sim.trains_with("w0", "w1", "w3"))


def test_a_world_that_was_accepted_may_start_before_its_members_try_another() -> None:
    sim = training()
    sim.crash("w2")
    assert sim.run(5, lambda: sim.trains_with("w0", "w1"))
    sim.prove(sim.pods["w2"])
    sim.replenish()
    first, newcomer = sim.pods["w0"], sim.pods["w3"]
    assert sim.run(5, lambda: "w3" in first.state.peers)
    muted = replace(first.state.peers["w3"], muted_until=sim.now + 1000)  # as after it did not accept in time
    first.state = replace(first.state, peers={**first.state.peers, "w3": muted})
    assert sim.run(90, lambda: newcomer.state.proposal is not None), "it steps in, as nobody takes it in"
    sim.withheld = {("w3", "start"), ("w3", "hello")}
    proposed = newcomer.state.proposal
    assert proposed is not None
    assert sim.run(5, lambda: newcomer.state.started == proposed.world.pair)
    assert not sim.run(1, lambda: first.state.accepted != proposed.world.pair)
    sim.withheld = set()
    assert sim.run(5, lambda: sim.trains_with("w0", "w1", "w3"))
    assert sim.run(3) is False
    assert {(i.pair, i.failure.pod) for pod in sim.alive() for i in pod.state.incidents} == {(AttemptId(1, 1), "w2")}


def test_a_coordinator_that_is_lost_before_its_world_starts_is_not_waited_for() -> None:
    sim = training()
    sim.withheld = {("w0", "start"), ("w0", "hello")}
    sim.kill_rank("w1")
    assert sim.run(5, lambda: sim.pods["w0"].state.started == AttemptId(1, 2))
    sim.crash("w0")
    sim.withheld = set()
    assert sim.run(4, lambda: sim.trains_with("w1", "w2"))


def holding(sim: Simulation, *shards: str) -> None:
    """Each worker says which shards its ranks have, a digit a shard."""
    count = len(set("".join(shards)))
    for number, numbers in enumerate(shards):
        held = HeldShards(pair=sim.trainings[-1].world.pair, count=count, shards=frozenset(map(int, numbers)))
        sim.pods[f"w{number}"].local.append(events.Holds(held=held if numbers else None))
    sim.run(2)


def test_the_last_holder_of_a_shard_is_in_the_world_after_two_losses_among_its_peers() -> None:
    sim = training(9, replica_step=3)
    holding(sim, *"012012012")
    sim.operator_up = False
    sim.crash("w2")
    sim.crash("w5")
    assert sim.run(10, lambda: sim.trains_with("w0", "w1", "w3", "w4", "w6", "w8"))


def _size(sim: Simulation) -> int:
    now = sim.training_now()
    return 0 if now is None else len(now.world.uids)


def test_of_two_replicas_one_goes_on_whichever_worker_is_lost_and_both_when_there_is_another() -> None:
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


def test_a_lowest_index_without_a_shard_proposes_no_world_that_leaves_it_out() -> None:
    sim = training(9, replica_step=3)
    holding(sim, "", *"012345", "", "")
    sim.operator_up = False
    sim.crash("w7")
    sim.crash("w8")
    assert sim.run(10, lambda: sim.trains_with("w1", "w2", "w3", "w4", "w5", "w6"))
    assert sim.trainings[-1].world.coordinator == "w1"
