"""Copy checkpoints from the shared tier to an object store: the order, the rate, and the deletions. No torch.

Invariant: a checkpoint arrives with every claim of the shared tier, so that the fence is the same on both. It is
verified in transit, and the shared tier's retention keeps it meanwhile. What it replaces is deleted only after it has
arrived. Failures are reported and retried. An abandoned upload leaves nothing behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

from holdfast.checkpoint.format.failure_causes import FailureCause, cause_of
from holdfast.checkpoint.format.file_names import CheckpointName, parse_commit
from holdfast.checkpoint.format.manifest import digest
from holdfast.checkpoint.io.rate_limit import Pace
from holdfast.checkpoint.policy import retention
from holdfast.checkpoint.restore.transfer import transfer
from holdfast.checkpoint.saving.checkpoint_index import Ages
from holdfast.checkpoint.stores.base import CheckpointStore, Incoming, Target
from holdfast.core.attempt import Claim
from holdfast.core.errors import CheckpointError, CorruptCheckpointError, UnavailableError, UsageError
from holdfast.core.json_fields import JsonFields
from holdfast.core.limits import backoff

_SHORTEST_WAIT: Final = 1.0
_LONGEST_WAIT: Final = 60.0
FENCED_SECONDS: Final = 24 * 3600.0
"""How long a fenced checkpoint stays, in seconds."""
_NO_RULES: Final = retention.Rules()


@dataclass(frozen=True, kw_only=True)
class UploadSettings(JsonFields):
    """The destination of checkpoints, their interval and rate, and how many stay."""

    url: str
    interval_seconds: float = 0.0
    keep_last: int = 3
    rules: retention.Rules = _NO_RULES
    bytes_per_second: float | None = None
    in_flight: int | None = None

    def __post_init__(self) -> None:
        invalid_rate = self.bytes_per_second is not None and self.bytes_per_second <= 0
        if self.interval_seconds < 0 or self.keep_last < 1 or invalid_rate:
            raise UsageError("an object store needs an interval of 0 s or more, 1 or more to keep, a limit above 0")


# Decisions. Pure.


@dataclass(frozen=True, kw_only=True)
class Queue:
    """The checkpoints to upload. Only the newest one that is pending counts."""

    newest: CheckpointName | None = None
    done: CheckpointName | None = None
    began: float | None = None
    failures: int = 0
    retry_at: float = 0.0
    closing: bool = False

    def failed(self, now: float) -> Queue:
        """Record a failed upload, and increase the wait before the next try."""
        wait = backoff(self.failures, first=_SHORTEST_WAIT, longest=_LONGEST_WAIT)
        return replace(self, failures=self.failures + 1, retry_at=now + wait)

    def arrived(self, name: CheckpointName) -> Queue:
        return replace(self, done=name, failures=0, retry_at=0.0)

    def given_up(self, name: CheckpointName) -> Queue:
        """Record an upload that another try cannot complete. The next checkpoint does not wait."""
        return replace(self.arrived(name), began=None)


@dataclass(frozen=True, kw_only=True)
class Upload:
    """Upload this checkpoint now."""

    name: CheckpointName


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Wait this many seconds; None: until the next notification."""

    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class End:
    """End: everything is uploaded and the launcher is stopping."""


def decide(queue: Queue, settings: UploadSettings, now: float) -> Upload | Wait | End:
    """Return the next action. A stopping launcher uploads the newest checkpoint regardless of the interval."""
    if queue.newest is None or queue.newest == queue.done:
        return End() if queue.closing else Wait(seconds=None)
    due = queue.retry_at
    if queue.began is not None and not queue.closing:
        due = max(due, queue.began + settings.interval_seconds)
    return Upload(name=queue.newest) if now >= due else Wait(seconds=due - now)


# Actions.


class _ReplacedError(CheckpointError):
    """A newer checkpoint exists, for which retention deleted what this one builds on."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one upload. `gone`: its source or its base was deleted, and a newer checkpoint replaces it."""

    name: CheckpointName
    nbytes: int = 0
    seconds: float = 0.0
    cause: str = ""
    message: str = ""
    gone: bool = False

    @property
    def arrived(self) -> bool:
        return not self.cause and not self.gone

    @property
    def settled(self) -> bool:
        """Whether another try is useless: the upload arrived, or its source is missing or corrupt."""
        return self.arrived or self.gone or self.cause in (FailureCause.DAMAGED, FailureCause.GONE)


