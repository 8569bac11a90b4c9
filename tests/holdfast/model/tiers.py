"""A job's checkpoints on all tiers under faults: the real code on small real stores, and an oracle that judges it.

The engine, the fences, retention, the uploader and the restore are the real ones. The volume is a folder, the
node-local tiers are the real ones in folders of their own, and the object store is the real one over a dictionary.
`World` has one method for each rule of the explorer. The oracle keeps its own ledger: for each checkpoint the job,
the attempt, the step, the bytes, and the checkpoint that its training continued from.

The line of a job follows from the ledger and from the claims that are durable on a tier or recorded by the operator:
the highest claim that binds the job, all checkpoints of the attempt that wrote this claim, the base that the claim
names, and everything that the base's training continued from. A checkpoint outside of the line was written by a
process that had been replaced, and is void. A copy is intact if all its files, and those of the checkpoints on which
it stands, have the digests of its manifest. What the explorer damaged, rolled back or removed is not held against the
code.

Invariants, checked after every step of the explorer:

I1  A job deletes no checkpoint, on the volume or in the object store, that another job had written before this job's
    first claim and that is part of the other job's line, unless this job continued from it or from a descendant.
I2  A job deletes a checkpoint of its own line from the volume or the object store only while at least `keep_last`
    newer ones of the line lie there, or lay there until the explorer damaged them; from a node-local tier only while
    a newer one lies there. A checkpoint of the line that a save reported as durable lies on a tier. No intact copy
    goes to quarantine. A restore returns the newest checkpoint of the line of which one reachable tier has an intact
    copy, or a newer one of the line; it fails only during an outage. The same holds at the end, after all outages. A
    process that was stuck may have looked for newer claims before: what it deletes is judged by the line of its own
    attempt (`docs/reference/known-limits.md` names this limit).
I3  Where a copy of the base that the highest binding claim names exists, the fences let the job read it.
I4  What has a manifest on the volume or in the object store has all its own files with the digests of the manifest,
    and what is of the line also those on which it stands, except where the explorer damaged them. In the object
    store this holds when no upload of the checkpoint is stuck: one may be about to withdraw its manifest.
I5  A restore does not continue behind a checkpoint of which a store in an outage has an intact copy: it fails.
    After a rollback of the volume this holds up to the step that the operator knows to have been durable: nothing
    else that a process can reach names what the volume had held.
I6  The fences let the job read only checkpoints of its line, and a restore returns the bytes that were saved. Where a
    rollback removed the last copy of a claim, only the bytes are judged.
I7  `holdfast checkpoints rewind` deletes nothing: what it takes from the volume is outside of the line that begins at
    the chosen checkpoint, and lies in quarantine from then on.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import xxhash
from tasks import BUCKET, VOLUME, Bucket, Fault, Outages, Task, seams

from holdfast.checkpoint.attempt_info import Attempt
from holdfast.checkpoint.folder import upload_marker
from holdfast.checkpoint.folder.claims import list_claims
from holdfast.checkpoint.format.file_names import DELETED_MANIFEST, MANIFEST, QUARANTINE, CheckpointName, parse_commit
from holdfast.checkpoint.format.manifest import Manifest, decode, encode
from holdfast.checkpoint.format.shard_layout import TensorSpec
from holdfast.checkpoint.io.rate_limit import Pace
from holdfast.checkpoint.manager import CheckpointManager
from holdfast.checkpoint.policy import fencing
from holdfast.checkpoint.policy.fencing import Resume
from holdfast.checkpoint.ranks.exchange import Alone
from holdfast.checkpoint.saving.snapshot import Snapshot
from holdfast.checkpoint.stores import fallback
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.checkpoint.stores.memory.store import MemoryStore
from holdfast.checkpoint.stores.objects.store import ObjectStore
from holdfast.checkpoint.tiers.uploader import Uploader, UploadSettings
from holdfast.cli.checkpoints import rewind as rewinding
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import DamagedError, ForeignClaimError, HoldfastError
from holdfast.core.protocol import LOCAL_TIER, MEMORY_TIER

PREFIX = "job"
URL = "mem://bucket/job"
STEP = 5
SHARED = (VOLUME, BUCKET)
DAMAGES = ("flip", "cut", "remove", "garble")


class ViolationError(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a job has, the same for all jobs of a trace."""

    keep_last: int = 2
    full_every: int = 1
    bucket: bool = True
    memory: bool = True
    local: bool = True


