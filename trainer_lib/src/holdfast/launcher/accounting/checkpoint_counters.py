"""Counters for the status: what the local ranks wrote to each tier and read back since the launcher started. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.checkpoint.format.failure_causes import FailureCause
from holdfast.core.attempt import AttemptId
from holdfast.core.protocol import PEER_TIER, SURVIVOR

_NOTHING = "none"


@dataclass(kw_only=True)
class Written:
    """Checkpoints written to one tier.

    `nbytes` is the sum over all local ranks. `seconds` is the duration of each checkpoint, as the first rank reported
    it.
    """

    commits: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    last: tuple[AttemptId, int] | None = None

    def to_json(self) -> dict[str, Any]:
        return {"commits": self.commits, "bytes": self.nbytes, "seconds": round(self.seconds, 3)}


@dataclass(frozen=True, kw_only=True)
class Failing:
    """The checkpoints that failed on one tier since the last durable one."""

    since: float
    """The time of the first failure, in seconds since the epoch."""
    commits: int
    cause: str
    message: str


@dataclass(kw_only=True)
class CheckpointCounters:
    """Counters of checkpoints and restores. Every rank reports the same ones; each counts once."""

    written: dict[str, Written] = field(default_factory=dict)
    failures: dict[str, Counter[str]] = field(default_factory=dict)
    """Checkpoint failures by cause, for each tier."""
    failing: dict[str, Failing] = field(default_factory=dict)
    """The tiers on which the last checkpoint failed."""
    restores: Counter[str] = field(default_factory=Counter)
    fallbacks: int = 0
    _failed: dict[str, tuple[AttemptId, int]] = field(default_factory=dict)
    _restored: AttemptId | None = None
    _passed_by: set[str] = field(default_factory=set)

    def committed(self, attempt_id: AttemptId, report: Mapping[str, Any]) -> None:
        """Count a rank's durable part of a checkpoint. A part in memory may also have been copied to another node."""
        step, nbytes = int(report["step"]), int(report.get("bytes", 0))
        copying = float(report.get("copying", 0.0))
        self.failing.pop(str(report["tier"]), None)
        self._write(str(report["tier"]), (attempt_id, step), nbytes, float(report["seconds"]) - copying)
        if copying:
            self.failing.pop(PEER_TIER, None)
            self._write(PEER_TIER, (attempt_id, step), nbytes, copying)

    def failed(self, attempt_id: AttemptId, report: Mapping[str, Any], now: float) -> str:
        """Count a failed checkpoint. Return its cause, or "" if it is known. `now` is Unix time."""
        tier, commit = str(report["tier"]), (attempt_id, int(report["step"]))
        if self._failed.get(tier) == commit:
            return ""
        self._failed[tier] = commit
        cause = str(report.get("cause", FailureCause.OTHER))
        self.failures.setdefault(tier, Counter())[cause] += 1
        if cause != FailureCause.NO_FOLDER:  # without a folder, no checkpoint was promised
            self._fails(tier, cause, str(report["message"]), now)
        return cause

    def _fails(self, tier: str, cause: str, message: str, now: float) -> None:
        """Keep the first message until the cause changes, because each checkpoint names other files."""
        before = self.failing.get(tier)
        since, commits = (now, 1) if before is None else (before.since, before.commits + 1)
        message = before.message if before is not None and before.cause == cause else message
        self.failing[tier] = Failing(since=since, commits=commits, cause=cause, message=message)

    def _write(self, tier: str, commit: tuple[AttemptId, int], nbytes: int, seconds: float) -> None:
        written = self.written.setdefault(tier, Written())
        written.nbytes += nbytes
        if written.last != commit:
            written.last = commit
            written.commits += 1
            written.seconds += seconds

    def restored(self, attempt_id: AttemptId, report: Mapping[str, Any]) -> None:
        """Count a restore by the source of the state: a surviving rank, the named tiers, or none."""
        if self._restored != attempt_id:
            self._restored = attempt_id
            self._passed_by.clear()
            tiers = list(map(str, report.get("tiers", ())))
            self.restores.update([SURVIVOR] if report.get("source") == "memory" else tiers or [_NOTHING])
        bad = {
            str(one["path"]) for one in (*report.get("quarantined", ()), *report.get("lost", ()))
        } - self._passed_by
        self._passed_by |= bad
        self.fallbacks += len(bad)

    def to_json(self) -> dict[str, Any]:
        return {
            "checkpointFailures": {tier: causes.total() for tier, causes in self.failures.items()},
            "checkpointFailureCauses": {tier: dict(causes) for tier, causes in self.failures.items()},
            "checkpointWrites": {tier: written.to_json() for tier, written in self.written.items()},
            "restores": dict(self.restores),
            "fallbacks": self.fallbacks,
        }
