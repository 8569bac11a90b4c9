"""Generations that are published twice or reused on an old folder, and runs without an operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from simulated_cluster import Pod, Stored
from simulation import Simulation

from holdfast.checkpoint.policy import fencing
from holdfast.core.attempt import AttemptId, Claim
from holdfast.launcher.membership import events
from holdfast.launcher.membership.document import Membership
from holdfast.launcher.options import RunOptions
from holdfast.launcher.rendezvous.roster import Joined, Record, Roster, RunRequest


def training(replicas: int = 3, **settings: object) -> Simulation:
    """A job whose workers are all training and have saved a checkpoint."""
    sim = Simulation(replicas, **settings)  # type: ignore[arg-type]
    names = [f"w{number}" for number in range(replicas)]
    assert sim.run(20, lambda: sim.trains_with(*names) and sim.committed() >= 2)
    return sim


class Endpoint:
    """Two hosts without an operator. The launcher at the endpoint (w0) keeps the roster and reports it to the
    other."""

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


def test_generation_published_twice_is_held_in_and_superseded() -> None:
    """The status message reports the conflict."""
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


def test_job_applied_again_resumes_above_the_old_claims() -> None:
    """The folder holds the checkpoints of the earlier job."""
    sim = Simulation(job="job-b", last_step=20)
    old = Claim(attempt_id=AttemptId(4, 2), job_uid="job-a", publication="old", from_step=0)
    sim.claims[old.attempt_id] = old
    line = (AttemptId(4, 2),) * 6
    sim.commits.append(Stored(fencing.Commit(step=6, attempt_id=AttemptId(4, 2), job_uid="job-a"), line))
    assert sim.run(30, lambda: sim.trains_with("w0", "w1", "w2"))
    running = sim.training_now()
    assert running is not None
    assert running.world.attempt_id.generation == 5
    assert running.base == line

    zombie = Stored(fencing.Commit(step=9, attempt_id=AttemptId(4, 2), job_uid="job-a"), (AttemptId(4, 2),) * 9)
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


def test_two_hosts_without_an_operator() -> None:
    hosts = Endpoint()
    sim = hosts.sim
    assert hosts.run(20, lambda: sim.trains_with("w0", "w1") and sim.committed() >= 2)
    sim.crash("w1")
    assert hosts.run(20, lambda: sim.trains_with("w0"))
    hosts.join(sim.new_pod())
    assert hosts.run(30, lambda: sim.trains_with("w0", "w2"))
