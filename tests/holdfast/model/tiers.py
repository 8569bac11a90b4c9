"""A job's checkpoints on all tiers under faults: the real code on small real stores, and an oracle that judges it.

The engine, the fences, retention, the uploader and the restore are the real ones. The volume is a folder, the
node-local tiers are the real ones in folders of their own, and the object store is the real one over a dictionary.
`World` has one method for each rule of the explorer. The oracle keeps its own ledger: for each checkpoint the job,
the attempt, the step, the bytes, and the checkpoint that its training continued from.

The line of a job follows from the ledger, and from the claims that are durable on a tier or recorded by the operator.
The line consists of the highest claim that binds the job, all checkpoints of the attempt that wrote this claim, the
base that the claim names, and everything that the training of the base continued from. A checkpoint outside of the
line was written by a process that had been replaced, and is void. A copy is intact if all its files, and those of the
checkpoints that it is based on, have the digests of its manifest. Changes, rollbacks and removals by the explorer are
no fault of the code.

Invariants, checked after every step of the explorer:

I1  A job deletes no checkpoint of another job's line on the volume or in the object store if the other job had
    written the checkpoint before this job's first claim. The exception is a job that continued from this checkpoint
    or from a descendant.
I2  A job deletes a checkpoint of its own line from the volume or the object store only if at least `keep_last` newer
    ones of the line are there, or were there until the explorer corrupted them. On a node-local tier, one newer
    checkpoint suffices. A checkpoint of the line that a save reported as durable is on a tier. No intact copy goes to
    quarantine. A restore returns the newest checkpoint of the line that has an intact copy on a reachable tier, or a
    newer one of the line, and fails only during an outage. The same holds at the end, after all outages. A process
    that was stuck may have looked for newer claims before, so its deletions are judged by the line of its own attempt
    (`docs/reference/known-limits.md` names this limit).
I3  If a copy of the base exists that the highest binding claim names, the fences let the job read this copy.
I4  A checkpoint with a manifest on the volume or in the object store has all its own files with the digests of the
    manifest. A checkpoint of the line also has the files of those that it is based on. Corruption by the explorer is
    excepted. In the object store this holds if no upload of the checkpoint is stuck, because the upload may be about
    to withdraw its manifest.
I5  If a store in an outage has an intact copy of a newer checkpoint, a restore fails and does not continue from an
    older one. After a rollback of the volume this holds up to the step that the operator recorded as durable: nothing
    else within reach of a process names the previous content of the volume.
I6  The fences let the job read only checkpoints of its line, and a restore returns the bytes that were saved. If a
    rollback removed the last copy of a claim, only the bytes are judged.
I7  `holdfast checkpoints rewind` deletes nothing. The checkpoints that it removes from the volume are outside of the
    line that begins at the chosen checkpoint, and stay in quarantine.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from typing import Any

from tasks import BUCKET, VOLUME, Fault, Task
from tier_judge import TierJudge
from tier_ledger import DAMAGES, SHARED, STEP, Process, Running, ViolationError, Written

from holdfast.checkpoint.folder.claims import list_claims
from holdfast.checkpoint.format.file_names import MANIFEST, CheckpointName, parse_commit
from holdfast.checkpoint.policy.fencing import Resume
from holdfast.checkpoint.ranks.exchange import SingleRank
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.cli.checkpoints import rewind as rewinding
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import ForeignClaimError, HoldfastError


class World(TierJudge):
    """All tiers, all jobs that ever used the folder, and the ledger."""

    # Rules: what jobs do

    def start(self, kind: int, move: int, stop: int, fault: int) -> None:
        """Start an attempt: of the same generation, of the next one, or of a new job with Always or Never."""
        kind = 2 if not self._job else kind % 4
        last = self._processes[-1] if self._processes else None
        if kind >= 2:
            self._jobs += 1
            self._job, self._resume = f"job-{self._jobs}", Resume.NEVER if kind == 3 else Resume.ALWAYS
        survives = kind == 0 and move % 3 == 2 and last is not None and last.alive and last.training is None
        self._nodes += kind >= 2 or move % 3 == 1 or last is None
        process = self._process(last, again=kind == 0)
        if survives and last is not None and not last.stopped:
            process.engine, last.alive = last.engine, False
        self._processes.append(process)
        expected = self._expected(process)
        had = self._outages.away.copy()

        def act(task: Task) -> Claim:
            task.pauses = False
            engine = process.engine
            engine.enter(self._attempt(process), SingleRank())
            self._enter_near(process)
            found = engine.restore()
            self._judge_restore(process, found, expected, task)
            task.pauses = True
            return engine.claim(step=found.step, attempt_id=found.attempt_id)

        def done(task: Task) -> None:
            if task.error is None:
                process.alive = True
                self._known.setdefault(process.job, []).append(task.result)
                self._tell(f"{process} has claimed from step {task.result.from_step} ({task.result.from_attempt_id})")
                return
            self.counts.refused += 1
            self._tell(f"{process} did not start: {task.error!r}")
            quiet = not had and not task.met and not isinstance(task.error, ForeignClaimError)
            if (
                process.head is None
                and process.step == 0
                and quiet
                and expected
                and isinstance(task.error, HoldfastError | OSError)
            ):
                raise ViolationError(
                    f"I2: {process} cannot restore, though {expected} has an intact copy: {task.error!r}"
                )

        self._tell(f"{process} starts on node {process.node} ({self._resume}); the newest of its line: {expected}")
        self._run(Running(what="start", process=process, task=self._task(act, fault), done=done), stop)

    def save(self, who: int, where: int, stop: int, fault: int) -> None:
        """Save the next step on the volume, in memory or on the node's disk."""
        process = self._some(who, lambda one: one.alive and one.training is None)
        if process is None:
            return
        near = {1: "memory", 2: "local"}.get(where % 4)
        if near is not None and (process is not self._processes[-1] or not getattr(self.shape, near)):
            near = None  # a node's launcher ends the old processes before it starts new ones
        step = process.step + STEP
        name = CheckpointName(step=step, attempt_id=process.attempt_id)
        self._ledger[str(name)] = Written(
            job=process.job, attempt_id=process.attempt_id, step=step, parent=process.head
        )
        snapshot = self._snapshot(name, process.head)

        def act(task: Task) -> bool:
            if near is None:
                return process.engine.save(snapshot).committed
            (tier,) = (one for one in process.engine.tiers if one.name == near)
            if not tier.in_background:
                return process.engine.save_on(tier, snapshot).committed
            saving = process.engine.begin_on(tier, snapshot)
            saving.settle(lambda: None)
            return saving.result.committed

        def done(task: Task) -> None:
            self._tell(f"{process} saved {name}: {task.error or task.result!r}")
            process.step = step
            if task.error is None and task.result:
                self.counts.saves += 1
                if near is None:
                    self._durable[process.job] = max(self._durable.get(process.job, name), name, key=_newness)
                self._judge_saved(process, str(name))
            process.head = str(name)  # training continues from this state, saved or not

        self._tell(f"{process} saves {name} ({near or VOLUME})")
        self._run(Running(what="save", process=process, task=self._task(act, fault, EIO_TOO), done=done), stop)

    def upload(self, who: int, which: int, stop: int, fault: int) -> None:
        """Copy a checkpoint to the object store, then let retention work there."""
        process = self._some(who, lambda one: not one.stopped and one.uploads is None)
        if process is None or not self.shape.bucket:
            return
        line = {*self._of(process.attempt_id), *self._ancestry(process.head)}
        names = sorted(line & self._seen.get(VOLUME, {}).keys(), key=self._place, reverse=True)
        if not names:
            return
        name = parse_commit(names[which % len(names)])
        assert name is not None

        def act(task: Task) -> str:
            outcome = process.uploader.upload(name)
            return (
                process.uploader.delete_replaced(name)
                if outcome.arrived
                else f"{outcome.cause or 'gone'}: {outcome.message}"
            )

        def done(task: Task) -> None:
            self.counts.uploads += task.error is None and not task.result
            self._tell(f"{process} uploaded {name}: {task.error or task.result or 'arrived'!r}")

        self._tell(f"{process} uploads {name}")
        self._run(
            Running(what="upload", name=str(name), process=process, task=self._task(act, fault, EIO_TOO), done=done),
            stop,
        )

    def resume(self, which: int, operations: int) -> None:
        """Let a paused task continue, for some operations or to its end."""
        if not self._paused:
            return
        running = self._paused.pop(which % len(self._paused))
        self._tell(f"{running.process}'s {running.what} continues")
        self._continue(running, operations)

    def rewind(self, which: int, stop: int) -> None:
        """The job ends, and an administrator rewinds to an older checkpoint. Stuck processes may still continue."""
        claims = list_claims(self._volume)
        steps = sorted({self._ledger[name].step for name in self._seen.get(VOLUME, {})}, reverse=True)
        if not claims or not steps:
            return
        job = max(claims, key=lambda claim: claim.attempt_id).job_uid
        step = steps[which % len(steps)]
        for one in self._processes:
            one.alive = False
            one.stopped |= one.training is None and one.uploads is None

        def act(task: Task) -> None:
            volume = FolderStore(self._volume)
            rewinding.carry_out(volume, rewinding.plan(volume, step))

        self._acting = next(one for one in reversed(self._processes) if one.job == job)
        self._rewinds, self._resumed, self._uploads = True, False, ""
        task = self._task(act, 0)
        task.go(stop or None)
        killed = task.paused
        task.kill()
        if not killed and task.error is not None and not isinstance(task.error, HoldfastError | OSError):
            raise ViolationError(f"the way back ended with {task.error!r}") from task.error
        outcome = "killed" if killed else task.error or "done"
        self._tell(f"an administrator goes back to step {step} of {job}: {outcome!r}")

    # Rules: what happens to the tiers

    def outage(self, place: int) -> None:
        """Begin or end an outage of the volume or of the bucket."""
        where = (BUCKET, BUCKET, VOLUME)[place % 3]
        self._outages.away ^= {where}
        begins = where in self._outages.away
        self.counts.outages += begins
        self._tell(f"the {where} is {'away' if begins else 'back'}")

    def damage(self, place: int, which: int, how: int) -> None:
        """Corrupt a copy of one of the newest checkpoints."""
        places = [where for where, copies in self._seen.items() if copies and where != self._memory_place()]
        if not places:
            return
        where = places[place % len(places)]
        names = sorted(self._seen[where], key=self._place, reverse=True)
        name = names[which % min(3, len(names))]
        kind = DAMAGES[how % len(DAMAGES)]
        file = MANIFEST if kind == "garble" else "rank-0.safetensors"
        data = self._seen[where][name].get(file)
        if data is None:
            return
        changed = {"flip": data[:-1] + bytes([data[-1] ^ 1]), "cut": data[:-1], "garble": b"{", "remove": None}[kind]
        self._tell(f"{name} on {where} is damaged: {kind} {file}")
        self._put(where, name, file, changed)
        self._damaged.add((where, name))

    def snapshot(self) -> None:
        """Take a snapshot of the volume."""
        shutil.rmtree(self._kept, ignore_errors=True)
        shutil.copytree(self._volume, self._kept, symlinks=True)
        self._kept_damaged = {one for one in self._damaged if one[0] == VOLUME}
        self._tell("a snapshot of the volume is taken")

    def rollback(self) -> None:
        """Every process stops, and the volume is as it was at the snapshot."""
        if not self._kept.exists():
            return
        self._stop_all()
        before = {*self._landed(self._job)}
        shutil.rmtree(self._volume)
        shutil.copytree(self._kept, self._volume, symlinks=True)
        self._rolled_back, self._aside = True, set()
        self._damaged = {one for one in self._damaged if one[0] != VOLUME} | self._kept_damaged
        self._unfenced |= bool(before - {*self._landed(self._job)})
        self._tell("all processes stop, and the volume is rolled back to the snapshot")

    def lose(self, what: int) -> None:
        """Every process stops; the newest node's memory, or its memory and disk, are gone."""
        self._stop_all()
        shutil.rmtree(self._memory(self._nodes), ignore_errors=True)
        if what % 2:
            shutil.rmtree(self._disk(self._nodes), ignore_errors=True)
        self._tell(f"all processes stop, and node {self._nodes} lost its memory{' and its disk' if what % 2 else ''}")

    # Support for the rules

    def after(self, *, explorer: bool) -> None:
        """Check every invariant. `explorer`: what is gone was removed by the explorer."""
        seen = self._look()
        if not explorer:
            self._judge_deletions(self._seen, seen)
        self._rewinds = False
        self._seen = seen
        self._damaged = {(where, name) for where, name in self._damaged if not self._intact(seen, where, name)}
        self._judge_files(seen)
        self._judge_fences(seen)
        lost = [name for name in sorted(self._aside) if not self._in_quarantine(VOLUME, name)]
        if lost:
            raise ViolationError(f"I7: {lost}, which the way back set aside, are not in quarantine")

    def end(self) -> None:
        """After all outages, the newest checkpoint of the line can be restored. A paused process stays killed."""
        self._outages.away.clear()
        if self._processes:
            self.start(1, 0, 0, 0)

    def _stop_all(self) -> None:
        for one in self._paused:
            one.task.kill()
        self._paused.clear()
        for process in self._processes:
            process.alive, process.stopped = False, True

    def _task(self, act: Callable[[Task], Any], fault: int, kinds: tuple[int, ...] = (errno.ESTALE,)) -> Task:
        return Task(self._outages, act, _fault(fault, kinds))

    def _run(self, running: Running, stop: int) -> None:
        if running.what == "upload":
            running.process.uploads = running
        else:
            running.process.training = running
        self._continue(running, stop)

    def _continue(self, running: Running, operations: int) -> None:
        task = running.task
        self._acting, self._resumed = running.process, task.paused
        self._uploads = running.name if running.what == "upload" else ""
        task.go(operations or None)
        if task.paused:
            self._tell(f"{running.process}'s {running.what} is stuck")
            self._paused.append(running)
            return
        if running.what == "upload":
            running.process.uploads = None
        else:
            running.process.training = None
        if isinstance(task.error, ViolationError):
            raise task.error
        if task.error is not None and not isinstance(task.error, HoldfastError | OSError):
            raise ViolationError(f"{running.process}'s {running.what} ended with {task.error!r}") from task.error
        running.done(task)

    def _tell(self, text: str) -> None:
        self.story.append(text)

    def _some(self, who: int, fits: Callable[[Process], bool]) -> Process | None:
        """The last process for 0, an older one otherwise."""
        found = [one for one in reversed(self._processes) if fits(one)]
        return found[who % len(found)] if found else None

    def close(self) -> None:
        """Close the descriptors of all processes."""
        for process in self._processes:
            process.engine.enter_tiers({}, (), 0, lambda: None)


EIO_TOO = (errno.EIO, errno.ESTALE)


def _newness(name: CheckpointName) -> tuple[AttemptId, int]:
    """Return the key by which the operator orders checkpoints."""
    return name.attempt_id, name.step


def _fault(number: int, kinds: tuple[int, ...]) -> Fault | None:
    """Read a fault from a number; 0 is none."""
    if number == 0:
        return None
    number, place = divmod(number - 1, 2)
    number, kind = divmod(number, len(kinds))
    count, first = divmod(number, 24)
    return Fault(place=SHARED[place], first=first + 1, count=(1, 2, 100)[count % 3], error=kinds[kind])
