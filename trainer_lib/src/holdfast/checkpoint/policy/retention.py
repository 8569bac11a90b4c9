"""Decide which checkpoints may be deleted. Pure: the time is an argument, and manifests state the ages.

These rules decide which checkpoints a job may delete:

- On every tier, a job deletes only checkpoints of its own line of attempts. Its own attempts made them, according to
  their manifests. Or an earlier job made them, and the line continues it (`resume: Always`), according to the claims.
  Every other checkpoint stays: it belongs to another job, and was never adopted (`resume: Never`) or was fenced
  before.
- A checkpoint is deleted only if it is older than the newest `keep_last` verified checkpoints that are still
  readable. In addition, no rule keeps it, no checkpoint that stays needs it, and no attempt above the job's current
  one made it. Rules only keep more.
- In the object store, a fenced checkpoint is deleted only after an uploader has known it as fenced for a day. On a
  volume that was rolled back or is corrupt, the claim may have used an older checkpoint because this one was missing.
- A checkpoint with an unreadable manifest stays, because its owner, its age and its base checkpoints are not known.

An administrator may delete other jobs' checkpoints (`others`) with `holdfast checkpoints prune --others`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.policy.fencing import Commit, order
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import UsageError

_COUNTED: Final = ("hours", "daily", "weekly", "every")
_RULE: Final = re.compile(r"(hours|daily|weekly|every)=([1-9]\d{0,8})", re.ASCII)
_BEST: Final = re.compile(r"best=([A-Za-z_][\w./-]{0,63}):(min|max)(?::([1-9]\d{0,3}))?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Best:
    """The `count` checkpoints with the lowest (or highest) value of a metric."""

    metric: str
    highest: bool = False
    count: int = 1

    def __str__(self) -> str:
        return f"best={self.metric}:{'max' if self.highest else 'min'}:{self.count}"


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What is kept in addition to the last checkpoints. 0 means no rule. A checkpoint stays if any rule keeps it."""

    hours: int = 0  # all of the last this many hours
    daily: int = 0  # the last one of each of this many days
    weekly: int = 0  # the last one of each of this many weeks
    every: int = 0  # each step that is a multiple of this, permanently
    best: tuple[Best, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Rules:
        """Parse `hours=6,daily=7,weekly=12,every=10000,best=val_loss:min:3`. Each part is optional."""
        counts: dict[str, int] = {}
        best: list[Best] = []
        for part in filter(None, (part.strip() for part in text.split(","))):
            if (rule := _RULE.fullmatch(part)) is not None and rule[1] not in counts:
                counts[rule[1]] = int(rule[2])
            elif (found := _BEST.fullmatch(part)) is not None:
                best.append(Best(metric=found[1], highest=found[2] == "max", count=int(found[3] or 1)))
            else:
                raise UsageError(
                    f"invalid retention rule {part!r}: expected hours=N, daily=N, weekly=N or every=STEPS, "
                    "each once, or best=METRIC:min or best=METRIC:max:N"
                )
        return cls(**counts, best=tuple(best))

    def to_json(self) -> str:
        return str(self)

    @classmethod
    def from_json(cls, value: str) -> Rules:
        return cls.parse(value)

    def __str__(self) -> str:
        counted = [f"{name}={getattr(self, name)}" for name in _COUNTED if getattr(self, name)]
        return ",".join([*counted, *map(str, self.best)])


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A checkpoint and the relevant fields of its manifest, which are unknown if the manifest is unreadable."""

    commit: Commit
    created: datetime | None = None
    parent: str | None = None
    depends_on: frozenset[str] = frozenset()
    """The checkpoints that hold bytes of this one.

    They are also named here because a parent's manifest may be corrupt.
    """
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> CheckpointName:
        return self.commit.name

    @property
    def unread(self) -> bool:
        return self.commit.job_uid is None


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Whether a checkpoint is deleted, and the reason."""

    commit: Commit
    deleted: bool
    reason: str
    fenced: bool = False
    """Whether no restore can read the checkpoint any more."""


def decide(
    entries: Iterable[Entry],
    claims: Iterable[Claim],
    *,
    job_uid: str,
    own: AttemptId,
    verified: Collection[CheckpointName],
    keep_last: int,
    rules: Rules,
    now: datetime,
    uploading: CheckpointName | None = None,
    spared: Iterable[CheckpointName] = (),
    others: bool = False,
) -> list[Decision]:
    """Decide for each checkpoint whether it is deleted, the oldest first.

    `verified` has the checkpoints that were written or read back completely. `uploading` is being copied to the
    object store. `spared` stay for now. With `others`, checkpoints of other jobs that were never adopted may be
    deleted too.
    """
    entries = sorted(entries, key=lambda entry: entry.name)
    lineage = order((entry.commit for entry in entries), claims, job_uid=job_uid)
    complete = {*verified} - {entry.name for entry in entries if entry.unread}
    good = [commit for commit in lineage if commit.name in complete][:keep_last]
    readable = {commit.name for commit in lineage}
    lineage_entries = [entry for entry in reversed(entries) if entry.name in readable]
    kept: dict[str, str] = {}
    for entry in entries:
        reason = _mandatory(entry.commit, good, readable, own, keep_last)
        if reason:
            kept[str(entry.name)] = reason
    if uploading is not None:
        kept.setdefault(str(uploading), "being copied to the object store")
    for one in spared:
        kept.setdefault(str(one), "fenced only recently")
    for name, reason in _kept_by_rules(lineage_entries, rules, now):
        kept.setdefault(name, reason)
    if not others:
        for name, reason in _of_other_jobs(entries, job_uid, readable):
            kept.setdefault(name, reason)
    for name, reason in _possibly_needed(entries, kept):
        kept.setdefault(name, reason)
    _keep_parents(entries, kept)
    for entry in entries:
        if entry.unread:
            kept.setdefault(str(entry.name), "its manifest cannot be read")
    return [_decision(entry, kept, readable, keep_last) for entry in entries]


def to_delete(decisions: Iterable[Decision]) -> list[CheckpointName]:
    """Return the checkpoints to delete, the newest first.

    In this order, an interrupted deletion never leaves a checkpoint without its base.
    """
    return sorted((one.commit.name for one in decisions if one.deleted), reverse=True)


def _decision(entry: Entry, kept: Mapping[str, str], readable: Collection[CheckpointName], last: int) -> Decision:
    reason, fenced = kept.get(str(entry.name), ""), entry.name not in readable
    if reason:
        return Decision(commit=entry.commit, deleted=False, reason=reason, fenced=fenced)
    why = "fenced: it is never read" if fenced else f"older than the last {last}, and no rule keeps it"
    return Decision(commit=entry.commit, deleted=True, reason=why, fenced=fenced)


def _mandatory(
    commit: Commit,
    good: Sequence[Commit],
    readable: Collection[CheckpointName],
    own: AttemptId,
    keep_last: int,
) -> str:
    """Return the reason for which a checkpoint stays regardless of the rules; "" if there is none."""
    if keep_last < 1 or len(good) < keep_last:
        return f"only {len(good)} of the last {keep_last} are verified"
    if commit.attempt_id > own:
        return f"from an attempt above {own}"
    if commit.name in readable and commit.step >= good[-1].step:
        return f"among the last {keep_last}"
    return ""


def _kept_by_rules(lineage_entries: Sequence[Entry], rules: Rules, now: datetime) -> Iterator[tuple[str, str]]:
    """Yield what each rule keeps of the readable checkpoints, the newest first."""
    for entry in lineage_entries:
        if rules.hours and (entry.created is None or now - entry.created < timedelta(hours=rules.hours)):
            yield str(entry.name), f"hours={rules.hours}"
        if rules.every and entry.commit.step % rules.every == 0:
            yield str(entry.name), f"every={rules.every}"
    yield from _newest_of_each(lineage_entries, _day(now), rules.daily, f"daily={rules.daily}", 1)
    yield from _newest_of_each(lineage_entries, _day(now), rules.weekly, f"weekly={rules.weekly}", 7)
    for best in rules.best:
        yield from _best(lineage_entries, best)


def _newest_of_each(
    lineage_entries: Sequence[Entry], today: int, periods: int, rule: str, days: int
) -> Iterator[tuple[str, str]]:
    """Yield the newest checkpoint of each of the last `periods` periods.

    Periods follow the calendar, so that a checkpoint that was chosen once stays chosen.
    """
    taken: set[int] = set()
    for entry in lineage_entries:
        if entry.created is None:
            continue
        period = _day(entry.created) // days
        if 0 <= today // days - period < periods and period not in taken:
            taken.add(period)
            yield str(entry.name), rule


def _best(lineage_entries: Sequence[Entry], best: Best) -> Iterator[tuple[str, str]]:
    measured = [entry for entry in lineage_entries if best.metric in entry.metrics]
    ranked = sorted(measured, key=lambda entry: entry.metrics[best.metric], reverse=best.highest)
    for entry in ranked[: best.count]:
        yield str(entry.name), str(best)


def _day(moment: datetime) -> int:
    """Return the day number in the UTC calendar. Days of a week, from Monday on, have the same quotient by seven."""
    return moment.toordinal() - 1


def _of_other_jobs(
    entries: Sequence[Entry], job_uid: str, readable: Collection[CheckpointName]
) -> Iterator[tuple[str, str]]:
    for entry in entries:
        owner = entry.commit.job_uid
        if owner not in (None, job_uid) and entry.name not in readable:
            yield str(entry.name), f"belongs to another job ({owner}), which this job does not continue"


def _possibly_needed(entries: Sequence[Entry], kept: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the checkpoints that kept checkpoints with unreadable manifests may need: all earlier ones of the
    attempt.
    """
    unreadable = [entry for entry in entries if entry.unread and str(entry.name) in kept]
    return [
        (str(entry.name), f"{above.name} may depend on it: its manifest cannot be read")
        for above in unreadable
        for entry in entries
        if entry.commit.attempt_id == above.commit.attempt_id and entry.commit.step < above.commit.step
    ]


def _keep_parents(entries: Iterable[Entry], kept: dict[str, str]) -> None:
    """Also keep the base checkpoints of each checkpoint that is kept."""
    below = {str(entry.name): {*filter(None, [entry.parent]), *entry.depends_on} for entry in entries}
    waiting = list(kept)
    while waiting:
        name = waiting.pop()
        for parent in sorted(below.get(name, set()) - kept.keys()):
            kept[parent] = f"{name} depends on it"
            waiting.append(parent)
