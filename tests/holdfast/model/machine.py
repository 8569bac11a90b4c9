"""The actions that hypothesis may apply to a job, one transition at a time."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from simulated_cluster import Pod
from simulation import Simulation

from holdfast.core.attempt import AttemptId
from holdfast.core.protocol import Cause
from holdfast.launcher.membership import events
from holdfast.launcher.membership.held_shards import HeldShards
from holdfast.launcher.membership.messages import Priority

PLACES = st.integers(min_value=0, max_value=7)
MOST_PODS = 8


class Job(RuleBasedStateMachine):
    """Any order of transitions and faults. The simulation checks safety at each write, and the teardown checks
    liveness."""

    def __init__(self) -> None:
        super().__init__()
        self.sim = Simulation()

    @initialize(
        replicas=st.integers(min_value=1, max_value=4),
        shrink=st.booleans(),
        last=st.sampled_from([6, 1000]),
        pods_per_node=st.sampled_from([1, 2]),
    )
    def begin(self, replicas: int, shrink: bool, last: int, pods_per_node: int) -> None:
        self.sim = Simulation(
            replicas, may_shrink=shrink, last_step=last, replace_lost=True, pods_per_node=pods_per_node
        )
        self.sim.run(4.0)

    def pod(self, place: int) -> Pod:
        alive = self.sim.alive() or list(self.sim.pods.values())
        return alive[place % len(alive)]

    # Transitions

    @rule(count=st.integers(min_value=1, max_value=12))
    def fair_rounds(self, count: int) -> None:
        for _ in range(count):
            self.sim.round()

    @rule(place=PLACES)
    def deliver(self, place: int) -> None:
        self.sim.deliver(place)

    @rule(place=PLACES)
    def lose_a_message(self, place: int) -> None:
        if self.sim.mail:
            self.sim.mail.pop(place % len(self.sim.mail))

    @rule(place=PLACES)
    def double_a_message(self, place: int) -> None:
        if self.sim.mail:
            self.sim.mail.append(self.sim.mail[place % len(self.sim.mail)])

    @rule(place=PLACES)
    def look(self, place: int) -> None:
        self.sim.look(self.pod(place))

    @rule(place=PLACES)
    def shell(self, place: int) -> None:
        self.sim.shell(self.pod(place))

    @rule(place=PLACES)
    def train(self, place: int) -> None:
        if self.sim.trainings:
            self.sim.train(self.sim.trainings[-1 - place % min(3, len(self.sim.trainings))])

    @rule(place=PLACES, member=PLACES)
    def one_member_is_prepared(self, place: int, member: int) -> None:
        if self.sim.trainings:
            training = self.sim.trainings[-1 - place % min(3, len(self.sim.trainings))]
            if self.sim.may_step(training):
                self.sim.prepare(training, training.world.members[member % len(training.world.members)].pod_uid)

    @rule(place=PLACES, member=PLACES)
    def a_vote_returns_to_one_member(self, place: int, member: int) -> None:
        if self.sim.trainings:
            training = self.sim.trainings[-1 - place % min(3, len(self.sim.trainings))]
            members = training.world.members
            self.sim.vote_returns(training, members[member % len(members)].pod_uid)

    @rule(place=PLACES)
    def hang(self, place: int) -> None:
        self.sim.hang(self.pod(place).uid)

    @rule(place=PLACES)
    def a_late_write_lands(self, place: int) -> None:
        if self.sim.trainings:
            self.sim.land(self.sim.trainings[place % len(self.sim.trainings)])

    @rule(place=PLACES)
    def report(self, place: int) -> None:
        self.sim.report(self.pod(place))

    @rule()
    def decide(self) -> None:
        self.sim.decide()

    @rule(place=PLACES)
    def serve(self, place: int) -> None:
        self.sim.serve(self.pod(place))

    @rule(seconds=st.sampled_from([0.25, 1.5, 4.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.sim.tick(seconds)

    # Faults

    @rule(place=PLACES)
    def crash(self, place: int) -> None:
        self.sim.crash(self.pod(place).uid)

    @rule(place=PLACES)
    def restart_launcher(self, place: int) -> None:
        self.sim.restart(self.pod(place).uid)

    @rule(place=PLACES)
    def freeze(self, place: int) -> None:
        self.sim.freeze(self.pod(place).uid)

    @rule(place=PLACES)
    def thaw(self, place: int) -> None:
        self.sim.thaw(self.pod(place).uid)

    @rule(place=PLACES, how=st.sampled_from([Priority.KILLED, Priority.EXCEPTION, Priority.PEER_LOST]))
    def kill_rank(self, place: int, how: Priority) -> None:
        cause = Cause.APPLICATION if how is Priority.EXCEPTION else Cause.INFRASTRUCTURE
        self.sim.kill_rank(self.pod(place).uid, cause, how)

    @rule(side=st.sets(PLACES, max_size=3), operator=st.booleans())
    def partition(self, side: set[int], operator: bool) -> None:
        left = {self.pod(place).uid for place in side}
        self.sim.cut(left, set(self.sim.pods) - left)
        if operator:
            self.sim.cut_from_operator |= left

    @rule()
    def heal(self) -> None:
        self.sim.heal()

    @rule()
    def operator_goes_or_comes(self) -> None:
        self.sim.operator_up = not self.sim.operator_up

    @rule(place=PLACES)
    def prove(self, place: int) -> None:
        pods = list(self.sim.pods.values())
        self.sim.prove(pods[place % len(pods)])

    @precondition(lambda self: len(self.sim.pods) < MOST_PODS)
    @rule()
    def replenish(self) -> None:
        self.sim.replenish()

    @rule(place=PLACES)
    def drain(self, place: int) -> None:
        self.sim.drain(self.pod(place).uid)

    @rule(place=PLACES)
    def notice(self, place: int) -> None:
        self.sim.notice(self.pod(place).uid)

    @rule(place=PLACES, lost=PLACES)
    def miss(self, place: int, lost: int) -> None:
        self.sim.miss(self.pod(place).uid, self.pod(lost).uid)

    @rule(place=PLACES, by=PLACES, lost=PLACES, notice=st.booleans())
    def drain_while_another_is_missed(self, place: int, by: int, lost: int, notice: bool) -> None:
        uid = self.pod(place).uid
        self.sim.notice(uid) if notice else self.sim.drain(uid)
        if self.sim.pods[uid].alive:
            self.sim.miss(self.pod(by).uid, self.pod(lost).uid)

    @rule(place=PLACES, shards=st.frozensets(st.integers(min_value=0, max_value=1)), attempt=PLACES)
    def say_any_shards(self, place: int, shards: frozenset[int], attempt: int) -> None:
        """Report shards that may be wrong. Safety must not depend on this report."""
        held = HeldShards(attempt_id=AttemptId(1, attempt + 1), count=2, shards=shards)
        self.pod(place).local.append(events.Holds(held=held if shards else None))

    @rule(number=st.integers(min_value=1, max_value=4))
    def scale(self, number: int) -> None:
        if self.sim.rules.replica_step == 1:
            self.sim.scale(number)

    @rule()
    def keep_a_backup(self) -> None:
        self.sim.keep_backup()

    @rule()
    def restore_the_backup(self) -> None:
        self.sim.restore_backup()

    @rule()
    def a_zombie_of_an_old_job_commits(self) -> None:
        self.sim.old_job_commits()

    @rule(generation=st.integers(min_value=1, max_value=8), attempt=PLACES)
    def a_zombie_of_an_old_job_claims(self, generation: int, attempt: int) -> None:
        self.sim.old_job_claims(AttemptId(generation, attempt + 1))

    def teardown(self) -> None:
        if not self.sim.operator_up:
            self.sim.resume_alone()
        self.sim.recover()


class InSteps(Job):
    """The same with one or two replicas of two workers. Only complete replicas train, and a surplus worker is on
    standby."""

    @initialize(
        replicas=st.integers(min_value=1, max_value=2),
        shrink=st.booleans(),
        last=st.sampled_from([6, 1000]),
        pods_per_node=st.sampled_from([1, 2]),
    )
    def begin(self, replicas: int, shrink: bool, last: int, pods_per_node: int) -> None:
        self.sim = Simulation(
            2 * replicas,
            min_replicas=2,
            replica_step=2,
            may_shrink=shrink,
            last_step=last,
            replace_lost=True,
            pods_per_node=pods_per_node,
        )
        self.sim.run(4.0)
