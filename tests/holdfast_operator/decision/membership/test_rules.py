"""When a generation is published, and with whom."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import pytest
from memberships import (
    NOW,
    RULES,
    attempt,
    candidate,
    claim,
    generation,
    observed,
    running,
    seconds,
    silent,
    worker,
)

from holdfast_operator.api.reasons import MembershipReason
from holdfast_operator.api.status import EarlierGeneration, Membership
from holdfast_operator.decision.membership.candidates import (
    MembershipRules,
    Publication,
    Wait,
)
from holdfast_operator.decision.membership.rules import check_invariants, decide


def published(*args: object, now: datetime = NOW, **kwargs: object) -> Publication:
    verdict = decide(observed(*args, **kwargs), now)  # type: ignore[arg-type]
    assert isinstance(verdict, Publication), verdict
    return verdict


def held(*args: object, now: datetime = NOW, **kwargs: object) -> Wait:
    verdict = decide(observed(*args, **kwargs), now)  # type: ignore[arg-type]
    assert isinstance(verdict, Wait), verdict
    return verdict


def same_generation(before: Membership, *args: object, **kwargs: object) -> Publication | Wait:
    """No new generation; what is learnt may be recorded."""
    verdict = decide(observed(before, *args, **kwargs), NOW)  # type: ignore[arg-type]
    if isinstance(verdict, Publication):
        assert verdict.membership.generation == before.generation
    return verdict


def uids(publication: Publication) -> list[str]:
    return [m.pod_uid for m in publication.membership.members]


# The first generation


def test_the_first_generation_lists_the_whole_gang() -> None:
    verdict = published(None, worker("a"), worker("b"), worker("c"))
    assert verdict.reason is MembershipReason.FIRST_GANG
    assert (verdict.membership.generation, verdict.membership.publication) == (1, "fresh")
    assert [(m.index, m.pod_uid) for m in verdict.membership.members] == [(0, "a"), (1, "b"), (2, "c")]


def test_it_waits_for_the_whole_gang_and_then_begins_with_enough() -> None:
    two = [replace(worker(uid), ready_at=NOW) for uid in "ab"]
    assert "2 of 3 workers are ready" in held(None, *two).message
    assert uids(published(None, *two, now=NOW + seconds(31))) == ["a", "b"]


def test_a_job_that_may_not_shrink_waits_for_all() -> None:
    rules = replace(RULES, may_shrink=False)
    assert held(None, worker("a"), worker("b"), rules=rules).reason is MembershipReason.WAITING_FOR_WORKERS


def test_a_pod_that_is_not_ready_or_leaves_is_not_listed() -> None:
    leaving = replace(worker("c"), leaving=True)
    unready = silent("d")
    assert uids(published(None, worker("a"), worker("b"), leaving, unready)) == ["a", "b"]


# Records


def test_started_attempt_is_recorded_and_never_decreases() -> None:
    before = generation(1, "a", "b")
    world = running(1, 3, "a", "b")
    verdict = published(before, worker("a", world), worker("b"), rules=replace(RULES, replicas=2))
    assert verdict.membership.active == attempt(1, 3)
    assert verdict.membership.revision == 11
    again = published(verdict.membership, worker("a", highest_claim=claim(1, 3)), worker("b"))
    assert again.membership.active == attempt(1, 3)
    assert again.membership.claims == (claim(1, 3),)


def test_nothing_new_writes_nothing() -> None:
    before = generation(1, "a", "b", "c", active=attempt(1, 1))
    world = running(1, 1, "a", "b", "c")
    verdict = held(before, *(worker(uid, world) for uid in "abc"))
    assert verdict.reason is MembershipReason.UP_TO_DATE


def test_previous_is_pruned_below_the_active_generation() -> None:
    previous = (EarlierGeneration(generation=1, publication="p1", members=("a", "x")),)
    before = generation(2, "a", "b", "c", active=attempt(1, 1), previous=previous, gone=("x",))
    verdict = published(before, worker("a", running(2, 1, "a", "b", "c")), worker("b"), worker("c"))
    assert verdict.membership.previous == ()
    assert verdict.membership.gone == ()


# The next generation


def test_a_replacement_joins_at_the_lost_members_index() -> None:
    before = generation(1, "a", "b", "c", active=attempt(1, 2))
    world = running(1, 2, "a", "c")
    verdict = published(before, worker("a", world), worker("c", world), worker("d"), gone=frozenset({"b"}))
    assert verdict.reason is MembershipReason.WORKER_JOINED
    assert [(m.index, m.pod_uid) for m in verdict.membership.members] == [(0, "a"), (1, "d"), (2, "c")]
    assert verdict.membership.previous == (
        EarlierGeneration(generation=1, publication="p1", members=("a", "b", "c")),
    )
    assert verdict.membership.gone == ("b",)


def test_no_generation_for_a_shrink_of_the_launchers() -> None:
    before = generation(1, "a", "b", "c", active=attempt(1, 2))
    world = running(1, 2, "a", "c")
    workers = (worker("a", world), worker("c", world))
    assert same_generation(before, *workers, silent("b")).reason is MembershipReason.WAITING_FOR_WORKERS
    assert same_generation(before, *workers, gone=frozenset({"b"})).reason is MembershipReason.WAITING_FOR_WORKERS


def test_silent_member_that_trains_keeps_its_place() -> None:
    before = generation(1, "a", "b", "c", active=attempt(1, 1))
    world = running(1, 1, "a", "b", "c")
    assert isinstance(held(before, worker("a", world), worker("b", world), silent("c"), worker("d")), Wait)


def test_of_two_the_survivor_goes_on_when_it_has_lost_the_other() -> None:
    before = generation(1, "a", "b", active=attempt(1, 1))
    rules = replace(RULES, replicas=2)
    waiting = worker("a", lost_members=frozenset({"b"}))
    verdict = published(before, waiting, silent("b"), rules=rules)
    assert verdict.reason is MembershipReason.SURVIVORS_CONTINUE
    assert uids(verdict) == ["a"]


def test_two_members_that_train_together_do_not_shrink() -> None:
    """The survivor still reports a world with the other member."""
    before = generation(1, "a", "b", active=attempt(1, 1))
    world = running(1, 1, "a", "b")
    assert held(before, worker("a", world), silent("b")).reason is MembershipReason.UP_TO_DATE


def test_silent_pod_is_fenced_before_its_replacement_trains() -> None:
    before = generation(1, "a", active=attempt(1, 1))
    rules = replace(RULES, replicas=1)
    verdict = held(before, silent("a"), worker("b"), rules=rules)
    assert verdict.reason is MembershipReason.AWAITING_FENCE
    assert "a of generation 1 may still be running" in verdict.message
    assert "node.kubernetes.io/out-of-service" in verdict.message
    assert uids(published(before, worker("b"), gone=frozenset({"a"}), rules=rules)) == ["b"]


def test_generation_that_never_started_counts_for_fencing() -> None:
    previous = (EarlierGeneration(generation=1, publication="p1", members=("a", "b", "c")),)
    before = generation(2, "a", "d", "e", active=attempt(1, 1), previous=previous)
    verdict = same_generation(before, worker("a"), worker("f"), worker("g"), gone=frozenset({"b", "c"}))
    assert verdict.reason is MembershipReason.AWAITING_FENCE
    assert "d, e of generation 2" in verdict.message


def test_returned_majority_is_listed_before_new_members() -> None:
    """The majority belongs to the last active generation."""
    previous = (EarlierGeneration(generation=1, publication="p1", members=("a", "b", "c")),)
    before = generation(2, "a", "d", "e", active=attempt(1, 1), previous=previous)
    verdict = published(before, *(worker(uid) for uid in "abc"), gone=frozenset({"d", "e"}))
    assert verdict.reason is MembershipReason.WORKERS_RETURNED
    assert sorted(uids(verdict)) == ["a", "b", "c"]


def test_all_crashed_and_replaced() -> None:
    before = generation(1, "a", "b", "c", active=attempt(1, 1))
    verdict = published(before, *(worker(uid) for uid in "def"), gone=frozenset("abc"))
    assert sorted(uids(verdict)) == ["d", "e", "f"]


def test_a_scale_down_is_published_when_the_drained_are_gone() -> None:
    before = generation(1, "a", "b", "c", active=attempt(1, 2))
    rules = replace(RULES, replicas=2)
    world = running(1, 2, "a", "b")
    going = replace(worker("c"), leaving=True)
    assert isinstance(held(before, worker("a", world), worker("b", world), going, rules=rules), Wait)
    verdict = published(before, worker("a", world), worker("b", world), gone=frozenset({"c"}), rules=rules)
    assert verdict.reason is MembershipReason.SCALED_DOWN
    assert uids(verdict) == ["a", "b"]


def test_growth_keeps_to_the_step() -> None:
    before = generation(1, "a", "b", active=attempt(1, 1))
    rules = MembershipRules(replicas=4, min_replicas=2, replica_step=2)
    world = running(1, 1, "a", "b")
    two = (worker("a", world), worker("b", world))
    assert isinstance(held(before, *two, worker("c"), rules=rules), Wait)
    assert uids(published(before, *two, worker("c"), worker("d"), rules=rules)) == ["a", "b", "c", "d"]


STEPS = MembershipRules(replicas=4, min_replicas=2, replica_step=2)


def test_three_of_four_continue_as_two_with_steps_of_two() -> None:
    """The launchers alone find no majority."""
    before = generation(1, "a", "b", "c", "d", active=attempt(1, 1))
    waiting = [worker(uid, lost_members=frozenset({"d"})) for uid in "abc"]
    verdict = published(before, *waiting, silent("d"), rules=STEPS)
    assert verdict.reason is MembershipReason.SURVIVORS_CONTINUE
    assert uids(verdict) == ["a", "b", "c"], "who of them stands by is for the launchers to say"
    after, trained = verdict.membership, running(2, 1, "a", "b", publication="fresh")
    two = (worker("a", trained), worker("b", trained))
    same_generation(after, *two, worker("c"), rules=STEPS)
    assert uids(published(after, *two, worker("c"), worker("e"), rules=STEPS)) == ["a", "b", "c", "e"]


def test_five_of_six_go_on_as_four_by_themselves_in_steps_of_two() -> None:
    before = generation(1, *"abcdef", active=attempt(1, 1))
    waiting = [worker(uid, lost_members=frozenset({"f"})) for uid in "abcde"]
    verdict = same_generation(before, *waiting, silent("f"), rules=replace(STEPS, replicas=6))
    assert verdict.message == "1 worker missing"


@pytest.mark.parametrize("rules", [replace(STEPS, may_shrink=False), replace(STEPS, min_replicas=4)])
def test_three_of_four_wait_where_two_may_not_train(rules: MembershipRules) -> None:
    before = generation(1, "a", "b", "c", "d", active=attempt(1, 1))
    waiting = [worker(uid, lost_members=frozenset({"d"})) for uid in "abc"]
    assert same_generation(before, *waiting, silent("d"), rules=rules).reason is MembershipReason.WAITING_FOR_WORKERS


WAITS = MembershipRules(replicas=3, min_replicas=1, shrink_after=seconds(60))


def test_only_starting_workers_are_waited_for() -> None:
    """Workers without a node are not waited for."""
    w0, w1 = (replace(worker(uid), ready_at=NOW) for uid in ("w0", "w1"))
    starting = candidate("w2")
    assert held(None, w0, w1, starting).reason is MembershipReason.WAITING_FOR_WORKERS
    assert held(None, w0, w1).reason is MembershipReason.WAITING_FOR_WORKERS, (
        "the third has no pod yet: it may be placed at once"
    )
    verdict = published(None, w0, w1, replace(starting, unplaced=True))
    assert uids(verdict) == ["w0", "w1"]
    assert "unschedulable" in verdict.message


def test_survivors_wait_for_shrink_after_seconds() -> None:
    before = generation(1, "w0", "w1", "w2", active=attempt(1, 1))
    left = worker("w0", lost_members=frozenset({"w1", "w2"}))
    seen = replace(observed(before, left, rules=WAITS, gone=frozenset({"w1", "w2"})), stalled_since=NOW)
    assert decide(seen, NOW).reason is MembershipReason.WAITING_FOR_WORKERS
    assert decide(seen, NOW + seconds(59)).reason is MembershipReason.WAITING_FOR_WORKERS
    after = decide(seen, NOW + seconds(60))
    assert isinstance(after, Publication)
    assert after.reason is MembershipReason.SURVIVORS_CONTINUE


def test_first_replacement_waits_for_the_others() -> None:
    """The wait ends when all replacements are ready."""
    before = generation(1, "w0", "w1", "w2", active=attempt(1, 1))
    gone = frozenset({"w0", "w1"})
    seen = replace(
        observed(before, worker("w2"), worker("w3"), rules=WAITS, gone=gone), stalled_since=NOW - seconds(10)
    )
    assert decide(seen, NOW).reason is MembershipReason.WAITING_FOR_WORKERS
    all_there = replace(seen, workers=(*seen.workers, worker("w4")))
    assert decide(all_there, NOW).reason is MembershipReason.WORKER_JOINED
    assert decide(seen, NOW + seconds(51)).reason is MembershipReason.WORKER_JOINED


def test_nobody_joins_in_the_middle_of_a_checkpoint() -> None:
    world = running(1, 1, "w0", "w1")
    before = generation(1, "w0", "w1", active=attempt(1, 1))
    busy = worker("w1", world, checkpointing=True)
    assert "end of a checkpoint" in held(before, worker("w0", world), busy, worker("w2")).message
    assert (
        published(before, worker("w0", world), worker("w1", world), worker("w2")).reason
        is MembershipReason.WORKER_JOINED
    )
    elsewhere = worker("w2", checkpointing=True)
    assert (
        published(before, worker("w0", world), worker("w1", world), elsewhere).reason
        is MembershipReason.WORKER_JOINED
    )


def test_fixed_world_waits_for_every_replacement() -> None:
    rules = MembershipRules(replicas=3, min_replicas=1, may_shrink=False)
    before = generation(1, "w0", "w1", "w2", active=attempt(1, 1))
    gone = frozenset({"w1", "w2"})
    assert (
        same_generation(before, worker("w0"), worker("w3"), gone=gone, rules=rules).reason
        is MembershipReason.WAITING_FOR_WORKERS
    )
    all_there = published(before, worker("w0"), worker("w3"), worker("w4"), gone=gone, rules=rules)
    assert len(uids(all_there)) == 3
    larger = replace(rules, replicas=5)
    grown = published(before, *(worker(f"w{n}") for n in range(4)), rules=larger)
    assert len(uids(grown)) == 4, "growth need not wait for all of it"


def test_new_members_join_together_after_a_short_wait() -> None:
    before = generation(1, "a", "b", "c", active=attempt(1, 2))
    world = running(1, 2, "a")
    first, starting = replace(worker("d"), ready_at=NOW), candidate("e")
    workers, gone = (worker("a", world), first, starting), frozenset("bc")
    assert "waiting briefly" in same_generation(before, *workers, gone=gone).message
    assert uids(published(before, *workers, gone=gone, now=NOW + seconds(6))) == ["a", "d"]
    both = (worker("a", world), first, replace(worker("e"), ready_at=NOW + seconds(1)))
    assert uids(published(before, *both, gone=gone, now=NOW + seconds(2))) == ["a", "d", "e"]


# What others wrote


def test_a_foreign_claim_is_overtaken_and_known() -> None:
    before = generation(1, "a", "b", "c")
    old = claim(7, 2, "old-job")
    verdict = published(before, worker("a", foreign_claims=(old,)), worker("b"), worker("c"))
    assert verdict.reason is MembershipReason.FOREIGN_CLAIMS
    assert verdict.membership.generation == 8
    assert old in verdict.membership.claims
    assert "job old-job" in verdict.message
    after = verdict.membership
    assert [(entry.generation, entry.last) for entry in after.previous] == [(1, 1), (2, 7)]
    assert (
        held(after, worker("a", foreign_claims=(old,)), worker("b"), worker("c")).reason
        is MembershipReason.UP_TO_DATE
    )


def test_a_foreign_claim_however_high_costs_one_entry() -> None:
    before = generation(1, "a", "b", "c")
    verdict = published(before, worker("a", foreign_claims=(claim(10**12, 1, "old-job"),)), worker("b"), worker("c"))
    assert verdict.membership.generation == 10**12 + 1
    assert len(verdict.membership.previous) == 2


def test_reports_correct_a_status_from_an_old_backup() -> None:
    before = generation(2, "a", "b", "c", active=attempt(2, 1))
    world = running(4, 1, "a", "b", "d")
    workers = [worker(uid, world, accepted=attempt(4, 1), started=attempt(4, 1)) for uid in "abd"]
    verdict = published(before, *workers)
    assert verdict.reason is MembershipReason.GENERATION_CONFLICT
    assert verdict.membership.generation == 5
    assert verdict.membership.active == attempt(4, 1)
    assert [(p.generation, p.members) for p in verdict.membership.previous] == [(4, ("a", "b", "d"))]
    assert sorted(uids(verdict)) == ["a", "b", "d"]


def test_a_lost_status_is_rebuilt_above_what_workers_report() -> None:
    world = running(4, 1, "a", "b")
    verdict = published(None, worker("a", world, accepted=attempt(4, 1)), worker("b", world), worker("c"))
    assert verdict.membership.generation == 5


def test_second_publication_of_a_generation_is_a_conflict() -> None:
    before = generation(
        2,
        "a",
        "b",
        "c",
        active=attempt(1, 1),
        previous=(EarlierGeneration(generation=1, publication="p1", members=("a", "b", "c")),),
    )
    twin = running(2, 1, "a", "b", publication="twin")
    verdict = published(before, worker("a", twin), worker("b", twin), worker("c"))
    assert verdict.reason is MembershipReason.GENERATION_CONFLICT
    assert verdict.membership.generation == 3


def test_a_generation_that_a_worker_knows_twice_is_overtaken() -> None:
    before = generation(2, "a", "b", "c", active=attempt(2, 1))
    verdict = published(before, worker("a", conflict=2), worker("b"), worker("c"))
    assert verdict.reason is MembershipReason.GENERATION_CONFLICT
    assert verdict.membership.generation == 3
    assert same_generation(verdict.membership, worker("a", conflict=2), worker("b"), worker("c"))


@pytest.mark.parametrize(
    "after",
    [
        Membership(generation=1, active=attempt(2, 1)),
        Membership(generation=3, active=attempt(1, 9)),
        Membership(generation=4, active=attempt(2, 1)),
    ],
)
def test_the_invariants_are_asserted(after: Membership) -> None:
    before = Membership(
        generation=3, active=attempt(2, 1), previous=(EarlierGeneration(generation=2, publication="", members=()),)
    )
    with pytest.raises(AssertionError):
        check_invariants(before, after)
