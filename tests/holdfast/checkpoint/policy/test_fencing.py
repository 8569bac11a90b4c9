"""Which checkpoints are readable: the table of what a claim fences, and which claims bind a job."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.policy.fencing import (
    Commit,
    Resume,
    binding,
    covers,
    cuts,
    foreign,
    inherits,
    order,
    readable,
    superfluous,
)
from holdfast.core.attempt import AttemptId, Claim

JOB = "job-b"
OLD = "job-a"


def claim(generation: int, attempt: int, step: int, origin: AttemptId | None, job: str = JOB) -> Claim:
    publication = f"{job}-p{generation}"
    return Claim(
        attempt_id=AttemptId(generation, attempt),
        job_uid=job,
        publication=publication,
        from_step=step,
        from_attempt_id=origin,
    )


def commit(step: int, generation: int, attempt: int, job: str = JOB) -> Commit:
    return Commit(step=step, attempt_id=AttemptId(generation, attempt), job_uid=job)


FIRST = claim(1, 1, 0, None)
SECOND = claim(1, 2, 50, AttemptId(1, 1))


@pytest.mark.parametrize(
    ("found", "ok", "why"),
    [
        (commit(50, 1, 1), True, "the commit that the successor went on from"),
        (commit(20, 1, 1), True, "an earlier one of the same line"),
        (commit(60, 1, 1), False, "what the predecessor wrote beyond that"),
        (commit(60, 1, 2), True, "the successor's own"),
        (commit(10, 1, 2), True, "whatever the newest attempt commits"),
    ],
)
def test_a_claim_ends_the_attempts_before_it_at_its_step(found: Commit, ok: bool, why: str) -> None:
    assert readable(found, [FIRST, SECOND], job_uid=JOB).ok is ok, why


def test_checkpoint_of_a_superseded_attempt_is_never_read() -> None:
    """Steps below that of the claim are no exception."""
    third = claim(2, 1, 50, AttemptId(1, 1))
    verdict = readable(commit(40, 1, 2), [FIRST, third], job_uid=JOB)
    assert not verdict.ok
    assert verdict.reason == "fenced by claim 2.1 from step 50"


def test_a_fresh_start_ends_everything_before_it() -> None:
    fresh = claim(2, 1, 0, None)
    assert not readable(commit(1, 1, 1), [FIRST, fresh], job_uid=JOB).ok


def test_within_a_step_the_highest_attempt_id_comes_first() -> None:
    """Newer steps come before older ones."""
    claims = [FIRST, SECOND, claim(1, 3, 50, AttemptId(1, 2))]
    found = [commit(50, 1, 1), commit(50, 1, 2), commit(60, 1, 3), commit(55, 1, 2), commit(20, 1, 1)]
    assert order(found, claims, job_uid=JOB) == [
        commit(60, 1, 3),
        commit(50, 1, 2),
        commit(50, 1, 1),
        commit(20, 1, 1),
    ]


def test_without_any_claim_everything_is_readable() -> None:
    assert order([commit(1, 1, 1), commit(2, 1, 1)], [], job_uid=JOB) == [commit(2, 1, 1), commit(1, 1, 1)]


OLD_CLAIMS = [claim(3, 1, 0, None, OLD), claim(3, 2, 30, AttemptId(3, 1), OLD)]


def test_a_job_applied_again_reads_the_old_jobs_newest_commit() -> None:
    found = [commit(40, 3, 2, OLD), commit(35, 3, 1, OLD), commit(30, 3, 1, OLD)]
    assert order(found, OLD_CLAIMS, job_uid=JOB) == [commit(40, 3, 2, OLD), commit(30, 3, 1, OLD)]


def test_with_resume_never_it_reads_only_its_own() -> None:
    found = [commit(40, 3, 2, OLD)]
    assert order(found, OLD_CLAIMS, job_uid=JOB, resume=Resume.NEVER) == []
    own = claim(4, 1, 0, None)
    found.append(commit(5, 4, 1))
    assert order(found, [*OLD_CLAIMS, own], job_uid=JOB, resume=Resume.NEVER) == [commit(5, 4, 1)]


def test_its_first_claim_voids_what_the_old_job_writes_above_it() -> None:
    own = claim(4, 1, 40, AttemptId(3, 2))
    late = claim(5, 1, 10, AttemptId(3, 1), OLD)
    claims = [*OLD_CLAIMS, own, late]
    assert late not in binding(claims, JOB)
    assert readable(commit(60, 4, 1), claims, job_uid=JOB).ok
    verdict = readable(commit(70, 5, 1, OLD), claims, job_uid=JOB)
    assert not verdict.ok
    assert "another job above this job's first claim 4.1" in verdict.reason


def test_a_commit_whose_manifest_names_no_owner_is_the_claimants() -> None:
    own = claim(4, 1, 40, AttemptId(3, 2))
    nameless = Commit(step=60, attempt_id=AttemptId(4, 1))
    assert readable(nameless, [*OLD_CLAIMS, own], job_uid=JOB).ok
    assert not readable(Commit(step=60, attempt_id=AttemptId(5, 1)), [*OLD_CLAIMS, own], job_uid=JOB).ok


@pytest.mark.parametrize(
    ("attempt_id", "ok", "why"),
    [
        (
            AttemptId(4, 3),
            True,
            "it may be of an attempt that went on from memory, under the claim of its generation",
        ),
        (AttemptId(5, 1), False, "no claim of a generation is inherited by the next"),
        (AttemptId(5, 3), False, "of a generation in which another job has claimed"),
        (AttemptId(3, 2), True, "below the job's first claim it is history"),
        (AttemptId(6, 3), True, "another job has claimed meanwhile, and ours still stood"),
        (AttemptId(6, 1), False, "an attempt of ours claims before it commits, and this one did not"),
    ],
)
def test_unreadable_manifest_belongs_to_the_generations_claimant(attempt_id: AttemptId, ok: bool, why: str) -> None:
    ours = [claim(4, 2, 40, AttemptId(3, 2)), claim(6, 2, 60, AttemptId(4, 3))]
    others = [*OLD_CLAIMS, claim(5, 2, 10, AttemptId(3, 1), OLD), claim(6, 3, 10, AttemptId(3, 1), OLD)]
    assert readable(Commit(step=20, attempt_id=attempt_id), [*ours, *others], job_uid=JOB).ok is ok, why


def test_unreadable_checkpoint_of_an_heir_is_fenced_by_a_claim() -> None:
    """The claim is that of the attempt that superseded the heir."""
    claims = [FIRST, claim(1, 3, 50, AttemptId(1, 1))]
    assert not readable(Commit(step=40, attempt_id=AttemptId(1, 2)), claims, job_uid=JOB).ok
    assert not readable(Commit(step=60, attempt_id=AttemptId(1, 1)), claims, job_uid=JOB).ok
    assert readable(Commit(step=60, attempt_id=AttemptId(1, 4)), claims, job_uid=JOB).ok


def test_resume_never_leaves_an_heir_its_unreadable_checkpoint() -> None:
    own = claim(4, 1, 0, None)
    heir = Commit(step=5, attempt_id=AttemptId(4, 2))
    assert order([heir], [*OLD_CLAIMS, own], job_uid=JOB, resume=Resume.NEVER) == [heir]


@pytest.mark.parametrize(
    ("found", "stops", "why"),
    [
        (claim(2, 1, 0, None), False, "our own publication"),
        (claim(1, 9, 0, None), False, "our own past"),
        (claim(3, 1, 0, None), True, "our own future: we are a zombie"),
        (claim(2, 1, 0, None, OLD), True, "another job in our generation"),
        (claim(9, 1, 0, None, OLD), True, "another job above us"),
        (claim(1, 1, 0, None, OLD), False, "another job's past"),
    ],
)
def test_foreign_claims_of_our_generation_or_above_stop_us(found: Claim, stops: bool, why: str) -> None:
    mine = {"job_uid": JOB, "attempt_id": AttemptId(2, 1), "publication": f"{JOB}-p2"}
    assert bool(foreign([found], known=[], **mine)) is stops, why  # type: ignore[arg-type]
    assert not foreign([found], known=[found], **mine), "what the membership knows, its generation is above"  # type: ignore[arg-type]


def test_same_generation_of_another_publication_is_foreign() -> None:
    twin = Claim(attempt_id=AttemptId(2, 1), job_uid=JOB, publication="twin", from_step=0)
    assert foreign([twin], known=[], job_uid=JOB, attempt_id=AttemptId(2, 1), publication=f"{JOB}-p2") == (twin,)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Claim], list[tuple[Commit, tuple[AttemptId, ...]]]]:
    """Attempts restore what is readable, claim, and save. Some checkpoints are published only at the end."""
    claims: list[Claim] = []
    written: list[tuple[Commit, tuple[AttemptId, ...]]] = []
    late: list[tuple[Commit, tuple[AttemptId, ...]]] = []
    for number in range(1, draw(st.integers(2, 6))):
        attempt_id = AttemptId(1, number)
        best = order([c for c, _ in written], claims, job_uid=JOB)
        base = next((line for c, line in written if best and c == best[0]), ())
        claims.append(claim(1, number, len(base), best[0].attempt_id if best else None))
        line = base
        for _ in range(draw(st.integers(0, 4))):
            line = (*line, attempt_id)
            target = late if draw(st.booleans()) else written
            target.append((commit(len(line), 1, number), line))
        for entry in list(late):
            if draw(st.booleans()):
                late.remove(entry)
                written.append(entry)
    return claims, [*written, *late]


@settings(derandomize=True, max_examples=300, deadline=None)
@given(histories())
def test_whatever_lands_late_only_one_line_is_readable(
    history: tuple[list[Claim], list[tuple[Commit, tuple[AttemptId, ...]]]],
) -> None:
    claims, written = history
    lines = [line for found, line in written if readable(found, claims, job_uid=JOB).ok]
    longest = max(lines, key=len, default=())
    assert all(longest[: len(line)] == line for line in lines)


# Claims that are no longer needed

attempt_ids = st.builds(AttemptId, st.integers(1, 3), st.integers(1, 4))
commits = st.builds(
    lambda step, attempt_id: Commit(step=step, attempt_id=attempt_id, job_uid=JOB), st.integers(0, 6), attempt_ids
)
claims_of_all_kinds = st.builds(
    lambda attempt_id, step, origin: claim(
        attempt_id.generation, attempt_id.attempt, step, None if origin is None else min(origin, attempt_id)
    ),
    attempt_ids,
    st.integers(0, 5),
    st.one_of(st.none(), attempt_ids),
)


@settings(derandomize=True, max_examples=500, deadline=None)
@given(claims_of_all_kinds, claims_of_all_kinds, commits)
def test_what_a_claim_cuts_off_so_does_one_that_covers_it(later: Claim, earlier: Claim, found: Commit) -> None:
    if covers(later, earlier) and cuts(earlier, found):
        assert cuts(later, found)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(histories(), st.lists(commits, max_size=20))
def test_removing_redundant_claims_changes_no_readability(
    history: tuple[list[Claim], list[tuple[Commit, tuple[AttemptId, ...]]]], late: list[Commit]
) -> None:
    """Checkpoints that appear later are no exception."""
    claims, written = history
    kept: list[Claim] = []
    for own in claims:
        kept.append(own)
        gone = superfluous(kept, own)
        kept = [one for one in kept if one not in gone]
    for found in (*(one for one, _ in written), *late):
        assert readable(found, kept, job_uid=JOB).ok is readable(found, claims, job_uid=JOB).ok


def test_repeated_failures_keep_the_first_and_the_last_claim() -> None:
    """All attempts start from the same checkpoint."""
    again = [claim(2, attempt, 50, AttemptId(1, 1)) for attempt in range(1, 4)]
    assert superfluous([FIRST, *again], again[-1]) == tuple(again[:-1])


@pytest.mark.parametrize(
    ("before", "own", "why"),
    [
        (SECOND, claim(2, 1, 80, AttemptId(1, 2)), "what 1.1 writes at steps 51 to 80 only the earlier one cuts off"),
        (claim(1, 2, 0, None), claim(2, 1, 0, AttemptId(1, 1)), "it cuts off everything"),
    ],
)
def test_a_claim_from_which_training_went_on_stays(before: Claim, own: Claim, why: str) -> None:
    assert superfluous([FIRST, before, own], own) == (), why


def test_beside_another_jobs_claims_all_stay() -> None:
    again = [claim(2, attempt, 50, AttemptId(1, 1)) for attempt in (1, 2)]
    assert superfluous([FIRST, claim(3, 1, 0, None, OLD), *again], again[-1]) == ()


@pytest.mark.parametrize(
    ("synced", "claimed", "trained", "may", "why"),
    [
        (
            AttemptId(2, 3),
            [2, None],
            [AttemptId(2, 3), AttemptId(2, 3), None],
            True,
            "a survivor knows of its generation's claim",
        ),
        (AttemptId(2, 3), [None], [AttemptId(2, 3)], False, "the claim of its generation failed, or is unknown"),
        (AttemptId(1, 3), [1], [AttemptId(1, 3)], False, "the generation is new"),
        (
            AttemptId(2, 3),
            [2],
            [AttemptId(2, 3), AttemptId(2, 4)],
            False,
            "an attempt between may have committed, and its ranks died",
        ),
        (None, [], [AttemptId(2, 3)], False, "nobody has a state in memory"),
    ],
)
def test_who_goes_on_under_the_claim_of_its_generation(
    synced: AttemptId | None, claimed: list[int | None], trained: list[AttemptId | None], may: bool, why: str
) -> None:
    assert inherits(AttemptId(2, 5), synced=synced, claimed=claimed, trained=trained) is may, why


attempt_ids = st.builds(AttemptId, st.integers(1, 4), st.integers(1, 3))
lines = st.lists(st.tuples(attempt_ids, st.integers(1, 9), attempt_ids), min_size=1, max_size=8)


@given(lines)
def test_the_commit_that_the_highest_claim_continues_is_readable(
    drawn: list[tuple[AttemptId, int, AttemptId]],
) -> None:
    """This holds for all claims of lower attempts, whenever they are written."""
    claims = [
        Claim(attempt_id=attempt_id, job_uid=JOB, publication="p", from_step=step, from_attempt_id=origin)
        for attempt_id, step, origin in drawn
        if origin < attempt_id
    ]
    if not claims:
        return
    highest = max(claims, key=lambda one: one.attempt_id)
    assert highest.from_attempt_id is not None
    base = Commit(step=highest.from_step, attempt_id=highest.from_attempt_id, job_uid=JOB)
    assert readable(base, claims, job_uid=JOB).ok


def test_the_late_claim_of_an_ended_line_cuts_off_nothing() -> None:
    """3.1 saves step 100, 3.2 restored 50 and is stuck before it claims, 4.1 restores 100."""
    commits = [commit(50, 1, 1), commit(100, 3, 1)]
    claims = [FIRST, claim(3, 1, 50, AttemptId(1, 1)), claim(4, 1, 100, AttemptId(3, 1))]
    late = claim(3, 2, 50, AttemptId(1, 1))
    assert order(commits, [*claims, late], job_uid=JOB) == order(commits, claims, job_uid=JOB) == commits[::-1]
    assert not readable(commit(60, 3, 2), [*claims, late], job_uid=JOB).ok, "what the ended line writes stays cut off"


def test_a_claim_that_lands_late_makes_no_other_superfluous() -> None:
    """2.2 restored 50 like 2.1, and claims after 3.1. Without the claim of 2.1, late saves of 1.1 would count."""
    early, top = claim(2, 1, 50, AttemptId(1, 1)), claim(3, 1, 100, AttemptId(2, 1))
    late = claim(2, 2, 50, AttemptId(1, 1))
    assert superfluous([FIRST, early, late, top], late) == ()
    zombie = commit(60, 1, 1)
    assert not readable(zombie, [FIRST, early, late, top], job_uid=JOB).ok