@dataclass(frozen=True, kw_only=True)
class Written:
    """A checkpoint in the ledger."""

    job: str
    pair: AttemptId
    step: int
    parent: str | None


@dataclass(kw_only=True)
class Process:
    """One attempt of a job: its training process and the launcher's upload host."""

    number: int
    job: str
    pair: AttemptId
    publication: str
    resume: Resume
    node: int
    engine: CheckpointManager
    uploader: Uploader
    head: str | None = None
    step: int = 0
    alive: bool = False
    stopped: bool = False
    training: Running | None = None
    uploads: Running | None = None

    def __str__(self) -> str:
        return f"{self.job} {self.pair}"


@dataclass(kw_only=True)
class Running:
    """A task and what is done with its outcome."""

    what: str
    process: Process
    task: Task
    done: Callable[[Task], None]
    name: str = ""


Files = Mapping[str, bytes]
Seen = dict[str, dict[str, Files]]


@dataclass
class Counts:
    """For the report of a long run."""

    rules: dict[str, int] = field(default_factory=dict)
    restores: int = 0
    refused: int = 0
    saves: int = 0
    uploads: int = 0
    deleted: int = 0
    outages: int = 0

    def add(self, other: Counts) -> None:
        for name, number in other.rules.items():
            self.rules[name] = self.rules.get(name, 0) + number
        for name in ("restores", "refused", "saves", "uploads", "deleted", "outages"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


class World:
    """All tiers, all jobs that ever used the folder, and the ledger."""

    def __init__(self, root: Path, shape: Shape) -> None:
        self.shape = shape
        self.counts = Counts()
        self.story: list[str] = []
        self._root = root
        self._volume = root / "volume"
        self._volume.mkdir()
        self._kept = root / "snapshot"
        self._outages = Outages(self._volume)
        self._bucket = Bucket(self._outages)
        self._ledger: dict[str, Written] = {}
        self._known: dict[str, list[Claim]] = {}  # what the operator recorded, by job
        self._durable: dict[str, CheckpointName] = {}  # the same: the newest checkpoint on the volume
        self._owned: dict[str, set[str]] = {}  # by job: what it continued from, with ancestors
        self._before: dict[str, set[str]] = {}  # by job: what others' lines held at its first claim
        self._frozen: dict[str, set[str]] = {}  # by job: its line when the next job began
        self._damaged: set[tuple[str, str]] = set()
        self._gone: set[str] = set()
        self._kept_damaged: set[tuple[str, str]] = set()
        self._processes: list[Process] = []
        self._paused: list[Running] = []
        self._job, self._resume, self._jobs = "", Resume.ALWAYS, 0
        self._nodes = 0
        self._rolled_back = False
        self._unfenced = False  # a rollback removed the last copy of a claim, and with it what the claim fenced
        self._seen: Seen = {}
        self._aside: set[str] = set()  # what the way back moved to quarantine on the volume
        self._rewinds = False
        self._acting: Process
        self._resumed = False  # whether the acting process was stuck before
        self._uploads = ""  # what the acting process uploads

    @contextmanager
    def running(self) -> Iterator[World]:
        """Have the code open the bucket, and its operations pass the seams."""

        def opened(url: str, **_: Any) -> ObjectStore:
            return ObjectStore(self._bucket, PREFIX)

        with mock.patch.object(fallback, "open_store", opened), seams(self._outages):
            try:
                yield self
            finally:
                for one in self._paused:
                    one.task.kill()

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
            engine.enter(self._attempt(process), Alone())
            self._enter_near(process)
            found = engine.restore()
            self._judge_restore(process, found, expected, task)
            task.pauses = True
            return engine.claim(step=found.step, pair=found.pair)

        def done(task: Task) -> None:
            if task.error is None:
                process.alive = True
                self._known.setdefault(process.job, []).append(task.result)
                self._tell(f"{process} has claimed from step {task.result.from_step} ({task.result.from_pair})")
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
        name = CheckpointName(step=step, pair=process.pair)
        self._ledger[str(name)] = Written(job=process.job, pair=process.pair, step=step, parent=process.head)
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
        line = {*self._of(process.pair), *self._ancestry(process.head)}
        names = sorted(line & self._seen.get(VOLUME, {}).keys(), key=self._place, reverse=True)
        if not names:
            return
        name = parse_commit(names[which % len(names)])
        assert name is not None

        def act(task: Task) -> str:
            outcome = process.uploader.upload(name)
            return process.uploader.tidy(name) if outcome.arrived else f"{outcome.cause or 'gone'}: {outcome.message}"

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
        """The job ends, and an administrator goes back to an older checkpoint. What is stuck may still continue."""
        claims = list_claims(self._volume)
        steps = sorted({self._ledger[name].step for name in self._seen.get(VOLUME, {})}, reverse=True)
        if not claims or not steps:
            return
        job = max(claims, key=lambda claim: claim.pair).job_uid
        step = steps[which % len(steps)]
        for one in self._processes:
            one.alive = False
            one.stopped |= one.training is None and one.uploads is None

        def act(task: Task) -> None:
            rewinding.carry_out(self._volume, rewinding.plan(FolderStore(self._volume), step))

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
        """Damage a copy of one of the newest checkpoints."""
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

    # What surrounds the rules

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
        """After all outages the newest checkpoint of the line can be restored. A paused process stays killed."""
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
        """Give the descriptors of all processes back."""
        for process in self._processes:
            process.engine.enter_tiers({}, (), 0, lambda: None)

    # Processes

    def _process(self, last: Process | None, *, again: bool) -> Process:
        claims = [*self._landed(self._job), *(claim for known in self._known.values() for claim in known)]
        pairs = [*(claim.pair for claim in claims), *(process.pair for process in self._processes)]
        top = max(pairs, default=AttemptId(0, 0))
        same = again and last is not None and last.job == self._job
        pair = (
            AttemptId(last.pair.generation, last.pair.attempt + 1)
            if same and last
            else AttemptId(top.generation + 1, 1)
        )
        engine = CheckpointManager(
            self._volume,
            keep_last=self.shape.keep_last,
            resume=self._resume,
            on_foreign=lambda _: None,
            copies=URL if self.shape.bucket else "",
            full_every=self.shape.full_every,
        )
        uploader = Uploader(
            source=FolderStore(self._volume),
            target=ObjectStore(self._bucket, PREFIX),
            settings=UploadSettings(url=URL, keep_last=self.shape.keep_last),
            pace=Pace(None),
            hold=partial(upload_marker.held, self._volume),
        )
        return Process(
            number=len(self._processes),
            job=self._job,
            pair=pair,
            publication=f"{self._job}-{pair.generation}",
            resume=self._resume,
            node=self._nodes,
            engine=engine,
            uploader=uploader,
        )

    def _attempt(self, process: Process) -> Attempt:
        return Attempt(
            pair=process.pair,
            job_uid=process.job,
            publication=process.publication,
            run_id="run",
            known=tuple(self._known.get(process.job, ())),
            durable=self._durable[process.job].step if process.job in self._durable else 0,
        )

    def _enter_near(self, process: Process) -> None:
        me = {"node": f"n{process.node}", "pod": f"pod-{process.node}", "host": "127.0.0.1", "port": 1}
        said = {"limit": None, "interval": 1, "perSecond": None, "me": me, "key": "00", "inFlight": None}
        folders = {
            **({MEMORY_TIER: self._memory(process.node)} if self.shape.memory else {}),
            **({LOCAL_TIER: self._disk(process.node)} if self.shape.local else {}),
        }
        for folder in folders.values():
            folder.mkdir(exist_ok=True)
        tiers = {name: {**said, "folder": str(folder)} for name, folder in folders.items()}
        process.engine.enter_tiers(tiers, [tiers], 0, lambda: None)

    def _memory(self, node: int) -> Path:
        return self._root / f"memory-{node}"

    def _disk(self, node: int) -> Path:
        return self._root / f"disk-{node}"

    def _memory_place(self) -> str:
        return f"memory {self._nodes}"

    # The ledger

    def content(self, name: str) -> bytes:
        """Return the bytes of a checkpoint's changing tensor."""
        one = self._ledger[name]
        return hashlib.sha256(f"{one.job}|{name}|{one.parent}".encode()).digest()

    def _snapshot(self, name: CheckpointName, parent: str | None) -> Snapshot:
        tensors = {"weights": self.content(str(name)), "frozen": b"\x07" * 64}
        return Snapshot(
            name=name,
            specs=[TensorSpec(name=key, dtype="U8", shape=(len(data),)) for key, data in tensors.items()],
            read=lambda piece: tensors[piece.spec.name][piece.start[0] : piece.start[0] + piece.shape[0]],
            state={"objects": {}, "counters": {}},
            data=None,
            alone={"rank": 0},
            numerics={},
        )

    def _place(self, name: str) -> tuple[int, AttemptId]:
        parsed = parse_commit(name)
        assert parsed is not None
        return parsed.step, parsed.pair

    def _of(self, pair: AttemptId) -> set[str]:
        return {name for name, one in self._ledger.items() if one.pair == pair}

    def _ancestry(self, name: str | None) -> set[str]:
        found: set[str] = set()
        while name is not None and name in self._ledger:
            found.add(name)
            name = self._ledger[name].parent
        return found

    def _landed(self, job: str) -> tuple[Claim, ...]:
        """The claims that are durable somewhere, and what the operator recorded for the job."""
        uploaded = [
            Claim.from_json(json.loads(data))
            for key, data in self._bucket.objects.items()
            if key.startswith(f"{PREFIX}/claims/")
        ]
        return fencing.union(list_claims(self._volume), uploaded, self._known.get(job, ()))

    def _highest(self, job: str) -> Claim | None:
        claims = self._landed(job)
        first = min((claim.pair for claim in claims if claim.job_uid == job), default=None)
        binding = [claim for claim in claims if claim.job_uid == job or first is None or claim.pair < first]
        return max(binding, key=lambda claim: claim.pair, default=None)

    def _line(self, job: str, resume: Resume) -> set[str]:
        claim = self._highest(job)
        if claim is None or (claim.job_uid != job and resume is Resume.NEVER):
            return set()
        base = None if claim.from_pair is None else str(CheckpointName(step=claim.from_step, pair=claim.from_pair))
        return self._of(claim.pair) | self._ancestry(base)

    def _resume_of(self, job: str) -> Resume:
        return next((one.resume for one in reversed(self._processes) if one.job == job), Resume.ALWAYS)

    # What lies on the tiers

    def _look(self) -> Seen:
        away, self._outages.away = self._outages.away, set()
        try:
            return {
                VOLUME: _folder(self._volume),
                BUCKET: self._in_bucket(),
                f"disk {self._nodes}": _disks(self._disk(self._nodes)),
                self._memory_place(): _in_memory(self._memory(self._nodes)),
            }
        finally:
            self._outages.away = away

    def _in_bucket(self) -> dict[str, Files]:
        found: dict[str, dict[str, bytes]] = {}
        for key, data in self._bucket.objects.items():
            _, name, *rest = key.split("/")
            if rest and parse_commit(name) is not None:
                found.setdefault(name, {})["/".join(rest)] = data
        return {name: files for name, files in found.items() if MANIFEST in files}

    def _put(self, where: str, name: str, file: str, data: bytes | None) -> None:
        if where == BUCKET:
            self._bucket.objects.pop(f"{PREFIX}/{name}/{file}")
            if data is not None:
                self._bucket.objects[f"{PREFIX}/{name}/{file}"] = data
            return
        root = self._volume if where == VOLUME else next(self._disk(self._nodes).glob(f"*/{name}")).parent
        path = root / name / file
        path.unlink()
        if data is not None:
            path.write_bytes(data)

    def _intact(self, seen: Seen, where: str, name: str, *, below: bool = True) -> bool:
        files = seen.get(where, {}).get(name)
        manifest = None if files is None else _manifest(files)
        if files is None or manifest is None:
            return False
        good = all(
            file in files
            and len(files[file]) == record.nbytes
            and xxhash.xxh3_128_hexdigest(files[file]) == record.digest
            for file, record in manifest.own.items()
        )
        return good and (not below or all(self._intact(seen, where, one) for one in manifest.stands_on))

    def _excused(self, seen: Seen, where: str, name: str) -> bool:
        """Whether the explorer damaged it, or what it stands on."""
        manifest = _manifest(seen[where].get(name, {}))
        below = manifest.stands_on if manifest else ()
        return (where, name) in self._damaged or any((where, one) in self._damaged for one in below)

    # Judging

    def _expected(self, process: Process) -> str | None:
        """The newest checkpoint of the line that has an intact copy; whether it is reachable is judged later."""
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
        """Note what the lines of earlier jobs hold when the first attempt of this one restores."""
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
        withdrawn = where == BUCKET and name == self._uploads and self._resumed  # by who has just published it
        if name not in line or (withdrawn and self._intact(after, VOLUME, name)):
            return
        there = after[where].keys() | {other for place, other in self._damaged if place == where}
        mine = self._of(self._acting.pair) | self._ancestry(self._acting.head)
        damaged = {other for place, other in self._damaged if place == where}
        seen = there | self._aside if where == VOLUME else there  # by a process that was stuck since
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
            fencing.Commit(step=one.step, pair=one.pair, job_uid=one.job, publication="")
            for one in map(self._ledger.__getitem__, sorted(names))
        ]
        order = fencing.order(commits, claims, job_uid=job, resume=resume)
        read = {str(CheckpointName(step=one.step, pair=one.pair)) for one in order}
        line = self._line(job, resume)
        if read - line and not self._unfenced:
            raise ViolationError(f"I6: {job} may read {sorted(read - line)}, which are not of its line")
        if (
            claim is not None
            and claim.from_pair is not None
            and not (claim.job_uid != job and resume is Resume.NEVER)
        ):
            base = str(CheckpointName(step=claim.from_step, pair=claim.from_pair))
            if base in names and base not in read:
                raise ViolationError(f"I3: {job} may not read {base}, the base of its highest claim {claim.pair}")


