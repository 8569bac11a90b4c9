"""Which commits count. Pure: no files, no clock.

Invariant: of everything that stands on the tiers, only one line of steps is ever read. A commit is ignored when
it is older (by pair) than some claim and its step lies beyond that claim's `from_step`, or its pair above that
claim's `from_pair`: what an attempt writes after its successor claimed is never read, and never blocks or
overwrites the successor.

Only the claims of the line bind: the highest one, then the highest that is not above the attempt whose commit that
one continues (`from_pair`), and so on. A claim between them is of an attempt whose line ended: all that it could cut
off is cut off by the claim above it, but for the commit that this one continues. So the base of the highest claim is
always readable, whatever lands late.

A job's first claim voids what others wrote above it: another job's claim or commit whose pair is above the job's
own first claim counts for nothing. Below it, it counts as history, so that a job applied again on an old folder
resumes it. A commit whose manifest cannot be read is the job's if it has a claim in that generation, not above it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.core.attempt import AttemptId, Claim


class Resume(StrEnum):
    """What a job that is applied again on an old folder does."""

    ALWAYS = "Always"
    NEVER = "Never"


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A folder `step-<step>.g<generation>.a<attempt>`. Its manifest names the owner; None if it is unreadable."""

    step: int
    pair: AttemptId
    job_uid: str | None = None
    publication: str | None = None

    @classmethod
    def named(cls, name: CheckpointName, job_uid: str | None = None, publication: str | None = None) -> Commit:
        return cls(step=name.step, pair=name.pair, job_uid=job_uid, publication=publication)

    @property
    def name(self) -> CheckpointName:
        return CheckpointName(step=self.step, pair=self.pair)


@dataclass(frozen=True)
class FencingDecision:
    """Whether a commit may be read, and why not."""

    ok: bool
    reason: str = ""


def union(*sets: Iterable[Claim]) -> tuple[Claim, ...]:
    """Claims of several sources, each once, in their order."""
    return tuple(sorted({claim for claims in sets for claim in claims}, key=lambda claim: claim.pair))


def first_own(claims: Iterable[Claim], job_uid: str) -> AttemptId | None:
    """The pair of the job's first claim: what others have above it is void."""
    return min((claim.pair for claim in claims if claim.job_uid == job_uid), default=None)


def binding(claims: Iterable[Claim], job_uid: str) -> tuple[Claim, ...]:
    """The claims that count for this job, the highest first: those of its line, and none of others above its own
    first claim."""
    claims = tuple(claims)
    first = first_own(claims, job_uid)
    counted = [claim for claim in claims if claim.job_uid == job_uid or first is None or claim.pair < first]
    line: list[Claim] = []
    for claim in sorted(counted, key=lambda claim: claim.pair, reverse=True):
        below = line[-1].from_pair if line else claim.pair
        if below is not None and claim.pair <= below:
            line.append(claim)
    return tuple(line)


def cuts(claim: Claim, commit: Commit) -> bool:
    """Whether the claim makes an older commit unreadable."""
    if commit.pair >= claim.pair:
        return False
    return commit.step > claim.from_step or claim.from_pair is None or commit.pair > claim.from_pair


def covers(later: Claim, earlier: Claim) -> bool:
    """Whether a claim cuts off all that an earlier one does, whatever lands when."""
    if later.pair <= earlier.pair:
        return False
    if later.from_pair is None or earlier.from_pair is None:
        return later.from_pair is None
    return later.from_step <= earlier.from_step and later.from_pair <= earlier.from_pair