@dataclass
class Uploader:
    """Uploads the checkpoints of one job, one at a time."""

    source: CheckpointStore
    target: Target
    settings: UploadSettings
    pace: Pace
    now: Callable[[], float] = time.monotonic
    hold: Callable[[CheckpointName], AbstractContextManager[object]] = nullcontext
    _begun: dict[CheckpointName, Incoming] = field(default_factory=dict, init=False)
    _kept: set[Claim] | None = field(default=None, init=False)
    _verified: set[CheckpointName] = field(default_factory=set, init=False)
    _fenced: dict[CheckpointName, float] = field(default_factory=dict, init=False)
    _ages: Ages = field(init=False)

    def __post_init__(self) -> None:
        self._ages = Ages(self.target)

    def upload(self, name: CheckpointName) -> Outcome:
        """Copy one checkpoint. Failures are returned, not raised."""
        try:
            with self.hold(name):
                return self._upload(name)
        except OSError as error:
            message = f"the shared tier cannot be read: {error}"
            return Outcome(name=name, cause=FailureCause.SOURCE, message=message)

    def _upload(self, name: CheckpointName) -> Outcome:
        if name not in self.source.commits():
            return Outcome(name=name, gone=True)
        began = self.now()
        try:
            self._keep_claims()
            self._abandon_uploads(name)
            nbytes = self._copy(name, set(self.target.commits()))
        except _ReplacedError:
            return Outcome(name=name, gone=True)
        except CorruptCheckpointError as error:
            if name in self.source.commits():
                return Outcome(name=name, cause=FailureCause.DAMAGED, message=str(error))
            return Outcome(
                name=name, cause=FailureCause.GONE, message="it was deleted before it was copied completely"
            )
        except CheckpointError as error:
            unreadable = isinstance(error.__cause__, OSError) and not isinstance(error, UnavailableError)
            cause = FailureCause.SOURCE if unreadable else cause_of(error)
            return Outcome(name=name, cause=cause, message=str(error))
        return Outcome(name=name, nbytes=nbytes, seconds=self.now() - began)

    def delete_replaced(self, name: CheckpointName) -> str:
        """Delete what the new checkpoint replaces, and unfinished uploads. Return an error message, or ""."""
        try:
            manifest = self.target.manifest(name)
            self._verified.add(name)
            decide = partial(
                retention.decide,
                self._ages.entries(),
                self.target.claims(),
                job_uid=manifest.job_uid,
                own=manifest.attempt_id,
                verified=self._verified,
                keep_last=self.settings.keep_last,
                rules=self.settings.rules,
                now=datetime.now(UTC),
            )
            gone = retention.to_delete(decide(spared=self._recently_fenced(decide())))
            for one in gone:
                self.target.delete(one)
            if gone:
                self._delete_above({str(one) for one in gone})
            self.target.sweep(name)
        except (CheckpointError, OSError) as error:
            return str(error)
        return ""

    def _delete_above(self, gone: set[str]) -> None:
        """Delete checkpoints that another uploader published meanwhile on a deleted base: each checks after its
        writes.
        """
        above = (one.name for one in self._ages.entries() if one.depends_on & gone)
        for name in sorted(above, reverse=True):
            self.target.delete(name)

    def _recently_fenced(self, decided: Iterable[retention.Decision]) -> list[CheckpointName]:
        """Return the fenced checkpoints that this uploader has known as fenced for less than a day."""
        now = self.now()
        names = (one.commit.name for one in decided if one.fenced)
        self._fenced = {name: self._fenced.get(name, now) for name in names}
        return [name for name, since in self._fenced.items() if now - since < FENCED_SECONDS]

    def _copy(self, name: CheckpointName, uploaded: set[CheckpointName]) -> int:
        manifest = self.source.manifest(name)
        if name in uploaded:
            return 0
        below = sorted(filter(None, map(parse_commit, manifest.depends_on)))
        before = sum(self._copy(one, uploaded) for one in below)
        incoming = self._begun[name] = self.target.receive(name, digest(manifest))
        try:
            transfer(self.source, name, manifest, incoming, pace=self.pace)
            incoming.publish(manifest)
        except CorruptCheckpointError as error:  # an unreachable store keeps its parts for the next try
            self._begun.pop(name).discard()
            raise CorruptCheckpointError(
                f"{name} on the shared tier differs from what was written: {error}"
            ) from error
        except OSError:
            self._begun.pop(name).discard()
            raise
        del self._begun[name]
        if lacking := {str(one) for one in below} - {str(one) for one in self.target.commits()}:
            self.target.delete(name)
            raise _ReplacedError(f"{', '.join(sorted(lacking))}, on which it depends, was deleted meanwhile")
        uploaded.add(name)
        return before + sum(record.nbytes for record in manifest.own.values())

    def _abandon_uploads(self, name: CheckpointName) -> None:
        """Abandon the interrupted uploads that this checkpoint does not build on."""
        needed = {str(name), *self.source.manifest(name).depends_on}
        for other in [other for other in self._begun if str(other) not in needed]:
            self._begun.pop(other).discard()

    def _keep_claims(self) -> None:
        if self._kept is None:
            self._kept = set(self.target.claims())
        for claim in self.source.claims():
            if claim not in self._kept:
                self.target.keep_claim(claim)
                self._kept.add(claim)


def source_at(folder: Path) -> CheckpointStore:
    from holdfast.checkpoint.stores.folder import FolderStore

    return FolderStore(folder)
