"""The assignment of shards to ranks, and the choice of a state that is complete only with all of its shards."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format.shard_layout import Holding, TensorSpec, held_by, rows
from holdfast.core.attempt import AttemptId
from holdfast.core.errors import UsageError
from holdfast.training.protocol.shard_assignment import assign, resolve
from holdfast.training.protocol.step_commit import PreparedStep, RankState

FIRST, SECOND, THIRD = AttemptId(1, 1), AttemptId(1, 2), AttemptId(1, 3)
NEWCOMER = RankState()


def member(
    step: int = 7, *, voted: AttemptId | None = FIRST, synced: AttemptId = FIRST, doubts: bool = False
) -> RankState:
    prepared_step = PreparedStep(attempt_id=synced, step=step) if doubts else None
    return RankState(step=step, voted=voted, synced=synced, prepared_step=prepared_step)


# Assignment


def test_a_first_world_is_dealt_in_order_of_ranks() -> None:
    assigned = assign([None] * 6, 2)
    assert assigned.shards == (0, 1, 0, 1, 0, 1)
    assert [assigned.shard_group(rank) for rank in range(6)] == [(0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5)]
    assert assigned.peers(3) == (1, 3, 5)


def test_a_newcomer_gets_the_shard_that_is_missing() -> None:
    assert assign([1, None, 0, 1], 2).shards == (1, 0, 0, 1)


def test_orphans_of_two_replicas_make_one() -> None:
    assigned = assign([1, 0], 2)
    assert assigned.shards == (1, 0)
    assert assigned.shard_group(0) == assigned.shard_group(1) == (1, 0)


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_every_replica_is_whole_and_nobody_moves_without_need(size: int, replicas: int, data: st.DataObject) -> None:
    world = size * replicas
    held = data.draw(st.lists(st.one_of(st.none(), st.integers(0, size - 1)), min_size=world, max_size=world))
    assigned = assign(held, size)
    for rank in range(world):
        assert [assigned.shards[mate] for mate in assigned.shard_group(rank)] == list(range(size))
        assert rank in assigned.shard_group(rank)
    for shard in range(size):
        kept = sum(assigned.shards[rank] == shard for rank in range(world) if held[rank] == shard)
        assert kept == min(replicas, held.count(shard))


def test_world_that_is_no_multiple_of_replicas_is_refused() -> None:
    """The message names the options to set."""
    with pytest.raises(UsageError, match=r"a world of 3 .* replicas of 2: .*--replica-step .*replicaStep"):
        assign([None] * 3, 2)


@given(st.integers(0, 12), st.integers(1, 5))
def test_rows_are_cut_as_torch_cuts_them(length: int, size: int) -> None:
    chunks = [len(chunk) for chunk in torch.zeros(length).chunk(size)] if length else []
    cut = [rows(length, size, shard) for shard in range(size)]
    assert [end - begin for begin, end in cut] == chunks + [0] * (size - len(chunks))


@given(st.integers(1, 3), st.integers(1, 3), st.lists(st.integers(0, 9), max_size=6))
def test_a_commit_has_every_row_once(size: int, replicas: int, lengths: list[int]) -> None:
    specs = [TensorSpec(name=f"t{i}", dtype="F32", shape=(length, 2)) for i, length in enumerate(lengths)]
    shards = assign([None] * (size * replicas), size).shards
    holding = Holding(names=frozenset(spec.name for spec in specs), size=size, shards=shards)
    pieces = [piece for rank in range(len(shards)) for piece in held_by(specs, holding, rank)]
    for spec in specs:
        found = sorted((piece.start[0], piece.start[0] + piece.shape[0]) for piece in pieces if piece.spec is spec)
        assert [row for begin, end in found for row in range(begin, end)] == list(range(spec.shape[0]))


# Choice of the state


def test_a_lost_shard_comes_from_whoever_has_it() -> None:
    resolution, assigned = resolve([member(), member(), member(), NEWCOMER], [0, 1, 0, 1], 2)
    assert (resolution.survivors, resolution.newcomers, assigned.shards) == ((0, 1, 2), (3,), (0, 1, 0, 1))


def test_step_that_all_remaining_ranks_prepared_is_applied() -> None:
    resolution, _ = resolve([member(doubts=True), member(8), NEWCOMER, member(doubts=True)], [0, 1, 0, 1], 2)
    assert (resolution.apply, resolution.step, resolution.survivors) == (True, 8, (0, 1, 3))


def test_who_holds_a_shard_too_many_takes_over_another() -> None:
    resolution, assigned = resolve([member()] * 4, [1, 1, 0, 1], 2)
    assert assigned.shards == (1, 1, 0, 0)
    assert (resolution.survivors, resolution.newcomers) == ((0, 1, 2), (3,))


def test_a_shard_that_nobody_has_sends_all_to_the_checkpoint() -> None:
    resolution, assigned = resolve([member(), NEWCOMER, member(), NEWCOMER], [0, 1, 0, 1], 2)
    assert resolution.donor is None
    assert (resolution.newcomers, assigned.shards) == ((0, 1, 2, 3), (0, 1, 0, 1))
    assert "shard 1" in resolution.message


def test_a_world_of_newcomers_starts_without_a_state() -> None:
    resolution, assigned = resolve([NEWCOMER] * 4, [None] * 4, 2)
    assert (resolution.donor, resolution.newcomers, assigned.shards) == (None, (0, 1, 2, 3), (0, 1, 0, 1))
    assert resolution.message == "no rank has a state in memory"


def test_holder_without_a_vote_proves_that_no_step_was_made() -> None:
    """The holder is the only one of its shard. The step is the first of the attempt."""
    voted = member(voted=SECOND, synced=SECOND, doubts=True)
    behind = member(voted=FIRST, synced=SECOND)
    resolution, assigned = resolve([voted, NEWCOMER, voted, behind], [0, 0, 0, 1], 2)
    assert (resolution.survivors, resolution.apply, resolution.step, resolution.voted) == (
        (0, 2, 3),
        False,
        7,
        SECOND,
    )
    assert assigned.shards == (0, 1, 0, 1)


def test_an_older_state_is_no_stand_in_for_a_shard() -> None:
    new = member(9, voted=THIRD, synced=THIRD)
    resolution, _ = resolve([new, new, member(7), member(7)], [0, 0, 1, 1], 2)
    assert resolution.donor is None
