"""Pods, their launchers, and the messages between them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from holdfast.checkpoint.policy import fencing
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.protocol import Cause
from holdfast.launcher.host.run_dir import STATUS_FILE, write_json
from holdfast.launcher.membership import events, state_machine
from holdfast.launcher.membership.document import Rules
from holdfast.launcher.membership.messages import Failure, Master, Message, Priority, World
from holdfast.launcher.membership.quorum import NOTHING, WeakenedQuorum
from holdfast.launcher.membership.state import State
from holdfast.launcher.ranks.progress import Progress
from holdfast.launcher.status import status_document as report
from holdfast.launcher.status.recovered_state import remembered
from holdfast.launcher.status.status_document import Identity
from holdfast.training.protocol import step_commit
from holdfast_operator.api import status as operator_status
from holdfast_operator.decision.membership import candidates as policy
from holdfast_operator.views import reports as operator_reports

JOB = "job-a"


Lineage = tuple[AttemptId, ...]


class ViolationError(AssertionError):
    """An invariant of the protocol does not hold."""


@dataclass
class Process:
    """A rank process, its state and its rank state. A `hung` process does not report that it leaves, and is
    killed."""

    rank_state: step_commit.RankState = field(default_factory=step_commit.RankState)
    line: Lineage = ()
    origin: AttemptId | None = None
    claimed: int | None = None
    hung: bool = False

    def apply(self) -> None:
        """Apply the prepared step."""
        assert self.rank_state.prepared_step is not None
        self.origin = self.rank_state.prepared_step.attempt_id
        self.line = (*self.line, self.origin)


@dataclass
class Training:
    """The rank processes of one started world."""

    world: World
    alive: set[str] = field(default_factory=set)
    base: Lineage | None = None
    source: AttemptId | None = None
    prepared: set[str] = field(default_factory=set)
    applied: set[str] = field(default_factory=set)
    from_attempt_id: AttemptId | None = None
    claim: Claim | None = None
    checked: bool = False
    steps: Lineage = ()
    saved: int = 0
    in_flight: Lineage | None = None
    quiesce: bool = False
    commit: bool = False
    quiesced: bool = False
    restored: int = 0
    made: bool = False
    finished: set[str] = field(default_factory=set)
    told: set[tuple[str, str]] = field(default_factory=set)

    @property
    def writer(self) -> str:
        """The pod whose rank 0 writes claims and manifests."""
        return self.world.members[0].pod_uid


@dataclass
class Stored:
    """A checkpoint on the tier, with the steps that it contains."""

    commit: fencing.Commit
    lineage: Lineage


@dataclass
class Pod:
    """A pod of the cluster."""

    uid: str
    node: str
    state: State
    alive: bool = True
    frozen: bool = False
    leaving: bool = False
    trained: AttemptId | None = None
    exit_code: int | None = None
    proved: bool = False
    training: Training | None = None
    process: Process | None = None
    local: list[events.Event] = field(default_factory=list)
    kept_stacks: list[events.KeepStacks] = field(default_factory=list)
    view: dict[str, bool] = field(default_factory=dict)
    served: int = 0
    report: operator_reports.Report | None = None
    reported_at: float = -1e9
    ready_since: float = 0.0


@dataclass
class Letter:
    """A message in transit."""

    sender: str
    to: str
    message: Message


class SimulatedCluster:
    """Launchers: feed their state machines, and execute the actions."""

    def __init__(
        self,
        replicas: int = 3,
        *,
        min_replicas: int = 1,
        may_shrink: bool = True,
        replica_step: int = 1,
        last_step: int = 1000,
        weakened: WeakenedQuorum = NOTHING,
        ignore_claims: bool = False,
        replace_lost: bool = True,
        operator: bool = True,
        job: str = JOB,
        budgets: tuple[Any, ...] = (),
        pods_per_node: int = 1,
        keeps: bool = True,
        shrink_after: float = 0.0,
    ) -> None:
        self.rules = Rules(
            shrink_after=shrink_after,
            replicas=replicas,
            min_replicas=min_replicas,
            may_shrink=may_shrink,
            replica_step=replica_step,
            first_attempt_wait=3.0,
            checkpoint_deadline=5.0,
            accept_deadline=2.0,
            never_accepted_wait=5.0,
            backoff_initial=0.5,
            backoff_max=2.0,
            budgets=budgets,
        )
        self.job, self.last_step, self.pods_per_node = job, last_step, pods_per_node
        self.weakened, self.ignore_claims = weakened, ignore_claims
        self.keeps = keeps
        self.replace_lost, self.operator_up = replace_lost, operator
        self.now = 1000.0
        self.pods: dict[str, Pod] = {}
        self.mail: list[Letter] = []
        self.cut_links: set[frozenset[str]] = set()
        self.cut_from_operator: set[str] = set()
        self.deaf: set[str] = set()
        self.withheld: set[tuple[str, str]] = set()  # senders and types of messages that stay in transit
        self.trainings: list[Training] = []
        self.claims: dict[AttemptId, Claim] = {}
        self.commits: list[Stored] = []
        self.bases: dict[AttemptId, Lineage] = {}
        self.status: operator_status.Membership | None = None
        self.verdict: policy.Publication | policy.Wait | None = None
        self.announced: list[tuple[AttemptId, Lineage]] = []
        self.publications = 0
        self.backups_restored = 0
        self.old_line: Lineage = ()
        self.backup: operator_status.Membership | None = None
        self.incarnation = 0
        for _ in range(replicas):
            self.new_pod()

    # The cluster

    def new_pod(self) -> Pod:
        """Create a pod under a new name with its launcher ready."""
        uid = f"w{self.incarnation}"
        node = f"node-{self.incarnation // self.pods_per_node}"
        self.incarnation += 1
        pod = Pod(uid=uid, node=node, state=State(me=uid), ready_since=self.now)
        self.pods[uid] = pod
        self.feed(pod, events.Ready())
        return pod

    def alive(self) -> list[Pod]:
        """Return the pods whose launcher runs."""
        return [pod for pod in self.pods.values() if pod.alive]

    def crash(self, uid: str) -> None:
        """Stop the launcher and its ranks without a message."""
        pod = self.pods[uid]
        pod.alive = False
        self._end_ranks(pod)
        pod.process = None

    def freeze(self, uid: str) -> None:
        """Stop the complete pod, which looks like a dead one."""
        self.pods[uid].frozen = True

    def thaw(self, uid: str) -> None:
        """Let the pod continue where it stopped."""
        self.pods[uid].frozen = False

    def kill_rank(
        self,
        uid: str,
        cause: Cause = Cause.INFRASTRUCTURE,
        priority: Priority = Priority.KILLED,
        *,
        mistake: str = "",
        reason: str = "RankEnded",
    ) -> None:
        """Kill a rank process whose launcher lives. If the rank waits for a world, this has no effect on others."""
        pod = self.pods[uid]
        if pod.training is None:
            pod.process = None
        if pod.training is None or uid not in pod.training.alive:
            return
        attempt_id = pod.training.world.attempt_id
        pod.training.alive.discard(uid)
        pod.process = None
        failure = Failure(
            cause=cause, reason=reason, message="ended", priority=priority, exit_code=1, mistake=mistake
        )
        pod.local.append(events.RankFailed(attempt_id=attempt_id, failure=failure))

    def restart(self, uid: str) -> None:
        """Stop a launcher and its ranks without a message. A new launcher starts in the pod from the saved status."""
        pod = self.pods[uid]
        if not pod.alive or pod.frozen:
            return
        self._end_ranks(pod)
        pod.process, pod.local, pod.view, pod.served = None, [], {}, 0
        self.mail = [letter for letter in self.mail if uid not in (letter.sender, letter.to)]
        with tempfile.TemporaryDirectory() as folder:
            identity = Identity(pod_uid=uid, pod=uid, node=pod.node)
            write_json(Path(folder) / STATUS_FILE, _status_of(identity, pod.state))
            pod.state = remembered(Path(folder), identity)
        for other in self.alive():
            if other.view.pop(uid, False):
                self.feed(other, events.PeerDown(pod_uid=uid, how=events.How.CLOSED))
        self.feed(pod, events.Ready())

    def hang(self, uid: str) -> None:
        """Let a rank process ignore requests to leave."""
        process = self.pods[uid].process
        if process is not None:
            process.hung = True

    def cut(self, left: Iterable[str], right: Iterable[str]) -> None:
        """Separate two sides of the network."""
        rights = list(right)
        self.cut_links |= {frozenset((a, b)) for a in left for b in rights if a != b}

    def heal(self) -> None:
        """Restore all links and nodes."""
        self.cut_links.clear()
        self.cut_from_operator.clear()
        for pod in self.alive():
            pod.frozen = False

    def scale(self, replicas: int) -> None:
        """Change `replicas`. The operator orders the surplus workers to leave."""
        self.rules = replace(self.rules, replicas=replicas, min_replicas=min(self.rules.min_replicas, replicas))
        for pod in self.alive()[replicas:]:
            if not pod.frozen:
                self.feed(pod, events.DrainRequested(id=f"scale-{replicas}", reason="scaled down", cause=None))

    def drain(self, uid: str) -> None:
        """Notify the pod that it must leave."""
        pod = self.pods[uid]
        if pod.alive and not pod.frozen:
            self.feed(pod, events.DrainRequested(id=f"notice-{uid}", reason="spot notice"))

    def notice(self, uid: str) -> None:
        """Notify one pod that its node is removed."""
        pod = self.pods[uid]
        if pod.alive and not pod.frozen:
            asked = events.DrainRequested(id=f"spot-{pod.node}", reason=f"{pod.node} goes", node=pod.node)
            self.feed(pod, asked)

    def miss(self, uid: str, lost: str) -> None:
        """Let one launcher lose contact with another for a moment, which is starved but not dead."""
        if self.pods[uid].view.get(lost):
            self.pods[uid].view[lost] = False
            self.feed(self.pods[uid], events.PeerDown(pod_uid=lost, how=events.How.SILENT))

    def linked(self, a: str, b: str) -> bool:
        """Return whether two launchers can exchange bytes."""
        one, two = self.pods.get(a), self.pods.get(b)
        if one is None or two is None or frozenset((a, b)) in self.cut_links:
            return False
        return one.alive and two.alive and not one.frozen and not two.frozen

    # Launchers

    def feed(self, pod: Pod, event: events.Event) -> None:
        """Run one step of a launcher, and execute its actions."""
        if not pod.alive or pod.frozen:
            return
        decision = state_machine.step(pod.state, event, self.now, self.weakened)
        pod.state = decision.state
        for action in decision.actions:
            self._act(pod, action)

    def _act(self, pod: Pod, action: events.Action) -> None:
        match action:
            case events.Send():
                self.mail.append(Letter(pod.uid, action.to, action.message))
            case events.OpenStore():
                pod.local.append(
                    events.StoreOpened(attempt_id=action.attempt_id, master=Master(host=pod.uid, port=1))
                )
            case events.StartRanks():
                pod.trained = action.trained
                self._start_ranks(pod, action.world)
            case events.StopRanks():
                pod.local.append(events.RanksEnded(attempt_id=action.attempt_id))
            case events.QuiesceRanks():
                if pod.training is not None and pod.training.world.attempt_id == action.attempt_id:
                    pod.training.quiesce = True
                    pod.training.commit |= action.commit
            case events.KeepStacks():
                pod.kept_stacks.append(action)
            case events.Exit():
                self._exit(pod, action.code)

    def _start_ranks(self, pod: Pod, world: World) -> None:
        if pod.training is not None:
            raise ViolationError(
                f"{pod.uid} starts ranks of {world.attempt_id} beside {pod.training.world.attempt_id}"
            )
        training = next(
            (t for t in self.trainings if t.world.attempt_id == world.attempt_id and t.world == world), None
        )
        for other in self.trainings:
            same = other.world.attempt_id == world.attempt_id and other.world.publication == world.publication
            if same and other.world != world:
                raise ViolationError(f"two worlds with one attempt ID {world.attempt_id}")
        if training is None:
            training = Training(world=world)
            self.trainings.append(training)
        training.alive.add(pod.uid)
        pod.training = training
        pod.process = pod.process or Process()
        whole = [t.world.attempt_id for t in self.trainings if t.alive == t.world.uids]
        if len(whole) > 1 and not self.backups_restored:
            raise ViolationError(f"two worlds at once: {whole}")

    def _end_ranks(self, pod: Pod) -> None:
        """End the votes of these ranks in their world. Processes that report their exit from it are kept."""
        if pod.training is not None:
            pod.training.alive.discard(pod.uid)
            pod.training = None
        if pod.process is not None and (pod.process.hung or not self.keeps):
            pod.process = None

    def _exit(self, pod: Pod, code: int) -> None:
        if pod.training is not None and pod.uid in pod.training.alive and code != 0:
            raise ViolationError(f"{pod.uid} exits with its ranks alive")
        if code == 0 and pod.state.complete is not None:
            self._announce(pod.state.complete)
        pod.alive, pod.exit_code = False, code
        self._end_ranks(pod)
        pod.process = None

    def shell(self, pod: Pod) -> None:
        """Deliver the oldest local event to a launcher."""
        if not pod.alive or pod.frozen or not pod.local:
            return
        event = pod.local.pop(0)
        ended = isinstance(event, events.RanksEnded) and pod.training is not None
        if ended and pod.training.world.attempt_id <= event.attempt_id:
            self._end_ranks(pod)
        self.feed(pod, event)

    def look(self, pod: Pod) -> None:
        """Deliver changes of the peers' reachability to a launcher."""
        if not pod.alive or pod.frozen:
            return
        for uid in list(self.pods):
            other = self.pods[uid]
            if uid == pod.uid:
                continue
            wanted = uid in state_machine.contacts(pod.state) or pod.uid in state_machine.contacts(other.state)
            up = wanted and self.linked(pod.uid, uid)
            if up and not pod.view.get(uid):
                pod.view[uid] = True
                self.feed(pod, events.PeerUp(pod_uid=uid))
            elif not up and pod.view.get(uid):
                pod.view[uid] = False
                how = events.How.CLOSED if not other.alive else events.How.SILENT
                self.feed(pod, events.PeerDown(pod_uid=uid, how=how))
            elif not up and wanted and uid not in pod.view:
                pod.view[uid] = False
                self.feed(pod, events.PeerDown(pod_uid=uid, how=events.How.REFUSED))

    def deliver(self, place: int) -> None:
        """Deliver one message, if possible. No order is guaranteed."""
        if not self.mail:
            return
        letter = self.mail.pop(place % len(self.mail))
        if (letter.sender, letter.message.type) in self.withheld:
            self.mail.append(letter)
            return
        if self.linked(letter.sender, letter.to) or self._left(letter):
            target = self.pods[letter.to]
            deaf = letter.to in self.deaf and letter.message.type == "propose"
            if target.alive and not target.frozen and not deaf:
                self._watch(letter)
                self.feed(target, events.Received(sender=letter.sender, message=letter.message))

    def deliver_all(self) -> None:
        """Deliver all messages in transit, in order."""
        for _ in range(len(self.mail)):
            self.deliver(0)


def _status_of(identity: Identity, state: State) -> dict[str, Any]:
    return report.status(
        identity=identity,
        state=state,
        ranks=(),
        progress=Progress(),
        control_port=1,
        store_port=1,
        notices=(),
        ending=None,
    )