EIO_TOO = (errno.EIO, errno.ESTALE)


def _newness(name: CheckpointName) -> tuple[AttemptId, int]:
    """As the operator orders checkpoints."""
    return name.pair, name.step


def _fault(number: int, kinds: tuple[int, ...]) -> Fault | None:
    """Read a fault from a number; 0 is none."""
    if number == 0:
        return None
    number, place = divmod(number - 1, 2)
    number, kind = divmod(number, len(kinds))
    count, first = divmod(number, 24)
    return Fault(place=SHARED[place], first=first + 1, count=(1, 2, 100)[count % 3], error=kinds[kind])


def _manifest(files: Files) -> Manifest | None:
    return _decoded(files.get(MANIFEST, b""))


@lru_cache(maxsize=4096)
def _decoded(data: bytes) -> Manifest | None:
    try:
        return decode(data)
    except HoldfastError:
        return None


def _folder(root: Path) -> dict[str, Files]:
    found: dict[str, Files] = {}
    for path in root.iterdir() if root.exists() else ():
        name = parse_commit(path.name)
        if name is None or name.staging or not path.is_dir():
            continue
        files = {file.name: file.read_bytes() for file in path.iterdir()}
        if MANIFEST in files and DELETED_MANIFEST not in files:
            found[path.name] = files
    return found


def _disks(root: Path) -> dict[str, Files]:
    return {name: files for folder in sorted(root.glob("*-own-*")) for name, files in _folder(folder).items()}


def _in_memory(root: Path) -> dict[str, Files]:
    store = MemoryStore(root)
    found: dict[str, Files] = {}
    for name in store.commits() if root.exists() else ():
        try:
            manifest = store.manifest(name)
            files = {file: _read(store, name, file) for file in manifest.own}
        except DamagedError:
            continue
        found[str(name)] = {**files, MANIFEST: encode(manifest)}
    return found


def _read(store: MemoryStore, name: CheckpointName, file: str) -> bytes:
    with store.open(name, file) as source:
        data = bytearray(source.nbytes)
        source.read_into(0, memoryview(data))
        return bytes(data)
