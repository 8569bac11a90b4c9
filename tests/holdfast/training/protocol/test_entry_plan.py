"""The state from which a new world continues, its claim, and the rank that leaves because of its model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.core.attempt import AttemptId
from holdfast.training.data import SampleRange
from holdfast.training.guards.non_finite import NonFiniteSteps, RollBack
from holdfast.training.guards.out_of_memory import OutOfMemory
from holdfast.training.protocol.entry_plan import EntryReport, decide, odd_model
from holdfast.training.protocol.random_streams import Seeds
from holdfast.training.protocol.step_commit import RankState, invalidated, prepared, voted

A, B, C = AttemptId(1, 1), AttemptId(1, 2), AttemptId(1, 3)
NEW = EntryReport(rank_state=RankState(), outline="m", seeds=Seeds(python=1, numpy=2, cpu=3, cuda=4))
HELD = replace(NEW, rank_state=RankState(step=7, voted=A, synced=A), claimed=1, saved_step=4, trained=A, shard=0)
IN_DOUBT = replace(HELD, rank_state=voted(prepared(HELD.rank_state, A), A))


def test_plan_without_state_in_memory_has_no_survivor_or_claim() -> None:
    plan = decide([NEW, NEW], B, shards=None)
    assert (plan.resolution.donor, plan.resolution.newcomers) == (None, (0, 1))
    assert (plan.assignment, plan.claimed, plan.saved_step) == (None, False, 0)
    assert not plan.depends_on_newest, "the newest checkpoint is restored in any case"


def test_plan_has_the_seeds_of_all_ranks_in_order() -> None:
    other = replace(NEW, seeds=replace(NEW.seeds, cpu=5))
    assert decide([NEW, other], B, shards=None).seeds.ranks == (NEW.seeds, other.seeds)


def test_survivors_continue_under_the_claim_of_their_generation() -> None:
    plan = decide([HELD, NEW, HELD], B, shards=None)
    assert (plan.resolution.survivors, plan.resolution.newcomers, plan.resolution.step) == ((0, 2), (1,), 7)
    assert plan.claimed
    assert not plan.depends_on_newest


def test_a_prepared_step_that_every_survivor_has_is_applied() -> None:
    plan = decide([IN_DOUBT, NEW, IN_DOUBT], B, shards=None)
    assert (plan.resolution.apply, plan.resolution.step) == (True, 8)


@pytest.mark.parametrize(
    ("reports", "attempt_id"),
    [
        ([replace(HELD, claimed=None), NEW], B),
        ([HELD], AttemptId(2, 1)),
        ([HELD, replace(NEW, trained=B)], C),
    ],
    ids=["no survivor knows the claim", "another generation", "a launcher had ranks in a later attempt"],
)
def test_unclaimed_memory_yields_to_a_newer_checkpoint(reports: list[EntryReport], attempt_id: AttemptId) -> None:
    plan = decide(reports, attempt_id, shards=None)
    assert (plan.resolution.donor, plan.claimed, plan.depends_on_newest) == (0, False, True)
    older = decide(reports, attempt_id, shards=None, newest=A)
    assert older == plan
    newer = decide(reports, attempt_id, shards=None, newest=B)
    assert (newer.resolution.donor, newer.claimed, newer.saved_step) == (None, False, 0)


def test_a_step_counts_as_durable_if_all_survivors_know_it_to_be() -> None:
    assert decide([HELD, replace(HELD, saved_step=7), NEW], B, shards=None).saved_step == 4


def test_shards_in_memory_are_kept_where_they_are() -> None:
    plan = decide([replace(HELD, shard=1), replace(HELD, shard=0)], B, shards=2)
    assert plan.assignment is not None
    assert (plan.assignment.shards, plan.resolution.survivors) == ((1, 0), (0, 1))


def test_without_one_of_the_shards_no_state_in_memory_counts() -> None:
    plan = decide([replace(HELD, shard=1), replace(NEW, shard=0)], B, shards=2)
    assert (plan.resolution.donor, plan.claimed) == (None, False)
    assert plan.assignment is not None


BACK = RollBack(
    before=5,
    record=NonFiniteSteps(skipped=2, roll_backs=1, reached=6),
    skipped=(SampleRange(begin=16, end=24),),
    reason="the gradients of steps 5 to 6 were not finite",
)
ROLLS_BACK = replace(HELD, rank_state=invalidated(HELD.rank_state), roll_back=BACK)


@pytest.mark.parametrize("reports", [[ROLLS_BACK, ROLLS_BACK], [NEW, ROLLS_BACK], [ROLLS_BACK, NEW]])
def test_roll_back_that_any_rank_knows_limits_the_restore_of_all(reports: list[EntryReport]) -> None:
    plan = decide(reports, B, shards=None)
    assert (plan.resolution.donor, plan.roll_back) == (None, BACK)


def test_roll_back_gives_way_to_a_rank_that_still_has_its_state() -> None:
    plan = decide([ROLLS_BACK, HELD], B, shards=None)
    assert (plan.resolution.donor, plan.roll_back) == (1, None)


def test_world_without_a_roll_back_restores_any_checkpoint() -> None:
    assert decide([NEW, NEW], B, shards=None).roll_back is None


FULL = OutOfMemory(times=2, step=7, micro_batch=4, requested=8)
WAS_FULL = replace(HELD, out_of_memory=FULL)


@pytest.mark.parametrize("other", [NEW, HELD, IN_DOUBT, ROLLS_BACK, WAS_FULL])
def test_all_ranks_adopt_the_newest_record_of_a_full_memory(other: EntryReport) -> None:
    before = replace(other, out_of_memory=OutOfMemory(times=1, step=7))
    for reports in ([WAS_FULL, other], [other, WAS_FULL], [WAS_FULL, before], [before, WAS_FULL]):
        assert decide(reports, B, shards=None).out_of_memory == FULL


@pytest.mark.parametrize("report", [NEW, HELD, IN_DOUBT, ROLLS_BACK, WAS_FULL])
def test_a_report_travels_as_json(report: EntryReport) -> None:
    assert EntryReport.from_json(report.to_json()) == report


OTHER_NEW, OTHER_HELD = replace(NEW, outline="x"), replace(HELD, outline="x")


@pytest.mark.parametrize(
    ("reports", "leave"),
    [
        ([NEW, NEW], {}),
        ([HELD, NEW], {}),
        ([NEW, OTHER_NEW], {0: 0, 1: 0}),
        ([OTHER_NEW, HELD, NEW], {0: 1}),
        ([HELD, OTHER_HELD], {1: 0}),
    ],
    ids=["alike", "alike and trained", "none has trained", "one joins with another model", "two have trained"],
)
def test_a_rank_whose_model_differs_leaves(reports: list[EntryReport], leave: dict[int, int]) -> None:
    assert {
        rank: reference for rank in range(len(reports)) if (reference := odd_model(reports, rank)) is not None
    } == leave