def superfluous(claims: Iterable[Claim], own: Claim) -> tuple[Claim, ...]:
    """Claims of the job without which the same commits are read for ever, now that `own` is durable.

    They are those of attempts that went on from no earlier than `own` does, and are cut off themselves: a job that
    fails again and again after the same commit leaves one each time. A claim from which training went on is needed
    for ever: what a process writes that it cut off may land at any time, at steps that later claims do not cut off.
    The job's first one stays: it says what is void of others. While another job claims above that one, all stay: for
    it, ours are void above its own first. All stay as well if a later attempt has claimed: `own` landed late, and
    may be of no line.
    """
    claims = tuple(claims)
    if any(claim.pair > own.pair for claim in claims):
        return ()
    first = first_own(claims, own.job_uid)
    if any(claim.job_uid != own.job_uid and first is not None and claim.pair >= first for claim in claims):
        return ()
    return tuple(c for c in claims if c.job_uid == own.job_uid and c.pair != first and covers(own, c))


def readable(
    commit: Commit, claims: Iterable[Claim], *, job_uid: str, resume: Resume = Resume.ALWAYS
) -> FencingDecision:
    """Whether the job may restore the commit; `claims` is the union over all tiers and the membership."""
    claims = tuple(claims)
    first = first_own(claims, job_uid)
    own = _is_own(commit, claims, job_uid)
    if not own and first is not None and commit.pair >= first:
        return FencingDecision(False, f"written by another job above this job's first claim {first}")
    if not own and resume is Resume.NEVER:
        return FencingDecision(False, "written by another job, and resume is Never")
    for claim in binding(claims, job_uid):
        if cuts(claim, commit):
            return FencingDecision(False, f"fenced by claim {claim.pair} from step {claim.from_step}")
    return FencingDecision(True)


def _is_own(commit: Commit, claims: Sequence[Claim], job_uid: str) -> bool:
    """By its manifest; where that cannot be read, by whether the job has a claim that the commit may be made under.

    An attempt commits under its own claim, or under that of an earlier one of its generation (`inherits`). Such a
    claim of the job is enough, also beneath another job's: what cannot be read is never restored, so it costs little
    to take another's for ours, while ours taken for another's is passed over as if nothing had been there.
    """
    if commit.job_uid is not None:
        return commit.job_uid == job_uid
    pair = commit.pair
    own = (claim.pair for claim in claims if claim.job_uid == job_uid)
    return any(claimed.generation == pair.generation and claimed <= pair for claimed in own)


def order(
    commits: Iterable[Commit], claims: Iterable[Claim], *, job_uid: str, resume: Resume = Resume.ALWAYS
) -> list[Commit]:
    """The readable commits, newest first; of one step the highest pair first."""
    claims = tuple(claims)
    kept = (c for c in commits if readable(c, claims, job_uid=job_uid, resume=resume).ok)
    return sorted(kept, key=lambda commit: commit.name, reverse=True)


def inherits(
    pair: AttemptId, *, synced: AttemptId | None, claimed: Iterable[int | None], trained: Iterable[AttemptId | None]
) -> bool:
    """Whether the attempt `pair` may commit under the claim that its generation has, and writes none of its own.

    It goes on from the memory of `synced`. `claimed` are the generations whose claim its survivors know to be
    durable, `trained` the highest attempts that its launchers had ranks in before. One above `synced` may have voted
    with ranks that are dead by now, and its commit may stand or still land: only a new claim keeps that from being
    read. Of attempts that are not among them none committed: any two worlds of one generation share a launcher.
    """
    if synced is None or pair.generation not in claimed:
        return False
    return all(before is None or before <= synced for before in trained)


def foreign(
    claims: Iterable[Claim], *, known: Iterable[Claim], job_uid: str, pair: AttemptId, publication: str
) -> tuple[Claim, ...]:
    """Claims on a tier that stop the attempt `pair` of `publication`; `known` are those of its membership.

    What stands below our generation is history, whoever wrote it: our claim is above it. Of our generation or above,
    another job's claim is foreign, and so is one of our own job under another publication or in a later generation:
    the operator's status was restored from an old backup, or we are the past.
    """
    known = frozenset(known)

    def stops(claim: Claim) -> bool:
        if claim.pair.generation < pair.generation:
            return False
        later = claim.pair.generation > pair.generation
        return claim.job_uid != job_uid or later or claim.publication != publication

    return tuple(claim for claim in claims if claim not in known and stops(claim))
