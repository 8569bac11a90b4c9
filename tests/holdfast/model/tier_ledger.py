"""The processes of a job, what they wrote, and the content of the tiers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Self
from unittest import mock

import xxhash
from tasks import BUCKET, VOLUME, Bucket, Outages, Task, seams

from holdfast.checkpoint.attempt_info import Attempt
from holdfast.checkpoint.folder import upload_marker
from holdfast.checkpoint.folder.claims import list_claims
from holdfast.checkpoint.format.file_names import DELETED_MANIFEST, MANIFEST, CheckpointName, parse_commit
from holdfast.checkpoint.format.manifest import Manifest, decode, encode
from holdfast.checkpoint.format.shard_layout import TensorSpec
from holdfast.checkpoint.io.rate_limit import Pace
from holdfast.checkpoint.manager import CheckpointManager
from holdfast.checkpoint.policy import fencing
from holdfast.checkpoint.policy.fencing import Resume
from holdfast.checkpoint.saving.snapshot import Snapshot
from holdfast.checkpoint.stores import fallback
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.checkpoint.stores.memory.store import MemoryStore
from holdfast.checkpoint.stores.objects.store import ObjectStore
from holdfast.checkpoint.tiers.uploader import Uploader, UploadSettings
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import CorruptCheckpointError, HoldfastError
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
    """The settings of a job, equal for all jobs of a trace."""

    keep_last: int = 2
    full_every: int = 1
    bucket: bool = True
    memory: bool = True
    local: bool = True


@dataclass(frozen=True, kw_only=True)
class Written:
    """A checkpoint in the ledger."""

    job: str
    attempt_id: AttemptId
    step: int
    parent: str | None


@dataclass(kw_only=True)
class Process:
    """One attempt of a job: its training process and the launcher's upload host."""

    number: int
    job: str
    attempt_id: AttemptId
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
        return f"{self.job} {self.attempt_id}"


@dataclass(kw_only=True)
class Running:
    """A task and the function that gets its outcome."""

    what: str
    process: Process
    task: Task
    done: Callable[[Task], None]
    name: str = ""


Files = Mapping[str, bytes]


Seen = dict[str, dict[str, Files]]


@dataclass
class Counts:
    """Counters for the report of a long run."""

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


class TierLedger:
    """What was written, by which process, and the content of each tier."""

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
        self._owned: dict[str, set[str]] = {}  # by job: the checkpoints that it continued from, with ancestors
        self._before: dict[str, set[str]] = {}  # by job: the lines of other jobs at its first claim
        self._frozen: dict[str, set[str]] = {}  # by job: its line when the next job began
        self._damaged: set[tuple[str, str]] = set()
        self._gone: set[str] = set()
        self._kept_damaged: set[tuple[str, str]] = set()
        self._processes: list[Process] = []
        self._paused: list[Running] = []
        self._job, self._resume, self._jobs = "", Resume.ALWAYS, 0
        self._nodes = 0
        self._rolled_back = False
        self._unfenced = False  # a rollback removed the last copy of a claim, and thereby its fence
        self._seen: Seen = {}
        self._aside: set[str] = set()  # what a rewind moved to quarantine on the volume
        self._rewinds = False
        self._acting: Process
        self._resumed = False  # whether the acting process was stuck before
        self._uploads = ""  # what the acting process uploads

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Let the code open the bucket, and pass its operations through the seams."""

        def opened(url: str, **_: Any) -> ObjectStore:
            return ObjectStore(self._bucket, PREFIX)

        with mock.patch.object(fallback, "open_store", opened), seams(self._outages):
            try:
                yield self
            finally:
                for one in self._paused:
                    one.task.kill()

    # Processes

    def _process(self, last: Process | None, *, again: bool) -> Process:
        claims = [*self._landed(self._job), *(claim for known in self._known.values() for claim in known)]
        attempt_ids = [*(claim.attempt_id for claim in claims), *(process.attempt_id for process in self._processes)]
        top = max(attempt_ids, default=AttemptId(0, 0))
        same = again and last is not None and last.job == self._job
        attempt_id = (
            AttemptId(last.attempt_id.generation, last.attempt_id.attempt + 1)
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
            attempt_id=attempt_id,
            publication=f"{self._job}-{attempt_id.generation}",
            resume=self._resume,
            node=self._nodes,
            engine=engine,
            uploader=uploader,
        )

    def _attempt(self, process: Process) -> Attempt:
        return Attempt(
            attempt_id=process.attempt_id,
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
            per_rank={"rank": 0},
            numerics={},
        )

    def _place(self, name: str) -> tuple[int, AttemptId]:
        parsed = parse_commit(name)
        assert parsed is not None
        return parsed.step, parsed.attempt_id

    def _of(self, attempt_id: AttemptId) -> set[str]:
        return {name for name, one in self._ledger.items() if one.attempt_id == attempt_id}

    def _ancestry(self, name: str | None) -> set[str]:
        found: set[str] = set()
        while name is not None and name in self._ledger:
            found.add(name)
            name = self._ledger[name].parent
        return found

    def _landed(self, job: str) -> tuple[Claim, ...]:
        """Return the claims that are durable somewhere, and those that the operator recorded for the job."""
        uploaded = [
            Claim.from_json(json.loads(data))
            for key, data in self._bucket.objects.items()
            if key.startswith(f"{PREFIX}/claims/")
        ]
        return fencing.union(list_claims(self._volume), uploaded, self._known.get(job, ()))

    def _highest(self, job: str) -> Claim | None:
        claims = self._landed(job)
        first = min((claim.attempt_id for claim in claims if claim.job_uid == job), default=None)
        binding = [claim for claim in claims if claim.job_uid == job or first is None or claim.attempt_id < first]
        return max(binding, key=lambda claim: claim.attempt_id, default=None)

    def _line(self, job: str, resume: Resume) -> set[str]:
        claim = self._highest(job)
        if claim is None or (claim.job_uid != job and resume is Resume.NEVER):
            return set()
        base = (
            None
            if claim.from_attempt_id is None
            else str(CheckpointName(step=claim.from_step, attempt_id=claim.from_attempt_id))
        )
        return self._of(claim.attempt_id) | self._ancestry(base)

    def _resume_of(self, job: str) -> Resume:
        return next((one.resume for one in reversed(self._processes) if one.job == job), Resume.ALWAYS)

    # Content of the tiers

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
        return good and (not below or all(self._intact(seen, where, one) for one in manifest.depends_on))

    def _excused(self, seen: Seen, where: str, name: str) -> bool:
        """Return whether the explorer corrupted the checkpoint or its base."""
        manifest = _manifest(seen[where].get(name, {}))
        below = manifest.depends_on if manifest else ()
        return (where, name) in self._damaged or any((where, one) in self._damaged for one in below)


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
        except CorruptCheckpointError:
            continue
        found[str(name)] = {**files, MANIFEST: encode(manifest)}
    return found


def _read(store: MemoryStore, name: CheckpointName, file: str) -> bytes:
    with store.open(name, file) as source:
        data = bytearray(source.nbytes)
        source.read_into(0, memoryview(data))
        return bytes(data)
