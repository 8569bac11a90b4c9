"""The rules of membership for whatever is reported: total, within the invariants, and settled soon."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memberships import (
    NOW,
    attempt,
    observed,
    running,
    worker,
)

from holdfast_operator.api.status import Claim, Membership
from holdfast_operator.decision.membership.candidates import (
    Candidate,
    MembershipRules,
    Wait,
)
from holdfast_operator.decision.membership.rules import check_invariants, decide

ATTEMPT_IDS = st.one_of(st.none(), st.builds(attempt, st.integers(1, 4), st.integers(1, 3)))
CLAIMS = st.builds(
    Claim,
    attempt_id=st.builds(attempt, st.integers(1, 6), st.just(1)),
    job_uid=st.just("old"),
    publication=st.just("p"),
    from_step=st.just(0),
    from_attempt_id=ATTEMPT_IDS,
)
UIDS = st.sampled_from(["a", "b", "c", "d", "e"])


@st.composite
def workers(draw: st.DrawFn) -> tuple[Candidate, ...]:
    found = []
    for uid in draw(st.sets(UIDS)):
        attempt_id = draw(ATTEMPT_IDS)
        others = tuple(sorted(draw(st.sets(UIDS)) | {uid}))
        world = running(attempt_id.generation, attempt_id.attempt, *others) if attempt_id else None
        found.append(
            replace(
                worker(
                    uid,
                    world,
                    accepted=draw(ATTEMPT_IDS),
                    started=draw(ATTEMPT_IDS),
                    lost_members=tuple(draw(st.sets(UIDS))),
                    foreign_claims=tuple(draw(st.lists(CLAIMS, max_size=2))),
                ),
                ready=draw(st.booleans()),
                leaving=draw(st.booleans()),
            )
        )
    return tuple(found)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(
    rounds=st.lists(st.tuples(workers(), st.frozensets(UIDS, max_size=2)), min_size=1, max_size=5),
    step=st.sampled_from([1, 2]),
    shrink=st.booleans(),
)
def test_it_is_total_and_settles(
    rounds: list[tuple[tuple[Candidate, ...], frozenset[str]]], step: int, shrink: bool
) -> None:
    """Whatever is reported: no exception, the invariants hold, and the same input soon asks for nothing more."""
    rules = MembershipRules(replicas=4, min_replicas=step, replica_step=step, may_shrink=shrink)
    membership: Membership | None = None
    for found, gone in rounds:
        for _ in range(12):
            verdict = decide(observed(membership, *found, gone=gone, rules=rules), NOW)
            if isinstance(verdict, Wait):
                break
            before = membership or Membership()
            check_invariants(before, verdict.membership)
            assert verdict.membership.revision == before.revision + 1
            membership = verdict.membership
        else:
            pytest.fail(f"it does not settle: {verdict}")
