"""Launchers, an operator and a shared tier in one process, driven by the production transitions.

Each launcher is `holdfast.launcher.membership.state_machine.step`, the operator is
`holdfast_operator.decision.membership.rules.decide`, and restoring goes by `holdfast.checkpoint.policy.fencing`.
Everything between them (channels, sidecars, rank processes, time) is played here and can be cut, delayed, re-ordered,
frozen or killed. The invariants are checked at every write. A rank process outlives its attempts, as in the product:
what its state is worth is judged by `holdfast.training.protocol.step_commit`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from holdfast.checkpoint.policy import fencing
from holdfast.core.attempt import AttemptId, Claim, highest
from holdfast.core.protocol import Cause
from holdfast.launcher.host.run_dir import STATUS_FILE, write_json
from holdfast.launcher.membership import events, quorum, state_machine
from holdfast.launcher.membership.document import Membership, Rules
from holdfast.launcher.membership.messages import Failure, Master, Message, Priority, World
from holdfast.launcher.membership.quorum import NOTHING, Weakened
from holdfast.launcher.membership.state import State
from holdfast.launcher.ranks.progress import Progress
from holdfast.launcher.status import status_document as report
from holdfast.launcher.status.recovered_state import remembered
from holdfast.launcher.status.status_document import Identity
from holdfast.training.protocol import step_commit
from holdfast_operator.api import ids as operator_ids
from holdfast_operator.api import status as operator_status
from holdfast_operator.decision.membership import candidates as policy
from holdfast_operator.decision.membership import rules as policy_rules
from holdfast_operator.views import reports as operator_reports

JOB = "job-a"
Lineage = tuple[AttemptId, ...]


class ViolationError(AssertionError):
    """An invariant of the protocol does not hold."""


@dataclass
class Process:
    """A rank process: its state, and what that is worth. `hung`: it does not say that it leaves, and is killed."""

    standing: step_commit.RankState = field(default_factory=step_commit.RankState)
    line: Lineage = ()
    origin: AttemptId | None = None
    claimed: int | None = None
    hung: bool = False

    def apply(self) -> None:
        """The step in doubt is made."""
        assert self.standing.doubt is not None
        self.origin = self.standing.doubt.pair
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
    from_pair: AttemptId | None = None
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
    """A commit on the tier, with the line of steps that it stands for."""

    commit: fencing.Commit
    lineage: Lineage


@dataclass
class Pod:
    """A pod as the cluster has it."""

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
    """A message under way."""

    sender: str
    to: str
    message: Message


class Simulation:
    """The whole job. `round()` is one fair turn of everything; the single turns are there for disorder."""

    def __init__(
        self,
        replicas: int = 3,
        *,
        min_replicas: int = 1,
        may_shrink: bool = True,
        replica_step: int = 1,
        last_step: int = 1000,
        weakened: Weakened = NOTHING,
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
        self.withheld: set[tuple[str, str]] = set()  # senders and types of messages that stay under way
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
        """A pod under a name that was never used, with its launcher ready."""
        uid = f"w{self.incarnation}"
        node = f"node-{self.incarnation // self.pods_per_node}"
        self.incarnation += 1
        pod = Pod(uid=uid, node=node, state=State(me=uid), ready_since=self.now)
        self.pods[uid] = pod
        self.feed(pod, events.Ready())
        return pod

    def alive(self) -> list[Pod]:
        """Pods whose launcher runs."""
        return [pod for pod in self.pods.values() if pod.alive]

    def crash(self, uid: str) -> None:
        """Launcher and ranks are gone without a word."""
        pod = self.pods[uid]
        pod.alive = False
        self._end_ranks(pod)
        pod.process = None

    def freeze(self, uid: str) -> None:
        """The whole pod stops; nobody can tell it from a dead one."""
        self.pods[uid].frozen = True

    def thaw(self, uid: str) -> None:
        """It goes on where it stopped."""
        self.pods[uid].frozen = False

    def kill_rank(
        self,
        uid: str,
        cause: Cause = Cause.INFRASTRUCTURE,
        priority: Priority = Priority.KILLED,
        *,
        mistake: str = "",
    ) -> None:
        """A rank process dies; its launcher lives. If it waits for a world, nobody minds."""
        pod = self.pods[uid]
        if pod.training is None:
            pod.process = None
        if pod.training is None or uid not in pod.training.alive:
            return
        pair = pod.training.world.pair
        pod.training.alive.discard(uid)
        pod.process = None
        failure = Failure(
            cause=cause, reason="RankEnded", message="ended", priority=priority, exit_code=1, mistake=mistake
        )
        pod.local.append(events.RankFailed(pair=pair, failure=failure))

    def restart(self, uid: str) -> None:
        """A launcher ends without a word, its ranks with it; another starts in the pod, with what the status says."""
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
        """A rank process will not leave when it is asked to."""
        process = self.pods[uid].process
        if process is not None:
            process.hung = True

    def cut(self, left: Iterable[str], right: Iterable[str]) -> None:
        """A partition between two sides."""
        rights = list(right)
        self.cut_links |= {frozenset((a, b)) for a in left for b in rights if a != b}

    def heal(self) -> None:
        """All links and nodes work again."""
        self.cut_links.clear()
        self.cut_from_operator.clear()
        for pod in self.alive():
            pod.frozen = False

    def scale(self, replicas: int) -> None:
        """Somebody changes `replicas`; the operator orders the surplus to leave."""
        self.rules = replace(self.rules, replicas=replicas, min_replicas=min(self.rules.min_replicas, replicas))
        for pod in self.alive()[replicas:]:
            if not pod.frozen:
                self.feed(pod, events.DrainAsked(id=f"scale-{replicas}", reason="scaled down", cause=None))

    def drain(self, uid: str) -> None:
        """A notice: the pod must leave."""
        pod = self.pods[uid]
        if pod.alive and not pod.frozen:
            self.feed(pod, events.DrainAsked(id=f"notice-{uid}", reason="spot notice"))

    def notice(self, uid: str) -> None:
        """The cloud says to one pod that its node goes."""
        pod = self.pods[uid]
        if pod.alive and not pod.frozen:
            asked = events.DrainAsked(id=f"spot-{pod.node}", reason=f"{pod.node} goes", node=pod.node)
            self.feed(pod, asked)

    def miss(self, uid: str, lost: str) -> None:
        """For a moment one launcher hears nothing of another, which lives: starved, not dead."""
        if self.pods[uid].view.get(lost):
            self.pods[uid].view[lost] = False
            self.feed(self.pods[uid], events.PeerDown(pod_uid=lost, how=events.How.SILENT))

    def linked(self, a: str, b: str) -> bool:
        """Whether bytes can go between two launchers."""
        one, two = self.pods.get(a), self.pods.get(b)
        if one is None or two is None or frozenset((a, b)) in self.cut_links:
            return False
        return one.alive and two.alive and not one.frozen and not two.frozen

    # Launchers

    def feed(self, pod: Pod, event: events.Event) -> None:
        """One step of a launcher, and the shell's part of its actions."""
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
                pod.local.append(events.StoreOpened(pair=action.pair, master=Master(host=pod.uid, port=1)))
            case events.StartRanks():
                pod.trained = action.trained
                self._start_ranks(pod, action.world)
            case events.StopRanks():
                pod.local.append(events.RanksEnded(pair=action.pair))
            case events.QuiesceRanks():
                if pod.training is not None and pod.training.world.pair == action.pair:
                    pod.training.quiesce = True
                    pod.training.commit |= action.commit
            case events.KeepStacks():
                pod.kept_stacks.append(action)
            case events.Exit():
                self._exit(pod, action.code)

    def _start_ranks(self, pod: Pod, world: World) -> None:
        if pod.training is not None:
            raise ViolationError(f"{pod.uid} starts ranks of {world.pair} beside {pod.training.world.pair}")
        training = next((t for t in self.trainings if t.world.pair == world.pair and t.world == world), None)
        for other in self.trainings:
            same = other.world.pair == world.pair and other.world.publication == world.publication
            if same and other.world != world:
                raise ViolationError(f"two worlds with one pair {world.pair}")
        if training is None:
            training = Training(world=world)
            self.trainings.append(training)
        training.alive.add(pod.uid)
        pod.training = training
        pod.process = pod.process or Process()
        whole = [t.world.pair for t in self.trainings if t.alive == t.world.uids]
        if len(whole) > 1 and not self.backups_restored:
            raise ViolationError(f"two worlds at once: {whole}")

    def _end_ranks(self, pod: Pod) -> None:
        """From here on they vote in that world no more; they are kept, if they said so."""
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
        """The oldest thing that the shell of a launcher has to tell it."""
        if not pod.alive or pod.frozen or not pod.local:
            return
        event = pod.local.pop(0)
        ended = isinstance(event, events.RanksEnded) and pod.training is not None
        if ended and pod.training.world.pair <= event.pair:
            self._end_ranks(pod)
        self.feed(pod, event)

    def look(self, pod: Pod) -> None:
        """A launcher's channels tell it who is there."""
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
        """Some message arrives, if it can; the order is nobody's promise."""
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
        """All that is under way arrives, in order."""
        for _ in range(len(self.mail)):
            self.deliver(0)

    def _left(self, letter: Letter) -> bool:
        """Bytes that were flushed before an exit still arrive."""
        sender = self.pods[letter.sender]
        return sender.exit_code is not None and frozenset((letter.sender, letter.to)) not in self.cut_links

    def _watch(self, letter: Letter) -> None:
        """Completion is said of one line only."""
        if letter.message.type == "complete":
            self._announce(letter.message.pair)

    def _announce(self, pair: AttemptId) -> None:
        training = next(t for t in self.trainings if t.world.pair == pair)
        line = training.steps
        if len(line) < self.last_step:
            raise ViolationError(f"{pair} is announced complete at step {len(line)}")
        if any(other != line for _, other in self.announced):
            raise ViolationError(f"completion said of two lines: {self.announced} and {pair}")
        if (pair, line) not in self.announced:
            self.announced.append((pair, line))

    # Rank processes

    def together(self, training: Training) -> bool:
        """Whether all ranks of the world can reach each other now."""
        uids = training.world.uids
        if training.alive | training.finished != uids or any(self.pods[uid].frozen for uid in uids):
            return False
        return all(self.linked(a, b) for a in uids for b in uids if a < b)

    def train(self, training: Training) -> None:
        """One more thing that the rank processes of a world do."""
        if not self.together(training):
            self._miss_peers(training)
        elif training.base is None:
            self._restore(training)
        elif training.claim is None:
            self._claim(training)
        elif not training.checked:
            self._check_again(training)
        elif training.prepared:
            self._step(training)
        elif training.in_flight is not None:
            self.land(training)
        elif len(training.steps) >= self.last_step and training.saved == len(training.steps):
            self._finish(training)
        elif (
            training.quiesce
            and not training.quiesced
            and (training.saved == len(training.steps) or self._stops(training))
        ):
            self._quiesced(training)
        elif self._is_due(training):
            self._save(training)
        elif not training.quiesced:
            self._step(training)

    def _stops(self, training: Training) -> bool:
        """Whether the last step need not be committed."""
        return self.keeps and not training.commit

    def _is_due(self, training: Training) -> bool:
        step = len(training.steps)
        due = training.commit or step % 2 == 0 or step >= self.last_step
        return step > training.saved and due

    def _claims(self) -> tuple[Claim, ...]:
        return () if self.ignore_claims else tuple(self.claims.values())

    def _foreign(self, training: Training) -> bool:
        known = self.pods[training.writer].state.membership
        claims = fencing.foreign(
            self.claims.values(),
            known=known.claims if known else (),
            job_uid=self.job,
            pair=training.world.pair,
            publication=training.world.publication,
        )
        if claims:
            self.pods[training.writer].local.append(
                events.ForeignClaims(pair=training.world.pair, claims=tuple(claims))
            )
            training.alive.discard(training.writer)
        return bool(claims)

    def _restore(self, training: Training) -> None:
        """All show what their state is worth; one goes on, and is everyone's then."""
        pair = training.world.pair
        processes = [self._process(member.pod_uid) for member in training.world.members]
        verdict = step_commit.resolve([process.standing for process in processes])
        inherits = fencing.inherits(
            pair,
            synced=None if verdict.donor is None else processes[verdict.donor].standing.synced,
            claimed=[processes[rank].claimed for rank in verdict.survivors],
            trained=[self.pods[member.pod_uid].trained for member in training.world.members],
        )
        for process in processes:
            process.claimed = pair.generation if inherits else None
        if not inherits:
            if self._foreign(training):
                return
            newest = self._newest()
            commit = None if newest is None else newest.commit.pair
            verdict = step_commit.resolve([process.standing for process in processes], commit)
        if verdict.donor is None:
            self._from_checkpoint(training, processes)
        else:
            self._from_memory(training, processes, verdict)
            training.claim = self._inherited(pair) if inherits else None
            training.checked = inherits

    def _process(self, uid: str) -> Process:
        process = self.pods[uid].process
        if process is None:
            raise ViolationError(f"{uid} is in a world without a process")
        return process

    def _newest(self) -> Stored | None:
        order = fencing.order([s.commit for s in self.commits], self._claims(), job_uid=self.job)
        return next((s for s in self.commits if order and s.commit == order[0]), None)

    def _inherited(self, pair: AttemptId) -> Claim:
        mine = [c for c in self.claims.values() if c.job_uid == self.job and c.pair.generation == pair.generation]
        if not mine:
            raise ViolationError(f"{pair} goes on without any claim of its generation")
        return max(mine)

    def _from_memory(self, training: Training, processes: list[Process], verdict: step_commit.Resolution) -> None:
        pair = training.world.pair
        for rank in verdict.survivors:
            process = processes[rank]
            if process.standing.in_doubt and verdict.apply:
                process.apply()
            process.standing = step_commit.synchronised(process.standing, pair, verdict.step, verdict.voted)
        donor = processes[verdict.survivors[0]]
        lines = {processes[rank].line for rank in verdict.survivors}
        if lines != {donor.line} or len(donor.line) != verdict.step:
            raise ViolationError(f"survivors of {verdict.voted} differ in {pair}: {lines}")
        for rank in verdict.newcomers:
            process = processes[rank]
            process.standing = step_commit.synchronised(
                step_commit.torn(process.standing), pair, verdict.step, verdict.voted
            )
            process.line, process.origin = donor.line, donor.origin
        training.source = verdict.voted
        self._go_on(training, donor.line, donor.origin)
        for before in self.trainings:
            if before.world.pair == verdict.voted and before.steps != donor.line[: len(before.steps)]:
                raise ViolationError(f"{pair} lost a step that {verdict.voted} made")

    def _from_checkpoint(self, training: Training, processes: list[Process]) -> None:
        best = self._newest()
        line, origin = (best.lineage, best.commit.pair) if best else ((), None)
        for process in processes:
            process.line, process.origin = line, origin
            process.standing = step_commit.synchronised(
                step_commit.torn(process.standing), training.world.pair, len(line), None
            )
        self._go_on(training, line, origin)
        training.saved = len(line)

    def _go_on(self, training: Training, line: Lineage, origin: AttemptId | None) -> None:
        training.base = training.steps = line
        training.restored = len(line)
        training.claim, training.from_pair = None, origin
        training.saved = max((s.commit.step for s in self.commits if s.lineage == line), default=0)

    def _claim(self, training: Training) -> None:
        pair = training.world.pair
        base = training.base or ()
        claim = Claim(
            pair=pair,
            job_uid=self.job,
            publication=training.world.publication,
            from_step=len(base),
            from_pair=training.from_pair,
        )
        if pair in self.claims:
            self._foreign(training)
            return
        self.claims[pair] = claim
        self.bases[pair] = base
        training.claim = claim
        for uid in training.world.uids:
            self._process(uid).claimed = pair.generation
        self.check_line()

    def _check_again(self, training: Training) -> None:
        training.checked = not self._foreign(training)

    def _step(self, training: Training) -> None:
        for uid in sorted(training.world.uids):
            self.prepare(training, uid)
        for uid in sorted(training.world.uids):
            self.vote_returns(training, uid)

    def may_step(self, training: Training) -> bool:
        """Whether its members are at their work."""
        more = len(training.steps) < self.last_step or bool(training.prepared)
        return training.checked and more and not (training.quiesced or training.finished) and self.together(training)

    def prepare(self, training: Training, uid: str) -> None:
        """The averages of the next step are whole at one member, and it votes."""
        pair, process = training.world.pair, self._process(uid)
        higher = [t for t in self.trainings if t.made and t.world.pair > pair]
        if higher and not self.backups_restored:
            raise ViolationError(f"{pair} makes a step after {higher[0].world.pair} did")
        if self.announced:
            raise ViolationError(f"{pair} makes a step after completion was announced")
        if uid not in training.prepared:
            training.prepared.add(uid)
            process.standing = step_commit.voted(step_commit.prepared(process.standing, pair), pair)

    def vote_returns(self, training: Training, uid: str) -> None:
        """It can, once all have voted; also when others are dead by then, but never to one that has left."""
        pod, pair = self.pods[uid], training.world.pair
        if training.prepared != training.world.uids or uid in training.applied or uid not in training.alive:
            return
        if not pod.alive or pod.frozen or pod.process is None:
            return
        pod.process.apply()
        pod.process.standing = step_commit.committed(pod.process.standing)
        training.applied.add(uid)
        training.made, training.steps = True, pod.process.line
        for later in self.trainings:
            if (
                later.source == pair
                and later.base is not None
                and later.base[: len(training.steps)] != training.steps
            ):
                raise ViolationError(f"the vote of {pair} returned, and {later.world.pair} went on without the step")
        pod.local.append(events.StepMade(pair=pair, step=len(training.steps), restored=training.restored))
        if training.applied == training.world.uids:
            training.prepared, training.applied = set(), set()

    def _save(self, training: Training) -> None:
        """What was applied from a doubt leaves memory only after a later vote, be it one on nothing else."""
        if not training.made:
            for uid in training.world.uids:
                process = self._process(uid)
                process.standing = replace(process.standing, voted=training.world.pair)
        training.in_flight = training.steps

    def land(self, training: Training) -> None:
        """A commit's manifest is renamed into place; maybe long after its writers died."""
        if training.in_flight is None:
            return
        line = training.in_flight
        training.in_flight = None
        if len(line) > training.saved:
            training.saved = len(line)
            commit = fencing.Commit(step=len(line), pair=training.world.pair, job_uid=self.job)
            self.commits.append(Stored(commit, line))
            self.check_line()

    def _quiesced(self, training: Training) -> None:
        training.quiesced = True
        for uid in training.world.uids:
            self.pods[uid].local.append(events.Quiesced(pair=training.world.pair))

    def _finish(self, training: Training) -> None:
        for uid in sorted(training.world.uids):
            if uid not in training.finished:
                training.finished.add(uid)
                self._end_ranks(self.pods[uid])
                self.pods[uid].process = None
                self.pods[uid].local.append(events.LocalDone(pair=training.world.pair))
                return

    def _miss_peers(self, training: Training) -> None:
        for uid in sorted(training.alive):
            pod = self.pods[uid]
            if pod.frozen or (uid, "peer") in training.told or not self._others_started(training):
                continue
            training.told.add((uid, "peer"))
            failure = Failure(
                cause=Cause.INFRASTRUCTURE, reason="PeerLost", message="peer", priority=Priority.PEER_LOST
            )
            pod.local.append(events.RankFailed(pair=training.world.pair, failure=failure))

    def _others_started(self, training: Training) -> bool:
        """A rank waits for peers that have not started yet; one that was there and is gone is an error."""
        return training.base is not None

    # The tier

    def readable(self) -> list[Stored]:
        """What a restore may read, newest first."""
        claims = self._claims()
        return [s for s in self.commits if fencing.readable(s.commit, claims, job_uid=self.job).ok]

    def check_line(self) -> None:
        """All that is readable is one line, and every later claim went on from it."""
        readable = self.readable()
        for one in readable:
            for two in readable:
                shorter, longer = sorted((one.lineage, two.lineage), key=len)
                if longer[: len(shorter)] != shorter:
                    raise ViolationError(f"two lines can be read: {one.commit} and {two.commit}")
            for pair, base in self.bases.items():
                if one.commit.pair < pair and base[: len(one.lineage)] != one.lineage:
                    raise ViolationError(f"the zombie's commit {one.commit} is readable beside {pair}")

    # What was there before, and comes back

    def find_old_job(self, pair: AttemptId, steps: int) -> None:
        """The folder is an old one: another job claimed and committed there, and may still be alive somewhere."""
        self.old_line = (pair,) * steps
        self.claims[pair] = Claim(pair=pair, job_uid="old", publication="old", from_step=0)
        self.commits.append(Stored(fencing.Commit(step=steps, pair=pair, job_uid="old"), self.old_line))

    def old_job_commits(self) -> None:
        """A zombie of the old job commits one more step."""
        if self.old_line:
            pair = self.old_line[-1]
            self.old_line = (*self.old_line, pair)
            commit = fencing.Commit(step=len(self.old_line), pair=pair, job_uid="old")
            self.commits.append(Stored(commit, self.old_line))
            self.check_line()

    def old_job_claims(self, pair: AttemptId) -> None:
        """A zombie of the old job opens an attempt, without having seen us."""
        if self.old_line and pair > self.old_line[-1] and pair not in self.claims:
            self.claims[pair] = Claim(
                pair=pair,
                job_uid="old",
                publication="old",
                from_step=len(self.old_line) - 1,
                from_pair=self.old_line[-1],
            )
            self.old_line = (*self.old_line[:-1], pair)
            self.check_line()

    def restore_backup(self) -> None:
        """The cluster's state is put back to what it was at the last `keep_backup`."""
        if self.backup is not None:
            self.status, self.backups_restored = self.backup, self.backups_restored + 1
            for pod in self.pods.values():
                pod.served = -1

    def keep_backup(self) -> None:
        """Somebody makes a backup of the cluster."""
        self.backup = self.status

    # The operator and the sidecars

    def report(self, pod: Pod) -> None:
        """The sidecar of a pod reports, if it can."""
        if not pod.alive or pod.frozen or pod.uid in self.cut_from_operator:
            return
        state = pod.state
        mine = [c for c in self.claims.values() if pod.training and c == pod.training.claim]
        pod.report = operator_reports.Report(
            pod_uid=pod.uid,
            received_at=_time(self.now),
            has_launcher=True,
            ready=state.ready,
            accepted=_pair(state.accepted),
            started=_pair(state.started),
            world=_world(state.world),
            lost_members=tuple(uid for uid, _, _ in state_machine.lost_members(state)),
            conflict=state.conflict or 0,
            highest_claim=_claim(mine[0]) if mine else None,
            foreign_claims=tuple(_claim(c) for c in state.foreign),
        )
        pod.reported_at = self.now

    def decide(self) -> None:
        """One pass of the operator."""
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
        """The operator learns that a dead pod is dead. Never true of a living one."""
        if not pod.alive:
            pod.proved = True

    def replenish(self) -> None:
        """The operator replaces what is lost to it, as far as the size allows."""
        if not (self.operator_up and self.replace_lost) or self.completed():
            return
        here = [p for p in self.pods.values() if not p.proved and p.state.drain is None and not self._silent(p)]
        for _ in range(self.rules.replicas - len(here)):
            self.new_pod()

    def _silent(self, pod: Pod) -> bool:
        return self.now - max(pod.reported_at, pod.ready_since) > 3.0

    def serve(self, pod: Pod) -> None:
        """The sidecar brings the newest membership, if it can."""
        if self.status is None or not self.operator_up or pod.uid in self.cut_from_operator:
            return
        if pod.alive and not pod.frozen and self.status.generation and pod.served != self.status.revision:
            pod.served = self.status.revision
            self.feed(pod, events.MembershipSeen(membership=self.document()))

    def document(self) -> Membership:
        """The status as the launchers read it, through the wire form."""
        assert self.status is not None
        return replace(Membership.from_json(_wire(self.status, self.job)), rules=self.rules)

    # Time

    def tick(self, seconds: float = 0.25) -> None:
        """Time passes for all."""
        self.now += seconds
        for pod in self.alive():
            self.feed(pod, events.Tick())

    def round(self) -> None:
        """One fair turn of everything that can move."""
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
        """Fair rounds for so long, or until something holds; says whether it did."""
        end = self.now + seconds
        while self.now < end:
            if until is not None and until():
                return True
            self.round()
        return until is not None and until()

    def recover(self, seconds: float = 120.0) -> None:
        """Liveness: with all faults mended and the dead replaced, a further step is committed, or all is said."""
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
        """Liveness without an operator: if the rules allow those who live a world, they go on by themselves."""
        self.heal()
        self.operator_up = False
        if not self._may_go_on():
            return False
        before = self.committed()
        if not self.run(seconds, lambda: self.completed() or self.committed() > min(before, self.last_step - 1)):
            raise ViolationError(f"no world for {seconds} s though the rules allow one: {self.show()}")
        return True

    def _may_go_on(self) -> bool:
        """Whether a world of those who live would keep every rule, as all of them together know it."""
        states = [p.state for p in self.alive()]
        newest = max((s.membership for s in states if s.membership), key=lambda m: m.newness, default=None)
        if newest is None or self.completed() or self.backups_restored:
            return False
        if any(s.conflict == newest.generation or s.foreign for s in states):
            return False
        pair = AttemptId(newest.generation, 10**6)
        known = newest.claims
        of = {"job_uid": self.job, "pair": pair, "publication": newest.publication}
        if fencing.foreign(self.claims.values(), known=known, **of):  # type: ignore[arg-type]
            return False
        # Who put off its leaving may be a member of the next world; once its notice is over it leaves without one.
        stay = {s.me for s in states if s.drain is None and s.postponed is None and s.leaving is None}
        chosen = quorum.largest_world(newest.rules, [m for m in newest.members if m.pod_uid in stay])
        started = highest(*(s.started for s in states))
        return quorum.may_be(newest, frozenset(m.pod_uid for m in chosen), started).ok

    # What is seen

    def completed(self) -> bool:
        """Whether a launcher has ended with 0."""
        return any(pod.exit_code == 0 for pod in self.pods.values())

    def training_now(self) -> Training | None:
        """The world that can step now, if any."""
        return next((t for t in self.trainings if t.alive and self.together(t) and t.checked), None)

    def trains_with(self, *uids: str) -> bool:
        """Whether exactly these train now."""
        training = self.training_now()
        return training is not None and training.made and training.world.uids == frozenset(uids)

    def committed(self) -> int:
        """The newest step that can be read."""
        return max((s.commit.step for s in self.readable()), default=0)

    def show(self) -> str:
        """For a person who looks at a failure."""
        lines = [f"status {self.status}", f"verdict {self.verdict}"]
        for pod in self.pods.values():
            state = pod.state
            lines.append(
                f"{pod.uid} alive={pod.alive} frozen={pod.frozen} proved={pod.proved} exit={pod.exit_code}"
                f" accepted={state.accepted} started={state.started} world={state.world and state.world.pair}"
                f" ranks={state.ranks} {state.phase}: {state.message}"
            )
        return "\n".join(lines)


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


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _pair(pair: AttemptId | None) -> operator_ids.AttemptId | None:
    return None if pair is None else operator_ids.AttemptId(generation=pair.generation, attempt=pair.attempt)


def _claim(claim: Claim) -> operator_status.Claim:
    return operator_status.Claim(
        pair=operator_ids.AttemptId(generation=claim.pair.generation, attempt=claim.pair.attempt),
        job_uid=claim.job_uid,
        publication=claim.publication,
        from_step=claim.from_step,
        from_pair=_pair(claim.from_pair),
    )


def _world(world: World | None) -> operator_reports.World | None:
    if world is None:
        return None
    members = tuple(member.pod_uid for member in world.members)
    pair = operator_ids.AttemptId(generation=world.pair.generation, attempt=world.pair.attempt)
    return operator_reports.World(pair=pair, publication=world.publication, members=members, coordinator="")


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
