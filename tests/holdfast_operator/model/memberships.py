"""Memberships, workers and their reports, as the rules of membership read them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from holdfast_operator.api.ids import AttemptId
from holdfast_operator.api.status import Claim, Member, Membership
from holdfast_operator.decision.membership.candidates import (
    NO_INDEX,
    Candidate,
    MembershipInput,
    MembershipRules,
)
from holdfast_operator.views import Report, World

NOW = datetime(2026, 1, 1, tzinfo=UTC)
JOB = "job"
RULES = MembershipRules(replicas=3, min_replicas=1)


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


def attempt(generation_number: int, number: int) -> AttemptId:
    return AttemptId(generation=generation_number, attempt=number)


def member(index: int, uid: str) -> Member:
    return Member(index=index, pod_uid=uid, pod=uid, ip="", store=29400, control=29401, node="")


def members(*uids: str) -> tuple[Member, ...]:
    return tuple(member(index, uid) for index, uid in enumerate(uids))


def generation(number: int, *uids: str, active: AttemptId | None = None, **more: object) -> Membership:
    publication = f"p{number}"
    return Membership(  # type: ignore[arg-type]
        revision=10, generation=number, publication=publication, active=active, members=members(*uids), **more
    )


def candidate(uid: str, report: Report | None = None, **more: object) -> Candidate:
    return Candidate(member=member(NO_INDEX, uid), report=report, **more)  # type: ignore[arg-type]


def worker(uid: str, world: World | None = None, **said: object) -> Candidate:
    report = Report(pod_uid=uid, received_at=NOW, has_launcher=True, world=world, **said)  # type: ignore[arg-type]
    return candidate(uid, report, ready=True, ready_at=NOW - seconds(100))


def silent(uid: str) -> Candidate:
    return replace(worker(uid), ready=False, ready_at=None)


def running(number: int, attempt_number: int, *uids: str, publication: str = "") -> World:
    attempt_id, publication = attempt(number, attempt_number), publication or f"p{number}"
    return World(attempt_id=attempt_id, publication=publication, members=uids, coordinator="")


def observed(
    membership: Membership | None,
    *workers: Candidate,
    gone: frozenset[str] = frozenset(),
    rules: MembershipRules = RULES,
) -> MembershipInput:
    return MembershipInput(
        membership=membership or Membership(),
        workers=workers,
        proved_gone=gone,
        rules=rules,
        publication="fresh",
        job_uid=JOB,
    )


def claim(number: int, attempt_number: int, job: str = JOB) -> Claim:
    return Claim(attempt_id=attempt(number, attempt_number), job_uid=job, publication=f"p{number}", from_step=0)
