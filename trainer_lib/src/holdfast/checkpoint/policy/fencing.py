"""Decide which checkpoints count. Pure: no files, no clock.

Invariant: of all checkpoints on the tiers, only one line of steps is ever read. A checkpoint is ignored if it is
older (by attempt ID) than some claim, and beyond that claim's base. It is beyond the base if its step is above
`from_step`, or its attempt ID above `from_attempt_id`. What an attempt writes after its successor has claimed is
therefore never read. It also never blocks or overwrites the successor.

Only the claims of the line are binding. The first is the highest claim. The next is the highest claim that is not
above the attempt whose checkpoint the previous one continues (`from_attempt_id`), and so on. A claim between two of
them belongs to an attempt whose line ended. The claim above it cuts off everything that it could cut off, except for
the checkpoint that the higher claim continues. The base of the highest claim is therefore always readable, even after
late writes.

A job's first claim voids what other jobs wrote above it. A claim or checkpoint of another job does not count if its
attempt ID is above that claim. Below the first claim, it counts as history, so that a job that is applied again on an
old folder resumes from it. A checkpoint with an unreadable manifest belongs to the job if the job has a claim in that
generation that is not above it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.core.attempt import AttemptId, Claim


class Resume(StrEnum):
    """What a job does with the checkpoints of other jobs, if it is applied again on an old folder."""

    ALWAYS = "Always"
    NEVER = "Never"


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A folder `step-<step>.g<generation>.a<attempt>`.

    The manifest names the owner. `job_uid` and `publication` are None if the manifest is unreadable.
    """

    step: int
    attempt_id: AttemptId
    job_uid: str | None = None
    publication: str | None = None

    @classmethod
    def named(cls, name: CheckpointName, job_uid: str | None = None, publication: str | None = None) -> Commit:
        return cls(step=name.step, attempt_id=name.attempt_id, job_uid=job_uid, publication=publication)

    @property
    def name(self) -> CheckpointName:
        return CheckpointName(step=self.step, attempt_id=self.attempt_id)


@dataclass(frozen=True)
class FencingDecision:
    """Whether a checkpoint may be read, and the reason if not."""

    ok: bool
    reason: str = ""


def union(*sets: Iterable[Claim]) -> tuple[Claim, ...]:
    """Return the claims of several sources without duplicates, in order of attempt IDs."""
    return tuple(sorted({claim for claims in sets for claim in claims}, key=lambda claim: claim.attempt_id))


def first_own(claims: Iterable[Claim], job_uid: str) -> AttemptId | None:
    """Return the attempt ID of the job's first claim. What other jobs have above it is void."""
    return min((claim.attempt_id for claim in claims if claim.job_uid == job_uid), default=None)


def binding(claims: Iterable[Claim], job_uid: str) -> tuple[Claim, ...]:
    """Return the claims that bind this job, the highest first.

    They are the claims of the job's line. Claims of other jobs above the job's first claim are not among them.
    """
    claims = tuple(claims)
    first = first_own(claims, job_uid)
    counted = [claim for claim in claims if claim.job_uid == job_uid or first is None or claim.attempt_id < first]
    bound: list[Claim] = []
    for claim in sorted(counted, key=lambda claim: claim.attempt_id, reverse=True):
        below = bound[-1].from_attempt_id if bound else claim.attempt_id
        if below is not None and claim.attempt_id <= below:
            bound.append(claim)
    return tuple(bound)


def cuts(claim: Claim, commit: Commit) -> bool:
    """Return whether the claim makes an older checkpoint unreadable."""
    if commit.attempt_id >= claim.attempt_id:
        return False
    return commit.step > claim.from_step or claim.from_attempt_id is None or commit.attempt_id > claim.from_attempt_id


def covers(later: Claim, earlier: Claim) -> bool:
    """Return whether a claim cuts off everything that an earlier claim does, in any order of writes."""
    if later.attempt_id <= earlier.attempt_id:
        return False
    if later.from_attempt_id is None or earlier.from_attempt_id is None:
        return later.from_attempt_id is None
    return later.from_step <= earlier.from_step and later.from_attempt_id <= earlier.from_attempt_id


