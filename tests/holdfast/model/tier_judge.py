"""The invariants of the tiers: no checkpoint is lost, and none is deleted without permission."""

from __future__ import annotations

from typing import Any

from tasks import BUCKET, VOLUME, Task
from tier_ledger import PREFIX, SHARED, Process, Seen, TierLedger, ViolationError

from holdfast.checkpoint.format.file_names import QUARANTINE, CheckpointName
from holdfast.checkpoint.policy import fencing
from holdfast.checkpoint.policy.fencing import Resume


class TierJudge(TierLedger):
    """Judges each restore and each deletion."""

    # Judging

    def _expected(self, process: Process) -> str | None:
        """Return the newest checkpoint of the line with an intact copy. Whether it is reachable is judged later."""
        seen = self._look()
        line = self._line(process.job, process.resume)
        held = [name for name in line if self._where(seen, name)]
        return max(held, key=self._place, default=None)

    def _where(self, seen: Seen, name: str) -> list[str]:
        return [where for where in seen if self._intact(seen, where, name)]

    def _judge_restore(self, process: Process, found: Any, expected: str | None, task: Task) -> None:
        self.counts.restores += 1
        name = None if found.loaded is None else str(found.loaded.name)
        line = self._line(process.job, process.resume)
        self._tell(f"{process} restored {name}")
        if name is not None and name not in line and not self._unfenced:
            raise ViolationError(
                f"I6: {process} restored {name}, which is not of its line {sorted(line, key=self._place)}"
            )
        if expected is not None and (name is None or self._place(name) < self._place(expected)):
            places = self._where(self._look(), expected)
            reachable = [where for where in places if where not in self._outages.away and not task.met[where]]
            known = self._durable.get(process.job)
            told = known is not None and self._place(expected)[0] <= known.step
            if reachable or told or not self._rolled_back or name not in line:
                where = ", ".join(places)
                rule = "I2" if reachable else "I5"
                raise ViolationError(f"{rule}: {process} restored {name}, though {expected} is intact on {where}")
        if name is not None:
            if bytes(found.loaded.tensors["weights"]) != self.content(name):
                raise ViolationError(f"I6: {process} restored {name} with other bytes than were saved")
            process.head, process.step = name, found.step
        owned = self._owned.setdefault(process.job, set())
        if process.job not in self._before:
            self._freeze(process.job)
        owned |= self._ancestry(name)

    def _judge_saved(self, process: Process, name: str) -> None:
        there = {one for copies in self._look().values() for one in copies} | {one for _, one in self._damaged}
        there |= self._gone
        if name in self._line(process.job, process.resume) - there:
            raise ViolationError(f"I2: {process} reported {name} as saved, and no tier has a copy")

    def _freeze(self, job: str) -> None:
        """Record the lines of earlier jobs when the first attempt of this job restores."""
        there = {name for copies in self._look().values() for name in copies}
        for other in {f"job-{number}" for number in range(1, self._jobs)} - {job} - self._frozen.keys():
            line = self._line(other, self._resume_of(other)) & there
            self._frozen[other] = {name for name in line if self._ledger[name].job == other}
        self._before[job] = {name for line in self._frozen.values() for name in line}

    def _judge_deletions(self, before: Seen, after: Seen) -> None:
        for where in before.keys() & after.keys():
            for name in sorted(before[where].keys() - after[where].keys()):
                self.counts.deleted += 1
                self._judge_deletion(where, name, before, after)

    def _judge_deletion(self, where: str, name: str, before: Seen, after: Seen) -> None:
        job, one = self._acting.job, self._ledger[name]
        self._tell(f"  {name} has gone from {where}")
        self._gone.add(name)
        if self._rewinds:
            if not self._in_quarantine(where, name) or name in self._line(job, self._resume_of(job)):
                raise ViolationError(f"I7: the way back took {name} from {where}")
            self._aside.add(name)
            return
        if self._in_quarantine(where, name):
            if self._intact(before, where, name):
                raise ViolationError(f"I2: {self._acting} moved an intact copy of {name} on {where} to quarantine")
            return
        if one.job != job:
            if where in SHARED and name in self._before.get(job, set()) and name not in self._owned.get(job, set()):
                raise ViolationError(f"I1: {self._acting} deleted {name} of {one.job} from {where}")
            if name not in self._owned.get(job, set()):
                return
        line = self._line(job, self._resume_of(job))
        withdrawn = where == BUCKET and name == self._uploads and self._resumed  # by its publisher
        if name not in line or (withdrawn and self._intact(after, VOLUME, name)):
            return
        there = after[where].keys() | {other for place, other in self._damaged if place == where}
        mine = self._of(self._acting.attempt_id) | self._ancestry(self._acting.head)
        damaged = {other for place, other in self._damaged if place == where}
        seen = there | self._aside if where == VOLUME else there  # by a process that was stuck meanwhile
        counted = line & there | mine & (seen if self._resumed else damaged)
        newer = [other for other in counted if self._place(other) > self._place(name)]
        least = self.shape.keep_last if where in SHARED else 1
        if len(newer) < least:
            raise ViolationError(f"I2: {self._acting} deleted {name} of its line from {where}; newer there: {newer}")

    def _in_quarantine(self, where: str, name: str) -> bool:
        if where == BUCKET:
            return any(key.startswith(f"{PREFIX}/{QUARANTINE}/{name}") for key in self._bucket.objects)
        roots = {VOLUME: [self._volume], self._memory_place(): []}.get(where, self._disk(self._nodes).glob("*"))
        return any(any(root.glob(f"{QUARANTINE}/{name}*")) for root in roots)

    def _judge_files(self, seen: Seen) -> None:
        line, stuck = self._line(self._job, self._resume), {one.name for one in self._paused}
        for where in SHARED:
            for name in seen[where]:
                if self._intact(seen, where, name, below=name in line) or (where == BUCKET and name in stuck):
                    continue
                if not self._excused(seen, where, name):
                    raise ViolationError(f"I4: {name} has a manifest on {where}, and not all its files are right")
                self._damaged.add((where, name))

    def _judge_fences(self, seen: Seen) -> None:
        if not self._job:
            return
        job, resume = self._job, self._resume
        claims, claim = self._landed(job), self._highest(job)
        names = {name for copies in seen.values() for name in copies}
        commits = [
            fencing.Commit(step=one.step, attempt_id=one.attempt_id, job_uid=one.job, publication="")
            for one in map(self._ledger.__getitem__, sorted(names))
        ]
        order = fencing.order(commits, claims, job_uid=job, resume=resume)
        read = {str(CheckpointName(step=one.step, attempt_id=one.attempt_id)) for one in order}
        line = self._line(job, resume)
        if read - line and not self._unfenced:
            raise ViolationError(f"I6: {job} may read {sorted(read - line)}, which are not of its line")
        if (
            claim is not None
            and claim.from_attempt_id is not None
            and not (claim.job_uid != job and resume is Resume.NEVER)
        ):
            base = str(CheckpointName(step=claim.from_step, attempt_id=claim.from_attempt_id))
            if base in names and base not in read:
                raise ViolationError(
                    f"I3: {job} may not read {base}, the base of its highest claim {claim.attempt_id}"
                )
