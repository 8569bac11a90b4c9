"""Rank processes of the simulated job, and the folder that they save to."""

from __future__ import annotations

from dataclasses import replace

from simulated_cluster import Letter, Lineage, Process, SimulatedCluster, Stored, Training, ViolationError

from holdfast.checkpoint.policy import fencing
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.protocol import Cause
from holdfast.launcher.membership import events
from holdfast.launcher.membership.messages import Failure, Priority
from holdfast.training.protocol import step_commit
from holdfast_operator.api import ids as operator_ids
from holdfast_operator.api import status as operator_status


class SimulatedRanks(SimulatedCluster):
    """Rank processes that train, save and restore."""

    # Rank processes

    def together(self, training: Training) -> bool:
        """Return whether all ranks of the world can reach each other now."""
        uids = training.world.uids
        if training.alive | training.finished != uids or any(self.pods[uid].frozen for uid in uids):
            return False
        return all(self.linked(a, b) for a in uids for b in uids if a < b)

    def train(self, training: Training) -> None:
        """Run the next action of the rank processes of a world."""
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
        """Return whether the last step does not need a checkpoint."""
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
            attempt_id=training.world.attempt_id,
            publication=training.world.publication,
        )
        if claims:
            self.pods[training.writer].local.append(
                events.ForeignClaims(attempt_id=training.world.attempt_id, claims=tuple(claims))
            )
            training.alive.discard(training.writer)
        return bool(claims)

    def _restore(self, training: Training) -> None:
        """Exchange all rank states. One state is chosen and becomes the state of all ranks."""
        attempt_id = training.world.attempt_id
        processes = [self._process(member.pod_uid) for member in training.world.members]
        verdict = step_commit.resolve([process.rank_state for process in processes])
        inherits = fencing.inherits(
            attempt_id,
            synced=None if verdict.donor is None else processes[verdict.donor].rank_state.synced,
            claimed=[processes[rank].claimed for rank in verdict.survivors],
            trained=[self.pods[member.pod_uid].trained for member in training.world.members],
        )
        for process in processes:
            process.claimed = attempt_id.generation if inherits else None
        if not inherits:
            if self._foreign(training):
                return
            newest = self._newest()
            commit = None if newest is None else newest.commit.attempt_id
            verdict = step_commit.resolve([process.rank_state for process in processes], commit)
        if verdict.donor is None:
            self._from_checkpoint(training, processes)
        else:
            self._from_memory(training, processes, verdict)
            training.claim = self._inherited(attempt_id) if inherits else None
            training.checked = inherits

    def _process(self, uid: str) -> Process:
        process = self.pods[uid].process
        if process is None:
            raise ViolationError(f"{uid} is in a world without a process")
        return process

    def _newest(self) -> Stored | None:
        order = fencing.order([s.commit for s in self.commits], self._claims(), job_uid=self.job)
        return next((s for s in self.commits if order and s.commit == order[0]), None)

    def _inherited(self, attempt_id: AttemptId) -> Claim:
        mine = [
            c
            for c in self.claims.values()
            if c.job_uid == self.job and c.attempt_id.generation == attempt_id.generation
        ]
        if not mine:
            raise ViolationError(f"{attempt_id} goes on without any claim of its generation")
        return max(mine)

    def _from_memory(self, training: Training, processes: list[Process], verdict: step_commit.Resolution) -> None:
        attempt_id = training.world.attempt_id
        for rank in verdict.survivors:
            process = processes[rank]
            if process.rank_state.in_doubt and verdict.apply:
                process.apply()
            process.rank_state = step_commit.synchronised(process.rank_state, attempt_id, verdict.step, verdict.voted)
        donor = processes[verdict.survivors[0]]
        lines = {processes[rank].line for rank in verdict.survivors}
        if lines != {donor.line} or len(donor.line) != verdict.step:
            raise ViolationError(f"survivors of {verdict.voted} differ in {attempt_id}: {lines}")
        for rank in verdict.newcomers:
            process = processes[rank]
            process.rank_state = step_commit.synchronised(
                step_commit.invalidated(process.rank_state), attempt_id, verdict.step, verdict.voted
            )
            process.line, process.origin = donor.line, donor.origin
        training.source = verdict.voted
        self._go_on(training, donor.line, donor.origin)
        for before in self.trainings:
            if before.world.attempt_id == verdict.voted and before.steps != donor.line[: len(before.steps)]:
                raise ViolationError(f"{attempt_id} lost a step that {verdict.voted} made")

    def _from_checkpoint(self, training: Training, processes: list[Process]) -> None:
        best = self._newest()
        line, origin = (best.lineage, best.commit.attempt_id) if best else ((), None)
        for process in processes:
            process.line, process.origin = line, origin
            process.rank_state = step_commit.synchronised(
                step_commit.invalidated(process.rank_state), training.world.attempt_id, len(line), None
            )
        self._go_on(training, line, origin)
        training.saved = len(line)

    def _go_on(self, training: Training, line: Lineage, origin: AttemptId | None) -> None:
        training.base = training.steps = line
        training.restored = len(line)
        training.claim, training.from_attempt_id = None, origin
        training.saved = max((s.commit.step for s in self.commits if s.lineage == line), default=0)

    def _claim(self, training: Training) -> None:
        attempt_id = training.world.attempt_id
        base = training.base or ()
        claim = Claim(
            attempt_id=attempt_id,
            job_uid=self.job,
            publication=training.world.publication,
            from_step=len(base),
            from_attempt_id=training.from_attempt_id,
        )
        if attempt_id in self.claims:
            self._foreign(training)
            return
        self.claims[attempt_id] = claim
        self.bases[attempt_id] = base
        training.claim = claim
        for uid in training.world.uids:
            self._process(uid).claimed = attempt_id.generation
        self.check_line()

    def _check_again(self, training: Training) -> None:
        training.checked = not self._foreign(training)

    def _step(self, training: Training) -> None:
        for uid in sorted(training.world.uids):
            self.prepare(training, uid)
        for uid in sorted(training.world.uids):
            self.vote_returns(training, uid)

    def may_step(self, training: Training) -> bool:
        """Return whether the members of the world are training."""
        more = len(training.steps) < self.last_step or bool(training.prepared)
        return training.checked and more and not (training.quiesced or training.finished) and self.together(training)

    def prepare(self, training: Training, uid: str) -> None:
        """Complete the averages of the next step at one member, which then votes."""
        attempt_id, process = training.world.attempt_id, self._process(uid)
        higher = [t for t in self.trainings if t.made and t.world.attempt_id > attempt_id]
        if higher and not self.backups_restored:
            raise ViolationError(f"{attempt_id} makes a step after {higher[0].world.attempt_id} did")
        if self.announced:
            raise ViolationError(f"{attempt_id} makes a step after completion was announced")
        if uid not in training.prepared:
            training.prepared.add(uid)
            process.rank_state = step_commit.voted(step_commit.prepared(process.rank_state, attempt_id), attempt_id)

    def vote_returns(self, training: Training, uid: str) -> None:
        """Complete the vote at one member, after all have voted. Others may be dead by then, but this member has
        not left."""
        pod, attempt_id = self.pods[uid], training.world.attempt_id
        if training.prepared != training.world.uids or uid in training.applied or uid not in training.alive:
            return
        if not pod.alive or pod.frozen or pod.process is None:
            return
        pod.process.apply()
        pod.process.rank_state = step_commit.committed(pod.process.rank_state)
        training.applied.add(uid)
        training.made, training.steps = True, pod.process.line
        for later in self.trainings:
            if (
                later.source == attempt_id
                and later.base is not None
                and later.base[: len(training.steps)] != training.steps
            ):
                raise ViolationError(
                    f"the vote of {attempt_id} returned, and {later.world.attempt_id} went on without the step"
                )
        pod.local.append(events.StepMade(attempt_id=attempt_id, step=len(training.steps), restored=training.restored))
        if training.applied == training.world.uids:
            training.prepared, training.applied = set(), set()

    def _save(self, training: Training) -> None:
        """Start a save. After an applied prepared step, a later vote must complete first, even an empty one."""
        if not training.made:
            for uid in training.world.uids:
                process = self._process(uid)
                process.rank_state = replace(process.rank_state, voted=training.world.attempt_id)
        training.in_flight = training.steps

    def land(self, training: Training) -> None:
        """Publish the manifest of a checkpoint, possibly long after its writers died."""
        if training.in_flight is None:
            return
        line = training.in_flight
        training.in_flight = None
        if len(line) > training.saved:
            training.saved = len(line)
            commit = fencing.Commit(step=len(line), attempt_id=training.world.attempt_id, job_uid=self.job)
            self.commits.append(Stored(commit, line))
            self.check_line()

    def _quiesced(self, training: Training) -> None:
        training.quiesced = True
        for uid in training.world.uids:
            self.pods[uid].local.append(events.Quiesced(attempt_id=training.world.attempt_id))

    def _finish(self, training: Training) -> None:
        for uid in sorted(training.world.uids):
            if uid not in training.finished:
                training.finished.add(uid)
                self._end_ranks(self.pods[uid])
                self.pods[uid].process = None
                self.pods[uid].local.append(events.LocalDone(attempt_id=training.world.attempt_id))
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
            pod.local.append(events.RankFailed(attempt_id=training.world.attempt_id, failure=failure))

    def _others_started(self, training: Training) -> bool:
        """Return whether the others started: a rank waits for peers before that, and fails if they are gone after
        it."""
        return training.base is not None

    def _left(self, letter: Letter) -> bool:
        """Return whether the sender has exited: bytes that it flushed before still arrive."""
        sender = self.pods[letter.sender]
        return sender.exit_code is not None and frozenset((letter.sender, letter.to)) not in self.cut_links

    def _watch(self, letter: Letter) -> None:
        """Check that completion is reported for one line only."""
        if letter.message.type == "complete":
            self._announce(letter.message.attempt_id)

    def _announce(self, attempt_id: AttemptId) -> None:
        training = next(t for t in self.trainings if t.world.attempt_id == attempt_id)
        line = training.steps
        if len(line) < self.last_step:
            raise ViolationError(f"{attempt_id} is announced complete at step {len(line)}")
        if any(other != line for _, other in self.announced):
            raise ViolationError(f"completion said of two lines: {self.announced} and {attempt_id}")
        if (attempt_id, line) not in self.announced:
            self.announced.append((attempt_id, line))

    # The tier

    def readable(self) -> list[Stored]:
        """Return what a restore may read, newest first."""
        claims = self._claims()
        return [s for s in self.commits if fencing.readable(s.commit, claims, job_uid=self.job).ok]

    def check_line(self) -> None:
        """Check that all readable checkpoints form one line, and every later claim continued from it."""
        readable = self.readable()
        for one in readable:
            for two in readable:
                shorter, longer = sorted((one.lineage, two.lineage), key=len)
                if longer[: len(shorter)] != shorter:
                    raise ViolationError(f"two lines can be read: {one.commit} and {two.commit}")
            for attempt_id, base in self.bases.items():
                if one.commit.attempt_id < attempt_id and base[: len(one.lineage)] != one.lineage:
                    raise ViolationError(f"the zombie's commit {one.commit} is readable beside {attempt_id}")

    # The old job, and the backup

    def find_old_job(self, attempt_id: AttemptId, steps: int) -> None:
        """Use an old folder with the claim and the checkpoints of another job, which may still be alive."""
        self.old_line = (attempt_id,) * steps
        self.claims[attempt_id] = Claim(attempt_id=attempt_id, job_uid="old", publication="old", from_step=0)
        self.commits.append(Stored(fencing.Commit(step=steps, attempt_id=attempt_id, job_uid="old"), self.old_line))

    def old_job_commits(self) -> None:
        """Let a stale process of the old job save one more step."""
        if self.old_line:
            attempt_id = self.old_line[-1]
            self.old_line = (*self.old_line, attempt_id)
            commit = fencing.Commit(step=len(self.old_line), attempt_id=attempt_id, job_uid="old")
            self.commits.append(Stored(commit, self.old_line))
            self.check_line()

    def old_job_claims(self, attempt_id: AttemptId) -> None:
        """Let a stale process of the old job start an attempt without knowing this job."""
        if self.old_line and attempt_id > self.old_line[-1] and attempt_id not in self.claims:
            self.claims[attempt_id] = Claim(
                attempt_id=attempt_id,
                job_uid="old",
                publication="old",
                from_step=len(self.old_line) - 1,
                from_attempt_id=self.old_line[-1],
            )
            self.old_line = (*self.old_line[:-1], attempt_id)
            self.check_line()

    def restore_backup(self) -> None:
        """Restore the state of the cluster from the last `keep_backup`."""
        if self.backup is not None:
            self.status, self.backups_restored = self.backup, self.backups_restored + 1
            for pod in self.pods.values():
                pod.served = -1

    def keep_backup(self) -> None:
        """Back up the state of the cluster."""
        self.backup = self.status


def _attempt_id(attempt_id: AttemptId | None) -> operator_ids.AttemptId | None:
    return (
        None
        if attempt_id is None
        else operator_ids.AttemptId(generation=attempt_id.generation, attempt=attempt_id.attempt)
    )


def _claim(claim: Claim) -> operator_status.Claim:
    return operator_status.Claim(
        attempt_id=operator_ids.AttemptId(generation=claim.attempt_id.generation, attempt=claim.attempt_id.attempt),
        job_uid=claim.job_uid,
        publication=claim.publication,
        from_step=claim.from_step,
        from_attempt_id=_attempt_id(claim.from_attempt_id),
    )