def superfluous(claims: Iterable[Claim], own: Claim) -> tuple[Claim, ...]:
    """Return the job's claims that no decision needs any more, once `own` is durable.

    They are the claims of attempts that are themselves cut off, and that continued from `own`'s state or a later one.
    A job that repeatedly fails after the same checkpoint leaves one such claim each time. A claim from which training
    continued is needed forever. A process that it cut off may write at any time, at steps that later claims do not
    cut off.

    The job's first claim stays, because it defines what is void of other jobs. While another job has a claim above
    it, all claims stay: for that job, ours are void above its own first claim. If a later attempt has claimed, all
    claims stay as well: `own` was written late, and may belong to no line.
    """
    claims = tuple(claims)
    if any(claim.attempt_id > own.attempt_id for claim in claims):
        return ()
    first = first_own(claims, own.job_uid)
    if any(claim.job_uid != own.job_uid and first is not None and claim.attempt_id >= first for claim in claims):
        return ()
    return tuple(c for c in claims if c.job_uid == own.job_uid and c.attempt_id != first and covers(own, c))


def readable(
    commit: Commit, claims: Iterable[Claim], *, job_uid: str, resume: Resume = Resume.ALWAYS
) -> FencingDecision:
    """Decide whether the job may restore the checkpoint. `claims` is the union over all tiers and the membership."""
    claims = tuple(claims)
    first = first_own(claims, job_uid)
    own = _is_own(commit, claims, job_uid)
    if not own and first is not None and commit.attempt_id >= first:
        return FencingDecision(False, f"written by another job above this job's first claim {first}")
    if not own and resume is Resume.NEVER:
        return FencingDecision(False, "written by another job, and resume is Never")
    for claim in binding(claims, job_uid):
        if cuts(claim, commit):
            return FencingDecision(False, f"fenced by claim {claim.attempt_id} from step {claim.from_step}")
    return FencingDecision(True)


def _is_own(commit: Commit, claims: Sequence[Claim], job_uid: str) -> bool:
    """Return whether the job owns the checkpoint.

    The manifest names the owner. If it cannot be read, the job owns the checkpoint if the job has a claim under which
    it may have been saved. An attempt saves under its own claim, or under an earlier one of its generation
    (`inherits`). Such a claim is enough, even below another job's claim. An unreadable checkpoint is never restored,
    so taking another job's checkpoint for ours costs little. The opposite error would skip ours as if it did not
    exist.
    """
    if commit.job_uid is not None:
        return commit.job_uid == job_uid
    attempt_id = commit.attempt_id
    own = (claim.attempt_id for claim in claims if claim.job_uid == job_uid)
    return any(claimed.generation == attempt_id.generation and claimed <= attempt_id for claimed in own)


def order(
    commits: Iterable[Commit], claims: Iterable[Claim], *, job_uid: str, resume: Resume = Resume.ALWAYS
) -> list[Commit]:
    """Return the readable checkpoints, the newest first; for one step, the highest attempt ID first."""
    claims = tuple(claims)
    kept = (c for c in commits if readable(c, claims, job_uid=job_uid, resume=resume).ok)
    return sorted(kept, key=lambda commit: commit.name, reverse=True)


def inherits(
    attempt_id: AttemptId,
    *,
    synced: AttemptId | None,
    claimed: Iterable[int | None],
    trained: Iterable[AttemptId | None],
) -> bool:
    """Return whether the attempt `attempt_id` may save under the existing claim of its generation, without its own
    claim.

    The attempt continues from the memory of `synced`. `claimed` has the generations whose claim its survivors know to
    be durable. `trained` has the highest attempts in which its launchers had ranks before. An attempt above `synced`
    may have voted with ranks that have since exited. Its checkpoint may exist, or still be written, and only a new
    claim prevents reading it. No other attempt saved a checkpoint, because any two worlds of one generation share a
    launcher.
    """
    if synced is None or attempt_id.generation not in claimed:
        return False
    return all(before is None or before <= synced for before in trained)


def foreign(
    claims: Iterable[Claim], *, known: Iterable[Claim], job_uid: str, attempt_id: AttemptId, publication: str
) -> tuple[Claim, ...]:
    """Return the claims on a tier that stop the attempt `attempt_id` of `publication`. `known` has its membership's
    claims.

    Claims of any job below our generation are history, because our claim is above them. In our generation or above, a
    claim of another job is foreign. A claim of our own job is foreign if it has another publication or a later
    generation. In this case the operator's status was restored from an old backup, or this attempt is outdated.
    """
    known = frozenset(known)

    def stops(claim: Claim) -> bool:
        if claim.attempt_id.generation < attempt_id.generation:
            return False
        later = claim.attempt_id.generation > attempt_id.generation
        return claim.job_uid != job_uid or later or claim.publication != publication

    return tuple(claim for claim in claims if claim not in known and stops(claim))
