"""Launchers, an operator and a shared tier in one process, driven by the production transitions.

Each launcher is `holdfast.launcher.membership.state_machine.step`, the operator is
`holdfast_operator.decision.membership.rules.decide`, and restores use `holdfast.checkpoint.policy.fencing`.
Everything between them (channels, sidecars, rank processes, time) is simulated, and can be cut, delayed, re-ordered,
frozen or killed. The invariants are checked at every write. A rank process outlives its attempts, as in the product:
`holdfast.training.protocol.step_commit` decides which of their states continues.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from simulated_cluster import Pod, Training, ViolationError
from simulated_ranks import SimulatedRanks, _attempt_id, _claim

from holdfast.checkpoint.policy import fencing
from holdfast.core.attempt import AttemptId, highest
from holdfast.launcher.membership import events, quorum, state_machine
from holdfast.launcher.membership.document import Membership
from holdfast.launcher.membership.messages import World
from holdfast_operator.api import ids as operator_ids
from holdfast_operator.api import status as operator_status
from holdfast_operator.decision.membership import candidates as policy
from holdfast_operator.decision.membership import rules as policy_rules
from holdfast_operator.views import reports as operator_reports


class Simulation(SimulatedRanks):
    """The complete job. `round()` runs each transition once in a fair order. The single transitions allow any
    order."""

    # The operator and the sidecars

    def report(self, pod: Pod) -> None:
        """Let the sidecar of a pod report, if it can."""
        if not pod.alive or pod.frozen or pod.uid in self.cut_from_operator:
            return
        state = pod.state
        mine = [c for c in self.claims.values() if pod.training and c == pod.training.claim]
        pod.report = operator_reports.Report(
            pod_uid=pod.uid,
            received_at=_time(self.now),
            has_launcher=True,
            ready=state.ready,
            accepted=_attempt_id(state.accepted),
            started=_attempt_id(state.started),
            world=_world(state.world),
            lost_members=tuple(uid for uid, _, _ in state_machine.lost_members(state)),
            conflict=state.conflict or 0,
            highest_claim=_claim(mine[0]) if mine else None,
            foreign_claims=tuple(_claim(c) for c in state.foreign),
        )
        pod.reported_at = self.now

    def decide(self) -> None:
        """Run one pass of the operator."""
        if not self.operator_up:
            return
        observed = policy.MembershipInput(
            membership=self.status or operator_status.Membership(),
            workers=tuple(self._candidate(pod) for pod in self.pods.values() if not pod.proved),
            proved_gone=frozenset(pod.uid for pod in self.pods.values() if pod.proved),
            rules=policy.MembershipRules(
                replicas=self.rules.replicas,
                min_replicas=self.rules.min_replicas,
                replica_step=self.rules.replica_step,
                may_shrink=self.rules.may_shrink,
                first_wait=timedelta(seconds=3),
            ),
            publication=f"p{self.publications + 1}",
            job_uid=self.job,
        )
        self.verdict = policy_rules.decide(observed, _time(self.now))
        if isinstance(self.verdict, policy.Publication):
            self.publications += 1
            self.status = self.verdict.membership

    def _candidate(self, pod: Pod) -> policy.Candidate:
        report = pod.report
        place = operator_status.Member(
            index=policy.NO_INDEX, pod_uid=pod.uid, pod=pod.uid, ip="", store=29400, control=29401, node=pod.node
        )
        return policy.Candidate(
            member=place,
            ready=report is not None and report.ready and self.now - pod.reported_at < 3.0,
            leaving=pod.state.drain is not None and pod.uid not in self.cut_from_operator,
            ready_at=_time(pod.ready_since),
            report=report,
        )

    def prove(self, pod: Pod) -> None:
        """Prove to the operator that a dead pod is dead. This must not be called for a pod that is alive."""
        if not pod.alive:
            pod.proved = True

    def replenish(self) -> None:
        """Let the operator replace lost pods, up to the size of the job."""
        if not (self.operator_up and self.replace_lost) or self.completed():
            return
        here = [p for p in self.pods.values() if not p.proved and p.state.drain is None and not self._silent(p)]
        for _ in range(self.rules.replicas - len(here)):
            self.new_pod()

    def _silent(self, pod: Pod) -> bool:
        return self.now - max(pod.reported_at, pod.ready_since) > 3.0

    def serve(self, pod: Pod) -> None:
        """Let the sidecar deliver the newest membership, if it can."""
        if self.status is None or not self.operator_up or pod.uid in self.cut_from_operator:
            return
        if pod.alive and not pod.frozen and self.status.generation and pod.served != self.status.revision:
            pod.served = self.status.revision
            self.feed(pod, events.MembershipSeen(membership=self.document()))

    def document(self) -> Membership:
        """Return the status in its wire form, as the launchers read it."""
        assert self.status is not None
        return replace(Membership.from_json(_wire(self.status, self.job)), rules=self.rules)

    # Time

    def tick(self, seconds: float = 0.25) -> None:
        """Advance the time."""
        self.now += seconds
        for pod in self.alive():
            self.feed(pod, events.Tick())

    def round(self) -> None:
        """Run each possible transition once, in a fair order."""
        for pod in list(self.pods.values()):
            self.look(pod)
        self.deliver_all()
        for pod in list(self.pods.values()):
            while pod.local and pod.alive and not pod.frozen:
                self.shell(pod)
        self.deliver_all()
        for training in self.trainings:
            if training.alive:
                self.train(training)
        for pod in list(self.pods.values()):
            self.report(pod)
        self.decide()
        for pod in list(self.pods.values()):
            self.serve(pod)
        self.tick()

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> bool:
        """Run fair rounds for this time or until the condition is true. Return whether it is true."""
        end = self.now + seconds
        while self.now < end:
            if until is not None and until():
                return True
            self.round()
        return until is not None and until()

    def recover(self, seconds: float = 120.0) -> None:
        """Check liveness: after all faults are fixed and dead pods replaced, the job saves another step or
        completes."""
        self.heal()
        self.operator_up = True
        before = max((len(s.lineage) for s in self.readable()), default=0)
        end = self.now + seconds
        while self.now < end:
            for pod in self.pods.values():
                self.prove(pod)
            self.replenish()
            self.round()
            best = max((len(s.lineage) for s in self.readable()), default=0)
            if self.completed() or best > min(before, self.last_step - 1):
                return
        raise ViolationError(f"nothing was committed for {seconds} s after all was mended: {self.show()}")

    def resume_alone(self, seconds: float = 120.0) -> bool:
        """Check liveness without an operator: if the rules permit a world of the living launchers, they continue."""
        self.heal()
        self.operator_up = False
        if not self._may_go_on():
            return False
        before = self.committed()
        if not self.run(seconds, lambda: self.completed() or self.committed() > min(before, self.last_step - 1)):
            raise ViolationError(f"no world for {seconds} s though the rules allow one: {self.show()}")
        return True

    def _may_go_on(self) -> bool:
        """Return whether a world of the living launchers would keep every rule, given their joint knowledge."""
        states = [p.state for p in self.alive()]
        newest = max((s.membership for s in states if s.membership), key=lambda m: m.newness, default=None)
        if newest is None or self.completed() or self.backups_restored:
            return False
        if any(s.conflict == newest.generation or s.foreign for s in states):
            return False
        attempt_id = AttemptId(newest.generation, 10**6)
        known = newest.claims
        of = {"job_uid": self.job, "attempt_id": attempt_id, "publication": newest.publication}
        if fencing.foreign(self.claims.values(), known=known, **of):  # type: ignore[arg-type]
            return False
        # A launcher that postponed its exit may join the next world, but leaves when its notice is over.
        stay = {s.me for s in states if s.drain is None and s.postponed is None and s.leaving is None}
        chosen = quorum.largest_world(newest.rules, [m for m in newest.members if m.pod_uid in stay])
        started = highest(*(s.started for s in states))
        return quorum.may_be(newest, frozenset(m.pod_uid for m in chosen), started).ok

    # Observations

    def completed(self) -> bool:
        """Return whether a launcher has exited with 0."""
        return any(pod.exit_code == 0 for pod in self.pods.values())

    def training_now(self) -> Training | None:
        """Return the world that can step now, if any."""
        return next((t for t in self.trainings if t.alive and self.together(t) and t.checked), None)

    def trains_with(self, *uids: str) -> bool:
        """Return whether exactly these workers train now."""
        training = self.training_now()
        return training is not None and training.made and training.world.uids == frozenset(uids)

    def committed(self) -> int:
        """Return the newest readable step."""
        return max((s.commit.step for s in self.readable()), default=0)

    def show(self) -> str:
        """Return a description for whoever analyses a failure."""
        lines = [f"status {self.status}", f"verdict {self.verdict}"]
        for pod in self.pods.values():
            state = pod.state
            lines.append(
                f"{pod.uid} alive={pod.alive} frozen={pod.frozen} proved={pod.proved} exit={pod.exit_code}"
                f" accepted={state.accepted} started={state.started} world={state.world and state.world.attempt_id}"
                f" ranks={state.ranks} {state.phase}: {state.message}"
            )
        return "\n".join(lines)


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _world(world: World | None) -> operator_reports.World | None:
    if world is None:
        return None
    members = tuple(member.pod_uid for member in world.members)
    attempt_id = operator_ids.AttemptId(generation=world.attempt_id.generation, attempt=world.attempt_id.attempt)
    return operator_reports.World(
        attempt_id=attempt_id, publication=world.publication, members=members, coordinator=""
    )


_SETTINGS: dict[str, Any] = {
    "minReplicas": 1,
    "replicaStep": 1,
    "onFailure": "Shrink",
    "replicas": 1,
    "processesPerWorker": 1,
    "heartbeatSeconds": 0.25,
    "deadAfterSeconds": 1.0,
    "firstAttemptWaitSeconds": 30.0,
    "startupDeadlineSeconds": 300.0,
    "checkpoint": {"interval": "50", "keepLast": 3, "resume": "Always", "deadlineSeconds": 25.0},
    "budgets": [],
    "backoff": {"initialSeconds": 1.0, "maxSeconds": 60.0},
}


def _wire(status: operator_status.Membership, job: str) -> dict[str, Any]:
    return {
        "version": 1,
        "job": {"namespace": "ml", "name": "gpt", "uid": job, "runId": "gpt"},
        **status.to_json(),
        "restarts": {},
        "settings": dict(_SETTINGS),
        "jobKey": "ab",
    }
